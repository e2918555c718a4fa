//! From a recording to what each process of its replay does: calls in their order, and how long
//! each kernel is to take.

use std::collections::{BTreeMap, HashMap, HashSet};

use serde_json::{Value, json};
use shim_ffi::recording::{Quality, Taken, Way};

use super::arrivals::{self, Began};
use crate::recording::{FIRST_STREAM, Kind, Record, Recording, flags};

/// A kernel in its blocks and threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    pub function: u32,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared_bytes: u32,
}

impl Shape {
    /// The same blocks and threads, of whichever kernel.
    pub fn without_function(&self) -> Self {
        Self {
            function: 0,
            ..*self
        }
    }
}

/// A node of a graph.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Node {
    Kernel { shape: Shape, ns: u64 },
    Copy { bytes: u64, way: Way },
    Fill { bytes: u64 },
    Other,
}

#[derive(Debug, Clone, PartialEq, Default)]
pub struct Graph {
    pub nodes: Vec<Node>,
    pub edges: Vec<(u32, u32)>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Call {
    Launch {
        shape: Shape,
        stream: u32,
        ns: u64,
    },
    GraphMade {
        graph: u32,
    },
    GraphGone {
        graph: u32,
    },
    GraphLaunch {
        graph: u32,
        stream: u32,
    },
    Take {
        memory: u32,
        bytes: u64,
        kind: Taken,
        stream: u32,
    },
    Give {
        memory: u32,
        stream: u32,
    },
    Copy {
        way: Way,
        bytes: u64,
        to: u32,
        from: u32,
        stream: u32,
        blocks: bool,
        locked: bool,
    },
    Fill {
        memory: u32,
        bytes: u64,
        stream: u32,
        blocks: bool,
    },
    StreamMade {
        stream: u32,
        flags: u32,
        priority: i32,
    },
    StreamGone {
        stream: u32,
    },
    EventMade {
        event: u32,
        flags: u32,
    },
    EventGone {
        event: u32,
    },
    EventRecorded {
        event: u32,
        stream: u32,
    },
    EventAwaited {
        event: u32,
        stream: u32,
    },
    WaitContext,
    WaitStream {
        stream: u32,
    },
    WaitEvent {
        event: u32,
    },
    Step,
}

/// A call, which thread makes it, and how long after that thread's last one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Op {
    pub thread: usize,
    pub gap_ns: u64,
    /// When it begins, after the thread's first that has such a time; however long the calls
    /// before it take.
    pub due_ns: Option<u64>,
    pub device: u32,
    pub call: Call,
}

/// What one process does.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Process {
    pub number: u16,
    /// When its first call was, since the recording began.
    pub begins_ns: u64,
    pub threads: usize,
    pub ops: Vec<Op>,
    pub graphs: HashMap<u32, Graph>,
    /// Largest copy from or to host memory that is not locked.
    pub host_bytes: u64,
    /// Largest use of device memory of which it is not known whose it was.
    pub scratch_bytes: u64,
}

#[derive(Debug, Default)]
pub struct Plan {
    pub processes: Vec<Process>,
    pub figures: Figures,
}

/// What is in a recording.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Figures {
    pub launches: u64,
    pub graph_launches: u64,
    pub device_ns: u64,
    /// From its first call to its last.
    pub host_ns: u64,
    pub copies: u64,
    pub copy_bytes: u64,
    pub most_bytes: u64,
    pub waits: u64,
    pub steps: u64,
    /// Launches whose length was not measured, and is that of their likes.
    pub unmeasured: u64,
    /// Calls that come at fixed times.
    pub at_fixed_times: u64,
}

impl Figures {
    pub fn json(&self) -> Value {
        json!({
            "launches": self.launches,
            "graph_launches": self.graph_launches,
            "device_s": self.device_ns as f64 / 1e9, // CAST: rounding is meant.
            "host_s": self.host_ns as f64 / 1e9, // CAST: as above.
            "copies": self.copies,
            "copy_bytes": self.copy_bytes,
            "most_bytes": self.most_bytes,
            "waits": self.waits,
            "steps": self.steps,
            "unmeasured": self.unmeasured,
            "at_fixed_times": self.at_fixed_times,
        })
    }
}

/// No kernel, and no gap, is longer than this: a day.
const LONGEST_NS: u64 = 86_400 * 1_000_000_000;
/// No call is due later: a year.
const LAST_DUE_NS: u64 = 365 * LONGEST_NS;
/// No allocation or copy is larger: 4 TiB.
const LARGEST: u64 = 1 << 42;
/// Most nodes of a graph that is made again.
const NODES_MOST: usize = shim_ffi::recording::NODES_MOST;
const EDGES_MOST: usize = 1 << 20;

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum PlanError {
    #[error("record {at}: {what}")]
    Wrong { at: usize, what: String },
    #[error("it has no calls")]
    Nothing,
}

fn wrong(at: usize, what: impl Into<String>) -> PlanError {
    PlanError::Wrong {
        at,
        what: what.into(),
    }
}

/// What was measured: of launches by their order, and by what they are where they were not.
struct Lengths {
    of_order: HashMap<u64, u64>,
    /// Those that took so long at most.
    most: HashMap<u64, u64>,
    of_kernel: HashMap<(u32, u32), u64>,
    usual: u64,
}

impl Lengths {
    /// `kind` tells kernels (0) from graphs (1); `number` is the shape's or the graph's.
    fn of(records: &[Record]) -> Self {
        let mut all = HashMap::new();
        for record in records
            .iter()
            .filter(|record| record.kind == Kind::Measured)
        {
            all.insert(record.a, (record.b.min(LONGEST_NS), record.sub));
        }
        // Of those that are alike, by the best that there is.
        let mut samples: HashMap<(u32, u32), [Vec<u64>; 3]> = HashMap::new();
        for record in records {
            if let (Some(what), Some((ns, quality))) = (what(record), all.get(&record.order)) {
                let of = samples.entry(what).or_default();
                // Unknown ones are as good as the worst.
                of[usize::from(*quality).min(2)].push(*ns);
            }
        }
        let of_kernel: HashMap<(u32, u32), u64> = samples
            .into_iter()
            .filter_map(|(what, [queued, idle, shared])| {
                let least = shared.into_iter().min();
                let best = median(queued).or_else(|| median(idle)).or(least);
                best.map(|ns| (what, ns))
            })
            .collect();
        let (of_order, most): (Vec<_>, Vec<_>) = all
            .into_iter()
            .partition(|(_, (_, quality))| *quality < Quality::Bound as u8);
        let without_quality = |(order, (ns, _))| (order, ns);
        let usual = median(of_kernel.values().copied().collect()).unwrap_or(0);
        Self {
            of_order: of_order.into_iter().map(without_quality).collect(),
            most: most.into_iter().map(without_quality).collect(),
            of_kernel,
            usual,
        }
    }

    /// How long a launch takes, and whether it was measured itself.
    fn length(&self, record: &Record) -> (u64, bool) {
        match self.of_order.get(&record.order) {
            Some(ns) => (*ns, true),
            None => {
                let alike = what(record).and_then(|what| self.of_kernel.get(&what));
                let usual = alike.copied().unwrap_or(self.usual);
                let most = self.most.get(&record.order).copied().unwrap_or(LONGEST_NS);
                (usual.min(most), false)
            }
        }
    }
}

fn what(record: &Record) -> Option<(u32, u32)> {
    match record.kind {
        Kind::Launch => Some((0, record.object)),
        Kind::GraphLaunch => Some((1, record.object)),
        _ => None,
    }
}

fn median(mut values: Vec<u64>) -> Option<u64> {
    values.sort_unstable();
    values.get(values.len() / 2).copied()
}

fn shape(record: &Record) -> Shape {
    // CAST: halves and quarters of words.
    let low = |word: u64| word as u32;
    let at_least_one = |count: u32| count.max(1);
    let threads = [
        low(record.gap_ns) & 0xffff,
        low(record.gap_ns >> 16) & 0xffff,
        low(record.gap_ns >> 32) & 0xffff,
    ];
    Shape {
        function: record.stream,
        grid: [low(record.a), low(record.a >> 32), low(record.b)].map(at_least_one),
        block: threads.map(at_least_one),
        shared_bytes: low(record.b >> 32),
    }
}

fn way(number: u8) -> Way {
    match number {
        1 => Way::In,
        2 => Way::Out,
        _ => Way::Within,
    }
}

fn taken(number: u8) -> Option<Taken> {
    [
        Taken::Device,
        Taken::Pool,
        Taken::Managed,
        Taken::Host,
        Taken::Registered,
        Taken::Physical,
    ]
    .into_iter()
    .find(|kind| *kind as u8 == number)
}

/// What of a graph comes before the record that says that it is made.
#[derive(Default)]
struct Unfinished {
    nodes: BTreeMap<u64, Node>,
    edges: Vec<(u64, u64)>,
}

/// The calls of each process of a recording.
///
/// # Errors
/// A record that goes together with no other.
pub fn plan(recording: &Recording) -> Result<Plan, PlanError> {
    let lengths = Lengths::of(&recording.records);
    let mut shapes: HashMap<u32, Shape> = HashMap::new();
    let mut unfinished: HashMap<u32, Unfinished> = HashMap::new();
    let mut graphs: HashMap<u32, (u16, Graph)> = HashMap::new();
    // In the order in which the calls began.
    let mut calls: Vec<(usize, &Record)> = Vec::new();
    for (at, record) in recording.records.iter().enumerate() {
        match record.kind {
            Kind::Shape => {
                let shape = shape(record);
                if shape.function as usize >= recording.names.len() {
                    return Err(wrong(
                        at,
                        format!("no kernel has number {}", shape.function),
                    ));
                }
                shapes.insert(record.object, shape);
            }
            Kind::Node => {
                let node = match record.sub {
                    0 => match shapes.get(&record.stream) {
                        Some(shape) => Node::Kernel {
                            shape: *shape,
                            ns: lengths
                                .of_kernel
                                .get(&(0, record.stream))
                                .copied()
                                .unwrap_or(0),
                        },
                        None => return Err(wrong(at, "a node has a kernel that is not there")),
                    },
                    1 => Node::Copy {
                        bytes: record.b.min(LARGEST),
                        way: way(record.flags),
                    },
                    2 => Node::Fill {
                        bytes: record.b.min(LARGEST),
                    },
                    _ => Node::Other,
                };
                let graph = unfinished.entry(record.object).or_default();
                if graph.nodes.len() < NODES_MOST {
                    graph.nodes.insert(record.a, node);
                }
            }
            Kind::Edge => {
                let graph = unfinished.entry(record.object).or_default();
                if graph.edges.len() < EDGES_MOST {
                    graph.edges.push((record.a, record.b));
                }
            }
            Kind::GraphMade => {
                let parts = unfinished.remove(&record.object).unwrap_or_default();
                let graph = finish(parts, lengths.of_kernel.get(&(1, record.object)).copied());
                graphs.insert(record.object, (record.process, graph));
                calls.push((at, record));
            }
            Kind::Measured => {}
            _ => calls.push((at, record)),
        }
    }
    // What was written first comes first where a file says the same order twice.
    calls.sort_by_key(|(at, record)| (record.order, *at));
    let mut plan = Plan::default();
    let mut by_number: BTreeMap<u16, Builder> = BTreeMap::new();
    let (mut first_ns, mut last_ns) = (u64::MAX, 0);
    for (at, record) in calls {
        first_ns = first_ns.min(record.at_ns);
        last_ns = last_ns.max(record.at_ns.saturating_add(record.took_ns));
        if record.kind == Kind::Process {
            continue;
        }
        let builder = by_number
            .entry(record.process)
            .or_insert_with(|| Builder::new(record));
        builder.call(at, record, &shapes, &graphs, &lengths, &mut plan.figures)?;
    }
    plan.figures.host_ns = last_ns.saturating_sub(first_ns);
    for (number, builder) in by_number {
        let mut process = builder.process;
        process.number = number;
        process.threads = builder.threads.len();
        plan.figures.at_fixed_times += find_fixed_times(&mut process, &builder.began);
        process.graphs = graphs
            .iter()
            .filter(|(_, (of, _))| *of == number)
            .map(|(graph, (_, made))| (*graph, made.clone()))
            .collect();
        for graph in process.graphs.values() {
            for node in &graph.nodes {
                if let Node::Copy { bytes, .. } | Node::Fill { bytes } = node {
                    process.scratch_bytes = process.scratch_bytes.max(*bytes);
                    process.host_bytes = process.host_bytes.max(*bytes);
                }
            }
        }
        plan.figures.most_bytes = plan.figures.most_bytes.max(builder.most_bytes);
        plan.processes.push(process);
    }
    if plan.processes.iter().all(|process| process.ops.is_empty()) {
        return Err(PlanError::Nothing);
    }
    Ok(plan)
}

/// Has calls that come at fixed times come at those; how many these are.
fn find_fixed_times(process: &mut Process, began: &[Began]) -> u64 {
    let mut of_thread: HashMap<usize, Vec<usize>> = HashMap::new();
    for (place, op) in (0..).zip(&process.ops) {
        of_thread.entry(op.thread).or_default().push(place);
    }
    let mut found = 0;
    for places in of_thread.into_values() {
        let times: Vec<Began> = places.iter().map(|place| began[*place]).collect();
        for (place, due_ns) in places.into_iter().zip(arrivals::due(&times)) {
            process.ops[place].due_ns = due_ns.map(|due_ns| due_ns.min(LAST_DUE_NS));
            found += u64::from(due_ns.is_some());
        }
    }
    found
}

/// A graph's kernels take as long together as the graph was measured to.
fn finish(parts: Unfinished, whole_ns: Option<u64>) -> Graph {
    let places: HashMap<u64, u32> = parts
        .nodes
        .keys()
        .zip(0..)
        .map(|(place, number)| (*place, number))
        .collect();
    let mut nodes: Vec<Node> = parts.nodes.into_values().collect();
    let kernels = || 0_u64;
    let (mut count, mut known) = (kernels(), kernels());
    for node in &nodes {
        if let Node::Kernel { ns, .. } = node {
            count += 1;
            known += ns;
        }
    }
    if let (Some(whole), true) = (whole_ns, count > 0) {
        let all_known = nodes
            .iter()
            .all(|node| !matches!(node, Node::Kernel { ns: 0, .. }));
        for node in &mut nodes {
            if let Node::Kernel { ns, .. } = node {
                *ns = match all_known {
                    // CAST: the part of a day in nanoseconds that a node has of it.
                    true => (u128::from(*ns) * u128::from(whole) / u128::from(known)) as u64,
                    false => whole / count,
                };
            }
        }
    }
    let edges = parts
        .edges
        .iter()
        .filter_map(|(from, to)| Some((*places.get(from)?, *places.get(to)?)))
        .filter(|(from, to)| from != to)
        .collect();
    Graph { nodes, edges }
}

#[derive(Default)]
struct Builder {
    process: Process,
    /// Of each call of the process.
    began: Vec<Began>,
    threads: HashMap<u16, usize>,
    streams: HashSet<u32>,
    events: HashSet<u32>,
    graphs: HashSet<u32>,
    /// Bytes, and whether they are the device's.
    memory: HashMap<u32, (u64, bool)>,
    device_bytes: u64,
    most_bytes: u64,
}

impl Builder {
    fn new(first: &Record) -> Self {
        Self {
            process: Process {
                begins_ns: first.at_ns,
                ..Process::default()
            },
            ..Self::default()
        }
    }

    fn call(
        &mut self,
        at: usize,
        record: &Record,
        shapes: &HashMap<u32, Shape>,
        graphs: &HashMap<u32, (u16, Graph)>,
        lengths: &Lengths,
        figures: &mut Figures,
    ) -> Result<(), PlanError> {
        let number = record.object;
        let missing = |what: &str| wrong(at, format!("there is no {what} {number}"));
        let stream = match record.stream {
            stream if stream < FIRST_STREAM || self.streams.contains(&stream) => stream,
            _ if !uses_stream(record.kind) => 0,
            stream => return Err(wrong(at, format!("there is no stream {stream}"))),
        };
        let call = match record.kind {
            Kind::Launch => {
                let shape = *shapes.get(&number).ok_or_else(|| missing("kernel"))?;
                let (ns, measured) = lengths.length(record);
                figures.launches += 1;
                figures.device_ns = figures.device_ns.saturating_add(ns);
                figures.unmeasured += u64::from(!measured);
                Call::Launch { shape, stream, ns }
            }
            Kind::GraphMade => {
                self.graphs.insert(number);
                Call::GraphMade { graph: number }
            }
            Kind::GraphGone => {
                if !self.graphs.remove(&number) {
                    return Err(missing("graph"));
                }
                Call::GraphGone { graph: number }
            }
            Kind::GraphLaunch => {
                if !self.graphs.contains(&number) || !graphs.contains_key(&number) {
                    return Err(missing("graph"));
                }
                let (ns, measured) = lengths.length(record);
                figures.graph_launches += 1;
                figures.device_ns = figures.device_ns.saturating_add(ns);
                figures.unmeasured += u64::from(!measured);
                Call::GraphLaunch {
                    graph: number,
                    stream,
                }
            }
            Kind::Take => {
                let kind =
                    taken(record.sub).ok_or_else(|| wrong(at, "an unknown kind of memory"))?;
                if record.a > LARGEST {
                    return Err(wrong(at, format!("takes {} bytes", record.a)));
                }
                let on_device = !matches!(kind, Taken::Host | Taken::Registered);
                self.memory.insert(number, (record.a, on_device));
                if on_device {
                    self.device_bytes = self.device_bytes.saturating_add(record.a);
                    self.most_bytes = self.most_bytes.max(self.device_bytes);
                }
                Call::Take {
                    memory: number,
                    bytes: record.a,
                    kind,
                    stream,
                }
            }
            Kind::Give => {
                let (bytes, on_device) = self
                    .memory
                    .remove(&number)
                    .ok_or_else(|| missing("memory"))?;
                if on_device {
                    self.device_bytes = self.device_bytes.saturating_sub(bytes);
                }
                Call::Give {
                    memory: number,
                    stream,
                }
            }
            Kind::Copy => self.copy(record, stream, figures),
            Kind::Fill => {
                // CAST: numbers are below 2^24.
                let (memory, bytes) = self.within(record.b as u32, record.a.min(LARGEST), true);
                Call::Fill {
                    memory,
                    bytes,
                    stream,
                    blocks: record.flags & flags::BLOCKS != 0,
                }
            }
            Kind::StreamMade => {
                self.streams.insert(number);
                Call::StreamMade {
                    stream: number,
                    // CAST: as it was given to the driver.
                    flags: record.a as u32,
                    priority: record.b as u32 as i32,
                }
            }
            Kind::StreamGone => {
                if !self.streams.remove(&number) {
                    return Err(missing("stream"));
                }
                Call::StreamGone { stream: number }
            }
            Kind::EventMade => {
                self.events.insert(number);
                // Shared ones are of no use without those that they are shared with.
                const SHARED: u32 = 4;
                Call::EventMade {
                    event: number,
                    // CAST: as it was given to the driver.
                    flags: record.a as u32 & !SHARED,
                }
            }
            Kind::EventGone => {
                if !self.events.remove(&number) {
                    return Err(missing("event"));
                }
                Call::EventGone { event: number }
            }
            Kind::EventRecorded | Kind::EventAwaited => {
                if !self.events.contains(&number) {
                    return Err(missing("event"));
                }
                match record.kind {
                    Kind::EventRecorded => Call::EventRecorded {
                        event: number,
                        stream,
                    },
                    _ => Call::EventAwaited {
                        event: number,
                        stream,
                    },
                }
            }
            Kind::Wait => {
                figures.waits += 1;
                match record.sub {
                    0 => Call::WaitContext,
                    1 => Call::WaitStream { stream },
                    _ if self.events.contains(&number) => Call::WaitEvent { event: number },
                    _ => return Err(missing("event")),
                }
            }
            Kind::Step => {
                figures.steps += 1;
                Call::Step
            }
            // Not calls, or taken before.
            Kind::Process | Kind::Shape | Kind::Node | Kind::Edge | Kind::Measured => return Ok(()),
        };
        let next = self.threads.len();
        let thread = *self.threads.entry(record.thread).or_insert(next);
        self.began.push(Began {
            at_ns: record.at_ns,
            gap_ns: record.gap_ns.min(LONGEST_NS),
        });
        self.process.ops.push(Op {
            thread,
            gap_ns: record.gap_ns.min(LONGEST_NS),
            due_ns: None,
            device: u32::from(record.device_plus_one.max(1)) - 1,
            call,
        });
        Ok(())
    }

    fn copy(&mut self, record: &Record, stream: u32, figures: &mut Figures) -> Call {
        let way = way(record.sub);
        let locked = record.flags & flags::LOCKED != 0;
        // CAST: halves of the word; numbers are below 2^24.
        let (to, from) = (record.b as u32, (record.b >> 32) as u32);
        let bytes = record.a.min(LARGEST);
        let (to, bytes) = self.within(to, bytes, way != Way::Out);
        let (from, bytes) = self.within(from, bytes, way != Way::In);
        if way != Way::Within {
            self.process.host_bytes = self.process.host_bytes.max(bytes);
        }
        figures.copies += 1;
        figures.copy_bytes = figures.copy_bytes.saturating_add(bytes);
        Call::Copy {
            way,
            bytes,
            to,
            from,
            stream,
            blocks: record.flags & flags::BLOCKS != 0,
            locked,
        }
    }

    /// Memory on the side that it has to be on, or 0, and how many of the bytes it has.
    fn within(&mut self, memory: u32, bytes: u64, on_device: bool) -> (u32, u64) {
        match self.memory.get(&memory) {
            Some((has, is_on_device)) if *is_on_device == on_device => (memory, bytes.min(*has)),
            _ => {
                if on_device {
                    self.process.scratch_bytes = self.process.scratch_bytes.max(bytes);
                }
                (0, bytes)
            }
        }
    }
}

fn uses_stream(kind: Kind) -> bool {
    matches!(
        kind,
        Kind::Launch
            | Kind::GraphLaunch
            | Kind::Copy
            | Kind::Fill
            | Kind::EventRecorded
            | Kind::EventAwaited
            | Kind::Wait
            | Kind::Take
            | Kind::Give
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_launch_takes_what_was_measured_or_what_its_likes_take_within_its_bound() {
        let record = |kind, order, object, a, b, sub| Record {
            order,
            object,
            a,
            b,
            sub,
            ..Record::of(kind)
        };
        let launch = |order| record(Kind::Launch, order, 7, 0, 0, 0);
        let measured =
            |order, ns, quality: Quality| record(Kind::Measured, 0, 0, order, ns, quality as u8);
        let launches: Vec<Record> = (1..=5).map(launch).collect();
        let all = [
            measured(1, 100, Quality::Queued),
            measured(2, 102, Quality::Idle),
            // The host stood still.
            measured(3, 24_000, Quality::Bound),
            measured(4, 40, Quality::Bound),
        ];
        let lengths = Lengths::of(&[launches.as_slice(), &all].concat());
        let of: Vec<_> = launches.iter().map(|one| lengths.length(one)).collect();
        let wanted = [
            (100, true),
            (102, true),
            (100, false),
            (40, false),
            (100, false),
        ];
        assert_eq!(of, wanted);
    }
}
