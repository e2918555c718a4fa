//! A job of a known size and content that follows commands: what a benchmark of moving memory needs
//! of a tenant.

use std::io::{BufRead, Write};
use std::process::ExitCode;
use std::rc::Rc;
use std::time::Instant;

use anyhow::{Context, bail};
use clap::Parser;
use examples::gpu::Gpu;
use examples::pipeline::Pipeline;
use examples::stripes::{Layout, Stripes};
use examples::{app, link, size, stripes};
use serde_json::json;

/// Holds device memory of a known content and obeys commands on standard input, a line each; it
/// answers each with one line of JSON: `pass` runs a kernel over each of its allocations, in their
/// order, and tells when the first one was done; `launch` runs a kernel over its memory and waits
/// for it, `change FROM TO` writes that part of it anew, `check` compares all of it with what was
/// written, `quit` ends it.
///
/// Times are CLOCK_MONOTONIC in nanoseconds.
///
/// Exit codes: 0 done, 1 failed, 2 out of device memory, 64 wrong arguments.
#[derive(Parser)]
#[command(name = "tenant", version)]
struct Args {
    /// Device memory, for example 5GiB
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    bytes: u64,
    /// Bytes of each allocation
    #[arg(long, value_name = "SIZE", value_parser = size::parse, default_value = "1GiB")]
    block: u64,
    /// Bytes from one written stripe to the next; what lies between is allocated, moved, and never
    /// written
    #[arg(long, value_name = "SIZE", value_parser = size::parse, default_value = "64MiB")]
    span: u64,
    /// Bytes of a stripe
    #[arg(long, value_name = "SIZE", value_parser = size::parse, default_value = "256KiB")]
    stripe: u64,
    /// Seed of the content
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Copy so many bytes to the device first, from ordinary memory: what a program that starts
    /// anew has to do
    #[arg(long)]
    upload: bool,
    /// Say which memory each kernel of `pass` needs, so that an evicted job goes on when the first
    /// one's is back
    #[arg(long)]
    pipeline: bool,
    /// Measure the link to the device with copies of --bytes, print seconds as JSON and end
    #[arg(long)]
    link: bool,
    /// Name of the job in messages
    #[arg(long, default_value = "tenant")]
    name: String,
    /// CUDA device
    #[arg(long, default_value_t = 0)]
    device: usize,
}

fn main() -> ExitCode {
    app::main("tenant", run)
}

fn now_ns() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    // CAST: the clock is not negative.
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

fn say(line: &serde_json::Value) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")
        .and_then(|()| out.flush())
        .context("standard output is closed")
}

fn run(args: Args) -> anyhow::Result<()> {
    let whole = args.stripe.is_multiple_of(8) && args.span.is_multiple_of(8);
    if args.stripe == 0 || !whole || args.span < args.stripe {
        bail!("--stripe and --span are multiples of 8 bytes, and a span holds a stripe");
    }
    if args.block < args.stripe || args.bytes < args.stripe {
        bail!("--block and --bytes hold a stripe at least");
    }
    // What is not written is to take no memory of the host, in copies of it either: no pages of 2
    // MiB around a stripe.
    rustix::thread::disable_transparent_huge_pages(true)
        .context("pages of 2 MiB cannot be turned off")?;
    let gpu = Gpu::open(args.device, &stripes::KERNELS)?;
    if args.link {
        let link = link::measure(&gpu, args.bytes)?;
        return say(&serde_json::to_value(link).context("seconds have no JSON")?);
    }
    let begun = Instant::now();
    let layout = Layout {
        block: args.block & !7,
        span: args.span,
        stripe: args.stripe,
    };
    let mut memory = Stripes::new(&gpu, args.bytes, layout, args.seed)?;
    if args.upload {
        link::upload(&gpu, args.bytes)?;
    }
    if args.pipeline {
        memory.declare(Pipeline::find());
    }
    gpu.wait()?;
    say(&json!({
        "ready": true, "job": args.name, "device": gpu.name(), "pid": std::process::id(), "now_ns": now_ns(),
        "seconds": begun.elapsed().as_secs_f64(), "bytes": gpu.allocated_bytes(), "stripes": memory.count(),
    }))?;
    for line in std::io::stdin().lock().lines() {
        let line = line.context("standard input cannot be read")?;
        if !obey(&gpu, &mut memory, &line)? {
            break;
        }
    }
    Ok(())
}

/// False after a command to end.
fn obey(gpu: &Rc<Gpu>, memory: &mut Stripes, line: &str) -> anyhow::Result<bool> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let begun_ns = now_ns();
    match words.as_slice() {
        ["quit"] => return Ok(false),
        ["launch"] => {
            let hashes = memory.hash()?;
            say(&json!({"begun_ns": begun_ns, "done_ns": now_ns(), "stripes": hashes.len()}))?;
        }
        ["pass"] => {
            let mut first_ns = 0;
            let wrong = memory.pass(Pipeline::find(), || first_ns = now_ns())?;
            say(
                &json!({"begun_ns": begun_ns, "first_ns": first_ns, "done_ns": now_ns(), "wrong": wrong}),
            )?;
        }
        ["change", from, to] => {
            let part = |word: &str| {
                word.parse::<f64>().with_context(|| {
                    format!("`{word}` is no part of the whole: a number from 0 to 1")
                })
            };
            let changed = memory.change(part(from)?, part(to)?)?;
            gpu.wait()?;
            say(&json!({"begun_ns": begun_ns, "done_ns": now_ns(), "changed": changed}))?;
        }
        ["check"] => {
            let wrong = memory.wrong()?;
            let mut unlike = 0;
            for at in 0..memory.count() {
                unlike += usize::from(!memory.reread(at)?);
            }
            say(&json!({
                "begun_ns": begun_ns, "done_ns": now_ns(), "stripes": memory.count(), "wrong_by_kernel": wrong,
                "wrong_by_copy": unlike,
            }))?;
        }
        _ => bail!("`{line}` is no command: launch, pass, change FROM TO, check or quit"),
    }
    Ok(true)
}
