//! What `sublet run` needs to know of an ELF file: is it a library for this machine, and is a
//! program one that the dynamic loader, and so the preload library, gets into?

use std::fs::File;
use std::path::Path;

use object::LittleEndian;
use object::elf::{ET_DYN, ET_EXEC, FileHeader64};
use object::read::ReadCache;
use object::read::elf::{FileHeader as _, ProgramHeader as _};

#[cfg(target_arch = "x86_64")]
const MACHINE: u16 = object::elf::EM_X86_64;
#[cfg(target_arch = "aarch64")]
const MACHINE: u16 = object::elf::EM_AARCH64;
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!("sublet knows the drivers of x86_64 and aarch64");

/// Whether `file` is a shared library that a process of this machine could load.
pub fn is_library(file: &Path) -> bool {
    read(file, |_, header| {
        Some(header.e_type(LittleEndian) == ET_DYN)
    })
    .unwrap_or(false)
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
    read(file, |cache, header| {
        if !matches!(header.e_type(LittleEndian), ET_EXEC | ET_DYN) {
            return None;
        }
        let mut programs = header.program_headers(LittleEndian, cache).ok()?.iter();
        let name =
            programs.find_map(|program| program.interpreter(LittleEndian, cache).transpose());
        name.transpose().ok().map(|name| name.map(<[u8]>::to_vec))
    })
}

/// Looks into a file, where it is a 64-bit little-endian ELF file for this machine. Reads what is
/// looked at, and not the whole of what may be a large program.
fn read<T>(
    file: &Path,
    look: impl FnOnce(&ReadCache<File>, &FileHeader64<LittleEndian>) -> Option<T>,
) -> Option<T> {
    let cache = ReadCache::new(File::open(file).ok()?);
    let header = FileHeader64::parse(&cache).ok()?;
    let ours = header.is_little_endian() && header.e_machine(LittleEndian) == MACHINE;
    ours.then(|| look(&cache, header)).flatten()
}

#[cfg(test)]
mod tests {
    use object::elf::{PT_INTERP, ProgramHeader64};

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
        let header = FileHeader64::<LittleEndian>::parse(bytes.as_slice()).unwrap();
        let at = header.e_phoff(LittleEndian) as usize;
        let size = size_of::<ProgramHeader64<LittleEndian>>();
        let programs = header.program_headers(LittleEndian, bytes.as_slice());
        let interp = programs.unwrap().iter();
        let interp = interp.map(|program| program.p_type(LittleEndian));
        let found = at + size * interp.clone().position(|kind| kind == PT_INTERP).unwrap();
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
