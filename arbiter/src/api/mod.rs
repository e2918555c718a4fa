//! The control API: HTTP over a Unix socket, on a thread of its own.
//!
//! A request is read and checked here, put on the loop's [desk](crate::desk), and answered with
//! what comes back. Who may do what is decided by the loop alone, for this socket and for the other
//! one. A client that is slow, silent, huge or gone costs its own connection and nothing else: the
//! loop never waits for this thread, and this thread waits for nobody without a deadline.
//!
//! [`openapi`] is the document; [`routes`] has every operation.

mod connections;
mod conversation;
mod extract;
pub mod openapi;
mod problem;
mod routes;
mod stream;

use std::io;
use std::os::unix::net::UnixListener;
use std::pin::pin;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::Duration;

use futures_util::future::select;
use tokio::runtime::Builder;
use tokio::sync::watch;

use crate::desk::{Counter, News};
use connections::Connections;
use stream::Streams;

/// TIMEOUT: answers that are ready are written within a millisecond; a client that reads none of
/// it for this long loses it.
const LAST_ANSWERS: Duration = Duration::from_millis(500);

/// Who serves the API, as the loop sees it. By default nobody does.
#[derive(Debug, Default)]
pub(crate) struct Api {
    serving: Option<Serving>,
}

#[derive(Debug)]
struct Serving {
    closing: watch::Sender<bool>,
    closed: Receiver<()>,
}

/// What every request has at hand.
pub(crate) struct Office {
    counter: Counter,
    news: Arc<News>,
    streams: Streams,
    connections: Arc<Connections>,
    closing: watch::Receiver<bool>,
}

impl Api {
    /// Serves a bound socket.
    ///
    /// # Errors
    /// There is no thread, or no descriptor, for it.
    pub fn start(listener: UnixListener, counter: Counter, news: Arc<News>) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let runtime = Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()?;
        let (closing, is_closing) = watch::channel(false);
        let (over, closed) = sync_channel(1);
        std::thread::Builder::new()
            .name("api".into())
            .spawn(move || {
                let streams = Streams::new();
                let office = Arc::new(Office {
                    connections: Connections::new(counter.clone()),
                    counter,
                    news,
                    streams,
                    closing: is_closing,
                });
                runtime.block_on(serve(listener, office));
                let _ = over.send(());
            })?;
        Ok(Self {
            serving: Some(Serving { closing, closed }),
        })
    }

    /// Ends it: answers that are ready are written, as far as somebody reads them.
    pub fn close(&mut self) {
        let Some(Serving { closing, closed }) = self.serving.take() else {
            return;
        };
        let _ = closing.send(true);
        match closed.recv_timeout(LAST_ANSWERS * 2) {
            Ok(()) | Err(RecvTimeoutError::Disconnected) => {}
            Err(RecvTimeoutError::Timeout) => tracing::warn!("the API's thread does not end"),
        }
    }
}

async fn serve(listener: UnixListener, office: Arc<Office>) {
    let mut closing = office.closing.clone();
    let listener = match tokio::net::UnixListener::from_std(listener) {
        Ok(listener) => listener,
        Err(error) => return tracing::error!("nobody can connect to the API: {error}"),
    };
    tokio::spawn(stream::pass_on(Arc::clone(&office)));
    {
        let end = pin!(closing.wait_for(|closing| *closing));
        select(end, pin!(connections::take_in(&listener, &office))).await;
    }
    drop(listener);
    office.connections.finish(LAST_ANSWERS).await;
}
