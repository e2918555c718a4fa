//! Instances that come, go, refuse and are not what they were said to be.

use super::*;

/// An instance that reads no body it does not want is no broken one.
#[test]
fn an_answer_before_the_body_is_the_answer() {
    let picky = Fake::start(|_, mut stream| {
        let mut head = [0; 64];
        let _ = stream.read(&mut head);
        let answer =
            "HTTP/1.1 413 Content Too Large\r\nconnection: close\r\ncontent-length: 4\r\n\r\nless";
        let _ = stream.write_all(answer.as_bytes());
        // What it has not read ends its connection with a reset.
    });
    let live = Live::start(&[&picky.address], |options| {
        options.body_bytes = 32 << 20;
        options.bodies_bytes = 64 << 20;
    });
    let body = "x".repeat(16 << 20);
    for _ in 0..4 {
        let text = live.ask(&format!(
            "POST / HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        ));
        assert!(
            text.starts_with("HTTP/1.1 413 ") && text.ends_with("less"),
            "{text}"
        );
    }
    until("all are counted", || (live.report)().counts.answered == 4);
    assert_eq!((live.report)().instances[0].failures, 0);
}

#[test]
fn a_frontend_is_no_instance_of_itself() {
    let listener = Listener::bind(&"127.0.0.1:0".parse().unwrap()).unwrap();
    let own = listener.address().to_string();
    let prepared = Prepared::new(options(&[&own])).unwrap();
    let error = prepared
        .run(listener, Box::new(|| Err("none".into())), |_| {})
        .unwrap_err();
    assert!(error.to_string().contains(&own), "{error}");
    // Two that have each other as instances: a request goes round once.
    let places: Vec<TcpListener> = (0..2)
        .map(|_| TcpListener::bind("127.0.0.1:0").unwrap())
        .collect();
    let address = |at: usize| places[at].local_addr().unwrap().to_string();
    let (one, two) = (address(0), address(1));
    drop(places);
    let first = Live::at(&one, &[&two], |_| {});
    let second = Live::at(&two, &[&one], |_| {});
    let text = first.get();
    assert!(
        text.starts_with("HTTP/1.1 508 ") && text.contains("frontend"),
        "{text}"
    );
    assert_eq!((second.report)().counts.requests, 1);
}

/// A Unix socket whose queue is full refuses at once, and is busy.
#[test]
fn an_instance_whose_queue_is_full_is_busy() {
    use rustix::net;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let socket = net::socket(net::AddressFamily::UNIX, net::SocketType::STREAM, None).unwrap();
    net::bind(&socket, &net::SocketAddrUnix::new(&path).unwrap()).unwrap();
    net::listen(&socket, 0).unwrap();
    let full = std::os::unix::net::UnixStream::connect(&path).unwrap();
    let live = Live::start(&[&format!("unix:{}", path.display())], |_| {});
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| live.post());
        until("it is asked again and again", || {
            (live.report)().counts.retries > 5
        });
        assert_eq!((live.report)().instances[0].failures, 0);
        let listener = UnixListener::from(socket);
        drop(full);
        drop(listener.accept().unwrap());
        let (mut stream, _) = listener.accept().unwrap();
        let mut head = [0; 1000];
        let _ = stream.read(&mut head).unwrap();
        stream.write_all(OK.as_bytes()).unwrap();
        drop(stream);
        assert!(asking.join().unwrap().ends_with("yes"));
    });
    assert_eq!((live.report)().counts.failed, 0);
}

#[test]
fn an_instance_that_comes_back_at_its_place_is_used_again() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let place = listener.local_addr().unwrap();
    drop(listener);
    let live = Live::start(&[&place.to_string()], |_| {});
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| live.post());
        until("it is missed", || (live.report)().instances[0].failures > 1);
        let listener = TcpListener::bind(place).unwrap();
        let (mut stream, _) = listener.accept().unwrap();
        request(&mut stream);
        stream.write_all(OK.as_bytes()).unwrap();
        drop(stream);
        assert!(asking.join().unwrap().ends_with("yes"));
    });
    let status = (live.report)();
    assert_eq!((status.counts.answered, status.counts.requests), (1, 1));
}

/// What is the matter with one instance is said once, however many requests meet it.
#[test]
fn the_log_does_not_grow_with_the_requests() {
    let bad = Fake::start(|_, mut stream| {
        request(&mut stream);
        std::thread::sleep(Duration::from_millis(50));
    });
    let live = Live::start(&[&bad.address], |options| {
        options.terms.concurrency = 16;
        options.timeout = Duration::from_secs(10);
    });
    std::thread::scope(|scope| {
        for _ in 0..12 {
            scope.spawn(|| live.post());
        }
    });
    assert_eq!((live.report)().counts.failed, 12);
    let lines = live.lines.lock().clone();
    let about = lines.iter().filter(|line| line.contains("`i0`")).count();
    assert_eq!(about, 1, "{lines:?}");
}
