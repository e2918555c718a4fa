//! Events between processes: one process records, the other queries, synchronises and lets its
//! streams wait. No process waits for a dead one.
//!
//! A puppet carries out the test's commands on one event and two streams.

use std::io::BufRead;
use std::path::Path;

use shim_ffi::{CUevent, CUipcEventHandle, CUresult, CUstream};
use simgpu::api;
use simgpu::device_state::{DeviceState, SHARED_EVENTS};
use simgpu::entry::Out;

use crate::processes::{Member, device_state, dir, wait_until};
use crate::support::*;

const BAD: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;
const NO_HANDLE: CUresult = CUresult::CUDA_ERROR_INVALID_HANDLE;
const SHARED: u32 = 6;

const DONE: &str = "0";
const NOT_READY: &str = "600";
const INVALID_HANDLE: &str = "400";

fn try_export(event: CUevent) -> Result<CUipcEventHandle, CUresult> {
    // SAFETY: the out-parameter is a local of `try_out`.
    try_out(|to| unsafe { api::cuIpcGetEventHandle(to, event) })
}

fn try_open(handle: CUipcEventHandle) -> Result<CUevent, CUresult> {
    // SAFETY: the out-parameter is a local of `try_out`.
    try_out(|to| unsafe { api::cuIpcOpenEventHandle(to, handle) })
}

fn to_hex(handle: &CUipcEventHandle) -> String {
    let bytes = handle.reserved.iter();
    bytes.map(|byte| format!("{:02x}", *byte as u8)).collect()
}

fn from_hex(hex: &str) -> CUipcEventHandle {
    let byte = |at: usize| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).expect("a byte");
    CUipcEventHandle {
        reserved: std::array::from_fn(|at| byte(at) as std::ffi::c_char),
    }
}

/// Not a test by itself: what a child process does.
#[test]
fn in_a_role() {
    let Ok(role) = std::env::var("SIMGPU_TEST_ROLE") else {
        return;
    };
    assert_eq!(role, "puppet");
    driver();
    let (first, second) = (stream(1), stream(1));
    let word = alloc(8);
    let mut event = CUevent::default();
    let mut gates = 0;
    println!("role:ready");
    for line in std::io::stdin().lock().lines() {
        let line = line.expect("a line");
        let (verb, rest) = line.split_once(' ').unwrap_or((&line, ""));
        let on = if rest == "second" { second } else { first };
        let said = |status: CUresult| status.0.to_string();
        // SAFETY: pointers are to locals; memory is this process's.
        let answer = unsafe {
            match verb {
                "create" => {
                    event = self::event(SHARED);
                    to_hex(&try_export(event).expect("a handle"))
                }
                "again" => match try_export(event) {
                    Ok(handle) => to_hex(&handle),
                    Err(status) => said(status),
                },
                "open" => match try_open(from_hex(rest)) {
                    Ok(opened) => {
                        event = opened;
                        said(CUresult::CUDA_SUCCESS)
                    }
                    Err(status) => said(status),
                },
                // What follows in the stream waits until "release".
                "block" => {
                    gates += 1;
                    said(api::cuStreamWaitValue32_v2(on, word, gates, 0))
                }
                "release" => said(api::cuMemcpyHtoD_v2(word, (&raw const gates).cast(), 4)),
                "record" => said(api::cuEventRecord(event, on)),
                "records" => {
                    let count: u32 = rest.parse().expect("a number");
                    let mut recorded = (0..count).map(|_| api::cuEventRecord(event, first));
                    said(
                        recorded
                            .find(|status| *status != CUresult::CUDA_SUCCESS)
                            .unwrap_or_default(),
                    )
                }
                "wait" => said(api::cuStreamWaitEvent(on, event, 0)),
                "query" => said(api::cuEventQuery(event)),
                "idle" => said(api::cuStreamQuery(on)),
                "drain" => said(api::cuStreamSynchronize(on)),
                "synchronize" => {
                    println!("role:waiting");
                    said(api::cuEventSynchronize(event))
                }
                "elapsed" => {
                    let mut ms = 0.0;
                    said(api::cuEventElapsedTime(Out::new(&raw mut ms), event, event))
                }
                "destroy" => said(api::cuEventDestroy_v2(event)),
                "leave" => std::process::exit(0),
                other => panic!("no command {other}"),
            }
        };
        println!("role:{answer}");
    }
}

fn puppet(dir: &Path) -> Member {
    let mut puppet = Member::of(dir, "shared_events::in_a_role", "puppet", "");
    assert_eq!(puppet.hear(), "ready");
    puppet
}

#[track_caller]
fn says(puppet: &mut Member, line: &str, answer: &str) {
    puppet.tell(line);
    assert_eq!(puppet.hear(), answer, "{line}");
}

fn ask(puppet: &mut Member, line: &str) -> String {
    puppet.tell(line);
    puppet.hear()
}

/// One that has made an event, and one that has opened it.
fn two(name: &str) -> (DeviceState, [Member; 2]) {
    let dir = dir(name);
    let mut both = [puppet(&dir), puppet(&dir)];
    let handle = ask(&mut both[0], "create");
    says(&mut both[1], &format!("open {handle}"), DONE);
    (device_state(&dir), both)
}

#[test]
fn an_event_is_shared_by_the_rules() {
    driver();
    // SAFETY: pointers are null or to locals.
    unsafe {
        assert_eq!(
            try_out(|to| api::cuEventCreate(to, 4)),
            Err::<CUevent, _>(BAD)
        );
        let (shared, own) = (event(SHARED), event(2));
        let nowhere = Out::new(std::ptr::null_mut());
        assert_eq!(api::cuIpcGetEventHandle(nowhere, shared), BAD);
        assert_eq!(try_export(CUevent::default()).err(), Some(NO_HANDLE));
        assert_eq!(
            try_export(own).err(),
            Some(NO_HANDLE),
            "it was not made for that"
        );
        let handle = try_export(shared).expect("a handle");
        let again = try_export(shared).expect("a handle");
        assert_eq!(handle.reserved, again.reserved);
        assert_eq!(
            try_open(handle),
            Err(CUresult::CUDA_ERROR_INVALID_CONTEXT),
            "it is this process's"
        );
        assert_eq!(
            api::cuIpcOpenEventHandle(Out::new(std::ptr::null_mut()), handle),
            BAD
        );
        assert_eq!(try_open(CUipcEventHandle::default()), Err(BAD));
        for (byte, refused) in [(0, BAD), (8, NO_HANDLE), (15, NO_HANDLE), (16, NO_HANDLE)] {
            let mut wrong = handle;
            wrong.reserved[byte] ^= 0x40;
            assert_eq!(try_open(wrong), Err(refused), "byte {byte}");
        }
        // Recorded and waited for as any other, in this process alone as well.
        assert_eq!(api::cuEventQuery(shared), CUresult::CUDA_SUCCESS);
        ok(api::cuEventRecord(shared, CUstream::NULL));
        ok(api::cuEventSynchronize(shared));
        ok(api::cuEventQuery(shared));
        let mut ms = 0.0;
        let elapsed = api::cuEventElapsedTime(Out::new(&raw mut ms), shared, shared);
        assert_eq!(elapsed, NO_HANDLE);
        ok(api::cuEventDestroy_v2(shared));
        assert_eq!(try_open(handle), Err(NO_HANDLE), "it is gone");
        ok(api::cuEventDestroy_v2(own));
        let supported = |to| api::cuDeviceGetAttribute(to, 125, shim_ffi::CUdevice(0));
        assert_eq!(out::<i32>(supported), 1);
    }
}

#[test]
fn a_record_of_one_process_is_seen_in_the_other() {
    let (_, [mut maker, mut other]) = two("events-seen");
    says(&mut other, "query", DONE);
    says(&mut other, "again", INVALID_HANDLE);
    says(&mut other, "elapsed", INVALID_HANDLE);
    for (from, to) in [(0, 1), (1, 0)] {
        let mut both = [&mut maker, &mut other];
        if from > to {
            both.reverse();
        }
        let [from, to] = both;
        says(from, "block", DONE);
        says(from, "record", DONE);
        says(to, "query", NOT_READY);
        says(to, "wait", DONE);
        says(to, "idle", NOT_READY);
        says(from, "query", NOT_READY);
        to.tell("synchronize");
        assert_eq!(to.hear(), "waiting");
        says(from, "release", DONE);
        assert_eq!(to.hear(), DONE);
        says(to, "query", DONE);
        says(to, "drain", DONE);
        says(from, "drain", DONE);
        says(from, "query", DONE);
        says(from, "wait", DONE);
        says(from, "drain", DONE);
    }
}

#[test]
fn a_stream_waits_for_the_record_that_was_the_last_at_the_call() {
    let (_, [mut maker, mut other]) = two("events-which");
    says(&mut maker, "block", DONE);
    says(&mut maker, "record", DONE);
    says(&mut other, "wait", DONE);
    says(&mut maker, "release", DONE);
    says(&mut maker, "drain", DONE);
    // The event stands for something else now, which nobody reaches yet.
    says(&mut maker, "block second", DONE);
    says(&mut maker, "record second", DONE);
    says(&mut other, "query", NOT_READY);
    says(&mut other, "drain", DONE);
    // Nor does a later record end the wait for an earlier one.
    says(&mut other, "wait second", DONE);
    says(&mut other, "record", DONE);
    says(&mut other, "drain", DONE);
    says(&mut maker, "query", DONE);
    says(&mut other, "idle second", NOT_READY);
    says(&mut maker, "release", DONE);
    says(&mut other, "drain second", DONE);
    // More of them than have a place of their own.
    says(&mut maker, "block", DONE);
    says(&mut maker, "record", DONE);
    says(&mut other, "wait", DONE);
    says(&mut maker, "records 200", DONE);
    says(&mut other, "wait second", DONE);
    says(&mut other, "idle", NOT_READY);
    says(&mut maker, "release", DONE);
    says(&mut other, "drain", DONE);
    says(&mut other, "drain second", DONE);
    says(&mut other, "query", DONE);
}

#[test]
fn an_event_that_its_maker_destroyed_stays_with_who_has_opened_it() {
    let (state, [mut maker, mut other]) = two("events-destroyed");
    let dir = state_dir("events-destroyed");
    let handle = ask(&mut maker, "again");
    assert_eq!(state.shared_events(), 1);
    says(&mut maker, "block", DONE);
    says(&mut maker, "record", DONE);
    says(&mut maker, "destroy", DONE);
    says(&mut other, "query", NOT_READY);
    says(&mut other, &format!("open {handle}"), INVALID_HANDLE);
    let mut third = puppet(&dir);
    says(&mut third, &format!("open {handle}"), INVALID_HANDLE);
    says(&mut maker, "release", DONE);
    says(&mut other, "synchronize", "waiting");
    assert_eq!(other.hear(), DONE);
    says(&mut other, "record", DONE);
    says(&mut other, "drain", DONE);
    says(&mut other, "destroy", DONE);
    wait_until("nobody has it", || state.shared_events() == 0);
    // The other way round: who has opened it destroys it, and its maker goes on.
    let handle = ask(&mut maker, "create");
    says(&mut other, &format!("open {handle}"), DONE);
    says(&mut third, &format!("open {handle}"), DONE);
    says(&mut other, "destroy", DONE);
    says(&mut maker, "block", DONE);
    says(&mut maker, "record", DONE);
    says(&mut third, "query", NOT_READY);
    says(&mut other, &format!("open {handle}"), DONE);
    says(&mut other, "query", NOT_READY);
    says(&mut maker, "release", DONE);
    says(&mut maker, "drain", DONE);
    says(&mut third, "query", DONE);
    says(&mut other, "query", DONE);
    assert_eq!(state.shared_events(), 1);
}

#[test]
fn what_a_killed_process_had_recorded_is_waited_for_no_longer() {
    let (state, [mut maker, mut other]) = two("events-killed");
    let mut third = puppet(&state_dir("events-killed"));
    let handle = ask(&mut maker, "again");
    says(&mut third, &format!("open {handle}"), DONE);
    says(&mut maker, "block", DONE);
    says(&mut maker, "record", DONE);
    says(&mut other, "wait", DONE);
    says(&mut other, "idle", NOT_READY);
    third.tell("synchronize");
    assert_eq!(third.hear(), "waiting");
    maker.kill();
    assert_eq!(third.hear(), DONE);
    says(&mut other, "drain", DONE);
    says(&mut other, "query", DONE);
    let mut newcomer = puppet(&state_dir("events-killed"));
    says(&mut newcomer, &format!("open {handle}"), INVALID_HANDLE);
    // Those that are left still share it, until the last of them is killed as well.
    says(&mut other, "block", DONE);
    says(&mut other, "record", DONE);
    says(&mut third, "wait", DONE);
    says(&mut third, "idle", NOT_READY);
    assert_eq!(state.shared_events(), 1);
    other.kill();
    says(&mut third, "drain", DONE);
    third.kill();
    assert_eq!(state.shared_events(), 0);
    // A process in a dead one's place holds nothing of it, and the place is used again.
    let fresh = ask(&mut newcomer, "create");
    assert_ne!(fresh, handle);
    says(&mut newcomer, "query", DONE);
    assert_eq!(state.shared_events(), 1);
}

#[test]
fn a_process_that_ends_or_is_killed_at_any_time_leaves_nobody_waiting() {
    let dir = dir("events-rounds");
    let mut maker = puppet(&dir);
    let handle = ask(&mut maker, "create");
    for round in 0..12 {
        let mut peer = puppet(&dir);
        says(&mut peer, &format!("open {handle}"), DONE);
        // Not answered: it is somewhere in there when it goes.
        for _ in 0..20 {
            peer.tell("records 50");
        }
        if round % 3 == 0 {
            peer.tell("leave");
        }
        says(&mut maker, "wait", DONE);
        says(&mut maker, "record second", DONE);
        if round % 3 != 0 {
            peer.kill();
        }
        says(&mut maker, "drain", DONE);
        drop(peer);
        maker.tell("synchronize");
        assert_eq!(maker.hear(), "waiting");
        assert_eq!(maker.hear(), DONE, "round {round}");
    }
    assert_eq!(device_state(&dir).shared_events(), 1);
}

#[test]
fn destroyed_events_leave_space_for_others() {
    if !in_own_process("shared_events::destroyed_events_leave_space_for_others") {
        return;
    }
    driver();
    // SAFETY: the out-parameter is a local of `try_out`.
    let create = || try_out(|to| unsafe { api::cuEventCreate(to, SHARED) });
    // SAFETY: no pointers.
    let destroy = |event| ok(unsafe { api::cuEventDestroy_v2(event) });
    for _ in 0..SHARED_EVENTS + 100 {
        destroy(create().expect("an event"));
    }
    let all: Vec<CUevent> = (0..SHARED_EVENTS).map_while(|_| create().ok()).collect();
    assert_eq!(all.len(), SHARED_EVENTS);
    assert_eq!(create(), Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY));
    // Those of one process alone are not counted.
    destroy(event(2));
    destroy(all[7]);
    destroy(create().expect("an event"));
    all.iter()
        .enumerate()
        .filter(|(at, _)| *at != 7)
        .for_each(|(_, event)| destroy(*event));
}
