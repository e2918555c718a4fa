//! How a move goes: draining, orders, what the processes of a job answer, and what follows where
//! one of them does not follow its order.

use channel::{Reason, Verb};
use host_memory::Memory;
use policy::TenantId;
use policy::residency::{Link, UNKNOWN_BYTES_PER_US};

use super::{JobView, News, Phase, Record, ResidencyManager};
use crate::residency::client_state::{Ended, State, Why};

/// How long a job's work may take to end once its gate is closed, before its processes are ordered
/// to wait for it themselves. TIMEOUT: drains end within the in-flight window, milliseconds;
/// kernels of a second are rare.
const DRAIN_NS: u64 = 1_000_000_000;
/// Beside what the bytes take at a quarter of the measured rate. TIMEOUT: pinning the host's memory
/// for the first time goes at a few GB/s, and a loaded host lets a thread wait.
const ORDER_NS: u64 = 20_000_000_000;
/// Least bytes from which a rate is learnt.
const LEARN_BYTES: u64 = 32 << 20;
/// A terabyte per second: twice what the fastest link between a host and a device does.
const MOST_BYTES_PER_US: u64 = 1_000_000;
/// By so much the memory that is spoken for may be more than there is before an arrival is called
/// off.
const SLACK_BYTES: u64 = 64 << 20;
/// TIMEOUT: an arrival that lacks a little and gets nothing for so long stands still; a chunk takes
/// some ten milliseconds. Nobody waits for it where the memory is there.
const STILL_NS: u64 = 200_000_000;
/// TIMEOUT: how long what a job had that has ended may stand in its account. What ends it earlier
/// is the next look at the ledger, ten times a second.
const ENDING_NS: u64 = 2_000_000_000;
/// TIMEOUT: for how long the work of one process may not end while another one of its job, whose
/// memory has left, waits to go on: the one may wait for what the other would do. Kernels that take
/// longer are taken for endless anyway.
const APART_NS: u64 = 1_500_000_000;
/// How long one that could not be moved is left alone, at first and at most.
const BACKOFF_NS: u64 = 500_000_000;
const BACKOFF_MAX_NS: u64 = 30_000_000_000;
impl ResidencyManager {
    /// What the processes of a tenant say, and what follows from it.
    pub(super) fn look(&mut self, now_ns: u64, job: &JobView<'_>) {
        let record = self.records.entry(job.id).or_insert_with(|| Record {
            since_ns: now_ns,
            ..Record::default()
        });
        if job.active {
            record.active_ns = now_ns;
        }
        // A short kernel may begin and end between two looks.
        let counts = job.clients.iter().map(|(_, pages)| pages.client.launches());
        // WRAPPING: only that it changes means something.
        let submitted = counts.fold(0, u64::wrapping_add);
        if record.submitted != submitted {
            (record.submitted, record.used_ns) = (submitted, now_ns);
        }
        let (mut refused, mut longest_ns) = (None, 0);
        for (client, pages) in job.clients {
            let Some((_, machine)) = self.machines.get_mut(client) else {
                continue;
            };
            let ended = machine.look(now_ns, pages, self.device);
            let held = machine.footprint().host_bytes;
            let mut books = self.books.borrow_mut();
            books.hold(*client, self.device, job.id, held);
            let Some(ended) = ended else { continue };
            books.promise(*client, self.device, job.id, 0);
            drop(books);
            longest_ns = longest_ns.max(ended.ns);
            let copied_bytes = ended.copied.0.saturating_add(ended.copied.1);
            let figures = &mut record.figures;
            figures.copied_bytes = figures.copied_bytes.saturating_add(copied_bytes);
            let link = &mut self.arbitration.link;
            match ended.failed {
                None => learn(link, &ended),
                Some(why) => refused = Some(why),
            }
        }
        record.figures.moving_ns += longest_ns;
        if let Some(why) = refused {
            self.undo(now_ns, job, why);
        }
    }

    /// One process of a tenant has not followed its order: the others go back to where they were.
    pub(super) fn undo(&mut self, now_ns: u64, job: &JobView<'_>, why: Why) {
        let Some(record) = self.records.get_mut(&job.id) else {
            return;
        };
        let Phase::Ordered { verb } = record.phase else {
            return;
        };
        let text = why.text();
        record.figures.failed = true;
        record.figures.reason.clone_from(&text);
        record.backoff_ns = (record.backoff_ns * 2).clamp(BACKOFF_NS, BACKOFF_MAX_NS);
        record.stuck_until_ns = now_ns + record.backoff_ns;
        record.wished = false;
        record.switch_ns = None;
        self.news.push(News::NotMoved {
            id: job.id,
            verb,
            why: text,
        });
        match verb {
            // Processes that have left are called back, and so are those that have not answered.
            Verb::Evict => self.order(now_ns, job, Verb::Restore, |state| !state.is_usable()),
            // Those that have arrived wait with the others; nothing of the job runs meanwhile.
            Verb::Restore => self.order(now_ns, job, Verb::Evict, |state| {
                matches!(state, State::Resident | State::Restoring)
            }),
            Verb::Fit => self.order(now_ns, job, Verb::Restore, |state| !state.is_usable()),
        }
    }

    /// Orders those processes of a tenant whose state asks for it; where there is none the tenant
    /// has settled.
    pub(super) fn order(
        &mut self,
        now_ns: u64,
        job: &JobView<'_>,
        verb: Verb,
        which: impl Fn(State) -> bool,
    ) {
        let bytes = self.evictable_bytes(job);
        // Both ways at once, and at a quarter of the rate at worst.
        let moving_ns = self.arbitration.link.switch_ns(bytes, bytes);
        let deadline_ns = now_ns + ORDER_NS + moving_ns.saturating_mul(4);
        let mut reported = false;
        let target = self.fit_target(job);
        let resident = self.evictable_bytes(job);
        for (client, pages) in job.clients {
            let Some((_, machine)) = self.machines.get_mut(client) else {
                continue;
            };
            if !which(machine.state()) {
                continue;
            }
            // Each process keeps its part of what the job keeps.
            let own = u128::from(machine.footprint().evictable_bytes) * u128::from(target)
                / u128::from(resident.max(1));
            let own = u64::try_from(own).unwrap_or(u64::MAX);
            machine.give(now_ns, pages, self.device, (verb, own), deadline_ns);
            reported = true;
        }
        if let Some(record) = self.records.get_mut(&job.id) {
            record.phase = if reported {
                Phase::Ordered { verb }
            } else {
                Phase::Settled
            };
        }
    }

    /// Departures whose work has ended are ordered; what is over is reported.
    pub(super) fn proceed(&mut self, now_ns: u64, job: &JobView<'_>) {
        let Some(record) = self.records.get_mut(&job.id) else {
            return;
        };
        let phase = record.phase;
        if matches!(phase, Phase::Ordered { verb: Verb::Evict }) && self.keeps_itself(now_ns, job) {
            self.undo(now_ns, job, Why::Answered(Reason::NotDrained));
            return;
        }
        let Some(record) = self.records.get_mut(&job.id) else {
            return;
        };
        match phase {
            Phase::Settled | Phase::Called => {}
            Phase::Draining { verb, since_ns } => {
                if !job.drained && now_ns < since_ns + DRAIN_NS {
                    return;
                }
                record.figures.drained_ns = now_ns;
                if let Err(why) = self.host_has_space(job, verb) {
                    self.take_back_promise(job);
                    self.refuse(now_ns, job.id, verb, why);
                    return;
                }
                match verb {
                    Verb::Evict => self.order(now_ns, job, verb, |state| {
                        matches!(state, State::Resident | State::Partly)
                    }),
                    _ => self.order(now_ns, job, verb, State::is_usable),
                }
                if self.phase_of(job.id) == Phase::Settled {
                    self.take_back_promise(job);
                    self.conclude(now_ns, job.id, verb);
                }
            }
            Phase::Ordered { verb } => {
                let busy = job.clients.iter().any(|(client, _)| {
                    self.machines
                        .get(client)
                        .is_some_and(|(_, machine)| machine.is_busy())
                });
                if !busy {
                    self.conclude(now_ns, job.id, verb);
                }
            }
        }
    }

    /// Whether one process of a tenant has left and waits to go on, while the work of another does
    /// not end.
    fn keeps_itself(&self, now_ns: u64, job: &JobView<'_>) -> bool {
        let (mut waits, mut stands) = (false, false);
        for (client, pages) in job.clients {
            let Some((_, machine)) = self.machines.get(client) else {
                continue;
            };
            match machine.state() {
                State::Evicted => waits |= pages.client.waiting(self.device) > 0,
                State::Evicting => stands |= machine.has_not_left_ns(now_ns) >= APART_NS,
                _ => {}
            }
        }
        waits && stands
    }

    /// Nothing has moved, and nothing will for a while.
    pub(super) fn refuse(&mut self, now_ns: u64, id: TenantId, verb: Verb, why: String) {
        let Some(record) = self.records.get_mut(&id) else {
            return;
        };
        record.phase = Phase::Settled;
        record.by_hand = false;
        record.backoff_ns = (record.backoff_ns * 2).clamp(BACKOFF_NS, BACKOFF_MAX_NS);
        record.stuck_until_ns = now_ns + record.backoff_ns;
        record.wished = false;
        record.switch_ns = None;
        record.figures.failed = true;
        record.figures.ended_ns = now_ns;
        record.figures.reason.clone_from(&why);
        self.news.push(News::NotMoved { id, verb, why });
    }

    /// A move is over, one way or the other.
    pub(super) fn conclude(&mut self, now_ns: u64, id: TenantId, verb: Verb) {
        let resident = self.resident_bytes(id);
        let Some(record) = self.records.get_mut(&id) else {
            return;
        };
        record.phase = Phase::Settled;
        record.by_hand = false;
        record.figures.ended_ns = now_ns;
        match verb {
            Verb::Fit => {
                record.fitted_ns = now_ns;
                record.fitted = (!record.figures.failed).then_some((record.fits_to, resident));
                self.tell_of_fit(id);
            }
            // One whose arrival was called off keeps its place in the line.
            Verb::Evict => record.since_ns = record.in_line_ns.take().unwrap_or(now_ns),
            Verb::Restore => (record.since_ns, record.in_line_ns) = (now_ns, None),
        }
        let Some(record) = self.records.get_mut(&id) else {
            return;
        };
        if record.figures.failed {
            return;
        }
        (record.backoff_ns, record.stuck_until_ns) = (0, 0);
        match verb {
            Verb::Evict => record.figures.evictions += 1,
            Verb::Restore => {
                record.figures.restores += 1;
                record.wished = false;
                if let Some(began_ns) = record.switch_ns.take() {
                    self.arbitration
                        .switched(now_ns, now_ns.saturating_sub(began_ns));
                }
            }
            Verb::Fit => {}
        }
    }

    /// Whether the host can take what leaves; promises it.
    pub(super) fn host_has_space(&self, job: &JobView<'_>, verb: Verb) -> Result<(), String> {
        let own: Vec<(u64, channel::Footprint)> = job
            .clients
            .iter()
            .filter_map(|(client, _)| Some((*client, self.machines.get(client)?.1.footprint())))
            .collect();
        let all = own
            .iter()
            .map(|(_, f)| f.evictable_bytes)
            .fold(0, u64::saturating_add);
        let kept = match verb {
            Verb::Evict => 0,
            Verb::Restore => return Ok(()),
            Verb::Fit => self.fit_target(job),
        };
        let needs: Vec<(u64, u64)> = own
            .iter()
            .map(|(client, f)| {
                let stays =
                    u128::from(f.evictable_bytes) * u128::from(kept) / u128::from(all.max(1));
                let stays = u64::try_from(stays).unwrap_or(u64::MAX);
                (*client, f.evictable_bytes.saturating_sub(stays))
            })
            .collect();
        let mut books = self.books.borrow_mut();
        books.set_free(Memory::of_this_host());
        books
            .check(job.id, self.device, &needs, job.terms.host_bytes)
            .map_err(|short| short.text())?;
        for (client, bytes) in needs {
            books.promise(client, self.device, job.id, bytes);
            if let Some((_, pages)) = job.clients.iter().find(|(id, _)| *id == client) {
                let budget = books.budget_bytes(client, job.id, job.terms.host_bytes);
                let mode = channel::ResidencyMode {
                    prepare: pages.arbiter.residency().prepare,
                    ..job.terms.mode()
                };
                pages.arbiter.set_residency(mode, Some(budget));
            }
        }
        Ok(())
    }

    /// What was promised for a departure is not needed.
    pub fn take_back_promise(&mut self, job: &JobView<'_>) {
        let mut books = self.books.borrow_mut();
        for (client, _) in job.clients {
            books.promise(*client, self.device, job.id, 0);
        }
    }

    /// Arrivals whose space was taken meanwhile, by those that grow, take that of others, or go
    /// back into the line: better than to wait for their deadline.
    pub(super) fn rescue(&mut self, now_ns: u64, jobs: &[JobView<'_>]) {
        let arriving = |phase| {
            matches!(
                phase,
                Phase::Called
                    | Phase::Ordered {
                        verb: Verb::Restore
                    }
            )
        };
        for job in jobs {
            if !arriving(self.phase_of(job.id)) {
                continue;
            }
            self.count(jobs);
            let lacking = self.residents(now_ns).lacking_bytes(0);
            if !self.stands_still(now_ns, job.id, lacking) {
                continue;
            }
            let space = self.arbitration.space_for(&self.residents(now_ns), job.id);
            // Over several devices that is for all of them to decide.
            if let Some(space) = space.as_ref().filter(|_| !self.linked)
                && space.from_ns <= now_ns
            {
                for victim in &space.victims {
                    self.depart(now_ns, *victim, Verb::Evict);
                }
                continue;
            }
            if space.is_none() && !self.waits_in_vain(now_ns, job.id) {
                continue;
            }
            if space.is_some() {
                self.call_off(now_ns, job);
                continue;
            }
            let why = "the job whose memory it was to have cannot leave".to_owned();
            self.refuse(now_ns, job.id, Verb::Restore, why);
            self.order(now_ns, job, Verb::Evict, |state| state == State::Restoring);
        }
    }

    /// Whether an arrival lacks memory, and gets on no more. What is spoken for is not taken to the
    /// byte: where only a little is lacking there may be enough all the same.
    fn stands_still(&mut self, now_ns: u64, id: TenantId, lacking_bytes: u64) -> bool {
        let here = self.resident_bytes(id);
        let leaves = |record: &Record| match record.phase {
            Phase::Draining { verb, .. } | Phase::Ordered { verb } => verb != Verb::Restore,
            _ => false,
        };
        let somebody_leaves = self.records.values().any(leaves);
        let Some(record) = self.records.get_mut(&id) else {
            return false;
        };
        if record.got_on.0 != here || somebody_leaves || lacking_bytes == 0 {
            record.got_on = (here, now_ns);
        }
        if lacking_bytes == 0 {
            record.lacks_since_ns = None;
            return false;
        }
        record.lacks_since_ns.get_or_insert(now_ns);
        lacking_bytes > SLACK_BYTES || now_ns.saturating_sub(record.got_on.1) >= STILL_NS
    }

    /// Whether memory that an arrival lacks will not come: somebody has refused to leave, or all of
    /// it has stayed for long. What a process had that is ending is in an account of nobody's for a
    /// moment.
    fn waits_in_vain(&self, now_ns: u64, id: TenantId) -> bool {
        let others = self.records.iter().filter(|(other, _)| **other != id);
        let mut others = others.map(|(_, record)| record);
        let refused = others.any(|one| one.figures.failed && one.stuck_until_ns > now_ns);
        let lacks = self.records.get(&id).and_then(|one| one.lacks_since_ns);
        refused || lacks.is_some_and(|since| now_ns.saturating_sub(since) >= ENDING_NS)
    }

    /// An arrival goes back and waits for its turn; the call of an operator or a group stands.
    fn call_off(&mut self, now_ns: u64, job: &JobView<'_>) {
        let Some(record) = self.records.get_mut(&job.id) else {
            return;
        };
        record.switch_ns = None;
        record.lacks_since_ns = None;
        record.in_line_ns = Some(record.since_ns);
        record.phase = Phase::Settled;
        self.order(now_ns, job, Verb::Evict, |state| state == State::Restoring);
    }

    /// Those that were called come once every departure is on its way.
    pub(super) fn call_in(&mut self, now_ns: u64, jobs: &[JobView<'_>]) {
        let leaving = |record: &Record| matches!(record.phase, Phase::Draining { .. });
        if self.records.values().any(leaving) {
            return;
        }
        for job in jobs {
            if self.phase_of(job.id) == Phase::Called {
                if let Some(record) = self.records.get_mut(&job.id) {
                    record.figures.drained_ns = now_ns;
                }
                self.order(now_ns, job, Verb::Restore, |state| !state.is_usable());
                if self.phase_of(job.id) == Phase::Settled {
                    self.conclude(now_ns, job.id, Verb::Restore);
                }
            }
        }
    }
}

impl Record {
    /// Something is asked of it by hand; what was tried before counts no longer.
    pub(super) fn ask(&mut self, now_ns: u64) {
        (self.stuck_until_ns, self.backoff_ns) = (0, 0);
        self.by_hand = false;
        self.begin(now_ns);
        self.by_hand = true;
    }

    /// It is to come: its space is its own from here on. What an earlier arrival waited for counts
    /// no longer.
    pub(super) fn call(&mut self, now_ns: u64) {
        self.phase = Phase::Called;
        self.switch_ns = Some(now_ns);
        self.lacks_since_ns = None;
        self.got_on.1 = now_ns;
        self.begin(now_ns);
    }

    /// A move begins; one that was asked for by hand has begun when it was asked for.
    pub(super) fn begin(&mut self, now_ns: u64) {
        if self.by_hand {
            return;
        }
        let figures = &mut self.figures;
        (figures.asked_ns, figures.drained_ns, figures.ended_ns) = (now_ns, 0, 0);
        (figures.copied_bytes, figures.failed) = (0, false);
        figures.reason.clear();
    }
}

/// Takes over what a move shows of the link. A rate falls slowly and rises at once: what else a
/// move waited for shows too little. An eviction that locked its host memory on the way, or left
/// most of it uncopied because it had not changed, shows nothing.
fn learn(link: &mut Link, ended: &Ended) {
    let blend = |rate: &mut u64, bytes: u64| {
        if bytes < LEARN_BYTES || ended.ns == 0 {
            return;
        }
        let seen =
            u64::try_from(u128::from(bytes) * 1000 / u128::from(ended.ns)).unwrap_or(u64::MAX);
        let before = if *rate == 0 {
            UNKNOWN_BYTES_PER_US
        } else {
            *rate
        };
        // The bytes are a client's word: no link is faster than this, and none gets much faster at
        // once.
        let seen = seen.min(MOST_BYTES_PER_US).min(before.saturating_mul(4));
        *rate = seen.max(before - before / 4 + seen / 4).max(1);
    };
    if ended.copied_out_plainly {
        blend(&mut link.out, ended.copied.0);
    }
    blend(&mut link.back, ended.copied.1);
}
