//! HTTP/1.1 between the hook and those who ask it. hyper reads and writes the messages. What is
//! ours is who gets how much: a bound on all input from strangers, a deadline on every wait, and
//! proofs that belong to one connection.

pub mod client;
pub mod pages;
mod secure;
pub mod server;

use hyper::Version;
use hyper::header::{CONNECTION, HeaderMap};

/// Scheme of the `Authorization` field.
pub const SCHEME: &str = "Sublet";
/// Field of an answer with its code.
pub const CODE_FIELD: &str = "Sublet-Code";
/// Longest head of a message.
pub const MAX_HEAD_BYTES: usize = 16 << 10;
/// Longest body. A report about a thousand jobs stays below a megabyte.
pub const MAX_BODY_BYTES: usize = 8 << 20;
/// Most header fields.
const MAX_FIELDS: usize = 64;

/// Whether the connection stays after this message, by what its sender says.
fn stays(version: Version, fields: &HeaderMap) -> bool {
    let says_close = |value: &str| {
        let mut words = value.split(',');
        words.any(|word| word.trim().eq_ignore_ascii_case("close"))
    };
    version == Version::HTTP_11
        && !fields
            .get_all(CONNECTION)
            .iter()
            .any(|value| value.to_str().is_ok_and(says_close))
}
