//! From a client to an instance and back.
//!
//! Strangers may be on both sides. A client has [`PATIENCE`] for a head, as long for a body, and as
//! long for each write of an answer; connections, bodies and what is buffered of answers are
//! bounded, and a newcomer takes the place of the connection that has been silent for longest. An
//! instance has until the end of its request. What one of them does costs no other anything but its
//! place.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full};
use hyper::body::{Body, Bytes, Frame, Incoming, SizeHint};
use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use hyper::http::request::Parts;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode, Uri, Version};
use hyper_util::rt::{TokioIo, TokioTimer};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, Sleep, sleep, timeout, timeout_at};

use super::fleet::End;
use super::gate::{Asked, Place};
use super::upstream::{self, Fault, Line};
use super::{Listener, Shared};

/// TIMEOUT: a head, a body, a part of an answer: seconds on any link that is alive.
const PATIENCE: Duration = Duration::from_secs(30);
/// Longest head of a request.
const HEAD_BYTES: usize = 64 << 10;
/// Frames of an answer that wait for its client; hyper reads 64 KiB at a time at most.
const FRAMES: usize = 16;
/// Before the same request is put again to instances that say they are busy.
const BUSY: Duration = Duration::from_millis(10);
/// Instances that break off before one request is given up.
const MOST_BROKEN: u32 = 3;
/// TIMEOUT: descriptors come back when connections end.
const NO_DESCRIPTORS: Duration = Duration::from_millis(50);

type Answer = Response<UnsyncBoxBody<Bytes, io::Error>>;

/// Connections by number; the time since when each has been silent, in seconds.
#[derive(Default)]
struct Connections {
    all: BTreeMap<u64, Connection>,
}

struct Connection {
    /// `None`: a request of it is under way.
    silent_s: Option<f64>,
    close: tokio::task::AbortHandle,
}

/// What all connections share.
struct Hall {
    shared: Arc<Shared>,
    connections: Mutex<Connections>,
    /// Bytes of bodies that are held.
    held: AtomicUsize,
    tell: Arc<dyn Fn(&str) + Send + Sync>,
}

trait Both: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Both for T {}

enum Accepting {
    Tcp(tokio::net::TcpListener),
    Unix(tokio::net::UnixListener),
}

impl Accepting {
    async fn next(&self) -> io::Result<Box<dyn Both>> {
        Ok(match self {
            Self::Tcp(listener) => {
                let (stream, _) = listener.accept().await?;
                let _ = stream.set_nodelay(true);
                Box::new(stream)
            }
            Self::Unix(listener) => Box::new(listener.accept().await?.0),
        })
    }
}

/// Serves until it is stopped, and then what is under way, for as long as that may take. How many
/// requests were cut off.
///
/// # Errors
/// The listener's.
pub async fn serve(
    shared: &Arc<Shared>,
    listener: Listener,
    mut stopped: watch::Receiver<bool>,
    tell: &Arc<dyn Fn(&str) + Send + Sync>,
) -> io::Result<usize> {
    let accepting = match &listener {
        Listener::Tcp(listener, _) => {
            Accepting::Tcp(tokio::net::TcpListener::from_std(listener.try_clone()?)?)
        }
        Listener::Unix(listener, _) => {
            Accepting::Unix(tokio::net::UnixListener::from_std(listener.try_clone()?)?)
        }
    };
    let hall = Arc::new(Hall {
        shared: Arc::clone(shared),
        connections: Mutex::default(),
        held: AtomicUsize::new(0),
        tell: Arc::clone(tell),
    });
    let mut number = 0_u64;
    loop {
        let stream = tokio::select! {
            biased;
            _ = stopped.wait_for(|stopped| *stopped) => break,
            stream = accepting.next() => stream,
        };
        let Ok(stream) = stream else {
            // Descriptors, or a peer that has gone: neither says anything of the listener.
            sleep(NO_DESCRIPTORS).await;
            continue;
        };
        number += 1;
        if !hall.make_space() {
            // Everybody's request is under way.
            continue;
        }
        let task = tokio::spawn(converse(Arc::clone(&hall), stream, number, stopped.clone()));
        let one = Connection {
            silent_s: Some(shared.now_s()),
            close: task.abort_handle(),
        };
        hall.connections.lock().all.insert(number, one);
    }
    // Nobody else is taken in, and who comes is refused by the kernel.
    drop((accepting, listener));
    let end = Instant::now() + shared.options.drain;
    while !hall.connections.lock().all.is_empty() && Instant::now() < end {
        sleep(Duration::from_millis(5)).await;
    }
    let left = hall.connections.lock();
    Ok(left
        .all
        .values()
        .filter(|one| one.silent_s.is_none())
        .count())
}

impl Hall {
    /// Space for one more connection; `false`: each of them has a request under way.
    fn make_space(&self) -> bool {
        let mut connections = self.connections.lock();
        if connections.all.len() < self.shared.options.connections {
            return true;
        }
        let silent = connections.all.iter();
        let silent = silent.filter_map(|(number, one)| Some((*number, one.silent_s?)));
        let Some((number, _)) = silent.min_by(|a, b| a.1.total_cmp(&b.1)) else {
            return false;
        };
        if let Some(one) = connections.all.remove(&number) {
            one.close.abort();
        }
        true
    }

    /// A request of a connection begins, or is over.
    fn note(&self, number: u64, is_busy: bool) {
        let now_s = self.shared.now_s();
        if let Some(one) = self.connections.lock().all.get_mut(&number) {
            one.silent_s = (!is_busy).then_some(now_s);
        }
    }
}

/// A connection that is there; when it is dropped it is gone.
struct Present {
    hall: Arc<Hall>,
    number: u64,
}

impl Drop for Present {
    fn drop(&mut self) {
        self.hall.connections.lock().all.remove(&self.number);
    }
}

/// A request of a connection that is under way, up to the end of its answer.
struct UnderWay {
    hall: Arc<Hall>,
    number: u64,
}

impl UnderWay {
    fn new(hall: &Arc<Hall>, number: u64) -> Self {
        hall.note(number, true);
        Self {
            hall: Arc::clone(hall),
            number,
        }
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.hall.note(self.number, false);
    }
}

async fn converse(
    hall: Arc<Hall>,
    stream: Box<dyn Both>,
    number: u64,
    mut stopped: watch::Receiver<bool>,
) {
    let _present = Present {
        hall: Arc::clone(&hall),
        number,
    };
    let service = service_fn(|request| {
        let hall = Arc::clone(&hall);
        async move {
            let under_way = UnderWay::new(&hall, number);
            let answer = answer(&hall, request).await;
            // The rest of it is under way until the client has it.
            Ok::<_, Infallible>(answer.map(|body| {
                Kept {
                    body,
                    _under_way: under_way,
                }
                .boxed_unsync()
            }))
        }
    });
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(PATIENCE)
        .max_buf_size(HEAD_BYTES)
        .serve_connection(TokioIo::new(Hurried::new(stream)), service);
    let mut connection = pin!(connection);
    tokio::select! {
        _ = connection.as_mut() => return,
        _ = stopped.wait_for(|stopped| *stopped) => {}
    }
    connection.as_mut().graceful_shutdown();
    let _ = connection.await;
}

/// A body with what is to stay as long as it.
struct Kept {
    body: UnsyncBoxBody<Bytes, io::Error>,
    _under_way: UnderWay,
}

impl Body for Kept {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// What we say ourselves.
fn ours(status: StatusCode, why: &str) -> Answer {
    let text = format!("sublet frontend: {why}\n");
    let mut answer = Response::new(
        Full::from(text)
            .map_err(|never| match never {})
            .boxed_unsync(),
    );
    *answer.status_mut() = status;
    let plain = HeaderValue::from_static("text/plain; charset=utf-8");
    answer.headers_mut().insert(header::CONTENT_TYPE, plain);
    if status == StatusCode::SERVICE_UNAVAILABLE {
        let after = HeaderValue::from_static("1");
        answer.headers_mut().insert(header::RETRY_AFTER, after);
    }
    answer
}

/// Bytes of a body that are held.
struct Held<'a> {
    hall: &'a Hall,
    bytes: usize,
}

impl<'a> Held<'a> {
    /// More of it, where there is space.
    fn grow(&mut self, bytes: usize) -> bool {
        let most = self.hall.shared.options.bodies_bytes;
        // SYNC(count): a count and nothing else; no data is published by it.
        let before = self.hall.held.fetch_add(bytes, Ordering::Relaxed);
        self.bytes += bytes;
        before.saturating_add(bytes) <= most
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        // SYNC(count): as above.
        self.hall.held.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// The body of a request, whole.
async fn read(mut body: Incoming, held: &mut Held<'_>) -> Result<Bytes, Answer> {
    let most = held.hall.shared.options.body_bytes;
    let too_large = || {
        let why = format!("a body of more than {most} bytes (--max-body)");
        ours(StatusCode::PAYLOAD_TOO_LARGE, &why)
    };
    if body.size_hint().lower() > most as u64 {
        return Err(too_large());
    }
    let mut whole = Vec::new();
    let reading = async {
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| {
                ours(
                    StatusCode::BAD_REQUEST,
                    &format!("the body broke off: {error}"),
                )
            })?;
            let Ok(data) = frame.into_data() else {
                continue;
            };
            if whole.len() + data.len() > most {
                return Err(too_large());
            }
            if !held.grow(data.len()) {
                let why = "it holds as many bytes of requests as it may; try again";
                return Err(ours(StatusCode::SERVICE_UNAVAILABLE, why));
            }
            whole.extend_from_slice(&data);
        }
        Ok(())
    };
    match timeout(PATIENCE, reading).await {
        Ok(Ok(())) => Ok(Bytes::from(whole)),
        Ok(Err(answer)) => Err(answer),
        Err(_) => {
            let why = format!("the body did not come within {} s", PATIENCE.as_secs());
            Err(ours(StatusCode::REQUEST_TIMEOUT, &why))
        }
    }
}

/// Fields that are about one connection (RFC 9110, 7.6.1).
fn forget_connection(fields: &mut HeaderMap) {
    let named: Vec<HeaderName> = fields
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    for name in named {
        fields.remove(name);
    }
    for name in [
        header::CONNECTION,
        header::PROXY_AUTHENTICATE,
        header::PROXY_AUTHORIZATION,
        header::TE,
        header::TRAILER,
        header::TRANSFER_ENCODING,
        header::UPGRADE,
    ] {
        fields.remove(name);
    }
    for name in ["keep-alive", "proxy-connection"] {
        fields.remove(name);
    }
}

/// A request as an instance gets it.
struct Asking {
    method: Method,
    uri: Uri,
    fields: HeaderMap,
    body: Bytes,
}

impl Asking {
    fn new(head: Parts, body: Bytes) -> Self {
        let mut fields = head.headers;
        forget_connection(&mut fields);
        // It is here whole, and its length is known.
        fields.remove(header::EXPECT);
        fields.remove(header::CONTENT_LENGTH);
        fields.insert(header::CONNECTION, HeaderValue::from_static("close"));
        // HTTP/1.0 does without.
        let nobody = HeaderValue::from_static("localhost");
        fields.entry(header::HOST).or_insert(nobody);
        let path = head.uri.path_and_query().cloned();
        Self {
            method: head.method,
            uri: path.map_or_else(|| Uri::from_static("/"), Uri::from),
            fields,
            body,
        }
    }

    fn request(&self) -> Request<Full<Bytes>> {
        let mut request = Request::new(Full::from(self.body.clone()));
        *request.method_mut() = self.method.clone();
        *request.uri_mut() = self.uri.clone();
        *request.headers_mut() = self.fields.clone();
        if !self.body.is_empty() || matches!(self.method, Method::POST | Method::PUT) {
            let length = HeaderValue::from(self.body.len());
            request.headers_mut().insert(header::CONTENT_LENGTH, length);
        }
        request
    }
}

/// The answer to a request, an instance's or ours.
async fn answer(hall: &Arc<Hall>, request: Request<Incoming>) -> Answer {
    let (head, body) = request.into_parts();
    if head.method == Method::CONNECT {
        return ours(
            StatusCode::METHOD_NOT_ALLOWED,
            "this is no proxy for CONNECT",
        );
    }
    let mut held = Held { hall, bytes: 0 };
    let body = match read(body, &mut held).await {
        Ok(body) => body,
        Err(mut answer) => {
            // The rest of it is not waited for.
            let close = HeaderValue::from_static("close");
            answer.headers_mut().insert(header::CONNECTION, close);
            return answer;
        }
    };
    let asking = Asking::new(head, body);
    let asked = Asked::new(&hall.shared);
    put(hall, &asking, asked).await
}

/// Puts a request to instances until one answers, or its time is up.
async fn put(hall: &Arc<Hall>, asking: &Asking, asked: Asked) -> Answer {
    let shared = &hall.shared;
    let options = &shared.options;
    let end = Instant::now() + options.timeout;
    let within = Duration::from_secs_f64(options.terms.sla.within_s.clamp(0.0, 1e6));
    let in_time = Instant::now() + within;
    let may_again = options.retry || asking.method.is_idempotent();
    let (mut not, mut broken, mut tries) = (None, 0, 0_u32);
    let timed_out = |asked: Asked, what: &str| {
        asked.failed();
        let why = format!(
            "{what} within {} s (--timeout)",
            options.timeout.as_secs_f64()
        );
        ours(StatusCode::GATEWAY_TIMEOUT, &why)
    };
    loop {
        let waited = timeout_at(end, Place::wait(shared, asked.came_s, not)).await;
        let place = match waited {
            Ok(Some(place)) => place,
            Ok(None) => {
                asked.pruned();
                let why = "it has waited longer than an answer may take (--prune)";
                return ours(StatusCode::SERVICE_UNAVAILABLE, why);
            }
            Err(_) => return timed_out(asked, "no instance was free"),
        };
        if tries > 0 {
            shared.gate.lock().figures.counts.retries += 1;
        }
        tries = tries.saturating_add(1);
        let at = place.at;
        let since = Instant::now();
        let sent = upstream::send(&shared.addresses[at], asking.request(), end).await;
        let why = match sent {
            Ok((response, _)) if is_busy(&response) && Instant::now() < in_time => {
                // It has not done what it was asked for: another one may, as in the paper.
                place.end(End::Nothing);
                not = Some(at);
                sleep(BUSY).await;
                continue;
            }
            Ok((response, line)) => {
                return pass_on(hall, response, line, (place, since), asked, end);
            }
            Err(Fault::TimedOut) => {
                place.end(hall.blame(since));
                return timed_out(asked, "the instance did not answer");
            }
            Err(Fault::Unsent(why)) => why,
            Err(Fault::Broken(why)) => {
                broken += 1;
                if !may_again || broken >= MOST_BROKEN {
                    hall.say(at, &why);
                    place.end(End::Failed);
                    asked.failed();
                    return ours(StatusCode::BAD_GATEWAY, &format!("the instance: {why}"));
                }
                why
            }
        };
        hall.say(at, &why);
        place.end(End::Failed);
        not = Some(at);
    }
}

/// A server that has too much to do says so with 503 (RFC 9110, 15.6.4).
fn is_busy(response: &Response<Incoming>) -> bool {
    response.status() == StatusCode::SERVICE_UNAVAILABLE
}

impl Hall {
    /// What a request that has run out of time says of its instance: nothing, where it had spent
    /// most of it before.
    fn blame(&self, since: Instant) -> End {
        let options = &self.shared.options;
        let fair = options.timeout.as_secs_f64() / 2.0;
        match since.elapsed().as_secs_f64() >= fair.min(options.terms.sla.within_s) {
            true => End::Failed,
            false => End::Nothing,
        }
    }

    fn say(&self, at: usize, why: &str) {
        let name = {
            let gate = self.shared.gate.lock();
            gate.fleet.instances()[at].name.clone()
        };
        (self.tell)(&format!("instance `{name}` failed a request: {why}"));
    }
}

/// Passes an answer on, as it comes. The instance is free when it has said all of it, whether the
/// client has read that or not.
fn pass_on(
    hall: &Arc<Hall>,
    response: Response<Incoming>,
    line: Line,
    (place, since): (Place, Instant),
    asked: Asked,
    end: Instant,
) -> Answer {
    let (mut head, body) = response.into_parts();
    forget_connection(&mut head.headers);
    head.version = Version::HTTP_11;
    let length = body.size_hint();
    let (frames, coming) = mpsc::channel(FRAMES);
    let hall = Arc::clone(hall);
    tokio::spawn(async move {
        let at = place.at;
        match timeout_at(end, pump(body, &frames)).await {
            Ok(Pumped::Whole) => asked.answered(place.end(End::Answered)),
            // The client has gone.
            Ok(Pumped::Unread) => drop(place),
            Ok(Pumped::Broken(why)) => {
                hall.say(at, &format!("its answer broke off: {why}"));
                place.end(End::Failed);
                asked.failed();
                cut_off(&frames, "the instance broke off").await;
            }
            Err(_) => {
                let is_client_slow = frames.capacity() == 0;
                let how = match is_client_slow {
                    true => End::Nothing,
                    false => hall.blame(since),
                };
                place.end(how);
                if !is_client_slow {
                    asked.failed();
                }
                cut_off(&frames, "the answer took too long").await;
            }
        }
        drop(line);
    });
    let body = Streamed { coming, length };
    Response::from_parts(head, body.boxed_unsync())
}

/// The client sees that its answer is not whole.
async fn cut_off(frames: &mpsc::Sender<Result<Frame<Bytes>, io::Error>>, why: &'static str) {
    let broken = Err(io::Error::other(why));
    let _ = timeout(PATIENCE, frames.send(broken)).await;
}

enum Pumped {
    Whole,
    Unread,
    Broken(String),
}

async fn pump(
    mut body: Incoming,
    frames: &mpsc::Sender<Result<Frame<Bytes>, io::Error>>,
) -> Pumped {
    loop {
        let frame = tokio::select! {
            frame = body.frame() => frame,
            () = frames.closed() => return Pumped::Unread,
        };
        match frame {
            None => return Pumped::Whole,
            Some(Err(error)) => return Pumped::Broken(error.to_string()),
            Some(Ok(frame)) => {
                if frames.send(Ok(frame)).await.is_err() {
                    return Pumped::Unread;
                }
            }
        }
    }
}

/// A body whose frames come from elsewhere.
struct Streamed {
    coming: mpsc::Receiver<Result<Frame<Bytes>, io::Error>>,
    length: SizeHint,
}

impl Body for Streamed {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        self.coming.poll_recv(context)
    }

    fn size_hint(&self) -> SizeHint {
        self.length
    }
}

/// A stream whose reader has to read.
struct Hurried {
    stream: Box<dyn Both>,
    stalled: Option<Pin<Box<Sleep>>>,
}

impl Hurried {
    fn new(stream: Box<dyn Both>) -> Self {
        Self {
            stream,
            stalled: None,
        }
    }

    /// What came of a write, or of the wait for it.
    fn hurry<T>(
        &mut self,
        context: &mut Context<'_>,
        done: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if done.is_ready() {
            self.stalled = None;
            return done;
        }
        let stalled = self
            .stalled
            .get_or_insert_with(|| Box::pin(sleep(PATIENCE)));
        match stalled.as_mut().poll(context) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
        }
    }
}

impl AsyncRead for Hurried {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, into)
    }
}

impl AsyncWrite for Hurried {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let done = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.hurry(context, done)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let done = Pin::new(&mut self.stream).poll_flush(context);
        self.hurry(context, done)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let done = Pin::new(&mut self.stream).poll_shutdown(context);
        self.hurry(context, done)
    }
}
