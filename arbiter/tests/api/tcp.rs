//! The API for other hosts: nobody gets in without TLS and a token that counts now, and
//! those who try hold up nobody.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use arbiter::{ApiListener, Arbiter, Options};
use serde_json::Value;
use testbed::http::{Answer, Http};
use testbed::tls::{self, TLS12, TLS13};

use super::{error_of, operations, sensible, take_turn};
use crate::bench::{Daemon, Worker, attach, directory, named, until};

const READER: &str = "rrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrrr";
const OPERATOR: &str = "oooooooooooooooooooooooooooooooooooo";
const EXPIRED: &str = "eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee";
const NEW: &str = "nnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnn";

/// The files that it takes.
struct Files {
    place: tempfile::TempDir,
}

impl Files {
    fn new() -> Self {
        let place = tempfile::tempdir().expect("a directory");
        let files = Self { place };
        tls::write_server(0, &files.certificate(), &files.key());
        files.write(&[
            ("reader", "role = \"readonly\"", READER),
            ("operator", "role = \"operator\"", OPERATOR),
            (
                "expired",
                "expires = 2020-01-01T00:00:00Z\nrole = \"operator\"",
                EXPIRED,
            ),
        ]);
        files
    }

    fn path(&self, name: &str) -> PathBuf {
        self.place.path().join(name)
    }

    fn certificate(&self) -> PathBuf {
        self.path("server.crt")
    }

    fn key(&self) -> PathBuf {
        self.path("server.key")
    }

    fn tokens(&self) -> PathBuf {
        self.path("tokens.toml")
    }

    /// The file of tokens, from here on.
    fn write(&self, tokens: &[(&str, &str, &str)]) {
        let section = |(name, role, token): &(&str, &str, &str)| {
            format!("[[token]]\nname = \"{name}\"\n{role}\ntoken = \"{token}\"\n")
        };
        self.write_text(&tokens.iter().map(section).collect::<String>());
    }

    fn write_text(&self, text: &str) {
        let new = self.path("tokens.new");
        std::fs::write(&new, text).expect("written");
        set_mode(&new, 0o600);
        std::fs::rename(new, self.tokens()).expect("renamed");
    }

    fn listener(&self) -> ApiListener {
        ApiListener {
            address: SocketAddr::from(([127, 0, 0, 1], 0)),
            certificate: self.certificate(),
            key: self.key(),
            tokens: self.tokens(),
        }
    }
}

fn set_mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).expect("set");
}

/// An arbiter that other hosts reach.
struct Open {
    daemon: Daemon,
    address: SocketAddr,
    files: Files,
    _place: tempfile::TempDir,
}

impl Open {
    fn start() -> Self {
        let files = Files::new();
        let listener = files.listener();
        let (place, dir) = directory();
        let daemon = Daemon::start_as(dir, |options| options.api = Some(listener));
        let status = daemon.operator().status().expect("answered");
        Self {
            address: status.api_address.parse().expect("an address"),
            daemon,
            files,
            _place: place,
        }
    }

    fn connect(&self) -> Http<tls::Stream> {
        tls::connect(self.address).expect("connected")
    }

    fn get(&self, token: &str, path: &str) -> Answer {
        let mut http = self.connect().with_token(token);
        http.ask("GET", path, None).expect("answered")
    }

    fn plain(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).expect("connected");
        let patience = Some(crate::bench::PATIENCE);
        stream.set_read_timeout(patience).expect("set");
        stream.set_write_timeout(patience).expect("set");
        stream
    }
}

/// What comes until the other side ends the connection.
fn rest_of(stream: &mut TcpStream) -> Vec<u8> {
    let mut rest = Vec::new();
    match stream.read_to_end(&mut rest) {
        Ok(_) => {}
        Err(error) => assert_eq!(
            error.kind(),
            std::io::ErrorKind::ConnectionReset,
            "it does not end: {error}"
        ),
    }
    rest
}

#[test]
fn nobody_gets_in_without_tls_as_it_is_today() {
    let open = Open::start();
    // Plain HTTP, with a token that counts.
    let mut plain = open.plain();
    let ask =
        format!("GET /v1/jobs HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {OPERATOR}\r\n\r\n");
    plain.write_all(ask.as_bytes()).expect("sent");
    let said = String::from_utf8(rest_of(&mut plain)).expect("text");
    assert!(
        said.starts_with("HTTP/1.1 400 ") && said.contains("https://"),
        "{said}"
    );
    for garbage in [
        &b"\x00"[..],
        b"\x16",
        b"\x16\x03\x01\xff\xff",
        &[0xff; 70_000],
        &[0x16; 70_000],
        b"\x80\x2e\x01\x00\x02",
    ] {
        let mut plain = open.plain();
        // It may hang up in the middle.
        let _ = plain.write_all(garbage);
        let _ = plain.shutdown(std::net::Shutdown::Write);
        let said = rest_of(&mut plain);
        assert!(
            said.is_empty() || said[0] == 21,
            "an alert at most: {said:?}"
        );
    }
    for (versions, protocols) in [
        (&[&TLS12][..], &[&b"http/1.1"[..]][..]),
        (&[&TLS13], &[b"h2"]),
    ] {
        assert!(tls::connect_with(open.address, versions, protocols).is_err());
    }
    // One that says nothing of protocols is served.
    let stream = tls::connect_with(open.address, &[&TLS13], &[]).expect("connected");
    let answer = Http::over(stream)
        .with_token(READER)
        .ask("GET", "/v1/jobs", None);
    assert_eq!(answer.expect("answered").status, 200);
}

#[test]
fn nobody_gets_in_without_a_token_that_counts() {
    let open = Open::start();
    let before = open.daemon.operator().events(0, 0).expect("served").len();
    for (method, path) in operations()
        .iter()
        .map(|(method, path)| (method, path.as_str()))
        .chain([
            (&"GET".to_owned(), "/"),
            (&"GET".to_owned(), "/v1/none"),
            (&"DELETE".to_owned(), "/v1/jobs"),
        ])
    {
        let (path, body) = sensible(method, path);
        let body = body.as_ref().map(Value::to_string);
        for token in [None, Some("x"), Some(&READER[1..]), Some(EXPIRED)] {
            let mut http = open.connect();
            if let Some(token) = token {
                http = http.with_token(token);
            }
            let answer = http.ask(method, &path, body.as_deref()).expect("answered");
            assert_eq!(answer.status, 401, "{method} {path} {token:?}: {answer:?}");
            assert_eq!(error_of(&answer)["code"], "unauthenticated");
            assert_eq!(
                answer.field("www-authenticate"),
                Some("Bearer realm=\"sublet\"")
            );
            let ends = http.line();
            assert!(ends.is_err(), "the connection goes on: {ends:?}");
        }
    }
    let expired = open.get(EXPIRED, "/v1/jobs");
    assert!(
        expired.body.contains("expired at 2020-01-01T00:00:00Z"),
        "{expired:?}"
    );
    // A body is not waited for, nor taken.
    let mut http = open.connect();
    http.send(b"PATCH /v1/jobs/a HTTP/1.1\r\nhost: x\r\ncontent-length: 900000\r\n\r\n")
        .expect("sent");
    assert_eq!(http.head().expect("answered").status, 401);
    let events = open.daemon.operator().events(0, 0).expect("served");
    assert_eq!(events.len(), before, "something was done: {events:?}");
}

/// Asks each operation with a token, and says what came of it. `/v1/shutdown` is the last.
fn ask_each(open: &Open, token: &str) -> Vec<(String, Answer)> {
    let mut all = operations();
    all.sort_by_key(|(_, path)| path == "/v1/shutdown");
    let ask = |(method, path): (String, String)| {
        let (asked, body) = sensible(&method, &path);
        let body = body.as_ref().map(Value::to_string);
        let mut http = open.connect().with_token(token);
        let what = format!("{method} {path}");
        let answer = if path.ends_with("/stream") {
            let ask =
                format!("GET {asked} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\n\r\n");
            http.send(ask.as_bytes()).expect("sent");
            http.head().expect("answered")
        } else {
            http.ask(&method, &asked, body.as_deref())
                .expect("answered")
        };
        (what, answer)
    };
    all.into_iter().map(ask).collect()
}

#[test]
fn a_read_only_token_reads_and_changes_nothing() {
    let open = Open::start();
    let mut operator = open.daemon.operator();
    let mut job = named("a", 0.5);
    job.command = vec!["train".into(), "hunter2".into()];
    job.settings.evictable = Some(true);
    let job = operator.register(job).expect("registered");
    let worker = Worker::start(attach(&job));
    until("it works", || (worker.launches() > 0).then_some(()));
    take_turn(&mut operator);
    let jobs = || {
        let jobs = open.daemon.operator().list().expect("served");
        jobs.into_iter()
            .map(|job| (job.name, job.share_asked, job.paused, job.evicted))
            .collect::<Vec<_>>()
    };
    let before = jobs();
    let mut read = BTreeSet::new();
    for (what, answer) in ask_each(&open, READER) {
        assert!(!answer.body.contains("hunter2"), "{what}: {answer:?}");
        assert!(!answer.body.contains(&job.token), "{what}: {answer:?}");
        if answer.status == 200 {
            read.insert(what);
            continue;
        }
        assert_eq!(answer.status, 403, "{what}: {answer:?}");
        let error = error_of(&answer);
        assert_eq!(error["code"], "permission", "{what}");
        let message = error["message"].as_str().expect("a text");
        assert!(
            message.contains("`reader`") || what == "POST /v1/jobs",
            "{what}: {message}"
        );
    }
    let reads = |(method, path): &(String, String)| method == "GET" && path != "/v1/config";
    let wanted = operations().into_iter().filter(reads);
    let wanted: BTreeSet<_> = wanted
        .map(|(method, path)| format!("{method} {path}"))
        .collect();
    assert_eq!(read, wanted);
    assert_eq!(jobs(), before);
}

#[test]
fn an_operators_token_does_what_the_arbiters_user_may_but_registers_nobody() {
    let open = Open::start();
    let mut operator = open.daemon.operator();
    let mut job = named("a", 0.5);
    job.command = vec!["train".into(), "hunter2".into()];
    job.settings.evictable = Some(true);
    let job = operator.register(job).expect("registered");
    let worker = Worker::start(attach(&job));
    until("it works", || (worker.launches() > 0).then_some(()));
    take_turn(&mut operator);
    drop(operator);
    for (what, answer) in ask_each(&open, OPERATOR) {
        let wanted = match what.as_str() {
            "POST /v1/jobs" => 403,
            "POST /v1/shutdown" => 202,
            // There is no quota file to read again.
            "POST /v1/reload" => 501,
            _ => 200,
        };
        assert_eq!(answer.status, wanted, "{what}: {answer:?}");
        match what.as_str() {
            "POST /v1/jobs" => {
                let error = error_of(&answer);
                assert_eq!(error["code"], "permission");
                assert!(
                    error["hint"]
                        .as_str()
                        .is_some_and(|hint| hint.contains("api.sock"))
                );
            }
            "GET /v1/jobs" => assert!(answer.body.contains("hunter2"), "{answer:?}"),
            _ => {}
        }
    }
    let socket = open.daemon.dir.api_socket();
    until("it ends", || (!socket.exists()).then_some(()));
}

#[test]
fn a_token_counts_as_long_as_it_is_in_the_file() {
    let open = Open::start();
    let mut kept = open.connect().with_token(READER);
    let mut follower = open.connect();
    let ask = format!(
        "GET /v1/events/stream HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {READER}\r\n\r\n"
    );
    follower.send(ask.as_bytes()).expect("sent");
    assert_eq!(follower.head().expect("answered").status, 200);
    assert_eq!(
        kept.ask("GET", "/v1/jobs", None).expect("answered").status,
        200
    );
    assert_eq!(open.get(NEW, "/v1/jobs").status, 401);
    open.files.write(&[("reader", "role = \"readonly\"", NEW)]);
    // On a connection that was let in, too.
    assert_eq!(
        kept.ask("GET", "/v1/jobs", None).expect("answered").status,
        401
    );
    assert_eq!(open.get(READER, "/v1/jobs").status, 401);
    assert_eq!(open.get(OPERATOR, "/v1/jobs").status, 401);
    assert_eq!(open.get(NEW, "/v1/jobs").status, 200);
    // What the journal says from here on is not for the one that follows it.
    open.daemon
        .operator()
        .register(named("b", 0.5))
        .expect("registered");
    let mut heard = String::new();
    while let Ok(line) = follower.line() {
        heard += &line;
    }
    assert!(heard.contains("unauthenticated"), "{heard}");
    assert!(!heard.contains("registered"), "{heard}");
}

#[test]
fn a_role_that_has_changed_ends_what_was_begun_with_the_other() {
    let open = Open::start();
    let mut follower = open.connect();
    let ask = format!(
        "GET /v1/events/stream HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {OPERATOR}\r\n\r\n"
    );
    follower.send(ask.as_bytes()).expect("sent");
    assert_eq!(follower.head().expect("answered").status, 200);
    open.files
        .write(&[("operator", "role = \"readonly\"", OPERATOR)]);
    open.daemon
        .operator()
        .register(named("b", 0.5))
        .expect("registered");
    let mut heard = String::new();
    while let Ok(line) = follower.line() {
        heard += &line;
    }
    assert!(
        heard.contains("something else now") && !heard.contains("registered"),
        "{heard}"
    );
    let mut http = open.connect().with_token(OPERATOR);
    let body = Some("{\"share\": 0.1}");
    assert_eq!(
        http.ask("PATCH", "/v1/jobs/b", body)
            .expect("answered")
            .status,
        403
    );
}

#[test]
fn a_file_of_tokens_that_is_wrong_gives_nothing_away() {
    let open = Open::start();
    assert_eq!(open.get(READER, "/v1/jobs").status, 200);
    // Half of it: what counted goes on counting, and nothing else does.
    open.files.write_text("[[token]]\nname = \"op");
    assert_eq!(open.get(READER, "/v1/jobs").status, 200);
    assert_eq!(open.get(NEW, "/v1/jobs").status, 401);
    // What others can read lets nobody in, whatever is in it.
    open.files
        .write(&[("reader", "role = \"readonly\"", READER)]);
    set_mode(&open.files.tokens(), 0o644);
    let refused = open.get(READER, "/v1/jobs");
    assert_eq!(refused.status, 503, "{refused:?}");
    assert!(!refused.body.contains("tokens.toml"), "{refused:?}");
    set_mode(&open.files.tokens(), 0o600);
    assert_eq!(open.get(READER, "/v1/jobs").status, 200);
    std::fs::remove_file(open.files.tokens()).expect("removed");
    assert_eq!(open.get(READER, "/v1/jobs").status, 503);
    // A link that is turned to another file.
    open.files.write(&[("new", "role = \"readonly\"", NEW)]);
    let data = open.files.path("data");
    std::fs::rename(open.files.tokens(), &data).expect("renamed");
    std::os::unix::fs::symlink(&data, open.files.tokens()).expect("linked");
    assert_eq!(open.get(NEW, "/v1/jobs").status, 200);
    assert_eq!(open.get(READER, "/v1/jobs").status, 401);
}

#[test]
fn a_client_whose_clock_is_years_behind_is_served_with_the_tests_certificates() {
    let open = Open::start();
    // 2020-01-02 and 2120-01-01.
    for at_s in [1_577_923_200, 4_733_510_400] {
        let at = std::time::Duration::from_secs(at_s);
        tls::connect_at(at, open.address).unwrap_or_else(|error| panic!("{at_s}: {error}"));
    }
}

#[test]
fn a_renewed_certificate_needs_no_restart_and_a_wrong_one_changes_nothing() {
    let open = Open::start();
    let shown = || {
        let stream = tls::connect_with(open.address, &[&TLS13], &[]).expect("connected");
        let shown = stream.conn.peer_certificates().expect("a certificate");
        shown[0].to_vec()
    };
    assert_eq!(shown(), tls::certificate(0));
    // Between the two renames they do not fit.
    tls::write_server(1, &open.files.path("other.crt"), &open.files.key());
    assert_eq!(shown(), tls::certificate(0));
    tls::write_server(1, &open.files.certificate(), &open.files.key());
    assert_eq!(shown(), tls::certificate(1));
    for text in [
        "",
        "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
    ] {
        std::fs::write(open.files.certificate(), text).expect("written");
        assert_eq!(shown(), tls::certificate(1));
    }
}

#[test]
fn an_arbiter_does_not_start_with_files_that_keep_nobody_out() {
    type Spoil = fn(&Files);
    let spoils: [(Spoil, &[&str]); 9] = [
        (
            |files| set_mode(&files.tokens(), 0o644),
            &["tokens.toml", "0644", "chmod 600"],
        ),
        (
            |files| set_mode(&files.key(), 0o640),
            &["server.key", "0640", "chmod 600"],
        ),
        (
            |files| set_mode(&files.certificate(), 0o666),
            &["server.crt", "0666", "chmod go-w"],
        ),
        (
            |files| std::fs::remove_file(files.tokens()).expect("removed"),
            &["tokens.toml", "cannot be read"],
        ),
        (
            |files| std::fs::remove_file(files.key()).expect("removed"),
            &["server.key", "cannot be read"],
        ),
        (
            |files| files.write_text(""),
            &["tokens.toml", "no [[token]]"],
        ),
        (
            |files| files.write_text("[[token]]\nname = \"a\"\nrole = \"root\"\n"),
            &["line 1", "`a` needs"],
        ),
        (
            |files| tls::write_server(1, &files.certificate(), &files.path("x")),
            &["do not fit"],
        ),
        (
            |files| std::fs::write(files.certificate(), "x").expect("written"),
            &["no certificate in PEM"],
        ),
    ];
    for (spoil, words) in spoils {
        let files = Files::new();
        spoil(&files);
        let (_place, dir) = directory();
        let socket = dir.api_socket();
        let options = Options {
            host_nvml: false,
            api: Some(files.listener()),
            ..Options::new(dir)
        };
        let error = Arbiter::start(options)
            .err()
            .unwrap_or_else(|| panic!("started: {words:?}"));
        let source = std::error::Error::source(&error).map(ToString::to_string);
        let text = format!("{error}: {}", source.unwrap_or_default());
        assert!(
            words.iter().all(|word| text.contains(word)),
            "{words:?}: {text}"
        );
        assert!(!text.contains(READER), "{text}");
        assert!(!socket.exists(), "it serves something");
    }
    // An address that somebody has.
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("bound");
    let files = Files::new();
    let (_place, dir) = directory();
    let options = Options {
        host_nvml: false,
        api: Some(ApiListener {
            address: taken.local_addr().expect("an address"),
            ..files.listener()
        }),
        ..Options::new(dir)
    };
    let error = Arbiter::start(options).err().expect("refused");
    let source = std::error::Error::source(&error).map(ToString::to_string);
    assert!(
        source.is_some_and(|text| text.contains("127.0.0.1:")),
        "{error}"
    );
}

#[test]
fn slow_strangers_lose_their_connections_and_hold_up_nobody() {
    let open = Open::start();
    // The beginning of a handshake, and no more of it.
    let hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03";
    let mut slow: Vec<TcpStream> = [&b""[..], b"\x16", hello, b"GET / HT"]
        .iter()
        .map(|begun| {
            let mut plain = open.plain();
            plain.write_all(begun).expect("sent");
            plain
        })
        .collect();
    // Those that are through it, and send half a head.
    let mut half: Vec<Http<tls::Stream>> = (0..3).map(|_| open.connect()).collect();
    for http in &mut half {
        http.send(b"GET /v1/jobs HTTP/1.1\r\nauthor").expect("sent");
    }
    for _ in 0..20 {
        assert_eq!(open.get(READER, "/v1/jobs").status, 200);
        assert!(open.daemon.operator().list().expect("served").is_empty());
    }
    for plain in &mut slow {
        rest_of(plain);
    }
    for http in &mut half {
        while http.line().is_ok() {}
    }
    assert_eq!(open.get(READER, "/v1/jobs").status, 200);
}

#[test]
fn many_connections_of_one_address_cost_that_address_the_oldest_of_them() {
    let open = Open::start();
    let many: Vec<TcpStream> = (0..300).map(|_| open.plain()).collect();
    // Of the same address, and the last of all: it is served.
    assert_eq!(open.get(READER, "/v1/jobs").status, 200);
    let ended = |stream: &TcpStream| {
        stream.set_nonblocking(true).expect("set");
        !matches!(stream.peek(&mut [0]), Err(error) if error.kind() == std::io::ErrorKind::WouldBlock)
    };
    until("all but 32 have ended", || {
        let open = many.iter().filter(|stream| !ended(stream)).count();
        (open <= 32).then_some(())
    });
    // Users of this host have places of their own.
    assert!(open.daemon.operator().list().expect("served").is_empty());
    let answer = super::connect(&open.daemon).ask("GET", "/v1/jobs", None);
    assert_eq!(answer.expect("answered").status, 200);
}

#[test]
fn followers_from_other_hosts_take_no_places_of_this_hosts_and_the_reverse() {
    let open = Open::start();
    let ask = |token: &str| {
        format!(
            "GET /v1/events/stream HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\n\r\n"
        )
    };
    // With two tokens, of which one is this very user's: the address has 16 places all the same.
    let remote = || {
        let tokens = [READER, OPERATOR].into_iter().cycle().take(24);
        let heads = tokens.map(|token| {
            let mut http = open.connect();
            http.send(ask(token).as_bytes()).expect("sent");
            (http.head().expect("answered").status, http)
        });
        heads.collect::<Vec<_>>()
    };
    let local = || {
        let heads = (0..24).map(|_| {
            let mut http = super::connect(&open.daemon);
            http.send(b"GET /v1/events/stream HTTP/1.1\r\nhost: x\r\n\r\n")
                .expect("sent");
            (http.head().expect("answered").status, http)
        });
        heads.collect::<Vec<_>>()
    };
    let (remote, local) = (remote(), local());
    let taken = |statuses: Vec<u16>| statuses.iter().filter(|status| **status == 200).count();
    assert_eq!(taken(remote.iter().map(|one| one.0).collect()), 16);
    assert_eq!(taken(local.iter().map(|one| one.0).collect()), 16);
    // Each kept its places while the other came.
    open.daemon
        .operator()
        .register(named("b", 0.5))
        .expect("registered");
    let hears = |line: std::io::Result<String>| line.expect("it goes on").contains("registered");
    for (status, mut http) in remote {
        while status == 200 && !hears(http.line()) {}
    }
    for (status, mut http) in local {
        while status == 200 && !hears(http.line()) {}
    }
}

#[test]
fn an_arbiter_ends_while_others_are_connected() {
    let open = Open::start();
    let mut follower = open.connect();
    let ask = format!(
        "GET /v1/events/stream HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {READER}\r\n\r\n"
    );
    follower.send(ask.as_bytes()).expect("sent");
    assert_eq!(follower.head().expect("answered").status, 200);
    let _plain = open.plain();
    let _idle = open.connect();
    let address = open.address;
    drop(open);
    while follower.line().is_ok() {}
    assert!(TcpStream::connect(address).is_err(), "somebody listens yet");
}
