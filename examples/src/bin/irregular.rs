//! Submits work without iterations: what a detector of iterations has to leave alone.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use examples::app;
use examples::gpu::Arg::{F32, U64};
use examples::gpu::{Gpu, Shape};
use examples::rng::Rng;
use examples::train::BUSY;

/// Submits work without iterations, for a while. The same seed gives the same sequence.
///
/// Exit codes: 0 done, 1 failed, 2 out of device memory, 64 wrong arguments.
#[derive(Parser)]
#[command(name = "irregular", version)]
struct Args {
    /// What to submit
    #[arg(long, value_enum, default_value_t = Pattern::Random)]
    pattern: Pattern,
    /// How long to go on
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    seconds: u64,
    /// Launches from one wait for the device to the next, at most
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    burst: u32,
    /// Seed of the sequence
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Name of the job in all lines
    #[arg(long, default_value = "irregular")]
    name: String,
    /// CUDA device
    #[arg(long, default_value_t = 0)]
    device: usize,
    /// Print one JSON object as the last line
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Pattern {
    /// Any kernel after any other.
    Random,
    /// Requests with a prompt of a few kernels and an answer of random length, between them pauses
    /// and other work.
    Requests,
}

/// What is launched: each works on one buffer in place and costs next to nothing.
const KERNELS: [&str; 4] = ["sublet_fill_f32", "sublet_axpy_f32", "sublet_sgd_f32", BUSY];

fn main() -> ExitCode {
    app::main("irregular", run)
}

fn run(args: Args) -> anyhow::Result<()> {
    let gpu = Gpu::open(args.device, &KERNELS)?;
    let [x, y] = [
        gpu.alloc::<f32>("x", ELEMENTS)?,
        gpu.alloc::<f32>("y", ELEMENTS)?,
    ];
    let mut rng = Rng::new(args.seed);
    let mut launches = 0u64;
    let started = Instant::now();
    let mut launch = |kernel: u32, blocks: u64| -> anyhow::Result<()> {
        let shape = Shape::elements(blocks * 256);
        let (n, a) = (U64(ELEMENTS), F32(0.5));
        let name = KERNELS[kernel as usize % KERNELS.len()]; // PANIC: the modulus is the length.
        match name {
            "sublet_fill_f32" => gpu.launch(name, shape, &[x.arg(), a, n])?,
            BUSY => gpu.launch(name, Shape::THREAD, &[U64(10 * blocks)])?,
            "sublet_axpy_f32" => gpu.launch(name, shape, &[x.arg(), y.arg(), a, n])?,
            _ => {
                let args = [x.arg(), y.arg(), y.arg(), F32(0.1), F32(0.9), F32(0.0), n];
                gpu.launch(name, shape, &args)?;
            }
        }
        launches += 1;
        Ok(())
    };
    let mut below = |bound: u32| rng.below(bound);
    while started.elapsed() < Duration::from_secs(args.seconds) {
        match args.pattern {
            Pattern::Random => {
                for _ in 0..=below(args.burst) {
                    launch(below(4), 1 + u64::from(below(3)))?;
                }
            }
            Pattern::Requests => {
                for kernel in [0, 1, 2, 1, 3] {
                    launch(kernel, 4)?;
                }
                for _ in 0..2 + below(args.burst) {
                    for kernel in [2, 3, 1] {
                        launch(kernel, 1)?;
                    }
                }
                for _ in 0..below(args.burst) {
                    launch(below(2), 2)?;
                }
            }
        }
        gpu.wait()?;
        std::thread::sleep(Duration::from_micros(u64::from(below(3000))));
    }
    let seconds = started.elapsed().as_secs_f64();
    println!(
        "{} done on {}: {launches} launches in {seconds:.2} s",
        args.name,
        gpu.name()
    );
    if args.json {
        let report = serde_json::json!({
            "job": args.name,
            "device": gpu.name(),
            "launches": launches,
            "seconds": seconds,
        });
        println!("{report}");
    }
    Ok(())
}

/// Elements of each buffer.
const ELEMENTS: u64 = 4096;
