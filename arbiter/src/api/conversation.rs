//! One connection of the API: hyper's end of it, and until when each step may last.

use std::convert::Infallible;
use std::future::poll_fn;
use std::io;
use std::net::IpAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, HttpBody};
use axum::http::{HeaderMap, HeaderValue, Request, Response, StatusCode, header};
use axum::response::IntoResponse;
use control::{ControlError, ErrorCode, Reply};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep_until, timeout};
use tower_service::Service;

use super::connections::{Holder, Place};
use super::problem::Problem;
use super::tokens::{Shown, Tokens};
use super::{Office, routes};
use crate::desk::{NotTaken, Put};
use crate::who::Peer;

/// Longest body in bytes. A command line can be long.
pub const BODY_BYTES: usize = 1 << 20;
/// A head in bytes, and its fields.
const HEAD_BYTES: usize = 16 << 10;
const HEAD_FIELDS: usize = 64;
/// TIMEOUT: a head, or a body of a megabyte, takes less than a millisecond to send; five seconds
/// are a stopped or hostile peer.
const MESSAGE: Duration = Duration::from_secs(5);
/// TIMEOUT: an answer is some megabytes at most; a reader that takes none has stopped.
const ANSWER: Duration = Duration::from_secs(10);
/// TIMEOUT: who follows the journal gets something every fifteen seconds; three of them unread
/// are a stopped reader.
const UNREAD: Duration = Duration::from_secs(45);
/// TIMEOUT: `top` asks every second or so; a minute of silence is a forgotten connection.
const SILENCE: Duration = Duration::from_secs(60);
/// TIMEOUT: everything but a move is answered within some seconds, on a host in trouble too: the
/// slowest waits three seconds for a user's name and one for a disk.
const WORK: Duration = Duration::from_secs(60);
/// TIMEOUT: beyond the time that an operator gives a move, or what the arbiter thinks right.
const MOVE: Duration = Duration::from_secs(600);

/// What a connection does, and until when it may.
#[derive(Clone, Copy, Debug)]
enum Stage {
    /// Its next request may begin.
    Silent(Instant),
    /// A head comes, or a body.
    Coming(Instant),
    /// The loop has its request, which has a deadline of its own.
    Working,
    /// The answer is sent.
    Answering(Instant),
    /// The journal is followed: as long as something is read.
    Following(Instant),
}

/// Who is at the other end of a connection.
pub enum Asker {
    /// A process of this host, by the kernel's word.
    Process(Peer),
    /// Somebody at that address, who shows a token with each request.
    Remote(Arc<Tokens>, IpAddr),
}

/// Who asks on a connection, and how far that connection has come.
#[derive(Clone)]
pub struct Caller {
    inner: Arc<Inner>,
    /// Who makes this request.
    peer: Peer,
    /// The token that was shown with it.
    shown: Option<Shown>,
}

struct Inner {
    asker: Asker,
    served_ns: Arc<AtomicU64>,
    stage: Mutex<Stage>,
    place: Place,
    office: Arc<Office>,
}

impl Caller {
    /// One who has just connected.
    pub fn new(asker: Asker, place: Place, office: Arc<Office>) -> Self {
        let peer = match &asker {
            Asker::Process(peer) => peer.clone(),
            Asker::Remote(..) => Peer::nobody(),
        };
        let inner = Arc::new(Inner {
            asker,
            served_ns: Arc::default(),
            stage: Mutex::new(Stage::Coming(Instant::now() + MESSAGE)),
            place,
            office,
        });
        Self {
            inner,
            peer,
            shown: None,
        }
    }

    /// Whose places it takes: its user's, or those of the address that it comes from.
    pub fn holder(&self) -> Holder {
        match &self.inner.asker {
            Asker::Process(peer) => Holder::of_user(peer.uid),
            Asker::Remote(_, address) => Holder::at(*address),
        }
    }

    /// Notes a request over TCP that was answered so, where it was a change that is refused.
    fn note_refused(&self, operation: &str, status: StatusCode) {
        let is_refusal = matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN);
        if is_refusal && matches!(self.inner.asker, Asker::Remote(..)) {
            let refusals = &self.inner.office.refusals;
            refusals.note(self.holder(), &self.peer, operation);
        }
    }

    /// Finds out who makes a request.
    ///
    /// # Errors
    /// It takes a token, and there is none that counts.
    fn identify(&mut self, head: &HeaderMap) -> Result<(), Problem> {
        if let Asker::Remote(tokens, address) = &self.inner.asker {
            let (peer, shown) = tokens.identify(head, *address)?;
            (self.peer, self.shown) = (peer, Some(shown));
        }
        Ok(())
    }

    /// Whether the token still counts: who follows the journal has shown it long ago.
    fn still_counts(&self) -> Result<(), Problem> {
        match (&self.inner.asker, &self.shown) {
            (Asker::Remote(tokens, _), Some(shown)) => tokens.still_counts(shown, &self.peer),
            (Asker::Remote(..), None) => Err(Problem::defect("a request without a token")),
            (Asker::Process(_), _) => Ok(()),
        }
    }

    /// Has the loop answer, in this caller's turn.
    ///
    /// # Errors
    /// The loop's refusal; or it has too much to do, does not answer, or ends.
    pub async fn ask(&self, request: control::Request) -> Result<Reply, Problem> {
        self.still_counts()?;
        let patience = match &request {
            control::Request::Move(moves) => {
                MOVE.saturating_add(Duration::from_millis(moves.deadline_ms))
            }
            control::Request::Acquire { acquire, .. } => {
                MOVE.saturating_add(Duration::from_millis(acquire.patience_ms()))
            }
            _ => WORK,
        };
        // Others wait for what this one waits for.
        let _gone = matches!(request, control::Request::Acquire { .. })
            .then(|| Gone(Arc::clone(&self.inner.office)));
        // Who follows the journal asks again and again, and has to read on meanwhile.
        if !matches!(self.stage(), Stage::Following(_)) {
            self.enter(Stage::Working);
        }
        let (answer, hears) = oneshot::channel();
        let put = Put {
            peer: self.peer.clone(),
            request,
            answer,
            served_ns: Arc::clone(&self.inner.served_ns),
        };
        let ending = || {
            let code = ErrorCode::Other(ErrorCode::ENDING.into());
            let error = ControlError::new(code, "the arbiter is ending");
            Problem::unavailable(error.with_hint("try again when its successor listens"))
        };
        self.inner
            .office
            .counter
            .put(put)
            .map_err(|why| match why {
                NotTaken::Closed => ending(),
                NotTaken::TooMany => {
                    let text = "the arbiter has too many requests";
                    let error = ControlError::new(ErrorCode::Internal, text);
                    Problem::unavailable(error.with_hint("try again in a moment"))
                }
            })?;
        // PANIC: tokio takes any duration.
        match timeout(patience, hears).await {
            Ok(Ok(answer)) => answer.map_err(Problem::from),
            Ok(Err(_)) => Err(ending()),
            Err(_) => {
                let text = format!("the arbiter did not answer in {} s", patience.as_secs());
                let error = ControlError::new(ErrorCode::Internal, text);
                Err(Problem::no_answer(error.with_hint("see `sublet doctor`")))
            }
        }
    }

    /// From here on the journal is followed.
    pub fn follow(&self) {
        self.enter(Stage::Following(Instant::now() + UNREAD));
    }

    fn enter(&self, stage: Stage) {
        *self.inner.stage.lock() = stage;
        self.inner
            .place
            .note_busy(!matches!(stage, Stage::Silent(_)));
    }

    fn stage(&self) -> Stage {
        *self.inner.stage.lock()
    }

    fn ends(&self) -> Option<Instant> {
        match self.stage() {
            Stage::Working => None,
            Stage::Silent(ends)
            | Stage::Coming(ends)
            | Stage::Answering(ends)
            | Stage::Following(ends) => Some(ends),
        }
    }

    /// Something came.
    fn heard(&self) {
        if matches!(self.stage(), Stage::Silent(_)) {
            self.enter(Stage::Coming(Instant::now() + MESSAGE));
        }
    }

    /// Something was taken by the kernel.
    fn wrote(&self) {
        if matches!(self.stage(), Stage::Following(_)) {
            self.enter(Stage::Following(Instant::now() + UNREAD));
        }
    }

    /// Everything was taken by the kernel.
    fn flushed(&self) {
        if matches!(self.stage(), Stage::Answering(_)) {
            self.enter(Stage::Silent(Instant::now() + SILENCE));
        }
    }

    async fn answer(
        mut self,
        routes: Router,
        mut request: Request<Incoming>,
    ) -> Result<Response<Body>, Infallible> {
        // The body has as long as the head.
        self.enter(Stage::Coming(Instant::now() + MESSAGE));
        let length = request.body().size_hint().lower();
        let change = (!request.method().is_safe())
            .then(|| routes::name_of(request.method(), request.uri().path()));
        let refused = match self.identify(request.headers()) {
            Err(problem) => Some(problem),
            Ok(()) if length > BODY_BYTES as u64 => {
                let text = format!("the body has {length} bytes, {BODY_BYTES} are taken");
                Some(Problem::too_large(text))
            }
            Ok(()) => None,
        };
        let mut answer = if let Some(problem) = refused {
            let mut answer = problem.into_response();
            let close = HeaderValue::from_static("close");
            answer.headers_mut().insert(header::CONNECTION, close);
            answer
        } else {
            request.extensions_mut().insert(self.clone());
            let mut routes = routes;
            match routes.call(request).await {
                Ok(answer) => answer,
                Err(never) => match never {},
            }
        };
        if let Some(change) = change {
            self.note_refused(&change, answer.status());
        }
        if !matches!(self.stage(), Stage::Following(_)) {
            self.enter(Stage::Answering(Instant::now() + ANSWER));
        }
        let no_store = HeaderValue::from_static("no-store");
        answer.headers_mut().insert(header::CACHE_CONTROL, no_store);
        Ok(answer)
    }
}

/// Tells the loop that a request may have no asker any more: the connection has ended.
struct Gone(Arc<Office>);

impl Drop for Gone {
    fn drop(&mut self) {
        self.0.counter.wake();
    }
}

/// Requests and answers of one connection, until its end or its deadline.
pub async fn converse<S>(caller: Caller, stream: S, routes: Router)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let watched = TokioIo::new(Watched {
        stream,
        caller: caller.clone(),
    });
    let own = caller.clone();
    let answers = service_fn(move |request| own.clone().answer(routes.clone(), request));
    let serving = http1::Builder::new()
        .auto_date_header(false)
        .max_headers(HEAD_FIELDS)
        .max_buf_size(HEAD_BYTES)
        // The stage has the deadline of a head, too.
        .header_read_timeout(None::<Duration>)
        .serve_connection(watched, answers);
    let mut closing = caller.inner.office.closing.clone();
    let mut closing = pin!(async move { drop(closing.wait_for(|closing| *closing).await) });
    let mut is_closing = false;
    let mut serving = pin!(serving);
    let mut alarm = pin!(sleep_until(Instant::now() + MESSAGE));
    poll_fn(|cx| {
        if !is_closing && closing.as_mut().poll(cx).is_ready() {
            is_closing = true;
            // What is answered is written, and no other request is taken.
            serving.as_mut().graceful_shutdown();
        }
        // What fails ends this connection, and nothing else.
        if serving.as_mut().poll(cx).is_ready() {
            return Poll::Ready(());
        }
        let Some(ends) = caller.ends() else {
            return Poll::Pending;
        };
        if alarm.deadline() != ends {
            alarm.as_mut().reset(ends);
        }
        alarm.as_mut().poll(cx)
    })
    .await;
}

/// A connection's socket: tells how far the connection has come.
struct Watched<S> {
    stream: S,
    caller: Caller,
}

impl<S: AsyncRead + Unpin> AsyncRead for Watched<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let result = ready!(Pin::new(&mut self.stream).poll_read(cx, buffer));
        if buffer.filled().len() > before {
            self.caller.heard();
        }
        Poll::Ready(result)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Watched<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let result = ready!(Pin::new(&mut self.stream).poll_write(cx, bytes));
        self.caller.wrote();
        Poll::Ready(result)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        all: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = ready!(Pin::new(&mut self.stream).poll_write_vectored(cx, all));
        self.caller.wrote();
        Poll::Ready(result)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    /// hyper flushes once everything is written.
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let result = ready!(Pin::new(&mut self.stream).poll_flush(cx));
        self.caller.flushed();
        Poll::Ready(result)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::runtime::Builder;
    use tokio::sync::watch;

    use super::super::connections::{Connections, LOCAL};
    use super::super::refusals::Refusals;
    use super::super::routes::router;
    use super::super::stream::{self, Followers};
    use super::*;
    use crate::desk::{Counter, Desk, News};

    /// The other end has sent this, and takes so many bytes.
    struct Other {
        says: &'static [u8],
        takes: usize,
    }

    impl AsyncRead for Other {
        fn poll_read(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
            buffer: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            if self.says.is_empty() {
                return Poll::Pending;
            }
            buffer.put_slice(std::mem::take(&mut self.says));
            Poll::Ready(Ok(()))
        }
    }

    impl AsyncWrite for Other {
        fn poll_write(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
            bytes: &[u8],
        ) -> Poll<io::Result<usize>> {
            let taken = bytes.len().min(self.takes);
            self.takes -= taken;
            match taken {
                0 => Poll::Pending,
                _ => Poll::Ready(Ok(taken)),
            }
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    /// Somebody who asks at a counter, and what the answer goes through. The office is open for as
    /// long as its last part is held.
    fn at_the(counter: Counter) -> (Caller, Arc<Office>, watch::Sender<bool>) {
        let (open, closing) = watch::channel(false);
        let office = Arc::new(Office {
            connections: Connections::new(LOCAL, counter.clone()),
            counter: counter.clone(),
            news: News::new(),
            grown: Arc::new(watch::channel(0).0),
            followers: Followers::new(stream::LOCAL),
            refusals: Refusals::default(),
            closing,
        });
        let caller = Caller::new(
            Asker::Process(Peer::here(1, 1)),
            Place::uncounted(counter),
            Arc::clone(&office),
        );
        (caller, office, open)
    }

    /// Whether a follower that takes so many bytes is cut off within an hour, in virtual time. The
    /// journal grows all the time.
    fn is_cut_off(takes: usize) -> bool {
        let (mut desk, counter) = Desk::new().expect("a desk");
        let (caller, office, grows) = at_the(counter);
        let says = b"GET /v1/events/stream?since_seq=0 HTTP/1.1\r\nhost: x\r\n\r\n";
        let other = Other { says, takes };
        let mut number = 1;
        let mut seq = 0;
        let answers = async move {
            loop {
                tokio::time::sleep(Duration::from_millis(100)).await;
                desk.receive(&mut number, 0);
                while let Some(next) = desk.first(|_| 0) {
                    desk.take(next).expect("a request");
                    seq += 1;
                    let event = control::Event {
                        seq,
                        kind: "start".into(),
                        ..control::Event::default()
                    };
                    desk.answer(next, Ok(Reply::Events(vec![event])));
                }
            }
        };
        let runtime = Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .expect("a runtime");
        let ended = runtime.block_on(async {
            let answering = tokio::spawn(answers);
            let follows = converse(caller, other, router(office));
            let ended = timeout(Duration::from_secs(3600), follows).await;
            answering.abort();
            ended
        });
        drop(grows);
        ended.is_ok()
    }

    /// What the loop is asked for by one request, which it refuses.
    fn asked_by(says: &'static [u8]) -> Vec<control::Request> {
        let (mut desk, counter) = Desk::new().expect("a desk");
        let (caller, office, _open) = at_the(counter);
        let takes = usize::MAX;
        let asked = Arc::new(Mutex::new(Vec::new()));
        let heard = Arc::clone(&asked);
        let answers = async move {
            let mut number = 1;
            loop {
                tokio::time::sleep(Duration::from_millis(100)).await;
                desk.receive(&mut number, 0);
                while let Some(next) = desk.first(|_| 0) {
                    heard.lock().push(desk.take(next).expect("a request").1);
                    let refused = ControlError::new(ErrorCode::NoSuchJob, "none");
                    desk.answer(next, Err(refused));
                }
            }
        };
        let runtime = Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .expect("a runtime");
        runtime.block_on(async {
            let answering = tokio::spawn(answers);
            let served = converse(caller, Other { says, takes }, router(office));
            // In virtual time: nothing further is asked.
            let _ = timeout(Duration::from_secs(60), served).await;
            answering.abort();
        });
        std::mem::take(&mut *asked.lock())
    }

    #[test]
    fn a_request_for_one_job_or_for_devices_has_the_loop_list_no_jobs() {
        let asked: Vec<control::Request> = [
            &b"GET /v1/jobs/a HTTP/1.1\r\nhost: x\r\n\r\n"[..],
            &b"GET /v1/jobs/a/profile HTTP/1.1\r\nhost: x\r\n\r\n"[..],
            &b"GET /v1/devices HTTP/1.1\r\nhost: x\r\n\r\n"[..],
        ]
        .into_iter()
        .flat_map(asked_by)
        .collect();
        let lists = |request: &&control::Request| {
            matches!(request, control::Request::List | control::Request::Status)
        };
        let listing = asked.iter().filter(lists).count();
        println!("now: {listing} of {} list every job", asked.len());
        assert_eq!((listing, asked.len()), (0, 3), "{asked:?}");
    }

    #[test]
    fn a_follower_that_reads_nothing_is_cut_off_and_one_that_reads_is_not() {
        assert!(is_cut_off(0));
        assert!(is_cut_off(10_000), "it has stopped");
        assert!(!is_cut_off(usize::MAX));
    }
}
