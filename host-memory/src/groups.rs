//! The control groups of a process (cgroups(7)): which they are, and what each says of memory.

use std::fs::read_to_string;
use std::path::{Path, PathBuf};

use crate::inside;

/// Which files a control group speaks by.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Version {
    /// `memory.limit_in_bytes`.
    One,
    /// `memory.max`, and `memory.high`, above which the kernel makes allocations wait.
    Two,
}

/// Limits from here on are none: version 1 says "no limit" by the largest multiple of a page.
const NO_LIMIT: u64 = 1 << 60;

/// A group that a process is in.
#[derive(Clone, Debug)]
pub(crate) struct Group {
    at: PathBuf,
    pub(crate) version: Version,
}

impl Group {
    /// Limit and use in bytes; `None`: it has no limit, or cannot be read.
    pub(crate) fn look(&self) -> Option<(u64, u64)> {
        let number = |file: &str| {
            let text = read_to_string(self.at.join(file)).ok()?;
            text.trim().parse::<u64>().ok()
        };
        let (limits, used, idle): (&[&str], _, _) = match self.version {
            Version::One => (
                &["memory.limit_in_bytes"],
                "memory.usage_in_bytes",
                "total_inactive_file",
            ),
            Version::Two => (
                &["memory.max", "memory.high"],
                "memory.current",
                "inactive_file",
            ),
        };
        let limit = limits
            .iter()
            .filter_map(|file| number(file))
            .filter(|limit| *limit < NO_LIMIT)
            .min()?;
        let used = number(used)?;
        Some((
            limit,
            used.saturating_sub(self.statistic(idle).unwrap_or(0)),
        ))
    }

    fn statistic(&self, name: &str) -> Option<u64> {
        let text = read_to_string(self.at.join("memory.stat")).ok()?;
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.strip_prefix(' ')?.trim().parse().ok()
    }
}

/// A mounted hierarchy of groups.
struct Mount {
    version: Version,
    /// What of the hierarchy is seen there.
    root: PathBuf,
    at: PathBuf,
}

/// The groups that bound the memory of the process, whose own comes first.
pub(crate) fn groups_of(root: &Path, own: &str, mounts: &str) -> Vec<Group> {
    let mounts: Vec<Mount> = mounts.lines().filter_map(mount).collect();
    own.lines()
        .filter_map(|line| {
            // ABI: `hierarchy:controllers:path`; version 2 has no controllers there.
            let mut words = line.splitn(3, ':');
            let (_, controllers, path) = (words.next()?, words.next()?, words.next()?);
            let version = if controllers.is_empty() {
                Version::Two
            } else if controllers.split(',').any(|one| one == "memory") {
                Version::One
            } else {
                return None;
            };
            Some((version, Path::new(path)))
        })
        .flat_map(|(version, path)| {
            let mounted = mounts.iter().filter(move |mount| mount.version == version);
            mounted.flat_map(move |mount| mount.chain(root, path))
        })
        .collect()
}

impl Mount {
    /// The group of that path, and those above it as far as they are mounted. In a container the
    /// path may be the host's, and the mount begin at the container's own group; or the path lies
    /// outside of what is seen, and only the start of the mount is known.
    fn chain(&self, root: &Path, path: &Path) -> Vec<Group> {
        let below = path
            .strip_prefix(&self.root)
            .or_else(|_| path.strip_prefix("/"))
            .unwrap_or(Path::new(""));
        let top = inside(root, &self.at);
        let mut at = inside(&top, below);
        // What the mount does not show the process is not in as seen from here.
        while at != top && !at.is_dir() {
            at.pop();
        }
        let mut found = Vec::new();
        loop {
            found.push(Group {
                at: at.clone(),
                version: self.version,
            });
            if at == top || !at.pop() {
                break;
            }
        }
        found
    }
}

/// A line of `mountinfo` (proc_pid_mountinfo(5)), where it is a hierarchy that may bound memory.
fn mount(line: &str) -> Option<Mount> {
    // ABI: `id parent device root at options [optional]... - type source super-options`.
    let (first, last) = line.split_once(" - ")?;
    let mut first = first.split(' ').skip(3);
    let (root, at) = (first.next()?, first.next()?);
    let mut last = last.split(' ');
    let (kind, options) = (last.next()?, last.nth(1).unwrap_or(""));
    let version = match kind {
        "cgroup2" => Version::Two,
        "cgroup" if options.split(',').any(|one| one == "memory") => Version::One,
        _ => return None,
    };
    Some(Mount {
        version,
        root: unescape(root),
        at: unescape(at),
    })
}

/// Blanks in a path are octal numbers there.
fn unescape(text: &str) -> PathBuf {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('\\') {
        out.push_str(before);
        let number = after.get(..3).and_then(|n| u8::from_str_radix(n, 8).ok());
        match number {
            Some(byte) => {
                out.push(char::from(byte));
                rest = after.get(3..).unwrap_or("");
            }
            None => {
                out.push('\\');
                rest = after;
            }
        }
    }
    out.push_str(rest);
    out.into()
}
