//! The job for which others are shut: a latency job with a request, or the job that is owed most.

use super::account::Account;
use super::constants::Constants;
use super::rotation::Rotation;
use crate::slice::TenantId;

/// How far the others are shut.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Level {
    /// Who is ahead, until the held job has little pending.
    Owed,
    /// Also through its gaps.
    Promise,
    /// Everybody, while a request is served.
    Request,
}

/// The job that is held, and since when.
#[derive(Clone, Copy, Debug)]
pub(super) struct Held {
    pub tenant: TenantId,
    pub level: Level,
    /// When it wanted the device last.
    wanted_at_ns: u64,
}

impl Held {
    fn goes_on(&self, now_ns: u64, of: &Account, constants: &Constants) -> bool {
        let gap_ns = now_ns.saturating_sub(self.wanted_at_ns);
        let wants = of.look.wants();
        if of.look.banned && !wants || of.capped() {
            return false;
        }
        match self.level {
            Level::Request => {
                (wants || gap_ns <= constants.latency_linger_ns) && of.slack_ns >= 0.0
            }
            Level::Promise => {
                (wants || gap_ns <= constants.through_gap_ns)
                    && of.at_risk_ns() >= constants.owed_ns as f64 * 0.5
            }
            Level::Owed => {
                (of.look.pending_ns > constants.nearly_empty_ns || of.look.at_gate)
                    && of.owed_ns > 0.0
            }
        }
    }
}

/// Whether the device holds a job up. A job that merely runs, with little in flight, is helped by
/// nobody's gate.
fn held_up(of: &Account, constants: &Constants) -> bool {
    of.look.pending_ns > constants.nearly_empty_ns || of.look.waits()
}

/// Whether a latency job has a request and time left for it.
fn requests(of: &Account) -> bool {
    of.priority() && of.look.wants() && of.slack_ns > 0.0 && !of.capped()
}

/// Who is held from now on. `fresh`: it was not before.
pub(super) fn choose(
    now_ns: u64,
    before: Option<Held>,
    accounts: &[Account],
    rotation: &Rotation,
    constants: &Constants,
) -> Option<Held> {
    let of = |tenant: TenantId| accounts.iter().find(|of| of.tenant == tenant);
    let later = |tenant: TenantId| {
        if rotation.is_member(tenant) {
            constants.quantum_ns as f64
        } else {
            0.0
        }
    };
    let risk = |of: &Account| of.at_risk_ns() > constants.promise_ns as f64 + later(of.tenant);
    let held = before.and_then(|mut held| {
        let of = of(held.tenant)?;
        if !held.goes_on(now_ns, of, constants) {
            return None;
        }
        if of.look.wants() {
            held.wanted_at_ns = now_ns;
        }
        Some(held)
    });
    let new = |of: &Account, level| Held {
        tenant: of.tenant,
        level,
        wanted_at_ns: now_ns,
    };
    let most_owed = |a: &&Account, b: &&Account| a.owed_ns.total_cmp(&b.owed_ns);
    if held.is_none_or(|held| held.level != Level::Request)
        && let Some(of) = accounts.iter().filter(|of| requests(of)).max_by(most_owed)
    {
        return Some(new(of, Level::Request));
    }
    let held = held.or_else(|| {
        let due = |of: &&Account| {
            of.guaranteed()
                && !of.capped()
                && held_up(of, constants)
                && of.owed_ns > constants.owed_ns as f64 + later(of.tenant)
        };
        let of = accounts.iter().filter(due).max_by(most_owed)?;
        Some(new(of, Level::Owed))
    })?;
    let escalates = held.level == Level::Owed && of(held.tenant).is_some_and(risk);
    Some(Held {
        level: if escalates {
            Level::Promise
        } else {
            held.level
        },
        ..held
    })
}
