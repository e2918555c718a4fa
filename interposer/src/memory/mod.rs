//! Metering of memory: reserve in the tenant's quota, call the driver, settle or roll back.
//!
//! One addition to our own slot of the tenant's page and a sum over its slots; no message, no file, no NVML. What is live is
//! remembered per address, so that a free gives back exactly what was charged; a free of something unknown is the
//! driver's business alone.

mod array;
mod host;
mod live;
mod plain;
mod pool;
mod report;
mod vmm;

use channel::{Account, Event, NO_LIMIT, OverLimit};
use shim_ffi::*;

use crate::client::{self, Attached};
use crate::context;
use crate::thread::thread;

pub(crate) use array::*;
pub(crate) use host::*;
pub(crate) use live::Live;
pub(crate) use plain::*;
pub(crate) use pool::*;
pub(crate) use report::*;
pub(crate) use vmm::*;

/// Where a charge goes: a device of our attachment.
#[derive(Clone, Copy)]
pub(crate) struct Meter {
    attached: &'static Attached,
    account: Account<'static>,
    /// Device index of the pages.
    device: usize,
    /// The context that memory belongs to.
    context: usize,
}

impl Meter {
    /// The meter of the calling thread's current device; `None` where nobody governs it.
    #[inline]
    pub(crate) fn here() -> Option<Self> {
        let attached = client::current()?;
        let thread = thread();
        if thread.inside.get() {
            return None;
        }
        context::refresh(thread, attached);
        let device = (thread.device_plus_one.get() as usize).checked_sub(1)?;
        Some(Self {
            attached,
            account: attached.account()?,
            device,
            context: thread.context.get(),
        })
    }

    /// The meter of a device by its driver ordinal. Memory charged here outlives contexts.
    pub(crate) fn of(ordinal: i32) -> Option<Self> {
        let attached = client::current()?;
        let device = context::index_of(attached, ordinal)?;
        Some(Self {
            attached,
            account: attached.account()?,
            device,
            context: 0,
        })
    }

    /// Reserves `bytes`, or says that the program is out of memory and tells the journal.
    #[inline]
    pub(crate) fn reserve(&self, bytes: u64) -> Result<(), CUresult> {
        match self.account.reserve(self.device, bytes, self.limit_bytes()) {
            Ok(()) => Ok(()),
            Err(over) => self.over(bytes, over),
        }
    }

    #[cold]
    #[inline(never)]
    fn over(&self, bytes: u64, _first: OverLimit) -> Result<(), CUresult> {
        // Pools may have shrunk behind our back, at a synchronisation.
        pool::reconcile();
        match self.account.reserve(self.device, bytes, self.limit_bytes()) {
            Ok(()) => Ok(()),
            Err(OverLimit {
                limit_bytes,
                used_bytes,
                requested_bytes,
            }) => {
                let event = Event::OverLimit {
                    limit_bytes,
                    used_bytes,
                    requested_bytes,
                };
                self.attached
                    .end
                    .client
                    .write_record(self.device as u32, event);
                self.attached.end.ring();
                Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY)
            }
        }
    }

    /// Charges `bytes` that are taken already, whatever the limit.
    pub(crate) fn force(&self, bytes: u64) {
        let _ = self.account.reserve(self.device, bytes, NO_LIMIT);
    }

    /// Gives `bytes` back.
    #[inline]
    pub(crate) fn release(&self, bytes: u64) {
        self.account.release(self.device, bytes);
    }

    /// The limit in bytes, [`NO_LIMIT`] for none.
    #[inline]
    pub(crate) fn limit_bytes(&self) -> u64 {
        self.attached.limit_bytes(self.device)
    }

    /// What is to be remembered of an allocation of `bytes` on this meter.
    #[inline]
    pub(crate) fn live(&self, bytes: u64) -> Live {
        Live {
            bytes,
            device: self.device as u32,
            kind: live::Kind::Device,
            context: self.context,
        }
    }
}

/// Reserves `bytes` on the current device, makes the call, and remembers what it made under `key`, or rolls back.
#[inline]
pub(crate) fn metered(
    bytes: u64,
    call: impl FnOnce() -> CUresult,
    key: impl FnOnce() -> u64,
) -> CUresult {
    let Some(meter) = Meter::here() else {
        return call();
    };
    if let Err(refusal) = meter.reserve(bytes) {
        return refusal;
    }
    let result = call();
    if result.is_ok() {
        live::insert(key(), meter.live(bytes));
    } else {
        meter.release(bytes);
    }
    result
}

/// Makes a call that frees `key`; gives back what was charged for it.
#[inline]
pub(crate) fn freed(key: u64, call: impl FnOnce() -> CUresult) -> CUresult {
    // Taken out before the call: once the driver has freed the address, another thread may be given it.
    let known = if client::current().is_some() {
        live::remove(key)
    } else {
        None
    };
    let result = call();
    if let Some(known) = known {
        if result.is_ok() {
            give_back(&known);
        } else {
            live::insert(key, known);
        }
    }
    result
}

/// Gives back what one live entry holds.
fn give_back(known: &Live) {
    if let Some(account) = client::current().and_then(Attached::account) {
        match known.kind {
            live::Kind::Device => account.release(known.device as usize, known.bytes),
            live::Kind::Host => account.unpin(known.bytes),
        }
    }
}

/// A context has been destroyed, and with it everything allocated in it.
pub(crate) fn context_gone(context: usize) {
    live::drain_context(context, give_back);
}
