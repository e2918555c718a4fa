//! How a hook and its clients authenticate each other: both hold the token, which is never sent.
//!
//! ```text
//! client -> hook    GET /v1/session?nonce=A
//! hook   -> client  HookId, B, HMAC(token, "hook", A, B, HookId)     (the hook knows the token)
//! both              key = HMAC(token, "key", A, B, HookId)
//! client -> hook    seq, digest of the body, HMAC(key, "request", seq, method, path, digest)
//! hook   -> client  HMAC(key, "answer", seq, status, digest)
//! ```
//!
//! A session is one connection: its nonces are drawn for it, its requests are counted from 1 and
//! come in this sequence, and each answer is bound to its request. So nothing can be replayed,
//! altered, answered by a stranger or moved to another connection, and a request is known to be
//! genuine by its head, before its body is read. This encrypts nothing: where others could read
//! messages on the way, the connection is one of TLS.
//!
//! A node may hold a key of its own in place of the token, which follows from the token and the
//! node's name: `HMAC(token, "node", name)`. It names itself beside its nonce (`&node=NAME`), and
//! may speak as that node alone.

use getrandom::Error as NoRandom;
use hmac::{Hmac, KeyInit, Mac};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use utoipa::ToSchema;

use super::wire::HookId;

/// Bytes of a nonce, a digest, a code.
const BYTES: usize = 32;

/// The token, as a key.
#[derive(Clone, Default)]
pub struct Secret([u8; BYTES]);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret")
    }
}

/// The hook's answer to a client's nonce.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct Challenge {
    /// Which hook answers.
    pub hook: HookId,
    /// Its nonce, in hexadecimal digits.
    pub nonce: String,
    /// That it knows the token.
    pub proof: String,
}

/// What goes with a request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Signature {
    /// Which request of the session, from 1.
    pub seq: u64,
    /// Of the body.
    pub digest: String,
    /// Over all of it.
    pub code: String,
}

/// One side of a session.
#[derive(Debug, Default)]
pub struct Session {
    key: Secret,
    /// Requests so far.
    seq: u64,
}

/// A nonce in hexadecimal digits.
///
/// # Errors
/// The host has no random numbers.
pub fn nonce() -> Result<String, NoRandom> {
    let mut bytes = [0; BYTES];
    getrandom::fill(&mut bytes)?;
    Ok(hex(&bytes))
}

/// What [`nonce`] makes, by its form.
#[must_use]
pub fn is_nonce(text: &str) -> bool {
    text.len() == 2 * BYTES && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

fn hex(bytes: &[u8]) -> String {
    let digit = |four: u8| char::from_digit(u32::from(four), 16).unwrap_or('0');
    bytes
        .iter()
        .flat_map(|byte| [digit(byte >> 4), digit(byte & 15)])
        .collect()
}

fn unhex(text: &str) -> Option<[u8; BYTES]> {
    let mut bytes = [0; BYTES];
    if !is_nonce(text) {
        return None;
    }
    for (byte, pair) in bytes.iter_mut().zip(text.as_bytes().chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(bytes)
}

/// The digest of a body.
#[must_use]
pub fn digest(body: &[u8]) -> String {
    hex(&Sha256::digest(body))
}

/// What the token of a node begins with; the node's name and its key follow, with `:` between.
const OF_NODE: &str = "sublet-node:";

/// What the file of a token has.
#[derive(Clone, Debug)]
pub struct Token {
    secret: Secret,
    node: Option<String>,
}

impl Token {
    /// What a text stands for: the token of a hook, or that of one node.
    #[must_use]
    pub fn new(text: &str) -> Self {
        let of_node = text.strip_prefix(OF_NODE);
        let of_node = of_node.and_then(|rest| rest.rsplit_once(':'));
        let of_node = of_node.and_then(|(node, key)| Some((node, unhex(key)?)));
        match of_node {
            Some((node, key)) => Self {
                secret: Secret(key),
                node: Some(node.to_owned()),
            },
            None => Self {
                secret: Secret::new(text),
                node: None,
            },
        }
    }

    /// As whom alone its holder may speak; `None`: as anybody.
    #[must_use]
    pub fn node(&self) -> Option<&str> {
        self.node.as_deref()
    }

    /// The key that it stands for.
    #[must_use]
    pub fn secret(&self) -> &Secret {
        &self.secret
    }
}

impl Secret {
    /// The key of one node.
    #[must_use]
    pub fn of_node(&self, node: &str) -> Self {
        let mut key = [0; BYTES];
        let code = self.over(&[b"node", node.as_bytes()]).finalize();
        key.copy_from_slice(&code.into_bytes());
        Self(key)
    }

    /// The token of one node, as its file has it.
    #[must_use]
    pub fn token_of_node(&self, node: &str) -> String {
        format!("{OF_NODE}{node}:{}", hex(&self.of_node(node).0))
    }

    /// The key that a token stands for.
    #[must_use]
    pub fn new(token: &str) -> Self {
        let mut bytes = [0; BYTES];
        bytes.copy_from_slice(&Sha256::digest(
            [b"sublet cluster 1\0", token.as_bytes()].concat(),
        ));
        Self(bytes)
    }

    /// Of parts, each with its length, so that no two lists of parts are one text.
    fn over(&self, parts: &[&[u8]]) -> Hmac<Sha256> {
        // PANIC: HMAC takes keys of every length.
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).expect("a key");
        for part in parts {
            // CAST: a length.
            mac.update(&(part.len() as u64).to_le_bytes());
            mac.update(part);
        }
        mac
    }

    fn code(&self, parts: &[&[u8]]) -> String {
        hex(&self.over(parts).finalize().into_bytes())
    }

    /// Compared in a time that tells nothing.
    fn fits(&self, parts: &[&[u8]], code: &str) -> bool {
        unhex(code).is_some_and(|code| self.over(parts).verify_slice(&code).is_ok())
    }

    fn session(&self, client: &str, hook: &str, id: &HookId) -> Session {
        let mut key = [0; BYTES];
        let epoch = id.epoch.to_le_bytes();
        let parts: [&[u8]; 6] = [
            b"key",
            client.as_bytes(),
            hook.as_bytes(),
            id.cluster.as_bytes(),
            &epoch,
            id.nonce.as_bytes(),
        ];
        key.copy_from_slice(&self.over(&parts).finalize().into_bytes());
        Session {
            key: Self(key),
            seq: 0,
        }
    }

    /// The hook's answer to a nonce, and its side of the session.
    ///
    /// # Errors
    /// The host has no random numbers.
    pub fn answer(&self, client: &str, id: &HookId) -> Result<(Challenge, Session), NoRandom> {
        let nonce = nonce()?;
        let proof = self.code(&Self::proof(client, &nonce, id, &id.epoch.to_le_bytes()));
        let session = self.session(client, &nonce, id);
        let challenge = Challenge {
            hook: id.clone(),
            nonce,
            proof,
        };
        Ok((challenge, session))
    }

    /// The client's side of the session; `None`: who answers does not know the token.
    #[must_use]
    pub fn accept(&self, client: &str, said: &Challenge) -> Option<Session> {
        let epoch = said.hook.epoch.to_le_bytes();
        let parts = Self::proof(client, &said.nonce, &said.hook, &epoch);
        (is_nonce(&said.nonce) && self.fits(&parts, &said.proof))
            .then(|| self.session(client, &said.nonce, &said.hook))
    }

    fn proof<'a>(
        client: &'a str,
        hook: &'a str,
        id: &'a HookId,
        epoch: &'a [u8; 8],
    ) -> [&'a [u8]; 6] {
        [
            b"hook",
            client.as_bytes(),
            hook.as_bytes(),
            id.cluster.as_bytes(),
            epoch,
            id.nonce.as_bytes(),
        ]
    }
}

impl Session {
    fn request<'a>(
        seq: &'a [u8; 8],
        method: &'a str,
        path: &'a str,
        digest: &'a str,
    ) -> [&'a [u8]; 5] {
        [
            b"request",
            seq,
            method.as_bytes(),
            path.as_bytes(),
            digest.as_bytes(),
        ]
    }

    /// The client's next request.
    pub fn sign(&mut self, method: &str, path: &str, body: &[u8]) -> Signature {
        self.seq += 1;
        let digest = digest(body);
        let seq = self.seq.to_le_bytes();
        let code = self.key.code(&Self::request(&seq, method, path, &digest));
        Signature {
            seq: self.seq,
            digest,
            code,
        }
    }

    /// Whether a request is the client's next one. Its body is to have the signature's digest.
    pub fn admits(&mut self, method: &str, path: &str, signature: &Signature) -> bool {
        let seq = signature.seq.to_le_bytes();
        let parts = Self::request(&seq, method, path, &signature.digest);
        let next = signature.seq == self.seq + 1 && self.key.fits(&parts, &signature.code);
        if next {
            self.seq = signature.seq;
        }
        next
    }

    /// The code of the answer to the request that came last.
    #[must_use]
    pub fn sign_answer(&self, status: u16, body: &[u8]) -> String {
        let (seq, status) = (self.seq.to_le_bytes(), status.to_le_bytes());
        self.key
            .code(&[b"answer", &seq, &status, digest(body).as_bytes()])
    }

    /// Whether an answer is the hook's to the request that was signed last.
    #[must_use]
    pub fn is_answer(&self, status: u16, body: &[u8], code: &str) -> bool {
        let (seq, status) = (self.seq.to_le_bytes(), status.to_le_bytes());
        self.key
            .fits(&[b"answer", &seq, &status, digest(body).as_bytes()], code)
    }
}

impl Signature {
    /// As it stands in the `Authorization` field, after the scheme.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let mut words = text.split(' ');
        let mut next = |name: &str| words.next()?.strip_prefix(name)?.strip_prefix('=');
        let signature = Self {
            seq: next("seq")?.parse().ok()?,
            digest: next("digest")?.to_owned(),
            code: next("code")?.to_owned(),
        };
        (is_nonce(&signature.digest) && is_nonce(&signature.code)).then_some(signature)
    }
}

impl std::fmt::Display for Signature {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "seq={} digest={} code={}",
            self.seq, self.digest, self.code
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id() -> HookId {
        HookId {
            cluster: "c".into(),
            epoch: 3,
            nonce: "n".into(),
        }
    }

    fn sides(token: &str) -> (Session, Session) {
        let secret = Secret::new(token);
        let own = nonce().unwrap();
        let (challenge, hook) = secret.answer(&own, &id()).unwrap();
        (secret.accept(&own, &challenge).unwrap(), hook)
    }

    #[test]
    fn codes_are_those_of_rfc_4231() {
        // Its second test case, over one part, which we would have preceded by its length.
        let mut mac = Hmac::<Sha256>::new_from_slice(b"Jefe").unwrap();
        mac.update(b"what do ya want for nothing?");
        assert_eq!(
            hex(&mac.finalize().into_bytes()),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"
        );
        assert_eq!(unhex(&hex(&[0xa5; 32])), Some([0xa5; 32]));
    }

    #[test]
    fn who_does_not_know_the_token_is_no_hook() {
        let own = nonce().unwrap();
        let (good, _) = Secret::new("right").answer(&own, &id()).unwrap();
        let asks = Secret::new("right");
        assert!(asks.accept(&own, &good).is_some());
        let (stranger, _) = Secret::new("wrong").answer(&own, &id()).unwrap();
        assert!(asks.accept(&own, &stranger).is_none());
        assert!(
            asks.accept(&nonce().unwrap(), &good).is_none(),
            "an old proof"
        );
        let mut newer = good.clone();
        newer.hook.epoch += 1;
        assert!(asks.accept(&own, &newer).is_none(), "another epoch");
        assert!(asks.accept(&own, &Challenge::default()).is_none());
    }

    #[test]
    fn the_token_of_a_node_is_that_nodes_alone() {
        let hook = Secret::new("right");
        let token = Token::new(&hook.token_of_node("a"));
        assert_eq!(token.node(), Some("a"));
        let own = nonce().unwrap();
        let accepts = |secret: Secret| {
            let (said, _) = secret.answer(&own, &id()).unwrap();
            token.secret().accept(&own, &said).is_some()
        };
        assert!(accepts(hook.of_node("a")));
        assert!(!accepts(hook.of_node("b")));
        assert!(!accepts(hook.clone()), "it is not the hook's own");
        assert!(!accepts(Secret::new("wrong").of_node("a")));
        // What looks like one and is none stands for itself.
        let plain = Token::new("sublet-node:a:12");
        assert_eq!(plain.node(), None);
        assert_eq!(Token::new("right").secret().0, hook.0);
    }

    #[test]
    fn a_request_counts_once_in_its_place_as_it_was_signed() {
        let (mut client, mut hook) = sides("t");
        let first = client.sign("POST", "/v1/jobs", b"body");
        let parsed = Signature::parse(&first.to_string()).unwrap();
        assert_eq!(parsed, first);
        for (method, path) in [("PUT", "/v1/jobs"), ("POST", "/v1/job")] {
            assert!(!hook.admits(method, path, &first));
        }
        let mut altered = first.clone();
        altered.digest = digest(b"another");
        assert!(!hook.admits("POST", "/v1/jobs", &altered));
        let second = client.sign("GET", "/", b"");
        assert!(!hook.admits("GET", "/", &second), "out of turn");
        assert!(hook.admits("POST", "/v1/jobs", &first));
        assert!(!hook.admits("POST", "/v1/jobs", &first), "twice");
        assert!(hook.admits("GET", "/", &second));
        let (_, mut other) = sides("t");
        assert!(!other.admits("POST", "/v1/jobs", &first), "another session");
    }

    #[test]
    fn an_answer_fits_its_own_request_only() {
        let (mut client, mut hook) = sides("t");
        let ask = |client: &mut Session, hook: &mut Session| {
            let signature = client.sign("GET", "/", b"");
            assert!(hook.admits("GET", "/", &signature));
            signature
        };
        let request = ask(&mut client, &mut hook);
        let first = hook.sign_answer(200, b"orders");
        assert!(client.is_answer(200, b"orders", &first));
        assert!(!client.is_answer(200, b"other orders", &first));
        assert!(!client.is_answer(201, b"orders", &first));
        assert!(!client.is_answer(200, b"", &request.code), "sent back");
        ask(&mut client, &mut hook);
        assert!(!client.is_answer(200, b"orders", &first), "an earlier one");
    }

    #[test]
    fn what_is_no_signature_is_none() {
        for bad in [
            "",
            "seq=1",
            "seq=x digest=a code=b",
            "seq=1 digest=00 code=00",
        ] {
            assert!(Signature::parse(bad).is_none(), "{bad}");
        }
    }
}
