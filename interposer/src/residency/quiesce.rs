//! The agent's side of the quiesce gate, which is a part of the gate itself
//! ([`gate::quiesce`](crate::gate::quiesce)): here are the leaves that some threads have to pass it
//! ([`early`]) while it is closed.

use shim_ffi::{CUresult, Operands};

use super::early;
use crate::gate::quiesce;

pub(crate) use crate::gate::quiesce::{ACTIVE, Pass, active, pass, pass_to_end};
pub(super) use crate::gate::quiesce::{forget, is_closed};

/// As [`pass`] for a submission, which a thread with a leave may make although the quiesce gate is
/// closed.
#[inline(always)]
pub(crate) fn pass_submission(operands: Operands, words: &[usize]) -> Result<Pass, CUresult> {
    if !active() {
        return Ok(Pass::uncounted());
    }
    early::pass(operands, words).map_or_else(pass, Ok)
}

/// Closes the quiesce gate and waits until nobody is inside. False, with the quiesce gate as it
/// was, where somebody still is at `deadline_ns`.
pub(super) fn close(deadline_ns: u64) -> bool {
    quiesce::close(deadline_ns, opened)
}

/// Opens the quiesce gate and wakes a thread that waits.
pub(super) fn open() {
    quiesce::open(opened);
}

/// Leaves are needed no longer; what was begun by them is like any other work from here on.
fn opened() {
    early::revoke();
    early::settled();
    early::signal();
}

/// From here on calls that find the quiesce gate closed are answered `status`, until it opens.
pub(super) fn fail(status: CUresult) {
    quiesce::fail(status);
    early::signal();
}
