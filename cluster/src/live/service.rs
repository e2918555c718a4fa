//! The hook behind its address: who may ask, which path is what, and the thread that lets time pass.
//!
//! One lock around the hook; every request is carried out, written down and answered in this order. Where the state cannot be
//! written the process ends: what it would say from then on could be forgotten.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use control::{ControlError, ErrorCode};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::hook::Hook;
use super::http::server::{self, Handler, Request, Response, problem};
use super::openapi;
use super::store::{StoreError, random_word};

/// How often the hook looks around.
const TICK: Duration = Duration::from_millis(200);
/// Shortest token that is taken.
const TOKEN_BYTES: usize = 16;

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
    let text = fs::read_to_string(file).map_err(|error| wrong(error.to_string()))?;
    let mode = fs::metadata(file)
        .map_err(|error| wrong(error.to_string()))?
        .mode();
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

/// Milliseconds since 1970.
#[must_use]
pub fn unix_ms() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    now.map_or(0, |now| u64::try_from(now.as_millis()).unwrap_or(u64::MAX))
}

/// The hook with its door.
pub struct Service {
    hook: Mutex<Hook>,
    token: Option<String>,
    failed: Mutex<Option<StoreError>>,
}

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
pub const ROUTES: [Route; 11] = [
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
    /// Around a hook. Without a token everybody who reaches the address may do everything.
    #[must_use]
    pub fn new(hook: Hook, token: Option<String>) -> Self {
        Self {
            hook: Mutex::new(hook),
            token,
            failed: Mutex::new(None),
        }
    }

    /// Carries a request out.
    pub fn answer(&self, request: &Request) -> Response {
        let (path, query) = request.path.split_once('?').unwrap_or((&request.path, ""));
        let mut other_methods = false;
        for route in ROUTES {
            let Some(varies) = matches(route.path, path) else {
                continue;
            };
            if route.method != request.method {
                other_methods = true;
                continue;
            }
            if !route.open && !self.admits(request.token.as_deref()) {
                return problem(
                    401,
                    "the token is missing or wrong: give the hook's own with --token-file",
                );
            }
            return self.dispatch(route, varies, query, request);
        }
        if other_methods {
            return problem(405, &format!("{} is not for {path}", request.method));
        }
        problem(
            404,
            &format!("there is nothing at {path}; see /v1/openapi.json"),
        )
    }

    /// Compared to the end, so that the time tells nothing.
    fn admits(&self, given: Option<&str>) -> bool {
        let Some(own) = &self.token else { return true };
        let given = given.unwrap_or_default();
        let differ = own
            .bytes()
            .zip(given.bytes().chain(std::iter::repeat(0)))
            .fold(0, |all, (a, b)| all | (a ^ b));
        differ == 0 && own.len() == given.len()
    }

    fn dispatch(&self, route: Route, varies: &str, query: &str, request: &Request) -> Response {
        let now = unix_ms();
        let id = || {
            varies.parse::<u64>().map_err(|_| {
                ControlError::new(
                    ErrorCode::NoSuchJob,
                    format!("`{varies}` is no number of a job"),
                )
            })
        };
        match (route.method, route.path) {
            ("GET", "/v1/openapi.json") => Response {
                status: 200,
                body: openapi::DOCUMENT.as_bytes().to_vec(),
            },
            ("GET", "/v1/health") => {
                self.with(200, |hook| Ok(serde_json::json!({"hook": hook.id()})))
            }
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
        // A panic may have left the hook half-changed; nothing may be answered from that.
        let Ok(mut hook) = self.hook.lock() else {
            return problem(503, "the hook has failed; start it again");
        };
        if self.failure().is_some() {
            return problem(503, "the hook cannot write its state; it ends");
        }
        let result = work(&mut hook);
        if let Err(error) = hook.commit() {
            let response = problem(503, &error.to_string());
            *self.failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
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
        self.failed
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .as_ref()
            .map(ToString::to_string)
    }

    /// Let time pass.
    ///
    /// # Errors
    /// The state cannot be written.
    pub fn tick(&self) -> Result<(), StoreError> {
        // A panic under the lock: what is written is good, what is in memory is not.
        let mut hook = self.hook.lock().unwrap_or_else(|_| std::process::abort());
        if let Some(error) = self
            .failed
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
        {
            return Err(error);
        }
        hook.step(unix_ms())
    }

    /// Serve at a bound listener until something fails.
    ///
    /// # Errors
    /// [`ServeError`].
    pub fn serve(self: Arc<Self>, listener: TcpListener) -> Result<(), ServeError> {
        let service = Arc::clone(&self);
        let handler: Handler = Arc::new(move |request| service.answer(&request));
        let accepting = std::thread::Builder::new()
            .name("accept".into())
            .spawn(move || server::serve(&listener, &handler))
            .map_err(ServeError::Accept)?;
        while !accepting.is_finished() {
            self.tick()?;
            std::thread::sleep(TICK);
        }
        let error = accepting
            .join()
            .unwrap_or_else(|_| io::Error::other("its thread panicked"));
        Err(ServeError::Accept(error))
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

    fn service(dir: &Path, token: Option<&str>) -> Service {
        let hook = Hook::open(dir, Config::default(), 1000).unwrap();
        Service::new(hook, token.map(str::to_owned))
    }

    fn ask(
        service: &Service,
        method: &str,
        path: &str,
        token: Option<&str>,
        body: &str,
    ) -> (u16, String) {
        let request = Request {
            method: method.into(),
            path: path.into(),
            token: token.map(str::to_owned),
            body: body.as_bytes().to_vec(),
        };
        let response = service.answer(&request);
        (response.status, String::from_utf8(response.body).unwrap())
    }

    #[test]
    fn without_the_token_only_what_is_open_is_answered() {
        let dir = tempfile::tempdir().unwrap();
        let service = service(dir.path(), Some("0123456789abcdef"));
        for route in ROUTES {
            let path = route.path.replace("{id}", "1").replace("{node}", "a");
            for token in [
                None,
                Some(""),
                Some("0123456789abcde"),
                Some("0123456789abcdef0"),
                Some("0123456789abcdeF"),
            ] {
                let (status, _) = ask(&service, route.method, &path, token, "{}");
                assert_eq!(status == 401, !route.open, "{route:?} {token:?}");
            }
        }
        assert_eq!(
            ask(&service, "GET", "/v1/jobs", Some("0123456789abcdef"), "").0,
            200
        );
    }

    #[test]
    fn what_is_wrong_is_told_with_its_status() {
        let dir = tempfile::tempdir().unwrap();
        let service = service(dir.path(), None);
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
            let (got, text) = ask(&service, method, path, None, body);
            assert_eq!(got, status, "{method} {path}: {text}");
            assert!(text.contains(words), "{method} {path}: {text}");
        }
    }

    #[test]
    fn the_same_word_twice_is_one_job() {
        let dir = tempfile::tempdir().unwrap();
        let service = service(dir.path(), None);
        let body = r#"{"command":["a"],"once":"w"}"#;
        let (first, one) = ask(&service, "POST", "/v1/jobs", None, body);
        let (second, two) = ask(&service, "POST", "/v1/jobs", None, body);
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
