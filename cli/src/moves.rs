//! `sublet evict`, `restore` and `switch`: jobs moved between device and host by hand.

use anyhow::anyhow;
use control::paths::{RuntimeDir, Surroundings};
use control::{ClientError, JobMoved, MoveOutcome, Moved, Moves, short_bytes};

use crate::args::{Evict, MoveFlags, Restore, Switch};
use crate::connect::{self, Unreachable};
use crate::exit::Result;
use crate::json;

/// What to print, and whether everything went where it was to go.
///
/// # Errors
/// No arbiter, its refusal, or a job that did not go where it was to go.
pub fn evict(args: &Evict) -> Result<(String, bool)> {
    moved(&args.names, &[], &args.how)
}

/// As [`evict`].
///
/// # Errors
/// As [`evict`].
pub fn restore(args: &Restore) -> Result<(String, bool)> {
    moved(&[], &args.names, &args.how)
}

/// As [`evict`].
///
/// # Errors
/// As [`evict`].
pub fn switch(args: &Switch) -> Result<(String, bool)> {
    let [out, back] = [&args.out, &args.back].map(std::slice::from_ref);
    moved(out, back, &args.how)
}

/// As [`evict`], for both at once.
///
/// # Errors
/// As [`evict`].
pub fn moved(evict: &[String], restore: &[String], how: &MoveFlags) -> Result<(String, bool)> {
    let dir = RuntimeDir::find(&Surroundings::of_this_process())?;
    let moves = Moves {
        evict: evict.to_vec(),
        restore: restore.to_vec(),
        deadline_ms: u64::try_from(how.timeout.as_millis()).unwrap_or(u64::MAX),
        ..Moves::default()
    };
    let moved = connect::ask(
        || connect::patient(&dir, how.timeout),
        |arbiter| arbiter.move_jobs(&moves),
    )
    .map_err(|error| match error {
        Unreachable::Client(ClientError::Refused(refusal)) => {
            anyhow!("the arbiter refused to move anything: {refusal}")
        }
        error => error.into(),
    })?;
    if how.json {
        let text = json::object(serde_json::to_value(&moved)?);
        return Ok((text, moved.is_done()));
    }
    if moved.is_done() {
        return Ok((text_of(&moved), true));
    }
    let lines: Vec<String> = moved.jobs.iter().map(line_of).collect();
    Err(anyhow!("{}", lines.join("; ")).into())
}

fn text_of(moved: &Moved) -> String {
    let mut text: String = moved
        .jobs
        .iter()
        .map(|job| format!("{}\n", line_of(job)))
        .collect();
    if moved.jobs.len() > 1 {
        text += &format!(
            "{:.1} ms in all{}\n",
            ms(moved.elapsed_ns),
            if moved.simulated { " (simulated)" } else { "" }
        );
    }
    text
}

fn line_of(job: &JobMoved) -> String {
    let verb = match (job.evicted, job.outcome == MoveOutcome::Done) {
        (true, true) => "is evicted",
        (false, true) => "is restored",
        (true, false) => "is not evicted",
        (false, false) => "is not restored",
    };
    if job.outcome != MoveOutcome::Done {
        let reason = if job.reason.is_empty() {
            job.outcome.as_str()
        } else {
            &job.reason
        };
        return format!("{} {verb}: {reason}", job.job);
    }
    let rate = if job.copied_bytes > 0 && job.moving_ns > 0 {
        // CAST: for people.
        let rate = job.copied_bytes as f64 / job.moving_ns as f64;
        format!(" at {rate:.1} GB/s")
    } else {
        String::new()
    };
    format!(
        "{} {verb}: {} copied of {}{rate}, {:.1} ms, of which {:.1} ms until its work had ended",
        job.job,
        short_bytes(job.copied_bytes),
        short_bytes(job.evictable_bytes),
        ms(job.elapsed_ns),
        ms(job.drain_ns),
    )
}

fn ms(ns: u64) -> f64 {
    // CAST: for people.
    ns as f64 / 1e6
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_tells_what_was_done_or_why_not() {
        let mut job = JobMoved {
            job: "a".into(),
            evicted: true,
            outcome: MoveOutcome::Done,
            evictable_bytes: 4 << 30,
            copied_bytes: 2 << 30,
            elapsed_ns: 110_000_000,
            drain_ns: 2_500_000,
            moving_ns: 107_374_182,
            ..JobMoved::default()
        };
        assert_eq!(
            line_of(&job),
            "a is evicted: 2GiB copied of 4GiB at 20.0 GB/s, 110.0 ms, of which 2.5 ms until its work had ended"
        );
        job.outcome = MoveOutcome::Refused;
        job.reason = "a stream is being captured".into();
        assert_eq!(
            line_of(&job),
            "a is not evicted: a stream is being captured"
        );
        job.evicted = false;
        job.outcome = MoveOutcome::TimedOut;
        job.reason.clear();
        assert_eq!(line_of(&job), "a is not restored: timed out");
    }
}
