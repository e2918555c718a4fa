//! HTTP/1.1 as far as the client speaks it: one request and its answer at a time, over a connected
//! Unix socket, with a deadline for both together and bounds on what comes back. Knows no path and
//! no type of an answer.

use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// Longest head of an answer, and the most fields of one.
const HEAD_BYTES: usize = 16 << 10;
const HEAD_FIELDS: usize = 32;
/// Longest body of an answer. A status of a thousand jobs stays below a megabyte.
pub const BODY_BYTES: usize = 4 << 20;
/// Bytes read at a time.
const CHUNK: usize = 16 << 10;

/// An answer, whole.
#[derive(Debug)]
pub struct Answer {
    /// 200 and its like.
    pub status: u16,
    /// As long as its head said.
    pub body: Vec<u8>,
}

/// Why there is none.
#[derive(Debug)]
pub enum NoAnswer {
    /// The deadline has passed.
    TooLate,
    /// The other side has ended the connection.
    HungUp,
    /// What came is no answer; what is wrong with it.
    Nonsense(String),
    /// The socket fails.
    Io(io::Error),
}

impl From<io::Error> for NoAnswer {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => Self::TooLate,
            ErrorKind::BrokenPipe | ErrorKind::ConnectionReset => Self::HungUp,
            _ => Self::Io(error),
        }
    }
}

/// One connection.
#[derive(Debug)]
pub struct Http {
    stream: UnixStream,
    /// Read, and part of no answer yet.
    input: Vec<u8>,
}

impl Http {
    /// Over a socket that is connected and may block.
    pub fn over(stream: UnixStream) -> Self {
        let input = Vec::new();
        Self { stream, input }
    }

    /// The socket.
    pub fn socket(&self) -> &UnixStream {
        &self.stream
    }

    /// Asks and waits for the answer, until `end`. After an error the connection is of no use.
    ///
    /// # Errors
    /// [`NoAnswer`]
    pub fn ask(
        &mut self,
        method: &str,
        target: &str,
        body: Option<&[u8]>,
        end: Instant,
    ) -> Result<Answer, NoAnswer> {
        if !self.input.is_empty() {
            return Err(NoAnswer::Nonsense("it speaks without being asked".into()));
        }
        let mut request = format!("{method} {target} HTTP/1.1\r\nhost: localhost\r\n").into_bytes();
        if let Some(body) = body {
            let head = "content-type: application/json\r\ncontent-length: ";
            request.extend_from_slice(format!("{head}{}\r\n\r\n", body.len()).as_bytes());
            request.extend_from_slice(body);
        } else {
            // Of a method that may have a body.
            let length = if method == "GET" {
                ""
            } else {
                "content-length: 0\r\n"
            };
            request.extend_from_slice(format!("{length}\r\n").as_bytes());
        }
        match self.write(&request, end) {
            // It may have answered before it hung up: the request was too long, or not allowed.
            Ok(()) | Err(NoAnswer::HungUp) => {}
            Err(other) => return Err(other),
        }
        loop {
            let (status, length) = self.head(end)?;
            while self.input.len() < length {
                self.read(end)?;
            }
            let body = self.input.drain(..length).collect();
            // 100 and its like come before an answer.
            if status >= 200 {
                return Ok(Answer { status, body });
            }
        }
    }

    /// Takes the next head: its status, and how long the body is.
    fn head(&mut self, end: Instant) -> Result<(u16, usize), NoAnswer> {
        loop {
            if let Some((bytes, status, length)) = parse(&self.input)? {
                self.input.drain(..bytes);
                return Ok((status, length));
            }
            if self.input.len() > HEAD_BYTES {
                let text = format!("its head has more than {HEAD_BYTES} bytes");
                return Err(NoAnswer::Nonsense(text));
            }
            self.read(end)?;
        }
    }

    fn read(&mut self, end: Instant) -> Result<(), NoAnswer> {
        let mut chunk = [0; CHUNK];
        loop {
            self.stream.set_read_timeout(Some(left(end)?))?;
            match self.stream.read(&mut chunk) {
                Ok(0) => return Err(NoAnswer::HungUp),
                Ok(count) => {
                    // PANIC: a read returns at most the buffer's length.
                    self.input.extend_from_slice(&chunk[..count]);
                    return Ok(());
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn write(&mut self, mut bytes: &[u8], end: Instant) -> Result<(), NoAnswer> {
        while !bytes.is_empty() {
            self.stream.set_write_timeout(Some(left(end)?))?;
            match self.stream.write(bytes) {
                Ok(0) => return Err(NoAnswer::HungUp),
                Ok(count) => bytes = bytes.get(count..).unwrap_or_default(),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

/// What is left until `end`; a timeout of zero would mean none.
fn left(end: Instant) -> Result<Duration, NoAnswer> {
    let left = end.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(NoAnswer::TooLate);
    }
    Ok(left)
}

/// The head at the beginning of `input`: its bytes, its status, and the length of the body. `None`:
/// it is not whole yet.
fn parse(input: &[u8]) -> Result<Option<(usize, u16, usize)>, NoAnswer> {
    let nonsense = |what: String| NoAnswer::Nonsense(what);
    let mut fields = [httparse::EMPTY_HEADER; HEAD_FIELDS];
    let mut head = httparse::Response::new(&mut fields);
    let bytes = match head.parse(input) {
        Ok(httparse::Status::Complete(bytes)) => bytes,
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(error) => return Err(nonsense(format!("it speaks no HTTP ({error})"))),
    };
    let status = head.code.unwrap_or_default();
    let of = |name: &'static str| {
        let fields = head.headers.iter();
        fields.filter(move |field| field.name.eq_ignore_ascii_case(name))
    };
    let mut lengths = of("content-length");
    let length = match (lengths.next(), lengths.next()) {
        (Some(field), None) => std::str::from_utf8(field.value)
            .ok()
            .filter(|digits| digits.bytes().all(|digit| digit.is_ascii_digit()))
            .and_then(|digits| digits.parse().ok())
            .ok_or_else(|| nonsense("the length of its answer is no number".into()))?,
        // No such answer has a body.
        (None, _) if status < 200 || status == 204 || status == 304 => 0,
        _ => {
            return Err(nonsense(
                "it does not say once how long its answer is".into(),
            ));
        }
    };
    if of("transfer-encoding").next().is_some() {
        return Err(nonsense("its answer comes in chunks".into()));
    }
    if length > BODY_BYTES {
        return Err(nonsense(format!(
            "its answer has {length} bytes, {BODY_BYTES} are taken"
        )));
    }
    Ok(Some((bytes, status, length)))
}

#[cfg(test)]
mod tests {
    use std::thread;

    use proptest::prelude::*;
    use testbed::PATIENCE;

    use super::*;

    /// What comes of an answer that arrives as these parts, after which the connection ends.
    fn hear(parts: Vec<Vec<u8>>) -> Result<(u16, String), String> {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let sends = thread::spawn(move || {
            for part in parts {
                if theirs.write_all(&part).is_err() {
                    break;
                }
            }
        });
        let heard = Http::over(ours).ask("GET", "/", None, Instant::now() + PATIENCE);
        testbed::join(sends);
        match heard {
            Ok(answer) => Ok((answer.status, String::from_utf8(answer.body).unwrap())),
            Err(error) => Err(format!("{error:?}")),
        }
    }

    fn whole(text: &str) -> Result<(u16, String), String> {
        hear(vec![text.as_bytes().to_vec()])
    }

    #[test]
    fn an_answer_is_the_same_in_however_many_parts_it_comes() {
        let text = "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nA: b\r\ncontent-Length: 5\r\n\r\nhello";
        for size in [1, 2, 7, 1000] {
            let parts = text.as_bytes().chunks(size).map(<[u8]>::to_vec).collect();
            assert_eq!(hear(parts), Ok((200, "hello".into())), "{size}");
        }
        let none = whole("HTTP/1.1 204 No Content\r\n\r\n");
        assert_eq!(none, Ok((204, String::new())));
    }

    #[test]
    fn what_is_no_answer_is_named_and_bounded() {
        let endless = format!("HTTP/1.1 200 OK\r\na: {}", "x".repeat(HEAD_BYTES));
        let fields = "a: b\r\n".repeat(HEAD_FIELDS + 1);
        let length = "content-length: 5\r\n";
        for (text, word) in [
            ("hello\n".into(), "no HTTP"),
            ("HTTP/2 200\r\n\r\n".into(), "no HTTP"),
            (endless, "head has more"),
            (format!("HTTP/1.1 200 OK\r\n{fields}\r\n"), "no HTTP"),
            ("HTTP/1.1 200 OK\r\n\r\n".into(), "how long"),
            (
                format!("HTTP/1.1 200 OK\r\n{length}{length}\r\nhello"),
                "how long",
            ),
            (
                format!("HTTP/1.1 200 OK\r\n{length}transfer-encoding: chunked\r\n\r\nhello"),
                "in chunks",
            ),
            (
                "HTTP/1.1 200 OK\r\ncontent-length: +5\r\n\r\nhello".into(),
                "no number",
            ),
            (
                "HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n".into(),
                "no number",
            ),
            (
                "HTTP/1.1 200 OK\r\ncontent-length: 99999999\r\n\r\n".into(),
                "are taken",
            ),
            (
                "HTTP/1.1 200 OK\r\ncontent-length: 99999999999999999999999\r\n\r\n".into(),
                "no number",
            ),
            (String::new(), "HungUp"),
            ("HTTP/1.1 200 OK\r\n".into(), "HungUp"),
            (
                "HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhell".into(),
                "HungUp",
            ),
        ] {
            let error = whole(&text).unwrap_err();
            assert!(
                error.contains(word),
                "{}: {error}",
                text.chars().take(60).collect::<String>()
            );
        }
    }

    #[test]
    fn one_that_trickles_has_one_deadline_for_all_of_it() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let trickles = thread::spawn(move || {
            while theirs.write_all(b"H").is_ok() {
                thread::sleep(Duration::from_millis(1));
                if theirs.write_all(b"TTP/1.1 100 Continue\r\n\r\n").is_err() {
                    break;
                }
            }
        });
        let end = Instant::now() + Duration::from_millis(60);
        let heard = Http::over(ours).ask("GET", "/", None, end);
        assert!(matches!(heard, Err(NoAnswer::TooLate)), "{heard:?}");
        assert!(Instant::now() >= end);
        testbed::join(trickles);
    }

    #[test]
    fn who_refuses_before_it_has_read_all_is_heard() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs
            .write_all(b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\n{}")
            .unwrap();
        // The kernel takes no more than its buffer of those who end reading.
        theirs.shutdown(std::net::Shutdown::Read).unwrap();
        let body = vec![b'x'; 8 << 20];
        // It spoke first, which this connection has not read yet.
        let answer = Http::over(ours).ask("POST", "/", Some(&body), Instant::now() + PATIENCE);
        assert_eq!(answer.unwrap().status, 413);
    }

    #[test]
    fn a_word_too_many_spoils_the_next_answer() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs
            .write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}HTTP/1.1 200 OK")
            .unwrap();
        let mut http = Http::over(ours);
        let end = Instant::now() + PATIENCE;
        assert_eq!(http.ask("GET", "/", None, end).unwrap().body, b"{}");
        let next = http.ask("GET", "/", None, end);
        assert!(matches!(next, Err(NoAnswer::Nonsense(_))), "{next:?}");
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic_or_take_more_than_there_is(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let text = [b"HTTP/1.1 200 OK\r\n", &bytes[..]].concat();
            for input in [&bytes[..], &text] {
                if let Ok(Some((head, _, length))) = parse(input) {
                    prop_assert!(head <= input.len() && length <= BODY_BYTES);
                }
            }
        }
    }
}
