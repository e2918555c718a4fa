//! Clients that take places, and what becomes of the next one.

use super::*;

fn half_a_body(live: &Live) -> TcpStream {
    let mut stream = live.connect();
    let head =
        b"POST / HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 9000\r\n\r\n";
    stream.write_all(head).unwrap();
    // So its head is known.
    let mut go_on = [0; 25];
    stream.read_exact(&mut go_on).unwrap();
    stream.write_all(b"half").unwrap();
    stream
}

#[test]
fn bodies_that_do_not_come_give_way() {
    let fake = Fake::says(OK);
    let live = Live::start(&[&fake.address], |options| options.connections = 4);
    let mut slow: Vec<TcpStream> = (0..4).map(|_| half_a_body(&live)).collect();
    until("a newcomer is served", || live.get().ends_with("yes"));
    // The first ones went, and the last one is there still.
    assert_eq!(rest(&mut slow[0]), "");
    let mut last = slow.pop().unwrap();
    last.write_all(&[b'x'; 8996]).unwrap();
    let mut start = [0; 15];
    last.read_exact(&mut start).unwrap();
    assert_eq!(&start, b"HTTP/1.1 200 OK");
}

#[test]
fn who_finds_no_place_hears_so() {
    let (fake, release) = Fake::holding(|_| true);
    let live = Live::start(&[&fake.address], |options| options.connections = 2);
    let ask = || {
        let mut stream = live.connect();
        stream
            .write_all(b"GET / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
            .unwrap();
        stream
    };
    let mut all = [ask(), ask()];
    until("both are under way", || {
        let status = (live.report)();
        status.waiting == 1 && fake.had() == 1
    });
    for _ in 0..5 {
        let text = rest(&mut ask());
        assert!(text.starts_with("HTTP/1.1 503 "), "{text}");
        assert!(
            text.contains("retry-after: 1\r\n") && text.contains("--connections"),
            "{text}"
        );
    }
    // However many come and say nothing.
    let silent: Vec<TcpStream> = (0..200).map(|_| live.connect()).collect();
    drop(silent);
    drop(release);
    for one in &mut all {
        assert!(rest(one).ends_with("yes"));
    }
    assert_eq!((live.report)().counts.requests, 2);
}

#[test]
fn a_client_that_reads_slowly_gives_way_when_its_time_is_up() {
    let long = Fake::start(|number, mut stream| {
        request(&mut stream);
        if number > 0 {
            let _ = stream.write_all(OK.as_bytes());
            return;
        }
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 67108864\r\n\r\n");
        let _ = stream.write_all(&vec![b'x'; 64 << 20]);
    });
    let live = Live::start(&[&long.address], |options| {
        options.timeout = Duration::from_secs(1);
        options.connections = 1;
    });
    let mut slow = live.connect();
    slow.write_all(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")
        .unwrap();
    until("it has its instance", || long.had() == 1);
    let over = Arc::new(AtomicU32::new(0));
    let ends = Arc::clone(&over);
    let reading = std::thread::spawn(move || {
        // A little now and then, so that it is never silent.
        let mut part = [0; 100];
        while ends.load(Ordering::Relaxed) == 0 && slow.read(&mut part).is_ok_and(|read| read > 0) {
            std::thread::sleep(Duration::from_millis(50));
        }
    });
    until("a newcomer is served", || live.get().ends_with("yes"));
    over.store(1, Ordering::Relaxed);
    reading.join().unwrap();
    assert_eq!(
        (live.report)().instances[0].failures,
        0,
        "it was not the instance"
    );
}

#[test]
fn a_client_that_sends_too_much_hears_so() {
    let fake = Fake::says(OK);
    let live = Live::start(&[&fake.address], |options| options.body_bytes = 1000);
    let body = vec![b'x'; 16 << 20];
    for head in [
        "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 16777216\r\n\r\n",
        "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n1000000\r\n",
    ] {
        let mut stream = live.connect();
        stream.write_all(head.as_bytes()).unwrap();
        // As clients do that send all of it before they read.
        let sent = stream.write_all(&body);
        let text = rest(&mut stream);
        assert!(text.starts_with("HTTP/1.1 413 "), "{sent:?}: {text}");
        assert!(text.contains("--max-body"), "{text}");
    }
    assert_eq!(fake.had(), 0);
}
