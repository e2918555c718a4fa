//! What a program says about the parts that it consists of, so that it can go on before all of its
//! memory is back (`docs/explanation/residency.md`, "Hints"). Each of these does nothing where the
//! job is not evictable, before `cuInit`, without an arbiter, and in a forked child.

use crate::residency;

/// The device memory from `address` on belongs to `group`. Groups are numbered from 0 in the order
/// in which a pass needs them; memory of several groups belongs to the first of them. What is freed
/// is struck out.
///
/// Returns 1 where that was noted, 0 where nothing of this process is ever moved, -1 for a range or
/// a number that makes no sense. Callable from any thread, at any time.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub extern "C" fn sublet_pipeline_add(group: u32, address: u64, bytes: u64) -> i32 {
    std::panic::catch_unwind(|| residency::pipeline::add(group, address, bytes)).unwrap_or(0)
}

/// Until it calls this again the thread submits nothing that touches memory of a group above
/// `group`. Returns when everything up to it and everything of no group is on the device: at once,
/// or after a wait.
///
/// Returns 1 where it is there, 0 where nothing of this process is ever moved, -1 where it could
/// not be brought back: calls that follow are answered with the error.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub extern "C" fn sublet_pipeline_begin(group: u32) -> i32 {
    std::panic::catch_unwind(|| residency::pipeline::begin(group)).unwrap_or(0)
}

/// Forgets all groups.
///
/// Returns 1, or 0 where nothing of this process is ever moved.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub extern "C" fn sublet_pipeline_clear() -> i32 {
    std::panic::catch_unwind(residency::pipeline::clear).unwrap_or(0)
}
