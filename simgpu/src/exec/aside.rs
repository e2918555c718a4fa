//! Which core of the host a thread of the device computes on.
//!
//! A device takes no processor time from the program that feeds it. A host_kernel that takes the
//! host longer than its kernel takes the device does, where the scheduler has put both on one core:
//! a thread that wakes there waits for milliseconds although another core idles, on virtual
//! machines above all, whose idle processors Linux takes for busy ones of the hypervisor's
//! (`available_idle_cpu`, kernel/sched). So the thread of a compute engine gets off the core from
//! which the program was last seen to call, for as long as it has such work.

use std::mem::zeroed;
use std::sync::atomic::{AtomicI32, Ordering::Relaxed};

use libc::cpu_set_t;

/// The core of the last call that fed the device or asked how far it is.
static PROGRAM: AtomicI32 = AtomicI32::new(-1);

/// The calling thread is one of the program's.
pub fn called() {
    PROGRAM.store(here(), Relaxed);
}

fn here() -> i32 {
    // SAFETY: no arguments.
    unsafe { libc::sched_getcpu() }
}

/// Where the calling thread may run: as it was, and as it is meanwhile.
#[derive(Default)]
pub struct Aside(Option<(cpu_set_t, cpu_set_t)>);

impl Aside {
    /// Gets off the program's core, if it is on it and there is another.
    pub fn step(&mut self) {
        let core = here();
        if core < 0 || PROGRAM.load(Relaxed) != core {
            return;
        }
        let Some(before) = self.0.map(|(before, _)| before).or_else(allowed) else {
            return;
        };
        let mut others = before;
        // SAFETY: a set of ours. PANIC: where the kernel tells a set of this size, all cores have
        // their place in it.
        let left = unsafe {
            libc::CPU_CLR(core as usize, &mut others);
            libc::CPU_COUNT(&others)
        };
        if left > 0 && allow(&others) {
            self.0 = Some((before, others));
        }
    }

    /// May run where it could before, unless somebody else has said otherwise since.
    pub fn back(&mut self) {
        if let Some((before, others)) = self.0.take()
            // SAFETY: sets of ours.
            && allowed().is_some_and(|now| unsafe { libc::CPU_EQUAL(&now, &others) })
        {
            allow(&before);
        }
    }
}

fn allowed() -> Option<cpu_set_t> {
    // SAFETY: an empty set is all zeros.
    let mut cores: cpu_set_t = unsafe { zeroed() };
    // SAFETY: as many bytes as are said, of the calling thread (0). A machine of more cores than
    // fit is an error.
    let found = unsafe { libc::sched_getaffinity(0, size_of::<cpu_set_t>(), &mut cores) };
    (found == 0).then_some(cores)
}

fn allow(cores: &cpu_set_t) -> bool {
    // SAFETY: as above; changes the calling thread alone.
    unsafe { libc::sched_setaffinity(0, size_of::<cpu_set_t>(), cores) == 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_leaves_the_programs_core_and_may_return() {
        // A thread of its own: others go on where they are.
        let found = std::thread::spawn(|| {
            let before = allowed().expect("cores");
            // SAFETY: a set of ours.
            if unsafe { libc::CPU_COUNT(&before) } < 2 {
                return;
            }
            let mut aside = Aside::default();
            // The scheduler may move the thread in between, and other tests call; one of a few
            // tries meets the case.
            let stepped = (0..1000).any(|_| {
                called();
                let core = here();
                aside.step();
                aside.0.is_some() && here() != core
            });
            assert!(stepped);
            aside.back();
            // SAFETY: as above.
            assert!(unsafe { libc::CPU_EQUAL(&allowed().expect("cores"), &before) });
            // What somebody else has decided stays.
            while aside.0.is_none() {
                called();
                aside.step();
            }
            assert!(allow(&before));
            let core = PROGRAM.load(Relaxed);
            let mut one = before;
            // SAFETY: a set of ours, and a core that is not in the one that was left.
            unsafe {
                libc::CPU_ZERO(&mut one);
                libc::CPU_SET(core as usize, &mut one);
            }
            if aside.0.is_some_and(|(_, others)| {
                // SAFETY: as above.
                unsafe { libc::CPU_EQUAL(&others, &one) }
            }) {
                // Another test has called from there in between.
                return;
            }
            assert!(allow(&one));
            aside.back();
            // SAFETY: as above.
            assert!(unsafe { libc::CPU_EQUAL(&allowed().expect("cores"), &one) });
        });
        testbed::join(found);
    }
}
