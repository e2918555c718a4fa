//! The NRI plugin: a container whose pod asks for GPU memory by an annotation gets a job of the
//! node's arbiter before it is made, and all that its processes need to be part of that job.
//!
//! The runtime waits for the answer, and an error makes it give the container up. So a wrong
//! annotation, an arbiter that refuses or is not there, and an answer that would come too late are
//! errors: such a container does not start. A resize that the arbiter refuses is an error as well,
//! and quota and share stay as they were. Only where no plugin is registered does a runtime start a
//! container without asking; the next plugin names those that it finds.

pub mod session;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use prost::Message as _;

use crate::MEMORY_ANNOTATION;
use crate::container::{Basis, Resources, Want};
use crate::node::{Device, JOB_VARIABLE, TOKEN_VARIABLE};
use crate::proto::nri;
use crate::records::{Pod, Record, Share};
use crate::shares::{ShareError, Shares};

/// TIMEOUT: what runtimes allow a plugin unless they say otherwise.
const PATIENCE: Duration = Duration::from_secs(2);
/// Asked of runtimes that let a plugin ask for it: an arbiter may look a driver's devices up first.
const WANTED: Duration = Duration::from_secs(10);
/// TIMEOUT: a runtime makes a container within seconds of the answer. One that it has given up by
/// then has no use for a job.
const UNCONFIRMED: Duration = Duration::from_secs(120);
/// Most containers and pods of a runtime.
const MOST: usize = 65_536;
/// Longest id of a container: runtimes' have 64 characters.
const ID_BYTES: usize = 128;
/// Characters of a pod's and a container's name in the name of a job.
const NAME_CHARS: usize = 20;

const TOO_SLOW: &str = "the node's arbiter took longer than the runtime waits; try again";

/// gRPC's codes.
const INVALID: i32 = 3;
const DEADLINE: i32 = 4;
const EXHAUSTED: i32 = 8;
const UNIMPLEMENTED: i32 = 12;
const INTERNAL: i32 = 13;
const UNAVAILABLE: i32 = 14;

/// The plugin.
pub struct Plugin {
    shares: Arc<Shares>,
    state: Mutex<State>,
    /// The runtime has said which containers there are.
    synchronized: AtomicBool,
}

#[derive(Default)]
struct State {
    /// What came of a list in several calls.
    pods: Vec<nri::PodSandbox>,
    containers: Vec<nri::Container>,
    /// Containers that the runtime has not said that it has made, by key.
    unconfirmed: BTreeMap<String, Instant>,
    /// Containers that are over, and whose shares could not be undone yet.
    over: BTreeSet<String>,
}

impl State {
    /// The runtime has said which containers there are. One that it has asked about before, on a
    /// connection that has ended, may get its job after this: that is given up in its time.
    fn listed(&mut self, is_there: impl Fn(&str) -> bool) {
        self.unconfirmed.retain(|key, _| !is_there(key));
    }
}

fn refuse(code: i32, why: impl Display) -> nri::Status {
    nri::Status {
        code,
        message: format!("sublet: {why}"),
    }
}

fn decode<M: prost::Message + Default>(payload: &[u8]) -> Result<M, nri::Status> {
    M::decode(payload).map_err(|error| refuse(INVALID, format!("what came is no message: {error}")))
}

impl Plugin {
    pub fn new(shares: Arc<Shares>) -> Self {
        Self {
            shares,
            state: Mutex::default(),
            synchronized: AtomicBool::new(false),
        }
    }

    /// A connection begins: what another one has said counts no more.
    fn begin(&self) {
        let mut state = self.state.lock();
        (state.pods, state.containers) = (Vec::new(), Vec::new());
        self.synchronized.store(false, Ordering::Relaxed);
    }

    /// Whether the runtime has said which containers there are.
    pub fn is_synchronized(&self) -> bool {
        self.synchronized.load(Ordering::Relaxed)
    }

    /// Answers a call. After the deadline nobody waits for the answer, so nothing stays of it.
    fn answer(
        &self,
        method: &str,
        payload: &[u8],
        deadline: Instant,
    ) -> Result<Vec<u8>, nri::Status> {
        let event = |number: i32| 1 << (number - 1);
        match method {
            "Configure" => Ok(nri::ConfigureResponse {
                events: event(nri::CREATE_CONTAINER)
                    | event(nri::POST_CREATE_CONTAINER)
                    | event(nri::UPDATE_CONTAINER)
                    | event(nri::STOP_CONTAINER)
                    | event(nri::REMOVE_CONTAINER),
                // CAST: ten thousand.
                request_timeout: WANTED.as_millis() as i64,
            }
            .encode_to_vec()),
            "Synchronize" => {
                let more = self.synchronize(decode(payload)?)?;
                Ok(nri::SynchronizeResponse { more }.encode_to_vec())
            }
            "CreateContainer" => {
                let asked: nri::ContainerRequest = decode(payload)?;
                let (pod, container) = both(asked.pod, asked.container)?;
                let adjust = self.create(&pod, &container, deadline);
                let adjust = adjust.inspect_err(|status| {
                    crate::say!(
                        "{} does not start: {}",
                        title(&pod, &container),
                        status.message
                    );
                })?;
                Ok(nri::CreateContainerResponse { adjust }.encode_to_vec())
            }
            "UpdateContainer" => {
                let asked: nri::UpdateContainerRequest = decode(payload)?;
                let (pod, container) = both(asked.pod, asked.container)?;
                let resources = asked.linux_resources.unwrap_or_default();
                self.update(&container, &Resources::read(&resources))
                    .inspect_err(|status| {
                        let title = title(&pod, &container);
                        crate::say!("{title} is not resized: {}", status.message);
                    })?;
                Ok(Vec::new())
            }
            // Those of their own are of runtimes that are newer than `StateChange` for them.
            "PostCreateContainer" | "StopContainer" | "RemoveContainer" => {
                let asked: nri::ContainerRequest = decode(payload)?;
                let event = match method {
                    "PostCreateContainer" => nri::POST_CREATE_CONTAINER,
                    _ => nri::STOP_CONTAINER,
                };
                self.changed(event, asked.container);
                Ok(Vec::new())
            }
            "StateChange" => {
                let event: nri::StateChangeEvent = decode(payload)?;
                self.changed(event.event, event.container);
                Ok(Vec::new())
            }
            "Shutdown" => Ok(Vec::new()),
            method => {
                let short: String = method.chars().take(100).collect();
                Err(refuse(UNIMPLEMENTED, format!("there is no {short} here")))
            }
        }
    }

    /// What a container gets; `None`: it asks for nothing of ours.
    fn create(
        &self,
        pod: &nri::PodSandbox,
        container: &nri::Container,
        deadline: Instant,
    ) -> Result<Option<nri::ContainerAdjustment>, nri::Status> {
        let want = Want::read(&pod.annotations, &container.name);
        let Some(want) = want.map_err(|error| refuse(INVALID, error))? else {
            return Ok(None);
        };
        let key = key(&container.id)?;
        if container.env.iter().any(|v| v.starts_with(TOKEN_VARIABLE)) {
            return Err(refuse(
                INVALID,
                format!(
                    "{MEMORY_ANNOTATION} asks for a share, and the container has one by the device plugin or a claim (SUBLET_TOKEN is set): remove one of the two"
                ),
            ));
        }
        let devices = self.shares.node.devices();
        let devices = devices.map_err(|error| refuse(UNAVAILABLE, error))?;
        let device = choose(&want, &devices).map_err(|why| refuse(INVALID, why))?;
        let record = wanted(&key, pod, container, &want, device);
        let mut state = self.state.lock();
        state.unconfirmed.insert(key.clone(), Instant::now());
        state.over.remove(&key);
        drop(state);
        let held = self.shares.hold(record).map_err(refusal);
        let given = held.and_then(|record| {
            if Instant::now() > deadline {
                return Err(refuse(DEADLINE, TOO_SLOW));
            }
            self.adjustment(&record)
                .map_err(|why| refuse(UNAVAILABLE, why))
        });
        if given.is_err() {
            self.forget(&key);
        }
        given.map(Some)
    }

    fn adjustment(&self, record: &Record) -> Result<nri::ContainerAdjustment, String> {
        let mut adjust = nri::ContainerAdjustment::default();
        let node = &self.shares.node;
        for share in &record.shares {
            let Some(job) = &share.job else { continue };
            let edits = node.edits(share, job);
            adjust.env.extend(edits.env.iter().filter_map(|variable| {
                let (key, value) = variable.split_once('=')?;
                Some(nri::KeyValue {
                    key: key.to_owned(),
                    value: value.to_owned(),
                })
            }));
            let text = |path: &Path| path.to_string_lossy().into_owned();
            adjust.mounts.extend(edits.mounts.iter().map(|mount| {
                let options = mount.options.iter().map(|option| (*option).to_owned());
                nri::Mount {
                    destination: text(&mount.container_path),
                    r#type: "bind".into(),
                    source: text(&mount.host_path),
                    options: options.collect(),
                }
            }));
            let devices = edits.device_nodes.iter().map(|one| device(&one.path));
            let devices: Vec<_> = devices.collect::<Result<_, _>>()?;
            if !devices.is_empty() {
                adjust.linux = Some(nri::LinuxContainerAdjustment { devices });
            }
            // The GPU itself; what is ours needs no runtime that knows CDI.
            if let Some(kind) = &node.gpu_kind {
                let name = format!("{kind}={}", share.device);
                adjust.cdi_devices.push(nri::CdiDevice { name });
            }
        }
        Ok(adjust)
    }

    /// Has quota and share follow what a container has now.
    fn update(&self, container: &nri::Container, now: &Resources) -> Result<(), nri::Status> {
        let key = key(&container.id)?;
        let Some(record) = self.shares.all().into_iter().find(|r| r.key == key) else {
            return Ok(());
        };
        let (Some(basis), [part]) = (&record.basis, &*record.shares) else {
            return Ok(());
        };
        let (memory_bytes, share) = basis.resized(now);
        if let Some(share) = share.filter(|share| *share > 1.0) {
            return Err(refuse(
                INVALID,
                format!(
                    "with these processors the share would be {share}, and a GPU has 1: ask for less; a share of {} stays in force",
                    part.share
                ),
            ));
        }
        let device = |share: &Share| {
            let devices = self.shares.node.devices().unwrap_or_default();
            devices.into_iter().find(|one| one.uuid == share.device)
        };
        if let Some(bytes) = memory_bytes
            && bytes != part.memory_bytes
            && let Some(device) = device(part)
            && bytes > device.usable_bytes
        {
            let has = device.usable_bytes;
            return Err(refuse(
                INVALID,
                format!(
                    "with this memory the quota would be {bytes} bytes, and {} has {has}: ask for less; {} bytes stay in force",
                    device.uuid, part.memory_bytes
                ),
            ));
        }
        let share = share.unwrap_or(part.share);
        self.shares
            .resize(&key, record.made, memory_bytes.map(|b| b.max(1)), share)
            .map_err(refusal)
    }

    fn changed(&self, event: i32, container: Option<nri::Container>) {
        let Some(key) = container.and_then(|container| key(&container.id).ok()) else {
            return;
        };
        match event {
            nri::POST_CREATE_CONTAINER => {
                self.state.lock().unconfirmed.remove(&key);
            }
            nri::STOP_CONTAINER | nri::REMOVE_CONTAINER => self.forget(&key),
            _ => {}
        }
    }

    /// Undoes what a container has. What cannot be undone now is tried again.
    fn forget(&self, key: &str) {
        self.state.lock().unconfirmed.remove(key);
        if let Err(error) = self.shares.release(key) {
            crate::say!("{key}: {error}; it is tried again");
            self.state.lock().over.insert(key.to_owned());
        }
    }

    /// Takes the runtime's list, or a part of it; true: others follow.
    fn synchronize(&self, said: nri::SynchronizeRequest) -> Result<bool, nri::Status> {
        let mut state = self.state.lock();
        state.pods.extend(said.pods);
        state.containers.extend(said.containers);
        if state.pods.len() + state.containers.len() > MOST {
            (state.pods, state.containers) = (Vec::new(), Vec::new());
            let why = format!("more than {MOST} pods and containers");
            return Err(refuse(EXHAUSTED, why));
        }
        if said.more {
            return Ok(true);
        }
        let pods = std::mem::take(&mut state.pods);
        let containers = std::mem::take(&mut state.containers);
        drop(state);
        let pods: BTreeMap<&str, &nri::PodSandbox> =
            pods.iter().map(|pod| (pod.id.as_str(), pod)).collect();
        let lives = |container: &&nri::Container| container.state != nri::STOPPED;
        let containers = containers.iter().filter(lives);
        let containers: BTreeMap<String, &nri::Container> = containers
            .filter_map(|one| Some((key(&one.id).ok()?, one)))
            .collect();
        self.state.lock().listed(|key| containers.contains_key(key));
        let mut governed = BTreeSet::new();
        for record in self.shares.all() {
            match containers.get(&record.key) {
                Some(container) if has(container, &record) => {
                    governed.insert(record.key);
                }
                // It is gone, or was made without what it was to be given.
                _ => self.forget(&record.key),
            }
        }
        for (key, container) in &containers {
            let Some(pod) = pods.get(&*container.pod_sandbox_id) else {
                continue;
            };
            let asks = !matches!(Want::read(&pod.annotations, &container.name), Ok(None));
            if asks && !governed.contains(key) {
                crate::say!(
                    "{} was made while no plugin was asked: it has no quota and no share until it is made anew",
                    title(pod, container)
                );
            }
        }
        self.synchronized.store(true, Ordering::Relaxed);
        Ok(false)
    }

    /// What is done again and again; what could not be.
    pub fn tend(&self, now: Instant) -> Vec<String> {
        let mut state = self.state.lock();
        let is_given_up = |since: &Instant| now.duration_since(*since) > UNCONFIRMED;
        let waiting = state.unconfirmed.iter();
        let given_up = waiting.filter(|(_, since)| is_given_up(since));
        let keys: BTreeSet<String> = given_up.map(|(key, _)| key.clone()).collect();
        let keys: BTreeSet<String> = keys
            .union(&std::mem::take(&mut state.over))
            .cloned()
            .collect();
        drop(state);
        for key in keys {
            self.forget(&key);
        }
        let mut wrong = Vec::new();
        match self.shares.tend() {
            // An arbiter learns a driver's devices from a job: the first container's runtime does
            // not wait so long.
            Ok(failed) => {
                wrong.extend(failed);
                wrong.extend(self.shares.node.devices().err().map(|e| e.to_string()));
            }
            Err(error) => wrong.push(error.to_string()),
        }
        wrong
    }
}

fn both(
    pod: Option<nri::PodSandbox>,
    container: Option<nri::Container>,
) -> Result<(nri::PodSandbox, nri::Container), nri::Status> {
    pod.zip(container)
        .ok_or_else(|| refuse(INVALID, "a call without a pod or without a container"))
}

/// Names the record of a container. An id names files, so it is nothing but what runtimes' ids
/// consist of.
fn key(id: &str) -> Result<String, nri::Status> {
    let plain = id.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
    if plain && (1..=ID_BYTES).contains(&id.len()) {
        return Ok(format!("container-{id}"));
    }
    let short: String = id.chars().take(80).collect();
    Err(refuse(INVALID, format!("invalid container id `{short}`")))
}

/// For people.
fn title(pod: &nri::PodSandbox, container: &nri::Container) -> String {
    let title = format!("{}/{}/{}", pod.namespace, pod.name, container.name);
    title.chars().take(253).collect()
}

/// The device that a container is to have a part of.
fn choose<'a>(want: &Want, devices: &'a [Device]) -> Result<&'a Device, String> {
    let device = match (&want.device, devices) {
        (Some(uuid), _) => devices.iter().find(|one| one.uuid == *uuid).ok_or_else(|| {
            format!(
                "{}: this node has no GPU `{uuid}`",
                crate::DEVICE_ANNOTATION
            )
        }),
        (None, [one]) => Ok(one),
        (None, []) => Err("the node's arbiter knows no GPU".to_owned()),
        (None, several) => Err(format!(
            "this node has {} GPUs: name one by its UUID in {}",
            several.len(),
            crate::DEVICE_ANNOTATION
        )),
    }?;
    if want.memory_bytes > device.usable_bytes {
        return Err(format!(
            "{MEMORY_ANNOTATION} asks for {} bytes, and {} has {}: ask for less",
            want.memory_bytes, device.uuid, device.usable_bytes
        ));
    }
    Ok(device)
}

fn wanted(
    key: &str,
    pod: &nri::PodSandbox,
    container: &nri::Container,
    want: &Want,
    device: &Device,
) -> Record {
    let short = |text: &str| -> String {
        let plain = text.chars().map(|c| match c {
            c if c.is_ascii_alphanumeric() => c.to_ascii_lowercase(),
            _ => '-',
        });
        plain.take(NAME_CHARS).collect()
    };
    let id: String = container.id.chars().take(8).collect();
    let linux = container.linux.clone().unwrap_or_default();
    Record {
        key: key.to_owned(),
        title: title(pod, container),
        shares: vec![Share {
            name: format!("{}-{}-{id}", short(&pod.name), short(&container.name)),
            device: device.uuid.clone(),
            memory_bytes: want.memory_bytes,
            share: want.share,
            ..Share::default()
        }],
        pod: Some(Pod {
            namespace: pod.namespace.clone(),
            name: pod.name.clone(),
            uid: pod.uid.clone(),
        }),
        basis: Some(Basis {
            follows: want.follows,
            memory_bytes: want.memory_bytes,
            share: want.share,
            had: Resources::read(&linux.resources.unwrap_or_default()),
        }),
        ..Record::default()
    }
}

/// Whether a container was made with what its record says, as far as the runtime tells.
fn has(container: &nri::Container, record: &Record) -> bool {
    let named = |variable: &String| {
        let name = variable.strip_prefix(JOB_VARIABLE);
        let mut jobs = record.shares.iter().filter_map(|share| share.job.as_ref());
        name.is_some_and(|name| jobs.any(|job| job.name == name))
    };
    container.env.is_empty() || container.env.iter().any(named)
}

fn device(path: &Path) -> Result<nri::LinuxDevice, String> {
    let wrong = |why: &dyn Display| format!("the device node {}: {why}", path.display());
    let there = std::fs::metadata(path).map_err(|error| wrong(&error))?;
    if !there.file_type().is_char_device() {
        return Err(wrong(&"it is no character device"));
    }
    let number = |part: u64| i64::try_from(part).unwrap_or(0);
    Ok(nri::LinuxDevice {
        path: path.to_string_lossy().into_owned(),
        r#type: "c".into(),
        major: number(nix::sys::stat::major(there.rdev())),
        minor: number(nix::sys::stat::minor(there.rdev())),
    })
}

fn refusal(error: ShareError) -> nri::Status {
    let code = if error.is_refusal() {
        EXHAUSTED
    } else {
        UNAVAILABLE
    };
    refuse(code, error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::container::Follows;

    fn want(memory_bytes: u64, device: Option<&str>) -> Want {
        Want {
            memory_bytes,
            share: 0.0,
            device: device.map(ToOwned::to_owned),
            follows: Follows::default(),
        }
    }

    #[test]
    fn a_container_has_a_part_of_the_device_that_it_names_or_of_the_only_one() {
        let device = |uuid: &str| Device {
            index: 0,
            uuid: uuid.into(),
            model: String::new(),
            usable_bytes: 8,
        };
        let two = [device("GPU-0"), device("GPU-1")];
        assert_eq!(choose(&want(8, None), &two[..1]), Ok(&two[0]));
        assert_eq!(choose(&want(8, Some("GPU-1")), &two), Ok(&two[1]));
        for (want, devices, words) in [
            (want(9, None), &two[..1], "and GPU-0 has 8"),
            (want(1, None), &two[..], "has 2 GPUs"),
            (want(1, Some("GPU-2")), &two[..], "no GPU `GPU-2`"),
            (want(1, None), &[][..], "knows no GPU"),
        ] {
            let error = choose(&want, devices).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn a_job_that_comes_after_the_runtimes_list_is_given_up_in_its_time() {
        let mut state = State::default();
        for key in ["made", "never made"] {
            state.unconfirmed.insert(key.to_owned(), Instant::now());
        }
        state.listed(|key| key == "made");
        let left: Vec<&String> = state.unconfirmed.keys().collect();
        assert_eq!(left, ["never made"]);
    }

    #[test]
    fn an_id_that_would_leave_the_directory_is_refused() {
        assert_eq!(key("0a1").unwrap(), "container-0a1");
        for id in ["", "../x", "a/b", "a.b", "a\0", &"x".repeat(129)] {
            assert!(key(id).is_err(), "{id:?}");
        }
    }

    #[test]
    fn a_device_node_is_known_by_its_numbers() {
        let null = device(Path::new("/dev/null")).unwrap();
        assert_eq!((&*null.r#type, null.major, null.minor), ("c", 1, 3));
        assert!(device(Path::new("/dev")).is_err());
        assert!(device(Path::new("/dev/no-such-node")).is_err());
    }
}
