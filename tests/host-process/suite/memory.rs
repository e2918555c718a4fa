//! One story about memory: what NVML says inside a job, in whatever way it is reached, and that it
//! says the same as ever where there is no limit.

use std::path::PathBuf;

use host_process::{Artefacts, Host, Outcome, Way};
use testbed::{CommandWithin, within};

const QUOTA: &str = "100MiB";
const QUOTA_BYTES: u64 = 100 << 20;

fn nvml() -> PathBuf {
    Artefacts::get().dir.join("sim/libnvidia-ml.so.1")
}

/// Every way to NVML: a name, and `nvml_reader.c` run so.
fn ways() -> Vec<(&'static str, Host)> {
    let artefacts = Artefacts::get();
    let reader = artefacts
        .compile("nvml_reader", "nvml_reader.c", None, &[])
        .unwrap();
    let library = artefacts.dir.join("sim");
    let (search, name) = (
        format!("-L{}", library.display()),
        "-l:libnvidia-ml.so.1".to_owned(),
    );
    let flags = ["-DLINKED", &search, &name];
    let linked = |output: &str, more: &str| {
        let flags = [&flags[..], &[more]].concat();
        artefacts
            .compile(output, "nvml_reader.c", None, &flags)
            .unwrap()
    };
    let path = nvml();
    let path = path.to_str().unwrap();
    let mut ways: Vec<(&str, Host)> = ["soname", "absolute", "default", "again"]
        .into_iter()
        .map(|way| (way, Host::new(&reader, &[way, path])))
        .collect();
    for (way, flag) in [("linked", "-Wl,-z,lazy"), ("linked-now", "-Wl,-z,now")] {
        let program = linked(&format!("nvml_reader_{way}"), flag);
        ways.push((way, Host::new::<&str>(program, &[])));
    }
    ways
}

/// The lines that begin with `word`, as numbers.
fn numbers(outcome: &Outcome, word: &str) -> Vec<u64> {
    let lines = outcome
        .stdout
        .lines()
        .filter_map(|line| line.split_once(' '));
    lines
        .filter(|(first, _)| *first == word)
        .flat_map(|(_, rest)| rest.split(' ').map(|number| number.parse().unwrap()))
        .collect()
}

#[test]
fn nvml_is_forwarded_where_there_is_no_limit() {
    for (way, host) in ways() {
        let bare = host.run(Way::Bare);
        assert_eq!(bare.code, Some(0), "{way}: {bare:?}");
        assert_eq!(numbers(&bare, "memory")[0], 4 << 30, "{way}: {bare:?}");
        assert_eq!(host.run(Way::Preloaded), bare, "{way}");
        let free = host.run_job(&["--share", "0.5"]);
        assert_eq!(free, bare, "{way}: a job without a memory limit");
    }
}

#[test]
fn nvml_tells_the_quota_in_every_way_it_is_reached() {
    for (way, host) in ways() {
        let bare = host.run(Way::Bare);
        let job = host.run_job(&["--mem", QUOTA]);
        assert_eq!((job.code, job.stderr.as_str()), (Some(0), ""), "{way}");
        let q = QUOTA_BYTES;
        assert_eq!(numbers(&job, "memory"), [q, q, 0], "{way}: {job:?}");
        assert_eq!(numbers(&job, "memory2"), [q, 0, q, 0], "{way}: {job:?}");
        // Everything else is as ever: handles, errors, rates.
        let rest = |outcome: &Outcome| {
            let lines = outcome.stdout.lines();
            let lines = lines.filter(|line| !line.starts_with("memory"));
            lines.map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(rest(&job), rest(&bare), "{way}");
    }
}

#[test]
fn all_readers_agree_while_the_processes_of_a_job_allocate() {
    let program = Artefacts::get()
        .compile("one_story", "one_story.c", None, &[])
        .unwrap();
    let host = Host::new(program, &[QUOTA_BYTES.to_string()]);
    let outcome = host.run_job(&["--mem", QUOTA]);
    let said = (outcome.code, outcome.stdout.as_str());
    assert_eq!(said, (Some(0), "one story\n"), "{outcome:?}");
    // It asks until the limit refuses it; the end of the job says how often.
    let [line] = outcome.stderr.lines().collect::<Vec<_>>()[..] else {
        panic!("not one line: {outcome:?}");
    };
    assert!(line.contains("was refused memory"), "{outcome:?}");
}

#[test]
fn python_reads_nvml_beside_the_driver() {
    let script = Artefacts::get().source("python_nvml.py");
    let host = |quota: u64| Host::new("python3", &[script.to_str().unwrap(), &quota.to_string()]);
    let agreed = |outcome: Outcome| assert_eq!(outcome.stdout, "agreed\n", "{outcome:?}");
    if host_process::python().is_none() {
        return eprintln!("skipped: there is no python3 here");
    }
    agreed(host(0).run(Way::Bare));
    agreed(host(0).run(Way::Preloaded));
    agreed(host(0).run_job(&[]));
    agreed(host(QUOTA_BYTES).run_job(&["--mem", QUOTA]));
    // All that the device has.
    agreed(host(4 << 30).run_job(&["--mem", "100%"]));
}

#[test]
fn a_job_sees_its_own_processes_and_never_more_than_is_free() {
    // Another job holds most of the device.
    let script = "import ctypes, sys\ncuda = ctypes.CDLL('libcuda.so.1')\nc = ctypes.c_void_p()\nat = ctypes.c_ulonglong()\nbad = cuda.cuInit(0) or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(c), 0) or cuda.cuCtxSetCurrent(c) or cuda.cuMemAlloc_v2(ctypes.byref(at), ctypes.c_size_t(3 << 30))\nprint('here' if not bad else bad, flush=True)\nsys.stdin.read()";
    let host = Host::new("python3", &["-c", script]);
    let mut holder = host.job(&["--name", "holder"]);
    holder
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped());
    let mut holder = holder.spawn().unwrap();
    let mut line = String::new();
    let stdout = holder.stdout.as_mut().unwrap();
    testbed::read_line(&mut std::io::BufReader::new(stdout), &mut line);
    assert_eq!(line, "here\n");

    let reader = Artefacts::get()
        .compile("nvml_reader", "nvml_reader.c", None, &[])
        .unwrap();
    let read = |flags: &[&str]| {
        let mut command = host.sublet();
        command
            .args(["run", "--sim"])
            .args(flags)
            .arg("--")
            .arg(&reader);
        let output = command.output_within(testbed::PATIENCE);
        Outcome {
            code: output.status.code(),
            signal: None,
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    };
    let (true_story, own_story) = (read(&[]), read(&["--mem", "2GiB"]));
    drop(holder.stdin.take());
    let ended = within::wait(&mut holder, "the holder", testbed::PATIENCE);

    let physical = numbers(&true_story, "memory");
    let free = physical[1];
    assert!(physical[0] == 4 << 30 && free < 1 << 30, "{true_story:?}");
    assert_eq!(numbers(&true_story, "process3").len(), 3, "{true_story:?}");
    // Of the 2 GiB that it was promised, the device has less than one at present; the rest is kept
    // from it.
    let (quota, kept) = (2 << 30, (2 << 30) - free);
    let reported = numbers(&own_story, "memory2");
    assert_eq!(reported, [quota, kept, free, 0], "{own_story:?}");
    assert_eq!(numbers(&own_story, "memory"), [quota, free, kept]);
    assert_eq!(numbers(&own_story, "process3").len(), 0, "{own_story:?}");
    assert!(own_story.stdout.contains("asked 0 for 0"), "{own_story:?}");
    assert!(ended.success());
}

#[test]
fn nvml_absent() {
    let host = Host::c("nvml_absent.c");
    let outcome = host.is_the_same_everywhere();
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
    for line in [
        "none, RTLD_DEFAULT: no no no no",
        "global, RTLD_DEFAULT: yes yes yes yes",
    ] {
        assert!(outcome.stdout.contains(line), "{outcome:?}");
    }
}

#[test]
fn a_deepbound_library_sees_the_quota_once_the_driver_is_in_use() {
    let artefacts = Artefacts::get();
    let source = "deepbound_nvml.c";
    let flags = ["-DLIBRARY", "-shared", "-fPIC"];
    let library = artefacts
        .compile("deepbound_nvml.so", source, None, &flags)
        .unwrap();
    let program = artefacts
        .compile("deepbound_nvml", source, None, &[])
        .unwrap();
    let library = library.to_str().unwrap();
    let used = Host::new(&program, &[library, "1"]);
    let bare = used.run(Way::Bare);
    assert_eq!(bare.code, Some(0), "{bare:?}");
    assert_eq!(used.run(Way::Preloaded), bare);
    let job = used.run_job(&["--mem", QUOTA]);
    assert_eq!(
        job.stdout,
        format!("total {QUOTA_BYTES} used 0\n"),
        "{job:?}"
    );
    // Before anything else has asked, nothing of ours is in the way: documented, and no more than
    // the truth is reported.
    let first = Host::new(&program, &[library, "0"]);
    assert_eq!(first.run_job(&["--mem", QUOTA]), first.run(Way::Bare));
}

#[test]
fn contexts_that_go_while_others_work() {
    let outcome = Host::c("contexts_come_and_go.c").is_the_same_everywhere();
    assert_eq!(outcome.stdout, "init 0\nbad 0\n");
}
