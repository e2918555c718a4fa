//! The card: what all processes of a host share about the simulated devices, in one mapped file.
//!
//! * A header with the profile text, so that everybody sees the same card.
//! * Per device: who holds the compute engine, who waits for it, and until when each engine is busy.
//! * Per process: a slot with its use of every device.
//!
//! Nothing here can be left stuck by a process that is killed at any instruction. A slot is alive while its process holds a
//! POSIX record lock on it, which the kernel drops at death and does not hand to a forked child; sums count live slots
//! only. Critical sections are record locks as well. The compute engine's holder is a word that names slot and
//! generation, and anybody may take it from a dead one.
//!
//! A record lock goes away with *any* descriptor of the file that the process closes, so the one descriptor is never
//! closed. This file knows nothing of contexts, streams or memory contents.

use std::ffi::CString;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicU32, AtomicU64, fence};
use std::time::Duration;

use parking_lot::Mutex;

use crate::clock;
use crate::profile::{BadConfig, MAX_DEVICES, Profile};

/// Processes that one host can have on its devices.
pub const SLOTS: usize = 256;
/// Layout of the file; another one is refused.
const LAYOUT: u32 = 1;
const CONFIG_BYTES: usize = 8192;
const WAITER_WORDS: usize = SLOTS / 64;

/// Record locks lie beyond the file's content.
const LOCK_INIT: i64 = 1 << 40;
const LOCK_MEMORY: i64 = LOCK_INIT + 1;
const LOCK_SLOT: i64 = LOCK_INIT + 4096;

/// How often a process that waits for the compute engine looks whether the holder still lives.
const HOLDER_CHECK: Duration = Duration::from_millis(1);

#[repr(C)]
struct Header {
    /// Stored last; zero means "not ready".
    layout: AtomicU32,
    config_len: AtomicU32,
    config: [AtomicU64; CONFIG_BYTES / 8],
    padding: [u64; 15],
}

/// Engines of a device that processes share by time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CopyEngine {
    /// Host to device.
    In,
    /// Device to host.
    Out,
}

#[repr(C, align(128))]
struct DeviceShared {
    /// 0: free; else the holder's slot + 1 and generation.
    turn: AtomicU64,
    /// Until when the compute engine is taken by work already accounted (CLOCK_MONOTONIC ns).
    compute_until_ns: AtomicU64,
    /// The same for the two copy engines.
    copy_until_ns: [AtomicU64; 2],
    /// Times that the compute engine changed hands between processes.
    switches: AtomicU64,
    /// Slot + generation of the process that ran last.
    last: AtomicU64,
    /// One bit per slot that wants the compute engine.
    waiters: [AtomicU64; WAITER_WORDS],
    padding: [u64; 6],
}

#[repr(C, align(128))]
struct SlotDevice {
    used_bytes: AtomicU64,
    compute_ns: AtomicU64,
    copy_ns: AtomicU64,
    launches: AtomicU64,
    /// Engine time beyond earlier slices, to be made up for by skipped turns.
    debt_ns: AtomicU64,
    /// Bumped at every hand-over to this slot; futex.
    bell: AtomicU32,
    contexts: AtomicU32,
    /// Start of the last interval in which it computed, for utilisation samples.
    last_busy_ns: AtomicU64,
    padding: [u64; 9],
}

#[repr(C, align(128))]
struct Slot {
    pid: AtomicU32,
    padding0: u32,
    /// The kernel's random number for the program's image: tells it from a later one with its pid, after exec as well.
    image: AtomicU64,
    /// Bumped at every claim, never reset.
    generation: AtomicU64,
    padding: [u64; 13],
    devices: [SlotDevice; MAX_DEVICES],
}

#[repr(C)]
struct State {
    header: Header,
    devices: [DeviceShared; MAX_DEVICES],
    slots: [Slot; SLOTS],
}

const _: () = assert!(size_of::<DeviceShared>() == 128 && size_of::<SlotDevice>() == 128);
const _: () = assert!(size_of::<Slot>() == 128 + 128 * MAX_DEVICES);
const _: () = assert!(size_of::<Header>().is_multiple_of(128));

/// Why the card cannot be used.
#[derive(Debug)]
pub enum CardError {
    /// A setting is wrong.
    Config(BadConfig),
    /// The state file cannot be opened, locked or mapped.
    Io(PathBuf, io::Error),
    /// Written by another version.
    Layout(PathBuf, u32),
    /// All slots are taken.
    Full,
}

impl std::fmt::Display for CardError {
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

impl std::error::Error for CardError {}

/// One process's use of one device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// Process.
    pub pid: u32,
    /// Device memory that it has, contexts included.
    pub used_bytes: u64,
    /// Compute engine time that it was given.
    pub compute_ns: u64,
    /// Copy engine time that it was given.
    pub copy_ns: u64,
    /// Kernels that it ran.
    pub launches: u64,
    /// Contexts that it has there now.
    pub contexts: u32,
    /// When it last computed (CLOCK_MONOTONIC).
    pub last_busy_ns: u64,
}

/// The mapped state. Never unmapped, never closed.
pub struct Card {
    state: *mut State,
    fd: RawFd,
    profile: Profile,
    /// Own slot, once claimed. Also serialises the threads of this process in critical sections, which record locks don't.
    own: Mutex<Option<Own>>,
}

#[derive(Clone, Copy)]
struct Own {
    slot: usize,
    word: u64,
    /// A forked child has the memory but not the locks.
    pid: u32,
}

// SAFETY: the mapping lives as long as the process, and everything in it is an atomic.
unsafe impl Send for Card {}
// SAFETY: as above.
unsafe impl Sync for Card {}

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

impl Card {
    /// Opens the host's card, creating it with `config` if nobody uses it.
    ///
    /// # Errors
    /// A wrong setting, or a state file that cannot be used.
    pub fn open(dir: &Path, config: &str) -> Result<Self, CardError> {
        let path = dir.join("state");
        let io_error = |error| CardError::Io(path.clone(), error);
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
        let fd = OwnedFd::from(file).into_raw_fd();
        lock(fd, LOCK_INIT, libc::F_SETLKW).map_err(io_error)?;
        let opened = Self::map(fd, &path, config);
        unlock(fd, LOCK_INIT);
        opened
    }

    /// Maps the locked file and settles which configuration holds.
    fn map(fd: RawFd, path: &Path, config: &str) -> Result<Self, CardError> {
        let io_error = |error| CardError::Io(path.to_owned(), error);
        let bytes = size_of::<State>();
        // SAFETY: fstat and ftruncate on a descriptor that we opened, with a local out-structure.
        let state = unsafe {
            let mut stat: libc::stat = std::mem::zeroed();
            if libc::fstat(fd, &mut stat) != 0
                || (stat.st_size < bytes as i64 && libc::ftruncate(fd, bytes as i64) != 0)
            {
                return Err(io_error(io::Error::last_os_error()));
            }
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                fd,
                0,
            )
        };
        if state == libc::MAP_FAILED {
            return Err(io_error(io::Error::last_os_error()));
        }
        // SAFETY: the file is at least this long, page-aligned, shared; all fields are atomics, valid for any bytes.
        let shared = unsafe { &*state.cast::<State>() };
        let found = shared.header.layout.load(Acquire);
        if found != 0 && found != LAYOUT {
            return Err(CardError::Layout(path.to_owned(), found));
        }
        let mut card = Self {
            state: state.cast(),
            fd,
            profile: Profile::parse(config).map_err(CardError::Config)?,
            own: Mutex::new(None),
        };
        let in_use = found == LAYOUT && (0..SLOTS).any(|slot| card.alive(slot));
        if in_use {
            card.profile = Profile::parse(&shared.header.config()).map_err(CardError::Config)?;
        } else {
            shared.header.layout.store(0, Relaxed);
            shared
                .header
                .set_config(config)
                .map_err(CardError::Config)?;
            for device in &shared.devices {
                device.turn.store(0, Relaxed);
                device
                    .waiters
                    .iter()
                    .for_each(|word| word.store(0, Relaxed));
            }
            // SYNC(layout): pairs with the Acquire load above, under the same record lock; marks the header as complete.
            shared.header.layout.store(LAYOUT, Release);
        }
        Ok(card)
    }

    fn state(&self) -> &State {
        // SAFETY: mapped in `map` for the life of the process; atomics only.
        unsafe { &*self.state }
    }

    /// The card that all processes of the host agreed on.
    pub fn profile(&self) -> &Profile {
        &self.profile
    }

    /// Takes a slot for this process, once.
    ///
    /// # Errors
    /// All slots are taken, or the lock failed.
    pub fn claim(&self) -> Result<(), CardError> {
        let mut own = self.own.lock();
        if own.is_some() {
            return Ok(());
        }
        lock(self.fd, LOCK_INIT, libc::F_SETLKW)
            .map_err(|error| CardError::Io(PathBuf::new(), error))?;
        let claimed = (0..SLOTS).find(|slot| {
            !self.alive_without_own(*slot, None)
                && lock(self.fd, LOCK_SLOT + *slot as i64, libc::F_SETLK).is_ok()
        });
        if let Some(slot) = claimed {
            let shared = &self.state().slots[slot];
            for device in &shared.devices {
                for counter in [
                    &device.used_bytes,
                    &device.compute_ns,
                    &device.copy_ns,
                    &device.launches,
                    &device.debt_ns,
                    &device.last_busy_ns,
                ] {
                    counter.store(0, Relaxed);
                }
                device.contexts.store(0, Relaxed);
            }
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
            Err(CardError::Full)
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
        // Own locks never conflict with the question, and another copy of this library in our process may hold the slot.
        if pid == std::process::id() && shared.image.load(Relaxed) == image_number() {
            return true;
        }
        locked_by_another(self.fd, LOCK_SLOT + slot as i64)
    }

    /// Takes `bytes` of a device for this process, unless the sum over live processes would exceed the card.
    pub fn reserve(&self, device: usize, bytes: u64) -> bool {
        let own = self.own.lock();
        let Some(mine) = *own else { return false };
        let lock_at = LOCK_MEMORY + device as i64;
        if lock(self.fd, lock_at, libc::F_SETLKW).is_err() {
            return false;
        }
        let fits = self
            .used_with(device, Some(mine))
            .checked_add(bytes)
            .is_some_and(|sum| sum <= self.profile.usable_bytes());
        if fits {
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

    /// Bytes of a device that live processes have.
    pub fn used(&self, device: usize) -> u64 {
        self.used_with(device, self.own())
    }

    fn used_with(&self, device: usize, own: Option<Own>) -> u64 {
        (0..SLOTS)
            .map(|slot| {
                (
                    slot,
                    self.slot_device(slot, device).used_bytes.load(Acquire),
                )
            })
            .filter(|(slot, used)| *used > 0 && self.alive_without_own(*slot, own))
            .map(|(_, used)| used)
            .sum()
    }

    /// Every live process's use of a device, processes without any included.
    pub fn usages(&self, device: usize) -> Vec<Usage> {
        (0..SLOTS)
            .filter(|slot| self.alive(*slot))
            .map(|slot| {
                let shared = self.slot_device(slot, device);
                Usage {
                    pid: self.state().slots[slot].pid.load(Relaxed),
                    used_bytes: shared.used_bytes.load(Acquire),
                    compute_ns: shared.compute_ns.load(Relaxed),
                    copy_ns: shared.copy_ns.load(Relaxed),
                    launches: shared.launches.load(Relaxed),
                    contexts: shared.contexts.load(Relaxed),
                    last_busy_ns: shared.last_busy_ns.load(Relaxed),
                }
            })
            .collect()
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

    /// Accounts compute engine time.
    pub fn computed(&self, device: usize, ns: u64, launches: u64) {
        if let Some(own) = self.own() {
            let shared = self.slot_device(own.slot, device);
            shared.compute_ns.fetch_add(ns, Relaxed);
            shared.launches.fetch_add(launches, Relaxed);
            shared.last_busy_ns.store(clock::now_ns(), Relaxed);
        }
    }

    /// Takes a copy engine for `duration_ns`, from `ready_ns` on at the earliest; returns when the copy ends.
    pub fn copy(&self, device: usize, engine: CopyEngine, ready_ns: u64, duration_ns: u64) -> u64 {
        let until = &self.state().devices[device].copy_until_ns[engine as usize];
        let mut end = 0;
        let _ = until.fetch_update(AcqRel, Acquire, |busy| {
            end = busy.max(ready_ns) + duration_ns;
            Some(end)
        });
        if let Some(own) = self.own() {
            self.slot_device(own.slot, device)
                .copy_ns
                .fetch_add(duration_ns, Relaxed);
        }
        end
    }

    /// Waits for the compute engine; returns from when on it is ours (CLOCK_MONOTONIC ns).
    ///
    /// Returns at once when it is free or held by a dead process.
    pub fn take_turn(&self, device: usize) -> u64 {
        let Some(own) = self.own() else {
            return clock::now_ns();
        };
        let shared = &self.state().devices[device];
        let bell = &self.slot_device(own.slot, device).bell;
        let mut waiting = false;
        loop {
            let rung = bell.load(Acquire);
            let holder = shared.turn.load(Acquire);
            let taken = holder == own.word
                || ((holder == 0 || (waiting && !self.holds_alive(holder)))
                    && shared
                        .turn
                        .compare_exchange(holder, own.word, AcqRel, Acquire)
                        .is_ok());
            if taken {
                if waiting {
                    shared.waiters[own.slot / 64].fetch_and(!(1 << (own.slot % 64)), SeqCst);
                }
                break;
            }
            if !waiting {
                waiting = true;
                // SYNC(turn): the bit is set before the word is looked at again; `give_turn` looks at the bits after it
                // freed the word. One of the two sees the other.
                shared.waiters[own.slot / 64].fetch_or(1 << (own.slot % 64), SeqCst);
                fence(SeqCst);
                continue;
            }
            futex_wait(bell, rung, HOLDER_CHECK);
        }
        let mut from = shared.compute_until_ns.load(Acquire);
        if shared.last.swap(own.word, AcqRel) != own.word {
            shared.switches.fetch_add(1, Relaxed);
            from = from.max(clock::now_ns().saturating_sub(CATCH_UP_NS))
                + self.scaled(self.profile.switch_ns);
        }
        from
    }

    /// True when another live process waits for the compute engine.
    pub fn turn_wanted(&self, device: usize) -> bool {
        let Some(own) = self.own() else { return false };
        self.next_waiter(device, own.slot).is_some()
    }

    /// Hands the compute engine, busy until `until_ns`, to the next waiting process, or leaves it free.
    pub fn give_turn(&self, device: usize, until_ns: u64) {
        let Some(own) = self.own() else { return };
        let shared = &self.state().devices[device];
        shared.compute_until_ns.fetch_max(until_ns, AcqRel);
        if let Some(next) = self.next_in_turn(device, own.slot) {
            self.hand(device, own.word, next);
            return;
        }
        if shared
            .turn
            .compare_exchange(own.word, 0, AcqRel, Acquire)
            .is_ok()
        {
            // SYNC(turn): see `take_turn`.
            fence(SeqCst);
            if let Some(next) = self.next_waiter(device, own.slot) {
                self.hand(device, 0, next);
            }
        }
    }

    fn hand(&self, device: usize, from: u64, to: usize) {
        let word = turn_word(to, self.state().slots[to].generation.load(Acquire));
        if self.state().devices[device]
            .turn
            .compare_exchange(from, word, AcqRel, Acquire)
            .is_ok()
        {
            let bell = &self.slot_device(to, device).bell;
            bell.fetch_add(1, AcqRel);
            futex_wake(bell);
        }
    }

    /// Notes that this process used the engine for longer than its slice, because host code that stands for a kernel
    /// cannot be stopped half way.
    pub fn overran(&self, device: usize, ns: u64) {
        if let Some(own) = self.own() {
            self.slot_device(own.slot, device)
                .debt_ns
                .fetch_add(ns, Relaxed);
        }
    }

    /// The next process in turn; one in debt loses its turn for every slice that it owes.
    fn next_in_turn(&self, device: usize, after: usize) -> Option<usize> {
        let slice = self.scaled(self.profile.timeslice_ns).max(1);
        let waiting: Vec<usize> = self.waiters(device, after).collect();
        let mut best = None;
        for slot in &waiting {
            let debt = &self.slot_device(*slot, device).debt_ns;
            let owed = debt.load(Relaxed);
            if owed < slice {
                best = Some(*slot);
                break;
            }
            debt.store(owed - slice, Relaxed);
        }
        best.or_else(|| waiting.first().copied())
    }

    fn next_waiter(&self, device: usize, after: usize) -> Option<usize> {
        self.waiters(device, after).next()
    }

    /// Live waiting slots other than `after`, in the order of turns.
    fn waiters(&self, device: usize, after: usize) -> impl Iterator<Item = usize> {
        let shared = &self.state().devices[device];
        let words: [u64; WAITER_WORDS] = std::array::from_fn(|at| shared.waiters[at].load(SeqCst));
        let any = words.iter().any(|word| *word != 0);
        (1..SLOTS)
            .take_while(move |_| any)
            .map(move |step| (after + step) % SLOTS)
            .filter(move |slot| words[slot / 64] & (1 << (slot % 64)) != 0)
            .filter(move |slot| {
                let alive = self.alive(*slot);
                if !alive {
                    self.state().devices[device].waiters[slot / 64]
                        .fetch_and(!(1 << (slot % 64)), SeqCst);
                }
                alive
            })
    }

    fn holds_alive(&self, word: u64) -> bool {
        let slot = (word & 0xffff) as usize;
        if !(1..=SLOTS).contains(&slot) {
            return false;
        }
        word == turn_word(
            slot - 1,
            self.state().slots[slot - 1].generation.load(Acquire),
        ) && self.alive(slot - 1)
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

/// How far back in time work may start when its process was late: the host's scheduler is not the device's fault.
pub const CATCH_UP_NS: u64 = 1_000_000;

fn turn_word(slot: usize, generation: u64) -> u64 {
    (generation << 16) | (slot as u64 + 1)
}

impl Header {
    fn config(&self) -> String {
        let len = (self.config_len.load(Relaxed) as usize).min(CONFIG_BYTES);
        let bytes: Vec<u8> = self
            .config
            .iter()
            .flat_map(|word| word.load(Relaxed).to_ne_bytes())
            .take(len)
            .collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn set_config(&self, text: &str) -> Result<(), BadConfig> {
        if text.len() > CONFIG_BYTES {
            return Err(BadConfig(format!(
                "the profile is {} bytes long, at most {CONFIG_BYTES} fit",
                text.len()
            )));
        }
        for (at, chunk) in text.as_bytes().chunks(8).enumerate() {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.config[at].store(u64::from_ne_bytes(word), Relaxed);
        }
        self.config_len.store(text.len() as u32, Relaxed);
        Ok(())
    }
}

fn record(kind: libc::c_int, at: i64) -> libc::flock {
    // SAFETY: flock is plain integers; zero is valid for each.
    let mut record: libc::flock = unsafe { std::mem::zeroed() };
    record.l_type = kind as libc::c_short;
    record.l_whence = libc::SEEK_SET as libc::c_short;
    record.l_start = at;
    record.l_len = 1;
    record
}

fn lock(fd: RawFd, at: i64, command: libc::c_int) -> io::Result<()> {
    let record = record(libc::F_WRLCK, at);
    loop {
        // SAFETY: fcntl on our descriptor with a structure that outlives the call.
        if unsafe { libc::fcntl(fd.as_raw_fd(), command, &record) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

fn unlock(fd: RawFd, at: i64) {
    let record = record(libc::F_UNLCK, at);
    // SAFETY: as in `lock`; unlocking own bytes cannot fail in a way that we could repair.
    unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETLK, &record) };
}

fn locked_by_another(fd: RawFd, at: i64) -> bool {
    let mut record = record(libc::F_WRLCK, at);
    // SAFETY: as in `lock`; the structure is written by the call.
    let answered = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETLK, &mut record) } == 0;
    answered && record.l_type != libc::F_UNLCK as libc::c_short
}

/// A number that the kernel draws for every executed program, the same for all libraries in it.
fn image_number() -> u64 {
    // SAFETY: getauxval has no preconditions; AT_RANDOM points to 16 bytes that live as long as the program.
    unsafe {
        let random = libc::getauxval(libc::AT_RANDOM) as *const u64;
        if random.is_null() {
            0
        } else {
            random.read_unaligned()
        }
    }
}

fn futex_wait(word: &AtomicU32, expected: u32, timeout: Duration) {
    let timeout = libc::timespec {
        tv_sec: 0,
        tv_nsec: timeout.subsec_nanos().into(),
    };
    // SAFETY: the word is mapped and outlives the call; a shared (not private) futex, since processes meet on it.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            libc::FUTEX_WAIT,
            expected,
            &timeout,
        )
    };
}

fn futex_wake(word: &AtomicU32) {
    // SAFETY: as in `futex_wait`.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
}

/// A memfd that programs started by exec do not inherit.
pub(crate) fn memfd(name: &str) -> io::Result<OwnedFd> {
    use std::os::fd::FromRawFd;
    let name = CString::new(name).unwrap_or_default();
    // SAFETY: the name is NUL-terminated and outlives the call.
    let fd = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just gave us this descriptor and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
