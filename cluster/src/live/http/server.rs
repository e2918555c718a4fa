//! The listening side: a thread for each connection, a few of them, each message within bounds.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use super::{First, HttpError, Timed};

/// Connections at a time; the next one is told to come back.
const MAX_CONNECTIONS: usize = 256;
/// TIMEOUT: agents report each second; a minute of silence is a forgotten connection.
const IDLE: Duration = Duration::from_secs(60);
/// TIMEOUT: a message of megabytes takes well below a second on any link between hosts.
const PATIENCE: Duration = Duration::from_secs(10);

/// A request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Request {
    /// `GET`, `POST`, ...
    pub method: String,
    /// The path with its query.
    pub path: String,
    /// What came as `Authorization: Bearer`.
    pub token: Option<String>,
    /// The body.
    pub body: Vec<u8>,
}

/// An answer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Response {
    /// Status.
    pub status: u16,
    /// JSON.
    pub body: Vec<u8>,
}

/// What answers. Called on the thread of a connection.
pub type Handler = Arc<dyn Fn(Request) -> Response + Send + Sync>;

/// Serve until the process ends. Returns only where the listener is broken.
///
/// # Errors
/// The listener's.
pub fn serve(listener: &TcpListener, handler: &Handler) -> io::Error {
    let open = Arc::new(AtomicUsize::new(0));
    loop {
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) => match error.kind() {
                io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted => continue,
                // Out of descriptors: others will close theirs.
                _ if matches!(error.raw_os_error(), Some(23 | 24)) => {
                    std::thread::sleep(Duration::from_millis(100));
                    continue;
                }
                _ => return error,
            },
        };
        let guard = Open::new(&open);
        if guard.count > MAX_CONNECTIONS {
            let text = format!("{MAX_CONNECTIONS} connections are open; try again in a moment");
            let _ = Timed::new(stream).write(
                &encode(&problem(503, &text), false),
                Duration::from_millis(100),
            );
            continue;
        }
        let handler = Arc::clone(handler);
        let started = std::thread::Builder::new()
            .name("http".into())
            .spawn(move || {
                let _guard = guard;
                converse(stream, &handler);
            });
        // No thread to be had: the connection closes, and its owner tries again.
        drop(started);
    }
}

struct Open {
    all: Arc<AtomicUsize>,
    count: usize,
}

impl Open {
    fn new(all: &Arc<AtomicUsize>) -> Self {
        // SYNC(open): a count and nothing else; no data is published by it.
        let count = all.fetch_add(1, Ordering::Relaxed) + 1;
        Self {
            all: Arc::clone(all),
            count,
        }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.all.fetch_sub(1, Ordering::Relaxed);
    }
}

fn converse(stream: TcpStream, handler: &Handler) {
    let _ = stream.set_nodelay(true);
    let mut stream = Timed::new(stream);
    loop {
        let message = match stream.read(true, IDLE, PATIENCE) {
            Ok(message) => message,
            Err(HttpError::Bad(status, text)) => {
                let _ = stream.write(&encode(&problem(status, &text), false), PATIENCE);
                return;
            }
            Err(_) => return,
        };
        let First::Request { method, path } = message.first else {
            return;
        };
        let request = Request {
            method,
            path,
            token: message.token,
            body: message.body,
        };
        let response = handler(request);
        if stream
            .write(&encode(&response, message.keep), PATIENCE)
            .is_err()
            || !message.keep
        {
            return;
        }
    }
}

/// An error as the body of an answer.
#[must_use]
pub fn problem(status: u16, message: &str) -> Response {
    let code = match status {
        401 | 403 => "permission",
        404 => "not_found",
        409 => "refused",
        501 => "unsupported",
        500.. => "internal",
        _ => "invalid",
    };
    let body = serde_json::json!({"error": {"code": code, "message": message, "hint": ""}});
    Response {
        status,
        body: body.to_string().into_bytes(),
    }
}

fn encode(response: &Response, keep: bool) -> Vec<u8> {
    let reason = match response.status {
        200 => "OK",
        201 => "Created",
        400 => "Bad Request",
        401 => "Unauthorized",
        404 => "Not Found",
        405 => "Method Not Allowed",
        409 => "Conflict",
        413 => "Content Too Large",
        431 => "Request Header Fields Too Large",
        501 => "Not Implemented",
        503 => "Service Unavailable",
        _ => "Other",
    };
    let connection = if keep { "keep-alive" } else { "close" };
    let head = format!(
        "HTTP/1.1 {} {reason}\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: {connection}\r\nCache-Control: no-store\r\n\r\n",
        response.status,
        response.body.len()
    );
    [head.as_bytes(), &response.body].concat()
}

/// Listen, and say where.
///
/// # Errors
/// The address is taken or not ours.
pub fn listen(address: SocketAddr) -> io::Result<(TcpListener, SocketAddr)> {
    let listener = TcpListener::bind(address)?;
    let bound = listener.local_addr()?;
    Ok((listener, bound))
}
