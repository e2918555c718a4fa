//! What processes share: capacity, the compute engine, and nothing else after one is killed.
//!
//! A test starts this binary again in a role; the role answers over its standard streams.

use std::io::{BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use shim_ffi::CUresult;
use simgpu::api;
use simgpu::device_state::DeviceState;
use simgpu::entry::{In, Out};
use simgpu::profile::Profile;

use crate::support::*;
use testbed::within;

const MIB: u64 = 1 << 20;
const CAPACITY: u64 = 1 << 30;

pub struct Member {
    child: Child,
    says: BufReader<ChildStdout>,
}

impl Member {
    fn start(dir: &Path, role: &str) -> Self {
        Self::with(dir, role, "")
    }

    /// On a device with these keys of the profile.
    fn with(dir: &Path, role: &str, keys: &str) -> Self {
        Self::of(dir, "processes::in_a_role", role, keys)
    }

    /// By the test that has this role.
    pub fn of(dir: &Path, test: &str, role: &str, keys: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().expect("a path"))
            .args(["--exact", test, "--nocapture", "--test-threads=1"])
            .env("SIMGPU_TEST_ROLE", role)
            .env("SUBLET_SIM_STATE", dir)
            .env("SUBLET_SIM_CAPACITY", "1GiB")
            .env("SUBLET_SIM_CONTEXT", "16MiB")
            .env("SUBLET_SIM_SET", keys)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("this binary starts");
        let says = BufReader::new(child.stdout.take().expect("piped"));
        Self { child, says }
    }

    /// The next line that starts with `role:`; the test harness writes others.
    pub fn hear(&mut self) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert_ne!(
                testbed::read_line(&mut self.says, &mut line),
                0,
                "the process ended"
            );
            if let Some((_, said)) = line.trim_end().split_once("role:") {
                return said.to_owned();
            }
        }
    }

    /// Lets a role that waits for a line go on.
    fn proceed(&mut self) {
        self.tell("go");
    }

    pub fn tell(&mut self, line: &str) {
        let stdin = self.child.stdin.as_mut().expect("piped");
        stdin
            .write_all(format!("{line}\n").as_bytes())
            .expect("it listens");
    }

    fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn kill(&mut self) {
        self.child.kill().expect("it lives");
        within::wait(&mut self.child, "a killed process", testbed::PATIENCE);
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        // A test that failed leaves nobody behind; one that went well has waited already.
        testbed::reap(&mut self.child);
    }
}

pub fn device_state(dir: &Path) -> DeviceState {
    let config = Profile::text_from_env(|name| match name {
        "SUBLET_SIM_CAPACITY" => Some("1GiB".to_owned()),
        "SUBLET_SIM_CONTEXT" => Some("16MiB".to_owned()),
        _ => None,
    });
    DeviceState::open(dir, &config.expect("a valid configuration")).expect("a device")
}

pub fn dir(name: &str) -> PathBuf {
    let dir = state_dir(name);
    // A run of the same pid long ago may have left a state.
    let _ = std::fs::remove_file(dir.join("state"));
    dir
}

pub fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < deadline, "{what}: not within 60 s");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Reads until the parent closes the pipe.
fn until_released() {
    let mut rest = Vec::new();
    let _ = std::io::stdin().read_to_end(&mut rest);
}

fn to_hex(handle: &shim_ffi::CUipcMemHandle) -> String {
    let bytes = handle.reserved.iter();
    bytes.map(|byte| format!("{:02x}", *byte as u8)).collect()
}

fn from_hex(hex: &str) -> shim_ffi::CUipcMemHandle {
    let byte = |at: usize| u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).expect("a byte");
    shim_ffi::CUipcMemHandle {
        reserved: std::array::from_fn(|at| byte(at) as std::ffi::c_char),
    }
}

/// Not a test by itself: what a child process does.
fn words_to_hex(words: &[u64; 8]) -> String {
    words.iter().map(|word| format!("{word:016x}")).collect()
}

fn words_from_hex(hex: &str) -> [u64; 8] {
    std::array::from_fn(|at| {
        u64::from_str_radix(&hex[at * 16..at * 16 + 16], 16).expect("hexadecimal digits")
    })
}

#[test]
fn memory_of_a_pool_is_the_same_bytes_in_the_process_that_opens_it() {
    let dir = dir("pool");
    let (mut owner, mut other) = (
        Member::start(&dir, "share a pool"),
        Member::start(&dir, "open a pool"),
    );
    let said = owner.hear();
    let (file, data) = said.split_once(' ').expect("two words");
    assert_eq!(other.hear(), "ready");
    other.tell(&format!("/proc/{}/fd/{file} {data}", owner.pid()));
    assert_eq!(other.hear(), "true");
    owner.proceed();
    assert_eq!(owner.hear(), 0x77.to_string());
}

#[test]
fn in_a_role() {
    let Ok(role) = std::env::var("SIMGPU_TEST_ROLE") else {
        return;
    };
    driver();
    match role.as_str() {
        "hold" => {
            alloc(512 << 20);
            println!("role:holding");
            until_released();
        }
        "grab" => {
            println!("role:ready");
            std::io::stdin()
                .read_line(&mut String::new())
                .expect("a line");
            let mut taken = 0_u64;
            let end = loop {
                match try_alloc(4 << 20) {
                    Ok(_) => taken += 4,
                    Err(status) => break status,
                }
            };
            println!("role:{taken} {}", end.0);
            until_released();
        }
        "busy" => {
            let (busy, stream) = (busy(), stream(1));
            println!("role:running");
            loop {
                launch(busy, stream, &[500]);
            }
        }
        "takes" => {
            println!("role:ready");
            std::io::stdin()
                .read_line(&mut String::new())
                .expect("a line");
            let began = simgpu::observe::now_ns();
            for _ in 0..20 {
                alloc(2 << 20);
            }
            println!("role:{began} {}", simgpu::observe::now_ns());
        }
        "fails" => {
            let began = simgpu::observe::now_ns();
            let refused = try_alloc(4 << 30).expect_err("more than there is");
            assert_eq!(refused, CUresult::CUDA_ERROR_OUT_OF_MEMORY);
            println!("role:{}", simgpu::observe::now_ns() - began);
        }
        "marks" => {
            let (memory, stream) = (alloc(4096), stream(1));
            for value in 0.. {
                // SAFETY: memory of this process.
                ok(unsafe { api::cuStreamWriteValue32_v2(stream, memory, value, 0) });
                // SAFETY: no pointers.
                ok(unsafe { api::cuStreamSynchronize(stream) });
                if value == 20 {
                    println!("role:marked");
                }
            }
        }
        "launches" => {
            let (busy, stream) = (busy(), stream(1));
            let took = || {
                let began = simgpu::observe::now_ns();
                launch(busy, stream, &[1]);
                simgpu::observe::now_ns() - began
            };
            let first = took();
            let later = (0..20).map(|_| took()).min().expect("some");
            println!("role:{first} {later}");
        }
        "long" => {
            let busy = busy();
            println!("role:running");
            launch(busy, shim_ffi::CUstream::NULL, &[3_600_000_000]);
            synchronize();
        }
        "share" => {
            let address = alloc(4096);
            upload(address, &[0x5a_u8; 4096]);
            // SAFETY: the out-parameter is a local.
            let handle = out(|to| unsafe { api::cuIpcGetMemHandle(to, address) });
            println!("role:{}", to_hex(&handle));
            std::io::stdin()
                .read_line(&mut String::new())
                .expect("a line");
            println!("role:{}", download::<u8>(address, 1)[0]);
        }
        "open" => {
            println!("role:ready");
            let mut hex = String::new();
            std::io::stdin().read_line(&mut hex).expect("a line");
            let handle = from_hex(&hex);
            // SAFETY: the out-parameter is a local; addresses are the driver's.
            unsafe {
                let address = out(|to| api::cuIpcOpenMemHandle_v2(to, handle, 1));
                let seen = download::<u8>(address, 4096);
                upload(address, &[0x77_u8]);
                ok(api::cuIpcCloseMemHandle(address));
                assert_eq!(
                    api::cuIpcCloseMemHandle(address),
                    CUresult::CUDA_ERROR_INVALID_VALUE
                );
                println!("role:{}", seen.iter().all(|byte| *byte == 0x5a));
            }
        }
        "share a pool" => {
            let mut props = shim_ffi::CUmemPoolProps::default();
            props.allocType.0 = 1;
            props.location.r#type.0 = 1;
            props.handleTypes.0 = 1;
            let stream = stream(1);
            // SAFETY: pointers are to locals.
            unsafe {
                let pool = out(|to| api::cuMemPoolCreate(to, In::new(&raw const props)));
                let address = out(|to| api::cuMemAllocFromPoolAsync(to, 4096, pool, stream));
                ok(api::cuStreamSynchronize(stream));
                upload(address, &[0x5a_u8; 4096]);
                let mut file = 0_i32;
                let to = Out::new((&raw mut file).cast());
                ok(api::cuMemPoolExportToShareableHandle(to, pool, 1, 0));
                let data = out(|to| api::cuMemPoolExportPointer(to, address));
                println!("role:{file} {}", words_to_hex(&data.reserved));
                std::io::stdin()
                    .read_line(&mut String::new())
                    .expect("a line");
                println!("role:{}", download::<u8>(address, 1)[0]);
            }
        }
        "open a pool" => {
            println!("role:ready");
            let mut line = String::new();
            std::io::stdin().read_line(&mut line).expect("a line");
            let (path, data) = line.trim().split_once(' ').expect("two words");
            let file = std::fs::File::open(path).expect("the descriptor of the other process");
            let data = shim_ffi::CUmemPoolPtrExportData {
                reserved: words_from_hex(data),
            };
            let stream = stream(1);
            // SAFETY: the out-parameters are locals; addresses are the driver's.
            unsafe {
                use std::os::fd::AsRawFd;
                let handle = file.as_raw_fd() as usize as *mut std::ffi::c_void;
                let pool = out(|to| api::cuMemPoolImportFromShareableHandle(to, handle, 1, 0));
                let none = try_out(|to| api::cuMemAllocFromPoolAsync(to, 4096, pool, stream));
                assert_eq!(none, Err(CUresult::CUDA_ERROR_INVALID_VALUE));
                let mut other = data;
                other.reserved[7] += 64;
                let wrong =
                    try_out(|to| api::cuMemPoolImportPointer(to, pool, In::new(&raw const other)));
                assert_eq!(wrong, Err(CUresult::CUDA_ERROR_INVALID_VALUE));
                let address =
                    out(|to| api::cuMemPoolImportPointer(to, pool, In::new(&raw const data)));
                let seen = download::<u8>(address, 4096);
                upload(address, &[0x77_u8]);
                ok(api::cuMemFreeAsync(address, stream));
                assert_eq!(
                    api::cuMemFree_v2(address),
                    CUresult::CUDA_ERROR_INVALID_VALUE
                );
                ok(api::cuMemPoolDestroy(pool));
                println!("role:{}", seen.iter().all(|byte| *byte == 0x5a));
            }
        }
        // Rank 0 has the memory that both see; rank 1 gets it by a handle.
        "rank 0" | "rank 1" => {
            const ROUNDS: u32 = 200;
            let rank = u32::from(role == "rank 1");
            let shared = if rank == 0 {
                let address = alloc(4096);
                upload(address, &[0_u8; 4096]);
                // SAFETY: the out-parameter is a local.
                let handle = out(|to| unsafe { api::cuIpcGetMemHandle(to, address) });
                println!("role:{}", to_hex(&handle));
                address
            } else {
                println!("role:ready");
                let mut hex = String::new();
                std::io::stdin().read_line(&mut hex).expect("a line");
                // SAFETY: the out-parameter is a local.
                out(|to| unsafe { api::cuIpcOpenMemHandle_v2(to, from_hex(&hex), 1) })
            };
            let parameters = ["u64", "u64", "u64", "u64", "u64", "u32", "u32", "u32"];
            let text = module(&[("sublet_all_reduce_f32", &parameters)]);
            let kernel = function(text, "sublet_all_reduce_f32");
            let (stream, own) = (stream(1), alloc(64));
            let mut value = 1.0 + rank as f32;
            let mut sum = 0.0;
            for round in 0..ROUNDS {
                if round > 0 {
                    value = sum / 2.0 + rank as f32;
                }
                upload(own, &[value; 4]);
                let (at, shared) = (own.0, shared.0);
                let which = [4, rank.into(), 2, round.into()];
                let args = [&[at, at, shared, shared + 64], &which[..]].concat();
                launch(kernel, stream, &args);
                // SAFETY: the stream is ours.
                ok(unsafe { api::cuStreamSynchronize(stream) });
                sum = download::<f32>(own, 4)[3];
            }
            println!("role:{sum}");
            until_released();
        }
        "exec" => {
            alloc(768 << 20);
            use std::os::unix::process::CommandExt;
            let error = Command::new(std::env::current_exe().expect("a path"))
                .args([
                    "--exact",
                    "processes::in_a_role",
                    "--nocapture",
                    "--test-threads=1",
                ])
                .env("SIMGPU_TEST_ROLE", "hold")
                .exec();
            panic!("exec: {error}");
        }
        "fork" => {
            // SAFETY: the child only calls the driver and exits.
            let child = unsafe { libc::fork() };
            if child == 0 {
                let refused = try_alloc(16) == Err(CUresult::CUDA_ERROR_NOT_INITIALIZED);
                // SAFETY: ends the child without running the parent's handlers.
                unsafe { libc::_exit(i32::from(!refused)) };
            }
            let mut status = 0;
            // SAFETY: waits for our child, into a local.
            unsafe { libc::waitpid(child, &mut status, 0) };
            free(alloc(16));
            println!("role:{status}");
        }
        other => panic!("no role {other}"),
    }
}

#[test]
fn a_killed_process_frees_its_memory_at_once() {
    let dir = dir("killed");
    let device_state = device_state(&dir);
    let mut member = Member::start(&dir, "hold");
    assert_eq!(member.hear(), "holding");
    assert_eq!(device_state.used(0), 528 * MIB);
    assert_eq!(device_state.usages(0)[0].pid, member.pid());
    member.kill();
    assert_eq!(device_state.used(0), 0);
    assert_eq!(device_state.usages(0), []);
}

#[test]
fn racing_processes_never_exceed_the_capacity() {
    let dir = dir("race");
    let device_state = device_state(&dir);
    let mut members: Vec<_> = (0..4).map(|_| Member::start(&dir, "grab")).collect();
    // Everybody has a context before the first one takes memory.
    members
        .iter_mut()
        .for_each(|member| assert_eq!(member.hear(), "ready"));
    members.iter_mut().for_each(Member::proceed);
    let mut taken = 0;
    for member in &mut members {
        let said = member.hear();
        let (mib, status) = said.split_once(' ').expect("two words");
        assert_eq!(status, "2");
        taken += mib.parse::<u64>().expect("a number") * MIB + 16 * MIB;
        assert!(device_state.used(0) <= CAPACITY);
    }
    assert_eq!(taken, device_state.used(0));
    assert!(taken <= CAPACITY && taken > CAPACITY - 4 * MIB, "{taken}");
    // One dies; another can have what it had.
    members[0].kill();
    let mut second = Member::start(&dir, "grab");
    assert_eq!(second.hear(), "ready");
    second.proceed();
    second.hear();
    assert!(device_state.used(0) <= CAPACITY && device_state.used(0) > CAPACITY - 4 * MIB);
}

#[test]
fn two_busy_processes_get_equal_compute_time() {
    let dir = dir("slices");
    let device_state = device_state(&dir);
    let mut members = [Member::start(&dir, "busy"), Member::start(&dir, "busy")];
    members
        .iter_mut()
        .for_each(|member| assert_eq!(member.hear(), "running"));
    let times = || {
        let usages = device_state.usages(0);
        let of = |pid| {
            usages
                .iter()
                .find(|usage| usage.pid == pid)
                .map_or(0, |usage| usage.compute_ns)
        };
        [of(members[0].pid()), of(members[1].pid())]
    };
    wait_until("both compute", || times().iter().all(|ns| *ns > 20_000_000));
    let (from, switches) = (times(), device_state.switches(0));
    wait_until("half a second of compute", || {
        times().iter().sum::<u64>() > from.iter().sum::<u64>() + 500_000_000
    });
    let until = times();
    let share =
        (until[0] - from[0]) as f64 / (until.iter().sum::<u64>() - from.iter().sum::<u64>()) as f64;
    assert!((0.4..=0.6).contains(&share), "share {share}");
    assert!(device_state.switches(0) > switches + 50, "slices of 2 ms");
}

#[test]
fn a_long_kernel_is_sliced_and_its_death_frees_the_engine() {
    let dir = dir("long");
    let device_state = device_state(&dir);
    let mut long = Member::start(&dir, "long");
    assert_eq!(long.hear(), "running");
    wait_until("the long kernel runs", || {
        device_state
            .usages(0)
            .iter()
            .any(|usage| usage.compute_ns > 5_000_000)
    });
    let mut busy = Member::start(&dir, "busy");
    assert_eq!(busy.hear(), "running");
    let of = |pid| {
        device_state
            .usages(0)
            .iter()
            .find(|usage| usage.pid == pid)
            .map_or(0, |usage| usage.compute_ns)
    };
    wait_until("the other computes beside it", || {
        of(busy.pid()) > 50_000_000
    });
    long.kill();
    let before = of(busy.pid());
    wait_until("the other goes on in_own_process", || {
        of(busy.pid()) > before + 100_000_000
    });
}

#[test]
fn a_forked_child_has_no_device_and_takes_nothing_from_its_parent() {
    let dir = dir("fork");
    let mut member = Member::start(&dir, "fork");
    assert_eq!(member.hear(), "0");
}

#[test]
fn memory_is_shared_by_handle_and_charged_once() {
    let dir = dir("ipc");
    let device_state = device_state(&dir);
    let mut owner = Member::start(&dir, "share");
    let handle = owner.hear();
    let used = device_state.used(0);
    let mut other = Member::start(&dir, "open");
    assert_eq!(other.hear(), "ready");
    let with_context = device_state.used(0);
    other.tell(&handle);
    assert_eq!(other.hear(), "true");
    assert_eq!(with_context, used + 16 * MIB);
    owner.proceed();
    assert_eq!(owner.hear(), 0x77.to_string());
}

#[test]
fn a_program_that_executes_another_gives_its_memory_back() {
    let dir = dir("exec");
    let device_state = device_state(&dir);
    let mut member = Member::start(&dir, "exec");
    assert_eq!(member.hear(), "holding");
    assert_eq!(device_state.used(0), 528 * MIB);
}

#[test]
fn kernels_of_two_processes_meet_although_one_runs_at_a_time() {
    let dir = dir("meet");
    let device_state = device_state(&dir);
    let mut first = Member::start(&dir, "rank 0");
    let handle = first.hear();
    wait_until("the first spins", || {
        device_state
            .usages(0)
            .iter()
            .any(|usage| usage.compute_ns > 5_000_000)
    });
    // Neither does it keep others from the device.
    let mut busy = Member::start(&dir, "busy");
    assert_eq!(busy.hear(), "running");
    let of = |pid| {
        let usages = device_state.usages(0);
        let usage = usages.iter().find(|usage| usage.pid == pid);
        usage.map_or(0, |usage| usage.compute_ns)
    };
    wait_until("another computes beside it", || of(busy.pid()) > 20_000_000);
    busy.kill();
    let mut second = Member::start(&dir, "rank 1");
    assert_eq!(second.hear(), "ready");
    second.tell(&handle);
    // 3 at first; from then on a sum is the one before and 1.
    assert_eq!((first.hear(), second.hear()), ("202".into(), "202".into()));
}

/// Two numbers that a role says.
fn two(said: &str) -> (u64, u64) {
    let (one, other) = said.split_once(' ').expect("two words");
    let number = |word: &str| word.parse::<u64>().expect("a number");
    (number(one), number(other))
}

#[test]
fn calls_that_manage_memory_wait_for_other_processes_where_the_driver_has_one_lock() {
    let dir = dir("lock");
    let mut members: Vec<Member> = (0..2)
        .map(|_| Member::with(&dir, "takes", "driver_lock=1;alloc_us=5000"))
        .collect();
    for member in &mut members {
        assert_eq!(member.hear(), "ready");
    }
    members.iter_mut().for_each(Member::proceed);
    let times: Vec<_> = members
        .iter_mut()
        .map(|member| two(&member.hear()))
        .collect();
    let began = times.iter().map(|(began, _)| *began).min();
    let ended = times.iter().map(|(_, ended)| *ended).max();
    // 20 calls of 5 ms each, and none beside another.
    let took = ended.zip(began).map(|(ended, began)| ended - began);
    assert!(took >= Some(200_000_000), "{times:?}");
}

#[test]
fn a_call_that_gets_no_memory_costs_what_the_profile_says() {
    let dir = dir("fails");
    let mut member = Member::with(&dir, "fails", "failed_call_us=30000");
    let took: u64 = member.hear().parse().expect("a number");
    assert!(took >= 30_000_000, "{took}");
}

#[test]
fn marks_that_need_a_turn_take_the_engine_from_others() {
    for (keys, turns) in [("marks_need_turn=1", true), ("", false)] {
        let dir = dir(&format!("marks-{turns}"));
        let mut busy = Member::with(&dir, "busy", keys);
        assert_eq!(busy.hear(), "running");
        let device_state = device_state(&dir);
        let before = device_state.switches(0);
        let mut marker = Member::with(&dir, "marks", keys);
        assert_eq!(marker.hear(), "marked");
        let switches = || device_state.switches(0) - before;
        // The busy process takes its first turn about now; marks that are close share one, and on a
        // busy host nobody may want the engine for a while.
        if turns {
            wait_until("marks take turns", || switches() > 3);
        } else {
            assert!(switches() <= 3, "{}", switches());
        }
        marker.kill();
        busy.kill();
    }
}

#[test]
fn the_first_launch_of_a_kernel_costs_what_the_profile_says() {
    let dir = dir("first");
    let mut member = Member::with(&dir, "launches", "first_launch_us=100000");
    let (first, later) = two(&member.hear());
    assert!(first >= 100_000_000 && later < first, "{first} {later}");
}
