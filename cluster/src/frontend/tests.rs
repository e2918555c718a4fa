//! Clients and instances of every kind, over real sockets, without a GPU.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::*;

mod answers;
mod connections;
mod heads;
mod instances;

/// TIMEOUT: a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// An instance of a test.
struct Fake {
    address: String,
    /// Connections that it has had.
    had: Arc<AtomicU32>,
}

impl Fake {
    /// Answers connections of which `which` is true once the sender is dropped, others at once.
    fn holding(
        which: impl Fn(u32) -> bool + Send + Sync + 'static,
    ) -> (Self, std::sync::mpsc::Sender<()>) {
        let (release, held) = std::sync::mpsc::channel::<()>();
        let held = Mutex::new(held);
        let fake = Self::start(move |number, mut stream| {
            request(&mut stream);
            if which(number) {
                let _ = held.lock().recv_timeout(PATIENCE);
            }
            let _ = stream.write_all(OK.as_bytes());
        });
        (fake, release)
    }

    /// Each connection is given to `each`, with its number from 0, on a thread of its own.
    fn start(each: impl Fn(u32, TcpStream) + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let had = Arc::new(AtomicU32::new(0));
        let (counted, each) = (Arc::clone(&had), Arc::new(each));
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let number = counted.fetch_add(1, Ordering::Relaxed);
                let each = Arc::clone(&each);
                std::thread::spawn(move || each(number, stream.unwrap()));
            }
        });
        Self { address, had }
    }

    /// One that answers every request with this.
    fn says(answer: &'static str) -> Self {
        Self::start(move |_, mut stream| {
            request(&mut stream);
            let _ = stream.write_all(answer.as_bytes());
        })
    }

    fn had(&self) -> u32 {
        self.had.load(Ordering::Relaxed)
    }
}

/// A place where nobody listens.
fn nowhere() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().to_string()
}

/// Reads a request with its body: head and body.
fn request(stream: &mut TcpStream) -> (String, Vec<u8>) {
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut reader = BufReader::new(stream);
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if reader.read_line(&mut head).unwrap_or(0) == 0 {
            return (head, Vec::new());
        }
    }
    let length = head.to_ascii_lowercase().lines().find_map(|line| {
        let length = line.strip_prefix("content-length: ")?;
        length.parse::<usize>().ok()
    });
    let mut body = vec![0; length.unwrap_or(0)];
    reader.read_exact(&mut body).unwrap();
    (head, body)
}

const OK: &str = "HTTP/1.1 200 OK\r\ncontent-length: 3\r\nkeep-alive: x\r\nx-own: 1\r\n\r\nyes";
const BUSY: &str = "HTTP/1.1 503 Service Unavailable\r\ncontent-length: 5\r\n\r\nbusy!";

/// With instances at these places, all of them in use.
pub(super) fn options(instances: &[&str]) -> Options {
    let instances = instances.iter().enumerate();
    let instances = instances.map(|(at, place)| (format!("i{at}"), place.parse().unwrap()));
    let instances: Vec<(String, Address)> = instances.collect();
    // CAST: a few.
    let count = instances.len() as u32;
    Options {
        terms: Terms {
            sla: policy::standbys::Sla {
                within_s: 5.0,
                level: 0.9,
                burst: 1.0,
            },
            least: count,
            most: count,
            ..fleet::tests::terms()
        },
        instances,
        timeout: Duration::from_secs(30),
        drain: Duration::from_secs(30),
        connections: 16,
        body_bytes: 1 << 20,
        bodies_bytes: 4 << 20,
        retry: false,
    }
}

/// A frontend of a test; it is stopped when it is dropped.
struct Live {
    address: SocketAddr,
    stop: Stop,
    report: Box<dyn Fn() -> Status + Send + Sync>,
    lines: Arc<Mutex<Vec<String>>>,
    thread: Option<JoinHandle<io::Result<usize>>>,
}

impl Live {
    fn start(instances: &[&str], change: impl FnOnce(&mut Options)) -> Self {
        Self::at("127.0.0.1:0", instances, change)
    }

    fn at(place: &str, instances: &[&str], change: impl FnOnce(&mut Options)) -> Self {
        let mut options = options(instances);
        change(&mut options);
        let prepared = Prepared::new(options).unwrap();
        let listener = Listener::bind(&place.parse().unwrap()).unwrap();
        let address = listener.address().to_string().parse().unwrap();
        let (stop, report) = (prepared.stop(), Box::new(prepared.reporter()));
        let lines = Arc::new(Mutex::new(Vec::new()));
        let kept = Arc::clone(&lines);
        let reach: Reach = Box::new(|| Err("there is none".into()));
        let tell = move |line: &str| kept.lock().push(line.to_owned());
        let thread = std::thread::spawn(move || prepared.run(listener, reach, tell));
        Self {
            address,
            stop,
            report,
            lines,
            thread: Some(thread),
        }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    /// What is answered to these bytes, up to the end of the connection.
    fn ask(&self, bytes: &str) -> String {
        let mut stream = self.connect();
        stream.write_all(bytes.as_bytes()).unwrap();
        rest(&mut stream)
    }

    fn get(&self) -> String {
        self.ask("GET /a?b=c HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
    }

    fn post(&self) -> String {
        self.ask("POST /a HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: 2\r\n\r\nhi")
    }

    fn end(mut self) -> usize {
        self.stop.stop();
        self.thread.take().unwrap().join().unwrap().unwrap()
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        self.stop.stop();
    }
}

fn rest(stream: &mut TcpStream) -> String {
    let mut bytes = Vec::new();
    let _ = stream.read_to_end(&mut bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}

#[track_caller]
fn until(what: &str, mut done: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(
            begun.elapsed() < PATIENCE,
            "not within {PATIENCE:?}: {what}"
        );
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn a_request_reaches_an_instance_and_its_answer_the_client() {
    let (said, heard) = std::sync::mpsc::channel();
    let said = Mutex::new(said);
    let fake = Fake::start(move |_, mut stream| {
        let _ = said.lock().send(request(&mut stream));
        let _ = stream.write_all(OK.as_bytes());
    });
    let live = Live::start(&[&fake.address], |_| {});
    let text = live.ask(
        "POST http://elsewhere/a?b=c HTTP/1.1\r\nHost: h\r\nX-Mine: 2\r\nConnection: close, X-Hop\r\n\
         X-Hop: 1\r\nUpgrade: websocket\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n1\r\n!\r\n0\r\n\r\n",
    );
    assert!(text.starts_with("HTTP/1.1 200 OK\r\n"), "{text}");
    assert!(text.ends_with("\r\n\r\nyes"), "{text}");
    assert!(
        text.contains("x-own: 1") && !text.contains("keep-alive: x"),
        "{text}"
    );
    let (head, body) = heard.recv_timeout(PATIENCE).unwrap();
    let head = head.to_ascii_lowercase();
    assert_eq!(body, b"hi!");
    assert!(head.starts_with("post /a?b=c http/1.1\r\n"), "{head}");
    for (field, is_there) in [
        ("host: elsewhere\r\n", true),
        ("x-mine: 2\r\n", true),
        ("content-length: 3\r\n", true),
        ("x-hop", false),
        ("upgrade", false),
        ("transfer-encoding", false),
    ] {
        assert_eq!(head.contains(field), is_there, "{field}: {head}");
    }
    // Three requests on one connection are three.
    let mut stream = live.connect();
    for _ in 0..3 {
        stream
            .write_all(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
            .unwrap();
        let mut reader = BufReader::new(&mut stream);
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            assert!(reader.read_line(&mut head).unwrap() > 0, "{head}");
        }
        let mut body = [0; 3];
        reader.read_exact(&mut body).unwrap();
    }
    until("all are counted", || (live.report)().counts.answered == 4);
    let status = (live.report)();
    assert_eq!((status.counts.requests, status.counts.in_time), (4, 4));
    assert_eq!(status.instances[0].requests, 4);
    assert!(!status.arbiter && status.instances[0].memory == "unknown");
    // By a thread of its own, which may come to it after all of this.
    until("its absence is said", || !live.lines.lock().is_empty());
    let lines = live.lines.lock().clone();
    assert_eq!(lines.len(), 1, "{lines:?}");
    drop(stream);
    assert_eq!(live.end(), 0);
}

#[test]
fn what_is_no_request_costs_nobody_anything() {
    let fake = Fake::says(OK);
    let live = Live::start(&[&fake.address], |options| options.body_bytes = 1000);
    let large = format!("GET / HTTP/1.1\r\nX: {}\r\n\r\n", "x".repeat(1 << 20));
    for (bytes, status) in [
        ("nonsense\r\n\r\n", "HTTP/1.1 400 "),
        (
            "CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\nConnection: close\r\n\r\n",
            "HTTP/1.1 405 ",
        ),
        (
            "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 1001\r\nConnection: close\r\n\r\n",
            "HTTP/1.1 413 ",
        ),
        (&large, "HTTP/1.1 431 "),
    ] {
        let text = live.ask(bytes);
        // Bytes that nobody reads may end a connection before its answer is read.
        assert!(
            text.starts_with(status) || bytes.len() > 1000,
            "{status}: {text}"
        );
    }
    let chunks = "200\r\n".to_owned() + &"x".repeat(512) + "\r\n";
    let long = "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n".to_owned()
        + &chunks
        + &chunks;
    assert!(live.ask(&long).starts_with("HTTP/1.1 413 "));
    assert_eq!((fake.had(), (live.report)().counts.requests), (0, 0));
    assert!(live.get().ends_with("yes"));
}

#[test]
fn an_instance_that_is_not_there_is_left_out() {
    let (gone, fake) = (nowhere(), Fake::says(OK));
    let live = Live::start(&[&gone, &fake.address], |_| {});
    for _ in 0..20 {
        // Nothing was sent, so another one may have it.
        assert!(live.post().ends_with("yes"));
    }
    let status = (live.report)();
    assert_eq!(status.counts.failed, 0);
    assert!(status.instances[0].failures > 0, "{status:?}");
    assert_eq!(status.instances[0].role, "down");
    assert!(live.lines.lock().iter().any(|line| line.contains("`i0`")));
    // Where none is there a request waits as long as it may.
    let single = Live::start(&[&gone], |options| {
        options.timeout = Duration::from_millis(300)
    });
    let text = single.get();
    assert!(
        text.starts_with("HTTP/1.1 504 ") && text.contains("--timeout"),
        "{text}"
    );
}

#[test]
fn an_answer_that_is_none_is_given_up_and_repeated_only_where_that_is_allowed() {
    let breaks = |number: u32, mut stream: TcpStream| {
        request(&mut stream);
        match number % 2 {
            0 => drop(stream.write_all(b"this is no HTTP\r\n\r\n")),
            _ => drop(stream),
        }
    };
    for (retry, post) in [(false, "HTTP/1.1 502 "), (true, "HTTP/1.1 200 ")] {
        let (bad, good) = (Fake::start(breaks), Fake::says(OK));
        let live = Live::start(&[&bad.address, &good.address], |options| {
            options.retry = retry
        });
        // What GET asks for may be asked for again.
        let mut seen = 0;
        while bad.had() < 2 {
            assert!(live.get().ends_with("yes"), "{seen}");
            seen += 1;
            std::thread::sleep(Duration::from_millis(20));
        }
        let before = bad.had();
        until("a POST meets it", || {
            let text = live.post();
            assert!(text.starts_with(post) || text.ends_with("yes"), "{text}");
            std::thread::sleep(Duration::from_millis(20));
            bad.had() > before
        });
        let counts = (live.report)().counts;
        assert_eq!(counts.failed > 0, !retry, "{counts:?}");
    }
}

#[test]
fn one_that_says_it_is_busy_is_passed_by() {
    let (busy, good) = (Fake::says(BUSY), Fake::says(OK));
    let live = Live::start(&[&busy.address, &good.address], |_| {});
    until("both have been asked", || {
        assert!(live.post().ends_with("yes"));
        busy.had() > 2
    });
    let status = (live.report)();
    assert_eq!((status.counts.failed, status.instances[0].failures), (0, 0));
    // Where all are busy for longer than was agreed, that is the answer.
    let live = Live::start(&[&busy.address], |options| options.terms.sla.within_s = 0.1);
    let text = live.get();
    assert!(
        text.starts_with("HTTP/1.1 503 ") && text.ends_with("busy!"),
        "{text}"
    );
}

#[test]
fn one_that_says_nothing_holds_up_its_own_request_alone() {
    let (mute, good) = (
        Fake::start(|_, mut stream| {
            request(&mut stream);
            std::thread::sleep(PATIENCE);
        }),
        Fake::says(OK),
    );
    let live = Live::start(&[&mute.address, &good.address], |options| {
        options.timeout = Duration::from_secs(2);
    });
    let mut timed_out = 0;
    std::thread::scope(|scope| {
        let all: Vec<_> = (0..8).map(|_| scope.spawn(|| live.get())).collect();
        for one in all {
            let text = one.join().unwrap();
            timed_out += u32::from(text.starts_with("HTTP/1.1 504 "));
            assert!(
                text.ends_with("yes") || text.contains("--timeout"),
                "{text}"
            );
        }
    });
    assert_eq!(timed_out, 1, "the other seven had the other instance");
    assert_eq!((live.report)().instances[0].role, "down");
}

#[test]
fn slow_clients_keep_no_instance_and_bounded_memory() {
    let fake = Fake::says(OK);
    let live = Live::start(&[&fake.address], |options| {
        options.bodies_bytes = 10_000;
        options.connections = 8;
    });
    let head = "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 9000\r\n\r\n";
    let mut slow = live.connect();
    slow.write_all((head.to_owned() + &"x".repeat(6000)).as_bytes())
        .unwrap();
    // The bytes of another one are too many together with these.
    until("the other one is refused", || {
        let text = live.ask(&(head.to_owned() + &"x".repeat(9000)));
        text.starts_with("HTTP/1.1 503 ")
    });
    assert!(live.get().ends_with("yes"), "the instance is free");
    drop(slow);
    until("the bytes are given back", || {
        let close = head.replace("\r\n\r\n", "\r\nConnection: close\r\n\r\n");
        live.ask(&(close + &"x".repeat(9000))).ends_with("yes")
    });
    // Those that say nothing give way to those that come.
    let silent: Vec<TcpStream> = (0..40).map(|_| live.connect()).collect();
    until("a newcomer is served", || live.get().ends_with("yes"));
    drop(silent);
    assert_eq!(live.end(), 0);
}

#[test]
fn a_client_that_does_not_read_keeps_no_instance() {
    let long = Fake::start(|number, mut stream| {
        request(&mut stream);
        if number > 0 {
            let _ = stream.write_all(OK.as_bytes());
            return;
        }
        let head = "HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n";
        let _ = stream.write_all(head.as_bytes());
        let _ = stream.write_all(&vec![b'x'; 64 << 20]);
    });
    let live = Live::start(&[&long.address], |options| {
        options.timeout = Duration::from_secs(2);
    });
    let mut unread = live.connect();
    unread
        .write_all(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
        .unwrap();
    until("it has its instance", || long.had() == 1);
    until("after its time the instance is free", || {
        live.get().ends_with("yes")
    });
    assert_eq!(
        (live.report)().instances[0].failures,
        0,
        "it was not the instance"
    );
    let mut bytes = Vec::new();
    let _ = unread.read_to_end(&mut bytes);
    assert!(bytes.len() < 64 << 20, "its answer is cut off");
}

#[test]
fn an_answer_that_breaks_off_ends_broken() {
    let half = Fake::start(|_, mut stream| {
        request(&mut stream);
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf");
        let _ = stream.shutdown(Shutdown::Both);
    });
    let live = Live::start(&[&half.address], |_| {});
    let text = live.get();
    assert!(!text.contains("half\r\n") && text.len() < 200, "{text}");
    until("it is counted", || (live.report)().counts.failed == 1);
    assert_eq!((live.report)().instances[0].failures, 1);
}

#[test]
fn a_client_that_leaves_has_asked_for_nothing() {
    let (fake, release) = Fake::holding(|number| number == 0);
    let live = Live::start(&[&fake.address], |_| {});
    let mut first = live.connect();
    first
        .write_all(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
        .unwrap();
    until("it is served", || fake.had() == 1);
    let mut waiting: Vec<TcpStream> = (0..3).map(|_| live.connect()).collect();
    for stream in &mut waiting {
        stream
            .write_all(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
            .unwrap();
    }
    until("they wait", || (live.report)().waiting == 3);
    drop(waiting);
    until("nobody waits", || (live.report)().waiting == 0);
    drop(first);
    assert!(live.get().ends_with("yes"), "its place was given back");
    assert_eq!((fake.had(), (live.report)().counts.left), (2, 4));
    drop(release);
}

#[test]
fn requests_that_waited_too_long_are_pruned() {
    let slow = Fake::start(|_, mut stream| {
        request(&mut stream);
        std::thread::sleep(Duration::from_millis(700));
        let _ = stream.write_all(OK.as_bytes());
    });
    let live = Live::start(&[&slow.address], |options| {
        options.terms.prune = true;
        options.terms.sla.within_s = 0.5;
    });
    let texts: Vec<String> = std::thread::scope(|scope| {
        let all: Vec<_> = (0..4).map(|_| scope.spawn(|| live.get())).collect();
        all.into_iter().map(|one| one.join().unwrap()).collect()
    });
    let pruned = texts.iter().filter(|text| text.contains("--prune")).count();
    assert!((1..=3).contains(&pruned), "{texts:?}");
    assert!(
        texts
            .iter()
            .all(|text| text.ends_with("yes") || text.starts_with("HTTP/1.1 503 "))
    );
    let status = (live.report)();
    assert_eq!(status.counts.pruned, pruned as u64);
    assert!(!status.last_minute.is_met);
}

#[test]
fn what_is_under_way_at_the_end_is_answered() {
    let (fake, release) = Fake::holding(|_| true);
    let live = Live::start(&[&fake.address], |_| {});
    let mut idle = live.connect();
    let mut asked = live.connect();
    asked
        .write_all(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
        .unwrap();
    until("it is served", || fake.had() == 1);
    live.stop.stop();
    until("nobody is taken in", || {
        TcpStream::connect(live.address).is_err()
    });
    assert_eq!(rest(&mut idle), "", "one without a request is closed");
    drop(release);
    let text = rest(&mut asked);
    assert!(
        text.ends_with("yes") && text.contains("connection: close"),
        "{text}"
    );
    assert_eq!(live.end(), 0);

    // What takes longer than it may is cut off, and counted.
    let mute = Fake::start(|_, mut stream| {
        request(&mut stream);
        std::thread::sleep(PATIENCE);
    });
    let live = Live::start(&[&mute.address], |options| {
        options.drain = Duration::from_millis(50)
    });
    let mut asked = live.connect();
    asked
        .write_all(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
        .unwrap();
    until("it is served", || mute.had() == 1);
    assert_eq!(live.end(), 1);
    assert_eq!(rest(&mut asked), "");
}
