//! The flags by which a server of this program speaks TLS.

use std::path::PathBuf;

use anyhow::Context;
use certificates::{Notice, Server, ServerFiles, Versions};
use clap::Args;

/// Files of a server, which counts as plain without them.
#[derive(Debug, Args)]
pub struct TlsFlags {
    /// Serve over TLS alone: certificate with its chain, PEM. Renewed files count within seconds
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// Key of the certificate, PEM, mode 600
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// Answer only clients that show a certificate of the authorities in this file
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub tls_client_ca: Option<PathBuf>,
}

impl TlsFlags {
    /// What a server shows, by its files as they are at any time; `None`: it is plain. `say` hears
    /// of changes.
    ///
    /// # Errors
    /// A file is wrong.
    pub fn server(
        &self,
        versions: Versions,
        say: impl Fn(&str) + Send + Sync + 'static,
    ) -> anyhow::Result<Option<Server>> {
        let (Some(certificate), Some(key)) = (&self.tls_cert, &self.tls_key) else {
            return Ok(None);
        };
        let files = ServerFiles {
            certificate: certificate.clone(),
            key: key.clone(),
            clients: self.tls_client_ca.clone(),
        };
        let tell = move |notice: Notice<'_>| say(&notice.to_string());
        let tls = Server::open(&files, versions, tell)?;
        tls.follow().context("cannot start a thread")?;
        Ok(Some(tls))
    }
}
