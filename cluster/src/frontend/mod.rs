//! A frontend of a service, live: it stands between clients and the instances of one service, and
//! decides by itself how many of them are used, as Swayam's frontends do ([`policy::standbys`]).
//!
//! Clients speak HTTP/1.1 to it, and it does to the instances: a request is what load and times of
//! service are counted in, and a connection that stays open has many. A request is read whole
//! before an instance gets it, so that no slow client keeps one busy; an answer is passed on as it
//! comes.
//!
//! * [`fleet`]: which instances are used, which one gets a request, which are woken.
//! * [`figures`]: how long requests took, and whether the agreement was kept.
//! * `gate`: requests that wait for an instance, in the order in which they came.
//! * `hall`: connections of clients. `proxy`: from a client to an instance and back, by `head` and
//!   `body`. `upstream`: one request to one instance. `stream`: a connection as bytes.
//! * `waker`: what the node's arbiter says of the instances, and what it is asked.
//!
//! Nothing here gives memory back, and nothing has to be believed: an instance whose job has
//! `evict_after` leaves its device when the arbiter has seen no work of it for so long, whatever a
//! frontend says or forgets. What a frontend may do is to use an instance, or to say that it
//! will.

mod body;
pub mod figures;
pub mod fleet;
mod gate;
mod hall;
mod head;
mod proxy;
mod status;
mod stream;
mod upstream;
mod waker;

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::watch;

use fleet::{Fleet, Terms};
use gate::Gate;

pub use status::{InstanceStatus, Status, ask as ask_status};
pub use waker::Reach;

/// Most instances of a service that a frontend knows.
pub const MOST_INSTANCES: usize = 256;
/// Names of hosts that are looked up at a time: one whose server does not answer holds up no other.
const LOOKUPS: usize = 64;
/// Between two decisions.
const DECIDE: Duration = Duration::from_millis(200);

/// Where somebody listens.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Address {
    /// `host:port`.
    Tcp(String),
    /// `unix:/path`.
    Unix(PathBuf),
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "`{text}` is no address: write HOST:PORT, such as 127.0.0.1:8000, or unix:/PATH"
            )
        };
        if let Some(path) = text.strip_prefix("unix:") {
            return match Path::new(path).is_absolute() && path.len() <= 107 {
                true => Ok(Self::Unix(Path::new(path).components().collect())),
                false => Err(format!(
                    "`{path}` is no socket: write unix: and an absolute path of at most 107 bytes"
                )),
            };
        }
        let (host, port) = text.rsplit_once(':').ok_or_else(wrong)?;
        let is_host = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
        let bare = host
            .strip_prefix('[')
            .and_then(|host| host.strip_suffix(']'));
        // One place has one name here, however it was written.
        let host = match bare {
            Some(six) => match six.parse::<std::net::Ipv6Addr>() {
                Ok(six) => format!("[{six}]"),
                Err(_) => return Err(wrong()),
            },
            None if host.is_empty() || host.len() > 253 => return Err(wrong()),
            None if !host.chars().all(is_host) => return Err(wrong()),
            None => host.to_ascii_lowercase(),
        };
        // A sign is none of a port's.
        let digits = Some(port).filter(|port| port.chars().all(|c| c.is_ascii_digit()));
        match digits.and_then(|digits| digits.parse::<u16>().ok()) {
            Some(port) => Ok(Self::Tcp(format!("{host}:{port}"))),
            None => Err(wrong()),
        }
    }
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Tcp(text) => f.write_str(text),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// How a frontend is run.
#[derive(Clone, Debug)]
pub struct Options {
    /// What was agreed, and the rest of what the number of instances goes by.
    pub terms: Terms,
    /// Instances: the name of each job, and where it listens. The order does not matter.
    pub instances: Vec<(String, Address)>,
    /// From a request that is here to the end of its answer.
    pub timeout: Duration,
    /// What is under way at the end may take so long.
    pub drain: Duration,
    /// Connections of clients at a time.
    pub connections: usize,
    /// Bytes of a request's body.
    pub body_bytes: usize,
    /// Bytes of all bodies that are held at a time.
    pub bodies_bytes: usize,
    /// Any request may be given to another instance where the first one broke off before it
    /// answered. Otherwise only those whose method allows it (RFC 9110, 9.2.2).
    pub retry: bool,
}

/// What all parts share.
struct Shared {
    options: Options,
    /// In the order of the fleet.
    addresses: Vec<Address>,
    /// Its name in `Via`, which no other frontend has.
    pseudonym: String,
    began: Instant,
    gate: Mutex<Gate>,
    waker: Mutex<waker::Said>,
}

impl Shared {
    fn now_s(&self) -> f64 {
        self.began.elapsed().as_secs_f64()
    }
}

/// Ends a frontend: it takes no more connections, and ends when what is under way is done.
#[derive(Clone, Debug)]
pub struct Stop(Arc<watch::Sender<bool>>);

impl Stop {
    /// Now.
    pub fn stop(&self) {
        self.0.send_replace(true);
    }
}

/// What clients connect to.
#[derive(Debug)]
pub enum Listener {
    /// TCP, and where.
    Tcp(TcpListener, SocketAddr),
    /// A Unix socket, which is removed at the end.
    Unix(UnixListener, PathBuf),
}

impl Listener {
    /// Listens. A socket in the file system that nobody listens at any more is replaced.
    ///
    /// # Errors
    /// Why it cannot.
    pub fn bind(address: &Address) -> io::Result<Self> {
        match address {
            Address::Tcp(text) => {
                let listener = TcpListener::bind(text.as_str())?;
                let address = listener.local_addr()?;
                listener.set_nonblocking(true)?;
                Ok(Self::Tcp(listener, address))
            }
            Address::Unix(path) => {
                let listener = match UnixListener::bind(path) {
                    Err(error) if error.kind() == io::ErrorKind::AddrInUse && is_dead(path) => {
                        std::fs::remove_file(path)?;
                        UnixListener::bind(path)?
                    }
                    other => other?,
                };
                listener.set_nonblocking(true)?;
                Ok(Self::Unix(listener, path.clone()))
            }
        }
    }

    /// Where.
    #[must_use]
    pub fn address(&self) -> Address {
        match self {
            Self::Tcp(_, address) => Address::Tcp(address.to_string()),
            Self::Unix(_, path) => Address::Unix(path.clone()),
        }
    }
}

/// Whether a socket is what a process has left behind that was killed.
fn is_dead(path: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt as _;
    let is_socket = std::fs::symlink_metadata(path).is_ok_and(|it| it.file_type().is_socket());
    let refused = |error: io::Error| error.kind() == io::ErrorKind::ConnectionRefused;
    is_socket && std::os::unix::net::UnixStream::connect(path).is_err_and(refused)
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Self::Unix(_, path) = self {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// A frontend that is about to run.
pub struct Prepared {
    shared: Arc<Shared>,
    stop: Stop,
}

impl Prepared {
    /// With its instances in their order.
    ///
    /// # Errors
    /// A sentence: no instance, too many of them, or two of one name.
    pub fn new(mut options: Options) -> Result<Self, String> {
        let all = &mut options.instances;
        all.sort_by(|a, b| a.0.cmp(&b.0));
        if all.is_empty() || all.len() > MOST_INSTANCES {
            return Err(format!(
                "{} instances: give 1 to {MOST_INSTANCES}",
                all.len()
            ));
        }
        if let Some(two) = all.windows(2).find(|two| two[0].0 == two[1].0) {
            return Err(format!("two instances are called `{}`", two[0].0));
        }
        let mut places: Vec<String> = all.iter().map(|one| one.1.to_string()).collect();
        places.sort_unstable();
        if let Some(two) = places.windows(2).find(|two| two[0] == two[1]) {
            return Err(format!("two instances are at {}", two[0]));
        }
        let names: Vec<String> = all.iter().map(|one| one.0.clone()).collect();
        let addresses = all.iter().map(|one| one.1.clone()).collect();
        // Frontends that were started at once do not choose alike, and know each other apart.
        let random = || {
            let mut bytes = [0; 8];
            match getrandom::fill(&mut bytes) {
                Ok(()) => u64::from_ne_bytes(bytes),
                Err(_) => u64::from(std::process::id()),
            }
        };
        let (seed, pseudonym) = (random(), format!("sublet-{:016x}", random()));
        let fleet = Fleet::new(options.terms, &names, seed);
        let gate = Mutex::new(Gate::new(fleet));
        Ok(Self {
            shared: Arc::new(Shared {
                options,
                addresses,
                pseudonym,
                began: Instant::now(),
                gate,
                waker: Mutex::default(),
            }),
            stop: Stop(Arc::new(watch::channel(false).0)),
        })
    }

    /// What ends it.
    #[must_use]
    pub fn stop(&self) -> Stop {
        self.stop.clone()
    }

    /// What makes reports of it, whenever it is asked.
    pub fn reporter(&self) -> impl Fn() -> Status + Send + Sync + 'static {
        let shared = Arc::clone(&self.shared);
        move || status::of(&shared)
    }

    /// Runs until it is stopped. `reach` connects to the node's arbiter; `tell` gets what an
    /// operator should know, a line each. How many requests were cut off at the end.
    ///
    /// # Errors
    /// An instance listens where this frontend does; the runtime's, or the listener's.
    pub fn run(
        self,
        listener: Listener,
        reach: Reach,
        tell: impl Fn(&str) + Send + Sync + 'static,
    ) -> io::Result<usize> {
        let own = listener.address();
        if self.shared.addresses.contains(&own) {
            let why = format!("the instance at {own} would be this frontend itself");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        let tell: Arc<dyn Fn(&str) + Send + Sync> = Arc::new(tell);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .max_blocking_threads(LOOKUPS)
            .build()?;
        let asking = waker::start(Arc::clone(&self.shared), reach, Arc::clone(&tell))?;
        let stopped = self.stop.0.subscribe();
        let cut = runtime.block_on(async {
            let deciding = tokio::spawn(decide(Arc::clone(&self.shared)));
            let cut = hall::serve(&self.shared, listener, stopped, &tell).await;
            deciding.abort();
            cut
        });
        runtime.shutdown_background();
        asking.stop();
        cut
    }
}

/// Looks at the load, again and again.
async fn decide(shared: Arc<Shared>) {
    let mut ticks = tokio::time::interval(DECIDE);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        shared.gate.lock().decide(shared.now_s());
    }
}

#[cfg(test)]
mod tests;

#[cfg(test)]
mod tests_words {
    use super::*;

    #[test]
    fn addresses_are_read_and_nonsense_is_refused() {
        for good in [
            "127.0.0.1:8000",
            "[::1]:80",
            "node-3.example:1",
            "localhost:0",
        ] {
            let address: Address = good.parse().unwrap();
            assert_eq!(address, Address::Tcp(good.to_owned()));
            assert_eq!(address.to_string(), good);
        }
        let socket: Address = "unix:/run/a".parse().unwrap();
        assert_eq!(socket, Address::Unix("/run/a".into()));
        assert_eq!(socket.to_string(), "unix:/run/a");
        for (written, read) in [
            ("Node-3.Example:0080", "node-3.example:80"),
            ("[0:0::0:1]:80", "[::1]:80"),
            ("unix:/run//./a", "unix:/run/a"),
        ] {
            let address: Address = written.parse().unwrap();
            assert_eq!(address.to_string(), read);
        }
        let long = format!("unix:/{}", "x".repeat(107));
        for wrong in [
            "",
            ":80",
            "host",
            "host:",
            "host:99999",
            "host:-1",
            "host:+1",
            "http://a:1",
            "a b:1",
            "[::1:80",
            "[nonsense]:80",
            "unix:",
            "unix:relative",
            &long,
        ] {
            let error = wrong.parse::<Address>().unwrap_err();
            assert!(error.contains("write "), "{wrong}: {error}");
        }
    }

    fn options(instances: &[(&str, &str)]) -> Options {
        let instance = |(name, at): &(&str, &str)| ((*name).to_owned(), at.parse().unwrap());
        Options {
            terms: Terms {
                sla: policy::standbys::Sla {
                    within_s: 1.0,
                    level: 0.99,
                    burst: 1.0,
                },
                frontends: 1,
                history_s: 60,
                concurrency: 1,
                least: 0,
                most: 8,
                prune: false,
            },
            instances: instances.iter().map(instance).collect(),
            timeout: Duration::from_secs(30),
            drain: Duration::from_secs(30),
            connections: 8,
            body_bytes: 1 << 20,
            bodies_bytes: 1 << 20,
            retry: false,
        }
    }

    #[test]
    fn instances_differ_by_name_and_place() {
        for (wrong, word) in [
            (&[][..], "0 instances"),
            (&[("a", "h:1"), ("a", "h:2")], "`a`"),
            (&[("a", "h:1"), ("b", "H:01")], "h:1"),
        ] {
            let error = Prepared::new(options(wrong)).err().expect("wrong");
            assert!(error.contains(word), "{error}");
        }
        let good = Prepared::new(options(&[("b", "h:1"), ("a", "h:2")]))
            .ok()
            .unwrap();
        assert_eq!(good.shared.addresses[0], Address::Tcp("h:2".into()));
    }

    #[test]
    fn a_socket_that_was_left_behind_is_replaced_and_one_in_use_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let address = Address::Unix(path.clone());
        testbed::dead_socket(&path);
        let listener = Listener::bind(&address).unwrap();
        assert!(Listener::bind(&address).is_err(), "somebody listens");
        assert_eq!(listener.address(), address);
        drop(listener);
        assert!(!path.exists());
        std::fs::write(&path, "a file").unwrap();
        assert!(Listener::bind(&address).is_err());
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "a file");
    }
}
