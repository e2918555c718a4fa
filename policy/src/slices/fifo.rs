//! First come, first served: the first tenant has the device whenever it wants it, and the others
//! use its pauses.
//!
//! This is what a device does without sharing, apart from the pauses, and the yardstick of the
//! other policies: with jobs of 100, 10 and 1 seconds in this order the completions are 100, 110
//! and 111 s, on average 107 s, where the shortest first gives 1, 11 and 111 s, on average 41 s.
//!
//! Weights have no effect here; classes, pauses, floors and caps do. A later tenant that got the
//! device in a pause gives it back at the end of its slice. There is no debt, since no tenant was
//! promised a part.

use super::SliceRegistration;
use crate::registry::Registration;
use crate::slice::{TenantId, TenantView, View};
use crate::turns::Turns;
use crate::turns::{Order, Rank};

/// How it is chosen.
pub(super) static FIFO: SliceRegistration = Registration {
    name: "fifo",
    summary: "the first that came, the others in its pauses",
    params: &[],
    build: |_| Box::new(Turns::new(Fifo)),
};

/// See the module's documentation.
#[derive(Debug)]
struct Fifo;

impl Order for Fifo {
    fn name(&self) -> &'static str {
        "fifo"
    }

    fn charge(&mut self, _id: TenantId, _device_ns: u64) {}

    fn follow(&mut self, _view: &View<'_>) {}

    fn rank(&self, tenant: &TenantView, _view: &View<'_>, _ahead_ns: u64) -> Option<Rank> {
        Some(Rank::new(0, i128::from(tenant.arrived_ns)))
    }
}
