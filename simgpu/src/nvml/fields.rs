//! Readings by number (`nvmlDeviceGetFieldValues`).

use std::ffi::{c_int, c_uint};

use super::readings::{energy_mj, limits_mw, moved_bytes, now_mw};
use super::{Device, FieldValue, Status, device, guard, now_us, temperature};
use crate::device_state::{CopyEngine, DeviceState};
use crate::entry::Out;

/// How a value is to be read (`nvmlValueType_t`).
#[derive(Clone, Copy)]
enum Value {
    Unsigned(c_uint),
    Long(u64),
}

impl Value {
    fn kind_and_bits(self) -> (c_uint, u64) {
        match self {
            Self::Unsigned(value) => (1, u64::from(value)),
            Self::Long(value) => (3, value),
        }
    }
}

/// The field of that number; `None` where a device without NVLink and faults has none.
fn value(device_state: &DeviceState, index: usize, field: c_uint, scope: c_uint) -> Option<Value> {
    let [least, most, default, current] = limits_mw(device_state);
    Some(match field {
        // Error correction is on, and will be.
        1 | 2 => Value::Unsigned(1),
        // Errors by memory, retired pages, remapped rows: none.
        3..=28 => Value::Long(0),
        29..=31 | 92 | 93 | 142..=145 => Value::Unsigned(0),
        // Time held below its clocks, by policy.
        74..=81 | 269..=271 => Value::Long(0),
        82 => Value::Unsigned(temperature(device_state, index)),
        83 | 191 => Value::Long(energy_mj(device_state, index)),
        91 => Value::Unsigned(0),
        94 | 95 | 173..=182 => Value::Unsigned(0),
        170 => Value::Unsigned(0),
        // The board is the device.
        185 | 186 if scope <= 1 => Value::Unsigned(now_mw(device_state, index)),
        187 => Value::Unsigned(least),
        188 => Value::Unsigned(most),
        189 => Value::Unsigned(default),
        190 | 192 => Value::Unsigned(current),
        197 => Value::Long(moved_bytes(device_state, index, CopyEngine::Out)),
        198 => Value::Long(moved_bytes(device_state, index, CopyEngine::In)),
        // What it takes to recover: nothing.
        230 => Value::Unsigned(0),
        _ => return None,
    })
}

nvml! {
    fn nvmlDeviceGetFieldValues(of: Device, count: c_int, list: Out<FieldValue>) {
        let (device_state, index) = device(of)?;
        let count = usize::try_from(count).ok().filter(|count| *count > 0).ok_or(Status::INVALID_ARGUMENT)?;
        list.check().map_err(|_| Status::INVALID_ARGUMENT)?;
        for at in 0..count {
            // SAFETY: the program says that its array has `count` elements.
            let one = unsafe { Out::new(list.raw().wrapping_add(at)) };
            let mut field = one.get().map_err(|_| Status::INVALID_ARGUMENT)?;
            field.time_us = now_us() as i64;
            field.latency_us = 0;
            field.status = Status::NOT_SUPPORTED;
            if let Some(value) = value(device_state, index, field.id, field.scope) {
                (field.kind, field.value) = value.kind_and_bits();
                field.status = Status::SUCCESS;
            }
            one.put(field).map_err(|_| Status::INVALID_ARGUMENT)?;
        }
        Ok(())
    }

    fn nvmlDeviceClearFieldValues(of: Device, _count: c_int, _list: Out<FieldValue>) {
        device(of)?;
        Err(Status::NO_PERMISSION)
    }
}
