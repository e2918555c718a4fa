//! Jobs that use several devices: where such a job's memory is, is one decision over all of them.
//!
//! A job whose memory is away on one device cannot go on with what it has on another: its processes
//! wait as a whole. If each device decided alone, two jobs could each hold what the other one waits
//! for, on idle devices and for good (hold and wait: E. G. Coffman, M. J. Elphick, A. Shoshani,
//! "System Deadlocks", ACM Computing Surveys 1971). So a job is in or out as a whole:
//!
//! * It comes when *all* of its devices have space for it, now or because jobs leave whose terms
//!   are over. All of that is promised before anything of it moves.
//! * Who leaves one device leaves all of them.
//! * What a job has on one device while it is out on another one keeps nobody away: it is taken
//!   before anything that is in use.
//! * Jobs that are out stand in *one line*, by class and then by how long they have been out. The
//!   first one that space can be made for is a *head*, and its devices are its own: nobody behind
//!   it takes others' space there, and who fits without that comes only where the head gets its
//!   space as soon as it would have without (backfilling: D. A. Lifka, "The ANL/IBM SP Scheduling
//!   System", 1995). Jobs on other devices have heads of their own. The line does not depend on
//!   what anybody holds, so nobody can wait in a circle, and who is first stays so until it is in.
//!
//! A term ends by the rules of one device ([`Arbitration`](super::Arbitration)); its switch is that
//! of all devices together, for one process moves the memory of one device after that of another.

use super::{Arbitration, MOST_TERMS, ResidentJob, ResidentJobs, Space, Standing, urgent_ns};
use crate::slice::{Class, TenantId};

/// When somebody who is on the way can be asked for space: later, and nobody knows when.
const LATER_NS: u64 = u64::MAX - 1;

/// One device and how its jobs take turns.
#[derive(Clone, Copy, Debug)]
pub struct Place<'a> {
    /// Its jobs, also those that have nothing there and wait at its gate.
    pub residents: ResidentJobs<'a>,
    /// Its link, its pressure, and whom it has parked.
    pub arbitration: &'a Arbitration,
}

/// A job on all of its devices.
#[derive(Clone, Debug)]
struct Whole<'a> {
    id: TenantId,
    class: Class,
    weight_ppm: u32,
    parts: Vec<(usize, &'a ResidentJob)>,
    out: bool,
    wants: bool,
    moving: bool,
    kept_away: bool,
    parked: bool,
    /// An allocation of it waits for memory.
    needs_space: bool,
    active_ns: u64,
    since_ns: u64,
    /// None of it leaves until then: a part of it could not.
    stays_until_ns: u64,
    /// None of it comes back until then: a part that is out could not.
    out_until_ns: u64,
}

impl<'a> Whole<'a> {
    fn new(id: TenantId) -> Self {
        Self {
            id,
            class: Class::Guaranteed,
            weight_ppm: 0,
            parts: Vec::new(),
            out: false,
            wants: false,
            moving: false,
            kept_away: false,
            parked: false,
            needs_space: false,
            active_ns: 0,
            since_ns: 0,
            stays_until_ns: 0,
            out_until_ns: 0,
        }
    }

    fn add(&mut self, at: usize, part: &'a ResidentJob, arbitration: &Arbitration) {
        // Penalties are for one device, and count on all.
        if part.class == Class::Opportunistic {
            self.class = Class::Opportunistic;
        }
        self.weight_ppm = self.weight_ppm.max(part.weight_ppm);
        self.since_ns = match (self.out, part.out) {
            // Out since the first part of it left, in since the last one came.
            (true, true) => self.since_ns.min(part.since_ns),
            (true, false) => self.since_ns,
            (false, true) => part.since_ns,
            (false, false) => self.since_ns.max(part.since_ns),
        };
        self.out |= part.out;
        self.wants |= part.wants;
        self.moving |= part.is_moving();
        self.kept_away |= part.kept_away;
        self.parked |= arbitration.is_parked(part.id);
        self.needs_space |= part.space_bytes > 0;
        self.active_ns = self.active_ns.max(part.active_ns);
        self.stays_until_ns = self.stays_until_ns.max(part.stuck_until_ns);
        if part.out {
            self.out_until_ns = self.out_until_ns.max(part.stuck_until_ns);
        }
        self.parts.push((at, part));
    }

    fn on(&self, at: usize) -> Option<&'a ResidentJob> {
        let mut parts = self.parts.iter();
        parts.find(|(place, _)| *place == at).map(|(_, part)| *part)
    }

    fn missing_bytes(&self, at: usize) -> u64 {
        self.on(at).map_or(0, |part| {
            // Of one that is on its way all is spoken for.
            if part.coming { 0 } else { part.missing_bytes() }
        })
    }

    fn movable_bytes(&self, at: usize) -> u64 {
        self.on(at).map_or(0, ResidentJob::movable_bytes)
    }

    fn shares_a_place_with(&self, other: &Self) -> bool {
        self.parts.iter().any(|(at, _)| other.on(*at).is_some())
    }
}

/// All devices that are tied to each other by jobs, and what follows for those.
#[derive(Clone, Debug)]
pub struct Joint<'a> {
    places: &'a [Place<'a>],
    jobs: Vec<Whole<'a>>,
}

/// What every job may do now, and when to look again.
pub type Standings = (Vec<(TenantId, Standing)>, Option<u64>);

impl<'a> Joint<'a> {
    /// Of these devices.
    pub fn new(places: &'a [Place<'a>]) -> Self {
        let mut jobs: Vec<Whole<'a>> = Vec::new();
        for (at, place) in places.iter().enumerate() {
            for part in place.residents.all {
                let known = jobs.iter().position(|job| job.id == part.id);
                let known = known.unwrap_or_else(|| {
                    jobs.push(Whole::new(part.id));
                    jobs.len() - 1
                });
                if let Some(job) = jobs.get_mut(known) {
                    job.add(at, part, place.arbitration);
                }
            }
        }
        Self { places, jobs }
    }

    fn now_ns(&self) -> u64 {
        let now = self.places.iter().map(|place| place.residents.now_ns);
        now.max().unwrap_or(0)
    }

    fn get(&self, id: TenantId) -> Option<&Whole<'a>> {
        self.jobs.iter().find(|job| job.id == id)
    }

    /// Jobs of which something leaves a device while something else of them stays: that is to leave
    /// as well. What could not leave a moment ago stays; then the rest comes back.
    pub fn torn(&self) -> Vec<TenantId> {
        let now_ns = self.now_ns();
        let leaves = |job: &&Whole<'_>| job.parts.iter().any(|(_, part)| part.leaving);
        let stays = |job: &&Whole<'_>| {
            let settled = |part: &ResidentJob| {
                part.resident_bytes > 0 && !part.is_moving() && part.stuck_until_ns <= now_ns
            };
            job.parts.iter().any(|(_, part)| settled(part))
        };
        let torn = self.jobs.iter().filter(leaves).filter(stays);
        torn.map(|job| job.id).collect()
    }

    /// What every job may do now.
    pub fn standings(&self) -> Standings {
        let now_ns = self.now_ns();
        let in_line = |job: &&Whole<'_>| job.out && job.wants && !job.moving && !job.kept_away;
        let mut line: Vec<&Whole<'_>> = self.jobs.iter().filter(in_line).collect();
        line.sort_by_key(|job| (job.class == Class::Opportunistic, job.since_ns, job.id));
        let mut again_ns: Option<u64> = None;
        let mut sooner = |ns: u64| again_ns = Some(again_ns.map_or(ns, |again: u64| again.min(ns)));
        // What the heads leave of each of their devices.
        let mut left: Vec<Option<u64>> = vec![None; self.places.len()];
        let mut standings: Vec<(TenantId, Standing)> = Vec::new();
        for job in line {
            if job.out_until_ns > now_ns {
                sooner(job.out_until_ns);
                standings.push((job.id, Standing::Waits(Some(job.out_until_ns))));
                continue;
            }
            let is_free = |(at, _): &(usize, &ResidentJob)| {
                job.missing_bytes(*at) == 0 || left.get(*at) == Some(&None)
            };
            let fits_behind = |(at, _): &(usize, &ResidentJob)| {
                let left = left.get(*at).copied().flatten();
                left.is_none_or(|left| job.missing_bytes(*at) <= left)
            };
            let fits = self.fits(job);
            let standing = if fits && job.parts.iter().all(fits_behind) {
                Standing::MayCome
            } else if let Some(too_large) = self.too_large(job) {
                too_large
            } else if job.parked {
                Standing::Parked
            } else if !job.parts.iter().all(is_free) {
                Standing::Waits(None)
            } else {
                match self.space(job, false, true) {
                    Some(space) if space.from_ns < u64::MAX => {
                        self.subtract(job, &space, &mut left);
                        if space.from_ns <= now_ns {
                            Standing::MayCome
                        } else if space.from_ns == LATER_NS {
                            Standing::Waits(None)
                        } else {
                            sooner(space.from_ns);
                            Standing::Waits(Some(space.from_ns))
                        }
                    }
                    _ => Standing::Waits(None),
                }
            };
            standings.push((job.id, standing));
        }
        for job in &self.jobs {
            if standings.iter().any(|(id, _)| *id == job.id) {
                continue;
            }
            let standing = if job.moving {
                Standing::Moving
            } else if job.kept_away {
                Standing::KeptAway
            } else if !job.out {
                Standing::In
            } else if let Some(too_large) = self.too_large(job) {
                too_large
            } else {
                // It wants nothing, and is looked at when it does.
                Standing::Waits(None)
            };
            standings.push((job.id, standing));
        }
        (standings, again_ns)
    }

    /// Notes what a head leaves of its devices once it has come.
    fn subtract(&self, head: &Whole<'_>, space: &Space, left: &mut [Option<u64>]) {
        for ((at, place), left) in self.places.iter().enumerate().zip(left) {
            if head.on(at).is_none() {
                continue;
            }
            let gone = |id: &TenantId| self.get(*id).map_or(0, |job| job.movable_bytes(at));
            let gained = space.victims.iter().map(gone).fold(0, u64::saturating_add);
            let free = place.residents.free_bytes().saturating_add(gained);
            // A device on which it has nothing is not its own.
            if head.missing_bytes(at) > 0 {
                *left = Some(free.saturating_sub(head.missing_bytes(at)));
            }
        }
    }

    /// Whether it could come without anybody's leaving.
    fn fits(&self, job: &Whole<'_>) -> bool {
        (job.parts.iter()).all(|(at, _)| self.lacking_bytes(*at, job.missing_bytes(*at)) == 0)
    }

    /// By how much `bytes` more would be too much for a device; nothing more is never too much.
    fn lacking_bytes(&self, at: usize, bytes: u64) -> u64 {
        let place = self.places.get(at).filter(|_| bytes > 0);
        place.map_or(0, |place| place.residents.lacking_bytes(bytes))
    }

    fn too_large(&self, job: &Whole<'_>) -> Option<Standing> {
        job.parts.iter().find_map(|(at, part)| {
            let residents = &self.places.get(*at)?.residents;
            let fixed = residents.all.iter().map(|one| one.fixed_bytes);
            let fixed = fixed.fold(0, u64::saturating_add);
            let available_bytes = residents.capacity_bytes.saturating_sub(fixed);
            let is_known = residents.capacity_bytes > 0;
            (is_known && part.evictable_bytes > available_bytes).then(|| Standing::TooLarge {
                needed_bytes: part.evictable_bytes.saturating_add(part.space_bytes),
                available_bytes,
            })
        })
    }

    /// Whose space `id` takes to come, on all of its devices together, and when; `None`: there is
    /// not enough, even with all others evicted.
    pub fn space_for(&self, id: TenantId) -> Option<Space> {
        self.space(self.get(id)?, false, true)
    }

    /// Whose space job `id`, which is in, takes now for allocations that wait. It need not wait for
    /// the end of the others' terms, because the allocation would fail otherwise.
    pub fn more_space_for(&self, id: TenantId) -> Option<Space> {
        let space = self.space(self.get(id)?, true, false)?;
        (space.from_ns <= self.now_ns()).then_some(space)
    }

    fn space(&self, one: &Whole<'_>, urgent: bool, comes: bool) -> Option<Space> {
        let needed: Vec<(usize, u64)> = one
            .parts
            .iter()
            .map(|(at, part)| {
                let lacking = match self.places.get(*at) {
                    _ if comes => self.lacking_bytes(*at, one.missing_bytes(*at)),
                    // What it waits for is in its footprint already.
                    Some(place) if part.space_bytes > 0 => place.residents.lacking_bytes(0),
                    _ => 0,
                };
                (*at, lacking)
            })
            .filter(|(_, lacking)| *lacking > 0)
            .collect();
        if needed.is_empty() {
            return Some(Space::default());
        }
        let now_ns = self.now_ns();
        let mut candidates: Vec<(u64, &Whole<'_>)> = self
            .jobs
            .iter()
            .filter(|other| {
                other.id != one.id
                    && other.stays_until_ns <= now_ns
                    && needed.iter().any(|(at, _)| other.movable_bytes(*at) > 0)
            })
            .map(|other| match self.free_from_ns(other, one, urgent) {
                u64::MAX => (u64::MAX, other),
                // A head waits for those on their way, too, or it would be passed over for as long
                // as anybody moves.
                _ if other.moving => (LATER_NS, other),
                from_ns => (from_ns, other),
            })
            .filter(|(from_ns, _)| *from_ns < u64::MAX)
            .collect();
        // As on one device: who may be evicted soonest, idle before busy, the longest idle first.
        candidates.sort_by_key(|(from_ns, other)| {
            (
                (*from_ns).max(now_ns),
                other.wants,
                other.active_ns,
                other.id,
            )
        });
        let gained = |chosen: &[(u64, &Whole<'_>)], at: usize| {
            let gains = chosen.iter().map(|(_, other)| other.movable_bytes(at));
            gains.fold(0, u64::saturating_add)
        };
        let is_short =
            |chosen: &[(u64, &Whole<'_>)], (at, bytes): &(usize, u64)| gained(chosen, *at) < *bytes;
        let mut chosen: Vec<(u64, &Whole<'_>)> = Vec::new();
        for candidate in candidates {
            let mut short = needed.iter().filter(|need| is_short(&chosen, need));
            if short.any(|(at, _)| candidate.1.movable_bytes(*at) > 0) {
                chosen.push(candidate);
            }
        }
        if needed.iter().any(|need| is_short(&chosen, need)) {
            return None;
        }
        // Jobs whose space is not needed stay, the last one chosen first.
        for at in (0..chosen.len()).rev() {
            let mut without = chosen.clone();
            without.remove(at);
            if !needed.iter().any(|need| is_short(&without, need)) {
                chosen = without;
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
    fn free_from_ns(&self, other: &Whole<'_>, one: &Whole<'_>, urgent: bool) -> u64 {
        // What cannot run as it is loses nothing.
        if other.kept_away || other.out {
            return 0;
        }
        let switch_ns = self.switch_ns(other, one);
        // One that has never run has been idle since it came in.
        let silent_ns = other
            .active_ns
            .max(other.since_ns)
            .saturating_add(switch_ns);
        match (other.class, one.class) {
            (Class::Opportunistic, Class::Guaranteed) => return 0,
            (Class::Guaranteed, Class::Opportunistic) if other.wants => return u64::MAX,
            (Class::Guaranteed, Class::Opportunistic) => return silent_ns,
            _ if other.parked => return 0,
            _ => {}
        }
        // Two that wait for each other would wait for ever.
        if urgent && other.needs_space {
            return 0;
        }
        let term_ns = self.term_ns(other, switch_ns);
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

    /// How long it takes until `one` is in the place of `other`, on all devices.
    fn switch_ns(&self, other: &Whole<'_>, one: &Whole<'_>) -> u64 {
        let places = self.places.iter().enumerate();
        let each = places.map(|(at, place)| {
            let out = other.on(at).map_or(0, |part| part.resident_bytes);
            let back = one.missing_bytes(at);
            if out == 0 && back == 0 {
                0
            } else {
                place.arbitration.link.switch_ns(out, back)
            }
        });
        each.fold(0, u64::saturating_add)
    }

    /// How long `job` stays while others of its class wait for its space, if a switch takes
    /// `switch_ns`.
    fn term_ns(&self, job: &Whole<'_>, switch_ns: u64) -> u64 {
        let competing = self.jobs.iter().filter(|other| {
            other.class == job.class
                && other.wants
                && !other.kept_away
                && other.shares_a_place_with(job)
        });
        let weights = competing.map(|other| other.weight_ppm.max(1));
        let own = job.weight_ppm.max(1);
        let least = weights.chain([own]).min().unwrap_or(1);
        let terms = (f64::from(own) / f64::from(least)).min(MOST_TERMS);
        let stays = job.parts.iter().filter_map(|(at, _)| self.places.get(*at));
        let k = stays
            .map(|place| place.arbitration.terms_over_switch())
            .fold(1.0, f64::max);
        // CAST: `as` saturates.
        (switch_ns as f64 * k * terms) as u64
    }
}

#[cfg(test)]
mod tests;
