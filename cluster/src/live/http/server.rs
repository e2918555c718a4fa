//! The listening side: hyper's connections, and who may hold one for how long.
//!
//! One thread looks after all connections and never waits for one of them (tokio's current-thread
//! runtime). A connection is in one of two stages.
//!
//! *Pending*: every new connection. It may send a head of 16 KiB at most, and nothing else, within
//! [`PENDING_TIME`]. There is space for [`PENDING`]. A newcomer is never refused: it replaces a
//! connection of the address that has most of them, the one that has been silent for longest. So
//! strangers, however many and however slow, cost a bounded part of one thread and some memory, and
//! an honest client that authenticates at once gets through.
//!
//! With [TLS](Site::tls) the handshake is part of that, within the same time and the same places.
//!
//! *Admitted*: connections that have proved by the head of a request that they know the token
//! ([`auth`]). Only they may send bodies, within [`BODY_BYTES`] for all together. Their requests
//! are carried out on [`WORKERS`] further threads, which may wait for locks and disks.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::future::poll_fn;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes, to_bytes};
use axum::http::request::Parts;
use axum::response::IntoResponse;
use http_body_util::{BodyExt, Full};
use hyper::body::{Body as _, Incoming};
use hyper::ext::ReasonPhrase;
use hyper::header::{self, HeaderMap, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, StatusCode};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::runtime::{Builder, Handle};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::{AbortHandle, spawn_blocking, yield_now};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tower_service::Service;

use super::secure::{self, Stream};
use super::{CODE_FIELD, MAX_BODY_BYTES, MAX_FIELDS, MAX_HEAD_BYTES, SCHEME, stays};
use crate::live::auth::{self, Secret, Session, Signature};
use crate::live::wire::HookId;

/// Most pending connections.
const PENDING: usize = 256;
/// Most admitted connections: each node has an agent, and people ask, too.
const ADMITTED: usize = 1280;
/// Newcomers in a step: those who are there already come next.
const STEP: usize = 32;
/// Bytes of all bodies that are read or answered at a time.
const BODY_BYTES: usize = 64 << 20;
/// Threads that carry requests out, and the stack of each. Most of a request is done under one
/// lock.
const WORKERS: usize = 8;
/// See [`WORKERS`].
const STACK_BYTES: usize = 512 << 10;
/// TIMEOUT: a connection says who it is within a network's round trip; on a host in trouble within
/// seconds.
const PENDING_TIME: Duration = Duration::from_secs(10);
/// TIMEOUT: agents report each second; a minute of silence is a forgotten connection.
const IDLE: Duration = Duration::from_secs(60);
/// TIMEOUT: a message of megabytes takes well below a second on any link between hosts.
const PATIENCE: Duration = Duration::from_secs(10);
/// TIMEOUT: who was believed an hour ago shows a certificate of today: a client connects anew, in
/// its own pause, and loses nothing by that.
pub const HOUR: Duration = Duration::from_secs(3600);
/// TIMEOUT: connections that are closed give descriptors back within a moment.
const NO_DESCRIPTORS: Duration = Duration::from_millis(50);
/// Where a session begins, with the client's nonce.
pub const SESSION: &str = "/v1/session";

/// An answer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Response {
    /// Status.
    pub status: u16,
    /// JSON.
    pub body: Vec<u8>,
}

/// Beside an answer that is not JSON: its `Content-Type`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MediaType(pub &'static str);

impl IntoResponse for Response {
    fn into_response(self) -> axum::response::Response {
        (status(self.status), self.body).into_response()
    }
}

fn status(number: u16) -> StatusCode {
    StatusCode::from_u16(number).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
}

/// What is served beside the routes. Nothing here may wait.
pub trait Site: Send + Sync {
    /// What everybody has to know, and who serves; `None`: there are no sessions, and every route
    /// is open.
    fn proof(&self) -> Option<(&Secret, &HookId)>;
    /// Whether this needs no token. Such a route may not wait.
    fn is_open(&self, method: &str, path: &str) -> bool;
    /// Bytes of the longest body that is taken there.
    fn body_limit(&self, method: &str, path: &str) -> usize;
    /// A peer was refused: without the token, or for this reason.
    fn turned_away(&self, from: IpAddr, why: Option<&str>);
    /// `None`: connections are plain.
    fn tls(&self) -> Option<&certificates::Server> {
        None
    }
    /// Whether a peer that knows the token may ask for this.
    ///
    /// # Errors
    /// Why not.
    fn may(&self, _method: &str, _path: &str, _who: &Shown) -> Result<(), String> {
        Ok(())
    }
    /// How long a connection with TLS may last.
    fn lasts(&self) -> Duration {
        HOUR
    }
}

/// What a peer has shown of itself, beside that it knows the token.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Shown {
    /// The names in its certificate, where one was demanded.
    pub certificate: Option<Vec<String>>,
    /// The node whose token it has, and not the hook's.
    pub node: Option<String>,
}

/// Serve until the process ends. Returns only if the listener is broken.
///
/// # Errors
/// The listener's.
pub fn serve(listener: &TcpListener, site: Arc<dyn Site>, routes: Router) -> io::Error {
    allow_descriptors();
    let runtime = Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .max_blocking_threads(WORKERS)
        .thread_name("http")
        .thread_stack_size(STACK_BYTES)
        .build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => return error,
    };
    let door = Arc::new(Door {
        site,
        routes,
        pending: Mutex::default(),
        admitted: Arc::default(),
        bodies: Arc::new(Semaphore::new(BODY_BYTES)),
    });
    let error = match runtime.block_on(accept_all(listener, &door)) {
        Ok(never) => match never {},
        Err(error) => error,
    };
    // A request that waits for a disk holds nobody up: the process is about to end.
    runtime.shutdown_background();
    error
}

/// As many as the host allows: each connection is one.
fn allow_descriptors() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let now = getrlimit(Resource::Nofile);
    let most = Rlimit {
        current: now.maximum,
        maximum: now.maximum,
    };
    // Refused: then there are fewer connections, and newcomers take the places of others.
    let _ = setrlimit(Resource::Nofile, most);
}

/// Takes newcomers in.
async fn accept_all(listener: &TcpListener, door: &Arc<Door>) -> io::Result<Infallible> {
    let listener = listener.try_clone()?;
    listener.set_nonblocking(true)?;
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let mut number = 0_u64;
    let mut step = 0;
    loop {
        match listener.accept().await {
            Ok((stream, from)) => {
                if door.pending.lock().len() >= PENDING {
                    door.drop_one();
                    // It closes before the next newcomer is taken in.
                    step = STEP;
                }
                let _ = stream.set_nodelay(true);
                number += 1;
                door.take_in(stream, from.ip(), number);
            }
            Err(error) => match error.kind() {
                io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted => {}
                // Out of descriptors: a connection gives one back, and those admitted will close
                // theirs.
                _ if matches!(error.raw_os_error(), Some(23 | 24)) => {
                    door.drop_one();
                    sleep(NO_DESCRIPTORS).await;
                }
                _ => return Err(error),
            },
        }
        step += 1;
        if step >= STEP {
            step = 0;
            yield_now().await;
        }
    }
}

/// What all connections share.
struct Door {
    site: Arc<dyn Site>,
    routes: Router,
    /// By number: in the sequence of their arrival.
    pending: Mutex<BTreeMap<u64, Pending>>,
    /// How many are admitted.
    admitted: Arc<AtomicUsize>,
    /// Bytes of bodies that may yet be taken.
    bodies: Arc<Semaphore>,
}

/// A connection that has not authenticated yet.
struct Pending {
    from: IpAddr,
    /// When it last sent something useful.
    shown: Instant,
    task: AbortHandle,
}

impl Door {
    fn take_in(self: &Arc<Self>, stream: TcpStream, from: IpAddr, number: u64) {
        let now = Instant::now();
        let peer = Arc::new(Peer {
            door: Arc::clone(self),
            number,
            from,
            since: now,
            by_files: self.site.tls().map_or(0, certificates::Server::changes),
            shown: Mutex::default(),
            session: Mutex::default(),
            place: Mutex::default(),
            stage: Mutex::new(Stage::Pending(now + PENDING_TIME)),
        });
        // It first runs when this thread comes to it, after the next line.
        let task = tokio::spawn(converse(peer, stream)).abort_handle();
        let shown = now;
        self.pending
            .lock()
            .insert(number, Pending { from, shown, task });
    }

    /// A pending connection has done something useful.
    fn shows(&self, number: u64) {
        if let Some(pending) = self.pending.lock().get_mut(&number) {
            pending.shown = Instant::now();
        }
    }

    /// Drops the connection that has been silent for longest, of the address that has most of them.
    fn drop_one(&self) {
        let mut pending = self.pending.lock();
        let mut count: BTreeMap<IpAddr, usize> = BTreeMap::new();
        for connection in pending.values() {
            *count.entry(connection.from).or_default() += 1;
        }
        let most = count.values().max().copied();
        let last = pending
            .iter()
            .filter(|(_, connection)| count.get(&connection.from).copied() == most)
            .min_by_key(|(_, connection)| connection.shown)
            .map(|(number, _)| *number);
        let dropped = last.and_then(|number| pending.remove(&number));
        drop(pending);
        if let Some(dropped) = dropped {
            dropped.task.abort();
        }
    }

    /// Space for a body, waited for as long as for a body.
    async fn space(&self, bytes: usize) -> Option<Option<OwnedSemaphorePermit>> {
        if bytes == 0 {
            return Some(None);
        }
        let bytes = u32::try_from(bytes).ok()?;
        let space = Arc::clone(&self.bodies).acquire_many_owned(bytes);
        timeout(PATIENCE, space).await.ok()?.ok().map(Some)
    }
}

/// What a connection does, and until when it may.
#[derive(Clone, Copy)]
enum Stage {
    /// It has yet to prove that it knows the token.
    Pending(Instant),
    /// The head of its next request begins.
    Idle(Instant),
    /// That head comes.
    Head(Instant),
    /// The body of its request comes.
    Body(Instant),
    /// Its request is carried out: that takes as long as it takes.
    Working,
    /// The answer is sent.
    Answering(Instant),
}

/// A connection.
struct Peer {
    door: Arc<Door>,
    number: u64,
    from: IpAddr,
    since: Instant,
    /// How often the files of TLS had changed when it began.
    by_files: u64,
    shown: Mutex<Shown>,
    /// Both sides' proofs hold for this connection only.
    session: Mutex<Option<Session>>,
    /// Held once it is admitted.
    place: Mutex<Option<Place>>,
    stage: Mutex<Stage>,
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.door.pending.lock().remove(&self.number);
    }
}

/// A place among those admitted.
struct Place {
    admitted: Arc<AtomicUsize>,
    number: usize,
}

impl Place {
    fn take(admitted: &Arc<AtomicUsize>) -> Self {
        // SYNC(count): a count and nothing else; no data is published by it.
        let number = admitted.fetch_add(1, Ordering::Relaxed) + 1;
        Self {
            admitted: Arc::clone(admitted),
            number,
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.admitted.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Requests and answers of one connection, until its end or its deadline.
async fn converse(peer: Arc<Peer>, stream: TcpStream) {
    // It is pending, with the deadline of that.
    let begun = timeout(PENDING_TIME, begin(&peer, stream)).await;
    let Ok(Some(stream)) = begun else { return };
    let watched = TokioIo::new(Watched {
        stream,
        peer: Arc::clone(&peer),
    });
    let own = Arc::clone(&peer);
    let answers = service_fn(move |request| Arc::clone(&own).answer(request));
    let serving = http1::Builder::new()
        // A client may say that it sends nothing more, and is answered.
        .half_close(true)
        .title_case_headers(true)
        .auto_date_header(false)
        .max_headers(MAX_FIELDS)
        .max_buf_size(MAX_HEAD_BYTES)
        // The stage has the deadline of a head, too.
        .header_read_timeout(None::<Duration>)
        .serve_connection(watched, answers);
    let mut serving = pin!(serving);
    let mut alarm = pin!(sleep_until(Instant::now() + PENDING_TIME));
    poll_fn(|cx| {
        // What fails ends this connection, and nothing else.
        if serving.as_mut().poll(cx).is_ready() {
            return Poll::Ready(());
        }
        let Some(ends) = peer.ends() else {
            return Poll::Pending;
        };
        if alarm.deadline() != ends {
            alarm.as_mut().reset(ends);
        }
        alarm.as_mut().poll(cx)
    })
    .await;
}

/// The beginning of a connection: TLS where there is TLS. `None`: it has ended, and its peer has
/// heard why.
async fn begin(peer: &Peer, stream: TcpStream) -> Option<Stream> {
    let site = &peer.door.site;
    let speaks_tls = secure::speaks_tls(&stream).await.ok()?;
    let why = match (site.tls(), speaks_tls) {
        (None, false) => return Some(Box::new(stream)),
        (Some(tls), true) => match secure::accept(stream, tls).await {
            Ok((stream, certificate)) => {
                peer.shown.lock().certificate = certificate;
                peer.door.shows(peer.number);
                return Some(stream);
            }
            Err((why, stream)) => {
                site.turned_away(peer.from, Some(&why));
                secure::close(stream, &[]).await;
                return None;
            }
        },
        (None, true) => {
            "it speaks TLS, and this port is plain: start the hook with --tls-cert and --tls-key, or write http:// there"
        }
        (Some(_), false) => "this port takes TLS alone: write https:// and the hook's authority",
    };
    site.turned_away(peer.from, Some(why));
    let said = problem(400, why);
    let length = said.body.len();
    let mut answer = format!(
        "HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n"
    )
    .into_bytes();
    answer.extend(said.body);
    secure::close(stream, &answer).await;
    None
}

/// A connection's socket: tells how far the connection has come.
struct Watched {
    stream: Stream,
    peer: Arc<Peer>,
}

impl AsyncRead for Watched {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let result = ready!(Pin::new(&mut self.stream).poll_read(cx, buffer));
        if buffer.filled().len() > before {
            self.peer.heard();
        }
        Poll::Ready(result)
    }
}

impl AsyncWrite for Watched {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        all: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, all)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    /// hyper flushes once everything is written.
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let result = ready!(Pin::new(&mut self.stream).poll_flush(cx));
        self.peer.sent();
        Poll::Ready(result)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// What is done about a request, by its head.
enum Verdict {
    /// It is answered at once.
    Tell(Response),
    /// It began the session: the connection stays.
    Began(Response),
    /// It needs no token.
    Open,
    /// Its sender knows the token.
    Genuine(Signature),
    /// Its sender does, and may not ask for that.
    Denied(Response),
}

impl Peer {
    /// Until when this stage may last.
    fn ends(&self) -> Option<Instant> {
        match *self.stage.lock() {
            Stage::Working => None,
            Stage::Pending(ends)
            | Stage::Idle(ends)
            | Stage::Head(ends)
            | Stage::Body(ends)
            | Stage::Answering(ends) => Some(ends),
        }
    }

    /// Whether it is time for another handshake: after a while, and where other files say who is
    /// believed, as when somebody's certificate was revoked.
    fn is_old(&self) -> bool {
        let site = &self.door.site;
        let over = || self.since.elapsed() >= site.lasts();
        site.tls()
            .is_some_and(|tls| tls.changes() != self.by_files || over())
    }

    /// Something came.
    fn heard(&self) {
        let mut stage = self.stage.lock();
        if matches!(*stage, Stage::Idle(_)) {
            *stage = Stage::Head(Instant::now() + PATIENCE);
        }
    }

    /// Everything was sent.
    fn sent(&self) {
        let mut stage = self.stage.lock();
        if matches!(*stage, Stage::Answering(_)) {
            *stage = Stage::Idle(Instant::now() + IDLE);
        }
    }

    async fn answer(
        self: Arc<Self>,
        request: hyper::Request<Incoming>,
    ) -> Result<hyper::Response<Full<Bytes>>, Infallible> {
        let (head, body) = request.into_parts();
        let keep = stays(head.version, &head.headers);
        // A body in parts has no length, and is refused.
        let length = body.size_hint().exact().map_or(usize::MAX, |length| {
            usize::try_from(length).unwrap_or(usize::MAX)
        });
        let answer = match self.judge(&head, length) {
            Verdict::Tell(said) => encode(said, None, false),
            Verdict::Began(said) => encode(said, None, keep),
            Verdict::Open => {
                let request = hyper::Request::from_parts(head, Body::empty());
                let (said, media) = routed_as(&self.door.routes, request).await;
                let mut answer = encode(said, None, false);
                if let Some(MediaType(media)) = media {
                    let media = HeaderValue::from_static(media);
                    answer.headers_mut().insert(header::CONTENT_TYPE, media);
                }
                answer
            }
            Verdict::Genuine(signature) => {
                let (said, code, taken) = self.carry_out(head, body, length, signature).await;
                encode(said, Some(&code), keep && taken && !self.is_old())
            }
            Verdict::Denied(said) => {
                let code = self.sign(&said);
                encode(said, Some(&code), false)
            }
        };
        let mut stage = self.stage.lock();
        // A connection that is pending has its deadline.
        if !matches!(*stage, Stage::Pending(_)) {
            *stage = Stage::Answering(Instant::now() + PATIENCE);
        }
        drop(stage);
        Ok(answer)
    }

    /// Before anything of the body is read.
    fn judge(&self, head: &Parts, length: usize) -> Verdict {
        if head.headers.contains_key(header::TRANSFER_ENCODING) {
            let text = "bodies are taken whole, with a Content-Length";
            return Verdict::Tell(problem(501, text));
        }
        if length > MAX_BODY_BYTES {
            let text = format!("the body has {length} bytes, {MAX_BODY_BYTES} are taken");
            return Verdict::Tell(problem(413, &text));
        }
        let site = &self.door.site;
        let (method, path) = (head.method.as_str(), path(head));
        let mut session = self.session.lock();
        if head.method == Method::GET
            && length == 0
            && session.is_none()
            && let Some(query) = path.strip_prefix(SESSION)
            && let Some(query) = query.strip_prefix("?nonce=")
            && let Some((secret, hook)) = site.proof()
        {
            let (nonce, node) = match query.split_once("&node=") {
                Some((nonce, node)) => (nonce, Some(node)),
                None => (query, None),
            };
            if !auth::is_nonce(nonce) {
                let text = "the nonce is not 64 hexadecimal digits";
                return Verdict::Tell(problem(400, text));
            }
            let of_node = node.map(|node| secret.of_node(node));
            let secret = of_node.as_ref().unwrap_or(secret);
            let Ok((challenge, own)) = secret.answer(nonce, hook) else {
                return Verdict::Tell(problem(503, "this host has no random numbers"));
            };
            *session = Some(own);
            self.shown.lock().node = node.map(ToOwned::to_owned);
            self.door.shows(self.number);
            let body = serde_json::to_vec(&challenge).unwrap_or_default();
            return Verdict::Began(Response { status: 200, body });
        }
        let mut place = self.place.lock();
        if let (Some(session), Some(signature)) = (session.as_mut(), signature(&head.headers))
            && session.admits(method, path, &signature)
        {
            if place.is_none() {
                let taken = Place::take(&self.door.admitted);
                if taken.number > ADMITTED {
                    let text = format!("{ADMITTED} connections are open; try again in a moment");
                    return Verdict::Tell(problem(503, &text));
                }
                *place = Some(taken);
                self.door.pending.lock().remove(&self.number);
            }
            *self.stage.lock() = Stage::Working;
            if let Err(why) = site.may(method, path, &self.shown.lock()) {
                site.turned_away(self.from, Some(&why));
                return Verdict::Denied(problem(403, &why));
            }
            return Verdict::Genuine(signature);
        }
        let text = if place.is_some() {
            "this is not the session's next request, or somebody has altered it"
        } else if site.proof().is_none() || path != SESSION && site.is_open(method, path) {
            return Verdict::Open;
        } else {
            "this is for those who know the hook's token and prove it; `sublet cluster` does with --token-file, docs/how-to/cluster.md says how"
        };
        site.turned_away(self.from, None);
        Verdict::Tell(problem(401, text))
    }

    /// A request of one who knows the token: the answer, its code, and whether the connection may
    /// stay.
    async fn carry_out(
        self: &Arc<Self>,
        head: Parts,
        body: Incoming,
        length: usize,
        signature: Signature,
    ) -> (Response, String, bool) {
        let (space, body) = match self.body(&head, body, length).await {
            Ok(both) => both,
            Err(said) => {
                let code = self.sign(&said);
                return (said, code, false);
            }
        };
        *self.stage.lock() = Stage::Working;
        let own = Arc::clone(self);
        // It is carried out even if the connection ends meanwhile, and its place stays taken.
        let work = move || {
            let _space = space;
            let (said, taken) = if auth::digest(&body) == signature.digest {
                let request = hyper::Request::from_parts(head, Body::from(body));
                let answer = routed(&own.door.routes, request);
                (Handle::current().block_on(answer), true)
            } else {
                let text = "the body is not the one that was signed";
                (problem(400, text), false)
            };
            let code = own.sign(&said);
            (said, code, taken)
        };
        match spawn_blocking(work).await {
            Ok(done) => done,
            Err(_) => {
                let said = problem(503, "the hook has failed; start it again");
                let code = self.sign(&said);
                (said, code, false)
            }
        }
    }

    /// The body of a request, and the space that it takes.
    async fn body(
        &self,
        head: &Parts,
        mut body: Incoming,
        length: usize,
    ) -> Result<(Option<OwnedSemaphorePermit>, Bytes), Response> {
        let site = &self.door.site;
        let limit = site.body_limit(head.method.as_str(), path(head));
        let limit = limit.min(MAX_BODY_BYTES);
        if length > limit {
            let text = format!("the body has {length} bytes, {limit} are taken there");
            return Err(problem(413, &text));
        }
        let Some(space) = self.door.space(length).await else {
            let text = "too many bodies are being read; try again in a moment";
            return Err(problem(503, text));
        };
        *self.stage.lock() = Stage::Body(Instant::now() + PATIENCE);
        let mut bytes = Vec::new();
        // hyper hands out as much as Content-Length says, and no more.
        while bytes.len() < length {
            let Some(Ok(frame)) = body.frame().await else {
                let have = bytes.len();
                let text = format!("the body ends after {have} of {length} bytes");
                return Err(problem(400, &text));
            };
            if let Some(data) = frame.data_ref() {
                bytes.extend_from_slice(data);
            }
        }
        Ok((space, bytes.into()))
    }

    /// The code of an answer to the request that came last.
    fn sign(&self, said: &Response) -> String {
        let session = self.session.lock();
        let code = session
            .as_ref()
            .map(|session| session.sign_answer(said.status, &said.body));
        code.unwrap_or_default()
    }
}

/// What the routes answer.
async fn routed(routes: &Router, request: hyper::Request<Body>) -> Response {
    routed_as(routes, request).await.0
}

/// The same, and what it is if it is not JSON.
async fn routed_as(
    routes: &Router,
    request: hyper::Request<Body>,
) -> (Response, Option<MediaType>) {
    let answer = match routes.clone().call(request).await {
        Ok(answer) => answer,
        Err(never) => match never {},
    };
    let status = answer.status().as_u16();
    let media = answer.extensions().get::<MediaType>().copied();
    let said = match to_bytes(answer.into_body(), usize::MAX).await {
        Ok(body) => Response {
            status,
            body: body.into(),
        },
        Err(error) => problem(500, &format!("the answer cannot be written: {error}")),
    };
    (said, media)
}

/// The path with its query, as it is signed.
fn path(head: &Parts) -> &str {
    head.uri.path_and_query().map_or("", |path| path.as_str())
}

/// What came as `Authorization: Sublet`.
fn signature(fields: &HeaderMap) -> Option<Signature> {
    let value = fields.get(header::AUTHORIZATION)?.to_str().ok()?.trim();
    let (scheme, rest) = value.split_once(' ')?;
    scheme
        .eq_ignore_ascii_case(SCHEME)
        .then(|| Signature::parse(rest))
        .flatten()
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

fn encode(said: Response, code: Option<&str>, keep: bool) -> hyper::Response<Full<Bytes>> {
    let number = said.status;
    let mut answer = hyper::Response::new(Full::from(said.body));
    *answer.status_mut() = status(number);
    if number == 413 {
        // As RFC 9110 calls it.
        let reason = ReasonPhrase::from_static(b"Content Too Large");
        answer.extensions_mut().insert(reason);
    }
    let connection = if keep { "keep-alive" } else { "close" };
    let fields = answer.headers_mut();
    for (name, value) in [
        (header::CONTENT_TYPE, "application/json"),
        (header::CONNECTION, connection),
        (header::CACHE_CONTROL, "no-store"),
    ] {
        fields.insert(name, HeaderValue::from_static(value));
    }
    if let Some(code) = code.and_then(|code| HeaderValue::from_str(code).ok()) {
        fields.insert(CODE_FIELD, code);
    }
    answer
}

/// Listen, and say where.
///
/// # Errors
/// The address is taken or not ours.
pub fn listen(address: SocketAddr) -> io::Result<(TcpListener, SocketAddr)> {
    let listener = TcpListener::bind(address)?;
    // A crowd at the door keeps nobody else from knocking.
    let _ = rustix::net::listen(&listener, 4096);
    let bound = listener.local_addr()?;
    Ok((listener, bound))
}
