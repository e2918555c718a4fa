//! What the programs of this package run: built beside them if it is not there yet.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;
use std::time::Duration;

use testbed::CommandWithin;

/// TIMEOUT: a build of some crates, or some hundred programs one after another, on a busy machine.
const LONG: Duration = Duration::from_secs(3600);

/// Builds the simulated driver, the preload library and `sublet`, once; answers their directory.
pub fn directory() -> &'static Path {
    static TARGET: OnceLock<PathBuf> = OnceLock::new();
    TARGET.get_or_init(|| {
        // PANIC: the binary lies in the target directory's profile.
        let target = Path::new(env!("CARGO_BIN_EXE_transparency"))
            .parent()
            .unwrap();
        let release = target.file_name().is_some_and(|name| name == "release");
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let mut cargo = Command::new(env!("CARGO"));
        cargo.current_dir(&root).args(["build", "-q"]);
        for package in ["simgpu-libcuda", "simgpu-libnvidia-ml", "interposer", "cli"] {
            cargo.args(["-p", package]);
        }
        if release {
            cargo.arg("--release");
        }
        assert!(
            cargo.status_within(LONG).success(),
            "the parts do not build"
        );
        let profile = if release { "release" } else { "debug" };
        let staged = Command::new(root.join("scripts/stage"))
            .arg(profile)
            .status_within(LONG);
        assert!(staged.success(), "scripts/stage {profile} failed");
        target.to_owned()
    })
}

/// Runs one of the programs to its end.
pub fn run(program: &str, words: &[&str]) -> Output {
    directory();
    Command::new(program).args(words).output_within(LONG)
}

/// All that it said.
pub fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// The JSON object of its last line.
pub fn object(output: &Output) -> serde_json::Value {
    let said = String::from_utf8_lossy(&output.stdout);
    serde_json::from_str(said.lines().last().unwrap_or_default())
        .unwrap_or_else(|error| panic!("{error}: {}", text(output)))
}
