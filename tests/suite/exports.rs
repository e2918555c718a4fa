//! What the libraries look like to the dynamic linker.

use std::collections::BTreeSet;

use object::elf;
use shim_ffi::ENTRIES;
use tests::Artefacts;
use tests::elf::Library;

#[track_caller]
fn exports_the_table(library: &Library) {
    let missing: Vec<_> = ENTRIES
        .iter()
        .map(|entry| entry.name())
        .filter(|name| !library.exports.contains(*name))
        .collect();
    assert!(missing.is_empty(), "not exported: {missing:?}");
}

#[test]
fn the_preload_library_bears_the_drivers_name_and_all_its_symbols() {
    let library = Library::read(&Artefacts::get().preload());
    assert_eq!(library.soname.as_deref(), Some("libcuda.so.1"));
    exports_the_table(&library);
    for name in ["dlsym", "dlvsym", "sublet_version"] {
        assert!(library.exports.contains(name), "{name} is not exported");
    }
    assert!(
        !library.exports.contains("dlopen"),
        "callers of a hooked dlopen lose their RUNPATH"
    );
}

/// What it exports besides the driver's symbols, and who asks for it.
const BESIDES: [(&str, &str); 14] = [
    ("dlsym", "look-ups through a handle of the real driver"),
    ("dlvsym", "the same"),
    (
        "sublet_version",
        "tools, and telling ourselves from a driver",
    ),
    (
        "__asan_default_options",
        "the address sanitizer, which would not start behind us",
    ),
    ("sublet_step", "programs that say where an iteration ends"),
    (
        "sublet_resize_requested",
        "programs that can change their size",
    ),
    ("sublet_resize_ready", "the same"),
    (
        "sublet_pipeline_add",
        "programs that say which memory their parts need",
    ),
    ("sublet_pipeline_begin", "the same"),
    ("sublet_pipeline_clear", "the same"),
    (
        "InitializeInjection",
        "the driver, where its variable names us",
    ),
    ("la_version", "the dynamic linker, where we are an auditor"),
    ("la_objopen", "the same"),
    ("la_objsearch", "the same"),
];

#[test]
fn the_preload_library_exports_nothing_else_of_ours() {
    let library = Library::read(&Artefacts::get().preload());
    let table: BTreeSet<&str> = ENTRIES.iter().map(|entry| entry.name()).collect();
    let stray: Vec<_> = library
        .exports
        .iter()
        .filter(|name| {
            !table.contains(name.as_str())
                && !BESIDES.iter().any(|(known, _)| known == name)
                // NVML's reports, for programs that are linked with it.
                && !shim_ffi::nvml::FUNCTIONS.iter().any(|(_, known)| known == name)
        })
        .collect();
    assert!(
        stray.is_empty(),
        "{stray:?} would stand in for others' symbols"
    );
}

#[test]
fn the_preload_library_needs_neither_cuda_nor_nvml() {
    let library = Library::read(&Artefacts::get().preload());
    for name in &library.needed {
        let harmless = [
            "libc.so",
            "ld-linux",
            "libdl.so",
            "libpthread.so",
            "libm.so",
        ]
        .iter()
        .any(|prefix| name.starts_with(prefix));
        assert!(
            harmless,
            "the preload library pulls {name} into every process"
        );
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
    exports_the_table(&library);
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
