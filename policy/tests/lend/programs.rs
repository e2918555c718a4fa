//! The programs of the scenarios. Times in nanoseconds.

use std::collections::VecDeque;

use policy::cluster::Random;

use crate::device::{MS, Op, Program, SECOND, US};
use crate::recording;

/// Spread of a host gap: the deviation of its logarithm.
const NOISE: f64 = 0.15;

pub fn noisy(random: &mut Random, mean: u64, deviation: f64) -> u64 {
    if mean == 0 {
        return 0;
    }
    // Box and Muller.
    let radius = (-2.0 * (1.0 - random.unit()).ln()).sqrt();
    let normal = radius * (std::f64::consts::TAU * random.unit()).cos();
    (mean as f64 * (normal * deviation).exp()) as u64
}

pub fn recorded(file: &str, sync_every: u64, seed: u64) -> Program {
    let steps = recording::steps(file);
    let mut random = Random::new(seed);
    let (mut at, mut count) = (0, 0);
    Box::new(move |_, ops| {
        for (host, len) in &steps[at] {
            let host = noisy(&mut random, *host, NOISE);
            match *len {
                0 if host > 0 => ops.push_back(Op::Sleep(host)),
                0 => {}
                len => ops.push_back(Op::Kernel { host, len }),
            }
        }
        at = (at + 1) % steps.len();
        end_step(&mut count, sync_every, ops);
    })
}

fn end_step(count: &mut u64, sync_every: u64, ops: &mut VecDeque<Op>) {
    ops.push_back(Op::Step);
    *count += 1;
    if sync_every > 0 && count.is_multiple_of(sync_every) {
        ops.push_back(Op::Wait);
    }
}

pub fn train(host: u64, device: u64, launches: u64, sync_every: u64, seed: u64) -> Program {
    let mut random = Random::new(seed);
    let mut count = 0;
    Box::new(move |_, ops| {
        for _ in 0..launches {
            ops.push_back(Op::Kernel {
                host: noisy(&mut random, host / launches, NOISE),
                len: device / launches,
            });
        }
        end_step(&mut count, sync_every, ops);
    })
}

/// Kernels one after the other, without ever waiting.
pub fn stream(len: u64, host: u64) -> Program {
    Box::new(move |_, ops| ops.extend([Op::Kernel { host, len }, Op::Step]))
}

pub fn sync_each(len: u64, host: u64, seed: u64) -> Program {
    let mut random = Random::new(seed);
    Box::new(move |_, ops| {
        let host = noisy(&mut random, host, NOISE);
        ops.extend([Op::Kernel { host, len }, Op::Wait, Op::Step]);
    })
}

/// Requests at random times, one served after the other; latency counts from arrival.
pub fn service(rate_per_s: f64, kernels: u64, len: u64, host: u64, seed: u64) -> Program {
    let mut random = Random::new(seed);
    let mut arrival = 0;
    Box::new(move |_, ops| {
        arrival += (-(1.0 - random.unit()).ln() * SECOND as f64 / rate_per_s) as u64;
        ops.push_back(Op::Until(arrival));
        for _ in 0..kernels {
            ops.push_back(Op::Kernel {
                host: noisy(&mut random, host, NOISE),
                len: noisy(&mut random, len, NOISE),
            });
        }
        ops.extend([Op::Wait, Op::Answer(arrival), Op::Step]);
    })
}

pub fn burst(sleep: u64, work: u64, len: u64, host: u64, seed: u64) -> Program {
    let mut random = Random::new(seed);
    Box::new(move |_, ops| {
        ops.push_back(Op::Sleep(noisy(&mut random, sleep, 0.05)));
        ops.extend((0..work / len).map(|_| Op::Kernel { host, len }));
        ops.extend([Op::Wait, Op::Step]);
    })
}

/// Loads for a time, then trains for a time.
pub fn phases(load: u64, compute: u64, step: (u64, u64, u64), sync: u64, seed: u64) -> Program {
    let (host, device, launches) = step;
    let mut random = Random::new(seed);
    let (mut until, mut count) = (0, 0);
    Box::new(move |now, ops| {
        if now >= until {
            until = now + load + compute;
            count = 0;
            ops.extend([Op::Wait, Op::Sleep(load)]);
            return;
        }
        for _ in 0..launches {
            ops.push_back(Op::Kernel {
                host: noisy(&mut random, host / launches, NOISE),
                len: device / launches,
            });
        }
        end_step(&mut count, sync, ops);
    })
}

/// Each step copies its input in its only stream, computes, and waits.
pub fn copy_then_train(copy: u64, host: u64, device: u64, launches: u64, seed: u64) -> Program {
    let mut random = Random::new(seed);
    Box::new(move |_, ops| {
        let first = Op::Copy {
            host: 50 * US,
            len: copy,
        };
        ops.push_back(first);
        for _ in 0..launches {
            ops.push_back(Op::Kernel {
                host: noisy(&mut random, host / launches, NOISE),
                len: device / launches,
            });
        }
        ops.extend([Op::Wait, Op::Step]);
    })
}

/// Something outside the device holds up the stream; kernels wait behind it, the host for all.
pub fn stall_in_stream(stall: u64, device: u64, launches: u64) -> Program {
    Box::new(move |_, ops| {
        let first = Op::Stall {
            host: 20 * US,
            len: stall,
        };
        ops.push_back(first);
        let len = device / launches;
        ops.extend((0..launches).map(|_| Op::Kernel { host: 10 * US, len }));
        ops.extend([Op::Wait, Op::Step]);
    })
}

/// Never waits in a call and keeps little in flight, yet fills the device.
pub fn polls_own_queue(below: u64, len: u64, host: u64) -> Program {
    Box::new(move |_, ops| ops.extend([Op::Poll(below), Op::Kernel { host, len }, Op::Step]))
}

/// A program whose job changes its share at these times.
pub fn with_shares(mut inner: Program, mut changes: VecDeque<(u64, f64)>) -> Program {
    Box::new(move |now, ops| {
        if let Some((at, share)) = changes.front().copied()
            && now >= at
        {
            changes.pop_front();
            ops.push_back(Op::Share(share));
        }
        inner(now, ops);
    })
}

/// A GPT of an H100, a job that fills the device, one that waits in every step.
pub fn gpt_h100(seed: u64) -> Program {
    train(17_800 * US, 11 * MS, 600, 5, seed)
}

pub fn filler(seed: u64) -> Program {
    train(5 * MS, 20 * MS, 200, 5, seed)
}

pub fn waits_each_step(seed: u64) -> Program {
    train(6 * MS, 3 * MS, 200, 1, seed)
}

pub fn hog(_seed: u64) -> Program {
    stream(MS, 300 * US)
}
