//! Jobs in unusual places: inside of other jobs and of PID namespaces, with a cleared environment,
//! started by who ignores what is inherited.

use std::os::unix::process::CommandExt;
use std::process::Command;

use nix::libc;
use tests::{Outcome, Sandbox, programs};

const GIB: &[&str] = &["--mem", "1GiB"];

/// Words of an outcome that one of `lines` begins with.
fn line<'a>(outcome: &'a Outcome, begins: &str) -> &'a str {
    let mut lines = outcome.stdout.lines();
    lines
        .find(|line| line.starts_with(begins))
        .unwrap_or_else(|| panic!("no line {begins}: {outcome:?}"))
}

#[test]
fn nvml_names_the_own_process_in_a_pid_namespace() {
    let sandbox = Sandbox::new();
    let inside: &[&str] = match nix::unistd::geteuid().is_root() {
        true => &["--pid", "--fork", "--mount-proc"],
        false => &[
            "--user",
            "--map-root-user",
            "--pid",
            "--fork",
            "--mount-proc",
        ],
    };
    let program = programs::program("unusual");
    let words = ["allocate", "1", "nvml"];
    let bare = Outcome::of(
        sandbox
            .bare("unshare")
            .args(inside)
            .arg(&program)
            .args(words),
    );
    if bare.code != Some(0) {
        eprintln!(
            "skipped: no PID namespace can be made here: {}",
            bare.stderr.trim()
        );
        return;
    }
    let mut shown = vec![line(&bare, "nvml").to_owned()];
    let mut job = sandbox.job(GIB, "unshare");
    let within = Outcome::of(job.args(inside).arg(&program).args(words)).succeeded();
    shown.push(line(&within, "nvml").to_owned());
    let outside = Outcome::of(sandbox.job(GIB, &program).args(words)).succeeded();
    shown.push(line(&outside, "nvml").to_owned());
    println!(
        "now: bare and in a namespace: {}; in a job and a namespace: {}",
        shown[0], shown[1]
    );
    for line in &shown[1..] {
        assert_eq!(line, "nvml 0: 1 processes, 1 of them this one with 500 MiB");
    }
}

#[test]
fn a_strict_job_is_kept_off_the_devices_that_it_may_not_use() {
    let mut sandbox = Sandbox::new();
    sandbox.set("SUBLET_SIM_DEVICES", "3");
    let program = programs::program("unusual");
    let flags = [
        "--mem", "1GiB", "--device", "0", "--strict", "--name", "kept",
    ];
    let outcome = Outcome::of(sandbox.job(&flags, &program).arg("devices")).succeeded();
    let used = outcome.stdout.matches("memory 0").count();
    let off = outcome.stderr.matches("is kept off its device").count();
    println!(
        "now: {used} of 3 devices gave 2 GiB under 1 GiB on device 0; kept off {off} others, each reported"
    );
    let all: Vec<&str> = outcome.stdout.lines().collect();
    assert_eq!(
        all,
        [
            "device 0: context 0 primary 0 pool 0 handle 0 memory 2",
            "device 1: context 46 primary 46 pool 46 handle 46 memory -1",
            "device 2: context 46 primary 46 pool 46 handle 46 memory -1",
        ],
        "{outcome:?}"
    );
    assert_eq!(off, 2, "{outcome:?}");
}

#[test]
fn every_foreign_device_is_reported_to_the_user_and_the_journal() {
    let mut sandbox = Sandbox::new();
    sandbox.set("SUBLET_SIM_DEVICES", "3");
    let program = programs::program("unusual");
    let flags = ["--mem", "1GiB", "--device", "0", "--name", "free"];
    let outcome = Outcome::of(sandbox.job(&flags, &program).arg("devices")).succeeded();
    let reported = outcome.stderr.matches("which the job may not use").count();
    assert_eq!(outcome.stdout.matches("memory 0").count(), 2, "{outcome:?}");
    let devices = |event: &control::Event| {
        let devices = event.fields.get("devices")?.as_array()?.len();
        (event.kind == "ungoverned").then_some(devices)
    };
    let noted = tests::wait_until("the journal has both", || {
        let noted: usize = sandbox.events().iter().filter_map(devices).sum();
        (noted >= 2).then_some(noted)
    });
    println!(
        "now: of 2 foreign devices {reported} were reported on stderr, {noted} are in the journal"
    );
    assert_eq!((reported, noted), (2, 2), "{outcome:?}");
}

#[test]
fn a_launcher_whose_parent_ignores_sigchld_works_and_its_command_finds_it_ignored() {
    let sandbox = Sandbox::new();
    let ignoring = |command: &mut Command| {
        // SAFETY: the call is async-signal-safe, and SIG_IGN installs no code.
        unsafe {
            command.pre_exec(|| {
                libc::signal(libc::SIGCHLD, libc::SIG_IGN);
                Ok(())
            });
        }
        Outcome::of(command)
    };
    // The first one starts an arbiter, the second finds it. A shell would reset the signal.
    let mut shown = sandbox.job(GIB, "grep");
    let shown = ignoring(shown.args(["SigIgn", "/proc/self/status"])).succeeded();
    let set = line(&shown, "SigIgn").split_ascii_whitespace().nth(1);
    let set = u64::from_str_radix(set.expect("a set"), 16).expect("a number");
    assert_ne!(set >> (libc::SIGCHLD - 1) & 1, 0, "{shown:?}");
    let mut codes = vec![ignoring(sandbox.job(GIB, "sh").args(["-c", "exit 7"])).code];
    let file = sandbox.path("calls.slr");
    let mut record = sandbox.sublet(["record", "--sim", "-o"]);
    let recorded = ignoring(record.arg(file).args(["--", "sh", "-c", "exit 7"]));
    codes.push(recorded.code);
    println!("now: a command that exits with 7: {codes:?}");
    assert_eq!(codes, [Some(7); 2], "{recorded:?}");
}

/// How many times 500 MiB are given to a program of that `sublet run`, started inside of another.
fn given(sandbox: &Sandbox, outer: &[&str], inner: &[&str]) -> (Outcome, Option<usize>) {
    let sublet = tests::Artefacts::get().program("sublet");
    let mut command = sandbox.job(outer, sublet);
    command.args(["run", "--sim"]).args(inner).arg("--");
    command
        .arg(programs::program("unusual"))
        .args(["allocate", "3"]);
    let outcome = Outcome::of(&mut command);
    let given = outcome.stdout.lines().find_map(|line| {
        let rest = line.strip_prefix("status 0, ")?;
        rest.strip_suffix(" given")?.parse().ok()
    });
    (outcome, given)
}

#[test]
fn a_run_inside_of_a_job_stays_within_its_limits() {
    let sandbox = Sandbox::new();
    let outer = ["--mem", "1GiB", "--name", "outer"];
    let (plain, least) = given(&sandbox, &outer, &[]);
    let (more, most) = given(
        &sandbox,
        &outer,
        &["--mem", "4GiB", "--share", "0.9", "--name", "in"],
    );
    println!(
        "now: of 3 x 500 MiB in a run inside of a job with 1 GiB {least:?} are given, with --mem 4GiB of its own {most:?}"
    );
    assert_eq!((least, most), (Some(2), Some(2)), "{plain:?} {more:?}");
    assert!(plain.stderr.contains("inside job `outer`"), "{plain:?}");
    let said = "without effect: mem, share, name";
    assert!(more.stderr.contains(said), "{more:?}");
    let strict = [&outer[..], &["--strict"]].concat();
    let (refused, none) = given(&sandbox, &strict, &["--mem", "512MiB", "--strict"]);
    assert_eq!((refused.code, none), (Some(125), None), "{refused:?}");
    // An outer job without limits has nothing to stay within.
    let (free, own) = given(&sandbox, &["--name", "open"], GIB);
    assert_eq!(own, Some(2), "{free:?}");
}

#[test]
fn a_program_that_clears_its_environment_has_its_driver_and_its_limit() {
    let sandbox = Sandbox::new();
    let program = programs::program("unusual");
    let words = ["clear", "allocate", "3"];
    let bare = Outcome::of(sandbox.bare(&program).args(words)).succeeded();
    let lonely = Outcome::of(sandbox.preloaded(&program).args(words)).succeeded();
    let job = Outcome::of(sandbox.job(GIB, &program).args(words)).succeeded();
    let all = [&bare, &lonely, &job].map(|outcome| line(outcome, "status"));
    println!("now: with a cleared environment, bare, preloaded and in a job of 1 GiB: {all:?}");
    assert_eq!(
        all,
        [
            "status 0, 3 given",
            "status 0, 3 given",
            "status 0, 2 given"
        ]
    );
}

#[test]
fn the_home_of_somebody_else_is_no_quota_file() {
    use std::os::unix::fs::PermissionsExt;
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: only root can start a job as another user");
        return;
    }
    const USER: u32 = 54321;
    let sandbox = Sandbox::new();
    let open = |mode| std::fs::Permissions::from_mode(mode);
    std::fs::set_permissions(sandbox.path(""), open(0o711)).expect("a mode");
    for name in ["run", "sim"] {
        std::os::unix::fs::chown(sandbox.path(name), Some(USER), Some(USER)).expect("an owner");
    }
    let mut codes = Vec::new();
    for (home, folder) in [("home", "/"), ("missing", "/"), ("missing", "home")] {
        let mut command = sandbox.job(GIB, "/bin/true");
        let command = command.env("HOME", sandbox.path(home));
        let folder = sandbox.path(folder);
        // As a shell that was there before it became another user.
        // SAFETY: the calls are async-signal-safe.
        unsafe {
            let path = std::ffi::CString::new(folder.into_os_string().into_encoded_bytes())
                .expect("a path");
            command.pre_exec(move || {
                let done = libc::chdir(path.as_ptr()) == 0
                    && libc::setgroups(0, std::ptr::null()) == 0
                    && libc::setgid(USER) == 0
                    && libc::setuid(USER) == 0;
                if done {
                    Ok(())
                } else {
                    Err(std::io::Error::last_os_error())
                }
            });
        }
        let outcome = Outcome::of(command);
        let unseen = home == "home" || folder_is_home(&outcome);
        assert!(
            !unseen || outcome.stderr.contains("cannot be seen"),
            "{outcome:?}"
        );
        codes.push(outcome.code);
    }
    println!("now: with the home of another, with none, and in a folder of another: {codes:?}");
    assert_eq!(codes, [Some(0); 3]);
}

fn folder_is_home(outcome: &Outcome) -> bool {
    outcome.stderr.contains("sublet.toml")
}

#[test]
fn a_deep_job_starts_beside_a_preloaded_library_with_thread_local_data() {
    let sandbox = Sandbox::new();
    let library = programs::library("thread_local");
    let codes = [&["--mem", "1GiB"][..], &["--mem", "1GiB", "--deep"]].map(|flags| {
        let mut command = sandbox.job(flags, "/bin/true");
        Outcome::of(command.env("LD_PRELOAD", &library)).code
    });
    println!("now: it ends with {codes:?} without and with --deep");
    assert_eq!(codes, [Some(0), Some(0)]);
}

#[test]
fn a_program_with_a_sanitizer_ends_in_a_job_as_it_does_bare() {
    let sandbox = Sandbox::new();
    let mut ran = Vec::new();
    for (sanitizer, linked_in) in [
        ("thread", false),
        ("address", false),
        ("address", true),
        ("leak", false),
        ("undefined", false),
    ] {
        let Some(program) = programs::sanitized("sanitized", sanitizer, linked_in) else {
            println!("skipped: the compiler has no {sanitizer} sanitizer (linked in: {linked_in})");
            continue;
        };
        let bare = Outcome::of(&mut sandbox.bare(&program));
        let governed = Outcome::of(&mut sandbox.job(GIB, &program));
        let ends = [&bare, &governed].map(|outcome| (outcome.code, outcome.stdout.clone()));
        assert_eq!(ends[0], ends[1], "{sanitizer}: {governed:?}");
        ran.push(sanitizer);
    }
    println!("now: programs with these sanitizers end as they do bare: {ran:?}");
}
