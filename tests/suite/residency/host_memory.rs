//! Copies in host memory stay within what the host, and the job's control groups, have left.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use channel::{Event, OrderState, Reason, Verb};
use tests::{ProgramRun, Sandbox, programs};

use super::{Host, MIB};

/// The host's files as a container of version 2 inside of a pod finds them; the pod has the limit.
struct Files(Sandbox);

impl Files {
    fn of_a_pod(limit_bytes: u64) -> Self {
        let files = Self(Sandbox::exclusive());
        files.write(
            "proc/meminfo",
            "MemTotal: 67108864 kB\nMemAvailable: 50331648 kB\n",
        );
        files.write("proc/self/cgroup", "0::/pod/container\n");
        files.write(
            "proc/self/mountinfo",
            "29 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
        );
        files.group("pod/container", "max");
        files.group("pod", &limit_bytes.to_string());
        files
    }

    fn group(&self, path: &str, max: &str) {
        for (name, text) in [("max", max), ("high", "max"), ("current", "0")] {
            self.write(&format!("sys/fs/cgroup/{path}/memory.{name}"), text);
        }
    }

    fn write(&self, path: &str, text: &str) {
        let at = self.root().join(path);
        std::fs::create_dir_all(at.parent().expect("a folder")).expect("a folder");
        std::fs::write(at, text).expect("a file");
    }

    fn root(&self) -> PathBuf {
        self.0.path("host")
    }
}

#[test]
fn an_eviction_beyond_the_limit_of_a_control_group_is_refused_and_says_so() {
    let files = Files::of_a_pod(100 * MIB);
    let root = files.root();
    let vars = [("SUBLET_HOST_ROOT", root.to_str().expect("a path"))];
    let mut host = Host::with(&vars, false, None);
    let id = host.take(&format!("alloc {}", 80 * MIB));
    host.says(&format!("fill {id} 3"), "0");
    host.arbiter.records();
    host.arbiter.close();
    host.arbiter.order(Verb::Evict, 0);
    assert_eq!(
        host.arbiter.answered(),
        (OrderState::Refused, Reason::HostGroup)
    );
    host.arbiter.open();
    assert_eq!(
        host.arbiter.records(),
        [Event::HostShort {
            needed_bytes: 80 * MIB,
            // A part of the limit is left to those that do not ask.
            available_bytes: 68 * MIB,
            group_limit_bytes: 100 * MIB,
        }]
    );
    assert_eq!(host.on_the_device(), 80 * MIB, "nothing has moved");
    assert_eq!(host.arbiter.footprint().host_bytes, 0);
    host.says(&format!("check {id} 3"), "0 0");
    files.group("pod", &(1000 * MIB).to_string());
    host.evict();
    host.restore();
    host.says(&format!("check {id} 3"), "0 0");
    host.ended_well();
}

/// Most memory that a process ever had, in bytes.
fn peak_bytes(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("a process");
    let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.trim().strip_suffix("kB"));
    kib.expect("a figure").trim().parse::<u64>().expect("KiB") * 1024
}

#[test]
fn host_copies_have_their_pages_before_anything_moves() {
    // Nothing was written on the device, so that the simulated one takes no pages for the copies,
    // and gives these back afterwards.
    for (words, there) in [("reuse=0,pin=0", true), ("reuse=0,pin=0,touch=0", false)] {
        let mut host = Host::with(&[("SUBLET_RESIDENCY", words)], false, None);
        host.take(&format!("alloc {}", 64 * MIB));
        let before = peak_bytes(host.run.running.pid());
        host.evict();
        let more = peak_bytes(host.run.running.pid()).saturating_sub(before);
        assert_eq!(more >= 60 * MIB, there, "{words}: {more}");
        host.restore();
        host.ended_well();
    }
}

/// A control group of this machine's, which goes with it.
struct Group {
    at: PathBuf,
    limit: &'static str,
    kills: &'static str,
}

impl Group {
    /// `None`: none can be made here.
    fn new() -> Option<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("sublet-suite-{}-{number}", std::process::id());
        [
            (
                Path::new("/sys/fs/cgroup/memory"),
                "memory.limit_in_bytes",
                "memory.oom_control",
            ),
            (Path::new("/sys/fs/cgroup"), "memory.max", "memory.events"),
        ]
        .into_iter()
        .find_map(|(top, limit, kills)| {
            let at = top.join(&name);
            std::fs::create_dir(&at).ok()?;
            let group = Self { at, limit, kills };
            group.set_limit(u64::MAX >> 2).then_some(group)
        })
    }

    fn set_limit(&self, bytes: u64) -> bool {
        std::fs::write(self.at.join(self.limit), bytes.to_string()).is_ok()
    }

    fn take_in(&self, pid: u32) -> bool {
        std::fs::write(self.at.join("cgroup.procs"), pid.to_string()).is_ok()
    }

    fn kills(&self) -> u64 {
        let text = std::fs::read_to_string(self.at.join(self.kills)).unwrap_or_default();
        let line = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
        line.map_or(0, |number| number.trim().parse().expect("a number"))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.at);
    }
}

#[test]
fn a_job_in_a_real_control_group_is_not_killed_for_its_eviction() {
    let Some(group) = Group::new() else {
        println!("skipped: no control group with a memory limit can be made here");
        return;
    };
    let mut host = Host::start();
    if !group.take_in(host.run.running.pid()) || !group.set_limit(256 * MIB) {
        println!("skipped: no process can be moved to a control group here");
        host.ended_well();
        return;
    }
    // Nothing was written to it: the simulated device has no pages for it, and all that it takes is
    // its host copy.
    host.take(&format!("alloc {}", 400 * MIB));
    host.arbiter.close();
    host.arbiter.order(Verb::Evict, 0);
    assert_eq!(
        host.arbiter.answered(),
        (OrderState::Refused, Reason::HostGroup)
    );
    assert!(group.set_limit(1000 * MIB));
    host.evict();
    host.restore();
    assert_eq!(group.kills(), 0);
    host.ended_well();
}

#[test]
fn the_simulated_device_takes_no_more_of_the_host_than_it_may() {
    let sandbox = Sandbox::exclusive();
    let mut command = sandbox.bare(programs::program("resident"));
    // No host has so much: nothing may be written to pages that are not there.
    command.env("SUBLET_SIM_HEADROOM", "1000TiB");
    let mut run = ProgramRun::start(&mut command);
    assert_eq!(run.ask("init"), "0");
    assert_eq!(run.ask(&format!("alloc {}", 64 * MIB)), "0 0");
    assert_eq!(run.ask("fill 0 3"), "2", "CUDA_ERROR_OUT_OF_MEMORY");
    // What was never written costs nothing, and reads as zeros; the context is as well as before.
    assert_eq!(run.ask("words 0 0"), "0 0");
    assert_eq!(run.ask("free 0"), "0");
    let outcome = run.finish();
    assert_eq!((outcome.code, outcome.stdout.as_str()), (Some(0), ""));
    assert_eq!(outcome.stderr.lines().count(), 1, "{outcome:?}");
    for word in ["CUDA_ERROR_OUT_OF_MEMORY", "SUBLET_SIM_HEADROOM"] {
        assert!(outcome.stderr.contains(word), "{outcome:?}");
    }
}

/// A bare program that takes all that it can of a device of 141 GB, in a control group of half a
/// gigabyte; `None`: none can be made here.
struct Greedy {
    run: ProgramRun,
}

const GROUP_BYTES: u64 = 512 * MIB;

impl Greedy {
    fn start(group: &Group, sandbox: &Sandbox) -> Option<Self> {
        let mut command = sandbox.bare(programs::program("greedy"));
        command.env("SUBLET_SIM_CAPACITY", "141GiB");
        let mut run = ProgramRun::start(&mut command);
        if !group.take_in(run.running.pid()) {
            println!("skipped: no process can be moved to a control group here");
            run.ended_well();
            return None;
        }
        assert_eq!(run.ask("init"), "0");
        Some(Self { run })
    }

    /// Status and MiB of a way to take memory.
    fn takes(&mut self, way: &str) -> (u32, u64) {
        let answer = self.run.ask(way);
        let mut words = answer.split(' ').map(|word| word.parse::<u64>());
        let mut next = || words.next().expect(&answer).expect(&answer);
        // CAST: a status.
        (next() as u32, next())
    }
}

const OUT_OF_MEMORY: u32 = 2;

#[test]
fn a_program_that_touches_141_gb_on_a_small_host_is_refused_and_lives() {
    let Some(group) = Group::new().filter(|group| group.set_limit(GROUP_BYTES)) else {
        println!("skipped: no control group with a memory limit can be made here");
        return;
    };
    let sandbox = Sandbox::exclusive();
    let Some(mut greedy) = Greedy::start(&group, &sandbox) else {
        return;
    };
    // One after the other, so that each finds what the one before has given back.
    for way in ["fill", "pages", "copy", "handles", "back"] {
        let (status, mib) = greedy.takes(way);
        println!("now: {way}: status {status} after {mib} MiB");
        assert_eq!(status, OUT_OF_MEMORY, "{way} {mib}");
        // The program itself takes some of it.
        assert!((64..GROUP_BYTES / MIB).contains(&mib), "{way} {mib}");
    }
    // What the program could then write to by itself is not given at all.
    for way in ["managed", "locked"] {
        let (status, mib) = greedy.takes(way);
        println!("now: {way}: status {status} after {mib} MiB");
        assert_eq!(status, OUT_OF_MEMORY, "{way} {mib}");
        assert!(mib <= GROUP_BYTES / MIB, "{way} {mib}");
    }
    assert_eq!(group.kills(), 0);
    let outcome = greedy.run.finish();
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
    assert_eq!(outcome.stderr.lines().count(), 1, "said once: {outcome:?}");
    assert!(
        outcome
            .stderr
            .contains("the control group's limit of 512 MiB"),
        "{outcome:?}"
    );
}

#[test]
fn several_processes_together_take_no_more_than_their_control_group_has() {
    let Some(group) = Group::new().filter(|group| group.set_limit(GROUP_BYTES)) else {
        println!("skipped: no control group with a memory limit can be made here");
        return;
    };
    let sandbox = Sandbox::exclusive();
    let started: Option<Vec<Greedy>> = (0..4).map(|_| Greedy::start(&group, &sandbox)).collect();
    let Some(mut all) = started else {
        return;
    };
    for way in ["fill", "pages", "copy"] {
        all.iter_mut().for_each(|one| one.run.send(way));
        for one in &mut all {
            let answer = one.run.answer();
            assert!(answer.starts_with("2 "), "{way}: {answer}");
        }
    }
    assert_eq!(group.kills(), 0);
    for one in all {
        let outcome = one.run.finish();
        assert_eq!(outcome.code, Some(0), "{outcome:?}");
    }
}

#[test]
fn memory_that_another_process_lends_is_bounded_as_well() {
    let Some(group) = Group::new().filter(|group| group.set_limit(GROUP_BYTES)) else {
        println!("skipped: no control group with a memory limit can be made here");
        return;
    };
    let sandbox = Sandbox::exclusive();
    let (Some(mut lender), Some(mut borrower)) = (
        Greedy::start(&group, &sandbox),
        Greedy::start(&group, &sandbox),
    ) else {
        return;
    };
    let lent = lender.run.ask("lend");
    let (status, mib) = borrower.takes(&format!("borrow {lent}"));
    assert_eq!(status, OUT_OF_MEMORY, "{mib}");
    assert!((64..GROUP_BYTES / MIB).contains(&mib), "{mib}");
    assert_eq!(group.kills(), 0);
    assert_eq!(borrower.run.finish().code, Some(0));
    assert_eq!(lender.run.finish().code, Some(0));
}
