//! What a shared library says to the dynamic linker.

use std::collections::BTreeSet;
use std::path::Path;

use object::read::elf::{ElfFile64, FileHeader};
use object::{Endianness, Object, ObjectSymbol, elf};

/// The dynamic section of a library.
#[derive(Debug)]
pub struct Library {
    /// Names that it defines for others.
    pub exports: BTreeSet<String>,
    /// The name that it bears.
    pub soname: Option<String>,
    /// What is loaded with it.
    pub needed: Vec<String>,
    /// `DT_FLAGS`.
    pub flags: u64,
    /// `DT_FLAGS_1`.
    pub flags_1: u64,
}

impl Library {
    /// Reads a library.
    ///
    /// # Panics
    /// When the file is none.
    pub fn read(path: &Path) -> Self {
        let bytes =
            std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let file: ElfFile64<'_, Endianness> = ElfFile64::parse(&*bytes).expect("an ELF file");
        let exports = file
            .dynamic_symbols()
            .filter(|symbol| symbol.is_definition() && symbol.is_global())
            .map(|symbol| symbol.name().expect("a name").to_owned())
            .collect();
        let endian = file.endian();
        let header = file.elf_header();
        let sections = header.sections(endian, &*bytes).expect("sections");
        let (entries, strings) = sections
            .dynamic(endian, &*bytes)
            .expect("a readable dynamic section")
            .expect("a dynamic section");
        let strings = sections
            .strings(endian, &*bytes, strings)
            .expect("its strings");
        let text = |value: u64| {
            let at = u32::try_from(value).expect("an offset");
            let bytes = strings.get(at).expect("a string");
            String::from_utf8_lossy(bytes).into_owned()
        };
        let mut library = Self {
            exports,
            soname: None,
            needed: Vec::new(),
            flags: 0,
            flags_1: 0,
        };
        for entry in entries {
            let value = entry.d_val.get(endian);
            match u32::try_from(entry.d_tag.get(endian)).unwrap_or(0) {
                elf::DT_SONAME => library.soname = Some(text(value)),
                elf::DT_NEEDED => library.needed.push(text(value)),
                elf::DT_FLAGS => library.flags = value,
                elf::DT_FLAGS_1 => library.flags_1 = value,
                _ => {}
            }
        }
        library
    }
}
