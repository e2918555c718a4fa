//! Streams, events, kernels and their order.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::*};

use shim_ffi::{CUdeviceptr, CUresult, CUstream};
use simgpu::api;
use simgpu::entry::{In, Out};

use crate::support::*;

const LEGACY: CUstream = CUstream::NULL;

#[test]
fn a_kernel_computes_what_its_host_kernel_computes() {
    driver();
    let module = module(&[("sublet_fill_f32", &["u64", "f32", "u64"])]);
    let address = alloc(64);
    launch(
        function(module, "sublet_fill_f32"),
        LEGACY,
        &[address.0, u64::from(2.5_f32.to_bits()), 16],
    );
    assert_eq!(download::<f32>(address, 16), [2.5; 16]);
    free(address);
}

#[test]
fn events_measure_the_modelled_duration() {
    driver();
    let stream = stream(1);
    let (from, until) = (event(0), event(0));
    let busy = busy();
    // SAFETY: handles only, and an out-parameter.
    let ms = unsafe {
        ok(api::cuEventRecord(from, stream));
        launch(busy, stream, &[20_000]);
        ok(api::cuEventRecord(until, stream));
        assert_eq!(api::cuEventQuery(until), CUresult::CUDA_ERROR_NOT_READY);
        ok(api::cuEventSynchronize(until));
        out(|to| api::cuEventElapsedTime(to, from, until))
    };
    assert!(ms >= 20.0, "{ms} ms");
}

#[test]
fn events_around_a_queued_kernel_measure_that_alone_by_the_devices_clock() {
    const TEST: &str =
        "compute::events_around_a_queued_kernel_measure_that_alone_by_the_devices_clock";
    if !in_own_process(TEST) {
        return;
    }
    simgpu::set("SUBLET_SIM_DILATION", "4");
    driver();
    let stream = stream(1);
    let (from, until) = (event(0), event(0));
    let busy = busy();
    let measured = || {
        // SAFETY: handles only, and an out-parameter.
        unsafe {
            launch(busy, stream, &[10_000]);
            ok(api::cuEventRecord(from, stream));
            launch(busy, stream, &[5_000]);
            ok(api::cuEventRecord(until, stream));
            launch(busy, stream, &[10_000]);
            assert_eq!(api::cuEventQuery(from), CUresult::CUDA_ERROR_NOT_READY);
            ok(api::cuEventSynchronize(until));
            let ms: f32 = out(|to| api::cuEventElapsedTime(to, from, until));
            ok(api::cuStreamSynchronize(stream));
            ms
        }
    };
    let begun = std::time::Instant::now();
    let ms = measured();
    assert!(
        begun.elapsed().as_millis() >= 4 * 25,
        "the host takes longer"
    );
    assert!(ms >= 5.0, "{ms} ms");
    // A host that is busy may hold up the device's thread.
    let limit = begun + testbed::PATIENCE;
    let is_right = |ms: f32| (5.0..5.05).contains(&ms);
    while !is_right(measured()) {
        assert!(std::time::Instant::now() < limit, "never 5 ms");
    }
}

#[test]
fn non_blocking_streams_pass_the_legacy_stream_and_blocking_ones_wait_for_it() {
    driver();
    let (free_running, blocking) = (stream(1), stream(0));
    let busy = busy();
    let gate = alloc(8);
    upload(gate, &[0_u64]);
    // SAFETY: handles and device addresses only.
    unsafe {
        // The legacy stream waits for the gate.
        ok(api::cuStreamWaitValue64_v2(LEGACY, gate, 1, 0));
        launch(busy, free_running, &[1]);
        ok(api::cuStreamSynchronize(free_running));
        launch(busy, blocking, &[1]);
        assert_eq!(api::cuStreamQuery(blocking), CUresult::CUDA_ERROR_NOT_READY);
        assert_eq!(api::cuStreamQuery(LEGACY), CUresult::CUDA_ERROR_NOT_READY);
        ok(api::cuStreamWriteValue64_v2(free_running, gate, 1, 0));
        ok(api::cuStreamSynchronize(blocking));
        ok(api::cuStreamQuery(LEGACY));
    }
    free(gate);
}

#[test]
fn the_legacy_stream_waits_for_blocking_streams() {
    driver();
    let blocking = stream(0);
    let releaser = stream(1);
    let gate = alloc(8);
    upload(gate, &[0_u64]);
    // SAFETY: handles and device addresses only.
    unsafe {
        ok(api::cuStreamWaitValue32_v2(blocking, gate, 3, 1));
        ok(api::cuMemsetD8Async(CUdeviceptr(gate.0 + 4), 1, 1, LEGACY));
        assert_eq!(api::cuStreamQuery(LEGACY), CUresult::CUDA_ERROR_NOT_READY);
        ok(api::cuStreamWriteValue32_v2(releaser, gate, 3, 0));
        ok(api::cuStreamSynchronize(LEGACY));
    }
    assert_eq!(download::<u8>(gate, 5), [3, 0, 0, 0, 1]);
    free(gate);
}

#[test]
fn a_stream_waits_for_an_event_of_another() {
    driver();
    let (first, second, releaser) = (stream(1), stream(1), stream(1));
    let recorded = event(2);
    let words = alloc(16);
    upload(words, &[0_u64, 0]);
    // SAFETY: handles and device addresses only.
    unsafe {
        ok(api::cuStreamWaitValue64_v2(first, words, 1, 0));
        ok(api::cuEventRecord(recorded, first));
        ok(api::cuStreamWaitEvent(second, recorded, 0));
        ok(api::cuStreamWriteValue64_v2(
            second,
            CUdeviceptr(words.0 + 8),
            9,
            0,
        ));
        assert_eq!(api::cuStreamQuery(second), CUresult::CUDA_ERROR_NOT_READY);
        ok(api::cuStreamWriteValue64_v2(releaser, words, 1, 0));
        ok(api::cuStreamSynchronize(second));
    }
    assert_eq!(download::<u64>(words, 2), [1, 9]);
    free(words);
}

#[test]
fn per_thread_streams_differ_between_threads() {
    driver();
    let id = |stream: CUstream| {
        // SAFETY: the out-parameter is a local.
        out::<u64>(|to| unsafe { api::cuStreamGetId_ptsz(stream, to) })
    };
    let mine = id(LEGACY);
    assert_eq!(mine, id(CUstream::PER_THREAD));
    assert_ne!(mine, id(CUstream::LEGACY));
    let other = std::thread::spawn(move || {
        driver();
        id(CUstream::NULL)
    });
    assert_ne!(mine, testbed::join(other));
}

static ORDER: AtomicU32 = AtomicU32::new(0);

unsafe extern "C" fn note(data: *mut c_void) {
    // SAFETY: the test passes its own counter.
    let seen = unsafe { &*data.cast::<AtomicU32>() };
    seen.store(ORDER.fetch_add(1, SeqCst) + 1, SeqCst);
}

#[test]
fn host_functions_run_in_stream_order() {
    driver();
    let stream = stream(1);
    let seen = [AtomicU32::new(0), AtomicU32::new(0)];
    let busy = busy();
    for one in &seen {
        launch(busy, stream, &[100]);
        // SAFETY: the counters outlive the synchronisation below.
        ok(unsafe {
            api::cuLaunchHostFunc(
                stream,
                Some(note),
                std::ptr::from_ref(one).cast_mut().cast(),
            )
        });
    }
    // SAFETY: handles only.
    ok(unsafe { api::cuStreamSynchronize(stream) });
    assert!(seen[0].load(SeqCst) > 0 && seen[0].load(SeqCst) < seen[1].load(SeqCst));
}

#[test]
fn pinned_words_can_be_written_and_awaited_by_a_stream() {
    driver();
    let stream = stream(1);
    // SAFETY: out-parameters are locals; the pinned word is read as an atomic while the stream
    // writes it.
    unsafe {
        let pinned: u64 = out(|to: Out<u64>| api::cuMemHostAlloc(Out::new(to.raw().cast()), 64, 0));
        let word = AtomicU64::from_ptr(pinned as *mut u64);
        ok(api::cuStreamWaitValue64_v2(
            stream,
            CUdeviceptr(pinned),
            5,
            0,
        ));
        ok(api::cuStreamWriteValue64_v2(
            stream,
            CUdeviceptr(pinned),
            77,
            0,
        ));
        assert_eq!(api::cuStreamQuery(stream), CUresult::CUDA_ERROR_NOT_READY);
        word.store(6, Release);
        ok(api::cuStreamSynchronize(stream));
        assert_eq!(word.load(Acquire), 77);
        ok(api::cuMemFreeHost(pinned as *mut _));
    }
}

#[test]
fn more_launches_than_a_queue_holds_all_run() {
    driver();
    let stream = stream(1);
    let busy = busy();
    for _ in 0..3000 {
        launch(busy, stream, &[0]);
    }
    // SAFETY: handles only.
    ok(unsafe { api::cuStreamSynchronize(stream) });
}

#[test]
fn arguments_come_from_a_buffer_as_well() {
    driver();
    let module = module(&[("sublet_fill_f32", &["u64", "f32", "u64"])]);
    let address = alloc(64);
    let mut block = [0_u8; 24];
    block[..8].copy_from_slice(&address.0.to_le_bytes());
    block[8..12].copy_from_slice(&7.0_f32.to_le_bytes());
    block[16..].copy_from_slice(&4_u64.to_le_bytes());
    let mut bytes = block.len();
    let extra: [*mut c_void; 5] = [
        std::ptr::without_provenance_mut(1),
        block.as_mut_ptr().cast(),
        std::ptr::without_provenance_mut(2),
        (&raw mut bytes).cast(),
        std::ptr::null_mut(),
    ];
    let fill = function(module, "sublet_fill_f32");
    // SAFETY: the argument block and its length are locals.
    ok(unsafe {
        api::cuLaunchKernel(
            fill,
            1,
            1,
            1,
            1,
            1,
            1,
            0,
            LEGACY,
            In::new(std::ptr::null()),
            In::new(extra.as_ptr()),
        )
    });
    assert_eq!(download::<f32>(address, 4), [7.0; 4]);
    free(address);
}

#[test]
fn bad_launches_are_refused() {
    driver();
    let busy = busy();
    let arg = 1_u64;
    let params = [std::ptr::from_ref(&arg).cast_mut().cast::<c_void>()];
    let launch = |grid: u32, block: u32, shared: u32| {
        // SAFETY: one pointer to the one parameter.
        unsafe {
            api::cuLaunchKernel(
                busy,
                grid,
                1,
                1,
                block,
                1,
                1,
                shared,
                LEGACY,
                In::new(params.as_ptr()),
                In::new(std::ptr::null()),
            )
        }
    };
    assert_eq!(launch(0, 1, 0), CUresult::CUDA_ERROR_INVALID_VALUE);
    assert_eq!(launch(1, 1025, 0), CUresult::CUDA_ERROR_INVALID_VALUE);
    assert_eq!(launch(1, 1, 300 << 10), CUresult::CUDA_ERROR_INVALID_VALUE);
    ok(launch(1, 1024, 48 << 10));
    synchronize();
}

#[test]
fn a_faulting_kernel_sticks_to_its_context_and_only_there() {
    driver();
    // SAFETY: out-parameters are locals; handles otherwise.
    unsafe {
        let context = out(|to| api::cuCtxCreate_v2(to, 0, shim_ffi::CUdevice(1)));
        let module = module(&[("poison", &[])]);
        launch(function(module, "poison"), LEGACY, &[]);
        assert_eq!(
            api::cuCtxSynchronize(),
            CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
        );
        assert_eq!(try_alloc(16), Err(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS));
        ok(api::cuCtxDestroy_v2(context));
    }
    driver();
    synchronize();
    free(alloc(16));
}

#[test]
fn a_kernel_that_touches_nothing_mapped_faults() {
    driver();
    // SAFETY: out-parameters are locals; handles otherwise.
    unsafe {
        let context = out(|to| api::cuCtxCreate_v2(to, 0, shim_ffi::CUdevice(1)));
        let module = module(&[("sublet_fill_f32", &["u64", "f32", "u64"])]);
        launch(function(module, "sublet_fill_f32"), LEGACY, &[0x7000, 0, 4]);
        assert_eq!(
            api::cuCtxSynchronize(),
            CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
        );
        ok(api::cuCtxDestroy_v2(context));
    }
}

#[test]
fn module_variables_have_their_initial_value() {
    driver();
    let module = module(&[]);
    let mut bytes = 0_usize;
    // SAFETY: pointers are to locals and a NUL-terminated literal.
    let address = out(|to| unsafe {
        api::cuModuleGetGlobal_v2(
            to,
            Out::new(&raw mut bytes),
            module,
            In::new(c"answer".as_ptr()),
        )
    });
    assert_eq!((bytes, download::<u32>(address, 1)), (4, vec![42]));
}

#[test]
fn private_tables_do_not_exist() {
    driver();
    let mut table = std::ptr::dangling::<c_void>();
    let id = shim_ffi::CUuuid { bytes: [0x6b; 16] };
    // SAFETY: both pointers are to locals.
    let status = unsafe { api::cuGetExportTable(Out::new(&raw mut table), In::new(&raw const id)) };
    assert_eq!(status, CUresult::CUDA_ERROR_NOT_SUPPORTED);
    assert!(table.is_null());
}

#[test]
fn kernels_reach_another_device_only_as_peers() {
    let own = driver();
    let address = alloc(64);
    // SAFETY: out-parameters are locals; handles otherwise.
    unsafe {
        let touch = |peers: bool| {
            let context = out(|to| api::cuCtxCreate_v2(to, 0, shim_ffi::CUdevice(1)));
            if peers {
                ok(api::cuCtxEnablePeerAccess(own, 0));
                assert_eq!(
                    api::cuCtxEnablePeerAccess(own, 0),
                    CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
                );
            }
            let module = module(&[("sublet_fill_f32", &["u64", "f32", "u64"])]);
            launch(
                function(module, "sublet_fill_f32"),
                LEGACY,
                &[address.0, 0, 4],
            );
            let status = api::cuCtxSynchronize();
            if peers {
                ok(api::cuCtxDisablePeerAccess(own));
            }
            ok(api::cuCtxDestroy_v2(context));
            status
        };
        assert_eq!(touch(false), CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
        assert_eq!(touch(true), CUresult::CUDA_SUCCESS);
    }
    driver();
    free(address);
}

#[test]
fn occupancy_follows_threads_and_shared_memory() {
    driver();
    let busy = busy();
    let blocks = |threads: i32, shared: usize| {
        // SAFETY: the out-parameter is a local.
        let ask = |to| unsafe {
            api::cuOccupancyMaxActiveBlocksPerMultiprocessor(to, busy, threads, shared)
        };
        out(ask)
    };
    // H200: 2048 threads, 32 blocks and 228 KiB for a multiprocessor.
    assert_eq!([blocks(1024, 0), blocks(256, 0), blocks(32, 0)], [2, 8, 32]);
    assert_eq!(blocks(256, 47 << 10), 4);
    let mut block = 0;
    // SAFETY: both are locals.
    let grid: i32 = out(|to| unsafe {
        api::cuOccupancyMaxPotentialBlockSize(to, Out::new(&raw mut block), busy, None, 0, 0)
    });
    assert_eq!((grid, block), (2 * 132, 1024));
}

#[test]
fn linked_ptx_loads() {
    driver();
    let part = |name: &str| {
        format!(
            ".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry {name}() {{ ret; }}\n"
        )
    };
    // SAFETY: pointers are to locals; null stands for no options.
    unsafe {
        let none = || (In::new(std::ptr::null()), In::new(std::ptr::null()));
        let state = out(|to| api::cuLinkCreate_v2(0, none().0, none().1, to));
        for name in ["one", "two"] {
            let mut text = part(name).into_bytes();
            let (data, bytes) = (text.as_mut_ptr().cast(), text.len());
            ok(api::cuLinkAddData_v2(
                state,
                1,
                data,
                bytes,
                In::new(c"part".as_ptr()),
                0,
                none().0,
                none().1,
            ));
        }
        let mut image = std::ptr::null();
        let mut bytes = 0;
        ok(api::cuLinkComplete(
            state,
            Out::new(&raw mut image),
            Out::new(&raw mut bytes),
        ));
        let module = out(|to| api::cuModuleLoadData(to, image));
        function(module, "one");
        function(module, "two");
        ok(api::cuLinkDestroy(state));
    }
}

#[test]
fn an_event_can_stand_for_a_whole_context() {
    driver();
    // SAFETY: handles and device addresses only.
    unsafe {
        let context = out(|to| api::cuCtxCreate_v2(to, 0, shim_ffi::CUdevice(1)));
        let (waiting, releaser, all, gate) = (stream(1), stream(1), event(2), alloc(8));
        upload(gate, &[0_u64]);
        ok(api::cuStreamWaitValue64_v2(waiting, gate, 1, 0));
        ok(api::cuCtxRecordEvent(context, all));
        assert_eq!(api::cuEventQuery(all), CUresult::CUDA_ERROR_NOT_READY);
        ok(api::cuStreamWriteValue64_v2(releaser, gate, 1, 0));
        ok(api::cuEventSynchronize(all));
        ok(api::cuStreamQuery(waiting));
        ok(api::cuCtxDestroy_v2(context));
    }
    driver();
}
