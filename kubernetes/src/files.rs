//! Files that are whole or not there, also after the power went: what is renamed or removed is so
//! for good when this returns.

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

/// Ends the name of a file that is being written. Its beginning is a point and the name that it
/// will have.
pub const UNFINISHED: &str = ".new";

/// Puts a file of these bytes and this mode at a path, in the place of what was there.
///
/// # Errors
/// Those of the disk; the file is as it was then.
pub fn replace(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let mut beside = tempfile::Builder::new()
        .prefix(&format!(".{name}."))
        .suffix(UNFINISHED)
        .tempfile_in(folder(path))?;
    beside.write_all(bytes)?;
    let file = beside.as_file();
    file.set_permissions(fs::Permissions::from_mode(mode))?;
    file.sync_all()?;
    beside.persist(path).map_err(|error| error.error)?;
    settle(path)
}

/// Gives a file another name in its directory.
///
/// # Errors
/// Those of the disk.
pub fn rename(from: &Path, to: &Path) -> io::Result<()> {
    fs::rename(from, to)?;
    settle(to)
}

/// Removes a file, if it is there.
///
/// # Errors
/// Those of the disk.
pub fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Ok(()) => settle(path),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

fn folder(path: &Path) -> &Path {
    let folder = path.parent().unwrap_or(Path::new("/"));
    if folder.as_os_str().is_empty() {
        Path::new(".")
    } else {
        folder
    }
}

/// Names are on the disk when their directory is.
fn settle(path: &Path) -> io::Result<()> {
    fs::File::open(folder(path))?.sync_all()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    #[test]
    fn a_file_is_replaced_whole_and_removed_for_good() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.json");
        replace(&path, b"one", 0o600).unwrap();
        replace(&path, b"two", 0o644).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o644);
        let other = dir.path().join("b.json");
        rename(&path, &other).unwrap();
        remove(&other).unwrap();
        remove(&other).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        // A directory in its place: nothing half written stays beside it.
        fs::create_dir(&path).unwrap();
        replace(&path, b"three", 0o600).unwrap_err();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
