//! Processes of a job that use a device and are not attached: their `LD_PRELOAD` was replaced, or
//! their environment cleaned. No limit holds for them. The journal and `sublet ps` report them, and
//! a strict job is ended for one.
//!
//! NVML says who is on a device, the census to which job a process belongs; when both are believed
//! is for [`crate::outsiders`] to say. What follows from it is decided here.

use control::EscapedProcess;
use policy::TenantId;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde_json::Value;

use crate::census::{Living, Process};
use crate::dormant::known_jobs;
use crate::journal::About;
use crate::outsiders::Escaped;
use crate::peer;
use crate::serve::Arbiter;

/// Processes of one job that are reported; more are counted.
const MAX_REPORTED: usize = 16;
/// How far up the tree of processes those are looked for that wait for one that got out of its job.
const MOST_BETWEEN: usize = 64;

impl Arbiter {
    /// NVML has looked at `taken_ns`: who is on a device without being attached?
    pub(crate) fn look_for_escaped(&mut self, taken_ns: u64) {
        let attached = |pid: u32| {
            self.clients.has_user(pid)
                || self.door.has_process(pid)
                || self
                    .ledger
                    .iter()
                    .any(|tenant| tenant.missing.iter().any(|one| one.pid == pid))
        };
        let named = self.devices.iter().flat_map(|(index, device)| {
            let processes = device.process_bytes.iter();
            processes.map(move |(pid, bytes)| (*pid, index, *bytes))
        });
        self.outsiders.see(taken_ns, named, attached);
        if !self.ledger.is_empty() {
            let (ledger, clients) = (&self.ledger, &self.clients);
            let jobs = || known_jobs(ledger, clients);
            self.outsiders.ask_whose(taken_ns, jobs);
        }
    }

    pub(crate) fn on_escaped(&mut self, escaped: Escaped) {
        let Escaped {
            job: id,
            found,
            devices,
            used_bytes,
        } = escaped;
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
            let about = About::job(&name, id.0);
            self.journal
                .write("escaped", about, message.clone(), &fields);
        }
        if strict {
            self.end_job(id, found.process, &message);
        }
    }

    /// Ends a strict job: everything that belongs to it, and the process that got out of it with
    /// those that wait for it.
    fn end_job(&mut self, id: TenantId, escaped: Process, why: &str) {
        self.begin_ending(id, "strict", &format!("it is strict: {why}"));
        let mut living = self.known_of(id);
        let between = between(escaped.pid, |pid| {
            living.members.iter().any(|member| member.pid == pid)
        });
        living.members.extend(between);
        living.members.push(escaped);
        self.end_members(&living);
    }

    /// Lets nothing more of a job in, and says so in the journal; `why` comes after "because".
    pub(crate) fn begin_ending(&mut self, id: TenantId, kind: &str, why: &str) {
        let Some(tenant) = self.ledger.get_mut(id) else {
            return;
        };
        if tenant.ending.is_some() {
            return;
        }
        tenant.ending = Some(why.to_owned());
        let message = format!("job `{}` is ended, because {why}", tenant.spec.name);
        tracing::warn!("{message}");
        self.journal.write(kind, tenant.about(), message, &[]);
    }

    /// Ends what is known to belong to a job.
    pub(crate) fn end_all_of(&mut self, id: TenantId) {
        let living = self.known_of(id);
        self.end_members(&living);
    }

    /// What is known to belong to a job; not counted.
    fn known_of(&self, id: TenantId) -> Living {
        let mut known = known_jobs(&self.ledger, &self.clients).into_iter();
        let known = known.find(|known| known.id == id);
        Living {
            count: 0,
            members: known.map_or_else(Vec::new, |known| known.members),
        }
    }

    /// Ends these processes of a job, and has what is left of it counted. A parent goes before its
    /// children: one that sees its child end may go on as if nothing had happened, and end well.
    pub(crate) fn end_members(&mut self, living: &Living) {
        let mut members = living.members.clone();
        members.sort_by_key(|process| (process.started_ticks, process.pid));
        for process in members {
            self.end_process(process);
        }
        let now_ns = self.clock.mono_ns();
        self.outsiders.count_at(now_ns);
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

/// The processes above `pid` up to the first that `is_member`; none where there is no such one, for
/// then they are somebody else's.
fn between(pid: u32, is_member: impl Fn(u32) -> bool) -> Vec<Process> {
    let mut found = Vec::new();
    let mut at = peer::parent(pid);
    while let Some((pid, started_ticks)) = at.filter(|_| found.len() < MOST_BETWEEN) {
        if is_member(pid) {
            return found;
        }
        found.push(Process { pid, started_ticks });
        at = peer::parent(pid);
    }
    Vec::new()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_between_are_found_up_to_a_member_and_nobody_else() {
        let own = std::process::id();
        let Some((parent, _)) = peer::parent(own) else {
            return; // The first process of a container.
        };
        assert_eq!(between(own, |pid| pid == parent), []);
        assert_eq!(between(own, |_| false), []);
        let mut child = std::process::Command::new("sh")
            .args(["-c", "sleep 1000 & echo $!; wait"])
            .stdout(std::process::Stdio::piped())
            .spawn()
            .expect("a shell");
        let mut line = String::new();
        let out = child.stdout.take().expect("its output");
        std::io::BufRead::read_line(&mut std::io::BufReader::new(out), &mut line).expect("a line");
        let grandchild: u32 = line.trim().parse().expect("a process id");
        let found: Vec<u32> = between(grandchild, |pid| pid == own)
            .iter()
            .map(|process| process.pid)
            .collect();
        child.kill().expect("ended");
        child.wait().expect("waited for");
        let sleeper = Pid::from_raw(grandchild as i32).expect("not 0");
        rustix::process::kill_process(sleeper, Signal::KILL).expect("ended");
        assert_eq!(found, [child.id()]);
    }
}
