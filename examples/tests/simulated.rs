//! The programs from start to end on the simulated GPU: what they compute, what they refuse, and
//! that they go on where they were stopped.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use serde_json::Value;
use testbed::CommandWithin;

/// TIMEOUT: a build of some crates on a busy machine.
const BUILD: Duration = Duration::from_secs(3600);

const TRAIN_MLP: &str = env!("CARGO_BIN_EXE_train_mlp");
const INFER_LOOP: &str = env!("CARGO_BIN_EXE_infer_loop");
const SPIN: &str = env!("CARGO_BIN_EXE_spin");

/// The simulated driver, built if it is not, of the same profile as the programs.
fn driver() -> &'static Path {
    static DRIVER: OnceLock<PathBuf> = OnceLock::new();
    DRIVER.get_or_init(|| {
        let folder = Path::new(TRAIN_MLP)
            .parent()
            .expect("the program is in a folder");
        let mut cargo = Command::new(env!("CARGO"));
        cargo
            .args(["build", "--quiet", "--package", "simgpu-libcuda"])
            .current_dir(env!("CARGO_MANIFEST_DIR"));
        cargo.env(
            "CARGO_TARGET_DIR",
            folder
                .parent()
                .expect("a profile's folder is in the target folder"),
        );
        if folder.ends_with("release") {
            cargo.arg("--release");
        }
        assert!(
            cargo.status_within(BUILD).success(),
            "the simulated driver does not build"
        );
        folder.join("libsimgpu_cuda.so")
    })
}

/// A device that no other test uses, and a folder.
struct Host {
    folder: tempfile::TempDir,
}

impl Host {
    fn new() -> Host {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let libraries = folder.path().join("lib");
        std::fs::create_dir(&libraries).expect("the folder is writable");
        std::os::unix::fs::symlink(driver(), libraries.join("libcuda.so.1"))
            .expect("the folder is writable");
        // cudarc asks for this name first, and a machine with a GPU may have it elsewhere.
        std::os::unix::fs::symlink(driver(), libraries.join("libcuda.so"))
            .expect("the folder is writable");
        Host { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn command(&self, program: &str, args: &[&str]) -> Command {
        let mut command = Command::new(program);
        command
            .args(args)
            .env("LD_LIBRARY_PATH", self.path("lib"))
            .env("SUBLET_SIM_STATE", self.path("state"));
        command.env_remove("LD_PRELOAD").stdin(Stdio::null());
        command
    }

    fn run(&self, program: &str, args: &[&str]) -> Output {
        self.command(program, args).output_within(testbed::PATIENCE)
    }

    /// The JSON object at the end of a run that succeeds.
    fn report(&self, program: &str, args: &[&str]) -> Value {
        let output = self.run(program, &[args, &["--json"]].concat());
        let (out, err) = texts(&output);
        assert!(
            output.status.success(),
            "{args:?}: {}\n{out}{err}",
            output.status
        );
        assert_eq!(err, "", "{args:?}");
        serde_json::from_str(out.lines().last().unwrap_or_default())
            .unwrap_or_else(|error| panic!("{error}: {out}"))
    }
}

fn texts(output: &Output) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (text(&output.stdout), text(&output.stderr))
}

#[test]
fn training_recognises_held_out_digits_and_repeats_to_the_bit() {
    let host = Host::new();
    let first = host.report(TRAIN_MLP, &["--name", "one"]);
    assert_eq!(first["job"], "one");
    assert_eq!(
        (&first["steps"], &first["epochs"], &first["runs"]),
        (&690.into(), &30.into(), &1.into())
    );
    assert!(
        first["accuracy"]
            .as_f64()
            .is_some_and(|accuracy| accuracy >= 0.95),
        "{first}"
    );
    assert!(
        first["mem_bytes"]
            .as_u64()
            .is_some_and(|bytes| bytes > 500_000),
        "{first}"
    );
    let loss = first["loss"].as_f64().expect("a number") as f32;
    assert_eq!(first["loss_bits"], format!("{:08x}", loss.to_bits()));

    let second = host.report(
        TRAIN_MLP,
        &["--name", "two", "--extra-us", "20", "--progress-every", "0"],
    );
    assert_eq!(second["loss_bits"], first["loss_bits"]);
    let other = host.report(TRAIN_MLP, &["--seed", "2"]);
    assert_ne!(other["loss_bits"], first["loss_bits"]);
    assert!(
        other["accuracy"]
            .as_f64()
            .is_some_and(|accuracy| accuracy >= 0.95),
        "{other}"
    );
}

#[test]
fn a_killed_run_goes_on_from_its_checkpoint_to_the_same_loss() {
    let host = Host::new();
    let undisturbed = host.report(TRAIN_MLP, &["--epochs", "4"]);
    let path = host.path("run.ckpt");
    let file = path.to_str().expect("a plain name");
    // 23 steps an epoch: checkpoints every 5 steps lie inside epochs.
    let args = [
        "--epochs",
        "4",
        "--checkpoint",
        file,
        "--checkpoint-every",
        "5",
    ];
    let slow = [&args[..], &["--extra-us", "20000"]].concat();
    let mut child = host
        .command(TRAIN_MLP, &slow)
        .stdout(Stdio::null())
        .spawn()
        .expect("the program starts");
    let deadline = Instant::now() + Duration::from_secs(60);
    while !path.exists() {
        assert!(Instant::now() < deadline, "no checkpoint after a minute");
        assert!(
            child.try_wait().expect("the child is ours").is_none(),
            "the program ended without a checkpoint"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
    child.kill().expect("the child is ours");
    testbed::within::wait(&mut child, "a killed program", testbed::PATIENCE);

    let resumed = host.report(TRAIN_MLP, &[&args[..], &["--resume"]].concat());
    let steps = resumed["steps"].as_u64().expect("a number");
    assert!(
        (1..92).contains(&steps) && (92 - steps).is_multiple_of(5),
        "{resumed}"
    );
    assert_eq!(resumed["loss_bits"], undisturbed["loss_bits"]);
    // At its end there is nothing to do, and the loss is the same.
    let again = host.report(TRAIN_MLP, &[&args[..], &["--resume"]].concat());
    assert_eq!(
        (&again["steps"], &again["loss_bits"]),
        (&0.into(), &undisturbed["loss_bits"])
    );
}

#[test]
fn checkpoints_of_other_runs_and_damaged_ones_are_refused() {
    let host = Host::new();
    let path = host.path("run.ckpt");
    let file = path.to_str().expect("a plain name");
    let resume = ["--checkpoint", file, "--resume"];
    host.report(TRAIN_MLP, &["--steps", "30", "--checkpoint", file]);

    let output = host.run(TRAIN_MLP, &[&resume[..], &["--hidden", "64"]].concat());
    let (_, err) = texts(&output);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        err.contains("--hidden 128") && err.contains("--hidden 64") && err.lines().count() == 1,
        "{err}"
    );

    let mut bytes = std::fs::read(&path).expect("the checkpoint is there");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&path, &bytes).expect("the checkpoint is writable");
    let output = host.run(TRAIN_MLP, &resume);
    let (_, err) = texts(&output);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        err.contains("checksum") && err.contains("run.ckpt") && err.lines().count() == 1,
        "{err}"
    );
    assert_eq!(
        std::fs::read(&path).expect("the checkpoint is there"),
        bytes,
        "a refused file is left alone"
    );
}

#[test]
fn no_space_is_one_line_and_exit_code_2() {
    let host = Host::new();
    for (program, flag) in [
        (TRAIN_MLP, "--ballast"),
        (INFER_LOOP, "--ballast"),
        (SPIN, "--mem"),
    ] {
        let output = host.run(program, &[flag, "100TiB"]);
        let (_, err) = texts(&output);
        assert_eq!(output.status.code(), Some(2), "{program}: {err}");
        assert!(
            err.contains("out of device memory: asked for 109951162777600 bytes"),
            "{err}"
        );
        assert_eq!(err.lines().count(), 1, "{err}");
    }
    let report = host.report(TRAIN_MLP, &["--ballast", "64MiB", "--epochs", "1"]);
    assert!(
        report["mem_bytes"]
            .as_u64()
            .is_some_and(|bytes| bytes > 64 << 20),
        "{report}"
    );
}

#[test]
fn a_missing_device_and_wrong_arguments_are_named() {
    let host = Host::new();
    let output = host.run(TRAIN_MLP, &["--device", "77"]);
    let (_, err) = texts(&output);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        err.contains("device 77") && err.contains("CUDA_ERROR_INVALID_DEVICE (101)"),
        "{err}"
    );
    for bad in [
        ["--ballast", "12"],
        ["--epochs", "0"],
        ["--lr", "-1"],
        ["--batch", "many"],
    ] {
        assert_eq!(host.run(TRAIN_MLP, &bad).status.code(), Some(64), "{bad:?}");
    }
}

#[test]
fn spin_and_inference_report_what_they_did() {
    let host = Host::new();
    let spin = host.report(
        SPIN,
        &[
            "--seconds",
            "1",
            "--streams",
            "2",
            "--kernel-us",
            "1000",
            "--mem",
            "1MiB",
        ],
    );
    let kernels = spin["kernels"].as_u64().expect("a number");
    assert!(kernels >= 2, "{spin}");
    // Kernels of two streams overlap at most twofold: more in that time is work that was not done.
    assert!(
        kernels as f64 * 1e-3 <= 2.1 * spin["seconds"].as_f64().expect("a number"),
        "{spin}"
    );
    assert_eq!(spin["mem_bytes"], 1 << 20);

    let path = host.path("run.ckpt");
    let file = path.to_str().expect("a plain name");
    host.report(TRAIN_MLP, &["--epochs", "10", "--checkpoint", file]);
    let loop_args = [
        "--seconds",
        "1",
        "--rate",
        "10",
        "--burst",
        "3",
        "--batch",
        "36",
    ];
    let trained = host.report(
        INFER_LOOP,
        &[&loop_args[..], &["--checkpoint", file]].concat(),
    );
    assert_eq!(trained["requests"], 30);
    // 30 requests of 36 are the 360 held-out images three times.
    assert!(
        trained["accuracy"]
            .as_f64()
            .is_some_and(|accuracy| accuracy > 0.94),
        "{trained}"
    );
    let latency = |part: &str| trained["latency_ms"][part].as_f64().expect("a number");
    assert!(
        0.0 < latency("p50")
            && latency("p50") <= latency("p99")
            && latency("p99") <= latency("max"),
        "{trained}"
    );
    let random = host.report(INFER_LOOP, &loop_args);
    assert!(
        random["accuracy"]
            .as_f64()
            .is_some_and(|accuracy| accuracy < 0.5),
        "{random}"
    );
}

testbed::starts_clean!();
