//! As much of an ELF file as `sublet run` needs: is it a library for this machine, and is a program
//! one that the dynamic loader, and so the preload library, gets into? Layout: elf(5).

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

const ET_EXEC: u16 = 2;
const ET_DYN: u16 = 3;
const PT_INTERP: u32 = 3;
const HEADER_BYTES: usize = 64;
/// Of a program header, as far as it is looked at (its whole, in a 64-bit file).
const HEADER_BYTES_OF_PROGRAM: u64 = 56;
/// The kernel takes no program whose program headers are longer than a page.
const PROGRAM_HEADERS_MAX_BYTES: u64 = 4096;

#[cfg(target_arch = "x86_64")]
const MACHINE: u16 = 62;
#[cfg(target_arch = "aarch64")]
const MACHINE: u16 = 183;
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!("sublet knows the drivers of x86_64 and aarch64");

/// Whether `file` is a shared library that a process of this machine could load.
pub fn is_library(file: &Path) -> bool {
    header(file).is_some_and(|(_, header)| half(&header, 16) == ET_DYN)
}

/// Whether `file` is a program that asks for no dynamic loader. False for scripts and whatever else
/// is no ELF file.
pub fn is_static_program(file: &Path) -> bool {
    matches!(loader(file), Some(None))
}

/// Whether `file` is a program of musl's, whose loader cannot load what is made for glibc.
pub fn is_musl_program(file: &Path) -> bool {
    let name = loader(file).flatten();
    name.is_some_and(|name| {
        let file = name.rsplit(|byte| *byte == b'/').next().unwrap_or(&name);
        file.starts_with(b"ld-musl-")
    })
}

/// The dynamic loader that a program asks for; `Some(None)` for none. `None` where `file` is no
/// program of this machine.
fn loader(file: &Path) -> Option<Option<Vec<u8>>> {
    /// The kernel takes no longer path.
    const PATH_MAX_BYTES: u64 = 4096;
    let (file, header) = header(file)?;
    let (at, size) = (long(&header, 32), u64::from(half(&header, 54)));
    let bytes = size * u64::from(half(&header, 56));
    if !matches!(half(&header, 16), ET_EXEC | ET_DYN)
        || size < HEADER_BYTES_OF_PROGRAM
        || bytes > PROGRAM_HEADERS_MAX_BYTES
    {
        return None;
    }
    // CAST: at most a page, and at most 65,535.
    let mut headers = vec![0; bytes as usize];
    file.read_exact_at(&mut headers, at).ok()?;
    let interp = headers
        .chunks(size as usize)
        .find(|header| header.starts_with(&PT_INTERP.to_le_bytes()));
    let Some(interp) = interp else {
        return Some(None);
    };
    let word = |at: usize| {
        let word = interp.get(at..at + 8).and_then(|word| word.try_into().ok());
        word.map_or(0, u64::from_le_bytes)
    };
    let (offset, length) = (word(8), word(32).min(PATH_MAX_BYTES));
    // CAST: at most a page.
    let mut name = vec![0; length as usize];
    file.read_exact_at(&mut name, offset).ok()?;
    while name.last() == Some(&0) {
        name.pop();
    }
    Some(Some(name))
}

/// The file and its first bytes, where it is a 64-bit little-endian ELF file for this machine.
fn header(file: &Path) -> Option<(File, [u8; HEADER_BYTES])> {
    let file = File::open(file).ok()?;
    let mut header = [0; HEADER_BYTES];
    file.read_exact_at(&mut header, 0).ok()?;
    let fits = header.starts_with(b"\x7fELF\x02\x01") && half(&header, 18) == MACHINE;
    fits.then_some((file, header))
}

fn half(header: &[u8; HEADER_BYTES], at: usize) -> u16 {
    u16::from_le_bytes([header[at], header[at + 1]])
}

fn long(header: &[u8; HEADER_BYTES], at: usize) -> u64 {
    (0..8).fold(0, |value, i| value | u64::from(header[at + i]) << (8 * i))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_of_this_machine_is_one() {
        // The test itself is a position-independent program of the machine, which is the same to
        // ELF.
        let itself = std::env::current_exe().unwrap();
        assert!(is_library(&itself));
        let dir = tempfile::tempdir().unwrap();
        let mut bytes = std::fs::read(&itself).unwrap();
        bytes.truncate(64);
        let at = dir.path().join("lib");
        let write = |change: &dyn Fn(&mut Vec<u8>)| {
            let mut changed = bytes.clone();
            change(&mut changed);
            std::fs::write(&at, changed).unwrap();
            is_library(&at)
        };
        assert!(write(&|_| {}));
        assert!(!write(&|bytes| bytes[4] = 1), "32 bit");
        assert!(!write(&|bytes| bytes[18] = 8), "another machine");
        assert!(!write(&|bytes| bytes[16] = 1), "an object file");
        assert!(!write(&|bytes| bytes.truncate(10)), "cut off");
        assert!(!write(&|bytes| bytes[0] = b'/'), "a linker script");
        assert!(!is_library(dir.path()));
    }

    #[test]
    fn programs_of_musl_are_known_by_their_loader() {
        let itself = std::env::current_exe().unwrap();
        assert!(!is_musl_program(&itself));
        let mut bytes = std::fs::read(&itself).unwrap();
        let glibc = b"/lib64/ld-linux-x86-64.so.2";
        let at = bytes
            .windows(glibc.len())
            .position(|window| window == glibc);
        let Some(at) = at else { return };
        bytes[at..at + glibc.len()].copy_from_slice(b"/lib/ld-musl-x86_64.so.1\0\0\0");
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("musl");
        std::fs::write(&program, &bytes).unwrap();
        assert!(is_musl_program(&program));
        assert!(!is_static_program(&program));
    }

    #[test]
    fn a_program_without_an_interpreter_is_static() {
        let itself = std::env::current_exe().unwrap();
        assert!(!is_static_program(&itself));
        // The same program with its PT_INTERP made a PT_NULL.
        let mut bytes = std::fs::read(&itself).unwrap();
        let header: [u8; HEADER_BYTES] = bytes[..HEADER_BYTES].try_into().unwrap();
        let (at, size) = (long(&header, 32) as usize, half(&header, 54) as usize);
        let found = (0..half(&header, 56) as usize)
            .map(|i| at + i * size)
            .find(|at| bytes[*at..].starts_with(&PT_INTERP.to_le_bytes()))
            .unwrap();
        bytes[found..found + 4].fill(0);
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("static");
        std::fs::write(&program, &bytes).unwrap();
        assert!(is_static_program(&program));
        std::fs::write(&program, &bytes[..at + size]).unwrap();
        assert!(!is_static_program(&program), "cut off");
        std::fs::write(&program, "#!/bin/sh\n").unwrap();
        assert!(!is_static_program(&program), "a script");
    }
}
