//! One client on one device: its orders about its memory, and what it says became of that.
//!
//! The client is a stranger. An answer counts where it has the number of the last order; what it
//! claims about bytes is taken for its own footprint and for nothing else, and an answer that does
//! not come is given up on at a deadline. Whatever it says or leaves unsaid ends in one of the
//! states below.

use channel::arbiter::ClientPages;
use channel::{Answer, Footprint, Order, OrderState, Reason, Verb};

/// How long after an order's deadline its answer may still come. TIMEOUT: the client gives up at
/// the deadline; what is left is to bring everything back to where it was, at the link's speed.
const GRACE_NS: u64 = 5_000_000_000;

/// Where a client's evictable memory is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum State {
    /// All of it on the device.
    #[default]
    Resident,
    /// On its way out.
    Evicting,
    /// In host memory.
    Evicted,
    /// On its way back.
    Restoring,
    /// Partly in host memory, usable there.
    Partly,
    /// The client cannot use it any more.
    Failed,
}

impl State {
    /// Whether the client can run as it is.
    pub fn is_usable(self) -> bool {
        // One that has failed fails its own calls, and is to see that.
        matches!(self, Self::Resident | Self::Partly | Self::Failed)
    }
}

/// Why something was not carried out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Why {
    /// The client says so.
    Answered(Reason),
    /// It says nothing.
    Silent,
    /// It says something else than it was asked.
    Other(OrderState),
}

impl Why {
    /// For people.
    pub fn text(self) -> String {
        match self {
            Self::Answered(reason) => match reason {
                Reason::None => "its library gives no reason",
                Reason::Capturing => "a stream is being captured",
                Reason::NotDrained => "its work on the device did not end in time",
                Reason::HostBudget => "its host memory budget is too small",
                Reason::HostMemory => "the host has no memory left to pin",
                Reason::Driver => "the driver returned an error",
                Reason::DeviceMemory => "the device has no memory left",
                Reason::NothingEvictable => "nothing that it holds can be evicted",
                Reason::HostGroup => {
                    "the memory limit of its container (control group) leaves too little for it"
                }
            }
            .into(),
            Self::Silent => "its process does not answer".into(),
            Self::Other(state) => format!("its process says {state:?}"),
        }
    }
}

/// How an order ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ended {
    /// What it was.
    pub verb: Verb,
    /// Why it was not carried out; `None`: it was.
    pub failed: Option<Why>,
    /// Copied to the host and back for it, in bytes.
    pub copied: (u64, u64),
    /// The copies to the host were what took its time: most of what left was copied, into memory
    /// that was ready for it.
    pub copied_out_plainly: bool,
    /// From the order to the answer.
    pub ns: u64,
}

#[derive(Clone, Copy, Debug)]
struct Sent {
    number: u64,
    verb: Verb,
    at_ns: u64,
    deadline_ns: u64,
    before: Footprint,
}

/// One client on one device.
#[derive(Debug, Default)]
pub struct ClientStateMachine {
    state: State,
    /// Number of the last order.
    number: u64,
    order: Option<Sent>,
    /// An order of the arbiter before, of whose end nothing was heard.
    before: Option<u64>,
    /// The client says that it may run before the restore under way is over.
    has_begun: bool,
    footprint: Footprint,
    /// What the books say that its job can have at most, in bytes: what it claims beyond counts for
    /// nothing.
    most_bytes: Option<u64>,
}

/// A footprint as far as it can be true of one that has `most_bytes` in all.
fn bounded(footprint: Footprint, most_bytes: Option<u64>) -> Footprint {
    let most_bytes = most_bytes.unwrap_or(u64::MAX);
    let evictable_bytes = footprint.evictable_bytes.min(most_bytes);
    Footprint {
        evictable_bytes,
        resident_bytes: footprint.resident_bytes.min(evictable_bytes),
        // A host copy for each byte that can be moved, and none for those that cannot.
        host_bytes: footprint.host_bytes.min(most_bytes),
        ..footprint
    }
}

impl ClientStateMachine {
    /// Of a client that has attached, perhaps from an earlier arbiter; its memory is where it left
    /// it.
    pub fn new(pages: &ClientPages, device: usize) -> Self {
        let answer = pages.client.answer(device).unwrap_or_default();
        let moved = matches!(
            answer.state,
            OrderState::Evicted | OrderState::Working | OrderState::Begun
        );
        let mut new = Self {
            number: answer.number,
            before: matches!(answer.state, OrderState::Working | OrderState::Begun)
                .then_some(answer.number),
            state: if moved {
                State::Evicted
            } else {
                State::Resident
            },
            ..Self::default()
        };
        new.settle(pages, device);
        new
    }

    /// Where its memory is.
    pub fn state(&self) -> State {
        self.state
    }

    /// What it claims to have, as last looked at and as far as the books know of it: what others
    /// are refused, or have to wait for, goes by this. Where its own memory is goes by what it
    /// says.
    pub fn footprint(&self) -> Footprint {
        bounded(self.footprint, self.most_bytes)
    }

    /// What its job can have at most, in bytes.
    pub fn bound(&mut self, most_bytes: u64) {
        self.most_bytes = Some(most_bytes);
    }

    /// Whether the client can run as it is: its memory is usable where it is, or as much of it is
    /// back as it says that it touches.
    pub fn may_run(&self) -> bool {
        self.state.is_usable() || (self.has_begun && self.state == State::Restoring)
    }

    /// Whether an order is under way.
    pub fn is_busy(&self) -> bool {
        self.order.is_some()
    }

    /// For how long its memory is to leave, of which none has yet.
    pub fn has_not_left_ns(&self, now_ns: u64) -> u64 {
        match self.order {
            Some(sent)
                if sent.verb == Verb::Evict
                    && self.footprint.resident_bytes >= sent.before.resident_bytes
                    && self.footprint.moved_out_bytes == sent.before.moved_out_bytes =>
            {
                now_ns.saturating_sub(sent.at_ns)
            }
            _ => 0,
        }
    }

    /// Gives an order; one that is under way is replaced.
    pub fn give(
        &mut self,
        now_ns: u64,
        pages: &ClientPages,
        device: usize,
        (verb, resident_target_bytes): (Verb, u64),
        deadline_ns: u64,
    ) {
        // A stranger's number may be anything; it has to fit the answer's 48 bits.
        self.number = (self.number % (1 << 47)) + 1;
        self.has_begun = false;
        self.before = None;
        self.footprint = pages.client.footprint(device);
        self.state = match verb {
            Verb::Evict => State::Evicting,
            Verb::Restore => State::Restoring,
            Verb::Fit => self.state,
        };
        self.order = Some(Sent {
            number: self.number,
            verb,
            at_ns: now_ns,
            deadline_ns,
            before: self.footprint,
        });
        let order = Order {
            number: self.number,
            verb,
            resident_target_bytes,
            deadline_mono_ns: deadline_ns,
        };
        pages.arbiter.give_order(device, &order);
    }

    /// Copies out what the client says; the end of an order, once.
    pub fn look(&mut self, now_ns: u64, pages: &ClientPages, device: usize) -> Option<Ended> {
        // The answer first: the footprint is written before it.
        let answer = pages.client.answer(device);
        self.footprint = pages.client.footprint(device);
        let Some(sent) = self.order else {
            self.settle(pages, device);
            return None;
        };
        let failed = match answer {
            Some(Answer {
                number,
                state,
                reason,
            }) if number == sent.number => match (sent.verb, state) {
                (_, OrderState::None | OrderState::Working) => None,
                (Verb::Restore, OrderState::Begun) => {
                    self.has_begun = true;
                    None
                }
                (Verb::Evict, OrderState::Evicted)
                // What lies in host memory beyond the quota stays there.
                | (Verb::Restore | Verb::Fit, OrderState::Partly | OrderState::Resident) => Some(None),
                // Everything is where it was, so nothing had to be moved.
                (Verb::Evict, OrderState::Refused) if reason == Reason::NothingEvictable => {
                    Some(None)
                }
                (_, OrderState::Refused | OrderState::Failed) => Some(Some(Why::Answered(reason))),
                (_, other) => Some(Some(Why::Other(other))),
            },
            // A process without anything that could be moved may have no agent yet; one that
            // starts later finds the order.
            _ if sent.before.evictable_bytes == 0 && self.footprint.evictable_bytes == 0 => {
                Some(None)
            }
            _ => None,
        };
        let failed = match failed {
            Some(failed) => failed,
            None if now_ns >= sent.deadline_ns.saturating_add(GRACE_NS) => Some(Why::Silent),
            None => return None,
        };
        self.order = None;
        self.has_begun = false;
        let says_failed = answer.is_some_and(|answer| {
            answer.number == sent.number && answer.state == OrderState::Failed
        });
        match (sent.verb, failed) {
            _ if says_failed => self.state = State::Failed,
            (Verb::Evict, None) => self.state = State::Evicted,
            // Half of it may be anywhere; it cannot run until it has said that it is back.
            (_, Some(Why::Silent)) => self.state = State::Evicted,
            (Verb::Evict, Some(_)) => self.settle_as(State::Resident),
            (Verb::Restore, None) | (Verb::Fit, _) => self.settle_as(State::Resident),
            (Verb::Restore, Some(_)) => self.settle_as(State::Evicted),
        }
        let (before, now) = (bounded(sent.before, self.most_bytes), self.footprint());
        // No more can have been copied than there was: the link's rate, by which everybody's terms
        // go, is learnt from this.
        let had = before.evictable_bytes.max(now.evictable_bytes);
        let copied_out = now.moved_out_bytes.saturating_sub(before.moved_out_bytes);
        let copied_out = copied_out.min(had);
        let copied_in = now.moved_in_bytes.saturating_sub(before.moved_in_bytes);
        let left = before.resident_bytes.saturating_sub(now.resident_bytes);
        let locked = now.host_bytes.saturating_sub(before.host_bytes);
        Some(Ended {
            verb: sent.verb,
            failed,
            copied: (copied_out, copied_in.min(had)),
            copied_out_plainly: copied_out >= left - left / 4 && locked < copied_out / 4,
            ns: now_ns.saturating_sub(sent.at_ns),
        })
    }

    /// Takes the client's word for where its memory is, while nothing is asked of it.
    fn settle(&mut self, pages: &ClientPages, device: usize) {
        // The answer first: the footprint is written before it.
        if let (Some(before), Some(answer)) = (self.before, pages.client.answer(device))
            && answer.number == before
            && matches!(answer.state, OrderState::Partly | OrderState::Resident)
            && self.state == State::Evicted
        {
            self.state = State::Resident;
        }
        self.footprint = pages.client.footprint(device);
        match self.state {
            State::Failed => {}
            // A client that was ordered to leave and comes back by itself took us for dead.
            State::Evicted => self.settle_as(State::Evicted),
            _ => self.settle_as(State::Resident),
        }
    }

    fn settle_as(&mut self, likely: State) {
        let Footprint {
            evictable_bytes: all,
            resident_bytes: here,
            ..
        } = self.footprint;
        self.state = match likely {
            _ if here == all => State::Resident,
            State::Evicted => State::Evicted,
            _ => State::Partly,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;
    const MS: u64 = 1_000_000;

    struct Bench {
        pages: ClientPages,
        machine: ClientStateMachine,
    }

    impl Bench {
        fn new(resident_bytes: u64) -> Self {
            let pages = ClientPages::create().expect("pages");
            let mut new = Self {
                machine: ClientStateMachine::default(),
                pages,
            };
            new.holds(resident_bytes);
            new.machine = ClientStateMachine::new(&new.pages, 0);
            new
        }

        fn holds(&self, resident_bytes: u64) {
            self.pages
                .client
                .want(0)
                .expect("device")
                .set_footprint(&Footprint {
                    evictable_bytes: GIB,
                    resident_bytes,
                    host_bytes: GIB - resident_bytes,
                    moved_out_bytes: GIB - resident_bytes,
                    moved_in_bytes: 0,
                });
        }

        fn give(&mut self, now_ns: u64, verb: Verb) -> u64 {
            self.machine
                .give(now_ns, &self.pages, 0, (verb, 0), now_ns + 100 * MS);
            self.pages
                .arbiter
                .device(0)
                .and_then(|device| device.order())
                .expect("an order")
                .number
        }

        fn says(
            &mut self,
            now_ns: u64,
            number: u64,
            state: OrderState,
            reason: Reason,
        ) -> Option<Ended> {
            self.pages.client.want(0).expect("device").answer(Answer {
                number,
                state,
                reason,
            });
            self.machine.look(now_ns, &self.pages, 0)
        }
    }

    #[test]
    fn a_job_is_evicted_and_comes_back() {
        let mut bench = Bench::new(GIB);
        assert_eq!(bench.machine.state(), State::Resident);
        let number = bench.give(0, Verb::Evict);
        assert_eq!(bench.machine.state(), State::Evicting);
        assert!(!bench.machine.state().is_usable());
        assert_eq!(
            bench.says(MS, number, OrderState::Working, Reason::None),
            None
        );
        bench.holds(0);
        let ended = bench
            .says(30 * MS, number, OrderState::Evicted, Reason::None)
            .expect("it has ended");
        assert_eq!(
            (ended.failed, ended.copied, ended.ns),
            (None, (GIB, 0), 30 * MS)
        );
        assert_eq!(bench.machine.state(), State::Evicted);
        let number = bench.give(40 * MS, Verb::Restore);
        bench.holds(GIB);
        let ended = bench.says(50 * MS, number, OrderState::Resident, Reason::None);
        assert_eq!(ended.map(|ended| ended.failed), Some(None));
        assert_eq!(bench.machine.state(), State::Resident);
    }

    #[test]
    fn a_client_that_has_nothing_to_move_has_followed_an_order_at_once() {
        let mut bench = Bench::new(0);
        let want = bench.pages.client.want(0).expect("device");
        want.set_footprint(&Footprint::default());
        for verb in [Verb::Evict, Verb::Restore, Verb::Fit] {
            bench.give(MS, verb);
            let ended = bench.machine.look(2 * MS, &bench.pages, 0);
            let after_ns = ended.expect("it has ended").ns;
            println!("now: over after {after_ns} ns");
            assert_eq!(ended.and_then(|ended| ended.failed), None);
        }
        assert!(bench.machine.state().is_usable());
        // What has come meanwhile is asked for.
        bench.give(3 * MS, Verb::Evict);
        bench.holds(GIB);
        assert_eq!(bench.machine.look(4 * MS, &bench.pages, 0), None);
    }

    #[test]
    fn a_job_may_run_before_it_is_back_where_it_says_so_and_no_longer_than_its_order_lasts() {
        let mut bench = Bench::new(GIB);
        let number = bench.give(0, Verb::Evict);
        let said = bench.says(1, number, OrderState::Begun, Reason::None);
        assert!(said.is_some_and(|ended| ended.failed == Some(Why::Other(OrderState::Begun))));
        let number = bench.give(2, Verb::Evict);
        bench.holds(0);
        bench.says(3, number, OrderState::Evicted, Reason::None);
        let number = bench.give(4, Verb::Restore);
        assert!(!bench.machine.may_run());
        bench.says(5, number - 1, OrderState::Begun, Reason::None);
        assert!(!bench.machine.may_run(), "of another order");
        assert_eq!(bench.says(6, number, OrderState::Begun, Reason::None), None);
        assert!(bench.machine.may_run() && bench.machine.is_busy());
        assert_eq!(bench.machine.state(), State::Restoring);
        assert!(!bench.machine.state().is_usable());
        // It has to leave again, or says nothing more: it may not.
        let overdue = bench.machine.look(4 + 100 * MS + GRACE_NS, &bench.pages, 0);
        assert_eq!(overdue.and_then(|ended| ended.failed), Some(Why::Silent));
        assert!(!bench.machine.may_run());
        let number = bench.give(4, Verb::Restore);
        bench.says(5, number, OrderState::Begun, Reason::None);
        let refused = bench.says(6, number, OrderState::Refused, Reason::DeviceMemory);
        assert!(refused.is_some() && !bench.machine.may_run());
        let number = bench.give(7, Verb::Restore);
        bench.says(8, number, OrderState::Begun, Reason::None);
        bench.give(9, Verb::Evict);
        assert!(!bench.machine.may_run());
    }

    #[test]
    fn an_eviction_tells_the_rate_of_the_link_where_it_was_copies_that_took_its_time() {
        // Host memory that was locked before, what was copied out, and whether that shows the
        // link's rate.
        for (locked, copied, plainly) in [
            (0, GIB, false),
            (GIB, GIB, true),
            (GIB, GIB / 2, false),
            (GIB, 0, false),
        ] {
            let mut bench = Bench::new(GIB);
            let tells = |bench: &Bench, resident_bytes, host_bytes, moved_out_bytes| {
                let footprint = Footprint {
                    evictable_bytes: GIB,
                    resident_bytes,
                    host_bytes,
                    moved_out_bytes,
                    moved_in_bytes: 0,
                };
                bench
                    .pages
                    .client
                    .want(0)
                    .expect("device")
                    .set_footprint(&footprint);
            };
            tells(&bench, GIB, locked, 0);
            let number = bench.give(0, Verb::Evict);
            tells(&bench, 0, GIB, copied);
            let ended = bench
                .says(MS, number, OrderState::Evicted, Reason::None)
                .expect("it has ended");
            assert_eq!(ended.copied_out_plainly, plainly, "{locked} {copied}");
        }
    }

    #[test]
    fn an_answer_to_another_order_counts_for_nothing() {
        let mut bench = Bench::new(GIB);
        let first = bench.give(0, Verb::Evict);
        let second = bench.give(1, Verb::Restore);
        assert!(second > first);
        for number in [0, first, second + 1, u64::MAX >> 16] {
            assert_eq!(
                bench.says(2, number, OrderState::Resident, Reason::None),
                None
            );
        }
        assert_eq!(bench.machine.state(), State::Restoring);
    }

    #[test]
    fn a_refusal_keeps_everything_where_it_was_and_is_reported() {
        let mut bench = Bench::new(GIB);
        let number = bench.give(0, Verb::Evict);
        let ended = bench.says(MS, number, OrderState::Refused, Reason::Capturing);
        let why = ended.expect("ended").failed.expect("refused");
        assert_eq!(why, Why::Answered(Reason::Capturing));
        assert!(why.text().contains("captured"));
        assert_eq!(bench.machine.state(), State::Resident);
        bench.holds(0);
        let number = bench.give(0, Verb::Restore);
        let ended = bench.says(MS, number, OrderState::Refused, Reason::DeviceMemory);
        assert!(ended.is_some_and(|ended| ended.failed.is_some()));
        assert_eq!(bench.machine.state(), State::Evicted);
    }

    #[test]
    fn silence_ends_at_the_deadline_and_the_client_is_out_until_it_speaks() {
        let mut bench = Bench::new(GIB);
        let number = bench.give(0, Verb::Evict);
        bench.holds(GIB / 2);
        bench.says(MS, number, OrderState::Working, Reason::None);
        assert_eq!(bench.machine.look(100 * MS, &bench.pages, 0), None);
        let overdue = 100 * MS + GRACE_NS;
        let ended = bench
            .machine
            .look(overdue, &bench.pages, 0)
            .expect("given up");
        assert_eq!(ended.failed, Some(Why::Silent));
        assert!(!bench.machine.state().is_usable());
        let number = bench.give(overdue, Verb::Restore);
        bench.holds(GIB);
        bench.says(overdue + MS, number, OrderState::Resident, Reason::None);
        assert_eq!(bench.machine.state(), State::Resident);
    }

    #[test]
    fn one_that_has_failed_stays_so_and_may_see_it() {
        let mut bench = Bench::new(GIB);
        let number = bench.give(0, Verb::Restore);
        let ended = bench.says(MS, number, OrderState::Failed, Reason::Driver);
        assert_eq!(
            ended.expect("ended").failed,
            Some(Why::Answered(Reason::Driver))
        );
        assert_eq!(bench.machine.state(), State::Failed);
        assert!(bench.machine.state().is_usable());
        bench.machine.look(2 * MS, &bench.pages, 0);
        assert_eq!(bench.machine.state(), State::Failed);
    }

    #[test]
    fn a_client_of_an_earlier_arbiter_is_taken_over_and_its_numbers_continue() {
        let mut bench = Bench::new(0);
        bench.pages.client.want(0).expect("device").answer(Answer {
            number: 41,
            state: OrderState::Evicted,
            reason: Reason::None,
        });
        bench.machine = ClientStateMachine::new(&bench.pages, 0);
        assert_eq!(bench.machine.state(), State::Evicted);
        assert_eq!(bench.give(0, Verb::Restore), 42);
        let liar = Bench::new(GIB);
        liar.pages.client.want(0).expect("device").answer(Answer {
            number: u64::MAX >> 16,
            state: OrderState::Working,
            reason: Reason::None,
        });
        let mut machine = ClientStateMachine::new(&liar.pages, 0);
        machine.give(0, &liar.pages, 0, (Verb::Evict, 0), MS);
        let order = liar
            .pages
            .arbiter
            .device(0)
            .and_then(|device| device.order());
        assert!(order.is_some_and(|order| order.number <= 1 << 47));
    }

    #[test]
    fn a_fit_that_the_earlier_arbiter_did_not_see_the_end_of_leaves_its_client_usable() {
        for (end, state) in [
            (OrderState::Partly, State::Partly),
            (OrderState::Resident, State::Partly),
            (OrderState::Refused, State::Evicted),
            (OrderState::Evicted, State::Evicted),
        ] {
            let mut bench = Bench::new(GIB / 2);
            let said = |state| Answer {
                number: 41,
                state,
                reason: Reason::None,
            };
            let want = |bench: &Bench, answer| {
                bench.pages.client.want(0).expect("device").answer(answer);
            };
            want(&bench, said(OrderState::Working));
            bench.machine = ClientStateMachine::new(&bench.pages, 0);
            bench.machine.look(MS, &bench.pages, 0);
            assert_eq!(bench.machine.state(), State::Evicted);
            want(&bench, said(end));
            bench.machine.look(2 * MS, &bench.pages, 0);
            assert_eq!(bench.machine.state(), state, "{end:?}");
        }
        // An answer to an order of ours is no news of theirs.
        let mut bench = Bench::new(GIB / 2);
        bench.pages.client.want(0).expect("device").answer(Answer {
            number: 41,
            state: OrderState::Working,
            reason: Reason::None,
        });
        bench.machine = ClientStateMachine::new(&bench.pages, 0);
        let number = bench.give(MS, Verb::Evict);
        bench.says(2 * MS, 41, OrderState::Partly, Reason::None);
        assert_eq!(bench.machine.state(), State::Evicting);
        bench.says(3 * MS, number, OrderState::Evicted, Reason::None);
        bench.machine.look(4 * MS, &bench.pages, 0);
        assert_eq!(bench.machine.state(), State::Evicted);
    }

    #[test]
    fn what_a_job_claims_beyond_what_it_can_have_counts_for_nothing() {
        let mut bench = Bench::new(GIB);
        bench.machine.bound(GIB);
        let claims = |bench: &Bench, bytes| {
            let want = bench.pages.client.want(0).expect("device");
            want.set_footprint(&Footprint {
                evictable_bytes: bytes,
                resident_bytes: bytes,
                host_bytes: bytes,
                moved_out_bytes: bytes,
                moved_in_bytes: bytes,
            });
        };
        for bytes in [1 << 63, u64::MAX, (1 << 44) - 1] {
            claims(&bench, 0);
            let number = bench.give(0, Verb::Evict);
            claims(&bench, bytes);
            let ended = bench
                .says(MS, number, OrderState::Evicted, Reason::None)
                .expect("it has ended");
            let counted = bench.machine.footprint();
            assert_eq!(
                (
                    counted.evictable_bytes,
                    counted.resident_bytes,
                    counted.host_bytes
                ),
                (GIB, GIB, GIB)
            );
            assert_eq!(ended.copied, (GIB, GIB));
        }
    }

    #[test]
    fn host_memory_beyond_the_quota_is_no_absence() {
        let mut bench = Bench::new(GIB);
        bench.holds(GIB / 2);
        bench.machine.look(1, &bench.pages, 0);
        assert_eq!(bench.machine.state(), State::Partly);
        assert!(bench.machine.state().is_usable());
        bench.holds(0);
        bench.machine.look(2, &bench.pages, 0);
        assert_eq!(bench.machine.state(), State::Partly);
        bench.holds(GIB);
        bench.machine.look(3, &bench.pages, 0);
        assert_eq!(bench.machine.state(), State::Resident);
    }
}
