use std::sync::atomic::{AtomicU32, Ordering};

use super::*;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// Files as a process finds them, in a folder that goes with it.
struct Fixture(PathBuf);

impl Fixture {
    fn new(own: &str, mounts: &str) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("host-memory-{}-{number}", std::process::id());
        let fixture = Self(std::env::temp_dir().join(name));
        fixture.file(
            "proc/meminfo",
            &format!(
                "MemTotal: {} kB\nMemAvailable: {} kB\n",
                64 * GIB / 1024,
                48 * GIB / 1024
            ),
        );
        fixture.file("proc/self/cgroup", own);
        fixture.file("proc/self/mountinfo", mounts);
        fixture
    }

    fn file(&self, path: &str, text: &str) {
        let at = self.0.join(path);
        std::fs::create_dir_all(at.parent().expect("a folder")).expect("a folder");
        std::fs::write(at, text).expect("a file");
    }

    /// A group of version 2.
    fn two(&self, path: &str, max: &str, high: &str, current: u64, inactive: u64) {
        self.file(&format!("{path}/memory.max"), max);
        self.file(&format!("{path}/memory.high"), high);
        self.file(&format!("{path}/memory.current"), &format!("{current}\n"));
        self.file(
            &format!("{path}/memory.stat"),
            &format!("anon 1\ninactive_file {inactive}\nactive_file 7\n"),
        );
    }

    /// A group of version 1.
    fn one(&self, path: &str, limit: u64, usage: u64, inactive: u64) {
        self.file(
            &format!("{path}/memory.limit_in_bytes"),
            &format!("{limit}\n"),
        );
        self.file(
            &format!("{path}/memory.usage_in_bytes"),
            &format!("{usage}\n"),
        );
        self.file(
            &format!("{path}/memory.stat"),
            &format!("inactive_file 5\ntotal_inactive_file {inactive}\n"),
        );
    }

    fn space(&self) -> Space {
        Standing::under(&self.0).space()
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

const UNIFIED: &str = "29 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n";
const SPLIT: &str = "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n\
     35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
     36 31 0:33 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n\
     41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";

#[test]
fn without_a_limit_the_host_is_the_bound() {
    let fixture = Fixture::new("0::/user.slice\n", UNIFIED);
    fixture.two("sys/fs/cgroup/user.slice", "max\n", "max\n", 900 * GIB, 0);
    let space = fixture.space();
    assert_eq!(space.available_bytes, 48 * GIB);
    assert_eq!(space.free_bytes, 47 * GIB, "some stays free");
    assert_eq!(
        space.bound,
        Bound::Host {
            total_bytes: 64 * GIB
        }
    );
    // The group of version 1 that says "none".
    let fixture = Fixture::new("4:memory:/\n", SPLIT);
    fixture.one("sys/fs/cgroup/memory", 9_223_372_036_854_771_712, GIB, 0);
    assert_eq!(fixture.space().available_bytes, 48 * GIB);
}

#[test]
fn the_whole_is_the_least_bound_whatever_is_used_of_it() {
    let fixture = Fixture::new("0::/job\n", UNIFIED);
    fixture.two("sys/fs/cgroup/job", "max\n", "max\n", GIB, 0);
    let whole = |fixture: &Fixture| Standing::under(&fixture.0).whole();
    assert_eq!(whole(&fixture).available_bytes, 64 * GIB);
    assert_eq!(whole(&fixture).free_bytes, 63 * GIB, "some stays free");
    fixture.two("sys/fs/cgroup/job", "2147483648\n", "max\n", GIB, 0);
    assert_eq!(whole(&fixture).available_bytes, 2 * GIB);
    assert!(whole(&fixture).is_of_a_group());
}

#[test]
fn the_limit_of_version_2_counts_with_what_is_used() {
    let fixture = Fixture::new("0::/job\n", UNIFIED);
    fixture.two("sys/fs/cgroup/job", "2147483648\n", "max\n", GIB, 256 * MIB);
    let space = fixture.space();
    assert_eq!(
        space.available_bytes,
        GIB + 256 * MIB,
        "clean pages of files are given back"
    );
    assert_eq!(space.free_bytes, GIB + 128 * MIB, "a sixteenth is left");
    assert_eq!(
        space.bound,
        Bound::Group {
            limit_bytes: 2 * GIB,
            version: Version::Two
        }
    );
    // Where the kernel begins to make it wait counts like the limit.
    fixture.two("sys/fs/cgroup/job", "max\n", "1610612736\n", GIB, 0);
    assert_eq!(fixture.space().available_bytes, GIB / 2);
    // More used than allowed, as after the limit was lowered.
    fixture.two("sys/fs/cgroup/job", "1000000\n", "max\n", GIB, 0);
    assert_eq!(
        (fixture.space().available_bytes, fixture.space().free_bytes),
        (0, 0)
    );
}

#[test]
fn the_limit_of_version_1_counts_beside_a_unified_hierarchy_without_memory() {
    let fixture = Fixture::new(
        "9:name=systemd:/\n4:cpu,memory:/a/b\n1:cpuset:/elsewhere\n0::/\n",
        SPLIT,
    );
    fixture.one("sys/fs/cgroup/memory/a/b", 3 * GIB, 2 * GIB, GIB / 2);
    let space = fixture.space();
    assert_eq!(space.available_bytes, GIB + GIB / 2);
    assert_eq!(
        space.bound,
        Bound::Group {
            limit_bytes: 3 * GIB,
            version: Version::One
        }
    );
}

#[test]
fn the_narrowest_of_nested_groups_counts() {
    for (own, above, least) in [(4, 9, 3), (9, 4, 3), (6, 6, 5)] {
        let fixture = Fixture::new("0::/pod/container\n", UNIFIED);
        let limit = |gib: u64| format!("{}\n", gib * GIB);
        fixture.two("sys/fs/cgroup/pod/container", &limit(own), "max\n", GIB, 0);
        fixture.two("sys/fs/cgroup/pod", &limit(above), "max\n", GIB, 0);
        assert_eq!(
            fixture.space().available_bytes,
            least * GIB,
            "{own} {above}"
        );
    }
    // The one above is nearly full by others; its own part has plenty.
    let fixture = Fixture::new("0::/pod/container\n", UNIFIED);
    fixture.two("sys/fs/cgroup/pod/container", "4294967296\n", "max\n", 0, 0);
    fixture.two(
        "sys/fs/cgroup/pod",
        "8589934592\n",
        "max\n",
        8 * GIB - 100 * MIB,
        0,
    );
    assert_eq!(fixture.space().available_bytes, 100 * MIB);
    let fixture = Fixture::new("4:memory:/pod/container\n", SPLIT);
    fixture.one("sys/fs/cgroup/memory/pod/container", 8 * GIB, 0, 0);
    fixture.one("sys/fs/cgroup/memory/pod", 8 * GIB, 6 * GIB, 0);
    assert_eq!(fixture.space().available_bytes, 2 * GIB);
}

#[test]
fn a_container_finds_its_own_group_whatever_the_host_shows() {
    // The path is the host's, the mount begins at the container's group.
    let mounts = "29 23 0:26 /docker/abc /sys/fs/cgroup ro - cgroup2 cgroup2 rw\n";
    let fixture = Fixture::new("0::/docker/abc/inner\n", mounts);
    fixture.two("sys/fs/cgroup", "5368709120\n", "max\n", GIB, 0);
    fixture.two("sys/fs/cgroup/inner", "max\n", "max\n", GIB, 0);
    assert_eq!(fixture.space().available_bytes, 4 * GIB);
    // The same, the process outside of what the mount shows.
    for own in ["0::/../other\n", "0::/somewhere/else\n"] {
        let fixture = Fixture::new(own, mounts);
        fixture.two("sys/fs/cgroup", "5368709120\n", "max\n", GIB, 0);
        assert_eq!(fixture.space().available_bytes, 4 * GIB, "{own}");
    }
    // A namespace of its own, and a mount point with a blank in it.
    let mounts = "29 23 0:26 / /sys/fs/c\\040g rw - cgroup2 cgroup2 rw\n";
    let fixture = Fixture::new("0::/\n", mounts);
    fixture.two("sys/fs/c g", "1073741824\n", "max\n", 0, 0);
    assert_eq!(fixture.space().available_bytes, GIB);
}

#[test]
fn nothing_that_can_be_read_bounds_nothing() {
    let space = Standing::under(Path::new("/nonexistent")).space();
    assert_eq!(space, Space::UNKNOWN);
    let fixture = Fixture::new("nonsense\n:::\n0::/x\n", "nonsense\n - \n- cgroup2\n");
    assert_eq!(fixture.space().available_bytes, 48 * GIB);
}

#[test]
fn the_host_tells_its_memory() {
    let text = "MemTotal:       24689764 kB\nMemFree:        1 kB\nMemAvailable:   23000000 kB\n";
    assert_eq!(
        Memory::parse(text),
        Some(Memory {
            total_bytes: 24_689_764 * 1024,
            available_bytes: 23_000_000 * 1024
        })
    );
    assert_eq!(Memory::parse("MemTotal: 3 kB\n"), None);
    assert!(Memory::of_this_host().is_some_and(|memory| memory.total_bytes > 0));
    assert!(Standing::of_this_process().space().available_bytes < u64::MAX);
}
