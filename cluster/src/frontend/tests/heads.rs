//! Heads of requests and answers: lengths that contradict each other, fields of one connection,
//! and what would be passed on as something else.

use super::*;

/// What an instance gets of these bytes, or what the client hears.
fn passed(live: &Live, heard: &std::sync::mpsc::Receiver<String>, bytes: &str) -> (String, String) {
    let text = live.ask(bytes);
    (
        heard.try_recv().unwrap_or_default().to_ascii_lowercase(),
        text,
    )
}

fn listening() -> (Fake, std::sync::mpsc::Receiver<String>) {
    let (said, heard) = std::sync::mpsc::channel();
    let said = Mutex::new(said);
    let fake = Fake::start(move |_, mut stream| {
        let (head, body) = request(&mut stream);
        let _ = said.lock().send(head + &String::from_utf8_lossy(&body));
        let _ = stream.write_all(OK.as_bytes());
    });
    (fake, heard)
}

#[test]
fn a_request_has_one_length_and_one_host() {
    let (fake, heard) = listening();
    let live = Live::start(&[&fake.address], |_| {});
    let close = "Connection: close\r\n";
    for (bytes, status) in [
        (
            format!(
                "POST / HTTP/1.1\r\nHost: h\r\n{close}Content-Length: 2\r\nContent-Length: 3\r\n\r\nabc"
            ),
            "400",
        ),
        (
            format!("POST / HTTP/1.1\r\nHost: h\r\n{close}Content-Length: +2\r\n\r\nab"),
            "400",
        ),
        (
            format!("POST / HTTP/1.1\r\nHost: h\r\n{close}Content-Length: 2, 2\r\n\r\nab"),
            "400",
        ),
        (
            format!("GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n{close}\r\n"),
            "400",
        ),
        (format!("GET / HTTP/1.1\r\n{close}\r\n"), "400"),
        (format!("GET / HTTP/1.1\r\nHost: a b\r\n{close}\r\n"), "400"),
        (
            format!("GET elsewhere HTTP/1.1\r\nHost: a\r\n{close}\r\n"),
            "400",
        ),
        (
            format!("GET / HTTP/1.1\r\nHost: h\r\n{close}X: 1\r\n folded\r\n\r\n"),
            "400",
        ),
        (
            format!("GET / HTTP/1.1\r\nHost: h\r\n{close}X : 1\r\n\r\n"),
            "400",
        ),
        (
            format!(
                "POST / HTTP/1.1\r\nHost: h\r\n{close}Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n"
            ),
            "501",
        ),
        (
            format!(
                "POST / HTTP/1.1\r\nHost: h\r\n{close}Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n"
            ),
            "501",
        ),
        (
            format!(
                "POST / HTTP/1.1\r\nHost: h\r\n{close}Transfer-Encoding: chunked\r\n\r\nnonsense"
            ),
            "400",
        ),
    ] {
        let (head, text) = passed(&live, &heard, &bytes);
        assert!(
            text.starts_with(&format!("HTTP/1.1 {status} ")),
            "{bytes}: {text}"
        );
        assert_eq!(head, "", "{bytes}");
    }
    // Both kinds of length: the chunks count, and nothing after them is a request.
    let both = "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 100\r\nTransfer-Encoding: chunked\r\n\r\n\
                2;ext=\"x\"\r\nhi\r\n0\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: h\r\n\r\n";
    let (head, text) = passed(&live, &heard, both);
    assert!(text.starts_with("HTTP/1.1 200 "), "{text}");
    assert!(
        head.contains("content-length: 2\r\n") && head.ends_with("\r\n\r\nhi"),
        "{head}"
    );
    assert!(!head.contains("transfer-encoding"), "{head}");
    assert!(heard.try_recv().is_err(), "one request");
    assert_eq!((live.report)().counts.requests, 1);
}

#[test]
fn the_host_is_that_of_the_target() {
    let (fake, heard) = listening();
    let live = Live::start(&[&fake.address], |_| {});
    for (line, fields, first, host) in [
        (
            "GET http://there:81/a?b#c HTTP/1.1",
            "Host: h\r\n",
            "get /a?b http/1.1\r\n",
            "host: there:81\r\n",
        ),
        (
            "GET http://user@there/ HTTP/1.1",
            "Host: h\r\n",
            "get / http/1.1\r\n",
            "host: there\r\n",
        ),
        (
            "OPTIONS * HTTP/1.1",
            "Host: h\r\n",
            "options * http/1.1\r\n",
            "host: h\r\n",
        ),
        (
            "GET //a/b HTTP/1.1",
            "Host: h\r\n",
            "get //a/b http/1.1\r\n",
            "host: h\r\n",
        ),
        (
            "GET / HTTP/1.0",
            "",
            "get / http/1.1\r\n",
            "host: localhost\r\n",
        ),
        (
            "GET / HTTP/1.1",
            "Host: [::1]:80\r\n",
            "get / http/1.1\r\n",
            "host: [::1]:80\r\n",
        ),
        (
            "GET / HTTP/1.1",
            "Host:\r\n",
            "get / http/1.1\r\n",
            "host: \r\n",
        ),
        // Nobody loses what is meant for everybody.
        (
            "GET / HTTP/1.1",
            "Host: h\r\nConnection: host\r\n",
            "get / http/1.1\r\n",
            "host: h\r\n",
        ),
    ] {
        let (head, text) = passed(
            &live,
            &heard,
            &format!("{line}\r\n{fields}Connection: close\r\n\r\n"),
        );
        assert!(text.ends_with("yes"), "{line}: {text}");
        assert!(head.starts_with(first), "{line}: {head}");
        assert_eq!(head.matches("host: ").count(), 1, "{line}: {head}");
        assert!(head.contains(host), "{line}: {head}");
    }
}

#[test]
fn a_connection_goes_on_after_what_is_not_done() {
    let (fake, heard) = listening();
    let live = Live::start(&[&fake.address], |_| {});
    // As Java's client and `curl --http2` ask first.
    let upgrade = "GET /1 HTTP/1.1\r\nHost: h\r\nConnection: Upgrade, HTTP2-Settings\r\n\
                   Upgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n\r\n";
    let expects = "POST /2 HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\
                   Connection: close\r\nX-Forwarded-For: 1.2.3.4\r\n\r\n";
    let mut stream = live.connect();
    stream
        .write_all((upgrade.to_owned() + expects).as_bytes())
        .unwrap();
    let mut bytes = Vec::new();
    let mut part = [0; 1000];
    while !String::from_utf8_lossy(&bytes).contains("HTTP/1.1 100 ") {
        let read = stream.read(&mut part).unwrap();
        assert!(read > 0, "{}", String::from_utf8_lossy(&bytes));
        bytes.extend_from_slice(&part[..read]);
    }
    stream.write_all(b"hi").unwrap();
    let text = String::from_utf8_lossy(&bytes).into_owned() + &rest(&mut stream);
    assert_eq!(text.matches("HTTP/1.1 200 OK").count(), 2, "{text}");
    let first = heard.recv_timeout(PATIENCE).unwrap().to_ascii_lowercase();
    assert!(
        first.starts_with("get /1 ") && !first.contains("http2-settings"),
        "{first}"
    );
    let second = heard.recv_timeout(PATIENCE).unwrap().to_ascii_lowercase();
    assert!(
        second.ends_with("\r\n\r\nhi") && !second.contains("expect"),
        "{second}"
    );
    assert!(second.contains("x-forwarded-for: 1.2.3.4\r\n"), "{second}");
}

#[test]
fn an_answer_that_cannot_be_passed_on_is_none() {
    for wrong in [
        "HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\nbytes",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\nhi",
        "HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nhi",
        "HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\nhi",
        "HTTP/1.1 99 Low\r\n\r\n",
        "HTTP/2.0 200 OK\r\n\r\n",
    ] {
        let fake = Fake::says(wrong);
        let live = Live::start(&[&fake.address], |_| {});
        let text = live.post();
        assert!(text.starts_with("HTTP/1.1 502 "), "{wrong}: {text}");
        until("it is counted", || (live.report)().counts.failed == 1);
        assert_eq!((live.report)().instances[0].failures, 1, "{wrong}");
    }
    // The chunks count, whatever the length beside them says.
    for length in ["1", "99"] {
        let text = format!(
            "HTTP/1.1 200 OK\r\ncontent-length: {length}\r\ntransfer-encoding: chunked\r\n\r\n\
             3\r\nyes\r\n0\r\n\r\n"
        );
        let fake = Fake::says(text.leak());
        let live = Live::start(&[&fake.address], |_| {});
        let text = live.get();
        assert!(text.ends_with("\r\n3\r\nyes\r\n0\r\n\r\n"), "{text}");
        assert!(!text.contains("content-length"), "{text}");
    }
}
