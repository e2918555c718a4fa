//! Jobs that harm the others: found by the device schedulers and by what their clients write,
//! reported in the journal, and ended where the configuration says so.

use policy::TenantId;
use rustix::process::{Signal, pidfd_send_signal};
use serde_json::Value;

use crate::clients::Breach;
use crate::dispatch::{Answer, Violation};
use crate::journal::About;
use crate::peer;
use crate::serve::Arbiter;
use crate::suspicions::LOOKED_AT;

impl Arbiter {
    /// Looks how jobs behave; ten times a second.
    pub(crate) fn look_for_offenders(&mut self, now_ns: u64) {
        let mut found: Vec<(u32, TenantId, Violation)> = Vec::new();
        for (devices, tenant, breach) in self.clients.take_breaches() {
            let violation = match breach {
                Breach::Flood => Violation::Flood,
                Breach::Nonsense => Violation::Nonsense,
            };
            found.push((devices, tenant, violation));
        }
        for tenant in self.ledger.iter_mut() {
            let Some(violation) = tenant.accounts.take_violation() else {
                continue;
            };
            let devices = self.clients.devices_of(&tenant.clients);
            tracing::debug!("job `{}`: {violation}", tenant.spec.name);
            found.push((devices, tenant.id, Violation::Nonsense));
        }
        for (devices, tenant, violation) in found {
            for (at, scheduler) in self.schedulers.iter_mut().enumerate() {
                if devices & (1 << at) != 0 {
                    scheduler.find(now_ns, tenant, violation);
                }
            }
            self.schedulers.mark(devices);
        }
        let late_ns = self.slow_work.late_ns(now_ns);
        let mut round = self.suspicions.begin_round(now_ns, late_ns);
        for at in 0..self.schedulers.len() {
            // Whether it is the host that stands still, and not a job: by what its threads wait
            // for, and by our own lateness.
            let forgiven = self.schedulers[at].inspect(now_ns, &mut |id| {
                let clients = self.ledger.get(id).map(|tenant| tenant.clients.as_slice());
                let clients = clients.unwrap_or_default().iter().take(LOOKED_AT);
                let waited_ns = clients
                    .filter_map(|client| peer::waited_for_cpu_ns(self.clients.get(*client)?.pid))
                    .fold(0, u64::saturating_add);
                self.suspicions.excuses(&mut round, id, waited_ns)
            });
            for tenant in forgiven {
                self.tell_forgiven(at, tenant);
                self.schedulers.mark(1 << at);
            }
            for (tenant, violation) in self.schedulers[at].take_violations() {
                self.on_violation(at, tenant, violation);
                self.schedulers.mark(1 << at);
            }
        }
    }

    fn on_violation(&mut self, device: usize, id: TenantId, violation: Violation) {
        let answer = self.schedulers[device].answer();
        let clients = self.ledger.get(id).map(|tenant| tenant.clients.clone());
        if matches!(
            violation,
            Violation::Unresponsive | Violation::Endless { .. }
        ) {
            // A child that was forked holds the socket open over its parent's exec.
            let mut executed = false;
            for client in clients.into_iter().flatten() {
                executed |= self.end_if_executed(client);
            }
            if executed {
                return;
            }
        }
        let Some(tenant) = self.ledger.get(id) else {
            return;
        };
        let name = tenant.spec.name.clone();
        let consequence = match answer {
            Answer::Report => "it is left alone",
            Answer::Demote => "it runs after all others until it behaves",
            Answer::Kill => "its processes are ended",
        };
        let message = format!(
            "job `{name}` {} (device {device}): {consequence}",
            violation.text()
        );
        tracing::warn!("{message}");
        let mut fields = vec![
            ("device", Value::from(device)),
            ("violation", Value::from(violation.word())),
            (
                "answer",
                Value::from(match answer {
                    Answer::Report => "report",
                    Answer::Demote => "demote",
                    Answer::Kill => "kill",
                }),
            ),
        ];
        match violation {
            Violation::Endless { ms } => fields.push(("past_slice_ms", Value::from(ms))),
            Violation::Ungated { launches } => fields.push(("launches", Value::from(launches))),
            Violation::Unresponsive | Violation::Flood | Violation::Nonsense => {}
        }
        self.journal
            .write("misbehaviour", About::job(&name, id.0), message, &fields);
        if answer == Answer::Kill {
            for client in tenant.clients.iter().filter_map(|id| self.clients.get(*id)) {
                if let Err(errno) = pidfd_send_signal(&client.process, Signal::KILL) {
                    tracing::error!("process {} cannot be ended: {errno}", client.pid);
                }
            }
        }
    }

    fn tell_forgiven(&mut self, device: usize, id: TenantId) {
        let Some(tenant) = self.ledger.get(id) else {
            return;
        };
        let name = tenant.spec.name.clone();
        let message = format!("job `{name}` has its place on device {device} back");
        let fields = [("device", Value::from(device))];
        self.journal
            .write("forgiven", About::job(&name, id.0), message, &fields);
    }
}
