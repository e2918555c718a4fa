//! Makes the calls of one process of a recording, in their order and with the times between them.
//!
//! Each thread of the recording is one here. A call begins when its thread has waited as long after
//! its last one as the recording says, or at its time where it has one ([`super::arrivals`]), and
//! when every call that began before it has begun. So calls come in the order of the recording,
//! whatever the host's scheduler does.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use nix::libc;
use shim_ffi::recording::{Taken, Way};
use shim_ffi::{CUDA_KERNEL_NODE_PARAMS, CUDA_MEMCPY3D, CUDA_MEMSET_NODE_PARAMS, CUmemorytype};

use super::cuda::{Cuda, Word};
use super::kernels::{self, Fit, Kernels};
use super::plan::{Call, Graph, Node, Op, Process, Shape};
use crate::dilation;
use crate::recording::{FIRST_STREAM, PER_THREAD_STREAM};

/// How a replay is made.
#[derive(Debug, Clone, Copy)]
pub struct How {
    /// Times are divided by this.
    pub speed: f64,
    /// The host takes so many times as long for them as the device says.
    pub dilation: u32,
    /// Begin anew until this is over.
    pub until: Option<Instant>,
}

/// What came of it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Played {
    pub rounds: u64,
    pub launches: u64,
    /// What the kernels were asked to take.
    pub device_ns: u64,
    /// By the device's clock, as all times here.
    pub host_ns: u64,
    /// When the first call of the recording was to be made, `CLOCK_MONOTONIC`; what the process
    /// had of the device before went into finding out how its kernels behave there.
    pub began_mono_ns: u64,
    pub device: String,
}

/// A device of this process.
struct Device<'a> {
    context: Word,
    kernels: Kernels<'a>,
    functions: HashMap<u32, Word>,
    /// By shape alone: of what a grid costs the function is no part.
    fits: HashMap<Shape, Fit>,
    scratch: Word,
    other_scratch: Word,
}

/// Host memory of our own.
struct Mapped {
    at: Word,
    bytes: usize,
}

impl Mapped {
    fn new(bytes: u64) -> anyhow::Result<Self> {
        let bytes = usize::try_from(bytes.max(1))?;
        // SAFETY: new pages of this process's own.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if at == libc::MAP_FAILED {
            let error = std::io::Error::last_os_error();
            return Err(anyhow!(error).context(format!("cannot get {bytes} bytes of host memory")));
        }
        Ok(Self {
            at: at as Word,
            bytes,
        })
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and used by nobody any more: see `Player::clear`.
        unsafe { libc::munmap(self.at as *mut libc::c_void, self.bytes) };
    }
}

/// What the calls of the recording have made, by its numbers.
#[derive(Default)]
struct Made {
    streams: HashMap<u32, Word>,
    events: HashMap<u32, Word>,
    graphs: HashMap<u32, (Word, Word)>,
    memory: HashMap<u32, (Taken, Word)>,
    registered: HashMap<u32, Mapped>,
}

pub struct Player<'a> {
    cuda: &'a Cuda,
    process: &'a Process,
    how: How,
    devices: HashMap<u32, Device<'a>>,
    host: Mapped,
    made: Mutex<Made>,
    /// The call whose turn it is.
    turn: AtomicUsize,
    failed: AtomicBool,
    launches: AtomicU64,
    steps: AtomicU64,
    device_ns: AtomicU64,
    /// Nanoseconds that kernels took too much, because none takes less.
    owed_ns: Mutex<i64>,
    pub device_name: String,
}

impl<'a> Player<'a> {
    /// Everything that is there before the first call.
    ///
    /// # Errors
    /// No such device, or no memory.
    pub fn new(
        cuda: &'a Cuda,
        process: &'a Process,
        names: &[String],
        how: How,
    ) -> anyhow::Result<Self> {
        let mut player = Self {
            cuda,
            process,
            how,
            devices: HashMap::new(),
            host: Mapped::new(process.host_bytes)?,
            made: Mutex::default(),
            turn: AtomicUsize::new(0),
            failed: AtomicBool::new(false),
            launches: AtomicU64::new(0),
            steps: AtomicU64::new(0),
            device_ns: AtomicU64::new(0),
            owed_ns: Mutex::new(0),
            device_name: String::new(),
        };
        for op in &process.ops {
            if !player.devices.contains_key(&op.device) {
                let device = player.device(op.device, names)?;
                player.devices.insert(op.device, device);
            }
        }
        Ok(player)
    }

    fn shapes(&self) -> Vec<Shape> {
        let of_nodes = self.process.graphs.values().flat_map(|graph| &graph.nodes);
        let of_nodes = of_nodes.filter_map(|node| match node {
            Node::Kernel { shape, .. } => Some(*shape),
            _ => None,
        });
        let of_calls = self.process.ops.iter().filter_map(|op| match op.call {
            Call::Launch { shape, .. } => Some(shape),
            _ => None,
        });
        let mut shapes: Vec<Shape> = of_calls.chain(of_nodes).collect();
        shapes.sort_unstable_by_key(|shape| {
            (shape.function, shape.grid, shape.block, shape.shared_bytes)
        });
        shapes.dedup();
        shapes
    }

    fn device(&mut self, ordinal: u32, names: &[String]) -> anyhow::Result<Device<'a>> {
        let cuda = self.cuda;
        let (number, context) = cuda.primary(ordinal)?;
        // SAFETY: a context that was just retained.
        unsafe { cuda.set_current(context)? };
        self.device_name = cuda.name(number);
        let shapes = self.shapes();
        let mut called: HashMap<u32, String> = HashMap::new();
        for shape in &shapes {
            // CAST: numbers of kernels index their names.
            let name = names
                .get(shape.function as usize)
                .map_or("", String::as_str);
            called.insert(shape.function, kernels::called(name, shape.function));
        }
        let unique: Vec<String> = called.values().cloned().collect();
        let kernels = Kernels::new(cuda, number, &unique)?;
        let mut functions = HashMap::new();
        for (number, name) in &called {
            functions.insert(*number, kernels.get(name)?);
        }
        let mut fits = HashMap::new();
        for shape in shapes.iter().map(Shape::without_function) {
            if let Entry::Vacant(unknown) = fits.entry(shape) {
                unknown.insert(kernels.fit(&shape)?);
            }
        }
        // The largest last: what is allowed a function last holds.
        for shape in by_shared(&shapes) {
            if let Some(function) = functions.get(&shape.function) {
                kernels.allow(*function, shape)?;
            }
        }
        let mut scratch = [0; 2];
        for at in &mut scratch {
            if self.process.scratch_bytes > 0 {
                let bytes = usize::try_from(self.process.scratch_bytes)?;
                // SAFETY: a valid pointer to a local.
                unsafe { cuda.alloc(at, bytes) }?;
            }
        }
        Ok(Device {
            context,
            kernels,
            functions,
            fits,
            scratch: scratch[0],
            other_scratch: scratch[1],
        })
    }

    /// How long a kernel takes here that took so long when it was recorded.
    fn scaled(&self, ns: u64) -> u64 {
        // CAST: rounding is meant; a day at most.
        (ns as f64 / self.how.speed) as u64
    }

    /// One more launch, of kernels that take so long in all.
    fn count_launch(&self, ns: u64) {
        self.launches.fetch_add(1, Ordering::Relaxed);
        self.device_ns.fetch_add(ns, Ordering::Relaxed);
    }

    /// What a kernel that is to take so long in all is asked to take, and how many of its blocks.
    fn ask(&self, device: &Device, shape: &Shape, ns: u64) -> [u64; 2] {
        let ns = self.scaled(ns);
        let fit = device.fits.get(&shape.without_function()).copied();
        let Fit { blocks, besides_ns } = fit.unwrap_or(Fit {
            blocks: u64::MAX,
            besides_ns: 0,
        });
        let mut owed = self.owed_ns.lock().unwrap_or_else(|lock| lock.into_inner());
        // CAST: a day in nanoseconds has 47 bits.
        let wanted = ns as i64 - besides_ns as i64 - *owed;
        // What a kernel takes too much is not made up for by much.
        *owed = (-wanted).clamp(0, 1_000_000);
        [wanted.max(0) as u64, blocks]
    }

    /// Replays once, or until its time is over.
    ///
    /// # Errors
    /// The driver refuses a call.
    pub fn play(&self) -> anyhow::Result<Played> {
        let (began, began_mono_ns) = (Instant::now(), crate::record::now_ns());
        let mut rounds = 0;
        loop {
            self.turn.store(0, Ordering::Release);
            self.round()?;
            self.clear()?;
            rounds += 1;
            if self.how.until.is_none_or(|until| Instant::now() >= until) {
                break;
            }
        }
        Ok(Played {
            rounds,
            launches: self.launches.load(Ordering::Relaxed),
            device_ns: self.device_ns.load(Ordering::Relaxed),
            // CAST: years.
            host_ns: began.elapsed().as_nanos() as u64 / u64::from(self.how.dilation.max(1)),
            began_mono_ns: began_mono_ns / u64::from(self.how.dilation.max(1)),
            device: self.device_name.clone(),
        })
    }

    /// Launches and ends of iterations so far.
    pub fn counted(&self) -> (u64, u64) {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        (of(&self.launches), of(&self.steps))
    }

    fn round(&self) -> anyhow::Result<()> {
        fine_sleeps();
        if self.process.threads <= 1 {
            let mut hand = Hand::default();
            for (at, op) in self.process.ops.iter().enumerate() {
                hand.pause(op, &self.how);
                if self.is_over() {
                    break;
                }
                let outcome = self.call(&mut hand, op);
                hand.last = Some(Instant::now());
                outcome.map_err(|error| about(error, at))?;
            }
            return Ok(());
        }
        self.threads()
    }

    /// A round of several threads.
    fn threads(&self) -> anyhow::Result<()> {
        let mut ops: Vec<Vec<usize>> = vec![Vec::new(); self.process.threads];
        for (at, op) in self.process.ops.iter().enumerate() {
            ops[op.thread].push(at);
        }
        let waiting: Vec<Mutex<Option<Thread>>> =
            (0..ops.len()).map(|_| Mutex::new(None)).collect();
        let first_error = Mutex::new(None);
        thread::scope(|scope| {
            for (number, mine) in ops.iter().enumerate() {
                let (waiting, first_error) = (&waiting, &first_error);
                let body = move || {
                    *lock(&waiting[number]) = Some(thread::current());
                    fine_sleeps();
                    if let Err(error) = self.part(mine, waiting) {
                        lock(first_error).get_or_insert(error);
                        self.failed.store(true, Ordering::Release);
                        for other in waiting {
                            if let Some(thread) = &*lock(other) {
                                thread.unpark();
                            }
                        }
                    }
                };
                let started = thread::Builder::new()
                    .stack_size(256 << 10)
                    .spawn_scoped(scope, body);
                if let Err(error) = started {
                    self.failed.store(true, Ordering::Release);
                    let error = anyhow!(error).context("cannot start a thread of the recording");
                    lock(first_error).get_or_insert(error);
                    for other in waiting {
                        if let Some(thread) = &*lock(other) {
                            thread.unpark();
                        }
                    }
                    break;
                }
            }
        });
        match lock(&first_error).take() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    /// What one of several threads does.
    fn part(&self, mine: &[usize], waiting: &[Mutex<Option<Thread>>]) -> anyhow::Result<()> {
        let mut hand = Hand::default();
        for at in mine {
            let op = &self.process.ops[*at];
            hand.pause(op, &self.how);
            while self.turn.load(Ordering::Acquire) != *at {
                if self.failed.load(Ordering::Acquire) {
                    return Ok(());
                }
                // Woken by the thread that makes the call before. TIMEOUT: nobody waits for good.
                thread::park_timeout(Duration::from_secs(1));
            }
            let pass_on = || {
                self.turn.store(at + 1, Ordering::Release);
                if let Some(next) = self.process.ops.get(at + 1)
                    && let Some(thread) = &*lock(&waiting[next.thread])
                {
                    thread.unpark();
                }
            };
            let is_over = self.is_over();
            let waits = matches!(
                op.call,
                Call::WaitContext | Call::WaitStream { .. } | Call::WaitEvent { .. }
            ) || matches!(op.call, Call::Copy { blocks: true, .. });
            // Others go on while a call waits.
            if waits || is_over {
                pass_on();
            }
            if is_over {
                continue;
            }
            let outcome = self.call(&mut hand, op);
            hand.last = Some(Instant::now());
            if !waits {
                pass_on();
            }
            outcome.map_err(|error| about(error, *at))?;
        }
        Ok(())
    }

    /// Whether a replay that goes on for a time has had it; the round is not made to its end.
    fn is_over(&self) -> bool {
        self.how.until.is_some_and(|until| Instant::now() >= until)
    }

    fn device_of(&self, op: &Op) -> anyhow::Result<&Device<'a>> {
        self.devices
            .get(&op.device)
            .with_context(|| format!("device {} is not there", op.device))
    }

    fn call(&self, hand: &mut Hand, op: &Op) -> anyhow::Result<()> {
        let device = self.device_of(op)?;
        let cuda = self.cuda;
        // SAFETY: all handles are those that the driver has given for the numbers of the recording;
        // a number is used from when it is made to when it is given back, which the plan checks.
        // Memory has as many bytes as copies and fills move, which it checks as well; scratch
        // memory and host memory have as many as the largest that may use them.
        unsafe {
            if hand.context != device.context {
                cuda.set_current(device.context)?;
                hand.context = device.context;
            }
            match op.call {
                Call::Launch { shape, stream, ns } => {
                    let function = device.functions.get(&shape.function).copied().unwrap_or(0);
                    let asked = self.ask(device, &shape, ns);
                    self.count_launch(self.scaled(ns));
                    let stream = self.stream(stream)?;
                    device.kernels.launch(function, &shape, asked, stream)
                }
                Call::GraphMade { graph } => self.make_graph(device, graph),
                Call::GraphGone { graph } => {
                    if let Some((exec, made)) = self.made().graphs.remove(&graph) {
                        cuda.graph_exec_destroy(exec)?;
                        cuda.graph_destroy(made)?;
                    }
                    Ok(())
                }
                Call::GraphLaunch { graph, stream } => {
                    let exec = self.made().graphs.get(&graph).map(|(exec, _)| *exec);
                    self.count_launch(self.graph_ns(graph));
                    cuda.graph_launch(exec.context("a graph is not there")?, self.stream(stream)?)
                }
                Call::Take {
                    memory,
                    bytes,
                    kind,
                    stream,
                } => self.take(memory, bytes, kind, stream),
                Call::Give { memory, stream } => self.give(memory, stream),
                Call::Copy {
                    way,
                    bytes,
                    to,
                    from,
                    stream,
                    blocks,
                    locked,
                } => {
                    let on_device = |memory, scratch| self.address(memory).unwrap_or(scratch);
                    let on_host = |memory| {
                        let locked = locked.then(|| self.address(memory)).flatten();
                        locked.unwrap_or(self.host.at)
                    };
                    let stream = self.stream(stream)?;
                    let bytes = usize::try_from(bytes)?;
                    let blocks = blocks && stream != PER_THREAD_STREAM as Word;
                    match way {
                        Way::In => {
                            let (to, from) = (on_device(to, device.scratch), on_host(from));
                            match blocks {
                                true => cuda.copy_in(to, from, bytes),
                                false => cuda.copy_in_async(to, from, bytes, stream),
                            }
                        }
                        Way::Out => {
                            let (to, from) = (on_host(to), on_device(from, device.scratch));
                            match blocks {
                                true => cuda.copy_out(to, from, bytes),
                                false => cuda.copy_out_async(to, from, bytes, stream),
                            }
                        }
                        Way::Within | Way::Any => {
                            let to = on_device(to, device.scratch);
                            let from = on_device(from, device.other_scratch);
                            match blocks {
                                true => cuda.copy_within(to, from, bytes),
                                false => cuda.copy_within_async(to, from, bytes, stream),
                            }
                        }
                    }
                }
                Call::Fill {
                    memory,
                    bytes,
                    stream,
                    blocks,
                } => {
                    let at = self.address(memory).unwrap_or(device.scratch);
                    let (stream, bytes) = (self.stream(stream)?, usize::try_from(bytes)?);
                    match blocks && stream != PER_THREAD_STREAM as Word {
                        true => cuda.fill(at, 0, bytes),
                        false => cuda.fill_async(at, 0, bytes, stream),
                    }
                }
                Call::StreamMade {
                    stream,
                    flags,
                    priority,
                } => {
                    let mut made = 0;
                    cuda.stream_create(&raw mut made, flags, priority)?;
                    self.made().streams.insert(stream, made);
                    Ok(())
                }
                Call::StreamGone { stream } => {
                    let made = self.made().streams.remove(&stream);
                    made.map_or(Ok(()), |made| cuda.stream_destroy(made))
                }
                Call::EventMade { event, flags } => {
                    let mut made = 0;
                    cuda.event_create(&raw mut made, flags)?;
                    self.made().events.insert(event, made);
                    Ok(())
                }
                Call::EventGone { event } => {
                    let made = self.made().events.remove(&event);
                    made.map_or(Ok(()), |made| cuda.event_destroy(made))
                }
                Call::EventRecorded { event, stream } => {
                    cuda.event_record(self.event(event)?, self.stream(stream)?)
                }
                Call::EventAwaited { event, stream } => {
                    cuda.stream_wait_event(self.stream(stream)?, self.event(event)?, 0)
                }
                Call::WaitContext => cuda.synchronize(),
                Call::WaitStream { stream } => cuda.stream_wait(self.stream(stream)?),
                Call::WaitEvent { event } => cuda.event_wait(self.event(event)?),
                Call::Step => {
                    self.steps.fetch_add(1, Ordering::Relaxed);
                    cuda.step();
                    Ok(())
                }
            }
        }
    }

    fn made(&self) -> std::sync::MutexGuard<'_, Made> {
        lock(&self.made)
    }

    fn stream(&self, stream: u32) -> anyhow::Result<Word> {
        if stream < FIRST_STREAM {
            // CAST: 0 to 2, which name the default streams.
            return Ok(stream as Word);
        }
        let made = self.made().streams.get(&stream).copied();
        made.with_context(|| format!("stream {stream} is not there"))
    }

    fn event(&self, event: u32) -> anyhow::Result<Word> {
        let made = self.made().events.get(&event).copied();
        made.with_context(|| format!("event {event} is not there"))
    }

    fn address(&self, memory: u32) -> Option<Word> {
        self.made().memory.get(&memory).map(|(_, at)| *at)
    }

    fn take(&self, memory: u32, bytes: u64, kind: Taken, stream: u32) -> anyhow::Result<()> {
        let stream = self.stream(stream)?;
        let cuda = self.cuda;
        let (mut at, size) = (0, usize::try_from(bytes)?);
        let at_least = size.max(1);
        // SAFETY: valid pointers to locals; host memory that is locked stays mapped until it is
        // unlocked.
        unsafe {
            match kind {
                Taken::Device | Taken::Physical => cuda.alloc(&raw mut at, at_least),
                Taken::Pool => cuda.alloc_async(&raw mut at, at_least, stream),
                // Reachable from any stream.
                Taken::Managed => cuda.alloc_managed(&raw mut at, at_least, 1),
                Taken::Host => cuda.alloc_host(&raw mut at, at_least, 0),
                Taken::Registered => {
                    let mapped = Mapped::new(bytes)?;
                    at = mapped.at;
                    let locked = cuda.lock(at, at_least, 0);
                    if locked.is_ok() {
                        self.made().registered.insert(memory, mapped);
                    }
                    locked
                }
            }
        }
        .with_context(|| format!("the recording takes {bytes} bytes of {kind:?} memory here"))?;
        self.made().memory.insert(memory, (kind, at));
        Ok(())
    }

    fn give(&self, memory: u32, stream: u32) -> anyhow::Result<()> {
        let Some((kind, at)) = self.made().memory.remove(&memory) else {
            return Ok(());
        };
        let stream = self.stream(stream).unwrap_or(0);
        // SAFETY: taken by `take` in that way, and known to nobody any more.
        unsafe {
            match kind {
                Taken::Device | Taken::Physical | Taken::Managed => self.cuda.free(at),
                Taken::Pool => self.cuda.free_async(at, stream),
                Taken::Host => self.cuda.free_host(at),
                Taken::Registered => {
                    self.cuda.unlock(at)?;
                    self.made().registered.remove(&memory);
                    Ok(())
                }
            }
        }
    }

    /// How long the kernels of a graph take in one launch of it.
    fn graph_ns(&self, number: u32) -> u64 {
        let nodes = self.process.graphs.get(&number);
        let nodes = nodes.into_iter().flat_map(|graph| &graph.nodes);
        let kernels = nodes.map(|node| match node {
            Node::Kernel { ns, .. } => self.scaled(*ns),
            _ => 0,
        });
        kernels.fold(0, u64::saturating_add)
    }

    fn make_graph(&self, device: &Device, number: u32) -> anyhow::Result<()> {
        let Some(graph) = self.process.graphs.get(&number) else {
            return Ok(());
        };
        let cuda = self.cuda;
        let (mut made, mut exec) = (0, 0);
        // SAFETY: valid pointers to locals.
        unsafe { cuda.graph_create(&raw mut made, 0)? };
        let nodes = graph
            .nodes
            .iter()
            .map(|node| self.node(device, made, node))
            .collect::<anyhow::Result<Vec<Word>>>()?;
        let (from, to): (Vec<Word>, Vec<Word>) = ends(graph, &nodes).unzip();
        // SAFETY: nodes of this graph, in arrays of that many elements; a graph that was just made.
        unsafe {
            if !from.is_empty() {
                cuda.graph_edges(made, from.as_ptr(), to.as_ptr(), from.len())?;
            }
            cuda.graph_instantiate(&raw mut exec, made, 0)?;
        }
        self.made().graphs.insert(number, (exec, made));
        Ok(())
    }

    fn node(&self, device: &Device, graph: Word, node: &Node) -> anyhow::Result<Word> {
        let cuda = self.cuda;
        let mut made = 0;
        let none = std::ptr::null();
        // SAFETY: a graph of our own; structures that are valid when all-zero, filled in with our
        // own functions, scratch memory and host memory, which are as large as any node needs.
        unsafe {
            match node {
                Node::Kernel { shape, ns } => {
                    let [mut ns, mut blocks] = self.ask(device, shape, *ns);
                    let mut words = [(&raw mut ns).cast(), (&raw mut blocks).cast()];
                    let mut about: CUDA_KERNEL_NODE_PARAMS = std::mem::zeroed();
                    let kernel = device.functions.get(&shape.function).copied().unwrap_or(0);
                    about.func.0 = kernel as *mut _;
                    [about.gridDimX, about.gridDimY, about.gridDimZ] = shape.grid;
                    [about.blockDimX, about.blockDimY, about.blockDimZ] = shape.block;
                    about.sharedMemBytes = shape.shared_bytes;
                    about.kernelParams = words.as_mut_ptr();
                    cuda.graph_kernel(&raw mut made, graph, none, 0, &raw const about)?;
                }
                Node::Copy { bytes, way } if *bytes > 0 => {
                    let mut about: CUDA_MEMCPY3D = std::mem::zeroed();
                    let on_device = CUmemorytype::CU_MEMORYTYPE_DEVICE;
                    let on_host = CUmemorytype::CU_MEMORYTYPE_HOST;
                    about.srcMemoryType = if *way == Way::In { on_host } else { on_device };
                    about.dstMemoryType = if *way == Way::Out { on_host } else { on_device };
                    about.srcHost = self.host.at as *const _;
                    about.dstHost = self.host.at as *mut _;
                    // CAST: addresses have 64 bits.
                    about.srcDevice.0 = device.other_scratch as u64;
                    about.dstDevice.0 = device.scratch as u64;
                    about.WidthInBytes = usize::try_from(*bytes)?;
                    (about.Height, about.Depth) = (1, 1);
                    let context = device.context;
                    cuda.graph_copy(&raw mut made, graph, none, 0, &raw const about, context)?;
                }
                Node::Fill { bytes } if *bytes > 0 => {
                    let mut about: CUDA_MEMSET_NODE_PARAMS = std::mem::zeroed();
                    // CAST: as above.
                    about.dst.0 = device.scratch as u64;
                    (about.elementSize, about.height) = (1, 1);
                    about.width = usize::try_from(*bytes)?;
                    let context = device.context;
                    cuda.graph_fill(&raw mut made, graph, none, 0, &raw const about, context)?;
                }
                _ => cuda.graph_empty(&raw mut made, graph, none, 0)?,
            }
        }
        Ok(made)
    }

    /// Gives back what the recording has not.
    fn clear(&self) -> anyhow::Result<()> {
        for device in self.devices.values() {
            // SAFETY: a context of this process's own.
            unsafe {
                self.cuda.set_current(device.context)?;
                self.cuda.synchronize()?;
            }
        }
        let memory: Vec<u32> = self.made().memory.keys().copied().collect();
        for memory in memory {
            self.give(memory, 0)?;
        }
        let made = std::mem::take(&mut *self.made());
        // SAFETY: made by the calls of this round, known to nobody any more, and nothing runs.
        unsafe {
            for (exec, graph) in made.graphs.into_values() {
                self.cuda.graph_exec_destroy(exec)?;
                self.cuda.graph_destroy(graph)?;
            }
            for event in made.events.into_values() {
                self.cuda.event_destroy(event)?;
            }
            for stream in made.streams.into_values() {
                self.cuda.stream_destroy(stream)?;
            }
            self.cuda.synchronize()
        }
    }
}

fn by_shared(shapes: &[Shape]) -> Vec<&Shape> {
    let mut sorted: Vec<&Shape> = shapes.iter().collect();
    sorted.sort_by_key(|shape| shape.shared_bytes);
    sorted
}

fn ends<'a>(graph: &'a Graph, nodes: &'a [Word]) -> impl Iterator<Item = (Word, Word)> + 'a {
    // CAST: numbers of nodes are small.
    let node = |number: u32| nodes.get(number as usize).copied();
    let edges = graph.edges.iter();
    edges.filter_map(move |(from, to)| Some((node(*from)?, node(*to)?)))
}

fn about(error: anyhow::Error, at: usize) -> anyhow::Error {
    error.context(format!("call {at} of the replay"))
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|lock| lock.into_inner())
}

/// What a thread of the replay knows of itself.
#[derive(Default)]
struct Hand {
    context: Word,
    /// When its last call ended.
    last: Option<Instant>,
    /// When its first call began that comes at a fixed time.
    first_due: Option<Instant>,
}

/// So long before its time a thread wakes up and looks at the clock instead.
const SPIN: Duration = Duration::from_micros(60);

impl Hand {
    /// Waits until so long after the last call, or until its time, which does not depend on how
    /// long that took; not beyond the end of the replay.
    fn pause(&mut self, op: &Op, how: &How) {
        // CAST: rounding is meant; years at most.
        let scaled = |ns: u64| {
            let time = Duration::from_nanos((ns as f64 / how.speed) as u64);
            dilation::of_the_host(time, how.dilation)
        };
        let until = match (op.due_ns, self.first_due) {
            (Some(due_ns), Some(first)) => first + scaled(due_ns),
            _ => self.last.unwrap_or_else(Instant::now) + scaled(op.gap_ns),
        };
        self.wait(how.until.map_or(until, |end| until.min(end)));
        if op.due_ns.is_some() && self.first_due.is_none() {
            self.first_due = Some(until);
        }
    }

    fn wait(&self, until: Instant) {
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            match left.checked_sub(SPIN) {
                Some(long) if !long.is_zero() => thread::sleep(long),
                _ => std::hint::spin_loop(),
            }
        }
    }
}

/// The calling thread's sleeps end when they are over, and not some 50 microseconds later.
fn fine_sleeps() {
    // SAFETY: changes the calling thread's slack only.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_of_the_program_ends_where_the_time_of_a_replay_does() {
        let mut hand = Hand {
            last: Some(Instant::now()),
            ..Hand::default()
        };
        let op = Op {
            thread: 0,
            device: 0,
            gap_ns: 3_600_000_000_000,
            due_ns: None,
            call: Call::Step,
        };
        let end = Instant::now() + Duration::from_millis(20);
        let how = How {
            speed: 1.0,
            dilation: 1,
            until: Some(end),
        };
        hand.pause(&op, &how);
        let waited = hand.last.map(|last| last.elapsed()).unwrap_or_default();
        println!(
            "now: a pause of an hour took {} ms of 20",
            waited.as_millis()
        );
        assert!(Instant::now() >= end && waited < Duration::from_secs(3600));
    }
}
