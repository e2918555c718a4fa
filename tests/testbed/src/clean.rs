//! Nothing of the caller's reaches the tests.
//!
//! A program started by `nohup`, from a script's background or by a build server inherits ignored
//! signals, a mask, limits, variables and descriptors, and hands them on to every process that it
//! starts. A test that waits for Ctrl-C to end a job then waits for ever. All of that is reset
//! before `main`, in one place, because no test can be trusted to think of it.

use std::ffi::{CStr, CString, OsString};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use crate::within::CommandWithin;

/// TIMEOUT: after which a test program ends itself, whatever it waits for: beyond what the longest
/// of them needs on a machine that is busy with other things.
const PROGRAM_S: libc::c_uint = 2 * 3600;

/// Variables that change what is tested, by the beginnings of their names.
const REMOVED: [&str; 8] = [
    "SUBLET_",
    "CUDA_",
    "NVIDIA_",
    "LD_PRELOAD=",
    "LD_AUDIT=",
    "MAKEFLAGS=",
    "MFLAGS=",
    "MALLOC_",
];

/// Those that are for the tests themselves: where the built files lie.
const KEPT: &str = "SUBLET_TEST_";

/// Names the process that has cleaned up already.
const CLEANED: &CStr = c"SUBLET_TEST_CLEANED_BY";

/// A program that only wants to hang up on the caller's terminal, or be left alone by it, ignores
/// one of these.
const OF_THE_TERMINAL: [libc::c_int; 3] = [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT];

const UMASK: libc::mode_t = 0o022;
const DESCRIPTORS: libc::rlim_t = 4096;
const STACK: libc::rlim_t = 8 << 20;

/// Limits that are to be as wide as they may: what a test says of scarcity it arranges itself.
const WIDE: [libc::__rlimit_resource_t; 6] = [
    libc::RLIMIT_AS,
    libc::RLIMIT_CPU,
    libc::RLIMIT_DATA,
    libc::RLIMIT_FSIZE,
    libc::RLIMIT_MEMLOCK,
    libc::RLIMIT_NPROC,
];

#[used]
// SAFETY: the section holds pointers to functions of this type, which the C library calls before
// `main`, on the only thread.
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;

extern "C" fn start() {
    watch();
    // What one test program does before it starts another in a role is meant.
    if cleaned() {
        return;
    }
    signals();
    descriptors();
    limits();
    // SAFETY: takes a plain number.
    unsafe { libc::umask(UMASK) };
    environment();
}

/// Whether this process was started by one that has cleaned up.
fn cleaned() -> bool {
    // SAFETY: no other thread exists yet that could change the environment; the string is only
    // read.
    unsafe {
        let by = libc::getenv(CLEANED.as_ptr());
        !by.is_null() && libc::atoi(by) == libc::getppid()
    }
}

/// Nothing to read, and nobody else's files to hold open.
fn descriptors() {
    // SAFETY: no other thread exists yet; numbers, and one static path.
    unsafe {
        let nothing = libc::open(c"/dev/null".as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC);
        if nothing > 0 {
            libc::dup2(nothing, 0);
        }
        // Not closed: the program itself may have been given some that it knows of.
        libc::syscall(
            libc::SYS_close_range,
            3,
            libc::c_uint::MAX,
            libc::CLOSE_RANGE_CLOEXEC,
        );
    }
}

/// As the kernel has it: the C library keeps two signals to itself, which are inherited like the
/// others.
#[derive(Clone, Copy)]
#[repr(C)]
struct Action {
    handler: usize,
    flags: libc::c_ulong,
    restorer: usize,
    mask: u64,
}

/// Every signal does what it does by default, and none is blocked.
fn signals() {
    let usual = Action {
        handler: libc::SIG_DFL,
        flags: 0,
        restorer: 0,
        mask: 0,
    };
    let mut detached = false;
    for signal in 1..=libc::SIGRTMAX() {
        let mut was = usual;
        let size = size_of_val(&was.mask);
        // SAFETY: both structures are the kernel's own of this architecture and outlive the calls;
        // a signal that cannot be changed is refused without effect.
        unsafe {
            let none = std::ptr::null::<Action>();
            libc::syscall(libc::SYS_rt_sigaction, signal, none, &raw mut was, size);
            if was.handler == libc::SIG_IGN {
                detached |= OF_THE_TERMINAL.contains(&signal);
                let no = std::ptr::null_mut::<Action>();
                libc::syscall(libc::SYS_rt_sigaction, signal, &raw const usual, no, size);
            }
        }
    }
    // SAFETY: an empty set, filled by the C library, and calls that take no pointers.
    unsafe {
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &none, std::ptr::null_mut());
        // `nohup` is still obeyed: a session of its own gets no signals from the terminal that was
        // to leave it alone.
        if detached {
            libc::setsid();
        }
    }
}

fn limits() {
    let set = |resource, wanted: libc::rlim_t| {
        // SAFETY: one structure of plain data that outlives both calls; the hard limit stays what
        // it is.
        unsafe {
            let mut limit: libc::rlimit = std::mem::zeroed();
            if libc::getrlimit(resource, &mut limit) == 0 {
                limit.rlim_cur = wanted.min(limit.rlim_max);
                libc::setrlimit(resource, &limit);
            }
        }
    };
    for resource in WIDE {
        set(resource, libc::RLIM_INFINITY);
    }
    set(libc::RLIMIT_NOFILE, DESCRIPTORS);
    set(libc::RLIMIT_STACK, STACK);
    set(libc::RLIMIT_CORE, 0);
}

fn removed(variable: &[u8]) -> bool {
    !variable.starts_with(KEPT.as_bytes())
        && REMOVED
            .iter()
            .any(|beginning| variable.starts_with(beginning.as_bytes()))
}

fn environment() {
    // SAFETY: no other thread exists yet that could look at the environment while it changes;
    // `environ` is a list of strings that ends with a null pointer, and names are copied before
    // anything is removed.
    unsafe {
        let mut names = Vec::new();
        let mut at = libc::environ;
        while !at.is_null() && !(*at).is_null() {
            let variable = CStr::from_ptr(*at).to_bytes();
            if removed(variable) {
                let name = variable
                    .split(|byte| *byte == b'=')
                    .next()
                    .unwrap_or_default();
                names.extend(CString::new(name));
            }
            at = at.add(1);
        }
        for name in names {
            libc::unsetenv(name.as_ptr());
        }
        if let Ok(own) = CString::new(libc::getpid().to_string()) {
            libc::setenv(CLEANED.as_ptr(), own.as_ptr(), 1);
        }
    }
}

/// The last limit, for waits that nobody has thought of. A child has no alarm, and does not inherit
/// the handler.
fn watch() {
    extern "C" fn over(_: libc::c_int) {
        let said = b"testbed: this test program has not ended within its limit; a test waits for something that does not come\n";
        // SAFETY: both calls may be made in a signal handler; the bytes are static.
        unsafe {
            libc::write(2, said.as_ptr().cast(), said.len());
            libc::_exit(101);
        }
    }
    // SAFETY: the handler makes two calls that are allowed in it and does not return.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = over as extern "C" fn(libc::c_int) as libc::sighandler_t;
        libc::sigaction(libc::SIGALRM, &action, std::ptr::null_mut());
        libc::alarm(PROGRAM_S);
    }
}

/// Signals 32 and 33, which the C library's way to start a process ignores in every child.
const OF_THE_C_LIBRARY: u64 = 3 << 31;

/// Set for the program that is looked at.
const LOOK: &str = "SUBLET_TEST_LOOK_AT_INHERITED";

/// Starts this test program again as badly as can be, and in it a child that says what it has
/// inherited.
///
/// # Panics
/// Where anything of it has got through.
#[track_caller]
pub fn prove(module: &str) {
    if std::env::var_os(LOOK).is_some() {
        look();
        return;
    }
    // `crate::inherited` in a program's root, as libtest names the test in it.
    let module = module.split_once("::").map_or(module, |(_, rest)| rest);
    let mut again = Command::new(std::env::current_exe().expect("this program has a path"));
    again
        .arg("--exact")
        .arg(format!("{module}::nothing_of_the_caller_reaches_the_tests"))
        .arg("--nocapture")
        .env(LOOK, "1")
        .env_remove(CLEANED.to_str().expect("plain letters"))
        .env("SUBLET_MODE", "shared")
        .env("CUDA_VISIBLE_DEVICES", "none")
        .env("LD_AUDIT", "")
        .stdin(Stdio::null());
    // SAFETY: between fork and exec only system calls are made, and nothing is allocated.
    unsafe {
        again.pre_exec(|| {
            for signal in 1..libc::SIGRTMAX() {
                libc::signal(signal, libc::SIG_IGN);
            }
            let mut all: libc::sigset_t = std::mem::zeroed();
            libc::sigfillset(&mut all);
            libc::sigprocmask(libc::SIG_SETMASK, &all, std::ptr::null_mut());
            libc::umask(0o777);
            let few = libc::rlimit {
                rlim_cur: 16,
                rlim_max: 1024,
            };
            libc::setrlimit(libc::RLIMIT_NOFILE, &few);
            // A descriptor of the caller's, left open.
            libc::dup2(0, 11);
            Ok(())
        });
    }
    let output = again.output_within(crate::PATIENCE);
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && said.contains("looked at 1 child"),
        "{}: {said}{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
}

/// In the program that was started badly: a child of its, as tests start them, has inherited
/// nothing.
fn look() {
    let own = std::fs::read_to_string("/proc/self/status").expect("our own state");
    // The alarm's handler is ours; the others are the language's, and SIGPIPE is ignored by its
    // start.
    let ignored = field(&own, "SigIgn:") & !(1 << (libc::SIGPIPE - 1));
    assert_eq!(ignored, 0, "signals that the test program ignores");

    let script = "cat /proc/self/status; umask; ulimit -Sn; ls /proc/self/fd; env";
    let output = Command::new("/bin/sh")
        .args(["-c", script])
        .output_within(crate::PATIENCE);
    let said = String::from_utf8_lossy(&output.stdout);
    assert_eq!(field(&said, "SigIgn:") & !OF_THE_C_LIBRARY, 0, "{said}");
    assert_eq!(field(&said, "SigBlk:"), 0, "{said}");
    let lines: Vec<&str> = said.lines().collect();
    assert!(lines.contains(&"0022"), "umask: {said}");
    // The hard limit of the caller is not ours to raise.
    assert!(lines.contains(&"1024"), "descriptors: {said}");
    assert!(
        !lines.contains(&"11"),
        "a descriptor of the caller's: {said}"
    );
    for name in ["SUBLET_MODE=", "CUDA_VISIBLE_DEVICES=", "LD_AUDIT="] {
        let got_through = lines.iter().any(|line| line.starts_with(name));
        assert!(!got_through, "{name} in {said}");
    }
    // What a test sets is meant.
    let kept = Command::new("/bin/sh")
        .args(["-c", "echo $SUBLET_MODE"])
        .env("SUBLET_MODE", OsString::from_vec(b"chosen".to_vec()))
        .output_within(crate::PATIENCE);
    assert_eq!(kept.stdout, b"chosen\n");
    println!("looked at 1 child");
}

/// A mask of signals in a process's state.
fn field(status: &str, name: &str) -> u64 {
    let mask = status
        .lines()
        .find_map(|line| line.strip_prefix(name))
        .unwrap_or_else(|| panic!("no {name} in {status}"));
    u64::from_str_radix(mask.trim(), 16).expect("a mask")
}
