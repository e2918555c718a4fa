//! Clients that are in: their doorbells, and how they go.

use channel::arbiter::Bell;
use serde_json::Value;

use crate::clients::Client;
use crate::serve::Arbiter;

impl Arbiter {
    pub(crate) fn on_doorbell(&mut self, id: u64) {
        let Some((bell, farewell)) = self.clients.answer(id) else {
            return;
        };
        if let Some(why) = farewell {
            self.on_farewell(id, &why);
        }
        match bell {
            Bell::HungUp => return self.on_client_hung_up(id),
            Bell::Rang(bells) => {
                let devices = self.clients.count_rings(id, bells, &self.poller);
                self.schedulers.mark(devices);
            }
        }
        let asks = |client: &&Client| client.credit_asked().is_some();
        if let Some(client) = self.clients.get(id).filter(asks) {
            self.answer_credit(client.tenant, self.clock.mono_ns());
        }
        self.hear(id);
    }

    /// The process has refused itself, by its own word: that is reported, and nothing else follows
    /// from it.
    fn on_farewell(&mut self, id: u64, why: &str) {
        let Some(client) = self.clients.get(id) else {
            return;
        };
        let Some(tenant) = self.ledger.get_mut(client.tenant) else {
            return;
        };
        if tenant.allowance.spend(self.clock.mono_ns()).is_some() {
            let (pid, name) = (client.pid, &tenant.spec.name);
            let message = format!(
                "process {pid} ({}) of job `{name}` cannot be governed: {why}",
                client.command
            );
            let fields = [("pid", Value::from(pid)), ("why", Value::from(why))];
            self.journal
                .write("refused", tenant.about(), message, &fields);
        }
    }

    /// A new housekeeping period begins for a client.
    pub(crate) fn begin_period(&mut self, id: u64) {
        let devices = self.clients.begin_period(id, &self.poller);
        self.schedulers.mark(devices);
        // One that was not listened to.
        self.hear(id);
    }

    pub(crate) fn on_client_ended(&mut self, id: u64) {
        self.end_client(id, "has ended");
    }

    /// Its end of the socket is closed. A program may close all descriptors that it finds and go
    /// on; one that has executed another program has left its work and its memory behind.
    fn on_client_hung_up(&mut self, id: u64) {
        self.clients.hang_up(id, &self.poller);
        self.end_if_executed(id);
    }

    /// Whether the client was another program than its process is now; then it is gone.
    pub(crate) fn end_if_executed(&mut self, id: u64) -> bool {
        let is_another = self
            .clients
            .get(id)
            .is_some_and(|client| client.pages.are_mapped_by(client.pid) == Some(false));
        if is_another {
            self.end_client(id, "has executed another program");
        }
        is_another
    }

    fn end_client(&mut self, id: u64, how: &str) {
        let now_ns = self.clock.mono_ns();
        let Some((client, held_bytes)) = self.drop_client(id, now_ns) else {
            return;
        };
        if let Some(tenant) = self.ledger.get_mut(client.tenant)
            && tenant.allowance.spend(now_ns).is_some()
        {
            let message = format!(
                "process {} ({}) of job `{}` {how}",
                client.pid, client.command, tenant.spec.name
            );
            let fields = [
                ("pid", Value::from(client.pid)),
                ("held_bytes", Value::from(held_bytes)),
                ("launches", Value::from(client.launches())),
            ];
            self.journal
                .write("detached", tenant.about(), message, &fields);
        }
        // Tenants that wait are served before the bookkeeping is done.
        self.step_dirty_schedulers();
        self.reap_if_dead(client.tenant);
    }

    /// Clients of the arbiter before this one: some come back, some have died, and some of their
    /// memory belongs to nobody.
    pub(crate) fn look_for_missing(&mut self, now_ns: u64) {
        let mut touched = Vec::new();
        for tenant in self.ledger.iter_mut() {
            if tenant.adopt_until_ns == 0 {
                continue;
            }
            if tenant.reap_missing() {
                touched.push(tenant.id);
            }
            if now_ns >= tenant.adopt_until_ns && tenant.missing.is_empty() {
                tenant.adopt_until_ns = 0;
                tenant.sweep_slots();
            }
        }
        for id in touched {
            self.persistence.mark_old();
            self.reap_if_dead(id);
        }
    }
}
