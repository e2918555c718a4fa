//! The timeline of a device: after each step its tenants are looked at, and what has ended since
//! the last one is added to the ring.

use channel::Verb;
use policy::TenantId;

use super::DeviceScheduler;
use super::entity::{Open, RunEntity};
use crate::timeline::{Kind, Ring, Span};

impl DeviceScheduler {
    /// The spans of this device.
    pub fn timeline(&self) -> &Ring {
        &self.timeline
    }

    /// Its tenants, with what they are in the middle of.
    pub fn open_spans(&self) -> impl Iterator<Item = (TenantId, Open)> + '_ {
        let entities = self.roster.iter();
        entities.map(|entity| (entity.tenant, entity.open_spans()))
    }

    /// Takes note of what has ended.
    pub(super) fn trace(&mut self, now_ns: u64) {
        let moves = !self.residency.is_idle();
        for entity in self.roster.iter_mut() {
            let id = entity.tenant;
            let verb = if moves { self.residency.verb(id) } else { None };
            let copied_bytes = if moves || entity.moves() {
                self.residency.copied_bytes(id)
            } else {
                0
            };
            trace(&mut self.timeline, entity, now_ns, verb, copied_bytes);
        }
    }

    /// A tenant is about to go: its spans end now.
    pub(super) fn end_trace(&mut self, now_ns: u64, entity: &mut RunEntity) {
        entity.end_spans(now_ns, |span| self.timeline.push(span));
    }

    /// The device runs in another way from now on.
    pub(super) fn trace_mode(&mut self, now_ns: u64) {
        self.timeline.push(Span {
            kind: Kind::Mode,
            tenant: None,
            start_ns: now_ns,
            end_ns: now_ns,
            device_ns: 0,
            count: match self.at_once() {
                false => 0,
                true if self.mode.is_lend() => 2,
                true => 1,
            },
        });
    }
}

fn trace(
    ring: &mut Ring,
    entity: &mut RunEntity,
    now_ns: u64,
    verb: Option<Verb>,
    copied_bytes: u64,
) {
    let moves = verb.map(|verb| match verb {
        Verb::Evict => Kind::Evict,
        Verb::Restore => Kind::Restore,
        Verb::Fit => Kind::Fit,
    });
    entity.trace(now_ns, (moves, copied_bytes), |span| ring.push(span));
}
