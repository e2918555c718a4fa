//! The libraries and programs under test, as `sublet` finds them: `libsublet.so` next to the
//! binary, the simulated driver in `sim/`.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use testbed::CommandWithin;

/// Where the built files lie.
#[derive(Debug)]
pub struct Artefacts {
    root: PathBuf,
    dir: PathBuf,
}

impl Artefacts {
    /// Builds and stages with the profile that the tests were built with, once per test process.
    /// Where `SUBLET_TEST_ARTEFACTS` names a directory, what lies there is tested as it is.
    ///
    /// # Panics
    /// When something cannot be built.
    pub fn get() -> &'static Self {
        static ARTEFACTS: OnceLock<Artefacts> = OnceLock::new();
        ARTEFACTS.get_or_init(|| {
            let root = Path::new(env!("CARGO_MANIFEST_DIR"))
                .parent()
                .expect("the workspace")
                .to_owned();
            if let Some(dir) = std::env::var_os("SUBLET_TEST_ARTEFACTS") {
                let dir = std::fs::canonicalize(&dir)
                    .unwrap_or_else(|error| panic!("SUBLET_TEST_ARTEFACTS={dir:?}: {error}"));
                return Self { root, dir };
            }
            // <target>/<profile>/deps/suite-...
            let test = std::env::current_exe().expect("the test's own path");
            let dir = test
                .parent()
                .and_then(Path::parent)
                .expect("a target directory")
                .to_owned();
            let release = dir.ends_with("release");
            for what in [
                &["--workspace"][..],
                &["-p", "simgpu", "--example", "usage"],
            ] {
                let mut cargo = Command::new(option_env!("CARGO").unwrap_or("cargo"));
                cargo.args(["build", "--quiet"]).args(what);
                if release {
                    cargo.arg("--release");
                }
                run(&root, &mut cargo);
            }
            let profile = if release { "release" } else { "debug" };
            run(&root, Command::new(root.join("scripts/stage")).arg(profile));
            Self { root, dir }
        })
    }

    /// The source tree.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Where all of it lies.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// A program of the workspace: `sublet`, `spin`, `train_mlp`, ...
    ///
    /// # Panics
    /// When there is none of that name.
    pub fn program(&self, name: &str) -> PathBuf {
        self.file(name)
    }

    /// `libsublet.so`.
    pub fn preload(&self) -> PathBuf {
        self.file("libsublet.so")
    }

    /// The simulated driver.
    pub fn simulated_driver(&self) -> PathBuf {
        self.file("sim/libcuda.so.1")
    }

    /// The simulated NVML.
    pub fn simulated_nvml(&self) -> PathBuf {
        self.file("sim/libnvidia-ml.so.1")
    }

    /// Where host programs are built.
    pub fn programs_dir(&self) -> PathBuf {
        self.dir.join("programs")
    }

    fn file(&self, name: &str) -> PathBuf {
        let path = self.dir.join(name);
        assert!(path.is_file(), "{} was not built", path.display());
        path
    }
}

fn run(root: &Path, command: &mut Command) {
    // TIMEOUT: a build of the workspace on a busy machine.
    let output = command
        .current_dir(root)
        .output_within(Duration::from_secs(3600));
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
}
