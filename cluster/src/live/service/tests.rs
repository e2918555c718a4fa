mod tls;

use axum::body::{Body, to_bytes};
use tower_service::Service as _;

use super::*;
use crate::live::hook::Config;
use crate::live::http::client::{Client, ClientError};

const TOKEN: &str = "0123456789abcdef";

fn service(dir: &Path) -> Arc<Service> {
    let hook = Hook::open(dir, Config::default(), 1000).unwrap();
    Arc::new(Service::new(hook, TOKEN, Box::new(|_| ())))
}

/// What the routes answer to one who knows the token.
fn ask(service: &Arc<Service>, method: &str, path: &str, body: &str) -> (u16, String) {
    let request = hyper::Request::builder().method(method).uri(path);
    let request = request.body(Body::from(body.to_owned())).unwrap();
    let mut routes = routes::router(Arc::clone(service));
    let runtime = tokio::runtime::Builder::new_current_thread().build();
    runtime.unwrap().block_on(async {
        let answer = routes.call(request).await.unwrap();
        let status = answer.status().as_u16();
        let body = to_bytes(answer.into_body(), usize::MAX).await.unwrap();
        (status, String::from_utf8(body.to_vec()).unwrap())
    })
}

/// At an address of its own, for as long as the test runs.
fn served(dir: &Path) -> SocketAddr {
    serve(&service(dir))
}

fn serve(service: &Arc<Service>) -> SocketAddr {
    let (listener, address) = server::listen("127.0.0.1:0".parse().unwrap()).unwrap();
    let routes = routes::router(Arc::clone(service));
    let site: Arc<dyn Site> = Arc::clone(service) as _;
    std::thread::spawn(move || server::serve(&listener, site, routes));
    address
}

/// What is answered to these bytes, up to the end of the connection.
fn ask_raw(address: SocketAddr, bytes: &str) -> String {
    let mut stream = std::net::TcpStream::connect(address).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(60)))
        .unwrap();
    stream.write_all(bytes.as_bytes()).unwrap();
    let mut text = String::new();
    let _ = stream.read_to_string(&mut text);
    text
}

#[test]
fn without_the_token_only_what_is_open_is_answered() {
    let dir = tempfile::tempdir().unwrap();
    let address = served(dir.path());
    for route in ROUTES.iter().filter(|route| route.path != "/v1/session") {
        let path = route.path.replace("{id}", "1").replace("{node}", "a");
        for field in [
            String::new(),
            format!("Authorization: Bearer {TOKEN}\r\n"),
            format!(
                "Authorization: Sublet seq=1 digest={0} code={0}\r\n",
                "0".repeat(64)
            ),
        ] {
            let method = route.method;
            let text = ask_raw(address, &format!("{method} {path} HTTP/1.1\r\n{field}\r\n"));
            let status = if route.open { "200" } else { "401" };
            assert!(
                text.starts_with(&format!("HTTP/1.1 {status} ")),
                "{route:?}: {text}"
            );
        }
    }
    let url = format!("http://{address}");
    let patience = Duration::from_secs(60);
    let mut right = Client::new(&url, TOKEN, patience).unwrap();
    for _ in 0..3 {
        let jobs: Vec<serde_json::Value> = right.ask("GET", "/v1/jobs", None::<&()>).unwrap();
        assert!(jobs.is_empty());
    }
    let mut wrong = Client::new(&url, "0123456789abcdeF", patience).unwrap();
    let error = wrong
        .ask::<(), serde_json::Value>("GET", "/v1/jobs", None)
        .unwrap_err();
    assert!(matches!(error, ClientError::Stranger { .. }), "{error}");
}

#[test]
fn a_hook_that_a_panic_left_half_changed_answers_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let service = service(dir.path());
    assert_eq!(ask(&service, "GET", "/v1/jobs", "").0, 200);
    let panics = std::panic::AssertUnwindSafe(|| {
        service.with::<()>(200, |_| panic!("a test's panic under the lock"));
    });
    std::panic::catch_unwind(panics).unwrap_err();
    let (status, body) = ask(&service, "GET", "/v1/jobs", "");
    assert!(status == 503 && body.contains("has failed"), "{body}");
}

#[test]
fn a_stranger_s_body_is_not_read() {
    let dir = tempfile::tempdir().unwrap();
    let address = served(dir.path());
    // Answered though the body never comes.
    let text = ask_raw(
        address,
        "POST /v1/jobs HTTP/1.1\r\nContent-Length: 8000000\r\n\r\n",
    );
    assert!(text.starts_with("HTTP/1.1 401 "), "{text}");
    let text = ask_raw(
        address,
        &format!("GET / HTTP/1.1\r\nX: {}", "x".repeat(20 << 10)),
    );
    assert!(
        text.is_empty() || text.starts_with("HTTP/1.1 431 "),
        "{text}"
    );
}

#[test]
fn what_could_be_read_in_two_ways_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let address = served(dir.path());
    let many = "A: b\r\n".repeat(65);
    for (fields, status) in [
        ("Content-Length: 1\r\nContent-Length: 2", "400 "),
        ("Content-Length: +1", "400 "),
        ("Content-Length: -1", "400 "),
        ("Content-Length: 99999999", "413 Content Too Large"),
        ("Transfer-Encoding: chunked", "501 "),
        ("Transfer-Encoding: chunked\r\nContent-Length: 1", "501 "),
        ("Transfer-Encoding: gzip", "400 "),
        ("no field", "400 "),
        (many.as_str(), "431 "),
    ] {
        let text = format!("POST /v1/jobs HTTP/1.1\r\n{fields}\r\n\r\n");
        let answer = ask_raw(address, &text);
        let expected = format!("HTTP/1.1 {status}");
        assert!(answer.starts_with(&expected), "{fields}: {answer}");
    }
    let answer = ask_raw(address, "\x16\x03\x01\x02\x00\r\n\r\n");
    assert!(!answer.contains(" 200 "), "TLS: {answer}");
}

/// A session, by hand.
struct ByHand {
    stream: io::BufReader<std::net::TcpStream>,
    session: crate::live::auth::Session,
}

impl ByHand {
    fn begin(address: SocketAddr) -> Self {
        Self::on(std::net::TcpStream::connect(address).unwrap())
    }

    fn on(stream: std::net::TcpStream) -> Self {
        let patience = Some(Duration::from_secs(60));
        stream.set_read_timeout(patience).unwrap();
        let mut by_hand = Self {
            stream: io::BufReader::new(stream),
            session: crate::live::auth::Session::default(),
        };
        let nonce = crate::live::auth::nonce().unwrap();
        by_hand.write(&format!(
            "GET /v1/session?nonce={nonce} HTTP/1.1\r\nHost: h\r\n\r\n"
        ));
        let (head, body) = by_hand.read();
        assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
        let said = serde_json::from_str(&body).unwrap();
        by_hand.session = Secret::new(TOKEN).accept(&nonce, &said).unwrap();
        by_hand
    }

    fn write(&mut self, text: &str) {
        self.stream.get_mut().write_all(text.as_bytes()).unwrap();
    }

    /// The head of the session's next request.
    fn head(&mut self, method: &str, path: &str, body: &str, length: usize) -> String {
        let signature = self.session.sign(method, path, body.as_bytes());
        format!(
            "{method} {path} HTTP/1.1\r\nAuthorization: Sublet {signature}\r\nContent-Length: {length}\r\n\r\n"
        )
    }

    /// Head and body of an answer.
    fn read(&mut self) -> (String, String) {
        use io::BufRead;
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            let count = self.stream.read_line(&mut head).unwrap();
            assert!(count > 0, "closed after `{head}`");
        }
        let length = head
            .lines()
            .find_map(|line| line.strip_prefix("Content-Length: "));
        let length: usize = length.unwrap_or_else(|| panic!("{head}")).parse().unwrap();
        let mut body = vec![0; length];
        self.stream.read_exact(&mut body).unwrap();
        (head, String::from_utf8(body).unwrap())
    }

    /// The answer, which is the hook's to the last request.
    fn answer(&mut self) -> (String, String) {
        let (head, body) = self.read();
        let field = |name: &str| head.lines().find_map(|line| line.strip_prefix(name));
        let code = field("Sublet-Code: ").unwrap_or_else(|| panic!("{head}"));
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        assert!(self.session.is_answer(status, body.as_bytes(), code));
        assert_eq!(field("Content-Type: "), Some("application/json"));
        assert_eq!(field("Cache-Control: "), Some("no-store"));
        (head, body)
    }

    fn is_closed(&mut self) -> bool {
        let mut rest = Vec::new();
        // An end, or a reset where something was not read.
        let _ = self.stream.read_to_end(&mut rest);
        rest.is_empty()
    }
}

#[test]
fn a_connection_takes_the_next_request_of_its_own_session_and_no_other() {
    let dir = tempfile::tempdir().unwrap();
    let address = served(dir.path());
    let mut one = ByHand::begin(address);
    for _ in 0..2 {
        let head = one.head("GET", "/v1/jobs", "", 0);
        one.write(&head);
        let (head, body) = one.answer();
        assert!(head.contains("Connection: keep-alive\r\n"), "{head}");
        assert_eq!(body, "[]");
    }
    // On another connection, where a session has begun, too.
    let head = one.head("GET", "/v1/jobs", "", 0);
    let mut other = ByHand::begin(address);
    other.write(&head);
    let (answer, body) = other.read();
    assert!(answer.starts_with("HTTP/1.1 401 "), "{answer}");
    assert!(body.contains("who know the hook's token"), "{body}");
    assert!(other.is_closed());
    // In its place once, and not again.
    one.write(&head);
    one.answer();
    one.write(&head);
    let (answer, body) = one.read();
    assert!(answer.starts_with("HTTP/1.1 401 "), "{answer}");
    assert!(body.contains("not the session's next request"), "{body}");
    assert!(!answer.contains("Sublet-Code"), "{answer}");
    assert!(one.is_closed());
}

#[test]
fn bodies_are_bounded_and_taken_as_they_were_signed() {
    let dir = tempfile::tempdir().unwrap();
    let address = served(dir.path());
    let body = r#"{"command":["a"]}"#;
    for (path, sent, length, status, words) in [
        // Refused by its head: nothing of it is waited for.
        ("/v1/jobs", "", SUBMISSION_BYTES + 1, 413, "are taken there"),
        (
            "/v1/jobs",
            r#"{"command":["b"]}"#,
            17,
            400,
            "not the one that was signed",
        ),
        ("/v1/jobs", body, 30, 400, "ends after 17 of 30 bytes"),
        ("/v1/jobs", body, 17, 201, "waiting"),
    ] {
        let mut asks = ByHand::begin(address);
        let head = asks.head("POST", path, body, length);
        asks.write(&(head + sent));
        if status == 400 {
            let write = std::net::Shutdown::Write;
            asks.stream.get_ref().shutdown(write).unwrap();
        }
        let (head, said) = asks.answer();
        assert!(head.starts_with(&format!("HTTP/1.1 {status} ")), "{head}");
        assert!(said.contains(words), "{said}");
    }
}

/// A connection from this address of the host's own.
fn connect_from(ip: [u8; 4], address: SocketAddr) -> std::net::TcpStream {
    use rustix::net::{AddressFamily, SocketType, bind, connect, socket};
    let stream = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    bind(&stream, &SocketAddr::from((ip, 0))).unwrap();
    connect(&stream, &address).unwrap();
    stream.into()
}

#[test]
fn a_crowd_displaces_its_own_and_no_connection_of_another_address() {
    let dir = tempfile::tempdir().unwrap();
    let address = served(dir.path());
    // Once more where this host takes so long that the first connection has no more time.
    let stays = (0..10).any(|_| {
        let mut quiet = ByHand::on(connect_from([127, 0, 0, 2], address));
        let begun = Instant::now();
        let crowd: Vec<std::net::TcpStream> = (0..400)
            .map(|_| connect_from([127, 0, 0, 1], address))
            .collect();
        // The last one comes after all of them.
        let mut last = ByHand::on(connect_from([127, 0, 0, 3], address));
        let head = last.head("GET", "/v1/jobs", "", 0);
        last.write(&head);
        last.answer();
        let open = crowd.iter().filter(|stream| {
            stream.set_nonblocking(true).unwrap();
            let left = stream.peek(&mut [0]).map_err(|error| error.kind());
            left == Err(io::ErrorKind::WouldBlock)
        });
        let open = open.count();
        assert!(open <= 256, "{open} of {} are open", crowd.len());
        if begun.elapsed() > Duration::from_secs(5) {
            return false;
        }
        let head = quiet.head("GET", "/v1/jobs", "", 0);
        quiet.write(&head);
        quiet.answer();
        true
    });
    assert!(stays, "this host takes seconds for a few connections");
}

#[test]
fn newcomers_get_in_while_requests_wait_for_the_hook() {
    let dir = tempfile::tempdir().unwrap();
    let service = service(dir.path());
    let address = serve(&service);
    let waits = service.hook.lock();
    let mut asking = Vec::new();
    for _ in 0..20 {
        let mut one = ByHand::begin(address);
        let head = one.head("GET", "/v1/jobs", "", 0);
        one.write(&head);
        asking.push(one);
    }
    // More than there are threads for them wait, and this is answered.
    let text = ask_raw(address, "GET /v1/health HTTP/1.1\r\n\r\n");
    assert!(text.starts_with("HTTP/1.1 200 "), "{text}");
    let mut last = ByHand::begin(address);
    drop(waits);
    for one in &mut asking {
        assert_eq!(one.answer().1, "[]");
    }
    let head = last.head("GET", "/v1/jobs", "", 0);
    last.write(&head);
    last.answer();
}

#[test]
fn a_kept_connection_that_was_closed_is_sent_nothing_and_made_anew() {
    let dir = tempfile::tempdir().unwrap();
    let address = served(dir.path());
    let middle = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", middle.local_addr().unwrap());
    let (closed, is_closed) = bounded(1);
    let relay = std::thread::spawn(move || {
        let mut chunk = [0; 64 << 10];
        let mut forward = || {
            let (mut asks, _) = middle.accept().unwrap();
            let mut hook = std::net::TcpStream::connect(address).unwrap();
            for _ in 0..2 {
                let count = asks.read(&mut chunk).unwrap();
                hook.write_all(&chunk[..count]).unwrap();
                let count = hook.read(&mut chunk).unwrap();
                asks.write_all(&chunk[..count]).unwrap();
            }
            asks
        };
        let mut first = forward();
        first.shutdown(std::net::Shutdown::Write).unwrap();
        closed.send(()).unwrap();
        forward();
        let mut more = Vec::new();
        let _ = first.read_to_end(&mut more);
        more.len()
    });
    let mut client = Client::new(&url, TOKEN, Duration::from_secs(60)).unwrap();
    let mut jobs = || client.ask::<(), Vec<serde_json::Value>>("GET", "/v1/jobs", None);
    assert_eq!(jobs().unwrap().len(), 0);
    is_closed.recv_timeout(Duration::from_secs(60)).unwrap();
    assert_eq!(jobs().unwrap().len(), 0);
    assert_eq!(relay.join().unwrap(), 0, "sent on the closed connection");
}

#[test]
fn those_who_know_the_token_get_in_past_any_crowd() {
    let dir = tempfile::tempdir().unwrap();
    let address = served(dir.path());
    let crowd: Vec<std::net::TcpStream> = (0..400)
        .filter_map(|at| {
            let mut stream = std::net::TcpStream::connect(address).ok()?;
            if at % 2 == 0 {
                stream
                    .write_all(b"POST /v1/jobs HTTP/1.1\r\nContent-Le")
                    .ok()?;
            }
            Some(stream)
        })
        .collect();
    let patience = Duration::from_secs(60);
    let mut honest = Client::new(&format!("http://{address}"), TOKEN, patience).unwrap();
    for _ in 0..3 {
        let status: serde_json::Value = honest.ask("GET", "/v1/status", None::<&()>).unwrap();
        assert!(status["nodes"].is_array());
    }
    // An admitted connection is not dropped for a pending one.
    let more: Vec<std::net::TcpStream> = (0..300)
        .filter_map(|_| std::net::TcpStream::connect(address).ok())
        .collect();
    let hook = honest.meet().unwrap();
    let _: serde_json::Value = honest.ask("GET", "/v1/status", None::<&()>).unwrap();
    assert_eq!(honest.meet().unwrap(), hook);
    println!(
        "now: {} idle connections, status is answered",
        crowd.len() + more.len()
    );
}

/// An address at which a session with the hook can be had, and its end: two questions and their
/// answers, each of which `pass` may hold up or change.
fn relay(
    hook: SocketAddr,
    pass: impl Fn(usize, String) -> String + Send + 'static,
) -> (String, std::thread::JoinHandle<()>) {
    let middle = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", middle.local_addr().unwrap());
    let relay = std::thread::spawn(move || {
        let (mut asks, _) = middle.accept().unwrap();
        let mut hook = std::net::TcpStream::connect(hook).unwrap();
        let mut chunk = [0; 64 << 10];
        for at in 0..2 {
            let count = asks.read(&mut chunk).unwrap();
            hook.write_all(&chunk[..count]).unwrap();
            let count = hook.read(&mut chunk).unwrap();
            let answer = String::from_utf8(chunk[..count].to_vec()).unwrap();
            asks.write_all(pass(at, answer).as_bytes()).unwrap();
        }
    });
    (url, relay)
}

#[test]
fn a_hook_that_answers_late_is_waited_for_and_a_silent_one_is_not() {
    const CONNECTING: Duration = Duration::from_secs(2);
    let patience = Duration::from_secs(60);
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", silent.local_addr().unwrap());
    let client = Client::new(&url, TOKEN, patience).unwrap();
    let mut client = client.connecting_within(Duration::from_millis(1));
    let error = client
        .ask::<(), serde_json::Value>("GET", "/v1/status", None)
        .unwrap_err();
    let said = "it does not prove within 1 ms that it knows the token";
    assert!(error.to_string().contains(said), "{error}");

    // It proves at once that it knows the token, and then takes longer for the answer than a
    // connection may.
    let dir = tempfile::tempdir().unwrap();
    let address = served(dir.path());
    let (url, relay) = relay(address, |at, answer| {
        if at == 1 {
            std::thread::sleep(CONNECTING + Duration::from_millis(200));
        }
        answer
    });
    let client = Client::new(&url, TOKEN, patience).unwrap();
    let mut client = client.connecting_within(CONNECTING);
    let jobs: Vec<serde_json::Value> = client.ask("GET", "/v1/jobs", None::<&()>).unwrap();
    assert!(jobs.is_empty());
    testbed::join(relay);
}

#[test]
fn an_answer_of_somebody_else_is_not_listened_to() {
    let dir = tempfile::tempdir().unwrap();
    let address = served(dir.path());
    // It forwards what it receives, so that the session is genuine, and alters the answer to
    // the request.
    let (url, relay) = relay(address, |at, answer| match at {
        0 => answer,
        _ => answer.replace("[]", "{}"),
    });
    let mut client = Client::new(&url, TOKEN, Duration::from_secs(60)).unwrap();
    let error = client
        .ask::<(), serde_json::Value>("GET", "/v1/jobs", None)
        .unwrap_err();
    assert!(matches!(error, ClientError::Forged { .. }), "{error}");
    testbed::join(relay);
}

#[test]
fn mistakes_are_answered_with_their_status() {
    let dir = tempfile::tempdir().unwrap();
    let service = service(dir.path());
    for (method, path, body, status, words) in [
        ("GET", "/v2/jobs", "", 404, "openapi"),
        ("PATCH", "/v1/jobs", "", 405, "PATCH"),
        ("POST", "/v1/jobs", "{", 400, "line 1"),
        (
            "POST",
            "/v1/jobs",
            r#"{"command":["a"],"work_s":1e999}"#,
            400,
            "number out of range",
        ),
        ("POST", "/v1/jobs", r#"{"command":[]}"#, 400, "no command"),
        ("GET", "/v1/jobs/7", "", 404, "7"),
        ("GET", "/v1/jobs/x", "", 404, "`x`"),
        ("DELETE", "/v1/nodes/n", "", 404, "`n`"),
        ("POST", "/v1/nodes/n/report", "{}", 404, "unknown_node"),
        ("DELETE", "/v1/nodes/n/pause", "", 404, "`n`"),
        ("PUT", "/v1/nodes/n", "{}", 409, "version 1"),
        ("GET", "/v1/decisions?above=x", "", 400, "above"),
        ("POST", "/v1/decide", "{}", 400, "no candidates"),
        (
            "POST",
            "/v1/decide",
            r#"{"candidates":[{"node":"n","uuid":"u"}],"job":{"share":7}}"#,
            400,
            "share of the job is 7",
        ),
        (
            "POST",
            "/v1/decide",
            r#"{"candidates":[{"node":"n","uuid":"u","total_bytes":9}]}"#,
            200,
            r#""device":"u""#,
        ),
    ] {
        let (got, text) = ask(&service, method, path, body);
        assert_eq!(got, status, "{method} {path}: {text}");
        assert!(text.contains(words), "{method} {path}: {text}");
    }
}

#[test]
fn the_same_word_twice_is_one_job() {
    let dir = tempfile::tempdir().unwrap();
    let service = service(dir.path());
    let body = r#"{"command":["a"],"once":"w"}"#;
    let (first, one) = ask(&service, "POST", "/v1/jobs", body);
    let (second, two) = ask(&service, "POST", "/v1/jobs", body);
    assert_eq!((first, second), (201, 200));
    assert_eq!(one, two);
}

#[test]
fn a_token_that_others_can_read_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("token");
    let token = token_or_new(&file).unwrap();
    assert_eq!((token.len(), token_or_new(&file).unwrap()), (64, token));
    fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
    assert!(
        read_token(&file)
            .unwrap_err()
            .to_string()
            .contains("chmod 600")
    );
    fs::write(&file, "short\n").unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
    assert!(read_token(&file).unwrap_err().to_string().contains("16"));
}

#[test]
fn a_token_is_its_owners_alone_or_roots_for_a_group() {
    for (mode, owner, own, secret) in [
        (0o100600, 7, 7, true),
        (0o100400, 0, 0, true),
        (0o100640, 7, 7, false),
        (0o100440, 0, 0, false),
        (0o100440, 0, 7, true),
        (0o100460, 0, 7, false),
        (0o100444, 0, 7, false),
        (0o100440, 8, 7, false),
    ] {
        assert_eq!(
            is_secret(mode, owner, own),
            secret,
            "{mode:o} {owner} {own}"
        );
    }
}
