//! gRPC over Unix sockets, both ways: tonic reads and writes the messages, hyper the frames.
//!
//! A call is answered by a plain function on a thread of its own, since it asks the arbiter, a disk
//! or the API server. Who may call is the kernel's word: root and this process's own user. All
//! input is bounded, and a peer that sends too much loses its connection.

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::body::Incoming;
use hyper::client::conn::http2::SendRequest;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;
use tonic::body::Body;
use tonic_prost::ProstCodec;
use tower_service::Service as Tower;

use crate::authority::Plain;
use crate::sockets::{is_passing, may_call};

/// Longest message. A pod's list of devices has some hundred lines.
const LONGEST: usize = 1 << 20;
/// Longest answer that is read: a list of all pods of a node.
const LONGEST_ANSWER: usize = 16 << 20;
/// Connections to one socket. A kubelet has one or two.
pub const CONNECTIONS: usize = 16;
/// Calls of one connection at a time.
const STREAMS: u32 = 32;
/// Bytes of the head of one call.
const HEAD: u32 = 16 << 10;

/// A call that came.
pub type Call = http::Request<Incoming>;
/// What it is answered.
pub type Answer = http::Response<Body>;
/// An answer to be.
pub type Answering = Pin<Box<dyn Future<Output = Answer> + Send>>;

/// What a socket serves.
pub trait Service: Send + Sync + 'static {
    /// Answers the call of this path.
    fn answer(self: Arc<Self>, path: String, call: Call) -> Answering;
}

/// Serves a listener, so many connections at a time, until its socket is broken.
///
/// # Errors
/// The listener's.
pub async fn serve(
    listener: UnixListener,
    service: Arc<dyn Service>,
    connections: usize,
) -> io::Error {
    let places = Arc::new(Semaphore::new(connections));
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) if is_passing(&error) => {
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
            Err(error) => return error,
        };
        if !may_call(&stream) {
            continue;
        }
        // Dropped where there is none: nobody who means well holds so many open.
        let Ok(place) = Arc::clone(&places).try_acquire_owned() else {
            continue;
        };
        let service = Arc::clone(&service);
        tokio::spawn(async move {
            let answer = service_fn(move |call: Call| {
                let path = call.uri().path().to_owned();
                let answering = Arc::clone(&service).answer(path, call);
                async move { Ok::<_, Infallible>(answering.await) }
            });
            let mut builder = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
            builder
                .timer(TokioTimer::new())
                .max_concurrent_streams(STREAMS)
                .max_header_list_size(HEAD);
            // A peer that breaks the protocol, or goes: its connection is over, and nothing else.
            let _ = builder
                .serve_connection(TokioIo::new(Plain::new(stream)), answer)
                .await;
            drop(place);
        });
    }
}

/// Answers a call with one message by a function, on a thread of its own.
pub fn unary<Q, A>(
    call: Call,
    answer: impl FnOnce(Q) -> Result<A, Status> + Send + 'static,
) -> Answering
where
    Q: prost::Message + Default + 'static,
    A: prost::Message + Default + 'static,
{
    let codec = ProstCodec::<A, Q>::default();
    let mut grpc = tonic::server::Grpc::new(codec).max_decoding_message_size(LONGEST);
    let handler = Handler::new(move |question: Q| async move {
        let answered = tokio::task::spawn_blocking(move || answer(question)).await;
        answered.unwrap_or_else(|_| Err(Status::internal("a bug of the plugin; see its log")))
    });
    Box::pin(async move { grpc.unary(handler, call).await })
}

/// Answers a call with one message, when that is there. Where the caller hangs up before that, what
/// `answer` has returned is dropped.
pub fn later<Q, A, F>(call: Call, answer: impl FnOnce(Q) -> F + Send + 'static) -> Answering
where
    Q: prost::Message + Default + 'static,
    A: prost::Message + Default + 'static,
    F: Future<Output = Result<A, Status>> + Send + 'static,
{
    let codec = ProstCodec::<A, Q>::default();
    let mut grpc = tonic::server::Grpc::new(codec).max_decoding_message_size(LONGEST);
    let handler = Handler::new(answer);
    Box::pin(async move { grpc.unary(handler, call).await })
}

/// Answers a call with all that comes through a channel.
pub fn streaming<Q, A>(
    call: Call,
    answer: impl FnOnce(Q) -> tokio::sync::mpsc::Receiver<Result<A, Status>> + Send + 'static,
) -> Answering
where
    Q: prost::Message + Default + 'static,
    A: prost::Message + Default + 'static,
{
    let codec = ProstCodec::<A, Q>::default();
    let mut grpc = tonic::server::Grpc::new(codec).max_decoding_message_size(LONGEST);
    let handler =
        Handler::new(move |question: Q| async move { Ok(ReceiverStream::new(answer(question))) });
    Box::pin(async move { grpc.server_streaming(handler, call).await })
}

/// The answer to a path that nobody serves.
pub fn unknown(path: &str) -> Answering {
    let short: String = path.chars().take(100).collect();
    Box::pin(std::future::ready(
        Status::unimplemented(format!("there is no {short} here")).into_http(),
    ))
}

type Later<A> = Pin<Box<dyn Future<Output = Result<A, Status>> + Send>>;

type Answerer<Q, A> = Box<dyn FnOnce(Q) -> Later<A> + Send>;

/// A function as tonic takes it: called once.
struct Handler<Q, A>(Option<Answerer<Q, A>>);

impl<Q, A> Handler<Q, A> {
    fn new<F>(answer: impl FnOnce(Q) -> F + Send + 'static) -> Self
    where
        F: Future<Output = Result<A, Status>> + Send + 'static,
    {
        Self(Some(Box::new(|question| Box::pin(answer(question)))))
    }
}

impl<Q, A: Send + 'static> Tower<tonic::Request<Q>> for Handler<Q, A> {
    type Response = tonic::Response<A>;
    type Error = Status;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Status>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Status>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, question: tonic::Request<Q>) -> Self::Future {
        let Some(answer) = self.0.take() else {
            return Box::pin(std::future::ready(Err(Status::internal("answered before"))));
        };
        let answering = answer(question.into_inner());
        Box::pin(async move { answering.await.map(tonic::Response::new) })
    }
}

/// A connection to somebody's socket.
pub struct Client(tonic::client::Grpc<Channel>);

/// hyper's end of a connection, as tonic takes it.
struct Channel(SendRequest<Body>);

impl Tower<http::Request<Body>> for Channel {
    type Response = http::Response<Incoming>;
    type Error = hyper::Error;
    type Future = Pin<Box<dyn Future<Output = hyper::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<hyper::Result<()>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        Box::pin(self.0.send_request(request))
    }
}

impl Client {
    /// Connects, with `localhost` for an authority.
    ///
    /// # Errors
    /// Nobody listens, or what does speaks no HTTP/2.
    pub async fn connect(socket: &Path) -> io::Result<Self> {
        let stream = UnixStream::connect(socket).await?;
        let (sender, connection) = hyper::client::conn::http2::Builder::new(TokioExecutor::new())
            .timer(TokioTimer::new())
            .max_header_list_size(HEAD)
            .handshake(TokioIo::new(stream))
            .await
            .map_err(io::Error::other)?;
        tokio::spawn(connection);
        let origin = http::Uri::from_static("http://localhost");
        let grpc = tonic::client::Grpc::with_origin(Channel(sender), origin);
        Ok(Self(grpc.max_decoding_message_size(LONGEST_ANSWER)))
    }

    /// Asks one question, and waits so long.
    ///
    /// # Errors
    /// The other side's, or that it does not answer.
    pub async fn ask<Q, A>(
        &mut self,
        path: &'static str,
        question: Q,
        patience: Duration,
    ) -> Result<A, Status>
    where
        Q: prost::Message + Default + 'static,
        A: prost::Message + Default + 'static,
    {
        let asked = async {
            self.ready().await?;
            let path = http::uri::PathAndQuery::from_static(path);
            let codec = ProstCodec::<Q, A>::default();
            self.0
                .unary(tonic::Request::new(question), path, codec)
                .await
        };
        match tokio::time::timeout(patience, asked).await {
            Ok(answer) => answer.map(tonic::Response::into_inner),
            Err(_) => Err(silent(path, patience)),
        }
    }

    /// Asks for a row of answers, and waits so long for it to begin.
    ///
    /// # Errors
    /// As [`ask`](Self::ask).
    pub async fn watch<Q, A>(
        &mut self,
        path: &'static str,
        question: Q,
        patience: Duration,
    ) -> Result<tonic::Streaming<A>, Status>
    where
        Q: prost::Message + Default + 'static,
        A: prost::Message + Default + 'static,
    {
        let asked = async {
            self.ready().await?;
            let path = http::uri::PathAndQuery::from_static(path);
            let codec = ProstCodec::<Q, A>::default();
            let question = tonic::Request::new(question);
            self.0.server_streaming(question, path, codec).await
        };
        match tokio::time::timeout(patience, asked).await {
            Ok(answer) => answer.map(tonic::Response::into_inner),
            Err(_) => Err(silent(path, patience)),
        }
    }

    async fn ready(&mut self) -> Result<(), Status> {
        let ready = self.0.ready().await;
        ready.map_err(|error| Status::unavailable(error.to_string()))
    }
}

fn silent(path: &str, patience: Duration) -> Status {
    let waited = patience.as_secs_f64();
    Status::deadline_exceeded(format!("{path} was not answered within {waited} s"))
}
