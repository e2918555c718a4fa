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
        assert_eq!(nvml::unsupported("nvmlTest"), Status::NOT_SUPPORTED);
        assert_eq!(nvml::nvmlShutdown(), Status::SUCCESS);
        assert_eq!(nvml::nvmlShutdown(), Status::UNINITIALIZED);
    }
}

/// A function of the table that NVIDIA's tool asks for.
unsafe fn entry(at: usize) -> *const std::ffi::c_void {
    const TOOL: [u8; 16] = [
        0xc4, 0xfe, 0x3e, 0x6c, 0xc9, 0x8f, 0x6c, 0x4e, 0xa3, 0x27, 0xee, 0x69, 0x6e, 0x12, 0xf7,
        0xc4,
    ];
    let mut table = std::ptr::null();
    // SAFETY: pointers to locals of the types that the call has.
    unsafe {
        let ask = |id: &[u8; 16], to: &mut *const std::ffi::c_void| {
            nvml::nvmlInternalGetExportTable(Out::new(to), In::new(id))
        };
        assert_eq!(ask(&[0; 16], &mut table), Status::NOT_FOUND);
        assert_eq!(ask(&TOOL, &mut table), Status::SUCCESS);
        // The first word is the size in bytes.
        let words = table.cast::<usize>();
        assert!(*words > (at + 1) * size_of::<usize>());
        *words.add(at + 1) as *const std::ffi::c_void
    }
}

#[test]
fn nvidia_s_tool_finds_its_table_and_the_processes_in_it() {
    if !in_own_process("management::nvidia_s_tool_finds_its_table_and_the_processes_in_it") {
        return;
    }
    type Processes = unsafe extern "C" fn(Device, *mut u32, *mut [u8; 4128]) -> Status;
    // SAFETY: pointers to locals; entries of the table, with the parameters that they have.
    unsafe {
        driver();
        assert_eq!(nvml::nvmlInit_v2(), Status::SUCCESS);
        context(0);
        let mut device: Device = std::ptr::null_mut();
        let found = nvml::nvmlDeviceGetHandleByIndex_v2(0, Out::new(&raw mut device));
        assert_eq!(found, Status::SUCCESS);
        for (at, processes) in [(212, 1), (213, 0), (214, 0)] {
            let list = std::mem::transmute::<*const std::ffi::c_void, Processes>(entry(at));
            let (mut count, mut all) = (2, vec![[0; 4128]; 2]);
            assert_eq!(
                list(device, &raw mut count, all.as_mut_ptr()),
                Status::SUCCESS
            );
            assert_eq!(count, processes, "{at}");
            if processes > 0 {
                assert_eq!(all[0][..4], std::process::id().to_ne_bytes());
                assert_ne!(all[0][32], 0, "its name");
            }
        }
        let other =
            std::mem::transmute::<*const std::ffi::c_void, extern "C" fn() -> Status>(entry(1000));
        assert_eq!(other(), Status::NOT_SUPPORTED);
        let mut set = std::ptr::null_mut();
        assert_eq!(
            nvml::nvmlEventSetCreate(Out::new(&raw mut set)),
            Status::SUCCESS
        );
        assert_eq!(nvml::nvmlEventSetFree(set), Status::SUCCESS);
    }
}

#[test]
fn monitors_read_energy_traffic_affinity_and_fields() {
    if !in_own_process("management::monitors_read_energy_traffic_affinity_and_fields") {
        return;
    }
    // SAFETY: pointers to locals of the types that NVML names.
    unsafe {
        driver();
        assert_eq!(nvml::nvmlInit_v2(), Status::SUCCESS);
        context(0);
        let mut device: Device = std::ptr::null_mut();
        let found = nvml::nvmlDeviceGetHandleByIndex_v2(0, Out::new(&raw mut device));
        assert_eq!(found, Status::SUCCESS);
        let number = |call: &dyn Fn(Out<u32>) -> Status| {
            let mut value = u32::MAX;
            assert_eq!(call(Out::new(&raw mut value)), Status::SUCCESS);
            value
        };
        let energy = || {
            let mut mj = 0;
            let read = nvml::nvmlDeviceGetTotalEnergyConsumption(device, Out::new(&raw mut mj));
            assert_eq!(read, Status::SUCCESS);
            mj
        };
        let before = energy();
        let traffic =
            |counter| number(&|to| nvml::nvmlDeviceGetPcieThroughput(device, counter, to));
        assert_eq!(traffic(1), 0, "nothing was asked before");
        let bytes = vec![7_u8; 32 << 20];
        let memory = alloc(bytes.len());
        for _ in 0..4 {
            upload(memory, &bytes);
        }
        ok(api::cuMemsetD8_v2(memory, 1, bytes.len()));
        ok(api::cuCtxSynchronize());
        std::thread::sleep(std::time::Duration::from_millis(30));
        assert!(traffic(1) > 0, "received");
        assert_eq!(traffic(0), 0, "sent");
        assert!(energy() > before);
        assert_eq!(
            number(&|to| nvml::nvmlDeviceGetVirtualizationMode(device, to)),
            0
        );
        assert_eq!(
            number(&|to| nvml::nvmlDeviceGetCurrPcieLinkGeneration(device, to)),
            5
        );
        let mut set = [0; 2];
        let read = nvml::nvmlDeviceGetCpuAffinity(device, 2, Out::new(set.as_mut_ptr()));
        assert_eq!(read, Status::SUCCESS);
        assert!(set[0] & 1 == 1, "the first processor is near");

        let mut fields = [83, 186, 32].map(nvml::FieldValue::of);
        let ask = |fields: &mut [nvml::FieldValue; 3]| {
            nvml::nvmlDeviceGetFieldValues(device, 3, Out::new(fields.as_mut_ptr()))
        };
        assert_eq!(ask(&mut fields), Status::SUCCESS);
        assert_eq!(fields[0].answer().map(|mj| mj > before), Ok(true));
        assert!(fields[1].answer().is_ok_and(|mw| mw >= 70_000));
        assert_eq!(fields[2].answer(), Err(Status::NOT_SUPPORTED), "no NVLink");
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

#[test]
fn a_shared_device_keeps_its_compute_mode_and_has_a_module_of_its_own() {
    if !in_own_process(
        "management::a_shared_device_keeps_its_compute_mode_and_has_a_module_of_its_own",
    ) {
        return;
    }
    driver();
    // SAFETY: pointers are null or to locals of the types that NVML names.
    unsafe {
        let nowhere = std::ptr::null_mut();
        let early = nvml::nvmlDeviceSetComputeMode(nowhere, 0);
        assert_eq!(early, Status::UNINITIALIZED);
        assert_eq!(nvml::nvmlInit_v2(), Status::SUCCESS);
        let refused = nvml::nvmlDeviceSetComputeMode(nowhere, 0);
        assert_eq!(refused, Status::INVALID_ARGUMENT);
        let mut modules = Vec::new();
        for index in 0..2 {
            let mut device: Device = std::ptr::null_mut();
            let found = nvml::nvmlDeviceGetHandleByIndex_v2(index, Out::new(&raw mut device));
            assert_eq!(found, Status::SUCCESS);
            let (mut mode, mut module) = (77, 77);
            for wanted in [0, 2, 3] {
                let answer = nvml::nvmlDeviceSetComputeMode(device, wanted);
                assert_eq!(answer, Status::NO_PERMISSION, "mode {wanted}");
                let answer = nvml::nvmlDeviceGetComputeMode(device, Out::new(&raw mut mode));
                assert_eq!((answer, mode), (Status::SUCCESS, 0));
            }
            let answer = nvml::nvmlDeviceSetComputeMode(device, 4);
            assert_eq!(answer, Status::INVALID_ARGUMENT);
            let answer = nvml::nvmlDeviceGetModuleId(device, Out::new(&raw mut module));
            assert_eq!(answer, Status::SUCCESS);
            modules.push(module);
            let answer = nvml::nvmlDeviceGetModuleId(device, Out::new(nowhere.cast()));
            assert_eq!(answer, Status::INVALID_ARGUMENT);
        }
        assert_eq!(modules, [0, 1]);
    }
}
