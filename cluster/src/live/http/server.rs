//! The listening side, in two stages.
//!
//! *Pending*: every new connection. One thread serves all of them without ever waiting for one. A
//! connection may send a head of 16 KiB at most, and nothing else, within [`PENDING_TIME`]. There
//! is space for [`PENDING`]. A newcomer is never refused: it replaces a connection of the address
//! that has most of them, the one that has been silent for longest. So strangers, however many and
//! however slow, cost a bounded part of one thread and some memory, and an honest client that
//! authenticates at once gets through.
//!
//! *Admitted*: connections that have proved by the head of a request that they know the token
//! ([`auth`]). Each has a thread; only admitted connections may send bodies, within [`BODY_BYTES`]
//! for all together.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{CODE_FIELD, First, Head, HttpError, MAX_BODY_BYTES, Timed, parse};
use crate::live::auth::{self, Secret, Session};
use crate::live::wire::HookId;

/// Most pending connections.
const PENDING: usize = 256;
/// Most admitted connections: each node has an agent, and people ask, too.
const ADMITTED: usize = 1280;
/// Newcomers in a step: those who are there already come next.
const STEP: usize = 32;
/// Bytes of all bodies that are read or answered at a time.
const BODY_BYTES: usize = 64 << 20;
/// Stack of an admitted connection's thread.
const STACK_BYTES: usize = 512 << 10;
/// TIMEOUT: a connection says who it is within a network's round trip; on a host in trouble within
/// seconds.
const PENDING_TIME: Duration = Duration::from_secs(10);
/// TIMEOUT: agents report each second; a minute of silence is a forgotten connection.
const IDLE: Duration = Duration::from_secs(60);
/// TIMEOUT: a message of megabytes takes well below a second on any link between hosts.
const PATIENCE: Duration = Duration::from_secs(10);

/// A request of somebody who knows the token.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Request {
    /// `GET`, `POST`, ...
    pub method: String,
    /// The path with its query.
    pub path: String,
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

/// What is served. Only [`answer`](Self::answer) may wait; it is called on the thread of a
/// connection.
pub trait Site: Send + Sync {
    /// What everybody has to know.
    fn secret(&self) -> &Secret;
    /// Who serves.
    fn hook(&self) -> &HookId;
    /// The answer that needs no token; `None`: this path needs the token.
    fn open(&self, method: &str, path: &str) -> Option<Response>;
    /// Bytes of the longest body that is taken there.
    fn body_limit(&self, method: &str, path: &str) -> usize;
    /// A request whose sender knows the token.
    fn answer(&self, request: &Request) -> Response;
    /// A peer without the token was refused.
    fn turned_away(&self, from: IpAddr);
}

/// Serve until the process ends. Returns only if the listener is broken.
///
/// # Errors
/// The listener's.
pub fn serve(listener: &TcpListener, site: &Arc<dyn Site>) -> io::Error {
    allow_descriptors();
    let acceptor = Acceptor {
        listener,
        site,
        admitted: Arc::default(),
        pending: Vec::new(),
        shut_until: None,
    };
    match acceptor.run() {
        Ok(never) => match never {},
        Err(error) => error,
    }
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

/// A connection that has not authenticated yet.
struct Pending {
    stream: TcpStream,
    from: IpAddr,
    since: Instant,
    /// When it last sent something useful.
    shown: Instant,
    input: Vec<u8>,
    output: Vec<u8>,
    session: Option<Session>,
    /// To be closed once its output is sent.
    closing: bool,
}

/// What happens to a connection.
enum Next {
    Stay,
    Close,
    /// Its request, and what it sent after that.
    Admit(Head),
}

struct Acceptor<'a> {
    listener: &'a TcpListener,
    site: &'a Arc<dyn Site>,
    admitted: Arc<Admitted>,
    pending: Vec<Pending>,
    /// The host is out of descriptors.
    shut_until: Option<Instant>,
}

impl Acceptor<'_> {
    fn run(mut self) -> io::Result<std::convert::Infallible> {
        self.listener.set_nonblocking(true)?;
        loop {
            let now = Instant::now();
            let open = self.shut_until.is_none_or(|until| now >= until);
            let ready = self.wait(now, open)?;
            if open && ready.first() == Some(&true) {
                self.accept_all()?;
            }
            // New connections are served in the next step. If one of them replaced another,
            // the list is off by one after it, which costs a look in vain or a step:
            // nothing waits.
            let mut at = ready.len().saturating_sub(1);
            while at > 0 {
                at -= 1;
                let Some(connection) = self.pending.get_mut(at) else {
                    continue;
                };
                let next = if ready[at + 1] {
                    connection.advance(self.site.as_ref())
                } else {
                    Next::Stay
                };
                match next {
                    Next::Stay if connection.since.elapsed() < PENDING_TIME => {}
                    Next::Stay | Next::Close => drop(self.pending.swap_remove(at)),
                    Next::Admit(head) => {
                        let connection = self.pending.swap_remove(at);
                        self.admit(connection, head);
                    }
                }
            }
        }
    }

    /// Until there is something to do: whether for the listener, and for each connection.
    fn wait(&self, now: Instant, open: bool) -> io::Result<Vec<bool>> {
        let ends = self
            .pending
            .iter()
            .map(|connection| connection.since + PENDING_TIME);
        let ends = ends.chain(self.shut_until.filter(|_| !open));
        let left = ends.min().map(|end| end.saturating_duration_since(now));
        let left = left.map(|left| Timespec {
            // CAST: ten seconds at most.
            tv_sec: left.as_secs() as i64,
            tv_nsec: i64::from(left.subsec_nanos()),
        });
        let none = PollFlags::empty();
        let mut all = vec![PollFd::new(
            self.listener,
            if open { PollFlags::IN } else { none },
        )];
        for connection in &self.pending {
            let wants = if connection.output.is_empty() {
                PollFlags::IN
            } else {
                PollFlags::OUT
            };
            all.push(PollFd::new(&connection.stream, wants));
        }
        match poll(&mut all, left.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(all.iter().map(|fd| !fd.revents().is_empty()).collect())
    }

    /// Takes newcomers in.
    fn accept_all(&mut self) -> io::Result<()> {
        for _ in 0..STEP {
            match self.listener.accept() {
                Ok((stream, from)) => {
                    if self.pending.len() >= PENDING {
                        self.drop_one();
                    }
                    let _ = stream.set_nodelay(true);
                    if stream.set_nonblocking(true).is_ok() {
                        self.pending.push(Pending::new(stream, from.ip()));
                    }
                }
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => return Ok(()),
                    io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted => {}
                    // Out of descriptors: a connection gives one back, and those admitted will
                    // close theirs.
                    _ if matches!(error.raw_os_error(), Some(23 | 24)) => {
                        self.drop_one();
                        self.shut_until = Some(Instant::now() + Duration::from_millis(50));
                        return Ok(());
                    }
                    _ => return Err(error),
                },
            }
        }
        Ok(())
    }

    /// Drops the connection that has been silent for longest, of the address that has most of them.
    fn drop_one(&mut self) {
        let mut pending: BTreeMap<IpAddr, usize> = BTreeMap::new();
        for connection in &self.pending {
            *pending.entry(connection.from).or_default() += 1;
        }
        let most = pending.values().max().copied().unwrap_or(0);
        let crowded = |connection: &Pending| pending.get(&connection.from) == Some(&most);
        let last = (0..self.pending.len())
            .filter(|at| crowded(&self.pending[*at]))
            .min_by_key(|at| self.pending[*at].shown);
        if let Some(at) = last {
            self.pending.remove(at);
        }
    }

    fn admit(&self, connection: Pending, head: Head) {
        let Some(session) = connection.session else {
            return;
        };
        let place = Place::take(&self.admitted);
        if place.number > ADMITTED {
            let text = format!("{ADMITTED} connections are open; try again in a moment");
            let mut stream = connection.stream;
            let _ = stream.write(&encode(&problem(503, &text), None, false));
            return;
        }
        if connection.stream.set_nonblocking(false).is_err() {
            return;
        }
        let (site, admitted) = (Arc::clone(self.site), Arc::clone(&self.admitted));
        let (stream, from) = (
            Timed::with(connection.stream, connection.input),
            connection.from,
        );
        let started = std::thread::Builder::new()
            .name("http".into())
            .stack_size(STACK_BYTES)
            .spawn(move || {
                let _place = place;
                converse(stream, from, session, head, site.as_ref(), &admitted);
            });
        // No thread to be had: the connection closes, and its owner tries again.
        drop(started);
    }
}

impl Pending {
    fn new(stream: TcpStream, from: IpAddr) -> Self {
        let now = Instant::now();
        Self {
            stream,
            from,
            since: now,
            shown: now,
            input: Vec::new(),
            output: Vec::new(),
            session: None,
            closing: false,
        }
    }

    /// One read or one write, and what follows from it.
    fn advance(&mut self, site: &dyn Site) -> Next {
        let gone = |error: &io::Error| {
            !matches!(
                error.kind(),
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
            )
        };
        if !self.output.is_empty() {
            return match self.stream.write(&self.output) {
                Ok(count) => {
                    self.output.drain(..count);
                    self.flush_output()
                }
                Err(error) if gone(&error) => Next::Close,
                Err(_) => Next::Stay,
            };
        }
        let mut chunk = [0; 4 << 10];
        match self.stream.read(&mut chunk) {
            Ok(0) => return Next::Close,
            // PANIC: a read returns at most the buffer's length.
            Ok(count) => self.input.extend_from_slice(&chunk[..count]),
            Err(error) if gone(&error) => return Next::Close,
            Err(_) => return Next::Stay,
        }
        match parse(&self.input, true) {
            Ok(None) => Next::Stay,
            Ok(Some(head)) => {
                self.input.drain(..head.bytes);
                self.heard(head, site)
            }
            Err(HttpError::Bad(status, text)) => self.tell(&problem(status, &text), false),
            Err(_) => Next::Close,
        }
    }

    fn flush_output(&mut self) -> Next {
        if self.output.is_empty() && self.closing {
            return Next::Close;
        }
        Next::Stay
    }

    fn tell(&mut self, response: &Response, stays: bool) -> Next {
        self.output = encode(response, None, stays);
        self.closing = !stays;
        // Most answers go out at once.
        match self.stream.write(&self.output) {
            Ok(count) => drop(self.output.drain(..count)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(_) => return Next::Close,
        }
        self.flush_output()
    }

    fn heard(&mut self, head: Head, site: &dyn Site) -> Next {
        let First::Request { method, path } = &head.first else {
            return Next::Close;
        };
        if method == "GET"
            && head.length == 0
            && self.session.is_none()
            && let Some(nonce) = path.strip_prefix("/v1/session?nonce=")
        {
            if !auth::is_nonce(nonce) {
                return self.tell(
                    &problem(400, "the nonce is not 64 hexadecimal digits"),
                    false,
                );
            }
            let Ok((challenge, session)) = site.secret().answer(nonce, site.hook()) else {
                return self.tell(&problem(503, "this host has no random numbers"), false);
            };
            self.session = Some(session);
            self.shown = Instant::now();
            let body = serde_json::to_vec(&challenge).unwrap_or_default();
            return self.tell(&Response { status: 200, body }, true);
        }
        if let (Some(session), Some(signature)) = (&mut self.session, &head.signature)
            && session.admits(method, path, signature)
        {
            return Next::Admit(head);
        }
        if let Some(response) = site.open(method, path) {
            return self.tell(&response, false);
        }
        site.turned_away(self.from);
        let text = "this is for those who know the hook's token and prove it; `sublet cluster` does with --token-file, docs/how-to/cluster.md says how";
        self.tell(&problem(401, text), false)
    }
}

/// What those admitted share.
#[derive(Default)]
struct Admitted {
    count: AtomicUsize,
    /// Bytes of bodies in the works.
    bytes: Mutex<usize>,
    freed: Condvar,
}

/// A place admitted.
struct Place {
    admitted: Arc<Admitted>,
    number: usize,
}

impl Place {
    fn take(admitted: &Arc<Admitted>) -> Self {
        // SYNC(count): a count and nothing else; no data is published by it.
        let number = admitted.count.fetch_add(1, Ordering::Relaxed) + 1;
        Self {
            admitted: Arc::clone(admitted),
            number,
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.admitted.count.fetch_sub(1, Ordering::Relaxed);
    }
}

/// BodySpace for a body.
struct BodySpace<'a> {
    admitted: &'a Admitted,
    bytes: usize,
}

impl<'a> BodySpace<'a> {
    /// Waits for it as long as for a body.
    fn take(admitted: &'a Admitted, bytes: usize) -> Option<Self> {
        let mut used = admitted.bytes.lock();
        let full = |used: &mut usize| *used + bytes > BODY_BYTES;
        admitted.freed.wait_while_for(&mut used, full, PATIENCE);
        if full(&mut used) {
            return None;
        }
        *used += bytes;
        Some(Self { admitted, bytes })
    }
}

impl Drop for BodySpace<'_> {
    fn drop(&mut self) {
        *self.admitted.bytes.lock() -= self.bytes;
        self.admitted.freed.notify_all();
    }
}

/// Requests of one who knows the token; the head of the first has been read and checked.
fn converse(
    mut stream: Timed,
    from: IpAddr,
    mut session: Session,
    mut head: Head,
    site: &dyn Site,
    admitted: &Admitted,
) {
    loop {
        let (response, keep) = match carry_out(&mut stream, &head, site, admitted) {
            Ok(response) => (response, head.keep),
            Err(HttpError::Bad(status, text)) => (problem(status, &text), false),
            Err(_) => return,
        };
        let code = session.sign_answer(response.status, &response.body);
        let bytes = encode(&response, Some(&code), keep);
        if stream.write(&bytes, PATIENCE).is_err() || !keep {
            return;
        }
        head = match stream.head(true, IDLE, PATIENCE) {
            Ok(head) => head,
            Err(HttpError::Bad(status, text)) => {
                let _ = stream.write(&encode(&problem(status, &text), None, false), PATIENCE);
                return;
            }
            Err(_) => return,
        };
        let First::Request { method, path } = &head.first else {
            return;
        };
        let next = head
            .signature
            .as_ref()
            .is_some_and(|signature| session.admits(method, path, signature));
        if !next {
            site.turned_away(from);
            let text = "this is not the session's next request, or somebody has altered it";
            let _ = stream.write(&encode(&problem(401, text), None, false), PATIENCE);
            return;
        }
    }
}

fn carry_out(
    stream: &mut Timed,
    head: &Head,
    site: &dyn Site,
    admitted: &Admitted,
) -> Result<Response, HttpError> {
    let (First::Request { method, path }, Some(signature)) = (&head.first, &head.signature) else {
        return Err(HttpError::Closed);
    };
    let limit = site.body_limit(method, path).min(MAX_BODY_BYTES);
    if head.length > limit {
        let text = format!(
            "the body has {} bytes, {limit} are taken there",
            head.length
        );
        return Err(HttpError::Bad(413, text));
    }
    let Some(_space) = BodySpace::take(admitted, head.length) else {
        let text = "too many bodies are being read; try again in a moment".into();
        return Err(HttpError::Bad(503, text));
    };
    let body = stream.body(head.length, PATIENCE)?;
    if auth::digest(&body) != signature.digest {
        let text = "the body is not the one that was signed".into();
        return Err(HttpError::Bad(400, text));
    }
    Ok(site.answer(&Request {
        method: method.clone(),
        path: path.clone(),
        body,
    }))
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

fn encode(response: &Response, code: Option<&str>, keep: bool) -> Vec<u8> {
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
    let code = code.map_or_else(String::new, |code| format!("{CODE_FIELD}: {code}\r\n"));
    let head = format!(
        "HTTP/1.1 {} {reason}\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: {connection}\r\n{code}Cache-Control: no-store\r\n\r\n",
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
    // A crowd at the door keeps nobody else from knocking.
    let _ = rustix::net::listen(&listener, 4096);
    let bound = listener.local_addr()?;
    Ok((listener, bound))
}
