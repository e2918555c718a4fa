//! As much of HTTP/1.1 as one JSON API needs, on blocking sockets: a length before every body, nothing chunked, a bound on
//! everything that a stranger sends and a deadline on every wait. The heads are read by `httparse`.

pub mod client;
pub mod server;

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

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
    Late(Duration),
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

/// A head with its body.
pub(crate) struct Message {
    /// Method and path, or status.
    pub first: First,
    pub token: Option<String>,
    pub keep: bool,
    pub body: Vec<u8>,
}

pub(crate) enum First {
    Request { method: String, path: String },
    Response { status: u16 },
}

impl Timed {
    pub fn new(stream: TcpStream) -> Self {
        Self {
            stream,
            rest: Vec::new(),
        }
    }

    /// Read more until `deadline`; the number of bytes.
    fn more(&mut self, deadline: Instant, patience: Duration) -> Result<usize, HttpError> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(HttpError::Late(patience));
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
                Err(error) if is_timeout(&error) => return Err(HttpError::Late(patience)),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// The next message. Its first byte may take `idle`, all of it `patience` from there on.
    pub fn read(
        &mut self,
        request: bool,
        idle: Duration,
        patience: Duration,
    ) -> Result<Message, HttpError> {
        if self.rest.is_empty() && self.more(Instant::now() + idle, idle)? == 0 {
            return Err(HttpError::Closed);
        }
        let deadline = Instant::now() + patience;
        let head = loop {
            if let Some(head) = parse(&self.rest, request)? {
                break head;
            }
            if self.rest.len() > MAX_HEAD_BYTES {
                let text = format!("the head is longer than {MAX_HEAD_BYTES} bytes");
                return Err(HttpError::Bad(431, text));
            }
            if self.more(deadline, patience)? == 0 {
                return Err(HttpError::Bad(
                    400,
                    "the message ends within its head".into(),
                ));
            }
        };
        let end = head.bytes + head.length;
        while self.rest.len() < end {
            if self.more(deadline, patience)? == 0 {
                let (have, length) = (self.rest.len() - head.bytes, head.length);
                let text = format!("the body ends after {have} of {length} bytes");
                return Err(HttpError::Bad(400, text));
            }
        }
        let left = self.rest.split_off(end);
        let body = std::mem::replace(&mut self.rest, left).split_off(head.bytes);
        Ok(Message {
            first: head.first,
            token: head.token,
            keep: head.keep,
            body,
        })
    }

    pub fn write(&mut self, bytes: &[u8], patience: Duration) -> Result<(), HttpError> {
        self.stream.set_write_timeout(Some(patience))?;
        self.stream.write_all(bytes).map_err(|error| {
            if is_timeout(&error) {
                HttpError::Late(patience)
            } else {
                error.into()
            }
        })
    }
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
    )
}

struct Head {
    first: First,
    bytes: usize,
    length: usize,
    token: Option<String>,
    keep: bool,
}

/// The head at the beginning of `bytes`; `None` where it is not whole yet.
fn parse(bytes: &[u8], request: bool) -> Result<Option<Head>, HttpError> {
    let mut fields = [httparse::EMPTY_HEADER; MAX_FIELDS];
    let bad = |error: httparse::Error| HttpError::Bad(400, format!("this is no HTTP: {error}"));
    let (first, length, version, fields) = if request {
        let mut head = httparse::Request::new(&mut fields);
        let httparse::Status::Complete(length) = head.parse(bytes).map_err(bad)? else {
            return Ok(None);
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
            return Ok(None);
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
        token: None,
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
            let (scheme, token) = value.split_once(' ').unwrap_or((value, ""));
            head.token = scheme
                .eq_ignore_ascii_case("bearer")
                .then(|| token.trim().to_owned());
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

#[cfg(test)]
mod tests {
    use super::*;

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
        assert_eq!(head.token.as_deref(), Some("abc"));
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
