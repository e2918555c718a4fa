//! Both ends in memory: who believes whom, and what each hears where it does not.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustls::pki_types::{ServerName, UnixTime};
use rustls::time_provider::{DefaultTimeProvider, TimeProvider};
use rustls::{ClientConnection, ServerConnection};

use crate::make::MakeError;
use crate::{Client, ClientFiles, Lab, Notice, Purpose, Server, ServerFiles, Versions, explain};

const DAY: u64 = 86_400;

/// A clock that stands, days from now.
#[derive(Debug)]
struct In(i64);

impl TimeProvider for In {
    fn current_time(&self) -> Option<UnixTime> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).ok()?.as_secs();
        let off = self.0.unsigned_abs() * DAY;
        // An hour more into the past: whole days are counted, and a test takes seconds.
        let then = if self.0 < 0 {
            now - off - 3600
        } else {
            now + off
        };
        Some(UnixTime::since_unix_epoch(Duration::from_secs(then)))
    }
}

/// A lab with a hook at `head`, nodes `a` and `b`.
struct Place {
    dir: tempfile::TempDir,
    lab: Lab,
}

impl Place {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let now = SystemTime::now();
        let lab = Lab::open(&dir.path().join("lab"), now).expect("a lab");
        let make = |who: &str, names: &[&str], purpose| {
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            lab.make(who, &names, purpose, (now, 30), false)
                .expect("a certificate");
        };
        make("hook", &["head", "10.0.0.7"], Purpose::Server);
        make("node-a", &["a"], Purpose::Client);
        make("node-b", &["b"], Purpose::Client);
        Self { dir, lab }
    }

    fn at(&self, file: &str) -> PathBuf {
        self.dir.path().join("lab").join(file)
    }

    fn server_files(&self, who: &str, demands: bool) -> ServerFiles {
        ServerFiles {
            certificate: self.at(&format!("{who}.crt")),
            key: self.at(&format!("{who}.key")),
            clients: demands.then(|| self.at("ca.crt")),
        }
    }

    fn client_files(&self, who: Option<&str>) -> ClientFiles {
        ClientFiles {
            authority: self.at("ca.crt"),
            own: who.map(|who| {
                (
                    self.at(&format!("{who}.crt")),
                    self.at(&format!("{who}.key")),
                )
            }),
        }
    }
}

fn server(files: &ServerFiles, days: i64) -> Server {
    Server::open_by(clock(days), files, Versions::Latest, |_| ()).expect("a server")
}

fn client(files: &ClientFiles, days: i64) -> Client {
    Client::open_by(clock(days), files, |_| ()).expect("a client")
}

fn clock(days: i64) -> Arc<dyn TimeProvider> {
    match days {
        0 => Arc::new(DefaultTimeProvider),
        days => Arc::new(In(days)),
    }
}

/// What came of a handshake.
#[derive(Debug)]
struct Shaken {
    server: Result<Vec<String>, String>,
    client: Result<(), String>,
}

fn shake(server: &Server, client: &Client, name: &str) -> Shaken {
    let name = ServerName::try_from(name.to_owned()).expect("a name");
    let mut here = ClientConnection::new(client.now().expect("read"), name).expect("a client");
    let mut there = ServerConnection::new(server.now().expect("read")).expect("a server");
    let mut shaken = Shaken {
        server: Ok(Vec::new()),
        client: Ok(()),
    };
    let words = |error: rustls::Error| explain(&error).expect("one of TLS");
    // Each hears what the other has to say, the last word included.
    for _ in 0..8 {
        let mut bytes = Vec::new();
        while here.wants_write() {
            here.write_tls(&mut bytes).expect("memory");
        }
        let mut rest = bytes.as_slice();
        while !rest.is_empty() && shaken.server.is_ok() {
            there.read_tls(&mut rest).expect("memory");
            if let Err(error) = there.process_new_packets() {
                shaken.server = Err(words(error));
            }
        }
        let mut bytes = Vec::new();
        while there.wants_write() {
            there.write_tls(&mut bytes).expect("memory");
        }
        let mut rest = bytes.as_slice();
        while !rest.is_empty() && shaken.client.is_ok() {
            here.read_tls(&mut rest).expect("memory");
            if let Err(error) = here.process_new_packets() {
                shaken.client = Err(words(error));
            }
        }
    }
    let is_done = !here.is_handshaking() && !there.is_handshaking();
    assert!(is_done || shaken.client.is_err() || shaken.server.is_err());
    if let (Ok(names), Some(chain)) = (&mut shaken.server, there.peer_certificates()) {
        *names = crate::names(&chain[0]);
    }
    shaken
}

impl Shaken {
    fn both(self) -> Vec<String> {
        self.client.expect("the client believes");
        self.server.expect("the server believes")
    }

    /// The client does not believe the server.
    fn client_says(&self, part: &str) {
        let said = self.client.as_ref().expect_err("not believed");
        assert!(said.contains(part), "{said}");
        self.server.as_ref().expect_err("it hears of it");
    }

    /// The server does not believe the client, which hears why.
    fn server_says(&self, part: &str, heard: &str) {
        let said = self.server.as_ref().expect_err("not believed");
        assert!(said.contains(part), "{said}");
        let said = self.client.as_ref().expect_err("it hears of it");
        assert!(said.contains(heard), "{said}");
    }
}

#[test]
fn who_is_vouched_for_is_believed_by_name_and_by_address() {
    let place = Place::new();
    let hook = server(&place.server_files("hook", true), 0);
    let node = client(&place.client_files(Some("node-a")), 0);
    assert_eq!(shake(&hook, &node, "head").both(), ["a"]);
    assert_eq!(shake(&hook, &node, "10.0.0.7").both(), ["a"]);
    let open = server(&place.server_files("hook", false), 0);
    let anybody = client(&place.client_files(None), 0);
    assert_eq!(shake(&open, &anybody, "head").both(), [""; 0]);
    // Nobody is asked there, and nobody shows anything.
    assert_eq!(shake(&open, &node, "head").both(), [""; 0]);
}

#[test]
fn a_hook_of_another_name_or_authority_is_not_believed() {
    let (place, other) = (Place::new(), Place::new());
    let hook = server(&place.server_files("hook", false), 0);
    let node = client(&place.client_files(None), 0);
    let shaken = shake(&hook, &node, "other");
    shaken.client_says("is for head, 10.0.0.7, and not for other");
    let forged = server(&other.server_files("hook", false), 0);
    shake(&forged, &node, "head").client_says("none of the authorities");
    // A node's certificate does not make it a hook, whatever it is called.
    place
        .lab
        .make(
            "node-head",
            &["head".into()],
            Purpose::Client,
            (SystemTime::now(), 30),
            false,
        )
        .expect("a certificate");
    let posing = server(&place.server_files("node-head", false), 0);
    shake(&posing, &node, "head").client_says("not for this purpose");
}

#[test]
fn a_client_without_a_certificate_that_is_believed_hears_why() {
    let (place, other) = (Place::new(), Place::new());
    let hook = server(&place.server_files("hook", true), 0);
    let nobody = client(&place.client_files(None), 0);
    shake(&hook, &nobody, "head").server_says("no certificate was shown", "demands a certificate");
    let mut files = place.client_files(None);
    files.own = other.client_files(Some("node-a")).own;
    let stranger = client(&files, 0);
    shake(&hook, &stranger, "head").server_says(
        "none of the authorities",
        "none of the authorities that it believes",
    );
    // The hook's own certificate is not a client's.
    let posing = client(&place.client_files(Some("hook")), 0);
    shake(&hook, &posing, "head").server_says("not for this purpose", "not one for clients");
}

#[test]
fn clocks_that_step_change_who_is_believed_in_new_handshakes() {
    let place = Place::new();
    let (hook, demands) = (
        place.server_files("hook", false),
        place.server_files("hook", true),
    );
    let (nobody, node) = (place.client_files(None), place.client_files(Some("node-a")));
    // The client's clock.
    let shaken = shake(&server(&hook, 0), &client(&nobody, 40), "head");
    shaken.client_says("expired 10 days ago by this host's clock");
    let shaken = shake(&server(&hook, 0), &client(&nobody, -40), "head");
    shaken.client_says("valid only in 39 days by this host's clock");
    // The server's.
    let shaken = shake(&server(&demands, 40), &client(&node, 0), "head");
    shaken.server_says("expired 10 days ago", "by its clock that has expired");
    let shaken = shake(&server(&demands, -40), &client(&node, 0), "head");
    shaken.server_says("valid only in 39 days", "by its clock that has expired");
    // Both an hour off, or far from those who made them but not from each other's: within a day
    // before they are made, and until they end.
    for days in [0, 29] {
        let shaken = shake(&server(&demands, days), &client(&node, days), "head");
        assert_eq!(shaken.both(), ["a"]);
    }
}

#[test]
fn renewed_files_count_and_broken_ones_leave_those_before_in_force() {
    let place = Place::new();
    let notices = Arc::new(parking_lot::Mutex::new(Vec::new()));
    let heard = Arc::clone(&notices);
    let files = place.server_files("hook", false);
    let tell = move |notice: Notice<'_>| heard.lock().push(notice.to_string());
    let hook = Server::open(&files, Versions::Latest, tell).expect("a server");
    let node = client(&place.client_files(None), 0);
    assert_eq!(shake(&hook, &node, "head").both(), [""; 0]);
    let renew = |names: &[&str]| {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let span = (SystemTime::now(), 30);
        place
            .lab
            .make("hook", &names, Purpose::Server, span, true)
            .expect("a certificate");
    };
    renew(&["other"]);
    assert_eq!(shake(&hook, &node, "other").both(), [""; 0]);
    // Half of a certificate, and the key of another one.
    std::fs::write(&files.certificate, "-----BEGIN CERTIFICATE-----\nMII").expect("written");
    assert_eq!(shake(&hook, &node, "other").both(), [""; 0]);
    renew(&["head"]);
    let good = std::fs::read(&files.key).expect("a key");
    std::fs::copy(place.at("node-a.key"), &files.key).expect("copied");
    assert_eq!(
        shake(&hook, &node, "other").both(),
        [""; 0],
        "the one before"
    );
    std::fs::write(&files.key, good).expect("written");
    assert_eq!(shake(&hook, &node, "head").both(), [""; 0]);
    let notices = notices.lock();
    let [renewed, half, misfit, mended] = notices.as_slice() else {
        panic!("{notices:?}");
    };
    assert!(renewed.contains("new ones"), "{renewed}");
    assert!(half.contains("no certificate in PEM"), "{half}");
    assert!(misfit.contains("do not fit"), "{misfit}");
    assert!(mended.contains("as they should be again"), "{mended}");
}

#[test]
fn a_key_that_others_can_read_is_not_taken() {
    use std::os::unix::fs::PermissionsExt;
    let place = Place::new();
    let files = place.server_files("hook", false);
    let set = |path: &Path, mode| {
        std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).expect("set");
    };
    let why = |files: &ServerFiles| match Server::open(files, Versions::Latest, |_| ()) {
        Ok(_) => panic!("taken"),
        Err(error) => error.to_string(),
    };
    set(&files.key, 0o640);
    assert!(why(&files).contains("chmod 600"));
    set(&files.key, 0o600);
    set(&files.certificate, 0o666);
    assert!(why(&files).contains("chmod go-w"));
    set(&files.certificate, 0o644);
    let other = ServerFiles {
        key: place.at("node-a.key"),
        ..files.clone()
    };
    assert!(why(&other).contains("do not fit"));
    let none = ServerFiles {
        clients: Some(place.at("node-a.key")),
        ..files
    };
    assert!(why(&none).contains("node-a.key"));
}

#[test]
fn an_authority_goes_on_from_its_files_and_is_no_other() {
    let place = Place::new();
    let now = SystemTime::now();
    let again = Lab::open(&place.dir.path().join("lab"), now).expect("the same");
    assert!(place.lab.is_new && !again.is_new);
    let names = ["c".to_owned()];
    again
        .make("node-c", &names, Purpose::Client, (now, 30), false)
        .expect("a certificate");
    let hook = server(&place.server_files("hook", true), 0);
    let node = client(&place.client_files(Some("node-c")), 0);
    assert_eq!(shake(&hook, &node, "head").both(), ["c"]);
    // What is there is kept.
    let before = std::fs::read(place.at("node-c.crt")).expect("read");
    let error = again.make("node-c", &names, Purpose::Client, (now, 30), false);
    assert!(
        matches!(error, Err(MakeError::Unwritten { .. })),
        "{error:?}"
    );
    assert_eq!(std::fs::read(place.at("node-c.crt")).expect("read"), before);
    for bad in ["*.lab", "a b", "", "a/b"] {
        let made = again.make("x", &[bad.to_owned()], Purpose::Client, (now, 30), false);
        assert!(
            matches!(made, Err(MakeError::Name { .. })),
            "{bad}: {made:?}"
        );
    }
    // The key of another authority beside the certificate.
    let other = Place::new();
    std::fs::copy(other.at("ca.key"), place.at("ca.key")).expect("copied");
    let error = Lab::open(&place.dir.path().join("lab"), now);
    assert!(matches!(error, Err(MakeError::Foreign { .. })), "{error:?}");
}

#[test]
fn the_files_of_a_lab_are_their_owners() {
    use std::os::unix::fs::MetadataExt;
    let place = Place::new();
    for entry in std::fs::read_dir(place.at("")).expect("a directory") {
        let entry = entry.expect("a file");
        let name = entry.file_name().into_string().expect("text");
        let mode = entry.metadata().expect("known").mode() & 0o777;
        let expected = if name.ends_with(".key") { 0o600 } else { 0o644 };
        assert_eq!(mode, expected, "{name}");
    }
}

/// The list behind the authority's certificate.
fn list_in(place: &Place) -> String {
    let text = std::fs::read_to_string(place.at("ca.crt")).expect("an authority");
    let at = text.find("-----BEGIN X509 CRL").expect("a list");
    text[at..].to_owned()
}

fn add(place: &Place, text: &str) {
    let own = std::fs::read_to_string(place.at("ca.crt")).expect("an authority");
    std::fs::write(place.at("ca.crt"), own + text).expect("written");
}

#[test]
fn who_is_revoked_is_believed_by_nobody_and_its_next_certificate_is() {
    let place = Place::new();
    let hook = server(&place.server_files("hook", true), 0);
    let (a, b) = (
        place.client_files(Some("node-a")),
        place.client_files(Some("node-b")),
    );
    let keep = |who: &str| {
        let (certificate, key) = (
            place.at(&format!("{who}.crt")),
            place.at(&format!("{who}.key")),
        );
        let kept = (place.at("stolen.crt"), place.at("stolen.key"));
        std::fs::copy(certificate, &kept.0).expect("copied");
        std::fs::copy(key, &kept.1).expect("copied");
        kept
    };
    // It was replaced before, and is taken back as well.
    let mut stolen = a.clone();
    stolen.own = Some(keep("node-a"));
    let renew = || {
        let span = (SystemTime::now(), 30);
        let lab = Lab::open(&place.at(""), span.0).expect("the same");
        lab.make("node-a", &["a".into()], Purpose::Client, span, true)
            .expect("a certificate");
    };
    renew();
    assert_eq!(shake(&hook, &client(&stolen, 0), "head").both(), ["a"]);
    let lab = Lab::open(&place.at(""), SystemTime::now()).expect("the same");
    let (counts, _) = lab
        .revoke(&["node-a".into()], SystemTime::now())
        .expect("revoked");
    assert_eq!(counts, [2]);
    for files in [&stolen, &a] {
        let shaken = shake(&hook, &client(files, 0), "head");
        shaken.server_says("is revoked", "it is revoked");
    }
    assert_eq!(shake(&hook, &client(&b, 0), "head").both(), ["b"]);
    renew();
    assert_eq!(shake(&hook, &client(&a, 0), "head").both(), ["a"]);
    let shaken = shake(&hook, &client(&stolen, 0), "head");
    shaken.server_says("is revoked", "it is revoked");
    // The hook, later: the first one stays on the list.
    assert_eq!(
        lab.revoke(&["hook".into()], SystemTime::now())
            .expect("revoked")
            .0,
        [1]
    );
    shake(&hook, &client(&b, 0), "head").client_says("is revoked");
    let all = list_in(&place);
    assert_eq!(all.matches("BEGIN").count(), 1, "one list: {all}");
    let error = lab.revoke(&["node-x".into()], SystemTime::now());
    assert!(matches!(error, Err(MakeError::Nobody { .. })), "{error:?}");
    assert_eq!(list_in(&place), all);
}

#[test]
fn a_list_that_its_authority_has_not_signed_is_not_taken() {
    let (place, other) = (Place::new(), Place::new());
    let now = SystemTime::now();
    let why = |place: &Place| {
        let files = place.server_files("hook", true);
        let server = Server::open(&files, Versions::Latest, |_| ()).map(drop);
        let client = Client::open(&place.client_files(None), |_| ()).map(drop);
        let why = server.expect_err("not taken").to_string();
        assert_eq!(client.expect_err("not taken").to_string(), why);
        why
    };
    // By another authority of the same name, which every lab's has.
    other.lab.revoke(&["node-a".into()], now).expect("revoked");
    let before = std::fs::read(place.at("ca.crt")).expect("an authority");
    let open = server(&place.server_files("hook", true), 0);
    add(&place, &list_in(&other));
    assert!(
        why(&place).contains("is not signed by the authority"),
        "{}",
        why(&place)
    );
    // What was read before stays in force.
    std::fs::write(place.at("ca.crt"), &before).expect("written");
    let node = client(&place.client_files(Some("node-a")), 0);
    add(&place, &list_in(&other));
    assert_eq!(shake(&open, &node, "head").both(), ["a"]);
    std::fs::write(place.at("ca.crt"), &before).expect("written");
    // A byte of its own.
    place.lab.revoke(&["node-b".into()], now).expect("revoked");
    let good = std::fs::read_to_string(place.at("ca.crt")).expect("text");
    let at = good.rfind("-----END X509 CRL").expect("a list") - 20;
    let changed = if &good[at..=at] == "A" { "B" } else { "A" };
    let bad = format!("{}{changed}{}", &good[..at], &good[at + 1..]);
    std::fs::write(place.at("ca.crt"), bad).expect("written");
    assert!(
        why(&place).contains("list of revoked certificates"),
        "{}",
        why(&place)
    );
    let half = good.split_at(good.len() - 60).0;
    std::fs::write(place.at("ca.crt"), half).expect("written");
    assert!(why(&place).contains("ca.crt"), "{}", why(&place));
}

#[test]
fn a_list_whose_time_is_over_lets_nobody_in() {
    let place = Place::new();
    place
        .lab
        .revoke(
            &["node-b".into()],
            SystemTime::now() - Duration::from_secs(3700 * DAY),
        )
        .expect("revoked");
    let hook = server(&place.server_files("hook", true), 0);
    let node = place.client_files(Some("node-a"));
    shake(&hook, &client(&node, 0), "head").client_says("was good until 50 days ago");
    // A client that has not heard of the list is not believed either.
    let bare = place.dir.path().join("bare.crt");
    let text = std::fs::read_to_string(place.at("ca.crt")).expect("text");
    let certificate = text.split("-----BEGIN X509 CRL").next().unwrap_or_default();
    std::fs::write(&bare, certificate).expect("written");
    let files = ClientFiles {
        authority: bare,
        ..node
    };
    shake(&hook, &client(&files, 0), "head")
        .server_says("put a newer one", "none of the authorities");
    // And a newer one does.
    place
        .lab
        .revoke(&["node-b".into()], SystemTime::now())
        .expect("revoked");
    assert_eq!(shake(&hook, &client(&files, 0), "head").both(), ["a"]);
}
