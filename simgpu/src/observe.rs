//! What processes use of the host's simulated devices: the truth that tests and NVML report.

use std::sync::OnceLock;

use crate::card::{Card, CardError, Usage};
use crate::driver::open_card;

/// One device.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceView {
    /// Name of the profile.
    pub name: String,
    /// Bytes that programs can have.
    pub usable_bytes: u64,
    /// Bytes that they have.
    pub used_bytes: u64,
    /// Most bytes that they ever had together.
    pub peak_bytes: u64,
    /// Times that the compute engine went from one process to another.
    pub switches: u64,
    /// Live processes.
    pub processes: Vec<Usage>,
}

/// The card, opened once per process and never closed (see [`crate::card`]).
///
/// # Errors
/// A wrong setting, or a state file that cannot be used.
pub fn card() -> Result<&'static Card, &'static CardError> {
    static CARD: OnceLock<Result<Card, CardError>> = OnceLock::new();
    CARD.get_or_init(open_card).as_ref()
}

/// The clock of the devices' timelines: `CLOCK_MONOTONIC` in nanoseconds.
pub fn now_ns() -> u64 {
    crate::clock::now_ns()
}

/// All devices now.
///
/// # Errors
/// As [`card`].
pub fn snapshot() -> Result<Vec<DeviceView>, &'static CardError> {
    let card = card()?;
    Ok((0..card.profile().devices)
        .map(|device| DeviceView {
            name: card.profile().name.clone(),
            usable_bytes: card.profile().usable_bytes(),
            used_bytes: card.used(device),
            peak_bytes: card.peak(device),
            switches: card.switches(device),
            processes: card.usages(device),
        })
        .collect())
}
