//! Which symbol `cuGetProcAddress(name, version, flags)` means.
//!
//! The rule was read off the answers of real drivers, and is compared with all of them by
//! `scripts/real-driver`: among the rows of that base name which the driver exports, those of the
//! per-thread variant if the flags ask for it and there is one in any version, else the legacy
//! ones; of those whose `introduced` is at most the version asked for the newest ABI. What is not
//! documented (`introduced` is 0) is no answer.

use crate::{ENTRIES, SYMBOLS, Symbol, Variant};

/// Flag of `cuGetProcAddress`: per-thread default streams.
pub const PER_THREAD_DEFAULT_STREAM: u64 = 2;

/// The symbol meant by `base_name` at `version` with `flags`, among those for which `exported`
/// holds.
pub fn select(
    base_name: &[u8],
    version: u32,
    flags: u64,
    exported: impl Fn(Symbol) -> bool,
) -> Option<Symbol> {
    let known =
        || rows(base_name).filter(|symbol| symbol.entry().introduced != 0 && exported(*symbol));
    let is_per_thread = |symbol: &Symbol| symbol.entry().variant != Variant::Legacy;
    let per_thread =
        flags & PER_THREAD_DEFAULT_STREAM != 0 && known().any(|one| is_per_thread(&one));
    known()
        .filter(|symbol| {
            is_per_thread(symbol) == per_thread && symbol.entry().introduced <= version
        })
        .max_by_key(|symbol| symbol.entry().introduced)
}

/// Rows of one base name. They all start with it, so they lie between it and the first name that
/// does not.
fn rows(base_name: &[u8]) -> impl Iterator<Item = Symbol> {
    let from = ENTRIES.partition_point(|entry| entry.symbol.to_bytes() < base_name);
    ENTRIES[from..]
        .iter()
        .zip(&SYMBOLS[from..])
        .take_while(move |(entry, _)| entry.symbol.to_bytes().starts_with(base_name))
        .filter(move |(entry, _)| entry.base_name.as_bytes() == base_name)
        .map(|(_, symbol)| *symbol)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(base: &str, version: u32, flags: u64) -> Option<&'static str> {
        select(base.as_bytes(), version, flags, |_| true).map(|symbol| symbol.entry().name())
    }

    #[test]
    fn version_selects_the_abi() {
        assert_eq!(all("cuMemAlloc", 2000, 0), Some("cuMemAlloc"));
        assert_eq!(all("cuMemAlloc", 12000, 0), Some("cuMemAlloc_v2"));
        assert_eq!(all("cuMemAlloc", 1000, 0), None);
        assert_eq!(all("cuGetProcAddress", 11030, 0), Some("cuGetProcAddress"));
        assert_eq!(
            all("cuGetProcAddress", 12000, 0),
            Some("cuGetProcAddress_v2")
        );
    }

    #[test]
    fn the_flag_selects_the_per_thread_variant_where_one_exists() {
        assert_eq!(all("cuLaunchKernel", 12000, 2), Some("cuLaunchKernel_ptsz"));
        assert_eq!(all("cuLaunchKernel", 12000, 1), Some("cuLaunchKernel"));
        assert_eq!(all("cuMemAlloc", 12000, 2), Some("cuMemAlloc_v2"));
        assert_eq!(all("cuMemcpyHtoD", 12000, 2), Some("cuMemcpyHtoD_v2_ptds"));
    }

    #[test]
    fn a_version_before_the_per_thread_variant_has_no_other_in_its_place() {
        assert_eq!(all("cuEventRecord", 6050, 0), Some("cuEventRecord"));
        assert_eq!(all("cuEventRecord", 6050, 2), None);
        assert_eq!(all("cuEventRecord", 7000, 2), Some("cuEventRecord_ptsz"));
    }

    #[test]
    fn what_is_not_documented_is_no_answer() {
        assert_eq!(all("cuEGLApiInit", 13000, 0), None);
        assert_eq!(all("cuMemGetAttribute", 13000, 2), None);
    }

    #[test]
    fn a_symbol_that_the_driver_lacks_is_not_chosen() {
        let without_v2 = |symbol: Symbol| symbol != Symbol::cuMemAlloc_v2;
        assert_eq!(
            select(b"cuMemAlloc", 12000, 0, without_v2),
            Some(Symbol::cuMemAlloc)
        );
    }

    #[test]
    fn a_prefix_is_not_a_name() {
        assert_eq!(all("cuMem", 13000, 0), None);
        assert_eq!(all("", 13000, 0), None);
    }
}
