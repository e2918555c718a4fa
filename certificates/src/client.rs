//! Whom a client believes, and what it shows.

use std::path::PathBuf;
use std::sync::Arc;

use rustls::ClientConfig;
use rustls::client::{Resumption, WebPkiServerVerifier};
use rustls::time_provider::{DefaultTimeProvider, TimeProvider};

use crate::followed::{Followed, Notice, Taken, Wrong};
use crate::provider;
use crate::server::{authorities, chain, key, mismatch};

/// Files of a client.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ClientFiles {
    /// Certificates of the authorities by which servers are known, PEM, and behind them the lists
    /// of what they have revoked.
    pub authority: PathBuf,
    /// What it shows where it is asked: a certificate with its chain, and its key.
    pub own: Option<(PathBuf, PathBuf)>,
}

/// The client's end, by its files as they are now. Where they are wrong, those before stay in
/// force. It speaks TLS 1.3.
pub struct Client(Followed<ClientConfig>);

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Client")
    }
}

impl Client {
    /// Reads the files; `tell` hears of changes.
    ///
    /// # Errors
    /// [`Wrong`]
    pub fn open(
        files: &ClientFiles,
        tell: impl Fn(Notice<'_>) + Send + Sync + 'static,
    ) -> Result<Self, Wrong> {
        Self::open_by(Arc::new(DefaultTimeProvider), files, tell)
    }

    /// By a clock.
    pub(crate) fn open_by(
        clock: Arc<dyn TimeProvider>,
        files: &ClientFiles,
        tell: impl Fn(Notice<'_>) + Send + Sync + 'static,
    ) -> Result<Self, Wrong> {
        let mut paths = vec![files.authority.clone()];
        if let Some((certificate, key)) = &files.own {
            paths.extend([certificate.clone(), key.clone()]);
        }
        let read = move |paths: &[PathBuf]| config(&clock, paths);
        Followed::open(paths, read, |_| false, tell).map(Self)
    }

    /// As the files are now.
    ///
    /// # Errors
    /// None: what they said before stays in force.
    pub fn now(&self) -> Result<Arc<ClientConfig>, String> {
        self.0.now()
    }

    /// How often the files have come to say something new: a connection that began at another
    /// count believes somebody by other files.
    #[must_use]
    pub fn changes(&self) -> u64 {
        self.0.changes()
    }
}

fn config(clock: &Arc<dyn TimeProvider>, paths: &[PathBuf]) -> Taken<ClientConfig> {
    // PANIC: `open_by` has named them.
    let [authority, own @ ..] = paths else {
        unreachable!("an authority");
    };
    let (believed, stamp) = authorities(authority)?;
    let mut stamps = vec![stamp];
    let verifier = WebPkiServerVerifier::builder_with_provider(believed.roots, provider())
        .with_crls(believed.lists)
        // As a server does with its clients.
        .allow_unknown_revocation_status()
        .enforce_revocation_expiration()
        .build()
        .map_err(|error| Wrong::Text {
            path: authority.clone(),
            why: error.to_string(),
        })?;
    let builder = ClientConfig::builder_with_details(provider(), Arc::clone(clock))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(|error| Wrong::Text {
            path: authority.clone(),
            why: error.to_string(),
        })?
        .with_webpki_verifier(verifier);
    let mut config = match own {
        [of_certificate, of_key] => {
            let (shown, first) = chain(of_certificate)?;
            let (secret, second) = key(of_key)?;
            stamps.extend([first, second]);
            builder
                .with_client_auth_cert(shown, secret)
                .map_err(|error| mismatch(of_certificate, of_key, &error))?
        }
        _ => builder.with_no_client_auth(),
    };
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    // Each handshake is a whole one: who was believed an hour ago may not be any more.
    config.resumption = Resumption::disabled();
    Ok((config, stamps))
}
