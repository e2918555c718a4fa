//! What the job's environment says to the preload library.
//!
//! | variable | what |
//! |---|---|
//! | `LD_PRELOAD` | `libsublet.so` before what was there |
//! | `SUBLET_SOCKET` | the channel socket |
//! | `SUBLET_TOKEN` | 32 hexadecimal digits that make a process one of the job |
//! | `SUBLET_JOB` | the job's name |
//! | `SUBLET_DRIVER` | the driver to open, by absolute path |
//! | `SUBLET_ON_ARBITER_LOSS` | `open`, `freeze` or `closed` |
//! | `SUBLET_ON_REFUSAL` | `open` or `closed` |
//! | `SUBLET_STDERR` | device and inode of our standard error: where the library may write |
//! | `SUBLET_LIMITED` | where the job has limits: what runs inside of it stays within |
//! | `SUBLET_STRICT` | with `--strict` only: no start without a device of the job |
//! | `LD_AUDIT`, `CUDA_INJECTION64_PATH` | with `--deep` only: `libsublet.so` |
//! | `GLIBC_TUNABLES` | with `--deep` only: space for thread-local data of preloaded libraries |
//! | `PYTHONPATH` | with `--step-hook` only: the folder of the hook before what was there |
//! | `LD_LIBRARY_PATH` | simulated only: the simulated NVML's directory before what was there |
//! | `SUBLET_RESIDENCY` | simulated only: `touch=0` appended; simulated pins take absent pages |

use std::ffi::{OsStr, OsString};
use std::os::fd::BorrowedFd;
use std::path::Path;

use control::{FailMode, Registered};

use super::driver::Driver;
use super::install::Install;

/// The variables to set over those that are there.
pub fn of_job(
    registered: &Registered,
    driver: &Driver,
    install: &Install,
    on_arbiter_loss: FailMode,
    var: impl Fn(&str) -> Option<OsString>,
) -> Vec<(&'static str, OsString)> {
    let preload = var("LD_PRELOAD").unwrap_or_default();
    let mut vars = vec![
        (
            "LD_PRELOAD",
            // Words may be apart by a space or a colon; what is there is left as it is written.
            prepend(install.library().as_os_str(), &preload, |b| {
                matches!(b, b':' | b' ')
            }),
        ),
        ("SUBLET_SOCKET", registered.channel_socket.clone().into()),
        ("SUBLET_TOKEN", registered.token.clone().into()),
        ("SUBLET_JOB", registered.job.clone().into()),
        ("SUBLET_DRIVER", driver.path.clone().into()),
        ("SUBLET_ON_ARBITER_LOSS", on_arbiter_loss.as_str().into()),
    ];
    if driver.simulated.is_some() {
        let path = var("LD_LIBRARY_PATH").unwrap_or_default();
        vars.push((
            "LD_LIBRARY_PATH",
            prepend(install.sim_dir().as_os_str(), &path, |b| {
                matches!(b, b':' | b';')
            }),
        ));
        let mut words = var("SUBLET_RESIDENCY").unwrap_or_default();
        if !words.to_string_lossy().contains("touch=") {
            words.push(",touch=0");
        }
        vars.push(("SUBLET_RESIDENCY", words));
    }
    vars
}

/// What a command that is recorded needs: the library, the driver, and nothing of a job.
pub fn of_recorded(
    driver: &Driver,
    install: &Install,
    var: impl Fn(&str) -> Option<OsString>,
) -> Vec<(&'static str, OsString)> {
    let preload = var("LD_PRELOAD").unwrap_or_default();
    let library = install.library().as_os_str();
    let mut vars = vec![
        (
            "LD_PRELOAD",
            prepend(library, &preload, |b| matches!(b, b':' | b' ')),
        ),
        ("SUBLET_DRIVER", driver.path.clone().into()),
    ];
    if driver.simulated.is_some() {
        let path = var("LD_LIBRARY_PATH").unwrap_or_default();
        let sim = install.sim_dir().as_os_str();
        vars.push((
            "LD_LIBRARY_PATH",
            prepend(sim, &path, |b| matches!(b, b':' | b';')),
        ));
    }
    vars
}

/// What `--step-hook` adds: Python runs what is in the first folder of its path at its start.
pub fn of_step_hook(folder: &Path, var: impl Fn(&str) -> Option<OsString>) -> OsString {
    let path = var("PYTHONPATH").unwrap_or_default();
    prepend(folder.as_os_str(), &path, |b| b == b':')
}

/// Which file `fd` is, for a process that has it, or another, under the same number; `None`: none.
pub fn of_stderr(fd: BorrowedFd<'_>) -> Option<OsString> {
    let file = nix::sys::stat::fstat(fd).ok()?;
    Some(format!("{}:{}", file.st_dev, file.st_ino).into())
}

/// Where the linker is audited it has loaded a second copy of this library, and of what that needs,
/// before any other: what is left of 512 bytes is too little for the thread-local data of a
/// preloaded jemalloc, or of our first copy, and programs do not start. Stacks of threads give up
/// this much, so it stays below half of the smallest one.
const THREAD_LOCAL: (&str, u32) = ("glibc.rtld.optional_static_tls", 4096);

/// What `--deep` adds: the library audits the dynamic linker, and the driver is set to load it
/// where a child has lost LD_PRELOAD. A tool that is to be injected already stays the one.
pub fn of_deep_job(
    install: &Install,
    var: impl Fn(&str) -> Option<OsString>,
) -> Vec<(&'static str, OsString)> {
    let library = install.library().as_os_str();
    let auditors = var("LD_AUDIT").unwrap_or_default();
    let mut vars = vec![("LD_AUDIT", prepend(library, &auditors, |b| b == b':'))];
    if var("CUDA_INJECTION64_PATH").is_none_or(|tool| tool.is_empty()) {
        vars.push(("CUDA_INJECTION64_PATH", library.to_owned()));
    }
    let mut tunables = var("GLIBC_TUNABLES").unwrap_or_default();
    let (name, bytes) = THREAD_LOCAL;
    let named = tunables.as_encoded_bytes().split(|b| *b == b':');
    // What somebody has chosen stays.
    if !named
        .into_iter()
        .any(|one| one.starts_with(name.as_bytes()))
    {
        if !tunables.is_empty() {
            tunables.push(":");
        }
        tunables.push(format!("{name}={bytes}"));
        vars.push(("GLIBC_TUNABLES", tunables));
    }
    vars
}

/// `first:list`, or `list` where it already begins with `first`, as in a job within a job.
fn prepend(first: &OsStr, list: &OsStr, is_separator: impl Fn(u8) -> bool) -> OsString {
    let rest = list
        .as_encoded_bytes()
        .strip_prefix(first.as_encoded_bytes());
    let begins = rest.is_some_and(|rest| rest.first().is_none_or(|b| is_separator(*b)));
    if begins {
        return list.to_owned();
    }
    let mut joined = first.to_owned();
    if !list.is_empty() {
        joined.push(":");
        joined.push(list);
    }
    joined
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::super::driver::Simulated;
    use super::*;

    fn vars(simulated: bool, there: &[(&str, &str)]) -> Vec<(&'static str, OsString)> {
        let registered = Registered {
            job: "train-2".into(),
            token: "0123456789abcdef0123456789abcdef".into(),
            channel_socket: "/run/sublet/channel.sock".into(),
            ..Registered::default()
        };
        let driver = Driver {
            path: PathBuf::from("/d/libcuda.so.1"),
            simulated: simulated.then_some(Simulated::Asked),
        };
        let install = Install::at("/s/libsublet.so".into(), "/s/sim".into());
        of_job(&registered, &driver, &install, FailMode::Freeze, |name| {
            let var = there.iter().find(|(key, _)| *key == name);
            var.map(|(_, value)| OsString::from(value))
        })
    }

    fn get<'a>(vars: &'a [(&str, OsString)], name: &str) -> Option<&'a str> {
        let var = vars.iter().find(|(key, _)| *key == name);
        var.map(|(_, value)| value.to_str().unwrap())
    }

    #[test]
    fn the_library_learns_all_it_needs() {
        let vars = vars(false, &[]);
        for (name, value) in [
            ("LD_PRELOAD", "/s/libsublet.so"),
            ("SUBLET_SOCKET", "/run/sublet/channel.sock"),
            ("SUBLET_TOKEN", "0123456789abcdef0123456789abcdef"),
            ("SUBLET_JOB", "train-2"),
            ("SUBLET_DRIVER", "/d/libcuda.so.1"),
            ("SUBLET_ON_ARBITER_LOSS", "freeze"),
        ] {
            assert_eq!(get(&vars, name), Some(value));
        }
        assert_eq!(
            get(&vars, "LD_LIBRARY_PATH"),
            None,
            "a real driver needs no path"
        );
    }

    #[test]
    fn a_deep_job_keeps_the_tools_that_are_there() {
        let install = Install::at("/s/libsublet.so".into(), "/s/sim".into());
        let vars = of_deep_job(&install, |_| None);
        assert_eq!(get(&vars, "LD_AUDIT"), Some("/s/libsublet.so"));
        assert_eq!(get(&vars, "CUDA_INJECTION64_PATH"), Some("/s/libsublet.so"));
        let vars = of_deep_job(&install, |_| Some("/tool.so".into()));
        assert_eq!(get(&vars, "LD_AUDIT"), Some("/s/libsublet.so:/tool.so"));
        assert_eq!(get(&vars, "CUDA_INJECTION64_PATH"), None);
    }

    #[test]
    fn a_deep_job_has_space_for_thread_local_data_unless_somebody_chose_how_much() {
        let install = Install::at("/s/libsublet.so".into(), "/s/sim".into());
        let given = |tunables: &str| {
            let vars = of_deep_job(&install, |name| {
                (name == "GLIBC_TUNABLES" && !tunables.is_empty()).then(|| tunables.into())
            });
            get(&vars, "GLIBC_TUNABLES").map(str::to_owned)
        };
        let space = "glibc.rtld.optional_static_tls=4096";
        assert_eq!(given("").as_deref(), Some(space));
        let other = "glibc.malloc.check=3";
        assert_eq!(given(other), Some(format!("{other}:{space}")));
        assert_eq!(given("glibc.rtld.optional_static_tls=9:a=b"), None);
    }

    #[test]
    fn what_was_there_stays_behind_ours_and_ours_comes_once() {
        let there = [
            ("LD_PRELOAD", "/x/asan.so /x/b.so"),
            ("LD_LIBRARY_PATH", "/l"),
        ];
        let outer = vars(true, &there);
        assert_eq!(
            get(&outer, "LD_PRELOAD"),
            Some("/s/libsublet.so:/x/asan.so /x/b.so")
        );
        assert_eq!(get(&outer, "LD_LIBRARY_PATH"), Some("/s/sim:/l"));
        let there: Vec<_> = outer
            .iter()
            .map(|(key, value)| (*key, value.to_str().unwrap()))
            .collect();
        assert_eq!(vars(true, &there), outer, "a job within a job");
        assert_eq!(get(&outer, "SUBLET_RESIDENCY"), Some(",touch=0"));
        let there = [("LD_PRELOAD", "/s/libsublet.so.old")];
        assert_eq!(
            get(&vars(false, &there), "LD_PRELOAD"),
            Some("/s/libsublet.so:/s/libsublet.so.old")
        );
    }
}
