//! How much of the host's memory a process can still take before the kernel refuses it or kills
//! somebody.
//!
//! Two things bound it: what the host has (`/proc/meminfo`), and the limits of the control groups
//! that the process is in. In a container the second is the one that counts: the kernel does not
//! refuse a page beyond it, it kills. A group's limit holds for all groups below it, so the least
//! over all ancestors is what is left. Version 1 and version 2 are both read, and both at once
//! where a host has both.
//!
//! What a group could give back by itself (clean pages of files that nobody has used lately,
//! `inactive_file`) does not count as used, as in the figure that container managers evict by. Swap
//! is not counted on: pinned pages do not go there.
//!
//! No dependencies and no state: this runs in strangers' processes, in the simulated driver and in
//! the daemon.

#![forbid(unsafe_code)]

use std::fs::read_to_string;
use std::path::{Component, Path, PathBuf};

mod groups;

pub use groups::Version;
use groups::{Group, groups_of};

/// Least and most that is left alone of any bound, whose sixteenth it is otherwise.
const MARGIN_BYTES: std::ops::RangeInclusive<u64> = (32 << 20)..=(1 << 30);

/// The whole host, by its own account.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Memory {
    /// In all.
    pub total_bytes: u64,
    /// Without taking it from anybody.
    pub available_bytes: u64,
}

impl Memory {
    /// As `/proc/meminfo` tells it (proc_meminfo(5)).
    pub fn of_this_host() -> Option<Self> {
        Self::parse(&read_to_string("/proc/meminfo").ok()?)
    }

    /// The same from its text.
    pub fn parse(text: &str) -> Option<Self> {
        let bytes = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name))?;
            let number = line.strip_prefix(':')?.trim().strip_suffix("kB")?.trim();
            number.parse::<u64>().ok()?.checked_mul(1024)
        };
        Some(Self {
            total_bytes: bytes("MemTotal")?,
            available_bytes: bytes("MemAvailable")?,
        })
    }
}

/// What bounds a process most.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Bound {
    /// Nothing that could be read.
    Unknown,
    /// The host's own memory.
    Host {
        /// In all, in bytes.
        total_bytes: u64,
    },
    /// A control group.
    Group {
        /// Its limit in bytes.
        limit_bytes: u64,
        /// Which kind.
        version: Version,
    },
}

/// What a process can still take.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Space {
    /// Bytes up to the bound; `u64::MAX` where none is known.
    pub available_bytes: u64,
    /// Of these, bytes that should be taken at most: the rest is left for processes that do not
    /// ask.
    pub free_bytes: u64,
    /// What bounds it.
    pub bound: Bound,
}

impl Space {
    const UNKNOWN: Self = Self {
        available_bytes: u64::MAX,
        free_bytes: u64::MAX,
        bound: Bound::Unknown,
    };

    fn under(of_bytes: u64, available_bytes: u64, bound: Bound) -> Self {
        let margin = (of_bytes / 16).clamp(*MARGIN_BYTES.start(), *MARGIN_BYTES.end());
        Self {
            available_bytes,
            free_bytes: available_bytes.saturating_sub(margin),
            bound,
        }
    }

    /// Whether the bound is a control group's.
    pub fn is_of_a_group(&self) -> bool {
        matches!(self.bound, Bound::Group { .. })
    }
}

/// Where a process stands: found once, looked at often.
#[derive(Clone, Debug)]
pub struct Standing {
    meminfo: PathBuf,
    groups: Vec<Group>,
}

impl Standing {
    /// Of this process.
    pub fn of_this_process() -> Self {
        Self::under(Path::new("/"))
    }

    /// Of this process as the files below `root` tell it: `proc/meminfo`, `proc/self/cgroup`,
    /// `proc/self/mountinfo`, and the groups' own at the mount points that the last one names.
    pub fn under(root: &Path) -> Self {
        let text = |path: &str| read_to_string(root.join(path)).unwrap_or_default();
        Self {
            meminfo: root.join("proc/meminfo"),
            groups: groups_of(
                root,
                &text("proc/self/cgroup"),
                &text("proc/self/mountinfo"),
            ),
        }
    }

    /// What the process can still take now: the least of all its bounds.
    pub fn space(&self) -> Space {
        self.least(|left_bytes, _| left_bytes)
    }

    /// What the process could take if nothing else were in use: the least of all its bounds, empty.
    pub fn whole(&self) -> Space {
        self.least(|_, of_bytes| of_bytes)
    }

    /// The least bound, by what `available` says of its free bytes and of all.
    fn least(&self, available: impl Fn(u64, u64) -> u64) -> Space {
        let host = read_to_string(&self.meminfo)
            .ok()
            .and_then(|text| Memory::parse(&text))
            .map(|memory| {
                let total_bytes = memory.total_bytes;
                let bound = Bound::Host { total_bytes };
                let available_bytes = available(memory.available_bytes, total_bytes);
                Space::under(total_bytes, available_bytes, bound)
            });
        let groups = self.groups.iter().filter_map(|group| {
            let (limit_bytes, used_bytes) = group.look()?;
            let bound = Bound::Group {
                limit_bytes,
                version: group.version,
            };
            let left = limit_bytes.saturating_sub(used_bytes);
            Some(Space::under(
                limit_bytes,
                available(left, limit_bytes),
                bound,
            ))
        });
        host.into_iter()
            .chain(groups)
            .min_by_key(|space| space.free_bytes)
            .unwrap_or(Space::UNKNOWN)
    }
}

/// `path`, which begins with a slash, inside of `root`.
fn inside(root: &Path, path: &Path) -> PathBuf {
    let parts = path
        .components()
        .filter(|part| matches!(part, Component::Normal(_)));
    let mut joined = root.to_owned();
    joined.extend(parts);
    joined
}

#[cfg(test)]
mod tests;
