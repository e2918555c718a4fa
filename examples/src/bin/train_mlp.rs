//! Trains a small network on the handwritten digits and prints how it goes.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, bail};
use clap::Parser;
use examples::checkpoint::{Checkpoint, Config};
use examples::gpu::{Buffer, Gpu};
use examples::resize::Resizing;
use examples::train::{BUSY, Score, Trainer};
use examples::{app, digits, mlp, size};
use serde::Serialize;

/// Trains a network with one hidden layer on the UCI handwritten digits, all of it on the device.
/// The same arguments give the same losses to the bit.
///
/// Exit codes: 0 done, 1 failed, 2 out of device memory, 64 wrong arguments.
#[derive(Parser)]
#[command(name = "train_mlp", version)]
struct Args {
    /// Passes over the training images
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..))]
    epochs: u64,
    /// Steps in all, instead of whole epochs; a resumed run counts the steps before it
    #[arg(long, conflicts_with = "epochs", value_parser = clap::value_parser!(u64).range(1..))]
    steps: Option<u64>,
    /// Images per step
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=4096))]
    batch: u32,
    /// Units of the hidden layer
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=65536))]
    hidden: u32,
    /// Adam's step size
    #[arg(long, default_value_t = 0.002, value_parser = learning_rate)]
    lr: f32,
    /// Seed of the first weights and of the order of images; the held-out images do not depend on
    /// it
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// File to keep the state of the run in, replaced as a whole
    #[arg(long, value_name = "FILE")]
    checkpoint: Option<PathBuf>,
    /// Go on from the checkpoint; without one there, start anew
    #[arg(long, requires = "checkpoint")]
    resume: bool,
    /// Steps from one checkpoint to the next; without it, at the end of every epoch
    #[arg(long, value_name = "STEPS", requires = "checkpoint", value_parser = clap::value_parser!(u64).range(1..))]
    checkpoint_every: Option<u64>,
    /// Device memory to allocate and leave alone, for example 2GiB
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    ballast: Option<u64>,
    /// Device memory that takes part in the training, for example 2GiB: a history of gradients, of
    /// which every step reads a part and writes it anew; the losses are those of another run than
    /// without it
    #[arg(long, value_name = "SIZE", value_parser = size::parse, conflicts_with = "checkpoint")]
    history: Option<u64>,
    /// Device time to add to every step, in microseconds, standing for a larger model
    #[arg(long, value_name = "US", default_value_t = 0, value_parser = clap::value_parser!(u64).range(..=1_000_000))]
    extra_us: u64,
    /// Repeat the whole run from its start until this much time has passed; every repetition must
    /// end with the same loss
    #[arg(long, value_name = "SECONDS", value_parser = seconds, conflicts_with = "checkpoint")]
    min_seconds: Option<f64>,
    /// Epochs from one progress line to the next; 0 for none
    #[arg(long, value_name = "EPOCHS", default_value_t = 1)]
    progress_every: u64,
    /// Name of the job in all lines
    #[arg(long, default_value = "train_mlp")]
    name: String,
    /// CUDA device
    #[arg(long, default_value_t = 0)]
    device: usize,
    /// Print one JSON object as the last line
    #[arg(long)]
    json: bool,
}

fn learning_rate(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(lr) if lr > 0.0 && lr <= 10.0 => Ok(lr),
        _ => Err("a number above 0, at most 10".to_owned()),
    }
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.0..=1e6).contains(&seconds) => Ok(seconds),
        _ => Err("seconds, from 0 to 1000000".to_owned()),
    }
}

/// What `--json` prints. Steps, epochs and seconds are those of this process, all repetitions
/// together.
#[derive(Serialize)]
struct Report<'a> {
    job: &'a str,
    device: String,
    steps: u64,
    epochs: u64,
    runs: u64,
    seconds: f64,
    steps_per_s: f64,
    /// Mean cross-entropy over the held-out images at the end.
    loss: f32,
    /// The same, its 32 bits in hexadecimal.
    loss_bits: String,
    accuracy: f64,
    mem_bytes: u64,
}

fn main() -> ExitCode {
    app::main("train_mlp", run)
}

fn run(args: Args) -> anyhow::Result<()> {
    let images = digits::load()?;
    let mut kernels = mlp::KERNELS.to_vec();
    kernels.push(BUSY);
    let history = args.history.filter(|bytes| *bytes > 0);
    if history.is_some() {
        kernels.push(mlp::ADD);
    }
    let gpu = Gpu::open(args.device, &kernels)?;
    let ballast = args.ballast.filter(|bytes| *bytes > 0);
    let _ballast: Option<Buffer<u8>> = ballast
        .map(|bytes| gpu.alloc("the ballast", bytes))
        .transpose()?;

    let config = Config {
        hidden: args.hidden,
        batch: args.batch,
        lr: args.lr,
        seed: args.seed,
    };
    let started = Instant::now();
    let mut runs = 0;
    let (mut steps_before, mut epochs_before) = (0, 0);
    let mut first_score: Option<Score> = None;
    loop {
        let mut trainer = Trainer::new(&gpu, config, &images, args.extra_us)?;
        if let Some(bytes) = history {
            trainer.keep_history(bytes)?;
        }
        if args.resume {
            resume(&args, &mut trainer)?;
        }
        let (from, from_epoch) = (trainer.steps(), trainer.epochs());
        let out_of_time = || {
            runs > 0
                && args
                    .min_seconds
                    .is_some_and(|seconds| started.elapsed().as_secs_f64() >= seconds)
        };
        let finished = train(&args, &mut trainer, started, steps_before, out_of_time)?;
        if finished {
            let score = trainer.evaluate()?;
            if !score.loss.is_finite() {
                bail!("the loss is {}: use a smaller --lr", score.loss);
            }
            let first = *first_score.get_or_insert(score);
            if first.loss.to_bits() != score.loss.to_bits() {
                bail!(
                    "repetition {} ended with loss {} instead of {}: the device computes wrongly",
                    runs + 1,
                    score.loss,
                    first.loss
                );
            }
            runs += 1;
        }
        steps_before += trainer.steps() - from;
        epochs_before += trainer.epochs() - from_epoch;
        gpu.wait()?;
        let elapsed = started.elapsed().as_secs_f64();
        let enough = args.min_seconds.is_none_or(|seconds| elapsed >= seconds);
        // Without a score there is nothing to report; the first repetition always ends with one.
        if let (Some(score), true) = (first_score, enough) {
            let report = Report {
                job: &args.name,
                device: gpu.name(),
                steps: steps_before,
                epochs: epochs_before,
                runs,
                seconds: elapsed,
                steps_per_s: steps_before as f64 / elapsed, // CAST: far below 2^53 steps.
                loss: score.loss,
                loss_bits: format!("{:08x}", score.loss.to_bits()),
                accuracy: score.accuracy,
                mem_bytes: gpu.allocated_bytes(),
            };
            return print(&args, &report);
        }
    }
}

/// Loads the checkpoint into `trainer` if there is one.
fn resume(args: &Args, trainer: &mut Trainer) -> anyhow::Result<()> {
    let Some(path) = &args.checkpoint else {
        return Ok(());
    };
    let Some(checkpoint) = Checkpoint::read(path)? else {
        println!(
            "{}: no checkpoint at {}, starting anew",
            args.name,
            path.display()
        );
        return Ok(());
    };
    if let Err(why) = trainer.accepts(&checkpoint) {
        bail!("cannot resume from {}: {why}", path.display());
    }
    trainer.restore(&checkpoint)?;
    println!(
        "{}: resumed from {} at step {}",
        args.name,
        path.display(),
        trainer.steps()
    );
    Ok(())
}

/// Trains to the end, or until `stop` says so; returns whether the end was reached.
fn train(
    args: &Args,
    trainer: &mut Trainer,
    started: Instant,
    steps_before: u64,
    stop: impl Fn() -> bool,
) -> anyhow::Result<bool> {
    let from = trainer.steps();
    let done = |trainer: &Trainer| match args.steps {
        Some(steps) => trainer.steps() >= steps,
        None => trainer.epochs() >= args.epochs,
    };
    let resizing = Resizing::find();
    while !done(trainer) {
        if stop() {
            return Ok(false);
        }
        let epoch_loss = trainer.advance()?;
        if let Some(path) = &args.checkpoint
            && let Some(gpus) = resizing.requested()
        {
            trainer.checkpoint()?.write(path)?;
            println!(
                "{}: saved at step {}, to go on with {gpus} GPUs",
                args.name,
                trainer.steps()
            );
            resizing.stop_me();
        }
        if let Some(path) = &args.checkpoint {
            let due = match args.checkpoint_every {
                Some(every) => trainer.steps().is_multiple_of(every),
                None => epoch_loss.is_some(),
            };
            if due || done(trainer) {
                trainer.checkpoint()?.write(path)?;
            }
        }
        let Some(epoch_loss) = epoch_loss else {
            continue;
        };
        if args.progress_every > 0 && trainer.epochs().is_multiple_of(args.progress_every) {
            let score = trainer.evaluate()?;
            let steps = steps_before + trainer.steps() - from;
            println!(
                "{} epoch {} step {} loss {epoch_loss:.4} held-out loss {:.4} accuracy {:.4} {:.1} steps/s",
                args.name,
                trainer.epochs(),
                trainer.steps(),
                score.loss,
                score.accuracy,
                steps as f64 / started.elapsed().as_secs_f64(), // CAST: far below 2^53 steps.
            );
        }
    }
    Ok(true)
}

fn print(args: &Args, report: &Report<'_>) -> anyhow::Result<()> {
    println!(
        "{} done on {}: {} steps in {:.2} s ({:.1} steps/s), held-out loss {:.6} (bits {}), accuracy {:.4}, {} of device memory",
        report.job,
        report.device,
        report.steps,
        report.seconds,
        report.steps_per_s,
        report.loss,
        report.loss_bits,
        report.accuracy,
        size::show(report.mem_bytes),
    );
    if args.json {
        println!(
            "{}",
            serde_json::to_string(report).context("the report has no JSON")?
        );
    }
    Ok(())
}
