//! Clients that send garbage, say nothing, ring without end, lie, or speak an earlier minor
//! version.

use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};

use channel::client::ClientEnd;
use channel::wire::{Hello, Outcome, PROTOCOL_MAJOR, PROTOCOL_MINOR, Welcome};
use channel::{ArbiterHalf, ClientHalf, Mapped};
use control::IterationSource;
use testbed::{CommandWithin as _, PATIENCE};

use super::bench::{self, Daemon, Worker, attach, introduction, named, until};

#[test]
fn garbage_and_silence_on_the_channel_cost_nobody_else() {
    let daemon = Daemon::start();
    let job = daemon
        .operator()
        .register(named("a", 0.5))
        .expect("registered");
    for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0; 4096], &[0xff; 7]] {
        let socket = bench::seqpacket(&job.channel_socket);
        assert!(bench::send(&socket, garbage));
        let answer = bench::receive(&socket).expect("an answer");
        let welcome = channel::wire::Welcome::decode(&answer).expect("a readable one");
        assert_eq!(welcome.outcome, Outcome::Malformed);
    }
    let silent: Vec<_> = (0..200)
        .map(|_| bench::seqpacket(&job.channel_socket))
        .collect();
    // Those that say nothing are closed, and then there is space.
    until("a client is let in", || {
        let client = ClientEnd::attach(&job.channel_socket, &introduction(&job), bench::PATIENCE);
        client.ok()
    });
    drop(silent);
    assert_eq!(daemon.operator().list().expect("list").len(), 1);
}

#[test]
fn endless_requests_and_half_open_connections_cost_nobody_else() {
    let daemon = Daemon::start();
    let path = daemon.dir.api_socket();
    let half_open: Vec<UnixStream> = (0..300)
        .filter_map(|_| {
            let mut stream = UnixStream::connect(&path).ok()?;
            stream.write_all(b"GET /v1/jobs HT").ok()?;
            Some(stream)
        })
        .collect();
    assert!(half_open.len() > 64);
    assert!(daemon.operator().list().expect("served").is_empty());

    // A head, a body of a length that is refused, and a body in chunks, each without end.
    for begun in [
        &b"GET /v1/jobs HTTP/1.1\r\nhost: "[..],
        b"POST /v1/jobs HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n",
        b"POST /v1/jobs HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n8000000\r\n",
    ] {
        let mut endless = UnixStream::connect(&path).expect("connected");
        endless.write_all(begun).expect("sent");
        let chunk = vec![b'x'; 1 << 16];
        let mut sent = 0;
        while sent < (64 << 20) && endless.write_all(&chunk).is_ok() {
            sent += chunk.len();
        }
        assert!(sent < (64 << 20), "nobody takes {sent} bytes for a request");
        assert!(daemon.operator().list().expect("served").is_empty());
    }
}

#[test]
fn a_doorbell_that_never_stops_does_not_keep_others_from_their_turn() {
    let daemon = Daemon::start();
    let mut operator = daemon.operator();
    let noisy = operator.register(named("noisy", 0.5)).expect("registered");
    let quiet = operator.register(named("quiet", 0.5)).expect("registered");
    let noisy = attach(&noisy);
    let storm = std::sync::atomic::AtomicBool::new(true);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while storm.load(std::sync::atomic::Ordering::Relaxed) {
                noisy.send_bell();
            }
        });
        let worker = Worker::start(attach(&quiet));
        until("the quiet one runs", || {
            (worker.launches() > 200).then_some(())
        });
        storm.store(false, std::sync::atomic::Ordering::Relaxed);
    });
    assert_eq!(operator.list().expect("served").len(), 2);
}

#[test]
fn a_client_that_lies_about_its_work_gets_its_share_and_no_more() {
    let daemon = Daemon::start();
    let mut operator = daemon.operator();
    let liar = operator.register(named("liar", 0.5)).expect("registered");
    let honest = operator.register(named("honest", 0.5)).expect("registered");
    let liar = attach(&liar);
    // Waits, blocks and computes without end, and its ring has moved on by more than a number can
    // hold.
    bench::lie(&liar, 100_000);
    let worker = Worker::start(attach(&honest));
    until("the honest one runs", || {
        (worker.launches() > 200).then_some(())
    });
    let shares = until("they have met for a second", || {
        let jobs = operator.list().expect("list");
        let met = jobs[1].contended_ns > 1_000_000_000;
        met.then(|| [0, 1].map(|at: usize| jobs[at].share_got_contended.expect("contended")))
    });
    // Half of what either got, but for the endless drains that it has waited for before the liar
    // was found out.
    let sum = shares[0] + shares[1];
    assert!(shares[1] > 0.4 * sum && sum > 0.5, "{shares:?}");
    let events = operator.events(0, 0).expect("events");
    assert!(events.len() < 60, "{} lines", events.len());
}

/// A greeting by hand, with these abilities; what comes back, and the socket.
fn greet(job: &control::Registered, features: u64) -> (Welcome, Vec<OwnedFd>, OwnedFd) {
    let introduction = introduction(job);
    let hello = Hello {
        major: PROTOCOL_MAJOR,
        minor: PROTOCOL_MINOR,
        features,
        token: introduction.token,
        previous_slot: None,
        gap_ns: 0,
        devices: introduction.devices,
        command: introduction.command,
        asked: String::new(),
    };
    let socket = bench::seqpacket(&job.channel_socket);
    assert!(bench::send(&socket, &hello.encode()));
    let (bytes, fds) = bench::receive_with(&socket);
    (Welcome::decode(&bytes).expect("a welcome"), fds, socket)
}

#[test]
fn a_client_that_asks_for_no_signature_page_gets_three_descriptors_and_is_like_any_other() {
    let daemon = Daemon::start();
    let mut operator = daemon.operator();
    let older = operator.register(named("older", 0.5)).expect("registered");
    let newer = operator.register(named("newer", 0.5)).expect("registered");
    let (welcome, fds, socket) = greet(&older, 0);
    assert_eq!((welcome.outcome, fds.len()), (Outcome::Attached, 3));
    // Abilities that nobody knows are nobody's.
    let (welcome, more, _) = greet(&newer, channel::SIGNATURES | 1 << 63);
    assert_eq!((welcome.outcome, more.len()), (Outcome::Attached, 4));

    let arbiter = Mapped::<ArbiterHalf>::open(fds[0].as_fd(), false).expect("the arbiter's half");
    let client = Mapped::<ClientHalf>::open(fds[1].as_fd(), true).expect("the client's half");
    let gate = arbiter.device(0).expect("device");
    gate.look().expect("alone it finds its gate open");
    client.thread(0).count_launch();
    let jobs = operator.list().expect("list");
    assert_eq!((jobs[0].launches, jobs[0].processes.len()), (1, 1));
    // It has no boundaries to tell of, and takes its turns.
    let _rival = Worker::start(attach(&newer));
    client.want(0).expect("device").begin_waiting();
    until("it is let in again and again", || {
        let waits = gate.look().is_err();
        if waits {
            // A full queue rings as well.
            let _ = rustix::net::send(&socket, &[], rustix::net::SendFlags::DONTWAIT);
        } else {
            client.thread(0).count_launch();
        }
        (operator.list().expect("list")[0].grants > 20).then_some(())
    });
    let profile = operator.list().expect("list")[0].profile.clone();
    assert!(profile.is_none_or(|profile| profile.found == IterationSource::None));
}

/// The first process of a PID namespace: a child of it connects, and leaves its connection to a
/// child of its own, which asks once the one that connected is gone.
const SUCCESSOR: &str = "
import os, socket, sys, time
if os.fork() == 0:
    s = socket.socket(socket.AF_UNIX)
    s.connect(sys.argv[1])
    own = os.getpid()
    if os.fork():
        os._exit(0)
    while os.getppid() == own:
        time.sleep(0.001)
    s.sendall(sys.argv[2].encode())
    while said := s.recv(4096):
        os.write(1, said)
    os._exit(0)
try:
    while True:
        os.wait()
except ChildProcessError:
    pass
";

#[test]
fn a_containers_root_governs_nothing_also_where_the_process_that_connected_has_ended() {
    let daemon = Daemon::start();
    let inside = |socket: &std::path::Path, words: &str| {
        let mut command = Command::new("unshare");
        command.args([
            "--user",
            "--map-root-user",
            "--pid",
            "--fork",
            "--kill-child",
        ]);
        command
            .args(["python3", "-c", SUCCESSOR])
            .arg(socket)
            .arg(words);
        command.stdin(Stdio::null()).output_within(PATIENCE)
    };
    let http =
        "POST /v1/shutdown HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
    let output = inside(&daemon.dir.api_socket(), http);
    if !output.status.success() {
        let why = String::from_utf8_lossy(&output.stderr);
        return eprintln!("skipped: no PID namespaces here: {why}");
    }
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("\"permission\""), "{said}");
    assert!(said.contains("container"), "{said}");
    daemon.operator().status().expect("it goes on");
}
