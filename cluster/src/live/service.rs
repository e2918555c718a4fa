//! The hook as a service: who may ask, the lock, and the thread that ticks.
//!
//! One lock around the hook; every request is carried out, committed and answered in this order. If
//! the state cannot be written, the process ends: later answers could be forgotten.

#[cfg(test)]
mod tests;

use std::fs::{self, OpenOptions};
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use control::{ControlError, ErrorCode};
use crossbeam_channel::{bounded, select, tick};
use parking_lot::Mutex;
use serde::Serialize;

use super::auth::Secret;
use super::clock::{Clock, Now};
use super::hook::Hook;
use super::http::MAX_BODY_BYTES;
use super::http::server::{self, Response, SESSION, Shown, Site, problem};
use super::openapi;
use super::routes::{self, ROUTES};
use super::store::{StoreError, random_word};
use super::wire::{Health, HookId};

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
    let own = rustix::process::geteuid().as_raw();
    if !is_secret(mode, meta.uid(), own) {
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

/// Whether a file's mode keeps its token from others. One of root's may be read by its group, which
/// is how this user reads it: Kubernetes mounts secrets so.
fn is_secret(mode: u32, owner: u32, own: u32) -> bool {
    let by_group = owner == 0 && own != 0 && mode & 0o037 == 0;
    mode & 0o077 == 0 || by_group
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
    tls: Option<certificates::Server>,
    /// How long a connection with TLS lasts.
    lasts: Duration,
    /// Names of those who may ask for all but what nodes do, in a certificate.
    operators: Vec<String>,
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
            tls: None,
            lasts: server::HOUR,
            operators: Vec::new(),
            failed: Mutex::new(None),
            strangers: Mutex::default(),
            say,
        }
    }

    /// The same, over TLS alone. Where clients have to show certificates, there are names of
    /// operators, and each speaks as the node that its own names, or for an operator.
    #[must_use]
    pub fn over(mut self, tls: certificates::Server, operators: Vec<String>) -> Self {
        (self.tls, self.operators) = (Some(tls), operators);
        self
    }

    /// What time it is.
    pub(super) fn now(&self) -> Now {
        self.clock.now()
    }

    /// Which hook answers.
    pub(super) fn health(&self) -> Response {
        let health = Health {
            hook: self.id.clone(),
        };
        answer(200, &health)
    }

    /// Under the lock; the answer is only made once everything is written.
    pub(super) fn with<T: Serialize>(
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
            Ok(value) => answer(status, &value),
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
        // Made before anybody waits for it.
        LazyLock::force(&openapi::DOCUMENT);
        let site: Arc<dyn Site> = Arc::clone(&self) as _;
        let routes = routes::router(Arc::clone(&self));
        let (ended, accepting) = bounded(1);
        std::thread::Builder::new()
            .name("accept".into())
            .spawn(move || drop(ended.send(server::serve(&listener, site, routes))))
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
    fn proof(&self) -> Option<(&Secret, &HookId)> {
        Some((&self.secret, &self.id))
    }

    fn is_open(&self, method: &str, path: &str) -> bool {
        // A session begins where connections are.
        let is = |route: &routes::Route| route.open && route.method == method && route.path == path;
        path != SESSION && ROUTES.iter().any(is)
    }

    fn body_limit(&self, method: &str, path: &str) -> usize {
        match (method, path) {
            ("POST", "/v1/jobs") => SUBMISSION_BYTES,
            ("POST", _) => MAX_BODY_BYTES,
            ("PUT", _) => SUBMISSION_BYTES,
            _ => 0,
        }
    }

    fn tls(&self) -> Option<&certificates::Server> {
        self.tls.as_ref()
    }

    fn lasts(&self) -> Duration {
        self.lasts
    }

    fn may(&self, method: &str, path: &str, who: &Shown) -> Result<(), String> {
        let node = speaker(method, path);
        let asked = || format!("{method} {path}");
        if let Some(own) = &who.node
            && node != Some(own)
        {
            return Err(format!(
                "the token is that of node `{own}`, which may report as that node and nothing else: {} is not for it",
                asked()
            ));
        }
        let Some(names) = &who.certificate else {
            return match self.operators.as_slice() {
                [] => Ok(()),
                _ => Err("no certificate was shown".into()),
            };
        };
        let shown = || match names.as_slice() {
            [] => "no name".to_owned(),
            names => format!("`{}`", names.join("`, `")),
        };
        match node {
            Some(node) if self.operators.iter().any(|name| name == node) => Err(format!(
                "`{node}` is what an operator is called here: call the node something else, or give the hook another --operator"
            )),
            Some(node) if !names.iter().any(|name| name == node) => Err(format!(
                "the certificate is for {}, and speaks as node `{node}`",
                shown()
            )),
            None if !names.iter().any(|name| self.operators.contains(name)) => Err(format!(
                "the certificate is for {}, and {} is for an operator's (`{}`)",
                shown(),
                asked(),
                self.operators.join("`, `")
            )),
            _ => Ok(()),
        }
    }

    fn turned_away(&self, from: IpAddr, why: Option<&str>) {
        let mut strangers = self.strangers.lock();
        strangers.since_said += 1;
        if strangers.said.is_none_or(|at| at.elapsed() > SAY_AGAIN) {
            let count = std::mem::take(&mut strangers.since_said);
            strangers.said = Some(Instant::now());
            drop(strangers);
            let said = match why {
                Some(why) => format!(
                    "connections or requests were turned away: {count}, the last one from {from}: {why}"
                ),
                None => format!(
                    "requests of somebody who does not know the token were turned away: {count}, the last one from {from}"
                ),
            };
            (self.say)(&said);
        }
    }
}

/// As which node a request speaks. Whatever else the router may take a path for, it is an
/// operator's.
fn speaker<'a>(method: &str, path: &'a str) -> Option<&'a str> {
    let path = path.split('?').next().unwrap_or_default();
    let rest = path.strip_prefix("/v1/nodes/")?;
    match method {
        "PUT" => Some(rest),
        "POST" => rest.strip_suffix("/report"),
        _ => None,
    }
}

fn answer<T: Serialize>(status: u16, value: &T) -> Response {
    match serde_json::to_vec(value) {
        Ok(body) => Response { status, body },
        Err(error) => problem(500, &format!("the answer cannot be written: {error}")),
    }
}

/// A refusal as an answer.
pub(super) fn refusal(error: &ControlError) -> Response {
    let status = match &error.code {
        ErrorCode::NoSuchJob | ErrorCode::NoSuchDevice | ErrorCode::NoSuchGroup => 404,
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
