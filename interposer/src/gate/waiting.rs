//! Threads that wait for their turn, as the arbiter sees them.

use channel::Want;

/// A thread that waits, as the arbiter sees it, until dropped.
pub(crate) struct Waiting<'a>(&'a Want);

impl<'a> Waiting<'a> {
    pub(crate) fn begin(want: &'a Want) -> Self {
        want.begin_waiting();
        Self(want)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.end_waiting();
    }
}
