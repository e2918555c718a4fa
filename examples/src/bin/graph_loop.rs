//! Launches a captured graph again and again, as inference engines do.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use cudarc::driver::{result, sys};
use examples::app;
use examples::gpu::Arg::{F32, U64};
use examples::gpu::{Gpu, Shape};
use examples::train::BUSY;

const ADD: &str = "sublet_axpy_f32";
const FILL: &str = "sublet_fill_f32";
/// Elements of the buffers that the graph works on.
const ELEMENTS: u64 = 1 << 14;

/// Captures a graph of a few kernels once, and launches it for each request.
///
/// Exit codes: 0 done, 1 failed, 2 out of device memory, 64 wrong arguments.
#[derive(Parser)]
#[command(name = "graph_loop", version)]
struct Args {
    /// Kernels of the graph, beside as many small ones
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u64).range(1..=1000))]
    nodes: u64,
    /// Length of a kernel in microseconds
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    kernel_us: u64,
    /// Pause after each request in microseconds
    #[arg(long, default_value_t = 500, value_parser = clap::value_parser!(u64).range(0..=10_000_000))]
    pause_us: u64,
    /// How many requests; 0: as many as there is time for
    #[arg(long, default_value_t = 0)]
    requests: u64,
    /// How long to go on at most
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    seconds: u64,
    /// Name of the job in all lines
    #[arg(long, default_value = "graph_loop")]
    name: String,
    /// CUDA device
    #[arg(long, default_value_t = 0)]
    device: usize,
}

fn main() -> ExitCode {
    app::main("graph_loop", run)
}

fn run(args: Args) -> anyhow::Result<()> {
    let gpu = Gpu::open(args.device, &[BUSY, ADD, FILL])?;
    let sums = gpu.alloc::<f32>("sums", ELEMENTS)?;
    let ones = gpu.alloc::<f32>("ones", ELEMENTS)?;
    for (buffer, value) in [(&sums, 0.0), (&ones, 1.0)] {
        let words = [buffer.arg(), F32(value), U64(ELEMENTS)];
        gpu.launch(FILL, Shape::elements(ELEMENTS), &words)?;
    }
    gpu.wait()?;
    let stream = result::stream::create(result::stream::StreamKind::NonBlocking)?;
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    let mut exec = std::ptr::null_mut();
    // SAFETY: the stream was just made; the captured launches name buffers that live to the end,
    // and the graph is destroyed once.
    unsafe {
        result::stream::begin_capture(stream, mode)?;
        for _ in 0..args.nodes {
            gpu.launch_into(stream, BUSY, Shape::THREAD, &[U64(args.kernel_us)])?;
            let words = [sums.arg(), ones.arg(), F32(1.0), U64(ELEMENTS)];
            gpu.launch_into(stream, ADD, Shape::elements(ELEMENTS), &words)?;
        }
        let captured = result::stream::end_capture(stream)?;
        sys::cuGraphInstantiateWithFlags(&raw mut exec, captured, 0).result()?;
        result::graph::destroy(captured)?;
    }
    let (started, mut requests, mut second) = (Instant::now(), 0_u64, 1);
    let is_over = |requests| {
        let enough = args.requests != 0 && requests >= args.requests;
        enough || started.elapsed() >= Duration::from_secs(args.seconds)
    };
    while !is_over(requests) {
        // SAFETY: graph and stream are this program's.
        unsafe {
            result::graph::launch(exec, stream)?;
            result::stream::synchronize(stream)?;
        }
        requests += 1;
        if started.elapsed() >= Duration::from_secs(second) {
            println!("{} {second} s: {requests} requests", args.name);
            second = started.elapsed().as_secs() + 1;
        }
        std::thread::sleep(Duration::from_micros(args.pause_us));
    }
    let seconds = started.elapsed().as_secs_f64();
    // CAST: a small count.
    let expected = (requests * args.nodes) as f32;
    // CAST: a small constant.
    let sums = sums.read(ELEMENTS as usize)?;
    anyhow::ensure!(
        sums.iter().all(|sum| *sum == expected),
        "{requests} launches of the graph have not added {expected}"
    );
    // SAFETY: destroyed once, and nothing runs.
    unsafe {
        result::graph::exec_destroy(exec)?;
        result::stream::destroy(stream)?;
    }
    println!(
        "{} done on {}: {requests} requests of {} kernels in {seconds:.2} s",
        args.name,
        gpu.name(),
        2 * args.nodes
    );
    Ok(())
}
