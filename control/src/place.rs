//! Who and where a process is, as the kernel says: its groups, its control group, and by that its
//! container, its pod, its Slurm job. These files are open to every user. Environments of other
//! users' processes are not looked at.

use std::fs::File;
use std::io::{self, Read};

use serde::{Deserialize, Serialize};

/// A path in a control group is no longer; more than that is not read.
const MAX_BYTES: u64 = 16 << 10;
/// Digits of a container's id.
const ID_DIGITS: usize = 64;

/// Each is empty where the job is in none.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Place {
    /// 64 hexadecimal digits.
    pub container: String,
    /// What runs it: `docker`, `podman`, `containerd`, `cri-o`; empty where its control group does
    /// not say.
    pub runtime: String,
    /// UID of the pod, as Kubernetes writes it.
    pub pod: String,
    /// Number of the job.
    pub slurm_job: String,
}

/// Who registers a job, beside its user.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Identity {
    /// Its groups, the effective one first.
    pub gids: Vec<u32>,
    /// Its control groups, one for each hierarchy.
    pub cgroups: Vec<String>,
    pub place: Place,
    /// The account of its Slurm job, by somebody who knows; empty: not known.
    pub slurm_account: String,
    /// The same as its own environment says.
    pub claimed_account: String,
}

impl Identity {
    /// Of a process of this PID namespace, without Slurm accounts. What cannot be read is empty.
    pub fn of_process(pid: u32) -> Self {
        let read = |name: &str| {
            let mut text = String::new();
            let read = File::open(format!("/proc/{pid}/{name}"))
                .and_then(|file| file.take(MAX_BYTES).read_to_string(&mut text));
            read.map_or_else(|_| String::new(), |_| text)
        };
        let cgroup = cgroup_file(pid).unwrap_or_default();
        Self {
            gids: gids(&read("status")),
            cgroups: paths(&cgroup).map(ToOwned::to_owned).collect(),
            place: Place::of(&cgroup),
            ..Self::default()
        }
    }
}

fn cgroup_file(pid: u32) -> io::Result<String> {
    let mut text = String::new();
    File::open(format!("/proc/{pid}/cgroup"))?
        .take(MAX_BYTES)
        .read_to_string(&mut text)?;
    Ok(text)
}

/// The [group](container_group) of the container that a process of this PID namespace is in;
/// `None`: its control groups name none.
///
/// # Errors
/// The kernel does not say; the process has ended, as a rule.
pub fn group_of_process(pid: u32) -> io::Result<Option<String>> {
    let text = cgroup_file(pid)?;
    Ok(container_group(&paths(&text).collect::<Vec<_>>()))
}

/// By the text of a process's `status` file.
fn gids(status: &str) -> Vec<u32> {
    let numbers = |name: &str| -> Vec<u32> {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        let words = line.unwrap_or_default().split_whitespace();
        words.filter_map(|word| word.parse().ok()).collect()
    };
    // Real, effective, saved and of the file system.
    let mut gids: Vec<u32> = numbers("Gid:").get(1).copied().into_iter().collect();
    gids.extend(numbers("Groups:"));
    gids.dedup();
    gids
}

/// The path at the end of each line of a `cgroup` file: hierarchy:controllers:path, where the path
/// may have colons.
fn paths(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter_map(|line| line.splitn(3, ':').nth(2))
}

impl Place {
    /// Of a process of this PID namespace; `None`: it has ended, or runs in none of these.
    pub fn of_process(pid: u32) -> Option<Self> {
        let text = cgroup_file(pid).ok()?;
        Some(Self::of(&text)).filter(|place| *place != Self::default())
    }

    /// This one, with what it lacks from another.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        let or = |own: String, other| if own.is_empty() { other } else { own };
        Self {
            container: or(self.container, other.container),
            runtime: or(self.runtime, other.runtime),
            pod: or(self.pod, other.pod),
            slurm_job: or(self.slurm_job, other.slurm_job),
        }
    }

    /// By the text of a process's `cgroup` file: a line for each hierarchy, with a path at its end.
    pub fn of(text: &str) -> Self {
        let mut place = Self::default();
        for path in paths(text) {
            let mut in_slurm = false;
            let mut above = "";
            for part in path.split('/') {
                in_slurm |= part.starts_with("slurm");
                if let Some(id) = container(part) {
                    // The innermost one.
                    place.container = id;
                    let said = runtime(part).or_else(|| runtime(above)).unwrap_or_default();
                    if !said.is_empty() {
                        place.runtime = said.to_owned();
                    }
                }
                above = part;
                if let Some(uid) = pod(part) {
                    place.pod = uid;
                }
                let job = part.strip_prefix("job_").filter(|_| in_slurm);
                if let Some(job) = job.filter(|job| is_number(job)) {
                    place.slurm_job = job.to_owned();
                }
            }
        }
        place
    }
}

/// The part of a control group's path that is the container's, up to its id: no two containers of
/// a host have the same, and processes below it belong to it. By the paths of each hierarchy.
pub fn container_group<S: AsRef<str>>(cgroups: &[S]) -> Option<String> {
    cgroups.iter().map(AsRef::as_ref).find_map(|path| {
        let parts: Vec<&str> = path.split('/').collect();
        let last = parts.iter().rposition(|part| container(part).is_some())?;
        Some(parts.get(..=last)?.join("/"))
    })
}

/// What runs a container of this name, or below this folder.
fn runtime(part: &str) -> Option<&'static str> {
    [
        ("docker", "docker"),
        ("libpod", "podman"),
        ("cri-containerd", "containerd"),
        ("nerdctl", "containerd"),
        ("crio", "cri-o"),
    ]
    .iter()
    .find(|(mark, _)| part.starts_with(mark))
    .map(|(_, name)| *name)
}

fn is_number(text: &str) -> bool {
    (1..=20).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit())
}

/// `docker-ID.scope`, `cri-containerd-ID.scope`, `crio-ID.scope`, `libpod-ID.scope`, `ID`.
fn container(part: &str) -> Option<String> {
    let part = part.strip_suffix(".scope").unwrap_or(part);
    let id = part.rsplit('-').next()?;
    let is_id = id.len() == ID_DIGITS
        && id
            .bytes()
            .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    is_id.then(|| id.to_owned())
}

/// `podUID`, or `kubepods-burstable-podUID.slice` with underscores in the UID.
fn pod(part: &str) -> Option<String> {
    let part = part.strip_suffix(".slice").unwrap_or(part);
    let from = part.rfind("pod")?;
    let before = &part[..from];
    if !before.is_empty() && !before.starts_with("kubepods") {
        return None;
    }
    let uid = part[from + 3..].replace('_', "-");
    let is_uid = (32..=36).contains(&uid.len())
        && uid
            .bytes()
            .all(|byte| byte == b'-' || byte.is_ascii_hexdigit());
    is_uid.then_some(uid)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
    const UID: &str = "6c2f4f52-7d6e-4b1c-9d0e-1f2a3b4c5d6e";

    #[test]
    fn containers_pods_and_slurm_jobs_are_found_in_paths() {
        let under = UID.replace('-', "_");
        for (text, container, pod, slurm_job) in [
            (format!("0::/system.slice/docker-{ID}.scope\n"), ID, "", ""),
            (format!("12:memory:/docker/{ID}\n0::/\n"), ID, "", ""),
            (
                format!("0::/machine.slice/libpod-{ID}.scope/container\n"),
                ID,
                "",
                "",
            ),
            (
                format!(
                    "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{under}.slice/cri-containerd-{ID}.scope\n"
                ),
                ID,
                UID,
                "",
            ),
            (
                format!("4:devices:/kubepods/besteffort/pod{UID}/{ID}\n"),
                ID,
                UID,
                "",
            ),
            (
                "0::/system.slice/slurmstepd.scope/job_4711/step_0/user/task_0\n".into(),
                "",
                "",
                "4711",
            ),
            (
                "6:cpuset:/slurm/uid_1000/job_12/step_batch\n".into(),
                "",
                "",
                "12",
            ),
            (
                "0::/user.slice/user-1000.slice/session-3.scope\n".into(),
                "",
                "",
                "",
            ),
            // Names of others.
            ("0::/system.slice/podman.service/job_7\n".into(), "", "", ""),
            (
                "0::/tripod0123456789abcdef0123456789abcdef\n".into(),
                "",
                "",
                "",
            ),
            ("0::/slurm/job_x/job_\n".into(), "", "", ""),
            (format!("0::/{}\n", ID.to_uppercase()), "", "", ""),
            ("no line of that kind".into(), "", "", ""),
            (String::new(), "", "", ""),
        ] {
            let place = Place::of(&text);
            let found = (
                place.container.as_str(),
                place.pod.as_str(),
                place.slurm_job.as_str(),
            );
            assert_eq!(found, (container, pod, slurm_job), "{text}");
        }
    }

    #[test]
    fn what_runs_a_container_is_in_its_control_group() {
        for (path, runtime, group) in [
            (format!("/docker/{ID}"), "docker", format!("/docker/{ID}")),
            (
                format!("/system.slice/docker-{ID}.scope/init"),
                "docker",
                format!("/system.slice/docker-{ID}.scope"),
            ),
            (
                format!("/libpod_parent/libpod-{ID}"),
                "podman",
                format!("/libpod_parent/libpod-{ID}"),
            ),
            (
                format!("/kubepods.slice/cri-containerd-{ID}.scope"),
                "containerd",
                format!("/kubepods.slice/cri-containerd-{ID}.scope"),
            ),
            (
                format!("/kubepods.slice/crio-{ID}.scope/container"),
                "cri-o",
                format!("/kubepods.slice/crio-{ID}.scope"),
            ),
            (
                format!("/kubepods/besteffort/x/{ID}/a/b"),
                "",
                format!("/kubepods/besteffort/x/{ID}"),
            ),
        ] {
            let place = Place::of(&format!("0::{path}\n"));
            assert_eq!(
                (place.runtime.as_str(), place.container.as_str()),
                (runtime, ID)
            );
            let paths = ["/user.slice".to_owned(), path];
            assert_eq!(container_group(&paths), Some(group));
        }
        assert_eq!(container_group(&["/", "/user.slice/a.scope"]), None);
    }

    #[test]
    fn the_kernel_says_who_a_process_is() {
        let status = "Name:\tx\nUid:\t1\t2\t3\t4\nGid:\t10\t11\t12\t13\nGroups:\t11 27 44 \n";
        assert_eq!(gids(status), [11, 27, 44]);
        assert_eq!(gids("Groups:\t\n"), [0; 0]);
        let own = Identity::of_process(std::process::id());
        assert!(!own.gids.is_empty() && !own.cgroups.is_empty(), "{own:?}");
        assert!(own.cgroups.iter().all(|path| path.starts_with('/')));
        assert_eq!(Identity::of_process(u32::MAX), Identity::default());
        let gone = group_of_process(u32::MAX).map_err(|error| error.kind());
        assert_eq!(gone, Err(io::ErrorKind::NotFound));
        group_of_process(std::process::id()).expect("the kernel says");
    }

    #[test]
    fn a_process_that_has_ended_is_nowhere() {
        assert_eq!(Place::of_process(u32::MAX), None);
    }
}
