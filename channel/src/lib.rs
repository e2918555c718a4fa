//! The shared-memory protocol between the interposer and the arbiter.
//!
//! A star: the arbiter makes two sealed pages per client, one to write and one to read, and one
//! page per tenant in which the tenant's processes account their memory. Nothing of one tenant is
//! ever mapped by another. A page has one writer per word; there is no lock in it, so there is none
//! to be left behind by a process that dies.
//!
//! This crate knows neither CUDA nor policy. It builds alone under loom (`scripts/loom`).

#[cfg(not(loom))]
mod accounts;
mod activity;
mod bells;
mod credit;
mod grant;
mod journal;
mod layout;
mod owner;
mod reservation;
mod residency;
mod resize;
mod shared;
mod sync;
mod weights;

#[cfg(not(loom))]
pub mod arbiter;
#[cfg(not(loom))]
pub mod client;
#[cfg(not(loom))]
mod handshake;
#[cfg(not(loom))]
mod kept;
#[cfg(not(loom))]
mod page;
#[cfg(not(loom))]
mod signature;
#[cfg(not(loom))]
pub mod wire;

#[cfg(not(loom))]
pub use accounts::{Accounts, PageViolation};
pub use activity::{Following, InFlight};
pub use bells::LastBell;
pub use grant::{COMING, Grant, OPEN, Window};
pub use journal::{BadRecord, Bypass, Event, Record};
pub use layout::{
    ArbiterHalf, BOUNDARY_SLOTS, BoundaryRing, ClientHalf, DeviceGrant, HostSide, JOURNAL_SLOTS,
    LAYOUT_MAJOR, LAYOUT_MINOR, MAX_DEVICES, NO_LIMIT, NO_SLOT, SIGNATURE_RINGS, SIGNATURE_SLOTS,
    STREAM_SLOTS, SignaturePage, SignatureRing, StreamSlot, TENANT_SLOTS, THREAD_SLOTS, TenantPage,
    TenantSlot, ThreadSlot, WEIGHED_MARKS, Want, Weights,
};
pub use owner::{Hold, Holding, Look, Owner};
#[cfg(not(loom))]
pub use page::{Mapped, Page, PageError, Writers};
pub use reservation::{Account, InnerPid, OverLimit, Prepaid};
pub use residency::{
    Answer, Footprint, Order, OrderState, RESIDENCY, Reason, ResidencyMode, STAYING, SpaceAnswer,
    Verb,
};
pub use resize::Resize;
pub use shared::Block;
#[cfg(not(loom))]
pub use signature::{KIND_BITS, Noted, SIGNATURES};
pub use sync::FutexWord;
pub use weights::Weighed;
#[cfg(not(loom))]
pub use wire::{ASKS, READER};
