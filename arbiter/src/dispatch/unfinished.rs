//! Work that was on the device when a slice of its job ended, and whether it gets on.
//!
//! A kernel that never ends stays on the device in everybody's slices. It is distinguished from a
//! long one, and from a host that stands still, by the device time that its *stream* is given
//! without passing a completion mark: other streams of the job may get on meanwhile, and submit
//! more. Time past the job's slices counts always, for then nothing else of it is let in. Time
//! within its own slices counts where nothing of the job gets on: else the device may have been
//! busy with that.

use std::rc::Rc;

use channel::arbiter::ClientPages;

/// Streams that are followed at a time. A job with more of them on the device at once has the
/// others followed in later slices.
const MOST: usize = 64;

/// What was there when a slice ended and has not got on since.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Work {
    client: u64,
    what: What,
    since_ns: u64,
    /// [`Unfinished::stood_ns`] when it got on last.
    from_ns: u64,
    /// Something else of the job has got on since then.
    in_part: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum What {
    /// A stream, and the mark that the device has passed.
    Stream { slot: usize, done: u64 },
    /// A call that blocks until its work is done.
    Call,
}

/// What a job did since the last look.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Moved {
    /// It submitted something.
    pub submitted: bool,
    /// Marks of it have passed.
    pub passed: bool,
}

/// Work that gets on no more.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Endless {
    /// When it was left behind by a slice.
    pub since_ns: u64,
    /// Other work of the job gets on.
    pub in_part: bool,
}

/// What is left on a device by the slices of one tenant.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Unfinished {
    work: Vec<Work>,
    /// Device time in which work of it that stood still may have been on the device.
    stood_ns: u64,
    /// The same since the last look, of which is not known yet whether anything got on.
    pending_ns: u64,
    /// Where the next search for streams begins, so that those of one process are not always the
    /// first.
    turn: usize,
}

impl Unfinished {
    /// A slice has ended, or begins anew: notes what is there.
    pub fn note(&mut self, now_ns: u64, clients: &[(u64, Rc<ClientPages>)], device: usize) {
        // WRAPPING: a place in a circle.
        self.turn = self.turn.wrapping_add(1);
        let first = self.turn.checked_rem(clients.len()).unwrap_or(0);
        let (before, from) = clients.split_at(first.min(clients.len()));
        for (client, pages) in from.iter().chain(before) {
            let streams = pages.client.outstanding(device, self.turn);
            let streams = streams.map(|(slot, done)| What::Stream { slot, done });
            let call = (pages.client.blocking(device) > 0).then_some(What::Call);
            for what in call.into_iter().chain(streams) {
                if self.work.len() >= MOST {
                    return;
                }
                let known = |one: &Work| one.client == *client && one.what.is_same(what);
                if !self.work.iter().any(known) {
                    self.work.push(Work {
                        client: *client,
                        what,
                        since_ns: now_ns,
                        from_ns: self.stood_ns,
                        in_part: false,
                    });
                }
            }
        }
    }

    /// The tenant was given so much of the device.
    pub fn pass(&mut self, got_ns: u64) {
        if !self.work.is_empty() {
            self.pending_ns = self.pending_ns.saturating_add(got_ns);
        }
    }

    /// Looks at what is left. `holds`: the tenant has the device.
    pub fn look(
        &mut self,
        clients: &[(u64, Rc<ClientPages>)],
        device: usize,
        holds: bool,
        moved: Moved,
    ) {
        let got_on = moved.submitted || moved.passed;
        let pending_ns = std::mem::take(&mut self.pending_ns);
        if self.work.is_empty() {
            self.stood_ns = 0;
            return;
        }
        if !(holds && got_on) {
            self.stood_ns = self.stood_ns.saturating_add(pending_ns);
        }
        let stood_ns = self.stood_ns;
        self.work.retain_mut(|one| {
            let Some((_, pages)) = clients.iter().find(|(id, _)| *id == one.client) else {
                return false;
            };
            let before = one.what;
            match &mut one.what {
                What::Stream { slot, done } => match pages.client.stands_at(device, *slot) {
                    Some(now) => *done = now,
                    None => return false,
                },
                What::Call if pages.client.blocking(device) == 0 => return false,
                What::Call => {}
            }
            // Who submits is not in that call.
            if one.what != before || got_on && one.what == What::Call {
                (one.from_ns, one.in_part) = (stood_ns, false);
            } else {
                // What is submitted may be behind the very work that stands still.
                one.in_part |= moved.passed;
            }
            true
        });
    }

    /// What has stood still for so much device time.
    pub fn endless(&self, most_ns: u64) -> Option<Endless> {
        let work = self.work.iter();
        work.filter(|one| self.stood_ns.saturating_sub(one.from_ns) >= most_ns)
            .min_by_key(|one| one.since_ns)
            .map(|one| Endless {
                since_ns: one.since_ns,
                in_part: one.in_part,
            })
    }

    /// Nothing of the tenant is on the device.
    pub fn clear(&mut self) {
        self.work.clear();
        (self.stood_ns, self.pending_ns) = (0, 0);
    }
}

impl What {
    /// Whether it is the same stream, or a call as well.
    fn is_same(self, other: Self) -> bool {
        match (self, other) {
            (Self::Stream { slot: one, .. }, Self::Stream { slot: other, .. }) => one == other,
            (Self::Call, Self::Call) => true,
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;
    const PASSED: Moved = Moved {
        submitted: true,
        passed: true,
    };

    fn clients() -> Vec<(u64, Rc<ClientPages>)> {
        let pages = || Rc::new(ClientPages::create().expect("pages"));
        vec![(7, pages()), (8, pages())]
    }

    #[test]
    fn each_stream_has_its_own_time_and_begins_anew_when_it_gets_on() {
        let clients = clients();
        let slot = |at: usize| clients[at].1.client.claim_stream(0).expect("slot").1;
        let (stuck, moves) = (slot(0), slot(1));
        stuck.issue();
        for _ in 0..4 {
            moves.issue();
        }
        let mut left = Unfinished::default();
        left.pass(S);
        left.note(5, &clients, 0);
        for passed in 1..3 {
            left.pass(S / 2);
            moves.passed(passed);
            left.look(&clients, 0, false, PASSED);
        }
        let endless = left.endless(S).expect("a second of it");
        assert_eq!((endless.since_ns, endless.in_part), (5, true));
        assert_eq!(
            left.endless(S + 1),
            None,
            "what was before it was noted is not its"
        );
        // Within its own slice that may be the other stream's time.
        left.pass(S);
        left.look(&clients, 0, true, PASSED);
        assert_eq!(left.endless(S + 1), None);
        left.pass(S);
        left.look(&clients, 0, true, Moved::default());
        assert!(left.endless(2 * S).is_some());
        stuck.settle();
        moves.settle();
        left.look(&clients, 0, false, PASSED);
        assert_eq!(
            left,
            Unfinished {
                turn: left.turn,
                stood_ns: left.stood_ns,
                ..Unfinished::default()
            }
        );
    }

    #[test]
    fn what_is_submitted_behind_it_is_no_other_work_that_gets_on() {
        let clients = clients();
        let stuck = clients[0].1.client.claim_stream(0).expect("slot").1;
        stuck.issue();
        let mut left = Unfinished::default();
        left.note(5, &clients, 0);
        let submitted = Moved {
            submitted: true,
            passed: false,
        };
        for _ in 0..4 {
            left.pass(S / 2);
            stuck.issue();
            left.look(&clients, 0, false, submitted);
        }
        assert!(left.endless(S).is_some_and(|endless| !endless.in_part));
    }

    #[test]
    fn nothing_of_a_client_that_is_gone_stays_and_a_call_ends_when_it_returns() {
        let clients = clients();
        clients[1].1.client.claim_stream(0).expect("slot").1.issue();
        let want = clients[0].1.client.want(0).expect("device");
        want.begin_blocking();
        let mut left = Unfinished::default();
        left.note(0, &clients, 0);
        assert_eq!(left.work.len(), 2);
        left.pass(2 * S);
        left.look(&clients[..1], 0, false, Moved::default());
        assert_eq!(left.work.len(), 1);
        assert!(left.endless(S).is_some_and(|endless| !endless.in_part));
        want.end_blocking();
        left.look(&clients[..1], 0, false, Moved::default());
        assert_eq!(left.endless(1), None);
        left.note(0, &[], 0);
    }

    #[test]
    fn what_is_followed_is_bounded_and_everybody_has_a_turn() {
        let clients = clients();
        let mut stuck = Vec::new();
        for _ in 0..400 {
            let (slot, stream) = clients[0].1.client.claim_stream(0).expect("slot");
            stream.issue();
            stuck.push((slot, stream));
        }
        let (last, endless) = stuck.pop().expect("some");
        let mut left = Unfinished::default();
        let found = (0..2000).any(|round| {
            left.note(round, &clients, 0);
            assert!(left.work.len() <= MOST);
            // All others get on in between.
            for (_, stream) in &stuck {
                stream.settle();
            }
            left.look(&clients, 0, false, PASSED);
            for (_, stream) in &stuck {
                stream.issue();
            }
            left.work.iter().any(|one| {
                one.what.is_same(What::Stream {
                    slot: last,
                    done: 0,
                })
            })
        });
        assert!(found && !endless.is_idle());
    }
}
