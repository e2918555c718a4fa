//! One run: an arbiter of its own, the jobs, warm-up, and the window in which all of them are
//! measured together.
//!
//! A run that fails is a result like any other: it says why. An error is only what keeps every run
//! from being made.

use std::collections::BTreeMap;
use std::env;
use std::ffi::OsString;
use std::fs::{self, File};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, anyhow};
use control::paths::RuntimeDir;
use control::{ArbiterStatus, Client, IterationSource, JobStatus};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

use super::device::{Rate, Watched};
use super::plan::{Job, Mode, Plan, Progress, Work, names_in_run};
use super::progress::{Lines, Samples, last_lines};
use super::schedule::Run;
use super::statistics::mean;
use super::store::{Figures, Record};
use super::supervise::Guardian;
use crate::connect;
use crate::run::driver::Driver;
use crate::run::install::Install;

/// TIMEOUT: an arbiter answers within milliseconds; a host with busy processors may take seconds.
const ANSWER: Duration = Duration::from_secs(10);
/// TIMEOUT: as for the arbiter that `sublet run` starts.
const LISTENS: Duration = Duration::from_secs(20);
/// TIMEOUT: what a job gets for its own end after SIGTERM.
const GRACE: Duration = Duration::from_secs(2);
/// Between two looks at a job.
const LOOK: Duration = Duration::from_millis(20);
/// More output of a job in one run is taken for a mistake: it would fill the disk.
const OUTPUT_MOST: u64 = 256 << 20;

/// Where runs are made.
pub struct Runner<'a> {
    pub plan: &'a Plan,
    pub guardian: &'a Guardian,
    pub executable: &'a Path,
    pub install: &'a Install,
    pub driver: &'a Driver,
    /// Index or UUID of the device.
    pub device: &'a str,
    /// Of the arbiter that is there, in place of one of our own.
    pub there: Option<RuntimeDir>,
    /// The device, where NVML knows it.
    pub watched: Option<&'a Watched>,
    /// Asks the device for its clocks.
    pub clocks: &'a dyn Fn() -> Option<String>,
}

/// Why there are no figures.
struct Failed {
    why: String,
    /// The job that it is about.
    job: Option<usize>,
    /// What else has said something to it.
    said: Option<String>,
}

impl Failed {
    fn of(job: usize, why: impl Into<String>) -> Self {
        Self {
            why: why.into(),
            job: Some(job),
            said: None,
        }
    }

    fn all(why: impl Into<String>) -> Self {
        Self {
            why: why.into(),
            job: None,
            said: None,
        }
    }
}

impl Runner<'_> {
    /// # Errors
    /// Where no directory can be made for it.
    pub fn run(&self, run: &Run, number: usize) -> anyhow::Result<Record> {
        let started = SystemTime::now().duration_since(UNIX_EPOCH);
        let place = Place::new(self.guardian.dir().join(format!("r{number}")))?;
        let jobs = run.combination.jobs.iter();
        let mut record = Record {
            key: run.key.clone(),
            mode: run.mode,
            jobs: jobs.map(|job| self.plan.jobs[*job].name.clone()).collect(),
            shares: run.combination.shares.clone(),
            repetition: run.repetition,
            started_unix_ms: started.map_or(0, |since| {
                u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
            }),
            window_s: 0.0,
            before_window_s: 0.0,
            failed: None,
            last_lines: None,
            figures: Vec::new(),
            device_busy: None,
            memory_busy: None,
            clocks: None,
        };
        let mut together = Together {
            runner: self,
            run,
            place: &place,
            names: self.names(run, number),
            jobs: Vec::new(),
            arbiter: None,
            service: None,
        };
        let measured = together.measure(&mut record);
        together.end();
        self.guardian.sweep();
        if let Err(failed) = measured {
            record.figures.clear();
            record.failed = Some(match failed.job {
                Some(job) => format!("job `{}` {}", record.jobs[job], failed.why),
                None => failed.why,
            });
            let of_job = || failed.job.map(|job| place.last_lines(job));
            record.last_lines = failed.said.or_else(of_job);
        }
        Ok(record)
    }

    /// What the arbiter knows the jobs by: in one that is there, others may be called the same.
    fn names(&self, run: &Run, number: usize) -> Vec<String> {
        let names = names_in_run(self.plan, &run.combination);
        if self.there.is_none() {
            return names;
        }
        let own = format!(".{}-{number}", std::process::id());
        let most = control::NAME_MAX_BYTES.saturating_sub(own.len());
        let numbered = (0..).zip(names).map(|(job, name): (u32, String)| {
            let name: String = name.chars().take(most - 3).collect();
            format!("{name}.{job}{own}")
        });
        numbered.collect()
    }
}

/// A directory of one run, gone when dropped.
struct Place(PathBuf);

impl Place {
    fn new(dir: PathBuf) -> anyhow::Result<Self> {
        // What a run that was cut short has left.
        let _ = fs::remove_dir_all(&dir);
        for path in [dir.clone(), dir.join("run")] {
            fs::DirBuilder::new()
                .mode(0o700)
                .create(&path)
                .with_context(|| format!("cannot make {}", path.display()))?;
        }
        Ok(Self(dir))
    }

    fn output(&self, job: usize, what: &str) -> PathBuf {
        self.0.join(format!("{job}.{what}"))
    }

    /// Of both outputs of a job; stderr says why it failed, so it comes last.
    fn last_lines(&self, job: usize) -> String {
        let texts = ["out", "err"].map(|what| last_lines(&self.output(job, what)));
        let texts: Vec<String> = texts.into_iter().filter(|text| !text.is_empty()).collect();
        texts.join("\n")
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A job that was started.
struct Started {
    child: Child,
    lines: Option<Lines>,
    ended: Option<ExitStatus>,
}

/// What a run has started.
struct Together<'a> {
    runner: &'a Runner<'a>,
    run: &'a Run,
    place: &'a Place,
    names: Vec<String>,
    jobs: Vec<Started>,
    arbiter: Option<Arbiter>,
    /// The control daemon of MPS.
    service: Option<Child>,
}

/// An arbiter, and a connection to it.
struct Arbiter {
    dir: RuntimeDir,
    /// `None`: it was there before.
    child: Option<Child>,
    client: Client,
}

impl Together<'_> {
    fn measure(&mut self, record: &mut Record) -> Result<(), Failed> {
        let (warm_up, window) = self.runner.plan.times(&self.run.combination);
        if let Some(mode) = self.run.mode.of_device() {
            let arbiter = self.start_arbiter(mode);
            self.arbiter = Some(arbiter.map_err(|error| Failed::all(format!("{error:#}")))?);
        }
        if self.run.mode == Mode::Mps {
            self.start_service()
                .map_err(|error| Failed::all(format!("{error:#}")))?;
        }
        let begun = Instant::now();
        for job in 0..self.run.combination.jobs.len() {
            let started = self.start_job(job);
            let started =
                started.map_err(|error| Failed::of(job, format!("did not start: {error:#}")))?;
            self.jobs.push(started);
        }
        self.wait_for_work(begun)?;
        self.warm_up(begun, warm_up)?;
        record.before_window_s = begun.elapsed().as_secs_f64();
        self.window(window, record)
    }

    /// The variables that everything of this run finds.
    fn environment(&self, command: &mut Command) {
        for (name, _) in env::vars_os() {
            let text = name.to_string_lossy();
            let kept = text.starts_with("SUBLET_SIM_")
                || matches!(&*text, "SUBLET_LIBRARY" | "SUBLET_LOG");
            if text.starts_with("SUBLET_") && !kept {
                command.env_remove(&name);
            }
        }
        let runtime_dir = match &self.runner.there {
            Some(dir) => dir.path().to_owned(),
            None => self.place.0.join("run"),
        };
        command.env("SUBLET_RUNTIME_DIR", runtime_dir);
        // What lies beside `sublet` is found without a path, where nothing else is called so.
        let mut path: Vec<PathBuf> = env::var_os("PATH")
            .map(|path| env::split_paths(&path).collect())
            .unwrap_or_default();
        path.extend(self.runner.executable.parent().map(Path::to_owned));
        if let Ok(path) = env::join_paths(path) {
            command.env("PATH", path);
        }
        self.runner.guardian.adopt(command);
    }

    fn start_arbiter(&self, mode: &str) -> anyhow::Result<Arbiter> {
        if let Some(dir) = &self.runner.there {
            let client = connect::existing(dir)?;
            return Ok(Arbiter {
                dir: dir.clone(),
                child: None,
                client,
            });
        }
        let dir = RuntimeDir::given(self.place.0.join("run"))?;
        let quotas = self.quotas();
        let text = format!("[[device]]\ndevice = \"*\"\nmode = \"{mode}\"\n");
        fs::write(&quotas, text).with_context(|| format!("cannot write {}", quotas.display()))?;
        let log = File::create(dir.log_file()).context("cannot make the arbiter's log")?;
        let mut command = Command::new(self.runner.executable);
        command
            .args(["arbiter", "--runtime-dir"])
            .arg(dir.path())
            .arg("--config")
            .arg(&quotas)
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(log.try_clone().context("cannot share the arbiter's log")?)
            .stderr(log);
        self.environment(&mut command);
        let mut child = command.spawn().context("cannot start an arbiter")?;
        let begun = Instant::now();
        loop {
            match connect::within(&dir, ANSWER) {
                Ok(client) => {
                    return Ok(Arbiter {
                        dir,
                        child: Some(child),
                        client,
                    });
                }
                Err(error) if !error.is_absence() => {
                    end_group(&mut child, Duration::ZERO);
                    return Err(error.into());
                }
                Err(_) => {}
            }
            let ended = child.try_wait().context("cannot wait for the arbiter")?;
            if ended.is_some() || begun.elapsed() > LISTENS {
                end_group(&mut child, Duration::ZERO);
                let said = last_lines(&dir.log_file());
                let said = said.lines().last().unwrap_or("it said nothing");
                return Err(anyhow!("the run's arbiter did not begin to listen: {said}"));
            }
            thread::sleep(Duration::from_millis(2));
        }
    }

    /// The quota file of the run: its own, so that no other is looked for.
    fn quotas(&self) -> PathBuf {
        self.place.0.join("quotas.toml")
    }

    /// MPS in a place of its own.
    fn start_service(&mut self) -> anyhow::Result<()> {
        let dir = self.place.0.join("mps");
        fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        let log = File::create(self.place.0.join("mps.log")).context("cannot make a log")?;
        let mut command = Command::new(MPS_CONTROL);
        command
            .arg("-f")
            .stdin(Stdio::null())
            .stdout(log.try_clone().context("cannot share a log")?)
            .stderr(log);
        self.environment(&mut command);
        command.envs(self.service_variables());
        self.service = Some(command.spawn().context("cannot start the MPS daemon")?);
        let begun = Instant::now();
        while !dir.join("control").exists() {
            if begun.elapsed() > LISTENS {
                let said = last_lines(&self.place.0.join("mps.log"));
                let said = said.lines().last().unwrap_or("it said nothing");
                return Err(anyhow!("the MPS daemon did not begin to listen: {said}"));
            }
            thread::sleep(LOOK);
        }
        Ok(())
    }

    fn service_variables(&self) -> BTreeMap<&'static str, OsString> {
        let dir = self.place.0.join("mps");
        BTreeMap::from([
            ("CUDA_MPS_PIPE_DIRECTORY", dir.clone().into()),
            ("CUDA_MPS_LOG_DIRECTORY", dir.into()),
        ])
    }

    fn start_job(&self, job: usize) -> anyhow::Result<Started> {
        // PANIC: `job` counts the combination's jobs.
        let about = &self.runner.plan.jobs[self.run.combination.jobs[job]];
        let driver = self.runner.driver;
        let mut command;
        if self.run.mode.of_device().is_some() {
            command = Command::new(self.runner.executable);
            command.args(["run", "--name", &self.names[job]]);
            command.args(["--device", self.runner.device]);
            if self.runner.there.is_none() {
                command.arg("--config").arg(self.quotas());
            }
            if let Some(mem) = about.mem {
                command.args(["--mem", &mem.to_string()]);
            }
            let own = self.run.combination.shares.as_ref();
            if let Some(share) = own.map(|shares| shares[job]).or(about.share) {
                command.args(["--share", &share.to_string()]);
            }
            match driver.simulated {
                Some(_) => command.arg("--sim"),
                None => command.arg("--driver").arg(&driver.path),
            };
            command.arg("--").args(self.words(about));
            self.environment(&mut command);
        } else {
            let words = self.words(about);
            command = Command::new(&words[0]);
            command.args(&words[1..]);
            self.environment(&mut command);
            command.env_remove("SUBLET_RUNTIME_DIR");
            // Of a `sublet run` that this one is in.
            let preloaded = env::var_os("LD_PRELOAD").unwrap_or_default();
            if preloaded.to_string_lossy().contains("libsublet") {
                command.env_remove("LD_PRELOAD");
            }
            if driver.simulated.is_some() {
                let mut path = self.runner.install.sim_dir().as_os_str().to_owned();
                if let Some(more) = env::var_os("LD_LIBRARY_PATH").filter(|more| !more.is_empty()) {
                    path.push(":");
                    path.push(more);
                }
                command.env("LD_LIBRARY_PATH", path);
            }
            command.env("CUDA_VISIBLE_DEVICES", self.runner.device);
            if self.run.mode == Mode::Mps {
                command.envs(self.service_variables());
            }
        }
        // Python keeps lines back where its output is a file.
        if env::var_os("PYTHONUNBUFFERED").is_none() {
            command.env("PYTHONUNBUFFERED", "1");
        }
        let (out, err) = (self.place.output(job, "out"), self.place.output(job, "err"));
        let lines = |out: &Path| match (&about.progress, counted_by_itself(about, self.run.mode)) {
            (Progress::Lines { pattern, .. }, _) => Lines::open(out, pattern).map(Some),
            (_, Some(what)) => Lines::open(out, &format!("^{what} ([0-9]+)$")).map(Some),
            _ => Ok(None),
        };
        command
            .envs(&about.env)
            .current_dir(&about.cwd)
            .stdin(Stdio::null())
            .stdout(File::create(&out).context("cannot make a file for its output")?)
            .stderr(File::create(&err).context("cannot make a file for its output")?);
        let lines = lines(&out).context("cannot read its output")?;
        let child = command.spawn().with_context(|| match &about.work {
            Work::Command(words) => format!("`{}`", words[0]),
            Work::Recording(one) => format!("a replay of {}", one.path.display()),
        })?;
        Ok(Started {
            child,
            lines,
            ended: None,
        })
    }

    /// What is run: of a recording, a replay of it that begins anew as long as it is let.
    fn words(&self, about: &Job) -> Vec<OsString> {
        let recorded = match &about.work {
            Work::Command(words) => return words.iter().map(OsString::from).collect(),
            Work::Recording(recorded) => recorded,
        };
        let mut words: Vec<OsString> = vec![self.runner.executable.into(), "replay".into()];
        words.push(recorded.path.clone().into());
        words.extend(["--for", REPLAYED].map(OsString::from));
        match self.runner.driver.simulated {
            Some(_) => words.push("--sim".into()),
            None => words.extend(["--driver".into(), self.runner.driver.path.clone().into()]),
        }
        if let Some(what) = counted_by_itself(about, self.run.mode) {
            words.extend(["--count", what].map(OsString::from));
        }
        words
    }

    fn progress(&self, job: usize) -> &Progress {
        // PANIC: as in `start_job`.
        &self.runner.plan.jobs[self.run.combination.jobs[job]].progress
    }

    /// Looks at every job: whether it lives, and what it has written.
    fn look(&mut self, when: &str) -> Result<(), Failed> {
        for (number, job) in self.jobs.iter_mut().enumerate() {
            let ended = job.child.try_wait();
            if let Ok(Some(status)) = ended {
                job.ended = Some(status);
                return Err(Failed::of(number, format!("{} {when}", ended_how(status))));
            }
            if let Some(lines) = &mut job.lines {
                let read = lines.look();
                read.map_err(|error| {
                    Failed::of(number, format!("cannot be read: its output: {error}"))
                })?;
            }
            for what in ["out", "err"] {
                let length = fs::metadata(self.place.output(number, what)).map_or(0, |at| at.len());
                if length > OUTPUT_MOST {
                    let most = control::short_bytes(OUTPUT_MOST);
                    let why = format!("wrote more than {most} of output: have it write less");
                    return Err(Failed::of(number, why));
                }
            }
        }
        Ok(())
    }

    fn status(&mut self) -> Result<Option<ArbiterStatus>, Failed> {
        let Some(arbiter) = &mut self.arbiter else {
            return Ok(None);
        };
        match arbiter.client.status() {
            Ok(status) => Ok(Some(status)),
            Err(error) => Err(Failed {
                said: Some(last_lines(&arbiter.dir.log_file())),
                ..Failed::all(format!("the arbiter did not answer: {error}"))
            }),
        }
    }

    /// A job in the arbiter's answer.
    fn find<'s>(&self, status: &'s Option<ArbiterStatus>, job: usize) -> Option<&'s JobStatus> {
        let jobs = &status.as_ref()?.jobs;
        jobs.iter().find(|one| one.name == self.names[job])
    }

    /// How far a job has come, where that is known.
    fn counted(&self, status: &Option<ArbiterStatus>, job: usize) -> Option<f64> {
        if let Some(lines) = &self.jobs[job].lines {
            return lines.last;
        }
        // CAST: counters far below 2^53.
        match self.progress(job) {
            Progress::Lines { .. } => None,
            Progress::Launches => Some(self.find(status, job)?.launches as f64),
            Progress::DeviceTime => Some(self.find(status, job)?.device_time_ns as f64 / 1e9),
            Progress::Iterations => {
                let profile = self.find(status, job)?.profile.as_ref()?;
                let is_known = profile.found != IterationSource::None;
                is_known.then_some(profile.iterations as f64)
            }
        }
    }

    /// Until every job has submitted work, or written a line that is looked for.
    fn wait_for_work(&mut self, begun: Instant) -> Result<(), Failed> {
        let limit = self.runner.plan.start_limit;
        loop {
            self.look("before it was measured")?;
            let status = self.status()?;
            let all = 0..self.jobs.len();
            let idle = all.into_iter().find(|job| match self.jobs[*job].lines {
                Some(_) => self.counted(&status, *job).is_none(),
                None => self.find(&status, *job).is_none_or(|one| one.launches == 0),
            });
            let Some(job) = idle else { return Ok(()) };
            if begun.elapsed() > limit {
                let what = match self.jobs[job].lines {
                    Some(_) => "wrote no line that matches",
                    None => "submitted no work",
                };
                let limit = control::short_span(limit);
                let why = format!("{what} within {limit} (start_limit gives it more time)");
                return Err(Failed::of(job, why));
            }
            thread::sleep(LOOK);
        }
    }

    /// The time that does not count, and until iterations are known.
    fn warm_up(&mut self, begun: Instant, time: Duration) -> Result<(), Failed> {
        let end = Instant::now() + time;
        while Instant::now() < end {
            self.look("while it warmed up")?;
            thread::sleep(LOOK.min(end.saturating_duration_since(Instant::now())));
        }
        loop {
            self.look("while it warmed up")?;
            let status = self.status()?;
            let unknown = (0..self.jobs.len()).find(|job| self.counted(&status, *job).is_none());
            let Some(job) = unknown else { return Ok(()) };
            if begun.elapsed() > self.runner.plan.start_limit + time {
                let why = "has no iterations that the arbiter could find (`sublet ps --profile`): \
                           write progress = \"launches\", \"device_time\" or { lines = \"...\" }";
                return Err(Failed::of(job, why));
            }
            thread::sleep(LOOK);
        }
    }

    fn window(&mut self, time: Duration, record: &mut Record) -> Result<(), Failed> {
        let each = (time / 100).clamp(LOOK, Duration::from_millis(500));
        let begun = Instant::now();
        let first = self.status()?;
        let mut samples = vec![Samples::default(); self.jobs.len()];
        // What was before does not count.
        self.runner.watched.and_then(Watched::look);
        let mut rates: Vec<Rate> = Vec::new();
        let mut next = begun;
        let last = loop {
            let seconds = begun.elapsed().as_secs_f64();
            let when = format!("{seconds:.1} s into the {:.1} s", time.as_secs_f64());
            self.look(&when)?;
            let status = self.status()?;
            let seconds = begun.elapsed().as_secs_f64();
            for (job, samples) in samples.iter_mut().enumerate() {
                if let Some(counted) = self.counted(&status, job) {
                    samples.add(seconds, counted);
                }
            }
            rates.extend(self.runner.watched.and_then(Watched::look));
            let now = Instant::now();
            if now >= begun + time {
                break status;
            }
            // What was missed is not made up for.
            next = (next + each).max(now);
            thread::sleep(next.min(begun + time).saturating_duration_since(now));
        };
        record.window_s = begun.elapsed().as_secs_f64();
        // The first look is of what was before, or of nothing.
        let rates = rates.get(1..).unwrap_or_default();
        record.device_busy = mean(rates.iter().map(|rate| rate.busy));
        record.memory_busy = mean(rates.iter().filter_map(|rate| rate.memory));
        record.clocks = (self.runner.clocks)();
        for (job, samples) in samples.into_iter().enumerate() {
            let unit = self.progress(job).unit().to_owned();
            let speed = samples.speed(&unit).map_err(|why| Failed::of(job, why))?;
            let mut figures = Figures {
                job: record.jobs[job].clone(),
                unit,
                speed: speed.speed,
                part_speeds: speed.parts,
                samples: samples.seen,
                ..Figures::default()
            };
            if let (Some(from), Some(to)) = (self.find(&first, job), self.find(&last, job)) {
                fill(&mut figures, from, to, record.window_s);
            }
            record.figures.push(figures);
        }
        Ok(())
    }

    /// Ends everything: jobs first, then what they used.
    fn end(&mut self) {
        for job in self.jobs.iter().filter(|job| job.ended.is_none()) {
            signal_group(&job.child, Signal::SIGTERM);
        }
        let grace = Instant::now() + GRACE;
        for job in &mut self.jobs {
            end_group(
                &mut job.child,
                grace.saturating_duration_since(Instant::now()),
            );
        }
        if let Some(mut arbiter) = self.arbiter.take()
            && let Some(child) = &mut arbiter.child
        {
            let _ = arbiter.client.shutdown();
            end_group(child, GRACE);
        }
        if let Some(service) = &mut self.service {
            signal_group(service, Signal::SIGTERM);
            end_group(service, GRACE);
        }
    }
}

/// Longer than any run is.
const REPLAYED: &str = "100d";

/// What a replay counts itself, where no arbiter does.
fn counted_by_itself(about: &Job, mode: Mode) -> Option<&'static str> {
    match (&about.work, &about.progress) {
        _ if mode.of_device().is_some() => None,
        (Work::Recording(_), Progress::Launches) => Some("launches"),
        (Work::Recording(_), Progress::Iterations) => Some("iterations"),
        _ => None,
    }
}

/// The daemon that MPS is controlled by.
pub const MPS_CONTROL: &str = "nvidia-cuda-mps-control";

fn fill(figures: &mut Figures, from: &JobStatus, to: &JobStatus, seconds: f64) {
    let device_ns = to.device_time_ns.saturating_sub(from.device_time_ns);
    figures.device_time_ns = Some(device_ns);
    // CAST: far below 2^53 nanoseconds.
    figures.held = Some(device_ns as f64 / 1e9 / seconds);
    figures.wait_time_ns = Some(to.wait_time_ns.saturating_sub(from.wait_time_ns));
    figures.launches = Some(to.launches.saturating_sub(from.launches));
    figures.mem_peak_bytes = Some(to.mem_peak_bytes);
    let (Some(before), Some(profile)) = (&from.profile, &to.profile) else {
        return;
    };
    let copied = profile.copied_bytes.saturating_sub(before.copied_bytes);
    figures.copy_bytes_per_s = Some(copied as f64 / seconds); // CAST: as above.
    if profile.found != IterationSource::None {
        figures.iteration_ns = profile.iteration_ns;
        figures.iteration_p50_ns = profile.iteration_p50_ns;
        figures.iteration_cov = profile.iteration_cov;
    }
}

fn ended_how(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("ended with exit code {code}"),
        (None, Some(signal)) => format!("was ended by signal {signal}"),
        (None, None) => "ended".to_owned(),
    }
}

/// To a process and what it has started in its group.
fn signal_group(child: &Child, signal: Signal) {
    // CAST: process ids are positive.
    let _ = killpg(Pid::from_raw(child.id() as i32), signal);
}

/// Waits for an end, makes one after `grace`, and ends what is left of the group.
fn end_group(child: &mut Child, grace: Duration) {
    if has_ended(child, grace) {
        // Its group's number may be another one's by now; what is left of it is found by its
        // environment.
        return;
    }
    signal_group(child, Signal::SIGKILL);
    let _ = child.kill();
    // TIMEOUT: one that the kernel holds is not waited for.
    has_ended(child, Duration::from_secs(10));
}

/// Waits for an end.
fn has_ended(child: &mut Child, limit: Duration) -> bool {
    let end = Instant::now() + limit;
    loop {
        if !matches!(child.try_wait(), Ok(None)) {
            return true;
        }
        if Instant::now() >= end {
            return false;
        }
        thread::sleep(Duration::from_millis(2));
    }
}
