//! What a client tells: who waits, what was submitted, what the device has finished.
//!
//! The arbiter reads all of this as the claims of a stranger: counters that only ever mean
//! something by their change, clamped where they index, never trusted with memory.

use crate::layout::{ClientHalf, STREAM_SLOTS, StreamSlot, THREAD_SLOTS, ThreadSlot, Want};
use crate::sync::{Acquire, Relaxed, Release, SeqCst};

/// What is in flight on one device, as far as completion marks tell.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct InFlight {
    /// Streams whose last mark the device has not passed yet.
    pub streams: u32,
    /// Marks that the device has not passed yet.
    pub marks: u64,
    /// Of these, the marks of streams that wait for the host: the device does nothing for them.
    pub waiting_marks: u64,
    /// Streams of which the host is to do something before they get on.
    pub waiting_streams: u32,
    /// Changes with every mark that the device passes.
    pub passed: u64,
}

/// How a client finds out what the device has done.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(u32)]
pub enum Following {
    /// The device writes it into the page.
    #[default]
    Writes = 0,
    /// By events: a thread of the client asks for each.
    Events = 1,
    /// By asking whether a stream is idle.
    Queries = 2,
}

impl From<u32> for Following {
    /// What nobody has named yet is at least as coarse as the last.
    fn from(word: u32) -> Self {
        match word {
            0 => Self::Writes,
            1 => Self::Events,
            _ => Self::Queries,
        }
    }
}

/// In place of the zeroed page that `page` maps.
#[cfg(loom)]
impl Default for ClientHalf {
    fn default() -> Self {
        use crate::layout::{
            HostSide, JOURNAL_SLOTS, JournalSlot, MAX_DEVICES, StreamWeights, Weights,
        };
        Self {
            header: Default::default(),
            streams_used: Default::default(),
            following: Default::default(),
            journal_head: Default::default(),
            resize_ready: Default::default(),
            resize_listens: Default::default(),
            weighs: Default::default(),
            staying: Default::default(),
            pin_wanted: Default::default(),
            credit_asked: Default::default(),
            space_asked: Default::default(),
            wants: std::array::from_fn::<_, MAX_DEVICES, _>(|_| Want::default()),
            threads: std::array::from_fn::<_, THREAD_SLOTS, _>(|_| ThreadSlot::default()),
            streams: std::array::from_fn::<_, STREAM_SLOTS, _>(|_| StreamSlot::default()),
            journal: std::array::from_fn::<_, JOURNAL_SLOTS, _>(|_| JournalSlot::default()),
            weights: Weights {
                host: std::array::from_fn::<_, MAX_DEVICES, _>(|_| HostSide::default()),
                streams: std::array::from_fn::<_, STREAM_SLOTS, _>(|_| StreamWeights {
                    upto_ns: std::array::from_fn(|_| Default::default()),
                }),
            },
        }
    }
}

/// Client side.
impl ClientHalf {
    /// The line of thread slot `index`; threads beyond the last slot share.
    pub fn thread(&self, index: usize) -> &ThreadSlot {
        // PANIC: the modulus is the length.
        &self.threads[index % THREAD_SLOTS]
    }

    /// A stream slot that was never used, for `device`, with its index; `None`: there is none left.
    pub fn claim_stream(&self, device: u32) -> Option<(usize, &StreamSlot)> {
        let at = self.streams_used.fetch_add(1, Relaxed) as usize;
        let Some(slot) = self.streams.get(at) else {
            self.streams_used.store(STREAM_SLOTS as u32, Relaxed);
            return None;
        };
        slot.set_device(device);
        Some((at, slot))
    }

    /// Says how completion is followed from here on.
    pub fn set_following(&self, following: Following) {
        self.following.store(following as u32, Relaxed);
    }

    /// Stream slots that were ever used: those with lower indices.
    pub fn streams_used(&self) -> usize {
        (self.streams_used.load(Relaxed) as usize).min(STREAM_SLOTS)
    }

    /// Stream slot `index`.
    pub fn stream(&self, index: usize) -> Option<&StreamSlot> {
        self.streams.get(index)
    }

    /// The waiting line of `device`.
    pub fn want(&self, device: usize) -> Option<&Want> {
        self.wants.get(device)
    }
}

impl ThreadSlot {
    /// Counts a submission. Only the owning thread calls this, so a load and a store are enough.
    #[inline(always)]
    pub fn count_launch(&self) {
        self.launches
            // SYNC(launches): Release, so that a reader of the count sees the signature of what it
            // counts.
            .store(self.launches.load(Relaxed).wrapping_add(1), Release);
    }

    /// Counts bytes copied between host and device. Only the owning thread calls this, like
    /// everything here.
    #[inline(always)]
    pub fn count_copied(&self, bytes: u64) {
        self.copied_bytes
            .store(self.copied_bytes.load(Relaxed).wrapping_add(bytes), Relaxed);
    }

    /// Notes how fast a copy was that began when the device was idle, in bytes per microsecond; the
    /// fastest one stays.
    pub fn note_copy_rate(&self, bytes_per_us: u64) {
        if bytes_per_us > self.copy_bytes_per_us.load(Relaxed) {
            self.copy_bytes_per_us.store(bytes_per_us, Relaxed);
        }
    }

    /// Submissions so far.
    #[inline(always)]
    pub fn launches(&self) -> u64 {
        self.launches.load(Relaxed)
    }

    /// Says which device the thread submits to.
    pub fn set_device(&self, device: u32) {
        self.device.store(device, Relaxed);
    }

    /// Says that marks cover every submission so far.
    pub fn all_marked(&self) {
        self.marked.store(self.launches.load(Relaxed), Relaxed);
    }

    /// Says that the gate has let the thread in at `mono_ns` (`CLOCK_MONOTONIC`, nanoseconds),
    /// after a wait.
    pub fn note_let_in(&self, mono_ns: u64) {
        self.let_in_mono_ns.store(mono_ns, Relaxed);
    }

    /// Submissions that no mark covers yet.
    pub fn unmarked(&self) -> u64 {
        self.launches
            .load(Relaxed)
            .wrapping_sub(self.marked.load(Relaxed))
    }
}

impl StreamSlot {
    /// Number of the next mark. The slot's owning thread alone calls this.
    pub fn issue(&self) -> u64 {
        self.issue_as(false)
    }

    /// The same for a mark that covers a wait for the host and nothing else: a host function, or a
    /// value that may be the program's to write.
    pub fn issue_host_wait(&self) -> u64 {
        self.issue_as(true)
    }

    fn issue_as(&self, host_wait: bool) -> u64 {
        let mark = self.issued.load(Relaxed).wrapping_add(1);
        let others = self.host_waits.load(Relaxed) & !bit_of(mark);
        let own = if host_wait { bit_of(mark) } else { 0 };
        self.host_waits.store(others | own, Relaxed);
        // SYNC(mark): Release, so that an arbiter that sees the mark issued sees everything
        // submitted before it counted.
        self.issued.store(mark, Release);
        mark
    }

    /// Takes back a mark that the driver refused.
    pub fn withdraw(&self, mark: u64) {
        self.issued.store(mark.wrapping_sub(1), Release);
    }

    /// Mark that the device has passed.
    pub fn done(&self) -> u64 {
        // SYNC(done): the partner is the device's write; Acquire for readers of results afterwards.
        self.done.load(Acquire)
    }

    /// Last mark issued.
    pub fn issued(&self) -> u64 {
        self.issued.load(Relaxed)
    }

    /// Says that the device has passed a mark, in its place.
    pub fn passed(&self, mark: u64) {
        self.done.store(mark, Release);
    }

    /// Says that everything up to the last mark is known to be done (the driver said so).
    pub fn settle(&self) {
        self.done.store(self.issued.load(Relaxed), Release);
    }

    /// Where the device writes.
    #[cfg(not(loom))]
    pub fn done_address(&self) -> *mut u64 {
        self.done.as_ptr()
    }

    /// Says which device its stream is on. Nothing may be outstanding.
    pub fn set_device(&self, device: u32) {
        self.device_plus_one.store(device.wrapping_add(1), Relaxed);
    }

    /// Whether its stream is on that device.
    pub fn is_on(&self, device: usize) -> bool {
        self.device_plus_one.load(Relaxed) as usize == device.wrapping_add(1)
    }

    /// Whether the device has passed every mark.
    pub fn is_idle(&self) -> bool {
        self.done() == self.issued()
    }

    /// Whether a mark, one of the last 64, covers a wait for the host and nothing else.
    pub fn is_host_wait(&self, mark: u64) -> bool {
        self.host_waits.load(Relaxed) & bit_of(mark) != 0
    }

    /// Whether the stream stands at a wait for the host: the next mark that it has to pass covers
    /// nothing else.
    pub fn waits_for_host(&self) -> bool {
        // SYNC(mark): Acquire, so that the bits of the marks that are seen issued are seen as well.
        let issued = self.issued.load(Acquire);
        let done = self.done();
        let behind = issued.wrapping_sub(done);
        (1..=64).contains(&behind) && self.is_host_wait(done.wrapping_add(1))
    }
}

/// The bit of a mark among those of the last 64.
fn bit_of(mark: u64) -> u64 {
    1 << (mark % 64)
}

impl Want {
    /// A thread begins to wait. The doorbell is rung after this.
    pub fn begin_waiting(&self) {
        // SYNC(want): SeqCst, ordered before the doorbell's system call; the arbiter reads after
        // draining the doorbell.
        self.waiting.fetch_add(1, SeqCst);
    }

    /// A thread has stopped waiting.
    pub fn end_waiting(&self) {
        self.waiting.fetch_sub(1, Relaxed);
    }

    /// A thread enters a driver call that blocks until its work is done.
    pub fn begin_blocking(&self) {
        self.blocking.fetch_add(1, Relaxed);
    }

    /// The thread is back.
    pub fn end_blocking(&self) {
        self.blocking.fetch_sub(1, Relaxed);
    }
}

/// Arbiter side.
impl ClientHalf {
    /// Threads that wait for `device`.
    pub fn waiting(&self, device: usize) -> u32 {
        self.wants
            .get(device)
            .map_or(0, |want| want.waiting.load(SeqCst))
    }

    /// Threads inside a blocking driver call on `device`.
    pub fn blocking(&self, device: usize) -> u32 {
        self.wants
            .get(device)
            .map_or(0, |want| want.blocking.load(Relaxed))
    }

    /// How the client finds out what the device has done.
    pub fn following(&self) -> Following {
        Following::from(self.following.load(Relaxed))
    }

    /// Submissions so far, all threads and devices.
    pub fn launches(&self) -> u64 {
        self.threads.iter().fold(0, |sum, thread| {
            sum.wrapping_add(thread.launches.load(Relaxed))
        })
    }

    /// Submissions so far of the thread with slot `slot`, and what came before them is visible.
    pub fn launches_of(&self, slot: usize) -> u64 {
        // SYNC(launches): pairs with the Release in `count_launch`.
        self.threads
            .get(slot)
            .map_or(0, |thread| thread.launches.load(Acquire))
    }

    /// Bytes copied between host and device so far, all threads.
    pub fn copied_bytes(&self) -> u64 {
        self.threads.iter().fold(0, |sum, thread| {
            sum.wrapping_add(thread.copied_bytes.load(Relaxed))
        })
    }

    /// Fastest copy between host and device seen, in bytes per microsecond; 0: none that tells.
    pub fn copy_bytes_per_us(&self) -> u64 {
        let rates = self.threads.iter();
        rates
            .map(|thread| thread.copy_bytes_per_us.load(Relaxed))
            .max()
            .unwrap_or(0)
    }

    /// Whether the thread with slot `slot` has last used `device`.
    pub fn uses(&self, slot: usize, device: usize) -> bool {
        let thread = self.threads.get(slot);
        thread.is_some_and(|thread| thread.device.load(Relaxed) as usize == device)
    }

    /// When the first thread that last used `device` was let in since `since_mono_ns`, of those
    /// that had to wait; `None`: none was, or the client does not say.
    pub fn let_in_since(&self, device: usize, since_mono_ns: u64) -> Option<u64> {
        let threads = self.threads.iter();
        threads
            .filter(|thread| thread.device.load(Relaxed) as usize == device)
            .map(|thread| thread.let_in_mono_ns.load(Relaxed))
            .filter(|mono_ns| *mono_ns >= since_mono_ns && *mono_ns != 0)
            .min()
    }

    /// Whether a thread that last used `device` has submitted work that no mark covers yet.
    pub fn unmarked(&self, device: usize) -> bool {
        self.threads
            .iter()
            .any(|thread| thread.unmarked() != 0 && thread.device.load(Relaxed) as usize == device)
    }

    /// Streams of `device` with marked work that is not finished: each slot, and the mark that the
    /// device has passed. The search begins at slot `first`, modulo the slots there are.
    pub fn outstanding(
        &self,
        device: usize,
        first: usize,
    ) -> impl Iterator<Item = (usize, u64)> + '_ {
        let used = self.streams_used();
        let first = first.checked_rem(used).unwrap_or(0);
        let slots = (first..used).chain(0..first);
        slots.filter_map(move |slot| Some((slot, self.stands_at(device, slot)?)))
    }

    /// The same for streams that wait for the host.
    pub fn waiting_for_host(&self, device: usize) -> impl Iterator<Item = (usize, u64)> + '_ {
        let slots = self.streams.iter().take(self.streams_used()).enumerate();
        let waiting = slots.filter(|(_, stream)| stream.waits_for_host());
        waiting.filter_map(move |(slot, _)| Some((slot, self.behind(device, slot)?)))
    }

    /// The mark that `device` has passed on the stream of slot `slot`, while there are others that
    /// it has not, and it is not the host that the stream waits for.
    pub fn stands_at(&self, device: usize, slot: usize) -> Option<u64> {
        let at = self.behind(device, slot)?;
        (!self.streams.get(slot)?.waits_for_host()).then_some(at)
    }

    /// The same whatever the stream waits for.
    pub fn behind(&self, device: usize, slot: usize) -> Option<u64> {
        let stream = self.streams.get(slot)?;
        let done = stream.done.load(Acquire);
        let behind = stream.issued.load(Acquire).wrapping_sub(done);
        (stream.is_on(device) && behind != 0 && behind < u64::MAX / 2).then_some(done)
    }

    /// Marked work that `device` has not finished.
    pub fn in_flight(&self, device: usize) -> InFlight {
        let mut in_flight = InFlight::default();
        for slot in self.streams.iter().take(self.streams_used()) {
            if !slot.is_on(device) {
                continue;
            }
            let issued = slot.issued.load(Acquire);
            let done = slot.done.load(Acquire);
            in_flight.passed = in_flight.passed.wrapping_add(done);
            let behind = issued.wrapping_sub(done);
            // More than half the number space "behind" means that the device is ahead of what we
            // read.
            if behind != 0 && behind < u64::MAX / 2 {
                in_flight.streams += 1;
                in_flight.marks = in_flight.marks.saturating_add(behind);
                if slot.waits_for_host() {
                    in_flight.waiting_streams += 1;
                    in_flight.waiting_marks = in_flight.waiting_marks.saturating_add(behind);
                }
            }
        }
        in_flight
    }
}
