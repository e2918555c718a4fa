//! What the device_state needs from the kernel: record locks, futexes between processes, memory
//! files.

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::AtomicU32;
use std::time::Duration;

fn record(kind: libc::c_int, at: i64) -> libc::flock {
    // SAFETY: flock is plain integers; zero is valid for each.
    let mut record: libc::flock = unsafe { std::mem::zeroed() };
    record.l_type = kind as libc::c_short;
    record.l_whence = libc::SEEK_SET as libc::c_short;
    record.l_start = at;
    record.l_len = 1;
    record
}

pub(super) fn lock(fd: RawFd, at: i64, command: libc::c_int) -> io::Result<()> {
    let record = record(libc::F_WRLCK, at);
    loop {
        // SAFETY: fcntl on our descriptor with a structure that outlives the call.
        if unsafe { libc::fcntl(fd.as_raw_fd(), command, &record) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

pub(super) fn unlock(fd: RawFd, at: i64) {
    let record = record(libc::F_UNLCK, at);
    // SAFETY: as in `lock`; unlocking own bytes cannot fail in a way that we could repair.
    unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETLK, &record) };
}

pub(super) fn locked_by_another(fd: RawFd, at: i64) -> bool {
    lock_owner(fd, at).is_some()
}

/// The other process that has locked a byte, by its number in our own PID namespace; 0 where that
/// does not see it.
pub(super) fn lock_owner(fd: RawFd, at: i64) -> Option<u32> {
    let mut record = record(libc::F_WRLCK, at);
    // SAFETY: as in `lock`; the structure is written by the call.
    let answered = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETLK, &mut record) } == 0;
    let is_locked = answered && record.l_type != libc::F_UNLCK as libc::c_short;
    is_locked.then(|| u32::try_from(record.l_pid).unwrap_or(0))
}

/// Whether a process was stopped by a signal or a tracer (field 3 of `/proc/PID/stat`, see
/// proc_pid_stat(5)).
pub(super) fn is_stopped(pid: u32) -> bool {
    let Ok(stat) = std::fs::read(format!("/proc/{pid}/stat")) else {
        return false;
    };
    // The second field is the name in parentheses and may contain anything; the state comes after
    // the last one.
    let name_ends = stat.iter().rposition(|byte| *byte == b')');
    name_ends.is_some_and(|at| matches!(stat.get(at + 2), Some(b'T' | b't')))
}

/// A number that the kernel draws for every executed program, the same for all libraries in it.
pub(super) fn image_number() -> u64 {
    // SAFETY: getauxval has no preconditions; AT_RANDOM points to 16 bytes that live as long as the
    // program.
    unsafe {
        let random = libc::getauxval(libc::AT_RANDOM) as *const u64;
        if random.is_null() {
            0
        } else {
            random.read_unaligned()
        }
    }
}

pub(super) fn futex_wait(word: &AtomicU32, expected: u32, timeout: Duration) {
    let timeout = libc::timespec {
        tv_sec: 0,
        tv_nsec: timeout.subsec_nanos().into(),
    };
    // SAFETY: the word is mapped and outlives the call; a shared (not private) futex, since
    // processes meet on it.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            libc::FUTEX_WAIT,
            expected,
            &timeout,
        )
    };
}

pub(super) fn futex_wake(word: &AtomicU32) {
    // SAFETY: as in `futex_wait`.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
}

/// A memfd that programs started by exec do not inherit.
pub(crate) fn memfd(name: &str) -> io::Result<OwnedFd> {
    use std::os::fd::FromRawFd;
    let name = CString::new(name).unwrap_or_default();
    // SAFETY: the name is NUL-terminated and outlives the call.
    let fd = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just gave us this descriptor and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
