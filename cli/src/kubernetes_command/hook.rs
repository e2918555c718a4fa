//! The cluster hook as the scheduler extender asks it (`POST /v1/decide`).

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cluster::live::http::client::{Client, ClientError};
use cluster::live::placement::{Candidate, DecideRequest, Decided, JobProfile};
use control::Class;
use kubernetes::advice::{Hook, HookError, Placed, Question};
use kubernetes::fit::{self, Wish};

use crate::cluster_command::{self, args};

const GIB: u64 = 1 << 30;
/// Connections that are kept for the next question.
const KEPT: usize = 8;

/// How long a hook may take.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// To prove on a connection that it knows the token.
    pub connecting: Duration,
    /// To answer a question.
    pub answer: Duration,
}

/// A hook, with connections to it.
pub struct Remote {
    hook: args::Hook,
    limits: Limits,
    idle: Mutex<Vec<Client>>,
}

impl Remote {
    /// `None`: no hook is named.
    ///
    /// # Errors
    /// Its address is none, or its token cannot be read.
    pub fn find(hook: &args::Hook, limits: Limits) -> anyhow::Result<Option<Self>> {
        if cluster_command::url(hook).is_none() {
            return Ok(None);
        }
        let remote = Self {
            hook: hook.clone(),
            limits,
            idle: Mutex::default(),
        };
        let first = remote.client()?;
        remote.idle().push(first);
        Ok(Some(remote))
    }

    fn client(&self) -> anyhow::Result<Client> {
        let client = cluster_command::client_within(&self.hook, self.limits.answer)?;
        Ok(client.connecting_within(self.limits.connecting))
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Client>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Hook for Remote {
    fn decide(&self, question: &Question) -> Result<Placed, HookError> {
        let idle = self.idle().pop();
        let mut client = match idle {
            Some(client) => client,
            // The token is read again: it may be another one by now.
            None => self
                .client()
                .map_err(|error| HookError::Away(format!("{error:#}")))?,
        };
        let decided: Decided = client
            .ask("POST", "/v1/decide", Some(&request(question)))
            .map_err(|error| match error {
                ClientError::Refused { .. } => HookError::Refused(error.to_string()),
                other => HookError::Away(other.to_string()),
            })?;
        let mut idle = self.idle();
        if idle.len() < KEPT {
            idle.push(client);
        }
        drop(idle);
        Ok(placed(decided))
    }
}

fn request(question: &Question) -> DecideRequest {
    DecideRequest {
        // A pod that waits has no job anywhere: what it says of one is not looked at.
        job: JobProfile {
            id: question.wish.name.clone(),
            ..profile(&question.wish)
        },
        candidates: question.candidates.iter().map(candidate).collect(),
    }
}

fn candidate(one: &fit::Candidate) -> Candidate {
    let residents = one.residents.iter().map(|wish| match wish.job {
        Some(_) => profile(wish),
        // Its node may report it already, by a name that is not known here. Its memory and share
        // count once all the same: in what is free.
        None => JobProfile {
            mem_bytes: Some(0),
            share: None,
            ..profile(wish)
        },
    });
    Candidate {
        node: one.node.clone(),
        uuid: one.uuid.clone(),
        total_bytes: one.total_gib.saturating_mul(GIB),
        free_bytes: Some(one.free_gib.saturating_mul(GIB)),
        free_share: Some(one.free_share.clamp(0.0, 1.0)),
        residents: residents.collect(),
        ..Candidate::default()
    }
}

fn profile(wish: &Wish) -> JobProfile {
    JobProfile {
        id: wish.job.as_ref().unwrap_or(&wish.name).clone(),
        kind: wish.kind.clone(),
        class: match wish.share {
            Some(_) => Class::Guaranteed,
            None => Class::Opportunistic,
        },
        mem_bytes: Some(wish.memory_gib.saturating_mul(GIB)),
        share: wish.share,
        ..JobProfile::default()
    }
}

fn placed(decided: Decided) -> Placed {
    let unfit = decided.unfit.into_iter();
    Placed {
        node: decided.node,
        device: decided.device,
        slowdown: decided.expected_slowdown.unwrap_or(1.0),
        confidence: decided.confidence,
        reason: decided.reason,
        unfit: unfit.map(|one| (one.node, one.uuid, one.reason)).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wish(name: &str, job: Option<&str>) -> Wish {
        Wish {
            name: name.into(),
            kind: "k".into(),
            job: job.map(Into::into),
            memory_gib: 8,
            share: Some(0.25),
        }
    }

    #[test]
    fn a_pods_memory_counts_once_whether_its_node_reports_it_or_not() {
        let one = fit::Candidate {
            node: "n".into(),
            uuid: "GPU-a".into(),
            total_gib: 80,
            free_gib: 64,
            free_share: -0.5,
            residents: vec![wish("d/p", Some("units-7")), wish("d/q", None)],
        };
        let question = Question {
            wish: wish("d/new", Some("units-7")),
            candidates: vec![one],
        };
        let asked = request(&question);
        assert_eq!(asked.job.id, "d/new", "it has no job yet");
        let one = &asked.candidates[0];
        assert_eq!(
            (one.free_bytes, one.free_share),
            (Some(64 * GIB), Some(0.0))
        );
        let (known, unknown) = (&one.residents[0], &one.residents[1]);
        assert_eq!(
            (known.id.as_str(), known.mem_bytes),
            ("units-7", Some(8 * GIB))
        );
        assert_eq!((known.share, known.class), (Some(0.25), Class::Guaranteed));
        assert_eq!((unknown.id.as_str(), unknown.mem_bytes), ("d/q", Some(0)));
        assert_eq!(unknown.share, None);
    }
}
