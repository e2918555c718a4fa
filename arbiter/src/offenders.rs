//! Jobs that harm the others: found out by the lanes and by what their clients write, told in the journal, and ended where the
//! configuration says so.

use policy::TenantId;
use rustix::process::{Signal, pidfd_send_signal};
use serde_json::Value;

use crate::dispatch::{Answer, Offence};
use crate::serve::Arbiter;

/// Periods of the house in a row with too many doorbells that make a flood: half a second of it.
const FLOOD_PERIODS: u32 = 5;

impl Arbiter {
    /// Looks how jobs behave; ten times a second.
    pub(crate) fn look_for_offenders(&mut self, now_ns: u64) {
        let mut found: Vec<(u32, TenantId, Offence)> = Vec::new();
        for client in self.clients.values_mut() {
            if client.floods >= FLOOD_PERIODS {
                found.push((client.devices, client.tenant, Offence::Flood));
            }
            if std::mem::take(&mut client.bad_records) > 0 {
                found.push((client.devices, client.tenant, Offence::Nonsense));
            }
        }
        for tenant in self.ledger.iter_mut() {
            let Some(violation) = tenant.accounts.take_violation() else {
                continue;
            };
            let devices = tenant.clients.iter().filter_map(|id| self.clients.get(id));
            let devices = devices.fold(0, |devices, client| devices | client.devices);
            tracing::debug!("job `{}`: {violation}", tenant.spec.name);
            found.push((devices, tenant.id, Offence::Nonsense));
        }
        for (devices, tenant, offence) in found {
            for (at, lane) in self.lanes.iter_mut().enumerate() {
                if devices & (1 << at) != 0 {
                    lane.find(now_ns, tenant, offence);
                    self.dirty |= 1 << at;
                }
            }
        }
        for at in 0..self.lanes.len() {
            let forgiven = self.lanes[at].inspect(now_ns);
            for tenant in forgiven {
                self.tell_forgiven(at, tenant);
                self.dirty |= 1 << at;
            }
            for (tenant, offence) in self.lanes[at].take_offences() {
                self.on_offence(at, tenant, offence);
                self.dirty |= 1 << at;
            }
        }
    }

    fn on_offence(&mut self, device: usize, id: TenantId, offence: Offence) {
        let answer = self.lanes[device].answer();
        let clients = self.ledger.get(id).map(|tenant| tenant.clients.clone());
        if matches!(offence, Offence::Deaf | Offence::Endless { .. }) {
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
            offence.text()
        );
        tracing::warn!("{message}");
        let mut fields = vec![
            ("device", Value::from(device)),
            ("offence", Value::from(offence.word())),
            (
                "answer",
                Value::from(match answer {
                    Answer::Report => "report",
                    Answer::Demote => "demote",
                    Answer::Kill => "kill",
                }),
            ),
        ];
        match offence {
            Offence::Endless { ms } => fields.push(("past_slice_ms", Value::from(ms))),
            Offence::Ungated { launches } => fields.push(("launches", Value::from(launches))),
            Offence::Deaf | Offence::Flood | Offence::Nonsense => {}
        }
        self.journal.write("misbehaviour", &name, message, &fields);
        if answer == Answer::Kill {
            for client in tenant.clients.iter().filter_map(|id| self.clients.get(id)) {
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
