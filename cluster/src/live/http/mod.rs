//! As much of HTTP/1.1 as one JSON API needs, on blocking sockets: a length before every body,
//! nothing chunked, a bound on all input from strangers and a deadline on every wait. The heads are
//! read by `httparse`.

pub mod client;
pub mod server;

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use super::auth::Signature;

/// Scheme of the `Authorization` field.
pub const SCHEME: &str = "Sublet";
/// Field of an answer with its code.
pub const CODE_FIELD: &str = "Sublet-Code";
/// Longest head of a message.
pub const MAX_HEAD_BYTES: usize = 16 << 10;
/// Longest body. A report about a thousand jobs stays below a megabyte.
pub const MAX_BODY_BYTES: usize = 8 << 20;
/// Most header fields.
const MAX_FIELDS: usize = 64;

/// A message that cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    /// The other side closed the connection between two messages.
    #[error("the connection was closed")]
    Closed,
    /// It took too long.
    #[error("nothing came within {} ms", .0.as_millis())]
    TimedOut(Duration),
    /// It is no HTTP, or more than we take. With the status to answer.
    #[error("{1}")]
    Bad(u16, String),
    /// The socket failed.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// A socket with a deadline for the message in the works.
pub(crate) struct Timed {
    stream: TcpStream,
    /// Bytes that came and were not asked for yet.
    rest: Vec<u8>,
}

pub(crate) enum First {
    Request { method: String, path: String },
    Response { status: u16 },
}

impl Timed {
    pub fn new(stream: TcpStream) -> Self {
        Self::with(stream, Vec::new())
    }

    /// With bytes that came already.
    pub fn with(stream: TcpStream, rest: Vec<u8>) -> Self {
        Self { stream, rest }
    }

    /// Read more until `deadline`; the number of bytes.
    fn more(&mut self, deadline: Instant, patience: Duration) -> Result<usize, HttpError> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(HttpError::TimedOut(patience));
        }
        self.stream.set_read_timeout(Some(left))?;
        let mut chunk = [0; 16 << 10];
        loop {
            match self.stream.read(&mut chunk) {
                Ok(count) => {
                    // PANIC: a read returns at most the buffer's length.
                    self.rest.extend_from_slice(&chunk[..count]);
                    return Ok(count);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if is_timeout(&error) => return Err(HttpError::TimedOut(patience)),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// The head of the next message. Its first byte may take `idle`, all of it `patience` from
    /// there on.
    pub fn head(
        &mut self,
        request: bool,
        idle: Duration,
        patience: Duration,
    ) -> Result<Head, HttpError> {
        if self.rest.is_empty() && self.more(Instant::now() + idle, idle)? == 0 {
            return Err(HttpError::Closed);
        }
        let deadline = Instant::now() + patience;
        loop {
            if let Some(head) = parse(&self.rest, request)? {
                self.rest.drain(..head.bytes);
                return Ok(head);
            }
            if self.more(deadline, patience)? == 0 {
                return Err(HttpError::Bad(
                    400,
                    "the message ends within its head".into(),
                ));
            }
        }
    }

    /// The body of the message whose head was read.
    pub fn body(&mut self, length: usize, patience: Duration) -> Result<Vec<u8>, HttpError> {
        let deadline = Instant::now() + patience;
        while self.rest.len() < length {
            if self.more(deadline, patience)? == 0 {
                let have = self.rest.len();
                let text = format!("the body ends after {have} of {length} bytes");
                return Err(HttpError::Bad(400, text));
            }
        }
        let left = self.rest.split_off(length);
        Ok(std::mem::replace(&mut self.rest, left))
    }

    /// All of it within `patience`, however slowly the other side reads.
    pub fn write(&mut self, mut bytes: &[u8], patience: Duration) -> Result<(), HttpError> {
        let deadline = Instant::now() + patience;
        while !bytes.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(HttpError::TimedOut(patience));
            }
            self.stream.set_write_timeout(Some(left))?;
            match self.stream.write(bytes) {
                Ok(0) => return Err(HttpError::Closed),
                // PANIC: a write takes at most the buffer's length.
                Ok(count) => bytes = &bytes[count..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if is_timeout(&error) => return Err(HttpError::TimedOut(patience)),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
    )
}

/// Everything of a message but its body.
pub(crate) struct Head {
    /// Method and path, or status.
    pub first: First,
    /// Its own length.
    pub bytes: usize,
    /// Of the body.
    pub length: usize,
    /// What came as `Authorization: Sublet`.
    pub signature: Option<Signature>,
    /// What came as `Sublet-Code`.
    pub code: Option<String>,
    /// The connection is to stay.
    pub keep: bool,
}

/// The head at the beginning of `bytes`; `None` where it is not whole yet.
pub(crate) fn parse(bytes: &[u8], request: bool) -> Result<Option<Head>, HttpError> {
    let mut fields = [httparse::EMPTY_HEADER; MAX_FIELDS];
    let bad = |error: httparse::Error| HttpError::Bad(400, format!("this is no HTTP: {error}"));
    let (first, length, version, fields) = if request {
        let mut head = httparse::Request::new(&mut fields);
        let httparse::Status::Complete(length) = head.parse(bytes).map_err(bad)? else {
            return whole_soon(bytes);
        };
        let method = head.method.unwrap_or_default().to_owned();
        let path = head.path.unwrap_or_default().to_owned();
        (
            First::Request { method, path },
            length,
            head.version,
            head.headers,
        )
    } else {
        let mut head = httparse::Response::new(&mut fields);
        let httparse::Status::Complete(length) = head.parse(bytes).map_err(bad)? else {
            return whole_soon(bytes);
        };
        let status = head.code.unwrap_or_default();
        (
            First::Response { status },
            length,
            head.version,
            head.headers,
        )
    };
    let mut head = Head {
        first,
        bytes: length,
        length: 0,
        signature: None,
        code: None,
        keep: version == Some(1),
    };
    let mut lengths = 0;
    for field in fields.iter() {
        let value = String::from_utf8_lossy(field.value);
        let value = value.trim();
        if field.name.eq_ignore_ascii_case("content-length") {
            let number = value
                .parse()
                .ok()
                .filter(|_| value.bytes().all(|b| b.is_ascii_digit()));
            let Some(number) = number else {
                return Err(HttpError::Bad(
                    400,
                    format!("Content-Length is `{value}`, which is no number"),
                ));
            };
            // Two of them are how messages are smuggled.
            lengths += 1;
            head.length = number;
        } else if field.name.eq_ignore_ascii_case("transfer-encoding") {
            let text = "bodies are taken whole, with a Content-Length".to_owned();
            return Err(HttpError::Bad(501, text));
        } else if field.name.eq_ignore_ascii_case("authorization") {
            let (scheme, rest) = value.split_once(' ').unwrap_or((value, ""));
            head.signature = scheme
                .eq_ignore_ascii_case(SCHEME)
                .then(|| Signature::parse(rest))
                .flatten();
        } else if field.name.eq_ignore_ascii_case(CODE_FIELD) {
            head.code = Some(value.to_owned());
        } else if field.name.eq_ignore_ascii_case("connection") {
            head.keep &= !value.eq_ignore_ascii_case("close");
        }
    }
    if lengths > 1 {
        return Err(HttpError::Bad(400, "Content-Length is given twice".into()));
    }
    if head.length > MAX_BODY_BYTES {
        let text = format!(
            "the body has {} bytes, {MAX_BODY_BYTES} are taken",
            head.length
        );
        return Err(HttpError::Bad(413, text));
    }
    Ok(Some(head))
}

/// A head that is not whole yet, and may still become one.
fn whole_soon(bytes: &[u8]) -> Result<Option<Head>, HttpError> {
    if bytes.len() > MAX_HEAD_BYTES {
        let text = format!("the head is longer than {MAX_HEAD_BYTES} bytes");
        return Err(HttpError::Bad(431, text));
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::live::auth::Session;

    fn head(text: &str) -> Result<Option<Head>, HttpError> {
        parse(text.as_bytes(), true)
    }

    #[test]
    fn a_head_is_read_once_it_is_whole() {
        assert!(
            head("GET /v1/jobs HTTP/1.1\r\nHost: x\r\n")
                .unwrap()
                .is_none()
        );
        let text = "POST /v1/jobs HTTP/1.1\r\ncontent-length: 12\r\nAuthorization: Bearer abc\r\nConnection: close\r\n\r\n";
        let head = head(text).unwrap().unwrap();
        assert!(
            matches!(&head.first, First::Request { method, path } if method == "POST" && path == "/v1/jobs")
        );
        assert_eq!(
            (head.bytes, head.length, head.keep),
            (text.len(), 12, false)
        );
        assert!(head.signature.is_none(), "another scheme");
        let signature = Session::default().sign("GET", "/", b"");
        let text = format!("GET / HTTP/1.1\r\nAuthorization: {SCHEME} {signature}\r\n\r\n");
        let head = parse(text.as_bytes(), true).unwrap().unwrap();
        assert_eq!(head.signature, Some(signature));
    }

    #[test]
    fn what_could_be_read_in_two_ways_is_refused() {
        for (fields, status) in [
            ("Content-Length: 1\r\nContent-Length: 1", 400),
            ("Content-Length: +1", 400),
            ("Content-Length: -1", 400),
            ("Content-Length: 99999999", 413),
            ("Transfer-Encoding: chunked", 501),
        ] {
            let text = format!("POST / HTTP/1.1\r\n{fields}\r\n\r\n");
            let Err(HttpError::Bad(got, _)) = head(&text) else {
                panic!("{fields} was taken");
            };
            assert_eq!(got, status, "{fields}");
        }
        assert!(head("\x16\x03\x01\x02\x00\r\n\r\n").is_err(), "TLS");
    }
}
