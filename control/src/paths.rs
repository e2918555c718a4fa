//! Where an arbiter keeps its sockets and files, and whether that place can be trusted; where a
//! host has its driver.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Where a host's arbiter lives.
pub const SYSTEM_DIR: &str = "/run/sublet";
/// Overrides every other rule.
pub const RUNTIME_DIR_VAR: &str = "SUBLET_RUNTIME_DIR";
/// The driver's name towards programs: the CUDA driver's SONAME on Linux.
pub const DRIVER_NAME: &str = "libcuda.so.1";
/// Where distributions, container runtimes and WSL put the driver, in the order in which it is
/// looked for there.
pub const DRIVER_DIRS: [&str; 11] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/lib64",
    "/lib",
    "/usr/local/nvidia/lib64",
    "/usr/lib64/nvidia",
    "/usr/local/cuda/compat",
    "/run/opengl-driver/lib",
    "/usr/lib/wsl/lib",
];

const API_SOCKET: &str = "api.sock";
/// Where arbiters listened that spoke lines and no HTTP, in the same directory.
pub(crate) const OLDER_SOCKET: &str = "control.sock";

/// The directory of one arbiter. Which one is decided by [`find`](Self::find); whether it is fit by
/// [`verify`](Self::verify) or [`ensure`](Self::ensure).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuntimeDir {
    path: PathBuf,
    source: Source,
}

/// Which rule chose the directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// A flag or `SUBLET_RUNTIME_DIR`.
    Given,
    /// `/run/sublet`, the host's arbiter.
    System,
    /// `$XDG_RUNTIME_DIR/sublet`
    Xdg,
    /// `/tmp/sublet-<uid>`
    Tmp,
}

/// Why a directory will not be used.
#[derive(Debug, thiserror::Error)]
pub enum PathError {
    #[error("{RUNTIME_DIR_VAR} is `{}`, which is no absolute path: write one, or unset it", .0.display())]
    NotAbsolute(PathBuf),
    #[error("{} is not a directory: remove it, or set {RUNTIME_DIR_VAR} to another place", .0.display())]
    NotADirectory(PathBuf),
    #[error(
        "{} belongs to user {owner}, not to you (user {uid}) or root: set {RUNTIME_DIR_VAR} to a directory of your own", .path.display()
    )]
    ForeignOwner { path: PathBuf, owner: u32, uid: u32 },
    #[error("{} has mode {mode:04o}, so others could put a socket there: run `chmod {wanted:o} {}`", .path.display(), .path.display())]
    OpenToOthers {
        path: PathBuf,
        mode: u32,
        wanted: u32,
    },
    #[error("{} cannot be used: {error} (set {RUNTIME_DIR_VAR} to a directory that you can write)", .path.display())]
    Io { path: PathBuf, error: io::Error },
}

/// What the rule looks at: taken from the process once, or made up by a test.
#[derive(Debug, Clone, Default)]
pub struct Surroundings {
    pub uid: u32,
    pub given: Option<OsString>,
    pub xdg_runtime_dir: Option<OsString>,
    /// Where the host's arbiter would be; [`SYSTEM_DIR`].
    pub system_dir: PathBuf,
    /// `/tmp`
    pub tmp_dir: PathBuf,
}

impl Surroundings {
    pub fn of_this_process() -> Self {
        Self {
            uid: nix::unistd::geteuid().as_raw(),
            given: std::env::var_os(RUNTIME_DIR_VAR).filter(|dir| !dir.is_empty()),
            xdg_runtime_dir: std::env::var_os("XDG_RUNTIME_DIR").filter(|dir| !dir.is_empty()),
            system_dir: SYSTEM_DIR.into(),
            tmp_dir: "/tmp".into(),
        }
    }
}

impl RuntimeDir {
    /// The rule for clients and per-user arbiters: `$SUBLET_RUNTIME_DIR`; else `/run/sublet` if
    /// root's arbiter has a socket there; else `$XDG_RUNTIME_DIR/sublet` if that directory exists;
    /// else `/tmp/sublet-<uid>`.
    ///
    /// # Errors
    /// [`PathError::NotAbsolute`] for a relative `$SUBLET_RUNTIME_DIR`.
    pub fn find(around: &Surroundings) -> Result<Self, PathError> {
        if let Some(given) = &around.given {
            return Self::given(PathBuf::from(given));
        }
        let is_roots = |name: &str| {
            let socket = fs::symlink_metadata(around.system_dir.join(name));
            socket.is_ok_and(|meta| meta.file_type().is_socket() && meta.uid() == 0)
        };
        // One of an older version is not passed over: it has the devices.
        if is_roots(API_SOCKET) || is_roots(OLDER_SOCKET) {
            return Ok(Self::of_the_host(around));
        }
        let xdg = around.xdg_runtime_dir.as_ref().map(PathBuf::from);
        if let Some(xdg) = xdg.filter(|dir| dir.is_absolute() && dir.is_dir()) {
            return Ok(Self {
                path: xdg.join("sublet"),
                source: Source::Xdg,
            });
        }
        Ok(Self {
            path: around.tmp_dir.join(format!("sublet-{}", around.uid)),
            source: Source::Tmp,
        })
    }

    /// The rule for an arbiter that serves the host: as [`find`](Self::find), but root's lives in
    /// `/run/sublet`.
    ///
    /// # Errors
    /// As [`find`](Self::find).
    pub fn find_for_daemon(around: &Surroundings) -> Result<Self, PathError> {
        if around.given.is_none() && around.uid == 0 {
            return Ok(Self::of_the_host(around));
        }
        Self::find(around)
    }

    /// A directory named by the user.
    ///
    /// # Errors
    /// [`PathError::NotAbsolute`]
    pub fn given(path: PathBuf) -> Result<Self, PathError> {
        if !path.is_absolute() {
            return Err(PathError::NotAbsolute(path));
        }
        Ok(Self {
            path,
            source: Source::Given,
        })
    }

    /// Where the host's arbiter is, whether or not it runs.
    pub fn of_the_host(around: &Surroundings) -> Self {
        Self {
            path: around.system_dir.clone(),
            source: Source::System,
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn source(&self) -> Source {
        self.source
    }

    pub fn channel_socket(&self) -> PathBuf {
        self.path.join("channel.sock")
    }

    /// Where requests are taken, over HTTP.
    pub fn api_socket(&self) -> PathBuf {
        self.path.join(API_SOCKET)
    }

    /// All that an arbiter listens at.
    pub fn sockets(&self) -> [PathBuf; 2] {
        [self.channel_socket(), self.api_socket()]
    }

    /// What containers are shown of the directory: another name of the channel's socket, and
    /// nothing else.
    pub fn containers_dir(&self) -> PathBuf {
        self.path.join("containers")
    }

    /// Held by flock(2) for as long as an arbiter lives.
    pub fn lock_file(&self) -> PathBuf {
        self.path.join("arbiter.lock")
    }

    pub fn log_file(&self) -> PathBuf {
        self.path.join("arbiter.log")
    }

    pub fn state_file(&self) -> PathBuf {
        self.path.join("state.json")
    }

    pub fn journal_file(&self) -> PathBuf {
        self.path.join("journal.jsonl")
    }

    /// Where the journal is put aside once it is long enough.
    pub fn older_journal_file(&self) -> PathBuf {
        self.path.join("journal.jsonl.1")
    }

    /// Checks an existing directory: a real one, of this user or root, that nobody else can write;
    /// and in the places that are private by rule, that nobody else can enter. A missing directory
    /// passes: nothing can listen in it.
    ///
    /// # Errors
    /// [`PathError`], with what to do about it.
    pub fn verify(&self, uid: u32) -> Result<(), PathError> {
        let meta = match fs::symlink_metadata(&self.path) {
            Ok(meta) => meta,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(self.io(error)),
        };
        // A directory that the user named may be reached through a link; the directories by rule
        // may not.
        let meta = if meta.is_symlink() && self.source == Source::Given {
            fs::metadata(&self.path).map_err(|error| self.io(error))?
        } else {
            meta
        };
        let path = || self.path.clone();
        if !meta.is_dir() {
            return Err(PathError::NotADirectory(path()));
        }
        if meta.uid() != uid && meta.uid() != 0 {
            return Err(PathError::ForeignOwner {
                path: path(),
                owner: meta.uid(),
                uid,
            });
        }
        let (forbidden, wanted) = match self.source {
            Source::Given | Source::System => (0o022, 0o755),
            Source::Xdg | Source::Tmp => (0o077, 0o700),
        };
        let mode = meta.mode() & 0o7777;
        if mode & forbidden != 0 {
            return Err(PathError::OpenToOthers {
                path: path(),
                mode,
                wanted,
            });
        }
        Ok(())
    }

    /// Creates the directory where it is missing, private unless it is the host's, and verifies it.
    ///
    /// # Errors
    /// [`PathError`]
    pub fn ensure(&self, uid: u32) -> Result<(), PathError> {
        let mode = match self.source {
            Source::System => 0o755,
            Source::Given | Source::Xdg | Source::Tmp => 0o700,
        };
        match fs::DirBuilder::new().mode(mode).create(&self.path) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(self.io(error)),
        }
        self.verify(uid)
    }

    /// As [`ensure`](Self::ensure) for a directory that was there before: what lies above it, and
    /// was removed with it, is made again as well, for its user alone.
    ///
    /// # Errors
    /// [`PathError`]
    pub fn ensure_again(&self, uid: u32) -> Result<(), PathError> {
        if let Some(parent) = self.path.parent() {
            let mut builder = fs::DirBuilder::new();
            let made = builder.recursive(true).mode(0o700).create(parent);
            made.map_err(|error| PathError::Io {
                path: parent.to_owned(),
                error,
            })?;
        }
        self.ensure(uid)
    }

    fn io(&self, error: io::Error) -> PathError {
        PathError::Io {
            path: self.path.clone(),
            error,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::os::unix::net::UnixListener;

    use super::*;

    struct Fixture {
        root: tempfile::TempDir,
        around: Surroundings,
    }

    impl Fixture {
        fn new() -> Self {
            let root = tempfile::tempdir().unwrap();
            let around = Surroundings {
                uid: nix::unistd::geteuid().as_raw(),
                given: None,
                xdg_runtime_dir: None,
                system_dir: root.path().join("run"),
                tmp_dir: root.path().join("tmp"),
            };
            fs::create_dir(&around.tmp_dir).unwrap();
            Self { root, around }
        }

        fn find(&self) -> RuntimeDir {
            RuntimeDir::find(&self.around).unwrap()
        }
    }

    fn chmod(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn the_rule_goes_from_the_variable_to_tmp() {
        let mut fixture = Fixture::new();
        let uid = fixture.around.uid;
        let tmp = fixture.find();
        assert_eq!(
            tmp.path(),
            fixture.around.tmp_dir.join(format!("sublet-{uid}"))
        );
        assert_eq!(tmp.source(), Source::Tmp);

        let xdg = fixture.root.path().join("xdg");
        fixture.around.xdg_runtime_dir = Some(xdg.clone().into());
        assert_eq!(fixture.find().source(), Source::Tmp, "no such directory");
        fs::create_dir(&xdg).unwrap();
        assert_eq!(fixture.find().path(), xdg.join("sublet"));
        assert_eq!(fixture.find().source(), Source::Xdg);

        fixture.around.given = Some("/srv/sublet".into());
        assert_eq!(fixture.find().path(), Path::new("/srv/sublet"));
        assert_eq!(fixture.find().source(), Source::Given);
        fixture.around.given = Some("srv/sublet".into());
        let error = RuntimeDir::find(&fixture.around).unwrap_err().to_string();
        assert!(error.contains("`srv/sublet`"), "{error}");
    }

    #[test]
    fn the_hosts_arbiter_counts_only_where_its_socket_is_roots_an_older_one_too() {
        for name in [API_SOCKET, OLDER_SOCKET] {
            let fixture = Fixture::new();
            let system = &fixture.around.system_dir;
            fs::create_dir(system).unwrap();
            fs::write(system.join(name), "").unwrap();
            assert_eq!(fixture.find().source(), Source::Tmp, "a plain file");
            fs::remove_file(system.join(name)).unwrap();
            let _listener = UnixListener::bind(system.join(name)).unwrap();
            let expected = if fixture.around.uid == 0 {
                Source::System
            } else {
                Source::Tmp
            };
            assert_eq!(fixture.find().source(), expected);
        }
    }

    #[test]
    fn a_directory_is_made_again_with_what_lies_above_it() {
        let fixture = Fixture::new();
        let uid = fixture.around.uid;
        let above = fixture.root.path().join("user");
        let dir = RuntimeDir::given(above.join("deep/sublet")).unwrap();
        assert!(dir.ensure(uid).is_err(), "a new one has its place");
        dir.ensure_again(uid).unwrap();
        let modes = [dir.path(), &above].map(|path| {
            let meta = fs::metadata(path).unwrap();
            meta.permissions().mode() & 0o777
        });
        assert_eq!(modes, [0o700; 2]);
        fs::remove_dir_all(&above).unwrap();
        fs::write(&above, "").unwrap();
        assert!(dir.ensure_again(uid).is_err());
    }

    #[test]
    fn roots_daemon_lives_in_the_systems_place() {
        let mut fixture = Fixture::new();
        fixture.around.uid = 0;
        let dir = RuntimeDir::find_for_daemon(&fixture.around).unwrap();
        assert_eq!(dir.source(), Source::System);
        fixture.around.uid = 1000;
        let dir = RuntimeDir::find_for_daemon(&fixture.around).unwrap();
        assert_eq!(dir.source(), Source::Tmp);
    }

    #[test]
    fn it_is_created_private_and_found_again() {
        let fixture = Fixture::new();
        let dir = fixture.find();
        dir.verify(fixture.around.uid).unwrap();
        assert!(!dir.path().exists(), "verify creates nothing");
        dir.ensure(fixture.around.uid).unwrap();
        assert_eq!(fs::metadata(dir.path()).unwrap().mode() & 0o7777, 0o700);
        dir.ensure(fixture.around.uid).unwrap();
        assert_eq!(dir.api_socket(), dir.path().join("api.sock"));
    }

    #[test]
    fn a_place_that_others_could_have_prepared_is_refused() {
        let fixture = Fixture::new();
        let dir = fixture.find();
        let uid = fixture.around.uid;

        fs::create_dir(dir.path()).unwrap();
        chmod(dir.path(), 0o750);
        let error = dir.ensure(uid).unwrap_err().to_string();
        assert!(
            error.contains("0750") && error.contains("chmod 700"),
            "{error}"
        );
        chmod(dir.path(), 0o700);
        dir.ensure(uid).unwrap();

        if uid == 0 {
            std::os::unix::fs::chown(dir.path(), Some(12345), None).unwrap();
            let error = dir.ensure(uid).unwrap_err();
            assert!(
                matches!(error, PathError::ForeignOwner { owner: 12345, .. }),
                "{error}"
            );
        } else {
            let error = dir.ensure(uid + 1).unwrap_err();
            assert!(matches!(error, PathError::ForeignOwner { .. }), "{error}");
        }

        fs::remove_dir(dir.path()).unwrap();
        fs::write(dir.path(), "").unwrap();
        assert!(matches!(dir.ensure(uid), Err(PathError::NotADirectory(_))));

        fs::remove_file(dir.path()).unwrap();
        symlink(fixture.root.path(), dir.path()).unwrap();
        assert!(matches!(dir.ensure(uid), Err(PathError::NotADirectory(_))));
    }

    #[test]
    fn a_directory_that_the_user_named_may_be_entered_but_not_written_by_others() {
        let fixture = Fixture::new();
        let uid = fixture.around.uid;
        let path = fixture.root.path().join("shared");
        fs::create_dir(&path).unwrap();
        let dir = RuntimeDir::given(path.clone()).unwrap();
        chmod(&path, 0o755);
        dir.ensure(uid).unwrap();
        chmod(&path, 0o1777);
        assert!(matches!(
            dir.ensure(uid),
            Err(PathError::OpenToOthers { .. })
        ));
        chmod(&path, 0o700);
        let link = fixture.root.path().join("link");
        symlink(&path, &link).unwrap();
        RuntimeDir::given(link).unwrap().ensure(uid).unwrap();
    }

    #[test]
    fn a_missing_parent_is_named() {
        let fixture = Fixture::new();
        let path = fixture.root.path().join("no/such");
        let error = RuntimeDir::given(path.clone())
            .unwrap()
            .ensure(fixture.around.uid)
            .unwrap_err();
        assert!(
            error.to_string().contains(path.to_str().unwrap()),
            "{error}"
        );
    }
}
