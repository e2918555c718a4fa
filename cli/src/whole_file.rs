//! Files that others may be reading: they find the old one or the new one, and none that is half
//! written.

use std::fs::Permissions;
use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

/// Puts a file at a path, in the place of what was there. `mode`: who may read it, whatever the
/// umask says.
///
/// # Errors
/// Those of the disk; what was there is as it was then, and nothing is beside it.
pub fn replace(path: &Path, content: &[u8], mode: Option<u32>) -> io::Result<()> {
    let folder = path.parent().filter(|it| !it.as_os_str().is_empty());
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    // A name that nobody can know: in a folder of somebody else's a link may lie under any other.
    let mut file = tempfile::Builder::new()
        .prefix(&format!(".{name}."))
        .suffix(".new")
        .permissions(Permissions::from_mode(0o666))
        .tempfile_in(folder.unwrap_or(Path::new(".")))?;
    file.write_all(content)?;
    if let Some(mode) = mode {
        file.as_file()
            .set_permissions(Permissions::from_mode(mode))?;
    }
    file.as_file().sync_all()?;
    file.persist(path).map_err(|error| error.error)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt as _, symlink};

    use super::*;

    #[test]
    fn a_file_is_replaced_as_a_whole_and_follows_no_link() {
        let root = tempfile::tempdir().expect("a folder");
        let theirs = root.path().join("theirs");
        fs::write(&theirs, "theirs").expect("written");
        let path = root.path().join("sublet.json");
        for link in ["sublet.json", "sublet.json.new", ".sublet.json.new"] {
            symlink(&theirs, root.path().join(link)).expect("a link");
        }
        replace(&path, b"one\n", None).expect("written");
        replace(&path, b"two\n", Some(0o606)).expect("written");
        assert_eq!(fs::read_to_string(&path).expect("read"), "two\n");
        let about = fs::symlink_metadata(&path).expect("a file");
        assert!(about.is_file() && about.mode() & 0o777 == 0o606);
        assert_eq!(fs::read_to_string(&theirs).expect("read"), "theirs");
    }

    #[test]
    fn what_cannot_be_replaced_leaves_nothing_beside_it() {
        let root = tempfile::tempdir().expect("a folder");
        fs::create_dir(root.path().join("taken")).expect("a folder");
        replace(&root.path().join("taken"), b"x", None).expect_err("a folder");
        assert_eq!(fs::read_dir(root.path()).expect("listed").count(), 1);
    }
}
