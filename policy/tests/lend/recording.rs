//! Steady steps of the recorded PyTorch trainings in `examples/recordings`: of each launch the time
//! on the host before it, and the length of its kernel.

use std::path::Path;
use std::sync::OnceLock;

/// Bytes of a record, and of the heads of the file and of a block (docs/reference/recording.md).
const RECORD: usize = 64;
const HEAD: usize = 24;
const BLOCK: usize = 16;

const LAUNCH: u8 = 4;
const COPY: u8 = 12;
const MEASURED: u8 = 22;

/// What recording added to each kernel, in nanoseconds: the step's kernels then sum to what the
/// device's own counter said of an unrecorded one.
const RECORDER_NS: u64 = 4200;
const LEAST_NS: u64 = 1500;

/// A launch: time on the host since the one before, and the kernel's length (0: the step's end).
pub type Launch = (u64, u64);

struct Record {
    kind: u8,
    sub: u8,
    thread: u16,
    order: u64,
    at: u64,
    a: u64,
    b: u64,
}

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

fn records(path: &Path) -> Vec<Record> {
    let bytes = std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let half = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four")) as usize;
    let mut found = Vec::new();
    let mut at = HEAD + half(12);
    while at + BLOCK <= bytes.len() {
        let (kind, len) = (half(at + 4), half(at + 8));
        let block = &bytes[at + BLOCK..at + BLOCK + len];
        if kind == 1 {
            found.extend(block.as_chunks::<RECORD>().0.iter().map(|bytes| Record {
                kind: bytes[0],
                sub: bytes[3],
                thread: u16::from_le_bytes([bytes[6], bytes[7]]),
                order: word(bytes, 8),
                at: word(bytes, 16),
                a: word(bytes, 48),
                b: word(bytes, 56),
            }));
        }
        at += BLOCK + len;
    }
    found
}

/// Steps `first..last` of a recording, host times scaled to an unrecorded step's.
fn cut(
    file: &str,
    scale: f64,
    input: u64,
    every: usize,
    steps: (usize, usize),
) -> Vec<Vec<Launch>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../examples/recordings")
        .join(file);
    let all = records(&path);
    let measured: std::collections::HashMap<u64, u64> = all
        .iter()
        .filter(|record| record.kind == MEASURED)
        .map(|record| (record.a, record.b))
        .collect();
    let mut calls: Vec<&Record> = all
        .iter()
        .filter(|record| ![22, 3, 1, 5, 6, 7].contains(&record.kind))
        .collect();
    calls.sort_by_key(|record| record.order);
    // A step begins where its input is copied to the device.
    let begins = |call: &Record| call.kind == COPY && call.sub == 1 && call.a == input;
    let starts: Vec<usize> = (0..calls.len())
        .filter(|at| begins(calls[*at]) && calls[*at].thread == 1)
        .step_by(every)
        .collect();
    let scaled = |span: u64| (span as f64 * scale) as u64;
    let step = |from: usize, to: usize| {
        let mut last = calls[from].at;
        let mut launches: Vec<Launch> = Vec::new();
        for call in calls[from..to].iter().filter(|call| call.kind == LAUNCH) {
            let len = measured[&call.order].saturating_sub(RECORDER_NS);
            launches.push((scaled(call.at - last), len.max(LEAST_NS)));
            last = call.at;
        }
        launches.push((scaled(calls[to].at - last), 0));
        launches
    };
    (steps.0..steps.1)
        .map(|at| step(starts[at], starts[at + 1]))
        .collect()
}

/// The steps of a recording that the project ships.
pub fn steps(file: &str) -> &'static [Vec<Launch>] {
    static CNN: OnceLock<Vec<Vec<Launch>>> = OnceLock::new();
    static GPT: OnceLock<Vec<Vec<Launch>>> = OnceLock::new();
    match file {
        "pytorch_cnn.slr" => CNN.get_or_init(|| cut(file, 0.8, 1_572_864, 1, (8, 38))),
        "pytorch_gpt.slr" => GPT.get_or_init(|| cut(file, 0.6, 32_768, 2, (10, 22))),
        other => panic!("no steps are known of {other}"),
    }
}
