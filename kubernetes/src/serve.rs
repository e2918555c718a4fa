//! The processes beside a kubelet: sockets where it looks for them, and what is done again and
//! again.
//!
//! A kubelet that starts removes the sockets of device plugins and makes its own anew. So both are
//! looked at all the time: a socket of ours that is gone is made again, and a kubelet with another
//! socket is another kubelet, which is registered with.

use std::collections::BTreeSet;
use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::net::UnixListener;
use tokio::task::{JoinHandle, spawn_blocking};

use crate::device_plugin::Plugin;
use crate::dra::Driver;
use crate::grpc::{self, Service};
use crate::nri::{self, session};
use crate::proto::device_plugin as v1beta1;
use crate::proto::plugin_registration::{DRA_PLUGIN, PluginInfo, RegistrationStatus};
use crate::slices::Slice;
use crate::sockets::{self, SocketError};
use crate::{DRIVER, RESOURCE, proto, registration};

/// How often sockets are looked at.
const LOOKS: Duration = Duration::from_millis(250);
/// How often the arbiter's devices and what pods have are looked at.
const TENDS: Duration = Duration::from_secs(1);
/// TIMEOUT: a kubelet dials the plugin before it answers.
const REGISTRATION: Duration = Duration::from_secs(20);

/// How long a container runtime that has gone is left alone, at first and at most.
const AWAY: [Duration; 2] = [Duration::from_millis(250), Duration::from_secs(5)];

/// Prints what is wrong once, as long as it stays so.
#[derive(Debug, Default)]
struct Said(BTreeSet<String>);

impl Said {
    /// All that is wrong now.
    fn say(&mut self, wrong: Vec<String>) {
        let now: BTreeSet<String> = wrong.into_iter().collect();
        for line in now.difference(&self.0) {
            crate::say!("{line}");
        }
        self.0 = now;
    }
}

/// What is done again and again beside the looks at sockets, which do not wait for it: an arbiter
/// or an API server may be slow. The next begins when the last one has ended.
#[derive(Default)]
struct Tending {
    task: Option<JoinHandle<Vec<String>>>,
    begun: Option<Instant>,
    said: Said,
}

impl Tending {
    async fn look<F>(&mut self, tend: impl FnOnce() -> F)
    where
        F: Future<Output = Vec<String>> + Send + 'static,
    {
        match &mut self.task {
            Some(task) if !task.is_finished() => return,
            Some(task) => self.said.say(task.await.unwrap_or_default()),
            None => {}
        }
        self.task = None;
        if self.begun.is_none_or(|begun| begun.elapsed() >= TENDS) {
            self.begun = Some(Instant::now());
            self.task = Some(tokio::spawn(tend()));
        }
    }
}

/// A socket that is served, and made again where it is gone.
struct Served {
    path: PathBuf,
    service: Arc<dyn Service>,
    identity: Option<(u64, u64, i64, i64)>,
    task: Option<JoinHandle<()>>,
}

impl Served {
    fn new(path: PathBuf, service: Arc<dyn Service>) -> Self {
        Self {
            path,
            service,
            identity: None,
            task: None,
        }
    }

    /// True where it was made again.
    fn look(&mut self) -> Result<bool, SocketError> {
        let ended = self.task.as_ref().is_none_or(JoinHandle::is_finished);
        if !ended && self.identity.is_some() && sockets::identity(&self.path) == self.identity {
            return Ok(false);
        }
        if let Some(task) = self.task.take() {
            task.abort();
        }
        let io = |error| SocketError::Io {
            path: self.path.clone(),
            error,
        };
        let listener = sockets::listen(&self.path)?;
        listener.set_nonblocking(true).map_err(io)?;
        let listener = UnixListener::from_std(listener).map_err(io)?;
        self.identity = sockets::identity(&self.path);
        let service = Arc::clone(&self.service);
        self.task = Some(tokio::spawn(async move {
            let error = grpc::serve(listener, service, grpc::CONNECTIONS).await;
            crate::say!("a socket takes no connections any more: {error}");
        }));
        Ok(true)
    }
}

fn runtime() -> io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        // A call waits for the arbiter or the API server; sixteen of them are many.
        .max_blocking_threads(16)
        .build()
}

/// Serves the device plugin beside the kubelet whose directory of device plugins this is.
///
/// # Errors
/// It cannot begin. Once it has begun it ends with its process.
pub fn device_plugin(dir: &Path, plugin: Plugin) -> io::Result<()> {
    let endpoint = format!("{DRIVER}.sock");
    let kubelet = dir.join("kubelet.sock");
    let plugin = Arc::new(plugin);
    let service: Arc<dyn Service> = plugin.clone();
    let mut socket = Served::new(dir.join(&endpoint), service);
    let (mut said, mut tending) = (Said::default(), Tending::default());
    runtime()?.block_on(async {
        let mut registered = None;
        loop {
            tending.look(|| Arc::clone(&plugin).tend()).await;
            let mut wrong = Vec::new();
            match socket.look() {
                Ok(true) => registered = None,
                Ok(false) => {}
                Err(error) => wrong.push(error.to_string()),
            }
            let now = sockets::identity(&kubelet);
            if now.is_none() {
                wrong.push(format!("no kubelet listens at {} yet", kubelet.display()));
            } else if wrong.is_empty() && now != registered {
                match register(&kubelet, &endpoint).await {
                    Ok(()) => {
                        crate::say!("registered {RESOURCE} at {}", kubelet.display());
                        registered = now;
                    }
                    Err(error) => wrong.push(format!(
                        "the kubelet at {} does not take {RESOURCE}: {error}",
                        kubelet.display()
                    )),
                }
            }
            said.say(wrong);
            tokio::time::sleep(LOOKS).await;
        }
    })
}

async fn register(kubelet: &Path, endpoint: &str) -> Result<(), String> {
    let request = v1beta1::RegisterRequest {
        version: v1beta1::VERSION.into(),
        endpoint: endpoint.into(),
        resource_name: RESOURCE.into(),
        options: Some(v1beta1::DevicePluginOptions {
            pre_start_required: false,
            get_preferred_allocation_available: true,
        }),
    };
    let connected = tokio::time::timeout(REGISTRATION, grpc::Client::connect(kubelet)).await;
    let mut client = connected
        .map_err(|_| "it does not answer".to_owned())?
        .map_err(|error| error.to_string())?;
    let answer: Result<v1beta1::Empty, _> =
        client.ask(v1beta1::REGISTER, request, REGISTRATION).await;
    answer
        .map(drop)
        .map_err(|status| status.message().to_owned())
}

/// Answers the container runtime whose NRI socket this is, and again where that starts anew.
///
/// # Errors
/// It cannot begin. Once it has begun it ends with its process.
pub fn nri(socket: &Path, name: &session::Name, plugin: nri::Plugin) -> io::Result<()> {
    let plugin = Arc::new(plugin);
    runtime()?.block_on(async {
        let tended = Arc::clone(&plugin);
        tokio::spawn(async move {
            let mut tending = Tending::default();
            loop {
                let plugin = Arc::clone(&tended);
                let tend = || {
                    let tended = spawn_blocking(move || plugin.tend(Instant::now()));
                    async move { tended.await.unwrap_or_default() }
                };
                tending.look(tend).await;
                tokio::time::sleep(LOOKS).await;
            }
        });
        let [first, longest] = AWAY;
        let (mut said, mut wait) = (Said::default(), first);
        loop {
            let ended = session::serve(socket, name, &plugin).await;
            if plugin.is_synchronized() {
                (said, wait) = (Said::default(), first);
            }
            said.say(vec![format!(
                "the runtime at {}: {ended}; it is tried again",
                socket.display()
            )]);
            tokio::time::sleep(wait).await;
            wait = (wait * 2).min(longest);
        }
    })
}

/// Serves the DRA driver beside the kubelet whose directory this is.
///
/// # Errors
/// It cannot begin. Once it has begun it ends with its process.
pub fn dra(kubelet: &Path, node: &str, driver: Driver) -> io::Result<()> {
    let own = kubelet.join("plugins").join(DRIVER);
    std::fs::create_dir_all(&own)?;
    let endpoint = own.join("dra.sock");
    let driver = Arc::new(driver);
    let service: Arc<dyn Service> = driver.clone();
    let mut socket = Served::new(endpoint.clone(), service);
    let info = PluginInfo {
        r#type: DRA_PLUGIN.into(),
        name: DRIVER.into(),
        endpoint: endpoint.to_string_lossy().into_owned(),
        supported_versions: vec![proto::dra::VERSION.into()],
    };
    let mut door = Door {
        path: kubelet
            .join("plugins_registry")
            .join(format!("{DRIVER}-reg.sock")),
        info,
        identity: None,
        thread: None,
    };
    let slice = Arc::new(Mutex::new(Slice::default()));
    let (mut said, mut tending) = (Said::default(), Tending::default());
    runtime()?.block_on(async {
        loop {
            let mut wrong = Vec::new();
            // The driver's socket first: a kubelet dials it as soon as it is registered.
            match socket.look() {
                Ok(_) => wrong.extend(door.look().err().map(|error| error.to_string())),
                Err(error) => wrong.push(error.to_string()),
            }
            said.say(wrong);
            let tend = || {
                let (driver, slice, node) =
                    (Arc::clone(&driver), Arc::clone(&slice), node.to_owned());
                let tended = spawn_blocking(move || tend(&driver, &mut slice.lock(), &node));
                async move { tended.await.unwrap_or_default() }
            };
            tending.look(tend).await;
            tokio::time::sleep(LOOKS).await;
        }
    })
}

/// What is done again and again for a driver; what could not be.
fn tend(driver: &Driver, slice: &mut Slice, node: &str) -> Vec<String> {
    let mut wrong = Vec::new();
    match driver.shares.node.devices() {
        // An arbiter without devices has just begun, or its driver is being looked at: what the
        // scheduler knows stays.
        Ok(devices) if devices.is_empty() => {
            wrong.push("the node's arbiter knows no device".into());
        }
        Ok(devices) => match slice.publish(&driver.api, node, &devices, Instant::now()) {
            Ok(true) => crate::say!("published {} of {node}", count(devices.len())),
            Ok(false) => {}
            Err(error) => wrong.push(error),
        },
        Err(error) => wrong.push(error.to_string()),
    }
    match driver.shares.tend() {
        Ok(failed) => wrong.extend(failed),
        Err(error) => wrong.push(error.to_string()),
    }
    wrong
}

fn count(devices: usize) -> String {
    match devices {
        1 => "1 device".into(),
        n => format!("{n} devices"),
    }
}

/// The socket by which a kubelet finds the driver.
struct Door {
    path: PathBuf,
    info: PluginInfo,
    identity: Option<(u64, u64, i64, i64)>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Door {
    fn look(&mut self) -> Result<(), SocketError> {
        let ended = self.thread.as_ref().is_none_or(|it| it.is_finished());
        if !ended && self.identity.is_some() && sockets::identity(&self.path) == self.identity {
            return Ok(());
        }
        let listener = sockets::listen(&self.path)?;
        self.identity = sockets::identity(&self.path);
        let info = self.info.clone();
        let thread = std::thread::Builder::new().spawn(move || {
            let on_status: registration::OnStatus = Arc::new(|status: RegistrationStatus| {
                if status.plugin_registered {
                    crate::say!("the kubelet has registered {DRIVER}");
                } else {
                    let why: String = status.error.chars().take(400).collect();
                    crate::say!("the kubelet does not take {DRIVER}: {why}");
                }
            });
            let error = registration::serve(&listener, &info, &on_status);
            crate::say!("the registration takes no connections any more: {error}");
        });
        self.thread = Some(thread.map_err(|error| SocketError::Io {
            path: self.path.clone(),
            error,
        })?);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_look_keeps_nobody_waiting_and_has_no_second_beside_it() {
        let begun = std::cell::Cell::new(0);
        let mut tending = Tending::default();
        runtime().unwrap().block_on(async {
            for _ in 0..3 {
                let slow = || {
                    begun.set(begun.get() + 1);
                    std::future::pending()
                };
                tending.look(slow).await;
                tending.begun = None;
            }
        });
        assert_eq!(begun.get(), 1);
    }

    #[test]
    fn a_door_whose_thread_has_ended_is_opened_anew() {
        let dir = tempfile::tempdir().unwrap();
        let mut door = Door {
            path: dir.path().join("reg.sock"),
            info: PluginInfo::default(),
            identity: None,
            thread: None,
        };
        door.look().unwrap();
        let first = door.identity;
        door.look().unwrap();
        assert_eq!(door.identity, first, "it is served");
        let ended = std::thread::spawn(|| ());
        while !ended.is_finished() {
            std::thread::yield_now();
        }
        door.thread = Some(ended);
        door.look().unwrap();
        assert_ne!(door.identity, first);
        assert!(std::os::unix::net::UnixStream::connect(&door.path).is_ok());
    }
}
