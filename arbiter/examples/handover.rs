//! What a hand-over through the daemon costs, beside a bare futex wake of the same run.
//!
//! Clients and daemon are processes of their own, as in service. Two figures, each in microseconds
//! and in bare wakes: from the moment a waiting client rings to its gate open, the holder being
//! idle; and from the end of a slice to the gate of the next tenant open, the holder being busy.
//! `cargo run --release -p arbiter --example handover`

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use arbiter::Options;
use channel::client::{ClientEnd, Introduction};
use channel::wire::DeviceId;
use channel::{ArbiterHalf, Grant, Mapped, Writers};
use control::paths::RuntimeDir;
use control::{Client, JobSettings, JobSpec, Registered};

const ROUNDS: usize = 2000;
const PATIENCE: Duration = Duration::from_secs(10);

fn main() {
    match std::env::var("HANDOVER_ROLE").as_deref() {
        Ok("arbiter") => serve(),
        Ok("greedy") => greedy(),
        Ok("echo") => echo(),
        _ => measure(),
    }
}

fn measure() {
    let dir = std::env::temp_dir().join(format!("sublet-handover-{}", std::process::id()));
    std::fs::create_dir(&dir).expect("a directory");
    let runtime = RuntimeDir::given(dir.clone()).expect("absolute");
    let mut daemon = child("arbiter", dir.as_os_str().to_str().expect("UTF-8"), "");
    let mut operator = loop {
        match Client::connect(&runtime.api_socket(), PATIENCE) {
            Ok(operator) => break operator,
            Err(_) => std::thread::sleep(Duration::from_millis(1)),
        }
    };
    let mut register = |name: &str| {
        let spec = JobSpec {
            settings: JobSettings {
                share: Some(0.5),
                ..JobSettings::default()
            },
            name: name.into(),
            simulated: true,
            ..JobSpec::default()
        };
        operator.register(spec).expect("registered")
    };
    let (first, second) = (register("first"), register("second"));

    let bare = futex_wakes();
    report("bare futex wake", &bare, median(&bare));

    // Two clients of this process take turns; the one that asks finds the other idle.
    let clients = [attach(&first), attach(&second)];
    let mut idle = Vec::with_capacity(ROUNDS);
    for round in 0..ROUNDS {
        let client = &clients[(round + 1) % 2];
        // Longer than a silent holder is waited for.
        std::thread::sleep(Duration::from_millis(1));
        let begun = Instant::now();
        wait_in(client);
        idle.push(begun.elapsed().as_nanos() as u64);
    }
    report("ring to grant, holder idle", &idle, median(&bare));
    drop(clients);

    // The other one is a process that never has enough.
    let mut rival = child(
        "greedy",
        first.channel_socket.to_str().expect("UTF-8"),
        &first.token,
    );
    let client = attach(&second);
    let gate = client.arbiter.device(0).expect("device");
    let mut ended = Vec::new();
    while ended.len() < 400 {
        wait_in(&client);
        let ours_ends = gate.deadline_mono_ns();
        while gate.look().is_ok() {
            client.client.thread(0).count_launch();
            client.client.thread(0).all_marked();
            std::thread::sleep(Duration::from_micros(50));
        }
        // Now the rival's slice runs, 5 ms from the end of ours.
        wait_in(&client);
        let delay_ns = arbiter_clock().saturating_sub(ours_ends + 5_000_000);
        if ours_ends > 0 && delay_ns < 4_000_000 {
            ended.push(delay_ns);
        }
    }
    report(
        "two slices' ends to grant, holder busy",
        &ended,
        median(&bare),
    );
    let _ = rival.kill();
    let _ = rival.wait();
    let _ = daemon.kill();
    let _ = daemon.wait();
    let _ = std::fs::remove_dir_all(dir);
}

fn arbiter_clock() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

fn wait_in(client: &ClientEnd) {
    let gate = client.arbiter.device(0).expect("device");
    let want = client.client.want(0).expect("device");
    if gate.look().is_ok() {
        return;
    }
    want.begin_waiting();
    client.ring();
    while let Err(seen) = gate.look() {
        gate.wait(seen, Duration::from_millis(100));
    }
    want.end_waiting();
}

/// One way of a ping-pong between two processes over two shared words.
fn futex_wakes() -> Vec<u64> {
    let (ours, ours_fd) = Mapped::<ArbiterHalf>::create(Writers::Holders).expect("page");
    let (theirs, theirs_fd) = Mapped::<ArbiterHalf>::create(Writers::Holders).expect("page");
    ours.publish();
    theirs.publish();
    use std::os::fd::AsRawFd;
    let path =
        |fd: &std::os::fd::OwnedFd| format!("/proc/{}/fd/{}", std::process::id(), fd.as_raw_fd());
    let mut echo = child("echo", &path(&ours_fd), &path(&theirs_fd));
    let mut times = Vec::with_capacity(ROUNDS);
    let back = theirs.device(0).expect("device");
    for number in 0..ROUNDS as u64 {
        let begun = Instant::now();
        ours.open(0, &grant(number));
        wait_open(&theirs);
        if number > 100 {
            times.push(begun.elapsed().as_nanos() as u64 / 2);
        }
        ours.close(0);
        while back.look().is_ok() {
            std::thread::sleep(Duration::from_micros(50));
        }
        // Both sides asleep, as in service.
        std::thread::sleep(Duration::from_micros(200));
    }
    let _ = echo.kill();
    let _ = echo.wait();
    times
}

fn wait_open(half: &ArbiterHalf) {
    let gate = half.device(0).expect("device");
    while let Err(seen) = gate.look() {
        gate.wait(seen, Duration::from_millis(100));
    }
}

fn grant(number: u64) -> Grant {
    Grant {
        number,
        quantum_us: 0,
        deadline_mono_ns: 0,
        window: channel::Window::always(0),
    }
}

fn report(what: &str, times: &[u64], bare_ns: u64) {
    let mut sorted = times.to_vec();
    sorted.sort_unstable();
    let at = |part: f64| sorted[((sorted.len() - 1) as f64 * part) as usize];
    println!(
        "{what:40} median {:7.1} us, p90 {:7.1} us, {:.2} bare wakes",
        at(0.5) as f64 / 1e3,
        at(0.9) as f64 / 1e3,
        at(0.5) as f64 / bare_ns as f64
    );
}

fn median(times: &[u64]) -> u64 {
    let mut sorted = times.to_vec();
    sorted.sort_unstable();
    sorted[sorted.len() / 2]
}

fn child(role: &str, socket: &str, word: &str) -> Child {
    Command::new(std::env::current_exe().expect("us"))
        .env("HANDOVER_ROLE", role)
        .env("HANDOVER_SOCKET", socket)
        .env("HANDOVER_WORD", word)
        .stdout(Stdio::null())
        .spawn()
        .expect("started")
}

fn value(what: &str) -> String {
    std::env::var(what).expect("set by the parent")
}

fn serve() {
    let dir = RuntimeDir::given(PathBuf::from(value("HANDOVER_SOCKET"))).expect("absolute");
    let options = Options {
        host_nvml: false,
        ..Options::new(dir)
    };
    arbiter::run(options).expect("served");
}

fn attach(job: &Registered) -> ClientEnd {
    let introduction = Introduction {
        token: job.token.as_bytes().try_into().expect("32 digits"),
        devices: vec![DeviceId {
            uuid: [7; 16],
            total_bytes: 8 << 30,
        }],
        command: "handover".into(),
        asked: None,
    };
    ClientEnd::attach(&job.channel_socket, &introduction, PATIENCE).expect("attached")
}

fn greedy() {
    let client = attach(&Registered {
        token: value("HANDOVER_WORD"),
        channel_socket: value("HANDOVER_SOCKET").into(),
        ..Registered::default()
    });
    let gate = client.arbiter.device(0).expect("device");
    loop {
        wait_in(&client);
        while gate.look().is_ok() {
            client.client.thread(0).count_launch();
            client.client.thread(0).all_marked();
            std::thread::sleep(Duration::from_micros(50));
        }
    }
}

fn echo() {
    let open = |path: String| {
        let file = std::fs::File::options()
            .read(true)
            .write(true)
            .open(path)
            .expect("page");
        Mapped::<ArbiterHalf>::open(std::os::fd::AsFd::as_fd(&file), true).expect("mapped")
    };
    let (ours, theirs) = (open(value("HANDOVER_SOCKET")), open(value("HANDOVER_WORD")));
    let gate = ours.device(0).expect("device");
    for number in 0.. {
        wait_open(&ours);
        theirs.open(0, &grant(number));
        while gate.look().is_ok() {
            std::thread::sleep(Duration::from_micros(50));
        }
        theirs.close(0);
    }
}
