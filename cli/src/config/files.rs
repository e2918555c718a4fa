//! Which quota files there are, in which order they count, and whose they must be.
//!
//! Every arbiter reads the host's: `config.toml` of a folder, then its `config.d/*.toml` in the
//! order of their names. A file that is named, or the user's own, is read by `sublet run` and by
//! that user's own arbiter.
//!
//! A user's file is never read by an arbiter that runs as root: it would read it with its own
//! rights.

use std::collections::hash_map::DefaultHasher;
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::hash::{Hash, Hasher};
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::error::{ConfigError, ConfigErrors};
use super::{Config, parse};

/// The host's folder, where nothing else is said.
const FOLDER: &str = "/etc/sublet";
/// Bytes of a file; people write some thousands at most.
const MAX_BYTES: u64 = 1 << 20;
/// Files of a folder.
const MAX_FILES: usize = 256;

/// Where `sublet run` looks for its user's file.
#[derive(Debug, Clone, Default)]
pub struct Places {
    /// `$SUBLET_CONFIG`
    pub variable: Option<PathBuf>,
    pub searched: Vec<PathBuf>,
}

impl Places {
    /// For `sublet run`, which also looks into the working directory.
    pub fn of_a_user() -> Self {
        let mut searched = vec!["sublet.toml".into()];
        searched.extend(own_file());
        Self {
            variable: variable("SUBLET_CONFIG"),
            searched,
        }
    }
}

fn variable(name: &str) -> Option<PathBuf> {
    let value = std::env::var_os(name).filter(|value: &OsString| !value.is_empty());
    value.map(PathBuf::from)
}

/// The user's own file, whether or not it is there.
fn own_file() -> Option<PathBuf> {
    let home = variable("XDG_CONFIG_HOME")
        .filter(|dir| dir.is_absolute())
        .or_else(|| Some(variable("HOME")?.join(".config")));
    Some(home?.join("sublet/config.toml"))
}

/// What an arbiter reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sources {
    pub folder: PathBuf,
    /// It was named, so it must be there.
    pub folder_is_named: bool,
    /// Must be there.
    pub named: Option<PathBuf>,
    /// Is read where there is none that is named.
    pub own: Option<PathBuf>,
    /// As whom it is read: files that somebody else can write are refused by root.
    pub uid: u32,
}

impl Sources {
    /// Of an arbiter of this user, or of one that is to be started. Paths are made absolute: its
    /// working directory is another one than that of who has named them.
    pub fn of_arbiter(config: Option<&Path>, folder: Option<&Path>) -> Self {
        let absolute = |path: PathBuf| std::path::absolute(&path).unwrap_or(path);
        let uid = nix::unistd::geteuid().as_raw();
        let folder = folder.map(Path::to_owned);
        let folder = folder
            .or_else(|| variable("SUBLET_CONFIG_DIR"))
            .map(absolute);
        let named = config.map(Path::to_owned);
        Self {
            folder_is_named: folder.is_some(),
            folder: folder.unwrap_or_else(|| FOLDER.into()),
            named: named.or_else(|| variable("SUBLET_CONFIG")).map(absolute),
            own: own_file().filter(|_| uid != 0).map(absolute),
            uid,
        }
    }

    /// Reads and checks all of them.
    ///
    /// # Errors
    /// Everything that is wrong in any of them; nothing of them counts then.
    pub fn load(&self) -> Result<Config, ConfigErrors> {
        let (mut config, mut errors) = (Config::default(), Vec::new());
        let mut fingerprint = DefaultHasher::new();
        let mut add = |read: Result<Config, ConfigErrors>, own: bool| match read {
            Ok(read) => {
                (read.paths.as_slice(), read.fingerprint).hash(&mut fingerprint);
                let before = std::mem::take(&mut config);
                config = if own {
                    before.and_own(read)
                } else {
                    before.then(read)
                };
            }
            Err(mut wrong) => errors.append(&mut wrong.0),
        };
        match self.files() {
            Ok(files) => {
                for path in files {
                    add(load(&path, Some(self.uid)), false);
                }
            }
            Err(error) => add(Err(error.into()), false),
        }
        match (&self.named, &self.own) {
            (Some(named), _) => add(load(named, Some(self.uid)), true),
            (None, Some(own)) => add(first_of(std::slice::from_ref(own), Some(self.uid)), true),
            (None, None) => {}
        }
        if !errors.is_empty() {
            return Err(ConfigErrors(errors));
        }
        config.fingerprint = fingerprint.finish();
        Ok(config)
    }

    /// Files of the folder, in the order in which they count.
    fn files(&self) -> Result<Vec<PathBuf>, ConfigError> {
        let main = self.folder.join("config.toml");
        let mut files = Vec::new();
        if is_there(&main)? {
            files.push(main);
        }
        let beside = self.folder.join("config.d");
        match fs::read_dir(&beside) {
            Ok(entries) => {
                guard(
                    &beside,
                    &fs::metadata(&beside).map_err(unreadable(&beside))?,
                    self.uid,
                )?;
                let mut named = Vec::new();
                for entry in entries {
                    let path = entry.map_err(unreadable(&beside))?.path();
                    let name = path.file_name().unwrap_or_default().as_encoded_bytes();
                    if name.ends_with(b".toml") && !name.starts_with(b".") {
                        named.push(path);
                    }
                }
                named.sort();
                files.append(&mut named);
            }
            Err(error) if is_absence(&error) => {}
            Err(error) => return Err(unreadable(&beside)(error)),
        }
        if files.len() > MAX_FILES {
            return Err(ConfigError::Untrusted {
                path: self.folder.clone(),
                reason: format!("it has {} files, more than {MAX_FILES}", files.len()),
            });
        }
        match fs::metadata(&self.folder) {
            Ok(found) => guard(&self.folder, &found, self.uid)?,
            Err(error) if is_absence(&error) && !self.folder_is_named => {}
            Err(error) => return Err(unreadable(&self.folder)(error)),
        }
        Ok(files)
    }

    /// Paths whose change may change what is read.
    pub fn watched(&self) -> Vec<PathBuf> {
        let mut watched = vec![
            self.folder.join("config.toml"),
            self.folder.join("config.d"),
        ];
        watched.extend(self.files().unwrap_or_default());
        watched.extend(self.named.clone().or_else(|| self.own.clone()));
        watched
    }
}

/// The first of these that exists; none: nothing.
pub fn first_of(paths: &[PathBuf], reader: Option<u32>) -> Result<Config, ConfigErrors> {
    let mut passed_over = Vec::new();
    for path in paths {
        match is_there(path) {
            Ok(true) => {
                let mut config = load(path, reader)?;
                config.passed_over = passed_over;
                return Ok(config);
            }
            Ok(false) => {}
            // In a folder that this user may not look into, such as the home of who has started the
            // job for another user, or a working directory: nobody has named a file there.
            Err(ConfigError::Unreadable {
                path,
                kind: io::ErrorKind::PermissionDenied,
                ..
            }) => {
                passed_over.push(format!(
                    "warning: whether there is a quota file {} cannot be seen (permission denied): none is taken",
                    path.display()
                ));
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(Config {
        passed_over,
        ..Config::default()
    })
}

/// Reads and checks one file; for an arbiter of the user `reader`, that it is nobody else's.
pub fn load(path: &Path, reader: Option<u32>) -> Result<Config, ConfigErrors> {
    let text = read(path, reader)?;
    let mut config = parse::parse(&text, &path.display().to_string())?;
    config.paths = vec![path.to_owned()];
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    config.fingerprint = hasher.finish();
    Ok(config)
}

fn read(path: &Path, reader: Option<u32>) -> Result<String, ConfigError> {
    // A pipe of that name would be waited for.
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(nix::libc::O_NONBLOCK | nix::libc::O_NOCTTY)
        .open(path)
        .map_err(unreadable(path))?;
    let found = file.metadata().map_err(unreadable(path))?;
    if !found.is_file() {
        let error = io::Error::other("it is no regular file");
        return Err(unreadable(path)(error));
    }
    if let Some(uid) = reader {
        guard(path, &found, uid)?;
        if let Some(folder) = path.parent().filter(|folder| folder.is_dir()) {
            guard(
                folder,
                &fs::metadata(folder).map_err(unreadable(folder))?,
                uid,
            )?;
        }
    }
    let text = read_text(file).map_err(unreadable(path))?;
    Ok(text)
}

/// The text of a file of this much at most.
///
/// # Errors
/// Those of reading it; it is longer, or no UTF-8.
pub(crate) fn read_text(file: File) -> io::Result<String> {
    let mut bytes = Vec::new();
    file.take(MAX_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(io::Error::other(format!(
            "it is longer than {MAX_BYTES} bytes"
        )));
    }
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        io::Error::other(format!("byte {at} of it is no UTF-8 text"))
    })
}

/// Where root reads, nobody but root may write: neither the file nor the folder in which it could
/// be exchanged.
fn guard(path: &Path, found: &fs::Metadata, uid: u32) -> Result<(), ConfigError> {
    const STICKY: u32 = 0o1000;
    if uid != 0 {
        return Ok(());
    }
    let mode = found.mode();
    // In a folder as /tmp nobody exchanges what is another's.
    let sticky = found.is_dir() && mode & STICKY != 0;
    let reason = if found.uid() != 0 && !sticky {
        format!(
            "it belongs to user {}, and this arbiter is root's",
            found.uid()
        )
    } else if mode & 0o002 != 0 && !sticky {
        format!("everybody can write it (mode {:03o})", mode & 0o777)
    } else if mode & 0o020 != 0 && found.gid() != 0 && !sticky {
        format!(
            "group {} can write it (mode {:03o})",
            found.gid(),
            mode & 0o777
        )
    } else {
        return Ok(());
    };
    Err(ConfigError::Untrusted {
        path: path.to_owned(),
        reason: format!("{reason}: chown it to root and take the others' right to write away"),
    })
}

fn is_there(path: &Path) -> Result<bool, ConfigError> {
    match fs::metadata(path) {
        Ok(_) => Ok(true),
        // A link to nothing is a mistake, or a change that is half done.
        Err(error) if is_absence(&error) && fs::symlink_metadata(path).is_err() => Ok(false),
        Err(error) => Err(unreadable(path)(error)),
    }
}

fn is_absence(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
    )
}

fn unreadable(path: &Path) -> impl Fn(io::Error) -> ConfigError + use<> {
    let path = path.to_owned();
    move |error| ConfigError::Unreadable {
        path: path.clone(),
        kind: error.kind(),
        error: error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// A folder with two files, and a user's own.
    fn sources(dir: &Path) -> Sources {
        fs::create_dir_all(dir.join("etc/config.d")).unwrap();
        Sources {
            folder: dir.join("etc"),
            folder_is_named: false,
            named: None,
            own: Some(dir.join("own.toml")),
            uid: nix::unistd::geteuid().as_raw(),
        }
    }

    fn write(dir: &Path, name: &str, text: impl AsRef<[u8]>) {
        fs::write(dir.join(name), text).unwrap();
    }

    #[test]
    fn files_count_in_the_order_of_their_names_and_the_user_s_own_comes_last() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        let sources = sources(dir);
        assert!(sources.load().unwrap().paths.is_empty());
        for (name, text) in [
            ("etc/config.toml", "a"),
            ("etc/config.d/20-c.toml", "c"),
            ("etc/config.d/10-b.toml", "b"),
            ("own.toml", "own"),
        ] {
            let text = format!(
                "[defaults]\nmem = \"1GiB\"\n[[user]]\nuser = \"{text}\"\n[[device]]\ndevice = 0\n\
                 [[rule]]\nmatch.name = \"{text}\"\nset.share = 0.5\n[limits]\njob_processes = {}\n",
                text.len() * 10
            );
            write(dir, name, text);
        }
        for ignored in ["etc/config.d/30.toml.bak", "etc/config.d/.40.toml"] {
            write(dir, ignored, "[gizmo]");
        }
        let config = sources.load().unwrap();
        let files: Vec<_> = config
            .paths
            .iter()
            .map(|path| path.strip_prefix(dir).unwrap().display().to_string())
            .collect();
        let all = [
            "etc/config.toml",
            "etc/config.d/10-b.toml",
            "etc/config.d/20-c.toml",
            "own.toml",
        ];
        assert_eq!(files, all);
        let users: Vec<_> = ["a", "b", "c", "own"]
            .into_iter()
            .map(|user| {
                config
                    .users
                    .iter()
                    .position(|rule| rule.user[0].matches(user))
            })
            .collect();
        assert_eq!(
            users,
            [Some(2), Some(1), Some(0), Some(3)],
            "the first that matches"
        );
        let from = |rule: &super::super::JobRule| rule.from.rsplit('/').next().unwrap().to_owned();
        let rules: Vec<_> = config.rules.iter().map(from).collect();
        let expected = [
            "config.toml:7:1",
            "10-b.toml:7:1",
            "20-c.toml:7:1",
            "own.toml:1:1",
            "own.toml:7:1",
        ];
        assert_eq!(rules, expected, "defaults of its own beat the host's rules");
        assert_eq!(config.limits.job_processes, Some(10), "the host's");
        let watched = sources.watched();
        assert!(config.paths.iter().all(|path| watched.contains(path)));
        assert!(watched.contains(&dir.join("etc/config.d")));
        let before = config.fingerprint;
        assert_eq!(sources.load().unwrap().fingerprint, before);
        write(dir, "own.toml", "# nothing\n");
        assert_ne!(sources.load().unwrap().fingerprint, before);
    }

    #[test]
    fn what_cannot_be_read_or_trusted_is_an_error_with_its_reason() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        let mut sources = sources(dir);
        let reason = |sources: &Sources| {
            let errors = sources.load().unwrap_err().0;
            assert_eq!(errors.len(), 1, "{errors:?}");
            errors[0].to_string()
        };
        let main = dir.join("etc/config.toml");
        std::os::unix::fs::symlink("nowhere", &main).unwrap();
        assert!(reason(&sources).contains("config.toml cannot be read"));
        fs::remove_file(&main).unwrap();
        nix::unistd::mkfifo(&main, nix::sys::stat::Mode::from_bits_truncate(0o600)).unwrap();
        assert!(reason(&sources).contains("no regular file"));
        fs::remove_file(&main).unwrap();
        write(dir, "etc/config.toml", b"# \xff\n");
        assert!(reason(&sources).contains("byte 2 of it is no UTF-8"));
        write(dir, "etc/config.toml", vec![b'#'; 2 << 20]);
        assert!(reason(&sources).contains("longer than 1048576 bytes"));
        write(dir, "etc/config.toml", "");
        assert!(sources.load().is_ok());
        if sources.uid == 0 {
            for (mode, words) in [(0o646, "everybody"), (0o664, "group 12")] {
                nix::unistd::chown(&main, None, Some(nix::unistd::Gid::from_raw(12))).unwrap();
                fs::set_permissions(&main, fs::Permissions::from_mode(mode)).unwrap();
                assert!(reason(&sources).contains(words), "{}", reason(&sources));
            }
            fs::set_permissions(&main, fs::Permissions::from_mode(0o644)).unwrap();
            nix::unistd::chown(&main, Some(nix::unistd::Uid::from_raw(12)), None).unwrap();
            assert!(reason(&sources).contains("belongs to user 12"));
            nix::unistd::chown(&main, Some(nix::unistd::Uid::from_raw(0)), None).unwrap();
            let folder = dir.join("etc/config.d");
            fs::set_permissions(&folder, fs::Permissions::from_mode(0o777)).unwrap();
            assert!(reason(&sources).contains("config.d is not taken"));
            fs::set_permissions(&folder, fs::Permissions::from_mode(0o755)).unwrap();
        }
        sources.folder = dir.join("none");
        assert!(sources.load().is_ok(), "none is no error");
        sources.folder_is_named = true;
        assert!(reason(&sources).contains("none cannot be read"));
    }

    /// A small generator, so that a failure comes again.
    struct Random(u64);

    impl Random {
        fn below(&mut self, most: usize) -> usize {
            self.0 = self
                .0
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            // CAST: 31 bits.
            (self.0 >> 33) as usize % most.max(1)
        }
    }

    fn mutated(good: &str, random: &mut Random) -> Vec<u8> {
        let mut bytes = good.as_bytes().to_vec();
        for _ in 0..=random.below(3) {
            let at = random.below(bytes.len());
            match random.below(6) {
                0 => bytes[at] = b"#\"'=[]{},.\n\t\0 0z-\xff"[random.below(18)],
                1 => bytes.truncate(at),
                2 => {
                    let end = (at + 1 + random.below(40)).min(bytes.len());
                    bytes.drain(at..end);
                }
                3 => {
                    let words = [
                        "[[rule]]",
                        "share = 7",
                        "\"",
                        "mem = true",
                        "\u{0}",
                        "[a.b]",
                        "=",
                        "1e999",
                    ];
                    bytes.splice(at..at, words[random.below(8)].bytes());
                }
                4 => {
                    let end = (at + random.below(200)).min(bytes.len());
                    let again = bytes[at..end].to_vec();
                    bytes.splice(at..at, again);
                }
                _ => bytes.swap(at, 0),
            }
            if bytes.is_empty() {
                bytes.push(b'[');
            }
        }
        bytes
    }

    #[test]
    fn a_thousand_mutated_files_are_refused_with_their_places_or_taken_whole() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        let sources = sources(dir);
        let example = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/sublet.toml");
        let good = fs::read_to_string(example).unwrap();
        let beside = "[[rule]]\ncap.mem = \"1GiB\"\n";
        write(dir, "etc/config.d/beside.toml", beside);
        let mut random = Random(20);
        let (mut refused, mut taken) = (0, 0);
        while refused < 1000 {
            let bytes = mutated(&good, &mut random);
            write(dir, "etc/config.toml", &bytes);
            match sources.load() {
                Ok(config) => {
                    assert_eq!(config.paths.len(), 2, "both");
                    taken += 1;
                }
                Err(errors) => {
                    refused += 1;
                    assert!(!errors.0.is_empty());
                    for error in &errors.0 {
                        let text = error.to_string();
                        let is_text = std::str::from_utf8(&bytes).is_ok();
                        let ConfigError::Wrong {
                            file,
                            line,
                            column,
                            message,
                        } = error
                        else {
                            assert!(!is_text && text.contains("UTF-8"), "{text}");
                            continue;
                        };
                        let lines = bytes.iter().filter(|byte| **byte == b'\n').count() + 1;
                        assert!(file.ends_with("etc/config.toml"), "{text}");
                        assert!((1..=lines).contains(line) && *column >= 1, "{text}");
                        assert!(!message.is_empty() && !text.contains('\n'), "{text}");
                    }
                }
            }
            assert!(taken < 5000, "hardly any is refused");
        }
        println!(
            "now: {refused} mutated files refused with file, line and column, {taken} were good"
        );
    }
}
