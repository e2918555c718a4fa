//! What is under test, built: `libsublet.so`, the simulated driver, `sublet`; and the host
//! programs, compiled.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

use testbed::CommandWithin;

/// Where the built files lie.
#[derive(Debug)]
pub struct Artefacts {
    /// The source tree.
    pub root: PathBuf,
    /// `target/<profile>`.
    pub dir: PathBuf,
    compiled: Mutex<HashMap<String, Result<PathBuf, String>>>,
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
                .ancestors()
                .nth(2)
                .expect("the workspace")
                .to_owned();
            let made = |dir: PathBuf| Self {
                root: root.clone(),
                dir,
                compiled: Mutex::default(),
            };
            if let Some(dir) = std::env::var_os("SUBLET_TEST_ARTEFACTS") {
                let dir = std::fs::canonicalize(&dir)
                    .unwrap_or_else(|error| panic!("SUBLET_TEST_ARTEFACTS={dir:?}: {error}"));
                return made(dir);
            }
            // <target>/<profile>/deps/host_process-...
            let test = std::env::current_exe().expect("the test's own path");
            let dir = test.ancestors().nth(2).expect("a target directory");
            let release = dir.ends_with("release");
            let mut cargo = Command::new(option_env!("CARGO").unwrap_or("cargo"));
            cargo.args(["build", "--quiet"]);
            for package in ["interposer", "simgpu-libcuda", "simgpu-libnvidia-ml", "cli"] {
                cargo.args(["-p", package]);
            }
            if release {
                cargo.arg("--release");
            }
            run(cargo.current_dir(&root)).expect("the workspace builds");
            let profile = if release { "release" } else { "debug" };
            let mut stage = Command::new(root.join("scripts/stage"));
            run(stage.arg(profile).current_dir(&root)).expect("the simulated driver is staged");
            made(dir.to_owned())
        })
    }

    /// `libsublet.so`.
    pub fn preload(&self) -> PathBuf {
        self.dir.join("libsublet.so")
    }

    /// The simulated driver.
    pub fn driver(&self) -> PathBuf {
        self.dir.join("sim/libcuda.so.1")
    }

    /// The command.
    pub fn sublet(&self) -> PathBuf {
        self.dir.join("sublet")
    }

    /// A source file of a host program.
    pub fn source(&self, name: &str) -> PathBuf {
        self.root.join("tests/host-process/programs").join(name)
    }

    /// Compiles `source` (C or C++ by its ending) with `compiler` (`None`: `$CC`/`$CXX` or
    /// `cc`/`c++`), once; the output is called `name`.
    ///
    /// # Errors
    /// What the compiler says, or that there is none.
    pub fn compile(
        &self,
        name: &str,
        source: &str,
        compiler: Option<&str>,
        flags: &[&str],
    ) -> Result<PathBuf, String> {
        let mut compiled = self.compiled.lock().unwrap_or_else(PoisonError::into_inner);
        compiled
            .entry(name.to_owned())
            .or_insert_with(|| {
                let dir = self.dir.join("host-process");
                std::fs::create_dir_all(&dir).map_err(|error| error.to_string())?;
                let to = dir.join(name);
                // Two test processes may compile at the same time.
                let unfinished = dir.join(format!("{name}.{}", std::process::id()));
                let (variable, usual) = if source.ends_with(".cpp") {
                    ("CXX", "c++")
                } else {
                    ("CC", "cc")
                };
                let usual = std::env::var(variable).unwrap_or_else(|_| usual.into());
                let mut command = Command::new(compiler.unwrap_or(&usual));
                command
                    .args(["-O1", "-Wall", "-Wextra", "-Wno-unused-result"])
                    .arg("-o")
                    .arg(&unfinished)
                    .arg(self.source(source))
                    .args(flags)
                    .args(["-ldl", "-lpthread"]);
                run(&mut command)?;
                std::fs::rename(&unfinished, &to).map_err(|error| error.to_string())?;
                Ok(to)
            })
            .clone()
    }
}

fn run(command: &mut Command) -> Result<(), String> {
    if !exists(command.get_program()) {
        return Err(format!("there is no {:?} here", command.get_program()));
    }
    // TIMEOUT: a build of the workspace on a busy machine.
    let output = command.output_within(Duration::from_secs(3600));
    if output.status.success() {
        return Ok(());
    }
    Err(format!(
        "{command:?}: {}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    ))
}

/// Whether a program of this name can be started.
pub(crate) fn exists(name: impl AsRef<Path>) -> bool {
    let name = name.as_ref();
    if name.components().count() > 1 {
        return name.is_file();
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| dir.join(name).is_file())
}
