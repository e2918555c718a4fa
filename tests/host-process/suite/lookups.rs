//! Names that the driver has and we do not know, and names that we know and the driver lacks.

use std::path::PathBuf;

use host_process::{Artefacts, Host, Way};

/// A driver that is newer than our table, and lacks most of it.
fn newer_driver() -> PathBuf {
    let flags = [
        "-shared",
        "-fPIC",
        "-Wl,-Bsymbolic",
        "-Wl,-soname,libcuda.so.1",
    ];
    std::fs::create_dir_all(Artefacts::get().dir.join("host-process/newer"))
        .expect("a directory for the driver");
    Artefacts::get()
        .compile("newer/libcuda.so.1", "newer_driver.c", None, &flags)
        .unwrap_or_else(|error| panic!("{error}"))
}

/// Compiles the program, or a library of the same source, linked against that driver.
fn linked(name: &str, source: &str, flags: &[&str]) -> PathBuf {
    let directory = format!("-L{}", newer_driver().parent().unwrap().display());
    let mut all = vec![
        &*directory,
        "-Wl,--no-as-needed",
        "-l:libcuda.so.1",
        "-Wl,-z,lazy",
    ];
    all.extend(flags);
    Artefacts::get()
        .compile(name, source, None, &all)
        .unwrap_or_else(|error| panic!("{error}"))
}

/// What a program prints, which is the same with us and without us.
#[track_caller]
fn is_the_same(host: &Host) -> String {
    let bare = host.run(Way::Bare);
    assert_eq!((bare.code, &*bare.stderr), (Some(0), ""), "{bare:?}");
    let preloaded = host.run(Way::Preloaded);
    assert_eq!(
        preloaded, bare,
        "preloaded:\n{}\n--- bare\n{}",
        preloaded.stdout, bare.stdout
    );
    bare.stdout
}

#[test]
fn a_handle_of_the_driver_finds_what_the_driver_has_and_nothing_else() {
    let program = Artefacts::get()
        .compile("looks_up", "looks_up.c", None, &[])
        .unwrap_or_else(|error| panic!("{error}"));
    let host = Host::new::<&str>(program, &[]).on(newer_driver().parent().unwrap());
    let said = is_the_same(&host);
    for line in [
        "driver mapped: 0",
        "handle cuFutureCall: found",
        "handle cudbgFutureFlag: found",
        "handle futureWithoutPrefix: found",
        "the call answers 4243",
        "the call answers 71",
    ] {
        assert!(said.lines().any(|said| said == line), "{line}:\n{said}");
    }
    assert!(
        said.contains("handle cuMemAlloc_v2: ") && !said.contains("cuMemAlloc_v2: found"),
        "{said}"
    );
}

#[test]
fn a_handle_of_a_library_that_is_linked_against_the_driver_finds_the_same() {
    let library = linked("needs_driver.so", "needs_driver.c", &["-shared", "-fPIC"]);
    let program = Artefacts::get()
        .compile("looks_up", "looks_up.c", None, &[])
        .unwrap_or_else(|error| panic!("{error}"));
    let host = Host::new(program, &[library]).on(newer_driver().parent().unwrap());
    let said = is_the_same(&host);
    assert!(said.contains("dependent cudbgFutureFlag: found"), "{said}");
}

#[test]
fn a_program_that_is_linked_against_the_driver_finds_it_in_the_global_scope() {
    let program = linked("looks_up_linked", "looks_up.c", &["-DLINKED"]);
    let host = Host::new::<&str>(program, &[]).on(newer_driver().parent().unwrap());
    let said = is_the_same(&host);
    for line in [
        "default cuFutureCall: found",
        "next cudbgFutureFlag: found",
        "program futureWithoutPrefix: found",
        "by link: 76",
    ] {
        assert!(said.lines().any(|said| said == line), "{line}:\n{said}");
    }
}
