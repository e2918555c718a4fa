//! Contexts, and which one is current to a thread.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};

use crate::lock::Mutex;
use shim_ffi::CUresult;

use crate::driver::{Driver, driver};
use crate::exec::engine::{Ordering, StreamInfo};
use crate::registry;
use crate::stream::Stream;

type Result<T> = std::result::Result<T, CUresult>;

/// A context.
pub struct Context {
    /// Handle.
    pub id: u64,
    /// Ordinal of its device.
    pub device: usize,
    /// Flags.
    pub flags: AtomicU32,
    /// True for the device's primary context.
    pub primary: bool,
    /// Sticky error, 0 for none.
    pub failure: Arc<AtomicU32>,
    /// Its legacy default stream.
    pub legacy: u64,
    /// Default streams of threads.
    per_thread: Mutex<BTreeMap<u64, u64>>,
    barrier: std::sync::OnceLock<u64>,
    /// `cuCtxSetLimit`.
    pub limits: Mutex<BTreeMap<u32, usize>>,
    /// Contexts whose memory it may touch.
    pub peers: Mutex<BTreeSet<u64>>,
    /// `cuCtxSetCacheConfig`.
    pub cache_config: AtomicU32,
    /// `cuCtxSetSharedMemConfig`.
    pub shared_config: AtomicU32,
    /// `cuCtxAttach`.
    pub attached: AtomicU32,
}

thread_local! {
    // Never dropped: destructors of a thread's other data, and exit handlers, still have their
    // context. A few bytes per thread stay behind.
    static STACK: ManuallyDrop<RefCell<Vec<u64>>> = const { ManuallyDrop::new(RefCell::new(Vec::new())) };
    static THREAD: Cell<u64> = const { Cell::new(0) };
}

/// A number for the calling thread, never used again.
pub fn thread_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    THREAD.with(|number| {
        if number.get() == 0 {
            number.set(NEXT.fetch_add(1, Relaxed));
        }
        number.get()
    })
}

/// Handle of the calling thread's current context, 0 for none.
pub fn current_id() -> u64 {
    STACK
        .try_with(|stack| stack.borrow().last().copied().unwrap_or(0))
        .unwrap_or(0)
}

/// Replaces the calling thread's current context; 0 takes it away.
pub fn set_current(id: u64) {
    let _ = STACK.try_with(|stack| {
        let mut stack = stack.borrow_mut();
        stack.pop();
        if id != 0 {
            stack.push(id);
        }
    });
}

/// Makes a context current on top of the one before.
pub fn push(id: u64) {
    let _ = STACK.try_with(|stack| stack.borrow_mut().push(id));
}

/// Takes the current context off; 0 when there was none.
pub fn pop() -> u64 {
    STACK
        .try_with(|stack| stack.borrow_mut().pop().unwrap_or(0))
        .unwrap_or(0)
}

/// The calling thread's current context, whatever its state.
///
/// # Errors
/// `NOT_INITIALIZED`, `INVALID_CONTEXT` without one, `CONTEXT_IS_DESTROYED`.
pub fn current_any() -> Result<(&'static Driver, Arc<Context>)> {
    let driver = driver()?;
    match current_id() {
        0 => Err(CUresult::CUDA_ERROR_INVALID_CONTEXT),
        id => Ok((
            driver,
            driver
                .contexts
                .get(id)
                .ok_or(CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED)?,
        )),
    }
}

/// The calling thread's current context.
///
/// # Errors
/// As [`current_any`], and the context's sticky error.
pub fn current() -> Result<(&'static Driver, Arc<Context>)> {
    let (driver, context) = current_any()?;
    context.check()?;
    Ok((driver, context))
}

impl Context {
    /// Makes a context, with its share of device memory if it is the process's first there.
    ///
    /// # Errors
    /// `OUT_OF_MEMORY`.
    pub fn create(
        driver: &'static Driver,
        device: usize,
        flags: u32,
        primary: bool,
    ) -> Result<Arc<Self>> {
        {
            let mut count = driver.context_counts[device].lock();
            if *count == 0
                && !driver
                    .device_state
                    .reserve(device, driver.device_state.profile().context_bytes)
            {
                return Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY);
            }
            *count += 1;
        }
        driver.device_state.context_created(device);
        let id = registry::fresh();
        let failure = Arc::new(AtomicU32::new(0));
        let info = StreamInfo {
            id: registry::fresh(),
            context: id,
            device,
            ordering: Ordering::Legacy,
            priority: 0,
            failure: failure.clone(),
        };
        let context = Arc::new(Self {
            id,
            device,
            flags: AtomicU32::new(flags),
            primary,
            failure,
            legacy: info.id,
            per_thread: Mutex::default(),
            barrier: std::sync::OnceLock::new(),
            limits: Mutex::default(),
            peers: Mutex::default(),
            cache_config: AtomicU32::new(0),
            shared_config: AtomicU32::new(0),
            attached: AtomicU32::new(1),
        });
        Stream::register(driver, info, 0);
        driver.contexts.insert(id, context.clone());
        Ok(context)
    }

    /// The sticky error, if there is one.
    ///
    /// # Errors
    /// That.
    pub fn check(&self) -> Result<()> {
        match self.failure.load(Acquire) {
            0 => Ok(()),
            status => Err(CUresult(status)),
        }
    }

    /// The calling thread's default stream here.
    pub fn per_thread_stream(&self, driver: &'static Driver) -> u64 {
        *self
            .per_thread
            .lock()
            .entry(thread_number())
            .or_insert_with(|| {
                let info = StreamInfo {
                    id: registry::fresh(),
                    context: self.id,
                    device: self.device,
                    ordering: Ordering::Blocking,
                    priority: 0,
                    failure: self.failure.clone(),
                };
                let id = info.id;
                Stream::register(driver, info, 0);
                id
            })
    }

    /// A stream that no program knows, for points that all streams lead to.
    pub fn barrier_stream(&self, driver: &'static Driver) -> u64 {
        *self.barrier.get_or_init(|| {
            let info = StreamInfo {
                id: registry::fresh(),
                context: self.id,
                device: self.device,
                ordering: Ordering::NonBlocking,
                priority: 0,
                failure: self.failure.clone(),
            };
            let id = info.id;
            driver.engine.add_stream(info);
            id
        })
    }

    /// Waits for its work, then takes everything in it away.
    pub fn destroy(&self, driver: &'static Driver) {
        driver
            .engine
            .wait_streams(|stream| stream.context == self.id);
        driver.contexts.remove(self.id);
        for stream in driver.streams.all(|stream| stream.context == self.id) {
            driver.streams.remove(stream.id);
            driver.engine.remove_stream(stream.id);
        }
        if let Some(barrier) = self.barrier.get() {
            driver.engine.remove_stream(*barrier);
        }
        for array in driver.arrays.all(|array| array.context == self.id) {
            driver.arrays.remove(array.id);
        }
        for event in driver.events.all(|event| event.context == self.id) {
            driver.events.remove(event.id);
        }
        for module in driver.modules.all(|module| module.context == self.id) {
            driver.modules.remove(module.id);
            module.unload(driver);
        }
        driver.memory.free_context(&driver.device_state, self.id);
        driver.device_state.context_destroyed(self.device);
        let mut count = driver.context_counts[self.device].lock();
        *count -= 1;
        if *count == 0 {
            driver
                .device_state
                .release(self.device, driver.device_state.profile().context_bytes);
        }
    }
}
