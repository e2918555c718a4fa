//! Which addresses a submission of the program's names, for [`last_use`].
//!
//! Copies and memsets say them in their arguments, kernels among their [`parameters`]. All of it is read after the driver's call has
//! succeeded: what the driver has just read is there, and what it refuses is not looked at.
//!
//! Not looked into: what is captured, graphs and their launches, `cuLaunchGrid` and its like, launches on several devices at once, batches of
//! copies in three dimensions, decompression, and what CUDA 2 had (memory of 32-bit addresses does not move).

use shim_ffi::*;

use super::extent::{self, Extent};
use super::last_use;
use super::parameters;
use super::spans::Spans;
use crate::capture;
use crate::errno::Preserve;

/// Where a call's addresses are, by the positions of its arguments.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Names {
    Nothing,
    /// In the parameters of a kernel. `extra` is none of a call that takes none.
    Kernel {
        function: usize,
        parameters: usize,
        extra: Option<usize>,
    },
    /// One address, and how many elements of `unit` bytes from there.
    One {
        at: usize,
        count: usize,
        unit: u64,
    },
    /// Two addresses and bytes.
    Two {
        to: usize,
        from: usize,
        bytes: usize,
    },
    /// An address, a pitch, a value, and rows of elements of `unit` bytes.
    Rows {
        unit: u64,
    },
    /// In a structure.
    Plane,
    Volume,
    PeerVolume,
    /// In arrays.
    Batch,
}

const fn names(symbol: Symbol) -> Names {
    use Symbol::*;
    const fn one(at: usize, count: usize, unit: u64) -> Names {
        Names::One { at, count, unit }
    }
    const fn two(to: usize, from: usize, bytes: usize) -> Names {
        Names::Two { to, from, bytes }
    }
    const fn kernel(function: usize, parameters: usize, extra: Option<usize>) -> Names {
        Names::Kernel {
            function,
            parameters,
            extra,
        }
    }
    match symbol {
        cuLaunchKernel | cuLaunchKernel_ptsz => kernel(0, 9, Some(10)),
        cuLaunchKernelEx | cuLaunchKernelEx_ptsz => kernel(1, 2, Some(3)),
        cuLaunchCooperativeKernel | cuLaunchCooperativeKernel_ptsz => kernel(0, 9, None),
        cuMemcpyAtoD_v2 | cuMemcpyAtoD_v2_ptds => one(0, 3, 1),
        cuMemcpyDtoA_v2 | cuMemcpyDtoA_v2_ptds => one(2, 3, 1),
        // An address that is said to be the host's may be the device's all the same.
        cuMemcpyHtoD_v2
        | cuMemcpyHtoD_v2_ptds
        | cuMemcpyHtoDAsync_v2
        | cuMemcpyHtoDAsync_v2_ptsz
        | cuMemcpyDtoH_v2
        | cuMemcpyDtoH_v2_ptds
        | cuMemcpyDtoHAsync_v2
        | cuMemcpyDtoHAsync_v2_ptsz
        | cuMemcpy
        | cuMemcpy_ptds
        | cuMemcpyAsync
        | cuMemcpyAsync_ptsz
        | cuMemcpyDtoD_v2
        | cuMemcpyDtoD_v2_ptds
        | cuMemcpyDtoDAsync_v2
        | cuMemcpyDtoDAsync_v2_ptsz
        | cuMemcpyWithAttributesAsync
        | cuMemcpyWithAttributesAsync_ptsz => two(0, 1, 2),
        cuMemcpyPeer | cuMemcpyPeer_ptds | cuMemcpyPeerAsync | cuMemcpyPeerAsync_ptsz => {
            two(0, 2, 4)
        }
        cuMemsetD8_v2 | cuMemsetD8_v2_ptds | cuMemsetD8Async | cuMemsetD8Async_ptsz => one(0, 2, 1),
        cuMemsetD16_v2 | cuMemsetD16_v2_ptds | cuMemsetD16Async | cuMemsetD16Async_ptsz => {
            one(0, 2, 2)
        }
        cuMemsetD32_v2 | cuMemsetD32_v2_ptds | cuMemsetD32Async | cuMemsetD32Async_ptsz => {
            one(0, 2, 4)
        }
        cuMemsetD2D8_v2 | cuMemsetD2D8_v2_ptds | cuMemsetD2D8Async | cuMemsetD2D8Async_ptsz => {
            Names::Rows { unit: 1 }
        }
        cuMemsetD2D16_v2 | cuMemsetD2D16_v2_ptds | cuMemsetD2D16Async | cuMemsetD2D16Async_ptsz => {
            Names::Rows { unit: 2 }
        }
        cuMemsetD2D32_v2 | cuMemsetD2D32_v2_ptds | cuMemsetD2D32Async | cuMemsetD2D32Async_ptsz => {
            Names::Rows { unit: 4 }
        }
        cuMemcpy2D_v2
        | cuMemcpy2D_v2_ptds
        | cuMemcpy2DUnaligned_v2
        | cuMemcpy2DUnaligned_v2_ptds
        | cuMemcpy2DAsync_v2
        | cuMemcpy2DAsync_v2_ptsz => Names::Plane,
        cuMemcpy3D_v2 | cuMemcpy3D_v2_ptds | cuMemcpy3DAsync_v2 | cuMemcpy3DAsync_v2_ptsz => {
            Names::Volume
        }
        cuMemcpy3DPeer | cuMemcpy3DPeer_ptds | cuMemcpy3DPeerAsync | cuMemcpy3DPeerAsync_ptsz => {
            Names::PeerVolume
        }
        cuMemcpyBatchAsync
        | cuMemcpyBatchAsync_ptsz
        | cuMemcpyBatchAsync_v2
        | cuMemcpyBatchAsync_v2_ptsz => Names::Batch,
        _ => Names::Nothing,
    }
}

/// Ranges (start, bytes) of a call that touches nothing else; empty: it is a kernel's launch, whose arguments name none. `None`: what it
/// touches is more, or not known here.
pub(super) fn linear(symbol: Symbol, args: &[usize]) -> Option<[(u64, u64); 2]> {
    let arg = |at: usize| args.get(at).copied().unwrap_or(0) as u64;
    match names(symbol) {
        Names::Kernel { .. } => Some([(0, 0); 2]),
        Names::One { at, count, unit } => {
            Some([(arg(at), arg(count).saturating_mul(unit)), (0, 0)])
        }
        Names::Two { to, from, bytes } => Some([(arg(to), arg(bytes)), (arg(from), arg(bytes))]),
        _ => None,
    }
}

/// After a submission of the program's, in a process whose memory can be moved and inside the latch.
#[inline(always)]
pub(crate) fn used(symbol: Symbol, args: &[usize], result: CUresult) {
    match names(symbol) {
        Names::Nothing => {}
        Names::Kernel {
            function,
            parameters,
            extra,
        } => {
            if last_use::looking() && result.is_ok() {
                let arg = |at: usize| args.get(at).copied().unwrap_or(0);
                let extra = extra.map_or(0, arg);
                parameters::note(arg(function), arg(parameters), extra);
            }
        }
        _ => {
            if result.is_ok() {
                copy(symbol, args);
            }
        }
    }
}

#[inline(never)]
fn copy(symbol: Symbol, args: &[usize]) {
    let _ = std::panic::catch_unwind(|| {
        if !capture::any() {
            let _errno = Preserve::new();
            // SAFETY: the driver has just carried out this call of these arguments.
            last_use::note(|spans| unsafe { note_copy(spans, names(symbol), args) });
        }
    });
}

/// # Safety
/// Arguments that are structures or arrays can be read, as the driver reads them.
unsafe fn note_copy(spans: &mut Spans, named: Names, args: &[usize]) {
    let arg = |at: usize| args.get(at).copied().unwrap_or(0) as u64;
    match named {
        Names::Nothing | Names::Kernel { .. } => {}
        Names::One { at, count, unit } => {
            spans.copied(arg(at), arg(count).saturating_mul(unit));
        }
        Names::Two { to, from, bytes } => {
            spans.copied(arg(from), arg(bytes));
            spans.copied(arg(to), arg(bytes));
        }
        Names::Rows { unit } => {
            let rows = Extent {
                pitch: arg(1),
                width: arg(3).saturating_mul(unit),
                height: arg(4),
                ..Extent::default()
            };
            rows.note(spans, arg(0));
        }
        Names::Plane => {
            // SAFETY: the caller's promise; null is refused by the driver, and looked for all the same.
            let of = unsafe { (arg(0) as *const CUDA_MEMCPY2D).as_ref() };
            if let Some(of) = of {
                extent::note_plane(spans, of);
            }
        }
        Names::Volume => {
            // SAFETY: as above.
            let of = unsafe { (arg(0) as *const CUDA_MEMCPY3D).as_ref() };
            if let Some(of) = of {
                extent::note_volume(spans, of);
            }
        }
        Names::PeerVolume => {
            // SAFETY: as above.
            let of = unsafe { (arg(0) as *const CUDA_MEMCPY3D_PEER).as_ref() };
            if let Some(of) = of {
                extent::note_peer_volume(spans, of);
            }
        }
        Names::Batch => {
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

    /// Copies that are not looked into: of arrays, which have no addresses; by structures that are passed on as they are. So are batches
    /// in three dimensions.
    const NOT: [&str; 5] = [
        "cuMemcpyAtoA",
        "cuMemcpyAtoH",
        "cuMemcpyHtoA",
        "cuFabricCpyBatch",
        "cuMemBatchDecompress",
    ];

    #[test]
    fn launches_name_nothing_copies_what_they_say_and_others_are_not_known() {
        let words = [100, 200, 3, 0];
        assert_eq!(linear(Symbol::cuLaunchKernel, &words), Some([(0, 0); 2]));
        assert_eq!(
            linear(Symbol::cuMemcpyDtoDAsync_v2, &words),
            Some([(100, 3), (200, 3)])
        );
        assert_eq!(
            linear(Symbol::cuMemsetD32Async, &words),
            Some([(100, 12), (0, 0)])
        );
        for symbol in [
            Symbol::cuGraphLaunch,
            Symbol::cuMemcpy2D_v2,
            Symbol::cuMemFreeAsync,
        ] {
            assert_eq!(linear(symbol, &words), None);
        }
    }

    #[test]
    fn every_copy_is_looked_into_but_for_those_that_cannot_name_what_moves() {
        for symbol in SYMBOLS {
            let entry = symbol.entry();
            let copies = matches!(entry.category, "memcpy" | "memset");
            if entry.action != Action::GateSubmission || !copies {
                continue;
            }
            let name = entry.symbol.to_str().expect("ASCII");
            // Addresses of CUDA 2 have 32 bits: that memory does not move.
            let narrow = entry.introduced < 3020;
            let batch = name.contains("Batch") || name.contains("WithAttributes");
            let listed = narrow
                || NOT.iter().any(|not| name.starts_with(not))
                || (name.starts_with("cuMemcpy3D") && batch);
            assert_eq!(names(symbol) == Names::Nothing, listed, "{name}");
        }
    }

    fn of_call(named: Names, args: &[usize]) -> Vec<u64> {
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
        for (symbol, args, pieces) in [
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
            assert_eq!(of_call(names(symbol), &args), pieces, "{args:?}");
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
        assert_eq!(of_call(Names::Plane, &[address(&plane), 0]), [2]);
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
        assert_eq!(of_call(Names::Volume, &[address(&volume), 0]), [2, 3]);
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
        assert_eq!(of_call(Names::PeerVolume, &[address(&peer)]), [1, 2]);
        let (to, from, bytes) = ([1000u64, 77], [78u64, 3000], [8usize, 8]);
        let args = [address(&to), address(&from), address(&bytes), 2];
        assert_eq!(of_call(Names::Batch, &args), [1, 3]);
        assert_eq!(of_call(Names::Batch, &[0, 0, 0, 2]), []);
        assert_eq!(of_call(Names::Plane, &[0]), []);
    }
}
