//! Saying which memory a part of the program needs, where sublet's library is there to hear it
//! (`docs/explanation/residency.md`, "Hints").

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

unsafe extern "C" {
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
}

type Add = unsafe extern "C" fn(c_uint, u64, u64) -> c_int;
type Begin = unsafe extern "C" fn(c_uint) -> c_int;

/// The functions, if they are there.
#[derive(Clone, Copy, Debug)]
pub struct Pipeline {
    functions: Option<(Add, Begin)>,
}

impl Pipeline {
    /// Looks for the preload library.
    #[must_use]
    pub fn find() -> Self {
        let find = |name: &CStr| {
            // SAFETY: a null handle is RTLD_DEFAULT: what is loaded already; a NUL-terminated name.
            let at = unsafe { dlsym(std::ptr::null_mut(), name.as_ptr()) };
            (!at.is_null()).then_some(at)
        };
        let functions = find(c"sublet_pipeline_add").zip(find(c"sublet_pipeline_begin"));
        Self {
            functions: functions.map(|(add, begin)| {
                // SAFETY: the library's functions of these names have these types.
                unsafe {
                    (
                        std::mem::transmute::<*mut c_void, Add>(add),
                        std::mem::transmute::<*mut c_void, Begin>(begin),
                    )
                }
            }),
        }
    }

    /// This memory is of `group`.
    pub fn add(self, group: u32, address: u64, bytes: u64) {
        if let Some((add, _)) = self.functions {
            // SAFETY: it takes numbers, and may be called at any time.
            unsafe { add(group, address, bytes) };
        }
    }

    /// From here on the thread uses memory of groups up to this one; waits until it is there.
    pub fn begin(self, group: u32) {
        if let Some((_, begin)) = self.functions {
            // SAFETY: as above.
            unsafe { begin(group) };
        }
    }
}
