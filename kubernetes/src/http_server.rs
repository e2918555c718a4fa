//! HTTP/1.1 for the scheduler's questions, over TLS or plain: bounded in connections, heads, bodies
//! and time. With TLS a connection has a place once its handshake is done.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, TcpListener};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use http_body_util::{BodyExt as _, Full, LengthLimitError, Limited};
use hyper::body::{Body as _, Bytes, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::task::AbortHandle;
use tokio::time::{Sleep, sleep, timeout};
use tokio_rustls::TlsAcceptor;

/// Connections at a time: a scheduler keeps a few.
const CONNECTIONS: usize = 64;
/// Connections whose handshake is going on, beside those.
const HANDSHAKES: usize = 256;
/// The first byte of a handshake of TLS; no method of HTTP begins with it.
const HANDSHAKE: u8 = 0x16;
/// Of what comes after the last word, so many reads.
const MOST_READS: u32 = 64;
/// Strangers are spoken of once in so long.
const SAY_AGAIN: Duration = Duration::from_secs(60);
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

/// How connections are secured, and who hears of those that are not.
pub struct Security {
    /// `None`: they are plain.
    pub tls: Option<certificates::Server>,
    /// Gets what an operator should know, one line each.
    pub say: Box<dyn Fn(&str) + Send + Sync>,
}

/// Serves until the listener is broken. `answer` gets method, path and body, on a thread of its
/// own; a body above `longest` bytes is refused before it.
///
/// # Errors
/// The listener's.
pub fn serve(
    listener: TcpListener,
    security: Security,
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
    runtime.block_on(accept(listener, security, limits, Arc::new(answer)))
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

async fn accept<A>(
    listener: TcpListener,
    security: Security,
    limits: Limits,
    answer: Arc<A>,
) -> io::Error
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
    let places = Arc::new(Semaphore::new(limits.connections));
    let bodies = Arc::new(Semaphore::new(
        limits.bodies.max(limits.longest) / BODY_UNIT + 1,
    ));
    let door = Arc::new(Door {
        security,
        shaking: Mutex::default(),
        said: Mutex::default(),
    });
    let mut number = 0_u64;
    loop {
        // Those beyond wait in the kernel's queue: who is there is done within its deadlines. With
        // TLS nobody waits there: who has not shown anything yet gives way to newcomers.
        let place = match door.security.tls {
            Some(_) => None,
            None => match Arc::clone(&places).acquire_owned().await {
                Ok(place) => Some(place),
                Err(_) => return io::Error::other("no places"),
            },
        };
        let Ok((stream, from)) = listener.accept().await else {
            // Descriptors, or a peer that has gone: neither says anything of the listener.
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        number += 1;
        let (answer, bodies) = (Arc::clone(&answer), Arc::clone(&bodies));
        let (door, places) = (Arc::clone(&door), Arc::clone(&places));
        let own = Arc::clone(&door);
        let has_place = place.is_some();
        let serving = async move {
            let entered = Entered { door, number };
            let begun = timeout(limits.patience, begin(&entered.door, from.ip(), stream)).await;
            let Ok(Some(stream)) = begun else { return };
            let place = match place {
                Some(place) => place,
                None => {
                    entered.door.shaken(number);
                    match places.acquire_owned().await {
                        Ok(place) => place,
                        Err(_) => return,
                    }
                }
            };
            drop(entered);
            converse(stream, limits, bodies, answer).await;
            drop(place);
        };
        if has_place {
            tokio::spawn(serving);
            continue;
        }
        own.make_space();
        // It first runs when this thread comes to it, after the next line.
        let task = tokio::spawn(serving).abort_handle();
        let shaking = Shaking {
            from: from.ip(),
            is_done: false,
            task,
        };
        own.shaking.lock().insert(number, shaking);
    }
}

async fn converse<A>(stream: Stream, limits: Limits, bodies: Arc<Semaphore>, answer: Arc<A>)
where
    A: Fn(&str, &str, &[u8]) -> Answer + Send + Sync + 'static,
{
    let stream = Hurried {
        stream: TokioIo::new(stream),
        patience: limits.patience,
        since: None,
    };
    let service = service_fn(move |request| {
        let (answer, bodies) = (Arc::clone(&answer), Arc::clone(&bodies));
        async move { Ok::<_, Infallible>(one(request, limits, &bodies, answer).await) }
    });
    let _ = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.patience)
        .max_buf_size(HEAD)
        .serve_connection(stream, service)
        .await;
}

/// A connection, with TLS or without.
trait Both: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Both for T {}

type Stream = Box<dyn Both>;

/// What all connections share.
struct Door {
    security: Security,
    /// Handshakes by number, in the sequence of their arrival.
    shaking: Mutex<BTreeMap<u64, Shaking>>,
    /// When strangers were spoken of last, and how many have come since.
    said: Mutex<(Option<Instant>, u64)>,
}

struct Shaking {
    from: IpAddr,
    /// It waits for a place.
    is_done: bool,
    task: AbortHandle,
}

/// A connection without a place.
struct Entered {
    door: Arc<Door>,
    number: u64,
}

impl Drop for Entered {
    fn drop(&mut self) {
        self.door.shaking.lock().remove(&self.number);
    }
}

impl Door {
    /// A newcomer takes the place of the oldest of the address that has most of them; of those who
    /// have done their handshake last.
    fn make_space(&self) {
        let mut shaking = self.shaking.lock();
        if shaking.len() < HANDSHAKES {
            return;
        }
        let mut count: BTreeMap<IpAddr, usize> = BTreeMap::new();
        for one in shaking.values() {
            *count.entry(one.from).or_default() += 1;
        }
        let most = count.values().max().copied();
        let crowded = shaking.iter();
        let crowded = crowded.filter(|(_, one)| count.get(&one.from).copied() == most);
        let first = crowded.min_by_key(|(number, one)| (one.is_done, **number));
        let first = first.map(|(number, _)| *number);
        let gone = first.and_then(|number| shaking.remove(&number));
        drop(shaking);
        if let Some(gone) = gone {
            gone.task.abort();
        }
    }

    fn shaken(&self, number: u64) {
        if let Some(one) = self.shaking.lock().get_mut(&number) {
            one.is_done = true;
        }
    }

    /// Somebody was turned away, for a reason.
    fn turned_away(&self, from: IpAddr, why: &str) {
        let mut said = self.said.lock();
        said.1 += 1;
        if said.0.is_none_or(|at| at.elapsed() >= SAY_AGAIN) {
            let count = std::mem::take(&mut said.1);
            said.0 = Some(Instant::now());
            drop(said);
            (self.security.say)(&format!(
                "connections were turned away: {count}, the last one from {from}: {why}"
            ));
        }
    }
}

/// The beginning of a connection: TLS where there is TLS. `None`: it has ended, and its peer has
/// heard why.
async fn begin(door: &Door, from: IpAddr, stream: TcpStream) -> Option<Stream> {
    let mut first = [0];
    if stream.peek(&mut first).await.ok()? == 0 {
        return None;
    }
    let speaks_tls = first[0] == HANDSHAKE;
    let (why, stream) = match (&door.security.tls, speaks_tls) {
        (None, false) => return Some(Box::new(stream)),
        (Some(tls), true) => {
            let config = match tls.held() {
                Ok(config) => config,
                Err(why) => {
                    door.turned_away(from, &why);
                    return None;
                }
            };
            let shaken = TlsAcceptor::from(config).accept(stream).into_fallible();
            match shaken.await {
                Ok(stream) => return Some(Box::new(stream)),
                Err((error, stream)) => {
                    let why = certificates::explain(&error);
                    let why = why.unwrap_or_else(|| format!("no TLS was agreed on: {error}"));
                    door.turned_away(from, &why);
                    close(stream, "").await;
                    return None;
                }
            }
        }
        (None, true) => (
            "it speaks TLS, and this port is plain: give --tls-cert and --tls-key, or write http:// and no enableHTTPS there",
            stream,
        ),
        (Some(_), false) => (
            "this port takes TLS alone: write https:// and enableHTTPS there",
            stream,
        ),
    };
    door.turned_away(from, why);
    let said = problem(400, why).json;
    let length = said.len();
    let answer = format!(
        "HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{said}"
    );
    close(stream, &answer).await;
    None
}

/// Says the last word and closes. What the peer still sends is read: the kernel would take the
/// last word back.
async fn close(mut stream: TcpStream, last: &str) {
    if stream.write_all(last.as_bytes()).await.is_err() || stream.shutdown().await.is_err() {
        return;
    }
    let mut rest = [0; 1024];
    for _ in 0..MOST_READS {
        if !matches!(stream.read(&mut rest).await, Ok(1..)) {
            return;
        }
    }
}

/// A connection that ends where its peer takes nothing of an answer for a time.
struct Hurried {
    stream: TokioIo<Stream>,
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
        start_with(None, limits, answer)
    }

    fn start_with(
        tls: Option<certificates::Server>,
        limits: Limits,
        answer: impl Fn() -> String + Send + Sync + 'static,
    ) -> SocketAddr {
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
            let security = Security {
                tls,
                say: Box::new(|_| ()),
            };
            runtime.block_on(accept(listener, security, limits, Arc::new(answer)))
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

    const LIMITS: Limits = Limits {
        connections: 4,
        longest: 4 << 10,
        bodies: 4 << 10,
        patience: Duration::from_secs(10),
    };

    /// An extender with certificates of its own authority, and the directory of those.
    fn start_secured(clients: bool, limits: Limits) -> (SocketAddr, tempfile::TempDir) {
        use certificates::{Lab, Purpose, Server, ServerFiles, Versions};
        let dir = tempfile::tempdir().unwrap();
        let now = std::time::SystemTime::now();
        let lab = Lab::open(dir.path(), now).unwrap();
        for (who, name, purpose) in [
            ("hook", "localhost", Purpose::Server),
            ("operator", "operator", Purpose::Client),
        ] {
            lab.make(who, &[name.into()], purpose, (now, 1), false)
                .unwrap();
        }
        let (certificate, key) = lab.files("hook");
        let files = ServerFiles {
            certificate,
            key,
            clients: clients.then(|| lab.files("ca").0),
        };
        let tls = Server::open(&files, Versions::From12, |_| ()).unwrap();
        (start_with(Some(tls), limits, || "{}".into()), dir)
    }

    /// An answer over TLS; who asks shows a certificate or none.
    fn ask_secured(address: SocketAddr, dir: &std::path::Path, shows: bool) -> io::Result<String> {
        use std::io::Read as _;
        let files = certificates::ClientFiles {
            authority: dir.join("ca.crt"),
            own: shows.then(|| (dir.join("operator.crt"), dir.join("operator.key"))),
        };
        let client = certificates::Client::open(&files, |_| ()).unwrap();
        let name = "localhost".try_into().unwrap();
        let mut session = rustls::ClientConnection::new(client.now().unwrap(), name).unwrap();
        let mut stream = TcpStream::connect(address)?;
        stream.set_read_timeout(Some(testbed::PATIENCE))?;
        let mut tls = rustls::Stream::new(&mut session, &mut stream);
        let head = "POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}";
        tls.write_all(head.as_bytes())?;
        let mut text = String::new();
        tls.read_to_string(&mut text)?;
        Ok(text)
    }

    #[test]
    fn who_shows_no_certificate_is_not_answered_by_the_extender() {
        let (address, dir) = start_secured(true, LIMITS);
        let answered = ask_secured(address, dir.path(), true).unwrap();
        assert!(answered.contains(" 200 "), "{answered}");
        let error = ask_secured(address, dir.path(), false).unwrap_err();
        let why = certificates::explain(&error);
        assert!(
            why.as_ref()
                .is_some_and(|why| why.contains("demands a certificate")),
            "{error}: {why:?}"
        );
        // Without an authority for clients it is enough to speak TLS.
        let (open, dir) = start_secured(false, LIMITS);
        let answered = ask_secured(open, dir.path(), false).unwrap();
        assert!(answered.contains(" 200 "), "{answered}");
        let mut plain = send(open, "{}");
        let mut text = String::new();
        std::io::Read::read_to_string(&mut plain, &mut text).unwrap();
        assert!(
            text.contains(" 400 ") && text.contains("https://"),
            "{text}"
        );
        // And the other way round.
        let plain = start(LIMITS, || "{}".into());
        let error = ask_secured(plain, dir.path(), false).unwrap_err();
        assert!(certificates::is_no_tls(&error), "{error}");
    }

    #[test]
    fn handshakes_that_never_end_keep_no_scheduler_out() {
        let (address, dir) = start_secured(true, LIMITS);
        // The beginning of a record; more of them than there are places for handshakes.
        let crowd: Vec<TcpStream> = (0..500)
            .filter_map(|_| {
                let mut stream = TcpStream::connect(address).ok()?;
                let _ = stream.write_all(&[0x16, 3, 1, 2, 0, 1]);
                Some(stream)
            })
            .collect();
        assert!(crowd.len() > HANDSHAKES, "{}", crowd.len());
        for _ in 0..3 {
            let answered = ask_secured(address, dir.path(), true).unwrap();
            assert!(answered.contains(" 200 "), "{answered}");
        }
        // Those that had not to give way end by their deadline.
        for mut stream in crowd {
            stream.set_read_timeout(Some(testbed::PATIENCE)).unwrap();
            let mut rest = Vec::new();
            match std::io::Read::read_to_end(&mut stream, &mut rest) {
                Ok(_) => {}
                Err(error) => assert_eq!(error.kind(), io::ErrorKind::ConnectionReset),
            }
        }
    }
}
