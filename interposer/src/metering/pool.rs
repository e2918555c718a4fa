//! Stream-ordered allocation and graph memory: memory that the driver keeps in pools.
//!
//! What a pool has *reserved* is what the device lacks, whether or not the program uses it now. So
//! a pool is charged for its reserved bytes, read from the driver after each call that may have
//! changed them. Where the driver does not tell, each allocation is charged for itself. A call that
//! may make a pool grow is prepaid in whole granules, so that a pool never has more than was
//! reserved for it; what it did not take is given back at once.
//!
//! Where the quota has no space for growth, an allocation goes ahead into what the pool is known to
//! have space for ([`holes`]): nothing is reserved for it, and nothing is trimmed. That space is
//! certain while it is looked at and used: a thread that may take of a pool, or make it smaller,
//! waits for its [`Turn`]; what a synchronisation would give back to the device is no space. What
//! is known is forgotten whenever the pool may have given some of it back: when it has become
//! smaller, or when an allocation lies where it cannot have come to lie otherwise. Programs without
//! a limit take no turns.
//!
//! A driver that lets a pool grow although it had space is found out by the first such allocation.
//! Where the quota has no space for the growth the block is given back and the pool trimmed, and
//! that pool goes this way no more.
//!
//! A destroyed pool lives on with what the program still has of it, and answers no questions: it
//! stays charged with what it had last, until all of it has been given back and the program has
//! waited for that.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use channel::{NO_LIMIT, OverLimit};
use shim_ffi::*;

use super::holes::{self, Holes};
use super::live::{self, GRANULE, Kind, Live};
use super::{Meter, granules};
use crate::attachment::client;
use crate::driver::real;
use crate::gate;
use crate::gate::capture;
use crate::ground::clock;

/// What is charged for: a pool, or the graph memory of a device.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Source {
    Pool(usize),
    Graph(i32),
}

/// What is charged for one source.
#[derive(Default)]
struct Charge {
    ordinal: i32,
    charged_bytes: u64,
    /// Changes at each settlement: a reading that another one has overtaken is read again.
    version: u64,
    /// Memory of this source is not a device's.
    off_device: bool,
    /// Blocks that the program has.
    blocks: u64,
    /// Streams that blocks were given back in and that the program has not waited for since; as
    /// keys, never as handles.
    freeing: Vec<usize>,
    /// No pool any more, but memory of one.
    destroyed: bool,
    /// What it has space for.
    holes: Holes,
    /// It has grown although it had space: what is known of it is not relied on.
    distrusted: bool,
    /// Somebody has the [`Turn`].
    taken: bool,
    /// The thread that has it has had it for too long: nobody waits for it.
    overdue: bool,
    /// Threads that wait for it.
    waiting: u32,
    /// Calls that went ahead without it and have not come back, and all that ever did.
    loose: u32,
    loose_ever: u64,
}

static SOURCES: Mutex<Option<HashMap<Source, Charge>>> = Mutex::new(None);
static TURN_ENDED: Condvar = Condvar::new();
/// Sources known, so that programs without pools pay one load.
static COUNT: AtomicU32 = AtomicU32::new(0);

fn sources() -> MutexGuard<'static, Option<HashMap<Source, Charge>>> {
    SOURCES.lock().unwrap_or_else(PoisonError::into_inner)
}

fn with<T>(act: impl FnOnce(&mut HashMap<Source, Charge>) -> T) -> T {
    let mut sources = sources();
    let sources = sources.get_or_insert_with(HashMap::new);
    let result = act(sources);
    COUNT.store(
        u32::try_from(sources.len()).unwrap_or(u32::MAX),
        Ordering::Relaxed,
    );
    result
}

/// One thread's turn at a pool: nobody else takes of it meanwhile, or trims it. Not the lock, which
/// is not held over calls.
pub(crate) struct Turn {
    source: Source,
    /// False: others may be at it as well.
    exclusive: bool,
    /// Of the pool, when the turn began.
    charged_bytes: u64,
    loose_ever: u64,
}

/// TIMEOUT: the driver's call of the thread that has the turn may wait for streams, and those for
/// this thread.
const PATIENCE: Duration = Duration::from_secs(1);

impl Turn {
    /// Waits for a turn at a known pool; or not, where `exclusive` is not needed. `None`: it is not
    /// known.
    fn take(source: Source, exclusive: bool) -> Option<Self> {
        let begun_ns = clock::now_ns();
        let mut sources = sources();
        loop {
            let charge = sources.as_mut()?.get_mut(&source)?;
            let waited = Duration::from_nanos(clock::now_ns().saturating_sub(begun_ns));
            let left = PATIENCE.saturating_sub(waited);
            let exclusive = exclusive && !charge.overdue;
            if exclusive && charge.taken && !left.is_zero() {
                charge.waiting += 1;
                sources = TURN_ENDED
                    .wait_timeout(sources, left)
                    .unwrap_or_else(PoisonError::into_inner)
                    .0;
                let charge = sources.as_mut()?.get_mut(&source)?;
                charge.waiting = charge.waiting.saturating_sub(1);
                continue;
            }
            let turn = Self {
                source,
                exclusive: exclusive && !charge.taken,
                charged_bytes: charge.charged_bytes,
                loose_ever: charge.loose_ever,
            };
            if turn.exclusive {
                charge.taken = true;
            } else {
                charge.overdue |= exclusive;
                charge.loose += 1;
                charge.loose_ever += 1;
                charge.holes.clear();
            }
            return Some(turn);
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut sources = sources();
        let charge = sources.as_mut().and_then(|all| all.get_mut(&self.source));
        let Some(charge) = charge else {
            return;
        };
        if self.exclusive {
            charge.taken = false;
            charge.overdue = false;
            if charge.waiting != 0 {
                TURN_ENDED.notify_all();
            }
        } else {
            charge.loose = charge.loose.saturating_sub(1);
            charge.holes.clear();
        }
    }
}

/// Before the program trims a pool, or sets an attribute of it.
pub(crate) fn turn_at(pool: usize) -> Option<Turn> {
    if COUNT.load(Ordering::Relaxed) == 0 || client::current().is_none() {
        return None;
    }
    Turn::take(Source::Pool(pool), true)
}

/// Whether pools and graphs hold memory of each device.
pub(super) fn held(attached: &client::Attached) -> [(bool, bool); channel::MAX_DEVICES] {
    let mut held = [(false, false); channel::MAX_DEVICES];
    with(|sources| {
        for (source, charge) in sources.iter() {
            let device = crate::gate::context::index_of(attached, charge.ordinal);
            let Some(held) = device.and_then(|device| held.get_mut(device)) else {
                continue;
            };
            if charge.charged_bytes != 0 && !charge.off_device {
                match source {
                    Source::Pool(_) => held.0 = true,
                    Source::Graph(_) => held.1 = true,
                }
            }
        }
    });
    held
}

/// What the driver says is reserved.
pub(super) fn reserved(source: Source) -> Option<u64> {
    let mut bytes = 0u64;
    // SAFETY: valid pointer to a local of the attribute's type; neither call touches a stream.
    let result = unsafe {
        match source {
            Source::Pool(pool) => real::cuMemPoolGetAttribute(
                CUmemoryPool(pool as *mut c_void),
                CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT,
                (&raw mut bytes).cast(),
            ),
            Source::Graph(ordinal) => real::cuDeviceGetGraphMemAttribute(
                CUdevice(ordinal),
                CUgraphMem_attribute::CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT,
                (&raw mut bytes).cast(),
            ),
        }
    };
    result.is_ok().then_some(bytes)
}

/// Brings the charge of `source` to what the driver says. `prepaid` bytes were reserved for it just
/// now. False where the driver does not tell (nothing was changed then).
pub(super) fn settle(source: Source, ordinal: i32, prepaid: u64) -> bool {
    let Some(meter) = Meter::of(ordinal) else {
        return true;
    };
    loop {
        let version = with(|sources| {
            sources
                .entry(source)
                .or_insert(Charge {
                    ordinal,
                    ..Charge::default()
                })
                .version
        });
        let Some(now) = reserved(source) else {
            return false;
        };
        let settled = with(|sources| {
            let charge = sources.entry(source).or_insert(Charge {
                ordinal,
                ..Charge::default()
            });
            if charge.version != version {
                return false;
            }
            let target = if charge.off_device { 0 } else { now };
            let held = charge.charged_bytes + prepaid;
            if target > held {
                meter.force(target - held);
            } else {
                meter.release(held - target);
            }
            if target < charge.charged_bytes {
                charge.holes.clear();
            }
            charge.charged_bytes = target;
            charge.version += 1;
            true
        });
        if settled {
            return true;
        }
    }
}

/// Brings every charge up to date. Pools grow only by calls that are settled on the spot, so empty
/// ones need no look.
pub(crate) fn reconcile() {
    if COUNT.load(Ordering::Relaxed) == 0 || client::current().is_none() {
        return;
    }
    let known: Vec<_> = with(|sources| {
        sources
            .iter()
            .filter(|(_, charge)| !charge.destroyed && charge.charged_bytes != 0)
            .map(|(source, charge)| (*source, charge.ordinal))
            .collect()
    });
    for (source, ordinal) in known {
        settle(source, ordinal, 0);
    }
}

/// What can be done about a refused reservation, in the order of what it costs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Effort {
    /// See what pools have given back themselves.
    Reconcile,
    /// Let pools give back what lies unused in them, as the driver lets them when the device is
    /// full.
    Trim,
}

impl Effort {
    pub(super) const ALL: [Self; 2] = [Self::Reconcile, Self::Trim];
}

/// Makes an effort; false where there are no pools.
pub(super) fn relieve(effort: Effort) -> bool {
    if COUNT.load(Ordering::Relaxed) == 0 {
        return false;
    }
    if effort == Effort::Trim {
        let living: Vec<_> = with(|sources| {
            sources
                .iter()
                .filter(|(_, charge)| !charge.destroyed && charge.charged_bytes != 0)
                .map(|(source, _)| *source)
                .collect()
        });
        capture::relaxed(|| living.into_iter().for_each(trim));
    }
    reconcile();
    true
}

fn trim(source: Source) {
    let _turn = Turn::take(source, true);
    // SAFETY: a living pool, or an ordinal that the driver has named; what is in use stays.
    let _ = unsafe {
        match source {
            Source::Pool(pool) => real::cuMemPoolTrimTo(CUmemoryPool(pool as *mut c_void), 0),
            Source::Graph(ordinal) => real::cuDeviceGraphMemTrim(CUdevice(ordinal)),
        }
    };
}

/// The program has given back a block of `pool`.
pub(super) fn given_back(pool: usize) {
    with(|sources| {
        if let Some(charge) = sources.get_mut(&Source::Pool(pool)) {
            charge.blocks = charge.blocks.saturating_sub(1);
        }
    });
}

/// A stream as a place in which blocks are freed.
fn order_of(stream: usize) -> holes::Order {
    // Each context has default streams of its own.
    if stream == gate::LEGACY || stream == gate::PER_THREAD {
        (crate::gate::context::current(), stream)
    } else {
        (0, stream)
    }
}

/// Whether the job has a limit on a device.
fn limited(device: u16) -> bool {
    Meter::on(usize::from(device)).is_some_and(|meter| meter.limit_bytes() != NO_LIMIT)
}

/// As [`super::freed`], in the order of a stream.
pub(crate) fn freed_in(key: u64, stream: usize, call: impl FnOnce() -> CUresult) -> CUresult {
    // What is captured is freed when the graph runs.
    let now = !(capture::any() && capture::is_capturing(stream));
    let asked = client::current()
        .filter(|_| now)
        .and_then(|_| live::peek(key))
        .filter(|known| known.kind == Kind::Pooled && limited(known.device))
        .and_then(|known| {
            let source = Source::Pool(known.context);
            let call =
                with(|sources| Some(sources.get_mut(&source)?.holes.asked(key, known.bytes)))?;
            Some((source, call, known.bytes))
        });
    let result = call();
    if let Some((source, call, bytes)) = asked {
        let order = result.is_ok().then(|| order_of(stream));
        with(|sources| {
            if let Some(charge) = sources.get_mut(&source) {
                charge.holes.answered(call, key, bytes, order);
            }
        });
    }
    if result.is_ok()
        && client::current().is_some()
        && let Some((known, bytes)) = live::remove(key)
    {
        if known.kind == Kind::Pooled {
            with(|sources| {
                if let Some(charge) = sources.get_mut(&Source::Pool(known.context))
                    && !charge.freeing.contains(&stream)
                {
                    charge.freeing.push(stream);
                }
            });
        }
        super::give_back(&known, bytes);
    }
    result
}

/// Before a stream is destroyed: another one may be given its handle.
pub(crate) fn stream_goes(stream: usize) {
    if COUNT.load(Ordering::Relaxed) != 0 {
        with(|sources| {
            for charge in sources.values_mut() {
                charge.holes.forget(|order| order == (0, stream));
            }
        });
    }
}

/// Before a context is destroyed, and the streams in it.
pub(super) fn context_dies() {
    if COUNT.load(Ordering::Relaxed) != 0 {
        with(|sources| {
            for charge in sources.values_mut() {
                charge.holes.forget(|_| true);
            }
        });
    }
}

/// After the program has waited for a stream, by its key, or for a whole context: destroyed pools
/// whose blocks have all been given back in streams that were waited for are gone.
pub(crate) fn after_wait(stream: Option<usize>) {
    if COUNT.load(Ordering::Relaxed) == 0 || client::current().is_none() {
        return;
    }
    let gone: Vec<(i32, u64)> = with(|sources| {
        for charge in sources.values_mut() {
            // Each thread has a default stream of its own, all with one key.
            let stays = |one: usize| {
                stream.is_some_and(|stream| one != stream || stream == gate::PER_THREAD)
            };
            charge.freeing.retain(|one| stays(*one));
        }
        let over =
            |charge: &Charge| charge.destroyed && charge.blocks == 0 && charge.freeing.is_empty();
        let gone = sources.values().filter(|one| over(one));
        let gone = gone.map(|one| (one.ordinal, one.charged_bytes)).collect();
        sources.retain(|_, charge| !over(charge));
        gone
    });
    for (ordinal, charged_bytes) in gone {
        if let Some(meter) = Meter::of(ordinal) {
            meter.release(charged_bytes);
        }
    }
}

/// After a call that may have made pools give memory back to the device: a synchronisation or a
/// trim. A free exclusive does not.
#[inline]
pub(crate) fn after_sync() {
    if COUNT.load(Ordering::Relaxed) != 0 {
        reconcile();
    }
}

/// Makes a call that allocates out of a pool, in the order of a stream.
pub(crate) fn allocate(
    pool: Option<(CUmemoryPool, i32)>,
    bytes: usize,
    stream: usize,
    call: impl Fn() -> CUresult,
    key: impl Fn() -> u64,
) -> CUresult {
    if client::current().is_none() {
        return call();
    }
    if capture::any() && capture::is_capturing(stream) {
        return super::graph::allocate(bytes as u64, call);
    }
    let Some((pool, ordinal)) = pool else {
        return call();
    };
    let source = Source::Pool(pool.0 as usize);
    let off_device = with(|sources| {
        sources
            .entry(source)
            .or_insert(Charge {
                ordinal,
                ..Charge::default()
            })
            .off_device
    });
    let Some(meter) = Meter::of(ordinal) else {
        return call();
    };
    if off_device {
        return call();
    }
    let request = Request {
        meter: &meter,
        pool,
        ordinal,
        bytes: bytes as u64,
        stream,
        call,
        key,
    };
    match request.attempt() {
        Ok(result) => result,
        Err(over) => request
            .insist(over)
            .unwrap_or_else(|over| meter.refuse(over, bytes as u64)),
    }
}

/// An allocation out of a pool.
struct Request<'a, Call, Key> {
    meter: &'a Meter,
    pool: CUmemoryPool,
    ordinal: i32,
    bytes: u64,
    /// As a key.
    stream: usize,
    call: Call,
    /// The address, after the call.
    key: Key,
}

impl<Call: Fn() -> CUresult, Key: Fn() -> u64> Request<'_, Call, Key> {
    fn source(&self) -> Source {
        Source::Pool(self.pool.0 as usize)
    }

    /// The call, if the quota has space for what the pool may grow by, or the pool for the block.
    fn attempt(&self) -> Result<CUresult, OverLimit> {
        let limited = self.meter.limit_bytes() != NO_LIMIT;
        let turn = Turn::take(self.source(), limited);
        let most = granules(self.bytes);
        match self.meter.reserve_once(most) {
            Ok(()) => Ok(self.prepaid(turn.as_ref(), most)),
            Err(over) => turn.and_then(|turn| self.inside(turn)).ok_or(over),
        }
    }

    /// What can be done about a refusal.
    #[cold]
    #[inline(never)]
    fn insist(&self, over: OverLimit) -> Result<CUresult, OverLimit> {
        let mut over = over;
        let comes = |charge: &Charge| charge.has_space(self.bytes, Some(order_of(self.stream)));
        let comes = with(|sources| sources.get(&self.source()).is_some_and(comes));
        if comes {
            // The pool has space as soon as the stream has come to it: nobody's memory needs to go
            // for that.
            wait_idle(self.stream);
            match self.attempt() {
                Ok(result) => return Ok(result),
                Err(again) => over = again,
            }
        }
        over = match self.meter.reserve_again(over, || self.attempt()) {
            Ok(result) => return Ok(result),
            Err(over) => over,
        };
        // What the stream is about to free may be enough; the driver waits for that, too, when the
        // device is full.
        if comes || !wait_idle(self.stream) {
            return Err(over);
        }
        self.attempt()
            .or_else(|over| self.meter.reserve_again(over, || self.attempt()))
    }

    /// The call, with `most` bytes reserved for it.
    fn prepaid(&self, turn: Option<&Turn>, most: u64) -> CUresult {
        let result = (self.call)();
        if !result.is_ok() {
            self.meter.release(most);
            return result;
        }
        // Counted before it is settled: from here on it can be given back.
        if settle(self.source(), self.ordinal, most) {
            with(|sources| {
                if let Some(charge) = sources.get_mut(&self.source()) {
                    charge.blocks += 1;
                    match turn {
                        Some(turn) => charge.placed(turn, (self.key)(), self.bytes),
                        None => charge.holes.clear(),
                    }
                }
            });
            self.remember();
        } else {
            let mut live = self.meter.live(self.bytes);
            live.context = 0;
            live.kind = Kind::Apart;
            super::correct(self.meter, most, live::insert((self.key)(), live));
        }
        result
    }

    /// A block of the pool is live.
    fn remember(&self) {
        let live = Live {
            kind: Kind::Pooled,
            context: self.pool.0 as usize,
            ..self.meter.live(self.bytes)
        };
        live::insert((self.key)(), live);
    }

    /// The call, with nothing reserved for it, if the pool is certain to have space; `None`: it is
    /// not, or has none.
    #[cold]
    #[inline(never)]
    fn inside(&self, turn: Turn) -> Option<CUresult> {
        let source = self.source();
        if !turn.exclusive {
            return None;
        }
        self.learn_what_is_done();
        let space = |charge: &mut Charge| charge.has_space(self.bytes, None);
        // Looked at first: most of the time there is none. Then the pool is asked whether it still
        // has what it had.
        with(|sources| sources.get_mut(&source).is_some_and(space)).then_some(())?;
        settle(source, self.ordinal, 0).then_some(())?;
        let before_bytes = with(|sources| {
            let charge = sources.get_mut(&source)?;
            if !space(charge) {
                return None;
            }
            charge.blocks += 1;
            Some(charge.charged_bytes)
        })?;
        let give_up = |distrusted| {
            with(|sources| {
                if let Some(charge) = sources.get_mut(&source) {
                    charge.blocks = charge.blocks.saturating_sub(1);
                    charge.distrusted |= distrusted;
                }
            });
        };
        if !keeps(self.pool, before_bytes) {
            give_up(false);
            return None;
        }
        let result = (self.call)();
        if !result.is_ok() {
            give_up(false);
            return (result != CUresult::CUDA_ERROR_OUT_OF_MEMORY).then_some(result);
        }
        let address = (self.key)();
        with(|sources| {
            if let Some(charge) = sources.get_mut(&source) {
                charge.holes.fill(address, holes::span(self.bytes));
            }
        });
        let grown = reserved(source).map_or(0, |now| now.saturating_sub(before_bytes));
        if grown == 0 {
            self.remember();
            return Some(result);
        }
        // This driver does not use what it has.
        if self.meter.reserve_once(grown).is_ok() {
            settle(source, self.ordinal, grown);
            self.remember();
            with(|sources| {
                if let Some(charge) = sources.get_mut(&source) {
                    charge.distrusted = true;
                }
            });
            return Some(result);
        }
        let stream = CUstream(std::ptr::without_provenance_mut(self.stream));
        // SAFETY: what the driver has just made and nobody has heard of, in the stream that it was
        // made in.
        let _ = unsafe { real::cuMemFreeAsync(CUdeviceptr(address), stream) };
        settle(source, self.ordinal, 0);
        drop(turn);
        wait_idle(self.stream);
        capture::relaxed(|| trim(source));
        settle(source, self.ordinal, 0);
        give_up(true);
        None
    }

    /// Asks whether the stream has come to what was freed in it, where that matters.
    fn learn_what_is_done(&self) {
        // Threads have default streams of their own, all with one key.
        if self.stream == gate::PER_THREAD || capture::any() {
            return;
        }
        let order = order_of(self.stream);
        let until = with(|sources| {
            let charge = sources.get_mut(&self.source())?;
            let asks =
                !charge.has_space(self.bytes, None) && charge.has_space(self.bytes, Some(order));
            asks.then(|| charge.holes.now())
        });
        let Some(until) = until else {
            return;
        };
        let stream = CUstream(std::ptr::without_provenance_mut(self.stream));
        // SAFETY: the stream that the program allocates in; the query changes nothing.
        if unsafe { real::cuStreamQuery(stream) }.is_ok() {
            with(|sources| {
                if let Some(charge) = sources.get_mut(&self.source()) {
                    charge.holes.done(order, until);
                }
            });
        }
    }
}

impl Charge {
    /// Whether the pool is known to have space for a block, or will when `order` has come to what
    /// was freed in it.
    fn has_space(&self, bytes: u64, order: Option<holes::Order>) -> bool {
        let known = !self.destroyed && !self.distrusted && self.loose == 0;
        known && self.holes.fits(holes::span(bytes), order)
    }

    /// A block has come to lie at `start`, in somebody's turn, and the charge is up to date. A pool
    /// grows by whole granules for one block. So if all of the block was known to be free, the pool
    /// had all that is known; else it must have grown by the block's granules. Anything else says
    /// that it has given something back meanwhile.
    fn placed(&mut self, turn: &Turn, start: u64, bytes: u64) {
        let (span, most) = (holes::span(bytes), granules(bytes));
        let was_free = self.holes.fill(start, span);
        let exclusive = turn.exclusive && self.loose == 0 && self.loose_ever == turn.loose_ever;
        let grown_by = |bytes| self.charged_bytes == turn.charged_bytes.saturating_add(bytes);
        if !exclusive || !grown_by(if was_free { 0 } else { most }) {
            self.holes.clear();
        } else if !was_free && start.is_multiple_of(GRANULE) {
            // These granules have nothing else in them.
            self.holes
                .beside(start.saturating_add(span), start.saturating_add(most));
        }
    }
}

/// Whether a pool that has `bytes` keeps them when the program synchronises.
fn keeps(pool: CUmemoryPool, bytes: u64) -> bool {
    let mut threshold_bytes = 0u64;
    // SAFETY: valid pointer to a local of the attribute's type.
    let asked = unsafe {
        real::cuMemPoolGetAttribute(
            pool,
            CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
            (&raw mut threshold_bytes).cast(),
        )
    };
    asked.is_ok() && threshold_bytes >= bytes
}

/// Waits until a stream has nothing left to do, or for long enough. False where it had nothing to
/// do, or cannot be asked beside a capture.
fn wait_idle(stream: usize) -> bool {
    // TIMEOUT: a stream that waits for the program itself would never be idle.
    const LONG_ENOUGH_NS: u64 = 1_000_000_000;
    let is_busy = || {
        let captures = capture::any();
        if captures && (stream == gate::LEGACY || capture::is_capturing(stream)) {
            return false;
        }
        let stream = CUstream(std::ptr::without_provenance_mut(stream));
        // SAFETY: the stream that the program allocates in; the query changes nothing, and it
        // invalidates no capture.
        let query = || unsafe { real::cuStreamQuery(stream) };
        let answer = match captures {
            true => capture::relaxed(query),
            false => query(),
        };
        answer == CUresult::CUDA_ERROR_NOT_READY
    };
    let begun = clock::now_ns();
    let mut waited = false;
    while is_busy() && clock::now_ns().saturating_sub(begun) < LONG_ENOUGH_NS {
        waited = true;
        clock::pause(std::time::Duration::from_micros(100));
    }
    waited
}

/// The pool that `cuMemAllocAsync` uses on the calling thread, and its device.
pub(crate) fn current_pool() -> Option<(CUmemoryPool, i32)> {
    let (mut device, mut pool) = (CUdevice::default(), CUmemoryPool::NULL);
    // SAFETY: valid pointers to locals.
    unsafe {
        real::cuCtxGetDevice(&raw mut device).ok().ok()?;
        real::cuDeviceGetMemPool(&raw mut pool, device).ok().ok()?;
    }
    Some((pool, device.0))
}

/// A pool that the program names, and its device: as it was created, or the calling thread's.
pub(crate) fn named_pool(pool: CUmemoryPool) -> Option<(CUmemoryPool, i32)> {
    let known = with(|sources| {
        sources
            .get(&Source::Pool(pool.0 as usize))
            .map(|charge| charge.ordinal)
    });
    let ordinal = known.or_else(|| {
        let mut device = CUdevice::default();
        // SAFETY: valid pointer to a local.
        unsafe { real::cuCtxGetDevice(&raw mut device) }
            .is_ok()
            .then_some(device.0)
    })?;
    Some((pool, ordinal))
}

/// Makes a call that destroys a pool.
pub(crate) fn destroyed(pool: CUmemoryPool, call: impl FnOnce() -> CUresult) -> CUresult {
    let source = Source::Pool(pool.0 as usize);
    let known = (COUNT.load(Ordering::Relaxed) != 0)
        .then(|| {
            with(|sources| {
                let charge = sources.get(&source).filter(|charge| !charge.destroyed)?;
                Some(charge.ordinal)
            })
        })
        .flatten()
        .filter(|_| client::current().is_some());
    if let Some(ordinal) = known {
        // It is about to give back what is not in use, and will not answer afterwards.
        capture::relaxed(|| trim(source));
        settle(source, ordinal, 0);
    }
    let result = call();
    if result.is_ok() && known.is_some() {
        with(|sources| match sources.get_mut(&source) {
            Some(charge) if charge.blocks != 0 || charge.charged_bytes != 0 => {
                charge.destroyed = true;
                charge.holes.clear();
            }
            _ => {
                sources.remove(&source);
            }
        });
    }
    result
}

/// After a pool was made: whose memory it will hold.
pub(crate) fn created(pool: CUmemoryPool, location: CUmemLocation) {
    if client::current().is_none() {
        return;
    }
    let on_device = location.r#type == CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    let charge = Charge {
        ordinal: if on_device { location.id } else { 0 },
        off_device: !on_device,
        ..Charge::default()
    };
    with(|sources| sources.insert(Source::Pool(pool.0 as usize), charge));
}
