//! A node's agent: reports to the hook each second and carries out its orders, on a thread of the
//! arbiter's process.
//!
//! It asks its own arbiter by the control API like any client, so the arbiter's loop never waits
//! for it. It asks the hook on a connection with deadlines, so a hook that is gone, slow or wrong
//! costs only these reports: jobs and slices go on, and the agent tries again after a pause that
//! doubles up to [`MAX_PAUSE`].
//!
//! It carries out orders one after the other in the sequence of their numbers, so that an order
//! that makes space comes before one that takes it. `agent.json` keeps the results until the hook
//! has recorded them; a repeated order is not done again. The agent ignores a hook that another
//! hook has replaced.

mod away;
mod orders;
mod stale;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use certificates::{ClientFiles, Notice};
use control::{
    ArbiterStatus, Client as ControlClient, ClientError as ControlFailure, IterationSource,
    JobState,
};
use serde::{Deserialize, Serialize};

use super::auth::Token;
use super::engine::{Engine, replace};
use super::http::client::{Client, ClientError};
use super::store::random_word;
use super::waits;
use super::wire::{
    API_MAJOR, Ack, AwayJob, Device, HookId, MAX_OTHERS, Order, Orders, OtherJob, Registration,
    Report, RunId, Welcome, is_slurms,
};
use stale::listen_to;

/// TIMEOUT: the arbiter answers within milliseconds; two seconds are a host in trouble.
const ARBITER_PATIENCE: Duration = Duration::from_secs(2);
/// TIMEOUT: the hook syncs a disk before it answers.
const HOOK_PATIENCE: Duration = Duration::from_secs(5);
/// First and longest pause between tries to reach the hook.
const MIN_PAUSE: Duration = Duration::from_millis(500);
/// See [`MIN_PAUSE`].
const MAX_PAUSE: Duration = Duration::from_secs(30);

/// How an agent is to run.
pub struct Config {
    /// The hook's address.
    pub url: String,
    /// Its token, or this node's.
    pub token: String,
    /// With TLS: by whom the hook is known, and what this node shows.
    pub tls: Option<ClientFiles>,
    /// Name of this node.
    pub node: String,
    /// The arbiter's API socket.
    pub api_socket: PathBuf,
    /// Where `agent.json` is.
    pub dir: PathBuf,
    /// Version of the binary.
    pub version: String,
    /// The devices of this node, asked anew at each registration.
    pub devices: Box<dyn Fn() -> Result<Vec<Device>, String> + Send>,
    /// Tells what an operator should know; one line each.
    pub say: Arc<dyn Fn(&str) + Send + Sync>,
}

impl std::fmt::Debug for Config {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Config({} at {})", self.node, self.url)
    }
}

/// What outlives the agent.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct Memory {
    instance: String,
    hook: HookId,
    /// Epoch and number of the last order that was done.
    applied: (u64, u64),
    acks: Vec<Ack>,
    /// Jobs of other engines that were moved off their devices.
    moved: BTreeSet<String>,
}

/// An agent.
pub struct Agent {
    config: Config,
    engine: Box<dyn Engine>,
    hook: Client,
    memory: Memory,
    /// Held for as long as this agent lives: a second agent of the same directory would carry out
    /// orders as well.
    _lock: fs::File,
    registered: bool,
    report_every: Duration,
    /// The order at the head, and since when it is tried.
    trying: Option<(u64, Instant)>,
    open: Vec<Order>,
    /// The order to stop for which a job was asked, and when: once, and from then on waited for.
    asked: Option<(u64, Instant)>,
    /// Jobs of other engines that are to be off their devices, as they stand.
    away: BTreeMap<String, AwayJob>,
    /// Goes that said that all is saved.
    saved: BTreeSet<RunId>,
    /// Why the hook is refused, as the arbiter's journal has it.
    noted: Option<String>,
    /// Why the memory is not on the disk, so that it is written again.
    unsaved: Option<String>,
    /// Why an end that the hook knows cannot be forgotten.
    unsettled: Option<String>,
    arbiter: Option<ControlClient>,
}

impl std::fmt::Debug for Agent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Agent({:?})", self.config)
    }
}

impl Agent {
    /// Of a node.
    ///
    /// # Errors
    /// The URL is none, another agent has the directory, or `agent.json` cannot be read or made.
    pub fn new(config: Config, mut engine: Box<dyn Engine>) -> Result<Self, String> {
        if let Some(other) = Token::new(&config.token).node()
            && other != config.node
        {
            return Err(format!(
                "the token is that of node `{other}`, and this node is `{}`",
                config.node
            ));
        }
        let say = Arc::clone(&config.say);
        let tell = move |notice: Notice<'_>| say(&format!("cluster: {notice}"));
        let (token, files) = (&config.token, config.tls.as_ref());
        let hook = Client::open(&config.url, token, files, HOOK_PATIENCE, tell)
            .map_err(|error| error.to_string())?;
        let file = config.dir.join("agent.json");
        let failed = |error: &dyn std::fmt::Display| format!("{}: {error}", file.display());
        let lock = fs::OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(config.dir.join("agent.lock"))
            .map_err(|error| failed(&error))?;
        rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive).map_err(
            |error| {
                format!(
                    "another arbiter reports from {}: {error}",
                    config.dir.display()
                )
            },
        )?;
        let mut memory: Memory = match fs::read(&file) {
            Ok(bytes) => serde_json::from_slice(&bytes).map_err(|error| failed(&error))?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Memory::default(),
            Err(error) => return Err(failed(&error)),
        };
        if memory.instance.is_empty() {
            memory.instance = random_word().map_err(|error| failed(&error))?;
            let bytes = serde_json::to_vec(&memory).map_err(|error| failed(&error))?;
            replace(&file, &bytes).map_err(|error| failed(&error))?;
        }
        if !memory.hook.cluster.is_empty() {
            engine
                .join(&memory.hook.cluster)
                .map_err(|error| error.to_string())?;
        }
        Ok(Self {
            config,
            engine,
            hook,
            memory,
            _lock: lock,
            registered: false,
            report_every: Duration::from_secs(1),
            trying: None,
            open: Vec::new(),
            asked: None,
            away: BTreeMap::new(),
            saved: BTreeSet::new(),
            noted: None,
            unsaved: None,
            unsettled: None,
            arbiter: None,
        })
    }

    /// Report and obey for ever.
    pub fn run(mut self) {
        let mut pause = MIN_PAUSE;
        let mut lost: Option<String> = None;
        loop {
            let begun = Instant::now();
            match self.turn() {
                Ok(busy) => {
                    if lost.is_some() {
                        (self.config.say)(&format!(
                            "the hook at {} is reached again",
                            self.hook.url()
                        ));
                    }
                    (lost, pause) = (None, MIN_PAUSE);
                    // Results are reported at once: others wait for them.
                    let rest = if busy {
                        Duration::from_millis(100)
                    } else {
                        self.report_every
                    };
                    std::thread::sleep(rest.saturating_sub(begun.elapsed()));
                }
                Err(why) => {
                    if lost.as_ref() != Some(&why) {
                        (self.config.say)(&format!(
                            "cluster: {why}; jobs go on, and the hook is tried again"
                        ));
                    }
                    lost = Some(why);
                    // Orders that were heard are still carried out.
                    self.obey();
                    std::thread::sleep(pause);
                    pause = (pause * 2).min(MAX_PAUSE);
                }
            }
        }
    }

    fn file(&self) -> PathBuf {
        self.config.dir.join("agent.json")
    }

    /// Writes the memory down. `false`: the disk does not take it, and each turn tries again.
    fn remember(&mut self) -> bool {
        let written = serde_json::to_vec(&self.memory).map_err(io::Error::from);
        let written = written.and_then(|bytes| replace(&self.file(), &bytes));
        let why = written.err().map(|error| {
            let file = self.file();
            format!("{}: {error}; it is written again", file.display())
        });
        if let Some(why) = &why
            && self.unsaved.as_ref() != Some(why)
        {
            (self.config.say)(&format!("cluster: {why}"));
        }
        self.unsaved = why;
        self.unsaved.is_none()
    }

    /// One report and what follows from its answer. `true`: there is more to say soon.
    fn turn(&mut self) -> Result<bool, String> {
        if self.unsaved.is_some() {
            self.remember();
        }
        // It has proved that it knows the token; the agent checks that it is the current hook
        // before it reports anything.
        let hook = self.hook.meet().map_err(|error| self.failed(&error))?;
        if let Err(why) = self.hear(&hook) {
            self.registered = false;
            self.refuse(&why);
            return Err(why);
        }
        if !self.registered {
            self.register()?;
        }
        let report = self.report()?;
        let path = format!("/v1/nodes/{}/report", self.config.node);
        let orders: Orders = match self.hook.ask("POST", &path, Some(&report)) {
            Ok(orders) => orders,
            Err(error) => {
                // A hook that was started anew on another state, or where somebody gave us up.
                self.registered &= error.status() != Some(404);
                return Err(self.failed(&error));
            }
        };
        self.hear(&orders.hook)?;
        self.noted = None;
        Ok(self.follow(orders))
    }

    /// Does what the answer to a report says. `true`: there is more to say soon.
    fn follow(&mut self, orders: Orders) -> bool {
        let before = self.memory.acks.len();
        self.memory.acks.retain(|ack| ack.seq > orders.acked_seq);
        if self.memory.acks.len() != before {
            self.remember();
        }
        let mut unsettled = None;
        for run in &orders.settled {
            match self.engine.forget(*run) {
                Ok(()) => {
                    self.saved.remove(run);
                }
                // Its end is reported again, and the hook says again that it knows it.
                Err(error) => unsettled = Some(error.to_string()),
            }
        }
        if let Some(why) = &unsettled
            && self.unsettled.is_none()
        {
            (self.config.say)(&format!("cluster: {why}; it is tried again"));
        }
        self.unsettled = unsettled;
        self.open = orders.orders;
        let busy = self.obey();
        // After what the hook's own jobs are to do: a move may take a second.
        self.move_others(orders.away) || busy
    }

    fn hear(&mut self, hook: &HookId) -> Result<(), String> {
        listen_to(&self.memory.hook, hook, &self.file()).map_err(|stale| {
            let why = stale.to_string();
            self.note(&why);
            why
        })?;
        self.engine
            .join(&hook.cluster)
            .map_err(|error| error.to_string())?;
        if self.memory.hook != *hook {
            self.memory.hook = hook.clone();
            self.remember();
        }
        Ok(())
    }

    /// What is said of a request to the hook that failed.
    fn failed(&mut self, error: &ClientError) -> String {
        let why = error.to_string();
        if error.is_no_hook() {
            self.note(&why);
        }
        why
    }

    /// Has the arbiter's journal say why a hook is refused: once for each reason, until a hook is
    /// obeyed again.
    fn note(&mut self, why: &str) {
        if self.noted.as_deref() == Some(why) {
            return;
        }
        let url = self.hook.url().to_owned();
        // With an arbiter that does not answer yet it is tried again.
        if self
            .with_arbiter(|arbiter| arbiter.hook_refused(&url, why))
            .is_ok()
        {
            self.noted = Some(why.to_owned());
        }
    }

    /// Reports to a hook why its orders are not carried out, for its operator. Its answer has no
    /// effect.
    fn refuse(&mut self, why: &str) {
        let said = Registration {
            api: API_MAJOR,
            instance: self.memory.instance.clone(),
            refusal: why.to_owned(),
            ..Registration::default()
        };
        let path = format!("/v1/nodes/{}", self.config.node);
        let _: Result<Welcome, _> = self.hook.ask("PUT", &path, Some(&said));
    }

    fn register(&mut self) -> Result<(), String> {
        let devices = (self.config.devices)()?;
        let word = |file: &str| {
            fs::read_to_string(file)
                .map(|text| text.trim().to_owned())
                .unwrap_or_default()
        };
        let memory = word("/proc/meminfo");
        let kib = memory.lines().find_map(|line| {
            line.strip_prefix("MemTotal:")?
                .trim()
                .strip_suffix("kB")?
                .trim()
                .parse::<u64>()
                .ok()
        });
        let said = Registration {
            api: API_MAJOR,
            instance: self.memory.instance.clone(),
            // Two arbiters of one machine are two nodes with directories of their own.
            machine: format!("{} {}", word("/etc/machine-id"), self.config.dir.display()),
            boot: word("/proc/sys/kernel/random/boot_id"),
            version: self.config.version.clone(),
            engine: self.engine.name().to_owned(),
            // CAST: a number of processors.
            cpus: std::thread::available_parallelism().map_or(1, usize::from) as f64,
            mem_bytes: kib.unwrap_or(0) << 10,
            moves_memory: true,
            devices,
            refusal: String::new(),
        };
        let path = format!("/v1/nodes/{}", self.config.node);
        let welcome: Welcome = self
            .hook
            .ask("PUT", &path, Some(&said))
            .map_err(|error| self.failed(&error))?;
        self.hear(&welcome.hook)?;
        self.report_every = Duration::from_millis(welcome.report_ms.clamp(50, 60_000));
        self.registered = true;
        Ok(())
    }

    fn report(&mut self) -> Result<Report, String> {
        // The acks first: an attempt whose start is acknowledged is in the list that is made after
        // it.
        let acks = self.memory.acks.clone();
        let mut runs = self.engine.list().map_err(|error| error.to_string())?;
        for run in &mut runs {
            run.saved = self.saved.contains(&run.run);
        }
        let arbiter = self.with_arbiter(ControlClient::status).ok();
        let ours: BTreeMap<&str, RunId> = runs
            .iter()
            .map(|run| (run.name.as_str(), run.run))
            .collect();
        let waits = arbiter
            .as_ref()
            .map(|arbiter| waits::matrices(arbiter, |name| ours.contains_key(name)));
        let others = arbiter.as_ref().map(others).unwrap_or_default();
        let arbiter = arbiter.map(|arbiter| trim(arbiter, |name| ours.contains_key(name)));
        Ok(Report {
            instance: self.memory.instance.clone(),
            acks,
            runs,
            waits: waits.unwrap_or_default(),
            others,
            away: self.away.values().cloned().collect(),
            arbiter,
        })
    }

    fn with_arbiter<T>(
        &mut self,
        ask: impl Fn(&mut ControlClient) -> Result<T, ControlFailure>,
    ) -> Result<T, ControlFailure> {
        let mut client = match self.arbiter.take() {
            Some(client) => client,
            None => ControlClient::connect(&self.config.api_socket, ARBITER_PATIENCE)?,
        };
        match ask(&mut client) {
            Ok(answer) => {
                self.arbiter = Some(client);
                Ok(answer)
            }
            Err(refused @ ControlFailure::Refused(_)) => {
                self.arbiter = Some(client);
                Err(refused)
            }
            Err(error) => Err(error),
        }
    }
}

/// Jobs of Slurm's whose slowdown is known.
fn others(arbiter: &ArbiterStatus) -> Vec<OtherJob> {
    let running = arbiter
        .jobs
        .iter()
        .filter(|job| is_slurms(&job.name) && job.state != JobState::Gone && !job.paused);
    let measured = running.filter_map(|job| {
        let profile = job.profile.as_deref()?;
        let slowdown = profile.slowdown?;
        (profile.found != IterationSource::None).then(|| OtherJob {
            name: job.name.clone(),
            slowdown,
            confidence: profile.confidence,
        })
    });
    measured.take(MAX_OTHERS).collect()
}

/// Without fields that the hook does not use: command lines are private to the node, and the waits
/// cover other jobs.
fn trim(mut arbiter: ArbiterStatus, ours: impl Fn(&str) -> bool) -> ArbiterStatus {
    arbiter.jobs.retain(|job| ours(&job.name));
    for job in &mut arbiter.jobs {
        job.command.clear();
        job.user.clear();
        for process in &mut job.processes {
            process.command.clear();
        }
    }
    for device in &mut arbiter.devices {
        device.unmanaged.clear();
    }
    arbiter
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::live::engine::EngineError;
    use crate::live::wire::{RunReport, StartRun, What};

    #[derive(Default)]
    struct Nobody {
        /// It cannot write down that an end is known.
        forgets_nothing: bool,
    }

    impl Engine for Nobody {
        fn name(&self) -> &'static str {
            "nobody"
        }
        fn join(&mut self, _: &str) -> Result<(), EngineError> {
            Ok(())
        }
        fn list(&mut self) -> Result<Vec<RunReport>, EngineError> {
            Ok(Vec::new())
        }
        fn start(&mut self, _: RunId, _: &StartRun) -> Result<(), EngineError> {
            Err(EngineError("nobody starts anything".into()))
        }
        fn stop(&mut self, _: RunId, _: bool) -> Result<(), EngineError> {
            Ok(())
        }
        fn forget(&mut self, _: RunId) -> Result<(), EngineError> {
            if self.forgets_nothing {
                return Err(EngineError("no space left".into()));
            }
            Ok(())
        }
    }

    fn agent(dir: &Path) -> Result<Agent, String> {
        agent_of(dir, Nobody::default())
    }

    /// The next agent of a directory. A process that another test has forked holds the lock of the
    /// one before until it runs its program.
    fn next_agent(dir: &Path) -> Agent {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            match agent(dir) {
                Err(why) if why.contains("another arbiter") && Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                made => return made.unwrap(),
            }
        }
    }

    fn agent_of(dir: &Path, engine: Nobody) -> Result<Agent, String> {
        let config = Config {
            url: "http://127.0.0.1:9".into(),
            token: "a-token-of-a-test".into(),
            node: "n".into(),
            api_socket: dir.join("api.sock"),
            dir: dir.to_owned(),
            version: String::new(),
            devices: Box::new(|| Ok(Vec::new())),
            tls: None,
            say: Arc::new(|_| ()),
        };
        Agent::new(config, Box::new(engine))
    }

    #[test]
    fn orders_are_done_once_in_sequence_and_their_acks_outlive_the_agent() {
        let dir = tempfile::tempdir().unwrap();
        let mut first = agent(dir.path()).unwrap();
        assert!(agent(dir.path()).unwrap_err().contains("another arbiter"));
        let run = RunId { job: 1, attempt: 1 };
        let start = Order {
            epoch: 1,
            seq: 4,
            run,
            what: What::Start(Box::default()),
        };
        let stop = Order {
            epoch: 1,
            seq: 7,
            run,
            what: What::Stop {
                grace_s: 1.0,
                signal: None,
            },
        };
        first.open = vec![start.clone(), stop.clone()];
        assert!(first.obey());
        let acks = first.memory.acks.clone();
        assert_eq!(
            (acks[0].seq, acks[0].error.as_str()),
            (4, "nobody starts anything")
        );
        assert_eq!((acks[1].seq, acks[1].error.as_str()), (7, ""));
        let instance = first.memory.instance.clone();
        drop(first);
        let mut second = next_agent(dir.path());
        assert_eq!(
            (&second.memory.acks, &second.memory.instance),
            (&acks, &instance)
        );
        second.open = vec![start, stop];
        assert!(!second.obey(), "they were done before");
        assert_eq!(second.memory.acks, acks);
        assert!(second.turn().is_err(), "nobody is at port 9");
    }

    #[test]
    fn an_end_that_cannot_be_forgotten_keeps_no_order_from_being_done() {
        let dir = tempfile::tempdir().unwrap();
        let mut agent = agent_of(
            dir.path(),
            Nobody {
                forgets_nothing: true,
            },
        )
        .unwrap();
        let stop = Order {
            epoch: 1,
            seq: 1,
            run: RunId { job: 2, attempt: 1 },
            what: What::Stop {
                grace_s: 1.0,
                signal: None,
            },
        };
        assert!(agent.follow(Orders {
            settled: vec![RunId { job: 1, attempt: 1 }],
            orders: vec![stop],
            ..Orders::default()
        }));
        assert_eq!(agent.memory.acks.len(), 1, "it is done");
    }

    #[test]
    fn what_the_disk_did_not_take_is_written_in_the_next_turn() {
        let dir = tempfile::tempdir().unwrap();
        let mut first = agent(dir.path()).unwrap();
        let hook = HookId {
            cluster: "a".into(),
            epoch: 5,
            nonce: "x".into(),
        };
        // No file is written over a directory.
        let obstacle = dir.path().join("agent.new");
        std::fs::create_dir(&obstacle).unwrap();
        first.hear(&hook).unwrap();
        std::fs::remove_dir(&obstacle).unwrap();
        assert!(first.turn().is_err(), "nobody is at port 9");
        drop(first);
        let second = next_agent(dir.path());
        assert_eq!(second.memory.hook, hook, "a replaced hook is not obeyed");
    }

    #[test]
    fn a_job_is_moved_only_once_it_is_written_down_that_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let mut agent = agent(dir.path()).unwrap();
        let (hears, heard) = std::sync::mpsc::channel();
        control::stand_in::stand_in(&agent.config.api_socket, move |asked| {
            let control::Request::Move(moves) = asked.request().unwrap() else {
                panic!("another request");
            };
            hears.send(moves.evict.clone()).unwrap();
            let job = control::JobMoved {
                job: moves.evict[0].clone(),
                evicted: true,
                outcome: control::MoveOutcome::Done,
                ..control::JobMoved::default()
            };
            control::stand_in::answer(&Ok(control::Reply::Moved(control::Moved {
                jobs: vec![job],
                ..control::Moved::default()
            })))
        });
        let obstacle = dir.path().join("agent.new");
        std::fs::create_dir(&obstacle).unwrap();
        let wanted = Some(vec!["slurm.7".to_owned()]);
        assert!(
            !agent.move_others(wanted.clone()),
            "not before the next turn"
        );
        assert_eq!(heard.try_iter().count(), 0, "the next agent would not know");
        std::fs::remove_dir(&obstacle).unwrap();
        agent.move_others(wanted);
        assert_eq!(heard.try_iter().count(), 1);
        assert!(agent.away["slurm.7"].evicted);
    }

    #[test]
    fn a_report_does_not_grow_with_what_others_register() {
        let job = |name: String| control::JobStatus {
            name,
            command: vec!["x".repeat(1000)],
            ..control::JobStatus::default()
        };
        let arbiter = ArbiterStatus {
            jobs: (0..20_000).map(|at| job(format!("j{at}"))).collect(),
            ..ArbiterStatus::default()
        };
        let kept = trim(arbiter, |name| name == "j7");
        assert_eq!(kept.jobs.len(), 1);
        assert!(kept.jobs[0].command.is_empty());
    }

    #[test]
    fn of_other_engines_jobs_the_measured_ones_are_reported_within_a_bound() {
        let job = |name: String, found, slowdown| control::JobStatus {
            name,
            profile: Some(Box::new(control::Profile {
                found,
                slowdown,
                confidence: 0.8,
                ..control::Profile::default()
            })),
            ..control::JobStatus::default()
        };
        let hinted = IterationSource::Hinted;
        let mut arbiter = ArbiterStatus {
            jobs: vec![
                job("slurm.7".into(), hinted, Some(1.5)),
                job("slurm.8".into(), hinted, None),
                job("slurm.9".into(), IterationSource::None, Some(2.0)),
                job("slurm.x".into(), hinted, Some(2.0)),
                job("slurm.".into(), hinted, Some(2.0)),
                job("train".into(), hinted, Some(2.0)),
                control::JobStatus {
                    paused: true,
                    ..job("slurm.10".into(), hinted, Some(9.0))
                },
                control::JobStatus {
                    state: JobState::Gone,
                    ..job("slurm.11".into(), hinted, Some(9.0))
                },
            ],
            ..ArbiterStatus::default()
        };
        let expected = OtherJob {
            name: "slurm.7".into(),
            slowdown: 1.5,
            confidence: 0.8,
        };
        assert_eq!(others(&arbiter), [expected]);
        let many = (0..20_000).map(|at| job(format!("slurm.{at}"), hinted, Some(1.0)));
        arbiter.jobs = many.collect();
        assert_eq!(others(&arbiter).len(), MAX_OTHERS);
    }

    #[test]
    fn jobs_leave_and_come_back_as_the_hook_wants_and_others_are_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let mut first = agent(dir.path()).unwrap();
        let names = |all: &[&str]| Some(all.iter().map(ToString::to_string).collect());
        // Nobody listens: it is tried again.
        assert!(first.move_others(names(&["slurm.7"])));
        let (hears, heard) = std::sync::mpsc::channel();
        control::stand_in::stand_in(&first.config.api_socket, move |asked| {
            let control::Request::Move(moves) = asked.request().unwrap() else {
                panic!("another request");
            };
            let (name, evicted) = match moves.evict.first() {
                Some(name) => (name.clone(), true),
                None => (moves.restore[0].clone(), false),
            };
            let outcome = match name.as_str() {
                "slurm.8" => control::MoveOutcome::Refused,
                _ => control::MoveOutcome::Done,
            };
            hears.send((name.clone(), evicted)).unwrap();
            let job = control::JobMoved {
                job: name,
                evicted,
                outcome,
                reason: "it is not evictable".into(),
                ..control::JobMoved::default()
            };
            control::stand_in::answer(&Ok(control::Reply::Moved(control::Moved {
                jobs: vec![job],
                ..control::Moved::default()
            })))
        });
        let wanted = names(&["slurm.7", "slurm.8", "train", "slurm.", "slurm.x"]);
        while first.move_others(wanted.clone()) {}
        let said: Vec<_> = first.away.values().cloned().collect();
        assert_eq!((said[0].evicted, said[0].reason.as_str()), (true, ""));
        assert_eq!(
            (said[1].evicted, said[1].reason.as_str()),
            (false, "it is not evictable")
        );
        assert!(!first.move_others(None), "it is not known what is wanted");
        assert_eq!(first.away.len(), 2);
        let asked: Vec<_> = heard.try_iter().collect();
        assert_eq!(
            asked,
            [("slurm.7".to_owned(), true), ("slurm.8".to_owned(), true)]
        );
        drop(first);
        // What one agent has moved, the next one brings back.
        let mut second = next_agent(dir.path());
        while second.move_others(names(&[])) {}
        let asked: Vec<_> = heard.try_iter().collect();
        assert_eq!(asked, [("slurm.7".to_owned(), false)]);
        assert!(second.memory.moved.is_empty() && second.away.is_empty());
    }

    #[test]
    fn why_a_hook_is_refused_is_noted_by_the_arbiter_once() {
        let dir = tempfile::tempdir().unwrap();
        let mut agent = agent(dir.path()).unwrap();
        let hook = |epoch, nonce: &str| HookId {
            cluster: "a".into(),
            epoch,
            nonce: nonce.into(),
        };
        agent.hear(&hook(5, "x")).unwrap();
        assert!(agent.hear(&hook(4, "y")).is_err(), "nobody listens yet");
        let socket = &agent.config.api_socket;
        let (hears, heard) = std::sync::mpsc::channel();
        control::stand_in::stand_in(socket, move |asked| {
            hears.send(asked.request().unwrap()).unwrap();
            control::stand_in::answer(&Ok(control::Reply::Noted))
        });
        for _ in 0..3 {
            assert!(agent.hear(&hook(4, "y")).is_err());
        }
        let stranger = ClientError::Stranger {
            url: agent.hook.url().to_owned(),
        };
        assert!(agent.failed(&stranger).contains("does not know the token"));
        drop(agent);
        let heard: Vec<control::Request> = heard.try_iter().collect();
        let reasons: Vec<_> = heard
            .iter()
            .map(|request| match request {
                control::Request::HookRefused { hook, reason } => {
                    assert_eq!(hook, "http://127.0.0.1:9");
                    reason.as_str()
                }
                other => panic!("{other:?}"),
            })
            .collect();
        let [stale, unknown] = reasons[..] else {
            panic!("{reasons:?}");
        };
        assert!(stale.contains("two hooks run on copies"), "{stale}");
        assert!(unknown.contains("does not know the token"), "{unknown}");
    }

    #[test]
    fn a_number_of_an_earlier_epoch_disables_no_node() {
        let dir = tempfile::tempdir().unwrap();
        let mut agent = agent(dir.path()).unwrap();
        let stop = |epoch, seq| Order {
            epoch,
            seq,
            run: RunId { job: 1, attempt: 1 },
            what: What::Stop {
                grace_s: 1.0,
                signal: None,
            },
        };
        for (epoch, seq, done) in [
            (4, u64::MAX, true),
            (4, 7, false),
            (5, 8, true),
            (5, 8, false),
            (4, 9, false),
            (5, 9, true),
        ] {
            agent.open = vec![stop(epoch, seq)];
            assert_eq!(agent.obey(), done, "{epoch} {seq}");
            assert!(agent.open.is_empty());
        }
    }

    #[test]
    fn a_peer_without_the_token_learns_nothing_and_is_not_obeyed() {
        use std::io::{BufRead, BufReader, Write};
        let dir = tempfile::tempdir().unwrap();
        let stranger = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let mut agent = agent(dir.path()).unwrap();
        agent.hook = Client::new(
            &format!("http://{}", stranger.local_addr().unwrap()),
            &agent.config.token,
            HOOK_PATIENCE,
        )
        .unwrap();
        let heard = std::thread::spawn(move || {
            let (mut stream, _) = stranger.accept().unwrap();
            let mut heard = String::new();
            let mut lines = BufReader::new(stream.try_clone().unwrap());
            while !heard.ends_with("\r\n\r\n") {
                lines.read_line(&mut heard).unwrap();
            }
            let hook = HookId {
                cluster: "a".into(),
                epoch: 99,
                nonce: "n".into(),
            };
            let (challenge, _) = crate::live::auth::Secret::new("a guess of the token")
                .answer(&crate::live::auth::nonce().unwrap(), &hook)
                .unwrap();
            let body = serde_json::to_string(&challenge).unwrap();
            let length = body.len();
            write!(
                stream,
                "HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n{body}"
            )
            .unwrap();
            let mut more = String::new();
            lines.read_line(&mut more).unwrap();
            (heard, more)
        });
        let why = agent.turn().unwrap_err();
        assert!(why.contains("does not know the token"), "{why}");
        let (heard, more) = heard.join().unwrap();
        assert!(heard.starts_with("GET /v1/session?nonce="), "{heard}");
        assert!(
            !heard.contains(&agent.config.token) && more.is_empty(),
            "{heard}{more}"
        );
        assert_eq!(
            agent.memory.hook,
            HookId::default(),
            "its epoch counts for nothing"
        );
    }
}
