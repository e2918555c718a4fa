//! Where sublet's own libraries lie.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use super::elf;

const LIBRARY: &str = "libsublet.so";

/// The preload library, and the directory of the simulated driver and NVML.
#[derive(Debug, Clone)]
pub struct Install {
    library: PathBuf,
    sim_dir: PathBuf,
}

#[derive(Debug, thiserror::Error)]
pub enum InstallError {
    #[error("{LIBRARY} is not where it belongs: looked at {} (install it next to `sublet`, or set SUBLET_LIBRARY)", .0.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", "))]
    NoLibrary(Vec<PathBuf>),
    #[error("the Python module for --step-hook is not where it belongs: looked at {}", .0.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", "))]
    NoStepHook(Vec<PathBuf>),
    #[error("{} is no shared library for this machine (build it anew, or set SUBLET_LIBRARY)", .0.display())]
    NotALibrary(PathBuf),
    #[error("the path of the preload library, {}, has a space, a colon or a word such as $ORIGIN in it, which LD_PRELOAD cannot express (move it, or set SUBLET_LIBRARY)", .0.display())]
    Unpreloadable(PathBuf),
}

impl Install {
    /// `SUBLET_LIBRARY` and `SUBLET_SIM_DIR` where set; else next to the executable, else in
    /// `../lib/sublet` from it.
    ///
    /// # Errors
    /// [`InstallError`] where there is no usable preload library. The simulated driver is only
    /// looked at when it is needed.
    pub fn find(
        executable: &Path,
        var: impl Fn(&str) -> Option<OsString>,
    ) -> Result<Self, InstallError> {
        let var = |name: &str| {
            var(name)
                .filter(|value| !value.is_empty())
                .map(PathBuf::from)
        };
        let here = executable.parent().unwrap_or(Path::new("/"));
        let dirs = [here.to_owned(), here.join("../lib/sublet")];
        let places: Vec<PathBuf> = match var("SUBLET_LIBRARY") {
            Some(given) => vec![given],
            None => dirs.iter().map(|dir| dir.join(LIBRARY)).collect(),
        };
        let Some(library) = places.iter().find_map(|path| fs::canonicalize(path).ok()) else {
            return Err(InstallError::NoLibrary(places));
        };
        if !elf::is_library(&library) {
            return Err(InstallError::NotALibrary(library));
        }
        let bytes = library.as_os_str().as_encoded_bytes();
        if bytes.iter().any(|b| b.is_ascii_whitespace() || *b == b':') || is_expanded(bytes) {
            return Err(InstallError::Unpreloadable(library));
        }
        let sim_dir = match var("SUBLET_SIM_DIR") {
            Some(given) => given,
            None => {
                let places = dirs.map(|dir| dir.join("sim"));
                let found = places.iter().find(|dir| dir.is_dir());
                found.unwrap_or(&places[0]).clone()
            }
        };
        Ok(Self {
            library,
            sim_dir: fs::canonicalize(&sim_dir).unwrap_or(sim_dir),
        })
    }

    /// The folder that has a Python process find the ends of iterations by itself: beside the
    /// library, or in the checkout that it was built in.
    ///
    /// # Errors
    /// [`InstallError::NoStepHook`]
    pub fn step_hook(&self) -> Result<PathBuf, InstallError> {
        let here = self.library.parent().unwrap_or(Path::new("/"));
        let places = [here.to_owned(), here.join("../..")].map(|dir| dir.join("python/step-hook"));
        let found = places.iter().find_map(|dir| fs::canonicalize(dir).ok());
        found.ok_or_else(|| InstallError::NoStepHook(places.to_vec()))
    }

    #[cfg(test)]
    pub fn at(library: PathBuf, sim_dir: PathBuf) -> Self {
        Self { library, sim_dir }
    }

    /// `libsublet.so`, absolute.
    pub fn library(&self) -> &Path {
        &self.library
    }

    /// The directory of the simulated `libcuda.so.1` and `libnvidia-ml.so.1`; it may not exist.
    pub fn sim_dir(&self) -> &Path {
        &self.sim_dir
    }
}

/// Whether the dynamic linker puts something else in place of a word in this path (ld.so(8)): it
/// would look elsewhere, and go on without the library.
fn is_expanded(path: &[u8]) -> bool {
    let words: [&[u8]; 3] = [b"ORIGIN", b"LIB", b"PLATFORM"];
    path.split(|byte| *byte == b'$').skip(1).any(|rest| {
        let rest = rest.strip_prefix(b"{").unwrap_or(rest);
        words.iter().any(|word| rest.starts_with(word))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn library(path: &Path) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let mut bytes = fs::read(std::env::current_exe().unwrap()).unwrap();
        bytes.truncate(64);
        fs::write(path, bytes).unwrap();
    }

    #[test]
    fn libraries_are_next_to_the_program_or_in_lib() {
        let root = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(root.path()).unwrap();
        let program = root.join("bin/sublet");
        fs::create_dir(root.join("bin")).unwrap();
        let find = || Install::find(&program, |_| None);
        let error = find().unwrap_err().to_string();
        assert!(
            error.contains("bin/libsublet.so") && error.contains("SUBLET_LIBRARY"),
            "{error}"
        );

        library(&root.join("lib/sublet/libsublet.so"));
        library(&root.join("lib/sublet/sim/libcuda.so.1"));
        let install = find().unwrap();
        assert_eq!(install.library(), root.join("lib/sublet/libsublet.so"));
        assert_eq!(install.sim_dir(), root.join("lib/sublet/sim"));

        library(&root.join("bin/libsublet.so"));
        library(&root.join("bin/sim/libcuda.so.1"));
        let install = find().unwrap();
        assert_eq!(install.library(), root.join("bin/libsublet.so"));
        assert_eq!(install.sim_dir(), root.join("bin/sim"));

        fs::write(root.join("bin/libsublet.so"), "text").unwrap();
        assert!(matches!(find(), Err(InstallError::NotALibrary(_))));
    }

    #[test]
    fn variables_win_and_must_be_right() {
        let root = tempfile::tempdir().unwrap();
        let good = root.path().join("mine.so");
        let spaced = root.path().join("a b/mine.so");
        let expanded = root.path().join("${ORIGIN}/mine.so");
        let dollar = root.path().join("$HOME/mine.so");
        for path in [&good, &spaced, &expanded, &dollar] {
            library(path);
        }
        let find = |path: &Path| {
            Install::find(Path::new("/nowhere/sublet"), |name| {
                (name == "SUBLET_LIBRARY").then(|| path.into())
            })
        };
        assert!(find(&good).unwrap().library().ends_with("mine.so"));
        assert!(find(&dollar).unwrap().library().ends_with("$HOME/mine.so"));
        for path in [&spaced, &expanded] {
            assert!(matches!(find(path), Err(InstallError::Unpreloadable(_))));
        }
        assert!(matches!(
            find(Path::new("/nowhere/x")),
            Err(InstallError::NoLibrary(_))
        ));
    }
}
