//! What the library asks of the programs that load it: nothing but the C library of 2018.

use std::collections::BTreeMap;

use host_process::Artefacts;
use object::elf;
use object::read::elf::{Dyn, ElfFile64, FileHeader, SectionHeader};
use object::{Endianness, Object};

/// What glibc a host must have: that of Debian 10 and RHEL 8.
const FLOOR: (u32, u32) = (2, 28);

fn bytes() -> Vec<u8> {
    std::fs::read(Artefacts::get().preload()).unwrap()
}

fn dynamic_strings(data: &[u8], tag: u32) -> Vec<String> {
    let header = elf::FileHeader64::<Endianness>::parse(data).unwrap();
    let endian = header.endian().unwrap();
    let sections = header.sections(endian, data).unwrap();
    let (entries, link) = sections.dynamic(endian, data).unwrap().unwrap();
    let strings = sections.strings(endian, data, link).unwrap();
    entries
        .iter()
        .filter(|entry| entry.tag32(endian) == Some(tag))
        .map(|entry| String::from_utf8_lossy(entry.string(endian, strings).unwrap()).into_owned())
        .collect()
}

#[test]
fn it_needs_the_c_library_and_the_unwinder_only() {
    let allowed = ["libc.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2"];
    for needed in dynamic_strings(&bytes(), elf::DT_NEEDED) {
        assert!(allowed.contains(&needed.as_str()), "needs {needed}");
    }
}

#[test]
fn it_bears_the_drivers_name() {
    assert_eq!(dynamic_strings(&bytes(), elf::DT_SONAME), ["libcuda.so.1"]);
}

#[test]
fn it_runs_nothing_when_it_is_loaded() {
    let data = bytes();
    let header = elf::FileHeader64::<Endianness>::parse(&*data).unwrap();
    let endian = header.endian().unwrap();
    let sections = header.sections(endian, &*data).unwrap();
    for section in sections.iter() {
        let name = sections.section_name(endian, section).unwrap();
        // Of the C start-up files: frame_dummy and the like, one word. Rust's standard library
        // notes argc and argv.
        if name == b".init_array" {
            assert!(section.sh_size(endian) <= 16, "constructors of our own");
        }
        assert_ne!(name, b".ctors");
    }
}

#[test]
fn it_exports_no_more_than_the_driver_and_its_entries() {
    let data = bytes();
    let file = ElfFile64::<Endianness>::parse(&*data).unwrap();
    let ours = [
        "dlsym",
        "dlvsym",
        "sublet_version",
        "sublet_step",
        "sublet_resize_requested",
        "sublet_resize_ready",
        "sublet_pipeline_add",
        "sublet_pipeline_begin",
        "sublet_pipeline_clear",
        "la_version",
        "la_objopen",
        "la_objsearch",
        "InitializeInjection",
        "__asan_default_options",
    ];
    // Those that docs/reference/memory.md lists, and none by which a program asks whether there is
    // an NVML.
    let reports: Vec<&str> = shim_ffi::nvml::FUNCTIONS
        .iter()
        .map(|(_, name)| *name)
        .collect();
    for export in file.exports().unwrap() {
        let name = String::from_utf8_lossy(export.name()).into_owned();
        assert!(
            name.starts_with("cu") || reports.contains(&&*name) || ours.contains(&name.as_str()),
            "exports {name}"
        );
    }
}

#[test]
fn it_asks_for_no_newer_c_library_than_the_floor() {
    let data = bytes();
    let header = elf::FileHeader64::<Endianness>::parse(&*data).unwrap();
    let endian = header.endian().unwrap();
    let sections = header.sections(endian, &*data).unwrap();
    let symbols = sections.symbols(endian, &*data, elf::SHT_DYNSYM).unwrap();
    let versions = sections.versions(endian, &*data).unwrap().unwrap();
    let mut newer = BTreeMap::new();
    for (index, symbol) in symbols.enumerate() {
        if symbol.st_shndx.get(endian) != elf::SHN_UNDEF {
            continue;
        }
        let version = versions
            .version(versions.version_index(endian, index))
            .unwrap();
        let Some(version) =
            version.map(|version| String::from_utf8_lossy(version.name()).into_owned())
        else {
            continue;
        };
        let Some(number) = version.strip_prefix("GLIBC_") else {
            continue;
        };
        let mut parts = number
            .split('.')
            .map(|part| part.parse().unwrap_or(u32::MAX));
        let number = (parts.next().unwrap_or(0), parts.next().unwrap_or(0));
        if number > FLOOR {
            let name = symbols.symbol_name(endian, symbol).unwrap();
            newer.insert(String::from_utf8_lossy(name).into_owned(), version);
        }
    }
    assert!(
        newer.is_empty(),
        "newer than GLIBC_{}.{}: {newer:?}",
        FLOOR.0,
        FLOOR.1
    );
}
