//! The environment, as the program was started with it.
//!
//! What the program has now comes first. Where it has emptied or replaced its environment before
//! it came to the driver, what the kernel shows of its start counts: the dynamic linker remembers
//! where the driver lies, and a limit does not end because a daemon clears what it does not know.

use std::ffi::CStr;
use std::io::Read;
use std::sync::atomic::{AtomicPtr, Ordering};

/// Stands in the environment of every process of a job, or of a recorded command. Where it is
/// there, nobody has emptied the environment.
const MARKS: [&CStr; 2] = [c"SUBLET_DRIVER", c"SUBLET_CONTAINER"];
/// Bytes of an environment; the kernel's own limit is some MiB, with the default stack.
const MOST_BYTES: u64 = 8 << 20;

/// An environment variable. Read by the C library's function: the standard library's takes a lock
/// that a forking thread may hold. An empty one counts as unset.
pub(crate) fn variable(name: &CStr) -> Option<&'static [u8]> {
    present(name).or_else(|| {
        let emptied = MARKS.iter().all(|mark| present(mark).is_none());
        emptied.then(|| at_start(name)).flatten()
    })
}

/// The same of a variable that is read once, at the start of the program, by others as well: what
/// it was then counts, also where the program has changed it since.
pub(crate) fn variable_at_start(name: &CStr) -> Option<&'static [u8]> {
    at_start(name).or_else(|| present(name))
}

fn present(name: &CStr) -> Option<&'static [u8]> {
    // SAFETY: NUL-terminated name; the answer is a NUL-terminated string of the environment, looked
    // at and copied at once. Most are asked for inside the program's own first driver call. What
    // says which job a process is of may be asked for in any thread that reads NVML, so that is
    // found once per process (`attachment::job`): a program that changes its environment in another
    // thread at that moment races with every library that reads it, NVML among them.
    unsafe {
        let value = libc::getenv(name.as_ptr());
        (!value.is_null())
            .then(|| CStr::from_ptr(value).to_bytes())
            .filter(|value| !value.is_empty())
    }
}

/// A variable of the environment with which the kernel has started this program. A program that
/// writes its title over it has taken it away: then there is none.
fn at_start(name: &CStr) -> Option<&'static [u8]> {
    of(started_with(), name.to_bytes())
}

/// A variable of an environment as the kernel shows it. An empty one counts as unset.
pub(crate) fn of<'a>(environment: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    let mut all = environment.split(|byte| *byte == 0);
    let value = all.find_map(|one| one.strip_prefix(name)?.strip_prefix(b"="))?;
    (!value.is_empty()).then_some(value)
}

/// What the kernel shows, read once; empty where it shows nothing. The memory is kept for good.
fn started_with() -> &'static [u8] {
    static READ: AtomicPtr<Vec<u8>> = AtomicPtr::new(std::ptr::null_mut());
    let mut at = READ.load(Ordering::Acquire);
    if at.is_null() {
        let new = Box::into_raw(Box::new(read().unwrap_or_default()));
        let first = READ.compare_exchange(at, new, Ordering::AcqRel, Ordering::Acquire);
        at = match first {
            Ok(_) => new,
            Err(others) => {
                // SAFETY: made above, and nobody else has seen it.
                drop(unsafe { Box::from_raw(new) });
                others
            }
        };
    }
    // SAFETY: leaked above, and never freed.
    unsafe { &*at }
}

fn read() -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let file = std::fs::File::open("/proc/self/environ")?;
    file.take(MOST_BYTES).read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_is_found_by_its_whole_name() {
        let environment = b"A=1\0SUBLET_X=yes\0SUBLET_XY=no\0EMPTY=\0LAST=z";
        assert_eq!(of(environment, b"SUBLET_X"), Some(&b"yes"[..]));
        assert_eq!(of(environment, b"LAST"), Some(&b"z"[..]));
        for name in [&b"EMPTY"[..], b"SUBLET_", b"A=1", b"MISSING"] {
            assert_eq!(of(environment, name), None);
        }
    }
}
