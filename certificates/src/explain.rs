//! What a handshake that failed means, in words for who has to mend it.

use std::error::Error;
use std::io;

use rustls::pki_types::UnixTime;
use rustls::{AlertDescription, CertificateError, Error as TlsError};

/// What TLS has to say about a failure; `None`: it is none of TLS.
#[must_use]
pub fn explain(error: &(dyn Error + 'static)) -> Option<String> {
    tls(error).map(words)
}

/// Whether what came was no TLS at all.
#[must_use]
pub fn is_no_tls(error: &(dyn Error + 'static)) -> bool {
    matches!(tls(error), Some(TlsError::InvalidMessage(_)))
}

/// Whether it is the other side that has ended the connection, with a reason.
#[must_use]
pub fn is_refusal(error: &(dyn Error + 'static)) -> bool {
    matches!(tls(error), Some(TlsError::AlertReceived(_)))
}

/// The error of TLS in an error, however it is wrapped.
fn tls<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a TlsError> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(found) = error.downcast_ref::<TlsError>() {
            return Some(found);
        }
        // An `io::Error` keeps what it was made of to itself.
        let inner = error
            .downcast_ref::<io::Error>()
            .and_then(io::Error::get_ref);
        next = match inner {
            Some(inner) => Some(inner),
            None => error.source(),
        };
    }
    None
}

fn words(error: &TlsError) -> String {
    match error {
        TlsError::InvalidCertificate(why) => certificate(why),
        TlsError::NoCertificatesPresented => {
            "no certificate was shown, and one is demanded here".into()
        }
        TlsError::InvalidMessage(_) => "what came is no TLS".into(),
        TlsError::AlertReceived(alert) => refused(*alert),
        other => other.to_string(),
    }
}

fn certificate(why: &CertificateError) -> String {
    let days = |from: &UnixTime, to: &UnixTime| to.as_secs().abs_diff(from.as_secs()) / 86_400;
    match why {
        CertificateError::Expired => "the certificate that was shown has expired: renew it".into(),
        CertificateError::ExpiredContext { time, not_after } => format!(
            "the certificate that was shown expired {} days ago by this host's clock: renew it, or set the clock",
            days(not_after, time)
        ),
        CertificateError::NotValidYet => {
            "the certificate that was shown is not valid yet: is this host's clock right?".into()
        }
        CertificateError::NotValidYetContext { time, not_before } => format!(
            "the certificate that was shown is valid only in {} days by this host's clock: is the clock right?",
            days(time, not_before)
        ),
        CertificateError::Revoked => {
            "the certificate that was shown is revoked: its owner needs another one".into()
        }
        CertificateError::ExpiredRevocationList => {
            "the list of revoked certificates of this host is too old: put a newer one into the authority's file".into()
        }
        CertificateError::ExpiredRevocationListContext { time, next_update } => format!(
            "the list of revoked certificates of this host was good until {} days ago by its clock: put a newer one into the authority's file, or set the clock",
            days(next_update, time)
        ),
        CertificateError::NotValidForName => {
            "the certificate that was shown is for another name than the one that is asked for"
                .into()
        }
        CertificateError::NotValidForNameContext {
            expected,
            presented,
        } => {
            let shown: Vec<String> = presented.iter().map(|name| name_in(name)).collect();
            format!(
                "the certificate that was shown is for {}, and not for {}",
                if shown.is_empty() {
                    "no name".to_owned()
                } else {
                    shown.join(", ")
                },
                expected.to_str()
            )
        }
        CertificateError::UnknownIssuer | CertificateError::BadSignature => {
            "the certificate that was shown is by none of the authorities that are believed here"
                .into()
        }
        CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => {
            "the certificate that was shown is not for this purpose: a server's is for serverAuth, a client's for clientAuth".into()
        }
        other => format!("the certificate that was shown is not believed: {other:?}"),
    }
}

/// `DnsName("a")` is `a`.
fn name_in(shown: &str) -> String {
    let inner = shown.split_once('(').map_or(shown, |(_, rest)| rest);
    let inner = inner.trim_end_matches(')').trim_matches('"');
    inner.to_owned()
}

fn refused(alert: AlertDescription) -> String {
    match alert {
        AlertDescription::CertificateRequired => {
            "it demands a certificate, and none was shown".into()
        }
        AlertDescription::CertificateExpired => {
            "it does not believe our certificate: by its clock that has expired, or is not valid yet".into()
        }
        AlertDescription::CertificateRevoked => {
            "it does not believe our certificate: it is revoked, so another one is needed".into()
        }
        AlertDescription::UnknownCA | AlertDescription::DecryptError => {
            "it does not believe our certificate: none of the authorities that it believes made it"
                .into()
        }
        AlertDescription::BadCertificate
        | AlertDescription::UnsupportedCertificate
        | AlertDescription::CertificateUnknown
        | AlertDescription::AccessDenied => {
            "it does not believe our certificate: it is not one for clients, or of another kind"
                .into()
        }
        AlertDescription::ProtocolVersion => "it speaks another version of TLS".into(),
        other => format!("it has ended the handshake: {other:?}"),
    }
}
