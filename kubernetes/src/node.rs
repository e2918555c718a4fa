//! The node: its arbiter's devices, and what a container needs to reach that.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use control::paths::{PathError, RuntimeDir};
use control::{
    ArbiterStatus, Change, Class, Client, ClientError, DeviceSelector, JobSettings, JobSpec,
    MemLimit,
};

use crate::cdi::{DeviceNode, Edits, Mount};
use crate::holder::{HoldError, Holder, Task};
use crate::records::{Job, Share};

/// TIMEOUT: far above any answer's time on a loaded host.
const ANSWER: Duration = Duration::from_secs(10);
/// One GiB: the unit of the device plugin, and the step of a claim.
pub const GIB: u64 = 1 << 30;

/// The node.
#[derive(Debug)]
pub struct Node {
    pub dir: RuntimeDir,
    /// What containers are given of the arbiter's directory: the channel's socket and nothing else.
    pub pods_dir: PathBuf,
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
    /// Its name in a pool.
    pub fn pool_name(&self) -> String {
        format!("gpu-{}", self.index)
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
    #[error("{}: {error}", .path.display())]
    Io { path: PathBuf, error: io::Error },
}

impl Node {
    /// All that the arbiter says.
    ///
    /// # Errors
    /// [`NodeError`]
    pub fn status(&self) -> Result<ArbiterStatus, NodeError> {
        self.dir.verify(nix::unistd::geteuid().as_raw())?;
        Ok(Client::connect(&self.dir.control_socket(), ANSWER)?.status()?)
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
            control_socket: self.dir.control_socket(),
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
            control_socket: self.dir.control_socket(),
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
        let settings = JobSettings {
            share: (share > 0.0).then_some(share),
            class: Some(class(share)),
            ..JobSettings::default()
        };
        let changed = Client::connect(&self.dir.control_socket(), ANSWER)
            .and_then(|mut client| client.set(job, Change::from(settings)));
        match changed {
            Ok(_) => Ok(()),
            Err(ClientError::Refused(refusal)) => Err(HoldError::Refused(refusal.to_string())),
            Err(error) => Err(HoldError::Unreachable(error.to_string())),
        }
    }

    /// Makes the channel's socket reachable for containers, also after the arbiter has made it
    /// anew: a link to it, in a directory of its own. The control socket is not there.
    ///
    /// # Errors
    /// Those of the disk.
    pub fn link_channel(&self) -> Result<(), NodeError> {
        let channel = self.dir.channel_socket();
        let link = self.pods_dir.join("channel.sock");
        let linked = || {
            let mut builder = fs::DirBuilder::new();
            builder.recursive(true).mode(0o755).create(&self.pods_dir)?;
            let there = fs::symlink_metadata(&channel)?;
            match fs::symlink_metadata(&link) {
                Ok(old) if (old.dev(), old.ino()) == (there.dev(), there.ino()) => return Ok(()),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
            let beside = self.pods_dir.join(".channel.sock");
            match fs::remove_file(&beside) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            fs::hard_link(&channel, &beside)?;
            fs::rename(&beside, &link)
        };
        linked().map_err(|error| NodeError::Io { path: link, error })
    }

    /// What a container gets with a share.
    pub fn edits(&self, share: &Share, job: &Job) -> Edits {
        let socket = self.pods_dir.join("channel.sock");
        let mut env = vec![
            format!("LD_PRELOAD={}", self.library.display()),
            format!("SUBLET_SOCKET={}", socket.display()),
            format!("SUBLET_TOKEN={}", job.token),
            format!("SUBLET_JOB={}", job.name),
            "SUBLET_ON_REFUSAL=closed".into(),
            format!("NVIDIA_VISIBLE_DEVICES={}", share.device),
            format!("CUDA_VISIBLE_DEVICES={}", share.device),
        ];
        let mut mounts = vec![mount(&self.library), mount(&self.pods_dir)];
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
