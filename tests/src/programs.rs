//! Tiny host programs in C, built with `cc` and kept as long as their source is the same.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use testbed::CommandWithin;

use crate::Artefacts;

/// What to build from a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A program that finds the driver with `dlopen`.
    Program,
    /// A shared library.
    Library,
    /// A program that a sanitizer of this name looks at, by a runtime of its own or, where it says
    /// so, one that is linked into it.
    Sanitized(&'static str, bool),
}

/// The program of `tests/programs/<name>.c`.
///
/// # Panics
/// With the compiler's words when it does not compile.
pub fn program(name: &str) -> PathBuf {
    build(name, Kind::Program)
}

/// The shared library of `tests/programs/<name>.c`.
///
/// # Panics
/// With the compiler's words when it does not compile.
pub fn library(name: &str) -> PathBuf {
    build(name, Kind::Library)
}

/// The program of `tests/programs/<name>.c` with a sanitizer in it; `None` where the compiler does
/// not have that one.
///
/// # Panics
/// With the compiler's words when it does not compile.
pub fn sanitized(name: &str, sanitizer: &'static str, linked_in: bool) -> Option<PathBuf> {
    let scratch = tempfile::tempdir().expect("a scratch directory");
    let file = scratch.path().join("empty.c");
    fs::write(&file, "int main(void) { return 0; }").expect("the source written");
    let mut cc = compiler();
    let kind = Kind::Sanitized(sanitizer, linked_in);
    cc.args(kind.flags())
        .arg("-o")
        .arg(scratch.path().join("empty"));
    let output = cc.arg(&file).output_within(testbed::PATIENCE);
    output.status.success().then(|| build(name, kind))
}

impl Kind {
    fn flags(self) -> Vec<String> {
        match self {
            Self::Program => Vec::new(),
            // Like the simulated driver: its own calls must not bind to the preload library.
            Self::Library => ["-shared", "-fPIC", "-Wl,-Bsymbolic"]
                .map(Into::into)
                .into(),
            Self::Sanitized(which, linked_in) => {
                let mut flags = vec![format!("-fsanitize={which}")];
                flags.extend(linked_in.then(|| format!("-static-lib{}san", &which[..1])));
                flags
            }
        }
    }

    fn suffix(self) -> String {
        match self {
            Self::Program => String::new(),
            Self::Library => ".so".into(),
            Self::Sanitized(which, linked_in) => format!(".{which}{}", u8::from(linked_in)),
        }
    }
}

fn compiler() -> Command {
    Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()))
}

fn build(name: &str, kind: Kind) -> PathBuf {
    let sources = Artefacts::get().root().join("tests/programs");
    let path = sources.join(format!("{name}.c"));
    let source =
        fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let headers = ["cuda_min.h", "driver.h"]
        .map(|header| fs::read_to_string(sources.join(header)).expect(header))
        .concat();
    compile(name, &source, &headers, kind)
}

/// Compiles C text under `name`. `depends` is anything else that the result depends on.
///
/// # Panics
/// With the compiler's words when it does not compile.
pub fn compile(name: &str, source: &str, depends: &str, kind: Kind) -> PathBuf {
    let artefacts = Artefacts::get();
    let dir = artefacts.programs_dir();
    fs::create_dir_all(&dir).expect("a directory for host programs");
    let mark = fnv(&[source, depends]);
    let built = dir.join(format!("{name}-{mark:016x}{}", kind.suffix()));
    if built.exists() {
        return built;
    }
    // Tests run side by side: build under a name of our own, then move it into place.
    let scratch = tempfile::tempdir_in(&dir).expect("a scratch directory");
    let file = scratch.path().join(format!("{name}.c"));
    fs::write(&file, source).expect("the source written");
    let out = scratch.path().join("out");
    let mut cc = compiler();
    cc.args(["-std=gnu11", "-O1", "-g0", "-Wall", "-Wextra", "-Werror"]);
    cc.arg("-I").arg(artefacts.root().join("tests/programs"));
    cc.args(kind.flags());
    cc.arg("-o").arg(&out).arg(&file);
    cc.args(["-ldl", "-lpthread"]);
    let output = cc.output_within(testbed::PATIENCE);
    assert!(
        output.status.success(),
        "{name}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    publish(&out, &built);
    built
}

/// Whether a program of this name can be found by `PATH`.
pub fn exists(name: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| dir.join(name).is_file())
}

fn publish(out: &Path, built: &Path) {
    fs::rename(out, built).expect("the program moved into place");
}

/// FNV-1a, 64 bits.
fn fnv(texts: &[&str]) -> u64 {
    texts
        .iter()
        .flat_map(|text| text.bytes().chain([0]))
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        })
}
