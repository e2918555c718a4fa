//! The API for other hosts: TCP, TLS 1.3 and a token with each request. There is no other way in:
//! without certificate, key and tokens nothing listens.
//!
//! A handshake has a deadline and a place among few; the thread is not the one that serves this
//! host. Certificate and key count as they are now, so that a renewed one needs no restart.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use futures_util::future::select;
use parking_lot::Mutex;
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::NoServerSessionStorage;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::yield_now;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;

use super::connections::{Holder, Place, STEP, after};
use super::conversation::{Asker, Caller, converse};
use super::followed::{self, Stamp, Wrong};
use super::tokens::Tokens;
use super::{LAST_ANSWERS, Office, routes};

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
    identity: Identity,
    tokens: Arc<Tokens>,
}

impl Bound {
    /// Reads the files and binds the address.
    ///
    /// # Errors
    /// [`Unusable`]
    pub fn new(wanted: &ApiListener) -> Result<Self, Unusable> {
        let tokens = Tokens::open(&wanted.tokens)?;
        let identity = Identity::open(&wanted.certificate, &wanted.key)?;
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

/// Certificate and key.
struct Identity {
    paths: [PathBuf; 2],
    state: Mutex<State>,
}

struct State {
    stamps: Option<[Stamp; 2]>,
    config: Arc<ServerConfig>,
    /// What is wrong with the files as they are now, as it was logged.
    said: String,
}

impl Identity {
    fn open(certificate: &Path, key: &Path) -> Result<Self, Wrong> {
        let paths = [certificate.to_owned(), key.to_owned()];
        let (config, stamps) = read(&paths)?;
        let state = State {
            stamps: Some(stamps),
            config,
            said: String::new(),
        };
        Ok(Self {
            paths,
            state: Mutex::new(state),
        })
    }

    /// What the files say now; where they are wrong, what they said before.
    fn config(&self) -> Arc<ServerConfig> {
        let mut state = self.state.lock();
        let holds = |stamps: &[Stamp; 2]| {
            let mut both = stamps.iter().zip(&self.paths);
            both.all(|(stamp, path)| stamp.holds(path))
        };
        if !state.stamps.as_ref().is_some_and(holds) {
            let said = match read(&self.paths) {
                Ok((config, stamps)) => {
                    (state.config, state.stamps) = (config, Some(stamps));
                    String::new()
                }
                Err(error) => {
                    state.stamps = None;
                    error.to_string()
                }
            };
            if said != state.said {
                match said.as_str() {
                    "" => tracing::info!("the API's certificate is as it should be again"),
                    said => tracing::error!("the API keeps the certificate that it has: {said}"),
                }
                state.said = said;
            }
        }
        Arc::clone(&state.config)
    }
}

fn read([certificate, key]: &[PathBuf; 2]) -> Result<(Arc<ServerConfig>, [Stamp; 2]), Wrong> {
    let wrong = |path: &Path, why: String| Wrong::Text {
        path: path.to_owned(),
        why,
    };
    let (bytes, of_certificate) = followed::read(certificate, false)?;
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&bytes).collect();
    let chain = chain
        .ok()
        .filter(|chain| !chain.is_empty())
        .ok_or_else(|| wrong(certificate, "it has no certificate in PEM".into()))?;
    let (bytes, of_key) = followed::read(key, true)?;
    let secret = PrivateKeyDer::from_pem_slice(&bytes)
        .map_err(|_| wrong(key, "it has no unencrypted private key in PEM".into()))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .and_then(|builder| {
            builder
                .with_no_client_auth()
                .with_single_cert(chain, secret)
        });
    let mut config = config.map_err(|error| {
        let why = format!(
            "key and certificate {} do not fit: {error}",
            certificate.display()
        );
        wrong(key, why)
    })?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    // Nothing of a session is kept: each handshake is a whole one.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok((Arc::new(config), [of_certificate, of_key]))
}

/// Serves other hosts until the end.
pub(super) async fn serve(bound: Bound, office: Arc<Office>) {
    let mut closing = office.closing.clone();
    let listener = match tokio::net::TcpListener::from_std(bound.listener) {
        Ok(listener) => listener,
        Err(error) => return tracing::error!("nobody can connect over TCP: {error}"),
    };
    tracing::info!("the API is served at https://{}", bound.address);
    let (identity, tokens) = (Arc::new(bound.identity), bound.tokens);
    {
        let end = pin!(closing.wait_for(|closing| *closing));
        let taken_in = pin!(take_in(&listener, &office, &identity, &tokens));
        select(end, taken_in).await;
    }
    drop(listener);
    office.connections.finish(LAST_ANSWERS).await;
}

async fn take_in(
    listener: &tokio::net::TcpListener,
    office: &Arc<Office>,
    identity: &Arc<Identity>,
    tokens: &Arc<Tokens>,
) {
    let routes = routes::router(Arc::clone(office));
    let mut number = 0;
    loop {
        if !office.connections.make_space() {
            office.connections.wait_for_space().await;
            continue;
        }
        match listener.accept().await {
            Ok((stream, address)) => {
                number += 1;
                let newcomer = Newcomer {
                    stream,
                    address: address.ip(),
                    identity: Arc::clone(identity),
                    tokens: Arc::clone(tokens),
                    office: Arc::clone(office),
                    routes: routes.clone(),
                };
                let holder = Holder::at(address.ip());
                let welcome = |place| welcome(newcomer, place);
                office.connections.take_in(number, holder, welcome);
            }
            Err(error) => after(&error).await,
        }
        if number % STEP as u64 == 0 {
            yield_now().await;
        }
    }
}

struct Newcomer {
    stream: TcpStream,
    address: IpAddr,
    identity: Arc<Identity>,
    tokens: Arc<Tokens>,
    office: Arc<Office>,
    routes: Router,
}

/// The handshake, and what follows it.
async fn welcome(newcomer: Newcomer, place: Place) {
    let mut stream = newcomer.stream;
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
        let acceptor = TlsAcceptor::from(newcomer.identity.config());
        acceptor.accept(stream).await.map(Some)
    });
    match shaken.await {
        Ok(Ok(Some(stream))) => {
            let asker = Asker::Remote(newcomer.tokens, newcomer.address);
            let caller = Caller::new(asker, place, newcomer.office);
            converse(caller, stream, newcomer.routes).await;
        }
        Ok(Ok(None)) => {}
        Ok(Err(error)) => tracing::debug!("a handshake of the API has failed: {error}"),
        Err(_) => tracing::debug!("a handshake of the API took longer than {HANDSHAKE:?}"),
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
