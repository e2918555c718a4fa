//! Addresses among the parameters of a kernel.
//!
//! Nobody tells their types. The driver says how many bytes each parameter has
//! (`cuFuncGetParamInfo`, since 12.4), and every word of eight bytes in it may be an address, in a
//! structure as well; what is none is found in no chunk.
//!
//! Sizes are asked for anew at each launch of a look instead of being kept. A kernel's handle may
//! mean another kernel once its module or context has gone, also by ways that we do not see, and a
//! size that is too large would read what is not there to be read.

use shim_ffi::*;

use super::last_use;
use crate::driver::real;
use crate::gate::capture;
use crate::ground::errno::Preserve;
use crate::ground::thread::thread;

/// Bytes of parameters that a kernel may have (12.1 and later).
const MOST_BYTES: usize = 32_764;
/// More than any kernel has.
const MOST_PARAMETERS: usize = MOST_BYTES;
const WORD: usize = size_of::<u64>();

/// After a launch that has succeeded.
#[cold]
#[inline(never)]
pub(super) fn note(function: usize, parameters: usize, extra: usize) {
    let _ = std::panic::catch_unwind(|| {
        // What is captured is no launch, and nothing of ours is asked of the driver meanwhile.
        if capture::any() || !last_use::take_launch() {
            return;
        }
        let _errno = Preserve::new();
        let thread = thread();
        let _ours = thread.enter();
        let layout = Layout::of(function);
        // SAFETY: the driver has just launched this kernel with these parameters.
        unsafe {
            if parameters != 0 {
                layout.note_each(parameters as *const *const u8);
            } else if extra != 0 {
                layout.note_packed(extra as *const usize);
            }
        }
    });
}

/// How a kernel's parameters lie.
struct Layout {
    handle: usize,
    /// The handle is one of `cuLibraryGetKernel`, which launches take as well.
    of_library: bool,
    first: Option<(usize, usize)>,
}

impl Layout {
    fn of(handle: usize) -> Self {
        let mut layout = Self {
            handle,
            of_library: false,
            first: None,
        };
        layout.first = match layout.ask(0) {
            Ok(first) => Some(first),
            // Only where the driver says so: what takes one kind need not survive the other.
            Err(CUresult::CUDA_ERROR_INVALID_HANDLE) => {
                layout.of_library = true;
                layout.ask(0).ok()
            }
            // No parameter of that number, for one: there is none at all.
            Err(_) => None,
        };
        layout
    }

    /// Offset and bytes.
    fn ask(&self, index: usize) -> Result<(usize, usize), CUresult> {
        let (mut offset, mut bytes) = (0, 0);
        let handle = std::ptr::with_exposed_provenance_mut(self.handle);
        // SAFETY: valid pointers to locals, and a handle that was launched just now. It touches no
        // stream.
        let result = unsafe {
            if self.of_library {
                real::cuKernelGetParamInfo(CUkernel(handle), index, &raw mut offset, &raw mut bytes)
            } else {
                real::cuFuncGetParamInfo(CUfunction(handle), index, &raw mut offset, &raw mut bytes)
            }
        };
        if result.is_ok() {
            Ok((offset, bytes))
        } else {
            Err(result)
        }
    }

    /// Offset and bytes of each parameter.
    fn all(&self) -> impl Iterator<Item = (usize, usize)> {
        let one = |index| match index {
            0 => self.first,
            _ => self.ask(index).ok(),
        };
        (0..MOST_PARAMETERS)
            .map_while(one)
            .take_while(|(offset, bytes)| offset.saturating_add(*bytes) <= MOST_BYTES)
    }

    /// # Safety
    /// `parameters` points to a pointer for each parameter, null or to as many bytes as it has.
    unsafe fn note_each(&self, parameters: *const *const u8) {
        for (index, (_, bytes)) in self.all().enumerate() {
            // SAFETY: the caller's promise.
            let at = unsafe { *parameters.add(index) };
            if at.is_null() {
                return;
            }
            // SAFETY: the caller's promise.
            unsafe { note_words(at, bytes) };
        }
    }

    /// # Safety
    /// `extra` is a list as `cuLaunchKernel` takes it.
    unsafe fn note_packed(&self, extra: *const usize) {
        const END: usize = 0;
        const BUFFER: usize = 1;
        const SIZE: usize = 2;
        /// There are two kinds.
        const MOST: usize = 2;
        let (mut buffer, mut size) = (std::ptr::null::<u8>(), std::ptr::null::<usize>());
        for pair in 0..MOST {
            // SAFETY: the list goes on until its end.
            unsafe {
                let kind = *extra.add(2 * pair);
                if kind == END {
                    break;
                }
                let value = *extra.add(2 * pair + 1);
                match kind {
                    BUFFER => buffer = std::ptr::with_exposed_provenance(value),
                    SIZE => size = std::ptr::with_exposed_provenance(value),
                    _ => return,
                }
            }
        }
        if buffer.is_null() || size.is_null() {
            return;
        }
        // SAFETY: not null, and read by the driver.
        let size_bytes = unsafe { *size };
        let bytes = self.all().map(|(offset, bytes)| offset + bytes).max();
        // SAFETY: no more than the buffer has, nor than the kernel takes.
        unsafe { note_words(buffer, size_bytes.min(bytes.unwrap_or(0))) };
    }
}

/// The words of eight bytes in `bytes` bytes from `at` on, which may be aligned to anything.
///
/// # Safety
/// They can be read for as long as the words are asked for.
unsafe fn words(at: *const u8, bytes: usize) -> impl Iterator<Item = u64> {
    (0..bytes / WORD).map(move |word| {
        // SAFETY: the caller's promise.
        unsafe { at.add(word * WORD).cast::<u64>().read_unaligned() }
    })
}

/// # Safety
/// `at` points to `bytes` bytes.
unsafe fn note_words(at: *const u8, bytes: usize) {
    if bytes >= WORD {
        last_use::note(|spans| {
            // SAFETY: the caller's promise.
            unsafe { words(at, bytes) }.for_each(|word| spans.pointed_to(word));
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_words_are_read_wherever_they_lie() {
        let mut of = [0u8; 33];
        for (at, word) in [(1, 11u64), (9, 22), (17, u64::MAX)] {
            of[at..at + WORD].copy_from_slice(&word.to_ne_bytes());
        }
        let read = |bytes| -> Vec<u64> {
            // SAFETY: there are 32 bytes.
            unsafe { words(of[1..].as_ptr(), bytes) }.collect()
        };
        assert_eq!(read(7), []);
        assert_eq!(read(8), [11]);
        assert_eq!(read(23), [11, 22]);
        assert_eq!(read(31), [11, 22, u64::MAX]);
    }
}
