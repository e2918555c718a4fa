//! Keeps the device busy with kernels of a known length.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use examples::bounded_stream::BoundedStream;
use examples::gpu::Arg::U64;
use examples::gpu::{Buffer, Gpu, Shape};
use examples::train::BUSY;
use examples::{app, size};

/// Launches in flight per stream.
const DEPTH: usize = 4;

/// Keeps the device busy with kernels of a known length, and counts them: two of these side by side
/// show how time is shared.
///
/// Exit codes: 0 done, 1 failed, 2 out of device memory, 64 wrong arguments.
#[derive(Parser)]
#[command(name = "spin", version)]
struct Args {
    /// Length of a kernel in microseconds
    #[arg(long, default_value_t = 500, value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    kernel_us: u64,
    /// How long to go on
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    seconds: u64,
    /// Streams, each with a few kernels queued
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=64))]
    streams: u64,
    /// Device memory to allocate and leave alone, for example 2GiB
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    mem: Option<u64>,
    /// Name of the job in all lines
    #[arg(long, default_value = "spin")]
    name: String,
    /// CUDA device
    #[arg(long, default_value_t = 0)]
    device: usize,
    /// Print one JSON object as the last line
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    app::main("spin", run)
}

fn run(args: Args) -> anyhow::Result<()> {
    let gpu = Gpu::open(args.device, &[BUSY])?;
    let _memory: Option<Buffer<u8>> = args
        .mem
        .filter(|bytes| *bytes > 0)
        .map(|bytes| gpu.alloc("--mem", bytes))
        .transpose()?;
    let mut streams = (0..args.streams)
        .map(|_| BoundedStream::open(&gpu, DEPTH))
        .collect::<Result<Vec<_>, _>>()?;
    let started = Instant::now();
    let mut second = 1;
    let mut reported = 0;
    while started.elapsed() < Duration::from_secs(args.seconds) {
        for stream in &mut streams {
            stream.launch(BUSY, Shape::THREAD, &[U64(args.kernel_us)])?;
        }
        if started.elapsed() >= Duration::from_secs(second) {
            let launched = streams.iter().map(BoundedStream::launches).sum::<u64>();
            println!(
                "{} {second} s: {} kernels in the last second, {launched} in all",
                args.name,
                launched - reported
            );
            reported = launched;
            second = started.elapsed().as_secs() + 1;
        }
    }
    for stream in &streams {
        stream.wait()?;
    }
    let elapsed = started.elapsed().as_secs_f64();
    let kernels = streams.iter().map(BoundedStream::launches).sum::<u64>();
    // CAST: far below 2^53 microseconds. With several streams kernels may overlap, and the part
    // exceed 1.
    let device_part = (kernels * args.kernel_us) as f64 / 1e6 / elapsed;
    println!(
        "{} done on {}: {kernels} kernels of {} us in {elapsed:.2} s, {:.1} % of one stream's time",
        args.name,
        gpu.name(),
        args.kernel_us,
        100.0 * device_part
    );
    if args.json {
        let report = serde_json::json!({
            "job": args.name,
            "device": gpu.name(),
            "kernels": kernels,
            "kernel_us": args.kernel_us,
            "streams": args.streams,
            "seconds": elapsed,
            "kernels_per_s": kernels as f64 / elapsed, // CAST: as above.
            "device_part": device_part,
            "mem_bytes": gpu.allocated_bytes(),
        });
        println!("{report}");
    }
    Ok(())
}
