//! What a client claims, and what the kernel says of a process. Everything a client wrote is copied
//! out here, once, into plain values; if it is nonsense, the loss is that client's own.

use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use channel::arbiter::ClientPages;
use rustix::io::Errno;
use rustix::process::Pid;

/// What a client, or all of a tenant's, claim to be doing on a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Activity {
    /// A thread waits at the gate.
    pub waits: bool,
    /// A thread is inside a blocking driver call.
    pub blocking: bool,
    /// Marks that are outstanding, but for those of streams that wait for the host.
    pub marks: u64,
    /// A stream waits for the host: the device does nothing for it until that is over.
    pub waits_for_host: bool,
    /// Work was submitted that no mark covers.
    pub unmarked: bool,
    /// Submissions, since it is followed ([`tally`](crate::tally)).
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
            waits_for_host: self.waits_for_host || other.waits_for_host,
            unmarked: self.unmarked || other.unmarked,
            launches: self.launches.saturating_add(other.launches),
            // WRAPPING: only that it changes means something.
            passed: self.passed.wrapping_add(other.passed),
        }
    }
}

/// Whether a thread waits at the gate of `device`.
pub fn waits(pages: &ClientPages, device: usize) -> bool {
    pages.client.waiting(device) > 0
}

/// All that is claimed about `device`, but for submissions: what counts of them depends on what
/// was counted before.
pub fn activity(pages: &ClientPages, device: usize) -> Activity {
    let client = &pages.client;
    let in_flight = client.in_flight(device);
    Activity {
        waits: client.waiting(device) > 0,
        blocking: client.blocking(device) > 0,
        marks: in_flight.marks.saturating_sub(in_flight.waiting_marks),
        waits_for_host: in_flight.waiting_marks > 0,
        unmarked: client.unmarked(device),
        launches: 0,
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

/// The process that connected a socket; `pid` is its number. `None`: it has ended, or is not seen
/// from here.
///
/// Kernels before 6.5 do not give it: then it is the process that has the number now.
///
/// # Errors
/// There are no descriptors left.
pub fn process_of(socket: impl AsFd, pid: u32) -> std::io::Result<Option<OwnedFd>> {
    use nix::libc;
    let mut process: libc::c_int = -1;
    // CAST: four bytes.
    let mut length = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: a number and its length, both of which outlive the call.
    let status = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERPIDFD,
            (&raw mut process).cast(),
            &raw mut length,
        )
    };
    if status == 0 {
        // SAFETY: the kernel has opened this descriptor for us just now, and nobody else has it.
        return Ok(Some(unsafe { OwnedFd::from_raw_fd(process) }));
    }
    let error = std::io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::ENOPROTOOPT) => {}
        Some(libc::EMFILE | libc::ENFILE) => return Err(error),
        _ => return Ok(None),
    }
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let flags = rustix::process::PidfdFlags::empty();
    match pid.map(|pid| rustix::process::pidfd_open(pid, flags)) {
        Some(Ok(process)) => Ok(Some(process)),
        Some(Err(errno @ (Errno::MFILE | Errno::NFILE))) => Err(errno.into()),
        Some(Err(_)) | None => Ok(None),
    }
}

/// Whether the process of a pidfd has ended.
pub fn has_ended(process: impl AsFd) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let mut fds = [PollFd::new(&process, PollFlags::IN)];
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // Where the kernel does not say, nothing that goes by its number holds.
    !matches!(poll(&mut fds, Some(&now)), Ok(0))
}

/// Which of these pidfds are of processes that have ended. Where the kernel does not say, none.
pub fn which_have_ended<'a>(processes: &[BorrowedFd<'a>]) -> Vec<bool> {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let polled = |process: &BorrowedFd<'a>| PollFd::from_borrowed_fd(*process, PollFlags::IN);
    let mut fds: Vec<PollFd<'a>> = processes.iter().map(polled).collect();
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    let asked = poll(&mut fds, Some(&now)).is_ok();
    let ended = |fd: &PollFd<'_>| asked && fd.revents().contains(PollFlags::IN);
    fds.iter().map(ended).collect()
}

/// What the kernel says of a process in `/proc/PID/stat`, see proc_pid_stat(5).
struct Stat {
    /// It has ended and is not reaped.
    zombie: bool,
    /// By a signal, or by a debugger.
    stopped: bool,
    parent: u32,
    /// In clock ticks since boot.
    started_ticks: u64,
}

impl Stat {
    /// `None`: the process is gone.
    fn of(pid: u32) -> std::io::Result<Option<Self>> {
        // One read: the kernel makes the whole line for it, some 300 bytes. What is needed is well
        // within the buffer, whatever the numbers.
        let mut buffer = [0; 1024];
        let read = std::fs::File::open(format!("/proc/{pid}/stat"))
            .and_then(|mut file| file.read(&mut buffer));
        match read {
            Ok(length) => Ok(buffer.get(..length).and_then(Self::read)),
            Err(error) if is_gone(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn read(line: &[u8]) -> Option<Self> {
        // The second field is the name in parentheses and may contain anything; count from the
        // last one.
        let rest = line.get(line.iter().rposition(|byte| *byte == b')')? + 1..)?;
        let mut fields = std::str::from_utf8(rest).ok()?.split_ascii_whitespace();
        let state = fields.next()?;
        Some(Self {
            zombie: state == "Z",
            stopped: matches!(state, "T" | "t"),
            parent: fields.next()?.parse().ok()?,
            // Field 22.
            started_ticks: fields.nth(17)?.parse().ok()?,
        })
    }
}

/// Whether an error at a file of `/proc/PID` says that the process is gone, or not seen from here.
pub fn is_gone(error: &std::io::Error) -> bool {
    error.kind() == std::io::ErrorKind::NotFound || error.raw_os_error() == Some(nix::libc::ESRCH)
}

/// The parent of a process, and its start in clock ticks since boot; `None` where it cannot be seen
/// from here, or is nobody.
pub fn parent(pid: u32) -> Option<(u32, u64)> {
    let parent = Stat::of(pid).ok()??.parent;
    let stat = Stat::of(parent).ok()??;
    Some((parent, stat.started_ticks))
}

/// Start time of a process in clock ticks since boot; `None`: it has ended.
///
/// # Errors
/// It is not known, for want of descriptors above all.
pub fn started_ticks(pid: u32) -> std::io::Result<Option<u64>> {
    let living = Stat::of(pid)?.filter(|stat| !stat.zombie);
    Ok(living.map(|stat| stat.started_ticks))
}

/// Whether the process that started then still runs.
///
/// # Errors
/// Those of [`started_ticks`].
pub fn is_alive(pid: u32, since_ticks: u64) -> std::io::Result<bool> {
    Ok(started_ticks(pid)? == Some(since_ticks))
}

/// The process as its own PID namespace numbers it; `None` where that cannot be seen from here.
pub fn inner(pid: u32) -> Option<channel::InnerPid> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    // One number for each namespace that it is in, the innermost last.
    let numbers = status
        .lines()
        .find_map(|line| line.strip_prefix("NSpid:"))?;
    let namespace = std::fs::metadata(format!("/proc/{pid}/ns/pid")).ok()?;
    Some(channel::InnerPid {
        pid: numbers.split_ascii_whitespace().next_back()?.parse().ok()?,
        namespace: std::os::unix::fs::MetadataExt::ino(&namespace),
    })
}

/// The parent of a process; `None`: the process is gone.
pub fn parent_of(pid: u32) -> Option<u32> {
    Stat::of(pid).ok().flatten().map(|stat| stat.parent)
}

/// Whether a process is stopped, by SIGSTOP or the like: it does nothing until it is continued.
pub fn is_stopped(pid: u32) -> bool {
    Stat::of(pid)
        .ok()
        .flatten()
        .is_some_and(|stat| stat.stopped)
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
    fn the_process_that_connected_is_known_by_its_descriptor_until_it_ends() {
        let place = tempfile::tempdir().expect("a folder");
        let path = place.path().join("s");
        let listener = std::os::unix::net::UnixListener::bind(&path).expect("bound");
        let own = std::os::unix::net::UnixStream::connect(&path).expect("connected");
        let (accepted, _) = listener.accept().expect("accepted");
        let (pid, _) = credentials(&accepted).expect("known");
        let process = process_of(&accepted, pid).expect("descriptors");
        assert!(!has_ended(process.expect("this one")));
        drop(own);
        let mut child = std::process::Command::new("sleep").arg("1000").spawn();
        let child = child.as_mut().expect("sleep starts");
        let pid = rustix::process::Pid::from_child(child);
        let flags = rustix::process::PidfdFlags::empty();
        let process = rustix::process::pidfd_open(pid, flags).expect("a descriptor");
        assert!(!has_ended(&process));
        child.kill().expect("kill");
        testbed::within::wait(child, "sleep", testbed::PATIENCE);
        assert!(has_ended(&process));
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
        assert_eq!(both.launches, u64::MAX, "a sum never falls");
    }
}
