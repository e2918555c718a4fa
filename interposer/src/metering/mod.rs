//! Metering of memory: reserve in the tenant's quota, call the driver, settle or roll back.
//!
//! One addition to our own slot of the tenant's page and a sum over its slots; no message, no file,
//! no NVML. What is live is remembered per address, so that a free gives back exactly what was
//! charged; a free of something unknown is the driver's business alone.

pub(crate) mod graph;
mod holes;
mod live;
mod narrow;
pub(crate) mod physical;
pub(crate) mod pool;

use std::sync::atomic::{AtomicU64, Ordering};

use channel::{Account, Event, MAX_DEVICES, NO_LIMIT, OverLimit, Prepaid};
use shim_ffi::*;

use crate::attachment::client::{self, Attached};
use crate::attachment::verdict::{self, Reason};
use crate::gate::{context, quiesce};
use crate::ground::thread::thread;

pub(crate) use live::{GRANULE, Kind, Live, granules, insert};

/// Bytes charged to the tenant that lie in host memory, by device.
static OVERFLOW: [AtomicU64; MAX_DEVICES] = [const { AtomicU64::new(0) }; MAX_DEVICES];

/// Bytes on `device` that the tenant is charged for and that lie in host memory instead.
#[inline]
pub(crate) fn overflow_bytes(device: usize) -> u64 {
    OVERFLOW
        .get(device)
        .map_or(0, |bytes| bytes.load(Ordering::Relaxed))
}

/// Says how many they are.
pub(crate) fn set_overflow_bytes(device: usize, bytes: u64) {
    if let Some(word) = OVERFLOW.get(device) {
        word.store(bytes, Ordering::Relaxed);
    }
}

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
    /// The meter of the calling thread's current device, or why nobody counts there.
    #[inline]
    pub(crate) fn here() -> Result<Self, Reason> {
        let attached = client::current().ok_or(Reason::Ungoverned)?;
        let thread = thread();
        if thread.is_inside() {
            return Err(Reason::Own);
        }
        if !context::is_known(thread) {
            context::refresh(thread, attached);
        }
        let device = (thread.device_plus_one.get() as usize).checked_sub(1);
        Ok(Self {
            attached,
            account: attached.account().ok_or(Reason::Ungoverned)?,
            device: device.ok_or(Reason::OtherDevice)?,
            context: thread.context.get(),
        })
    }

    /// The meter of a device by its driver ordinal. Memory charged here outlives contexts.
    pub(crate) fn of(ordinal: i32) -> Option<Self> {
        let attached = client::current()?;
        Self::on(context::index_of(attached, ordinal)?)
    }

    /// The meter of a device by its index in the pages. Memory charged here outlives contexts.
    pub(crate) fn on(device: usize) -> Option<Self> {
        let attached = client::current()?;
        Some(Self {
            attached,
            account: attached.account()?,
            device,
            context: 0,
        })
    }

    /// The tenant's memory account of this process.
    pub(crate) fn account(&self) -> &Account<'static> {
        &self.account
    }

    /// The attachment that this belongs to.
    pub(crate) fn attached(&self) -> &'static Attached {
        self.attached
    }

    /// Device index of the pages.
    pub(crate) fn device(&self) -> usize {
        self.device
    }

    /// The context that memory belongs to, 0 for none.
    pub(crate) fn context(&self) -> usize {
        self.context
    }

    /// Reserves `bytes` for a request of `asked` bytes, or says that the program is out of memory
    /// and tells the journal.
    #[inline]
    pub(crate) fn reserve(&self, bytes: u64, asked: u64) -> Result<(), CUresult> {
        match self.account.reserve(self.device, bytes, self.limit_bytes()) {
            Ok(()) => Ok(()),
            Err(first) => self
                .reserve_again(first, || self.reserve_once(bytes))
                .map_err(|over| self.refuse(over, asked)),
        }
    }

    /// As [`reserve`](Self::reserve), for a call that takes all of it or nothing:
    /// [`settle`](Self::settle) says which. Until then nobody counts on it, and nobody on the
    /// contrary.
    #[inline]
    pub(crate) fn prepay_for(&self, bytes: u64, asked: u64) -> Result<Prepaid, CUresult> {
        self.try_prepay(bytes)
            .map_err(|over| self.refuse(over, asked))
    }

    /// The same; tells nobody of a refusal.
    #[inline]
    pub(crate) fn try_prepay(&self, bytes: u64) -> Result<Prepaid, OverLimit> {
        let once = || self.prepay(bytes, true);
        once().or_else(|first| self.reserve_again(first, once))
    }

    /// Brings what was prepaid to what was `taken`, in bytes.
    #[inline]
    pub(crate) fn settle(&self, prepaid: Prepaid, taken: u64) {
        self.account.settle(self.device, prepaid, taken);
    }

    fn reserve_once(&self, bytes: u64) -> Result<(), OverLimit> {
        self.account.reserve(self.device, bytes, self.limit_bytes())
    }

    /// Reserves `bytes` if they can be had; tells nobody of a refusal.
    pub(crate) fn try_reserve(&self, bytes: u64) -> Result<(), OverLimit> {
        self.reserve_once(bytes)
            .or_else(|first| self.reserve_again(first, || self.reserve_once(bytes)))
    }

    fn prepay(&self, bytes: u64, patient: bool) -> Result<Prepaid, OverLimit> {
        self.account
            .prepay(self.device, bytes, self.limit_bytes(), patient)
    }

    /// Other processes of the job may have ended; pools may have shrunk behind our back, at a
    /// synchronisation; and what lies unused in them may be in the way.
    #[cold]
    #[inline(never)]
    fn reserve_again<T>(
        &self,
        first: OverLimit,
        once: impl Fn() -> Result<T, OverLimit>,
    ) -> Result<T, OverLimit> {
        // What others held when this was refused may be free by now without a question: the arbiter
        // hears of the end of a process as soon as its parent does.
        let held = first.used_bytes > self.account.own_bytes(self.device);
        let mut outcome = Err(first);
        let free = match self.others_hold() {
            true => self.attached.credit_the_dead(),
            false => held,
        };
        if free {
            outcome = once();
        }
        for effort in pool::Effort::ALL {
            if outcome.is_ok() || !pool::relieve(effort) {
                break;
            }
            outcome = once();
        }
        outcome
    }

    /// Whether other processes of the job hold memory here, or held some when they ended.
    pub(crate) fn others_hold(&self) -> bool {
        self.account.used_bytes(self.device) > self.account.own_bytes(self.device)
    }

    /// What a program is answered for want of memory; the journal hears of it. `asked`: bytes as
    /// the program said.
    #[cold]
    #[inline(never)]
    pub(crate) fn refuse(&self, over: OverLimit, asked: u64) -> CUresult {
        let OverLimit {
            limit_bytes,
            used_bytes,
            requested_bytes,
        } = over;
        let event = Event::OverLimit {
            limit_bytes,
            used_bytes,
            requested_bytes: asked,
            charged_bytes: requested_bytes.max(asked),
        };
        self.attached.tell(self.device, event);
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

    /// What may be charged in bytes, [`NO_LIMIT`] for no end: the limit, and what is charged but
    /// lies in host memory.
    #[inline]
    pub(crate) fn limit_bytes(&self) -> u64 {
        let limit_bytes = self.attached.limit_bytes(self.device);
        if quiesce::active() {
            return limit_bytes.saturating_add(self.beyond_limit_bytes());
        }
        limit_bytes
    }

    /// What is charged, lies in host memory, and may be beyond the limit there. What lies there for
    /// other jobs' sake counts as if it were on the device.
    pub(crate) fn beyond_limit_bytes(&self) -> u64 {
        if self.attached.end.arbiter.residency().overflow {
            overflow_bytes(self.device)
        } else {
            0
        }
    }

    /// What is to be remembered of an allocation of `bytes` on this meter.
    #[inline]
    pub(crate) fn live(&self, bytes: u64) -> Live {
        Live {
            bytes,
            context: self.context,
            device: self.device as u16, // CAST: an index of a page, below MAX_DEVICES.
            kind: Kind::Device,
            overtaken: 0,
        }
    }
}

/// Brings a reservation of `reserved` bytes to what was taken.
#[inline]
pub(crate) fn correct(meter: &Meter, reserved: u64, taken: u64) {
    if taken > reserved {
        meter.force(taken - reserved);
    } else if taken < reserved {
        meter.release(reserved - taken);
    }
}

/// Reserves what `bytes` can take on the current device, makes the call, and remembers what it
/// `made` (address and bytes), or rolls back.
///
/// A whole granule is prepaid for a small allocation, and given back when another one's granule had
/// space: nobody can know before the driver has chosen. Where no whole one is left, see [`narrow`].
#[inline]
pub(crate) fn metered(
    bytes: u64,
    call: impl FnOnce() -> CUresult,
    made: impl FnOnce() -> (u64, u64),
) -> CUresult {
    let meter = match Meter::here() {
        Ok(meter) => meter,
        Err(reason) => return unmetered(reason, call),
    };
    if bytes >= GRANULE {
        return metered_whole(&meter, bytes, Kind::Device, call, made);
    }
    match meter.prepay(granules(bytes), false) {
        Ok(prepaid) => small(&meter, prepaid, call, made),
        Err(over) => small_at_the_limit(&meter, bytes, over, call, made),
    }
}

#[inline]
fn small(
    meter: &Meter,
    prepaid: Prepaid,
    call: impl FnOnce() -> CUresult,
    made: impl FnOnce() -> (u64, u64),
) -> CUresult {
    let result = call();
    let taken = if result.is_ok() {
        let (address, bytes) = made();
        live::insert(address, meter.live(bytes))
    } else {
        0
    };
    narrow::settle(meter, prepaid, taken);
    result
}

#[cold]
#[inline(never)]
fn small_at_the_limit(
    meter: &Meter,
    bytes: u64,
    over: OverLimit,
    call: impl FnOnce() -> CUresult,
    made: impl FnOnce() -> (u64, u64),
) -> CUresult {
    let (call, made) = match narrow::allocate(meter, bytes, over, call, made) {
        Ok(result) => return result,
        Err(neither) => neither,
    };
    let patient = || meter.prepay(granules(bytes), true);
    match patient().or_else(|first| meter.reserve_again(first, patient)) {
        Ok(prepaid) => small(meter, prepaid, call, made),
        Err(over) => meter.refuse(over, bytes),
    }
}

/// As [`metered`], for what has granules of its own.
#[inline]
pub(crate) fn metered_apart(
    bytes: u64,
    call: impl FnOnce() -> CUresult,
    made: impl FnOnce() -> (u64, u64),
) -> CUresult {
    match Meter::here() {
        Ok(meter) => metered_whole(&meter, bytes, Kind::Apart, call, made),
        Err(reason) => unmetered(reason, call),
    }
}

/// A call that nobody counts, for this reason.
pub(crate) fn unmetered(reason: Reason, call: impl FnOnce() -> CUresult) -> CUresult {
    verdict::passed(reason);
    call()
}

#[inline]
fn metered_whole(
    meter: &Meter,
    bytes: u64,
    kind: Kind,
    call: impl FnOnce() -> CUresult,
    made: impl FnOnce() -> (u64, u64),
) -> CUresult {
    let prepaid = match meter.prepay_for(granules(bytes), bytes) {
        Ok(prepaid) => prepaid,
        Err(refusal) => return refusal,
    };
    let result = call();
    let taken = if result.is_ok() {
        let (address, bytes) = made();
        let live = Live {
            kind,
            ..meter.live(bytes)
        };
        live::insert(address, live)
    } else {
        0
    };
    meter.settle(prepaid, taken);
    result
}

/// Makes a call that frees `key`; gives back what was charged for it.
///
/// Noted after the call: what the table says is never less than what the device has given. Another
/// thread may be given the address meanwhile, see [`live::insert`].
#[inline]
pub(crate) fn freed(key: u64, call: impl FnOnce() -> CUresult) -> CUresult {
    let result = call();
    if result.is_ok()
        && client::current().is_some()
        && let Some((known, bytes)) = live::remove(key)
        && (bytes != 0 || known.kind == Kind::Pooled)
    {
        give_back(&known, bytes);
    }
    result
}

/// Gives back `bytes` that a live entry held.
fn give_back(known: &Live, bytes: u64) {
    if let Some(account) = client::current().and_then(Attached::account) {
        match known.kind {
            Kind::Device => narrow::released(&account, known.device as usize, bytes),
            Kind::Apart | Kind::Whole => account.release(known.device as usize, bytes),
            Kind::Pooled => pool::given_back(known.context),
            Kind::Host => account.unpin(bytes),
            Kind::Gone => {}
        }
    }
}

/// Kinds of memory on each device that no arena has, as bits by the order of [`channel::STAYING`].
pub(crate) fn kinds(attached: &Attached) -> [u8; MAX_DEVICES] {
    const POOLS: u8 = 1;
    const GRAPHS: u8 = 2;
    const ARRAYS: u8 = 4;
    const MANAGED: u8 = 8;
    const PLAIN: u8 = 16;
    const SHARED: u8 = 32;
    let mut kinds = live::kinds(|kind| match kind {
        Kind::Whole => ARRAYS,
        Kind::Apart => MANAGED,
        Kind::Device => PLAIN,
        Kind::Pooled | Kind::Host | Kind::Gone => 0,
    });
    let (pools, shared) = (pool::held(attached), physical::sharing());
    for ((kinds, (pool, graph)), shared) in kinds.iter_mut().zip(pools).zip(shared) {
        for (there, bit) in [(pool, POOLS), (graph, GRAPHS), (shared, SHARED)] {
            *kinds |= if there { bit } else { 0 };
        }
    }
    kinds
}

/// Before the driver is asked to destroy a context.
pub(crate) fn context_dies(context: usize) {
    if client::current().is_some() {
        pool::context_dies();
        live::context_dies(context);
    }
}

/// After the driver has destroyed a context, and with it everything allocated in it.
pub(crate) fn context_died(context: usize) {
    live::drain_context(context, give_back);
    live::context_died(context);
}

/// After the driver was asked in vain to destroy a context.
pub(crate) fn context_stays(context: usize) {
    live::context_died(context);
}
