//! What an answer says of its instance, and what it does not.

use super::*;

const NOT_FOUND: &str = "HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\nno";
const BROKEN: &str = "HTTP/1.1 500 Internal Server Error\r\ncontent-length: 5\r\n\r\nouch!";

/// An answer without a body is over with its head.
#[test]
fn an_answer_without_a_body_is_counted_as_one() {
    let fake = Fake::start(|_, mut stream| {
        let (head, _) = request(&mut stream);
        let answer: &[u8] = match head.split(' ').next() {
            Some("HEAD") => b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n",
            Some("PUT") => b"HTTP/1.1 204 No Content\r\ncontent-length: 3\r\n\r\n",
            Some("OPTIONS") => b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
            _ => b"HTTP/1.1 304 Not Modified\r\netag: x\r\ncontent-length: 3\r\n\r\n",
        };
        let _ = stream.write_all(answer);
    });
    let live = Live::start(&[&fake.address], |_| {});
    let mut asked = 0;
    for (method, status, length) in [
        ("HEAD", "200", Some("content-length: 3\r\n")),
        ("PUT", "204", None),
        ("OPTIONS", "200", Some("content-length: 0\r\n")),
        ("GET", "304", None),
    ] {
        for _ in 0..16 {
            let text = live.ask(&format!(
                "{method} / HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
            ));
            assert!(text.starts_with(&format!("HTTP/1.1 {status} ")), "{text}");
            assert!(text.ends_with("\r\n\r\n"), "{method}: {text}");
            match length {
                Some(length) => assert!(text.contains(length), "{method}: {text}"),
                None if method == "PUT" => {
                    assert!(!text.contains("content-length"), "{method}: {text}");
                }
                None => {}
            }
            asked += 1;
        }
    }
    until("all are over", || {
        let counts = (live.report)().counts;
        counts.answered + counts.left + counts.failed == asked
    });
    let counts = (live.report)().counts;
    assert_eq!((counts.answered, counts.left), (asked, 0), "{counts:?}");
}

/// What a client has asked wrongly is its own fault: no time of service, and nothing against the
/// instance.
#[test]
fn a_refused_request_is_answered_and_no_time_of_service() {
    let fake = Fake::says(NOT_FOUND);
    let live = Live::start(&[&fake.address], |_| {});
    for _ in 0..40 {
        assert!(live.get().ends_with("no"));
    }
    until("all are counted", || (live.report)().counts.answered == 40);
    let status = (live.report)();
    assert_eq!(status.service_s, None, "{status:?}");
    assert_eq!((status.counts.failed, status.counts.in_time), (0, 40));
    assert_eq!(status.instances[0].failures, 0);
}

/// An instance whose GPU is lost answers every request at once, and with an error: it is the one
/// that is always free.
#[test]
fn one_that_answers_errors_is_no_fast_one() {
    let (bad, good) = (Fake::says(BROKEN), Fake::says(OK));
    let live = Live::start(&[&bad.address, &good.address], |_| {});
    let mut errors = 0;
    for _ in 0..60 {
        let text = live.get();
        assert!(text.ends_with("yes") || text.ends_with("ouch!"), "{text}");
        errors += u64::from(text.ends_with("ouch!"));
    }
    until("all are counted", || {
        let counts = (live.report)().counts;
        counts.answered + counts.failed == 60
    });
    let status = (live.report)();
    assert_eq!(status.counts.failed, errors, "an error is no answer");
    assert_eq!(status.counts.in_time, status.counts.answered);
    assert_eq!(status.instances[0].failures, errors);
    assert!(errors < 20, "{errors} of 60 went to it");
    assert!(live.lines.lock().iter().any(|line| line.contains("500")));
    // Where there is no other one, it is what there is.
    let live = Live::start(&[&bad.address], |_| {});
    for _ in 0..10 {
        assert!(live.get().ends_with("ouch!"));
    }
}
