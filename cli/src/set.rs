//! `sublet set`: a running job's terms, how a device is run, or the quota file read again.

use anyhow::anyhow;
use control::paths::{RuntimeDir, Surroundings};
use control::{
    Change, Client, ClientError, DeviceSettings, DeviceStatus, JobStatus, Reloaded, exact_bytes,
};

use crate::args::{OneOrAll, Set};
use crate::connect::{self, Unreachable};
use crate::exit::Result;
use crate::settings;

/// What to print.
///
/// # Errors
/// Nothing to change, no arbiter, or the arbiter's refusal.
pub fn set(args: &Set) -> Result<String> {
    let dir = RuntimeDir::find(&Surroundings::of_this_process())?;
    let ask = || connect::existing(&dir);
    if args.reload {
        let reloaded = connect::ask(ask, Client::reload).map_err(refused)?;
        return Ok(reload_line(&reloaded));
    }
    if let Some(device) = &args.device {
        let settings = settings_of(args);
        if settings.is_empty() {
            let what = "nothing to change on a device: give --mode, --policy, --holders, --quantum-ms, --quantum-min-ms, --early-wake or --misbehaviour";
            return Err(anyhow!(what).into());
        }
        let device = match device {
            OneOrAll::One(device) => Some(device.clone()),
            OneOrAll::All => None,
        };
        let devices = connect::ask(ask, |arbiter| {
            arbiter.set_device(device.clone(), settings.clone())
        })
        .map_err(refused)?;
        return Ok(devices.iter().map(device_line).collect());
    }
    let name = args.name.as_deref().unwrap_or_default();
    if !settings_of(args).is_empty() {
        let what = format!(
            "mode, policy, quantum, early wake and misbehaviour are a device's, not the job `{name}`'s: name a device with --device instead"
        );
        return Err(anyhow!(what).into());
    }
    let change = change_of(args);
    if change.is_empty() {
        let what = format!(
            "nothing to change on `{name}`: give --mem, --share, --share-min, --share-max, --class, --gang, --deadline, --work, --pause, --resume, --overflow, --host-memory, --resize or --solo-iteration-us"
        );
        return Err(anyhow!(what).into());
    }
    let job = connect::ask(ask, |arbiter| arbiter.set(name, change)).map_err(refused)?;
    Ok(line_of(&job))
}

fn refused(error: Unreachable) -> anyhow::Error {
    match error {
        Unreachable::Client(ClientError::Refused(refusal)) => {
            anyhow!("the arbiter refused the change: {refusal}")
        }
        error => error.into(),
    }
}

fn change_of(args: &Set) -> Change {
    Change {
        mem: args.mem,
        share: args.share,
        share_min: args.share_min,
        share_max: args.share_max,
        class: args.class,
        gang: args.gang,
        deadline_unix_ms: args.deadline.map(settings::unix_ms_in),
        work_ns: args.work.map(settings::nanos),
        paused: (args.pause || args.resume).then_some(args.pause),
        solo_iteration_us: args.solo_iteration_us,
        overflow: args.overflow,
        host_memory: args.host_memory,
        resize: args.resize,
    }
}

fn settings_of(args: &Set) -> DeviceSettings {
    // CAST: the flag's range ends at a second.
    let micros = |ms: f64| (ms * 1000.0).round() as u64;
    DeviceSettings {
        mode: args.mode,
        policy: args.policy.clone(),
        holders: args.holders,
        quantum_min_us: args.quantum_min_ms.map(micros),
        quantum_max_us: args.quantum_ms.map(micros),
        early_wake: args.early_wake,
        misbehaviour: args.misbehaviour,
    }
}

fn reload_line(reloaded: &Reloaded) -> String {
    match &reloaded.file {
        None => "there is no quota file; defaults are in force\n".into(),
        Some(file) => format!(
            "{} is in force: {} device and {} tenant sections\n",
            file.display(),
            reloaded.device_rules,
            reloaded.tenant_rules
        ),
    }
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

fn line_of(job: &JobStatus) -> String {
    let bound = |name: &str, bound: Option<f64>| {
        bound.map_or_else(String::new, |share| format!(", {name} {share}"))
    };
    format!(
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
    )
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
