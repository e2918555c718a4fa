//! A job that allocates, frees, computes on several streams and replays graphs without end, and
//! checks every byte that it owns: what a soak test of moving memory needs of a tenant.

use std::io::{BufRead, Write};
use std::process::ExitCode;
use std::rc::Rc;
use std::sync::mpsc::{Receiver, TryRecvError, channel};

use anyhow::{Context, bail};
use clap::Parser;
use cudarc::driver::{result, sys};
use examples::gpu::Arg::{F32, U64};
use examples::gpu::{Arg, Buffer, Gpu, Shape};
use examples::rng::Rng;
use examples::{app, size};
use serde_json::json;

const ADD: &str = "sublet_axpy_f32";
const FILL: &str = "sublet_fill_f32";
const HASH: &str = "sublet_hash_chunks";
/// Elements of the buffers that graphs work on.
const COUNTERS: u64 = 1 << 14;
const STREAMS: usize = 3;

/// Allocates and frees blocks of random sizes with random content, adds on several streams and by a
/// replayed graph to counters whose values it knows, and compares all of it with what it must be.
///
/// Goes on until standard input says `quit` or ends; `rest` makes it free everything but its
/// counters and say so, `go` lets it go on.
///
/// Exit codes: 0 done, 1 failed or a byte was wrong, 2 out of device memory, 64 wrong arguments.
#[derive(Parser)]
#[command(name = "churn", version)]
struct Args {
    /// Most device memory that its blocks take, for example 64MiB
    #[arg(long, value_name = "SIZE", value_parser = size::parse, default_value = "64MiB")]
    bytes: u64,
    /// Seed of sizes and contents
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Name of the job in messages
    #[arg(long, default_value = "churn")]
    name: String,
    /// CUDA device
    #[arg(long, default_value_t = 0)]
    device: usize,
}

fn main() -> ExitCode {
    app::main("churn", run)
}

fn say(line: &serde_json::Value) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")
        .and_then(|()| out.flush())
        .context("standard output is closed")
}

/// A block, its words' seed, and how many of its words were written.
struct Block {
    memory: Buffer<u64>,
    seed: u64,
    words: usize,
}

impl Block {
    fn content(&self) -> Vec<u64> {
        let mut rng = Rng::new(self.seed);
        (0..self.words).map(|_| rng.bits()).collect()
    }
}

/// Counters that a stream, or a graph, adds one to.
struct CountedStream {
    stream: sys::CUstream,
    counters: Buffer<f32>,
    ones: Buffer<f32>,
    /// Captured once; its addresses are baked into it.
    graph: sys::CUgraphExec,
    expected: f32,
}

impl CountedStream {
    fn open(gpu: &Rc<Gpu>) -> anyhow::Result<CountedStream> {
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking)?;
        let counters = gpu.alloc("counters", COUNTERS)?;
        let ones = gpu.alloc("ones", COUNTERS)?;
        for (buffer, value) in [(&counters, 0.0), (&ones, 1.0)] {
            let args = [buffer.arg(), F32(value), U64(COUNTERS)];
            gpu.launch(FILL, Shape::elements(COUNTERS), &args)?;
        }
        gpu.wait()?;
        let graph = capture(gpu, stream, &add(&counters, &ones))?;
        Ok(CountedStream {
            stream,
            counters,
            ones,
            graph,
            expected: 0.0,
        })
    }

    /// Captures the graph anew: a job cannot be moved meanwhile.
    fn recapture(&mut self, gpu: &Rc<Gpu>) -> anyhow::Result<()> {
        let graph = capture(gpu, self.stream, &add(&self.counters, &self.ones))?;
        // SAFETY: the old one is destroyed once; the driver lets what is queued of it finish.
        unsafe { result::graph::exec_destroy(std::mem::replace(&mut self.graph, graph))? };
        Ok(())
    }

    fn work(&mut self, gpu: &Rc<Gpu>, rng: &mut Rng) -> anyhow::Result<()> {
        if self.expected > 1e6 {
            let args = [self.counters.arg(), F32(0.0), U64(COUNTERS)];
            gpu.launch_into(self.stream, FILL, Shape::elements(COUNTERS), &args)?;
            self.expected = 0.0;
        }
        for _ in 0..=rng.below(4) {
            if rng.below(2) == 0 {
                // SAFETY: graph and stream are this one's.
                unsafe { result::graph::launch(self.graph, self.stream)? };
                self.expected += 2.0;
            } else {
                let args = add(&self.counters, &self.ones);
                gpu.launch_into(self.stream, ADD, Shape::elements(COUNTERS), &args)?;
                self.expected += 1.0;
            }
        }
        Ok(())
    }

    /// How many counters are wrong.
    fn wrong(&self) -> anyhow::Result<usize> {
        // SAFETY: the stream is this one's.
        unsafe { result::stream::synchronize(self.stream)? };
        let found = self.counters.read(COUNTERS as usize)?; // CAST: a small constant.
        Ok(found
            .iter()
            .filter(|value| value.to_bits() != self.expected.to_bits())
            .count())
    }
}

/// Two additions as a graph.
fn capture(
    gpu: &Rc<Gpu>,
    stream: sys::CUstream,
    args: &[Arg; 4],
) -> anyhow::Result<sys::CUgraphExec> {
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    // SAFETY: the caller's stream lives; the captured launches name buffers that live as long as
    // these counters, and graph and executable are destroyed once.
    unsafe {
        result::stream::begin_capture(stream, mode)?;
        for _ in 0..2 {
            gpu.launch_into(stream, ADD, Shape::elements(COUNTERS), args)?;
        }
        let captured = result::stream::end_capture(stream)?;
        let mut exec = std::ptr::null_mut();
        sys::cuGraphInstantiateWithFlags(&raw mut exec, captured, 0).result()?;
        result::graph::destroy(captured)?;
        Ok(exec)
    }
}

fn add(counters: &Buffer<f32>, ones: &Buffer<f32>) -> [Arg; 4] {
    [counters.arg(), ones.arg(), F32(1.0), U64(COUNTERS)]
}

struct Churn {
    gpu: Rc<Gpu>,
    rng: Rng,
    blocks: Vec<Block>,
    streams: Vec<CountedStream>,
    /// Address and length of one block, and its hash.
    list: Buffer<u64>,
    hash: Buffer<u64>,
    limit: u64,
    rounds: u64,
    checked_bytes: u64,
}

impl Churn {
    fn held(&self) -> u64 {
        self.blocks.iter().map(|block| block.memory.bytes()).sum()
    }

    fn round(&mut self) -> anyhow::Result<()> {
        self.rounds += 1;
        for stream in &mut self.streams {
            stream.work(&self.gpu, &mut self.rng)?;
            if self.rng.below(400) == 0 {
                stream.recapture(&self.gpu)?;
            }
        }
        match self.rng.below(4) {
            0 | 1 => self.allocate()?,
            2 if !self.blocks.is_empty() => {
                let at = self.pick();
                let block = self.blocks.swap_remove(at);
                self.compare(&block, true)?;
            }
            _ if !self.blocks.is_empty() => {
                let at = self.pick();
                let block = self.blocks.swap_remove(at);
                self.compare(&block, false)?;
                self.blocks.push(block);
            }
            _ => {}
        }
        if self.rounds.is_multiple_of(16) {
            for (at, stream) in self.streams.iter().enumerate() {
                let wrong = stream.wrong()?;
                self.checked_bytes += COUNTERS * 4;
                if wrong > 0 {
                    bail!(
                        "{wrong} of {COUNTERS} counters of stream {at} are not {} in round {}",
                        stream.expected,
                        self.rounds
                    );
                }
            }
        }
        Ok(())
    }

    fn pick(&mut self) -> usize {
        self.rng.below(self.blocks.len() as u32) as usize // CAST: few blocks.
    }

    fn allocate(&mut self) -> anyhow::Result<()> {
        // From a few hundred bytes to several mebibytes, small ones more often.
        let bits = 9 + self.rng.below(14);
        let bytes = (1 << bits) + 8 * u64::from(self.rng.below(1 << (bits - 3)));
        if self.held() + bytes > self.limit {
            return Ok(());
        }
        let memory = self.gpu.alloc("a block", bytes / 8)?;
        let words = (bytes / 8).min(32 << 10) as usize; // CAST: at most 32 Ki.
        let block = Block {
            memory,
            seed: self.rng.bits(),
            words,
        };
        block.memory.write(&block.content())?;
        self.blocks.push(block);
        Ok(())
    }

    /// Compares what was written of a block, byte by byte or by the device's hash of it against a
    /// fresh copy's.
    fn compare(&mut self, block: &Block, by_bytes: bool) -> anyhow::Result<()> {
        self.checked_bytes += 8 * block.words as u64; // CAST: a length fits.
        let right = if by_bytes {
            block.memory.read(block.words)? == block.content()
        } else {
            let copy = self.gpu.upload("a copy", &block.content())?;
            self.hash_of(block.memory.address(), block.words)?
                == self.hash_of(copy.address(), block.words)?
        };
        if !right {
            bail!(
                "a block of {} bytes at {:#x} does not hold what was written to it, in round {}",
                block.memory.bytes(),
                block.memory.address(),
                self.rounds
            );
        }
        Ok(())
    }

    fn hash_of(&self, address: u64, words: usize) -> anyhow::Result<Vec<u64>> {
        self.list.write(&[address, 8 * words as u64])?; // CAST: a length fits.
        let args = [self.hash.arg(), self.list.arg(), U64(1)];
        self.gpu.launch(HASH, Shape::BLOCK, &args)?;
        Ok(self.hash.read(2)?)
    }

    fn rest(&mut self) -> anyhow::Result<()> {
        for block in std::mem::take(&mut self.blocks) {
            self.compare(&block, true)?;
        }
        for stream in &self.streams {
            if stream.wrong()? > 0 {
                bail!("counters are wrong at rest");
            }
        }
        self.gpu.wait()?;
        Ok(())
    }
}

fn run(args: Args) -> anyhow::Result<()> {
    let gpu = Gpu::open(args.device, &[ADD, FILL, HASH])?;
    let mut churn = Churn {
        rng: Rng::new(args.seed),
        blocks: Vec::new(),
        streams: (0..STREAMS)
            .map(|_| CountedStream::open(&gpu))
            .collect::<Result<_, _>>()?,
        list: gpu.alloc("the list", 2)?,
        hash: gpu.alloc("the hash", 2)?,
        limit: args.bytes,
        rounds: 0,
        checked_bytes: 0,
        gpu,
    };
    let commands = listen();
    say(
        &json!({"ready": true, "job": args.name, "pid": std::process::id(), "device": churn.gpu.name()}),
    )?;
    loop {
        match commands.try_recv() {
            Ok(line) => match line.trim() {
                "quit" => break,
                "rest" => {
                    churn.rest()?;
                    say(
                        &json!({"rest": true, "rounds": churn.rounds, "checked_bytes": churn.checked_bytes}),
                    )?;
                    // A closed input ends the job as `quit` does.
                    if commands.recv().map_or(true, |line| line.trim() == "quit") {
                        break;
                    }
                }
                other => bail!("`{other}` is no command: rest, go or quit"),
            },
            Err(TryRecvError::Disconnected) => break,
            Err(TryRecvError::Empty) => churn.round()?,
        }
    }
    churn.rest()?;
    say(&json!({"done": true, "rounds": churn.rounds, "checked_bytes": churn.checked_bytes}))
}

/// Lines of standard input, as they come.
fn listen() -> Receiver<String> {
    let (to, from) = channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            if to.send(line).is_err() {
                break;
            }
        }
    });
    from
}
