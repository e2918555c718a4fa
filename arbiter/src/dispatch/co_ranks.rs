//! Ranks that share a device: a kernel that waits for another one which the gate keeps out.
//!
//! The kernels of a collective spin until all ranks have launched theirs. Where two ranks of a job,
//! each a process, share a device, the gate may close between the two launches. The kernel that is
//! there spins; everybody waits for it as for any in-flight work; after a second it counts as
//! endless and its job is demoted; and the launch that it waits for does not come, since a demoted
//! job runs after all others. So while in-flight work makes no progress, the gates of those
//! processes of the same tenant that wait and have nothing on the device themselves are open, until
//! it does. Their work is charged to the tenant like the rest.
//!
//! What is there may as well wait for a thread of its own process: a kernel that spins on a word
//! that the thread writes once it has launched something else, a graph with a host function that
//! takes a lock which the thread holds at its gate. Work that takes long does not differ from that,
//! so a process with own work on the device is admitted when that has stood still for longer than
//! its kernels and drains usually take. Streams of which it is known that they wait for the host
//! are not on the device at all: nobody waits for their end, and its process has its slices as
//! ever. Only where its memory is about to move it has none, and is admitted for that.
//!
//! Before memory leaves all work of its process has to end, on all of its devices, and what stands
//! still on one may wait for a thread at the gate of another. So where a departure is overdue those
//! that wait are let in as well.
//!
//! A tenant cannot gain time by it: the gates are open for no longer in all than a drain is waited
//! for, and then for a window in a second. A kernel that does not end for other reasons gets no
//! more than that out of it.

use std::rc::Rc;

use channel::arbiter::ClientPages;
use policy::residency::Standing;

use super::DeviceScheduler;
use super::entity::{RunEntity, Standstill};
use crate::peer;

/// Marks and calls of those that are not in `co_ranks`.
fn of_others(entity: &RunEntity, co_ranks: &[u64], device: usize) -> u64 {
    let clients = entity.clients().iter();
    clients
        .filter(|(id, _)| !co_ranks.contains(id))
        .map(|(_, pages)| peer::activity(pages, device))
        .map(|seen| seen.marks.saturating_add(u64::from(seen.blocking)))
        .fold(0, u64::saturating_add)
}

/// Streams of a tenant that are looked at to find out whether its work gets on.
const STOOD_MOST: usize = 64;

/// Streams of the tenant with work that is not finished, whatever it waits for.
fn standing(entity: &RunEntity, device: usize) -> Vec<Standstill> {
    let clients = entity.clients().iter();
    let streams = clients.flat_map(|(id, pages)| {
        let client = &pages.client;
        let streams = client.outstanding(device, 0);
        let streams = streams.chain(client.waiting_for_host(device));
        streams.map(|(slot, done)| Standstill {
            client: *id,
            slot,
            done,
        })
    });
    streams.take(STOOD_MOST).collect()
}

impl DeviceScheduler {
    /// Opens and closes the gates of co-ranks beside drains that stand still. Returns when to look
    /// again.
    pub(super) fn admit_co_ranks(&mut self, now_ns: u64) -> Option<u64> {
        let mut again_ns = None;
        for at in 0..self.roster.len() {
            if self.roster[at].co_ranks().are_here() {
                self.close_co_ranks(now_ns, at);
            }
            if !self.roster[at].co_ranks().are_here() {
                self.roster[at].renew_co_ranks(now_ns);
                self.open_co_ranks(now_ns, at);
            }
            if self.roster[at].co_ranks().are_here() {
                again_ns = Some(now_ns + self.pace.drain_look_ns);
            }
        }
        again_ns
    }

    /// The tenant holds the device or is about to, so its own slice moves all of its gates.
    fn is_its_turn(&self, at: usize) -> bool {
        let entity = &self.roster[at];
        let next = self.hand_over.pre_woken().map(|(tenant, _)| tenant);
        entity.holds() || next == Some(entity.tenant)
    }

    fn close_co_ranks(&mut self, now_ns: u64, at: usize) {
        let device = self.device;
        let window_ns = u64::from(self.pace.window_us) * 1000;
        let its_turn = self.is_its_turn(at);
        let entity = &mut self.roster[at];
        let co_ranks = entity.co_ranks();
        let done = |one: &Standstill| {
            let mut clients = entity.clients().iter();
            let (_, pages) = clients.find(|(id, _)| *id == one.client)?;
            pages.client.behind(device, one.slot)
        };
        let there = entity.drains() || entity.waits_for_host() || entity.leaves;
        let marks = of_others(entity, co_ranks.clients(), device);
        let moved = !there || co_ranks.have_met(marks, done);
        let over = co_ranks.time_is_up(now_ns, self.pace.drain_ns, window_ns);
        if !its_turn && entity.may_help() && !moved && !over {
            return;
        }
        let clients = entity.dismiss_co_ranks(now_ns, self.pace.drain_ns);
        if !its_turn {
            let known = entity
                .clients()
                .iter()
                .filter(|(id, _)| clients.contains(id));
            known.for_each(|(_, pages)| pages.arbiter.close(device));
        }
    }

    fn open_co_ranks(&mut self, now_ns: u64, at: usize) {
        let device = self.device;
        let its_turn = self.is_its_turn(at);
        let entity = &self.roster[at];
        if its_turn || entity.gang || !entity.may_help() {
            return;
        }
        let drain = entity.drain().map(|(_, drain)| drain);
        // What has to end may be on another device, and wait for who waits here.
        let overdue = entity.departure_is_overdue(now_ns);
        let (others, own) = match drain {
            Some(drain) => (drain.stands_still(now_ns), drain.keeps_standing(now_ns)),
            // Its memory is about to move, and before that all of its work has to end.
            None => {
                let moves = entity.standing == Standing::Moving && entity.waits_for_host();
                (overdue, moves || overdue)
            }
        };
        let rested = |own| (entity.co_ranks()).may_come(now_ns, self.pace.drain_ns, own);
        let (others, own) = (others && rested(false), own && rested(true));
        if !others && !own {
            return;
        }
        let comes = |(_, pages): &&(u64, Rc<ClientPages>)| {
            let seen = peer::activity(pages, device);
            let without = !seen.is_on_device() && !seen.waits_for_host && !seen.unmarked;
            seen.waits && if without { others } else { own }
        };
        let grant = self.grant_of(entity, now_ns, 0, 0);
        let coming = entity.clients().iter().filter(comes);
        let clients: Vec<u64> = coming.map(|(id, _)| *id).collect();
        let marks = of_others(entity, &clients, device);
        let stood = if own {
            standing(entity, device)
        } else {
            Vec::new()
        };
        // The drain may have ended since the last look; then nobody waits for the co-ranks.
        let gone = stood.is_empty() && of_others(entity, &[], device) == 0 && !overdue;
        if clients.is_empty() || gone {
            return;
        }
        let coming = entity
            .clients()
            .iter()
            .filter(|(id, _)| clients.contains(id));
        for (_, pages) in coming {
            self.woken |= pages.arbiter.open(device, &grant) > 0;
        }
        self.roster[at].admit_co_ranks(now_ns, clients, marks, stood);
    }
}

#[cfg(test)]
mod tests {
    use policy::{Class, TenantId};

    use super::*;
    use crate::dispatch::tests::{Bench, MS, US, greedy};
    use crate::terms::Terms;

    /// Two tenants, the first of which has two ranks: clients 0 and 2. The kernel of the one spins
    /// when its gate has closed.
    fn a_rank_spins() -> Bench {
        let mut bench = Bench::new(&[500_000, 500_000]);
        let second = Rc::new(ClientPages::create().expect("pages"));
        let terms = Terms::plain(Class::Guaranteed, 500_000);
        bench
            .scheduler
            .add(0, TenantId(0), terms, 2, Rc::clone(&second));
        bench.pages.push(second);
        let live = |pages: &[Rc<ClientPages>]| pages.iter().for_each(greedy);
        bench.run(100 * MS, live);
        while !bench.open(0) {
            bench.run(50 * US, live);
        }
        // It comes, and waits at its gate no more.
        bench.run(50 * US, live);
        blocking(&bench, 0, true);
        while bench.open(0) {
            bench.run(50 * US, |pages| pages[1..].iter().for_each(greedy));
        }
        bench.pages[2]
            .client
            .want(0)
            .expect("device")
            .begin_waiting();
        bench
    }

    fn blocking(bench: &Bench, at: usize, on: bool) {
        let want = bench.pages[at].client.want(0).expect("device");
        if on {
            want.begin_blocking();
        } else {
            want.end_blocking();
        }
    }

    #[test]
    fn who_is_waited_for_on_the_device_is_let_in_until_that_has_moved_on() {
        let mut bench = a_rank_spins();
        let mut waited_us = 0;
        while !bench.open(2) {
            bench.run(50 * US, |pages| greedy(&pages[1]));
            waited_us += 50;
            assert!(
                waited_us < 3000,
                "a moment more than it takes to stand still"
            );
        }
        assert!(!bench.open(0), "the one that is there gets no more");
        bench.run(MS, |pages| greedy(&pages[1]));
        assert!(bench.open(2));
        // They have met.
        blocking(&bench, 0, false);
        bench.run(200 * US, |pages| greedy(&pages[1]));
        assert!(
            !bench.open(2) && bench.open(1),
            "the other one has its turn"
        );
        // Both go on when it is theirs.
        bench.run(20 * MS, |pages| pages.iter().for_each(greedy));
        let before = [0, 1].map(|at| bench.usage(at).device_ns);
        bench.run(1000 * MS, |pages| pages.iter().for_each(greedy));
        let got = [0, 1].map(|at| bench.usage(at).device_ns - before[at as usize]);
        assert!(got[0].abs_diff(500 * MS) < 10 * MS, "{got:?}");
    }

    #[test]
    fn one_whose_kernel_never_ends_does_not_get_the_device_by_that() {
        let mut bench = a_rank_spins();
        let mut open_us = 0;
        let mut in_last_seconds_us = 0;
        for step in 0..5 * 20_000 {
            // A second process that would always have more to do.
            bench.run(50 * US, |pages| pages[1..].iter().for_each(greedy));
            if bench.open(2) && !bench.open(0) {
                open_us += 50;
                in_last_seconds_us += if step > 2 * 20_000 { 50 } else { 0 };
            }
        }
        assert!((100_000..115_000).contains(&open_us), "{open_us}");
        assert!(
            (2000..8000).contains(&in_last_seconds_us),
            "{in_last_seconds_us}"
        );
    }

    #[test]
    fn a_drain_that_has_just_ended_needs_no_co_ranks() {
        let mut bench = a_rank_spins();
        bench.run(1500 * US, |pages| greedy(&pages[1]));
        assert!(!bench.open(2));
        // It ends between two looks of one step, and its process waits by then.
        let now_ns = bench.now_ns + MS;
        let (_, drain) = bench.scheduler.roster[0].drain().expect("a drain");
        assert!(drain.stands_still(now_ns));
        blocking(&bench, 0, false);
        bench.pages[0]
            .client
            .want(0)
            .expect("device")
            .begin_waiting();
        assert_eq!(bench.scheduler.admit_co_ranks(now_ns), None);
        assert!(!bench.open(0) && !bench.open(2));
    }

    #[test]
    fn a_paused_tenant_gets_no_co_ranks() {
        let mut bench = a_rank_spins();
        let paused = Terms {
            paused: true,
            ..Terms::plain(Class::Guaranteed, 500_000)
        };
        bench.scheduler.set_terms(TenantId(0), paused);
        for _ in 0..2000 {
            bench.run(50 * US, |pages| greedy(&pages[1]));
            assert!(!bench.open(2));
        }
    }
}
