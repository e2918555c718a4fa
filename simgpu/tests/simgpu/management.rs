//! The management library: what it tells about devices and processes.

use shim_ffi::CUdevice;
use simgpu::entry::{In, Out};
use simgpu::nvml::{self, Device, Status};
use simgpu::{api, observe};

use crate::support::*;

fn text(call: impl FnOnce(Out<std::ffi::c_char>) -> Status) -> String {
    let mut buffer = [0; 96];
    // SAFETY: a buffer of the length that the calls below name.
    let to = unsafe { Out::new(buffer.as_mut_ptr()) };
    assert_eq!(call(to), Status::SUCCESS);
    buffer
        .iter()
        .take_while(|byte| **byte != 0)
        .map(|byte| *byte as u8 as char)
        .collect()
}

#[test]
fn it_tells_the_same_story_as_the_driver() {
    // In a process of its own: other tests allocate meanwhile.
    if !in_own_process("management::it_tells_the_same_story_as_the_driver") {
        return;
    }
    // SAFETY: pointers are to locals of the types that NVML names.
    unsafe {
        let mut count = 0;
        assert_eq!(
            nvml::nvmlDeviceGetCount_v2(Out::new(&raw mut count)),
            Status::UNINITIALIZED
        );
        driver();
        assert_eq!(nvml::nvmlInit_v2(), Status::SUCCESS);
        assert_eq!(
            nvml::nvmlDeviceGetCount_v2(Out::new(&raw mut count)),
            Status::SUCCESS
        );
        assert_eq!(count, 2);

        let mut device: Device = std::ptr::null_mut();
        assert_eq!(
            nvml::nvmlDeviceGetHandleByIndex_v2(2, Out::new(&raw mut device)),
            Status::INVALID_ARGUMENT
        );
        assert_eq!(
            nvml::nvmlDeviceGetHandleByIndex_v2(1, Out::new(&raw mut device)),
            Status::SUCCESS
        );
        let uuid = text(|to| nvml::nvmlDeviceGetUUID(device, to, 96));
        let of_driver = out(|to| api::cuDeviceGetUuid_v2(to, CUdevice(1)));
        assert_eq!(uuid, shim_ffi::nvml::UuidText(of_driver.bytes).to_string());
        let named = std::ffi::CString::new(uuid).expect("no NUL");
        let mut found: Device = std::ptr::null_mut();
        assert_eq!(
            nvml::nvmlDeviceGetHandleByUUID(In::new(named.as_ptr()), Out::new(&raw mut found)),
            Status::SUCCESS
        );
        assert_eq!(found, device);
        assert!(text(|to| nvml::nvmlDeviceGetName(device, to, 96)).contains("simulated"));

        let mut running = 8;
        let mut list = [nvml::ProcessInfoV2::default(); 8];
        let ask = |running: &mut u32, list: *mut nvml::ProcessInfoV2| {
            nvml::nvmlDeviceGetComputeRunningProcesses_v3(device, Out::new(running), Out::new(list))
        };
        assert_eq!(ask(&mut running, list.as_mut_ptr()), Status::SUCCESS);
        assert_eq!(running, 0);
        context(1);
        alloc(32 << 20);
        running = 0;
        assert_eq!(
            ask(&mut running, std::ptr::null_mut()),
            Status::INSUFFICIENT_SIZE
        );
        assert_eq!(running, 1);
        assert_eq!(ask(&mut running, list.as_mut_ptr()), Status::SUCCESS);

        let seen = observe::snapshot().expect("a device");
        assert_eq!(seen[1].used_bytes, (64 + 32) << 20);
        assert_eq!(
            seen[1]
                .processes
                .iter()
                .filter(|one| one.contexts > 0)
                .count(),
            1
        );
        assert_eq!(nvml::unsupported(), Status::NOT_SUPPORTED);
        assert_eq!(nvml::nvmlShutdown(), Status::SUCCESS);
        assert_eq!(nvml::nvmlShutdown(), Status::UNINITIALIZED);
    }
}

#[test]
fn errno_is_the_callers() {
    if !in_own_process("management::errno_is_the_callers") {
        return;
    }
    // SAFETY: the thread's own errno; an out-parameter that is a local of `out`.
    unsafe {
        let errno = libc::__errno_location();
        *errno = libc::EXDEV;
        // Directories that are there already, locks that others hold, waits for the device.
        driver();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    driver();
                    *libc::__errno_location() = libc::EDOM;
                    for _ in 0..200 {
                        let memory = out(|to| api::cuMemAlloc_v2(to, 1 << 20));
                        ok(api::cuMemsetD8Async(memory, 1, 1 << 20, Default::default()));
                        ok(api::cuCtxSynchronize());
                        ok(api::cuMemFree_v2(memory));
                    }
                    assert_eq!(*libc::__errno_location(), libc::EDOM);
                });
            }
        });
        assert_eq!(nvml::nvmlInit_v2(), Status::SUCCESS);
        assert_eq!(nvml::nvmlShutdown(), Status::SUCCESS);
        assert_eq!(*errno, libc::EXDEV);
    }
}
