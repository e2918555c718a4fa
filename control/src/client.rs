//! The blocking client of the arbiter's API: HTTP over its Unix socket, one connection, one request
//! after the other, every wait with a deadline.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::socket::{self, AddressFamily, SockFlag, SockType, UnixAddr, sockopt};
use serde::de::{DeserializeOwned, IgnoredAny};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::config::ConfigReport;
use crate::device::DeviceSettings;
use crate::error::{ControlError, ErrorCode, one_line};
use crate::groups::{Acquire, Acquired, GiveUp, GroupStatus, Yielded};
use crate::http::{Answer, Http, NoAnswer};
use crate::paths::OLDER_SOCKET;
use crate::report::{ArbiterStatus, DeviceStatus, Event, JobStatus, Registered, Reloaded};
use crate::request::{Change, JobSpec};
use crate::residency::{Moved, Moves};
use crate::timeline::Timeline;
use crate::values::DeviceSelector;

/// Names that are longer are nobody's: an answer says so at once, and a head has a bound.
const NAME_BYTES: usize = 1024;
/// Of such a name in an error.
const SHOWN_CHARS: usize = 80;

/// Why the arbiter was not reached, or what it answered. Each message is one line for people and
/// contains the remedy.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error("no arbiter runs at {}: there is no socket", .0.display())]
    NoSocket(PathBuf),
    #[error("nobody listens at {}: its arbiter has ended (start one with `sublet arbiter`)", .0.display())]
    DeadSocket(PathBuf),
    #[error("no access to {} (it belongs to another user's arbiter; set SUBLET_RUNTIME_DIR to one of yours)", .0.display())]
    NoAccess(PathBuf),
    #[error("the socket path {} is longer than the 107 bytes a Unix socket allows (set SUBLET_RUNTIME_DIR to a shorter one)", .0.display())]
    PathTooLong(PathBuf),
    #[error("the arbiter at {} did not answer within {} ms: {state}", .path.display(), .waited.as_millis())]
    Timeout {
        path: PathBuf,
        waited: Duration,
        /// Which process to look at, and what it is doing.
        state: String,
    },
    #[error("the arbiter at {} closed the connection without an answer (its journal may say why)", .0.display())]
    HungUp(PathBuf),
    #[error("the arbiter at {} is ending (try again when its successor listens)", .0.display())]
    Ending(PathBuf),
    #[error("the arbiter at {} is of an older version, which does not know this command's socket (use the `sublet` that started it, or restart the arbiter: jobs go on meanwhile)", .0.display())]
    Older(PathBuf),
    #[error("{0} (use the `sublet` that started the arbiter, or restart the arbiter)")]
    Version(String),
    #[error(transparent)]
    Refused(#[from] ControlError),
    #[error("{0}")]
    Protocol(String),
    #[error("talking to {} failed: {error}", .path.display())]
    Io { path: PathBuf, error: io::Error },
}

impl ClientError {
    /// Nobody is there: starting an arbiter would help.
    pub fn is_absence(&self) -> bool {
        matches!(self, Self::NoSocket(_) | Self::DeadSocket(_))
    }

    /// The arbiter was about to end, and has not done what was asked: then there is none, or
    /// another.
    pub fn is_end(&self) -> bool {
        matches!(self, Self::HungUp(_) | Self::Ending(_))
    }
}

/// A connection to an arbiter's API socket.
#[derive(Debug)]
pub struct Client {
    http: Http,
    path: PathBuf,
    deadline: Duration,
}

impl Client {
    /// Connects; `deadline` bounds this and each request after it.
    ///
    /// # Errors
    /// [`ClientError`], `NoSocket` and `DeadSocket` where no arbiter is there.
    pub fn connect(path: &Path, deadline: Duration) -> Result<Self, ClientError> {
        let address = UnixAddr::new(path).map_err(|_| ClientError::PathTooLong(path.to_owned()))?;
        let io = |error: Errno| ClientError::Io {
            path: path.to_owned(),
            error: error.into(),
        };
        let fd = socket::socket(
            AddressFamily::Unix,
            SockType::Stream,
            SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
            None,
        )
        .map_err(io)?;
        let stream = UnixStream::from(fd);
        let started = Instant::now();
        loop {
            let raw = std::os::fd::AsRawFd::as_raw_fd(&stream);
            match socket::connect(raw, &address) {
                Ok(()) => break,
                // The queue of the listener is full; there is nothing to poll for on a Unix socket.
                Err(Errno::EAGAIN | Errno::EINTR) if started.elapsed() < deadline => {
                    thread::sleep(Duration::from_millis(2));
                }
                Err(Errno::EAGAIN | Errno::EINTR) => {
                    return Err(timeout(path, deadline, None));
                }
                Err(absent @ (Errno::ENOENT | Errno::ENOTDIR | Errno::ECONNREFUSED)) => {
                    return Err(match absent {
                        _ if an_older_one_listens(path) => ClientError::Older(path.to_owned()),
                        Errno::ECONNREFUSED => ClientError::DeadSocket(path.to_owned()),
                        _ => ClientError::NoSocket(path.to_owned()),
                    });
                }
                Err(Errno::EACCES | Errno::EPERM) => {
                    return Err(ClientError::NoAccess(path.to_owned()));
                }
                Err(errno) => return Err(io(errno)),
            }
        }
        stream
            .set_nonblocking(false)
            .map_err(|error| ClientError::Io {
                path: path.to_owned(),
                error,
            })?;
        Ok(Self {
            http: Http::over(stream),
            path: path.to_owned(),
            deadline,
        })
    }

    /// The arbiter, its devices and its jobs.
    ///
    /// # Errors
    /// As every request: [`ClientError`].
    pub fn status(&mut self) -> Result<ArbiterStatus, ClientError> {
        self.get("/v1/status")
    }

    /// Registers this process as a job. Of its command as much is sent as counts.
    ///
    /// # Errors
    /// [`ClientError::Refused`] where the arbiter does not take the job.
    pub fn register(&mut self, mut spec: JobSpec) -> Result<Registered, ClientError> {
        spec.cut_command();
        self.send("POST", "/v1/jobs", &spec)
    }

    /// # Errors
    /// As every request: [`ClientError`].
    pub fn list(&mut self) -> Result<Vec<JobStatus>, ClientError> {
        self.get("/v1/jobs")
    }

    /// Changes a running job and returns it as it then stands.
    ///
    /// # Errors
    /// [`ClientError::Refused`]: no such job, not yours, or no space.
    pub fn set(&mut self, job: &str, change: Change) -> Result<JobStatus, ClientError> {
        self.send("PATCH", &path_of(job)?, &change)
    }

    /// Changes how a device is run, or every device (`None`), and returns those as they then stand.
    ///
    /// # Errors
    /// [`ClientError::Refused`]: no such device, not yours, or settings that make no sense.
    pub fn set_device(
        &mut self,
        device: Option<DeviceSelector>,
        settings: DeviceSettings,
    ) -> Result<Vec<DeviceStatus>, ClientError> {
        let target = device.map_or_else(
            || "/v1/devices".into(),
            |device| format!("/v1/devices/{}", escaped(&device.to_string())),
        );
        self.send("PATCH", &target, &settings)
    }

    /// Has the arbiter read its quota file again.
    ///
    /// # Errors
    /// [`ClientError::Refused`] where the file is wrong; nothing has changed then.
    pub fn reload(&mut self) -> Result<Reloaded, ClientError> {
        self.ask("POST", "/v1/reload", None)
    }

    /// The quota files in force, and what they give: the job of a process, or a job of a user.
    ///
    /// # Errors
    /// [`ClientError::Refused`]: no job has that process, or it is another user's.
    pub fn config(
        &mut self,
        pid: Option<u32>,
        user: Option<&str>,
    ) -> Result<ConfigReport, ClientError> {
        let pid = pid.map(|pid| format!("pid={pid}"));
        let user = user.map(|user| {
            // No user has a longer name, and a head has a bound.
            let user: String = user.chars().take(NAME_BYTES).collect();
            format!("user={}", escaped(&user))
        });
        let asked: Vec<String> = pid.into_iter().chain(user).collect();
        self.get(&format!("/v1/config?{}", asked.join("&")))
    }

    /// Moves jobs between device and host, and returns when all of them have arrived or cannot. The
    /// client's own deadline has to allow for that.
    ///
    /// # Errors
    /// [`ClientError::Refused`]: no such job, not yours, not evictable.
    pub fn move_jobs(&mut self, moves: &Moves) -> Result<Moved, ClientError> {
        self.send("POST", "/v1/moves", moves)
    }

    /// Has a job wait for the turn of its group. The client's own deadline has to allow for that.
    ///
    /// # Errors
    /// [`ClientError::Refused`]: no such job, not yours, no turn in time.
    pub fn acquire(&mut self, job: &str, acquire: &Acquire) -> Result<Acquired, ClientError> {
        self.send("POST", &format!("{}/acquire", path_of(job)?), acquire)
    }

    /// Gives a job's turn up.
    ///
    /// # Errors
    /// [`ClientError::Refused`]: no such job, not yours, or it has no turn.
    pub fn give_up(&mut self, job: &str, give_up: &GiveUp) -> Result<Yielded, ClientError> {
        self.send("POST", &format!("{}/yield", path_of(job)?), give_up)
    }

    /// The groups of jobs that take turns.
    ///
    /// # Errors
    /// As every request: [`ClientError`].
    pub fn groups(&mut self) -> Result<Vec<GroupStatus>, ClientError> {
        self.get("/v1/groups")
    }

    /// What ends the connection from another thread: a request that waits then fails, and the
    /// arbiter forgets it.
    ///
    /// # Errors
    /// There is no descriptor left.
    pub fn hang_up_handle(&self) -> io::Result<UnixStream> {
        self.http.socket().try_clone()
    }

    /// # Errors
    /// [`ClientError::Refused`] where the peer may not end the arbiter.
    pub fn shutdown(&mut self) -> Result<(), ClientError> {
        self.ask("POST", "/v1/shutdown", None).map(|IgnoredAny| ())
    }

    /// Journal lines above `since_seq`, oldest first, `limit` at most (0: all that are kept).
    ///
    /// # Errors
    /// As every request: [`ClientError`].
    pub fn events(&mut self, since_seq: u64, limit: u32) -> Result<Vec<Event>, ClientError> {
        self.get(&format!("/v1/events?since_seq={since_seq}&limit={limit}"))
    }

    /// Spans of a device above `since_seq`, oldest first, as many as one answer has.
    ///
    /// # Errors
    /// [`ClientError::Refused`]: no such device.
    pub fn timeline(&mut self, device: u32, since_seq: u64) -> Result<Timeline, ClientError> {
        let target = format!("/v1/devices/{device}/timeline?since_seq={since_seq}");
        self.get(&target)
    }

    /// Has the arbiter note that this node's agent refuses the hook at an address.
    ///
    /// # Errors
    /// [`ClientError::Refused`] where the peer is neither the arbiter's own user nor root.
    pub fn hook_refused(&mut self, hook: &str, reason: &str) -> Result<(), ClientError> {
        let body = serde_json::json!({ "hook": hook, "reason": reason });
        let done = self.ask(
            "POST",
            "/v1/hook-refusals",
            Some(body.to_string().as_bytes()),
        );
        done.map(|IgnoredAny| ())
    }

    fn get<T: DeserializeOwned>(&mut self, target: &str) -> Result<T, ClientError> {
        self.ask("GET", target, None)
    }

    /// Sends what differs from the defaults: an arbiter of another version refuses fields that it
    /// does not know.
    fn send<T: Serialize + Default, R: DeserializeOwned>(
        &mut self,
        method: &str,
        target: &str,
        body: &T,
    ) -> Result<R, ClientError> {
        let body = sparse(body).and_then(|body| serde_json::to_vec(&body));
        let body = body.map_err(|error| {
            ClientError::Protocol(format!("the request cannot be written: {error}"))
        })?;
        self.ask(method, target, Some(&body))
    }

    fn ask<T: DeserializeOwned>(
        &mut self,
        method: &str,
        target: &str,
        body: Option<&[u8]>,
    ) -> Result<T, ClientError> {
        let end = Instant::now() + self.deadline;
        let path = || self.path.clone();
        let peer = socket::getsockopt(self.http.socket(), sockopt::PeerCredentials)
            .ok()
            .map(|peer| peer.pid());
        let said = self.http.ask(method, target, body, end);
        let Answer { status, body } = said.map_err(|error| match error {
            NoAnswer::TooLate => timeout(&self.path, self.deadline, peer),
            NoAnswer::HungUp => ClientError::HungUp(path()),
            NoAnswer::Nonsense(what) => self.nonsense(&what),
            NoAnswer::Io(error) => ClientError::Io {
                path: path(),
                error,
            },
        })?;
        if (200..300).contains(&status) {
            return serde_json::from_slice(&body)
                .map_err(|error| self.nonsense(&error.to_string()));
        }
        let refused: Refused = serde_json::from_slice(&body)
            .map_err(|_| self.nonsense(&format!("it has status {status} and no reason")))?;
        Err(match refused.error {
            error if is_code(&error, ErrorCode::ENDING) => ClientError::Ending(path()),
            // The path is ours, so another version of the arbiter has no such operation.
            error if is_code(&error, ErrorCode::NOT_FOUND) || status == 405 => {
                let target = target.split('?').next().unwrap_or_default();
                let path = self.path.display();
                ClientError::Version(format!(
                    "the arbiter at {path} knows no `{method} {target}`"
                ))
            }
            error => ClientError::Refused(error),
        })
    }

    fn nonsense(&self, what: &str) -> ClientError {
        let path = self.path.display();
        ClientError::Protocol(format!(
            "the answer of the arbiter at {path} makes no sense: {what}"
        ))
    }
}

/// How an arbiter says no.
#[derive(Deserialize)]
struct Refused {
    error: ControlError,
}

fn is_code(error: &ControlError, code: &str) -> bool {
    matches!(&error.code, ErrorCode::Other(other) if other == code)
}

/// The path of a job.
///
/// # Errors
/// Nothing stands at such a path, and no job has such a name.
fn path_of(job: &str) -> Result<String, ClientError> {
    if job.is_empty() || job.len() > NAME_BYTES {
        let shown = one_line(job, SHOWN_CHARS);
        let error = ControlError::new(ErrorCode::NoSuchJob, format!("no job is named `{shown}`"));
        return Err(error.with_hint("see `sublet ps`").into());
    }
    Ok(format!("/v1/jobs/{}", escaped(job)))
}

/// Text as a part of a path, or as a value of a parameter.
fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => {
                escaped.push(char::from(byte));
            }
            _ => escaped.push_str(&format!("%{byte:02X}")),
        }
    }
    escaped
}

/// The fields of a value that differ from the default, without those that say nothing.
fn sparse<T: Serialize + Default>(value: &T) -> serde_json::Result<Value> {
    fn without_nulls(value: &mut Value) {
        match value {
            Value::Object(fields) => {
                fields.retain(|_, value| !value.is_null());
                fields.values_mut().for_each(without_nulls);
            }
            Value::Array(items) => items.iter_mut().for_each(without_nulls),
            _ => {}
        }
    }
    let default = serde_json::to_value(T::default())?;
    let mut value = serde_json::to_value(value)?;
    if let Value::Object(fields) = &mut value {
        fields.retain(|name, value| default.get(name) != Some(value));
    }
    without_nulls(&mut value);
    Ok(value)
}

/// Whether an arbiter from before this API listens beside `path`. It would not answer here, and one
/// that was started beside it would not get the directory.
fn an_older_one_listens(path: &Path) -> bool {
    UnixStream::connect(path.with_file_name(OLDER_SOCKET)).is_ok()
}

/// `peer`: who listens, by the kernel's word; without, the lock file beside the socket tells.
fn timeout(path: &Path, waited: Duration, peer: Option<i32>) -> ClientError {
    let written = || {
        let lock = std::fs::read_to_string(path.with_file_name("arbiter.lock")).ok()?;
        lock.trim().parse().ok()
    };
    let pid = peer.filter(|pid| *pid > 0).or_else(written);
    ClientError::Timeout {
        path: path.to_owned(),
        waited,
        state: match pid {
            Some(pid) => state_of(pid),
            None => "it runs in another PID namespace; look there whether it is stopped".into(),
        },
    }
}

/// What a process that does not answer is doing, and what to do about it.
fn state_of(pid: i32) -> String {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name may contain anything, also parentheses.
    let state = stat
        .rsplit_once(") ")
        .and_then(|(_, rest)| rest.chars().next());
    match state {
        Some('T' | 't') => {
            format!("its process {pid} is stopped; let it go on with `kill -CONT {pid}`")
        }
        Some('D') => {
            format!("its process {pid} waits for a disk or the kernel; see `cat /proc/{pid}/stack`")
        }
        Some('Z' | 'X') => format!("its process {pid} has just ended; try again"),
        Some(_) => format!("its process {pid} is busy or gets no processor; see `top -p {pid}`"),
        None => format!("its process is {pid}, which cannot be seen from here"),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixListener;
    use std::thread::JoinHandle;

    use serde_json::json;
    use testbed::PATIENCE;

    use super::*;
    use crate::layers::Layer;
    use crate::request::OwnFile;
    use crate::resize::Resize;
    use crate::size::MemLimit;
    use crate::values::Class;

    const SOON: Duration = Duration::from_millis(50);

    struct Fixture {
        dir: tempfile::TempDir,
    }

    impl Fixture {
        fn new() -> Self {
            Self {
                dir: tempfile::tempdir().unwrap(),
            }
        }

        fn socket(&self) -> PathBuf {
            self.dir.path().join("api.sock")
        }

        fn client(&self) -> Client {
            Client::connect(&self.socket(), PATIENCE).unwrap()
        }

        /// Serves one connection: reads requests, answers each with the next of these, hangs up,
        /// and tells what it has read: the first line, and the body.
        fn serve(&self, answers: Vec<Vec<u8>>) -> JoinHandle<Vec<(String, Value)>> {
            let listener = UnixListener::bind(self.socket()).unwrap();
            thread::spawn(move || {
                let (mut stream, _) = listener.accept().unwrap();
                let mut heard = Vec::new();
                for answer in answers {
                    heard.push(read_request(&mut stream));
                    let _ = stream.write_all(&answer);
                }
                heard
            })
        }
    }

    fn read_request(stream: &mut UnixStream) -> (String, Value) {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            stream.read_exact(&mut byte).unwrap();
            head.push(byte[0]);
        }
        let head = String::from_utf8(head).unwrap();
        let length = head
            .lines()
            .find_map(|line| line.strip_prefix("content-length: "));
        let mut body = vec![0; length.map_or(0, |digits| digits.parse().unwrap())];
        stream.read_exact(&mut body).unwrap();
        let first = head.lines().next().unwrap().to_owned();
        (first, serde_json::from_slice(&body).unwrap_or_default())
    }

    fn answer(status: u16, body: &Value) -> Vec<u8> {
        let body = body.to_string();
        format!(
            "HTTP/1.1 {status} x\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        )
        .into_bytes()
    }

    fn refusal(status: u16, code: &str) -> Vec<u8> {
        let error = json!({"code": code, "message": "no", "hint": "see `sublet ps`"});
        answer(status, &json!({ "error": error }))
    }

    fn shared() -> Change {
        Change {
            settings: crate::JobSettings {
                share: Some(0.5),
                ..crate::JobSettings::default()
            },
            ..Change::default()
        }
    }

    #[test]
    fn each_request_is_made_as_the_api_takes_it() {
        let fixture = Fixture::new();
        let object = answer(200, &json!({}));
        let list = answer(200, &json!([]));
        let answers = [
            &object, &object, &list, &object, &list, &list, &object, &object, &object, &object,
            &object, &list, &object, &object, &object, &object, &list,
        ];
        let server = fixture.serve(answers.map(Clone::clone).into());
        let mut client = fixture.client();
        client.status().unwrap();
        let registered = client.register(JobSpec {
            command: vec!["a\nb".into(); 40],
            ..JobSpec::default()
        });
        registered.unwrap();
        client.list().unwrap();
        client.set("a b/c?%\u{e4}", shared()).unwrap();
        client.set_device(None, DeviceSettings::default()).unwrap();
        let uuid = DeviceSelector::Uuid("GPU-1f".into());
        let settings = DeviceSettings {
            early_wake: Some(false),
            ..DeviceSettings::default()
        };
        client.set_device(Some(uuid), settings).unwrap();
        client.reload().unwrap();
        client.config(None, None).unwrap();
        client.config(Some(7), Some("a&b")).unwrap();
        let moves = Moves {
            evict: vec!["a".into()],
            ..Moves::default()
        };
        client.move_jobs(&moves).unwrap();
        client.shutdown().unwrap();
        client.events(7, 3).unwrap();
        client.timeline(1, 9).unwrap();
        client.hook_refused("http://x", "why").unwrap();
        let acquire = Acquire {
            timeout_ms: 7,
            ..Acquire::default()
        };
        client.acquire("a/b", &acquire).unwrap();
        client.give_up("a", &GiveUp::default()).unwrap();
        client.groups().unwrap();
        let wanted = [
            ("GET /v1/status", json!(null)),
            ("POST /v1/jobs", json!({"command": vec!["a\nb"; 32]})),
            ("GET /v1/jobs", json!(null)),
            (
                "PATCH /v1/jobs/a%20b%2Fc%3F%25%C3%A4",
                json!({"share": 0.5}),
            ),
            ("PATCH /v1/devices", json!({})),
            ("PATCH /v1/devices/GPU-1f", json!({"early_wake": false})),
            ("POST /v1/reload", json!(null)),
            ("GET /v1/config?", json!(null)),
            ("GET /v1/config?pid=7&user=a%26b", json!(null)),
            ("POST /v1/moves", json!({"evict": ["a"]})),
            ("POST /v1/shutdown", json!(null)),
            ("GET /v1/events?since_seq=7&limit=3", json!(null)),
            ("GET /v1/devices/1/timeline?since_seq=9", json!(null)),
            (
                "POST /v1/hook-refusals",
                json!({"hook": "http://x", "reason": "why"}),
            ),
            ("POST /v1/jobs/a%2Fb/acquire", json!({"timeout_ms": 7})),
            ("POST /v1/jobs/a/yield", json!({})),
            ("GET /v1/groups", json!(null)),
        ];
        let wanted = wanted.map(|(first, body)| (format!("{first} HTTP/1.1"), body));
        assert_eq!(testbed::join(server), wanted);
    }

    #[test]
    fn what_says_nothing_is_left_out_and_nothing_else() {
        let change = Change {
            solo_iteration_us: Some(0),
            paused: Some(false),
            resize: Some(Resize::To(0)),
            ..shared()
        };
        let spec = JobSpec {
            name: "train".into(),
            settings: crate::JobSettings {
                class: Some(Class::Opportunistic),
                mem: Some(MemLimit::Percent(50.0)),
                ..crate::JobSettings::default()
            },
            own_file: Some(Box::new(OwnFile {
                path: "/a".into(),
                given: shared().settings,
                caps: vec![Layer {
                    from: "/a:3:1".into(),
                    settings: shared().settings,
                }],
            })),
            on_behalf_of: Some(0),
            pid: 42,
            any_user: true,
            ..JobSpec::default()
        };
        let sent = sparse(&change).unwrap();
        assert_eq!(serde_json::from_value::<Change>(sent).unwrap(), change);
        let sent = sparse(&spec).unwrap();
        let text = sent.to_string();
        assert!(!text.contains("null") && !text.contains("strict"), "{text}");
        assert_eq!(serde_json::from_value::<JobSpec>(sent).unwrap(), spec);
        assert_eq!(sparse(&Moves::default()).unwrap(), json!({}));
    }

    #[test]
    fn an_answer_in_parts_is_put_together() {
        let fixture = Fixture::new();
        let listener = UnixListener::bind(fixture.socket()).unwrap();
        let server = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            read_request(&mut stream);
            let jobs = json!(vec![JobStatus::default(); 40]);
            for part in answer(200, &jobs).chunks(777) {
                stream.write_all(part).unwrap();
            }
        });
        assert_eq!(fixture.client().list().unwrap().len(), 40);
        testbed::join(server);
    }

    #[test]
    fn a_refusal_arrives_with_its_words_and_the_connection_goes_on() {
        let fixture = Fixture::new();
        let codes = [
            (404, "no_such_job"),
            (403, "permission"),
            (418, "on_fire"),
            (503, "internal"),
        ];
        let answers = codes.map(|(status, code)| refusal(status, code));
        let server = fixture.serve(answers.into());
        let mut client = fixture.client();
        for (_, code) in codes {
            let error = client.set("x", Change::default()).unwrap_err();
            assert_eq!(error.to_string(), "no (see `sublet ps`)");
            assert!(!error.is_absence() && !error.is_end());
            let ClientError::Refused(error) = error else {
                panic!("{error:?}");
            };
            assert_eq!(String::from(error.code), code);
        }
        testbed::join(server);
    }

    #[test]
    fn an_arbiter_that_ends_is_distinguished_from_one_that_refuses() {
        let fixture = Fixture::new();
        let server = fixture.serve(vec![refusal(503, ErrorCode::ENDING)]);
        let error = fixture.client().status().unwrap_err();
        assert!(matches!(error, ClientError::Ending(_)) && error.is_end());
        testbed::join(server);
    }

    #[test]
    fn an_operation_that_the_arbiter_does_not_have_is_a_matter_of_versions() {
        for answer in [refusal(404, ErrorCode::NOT_FOUND), refusal(405, "invalid")] {
            let fixture = Fixture::new();
            let server = fixture.serve(vec![answer]);
            let error = fixture.client().config(None, Some("a")).unwrap_err();
            assert!(matches!(error, ClientError::Version(_)), "{error}");
            let text = error.to_string();
            for words in ["`GET /v1/config`", "restart the arbiter"] {
                assert!(text.contains(words), "{text}");
            }
            testbed::join(server);
        }
    }

    #[test]
    fn a_name_that_no_job_can_have_is_no_path() {
        let fixture = Fixture::new();
        let server = fixture.serve(Vec::new());
        let mut client = fixture.client();
        for name in [String::new(), "x".repeat(1 << 20)] {
            let error = client.set(&name, Change::default()).unwrap_err();
            let ClientError::Refused(error) = error else {
                panic!("{error:?}");
            };
            assert_eq!(error.code, ErrorCode::NoSuchJob);
            assert!(error.message.len() < 200, "{error}");
        }
        testbed::join(server);
    }

    #[test]
    fn a_path_that_is_no_utf8_is_an_error_and_no_panic() {
        use std::os::unix::ffi::OsStringExt;
        let fixture = Fixture::new();
        let server = fixture.serve(Vec::new());
        let driver = std::ffi::OsString::from_vec(vec![b'/', 0xff]).into();
        let spec = JobSpec {
            driver,
            ..JobSpec::default()
        };
        let error = fixture.client().register(spec).unwrap_err();
        assert!(matches!(error, ClientError::Protocol(_)), "{error}");
        testbed::join(server);
    }

    #[test]
    fn silence_ends_at_the_deadline() {
        let fixture = Fixture::new();
        let listener = UnixListener::bind(fixture.socket()).unwrap();
        let mut client = Client::connect(&fixture.socket(), SOON).unwrap();
        let error = client.status().unwrap_err();
        assert!(matches!(error, ClientError::Timeout { .. }), "{error}");
        drop(listener);
    }

    #[test]
    fn a_full_backlog_ends_at_the_deadline() {
        let fixture = Fixture::new();
        let fd = socket::socket(
            AddressFamily::Unix,
            SockType::Stream,
            SockFlag::SOCK_CLOEXEC,
            None,
        )
        .unwrap();
        let address = UnixAddr::new(&fixture.socket()).unwrap();
        let raw = std::os::fd::AsRawFd::as_raw_fd(&fd);
        socket::bind(raw, &address).unwrap();
        socket::listen(&fd, socket::Backlog::new(0).unwrap()).unwrap();
        let mut held = Vec::new();
        let error = loop {
            match Client::connect(&fixture.socket(), SOON) {
                Ok(client) => held.push(client),
                Err(error) => break error,
            }
            assert!(held.len() < 100, "a backlog of 0 never fills");
        };
        assert!(matches!(error, ClientError::Timeout { .. }), "{error}");
    }

    #[test]
    fn a_hang_up_and_nonsense_are_distinguished() {
        let answers = [
            Vec::new(),
            b"hello\n".to_vec(),
            answer(200, &json!("status")),
            answer(500, &json!({})),
            answer(302, &json!(null)),
        ];
        for answer in answers {
            let is_nothing = answer.is_empty();
            let fixture = Fixture::new();
            let server = fixture.serve(vec![answer]);
            let error = fixture.client().status().unwrap_err();
            match is_nothing {
                true => assert!(matches!(error, ClientError::HungUp(_)), "{error}"),
                false => assert!(error.to_string().contains("makes no sense"), "{error}"),
            }
            testbed::join(server);
        }
    }

    #[test]
    fn absence_has_two_shapes_and_an_older_arbiter_is_none_of_them() {
        let fixture = Fixture::new();
        let connect = || Client::connect(&fixture.socket(), PATIENCE).unwrap_err();
        let error = connect();
        assert!(matches!(error, ClientError::NoSocket(_)) && error.is_absence());

        let older = fixture.dir.path().join(OLDER_SOCKET);
        let listener = UnixListener::bind(&older).unwrap();
        let error = connect();
        assert!(matches!(error, ClientError::Older(_)) && !error.is_absence());
        assert!(error.to_string().contains("restart the arbiter"), "{error}");
        // What is left of one that was killed is nobody.
        drop(listener);
        std::fs::remove_file(&older).unwrap();
        testbed::dead_socket(&older);
        assert!(matches!(connect(), ClientError::NoSocket(_)));

        testbed::dead_socket(&fixture.socket());
        let error = connect();
        assert!(matches!(error, ClientError::DeadSocket(_)) && error.is_absence());
    }

    #[test]
    fn a_path_beyond_the_kernels_limit_is_named() {
        let long = PathBuf::from("/tmp").join("x".repeat(200));
        let error = Client::connect(&long, PATIENCE).unwrap_err();
        assert!(matches!(error, ClientError::PathTooLong(_)), "{error}");
    }
}
