//! `/etc/ld.so.cache`, read for one library name.
//!
//! Layout from glibc, `sysdeps/generic/dl-cache.h` (`struct cache_file_new`, `struct
//! file_entry_new`): a header of 48 bytes that begins with `glibc-ld.so.cache1.1`, then entries of
//! 24 bytes with the offsets of name and path from the header's start. An older cache may stand
//! before it.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

const MAGIC: &[u8] = b"glibc-ld.so.cache1.1";
const HEADER_BYTES: usize = 48;
const ENTRY_BYTES: usize = 24;

/// The paths that the cache has for `name`, in its order. Nothing where it is no cache or cut off.
pub fn lookup(cache: &[u8], name: &str) -> Vec<PathBuf> {
    let Some(start) = cache
        .windows(MAGIC.len())
        .position(|window| window == MAGIC)
    else {
        return Vec::new();
    };
    let cache = &cache[start..];
    let word = |at: usize| -> Option<usize> {
        let bytes = cache.get(at..at + 4)?;
        // PANIC: four bytes by the line above.
        Some(u32::from_le_bytes(bytes.try_into().expect("four bytes")) as usize)
    };
    let text = |at: usize| cache.get(at..)?.split(|b| *b == 0).next();
    let count = word(MAGIC.len()).unwrap_or(0);
    (0..count)
        .map_while(|i| {
            let entry = HEADER_BYTES + i * ENTRY_BYTES;
            Some((text(word(entry + 4)?)?, text(word(entry + 8)?)?))
        })
        .filter(|(key, _)| *key == name.as_bytes())
        .map(|(_, path)| PathBuf::from(OsString::from_vec(path.to_vec())))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache(entries: &[(&str, &str)], before: &[u8]) -> Vec<u8> {
        let mut strings = Vec::new();
        let strings_at = HEADER_BYTES + entries.len() * ENTRY_BYTES;
        let mut add = |text: &str| {
            let at = (strings_at + strings.len()) as u32;
            strings.extend_from_slice(text.as_bytes());
            strings.push(0);
            at
        };
        let mut table = Vec::new();
        for (name, path) in entries {
            let words = [0x0303, add(name), add(path), 0, 0, 0];
            table.extend(words.iter().flat_map(|word| word.to_le_bytes()));
        }
        let mut cache = before.to_vec();
        cache.extend_from_slice(MAGIC);
        cache.extend_from_slice(&(entries.len() as u32).to_le_bytes());
        cache.extend_from_slice(&(strings.len() as u32).to_le_bytes());
        cache.resize(before.len() + HEADER_BYTES, 0);
        cache.extend(table);
        cache.extend(strings);
        cache
    }

    #[test]
    fn names_are_found_whole_and_in_order() {
        let entries = [
            ("libc.so.6", "/lib/libc.so.6"),
            ("libcuda.so.1", "/a/libcuda.so.1"),
            ("libcuda.so", "/a/libcuda.so"),
            ("libcuda.so.1", "/b/libcuda.so.1"),
        ];
        for before in [&b""[..], b"ld.so-1.7.0\0old entries"] {
            let bytes = cache(&entries, before);
            assert_eq!(
                lookup(&bytes, "libcuda.so.1"),
                ["/a/libcuda.so.1", "/b/libcuda.so.1"].map(PathBuf::from)
            );
            assert!(lookup(&bytes, "libcuda").is_empty());
        }
    }

    #[test]
    fn a_damaged_cache_gives_nothing_more() {
        let bytes = cache(&[("a", "/a"), ("b", "/b")], b"");
        for len in 0..bytes.len() {
            let _ = lookup(&bytes[..len], "b");
        }
        let mut wild = bytes.clone();
        wild[MAGIC.len()..MAGIC.len() + 4].copy_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(lookup(&wild, "a"), [PathBuf::from("/a")]);
        let mut wild = bytes;
        wild[HEADER_BYTES + 4..HEADER_BYTES + 8].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(lookup(&wild, "a").is_empty());
    }

    #[test]
    fn the_cache_of_this_host_has_its_c_library() {
        // Not every host has a cache (musl, minimal images); where one is, glibc is in it.
        if let Ok(bytes) = std::fs::read("/etc/ld.so.cache") {
            assert!(!lookup(&bytes, "libc.so.6").is_empty());
        }
    }
}
