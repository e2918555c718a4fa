//! What was called and what was answered, in a form that two runs can be compared by.
//!
//! Addresses and handles differ between runs of a correct driver: each becomes the number of its
//! first appearance. What may differ for other reasons (times, free memory, opaque bytes) is left
//! out by the caller as [`Word::Hidden`]. Each block of calls is folded into one hash; a range of
//! calls can be written out in full.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::hash::{BuildHasherDefault, Hasher};
use std::ops::Range;

use shim_ffi::{COUNT, CUresult, Symbol};

use crate::rng::mix;

/// Calls per block.
pub const BLOCK_CALLS: u64 = 1000;

/// An argument or an output.
#[derive(Clone, Copy, Debug)]
pub enum Word {
    /// Compared as it is.
    Raw(u64),
    /// An address or handle, compared by the order of first appearance.
    Name(u64),
    /// The same, just made by the driver: a new name even where the number was seen before.
    New(u64),
    /// Not compared.
    Hidden,
}

#[derive(Default)]
struct AddressHasher(u64);

impl Hasher for AddressHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = mix(self.0 ^ value);
    }
}

/// The transcript of one run.
pub struct Transcript {
    names: HashMap<u64, u64, BuildHasherDefault<AddressHasher>>,
    next_name: u64,
    calls: u64,
    block: u64,
    blocks: Vec<u64>,
    counts: Vec<u64>,
    /// Calls to be written out.
    shown: Range<u64>,
    text: String,
}

impl Transcript {
    /// An empty transcript that writes out the calls of `shown`.
    pub fn new(shown: Range<u64>) -> Self {
        Self {
            names: HashMap::default(),
            next_name: 1,
            calls: 0,
            block: 0,
            blocks: Vec::new(),
            counts: vec![0; COUNT],
            shown,
            text: String::new(),
        }
    }

    /// Calls noted so far.
    pub fn calls(&self) -> u64 {
        self.calls
    }

    /// Forgets the name of a number that the driver may give away again.
    pub fn forget(&mut self, number: u64) {
        self.names.remove(&number);
    }

    fn fold(&mut self, value: u64) {
        self.block = mix(self.block.rotate_left(5) ^ value);
    }

    fn normal(&mut self, word: Word, made: bool) -> Normal {
        match word {
            Word::Raw(value) => Normal::Value(value),
            Word::Hidden => Normal::Hidden,
            // Null and the default streams mean themselves.
            Word::Name(small) | Word::New(small) if small <= 2 => Normal::Value(small),
            Word::New(number) if made => {
                let name = self.next_name;
                self.next_name += 1;
                self.names.insert(number, name);
                Normal::Named(name)
            }
            Word::Name(number) | Word::New(number) => {
                let next = &mut self.next_name;
                let name = *self.names.entry(number).or_insert_with(|| {
                    *next += 1;
                    *next - 1
                });
                Normal::Named(name)
            }
        }
    }

    /// Notes a call, its result and its outputs.
    pub fn note(&mut self, symbol: Symbol, args: &[Word], result: CUresult, outs: &[Word]) {
        self.calls += 1;
        self.counts[symbol as usize] += 1;
        let shown = self.shown.contains(&self.calls);
        if shown {
            let _ = write!(self.text, "#{} {}(", self.calls, symbol.entry().name());
        }
        self.fold(symbol as u64 + 1);
        for (at, word) in args.iter().enumerate() {
            let value = self.normal(*word, false);
            self.fold(value.folded());
            if shown {
                let comma = if at > 0 { ", " } else { "" };
                let _ = write!(self.text, "{comma}{value}");
            }
        }
        self.fold(u64::from(result.0) + 1);
        if shown {
            let _ = write!(self.text, ") -> {result:?}");
        }
        for word in outs {
            let value = self.normal(*word, result.is_ok());
            self.fold(value.folded());
            if shown {
                let _ = write!(self.text, " {value}");
            }
        }
        if shown {
            self.text.push('\n');
        }
        if self.calls.is_multiple_of(BLOCK_CALLS) {
            self.close();
        }
    }

    fn close(&mut self) {
        self.blocks.push(self.block);
        self.block = 0;
    }

    /// Ends the transcript: hashes by block (the last one may be short), calls per symbol, and the
    /// calls written out.
    pub fn end(mut self) -> (Vec<u64>, Vec<u64>, String) {
        if !self.calls.is_multiple_of(BLOCK_CALLS) {
            self.close();
        }
        (self.blocks, self.counts, self.text)
    }
}

/// A word as it is compared.
#[derive(Clone, Copy)]
enum Normal {
    Value(u64),
    Named(u64),
    Hidden,
}

impl Normal {
    fn folded(self) -> u64 {
        match self {
            Self::Value(value) => value,
            Self::Named(name) => mix(name),
            Self::Hidden => 0,
        }
    }
}

impl std::fmt::Display for Normal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Hidden => write!(f, "_"),
            Self::Named(name) => write!(f, "@{name}"),
            Self::Value(value) if *value > 0xffff_ffff => write!(f, "{value:#x}"),
            Self::Value(value) => write!(f, "{value}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hashes(address: u64, status: CUresult) -> Vec<u64> {
        let mut log = Transcript::new(0..0);
        log.note(
            Symbol::cuMemAlloc_v2,
            &[Word::Raw(64)],
            CUresult::CUDA_SUCCESS,
            &[Word::New(address)],
        );
        log.note(Symbol::cuMemFree_v2, &[Word::Name(address)], status, &[]);
        log.end().0
    }

    #[test]
    fn addresses_are_compared_by_their_order_of_appearance() {
        let ok = CUresult::CUDA_SUCCESS;
        assert_eq!(hashes(0x7f00_0000, ok), hashes(0x5500_0000, ok));
    }

    #[test]
    fn another_status_makes_another_hash() {
        assert_ne!(
            hashes(0x7f00_0000, CUresult::CUDA_SUCCESS),
            hashes(0x7f00_0000, CUresult::CUDA_ERROR_INVALID_VALUE)
        );
    }

    #[test]
    fn calls_in_the_range_are_written_out() {
        let mut log = Transcript::new(2..3);
        for bytes in [1, 2, 3] {
            log.note(
                Symbol::cuMemAlloc_v2,
                &[Word::Raw(bytes)],
                CUresult::CUDA_SUCCESS,
                &[Word::New(0x1000 * bytes)],
            );
        }
        assert_eq!(log.end().2, "#2 cuMemAlloc_v2(2) -> CUDA_SUCCESS (0) @2\n");
    }
}
