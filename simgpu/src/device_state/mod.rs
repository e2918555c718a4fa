//! The device_state: what all processes of a host share about the simulated devices, in one mapped
//! file.
//!
//! * A header with the profile text, so that everybody sees the same device_state.
//! * Per device: who holds the compute engine, who waits for it, and until when each engine is
//!   busy.
//! * Per process: a slot with its use of every device.
//!
//! Nothing here can be left stuck by a process that is killed at any instruction. A slot is alive
//! while its process holds a POSIX record lock on it, which the kernel drops at death and does not
//! hand to a forked child; sums count live slots only. Critical sections are record locks as well.
//! The compute engine's holder is a word that names slot and generation, and anybody may take it
//! from a dead one.
//!
//! A record lock goes away with *any* descriptor of the file that the process closes, so the one
//! descriptor is never closed. This file knows nothing of contexts, streams or memory contents.

mod allowance;
mod events;
mod host;
mod layout;
mod shared;
mod turns;

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

use memmap2::MmapOptions;

use crate::clock;
use crate::lock::Mutex;
use crate::profile::Profile;
use crate::settings::{self, BadConfig};
use host::{image_number, lock, lock_owner, locked_by_another, unlock};
use layout::{LAYOUT, SlotDevice, State, turn_word};

pub use events::{OpenError, SharedEvent};
pub(crate) use host::memfd;
pub use layout::{SHARED_EVENTS, SLOTS};
pub use turns::CATCH_UP_NS;

/// Record locks lie beyond the file's content.
const LOCK_INIT: i64 = 1 << 40;
const LOCK_MEMORY: i64 = LOCK_INIT + 1;
const LOCK_HOST: i64 = LOCK_INIT + 2048;
const LOCK_SLOT: i64 = LOCK_INIT + 4096;
const LOCK_EVENTS: i64 = LOCK_INIT + 8191;
const LOCK_EVENT: i64 = LOCK_INIT + 8192;

/// How far samples of use lie apart.
const SAMPLE_NS: u64 = 250_000_000;

impl SlotDevice {
    /// Takes a sample where the last one is old. By the slot's process alone.
    fn sample(&self, now_ns: u64) {
        let [newer, older] = &self.samples;
        if now_ns.saturating_sub(newer.time_ns.load(Relaxed)) < SAMPLE_NS {
            return;
        }
        older
            .compute_ns
            .store(newer.compute_ns.load(Relaxed), Relaxed);
        older.time_ns.store(newer.time_ns.load(Relaxed), Relaxed);
        newer
            .compute_ns
            .store(self.compute_ns.load(Relaxed), Relaxed);
        newer.time_ns.store(now_ns, Relaxed);
    }

    /// The older sample, or the newer one where there is but that. Two words that are read one
    /// after the other: a monitor's figure may be off once.
    fn recent(&self) -> (u64, u64) {
        let [newer, older] = &self.samples;
        let of = |sample: &layout::UseSample| {
            (
                sample.time_ns.load(Relaxed),
                sample.compute_ns.load(Relaxed),
            )
        };
        match of(older) {
            (0, _) => of(newer),
            older => older,
        }
    }
}

/// Engines of a device that processes share by time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CopyEngine {
    /// Host to device.
    In,
    /// Device to host.
    Out,
}

/// Why the device cannot be used.
#[derive(Debug)]
pub enum DeviceStateError {
    /// A setting is wrong.
    Config(BadConfig),
    /// The state file cannot be opened, locked or mapped.
    Io(PathBuf, io::Error),
    /// Written by another version.
    Layout(PathBuf, u32),
    /// All slots are taken.
    Full,
}

impl std::fmt::Display for DeviceStateError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Config(error) => write!(f, "{error}"),
            Self::Io(path, error) => write!(f, "simulated GPU state {}: {error}", path.display()),
            Self::Layout(path, found) => write!(
                f,
                "simulated GPU state {} has layout {found}, this library writes {LAYOUT}: end its users and remove it, or \
                 set SUBLET_SIM_STATE to another directory",
                path.display()
            ),
            Self::Full => write!(
                f,
                "all {SLOTS} process slots of the simulated GPU are taken"
            ),
        }
    }
}

impl std::error::Error for DeviceStateError {}

/// One process's use of one device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// Process.
    pub pid: u32,
    /// Device memory that it has, contexts included.
    pub used_bytes: u64,
    /// Compute engine time that it was given.
    pub compute_ns: u64,
    /// Time that the compute engine took to turn to it from others.
    pub turn_ns: u64,
    /// Copy engine time that it was given.
    pub copy_ns: u64,
    /// Kernels that it ran.
    pub launches: u64,
    /// Contexts that it has there now.
    pub contexts: u32,
    /// When it last computed (CLOCK_MONOTONIC).
    pub last_busy_ns: u64,
    /// A time not long before that, and `compute_ns` then.
    pub recent: (u64, u64),
    /// Host memory that the process has page-locked, on whatever device's behalf.
    pub pinned_bytes: u64,
    /// Physical memory handles of the process that live, of whatever device.
    pub handles: u64,
    /// Bytes of those that lie in host memory.
    pub host_located_bytes: u64,
}

/// What a process has beside the memory of devices.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Holding {
    /// Bytes of page-locked host memory.
    Pinned,
    /// Physical memory handles.
    Handles,
    /// Bytes of handles that lie in host memory.
    HostLocated,
}

/// The mapped state. Never unmapped, never closed.
pub struct DeviceState {
    state: *mut State,
    fd: RawFd,
    profile: Profile,
    /// Own slot, once claimed. Also serialises the threads of this process in critical sections,
    /// which record locks don't.
    own: Mutex<Option<Own>>,
    /// How often this process has each shared event. Taken after `own` where both are.
    own_events: Mutex<BTreeMap<usize, u32>>,
}

#[derive(Clone, Copy)]
struct Own {
    slot: usize,
    word: u64,
    /// A forked child has the memory but not the locks.
    pid: u32,
}

// SAFETY: the mapping lives as long as the process, and everything in it is an atomic.
unsafe impl Send for DeviceState {}
// SAFETY: as above.
unsafe impl Sync for DeviceState {}

/// Directory of the state file, from the environment.
pub fn state_dir(env: impl Fn(&str) -> Option<String>) -> PathBuf {
    match env("SUBLET_SIM_STATE") {
        Some(path) if !path.is_empty() => PathBuf::from(path),
        _ => {
            // SAFETY: getuid has no preconditions.
            let uid = unsafe { libc::getuid() };
            PathBuf::from(format!("/dev/shm/sublet-simgpu-{uid}"))
        }
    }
}

impl DeviceState {
    /// The device of this host as the settings of this process ask for it.
    ///
    /// # Errors
    /// A wrong setting, or a state file that cannot be used.
    pub fn of_this_host() -> Result<Self, DeviceStateError> {
        let most = host_memory::Standing::of_this_process().whole().free_bytes;
        let config =
            Profile::text_for_host(settings::env, most).map_err(DeviceStateError::Config)?;
        Self::open(&state_dir(settings::env), &config)
    }

    /// Opens the host's device, creating it with `config` if nobody uses it.
    ///
    /// # Errors
    /// A wrong setting, or a state file that cannot be used.
    pub fn open(dir: &Path, config: &str) -> Result<Self, DeviceStateError> {
        let path = dir.join("state");
        let io_error = |error| DeviceStateError::Io(path.clone(), error);
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(dir)
            .map_err(io_error)?;
        let file = fs::OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(libc::O_CLOEXEC)
            .open(&path)
            .map_err(io_error)?;
        let file = ManuallyDrop::new(file);
        let fd = file.as_raw_fd();
        lock(fd, LOCK_INIT, libc::F_SETLKW).map_err(io_error)?;
        let opened = Self::map(&file, &path, config);
        unlock(fd, LOCK_INIT);
        opened
    }

    /// Maps the locked file and settles which configuration holds.
    fn map(file: &fs::File, path: &Path, config: &str) -> Result<Self, DeviceStateError> {
        let io_error = |error| DeviceStateError::Io(path.to_owned(), error);
        let bytes = size_of::<State>();
        if file.metadata().map_err(io_error)?.len() < bytes as u64 {
            file.set_len(bytes as u64).map_err(io_error)?;
        }
        let state = MmapOptions::new().len(bytes).map_raw(file);
        let state = ManuallyDrop::new(state.map_err(io_error)?).as_mut_ptr();
        let state = state.cast::<State>();
        // SAFETY: the file is at least this long, page-aligned, shared; all fields are atomics,
        // valid for any bytes.
        let shared = unsafe { &*state };
        let found = shared.header.layout.load(Acquire);
        if found != 0 && found != LAYOUT {
            return Err(DeviceStateError::Layout(path.to_owned(), found));
        }
        let mut device_state = Self {
            state,
            fd: file.as_raw_fd(),
            profile: Profile::parse(config).map_err(DeviceStateError::Config)?,
            own: Mutex::new(None),
            own_events: Mutex::default(),
        };
        let in_use = found == LAYOUT && (0..SLOTS).any(|slot| device_state.alive(slot));
        if in_use {
            device_state.profile =
                Profile::parse(&shared.header.config()).map_err(DeviceStateError::Config)?;
        } else {
            shared.header.layout.store(0, Relaxed);
            shared.header.memory_until_ns.store(0, Relaxed);
            shared
                .header
                .set_config(config)
                .map_err(DeviceStateError::Config)?;
            for device in &shared.devices {
                device.turn.store(0, Relaxed);
                // Times of a device that counted them otherwise.
                device.compute_until_ns.store(0, Relaxed);
                let copies = device.copy_until_ns.iter();
                copies.for_each(|until| until.store(0, Relaxed));
                device.peak_bytes.store(0, Relaxed);
                device
                    .waiters
                    .iter()
                    .for_each(|word| word.store(0, Relaxed));
            }
            // SYNC(layout): pairs with the Acquire load above, under the same record lock; marks
            // the header as complete.
            shared.header.layout.store(LAYOUT, Release);
        }
        clock::dilate(device_state.profile.dilation);
        Ok(device_state)
    }

    fn state(&self) -> &State {
        // SAFETY: mapped in `map` for the life of the process; atomics only.
        unsafe { &*self.state }
    }

    /// The device that all processes of the host agreed on.
    pub fn profile(&self) -> &Profile {
        &self.profile
    }

    /// Takes a slot for this process, once.
    ///
    /// # Errors
    /// All slots are taken, or the lock failed.
    pub fn claim(&self) -> Result<(), DeviceStateError> {
        let mut own = self.own.lock();
        if own.is_some() {
            return Ok(());
        }
        lock(self.fd, LOCK_INIT, libc::F_SETLKW)
            .map_err(|error| DeviceStateError::Io(PathBuf::new(), error))?;
        let claimed = (0..SLOTS).find(|slot| {
            if self.alive_without_own(*slot, None) {
                return false;
            }
            // While the slot is still a dead one's: from the lock on it is alive, and whatever it
            // says then counts.
            let shared = &self.state().slots[*slot];
            for device in &shared.devices {
                for counter in [
                    &device.used_bytes,
                    &device.compute_ns,
                    &device.copy_ns,
                    &device.launches,
                    &device.debt_ns,
                    &device.turn_ns,
                    &device.last_busy_ns,
                    &device.samples[0].time_ns,
                    &device.samples[0].compute_ns,
                    &device.samples[1].time_ns,
                    &device.samples[1].compute_ns,
                ] {
                    counter.store(0, Relaxed);
                }
                device.contexts.store(0, Relaxed);
            }
            for counter in [
                &shared.pinned_bytes,
                &shared.handles,
                &shared.host_located_bytes,
                &shared.promised_bytes,
            ] {
                counter.store(0, Relaxed);
            }
            shared.forget_shared();
            self.forget_events(*slot);
            lock(self.fd, LOCK_SLOT + *slot as i64, libc::F_SETLK).is_ok()
        });
        if let Some(slot) = claimed {
            let shared = &self.state().slots[slot];
            let generation = shared.generation.fetch_add(1, AcqRel) + 1;
            shared.image.store(image_number(), Relaxed);
            shared.pid.store(std::process::id(), Release);
            *own = Some(Own {
                slot,
                word: turn_word(slot, generation),
                pid: std::process::id(),
            });
        }
        unlock(self.fd, LOCK_INIT);
        if claimed.is_some() {
            Ok(())
        } else {
            Err(DeviceStateError::Full)
        }
    }

    fn own(&self) -> Option<Own> {
        *self.own.lock()
    }

    /// True while the slot's process lives.
    fn alive(&self, slot: usize) -> bool {
        self.alive_without_own(slot, self.own())
    }

    fn alive_without_own(&self, slot: usize, own: Option<Own>) -> bool {
        let shared = &self.state().slots[slot];
        let pid = shared.pid.load(Acquire);
        if pid == 0 {
            return false;
        }
        if own.is_some_and(|own| own.slot == slot && own.pid == std::process::id()) {
            return true;
        }
        // Own locks never conflict with the question, and another copy of this library in our
        // process may hold the slot.
        if pid == std::process::id() && shared.image.load(Relaxed) == image_number() {
            return true;
        }
        locked_by_another(self.fd, LOCK_SLOT + slot as i64)
    }

    /// Takes `bytes` of a device for this process, unless the sum over live processes would exceed
    /// the device.
    pub fn reserve(&self, device: usize, bytes: u64) -> bool {
        let own = self.own.lock();
        let Some(mine) = *own else { return false };
        let lock_at = LOCK_MEMORY + device as i64;
        if lock(self.fd, lock_at, libc::F_SETLKW).is_err() {
            return false;
        }
        let sum = self.used_with(device, Some(mine)).saturating_add(bytes);
        let fits = sum <= self.profile.usable_bytes();
        if fits {
            self.state().devices[device]
                .peak_bytes
                .fetch_max(sum, Relaxed);
            self.slot_device(mine.slot, device)
                .used_bytes
                .fetch_add(bytes, AcqRel);
        }
        unlock(self.fd, lock_at);
        fits
    }

    /// Gives back `bytes` of a device.
    pub fn release(&self, device: usize, bytes: u64) {
        if let Some(own) = self.own() {
            let used = &self.slot_device(own.slot, device).used_bytes;
            let _ = used.fetch_update(AcqRel, Acquire, |now| Some(now.saturating_sub(bytes)));
        }
    }

    /// Most bytes of a device that live processes ever had together. Exact, for it is noted where
    /// memory is taken and nobody else takes any.
    pub fn peak(&self, device: usize) -> u64 {
        self.state().devices[device].peak_bytes.load(Relaxed)
    }

    /// Bytes of a device that live processes have.
    pub fn used(&self, device: usize) -> u64 {
        self.used_with(device, self.own())
    }

    fn used_with(&self, device: usize, own: Option<Own>) -> u64 {
        // Asked in this order: a slot that a new process has just taken from a dead one is empty by
        // then.
        let held: u64 = (0..SLOTS)
            .map(|slot| (slot, &self.slot_device(slot, device).used_bytes))
            .filter(|(slot, used)| used.load(Relaxed) > 0 && self.alive_without_own(*slot, own))
            .map(|(_, used)| used.load(Acquire))
            .sum();
        // In this order: what comes to be shared is listed before it is taken off.
        held + self.shared_bytes(device, own)
    }

    /// Every live process's use of a device, processes without any included.
    pub fn usages(&self, device: usize) -> Vec<Usage> {
        (0..SLOTS)
            .filter(|slot| self.alive(*slot))
            .map(|slot| {
                let shared = self.slot_device(slot, device);
                let used_bytes = shared.used_bytes.load(Acquire);
                Usage {
                    pid: self.pid_of(slot),
                    used_bytes: used_bytes + self.shared_bytes_of(slot, device, self.own()),
                    compute_ns: shared.compute_ns.load(Relaxed),
                    turn_ns: shared.turn_ns.load(Relaxed),
                    copy_ns: shared.copy_ns.load(Relaxed),
                    launches: shared.launches.load(Relaxed),
                    contexts: shared.contexts.load(Relaxed),
                    last_busy_ns: shared.last_busy_ns.load(Relaxed),
                    recent: shared.recent(),
                    pinned_bytes: self.state().slots[slot].pinned_bytes.load(Relaxed),
                    handles: self.state().slots[slot].handles.load(Relaxed),
                    host_located_bytes: self.state().slots[slot].host_located_bytes.load(Relaxed),
                }
            })
            .collect()
    }

    /// A slot's process as we know it: what it wrote itself is its number in its own PID namespace,
    /// which a container has.
    fn pid_of(&self, slot: usize) -> u32 {
        let said = self.state().slots[slot].pid.load(Relaxed);
        let owner = lock_owner(self.fd, LOCK_SLOT + slot as i64);
        owner.filter(|pid| *pid != 0).unwrap_or(said)
    }

    /// Times that the compute engine went from one process to another.
    pub fn switches(&self, device: usize) -> u64 {
        self.state().devices[device].switches.load(Relaxed)
    }

    fn slot_device(&self, slot: usize, device: usize) -> &SlotDevice {
        &self.state().slots[slot].devices[device]
    }

    /// Counts a context of this process.
    pub fn context_created(&self, device: usize) {
        if let Some(own) = self.own() {
            self.slot_device(own.slot, device)
                .contexts
                .fetch_add(1, Relaxed);
        }
    }

    /// Uncounts a context of this process.
    pub fn context_destroyed(&self, device: usize) {
        if let Some(own) = self.own() {
            self.slot_device(own.slot, device)
                .contexts
                .fetch_sub(1, Relaxed);
        }
    }

    /// Accounts what this process has beside the memory of devices: `amount` more, or less.
    pub fn hold(&self, what: Holding, amount: u64, more: bool) {
        let Some(own) = self.own() else { return };
        let slot = &self.state().slots[own.slot];
        let word = match what {
            Holding::Pinned => &slot.pinned_bytes,
            Holding::Handles => &slot.handles,
            Holding::HostLocated => &slot.host_located_bytes,
        };
        let _ = word.fetch_update(AcqRel, Acquire, |now| {
            Some(if more {
                now.saturating_add(amount)
            } else {
                now.saturating_sub(amount)
            })
        });
    }

    /// Host memory that this process has page-locked, and that its handles have.
    pub fn own_host_bytes(&self) -> u64 {
        self.own().map_or(0, |own| {
            let slot = &self.state().slots[own.slot];
            let located = slot.host_located_bytes.load(Acquire);
            slot.pinned_bytes.load(Acquire).saturating_add(located)
        })
    }

    /// Until when the driver is busy with calls of all processes that manage memory.
    pub fn memory_until_ns(&self) -> &AtomicU64 {
        &self.state().header.memory_until_ns
    }

    /// Accounts compute engine time.
    pub fn computed(&self, device: usize, ns: u64, launches: u64) {
        if let Some(own) = self.own() {
            let shared = self.slot_device(own.slot, device);
            let now_ns = clock::now_ns();
            shared.sample(now_ns);
            shared.compute_ns.fetch_add(ns, Relaxed);
            shared.launches.fetch_add(launches, Relaxed);
            shared.last_busy_ns.store(now_ns, Relaxed);
            self.state().devices[device].busy_ns.fetch_add(ns, Relaxed);
        }
    }

    /// Compute engine time that anybody was ever given.
    pub fn busy_ns(&self, device: usize) -> u64 {
        self.state().devices[device].busy_ns.load(Relaxed)
    }

    /// Time that a copy engine was ever given to anybody.
    pub fn moved_ns(&self, device: usize, engine: CopyEngine) -> u64 {
        self.state().devices[device].moved_ns[engine as usize].load(Relaxed)
    }

    /// True while the other direction's copy engine has work at `at_ns`.
    pub fn copies_the_other_way(&self, device: usize, engine: CopyEngine, at_ns: u64) -> bool {
        let other = match engine {
            CopyEngine::In => CopyEngine::Out,
            CopyEngine::Out => CopyEngine::In,
        };
        self.state().devices[device].copy_until_ns[other as usize].load(Acquire) > at_ns
    }

    /// Takes a copy engine for `duration_ns`, from `ready_ns` on at the earliest; returns when the
    /// copy ends.
    pub fn copy(&self, device: usize, engine: CopyEngine, ready_ns: u64, duration_ns: u64) -> u64 {
        let until = &self.state().devices[device].copy_until_ns[engine as usize];
        let mut end = 0;
        let _ = until.fetch_update(AcqRel, Acquire, |busy| {
            end = busy.max(ready_ns) + duration_ns;
            Some(end)
        });
        self.state().devices[device].moved_ns[engine as usize].fetch_add(duration_ns, Relaxed);
        if let Some(own) = self.own() {
            self.slot_device(own.slot, device)
                .copy_ns
                .fetch_add(duration_ns, Relaxed);
        }
        end
    }

    /// A duration of the profile at the configured speed.
    pub fn scaled(&self, ns: u64) -> u64 {
        if self.profile.speed == 1.0 {
            ns
        } else {
            (ns as f64 / self.profile.speed) as u64
        }
    }
}
