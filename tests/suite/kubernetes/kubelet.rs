//! A kubelet for tests: what one does with plugins, and nothing else.
//!
//! It serves registrations and the list of pods, as the real one does, calls plugins as 1.36 does,
//! and, like the real one, removes what lies in the directory of device plugins when it starts.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use kubernetes::grpc::{self, Answering, Call, Client, Service};
use kubernetes::proto::device_plugin as v1beta1;
use kubernetes::proto::dra as v1;
use kubernetes::proto::plugin_registration::{PluginInfo, RegistrationStatus};
use kubernetes::proto::pod_resources::{
    ContainerDevices, ContainerResources, LIST, ListRequest, ListResponse, PodResources,
};
use kubernetes::{RESOURCE, sockets};
use prost::Message as _;
use tests::{PATIENCE, wait_until};
use tokio::sync::oneshot;

use super::raw;

#[derive(Default)]
struct Seen {
    registrations: Vec<v1beta1::RegisterRequest>,
    pods: Vec<PodResources>,
}

struct Server(Arc<Mutex<Seen>>);

impl Service for Server {
    fn answer(self: Arc<Self>, path: String, call: Call) -> Answering {
        match path.as_str() {
            v1beta1::REGISTER => grpc::unary(call, move |asked: v1beta1::RegisterRequest| {
                self.0.lock().unwrap().registrations.push(asked);
                Ok(v1beta1::Empty {})
            }),
            LIST => grpc::unary(call, move |_: ListRequest| {
                let pod_resources = self.0.lock().unwrap().pods.clone();
                Ok(ListResponse { pod_resources })
            }),
            path => grpc::unknown(path),
        }
    }
}

/// One kubelet; it ends when dropped, and its sockets stay as those of a killed one do.
pub struct Kubelet {
    dir: PathBuf,
    seen: Arc<Mutex<Seen>>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Kubelet {
    /// Starts one in a directory, which may have had another one before.
    pub fn start(dir: &Path) -> Self {
        for name in [
            "device-plugins",
            "pod-resources",
            "plugins_registry",
            "plugins",
        ] {
            fs::create_dir_all(dir.join(name)).expect("a directory");
        }
        for entry in fs::read_dir(dir.join("device-plugins")).expect("a directory") {
            fs::remove_file(entry.expect("an entry").path()).expect("a socket of before");
        }
        let seen = Arc::<Mutex<Seen>>::default();
        let listeners: Vec<_> = ["device-plugins", "pod-resources"]
            .map(|name| sockets::listen(&dir.join(name).join("kubelet.sock")).expect("a socket"))
            .into();
        let (stop, stopped) = oneshot::channel();
        let server: Arc<dyn Service> = Arc::new(Server(Arc::clone(&seen)));
        let thread = std::thread::spawn(move || {
            runtime().block_on(async move {
                for listener in listeners {
                    listener.set_nonblocking(true).expect("a socket");
                    let listener = tokio::net::UnixListener::from_std(listener).expect("a socket");
                    tokio::spawn(grpc::serve(
                        listener,
                        Arc::clone(&server),
                        grpc::CONNECTIONS,
                    ));
                }
                let _ = stopped.await;
            });
        });
        Self {
            dir: dir.to_owned(),
            seen,
            stop: Some(stop),
            thread: Some(thread),
        }
    }

    /// Waits for the registration of the device plugin, and returns it.
    pub fn registration(&self) -> v1beta1::RegisterRequest {
        wait_until("a plugin registers", || {
            self.seen.lock().unwrap().registrations.last().cloned()
        })
    }

    /// Says that a pod has these units, and that no other has any.
    pub fn has(&self, pod: &str, units: &[String]) {
        self.containers_have(pod, &[("c", units)]);
    }

    /// Says that containers of a pod have these units, and that no other pod has any.
    pub fn containers_have(&self, pod: &str, units: &[(&str, &[String])]) {
        let containers = units.iter().map(|(name, units)| ContainerResources {
            name: (*name).into(),
            devices: vec![ContainerDevices {
                resource_name: RESOURCE.into(),
                device_ids: units.to_vec(),
            }],
        });
        self.seen.lock().unwrap().pods = vec![PodResources {
            name: pod.into(),
            namespace: "default".into(),
            containers: containers.collect(),
        }];
    }

    /// Removes the socket by which it says who has what.
    pub fn stops_listing(&self) {
        let socket = self.dir.join("pod-resources/kubelet.sock");
        fs::remove_file(socket).expect("its socket");
    }

    /// Says that no pod has any.
    pub fn has_none(&self) {
        self.seen.lock().unwrap().pods.clear();
    }

    /// The device plugin's socket.
    pub fn endpoint(&self) -> PathBuf {
        self.dir
            .join("device-plugins")
            .join(self.registration().endpoint)
    }

    /// What a call of the device plugin is answered.
    pub fn plugin<Q, A>(&self, path: &'static str, question: Q) -> Result<A, String>
    where
        Q: prost::Message + Default + 'static,
        A: prost::Message + Default + 'static,
    {
        ask(&self.endpoint(), path, question)
    }

    /// Asks for units of one container.
    pub fn allocate(&self, units: &[String]) -> Result<v1beta1::ContainerAllocateResponse, String> {
        let container = v1beta1::ContainerAllocateRequest {
            devices_ids: units.to_vec(),
        };
        let request = v1beta1::AllocateRequest {
            container_requests: vec![container],
        };
        let answer: v1beta1::AllocateResponse = self.plugin(v1beta1::ALLOCATE, request)?;
        let mut containers = answer.container_responses;
        containers
            .pop()
            .ok_or_else(|| "no container in the answer".into())
    }

    /// Watches the devices until they are as wanted, on one stream.
    pub fn watch(&self, what: &str, is_wanted: impl Fn(&[v1beta1::Device]) -> bool) -> Vec<String> {
        let endpoint = self.endpoint();
        runtime().block_on(async {
            let mut plugin = Client::connect(&endpoint)
                .await
                .expect("the plugin's socket");
            let question = v1beta1::Empty {};
            let watched = plugin.watch(v1beta1::LIST_AND_WATCH, question, PATIENCE);
            let mut watched = watched.await.expect("a stream");
            loop {
                let next = tokio::time::timeout(PATIENCE, watched.message()).await;
                let list: v1beta1::ListAndWatchResponse = next
                    .unwrap_or_else(|_| panic!("{what}: not in time"))
                    .expect("the stream goes on")
                    .expect("the stream does not end");
                if is_wanted(&list.devices) {
                    return list.devices.into_iter().map(|device| device.id).collect();
                }
            }
        })
    }

    /// What the socket in `plugins_registry` says, asked with this authority; and it hears that
    /// it is registered.
    pub fn find(&self, authority: &str) -> PluginInfo {
        let socket = self.dir.join("plugins_registry/sublet.dev-reg.sock");
        // The socket of a driver that was killed is there as well, and nobody listens at it.
        let info = wait_until("the driver answers", || {
            let path = kubernetes::proto::plugin_registration::INFO;
            raw::call(&socket, authority, path, &[]).ok()
        });
        let status = RegistrationStatus {
            plugin_registered: true,
            error: String::new(),
        };
        let path = kubernetes::proto::plugin_registration::STATUS;
        raw::call(&socket, authority, path, &status.encode_to_vec()).expect("an answer");
        PluginInfo::decode(&*info).expect("an information")
    }

    /// Prepares one claim.
    pub fn prepare(&self, claim: &v1::Claim) -> Result<Vec<v1::Device>, String> {
        let claims = v1::Claims {
            claims: vec![claim.clone()],
        };
        let mut answer: v1::PrepareResponse = ask(&self.dra(), v1::PREPARE, claims)?;
        let prepared = answer
            .claims
            .remove(&claim.uid)
            .expect("an answer to this claim");
        match prepared.error.as_str() {
            "" => Ok(prepared.devices),
            error => Err(error.to_owned()),
        }
    }

    /// Takes that back.
    pub fn unprepare(&self, claim: &v1::Claim) -> Result<(), String> {
        let claims = v1::Claims {
            claims: vec![claim.clone()],
        };
        let mut answer: v1::UnprepareResponse = ask(&self.dra(), v1::UNPREPARE, claims)?;
        let done = answer
            .claims
            .remove(&claim.uid)
            .expect("an answer to this claim");
        match done.error.as_str() {
            "" => Ok(()),
            error => Err(error.to_owned()),
        }
    }

    /// The driver's socket.
    pub fn dra(&self) -> PathBuf {
        self.dir.join("plugins/sublet.dev/dra.sock")
    }
}

impl Drop for Kubelet {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            testbed::join(thread);
        }
    }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime")
}

/// One call, with `localhost` for an authority, as 1.26 and later have it.
pub fn ask<Q, A>(socket: &Path, path: &'static str, question: Q) -> Result<A, String>
where
    Q: prost::Message + Default + 'static,
    A: prost::Message + Default + 'static,
{
    runtime().block_on(async {
        let connected = tokio::time::timeout(PATIENCE, Client::connect(socket)).await;
        let mut client = connected
            .map_err(|_| "not in time".to_owned())?
            .map_err(|error| error.to_string())?;
        let answer = client.ask(path, question, Duration::from_secs(60)).await;
        answer.map_err(|status| status.message().to_owned())
    })
}
