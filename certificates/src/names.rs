//! Whom a certificate is for.

use rustls::pki_types::CertificateDer;

/// The DNS names in a certificate, as they stand there. A name with a wildcard stands for itself:
/// it names nobody in particular. Of what is no certificate there are none.
#[must_use]
pub fn names(certificate: &CertificateDer<'_>) -> Vec<String> {
    let parsed = webpki::EndEntityCert::try_from(certificate);
    parsed.map_or_else(
        |_| Vec::new(),
        |parsed| parsed.valid_dns_names().map(ToOwned::to_owned).collect(),
    )
}
