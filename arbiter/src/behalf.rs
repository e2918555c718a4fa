//! Jobs that an engine's process of root's registers for a user, such as `slurmstepd` for a step of
//! a Slurm job.
//!
//! Each step registers by the job's name: the first one makes the job, the others join it and get
//! its token, so that all of them share one quota. The kernel says when such a process ends. The
//! job is over with the last of them, and what is left of it then is ended: the engine that would
//! have done so may be gone, as after `kill -9` of a `slurmstepd`.

use std::io;

use control::{ControlError, ErrorCode, JobSpec, Registered};
use policy::TenantId;

use crate::census::Process;
use crate::convert;
use crate::peer;
use crate::serve::Arbiter;
use crate::tenant::Tenant;
use crate::who::Peer;

/// Processes that join one job at most: steps of a job on one host.
const MAX_JOINED: usize = 4096;

/// Whose job it would be. What `peer` may not do is found by [`allowed`].
pub(crate) fn owner(job: &JobSpec, peer: &Peer) -> u32 {
    allowed(job, peer).unwrap_or(peer.uid)
}

/// Whether this is how Slurm's jobs are called: a user who took such a name would keep that job
/// from its own.
fn is_reserved(name: &str) -> bool {
    let number = name.strip_prefix("slurm.").unwrap_or_default();
    !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
}

/// A name that was not chosen by a user, or one like it that is not for a job of Slurm's.
pub(crate) fn unreserved(mut name: String) -> String {
    if is_reserved(&name) {
        name.truncate(control::NAME_MAX_BYTES - 1);
        name.push('-');
    }
    name
}

/// Whose job it is: the user that the process asks for, or its own.
///
/// # Errors
/// Only the host's root registers jobs of others, or by the name of one.
pub(crate) fn allowed(job: &JobSpec, peer: &Peer) -> Result<u32, ControlError> {
    match job.on_behalf_of {
        None if !peer.is_root() && is_reserved(&job.name) => {
            let message = format!("the name `{}` is for a job of Slurm's", job.name);
            let error = ControlError::new(ErrorCode::Invalid, message);
            Err(error.with_hint("choose another name"))
        }
        None => Ok(peer.uid),
        Some(uid) if peer.uid == 0 => {
            peer.must_be_of_this_host()?;
            Ok(uid)
        }
        Some(uid) => {
            let message = format!("user {} cannot register a job for user {uid}", peer.uid);
            let error = ControlError::new(ErrorCode::Permission, message);
            Err(error.with_hint("only an engine's process of root's can"))
        }
    }
}

/// Whether a tenant is the job that an engine asks for by this name.
fn is_same(tenant: &Tenant, owner: u32) -> bool {
    tenant.spec.on_behalf_of.is_some() && tenant.uid == owner && tenant.ending.is_none()
}

/// Takes the processes out that have ended, and the first that lives, as `watch` finds out. One
/// that cannot be watched may live, for want of descriptors above all: it stays, and is tried
/// again.
fn first_that_lives(
    joined: &mut Vec<Process>,
    mut watch: impl FnMut(Process) -> io::Result<bool>,
) -> io::Result<()> {
    while let Some(first) = joined.first() {
        let lives = watch(*first)?;
        joined.remove(0);
        if lives {
            break;
        }
    }
    Ok(())
}

impl Arbiter {
    /// Another process of an engine's job; `None`: there is no such job yet.
    pub(crate) fn join(
        &mut self,
        job: &JobSpec,
        (pid, owner): (u32, u32),
    ) -> Option<Result<Registered, ControlError>> {
        job.on_behalf_of?;
        let tenant = self.ledger.named(&job.name)?;
        if !is_same(tenant, owner) {
            return None;
        }
        let id = tenant.id;
        Some(self.join_this(id, pid))
    }

    fn join_this(&mut self, id: TenantId, pid: u32) -> Result<Registered, ControlError> {
        let failed = |message: String| ControlError::new(ErrorCode::Internal, message);
        self.wake(id)
            .map_err(|not_in| ControlError::new(ErrorCode::Refused, not_in.text))?;
        let started = peer::started_ticks(pid)
            .map_err(|error| failed(format!("process {pid} cannot be watched: {error}")))?;
        let process = Process {
            pid,
            started_ticks: started.unwrap_or(0),
        };
        let Some(tenant) = self.ledger.get_mut(id) else {
            return Err(failed("the job has ended".into()));
        };
        // Now and then, so that those that are there are not all looked at for each newcomer.
        if tenant.joined.len().is_power_of_two() {
            tenant.forget_dead_joined();
        }
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
        let stands =
            |tenant: &&Tenant| tenant.process.is_some() || tenant.joined.contains(&process);
        let Some(tenant) = tenant.filter(stands) else {
            let message = format!("process {pid} has ended before it joined the job");
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
            notices: self.notices_for(&tenant.spec),
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
        let Some(tenant) = self.ledger.get_mut(id) else {
            return;
        };
        if tenant.process.is_some() {
            return;
        }
        let mut joined = std::mem::take(&mut tenant.joined);
        let watched = first_that_lives(&mut joined, |process| {
            self.watch_launcher(id, process)?;
            let tenant = self.ledger.get(id);
            Ok(tenant.is_some_and(|tenant| tenant.process.is_some()))
        });
        if let Some(tenant) = self.ledger.get_mut(id) {
            tenant.joined = joined;
        }
        if let Err(error) = watched {
            self.warn_of_stranger(&format!(
                "processes of an engine cannot be watched for now: {error}"
            ));
        }
    }

    /// Tries again where a process that has joined could not be watched.
    pub(crate) fn watch_again(&mut self) {
        let unwatched = |tenant: &&Tenant| tenant.process.is_none() && !tenant.joined.is_empty();
        let unwatched = self.ledger.iter().filter(unwatched);
        for id in unwatched.map(|tenant| tenant.id).collect::<Vec<_>>() {
            self.watch_next(id);
            self.end_without_engine(id);
            self.reap_if_dead(id);
        }
    }

    /// Ends what is left of an engine's job that nothing of the engine stands beside any more.
    pub(crate) fn end_without_engine(&mut self, id: TenantId) {
        let Some(tenant) = self.ledger.get(id) else {
            return;
        };
        let is_over = tenant.spec.on_behalf_of.is_some()
            && tenant.process.is_none()
            && tenant.joined.is_empty();
        if is_over && tenant.ending.is_none() {
            let why = "the last process of the engine that registered it has ended";
            self.begin_ending(id, "engine_gone", why);
            self.end_all_of(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_cannot_be_watched_stays_and_those_that_have_ended_do_not() {
        let process = |pid| Process {
            pid,
            started_ticks: 1,
        };
        let all: Vec<Process> = (1..=4).map(process).collect();
        let mut joined = all.clone();
        let lacking = || io::Error::from_raw_os_error(nix::libc::EMFILE);
        let result = first_that_lives(&mut joined, |one| match one.pid {
            1 => Ok(false),
            _ => Err(lacking()),
        });
        assert!(result.is_err());
        assert_eq!(joined, all[1..]);
        first_that_lives(&mut joined, |one| Ok(one.pid == 3)).expect("watched");
        assert_eq!(joined, all[3..]);
        first_that_lives(&mut joined, |_| Ok(false)).expect("none");
        assert!(joined.is_empty());
    }

    #[test]
    fn no_user_chooses_a_name_of_slurms_and_none_is_given_one() {
        let job = JobSpec {
            name: "slurm.7".into(),
            ..JobSpec::default()
        };
        let inside = Peer::here(7, 0).inside("/docker/0");
        for peer in [&Peer::here(7, 1000), &inside] {
            let error = allowed(&job, peer).expect_err("reserved");
            assert_eq!(error.code, ErrorCode::Invalid);
        }
        assert_eq!(allowed(&job, &Peer::here(7, 0)), Ok(0));
        assert_eq!(unreserved("slurm.7".into()), "slurm.7-");
        assert_eq!(unreserved("slurm.x".into()), "slurm.x");
        let long = format!("slurm.{}", "7".repeat(control::NAME_MAX_BYTES - 6));
        control::check_name(&unreserved(long)).expect("a name");
    }

    #[test]
    fn a_containers_root_registers_jobs_of_nobody_else() {
        let job = JobSpec {
            on_behalf_of: Some(1000),
            ..JobSpec::default()
        };
        assert_eq!(allowed(&job, &Peer::here(7, 0)), Ok(1000));
        let inside = Peer::here(7, 0).inside("/docker/0");
        let error = allowed(&job, &inside).expect_err("refused");
        assert_eq!(error.code, ErrorCode::Permission);
        assert_eq!(owner(&job, &inside), 0);
    }
}
