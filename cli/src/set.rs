//! `sublet set`, `pause`, `resume`, `device set` and `reload`: what is changed while jobs run.

use anyhow::anyhow;
use control::paths::{RuntimeDir, Surroundings};
use control::{
    Change, Client, ClientError, DeviceSettings, DeviceStatus, JobSettings, JobStatus, Settings,
    exact_bytes,
};
use serde_json::json;

use crate::args::{DeviceSet, Names, OneOrAll, Reload, Set};
use crate::connect::{self, Unreachable};
use crate::exit::Result;
use crate::flags::Flags;

/// What to print.
///
/// # Errors
/// Nothing to change, no arbiter, or the arbiter's refusal.
pub fn set(args: &Set) -> Result<String> {
    let change = Change {
        settings: args.settings.0.clone(),
        solo_iteration_us: args
            .solo_iteration
            .map(|time| u64::try_from(time.as_micros()).unwrap_or(u64::MAX)),
        resize: args.resize,
        paused: None,
    };
    if change.is_empty() {
        let what = format!(
            "nothing to change on `{}`: give {}, --resize or --solo-iteration",
            args.name,
            Flags::<JobSettings, true>::names()
        );
        return Err(anyhow!(what).into());
    }
    let job = ask(|arbiter| arbiter.set(&args.name, change.clone()))?;
    if args.json {
        return Ok(crate::json::object(json!({ "jobs": [job] })));
    }
    Ok(line_of(&job))
}

/// Pauses jobs, or resumes them; what to print.
///
/// # Errors
/// As [`set`]; those before the one that was refused are changed.
pub fn pause(args: &Names, paused: bool) -> Result<String> {
    let change = Change {
        paused: Some(paused),
        ..Change::default()
    };
    let mut jobs = Vec::new();
    for name in &args.names {
        jobs.push(ask(|arbiter| arbiter.set(name, change.clone()))?);
    }
    if args.json {
        return Ok(crate::json::object(json!({ "jobs": jobs })));
    }
    Ok(jobs.iter().map(line_of).collect())
}

/// What to print.
///
/// # Errors
/// As [`set`].
pub fn device(args: &DeviceSet) -> Result<String> {
    let settings = &args.settings.0;
    if settings.is_empty() {
        let names = Flags::<DeviceSettings, true>::names();
        return Err(anyhow!("nothing to change on a device: give one of {names}").into());
    }
    let device = match &args.device {
        OneOrAll::One(device) => Some(device.clone()),
        OneOrAll::All => None,
    };
    let devices = ask(|arbiter| arbiter.set_device(device.clone(), settings.clone()))?;
    if args.json {
        return Ok(crate::json::object(json!({ "devices": devices })));
    }
    Ok(devices.iter().map(device_line).collect())
}

/// What to print.
///
/// # Errors
/// As [`set`].
pub fn reload(args: &Reload) -> Result<String> {
    let reloaded = ask(Client::reload)?;
    if args.json {
        return Ok(crate::json::object(serde_json::to_value(reloaded)?));
    }
    if reloaded.files.is_empty() {
        return Ok("there is no quota file; defaults are in force\n".into());
    }
    let files = reloaded.files.iter().map(|file| file.display().to_string());
    let verb = if reloaded.files.len() == 1 {
        "is"
    } else {
        "are"
    };
    Ok(format!(
        "{} {verb} in force: {} device, {} user and {} job sections; running jobs with new terms: {}\n",
        files.collect::<Vec<_>>().join(", "),
        reloaded.device_rules,
        reloaded.user_rules,
        reloaded.job_rules,
        reloaded.jobs_changed,
    ))
}

/// What the arbiter answers to a change.
///
/// # Errors
/// As [`set`].
pub fn ask<T>(
    request: impl Fn(&mut Client) -> std::result::Result<T, ClientError>,
) -> anyhow::Result<T> {
    let dir = RuntimeDir::find(&Surroundings::of_this_process())?;
    connect::ask(|| connect::existing(&dir), request).map_err(|error| match error {
        Unreachable::Client(ClientError::Refused(refusal)) => {
            anyhow!("the arbiter refused the change: {refusal}")
        }
        error if error.is_absence() => anyhow!(
            "no arbiter runs at {}, so there is nothing to change: start a job with `sublet run`, or the host's arbiter with `sublet arbiter`; SUBLET_RUNTIME_DIR names another place",
            dir.api_socket().display()
        ),
        error => error.into(),
    })
}

fn device_line(device: &DeviceStatus) -> String {
    // CAST: slices end at a second.
    let ms = |us: u64| us as f64 / 1000.0;
    format!(
        "GPU {}: {}, policy {}, slices of {} to {} ms, early wake {}, misbehaviour: {}\n",
        device.index,
        device.mode,
        device.policy,
        ms(device.quantum_min_us),
        ms(device.quantum_us),
        if device.early_wake { "on" } else { "off" },
        device.misbehaviour,
    )
}

/// How a job stands.
pub fn line_of(job: &JobStatus) -> String {
    let bound = |name: &str, bound: Option<f64>| {
        bound.map_or_else(String::new, |share| format!(", {name} {share}"))
    };
    let mut text = format!(
        "{}: {}{}, share {}{}{}, memory limit {} ({} in use)\n",
        job.name,
        job.class,
        if job.paused { ", paused" } else { "" },
        job.share_asked
            .map_or("not asked for".into(), |share| share.to_string()),
        bound("at least", job.share_min),
        bound("at most", job.share_max),
        job.mem_limit_bytes.map_or("none".into(), exact_bytes),
        exact_bytes(job.mem_used_bytes),
    );
    for capped in &job.capped {
        text += &format!("{}: {capped}\n", job.name);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_tells_what_holds_now() {
        let mut job = JobStatus {
            name: "a".into(),
            share_asked: Some(0.5),
            mem_limit_bytes: Some(8 << 30),
            mem_used_bytes: 3 << 20,
            ..JobStatus::default()
        };
        assert_eq!(
            line_of(&job),
            "a: guaranteed, share 0.5, memory limit 8GiB (3MiB in use)\n"
        );
        job.share_asked = None;
        job.mem_limit_bytes = None;
        assert_eq!(
            line_of(&job),
            "a: guaranteed, share not asked for, memory limit none (3MiB in use)\n"
        );
        job.paused = true;
        job.share_min = Some(0.25);
        job.share_max = Some(0.75);
        assert!(line_of(&job).starts_with(
            "a: guaranteed, paused, share not asked for, at least 0.25, at most 0.75, "
        ));
    }
}
