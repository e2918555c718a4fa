//! What the host has left for copies of what leaves the devices: by its own account, and by the
//! limits of the control groups that this process is in (see `host-memory`). Beyond a group's limit
//! the kernel does not refuse a page, it kills: so it is asked before, and some is left to a thread
//! that does not ask.
//!
//! Pages are there before the driver is asked to pin them, and are taken in steps with a look
//! before each: where others take the memory meanwhile that is an answer like any other.

use std::sync::{Mutex, PoisonError};

use channel::{Event, Reason};
use host_memory::{Bound, Space, Standing};

use super::tuning;
use crate::attachment::client::Attached;
use crate::ground::clock::now_ns;

/// TIMEOUT: how long it is believed which groups this process is in: it may be moved.
const BELIEVED_NS: u64 = 5_000_000_000;
/// Pages taken between two looks, in bytes.
const STEP: u64 = 32 << 20;

static STANDING: Mutex<Option<(Standing, u64)>> = Mutex::new(None);

/// What this process can still take.
pub(super) fn space() -> Space {
    let now = now_ns();
    let mut standing = STANDING.lock().unwrap_or_else(PoisonError::into_inner);
    let known = standing
        .take()
        .filter(|(_, found_ns)| now.saturating_sub(*found_ns) < BELIEVED_NS);
    let (found, _) = standing.insert(known.unwrap_or_else(|| {
        let found = tuning::host_root().map_or_else(Standing::of_this_process, Standing::under);
        (found, now)
    }));
    found.space()
}

/// Too little of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Short {
    needed_bytes: u64,
    space: Space,
}

impl Short {
    pub(super) fn reason(&self) -> Reason {
        if self.space.is_of_a_group() {
            Reason::HostGroup
        } else {
            Reason::HostMemory
        }
    }

    /// Tells the journal.
    pub(super) fn tell(&self, attached: &Attached, device: usize) {
        let event = Event::HostShort {
            needed_bytes: self.needed_bytes,
            available_bytes: self.space.free_bytes,
            group_limit_bytes: match self.space.bound {
                Bound::Group { limit_bytes, .. } => limit_bytes,
                Bound::Host { .. } | Bound::Unknown => 0,
            },
        };
        attached.tell(device, event);
    }
}

/// Whether `needed_bytes` more can be taken.
pub(super) fn check(needed_bytes: u64) -> Result<(), Short> {
    let space = space();
    if needed_bytes > space.free_bytes {
        return Err(Short {
            needed_bytes,
            space,
        });
    }
    Ok(())
}

/// Takes the pages of a private mapping of ours from `start` on.
pub(super) fn take_pages(start: usize, bytes: u64) -> Result<(), Short> {
    let mut at = 0;
    while tuning::touches() && at < bytes {
        let step = STEP.min(bytes - at);
        check(step)?;
        if !populate(start + at as usize, step as usize) {
            return Err(Short {
                needed_bytes: bytes,
                space: space(),
            });
        }
        at += step;
    }
    Ok(())
}

/// False: the kernel has no pages for it.
fn populate(start: usize, bytes: usize) -> bool {
    const PAGE: usize = 4096;
    loop {
        let at = std::ptr::with_exposed_provenance_mut::<libc::c_void>(start);
        // SAFETY: a range of a mapping of ours; what it holds stays.
        if unsafe { libc::madvise(at, bytes, libc::MADV_POPULATE_WRITE) } == 0 {
            return true;
        }
        // SAFETY: this thread's own.
        match unsafe { *libc::__errno_location() } {
            libc::EINTR | libc::EAGAIN => {}
            // Before Linux 5.14.
            libc::EINVAL => break,
            _ => return false,
        }
    }
    for page in (start..start + bytes).step_by(PAGE) {
        let byte = std::ptr::with_exposed_provenance_mut::<u8>(page);
        // SAFETY: inside of the same range, which nobody else looks at yet; its contents are
        // written back as they were.
        unsafe { byte.write_volatile(byte.read_volatile()) };
    }
    true
}
