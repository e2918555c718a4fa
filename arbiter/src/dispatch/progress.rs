//! How far a tenant is in its present iteration, by the boundaries that its profile goes by.
//!
//! The detector looks every few tens of milliseconds, which is too late for decisions about slices.
//! Boundaries are numbered in the client's page as they happen, so a scheduler that looks at the
//! holder anyway sees a new one by one load. Device time since then is the part of the iteration
//! that is done. A program that notes its steps is between two of them while it has submitted
//! nothing since the last, and nothing is on the device; a boundary that was detected is a
//! submission, and nobody knows whether it is the first of its iteration.

use std::rc::Rc;

use channel::arbiter::ClientPages;

/// Where the boundaries of a tenant are noted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Boundaries {
    /// By which of its clients.
    pub client: u64,
    /// In the ring of this thread; `None`: in that of the steps that the program notes itself.
    pub slot: Option<usize>,
}

/// Where a tenant is between its boundaries.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Progress {
    boundaries: Option<Boundaries>,
    /// Boundaries as they were counted last; `None`: not yet.
    count: Option<u64>,
    /// Device time charged when the last one was found; `None`: none was found since we look.
    began_ns: Option<u64>,
    /// When it was found.
    found_ns: u64,
    at_boundary: bool,
    /// When the last one was, as the client says; 0: unknown.
    last_ns: u64,
}

impl Progress {
    /// Goes by these from now on.
    pub fn follow(&mut self, boundaries: Option<Boundaries>) {
        if self.boundaries != boundaries {
            *self = Self {
                boundaries,
                ..Self::default()
            };
        }
    }

    /// Looks for new ones. `device_ns`: what was charged so far; `idle`: nothing is on the device.
    pub fn look(
        &mut self,
        now_ns: u64,
        clients: &[(u64, Rc<ClientPages>)],
        device_ns: u64,
        idle: bool,
    ) {
        self.at_boundary = false;
        let Some(Boundaries { client, slot }) = self.boundaries else {
            return;
        };
        let pages = clients.iter().find(|(id, _)| *id == client);
        let Some((pages, page)) = pages.and_then(|(_, pages)| Some((pages, pages.signatures()?)))
        else {
            return;
        };
        let ring = match slot {
            Some(slot) => page.ring(slot).map(|ring| ring.boundaries()),
            None => Some(page.steps()),
        };
        let Some(ring) = ring else { return };
        let count = ring.count();
        if let Some(before) = self.count.replace(count)
            && before != count
        {
            (self.began_ns, self.found_ns) = (Some(device_ns), now_ns);
            let last = count.checked_sub(1).and_then(|last| ring.get(last));
            self.last_ns = last.map_or(0, |last| last.mono_ns);
        }
        if slot.is_none() && idle {
            let last = count.checked_sub(1).and_then(|last| ring.get(last));
            let submitted = pages.client.launches();
            self.at_boundary = last.is_some_and(|last| last.launches == submitted);
        }
    }

    /// Device time of the present iteration so far; 0 where it is not known.
    pub fn done_ns(&self, device_ns: u64) -> u64 {
        let began_ns = self.began_ns;
        began_ns.map_or(0, |began_ns| device_ns.saturating_sub(began_ns))
    }

    /// When the present iteration began, as far as it was seen.
    pub fn began_ns(&self) -> Option<u64> {
        self.began_ns.map(|_| self.found_ns)
    }

    /// Boundaries that were noted, and when the last one was, as the client says; 0: unknown.
    pub fn boundary(&self) -> Option<(u64, u64)> {
        Some((self.count?, self.last_ns))
    }

    /// Whether it stands between two iterations.
    pub fn at_boundary(&self) -> bool {
        self.at_boundary
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client() -> Vec<(u64, Rc<ClientPages>)> {
        let mut pages = ClientPages::create().expect("pages");
        pages.ask_for_signatures().expect("a page");
        vec![(7, Rc::new(pages))]
    }

    const STEPS: Option<Boundaries> = Some(Boundaries {
        client: 7,
        slot: None,
    });

    #[test]
    fn device_time_counts_from_the_boundary_that_was_found_last() {
        let clients = client();
        let steps = clients[0].1.signatures().expect("page").steps();
        let mut progress = Progress::default();
        progress.look(10, &clients, 50, true);
        assert_eq!(progress.done_ns(50), 0, "nobody says where to look");
        progress.follow(STEPS);
        progress.look(20, &clients, 100, false);
        assert_eq!(progress.done_ns(120), 0, "it may have begun long ago");
        steps.note(0, 1, 0);
        progress.look(30, &clients, 150, false);
        assert_eq!(progress.done_ns(150), 0);
        progress.look(40, &clients, 170, false);
        assert_eq!(progress.done_ns(190), 40);
        steps.note(0, 2, 0);
        steps.note(0, 3, 0);
        progress.look(50, &clients, 200, false);
        assert_eq!(progress.done_ns(201), 1);
        // The same source goes on, another one begins anew.
        progress.follow(STEPS);
        assert_eq!(progress.done_ns(202), 2);
        progress.follow(None);
        assert_eq!(progress.done_ns(203), 0);
    }

    #[test]
    fn it_stands_at_a_boundary_until_something_is_submitted() {
        let clients = client();
        let pages = &clients[0].1;
        let steps = pages.signatures().expect("page").steps();
        let mut progress = Progress::default();
        progress.follow(STEPS);
        let mut at = |idle| {
            progress.look(60, &clients, 0, idle);
            progress.at_boundary()
        };
        assert!(!at(true), "none was noted");
        pages.client.thread(0).count_launch();
        steps.note(1, 1, 0);
        assert!(at(true));
        assert!(!at(false), "something is on the device");
        pages.client.thread(1).count_launch();
        assert!(!at(true), "the next one has begun");
        steps.note(2, 2, 0);
        assert!(at(true));
    }

    #[test]
    fn what_was_detected_tells_how_far_it_is_and_never_where_it_stands() {
        let clients = client();
        let ring = clients[0].1.signatures().expect("page").ring(2);
        let mut progress = Progress::default();
        progress.follow(Some(Boundaries {
            client: 7,
            slot: Some(2),
        }));
        progress.look(70, &clients, 10, true);
        ring.expect("ring").boundaries().note(0, 1, 0);
        progress.look(80, &clients, 20, true);
        assert_eq!((progress.done_ns(25), progress.at_boundary()), (5, false));
        // A client that is gone, and a ring that is none.
        progress.look(90, &[], 30, true);
        progress.follow(Some(Boundaries {
            client: 7,
            slot: Some(1000),
        }));
        progress.look(100, &clients, 40, true);
        assert_eq!(progress.done_ns(50), 0);
    }
}
