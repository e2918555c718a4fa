//! `sublet doctor`: what is here, what is in force, and whether anything gets past the preload
//! library.
//!
//! Without a command it looks and changes nothing. With one, it runs the command as `sublet run`
//! does, with a diagnosis switched on, and watches its processes: what the library let through, in
//! which ways it was reached, which processes it is not in and why. It judges; it repairs nothing.

mod host;
mod pages;
mod process;
mod text;
mod watch;

use std::env;
use std::path::Path;

use anyhow::Context;
use control::paths::{RuntimeDir, Surroundings};
use control::{ArbiterStatus, Client};
use serde_json::{Value, json};

use crate::args::Doctor;
use crate::config::{Config, Places};
use crate::connect;
use crate::exit::Result;
use crate::run::driver::{self, Driver, Wish};
use crate::run::install::Install;
use crate::unmanaged::{command_line, job_of};

/// An arbiter that may have fewer descriptors does without what it can do without.
const FEW_DESCRIPTORS: u64 = 64;
/// Exit code where something gets past the library, or would.
pub const ESCAPES: u8 = 1;

/// What to print, and the exit code.
///
/// # Errors
/// Where sublet is not installed as it must be, or the command cannot be started.
pub fn doctor(args: &Doctor) -> Result<(String, u8)> {
    let executable = env::current_exe().context("cannot tell where `sublet` itself lies")?;
    let install = Install::find(&executable, |name| env::var_os(name))?;
    let wish = match &args.driver {
        Some(path) => Wish::This(path),
        None if args.sim => Wish::Simulated,
        None => Wish::Any,
    };
    let driver = driver::find(wish, &install, env::var_os("LD_LIBRARY_PATH").as_deref())?;
    let config = Config::find(None, &Places::of_a_user())?;
    let watched = if args.command.is_empty() {
        None
    } else {
        Some(watch::run(args, &executable, &install, &driver)?)
    };
    // Asked last: a job's arbiter is there then, and may have been started for it.
    let status = arbiter()?;
    let (devices, nvml) = devices(&driver, status.as_ref());
    let report = json!({
        "sublet": {
            "version": env!("CARGO_PKG_VERSION"),
            "executable": executable,
            "library": install.library(),
        },
        "driver": {
            "path": driver.path,
            "file": std::fs::canonicalize(&driver.path).ok(),
            "simulated": driver.simulated.is_some(),
            "reason": driver.simulated.map(driver::Simulated::reason),
            "cuda_version": host::cuda_version(&driver.path),
        },
        "devices": devices,
        "nvml_error": nvml,
        "arbiter": status.as_ref().map(|status| json!({
            "pid": status.pid,
            "version": status.version,
            "embedded": status.embedded,
            "runtime_dir": status.runtime_dir,
            "descriptor_limit": status.descriptor_limit,
        })),
        "quota_file": config.paths.first(),
        "quota_files": status.as_ref().map(|status| &status.config),
        "quotas": status.as_ref().map_or(Value::Array(Vec::new()), quotas),
        "asked": asked(|name| env::var_os(name)),
        "mps": host::mps(|name| env::var_os(name)),
        "container": host::container(Path::new("/proc/self")),
        "command": watched.map(|watched| watched.report()),
    });
    let findings = findings(&report);
    let code = if findings
        .iter()
        .any(|finding| finding.level == Level::Problem)
    {
        ESCAPES
    } else {
        0
    };
    let printed = if args.json {
        let mut report = report;
        report["findings"] = findings.iter().map(Finding::json).collect();
        crate::json::object(report)
    } else {
        text::of(&report, &findings)
    };
    Ok((printed, code))
}

/// Variables that ask for something, and which of them count.
fn asked(var: impl Fn(&str) -> Option<std::ffi::OsString>) -> Value {
    match control::environment::asked(var) {
        Ok(asked) => asked
            .said
            .iter()
            .map(|said| {
                json!({
                    "setting": said.key,
                    "variable": said.variable,
                    "value": said.value,
                    "counts": asked.counts(said),
                })
            })
            .collect(),
        Err(error) => json!({ "error": error.to_string() }),
    }
}

fn arbiter() -> Result<Option<ArbiterStatus>> {
    let dir = RuntimeDir::find(&Surroundings::of_this_process())?;
    match connect::ask(|| connect::existing(&dir), Client::status) {
        Ok(status) => Ok(Some(status)),
        Err(error) if error.is_absence() => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// By NVML's word, with the processes on each and the job that each is part of; and what NVML
/// refused.
fn devices(driver: &Driver, status: Option<&ArbiterStatus>) -> (Value, Option<String>) {
    let simulated = driver.simulated.is_some();
    let of_simulated = simulated.then_some(driver.path.as_path());
    let found = match arbiter::nvml::look(of_simulated) {
        Ok(found) => found,
        Err(reason) => return (json!([]), Some(reason)),
    };
    let devices = found.iter().enumerate().map(|(index, device)| {
        let processes: Value = device
            .process_bytes
            .iter()
            .map(|(pid, used_bytes)| {
                let at = format!("/proc/{pid}");
                json!({
                    "pid": pid,
                    "used_bytes": used_bytes,
                    "command": command_line(*pid),
                    "job": job_of(status, *pid),
                    "container": host::container(Path::new(&at)),
                })
            })
            .collect();
        json!({
            "index": index,
            "uuid": device.uuid_text(),
            "name": device.name,
            "total_bytes": device.total_bytes,
            "free_bytes": device.free_bytes,
            "mig": device.mig,
            "simulated": simulated,
            "processes": processes,
        })
    });
    (devices.collect(), None)
}

fn quotas(status: &ArbiterStatus) -> Value {
    let living = status
        .jobs
        .iter()
        .filter(|job| job.state != control::JobState::Gone);
    living
        .map(|job| {
            json!({
                "job": job.name,
                "class": job.class,
                "share": job.share_asked,
                "mem_limit_bytes": job.mem_limit_bytes,
                "mem_used_bytes": job.mem_used_bytes,
                "processes": job.processes.len(),
                "ungoverned": ungoverned(job),
                "followed": followed(job),
            })
        })
        .collect()
}

/// Processes of a job that use devices which the job may not use.
fn ungoverned(job: &control::JobStatus) -> Value {
    let processes = job.processes.iter();
    processes
        .filter(|process| !process.ungoverned.is_empty())
        .map(|process| json!({ "pid": process.pid, "command": process.command, "devices": process.ungoverned }))
        .collect()
}

/// Processes of a job whose driver gives no completion marks.
fn followed(job: &control::JobStatus) -> Value {
    let processes = job.processes.iter();
    processes
        .filter_map(|process| {
            let by = process.followed_by.as_ref()?;
            Some(json!({ "pid": process.pid, "command": process.command, "by": by }))
        })
        .collect()
}

/// How much a finding matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Level {
    /// Good to know.
    Note,
    /// A promise is weaker than it looks.
    Warning,
    /// Something is outside quota and share.
    Problem,
}

impl Level {
    fn as_str(self) -> &'static str {
        match self {
            Self::Note => "note",
            Self::Warning => "warning",
            Self::Problem => "problem",
        }
    }
}

#[derive(Debug)]
struct Finding {
    level: Level,
    text: String,
}

impl Finding {
    fn json(&self) -> Value {
        json!({ "level": self.level.as_str(), "text": self.text })
    }
}

/// Whether two settings are about the same: memory, or time.
fn same_matter(one: &Value, other: &Value) -> bool {
    let matter = |said: &Value| {
        let key = said["setting"].as_str().unwrap_or_default().to_owned();
        if key.starts_with("share") {
            "share".into()
        } else {
            key
        }
    };
    matter(one) == matter(other)
}

fn findings(report: &Value) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut add = |level, text: String| findings.push(Finding { level, text });
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    if let Some(reason) = report["driver"]["reason"].as_str() {
        add(Level::Note, format!("the GPU is simulated: {reason}"));
    }
    if let Some(reason) = report["nvml_error"].as_str() {
        let text = "so who else is on the devices is not known, and quotas cannot be checked against the driver's figures";
        add(
            Level::Warning,
            format!("NVML does not answer ({reason}), {text}"),
        );
    }
    if let Some(error) = report["asked"]["error"].as_str() {
        add(Level::Warning, format!("no job would start: {error}"));
    }
    let asked = list(&report["asked"]);
    for said in asked.iter().filter(|said| said["counts"] == false) {
        let winners: Vec<String> = asked
            .iter()
            .filter(|one| one["counts"] == true && same_matter(one, said))
            .map(|one| word(&one["variable"]))
            .collect();
        let winner = winners.join(" and ");
        let text = format!(
            "{}={} does not count: {winner} beats it",
            word(&said["variable"]),
            word(&said["value"])
        );
        add(Level::Note, text);
    }
    let descriptors = report["arbiter"]["descriptor_limit"].as_u64();
    if let Some(limit) = descriptors.filter(|limit| *limit < FEW_DESCRIPTORS) {
        let text = "so few jobs run beside each other, and few commands are answered at a time: start it with a higher `ulimit -n`";
        add(
            Level::Warning,
            format!("the arbiter may have {limit} descriptors, {text}"),
        );
    }
    for error in list(&report["quota_files"]["errors"]) {
        let text = "those from before are in force";
        add(
            Level::Warning,
            format!("a quota file is wrong, {text}: {}", word(&error)),
        );
    }
    if report["quota_files"]["watch"] == "polling" {
        let text = "the kernel does not tell of changed quota files (fs.inotify.max_user_watches or max_user_instances is reached): they are looked at each second";
        add(Level::Note, text.into());
    }
    for device in list(&report["devices"]) {
        let index = &device["index"];
        if device["mig"] == true {
            let text = "is cut into MIG instances; sublet shares a whole device or one instance, and does not cut them";
            add(Level::Warning, format!("GPU {index} {text}"));
        }
        for process in list(&device["processes"]) {
            if !process["job"].is_null() {
                continue;
            }
            let command = word(&process["command"]);
            let place = process["container"]
                .as_str()
                .map_or(String::new(), |kind| format!(" in a container ({kind})"));
            let text = format!(
                "GPU {index}: process {} ({}){place} has {} and is part of no job: nobody limits it",
                process["pid"],
                if command.is_empty() {
                    "unknown"
                } else {
                    &command
                },
                control::short_bytes(process["used_bytes"].as_u64().unwrap_or_default()),
            );
            add(Level::Warning, text);
        }
    }
    for job in list(&report["quotas"]) {
        for process in list(&job["ungoverned"]) {
            let devices: Vec<String> = list(&process["devices"]).iter().map(word).collect();
            let text = format!(
                "process {} ({}) of job `{}` uses {}, which the job may not use: quota and share do not hold there",
                process["pid"],
                word(&process["command"]),
                word(&job["job"]),
                devices.join(", ")
            );
            add(Level::Problem, text);
        }
        for process in list(&job["followed"]) {
            let text = format!(
                "process {} ({}) of job `{}`: its driver refuses completion marks or loses them; its work is followed by {}, which costs it a \
                 thread and may be off by some tenths of a millisecond",
                process["pid"],
                word(&process["command"]),
                word(&job["job"]),
                word(&process["by"])
            );
            add(Level::Warning, text);
        }
    }
    if report["mps"]["daemon_pid"].is_number() {
        let text = "the MPS daemon runs: kernels of several jobs overlap, a fault of one ends all its clients, and grants are no longer exclusive";
        add(Level::Warning, text.into());
    }
    if let Some(kind) = report["container"].as_str() {
        let text = "the arbiter's directory and the library must be the same ones inside and outside, or each container has its own arbiter";
        add(Level::Note, format!("this is a container ({kind}): {text}"));
    }
    for escape in list(&report["command"]["escapes"]) {
        add(Level::Problem, word(&escape["text"]));
    }
    for process in list(&report["command"]["out_of_reach"]) {
        add(Level::Note, word(&process["text"]));
    }
    findings
}
