//! Metering of memory: reserve in the tenant's quota, call the driver, settle or roll back.
//!
//! One addition to our own slot of the tenant's page and a sum over its slots; no message, no file, no NVML. What is live is
//! remembered per address, so that a free gives back exactly what was charged; a free of something unknown is the
//! driver's business alone.

mod array;
mod graph;
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
pub(crate) use graph::*;
pub(crate) use host::*;
pub(crate) use live::{Live, granules};
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
            Err(first) => self
                .reserve_again(bytes, first)
                .map_err(|over| self.refuse(over)),
        }
    }

    /// Reserves `bytes` if they can be had; tells nobody of a refusal.
    pub(crate) fn try_reserve(&self, bytes: u64) -> Result<(), OverLimit> {
        self.account
            .reserve(self.device, bytes, self.limit_bytes())
            .or_else(|first| self.reserve_again(bytes, first))
    }

    /// Pools may have shrunk behind our back, at a synchronisation; and what lies unused in them may be in the way.
    #[cold]
    #[inline(never)]
    fn reserve_again(&self, bytes: u64, first: OverLimit) -> Result<(), OverLimit> {
        let mut outcome = Err(first);
        for effort in pool::Effort::ALL {
            if outcome.is_ok() || !pool::relieve(effort) {
                break;
            }
            outcome = self.account.reserve(self.device, bytes, self.limit_bytes());
        }
        outcome
    }

    /// What a program is told for want of memory; the journal hears of it.
    #[cold]
    #[inline(never)]
    pub(crate) fn refuse(&self, over: OverLimit) -> CUresult {
        let OverLimit {
            limit_bytes,
            used_bytes,
            requested_bytes,
        } = over;
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
        CUresult::CUDA_ERROR_OUT_OF_MEMORY
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

/// Brings a reservation of `reserved` bytes to what was taken.
#[inline]
fn correct(meter: &Meter, reserved: u64, taken: u64) {
    if taken > reserved {
        meter.force(taken - reserved);
    } else if taken < reserved {
        meter.release(reserved - taken);
    }
}

/// Reserves what `bytes` can take on the current device, makes the call, and remembers what it made at `key`, or rolls back.
///
/// A whole granule is reserved for a small allocation, and given back when another one's granule had room: nobody can
/// know before the driver has chosen. So the last granule of a quota is not given to small allocations.
#[inline]
pub(crate) fn metered(
    bytes: u64,
    call: impl FnOnce() -> CUresult,
    key: impl FnOnce() -> u64,
) -> CUresult {
    let Some(meter) = Meter::here() else {
        return call();
    };
    let most = granules(bytes);
    if let Err(refusal) = meter.reserve(most) {
        return refusal;
    }
    let result = call();
    if result.is_ok() {
        correct(&meter, most, live::insert(key(), meter.live(bytes)));
    } else {
        meter.release(most);
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
            give_back(key, &known);
        } else {
            live::put_back(key, known);
        }
    }
    result
}

/// Gives back what one live entry held.
fn give_back(key: u64, known: &Live) {
    let bytes = live::uncover(key, known);
    if let Some(account) = client::current().and_then(Attached::account) {
        match known.kind {
            live::Kind::Device | live::Kind::Whole => account.release(known.device as usize, bytes),
            live::Kind::Pooled => pool::given_back(known.context),
            live::Kind::Host => account.unpin(bytes),
        }
    }
}

/// A context has been destroyed, and with it everything allocated in it.
pub(crate) fn context_gone(context: usize) {
    live::drain_context(context, give_back);
}
