//! Jobs that outlive their launcher: what `sublet run` started has ended, and nothing of the job
//! uses a device, but processes of it live (in tmux, behind `&`, under a scheduler) and may come
//! for one at any time. Their token stays good.
//!
//! Such a job is dormant. It has no share, no slot and no page; others may take its name and what
//! it was promised. It wakes when a process of it attaches, where its terms can still be kept. It
//! is reaped when no process of this host belongs to it any more ([`crate::census`]), when there
//! are too many of them, or after [`DORMANT_NS`]; its token is refused after that.

use policy::TenantId;
use serde_json::Value;

use crate::census::{Known, Living, Process};
use crate::clients::Clients;
use crate::convert::{self, NotIn};
use crate::journal::About;
use crate::ledger::Ledger;
use crate::outsiders::News;
use crate::serve::Arbiter;
use crate::tenant::{Dormant, Tenant};
use channel::wire::Outcome;

/// Dormant jobs of one user, and in all; the one that has slept longest gives way.
const MAX_OF_USER: usize = 64;
const MAX_DORMANT: usize = 256;
/// How long a job may sleep. TIMEOUT: a week is a session that nobody comes back to.
const DORMANT_NS: u64 = 7 * 24 * 3600 * 1_000_000_000;

/// What the jobs are known by, for the census.
pub(crate) fn known_jobs(ledger: &Ledger, clients: &Clients) -> Vec<Known> {
    let known = ledger.iter().map(|tenant| {
        let launcher = tenant.process.is_some().then_some(Process {
            pid: tenant.spec.pid,
            started_ticks: tenant.started_ticks,
        });
        let attached = tenant.clients.iter().filter_map(|id| {
            let client = clients.get(*id)?;
            Some(Process {
                pid: client.pid,
                started_ticks: client.started_ticks,
            })
        });
        let members = tenant.members.iter().copied();
        Known {
            id: tenant.id,
            token: tenant.token,
            since_ticks: tenant.since_ticks,
            members: launcher
                .into_iter()
                .chain(attached)
                .chain(members)
                .collect(),
            session: tenant.session,
            wanted: tenant.dormant.is_some() || tenant.ending.is_some(),
        }
    });
    known.collect()
}

impl Arbiter {
    /// Nothing of a job is attached, and its launcher is gone: what lives of it is counted.
    pub(crate) fn fall_asleep(&mut self, id: TenantId) {
        let now_ns = self.clock.mono_ns();
        let Some(tenant) = self.ledger.get_mut(id) else {
            return;
        };
        if tenant.dormant.is_some() {
            return;
        }
        tenant.dormant = Some(Dormant {
            since_unix_ms: self.clock.unix_ms(),
            since_ns: now_ns,
            living: None,
            status: None,
            usages: Vec::new(),
        });
        self.rest_in_group(id);
        self.publish_terms();
        self.persistence.mark_old();
        self.outsiders.count_at(now_ns);
        self.look_after_dormant(now_ns);
    }

    /// Has the processes of dormant jobs counted where that is due.
    pub(crate) fn look_after_dormant(&mut self, now_ns: u64) {
        let (ledger, clients) = (&self.ledger, &self.clients);
        let jobs = || known_jobs(ledger, clients);
        self.outsiders.count_if_due(now_ns, jobs);
    }

    /// The census has answered.
    pub(crate) fn on_census(&mut self, now_ns: u64) {
        for news in self.outsiders.take() {
            match news {
                News::Counted {
                    living,
                    whole,
                    asked_ns,
                } => {
                    for (id, living) in living {
                        self.on_counted(id, living, whole, asked_ns);
                    }
                }
                News::Escaped(escaped) => self.on_escaped(escaped),
            }
        }
        if self.ledger.iter().any(|tenant| tenant.dormant.is_some()) {
            self.outsiders.count_again(now_ns);
            self.look_after_dormant(now_ns);
        }
    }

    fn on_counted(&mut self, id: TenantId, living: Living, whole: bool, asked_ns: u64) {
        let Some(tenant) = self.ledger.get_mut(id) else {
            return;
        };
        if tenant.ending.is_some() && living.count > 0 {
            self.end_members(&living);
            return;
        }
        let Some(dormant) = &mut tenant.dormant else {
            return;
        };
        // One that fell asleep after this was asked is counted by the next one.
        if dormant.since_ns > asked_ns {
            self.outsiders.count_at(0);
            return;
        }
        let too_long = asked_ns.saturating_sub(dormant.since_ns) > DORMANT_NS;
        if (living.count == 0 && whole) || too_long {
            self.reap(
                id,
                if too_long {
                    "it has slept for a week"
                } else {
                    ""
                },
            );
            return;
        }
        let first = dormant.living.is_none();
        let changed = tenant.members != living.members;
        dormant.living = Some(living.count);
        if living.count > 0 {
            tenant.members = living.members;
        }
        if let Some(status) = &mut dormant.status {
            status.dormant_processes = Some(living.count);
        }
        if changed {
            self.persistence.mark_old();
        }
        if first {
            self.doze(id);
        }
    }

    /// Processes of the job live: it keeps its token, and nothing else.
    fn doze(&mut self, id: TenantId) {
        let now_ns = self.clock.mono_ns();
        let status = self.status_of(id);
        let usages = (0..self.schedulers.len()).filter_map(|index| {
            let usage = self.schedulers.get_mut(index)?.retire(now_ns, id)?;
            Some((index, usage))
        });
        let usages: Vec<_> = usages.collect();
        let Some(tenant) = self.ledger.get_mut(id) else {
            return;
        };
        tenant.close_page();
        let uid = tenant.uid;
        let name = tenant.spec.name.clone();
        let Some(dormant) = &mut tenant.dormant else {
            return;
        };
        let living = dormant.living.unwrap_or(0);
        dormant.usages = usages;
        dormant.status = status.map(|mut status| {
            convert::at_rest(&mut status, control::JobState::Dormant);
            status.dormant_processes = Some(living);
            Box::new(status)
        });
        let message = format!(
            "job `{name}` is dormant: its launcher has ended, {living} of its processes live and none uses a device"
        );
        let fields = [("living", Value::from(living))];
        self.journal
            .write("dormant", About::job(&name, id.0), message, &fields);
        self.publish_terms();
        self.persistence.mark_old();
        let sleepers = |of: &dyn Fn(&&Tenant) -> bool| {
            let asleep = self.ledger.iter().filter(|tenant| {
                let asleep = tenant.dormant.as_ref();
                asleep.is_some_and(|one| one.status.is_some()) && of(tenant)
            });
            let since = asleep.map(|tenant| {
                let since = tenant.dormant.as_ref().map_or(0, |one| one.since_unix_ms);
                (since, tenant.id)
            });
            let all: Vec<(u64, TenantId)> = since.collect();
            (all.len(), all.into_iter().min().map(|(_, id)| id))
        };
        let of_user = sleepers(&|tenant| tenant.uid == uid);
        let all = sleepers(&|_| true);
        for ((count, oldest), (most, whose)) in [of_user, all]
            .into_iter()
            .zip([(MAX_OF_USER, "of one user"), (MAX_DORMANT, "in all")])
        {
            if let Some(oldest) = oldest.filter(|_| count > most) {
                self.reap(
                    oldest,
                    &format!("there are more than {most} dormant jobs {whose}"),
                );
                return;
            }
        }
    }

    /// A process has come for a dormant job.
    pub(crate) fn wake(&mut self, id: TenantId) -> Result<(), NotIn> {
        let Some(tenant) = self.ledger.get(id) else {
            return Ok(());
        };
        let Some(dormant) = &tenant.dormant else {
            return Ok(());
        };
        let slept = dormant.status.is_some();
        if let Some(why) = self.lacks_name(tenant.uid) {
            return Err(NotIn::new(Outcome::Failed, why));
        }
        let ceiling = self.rulebook.ceiling(tenant.uid, &tenant.user);
        let (spec, uid, user) = (tenant.spec.clone(), tenant.uid, tenant.user.clone());
        if let Err(refusal) = self.admit(&spec, Some(id), (uid, &user, &ceiling)) {
            let error = convert::refusal(&refusal);
            let text = format!(
                "job `{}` was dormant, and what it was promised is not free any more: {}",
                spec.name, error.message
            );
            return Err(NotIn::new(Outcome::Full, text));
        }
        if let Some(tenant) = self.ledger.get_mut(id)
            && let Some(dormant) = tenant.dormant.take()
        {
            tenant.usages = dormant.usages;
            // It was admitted with them, a moment ago.
            tenant.promises = true;
            if slept {
                let name = tenant.spec.name.clone();
                let message = format!("job `{name}` is awake: a process of it uses a device again");
                self.journal
                    .write("woken", About::job(&name, id.0), message, &[]);
            }
        }
        self.publish_limits();
        self.publish_terms();
        self.persistence.mark_old();
        Ok(())
    }
}
