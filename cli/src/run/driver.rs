//! The driver library that the job will use, by absolute path: the host's, or the simulated one.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use control::paths::{DRIVER_DIRS, DRIVER_NAME};

use super::elf;
use super::install::Install;
use super::ld_cache;

/// The library, and whether it is the simulated one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Driver {
    pub path: PathBuf,
    /// Why it is simulated; `None` for a real one.
    pub simulated: Option<Simulated>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Simulated {
    Asked,
    NoDriver,
}

impl Simulated {
    pub fn reason(self) -> &'static str {
        match self {
            Self::Asked => "asked for by --sim",
            Self::NoDriver => "this host has no libcuda.so.1",
        }
    }
}

/// What was asked for on the command line.
#[derive(Debug, Clone, Copy)]
pub enum Wish<'a> {
    Any,
    Simulated,
    This(&'a Path),
}

#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    #[error("--driver {}: this is no shared library for this machine", .0.display())]
    NotALibrary(PathBuf),
    #[error("--driver {}: this is sublet's own library; name the real libcuda.so.1", .0.display())]
    Ours(PathBuf),
    #[error(
        "{why}, and the simulated driver is not at {} (set SUBLET_SIM_DIR to the directory that has its {DRIVER_NAME})", .missing.display()
    )]
    NoSimulation { why: &'static str, missing: PathBuf },
}

/// # Errors
/// [`DriverError`]
pub fn find(
    wish: Wish<'_>,
    install: &Install,
    library_path: Option<&OsStr>,
) -> Result<Driver, DriverError> {
    let real = match wish {
        Wish::This(path) => {
            let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
            if !elf::is_library(&path) {
                return Err(DriverError::NotALibrary(path));
            }
            if is_ours(&path, install) {
                return Err(DriverError::Ours(path));
            }
            Some(path)
        }
        Wish::Any => {
            let cache = fs::read("/etc/ld.so.cache").unwrap_or_default();
            candidates(library_path, &cache).find(|path| is_driver(path, install))
        }
        Wish::Simulated => None,
    };
    if let Some(path) = real {
        return Ok(Driver {
            path,
            simulated: None,
        });
    }
    let simulated = match wish {
        Wish::Simulated => Simulated::Asked,
        _ => Simulated::NoDriver,
    };
    let path = install.sim_dir().join(DRIVER_NAME);
    if !elf::is_library(&path) {
        return Err(DriverError::NoSimulation {
            why: simulated.reason(),
            missing: path,
        });
    }
    Ok(Driver {
        path,
        simulated: Some(simulated),
    })
}

/// Where ld.so would look, in its order, then where it might have.
fn candidates(library_path: Option<&OsStr>, cache: &[u8]) -> impl Iterator<Item = PathBuf> {
    let from_path: Vec<_> = library_path
        .map(|path| {
            std::env::split_paths(path)
                .filter(|dir| dir.is_absolute())
                .collect()
        })
        .unwrap_or_default();
    from_path
        .into_iter()
        .map(|dir| dir.join(DRIVER_NAME))
        .chain(ld_cache::lookup(cache, DRIVER_NAME))
        .chain(DRIVER_DIRS.map(|dir| Path::new(dir).join(DRIVER_NAME)))
}

/// A library for this machine that is neither ours nor one of the toolkit's stubs, which only link.
fn is_driver(path: &Path, install: &Install) -> bool {
    let stub = |path: &Path| path.parent().is_some_and(|dir| dir.ends_with("stubs"));
    let Ok(real) = fs::canonicalize(path) else {
        return false;
    };
    !stub(path) && !stub(&real) && elf::is_library(&real) && !is_ours(&real, install)
}

/// The preload library and the simulated driver both answer to the driver's name.
fn is_ours(path: &Path, install: &Install) -> bool {
    let same = |ours: &Path| match (fs::metadata(path), fs::metadata(ours)) {
        (Ok(a), Ok(b)) => (a.dev(), a.ino()) == (b.dev(), b.ino()),
        _ => false,
    };
    let name = path.file_name().unwrap_or_default();
    name.as_encoded_bytes().starts_with(b"libsublet")
        || same(install.library())
        || same(&install.sim_dir().join(DRIVER_NAME))
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Fixture {
        dir: tempfile::TempDir,
        install: Install,
    }

    impl Fixture {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let at = |name: &str| dir.path().join(name);
            for name in ["sim", "real", "stubs", "text"] {
                fs::create_dir(at(name)).unwrap();
            }
            library(&at("libsublet.so"), 0);
            library(&at("sim/libcuda.so.1"), 1);
            library(&at("stubs/libcuda.so.1"), 2);
            fs::write(at("text/libcuda.so.1"), "INPUT(-lcuda)").unwrap();
            let install = Install::at(at("libsublet.so"), at("sim"));
            Self { dir, install }
        }

        fn at(&self, name: &str) -> PathBuf {
            fs::canonicalize(self.dir.path()).unwrap().join(name)
        }

        /// What is found in these directories alone, as if the host had none of its own.
        fn first_in(&self, dirs: &[&str]) -> Option<PathBuf> {
            let path = std::env::join_paths(dirs.iter().map(|dir| self.at(dir))).unwrap();
            candidates(Some(&path), b"")
                .take(dirs.len())
                .find(|path| is_driver(path, &self.install))
        }
    }

    /// The first bytes of a library, which is all that is looked at.
    fn library(path: &Path, mark: u8) {
        let mut bytes = fs::read(std::env::current_exe().unwrap()).unwrap();
        bytes.truncate(64);
        bytes.push(mark);
        fs::write(path, bytes).unwrap();
    }

    #[test]
    fn ours_stubs_and_scripts_are_passed_over() {
        let fixture = Fixture::new();
        assert_eq!(fixture.first_in(&["text", "stubs", "sim"]), None);
        std::os::unix::fs::symlink(fixture.at("libsublet.so"), fixture.at("real/libcuda.so.1"))
            .unwrap();
        assert_eq!(fixture.first_in(&["real"]), None, "a link to our library");
        fs::remove_file(fixture.at("real/libcuda.so.1")).unwrap();
        library(&fixture.at("real/libcuda.so.535.1"), 3);
        std::os::unix::fs::symlink("libcuda.so.535.1", fixture.at("real/libcuda.so.1")).unwrap();
        assert_eq!(
            fixture.first_in(&["text", "stubs", "sim", "real"]),
            Some(fixture.at("real/libcuda.so.1"))
        );
    }

    #[test]
    fn a_wish_is_followed_or_refused() {
        let fixture = Fixture::new();
        fn find(wish: Wish<'_>, fixture: &Fixture) -> Result<Driver, DriverError> {
            super::find(wish, &fixture.install, None)
        }
        let driver = find(Wish::Simulated, &fixture).unwrap();
        assert_eq!(driver.simulated, Some(Simulated::Asked));
        assert!(driver.path.ends_with("sim/libcuda.so.1"));

        library(&fixture.at("real/mine.so"), 4);
        let driver = find(Wish::This(&fixture.at("real/mine.so")), &fixture).unwrap();
        assert_eq!(
            (driver.path, driver.simulated),
            (fixture.at("real/mine.so"), None)
        );
        assert!(matches!(
            find(Wish::This(&fixture.at("text/libcuda.so.1")), &fixture),
            Err(DriverError::NotALibrary(_))
        ));
        assert!(matches!(
            find(Wish::This(&fixture.at("libsublet.so")), &fixture),
            Err(DriverError::Ours(_))
        ));
        fs::remove_file(fixture.at("sim/libcuda.so.1")).unwrap();
        let error = find(Wish::Simulated, &fixture).unwrap_err().to_string();
        assert!(
            error.contains("SUBLET_SIM_DIR") && error.contains("--sim"),
            "{error}"
        );
    }
}
