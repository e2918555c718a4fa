//! What has not changed since it was last copied out need not be copied again: its host copy still
//! holds it.
//!
//! The device says so itself, at the speed of its memory: a kernel reads every chunk and writes a
//! hash of 128 bits per MiB, which is compared with the one of the last eviction. Weights that are
//! only read, caches and optimizer states of frozen layers are recognised that way. Two different
//! contents have the same hash with a probability of about 2^-128 each time (the kernel's source
//! says why); it is made for chance, not for an adversary, and a tenant that wanted to deceive it
//! would corrupt itself alone.
//!
//! Some chunks at a time, on a stream of their own: the copies of the first begin while the device
//! hashes the others. Table and hashes lie in pinned host memory, so that no device memory is
//! needed where there may be none. Where anything of this fails, everything is copied, the journal
//! hears of it once, and a later eviction tries again.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use channel::Event;
use shim_ffi::*;

use super::chunk;
use super::copy_streams::{self, CopyStreams, Flight, Step};
use super::host_copy::Digest;
use crate::attachment::client;
use crate::driver::real;

/// Bytes that one hash stands for.
pub(super) const RANGE: u64 = 1 << 20;
/// The kernel's threads per block.
const THREADS: u32 = 256;
/// Blocks at most: some for each multiprocessor of a large device.
const BLOCKS: usize = 1024;

/// The kernel as PTX: the driver compiles it for the device.
const MODULE: &str = concat!(include_str!("../../../simgpu/kernels/chunks.ptx"), "\0");

/// Evictions in a row that could not hash.
static FAILURES: AtomicU32 = AtomicU32::new(0);
/// Evictions that do not try again.
static SKIP: AtomicU32 = AtomicU32::new(0);
/// The journal knows.
static REPORTED: AtomicBool = AtomicBool::new(false);
/// Evictions without a try, at most: a driver that refuses the kernel for good costs one attempt in
/// so many.
const MOST_SKIPPED: u32 = 63;

/// The next try comes at the next eviction, then after 1, 3, 7 ... others: a device that was full
/// has space another time.
fn failed(status: CUresult, device: usize) {
    let failures = FAILURES.fetch_add(1, Ordering::Relaxed).min(30);
    SKIP.store(((1 << failures) - 1).min(MOST_SKIPPED), Ordering::Relaxed);
    if !REPORTED.swap(true, Ordering::Relaxed)
        && let Some(attached) = client::current()
    {
        let event = Event::NoHashes { status: status.0 };
        attached.tell(device, event);
    }
}

/// Bytes that are hashed by one launch, at most, where a chunk has no more: some tens of
/// microseconds of the device's. A copy waits for no more of them than its own, and a launch costs
/// a tenth of that.
const GROUP: u64 = 64 << 20;

/// Hashes of what chunks hold on the device, on their way.
pub(super) struct Digests {
    /// In the order of the chunks, per context.
    groups: VecDeque<Group>,
    ready: BTreeMap<u64, Digest>,
    /// The kernels' tables and hashes, a pair for each context.
    memory: Vec<(Pinned, Pinned)>,
}

/// Chunks whose hashes one launch finds.
struct Group {
    flight: Flight,
    /// Each with its bytes.
    chunks: Vec<(u64, u64)>,
    /// Their hashes, behind each other, in memory that [`Digests`] holds.
    hashes: *const u64,
}

/// Begins to hash what chunks hold on the device now; fewer, or none, where that cannot be had.
/// Nothing else may be under way on it, and a chunk stays mapped until its hash was taken.
pub(super) fn begin(ids: &[u64]) -> Digests {
    let mut digests = Digests {
        groups: VecDeque::new(),
        ready: BTreeMap::new(),
        memory: Vec::new(),
    };
    let skipped = SKIP.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| {
        left.checked_sub(1)
    });
    if skipped.is_ok() {
        return digests;
    }
    let mut device = 0;
    let mut by_context: BTreeMap<usize, Vec<(u64, u64, u64)>> = BTreeMap::new();
    chunk::with(|chunks| {
        for id in ids {
            if let Some(chunk) = chunks.all.get(id) {
                device = chunk.device;
                let of = by_context.entry(chunk.context).or_default();
                of.push((*id, chunk.address(), chunk.bytes));
            }
        }
    });
    let mut whole = true;
    for (context, all) in by_context {
        if let Err(stopped) = digests.launch(context, &all) {
            failed(stopped.status, device);
            whole = false;
        }
    }
    if whole {
        FAILURES.store(0, Ordering::Relaxed);
    }
    digests
}

/// Pinned host memory that the device reaches at the same address.
struct Pinned(*mut u64);

impl Pinned {
    fn take(words: usize) -> Step<Self> {
        const PORTABLE_AND_MAPPED: u32 = 3;
        let mut at = std::ptr::null_mut();
        // SAFETY: valid pointer to a local.
        copy_streams::done(unsafe {
            real::cuMemHostAlloc(&raw mut at, words * 8, PORTABLE_AND_MAPPED)
        })?;
        Ok(Self(at.cast()))
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: taken above, and the kernel that used it is done.
        let _ = unsafe { real::cuMemFreeHost(self.0.cast()) };
    }
}

impl Digests {
    /// Launches the kernels over the chunks of a context: number, address and bytes of each.
    fn launch(&mut self, context: usize, all: &[(u64, u64, u64)]) -> Step<()> {
        let copy_streams = copy_streams::enter(context)?;
        let kernel = kernel(context, copy_streams)?;
        let count = |bytes: u64| bytes.div_ceil(RANGE) as usize; // CAST: chunks lie in memory.
        let words = 2 * all.iter().map(|(_, _, bytes)| count(*bytes)).sum::<usize>();
        let (table, hashes) = (Pinned::take(words.max(2))?, Pinned::take(words.max(2))?);
        let words = (table.0, hashes.0);
        self.memory.push((table, hashes));
        self.launch_over(all, kernel, copy_streams, words)
            .inspect_err(|_| {
                // A kernel may have been launched that nobody waits for yet.
                if copy_streams::settle(copy_streams.back, 0).is_err() {
                    std::mem::forget(self.memory.pop());
                }
            })
    }

    fn launch_over(
        &mut self,
        all: &[(u64, u64, u64)],
        kernel: CUfunction,
        copy_streams: CopyStreams,
        (mut from, mut to): (*mut u64, *mut u64),
    ) -> Step<()> {
        for group in groups(all) {
            let ranges = group.iter().flat_map(|(_, address, bytes)| {
                (0..bytes.div_ceil(RANGE))
                    .map(move |at| (address + at * RANGE, RANGE.min(bytes - at * RANGE)))
            });
            let mut filled = 0;
            for (address, bytes) in ranges {
                // SAFETY: two words for each range.
                unsafe {
                    from.add(2 * filled).write(address);
                    from.add(2 * filled + 1).write(bytes);
                }
                filled += 1;
            }
            let bytes = group.iter().map(|(_, _, bytes)| bytes).sum();
            run(kernel, copy_streams.back, (to, from, filled))?;
            self.groups.push_back(Group {
                flight: Flight::begin(0, bytes, copy_streams.back)?,
                chunks: group.iter().map(|(id, _, bytes)| (*id, *bytes)).collect(),
                hashes: to,
            });
            // SAFETY: inside of what was taken, or one behind it.
            (from, to) = unsafe { (from.add(2 * filled), to.add(2 * filled)) };
        }
        Ok(())
    }

    /// The hashes of a chunk; `None`: they could not be had. Waits for them.
    pub(super) fn take(&mut self, id: u64) -> Option<Digest> {
        while !self.ready.contains_key(&id) {
            let at = self
                .groups
                .iter()
                .position(|group| group.chunks.iter().any(|(one, _)| *one == id))?;
            let group = self.groups.remove(at)?;
            if group.flight.land().is_err() {
                self.groups.push_front(group);
                return None;
            }
            let mut at = 0;
            for (id, bytes) in &group.chunks {
                let count = bytes.div_ceil(RANGE) as usize; // CAST: as above.
                let digest = (at..at + count)
                    // SAFETY: as many pairs of words as there are ranges, written by the kernel
                    // that is done.
                    .map(|at| unsafe {
                        [
                            group.hashes.add(2 * at).read(),
                            group.hashes.add(2 * at + 1).read(),
                        ]
                    })
                    .collect();
                self.ready.insert(*id, digest);
                at += count;
            }
        }
        self.ready.remove(&id)
    }
}

impl Drop for Digests {
    fn drop(&mut self) {
        // A kernel that still runs reads chunks and writes here.
        let landed = self.groups.iter().all(|group| group.flight.land().is_ok());
        if !landed {
            std::mem::forget(std::mem::take(&mut self.memory));
        }
    }
}

/// Chunks (number, address, bytes) in their order, as many together as one launch hashes.
fn groups(mut all: &[(u64, u64, u64)]) -> impl Iterator<Item = &[(u64, u64, u64)]> {
    std::iter::from_fn(move || {
        let mut sum = 0u64;
        let fitting = all.iter().take_while(|(_, _, bytes)| {
            sum = sum.saturating_add(*bytes);
            sum <= GROUP
        });
        let (group, others) = all.split_at_checked(fitting.count().max(1))?;
        all = others;
        Some(group)
    })
}

/// Launches the kernel over `count` ranges.
fn run(
    kernel: CUfunction,
    stream: CUstream,
    (mut to, mut from, count): (*mut u64, *mut u64, usize),
) -> Step<()> {
    let mut words = count as u64; // CAST: a length fits.
    let mut parameters: [*mut c_void; 3] = [
        (&raw mut to).cast(),
        (&raw mut from).cast(),
        (&raw mut words).cast(),
    ];
    // CAST: at most BLOCKS.
    let blocks = count.clamp(1, BLOCKS) as u32;
    // SAFETY: the kernel's own parameters; it reads the chunks, which are mapped, and the table,
    // and writes the hashes. All of them stay until it was waited for.
    copy_streams::done(unsafe {
        real::cuLaunchKernel(
            kernel,
            blocks,
            1,
            1,
            THREADS,
            1,
            1,
            0,
            stream,
            parameters.as_mut_ptr(),
            std::ptr::null_mut(),
        )
    })
}

/// The kernel, loaded into the current context.
fn kernel(context: usize, copy_streams: CopyStreams) -> Step<CUfunction> {
    if !copy_streams.hash.is_null() {
        return Ok(copy_streams.hash);
    }
    let (mut module, mut function) = (CUmodule::NULL, CUfunction::NULL);
    // SAFETY: valid pointers to locals; a module's text and a name, NUL-terminated both. The module
    // goes with the context.
    unsafe {
        copy_streams::done(real::cuModuleLoadData(
            &raw mut module,
            MODULE.as_ptr().cast(),
        ))?;
        copy_streams::done(real::cuModuleGetFunction(
            &raw mut function,
            module,
            c"sublet_hash_chunks".as_ptr(),
        ))
        .inspect_err(|_| {
            let _ = real::cuModuleUnload(module);
        })?;
    }
    copy_streams::keep_kernel(context, function);
    Ok(function)
}

/// Ranges of a chunk that have to be copied: start and length in bytes. All of it where one of the
/// two is not known.
pub(super) fn changed(
    bytes: u64,
    before: Option<&Digest>,
    now: Option<&Digest>,
) -> Vec<(u64, u64)> {
    let (Some(before), Some(now)) = (before, now) else {
        return vec![(0, bytes)];
    };
    if before.len() != now.len() {
        return vec![(0, bytes)];
    }
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for (at, (before, now)) in before.iter().zip(now).enumerate() {
        if before == now {
            continue;
        }
        let start = at as u64 * RANGE;
        let length = RANGE.min(bytes - start);
        match runs.last_mut() {
            Some((from, so_far)) if *from + *so_far == start => *so_far += length,
            _ => runs.push((start, length)),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_launch_hashes_one_large_chunk_or_some_small_ones() {
        let sizes =
            |all: &[(u64, u64, u64)]| -> Vec<usize> { groups(all).map(<[_]>::len).collect() };
        let chunk = |mib: u64| (0, 0, mib << 20);
        assert_eq!(sizes(&[]), []);
        assert_eq!(sizes(&[chunk(512), chunk(64), chunk(64)]), [1, 1, 1]);
        assert_eq!(sizes(&[chunk(20); 7]), [3, 3, 1]);
        assert_eq!(
            sizes(&[chunk(2), chunk(100), chunk(32), chunk(32), chunk(2)]),
            [1, 1, 2, 1]
        );
        let all = [(1, 0, u64::MAX), (2, 0, u64::MAX), (3, 0, 1)];
        assert_eq!(groups(&all).flatten().count(), 3);
    }

    #[test]
    fn runs_of_changed_ranges_are_copied_in_one_chunk() {
        let before: Digest = (0..6).map(|at| [at, 0]).collect();
        let bytes = 5 * RANGE + 100;
        let mut now = before.clone();
        assert_eq!(changed(bytes, Some(&before), Some(&now)), []);
        assert_eq!(changed(bytes, None, Some(&now)), [(0, bytes)]);
        assert_eq!(changed(bytes, Some(&before), None), [(0, bytes)]);
        for at in [1, 2, 5] {
            now[at][1] = 7;
        }
        assert_eq!(
            changed(bytes, Some(&before), Some(&now)),
            [(RANGE, 2 * RANGE), (5 * RANGE, 100)]
        );
    }
}
