//! Sockets in the kubelet's directories.

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};

/// Why there is no socket.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    #[error("the socket path {} is longer than the 107 bytes a Unix socket allows (give a shorter directory)", .0.display())]
    TooLong(PathBuf),
    #[error("{} is there and no socket: it is not removed (give another directory, or remove it)", .0.display())]
    NotASocket(PathBuf),
    #[error("cannot listen at {}: {error} (does the directory exist, and may this user write there?)", .path.display())]
    Io { path: PathBuf, error: io::Error },
}

/// Longest path of a socket.
const LONGEST: usize = 107;

/// Listens at a path, in the place of what listened there before. A peer that sees the socket can
/// connect: it gets its name when it listens. Until then its name begins with a point, which a
/// kubelet that watches the directory passes over.
///
/// # Errors
/// [`SocketError`]
pub fn listen(path: &Path) -> Result<UnixListener, SocketError> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let hidden = path.with_file_name(format!(".{name}"));
    if hidden.as_os_str().len() > LONGEST {
        return Err(SocketError::TooLong(hidden));
    }
    let io = |error: io::Error| SocketError::Io {
        path: path.to_owned(),
        error,
    };
    for old in [&hidden, &path.to_owned()] {
        match fs::symlink_metadata(old) {
            Ok(there) if there.file_type().is_socket() => {}
            Ok(_) => return Err(SocketError::NotASocket(old.clone())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(io(error)),
        }
    }
    match fs::remove_file(&hidden) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(io(error)),
        _ => {}
    }
    let listener = UnixListener::bind(&hidden).map_err(io)?;
    fs::set_permissions(&hidden, fs::Permissions::from_mode(0o600)).map_err(io)?;
    fs::rename(&hidden, path).map_err(io)?;
    Ok(listener)
}

/// Which socket is at a path: another one is another number. `None`: none is.
pub fn identity(path: &Path) -> Option<(u64, u64, i64, i64)> {
    let there = fs::symlink_metadata(path).ok()?;
    let is_socket = there.file_type().is_socket();
    is_socket.then(|| (there.dev(), there.ino(), there.ctime(), there.ctime_nsec()))
}

/// Whether an error of `accept` says nothing of the listener: descriptors or memory are short, or a
/// peer has gone.
pub fn is_passing(error: &io::Error) -> bool {
    use nix::libc::{ECONNABORTED, EINTR, EMFILE, ENFILE, ENOBUFS, ENOMEM};
    let passing = [ECONNABORTED, EINTR, EMFILE, ENFILE, ENOBUFS, ENOMEM];
    error.raw_os_error().is_some_and(|e| passing.contains(&e))
}

/// Whether the kernel says that the other side is root, or our own user.
pub fn may_call(stream: &impl AsFd) -> bool {
    let own = nix::unistd::geteuid().as_raw();
    getsockopt(stream, PeerCredentials).is_ok_and(|peer| peer.uid() == 0 || peer.uid() == own)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_takes_the_place_of_the_one_before_and_of_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.sock");
        assert_eq!(identity(&path), None);
        let first = listen(&path).unwrap();
        let before = identity(&path);
        assert!(before.is_some());
        drop(first);
        let _second = listen(&path).unwrap();
        assert_ne!(identity(&path), before);
        assert!(std::os::unix::net::UnixStream::connect(&path).is_ok());
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);

        let file = dir.path().join("file");
        fs::write(&file, "mine").unwrap();
        assert!(matches!(listen(&file), Err(SocketError::NotASocket(_))));
        assert_eq!(fs::read(&file).unwrap(), b"mine");
        let long = dir.path().join("x".repeat(120));
        assert!(matches!(listen(&long), Err(SocketError::TooLong(_))));
        let nowhere = dir.path().join("no/such/dir");
        assert!(matches!(listen(&nowhere), Err(SocketError::Io { .. })));
    }

    #[test]
    fn a_shortage_says_nothing_of_the_listener() {
        use nix::libc::{EBADF, ECONNABORTED, EINVAL, EMFILE, ENFILE};
        for passing in [ENFILE, EMFILE, ECONNABORTED] {
            assert!(is_passing(&io::Error::from_raw_os_error(passing)));
        }
        for broken in [EBADF, EINVAL] {
            assert!(!is_passing(&io::Error::from_raw_os_error(broken)));
        }
    }
}
