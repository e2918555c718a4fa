//! A load with a shape: bursts of kernels, pauses between them, and phases in which it wants
//! nothing at all.

use std::process::ExitCode;
use std::rc::Rc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use clap::Parser;
use examples::app;
use examples::bounded_stream::BoundedStream;
use examples::gpu::Arg::U64;
use examples::gpu::{Arg, Buffer, Gpu, Shape};
use examples::train::BUSY;

/// A kernel that does steps instead of looking at the clock.
const STEPS: &str = "sublet_busy_steps";
/// Most launches that are queued at once.
const MAX_DEPTH: u64 = 64;
/// Device time that is queued at most, in microseconds, unless a single kernel is longer.
const QUEUED_US: u64 = 2000;

/// Runs bursts of kernels of a known length with pauses between them, and measures how they got on:
/// what a benchmark of sharing needs of a tenant.
///
/// Times of phases are CLOCK_MONOTONIC in nanoseconds, so that they can be laid beside other
/// accounts of the same host.
///
/// Exit codes: 0 done, 1 failed, 2 out of device memory, 64 wrong arguments.
#[derive(Parser)]
#[command(name = "load", version)]
struct Args {
    /// Length of a kernel in microseconds
    #[arg(long, default_value_t = 500, value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    kernel_us: u64,
    /// Kernels do a fixed number of steps, so many for each microsecond of their length, instead of
    /// looking at the clock: they get on only while they run. --calibrate says how many
    #[arg(long, value_name = "NUMBER")]
    steps_per_us: Option<f64>,
    /// Measure how many steps the device does in a microsecond, print that as JSON, and end; for a
    /// device that nobody else uses
    #[arg(long, conflicts_with = "steps_per_us")]
    calibrate: bool,
    /// Kernels in a burst; the program waits for the burst's end
    #[arg(long, default_value_t = 0)]
    burst: u64,
    /// A burst ends with one short kernel of another kind, as a training step does with its
    /// optimiser: then iterations can be found in what is launched
    #[arg(long, requires = "burst")]
    step_kernel: bool,
    /// End after so many bursts; 0: when the time is over
    #[arg(long, default_value_t = 0, requires = "burst")]
    bursts: u64,
    /// Pause on the host after a burst, in microseconds
    #[arg(long, default_value_t = 0, requires = "burst")]
    pause_us: u64,
    /// Pause on the host after each kernel of a burst, in microseconds: a host that does not fill
    /// the device
    #[arg(long, default_value_t = 0, requires = "burst")]
    gap_us: u64,
    /// Bursts start at this interval, in microseconds; one that is late makes those behind it late
    #[arg(
        long,
        default_value_t = 0,
        requires = "burst",
        conflicts_with = "pause_us"
    )]
    every_us: u64,
    /// How long a phase of work lasts, in milliseconds; 0: until the end
    #[arg(long, default_value_t = 0)]
    work_ms: u64,
    /// How long a phase without work lasts, in milliseconds
    #[arg(long, default_value_t = 0, requires = "work_ms")]
    rest_ms: u64,
    /// Wait so long before the first phase, in milliseconds
    #[arg(long, default_value_t = 0)]
    delay_ms: u64,
    /// How long to go on, in milliseconds
    #[arg(long, default_value_t = 5000, value_parser = clap::value_parser!(u64).range(1..=86_400_000))]
    for_ms: u64,
    /// Name of the job in all lines
    #[arg(long, default_value = "load")]
    name: String,
    /// CUDA device
    #[arg(long, default_value_t = 0)]
    device: usize,
    /// Print one JSON object as the last line
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    app::main("load", run)
}

/// What was seen.
#[derive(Default)]
struct Seen {
    bursts: u64,
    latencies_us: Vec<f64>,
    phases_ns: Vec<[u64; 2]>,
    /// The longest stalls, the longest first: how long, and when it was over.
    stalls: Vec<(Duration, u64)>,
}

/// How many stalls are reported.
const STALLS: usize = 32;

impl Seen {
    fn stall(&mut self, length: Duration) {
        let shortest = self
            .stalls
            .get(STALLS - 1)
            .map_or(Duration::ZERO, |last| last.0);
        if length > shortest {
            let at = self.stalls.partition_point(|stall| stall.0 >= length);
            self.stalls.insert(at, (length, monotonic_ns()));
            self.stalls.truncate(STALLS);
        }
    }
}

fn run(args: Args) -> anyhow::Result<()> {
    let gpu = Gpu::open(args.device, &[BUSY, STEPS])?;
    let out = gpu.alloc::<f32>("the result of the steps", 1)?;
    if args.calibrate {
        return calibrate(&gpu, &out);
    }
    // CAST: lengths and rates are far below 2^53; less than a step is none.
    let steps = args
        .steps_per_us
        .map(|rate| (rate * args.kernel_us as f64) as u64);
    let kernel = match steps {
        Some(steps) => Kernel::Steps(out.arg(), steps),
        None => Kernel::Us(args.kernel_us),
    };
    // CAST: at most 64.
    let depth = (QUEUED_US / args.kernel_us).clamp(2, MAX_DEPTH) as usize;
    let mut stream = BoundedStream::open(&gpu, depth)?;
    let mut seen = Seen::default();
    println!("{} ready", args.name);
    sleep(Duration::from_millis(args.delay_ms));
    let begun = Instant::now();
    let end = begun + Duration::from_millis(args.for_ms);
    while Instant::now() < end && goes_on(&args, &seen) {
        let phase_end = match args.work_ms {
            0 => end,
            ms => end.min(Instant::now() + Duration::from_millis(ms)),
        };
        let from_ns = monotonic_ns();
        work(&args, kernel, out.arg(), &mut stream, phase_end, &mut seen)?;
        seen.phases_ns.push([from_ns, monotonic_ns()]);
        if args.rest_ms > 0 {
            let rest = Duration::from_millis(args.rest_ms);
            sleep(rest.min(end.saturating_duration_since(Instant::now())));
        }
    }
    report(&args, &gpu, &stream, begun.elapsed(), seen);
    Ok(())
}

/// The kernel that is launched again and again.
#[derive(Clone, Copy)]
enum Kernel {
    /// Until so many microseconds have passed.
    Us(u64),
    /// So many steps, and the address of their result.
    Steps(Arg, u64),
}

/// Steps per microsecond: of two launches, one of which does twice as much, what the other half
/// takes. The fastest of some tries, for whatever disturbs makes them slower.
fn calibrate(gpu: &Rc<Gpu>, out: &Buffer<f32>) -> anyhow::Result<()> {
    const STEPS_MORE: u64 = 500_000;
    let mut stream = BoundedStream::open(gpu, 1)?;
    let mut took = [f64::INFINITY; 2];
    for _ in 0..20 {
        for (nth, took) in (1..).zip(&mut took) {
            stream.wait()?;
            let begun = Instant::now();
            stream.launch(STEPS, Shape::THREAD, &[out.arg(), U64(nth * STEPS_MORE)])?;
            stream.wait()?;
            *took = took.min(begun.elapsed().as_secs_f64() * 1e6);
        }
    }
    let us = took[1] - took[0];
    anyhow::ensure!(
        us > 0.0,
        "twice as many steps take no longer ({} and {} us): the device is in use",
        took[0],
        took[1]
    );
    // CAST: exact.
    println!(
        "{}",
        serde_json::json!({ "steps_per_us": STEPS_MORE as f64 / us })
    );
    Ok(())
}

/// There are bursts left.
fn goes_on(args: &Args, seen: &Seen) -> bool {
    args.bursts == 0 || seen.bursts < args.bursts
}

/// One phase of work, to its last kernel's end.
fn work(
    args: &Args,
    kernel: Kernel,
    out: Arg,
    stream: &mut BoundedStream,
    end: Instant,
    seen: &mut Seen,
) -> anyhow::Result<()> {
    let launch = |stream: &mut BoundedStream| match kernel {
        Kernel::Us(us) => stream.launch(BUSY, Shape::THREAD, &[U64(us)]),
        Kernel::Steps(out, steps) => stream.launch(STEPS, Shape::THREAD, &[out, U64(steps)]),
    };
    let every = Duration::from_micros(args.every_us);
    let mut due = Instant::now();
    // A launch waits until an earlier one has ended, so the time from one to the next is how long
    // nothing of ours ended.
    let mut last = Instant::now();
    let mut note = |seen: &mut Seen| {
        let now = Instant::now();
        seen.stall(now - last);
        last = now;
        now
    };
    while Instant::now() < end && goes_on(args, seen) {
        if args.burst == 0 {
            launch(stream)?;
            note(seen);
            continue;
        }
        if args.every_us > 0 {
            sleep(due.saturating_duration_since(Instant::now()));
        } else {
            due = Instant::now();
        }
        note(seen);
        for _ in 0..args.burst {
            launch(stream)?;
            if args.gap_us > 0 {
                sleep(Duration::from_micros(args.gap_us));
            }
        }
        if args.step_kernel {
            stream.launch(STEPS, Shape::THREAD, &[out, U64(1)])?;
        }
        stream.wait()?;
        let now = note(seen);
        seen.bursts += 1;
        seen.latencies_us.push((now - due).as_secs_f64() * 1e6);
        due += every;
        if args.pause_us > 0 {
            sleep(Duration::from_micros(args.pause_us));
            note(seen);
        }
    }
    stream.wait()?;
    Ok(())
}

fn report(args: &Args, gpu: &Gpu, stream: &BoundedStream, elapsed: Duration, mut seen: Seen) {
    let seconds = elapsed.as_secs_f64();
    seen.latencies_us.sort_by(f64::total_cmp);
    let part = |part| match seen.latencies_us.is_empty() {
        true => 0.0,
        false => app::percentile(&seen.latencies_us, part),
    };
    let us = |length: Duration| length.as_secs_f64() * 1e6;
    let stall_us = seen.stalls.first().map_or(0.0, |stall| us(stall.0));
    let stalls: Vec<_> = seen
        .stalls
        .iter()
        .map(|stall| (us(stall.0), stall.1))
        .collect();
    println!(
        "{} done on {}: {} kernels and {} bursts in {seconds:.2} s, longest stall {stall_us:.0} us",
        args.name,
        gpu.name(),
        stream.launches(),
        seen.bursts,
    );
    if args.json {
        let report = serde_json::json!({
            "job": args.name,
            "device": gpu.name(),
            "seconds": seconds,
            "kernels": stream.launches(),
            "bursts": seen.bursts,
            "bursts_per_s": seen.bursts as f64 / seconds, // CAST: far below 2^53.
            "latency_us": { "p50": part(0.5), "p90": part(0.9), "p99": part(0.99), "max": part(1.0) },
            "longest_stall_us": stall_us,
            "stalls_us_until_mono_ns": stalls,
            "phases_mono_ns": seen.phases_ns,
            "ended_mono_ns": monotonic_ns(),
        });
        println!("{report}");
    }
}

/// `CLOCK_MONOTONIC` in nanoseconds.
fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    // CAST: time since boot is positive and far below 2^63.
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}
