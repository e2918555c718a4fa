//! Groups of jobs that take turns by themselves: who has the turn of each, who waits for it, and
//! until when.
//!
//! A group is its user's: two users' groups of one name are two groups. It is there as long as it
//! has members, and a job is in one at most. One member at a time has the turn. It *comes* while
//! memory moves, and *has* it from when that was answered; requests of the job that came meanwhile
//! are answered with it. Who asks while another one has the turn waits in line.
//!
//! Knows neither clock nor gates nor memory: what a turn is on the devices, `group_turns` sees to.

use std::collections::{BTreeMap, VecDeque};

use policy::TenantId;

/// Requests that one job may have waiting.
const MOST_OF_JOB: usize = 8;

/// Whose group, and which.
pub type Key = (u32, String);

/// A request that waits for a turn.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Waiter {
    /// The request.
    pub number: u64,
    /// Its job.
    pub tenant: TenantId,
    /// Who asks.
    pub uid: u32,
    /// Since when.
    pub began_ns: u64,
    /// Until when.
    pub deadline_ns: u64,
}

/// How far a turn is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Stage {
    /// Memory moves.
    Comes {
        /// Since when.
        since_ns: u64,
        /// Its memory was away.
        was_away: bool,
        /// Who is notified when it has the turn.
        asked: Vec<Waiter>,
    },
    /// It was notified.
    Has,
}

/// The turn, while somebody has it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Hold {
    /// Who.
    pub tenant: TenantId,
    /// How far that is.
    pub stage: Stage,
}

/// One group.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Group {
    /// Its jobs, in the order in which they came.
    pub members: Vec<TenantId>,
    /// Who has the turn.
    pub hold: Option<Hold>,
    /// Who had it last, or has it.
    pub last: Option<TenantId>,
    /// Who waits, first come first.
    pub waiting: VecDeque<Waiter>,
    /// When the turn last began or ended.
    pub since_unix_ms: u64,
}

impl Group {
    /// Whether something may happen by itself.
    fn is_busy(&self) -> bool {
        !self.waiting.is_empty() || self.comes().is_some()
    }

    /// Who is about to have the turn.
    pub fn comes(&self) -> Option<TenantId> {
        let hold = self.hold.as_ref()?;
        matches!(hold.stage, Stage::Comes { .. }).then_some(hold.tenant)
    }

    /// Who has the turn, or is about to.
    pub fn holder(&self) -> Option<TenantId> {
        self.hold.as_ref().map(|hold| hold.tenant)
    }

    /// Jobs that wait: each once, however often it has asked.
    pub fn waiting_jobs(&self) -> Vec<TenantId> {
        let mut jobs = Vec::new();
        for waiter in &self.waiting {
            if !jobs.contains(&waiter.tenant) {
                jobs.push(waiter.tenant);
            }
        }
        jobs
    }
}

/// What follows from a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Asked {
    /// The job has the turn already.
    Has,
    /// It waits.
    Waits,
    /// There are too many requests: so many of this job, of this user, or of all.
    TooMany(usize, &'static str),
}

/// See the module's documentation.
#[derive(Debug)]
pub struct Groups {
    all: BTreeMap<Key, Group>,
    of: BTreeMap<TenantId, Key>,
    /// Requests that may wait.
    most: usize,
}

impl Groups {
    /// None yet. `most` requests may wait at a time, half of them of one user.
    pub fn new(most: usize) -> Self {
        Self {
            all: BTreeMap::new(),
            of: BTreeMap::new(),
            most: most.max(2),
        }
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = (&Key, &Group)> {
        self.all.iter()
    }

    /// One of them.
    pub fn get(&self, key: &Key) -> Option<&Group> {
        self.all.get(key)
    }

    /// The group of a job.
    pub fn of(&self, tenant: TenantId) -> Option<(&Key, &Group)> {
        let key = self.of.get(&tenant)?;
        Some((key, self.all.get(key)?))
    }

    /// Groups in which something may happen by itself.
    pub fn busy(&self) -> Vec<Key> {
        let busy = self.all.iter().filter(|(_, group)| group.is_busy());
        busy.map(|(key, _)| key.clone()).collect()
    }

    /// When the next request has waited as long as it may.
    pub fn due_ns(&self) -> Option<u64> {
        self.waiters().map(|waiter| waiter.deadline_ns).min()
    }

    fn waiters(&self) -> impl Iterator<Item = &Waiter> {
        self.all.values().flat_map(|group| {
            let asked = match &group.hold {
                Some(Hold {
                    stage: Stage::Comes { asked, .. },
                    ..
                }) => &asked[..],
                _ => &[],
            };
            group.waiting.iter().chain(asked)
        })
    }

    /// A job is in this group from here on.
    ///
    /// # Errors
    /// The name of the group that it is in.
    pub fn join(
        &mut self,
        tenant: TenantId,
        uid: u32,
        name: &str,
        now_unix_ms: u64,
    ) -> Result<(), String> {
        if let Some((_, own)) = self.of.get(&tenant) {
            return if own == name {
                Ok(())
            } else {
                Err(own.clone())
            };
        }
        let key = (uid, name.to_owned());
        let group = self.all.entry(key.clone()).or_insert_with(|| Group {
            since_unix_ms: now_unix_ms,
            ..Group::default()
        });
        group.members.push(tenant);
        self.of.insert(tenant, key);
        Ok(())
    }

    /// A job is gone: its turn is free. Returns the requests that were made for it.
    pub fn remove(&mut self, tenant: TenantId, now_unix_ms: u64) -> Vec<Waiter> {
        let left = self.drop_claims(tenant, now_unix_ms);
        let Some(key) = self.of.remove(&tenant) else {
            return left;
        };
        if let Some(group) = self.all.get_mut(&key) {
            group.members.retain(|member| *member != tenant);
            group.last = group.last.filter(|last| *last != tenant);
            if group.members.is_empty() {
                self.all.remove(&key);
            }
        }
        left
    }

    /// A job neither has the turn nor waits for it any more. Returns the requests that were made
    /// for it.
    pub fn drop_claims(&mut self, tenant: TenantId, now_unix_ms: u64) -> Vec<Waiter> {
        let Some(group) = self.of.get(&tenant).and_then(|key| self.all.get_mut(key)) else {
            return Vec::new();
        };
        let mut left: Vec<Waiter> = Vec::new();
        let (own, others) = std::mem::take(&mut group.waiting)
            .into_iter()
            .partition(|waiter| waiter.tenant == tenant);
        group.waiting = others;
        left.extend::<VecDeque<Waiter>>(own);
        if let Some(hold) = group.hold.take_if(|hold| hold.tenant == tenant) {
            group.since_unix_ms = now_unix_ms;
            if let Stage::Comes { asked, .. } = hold.stage {
                left.extend(asked);
            }
        }
        left
    }

    /// A job asks for the turn of the group that it is in.
    pub fn ask(&mut self, waiter: Waiter) -> Asked {
        let count = |of: &dyn Fn(&Waiter) -> bool| self.waiters().filter(|one| of(one)).count();
        let of_job = count(&|one| one.tenant == waiter.tenant);
        let of_user = count(&|one| one.uid == waiter.uid);
        let (all, most) = (count(&|_| true), self.most);
        let Some(group) = self
            .of
            .get(&waiter.tenant)
            .and_then(|key| self.all.get_mut(key))
        else {
            return Asked::TooMany(0, "in a group");
        };
        let own = group
            .hold
            .as_mut()
            .filter(|hold| hold.tenant == waiter.tenant);
        if let Some(Hold {
            stage: Stage::Has, ..
        }) = own
        {
            return Asked::Has;
        }
        for (there, most, whose) in [
            (of_job, MOST_OF_JOB, "of this job"),
            (of_user, most / 2, "of this user"),
            (all, most, "in all"),
        ] {
            if there >= most {
                return Asked::TooMany(there, whose);
            }
        }
        match own {
            Some(Hold {
                stage: Stage::Comes { asked, .. },
                ..
            }) => asked.push(waiter),
            _ => group.waiting.push_back(waiter),
        }
        Asked::Waits
    }

    /// A job gives the turn up. How many jobs wait for it, and the requests that were made for the
    /// job and not answered yet.
    ///
    /// # Errors
    /// It has no turn; who has.
    pub fn give_up(
        &mut self,
        tenant: TenantId,
        now_unix_ms: u64,
    ) -> Result<(usize, Vec<Waiter>), Option<TenantId>> {
        let Some(group) = self.of.get(&tenant).and_then(|key| self.all.get_mut(key)) else {
            return Err(None);
        };
        let Some(hold) = group.hold.take_if(|hold| hold.tenant == tenant) else {
            return Err(group.holder());
        };
        group.since_unix_ms = now_unix_ms;
        let asked = match hold.stage {
            Stage::Comes { asked, .. } => asked,
            Stage::Has => Vec::new(),
        };
        Ok((group.waiting_jobs().len(), asked))
    }

    /// Jobs of a group whose requests have waited as long as they may.
    pub fn overdue(&self, key: &Key, now_ns: u64) -> Vec<TenantId> {
        let Some(group) = self.all.get(key) else {
            return Vec::new();
        };
        let asked = match group.hold.as_ref().map(|hold| &hold.stage) {
            Some(Stage::Comes { asked, .. }) => asked.as_slice(),
            _ => &[],
        };
        let all = group.waiting.iter().chain(asked);
        all.filter(|waiter| now_ns >= waiter.deadline_ns)
            .map(|waiter| waiter.tenant)
            .collect()
    }

    /// Takes away the requests of a group that have waited as long as they may, which are returned,
    /// and those that nobody waits for any more. A turn that comes for nobody any more is over:
    /// whose it was.
    pub fn prune(
        &mut self,
        key: &Key,
        now_ns: u64,
        now_unix_ms: u64,
        awaits: impl Fn(u64) -> bool,
    ) -> (Vec<Waiter>, Option<TenantId>) {
        let Some(group) = self.all.get_mut(key) else {
            return (Vec::new(), None);
        };
        let mut over = Vec::new();
        let mut keep = |waiter: &Waiter| {
            let waits = awaits(waiter.number);
            let is_late = now_ns >= waiter.deadline_ns;
            if waits && is_late {
                over.push(waiter.clone());
            }
            waits && !is_late
        };
        group.waiting.retain(&mut keep);
        let mut lost = None;
        if let Some(hold) = &mut group.hold
            && let Stage::Comes { asked, .. } = &mut hold.stage
        {
            asked.retain(&mut keep);
            if asked.is_empty() {
                lost = Some(hold.tenant);
            }
        }
        if lost.is_some() {
            group.hold = None;
            group.since_unix_ms = now_unix_ms;
        }
        (over, lost)
    }

    /// Who is next, where nobody has the turn.
    pub fn next(&self, key: &Key) -> Option<TenantId> {
        let group = self.all.get(key)?;
        match &group.hold {
            None => group.waiting.front().map(|waiter| waiter.tenant),
            Some(_) => None,
        }
    }

    /// The turn of a group, which nobody has, comes to a job.
    pub fn begin(
        &mut self,
        key: &Key,
        tenant: TenantId,
        was_away: bool,
        (now_ns, now_unix_ms): (u64, u64),
    ) {
        let Some(group) = self.all.get_mut(key) else {
            return;
        };
        let (asked, waiting) = std::mem::take(&mut group.waiting)
            .into_iter()
            .partition::<Vec<Waiter>, _>(|waiter| waiter.tenant == tenant);
        group.waiting = waiting.into();
        let stage = Stage::Comes {
            since_ns: now_ns,
            was_away,
            asked,
        };
        group.hold = Some(Hold { tenant, stage });
        group.last = Some(tenant);
        group.since_unix_ms = now_unix_ms;
    }

    /// It has come. Whether the job's memory was away, and who is to be notified.
    pub fn arrive(&mut self, key: &Key, now_unix_ms: u64) -> Option<(bool, Vec<Waiter>)> {
        let group = self.all.get_mut(key)?;
        let hold = group.hold.as_mut()?;
        group.since_unix_ms = now_unix_ms;
        match std::mem::replace(&mut hold.stage, Stage::Has) {
            Stage::Comes {
                was_away, asked, ..
            } => Some((was_away, asked)),
            Stage::Has => None,
        }
    }

    /// A job had the turn under the arbiter before this one; false where another one has it.
    pub fn resume(&mut self, tenant: TenantId, holds: bool) -> bool {
        let Some(group) = self.of.get(&tenant).and_then(|key| self.all.get_mut(key)) else {
            return false;
        };
        if group.hold.is_some() {
            return false;
        }
        group.last = Some(tenant);
        if holds {
            let stage = Stage::Has;
            group.hold = Some(Hold { tenant, stage });
        }
        holds
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: TenantId = TenantId(1);
    const B: TenantId = TenantId(2);
    const C: TenantId = TenantId(3);

    fn waiter(number: u64, tenant: TenantId) -> Waiter {
        Waiter {
            number,
            tenant,
            uid: 7,
            began_ns: 0,
            deadline_ns: 100 + number,
        }
    }

    fn three() -> (Groups, Key) {
        let mut groups = Groups::new(40);
        for tenant in [A, B, C] {
            groups.join(tenant, 7, "rl", 5).expect("in no other");
        }
        (groups, (7, "rl".into()))
    }

    fn begin(groups: &mut Groups, key: &Key) -> TenantId {
        let next = groups.next(key).expect("one waits");
        groups.begin(key, next, false, (10, 10));
        groups.arrive(key, 10).expect("it comes");
        next
    }

    #[test]
    fn turns_are_had_one_after_the_other_in_the_order_in_which_they_were_asked_for() {
        let (mut groups, key) = three();
        for (number, tenant) in [(1, B), (2, A), (3, B), (4, C)] {
            assert_eq!(groups.ask(waiter(number, tenant)), Asked::Waits);
        }
        let next = groups.next(&key).expect("one waits");
        assert_eq!(next, B);
        groups.begin(&key, B, true, (10, 10));
        // What is asked on the way is answered with the rest.
        assert_eq!(groups.ask(waiter(5, B)), Asked::Waits);
        let (was_away, asked) = groups.arrive(&key, 10).expect("it comes");
        let numbers: Vec<u64> = asked.iter().map(|one| one.number).collect();
        assert_eq!((was_away, numbers), (true, vec![1, 3, 5]));
        assert_eq!(groups.ask(waiter(6, B)), Asked::Has);
        assert_eq!(groups.next(&key), None);
        assert_eq!(groups.give_up(A, 11), Err(Some(B)));
        assert_eq!(groups.give_up(B, 11), Ok((2, Vec::new())));
        assert_eq!(groups.give_up(B, 11), Err(None), "once");
        assert_eq!(begin(&mut groups, &key), A);
        assert_eq!(groups.give_up(A, 12), Ok((1, Vec::new())));
        assert_eq!(begin(&mut groups, &key), C);
        assert_eq!(groups.give_up(C, 13), Ok((0, Vec::new())));
        assert_eq!(groups.get(&key).and_then(|group| group.last), Some(C));
        assert!(groups.busy().is_empty());
    }

    #[test]
    fn who_goes_leaves_the_turn_and_the_line() {
        let (mut groups, key) = three();
        for (number, tenant) in [(1, A), (2, B), (3, A)] {
            groups.ask(waiter(number, tenant));
        }
        groups.begin(&key, A, false, (1, 1));
        groups.ask(waiter(4, B));
        let left: Vec<u64> = groups.remove(A, 2).iter().map(|one| one.number).collect();
        assert_eq!(left, [1, 3]);
        assert_eq!(groups.next(&key), Some(B));
        assert_eq!(groups.get(&key).and_then(|group| group.last), None);
        let left: Vec<u64> = groups.remove(B, 2).iter().map(|one| one.number).collect();
        assert_eq!(left, [2, 4]);
        assert!(groups.remove(C, 2).is_empty());
        assert!(
            groups.get(&key).is_none(),
            "a group without members is gone"
        );
        assert!(groups.remove(C, 2).is_empty());
    }

    #[test]
    fn who_waits_too_long_or_has_gone_waits_no_more() {
        let (mut groups, key) = three();
        for (number, tenant) in [(1, A), (2, B), (3, C)] {
            groups.ask(waiter(number, tenant));
        }
        groups.begin(&key, A, false, (1, 1));
        assert_eq!(groups.due_ns(), Some(101));
        let (over, lost) = groups.prune(&key, 50, 3, |number| number != 2);
        assert!(over.is_empty() && lost.is_none());
        // The one who waited for the turn that comes is late: nobody has it then.
        let (over, lost) = groups.prune(&key, 101, 4, |_| true);
        let over: Vec<u64> = over.iter().map(|one| one.number).collect();
        assert_eq!((over, lost), (vec![1], Some(A)));
        assert_eq!(groups.next(&key), Some(C));
        groups.begin(&key, C, false, (1, 1));
        let (over, lost) = groups.prune(&key, 50, 3, |_| false);
        assert_eq!((over.len(), lost), (0, Some(C)));
        assert_eq!(groups.next(&key), None);
    }

    #[test]
    fn a_job_is_in_one_group_and_users_have_groups_of_their_own() {
        let (mut groups, key) = three();
        assert_eq!(groups.join(A, 7, "rl", 0), Ok(()));
        assert_eq!(groups.join(A, 7, "other", 0), Err("rl".into()));
        groups.join(TenantId(9), 8, "rl", 0).expect("in no other");
        assert_eq!(groups.iter().count(), 2);
        groups.ask(waiter(1, A));
        groups.ask(Waiter {
            uid: 8,
            ..waiter(2, TenantId(9))
        });
        assert_eq!(begin(&mut groups, &key), A);
        assert_eq!(begin(&mut groups, &(8, "rl".into())), TenantId(9));
    }

    #[test]
    fn requests_that_wait_are_bounded_by_job_user_and_in_all() {
        let mut groups = Groups::new(40);
        for id in 1..=10 {
            let uid = if id < 5 { 7 } else { 8 };
            groups
                .join(TenantId(id), uid, "rl", 0)
                .expect("in no other");
        }
        let mut flood = |id: u64, uid: u32| {
            let ask = |number| {
                let one = Waiter {
                    uid,
                    ..waiter(number, TenantId(id))
                };
                groups.ask(one)
            };
            (0..10_000).map(ask).find(|asked| *asked != Asked::Waits)
        };
        assert_eq!(flood(1, 7), Some(Asked::TooMany(8, "of this job")));
        assert_eq!(flood(2, 7), Some(Asked::TooMany(8, "of this job")));
        assert_eq!(flood(3, 7), Some(Asked::TooMany(20, "of this user")));
        for id in 5..=7 {
            flood(id, 8);
        }
        assert_eq!(flood(8, 9), Some(Asked::TooMany(40, "in all")));
        assert_eq!(groups.waiters().count(), 40);
    }

    #[test]
    fn the_turn_of_an_earlier_arbiter_is_taken_over_once() {
        let (mut groups, key) = three();
        assert!(!groups.resume(A, false));
        assert!(groups.resume(B, true) && !groups.resume(C, true));
        assert_eq!(groups.get(&key).and_then(Group::holder), Some(B));
        assert!(!groups.resume(TenantId(99), true));
        assert_eq!(groups.ask(waiter(1, B)), Asked::Has);
    }
}
