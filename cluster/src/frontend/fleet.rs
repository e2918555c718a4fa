//! The instances of a service as one frontend sees them: which of them it uses, to which a request
//! goes, and which have to be woken. Arithmetic only: times come from outside.
//!
//! All frontends use the first so many of one order, and nothing tells them how many but what they
//! see themselves ([`policy::standbys`]). The order is that of the names, so that it is the same
//! whatever the order on a command line was. An instance that cannot be used (it refuses
//! connections, its job is paused or was evicted by hand) is left out, and the next one takes its
//! place; each frontend notices that by itself.

use policy::cluster::Random;
use policy::standbys::{Frontend, Sla, Wanted};

/// An instance that failed is left alone for so long, at first and at most.
const BACKOFF_S: f64 = 0.5;
const BACKOFF_MAX_S: f64 = 15.0;
/// So many errors (5xx) one after the other, and none that was answered between them, are taken for
/// the instance's.
const ERRORS: u32 = 3;
/// A return is taken to last so long until one was seen, and between these whatever was seen.
const RETURN_S: f64 = 1.0;
const RETURNS_S: (f64, f64) = (0.05, 60.0);
/// The arbiter hears of an instance that is to stay, and has had no request, once in so long, and
/// four times in the time after which it leaves.
const TOUCH_S: f64 = 1.0;
const TOUCH_LEAST_S: f64 = 0.1;
const TOUCHES: f64 = 4.0;
/// So long it hears of one that is to come as often as it may; what takes longer waits for space.
const SOON_S: f64 = 2.0;

/// What a fleet goes by.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Terms {
    /// What was agreed.
    pub sla: Sla,
    /// Frontends, each with an equal part of the requests.
    pub frontends: u32,
    /// Seconds that it looks back.
    pub history_s: u32,
    /// Requests that it gives to an instance at a time.
    pub concurrency: u32,
    /// So many are in use at the least, whatever comes.
    pub least: u32,
    /// And at the most.
    pub most: u32,
    /// Requests that have waited longer than a response may take are refused.
    pub prune: bool,
}

/// Where the memory of an instance is, as the arbiter says.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Memory {
    /// Nobody says: its job is not there, or no arbiter answers. It is used as if it were here.
    #[default]
    Unknown,
    /// On its devices.
    Resident,
    /// In host memory, or on its way.
    Away,
    /// Its job cannot run: it is paused, or was evicted by hand.
    Held,
}

impl Memory {
    /// For programs and people.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Resident => "resident",
            Self::Away => "evicted",
            Self::Held => "held",
        }
    }
}

/// What an instance is to this frontend.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// Requests go to it.
    InUse,
    /// It will be needed soon.
    Ready,
    /// Nothing goes to it.
    Idle,
    /// It failed a moment ago, and is left alone.
    Down,
    /// Its job cannot run.
    Held,
}

impl Role {
    /// For programs and people.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::InUse => "in use",
            Self::Ready => "ready",
            Self::Idle => "idle",
            Self::Down => "down",
            Self::Held => "held",
        }
    }
}

/// How a request that an instance had has ended.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum End {
    /// It was answered.
    Answered,
    /// It was answered with what is the client's fault (4xx): that takes no service, and may have
    /// needed no device.
    Refused,
    /// It was answered with what is the server's fault (5xx).
    Erred,
    /// It said that it is busy, or who asked has gone: nothing is known of it.
    Nothing,
    /// It did not answer as it should.
    Failed,
}

/// One instance.
#[derive(Clone, Debug)]
pub struct Instance {
    /// The name of its job, and its place in the order.
    pub name: String,
    /// Where its memory is.
    pub memory: Memory,
    /// Requests of this frontend that it has.
    pub busy: u32,
    /// Requests that it was given.
    pub requests: u64,
    /// Of these, those that it failed.
    pub failures: u64,
    down_until_s: f64,
    backoff_s: f64,
    /// Since when it is, or was last, left alone.
    left_s: f64,
    /// Errors since its last good answer.
    errors: u32,
    sent_s: f64,
    touched_s: f64,
    touch_s: f64,
    /// Since when its return is waited for.
    woken_s: Option<f64>,
}

/// A request at an instance.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Given {
    /// Which instance.
    pub at: usize,
    /// Since when.
    since_s: f64,
    /// Its memory was there, so that the time is one of service.
    counts: bool,
}

/// The instances, and what this frontend has seen.
#[derive(Clone, Debug)]
pub struct Fleet {
    terms: Terms,
    frontend: Frontend,
    instances: Vec<Instance>,
    wanted: Wanted,
    return_s: f64,
    random: Random,
}

impl Fleet {
    /// Of instances by name, in any order.
    #[must_use]
    pub fn new(terms: Terms, names: &[String], seed: u64) -> Self {
        let mut names = names.to_vec();
        names.sort_unstable();
        let instance = |name| Instance {
            name,
            memory: Memory::Unknown,
            busy: 0,
            requests: 0,
            failures: 0,
            down_until_s: f64::NEG_INFINITY,
            backoff_s: 0.0,
            left_s: f64::NEG_INFINITY,
            errors: 0,
            sent_s: f64::NEG_INFINITY,
            touched_s: f64::NEG_INFINITY,
            touch_s: TOUCH_S,
            woken_s: None,
        };
        Self {
            terms,
            frontend: Frontend::new(terms.frontends, terms.history_s as usize),
            instances: names.into_iter().map(instance).collect(),
            wanted: Wanted {
                in_use: 0,
                ready: 0,
            },
            return_s: RETURN_S,
            random: Random::new(seed),
        }
    }

    /// In their order.
    #[must_use]
    pub fn instances(&self) -> &[Instance] {
        &self.instances
    }

    /// How many it uses and wants ready, as last decided.
    #[must_use]
    pub fn wanted(&self) -> Wanted {
        self.wanted
    }

    /// What it goes by.
    #[must_use]
    pub fn terms(&self) -> &Terms {
        &self.terms
    }

    /// How long a return takes, as far as was seen.
    #[must_use]
    pub fn return_s(&self) -> f64 {
        self.return_s
    }

    /// What it has seen of requests.
    pub fn frontend(&mut self) -> &mut Frontend {
        &mut self.frontend
    }

    /// A request has come.
    pub fn request(&mut self, now_s: f64) {
        self.frontend.request(now_s);
    }

    /// A request is over at this frontend, one way or the other. `service_s` is what
    /// [`release`](Self::release) said of it.
    pub fn ended(&mut self, now_s: f64, service_s: Option<f64>) {
        self.frontend.ended(now_s, service_s);
    }

    fn is_usable(&self, at: usize, now_s: f64) -> bool {
        let one = &self.instances[at];
        one.memory != Memory::Held && one.down_until_s <= now_s
    }

    /// Those that can be used, the first ones first.
    fn usable(&self, now_s: f64) -> impl Iterator<Item = usize> + '_ {
        (0..self.instances.len()).filter(move |at| self.is_usable(*at, now_s))
    }

    /// Looks at the load; `waiting` requests wait here.
    pub fn decide(&mut self, now_s: f64, waiting: usize) -> Wanted {
        let Terms {
            sla,
            concurrency,
            least,
            most,
            ..
        } = self.terms;
        let there = u32::try_from(self.usable(now_s).count()).unwrap_or(u32::MAX);
        let most = most.min(there);
        let servers = most.saturating_mul(concurrency);
        let coming = (self.return_s, waiting);
        let wanted = self.frontend.decide(now_s, &sla, coming, servers);
        let of = |servers: u32| servers.div_ceil(concurrency.max(1)).max(least).min(most);
        // A request that waits is a reason for one, whatever the times of service say.
        let in_use = of(wanted.in_use).max(u32::from(waiting > 0).min(most));
        self.wanted = Wanted {
            in_use,
            ready: of(wanted.ready).max(in_use),
        };
        self.wanted
    }

    /// What an instance is to this frontend now.
    #[must_use]
    pub fn role(&self, at: usize, now_s: f64) -> Role {
        if self.instances[at].memory == Memory::Held {
            return Role::Held;
        }
        match self.usable(now_s).position(|one| one == at) {
            None => Role::Down,
            Some(place) if place < self.wanted.in_use as usize => Role::InUse,
            Some(place) if place < self.wanted.ready as usize => Role::Ready,
            Some(_) => Role::Idle,
        }
    }

    /// Gives a request to an instance; `None`: it has to wait. `not` is one that has had it.
    pub fn give(&mut self, now_s: f64, not: Option<usize>) -> Option<Given> {
        let in_use = self.wanted.in_use.max(1).min(self.terms.most.max(1)) as usize;
        let used: Vec<usize> = self.usable(now_s).take(in_use).collect();
        let is_free = |at: &&usize| self.instances[**at].busy < self.terms.concurrency;
        let is_here = |at: &&usize| self.instances[**at].memory != Memory::Away;
        let mut free: Vec<usize> = used.iter().filter(is_free).copied().collect();
        let here: Vec<usize> = free.iter().filter(is_here).copied().collect();
        if !here.is_empty() {
            free = here;
        } else if used.iter().any(|at| is_here(&at)) {
            // Those that are here are busy, and the others on their way: the first of either.
            return None;
        } else {
            // All are away. The request itself brings the first one back.
            free.truncate(1);
        }
        if free.len() > 1 {
            free.retain(|at| Some(*at) != not);
        }
        let at = match free.len() {
            0 => return None,
            count => free[self.random.below(count)],
        };
        let one = &mut self.instances[at];
        one.busy += 1;
        one.requests += 1;
        one.sent_s = now_s;
        Some(Given {
            at,
            since_s: now_s,
            counts: one.memory != Memory::Away,
        })
    }

    /// A request is no longer at its instance. The time of service, where it is one.
    pub fn release(&mut self, now_s: f64, given: Given, end: End) -> Option<f64> {
        let is_only = self.is_only_choice(given.at, now_s);
        let one = &mut self.instances[given.at];
        one.busy = one.busy.saturating_sub(1);
        match end {
            End::Nothing => None,
            End::Answered => {
                (one.backoff_s, one.down_until_s) = (0.0, f64::NEG_INFINITY);
                one.errors = 0;
                if one.memory == Memory::Away {
                    // It has answered, so it is back; the arbiter will say so.
                    (one.memory, one.woken_s) = (Memory::Unknown, None);
                }
                (given.counts).then(|| (now_s - given.since_s).max(1e-9))
            }
            End::Refused => {
                if one.errors == 0 {
                    (one.backoff_s, one.down_until_s) = (0.0, f64::NEG_INFINITY);
                }
                None
            }
            End::Erred => {
                one.failures += 1;
                one.errors = one.errors.saturating_add(1);
                if one.errors >= ERRORS && !is_only {
                    one.leave_alone(now_s, given.since_s);
                }
                None
            }
            End::Failed => {
                one.failures += 1;
                one.leave_alone(now_s, given.since_s);
                None
            }
        }
    }

    /// Whether there is none without errors beside it: what all of them answer with an error is
    /// answered so by the next one as well.
    fn is_only_choice(&self, at: usize, now_s: f64) -> bool {
        let is_sound = |other: usize| other != at && self.instances[other].errors < ERRORS;
        !self.usable(now_s).any(is_sound)
    }

    /// The arbiter says where an instance's memory is.
    pub fn hear(&mut self, now_s: f64, at: usize, memory: Memory) {
        let Some(one) = self.instances.get_mut(at) else {
            return;
        };
        one.memory = memory;
        if memory == Memory::Away {
            return;
        }
        let woken_s = one.woken_s.take();
        if memory == Memory::Resident
            && let Some(woken_s) = woken_s
        {
            let seen_s = (now_s - woken_s).clamp(RETURNS_S.0, RETURNS_S.1);
            self.return_s += (seen_s - self.return_s) / 4.0;
        }
    }

    /// The arbiter says after how long without work an instance leaves; `None`: it stays.
    pub fn leaves_after(&mut self, at: usize, after_s: Option<f64>) {
        if let Some(one) = self.instances.get_mut(at) {
            let touch_s = after_s.map_or(TOUCH_S, |after_s| after_s / TOUCHES);
            one.touch_s = touch_s.clamp(TOUCH_LEAST_S, TOUCH_S);
        }
    }

    /// Which instances the arbiter should hear of now: those that are wanted and away, and those
    /// that are wanted and have had no request of late.
    pub fn to_wake(&mut self, now_s: f64) -> Vec<usize> {
        let ready = self.wanted.ready as usize;
        let mut asked: Vec<usize> = self.usable(now_s).take(ready).collect();
        for (at, one) in self.instances.iter_mut().enumerate() {
            if !asked.contains(&at) {
                // Nobody waits for its return any more; the next one is another.
                one.woken_s = None;
            }
        }
        asked.retain(|at| {
            let one = &self.instances[*at];
            match one.memory {
                Memory::Away => one.is_due_soon(now_s) || now_s - one.touched_s >= TOUCH_S,
                _ => now_s - one.sent_s.max(one.touched_s) >= one.touch_s,
            }
        });
        for at in &asked {
            let one = &mut self.instances[*at];
            one.touched_s = now_s;
            if one.memory == Memory::Away {
                one.woken_s.get_or_insert(now_s);
            }
        }
        asked
    }

    /// Whether one that is wanted is on its way, so that it is worth asking soon.
    #[must_use]
    pub fn is_waiting_for_one(&self, now_s: f64) -> bool {
        let ready = self.wanted.ready as usize;
        let mut wanted = self.usable(now_s).take(ready).map(|at| &self.instances[at]);
        wanted.any(|one| one.memory == Memory::Away && one.is_due_soon(now_s))
    }
}

impl Instance {
    /// After a request that it has had since then. What it was given before it was left alone is
    /// the same failure once more, and says nothing of how long this one lasts.
    fn leave_alone(&mut self, now_s: f64, since_s: f64) {
        if since_s < self.left_s {
            return;
        }
        self.backoff_s = (self.backoff_s * 2.0).clamp(BACKOFF_S, BACKOFF_MAX_S);
        self.down_until_s = now_s + self.backoff_s;
        self.left_s = now_s;
    }

    /// Whether its return was asked for a moment ago, or never.
    fn is_due_soon(&self, now_s: f64) -> bool {
        self.woken_s.is_none_or(|woken_s| now_s - woken_s < SOON_S)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn terms() -> Terms {
        Terms {
            sla: Sla {
                within_s: 1.0,
                level: 0.99,
                burst: 1.0,
            },
            frontends: 1,
            history_s: 60,
            concurrency: 1,
            least: 0,
            most: 8,
            prune: false,
        }
    }

    fn fleet(terms: Terms, count: usize) -> Fleet {
        // Not in their order.
        let names: Vec<String> = (0..count).rev().map(|n| format!("i{n}")).collect();
        Fleet::new(terms, &names, 7)
    }

    /// Poisson requests at a rate from one time to another, each served for 0.1 s by nobody.
    fn load(fleet: &mut Fleet, random: &mut Random, rate: f64, (from_s, to_s): (f64, f64)) {
        let mut now_s = from_s;
        loop {
            now_s += random.exponential(1.0 / rate);
            if now_s >= to_s {
                return;
            }
            fleet.request(now_s);
            fleet.ended(now_s, Some(0.1));
        }
    }

    #[test]
    fn the_order_is_that_of_the_names_and_the_first_so_many_are_used() {
        let mut fleet = fleet(terms(), 8);
        let names: Vec<&str> = fleet
            .instances()
            .iter()
            .map(|one| one.name.as_str())
            .collect();
        assert_eq!(names, ["i0", "i1", "i2", "i3", "i4", "i5", "i6", "i7"]);
        assert_eq!(fleet.decide(0.0, 0).ready, 0);
        let mut random = Random::new(1);
        load(&mut fleet, &mut random, 20.0, (0.0, 60.0));
        let few = fleet.decide(60.0, 0).in_use;
        load(&mut fleet, &mut random, 45.0, (60.0, 120.0));
        let many = fleet.decide(120.0, 0).in_use;
        assert!(
            (3..=4).contains(&few) && (5..=7).contains(&many),
            "{few} {many}"
        );
        for at in 0..8 {
            let role = fleet.role(at, 120.0);
            assert_eq!(role == Role::InUse, at < many as usize, "{at}: {role:?}");
        }
        let given: Vec<Given> = (0..many)
            .map(|_| fleet.give(120.0, None).unwrap())
            .collect();
        assert!(given.iter().all(|given| given.at < many as usize));
        assert_eq!(fleet.give(120.0, None), None, "all of them have one");
        assert_eq!(fleet.release(120.5, given[0], End::Answered), Some(0.5));
        assert_eq!(fleet.give(121.0, None).unwrap().at, given[0].at);
        // The load is over.
        assert_eq!(fleet.decide(300.0, 0).ready, 0);
    }

    #[test]
    fn what_fails_or_is_held_is_left_out_and_the_next_one_takes_its_place() {
        let terms = Terms {
            least: 2,
            most: 2,
            ..terms()
        };
        let mut fleet = fleet(terms, 4);
        assert_eq!(fleet.decide(0.0, 0).in_use, 2);
        let given = fleet.give(0.0, None).unwrap();
        assert_eq!(fleet.release(0.1, given, End::Failed), None);
        assert_eq!(fleet.role(given.at, 0.2), Role::Down);
        assert_eq!(fleet.role(2, 0.2), Role::InUse);
        assert_eq!(fleet.role(given.at, 0.2 + BACKOFF_S), Role::InUse);
        // It is left alone for longer each time, within bounds.
        let mut now_s = 1.0;
        for _ in 0..20 {
            let given = Given {
                at: 0,
                since_s: now_s,
                counts: true,
            };
            fleet.release(now_s, given, End::Failed);
            now_s += BACKOFF_MAX_S + 0.1;
            assert_ne!(fleet.role(0, now_s), Role::Down);
        }
        fleet.hear(now_s, 1, Memory::Held);
        fleet.hear(now_s, 99, Memory::Held);
        assert_eq!(fleet.role(1, now_s), Role::Held);
        assert_eq!(fleet.role(2, now_s), Role::InUse);
        for at in 0..4 {
            fleet.hear(now_s, at, Memory::Held);
        }
        assert_eq!(
            (fleet.decide(now_s, 9).ready, fleet.give(now_s, None)),
            (0, None)
        );
    }

    #[test]
    fn requests_that_fail_together_are_one_failure() {
        let terms = Terms {
            concurrency: 16,
            ..terms()
        };
        let mut fleet = fleet(terms, 1);
        let given: Vec<Given> = (0..16).map(|_| fleet.give(0.0, None).unwrap()).collect();
        for given in given {
            fleet.release(1.0, given, End::Failed);
        }
        assert_eq!(fleet.instances()[0].failures, 16);
        assert_eq!(fleet.role(0, 1.0 + BACKOFF_S / 2.0), Role::Down);
        assert_ne!(fleet.role(0, 1.0 + BACKOFF_S), Role::Down);
        // The next one is another.
        let given = fleet.give(2.0, None).unwrap();
        fleet.release(2.0, given, End::Failed);
        assert_eq!(fleet.role(0, 2.0 + BACKOFF_S), Role::Down);
    }

    #[test]
    fn errors_are_the_instances_where_another_one_has_none() {
        let terms = Terms {
            least: 2,
            ..terms()
        };
        let mut fleet = fleet(terms, 2);
        fleet.decide(0.0, 0);
        let end = |fleet: &mut Fleet, at, now_s, end| {
            let given = Given {
                at,
                since_s: now_s,
                counts: true,
            };
            fleet.release(now_s, given, end)
        };
        for now_s in [1.0, 2.0, 3.0] {
            assert_ne!(fleet.role(0, now_s), Role::Down);
            assert_eq!(end(&mut fleet, 0, now_s, End::Erred), None);
            // A refused request needed nothing of it.
            assert_eq!(end(&mut fleet, 0, now_s, End::Refused), None);
        }
        assert_eq!(fleet.role(0, 3.0), Role::Down);
        assert_eq!(fleet.role(0, 4.0), Role::InUse, "it has another chance");
        end(&mut fleet, 0, 4.0, End::Erred);
        assert_eq!(fleet.role(0, 4.6), Role::Down, "and one only");
        // All of them do: none is better than the other.
        for now_s in [6.0, 6.1, 6.2, 6.3] {
            end(&mut fleet, 1, now_s, End::Erred);
            end(&mut fleet, 0, now_s, End::Erred);
        }
        assert_eq!(fleet.role(1, 6.3), Role::InUse);
        assert_eq!(end(&mut fleet, 0, 7.5, End::Answered), Some(1e-9));
        assert_eq!(fleet.instances()[0].errors, 0);
    }

    #[test]
    fn a_refused_request_does_not_say_that_memory_is_back() {
        let mut fleet = fleet(terms(), 1);
        fleet.hear(0.0, 0, Memory::Away);
        let given = fleet.give(0.0, None).unwrap();
        assert_eq!(fleet.release(0.1, given, End::Refused), None);
        assert_eq!(fleet.instances()[0].memory, Memory::Away);
    }

    #[test]
    fn one_that_is_away_is_woken_and_gets_a_request_only_where_none_is_here() {
        let terms = Terms {
            least: 2,
            ..terms()
        };
        let mut fleet = fleet(terms, 3);
        (0..3).for_each(|at| fleet.hear(0.0, at, Memory::Away));
        fleet.decide(0.0, 0);
        assert_eq!(fleet.to_wake(0.0), [0, 1]);
        assert_eq!(fleet.to_wake(0.1), [0, 1], "as long as they are away");
        assert!(fleet.is_waiting_for_one(0.1));
        // What does not come for long is asked for less often.
        let mut patient = fleet.clone();
        assert_eq!(patient.to_wake(SOON_S + 0.1), [0, 1]);
        assert_eq!(patient.to_wake(SOON_S + 0.2), [0; 0]);
        assert!(!patient.is_waiting_for_one(SOON_S + 0.2));
        // All are away: the request wakes the first one, and its time is not one of service.
        let first = fleet.give(0.2, None).unwrap();
        let second = fleet.give(0.2, None).unwrap();
        assert_eq!((first.at, second.at, fleet.give(0.2, None)), (0, 1, None));
        assert_eq!(fleet.release(0.3, second, End::Nothing), None);
        assert_eq!(fleet.release(0.9, first, End::Answered), None);
        // It has answered, so it is here, and the other one is on its way.
        let again = fleet.give(1.0, None).unwrap();
        assert_eq!((again.at, fleet.give(1.0, None)), (0, None));
        fleet.hear(2.0, 1, Memory::Resident);
        assert_eq!(fleet.give(2.0, None).unwrap().at, 1);
        assert!(
            (fleet.return_s() - 1.25).abs() < 1e-9,
            "{}",
            fleet.return_s()
        );
        assert!(!fleet.is_waiting_for_one(2.0));
        // Those that have requests need no word.
        assert_eq!(fleet.to_wake(2.5), [0]);
        assert_eq!(fleet.to_wake(3.0), [1]);
        assert_eq!(fleet.to_wake(3.1), [0; 0]);
        // One that leaves sooner hears of it more often, within bounds.
        for (after_s, next_s) in [(2.0, 0.5), (0.0, 0.1), (1e9, 1.0)] {
            fleet.leaves_after(1, Some(after_s));
            let begun_s = fleet.instances()[1].touched_s;
            assert!(
                !fleet.to_wake(begun_s + next_s - 0.01).contains(&1),
                "{after_s}"
            );
            assert!(
                fleet.to_wake(begun_s + next_s + 0.01).contains(&1),
                "{after_s}"
            );
        }
    }

    /// One that found no space, and was wanted again an hour later, did not take an hour to return.
    #[test]
    fn a_return_that_nobody_waited_for_took_no_time() {
        let mut fleet = fleet(terms(), 1);
        fleet.hear(0.0, 0, Memory::Away);
        fleet.decide(0.0, 1);
        assert_eq!(fleet.to_wake(0.0), [0]);
        fleet.decide(5.0, 0);
        assert_eq!(fleet.to_wake(5.0), [0; 0]);
        fleet.decide(3600.0, 1);
        assert_eq!(fleet.to_wake(3600.0), [0]);
        assert!(
            fleet.is_waiting_for_one(3600.1),
            "asked for as if for the first time"
        );
        fleet.hear(3600.2, 0, Memory::Resident);
        assert!(fleet.return_s() < RETURN_S, "{}", fleet.return_s());
    }

    #[test]
    fn a_request_is_reason_enough_and_another_try_goes_elsewhere() {
        let mut fleet = fleet(terms(), 3);
        assert_eq!(fleet.decide(0.0, 1).in_use, 1);
        let only = fleet.give(0.0, Some(0)).unwrap();
        assert_eq!(only.at, 0, "there is no other");
        fleet.release(0.0, only, End::Nothing);
        let two = Terms {
            least: 2,
            ..terms()
        };
        fleet.terms = two;
        fleet.decide(0.0, 1);
        for _ in 0..20 {
            let given = fleet.give(0.0, Some(1)).unwrap();
            assert_eq!(given.at, 0);
            fleet.release(0.0, given, End::Nothing);
        }
    }

    #[test]
    fn instances_that_serve_several_at_once_are_fewer() {
        let several = Terms {
            concurrency: 4,
            ..terms()
        };
        let (mut one, mut four) = (fleet(terms(), 8), fleet(several, 8));
        for fleet in [&mut one, &mut four] {
            load(fleet, &mut Random::new(5), 40.0, (0.0, 60.0));
            fleet.decide(60.0, 0);
        }
        assert_eq!(one.wanted().in_use.div_ceil(4), four.wanted().in_use);
        let given = (0..8).filter(|_| four.give(60.0, None).is_some()).count();
        assert_eq!(given, 4 * four.wanted().in_use as usize);
    }

    #[test]
    fn two_frontends_that_see_halves_of_a_load_use_the_same_instances() {
        let half = Terms {
            frontends: 2,
            ..terms()
        };
        let mut both = [fleet(half, 8), fleet(half, 8)];
        let mut random = Random::new(11);
        let (mut now_s, mut apart, mut looks) = (0.0, 0, 0);
        let mut next_s = 60.0;
        while now_s < 600.0 {
            now_s += random.exponential(1.0 / 30.0);
            let at = random.below(2);
            both[at].request(now_s);
            both[at].ended(now_s, Some(0.1));
            if now_s >= next_s {
                next_s += 1.0;
                looks += 1;
                let [a, b] = [0, 1].map(|at| both[at].decide(now_s, 0).in_use);
                assert!(a.abs_diff(b) <= 2, "{a} and {b} at {now_s}");
                apart += u32::from(a.abs_diff(b) > 1);
            }
        }
        assert!(apart * 5 < looks, "{apart} of {looks}");
    }
}
