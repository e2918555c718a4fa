//! Containers that nobody has registered: of Podman and runc, by the file that `sublet cdi
//! generate` writes, on one simulated GPU; and such as `unshare` makes, which has no engine.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Stdio};

use tests::{Artefacts, Outcome, Running, Sandbox, wait_until};

use engine::Engine;

mod engine;

/// Kernels of 2 ms for longer than a test takes.
const LOAD: [&str; 5] = ["/prog/load", "--kernel-us", "2000", "--for-ms", "600000"];

macro_rules! engine {
    ($sandbox:expr) => {
        match Engine::new($sandbox) {
            Ok(engine) => engine,
            Err(why) => return eprintln!("skipped: no containers by podman: {why}"),
        }
    };
}

mod exec;

#[test]
fn two_containers_share_a_gpu_inside_their_quotas() {
    let engine = engine!(Sandbox::exclusive());
    let mut arbiter = engine.sandbox.arbiter();
    let half = "half:mem=4GiB,share=0.5";
    let said = engine.generate(&["--device", half, "--device", "quarter:mem=2GiB,share=0.25"]);
    let said = said.succeeded().stdout;
    assert!(said.contains("sublet.dev/gpu={half,quarter}"), "{said}");

    let wrong = engine.run(&["--rm"], &["third"], &["true"]);
    assert_ne!(wrong.code, Some(0));
    assert!(wrong.stderr.contains("sublet.dev/gpu=third"), "{wrong:?}");

    // What the device says replaces what the command does.
    let more = ["--env=SUBLET_MEM=7GiB"];
    engine.start("hopper", &more, &["half"], &LOAD);
    engine.start("turing", &[], &["quarter"], &LOAD);
    let both = || Some((engine.job("hopper")?, engine.job("turing")?));
    let (hopper, turing) = wait_until("both have contended for a while", || {
        both().filter(|(hopper, _)| hopper.contended_ns > 3_000_000_000)
    });
    let limits = [&hopper, &turing].map(|job| job.mem_limit_bytes.map(|bytes| bytes >> 30));
    assert_eq!(limits, [Some(4), Some(2)]);
    // Twice as much as the other one.
    let got = hopper.share_got_contended.expect("it was contended");
    assert!((got - 2.0 / 3.0).abs() < 0.1, "{got}");
    let container = hopper.container.clone().expect("a container");
    assert_eq!(
        (container.name.as_str(), container.runtime.as_str()),
        ("hopper", "podman")
    );
    assert!(container.is_job && container.id.len() == 64);
    let table = Outcome::of(&mut engine.sandbox.sublet(["ps"]))
        .succeeded()
        .stdout;
    let header = table.lines().find(|line| line.starts_with("NAME"));
    assert!(
        header.is_some_and(|line| line.ends_with("CONTAINER")),
        "{table}"
    );

    // A second process is of the same job, whatever it asks for.
    let exec =
        |flags: &[&str], command: &[&str]| Outcome::of(&mut engine.exec("turing", flags, command));
    let more = exec(
        &["--env=SUBLET_MEM=7GiB"],
        &["/prog/tenant", "--bytes", "3GiB"],
    );
    assert_eq!(more.code, Some(2), "{more:?}");
    let turing = engine.job("turing").expect("it lives");
    assert_eq!(turing.mem_limit_bytes, Some(2 << 30));
    assert!(turing.oom_count > 0);
    assert_eq!(engine.sandbox.jobs().len(), 2);

    // Its memory is free when it is gone, however it goes.
    let hold = "sleep 600 | /prog/tenant --bytes 1GiB";
    exec(&["--detach"], &["sh", "-c", hold]).succeeded();
    wait_until("it has memory", || {
        (engine.job("turing")?.mem_used_bytes >= 1 << 30).then_some(())
    });
    engine
        .podman(&["kill", "--signal", "KILL", "turing"])
        .succeeded();
    wait_until("the container's job is gone", || {
        engine.job("turing").is_none().then_some(())
    });
    let used: u64 = engine.sandbox.jobs().iter().map(|j| j.mem_used_bytes).sum();
    assert!(used < 1 << 30, "{used}");

    // An arbiter that is killed is followed by one that knows the container.
    arbiter.kill();
    drop(arbiter.wait());
    let _arbiter = engine.sandbox.arbiter();
    let back = wait_until("it is back", || {
        engine.job("hopper").filter(|job| !job.processes.is_empty())
    });
    assert_eq!(back.id, hopper.id);
    assert_eq!(back.mem_limit_bytes, Some(4 << 30));
    let launches = back.launches;
    wait_until("it goes on", || {
        (engine.job("hopper")?.launches > launches).then_some(())
    });
    // And by which new containers are served.
    engine.start("lovelace", &[], &["quarter"], &LOAD);
    wait_until("a third one is there", || engine.job("lovelace"));
}

#[test]
fn rules_of_the_host_cap_what_a_container_asks_for_and_its_root_is_not_the_hosts() {
    let sandbox = Sandbox::new();
    let rules = "[[rule]]\nmatch = { container = \"*\" }\ncap = { mem = \"1GiB\" }\n";
    fs::create_dir_all(sandbox.path("home/.config/sublet")).expect("a folder");
    fs::create_dir_all(sandbox.path("etc")).expect("a folder");
    fs::write(sandbox.path("etc/config.toml"), rules).expect("a file");
    let mut sandbox = sandbox;
    sandbox.set("SUBLET_CONFIG_DIR", sandbox.path("etc"));
    let engine = engine!(sandbox);
    let _arbiter = engine.sandbox.arbiter();
    engine.generate(&["--device", "half:share=0.5"]).succeeded();
    // The whole directory, which nobody should mount.
    let run = engine.sandbox.path("run");
    let run = format!("--volume={0}:{0}", run.display());
    let place = format!(
        "--env=SUBLET_RUNTIME_DIR={}",
        engine.sandbox.path("run").display()
    );
    let flags = ["--env=SUBLET_MEM=7GiB", &run, &place];
    engine.start("greedy", &flags, &["half"], &LOAD);
    let greedy = wait_until("it is there", || {
        engine.job("greedy").filter(|job| job.launches > 0)
    });
    assert_eq!(greedy.mem_limit_bytes, Some(1 << 30), "{:?}", greedy.capped);
    assert!(greedy.capped.iter().any(|one| one.key == "mem"));
    let inside = |words: &[&str]| {
        let words = [&["exec", "greedy", "/prog/sublet"], words].concat();
        engine.podman(&words)
    };
    let raised = inside(&["set", "greedy", "--mem", "6GiB"]);
    let limit = engine.job("greedy").expect("it lives").mem_limit_bytes;
    assert_eq!(limit, Some(1 << 30), "{raised:?}");
    let mut host = engine.sandbox.job(
        &["--name", "host", "--mem", "1GiB"],
        Artefacts::get().program("load"),
    );
    let _host = Running::start(host.args(&LOAD[1..]));
    wait_until("a job of the host is there", || engine.job("host"));
    for words in [
        &["pause", "host"][..],
        &["set", "host", "--mem", "2GiB"],
        &["device", "set", "0", "--mode", "concurrent"],
        &["reload"],
        &["arbiter", "--stop"],
    ] {
        let done = inside(words);
        assert_ne!(done.code, Some(0), "{words:?}");
        assert!(done.stderr.contains("container"), "{words:?}: {done:?}");
    }
    assert!(!engine.job("host").expect("it lives").paused);
}

#[test]
fn hamis_variables_drive_the_library_in_its_place() {
    let engine = engine!(Sandbox::new());
    let _arbiter = engine.sandbox.arbiter();
    // What its device plugin mounts: the library, and a file that has every program load it.
    let at = |name: &str| engine.sandbox.path(name);
    fs::write(at("ld.so.preload"), "/usr/local/vgpu/libvgpu.so\n").expect("a file");
    fs::create_dir_all(at("vgpu")).expect("a folder");
    fs::copy(Artefacts::get().preload(), at("vgpu/libvgpu.so")).expect("a file");
    let volume = |from: &Path, to: &str| format!("--volume={}:{to}", from.display());
    let sim = Artefacts::get().simulated_driver();
    let flags = [
        // `/usr` is this machine's, and read-only: its own mount point is not there.
        volume(&at("vgpu"), "/usr/local/lib"),
        volume(&at("ld.so.preload"), "/etc/ld.so.preload:ro"),
        volume(&at("run/containers"), "/run/sublet/containers:ro"),
        volume(sim.parent().expect("a folder"), "/sim:ro"),
        volume(&at("sim"), "/state"),
        "--env=SUBLET_SIM=1".into(),
        "--env=SUBLET_SIM_STATE=/state".into(),
        "--env=LD_LIBRARY_PATH=/sim".into(),
        "--env=SUBLET_DRIVER=/sim/libcuda.so.1".into(),
        "--env=CUDA_DEVICE_MEMORY_LIMIT_0=1024m".into(),
        "--env=CUDA_DEVICE_SM_LIMIT=30".into(),
        "--env=CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=90".into(),
    ];
    fs::write(at("ld.so.preload"), "/usr/local/lib/libvgpu.so\n").expect("a file");
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    engine.start("pod", &flags, &[], &LOAD);
    let pod = wait_until("it is there", || {
        engine.job("pod").filter(|job| job.launches > 0)
    });
    assert_eq!(pod.mem_limit_bytes, Some(1 << 30));
    assert_eq!(pod.share_max, Some(0.3));
    let over = engine.podman(&["exec", "pod", "/prog/tenant", "--bytes", "2GiB"]);
    assert_eq!(over.code, Some(2), "{over:?}");
    // A limit that nobody can read is none that can be kept.
    let flags = [
        &flags[..],
        &["--rm", "--env=CUDA_DEVICE_MEMORY_LIMIT_0=much"],
    ]
    .concat();
    let refused = engine.run(&flags, &[], &["/prog/tenant", "--bytes", "2MiB"]);
    assert_ne!(refused.code, Some(0));
    assert!(
        refused.stderr.contains("CUDA_DEVICE_MEMORY_LIMIT_0") && refused.stderr.contains("`much`"),
        "{refused:?}"
    );
}

/// A program with the library and no `sublet run`.
fn by_itself(sandbox: &Sandbox, program: &str) -> Command {
    let mut command = sandbox.preloaded(Artefacts::get().program(program));
    command
        .env("SUBLET_CONTAINER", "half")
        .env("SUBLET_SIM", "1")
        .env("SUBLET_SOCKET", sandbox.path("run/containers/channel.sock"))
        .env("SUBLET_MEM", "1GiB");
    command
}

/// The same in PID and mount namespaces of its own, with a `/proc` of its own.
fn unshared(command: &Command) -> Command {
    let mut all = Command::new("unshare");
    all.args(["--user", "--map-root-user", "--mount", "--pid", "--fork"]);
    all.args(["--kill-child", "--mount-proc", "env"]);
    all.env_clear().stdin(Stdio::null());
    if let Some(path) = std::env::var_os("PATH") {
        all.env("PATH", path);
    }
    let vars = command.get_envs().filter_map(|(name, value)| {
        let mut word = name.to_owned();
        word.push("=");
        word.push(value?);
        Some(word)
    });
    all.args(vars);
    all.arg(command.get_program()).args(command.get_args());
    all
}

#[test]
fn a_pid_namespace_with_its_own_proc_is_a_container_too() {
    let sandbox = Sandbox::new();
    let _arbiter = sandbox.arbiter();
    let mut tried = unshared(&Command::new("true"));
    if !tests::programs::exists("unshare") || Outcome::of(&mut tried).code != Some(0) {
        return eprintln!("skipped: no PID namespaces of its own here");
    }
    let load = |sandbox: &Sandbox| {
        let mut command = by_itself(sandbox, "load");
        command.args(&LOAD[1..]);
        command
    };
    let mut first = Running::start(&mut unshared(&load(&sandbox)));
    let second = Running::start(&mut unshared(&load(&sandbox)));
    let jobs = wait_until("both are there", || {
        let jobs = sandbox.jobs();
        (jobs.iter().filter(|job| job.launches > 0).count() == 2).then_some(jobs)
    });
    for job in &jobs {
        assert_eq!(job.mem_limit_bytes, Some(1 << 30));
        let container = job.container.as_ref().expect("a container");
        assert!(container.id.starts_with("pidns-"), "{container:?}");
        assert!(job.name.starts_with("container-"), "{}", job.name);
    }
    // NVML names processes as the arbiter knows them.
    let status = sandbox.control().and_then(|mut control| {
        let status = control.status();
        status.map_err(|error| error.to_string())
    });
    let unmanaged: Vec<_> = status
        .expect("it answers")
        .devices
        .into_iter()
        .flat_map(|device| device.unmanaged)
        .collect();
    assert!(unmanaged.is_empty(), "{unmanaged:?}");
    first.kill();
    drop(first.wait());
    wait_until("one is gone", || {
        let living = sandbox
            .jobs()
            .into_iter()
            .filter(|job| job.state != control::JobState::Gone);
        (living.count() == 1).then_some(())
    });
    drop(second);
}

#[test]
fn a_process_in_no_container_is_refused_and_so_is_one_without_an_arbiter() {
    let sandbox = Sandbox::new();
    let arbiter = sandbox.arbiter();
    let mut command = by_itself(&sandbox, "tenant");
    let outcome = Outcome::of(command.args(["--bytes", "2MiB"]));
    assert_ne!(outcome.code, Some(0), "{outcome:?}");
    let refused = sandbox
        .events()
        .into_iter()
        .find(|one| one.kind == "refused");
    let refused = refused.expect("the journal has it");
    assert!(
        refused.message.contains("in no container"),
        "{}",
        refused.message
    );
    assert!(sandbox.jobs().is_empty());
    drop(arbiter);
    // Without a limit nobody waits, and nobody is stopped.
    let mut command = by_itself(&sandbox, "tenant");
    command.env_remove("SUBLET_MEM");
    Outcome::of(command.args(["--bytes", "2MiB"])).succeeded();
}

#[test]
fn an_attachment_that_fails_does_not_lift_a_limit() {
    let sandbox = Sandbox::new();
    let mut command = by_itself(&sandbox, "tenant");
    command.env("SUBLET_FAULT_HOOKS", "i");
    let refused = Outcome::of(command.args(["--bytes", "2MiB"]));
    assert_ne!(refused.code, Some(0), "{refused:?}");
    // Without one nothing is lost.
    Outcome::of(command.env_remove("SUBLET_MEM")).succeeded();
}

#[test]
fn all_users_may_read_the_file_of_devices_whatever_the_umask() {
    let sandbox = Sandbox::new();
    let output = sandbox.path("etc/cdi/sublet.json");
    let mut command = sandbox.command("sh");
    command.args(["-c", "umask 077 && exec \"$0\" \"$@\""]);
    command.arg(Artefacts::get().program("sublet"));
    command.args(["cdi", "generate", "--sim", "--output"]);
    Outcome::of(command.arg(&output)).succeeded();
    for (name, mode) in [
        ("etc/cdi", 0o755),
        ("etc/cdi/sublet.json", 0o644),
        ("etc/cdi/sublet.json.ld.so.preload", 0o644),
    ] {
        let about = fs::metadata(sandbox.path(name)).expect(name);
        assert_eq!(about.permissions().mode() & 0o777, mode, "{name}");
    }
}

#[test]
fn a_wrong_device_is_one_clear_error_and_writes_nothing() {
    let sandbox = Sandbox::new();
    let output = sandbox.path("cdi.json");
    let output = output.to_str().expect("UTF-8");
    for (words, said) in [
        (&["--device", "half:mem=20"][..], "20GiB"),
        (&["--device", "half:memory=1GiB"], "`memory`"),
        (&["--device", "a b"], "`a b`"),
        (&["--device", "a", "--device", "a"], "two devices"),
        (
            &["--output", "sublet.toml"],
            "neither in .json nor in .yaml",
        ),
    ] {
        let mut command = sandbox.sublet(["cdi", "generate", "--sim"]);
        command.args(words);
        if words[0] != "--output" {
            command.args(["--output", output]);
        }
        let outcome = Outcome::of(&mut command);
        assert_eq!(outcome.code, Some(125), "{words:?}");
        assert!(outcome.stderr.contains(said), "{words:?}: {outcome:?}");
        assert_eq!(outcome.stderr.trim().lines().count(), 1, "{outcome:?}");
        assert!(!Path::new(output).exists());
    }
    let printed = Outcome::of(&mut sandbox.sublet(["cdi", "generate", "--sim"])).succeeded();
    let spec: serde_json::Value = serde_json::from_str(&printed.stdout).expect("JSON");
    assert_eq!(spec["devices"].as_array().map(Vec::len), Some(4));
}

#[test]
fn the_doctor_says_which_of_several_limits_counts() {
    let mut sandbox = Sandbox::new();
    sandbox.set("CUDA_DEVICE_MEMORY_LIMIT_0", "2g");
    sandbox.set("CUDA_DEVICE_SM_LIMIT", "30");
    sandbox.set("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "50");
    sandbox.set("SUBLET_MEM", "1GiB");
    let said = Outcome::of(&mut sandbox.sublet(["doctor", "--sim"]))
        .succeeded()
        .stdout;
    for line in [
        "asked       mem by SUBLET_MEM=1GiB\n",
        "asked       mem by CUDA_DEVICE_MEMORY_LIMIT_0=2g (does not count)\n",
        "asked       share_max by CUDA_DEVICE_SM_LIMIT=30\n",
        "note: CUDA_DEVICE_MEMORY_LIMIT_0=2g does not count: SUBLET_MEM beats it\n",
        "note: CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50 does not count: CUDA_DEVICE_SM_LIMIT beats it\n",
    ] {
        assert!(said.contains(line), "{line}{said}");
    }
    // And `sublet run` goes by them.
    let _arbiter = sandbox.arbiter();
    let mut job = sandbox.job(&["--name", "job"], Artefacts::get().program("load"));
    let _job = Running::start(job.args(&LOAD[1..]));
    let job = wait_until("it is there", || sandbox.job_status("job"));
    assert_eq!(job.mem_limit_bytes, Some(1 << 30));
    assert_eq!(job.share_max, Some(0.3));
}
