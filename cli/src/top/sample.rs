//! A minute of two devices and some jobs, the same each time: for tests and pictures.

use control::{
    ArbiterStatus, Class, DeviceStatus, Event, IterationSource, JobDevice, JobState, JobStatus,
    Pressure, PressureLevel, ProcessStatus, Profile, Residence, ResidenceState, SliceMode,
};

use super::model::Model;

/// When the last look was.
pub const NOW_MS: u64 = 60_000;
const GIB: u64 = 1 << 30;
const MIB: u64 = 1 << 20;

pub fn model() -> Model {
    let mut model = Model::default();
    for second in 0..=60 {
        model.learn(second * 1000, status(second));
    }
    model.learn_events(events());
    model
}

/// Device time of a job by then, in nanoseconds, where its share in percent changes with time.
fn device_time(second: u64, share: impl Fn(u64) -> u64) -> u64 {
    (0..second).map(|second| share(second) * 10_000_000).sum()
}

fn devices(second: u64) -> Vec<DeviceStatus> {
    let first = DeviceStatus {
        index: 0,
        uuid: "GPU-0a".into(),
        name: "NVIDIA H200".into(),
        total_bytes: 141 * GIB,
        used_bytes: Some(77 * GIB),
        mode: SliceMode::Exclusive,
        running: SliceMode::Exclusive,
        policy: "stride".into(),
        holders: vec!["train".into()],
        busy_fraction: if second % 20 < 4 { 0.6 } else { 0.97 },
        power_mw: Some(412_500),
        temperature_celsius: Some(61),
        sm_used_fraction: Some(0.94),
        ..DeviceStatus::default()
    };
    let second = DeviceStatus {
        index: 1,
        uuid: "GPU-1b".into(),
        name: "NVIDIA H200".into(),
        total_bytes: 141 * GIB,
        simulated: true,
        mode: SliceMode::Auto,
        running: SliceMode::Concurrent,
        policy: "altruistic".into(),
        busy_fraction: 0.25,
        pressure: Pressure {
            level: PressureLevel::Pressed,
            switching_fraction: 0.17,
            ..Pressure::default()
        },
        ..DeviceStatus::default()
    };
    vec![first, second]
}

fn on(index: u32) -> Vec<JobDevice> {
    vec![JobDevice {
        index,
        uuid: ["GPU-0a", "GPU-1b"][index as usize].into(),
        mem_used_bytes: 10 * GIB,
        ..JobDevice::default()
    }]
}

fn process(pid: u32, command: &str, mem_used_bytes: u64) -> ProcessStatus {
    ProcessStatus {
        pid,
        command: command.into(),
        launches: u64::from(pid) * 100,
        mem_used_bytes,
        ..ProcessStatus::default()
    }
}

fn status(second: u64) -> ArbiterStatus {
    let train = JobStatus {
        name: "train".into(),
        id: 7,
        uid: 1000,
        user: "alice".into(),
        command: vec!["python".into(), "train.py".into(), "--name=漢字\n".into()],
        state: JobState::Running,
        share_asked: Some(0.5),
        share_min: Some(0.25),
        share_got_total: 0.47,
        share_got_contended: Some(0.51),
        mem_limit_bytes: Some(64 * GIB),
        mem_used_bytes: (10 + second.min(40)) * GIB,
        mem_peak_bytes: 52 * GIB,
        unattributed_bytes: 500 * MIB,
        device_time_ns: device_time(second, |at| if at < 30 { 25 } else { 50 }),
        wait_time_ns: 31_400_000_000,
        launches: second * 1234,
        oom_count: 1,
        in_flight_marks: Some(12),
        devices: on(0),
        processes: vec![
            process(4711, "python train.py", 49 * GIB),
            process(4720, "python", GIB),
        ],
        profile: Some(Box::new(Profile {
            found: IterationSource::Detected,
            iterations: 4102,
            iteration_ns: Some(12_345_678),
            solo_iteration_ns: Some(6_000_000),
            slowdown: Some(2.057),
            ..Profile::default()
        })),
        ..JobStatus::default()
    };
    let serve = JobStatus {
        name: "serve".into(),
        id: 8,
        uid: 1001,
        user: "bob".into(),
        command: vec!["./infer_loop".into()],
        state: JobState::Waiting,
        share_asked: Some(0.25),
        mem_used_bytes: 3 * GIB + 512 * MIB,
        device_time_ns: device_time(second, |at| 20 + at % 10),
        in_flight_marks: Some(0),
        devices: on(0),
        processes: vec![process(4800, "./infer_loop", 3 * GIB)],
        ..JobStatus::default()
    };
    let batch = JobStatus {
        name: "batch-of-a-user-with-long-names".into(),
        id: 12,
        uid: 1002,
        class: Class::Opportunistic,
        state: JobState::Paused,
        paused: true,
        evicted: true,
        evictable: true,
        mem_limit_bytes: Some(16 * GIB),
        mem_used_bytes: 12 * GIB,
        devices: on(1),
        demoted: Some("floods the arbiter with requests".into()),
        residence: Some(Box::new(Residence {
            state: ResidenceState::Evicted,
            evictable_bytes: 12 * GIB,
            host_bytes: 12 * GIB,
            ..Residence::default()
        })),
        ..JobStatus::default()
    };
    let pair = JobStatus {
        name: "pair".into(),
        id: 13,
        user: "alice".into(),
        state: JobState::Running,
        gang: true,
        device_time_ns: device_time(second, |_| 40),
        mem_used_bytes: 20 * GIB,
        devices: [on(0), on(1)].concat(),
        ..JobStatus::default()
    };
    let ended = JobStatus {
        name: "ended".into(),
        id: 3,
        user: "bob".into(),
        state: JobState::Gone,
        ..JobStatus::default()
    };
    ArbiterStatus {
        version: "0.1.0".into(),
        pid: 3249,
        uptime_ms: 7_384_000,
        host_memory_used_bytes: 12 * GIB,
        host_memory_limit_bytes: 256 * GIB,
        devices: devices(second),
        jobs: vec![train, serve, batch, pair, ended],
        ..ArbiterStatus::default()
    }
}

fn events() -> Vec<Event> {
    let event = |seq, job_id, kind: &str, message: &str| Event {
        seq,
        unix_ms: 1_795_466_100_123 + seq * 61_000,
        kind: kind.into(),
        job_id,
        message: message.into(),
        ..Event::default()
    };
    vec![
        event(
            1,
            7,
            "registered",
            "job `train` is registered by process 4711",
        ),
        event(
            2,
            7,
            "attached",
            "process 4711 (python) of job `train` has attached",
        ),
        event(
            3,
            8,
            "registered",
            "job `serve` is registered by process 4800",
        ),
        event(
            4,
            7,
            "oom",
            "job `train` is out of memory on device 0: 16GiB\x1b[2J asked for",
        ),
        event(
            5,
            12,
            "evicted",
            "job `batch-of-a-user-with-long-names` was evicted",
        ),
    ]
}
