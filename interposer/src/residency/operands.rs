//! Which addresses a submission of the program's names, for [`last_use`].
//!
//! Copies and memsets say them in their arguments, kernels among their [`parameters`]. All of it is
//! read after the driver's call has succeeded: what the driver has just read is there, and what it
//! refuses is not looked at.
//!
//! Not looked into: what is captured, graphs and their launches, `cuLaunchGrid` and its like,
//! launches on several devices at once, batches of copies in three dimensions, decompression, and
//! what CUDA 2 had (memory of 32-bit addresses does not move).

use shim_ffi::*;

use super::extent::{self, Extent};
use super::last_use;
use super::parameters;
use super::spans::Spans;
use crate::gate::capture;
use crate::ground::errno::Preserve;

fn word(args: &[usize], at: u8) -> usize {
    args.get(usize::from(at)).copied().unwrap_or(0)
}

/// Ranges (start, bytes) of a call that touches nothing else; empty: it is a kernel's launch, whose
/// arguments name none. `None`: what it touches is more, or not known here.
pub(super) fn linear(operands: Operands, args: &[usize]) -> Option<[(u64, u64); 2]> {
    let arg = |at: u8| word(args, at) as u64;
    match operands {
        Operands::Kernel { .. } => Some([(0, 0); 2]),
        Operands::One { at, count, unit } => Some([
            (arg(at), arg(count).saturating_mul(u64::from(unit))),
            (0, 0),
        ]),
        Operands::Two { to, from, bytes } => Some([(arg(to), arg(bytes)), (arg(from), arg(bytes))]),
        _ => None,
    }
}

/// After a submission of the program's, in a process whose memory can be moved and inside the
/// quiesce gate.
#[inline(always)]
pub(crate) fn used(operands: Operands, args: &[usize], result: CUresult) {
    match operands {
        Operands::Unknown => {}
        Operands::Kernel {
            function,
            parameters,
            extra,
        } => {
            if last_use::looking() && result.is_ok() {
                let arg = |at: u8| word(args, at);
                let extra = extra.map_or(0, arg);
                parameters::note(arg(function), arg(parameters), extra);
            }
        }
        _ => {
            if result.is_ok() {
                copy(operands, args);
            }
        }
    }
}

#[inline(never)]
fn copy(operands: Operands, args: &[usize]) {
    let _ = std::panic::catch_unwind(|| {
        if !capture::any() {
            let _errno = Preserve::new();
            // SAFETY: the driver has just carried out this call of these arguments.
            last_use::note(|spans| unsafe { note_copy(spans, operands, args) });
        }
    });
}

/// # Safety
/// Arguments that are structures or arrays can be read, as the driver reads them.
unsafe fn note_copy(spans: &mut Spans, operands: Operands, args: &[usize]) {
    let arg = |at: u8| word(args, at) as u64;
    match operands {
        Operands::Unknown | Operands::Kernel { .. } => {}
        Operands::One { at, count, unit } => {
            spans.copied(arg(at), arg(count).saturating_mul(u64::from(unit)));
        }
        Operands::Two { to, from, bytes } => {
            spans.copied(arg(from), arg(bytes));
            spans.copied(arg(to), arg(bytes));
        }
        Operands::Rows { unit } => {
            let rows = Extent {
                pitch: arg(1),
                width: arg(3).saturating_mul(u64::from(unit)),
                height: arg(4),
                ..Extent::default()
            };
            rows.note(spans, arg(0));
        }
        Operands::Plane => {
            // SAFETY: the caller's promise; null is refused by the driver, and looked for all the
            // same.
            let of = unsafe { (arg(0) as *const CUDA_MEMCPY2D).as_ref() };
            if let Some(of) = of {
                extent::note_plane(spans, of);
            }
        }
        Operands::Volume => {
            // SAFETY: as above.
            let of = unsafe { (arg(0) as *const CUDA_MEMCPY3D).as_ref() };
            if let Some(of) = of {
                extent::note_volume(spans, of);
            }
        }
        Operands::PeerVolume => {
            // SAFETY: as above.
            let of = unsafe { (arg(0) as *const CUDA_MEMCPY3D_PEER).as_ref() };
            if let Some(of) = of {
                extent::note_peer_volume(spans, of);
            }
        }
        Operands::Batch => {
            let [to, from, bytes] = [0, 1, 2].map(|at| arg(at) as *const u64);
            if to.is_null() || from.is_null() || bytes.is_null() {
                return;
            }
            for at in 0..arg(3) as usize {
                // SAFETY: the caller's promise: arrays of so many elements.
                let (to, from, bytes) = unsafe { (*to.add(at), *from.add(at), *bytes.add(at)) };
                spans.copied(from, bytes);
                spans.copied(to, bytes);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::spans::tests::{spans, used};
    use super::*;

    #[test]
    fn launches_name_nothing_copies_what_they_say_and_others_are_not_known() {
        let words = [100, 200, 3, 0];
        assert_eq!(
            linear(Symbol::cuLaunchKernel.traits().operands, &words),
            Some([(0, 0); 2])
        );
        assert_eq!(
            linear(Symbol::cuMemcpyDtoDAsync_v2.traits().operands, &words),
            Some([(100, 3), (200, 3)])
        );
        assert_eq!(
            linear(Symbol::cuMemsetD32Async.traits().operands, &words),
            Some([(100, 12), (0, 0)])
        );
        for symbol in [
            Symbol::cuGraphLaunch,
            Symbol::cuMemcpy2D_v2,
            Symbol::cuMemFreeAsync,
        ] {
            assert_eq!(linear(symbol.traits().operands, &words), None);
        }
    }

    fn of_call(named: Operands, args: &[usize]) -> Vec<u64> {
        let mut of = spans(&[(1000, 100, true), (2000, 100, true), (3000, 100, true)]);
        // SAFETY: the tests' own structures and arrays.
        unsafe { note_copy(&mut of, named, args) };
        used(&mut of)
    }

    fn address<T>(of: &T) -> usize {
        std::ptr::from_ref(of).expose_provenance()
    }

    #[test]
    fn arguments_are_where_the_driver_has_them() {
        use Symbol::*;
        let host = 0x5555_0000;
        for (symbol, args, chunks) in [
            (cuMemcpyHtoD_v2, vec![1000, host, 8], vec![1]),
            (cuMemcpyDtoHAsync_v2, vec![host, 2000, 8, 0], vec![2]),
            (cuMemcpyAsync, vec![3000, 1000, 8, 0], vec![1, 3]),
            (cuMemcpyPeer, vec![3000, 77, 1000, 78, 1], vec![1, 3]),
            (cuMemcpyAtoD_v2, vec![1000, 77, 0, 8], vec![1]),
            (cuMemcpyDtoA_v2, vec![77, 0, 2000, 8], vec![2]),
            (cuMemsetD8_v2, vec![1000, 0, 1000], vec![1]),
            (cuMemsetD8_v2, vec![1000, 0, 1001], vec![1, 2]),
            (cuMemsetD16Async, vec![1000, 0, 501, 0], vec![1, 2]),
            (cuMemsetD32Async, vec![1000, 0, 251, 0], vec![1, 2]),
            (cuMemsetD2D32Async, vec![1000, 500, 0, 1, 2, 0], vec![1]),
            (cuMemsetD2D32Async, vec![1000, 500, 0, 1, 3, 0], vec![1, 2]),
            (cuMemsetD2D8_v2, vec![1000, 500, 0, 0, 9], vec![]),
            (cuMemsetD8_v2, vec![1000, 0, usize::MAX], vec![1, 2, 3]),
        ] {
            assert_eq!(of_call(symbol.traits().operands, &args), chunks, "{args:?}");
        }
    }

    #[test]
    fn structures_and_arrays_are_read() {
        let plane = CUDA_MEMCPY2D {
            srcMemoryType: CUmemorytype::CU_MEMORYTYPE_DEVICE,
            srcDevice: CUdeviceptr(900),
            srcXInBytes: 100,
            srcY: 2,
            srcPitch: 500,
            dstMemoryType: CUmemorytype::CU_MEMORYTYPE_HOST,
            dstDevice: CUdeviceptr(3000),
            WidthInBytes: 8,
            Height: 1,
            ..CUDA_MEMCPY2D::default()
        };
        assert_eq!(of_call(Operands::Plane, &[address(&plane), 0]), [2]);
        let volume = CUDA_MEMCPY3D {
            srcMemoryType: CUmemorytype::CU_MEMORYTYPE_ARRAY,
            srcDevice: CUdeviceptr(3000),
            dstMemoryType: CUmemorytype::CU_MEMORYTYPE_UNIFIED,
            dstDevice: CUdeviceptr(1000),
            dstZ: 1,
            dstPitch: 50,
            dstHeight: 20,
            WidthInBytes: 8,
            Height: 2,
            Depth: 2,
            ..CUDA_MEMCPY3D::default()
        };
        assert_eq!(of_call(Operands::Volume, &[address(&volume), 0]), [2, 3]);
        let peer = CUDA_MEMCPY3D_PEER {
            srcMemoryType: CUmemorytype::CU_MEMORYTYPE_DEVICE,
            srcDevice: CUdeviceptr(1000),
            dstMemoryType: CUmemorytype::CU_MEMORYTYPE_DEVICE,
            dstDevice: CUdeviceptr(2000),
            WidthInBytes: 8,
            Height: 1,
            Depth: 1,
            ..CUDA_MEMCPY3D_PEER::default()
        };
        assert_eq!(of_call(Operands::PeerVolume, &[address(&peer)]), [1, 2]);
        let (to, from, bytes) = ([1000u64, 77], [78u64, 3000], [8usize, 8]);
        let args = [address(&to), address(&from), address(&bytes), 2];
        assert_eq!(of_call(Operands::Batch, &args), [1, 3]);
        assert_eq!(of_call(Operands::Batch, &[0, 0, 0, 2]), []);
        assert_eq!(of_call(Operands::Plane, &[0]), []);
    }
}
