//! Clients that are slow, silent, many or greedy: they lose their own connections, and nobody else
//! waits.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use testbed::http::Http;

use super::{connect, get};
use crate::bench::{Daemon, Worker, attach, named, until};

#[test]
fn slow_clients_lose_their_connections_and_hold_up_nobody() {
    let daemon = Daemon::start();
    let begun: [&[u8]; 4] = [
        b"",
        b"GET /v1/sta",
        b"GET /v1/status HTTP/1.1\r\nhost: x\r\n",
        b"PATCH /v1/jobs/a HTTP/1.1\r\nhost: x\r\ncontent-length: 20\r\n\r\n{\"share\":",
    ];
    let mut slow: Vec<Http> = begun
        .iter()
        .map(|bytes| {
            let mut http = connect(&daemon);
            http.send(bytes).expect("sent");
            http
        })
        .collect();
    // Meanwhile others are answered.
    for _ in 0..20 {
        assert!(
            get(&daemon, "/v1/jobs")
                .as_array()
                .is_some_and(Vec::is_empty)
        );
        assert!(daemon.operator().list().expect("served").is_empty());
    }
    for http in &mut slow {
        // The end, or an answer that says why and then the end.
        while http.line().is_ok() {}
    }
    assert!(get(&daemon, "/v1/jobs").is_array());
}

#[test]
fn who_does_not_read_its_answers_is_left_alone_and_ends() {
    let daemon = Daemon::start();
    let mut job = named("a", 0.0);
    job.settings.share = None;
    job.command = vec!["x".repeat(60_000)];
    daemon.operator().register(job).expect("registered");
    let mut http = connect(&daemon);
    let ask = b"GET /v1/openapi.json HTTP/1.1\r\nhost: x\r\n\r\n";
    http.socket().set_nonblocking(true).expect("set");
    // As many requests as the kernel takes; no answer is read.
    let mut sent = 0;
    while sent < 100_000 && http.send(ask).is_ok() {
        sent += 1;
    }
    assert!(
        sent < 100_000,
        "{sent} requests were taken of one who reads nothing"
    );
    assert!(get(&daemon, "/v1/jobs").is_array());
    http.socket().set_nonblocking(false).expect("set");
    until("its connection ends", || {
        http.send(ask).is_err().then_some(())
    });
}

#[test]
fn a_process_has_so_many_connections_and_the_silent_ones_give_way() {
    let daemon = Daemon::start();
    let mut open: Vec<Http> = (0..40).map(|_| connect(&daemon)).collect();
    // The last of them are served.
    for http in open.iter_mut().rev().take(20) {
        let answer = http.ask("GET", "/v1/jobs", None).expect("answered");
        assert_eq!(answer.status, 200);
    }
    let served = open
        .iter_mut()
        .filter_map(|http| http.ask("GET", "/v1/jobs", None).ok())
        .count();
    assert!(served <= 32, "{served} connections of one process");
    // Several hundred more, one after the other and all at once.
    for _ in 0..300 {
        open.push(connect(&daemon));
    }
    assert!(get(&daemon, "/v1/jobs").is_array());
    assert!(daemon.operator().list().expect("served").is_empty());
}

#[test]
fn floods_of_requests_stop_nobodys_slices_and_nobodys_answers() {
    let daemon = Daemon::start();
    let mut operator = daemon.operator();
    let workers = ["a", "b"].map(|name| {
        let job = operator.register(named(name, 0.5)).expect("registered");
        Worker::start(attach(&job))
    });
    let path = daemon.dir.api_socket();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for word in [
            &b"GET /v1/status HTTP/1.1\r\nhost: x\r\n\r\n"[..],
            b"PATCH /v1/jobs/a HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}",
            b"\r\n",
            b"x",
        ] {
            let (path, over) = (path.clone(), &over);
            scope.spawn(move || {
                let many = word.repeat(60_000 / word.len());
                while !over.load(Relaxed) {
                    let Ok(mut http) = Http::connect(&path) else {
                        continue;
                    };
                    // Nobody reads the answers.
                    let timeout = Some(std::time::Duration::from_millis(20));
                    http.socket().set_write_timeout(timeout).expect("set");
                    while !over.load(Relaxed) && http.send(&many).is_ok() {}
                }
            });
        }
        for _ in 0..10 {
            let before = workers.each_ref().map(Worker::launches);
            until("both go on", || {
                let now = workers.each_ref().map(Worker::launches);
                (now[0] > before[0] + 50 && now[1] > before[1] + 50).then_some(())
            });
            assert_eq!(daemon.operator().list().expect("served").len(), 2);
            assert_eq!(get(&daemon, "/v1/jobs").as_array().map(Vec::len), Some(2));
        }
        over.store(true, Relaxed);
    });
}

#[test]
fn a_client_that_has_gone_leaves_nothing_behind() {
    let daemon = Daemon::start();
    let descriptors = || std::fs::read_dir("/proc/self/fd").expect("ours").count();
    get(&daemon, "/v1/jobs");
    let before = descriptors();
    for number in 0..200 {
        let mut http = connect(&daemon);
        let half = number % 40;
        let ask = b"GET /v1/status HTTP/1.1\r\nhost: x\r\n\r\n";
        http.send(&ask[..half.min(ask.len())]).expect("sent");
    }
    get(&daemon, "/v1/jobs");
    // Other tests of this process open and close some as well.
    until("their descriptors are given back", || {
        (descriptors() < before + 100).then_some(())
    });
}
