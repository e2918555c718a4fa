//! An authority for a lab that has none, and what it vouches for.
//!
//! Keys are ECDSA on P-256. The authority's name and its key's identifier follow from the key
//! alone, so that it goes on from its two files.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose,
};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, UnixTime};

use crate::followed::{Wrong, read};

/// TIMEOUT: clocks of hosts differ by hours at most, or certificates are the lesser trouble.
const BEFORE: Duration = Duration::from_secs(24 * 3600);
/// How long the authority is believed. It can be followed by another at any time.
const AUTHORITY_DAYS: u32 = 3650;

/// Why there is no certificate.
#[derive(Debug, thiserror::Error)]
pub enum MakeError {
    /// A file is missing or wrong.
    #[error(transparent)]
    File(#[from] Wrong),
    /// A file cannot be written.
    #[error("{} cannot be written: {error}", .path.display())]
    Unwritten {
        /// Which.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// A name that no certificate can have.
    #[error(
        "`{name}` is no name for a certificate: write a DNS name of letters, digits, `-` and `.`, or an address"
    )]
    Name {
        /// The name.
        name: String,
    },
    /// The authority's files are not of this command, or do not fit each other.
    #[error("{} is not the certificate of the key beside it, or was not made here: {why}", .path.display())]
    Foreign {
        /// The authority's certificate.
        path: PathBuf,
        /// Why.
        why: String,
    },
    /// It cannot be made.
    #[error("no certificate can be made: {0}")]
    Made(String),
}

/// What a certificate is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Purpose {
    /// Servers show it.
    Server,
    /// Clients show it.
    Client,
}

/// A certificate and its key, PEM.
#[derive(Clone, PartialEq, Eq)]
pub struct Made {
    /// The certificate.
    pub certificate: String,
    /// Its key.
    pub key: String,
}

impl std::fmt::Debug for Made {
    // The key stays out of logs.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Made")
    }
}

/// An authority.
#[derive(Debug)]
pub struct Authority {
    certificate: String,
    issuer: Issuer<'static, KeyPair>,
}

fn failed(error: &rcgen::Error) -> MakeError {
    MakeError::Made(error.to_string())
}

/// Whether certificates can have these names.
///
/// # Errors
/// [`MakeError::Name`]
pub fn check_names(names: &[String]) -> Result<(), MakeError> {
    for name in names {
        let is_name = rustls::pki_types::ServerName::try_from(name.as_str()).is_ok();
        if !is_name || name.contains('*') {
            return Err(MakeError::Name { name: name.clone() });
        }
    }
    Ok(())
}

/// From a day ago until in so many days.
fn span(params: &mut CertificateParams, now: SystemTime, days: u32) {
    params.not_before = (now - BEFORE).into();
    params.not_after = (now + Duration::from_secs(u64::from(days) * 86_400)).into();
}

/// What an authority's certificate says, but for its time.
fn authority() -> CertificateParams {
    let mut params = CertificateParams::default();
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, "sublet cluster authority");
    params.distinguished_name = name;
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params
}

impl Authority {
    /// A new one.
    ///
    /// # Errors
    /// This host has no random numbers.
    pub fn new(now: SystemTime) -> Result<(Self, Made), MakeError> {
        let key = KeyPair::generate().map_err(|error| failed(&error))?;
        let mut params = authority();
        span(&mut params, now, AUTHORITY_DAYS);
        let certificate = params.self_signed(&key).map_err(|error| failed(&error))?;
        let made = Made {
            certificate: certificate.pem(),
            key: key.serialize_pem(),
        };
        let one = Self {
            certificate: made.certificate.clone(),
            issuer: Issuer::new(params, key),
        };
        Ok((one, made))
    }

    /// The one in two files, which [`Authority::new`] has made.
    ///
    /// # Errors
    /// They cannot be read, others can read the key, or they are of something else.
    pub fn read(certificate: &Path, key: &Path) -> Result<Self, MakeError> {
        let foreign = |why: String| MakeError::Foreign {
            path: certificate.to_owned(),
            why,
        };
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).map_err(|_| foreign("no text".into()));
        let shown = text(read(certificate, false)?.0)?;
        let key = text(read(key, true)?.0)?;
        let key = KeyPair::from_pem(&key).map_err(|error| foreign(error.to_string()))?;
        let one = Self {
            certificate: shown,
            issuer: Issuer::new(authority(), key),
        };
        // What it vouches for from now on is to be believed by those who have that certificate.
        let probe = one.sign(&["probe".into()], Purpose::Client, SystemTime::now(), 1)?;
        one.check(&probe).map_err(foreign)?;
        Ok(one)
    }

    /// Its certificate, PEM.
    #[must_use]
    pub fn certificate(&self) -> &str {
        &self.certificate
    }

    /// Vouches for these names, DNS names or addresses, from a day ago until in so many days.
    ///
    /// # Errors
    /// A name that is none, or no random numbers.
    pub fn sign(
        &self,
        names: &[String],
        purpose: Purpose,
        now: SystemTime,
        days: u32,
    ) -> Result<Made, MakeError> {
        check_names(names)?;
        let mut params = CertificateParams::new(names.to_vec()).map_err(|error| failed(&error))?;
        let mut subject = DistinguishedName::new();
        if let Some(first) = names.first() {
            subject.push(DnType::CommonName, first.as_str());
        }
        params.distinguished_name = subject;
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![match purpose {
            Purpose::Server => ExtendedKeyUsagePurpose::ServerAuth,
            Purpose::Client => ExtendedKeyUsagePurpose::ClientAuth,
        }];
        params.use_authority_key_identifier_extension = true;
        span(&mut params, now, days);
        let key = KeyPair::generate().map_err(|error| failed(&error))?;
        let certificate = params
            .signed_by(&key, &self.issuer)
            .map_err(|error| failed(&error))?;
        Ok(Made {
            certificate: certificate.pem(),
            key: key.serialize_pem(),
        })
    }

    /// Whether those who believe this authority believe a client's certificate of it.
    fn check(&self, made: &Made) -> Result<(), String> {
        let der = |pem: &str| {
            CertificateDer::from_pem_slice(pem.as_bytes()).map_err(|error| error.to_string())
        };
        let (anchor, leaf) = (der(&self.certificate)?, der(&made.certificate)?);
        let anchor =
            webpki::anchor_from_trusted_cert(&anchor).map_err(|error| error.to_string())?;
        let leaf = webpki::EndEntityCert::try_from(&leaf).map_err(|error| error.to_string())?;
        let algorithms = crate::provider().signature_verification_algorithms;
        let usage = webpki::KeyUsage::client_auth();
        leaf.verify_for_usage(
            algorithms.all,
            &[anchor],
            &[],
            UnixTime::now(),
            usage,
            None,
            None,
        )
        .map(drop)
        .map_err(|error| error.to_string())
    }
}

/// Writes a certificate and its key: each whole or not at all, the key first and for its owner
/// alone. `new`: neither may be there yet.
///
/// # Errors
/// [`MakeError::Unwritten`]
pub fn write_pair(made: &Made, certificate: &Path, key: &Path, new: bool) -> Result<(), MakeError> {
    for (path, text, mode) in [
        (key, &made.key, 0o600),
        (certificate, &made.certificate, 0o644),
    ] {
        let unwritten = |error| MakeError::Unwritten {
            path: path.to_owned(),
            error,
        };
        // Beside it, and then in its place: who follows the files never reads half of one.
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(".new");
        let beside = path.with_file_name(name);
        let _ = fs::remove_file(&beside);
        let done = fs::File::options()
            .write(true)
            .create_new(true)
            .mode(mode)
            .open(&beside)
            .and_then(|mut file| {
                file.write_all(text.as_bytes())?;
                file.sync_all()
            })
            .and_then(|()| match new {
                // A link fails where there is one.
                true => fs::hard_link(&beside, path).and_then(|()| fs::remove_file(&beside)),
                false => fs::rename(&beside, path),
            });
        if let Err(error) = done {
            let _ = fs::remove_file(&beside);
            return Err(unwritten(error));
        }
    }
    Ok(())
}

/// A directory with an authority and what it has vouched for.
#[derive(Debug)]
pub struct Lab {
    dir: PathBuf,
    authority: Authority,
    /// Whether the authority was made now.
    pub is_new: bool,
}

impl Lab {
    /// The one in a directory, whose authority is made where there is none.
    ///
    /// # Errors
    /// [`MakeError`]
    pub fn open(dir: &Path, now: SystemTime) -> Result<Self, MakeError> {
        let unwritten = |error| MakeError::Unwritten {
            path: dir.to_owned(),
            error,
        };
        if !dir.is_dir() {
            let mut builder = fs::DirBuilder::new();
            std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
            builder.recursive(true).create(dir).map_err(unwritten)?;
        }
        let (certificate, key) = (dir.join("ca.crt"), dir.join("ca.key"));
        let is_new = !certificate.exists() && !key.exists();
        let authority = if is_new {
            let (authority, made) = Authority::new(now)?;
            write_pair(&made, &certificate, &key, true)?;
            authority
        } else {
            Authority::read(&certificate, &key)?
        };
        Ok(Self {
            dir: dir.to_owned(),
            authority,
            is_new,
        })
    }

    /// Its files for somebody.
    #[must_use]
    pub fn files(&self, who: &str) -> (PathBuf, PathBuf) {
        let at = |end: &str| self.dir.join(format!("{who}.{end}"));
        (at("crt"), at("key"))
    }

    /// Vouches for somebody and writes that down. `renew`: in the place of what is there.
    ///
    /// # Errors
    /// [`MakeError`]
    pub fn make(
        &self,
        who: &str,
        names: &[String],
        purpose: Purpose,
        span: (SystemTime, u32),
        renew: bool,
    ) -> Result<(PathBuf, PathBuf), MakeError> {
        let made = self.authority.sign(names, purpose, span.0, span.1)?;
        let (certificate, key) = self.files(who);
        write_pair(&made, &certificate, &key, !renew)?;
        Ok((certificate, key))
    }
}
