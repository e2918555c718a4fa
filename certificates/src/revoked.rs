//! Lists of revoked certificates (CRL): what of them is believed, and how a lab makes its own.
//!
//! A list lies in the file of the authority that has signed it, behind its certificate. So the two
//! travel together, who follows the file follows the list, and there is no second file to forget. A
//! list that nobody in the file has signed makes the file wrong. One whose time is over lets nobody
//! in: somebody may be keeping newer ones back.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rcgen::{
    CertificateRevocationListParams, Issuer, KeyIdMethod, KeyPair, RevokedCertParams, SerialNumber,
};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer};

/// Tags of DER.
const SEQUENCE: u8 = 0x30;
const BIT_STRING: u8 = 0x03;

/// The lists in a file, each signed by one of the authorities there.
///
/// # Errors
/// What is wrong with one.
pub(crate) fn lists(
    bytes: &[u8],
    authorities: &[CertificateDer<'static>],
) -> Result<Vec<CertificateRevocationListDer<'static>>, String> {
    let lists: Result<Vec<_>, _> = CertificateRevocationListDer::pem_slice_iter(bytes).collect();
    let lists = lists.map_err(|error| format!("a list of revoked certificates: {error}"))?;
    for list in &lists {
        check(list, authorities)
            .map_err(|why| format!("a list of revoked certificates in it {why}"))?;
    }
    Ok(lists)
}

fn check(list: &[u8], authorities: &[CertificateDer<'static>]) -> Result<(), String> {
    let parsed = webpki::BorrowedCertRevocationList::from_der(list)
        .map_err(|error| format!("cannot be read: {error}"))?;
    let parsed = webpki::CertRevocationList::from(parsed);
    let (signed, signature) = parts(list).ok_or("cannot be read")?;
    let by = authorities.iter().filter(|authority| {
        let anchor = webpki::anchor_from_trusted_cert(authority);
        anchor.is_ok_and(|anchor| anchor.subject.as_ref() == parsed.issuer())
    });
    let mut named = false;
    for authority in by {
        named = true;
        let Ok(authority) = webpki::EndEntityCert::try_from(authority) else {
            continue;
        };
        let algorithms = crate::provider().signature_verification_algorithms.all;
        let holds = |algorithm| {
            authority
                .verify_signature(algorithm, signed, signature)
                .is_ok()
        };
        if algorithms.iter().any(|algorithm| holds(*algorithm)) {
            return Ok(());
        }
    }
    Err(match named {
        true => "is not signed by the authority that it names: somebody has changed or made it up",
        false => {
            "is by none of the authorities in it: add the certificate of the one that has signed it"
        }
    }
    .into())
}

/// What is signed in a list, and the signature.
fn parts(list: &[u8]) -> Option<(&[u8], &[u8])> {
    let (inner, _) = value(list, SEQUENCE)?;
    let (_, after) = value(inner, SEQUENCE)?;
    let signed = inner.get(..inner.len().checked_sub(after.len())?)?;
    let (_, rest) = value(after, SEQUENCE)?;
    let (bits, _) = value(rest, BIT_STRING)?;
    // Of whole bytes, which the first one says.
    let (unused, signature) = bits.split_first()?;
    (*unused == 0).then_some((signed, signature))
}

/// The value with this tag that bytes of DER begin with, and what is behind it.
fn value(bytes: &[u8], tag: u8) -> Option<(&[u8], &[u8])> {
    let (first, rest) = bytes.split_first()?;
    let (length, rest) = rest.split_first()?;
    let (length, rest) = match *length {
        short @ 0..=0x7f => (usize::from(short), rest),
        // Of a length of more than four bytes there is no list.
        long @ 0x81..=0x84 => {
            let (digits, rest) = rest.split_at_checked(usize::from(long & 0x7f))?;
            let length = digits
                .iter()
                .fold(0, |length, byte| (length << 8) | usize::from(*byte));
            (length, rest)
        }
        _ => return None,
    };
    (*first == tag).then(|| rest.split_at_checked(length))?
}

/// What a lab has vouched for, by serial number: a list takes back all of somebody's certificates,
/// those too that others have replaced.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Issued(BTreeMap<String, One>);

#[derive(Debug, Clone, PartialEq, Eq)]
struct One {
    who: String,
    /// When its time is over, in Unix seconds.
    ends_s: u64,
    revoked_s: Option<u64>,
}

/// The file begins with it.
const TITLE: &str = "# serial number, end (Unix seconds), for whom, when revoked\n";

impl Issued {
    /// From the file's text.
    ///
    /// # Errors
    /// The line that says nothing.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let mut all = BTreeMap::new();
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let words: Vec<&str> = line.split(' ').collect();
            let (serial, ends, who, revoked) = match words[..] {
                [serial, ends, who] => (serial, ends, who, None),
                [serial, ends, who, revoked] => (serial, ends, who, Some(revoked)),
                _ => return Err(format!("`{line}` is no line of it")),
            };
            let revoked_s = revoked.map(str::parse::<u64>).transpose();
            let (Ok(ends_s), Ok(revoked_s), Some(_)) = (ends.parse(), revoked_s, bytes_of(serial))
            else {
                return Err(format!("`{line}` is no line of it"));
            };
            let one = One {
                who: who.to_owned(),
                ends_s,
                revoked_s,
            };
            all.insert(serial.to_owned(), one);
        }
        Ok(Self(all))
    }

    /// As text.
    pub(crate) fn text(&self) -> String {
        let lines = self.0.iter().map(|(serial, one)| {
            let revoked = one.revoked_s.map(|at| format!(" {at}")).unwrap_or_default();
            format!("{serial} {} {}{revoked}\n", one.ends_s, one.who)
        });
        TITLE.to_owned() + &lines.collect::<String>()
    }

    /// Notes a certificate; one that is known stays as it is.
    pub(crate) fn note(&mut self, serial: &[u8], who: &str, ends_s: u64) {
        let serial = serial.iter().map(|byte| format!("{byte:02x}")).collect();
        self.0.entry(serial).or_insert_with(|| One {
            who: who.to_owned(),
            ends_s,
            revoked_s: None,
        });
    }

    /// Takes back all that somebody has; how many that are. One that is over needs no list.
    pub(crate) fn revoke(&mut self, who: &str, now_s: u64) -> usize {
        let of_them = self
            .0
            .values_mut()
            .filter(|one| one.who == who && one.revoked_s.is_none() && one.ends_s > now_s);
        of_them.map(|one| one.revoked_s = Some(now_s)).count()
    }

    /// Whether somebody has had one.
    pub(crate) fn knows(&self, who: &str) -> bool {
        self.0.values().any(|one| one.who == who)
    }

    /// Whether anything is taken back.
    pub(crate) fn has_revoked(&self) -> bool {
        self.0.values().any(|one| one.revoked_s.is_some())
    }

    /// The list, PEM, good within this span.
    ///
    /// # Errors
    /// It cannot be signed.
    pub(crate) fn list(
        &self,
        issuer: &Issuer<'static, KeyPair>,
        (from, until): (SystemTime, SystemTime),
    ) -> Result<String, String> {
        let at = |s: u64| (UNIX_EPOCH + Duration::from_secs(s)).into();
        let revoked = self.0.iter().filter_map(|(serial, one)| {
            Some(RevokedCertParams {
                serial_number: SerialNumber::from_slice(&bytes_of(serial)?),
                revocation_time: at(one.revoked_s?),
                reason_code: None,
                invalidity_date: None,
            })
        });
        let number = from
            .duration_since(UNIX_EPOCH)
            .map_or(0, |from| from.as_secs());
        let params = CertificateRevocationListParams {
            this_update: from.into(),
            next_update: until.into(),
            crl_number: SerialNumber::from(number),
            issuing_distribution_point: None,
            revoked_certs: revoked.collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        let list = params
            .signed_by(issuer)
            .map_err(|error| error.to_string())?;
        list.pem().map_err(|error| error.to_string())
    }
}

/// The bytes of a serial number.
fn bytes_of(serial: &str) -> Option<Vec<u8>> {
    let is_hex = !serial.is_empty() && serial.bytes().all(|byte| byte.is_ascii_hexdigit());
    if !is_hex || !serial.len().is_multiple_of(2) {
        return None;
    }
    let pairs = (0..serial.len()).step_by(2);
    pairs
        .map(|at| u8::from_str_radix(&serial[at..at + 2], 16).ok())
        .collect()
}

/// The serial number of a certificate in PEM.
///
/// # Errors
/// It is none.
pub(crate) fn serial_of(certificate: &[u8]) -> Result<Vec<u8>, String> {
    let der = CertificateDer::from_pem_slice(certificate).map_err(|error| error.to_string())?;
    let parsed = webpki::EndEntityCert::try_from(&der).map_err(|error| error.to_string())?;
    Ok(parsed.serial().to_vec())
}

/// The certificate alone of an authority's file, without the list that may be behind it.
pub(crate) fn without_list(text: &str) -> &str {
    let end = text.find("-----BEGIN X509 CRL-----");
    text.get(..end.unwrap_or(text.len())).unwrap_or(text)
}

/// Whether a lab's file of what it has vouched for is there.
pub(crate) fn is_kept(dir: &Path) -> bool {
    dir.join(ISSUED).exists()
}

/// Its name.
pub(crate) const ISSUED: &str = "issued.txt";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_issued_is_read_as_it_was_written() {
        let mut issued = Issued::default();
        issued.note(&[0x0a, 0xff], "node-a", 200);
        issued.note(&[0x0b], "node-a", 300);
        issued.note(&[0x0c], "node-a", 50);
        issued.note(&[0x0d], "node-b", 300);
        assert!(!issued.has_revoked());
        assert_eq!(issued.revoke("node-a", 100), 2, "one is over");
        assert_eq!(issued.revoke("node-a", 101), 0, "they are taken back");
        assert_eq!(issued.revoke("node-x", 101), 0);
        assert!(issued.has_revoked());
        assert_eq!(Issued::parse(&issued.text()), Ok(issued.clone()));
        issued.note(&[0x0b], "node-b", 900);
        assert!(issued.text().contains("0b 300 node-a 100\n"));
        for bad in [
            "0a",
            "0a x node-a",
            "0 1 a",
            "zz 1 a",
            "0a 1 a x",
            "0a 1 a 2 3",
        ] {
            let error = Issued::parse(bad).expect_err(bad);
            assert!(error.contains(bad), "{error}");
        }
    }

    #[test]
    fn bytes_that_are_no_list_end_in_nothing() {
        for bad in [
            &[][..],
            &[SEQUENCE],
            &[SEQUENCE, 0x85, 1, 1, 1, 1, 1],
            &[SEQUENCE, 0x84, 0xff, 0xff, 0xff, 0xff],
            &[SEQUENCE, 0x80],
            &[SEQUENCE, 4, SEQUENCE, 0, SEQUENCE, 0],
            &[SEQUENCE, 8, SEQUENCE, 0, SEQUENCE, 0, BIT_STRING, 2, 1, 7],
        ] {
            assert!(parts(bad).is_none(), "{bad:?}");
        }
        let whole = [SEQUENCE, 8, SEQUENCE, 0, SEQUENCE, 0, BIT_STRING, 2, 0, 7];
        assert_eq!(parts(&whole), Some((&[SEQUENCE, 0][..], &[7][..])));
    }
}
