//! The hook in virtual time, with nodes that are made up: they carry orders out, run jobs at speeds that depend on who is beside
//! them, and can be killed, silenced or made to lie.

use std::collections::BTreeMap;
use std::path::Path;

use control::{ArbiterStatus, JobStatus, ProcessStatus};
use policy::cluster::Random;

use super::*;
use crate::live::wire::{
    API_MAJOR, Ack, Device, Ended, JobPhase, Registration, Report, RunReport, Submission, Terms,
    WaitMatrix,
};

const BEGIN_MS: u64 = 1_000_000;

struct Fake {
    name: String,
    instance: String,
    boot: String,
    devices: usize,
    runs: BTreeMap<RunId, Go>,
    applied: u64,
    acks: Vec<Ack>,
    silent: bool,
    /// Its jobs save where they are asked to, and end by themselves.
    listens: bool,
    known: bool,
    started: Vec<RunId>,
    /// Goes that were asked to save, and for how many GPUs.
    signals: Vec<(RunId, u16)>,
}

struct Go {
    name: String,
    devices: Vec<String>,
    terms: Terms,
    busy: f64,
    left_s: f64,
    launches: f64,
    ended: Option<Ended>,
    saved: bool,
}

impl Fake {
    fn new(name: &str, devices: usize) -> Self {
        Self {
            name: name.into(),
            instance: format!("{name}-1"),
            boot: "b1".into(),
            devices,
            runs: BTreeMap::new(),
            applied: 0,
            acks: Vec::new(),
            silent: false,
            listens: false,
            known: false,
            started: Vec::new(),
            signals: Vec::new(),
        }
    }

    fn registration(&self) -> Registration {
        let devices = (0..self.devices).map(|at| Device {
            uuid: format!("GPU-{at}"),
            name: "T4".into(),
            total_bytes: 16 << 30,
            simulated: true,
        });
        Registration {
            api: API_MAJOR,
            instance: self.instance.clone(),
            machine: self.name.clone(),
            boot: self.boot.clone(),
            devices: devices.collect(),
            ..Registration::default()
        }
    }

    fn alive(&self) -> impl Iterator<Item = (&RunId, &Go)> {
        self.runs.iter().filter(|(_, go)| go.ended.is_none())
    }

    /// Jobs get on. What a job is, its command says: `job BUSY SECONDS [FILE]`; progress of restartable ones lies in `files`.
    fn advance(&mut self, dt_s: f64, files: &mut BTreeMap<u64, f64>) {
        let load: BTreeMap<String, f64> = self.alive().filter(|(_, go)| !go.terms.paused).fold(
            BTreeMap::new(),
            |mut all, (_, go)| {
                go.devices
                    .iter()
                    .for_each(|device| *all.entry(device.clone()).or_default() += go.busy);
                all
            },
        );
        for (id, go) in &mut self.runs {
            if go.ended.is_some() || go.terms.paused {
                continue;
            }
            let most = go
                .devices
                .iter()
                .map(|device| load[device])
                .fold(1.0, f64::max);
            go.left_s -= dt_s / most;
            go.launches += 100.0 * dt_s / most;
            files.insert(id.job, go.left_s);
            if go.left_s <= 0.0 {
                go.ended = Some(Ended {
                    code: Some(0),
                    ..Ended::default()
                });
            }
        }
    }

    fn report(&mut self, s: f64) -> Report {
        let jobs = self.alive().map(|(_, go)| JobStatus {
            name: go.name.clone(),
            launches: go.launches as u64,
            paused: go.terms.paused,
            processes: vec![ProcessStatus::default()],
            ..JobStatus::default()
        });
        let arbiter = ArbiterStatus {
            uptime_ms: (s * 1000.0) as u64,
            jobs: jobs.collect(),
            ..ArbiterStatus::default()
        };
        let runs = self.runs.iter().map(|(run, go)| RunReport {
            run: *run,
            name: go.name.clone(),
            pid: 1,
            ended: go.ended.clone(),
            saved: go.saved,
        });
        let waits = (0..self.devices).map(|at| WaitMatrix {
            uuid: format!("GPU-{at}"),
            ..WaitMatrix::default()
        });
        Report {
            instance: self.instance.clone(),
            acks: self.acks.clone(),
            runs: runs.collect(),
            arbiter: Some(arbiter),
            waits: waits.collect(),
        }
    }

    fn obey(&mut self, orders: crate::live::wire::Orders, files: &BTreeMap<u64, f64>) {
        self.acks.retain(|ack| ack.seq > orders.acked_seq);
        for run in orders.settled {
            self.runs.remove(&run);
        }
        for order in orders.orders {
            if order.seq <= self.applied {
                continue;
            }
            self.applied = order.seq;
            let mut error = String::new();
            match order.what {
                What::Start(start) => {
                    let promised: f64 = self
                        .alive()
                        .filter(|(_, go)| {
                            go.devices == start.devices && go.terms.class == Some(Class::Guaranteed)
                        })
                        .filter_map(|(_, go)| go.terms.share)
                        .sum();
                    if start.terms.class == Some(Class::Guaranteed)
                        && promised + start.terms.share.unwrap() > 1.001
                    {
                        error = format!("share above 1: {promised}");
                    } else {
                        let number = |at: usize| start.command[at].parse::<f64>().unwrap();
                        let kept = files
                            .get(&order.run.job)
                            .copied()
                            .filter(|_| start.command.len() > 3);
                        let go = Go {
                            name: start.name,
                            devices: start.devices,
                            terms: start.terms,
                            busy: number(1),
                            left_s: kept.unwrap_or(number(2)),
                            launches: 0.0,
                            ended: None,
                            saved: false,
                        };
                        self.started.push(order.run);
                        assert!(
                            self.runs.insert(order.run, go).is_none(),
                            "{} started twice",
                            order.run
                        );
                    }
                }
                What::Set(terms) => match self.runs.get_mut(&order.run) {
                    Some(go) => go.terms = terms,
                    None => error = "no such job".into(),
                },
                What::Stop {
                    signal: Some(signal),
                    ..
                } if self.listens => {
                    assert!(signal.patience_s > 0.0, "{signal:?}");
                    self.signals.push((order.run, signal.gpus));
                    if let Some(go) = self.runs.get_mut(&order.run)
                        && go.ended.is_none()
                    {
                        go.saved = true;
                        go.ended = Some(Ended {
                            code: Some(0),
                            ..Ended::default()
                        });
                    }
                }
                What::Stop { .. } => {
                    if let Some(go) = self.runs.get_mut(&order.run)
                        && go.ended.is_none()
                    {
                        go.ended = Some(Ended {
                            signal: Some(15),
                            ..Ended::default()
                        });
                    }
                }
            }
            self.acks.push(Ack {
                seq: order.seq,
                error,
            });
        }
    }
}

struct World {
    dir: tempfile::TempDir,
    config: Config,
    hook: Option<Hook>,
    nodes: Vec<Fake>,
    files: BTreeMap<u64, f64>,
    s: f64,
}

impl World {
    fn new(nodes: &[usize], packer: Option<&str>) -> Self {
        let mut config = Config {
            round_s: 1.0,
            ..Config::default()
        };
        config.choice.packer = packer.map(str::to_owned);
        config.trial = TrialConfig {
            window_s: 5.0,
            iterations: 20.0,
            solo_s: 2.0,
        };
        let dir = tempfile::tempdir().unwrap();
        let hook = Some(open(dir.path(), &config, 0.0));
        let nodes = nodes
            .iter()
            .enumerate()
            .map(|(at, gpus)| Fake::new(&format!("n{at}"), *gpus))
            .collect();
        Self {
            dir,
            config,
            hook,
            nodes,
            files: BTreeMap::new(),
            s: 0.0,
        }
    }

    fn hook(&mut self) -> &mut Hook {
        self.hook.as_mut().unwrap()
    }

    fn ms(&self) -> u64 {
        BEGIN_MS + (self.s * 1000.0) as u64
    }

    /// As `kill -9` leaves it: what was not committed is gone.
    fn kill(&mut self) {
        self.hook = None;
        self.hook = Some(open(self.dir.path(), &self.config, self.s));
        self.nodes.iter_mut().for_each(|node| node.known = false);
    }

    fn submit(&mut self, command: &str, restartable: bool) -> u64 {
        let ms = self.ms();
        let command: Vec<String> = command.split(' ').map(str::to_owned).collect();
        let kind = command[..2].join(" ");
        let asked = Submission {
            command,
            kind,
            restartable,
            ..Submission::default()
        };
        let id = self.hook().submit(asked, ms).unwrap().0.id;
        self.hook().commit().unwrap();
        id
    }

    fn tick(&mut self) {
        self.s += 0.5;
        let ms = self.ms();
        let Self {
            hook, nodes, files, ..
        } = self;
        let hook = hook.as_mut().unwrap();
        for node in nodes.iter_mut() {
            node.advance(0.5, files);
            if node.silent {
                continue;
            }
            if !node.known {
                hook.register(&node.name, node.registration(), ms).unwrap();
                node.known = true;
            }
            let report = node.report(self.s);
            let orders = hook.report(&node.name, report, ms).unwrap();
            hook.commit().unwrap();
            node.obey(orders, files);
        }
        hook.step(ms).unwrap();
        self.check();
    }

    /// No job in two places.
    fn check(&self) {
        let mut seen = BTreeMap::new();
        for node in &self.nodes {
            for (run, _) in node.alive() {
                if let Some(other) = seen.insert(run.job, &node.name) {
                    panic!(
                        "job {} on {other} and on {} at {} s",
                        run.job, node.name, self.s
                    );
                }
            }
        }
    }

    fn until(&mut self, what: &str, most_s: f64, done: impl Fn(&mut Self) -> bool) {
        let end = self.s + most_s;
        while !done(self) {
            if self.s >= end {
                let jobs = self.hook().job_views();
                panic!("{what}: not by {end} s; {jobs:#?}");
            }
            self.tick();
        }
    }

    fn over(&mut self) -> bool {
        self.hook()
            .job_views()
            .iter()
            .all(|job| job.phase.is_over())
    }

    fn phase(&mut self, id: u64) -> JobPhase {
        self.hook().job(id).unwrap().phase
    }

    fn kinds(&mut self) -> Vec<String> {
        self.hook()
            .decisions(0)
            .into_iter()
            .map(|line| line.kind)
            .collect()
    }
}

fn open(dir: &Path, config: &Config, s: f64) -> Hook {
    Hook::open(dir, config.clone(), BEGIN_MS + (s * 1000.0) as u64).unwrap()
}

#[test]
fn jobs_run_one_after_the_other_where_nothing_is_packed() {
    let mut world = World::new(&[1, 1], None);
    let ids: Vec<u64> = (0..5).map(|_| world.submit("job 1 10", false)).collect();
    world.until("all run", 60.0, World::over);
    for id in ids {
        assert_eq!(world.phase(id), JobPhase::Done);
    }
    // Three rounds of two GPUs for five jobs, and some seconds of reports in between.
    assert!((30.0..40.0).contains(&world.s), "{}", world.s);
}

#[test]
fn a_good_pair_stays_and_a_bad_one_is_split_within_two_windows_and_remembered() {
    let mut world = World::new(&[1], Some("trial:margin=0.05"));
    let (light, heavy) = (
        world.submit("job 0.4 60", false),
        world.submit("job 0.5 60", false),
    );
    world.until("the pair is measured", 30.0, |w| {
        w.kinds().contains(&"measured".into())
    });
    let pair = world.hook().status().pairs[0].clone();
    assert!(
        !pair.refused && pair.rates.iter().sum::<f64>() > 1.8,
        "{pair:?}"
    );
    assert_eq!(world.hook().job(heavy).unwrap().beside, Some(light));
    world.until("both run to their ends", 60.0, World::over);

    let (first, second) = (
        world.submit("job 1 40", false),
        world.submit("job 1 40 f", true),
    );
    world.until("they are together", 10.0, |w| {
        w.hook().job(second).unwrap().beside == Some(first)
    });
    let together_s = world.s;
    world.until("they are split", 60.0, |w| {
        w.kinds().contains(&"unpack".into())
    });
    // Neither kind was seen alone: a moment alone for each, then one window of 5 s.
    assert!(
        world.s - together_s < 2.0 * 5.0 + 2.0 * 2.5 + 3.0,
        "{} s",
        world.s - together_s
    );
    let refused = world
        .hook()
        .status()
        .pairs
        .into_iter()
        .find(|pair| pair.refused)
        .unwrap();
    assert!(
        refused.rates.iter().all(|rate| (0.4..0.6).contains(rate)),
        "{refused:?}"
    );
    world.until("both run to their ends", 200.0, World::over);
    assert_eq!(world.hook().status().unpacks, 1);
    let third = world.submit("job 1 20", false);
    let fourth = world.submit("job 1 20", false);
    world.kill();
    world.until("they run", 200.0, World::over);
    assert_eq!(
        world.hook().status().unpacks,
        1,
        "kinds {third} and {fourth} were known, also to the next hook"
    );
}

#[test]
fn a_job_that_cannot_move_is_paused_and_goes_on_where_it_was() {
    let mut world = World::new(&[1], None);
    world.config.choice.order = "sjf".into();
    world.config.choice.order = "srtf".into();
    world.kill();
    let ms = world.ms();
    let asked = |work_s, command: &str| Submission {
        command: command.split(' ').map(str::to_owned).collect(),
        work_s: Some(work_s),
        ..Submission::default()
    };
    let long = world
        .hook()
        .submit(asked(100.0, "job 1 30"), ms)
        .unwrap()
        .0
        .id;
    world.until("the long one runs", 10.0, |w| {
        w.phase(long) == JobPhase::Running
    });
    let ms = world.ms();
    let short = world.hook().submit(asked(5.0, "job 1 5"), ms).unwrap().0.id;
    world.until("it gives way", 10.0, |w| w.phase(long) == JobPhase::Paused);
    world.until("the short one is done", 20.0, |w| {
        w.phase(short) == JobPhase::Done
    });
    world.until("the long one is done", 60.0, World::over);
    assert_eq!(
        world.hook().job(long).unwrap().goes,
        1,
        "it was never started again"
    );
}

#[test]
fn a_job_that_saves_and_gives_way_is_not_done_by_that() {
    let mut world = World::new(&[1], None);
    world.nodes[0].listens = true;
    world.config.choice.order = "srtf".into();
    world.kill();
    let ms = world.ms();
    let asked = |work_s, command: &str| Submission {
        command: command.split(' ').map(str::to_owned).collect(),
        work_s: Some(work_s),
        restartable: true,
        ..Submission::default()
    };
    let long = asked(100.0, "job 1 30 f");
    let long = world.hook().submit(long, ms).unwrap().0.id;
    world.until("the long one runs", 10.0, |w| {
        w.phase(long) == JobPhase::Running
    });
    let ms = world.ms();
    let short = asked(5.0, "job 1 5");
    let short = world.hook().submit(short, ms).unwrap().0.id;
    world.until("the short one is done", 20.0, |w| {
        w.phase(short) == JobPhase::Done
    });
    assert!(
        !world.phase(long).is_over(),
        "exit code 0 after it was told to make room"
    );
    world.until("the long one is done", 60.0, World::over);
    let view = world.hook().job(long).unwrap();
    assert_eq!(
        (view.phase, view.goes, view.saved),
        (JobPhase::Done, 2, 1),
        "{view:?}"
    );
    assert_eq!(world.nodes[0].signals, [(RunId { job: long, go: 1 }, 0)]);
    assert!(world.kinds().contains(&"saved".into()));
    assert_eq!(world.hook().job(short).unwrap().saved, 0);
}

#[test]
fn an_elastic_job_is_asked_to_save_and_goes_on_in_its_new_size() {
    let mut world = World::new(&[4], None);
    world.nodes[0].listens = true;
    world.config.choice.sizer = Some("max-min".into());
    world.config.choice.order = "fifo".into();
    world.kill();
    let submit = |world: &mut World, max_gpus| {
        let ms = world.ms();
        let asked = Submission {
            command: ["job", "1", "40", "f"].map(str::to_owned).to_vec(),
            work_s: Some(40.0),
            restartable: true,
            max_gpus,
            ..Submission::default()
        };
        world.hook().submit(asked, ms).unwrap().0.id
    };
    let first = submit(&mut world, Some(4));
    world.until("it has all GPUs", 10.0, |w| {
        w.hook().job(first).unwrap().devices.len() == 4 && w.phase(first) == JobPhase::Running
    });
    let second = submit(&mut world, Some(4));
    world.until("they have half each", 20.0, |w| {
        let devices = |id| w.hook().job(id).unwrap().devices.len();
        let both = [first, second].map(devices);
        both == [2, 2] && w.phase(first) == JobPhase::Running
    });
    assert_eq!(world.nodes[0].signals, [(RunId { job: first, go: 1 }, 2)]);
    assert!(world.kinds().contains(&"resize".into()));
    // Rigid jobs are what they were: nobody gives them another size.
    let third = submit(&mut world, None);
    world.until("all are over", 200.0, World::over);
    for id in [first, second, third] {
        assert_eq!(world.phase(id), JobPhase::Done);
    }
    let saved = world.hook().job(first).unwrap().saved;
    assert!(saved >= 1, "{saved}");
}

#[test]
fn a_hook_that_is_killed_at_any_moment_loses_no_job_and_starts_none_twice() {
    for seed in 0..3 {
        let mut random = Random::new(seed);
        let mut world = World::new(&[1, 2], Some("trial"));
        let mut ids = Vec::new();
        for at in 0..14 {
            let busy = ["1", "0.3"][random.below(2)];
            ids.push(world.submit(
                &format!("job {busy} {} f", 3 + random.below(12)),
                at % 2 == 0,
            ));
            for _ in 0..random.below(4) {
                world.tick();
            }
            if random.below(3) == 0 {
                world.kill();
            }
        }
        for _ in 0..120 {
            if random.below(6) == 0 {
                world.kill();
            }
            world.tick();
        }
        world.until("all are over", 400.0, World::over);
        for id in ids {
            assert_eq!(world.phase(id), JobPhase::Done, "seed {seed}, job {id}");
        }
        for node in &world.nodes {
            let mut goes = node.started.clone();
            goes.sort_unstable();
            goes.dedup();
            assert_eq!(goes.len(), node.started.len(), "seed {seed}");
        }
    }
}

#[test]
fn a_silent_node_keeps_its_jobs_and_gets_no_new_ones_until_it_is_given_up() {
    let mut world = World::new(&[1, 1], None);
    let (a, b) = (
        world.submit("job 1 30 f", true),
        world.submit("job 1 30", false),
    );
    world.until("both run", 10.0, |w| {
        w.phase(a) == JobPhase::Running && w.phase(b) == JobPhase::Running
    });
    let lost = world
        .nodes
        .iter()
        .position(|node| node.alive().any(|(run, _)| run.job == a))
        .unwrap();
    world.nodes[lost].silent = true;
    let c = world.submit("job 1 5", false);
    for _ in 0..60 {
        world.tick();
    }
    assert_eq!(world.phase(a), JobPhase::Running, "nobody knows better");
    assert_eq!(world.hook().job(a).unwrap().goes, 1);
    world.until("the others are done", 60.0, |w| {
        w.phase(b) == JobPhase::Done && w.phase(c) == JobPhase::Done
    });
    // Late, it says that the job is done.
    world.nodes[lost].silent = false;
    world.until("it is heard", 5.0, World::over);
    assert_eq!(world.phase(a), JobPhase::Done);

    let d = world.submit("job 1 60 f", true);
    world.until("it runs", 10.0, |w| w.phase(d) == JobPhase::Running);
    let lost = world
        .nodes
        .iter()
        .position(|node| node.alive().any(|(run, _)| run.job == d))
        .unwrap();
    world.nodes[lost].silent = true;
    for _ in 0..30 {
        world.tick();
    }
    let (name, ms) = (world.nodes[lost].name.clone(), world.ms());
    // Whatever ran there is dead: that is what giving up says.
    world.nodes[lost].runs.clear();
    world.hook().forget(&name, ms).unwrap();
    world.until("it goes on elsewhere", 120.0, World::over);
    assert_eq!(
        (world.phase(d), world.hook().job(d).unwrap().goes),
        (JobPhase::Done, 2)
    );
    assert!(
        world
            .hook()
            .forget("nobody", ms)
            .unwrap_err()
            .to_string()
            .contains("n"),
        "known ones are told"
    );
}

#[test]
fn a_node_that_comes_back_after_it_was_given_up_stops_what_it_still_runs() {
    let mut world = World::new(&[1, 1], None);
    let job = world.submit("job 1 40 f", true);
    world.until("it runs", 10.0, |w| w.phase(job) == JobPhase::Running);
    let lost = world
        .nodes
        .iter()
        .position(|node| node.alive().next().is_some())
        .unwrap();
    let (name, ms) = (world.nodes[lost].name.clone(), world.ms());
    world.nodes[lost].silent = true;
    world.hook().forget(&name, ms).unwrap();
    // It does run in two places now, by the operator's word; and no longer once the node is back.
    for _ in 0..6 {
        world.s += 0.5;
        let ms = world.ms();
        world.hook().step(ms).unwrap();
    }
    world.nodes[lost].silent = false;
    world.nodes[lost].known = false;
    world.until("the old go is stopped", 10.0, |w| {
        w.nodes[lost].alive().all(|(run, _)| run.go > 1)
    });
    world.until("it is done", 100.0, World::over);
    assert_eq!(world.phase(job), JobPhase::Done);
}

#[test]
fn two_arbiters_of_one_name_are_told_apart_and_a_reboot_is_seen() {
    let mut world = World::new(&[1], None);
    let (keeps, plain) = (
        world.submit("job 1 30 f", true),
        world.submit("job 1 30", false),
    );
    world.until("one runs", 10.0, |w| w.phase(keeps) == JobPhase::Running);
    let ms = world.ms();
    let mut other = Fake::new("n0", 1);
    other.instance = "n0-2".into();
    let error = world
        .hook()
        .register("n0", other.registration(), ms)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("n0-1") && error.contains("n0-2") && error.contains("forget"),
        "{error}"
    );
    let report = other.report(world.s);
    let error = world
        .hook()
        .report("n0", report, ms)
        .unwrap_err()
        .to_string();
    assert!(error.contains("another arbiter"), "{error}");
    // The machine was started anew: nothing of before runs, and its directory is another one.
    let node = &mut world.nodes[0];
    (node.boot, node.instance) = ("b2".into(), "n0-3".into());
    node.runs.clear();
    node.acks.clear();
    (node.known, node.applied) = (false, 0);
    world.until("all are over", 100.0, World::over);
    assert_eq!(
        (world.phase(keeps), world.phase(plain)),
        (JobPhase::Done, JobPhase::Done)
    );
    assert_eq!(world.hook().job(keeps).unwrap().goes, 2);
}

#[test]
fn a_job_that_cannot_be_started_is_tried_again_and_given_up_in_the_end() {
    let mut world = World::new(&[1], None);
    let id = world.submit("job 1 5", false);
    world.until("it is given up", 120.0, |w| {
        for node in &mut w.nodes {
            for go in node.runs.values_mut() {
                go.ended = Some(Ended {
                    code: Some(125),
                    words: "no such file".into(),
                    ..Ended::default()
                });
            }
        }
        w.over()
    });
    let job = world.hook().job(id).unwrap();
    assert_eq!((job.phase, job.goes), (JobPhase::Failed, 5));
    assert!(job.reason.contains("no such file"), "{job:?}");
}

#[test]
fn a_job_is_taken_back_wherever_it_is() {
    let mut world = World::new(&[1], Some("trial"));
    let ids: Vec<u64> = (0..4).map(|_| world.submit("job 1 60", false)).collect();
    world.until("two run", 20.0, |w| w.phase(ids[1]) == JobPhase::Running);
    for id in &ids {
        let ms = world.ms();
        world.hook().cancel(*id, ms).unwrap();
        world.hook().commit().unwrap();
        world.kill();
    }
    world.until("all are over", 30.0, World::over);
    for id in &ids {
        assert_eq!(world.phase(*id), JobPhase::Cancelled);
    }
    assert!(world.nodes[0].alive().next().is_none());
    let ms = world.ms();
    assert_eq!(
        world.hook().cancel(ids[0], ms).unwrap().phase,
        JobPhase::Cancelled,
        "twice is once"
    );
    assert!(world.hook().cancel(99, ms).is_err());
}

#[test]
fn what_a_node_says_of_itself_is_checked() {
    let mut world = World::new(&[], None);
    let mut say = |change: &dyn Fn(&mut Registration)| {
        let mut said = Fake::new("n", 2).registration();
        change(&mut said);
        world
            .hook()
            .register("n", said, BEGIN_MS)
            .map_err(|error| error.to_string())
    };
    assert!(say(&|said| said.api = 9).unwrap_err().contains('9'));
    assert!(
        say(&|said| said.devices[1].uuid = "GPU-0".into())
            .unwrap_err()
            .contains("UUID")
    );
    assert!(
        say(&|said| said.devices[1].name = "A100".into())
            .unwrap_err()
            .contains("A100")
    );
    assert!(
        say(&|said| said.devices = vec![Device::default(); 65])
            .unwrap_err()
            .contains("65")
    );
    assert!(
        say(&|said| said.cpus = f64::NAN).is_ok(),
        "a number that is none is no number of cores"
    );
    let error = world
        .hook()
        .register("a b", Fake::new("n", 1).registration(), BEGIN_MS)
        .unwrap_err();
    assert!(error.to_string().contains("`a b`"), "{error}");
}

#[test]
fn unknown_policies_are_told_with_what_was_meant() {
    let dir = tempfile::tempdir().unwrap();
    let with = |change: &dyn Fn(&mut Choice)| {
        let mut config = Config::default();
        change(&mut config.choice);
        Hook::open(dir.path(), config, 1).unwrap_err().to_string()
    };
    assert!(
        with(&|choice| choice.order = "fifo-backfil".into())
            .contains("did you mean `fifo-backfill`")
    );
    assert!(with(&|choice| choice.packer = Some("tral".into())).contains("did you mean `trial`"));
    assert!(
        with(&|choice| choice.packer = Some("trial:margn=1".into()))
            .contains("did you mean `margin`")
    );
    assert!(
        !dir.path().join("hook.redb").exists(),
        "nothing was made for it"
    );
}
