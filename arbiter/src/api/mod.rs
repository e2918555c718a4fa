//! The control API: HTTP over a Unix socket, on a thread of its own, and over TCP with TLS and
//! tokens, on another one.
//!
//! A request is read and checked here, put on the loop's [desk](crate::desk), and answered with
//! what comes back. Who may do what is decided by the loop alone. A client that is slow, silent,
//! huge or gone costs its own connection and nothing else: the loop never waits for this thread,
//! and this thread waits for nobody without a deadline.
//!
//! [`openapi`] is the document; [`routes`] has every operation.

mod connections;
mod conversation;
mod extract;
pub mod openapi;
mod problem;
mod refusals;
mod routes;
mod stream;
mod tls;
mod tokens;

use std::io;
use std::net::SocketAddr;
use std::os::unix::net::UnixListener;
use std::pin::pin;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::Duration;

use certificates::Notice;
use futures_util::future::select;
use tokio::runtime::Builder;
use tokio::sync::watch;

use crate::descriptors::Descriptors;
use crate::desk::{Counter, News};
use connections::{Connections, Entrance, LOCAL, Local, REMOTE};
use refusals::Refusals;
use stream::Followers;
pub(crate) use tls::Bound;
use tls::Remote;
pub use tls::{ApiListener, Unusable};

/// TIMEOUT: answers that are ready are written within a millisecond; a client that reads none of
/// it for this long loses it.
const LAST_ANSWERS: Duration = Duration::from_millis(500);

/// Threads at a time, with those of sockets whose names are gone.
const THREADS: usize = 16;

/// What has changed about the files of the TCP listener.
fn log(what: &str, notice: Notice<'_>) {
    match notice {
        Notice::Renewed => tracing::info!("{what}: read anew"),
        Notice::Mended => tracing::info!("{what}: as it should be again"),
        Notice::Kept(wrong) => {
            tracing::error!("{what}: {wrong}; what was read last stays in force");
        }
        Notice::Ended(wrong) => tracing::error!("{what}: {wrong}; nobody is let in over TCP"),
    }
}

/// Who serves the API, as the loop sees it. By default nobody does.
#[derive(Debug, Default)]
pub(crate) struct Api {
    serving: Option<Serving>,
    /// Where other hosts are served.
    address: Option<SocketAddr>,
    /// Of this host at a time.
    connections_most: usize,
}

#[derive(Debug)]
struct Serving {
    closing: watch::Sender<bool>,
    /// Has one word for each thread.
    closed: Receiver<()>,
    over: SyncSender<()>,
    threads: usize,
    local: Serves,
}

/// What a thread for this host needs.
struct Serves {
    office: Arc<Office>,
    kept: Descriptors,
}

impl std::fmt::Debug for Serves {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Serves").finish_non_exhaustive()
    }
}

impl Serves {
    /// Serves a bound socket on a thread of its own.
    fn start(&self, listener: UnixListener, over: SyncSender<()>, first: bool) -> io::Result<()> {
        listener.set_nonblocking(true)?;
        let (office, kept) = (Arc::clone(&self.office), self.kept.clone());
        start_thread(
            "api",
            over,
            async move || match tokio::net::UnixListener::from_std(listener) {
                Ok(listener) => {
                    if first {
                        tokio::spawn(stream::pass_on(Arc::clone(&office)));
                    }
                    let open = Arc::clone(&office.connections);
                    serve(Local::new(listener, kept, open), office).await;
                }
                Err(error) => tracing::error!("nobody can connect to the API: {error}"),
            },
        )
    }
}

/// What every request has at hand.
pub(crate) struct Office {
    counter: Counter,
    news: Arc<News>,
    /// The number of the journal's last line.
    grown: Arc<watch::Sender<u64>>,
    followers: Followers,
    connections: Arc<Connections>,
    refusals: Refusals,
    closing: watch::Receiver<bool>,
}

impl Api {
    /// Serves a bound socket, and what is bound for other hosts. `kept`: descriptors to take
    /// newcomers of this host in with.
    ///
    /// # Errors
    /// There is no thread, or no descriptor, for it.
    pub fn start(
        listener: UnixListener,
        remote: Option<Bound>,
        counter: Counter,
        news: Arc<News>,
        kept: Descriptors,
    ) -> io::Result<Self> {
        let (closing, is_closing) = watch::channel(false);
        let (over, closed) = sync_channel(THREADS);
        let grown = Arc::new(watch::channel(0).0);
        let office = |connections, followers| {
            Arc::new(Office {
                connections: Connections::new(connections, counter.clone()),
                counter: counter.clone(),
                news: Arc::clone(&news),
                grown: Arc::clone(&grown),
                followers: Followers::new(followers),
                refusals: Refusals::default(),
                closing: is_closing.clone(),
            })
        };
        let address = remote.as_ref().map(Bound::address);
        let threads = 1 + usize::from(remote.is_some());
        // Handshakes of strangers take their time: users of this host do not wait for them.
        if let Some(bound) = remote {
            let office = office(REMOTE, stream::REMOTE);
            start_thread("api-tcp", over.clone(), async move || {
                match Remote::new(bound) {
                    Ok(remote) => serve(remote, office).await,
                    Err(error) => tracing::error!("nobody can connect over TCP: {error}"),
                }
            })?;
        }
        let office = office(LOCAL, stream::LOCAL);
        let connections_most = office.connections.most();
        let local = Serves { office, kept };
        local.start(listener, over.clone(), true)?;
        Ok(Self {
            serving: Some(Serving {
                closing,
                closed,
                over,
                threads,
                local,
            }),
            address,
            connections_most,
        })
    }

    /// Serves one more bound socket of this host: the name of the one before is gone.
    ///
    /// # Errors
    /// There is no thread for it.
    pub fn serve_too(&mut self, listener: UnixListener) -> io::Result<()> {
        let Some(serving) = self.serving.as_mut() else {
            return Ok(());
        };
        if serving.threads >= THREADS {
            return Err(io::Error::other("the directory was made again too often"));
        }
        serving.local.start(listener, serving.over.clone(), false)?;
        serving.threads += 1;
        Ok(())
    }

    /// Connections of this host that are served at a time.
    pub fn connections_most(&self) -> u32 {
        u32::try_from(self.connections_most).unwrap_or(u32::MAX)
    }

    /// Where other hosts are served; `None`: nowhere.
    pub fn address(&self) -> Option<SocketAddr> {
        self.address
    }

    /// Ends it: answers that are ready are written, as far as somebody reads them.
    pub fn close(&mut self) {
        let Some(serving) = self.serving.take() else {
            return;
        };
        let _ = serving.closing.send(true);
        for _ in 0..serving.threads {
            match serving.closed.recv_timeout(LAST_ANSWERS * 2) {
                Ok(()) | Err(RecvTimeoutError::Disconnected) => {}
                Err(RecvTimeoutError::Timeout) => {
                    tracing::warn!("a thread of the API does not end");
                    return;
                }
            }
        }
    }
}

/// Runs `serve` on a thread of its own; `over` hears of its end.
fn start_thread(
    name: &str,
    over: SyncSender<()>,
    serve: impl AsyncFnOnce() + Send + 'static,
) -> io::Result<()> {
    let runtime = Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .build()?;
    let run = move || {
        runtime.block_on(serve());
        let _ = over.send(());
    };
    std::thread::Builder::new().name(name.into()).spawn(run)?;
    Ok(())
}

/// Serves all who come, until the end.
async fn serve(mut entrance: impl Entrance, office: Arc<Office>) {
    let mut closing = office.closing.clone();
    {
        let end = pin!(closing.wait_for(|closing| *closing));
        let taken_in = pin!(connections::take_in(&mut entrance, &office));
        select(end, taken_in).await;
    }
    drop(entrance);
    office.connections.finish(LAST_ANSWERS).await;
}
