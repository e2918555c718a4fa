//! Who may ask over TCP: the file of tokens, and which of them a request shows.
//!
//! Of a token only its SHA-256 is kept, and a token that is shown is compared with all of them in
//! constant time. The file counts as it is now ([`Followed`]): a token that is
//! taken out of it counts no more from the next request on, and ends what follows the journal. A
//! file that is wrong changes nothing; one that others may read, or that is gone, lets nobody in.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::http::{HeaderMap, header};
use certificates::{Followed, Notice, Taken, Wrong};
use jiff::Timestamp;
use parking_lot::Mutex;
use serde::Deserialize;
use sha2::{Digest as _, Sha256};
use subtle::{Choice, ConditionallySelectable as _, ConstantTimeEq as _};

use super::problem::Problem;
use crate::bearer::{Bearer, Role};
use crate::who::Peer;

/// Shortest token in bytes: as many hexadecimal digits are 128 bits.
const SHORTEST: usize = 32;
/// Longest token in bytes.
const LONGEST: usize = 512;
/// Tokens in a file.
const MOST: usize = 1000;
/// Strangers cannot fill the log: a line so often at most.
const LOGGED: Duration = Duration::from_secs(10);

type Hash = [u8; 32];

/// The token that a request has shown.
#[derive(Clone, Copy, Debug)]
pub struct Shown(Hash);

/// See the module's documentation.
pub struct Tokens {
    known: Followed<Vec<Known>>,
    turned_away: Mutex<TurnedAway>,
}

/// Requests without a token that counts, since that was logged.
#[derive(Debug, Default)]
struct TurnedAway {
    count: u64,
    logged: Option<Instant>,
}

impl TurnedAway {
    /// One more; how many they are where that is to be logged.
    fn count(&mut self, now: Instant) -> Option<u64> {
        self.count += 1;
        let is_due = |logged| now.saturating_duration_since(logged) >= LOGGED;
        if !self.logged.is_none_or(is_due) {
            return None;
        }
        self.logged = Some(now);
        Some(std::mem::take(&mut self.count))
    }
}

/// A token of the file.
#[derive(Debug)]
struct Known {
    hash: Hash,
    bearer: Arc<Bearer>,
    expires: Option<Timestamp>,
}

#[derive(Deserialize, Default)]
#[serde(default, deny_unknown_fields)]
struct Sections {
    token: Vec<toml::Spanned<Section>>,
}

/// `[[token]]`
#[derive(Deserialize, Default)]
#[serde(default, deny_unknown_fields)]
struct Section {
    name: String,
    role: Option<String>,
    uid: Option<u32>,
    token: Option<String>,
    sha256: Option<String>,
    expires: Option<toml::value::Datetime>,
}

impl Tokens {
    /// The tokens in a file.
    ///
    /// # Errors
    /// [`Wrong`]
    pub fn open(path: &Path) -> Result<Arc<Self>, Wrong> {
        // Half written, perhaps: then what counted before goes on counting.
        let ends = |wrong: &Wrong| !matches!(wrong, Wrong::Text { .. });
        let tell = |notice: Notice<'_>| super::log("the tokens of the API", notice);
        let paths = vec![path.to_owned()];
        Ok(Arc::new(Self {
            known: Followed::open(paths, read, ends, tell)?,
            turned_away: Mutex::default(),
        }))
    }

    /// Who makes a request, by its head.
    ///
    /// # Errors
    /// It shows no token, or none that counts.
    pub fn identify(&self, head: &HeaderMap, address: IpAddr) -> Result<(Peer, Shown), Problem> {
        let found = shown_in(head).and_then(|token| {
            // Of another length it is none of ours, and is answered as any wrong one.
            let fits = (SHORTEST..=LONGEST).contains(&token.len());
            let hash = fits.then(|| Hash::from(Sha256::digest(token)));
            let (bearer, hash) = self.bearer(hash)?;
            Ok((Peer::remote(bearer), Shown(hash)))
        });
        if found.is_err()
            && let Some(count) = self.turned_away.lock().count(Instant::now())
        {
            tracing::warn!(
                "{count} requests over TCP showed no token that counts, the last of them from {address}"
            );
        }
        found
    }

    /// Whether a token that was shown counts, and for the same.
    ///
    /// # Errors
    /// It does not any more.
    pub fn still_counts(&self, shown: &Shown, peer: &Peer) -> Result<(), Problem> {
        let (bearer, _) = self.bearer(Some(shown.0))?;
        if Peer::remote(bearer) == *peer {
            return Ok(());
        }
        Err(Problem::unauthenticated("the token means something else now").with_hint("ask anew"))
    }

    fn bearer(&self, hash: Option<Hash>) -> Result<(Arc<Bearer>, Hash), Problem> {
        let known = self.known.now().map_err(|why| {
            // The path is nobody's business who has shown nothing.
            tracing::debug!("nobody is let in over TCP: {why}");
            Problem::no_tokens()
        })?;
        let found = hash.and_then(|hash| Some((find(&known, &hash)?, hash)));
        let (found, hash) =
            found.ok_or_else(|| Problem::unauthenticated("the token is none that counts here"))?;
        if let Some(expires) = found.expires
            && now() >= expires
        {
            let text = format!("the token `{}` has expired at {expires}", found.bearer.name);
            return Err(Problem::unauthenticated(text));
        }
        Ok((Arc::clone(&found.bearer), hash))
    }
}

/// The one with this hash; takes as long for each, and for none.
fn find<'a>(known: &'a [Known], hash: &Hash) -> Option<&'a Known> {
    let none = u32::MAX;
    let mut found = none;
    for (at, one) in (0u32..).zip(known) {
        let same: Choice = one.hash.ct_eq(hash);
        found.conditional_assign(&at, same);
    }
    known.get(usize::try_from(found).ok()?)
}

fn now() -> Timestamp {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    let since_s = since.map_or(i64::MAX, |since| {
        i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
    });
    // Without a clock nothing that expires counts.
    Timestamp::from_second(since_s).unwrap_or(Timestamp::MAX)
}

/// What a request shows.
fn shown_in(head: &HeaderMap) -> Result<&[u8], Problem> {
    let mut all = head.get_all(header::AUTHORIZATION).iter();
    let Some(field) = all.next() else {
        return Err(Problem::unauthenticated("no token was shown")
            .with_hint("send it as `Authorization: Bearer TOKEN`"));
    };
    let wrong = || {
        Problem::unauthenticated("`Authorization` shows no token")
            .with_hint("send it once, as `Authorization: Bearer TOKEN`")
    };
    if all.next().is_some() {
        return Err(wrong());
    }
    let (scheme, token) = field.as_bytes().split_at_checked(7).ok_or_else(wrong)?;
    let token = token.trim_ascii();
    if !scheme.eq_ignore_ascii_case(b"bearer ") || token.is_empty() {
        return Err(wrong());
    }
    Ok(token)
}

fn read(paths: &[PathBuf]) -> Taken<Vec<Known>> {
    // PANIC: `open` has named one.
    let [path] = paths else {
        unreachable!("one file");
    };
    let (bytes, stamp) = certificates::read(path, true)?;
    let text = |why: String| Wrong::Text {
        path: path.to_owned(),
        why,
    };
    let all = String::from_utf8(bytes).map_err(|_| text("it is no UTF-8".into()))?;
    let known = parse(&all).map_err(|(at, why)| {
        let before = all.get(..at).unwrap_or_default();
        let line = before.matches('\n').count() + 1;
        text(format!("line {line}: {why}"))
    })?;
    Ok((known, vec![stamp]))
}

/// What a file says; an error is where it lies and what is wrong, without a word of the file that
/// may be a token.
fn parse(text: &str) -> Result<Vec<Known>, (usize, String)> {
    let sections: Sections = toml::from_str(text).map_err(|error| {
        let at = error.span().map_or(0, |span| span.start);
        // The parser's own words have keys and values of the file in them.
        let why = match error.message() {
            why if why.starts_with("unknown field") => {
                "an unknown key: a [[token]] has name, role, uid, token, sha256 and expires"
            }
            why if why.starts_with("invalid type") => "a value of the wrong type",
            _ => "this is no TOML, or a value that is not taken here",
        };
        (at, why.to_owned())
    })?;
    if sections.token.is_empty() {
        return Err((0, "there is no [[token]], so nobody could ask".into()));
    }
    if sections.token.len() > MOST {
        let count = sections.token.len();
        return Err((0, format!("it has {count} tokens, {MOST} are taken")));
    }
    let mut known: Vec<Known> = Vec::new();
    let mut names = BTreeSet::new();
    for section in sections.token {
        let at = section.span().start;
        let one = section.into_inner().check().map_err(|why| (at, why))?;
        if !names.insert(one.bearer.name.clone()) {
            let why = format!("another token has the name `{}`", one.bearer.name);
            return Err((at, why));
        }
        if let Some(same) = find(&known, &one.hash) {
            let why = format!(
                "`{}` and `{}` are the same token",
                same.bearer.name, one.bearer.name
            );
            return Err((at, why));
        }
        known.push(one);
    }
    Ok(known)
}

impl Section {
    fn check(self) -> Result<Known, String> {
        let name = self.name;
        if name.is_empty() {
            return Err("a token needs a `name`".into());
        }
        // It goes into the log, and into answers.
        control::check_name(&name).map_err(|error| error.to_string())?;
        let role = match (self.role.as_deref(), self.uid) {
            (Some("readonly"), None) => Role::ReadOnly,
            (Some("operator"), None) => Role::Operator,
            (None, Some(uid)) => user(&name, uid)?,
            (Some(_), Some(_)) => {
                return Err(format!("`{name}` has a `role` and a `uid`: leave one out"));
            }
            _ => {
                return Err(format!(
                    "`{name}` needs `role = \"readonly\"`, `role = \"operator\"` or `uid = NUMBER`"
                ));
            }
        };
        let hash = match (self.token, self.sha256) {
            (Some(token), None) => of_token(&name, &token)?,
            (None, Some(digits)) => of_digits(&name, &digits)?,
            _ => return Err(format!("`{name}` needs either `token` or `sha256`")),
        };
        let expires = self.expires.map(|at| {
            let at: Result<Timestamp, _> = at.to_string().parse();
            at.map_err(|_| {
                format!("`expires` of `{name}` needs date, time and zone: 2030-01-31T00:00:00Z")
            })
        });
        Ok(Known {
            hash,
            expires: expires.transpose()?,
            bearer: Arc::new(Bearer { name, role }),
        })
    }
}

/// Who governs is said by a word, so that nobody does by accident.
fn user(name: &str, uid: u32) -> Result<Role, String> {
    let ours = rustix::process::geteuid().as_raw();
    if uid == 0 || uid == ours || uid == u32::MAX {
        return Err(format!(
            "`{name}` stands for user {uid}: write `role = \"operator\"` where it is to govern the arbiter"
        ));
    }
    Ok(Role::User(uid))
}

fn of_token(name: &str, token: &str) -> Result<Hash, String> {
    let is_plain = token.bytes().all(|byte| byte.is_ascii_graphic());
    if !(SHORTEST..=LONGEST).contains(&token.len()) || !is_plain {
        return Err(format!(
            "the token `{name}` needs {SHORTEST} to {LONGEST} letters, digits or signs: make one with `openssl rand -hex 32`"
        ));
    }
    Ok(Sha256::digest(token).into())
}

fn of_digits(name: &str, digits: &str) -> Result<Hash, String> {
    let wrong = || format!("`sha256` of `{name}` needs 64 hexadecimal digits");
    let mut hash = [0; 32];
    if digits.len() != 64 || !digits.is_ascii() {
        return Err(wrong());
    }
    for (byte, pair) in hash.iter_mut().zip(digits.as_bytes().chunks(2)) {
        let pair = std::str::from_utf8(pair).map_err(|_| wrong())?;
        // A sign is no digit.
        if !pair.bytes().all(|digit| digit.is_ascii_hexdigit()) {
            return Err(wrong());
        }
        *byte = u8::from_str_radix(pair, 16).map_err(|_| wrong())?;
    }
    Ok(hash)
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: &str = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa";
    const B: &str = "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb";

    fn wrong(text: &str) -> String {
        let (at, why) = parse(text).expect_err(text);
        assert!(at <= text.len());
        why
    }

    #[test]
    fn a_file_says_who_may_do_what() {
        let hash = Sha256::digest(B);
        let digits: String = hash.iter().map(|byte| format!("{byte:02X}")).collect();
        let text = format!(
            "[[token]]\nname = \"a\"\nrole = \"readonly\"\ntoken = \"{A}\"\n\
             [[token]]\nname = \"b\"\nuid = 4321\nsha256 = \"{digits}\"\nexpires = 2030-01-31T00:00:00+02:00\n"
        );
        let known = parse(&text).expect("right");
        let roles: Vec<Role> = known.iter().map(|one| one.bearer.role).collect();
        assert_eq!(roles, [Role::ReadOnly, Role::User(4321)]);
        assert_eq!(
            known[1].expires.map(|at| at.to_string()).as_deref(),
            Some("2030-01-30T22:00:00Z")
        );
        let named = |token: &str| {
            let hash = Sha256::digest(token).into();
            find(&known, &hash).map(|one| one.bearer.name.clone())
        };
        assert_eq!(named(A).as_deref(), Some("a"));
        assert_eq!(named(B).as_deref(), Some("b"));
        assert_eq!(named("c"), None);
    }

    #[test]
    fn what_is_wrong_is_said_without_the_token() {
        let ours = rustix::process::geteuid().as_raw();
        let one = |rest: &str| format!("[[token]]\nname = \"a\"\n{rest}\n");
        for (text, word) in [
            (String::new(), "no [[token]]"),
            ("[[token]]\n".into(), "needs a `name`"),
            (one(&format!("token = \"{A}\"")), "needs `role"),
            (
                one(&format!("role = \"root\"\ntoken = \"{A}\"")),
                "needs `role",
            ),
            (
                one(&format!("role = \"operator\"\nuid = 7\ntoken = \"{A}\"")),
                "leave one out",
            ),
            (one(&format!("uid = 0\ntoken = \"{A}\"")), "operator"),
            (one(&format!("uid = {ours}\ntoken = \"{A}\"")), "operator"),
            (one(&format!("uid = -1\ntoken = \"{A}\"")), "value"),
            (one("role = \"readonly\""), "either `token` or `sha256`"),
            (one("role = \"readonly\"\ntoken = \"hunter2\""), "32 to 512"),
            (
                one("role = \"readonly\"\nsha256 = \"hunter2\""),
                "64 hexadecimal",
            ),
            (
                one(&format!(
                    "role = \"readonly\"\nsha256 = \"+1{}\"",
                    "0".repeat(62)
                )),
                "64 hex",
            ),
            (
                one(&format!(
                    "role = \"readonly\"\ntoken = \"{A}\"\nexpires = 2030-01-31"
                )),
                "expires",
            ),
            (
                one(&format!("role = \"readonly\"\ntoken = \"{A}\"\nexpire = 1")),
                "unknown key",
            ),
            (one("role = \"readonly\"\ntoken = \"hunter2"), "TOML"),
            (one("role = \"readonly\"\ntoken = 123456789"), "wrong type"),
            ("token = \"hunter2\"".into(), "wrong type"),
            ("name = \"../a\"\n[[token]]".into(), "unknown key"),
            (
                one(&format!("role = \"readonly\"\ntoken = \"{A}\"")).repeat(2),
                "another token",
            ),
            (
                [
                    one(&format!("role = \"readonly\"\ntoken = \"{A}\"")),
                    one(&format!("uid = 7\ntoken = \"{A}\"")).replace("\"a\"", "\"b\""),
                ]
                .concat(),
                "the same token",
            ),
        ] {
            let why = wrong(&text);
            assert!(why.contains(word), "{text}: {why}");
            for secret in ["hunter2", "123456789", A] {
                assert!(!why.contains(secret), "{why}");
            }
        }
    }

    #[test]
    fn strangers_have_a_line_of_the_log_now_and_then() {
        let begun = Instant::now();
        let mut away = TurnedAway::default();
        assert_eq!(away.count(begun), Some(1));
        for _ in 0..1000 {
            assert_eq!(away.count(begun + LOGGED / 2), None);
        }
        assert_eq!(away.count(begun + LOGGED), Some(1001));
    }

    #[test]
    fn a_token_of_another_length_is_answered_as_any_wrong_one_whatever_the_file_says_of_it() {
        use std::os::unix::fs::PermissionsExt;
        let hex = |token: &[u8]| -> String {
            let hash = Sha256::digest(token);
            hash.iter().map(|byte| format!("{byte:02x}")).collect()
        };
        let short = &A.as_bytes()[1..];
        let long = [b'x'; LONGEST + 1];
        let place = tempfile::tempdir().expect("a directory");
        let path = place.path().join("tokens");
        let all = [("a", A.as_bytes()), ("short", short), ("long", &long)];
        let text: String = all
            .iter()
            .map(|(name, token)| {
                let digits = hex(token);
                format!(
                    "[[token]]\nname = \"{name}\"\nrole = \"operator\"\nsha256 = \"{digits}\"\n"
                )
            })
            .collect();
        std::fs::write(&path, text).expect("written");
        let mode = std::fs::Permissions::from_mode(0o600);
        std::fs::set_permissions(&path, mode).expect("set");
        let tokens = Tokens::open(&path).expect("right");
        let answer = |token: &[u8]| {
            let mut head = HeaderMap::new();
            let value = [b"Bearer ", token].concat();
            let value = axum::http::HeaderValue::from_bytes(&value).expect("a value");
            head.insert(header::AUTHORIZATION, value);
            let found = tokens.identify(&head, IpAddr::from([10, 0, 0, 1]));
            found.map(drop).map_err(|problem| format!("{problem:?}"))
        };
        assert_eq!(answer(A.as_bytes()), Ok(()));
        let wrong = answer(B.as_bytes()).expect_err("not in the file");
        for token in [short, &long[..], b"x"] {
            assert_eq!(answer(token), Err(wrong.clone()), "{} bytes", token.len());
        }
        // Where nobody can be known, too.
        std::fs::remove_file(&path).expect("removed");
        let wrong = answer(B.as_bytes()).expect_err("no file");
        assert_eq!(answer(short), Err(wrong));
    }

    #[test]
    fn a_head_shows_one_token_or_none() {
        let head = |values: &[&[u8]]| {
            let mut head = HeaderMap::new();
            for value in values {
                let value = axum::http::HeaderValue::from_bytes(value).expect("a value");
                head.append(header::AUTHORIZATION, value);
            }
            shown_in(&head).map(<[u8]>::to_vec).ok()
        };
        assert_eq!(head(&[b"Bearer abc"]), Some(b"abc".to_vec()));
        assert_eq!(head(&[b"bEARER  abc "]), Some(b"abc".to_vec()));
        for value in [&b""[..], b"Bearer", b"Bearer ", b"Basic abc", b"Bearerabc"] {
            assert_eq!(head(&[value]), None, "{value:?}");
        }
        assert_eq!(head(&[]), None);
        assert_eq!(head(&[b"Bearer abc", b"Bearer abc"]), None);
    }

    #[test]
    fn no_mutated_file_gives_more_than_the_right_one() {
        let text = format!("[[token]]\nname = \"a\"\nrole = \"readonly\"\ntoken = \"{A}\"\n");
        for cut in 0..text.len() {
            for known in parse(&text[..cut]).into_iter().flatten() {
                assert_eq!(known.bearer.role, Role::ReadOnly, "{cut}");
            }
            for byte in [b'"', b'\n', b'[', b'=', 0, b'0', 0xc3] {
                let mut bytes = text.clone().into_bytes();
                bytes[cut] = byte;
                let Ok(text) = String::from_utf8(bytes) else {
                    continue;
                };
                for known in parse(&text).into_iter().flatten() {
                    assert_eq!(known.bearer.role, Role::ReadOnly, "{text}");
                }
            }
        }
    }
}
