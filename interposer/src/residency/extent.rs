//! What a copy of rows touches: from its first byte to its last.

use shim_ffi::*;

use super::spans::Spans;

/// Where in a pitched allocation a copy lies.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Extent {
    pub(super) x: u64,
    pub(super) y: u64,
    pub(super) z: u64,
    /// Bytes from a row to the next, and rows from a slice to the next; 0: as much as there is.
    pub(super) pitch: u64,
    pub(super) rows: u64,
    pub(super) width: u64,
    pub(super) height: u64,
    /// Slices but the first.
    pub(super) deeper: u64,
}

impl Extent {
    /// From its first byte to its last, with what lies between its rows.
    pub(super) fn note(&self, spans: &mut Spans, base: u64) {
        if self.width == 0 || self.height == 0 {
            return;
        }
        let pitch = self.pitch.max(self.width);
        let slice = self.rows.max(self.height).saturating_mul(pitch);
        let at = |z: u64, y: u64, x: u64| {
            let row = z
                .saturating_mul(slice)
                .saturating_add(y.saturating_mul(pitch));
            row.saturating_add(x)
        };
        let bytes = at(self.deeper, self.height - 1, self.width);
        spans.copied(base.saturating_add(at(self.z, self.y, self.x)), bytes);
    }
}

fn linear(kind: CUmemorytype) -> bool {
    matches!(
        kind,
        CUmemorytype::CU_MEMORYTYPE_DEVICE | CUmemorytype::CU_MEMORYTYPE_UNIFIED
    )
}

/// A plane is a volume of one slice.
pub(super) fn note_plane(spans: &mut Spans, of: &CUDA_MEMCPY2D) {
    let volume = CUDA_MEMCPY3D {
        srcXInBytes: of.srcXInBytes,
        srcY: of.srcY,
        srcMemoryType: of.srcMemoryType,
        srcDevice: of.srcDevice,
        srcPitch: of.srcPitch,
        dstXInBytes: of.dstXInBytes,
        dstY: of.dstY,
        dstMemoryType: of.dstMemoryType,
        dstDevice: of.dstDevice,
        dstPitch: of.dstPitch,
        WidthInBytes: of.WidthInBytes,
        Height: of.Height,
        Depth: 1,
        ..CUDA_MEMCPY3D::default()
    };
    note_volume(spans, &volume);
}

/// The two structures have the same names.
macro_rules! volumes {
    ($($note:ident $structure:ident)*) => {$(
        pub(super) fn $note(spans: &mut Spans, of: &$structure) {
            let size = Extent {
                width: of.WidthInBytes as u64,
                height: of.Height as u64,
                deeper: (of.Depth as u64).saturating_sub(1),
                ..Extent::default()
            };
            if linear(of.srcMemoryType) {
                let from = Extent {
                    x: of.srcXInBytes as u64,
                    y: of.srcY as u64,
                    z: of.srcZ as u64,
                    pitch: of.srcPitch as u64,
                    rows: of.srcHeight as u64,
                    ..size
                };
                from.note(spans, of.srcDevice.0);
            }
            if linear(of.dstMemoryType) {
                let to = Extent {
                    x: of.dstXInBytes as u64,
                    y: of.dstY as u64,
                    z: of.dstZ as u64,
                    pitch: of.dstPitch as u64,
                    rows: of.dstHeight as u64,
                    ..size
                };
                to.note(spans, of.dstDevice.0);
            }
        }
    )*};
}
volumes! {
    note_volume CUDA_MEMCPY3D
    note_peer_volume CUDA_MEMCPY3D_PEER
}
