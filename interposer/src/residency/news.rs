//! Waiting for a full device. To ask the driver again and again costs everybody: a `cuMemCreate`
//! that fails takes locks that all processes of the host share. So who waits sleeps until the
//! arbiter says that somebody has left or has come to need less, and asks then; and now and then
//! all the same, for what the arbiter does not see.

use std::time::Duration;

use super::copy_streams::Step;
use crate::attachment::client;
use crate::ground::clock;

/// TIMEOUT: between two questions without news, at first and at most.
const FIRST: Duration = Duration::from_millis(2);
const LONGEST: Duration = Duration::from_millis(50);

/// Between two tries.
pub(super) struct Wait {
    seen: u32,
    nap: Duration,
    look: Duration,
}

impl Wait {
    /// Before the first try: what happens after this is news. What else may end the wait is looked
    /// at every `look`.
    pub(super) fn begin(look: Duration) -> Self {
        Self {
            seen: orders(),
            nap: FIRST,
            look,
        }
    }

    /// After a try in vain: until there is news, or it is time for another one, or `over` says that
    /// there is to be none.
    pub(super) fn for_news(&mut self, mut over: impl FnMut() -> Step<bool>) -> Step<()> {
        let begun_ns = clock::now_ns();
        let nap_ns = self.nap.as_nanos() as u64; // CAST: milliseconds.
        loop {
            let passed_ns = clock::now_ns().saturating_sub(begun_ns);
            if over()? || orders() != self.seen || passed_ns >= nap_ns {
                break;
            }
            let left = Duration::from_nanos(nap_ns - passed_ns);
            match client::current() {
                Some(attached) => attached
                    .end
                    .arbiter
                    .wait_for_orders(self.seen, left.min(self.look)),
                None => clock::pause(left.min(self.look)),
            }
        }
        let now = orders();
        self.nap = if now == self.seen {
            (self.nap * 2).min(LONGEST)
        } else {
            FIRST
        };
        self.seen = now;
        Ok(())
    }
}

fn orders() -> u32 {
    client::current().map_or(0, |attached| attached.end.arbiter.orders())
}
