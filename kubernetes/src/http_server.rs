//! HTTP/1.1 for the scheduler's questions: bounded in connections, heads, bodies and time.

use std::convert::Infallible;
use std::io;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::{BodyExt as _, Full, LengthLimitError, Limited};
use hyper::body::{Body as _, Bytes, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::sync::Semaphore;
use tokio::time::timeout;

/// Connections at a time: a scheduler keeps a few.
const CONNECTIONS: usize = 64;
/// Questions that are answered at a time.
const WORKERS: usize = 8;
/// Bytes of a head.
const HEAD: usize = 16 << 10;
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
    runtime.block_on(accept(listener, longest, Arc::new(answer)))
}

async fn accept<A>(listener: TcpListener, longest: usize, answer: Arc<A>) -> io::Error
where
    A: Fn(&str, &str, &[u8]) -> Answer + Send + Sync + 'static,
{
    let listener = match listener
        .set_nonblocking(true)
        .and_then(|()| tokio::net::TcpListener::from_std(listener))
    {
        Ok(listener) => listener,
        Err(error) => return error,
    };
    let places = Arc::new(Semaphore::new(CONNECTIONS));
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
        let answer = Arc::clone(&answer);
        tokio::spawn(async move {
            let service = service_fn(move |request| {
                let answer = Arc::clone(&answer);
                async move { Ok::<_, Infallible>(one(request, longest, answer).await) }
            });
            let _ = hyper::server::conn::http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(PATIENCE)
                .max_buf_size(HEAD)
                .serve_connection(TokioIo::new(stream), service)
                .await;
            drop(place);
        });
    }
}

async fn one<A>(request: Request<Incoming>, longest: usize, answer: Arc<A>) -> Response<Full<Bytes>>
where
    A: Fn(&str, &str, &[u8]) -> Answer + Send + Sync + 'static,
{
    let (head, body) = request.into_parts();
    let too_long = || problem(413, &format!("the body has more than {longest} bytes"));
    let at_least = usize::try_from(body.size_hint().lower()).unwrap_or(usize::MAX);
    if at_least > longest {
        return response(too_long());
    }
    let said = match timeout(PATIENCE, Limited::new(body, longest).collect()).await {
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
