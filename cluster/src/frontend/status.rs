//! What a frontend says of itself.

use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::Shared;
use super::figures::{Counts, Lately};

/// Longest report: some hundred bytes for each of 256 instances.
const MOST_BYTES: u64 = 1 << 20;

/// An instance, as a frontend sees it.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct InstanceStatus {
    /// The name of its job.
    pub name: String,
    /// Where it listens.
    pub address: String,
    /// `in use`, `ready`, `idle`, `down` or `held`.
    pub role: String,
    /// `resident`, `evicted`, `held` or `unknown`.
    pub memory: String,
    /// Requests of this frontend that it has.
    pub busy: u32,
    /// Requests of this frontend so far.
    pub requests: u64,
    /// Of these, those that it failed.
    pub failures: u64,
    /// What the arbiter says where it cannot bring it back.
    pub reason: String,
}

/// See the module's documentation.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Status {
    /// Seconds since it began.
    pub up_s: f64,
    /// A response is in time within so many seconds.
    pub within_s: f64,
    /// The part of the requests that has to be.
    pub level: f64,
    /// Frontends that share the load.
    pub frontends: u32,
    /// Requests a second of all of them now, as this one sees it.
    pub rate_per_s: f64,
    /// The same when an instance that is asked for now would be there.
    pub predicted_per_s: f64,
    /// Mean time of service; `None`: not known yet.
    pub service_s: Option<f64>,
    /// How long a return takes.
    pub return_s: f64,
    /// Instances that it uses.
    pub in_use: u32,
    /// Instances that it wants ready, those in use included.
    pub ready: u32,
    /// Requests that wait for an instance.
    pub waiting: u64,
    /// Whether the arbiter says where instances are.
    pub arbiter: bool,
    /// Requests so far.
    pub counts: Counts,
    /// Requests of the last minute.
    pub last_minute: Lately,
    /// Times of response by bucket ([`BUCKETS`](super::figures::BUCKETS)), and beyond.
    pub buckets: Vec<u64>,
    /// All times of response together.
    pub sum_s: f64,
    /// In their order.
    pub instances: Vec<InstanceStatus>,
}

/// As it is now.
pub fn of(shared: &Shared) -> Status {
    let now_s = shared.now_s();
    let mut gate = shared.gate.lock();
    let said = shared.waker.lock();
    let instances = gate.fleet.instances().iter().enumerate();
    let instances = instances.map(|(at, one)| InstanceStatus {
        name: one.name.clone(),
        address: shared.addresses[at].to_string(),
        role: gate.fleet.role(at, now_s).as_str().to_owned(),
        memory: one.memory.as_str().to_owned(),
        busy: one.busy,
        requests: one.requests,
        failures: one.failures,
        reason: said.reasons.get(&at).cloned().unwrap_or_default(),
    });
    let instances = instances.collect();
    let terms = *gate.fleet.terms();
    let wanted = gate.fleet.wanted();
    let return_s = gate.fleet.return_s();
    let frontend = gate.fleet.frontend();
    Status {
        up_s: now_s,
        within_s: terms.sla.within_s,
        level: terms.sla.level,
        frontends: terms.frontends,
        rate_per_s: frontend.rate_per_s(now_s, 0.0),
        predicted_per_s: frontend.rate_per_s(now_s, return_s),
        service_s: frontend.service(now_s).map(|service| service.mean_s()),
        return_s,
        in_use: wanted.in_use,
        ready: wanted.ready,
        waiting: gate.waiting() as u64,
        arbiter: said.answers == Some(true),
        counts: gate.figures.counts.clone(),
        last_minute: gate.figures.lately(now_s),
        buckets: gate.figures.buckets.to_vec(),
        sum_s: gate.figures.sum_s,
        instances,
    }
}

/// The text of a page of a frontend's.
///
/// # Errors
/// It is not reached, or what it says is no such page.
pub fn ask(address: SocketAddr, path: &str, patience: Duration) -> io::Result<String> {
    let end = Instant::now() + patience;
    let left = || {
        let left = end.saturating_duration_since(Instant::now());
        match left.is_zero() {
            true => Err(io::Error::from(io::ErrorKind::TimedOut)),
            false => Ok(left),
        }
    };
    let mut stream = TcpStream::connect_timeout(&address, left()?)?;
    stream.set_write_timeout(Some(left()?))?;
    let request = format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes())?;
    let mut bytes = Vec::new();
    loop {
        stream.set_read_timeout(Some(left()?))?;
        let mut part = [0; 16 << 10];
        match stream.read(&mut part) {
            Ok(0) => break,
            Ok(read) => bytes.extend_from_slice(&part[..read]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        if bytes.len() as u64 > MOST_BYTES {
            return Err(io::Error::other("it says more than a frontend does"));
        }
    }
    let text = String::from_utf8(bytes).map_err(io::Error::other)?;
    let nonsense = || io::Error::other("who answers there is no frontend");
    let (head, body) = text.split_once("\r\n\r\n").ok_or_else(nonsense)?;
    match head.starts_with("HTTP/1.1 200 ") {
        true => Ok(body.to_owned()),
        false => Err(nonsense()),
    }
}
