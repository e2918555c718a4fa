//! One connection to a container runtime: the plugin registers, and answers until it ends.
//!
//! The runtime calls on a connection of its own in the same socket, also before it has answered the
//! registration. All that comes is bounded, and what breaks the protocol ends the connection with
//! its reason.

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use prost::Message as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::sync::Semaphore;
use tokio::task::{JoinHandle, JoinSet, spawn_blocking};

use super::{
    DEADLINE, EXHAUSTED, INTERNAL, INVALID, PATIENCE, Plugin, TOO_SLOW, UNIMPLEMENTED, WANTED,
    refuse,
};
use crate::proto::nri;
use crate::sockets::may_call;
use crate::ttrpc::{Incoming, Malformed, Message, REQUEST, TO_PLUGIN, TO_RUNTIME};

/// TIMEOUT: a runtime answers a registration at once, and gives a plugin five seconds for it.
const REGISTRATION: Duration = Duration::from_secs(10);
/// TIMEOUT: a runtime reads at all times.
const WRITTEN: Duration = Duration::from_secs(10);
/// Calls at a time. A runtime asks one after the other.
const CALLS: usize = 32;
/// Number of the only call to the runtime.
const REGISTER: u32 = 1;
/// Bytes of one read.
const READ: usize = 64 << 10;
/// Longest text of a runtime's that is printed.
const TEXT_CHARS: usize = 400;

/// What a call is answered.
type Given = Result<Vec<u8>, nri::Status>;

/// How the plugin is called at a runtime.
#[derive(Debug, Clone)]
pub struct Name {
    pub name: String,
    /// Two digits.
    pub index: String,
}

/// Why a connection has ended.
#[derive(Debug, thiserror::Error)]
pub enum Ended {
    #[error("nobody listens there ({0})")]
    Connect(std::io::Error),
    #[error("it is neither root's nor this user's")]
    Stranger,
    #[error("it has closed the connection")]
    Closed,
    #[error("{0}")]
    Io(std::io::Error),
    #[error("it does not speak NRI: {0}")]
    Malformed(#[from] Malformed),
    #[error("it does not take the plugin: {0}")]
    Refused(String),
    #[error("it does not answer the registration")]
    Silent,
}

/// Text of a peer, as far as it is printed.
fn short(text: &str) -> String {
    control::one_line(text, TEXT_CHARS)
}

/// Registers at the runtime's socket, and answers until that ends.
pub async fn serve(socket: &Path, name: &Name, plugin: &Arc<Plugin>) -> Ended {
    let connected = tokio::time::timeout(REGISTRATION, UnixStream::connect(socket)).await;
    let stream = match connected {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => return Ended::Connect(error),
        Err(_) => return Ended::Silent,
    };
    if !may_call(&stream) {
        return Ended::Stranger;
    }
    plugin.begin();
    match converse(stream, socket, name, plugin).await {
        Err(ended) => ended,
        Ok(never) => match never {},
    }
}

enum Never {}

async fn converse(
    mut stream: UnixStream,
    socket: &Path,
    name: &Name,
    plugin: &Arc<Plugin>,
) -> Result<Never, Ended> {
    let register = nri::Request {
        service: nri::RUNTIME.into(),
        method: "RegisterPlugin".into(),
        payload: nri::RegisterPluginRequest {
            plugin_name: name.name.clone(),
            plugin_idx: name.index.clone(),
        }
        .encode_to_vec(),
        // CAST: ten seconds.
        timeout_nano: REGISTRATION.as_nanos() as i64,
    };
    let register = Message {
        connection: TO_RUNTIME,
        call: REGISTER,
        kind: REQUEST,
        payload: register.encode_to_vec(),
    };
    write(&mut stream, &register).await?;
    let mut registered = Some(tokio::time::Instant::now() + REGISTRATION);
    let mut incoming = Incoming::default();
    let mut buffer = vec![0; READ];
    let mut patience = PATIENCE;
    let places = Arc::new(Semaphore::new(CALLS));
    let mut calls = JoinSet::new();
    loop {
        // What is slower than that is not waited for: a call has its own deadline.
        let unfinished = incoming.deadline().map(tokio::time::Instant::from_std);
        tokio::select! {
            read = stream.read(&mut buffer) => {
                let count = read.map_err(Ended::Io)?;
                if count == 0 {
                    return Err(Ended::Closed);
                }
                // PANIC: a read takes no more than the buffer has.
                for message in incoming.take(&buffer[..count], Instant::now())? {
                    if message.connection == TO_RUNTIME {
                        answered(&message, socket)?;
                        registered = None;
                        continue;
                    }
                    let Call { method, payload, timeout } = match call(&message) {
                        Ok(call) => call,
                        Err(status) => {
                            write(&mut stream, &answer(message.call, Err(status))).await?;
                            continue;
                        }
                    };
                    if method == "Configure" {
                        patience = configured(&payload).unwrap_or(patience);
                    }
                    let Ok(place) = Arc::clone(&places).try_acquire_owned() else {
                        let status = refuse(EXHAUSTED, format!("more than {CALLS} calls at a time"));
                        write(&mut stream, &answer(message.call, Err(status))).await?;
                        continue;
                    };
                    // Part of it is for the way back.
                    let deadline = Instant::now() + timeout.unwrap_or(patience) * 4 / 5;
                    let plugin = Arc::clone(plugin);
                    let number = message.call;
                    calls.spawn(async move {
                        let given = spawn_blocking(move || {
                            let given = plugin.answer(&method, &payload, deadline);
                            drop(place);
                            given
                        });
                        answer(number, in_time(given, deadline).await)
                    });
                }
            }
            Some(done) = calls.join_next() => {
                if let Ok(message) = done {
                    write(&mut stream, &message).await?;
                }
            }
            () = until(unfinished) => return Err(Malformed::Unfinished.into()),
            () = until(registered) => return Err(Ended::Silent),
        }
    }
}

/// What is answered by then. A runtime that gets no answer in time goes on without the plugin, and
/// with its container.
async fn in_time(given: JoinHandle<Given>, deadline: Instant) -> Given {
    match tokio::time::timeout_at(deadline.into(), given).await {
        Ok(Ok(given)) => given,
        Ok(Err(_)) => Err(refuse(INTERNAL, "a bug of the plugin; see its log")),
        Err(_) => Err(refuse(DEADLINE, TOO_SLOW)),
    }
}

/// For ever where there is no time.
async fn until(time: Option<tokio::time::Instant>) {
    match time {
        Some(time) => tokio::time::sleep_until(time).await,
        None => std::future::pending().await,
    }
}

async fn write(stream: &mut UnixStream, message: &Message) -> Result<(), Ended> {
    let bytes = message.encode()?;
    match tokio::time::timeout(WRITTEN, stream.write_all(&bytes)).await {
        Ok(written) => written.map_err(Ended::Io),
        Err(_) => Err(Ended::Io(std::io::ErrorKind::TimedOut.into())),
    }
}

/// What the runtime has answered the registration.
fn answered(message: &Message, socket: &Path) -> Result<(), Ended> {
    let wrong = |why: &dyn fmt::Display| Ended::Refused(short(&why.to_string()));
    if message.call != REGISTER {
        let number = message.call;
        return Err(wrong(&format_args!(
            "it answers call {number}, which nobody has made"
        )));
    }
    let response = nri::Response::decode(&*message.payload).map_err(|error| wrong(&error))?;
    match response.status.filter(|status| status.code != 0) {
        Some(status) => Err(wrong(&status.message)),
        None => {
            crate::say!("registered at {}", socket.display());
            Ok(())
        }
    }
}

/// How long a runtime waits for an answer, as it says.
fn configured(payload: &[u8]) -> Option<Duration> {
    let said = nri::ConfigureRequest::decode(payload).ok()?;
    crate::say!(
        "the runtime is {} {}",
        short(&said.runtime_name),
        short(&said.runtime_version)
    );
    let millis = u64::try_from(said.request_timeout).ok()?;
    (millis > 0).then(|| Duration::from_millis(millis).min(WANTED))
}

/// A call of the runtime's.
struct Call {
    method: String,
    payload: Vec<u8>,
    /// How long it waits.
    timeout: Option<Duration>,
}

fn call(message: &Message) -> Result<Call, nri::Status> {
    let request = nri::Request::decode(&*message.payload)
        .map_err(|error| refuse(INVALID, format!("what came is no call: {error}")))?;
    if request.service != nri::PLUGIN {
        let service = short(&request.service);
        return Err(refuse(UNIMPLEMENTED, format!("there is no {service} here")));
    }
    let nanos = u64::try_from(request.timeout_nano).unwrap_or(0);
    Ok(Call {
        method: request.method,
        payload: request.payload,
        timeout: (nanos > 0).then(|| Duration::from_nanos(nanos).min(WANTED)),
    })
}

fn answer(call: u32, given: Given) -> Message {
    let response = match given {
        Ok(payload) => nri::Response {
            status: None,
            payload,
        },
        Err(status) => nri::Response {
            status: Some(status),
            payload: Vec::new(),
        },
    };
    Message {
        connection: TO_PLUGIN,
        call,
        kind: crate::ttrpc::RESPONSE,
        payload: response.encode_to_vec(),
    }
}
