//! The API for other hosts: TCP, TLS 1.3 and a token with each request. There is no other way in:
//! without certificate, key and tokens nothing listens.
//!
//! A handshake has a deadline and a place among few; the thread is not the one that serves this
//! host. Certificate and key count as they are now, so that a renewed one needs no restart.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use certificates::{Notice, Server, ServerFiles, Versions, Wrong};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::Office;
use super::connections::{Entrance, Holder, Place};
use super::conversation::{Asker, Caller, converse};
use super::tokens::Tokens;

/// TIMEOUT: a handshake is two messages of each side; five seconds are a stopped or hostile peer.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// Of a request in plain HTTP, so many reads.
const MOST_PLAIN: u32 = 64;
/// What those hear who speak HTTP.
const PLAIN: &[u8] = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: 102\r\n\r\n{\"error\":{\"code\":\"invalid\",\"message\":\"this address takes TLS alone\",\"hint\":\"ask at https:// instead\"}}";

/// Where the API listens for other hosts, and what it takes for that.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ApiListener {
    /// Address and port; port 0: one that is free.
    pub address: SocketAddr,
    /// Certificate with its chain, PEM.
    pub certificate: PathBuf,
    /// Its key, PEM.
    pub key: PathBuf,
    /// The tokens that count, TOML.
    pub tokens: PathBuf,
}

/// Why it cannot listen.
#[derive(Debug, thiserror::Error)]
pub enum Unusable {
    /// A file is missing, unsafe or wrong.
    #[error(transparent)]
    File(#[from] Wrong),
    /// Connections would take descriptors of which there are few.
    #[error("there are too few descriptors for it: raise `ulimit -n` to 64 or more")]
    Descriptors,
    /// The address is taken, or none of this host's.
    #[error("nobody can listen at {address}: {error}")]
    Address {
        /// The address.
        address: SocketAddr,
        /// Why.
        error: io::Error,
    },
}

/// Bound, and ready to be served.
pub(crate) struct Bound {
    listener: TcpListener,
    address: SocketAddr,
    identity: Server,
    tokens: Arc<Tokens>,
}

impl Bound {
    /// Reads the files and binds the address.
    ///
    /// # Errors
    /// [`Unusable`]
    pub fn new(wanted: &ApiListener) -> Result<Self, Unusable> {
        let tokens = Tokens::open(&wanted.tokens)?;
        let files = ServerFiles {
            certificate: wanted.certificate.clone(),
            key: wanted.key.clone(),
            clients: None,
        };
        let tell = |notice: Notice<'_>| super::log("the API's certificate", notice);
        let identity = Server::open(&files, Versions::Latest, tell)?;
        let not_bound = |error| Unusable::Address {
            address: wanted.address,
            error,
        };
        let listener = TcpListener::bind(wanted.address).map_err(not_bound)?;
        listener.set_nonblocking(true).map_err(not_bound)?;
        let address = listener.local_addr().map_err(not_bound)?;
        Ok(Self {
            listener,
            address,
            identity,
            tokens,
        })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

/// The TCP socket.
pub(super) struct Remote {
    listener: tokio::net::TcpListener,
    identity: Arc<Server>,
    tokens: Arc<Tokens>,
}

impl Remote {
    /// Begins to listen. Called on the thread that serves it.
    ///
    /// # Errors
    /// That thread's set of descriptors does not take the listener.
    pub fn new(bound: Bound) -> io::Result<Self> {
        let listener = tokio::net::TcpListener::from_std(bound.listener)?;
        tracing::info!("the API is served at https://{}", bound.address);
        Ok(Self {
            listener,
            identity: Arc::new(bound.identity),
            tokens: bound.tokens,
        })
    }
}

/// Somebody who has connected over TCP.
pub(super) struct Newcomer {
    stream: TcpStream,
    address: IpAddr,
    identity: Arc<Server>,
    tokens: Arc<Tokens>,
}

impl Entrance for Remote {
    type Newcomer = Newcomer;

    async fn next(&mut self) -> io::Result<Option<(Holder, Newcomer)>> {
        let (stream, address) = self.listener.accept().await?;
        let address = address.ip();
        let newcomer = Newcomer {
            stream,
            address,
            identity: Arc::clone(&self.identity),
            tokens: Arc::clone(&self.tokens),
        };
        Ok(Some((Holder::at(address), newcomer)))
    }

    async fn welcome(newcomer: Newcomer, place: Place, office: Arc<Office>, routes: Router) {
        if let Some(stream) = shake_hands(newcomer.stream, &newcomer.identity).await {
            let asker = Asker::Remote(newcomer.tokens, newcomer.address);
            converse(Caller::new(asker, place, office), stream, routes).await;
        }
    }
}

/// The handshake. `None`: there was none, and nobody is served.
async fn shake_hands(mut stream: TcpStream, identity: &Server) -> Option<TlsStream<TcpStream>> {
    let _ = stream.set_nodelay(true);
    let shaken = timeout(HANDSHAKE, async {
        let mut first = [0];
        if stream.peek(&mut first).await? == 1 && first[0].is_ascii_uppercase() {
            stream.write_all(PLAIN).await?;
            stream.shutdown().await?;
            // What is not read makes the kernel take the answer back.
            let mut rest = [0; 1024];
            let mut most = MOST_PLAIN;
            while most > 0 && stream.read(&mut rest).await? > 0 {
                most -= 1;
            }
            return Ok(None);
        }
        let config = identity.now().map_err(io::Error::other)?;
        TlsAcceptor::from(config).accept(stream).await.map(Some)
    });
    match shaken.await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => {
            tracing::debug!("a handshake of the API has failed: {error}");
            None
        }
        Err(_) => {
            tracing::debug!("a handshake of the API took longer than {HANDSHAKE:?}");
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_speaks_http_is_answered_in_http() {
        let answer = std::str::from_utf8(PLAIN).expect("text");
        let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
        assert!(
            head.ends_with(&format!("content-length: {}", body.len())),
            "{head}: {}",
            body.len()
        );
        let body: serde_json::Value = serde_json::from_str(body).expect("JSON");
        assert_eq!(body["error"]["code"], "invalid");
    }
}
