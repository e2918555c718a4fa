//! An arbiter's place at its API socket, taken by a test: requests are read as the arbiter reads
//! them, and answered with what the test says.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::thread;

use nix::sys::socket::{getsockopt, sockopt};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::error::ControlError;
use crate::request::{Reply, Request};

/// A request as it came.
#[derive(Clone, Debug)]
pub struct Asked {
    pub method: String,
    /// Path and parameters.
    pub target: String,
    pub body: Vec<u8>,
    /// The process that has connected, by the kernel's word.
    pub peer_pid: u32,
}

/// Listens at `socket` until the test's process ends, and says to each request the bytes that
/// `answer` gives. To say nothing is to hang up.
///
/// # Panics
/// Nobody can listen there.
pub fn stand_in(socket: &Path, answer: impl Fn(&Asked) -> Vec<u8> + Send + Sync + 'static) {
    let listener = UnixListener::bind(socket).expect("bound");
    let answer = Arc::new(answer);
    thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(stream) = stream else { return };
            let answer = Arc::clone(&answer);
            thread::spawn(move || converse(stream, &*answer));
        }
    });
}

fn converse(mut stream: UnixStream, answer: &dyn Fn(&Asked) -> Vec<u8>) {
    let peer = getsockopt(&stream, sockopt::PeerCredentials).expect("the kernel says who it is");
    let peer_pid = u32::try_from(peer.pid()).unwrap_or(0);
    let mut input = BufReader::new(stream.try_clone().expect("a descriptor"));
    while let Some(asked) = read(&mut input, peer_pid) {
        let answer = answer(&asked);
        if answer.is_empty() || stream.write_all(&answer).is_err() {
            return;
        }
    }
}

fn read(input: &mut BufReader<UnixStream>, peer_pid: u32) -> Option<Asked> {
    let mut lines = Vec::new();
    loop {
        let mut line = String::new();
        if input.read_line(&mut line).ok()? == 0 {
            return None;
        }
        match line.trim_end() {
            "" => break,
            line => lines.push(line.to_owned()),
        }
    }
    let mut words = lines.first()?.split(' ').map(str::to_owned);
    let (method, target) = (words.next()?, words.next()?);
    let length = lines
        .iter()
        .find_map(|line| line.strip_prefix("content-length: "));
    let mut body = vec![0; length.map_or(Some(0), |digits| digits.parse().ok())?];
    input.read_exact(&mut body).ok()?;
    Some(Asked {
        method,
        target,
        body,
        peer_pid,
    })
}

impl Asked {
    /// What is asked; `None`: no operation of the API, or not what it takes.
    pub fn request(&self) -> Option<Request> {
        let (path, query) = self.target.split_once('?').unwrap_or((&self.target, ""));
        let parts: Vec<String> = path.split('/').skip(1).map(plain).collect();
        let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
        let parameter = |name: &str| {
            let mut pairs = query.split('&').filter_map(|pair| pair.split_once('='));
            pairs.find_map(|(own, value)| (own == name).then(|| plain(value)))
        };
        let number = |name| parameter(name).map_or(Some(0), |digits| digits.parse().ok());
        Some(match (self.method.as_str(), &parts[..]) {
            ("GET", ["v1", "status"]) => Request::Status,
            ("GET", ["v1", "jobs"]) => Request::List,
            ("GET", ["v1", "jobs", job]) => Request::Job {
                job: (*job).to_owned(),
            },
            ("GET", ["v1", "devices"]) => Request::Devices,
            ("POST", ["v1", "jobs"]) => Request::Register(self.json()?),
            ("PATCH", ["v1", "jobs", job]) => Request::Set {
                job: (*job).to_owned(),
                change: self.json()?,
            },
            ("PATCH", ["v1", "devices"]) => Request::SetDevice {
                device: None,
                settings: self.json()?,
            },
            ("PATCH", ["v1", "devices", device]) => Request::SetDevice {
                device: Some(device.parse().ok()?),
                settings: self.json()?,
            },
            ("GET", ["v1", "devices", device, "timeline"]) => Request::Timeline {
                device: device.parse().ok()?,
                since_seq: number("since_seq")?,
                limit: u32::try_from(number("limit")?).ok()?,
            },
            ("POST", ["v1", "moves"]) => Request::Move(self.json()?),
            ("POST", ["v1", "jobs", job, "acquire"]) => Request::Acquire {
                job: (*job).to_owned(),
                acquire: self.json()?,
            },
            ("POST", ["v1", "jobs", job, "yield"]) => Request::Yield {
                job: (*job).to_owned(),
                give_up: self.json()?,
            },
            ("GET", ["v1", "groups"]) => Request::Groups,
            ("GET", ["v1", "events"]) => Request::Events {
                since_seq: number("since_seq")?,
                limit: u32::try_from(number("limit")?).ok()?,
            },
            ("GET", ["v1", "config"]) => Request::Config {
                pid: parameter("pid").map(|pid| pid.parse()).transpose().ok()?,
                user: parameter("user"),
            },
            ("POST", ["v1", "reload"]) => Request::Reload,
            ("POST", ["v1", "shutdown"]) => Request::Shutdown,
            ("POST", ["v1", "hook-refusals"]) => {
                let body: Value = self.json()?;
                let text = |name: &str| body[name].as_str().map(str::to_owned);
                Request::HookRefused {
                    hook: text("hook")?,
                    reason: text("reason")?,
                }
            }
            _ => return None,
        })
    }

    fn json<T: DeserializeOwned>(&self) -> Option<T> {
        serde_json::from_slice(&self.body).ok()
    }
}

/// Text of a path or of a parameter, as it was meant.
fn plain(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        let digits: Option<Vec<u8>> = (byte == b'%').then(|| rest.by_ref().take(2).collect());
        let digits = digits.map(|digits| String::from_utf8(digits).expect("digits"));
        bytes.push(digits.map_or(byte, |digits| {
            u8::from_str_radix(&digits, 16).expect("two digits")
        }));
    }
    String::from_utf8(bytes).expect("text")
}

/// An answer as the arbiter writes it.
pub fn answer(result: &Result<Reply, ControlError>) -> Vec<u8> {
    let body = match result {
        Ok(Reply::Status(status)) => json!(status),
        Ok(Reply::Registered(registered)) => json!(registered),
        Ok(Reply::Jobs(jobs)) => json!(jobs),
        Ok(Reply::Job(job) | Reply::Changed(job)) => json!(job),
        Ok(Reply::Devices(devices)) => json!(devices),
        Ok(Reply::Reloaded(reloaded)) => json!(reloaded),
        Ok(Reply::Moved(moved)) => json!(moved),
        Ok(Reply::Acquired(acquired)) => json!(acquired),
        Ok(Reply::Yielded(yielded)) => json!(yielded),
        Ok(Reply::Groups(groups)) => json!(groups),
        Ok(Reply::Config(report)) => json!(report),
        Ok(Reply::Events(events)) => json!(events),
        Ok(Reply::Timeline(timeline)) => json!(timeline),
        Ok(Reply::ShuttingDown | Reply::Noted) => json!({}),
        Err(error) => return bytes(409, &json!({ "error": error })),
    };
    bytes(200, &body)
}

/// An answer of that status.
pub fn bytes(status: u16, body: &Value) -> Vec<u8> {
    let body = body.to_string();
    let head = format!(
        "HTTP/1.1 {status} x\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    (head + &body).into_bytes()
}
