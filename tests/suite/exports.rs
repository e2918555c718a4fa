//! What the libraries look like to the dynamic linker.

use std::collections::BTreeSet;
use std::path::Path;

use object::read::elf::{ElfFile64, FileHeader};
use object::{Endianness, Object, ObjectSymbol, elf};
use shim_ffi::ENTRIES;
use tests::Artefacts;

struct Library {
    exports: BTreeSet<String>,
    soname: Option<String>,
    needed: Vec<String>,
    flags_1: u64,
    flags: u64,
}

impl Library {
    fn read(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
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
            .expect("a dynamic section")
            .expect("a dynamic section");
        let strings = sections
            .strings(endian, &*bytes, strings)
            .expect("its strings");
        let text = |value: u64| {
            let at = u32::try_from(value).expect("an offset");
            let bytes = strings.get(at).expect("a string");
            String::from_utf8_lossy(bytes).into_owned()
        };
        let (mut soname, mut needed, mut flags, mut flags_1) = (None, Vec::new(), 0, 0);
        for entry in entries {
            let value = entry.d_val.get(endian);
            match u32::try_from(entry.d_tag.get(endian)).unwrap_or(0) {
                elf::DT_SONAME => soname = Some(text(value)),
                elf::DT_NEEDED => needed.push(text(value)),
                elf::DT_FLAGS => flags = value,
                elf::DT_FLAGS_1 => flags_1 = value,
                _ => {}
            }
        }
        Self {
            exports,
            soname,
            needed,
            flags_1,
            flags,
        }
    }

    #[track_caller]
    fn exports_the_table(&self) {
        let missing: Vec<_> = ENTRIES
            .iter()
            .map(|entry| entry.name())
            .filter(|name| !self.exports.contains(*name))
            .collect();
        assert!(missing.is_empty(), "not exported: {missing:?}");
    }
}

#[test]
fn the_preload_library_bears_the_drivers_name_and_all_its_symbols() {
    let library = Library::read(&Artefacts::get().preload());
    assert_eq!(library.soname.as_deref(), Some("libcuda.so.1"));
    library.exports_the_table();
    for name in ["dlsym", "dlvsym", "sublet_version"] {
        assert!(library.exports.contains(name), "{name} is not exported");
    }
    assert!(
        !library.exports.contains("dlopen"),
        "callers of a hooked dlopen lose their RUNPATH"
    );
}

#[test]
fn the_preload_library_exports_nothing_else_of_ours() {
    let library = Library::read(&Artefacts::get().preload());
    let table: BTreeSet<&str> = ENTRIES.iter().map(|entry| entry.name()).collect();
    let stray: Vec<_> = library
        .exports
        .iter()
        .filter(|name| {
            !table.contains(name.as_str())
                && !["dlsym", "dlvsym", "sublet_version"].contains(&name.as_str())
        })
        .collect();
    assert!(stray.is_empty(), "{stray:?} would stand in for others' symbols");
}

#[test]
fn the_preload_library_needs_neither_cuda_nor_nvml() {
    let library = Library::read(&Artefacts::get().preload());
    for name in &library.needed {
        let harmless = ["libc.so", "libgcc_s.so", "ld-linux", "libdl.so", "libpthread.so", "libm.so"]
            .iter()
            .any(|prefix| name.starts_with(prefix));
        assert!(harmless, "the preload library pulls {name} into every process");
    }
    assert!(
        library.flags & u64::from(elf::DF_BIND_NOW) != 0
            || library.flags_1 & u64::from(elf::DF_1_NOW) != 0,
        "its own symbols must be bound when it is loaded"
    );
}

#[test]
fn the_simulated_driver_exports_the_table_and_binds_to_itself() {
    let library = Library::read(&Artefacts::get().simulated_driver());
    assert_eq!(library.soname.as_deref(), Some("libcuda.so.1"));
    library.exports_the_table();
    assert!(
        library.flags & u64::from(elf::DF_SYMBOLIC) != 0,
        "without -Bsymbolic its own calls bind to the preload library"
    );
    assert!(!library.exports.contains("sublet_version"));
}

#[test]
fn the_simulated_nvml_bears_its_name() {
    let library = Library::read(&Artefacts::get().simulated_nvml());
    assert_eq!(library.soname.as_deref(), Some("libnvidia-ml.so.1"));
    for name in ["nvmlInit_v2", "nvmlShutdown", "nvmlDeviceGetCount_v2"] {
        assert!(library.exports.contains(name), "{name} is not exported");
    }
}
