//! One process of the command, as /proc shows it: which libraries are in it, and if ours is not,
//! why not.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::run::elf;
use crate::unmanaged::command_line;

/// Keys of getauxval(3).
const AT_SECURE: u64 = 23;
const AT_RANDOM: u64 = 25;

/// What a process was seen to be.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Seen {
    pub pid: u32,
    /// Another number for each program that the process executes, also for the same one again; 0
    /// where it is unknown.
    pub image: u64,
    pub command: String,
    /// The program that it executes.
    pub program: PathBuf,
    /// How often our library is mapped: once for each link namespace that it is in.
    pub ours: usize,
    /// How often a driver is mapped that is not our library.
    pub drivers: usize,
    /// Different driver files among them.
    pub driver_files: Vec<PathBuf>,
    /// How many times NVML is loaded.
    pub nvmls: usize,
    /// It has opened a device file of NVIDIA's.
    pub device_open: bool,
    /// Why the library is not in it; `None` where it is, or where it has not got that far.
    pub absent: Option<Absent>,
    /// Our library is also an auditor of it (`LD_AUDIT`).
    pub audited: bool,
}

/// Why the library is not in a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Absent {
    /// No dynamic loader.
    Static,
    /// The rights of another user: the loader ignores LD_PRELOAD.
    Rights,
    /// LD_PRELOAD is not in its environment, or without us.
    Cleared,
    /// Another C library's loader.
    Loader,
    /// All is as it should be, and still it is not there: the file cannot be seen from there.
    Unknown,
}

impl Absent {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Static => "static",
            Self::Rights => "rights",
            Self::Cleared => "preload_cleared",
            Self::Loader => "other_loader",
            Self::Unknown => "not_loaded",
        }
    }

    pub fn reason(self) -> &'static str {
        match self {
            Self::Static => "is statically linked, so it loads no preload library",
            Self::Rights => {
                "runs with the rights of another user or group, so the loader ignores LD_PRELOAD"
            }
            Self::Cleared => "was started without LD_PRELOAD in its environment",
            Self::Loader => "uses another loader than glibc's, which cannot load the library",
            Self::Unknown => {
                "does not have the library, although LD_PRELOAD names it (can the file be seen from there?)"
            }
        }
    }
}

/// Looks at a process; `None` where it is gone, is a zombie, or is still on its way to its program.
pub fn look(pid: u32, library: &Path) -> Option<Seen> {
    let proc = PathBuf::from(format!("/proc/{pid}"));
    let program = fs::read_link(proc.join("exe")).ok()?;
    let maps = fs::read_to_string(proc.join("maps")).ok()?;
    let environment = fs::read(proc.join("environ")).unwrap_or_default();
    let mapped = Mapped::of(&maps, library);
    let mut seen = Seen {
        pid,
        // An address that the kernel picks at each exec.
        image: auxiliary(&proc, AT_RANDOM).unwrap_or(0),
        command: command_line(pid),
        ours: mapped.ours,
        drivers: mapped.drivers,
        driver_files: mapped.driver_files,
        nvmls: mapped.nvmls,
        device_open: device_open(&proc),
        audited: names_us(&environment, "LD_AUDIT=", library),
        absent: None,
        program,
    };
    // On its way out: its memory is gone between one look and the next.
    if seen.image == 0 && seen.command.is_empty() {
        return None;
    }
    if seen.ours == 0 {
        seen.absent = Some(if elf::is_static_program(&proc.join("exe")) {
            Absent::Static
        } else if !mapped.c_library {
            // The loader is at work: too early to tell. Another C library has another name.
            if !mapped.other_loader {
                return None;
            }
            Absent::Loader
        } else if is_secure(&proc) {
            Absent::Rights
        } else if !names_us(&environment, "LD_PRELOAD=", library) {
            Absent::Cleared
        } else {
            Absent::Unknown
        });
    }
    Some(seen)
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Mapped {
    ours: usize,
    drivers: usize,
    driver_files: Vec<PathBuf>,
    nvmls: usize,
    c_library: bool,
    other_loader: bool,
}

impl Mapped {
    fn of(maps: &str, library: &Path) -> Self {
        let mut mapped = Self::default();
        for line in maps.lines() {
            // address perms offset dev inode path; paths have no line breaks, but spaces.
            let mut words = line.splitn(6, ' ');
            let Some(offset) = words.nth(2) else { continue };
            let Some(path) = words.nth(2).map(str::trim_start) else {
                continue;
            };
            let path = Path::new(path.strip_suffix(" (deleted)").unwrap_or(path));
            let name = path.file_name().unwrap_or_default().as_encoded_bytes();
            mapped.c_library |= name.starts_with(b"libc.so") || name.starts_with(b"libc-");
            mapped.other_loader |= name.starts_with(b"ld-musl");
            // Each time that an object is loaded, its first page is mapped once.
            if offset.bytes().any(|digit| digit != b'0') {
                continue;
            }
            if path == library {
                mapped.ours += 1;
            } else if name.starts_with(b"libcuda.so") {
                mapped.drivers += 1;
                if !mapped.driver_files.iter().any(|file| file == path) {
                    mapped.driver_files.push(path.to_owned());
                }
            } else if name.starts_with(b"libnvidia-ml.so") {
                mapped.nvmls += 1;
            }
        }
        mapped
    }
}

fn names_us(environment: &[u8], variable: &str, library: &Path) -> bool {
    environment
        .split(|byte| *byte == 0)
        .filter_map(|entry| entry.strip_prefix(variable.as_bytes()))
        .flat_map(|value| value.split(|byte| matches!(byte, b':' | b' ')))
        .any(|word| {
            let word = Path::new(OsStr::from_bytes(word));
            word == library || fs::canonicalize(word).is_ok_and(|real| real == library)
        })
}

/// Whether the kernel started it with another's rights: by its word, or where that cannot be read,
/// by the program's kind.
fn is_secure(proc: &Path) -> bool {
    match auxiliary(proc, AT_SECURE) {
        Some(value) => value != 0,
        None => fs::metadata(proc.join("exe")).is_ok_and(|meta| meta.mode() & 0o6000 != 0),
    }
}

/// A value of the vector that the kernel hands to each program.
fn auxiliary(proc: &Path, key: u64) -> Option<u64> {
    let process = procfs::process::Process::new_with_root(proc.to_owned());
    process.ok()?.auxv().ok()?.get(&key).copied()
}

fn device_open(proc: &Path) -> bool {
    let files = fs::read_dir(proc.join("fd"))
        .into_iter()
        .flatten()
        .flatten();
    files
        .filter_map(|file| fs::read_link(file.path()).ok())
        .any(|target| target.as_os_str().as_bytes().starts_with(b"/dev/nvidia"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_counted_by_their_first_pages() {
        let maps = "\
7f00-7f01 r--p 00000000 08:01 11                         /opt/libsublet.so
7f01-7f02 r-xp 00001000 08:01 11                         /opt/libsublet.so
7f10-7f11 r--p 00000000 08:01 12                         /usr/lib/libcuda.so.595.1
7f11-7f12 r-xp 00001000 08:01 12                         /usr/lib/libcuda.so.595.1
7f20-7f21 r--p 00000000 08:01 12                         /usr/lib/libcuda.so.595.1
7f28-7f29 r--p 00000000 08:01 14                         /usr/lib/libnvidia-ml.so.595.1
7f29-7f2a r--p 00000000 08:01 15                         /opt/other/libnvidia-ml.so.1
7f2a-7f2b r-xp 00001000 08:01 15                         /opt/other/libnvidia-ml.so.1
7f30-7f31 r--p 00000000 08:01 13                         /usr/lib/libc.so.6
7f40-7f41 rw-p 00000000 00:00 0
7f50-7f51 rw-p 00000000 00:00 0                          [heap]
";
        let mapped = Mapped::of(maps, Path::new("/opt/libsublet.so"));
        assert_eq!((mapped.ours, mapped.drivers, mapped.nvmls), (1, 2, 2));
        assert_eq!(
            mapped.driver_files,
            [Path::new("/usr/lib/libcuda.so.595.1")]
        );
        assert!(mapped.c_library && !mapped.other_loader);
    }

    #[test]
    fn a_variable_names_us_among_others() {
        let library = Path::new("/opt/libsublet.so");
        for (environment, named) in [
            (&b"A=1\0LD_PRELOAD=/x.so:/opt/libsublet.so\0"[..], true),
            (b"LD_PRELOAD=/opt/libsublet.so /x.so\0", true),
            (b"LD_PRELOAD=/x.so\0", false),
            (b"XLD_PRELOAD=/opt/libsublet.so\0", false),
            (b"", false),
        ] {
            assert_eq!(names_us(environment, "LD_PRELOAD=", library), named);
        }
    }

    #[test]
    fn this_test_is_a_process_without_us() {
        let seen = look(std::process::id(), Path::new("/opt/libsublet.so")).unwrap();
        assert_eq!((seen.ours, seen.absent), (0, Some(Absent::Cleared)));
        assert!(!is_secure(Path::new("/proc/self")));
        assert_eq!(look(u32::MAX, Path::new("/x")), None);
    }
}
