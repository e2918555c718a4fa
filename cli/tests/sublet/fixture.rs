//! A directory with stand-ins for the libraries, an arbiter with given answers, and the command to
//! test.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;

use control::stand_in::{self, Asked};
use control::{ControlError, JobSpec, Registered, Reply, Request};
use parking_lot::Mutex;
use testbed::CommandWithin;

pub const TOKEN: &str = "00112233445566778899aabbccddeeff";

/// The variables that reach the command; everything else of the test's own environment is left out.
const KEPT: [&str; 2] = ["PATH", "LD_LIBRARY_PATH"];

pub struct Fixture {
    dir: tempfile::TempDir,
    heard: Arc<Mutex<Vec<Heard>>>,
}

/// A request, and the process that sent it by the kernel's word.
#[derive(Debug, Clone)]
pub struct Heard {
    pub request: Request,
    pub peer_pid: u32,
}

impl Fixture {
    /// Libraries and a runtime directory, and no arbiter.
    pub fn without_arbiter() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let fixture = Self {
            dir,
            heard: Arc::default(),
        };
        for name in ["run", "sim", "home", "conf"] {
            fs::create_dir(fixture.at(name)).unwrap();
        }
        fs::set_permissions(fixture.at("run"), fs::Permissions::from_mode(0o700)).unwrap();
        let library = some_library();
        for name in ["libsublet.so", "sim/libcuda.so.1", "driver.so"] {
            fs::copy(&library, fixture.at(name)).unwrap();
        }
        fixture
    }

    /// With an arbiter that takes every job as it is.
    pub fn new() -> Self {
        let channel = "/the/channel.sock".to_owned();
        Self::answering(move |request| match request {
            Request::Register(JobSpec { name, settings, .. }) => {
                Ok(Reply::Registered(Registered {
                    job: format!("{name}-2"),
                    token: TOKEN.into(),
                    channel_socket: channel.clone().into(),
                    share: settings.share.unwrap_or(0.0),
                    ..Registered::default()
                }))
            }
            Request::Status => Ok(Reply::Status(control::ArbiterStatus::default())),
            other => panic!("not expected here: {other:?}"),
        })
    }

    /// With an arbiter that answers so.
    pub fn answering(
        answer: impl Fn(Request) -> Result<Reply, ControlError> + Send + Sync + 'static,
    ) -> Self {
        Self::speaking(move |asked| {
            let request = asked.request();
            let request = request.unwrap_or_else(|| panic!("no request: {asked:?}"));
            stand_in::answer(&answer(request))
        })
    }

    /// With an arbiter that says these bytes to a request; none: it hangs up.
    pub fn speaking(answer: impl Fn(&Asked) -> Vec<u8> + Send + Sync + 'static) -> Self {
        let fixture = Self::without_arbiter();
        let heard = fixture.heard.clone();
        stand_in::stand_in(&fixture.at("run/api.sock"), move |asked| {
            if let Some(request) = asked.request() {
                let peer_pid = asked.peer_pid;
                heard.lock().push(Heard { request, peer_pid });
            }
            answer(asked)
        });
        fixture
    }

    pub fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.at(name);
        fs::write(&path, text).unwrap();
        path
    }

    pub fn heard(&self) -> Vec<Heard> {
        self.heard.lock().clone()
    }

    /// The one job that was registered.
    pub fn registered(&self) -> JobSpec {
        let registered = |heard: Heard| match heard.request {
            Request::Register(spec) => Some(spec),
            _ => None,
        };
        let mut specs: Vec<_> = self.heard().into_iter().filter_map(registered).collect();
        assert_eq!(specs.len(), 1, "{:?}", self.heard());
        specs.remove(0)
    }

    /// `sublet` with these arguments, in the fixture's directory and with no more than its
    /// environment.
    pub fn sublet<S: AsRef<OsStr>>(&self, args: impl IntoIterator<Item = S>) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sublet"));
        command.args(args).env_clear().stdin(Stdio::null());
        command.current_dir(self.dir.path());
        for name in KEPT {
            command.envs(std::env::var_os(name).map(|value| (name, value)));
        }
        command
            .env("SUBLET_RUNTIME_DIR", self.at("run"))
            .env("SUBLET_LIBRARY", self.at("libsublet.so"))
            .env("SUBLET_SIM_DIR", self.at("sim"))
            .env("SUBLET_CONFIG_DIR", self.at("conf"))
            .env("HOME", self.at("home"));
        command
    }

    pub fn run(&self, args: &[&str]) -> Outcome {
        Outcome::of(&mut self.sublet(args))
    }
}

/// How a command ended and what it said.
#[derive(Debug)]
pub struct Outcome {
    pub code: Option<i32>,
    pub signal: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Outcome {
    pub fn of(command: &mut Command) -> Self {
        command.output_within(testbed::PATIENCE).into()
    }

    /// One clear line on stderr with all these words in it, nothing on stdout, and this code.
    #[track_caller]
    pub fn is_error(&self, code: i32, words: &[&str]) {
        assert_eq!(self.code, Some(code), "{self:?}");
        assert_eq!(self.stdout, "", "{self:?}");
        assert_eq!(self.stderr.lines().count(), 1, "{self:?}");
        assert!(self.stderr.starts_with("sublet: "), "{self:?}");
        for word in words {
            assert!(
                self.stderr.contains(word),
                "no `{word}` in {:?}",
                self.stderr
            );
        }
    }
}

impl From<Output> for Outcome {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code(),
            signal: output.status.signal(),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }
}

/// A shared library that does nobody harm when it is preloaded: the one with the unwinder, which
/// every program of Rust's on glibc has loaded.
fn some_library() -> PathBuf {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let paths = maps
        .lines()
        .filter_map(|line| Some(Path::new(&line[line.find('/')?..])));
    let is_it = |path: &&Path| {
        let name = path.file_name().unwrap_or_default();
        name.as_encoded_bytes().starts_with(b"libgcc_s")
    };
    paths
        .into_iter()
        .find(is_it)
        .expect("libgcc_s is loaded")
        .to_owned()
}
