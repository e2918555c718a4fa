//! What the turn of a group is on the devices: its holder's gate may open, the other members' gates
//! stay closed, and their memory leaves when another one's turn comes.
//!
//! A job that gives its turn up stops at once; its memory stays until another member has asked for
//! the turn, or until somebody needs the space, as of any job that does nothing. A request is
//! answered when the memory of the others has left or cannot, when the job's own is back, and when
//! a successor of this arbiter would know whose turn it is.

use control::{
    Acquire, Acquired, ControlError, DEFAULT_GROUP, ErrorCode, GiveUp, GroupMember, GroupState,
    GroupStatus, Reply, Turn, Yielded, check_name, exact_bytes,
};
use policy::TenantId;
use policy::residency::Standing;
use serde_json::Value;

use crate::groups::{Asked, Group, Key, Stage, Waiter};
use crate::journal::About;
use crate::peer;
use crate::residency::{ResidencyStatus, State};
use crate::serve::Arbiter;
use crate::state::SavedTurn;
use crate::tenant::Tenant;
use crate::unsaved::PATIENCE_NS as SAVE_PATIENCE_NS;
use crate::who::Peer;

/// How long a job that is too large for what there is may have its turn come. TIMEOUT: a driver
/// frees the memory of a process that was killed within some seconds.
const SETTLES_NS: u64 = 10_000_000_000;

/// Between two looks for processes that have not come back yet.
const LOOK_NS: u64 = 20_000_000;

/// How far a turn is that comes.
enum Progress {
    /// Memory is on its way.
    Moving,
    /// The job can run.
    Arrived,
    /// It cannot, and why.
    Fails(String),
    /// As things are it cannot. What a job that was killed had is not free at once.
    TooLarge(String),
}

impl Arbiter {
    /// Has a job wait for the turn of its group.
    pub(crate) fn acquire(
        &mut self,
        number: u64,
        job: &str,
        acquire: &Acquire,
        peer: &Peer,
    ) -> Result<(), ControlError> {
        let tenant = self.tenant_of(job, peer)?;
        let (id, uid, name) = (tenant.id, tenant.uid, tenant.spec.name.clone());
        let now_ns = self.clock.mono_ns();
        let group = match (acquire.group.as_str(), self.groups.of(id)) {
            ("", Some(((_, own), _))) => own.clone(),
            ("", None) => DEFAULT_GROUP.to_owned(),
            (named, _) => named.to_owned(),
        };
        check_name(&group)
            .map_err(|error| ControlError::new(ErrorCode::Invalid, error.to_string()))?;
        let now_unix_ms = self.clock.unix_ms();
        let is_new = self.groups.of(id).is_none();
        let joined = self.groups.join(id, uid, &group, now_unix_ms);
        joined.map_err(|own| {
            let message = format!("job `{name}` is in the group `{own}`, and in no other one");
            ControlError::new(ErrorCode::Refused, message)
                .with_hint("acquire that one, or start a job of its own for the other group")
        })?;
        let waiter = Waiter {
            number,
            tenant: id,
            uid: peer.uid,
            began_ns: now_ns,
            deadline_ns: now_ns.saturating_add(acquire.patience_ms() * 1_000_000),
        };
        match self.groups.ask(waiter) {
            Asked::Has => {
                let acquired = Acquired {
                    job: name,
                    group,
                    acquired: true,
                    held_before: true,
                    ..Acquired::default()
                };
                self.turns.reply(number, Ok(Reply::Acquired(acquired)));
            }
            // The next step of the loop goes on with it.
            Asked::Waits => {
                if is_new {
                    self.keep_away_from_holder(id);
                }
                self.publish_group(id);
            }
            Asked::TooMany(there, whose) => {
                // A job that was in no group is in none after that either.
                if is_new {
                    self.groups.remove(id, now_unix_ms);
                }
                let message = format!("{there} requests {whose} wait for turns already");
                return Err(ControlError::new(ErrorCode::Refused, message)
                    .with_hint("one request of a job is enough: wait for its answer"));
            }
        }
        Ok(())
    }

    /// Gives a job's turn up: it stops at once.
    pub(crate) fn give_up(
        &mut self,
        job: &str,
        give_up: &GiveUp,
        peer: &Peer,
    ) -> Result<Reply, ControlError> {
        let tenant = self.tenant_of(job, peer)?;
        let (id, uid, name) = (tenant.id, tenant.uid, tenant.spec.name.clone());
        let own = self.groups.of(id).map(|((_, own), _)| own.clone());
        let group = match own {
            Some(own) if give_up.group.is_empty() || give_up.group == own => own,
            own => return Err(self.wrong_group(&name, uid, &give_up.group, own)),
        };
        let given = self.groups.give_up(id, self.clock.unix_ms());
        let (waiting, asked) = given.map_err(|holder| {
            let holder = holder.and_then(|holder| self.ledger.get(holder));
            let who = holder.map_or("nobody has".into(), |holder| {
                format!("`{}` has", holder.spec.name)
            });
            let message = format!("job `{name}` has no turn to give up: {who} that of `{group}`");
            ControlError::new(ErrorCode::Refused, message)
                .with_hint("`sublet acquire` comes before `sublet yield`")
        })?;
        for waiter in asked {
            self.answer_late(
                &waiter,
                "it has given up the turn that it waited for".into(),
            );
        }
        self.end_turn(id, waiting, "gives its turn up");
        Ok(Reply::Yielded(Yielded {
            job: name,
            group,
            waiting: waiting as u64,
            stays: waiting == 0,
        }))
    }

    fn wrong_group(&self, job: &str, uid: u32, asked: &str, own: Option<String>) -> ControlError {
        let shown: String = asked.chars().take(control::NAME_MAX_BYTES).collect();
        let is_there = || self.groups.get(&(uid, asked.to_owned())).is_some();
        let (code, message) = match own {
            Some(own) if asked.is_empty() || is_there() => {
                let message = format!("job `{job}` is in the group `{own}`, not in `{shown}`");
                (ErrorCode::Refused, message)
            }
            _ if !asked.is_empty() && !is_there() => {
                let message = format!("no job is in a group `{shown}`");
                (ErrorCode::NoSuchGroup, message)
            }
            _ => {
                let message = format!("job `{job}` is in no group");
                (ErrorCode::NoSuchGroup, message)
            }
        };
        ControlError::new(code, message).with_hint(
            "`sublet groups` lists them; a job is in one from its first `sublet acquire` on",
        )
    }

    /// A job has no turn any more.
    fn end_turn(&mut self, id: TenantId, waiting: usize, how: &str) {
        for scheduler in self.schedulers.iter_mut() {
            scheduler.forget_call(id);
        }
        self.publish_group(id);
        self.persistence.mark_old();
        let fields = [("waiting", Value::from(waiting))];
        self.tell_turn(id, "turn_over", how, &fields);
    }

    /// The groups, for anybody who asks: the names and figures of jobs are everybody's.
    pub(crate) fn groups_status(&self) -> Vec<GroupStatus> {
        let status = |(key, group): (&Key, &Group)| {
            let name_of = |id: TenantId| {
                let tenant = self.ledger.get(id);
                tenant.map_or_else(String::new, |tenant| tenant.spec.name.clone())
            };
            let member = |id: &TenantId| {
                let all = self.residency_of(*id);
                let sum = |of: fn(&ResidencyStatus) -> u64| {
                    all.iter().map(of).fold(0, u64::saturating_add)
                };
                GroupMember {
                    job: name_of(*id),
                    turn: turn_in(group, *id),
                    evictable_bytes: sum(|one| one.evictable_bytes),
                    resident_bytes: sum(|one| one.resident_bytes),
                    failed: all.iter().any(|one| one.state == State::Failed),
                }
            };
            let user = group.members.iter().find_map(|id| self.ledger.get(*id));
            GroupStatus {
                name: key.1.clone(),
                uid: key.0,
                user: user.map_or_else(String::new, |tenant| tenant.user.clone()),
                state: match (&group.hold, group.last) {
                    (Some(_), _) if group.comes().is_some() => GroupState::Switching,
                    (Some(_), _) => GroupState::Held,
                    (None, Some(last)) if self.is_on_a_device(last) => GroupState::Yielded,
                    (None, _) => GroupState::Idle,
                },
                since_unix_ms: group.since_unix_ms,
                holder: group.holder().map(name_of),
                last: group.last.map(name_of),
                waiting: group.waiting_jobs().into_iter().map(name_of).collect(),
                members: group.members.iter().map(member).collect(),
            }
        };
        self.groups.iter().map(status).collect()
    }

    /// What a job has to do with the turn of its group; `None`: it is in none.
    pub(crate) fn turn_of(&self, id: TenantId) -> Option<(String, Turn)> {
        let ((_, name), group) = self.groups.of(id)?;
        Some((name.clone(), turn_in(group, id)))
    }

    /// Whether something of a job is there that could leave: what cannot does not count.
    fn is_on_a_device(&self, id: TenantId) -> bool {
        let all = self.residency_of(id);
        all.iter().any(|one| one.resident_bytes > 0) || (all.is_empty() && self.has_clients(id))
    }

    fn has_clients(&self, id: TenantId) -> bool {
        let tenant = self.ledger.get(id);
        tenant.is_some_and(|tenant| !tenant.clients.is_empty())
    }

    fn residency_of(&self, id: TenantId) -> Vec<ResidencyStatus> {
        let all = self.schedulers.iter();
        all.filter_map(|scheduler| scheduler.residency_status(id))
            .collect()
    }

    /// A job is in the group that it was started in.
    pub(crate) fn enter_group(&mut self, id: TenantId) {
        let Some(tenant) = self.ledger.get(id) else {
            return;
        };
        if let Some(name) = tenant.spec.settings.group.clone() {
            let uid = tenant.uid;
            // It is in no other one: it has just come.
            let _ = self.groups.join(id, uid, &name, self.clock.unix_ms());
            self.keep_away_from_holder(id);
            self.publish_group(id);
        }
    }

    /// What a job gets that joins while another one has the turn leaves at once: all of the memory
    /// is the holder's.
    fn keep_away_from_holder(&mut self, id: TenantId) {
        let holder = self.groups.of(id).and_then(|(_, group)| group.holder());
        if let Some(tenant) = self.ledger.get_mut(id) {
            let another_holds = holder.is_some_and(|holder| holder != id);
            tenant.turn.is_away = another_holds && tenant.spec.evictable();
        }
    }

    /// A job of the arbiter before this one is in the group that it was in, and has its turn.
    pub(crate) fn resume_turn(&mut self, id: TenantId, saved: Option<&SavedTurn>) {
        let Some(saved) = saved.filter(|saved| check_name(&saved.group).is_ok()) else {
            return self.enter_group(id);
        };
        let Some(tenant) = self.ledger.get_mut(id) else {
            return;
        };
        tenant.turn.is_away = saved.is_away && !saved.holds;
        let uid = tenant.uid;
        let joined = self
            .groups
            .join(id, uid, &saved.group, self.clock.unix_ms());
        if joined.is_ok() && (saved.holds || saved.was_last) {
            self.groups.resume(id, saved.holds);
        }
        self.publish_group(id);
    }

    /// A job is gone, and its turn is free. Not in the ledger any more.
    pub(crate) fn leave_group(&mut self, id: TenantId, name: &str) {
        let now_unix_ms = self.clock.unix_ms();
        let others = self.groups.of(id).map(|(_, group)| group.members.clone());
        for waiter in self.groups.remove(id, now_unix_ms) {
            self.answer_ended(&waiter, name);
        }
        if let Some(other) = others.into_iter().flatten().find(|other| *other != id) {
            self.publish_group(other);
        }
    }

    /// Nothing of a job uses a device any more: what lives of it may come back, and asks anew.
    pub(crate) fn rest_in_group(&mut self, id: TenantId) {
        let Some((_, group)) = self.groups.of(id) else {
            return;
        };
        let (had, waiting) = (group.holder() == Some(id), group.waiting_jobs().len());
        let name = self.ledger.get(id).map(|tenant| tenant.spec.name.clone());
        let name = name.unwrap_or_default();
        for waiter in self.groups.drop_claims(id, self.clock.unix_ms()) {
            self.answer_ended(&waiter, &name);
        }
        if had {
            self.end_turn(id, waiting, "has ended, and so has its turn");
        }
    }

    fn answer_ended(&mut self, waiter: &Waiter, name: &str) {
        let message = format!("job `{name}` has ended");
        let error = ControlError::new(ErrorCode::NoSuchJob, message);
        self.turns.reply(waiter.number, Err(error));
    }

    /// It has waited as long as it was to.
    fn answer_late(&mut self, waiter: &Waiter, waits_for: String) {
        let Some(tenant) = self.ledger.get(waiter.tenant) else {
            return;
        };
        let group = self.groups.of(waiter.tenant);
        let acquired = Acquired {
            job: tenant.spec.name.clone(),
            group: group.map_or_else(String::new, |((_, name), _)| name.clone()),
            waited_ms: self.waited_ms(waiter),
            waits_for,
            ..Acquired::default()
        };
        self.turns
            .reply(waiter.number, Ok(Reply::Acquired(acquired)));
    }

    /// What a job waits for whose turn has not come, for people.
    fn awaited_by(&self, id: TenantId) -> String {
        let Some((_, group)) = self.groups.of(id) else {
            return String::new();
        };
        let name_of = |id: TenantId| {
            let tenant = self.ledger.get(id);
            tenant.map_or_else(String::new, |tenant| tenant.spec.name.clone())
        };
        let Some(holder) = group.holder() else {
            let first = group.waiting_jobs().into_iter().find(|one| *one != id);
            return first.map_or_else(String::new, |first| {
                format!("job `{}` is before it", name_of(first))
            });
        };
        let comes = group.comes().is_some();
        let whose = match (holder == id, comes) {
            (false, false) => return format!("job `{}` has the turn", name_of(holder)),
            (false, true) => format!("the turn comes to job `{}` first, and ", name_of(holder)),
            (true, _) => String::new(),
        };
        match self.stays_of(group, holder) {
            Some(other) => format!(
                "{whose}the memory of job `{}` has not left{}",
                name_of(other),
                self.stopped_of(other)
            ),
            None => format!("{whose}its memory is not back{}", self.stopped_of(holder)),
        }
    }

    /// That a process of a job is stopped, which keeps its memory where it is.
    fn stopped_of(&self, id: TenantId) -> String {
        let clients = self.ledger.get(id).map(|tenant| &tenant.clients);
        let pids = clients.into_iter().flatten();
        let mut pids = pids.filter_map(|client| Some(self.clients.get(*client)?.pid));
        let stopped = pids.find(|pid| peer::is_stopped(*pid));
        stopped.map_or_else(String::new, |pid| {
            format!(": its process {pid} is stopped (`kill -CONT {pid}` has it go on)")
        })
    }

    fn waited_ms(&self, waiter: &Waiter) -> u64 {
        self.clock.mono_ns().saturating_sub(waiter.began_ns) / 1_000_000
    }

    /// Goes on with turns: answers who has waited too long, begins the next one's turn, and answers
    /// who has it. Returns when to look again.
    pub(crate) fn step_groups(&mut self, now_ns: u64) -> Option<u64> {
        let mut again_ns: Option<u64> = None;
        for key in self.groups.busy() {
            let turns = &self.turns;
            let now_unix_ms = self.clock.unix_ms();
            let awaits = |number| turns.awaits(number);
            // As it is before their turns are taken from them.
            let overdue = self.groups.overdue(&key, now_ns);
            let reasons: Vec<(TenantId, String)> = (overdue.into_iter())
                .map(|id| (id, self.awaited_by(id)))
                .collect();
            let (missed, lost) = self.groups.prune(&key, now_ns, now_unix_ms, awaits);
            for waiter in missed {
                let reason = reasons.iter().find(|(id, _)| *id == waiter.tenant);
                let reason = reason.map_or_else(String::new, |(_, reason)| reason.clone());
                let fields = [
                    ("waited_ms", Value::from(self.waited_ms(&waiter))),
                    ("waits_for", Value::from(reason.clone())),
                ];
                self.answer_late(&waiter, reason);
                let how = "has not had its turn in time";
                self.tell_turn(waiter.tenant, "turn_missed", how, &fields);
            }
            if let Some(lost) = lost {
                let waiting = self.groups.get(&key).map_or(0, |group| group.waiting.len());
                self.end_turn(lost, waiting, "has a turn that nobody waits for any more");
            }
            if let Some(next) = self.groups.next(&key) {
                self.begin_turn(&key, next, now_ns);
            }
            again_ns = again_ns.into_iter().chain(self.go_on(&key, now_ns)).min();
        }
        again_ns.into_iter().chain(self.groups.due_ns()).min()
    }

    /// The turn comes to a job: the others' memory leaves, its own comes back.
    fn begin_turn(&mut self, key: &Key, id: TenantId, now_ns: u64) {
        let was_away = self
            .residency_of(id)
            .iter()
            .any(|one| !one.state.is_usable());
        // One that has not come back to this arbiter yet was away where it was to be.
        let was_away = was_away || self.is_missed(id, now_ns) && self.is_sent_away(id);
        let now_unix_ms = self.clock.unix_ms();
        self.groups.begin(key, id, was_away, (now_ns, now_unix_ms));
        let members = self.groups.get(key).map(|group| group.members.clone());
        for member in members.unwrap_or_default() {
            if let Some(tenant) = self.ledger.get_mut(member) {
                tenant.turn.is_away = member != id && tenant.spec.evictable();
                if member == id {
                    // A successor is to know it before it is notified.
                    tenant.saved_as = 0;
                }
            }
            for scheduler in self.schedulers.iter_mut() {
                let Some(status) = scheduler.residency_status(member) else {
                    continue;
                };
                if member == id && !status.state.is_usable() {
                    scheduler.call(now_ns, member, true);
                } else if member != id && status.resident_bytes > 0 {
                    scheduler.call(now_ns, member, false);
                }
            }
        }
        self.read_accounts();
        self.survey_residency(now_ns);
        self.publish_group(id);
        self.persistence.mark_old();
    }

    /// How a turn that comes gets on. Returns when to look again.
    fn go_on(&mut self, key: &Key, now_ns: u64) -> Option<u64> {
        let group = self.groups.get(key)?;
        let id = group.comes()?;
        let Stage::Comes { since_ns, .. } = group.hold.as_ref()?.stage else {
            return None;
        };
        let settles_ns = since_ns.saturating_add(SETTLES_NS);
        let missed = group
            .members
            .iter()
            .filter(|one| self.is_missed(**one, now_ns));
        if missed.count() > 0 {
            // Where its memory is nobody knows yet; not for long.
            return Some(now_ns.saturating_add(LOOK_NS));
        }
        let progress = match self.progress(group, id) {
            Progress::TooLarge(_) if now_ns < settles_ns => return Some(settles_ns),
            Progress::TooLarge(why) => Progress::Fails(why),
            progress => progress,
        };
        match progress {
            // The schedulers look at memory that moves.
            Progress::Moving | Progress::TooLarge(_) => None,
            Progress::Fails(why) => {
                let (_, asked) = self.groups.give_up(id, self.clock.unix_ms()).ok()?;
                let name = self.ledger.get(id).map(|tenant| tenant.spec.name.clone());
                let name = name.unwrap_or_default();
                for waiter in asked {
                    let message = format!("the memory of job `{name}` cannot come back: {why}");
                    let error = ControlError::new(ErrorCode::Refused, message);
                    let error = error.with_hint("see `sublet ps`, and ask again");
                    self.turns.reply(waiter.number, Err(error));
                }
                let waiting = self.groups.get(key).map_or(0, |group| group.waiting.len());
                self.end_turn(id, waiting, &format!("cannot take its turn: {why}"));
                // The next one's turn begins at once.
                Some(now_ns)
            }
            Progress::Arrived => {
                let tenant = self.ledger.get(id)?;
                let saved_ns = since_ns.saturating_add(SAVE_PATIENCE_NS);
                if !self.persistence.has(tenant.saved_as) && now_ns < saved_ns {
                    return Some(saved_ns);
                }
                let (was_away, asked) = self.groups.arrive(key, self.clock.unix_ms())?;
                let job = tenant.spec.name.clone();
                let first = asked.iter().map(|waiter| self.waited_ms(waiter)).max();
                for waiter in asked {
                    let acquired = Acquired {
                        job: job.clone(),
                        group: key.1.clone(),
                        acquired: true,
                        waited_ms: self.waited_ms(&waiter),
                        restored: was_away,
                        ..Acquired::default()
                    };
                    self.turns
                        .reply(waiter.number, Ok(Reply::Acquired(acquired)));
                }
                let fields = [
                    ("group", Value::from(key.1.clone())),
                    ("waited_ms", Value::from(first)),
                    ("restored", Value::from(was_away)),
                ];
                self.tell_turn(id, "turn_begun", "has its turn", &fields);
                None
            }
        }
    }

    /// Whether processes of a job, attached to the arbiter before this one, are still expected.
    fn is_missed(&self, id: TenantId, now_ns: u64) -> bool {
        let tenant = self.ledger.get(id);
        tenant.is_some_and(|tenant| !tenant.missing.is_empty() && now_ns < tenant.adopt_until_ns)
    }

    fn is_sent_away(&self, id: TenantId) -> bool {
        let tenant = self.ledger.get(id);
        tenant.is_some_and(|tenant| tenant.turn.is_away)
    }

    /// Another member of a group whose memory is to leave for the turn of a job, and has not.
    fn stays_of(&self, group: &Group, id: TenantId) -> Option<TenantId> {
        let is_gone = |one: &ResidencyStatus| {
            let cannot = one.settled && one.figures.failed;
            one.resident_bytes == 0
                || one.state == State::Evicted
                || one.state == State::Failed
                || cannot
        };
        let mut others = group.members.iter().filter(|member| **member != id);
        let stays = |other: &&TenantId| {
            // One whose memory stays whatever happens is not waited for.
            let tenant = self.ledger.get(**other);
            tenant.is_some_and(|tenant| tenant.turn.is_away)
                && !self.residency_of(**other).iter().all(is_gone)
        };
        others.find(stays).copied()
    }

    fn progress(&self, group: &Group, id: TenantId) -> Progress {
        if self.stays_of(group, id).is_some() {
            return Progress::Moving;
        }
        for one in self.residency_of(id) {
            if one.state == State::Failed
                || (one.settled && one.figures.failed && !one.state.is_usable())
            {
                return Progress::Fails(one.figures.reason);
            }
            if let Standing::TooLarge {
                needed_bytes,
                available_bytes,
            } = one.standing
            {
                return Progress::TooLarge(format!(
                    "it needs {} and the device has {} once the others have left",
                    exact_bytes(needed_bytes),
                    exact_bytes(available_bytes)
                ));
            }
            if !one.state.is_usable() {
                return Progress::Moving;
            }
        }
        Progress::Arrived
    }

    /// Says to the devices which members of a job's group may use them.
    fn publish_group(&mut self, id: TenantId) {
        let Some((_, group)) = self.groups.of(id) else {
            return;
        };
        let holder = group.holder();
        for member in group.members.clone() {
            let Some(tenant) = self.ledger.get_mut(member) else {
                continue;
            };
            let has = holder == Some(member);
            tenant.turn.is_over = !has;
            if has {
                tenant.turn.is_away = false;
                tenant.turn.was_reported = false;
            }
        }
        self.publish_terms();
        self.persistence.mark_old();
    }

    /// Jobs that wait at a gate which only a turn opens, and have not asked for one: that is said
    /// once.
    pub(crate) fn look_for_turnless(&mut self) {
        let waits = |tenant: &Tenant| {
            let mut clients = tenant.clients.iter().filter_map(|id| self.clients.get(*id));
            clients.any(|client| {
                let half = &client.pages.client;
                // At the gate, for memory that is away, or for space.
                let on = |device| half.waiting(device) > 0 || half.space_bytes(device) > 0;
                (0..self.schedulers.len()).any(on)
            })
        };
        let is_stuck = |tenant: &&Tenant| {
            let turn = || self.turn_of(tenant.id).map(|(_, turn)| turn);
            tenant.turn.is_over
                && !tenant.turn.was_reported
                && turn() == Some(Turn::None)
                && waits(tenant)
        };
        let stuck: Vec<TenantId> = self.ledger.iter().filter(is_stuck).map(|t| t.id).collect();
        for id in stuck {
            if let Some(tenant) = self.ledger.get_mut(id) {
                tenant.turn.was_reported = true;
            }
            let how = "waits at its gate, and has not asked for its turn (`sublet acquire`)";
            self.tell_turn(id, "turn_needed", how, &[]);
        }
    }

    /// A line of the journal, as far as the job may cause one.
    fn tell_turn(
        &mut self,
        id: TenantId,
        kind: &'static str,
        how: &str,
        fields: &[(&'static str, Value)],
    ) {
        let group = self.groups.of(id).map(|((_, name), _)| name.clone());
        let now_ns = self.clock.mono_ns();
        let Some(tenant) = self.ledger.get_mut(id) else {
            return;
        };
        let Some(left_out) = tenant.allowance.spend(now_ns) else {
            return;
        };
        let name = tenant.spec.name.clone();
        let mut fields = fields.to_vec();
        if let Some(group) = group
            && !fields.iter().any(|(key, _)| *key == "group")
        {
            fields.push(("group", Value::from(group)));
        }
        if left_out > 0 {
            fields.push(("left_out", Value::from(left_out)));
        }
        let message = format!("job `{name}` {how}");
        self.journal
            .write(kind, About::job(&name, id.0), message, &fields);
    }
}

fn turn_in(group: &Group, id: TenantId) -> Turn {
    if group.comes() == Some(id) {
        Turn::Comes
    } else if group.holder() == Some(id) {
        Turn::Holds
    } else if group.waiting.iter().any(|waiter| waiter.tenant == id) {
        Turn::Waits
    } else {
        Turn::None
    }
}
