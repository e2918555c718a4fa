//! What surrounds us: the driver's version, MPS, containers.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

/// MPS's place where nothing else is said, by NVIDIA's documentation.
const MPS_DIRECTORY: &str = "/tmp/nvidia-mps";

/// The CUDA version that the driver answers, as `13.2`. The library is loaded for it, and not
/// initialised.
pub fn cuda_version(driver: &Path) -> Option<String> {
    // SAFETY: a driver library that `sublet run` would have programs load; its constructors are
    // those of a system library.
    let library = unsafe { libloading::Library::new(driver) }.ok()?;
    let mut version = 0;
    // SAFETY: the driver's function of this name takes a pointer to an int, and needs no
    // initialisation.
    let status = unsafe {
        let call: libloading::Symbol<'_, unsafe extern "C" fn(*mut i32) -> i32> =
            library.get(b"cuDriverGetVersion\0").ok()?;
        call(&raw mut version)
    };
    // The driver does not like to be unloaded.
    std::mem::forget(library);
    (status == 0).then(|| format!("{}.{}", version / 1000, version % 1000 / 10))
}

/// The Multi-Process Service: where its pipes would be, whether a daemon listens there, and its
/// pid.
pub fn mps(var: impl Fn(&str) -> Option<OsString>) -> Value {
    let named = var("CUDA_MPS_PIPE_DIRECTORY").filter(|value| !value.is_empty());
    let directory = named
        .clone()
        .map_or(PathBuf::from(MPS_DIRECTORY), PathBuf::from);
    let processes = procfs::process::all_processes();
    let mut processes = processes.into_iter().flatten().flatten();
    let daemon = processes.find(|process| {
        // The kernel keeps 15 characters: nvidia-cuda-mps-control, nvidia-cuda-mps-server.
        let stat = process.stat();
        stat.is_ok_and(|stat| stat.comm.starts_with("nvidia-cuda-mps"))
    });
    json!({
        "pipe_directory": directory,
        "named_by_environment": named.is_some(),
        "listens": directory.join("control").exists(),
        "daemon_pid": daemon.map(|process| process.pid()),
        "thread_percentage": var("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE").map(|value| value.to_string_lossy().into_owned()),
    })
}

/// What kind of container the process at `proc` (such as `/proc/self`) is in, if any: by its
/// control group, and for ourselves by what container engines leave at the root.
pub fn container(proc: &Path) -> Option<&'static str> {
    let groups = fs::read_to_string(proc.join("cgroup")).unwrap_or_default();
    let by_group = [
        ("kubepods", "kubernetes"),
        ("docker", "docker"),
        ("libpod", "podman"),
        ("containerd", "containerd"),
        ("lxc", "lxc"),
        ("machine.slice", "machine"),
    ];
    by_group
        .iter()
        .find(|(mark, _)| groups.contains(mark))
        .map(|(_, kind)| *kind)
        .or_else(|| {
            let left = [("/.dockerenv", "docker"), ("/run/.containerenv", "podman")];
            let itself = proc == Path::new("/proc/self");
            left.iter()
                .find(|(file, _)| itself && Path::new(file).exists())
                .map(|(_, kind)| *kind)
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn containers_are_known_by_their_control_group() {
        let dir = tempfile::tempdir().unwrap();
        let kind = |text: &str| {
            fs::write(dir.path().join("cgroup"), text).unwrap();
            container(dir.path())
        };
        assert_eq!(kind("0::/user.slice/user-1000.slice\n"), None);
        assert_eq!(kind("0::/system.slice/docker-0123.scope\n"), Some("docker"));
        assert_eq!(
            kind("0::/kubepods.slice/kubepods-besteffort.slice/cri-containerd-1.scope\n"),
            Some("kubernetes")
        );
    }

    #[test]
    fn mps_is_where_the_environment_says() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| {
            (name == "CUDA_MPS_PIPE_DIRECTORY").then(|| dir.path().as_os_str().to_owned())
        };
        assert_eq!(mps(at)["listens"], false);
        fs::write(dir.path().join("control"), "").unwrap();
        assert_eq!(mps(at)["listens"], true);
        assert_eq!(mps(|_| None)["pipe_directory"], MPS_DIRECTORY);
    }

    #[test]
    fn what_is_no_driver_has_no_version() {
        assert_eq!(cuda_version(Path::new("/nowhere/libcuda.so.1")), None);
    }
}
