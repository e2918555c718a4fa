//! `sublet cluster slurm`: the packer of a Slurm cluster.
//!
//! Each pass reads Slurm's queue and nodes, asks the hook about every held job, and has Slurm start
//! it where the hook says. It keeps nothing: what it needs is in Slurm and in the hook, and either
//! may be away for a while.

use std::io::{self, Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use cluster::live::http::client::{Client, ClientError};
use cluster::live::placement::Decided;
use cluster::live::slurm::{self, Away, Gpu, Phase, Places, QueuedJob};
use cluster::live::wire::HookStatus;

use super::args::SlurmPacker;

/// TIMEOUT: a slurmctld that is busy answers within seconds; one that is away is asked again in the
/// next pass.
const PATIENCE: Duration = Duration::from_secs(20);
/// Of what a program prints, in bytes: a job takes 4 KiB of JSON, so that is 250,000 of them.
const MOST_PRINTED: u64 = 1 << 30;

/// # Errors
/// A flag is wrong, or with `--once` the pass has failed.
pub fn pack(args: &SlurmPacker) -> anyhow::Result<String> {
    if args.once {
        let released = pass(args)?;
        return Ok(format!("{released} jobs released\n"));
    }
    if args.every.is_zero() {
        bail!("--every is 0: a time above 0 is expected");
    }
    let mut failed = String::new();
    loop {
        match pass(args) {
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

/// Decides about every held job; returns how many were released.
fn pass(args: &SlurmPacker) -> anyhow::Result<usize> {
    let queue = squeue(args, &["--json"])?;
    let mut jobs = slurm::jobs(&queue).map_err(|error| {
        anyhow!("`squeue --json` prints no queue; Slurm has to be built with JSON: {error}")
    })?;
    drop(queue);
    let mut released = 0;
    for job in jobs.iter().filter(|job| job.phase == Phase::Decided) {
        released += usize::from(release(args, job));
    }
    if !jobs.iter().any(|job| job.phase == Phase::Held) {
        return Ok(released);
    }
    let nodes = scontrol(args, &["-o", "show", "node"])?;
    let (gpus, away) = (slurm::gpus(&nodes), slurm::away(&nodes));
    let mut hook: Client = super::client(&args.hook)?;
    let status: HookStatus = hook.ask("GET", "/v1/status", None::<&()>)?;
    let mut places = Places::of(gpus, &jobs, &status.nodes, args.shard);
    for job in jobs.iter_mut().filter(|job| job.phase == Phase::Held) {
        released += usize::from(place(args, job, &mut places, &away, &mut hook)?);
    }
    Ok(released)
}

/// Decides about one job; says whether it was released.
///
/// # Errors
/// The hook is not there for any of them.
fn place(
    args: &SlurmPacker,
    job: &mut QueuedJob,
    places: &mut Places,
    away: &[Away],
    hook: &mut Client,
) -> anyhow::Result<bool> {
    let waits = |reason: &str| {
        if let Some(words) = slurm::waits(job, reason) {
            update(args, &words, job.id);
        }
        Ok(false)
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
        return Ok(false);
    }
    let words = slurm::update(job, &gpu, &decided);
    if !update(args, &words, job.id) {
        return Ok(false);
    }
    // Slurm has it there, released or not: the next one is decided with this one there.
    slurm::updated(job, &gpu, &words);
    places.put(job);
    if !release(args, job) {
        return Ok(false);
    }
    say(&format!(
        "job {} goes to {} {}: {}",
        job.id, decided.node, decided.device, decided.reason
    ));
    Ok(true)
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
        thread::spawn(move || {
            let mut bytes = Vec::new();
            if let Some(pipe) = pipe {
                let _ = pipe.take(MOST_PRINTED).read_to_end(&mut bytes);
            }
            // A job's name may be any bytes.
            String::from_utf8(bytes)
                .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
        })
    };
    let out = read(child.stdout.take().map(|pipe| Box::new(pipe) as _));
    let err = read(child.stderr.take().map(|pipe| Box::new(pipe) as _));
    let end = Instant::now() + PATIENCE;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if Instant::now() > end {
            child.kill()?;
            child.wait()?;
            bail!("{program} did not answer within {} s", PATIENCE.as_secs());
        }
        thread::sleep(Duration::from_millis(5));
    };
    let (out, err) = (
        out.join().unwrap_or_default(),
        err.join().unwrap_or_default(),
    );
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
