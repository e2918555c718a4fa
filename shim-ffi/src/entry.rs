//! The table as data: what each driver symbol is and what the interposer does with it.

use core::ffi::CStr;

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
    ($($symbol:ident $base:literal $introduced:literal $variant:ident $action:ident $role:ident $space:ident
       $category:literal $params:tt $stream:tt $sim:ident $signature:tt;)*) => {
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
            role: role!($role),
            space: space!($space),
            category: $category,
            params: params!($params),
            stream: stream!($stream),
            simulated: simulated!($sim),
        },)*];

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

    /// The symbol of this exported name.
    pub fn from_name(name: &[u8]) -> Option<Self> {
        if !name.starts_with(b"cu") {
            return None;
        }
        let mut place = hash(name) as usize % PLACES;
        loop {
            // PANIC: the modulus is the length; there are more places than symbols, so that one is free.
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

/// Indices of the symbols by the hash of their names, each at its place or the next free one; others are beyond all symbols. Whoever
/// looks all of a driver's names up meets each of them cold: a search by halves would miss the cache ten times for each.
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
