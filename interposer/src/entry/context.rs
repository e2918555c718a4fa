//! Contexts that are created where the device has no space for one.

use std::cell::Cell;

use shim_ffi::*;

use crate::attachment::client;
use crate::attachment::verdict::ours;
use crate::metering::Meter;
use crate::residency::{self, Needs};

/// What a context is taken to need at most when the device has no space for it, in bytes: some 430
/// MiB on recent devices. What others leave too much is theirs again with their next turn.
const NEW_CONTEXT_BYTES: u64 = 512 << 20;

/// Makes a call of the program's; where it creates a context for which the device has no space,
/// again and again while other tenants make some, as for an allocation. In tenants whose own memory
/// can be moved, and in those for which others shrink.
pub(super) fn with_space(
    symbol: Symbol,
    meaning: Context,
    args: &[usize],
    call: impl Fn() -> CUresult,
) -> CUresult {
    let device = created_on(meaning, args);
    if let Ok(Some(status)) = ours(symbol, || device.and_then(client::kept_off)) {
        return status;
    }
    let meter = device.filter(|_| residency::waits()).and_then(Meter::of);
    let Some(meter) = meter else {
        return call();
    };
    let answer = Cell::new(None);
    let noted = || {
        let result = call();
        answer.set(Some(result));
        result
    };
    ours(symbol, || {
        residency::with_space_on(&meter, Needs::UpTo(NEW_CONTEXT_BYTES), |short| {
            short.note(noted())
        })
    })
    .unwrap_or_else(|_| answer.get().unwrap_or_else(call))
}

/// The device, by the driver's ordinal, of the context that a call creates or keeps.
fn created_on(meaning: Context, args: &[usize]) -> Option<i32> {
    let at = usize::from(meaning.created_on()?);
    // CAST: arguments arrive as machine words; a CUdevice is the low half.
    args.get(at).map(|word| *word as i32)
}
