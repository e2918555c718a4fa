//! The table as data: what each driver symbol is and what the interposer does with it.

use core::ffi::CStr;

use crate::recording::{Awaited, Taken, Way};

/// What the interposer does with a symbol (`interposer_action` of the classification).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Action {
    /// Reserve in the tenant's quota, forward, settle or roll back.
    MeterAlloc,
    /// Forward, then give back to the tenant's quota.
    MeterFree,
    /// Answer, or correct the driver's answer, so that the program sees its quota.
    VirtualiseReport,
    /// Wait for a grant, forward, count in flight.
    GateSubmission,
    /// Forward; afterwards work is known to have finished.
    ObserveSync,
    /// Forward; the calling thread's device may have changed.
    ObserveContext,
    /// Forward; the handle means something to accounting.
    TrackHandle,
    /// Forward untouched.
    PassThrough,
}

/// The code that stands in the preload library under a symbol's name.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Shape {
    /// A jump to the real function.
    Jump,
    /// A jump; where memory may be moved, a call inside the quiesce gate. At most six words, all in
    /// registers.
    Quiesced,
    /// A function of the symbol's own name.
    Hook,
    /// Waits for a grant, calls, marks completion.
    Gated,
    /// The same for the one launch that takes an array of launches.
    GatedList,
    /// Marks what is in flight, and calls: afterwards work is known to have finished.
    Sync,
    /// The same for calls that only ask, and never block: programs poll them.
    Query,
    /// Calls; the thread's device is looked up again afterwards.
    Context,
    /// Calls, and notes what the row's [`Traits`] say.
    Tracked,
    /// `cuInit`: calls, and attaches.
    Init,
}

/// Which default stream a symbol's stream 0 means.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Variant {
    /// The legacy default stream.
    Legacy,
    /// The calling thread's stream; symbol of the stream family.
    Ptsz,
    /// The calling thread's stream; symbol of the synchronous family.
    Ptds,
}

/// What a symbol means for memory and work (`metering_role` of the classification).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Role {
    /// No effect on either.
    None,
    /// Takes memory.
    CountsMemoryPlus,
    /// Gives memory back.
    CountsMemoryMinus,
    /// Submits work to the device.
    SubmitsWork,
    /// May block the caller until work has finished.
    MayBlock,
    /// Creates a context.
    CreatesContext,
    /// Reports memory.
    ReportsMemory,
}

/// The account that a symbol's memory belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Space {
    /// None.
    None,
    /// Device memory.
    Device,
    /// Pinned host memory.
    Host,
    /// Managed memory.
    Managed,
}

/// Where the stream is found among a symbol's parameters.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum StreamAt {
    /// Nowhere: none, or the implicit default stream.
    Implicit,
    /// At this 0-based position.
    Param(u8),
    /// In a structure that a parameter points to.
    InStruct,
}

/// What a call means for stream capture. The stream is the first argument.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Capture {
    /// Nothing.
    None,
    /// A capture begins in a stream.
    Begins,
    /// A capture ends in a stream.
    Ends,
}

/// What a call does to a context.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Context {
    /// Neither makes nor ends one.
    Keeps,
    /// Creates one on the device at this position.
    Creates {
        /// Position of the device.
        device: u8,
    },
    /// Writes the primary context of the device at 1 to 0, and creates it where it is not there.
    RetainsPrimary,
    /// Ends the context at 0.
    Destroys,
    /// Gives a reference to the context at 0 back, maybe the last one.
    Detaches,
    /// Ends the primary context of the device at 0.
    ResetsPrimary,
    /// Gives a reference to the primary context of the device at 0 back, maybe the last one.
    ReleasesPrimary,
    /// Ends the green context at 0.
    DestroysGreen,
}

impl Context {
    /// Whether a context, and its memory, may be gone afterwards.
    pub const fn may_end(self) -> bool {
        matches!(
            self,
            Self::Destroys | Self::Detaches | Self::ResetsPrimary | Self::ReleasesPrimary
        )
    }

    /// Whether a context that work is done in may be gone afterwards, its memory with it or not.
    pub const fn takes_away(self) -> bool {
        self.may_end() || matches!(self, Self::DestroysGreen)
    }

    /// Position of the device on which a context may come to be.
    pub const fn created_on(self) -> Option<u8> {
        match self {
            Self::Creates { device } => Some(device),
            Self::RetainsPrimary => Some(1),
            _ => None,
        }
    }
}

/// A handle, or an address, that accounting or residency has to know of.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Tracks {
    /// Nothing.
    Nothing,
    /// The stream at 0 ends.
    StreamEnd,
    /// A pool, written to 0, of the properties at 1.
    PoolCreate,
    /// The pool at 0 has another attribute.
    PoolAttribute,
    /// An executable graph, written to 0, of the graph at 1.
    GraphInstantiate,
    /// The executable graph at 0 is now what the graph at 1 is.
    GraphExecUpdate,
    /// The executable graph at 0 ends.
    GraphExecEnd,
    /// A node of any kind, whose parameters are at this position.
    GraphNode {
        /// Position of the parameters.
        parameters: u8,
    },
    /// Addresses from 0, as many bytes as 1 says, now mean the handle of physical memory at 3.
    MemoryMap,
    /// Addresses from 0, as many bytes as 1 says, have the access that 2 (an array of 3 elements)
    /// says.
    MemoryAccess,
    /// Something at 0, of the type at 2, by which others find the physical memory at 1.
    MemoryExport,
    /// A handle, written to 0, of the physical memory at the address 1.
    MemoryRetain,
    /// The current context may (not) reach the memory of the context at 0.
    PeerAccess {
        /// Whether it may.
        on: bool,
    },
    /// The value at 0 of the attribute at 1 of the memory at the address 2.
    PointerAttribute,
}

/// Physical memory that is known to others after a call, and so stays what it is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Shares {
    /// None.
    Nothing,
    /// That of the handle at this position.
    Handle {
        /// Position of the handle.
        at: u8,
    },
    /// What is mapped in a range.
    Range {
        /// Position of the first address.
        start: u8,
        /// Position of the length.
        bytes: u8,
    },
    /// What is mapped at the address at this position.
    Address {
        /// Position of the address.
        at: u8,
    },
}

/// What has nothing left to do when a call returns.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Waits {
    /// Nothing that is known.
    Nothing,
    /// The current context.
    Context,
    /// The stream at 0.
    Stream,
}

/// Where the number of a kernel's blocks stands.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Blocks {
    /// At 1, 2 and 3, of the function at 0.
    Words,
    /// At 1 and 2, of the function at 0.
    Plane,
    /// In the `CUlaunchConfig` at 0, of the function at 1.
    Structure,
}

/// What two submissions of the same symbol must have in common to be alike.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Work {
    /// Nothing more.
    Any,
    /// The function and the number of its blocks.
    Kernel {
        /// Where these stand.
        blocks: Blocks,
    },
    /// The function at 0.
    Function,
    /// The executable graph at 0, launched by whichever symbol.
    Graph,
    /// None of the device's: the stream waits for the host, or for a value that may be the
    /// program's to write.
    HostWait,
    /// The length of a copy between host and device.
    CopyAcross {
        /// Position of the length.
        bytes: u8,
    },
    /// The length of a copy that stays on its side, or whose sides are not known.
    CopyWithin {
        /// Position of the length.
        bytes: u8,
    },
}

/// Which device memory a submission names. Addresses of CUDA 2 have 32 bits: that memory does not
/// move, and is not looked at. An address that is said to be the host's may be the device's all the
/// same.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Operands {
    /// None, or such that is not looked into.
    Unknown,
    /// That among the parameters of a kernel.
    Kernel {
        /// Position of the function.
        function: u8,
        /// Position of the array of parameters.
        parameters: u8,
        /// Position of the array of extra options, of a call that takes one.
        extra: Option<u8>,
    },
    /// That from one address on.
    One {
        /// Position of the address.
        at: u8,
        /// Position of the number of elements.
        count: u8,
        /// Bytes of an element.
        unit: u8,
    },
    /// Source and destination of a copy.
    Two {
        /// Position of the destination.
        to: u8,
        /// Position of the source.
        from: u8,
        /// Position of the length in bytes.
        bytes: u8,
    },
    /// An address, a pitch, a value, the elements of a row, and rows.
    Rows {
        /// Bytes of an element.
        unit: u8,
    },
    /// What the `CUDA_MEMCPY2D` at 0 says.
    Plane,
    /// What the `CUDA_MEMCPY3D` at 0 says.
    Volume,
    /// What the `CUDA_MEMCPY3D_PEER` at 0 says.
    PeerVolume,
    /// Arrays of destinations, sources and lengths in bytes, and their number.
    Batch,
}

/// What a recording of a job has of a successful call.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Records {
    /// Nothing.
    Nothing,
    /// A launch of the function at 0: blocks at 1 to 3, threads at 4 to 6, shared memory at 7.
    Launch,
    /// A launch of the function at 1, as the `CUlaunchConfig` at 0 says.
    LaunchOf,
    /// A launch of the executable graph at 0.
    Graph,
    /// An executable graph, written to 0, of the graph at 1.
    GraphMade,
    /// The executable graph at 0 ends.
    GraphGone,
    /// A function, written to 0, of the name at 2.
    Function,
    /// A function, written to 0, of the kernel at 1.
    FunctionOf,
    /// Memory, its address or handle written to 0, of as many bytes as this position says.
    Takes {
        /// Position of the number of bytes.
        bytes: u8,
        /// What kind of memory.
        kind: Taken,
    },
    /// Device memory, its address written to 0, in as many rows as 3 says, of the pitch written to
    /// 1.
    TakesRows,
    /// Host memory at 0, of as many bytes as 1 says, is locked.
    Locks,
    /// Memory at 0 is given back.
    Gives,
    /// Addresses from 0, as many bytes as 1 says, now mean the handle of physical memory at 3.
    Maps,
    /// A copy of what [`Traits::operands`] says.
    Copy {
        /// Between which sides.
        way: Way,
    },
    /// A fill of what [`Traits::operands`] says.
    Fill,
    /// A stream, written to 0, of the flags at 1.
    StreamMade {
        /// Position of the priority, of a call that takes one.
        priority: Option<u8>,
    },
    /// The stream at 0 ends.
    StreamGone,
    /// An event, written to 0, of the flags at 1.
    EventMade,
    /// The event at 0 ends.
    EventGone,
    /// The event at 0 is recorded.
    EventRecorded,
    /// The stream at 0 waits for the event at 1.
    EventAwaited,
    /// The host has waited, or has learnt that there is nothing to wait for.
    Waits {
        /// For what; a handle at 0, but of a context.
        what: Awaited,
    },
    /// A context may end.
    ContextGone,
}

/// What a call means beyond its action. Positions of arguments are counted from 0.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Traits {
    /// What it means for stream capture.
    pub capture: Capture,
    /// What it does to a context.
    pub context: Context,
    /// Handle or address to note when it has succeeded.
    pub tracks: Tracks,
    /// Whether it waits while memory is moved: the driver checks its arguments against what is
    /// mapped, or it changes what they mean, or a capture begins, during which nothing is moved.
    /// Submissions and allocations wait anyway.
    pub quiesced: bool,
    /// Position of an address that must not lie in memory that can be moved: refused as it would be
    /// for plain memory.
    pub unmovable: Option<u8>,
    /// Position of a handle of physical memory, which may be a number of ours.
    pub physical: Option<u8>,
    /// Physical memory that is known to others afterwards.
    pub shares: Shares,
    /// What is known to be idle afterwards.
    pub waits: Waits,
    /// Whether a submission may take memory of the device. Graph launches: rare, heavy, and charged
    /// when they are over.
    pub allocates: bool,
    /// What a submission's likes have in common.
    pub work: Work,
    /// Device memory that a submission names.
    pub operands: Operands,
    /// Whether a refused process may ask it: texts and numbers that have nothing to do with a
    /// device.
    pub always: bool,
    /// What a recording has of it.
    pub records: Records,
}

impl Traits {
    /// Of a call that means nothing more.
    pub const NONE: Self = Self {
        capture: Capture::None,
        context: Context::Keeps,
        tracks: Tracks::Nothing,
        quiesced: false,
        unmovable: None,
        physical: None,
        shares: Shares::Nothing,
        waits: Waits::Nothing,
        allocates: false,
        work: Work::Any,
        operands: Operands::Unknown,
        always: false,
        records: Records::Nothing,
    };
}

/// One row of the table.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// Exported name.
    pub symbol: &'static CStr,
    /// Name that `cuGetProcAddress` takes.
    pub base_name: &'static str,
    /// First CUDA version of this ABI (11060 = 11.6), 0 where undocumented.
    pub introduced: u32,
    /// Default-stream variant.
    pub variant: Variant,
    /// What the interposer does.
    pub action: Action,
    /// The code of the preload library's entry.
    pub shape: Shape,
    /// Meaning for memory and work.
    pub role: Role,
    /// Account of its memory.
    pub space: Space,
    /// One of the classification's categories, such as `memcpy`.
    pub category: &'static str,
    /// Number of parameters, where known.
    pub params: Option<u8>,
    /// Where the stream parameter is.
    pub stream: StreamAt,
    /// True where the simulated driver implements it.
    pub simulated: bool,
    /// What it means beyond its action.
    pub traits: Traits,
}

impl Entry {
    /// The exported name as text.
    pub fn name(&self) -> &'static str {
        self.symbol.to_str().unwrap_or_default()
    }
}

macro_rules! action {
    (meter_alloc) => {
        Action::MeterAlloc
    };
    (meter_free) => {
        Action::MeterFree
    };
    (virtualise_report) => {
        Action::VirtualiseReport
    };
    (gate_submission) => {
        Action::GateSubmission
    };
    (observe_sync) => {
        Action::ObserveSync
    };
    (observe_context) => {
        Action::ObserveContext
    };
    (track_handle) => {
        Action::TrackHandle
    };
    (pass_through) => {
        Action::PassThrough
    };
}
macro_rules! shape {
    (jump) => {
        Shape::Jump
    };
    (quiesced) => {
        Shape::Quiesced
    };
    (hook) => {
        Shape::Hook
    };
    (gated) => {
        Shape::Gated
    };
    (gated_list) => {
        Shape::GatedList
    };
    (sync) => {
        Shape::Sync
    };
    (query) => {
        Shape::Query
    };
    (context) => {
        Shape::Context
    };
    (tracked) => {
        Shape::Tracked
    };
    (init) => {
        Shape::Init
    };
}
macro_rules! traits {
    ({}) => {
        Traits::NONE
    };
    ({$($field:ident: $value:expr),+}) => {
        Traits { $($field: $value,)+ ..Traits::NONE }
    };
}
macro_rules! variant {
    (legacy) => {
        Variant::Legacy
    };
    (ptsz) => {
        Variant::Ptsz
    };
    (ptds) => {
        Variant::Ptds
    };
}
macro_rules! role {
    (none) => {
        Role::None
    };
    (counts_memory_plus) => {
        Role::CountsMemoryPlus
    };
    (counts_memory_minus) => {
        Role::CountsMemoryMinus
    };
    (submits_work) => {
        Role::SubmitsWork
    };
    (may_block) => {
        Role::MayBlock
    };
    (creates_context) => {
        Role::CreatesContext
    };
    (reports_memory) => {
        Role::ReportsMemory
    };
}
macro_rules! space {
    (none) => {
        Space::None
    };
    (device) => {
        Space::Device
    };
    (host) => {
        Space::Host
    };
    (managed) => {
        Space::Managed
    };
}
macro_rules! params {
    (_) => {
        None
    };
    ($n:literal) => {
        Some($n)
    };
}
macro_rules! stream {
    (in_struct) => {
        StreamAt::InStruct
    };
    (0) => {
        StreamAt::Implicit
    };
    ($n:literal) => {
        StreamAt::Param($n - 1)
    };
}
macro_rules! simulated {
    (sim) => {
        true
    };
    (nosim) => {
        false
    };
}

macro_rules! expand {
    ($($symbol:ident $base:literal $introduced:literal $variant:ident $action:ident $shape:ident $role:ident $space:ident
       $category:literal $params:tt $stream:tt $sim:ident $traits:tt $signature:tt;)*) => {
        /// Index of a driver symbol in [`ENTRIES`].
        #[allow(non_camel_case_types, reason = "variants are the driver's symbols")]
        #[repr(u16)]
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        pub enum Symbol { $(#[doc = concat!("`", stringify!($symbol), "`.")] $symbol,)* }

        /// Every driver symbol, in alphabetical order.
        pub static ENTRIES: &[Entry] = &[$(Entry {
            symbol: match CStr::from_bytes_with_nul(concat!(stringify!($symbol), "\0").as_bytes()) {
                Ok(symbol) => symbol,
                Err(_) => c"",
            },
            base_name: $base,
            introduced: $introduced,
            variant: variant!($variant),
            action: action!($action),
            shape: shape!($shape),
            role: role!($role),
            space: space!($space),
            category: $category,
            params: params!($params),
            stream: stream!($stream),
            simulated: simulated!($sim),
            traits: TRAITS[Symbol::$symbol as usize],
        },)*];

        /// By row. A constant, so that what a macro asks of a row is known when it is compiled.
        const TRAITS: &[Traits; COUNT] = &[$(traits!($traits)),*];

        /// Number of driver symbols.
        pub const COUNT: usize = [$(Symbol::$symbol,)*].len();

        /// All symbols, by index.
        pub static SYMBOLS: [Symbol; COUNT] = [$(Symbol::$symbol,)*];
    };
}
crate::driver_table!(expand);

impl Symbol {
    /// This symbol's row.
    pub fn entry(self) -> &'static Entry {
        // PANIC: the enumeration and the table expand from the same rows.
        &ENTRIES[self as usize]
    }

    /// What this symbol means beyond its action.
    #[inline(always)]
    pub const fn traits(self) -> Traits {
        // PANIC: the enumeration and the table expand from the same rows.
        TRAITS[self as usize]
    }

    /// The symbol of this exported name.
    pub fn from_name(name: &[u8]) -> Option<Self> {
        if !name.starts_with(b"cu") {
            return None;
        }
        let mut place = hash(name) as usize % PLACES;
        loop {
            // PANIC: the modulus is the length; there are more places than symbols, so that one is
            // free.
            let symbol = *SYMBOLS.get(BY_HASH[place] as usize)?;
            if symbol.entry().symbol.to_bytes() == name {
                return Some(symbol);
            }
            place = (place + 1) % PLACES;
        }
    }
}

/// FNV-1a.
const fn hash(name: &[u8]) -> u32 {
    let (mut value, mut at) = (0x811c_9dc5u32, 0);
    while at < name.len() {
        // PANIC: below the length.
        value = (value ^ name[at] as u32).wrapping_mul(0x0100_0193);
        at += 1;
    }
    value
}

const PLACES: usize = 2048;
const _: () = assert!(COUNT * 2 < PLACES);

/// Indices of the symbols by the hash of their names, each at its place or the next free one;
/// others are beyond all symbols. A thread that looks all of a driver's names up meets each of them
/// cold: a search by halves would miss the cache ten times for each.
static BY_HASH: [u16; PLACES] = {
    let mut places = [u16::MAX; PLACES];
    let mut index = 0;
    while index < COUNT {
        // PANIC: below the length, and a modulus.
        let mut place = hash(ENTRIES[index].symbol.to_bytes()) as usize % PLACES;
        while places[place] != u16::MAX {
            place = (place + 1) % PLACES;
        }
        places[place] = index as u16; // CAST: below COUNT.
        index += 1;
    }
    places
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_sorted() {
        assert!(ENTRIES.is_sorted_by(|a, b| a.symbol.to_bytes() < b.symbol.to_bytes()));
    }

    #[test]
    fn every_symbol_is_found_by_its_name() {
        for symbol in SYMBOLS {
            assert_eq!(
                Symbol::from_name(symbol.entry().symbol.to_bytes()),
                Some(symbol)
            );
        }
        assert_eq!(Symbol::from_name(b"cudnnCreate"), None);
        assert_eq!(Symbol::from_name(b""), None);
    }
}
