//! An authority for a lab that has none, and what it vouches for.
//!
//! Keys are ECDSA on P-256. The authority's name and its key's identifier follow from the key
//! alone, so that it goes on from its two files.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose,
};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, UnixTime};

use crate::followed::{Wrong, read};
use crate::revoked::{self, ISSUED, Issued};

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
    /// Somebody who has none.
    #[error(
        "`{who}` has no certificate here: write it as its files are called, such as node-a, hook or operator"
    )]
    Nobody {
        /// Whom.
        who: String,
    },
    /// What the lab has vouched for is not known any more, so a new list would bring back who is
    /// revoked.
    #[error("{}: {why}", .path.display())]
    Issued {
        /// The file.
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

fn days(count: u32) -> Duration {
    Duration::from_secs(u64::from(count) * 86_400)
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
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
    params.not_after = (now + self::days(days)).into();
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
    write(key, &made.key, 0o600, new)?;
    write(certificate, &made.certificate, 0o644, new)
}

/// Writes a file: beside it, and then in its place, so that who follows it never reads half of one.
fn write(path: &Path, text: &str, mode: u32, new: bool) -> Result<(), MakeError> {
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
    done.map_err(|error| {
        let _ = fs::remove_file(&beside);
        MakeError::Unwritten {
            path: path.to_owned(),
            error,
        }
    })
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
        // Noted first: one that is not could not be taken back.
        let mut issued = self.issued()?;
        let end = span.0 + days(span.1);
        self.note(
            &mut issued,
            (who, &certificate),
            made.certificate.as_bytes(),
            end,
        )?;
        write(&self.dir.join(ISSUED), &issued.text(), 0o644, false)?;
        write_pair(&made, &certificate, &key, !renew)?;
        Ok((certificate, key))
    }

    /// Takes back all certificates of these, those too that others have replaced, and writes the
    /// list of all that are revoked behind the authority's certificate. How many there were of each
    /// that were good until now; the file.
    ///
    /// # Errors
    /// [`MakeError`]; nothing is revoked then.
    pub fn revoke(
        &self,
        all: &[String],
        now: SystemTime,
    ) -> Result<(Vec<usize>, PathBuf), MakeError> {
        let mut issued = self.issued()?;
        let now_s = seconds(now);
        let mut counts = Vec::new();
        for who in all {
            // One that was made before there was a file.
            let (certificate, _) = self.files(who);
            if certificate.exists() {
                let bytes = read(&certificate, false)?.0;
                let end = now + days(AUTHORITY_DAYS);
                self.note(&mut issued, (who, &certificate), &bytes, end)?;
            }
            if !issued.knows(who) {
                return Err(MakeError::Nobody { who: who.clone() });
            }
            counts.push(issued.revoke(who, now_s));
        }
        let path = self.dir.join("ca.crt");
        let list = issued
            .list(
                &self.authority.issuer,
                (now - BEFORE, now + days(AUTHORITY_DAYS)),
            )
            .map_err(MakeError::Made)?;
        let certificate = revoked::without_list(self.authority.certificate());
        let text = format!("{}\n{list}", certificate.trim_end());
        // The list follows from what is noted: the other way round it would be lost with the next.
        write(&self.dir.join(ISSUED), &issued.text(), 0o644, false)?;
        write(&path, &text, 0o644, false)?;
        Ok((counts, path))
    }

    fn note(
        &self,
        issued: &mut Issued,
        (who, path): (&str, &Path),
        certificate: &[u8],
        end: SystemTime,
    ) -> Result<(), MakeError> {
        let serial = revoked::serial_of(certificate).map_err(|why| MakeError::Issued {
            path: path.to_owned(),
            why,
        })?;
        issued.note(&serial, who, seconds(end));
        Ok(())
    }

    /// What it has vouched for.
    fn issued(&self) -> Result<Issued, MakeError> {
        let path = self.dir.join(ISSUED);
        let wrong = |why: String| MakeError::Issued {
            path: path.clone(),
            why,
        };
        let issued = match revoked::is_kept(&self.dir) {
            false => Issued::default(),
            true => {
                let text = String::from_utf8(read(&path, false)?.0);
                let text = text.map_err(|_| wrong("it is no text".into()))?;
                Issued::parse(&text).map_err(wrong)?
            }
        };
        let authority = self.authority.certificate();
        let has_list = revoked::without_list(authority) != authority;
        if has_list && !issued.has_revoked() {
            return Err(wrong(
                "it names none that are revoked, and ca.crt has a list of some: put the file back, or make another authority".into(),
            ));
        }
        Ok(issued)
    }
}
