//! What users learn of each other's jobs.
//!
//! Who shares a device may know who else is on it, and what that takes: a job's name, its user, its
//! figures. What it runs, its processes, its own files and the journal's words about it are its
//! user's, root's and the arbiter's user's. Withheld is a command's text, a process's number (0
//! then), and of the journal all but number, time, kind and job.

use control::{ArbiterStatus, ControlError, DeviceStatus, ErrorCode, Event, EventKind, JobStatus};
use policy::TenantId;
use serde_json::Value;

use crate::container::Origin;
use crate::serve::Arbiter;
use crate::who::Peer;

impl Arbiter {
    /// The status, as far as it is for `peer`.
    pub(crate) fn status_for(&self, peer: &Peer) -> ArbiterStatus {
        let mut status = self.status();
        if !peer.governs() {
            withhold_unmanaged(&mut status.devices);
            self.withhold(&mut status.jobs, peer);
        }
        status
    }

    /// The devices, as far as they are for `peer`.
    pub(crate) fn devices_for(&self, peer: &Peer) -> Vec<DeviceStatus> {
        let mut devices = self.device_statuses();
        if !peer.governs() {
            withhold_unmanaged(&mut devices);
        }
        devices
    }

    /// One job, that lives or has ended lately, as far as it is for `peer`.
    ///
    /// # Errors
    /// None has this name.
    pub(crate) fn job_for(&self, name: &str, peer: &Peer) -> Result<JobStatus, ControlError> {
        let Some(mut job) = self.job(name) else {
            let shown: String = name.chars().take(control::NAME_MAX_BYTES).collect();
            let message = format!("no job is named `{shown}`");
            let error = ControlError::new(ErrorCode::NoSuchJob, message);
            return Err(error.with_hint("see /v1/jobs"));
        };
        if !peer.governs() {
            self.withhold(std::slice::from_mut(&mut job), peer);
        }
        Ok(job)
    }

    /// The jobs, as far as they are for `peer`.
    pub(crate) fn jobs_for(&self, peer: &Peer) -> Vec<JobStatus> {
        let mut jobs = self.jobs();
        if !peer.governs() {
            self.withhold(&mut jobs, peer);
        }
        jobs
    }

    /// Lines of the journal, as far as they are for `peer`.
    pub(crate) fn events_for(&self, peer: &Peer, since_seq: u64, limit: u32) -> Vec<Event> {
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        let mut events = self.journal.since(since_seq, limit);
        if !peer.governs() {
            for event in &mut events {
                let owner = self.journal.owner(event.job_id);
                if !is_for(event, owner, self.counts_as(event.job_id, peer)) {
                    shorten(event);
                }
            }
        }
        events
    }

    fn withhold(&self, jobs: &mut [JobStatus], peer: &Peer) {
        withhold(jobs, |job| self.counts_as(job.id, peer));
    }

    /// As which user somebody learns of a job; `None`: of none. Users of a container have the
    /// numbers of the host's, and are the users of that container's jobs alone.
    fn counts_as(&self, job: u64, peer: &Peer) -> Option<u32> {
        let reaches = match peer.origin {
            Origin::Here | Origin::Remote(_) => true,
            _ => {
                let tenant = self.ledger.get(TenantId(job));
                tenant.is_some_and(|tenant| tenant.is_in_reach_of(&peer.origin))
            }
        };
        reaches.then_some(peer.uid)
    }
}

fn withhold_unmanaged(devices: &mut [DeviceStatus]) {
    for device in devices {
        for process in &mut device.unmanaged {
            process.command.clear();
        }
    }
}

fn withhold(jobs: &mut [JobStatus], reader: impl Fn(&JobStatus) -> Option<u32>) {
    let others = |job: &&mut JobStatus| reader(job) != Some(job.uid);
    for job in jobs.iter_mut().filter(others) {
        job.command.clear();
        job.capped.clear();
        for process in &mut job.processes {
            process.pid = 0;
            process.command.clear();
        }
        for process in &mut job.escaped {
            process.pid = 0;
            process.command.clear();
            process.reason.clear();
        }
    }
}

/// Whether a line is for a user who governs nothing: it is about a job or a process of that user,
/// or about nobody.
fn is_for(event: &Event, owner: Option<u32>, reader: Option<u32>) -> bool {
    let of_process = event.fields.get("uid").and_then(Value::as_u64);
    let is_about_nobody = event.job_id == 0 && event.job.is_empty() && of_process.is_none();
    let reads = |uid| owner == Some(uid) || of_process == Some(u64::from(uid));
    is_about_nobody || reader.is_some_and(reads)
}

fn shorten(event: &mut Event) {
    event.fields.clear();
    let plain = EventKind::of(&event.kind).map_or("", |kind| kind.plain);
    event.message = format!("{plain} (of another user)");
}

#[cfg(test)]
mod tests {
    use control::{EscapedProcess, ProcessStatus};

    use super::*;

    #[test]
    fn another_users_job_has_a_name_and_figures_and_nothing_that_it_runs() {
        let job = |uid| JobStatus {
            name: "a".into(),
            uid,
            launches: 7,
            command: vec!["train".into(), "hunter2".into()],
            processes: vec![ProcessStatus {
                pid: 42,
                command: "train hunter2".into(),
                launches: 7,
                ..ProcessStatus::default()
            }],
            escaped: vec![EscapedProcess {
                pid: 43,
                command: "train hunter2".into(),
                reason: "hunter2".into(),
                ..EscapedProcess::default()
            }],
            ..JobStatus::default()
        };
        let mut unseen = [job(1)];
        withhold(&mut unseen, |_| None);
        assert!(unseen[0].command.is_empty());
        let mut jobs = [job(1), job(2)];
        withhold(&mut jobs, |_| Some(1));
        assert_eq!(jobs[0], job(1), "its own");
        let other = serde_json::to_string(&jobs[1]).expect("JSON");
        assert!(
            !other.contains("hunter2") && !other.contains("42"),
            "{other}"
        );
        assert_eq!((jobs[1].name.as_str(), jobs[1].launches), ("a", 7));
        assert_eq!(
            (jobs[1].processes.len(), jobs[1].processes[0].launches),
            (1, 7)
        );
    }

    #[test]
    fn lines_about_others_are_shortened_and_lines_about_nobody_are_not() {
        let peer = Some(1);
        let line = |kind: &str, job_id, uid: Option<u32>| Event {
            kind: kind.into(),
            job: if job_id == 0 { "" } else { "a" }.into(),
            job_id,
            message: "hunter2".into(),
            fields: uid
                .map(|uid| ("uid".to_owned(), Value::from(uid)))
                .into_iter()
                .collect(),
            ..Event::default()
        };
        assert!(is_for(&line("start", 0, None), None, peer));
        assert!(is_for(&line("oom", 7, None), Some(1), peer));
        assert!(is_for(&line("refused", 0, Some(1)), None, peer));
        assert!(is_for(&line("registered", 7, Some(1)), None, peer));
        assert!(!is_for(&line("oom", 7, None), Some(2), peer));
        assert!(
            !is_for(&line("oom", 7, None), None, peer),
            "nobody knows whose"
        );
        assert!(!is_for(&line("refused", 0, Some(2)), None, peer));
        let nobody = None;
        assert!(is_for(&line("start", 0, None), None, nobody));
        assert!(!is_for(&line("oom", 7, Some(1)), Some(1), nobody));
        let mut shortened = line("oom", 7, Some(2));
        shorten(&mut shortened);
        assert_eq!(shortened.message, "out of memory (of another user)");
        assert!(shortened.fields.is_empty() && shortened.job_id == 7);
    }
}
