//! The device plugin (`v1beta1`): memory of devices as units of a GiB that a kubelet counts.
//!
//! A kubelet says when a container gets units, and never when they come back. So what a container
//! had is undone when its units are given to another one, or when the kubelet's list of who has
//! what no longer has them. A part of the time comes from the pod's annotation, and follows it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};
use tonic::Status;

use crate::api::{Api, Patch};
use crate::cdi::{self, Edits};
use crate::grpc::{self, Answering, Call, Service};
use crate::node::{Device, GIB};
use crate::picture::{self, DEVICES_ANNOTATION, NodeDevice};
use crate::pods::{self, Kubelet, Pod};
use crate::proto::device_plugin as v1beta1;
use crate::records::{Record, Share};
use crate::shares::{ShareError, Shares};
use crate::{DEVICE_ANNOTATION, units};

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
    /// For annotations; `None`: there is no API server to ask.
    pub api: Option<Api>,
    pub kubelet: Kubelet,
    /// Name of the node, to say there which devices it has; `None`: nobody learns it.
    pub node: Option<String>,
    view: watch::Sender<View>,
    /// What the node's annotation was made to say last.
    published: Mutex<Option<String>>,
    /// Allocations that the kubelet's list had, and what their pods asked for last.
    owners: Mutex<BTreeMap<String, (Pod, Option<String>)>>,
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
        api: Option<Api>,
        kubelet: Kubelet,
        node: Option<String>,
    ) -> Self {
        Self {
            shares,
            delivery,
            api,
            kubelet,
            node,
            published: Mutex::default(),
            view: watch::Sender::new(View::default()),
            owners: Mutex::default(),
        }
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
        let (api, node) = (self.api.as_ref()?, self.node.as_ref()?);
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
                        if let Err(error) = self.shares.release(&record.key) {
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
                Delivery::Cdi => response.cdi_devices.push(v1beta1::CdiDevice {
                    name: cdi::Folder::id(&share.name),
                }),
                Delivery::Plain => plain(&mut response, self.shares.node.edits(share, job)),
            }
        }
        response
    }

    /// Undoes what containers had that the kubelet no longer knows, and has shares follow their
    /// pods' annotations. An allocation that the kubelet has not listed yet is left alone: it lists
    /// a container after it has allocated its devices. Says what could not be done.
    pub fn follow(&self, owners: &BTreeMap<String, Pod>) -> Vec<String> {
        let mut failed = Vec::new();
        let mut seen = self.owners.lock();
        let records = self.shares.all();
        seen.retain(|key, _| records.iter().any(|record| record.key == *key));
        for record in &records {
            let owner = record.units.iter().find_map(|unit| owners.get(unit));
            match owner {
                Some(pod) => {
                    let entry = seen
                        .entry(record.key.clone())
                        .or_insert_with(|| (pod.clone(), None));
                    if entry.0 != *pod {
                        *entry = (pod.clone(), None);
                    }
                    if let Some(error) = self.follow_annotation(record, entry) {
                        failed.push(error);
                    }
                }
                None if seen.contains_key(&record.key) => match self.shares.release(&record.key) {
                    Ok(()) => drop(seen.remove(&record.key)),
                    Err(error) => failed.push(format!("{}: {error}", record.title)),
                },
                None => {}
            }
        }
        failed
    }

    fn follow_annotation(
        &self,
        record: &Record,
        (pod, last): &mut (Pod, Option<String>),
    ) -> Option<String> {
        let api = self.api.as_ref()?;
        let failed = |error: &dyn std::fmt::Display| Some(format!("{}: {error}", pod.title()));
        let annotations = match pods::annotations(api, pod) {
            Ok(annotations) => annotations?,
            // It is asked again.
            Err(error) => return failed(&error),
        };
        let share = record.shares.first()?;
        // The kubelet may have taken another device than the one that was chosen.
        if annotations
            .get(DEVICE_ANNOTATION)
            .and_then(|at| at.as_str())
            != Some(&share.device)
        {
            let device = [(DEVICE_ANNOTATION, share.device.as_str())];
            if let Err(error) = pods::annotate(api, pod, &device) {
                return failed(&error);
            }
        }
        let asked = pods::share_asked(&annotations);
        let now = format!("{asked:?}");
        if last.as_ref() == Some(&now) {
            return None;
        }
        let before = share.share;
        let said = match asked {
            Ok(None) if before == 0.0 => {
                *last = Some(now);
                return None;
            }
            Ok(share) => match self.shares.set_share(&record.key, share.unwrap_or(0.0)) {
                Ok(()) => match share {
                    Some(share) => format!("a share of {share} is in force"),
                    None => "no share is promised".into(),
                },
                Err(error) if error.is_refusal() => {
                    format!("refused: {error}; a share of {before} stays in force")
                }
                Err(error) => return failed(&error),
            },
            Err(error) => format!("refused: {error}; a share of {before} stays in force"),
        };
        match pods::annotate(api, pod, &[(pods::STATUS_ANNOTATION, &said)]) {
            Ok(()) => {
                *last = Some(now);
                None
            }
            Err(error) => failed(&error),
        }
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
        complete: false,
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
                    let chosen = self.api.as_ref().zip(self.node.as_ref());
                    let chosen = chosen.map(|(api, node)| picture::chosen(api, node));
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
