//! What can be put into a stream, and what carrying it out does to memory. Knows nothing of queues.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};

use shim_ffi::{CUhostFn, CUresult, CUstream, CUstreamCallback, c_void};

use crate::clock;
use crate::device_state::SharedEvent;
use crate::function::Function;
use crate::kernels::{DeviceMemory, Fault, Launch, Written};
use crate::memory::Memory;
use crate::memory::bound::Promise;
use crate::profile::Profile;

/// One side of a copy: where it starts and how far rows and slices are apart.
#[derive(Debug, Clone)]
pub struct Side {
    /// Device-accessible address, or a host address.
    pub address: u64,
    /// Bytes between rows.
    pub pitch: u64,
    /// Bytes between slices.
    pub slice: u64,
    /// Bytes that a copy took from pageable memory when it was submitted.
    pub staged: Option<Arc<Vec<u8>>>,
}

impl Side {
    /// A contiguous side.
    pub fn linear(address: u64) -> Self {
        Self {
            address,
            pitch: 0,
            slice: 0,
            staged: None,
        }
    }
}

/// Which engine a copy uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Host to device.
    In,
    /// Device to host.
    Out,
    /// Within one device.
    Within,
    /// Between two devices.
    Peer,
}

/// A copy of `depth` slices of `height` rows of `width` bytes.
#[derive(Debug, Clone)]
pub struct Copy {
    /// From.
    pub from: Side,
    /// To.
    pub to: Side,
    /// Bytes of a row.
    pub width: u64,
    /// Rows.
    pub height: u64,
    /// Slices.
    pub depth: u64,
    /// Engine.
    pub direction: Direction,
    /// True when the host side is not page-locked.
    pub pageable: bool,
    /// True when that side is private memory of the process without a file behind it.
    pub private: bool,
}

impl Copy {
    /// Bytes moved.
    pub fn bytes(&self) -> u64 {
        self.width * self.height * self.depth
    }
}

/// A fill of `height` rows of `width` elements.
#[derive(Debug, Clone, Copy)]
pub struct Fill {
    /// First byte.
    pub address: u64,
    /// Bytes between rows.
    pub pitch: u64,
    /// Element.
    pub value: u32,
    /// Bytes of an element: 1, 2 or 4.
    pub element: u32,
    /// Elements of a row.
    pub width: u64,
    /// Rows.
    pub height: u64,
}

impl Fill {
    /// Bytes written.
    pub fn bytes(&self) -> u64 {
        self.width * u64::from(self.element) * self.height
    }
}

/// A kernel launch with its arguments copied.
#[derive(Clone)]
pub struct KernelLaunch {
    /// The kernel.
    pub function: Arc<Function>,
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: [u32; 3],
    /// Dynamic shared memory, in bytes.
    pub shared_bytes: u32,
    /// One word per parameter of 8 bytes or less; empty where the parameter list is not known.
    pub args: Vec<u64>,
    /// The parameters' bytes, by parameter.
    pub raw: Vec<Vec<u8>>,
    /// `CUDA_ERROR_LAUNCH_FAILED` and friends on demand.
    pub forced: Option<CUresult>,
    /// Runs until the process ends, on demand.
    pub endless: bool,
}

/// A point in a stream that others can wait for.
#[derive(Default)]
pub struct Record {
    done: AtomicBool,
    time_ns: AtomicU64,
    /// Where other processes see it, or where it is another process's.
    shared: Option<Shared>,
}

/// A record of an event that processes share.
struct Shared {
    event: Arc<SharedEvent>,
    number: u64,
    /// Another process carries it out.
    elsewhere: bool,
    /// When that process was last looked for.
    looked_ns: AtomicU64,
}

/// How often a process is looked for whose record is waited for.
const LOOK_NS: u64 = 1_000_000;

impl Record {
    /// One of this process's that other processes see.
    pub fn shared(event: Arc<SharedEvent>, number: u64) -> Self {
        Self::of_shared(event, number, false)
    }

    /// One that another process has made.
    pub fn elsewhere(event: Arc<SharedEvent>, number: u64) -> Self {
        Self::of_shared(event, number, true)
    }

    fn of_shared(event: Arc<SharedEvent>, number: u64, elsewhere: bool) -> Self {
        Self {
            shared: Some(Shared {
                event,
                number,
                elsewhere,
                looked_ns: AtomicU64::new(0),
            }),
            ..Self::default()
        }
    }

    /// Its number among those of a shared event.
    pub fn number(&self) -> Option<u64> {
        self.shared.as_ref().map(|shared| shared.number)
    }

    /// Whether another process carries it out, so that nobody here says when it is reached.
    pub fn is_elsewhere(&self) -> bool {
        self.shared.as_ref().is_some_and(|shared| shared.elsewhere)
    }

    /// Marks it as reached at `time_ns` of the device's timeline.
    pub fn complete(&self, time_ns: u64) {
        self.time_ns.store(time_ns, Relaxed);
        // SYNC(record): pairs with the Acquire load in `reached`; publishes the time.
        self.done.store(true, Release);
        if let Some(shared) = &self.shared
            && !shared.elsewhere
        {
            shared.event.reach(shared.number, time_ns);
        }
    }

    /// When it was reached, if it was.
    pub fn reached(&self) -> Option<u64> {
        if self.done.load(Acquire) {
            return Some(self.time_ns.load(Relaxed));
        }
        let shared = self.shared.as_ref().filter(|shared| shared.elsewhere)?;
        let now_ns = clock::now_ns();
        let look = now_ns.saturating_sub(shared.looked_ns.load(Relaxed)) >= LOOK_NS;
        if look {
            shared.looked_ns.store(now_ns, Relaxed);
        }
        let reached_ns = shared.event.reached(shared.number, look)?;
        self.complete(reached_ns);
        Some(reached_ns)
    }

    /// Waits for one that another process carries out; returns when it was reached.
    pub fn wait_elsewhere(&self) -> Option<u64> {
        let shared = self.shared.as_ref().filter(|shared| shared.elsewhere)?;
        self.reached()
            .or_else(|| Some(shared.event.wait(shared.number)))
    }
}

/// How a stream waits for a word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Until {
    /// `(word - value)` as signed is not negative.
    GreaterOrEqual,
    /// Equal.
    Equal,
    /// Some bit of `value` is set.
    And,
    /// Some bit of `value` is clear in both.
    Nor,
}

/// One element of a stream.
#[derive(Clone)]
pub enum Work {
    /// A kernel.
    Kernel(Box<KernelLaunch>),
    /// A copy.
    Copy(Box<Copy>),
    /// A fill.
    Fill(Fill),
    /// `cuLaunchHostFunc`.
    Host(CUhostFn, UserData),
    /// `cuStreamAddCallback`.
    Callback(CUstreamCallback, CUstream, UserData),
    /// Event record.
    Record(Arc<Record>),
    /// Event wait.
    Wait(Arc<Record>),
    /// Writes a word of 4 or 8 bytes.
    Write {
        address: u64,
        value: u64,
        wide: bool,
    },
    /// Waits for a word of 4 or 8 bytes.
    Await {
        address: u64,
        value: u64,
        wide: bool,
        until: Until,
    },
    /// Gives a block back to its pool.
    PoolFree { address: u64 },
}

/// The program's pointer, handed back to the program's function.
#[derive(Debug, Clone, Copy)]
pub struct UserData(pub *mut c_void);

// SAFETY: never followed by us; the program gave it to be used from the driver's thread.
unsafe impl Send for UserData {}
// SAFETY: as above.
unsafe impl Sync for UserData {}

/// Translation for one device.
pub struct View<'a> {
    /// All memory of the process.
    memory: &'a Memory,
    /// The device that touches it.
    device: usize,
    /// Bytes translated that the device reaches over its link.
    over_the_link: Cell<u64>,
    /// The host has no pages for what is to be written.
    is_short: Cell<bool>,
    /// Pages that it has for what is written until the kernel is done.
    promises: RefCell<Vec<Promise<'a>>>,
}

impl<'a> View<'a> {
    fn new(memory: &'a Memory, device: usize) -> Self {
        Self {
            memory,
            device,
            over_the_link: Cell::new(0),
            is_short: Cell::new(false),
            promises: RefCell::default(),
        }
    }
}

impl DeviceMemory for View<'_> {
    fn translate(&self, dptr: u64, bytes: u64) -> Option<*mut u8> {
        let host = self.translate_to_read(dptr, bytes)?;
        let Ok(promise) = self.memory.may_fill(dptr, bytes) else {
            self.is_short.set(true);
            return None;
        };
        self.promises.borrow_mut().push(promise);
        self.memory.may_write(dptr, bytes);
        Some(host)
    }

    fn translate_to_read(&self, dptr: u64, bytes: u64) -> Option<*mut u8> {
        let host = self.memory.translate(dptr, bytes, Some(self.device))?;
        if self.memory.is_over_the_link(dptr) {
            let sum = self.over_the_link.get().saturating_add(bytes);
            self.over_the_link.set(sum);
        }
        Some(host)
    }

    fn written(&self, dptr: u64, bytes: u64) -> Written<'_> {
        self.memory.written(dptr, bytes)
    }
}

impl KernelLaunch {
    /// Modelled duration in ns, at speed 1.
    pub fn model_ns(&self, profile: &Profile, memory: &Memory, device: usize) -> u64 {
        let Some(host_kernel) = self.function.host_kernel else {
            return profile.default_kernel_ns;
        };
        let view = View::new(memory, device);
        let cost = (host_kernel.cost)(&self.launch(&view));
        let arithmetic = cost.flops / profile.compute_gflops;
        let traffic = cost.bytes / profile.memory_gbps;
        cost.fixed_ns
            .saturating_add(profile.launch_ns)
            .saturating_add(arithmetic.max(traffic) as u64)
    }

    fn launch<'a>(&'a self, view: &'a View<'_>) -> Launch<'a> {
        Launch {
            grid: self.grid,
            block: self.block,
            shared_bytes: self.shared_bytes,
            args: &self.args,
            memory: view,
        }
    }

    /// Whether it spins until other launches have begun.
    pub fn waits(&self) -> bool {
        self.forced.is_none()
            && self
                .function
                .host_kernel
                .is_some_and(|host_kernel| host_kernel.waits.is_some())
    }

    /// Whether those have begun for which it waits; asked once it has begun itself.
    ///
    /// # Errors
    /// The status that the context carries from now on.
    pub fn may_go_on(&self, memory: &Memory, device: usize) -> Result<bool, CUresult> {
        match self
            .function
            .host_kernel
            .and_then(|host_kernel| host_kernel.waits)
        {
            Some(waits) => waits(&self.launch(&View::new(memory, device))).map_err(status_of),
            None => Ok(true),
        }
    }

    /// Computes; also returns the bytes that went over the device's link because they lie in host
    /// memory.
    ///
    /// # Errors
    /// The status that the context carries from now on.
    pub fn run(&self, memory: &Memory, device: usize) -> (Result<(), CUresult>, u64) {
        if let Some(status) = self.forced {
            return (Err(status), 0);
        }
        let Some(host_kernel) = self.function.host_kernel else {
            return (Ok(()), 0);
        };
        let view = View::new(memory, device);
        let outcome = (host_kernel.run)(&self.launch(&view)).map_err(|fault| {
            if view.is_short.get() {
                CUresult::CUDA_ERROR_OUT_OF_MEMORY
            } else {
                status_of(fault)
            }
        });
        (outcome, view.over_the_link.get())
    }
}

fn status_of(fault: Fault) -> CUresult {
    match fault {
        Fault::IllegalAddress { .. } => CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
        Fault::InvalidValue => CUresult::CUDA_ERROR_LAUNCH_FAILED,
    }
}

/// Host address of `bytes` that a side has at `offset`.
fn resolve(memory: &Memory, side: &Side, offset: u64, bytes: u64) -> Result<*mut u8, CUresult> {
    if let Some(staged) = &side.staged {
        let inside = offset
            .checked_add(bytes)
            .is_some_and(|end| end <= staged.len() as u64);
        if !inside {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        // SAFETY: the offset lies inside the buffer; it is only read from.
        return Ok(unsafe { staged.as_ptr().add(offset as usize) }.cast_mut());
    }
    let address = side.address + offset;
    match memory.translate(address, bytes, None) {
        Some(host) => Ok(host),
        None if memory.is_device_address(address) => Err(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS),
        None => Ok(address as *mut u8),
    }
}

impl Copy {
    /// Moves rows `[from_row, to_row)`, counted through all slices.
    ///
    /// # Errors
    /// `ILLEGAL_ADDRESS` when device memory has gone since the copy was submitted.
    pub fn run(&self, memory: &Memory, from_row: u64, to_row: u64) -> Result<(), CUresult> {
        for row in from_row..to_row {
            let (slice, line) = (row / self.height, row % self.height);
            let from = resolve(
                memory,
                &self.from,
                slice * self.from.slice + line * self.from.pitch,
                self.width,
            )?;
            let to = resolve(
                memory,
                &self.to,
                slice * self.to.slice + line * self.to.pitch,
                self.width,
            )?;
            let _promise = self.may_fill(
                memory,
                slice * self.to.slice + line * self.to.pitch,
                self.width,
            )?;
            // SAFETY: device sides were translated for their whole length; host sides are the
            // program's to vouch for, as with any driver. Source and target may overlap.
            unsafe { self.move_bytes(memory, (slice, line, 0), from, to, self.width) };
        }
        Ok(())
    }

    /// # Safety
    /// `from` and `to` are the host's addresses of `bytes` bytes of both sides, `at` slice, row and
    /// column.
    unsafe fn move_bytes(
        &self,
        memory: &Memory,
        (slice, line, column): (u64, u64, u64),
        from: *const u8,
        to: *mut u8,
        bytes: u64,
    ) {
        let address = |side: &Side| side.address + slice * side.slice + line * side.pitch + column;
        if self.from.staged.is_some() {
            // SAFETY: the caller vouches for it.
            unsafe { memory.write_all(from, (address(&self.to), to), bytes) };
        } else {
            // SAFETY: the caller vouches for it.
            unsafe {
                memory.copy_sparse(
                    (address(&self.from), from),
                    (address(&self.to), to),
                    bytes,
                    self.private,
                );
            }
        }
    }

    /// Moves bytes `[from, to)` of a copy of one row.
    ///
    /// # Errors
    /// As [`Copy::run`].
    pub fn run_part(&self, memory: &Memory, from: u64, to: u64) -> Result<(), CUresult> {
        let source = resolve(memory, &self.from, from, to - from)?;
        let target = resolve(memory, &self.to, from, to - from)?;
        let _promise = self.may_fill(memory, from, to - from)?;
        // SAFETY: as in `run`.
        unsafe { self.move_bytes(memory, (0, 0, from), source, target, to - from) };
        Ok(())
    }

    /// Whether all of the target can be written as things stand.
    ///
    /// # Errors
    /// As [`Copy::may_fill`].
    pub fn may_fill_all(&self, memory: &Memory) -> Result<(), CUresult> {
        if self.from.staged.is_some() {
            return self.may_fill(memory, 0, self.width).map(drop);
        }
        (0..self.depth).try_for_each(|slice| {
            let from = self.from.address + slice * self.from.slice;
            let to = self.to.address + slice * self.to.slice;
            let sides = ((from, self.from.pitch), (to, self.to.pitch));
            let size = (self.width, self.height);
            let promise = memory.may_copy_rows(sides.0, sides.1, size, self.private);
            promise.map(drop)
        })
    }

    /// Before bytes of the target are written; what a copy takes from memory that was never written
    /// takes no pages there either.
    ///
    /// # Errors
    /// `OUT_OF_MEMORY` where the host has no pages for it.
    pub fn may_fill<'a>(
        &self,
        memory: &'a Memory,
        offset: u64,
        bytes: u64,
    ) -> Result<Promise<'a>, CUresult> {
        let to = self.to.address + offset;
        let from = self.from.address + offset;
        if self.from.staged.is_some() {
            return memory.may_fill(to, bytes);
        }
        memory.may_copy(from, to, bytes, self.private)
    }
}

/// Bytes that a fill writes at a time.
const FILL_PART: u64 = 64 << 20;

impl Fill {
    /// Fills.
    ///
    /// # Errors
    /// `ILLEGAL_ADDRESS` when the memory has gone since the fill was submitted.
    pub fn run(&self, memory: &Memory) -> Result<(), CUresult> {
        let row_bytes = self.width * u64::from(self.element);
        for row in 0..self.height {
            let target = memory
                .translate(self.address + row * self.pitch, row_bytes, None)
                .ok_or(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS)?;
            if self.value == 0 {
                // SAFETY: translated for the whole row.
                unsafe { memory.zero(self.address + row * self.pitch, target, row_bytes, false) };
                continue;
            }
            // In parts, so that no more is promised at a time than is about to be written.
            let part = FILL_PART / u64::from(self.element);
            for from in (0..self.width).step_by(part as usize) {
                let count = part.min(self.width - from);
                let (at, bytes) = (
                    self.address + row * self.pitch + from * u64::from(self.element),
                    count * u64::from(self.element),
                );
                let _promise = memory.may_fill(at, bytes)?;
                memory.will_write(at, bytes);
                // SAFETY: translated for the whole row; addresses are multiples of the element,
                // which the entry checked.
                unsafe {
                    let target = target.add((from * u64::from(self.element)) as usize);
                    let count = count as usize;
                    match self.element {
                        1 => target.write_bytes(self.value as u8, count),
                        2 => std::slice::from_raw_parts_mut(target.cast::<u16>(), count)
                            .fill(self.value as u16),
                        _ => std::slice::from_raw_parts_mut(target.cast::<u32>(), count)
                            .fill(self.value),
                    }
                }
            }
        }
        Ok(())
    }
}

fn word(memory: &Memory, address: u64, wide: bool) -> Result<*mut u8, CUresult> {
    memory
        .translate(address, if wide { 8 } else { 4 }, None)
        .ok_or(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS)
}

/// Writes a word for other processors to see.
///
/// # Errors
/// `ILLEGAL_ADDRESS` when it is not mapped.
pub fn write_word(memory: &Memory, address: u64, value: u64, wide: bool) -> Result<(), CUresult> {
    let at = word(memory, address, wide)?;
    // A page of the program's own host memory is its own affair.
    let _promise = match memory.is_device_address(address) {
        true => Some(memory.may_fill(address, if wide { 8 } else { 4 })?),
        false => None,
    };
    memory.will_write(address, 8);
    // SAFETY: translated, and aligned as the entry checked; the program reads it while we write,
    // hence an atomic.
    unsafe {
        if wide {
            AtomicU64::from_ptr(at.cast()).store(value, Release);
        } else {
            std::sync::atomic::AtomicU32::from_ptr(at.cast()).store(value as u32, Release);
        }
    }
    Ok(())
}

/// True when the word is what a stream waits for.
///
/// # Errors
/// `ILLEGAL_ADDRESS` when it is not mapped.
pub fn word_reached(
    memory: &Memory,
    address: u64,
    value: u64,
    wide: bool,
    until: Until,
) -> Result<bool, CUresult> {
    let at = word(memory, address, wide)?;
    // SAFETY: as in `write_word`.
    let found = unsafe {
        if wide {
            AtomicU64::from_ptr(at.cast()).load(Acquire)
        } else {
            u64::from(std::sync::atomic::AtomicU32::from_ptr(at.cast()).load(Acquire))
        }
    };
    let mask = if wide { u64::MAX } else { u64::from(u32::MAX) };
    let value = value & mask;
    Ok(match until {
        Until::GreaterOrEqual if wide => found.wrapping_sub(value) as i64 >= 0,
        Until::GreaterOrEqual => (found as u32).wrapping_sub(value as u32) as i32 >= 0,
        Until::Equal => found == value,
        Until::And => found & value != 0,
        Until::Nor => !(found | value) & mask != 0,
    })
}
