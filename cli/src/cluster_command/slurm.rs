//! `sublet cluster slurm`: the packer of a Slurm cluster.
//!
//! Each pass reads Slurm's queue and nodes, asks the hook about held jobs, and has Slurm start them
//! where the hook says. A job that is to wait is asked about again, less and less often as long as
//! the GPUs and the jobs on them stay the same. Nothing else is kept but since when a job is too
//! slow beside another: what it needs is in Slurm and in the hook, and either may be away for a
//! while.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, anyhow, bail};
use cluster::live::http::client::{Client, ClientError};
use cluster::live::placement::Decided;
use cluster::live::slurm::{self, Away, Gpu, Limits, Next, Phase, Places, QueuedJob, Taken, Watch};
use cluster::live::wire::{self, HookStatus, NodeView};

use super::args::SlurmPacker;

/// TIMEOUT: a slurmctld that is busy answers within seconds; one that is away is asked again in the
/// next pass.
const PATIENCE: Duration = Duration::from_secs(20);
/// Of what a program prints, in bytes: a job takes 4 KiB of JSON, so that is 250,000 of them.
const MOST_PRINTED: u64 = 1 << 30;
/// Longest time between two questions about a job that is to wait, where nothing has changed: what
/// the hook measures meanwhile may let it start.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// # Errors
/// A flag is wrong, or with `--once` the pass has failed.
pub fn pack(args: &SlurmPacker) -> anyhow::Result<String> {
    let (mut waiting, mut watch) = (Waiting::default(), Watch::default());
    if args.once {
        let released = pass(args, &mut waiting, &mut watch)?;
        return Ok(format!("{released} jobs released\n"));
    }
    if args.every.is_zero() {
        bail!("--every is 0: a time above 0 is expected");
    }
    let mut failed = String::new();
    loop {
        match pass(args, &mut waiting, &mut watch) {
            Ok(_) => failed.clear(),
            Err(error) => {
                let text = format!("{error:#}");
                // Once for as long as it stays the same.
                if text != failed {
                    say(&text);
                    failed = text;
                }
            }
        }
        thread::sleep(args.every);
    }
}

fn say(line: &str) {
    // Nobody may be listening any more.
    let _ = writeln!(io::stderr(), "sublet cluster slurm: {line}");
}

/// Jobs that are to wait, and when the hook is asked about each again.
#[derive(Debug, Default)]
struct Waiting {
    jobs: HashMap<u64, Wait>,
    /// The GPUs that take jobs, and what each job has of them, when that was last looked at.
    gpus: Vec<Gpu>,
    taken: Vec<(u64, Vec<Taken>)>,
}

#[derive(Debug, Clone)]
struct Wait {
    until: Instant,
    pause: Duration,
    /// The job as it was asked about, but for what is said of its waiting.
    job: QueuedJob,
}

impl Wait {
    fn is_about(&self, job: &QueuedJob) -> bool {
        let now = QueuedJob {
            comment: self.job.comment.clone(),
            ..job.clone()
        };
        self.job == now
    }
}

impl Waiting {
    /// Begins a pass: with other GPUs, or another job on one, all are asked about anew, and so is a
    /// job that was changed. Jobs that are held no more are forgotten.
    fn look(&mut self, gpus: &[Gpu], jobs: &[QueuedJob]) {
        let of = |job: &QueuedJob| (job.id, job.taken.clone());
        let mut taken: Vec<_> = jobs.iter().map(of).collect();
        taken.retain(|(_, taken)| !taken.is_empty());
        taken.sort_by_key(|(id, _)| *id);
        if self.gpus != gpus || self.taken != taken {
            self.jobs.clear();
            self.gpus = gpus.to_vec();
            self.taken = taken;
        }
        let held = jobs.iter().filter(|job| job.phase == Phase::Held);
        let held: HashMap<u64, &QueuedJob> = held.map(|job| (job.id, job)).collect();
        self.jobs
            .retain(|id, wait| held.get(id).is_some_and(|job| wait.is_about(job)));
    }

    fn is_due(&self, job: u64, now: Instant) -> bool {
        self.jobs.get(&job).is_none_or(|wait| now >= wait.until)
    }

    /// The hook lets a job wait: it is asked again after the time between two looks, twice that,
    /// and so on.
    fn defer(&mut self, job: &QueuedJob, every: Duration, now: Instant) {
        let before = self.jobs.get(&job.id).map(|wait| wait.pause);
        let pause = before.map_or(every, |pause| (pause * 2).min(LONGEST_PAUSE.max(every)));
        let wait = Wait {
            until: now + pause,
            pause,
            job: job.clone(),
        };
        self.jobs.insert(job.id, wait);
    }
}

/// Decides about the held jobs; returns how many were released.
fn pass(args: &SlurmPacker, waiting: &mut Waiting, watch: &mut Watch) -> anyhow::Result<usize> {
    let queue = squeue(args, &["--json"])?;
    let mut jobs = slurm::jobs(&queue).map_err(|error| {
        anyhow!("`squeue --json` prints no queue; Slurm has to be built with JSON: {error}")
    })?;
    drop(queue);
    let mut released = 0;
    for job in jobs.iter().filter(|job| job.phase == Phase::Decided) {
        released += usize::from(release(args, job));
    }
    // What a packer that was ended in between has left, whether this one requeues jobs or not.
    for job in &jobs {
        if job.phase == Phase::Returning {
            update(args, &slurm::clear(job, unix_s()), job.id);
        } else if job.is_marked() {
            update(args, &slurm::unmark(job), job.id);
        }
    }
    // What an earlier packer has suspended, this one resumes, whatever it was started with.
    let stands = jobs.iter().any(QueuedJob::is_away);
    let watches = args.node_extra || args.requeue_above.is_some() || stands;
    if !watches && !jobs.iter().any(|job| job.phase == Phase::Held) {
        return Ok(released);
    }
    let shown = scontrol(args, &["-o", "show", "node"])?;
    let (gpus, away) = (slurm::gpus(&shown), slurm::away(&shown));
    waiting.look(&gpus, &jobs);
    let (now, now_s) = (Instant::now(), unix_s());
    let is_due = |job: &QueuedJob, waiting: &Waiting| {
        job.phase == Phase::Held && !job.is_paused(now_s) && waiting.is_due(job.id, now)
    };
    if !watches && !jobs.iter().any(|job| is_due(job, waiting)) {
        return Ok(released);
    }
    let mut hook: Client = super::client(&args.hook)?;
    let status: HookStatus = hook.ask("GET", "/v1/status", None::<&()>)?;
    let mut places = Places::of(gpus, &jobs, &status.nodes, args.shard);
    requeue(args, &jobs, &places, &status.nodes, watch);
    if args.suspend || stands {
        suspend(args, &jobs, &status.nodes, watch, &mut hook)?;
    }
    for job in &mut jobs {
        if !is_due(job, waiting) {
            continue;
        }
        match place(args, job, &mut places, &away, &mut hook)? {
            Became::Released => released += 1,
            Became::Unsettled => {}
            Became::Waiting => waiting.defer(job, args.every, Instant::now()),
        }
    }
    if args.node_extra {
        for words in places.extra(&shown, &status.nodes) {
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            if let Err(error) = scontrol(args, &[&["update"], words.as_slice()].concat()) {
                say(&format!("what is free cannot be written: {error:#}"));
            }
        }
    }
    Ok(released)
}

fn unix_s() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

/// Has jobs requeued beside which others are too slow. What follows is the next pass's: Slurm ends
/// the job first.
fn requeue(
    args: &SlurmPacker,
    jobs: &[QueuedJob],
    places: &Places,
    nodes: &[NodeView],
    watch: &mut Watch,
) {
    let Some(slowdown) = args.requeue_above else {
        return;
    };
    let limits = Limits {
        slowdown,
        sustained: args.requeue_sustained,
        within_s: args.requeue_within.as_secs(),
        most: args.requeue_most,
        suspends: args.suspend,
    };
    let troubles = places.troubles(nodes, &limits, unix_s());
    for trouble in watch.step(troubles, jobs, limits.sustained, Instant::now()) {
        let Some(job) = jobs.iter().find(|job| job.id == trouble.goes) else {
            continue;
        };
        if args.suspend && job.may_stand {
            if update(args, &slurm::mark_away(job, &trouble, unix_s()), job.id) {
                say(&format!(
                    "job {} is to be suspended: beside it job {} takes {:.2} times as long as solo",
                    job.id, trouble.slow, trouble.slowdown
                ));
            }
            continue;
        }
        if job.is_marked() || !update(args, &slurm::mark(job, &trouble), job.id) {
            continue;
        }
        let id = job.id.to_string();
        match scontrol(args, &["requeuehold", &id]) {
            Ok(_) => say(&format!(
                "job {id} is requeued: beside it job {} takes {:.2} times as long as solo",
                trouble.slow, trouble.slowdown
            )),
            Err(error) => {
                say(&format!("job {id} cannot be requeued: {error:#}"));
                update(args, &slurm::unmark(job), job.id);
                watch.refuse(job.id);
            }
        }
    }
}

/// Goes on with jobs that are to stand, or stand, and says to the hook whose memory is to be off
/// the GPUs. A step that fails is tried again in the next pass.
///
/// # Errors
/// The hook is not there.
fn suspend(
    args: &SlurmPacker,
    jobs: &[QueuedJob],
    nodes: &[NodeView],
    watch: &mut Watch,
    hook: &mut Client,
) -> anyhow::Result<()> {
    let mut away = Vec::new();
    for job in jobs.iter().filter(|job| job.is_away()) {
        let id = job.id.to_string();
        let stays = match slurm::next(job, jobs, nodes, unix_s()) {
            Next::Wait => true,
            Next::Note => {
                update(args, &slurm::stand(job), job.id);
                true
            }
            Next::Suspend => match scontrol(args, &["suspend", &id]) {
                Ok(_) => {
                    update(args, &slurm::stand(job), job.id);
                    say(&format!(
                        "job {id} is suspended, and its memory has left the GPU"
                    ));
                    true
                }
                Err(error) => give_up(args, job, &format!("{error:#}"), watch),
            },
            Next::GiveUp(why) => give_up(args, job, &why, watch),
            Next::Resume => match scontrol(args, &["resume", &id]) {
                Ok(_) => {
                    update(args, &slurm::go_on(job), job.id);
                    say(&format!("job {id} is resumed"));
                    false
                }
                Err(error) => {
                    say(&format!("job {id} cannot be resumed: {error:#}"));
                    true
                }
            },
            Next::Back => {
                update(args, &slurm::go_on(job), job.id);
                false
            }
        };
        if stays {
            away.push(job);
        }
    }
    let wanted = wire::Away {
        nodes: slurm::by_node(away.into_iter()),
    };
    hook.ask::<_, wire::Away>("PUT", "/v1/away", Some(&wanted))?;
    Ok(())
}

/// A job is not suspended after all, and not tried again.
fn give_up(args: &SlurmPacker, job: &QueuedJob, why: &str, watch: &mut Watch) -> bool {
    say(&format!("job {} cannot be suspended: {why}", job.id));
    update(args, &slurm::go_on(job), job.id);
    watch.refuse(job.id);
    false
}

/// What became of a held job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Became {
    Released,
    /// There is no place for it, or the hook lets it wait.
    Waiting,
    /// Slurm did not do what it was asked: the next pass sees what is there.
    Unsettled,
}

/// Decides about one job.
///
/// # Errors
/// The hook is not there for any of them.
fn place(
    args: &SlurmPacker,
    job: &mut QueuedJob,
    places: &mut Places,
    away: &[Away],
    hook: &mut Client,
) -> anyhow::Result<Became> {
    let waits = |reason: &str| {
        if let Some(words) = slurm::waits(job, reason) {
            update(args, &words, job.id);
        }
        Ok(Became::Waiting)
    };
    if let Some(why) = job.for_slurm {
        return waits(&format!("{why}: give it shards and release it by hand"));
    }
    let (asked, behind) = places.question(job);
    if asked.candidates.is_empty() {
        return waits(&job.without_place(away));
    }
    let decided: Decided = match hook.ask("POST", "/v1/decide", Some(&asked)) {
        Ok(decided) => decided,
        // About this job: the others are asked about all the same.
        Err(error @ (ClientError::Refused { .. } | ClientError::Nonsense { .. })) => {
            let reason = format!("the hook says: {error}");
            if slurm::waits(job, &reason).is_some() {
                say(&format!("job {} waits: {reason}", job.id));
            }
            return waits(&reason);
        }
        Err(error) => return Err(error.into()),
    };
    let chosen = asked
        .candidates
        .iter()
        .position(|candidate| candidate.node == decided.node && candidate.uuid == decided.device);
    let Some(gpu) = chosen.and_then(|chosen| behind.get(chosen)) else {
        return waits(&decided.reason);
    };
    let gpu = Gpu::clone(gpu);
    // The job may be gone meanwhile, changed by its user, or Slurm refuses: the others are decided
    // all the same.
    if !is_still_held(args, job.id) {
        return Ok(Became::Unsettled);
    }
    let words = slurm::update(job, &gpu, &decided);
    if !update(args, &words, job.id) {
        return Ok(Became::Unsettled);
    }
    // Slurm has it there, released or not: the next one is decided with this one there.
    slurm::updated(job, &gpu, &words);
    places.put(job);
    if !release(args, job) {
        return Ok(Became::Unsettled);
    }
    say(&format!(
        "job {} goes to {} {}: {}",
        job.id, decided.node, decided.device, decided.reason
    ));
    Ok(Became::Released)
}

/// Whether a job is as the queue had it.
fn is_still_held(args: &SlurmPacker, job: u64) -> bool {
    let id = job.to_string();
    match squeue(args, &["-h", "-j", &id, "-O", slurm::HELD_COLUMNS]) {
        Ok(line) => slurm::still_held(&line, job),
        // It has ended.
        Err(_) => false,
    }
}

fn release(args: &SlurmPacker, job: &QueuedJob) -> bool {
    if let Err(error) = scontrol(args, &["release", &job.id.to_string()]) {
        say(&format!("job {} cannot be released: {error:#}", job.id));
        return false;
    }
    if let Some(words) = slurm::settled(job) {
        update(args, &words, job.id);
    }
    true
}

fn update(args: &SlurmPacker, words: &[String], job: u64) -> bool {
    let mut all = vec!["update"];
    all.extend(words.iter().map(String::as_str));
    match scontrol(args, &all) {
        Ok(_) => true,
        Err(error) => {
            say(&format!("job {job} cannot be changed: {error:#}"));
            false
        }
    }
}

/// What `scontrol` prints.
fn scontrol(args: &SlurmPacker, words: &[&str]) -> anyhow::Result<String> {
    printed(&args.scontrol, words)
}

/// What `squeue` prints, which lies beside `scontrol`.
fn squeue(args: &SlurmPacker, words: &[&str]) -> anyhow::Result<String> {
    printed(&args.scontrol.with_file_name("squeue"), words)
}

/// What one of Slurm's programs prints, within [`PATIENCE`].
fn printed(program: &Path, words: &[&str]) -> anyhow::Result<String> {
    printed_within(program, words, PATIENCE)
}

/// The same; nobody is waited for longer, be it the program or one that it has left behind with its
/// output open.
fn printed_within(program: &Path, words: &[&str], patience: Duration) -> anyhow::Result<String> {
    let end = Instant::now() + patience;
    let mut child = Command::new(program)
        .args(words)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| {
            format!(
                "{} cannot be started (give --scontrol FILE)",
                program.display()
            )
        })?;
    let program = program.display();
    let read = |pipe: Option<Box<dyn Read + Send>>| {
        let (sender, receiver) = mpsc::channel();
        thread::spawn(move || {
            let mut bytes = Vec::new();
            if let Some(pipe) = pipe {
                let _ = pipe.take(MOST_PRINTED).read_to_end(&mut bytes);
            }
            // A job's name may be any bytes.
            let text = String::from_utf8(bytes)
                .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned());
            let _ = sender.send(text);
        });
        receiver
    };
    let out = read(child.stdout.take().map(|pipe| Box::new(pipe) as _));
    let err = read(child.stderr.take().map(|pipe| Box::new(pipe) as _));
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if Instant::now() > end {
            child.kill()?;
            child.wait()?;
            bail!(
                "{program} did not answer within {} ms",
                patience.as_millis()
            );
        }
        thread::sleep(Duration::from_millis(5));
    };
    let rest = |text: mpsc::Receiver<String>| {
        let left = end.saturating_duration_since(Instant::now());
        text.recv_timeout(left).map_err(|_| {
            anyhow!(
                "{program} has ended, and its output did not within {} ms: a process that it started still has it",
                patience.as_millis()
            )
        })
    };
    let (out, err) = (rest(out)?, rest(err)?);
    // CAST: it is within the bound.
    if out.len() as u64 >= MOST_PRINTED {
        bail!("{program} {} prints more than 1 GiB", words.join(" "));
    }
    if !status.success() {
        let said = err.lines().next().unwrap_or("it says nothing");
        bail!("{program} {}: {said}", words.join(" "));
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_leaves_its_output_to_another_is_not_waited_for() {
        // The sleeper keeps the output of a shell that has ended.
        let dir = tempfile::tempdir().unwrap();
        let pid = dir.path().join("pid");
        let script = format!("echo said; sleep 600 & echo $! > {}", pid.display());
        let words = ["-c", script.as_str()];
        let error = printed_within(Path::new("/bin/sh"), &words, Duration::from_millis(300));
        let sleeper = std::fs::read_to_string(pid)
            .unwrap()
            .trim()
            .parse()
            .unwrap();
        let sleeper = nix::unistd::Pid::from_raw(sleeper);
        nix::sys::signal::kill(sleeper, nix::sys::signal::Signal::SIGKILL).unwrap();
        let error = error.unwrap_err().to_string();
        assert!(error.contains("did not within 300 ms"), "{error}");
        let said = printed_within(
            Path::new("/bin/sh"),
            &["-c", "echo said"],
            testbed::PATIENCE,
        );
        assert_eq!(said.unwrap(), "said\n");
        let words = ["-c", "exec sleep 600"];
        let error = printed_within(Path::new("/bin/sh"), &words, Duration::from_millis(1));
        let error = error.unwrap_err().to_string();
        assert!(error.contains("did not answer within 1 ms"), "{error}");
    }

    fn gpu() -> Gpu {
        Gpu {
            node: "n1".into(),
            kind: "g0".into(),
            index: 0,
            shards: 8,
            partitions: vec!["all".into()],
        }
    }

    fn job(id: u64, phase: Phase) -> QueuedJob {
        let at = slurm::At::Index(0);
        let taken = Taken {
            node: "n1".into(),
            at,
            shards: 4,
        };
        QueuedJob {
            id,
            phase,
            name: "train".into(),
            shards: 4,
            taken: if phase == Phase::Held {
                Vec::new()
            } else {
                vec![taken]
            },
            comment: "hold,shards=4".into(),
            partitions: vec!["all".into()],
            required: Vec::new(),
            excluded: Vec::new(),
            for_slurm: None,
            started_s: 0,
            may_go: false,
            may_stand: false,
            is_suspended: false,
        }
    }

    #[test]
    fn a_job_that_waits_is_asked_about_ever_less_until_something_changes() {
        let every = Duration::from_secs(2);
        let mut waiting = Waiting::default();
        let mut now = Instant::now();
        let (held, running) = (job(7, Phase::Held), job(3, Phase::Running));
        let jobs = [held.clone(), running.clone()];
        waiting.look(&[gpu()], &jobs);
        let mut pauses = Vec::new();
        for _ in 0..7 {
            assert!(waiting.is_due(7, now));
            waiting.defer(&held, every, now);
            waiting.look(&[gpu()], &jobs);
            let pause = waiting.jobs[&7].pause;
            assert!(!waiting.is_due(7, now + pause - Duration::from_nanos(1)));
            pauses.push(pause.as_secs());
            now += pause;
        }
        assert_eq!(pauses, [2, 4, 8, 16, 32, 60, 60]);
        waiting.defer(&held, every, now);
        assert!(waiting.is_due(8, now), "another job");
        // A job has ended; another one has begun; a GPU has come.
        for (gpus, jobs) in [
            (vec![gpu()], vec![held.clone()]),
            (vec![gpu()], vec![held.clone(), job(4, Phase::Running)]),
            (
                vec![gpu(), gpu()],
                vec![held.clone(), job(4, Phase::Running)],
            ),
        ] {
            waiting.defer(&held, every, now);
            waiting.look(&gpus, &jobs);
            assert!(waiting.is_due(7, now), "{jobs:?}");
        }
        let (gpus, busy) = ([gpu(), gpu()], job(4, Phase::Running));
        waiting.defer(&held, every, now);
        let said = QueuedJob {
            comment: "hold,shards=4,waits=because".into(),
            ..held.clone()
        };
        waiting.look(&gpus, &[said.clone(), busy.clone()]);
        assert!(
            !waiting.is_due(7, now),
            "no more than its reason was written"
        );
        let moved = QueuedJob {
            partitions: vec!["other".into()],
            ..said
        };
        waiting.look(&gpus, &[moved, busy]);
        assert!(waiting.is_due(7, now), "its user has changed it");
        waiting.defer(&held, every, now);
        waiting.look(&gpus, &[job(4, Phase::Running)]);
        assert!(waiting.jobs.is_empty(), "it is not held any more");
    }
}
