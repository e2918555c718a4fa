//! `sublet ps`: the jobs and devices of the arbiter, for people or as JSON.

use control::paths::{RuntimeDir, Surroundings};
use control::{
    ArbiterStatus, Client, ConfigStatus, DeviceStatus, EscapedProcess, JobStatus, PressureLevel,
    Profile, SliceMode, Turn, short_bytes,
};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::Duration;

use crate::args::Ps;
use crate::connect;
use crate::exit::Result;
use crate::table::{Align, Table};

/// TIMEOUT: an arbiter answers within milliseconds. One that does not is what somebody who asks
/// wants to know of, and what is said of it is to be there within a second, the start of this
/// program included.
const ANSWER: Duration = Duration::from_millis(800);

/// What to print.
///
/// # Errors
/// Where an arbiter is there and does not answer as it should. None being there is no error.
pub fn ps(args: &Ps) -> Result<String> {
    let dir = RuntimeDir::find(&Surroundings::of_this_process())?;
    let status = match connect::ask(|| connect::within(&dir, ANSWER), Client::status) {
        Ok(status) => Some(status),
        Err(error) if error.is_absence() => None,
        Err(error) => return Err(error.into()),
    };
    Ok(match (status, args.json) {
        (status, true) => crate::json::object(json_of(status)?),
        (Some(status), false) if args.profile => profiles_of(&status),
        (Some(status), false) => text_of(&status),
        (None, false) => format!(
            "no arbiter runs at {}, so there are no jobs\n",
            dir.api_socket().display()
        ),
    })
}

fn json_of(status: Option<ArbiterStatus>) -> serde_json::Result<Value> {
    let Some(mut status) = status else {
        return Ok(json!({ "arbiter": null, "devices": [], "jobs": [] }));
    };
    let devices = serde_json::to_value(std::mem::take(&mut status.devices))?;
    let jobs = serde_json::to_value(std::mem::take(&mut status.jobs))?;
    let mut arbiter = serde_json::to_value(status)?;
    if let Some(arbiter) = arbiter.as_object_mut() {
        arbiter.retain(|key, _| key != "devices" && key != "jobs");
    }
    Ok(json!({ "arbiter": arbiter, "devices": devices, "jobs": jobs }))
}

fn text_of(status: &ArbiterStatus) -> String {
    let mut text = String::new();
    for device in &status.devices {
        text += &device_line(device);
        text.push('\n');
        let escaped = |pid: u32| {
            let mut all = status.jobs.iter().flat_map(|job| &job.escaped);
            all.any(|process| process.pid == pid)
        };
        for process in device.unmanaged.iter().filter(|one| !escaped(one.pid)) {
            text += &format!(
                "  not managed: process {} ({}) has {}\n",
                process.pid,
                if process.command.is_empty() {
                    "unknown"
                } else {
                    &process.command
                },
                short_bytes(process.used_bytes)
            );
        }
    }
    for job in &status.jobs {
        for process in job
            .processes
            .iter()
            .filter(|one| !one.ungoverned.is_empty())
        {
            text += &format!(
                "  not governed: process {} ({}) of job `{}` uses {}, which the job may not use\n",
                process.pid,
                process.command,
                job.name,
                process.ungoverned.join(", ")
            );
        }
    }
    for job in &status.jobs {
        for process in &job.escaped {
            text += &escaped_line(job, process);
        }
    }
    text += &mistakes_of(&status.config);
    if status.jobs.is_empty() {
        text += "no jobs\n";
        return text;
    }
    let contained = status.jobs.iter().any(|job| job.container.is_some());
    let mut columns = vec![
        ("NAME", Align::Left),
        ("CLASS", Align::Left),
        ("STATE", Align::Left),
        ("SHARE", Align::Right),
        ("GOT", Align::Right),
        ("MEM", Align::Right),
        ("PEAK", Align::Right),
        ("LIMIT", Align::Right),
        ("PIDS", Align::Right),
        ("LAUNCHES", Align::Right),
        ("OOM", Align::Right),
        ("GPU", Align::Left),
        ("USER", Align::Left),
    ];
    if contained {
        columns.push(("CONTAINER", Align::Left));
    }
    let mut table = Table::new(&columns);
    for job in &status.jobs {
        let mut row = job_row(job);
        if contained {
            let container = job.container.as_ref();
            row.push(container.map_or("-", |one| one.short()).to_owned());
        }
        table.row(row);
    }
    text += &table.render();
    text += &residences_of(status);
    text += &groups_of(status);
    for job in &status.jobs {
        if let Some(living) = job.dormant_processes {
            text += &format!(
                "{} is dormant: its launcher has ended and {living} of its processes live; it has its limits again once one of them uses a GPU\n",
                job.name
            );
        }
        for capped in &job.capped {
            text += &format!("{}: {capped}\n", job.name);
        }
        if let Some(why) = &job.demoted {
            text += &format!("{} runs after all others: it {why}\n", job.name);
        }
        if let Some(why) = job.latency.as_ref().and_then(|it| it.unmet.as_ref()) {
            text += &format!("{}: its latency target is not met: {why}\n", job.name);
        }
        for process in &job.processes {
            if let Some(way) = &process.followed_by {
                text += &format!(
                    "{}: the driver of process {} ({}) gives no completion marks; its work is followed by {way}\n",
                    job.name, process.pid, process.command
                );
            }
        }
    }
    text
}

/// What is wrong with the quota files as they are now; empty where nothing is.
pub fn mistakes_of(config: &ConfigStatus) -> String {
    let lines = config.errors.iter();
    lines
        .map(|error| format!("quota file not in force: {error}\n"))
        .collect()
}

/// The line about a process that no limit held for.
pub fn escaped_line(job: &JobStatus, process: &EscapedProcess) -> String {
    let gpus: Vec<String> = process.devices.iter().map(u32::to_string).collect();
    format!(
        "  escaped: process {} ({}) of job `{}` used GPU {} outside its limits ({}): {}; keep LD_PRELOAD and SUBLET_* as `sublet run` sets them, or start it by a `sublet run` of its own\n",
        process.pid,
        process.command,
        job.name,
        gpus.join(", "),
        short_bytes(process.used_bytes),
        process.reason
    )
}

/// A line for each group of jobs that take turns.
fn groups_of(status: &ArbiterStatus) -> String {
    let mut groups: BTreeMap<(&str, &str), Vec<String>> = BTreeMap::new();
    for job in &status.jobs {
        if let (Some(group), Some(turn)) = (&job.group, job.turn) {
            let what = match turn {
                Turn::Holds => "has the turn",
                Turn::Comes => "is about to have it",
                Turn::Waits => "waits for it",
                Turn::None => "has not asked for it",
                Turn::Unknown => "may wait for it",
            };
            let members = groups.entry((group, &job.user)).or_default();
            members.push(format!("{} {what}", job.name));
        }
    }
    let line = |((group, user), members): (&(&str, &str), &Vec<String>)| {
        format!("group {group} of {user}: {}\n", members.join(", "))
    };
    groups.iter().map(line).collect()
}

/// Where the memory of evictable jobs is; nothing where there are none.
fn residences_of(status: &ArbiterStatus) -> String {
    let mut table = Table::new(&[
        ("EVICTABLE", Align::Left),
        ("WHERE", Align::Left),
        ("ON GPU", Align::Right),
        ("AWAY", Align::Right),
        ("FIXED", Align::Right),
        ("HOST", Align::Right),
        ("OUT", Align::Right),
        ("BACK", Align::Right),
        ("WHY", Align::Left),
    ]);
    let mut any = false;
    for job in &status.jobs {
        let Some(residence) = &job.residence else {
            continue;
        };
        any = true;
        let away = residence
            .evictable_bytes
            .saturating_sub(residence.resident_bytes);
        table.row(vec![
            job.name.clone(),
            residence.state.as_str().into(),
            short_bytes(residence.resident_bytes),
            short_bytes(away),
            short_bytes(residence.fixed_bytes),
            short_bytes(residence.host_bytes),
            residence.evictions.to_string(),
            residence.restores.to_string(),
            if residence.reason.is_empty() {
                "-".into()
            } else {
                residence.reason.clone()
            },
        ]);
    }
    if any { table.render() } else { String::new() }
}

/// What is known of each job's iterations.
fn profiles_of(status: &ArbiterStatus) -> String {
    if status.jobs.is_empty() {
        return "no jobs\n".into();
    }
    let mut table = Table::new(&[
        ("NAME", Align::Left),
        ("STATE", Align::Left),
        ("FOUND", Align::Left),
        ("SURE", Align::Right),
        ("ITERATIONS", Align::Right),
        ("PERIOD", Align::Right),
        ("COV", Align::Right),
        ("LAUNCHES", Align::Right),
        ("DEVICE", Align::Right),
        ("BUSY", Align::Right),
        ("COPY/S", Align::Right),
        ("COPYING", Align::Right),
        ("PERSISTENT", Align::Right),
        ("EPHEMERAL", Align::Right),
        ("SOLO", Align::Right),
        ("SLOWDOWN", Align::Right),
    ]);
    for job in &status.jobs {
        table.row(profile_row(job));
    }
    table.render()
}

fn profile_row(job: &JobStatus) -> Vec<String> {
    let unknown = Profile::default();
    let profile = job.profile.as_deref().unwrap_or(&unknown);
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".into());
    let percent = |part: f64| format!("{:.0}%", part * 100.0);
    let found = match (profile.found, profile.periodic) {
        (control::IterationSource::None, Some(false)) => "not periodic",
        (control::IterationSource::None, _) => "-",
        (found, _) => found.as_str(),
    };
    vec![
        job.name.clone(),
        job.state.as_str().into(),
        found.into(),
        format!("{:.2}", profile.confidence),
        profile.iterations.to_string(),
        or_dash(profile.iteration_ns.map(short_time)),
        or_dash(profile.iteration_cov.map(|cov| format!("{cov:.2}"))),
        or_dash(
            profile
                .launches_per_iteration
                .map(|launches| format!("{launches:.1}")),
        ),
        or_dash(profile.device_ns_per_iteration.map(short_time)),
        percent(profile.busy_fraction),
        // CAST: rounded down.
        short_bytes(profile.copy_bytes_per_s as u64),
        or_dash(profile.copy_fraction.map(percent)),
        or_dash(profile.persistent_bytes.map(short_bytes)),
        or_dash(profile.ephemeral_bytes.map(short_bytes)),
        or_dash(profile.solo_iteration_ns.map(short_time)),
        or_dash(profile.slowdown.map(|slowdown| format!("{slowdown:.2}"))),
    ]
}

/// Three figures or so, for people.
pub fn short_time(ns: u64) -> String {
    // CAST: for people.
    match ns as f64 {
        ns if ns < 1e6 => format!("{:.1}us", ns / 1e3),
        ns if ns < 1e9 => format!("{:.2}ms", ns / 1e6),
        ns => format!("{:.2}s", ns / 1e9),
    }
}

fn device_line(device: &DeviceStatus) -> String {
    // CAST: slices end at a second.
    let ms = |us: u64| us as f64 / 1000.0;
    let slices = match (device.quantum_min_us, device.slice_us) {
        (min_us, 0) if min_us != 0 && min_us != device.quantum_us => {
            format!("{} to {}", ms(min_us), ms(device.quantum_us))
        }
        (_, 0) => ms(device.quantum_us).to_string(),
        // To a hundredth: they follow what a hand-over costs.
        (_, slice_us) => ms(slice_us / 10 * 10).to_string(),
    };
    format!(
        "GPU {}: {}{}, {}, {}{}, busy {:.0}%, held by {}{}",
        device.index,
        device.name,
        if device.simulated && !device.name.contains("simulated") {
            " (simulated)"
        } else {
            ""
        },
        short_bytes(device.total_bytes),
        device.mode.as_str(),
        match device.mode {
            SliceMode::Auto => format!(" ({})", device.running_reason),
            // It has a reason for slices only.
            SliceMode::Lend if !device.running_reason.is_empty() =>
                format!(" ({})", device.running_reason),
            SliceMode::Concurrent | SliceMode::Lend => String::new(),
            _ if device.quantum_us > 0 => format!(" slices of {slices} ms"),
            _ => String::new(),
        },
        device.busy_fraction * 100.0,
        device.holder.as_deref().unwrap_or("nobody"),
        pressure_of(device),
    )
}

/// What goes into moving memory, where anything does.
fn pressure_of(device: &DeviceStatus) -> String {
    let pressure = &device.pressure;
    if pressure.switches == 0 {
        return String::new();
    }
    let level = match pressure.level {
        PressureLevel::Calm => String::new(),
        level => format!(" ({}, terms x{})", level.as_str(), pressure.stretch),
    };
    format!(
        ", moving memory {:.0}%{level}",
        pressure.switching_fraction * 100.0
    )
}

fn job_row(job: &JobStatus) -> Vec<String> {
    let mut gpus: Vec<String> = job
        .devices
        .iter()
        .map(|device| device.index.to_string())
        .collect();
    if gpus.is_empty() {
        gpus.push("-".into());
    }
    vec![
        job.name.clone(),
        job.class.to_string(),
        job.state.as_str().into(),
        job.share_asked
            .map_or("-".into(), |share| format!("{share:.2}")),
        // Of no device at all the sum is minus zero.
        format!("{:.2}", job.share_got_recent + 0.0),
        short_bytes(job.mem_used_bytes),
        short_bytes(job.mem_peak_bytes),
        job.mem_limit_bytes.map_or("-".into(), short_bytes),
        job.processes.len().to_string(),
        job.launches.to_string(),
        job.oom_count.to_string(),
        gpus.join(","),
        if job.user.is_empty() {
            job.uid.to_string()
        } else {
            job.user.clone()
        },
    ]
}

#[cfg(test)]
mod tests {
    use control::{Class, JobDevice, JobState, Pressure, ProcessStatus, Residence, ResidenceState};

    use super::*;

    fn status() -> ArbiterStatus {
        ArbiterStatus {
            pid: 9,
            devices: vec![DeviceStatus {
                name: "NVIDIA H200".into(),
                total_bytes: 141 << 30,
                simulated: true,
                mode: SliceMode::Exclusive,
                quantum_us: 2500,
                busy_fraction: 0.996,
                holder: Some("train".into()),
                ..DeviceStatus::default()
            }],
            jobs: vec![
                JobStatus {
                    name: "train".into(),
                    state: JobState::Running,
                    share_asked: Some(0.75),
                    share_got_recent: 0.748,
                    mem_used_bytes: 3 << 29,
                    mem_peak_bytes: 2 << 30,
                    mem_limit_bytes: Some(8 << 30),
                    launches: 123_456,
                    user: "alice".into(),
                    devices: vec![JobDevice::default()],
                    processes: vec![ProcessStatus::default()],
                    ..JobStatus::default()
                },
                JobStatus {
                    name: "infer-with-a-name".into(),
                    class: Class::Opportunistic,
                    share_got_recent: -0.0,
                    uid: 1001,
                    ..JobStatus::default()
                },
            ],
            ..ArbiterStatus::default()
        }
    }

    #[test]
    fn evictable_jobs_show_where_their_memory_is() {
        let mut status = status();
        status.devices[0].pressure = Pressure {
            level: PressureLevel::Pressed,
            switching_fraction: 0.174,
            switches: 3,
            stretch: 2,
            ..Pressure::default()
        };
        status.jobs[0].residence = Some(Box::new(Residence {
            state: ResidenceState::Evicted,
            evictable_bytes: 3 << 30,
            fixed_bytes: 2 << 20,
            host_bytes: 3 << 30,
            evictions: 2,
            restores: 1,
            reason: "waits for the end of another job's term".into(),
            ..Residence::default()
        }));
        let text = text_of(&status);
        assert!(
            text.contains("held by train, moving memory 17% (pressed, terms x2)\n"),
            "{text}"
        );
        assert!(
            text.contains(
                "\
EVICTABLE  WHERE    ON GPU  AWAY  FIXED  HOST  OUT  BACK  WHY
train      evicted      0B  3GiB   2MiB  3GiB    2     1  waits for the end of another job's term
"
            ),
            "{text}"
        );
    }

    #[test]
    fn the_length_of_a_slice_is_the_last_one_or_what_it_may_be() {
        let mut device = DeviceStatus {
            quantum_min_us: 2000,
            quantum_us: 50_000,
            ..DeviceStatus::default()
        };
        assert!(device_line(&device).contains("slices of 2 to 50 ms"));
        device.slice_us = 6168;
        assert!(device_line(&device).contains("slices of 6.16 ms"));
        (device.slice_us, device.quantum_us) = (0, 2000);
        assert!(device_line(&device).contains("slices of 2 ms"));
    }

    #[test]
    fn a_dormant_job_shows_what_lives_of_it() {
        let mut status = status();
        status.jobs[0].state = JobState::Dormant;
        status.jobs[0].dormant_processes = Some(2);
        let text = text_of(&status);
        assert!(
            text.contains("guaranteed     dormant")
                && text.contains("train is dormant: its launcher has ended and 2 of its processes"),
            "{text}"
        );
    }

    #[test]
    fn the_table_is_aligned() {
        assert_eq!(
            text_of(&status()),
            "\
GPU 0: NVIDIA H200 (simulated), 141GiB, exclusive slices of 2.5 ms, busy 100%, held by train
NAME               CLASS          STATE     SHARE   GOT      MEM  PEAK  LIMIT  PIDS  LAUNCHES  OOM  GPU  USER
train              guaranteed     running    0.75  0.75  1.50GiB  2GiB   8GiB     1    123456    0  0    alice
infer-with-a-name  opportunistic  starting      -  0.00       0B    0B      -     0         0    0  -    1001
"
        );
    }

    #[test]
    fn profiles_are_a_table_of_their_own() {
        let mut status = status();
        status.jobs[0].profile = Some(Box::new(Profile {
            found: control::IterationSource::Detected,
            periodic: Some(true),
            confidence: 0.985,
            iterations: 1200,
            iteration_ns: Some(12_345_678),
            iteration_cov: Some(0.031),
            launches_per_iteration: Some(17.2),
            device_ns_per_iteration: Some(950_000),
            busy_fraction: 0.77,
            copy_bytes_per_s: 3.0 * 1024.0 * 1024.0,
            persistent_bytes: Some(1 << 30),
            ephemeral_bytes: Some(0),
            solo_iteration_ns: Some(6_000_000_000),
            slowdown: Some(2.057),
            ..Profile::default()
        }));
        status.jobs[1].profile = Some(Box::new(Profile {
            periodic: Some(false),
            ..Profile::default()
        }));
        assert_eq!(
            profiles_of(&status),
            "\
NAME               STATE     FOUND         SURE  ITERATIONS   PERIOD   COV  LAUNCHES   DEVICE  BUSY  COPY/S  COPYING  PERSISTENT  EPHEMERAL   SOLO  SLOWDOWN
train              running   detected      0.98        1200  12.35ms  0.03      17.2  950.0us   77%    3MiB        -        1GiB         0B  6.00s      2.06
infer-with-a-name  starting  not periodic  0.00           0        -     -         -        -    0%      0B        -           -          -      -         -
"
        );
    }

    #[test]
    fn what_a_device_chose_and_who_misbehaves_is_shown() {
        let mut status = status();
        status.devices[0].mode = SliceMode::Auto;
        status.devices[0].running_reason = "exclusive: nothing is known yet".into();
        status.jobs[1].demoted = Some("floods the arbiter with requests".into());
        let text = text_of(&status);
        assert!(text.contains(", auto (exclusive: nothing is known yet), busy 100%"));
        assert!(text.ends_with(
            "\ninfer-with-a-name runs after all others: it floods the arbiter with requests\n"
        ));
    }

    #[test]
    fn a_device_that_lends_says_so_and_why_it_does_not() {
        let mut status = status();
        let device = &mut status.devices[0];
        (device.mode, device.running) = (SliceMode::Lend, SliceMode::Lend);
        assert_eq!(
            device_line(device),
            "GPU 0: NVIDIA H200 (simulated), 141GiB, lend, busy 100%, held by train"
        );
        device.running = SliceMode::Exclusive;
        device.running_reason = "slices: the jobs' memory does not fit at once".into();
        assert_eq!(
            device_line(device),
            "GPU 0: NVIDIA H200 (simulated), 141GiB, lend (slices: the jobs' memory does not fit \
             at once), busy 100%, held by train"
        );
    }

    #[test]
    fn an_arbiter_without_jobs_says_so() {
        let mut status = status();
        status.jobs.clear();
        assert!(text_of(&status).ends_with("\nno jobs\n"));
    }

    #[test]
    fn json_has_three_parts_whether_or_not_an_arbiter_runs() {
        let value = json_of(None).unwrap();
        assert_eq!(
            value.to_string(),
            r#"{"arbiter":null,"devices":[],"jobs":[]}"#
        );
        let value = json_of(Some(status())).unwrap();
        assert_eq!(value["arbiter"]["pid"], 9);
        assert_eq!(value["arbiter"].get("jobs"), None);
        assert_eq!(value["jobs"][1]["class"], "opportunistic");
        assert_eq!(value["devices"][0]["total_bytes"], 141u64 << 30);
    }
}
