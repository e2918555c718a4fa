//! `sublet run`: what the arbiter hears, what the command finds, and that the process is the same
//! one.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use control::{Class, DeviceSelector, FailMode, MemLimit};
use nix::sys::signal::{SigSet, SigmaskHow, Signal, sigprocmask};

use crate::fixture::{Fixture, Outcome, TOKEN};

#[test]
fn the_command_runs_in_the_process_that_was_registered() {
    let fixture = Fixture::new();
    let child = fixture
        .sublet(["run", "--sim", "sh", "-c", "echo $$"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let pid = child.id();
    let outcome = Outcome::from(testbed::within::output(
        child,
        "sublet run",
        testbed::PATIENCE,
    ));
    assert_eq!(
        (outcome.code, outcome.stdout.trim()),
        (Some(0), pid.to_string().as_str())
    );
    assert_eq!(fixture.registered().pid, pid);
    assert_eq!(fixture.heard()[0].peer_pid, pid);
}

#[test]
fn its_exit_code_and_its_signal_are_its_own() {
    for (script, code, signal) in [
        ("exit 0", Some(0), None),
        ("exit 42", Some(42), None),
        ("exit 125", Some(125), None),
        ("kill -TERM $$", None, Some(15)),
        ("kill -KILL $$", None, Some(9)),
    ] {
        let outcome = Fixture::new().run(&["run", "--sim", "--", "sh", "-c", script]);
        assert_eq!((outcome.code, outcome.signal), (code, signal), "{script}");
    }
}

#[test]
fn one_line_says_that_the_gpu_is_simulated_and_a_real_driver_says_nothing() {
    let fixture = Fixture::new();
    let outcome = fixture.run(&["run", "--sim", "true"]);
    assert_eq!(
        outcome.stderr,
        "sublet: simulated GPU (asked for by --sim)\n"
    );
    let spec = fixture.registered();
    assert!(
        spec.simulated && spec.driver.ends_with("sim/libcuda.so.1"),
        "{spec:?}"
    );

    let fixture = Fixture::new();
    let driver = fixture.at("driver.so");
    let outcome = fixture.run(&["run", "--driver", driver.to_str().unwrap(), "true"]);
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""));
    let spec = fixture.registered();
    assert!(
        !spec.simulated && spec.driver == fs::canonicalize(driver).unwrap(),
        "{spec:?}"
    );
}

#[test]
fn the_driver_is_found_along_the_library_path() {
    let fixture = Fixture::new();
    fs::create_dir(fixture.at("lib")).unwrap();
    fs::copy(fixture.at("driver.so"), fixture.at("lib/libcuda.so.1")).unwrap();
    let mut command = fixture.sublet(["run", "true"]);
    let outcome = Outcome::of(command.env("LD_LIBRARY_PATH", fixture.at("lib")));
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""));
    assert_eq!(fixture.registered().driver, fixture.at("lib/libcuda.so.1"));
}

/// The variables that the command found.
fn environment(outcome: &Outcome) -> HashMap<&str, &str> {
    outcome
        .stdout
        .lines()
        .filter_map(|line| line.split_once('='))
        .collect()
}

#[test]
fn the_command_finds_what_the_library_needs_and_all_that_was_there() {
    let fixture = Fixture::new();
    let mut command = fixture.sublet([
        "run",
        "--sim",
        "--name",
        "train",
        "--on-arbiter-loss",
        "freeze",
        "env",
    ]);
    let other = fixture.at("driver.so");
    command
        .env("LD_PRELOAD", &other)
        .env("MINE", "a b")
        .env("LD_LIBRARY_PATH", "/l");
    let outcome = Outcome::of(&mut command);
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
    let at = |name: &str| {
        fs::canonicalize(fixture.at(name))
            .unwrap()
            .display()
            .to_string()
    };
    let found = environment(&outcome);
    for (name, value) in [
        (
            "LD_PRELOAD",
            format!("{}:{}", at("libsublet.so"), other.display()),
        ),
        ("LD_LIBRARY_PATH", format!("{}:/l", at("sim"))),
        ("SUBLET_SOCKET", "/the/channel.sock".into()),
        ("SUBLET_TOKEN", TOKEN.into()),
        ("SUBLET_JOB", "train-2".into()),
        ("SUBLET_DRIVER", at("sim/libcuda.so.1")),
        ("SUBLET_ON_ARBITER_LOSS", "freeze".into()),
        ("MINE", "a b".into()),
    ] {
        assert_eq!(found.get(name), Some(&value.as_str()), "{name}");
    }
}

#[test]
fn a_flag_beats_the_environment_and_that_beats_the_file() {
    let fixture = Fixture::new();
    fixture.write(
        "sublet.toml",
        r#"
        [defaults]
        mem = "1GiB"
        class = "opportunistic"
        on_arbiter_loss = "closed"
        [[rule]]
        match.name = "tr*"
        set = { mem = "2GiB", share = 0.2, device = 3 }
        "#,
    );
    let mut command = fixture.sublet(["run", "--sim", "--share", "0.4", "true", "--share", "0.9"]);
    command
        .env("SUBLET_SHARE", "0.3")
        .env("SUBLET_MEM", "50%")
        .env("SUBLET_NAME", "train");
    assert_eq!(Outcome::of(&mut command).code, Some(0));
    let spec = fixture.registered();
    assert_eq!(spec.name, "train", "the environment's name");
    assert_eq!(spec.settings.share, Some(0.4), "the flag's share");
    assert_eq!(
        spec.settings.mem,
        Some(MemLimit::Percent(50.0)),
        "the environment's quota"
    );
    assert_eq!(
        spec.settings.devices(),
        [DeviceSelector::Index(3)],
        "the section's device"
    );
    assert_eq!(
        spec.settings.class,
        Some(Class::Opportunistic),
        "the default class"
    );
    assert_eq!(spec.settings.on_arbiter_loss, Some(FailMode::Closed));
    assert_eq!(spec.command, ["true", "--share", "0.9"]);
}

#[test]
fn a_job_without_a_name_gets_one_from_the_arbiter_and_matches_by_its_command() {
    let fixture = Fixture::new();
    fixture.write("train.sh", "exit 0\n");
    fixture.write(
        "sublet.toml",
        "[[rule]]\nmatch.name = \"train\"\nset.share = 0.3\n",
    );
    let outcome = fixture.run(&["run", "--sim", "sh", "-e", "./train.sh"]);
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
    let spec = fixture.registered();
    assert_eq!((spec.name.as_str(), spec.settings.share), ("", Some(0.3)));
}

#[test]
fn signal_mask_and_ignored_signals_reach_the_command_as_they_were() {
    let script = "exec grep -E '^Sig(Blk|Ign)' /proc/self/status";
    let of = |block: bool, ignore_pipe: bool| {
        let fixture = Fixture::new();
        let mut command = fixture.sublet(["run", "--sim", "sh", "-c", script]);
        let mut mask = SigSet::empty();
        mask.add(Signal::SIGUSR1);
        // SAFETY: between fork and exec this only calls sigprocmask and signal, which are
        // async-signal-safe.
        unsafe {
            command.pre_exec(move || {
                if block {
                    sigprocmask(SigmaskHow::SIG_BLOCK, Some(&mask), None)?;
                }
                let pipe = if ignore_pipe {
                    nix::libc::SIG_IGN
                } else {
                    nix::libc::SIG_DFL
                };
                nix::libc::signal(nix::libc::SIGPIPE, pipe);
                Ok(())
            });
        }
        let outcome = Outcome::of(&mut command);
        let bits = |name: &str| {
            let line = outcome
                .stdout
                .lines()
                .find_map(|line| line.strip_prefix(name));
            u64::from_str_radix(line.expect(name).trim(), 16).unwrap()
        };
        let has = |bits: u64, signal: Signal| bits >> (signal as i32 - 1) & 1 == 1;
        (
            has(bits("SigBlk:"), Signal::SIGUSR1),
            has(bits("SigIgn:"), Signal::SIGPIPE),
        )
    };
    for block in [false, true] {
        for ignore_pipe in [false, true] {
            assert_eq!(of(block, ignore_pipe), (block, ignore_pipe));
        }
    }
}

#[test]
fn a_script_without_a_first_line_goes_to_the_shell() {
    let fixture = Fixture::new();
    let script = fixture.write("plain", "echo \"$1\"; exit 7\n");
    fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).unwrap();
    let outcome = fixture.run(&["run", "--sim", "./plain", "an argument"]);
    assert_eq!(
        (outcome.code, outcome.stdout.as_str()),
        (Some(7), "an argument\n"),
        "{outcome:?}"
    );
}

#[test]
fn no_descriptor_of_ours_reaches_the_command() {
    let fixture = Fixture::new();
    let list = ["sh", "-c", "ls /proc/$$/fd"];
    let through = fixture.run(&[&["run", "--sim"][..], &list].concat());
    let bare = Outcome::of(Command::new(list[0]).args(&list[1..]).stdin(Stdio::null()));
    assert_eq!(through.stdout, bare.stdout);
}

#[test]
fn a_job_within_a_job_is_a_job_of_its_own() {
    let fixture = Fixture::new();
    let sublet = env!("CARGO_BIN_EXE_sublet");
    let outcome = fixture.run(&[
        "run", "--sim", sublet, "run", "--sim", "--name", "inner", "env",
    ]);
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
    let found = environment(&outcome);
    assert_eq!(found["SUBLET_JOB"], "inner-2");
    assert!(
        !found["LD_PRELOAD"].contains(':'),
        "{}",
        found["LD_PRELOAD"]
    );
    assert_eq!(fixture.heard().len(), 2);
}
