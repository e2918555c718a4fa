//! The layout of the shared pages. A promise between versions: see `docs/reference/channel.md`
//! before changing a byte.
//!
//! Four kinds of page, each its own sealed memfd:
//!
//! * [`ArbiterHalf`]: arbiter -> client, one per client, read-only for the client;
//! * [`ClientHalf`]: client -> arbiter, one per client;
//! * [`TenantPage`]: one per tenant, shared by the processes of that tenant, in which each process
//!   owns one slot;
//! * [`SignaturePage`]: client -> arbiter, one per client that asks for it.
//!
//! No pointers, no `bool`, no `usize`; every reserved byte is spelt out; the readiness word is
//! stored last.

use crate::sync::{AtomicU32, AtomicU64, FutexWord};

/// Incompatible changes of the layout.
pub const LAYOUT_MAJOR: u32 = 2;
/// Compatible additions to the layout (fields carved out of reserved bytes).
pub const LAYOUT_MINOR: u32 = 5;

/// Devices that one client can name.
pub const MAX_DEVICES: usize = if cfg!(loom) { 1 } else { 16 };
/// Threads of a client that count on a line of their own; further threads share lines.
pub const THREAD_SLOTS: usize = if cfg!(loom) { 2 } else { 64 };
/// (thread, stream) pairs of a client whose completion is followed.
pub const STREAM_SLOTS: usize = if cfg!(loom) { 2 } else { 512 };
/// Processes of one tenant that a page has places for. The arbiter decides how many a job may have;
/// the memory behind a place is there once it was given out.
pub const TENANT_SLOTS: usize = if cfg!(loom) { 2 } else { 4096 };
/// In place of a slot's number: a process that only reads, and holds none.
pub const NO_SLOT: u32 = u32::MAX;
/// Blocks of device memory that one process can share with others and have counted once.
pub const SHARED_BLOCKS: usize = if cfg!(loom) { 2 } else { 128 };
/// Records in the journal ring of a client.
pub const JOURNAL_SLOTS: usize = if cfg!(loom) { 2 } else { 64 };
/// Threads of a client whose submissions are followed one by one.
pub const SIGNATURE_RINGS: usize = if cfg!(loom) { 1 } else { 8 };
/// Submissions of a thread that are remembered.
pub const SIGNATURE_SLOTS: usize = if cfg!(loom) { 2 } else { 2048 };
/// Marks of a stream of which it is remembered what was submitted up to them.
pub const WEIGHED_MARKS: usize = 64;
/// Boundaries between iterations that are remembered.
pub const BOUNDARY_SLOTS: usize = if cfg!(loom) { 2 } else { 64 };

/// Limit word that means "no limit".
pub const NO_LIMIT: u64 = u64::MAX;

/// Start of every page.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct Header {
    /// `(major << 32) | minor`, stored last with Release; 0 while the page is not ready.
    pub(crate) ready: AtomicU64,
    /// Which page this is.
    pub(crate) magic: AtomicU64,
    /// Optional abilities of the writer, as bits.
    pub(crate) features: AtomicU64,
    /// Of an [`ArbiterHalf`]: how often bells of the client were answered, never 0; 0: nobody
    /// counts. Since 2.3.
    pub(crate) bells: AtomicU32,
    /// Of an [`ArbiterHalf`]: the divisor of the host's time, where a simulated device runs slower
    /// than the device it stands for; 0: 1. Since 2.4.
    pub(crate) dilation: AtomicU32,
    pub(crate) reserved: [u64; 4],
}

/// `magic` of an [`ArbiterHalf`].
#[cfg(not(loom))]
pub const ARBITER_MAGIC: u64 = u64::from_le_bytes(*b"subletAR");
/// `magic` of a [`ClientHalf`].
#[cfg(not(loom))]
pub const CLIENT_MAGIC: u64 = u64::from_le_bytes(*b"subletCL");
/// `magic` of a [`TenantPage`].
#[cfg(not(loom))]
pub const TENANT_MAGIC: u64 = u64::from_le_bytes(*b"subletTE");
/// `magic` of a [`SignaturePage`].
#[cfg(not(loom))]
pub const SIGNATURE_MAGIC: u64 = u64::from_le_bytes(*b"subletSI");

/// arbiter --grants, limits--> client.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct ArbiterHalf {
    pub(crate) header: Header,
    /// Incarnation of the arbiter.
    pub(crate) epoch: AtomicU64,
    /// Slot of this client in its tenant's page.
    pub(crate) tenant_slot: AtomicU32,
    /// Number of the client's last question whether processes of its job have ended; what those had
    /// is free. Clients wait on this word. Since 2.3.
    pub(crate) credited: FutexWord,
    /// `CLOCK_MONOTONIC` time at which the arbiter was last seen at work, in nanoseconds.
    pub(crate) heartbeat_mono_ns: AtomicU64,
    /// Number of orders given, all devices. The client's agent waits on this word. Since 1.2.
    pub(crate) orders: FutexWord,
    /// Bit 0: memory may be evicted. Bit 1: allocations beyond the limit may live in host memory.
    /// Bit 2: host memory is to be made ready. Bit 3, since 2.2: memory may be made free for what
    /// it allocates. Since 1.2.
    pub(crate) residency: AtomicU32,
    /// Host memory that the client may hold for what is not on its devices, in bytes; [`NO_LIMIT`]:
    /// any. Since 1.2.
    pub(crate) host_budget_bytes: AtomicU64,
    /// Number of the last request to change the job's size, and the GPUs it is to go on with in the
    /// lower 16 bits; 0: none. Since 1.3.
    pub(crate) resize: AtomicU64,
    /// Number of the request to lock host memory that is granted in the upper 16 bits; below, until
    /// when, by `CLOCK_MONOTONIC` in microseconds. 0: nobody has to ask. Since 1.5.
    pub(crate) pin_permit: AtomicU64,
    /// Which submissions are boundaries: thread slot plus one above, signature below; 0: none.
    /// Since 1.1.
    pub(crate) anchor: AtomicU64,
    pub(crate) devices: [DeviceGrant; MAX_DEVICES],
}

/// What a client may do on one device.
#[repr(C, align(128))]
#[derive(Debug, Default)]
pub struct DeviceGrant {
    /// Bit 0: open. Bit 1: closed and about to open. Upper bits: number of changes. Clients wait on
    /// this word.
    pub(crate) gate: FutexWord,
    /// How long work may stay queued on the device, in microseconds; 0: no bound.
    pub(crate) window_us: AtomicU32,
    /// Number of the grant.
    pub(crate) grant: AtomicU64,
    /// `CLOCK_MONOTONIC` time at which the grant should have ended, in nanoseconds; 0: none.
    pub(crate) deadline_mono_ns: AtomicU64,
    /// Length of the grant in microseconds.
    pub(crate) quantum_us: AtomicU32,
    /// How long work may stay queued while more than that is left of the grant, in microseconds;
    /// where it is not above `window_us`, that is all. Since 2.1.
    pub(crate) window_most_us: AtomicU32,
    /// Memory limit of the tenant on this device in bytes, [`NO_LIMIT`] for none.
    pub(crate) limit_bytes: AtomicU64,
    /// Physical memory of the device in bytes.
    pub(crate) physical_total_bytes: AtomicU64,
    /// Physical memory of the device that was free when last looked, in bytes; [`NO_LIMIT`]: never
    /// looked.
    pub(crate) physical_free_bytes: AtomicU64,
    /// `CLOCK_MONOTONIC` time at which the gate turns over without the arbiter, in nanoseconds:
    /// from about to open to open, or from open to closed; 0: it does not.
    pub(crate) turn_mono_ns: AtomicU64,
    /// Number of the last order, and what is to be done in the lower 8 bits. Stored after its
    /// words. Since 1.2.
    pub(crate) order: AtomicU64,
    /// How many bytes of what is evictable are to be on the device, for an order that says so.
    /// Since 1.2.
    pub(crate) resident_target_bytes: AtomicU64,
    /// `CLOCK_MONOTONIC` time by which the order is to be carried out or given up, in nanoseconds.
    /// Since 1.2.
    pub(crate) order_deadline_mono_ns: AtomicU64,
    /// How many bytes of what is evictable may be on the device, plus one; what is allocated beyond
    /// them lies in host memory. [`NO_LIMIT`]: all of them, as long as the device has space. 0:
    /// this is not for the arbiter to say. Since 2.2.
    pub(crate) resident_cap_plus_one: AtomicU64,
    /// Number of the client's last question about space that is answered in the lower half; in the
    /// upper one of those the last that is answered by figures of the device which are newer than
    /// the question. Stored after the words that answer it. Since 2.3.
    pub(crate) space_answered: AtomicU64,
    /// How much the job could come to have for what waits, if everybody left who may, in units of 2
    /// MiB in the lower half; in the upper one the same if nothing were on the device but what jobs
    /// account for. All ones: not known. Since 2.3.
    pub(crate) space_most: AtomicU64,
    /// Number of the last question at which the device had all that the job's threads said they
    /// waited for in the lower half; in the upper one the space that was too little for a context,
    /// in units of 2 MiB. Since 2.3.
    pub(crate) space_met: AtomicU64,
}

/// client --activity, completion, journal--> arbiter.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct ClientHalf {
    pub(crate) header: Header,
    /// Stream slots that were ever used.
    pub(crate) streams_used: AtomicU32,
    /// How completion is followed, see `Following`. Since 1.5.
    pub(crate) following: AtomicU32,
    /// Records ever written to the journal.
    pub(crate) journal_head: AtomicU64,
    /// Number of the request to change its size for which the program may be stopped. Since 1.3.
    pub(crate) resize_ready: AtomicU64,
    /// 1 once the program has looked for such a request. Since 1.3.
    pub(crate) resize_listens: AtomicU32,
    /// 1 where each mark is weighed. Since 2.5.
    pub(crate) weighs: AtomicU32,
    /// What kinds of memory stay on each device whatever happens: a byte each, see
    /// `residency::STAYING`. Since 1.3.
    pub(crate) staying: [AtomicU64; 2],
    /// Number of the request to lock host memory, 1 to 65535; 0: there is none. Since 1.5.
    pub(crate) pin_wanted: AtomicU64,
    /// Number of its last question whether processes of its job have ended. Since 2.3.
    pub(crate) credit_asked: AtomicU32,
    /// Number of the last question about space on a device. Since 2.3.
    pub(crate) space_asked: AtomicU32,
    pub(crate) wants: [Want; MAX_DEVICES],
    pub(crate) threads: [ThreadSlot; THREAD_SLOTS],
    pub(crate) streams: [StreamSlot; STREAM_SLOTS],
    pub(crate) journal: [JournalSlot; JOURNAL_SLOTS],
    /// A page of before 2.5 ends here: see `Page::LEAST_BYTES`.
    pub(crate) weights: Weights,
}

/// What a client's work weighs, and how its host gets on. Since 2.5.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Weights {
    pub(crate) host: [HostSide; MAX_DEVICES],
    pub(crate) streams: [StreamWeights; STREAM_SLOTS],
}

/// How a client's host gets on with one device.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct HostSide {
    /// Threads that wait until less is in flight than the window holds.
    pub(crate) at_window: AtomicU32,
    /// Threads in a call that waits for the device.
    pub(crate) in_wait: AtomicU32,
    /// How often work was submitted to a stream that had nothing left to do, and not because the
    /// gate had been closed.
    pub(crate) fresh: AtomicU64,
    pub(crate) reserved: [u64; 6],
}

/// What was submitted to one stream.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct StreamWeights {
    /// The sum up to mark `m`, in nanoseconds of device time, at `m` modulo the length. Never falls
    /// from one mark to the next; stored before the mark is issued.
    pub(crate) upto_ns: [AtomicU64; WEIGHED_MARKS],
}

/// What the client says of one device: who waits, and where its memory is.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct Want {
    /// Threads waiting at the closed gate.
    pub(crate) waiting: AtomicU32,
    /// Threads inside a driver call that blocks until its work is done.
    pub(crate) blocking: AtomicU32,
    /// Number of the order that this answers, the state in bits 8 to 15, the reason below. Since
    /// 1.2, as all that follows.
    pub(crate) answer: AtomicU64,
    /// Bytes that could be evicted, on the device or not.
    pub(crate) evictable_bytes: AtomicU64,
    /// Of these, bytes on the device.
    pub(crate) resident_bytes: AtomicU64,
    /// Host memory held for them in bytes.
    pub(crate) host_bytes: AtomicU64,
    /// Bytes copied to the host, ever.
    pub(crate) moved_out_bytes: AtomicU64,
    /// Bytes copied back, ever.
    pub(crate) moved_in_bytes: AtomicU64,
    /// Device memory that threads wait for in bytes; 0: none does.
    pub(crate) space_bytes: AtomicU64,
}

/// What one thread did. A line of its own: written at every launch.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct ThreadSlot {
    /// Submissions so far.
    pub(crate) launches: AtomicU64,
    /// Submissions that completion marks cover.
    pub(crate) marked: AtomicU64,
    /// Device that they went to, last.
    pub(crate) device: AtomicU32,
    pub(crate) reserved0: u32,
    /// `CLOCK_MONOTONIC` time at which the gate let the thread in after it had waited there, last,
    /// in nanoseconds; 0: never, or unknown. Since 1.2.
    pub(crate) let_in_mono_ns: AtomicU64,
    pub(crate) reserved: [u64; 2],
    /// Bytes copied between host and device. Since 1.1.
    pub(crate) copied_bytes: AtomicU64,
    /// Fastest such copy seen, in bytes per microsecond; 0: none that tells. Since 1.1.
    pub(crate) copy_bytes_per_us: AtomicU64,
}

/// Completion of one thread's work in one stream.
#[repr(C, align(32))]
#[derive(Debug, Default)]
pub struct StreamSlot {
    /// Written by the *device*: the last mark that it has passed.
    pub(crate) done: AtomicU64,
    /// The last mark issued.
    pub(crate) issued: AtomicU64,
    /// Device of the stream, plus one; 0 while the slot is free.
    pub(crate) device_plus_one: AtomicU32,
    pub(crate) reserved: u32,
    /// Of the last 64 marks those that cover a wait for the host and nothing else: bit number of
    /// the mark modulo 64. Since 2.3.
    pub(crate) host_waits: AtomicU64,
}

/// One event for the arbiter's journal.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct JournalSlot {
    /// Number of the record plus one; 0 while it is being written.
    pub(crate) sequence: AtomicU64,
    pub(crate) kind: AtomicU32,
    pub(crate) device: AtomicU32,
    pub(crate) values: [AtomicU64; 4],
    pub(crate) reserved: [u64; 2],
}

/// Memory held by the processes of one tenant.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct TenantPage {
    pub(crate) header: Header,
    /// Number of the highest slot that is in use, plus one; only the arbiter writes it.
    pub(crate) slots_used: AtomicU32,
    /// Not 0 once any process of the tenant has shared a block; set for good, by the process that
    /// comes first.
    pub(crate) sharing: AtomicU32,
    pub(crate) reserved: [u64; 7],
    /// Most memory ever held at once, in bytes, per device.
    pub(crate) peak_bytes: [AtomicU64; MAX_DEVICES],
    pub(crate) slots: [TenantSlot; TENANT_SLOTS],
    /// Blocks that processes hold together with others, by slot.
    pub(crate) shared: [SharedBlocks; TENANT_SLOTS],
}

/// Blocks of device memory that one process holds and that others may hold as well. Each counts
/// once for the tenant, however many processes have it here. Written like the slot of the same
/// number.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct SharedBlocks {
    /// Additions begun.
    pub(crate) begun: AtomicU64,
    /// Additions done.
    pub(crate) done: AtomicU64,
    /// Entries that were ever used.
    pub(crate) used: AtomicU32,
    pub(crate) reserved0: u32,
    pub(crate) reserved: [u64; 5],
    pub(crate) blocks: [SharedBlock; SHARED_BLOCKS],
}

/// One shared block.
#[repr(C)]
#[derive(Debug, Default)]
pub struct SharedBlock {
    /// Which block, the same in every process; 0: none here.
    pub(crate) id: AtomicU64,
    /// Bytes in the lower 56 bits, device index above. Stored before the id.
    pub(crate) bytes_and_device: AtomicU64,
}

/// Memory held by one process. Its own process adds and subtracts; the arbiter names the process,
/// and zeroes the slot when it is gone.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct TenantSlot {
    /// The same process as its own PID namespace numbers it; 0: nobody could tell, or an arbiter
    /// before 2.3. Only the arbiter writes it.
    pub(crate) inner_pid: AtomicU32,
    /// Process of this slot, as the arbiter's host numbers it; 0: none, or an arbiter of layout
    /// 1.0. Only the arbiter writes it.
    pub(crate) pid: AtomicU32,
    /// Pinned host memory in bytes.
    pub(crate) pinned_bytes: AtomicU64,
    /// The PID namespace that `inner_pid` counts in: its inode. Since 2.3, by the arbiter.
    pub(crate) pid_namespace: AtomicU64,
    pub(crate) reserved: [u64; 5],
    /// Device memory per device: bytes, reservations included, in the lower 44 bits; above, what of
    /// them may yet be given back, in units of 2 MiB.
    pub(crate) held_bytes: [AtomicU64; MAX_DEVICES],
}

/// client --what it submits--> arbiter. Since 1.1, and only where both sides know it.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct SignaturePage {
    pub(crate) header: Header,
    /// Boundaries that the program notes itself; any of its threads.
    pub(crate) steps: BoundaryRing,
    /// One for each of the first threads, by thread slot.
    pub(crate) rings: [SignatureRing; SIGNATURE_RINGS],
}

/// The last submissions of one thread.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct SignatureRing {
    pub(crate) boundaries: BoundaryRing,
    /// Signature of submission `n` at `n` modulo the length.
    pub(crate) words: [AtomicU32; SIGNATURE_SLOTS],
}

/// The last boundaries between iterations.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct BoundaryRing {
    /// Boundaries ever noted.
    pub(crate) head: AtomicU64,
    pub(crate) reserved: [u64; 7],
    pub(crate) boundaries: [Boundary; BOUNDARY_SLOTS],
}

/// One boundary.
#[repr(C, align(32))]
#[derive(Debug, Default)]
pub struct Boundary {
    /// Number of the boundary plus one, stored last; 0 while it is being written.
    pub(crate) sequence: AtomicU64,
    pub(crate) launches: AtomicU64,
    pub(crate) mono_ns: AtomicU64,
    pub(crate) held_bytes: AtomicU64,
}

#[cfg(not(loom))]
mod promise {
    use super::*;
    use std::mem::offset_of;

    const _: () = assert!(size_of::<Header>() == 64);
    const _: () = assert!(size_of::<DeviceGrant>() == 128);
    const _: () =
        assert!(offset_of!(DeviceGrant, gate) == 0 && offset_of!(DeviceGrant, grant) == 8);
    const _: () = assert!(offset_of!(DeviceGrant, limit_bytes) == 32);
    const _: () = assert!(offset_of!(DeviceGrant, turn_mono_ns) == 56);
    const _: () = assert!(offset_of!(DeviceGrant, order) == 64);
    const _: () = assert!(offset_of!(DeviceGrant, resident_cap_plus_one) == 88);
    const _: () = assert!(offset_of!(Header, bells) == 24);
    const _: () = assert!(offset_of!(Header, dilation) == 28);
    const _: () = assert!(offset_of!(ArbiterHalf, orders) == 88);
    const _: () = assert!(offset_of!(ArbiterHalf, resize) == 104);
    const _: () = assert!(offset_of!(ArbiterHalf, pin_permit) == 112);
    const _: () = assert!(offset_of!(ArbiterHalf, credited) == 76);
    const _: () = assert!(offset_of!(ClientHalf, pin_wanted) == 112);
    const _: () = assert!(offset_of!(ClientHalf, credit_asked) == 120);
    const _: () = assert!(offset_of!(ClientHalf, space_asked) == 124);
    const _: () = assert!(offset_of!(ClientHalf, resize_ready) == 80);
    const _: () = assert!(offset_of!(ClientHalf, resize_listens) == 88);
    const _: () = assert!(offset_of!(Want, answer) == 8 && offset_of!(Want, space_bytes) == 56);
    const _: () = assert!(size_of::<ArbiterHalf>() == 128 + 128 * MAX_DEVICES);
    const _: () = assert!(offset_of!(ArbiterHalf, devices) == 128);
    const _: () = assert!(offset_of!(ArbiterHalf, anchor) == 120);
    const _: () = assert!(size_of::<Want>() == 64 && size_of::<ThreadSlot>() == 64);
    const _: () = assert!(offset_of!(ThreadSlot, copied_bytes) == 48);
    const _: () = assert!(offset_of!(ThreadSlot, let_in_mono_ns) == 24);
    const _: () = assert!(size_of::<Boundary>() == 32);
    const _: () = assert!(size_of::<BoundaryRing>() == 64 + 32 * BOUNDARY_SLOTS);
    const _: () = assert!(offset_of!(SignatureRing, words) == size_of::<BoundaryRing>());
    const _: () =
        assert!(size_of::<SignatureRing>() == size_of::<BoundaryRing>() + 4 * SIGNATURE_SLOTS);
    const _: () = assert!(offset_of!(SignaturePage, rings) == 64 + size_of::<BoundaryRing>());
    const _: () = assert!(size_of::<StreamSlot>() == 32 && offset_of!(StreamSlot, done) == 0);
    const _: () = assert!(size_of::<JournalSlot>() == 64);
    const _: () = assert!(offset_of!(ClientHalf, wants) == 128);
    const _: () = assert!(offset_of!(ClientHalf, threads) == 128 + 64 * MAX_DEVICES);
    const _: () = assert!(
        offset_of!(ClientHalf, streams) == offset_of!(ClientHalf, threads) + 64 * THREAD_SLOTS
    );
    const _: () = assert!(
        offset_of!(ClientHalf, journal) == offset_of!(ClientHalf, streams) + 32 * STREAM_SLOTS
    );
    const _: () = assert!(offset_of!(ClientHalf, weighs) == 92);
    const _: () = assert!(
        offset_of!(ClientHalf, weights) == offset_of!(ClientHalf, journal) + 64 * JOURNAL_SLOTS
    );
    const _: () = assert!(size_of::<HostSide>() == 64 && size_of::<StreamWeights>() == 512);
    const _: () = assert!(offset_of!(Weights, streams) == 64 * MAX_DEVICES);
    const _: () =
        assert!(size_of::<ClientHalf>() == offset_of!(ClientHalf, weights) + size_of::<Weights>());
    const _: () = assert!(size_of::<TenantSlot>() == 64 + 8 * MAX_DEVICES);
    const _: () = assert!(
        size_of::<TenantPage>()
            == offset_of!(TenantPage, shared) + size_of::<SharedBlocks>() * TENANT_SLOTS
    );
    const _: () = assert!(
        offset_of!(TenantPage, shared)
            == 128 + 8 * MAX_DEVICES + size_of::<TenantSlot>() * TENANT_SLOTS
    );
    const _: () = assert!(size_of::<SharedBlocks>() == 64 + 16 * SHARED_BLOCKS);
}
