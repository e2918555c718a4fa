//! Processes that have ended before the loop has heard of it. The kernel reports an end and what
//! follows it in no certain order, and a program that has waited for a process counts on what that
//! one had.
//!
//! So nobody is refused for what the dead hold. The pidfds are asked before a hello is answered,
//! before a refusal of the ledger, and when a process asks that is about to refuse its program
//! memory ([`channel::ClientHalf::ask_for_credit`]): what the dead had is free then, at once.

use std::os::fd::AsFd;

use policy::TenantId;

use crate::peer;
use crate::refusal::{Ceiling, Refusal};
use crate::serve::Arbiter;
use crate::spec::Spec;
use crate::tenant::Tenant;

/// Looking for the dead of a job because its processes ask takes a twentieth of the loop's time at
/// most.
const REST: u64 = 20;

impl Arbiter {
    /// Lets the clients of a job go whose processes have ended by now.
    pub(crate) fn reap_processes(&mut self, id: TenantId) {
        let Some(tenant) = self.ledger.get(id) else {
            return;
        };
        let ids = tenant.clients.clone();
        for client in self.dead_of(&ids) {
            self.on_client_ended(client);
        }
    }

    /// The same of all jobs, and of the processes that stand for them. Whether there were any.
    pub(crate) fn reap_all(&mut self) -> bool {
        let dead = self.dead_of(&self.clients.ids());
        for client in &dead {
            self.on_client_ended(*client);
        }
        let watched = self.ledger.iter().filter_map(|tenant| {
            let process = tenant.process.as_ref()?;
            Some((tenant.id, process.as_fd()))
        });
        let (ids, processes): (Vec<_>, Vec<_>) = watched.unzip();
        let ended = peer::which_have_ended(&processes);
        let gone: Vec<TenantId> = ids
            .into_iter()
            .zip(ended)
            .filter_map(|(id, ended)| ended.then_some(id))
            .collect();
        for id in &gone {
            self.on_launcher_ended(*id);
        }
        let reaped = self.reap_missing();
        !dead.is_empty() || !gone.is_empty() || reaped
    }

    /// Whether `spec` can be let in, or become the terms of `own`, beside those that live.
    ///
    /// # Errors
    /// As [`Ledger::admit`](crate::ledger::Ledger::admit).
    pub(crate) fn admit(
        &mut self,
        spec: &Spec,
        own: Option<TenantId>,
        (uid, user, ceiling): (u32, &str, &Ceiling),
    ) -> Result<(), Refusal> {
        let whose = || (uid, user, ceiling.clone());
        match self.ledger.admit(spec, own, whose(), &self.devices) {
            Err(_) if self.reap_all() => self.ledger.admit(spec, own, whose(), &self.devices),
            admitted => admitted,
        }
    }

    /// Answers the questions of a job's processes whether others of it have ended, unless that was
    /// done a moment ago: then it is done at the next housekeeping.
    pub(crate) fn answer_credit(&mut self, id: TenantId, now_ns: u64) {
        let Some(tenant) = self.ledger.get(id) else {
            return;
        };
        let clients = tenant.clients.clone();
        let asked = clients.iter().filter_map(|client| {
            let asked = self.clients.get(*client)?.credit_asked()?;
            Some((*client, asked))
        });
        // Read before the look: it is the answer to these, and to no later ones.
        let asked: Vec<(u64, u32)> = asked.collect();
        if asked.is_empty() || now_ns < tenant.credit_again_ns {
            return;
        }
        self.reap_processes(id);
        if let Some(tenant) = self.ledger.get_mut(id)
            && tenant.reap_missing()
        {
            self.persistence.mark_old();
        }
        for (client, asked) in asked {
            if let Some(client) = self.clients.get_mut(client) {
                client.answer_credit(asked);
            }
        }
        let after_ns = self.clock.mono_ns();
        let took_ns = after_ns.saturating_sub(now_ns);
        if let Some(tenant) = self.ledger.get_mut(id) {
            tenant.credit_again_ns = after_ns + took_ns.saturating_mul(REST);
        }
    }

    /// The same for all jobs.
    pub(crate) fn answer_credits(&mut self, now_ns: u64) {
        let ids: Vec<TenantId> = self.ledger.iter().map(|tenant| tenant.id).collect();
        for id in ids {
            self.answer_credit(id, now_ns);
        }
    }

    fn dead_of(&self, ids: &[u64]) -> Vec<u64> {
        let known = ids.iter().filter_map(|id| {
            let client = self.clients.get(*id)?;
            Some((*id, client.process.as_fd()))
        });
        let (ids, processes): (Vec<_>, Vec<_>) = known.unzip();
        let ended = peer::which_have_ended(&processes);
        let dead = ids.into_iter().zip(ended);
        dead.filter_map(|(id, ended)| ended.then_some(id)).collect()
    }

    /// Clients of the arbiter before this one that have died meanwhile; whether there were any.
    fn reap_missing(&mut self) -> bool {
        let waiting = self.ledger.iter_mut().filter(|t| !t.missing.is_empty());
        let reaped =
            waiting.filter_map(|tenant: &mut Tenant| tenant.reap_missing().then_some(tenant.id));
        let reaped: Vec<TenantId> = reaped.collect();
        for id in &reaped {
            self.persistence.mark_old();
            self.reap_if_dead(*id);
        }
        !reaped.is_empty()
    }
}
