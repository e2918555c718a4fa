//! Processes on a device that are part of no job: NVML's list against the arbiter's.

use arbiter::nvml::Found;
use control::{ArbiterStatus, DeviceSelector};

/// One of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unmanaged {
    pub device: usize,
    pub pid: u32,
    pub used_bytes: u64,
}

/// Name of the job that a process is part of.
pub fn job_of(status: Option<&ArbiterStatus>, pid: u32) -> Option<&str> {
    let jobs = status.map(|status| status.jobs.as_slice())?;
    jobs.iter()
        .find(|job| job.processes.iter().any(|process| process.pid == pid))
        .map(|job| job.name.as_str())
}

/// All on the devices that `selectors` mean; no selector means every device.
pub fn on(
    found: &[Found],
    status: Option<&ArbiterStatus>,
    selectors: &[DeviceSelector],
) -> Vec<Unmanaged> {
    let meant = |index: usize, device: &Found| {
        selectors.is_empty()
            || selectors.iter().any(|selector| match selector {
                // CAST: a handful of devices.
                DeviceSelector::Index(wanted) => *wanted as usize == index,
                DeviceSelector::Uuid(uuid) => uuid.eq_ignore_ascii_case(&device.uuid_text()),
            })
    };
    found
        .iter()
        .enumerate()
        .filter(|(index, device)| meant(*index, device))
        .flat_map(|(index, device)| {
            device
                .process_bytes
                .iter()
                .map(move |(pid, used_bytes)| Unmanaged {
                    device: index,
                    pid: *pid,
                    used_bytes: *used_bytes,
                })
        })
        .filter(|process| job_of(status, process.pid).is_none())
        .collect()
}

/// The words of a process's command line; empty where it cannot be read.
pub fn command_line(pid: u32) -> String {
    let words = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let words: Vec<_> = words
        .split(|byte| *byte == 0)
        .filter(|word| !word.is_empty())
        .map(String::from_utf8_lossy)
        .collect();
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use control::{JobStatus, ProcessStatus};

    use super::*;

    fn device(first: u8, pids: &[u32]) -> Found {
        Found {
            uuid: [first; 16],
            name: "gpu".into(),
            total_bytes: 100,
            free_bytes: 60,
            process_bytes: pids.iter().map(|pid| (*pid, 7)).collect::<BTreeMap<_, _>>(),
            simulated: false,
            turn_ns: None,
            dilation: 1,
            mig: None,
            readings: None,
        }
    }

    #[test]
    fn who_is_in_no_job_is_unmanaged_on_the_devices_that_are_meant() {
        let found = [device(1, &[10, 11]), device(2, &[12])];
        let status = ArbiterStatus {
            jobs: vec![JobStatus {
                name: "train".into(),
                processes: vec![ProcessStatus {
                    pid: 10,
                    ..ProcessStatus::default()
                }],
                ..JobStatus::default()
            }],
            ..ArbiterStatus::default()
        };
        let pids = |status: Option<&ArbiterStatus>, selectors: &[DeviceSelector]| {
            let all = on(&found, status, selectors);
            all.iter().map(|one| one.pid).collect::<Vec<_>>()
        };
        assert_eq!(pids(Some(&status), &[]), [11, 12]);
        assert_eq!(pids(None, &[]), [10, 11, 12]);
        assert_eq!(pids(Some(&status), &[DeviceSelector::Index(1)]), [12]);
        let by_uuid = DeviceSelector::Uuid(found[0].uuid_text().to_uppercase());
        assert_eq!(pids(Some(&status), &[by_uuid]), [11]);
        assert_eq!(job_of(Some(&status), 10), Some("train"));
    }
}
