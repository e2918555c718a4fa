//! Answers requests over HTTP with a small network: an instance of a service, for `sublet frontend`
//! to stand before.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::ExitCode;
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Parser;
use examples::digits::{CLASSES, Images, PIXELS};
use examples::gpu::Arg::U64;
use examples::gpu::{Buffer, Gpu, Shape};
use examples::mlp::Mlp;
use examples::rng::Rng;
use examples::train::BUSY;
use examples::{app, digits, mlp, size};
use serde_json::json;

/// Classifies the held-out digit that a request names: `GET /digit/7` is answered with JSON. One
/// request at a time, as they come; a connection has one.
///
/// Exit codes: 0 done, 1 failed, 2 out of device memory, 64 wrong arguments.
#[derive(Parser)]
#[command(name = "infer_server", version)]
struct Args {
    /// Where to listen: ADDR:PORT, or unix:/PATH
    #[arg(long, value_name = "ADDRESS")]
    listen: String,
    /// Units of the hidden layer
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=65536))]
    hidden: u32,
    /// Seed of the weights
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Device time to add to every request, in microseconds, standing for a larger model
    #[arg(long, value_name = "US", default_value_t = 0, value_parser = clap::value_parser!(u64).range(..=10_000_000))]
    extra_us: u64,
    /// Device memory to allocate and leave alone, for example 2GiB
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    ballast: Option<u64>,
    /// Name of the job in answers
    #[arg(long, default_value = "infer_server")]
    name: String,
    /// CUDA device
    #[arg(long, default_value_t = 0)]
    device: usize,
}

/// TIMEOUT: a request of a few hundred bytes comes at once, and so does its answer go.
const PATIENCE: Duration = Duration::from_secs(5);
/// Longest head of a request, and what of a body is read and forgotten.
const HEAD_BYTES: usize = 16 << 10;
const BODY_BYTES: usize = 16 << 20;

fn main() -> ExitCode {
    app::main("infer_server", run)
}

/// A connection.
trait Stream: Read + Write {
    fn hurry(&self) -> io::Result<()>;
}

impl Stream for TcpStream {
    fn hurry(&self) -> io::Result<()> {
        self.set_nodelay(true)?;
        self.set_read_timeout(Some(PATIENCE))?;
        self.set_write_timeout(Some(PATIENCE))
    }
}

impl Stream for UnixStream {
    fn hurry(&self) -> io::Result<()> {
        self.set_read_timeout(Some(PATIENCE))?;
        self.set_write_timeout(Some(PATIENCE))
    }
}

enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl Listener {
    fn bind(address: &str) -> anyhow::Result<(Self, String)> {
        let cannot = || format!("cannot listen at {address}: choose another --listen");
        if let Some(path) = address.strip_prefix("unix:") {
            // What an instance has left behind that was killed.
            let _ = std::fs::remove_file(path);
            let listener = UnixListener::bind(path).with_context(cannot)?;
            return Ok((Self::Unix(listener), address.to_owned()));
        }
        let listener = TcpListener::bind(address).with_context(cannot)?;
        let at = listener.local_addr().with_context(cannot)?;
        Ok((Self::Tcp(listener), at.to_string()))
    }

    fn next(&self) -> io::Result<Box<dyn Stream>> {
        Ok(match self {
            Self::Tcp(listener) => Box::new(listener.accept()?.0),
            Self::Unix(listener) => Box::new(listener.accept()?.0),
        })
    }
}

/// The network on the device.
struct Model {
    gpu: Rc<Gpu>,
    network: Mlp,
    input: Buffer<f32>,
    images: Images,
    extra_us: u64,
    _ballast: Option<Buffer<u8>>,
}

impl Model {
    fn open(args: &Args) -> anyhow::Result<Self> {
        let (_, images) = digits::load()?;
        let mut kernels = mlp::KERNELS.to_vec();
        kernels.push(BUSY);
        let gpu = Gpu::open(args.device, &kernels)?;
        let ballast = args.ballast.filter(|bytes| *bytes > 0);
        let ballast = ballast.map(|bytes| gpu.alloc("the ballast", bytes));
        let weights = mlp::initial_weights(args.hidden, &mut Rng::new(args.seed));
        let model = Self {
            network: Mlp::new(&gpu, args.hidden, 1, &weights)?,
            input: gpu.alloc("the request's image", u64::from(PIXELS))?,
            _ballast: ballast.transpose()?,
            images,
            extra_us: args.extra_us,
            gpu,
        };
        model.classify(0)?;
        Ok(model)
    }

    /// The class of a held-out digit, as the network has it.
    fn classify(&self, digit: usize) -> anyhow::Result<u32> {
        let mut rows = self.images.pixels.chunks_exact(PIXELS as usize);
        let count = rows.len();
        let row = rows.nth(digit % count).unwrap_or_default();
        self.input.write(row)?;
        self.network.forward(&self.input, 1)?;
        if self.extra_us > 0 {
            self.gpu
                .launch(BUSY, Shape::THREAD, &[U64(self.extra_us)])?;
        }
        let logits = self.network.logits(1)?;
        let classes = (0..CLASSES).zip(logits);
        let best = classes.fold((0, f32::NEG_INFINITY), |best, (class, logit)| {
            if logit > best.1 { (class, logit) } else { best }
        });
        Ok(best.0)
    }
}

fn run(args: Args) -> anyhow::Result<()> {
    let model = Model::open(&args)?;
    let (listener, at) = Listener::bind(&args.listen)?;
    println!("ready at {at}");
    let mut served = 0_u64;
    loop {
        // A peer that has gone says nothing of the listener.
        let Ok(mut stream) = listener.next() else {
            std::thread::sleep(Duration::from_millis(10));
            continue;
        };
        let Some(path) = stream.hurry().ok().and_then(|()| path_of(&mut stream)) else {
            continue;
        };
        let begun = Instant::now();
        let digit = path
            .strip_prefix("/digit/")
            .and_then(|digit| digit.parse().ok());
        let (status, body) = match digit {
            Some(digit) => {
                let class = model.classify(digit)?;
                served += 1;
                let ms = begun.elapsed().as_secs_f64() * 1e3;
                let answer = json!({"job": args.name, "digit": digit, "class": class, "served": served, "ms": ms});
                ("200 OK", answer)
            }
            None => ("404 Not Found", json!({"error": "ask for /digit/N"})),
        };
        let body = format!("{body}\n");
        let head = format!(
            "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
            body.len()
        );
        // Who asked may have gone.
        let _ = stream.write_all(format!("{head}{body}").as_bytes());
    }
}

/// The path that is asked for, once the request is there; `None`: it is none.
fn path_of(stream: &mut Box<dyn Stream>) -> Option<String> {
    let mut bytes = Vec::new();
    let mut part = [0; 4096];
    let head = loop {
        if let Some(end) = bytes.windows(4).position(|four| four == b"\r\n\r\n") {
            break end + 4;
        }
        let read = stream.read(&mut part).ok().filter(|read| *read > 0)?;
        bytes.extend_from_slice(&part[..read]);
        if bytes.len() > HEAD_BYTES {
            return None;
        }
    };
    let text = std::str::from_utf8(&bytes[..head]).ok()?.to_owned();
    let mut lines = text.lines();
    let path = lines.next()?.split(' ').nth(1)?.to_owned();
    let length = lines.find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-length")
            .then(|| value.trim().parse::<usize>())
    });
    let length = length.transpose().ok()?.unwrap_or(0);
    let mut missing = length.checked_sub(bytes.len() - head)?;
    if missing > BODY_BYTES {
        return None;
    }
    while missing > 0 {
        let most = missing.min(part.len());
        missing -= stream
            .read(&mut part[..most])
            .ok()
            .filter(|read| *read > 0)?;
    }
    Some(path)
}
