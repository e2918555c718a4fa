//! The node: its arbiter's devices, and what a container needs to reach that.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use control::paths::{PathError, RuntimeDir};
use control::{
    ArbiterStatus, Change, Class, Client, ClientError, DeviceSelector, JobSettings, JobSpec,
    MemLimit,
};

use crate::cdi::{DeviceNode, Edits, Folder, Mount};
use crate::holder::{HoldError, Holder, Task};
use crate::records::{Job, Share};

/// TIMEOUT: far above any answer's time on a loaded host.
const ANSWER: Duration = Duration::from_secs(10);
/// One GiB: the unit of the device plugin, and the step of a claim.
pub const GIB: u64 = 1 << 30;
/// By these a container's processes are part of a job and know its name.
pub const TOKEN_VARIABLE: &str = "SUBLET_TOKEN=";
pub const JOB_VARIABLE: &str = "SUBLET_JOB=";
/// Where the preload library finds itself in every container with a device of sublet's.
const LIBRARY: &str = "/opt/sublet/libsublet.so";
/// Longest name of a device in a pool.
const LABEL: usize = 63;

/// The node.
#[derive(Debug)]
pub struct Node {
    pub dir: RuntimeDir,
    /// To start holders with.
    pub program: PathBuf,
    /// `libsublet.so`, at the same path on the host and in containers.
    pub library: PathBuf,
    /// The driver that jobs open.
    pub driver: PathBuf,
    /// The simulated device's libraries and variables; `None`: devices are real.
    pub simulated: Option<Simulated>,
    /// Device nodes that every container gets.
    pub device_nodes: Vec<PathBuf>,
    /// CDI kind of the GPUs themselves, as their own toolkit has listed them; none where ours
    /// brings all that a container needs.
    pub gpu_kind: Option<String>,
    /// The file that names the library to every program of a container (`/etc/ld.so.preload`).
    pub preload: PathBuf,
}

/// The simulated device, as a container needs it.
#[derive(Debug)]
pub struct Simulated {
    pub libraries: PathBuf,
    /// Where the device's state is.
    pub state: Option<PathBuf>,
    /// Variables of it.
    pub variables: Vec<(String, OsString)>,
}

/// A device of the arbiter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    pub index: u32,
    pub uuid: String,
    pub model: String,
    /// What jobs can have, in whole GiB.
    pub usable_bytes: u64,
}

impl Device {
    /// Its name in a pool: by its UUID, since a driver counts devices anew at each start. A DNS
    /// label, as Kubernetes wants it.
    pub fn pool_name(&self) -> String {
        let letters = self.uuid.chars().take(LABEL).map(|c| match c {
            c if c.is_ascii_alphanumeric() => c.to_ascii_lowercase(),
            _ => '-',
        });
        letters.collect::<String>().trim_matches('-').to_owned()
    }
}

/// Why nothing is known of the node's devices.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    #[error(transparent)]
    Place(#[from] PathError),
    #[error(transparent)]
    Arbiter(#[from] ClientError),
    #[error(transparent)]
    Probe(#[from] HoldError),
    #[error(
        "{} is not UTF-8, which CDI files are: install or place it elsewhere", .0.display()
    )]
    NotText(PathBuf),
}

impl Node {
    /// All that the arbiter says.
    ///
    /// # Errors
    /// [`NodeError`]
    pub fn status(&self) -> Result<ArbiterStatus, NodeError> {
        self.dir.verify(nix::unistd::geteuid().as_raw())?;
        Ok(Client::connect(&self.dir.api_socket(), ANSWER)?.status()?)
    }

    /// Devices in what an arbiter says.
    pub fn devices_in(&self, status: &ArbiterStatus) -> Vec<Device> {
        let ours = status
            .devices
            .iter()
            .filter(|device| device.simulated == self.simulated.is_some());
        let devices = ours.map(|device| Device {
            index: device.index,
            uuid: device.uuid.clone(),
            model: device.name.clone(),
            usable_bytes: device.total_bytes.saturating_sub(device.reserved_bytes) / GIB * GIB,
        });
        devices.filter(|device| device.usable_bytes > 0).collect()
    }

    /// The node's devices. An arbiter learns a driver's devices when a job comes that opens it; one
    /// that knows none yet is asked by such a job, which is gone again when this returns.
    ///
    /// # Errors
    /// [`NodeError`]
    pub fn devices(&self) -> Result<Vec<Device>, NodeError> {
        let known = self.devices_in(&self.status()?);
        if !known.is_empty() {
            return Ok(known);
        }
        let settings = JobSettings {
            class: Some(Class::Opportunistic),
            ..JobSettings::default()
        };
        let task = Task {
            api_socket: self.dir.api_socket(),
            spec: self.spec(String::new(), "looks for devices", settings),
            record: PathBuf::new(),
        };
        let _asks = Holder::start(&self.program, &task)?;
        Ok(self.devices_in(&self.status()?))
    }

    fn spec(&self, name: String, title: &str, settings: JobSettings) -> JobSpec {
        JobSpec {
            name,
            settings,
            command: vec!["kubernetes".into(), title.into()],
            driver: self.driver.clone(),
            simulated: self.simulated.is_some(),
            any_user: true,
            ..JobSpec::default()
        }
    }

    /// Registers the job of a share.
    ///
    /// # Errors
    /// [`HoldError`]
    pub fn hold(&self, title: &str, share: &Share, record: &Path) -> Result<Holder, HoldError> {
        let settings = JobSettings {
            mem: Some(MemLimit::Bytes(share.memory_bytes)),
            share: (share.share > 0.0).then_some(share.share),
            class: Some(class(share.share)),
            device: Some(vec![DeviceSelector::Uuid(share.device.clone())]),
            ..JobSettings::default()
        };
        let task = Task {
            api_socket: self.dir.api_socket(),
            spec: self.spec(share.name.clone(), title, settings),
            record: record.to_owned(),
        };
        Holder::start(&self.program, &task)
    }

    /// Changes the part of the time that a job has. Without one (0) it is opportunistic: it has
    /// what the others leave.
    ///
    /// # Errors
    /// [`HoldError`]
    pub fn set_share(&self, job: &str, share: f64) -> Result<(), HoldError> {
        self.set(job, None, share)
    }

    /// Changes a job's quota, where there is another one, and its part of the time.
    ///
    /// # Errors
    /// [`HoldError`]; both are as they were then.
    pub fn set(&self, job: &str, memory_bytes: Option<u64>, share: f64) -> Result<(), HoldError> {
        let settings = JobSettings {
            mem: memory_bytes.map(MemLimit::Bytes),
            share: (share > 0.0).then_some(share),
            class: Some(class(share)),
            ..JobSettings::default()
        };
        let changed = Client::connect(&self.dir.api_socket(), ANSWER)
            .and_then(|mut client| client.set(job, Change::from(settings)));
        match changed {
            Ok(_) => Ok(()),
            Err(ClientError::Refused(refusal)) => Err(HoldError::Refused(refusal.to_string())),
            Err(error) => Err(HoldError::Unreachable(error.to_string())),
        }
    }

    /// Whether all that containers are given can be written in CDI's files.
    ///
    /// # Errors
    /// [`NodeError::NotText`]
    pub fn check(&self) -> Result<(), NodeError> {
        let containers = self.dir.containers_dir();
        let mut all = vec![&self.library, &self.driver, &self.preload, &containers];
        all.extend(&self.device_nodes);
        if let Some(simulated) = &self.simulated {
            all.push(&simulated.libraries);
            all.extend(&simulated.state);
        }
        match all.into_iter().find(|path| path.to_str().is_none()) {
            Some(path) => Err(NodeError::NotText(path.clone())),
            None => Ok(()),
        }
    }

    /// The CDI devices that a container with a share is to have.
    pub fn cdi_ids(&self, share: &Share) -> Vec<String> {
        let gpu = self.gpu_kind.as_ref();
        let gpu = gpu.map(|kind| format!("{kind}={}", share.device));
        gpu.into_iter().chain([Folder::id(&share.name)]).collect()
    }

    /// What a container gets with a share.
    pub fn edits(&self, share: &Share, job: &Job) -> Edits {
        // The arbiter makes its socket anew there: nothing else of its directory is shown.
        let containers = self.dir.containers_dir();
        let socket = containers.join("channel.sock");
        let mut env = vec![
            format!("SUBLET_SOCKET={}", socket.display()),
            format!("{TOKEN_VARIABLE}{}", job.token),
            format!("{JOB_VARIABLE}{}", job.name),
            "SUBLET_ON_REFUSAL=closed".into(),
            format!("NVIDIA_VISIBLE_DEVICES={}", share.device),
            format!("CUDA_VISIBLE_DEVICES={}", share.device),
        ];
        // Not by `LD_PRELOAD`: that would take the place of the pod's own.
        let preload = Mount {
            container_path: "/etc/ld.so.preload".into(),
            ..mount(&self.preload)
        };
        // By this file a program that has lost its environment knows that its container has limits.
        let known = Mount {
            container_path: LIBRARY.into(),
            ..mount(&self.library)
        };
        let mut mounts = vec![mount(&self.library), known, mount(&containers), preload];
        if let Some(simulated) = &self.simulated {
            env.push(format!("SUBLET_DRIVER={}", self.driver.display()));
            env.push(format!("LD_LIBRARY_PATH={}", simulated.libraries.display()));
            env.extend(
                simulated
                    .variables
                    .iter()
                    .map(|(name, value)| format!("{name}={}", value.to_string_lossy())),
            );
            mounts.push(mount(&simulated.libraries));
            mounts.extend(simulated.state.iter().map(|state| Mount {
                options: vec!["rw", "bind", "nosuid", "nodev"],
                ..mount(state)
            }));
        }
        Edits {
            env,
            mounts,
            device_nodes: self
                .device_nodes
                .iter()
                .map(|path| DeviceNode { path: path.clone() })
                .collect(),
        }
    }
}

/// A share of 0 promises nothing: such a job runs in what the others leave.
fn class(share: f64) -> Class {
    if share > 0.0 {
        Class::Guaranteed
    } else {
        Class::Opportunistic
    }
}

fn mount(path: &Path) -> Mount {
    Mount {
        host_path: path.to_owned(),
        container_path: path.to_owned(),
        options: vec!["ro", "bind", "nosuid", "nodev"],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_called_by_its_uuid_as_a_label() {
        let name = |uuid: &str| {
            let device = Device {
                index: 3,
                uuid: uuid.into(),
                model: String::new(),
                usable_bytes: GIB,
            };
            device.pool_name()
        };
        assert_eq!(name("GPU-8A3f0c11-00"), "gpu-8a3f0c11-00");
        assert_eq!(name("MIG-a/b.c/"), "mig-a-b-c");
        assert_eq!(name(&"x".repeat(99)).len(), LABEL);
    }
}
