//! What a process asks for that no `sublet run` has started: one in a container, into which an
//! engine or a cluster has put this library and variables that say how much of the GPU it may have.
//!
//! The variables travel as they are; what they mean is the arbiter's to know. Ours say so
//! themselves (`SUBLET_CONTAINER`); those of HAMi, KAI and MPS do too, so that these may have this
//! library loaded in the place of their own.
//!
//! What an engine starts in a container later (`podman exec`) has none of the variables that came
//! with the device. There the container's first process knows them.

use std::ffi::CString;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use channel::wire::ASKED_BYTES;

use crate::ground::environment::variable;

/// Where the arbiter of the host is for containers, unless SUBLET_SOCKET says otherwise.
pub(crate) const SOCKET: &str = "/run/sublet/containers/channel.sock";

/// The arbiter's other socket, which no container is shown.
const CONTROL: &str = "/run/sublet/control.sock";
/// Bytes read of the first process's environment.
const MOST_BYTES: u64 = 128 << 10;

/// Says that this process is in a container whose job it is to register by itself.
const CONTAINER: &str = "SUBLET_CONTAINER";
/// Says that the driver simulates.
const SIMULATED: &str = "SUBLET_SIM";
/// The settings of a job.
const OWN: [&str; 16] = [
    "SUBLET_MEM",
    "SUBLET_SHARE",
    "SUBLET_SHARE_MIN",
    "SUBLET_SHARE_MAX",
    "SUBLET_CLASS",
    "SUBLET_DEVICE",
    "SUBLET_GANG",
    "SUBLET_DEADLINE",
    "SUBLET_WORK",
    "SUBLET_ON_ARBITER_LOSS",
    "SUBLET_ON_REFUSAL",
    "SUBLET_EVICTABLE",
    "SUBLET_OVERFLOW",
    "SUBLET_HOST_MEMORY",
    "SUBLET_ITERATION_LAUNCHES",
    "SUBLET_NAME",
];
/// HAMi-core's, each also with the number of a device behind it.
const HAMI: [&str; 2] = ["CUDA_DEVICE_MEMORY_LIMIT", "CUDA_DEVICE_SM_LIMIT"];
const HAMI_DEVICES: u32 = 16;
const MPS: [&str; 2] = [
    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
];
/// Of ours, those without which a process that cannot be governed may run on.
const LIMITS: [&str; 2] = ["SUBLET_MEM", "SUBLET_SHARE_MAX"];

/// What the environment asks for.
pub(crate) struct Asked {
    /// A line `NAME=value` for each variable.
    pub(crate) lines: String,
    /// A limit is among it: the process does not start where nobody enforces it.
    pub(crate) limited: bool,
}

/// What this process asks for; `None`: it does not say that it is a job.
pub(crate) fn asked() -> Option<Asked> {
    let own =
        |name: &str| -> Option<Vec<u8>> { Some(variable(&CString::new(name).ok()?)?.to_vec()) };
    if own(CONTAINER).is_none() && is_in_container() {
        let text = first_process();
        let of_first = |name: &str| {
            let mut all = text.split(|byte| *byte == 0);
            let value =
                all.find_map(|one| one.strip_prefix(name.as_bytes())?.strip_prefix(b"="))?;
            (!value.is_empty()).then(|| value.to_vec())
        };
        return Some(asked_of(true, &|name| own(name).or_else(|| of_first(name))));
    }
    let by_itself = own(CONTAINER).is_some();
    let hami = HAMI.iter().any(|name| {
        let of_device = |at| own(&format!("{name}_{at}")).is_some();
        own(name).is_some() || (0..HAMI_DEVICES).any(of_device)
    });
    (by_itself || hami).then(|| asked_of(hami, &own))
}

/// Only containers see one of the arbiter's sockets and not the other.
fn is_in_container() -> bool {
    Path::new(SOCKET).exists() && !Path::new(CONTROL).exists()
}

/// The environment with which the container's first process was started, where it may be read.
fn first_process() -> Vec<u8> {
    let mut text = Vec::new();
    let read =
        File::open("/proc/1/environ").and_then(|file| file.take(MOST_BYTES).read_to_end(&mut text));
    read.map_or_else(|_| Vec::new(), |_| text)
}

fn asked_of(with_hami: bool, said: &dyn Fn(&str) -> Option<Vec<u8>>) -> Asked {
    let mut lines = String::new();
    let mut say = |name: &str| -> bool {
        let Some(value) = said(name) else {
            return false;
        };
        // What cannot be a value of ours is sent as it is, for the refusal to name it.
        let value = String::from_utf8_lossy(&value).replace('\n', " ");
        lines.push_str(name);
        lines.push('=');
        lines.push_str(&value);
        lines.push('\n');
        true
    };
    let mut limited = false;
    say(SIMULATED);
    for name in OWN {
        limited |= say(name) && LIMITS.contains(&name);
    }
    for name in HAMI.into_iter().filter(|_| with_hami) {
        limited |= say(name);
        for device in 0..HAMI_DEVICES {
            limited |= say(&format!("{name}_{device}"));
        }
    }
    // MPS enforces its own where it runs, and they are no reason to look for us.
    for name in MPS {
        say(name);
    }
    if lines.len() > ASKED_BYTES {
        // Cut short it might say something else. This is no name, and the arbiter says so.
        lines = format!("SUBLET_NAME=more than {ASKED_BYTES} bytes of settings\n");
    }
    Asked { lines, limited }
}
