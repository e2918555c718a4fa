//! A Rust host: scoped threads that use the driver, panics that are caught around calls, and a
//! panic that ends a thread.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};

unsafe extern "C" {
    fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// Calls the driver with words.
fn cu(name: &CStr, words: [usize; 4]) -> i32 {
    // SAFETY: NUL-terminated names; the driver's functions take integers and pointers, which are
    // valid where this program passes them.
    unsafe {
        let handle = dlopen(c"libcuda.so.1".as_ptr(), 2);
        let at = dlsym(handle, name.as_ptr());
        assert!(!at.is_null(), "{name:?}");
        let call: unsafe extern "C" fn(usize, usize, usize, usize) -> i32 = std::mem::transmute(at);
        call(words[0], words[1], words[2], words[3])
    }
}

fn work(context: usize) -> i32 {
    let mut memory = 0u64;
    let status = cu(c"cuCtxSetCurrent", [context, 0, 0, 0]);
    if status != 0 {
        return status;
    }
    let status = cu(c"cuMemAlloc_v2", [&raw mut memory as usize, 4096, 0, 0]);
    if status != 0 {
        return status;
    }
    cu(c"cuMemFree_v2", [memory as usize, 0, 0, 0])
}

fn main() {
    std::panic::set_hook(Box::new(|_| {}));
    let (mut device, mut context) = (0i32, 0usize);
    println!("init {}", cu(c"cuInit", [0; 4]));
    println!(
        "device {}",
        cu(c"cuDeviceGet", [&raw mut device as usize, 0, 0, 0])
    );
    let retained = cu(
        c"cuDevicePrimaryCtxRetain",
        [&raw mut context as usize, device as usize, 0, 0],
    );
    println!("context {retained}");
    let (good, caught) = (AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for number in 0..16 {
            let (good, caught) = (&good, &caught);
            scope.spawn(move || {
                for round in 0..20 {
                    let outcome = std::panic::catch_unwind(|| {
                        let status = work(context);
                        assert!((number + round) % 3 != 0, "on purpose");
                        status
                    });
                    match outcome {
                        Ok(0) => good.fetch_add(1, Ordering::Relaxed),
                        Ok(_) => 0,
                        Err(_) => caught.fetch_add(1, Ordering::Relaxed),
                    };
                }
            });
        }
    });
    let ended = std::thread::spawn(move || {
        assert_ne!(work(context), 0, "ends the thread");
    })
    .join();
    println!(
        "good {} caught {} ended by a panic {}",
        good.into_inner(),
        caught.into_inner(),
        ended.is_err()
    );
    println!("work {}", work(context));
}
