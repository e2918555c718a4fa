//! Asking the slice policy: the one place where a device's tenants become a policy's view.
//!
//! Invariants: the policy sees what this device charges, and nothing else; it is asked once a step
//! at most, with the bounds of a slice that hold then. The scratch lists keep their capacity, so
//! that a decision allocates nothing.

use policy::quantum::Lengths;
use policy::{
    CoordinatorTerms, Decision, Device, Holder, LatencyReport, QuantumBounds, SlicePolicy,
    TenantId, TenantView, View,
};

use super::entity::RunEntity;
use super::roster::Roster;

/// The slice policy of one device, and how long slices are.
#[derive(Debug)]
pub(super) struct SliceChoice {
    policy: Box<dyn SlicePolicy>,
    holders: usize,
    memory_bytes: u64,
    /// What a hand-over costs, as far as it is known.
    turn_ns: u64,
    /// Bounds of a slice now.
    quantum: QuantumBounds,
    /// What the last slice was given, in microseconds.
    slice_us: u32,
    views: Vec<TenantView>,
    held: Vec<Holder>,
}

impl SliceChoice {
    pub fn new(
        policy: Option<Box<dyn SlicePolicy>>,
        holders: usize,
        memory_bytes: u64,
        lengths: Lengths,
    ) -> Self {
        Self {
            policy: policy.unwrap_or_else(|| Box::new(policy::Stride::new())),
            holders: holders.max(1),
            memory_bytes,
            turn_ns: 0,
            quantum: lengths.now(0, true),
            slice_us: 0,
            views: Vec::new(),
            held: Vec::new(),
        }
    }

    /// Another policy (`None`: the same one goes on), so many holders, so much memory.
    pub fn set(&mut self, policy: Option<Box<dyn SlicePolicy>>, holders: usize, memory_bytes: u64) {
        (self.holders, self.memory_bytes) = (holders.max(1), memory_bytes);
        if let Some(policy) = policy {
            self.policy = policy;
        }
    }

    /// How the policy divides memory; `None`: it has no say in that.
    pub fn coordinates(&self) -> Option<CoordinatorTerms> {
        self.policy.coordinates()
    }

    /// The policy's name.
    pub fn name(&self) -> &'static str {
        self.policy.name()
    }

    /// How a tenant fares with its latency target; `None`: the policy looks at none, or has not
    /// seen it.
    pub fn latency(&self, tenant: TenantId) -> Option<LatencyReport> {
        self.policy.latency(tenant)
    }

    /// Never more of a tenant's work than this is to be queued, in microseconds; `None`: the policy
    /// does not mind.
    pub fn in_flight_us(&self, tenant: TenantId) -> Option<u32> {
        self.policy.in_flight_us(tenant)
    }

    /// Sets how long slices are from here on.
    pub fn adapt(&mut self, lengths: Lengths, hand_over_ns: u64, promised: bool) {
        self.quantum = lengths.now(hand_over_ns, promised);
        self.turn_ns = hand_over_ns;
    }

    /// Bounds of a slice now.
    pub fn quantum(&self) -> QuantumBounds {
        self.quantum
    }

    /// A slice of so many microseconds begins.
    pub fn note_slice(&mut self, quantum_us: u32) {
        self.slice_us = quantum_us;
    }

    /// What the last slice was given, in microseconds.
    pub fn slice_us(&self) -> u32 {
        self.slice_us
    }

    /// Whether one tenant at most holds the device.
    pub fn is_exclusive(&self) -> bool {
        self.holders == 1
    }

    /// Whether `needed_bytes` fit on the device, as far as its memory is known.
    pub fn fits(&self, needed_bytes: u64) -> bool {
        self.memory_bytes == 0 || needed_bytes <= self.memory_bytes
    }

    /// A tenant was charged.
    pub fn charge(&mut self, tenant: TenantId, ns: u64) {
        self.policy.charge(tenant, ns);
    }

    /// Slices begin after a time in which everybody had the device.
    pub fn resume(&mut self) {
        self.policy.resume();
    }

    /// Asks the policy.
    pub fn decide(&mut self, now_ns: u64, roster: &Roster) -> Decision {
        self.views.clear();
        self.held.clear();
        self.views
            .extend(roster.iter().map(|entity| entity.view(now_ns)));
        self.held
            .extend(roster.iter().filter_map(RunEntity::holder));
        self.policy.decide(&View {
            now_ns,
            tenants: &self.views,
            holders: &self.held,
            quantum: self.quantum,
            device: Device {
                holders: self.holders,
                memory_bytes: self.memory_bytes,
                turn_ns: self.turn_ns,
            },
        })
    }
}
