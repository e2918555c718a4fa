//! Jobs that harm the others: found by the device schedulers and by what their clients write,
//! reported in the journal, and ended where the configuration says so.

use policy::TenantId;
use rustix::process::{Signal, pidfd_send_signal};
use serde_json::Value;

use crate::clients::Breach;
use crate::dispatch::{Answer, Violation};
use crate::peer;
use crate::serve::Arbiter;

/// A job whose work stands still is looked at for so long before that counts as its own doing.
/// Where its threads wait for a processor for more than a fifth of that, or the arbiter itself had
/// none, the host stands still and it is looked at again, so long at most.
const LOOK_NS: u64 = 300_000_000;
const LOOK_MOST_NS: u64 = 10_000_000_000;
/// What was seen so long ago tells nothing about now.
const LOOK_AGAIN_NS: u64 = 3_000_000_000;
/// A round of housekeeping that comes so much late is one for which the arbiter had no processor.
const HOUSEKEEPING_STALL_NS: u64 = 100_000_000;
/// Jobs that are looked at in a round; the others have their turn.
const LOOKED_AT: usize = 8;

/// A job that is suspected, and how long its threads had waited for a processor then.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Suspicion {
    since_ns: u64,
    at_ns: u64,
    waited_ns: u64,
}

impl Suspicion {
    /// Whether the host may be why nothing of the job gets on.
    fn excuses(&mut self, now_ns: u64, waited_ns: u64, stalled: bool) -> bool {
        let for_ns = now_ns.saturating_sub(self.at_ns);
        if self.since_ns == 0 || for_ns > LOOK_AGAIN_NS {
            *self = Self {
                since_ns: now_ns,
                at_ns: now_ns,
                waited_ns,
            };
            return true;
        }
        if for_ns < LOOK_NS {
            return true;
        }
        let waited_for_ns = waited_ns.saturating_sub(self.waited_ns);
        (self.at_ns, self.waited_ns) = (now_ns, waited_ns);
        let starved = waited_for_ns > for_ns / 5 || stalled;
        starved && now_ns.saturating_sub(self.since_ns) < LOOK_MOST_NS
    }
}

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
        self.suspicions
            .retain(|_, suspicion| now_ns.saturating_sub(suspicion.at_ns) <= LOOK_AGAIN_NS);
        let stalled = now_ns.saturating_sub(self.housekeeping_due_ns()) > HOUSEKEEPING_STALL_NS;
        let mut left = LOOKED_AT;
        for at in 0..self.schedulers.len() {
            // Whether it is the host that stands still, and not a job: by what its threads wait
            // for, and by our own lateness.
            let forgiven = self.schedulers[at].inspect(now_ns, &mut |id| {
                left = left.saturating_sub(1);
                let clients = self.ledger.get(id).map(|tenant| tenant.clients.as_slice());
                let clients = clients.unwrap_or_default().iter().take(LOOKED_AT);
                let waited_ns = clients
                    .filter_map(|client| peer::waited_for_cpu_ns(self.clients.get(*client)?.pid))
                    .fold(0, u64::saturating_add);
                let suspicion = self.suspicions.entry(id).or_default();
                left == 0 || suspicion.excuses(now_ns, waited_ns, stalled)
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
        self.journal.write("misbehaviour", &name, message, &fields);
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
        self.journal.write("forgiven", &name, message, &fields);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_that_gets_no_processor_is_excused_for_some_time_and_one_that_waits_for_none_is_not() {
        const MS: u64 = 1_000_000;
        // Where its threads wait all the time, and where the arbiter itself is late.
        for (waits, stalled) in [(true, false), (false, true)] {
            let mut suspicion = Suspicion::default();
            let mut excused_until_ns = 0;
            for at_ns in (1..200).map(|round| round * 100 * MS) {
                let waited_ns = if waits { at_ns } else { 0 };
                if !suspicion.excuses(at_ns, waited_ns, stalled) {
                    break;
                }
                excused_until_ns = at_ns;
            }
            let most = LOOK_MOST_NS - LOOK_NS..=LOOK_MOST_NS + LOOK_NS;
            assert!(most.contains(&excused_until_ns), "{excused_until_ns}");
        }
        let mut suspicion = Suspicion::default();
        let excused: Vec<bool> = (10..16)
            .map(|round| suspicion.excuses(round * 100 * MS, 77, false))
            .collect();
        assert_eq!(excused, [true, true, true, false, true, true]);
        // What was seen long ago begins anew.
        assert!(suspicion.excuses(20_000 * MS, 77, false));
    }
}
