//! What the profile of a tenant says of its memory and its iterations, and where it is in the
//! present one.
//!
//! Invariant: a policy is given an iteration's progress as it was at the last look, in device time
//! that was charged.

use std::rc::Rc;

use channel::arbiter::ClientPages;
use policy::{Iterations, Memory};

use crate::dispatch::progress::{Boundaries, Progress};

/// The profile of a tenant, for policies that ask.
#[derive(Debug, Default)]
pub struct Profile {
    memory: Memory,
    iterations: Iterations,
    progress: Progress,
}

impl Profile {
    /// What is known now, and where its boundaries are noted.
    pub fn inform(
        &mut self,
        memory: Memory,
        iterations: Iterations,
        boundaries: Option<Boundaries>,
    ) {
        (self.memory, self.iterations) = (memory, iterations);
        self.progress.follow(boundaries);
    }

    /// Looks for boundaries. `device_ns`: what was charged so far; `idle`: nothing is on the
    /// device.
    pub fn look(
        &mut self,
        now_ns: u64,
        clients: &[(u64, Rc<ClientPages>)],
        device_ns: u64,
        idle: bool,
    ) {
        self.progress.look(now_ns, clients, device_ns, idle);
    }

    /// Boundaries that were noted, and when the last one was, as its client says; 0: unknown.
    pub fn boundary(&self) -> Option<(u64, u64)> {
        self.progress.boundary()
    }

    /// What is known of its memory.
    pub fn memory(&self) -> Memory {
        self.memory
    }

    /// What is known of its iterations, with what is done of the present one.
    pub fn iterations(&self, device_ns: u64) -> Iterations {
        Iterations {
            done_ns: self.progress.done_ns(device_ns),
            began_ns: self.progress.began_ns(),
            at_boundary: self.progress.at_boundary(),
            ..self.iterations
        }
    }
}
