//! Connections of clients: who is taken in, who gives way, and what is under way at the end.
//!
//! Connections are bounded, and a newcomer takes the place of the one that has been silent for
//! longest: that has sent no whole request, or has had its answer. A client has [`PATIENCE`] for a
//! head.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, sleep, timeout};

use super::proxy::answer;
use super::stream::{Both, Hurried, PATIENCE};
use super::{Listener, Shared};

/// Longest head of a request.
const HEAD_BYTES: usize = 64 << 10;
/// Of those who find no place, so many hear so at a time.
const REFUSED: usize = 64;
/// TIMEOUT: an answer of one packet.
const REFUSING: Duration = Duration::from_secs(1);
/// TIMEOUT: descriptors come back when connections end.
const NO_DESCRIPTORS: Duration = Duration::from_millis(50);

/// By number.
#[derive(Default)]
struct Connections {
    all: BTreeMap<u64, Connection>,
}

struct Connection {
    /// Since when nothing is owed to its client; in the future where a request is under way: until
    /// when that may be.
    silent_s: f64,
    close: tokio::task::AbortHandle,
}

/// What all connections share.
pub struct Hall {
    /// What all parts share.
    pub shared: Arc<Shared>,
    connections: Mutex<Connections>,
    /// Bytes of bodies that are held.
    pub held: AtomicUsize,
    /// By instance: when it was spoken of last, and how often there was a reason since.
    pub said: Mutex<BTreeMap<usize, (Instant, u64)>>,
    /// What an operator should know, a line each.
    pub tell: Arc<dyn Fn(&str) + Send + Sync>,
}

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
        said: Mutex::default(),
        tell: Arc::clone(tell),
    });
    let refusing = Arc::new(Semaphore::new(REFUSED));
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
            refuse(&refusing, stream);
            continue;
        }
        let task = tokio::spawn(converse(Arc::clone(&hall), stream, number, stopped.clone()));
        let one = Connection {
            silent_s: shared.now_s(),
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
    let (left, now_s) = (hall.connections.lock(), shared.now_s());
    Ok(left.all.values().filter(|one| one.silent_s > now_s).count())
}

/// Tells one for whom there is no place that there is none, as far as that can be had at once: the
/// next ones are closed without a word.
fn refuse(refusing: &Arc<Semaphore>, mut stream: Box<dyn Both>) {
    let Ok(permit) = Arc::clone(refusing).try_acquire_owned() else {
        return;
    };
    tokio::spawn(timeout(REFUSING, async move {
        let why = "sublet frontend: as many connections as it may have (--connections) have a \
                   request under way; try again\n";
        let text = format!(
            "HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain; charset=utf-8\r\n\
             content-length: {}\r\nretry-after: 1\r\nconnection: close\r\n\r\n{why}",
            why.len()
        );
        if stream.write_all(text.as_bytes()).await.is_ok() && stream.shutdown().await.is_ok() {
            // What it sends meanwhile is read, or the answer would be lost with it.
            let mut part = [0; 4096];
            while stream.read(&mut part).await.is_ok_and(|read| read > 0) {}
        }
        drop(permit);
    }));
}

impl Hall {
    /// Space for one more connection; `false`: each of them has a request under way.
    fn make_space(&self) -> bool {
        let now_s = self.shared.now_s();
        let mut connections = self.connections.lock();
        if connections.all.len() < self.shared.options.connections {
            return true;
        }
        let silent = connections
            .all
            .iter()
            .filter(|(_, one)| one.silent_s <= now_s);
        let Some(number) = silent
            .min_by(|a, b| a.1.silent_s.total_cmp(&b.1.silent_s))
            .map(|(number, _)| *number)
        else {
            return false;
        };
        if let Some(one) = connections.all.remove(&number) {
            one.close.abort();
        }
        true
    }

    /// Nothing is owed to a connection's client from this time on.
    fn note(&self, number: u64, silent_s: f64) {
        if let Some(one) = self.connections.lock().all.get_mut(&number) {
            one.silent_s = silent_s;
        }
    }

    /// The head of a request is here. Its body may never come.
    pub fn begun(&self, number: u64) {
        self.note(number, self.shared.now_s());
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

/// A request of a connection that is under way, up to the end of its answer, or of its time: a
/// client that has not read its answer until then is one of those that give way.
pub struct UnderWay {
    hall: Arc<Hall>,
    number: u64,
}

impl UnderWay {
    /// It is here, whole.
    pub fn new(hall: &Arc<Hall>, number: u64) -> Self {
        let longest_s = hall.shared.options.timeout.as_secs_f64();
        hall.note(number, hall.shared.now_s() + longest_s);
        Self {
            hall: Arc::clone(hall),
            number,
        }
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.hall.note(self.number, self.hall.shared.now_s());
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
        async move { Ok::<_, Infallible>(answer(&hall, number, request).await) }
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
