//! The preload library in programs that never asked for it, and in those that do strange things.

use std::process::Command;

use tests::fake::{Listening, TOKEN};
use tests::{Artefacts, Outcome, Running, Sandbox, programs, wait_until};

/// With the library, and with an arbiter that would notice any knock at its door.
fn with_library(sandbox: &Sandbox, listening: &Listening, program: &str) -> Command {
    let mut command = sandbox.preloaded(program);
    command
        .env("SUBLET_SOCKET", listening.path())
        .env("SUBLET_TOKEN", TOKEN);
    command
}

#[test]
fn programs_that_never_touch_cuda_are_left_alone() {
    let sandbox = Sandbox::new();
    let listening = Listening::at(&sandbox.path("channel.sock"));
    for words in [
        &["bash", "-c", "true"][..],
        &["sh", "-c", "echo out; echo err >&2; exit 7"],
        &["env"],
        &["sh", "-c", "ulimit -n; umask; echo $PPID > /dev/null"],
        &["sh", "-c", "kill -TERM $$"],
    ] {
        let bare = Outcome::of(sandbox.bare(words[0]).args(&words[1..]));
        let mut command = with_library(&sandbox, &listening, words[0]);
        let mut interposed = Outcome::of(command.args(&words[1..]));
        if words[0] == "env" {
            let ours = [
                "LD_PRELOAD=",
                "SUBLET_DRIVER=",
                "SUBLET_SOCKET=",
                "SUBLET_TOKEN=",
            ];
            interposed.stdout = interposed
                .stdout
                .lines()
                .filter(|line| !ours.iter().any(|name| line.starts_with(name)))
                .flat_map(|line| [line, "\n"])
                .collect();
        }
        let sorted = |outcome: &Outcome| {
            let mut lines: Vec<String> = outcome.stdout.lines().map(str::to_owned).collect();
            lines.sort();
            lines
        };
        assert_eq!(sorted(&interposed), sorted(&bare), "{words:?}");
        assert_eq!(interposed.stderr, bare.stderr, "{words:?}");
        assert_eq!(
            (interposed.code, interposed.signal),
            (bare.code, bare.signal),
            "{words:?}"
        );
        assert!(
            !listening.has_caller(),
            "{words:?} knocked at the arbiter's door"
        );
    }
}

#[test]
fn loading_it_maps_no_driver_and_starts_nothing() {
    let sandbox = Sandbox::new();
    let listening = Listening::at(&sandbox.path("channel.sock"));
    let mut command = with_library(&sandbox, &listening, "sh");
    let maps = Outcome::of(command.args(["-c", "cat /proc/self/maps /proc/self/status"]))
        .succeeded()
        .quiet();
    assert!(maps.contains("libsublet.so"), "it is loaded");
    assert!(
        !maps.contains("sim/libcuda"),
        "the driver is opened on first use"
    );
    assert!(!maps.contains("nvidia-ml"));
    assert!(maps.contains("Threads:\t1\n"), "no thread of ours");
}

#[test]
fn a_missing_driver_is_an_answer_and_not_an_end() {
    let sandbox = Sandbox::new();
    let mut command = sandbox.preloaded(programs::program("init_once"));
    command.env("SUBLET_DRIVER", "/nowhere/libcuda.so.1");
    // CUDA_ERROR_NO_DEVICE
    assert_eq!(Outcome::of(&mut command).succeeded().quiet(), "100\n");
}

#[test]
fn an_unreachable_arbiter_is_none_of_the_programs_business() {
    let sandbox = Sandbox::new();
    let mut command = sandbox.preloaded(programs::program("init_once"));
    command
        .env("SUBLET_SOCKET", sandbox.path("nobody.sock"))
        .env("SUBLET_TOKEN", TOKEN);
    assert_eq!(Outcome::of(&mut command).succeeded().quiet(), "0\n");
    // Unless the job must not run ungoverned: CUDA_ERROR_SYSTEM_NOT_READY.
    command.env("SUBLET_ON_ARBITER_LOSS", "closed");
    assert_eq!(Outcome::of(&mut command).succeeded().quiet(), "802\n");
}

#[test]
fn errno_signals_and_exit_handlers_are_the_programs_own() {
    let program = programs::program("host_process");
    for (way, code) in [
        ("errno", 0),
        ("signals", 0),
        ("atexit", 0),
        ("thread", 0),
        ("exit-in-thread", 5),
        ("small-stack", 0),
        ("underscore-exit", 6),
    ] {
        let sandbox = Sandbox::new();
        let bare = Outcome::of(sandbox.bare(&program).arg(way));
        assert_eq!(bare.code, Some(code), "{way}, bare: {bare:?}");
        let interposed = Outcome::of(sandbox.preloaded(&program).arg(way));
        assert_eq!(interposed, bare, "{way}, interposed");
        let attached = Outcome::of(sandbox.job(&[], &program).arg(way));
        assert_eq!(
            (attached.code, attached.stdout.as_str()),
            (bare.code, bare.stdout.as_str()),
            "{way}, attached: {attached:?}"
        );
        assert_eq!(attached.stderr.lines().count(), 1, "{way}: {attached:?}");
    }
}

#[test]
fn exit_codes_and_signals_are_the_commands() {
    let sandbox = Sandbox::new();
    for (script, code, signal) in [
        ("exit 0", Some(0), None),
        ("exit 42", Some(42), None),
        ("kill -KILL $$", None, Some(9)),
        ("kill -USR1 $$", None, Some(10)),
    ] {
        let mut command = sandbox.job(&[], "sh");
        let outcome = Outcome::of(command.args(["-c", script]));
        assert_eq!((outcome.code, outcome.signal), (code, signal), "{script}");
    }
}

#[test]
fn a_program_in_python_finds_the_driver_by_its_name() {
    let sandbox = Sandbox::new();
    let script = "import ctypes\n\
        cuda = ctypes.CDLL('libcuda.so.1')\n\
        total = ctypes.c_size_t()\n\
        print(cuda.cuInit(0), cuda.cuDeviceTotalMem_v2(ctypes.byref(total), 0), total.value)\n\
        print(bool(cuda.sublet_version()))\n";
    if !tests::programs::exists("python3") {
        return; // Python is not needed for anything else here
    }
    let mut command = sandbox.job(&["--mem", "3GiB"], "python3");
    let outcome = Outcome::of(command.args(["-c", script])).succeeded();
    assert_eq!(outcome.stdout, format!("0 0 {}\nTrue\n", 3u64 << 30));
}

#[test]
fn a_program_in_python_is_asked_to_change_its_size() {
    if !tests::programs::exists("python3") {
        return;
    }
    let module = Artefacts::get().root().join("python");
    let script = "import ctypes, time, sublet\n\
        print(sublet.resize_requested(), sublet.resize_ready(), flush=True)\n\
        ctypes.CDLL('libcuda.so.1').cuInit(0)\n\
        while sublet.resize_requested() is None:\n\
        \x20   time.sleep(0.01)\n\
        print(sublet.resize_requested(), sublet.resize_ready(), sublet.resize_requested())\n";
    let sandbox = Sandbox::new();
    let mut bare = sandbox.bare("python3");
    bare.env("PYTHONPATH", &module).args([
        "-c",
        "import sublet; print(sublet.active(), sublet.resize_requested(), sublet.resize_ready())",
    ]);
    let bare = Outcome::of(&mut bare).succeeded();
    assert_eq!(bare.stdout, "False None False\n");

    let _arbiter = sandbox.arbiter();
    let mut command = sandbox.job(&["--name", "elastic"], "python3");
    let job = Running::start(command.env("PYTHONPATH", &module).args(["-c", script]));
    wait_until("it looks for requests", || {
        sandbox
            .job_status("elastic")?
            .listens_for_resize
            .then_some(())
    });
    let set = |resize: &str| {
        Outcome::of(&mut sandbox.sublet(["set", "elastic", "--resize", resize])).succeeded();
    };
    set("3");
    wait_until("it is ready", || {
        sandbox
            .job_status("elastic")?
            .resize
            .filter(|asked| asked.ready && asked.gpus == 3)
    });
    set("stay");
    assert_eq!(job.wait().succeeded().stdout, "None False\n3 True None\n");
}

#[test]
fn a_model_in_python_says_which_memory_its_layers_need() {
    if !tests::programs::exists("python3") {
        return;
    }
    let module = Artefacts::get().root().join("python");
    let sandbox = Sandbox::new();
    let mut bare = sandbox.bare("python3");
    let bare = Outcome::of(bare.arg(module.join("test_pipeline.py"))).succeeded();
    assert_eq!(bare.stdout, "well\n");
    let script = "import ctypes\n\
        from sublet import pipeline\n\
        print(pipeline._add(0, 4096, 4096), pipeline._begin(0), pipeline._clear())\n\
        ctypes.CDLL('libcuda.so.1').cuInit(0)\n\
        print(pipeline._add(0, 4096, 4096), pipeline._begin(0), pipeline._add(0, 0, 1), pipeline._clear())\n";
    for (flags, answers) in [
        (&["--mem", "2GiB"][..], "0 0 0\n0 0 -1 0\n"),
        (&["--mem", "2GiB", "--evictable"], "0 0 0\n1 1 -1 1\n"),
    ] {
        let mut command = sandbox.job(flags, "python3");
        let command = command.env("PYTHONPATH", &module).args(["-c", script]);
        assert_eq!(Outcome::of(command).succeeded().stdout, answers);
    }
}

#[test]
fn the_library_is_found_by_every_name_of_the_driver() {
    let sandbox = Sandbox::new();
    let driver = Artefacts::get().simulated_driver();
    let script = format!(
        "import ctypes\n\
         for name in ['libcuda.so.1', '{}']:\n\
         \x20   cuda = ctypes.CDLL(name)\n\
         \x20   total = ctypes.c_size_t()\n\
         \x20   print(cuda.cuInit(0), cuda.cuDeviceTotalMem_v2(ctypes.byref(total), 0), total.value)\n",
        driver.display()
    );
    if !tests::programs::exists("python3") {
        return;
    }
    let mut command = sandbox.job(&["--mem", "2GiB"], "python3");
    let outcome = Outcome::of(command.args(["-c", &script])).succeeded();
    let line = format!("0 0 {}\n", 2u64 << 30);
    assert_eq!(outcome.stdout, line.repeat(2), "the absolute path too");
}
