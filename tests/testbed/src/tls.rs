//! A client of TLS, and certificates for servers to be tested with: `localhost` and `127.0.0.1`, by
//! an authority of their own, from 2020 until the year 2126: a machine whose clock is behind takes
//! them too. Made with `openssl ca`; the keys are no secret.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::time_provider::{DefaultTimeProvider, TimeProvider};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

use crate::http::Http;
use crate::within::PATIENCE;

const AUTHORITY: &[u8] = include_bytes!("../data/tls/authority.crt");
/// Certificates with their keys: one, and the one that it is renewed with.
const SERVERS: [[&[u8]; 2]; 2] = [
    [
        include_bytes!("../data/tls/first.crt"),
        include_bytes!("../data/tls/first.key"),
    ],
    [
        include_bytes!("../data/tls/second.crt"),
        include_bytes!("../data/tls/second.key"),
    ],
];

/// A connection with TLS.
pub type Stream = StreamOwned<ClientConnection, TcpStream>;

/// Writes a server's certificate and its key, which only its owner can read.
pub fn write_server(which: usize, certificate: &Path, key: &Path) {
    use std::os::unix::fs::PermissionsExt;
    for (path, bytes, mode) in [
        (certificate, SERVERS[which][0], 0o644),
        (key, SERVERS[which][1], 0o600),
    ] {
        // As it should be done: nobody reads half of it.
        let new = path.with_extension("new");
        std::fs::write(&new, bytes).expect("written");
        std::fs::set_permissions(&new, PermissionsExt::from_mode(mode)).expect("set");
        std::fs::rename(&new, path).expect("renamed");
    }
}

/// The certificate of a server, as it is sent.
pub fn certificate(which: usize) -> Vec<u8> {
    let certificate = CertificateDer::from_pem_slice(SERVERS[which][0]).expect("PEM");
    certificate.to_vec()
}

/// A handshake with a server that the test authority vouches for; `versions` of TLS.
///
/// # Errors
/// Nobody listens, or they do not agree.
pub fn connect_with(
    address: SocketAddr,
    versions: &[&'static rustls::SupportedProtocolVersion],
    protocols: &[&[u8]],
) -> io::Result<Stream> {
    connect_by(Arc::new(DefaultTimeProvider), address, versions, protocols)
}

/// A clock that stands.
#[derive(Debug)]
struct At(UnixTime);

impl TimeProvider for At {
    fn current_time(&self) -> Option<UnixTime> {
        Some(self.0)
    }
}

/// A handshake of TLS 1.3 by a client whose clock says `since_epoch`.
///
/// # Errors
/// As [`connect_with`].
pub fn connect_at(since_epoch: Duration, address: SocketAddr) -> io::Result<Stream> {
    let clock = At(UnixTime::since_unix_epoch(since_epoch));
    connect_by(Arc::new(clock), address, &[&TLS13], &[])
}

fn connect_by(
    clock: Arc<dyn TimeProvider>,
    address: SocketAddr,
    versions: &[&'static rustls::SupportedProtocolVersion],
    protocols: &[&[u8]],
) -> io::Result<Stream> {
    let mut roots = RootCertStore::empty();
    let authority = CertificateDer::from_pem_slice(AUTHORITY).expect("PEM");
    roots.add(authority).expect("an authority");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ClientConfig::builder_with_details(provider, clock)
        .with_protocol_versions(versions)
        .expect("versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = protocols.iter().map(|one| one.to_vec()).collect();
    let name = ServerName::try_from("localhost").expect("a name");
    let mut session = ClientConnection::new(Arc::new(config), name).map_err(io::Error::other)?;
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    while session.is_handshaking() {
        session.complete_io(&mut stream)?;
    }
    Ok(StreamOwned::new(session, stream))
}

/// TLS 1.3, and HTTP over it.
///
/// # Errors
/// As [`connect_with`].
pub fn connect(address: SocketAddr) -> io::Result<Http<Stream>> {
    connect_with(address, &[&TLS13], &[b"http/1.1"]).map(Http::over)
}

pub use rustls::version::{TLS12, TLS13};
