//! The Python module: steps that are found, limits for a while, commands as jobs, workers of Ray,
//! and kernels of Jupyter.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::Command;

use control::{IterationSource, JobState};
use tests::{Artefacts, Outcome, ProgramRun, Sandbox, programs, wait_until};

fn module() -> PathBuf {
    Artefacts::get().root().join("python")
}

fn has_python() -> bool {
    programs::exists("python3")
}

/// A program in Python as a job with these flags.
fn job(sandbox: &Sandbox, flags: &[&str], script: &str) -> Command {
    let mut command = sandbox.job(flags, "python3");
    command
        .env("PYTHONPATH", module())
        .env("SUBLET_COMMAND", Artefacts::get().program("sublet"))
        .args(["-c", script]);
    command
}

#[test]
fn the_steps_of_an_optimizer_are_iterations() {
    if !has_python() {
        return;
    }
    let sandbox = Sandbox::new();
    let mut bare = sandbox.bare("python3");
    let bare = bare.env("PYTHONPATH", module());
    let bare = Outcome::of(bare.arg(module().join("test_steps.py"))).succeeded();
    assert_eq!(bare.stdout, "well\n");

    // A package with PyTorch's hooks; and a `sitecustomize` that somebody else has put there.
    let optim = sandbox.path("site/torch/optim");
    fs::create_dir_all(&optim).unwrap();
    fs::write(sandbox.path("site/torch/__init__.py"), "").unwrap();
    fs::write(optim.join("__init__.py"), "").unwrap();
    fs::write(
        optim.join("optimizer.py"),
        "HOOKS = []\n\
         register_optimizer_step_post_hook = HOOKS.append\n\
         class Optimizer:\n\
         \x20   def step(self):\n\
         \x20       [hook(self, (), {}) for hook in HOOKS]\n",
    )
    .unwrap();
    fs::write(sandbox.path("site/sitecustomize.py"), "print('theirs')\n").unwrap();
    let script = "import ctypes, sys, time\n\
        cuda = ctypes.CDLL('libcuda.so.1')\n\
        context = ctypes.c_void_p()\n\
        assert [cuda.cuInit(0), cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0), cuda.cuCtxSetCurrent(context)] == [0, 0, 0]\n\
        from torch.optim.optimizer import HOOKS, Optimizer\n\
        one = Optimizer()\n\
        for _ in range(40):\n\
        \x20   one.step()\n\
        \x20   time.sleep(0.002)\n\
        print(len(HOOKS), flush=True)\n\
        sys.stdin.read()\n";
    let _arbiter = sandbox.arbiter();
    for (flags, hooks) in [(&["--step-hook", "torch"][..], "1"), (&[], "0")] {
        let mut words = vec!["--name", "trains"];
        words.extend(flags);
        let mut command = sandbox.job(&words, "python3");
        command
            .env("PYTHONPATH", sandbox.path("site"))
            .args(["-c", script]);
        let mut job = ProgramRun::start(&mut command);
        assert_eq!(job.answer(), "theirs");
        assert_eq!(job.answer(), hooks);
        if hooks == "1" {
            wait_until("its iterations are known by hints", || {
                let profile = sandbox.job_status("trains")?.profile?;
                (profile.found == IterationSource::Hinted && profile.iterations >= 39).then_some(())
            });
        }
        let outcome = job.finish().succeeded();
        assert!(!outcome.stderr.contains("step-hook"), "{outcome:#?}");
    }
}

#[test]
fn a_block_has_other_limits_and_gives_them_back() {
    if !has_python() {
        return;
    }
    let sandbox = Sandbox::new();
    let _arbiter = sandbox.arbiter();
    let script = "import sublet\n\
        seen = lambda: (sublet.job()['mem_limit_bytes'], sublet.job()['share_asked'])\n\
        print(seen())\n\
        try:\n\
        \x20   with sublet.quota(mem='512MiB', share=0.25):\n\
        \x20       print(seen())\n\
        \x20       raise KeyError\n\
        except KeyError:\n\
        \x20   print(seen())\n\
        for wrong in ({}, {'mem': 'much'}, {'share': 7}):\n\
        \x20   try:\n\
        \x20       with sublet.quota(**wrong): print('inside')\n\
        \x20   except (TypeError, sublet.SubletError) as error:\n\
        \x20       print(type(error).__name__, error)\n\
        print(seen())\n";
    let flags = ["--name", "book", "--mem", "1GiB", "--share", "0.5"];
    let outcome = Outcome::of(&mut job(&sandbox, &flags, script)).succeeded();
    let lines: Vec<&str> = outcome.stdout.lines().collect();
    assert_eq!(lines[0], "(1073741824, 0.5)", "{outcome:#?}");
    assert_eq!(lines[1], "(536870912, 0.25)", "{outcome:#?}");
    assert_eq!(lines[2], lines[0], "{outcome:#?}");
    assert!(
        lines[3].starts_with("TypeError quota() takes"),
        "{outcome:#?}"
    );
    assert!(
        lines[4].starts_with("SubletError ") && lines[4].contains("much"),
        "{outcome:#?}"
    );
    assert!(
        lines[5].starts_with("SubletError ") && lines[5].contains('7'),
        "{outcome:#?}"
    );
    assert_eq!(lines[6..], lines[..1], "{outcome:#?}");

    let mut bare = sandbox.bare("python3");
    let script = "import sublet\nprint(sublet.job())\nwith sublet.quota(mem='1GiB'): pass\n";
    let bare = Outcome::of(bare.env("PYTHONPATH", module()).args(["-c", script]));
    assert_eq!(bare.stdout, "None\n", "{bare:#?}");
    assert!(
        bare.stderr.contains("this process is part of no job"),
        "{bare:#?}"
    );
}

#[test]
fn a_program_starts_jobs_and_hears_why_one_was_not_started() {
    if !has_python() {
        return;
    }
    let sandbox = Sandbox::new();
    let _arbiter = sandbox.arbiter();
    let script = "import sublet\n\
        done = sublet.run(['sh', '-c', 'echo $SUBLET_JOB; exit 7'], sim=True, mem='1GiB', name='inner', popen={'capture_output': True, 'text': True})\n\
        print(done.returncode, done.stdout.strip())\n\
        for args, settings in ((['true'], {'mem': 'much'}), ('true', {}), (['true'], {'no_such_flag': True})):\n\
        \x20   try:\n\
        \x20       sublet.run(args, sim=True, popen={'capture_output': True}, **settings)\n\
        \x20   except (TypeError, sublet.SubletError) as error:\n\
        \x20       print(type(error).__name__, error)\n";
    let mut command = sandbox.bare("python3");
    command
        .env("PYTHONPATH", module())
        .env("SUBLET_COMMAND", Artefacts::get().program("sublet"))
        .args(["-c", script]);
    let outcome = Outcome::of(&mut command).succeeded();
    let lines: Vec<&str> = outcome.stdout.lines().collect();
    assert_eq!(lines[0], "7 inner", "{outcome:#?}");
    assert!(
        lines[1].starts_with("SubletError ") && lines[1].contains("much"),
        "{outcome:#?}"
    );
    assert!(
        lines[2].starts_with("TypeError args is a list"),
        "{outcome:#?}"
    );
    assert!(lines[3].contains("no-such-flag"), "{outcome:#?}");
    assert_eq!(lines.len(), 4, "{outcome:#?}");
}

/// What the plugin does on a node, without Ray: it asks the arbiter, and makes the command of a
/// worker, which a shell then runs as Ray does.
const OF_RAY: &str = r#"
import asyncio, os, subprocess, sys
import sublet, sublet.ray
class Context:
    env_vars = {}
    py_executable = "sh -c 'echo job=$SUBLET_JOB refused=$SUBLET_RAY_REFUSED; read line'"
def worker(**settings):
    context = Context()
    sublet.ray._wrap(sublet.ray.check({**settings, "sim": True}), context)
    environment = {**os.environ, **context.env_vars}
    child = subprocess.Popen(["bash", "-c", "exec " + context.py_executable], env=environment, stdin=-1, stdout=-1, stderr=-3, text=True)
    print(child.stdout.readline().strip().replace(str(child.pid), "PID"), flush=True)
    return child
def agent(**settings):
    try:
        asyncio.run(sublet.ray._Node().may_start(sublet.ray.check({**settings, "sim": True, "wait": 0}), {}))
        print("well", flush=True)
    except sublet.SubletError as error:
        print(error, flush=True)
agent(mem="1GiB", share=0.75)
first = worker(mem="1GiB", share=0.75, name="first")
sys.stdin.readline()
agent(share=0.5)
second = worker(share=0.5, wait=0)
first.kill()
third = worker(share=0.5, wait=30)
sys.stdin.readline()
for child in (second, third):
    child.communicate()
agent(mem="9999GiB")
"#;

#[test]
fn the_workers_of_ray_are_jobs() {
    if !has_python() {
        return;
    }
    let sandbox = Sandbox::new();
    let mut bare = sandbox.bare("python3");
    let bare = bare.env("PYTHONPATH", module());
    let bare = Outcome::of(bare.arg(module().join("test_ray.py"))).succeeded();
    assert_eq!(bare.stdout, "well\n");

    let _arbiter = sandbox.arbiter();
    let mut command = sandbox.bare("python3");
    command
        .env("PYTHONPATH", module())
        .env("SUBLET_COMMAND", Artefacts::get().program("sublet"))
        .args(["-c", OF_RAY]);
    let mut python = ProgramRun::start(&mut command);
    assert_eq!(python.answer(), "well");
    assert_eq!(python.answer(), "job=ray.first.PID refused=");
    let jobs = || -> Vec<_> {
        let all = sandbox.jobs().into_iter();
        all.filter(|job| job.state != JobState::Gone).collect()
    };
    let [job] = &jobs()[..] else {
        panic!("{:?}", jobs());
    };
    assert_eq!(job.mem_limit_bytes, Some(1 << 30), "{job:?}");
    python.send("go on");
    let refusal = python.answer();
    assert!(
        refusal.contains("would be 1.25, above 1") && refusal.contains("asked for: share=0.5"),
        "{refusal}"
    );
    let refusal = python.answer();
    assert!(
        refusal.starts_with("job= refused=") && refusal.contains("would be 1.25, above 1"),
        "{refusal}"
    );
    assert_eq!(python.answer(), "job=ray.worker.PID refused=");
    wait_until("the killed worker's job is gone", || {
        (jobs().len() == 1).then_some(())
    });
    python.send("go on");
    let refusal = python.answer();
    assert!(refusal.contains("9999GiB"), "{refusal}");
    python.finish().succeeded();
    wait_until("no job is left", || jobs().is_empty().then_some(()));
}

#[test]
fn a_kernel_starts_notebooks_as_jobs() {
    let sandbox = Sandbox::new();
    let _arbiter = sandbox.arbiter();
    let data = sandbox.path("jupyter");
    // What Jupyter starts says what it was started with, and in which job.
    let python = sandbox.path("python");
    fs::write(&python, "#!/bin/sh\necho \"$SUBLET_JOB $*\"\n").unwrap();
    fs::set_permissions(&python, fs::Permissions::from_mode(0o755)).unwrap();
    let kernel = |words: &[&str]| {
        let mut all = vec!["kernel"];
        all.extend(words);
        let mut command = sandbox.sublet(&all);
        Outcome::of(command.env("JUPYTER_DATA_DIR", &data))
    };
    let install = [
        "install",
        "--mem",
        "2GiB",
        "--share",
        "0.25",
        "--sim",
        "--name",
        "gpu-quarter",
    ];
    let mut words = install.to_vec();
    words.extend(["--python", python.to_str().unwrap()]);
    for _ in 0..2 {
        let outcome = kernel(&words).succeeded();
        assert!(
            outcome
                .stdout
                .contains("Python 3 (sublet: mem=2GiB share=0.25)"),
            "{outcome:#?}"
        );
    }
    let file = data.join("kernels/gpu-quarter/kernel.json");
    let spec: serde_json::Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    let argv: Vec<String> = spec["argv"]
        .as_array()
        .unwrap()
        .iter()
        .map(|word| {
            word.as_str()
                .unwrap()
                .replace("{connection_file}", "/c.json")
        })
        .collect();
    let mut command = sandbox.bare(&argv[0]);
    let outcome = Outcome::of(command.args(&argv[1..])).succeeded();
    assert_eq!(
        outcome.stdout,
        "gpu-quarter -m ipykernel_launcher -f /c.json\n"
    );

    assert!(kernel(&["list"]).succeeded().stdout.contains("gpu-quarter"));
    for (wrong, says) in [
        (
            &["install", "--name", "No Name"][..],
            "is no name of a kernel",
        ),
        (&["install", "--mem", "much"], "much"),
        (
            &["install", "--python", "/nowhere/python"],
            "cannot run /nowhere/python",
        ),
        (
            &["install", "--python", "/bin/false"],
            "/bin/false has no ipykernel",
        ),
        (&["remove", "other"], "there is no kernel `other`"),
        (
            &[
                "install",
                "--name",
                "x",
                "--python",
                "/bin/true",
                "--dir",
                "/dev/null",
            ],
            "/dev/null",
        ),
    ] {
        let outcome = kernel(wrong);
        assert_eq!(outcome.code, Some(125), "{wrong:?}: {outcome:#?}");
        assert!(outcome.stderr.contains(says), "{wrong:?}: {outcome:#?}");
        assert_eq!(outcome.stderr.lines().count(), 1, "{wrong:?}: {outcome:#?}");
    }
    kernel(&["remove", "gpu-quarter"]).succeeded();
    assert!(!file.exists() && !file.parent().unwrap().exists());
}
