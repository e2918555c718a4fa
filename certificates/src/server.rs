//! What a server shows, and whom it demands a certificate of.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::time_provider::{DefaultTimeProvider, TimeProvider};
use rustls::{RootCertStore, ServerConfig, SupportedProtocolVersion};

use crate::followed::{Followed, Notice, Stamp, Taken, Wrong, read};
use crate::provider;
use crate::revoked;

/// How often the files of a server are looked at. TIMEOUT: a renewed certificate is needed days
/// before the one before ends, and tests wait for it.
const LOOK: Duration = Duration::from_secs(1);

/// Files of a server.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ServerFiles {
    /// Certificate with its chain, PEM.
    pub certificate: PathBuf,
    /// Its key, PEM; its owner's alone.
    pub key: PathBuf,
    /// Certificates of the authorities by which clients have to be known, PEM, and behind them the
    /// lists of what they have revoked. `None`: clients show nothing.
    pub clients: Option<PathBuf>,
}

/// Which versions of TLS a server speaks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Versions {
    /// 1.3
    Latest,
    /// 1.2 as well, for clients that are not ours.
    From12,
}

/// Of [`Versions::From12`]; the first is that of [`Versions::Latest`].
static VERSIONS: [&SupportedProtocolVersion; 2] =
    [&rustls::version::TLS13, &rustls::version::TLS12];

impl Versions {
    fn list(self) -> &'static [&'static SupportedProtocolVersion] {
        match self {
            Self::Latest => &VERSIONS[..1],
            Self::From12 => &VERSIONS,
        }
    }
}

/// The server's end, by its files as they are now. Where they are wrong, those before stay in
/// force.
#[derive(Clone)]
pub struct Server(Arc<Followed<ServerConfig>>);

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Server")
    }
}

impl Server {
    /// Reads the files; `tell` hears of changes.
    ///
    /// # Errors
    /// [`Wrong`]
    pub fn open(
        files: &ServerFiles,
        versions: Versions,
        tell: impl Fn(Notice<'_>) + Send + Sync + 'static,
    ) -> Result<Self, Wrong> {
        Self::open_by(Arc::new(DefaultTimeProvider), files, versions, tell)
    }

    /// By a clock.
    pub(crate) fn open_by(
        clock: Arc<dyn TimeProvider>,
        files: &ServerFiles,
        versions: Versions,
        tell: impl Fn(Notice<'_>) + Send + Sync + 'static,
    ) -> Result<Self, Wrong> {
        let paths = [&files.certificate, &files.key].into_iter();
        let paths = paths.chain(&files.clients).cloned().collect();
        let read = move |paths: &[PathBuf]| config(&clock, paths, versions);
        let followed = Followed::open(paths, read, |_| false, tell)?;
        Ok(Self(Arc::new(followed)))
    }

    /// As the files are now.
    ///
    /// # Errors
    /// None: what they said before stays in force.
    pub fn now(&self) -> Result<Arc<ServerConfig>, String> {
        self.0.now()
    }

    /// As they were a moment ago, where a thread [follows](Self::follow) them. Waits for no disk.
    ///
    /// # Errors
    /// As [`Server::now`].
    pub fn held(&self) -> Result<Arc<ServerConfig>, String> {
        self.0.held()
    }

    /// How often they have come to say something new: a connection that began at another count was
    /// let in by other files.
    #[must_use]
    pub fn changes(&self) -> u64 {
        self.0.changes()
    }

    /// Has a thread look at the files.
    ///
    /// # Errors
    /// There is no thread.
    pub fn follow(&self) -> std::io::Result<()> {
        self.0.follow(LOOK)
    }
}

fn text(path: &Path, why: impl Into<String>) -> Wrong {
    Wrong::Text {
        path: path.to_owned(),
        why: why.into(),
    }
}

/// The certificates in a file.
pub(crate) fn chain(path: &Path) -> Result<(Vec<CertificateDer<'static>>, Stamp), Wrong> {
    let (bytes, stamp) = read(path, false)?;
    Ok((chain_in(path, &bytes)?, stamp))
}

fn chain_in(path: &Path, bytes: &[u8]) -> Result<Vec<CertificateDer<'static>>, Wrong> {
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(bytes).collect();
    let chain = chain.ok().filter(|chain| !chain.is_empty());
    chain.ok_or_else(|| text(path, "it has no certificate in PEM"))
}

/// The key in a file.
pub(crate) fn key(path: &Path) -> Result<(PrivateKeyDer<'static>, Stamp), Wrong> {
    let (bytes, stamp) = read(path, true)?;
    let key = PrivateKeyDer::from_pem_slice(&bytes)
        .map_err(|_| text(path, "it has no unencrypted private key in PEM"))?;
    Ok((key, stamp))
}

/// Whom a file says to believe.
pub(crate) struct Believed {
    pub(crate) roots: Arc<RootCertStore>,
    /// What they have revoked.
    pub(crate) lists: Vec<CertificateRevocationListDer<'static>>,
}

/// The authorities in a file, with their lists of revoked certificates.
pub(crate) fn authorities(path: &Path) -> Result<(Believed, Stamp), Wrong> {
    let (bytes, stamp) = read(path, false)?;
    let all = chain_in(path, &bytes)?;
    let lists = revoked::lists(&bytes, &all).map_err(|why| text(path, why))?;
    let mut roots = RootCertStore::empty();
    for one in all {
        roots.add(one).map_err(|error| {
            text(
                path,
                format!("a certificate in it is no authority's: {error}"),
            )
        })?;
    }
    let roots = Arc::new(roots);
    Ok((Believed { roots, lists }, stamp))
}

/// What a key that is another one's than the certificate's is refused with.
pub(crate) fn mismatch(certificate: &Path, of_key: &Path, error: &rustls::Error) -> Wrong {
    let certificate = certificate.display();
    text(
        of_key,
        format!("key and certificate {certificate} do not fit: {error}"),
    )
}

fn config(
    clock: &Arc<dyn TimeProvider>,
    paths: &[PathBuf],
    versions: Versions,
) -> Taken<ServerConfig> {
    // PANIC: `open_by` has named them.
    let [of_certificate, of_key, clients @ ..] = paths else {
        unreachable!("a certificate and a key");
    };
    let (shown, first) = chain(of_certificate)?;
    let (secret, second) = key(of_key)?;
    let mut stamps = vec![first, second];
    let builder = ServerConfig::builder_with_details(provider(), Arc::clone(clock))
        .with_protocol_versions(versions.list())
        .map_err(|error| text(of_certificate, error.to_string()))?;
    let builder = match clients.first() {
        None => builder.with_no_client_auth(),
        Some(path) => {
            let (believed, stamp) = authorities(path)?;
            stamps.push(stamp);
            let verifier = WebPkiClientVerifier::builder_with_provider(believed.roots, provider())
                .with_crls(believed.lists)
                // Not every authority has a list. Of one that has, the list has to be of today.
                .allow_unknown_revocation_status()
                .enforce_revocation_expiration()
                .build();
            let verifier = verifier.map_err(|error| text(path, error.to_string()))?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let mut config = builder
        .with_single_cert(shown, secret)
        .map_err(|error| mismatch(of_certificate, of_key, &error))?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    // Nothing of a session is kept: each handshake is a whole one, by the files of its time.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok((config, stamps))
}
