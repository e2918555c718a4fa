//! Errors after which nothing of a process gets on.

use channel::{STREAM_SLOTS, StreamSlot};
use shim_ffi::CUresult;

use crate::attachment::client;

/// Whether nothing of the process gets on after that error.
pub(super) fn is_final(result: CUresult) -> bool {
    matches!(
        result,
        CUresult::CUDA_ERROR_ECC_UNCORRECTABLE
            | CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE
            | CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
            | CUresult::CUDA_ERROR_LAUNCH_TIMEOUT
            | CUresult::CUDA_ERROR_ASSERT
            | CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR
            | CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | CUresult::CUDA_ERROR_MISALIGNED_ADDRESS
            | CUresult::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | CUresult::CUDA_ERROR_INVALID_PC
            | CUresult::CUDA_ERROR_LAUNCH_FAILED
    )
}

/// What is left of a process's work after an error that "leaves the process in an inconsistent
/// state" (CUresult in the driver's reference: all further work returns it, only a new process gets
/// on): nothing. No mark is ever written again, and what waits for one, the arbiter among others,
/// need not.
pub(crate) fn after_error(result: CUresult) {
    if !is_final(result) {
        return;
    }
    let Some(attached) = client::current() else {
        return;
    };
    let slots = (0..STREAM_SLOTS).filter_map(|at| attached.end.client.stream(at));
    slots.for_each(StreamSlot::settle);
}
