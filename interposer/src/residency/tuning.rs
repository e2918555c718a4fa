//! Sizes and times, and the switches that a measurement may turn.
//!
//! `SUBLET_RESIDENCY` is read once, at attachment: words `chunk=BYTES` (a power of two of at least
//! 2 MiB), `depth=COPIES`, `pipeline=0`, `pin=0`, `touch=0`, `reuse=0`, `look=0`, `rdma=0` or 1,
//! `turn=MILLISECONDS`. They exist so that what each of them is worth can be measured (PipeSwitch,
//! OSDI 2020, table 5); what cannot be read is ignored.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use super::chunk::GRANULE;
use crate::ground::environment::variable;

/// Bytes of one physical handle. Create, map and access cost tens of microseconds a handle,
/// whatever its size, and so do unmap and release; a copy of 64 MiB takes a millisecond or more on
/// today's links, so that this disappears behind it. Smaller ones would let another tenant's memory
/// in earlier, but by less than the cost.
static CHUNK: AtomicU64 = AtomicU64::new(64 << 20);
/// Copies under way at once: with two the copy engine never waits for us; more cover a late
/// wake-up.
static DEPTH: AtomicU64 = AtomicU64::new(4);
static PIPELINE: AtomicBool = AtomicBool::new(true);
static PIN: AtomicBool = AtomicBool::new(true);
static TOUCH: AtomicBool = AtomicBool::new(true);
static REUSE: AtomicBool = AtomicBool::new(true);
static LOOK: AtomicBool = AtomicBool::new(true);
/// TIMEOUT: how long a whole move waits for its turns to lock host memory, in milliseconds: some
/// terms of others.
static TURN_MS: AtomicU64 = AtomicU64::new(3000);
/// Whether network adapters may know memory of this process that they were made to reach.
static ADAPTERS: AtomicBool = AtomicBool::new(false);

/// TIMEOUT: how long an allocation that the quota allows waits for device memory that other tenants
/// are to leave: some switches of twenty gigabytes, of others that have just asked for theirs, on a
/// host that is busy.
pub(super) const SPACE: Duration = Duration::from_secs(30);
/// TIMEOUT: how long what has left may take to come back after an eviction that stopped half-way.
pub(super) const UNDO: Duration = Duration::from_secs(10);
/// TIMEOUT: how long host copies of a job whose memory is on the device are kept without being
/// used.
pub(super) const KEEP_HOST_COPIES_NS: u64 = 60_000_000_000;
/// TIMEOUT: how long the client tries to bring its memory back by itself, without an arbiter,
/// before calls fail.
pub(super) const UNSUPERVISED: Duration = Duration::from_secs(30);

/// Where the host's files are looked for, if not where they are: for tests.
static HOST_ROOT: OnceLock<PathBuf> = OnceLock::new();

/// Where the host's files are looked for, if not where they are.
pub(super) fn host_root() -> Option<&'static Path> {
    HOST_ROOT.get().map(PathBuf::as_path)
}

pub(super) fn read() {
    // For tests: where the host's own files are.
    if let Some(root) = variable(c"SUBLET_HOST_ROOT") {
        let _ = HOST_ROOT.set(OsStr::from_bytes(root).into());
    }
    // Drivers through which a network adapter's driver learns of an address, and we do not.
    let root = host_root().unwrap_or(Path::new("/"));
    let loaded = ["nvidia_peermem", "nv_peer_mem"]
        .iter()
        .any(|module| root.join("sys/module").join(module).exists());
    ADAPTERS.store(loaded, Ordering::Relaxed);
    let Some(text) = variable(c"SUBLET_RESIDENCY").and_then(|text| str::from_utf8(text).ok())
    else {
        return;
    };
    for word in text.split([',', ' ']) {
        let Some((key, value)) = word.split_once('=') else {
            continue;
        };
        let Ok(number) = value.trim().parse::<u64>() else {
            continue;
        };
        match key.trim() {
            "chunk" if number >= GRANULE && number.is_power_of_two() => {
                CHUNK.store(number, Ordering::Relaxed);
            }
            "depth" if (1..=64).contains(&number) => DEPTH.store(number, Ordering::Relaxed),
            "pipeline" => PIPELINE.store(number != 0, Ordering::Relaxed),
            "pin" => PIN.store(number != 0, Ordering::Relaxed),
            "touch" => TOUCH.store(number != 0, Ordering::Relaxed),
            "reuse" => REUSE.store(number != 0, Ordering::Relaxed),
            "turn" if number <= 600_000 => TURN_MS.store(number, Ordering::Relaxed),
            "rdma" => ADAPTERS.store(number != 0, Ordering::Relaxed),
            "look" => LOOK.store(number != 0, Ordering::Relaxed),
            _ => {}
        }
    }
}

/// Bytes of one physical handle, at most.
pub(super) fn chunk_bytes() -> u64 {
    CHUNK.load(Ordering::Relaxed)
}

/// Copies that are under way at once.
pub(super) fn depth() -> usize {
    if PIPELINE.load(Ordering::Relaxed) {
        DEPTH.load(Ordering::Relaxed) as usize // CAST: at most 64.
    } else {
        1
    }
}

/// The same, where chunks that need no copy leave meanwhile: many that do may lie before them.
pub(super) fn depth_past_unchanged() -> usize {
    match depth() {
        1 => 1,
        depth => 16 * depth,
    }
}

/// Whether host copies lie in pinned memory.
pub(super) fn pins() -> bool {
    PIN.load(Ordering::Relaxed)
}

/// Whether host copies have their pages before they are pinned. A simulated driver pins pages that
/// are not there.
pub(super) fn touches() -> bool {
    TOUCH.load(Ordering::Relaxed)
}

/// Whether what has not changed since it was last copied out is not copied again.
pub(super) fn reuses() -> bool {
    REUSE.load(Ordering::Relaxed)
}

/// How long a whole move waits for its turns to lock host memory.
pub(super) fn turn() -> Duration {
    Duration::from_millis(TURN_MS.load(Ordering::Relaxed))
}

/// Whether memory that was made for network adapters may be known to one.
pub(super) fn adapters_may_know() -> bool {
    ADAPTERS.load(Ordering::Relaxed)
}

/// Whether what was used last is asked for; otherwise what was made last is taken for it.
pub(super) fn looks() -> bool {
    LOOK.load(Ordering::Relaxed)
}
