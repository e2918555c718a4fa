//! The hook over TLS: who gets in, who is believed, and what both ends hear where nobody is.

use std::net::TcpStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::SystemTime;

use certificates::{ClientFiles, Lab, Purpose, Server, ServerFiles, Versions};
use serde_json::{Value, json};

use super::*;
use crate::live::auth::{Secret, Token};
use crate::live::wire::Registration;

const PATIENCE: Duration = Duration::from_secs(60);

/// A hook at `localhost`, an operator and nodes `a` and `b`, by an authority of their own.
struct Place {
    dir: tempfile::TempDir,
    lab: Lab,
}

/// What a hook has said to its operator.
type Notices = Arc<Mutex<Vec<String>>>;

impl Place {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let lab = Lab::open(&dir.path().join("lab"), SystemTime::now()).unwrap();
        let place = Self { dir, lab };
        place.make("hook", &["localhost", "127.0.0.1"], Purpose::Server, 0);
        for who in ["operator", "a", "b"] {
            place.make(who, &[who], Purpose::Client, 0);
        }
        place
    }

    /// In the place of what is there, made so many days ago for thirty days.
    fn make(&self, who: &str, names: &[&str], purpose: Purpose, days: u64) {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let then = SystemTime::now() - Duration::from_secs(days * 86_400);
        self.lab
            .make(who, &names, purpose, (then, 30), true)
            .unwrap();
    }

    fn authority(&self) -> PathBuf {
        self.lab.files("ca").0
    }

    fn server(&self, demands: bool, notices: &Notices) -> Server {
        let (certificate, key) = self.lab.files("hook");
        let files = ServerFiles {
            certificate,
            key,
            clients: demands.then(|| self.authority()),
        };
        let notices = Arc::clone(notices);
        let tell = move |notice: certificates::Notice<'_>| notices.lock().push(notice.to_string());
        Server::open(&files, Versions::Latest, tell).unwrap()
    }

    /// A hook with a state of its own; its address, and what it says.
    fn hook(&self, demands: bool) -> (SocketAddr, Notices) {
        let notices = Notices::default();
        let tls = Some((self.server(demands, &notices), demands));
        let address = self.hook_with(tls, &notices, server::HOUR);
        (address, notices)
    }

    /// With TLS, and certificates of clients where it demands them.
    fn hook_with(
        &self,
        tls: Option<(Server, bool)>,
        notices: &Notices,
        lasts: Duration,
    ) -> SocketAddr {
        let state = tempfile::tempdir_in(self.dir.path()).unwrap().keep();
        let hook = Hook::open(&state, Config::default(), 1000).unwrap();
        let notices = Arc::clone(notices);
        let say = Box::new(move |line: &str| notices.lock().push(line.to_owned()));
        let mut service = Service::new(hook, TOKEN, say);
        service.lasts = lasts;
        if let Some((tls, demands)) = tls {
            let operators = demands.then(|| "operator".to_owned());
            service = service.over(tls, operators.into_iter().collect());
        }
        serve(&Arc::new(service))
    }

    /// A client that believes this place's authority and shows somebody's certificate.
    fn client(&self, address: SocketAddr, who: Option<&str>) -> Client {
        let files = ClientFiles {
            authority: self.authority(),
            own: who.map(|who| self.lab.files(who)),
        };
        client_at(&format!("https://{address}"), &files)
    }
}

fn client_at(url: &str, files: &ClientFiles) -> Client {
    Client::open(url, TOKEN, Some(files), PATIENCE, |_| ()).unwrap()
}

fn status(client: &mut Client) -> Result<Value, ClientError> {
    client.ask("GET", "/v1/status", None::<&()>)
}

fn register(client: &mut Client, path: &str) -> Result<Value, ClientError> {
    let said = Registration {
        api: 1,
        instance: "i".into(),
        ..Registration::default()
    };
    client.ask("PUT", path, Some(&said))
}

/// Waits until the hook has said this.
fn has_noticed(notices: &Notices, part: &str) {
    let end = Instant::now() + PATIENCE;
    while !notices.lock().iter().any(|line| line.contains(part)) {
        assert!(Instant::now() < end, "`{part}` was not said: {notices:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn refused(result: Result<Value, ClientError>) -> String {
    match result.unwrap_err() {
        ClientError::Refused { status: 403, error } => error.message,
        other => panic!("{other}"),
    }
}

#[test]
fn a_certificate_speaks_as_the_node_that_it_names_and_as_no_other() {
    let place = Place::new();
    let (address, notices) = place.hook(true);
    let mut a = place.client(address, Some("a"));
    register(&mut a, "/v1/nodes/a").unwrap();
    let why = refused(register(&mut a, "/v1/nodes/b"));
    assert!(why.contains("is for `a`, and speaks as node `b`"), "{why}");
    // However it is written.
    for path in [
        "/v1/nodes/%62",
        "/v1/nodes/b?x",
        "/v1/nodes/B",
        "/v1/nodes/b/",
    ] {
        refused(register(&mut a, path));
    }
    let report = json!({"instance": "i"});
    refused(a.ask("POST", "/v1/nodes/b/report", Some(&report)));
    // It goes on as itself, and does nothing that operators do.
    a.ask::<_, Value>("POST", "/v1/nodes/a/report", Some(&report))
        .unwrap();
    let job = json!({"command": ["true"]});
    for result in [
        a.ask("POST", "/v1/jobs", Some(&job)),
        a.ask("DELETE", "/v1/nodes/b", None::<&()>),
        a.ask("DELETE", "/v1/jobs/1", None::<&()>),
        status(&mut a),
    ] {
        let why = refused(result);
        assert!(why.contains("is for an operator's (`operator`)"), "{why}");
    }
    has_noticed(&notices, "speaks as node `b`");
    // An operator is no node.
    let mut operator = place.client(address, Some("operator"));
    let seen = status(&mut operator).unwrap();
    assert_eq!(seen["nodes"].as_array().unwrap().len(), 1, "{seen}");
    refused(register(&mut operator, "/v1/nodes/a"));
    let why = refused(register(&mut operator, "/v1/nodes/operator"));
    assert!(why.contains("what an operator is called"), "{why}");
}

#[test]
fn the_token_of_a_node_speaks_as_that_node_and_does_nothing_else() {
    let place = Place::new();
    let address = place.hook_with(None, &Notices::default(), server::HOUR);
    let url = format!("http://{address}");
    let token = Secret::new(TOKEN).token_of_node("a");
    assert_eq!(Token::new(&token).node(), Some("a"));
    let mut a = Client::new(&url, &token, PATIENCE).unwrap();
    register(&mut a, "/v1/nodes/a").unwrap();
    let why = refused(register(&mut a, "/v1/nodes/b"));
    assert!(why.contains("the token is that of node `a`"), "{why}");
    refused(status(&mut a));
    // Its key under another name is nobody's.
    let forged = token.replace(":a:", ":b:");
    let mut b = Client::new(&url, &forged, PATIENCE).unwrap();
    let error = register(&mut b, "/v1/nodes/b").unwrap_err();
    assert!(matches!(error, ClientError::Stranger { .. }), "{error}");
}

#[test]
fn nobody_gets_in_without_a_certificate_and_both_ends_say_why() {
    let (place, other) = (Place::new(), Place::new());
    place.make("a", &["a"], Purpose::Client, 60);
    for (own, heard, said) in [
        (None, "demands a certificate", "no certificate was shown"),
        (
            Some(place.lab.files("a")),
            "has expired",
            "expired 30 days ago",
        ),
        (
            Some(other.lab.files("a")),
            "none of the authorities that it believes",
            "none of the authorities",
        ),
        (
            Some(place.lab.files("hook")),
            "not one for clients",
            "not for this purpose",
        ),
    ] {
        // One each: strangers are spoken of once a minute.
        let (address, notices) = place.hook(true);
        let authority = place.authority();
        let files = ClientFiles { authority, own };
        let mut client = client_at(&format!("https://{address}"), &files);
        let error = status(&mut client).unwrap_err();
        assert!(
            matches!(&error, ClientError::Unreachable { why, .. } if why.contains(heard)),
            "{error}"
        );
        has_noticed(&notices, said);
        // The same hook takes who is believed.
        status(&mut place.client(address, Some("operator"))).unwrap();
    }
}

#[test]
fn a_hook_without_a_certificate_learns_nothing_even_with_the_token() {
    let (place, other) = (Place::new(), Place::new());
    let says = |mut client: Client, part: &str| {
        let error = status(&mut client).unwrap_err();
        assert!(error.is_no_hook(), "{error}");
        assert!(
            matches!(&error, ClientError::Unproven { why, .. } if why.contains(part)),
            "{error}"
        );
    };
    // It knows the token, and is vouched for by somebody else.
    let (forged, _) = other.hook(false);
    says(place.client(forged, None), "none of the authorities");
    // By the right authority, under another name, or for something else.
    place.make("hook", &["elsewhere"], Purpose::Server, 0);
    let (address, _) = place.hook(false);
    says(place.client(address, None), "is for elsewhere, and not for");
    let state = Place::new();
    state.make("hook", &["localhost"], Purpose::Server, 60);
    let (address, _) = state.hook(false);
    let files = ClientFiles {
        authority: state.authority(),
        own: None,
    };
    let old = format!("https://localhost:{}", address.port());
    says(client_at(&old, &files), "expired 30 days ago");
}

#[test]
fn plain_text_and_tls_at_the_wrong_port_are_named_at_both_ends() {
    let place = Place::new();
    let (address, notices) = place.hook(false);
    let mut plain = Client::new(&format!("http://{address}"), TOKEN, PATIENCE).unwrap();
    let error = status(&mut plain).unwrap_err().to_string();
    assert!(error.contains("takes TLS alone: write https://"), "{error}");
    has_noticed(&notices, "takes TLS alone");
    // Neither HTTP nor TLS.
    let said = ask_raw(address, "\0\0\0\0");
    assert!(said.contains("takes TLS alone"), "{said}");

    let other = Place::new();
    let notices = Notices::default();
    let address = other.hook_with(None, &notices, server::HOUR);
    let error = status(&mut other.client(address, None)).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("speaks no TLS: write http://"), "{text}");
    has_noticed(&notices, "it speaks TLS, and this port is plain");
    // An address and files that do not fit each other ask nobody.
    let files = ClientFiles {
        authority: other.authority(),
        own: None,
    };
    let open = |url: &str, files| Client::open(url, TOKEN, files, PATIENCE, |_| ()).unwrap_err();
    let error = open("https://localhost:1", None);
    assert!(matches!(error, ClientError::NoAuthority(_)), "{error}");
    let error = open("http://localhost:1", Some(&files));
    assert!(matches!(error, ClientError::Plain(_)), "{error}");
    let mut bare = Client::new(&format!("https://{address}"), TOKEN, PATIENCE).unwrap();
    let error = status(&mut bare).unwrap_err();
    assert!(matches!(error, ClientError::NoAuthority(_)), "{error}");
}

/// The beginning of a handshake, as a client writes it.
fn hello() -> Vec<u8> {
    let mut bytes = Vec::new();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_root_certificates(rustls::RootCertStore::empty())
        .with_no_client_auth();
    let name = "localhost".try_into().unwrap();
    let mut client = rustls::ClientConnection::new(Arc::new(config), name).unwrap();
    client.write_tls(&mut bytes).unwrap();
    bytes
}

#[test]
fn a_thousand_handshakes_that_never_end_lock_nobody_out() {
    let place = Place::new();
    let (address, _) = place.hook(true);
    // The first client raises no limit: the hook does that as it begins to serve.
    status(&mut place.client(address, Some("operator"))).unwrap();
    let hello = hello();
    let crowd: Vec<TcpStream> = (0..1000)
        .filter_map(|at| {
            let mut stream = TcpStream::connect(address).ok()?;
            let part = match at % 3 {
                0 => &hello[..1],
                1 => &hello[..hello.len() / 2],
                // All of it: the hook has answered and waits.
                _ => &hello[..],
            };
            // It may have given way already.
            let _ = stream.write_all(part);
            Some(stream)
        })
        .collect();
    assert!(crowd.len() > 600, "{}", crowd.len());
    for _ in 0..3 {
        status(&mut place.client(address, Some("operator"))).unwrap();
    }
    // Those that were not displaced end by their deadline.
    for mut stream in crowd {
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut rest = Vec::new();
        match stream.read_to_end(&mut rest) {
            Ok(_) => {}
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::ConnectionReset, "{error}"),
        }
    }
}

#[test]
fn an_answer_that_is_cut_off_counts_for_nothing() {
    let place = Place::new();
    let (address, _) = place.hook(false);
    let middle = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = middle.local_addr().unwrap().port();
    // Bytes from the hook that pass: the first connection is cut within the answer to its request.
    let cut = Arc::new(AtomicUsize::new(usize::MAX));
    let (limit, passed) = (Arc::clone(&cut), Arc::new(AtomicUsize::new(0)));
    let counted = Arc::clone(&passed);
    std::thread::spawn(move || {
        for client in middle.incoming().flatten() {
            let hook = TcpStream::connect(address).unwrap();
            let (mut up, mut from) = (hook.try_clone().unwrap(), client.try_clone().unwrap());
            std::thread::spawn(move || io::copy(&mut from, &mut up));
            let (limit, counted) = (Arc::clone(&limit), Arc::clone(&counted));
            std::thread::spawn(move || {
                let (mut hook, mut client) = (hook, client);
                let mut byte = [0];
                while let Ok(1) = hook.read(&mut byte) {
                    if limit.load(Ordering::SeqCst) == 0 {
                        break;
                    }
                    limit.fetch_sub(1, Ordering::SeqCst);
                    counted.fetch_add(1, Ordering::SeqCst);
                    if client.write_all(&byte).is_err() {
                        break;
                    }
                }
                // No close_notify: as a cable that is cut, or somebody in between.
                let _ = client.shutdown(std::net::Shutdown::Both);
                let _ = hook.shutdown(std::net::Shutdown::Both);
            });
        }
    });
    let files = ClientFiles {
        authority: place.authority(),
        own: None,
    };
    let mut client = client_at(&format!("https://localhost:{port}"), &files);
    client.meet().unwrap();
    let before = passed.load(Ordering::SeqCst);
    status(&mut client).unwrap();
    let whole = passed.load(Ordering::SeqCst) - before;
    // All lengths that are too short: in the record's head, in the answer's, in its body.
    for kept in [0, 3, whole / 2, whole - 1] {
        cut.store(kept, Ordering::SeqCst);
        let error = status(&mut client).unwrap_err();
        assert!(
            matches!(&error, ClientError::Unreachable { why, .. } if why.contains("closed")),
            "{kept} of {whole}: {error}"
        );
        cut.store(usize::MAX, Ordering::SeqCst);
        status(&mut client).unwrap();
    }
}

#[test]
fn certificates_change_under_load_and_no_request_is_lost() {
    let place = Arc::new(Place::new());
    let notices = Notices::default();
    let tls = place.server(true, &notices);
    let address = place.hook_with(Some((tls.clone(), true)), &notices, server::HOUR);
    let ends = Arc::new(AtomicBool::new(false));
    let asked = Arc::new(AtomicUsize::new(0));
    let ask = |anew: bool| {
        let (place, ends, asked) = (Arc::clone(&place), Arc::clone(&ends), Arc::clone(&asked));
        std::thread::spawn(move || {
            let mut client = place.client(address, Some("operator"));
            while !ends.load(Ordering::SeqCst) {
                if anew {
                    client = place.client(address, Some("operator"));
                }
                status(&mut client).unwrap();
                asked.fetch_add(1, Ordering::SeqCst);
            }
        })
    };
    let load = [ask(false), ask(true), ask(true)];
    let certificate = place.lab.files("hook").0;
    for turn in 0..20 {
        if turn % 4 == 3 {
            std::fs::write(&certificate, "half of a certifi").unwrap();
        } else {
            place.make("hook", &["localhost", "127.0.0.1"], Purpose::Server, 0);
        }
        let _ = tls.now();
        let before = asked.load(Ordering::SeqCst);
        let end = Instant::now() + PATIENCE;
        while asked.load(Ordering::SeqCst) < before + 3 {
            assert!(Instant::now() < end, "nobody is answered any more");
            assert!(
                load.iter().all(|one| !one.is_finished()),
                "a request failed"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    ends.store(true, Ordering::SeqCst);
    for one in load {
        testbed::join(one);
    }
    for part in ["new ones", "no certificate in PEM", "stay in force"] {
        has_noticed(&notices, part);
    }
}

#[test]
fn a_hook_that_demands_certificates_serves_nobody_whose_one_it_does_not_know() {
    let place = Place::new();
    let state = tempfile::tempdir().unwrap();
    let hook = Hook::open(state.path(), Config::default(), 1000).unwrap();
    let tls = place.server(true, &Notices::default());
    let service = Service::new(hook, TOKEN, Box::new(|_| ())).over(tls, vec!["operator".into()]);
    let mut who = Shown::default();
    assert!(service.may("GET", "/v1/jobs", &who).is_err());
    assert!(service.may("PUT", "/v1/nodes/a", &who).is_err());
    who.certificate = Some(Vec::new());
    assert!(service.may("GET", "/v1/jobs", &who).is_err());
    who.certificate = Some(vec!["b".into(), "a".into()]);
    assert!(service.may("PUT", "/v1/nodes/a", &who).is_ok());
    // Both say who speaks, and both have to agree.
    who.node = Some("b".into());
    assert!(service.may("PUT", "/v1/nodes/a", &who).is_err());
    assert!(service.may("POST", "/v1/nodes/b/report", &who).is_ok());
}

#[test]
fn old_connections_show_their_certificates_again() {
    // With no time at all each answer is a connection's last one.
    for lasts in [server::HOUR, Duration::ZERO] {
        let (place, other) = (Place::new(), Place::new());
        let notices = Notices::default();
        let tls = place.server(true, &notices);
        let address = place.hook_with(Some((tls.clone(), true)), &notices, lasts);
        let mut client = place.client(address, Some("operator"));
        for _ in 0..3 {
            status(&mut client).unwrap();
        }
        // Nobody believes that authority any more.
        std::fs::copy(other.authority(), place.authority()).unwrap();
        tls.now().unwrap();
        let after = status(&mut client);
        assert!(after.is_err(), "{after:?}");
    }
}

#[test]
fn who_is_revoked_is_let_in_no_more() {
    let place = Place::new();
    let notices = Notices::default();
    let server = place.server(true, &notices);
    server.follow().unwrap();
    let address = place.hook_with(Some((server, true)), &notices, server::HOUR);
    let mut a = place.client(address, Some("a"));
    let mut b = place.client(address, Some("b"));
    for (client, path) in [(&mut a, "/v1/nodes/a"), (&mut b, "/v1/nodes/b")] {
        register(client, path).unwrap();
    }
    place
        .lab
        .revoke(&["a".to_owned()], SystemTime::now())
        .unwrap();
    has_noticed(&notices, "new ones");
    // The connection of before is closed with the next answer, at the latest.
    let end = Instant::now() + PATIENCE;
    let why = loop {
        match register(&mut a, "/v1/nodes/a") {
            Ok(_) => assert!(Instant::now() < end, "it is let in for ever"),
            Err(error) => break error.to_string(),
        }
    };
    assert!(why.contains("it is revoked"), "{why}");
    has_noticed(&notices, "is revoked: its owner needs another one");
    register(&mut b, "/v1/nodes/b").unwrap();
    // Another certificate for the same node is as good as any.
    place.make("a", &["a"], Purpose::Client, 0);
    register(&mut place.client(address, Some("a")), "/v1/nodes/a").unwrap();
}

#[test]
fn a_hook_that_is_revoked_learns_nothing_more() {
    let place = Place::new();
    // Its own files are as they were: who has stolen them looks at no list.
    let (address, _) = place.hook(false);
    let mut client = place.client(address, None);
    status(&mut client).unwrap();
    place
        .lab
        .revoke(&["hook".to_owned()], SystemTime::now())
        .unwrap();
    let error = status(&mut client).unwrap_err();
    assert!(matches!(error, ClientError::Unproven { .. }), "{error:?}");
    assert!(error.to_string().contains("is revoked"), "{error}");
}
