//! What processes use of the host's simulated devices: the truth that tests and NVML report.

use std::sync::OnceLock;

use crate::device_state::{DeviceState, DeviceStateError, Usage};

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
    /// Time that the compute engine was given to anybody, in nanoseconds.
    pub busy_ns: u64,
    /// Live processes.
    pub processes: Vec<Usage>,
}

/// The device, opened once per process and never closed (see [`crate::device_state`]).
///
/// # Errors
/// A wrong setting, or a state file that cannot be used.
pub fn device_state() -> Result<&'static DeviceState, &'static DeviceStateError> {
    static DEVICE_STATE: OnceLock<Result<DeviceState, DeviceStateError>> = OnceLock::new();
    DEVICE_STATE.get_or_init(DeviceState::of_this_host).as_ref()
}

/// The clock of the devices' timelines: `CLOCK_MONOTONIC` in nanoseconds, over the dilation.
pub fn now_ns() -> u64 {
    crate::clock::now_ns()
}

/// All devices now.
///
/// # Errors
/// As [`device_state`].
pub fn snapshot() -> Result<Vec<DeviceView>, &'static DeviceStateError> {
    let device_state = device_state()?;
    Ok((0..device_state.profile().devices)
        .map(|device| DeviceView {
            name: device_state.profile().name.clone(),
            usable_bytes: device_state.profile().usable_bytes(),
            used_bytes: device_state.used(device),
            peak_bytes: device_state.peak(device),
            switches: device_state.switches(device),
            busy_ns: device_state.busy_ns(device),
            processes: device_state.usages(device),
        })
        .collect())
}
