//! Our attachment to the arbiter: made at the first successful `cuInit`, lost and found again,
//! forgotten after a fork.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use rustix::thread::futex;

use channel::client::{AttachError, ClientEnd, Introduction, Liveness};
use channel::wire::{DeviceId, Outcome};
use channel::{Account, Bypass, Event, MAX_DEVICES};
use shim_ffi::*;

use crate::attachment::job::{self, Job, Membership, OnLoss, OnRefusal};
use crate::attachment::refusal;
use crate::driver::real;
use crate::ground::clock::{self, now_ns, pause};
use crate::ground::errno::Preserve;
use crate::ground::{fault, process};

/// How long one handshake may take. TIMEOUT: the arbiter answers in well under a millisecond; a
/// machine that is swapping may need much longer, and a job that starts ungoverned is worse than
/// one that starts late.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// How often an arbiter that is not there is looked for, to begin with.
const AGAIN: Duration = Duration::from_millis(20);
/// TIMEOUT: how long a thread waits for another one's attachment, which takes no longer itself.
const OTHERS_ATTACH_NS: u64 = 75_000_000_000;
/// TIMEOUT: silence after which an arbiter that lives is taken for stuck: 25 of its beats. Until
/// then who has an open gate has the device for itself.
const SILENCE_NS: u64 = 2_500_000_000;
/// How old the arbiter's word about ended processes may be for a report of what is used.
const CREDIT_EVERY_NS: u64 = 1_000_000;
/// How often a lost arbiter is looked for, in nanoseconds.
const REATTACH_EVERY_NS: u64 = 500_000_000;

/// One attachment. Leaked: threads may be looking at it until the process ends.
pub(crate) struct Attached {
    pub(crate) end: ClientEnd,
    pub(crate) on_loss: OnLoss,
    /// Set when the arbiter is known to be gone.
    lost: AtomicBool,
    lost_at_ns: AtomicU64,
    next_try_ns: AtomicU64,
    /// The heartbeat after which the arbiter fell silent, plus one; 0: it was never known to.
    silent_after: AtomicU64,
    /// The same of the one after which it did not answer a question about the dead.
    unanswered_after: AtomicU64,
    /// When it answered the last one.
    credited_ns: AtomicU64,
    /// No device but the job's may be used: a context elsewhere is refused.
    strict: bool,
    /// Devices, by the driver's ordinal as bits, that are not the job's and that it was reported
    /// that they are used.
    reported_other_devices: AtomicU32,
    introduction: Introduction,
    socket: &'static Path,
    /// The one before it.
    before: AtomicPtr<Attached>,
}

static CURRENT: AtomicPtr<Attached> = AtomicPtr::new(std::ptr::null_mut());
/// The last one that there was: they all stay, for threads may use them, and are to be found by who
/// looks for memory that is lost.
static LAST: AtomicPtr<Attached> = AtomicPtr::new(std::ptr::null_mut());
/// Changes whenever [`CURRENT`] does; what threads have cached belongs to one generation.
static GENERATION: AtomicU32 = AtomicU32::new(1);
/// [`NEVER`], [`BUSY`] or [`DONE`]; waited on.
static ATTACHING: AtomicU32 = AtomicU32::new(NEVER);
/// Never tried in this process, or to be tried again.
const NEVER: u32 = 0;
/// A thread is at it.
const BUSY: u32 = 1;
/// Attached, or not, for good.
const DONE: u32 = 2;
/// The thread that is at it; 0: none.
static ATTACHER: AtomicU32 = AtomicU32::new(0);

/// Our attachment, if there is one.
#[inline]
pub(crate) fn current() -> Option<&'static Attached> {
    let at = CURRENT.load(Ordering::Acquire);
    // SAFETY: null, or leaked by `install` and never freed.
    unsafe { at.as_ref() }
}

/// What a call is answered that would begin to use the device of that ordinal, which is none that
/// a strict job may use; `None`: it may.
#[inline]
pub(crate) fn kept_off(ordinal: i32) -> Option<CUresult> {
    current()?.kept_off(ordinal)
}

/// Whether the job may use no device but its own.
#[inline]
pub(crate) fn is_strict() -> bool {
    current().is_some_and(|attached| attached.strict)
}

/// Number of the present attachment.
#[inline]
pub(crate) fn generation() -> u32 {
    GENERATION.load(Ordering::Relaxed)
}

fn install(attached: Option<Box<Attached>>) {
    // SYNC(last): nobody reads through it.
    let at = attached.map_or(std::ptr::null_mut(), |new| {
        clock::dilate(new.end.arbiter.dilation());
        new.end.client.set_weighs();
        new.before
            .store(LAST.load(Ordering::Relaxed), Ordering::Relaxed);
        let at = Box::into_raw(new);
        LAST.store(at, Ordering::Relaxed);
        at
    });
    CURRENT.store(at, Ordering::Release);
    GENERATION.fetch_add(1, Ordering::Release);
}

/// In a forked child: as if never attached.
pub(crate) fn forget() {
    job::forget();
    install(None);
    ATTACHING.store(NEVER, Ordering::Release);
    ATTACHER.store(0, Ordering::Relaxed);
}

/// At exit: forward only.
pub(crate) fn stop() {
    install(None);
}

/// What the rest of the library does for an attachment.
pub(crate) struct Steps {
    /// Before the first one: all that may take the dynamic linker's lock. Threads that come at the
    /// same time all do it.
    pub(crate) prepare: fn(),
    /// After the first one, before any other thread hears of it.
    pub(crate) attached: fn(&Attached),
}

/// After a successful `cuInit`. Says what the program is answered instead of success, if it must
/// not run ungoverned: then every later call of it is answered the same, see [`real::refuse`].
pub(crate) fn attach(steps: &Steps) -> Result<(), CUresult> {
    let turn = match ATTACHING.load(Ordering::Acquire) {
        DONE => return Ok(()),
        _ => std::panic::catch_unwind(|| take_turn(steps)),
    };
    match turn {
        Ok(outcome) => outcome,
        Err(_) => after_a_panic(),
    }
}

/// A bug of ours must not be a way out of a quota: what the job says about a process that cannot be
/// governed holds, and where not even that can be found out the process is refused.
fn after_a_panic() -> Result<(), CUresult> {
    let _errno = Preserve::new();
    let why = "an internal error of libsublet.so: please report it";
    let answer = std::panic::catch_unwind(|| {
        let job = Job::of_this_process();
        job.map_or_else(job::said, |job| Some(job.on_refusal))
    });
    match answer {
        Ok(None | Some(OnRefusal::Open)) => {
            refusal::run_unlimited(&why);
            Ok(())
        }
        Ok(Some(OnRefusal::Closed)) | Err(_) => refusal::refuse(&why),
    }
}

/// The right to attach; a thread that waits looks again when it is gone, also by a panic.
struct Turn {
    /// What [`ATTACHING`] is to be afterwards.
    then: u32,
}

impl Drop for Turn {
    fn drop(&mut self) {
        ATTACHER.store(0, Ordering::Relaxed);
        ATTACHING.store(self.then, Ordering::Release);
        let _ = futex::wake(&ATTACHING, futex::Flags::PRIVATE, i32::MAX as u32);
    }
}

fn take_turn(steps: &Steps) -> Result<(), CUresult> {
    let _errno = Preserve::new();
    if real::is_refused() {
        return Err(CUresult::CUDA_ERROR_SYSTEM_NOT_READY);
    }
    let Some(job) = Job::of_this_process() else {
        // Somebody has asked for limits, and who enforces them can no longer be found.
        if job::said() == Some(OnRefusal::Closed) && !process::exiting() {
            let lost = "its environment has lost SUBLET_SOCKET or SUBLET_TOKEN, or, in a \
                container, SUBLET_CONTAINER";
            return refusal::refuse(&lost);
        }
        return Ok(());
    };
    // All that may take the dynamic linker's lock comes before the turn: the thread that waits for
    // a turn may hold that lock.
    let introduction = prepare(&job, steps);
    // CAST: thread ids are positive.
    let me = rustix::thread::gettid().as_raw_nonzero().get() as u32;
    let begun_ns = now_ns();
    loop {
        let taken = ATTACHING.compare_exchange(NEVER, BUSY, Ordering::Acquire, Ordering::Acquire);
        match taken {
            Ok(_) => {
                ATTACHER.store(me, Ordering::Relaxed);
                let _turn = Turn { then: DONE };
                return first_attach(&job, introduction, steps);
            }
            Err(DONE) if real::is_refused() => return Err(CUresult::CUDA_ERROR_SYSTEM_NOT_READY),
            Err(DONE) => return Ok(()),
            // Called from within our own handshake, by a signal's handler: it cannot end before
            // this returns.
            Err(_) if ATTACHER.load(Ordering::Relaxed) == me => return without(&job),
            Err(_) if now_ns().saturating_sub(begun_ns) > OTHERS_ATTACH_NS => return without(&job),
            Err(state) => wait_for_another(state),
        }
    }
}

/// A step of waiting for the thread that attaches.
fn wait_for_another(state: u32) {
    let step = rustix::time::Timespec {
        tv_sec: 0,
        tv_nsec: 50_000_000,
    };
    let waited = futex::wait(&ATTACHING, futex::Flags::PRIVATE, state, Some(&step));
    use rustix::io::Errno;
    if !matches!(
        waited,
        Ok(()) | Err(Errno::AGAIN | Errno::INTR | Errno::TIMEDOUT)
    ) {
        // The call is forbidden here.
        pause(Duration::from_millis(1));
    }
}

/// What a call hears that cannot wait until it is known whether the process is governed.
fn without(job: &Job) -> Result<(), CUresult> {
    match job.on_refusal {
        OnRefusal::Open => Ok(()),
        OnRefusal::Closed => Err(CUresult::CUDA_ERROR_SYSTEM_NOT_READY),
    }
}

fn prepare(job: &Job, steps: &Steps) -> Introduction {
    process::watch();
    fault::attachment();
    (steps.prepare)();
    introduction(job.membership, devices())
}

/// What this process tells of itself.
fn introduction(membership: &Membership, devices: Vec<DeviceId>) -> Introduction {
    let (token, asked) = membership.credentials();
    Introduction {
        token,
        devices,
        command: command(),
        asked,
    }
}

/// An attachment besides the one that [`attach`] makes, for a process that only reads: it is shown
/// the job's pages.
pub(crate) fn attach_reader(devices: &[DeviceId]) -> Option<ClientEnd> {
    let membership = job::membership()?;
    process::watch();
    let introduction = introduction(membership, devices.to_vec());
    // TIMEOUT: a report that takes a second is a nuisance; without the pages the physical truth is
    // reported.
    let patience = Duration::from_secs(1);
    let end = ClientEnd::attach_reader(membership.socket(), &introduction, patience).ok()?;
    clock::dilate(end.arbiter.dilation());
    Some(end)
}

fn first_attach(job: &Job, introduction: Introduction, steps: &Steps) -> Result<(), CUresult> {
    let started = now_ns();
    loop {
        let error = match ClientEnd::attach(job.membership.socket(), &introduction, HANDSHAKE) {
            Ok(end) => {
                let none = end.device_map.iter().all(Option::is_none);
                if job.strict && none && !introduction.devices.is_empty() {
                    let reason = "none of its devices is one of the job's, and the job is strict";
                    end.farewell(reason);
                    return refusal::refuse(&reason);
                }
                install(Some(Box::new(Attached {
                    end,
                    on_loss: job.on_loss,
                    lost: AtomicBool::new(false),
                    lost_at_ns: AtomicU64::new(0),
                    next_try_ns: AtomicU64::new(0),
                    silent_after: AtomicU64::new(0),
                    unanswered_after: AtomicU64::new(0),
                    credited_ns: AtomicU64::new(0),
                    strict: job.strict,
                    reported_other_devices: AtomicU32::new(0),
                    introduction,
                    socket: job.membership.socket(),
                    before: AtomicPtr::default(),
                })));
                if let Some(attached) = current() {
                    (steps.attached)(attached);
                }
                return Ok(());
            }
            Err(error) => error,
        };
        let waited = Duration::from_nanos(now_ns().saturating_sub(started));
        if error.may_pass() && waited < job.patience {
            pause(AGAIN);
            continue;
        }
        let why = refusal::Why {
            error: &error,
            socket: job.membership.socket(),
            waited,
            unknown: job.membership.unknown(),
        };
        // The job has a limit that would hold on no device: that was never a start.
        let nowhere = matches!(error, AttachError::Refused(Outcome::NoDevice, _));
        return match job.on_refusal {
            OnRefusal::Open if !nowhere || job::said().is_some() => {
                refusal::run_unlimited(&why);
                Ok(())
            }
            _ => refusal::refuse(&why),
        };
    }
}

impl Attached {
    /// The tenant's memory account of this process.
    #[inline]
    pub(crate) fn account(&self) -> Option<Account<'static>> {
        Account::new(self.end.tenant, self.end.slot)
    }

    /// Memory limit on device index `device`, in bytes.
    #[inline]
    pub(crate) fn limit_bytes(&self, device: usize) -> u64 {
        self.end
            .arbiter
            .device(device)
            .map_or(channel::NO_LIMIT, channel::DeviceGrant::limit_bytes)
    }

    /// Device index of the pages of the device with that UUID, if this process's driver has it and
    /// the job may use it.
    pub(crate) fn index_of_uuid(&self, uuid: &[u8; 16]) -> Option<usize> {
        let devices = &self.introduction.devices;
        let ordinal = devices.iter().position(|id| id.uuid == *uuid)?;
        (*self.end.device_map.get(ordinal)?).map(usize::from)
    }

    /// Writes into the journal's ring. The arbiter reads that ten times a second, and no bell
    /// brings it there sooner: a program may cause such an event as often as it likes, and is not
    /// to ring for it.
    pub(crate) fn tell(&self, device: usize, event: Event) {
        // CAST: an index of a page, or a driver's ordinal.
        self.end.client.write_record(device as u32, event);
    }

    /// Tells, once for each, that work goes to the device of that ordinal, which is not one of the
    /// job's: the arbiter, and who has started the job.
    #[inline]
    pub(crate) fn tell_other_device(&self, ordinal: i32) {
        let bit = 1u32.checked_shl(ordinal.unsigned_abs()).unwrap_or(1 << 31);
        if self.reported_other_devices.load(Ordering::Relaxed) & bit == 0 {
            self.tell_new_other_device(ordinal, bit);
        }
    }

    #[cold]
    #[inline(never)]
    fn tell_new_other_device(&self, ordinal: i32, bit: u32) {
        let before = self.reported_other_devices.fetch_or(bit, Ordering::Relaxed);
        if before & bit != 0 {
            return;
        }
        let event = Event::Bypassing {
            reason: Bypass::OtherDevice,
        };
        // CAST: below the number of devices.
        self.tell(ordinal as usize, event);
        refusal::elsewhere(ordinal, self.strict);
    }

    /// What a call is answered that would begin to use the device of that ordinal: nothing where it
    /// is the job's, or the job is not strict.
    #[inline]
    pub(crate) fn kept_off(&self, ordinal: i32) -> Option<CUresult> {
        if !self.strict {
            return None;
        }
        let map = &self.end.device_map;
        // One that is not a device at all is the driver's to refuse.
        match usize::try_from(ordinal).ok().and_then(|at| map.get(at)) {
            Some(None) => {
                self.tell_other_device(ordinal);
                Some(CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE)
            }
            _ => None,
        }
    }

    /// Tells that the hook of a row of the table failed.
    pub(crate) fn tell_failed_hook(&self, row: u32) {
        self.tell(0, Event::HookFailed { row });
    }

    /// Whether the arbiter is known to be gone.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    /// Whether the arbiter is known to hang: somebody has watched it for [`SILENCE_NS`] in vain,
    /// and it has not beaten since.
    pub(crate) fn is_silent(&self) -> bool {
        let after = self.silent_after.load(Ordering::Relaxed);
        after != 0 && after == self.end.arbiter.heartbeat_mono_ns().wrapping_add(1)
    }

    /// Whether the last heartbeat is so old that the arbiter may hang. It may also be us who have
    /// not run: only one who has watched it since `begun_ns` knows.
    pub(crate) fn is_overdue(&self, begun_ns: u64, now_ns: u64) -> bool {
        let last_ns = self.end.arbiter.heartbeat_mono_ns().max(begun_ns);
        now_ns.saturating_sub(last_ns) > SILENCE_NS
    }

    /// Notes that the arbiter hangs: what the job does without one holds from here on, until it
    /// beats again.
    pub(crate) fn fall_silent(&self, device: usize) {
        let after = self.end.arbiter.heartbeat_mono_ns().wrapping_add(1);
        let is_new = self.silent_after.swap(after, Ordering::Relaxed) != after;
        if is_new && self.on_loss == OnLoss::Open {
            let event = Event::Bypassing {
                reason: Bypass::GateStuck,
            };
            // CAST: below MAX_DEVICES.
            self.end.client.write_record(device as u32, event);
        }
    }

    /// Has the arbiter free what processes of the job had that have ended by now. False where it
    /// does not say that it has: there is none, or it stands still, or is of an older version.
    ///
    /// Who refuses memory for what others hold asks this first: the program may have waited for the
    /// end of one of them, and counts on what that had.
    #[cold]
    #[inline(never)]
    pub(crate) fn credit_the_dead(&self) -> bool {
        let arbiter = self.end.arbiter;
        let beat = || arbiter.heartbeat_mono_ns().wrapping_add(1);
        let in_vain = self.unanswered_after.load(Ordering::Relaxed) == beat();
        if !arbiter.answers_credit() || self.is_lost() || self.is_silent() || in_vain {
            return false;
        }
        let number = self.end.client.ask_for_credit();
        self.end.ring();
        let begun_ns = now_ns();
        while !arbiter.is_credited(number) {
            if process::exiting() || self.end.arbiter_liveness() == Liveness::Gone {
                return false;
            }
            // TIMEOUT: an arbiter that lives answers within a turn of its loop, and within its
            // housekeeping where it hears no bell. One that stands still is not asked again before
            // it beats.
            let now = now_ns();
            if self.is_overdue(begun_ns, now) || now.saturating_sub(begun_ns) > 2 * SILENCE_NS {
                self.unanswered_after.store(beat(), Ordering::Relaxed);
                return false;
            }
            arbiter.wait_for_credit(number, AGAIN);
        }
        self.credited_ns.store(begun_ns, Ordering::Relaxed);
        true
    }

    /// The same for a report of what is used, which a program may ask for all the time.
    pub(crate) fn credit_the_dead_lately(&self) {
        let last_ns = self.credited_ns.load(Ordering::Relaxed);
        if now_ns().saturating_sub(last_ns) > CREDIT_EVERY_NS {
            self.credit_the_dead();
        }
    }

    /// When it was found gone.
    pub(crate) fn lost_at_ns(&self) -> u64 {
        self.lost_at_ns.load(Ordering::Relaxed)
    }

    /// Looks after the arbiter: notes its loss, and tries to attach to the next one. True while
    /// nobody governs us.
    pub(crate) fn look_after(&self, now_ns: u64) -> bool {
        if !self.is_lost() {
            match self.end.arbiter_liveness() {
                Liveness::Lives => return false,
                Liveness::Unknown if !self.is_silent() => return false,
                Liveness::Unknown | Liveness::Gone => {}
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
        // TIMEOUT: short, because a program's submission waits behind it; the next try comes soon
        // enough.
        match ClientEnd::reattach(
            self.socket,
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
                    silent_after: AtomicU64::new(0),
                    unanswered_after: AtomicU64::new(0),
                    credited_ns: AtomicU64::new(0),
                    strict: self.strict,
                    reported_other_devices: AtomicU32::new(
                        self.reported_other_devices.load(Ordering::Relaxed),
                    ),
                    introduction: self.introduction.clone(),
                    socket: self.socket,
                    before: AtomicPtr::default(),
                })));
                self.end.retire();
                false
            }
            Err(_) => true,
        }
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
