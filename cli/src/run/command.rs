//! Finding the command as execvp(3) would, before anything is started for it.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::unistd::{AccessFlags, access, getegid, geteuid};

use super::elf;

/// Why there is nothing to execute.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommandError {
    #[error("command `{}` not found: give its path, or add its directory to PATH", .0.display())]
    NotFound(OsString),
    #[error("`{}` cannot be executed: {reason}", .path.display())]
    NotExecutable { path: PathBuf, reason: String },
}

/// The file that `command` names: itself where it has a slash, else the first of that name in
/// `path`.
///
/// # Errors
/// [`CommandError`]: nothing of that name, or nothing that this user may execute.
pub fn find(command: &OsStr, path: Option<&OsStr>) -> Result<PathBuf, CommandError> {
    if command.is_empty() {
        return Err(CommandError::NotFound(command.to_owned()));
    }
    if command.as_bytes().contains(&b'/') {
        let file = PathBuf::from(command);
        return match check(&file) {
            Fit::Yes => Ok(file),
            Fit::Absent => Err(CommandError::NotFound(command.to_owned())),
            Fit::No(reason) => Err(CommandError::NotExecutable { path: file, reason }),
        };
    }
    // What execvp uses where PATH is unset (confstr _CS_PATH).
    let path = path.unwrap_or(OsStr::new("/bin:/usr/bin"));
    let mut refused = None;
    for dir in std::env::split_paths(path) {
        let dir = if dir.as_os_str().is_empty() {
            Path::new(".").to_owned()
        } else {
            dir
        };
        let file = dir.join(command);
        match check(&file) {
            Fit::Yes => return Ok(file),
            Fit::Absent => {}
            Fit::No(reason) => {
                refused.get_or_insert(CommandError::NotExecutable { path: file, reason });
            }
        }
    }
    Err(refused.unwrap_or_else(|| CommandError::NotFound(command.to_owned())))
}

enum Fit {
    Yes,
    Absent,
    No(String),
}

fn check(file: &Path) -> Fit {
    let meta = match fs::metadata(file) {
        Ok(meta) => meta,
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
            return Fit::No("permission denied on the way to it".into());
        }
        Err(_) => return Fit::Absent,
    };
    if meta.is_dir() {
        return Fit::No("it is a directory".into());
    }
    if access(file, AccessFlags::X_OK).is_err() {
        return Fit::No(format!(
            "permission denied (is `chmod +x {}` missing?)",
            file.display()
        ));
    }
    match interpreter(file) {
        Some(interpreter) if !interpreter.exists() => Fit::No(format!(
            "its interpreter {} does not exist",
            interpreter.display()
        )),
        _ => Fit::Yes,
    }
}

/// Why the preload library will not get into `program`, or into its interpreter; `None` where it
/// will.
pub fn out_of_reach(program: &Path) -> Option<String> {
    let file = interpreter(program).unwrap_or_else(|| program.to_owned());
    if elf::is_static_program(&file) {
        return Some(format!("{} is statically linked", file.display()));
    }
    if elf::is_musl_program(&file) {
        return Some(format!(
            "{} is a program of musl's, whose loader cannot load the library",
            file.display()
        ));
    }
    let meta = fs::metadata(&file).ok()?;
    // The loader takes no library from a path for a program that runs with another's rights
    // (ld.so(8)).
    let gains = (meta.mode() & 0o4000 != 0 && meta.uid() != geteuid().as_raw())
        || (meta.mode() & 0o2000 != 0 && meta.gid() != getegid().as_raw());
    gains.then(|| {
        format!(
            "{} runs with the rights of another user or group",
            file.display()
        )
    })
}

/// Whether `program`, or its interpreter, does not even start with the preload library in its
/// environment.
pub fn must_be_without(program: &Path) -> bool {
    elf::is_musl_program(&interpreter(program).unwrap_or_else(|| program.to_owned()))
}

/// The interpreter on a script's first line, where it is an absolute path.
fn interpreter(file: &Path) -> Option<PathBuf> {
    // As much as the kernel looks at (BINPRM_BUF_SIZE, since Linux 5.1).
    let mut head = Vec::with_capacity(256);
    File::open(file)
        .ok()?
        .take(256)
        .read_to_end(&mut head)
        .ok()?;
    let line = head.strip_prefix(b"#!")?.split(|b| *b == b'\n').next()?;
    let word = line
        .trim_ascii_start()
        .split(|b| matches!(b, b' ' | b'\t'))
        .next()?;
    let path = PathBuf::from(OsString::from_vec(word.to_vec()));
    path.is_absolute().then_some(path)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn file(dir: &Path, name: &str, text: &str, mode: u32) -> PathBuf {
        let path = dir.join(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        path
    }

    fn found(command: &str, path: &[&Path]) -> Result<PathBuf, CommandError> {
        find(command.as_ref(), Some(&std::env::join_paths(path).unwrap()))
    }

    #[test]
    fn the_first_executable_in_path_is_taken() {
        let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (a, b) = (a.path(), b.path());
        file(a, "prog", "#!/bin/sh\n", 0o644);
        let good = file(b, "prog", "#!/bin/sh\n", 0o755);
        assert_eq!(
            found("prog", &[a, b]),
            Ok(good),
            "the one that is not executable is passed over"
        );
        let error = found("prog", &[a]).unwrap_err().to_string();
        assert!(error.contains("chmod +x"), "{error}");
        assert!(matches!(found("prog", &[]), Err(CommandError::NotFound(_))));
        assert!(matches!(found("", &[b]), Err(CommandError::NotFound(_))));
        assert!(find("sh".as_ref(), None).is_ok());
    }

    #[test]
    fn a_path_is_itself() {
        let dir = tempfile::tempdir().unwrap();
        let good = file(dir.path(), "prog", "", 0o755);
        assert_eq!(found(good.to_str().unwrap(), &[]), Ok(good));
        assert!(matches!(
            found(dir.path().join("none").to_str().unwrap(), &[]),
            Err(CommandError::NotFound(_))
        ));
        let error = found(&format!("{}/", dir.path().display()), &[]).unwrap_err();
        assert!(error.to_string().contains("directory"), "{error}");
    }

    #[test]
    fn a_script_needs_its_interpreter() {
        let dir = tempfile::tempdir().unwrap();
        file(dir.path(), "bad", "#! /no/such/python -u\n", 0o755);
        let error = found("bad", &[dir.path()]).unwrap_err().to_string();
        assert!(error.contains("/no/such/python"), "{error}");
        file(dir.path(), "plain", "echo\n", 0o755);
        found("plain", &[dir.path()]).unwrap();
    }

    #[test]
    fn programs_with_anothers_rights_are_out_of_reach() {
        let dir = tempfile::tempdir().unwrap();
        let plain = file(dir.path(), "plain", "text", 0o755);
        assert_eq!(out_of_reach(&plain), None);
        let own = file(dir.path(), "own", "text", 0o4755);
        assert_eq!(out_of_reach(&own), None, "one's own rights are no gain");
        if geteuid().is_root() {
            std::os::unix::fs::chown(&own, Some(12345), None).unwrap();
            fs::set_permissions(&own, fs::Permissions::from_mode(0o4755)).unwrap();
            let reason = out_of_reach(&own).unwrap();
            assert!(reason.contains("own runs with"), "{reason}");
            let script = file(
                dir.path(),
                "script",
                &format!("#!{}\n", own.display()),
                0o755,
            );
            assert_eq!(out_of_reach(&script), Some(reason), "by its interpreter");
        }
    }
}
