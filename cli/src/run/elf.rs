//! As much of an ELF file as the search for a driver needs: is it one, for this machine, and a library?

use std::fs::File;
use std::io::Read;
use std::path::Path;

const ET_DYN: u16 = 3;

#[cfg(target_arch = "x86_64")]
const MACHINE: u16 = 62;
#[cfg(target_arch = "aarch64")]
const MACHINE: u16 = 183;
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!("sublet knows the drivers of x86_64 and aarch64");

/// Whether `file` is a shared library that a process of this machine could load.
pub fn is_library(file: &Path) -> bool {
    let mut head = [0u8; 20];
    let read = File::open(file).and_then(|mut file| file.read_exact(&mut head));
    let half = |at: usize| u16::from_le_bytes([head[at], head[at + 1]]);
    // e_ident: magic, 64 bit, little endian; then e_type and e_machine.
    read.is_ok()
        && head.starts_with(b"\x7fELF\x02\x01")
        && half(16) == ET_DYN
        && half(18) == MACHINE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_of_this_machine_is_one() {
        // The test itself is a position-independent program of the machine, which is the same to ELF.
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
}
