//! What sublet, where there is one, wants of the job's size. Its functions are looked up by name in
//! the running program: nothing is linked, and without them nothing is ever wanted.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::time::{Duration, Instant};

unsafe extern "C" {
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
}

type Function = unsafe extern "C" fn() -> c_int;

/// How often a program that is ready to be stopped looks whether it still is to be.
const LOOK: Duration = Duration::from_millis(10);
/// TIMEOUT: the asker stops a program within seconds of its being ready; one that is forgotten goes
/// on.
const PATIENCE: Duration = Duration::from_secs(60);

/// The way to ask.
#[derive(Debug, Clone, Copy)]
pub struct Resizing {
    functions: Option<(Function, Function)>,
}

impl Resizing {
    /// In this program.
    pub fn find() -> Self {
        let requested = function(c"sublet_resize_requested");
        Self {
            functions: requested.zip(function(c"sublet_resize_ready")),
        }
    }

    /// With how many GPUs the job is to go on, 0 for none for now; `None`: nobody asks.
    pub fn requested(self) -> Option<u32> {
        let (requested, _) = self.functions?;
        // SAFETY: it takes nothing, and may be called at any time.
        u32::try_from(unsafe { requested() }).ok()
    }

    /// Everything is saved: waits to be stopped. Returns where the job is to go on after all.
    pub fn stop_me(self) {
        let Some((_, ready)) = self.functions else {
            return;
        };
        let since = Instant::now();
        // SAFETY: as above.
        if unsafe { ready() } != 1 {
            return;
        }
        while self.requested().is_some() && since.elapsed() < PATIENCE {
            std::thread::sleep(LOOK);
        }
    }
}

fn function(name: &CStr) -> Option<Function> {
    // SAFETY: a null handle is RTLD_DEFAULT: all that is loaded.
    let found = unsafe { dlsym(std::ptr::null_mut(), name.as_ptr()) };
    // SAFETY: a function of this name is sublet's, which takes nothing and returns an int.
    (!found.is_null()).then(|| unsafe { std::mem::transmute::<*mut c_void, Function>(found) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_sublet_nobody_asks_and_nobody_waits() {
        let resizing = Resizing::find();
        assert_eq!(resizing.requested(), None);
        let since = Instant::now();
        resizing.stop_me();
        assert!(since.elapsed() < PATIENCE);
    }
}
