//! `sublet cluster slurm`: the packer of a Slurm cluster.
//!
//! Each pass reads Slurm's queue and nodes, asks the hook about every held job, and has Slurm start
//! it where the hook says. It keeps nothing: what it needs is in Slurm and in the hook, and either
//! may be away for a while.

use std::io::{self, Read, Write};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use cluster::live::http::client::Client;
use cluster::live::placement::Decided;
use cluster::live::slurm::{self, At, Phase};
use cluster::live::wire::HookStatus;

use super::args::SlurmPacker;

/// TIMEOUT: a slurmctld that is busy answers within seconds; one that is away is asked again in the
/// next pass.
const PATIENCE: Duration = Duration::from_secs(20);
/// Of what a program prints, in bytes: jobs of a large cluster.
const MOST_PRINTED: u64 = 256 << 20;

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
    let mut jobs = slurm::jobs(&scontrol(args, &["-o", "-d", "show", "job"])?);
    let mut released = 0;
    for job in jobs.iter().filter(|job| job.phase == Phase::Decided) {
        released += usize::from(release(args, job.id, &job.comment));
    }
    if !jobs.iter().any(|job| job.phase == Phase::Held) {
        return Ok(released);
    }
    let gpus = slurm::gpus(&scontrol(args, &["-o", "show", "node"])?);
    let mut hook: Client = super::client(&args.hook)?;
    let status: HookStatus = hook.ask("GET", "/v1/status", None::<&()>)?;
    for at in 0..jobs.len() {
        if jobs[at].phase != Phase::Held {
            continue;
        }
        let job = jobs[at].clone();
        let (asked, behind) = slurm::question(&job, &gpus, &jobs, &status.nodes, args.shard);
        let decided = if asked.candidates.is_empty() {
            Decided {
                reason: format!("no GPU has {} free shards", job.shards),
                ..Decided::default()
            }
        } else {
            hook.ask("POST", "/v1/decide", Some(&asked))?
        };
        let chosen = asked.candidates.iter().position(|candidate| {
            candidate.node == decided.node && candidate.uuid == decided.device
        });
        let Some(chosen) = chosen else {
            if let Some(words) = slurm::waits(&job, &decided.reason) {
                update(args, &words, job.id);
            }
            continue;
        };
        // The job may be gone meanwhile, or Slurm refuse: the others are decided all the same.
        let words = slurm::update(&job, &behind[chosen], &decided);
        if !update(args, &words, job.id) || !release(args, job.id, slurm::comment_of(&words)) {
            continue;
        }
        say(&format!(
            "job {} goes to {} {}: {}",
            job.id, decided.node, decided.device, decided.reason
        ));
        released += 1;
        // The next one is decided with this one there.
        jobs[at].phase = Phase::Released;
        let kind = At::Kind(behind[chosen].kind.clone());
        jobs[at].at = Some((decided.node.clone(), kind));
    }
    Ok(released)
}

fn release(args: &SlurmPacker, job: u64, comment: &str) -> bool {
    if let Err(error) = scontrol(args, &["release", &job.to_string()]) {
        say(&format!("job {job} cannot be released: {error:#}"));
        return false;
    }
    if let Some(words) = slurm::settled(job, comment) {
        update(args, &words, job);
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

/// What `scontrol` prints, within [`PATIENCE`].
fn scontrol(args: &SlurmPacker, words: &[&str]) -> anyhow::Result<String> {
    let program = args.scontrol.display();
    let mut child = Command::new(&args.scontrol)
        .args(words)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("{program} cannot be started (give --scontrol FILE)"))?;
    let read = |pipe: Option<Box<dyn Read + Send>>| {
        thread::spawn(move || {
            let mut bytes = Vec::new();
            if let Some(pipe) = pipe {
                let _ = pipe.take(MOST_PRINTED).read_to_end(&mut bytes);
            }
            String::from_utf8_lossy(&bytes).into_owned()
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
    if !status.success() {
        let said = err.lines().next().unwrap_or("it says nothing");
        bail!("{program} {}: {said}", words.join(" "));
    }
    Ok(out)
}
