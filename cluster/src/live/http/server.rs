//! The listening side, in two stages.
//!
//! *The hall*: whoever comes in. One thread looks after all of them without ever waiting for one; a
//! connection may send a head, 16 KiB at most, and nothing else, and has [`HALL`] for it. There is space
//! for [`PENDING`]; a newcomer is never turned away, but takes the place of a connection of the address
//! with most pending, of the one who has shown nothing for longest. So strangers, however many and
//! however slow, cost a bounded part of one thread and some memory, and an honest client that says
//! at once who it is gets through.
//!
//! *Inside*: who has shown by the head of a request that it knows the token
//! ([`auth`]). Each has a thread; only here are bodies read, within
//! [`BODY_BYTES`] for all together.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{CODE_FIELD, First, Head, HttpError, MAX_BODY_BYTES, Timed, parse};
use crate::live::auth::{self, Secret, Session};
use crate::live::wire::HookId;

/// Guests in the hall at most.
const PENDING: usize = 256;
/// Who has shown that it knows the token, at most: each node has an agent, and people ask, too.
const INSIDE: usize = 1280;
/// Newcomers in a step: those who are there already come next.
const STEP: usize = 32;
/// Bytes of all bodies that are read or answered at a time.
const BODY_BYTES: usize = 64 << 20;
/// Stack of a thread inside.
const STACK_BYTES: usize = 512 << 10;
/// TIMEOUT: a connection says who it is within a network's round trip; on a host in trouble within
/// seconds.
const HALL: Duration = Duration::from_secs(10);
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
    /// What is told to everybody; `None`: this is for those who know the token.
    fn open(&self, method: &str, path: &str) -> Option<Response>;
    /// Bytes of the longest body that is taken there.
    fn body_limit(&self, method: &str, path: &str) -> usize;
    /// A request whose sender knows the token.
    fn answer(&self, request: &Request) -> Response;
    /// Somebody was turned away who does not.
    fn turned_away(&self, from: IpAddr);
}

/// Serve until the process ends. Returns only where the listener is broken.
///
/// # Errors
/// The listener's.
pub fn serve(listener: &TcpListener, site: &Arc<dyn Site>) -> io::Error {
    allow_descriptors();
    let hall = Hall {
        listener,
        site,
        inside: Arc::default(),
        pending: Vec::new(),
        shut_until: None,
    };
    match hall.look_after() {
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

/// Somebody in the hall.
struct Pending {
    stream: TcpStream,
    from: IpAddr,
    since: Instant,
    /// When it last said something that was of use.
    shown: Instant,
    input: Vec<u8>,
    output: Vec<u8>,
    session: Option<Session>,
    /// It goes once it has been told.
    closing: bool,
}

/// What becomes of a connection.
enum Next {
    Stays,
    Goes,
    /// Its request, and what it sent after that.
    Enters(Head),
}

struct Hall<'a> {
    listener: &'a TcpListener,
    site: &'a Arc<dyn Site>,
    inside: Arc<Inside>,
    pending: Vec<Pending>,
    /// The host is out of descriptors.
    shut_until: Option<Instant>,
}

impl Hall<'_> {
    fn look_after(mut self) -> io::Result<std::convert::Infallible> {
        self.listener.set_nonblocking(true)?;
        loop {
            let now = Instant::now();
            let open = self.shut_until.is_none_or(|until| now >= until);
            let ready = self.wait(now, open)?;
            if open && ready.first() == Some(&true) {
                self.let_in()?;
            }
            // Those who came just now are looked at in the next step. Where one had to make space,
            // the list is off by one for those after it, which costs them a look in vain or a step:
            // nobody is waited for.
            let mut at = ready.len().saturating_sub(1);
            while at > 0 {
                at -= 1;
                let Some(connection) = self.pending.get_mut(at) else {
                    continue;
                };
                let next = if ready[at + 1] {
                    connection.advance(self.site.as_ref())
                } else {
                    Next::Stays
                };
                match next {
                    Next::Stays if connection.since.elapsed() < HALL => {}
                    Next::Stays | Next::Goes => drop(self.pending.swap_remove(at)),
                    Next::Enters(head) => {
                        let connection = self.pending.swap_remove(at);
                        self.enter(connection, head);
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
            .map(|connection| connection.since + HALL);
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
    fn let_in(&mut self) -> io::Result<()> {
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
                    // Out of descriptors: a connection gives one back, and those inside will close
                    // theirs.
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

    /// Who has shown nothing for longest, of the address with most pending, goes.
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

    fn enter(&self, connection: Pending, head: Head) {
        let Some(session) = connection.session else {
            return;
        };
        let place = Place::take(&self.inside);
        if place.number > INSIDE {
            let text = format!("{INSIDE} connections are open; try again in a moment");
            let mut stream = connection.stream;
            let _ = stream.write(&encode(&problem(503, &text), None, false));
            return;
        }
        if connection.stream.set_nonblocking(false).is_err() {
            return;
        }
        let (site, inside) = (Arc::clone(self.site), Arc::clone(&self.inside));
        let (stream, from) = (
            Timed::with(connection.stream, connection.input),
            connection.from,
        );
        let started = std::thread::Builder::new()
            .name("http".into())
            .stack_size(STACK_BYTES)
            .spawn(move || {
                let _place = place;
                converse(stream, from, session, head, site.as_ref(), &inside);
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
                Err(error) if gone(&error) => Next::Goes,
                Err(_) => Next::Stays,
            };
        }
        let mut chunk = [0; 4 << 10];
        match self.stream.read(&mut chunk) {
            Ok(0) => return Next::Goes,
            // PANIC: a read returns at most the buffer's length.
            Ok(count) => self.input.extend_from_slice(&chunk[..count]),
            Err(error) if gone(&error) => return Next::Goes,
            Err(_) => return Next::Stays,
        }
        match parse(&self.input, true) {
            Ok(None) => Next::Stays,
            Ok(Some(head)) => {
                self.input.drain(..head.bytes);
                self.heard(head, site)
            }
            Err(HttpError::Bad(status, text)) => self.tell(&problem(status, &text), false),
            Err(_) => Next::Goes,
        }
    }

    fn flush_output(&mut self) -> Next {
        if self.output.is_empty() && self.closing {
            return Next::Goes;
        }
        Next::Stays
    }

    fn tell(&mut self, response: &Response, stays: bool) -> Next {
        self.output = encode(response, None, stays);
        self.closing = !stays;
        // Most answers go out at once.
        match self.stream.write(&self.output) {
            Ok(count) => drop(self.output.drain(..count)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(_) => return Next::Goes,
        }
        self.flush_output()
    }

    fn heard(&mut self, head: Head, site: &dyn Site) -> Next {
        let First::Request { method, path } = &head.first else {
            return Next::Goes;
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
            return Next::Enters(head);
        }
        if let Some(response) = site.open(method, path) {
            return self.tell(&response, false);
        }
        site.turned_away(self.from);
        let text = "this is for those who know the hook's token and prove it; `sublet cluster` does with --token-file, docs/cluster.md says how";
        self.tell(&problem(401, text), false)
    }
}

/// What those inside share.
#[derive(Default)]
struct Inside {
    count: AtomicUsize,
    /// Bytes of bodies in the works.
    bytes: Mutex<usize>,
    freed: Condvar,
}

/// A place inside.
struct Place {
    inside: Arc<Inside>,
    number: usize,
}

impl Place {
    fn take(inside: &Arc<Inside>) -> Self {
        // SYNC(count): a count and nothing else; no data is published by it.
        let number = inside.count.fetch_add(1, Ordering::Relaxed) + 1;
        Self {
            inside: Arc::clone(inside),
            number,
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.inside.count.fetch_sub(1, Ordering::Relaxed);
    }
}

/// BodySpace for a body.
struct BodySpace<'a> {
    inside: &'a Inside,
    bytes: usize,
}

impl<'a> BodySpace<'a> {
    /// Waits for it as long as for a body.
    fn take(inside: &'a Inside, bytes: usize) -> Option<Self> {
        let used = inside.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        let full = |used: &mut usize| *used + bytes > BODY_BYTES;
        let (mut used, _) = inside
            .freed
            .wait_timeout_while(used, PATIENCE, full)
            .unwrap_or_else(PoisonError::into_inner);
        if full(&mut used) {
            return None;
        }
        *used += bytes;
        Some(Self { inside, bytes })
    }
}

impl Drop for BodySpace<'_> {
    fn drop(&mut self) {
        let mut used = self
            .inside
            .bytes
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *used -= self.bytes;
        drop(used);
        self.inside.freed.notify_all();
    }
}

/// Requests of one who knows the token; the head of the first has been read and checked.
fn converse(
    mut stream: Timed,
    from: IpAddr,
    mut session: Session,
    mut head: Head,
    site: &dyn Site,
    inside: &Inside,
) {
    loop {
        let (response, keep) = match carry_out(&mut stream, &head, site, inside) {
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
    inside: &Inside,
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
    let Some(_space) = BodySpace::take(inside, head.length) else {
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
