//! Our attachment to the arbiter: made at the first successful `cuInit`, lost and found again, forgotten after a fork.

use std::ffi::{CStr, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use channel::client::{AttachError, ClientEnd, Introduction};
use channel::wire::{DeviceId, Outcome, TOKEN_BYTES};
use channel::{Account, Bypass, Event, MAX_DEVICES};
use shim_ffi::*;

use crate::errno::Preserve;
use crate::{marks, nvml, process, real, residency};

/// How long the handshake may take. TIMEOUT: the arbiter answers in well under a millisecond; a machine that is swapping
/// may need much longer, and a job that starts ungoverned is worse than one that starts late.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// How long a job that must not run ungoverned waits for an arbiter. TIMEOUT: time enough for one to be restarted by hand.
const FREEZE: Duration = Duration::from_secs(60);
/// How often a lost arbiter is looked for, in nanoseconds.
const REATTACH_EVERY_NS: u64 = 500_000_000;

/// What a job does without its arbiter.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum OnLoss {
    /// Goes on, ungoverned in time; its memory quota still holds.
    Open,
    /// Waits for the next arbiter.
    Freeze,
    /// Submissions fail.
    Closed,
}

/// One attachment. Leaked: threads may be looking at it until the process ends.
pub(crate) struct Attached {
    pub(crate) end: ClientEnd,
    pub(crate) on_loss: OnLoss,
    /// Set when the arbiter is known to be gone.
    lost: AtomicBool,
    lost_at_ns: AtomicU64,
    next_try_ns: AtomicU64,
    /// Set once it was told that work goes to a device that is not one of the job's.
    told_other_device: AtomicBool,
    introduction: Introduction,
    socket: PathBuf,
}

static CURRENT: AtomicPtr<Attached> = AtomicPtr::new(std::ptr::null_mut());
/// Changes whenever [`CURRENT`] does; what threads have cached belongs to one generation.
static GENERATION: AtomicU32 = AtomicU32::new(1);
/// 0: never tried in this process, 1: somebody is at it, 2: done (attached or not).
static ATTACHING: AtomicU32 = AtomicU32::new(0);

/// Our attachment, if there is one.
#[inline]
pub(crate) fn current() -> Option<&'static Attached> {
    let at = CURRENT.load(Ordering::Acquire);
    // SAFETY: null, or leaked by `install` and never freed.
    unsafe { at.as_ref() }
}

/// Number of the present attachment.
#[inline]
pub(crate) fn generation() -> u32 {
    GENERATION.load(Ordering::Relaxed)
}

fn install(attached: Option<Box<Attached>>) {
    let at = attached.map_or(std::ptr::null_mut(), Box::into_raw);
    CURRENT.store(at, Ordering::Release);
    GENERATION.fetch_add(1, Ordering::Release);
}

/// In a forked child: as if never attached.
pub(crate) fn forget() {
    install(None);
    ATTACHING.store(0, Ordering::Release);
    real::restart_search();
    marks::forget();
    residency::forget();
}

/// At exit: forward only.
pub(crate) fn stop() {
    install(None);
}

/// After a successful `cuInit`. Says what the program is to be told instead of success, if it must not run ungoverned.
pub(crate) fn attach() -> Result<(), CUresult> {
    loop {
        match ATTACHING.load(Ordering::Acquire) {
            0 => {
                if ATTACHING
                    .compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed)
                    .is_ok()
                {
                    let outcome = first_attach();
                    // A refusal is final for this `cuInit`, not for the next one.
                    ATTACHING.store(if outcome.is_ok() { 2 } else { 0 }, Ordering::Release);
                    return outcome;
                }
            }
            1 => rustix::thread::sched_yield(),
            _ => return Ok(()),
        }
    }
}

/// Where the arbiter is, and the capability of our job; `None`: we are in none, or on our way out.
fn job() -> Option<(PathBuf, [u8; TOKEN_BYTES])> {
    if process::exiting() {
        return None;
    }
    let (socket, token) = (variable(c"SUBLET_SOCKET")?, variable(c"SUBLET_TOKEN")?);
    let socket = PathBuf::from(OsStr::from_bytes(socket));
    Some((socket, <[u8; TOKEN_BYTES]>::try_from(token).ok()?))
}

/// An attachment besides the one that [`attach`] makes, for a process that only reads: it is shown the job's pages.
pub(crate) fn attach_reader(devices: &[DeviceId]) -> Option<ClientEnd> {
    let (socket, token) = job()?;
    process::register();
    let introduction = Introduction {
        token,
        devices: devices.to_vec(),
        command: command(),
    };
    // TIMEOUT: a report that takes a second is a nuisance; without the pages the physical truth is told.
    ClientEnd::attach(&socket, &introduction, Duration::from_secs(1)).ok()
}

fn first_attach() -> Result<(), CUresult> {
    let _errno = Preserve::new();
    let Some((socket, token)) = job() else {
        return Ok(());
    };
    let on_loss = match variable(c"SUBLET_ON_ARBITER_LOSS") {
        Some(b"freeze") => OnLoss::Freeze,
        Some(b"closed") => OnLoss::Closed,
        _ => OnLoss::Open,
    };
    let strict = variable(c"SUBLET_STRICT").is_some();
    nvml::meet();
    process::register();
    let introduction = Introduction {
        token,
        devices: devices(),
        command: command(),
    };
    let started = now_ns();
    loop {
        match ClientEnd::attach(&socket, &introduction, HANDSHAKE) {
            Ok(end) => {
                let none = end.device_map.iter().all(Option::is_none);
                if strict && none && !introduction.devices.is_empty() {
                    return Err(CUresult::CUDA_ERROR_SYSTEM_NOT_READY);
                }
                install(Some(Box::new(Attached {
                    end,
                    on_loss,
                    lost: AtomicBool::new(false),
                    lost_at_ns: AtomicU64::new(0),
                    next_try_ns: AtomicU64::new(0),
                    told_other_device: AtomicBool::new(false),
                    introduction,
                    socket,
                })));
                if let Some(attached) = current() {
                    residency::begin(attached);
                }
                return Ok(());
            }
            // The job has a limit that would hold on no device.
            Err(AttachError::Refused(Outcome::NoDevice, _)) => {
                return Err(CUresult::CUDA_ERROR_SYSTEM_NOT_READY);
            }
            Err(_) => match on_loss {
                OnLoss::Open => return Ok(()),
                OnLoss::Closed => return Err(CUresult::CUDA_ERROR_SYSTEM_NOT_READY),
                OnLoss::Freeze if now_ns().saturating_sub(started) > FREEZE.as_nanos() as u64 => {
                    return Err(CUresult::CUDA_ERROR_SYSTEM_NOT_READY);
                }
                OnLoss::Freeze => pause(Duration::from_millis(100)),
            },
        }
    }
}

impl Attached {
    /// The tenant's memory account of this process.
    #[inline]
    pub(crate) fn account(&self) -> Option<Account<'static>> {
        Account::new(self.end.tenant, self.end.keepsake.slot)
    }

    /// Memory limit on device index `device`, in bytes.
    #[inline]
    pub(crate) fn limit_bytes(&self, device: usize) -> u64 {
        self.end
            .arbiter
            .device(device)
            .map_or(channel::NO_LIMIT, channel::DeviceGrant::limit_bytes)
    }

    /// Device index of the pages of the device with that UUID, if this process's driver has it and the job may use it.
    pub(crate) fn index_of_uuid(&self, uuid: &[u8; 16]) -> Option<usize> {
        let devices = &self.introduction.devices;
        let ordinal = devices.iter().position(|id| id.uuid == *uuid)?;
        (*self.end.device_map.get(ordinal)?).map(usize::from)
    }

    /// Tells, once, that work goes to the device of that ordinal, which is not one of the job's.
    pub(crate) fn tell_other_device(&self, ordinal: i32) {
        if !self.told_other_device.swap(true, Ordering::Relaxed) {
            let event = Event::Bypassing {
                reason: Bypass::OtherDevice,
            };
            // CAST: below the number of devices.
            self.end.client.write_record(ordinal as u32, event);
            self.end.ring();
        }
    }

    /// Whether the arbiter is known to be gone.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    /// When it was found gone.
    pub(crate) fn lost_at_ns(&self) -> u64 {
        self.lost_at_ns.load(Ordering::Relaxed)
    }

    /// Looks after the arbiter: notes its loss, and tries to attach to the next one. True while nobody governs us.
    pub(crate) fn look_after(&self, now_ns: u64) -> bool {
        if !self.is_lost() {
            if self.end.arbiter_lives() {
                return false;
            }
            if !self.lost.swap(true, Ordering::Relaxed) {
                self.lost_at_ns.store(now_ns, Ordering::Relaxed);
                self.end.client.write_record(
                    0,
                    Event::Bypassing {
                        reason: Bypass::ArbiterLost,
                    },
                );
            }
        }
        let due = self.next_try_ns.load(Ordering::Relaxed);
        if now_ns < due {
            return true;
        }
        if self
            .next_try_ns
            .compare_exchange(
                due,
                now_ns + REATTACH_EVERY_NS,
                Ordering::Relaxed,
                Ordering::Relaxed,
            )
            .is_err()
        {
            return true; // another thread is at it
        }
        if !std::ptr::eq(CURRENT.load(Ordering::Acquire), self) {
            return true; // somebody else's old attachment
        }
        let gap =
            Duration::from_nanos(now_ns.saturating_sub(self.lost_at_ns.load(Ordering::Relaxed)));
        // TIMEOUT: short, because a program's submission waits behind it; the next try comes soon enough.
        match ClientEnd::reattach(
            &self.socket,
            &self.introduction,
            &self.end,
            gap,
            Duration::from_millis(200),
        ) {
            Ok(end) => {
                end.client.write_record(
                    0,
                    Event::Reattached {
                        gap_ns: gap.as_nanos() as u64,
                    },
                );
                install(Some(Box::new(Attached {
                    end,
                    on_loss: self.on_loss,
                    lost: AtomicBool::new(false),
                    lost_at_ns: AtomicU64::new(0),
                    next_try_ns: AtomicU64::new(0),
                    told_other_device: AtomicBool::new(
                        self.told_other_device.load(Ordering::Relaxed),
                    ),
                    introduction: self.introduction.clone(),
                    socket: self.socket.clone(),
                })));
                false
            }
            Err(_) => true,
        }
    }
}

/// Monotonic time in nanoseconds.
pub(crate) fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    // CAST: the monotonic clock is never negative.
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Sleeps; may wake early.
pub(crate) fn pause(time: Duration) {
    let request = rustix::time::Timespec {
        tv_sec: time.as_secs() as i64,
        tv_nsec: i64::from(time.subsec_nanos()),
    };
    let _ = rustix::thread::nanosleep(&request);
}

/// An environment variable. Read by the C library's function: the standard library's takes a lock that a forking thread
/// may hold.
fn variable(name: &CStr) -> Option<&'static [u8]> {
    // SAFETY: NUL-terminated name; the answer is a NUL-terminated string of the environment, copied before it can change
    // (this runs inside the program's own first driver call).
    unsafe {
        let value = libc::getenv(name.as_ptr());
        (!value.is_null())
            .then(|| CStr::from_ptr(value).to_bytes())
            .filter(|value| !value.is_empty())
    }
}

fn command() -> String {
    let mut buffer = [0u8; 4096];
    let read = std::fs::File::open("/proc/self/cmdline")
        .and_then(|mut file| std::io::Read::read(&mut file, &mut buffer));
    let text = String::from_utf8_lossy(&buffer[..read.unwrap_or(0).min(buffer.len())]);
    text.split('\0')
        .filter(|word| !word.is_empty())
        .collect::<Vec<_>>()
        .join(" ")
}

fn devices() -> Vec<DeviceId> {
    let mut count = 0;
    // SAFETY: valid pointers to locals, after a successful `cuInit`.
    unsafe {
        if !real::cuDeviceGetCount(&raw mut count).is_ok() {
            return Vec::new();
        }
        (0..count.clamp(0, MAX_DEVICES as i32))
            .map(|ordinal| {
                let mut device = CUdevice::default();
                let mut uuid = CUuuid::default();
                let mut total = 0;
                if real::cuDeviceGet(&raw mut device, ordinal).is_ok() {
                    let named = real::exported(Symbol::cuDeviceGetUuid_v2)
                        && real::cuDeviceGetUuid_v2(&raw mut uuid, device).is_ok();
                    if !named {
                        let _ = real::cuDeviceGetUuid(&raw mut uuid, device);
                    }
                    let _ = real::cuDeviceTotalMem_v2(&raw mut total, device);
                }
                DeviceId {
                    uuid: uuid.bytes,
                    total_bytes: total as u64,
                }
            })
            .collect()
    }
}
