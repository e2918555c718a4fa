//! HTTP/1.1 for the scheduler's questions: bounded in connections, heads, bodies and time.

use std::convert::Infallible;
use std::io;
use std::net::TcpListener;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http_body_util::{BodyExt as _, Full, LengthLimitError, Limited};
use hyper::body::{Body as _, Bytes, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::time::{Sleep, sleep, timeout};

/// Connections at a time: a scheduler keeps a few.
const CONNECTIONS: usize = 64;
/// Questions that are answered at a time.
const WORKERS: usize = 8;
/// Bytes of a head.
const HEAD: usize = 16 << 10;
/// Bytes of all bodies that are there at a time; one that does not fit waits.
const BODIES: usize = 64 << 20;
/// Unit of those: a semaphore counts no more than 32 bits of them.
const BODY_UNIT: usize = 1 << 10;
/// TIMEOUT: a head and a body come within a network's round trips; a host in trouble takes seconds.
const PATIENCE: Duration = Duration::from_secs(10);

/// An answer: a status, and JSON.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    pub status: u16,
    pub json: String,
}

/// Serves until the listener is broken. `answer` gets method, path and body, on a thread of its
/// own; a body above `longest` bytes is refused before it.
///
/// # Errors
/// The listener's.
pub fn serve(
    listener: TcpListener,
    longest: usize,
    answer: impl Fn(&str, &str, &[u8]) -> Answer + Send + Sync + 'static,
) -> io::Error {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(WORKERS)
        .build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => return error,
    };
    let limits = Limits {
        connections: CONNECTIONS,
        longest,
        bodies: BODIES,
        patience: PATIENCE,
    };
    runtime.block_on(accept(listener, limits, Arc::new(answer)))
}

/// What a peer may take.
#[derive(Debug, Clone, Copy)]
struct Limits {
    connections: usize,
    /// Bytes of one body, and of all of them.
    longest: usize,
    bodies: usize,
    patience: Duration,
}

async fn accept<A>(listener: TcpListener, limits: Limits, answer: Arc<A>) -> io::Error
where
    A: Fn(&str, &str, &[u8]) -> Answer + Send + Sync + 'static,
{
    let Limits {
        connections,
        longest,
        bodies,
        patience,
    } = limits;
    let listener = match listener
        .set_nonblocking(true)
        .and_then(|()| tokio::net::TcpListener::from_std(listener))
    {
        Ok(listener) => listener,
        Err(error) => return error,
    };
    let places = Arc::new(Semaphore::new(connections));
    let bodies = Arc::new(Semaphore::new(bodies.max(longest) / BODY_UNIT + 1));
    loop {
        // Those beyond wait in the kernel's queue: who is there is done within its deadlines.
        let Ok(place) = Arc::clone(&places).acquire_owned().await else {
            return io::Error::other("no places");
        };
        let Ok((stream, _)) = listener.accept().await else {
            // Descriptors, or a peer that has gone: neither says anything of the listener.
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        let stream = Hurried {
            stream: TokioIo::new(stream),
            patience,
            since: None,
        };
        let (answer, bodies) = (Arc::clone(&answer), Arc::clone(&bodies));
        tokio::spawn(async move {
            let service = service_fn(move |request| {
                let (answer, bodies) = (Arc::clone(&answer), Arc::clone(&bodies));
                async move { Ok::<_, Infallible>(one(request, limits, &bodies, answer).await) }
            });
            let _ = hyper::server::conn::http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(patience)
                .max_buf_size(HEAD)
                .serve_connection(stream, service)
                .await;
            drop(place);
        });
    }
}

/// A connection that ends where its peer takes nothing of an answer for a time.
struct Hurried {
    stream: TokioIo<TcpStream>,
    patience: Duration,
    /// Since nothing could be written.
    since: Option<Pin<Box<Sleep>>>,
}

impl Hurried {
    fn watched<T>(
        &mut self,
        context: &mut Context<'_>,
        written: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.since = None;
            return written;
        }
        let patience = self.patience;
        let since = self.since.get_or_insert_with(|| Box::pin(sleep(patience)));
        since
            .as_mut()
            .poll(context)
            .map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl Read for Hurried {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, into)
    }
}

impl Write for Hurried {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.watched(context, written)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(context);
        self.watched(context, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let ended = Pin::new(&mut self.stream).poll_shutdown(context);
        self.watched(context, ended)
    }
}

async fn one<A>(
    request: Request<Incoming>,
    Limits {
        longest, patience, ..
    }: Limits,
    bodies: &Semaphore,
    answer: Arc<A>,
) -> Response<Full<Bytes>>
where
    A: Fn(&str, &str, &[u8]) -> Answer + Send + Sync + 'static,
{
    let (head, body) = request.into_parts();
    let too_long = || problem(413, &format!("the body has more than {longest} bytes"));
    let size = body.size_hint();
    let at_least = usize::try_from(size.lower()).unwrap_or(usize::MAX);
    if at_least > longest {
        return response(too_long());
    }
    // One that does not say how long it is may be as long as any.
    let upper = size.upper().and_then(|size| usize::try_from(size).ok());
    let units = upper.unwrap_or(longest).min(longest).div_ceil(BODY_UNIT);
    let units = u32::try_from(units).unwrap_or(u32::MAX);
    let Ok(Ok(_space)) = timeout(patience, bodies.acquire_many(units)).await else {
        return response(problem(503, "too many questions at a time: ask again"));
    };
    let said = match timeout(patience, Limited::new(body, longest).collect()).await {
        Ok(Ok(body)) => {
            let body = body.to_bytes();
            let work = move || answer(head.method.as_str(), head.uri.path(), &body);
            tokio::task::spawn_blocking(work)
                .await
                .unwrap_or_else(|_| problem(500, "a bug of the extender; see its log"))
        }
        Ok(Err(error)) if error.is::<LengthLimitError>() => too_long(),
        Ok(Err(_)) => problem(400, "the body ends early"),
        Err(_) => problem(408, "the body does not come"),
    };
    response(said)
}

fn response(said: Answer) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(said.json)));
    *response.status_mut() = StatusCode::from_u16(said.status).unwrap_or_default();
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(CONTENT_TYPE, json);
    response
}

/// An answer that says what is wrong.
pub fn problem(status: u16, what: &str) -> Answer {
    Answer {
        status,
        json: serde_json::json!({"Error": what}).to_string(),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader, Write as _};
    use std::net::{SocketAddr, TcpStream};
    use std::sync::mpsc;

    use super::*;

    fn start(limits: Limits, answer: impl Fn() -> String + Send + Sync + 'static) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let answer = move |_: &str, _: &str, _: &[u8]| Answer {
            status: 200,
            json: answer(),
        };
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap();
            runtime.block_on(accept(listener, limits, Arc::new(answer)))
        });
        address
    }

    fn send(address: SocketAddr, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(testbed::PATIENCE)).unwrap();
        let length = body.len();
        let head = format!("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n");
        stream.write_all(head.as_bytes()).unwrap();
        stream.write_all(body.as_bytes()).unwrap();
        stream
    }

    fn status(stream: TcpStream) -> String {
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line).unwrap();
        line
    }

    #[test]
    fn who_does_not_read_an_answer_loses_the_connection() {
        let limits = Limits {
            connections: 1,
            longest: 1 << 10,
            bodies: 1 << 10,
            patience: Duration::from_millis(500),
        };
        // More than both sockets' buffers take.
        let address = start(limits, || "x".repeat(64 << 20));
        let _silent = send(address, "{}");
        // Its place is for another one then.
        let answered = status(send(address, "{}"));
        assert!(answered.contains(" 200 "), "{answered}");
    }

    #[test]
    fn bodies_beyond_what_fits_wait_and_are_refused_in_the_end() {
        let limits = Limits {
            connections: 4,
            longest: 4 << 10,
            bodies: 4 << 10,
            patience: Duration::from_millis(500),
        };
        let (begun, has_begun) = mpsc::channel();
        let (resume, wait) = mpsc::channel::<()>();
        let wait = parking_lot::Mutex::new(wait);
        let address = start(limits, move || {
            let _ = begun.send(());
            let _ = wait.lock().recv();
            "{}".into()
        });
        let body = "x".repeat(4 << 10);
        let first = send(address, &body);
        has_begun.recv_timeout(testbed::PATIENCE).unwrap();
        let refused = status(send(address, &body));
        assert!(refused.contains(" 503 "), "{refused}");
        // What is small fits beside it.
        let small = send(address, "");
        has_begun.recv_timeout(testbed::PATIENCE).unwrap();
        drop(resume);
        for stream in [first, small] {
            let answered = status(stream);
            assert!(answered.contains(" 200 "), "{answered}");
        }
    }
}
