//! The processes beside a kubelet: sockets where it looks for them, and what is done again and
//! again.
//!
//! A kubelet that starts removes the sockets of device plugins and makes its own anew. So both are
//! looked at all the time: a socket of ours that is gone is made again, and a kubelet with another
//! socket is another kubelet, which is registered with.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::net::UnixListener;
use tokio::task::{JoinHandle, spawn_blocking};

use crate::device_plugin::Plugin;
use crate::dra::Driver;
use crate::grpc::{self, Service};
use crate::proto::device_plugin as v1beta1;
use crate::proto::plugin_registration::{DRA_PLUGIN, PluginInfo, RegistrationStatus};
use crate::sockets::{self, SocketError};
use crate::{DRIVER, RESOURCE, proto, registration, slices};

/// How often sockets are looked at.
const LOOKS: Duration = Duration::from_millis(250);
/// How often the arbiter's devices and what pods have are looked at: each so many looks.
const TENDS: u32 = 4;
/// TIMEOUT: a kubelet dials the plugin before it answers.
const REGISTRATION: Duration = Duration::from_secs(20);

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
            let error = grpc::serve(listener, service).await;
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
    let (mut said, mut tended) = (Said::default(), Said::default());
    runtime()?.block_on(async {
        let mut registered = None;
        let mut looks = 0;
        loop {
            if looks % TENDS == 0 {
                let plugin = Arc::clone(&plugin);
                let owners = plugin.kubelet.owners().await;
                let wrong = spawn_blocking(move || {
                    let mut wrong: Vec<String> = plugin.look().into_iter().collect();
                    wrong.extend(plugin.publish());
                    match plugin.shares.tend() {
                        Ok(failed) => wrong.extend(failed),
                        Err(error) => wrong.push(error.to_string()),
                    }
                    if let Some(owners) = owners {
                        wrong.extend(plugin.follow(&owners));
                    }
                    wrong
                });
                tended.say(wrong.await.unwrap_or_default());
            }
            looks = looks.wrapping_add(1);
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
    };
    let (mut said, mut tended) = (Said::default(), Said::default());
    runtime()?.block_on(async {
        let mut looks = 0;
        loop {
            let mut wrong = Vec::new();
            // The driver's socket first: a kubelet dials it as soon as it is registered.
            match socket.look() {
                Ok(_) => wrong.extend(door.look().err().map(|error| error.to_string())),
                Err(error) => wrong.push(error.to_string()),
            }
            said.say(wrong);
            if looks % TENDS == 0 {
                let (driver, node) = (Arc::clone(&driver), node.to_owned());
                let wrong = spawn_blocking(move || tend(&driver, &node));
                tended.say(wrong.await.unwrap_or_default());
            }
            looks = looks.wrapping_add(1);
            tokio::time::sleep(LOOKS).await;
        }
    })
}

/// What is done again and again for a driver; what could not be.
fn tend(driver: &Driver, node: &str) -> Vec<String> {
    let mut wrong = Vec::new();
    match driver.shares.node.devices() {
        // An arbiter without devices has just begun, or its driver is being looked at: what the
        // scheduler knows stays.
        Ok(devices) if devices.is_empty() => {
            wrong.push("the node's arbiter knows no device".into());
        }
        Ok(devices) => match slices::publish(&driver.api, node, &devices) {
            Ok(true) => crate::say!("published {} of {node}", count(devices.len())),
            Ok(false) => {}
            Err(error) => wrong.push(error.to_string()),
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
}

impl Door {
    fn look(&mut self) -> Result<(), SocketError> {
        if self.identity.is_some() && sockets::identity(&self.path) == self.identity {
            return Ok(());
        }
        let listener = sockets::listen(&self.path)?;
        self.identity = sockets::identity(&self.path);
        let info = self.info.clone();
        std::thread::spawn(move || {
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
        Ok(())
    }
}
