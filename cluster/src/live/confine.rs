//! A control group for each attempt, where the host gives us one: whatever an attempt starts,
//! however it hides, ends with it.
//!
//! Version 2 is asked first (`cgroup.kill` ends all at one stroke), then the freezer of version 1
//! (frozen, killed, thawed). The group lies below our own, so that limits of the arbiter's service
//! hold for its jobs as well. Where neither can be written, as in most containers and for most
//! users, [`super::process`] finds an attempt's processes by their parents and by a word in their
//! environment.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::process::Process;

/// A control group of our own making.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Group {
    /// `true`: of version 2; else a freezer.
    unified: bool,
    path: PathBuf,
}

impl Group {
    /// A new, empty one below this process's own. `None` where the host gives none.
    #[must_use]
    pub fn make(name: &str) -> Option<Self> {
        [true, false]
            .into_iter()
            .find_map(|unified| Self::of_version(name, unified))
    }

    fn of_version(name: &str, unified: bool) -> Option<Self> {
        let cgroup = fs::read_to_string("/proc/self/cgroup").ok()?;
        let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
        let own = own_directory(&cgroup, &mounts, unified)?;
        let listed = fs::read_to_string(own.join("cgroup.procs")).ok()?;
        let pid = std::process::id().to_string();
        if !listed.lines().any(|line| line == pid) {
            return None;
        }
        let path = own.join(name);
        match fs::create_dir(&path) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(_) => return None,
        }
        let group = Self { unified, path };
        // One of an earlier life of this name would mix up two attempts.
        (group.is_empty() && group.entrance().is_ok()).then_some(group)
    }

    /// Who writes `0` into it is inside.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn entrance(&self) -> io::Result<File> {
        OpenOptions::new()
            .write(true)
            .open(self.path.join("cgroup.procs"))
    }

    /// Whether a process is inside.
    #[must_use]
    pub fn holds(&self, pid: u32) -> bool {
        self.pids().contains(&pid)
    }

    /// Nobody is inside, zombies left out of account.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        let events = fs::read_to_string(self.path.join("cgroup.events"));
        match events {
            Ok(events) if self.unified => events.lines().any(|line| line == "populated 0"),
            _ => !self
                .pids()
                .into_iter()
                .any(|pid| Process::of(pid).is_some()),
        }
    }

    /// Ends everybody inside; asked again until it [is empty](Self::is_empty).
    pub fn kill(&self) {
        let write = |file: &str, text: &str| fs::write(self.path.join(file), text).is_ok();
        if self.unified && write("cgroup.kill", "1") {
            return;
        }
        // What stands still starts nobody else meanwhile.
        let (file, freeze, thaw) = if self.unified {
            ("cgroup.freeze", "1", "0")
        } else {
            ("freezer.state", "FROZEN", "THAWED")
        };
        write(file, freeze);
        for pid in self.pids() {
            let Some(process) = Process::of(pid) else {
                continue;
            };
            // Still the one that is inside, and not a later one of its number.
            if let Some(fd) = process.open()
                && self.holds(pid)
            {
                let _ = rustix::process::pidfd_send_signal(fd, rustix::process::Signal::KILL);
            }
        }
        write(file, thaw);
    }

    /// Gone, where it is empty.
    pub fn remove(&self) {
        for dir in directories(&self.path).iter().rev() {
            let _ = fs::remove_dir(dir);
        }
    }

    /// Processes in it and in the groups that they have made below it.
    fn pids(&self) -> Vec<u32> {
        let mut all = Vec::new();
        for dir in directories(&self.path) {
            let text = fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
            all.extend(text.lines().filter_map(|line| line.parse::<u32>().ok()));
        }
        all
    }
}

/// A directory and those below it, parents first.
fn directories(top: &Path) -> Vec<PathBuf> {
    let mut all = vec![top.to_owned()];
    let mut at = 0;
    while let Some(dir) = all.get(at).cloned() {
        let entries = fs::read_dir(&dir).into_iter().flatten().flatten();
        let below = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
        all.extend(below.map(|entry| entry.path()));
        at += 1;
    }
    all
}

/// Where this process's own group is mounted, by `/proc/self/cgroup` and `/proc/self/mountinfo`.
fn own_directory(cgroup: &str, mounts: &str, unified: bool) -> Option<PathBuf> {
    let own = cgroup.lines().find_map(|line| {
        let mut parts = line.splitn(3, ':');
        let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
        let ours = if unified {
            controllers.is_empty()
        } else {
            controllers.split(',').any(|name| name == "freezer")
        };
        ours.then(|| path.to_owned())
    })?;
    mounts.lines().find_map(|line| {
        let (mount, kind) = line.split_once(" - ")?;
        let mut kind = kind.split(' ');
        let (name, options) = (kind.next()?, kind.nth(1)?);
        let ours = if unified {
            name == "cgroup2"
        } else {
            name == "cgroup" && options.split(',').any(|option| option == "freezer")
        };
        if !ours {
            return None;
        }
        let mut fields = mount.split(' ').skip(3);
        let (root, point) = (fields.next()?, fields.next()?);
        // What is mounted may be a part of the tree only.
        let below = Path::new(&own).strip_prefix(root).ok()?;
        Some(Path::new(point).join(below))
    })
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn the_own_group_is_found_where_it_is_mounted() {
        let cgroup = "9:freezer:/box\n8:pids:/\n0::/system.slice/sublet.service\n";
        let mounts = "30 24 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n\
                      31 24 0:27 /box /cg/freezer rw shared:9 - cgroup cgroup rw,freezer\n";
        assert_eq!(
            own_directory(cgroup, mounts, true).unwrap(),
            Path::new("/sys/fs/cgroup/system.slice/sublet.service")
        );
        assert_eq!(
            own_directory(cgroup, mounts, false).unwrap(),
            Path::new("/cg/freezer"),
            "a part of the tree is mounted"
        );
        assert!(own_directory("0::/a\n", mounts, false).is_none());
        assert!(own_directory(cgroup, "30 24 0:26 /b /c rw - cgroup2 x rw\n", true).is_none());
    }

    #[test]
    fn whatever_is_inside_ends() {
        for unified in [true, false] {
            let name = format!("sublet-test-{}", std::process::id());
            match Group::of_version(&name, unified) {
                Some(group) => ends_all(&group),
                None => println!("now: skipped, this host gives no group (version 2: {unified})"),
            }
        }
    }

    fn ends_all(group: &Group) {
        let procs = group.path.join("cgroup.procs");
        // A process of another session whose parent has ended.
        let script = format!("echo 0 > {}; setsid sleep 60 & sleep 60", procs.display());
        let mut child = Command::new("sh").args(["-c", &script]).spawn().unwrap();
        let patience = std::time::Duration::from_secs(60);
        let until = |what: &str, done: &dyn Fn() -> bool| {
            let deadline = std::time::Instant::now() + patience;
            while !done() {
                assert!(std::time::Instant::now() < deadline, "{what}");
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
        };
        until("it is inside", &|| group.pids().len() >= 3);
        assert!(group.holds(child.id()) && !group.is_empty());
        group.kill();
        child.wait().unwrap();
        until("all have ended", &|| {
            group.kill();
            group.is_empty()
        });
        until("it is gone", &|| {
            group.remove();
            !group.path.exists()
        });
    }
}
