//! Clients that are in: their doorbells, and how they go.

use std::os::fd::AsFd;

use channel::arbiter::Bell;
use serde_json::Value;

use crate::peer::RINGS_PER_PERIOD;
use crate::reactor::{Event, Interest};
use crate::serve::Arbiter;

impl Arbiter {
    pub(crate) fn on_doorbell(&mut self, id: u64) {
        let Some(client) = self.clients.get_mut(&id) else {
            return;
        };
        let Some(socket) = &client.socket else {
            return;
        };
        let mut farewell = None;
        let bell = channel::arbiter::answer_bell(socket.as_fd(), &mut farewell);
        if let Some(why) = farewell {
            self.on_farewell(id, &why);
        }
        if bell == Bell::HungUp {
            return self.on_client_hung_up(id);
        }
        let Some(client) = self.clients.get_mut(&id) else {
            return;
        };
        client.rings += 1;
        if (bell == Bell::StillRinging || client.rings > RINGS_PER_PERIOD) && !client.muted {
            client.muted = true;
            if let Some(socket) = &client.socket {
                self.poller.remove(socket);
            }
            let pid = client.pid;
            tracing::debug!("process {pid} rings without end; it is looked at ten times a second");
        }
        self.schedulers.mark(client.devices);
    }

    /// The process has refused itself, by its own word: that is reported, and nothing else follows
    /// from it.
    fn on_farewell(&mut self, id: u64, why: &str) {
        let Some(client) = self.clients.get(&id) else {
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
            self.journal.write("refused", name, message, &fields);
        }
    }

    /// A new period begins for a client that rang too often.
    pub(crate) fn unmute(&mut self, id: u64) {
        let Some(client) = self.clients.get_mut(&id) else {
            return;
        };
        client.rings = 0;
        client.floods = if client.muted { client.floods + 1 } else { 0 };
        if client.hung_up {
            // It has no bell any more. Where it waits it is seen here.
            self.schedulers.mark(client.devices);
        } else if client.muted {
            client.muted = false;
            if let Some(socket) = &client.socket {
                let _ = self.poller.add(socket, Event::Doorbell(id), Interest::Bell);
            }
            self.schedulers.mark(client.devices);
        }
    }

    pub(crate) fn on_client_ended(&mut self, id: u64) {
        self.end_client(id, "has ended");
    }

    /// Its end of the socket is closed. A program may close all descriptors that it finds and go
    /// on; one that has executed another program has left its work and its memory behind.
    fn on_client_hung_up(&mut self, id: u64) {
        let Some(client) = self.clients.get_mut(&id) else {
            return;
        };
        client.hung_up = true;
        if let Some(socket) = &client.socket {
            self.poller.remove(socket);
        }
        self.end_if_executed(id);
    }

    /// Whether the client was another program than its process is now; then it is gone.
    pub(crate) fn end_if_executed(&mut self, id: u64) -> bool {
        let is_another = self
            .clients
            .get(&id)
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
                ("launches", Value::from(client.pages.client.launches())),
            ];
            self.journal
                .write("detached", &tenant.spec.name, message, &fields);
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
