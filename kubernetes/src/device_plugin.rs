//! The device plugin (`v1beta1`): memory of devices as units of a GiB that a kubelet counts.
//!
//! A kubelet says when a container gets units, and never when they come back. So what a container
//! had is undone when its units are given to another one, or when its pod is over ([`Follower`]).

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};
use tonic::Status;

use crate::api::Patch;
use crate::cdi::Edits;
use crate::follow::Follower;
use crate::grpc::{self, Answering, Call, Service};
use crate::node::{Device, GIB};
use crate::picture::{DEVICES_ANNOTATION, NodeDevice};
use crate::pods::{Cluster, Kubelet};
use crate::proto::device_plugin as v1beta1;
use crate::records::{Record, Share};
use crate::shares::{ShareError, Shares};
use crate::units;

/// How a container learns of its share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Delivery {
    /// The answer names a CDI device (Kubernetes 1.29 or later). A container that starts again is
    /// given what is in force then.
    Cdi,
    /// Variables, mounts and devices are in the answer itself.
    Plain,
}

/// The plugin.
pub struct Plugin {
    pub shares: Arc<Shares>,
    pub delivery: Delivery,
    pub kubelet: Kubelet,
    follower: Follower,
    view: watch::Sender<View>,
    /// What the node's annotation was made to say last.
    published: Mutex<Option<String>>,
}

/// Devices, and whether they can be used.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct View {
    devices: Vec<(Device, bool)>,
}

impl View {
    fn healthy(&self) -> Vec<Device> {
        let healthy = self.devices.iter().filter(|(_, healthy)| *healthy);
        healthy.map(|(device, _)| device.clone()).collect()
    }

    fn list(&self) -> v1beta1::ListAndWatchResponse {
        let devices = self.devices.iter().flat_map(|(device, healthy)| {
            let health = if *healthy {
                v1beta1::HEALTHY
            } else {
                v1beta1::UNHEALTHY
            };
            units::of(device).map(move |id| v1beta1::Device {
                id,
                health: health.to_owned(),
            })
        });
        v1beta1::ListAndWatchResponse {
            devices: devices.collect(),
        }
    }
}

impl Plugin {
    pub fn new(
        shares: Arc<Shares>,
        delivery: Delivery,
        kubelet: Kubelet,
        cluster: Option<Cluster>,
    ) -> Self {
        Self {
            follower: Follower::new(Arc::clone(&shares), cluster),
            shares,
            delivery,
            kubelet,
            published: Mutex::default(),
            view: watch::Sender::new(View::default()),
        }
    }

    /// What is done again and again; what could not be.
    pub async fn tend(self: Arc<Self>) -> Vec<String> {
        let plugin = Arc::clone(&self);
        let tended = tokio::task::spawn_blocking(move || {
            let mut wrong: Vec<String> = plugin.look().into_iter().collect();
            wrong.extend(plugin.publish());
            match plugin.shares.tend() {
                Ok(failed) => wrong.extend(failed),
                Err(error) => wrong.push(error.to_string()),
            }
            (wrong, plugin.shares.all())
        });
        let (mut wrong, before) = tended.await.unwrap_or_default();
        let owners = self.kubelet.owners().await;
        let followed = tokio::task::spawn_blocking(move || {
            self.follower.follow(&before, owners, Instant::now())
        });
        wrong.extend(followed.await.unwrap_or_default());
        wrong
    }

    /// Looks at the arbiter's devices. One that it no longer has, or that it cannot be asked about,
    /// is not healthy; what is on it goes on. Says what is wrong.
    pub fn look(&self) -> Option<String> {
        let found = self.shares.node.devices();
        let now = found.as_ref().map_or(&[][..], Vec::as_slice);
        self.view.send_if_modified(|view| {
            let mut devices: Vec<(Device, bool)> =
                now.iter().map(|device| (device.clone(), true)).collect();
            let gone = view
                .devices
                .iter()
                .filter(|(known, _)| !devices.iter().any(|(device, _)| device.uuid == known.uuid));
            let gone: Vec<_> = gone.map(|(device, _)| (device.clone(), false)).collect();
            devices.extend(gone);
            let changed = view.devices != devices;
            view.devices = devices;
            changed
        });
        found.err().map(|error| error.to_string())
    }

    /// Writes the node's devices where the scheduler extender reads them. Says what is wrong.
    pub fn publish(&self) -> Option<String> {
        let Cluster { api, node } = self.follower.cluster.as_ref()?;
        let devices = self.view.borrow().healthy().into_iter();
        let devices: Vec<NodeDevice> = devices
            .map(|device| NodeDevice {
                uuid: device.uuid,
                gib: device.usable_bytes / GIB,
            })
            .collect();
        let text = serde_json::to_string(&devices).unwrap_or_default();
        let mut published = self.published.lock();
        if published.as_ref() == Some(&text) {
            return None;
        }
        let body = serde_json::json!({"metadata": {"annotations": {DEVICES_ANNOTATION: text}}});
        match api.patch(&format!("/api/v1/nodes/{node}"), Patch::Merge, &body) {
            Ok(_) => {
                *published = Some(text);
                None
            }
            Err(error) => Some(error.to_string()),
        }
    }

    /// Makes what a kubelet has given a container.
    fn allocate(
        &self,
        request: &v1beta1::AllocateRequest,
    ) -> Result<v1beta1::AllocateResponse, Status> {
        let devices = self.view.borrow().healthy();
        let mut records: Vec<Record> = Vec::new();
        for container in &request.container_requests {
            let made = units::ask(&container.devices_ids, &devices)
                .map_err(|error| Status::invalid_argument(error.to_string()))
                .and_then(|asked| self.shares.hold(wanted(asked)).map_err(refusal));
            match made {
                Ok(record) => records.push(record),
                Err(status) => {
                    for record in records {
                        if let Err(error) = self.shares.release_if(&record.key, record.made) {
                            crate::say!("{}: {error}", record.key);
                        }
                    }
                    return Err(status);
                }
            }
        }
        let responses = records.iter().map(|record| self.response(record));
        Ok(v1beta1::AllocateResponse {
            container_responses: responses.collect(),
        })
    }

    fn response(&self, record: &Record) -> v1beta1::ContainerAllocateResponse {
        let mut response = v1beta1::ContainerAllocateResponse::default();
        for share in &record.shares {
            let Some(job) = &share.job else { continue };
            match self.delivery {
                Delivery::Cdi => {
                    let names = self.shares.node.cdi_ids(share).into_iter();
                    let devices = names.map(|name| v1beta1::CdiDevice { name });
                    response.cdi_devices.extend(devices);
                }
                Delivery::Plain => plain(&mut response, self.shares.node.edits(share, job)),
            }
        }
        response
    }

    /// Units for a container: of the device that the extender chose for such a pod, else of the one
    /// that they fit most tightly.
    fn prefer(
        &self,
        asked: &v1beta1::ContainerPreferredAllocationRequest,
        chosen: &[(String, u64)],
    ) -> Vec<String> {
        let size = usize::try_from(asked.allocation_size).unwrap_or(0);
        let fits = |(_, gib): &&(String, u64)| usize::try_from(*gib).is_ok_and(|gib| gib == size);
        for (device, _) in chosen.iter().filter(fits) {
            let of_device = asked
                .available_device_ids
                .iter()
                .filter(|unit| unit.rsplit_once("::").is_some_and(|(of, _)| of == device));
            let of_device: Vec<String> = of_device.cloned().collect();
            let units = units::preferred(&of_device, &asked.must_include_device_ids, size);
            if !units.is_empty() {
                return units;
            }
        }
        let must = &asked.must_include_device_ids;
        units::preferred(&asked.available_device_ids, must, size)
    }
}

fn wanted(asked: units::Asked) -> Record {
    let key = units::key(&asked);
    Record {
        title: key.clone(),
        shares: vec![Share {
            name: key.clone(),
            device: asked.device,
            memory_bytes: asked.memory_bytes,
            ..Share::default()
        }],
        key,
        units: asked.units,
        ..Record::default()
    }
}

fn refusal(error: ShareError) -> Status {
    if error.is_refusal() {
        Status::resource_exhausted(error.to_string())
    } else {
        Status::unavailable(error.to_string())
    }
}

fn plain(response: &mut v1beta1::ContainerAllocateResponse, edits: Edits) {
    for variable in edits.env {
        if let Some((name, value)) = variable.split_once('=') {
            response.envs.insert(name.to_owned(), value.to_owned());
        }
    }
    let text = |path: PathBuf| path.to_string_lossy().into_owned();
    for mount in edits.mounts {
        response.mounts.push(v1beta1::Mount {
            container_path: text(mount.container_path),
            read_only: mount.options.contains(&"ro"),
            host_path: text(mount.host_path),
        });
    }
    for node in edits.device_nodes {
        let path = text(node.path);
        response.devices.push(v1beta1::DeviceSpec {
            container_path: path.clone(),
            host_path: path,
            permissions: "rw".into(),
        });
    }
}

impl Service for Plugin {
    fn answer(self: Arc<Self>, path: String, call: Call) -> Answering {
        match path.as_str() {
            v1beta1::OPTIONS => grpc::unary(call, |_: v1beta1::Empty| {
                Ok(v1beta1::DevicePluginOptions {
                    pre_start_required: false,
                    get_preferred_allocation_available: true,
                })
            }),
            v1beta1::LIST_AND_WATCH => grpc::streaming(call, move |_: v1beta1::Empty| {
                let (sender, receiver) = mpsc::channel(1);
                let mut view = self.view.subscribe();
                view.mark_changed();
                tokio::spawn(async move {
                    loop {
                        tokio::select! {
                            () = sender.closed() => return,
                            changed = view.changed() => if changed.is_err() { return },
                        }
                        let list = view.borrow_and_update().list();
                        if sender.send(Ok(list)).await.is_err() {
                            return;
                        }
                    }
                });
                receiver
            }),
            v1beta1::PREFERRED => {
                grpc::unary(call, move |asked: v1beta1::PreferredAllocationRequest| {
                    let (owners, records) = (self.follower.owners(), self.shares.all());
                    let chosen = self.follower.cluster.as_ref();
                    let chosen = chosen.map(|cluster| cluster.chosen(&owners, &records));
                    // Without an answer the tightest device does.
                    let chosen = chosen.and_then(Result::ok).unwrap_or_default();
                    let responses = asked.container_requests.iter().map(|one| {
                        v1beta1::ContainerPreferredAllocationResponse {
                            device_ids: self.prefer(one, &chosen),
                        }
                    });
                    Ok(v1beta1::PreferredAllocationResponse {
                        container_responses: responses.collect(),
                    })
                })
            }
            v1beta1::ALLOCATE => grpc::unary(call, move |request| self.allocate(&request)),
            v1beta1::PRE_START => grpc::unary(call, |_: v1beta1::PreStartContainerRequest| {
                Ok(v1beta1::Empty {})
            }),
            path => grpc::unknown(path),
        }
    }
}
