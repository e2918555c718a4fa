//! Processes of a job that use a device and are not attached: their `LD_PRELOAD` was replaced, or
//! their environment cleaned. No limit holds for them. The journal and `sublet ps` report them, and
//! a strict job is ended for one.
//!
//! NVML says who is on a device, the census ([`crate::census`]) to which job a process belongs.
//! Both look at different times, and a process may become another program between them; so what was
//! found is believed once NVML has looked after the census and the census after that, with the same
//! result.

use std::collections::BTreeMap;

use control::EscapedProcess;
use policy::TenantId;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde_json::Value;

use crate::census::{Found, Living, Process};
use crate::peer;
use crate::serve::Arbiter;

/// Processes that are suspected at a time; NVML names no more of one device.
const MAX_SUSPECTS: usize = 512;
/// Processes of one job that are reported; more are counted.
const MAX_REPORTED: usize = 16;
/// TIMEOUT: when a process that belongs to no job is asked about again: it may have become another
/// program.
const STRANGER_NS: u64 = 10_000_000_000;
/// TIMEOUT: a process that has the library attaches before it has a context; so long may an
/// arbiter's loop be behind with it.
const ATTACHES_NS: u64 = 1_000_000_000;

/// A process on a device that is not attached.
#[derive(Debug)]
pub struct Suspect {
    /// When NVML named it first.
    since_ns: u64,
    /// Devices, as bits.
    devices: u32,
    used_bytes: u64,
    /// What the census said, and when it had looked.
    found: Option<(Found, u64)>,
    /// NVML has named it since then.
    named_again: bool,
    /// It was reported.
    reported: bool,
}

impl Arbiter {
    /// NVML has looked at `taken_ns`: who is on a device without being attached?
    pub(crate) fn look_for_escaped(&mut self, taken_ns: u64) {
        let attached = |pid: u32| {
            let mut clients = self.clients.values();
            clients.any(|client| client.pid == pid && client.slot != channel::NO_SLOT)
                || self.greetings.values().any(|one| one.identity.pid == pid)
                || self
                    .ledger
                    .iter()
                    .any(|tenant| tenant.missing.iter().any(|one| one.pid == pid))
        };
        let mut there: BTreeMap<u32, (u32, u64)> = BTreeMap::new();
        for (index, device) in self.devices.iter() {
            for (pid, bytes) in &device.process_bytes {
                let known = there.contains_key(pid) || there.len() < MAX_SUSPECTS;
                if known && *pid != std::process::id() && !attached(*pid) {
                    let one = there.entry(*pid).or_default();
                    one.0 |= 1 << index;
                    one.1 = one.1.saturating_add(*bytes);
                }
            }
        }
        self.suspects.retain(|pid, _| there.contains_key(pid));
        for (pid, (devices, used_bytes)) in there {
            let suspect = self.suspects.entry(pid).or_insert_with(|| Suspect {
                since_ns: taken_ns,
                devices: 0,
                used_bytes: 0,
                found: None,
                named_again: false,
                reported: false,
            });
            (suspect.devices, suspect.used_bytes) = (devices, used_bytes);
            if suspect
                .found
                .as_ref()
                .is_some_and(|(_, at_ns)| *at_ns < taken_ns)
            {
                suspect.named_again = true;
            }
        }
        self.ask_whose(taken_ns);
    }

    fn ask_whose(&mut self, now_ns: u64) {
        if self.whose_asked || self.ledger.is_empty() {
            return;
        }
        let due = self
            .suspects
            .iter()
            .filter(|(_, suspect)| match &suspect.found {
                None => true,
                Some((Found { job: None, .. }, at_ns)) => {
                    now_ns.saturating_sub(*at_ns) > STRANGER_NS
                }
                Some(_) => suspect.named_again && !suspect.reported,
            });
        let pids: Vec<u32> = due.map(|(pid, _)| *pid).collect();
        if !pids.is_empty() {
            self.whose_asked = true;
            self.census.whose(self.known_jobs(), pids);
        }
    }

    /// The census has looked, at `looked_ns`.
    pub(crate) fn on_suspects(&mut self, reported: Vec<Found>, looked_ns: u64) {
        self.whose_asked = false;
        for found in reported {
            let Some(suspect) = self.suspects.get_mut(&found.process.pid) else {
                continue;
            };
            let before = suspect.found.as_ref().map(|(found, _)| found);
            let same = before.is_some_and(|before| {
                (before.process, before.job, before.library)
                    == (found.process, found.job, found.library)
            });
            let old = looked_ns.saturating_sub(suspect.since_ns) >= ATTACHES_NS;
            let sure = same
                && found.driver
                && suspect.named_again
                && (found.library == Some(false) || old);
            suspect.named_again = false;
            suspect.found = Some((found.clone(), looked_ns));
            if let Some(job) = found.job.filter(|_| sure && !suspect.reported) {
                suspect.reported = true;
                let (devices, used_bytes) = (suspect.devices, suspect.used_bytes);
                self.on_escaped(job, &found, devices, used_bytes);
            }
        }
    }

    fn on_escaped(&mut self, id: TenantId, found: &Found, devices: u32, used_bytes: u64) {
        let Some(tenant) = self.ledger.get_mut(id) else {
            return;
        };
        let pid = found.process.pid;
        let name = tenant.spec.name.clone();
        let reason = match found.library {
            Some(false) => {
                "libsublet.so is not loaded in it: its LD_PRELOAD was replaced or its environment cleaned"
            }
            Some(true) => "libsublet.so is loaded in it, and it has not attached to this arbiter",
            None => "whether libsublet.so is loaded in it cannot be seen",
        };
        let indices: Vec<u32> = (0..32)
            .filter(|index| devices & (1 << index) != 0)
            .collect();
        tenant.escaped_count += 1;
        let reported = EscapedProcess {
            pid,
            command: found.command.clone(),
            devices: indices.clone(),
            used_bytes,
            reason: reason.into(),
            since_unix_ms: self.clock.unix_ms(),
        };
        if tenant.escaped.len() < MAX_REPORTED {
            tenant.escaped.push(reported);
        }
        let strict = tenant.spec.strict;
        let on: Vec<String> = indices.iter().map(u32::to_string).collect();
        let message = format!(
            "process {pid} ({}) of job `{name}` uses GPU {} outside its limits: {reason}",
            found.command,
            on.join(", ")
        );
        if tenant.allowance.spend(self.clock.mono_ns()).is_some() {
            let fields = [
                ("pid", Value::from(pid)),
                ("devices", Value::from(indices)),
                ("used_bytes", Value::from(used_bytes)),
            ];
            tracing::warn!("{message}");
            self.journal
                .write("escaped", &name, message.clone(), &fields);
        }
        if strict {
            self.end_job(id, found.process, &message);
        }
    }

    /// Ends a strict job: the process that got out of it, and then everything that belongs to it.
    fn end_job(&mut self, id: TenantId, escaped: Process, why: &str) {
        let Some(tenant) = self.ledger.get_mut(id) else {
            return;
        };
        let name = tenant.spec.name.clone();
        if tenant.ending.is_none() {
            tenant.ending = Some(why.to_owned());
            let message = format!("job `{name}` is ended, because it is strict: {why}");
            tracing::warn!("{message}");
            self.journal.write("strict", &name, message, &[]);
        }
        self.end_process(escaped);
        let living = Living {
            count: 0,
            members: self.members_of(id),
        };
        self.end_members(&living);
    }

    /// What is known to belong to a job.
    fn members_of(&self, id: TenantId) -> Vec<Process> {
        let known = self.known_jobs().into_iter().find(|known| known.id == id);
        known.map_or_else(Vec::new, |known| known.members)
    }

    /// Ends these processes of a job, and has what is left of it counted.
    pub(crate) fn end_members(&mut self, living: &Living) {
        for process in &living.members {
            self.end_process(*process);
        }
        let now_ns = self.clock.mono_ns();
        self.census_due_ns = Some(now_ns);
        self.look_after_dormant(now_ns);
    }

    fn end_process(&mut self, process: Process) {
        let pid = i32::try_from(process.pid).ok().and_then(Pid::from_raw);
        let Some(Ok(descriptor)) = pid.map(|pid| pidfd_open(pid, PidfdFlags::empty())) else {
            return;
        };
        // Looked at after the descriptor was opened: if this is the same process, the descriptor is
        // its.
        // Where that is not known it is tried again.
        if !peer::is_alive(process.pid, process.started_ticks).unwrap_or(false) {
            return;
        }
        if let Err(errno) = pidfd_send_signal(&descriptor, Signal::KILL)
            && errno != rustix::io::Errno::SRCH
        {
            self.warn_of_stranger(&format!("process {} cannot be ended: {errno}", process.pid));
        }
    }
}
