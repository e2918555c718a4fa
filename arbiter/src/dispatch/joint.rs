//! Carries what [`policy::residency::Joint`] decides to the residency managers of the devices: a
//! job that uses several of them is in or out on all at once.
//!
//! Devices are *linked* where a job with memory that can be moved may use more than one of them. A
//! linked manager decides nothing about arrivals, nor about space for allocations: it looks,
//! carries moves out, and takes note of slices that were granted to jobs that are out. What follows
//! is decided here for all linked devices at the same moment, after they were stepped, so that
//! nothing that is promised on one device can be taken on another one in between.

use std::collections::BTreeMap;

use policy::residency::{Joint, Place, ResidentJob, Standing};
use policy::{Class, TenantId};

use super::DeviceScheduler;

/// Which devices are linked: that changes as processes come and go.
#[derive(Clone, Copy, Debug, Default)]
pub struct Links(u32);

/// Looks at linked devices after those in `stepped`, as bits, were stepped. Returns the devices
/// that have to be stepped again, as bits.
pub fn step(
    now_ns: u64,
    links: &mut Links,
    stepped: u32,
    schedulers: &mut [DeviceScheduler],
) -> u32 {
    let changed = |changed: bool, it: &mut DeviceScheduler| it.residency.take_crew() || changed;
    if schedulers.iter_mut().fold(false, changed) {
        links.0 = link(schedulers);
    }
    let linked = links.0;
    if linked & stepped == 0 {
        return 0;
    }
    share_uses(now_ns, linked, schedulers);
    let is_calm = |(at, scheduler): (usize, &DeviceScheduler)| {
        linked & (1 << at) == 0 || scheduler.residency.is_calm()
    };
    if schedulers.iter().enumerate().all(is_calm) {
        return settle(linked, schedulers);
    }
    let mut changed = false;
    for id in recount(now_ns, linked, schedulers, |joint| joint.torn()) {
        changed |= depart(now_ns, &[id], linked, schedulers).unwrap_or(false);
    }
    changed |= make_space(now_ns, linked, schedulers);
    changed |= bring_in(now_ns, linked, schedulers);
    if changed { linked } else { 0 }
}

/// The linked devices, as bits.
fn link(schedulers: &mut [DeviceScheduler]) -> u32 {
    let mut seen: BTreeMap<TenantId, u32> = BTreeMap::new();
    for (at, scheduler) in schedulers.iter().enumerate().take(32) {
        for id in scheduler.residency.movable() {
            *seen.entry(id).or_default() |= 1 << at;
        }
    }
    let several = seen.values().filter(|devices| devices.count_ones() > 1);
    let linked = several.fold(0, |linked, devices| linked | devices);
    for (at, scheduler) in schedulers.iter_mut().enumerate() {
        scheduler
            .residency
            .set_linked(at < 32 && linked & (1 << at) != 0);
    }
    linked
}

fn of(
    linked: u32,
    schedulers: &mut [DeviceScheduler],
) -> impl Iterator<Item = &mut DeviceScheduler> {
    let all = schedulers.iter_mut().enumerate().take(32);
    all.filter(move |(at, _)| linked & (1 << at) != 0)
        .map(|(_, scheduler)| scheduler)
}

/// A job that is at work on one device is idle on none.
fn share_uses(now_ns: u64, linked: u32, schedulers: &mut [DeviceScheduler]) {
    let mut uses: BTreeMap<TenantId, u64> = BTreeMap::new();
    for scheduler in of(linked, schedulers) {
        for (id, used_ns) in scheduler.residency.uses(now_ns) {
            let last_ns = uses.entry(id).or_default();
            *last_ns = used_ns.max(*last_ns);
        }
    }
    for scheduler in of(linked, schedulers) {
        for (id, used_ns) in &uses {
            scheduler.residency.note_use(*id, *used_ns);
        }
    }
}

/// Everybody is in, and nobody moves or is about to.
fn settle(linked: u32, schedulers: &mut [DeviceScheduler]) -> u32 {
    let mut changed = false;
    for scheduler in of(linked, schedulers) {
        changed |= scheduler.residency.all_are_in();
        scheduler.stand();
    }
    if changed { linked } else { 0 }
}

/// Counts everybody's memory anew, and asks about all of it.
fn recount<T>(
    now_ns: u64,
    linked: u32,
    schedulers: &mut [DeviceScheduler],
    ask: impl FnOnce(&Joint<'_>) -> T,
) -> T {
    for scheduler in of(linked, schedulers) {
        scheduler.recount(now_ns);
    }
    let places: Vec<Place<'_>> = of(linked, schedulers)
        .map(|scheduler| scheduler.residency.place(now_ns))
        .collect();
    ask(&Joint::new(&places))
}

/// The host cannot take what a job has on the devices.
struct Refused;

/// Jobs leave all of their devices, where the host can take all that they have: before anything
/// moves that is promised, so that nobody moves for another one's refusal. Whether something begins
/// to leave.
fn depart(
    now_ns: u64,
    ids: &[TenantId],
    linked: u32,
    schedulers: &mut [DeviceScheduler],
) -> Result<bool, Refused> {
    let mut promised: Vec<(usize, TenantId)> = Vec::new();
    for (at, id) in (0..schedulers.len().min(32))
        .filter(|at| linked & (1 << at) != 0)
        .flat_map(|at| ids.iter().map(move |id| (at, *id)))
    {
        // PANIC: one of them.
        let scheduler = &mut schedulers[at];
        if !scheduler.residency.has_to_leave(id) {
            continue;
        }
        if !scheduler.promise_departure(now_ns, id) {
            for (before, id) in promised {
                schedulers[before].take_back_promise(now_ns, id);
            }
            return Err(Refused);
        }
        promised.push((at, id));
    }
    for (at, id) in &promised {
        schedulers[*at].residency.depart_whole(now_ns, *id);
    }
    Ok(!promised.is_empty())
}

/// Allocations of those that are in wait for memory: others give way, on all of their devices.
fn make_space(now_ns: u64, linked: u32, schedulers: &mut [DeviceScheduler]) -> bool {
    let mut waiting: Vec<(bool, u64, TenantId)> = Vec::new();
    for scheduler in of(linked, schedulers) {
        let all = scheduler.residency.place(now_ns).residents.all.iter();
        let waits = |one: &&ResidentJob| one.space_bytes > 0 && !one.kept_away;
        waiting.extend(
            all.filter(waits)
                .map(|one| (one.class == Class::Opportunistic, one.arrived_ns, one.id)),
        );
    }
    waiting.sort_unstable();
    waiting.dedup_by_key(|(_, _, id)| *id);
    let mut changed = false;
    for (_, _, id) in waiting {
        let shrinks = of(linked, schedulers).any(|it| it.residency.others_shrink_for(now_ns, id));
        if shrinks || of(linked, schedulers).any(|it| !it.residency.is_in(id)) {
            continue;
        }
        let space = recount(now_ns, linked, schedulers, |joint| joint.more_space_for(id));
        let victims = space.map(|space| space.victims).unwrap_or_default();
        if victims.is_empty() {
            continue;
        }
        if let Ok(leaves) = depart(now_ns, &victims, linked, schedulers) {
            changed |= leaves;
            for scheduler in of(linked, schedulers) {
                scheduler.residency.begin_term(now_ns, id);
            }
        }
    }
    changed
}

/// Those that were granted a slice, that their operator has called or whose allocations wait come,
/// where they may; everybody knows where he stands then.
fn bring_in(now_ns: u64, linked: u32, schedulers: &mut [DeviceScheduler]) -> bool {
    let mut called: Vec<TenantId> = Vec::new();
    for scheduler in of(linked, schedulers) {
        called.extend(scheduler.residency.take_called());
    }
    let mut changed = false;
    loop {
        let (standings, _) = recount(now_ns, linked, schedulers, |joint| joint.standings());
        for scheduler in of(linked, schedulers) {
            for (id, standing) in &standings {
                changed |= scheduler.residency.set_standing(*id, *standing);
            }
            scheduler.stand();
        }
        let may = |id: &TenantId| standings.contains(&(*id, Standing::MayCome));
        let Some(at) = called.iter().position(may) else {
            return changed;
        };
        // Each is tried once.
        let id = called.swap_remove(at);
        called.retain(|other| *other != id);
        let space = recount(now_ns, linked, schedulers, |joint| joint.space_for(id));
        let Some(space) = space.filter(|space| space.from_ns <= now_ns) else {
            continue;
        };
        let mut shrinks = of(linked, schedulers);
        // Those that shrink for it do so first; then it comes without anybody's leaving.
        if !space.victims.is_empty() && shrinks.any(|it| it.residency.others_shrink_for(now_ns, id))
        {
            continue;
        }
        drop(shrinks);
        changed = true;
        // Who refuses is asked no more for a while: others may be then.
        if depart(now_ns, &space.victims, linked, schedulers).is_err() {
            continue;
        }
        for scheduler in of(linked, schedulers) {
            scheduler.residency.come(now_ns, id);
        }
    }
}
