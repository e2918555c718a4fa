//! Programs that no preload library gets into, or not every time.

use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;

use host_process::{Artefacts, Host, Way};

#[test]
fn static_programs_run_and_are_named() {
    let program =
        match Artefacts::get().compile("static_program", "static_program.c", None, &["-static"]) {
            Ok(program) => program,
            Err(error) => return eprintln!("skipped: a static program: {error}"),
        };
    let host = Host::new::<&str>(program, &[]);
    let bare = host.run(Way::Bare);
    assert_eq!(bare.code, Some(5), "{bare:?}");
    assert_eq!(host.run(Way::Preloaded), bare);
    let job = host.run(Way::Job);
    assert_eq!((job.code, &job.stdout), (bare.code, &bare.stdout));
    assert!(job.stderr.contains("statically linked"), "{job:?}");
}

#[test]
fn static_programs_of_musl() {
    let compiled = Artefacts::get().compile(
        "static_musl",
        "static_program.c",
        Some("musl-gcc"),
        &["-static"],
    );
    let program = match compiled {
        Ok(program) => program,
        Err(_) => return eprintln!("skipped: a program of musl's: there is no musl-gcc here"),
    };
    let host = Host::new::<&str>(program, &[]);
    let bare = host.run(Way::Bare);
    assert_eq!(bare.code, Some(5), "{bare:?}");
    assert_eq!(host.run(Way::Preloaded), bare);
}

#[test]
fn dynamic_programs_of_musl_run_outside_of_the_job_and_are_named() {
    let compiled =
        Artefacts::get().compile("dynamic_musl", "static_program.c", Some("musl-gcc"), &[]);
    let Ok(program) = compiled else {
        return eprintln!("skipped: a program of musl's: there is no musl-gcc here");
    };
    let host = Host::new::<&str>(program, &[]);
    let bare = host.run(Way::Bare);
    assert_eq!(bare.code, Some(5), "{bare:?}");
    let job = host.run(Way::Job);
    assert_eq!(
        (job.code, &job.stdout),
        (bare.code, &bare.stdout),
        "{job:?}"
    );
    assert!(job.stderr.contains("musl"), "{job:?}");
}

#[test]
fn programs_with_anothers_rights_run_and_are_named() {
    let artefacts = Artefacts::get();
    let program = artefacts
        .compile("gains_rights", "gains_rights.c", None, &[])
        .unwrap();
    let copy = program.with_file_name("gains_rights_of_another");
    let _ = std::fs::remove_file(&copy);
    std::fs::copy(&program, &copy).unwrap();
    if chown(&copy, Some(65534), None).is_err() {
        return eprintln!("skipped: a set-user-id program: only root can make one");
    }
    std::fs::set_permissions(&copy, std::fs::Permissions::from_mode(0o4755)).unwrap();
    let host = Host::new::<&str>(copy, &[]);
    let bare = host.run(Way::Bare);
    assert_eq!(bare.code, Some(4), "{bare:?}");
    if bare.stdout != "user 65534\n" {
        return eprintln!("skipped: a set-user-id program: this file system ignores the bit");
    }
    assert_eq!(host.run(Way::Preloaded), bare);
    let job = host.run(Way::Job);
    assert_eq!((job.code, &job.stdout), (bare.code, &bare.stdout));
    assert!(job.stderr.contains("rights of another"), "{job:?}");
}

#[test]
fn constructor_of_library_waits_for_the_device() {
    let artefacts = Artefacts::get();
    let search = format!("-L{}", artefacts.dir.join("sim").display());
    let flags = [
        "-DIN_CONSTRUCTOR",
        "-shared",
        "-fPIC",
        &search,
        "-l:libcuda.so.1",
    ];
    let library = artefacts
        .compile("waits_in_constructor.so", "ways/linked.c", None, &flags)
        .unwrap();
    let program = artefacts.compile("ways", "ways/ways.c", None, &[]).unwrap();
    let library = library.to_str().unwrap();
    let host = Host::new(program, &["constructor-of-library", library, library]);
    let outcome = host.is_the_same_everywhere();
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
}

#[test]
fn shell_scripts() {
    let host = Host::new(
        "/bin/sh",
        &[
            "-c",
            "echo one; (exit 3); echo $?; ls / | grep -c bin; cat /dev/null; exec sh -c 'exit 6'",
        ],
    );
    let outcome = host.is_the_same_everywhere();
    assert_eq!(outcome.code, Some(6));
    assert!(Path::new("/bin/sh").exists());
}
