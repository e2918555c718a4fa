//! Latency targets of jobs: how they fare, and that is reported where one is not met. A target that
//! is missed in silence helps nobody.

use control::LatencyStatus;
use policy::{TenantId, Unmet};
use serde_json::Value;

use crate::dispatch::Targeted;
use crate::journal::About;
use crate::serve::Arbiter;
use crate::tenant::Tenant;

/// A target counts as met again after so long without a reason against it: what others have on the
/// device comes and goes.
const CALM_NS: u64 = 10_000_000_000;

/// Why a target is not met.
struct Why {
    /// In a word, for the journal.
    word: &'static str,
    /// In a clause, with what to do.
    text: String,
}

impl Arbiter {
    /// How a job fares with its latency target; `None`: it has none.
    pub(crate) fn latency_of(&self, tenant: &Tenant) -> Option<LatencyStatus> {
        let (status, why) = self.target_of(tenant)?;
        Some(LatencyStatus {
            unmet: why.map(|why| why.text),
            ..status
        })
    }

    /// Reports targets that are not met, and those that are again; ten times a second.
    pub(crate) fn look_at_targets(&mut self, now_ns: u64) {
        let with_target = (self.ledger.iter())
            .filter(|tenant| {
                tenant.spec.settings.latency_target.is_some() || tenant.unmet.is_some()
            })
            .map(|tenant| tenant.id);
        let with_target: Vec<TenantId> = with_target.collect();
        for id in with_target {
            let Some(tenant) = self.ledger.get(id) else {
                continue;
            };
            let target = self.target_of(tenant);
            let name = tenant.spec.name.clone();
            let (before, after) = (tenant.unmet, target.as_ref().and_then(|it| it.1.as_ref()));
            let (now, reported) = match (before, after) {
                (None, Some(why)) => (Some((why.word, now_ns)), Some(Some(why))),
                (Some((word, last_ns)), Some(why)) if word != why.word => {
                    let is_new = now_ns.saturating_sub(last_ns) > CALM_NS;
                    let now = if is_new {
                        (why.word, now_ns)
                    } else {
                        (word, last_ns)
                    };
                    (Some(now), is_new.then_some(Some(why)))
                }
                (Some((word, _)), Some(_)) => (Some((word, now_ns)), None),
                // It has no target any more, and nothing is left to say of it.
                (_, None) if target.is_none() => (None, None),
                (Some((_, last_ns)), None) if now_ns.saturating_sub(last_ns) > CALM_NS => {
                    (None, Some(None))
                }
                (before, None) => (before, None),
            };
            if let (Some((status, _)), Some(why)) = (&target, reported) {
                let message = match why {
                    Some(why) => {
                        format!("job `{name}`: its latency target is not met: {}", why.text)
                    }
                    None => format!("job `{name}`: its latency target is met again"),
                };
                let mut fields = vec![
                    ("target_ns", Value::from(status.target_ns)),
                    ("bursts", Value::from(status.bursts)),
                    ("missed", Value::from(status.missed)),
                ];
                let kind = match why {
                    Some(why) => {
                        tracing::warn!("{message}");
                        fields.push(("why", Value::from(why.word)));
                        "latency_unmet"
                    }
                    None => "latency_met",
                };
                self.journal
                    .write(kind, About::job(&name, id.0), message, &fields);
            }
            if let Some(tenant) = self.ledger.get_mut(id) {
                tenant.unmet = now;
            }
        }
    }

    /// The sums and the worst over a job's devices, and why the target is not met.
    fn target_of(&self, tenant: &Tenant) -> Option<(LatencyStatus, Option<Why>)> {
        let target_ns = tenant.spec.settings.latency_target?.nanos();
        let mut status = LatencyStatus {
            target_ns,
            ..LatencyStatus::default()
        };
        let mut first = None;
        for (device, scheduler) in self.schedulers.iter().enumerate() {
            let Some(targeted) = scheduler.targeted(tenant.id) else {
                continue;
            };
            if let Targeted::By(report) = &targeted {
                status.bursts += report.bursts;
                status.missed += report.missed;
                status.p99_ns = status.p99_ns.max(report.p99_ns);
            }
            let why = self.why(device, targeted);
            first = first.or(why);
        }
        Some((status, first))
    }

    fn why(&self, device: usize, targeted: Targeted) -> Option<Why> {
        let ms = |ns: u64| format!("{:.1} ms", ns as f64 / 1e6);
        let (word, text) = match targeted {
            Targeted::NotYet => return None,
            Targeted::NotBy(name) => (
                "policy",
                format!(
                    "device {device} runs by `{name}`, which looks at no target: give it the policy `latency`"
                ),
            ),
            Targeted::AtOnce => (
                "mode",
                format!(
                    "all jobs run at once on device {device}: give it the mode `exclusive`"
                ),
            ),
            Targeted::Gang => (
                "gang",
                "the job has all of its devices at once, and such turns look at no target: start it with --gang false".into(),
            ),
            Targeted::By(report) => match report.unmet? {
                Unmet::TooShort {
                    needs_ns,
                    service_ns,
                    behind,
                    wait_ns,
                } => {
                    let behind = behind.and_then(|id| self.ledger.get(id));
                    let behind = behind.map_or("others".into(), |it| format!("job `{}`", it.spec.name));
                    let text = format!(
                        "a burst needs up to {} on device {device}: {} of its own, after {} for what {behind} has there; \
                         give it {} or more, or shorter kernels to the others",
                        ms(needs_ns),
                        ms(service_ns),
                        ms(wait_ns),
                        ms(needs_ns + needs_ns / 4)
                    );
                    ("too-short", text)
                }
                Unmet::Share => (
                    "share",
                    format!(
                        "{} of {} bursts were late on device {device}, the last of them because the job's share was used up: give it more of it",
                        report.missed, report.bursts
                    ),
                ),
                Unmet::Missed => (
                    "missed",
                    format!(
                        "{} of {} bursts were late on device {device}: 99 % of the recent ones took up to {}",
                        report.missed,
                        report.bursts,
                        ms(report.p99_ns.unwrap_or(0))
                    ),
                ),
            },
        };
        Some(Why { word, text })
    }
}
