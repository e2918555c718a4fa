//! `sublet acquire`, `yield`, `groups` and `timeslice`: jobs that take turns by themselves.

use std::env;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::anyhow;
use control::paths::{RuntimeDir, Surroundings};
use control::{Acquire, Acquired, Client, ClientError, GiveUp, GroupStatus, Yielded};

use crate::args::{AcquireTurn, ListGroups, Timeslice, YieldTurn};
use crate::connect::{self, Unreachable};
use crate::exit::Result;
use crate::json;
use crate::table::{Align, Table};

/// The turn did not come in time; as timeout(1) ends.
pub const NO_TURN: u8 = 124;

/// How long a job waits for an arbiter that is being restarted. TIMEOUT: as a job's processes do.
const RESTART: Duration = Duration::from_secs(30);
/// Between two looks for it.
const AGAIN: Duration = Duration::from_millis(100);

/// What to print, and whether the job has the turn.
///
/// # Errors
/// No arbiter, or its refusal.
pub fn acquire(args: &AcquireTurn) -> Result<(String, bool)> {
    let dir = RuntimeDir::find(&Surroundings::of_this_process())?;
    let job = job_of(args.job.as_deref())?;
    let is_own = args.job.is_none();
    let ends = Instant::now() + args.timeout;
    // An arbiter that is restarted forgets who waits: they ask again.
    let mut away: Option<Instant> = None;
    let mut was_there = is_own;
    let acquired = loop {
        let left = ends.saturating_duration_since(Instant::now());
        let acquire = Acquire {
            group: args.group.clone().unwrap_or_default(),
            timeout_ms: u64::try_from(left.as_millis()).unwrap_or(u64::MAX).max(1),
        };
        let mut reached = false;
        let asked = connect::patient(&dir, left).and_then(|mut client| {
            reached = true;
            client.acquire(&job, &acquire).map_err(Unreachable::from)
        });
        let error = match asked {
            Ok(acquired) => break acquired,
            Err(error) => error,
        };
        if reached {
            (away, was_there) = (None, true);
        }
        let since = *away.get_or_insert_with(Instant::now);
        let comes_back = was_there && is_passing(&error) && since.elapsed() < RESTART;
        if !comes_back || Instant::now() >= ends {
            return Err(refused(error).into());
        }
        thread::sleep(AGAIN);
    };
    let done = acquired.acquired;
    if args.json {
        return Ok((json::object(serde_json::to_value(&acquired)?), done));
    }
    Ok((acquired_line(&acquired), done))
}

/// What to print.
///
/// # Errors
/// No arbiter, or its refusal.
pub fn give_up(args: &YieldTurn) -> Result<String> {
    let dir = RuntimeDir::find(&Surroundings::of_this_process())?;
    let job = job_of(args.job.as_deref())?;
    let give_up = GiveUp {
        group: args.group.clone().unwrap_or_default(),
    };
    // Not asked again where the answer is lost: it would be that there is no turn to give up.
    let mut client = connect::existing(&dir).map_err(refused)?;
    let yielded = client
        .give_up(&job, &give_up)
        .map_err(|error| refused(error.into()))?;
    if args.json {
        return Ok(json::object(serde_json::to_value(&yielded)?));
    }
    Ok(yielded_line(&yielded))
}

/// What to print.
///
/// # Errors
/// No arbiter.
pub fn list(args: &ListGroups) -> Result<String> {
    let dir = RuntimeDir::find(&Surroundings::of_this_process())?;
    let groups = match connect::ask(|| connect::existing(&dir), Client::groups) {
        Ok(groups) => groups,
        Err(error) if error.is_absence() => Vec::new(),
        Err(error) => return Err(error.into()),
    };
    if args.json {
        let groups = serde_json::to_value(&groups)?;
        return Ok(json::object(serde_json::json!({ "groups": groups })));
    }
    Ok(text_of(&groups))
}

/// Serves until its socket is broken.
///
/// # Errors
/// It cannot listen, or not any more.
pub fn timeslice(args: &Timeslice) -> Result<String> {
    let dir = RuntimeDir::find(&Surroundings::of_this_process())?;
    dir.verify(nix::unistd::geteuid().as_raw())?;
    let path = match &args.socket {
        Some(path) => path.clone(),
        None => dir.path().join("timeslice.sock"),
    };
    kubernetes::timeslice::serve(&path, &dir.api_socket())?;
    Ok(String::new())
}

/// The job that is named, or the one that this process is part of.
fn job_of(named: Option<&str>) -> anyhow::Result<String> {
    let own = || env::var("SUBLET_JOB").ok().filter(|name| !name.is_empty());
    named.map(str::to_owned).or_else(own).ok_or_else(|| {
        anyhow!("this process is part of no job: name one, as `sublet ps` shows it, or start the command with `sublet run`")
    })
}

/// There is no arbiter just now, and there may be one in a moment.
fn is_passing(error: &Unreachable) -> bool {
    matches!(error, Unreachable::Client(error) if error.is_end() || error.is_absence())
}

fn refused(error: Unreachable) -> anyhow::Error {
    match error {
        Unreachable::Client(ClientError::Refused(refusal)) => {
            anyhow!("the arbiter refused: {refusal}")
        }
        error => error.into(),
    }
}

fn seconds(ms: u64) -> f64 {
    // CAST: for people.
    ms as f64 / 1e3
}

fn acquired_line(acquired: &Acquired) -> String {
    let Acquired { job, group, .. } = acquired;
    let waited = seconds(acquired.waited_ms);
    match (acquired.acquired, acquired.held_before, acquired.restored) {
        (false, ..) if acquired.waits_for.is_empty() => {
            format!("{job} has no turn of {group} after {waited:.1} s\n")
        }
        (false, ..) => {
            let why = &acquired.waits_for;
            format!("{job} has no turn of {group} after {waited:.1} s: {why}\n")
        }
        (true, true, _) => format!("{job} has the turn of {group} already\n"),
        (true, false, true) => {
            format!("{job} has the turn of {group} after {waited:.1} s, and its memory is back\n")
        }
        (true, false, false) => format!("{job} has the turn of {group} after {waited:.1} s\n"),
    }
}

fn yielded_line(yielded: &Yielded) -> String {
    let Yielded { job, group, .. } = yielded;
    match yielded.waiting {
        0 => {
            format!("{job} has given the turn of {group} up; nobody waits, and its memory stays\n")
        }
        1 => format!("{job} has given the turn of {group} up; 1 job waits\n"),
        jobs => format!("{job} has given the turn of {group} up; {jobs} jobs wait\n"),
    }
}

fn text_of(groups: &[GroupStatus]) -> String {
    if groups.is_empty() {
        return "no groups\n".into();
    }
    let mut table = Table::new(&[
        ("GROUP", Align::Left),
        ("USER", Align::Left),
        ("STATE", Align::Left),
        ("TURN", Align::Left),
        ("WAITING", Align::Left),
        ("OTHERS", Align::Left),
    ]);
    let or_none = |text: String| if text.is_empty() { "-".into() } else { text };
    for group in groups {
        let holder = group.holder.clone().unwrap_or_default();
        let others = group.members.iter().map(|member| member.job.as_str());
        let others =
            others.filter(|job| *job != holder && !group.waiting.iter().any(|one| one == job));
        let others: Vec<&str> = others.collect();
        let user = match group.user.as_str() {
            "" => group.uid.to_string(),
            user => user.to_owned(),
        };
        table.row(vec![
            group.name.clone(),
            user,
            group.state.as_str().to_owned(),
            or_none(holder),
            or_none(group.waiting.join(", ")),
            or_none(others.join(", ")),
        ]);
    }
    table.render()
}

#[cfg(test)]
mod tests {
    use control::{GroupMember, GroupState};

    use super::*;

    #[test]
    fn a_line_tells_what_came_of_it() {
        let mut acquired = Acquired {
            job: "a".into(),
            group: "rl".into(),
            waited_ms: 1250,
            ..Acquired::default()
        };
        assert_eq!(
            acquired_line(&acquired),
            "a has no turn of rl after 1.2 s\n"
        );
        acquired.waits_for = "job `b` has the turn".into();
        assert_eq!(
            acquired_line(&acquired),
            "a has no turn of rl after 1.2 s: job `b` has the turn\n"
        );
        acquired.acquired = true;
        acquired.restored = true;
        assert_eq!(
            acquired_line(&acquired),
            "a has the turn of rl after 1.2 s, and its memory is back\n"
        );
        let yielded = Yielded {
            job: "a".into(),
            group: "rl".into(),
            waiting: 2,
            stays: false,
        };
        assert_eq!(
            yielded_line(&yielded),
            "a has given the turn of rl up; 2 jobs wait\n"
        );
    }

    #[test]
    fn groups_are_a_table() {
        let member = |job: &str| GroupMember {
            job: job.into(),
            ..GroupMember::default()
        };
        let group = GroupStatus {
            name: "rl".into(),
            uid: 7,
            state: GroupState::Held,
            holder: Some("a".into()),
            waiting: vec!["b".into()],
            members: ["a", "b", "c"].map(member).into(),
            ..GroupStatus::default()
        };
        let text = text_of(&[group]);
        let line: Vec<&str> = text.lines().nth(1).unwrap().split_whitespace().collect();
        assert_eq!(line, ["rl", "7", "held", "a", "b", "c"]);
        assert_eq!(text_of(&[]), "no groups\n");
    }
}
