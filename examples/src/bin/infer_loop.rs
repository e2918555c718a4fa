//! Answers bursts of requests with a small network and measures how long they take.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::bail;
use clap::Parser;
use examples::checkpoint::Checkpoint;
use examples::digits::{CLASSES, PIXELS};
use examples::gpu::Arg::U64;
use examples::gpu::{Buffer, Gpu, Shape};
use examples::mlp::Mlp;
use examples::rng::Rng;
use examples::train::BUSY;
use examples::{app, digits, mlp, size};

/// Classifies held-out digits in bursts of requests at a fixed rate. A request's latency counts
/// from when it was due, so a late device makes all that wait behind it late.
///
/// Exit codes: 0 done, 1 failed, 2 out of device memory, 64 wrong arguments.
#[derive(Parser)]
#[command(name = "infer_loop", version)]
struct Args {
    /// Bursts per second
    #[arg(long, default_value_t = 20.0, value_parser = rate)]
    rate: f64,
    /// Requests in a burst, all due at once
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    burst: u32,
    /// How long to go on
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    seconds: u64,
    /// Images per request
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=4096))]
    batch: u32,
    /// Units of the hidden layer, unless a checkpoint says
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=65536))]
    hidden: u32,
    /// Seed of the weights, unless a checkpoint has them
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Checkpoint of train_mlp to take the network from
    #[arg(long, value_name = "FILE")]
    checkpoint: Option<PathBuf>,
    /// Device time to add to every request, in microseconds, standing for a larger model
    #[arg(long, value_name = "US", default_value_t = 0, value_parser = clap::value_parser!(u64).range(..=1_000_000))]
    extra_us: u64,
    /// Device memory to allocate and leave alone, for example 2GiB
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    ballast: Option<u64>,
    /// Name of the job in all lines
    #[arg(long, default_value = "infer_loop")]
    name: String,
    /// CUDA device
    #[arg(long, default_value_t = 0)]
    device: usize,
    /// Print one JSON object as the last line
    #[arg(long)]
    json: bool,
}

fn rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if (0.001..=1e6).contains(&rate) => Ok(rate),
        _ => Err("bursts per second, from 0.001 to 1000000".to_owned()),
    }
}

fn main() -> ExitCode {
    app::main("infer_loop", run)
}

fn run(args: Args) -> anyhow::Result<()> {
    let (hidden, weights) = weights(&args)?;
    let (_, images) = digits::load()?;
    let mut kernels = mlp::KERNELS.to_vec();
    kernels.push(BUSY);
    let gpu = Gpu::open(args.device, &kernels)?;
    let ballast = args.ballast.filter(|bytes| *bytes > 0);
    let _ballast: Option<Buffer<u8>> = ballast
        .map(|bytes| gpu.alloc("the ballast", bytes))
        .transpose()?;
    let network = Mlp::new(&gpu, hidden, args.batch, &weights)?;
    let input = gpu.alloc(
        "the request's images",
        u64::from(args.batch) * u64::from(PIXELS),
    )?;
    gpu.wait()?;

    let rows: Vec<&[f32]> = images.pixels.chunks_exact(PIXELS as usize).collect();
    let mut next = (0..rows.len()).cycle();
    let mut latencies_ms = Vec::new();
    let (mut asked, mut right) = (0u64, 0u64);
    let started = Instant::now();
    let interval = Duration::from_secs_f64(1.0 / args.rate);
    let mut second = 1;
    let mut due = Duration::ZERO;
    while due < Duration::from_secs(args.seconds) {
        if let Some(early) = due.checked_sub(started.elapsed()) {
            std::thread::sleep(early);
        }
        for _ in 0..args.burst {
            // PANIC: `next` counts the rows, of which there are some.
            let which: Vec<usize> = next.by_ref().take(args.batch as usize).collect();
            let request: Vec<f32> = which.iter().flat_map(|at| rows[*at]).copied().collect();
            input.write(&request)?;
            network.forward(&input, args.batch)?;
            if args.extra_us > 0 {
                gpu.launch(BUSY, Shape::THREAD, &[U64(args.extra_us)])?;
            }
            let logits = network.logits(args.batch)?;
            latencies_ms.push((started.elapsed().saturating_sub(due)).as_secs_f64() * 1e3);
            for (logits, at) in logits.chunks_exact(CLASSES as usize).zip(which) {
                asked += 1;
                right += u64::from(first_largest(logits) == images.labels[at]);
            }
        }
        if started.elapsed() >= Duration::from_secs(second) {
            println!("{} {second} s: {} requests", args.name, latencies_ms.len());
            second = started.elapsed().as_secs() + 1;
        }
        due += interval;
    }
    let elapsed = started.elapsed().as_secs_f64();
    latencies_ms.sort_by(f64::total_cmp);
    let [p50, p90, p99, max] =
        [0.5, 0.9, 0.99, 1.0].map(|part| app::percentile(&latencies_ms, part));
    // CAST: far below 2^53 images.
    let accuracy = right as f64 / asked as f64;
    println!(
        "{} done on {}: {} requests in {elapsed:.2} s, latency in ms: median {p50:.3}, 90 % {p90:.3}, 99 % {p99:.3}, largest {max:.3}; accuracy {accuracy:.4}",
        args.name,
        gpu.name(),
        latencies_ms.len(),
    );
    if args.json {
        let report = serde_json::json!({
            "job": args.name,
            "device": gpu.name(),
            "requests": latencies_ms.len(),
            "seconds": elapsed,
            "requests_per_s": latencies_ms.len() as f64 / elapsed, // CAST: as above.
            "latency_ms": { "p50": p50, "p90": p90, "p99": p99, "max": max },
            "accuracy": accuracy,
            "mem_bytes": gpu.allocated_bytes(),
        });
        println!("{report}");
    }
    Ok(())
}

/// The network's size and weights: from the checkpoint, or random ones.
fn weights(args: &Args) -> anyhow::Result<(u32, Vec<f32>)> {
    let Some(path) = &args.checkpoint else {
        return Ok((
            args.hidden,
            mlp::initial_weights(args.hidden, &mut Rng::new(args.seed)),
        ));
    };
    let Some(checkpoint) = Checkpoint::read(path)? else {
        bail!(
            "there is no checkpoint at {}: train_mlp --checkpoint writes one",
            path.display()
        );
    };
    let hidden = checkpoint.config.hidden;
    if checkpoint.weights.len() as u64 != mlp::weight_count(hidden) {
        bail!(
            "the checkpoint {} does not have the weights of {hidden} hidden units",
            path.display()
        );
    }
    Ok((hidden, checkpoint.weights))
}

/// The index of the first largest number.
fn first_largest(numbers: &[f32]) -> u32 {
    let mut best = (0u32, f32::NEG_INFINITY);
    for (at, number) in (0u32..).zip(numbers) {
        if *number > best.1 {
            best = (at, *number);
        }
    }
    best.0
}
