//! The hook as a service: who may ask, the routes, and the thread that ticks.
//!
//! One lock around the hook; every request is carried out, committed and answered in this order. If
//! the state cannot be written, the process ends: later answers could be forgotten.

use std::fs::{self, OpenOptions};
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use control::{ControlError, ErrorCode};
use crossbeam_channel::{bounded, select, tick};
use parking_lot::Mutex;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::auth::Secret;
use super::clock::Clock;
use super::hook::Hook;
use super::http::MAX_BODY_BYTES;
use super::http::server::{self, Request, Response, Site, problem};
use super::openapi;
use super::store::{StoreError, random_word};
use super::wire::HookId;

/// How often the hook looks around.
const TICK: Duration = Duration::from_millis(200);
/// Shortest token that is taken.
const TOKEN_BYTES: usize = 16;
/// Longest body of a submission or a registration: words and variables of a job are 256 KiB at
/// most.
const SUBMISSION_BYTES: usize = 2 << 20;

/// Why the hook has ended, or does not start.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The address cannot be listened at.
    #[error("cannot listen at {address}: {error}")]
    Listen {
        /// Which.
        address: SocketAddr,
        /// Why.
        error: io::Error,
    },
    /// The token file is of no use.
    #[error("the token file {file}: {why}")]
    Token {
        /// Which.
        file: String,
        /// Why.
        why: String,
    },
    /// The state cannot be written.
    #[error("{0}; the hook ends, and goes on from what is written once it is started again")]
    Store(#[from] StoreError),
    /// The listener broke.
    #[error("the listener failed: {0}")]
    Accept(io::Error),
}

/// The token in a file: its first line.
///
/// # Errors
/// It cannot be read, others can read it, or it is too short to keep anybody out.
pub fn read_token(file: &Path) -> Result<String, ServeError> {
    let wrong = |why: String| ServeError::Token {
        file: file.display().to_string(),
        why,
    };
    // One descriptor: what is checked is what is read.
    let open = fs::File::open(file).map_err(|error| wrong(error.to_string()))?;
    let meta = open.metadata().map_err(|error| wrong(error.to_string()))?;
    let mode = meta.mode();
    if !meta.is_file() {
        return Err(wrong("it is no file".into()));
    }
    let mut text = String::new();
    let read = open.take(4096).read_to_string(&mut text);
    read.map_err(|error| wrong(error.to_string()))?;
    if mode & 0o077 != 0 {
        return Err(wrong(format!(
            "others can read it (mode {:04o}): run `chmod 600` on it",
            mode & 0o7777
        )));
    }
    let token = text.lines().next().unwrap_or_default().trim();
    if token.len() < TOKEN_BYTES || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(wrong(format!(
            "at least {TOKEN_BYTES} letters, digits or signs are expected on its first line"
        )));
    }
    Ok(token.to_owned())
}

/// The token in a file, which is made where it is missing.
///
/// # Errors
/// As [`read_token`], or it cannot be made.
pub fn token_or_new(file: &Path) -> Result<String, ServeError> {
    let wrong = |why: String| ServeError::Token {
        file: file.display().to_string(),
        why,
    };
    match OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(file)
    {
        Ok(mut new) => {
            let mut token = String::new();
            for _ in 0..4 {
                token +=
                    &random_word().map_err(|error| wrong(format!("no random numbers: {error}")))?;
            }
            writeln!(new, "{token}").map_err(|error| wrong(error.to_string()))?;
        }
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(wrong(error.to_string())),
    }
    read_token(file)
}

/// The hook, and whether a change of it was broken off.
struct Guarded {
    hook: Hook,
    /// After a panic for good: nothing may be answered from what is in memory, while what is
    /// written is good.
    changing: bool,
}

impl Guarded {
    /// Changes it; `None` where a panic has left it half-changed.
    fn change<T>(&mut self, work: impl FnOnce(&mut Hook) -> T) -> Option<T> {
        if std::mem::replace(&mut self.changing, true) {
            return None;
        }
        let result = work(&mut self.hook);
        self.changing = false;
        Some(result)
    }
}

/// The hook with its door.
pub struct Service {
    hook: Mutex<Guarded>,
    id: HookId,
    clock: Clock,
    secret: Secret,
    failed: Mutex<Option<StoreError>>,
    /// Whom it has turned away, and when it last said so.
    strangers: Mutex<Strangers>,
    /// Tells what an operator should know; one line each.
    say: Box<dyn Fn(&str) + Send + Sync>,
}

/// Requests of those who do not know the token.
#[derive(Debug, Default)]
struct Strangers {
    since_said: u64,
    said: Option<Instant>,
}

/// Strangers are spoken of once in so long.
const SAY_AGAIN: Duration = Duration::from_secs(60);

impl std::fmt::Debug for Service {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Service")
    }
}

/// One row of the API.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Route {
    /// `GET`, ...
    pub method: &'static str,
    /// With `{name}` for what varies.
    pub path: &'static str,
    /// Asked without a token, too.
    pub open: bool,
}

const fn route(method: &'static str, path: &'static str, open: bool) -> Route {
    Route { method, path, open }
}

/// The whole API.
pub const ROUTES: [Route; 12] = [
    route("GET", "/v1/session", true),
    route("GET", "/v1/openapi.json", true),
    route("GET", "/v1/health", true),
    route("GET", "/v1/status", false),
    route("GET", "/v1/decisions", false),
    route("GET", "/v1/jobs", false),
    route("POST", "/v1/jobs", false),
    route("GET", "/v1/jobs/{id}", false),
    route("DELETE", "/v1/jobs/{id}", false),
    route("PUT", "/v1/nodes/{node}", false),
    route("POST", "/v1/nodes/{node}/report", false),
    route("DELETE", "/v1/nodes/{node}", false),
];

impl Service {
    /// Serves a hook to clients that know the token. `say` gets what an operator should know.
    #[must_use]
    pub fn new(hook: Hook, token: &str, say: Box<dyn Fn(&str) + Send + Sync>) -> Self {
        Self {
            id: hook.id().clone(),
            clock: hook.clock(),
            hook: Mutex::new(Guarded {
                hook,
                changing: false,
            }),
            secret: Secret::new(token),
            failed: Mutex::new(None),
            strangers: Mutex::default(),
            say,
        }
    }

    /// The row of a request, with what varies in its path; or why there is none.
    fn route<'a>(&self, method: &str, path: &'a str) -> Result<(Route, &'a str), Response> {
        let mut other_methods = false;
        for route in ROUTES {
            let Some(varies) = matches(route.path, path) else {
                continue;
            };
            if route.method == method {
                return Ok((route, varies));
            }
            other_methods = true;
        }
        if other_methods {
            return Err(problem(405, &format!("{method} is not for {path}")));
        }
        Err(problem(
            404,
            &format!("there is nothing at {path}; see /v1/openapi.json"),
        ))
    }

    fn dispatch(&self, route: Route, varies: &str, query: &str, request: &Request) -> Response {
        let now = self.clock.now();
        let id = || {
            varies.parse::<u64>().map_err(|_| {
                ControlError::new(
                    ErrorCode::NoSuchJob,
                    format!("`{varies}` is no number of a job"),
                )
            })
        };
        match (route.method, route.path) {
            (_, "/v1/session") => problem(400, "this connection has its session"),
            (_, path) if route.open => self
                .open("GET", path)
                .unwrap_or_else(|| problem(404, "nothing there")),
            ("GET", "/v1/status") => self.with(200, |hook| Ok(hook.status())),
            ("GET", "/v1/decisions") => {
                let above = query
                    .split('&')
                    .find_map(|pair| pair.strip_prefix("above="));
                let above = above.map_or(Ok(0), str::parse::<u64>);
                self.with(200, |hook| match above {
                    Ok(above) => Ok(hook.decisions(above)),
                    Err(_) => Err(ControlError::new(
                        ErrorCode::Invalid,
                        "`above` is no number",
                    )),
                })
            }
            ("GET", "/v1/jobs") => self.with(200, |hook| Ok(hook.job_views())),
            ("POST", "/v1/jobs") => match body(request) {
                Err(error) => refusal(&error),
                Ok(asked) => {
                    let mut new = true;
                    let response = self.with(201, |hook| {
                        let (view, fresh) = hook.submit(asked, now)?;
                        new = fresh;
                        Ok(view)
                    });
                    Response {
                        status: if new || response.status != 201 {
                            response.status
                        } else {
                            200
                        },
                        ..response
                    }
                }
            },
            ("GET", _) => self.with(200, |hook| hook.job(id()?)),
            ("DELETE", "/v1/jobs/{id}") => self.with(200, |hook| hook.cancel(id()?, now)),
            ("PUT", _) => match body(request) {
                Err(error) => refusal(&error),
                Ok(said) => self.with(200, |hook| hook.register(varies, said, now)),
            },
            ("POST", _) => match body(request) {
                Err(error) => refusal(&error),
                Ok(report) => self.with(200, |hook| hook.report(varies, report, now)),
            },
            _ => self.with(200, |hook| {
                hook.forget(varies, now).map(|()| serde_json::json!({}))
            }),
        }
    }

    /// Under the lock; the answer is only made once everything is written.
    fn with<T: Serialize>(
        &self,
        status: u16,
        work: impl FnOnce(&mut Hook) -> Result<T, ControlError>,
    ) -> Response {
        let mut guarded = self.hook.lock();
        if self.failure().is_some() {
            return problem(503, "the hook cannot write its state; it ends");
        }
        let Some((result, written)) = guarded.change(|hook| (work(hook), hook.commit())) else {
            return problem(503, "the hook has failed; start it again");
        };
        if let Err(error) = written {
            let response = problem(503, &error.to_string());
            *self.failed.lock() = Some(error);
            return response;
        }
        match result {
            Ok(value) => match serde_json::to_vec(&value) {
                Ok(body) => Response { status, body },
                Err(error) => problem(500, &format!("the answer cannot be written: {error}")),
            },
            Err(error) => refusal(&error),
        }
    }

    fn failure(&self) -> Option<String> {
        self.failed.lock().as_ref().map(ToString::to_string)
    }

    /// Let time pass.
    ///
    /// # Errors
    /// The state cannot be written.
    pub fn tick(&self) -> Result<(), StoreError> {
        let mut guarded = self.hook.lock();
        if let Some(error) = self.failed.lock().take() {
            return Err(error);
        }
        let now = self.clock.now();
        guarded
            .change(|hook| hook.step(now))
            .unwrap_or_else(|| std::process::abort())
    }

    /// Serve at a bound listener until something fails.
    ///
    /// # Errors
    /// [`ServeError`].
    pub fn serve(self: Arc<Self>, listener: TcpListener) -> Result<(), ServeError> {
        let site: Arc<dyn Site> = Arc::clone(&self) as _;
        let (ended, accepting) = bounded(1);
        std::thread::Builder::new()
            .name("accept".into())
            .spawn(move || drop(ended.send(server::serve(&listener, &site))))
            .map_err(ServeError::Accept)?;
        let ticks = tick(TICK);
        loop {
            self.tick()?;
            select! {
                recv(accepting) -> error => {
                    let error = error.unwrap_or_else(|_| io::Error::other("its thread panicked"));
                    return Err(ServeError::Accept(error));
                }
                recv(ticks) -> _ => {}
            }
        }
    }
}

impl Site for Service {
    fn secret(&self) -> &Secret {
        &self.secret
    }

    fn hook(&self) -> &HookId {
        &self.id
    }

    fn open(&self, method: &str, path: &str) -> Option<Response> {
        let body = match (method, path) {
            ("GET", "/v1/openapi.json") => openapi::DOCUMENT.as_bytes().to_vec(),
            ("GET", "/v1/health") => serde_json::json!({ "hook": self.id })
                .to_string()
                .into_bytes(),
            _ => return None,
        };
        Some(Response { status: 200, body })
    }

    fn body_limit(&self, method: &str, path: &str) -> usize {
        match (method, path) {
            ("POST", "/v1/jobs") => SUBMISSION_BYTES,
            ("POST", _) => MAX_BODY_BYTES,
            ("PUT", _) => SUBMISSION_BYTES,
            _ => 0,
        }
    }

    /// Carries a request out.
    fn answer(&self, request: &Request) -> Response {
        let (path, query) = request.path.split_once('?').unwrap_or((&request.path, ""));
        match self.route(&request.method, path) {
            Ok((route, varies)) => self.dispatch(route, varies, query, request),
            Err(response) => response,
        }
    }

    fn turned_away(&self, from: IpAddr) {
        let mut strangers = self.strangers.lock();
        strangers.since_said += 1;
        if strangers.said.is_none_or(|at| at.elapsed() > SAY_AGAIN) {
            let count = std::mem::take(&mut strangers.since_said);
            strangers.said = Some(Instant::now());
            drop(strangers);
            (self.say)(&format!(
                "requests of somebody who does not know the token were turned away: {count}, the last one from {from}"
            ));
        }
    }
}

/// What stands in `path` for the part of `pattern` that varies; empty where nothing does.
fn matches<'a>(pattern: &str, path: &'a str) -> Option<&'a str> {
    let mut found = "";
    let (mut want, mut have) = (pattern.split('/'), path.split('/'));
    loop {
        match (want.next(), have.next()) {
            (None, None) => return Some(found),
            (Some(want), Some(have)) if want.starts_with('{') && !have.is_empty() => found = have,
            (Some(want), Some(have)) if want == have => {}
            _ => return None,
        }
    }
}

fn body<T: DeserializeOwned>(request: &Request) -> Result<T, ControlError> {
    serde_json::from_slice(&request.body).map_err(|error| {
        ControlError::new(
            ErrorCode::Invalid,
            format!("the body makes no sense: {error}"),
        )
    })
}

fn refusal(error: &ControlError) -> Response {
    let status = match &error.code {
        ErrorCode::NoSuchJob | ErrorCode::NoSuchDevice => 404,
        ErrorCode::Other(code) if code == "unknown_node" => 404,
        ErrorCode::Refused | ErrorCode::VersionMismatch => 409,
        ErrorCode::Permission => 401,
        ErrorCode::Unsupported => 501,
        ErrorCode::Internal => 500,
        _ => 400,
    };
    let body = serde_json::json!({ "error": error })
        .to_string()
        .into_bytes();
    Response { status, body }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::live::hook::Config;
    use crate::live::http::client::{Client, ClientError};

    const TOKEN: &str = "0123456789abcdef";

    fn service(dir: &Path) -> Service {
        let hook = Hook::open(dir, Config::default(), 1000).unwrap();
        Service::new(hook, TOKEN, Box::new(|_| ()))
    }

    fn ask(service: &Service, method: &str, path: &str, body: &str) -> (u16, String) {
        let request = Request {
            method: method.into(),
            path: path.into(),
            body: body.as_bytes().to_vec(),
        };
        let response = service.answer(&request);
        (response.status, String::from_utf8(response.body).unwrap())
    }

    /// At an address of its own, for as long as the test runs.
    fn served(dir: &Path) -> SocketAddr {
        let service = Arc::new(service(dir));
        let (listener, address) = server::listen("127.0.0.1:0".parse().unwrap()).unwrap();
        let site: Arc<dyn Site> = service;
        std::thread::spawn(move || server::serve(&listener, &site));
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

    #[test]
    fn an_answer_of_somebody_else_is_not_listened_to() {
        let dir = tempfile::tempdir().unwrap();
        let address = served(dir.path());
        // It forwards what it receives, so that the session is genuine, and alters the answer to
        // the request.
        let middle = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", middle.local_addr().unwrap());
        let relay = std::thread::spawn(move || {
            let (mut asks, _) = middle.accept().unwrap();
            let mut hook = std::net::TcpStream::connect(address).unwrap();
            let mut chunk = [0; 64 << 10];
            for at in 0..2 {
                let count = asks.read(&mut chunk).unwrap();
                hook.write_all(&chunk[..count]).unwrap();
                let count = hook.read(&mut chunk).unwrap();
                let mut text = String::from_utf8(chunk[..count].to_vec()).unwrap();
                if at == 1 {
                    text = text.replace("[]", "{}");
                }
                asks.write_all(text.as_bytes()).unwrap();
            }
        });
        let mut client = Client::new(&url, TOKEN, Duration::from_secs(60)).unwrap();
        let error = client
            .ask::<(), serde_json::Value>("GET", "/v1/jobs", None)
            .unwrap_err();
        assert!(matches!(error, ClientError::Forged { .. }), "{error}");
        relay.join().unwrap();
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
            ("PUT", "/v1/nodes/n", "{}", 409, "version 1"),
            ("GET", "/v1/decisions?above=x", "", 400, "above"),
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
}
