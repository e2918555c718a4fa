//! What an experiment runs on: versions, driver, device and its clocks. Figures of two experiments
//! that differ in it are not compared.

use std::env;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, bail};
use serde_json::{Map, Value, json};

use super::plan::{Mode, Plan};
use super::runner::MPS_CONTROL;
use super::supervise::Guardian;
use crate::run::driver::Driver;

/// What is known of the host.
#[derive(Debug, Clone, PartialEq)]
pub struct Host {
    pub device: Value,
    /// What runs must agree in, with the plan.
    pub about: Value,
}

impl Host {
    /// Asks the driver in a process of its own, which leaves nothing of it in this one.
    ///
    /// # Errors
    /// Where no device answers, or not the one that is asked for.
    pub fn look(
        executable: &Path,
        guardian: &Guardian,
        driver: &Driver,
        device: &str,
        plan: &Plan,
    ) -> anyhow::Result<Self> {
        let mut command = Command::new(executable);
        command.args(["doctor", "--json"]);
        match driver.simulated {
            Some(_) => command.arg("--sim"),
            None => command.arg("--driver").arg(&driver.path),
        };
        command
            .env("SUBLET_RUNTIME_DIR", guardian.dir().join("none"))
            .env_remove("SUBLET_CONFIG")
            .current_dir(guardian.dir())
            .stdin(Stdio::null())
            .stderr(Stdio::piped());
        guardian.adopt(&mut command);
        let output = command.output().context("cannot ask for the devices")?;
        let said = String::from_utf8_lossy(&output.stderr);
        let report: Value = serde_json::from_slice(&output.stdout)
            .with_context(|| format!("cannot ask for the devices: {}", said.trim()))?;
        let devices = report["devices"].as_array().cloned().unwrap_or_default();
        let found = devices.iter().find(|one| {
            let uuid = one["uuid"].as_str().unwrap_or_default();
            device.parse().is_ok_and(|index: u64| one["index"] == index)
                || uuid.eq_ignore_ascii_case(device)
        });
        let Some(found) = found else {
            let why = match report["nvml_error"].as_str() {
                Some(error) => format!("NVML does not answer: {error}"),
                None => format!("there are {}, from 0 on", devices.len()),
            };
            bail!("no device {device}: {why} (name one with --device)");
        };
        let clocks = most_clocks(driver, device);
        let mut settings = Map::new();
        let mut about = json!({
            "sublet": env!("CARGO_PKG_VERSION"),
            "driver": report["driver"]["cuda_version"],
            "driver_version": clocks.as_ref().map(|one| one.0.clone()),
            "simulated": driver.simulated.is_some(),
            "gpu": found["name"],
            "clocks": clocks.map(|one| one.1),
            "plan": plan.identity(),
        });
        if driver.simulated.is_some() {
            // They make the device what it is.
            for (name, value) in env::vars_os() {
                let name = name.to_string_lossy().into_owned();
                if name.starts_with("SUBLET_SIM_")
                    && !matches!(&name[..], "SUBLET_SIM_STATE" | "SUBLET_SIM_DIR")
                {
                    settings.insert(name, value.to_string_lossy().into());
                }
            }
            about["settings"] = settings.into();
        } else {
            about["gpu_uuid"] = found["uuid"].clone();
            about["gpu_bytes"] = found["total_bytes"].clone();
        }
        Ok(Self {
            device: found.clone(),
            about,
        })
    }
}

impl Host {
    /// The device's number, as NVML counts.
    pub fn index(&self) -> Option<u32> {
        u32::try_from(self.device["index"].as_u64()?).ok()
    }
}

/// Why a mode cannot be had here.
pub fn refusal(mode: Mode, driver: &Driver) -> Option<String> {
    match (mode, driver.simulated) {
        (Mode::Mps, Some(_)) => {
            Some("mode mps: the simulated GPU has no MPS (take it out of modes)".into())
        }
        (Mode::Mps, None) => {
            let path = env::var_os("PATH").unwrap_or_default();
            let is_there = env::split_paths(&path).any(|dir| dir.join(MPS_CONTROL).exists());
            let why = || {
                format!("mode mps: no {MPS_CONTROL} in PATH (install it, or take mps out of modes)")
            };
            (!is_there).then(why)
        }
        _ => None,
    }
}

/// Driver version, and the clocks that the device may reach and is set to, by `nvidia-smi`.
fn most_clocks(driver: &Driver, device: &str) -> Option<(String, String)> {
    let fields = "driver_version,clocks.max.sm,clocks.max.mem,clocks.applications.graphics,clocks.applications.memory";
    let line = ask(driver, device, fields)?;
    let (version, clocks) = line.split_once(',')?;
    Some((version.trim().to_owned(), clocks.trim().to_owned()))
}

/// The clocks of the moment, with power and temperature.
pub fn clocks_now(driver: &Driver, device: &str) -> Option<String> {
    let fields = "clocks.sm,clocks.mem,temperature.gpu,power.draw,clocks_throttle_reasons.active";
    ask(driver, device, fields)
}

/// What `nvidia-smi` says; nothing of a simulated device, whose clocks are made up.
fn ask(driver: &Driver, device: &str, fields: &str) -> Option<String> {
    if driver.simulated.is_some() {
        return None;
    }
    let output = Command::new("nvidia-smi")
        .args(["--format=csv,noheader", "--id", device])
        .arg(format!("--query-gpu={fields}"))
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output()
        .ok()?;
    let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    (output.status.success() && !text.is_empty()).then_some(text)
}
