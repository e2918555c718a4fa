//! Jobs that an engine's process of root's registers for a user, such as `slurmstepd` for a step of
//! a Slurm job.
//!
//! Each step registers by the job's name: the first one makes the job, the others join it and get
//! its token, so that all of them share one quota. The kernel says when such a process ends. The
//! job is over with the last of them, and what is left of it then is ended: the engine that would
//! have done so may be gone, as after `kill -9` of a `slurmstepd`.

use control::{ControlError, ErrorCode, JobSpec, Registered};
use policy::TenantId;

use crate::census::{Living, Process};
use crate::control_server::Peer;
use crate::convert;
use crate::peer;
use crate::serve::Arbiter;
use crate::tenant::Tenant;

/// Processes that join one job at most: steps of a job on one host.
const MAX_JOINED: usize = 4096;

/// Whose job it would be. What `peer` may not do is found by [`allowed`].
pub(crate) fn owner(job: &JobSpec, peer: Peer) -> Peer {
    allowed(job, peer).unwrap_or(peer)
}

/// Whether this is how Slurm's jobs are called: a user who took such a name would keep that job
/// from its own.
pub(crate) fn is_reserved(name: &str) -> bool {
    let number = name.strip_prefix("slurm.").unwrap_or_default();
    !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
}

/// Whose job it is: the process that asks, and the user that it asks for.
///
/// # Errors
/// Only root registers jobs of others, or by the name of one.
pub(crate) fn allowed(job: &JobSpec, peer: Peer) -> Result<Peer, ControlError> {
    match job.on_behalf_of {
        None if peer.uid != 0 && is_reserved(&job.name) => {
            let message = format!("the name `{}` is for a job of Slurm's", job.name);
            let error = ControlError::new(ErrorCode::Invalid, message);
            Err(error.with_hint("choose another name"))
        }
        None => Ok(peer),
        Some(uid) if peer.uid == 0 => Ok(Peer { uid, ..peer }),
        Some(uid) => {
            let message = format!("user {} cannot register a job for user {uid}", peer.uid);
            let error = ControlError::new(ErrorCode::Permission, message);
            Err(error.with_hint("only an engine's process of root's can"))
        }
    }
}

/// Whether a tenant is the job that an engine asks for by this name.
fn is_same(tenant: &Tenant, owner: Peer) -> bool {
    tenant.spec.on_behalf_of.is_some() && tenant.uid == owner.uid && tenant.ending.is_none()
}

impl Arbiter {
    /// Another process of an engine's job; `None`: there is no such job yet.
    pub(crate) fn join(
        &mut self,
        job: &JobSpec,
        owner: Peer,
    ) -> Option<Result<Registered, ControlError>> {
        job.on_behalf_of?;
        let tenant = self.ledger.named(&job.name)?;
        if !is_same(tenant, owner) {
            return None;
        }
        let id = tenant.id;
        Some(self.join_this(id, owner))
    }

    fn join_this(&mut self, id: TenantId, owner: Peer) -> Result<Registered, ControlError> {
        let failed = |message: String| ControlError::new(ErrorCode::Internal, message);
        self.wake(id)
            .map_err(|not_in| ControlError::new(ErrorCode::Refused, not_in.text))?;
        let started = peer::started_ticks(owner.pid)
            .map_err(|error| failed(format!("process {} cannot be watched: {error}", owner.pid)))?;
        let process = Process {
            pid: owner.pid,
            started_ticks: started.unwrap_or(0),
        };
        let Some(tenant) = self.ledger.get_mut(id) else {
            return Err(failed("the job has ended".into()));
        };
        if tenant.joined.len() >= MAX_JOINED {
            let name = &tenant.spec.name;
            let message = format!("{MAX_JOINED} processes have joined job `{name}` already");
            return Err(ControlError::new(ErrorCode::Refused, message));
        }
        tenant.joined.push(process);
        if tenant.process.is_none() {
            self.watch_next(id);
        }
        self.persistence.mark_old();
        let limits = self.limits_of(id);
        let share = self.share_of(id);
        let tenant = self.ledger.get(id);
        let Some(tenant) = tenant.filter(|tenant| tenant.process.is_some()) else {
            let message = format!("process {} has ended before it joined the job", owner.pid);
            return Err(ControlError::new(ErrorCode::Invalid, message));
        };
        Ok(Registered {
            job: tenant.spec.name.clone(),
            id: id.0,
            token: convert::token_text(&tenant.token),
            channel_socket: self.rulebook.options().dir.channel_socket(),
            mem_limit_bytes: limits,
            share,
            settings: Some(tenant.spec.settings.clone()),
            capped: tenant.spec.bounds.capped.clone(),
        })
    }

    /// The process that registered a job has ended.
    pub(crate) fn on_launcher_ended(&mut self, id: TenantId) {
        let Some(tenant) = self.ledger.get_mut(id) else {
            return;
        };
        tenant.process = None;
        tenant.started_ticks = 0;
        self.persistence.mark_old();
        self.watch_next(id);
        self.end_without_engine(id);
        self.reap_if_dead(id);
    }

    /// The first of the processes that have joined and live takes the place of the one that has
    /// ended.
    pub(crate) fn watch_next(&mut self, id: TenantId) {
        // Out of the ledger for as long as it is watched: no promise of it changes.
        while let Some(tenant) = self.ledger.get_mut(id)
            && tenant.process.is_none()
            && !tenant.joined.is_empty()
        {
            let next = tenant.joined.remove(0);
            if let Err(error) = self.watch_launcher(id, next) {
                tracing::warn!("process {} cannot be watched: {error}", next.pid);
            }
        }
    }

    /// Ends what is left of an engine's job that nothing of the engine stands beside any more.
    pub(crate) fn end_without_engine(&mut self, id: TenantId) {
        let Some(tenant) = self.ledger.get_mut(id) else {
            return;
        };
        let is_over = tenant.spec.on_behalf_of.is_some()
            && tenant.process.is_none()
            && tenant.joined.is_empty();
        if !is_over || tenant.ending.is_some() {
            return;
        }
        tenant.ending = Some("the engine's process that stood for it has ended".into());
        let living = Living {
            count: 0,
            members: self.members_of(id),
        };
        self.end_members(&living);
    }
}
