//! The hook in virtual time, with simulated nodes: they carry out orders, run jobs at speeds that
//! depend on their partners, and can be killed, silenced or made to lie.

use std::collections::BTreeMap;
use std::path::Path;

use control::{ArbiterStatus, IterationSource, JobStatus, ProcessStatus, Profile};
use policy::cluster::Random;

use super::*;
use crate::live::records::{Metered, PairRecord, Solo, solo_key};
use crate::live::wire::{
    API_MAJOR, Ack, Away, Device, Ended, JobPhase, MAX_OTHERS, Registration, Report, RunReport,
    Submission, Terms, WaitMatrix,
};

mod crowds;
mod hook;
mod jobs;
mod memory;
mod nodes;
mod pairs;
mod place;
mod rounds;
mod services;
mod starts;

const BEGIN_MS: u64 = 1_000_000;

struct Fake {
    name: String,
    instance: String,
    boot: String,
    devices: usize,
    /// Their type.
    gpu: String,
    /// How fast kinds are on it; any other kind runs at 1.
    speeds: BTreeMap<String, f64>,
    /// Its arbiter knows the iterations of jobs.
    iterates: bool,
    /// And how busy each keeps its devices.
    meters: bool,
    /// What its arbiter has of the machine's memory for what leaves the devices; 0: it is of an
    /// earlier version, and starts no job as evictable.
    host_bytes: u64,
    /// By how much it overstates what jobs have done, and the time that has passed.
    lies: [f64; 2],
    /// The same, of jobs that share a device.
    lies_of_pairs: f64,
    runs: BTreeMap<RunId, Attempt>,
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

struct Attempt {
    name: String,
    devices: Vec<String>,
    terms: Terms,
    busy: f64,
    speed: f64,
    left_s: f64,
    launches: f64,
    ended: Option<Ended>,
    saved: bool,
    evictable: bool,
}

impl Fake {
    fn new(name: &str, devices: usize) -> Self {
        Self {
            name: name.into(),
            instance: format!("{name}-1"),
            boot: "b1".into(),
            devices,
            gpu: "T4".into(),
            speeds: BTreeMap::new(),
            iterates: false,
            meters: false,
            host_bytes: 0,
            lies: [1.0, 1.0],
            lies_of_pairs: 1.0,
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
            name: self.gpu.clone(),
            total_bytes: 16 << 30,
            simulated: true,
        });
        Registration {
            api: API_MAJOR,
            instance: self.instance.clone(),
            machine: self.name.clone(),
            boot: self.boot.clone(),
            devices: devices.collect(),
            moves_memory: self.host_bytes > 0,
            mem_bytes: 128 << 30,
            ..Registration::default()
        }
    }

    fn alive(&self) -> impl Iterator<Item = (&RunId, &Attempt)> {
        self.runs
            .iter()
            .filter(|(_, attempt)| attempt.ended.is_none())
    }

    /// Jobs advance. A job's command says what it is: `job BUSY SECONDS [FILE [KIND]]`; progress of
    /// restartable jobs lies in `files`.
    fn advance(&mut self, dt_s: f64, files: &mut BTreeMap<u64, f64>) {
        let load: BTreeMap<String, f64> = self
            .alive()
            .filter(|(_, attempt)| !attempt.terms.paused)
            .fold(BTreeMap::new(), |mut all, (_, attempt)| {
                attempt
                    .devices
                    .iter()
                    .for_each(|device| *all.entry(device.clone()).or_default() += attempt.busy);
                all
            });
        let mut together: BTreeMap<String, u32> = BTreeMap::new();
        for (_, attempt) in self.alive().filter(|(_, attempt)| !attempt.terms.paused) {
            let devices = attempt.devices.iter();
            devices.for_each(|device| *together.entry(device.clone()).or_default() += 1);
        }
        for (id, attempt) in &mut self.runs {
            if attempt.ended.is_some() || attempt.terms.paused {
                continue;
            }
            let most = attempt
                .devices
                .iter()
                .map(|device| load[device])
                .fold(1.0, f64::max);
            attempt.left_s -= dt_s * attempt.speed / most;
            let shared = attempt.devices.iter().any(|device| together[device] > 1);
            let lie = if shared { self.lies_of_pairs } else { 1.0 };
            attempt.launches += 100.0 * dt_s * attempt.speed / most * lie;
            files.insert(id.job, attempt.left_s);
            if attempt.left_s <= 0.0 {
                attempt.ended = Some(Ended {
                    code: Some(0),
                    ..Ended::default()
                });
            }
        }
    }

    fn report(&mut self, s: f64) -> Report {
        let jobs = self.alive().map(|(_, attempt)| JobStatus {
            name: attempt.name.clone(),
            // Each of its devices launches.
            launches: (attempt.launches * self.lies[0]) as u64 * attempt.devices.len() as u64,
            profile: (self.iterates || self.meters).then(|| {
                Box::new(Profile {
                    found: IterationSource::Hinted,
                    confidence: 1.0,
                    iterations: (attempt.launches / 10.0) as u64,
                    busy_fraction: if self.meters { attempt.busy } else { 1.0 },
                    ..Profile::default()
                })
            }),
            paused: attempt.terms.paused,
            evictable: attempt.evictable,
            residence: attempt.evictable.then(|| {
                Box::new(control::Residence {
                    evictable_bytes: attempt.terms.mem_bytes.unwrap_or(0),
                    fixed_bytes: 1 << 30,
                    ..control::Residence::default()
                })
            }),
            processes: vec![ProcessStatus::default()],
            ..JobStatus::default()
        });
        let arbiter = ArbiterStatus {
            uptime_ms: (s * self.lies[1] * 1000.0) as u64,
            jobs: jobs.collect(),
            host_memory_limit_bytes: self.host_bytes,
            ..ArbiterStatus::default()
        };
        let runs = self.runs.iter().map(|(run, attempt)| RunReport {
            run: *run,
            name: attempt.name.clone(),
            pid: 1,
            ended: attempt.ended.clone(),
            saved: attempt.saved,
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
            others: Vec::new(),
            away: Vec::new(),
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
                        .filter(|(_, attempt)| {
                            attempt.devices == start.devices
                                && attempt.terms.class == Some(Class::Guaranteed)
                        })
                        .filter_map(|(_, attempt)| attempt.terms.share)
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
                        // A kind called `constant` has a tenth of its work in parts.
                        let parts = start.devices.len() as f64;
                        let kind = start.command.get(4).map(String::as_str);
                        let scales = match kind {
                            Some("constant") => 1.0 / (0.9 + 0.1 / parts),
                            Some("parts") => parts,
                            _ => 1.0,
                        };
                        let attempt = Attempt {
                            name: start.name,
                            devices: start.devices,
                            terms: start.terms,
                            busy: number(1),
                            speed: start
                                .command
                                .get(4)
                                .and_then(|kind| self.speeds.get(kind))
                                .copied()
                                .unwrap_or(1.0)
                                * scales,
                            left_s: kept.unwrap_or(number(2)),
                            launches: 0.0,
                            ended: None,
                            saved: false,
                            evictable: start.evictable && self.host_bytes > 0,
                        };
                        self.started.push(order.run);
                        assert!(
                            self.runs.insert(order.run, attempt).is_none(),
                            "{} started twice",
                            order.run
                        );
                    }
                }
                What::Set(terms) => match self.runs.get_mut(&order.run) {
                    Some(attempt) => attempt.terms = terms,
                    None => error = "no such job".into(),
                },
                What::Stop {
                    signal: Some(signal),
                    ..
                } if self.listens => {
                    assert!(signal.patience_s > 0.0, "{signal:?}");
                    self.signals.push((order.run, signal.gpus));
                    if let Some(attempt) = self.runs.get_mut(&order.run)
                        && attempt.ended.is_none()
                    {
                        attempt.saved = true;
                        attempt.ended = Some(Ended {
                            code: Some(0),
                            ..Ended::default()
                        });
                    }
                }
                What::Stop { .. } => {
                    if let Some(attempt) = self.runs.get_mut(&order.run)
                        && attempt.ended.is_none()
                    {
                        attempt.ended = Some(Ended {
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
    /// Between two reports.
    step_s: f64,
    /// By how much the wall clock was set back.
    set_back_ms: u64,
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
        let hook = Some(open(dir.path(), &config, 0.0, 0));
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
            step_s: 0.5,
            set_back_ms: 0,
        }
    }

    fn hook(&mut self) -> &mut Hook {
        self.hook.as_mut().unwrap()
    }

    fn now(&self) -> Now {
        let ms = BEGIN_MS + (self.s * 1000.0) as u64;
        Now {
            ms,
            unix_ms: ms - self.set_back_ms,
        }
    }

    /// As `kill -9` leaves it: what was not committed is gone.
    fn kill(&mut self) {
        self.hook = None;
        self.hook = Some(open(
            self.dir.path(),
            &self.config,
            self.s,
            self.set_back_ms,
        ));
        self.nodes.iter_mut().for_each(|node| node.known = false);
    }

    fn submit(&mut self, command: &str, restartable: bool) -> u64 {
        let now = self.now();
        let command: Vec<String> = command.split(' ').map(str::to_owned).collect();
        let kind = command.get(4).cloned();
        let kind = kind.unwrap_or_else(|| command[..2].join(" "));
        let asked = Submission {
            command,
            kind,
            restartable,
            ..Submission::default()
        };
        let id = self.hook().submit(asked, now).unwrap().0.id;
        self.hook().commit().unwrap();
        id
    }

    fn tick(&mut self) {
        self.s += self.step_s;
        let dt_s = self.step_s;
        let now = self.now();
        let Self {
            hook, nodes, files, ..
        } = self;
        let hook = hook.as_mut().unwrap();
        for node in nodes.iter_mut() {
            node.advance(dt_s, files);
            if node.silent {
                continue;
            }
            if !node.known {
                hook.register(&node.name, node.registration(), now).unwrap();
                node.known = true;
            }
            let report = node.report(self.s);
            let orders = hook.report(&node.name, report, now).unwrap();
            hook.commit().unwrap();
            node.obey(orders, files);
        }
        hook.step(now).unwrap();
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

fn open(dir: &Path, config: &Config, s: f64, set_back_ms: u64) -> Hook {
    let boottime_ms = (s * 1000.0) as u64;
    let reading = Reading {
        unix_ms: BEGIN_MS + boottime_ms - set_back_ms,
        boottime_ms,
        boot: "b".into(),
    };
    Hook::open(dir, config.clone(), reading).unwrap()
}
