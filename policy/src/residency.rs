//! Which jobs stay in a device's memory, which are evicted, and when: arbitration between jobs
//! whose memories do not fit together.
//!
//! A job is moved as a whole or not at all. Nobody outside knows which bytes a turn will touch (a
//! pointer may lie in any of them), so the unit is all evictable memory of a job. The question is
//! that of the working-set model (P. J. Denning, "The working set model for program behavior", CACM
//! 1968) with jobs in place of pages: while the sum fits, all jobs stay, and a hand-over costs
//! nothing; when it does not, jobs take *terms*.
//!
//! *The length of a term.* A switch of `b` bytes over a link of `r` bytes per second takes `s = b /
//! r`; both directions run at once, so of two jobs the longer direction counts. A job that stays
//! for `k * s` before another takes its space keeps the device from working for `s` in every `(k +
//! 1) * s`:
//!
//! ```text
//! 20 GB at 50 GB/s: s = 0.4 s     k = 10: terms of 4 s, 9 % of the time in moves     k = 1: 50 %
//! ```
//!
//! `k` is `slice_over_switch`, 10 by default. Terms of jobs that compete are in the proportion of
//! their weights, the shortest being `k * s`, so that shares hold over a round of terms. The slice
//! policy divides the time between resident jobs; an evicted job is shown to it once it may take
//! space.
//!
//! *A job that pauses* loses its space only when its silence has lasted as long as a switch would.
//! That is the rule of the ski rental (A. Karlin, M. Manasse, L. Rudolph, D. Sleator, "Competitive
//! snoopy caching", Algorithmica 1988): whatever the pauses are, the time lost is at most twice
//! that of a policy that knows them beforehand. A data loader that takes 5 ms does not cost the job
//! a switch of a second.
//!
//! *Classes.* A guaranteed job takes an opportunistic one's space at once; an opportunistic job
//! never takes the space of a guaranteed job that is at work.
//!
//! *Whose space.* The jobs whose next use is furthest away: idle ones first, the longest idle
//! before the others; then those whose term is over; never more of them than needed. *Whose turn.*
//! By class, then the job that has been out longest.
//!
//! *Pressure* is the recent part of the time that went into switches ([`Pressure`]). Above what `k`
//! allows, terms are stretched; if that does not help, one job is parked: the newest of the lowest
//! class. The remedy for thrashing is less multiprogramming, as always.

mod joint;
mod pressure;

use crate::slice::{Class, TenantId};

pub use joint::{Joint, Place, Standings};
pub use pressure::{Level, Pressure};

/// What a link is taken to do until it was measured: an older PCIe generation with pinned memory.
pub const UNKNOWN_BYTES_PER_US: u64 = 10_000;
/// What a switch costs beyond its bytes: draining, and handles to make and to map.
const SWITCH_NS: u64 = 5_000_000;
/// An allocation that waits for space stands in the middle of its job's work, so it does not wait
/// for the end of another job's term: only until that has stayed for so many times what its switch
/// takes, at least and at most so long. TIMEOUT: it gives up after half a minute.
const URGENT_SWITCHES: u64 = 2;
const URGENT_NS: std::ops::RangeInclusive<u64> = 250_000_000..=2_000_000_000;
/// Terms are in proportion to weights up to this factor; beyond it a small share would wait for
/// minutes.
const MOST_TERMS: f64 = 20.0;

/// A job with memory on the device, or away from it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ResidentJob {
    /// Which one.
    pub id: TenantId,
    /// Its class.
    pub class: Class,
    /// Its weight in millionths.
    pub weight_ppm: u32,
    /// When it came, for whom to park.
    pub arrived_ns: u64,
    /// What of its memory can be moved, wherever it is.
    pub evictable_bytes: u64,
    /// Of that, what is on the device.
    pub resident_bytes: u64,
    /// What stays on the device.
    pub fixed_bytes: u64,
    /// What an allocation of it waits for.
    pub space_bytes: u64,
    /// It cannot run as it is: its memory is not where it was, and not usable where it is.
    pub out: bool,
    /// It would use the device if it could, or does.
    pub wants: bool,
    /// When it was last at work.
    pub active_ns: u64,
    /// Since when it is in, or out.
    pub since_ns: u64,
    /// It is on its way out.
    pub leaving: bool,
    /// It is on its way in.
    pub coming: bool,
    /// It cannot be moved before that.
    pub stuck_until_ns: u64,
    /// Its owner keeps it away.
    pub kept_away: bool,
}

impl ResidentJob {
    /// What it needs beyond what it has on the device, to come back and to go on.
    pub fn missing_bytes(&self) -> u64 {
        self.evictable_bytes
            .saturating_sub(self.resident_bytes)
            .saturating_add(self.space_bytes)
    }

    /// Its device memory once its moves are done, including what an allocation waits for.
    pub fn footprint_bytes(&self) -> u64 {
        self.fixed_bytes.saturating_add(self.movable_bytes())
    }

    fn movable_bytes(&self) -> u64 {
        match (self.leaving, self.coming, self.out) {
            (true, ..) => 0,
            (_, true, _) => self.evictable_bytes.saturating_add(self.space_bytes),
            (.., true) => self.resident_bytes,
            _ => self.resident_bytes.saturating_add(self.space_bytes),
        }
    }

    fn is_moving(&self) -> bool {
        self.leaving || self.coming
    }
}

/// All that is looked at.
#[derive(Clone, Copy, Debug)]
pub struct ResidentJobs<'a> {
    /// Now, in nanoseconds of any monotonic clock.
    pub now_ns: u64,
    /// What the device has for jobs; 0: not known, everything fits.
    pub capacity_bytes: u64,
    /// Every job of the device, each once.
    pub all: &'a [ResidentJob],
}

impl ResidentJobs<'_> {
    fn get(&self, id: TenantId) -> Option<&ResidentJob> {
        self.all.iter().find(|resident| resident.id == id)
    }

    /// What nobody has once those on their way have arrived.
    pub fn free_bytes(&self) -> u64 {
        if self.capacity_bytes == 0 {
            return u64::MAX;
        }
        self.capacity_bytes.saturating_sub(self.taken_bytes())
    }

    /// What `id` could come to have for allocations that wait, if everybody else left who may, in
    /// bytes: what cannot be moved stays, and so does what it has itself, for which it will want
    /// space as well, unless its own `gives_way` to host memory, where it can use it.
    pub fn attainable_bytes(&self, id: TenantId, gives_way: bool) -> u64 {
        if self.capacity_bytes == 0 {
            return u64::MAX;
        }
        let fixed = self.all.iter().map(|one| one.fixed_bytes);
        let own = self.get(id).filter(|_| !gives_way);
        let own = own.map_or(0, |one| one.evictable_bytes);
        let stays = fixed.fold(own, u64::saturating_add);
        self.capacity_bytes.saturating_sub(stays)
    }

    fn taken_bytes(&self) -> u64 {
        self.all
            .iter()
            .map(ResidentJob::footprint_bytes)
            .fold(0, u64::saturating_add)
    }

    /// By how much `bytes` more would be too much.
    pub fn lacking_bytes(&self, bytes: u64) -> u64 {
        if self.capacity_bytes == 0 {
            return 0;
        }
        let wanted = self.taken_bytes().saturating_add(bytes);
        wanted.saturating_sub(self.capacity_bytes)
    }
}

/// How fast memory moves, in bytes per microsecond (MB/s); 0: not measured. A direction that was
/// not measured takes the other's figure: links are about as fast both ways.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Link {
    /// Device to host.
    pub out: u64,
    /// Host to device.
    pub back: u64,
}

impl Link {
    /// How long it takes to move so much out and so much back, at once.
    pub fn switch_ns(&self, out_bytes: u64, back_bytes: u64) -> u64 {
        let ns = |bytes: u64, rate: u64, other: u64| {
            let rate = match (rate, other) {
                (0, 0) => UNKNOWN_BYTES_PER_US,
                (0, other) => other,
                (rate, _) => rate,
            };
            u64::try_from(u128::from(bytes) * 1000 / u128::from(rate)).unwrap_or(u64::MAX)
        };
        ns(out_bytes, self.out, self.back)
            .max(ns(back_bytes, self.back, self.out))
            .saturating_add(SWITCH_NS)
    }
}

/// What a job may do as things are.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Standing {
    /// It is in, and runs as the slice policy says.
    #[default]
    In,
    /// It is on its way, one way or the other.
    Moving,
    /// It is out, and its turn may begin with a switch.
    MayCome,
    /// It is out, and somebody's term has to end first; when, where that is known.
    Waits(Option<u64>),
    /// It is out until there is space for it without evicting anybody.
    Parked,
    /// Its owner keeps it away.
    KeptAway,
    /// It would not fit beside what cannot be moved: so much is needed, so much could be had.
    TooLarge {
        /// What it has that can be moved.
        needed_bytes: u64,
        /// What the device has once everybody else has left.
        available_bytes: u64,
    },
}

impl Standing {
    /// Whether it can run as it is.
    pub fn is_in(self) -> bool {
        self == Self::In
    }

    /// Whether the slice policy may choose it.
    pub fn may_run(self) -> bool {
        matches!(self, Self::In | Self::MayCome)
    }
}

/// Whose space is taken, and from when on that is right.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Space {
    /// Who leaves; empty: there is space.
    pub victims: Vec<TenantId>,
    /// Not before then.
    pub from_ns: u64,
}

/// How jobs take turns in a device's memory.
#[derive(Clone, Debug)]
pub struct Arbitration {
    slice_over_switch: f64,
    /// As measured.
    pub link: Link,
    pressure: Pressure,
    parked: Vec<TenantId>,
}

/// How long a job stays whose space an allocation waits for, by its term and its switch.
fn urgent_ns(term_ns: u64, switch_ns: u64) -> u64 {
    let stays_ns = switch_ns.saturating_mul(URGENT_SWITCHES);
    term_ns.min(stays_ns.clamp(*URGENT_NS.start(), *URGENT_NS.end()))
}

impl Arbitration {
    /// One in which a term lasts so many times longer than its switch.
    pub fn new(slice_over_switch: f64) -> Self {
        let mut new = Self {
            slice_over_switch: 1.0,
            link: Link::default(),
            pressure: Pressure::default(),
            parked: Vec::new(),
        };
        new.set_slice_over_switch(slice_over_switch);
        new
    }

    /// From here on.
    pub fn set_slice_over_switch(&mut self, slice_over_switch: f64) {
        self.slice_over_switch = if slice_over_switch.is_finite() {
            slice_over_switch.clamp(1.0, 1000.0)
        } else {
            10.0
        };
    }

    /// A switch has kept the device for so long.
    pub fn switched(&mut self, now_ns: u64, ns: u64) {
        self.pressure.add(now_ns, ns);
    }

    /// How much of the time goes into switches.
    pub fn pressure(&self) -> &Pressure {
        &self.pressure
    }

    /// Whether it was parked.
    pub fn is_parked(&self, id: TenantId) -> bool {
        self.parked.contains(&id)
    }

    /// What each job may do now, in the order of `residents`, and when to look again. Also parks
    /// and releases jobs.
    pub fn standings(&mut self, residents: &ResidentJobs<'_>) -> (Vec<Standing>, Option<u64>) {
        self.answer_pressure(residents);
        let mut line: Vec<&ResidentJob> = residents
            .all
            .iter()
            .filter(|one| one.out && one.wants && !one.is_moving() && !one.kept_away)
            .collect();
        line.sort_by_key(|one| (one.class == Class::Opportunistic, one.since_ns, one.id));
        // Only the first job that space can be made for takes others' space: two at once would take
        // each other's.
        let mut head = None;
        let mut again_ns: Option<u64> = None;
        for one in line {
            if self.fits(residents, one) || self.is_parked(one.id) {
                continue;
            }
            if let Some(space) = self.space_for(residents, one.id)
                && space.from_ns < u64::MAX
            {
                if space.from_ns > residents.now_ns {
                    again_ns = Some(space.from_ns);
                }
                head = Some((one.id, space.from_ns));
                break;
            }
        }
        let standings = residents
            .all
            .iter()
            .map(|one| self.standing(residents, one, head))
            .collect();
        (standings, again_ns)
    }

    fn standing(
        &self,
        residents: &ResidentJobs<'_>,
        one: &ResidentJob,
        head: Option<(TenantId, u64)>,
    ) -> Standing {
        if one.is_moving() {
            return Standing::Moving;
        }
        if one.kept_away {
            return Standing::KeptAway;
        }
        if !one.out {
            return Standing::In;
        }
        if one.stuck_until_ns > residents.now_ns {
            return Standing::Waits(Some(one.stuck_until_ns));
        }
        if self.fits(residents, one) {
            return Standing::MayCome;
        }
        let others = residents.all.iter().filter(|other| other.id != one.id);
        let fixed = others
            .map(|other| other.fixed_bytes)
            .fold(one.fixed_bytes, u64::saturating_add);
        let available_bytes = residents.capacity_bytes.saturating_sub(fixed);
        let needed_bytes = one.evictable_bytes.saturating_add(one.space_bytes);
        if one.evictable_bytes > available_bytes {
            return Standing::TooLarge {
                needed_bytes,
                available_bytes,
            };
        }
        if self.is_parked(one.id) {
            return Standing::Parked;
        }
        match head {
            Some((id, from_ns)) if id == one.id && from_ns <= residents.now_ns => Standing::MayCome,
            Some((id, from_ns)) if id == one.id => Standing::Waits(Some(from_ns)),
            _ => Standing::Waits(None),
        }
    }

    /// Whether it could come without anybody's leaving.
    fn fits(&self, residents: &ResidentJobs<'_>, one: &ResidentJob) -> bool {
        residents.lacking_bytes(one.missing_bytes()) == 0
    }

    /// Whose space `id` would take, and when; `None`: there is not enough, even with all others
    /// evicted.
    pub fn space_for(&self, residents: &ResidentJobs<'_>, id: TenantId) -> Option<Space> {
        let one = residents.get(id)?;
        // Of one that is on its way all is spoken for.
        let bytes = if one.coming { 0 } else { one.missing_bytes() };
        self.space(residents, one, bytes, false)
    }

    /// Whose space resident job `id` takes now for a waiting allocation. It need not wait for the
    /// end of the other's term, because the allocation would fail otherwise.
    pub fn more_space_for(&self, residents: &ResidentJobs<'_>, id: TenantId) -> Option<Space> {
        let one = residents.get(id)?;
        let space = self.space(residents, one, 0, true)?;
        (space.from_ns <= residents.now_ns).then_some(space)
    }

    fn space(
        &self,
        residents: &ResidentJobs<'_>,
        one: &ResidentJob,
        bytes: u64,
        urgent: bool,
    ) -> Option<Space> {
        let needed = residents.lacking_bytes(bytes);
        if needed == 0 {
            return Some(Space::default());
        }
        let mut candidates: Vec<(u64, &ResidentJob)> = residents
            .all
            .iter()
            .filter(|other| {
                other.id != one.id
                    && other.resident_bytes > 0
                    && !other.is_moving()
                    && other.stuck_until_ns <= residents.now_ns
            })
            .map(|other| (self.free_from_ns(residents, other, one, urgent), other))
            .filter(|(from_ns, _)| *from_ns < u64::MAX)
            .collect();
        // Furthest next use: jobs that may be evicted soonest, idle jobs before busy ones, the
        // longest idle first.
        candidates.sort_by_key(|(from_ns, other)| {
            let due_ns = (*from_ns).max(residents.now_ns);
            (due_ns, other.wants, other.active_ns, other.id)
        });
        let mut chosen: Vec<(u64, &ResidentJob)> = Vec::new();
        let mut gained = 0u64;
        for candidate in candidates {
            if gained >= needed {
                break;
            }
            gained = gained.saturating_add(candidate.1.movable_bytes());
            chosen.push(candidate);
        }
        if gained < needed {
            return None;
        }
        // Jobs whose space is not needed stay, the last one chosen first.
        let mut at = chosen.len();
        while at > 0 {
            at -= 1;
            let without = gained - chosen[at].1.movable_bytes();
            if without >= needed {
                gained = without;
                chosen.remove(at);
            }
        }
        Some(Space {
            from_ns: chosen
                .iter()
                .map(|(from_ns, _)| *from_ns)
                .max()
                .unwrap_or(0),
            victims: chosen.iter().map(|(_, other)| other.id).collect(),
        })
    }

    /// When `other`'s space may be taken for `one`; the greatest number: not as things are.
    fn free_from_ns(
        &self,
        residents: &ResidentJobs<'_>,
        other: &ResidentJob,
        one: &ResidentJob,
        urgent: bool,
    ) -> u64 {
        let switch_ns = self
            .link
            .switch_ns(other.resident_bytes, one.missing_bytes());
        // One that has never run has been idle since it came in.
        let silent_ns = other
            .active_ns
            .max(other.since_ns)
            .saturating_add(switch_ns);
        let own = (other.class, one.class);
        if other.kept_away {
            return 0;
        }
        match own {
            (Class::Opportunistic, Class::Guaranteed) => return 0,
            (Class::Guaranteed, Class::Opportunistic) if other.wants => return u64::MAX,
            (Class::Guaranteed, Class::Opportunistic) => return silent_ns,
            _ if self.is_parked(other.id) => return 0,
            _ => {}
        }
        // Two that wait for each other would wait for ever.
        if urgent && other.space_bytes > 0 {
            return 0;
        }
        let term_ns = self.term_ns(residents, other, switch_ns);
        let term_ns = if urgent {
            urgent_ns(term_ns, switch_ns)
        } else {
            term_ns
        };
        let ends_ns = other.since_ns.saturating_add(term_ns);
        if other.wants {
            ends_ns
        } else {
            ends_ns.min(silent_ns)
        }
    }

    /// How long `resident` stays while others of its class wait for its space, if a switch takes
    /// `switch_ns`.
    fn term_ns(&self, residents: &ResidentJobs<'_>, resident: &ResidentJob, switch_ns: u64) -> u64 {
        let competing = residents
            .all
            .iter()
            .filter(|other| other.class == resident.class && other.wants && !other.kept_away);
        let least = competing
            .map(|other| other.weight_ppm.max(1))
            .chain([resident.weight_ppm.max(1)])
            .min()
            .unwrap_or(1);
        let terms = (f64::from(resident.weight_ppm.max(1)) / f64::from(least)).min(MOST_TERMS);
        let k = self.terms_over_switch();
        // CAST: `as` saturates.
        (switch_ns as f64 * k * terms) as u64
    }

    /// How many times longer than its switch the shortest term is.
    fn terms_over_switch(&self) -> f64 {
        self.slice_over_switch * f64::from(self.pressure.stretch())
    }

    /// Parks and releases jobs, where what they may do is decided over several devices ([`Joint`]).
    pub fn tend(&mut self, residents: &ResidentJobs<'_>) {
        self.answer_pressure(residents);
    }

    fn answer_pressure(&mut self, residents: &ResidentJobs<'_>) {
        self.parked
            .retain(|id| residents.all.iter().any(|one| one.id == *id));
        let target = 1.0 / (self.slice_over_switch + 1.0);
        self.pressure.step(residents.now_ns, target);
        if self.pressure.takes_release(residents.now_ns) && !self.parked.is_empty() {
            self.parked.remove(0);
        }
        let working = residents
            .all
            .iter()
            .filter(|one| one.wants && !one.kept_away && !self.is_parked(one.id));
        if self.pressure.level() != Level::Thrashing || working.clone().count() < 2 {
            return;
        }
        let last = working
            .filter(|one| one.evictable_bytes > 0)
            .max_by_key(|one| (one.class == Class::Opportunistic, one.arrived_ns, one.id));
        if let Some(last) = last
            && self.pressure.takes_parking(residents.now_ns)
        {
            self.parked.push(last.id);
        }
    }
}

#[cfg(test)]
mod tests;
