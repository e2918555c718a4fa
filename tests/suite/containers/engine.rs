//! Podman and runc, in a place of one test's.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use control::JobStatus;
use tests::{Artefacts, Outcome, Sandbox};

/// A place for containers: a folder for engines' files that is this test's alone, and a root for
/// them that has this machine's programs.
pub struct Engine {
    pub sandbox: Sandbox,
    /// Keeps the mount namespace in which Podman runs.
    holder: Child,
}

impl Engine {
    /// # Errors
    /// Why containers cannot be had here.
    pub fn new(sandbox: Sandbox) -> Result<Self, String> {
        if !nix::unistd::geteuid().is_root() {
            return Err("this is not root".into());
        }
        for tool in ["podman", "runc", "conmon", "unshare", "nsenter", "mount"] {
            if !tests::programs::exists(tool) {
                return Err(format!("there is no {tool} here"));
            }
        }
        let cdi = Path::new("/etc/cdi");
        fs::create_dir_all(cdi).map_err(|error| format!("{}: {error}", cdi.display()))?;
        let root = sandbox.path("root");
        for name in ["usr", "etc", "proc", "sys", "dev", "tmp", "run", "prog"] {
            fs::create_dir_all(root.join(name)).expect("a folder");
        }
        for name in ["bin", "lib", "lib64", "sbin"] {
            symlink(format!("usr/{name}"), root.join(name)).expect("a link");
        }
        fs::copy("/etc/ld.so.cache", root.join("etc/ld.so.cache")).expect("a file");
        fs::create_dir_all(sandbox.path("cdi")).expect("a folder");
        let mut command = sandbox.command("unshare");
        command.args(["--mount", "--propagation", "private", "sh", "-c"]);
        command.arg("mount --bind \"$0\" /etc/cdi && echo there && exec sleep 600");
        let holder = command.arg(sandbox.path("cdi")).stdout(Stdio::piped());
        let mut holder = holder
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| error.to_string())?;
        let mut said = [0; 5];
        let output = holder.stdout.as_mut().expect("a pipe");
        std::io::Read::read_exact(output, &mut said).map_err(|_| "no mounts may be made here")?;
        let engine = Self { sandbox, holder };
        let tried = engine.run(&["--rm"], &[], &["true"]);
        match tried.code {
            Some(0) => Ok(engine),
            _ => Err(format!("podman: {}", tried.stderr.trim())),
        }
    }

    fn command<S: AsRef<OsStr>>(&self, words: &[S]) -> Command {
        let at = |name: &str| self.sandbox.path(name);
        let mut command = self.sandbox.command("nsenter");
        command.args(["--mount", "--target", &self.holder.id().to_string()]);
        command.arg("podman").arg("--root").arg(at("storage"));
        command.arg("--runroot").arg(at("runroot"));
        command.arg("--tmpdir").arg(at("podman-tmp"));
        command.args(["--cgroup-manager=cgroupfs", "--runtime", "runc"]);
        command.args(words);
        command
    }

    pub fn podman<S: AsRef<OsStr>>(&self, words: &[S]) -> Outcome {
        Outcome::of(&mut self.command(words))
    }

    /// `podman exec FLAGS CONTAINER COMMAND`. An engine gives it no variable of the device; the
    /// simulated driver is found by some.
    pub fn exec(&self, container: &str, flags: &[&str], command: &[&str]) -> Command {
        let all = [
            &["exec", "--env=LD_LIBRARY_PATH=/opt/sublet/sim"][..],
            &["--env=SUBLET_DRIVER=/opt/sublet/sim/libcuda.so.1"],
            &["--env=SUBLET_SIM_STATE=/run/sublet/simulated"],
            flags,
            &[container],
            command,
        ];
        self.command(&all.concat())
    }

    /// `podman run FLAGS --device sublet.dev/gpu=DEVICE ... COMMAND`
    pub fn run(&self, flags: &[&str], devices: &[&str], command: &[&str]) -> Outcome {
        let programs = Artefacts::get().program("sublet");
        let programs = programs.parent().expect("a folder").display();
        let mut words: Vec<String> = vec!["run".into()];
        words.extend(flags.iter().map(ToString::to_string));
        // Rights that a test may lack: the defaults raise limits.
        words.extend(
            [
                "--network=none",
                "--ulimit=nofile=1024:1024",
                "--ulimit=nproc=1024:1024",
                "--env=SUBLET_SIM_CAPACITY=8GiB",
                "--env=SUBLET_SIM_CONTEXT=0B",
                "--volume=/usr:/usr:ro",
            ]
            .map(String::from),
        );
        words.push(format!("--volume={programs}:/prog:ro"));
        for device in devices {
            words.push(format!("--device=sublet.dev/gpu={device}"));
        }
        words.push("--rootfs".into());
        words.push(self.sandbox.path("root").display().to_string());
        words.extend(command.iter().map(ToString::to_string));
        self.podman(&words)
    }

    pub fn start(&self, name: &str, flags: &[&str], devices: &[&str], command: &[&str]) {
        let flags = [&["--detach", "--name", name], flags].concat();
        self.run(&flags, devices, command).succeeded();
    }

    /// Writes the file of devices.
    pub fn generate(&self, words: &[&str]) -> Outcome {
        let mut command = self.sandbox.sublet(["cdi", "generate", "--sim"]);
        command.args(words).arg("--output");
        Outcome::of(command.arg(self.sandbox.path("cdi/sublet.json")))
    }

    pub fn job(&self, name: &str) -> Option<JobStatus> {
        self.sandbox
            .job_status(name)
            .filter(|job| job.state != control::JobState::Gone)
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.podman(&["rm", "--all", "--force", "--time=0"]);
        testbed::reap(&mut self.holder);
    }
}
