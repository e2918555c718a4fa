//! Gangs: jobs whose processes on several devices need each other, on two devices in virtual time.

use policy::Class;

use super::tests::{MS, US, greedy, setup};
use super::*;

/// Two devices and jobs with a process on each; what they run is collective: a kernel ends when
/// that of the other device has begun as well.
struct Hall {
    schedulers: Vec<DeviceScheduler>,
    gang_scheduler: GangScheduler,
    jobs: Vec<[Rc<ClientPages>; 2]>,
    /// Collective operations ended, by job.
    ended: Vec<u64>,
    /// For how long both kernels of a job have been on the device.
    together_ns: Vec<u64>,
    now_ns: u64,
}

const COLLECTIVE_NS: u64 = 200 * US;

impl Hall {
    fn new(jobs: usize, gangs: bool) -> Self {
        let mut schedulers: Vec<DeviceScheduler> = (0..2)
            .map(|device| DeviceScheduler::new(device, setup(Mode::Exclusive), 0))
            .collect();
        let terms = Terms {
            gang: gangs,
            ..Terms::plain(Class::Guaranteed, 500_000)
        };
        let jobs: Vec<[Rc<ClientPages>; 2]> = (0..jobs)
            .map(|_| [(); 2].map(|()| Rc::new(ClientPages::create().expect("pages"))))
            .collect();
        // Each job finds another device free first, as chance would have it.
        for (at, ranks) in jobs.iter().enumerate() {
            for device in [at % 2, 1 - at % 2] {
                let client = at as u64 * 2 + device as u64;
                let pages = Rc::clone(&ranks[device]);
                pages.client.claim_stream(device as u32).expect("slot");
                schedulers[device].add(0, TenantId(at as u64), terms, client, pages);
            }
        }
        let mut gang_scheduler = GangScheduler::default();
        gang_scheduler.form(&mut schedulers);
        Self {
            schedulers,
            gang_scheduler,
            ended: vec![0; jobs.len()],
            together_ns: vec![0; jobs.len()],
            jobs,
            now_ns: 0,
        }
    }

    fn step(&mut self) {
        for scheduler in &mut self.schedulers {
            scheduler.step(self.now_ns);
        }
        let (touched, _) = self.gang_scheduler.step(self.now_ns, &mut self.schedulers);
        for (at, scheduler) in self.schedulers.iter_mut().enumerate() {
            if touched & (1 << at) != 0 {
                scheduler.step(self.now_ns);
            }
        }
    }

    fn open(&self, job: usize) -> [bool; 2] {
        [0, 1].map(|device| self.jobs[job][device].arbiter.is_open(device))
    }

    fn run(&mut self, ns: u64, mut check: impl FnMut(&Self)) {
        let end_ns = self.now_ns + ns;
        while self.now_ns < end_ns {
            self.now_ns += 50 * US;
            for (at, ranks) in self.jobs.iter().enumerate() {
                let mut began = 0;
                for (device, pages) in ranks.iter().enumerate() {
                    let stream = pages.client.stream(0).expect("slot");
                    let want = pages.client.want(device).expect("device");
                    let waits = pages.client.waiting(device) > 0;
                    if stream.issued() > stream.done() {
                        began += 1;
                    } else if pages.arbiter.is_open(device) {
                        if waits {
                            want.end_waiting();
                        }
                        let thread = pages.client.thread(0);
                        thread.set_device(device as u32);
                        thread.count_launch();
                        thread.all_marked();
                        stream.issue();
                        began += 1;
                    } else if !waits {
                        want.begin_waiting();
                    }
                }
                self.together_ns[at] += if began == 2 { 50 * US } else { 0 };
                if self.together_ns[at] >= COLLECTIVE_NS {
                    self.together_ns[at] = 0;
                    self.ended[at] += 1;
                    for pages in ranks {
                        pages.client.stream(0).expect("slot").settle();
                    }
                }
            }
            // The housekeeping looks who uses what a few times a second.
            if self.now_ns.is_multiple_of(MS) {
                self.gang_scheduler.form(&mut self.schedulers);
            }
            self.step();
            check(self);
        }
    }
}

#[test]
fn all_ranks_of_a_gang_pass_together_and_gangs_share_fairly() {
    let mut hall = Hall::new(2, true);
    hall.run(3000 * MS, |hall| {
        for job in (0..2).filter(|_| hall.now_ns > 10 * MS) {
            let [one, other] = hall.open(job);
            assert_eq!(one, other, "job {job} at {} us", hall.now_ns / 1000);
        }
    });
    let used = [0, 1].map(|job| {
        hall.schedulers[0]
            .usage(TenantId(job))
            .expect("entity")
            .device_ns
    });
    assert!(used[0].abs_diff(used[1]) < 150 * MS, "{used:?}");
    assert!(
        hall.ended.iter().all(|ended| *ended > 4000),
        "{:?}",
        hall.ended
    );
}

#[test]
fn without_gangs_ranks_wait_for_each_other_across_the_gates() {
    // A job on one of the devices alone puts the turns of the other two there out of step.
    let run = |gangs| {
        let mut hall = Hall::new(2, gangs);
        let single = Rc::new(ClientPages::create().expect("pages"));
        let share = Terms::plain(Class::Guaranteed, 300_000);
        hall.schedulers[0].add(0, TenantId(9), share, 99, Rc::clone(&single));
        hall.gang_scheduler.form(&mut hall.schedulers);
        hall.run(3000 * MS, |_| greedy(&single));
        hall.ended
    };
    let (with, without) = (run(true), run(false));
    let sum = |ended: &[u64]| ended.iter().sum::<u64>();
    assert!(
        sum(&with) > 4 * sum(&without),
        "{with:?} with, {without:?} without"
    );
}

#[test]
fn a_job_with_one_device_gets_its_turn_beside_a_gang() {
    let mut hall = Hall::new(1, true);
    let single = Rc::new(ClientPages::create().expect("pages"));
    hall.schedulers[0].add(
        0,
        TenantId(9),
        Terms::plain(Class::Guaranteed, 500_000),
        99,
        Rc::clone(&single),
    );
    hall.gang_scheduler.form(&mut hall.schedulers);
    let pages = Rc::clone(&single);
    hall.run(100 * MS, |_| greedy(&pages));
    let before = hall.schedulers[0]
        .usage(TenantId(9))
        .expect("entity")
        .device_ns;
    hall.run(3000 * MS, |_| greedy(&pages));
    let got = hall.schedulers[0]
        .usage(TenantId(9))
        .expect("entity")
        .device_ns
        - before;
    assert!((1300 * MS..1700 * MS).contains(&got), "{got}");
    assert!(hall.ended[0] > 5000, "{:?}", hall.ended);
}

#[test]
fn a_lone_gang_keeps_its_devices_and_an_idle_one_gives_way() {
    let mut hall = Hall::new(1, true);
    hall.run(1000 * MS, |hall| {
        assert!(hall.now_ns < 10 * MS || hall.open(0) == [true, true]);
    });
    assert!(hall.ended[0] > 4500, "{:?}", hall.ended);
    for scheduler in &hall.schedulers {
        assert!(scheduler.usage(TenantId(0)).expect("entity").grants <= 2);
    }
    assert!(
        hall.schedulers
            .iter()
            .all(|scheduler| scheduler.is_gang(TenantId(0)))
    );
    // One of its processes ends: the other is no gang any more, and goes on by itself.
    hall.schedulers[1].remove(hall.now_ns, 1);
    hall.gang_scheduler.form(&mut hall.schedulers);
    assert!(hall.gang_scheduler.is_idle());
    hall.jobs[0][0].client.stream(0).expect("slot").settle();
    hall.step();
    let pages = Rc::clone(&hall.jobs[0][0]);
    for _ in 0..100 {
        hall.now_ns += 50 * US;
        greedy(&pages);
        hall.step();
    }
    assert!(pages.arbiter.is_open(0));
}

#[test]
fn a_job_that_could_use_another_device_and_does_not_is_no_gang() {
    let mut hall = Hall::new(2, true);
    let pages = hall.jobs.clone();
    for _ in 0..1000 {
        hall.now_ns += 50 * US;
        for ranks in &pages {
            greedy(&ranks[0]);
        }
        hall.gang_scheduler.form(&mut hall.schedulers);
        hall.step();
    }
    assert!(hall.gang_scheduler.is_idle());
    let used = [0, 1].map(|job| {
        hall.schedulers[1]
            .usage(TenantId(job))
            .expect("entity")
            .device_ns
    });
    assert_eq!(used, [0, 0]);
}
