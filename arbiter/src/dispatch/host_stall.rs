//! What is charged for a time in which the arbiter did not look.
//!
//! It looks when it planned to, unless the host lets it wait: a virtual machine that is given no
//! core, or a machine with more threads than cores, stands still for tens of milliseconds now and
//! then. The tenant that held the device just then would be charged for all of that, mostly without
//! having used it: its threads, and those of the next tenant, stood still as well, or waited. A
//! slice of 3 ms that costs 15 ms is three turns in which its tenant gets nothing. So of the time
//! beyond the planned look a tenant is charged what its submissions in that time usually take,
//! where it made some. Where it made none and has work on the device, it is charged what may be in
//! flight: the window, or two of its kernels where those are longer.
//!
//! A stall beyond a tenth of a second is nobody's slice any more: nobody closed a gate, and clients
//! whose gate is closed pass it after some seconds. The time beyond that is charged to nobody. A
//! job that happened to hold the device when the arbiter was stopped for 20 s would otherwise wait
//! for 20 s afterwards.

use super::entity::RunEntity;

/// A look that comes so much later than planned is a host stall. TIMEOUT: what a thread waits for
/// its core on a machine that is not crowded, and some.
const STALL_NS: u64 = 1_000_000;
/// Of a stall, this much is charged at most. TIMEOUT: far more than any hand-over takes on a busy
/// host, and too little to be noticed as a wait afterwards.
const UNSUPERVISED_NS: u64 = 100_000_000;

/// Of the time until `now_ns`, how much lies beyond what was planned; 0 where that is little.
pub(super) fn stall_ns(planned_ns: Option<u64>, charged_ns: u64, now_ns: u64) -> u64 {
    let planned_ns = planned_ns.unwrap_or(now_ns).max(charged_ns);
    let stall_ns = now_ns.saturating_sub(planned_ns);
    if stall_ns > STALL_NS { stall_ns } else { 0 }
}

/// Of a look that is so late, the time that counts for nobody.
pub(super) fn unsupervised_ns(stall_ns: u64) -> u64 {
    stall_ns.saturating_sub(UNSUPERVISED_NS)
}

impl RunEntity {
    /// Of `got_ns`, the last `stall_ns` of which nobody looked, what it is charged.
    pub(super) fn got_while_stalled_ns(
        &self,
        now_ns: u64,
        device: usize,
        got_ns: u64,
        stall_ns: u64,
    ) -> u64 {
        if stall_ns == 0 || got_ns == 0 {
            return got_ns;
        }
        let seen = self.sample(device);
        let there = seen.in_flight();
        let seen_ns = got_ns.saturating_sub(stall_ns);
        let submissions = self.submissions();
        let more = submissions.since(seen);
        let (Some(one_ns), Some(more_ns)) = (submissions.take_ns(1), submissions.take_ns(more))
        else {
            return got_ns;
        };
        // A copy may be of any length.
        if seen.blocking {
            return got_ns;
        }
        let window_ns = u64::from(self.window_us()) * 1000;
        let flying_ns = window_ns.max(one_ns.saturating_mul(2));
        let most_ns = if let Some((since_ns, drain)) = self.drain() {
            // It is believed to have ended when it was expected to, or, if it is still there, with
            // the kernel that runs.
            let begun_ns = now_ns.saturating_sub(got_ns);
            let left_ns = drain.ends_ns(since_ns).saturating_sub(begun_ns);
            let more_ns = if there { one_ns } else { 0 };
            seen_ns.max(left_ns).saturating_add(more_ns)
        } else if more > 0 && there {
            // What was there before is about as much as what is there now.
            seen_ns.saturating_add(more_ns)
        } else {
            seen_ns.saturating_add(more_ns).saturating_add(flying_ns)
        };
        got_ns.min(most_ns)
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use channel::arbiter::ClientPages;
    use policy::TenantId;

    use super::*;
    use crate::dispatch::tests::{Bench, MS, US, greedy};
    use crate::terms::Terms;

    enum There {
        Nothing,
        Kernel,
        Copy,
    }

    impl There {
        fn put(self, pages: &ClientPages) {
            match self {
                Self::Nothing => {}
                Self::Kernel => drop(pages.client.claim_stream(0).expect("slot").1.issue()),
                Self::Copy => pages.client.want(0).expect("device").begin_blocking(),
            }
        }
    }

    /// Two tenants with kernels of 50 us; the host stands still for 15 ms while the first one runs,
    /// which submits `launches` after that, and has work on the device or not. What it is charged
    /// for the time since the last look.
    fn after_a_standstill(launches: u64, there: There) -> u64 {
        let mut bench = Bench::new(&[500_000, 500_000]);
        let both = |pages: &[Rc<ClientPages>]| pages.iter().for_each(greedy);
        bench.run(1000 * MS, both);
        while !bench.open(0) {
            bench.run(50 * US, both);
        }
        bench.run(500 * US, both);
        assert!(bench.open(0) && bench.pages[1].client.waiting(0) > 0);
        bench.step();
        let before_ns = bench.usage(0).device_ns;
        let thread = bench.pages[0].client.thread(0);
        (0..launches).for_each(|_| thread.count_launch());
        there.put(&bench.pages[0]);
        bench.now_ns += 15 * MS;
        bench.scheduler.charge(bench.now_ns);
        bench.usage(0).device_ns - before_ns
    }

    #[test]
    fn a_standstill_of_the_host_is_nobodys() {
        // What was planned is some 0.3 ms, and the window is 2.
        for there in [There::Nothing, There::Kernel] {
            let none = after_a_standstill(0, there);
            assert!((2000 * US..=2500 * US).contains(&none), "{none}");
        }
        // Ten submissions take half a millisecond.
        let ten = after_a_standstill(10, There::Kernel);
        assert!((400 * US..=1000 * US).contains(&ten), "{ten}");
        let many = after_a_standstill(1000, There::Kernel);
        assert_eq!(many, 15 * MS, "it ran all the time");
        let copy = after_a_standstill(0, There::Copy);
        assert_eq!(copy, 15 * MS, "it may be of any length");
    }

    /// Two tenants, one of which holds the device while the arbiter is stopped for 20 s; it may
    /// submit all the time. What both get in the two seconds after that.
    fn after_a_stop(submits: bool, terms: Option<Terms>) -> [u64; 2] {
        let mut bench = Bench::new(&[500_000, 500_000]);
        let both = |pages: &[Rc<ClientPages>]| pages.iter().for_each(greedy);
        if let Some(terms) = terms {
            bench.scheduler.set_terms(TenantId(0), terms);
            bench.scheduler.set_terms(TenantId(1), terms);
        }
        bench.run(1000 * MS, both);
        while !bench.open(0) {
            bench.run(50 * US, both);
        }
        bench.run(500 * US, both);
        assert!(bench.open(0) && bench.pages[1].client.waiting(0) > 0);
        if submits {
            let thread = bench.pages[0].client.thread(0);
            (0..400_000).for_each(|_| thread.count_launch());
            thread.all_marked();
            There::Kernel.put(&bench.pages[0]);
        } else {
            There::Copy.put(&bench.pages[0]);
        }
        bench.now_ns += 20_000 * MS;
        bench.step();
        for _ in 0..2 {
            let stopped = &bench.pages[0].client;
            stopped
                .stream(0)
                .into_iter()
                .for_each(|stream| stream.settle());
            if !submits && stopped.blocking(0) > 0 {
                stopped.want(0).expect("device").end_blocking();
            }
            bench.step();
        }
        let before = [0, 1].map(|at| bench.usage(at).device_ns);
        bench.run(2000 * MS, both);
        [0, 1].map(|at| bench.usage(at as u64).device_ns - before[at])
    }

    #[test]
    fn who_held_the_device_while_the_arbiter_was_stopped_does_not_pay_for_it() {
        for submits in [true, false] {
            let got = after_a_stop(submits, None);
            println!("now: after a stop of 20 s the two get {got:?} ns of the next 2 s");
            assert!(got[0] > 850 * MS, "{submits}: {got:?}");
            assert!(got[1] > 850 * MS, "{submits}: {got:?}");
        }
    }

    #[test]
    fn a_stop_of_the_arbiter_is_paid_for_neither_to_a_cap_nor_to_a_floor() {
        let capped = Terms {
            max_ppm: Some(400_000),
            ..Terms::plain(policy::Class::Guaranteed, 500_000)
        };
        let got = after_a_stop(true, Some(capped));
        assert!(got[0] > 500 * MS, "{got:?}");
        let floors = Terms {
            min_ppm: 300_000,
            ..Terms::plain(policy::Class::Guaranteed, 500_000)
        };
        let got = after_a_stop(true, Some(floors));
        assert!(got[0] > 850 * MS, "{got:?}");
    }

    #[test]
    fn a_drain_that_nobody_saw_end_ends_when_it_was_expected_to() {
        let mut bench = Bench::new(&[500_000, 500_000]);
        let entity = &mut bench.scheduler.roster[0];
        for _ in 0..20 {
            entity.begin_drain(0);
            entity.end_drain(2 * MS);
        }
        entity.begin_drain(100 * MS);
        let mean_ns = entity.mean_drain_ns();
        let got = |entity: &RunEntity, got_ns| {
            entity.got_while_stalled_ns(120 * MS, 0, got_ns, got_ns - MS / 2)
        };
        assert_eq!(
            got(entity, 20 * MS),
            20 * MS,
            "nothing is known of its kernels"
        );
        entity.learn_rate(100, 100 * MS);
        let ended_ns = got(entity, 20 * MS);
        assert!(ended_ns.abs_diff(mean_ns) < 20 * US, "{ended_ns}");
        assert_eq!(got(entity, 5 * MS), MS / 2, "it should have ended before");
        There::Kernel.put(&bench.pages[0]);
        let entity = &bench.scheduler.roster[0];
        assert_eq!(got(entity, 20 * MS), ended_ns + MS, "it is at one more");
        There::Copy.put(&bench.pages[0]);
        assert_eq!(got(&bench.scheduler.roster[0], 20 * MS), 20 * MS);
        assert!(bench.scheduler.usage(TenantId(0)).is_some());
    }

    #[test]
    fn only_what_is_beyond_the_plan_by_a_millisecond_is_a_stall() {
        assert_eq!(stall_ns(None, 0, 50_000_000), 0);
        assert_eq!(stall_ns(Some(1_000_000), 0, 2_000_000), 0);
        assert_eq!(stall_ns(Some(1_000_000), 0, 12_000_000), 11_000_000);
        // What was charged already is not late twice.
        assert_eq!(stall_ns(Some(1_000_000), 8_000_000, 12_000_000), 4_000_000);
        assert_eq!(stall_ns(Some(9_000_000), 0, 5_000_000), 0);
    }
}
