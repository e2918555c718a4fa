//! What is said of the chosen job below the table: settings, processes, last events.

use std::collections::VecDeque;

use control::{Event, EventKind, IterationSource, short_bytes};

use super::columns;
use super::model::Job;
use crate::printable::printable;
use crate::ps::short_time;
use crate::when;

/// Columns of the label, the space after it included.
pub const LABEL: u16 = 11;
/// Processes that are listed at most; the rest is counted.
const PROCESSES: usize = 6;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    pub label: String,
    pub text: String,
}

fn line(label: &str, text: String) -> Line {
    Line {
        label: label.into(),
        text,
    }
}

/// So many lines of several blocks: where they do not fit, the longest gives way first.
pub fn within(rows: usize, blocks: &[Vec<Line>]) -> Vec<Line> {
    let mut lengths: Vec<usize> = blocks.iter().map(Vec::len).collect();
    while lengths.iter().sum::<usize>() > rows {
        let Some(longest) = lengths.iter_mut().max() else {
            break;
        };
        *longest -= 1;
    }
    let kept = blocks
        .iter()
        .zip(lengths)
        .flat_map(|(block, length)| &block[..length]);
    kept.cloned().collect()
}

/// The most important first.
pub fn settings(job: &Job) -> Vec<Line> {
    let status = &job.status;
    let share = |share: f64| format!("{share:.2}");
    let mut lines = Vec::new();
    if let Some(why) = &status.demoted {
        lines.push(line(
            "demoted",
            format!("runs after all others: it {}", printable(why)),
        ));
    }

    if let Some(latency) = &status.latency {
        let p99 = latency.p99_ns.map_or("-".into(), short_time);
        let mut text = format!(
            "target {}, 99 % within {p99}, {} of {} bursts late",
            short_time(latency.target_ns),
            latency.missed,
            latency.bursts
        );
        if let Some(why) = &latency.unmet {
            text += &format!("; not met: {}", printable(why));
        }
        lines.push(line("latency", text));
    }

    let mut shares = match status.share_asked {
        Some(asked) => format!("asked {}", share(asked)),
        None => "not asked for".into(),
    };
    for (word, bound) in [
        ("at least", status.share_min),
        ("at most", status.share_max),
    ] {
        if let Some(bound) = bound {
            shares += &format!(", {word} {}", share(bound));
        }
    }
    if let Some(got) = job.share_got {
        shares += &format!("; got {}", share(got));
    }
    if let Some(got) = status.share_got_contended {
        shares += &format!(", contended {}", share(got));
    }
    shares += &format!(", in all {}", share(status.share_got_total + 0.0));
    lines.push(line("share", shares));

    let mut memory = short_bytes(status.mem_used_bytes);
    match status.mem_limit_bytes {
        Some(limit) => memory += &format!(" of {}", short_bytes(limit)),
        None => memory += ", no limit",
    }
    memory += &format!(", peak {}", short_bytes(status.mem_peak_bytes));
    if status.unattributed_bytes > 0 {
        let more = short_bytes(status.unattributed_bytes);
        memory += &format!(", {more} more of the driver");
    }
    memory += &format!("; {} refused", status.oom_count);
    lines.push(line("memory", memory));

    if let Some(residence) = &status.residence {
        let mut text = format!(
            "{} of {} in host memory ({})",
            short_bytes(job.evicted_bytes()),
            short_bytes(residence.evictable_bytes),
            residence.state.as_str()
        );
        if !residence.reason.is_empty() {
            text += &format!(": {}", printable(&residence.reason));
        }
        lines.push(line("evicted", text));
    }

    let mut work = format!("{} launches", status.launches);
    if let Some(rate) = job.launches_per_s {
        work += &format!(" ({rate:.0}/s)");
    }
    if let Some(marks) = status.in_flight_marks {
        work += &format!(", {marks} marks in flight");
    }
    work += &format!(", waited {}", short_time(status.wait_time_ns));
    if status.overrun_ns > 0 {
        work += &format!(", overran {}", short_time(status.overrun_ns));
    }
    lines.push(line("work", work));
    lines.extend(iterations(job).map(|text| line("iteration", text)));

    let mut terms = status.class.to_string();
    for (word, holds) in [
        ("gang", status.gang),
        ("evictable", status.evictable),
        ("simulated", status.simulated),
    ] {
        if holds {
            terms += &format!(", {word}");
        }
    }
    terms += &format!(", user {}", columns::user_of(job));
    terms += &format!(", without arbiter: {}", status.on_arbiter_loss);
    if let Some(limit) = status.host_memory_limit_bytes {
        terms += &format!(", host memory {}", short_bytes(limit));
    }
    lines.push(line("terms", terms));
    lines.push(line("command", printable(&status.command.join(" "))));
    lines
}

fn iterations(job: &Job) -> Option<String> {
    let profile = job.status.profile.as_ref()?;
    let ns = profile.iteration_ns?;
    let mut text = short_time(ns);
    if profile.found != IterationSource::None {
        text += &format!(" ({})", profile.found.as_str());
    }
    if let Some(solo) = profile.solo_iteration_ns {
        text += &format!(", solo {}", short_time(solo));
    }
    if let Some(slowdown) = profile.slowdown {
        text += &format!(", slowdown {slowdown:.2}");
    }
    text += &format!(", {} counted", profile.iterations);
    Some(text)
}

pub fn processes(job: &Job) -> Vec<Line> {
    let status = &job.status;
    let escaped = status.escaped.iter().map(|process| {
        let text = format!(
            "{} {}: {}",
            short_bytes(process.used_bytes),
            printable(&process.command),
            printable(&process.reason)
        );
        line(&format!("escaped {}", process.pid), text)
    });
    let attached = status.processes.iter().map(|process| {
        let text = format!(
            "{}, {} launches, {}",
            short_bytes(process.mem_used_bytes),
            process.launches,
            printable(&process.command)
        );
        line(&format!("pid {}", process.pid), text)
    });
    let mut lines: Vec<Line> = escaped.chain(attached).collect();
    if lines.len() > PROCESSES {
        let more = lines.len() - (PROCESSES - 1);
        lines.truncate(PROCESSES - 1);
        lines.push(line("", format!("and {more} processes more")));
    }
    lines
}

/// The last ones of the job, the newest first.
pub fn events(events: &VecDeque<Event>, job: &Job, most: usize) -> Vec<Line> {
    let id = job.status.id;
    let own = events
        .iter()
        .rev()
        .filter(|event| event.job_id == id && id != 0);
    own.take(most)
        .map(|event| {
            let time = when::rfc3339(event.unix_ms).unwrap_or_default();
            // The time of day, in UTC, to the second.
            let time = time.get(11..19).unwrap_or_default();
            let kind = match EventKind::of(&event.kind) {
                Some(kind) => kind.plain.to_owned(),
                None => printable(&event.kind),
            };
            line(time, format!("{kind}: {}", printable(&event.message)))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use control::{EscapedProcess, ProcessStatus};

    use super::*;

    fn block(label: &str, lines: usize) -> Vec<Line> {
        vec![line(label, String::new()); lines]
    }

    #[test]
    fn the_longest_block_gives_way() {
        let labels =
            |lines: Vec<Line>| -> String { lines.iter().map(|line| line.label.as_str()).collect() };
        let blocks = [block("a", 2), block("b", 5), block("c", 1)];
        assert_eq!(labels(within(8, &blocks)), "aabbbbbc");
        assert_eq!(labels(within(5, &blocks)), "aabbc");
        assert_eq!(labels(within(0, &blocks)), "");
        assert_eq!(labels(within(3, &[])), "");
    }

    #[test]
    fn processes_that_escaped_come_first_and_many_are_counted() {
        let mut job = Job::default();
        job.status.processes = (1..=20)
            .map(|pid| ProcessStatus {
                pid,
                command: "a\nb".into(),
                ..ProcessStatus::default()
            })
            .collect();
        job.status.escaped = vec![EscapedProcess {
            pid: 99,
            ..EscapedProcess::default()
        }];
        let lines = processes(&job);
        assert_eq!(lines.len(), PROCESSES);
        assert_eq!(lines[0].label, "escaped 99");
        assert_eq!(lines[1].text, "0B, 0 launches, a\\nb");
        assert_eq!(lines[PROCESSES - 1].text, "and 16 processes more");
    }

    #[test]
    fn only_events_of_this_job_are_shown() {
        let event = |job_id, message: &str| Event {
            job_id,
            kind: "oom".into(),
            message: message.into(),
            unix_ms: 1_795_466_100_123,
            ..Event::default()
        };
        let all: VecDeque<Event> = [event(1, "old"), event(2, "other"), event(1, "new\x1b")].into();
        let mut job = Job::default();
        assert_eq!(events(&all, &job, 9), []);
        job.status.id = 1;
        let lines = events(&all, &job, 9);
        let texts: Vec<&str> = lines.iter().map(|line| line.text.as_str()).collect();
        assert_eq!(texts, ["out of memory: new\\u{1b}", "out of memory: old"]);
        assert_eq!(lines[0].label, "20:35:00");
        assert_eq!(events(&all, &job, 1).len(), 1);
    }

    #[test]
    fn a_job_of_which_nothing_is_known_has_settings_too() {
        let lines = settings(&Job::default());
        let labels: Vec<&str> = lines.iter().map(|line| line.label.as_str()).collect();
        assert_eq!(labels, ["share", "memory", "work", "terms", "command"]);
    }
}
