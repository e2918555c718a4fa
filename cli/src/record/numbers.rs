//! From what a process says to what is written: numbers in place of handles and addresses.
//!
//! What comes out of the ring is a stranger's: nothing in it is believed, and a wrong word makes
//! at most a wrong record.

use std::collections::{BTreeMap, HashMap};
use std::io;

use shim_ffi::recording::{self as ring, NAME_MOST, Raw, TEXT_BYTES, Taken, Way};

use super::threads::Threads;
use crate::recording::{
    Device, FIRST_STREAM, Kind, LEGACY_STREAM, NUMBER_MOST, PER_THREAD_STREAM, Record, Writer,
    flags,
};

/// A replay's kernels are called after those that they stand for.
pub const STAND_IN: &str = "sublet_replay__";

/// A kernel of this very name is a replay's own, and stands for none.
pub const OWN: &str = STAND_IN;

/// A handle or an address in a process.
type Place = (u16, u64);

#[derive(Debug, Clone, Copy)]
struct Memory {
    bytes: u64,
    number: u32,
    on_host: bool,
}

/// What is known of the job's processes.
#[derive(Default)]
pub struct Numbers {
    /// Without names kernels have numbers only.
    pub without_names: bool,
    began_ns: u64,
    text: HashMap<Place, Vec<u8>>,
    names: HashMap<Place, Vec<u8>>,
    functions: HashMap<Place, u32>,
    by_name: HashMap<Vec<u8>, u32>,
    shapes: HashMap<(u32, [u64; 3]), u32>,
    nodes: HashMap<Place, Vec<Record>>,
    graphs: HashMap<Place, u32>,
    memory: BTreeMap<Place, Memory>,
    physical: HashMap<Place, u32>,
    streams: HashMap<Place, u32>,
    events: HashMap<Place, u32>,
    threads: Threads,
    next: Next,
}

#[derive(Default)]
struct Next {
    function: u32,
    shape: u32,
    graph: u32,
    memory: u32,
    stream: u32,
    event: u32,
}

fn fresh(next: &mut u32) -> u32 {
    *next = next.saturating_add(1).min(NUMBER_MOST);
    *next
}

/// Most bytes of text of which the end has not come.
const TEXT_MOST: usize = 65_536;

impl Numbers {
    pub fn new(began_ns: u64, without_names: bool) -> Self {
        let mut numbers = Self {
            began_ns,
            without_names,
            ..Self::default()
        };
        numbers.next.stream = FIRST_STREAM - 1;
        numbers
    }

    /// Writes what a record says.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn take(&mut self, raw: &Raw, to: &mut Writer) -> io::Result<()> {
        let w = raw.words;
        let here = |handle: u64| (raw.process, handle);
        let mut record = Record {
            flags: raw.flags & flags::BLOCKS,
            device_plus_one: raw.device_plus_one,
            process: raw.process,
            order: raw.order,
            at_ns: raw.at_ns.saturating_sub(self.began_ns),
            gap_ns: raw.gap_ns,
            took_ns: raw.took_ns,
            ..Record::of(Kind::Step)
        };
        // What is of no call is written between the calls of a thread, and takes none of its time.
        if raw.order != 0 && raw.thread != 0 {
            let caller = (raw.process, raw.thread);
            let of = &mut self.threads;
            let assigned = of.assign(caller, record.at_ns, raw.gap_ns, raw.took_ns);
            (record.thread, record.gap_ns) = (assigned.thread, assigned.gap_ns);
        }
        match ring::Kind(raw.kind) {
            ring::Kind::Text => {
                self.say(here(w[0]), w);
                return Ok(());
            }
            ring::Kind::Device => {
                let name = self.text.remove(&here(w[0])).unwrap_or_default();
                // CAST: ordinals are small; another is no device.
                let Ok(ordinal) = u32::try_from(w[0]) else {
                    return Ok(());
                };
                // One process after the other says the same.
                return match self.devices_first(ordinal) {
                    true => to.device(&Device {
                        ordinal,
                        name: String::from_utf8_lossy(&name).into_owned(),
                        driver: w[1],
                    }),
                    false => Ok(()),
                };
            }
            ring::Kind::Function => {
                let name = self.text.remove(&here(w[0])).unwrap_or_default();
                self.names.insert(here(w[0]), name);
                self.functions.remove(&here(w[0]));
                return Ok(());
            }
            ring::Kind::FunctionOf => {
                if let Some(name) = self.names.get(&here(w[1])).cloned() {
                    self.names.insert(here(w[0]), name);
                    self.functions.remove(&here(w[0]));
                }
                return Ok(());
            }
            ring::Kind::Process => record.kind = Kind::Process,
            ring::Kind::Launch => {
                let name = self.names.get(&here(w[0]));
                if name.is_some_and(|name| name == OWN.as_bytes()) {
                    return Ok(());
                }
                record.kind = Kind::Launch;
                record.object = self.shape(raw.process, [w[0], w[1], w[2], w[3]], to)?;
                record.stream = self.stream(raw.process, w[4]);
            }
            ring::Kind::GraphLaunch => {
                record.kind = Kind::GraphLaunch;
                let Some(graph) = self.graphs.get(&here(w[0])) else {
                    return Ok(());
                };
                record.object = *graph;
                record.stream = self.stream(raw.process, w[1]);
            }
            ring::Kind::Node => {
                let node = self.node(raw.process, w, to)?;
                self.part(here(w[0]), node);
                return Ok(());
            }
            ring::Kind::Edge => {
                let edge = Record {
                    a: w[1],
                    b: w[2],
                    ..Record::of(Kind::Edge)
                };
                self.part(here(w[0]), edge);
                return Ok(());
            }
            ring::Kind::GraphMade => {
                record.kind = Kind::GraphMade;
                record.object = fresh(&mut self.next.graph);
                record.a = w[1];
                self.graphs.insert(here(w[0]), record.object);
                for part in self.nodes.remove(&here(w[0])).unwrap_or_default() {
                    to.record(&Record {
                        object: record.object,
                        process: raw.process,
                        ..part
                    })?;
                }
            }
            ring::Kind::GraphGone => {
                record.kind = Kind::GraphGone;
                let Some(graph) = self.graphs.remove(&here(w[0])) else {
                    return Ok(());
                };
                record.object = graph;
            }
            ring::Kind::Take => {
                record.kind = Kind::Take;
                record.object = fresh(&mut self.next.memory);
                record.a = w[1];
                // CAST: a small number; others are device memory.
                record.sub = u8::try_from(w[2]).unwrap_or(0);
                record.stream = self.stream(raw.process, w[3]);
                if record.sub == Taken::Physical as u8 {
                    self.physical.insert(here(w[0]), record.object);
                } else {
                    let memory = Memory {
                        bytes: w[1],
                        number: record.object,
                        on_host: record.sub == Taken::Host as u8
                            || record.sub == Taken::Registered as u8,
                    };
                    self.memory.insert(here(w[0]), memory);
                }
            }
            ring::Kind::Give => {
                record.kind = Kind::Give;
                let known = self.memory.remove(&here(w[0])).map(|memory| memory.number);
                let Some(number) = known.or_else(|| self.physical.remove(&here(w[0]))) else {
                    return Ok(());
                };
                record.object = number;
                record.stream = self.stream(raw.process, w[1]);
            }
            ring::Kind::Map => {
                if let Some(number) = self.physical.get(&here(w[2])) {
                    let memory = Memory {
                        bytes: w[1],
                        number: *number,
                        on_host: false,
                    };
                    self.memory.insert(here(w[0]), memory);
                }
                return Ok(());
            }
            ring::Kind::Copy => {
                record.kind = Kind::Copy;
                record.a = w[2];
                let (to, from) = (self.find(raw.process, w[0]), self.find(raw.process, w[1]));
                let way = self.way(w[3], to, from);
                record.sub = way as u8;
                let host = match way {
                    Way::In => from,
                    _ => to,
                };
                if way != Way::Within && host.is_some_and(|host| host.on_host) {
                    record.flags |= flags::LOCKED;
                }
                let number = |side: Option<Memory>| side.map_or(0, |side| u64::from(side.number));
                record.b = number(to) | number(from) << 32;
                record.stream = self.stream(raw.process, w[4]);
            }
            ring::Kind::Fill => {
                record.kind = Kind::Fill;
                record.a = w[1];
                let found = self.find(raw.process, w[0]);
                record.b = found.map_or(0, |memory| u64::from(memory.number));
                record.stream = self.stream(raw.process, w[2]);
            }
            ring::Kind::StreamMade => {
                record.kind = Kind::StreamMade;
                record.object = fresh(&mut self.next.stream);
                (record.a, record.b) = (w[1], w[2]);
                self.streams.insert(here(w[0]), record.object);
            }
            ring::Kind::StreamGone => {
                record.kind = Kind::StreamGone;
                let Some(stream) = self.streams.remove(&here(w[0])) else {
                    return Ok(());
                };
                record.object = stream;
            }
            ring::Kind::EventMade => {
                record.kind = Kind::EventMade;
                record.object = fresh(&mut self.next.event);
                record.a = w[1];
                self.events.insert(here(w[0]), record.object);
            }
            ring::Kind::EventGone => {
                record.kind = Kind::EventGone;
                let Some(event) = self.events.remove(&here(w[0])) else {
                    return Ok(());
                };
                record.object = event;
            }
            kind @ (ring::Kind::EventRecorded | ring::Kind::EventAwaited) => {
                record.kind = match kind {
                    ring::Kind::EventRecorded => Kind::EventRecorded,
                    _ => Kind::EventAwaited,
                };
                let Some(event) = self.events.get(&here(w[0])) else {
                    return Ok(());
                };
                record.object = *event;
                record.stream = self.stream(raw.process, w[1]);
            }
            ring::Kind::Wait => {
                record.kind = Kind::Wait;
                // CAST: a small number; others are waits for the context.
                record.sub = u8::try_from(w[0]).unwrap_or(0);
                match record.sub {
                    1 => record.stream = self.stream(raw.process, w[1]),
                    2 => match self.events.get(&here(w[1])) {
                        Some(event) => record.object = *event,
                        None => return Ok(()),
                    },
                    _ => record.sub = 0,
                }
            }
            ring::Kind::Step => {}
            ring::Kind::Measured => {
                record = Record {
                    process: raw.process,
                    a: w[0],
                    b: w[1],
                    // CAST: a small number.
                    sub: u8::try_from(w[2]).unwrap_or(0),
                    ..Record::of(Kind::Measured)
                };
            }
            // A context that ends takes with it what is in it; a replay ends with all of its own.
            _ => return Ok(()),
        }
        to.record(&record)
    }

    fn say(&mut self, of: Place, words: [u64; 8]) {
        let mut bytes: Vec<u8> = words[2..].iter().flat_map(|w| w.to_le_bytes()).collect();
        bytes.truncate(TEXT_BYTES);
        while bytes.last() == Some(&0) {
            bytes.pop();
        }
        // CAST: compared at once.
        let from = words[1] as usize;
        if self.text.len() >= TEXT_MOST / TEXT_BYTES {
            self.text.clear();
        }
        let text = self.text.entry(of).or_default();
        if from == 0 {
            text.clear();
        }
        if from == text.len() && text.len() < NAME_MOST {
            text.extend(bytes);
        }
    }

    fn devices_first(&mut self, ordinal: u32) -> bool {
        // Kept beside the kernels, under a process that is none.
        let known = self.functions.insert((0, u64::from(ordinal)), ordinal);
        known.is_none()
    }

    fn function(&mut self, place: Place, to: &mut Writer) -> io::Result<u32> {
        if let Some(number) = self.functions.get(&place) {
            return Ok(*number);
        }
        let name = self.names.get(&place).map(Vec::as_slice).unwrap_or(b"");
        let name = name.strip_prefix(STAND_IN.as_bytes()).unwrap_or(name);
        let name = match name {
            // One whose name nobody asked for.
            b"" => format!("unknown_{}", self.next.function).into_bytes(),
            name => name.to_vec(),
        };
        let number = match self.by_name.get(&name) {
            Some(number) => *number,
            None => {
                let number = self.next.function;
                self.next.function = (number + 1).min(NUMBER_MOST - 1);
                let written = match self.without_names {
                    true => format!("kernel_{number}").into_bytes(),
                    false => name.clone(),
                };
                to.name(number, &written)?;
                self.by_name.insert(name, number);
                number
            }
        };
        self.functions.insert(place, number);
        Ok(number)
    }

    /// The number of a kernel in these blocks and threads.
    fn shape(&mut self, process: u16, words: [u64; 4], to: &mut Writer) -> io::Result<u32> {
        let [function, xy, z, block] = words;
        let function = self.function((process, function), to)?;
        let key = (function, [xy, z, block]);
        if let Some(shape) = self.shapes.get(&key) {
            return Ok(*shape);
        }
        let shape = fresh(&mut self.next.shape);
        self.shapes.insert(key, shape);
        to.record(&Record {
            object: shape,
            stream: function,
            a: xy,
            b: z,
            gap_ns: block,
            ..Record::of(Kind::Shape)
        })?;
        Ok(shape)
    }

    fn node(&mut self, process: u16, w: [u64; 8], to: &mut Writer) -> io::Result<Record> {
        // CAST: the halves of the word.
        let (place, kind) = (w[1] & 0xffff_ffff, (w[1] >> 32) as u32);
        let mut record = Record {
            // Types of nodes are small numbers; others are nodes of no kind.
            sub: u8::try_from(kind).unwrap_or(u8::MAX),
            a: place,
            ..Record::of(Kind::Node)
        };
        match kind {
            0 => record.stream = self.shape(process, [w[2], w[3], w[4], w[5]], to)?,
            1 => {
                let (to, from) = (self.find(process, w[2]), self.find(process, w[3]));
                record.b = w[4];
                record.flags = self.way(w[5], to, from) as u8;
            }
            2 => record.b = w[3],
            _ => {}
        }
        Ok(record)
    }

    /// One node or edge more of a graph that is not there yet.
    fn part(&mut self, graph: Place, part: Record) {
        const PARTS_MOST: usize = 1 << 20;
        let parts = self.nodes.entry(graph).or_default();
        if parts.len() < PARTS_MOST {
            parts.push(part);
        }
    }

    fn stream(&mut self, process: u16, handle: u64) -> u32 {
        match handle {
            0 | 1 => LEGACY_STREAM,
            2 => PER_THREAD_STREAM,
            // One that was made before the recording began, or in a way that is not recorded.
            _ => *self
                .streams
                .get(&(process, handle))
                .unwrap_or(&LEGACY_STREAM),
        }
    }

    /// The memory that has this address in it.
    fn find(&self, process: u16, address: u64) -> Option<Memory> {
        let (at, memory) = self.memory.range(..=(process, address)).next_back()?;
        let inside = at.0 == process && address - at.1 < memory.bytes;
        inside.then_some(*memory)
    }

    fn way(&self, said: u64, to: Option<Memory>, from: Option<Memory>) -> Way {
        match said {
            1 => Way::In,
            2 => Way::Out,
            3 => Way::Within,
            _ => {
                let on_device = |side: Option<Memory>| side.is_some_and(|side| !side.on_host);
                match (on_device(from), on_device(to)) {
                    (false, true) => Way::In,
                    (true, false) => Way::Out,
                    _ => Way::Within,
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::recording::{Provenance, Recording};

    fn written(raws: &[Raw], without_names: bool) -> Recording {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.slr");
        let file = fs::File::create(&path).unwrap();
        let mut writer = Writer::begin(file, 1 << 24, &Provenance::default()).unwrap();
        let mut numbers = Numbers::new(0, without_names);
        for raw in raws {
            numbers.take(raw, &mut writer).unwrap();
        }
        writer.flush().unwrap();
        Recording::open(&path).unwrap()
    }

    fn raw(kind: ring::Kind, words: &[u64]) -> Raw {
        let mut raw = Raw {
            kind: kind.0,
            process: 1,
            thread: 1,
            ..Raw::default()
        };
        raw.words[..words.len()].copy_from_slice(words);
        raw
    }

    fn named(function: u64, name: &str) -> [Raw; 2] {
        let mut words = vec![function, 0];
        for eight in name.as_bytes().chunks(8) {
            let mut bytes = [0; 8];
            bytes[..eight.len()].copy_from_slice(eight);
            words.push(u64::from_le_bytes(bytes));
        }
        [
            raw(ring::Kind::Text, &words),
            raw(ring::Kind::Function, &[function, name.len() as u64]),
        ]
    }

    #[test]
    fn handles_and_addresses_do_not_reach_the_file() {
        const ADDRESS: u64 = 0x7f12_3456_7000;
        let mut raws = named(0xdead_beef_0001, "matmul").to_vec();
        raws.extend([
            raw(ring::Kind::StreamMade, &[0x5555_0000_1111, 1, 0]),
            raw(ring::Kind::Take, &[ADDRESS, 4096, 0, 1]),
            raw(
                ring::Kind::Launch,
                &[0xdead_beef_0001, 7, 1, 256, 0x5555_0000_1111],
            ),
            raw(ring::Kind::Copy, &[ADDRESS + 100, 0x7fff_0000, 64, 0, 1]),
            raw(ring::Kind::Give, &[ADDRESS, 1]),
            raw(ring::Kind::Give, &[ADDRESS, 1]),
        ]);
        let recording = written(&raws, false);
        assert_eq!(recording.names, ["matmul"]);
        let kinds: Vec<Kind> = recording.records.iter().map(|r| r.kind).collect();
        let expected = [
            Kind::StreamMade,
            Kind::Take,
            Kind::Shape,
            Kind::Launch,
            Kind::Copy,
            Kind::Give,
        ];
        assert_eq!(kinds, expected);
        let copy = recording.records[4];
        assert_eq!((copy.sub, copy.a, copy.b), (Way::In as u8, 64, 1));
        let launch = recording.records[3];
        assert_eq!((launch.object, launch.stream), (1, FIRST_STREAM));
        for record in &recording.records {
            for word in [record.a, record.b, record.gap_ns] {
                assert!(word < 1 << 20, "{record:?}");
            }
        }
    }

    #[test]
    fn names_can_be_left_out_and_stand_ins_have_those_of_what_they_stand_for() {
        let mut raws = named(1, "secret").to_vec();
        raws.extend(named(2, "sublet_replay__secret"));
        for function in [1, 2] {
            raws.push(raw(ring::Kind::Launch, &[function, 1, 1, 1, 1]));
        }
        assert_eq!(written(&raws, false).names, ["secret"]);
        assert_eq!(written(&raws, true).names, ["kernel_0"]);
    }

    #[test]
    fn a_job_with_a_thread_for_each_request_is_recorded_to_its_end() {
        const THREADS: u32 = 70_000;
        let mut raws = named(1, "answer").to_vec();
        for thread in 1..=THREADS {
            raws.push(Raw {
                thread,
                order: u64::from(thread),
                at_ns: u64::from(thread) * 1000,
                ..raw(ring::Kind::Launch, &[1, 1, 1, 32, 1])
            });
        }
        let recording = written(&raws, false);
        let launches = recording.records.iter();
        let launches = launches.filter(|record| record.kind == Kind::Launch);
        let threads: Vec<u16> = launches.map(|record| record.thread).collect();
        println!(
            "now: {} of {THREADS} launches are in the file",
            threads.len()
        );
        assert_eq!(threads.len(), THREADS as usize);
        assert!(threads.iter().all(|thread| *thread != 0));
    }

    #[test]
    fn a_strangers_words_make_no_more_than_wrong_records() {
        let mut state = 1_u64;
        let mut random = move || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            state >> 20
        };
        let raws: Vec<Raw> = (0..20_000)
            .map(|_| {
                let mut raw = Raw {
                    kind: (random() % 30) as u16,
                    flags: random() as u8,
                    process: (random() % 3) as u16,
                    order: random(),
                    at_ns: random() % 1000,
                    ..Raw::default()
                };
                for word in &mut raw.words {
                    *word = match random() % 4 {
                        0 => u64::MAX,
                        1 => random() % 8,
                        2 => random() << 20,
                        _ => 0,
                    };
                }
                raw
            })
            .collect();
        let recording = written(&raws, false);
        assert!(!recording.records.is_empty());
    }
}
