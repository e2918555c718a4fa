//! What a client claims, and what the kernel says of a process. Everything a client wrote is copied
//! out here, once, into plain values; if it is nonsense, the loss is that client's own.

use std::io::Read;
use std::os::fd::{AsFd, AsRawFd};

use channel::arbiter::ClientPages;

/// What a client, or all of a tenant's, claim to be doing on a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Activity {
    /// A thread waits at the gate.
    pub waits: bool,
    /// A thread is inside a blocking driver call.
    pub blocking: bool,
    /// Marks that are outstanding.
    pub marks: u64,
    /// Work was submitted that no mark covers.
    pub unmarked: bool,
    /// A number that changes with every submission.
    pub launches: u64,
    /// A number that changes with every mark that passes.
    pub passed: u64,
}

impl Activity {
    /// Whether marks are outstanding.
    pub fn in_flight(self) -> bool {
        self.marks > 0
    }

    /// Whether anything is on the device, or may be.
    pub fn is_on_device(self) -> bool {
        self.in_flight() || self.blocking
    }

    /// Of two clients together.
    pub fn and(self, other: Self) -> Self {
        Self {
            waits: self.waits || other.waits,
            blocking: self.blocking || other.blocking,
            marks: self.marks.saturating_add(other.marks),
            unmarked: self.unmarked || other.unmarked,
            launches: self.launches.wrapping_add(other.launches),
            passed: self.passed.wrapping_add(other.passed),
        }
    }
}

/// Whether a thread waits at the gate of `device`.
pub fn waits(pages: &ClientPages, device: usize) -> bool {
    pages.client.waiting(device) > 0
}

/// All that is claimed about `device`.
pub fn activity(pages: &ClientPages, device: usize) -> Activity {
    let client = &pages.client;
    let in_flight = client.in_flight(device);
    Activity {
        waits: client.waiting(device) > 0,
        blocking: client.blocking(device) > 0,
        marks: in_flight.marks,
        unmarked: client.unmarked(device),
        launches: client.launches_on(device),
        passed: in_flight.passed,
    }
}

/// Process and user at the other end of a socket. The process is 0 where it is in a PID namespace
/// that ours does not see: rustix has no value for that.
pub fn credentials(socket: impl AsFd) -> std::io::Result<(u32, u32)> {
    use nix::libc;
    let mut peer = libc::ucred {
        pid: 0,
        uid: 0,
        gid: 0,
    };
    // CAST: twelve bytes.
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: a structure and its length, both of which outlive the call.
    let status = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut length,
        )
    };
    match status {
        0 => Ok((u32::try_from(peer.pid).unwrap_or(0), peer.uid)),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// Start time of a process in clock ticks since boot (field 22 of `/proc/PID/stat`, see
/// proc_pid_stat(5)); `None`: gone.
///
/// # Errors
/// It is not known, for want of descriptors above all.
pub fn started_ticks(pid: u32) -> std::io::Result<Option<u64>> {
    // One read: the kernel makes the whole line for it, some 300 bytes. What is needed is well
    // within the buffer, whatever the numbers.
    let mut buffer = [0; 1024];
    let read = std::fs::File::open(format!("/proc/{pid}/stat"))
        .and_then(|mut file| file.read(&mut buffer));
    let length = match read {
        Ok(length) => length,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) if error.raw_os_error() == Some(nix::libc::ESRCH) => return Ok(None),
        Err(error) => return Err(error),
    };
    Ok(buffer.get(..length).and_then(started_in))
}

/// Whether the process that started then still runs.
///
/// # Errors
/// Those of [`started_ticks`].
pub fn is_alive(pid: u32, since_ticks: u64) -> std::io::Result<bool> {
    Ok(started_ticks(pid)? == Some(since_ticks))
}

/// The start time in a line of `stat`; `None`: the process has ended and is not reaped.
fn started_in(stat: &[u8]) -> Option<u64> {
    // The second field is the name in parentheses and may contain anything; count from the last
    // one.
    let rest = &stat[stat.iter().rposition(|byte| *byte == b')')? + 1..];
    let mut fields = std::str::from_utf8(rest).ok()?.split_ascii_whitespace();
    if fields.next()? == "Z" {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

/// The parent of a process; `None`: it has ended.
pub fn parent_of(pid: u32) -> Option<u32> {
    let mut buffer = [0; 1024];
    let mut file = std::fs::File::open(format!("/proc/{pid}/stat")).ok()?;
    let length = file.read(&mut buffer).ok()?;
    let line = buffer.get(..length)?;
    let rest = line.get(line.iter().rposition(|byte| *byte == b')')? + 1..)?;
    let mut fields = std::str::from_utf8(rest).ok()?.split_ascii_whitespace();
    fields.nth(1)?.parse().ok()
}

/// The present in clock ticks since boot, in which start times of processes are given.
pub fn now_ticks() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    // SAFETY: reads a constant of the system.
    let per_second = unsafe { nix::libc::sysconf(nix::libc::_SC_CLK_TCK) };
    let per_second = u64::try_from(per_second).unwrap_or(100);
    // CAST: the clock starts at zero.
    let (seconds, nanos) = (now.tv_sec as u64, now.tv_nsec as u64);
    seconds * per_second + nanos * per_second / 1_000_000_000
}

/// Threads of a process whose waiting is looked at.
const THREADS: usize = 64;

/// How long threads of a process have been ready to run and had no processor, in nanoseconds, all
/// of them together (the second field of `/proc/PID/task/TID/schedstat`); `None`: this kernel does
/// not say. A process that is stopped or sleeps waits for none.
pub fn waited_for_cpu_ns(pid: u32) -> Option<u64> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).ok()?;
    let mut waited_ns = None;
    for task in tasks.take(THREADS).flatten() {
        let Ok(text) = std::fs::read_to_string(task.path().join("schedstat")) else {
            continue;
        };
        let field = text.split_ascii_whitespace().nth(1);
        let Some(ns) = field.and_then(|ns| ns.parse::<u64>().ok()) else {
            continue;
        };
        waited_ns = Some(ns.saturating_add(waited_ns.unwrap_or(0)));
    }
    waited_ns
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_living_process_has_a_start_time_and_a_dead_one_has_none() {
        let mut child = std::process::Command::new("sleep")
            .arg("1000")
            .spawn()
            .expect("sleep starts");
        let started = |pid| started_ticks(pid).expect("a line").expect("it lives");
        let (ours, theirs) = (started(std::process::id()), started(child.id()));
        assert!(theirs >= ours && ours > 0);
        assert!((theirs..theirs + 6000).contains(&now_ticks()), "{theirs}");
        child.kill().expect("kill");
        let pid = child.id();
        testbed::within::wait(&mut child, "sleep", testbed::PATIENCE);
        assert_eq!(started_ticks(pid).expect("no line"), None);
    }

    #[test]
    fn what_waits_for_a_processor_is_known_and_what_sleeps_waits_for_none() {
        use std::time::{Duration, Instant};
        let mut asleep = std::process::Command::new("sleep")
            .arg("1000")
            .spawn()
            .expect("sleep starts");
        let before = waited_for_cpu_ns(asleep.id());
        // More threads that compute than there are processors: each of them has to wait.
        let over = std::sync::atomic::AtomicBool::new(false);
        let count = std::thread::available_parallelism().map_or(4, usize::from) * 2;
        let deadline = Instant::now() + Duration::from_secs(60);
        std::thread::scope(|scope| {
            for _ in 0..count {
                scope.spawn(|| {
                    while !over.load(std::sync::atomic::Ordering::Relaxed) {
                        std::hint::spin_loop();
                    }
                });
            }
            let ours = || waited_for_cpu_ns(std::process::id());
            let first = ours();
            while let (Some(first), Some(now)) = (first, ours())
                && now < first + 50_000_000
            {
                assert!(Instant::now() < deadline, "{now} ns after {first}");
                std::thread::sleep(Duration::from_millis(1));
            }
            over.store(true, std::sync::atomic::Ordering::Relaxed);
        });
        let after = waited_for_cpu_ns(asleep.id());
        if let (Some(before), Some(after)) = (before, after) {
            // It may still have been on its way to sleep.
            assert!(after - before < 10_000_000_000);
        }
        asleep.kill().expect("kill");
        asleep.wait().expect("wait");
        assert_eq!(waited_for_cpu_ns(u32::MAX), None);
    }

    #[test]
    fn activities_add_up() {
        let one = Activity {
            waits: true,
            launches: u64::MAX,
            ..Activity::default()
        };
        let other = Activity {
            marks: 2,
            launches: 3,
            ..Activity::default()
        };
        let both = one.and(other);
        assert!(both.waits && both.in_flight() && !both.blocking);
        assert_eq!(both.launches, 2);
    }
}
