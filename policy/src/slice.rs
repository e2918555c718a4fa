//! The words between a slice policy and whoever drives it: what it may see, and what it may decide.

/// A tenant, as its owner numbers it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct TenantId(pub u64);

/// How firmly a share is promised.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Class {
    /// Gets its share whenever it wants it.
    Guaranteed,
    /// Runs while no guaranteed tenant wants the device.
    Opportunistic,
}

/// One tenant of the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TenantView {
    /// Which one.
    pub id: TenantId,
    /// Its class.
    pub class: Class,
    /// Its weight in millionths of the device; 0 counts as 1. Only the ratio between tenants of one class matters.
    pub weight_ppm: u32,
    /// It waits for the device, or holds it and uses it.
    pub wants: bool,
}

/// Who holds the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Holder {
    /// Which tenant.
    pub id: TenantId,
    /// When its slice began, in nanoseconds.
    pub since_ns: u64,
    /// How long its slice is, in microseconds.
    pub quantum_us: u32,
}

/// Between what a policy may choose the length of a slice, in microseconds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QuantumBounds {
    /// Never shorter.
    pub min_us: u32,
    /// Never longer.
    pub max_us: u32,
}

/// All that a policy may look at.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    /// Now, in nanoseconds of any monotonic clock.
    pub now_ns: u64,
    /// Every tenant of the device, each once. One that is missing has gone for good.
    pub tenants: &'a [TenantView],
    /// Who holds the device.
    pub holder: Option<Holder>,
    /// How long slices may be.
    pub quantum: QuantumBounds,
}

/// A slice to be granted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Slice {
    /// To whom.
    pub tenant: TenantId,
    /// For how long, in microseconds.
    pub quantum_us: u32,
}

/// What is to be done now, and when to ask again.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Decision {
    /// Take the device from this tenant.
    pub revoke: Option<TenantId>,
    /// Give it to this one. Where that is the holder and nothing is revoked, its slice begins anew.
    pub grant: Option<Slice>,
    /// Ask again at this time at the latest, in nanoseconds; `None`: when something has changed.
    pub again_ns: Option<u64>,
    /// Who will be given the device at `again_ns` if nothing changes until then, where that is not who has it now: it can be
    /// woken in time. A guess that costs little where it is wrong.
    pub next: Option<TenantId>,
}

/// Decides who holds one device.
pub trait SlicePolicy {
    /// `id` has used the device for `device_ns` nanoseconds, inside its slice or beyond it.
    fn charge(&mut self, id: TenantId, device_ns: u64);

    /// What to do, given the view.
    fn decide(&mut self, view: &View<'_>) -> Decision;
}
