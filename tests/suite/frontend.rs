//! Frontends before real instances on the simulated GPU: load brings memory back, its end lets it
//! leave, by the device's own account; nothing is lost when instances, the arbiter or a frontend
//! end.

use std::io::{BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use nix::sys::signal::Signal;
use serde_json::Value;
use tests::{Artefacts, Outcome, PATIENCE, Running, Sandbox, wait_until};

/// What an instance has on the device beside its small network.
const BALLAST: u64 = 256 << 20;

/// Instances of a service.
struct Service {
    sandbox: Sandbox,
    instances: Vec<Running>,
    evict_after: &'static str,
}

impl Service {
    fn start(count: usize, evict_after: &'static str) -> Self {
        let mut service = Self {
            sandbox: Sandbox::new(),
            instances: Vec::new(),
            evict_after,
        };
        for at in 0..count {
            let instance = service.instance(at);
            service.instances.push(instance);
        }
        service
    }

    fn socket(&self, at: usize) -> PathBuf {
        self.sandbox.path(&format!("s{at}"))
    }

    /// Starts one, and waits until it answers.
    fn instance(&self, at: usize) -> Running {
        let name = format!("i{at}");
        let flags = [
            "--name",
            &name,
            "--evictable",
            "--evict-after",
            self.evict_after,
        ];
        let program = Artefacts::get().program("infer_server");
        let mut command = self.sandbox.job(&flags, program);
        command.args(["--ballast", "256MiB", "--extra-us", "20000", "--listen"]);
        command.arg(format!("unix:{}", self.socket(at).display()));
        let mut running = Running::start(&mut command);
        wait_until("the instance listens", || {
            if running.has_ended() {
                panic!("it has ended: {}", running.take_stderr());
            }
            UnixStream::connect(self.socket(at)).ok()
        });
        running
    }

    /// What each of them has on the device, by the device's account.
    fn on_device(&self) -> Vec<u64> {
        let program = Artefacts::get().program("examples/usage");
        let usage: Value = Outcome::of(&mut self.sandbox.command(program))
            .succeeded()
            .json();
        let processes = usage["devices"][0]["processes"].as_array();
        let processes = processes.cloned().unwrap_or_default();
        let of = |running: &Running| {
            let pid = running.pid();
            let own = processes.iter().find(|process| process["pid"] == pid);
            own.and_then(|process| process["used_bytes"].as_u64())
                .unwrap_or(0)
        };
        self.instances.iter().map(of).collect()
    }

    /// Which of them have their memory on the device.
    fn here(&self) -> Vec<bool> {
        self.on_device()
            .into_iter()
            .map(|bytes| bytes >= BALLAST)
            .collect()
    }

    #[track_caller]
    fn until_here(&self, what: &str, expected: &[bool]) {
        wait_until(what, || (self.here() == expected).then_some(()));
    }

    fn frontend(&self, words: &[&str]) -> Frontend {
        let mut command = self.sandbox.sublet(["frontend", "run"]);
        command.args(["--sla", "p90=2s", "--listen", "127.0.0.1:0"]);
        for at in 0..self.instances.len() {
            // Not in their order.
            let at = self.instances.len() - 1 - at;
            command.arg("--instance");
            command.arg(format!("i{at}=unix:{}", self.socket(at).display()));
        }
        let mut process = command
            .args(words)
            .stderr(Stdio::piped())
            .spawn()
            .expect("started");
        let mut line = String::new();
        let mut stderr = BufReader::new(process.stderr.take().expect("a pipe"));
        testbed::read_line(&mut stderr, &mut line);
        let addresses = line.split_once("frontend at ").and_then(|(_, rest)| {
            let (address, rest) = rest.split_once(';')?;
            let (_, admin) = rest.split_once("http://")?;
            Some((address.parse().ok()?, admin.trim().parse().ok()?))
        });
        let (address, admin) = addresses.unwrap_or_else(|| panic!("no addresses in {line}"));
        Frontend {
            process,
            address,
            admin,
            stderr,
        }
    }
}

/// A frontend, where it is reached, and what it says.
struct Frontend {
    process: Child,
    address: SocketAddr,
    admin: SocketAddr,
    stderr: BufReader<std::process::ChildStderr>,
}

impl Frontend {
    fn signal(&self, signal: Signal) {
        // CAST: process ids are positive.
        let pid = nix::unistd::Pid::from_raw(self.process.id() as i32);
        nix::sys::signal::kill(pid, signal).expect("sent");
    }

    fn status(&self, service: &Service) -> Value {
        let admin = self.admin.to_string();
        let mut command = service
            .sandbox
            .sublet(["frontend", "status", "--json", &admin]);
        let status = Outcome::of(&mut command).succeeded().json();
        assert_eq!(status["schema"], 1, "{status:#}");
        status
    }
}

impl Drop for Frontend {
    fn drop(&mut self) {
        testbed::reap(&mut self.process);
    }
}

/// Head and body of what is answered.
fn get(address: SocketAddr, path: &str) -> Option<(String, String)> {
    let mut stream = TcpStream::connect(address).ok()?;
    stream.set_read_timeout(Some(PATIENCE)).ok()?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    let (head, body) = text.split_once("\r\n\r\n")?;
    Some((head.to_owned(), body.to_owned()))
}

/// The class of a digit, as whichever instance has it.
#[track_caller]
fn class(address: SocketAddr, digit: u64) -> u64 {
    let (head, body) = get(address, &format!("/digit/{digit}")).expect("an answer");
    assert!(head.starts_with("HTTP/1.1 200 "), "{head} {body}");
    let answer: Value = serde_json::from_str(&body).expect("JSON");
    assert_eq!(answer["digit"], digit, "the answer to another request");
    answer["class"].as_u64().expect("a class")
}

/// Runs `during` while clients ask at these addresses without a pause, as many as are asked for.
/// How many answers they had; each was good.
fn under_load(addresses: &[SocketAddr], clients: usize, during: impl FnOnce(&AtomicU64)) -> u64 {
    let (over, answers) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for client in 0..clients {
            let address = addresses[client % addresses.len()];
            let (over, answers) = (&over, &answers);
            scope.spawn(move || {
                let mut first = None;
                while !over.load(Ordering::Relaxed) {
                    // The same answer from every instance, whatever has been moved meanwhile.
                    let class = class(address, client as u64);
                    assert_eq!(*first.get_or_insert(class), class);
                    answers.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        // A client that fails ends its loop, and what is waited for ends the others.
        let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| during(&answers)));
        over.store(true, Ordering::Relaxed);
        if let Err(why) = ended {
            std::panic::resume_unwind(why);
        }
    });
    answers.load(Ordering::Relaxed)
}

#[test]
fn load_brings_memory_back_and_its_end_lets_it_leave() {
    let service = Service::start(3, "1s");
    let frontend = service.frontend(&["--history", "3s"]);
    service.until_here("nobody asks, so all of them have left", &[false; 3]);
    let status = frontend.status(&service);
    let names: Vec<&Value> = (0..3).map(|at| &status["instances"][at]["name"]).collect();
    assert_eq!(
        names,
        ["i0", "i1", "i2"],
        "in the order that all frontends have"
    );

    let classes: Vec<u64> = (0..3).map(|digit| class(frontend.address, digit)).collect();
    let here = service.here();
    assert!(
        here[0] && !here[2],
        "the first one of the order does for three: {here:?}"
    );

    under_load(&[frontend.address], 12, |answers| {
        service.until_here("all of them are needed", &[true; 3]);
        let before = answers.load(Ordering::Relaxed);
        wait_until("they are answered", || {
            (answers.load(Ordering::Relaxed) > before + 100).then_some(())
        });
        let status = frontend.status(&service);
        assert_eq!(status["in_use"], 3, "{status:#}");
        assert!(status["predicted_per_s"].as_f64() > Some(1.0), "{status:#}");
        assert_eq!(status["arbiter"], true);
        for at in 0..3 {
            let requests = status["instances"][at]["requests"].as_u64();
            assert!(requests > Some(10), "{status:#}");
        }
    });
    service.until_here("the load is over, and all of them leave", &[false; 3]);
    let again: Vec<u64> = (0..3).map(|digit| class(frontend.address, digit)).collect();
    assert_eq!(classes, again, "what was moved is what it was");

    let status = frontend.status(&service);
    let counts = &status["counts"];
    assert_eq!(counts["requests"], counts["answered"], "{status:#}");
    assert_eq!((&counts["failed"], &counts["left"]), (&0.into(), &0.into()));
    let (head, page) = get(frontend.admin, "/metrics").expect("a page");
    assert!(head.contains("application/openmetrics-text"), "{head}");
    let answered = format!("sublet_frontend_answered_total {}\n", counts["answered"]);
    assert!(
        page.contains(&answered) && page.ends_with("# EOF\n"),
        "{page}"
    );
    let admin = frontend.admin.to_string();
    let text = wait_until("what nobody uses is shown as evicted", || {
        let mut command = service.sandbox.sublet(["frontend", "status", &admin]);
        let text = Outcome::of(&mut command).succeeded().quiet();
        let mut lines = text.lines();
        let is_away = lines.any(|line| line.starts_with("i2 ") && line.contains("evicted"));
        is_away.then_some(text)
    });
    for word in ["p90 within 2000.0 ms", "INSTANCE", "i0 "] {
        assert!(text.contains(word), "{text}");
    }
    wait_until(
        "`sublet ps` says why nothing of it is on the device",
        || {
            let job = service.sandbox.job_status("i2")?;
            let reason = job.residence?.reason;
            reason.contains("evict_after").then_some(())
        },
    );
}

#[test]
fn two_frontends_use_the_same_instances_and_send_none_back_and_forth() {
    let service = Service::start(3, "5s");
    let frontends: Vec<Frontend> = (0..2)
        .map(|_| service.frontend(&["--frontends", "2", "--most", "2", "--history", "5s"]))
        .collect();
    service.until_here("all of them have left", &[false; 3]);
    let addresses: Vec<SocketAddr> = frontends.iter().map(|one| one.address).collect();
    let evictions = || {
        let of = |at| {
            service
                .sandbox
                .job_status(&format!("i{at}"))
                .and_then(|job| job.residence)
        };
        [0, 1, 2].map(|at| of(at).expect("evictable").evictions)
    };
    wait_until("each of them has", || (evictions() == [1; 3]).then_some(()));
    under_load(&addresses, 8, |answers| {
        service.until_here("two of them are here", &[true, true, false]);
        let (before, asked) = (evictions(), answers.load(Ordering::Relaxed));
        wait_until("they go on", || {
            (answers.load(Ordering::Relaxed) > asked + 300).then_some(())
        });
        assert_eq!(
            evictions(),
            before,
            "who is used stays, and who is not stays away"
        );
    });
    for frontend in &frontends {
        let status = frontend.status(&service);
        assert!(
            status["counts"]["answered"].as_u64() > Some(20),
            "{status:#}"
        );
        assert_eq!(status["instances"][2]["requests"], 0, "{status:#}");
        assert_eq!(status["counts"]["failed"], 0);
    }
    service.until_here("both are idle", &[false; 3]);
}

#[test]
fn an_instance_that_is_killed_loses_no_request_and_serves_again() {
    let mut service = Service::start(2, "60s");
    let frontend = service.frontend(&["--least", "2"]);
    let failures = |service: &Service| {
        let status = frontend.status(service);
        status["instances"][0]["failures"].as_u64().unwrap_or(0)
    };
    let requests = |service: &Service| {
        let status = frontend.status(service);
        status["instances"][0]["requests"].as_u64().unwrap_or(0)
    };
    under_load(&[frontend.address], 4, |answers| {
        wait_until("both have some", || (requests(&service) > 5).then_some(()));
        service.instances[0].kill();
        wait_until("it is noticed", || (failures(&service) > 0).then_some(()));
        let before = answers.load(Ordering::Relaxed);
        wait_until("the other one goes on", || {
            (answers.load(Ordering::Relaxed) > before + 20).then_some(())
        });
        // Its name is free when the arbiter has seen its end.
        wait_until("its job has ended", || {
            let job = service.sandbox.job_status("i0");
            job.is_none_or(|job| job.processes.is_empty()).then_some(())
        });
        service.instances[0] = service.instance(0);
        let had = requests(&service);
        wait_until("it serves again", || {
            (requests(&service) > had + 5).then_some(())
        });
    });
    let status = frontend.status(&service);
    assert_eq!(status["counts"]["failed"], 0, "{status:#}");
    assert!(status["counts"]["retries"].as_u64() > Some(0), "{status:#}");
}

#[test]
fn requests_go_on_while_there_is_no_arbiter() {
    let sandbox = Sandbox::new();
    let mut arbiter = sandbox.arbiter();
    let mut service = Service {
        sandbox,
        instances: Vec::new(),
        evict_after: "1s",
    };
    for at in 0..2 {
        let instance = service.instance(at);
        service.instances.push(instance);
    }
    let mut frontend = service.frontend(&["--history", "3s"]);
    wait_until("the arbiter is heard", || {
        (frontend.status(&service)["arbiter"] == true).then_some(())
    });
    let mut next = None;
    under_load(&[frontend.address], 4, |answers| {
        let goes_on = |what: &str| {
            let before = answers.load(Ordering::Relaxed);
            wait_until(what, || {
                (answers.load(Ordering::Relaxed) > before + 20).then_some(())
            });
        };
        goes_on("with an arbiter");
        arbiter.kill();
        wait_until("its end is noticed", || {
            (frontend.status(&service)["arbiter"] == false).then_some(())
        });
        goes_on("without an arbiter");
        next = Some(service.sandbox.arbiter());
        wait_until("the next one is heard", || {
            let status = frontend.status(&service);
            let known = status["instances"][0]["memory"] != "unknown";
            (status["arbiter"] == true && known).then_some(())
        });
        goes_on("with the next one");
    });
    service.until_here("what is idle leaves under the next one", &[false; 2]);
    assert_eq!(frontend.status(&service)["counts"]["failed"], 0);
    frontend.signal(Signal::SIGTERM);
    let mut lines = String::new();
    testbed::within::read_to_end(&mut frontend.stderr, &mut lines);
    assert!(
        lines.contains("does not say") && lines.contains("says again"),
        "{lines}"
    );
}

#[test]
fn a_frontend_that_ends_answers_what_it_has_and_the_next_one_takes_over() {
    let service = Service::start(1, "60s");
    let socket = format!("unix:{}", service.sandbox.path("front").display());
    let start = || {
        let mut command = service
            .sandbox
            .sublet(["frontend", "run", "--sla", "p90=2s"]);
        let instance = format!("i0=unix:{}", service.socket(0).display());
        command.args(["--listen", &socket, "--instance", &instance]);
        Running::start(&mut command)
    };
    let ask = || {
        let mut stream = UnixStream::connect(service.sandbox.path("front")).ok()?;
        stream.set_read_timeout(Some(PATIENCE)).ok()?;
        let request = b"GET /digit/1 HTTP/1.1\r\nHost: a\r\n\r\n";
        stream.write_all(request).ok()?;
        Some(stream)
    };
    let mut frontend = start();
    // Three at once, each 20 ms of the device: some of them are under way.
    let streams: Vec<UnixStream> = (0..3).map(|_| wait_until("it listens", ask)).collect();
    let mut first = streams.into_iter();
    let mut one = first.next().expect("the first");
    let mut byte = [0];
    one.read_exact(&mut byte).expect("an answer");
    frontend.signal(Signal::SIGTERM);
    for mut stream in first {
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("an answer");
        // One that the frontend had not taken in yet has nothing.
        assert!(text.is_empty() || text.contains("\"digit\":1"), "{text}");
    }
    let ended = frontend.wait();
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(
        !service.sandbox.path("front").exists(),
        "its socket is gone"
    );
    // One that is killed leaves its socket behind, which is in nobody's way.
    frontend = start();
    wait_until("it listens", ask);
    frontend.kill();
    drop(frontend);
    assert!(service.sandbox.path("front").exists());
    let next = start();
    let mut stream = wait_until("the next one answers", ask);
    stream.read_exact(&mut byte).expect("an answer");
    next.signal(Signal::SIGINT);
    assert_eq!(next.wait().code, Some(0));
}

#[test]
fn words_that_make_no_sense_are_one_line() {
    let sandbox = Sandbox::new();
    let run = |words: &[&str]| {
        let all = [
            "frontend",
            "run",
            "--listen",
            "127.0.0.1:0",
            "--sla",
            "p99=1s",
        ];
        let outcome = Outcome::of(&mut sandbox.sublet(all.iter().chain(words)));
        assert_eq!(
            (outcome.code, outcome.stdout.as_str()),
            (Some(125), ""),
            "{words:?}"
        );
        assert_eq!(outcome.stderr.lines().count(), 1, "{}", outcome.stderr);
        outcome.stderr
    };
    let one = ["--instance", "a=127.0.0.1:1"];
    for (words, word) in [
        (
            &["--instance", "a=127.0.0.1:1", "--instance", "a=127.0.0.1:2"][..],
            "`a`",
        ),
        (
            &["--instance", "a=127.0.0.1:1", "--instance", "b=127.0.0.1:1"],
            "127.0.0.1:1",
        ),
        (&[one[0], one[1], "--least", "2"], "--least 2"),
        (&[one[0], one[1], "--burst", "NaN"], "`NaN`"),
        (&[one[0], one[1], "--burst", "-1"], "-1"),
        (&[one[0], one[1], "--frontends", "0"], "'0'"),
        (&[one[0], one[1], "--most", "99999999999"], "99999999999"),
        (&[one[0], one[1], "--history", "1s"], "2s to 1h"),
        (&[one[0], one[1], "--timeout", "1ms"], "`1ms`"),
        (&[one[0], one[1], "--max-body", "2GiB"], "1GiB"),
        (&[one[0], one[1], "--listen", "unix:relative"], "--listen"),
        (&[one[0], one[1], "--admin", "9465"], "--admin"),
    ] {
        let line = run(words);
        assert!(line.contains(word), "{words:?}: {line}");
    }
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let taken = taken
        .local_addr()
        .map(|at| (at.to_string(), taken))
        .expect("an address");
    let line = run(&[one[0], one[1], "--admin", &taken.0]);
    assert!(line.contains("another --admin"), "{line}");
    let outcome = Outcome::of(&mut sandbox.sublet(["frontend", "status", "127.0.0.1:1"]));
    assert_eq!(outcome.code, Some(125));
    assert!(
        outcome
            .stderr
            .contains("no frontend answers at 127.0.0.1:1"),
        "{outcome:?}"
    );
    let outcome = Outcome::of(&mut sandbox.sublet(["run", "--sim", "--evict-after", "1s", "true"]));
    assert_eq!(outcome.code, Some(125));
    assert!(outcome.stderr.contains("evictable"), "{outcome:?}");
}
