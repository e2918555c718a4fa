//! More mixes than `scenarios.json` has: attacks that once broke the rule, and odd hardware.

use policy::Class;

use crate::device::{MS, Program, US};
use crate::programs::{
    burst, copy_then_train, filler, gpt_h100, hog, phases, polls_own_queue, recorded, service,
    stall_in_stream, stream, sync_each, train, waits_each_step, with_shares,
};
use crate::scenarios::{Mix, MixJob};

fn mix(jobs: Vec<MixJob>) -> Mix {
    Mix::new(jobs)
}

fn job(share: f64, program: impl Fn(u64) -> Program + 'static) -> MixJob {
    MixJob::new(share, program)
}

fn cnn(share: f64) -> MixJob {
    job(share, |seed| recorded("pytorch_cnn.slr", 5, seed))
}

fn kernels(share: f64, len: u64) -> MixJob {
    job(share, move |_| stream(len, 300 * US))
}

fn requests(share: f64) -> MixJob {
    job(share, |seed| service(20.0, 40, 100 * US, 25 * US, seed))
}

fn long_requests(share: f64) -> MixJob {
    job(share, |seed| service(10.0, 200, 100 * US, 25 * US, seed))
}

fn latency(of: MixJob) -> MixJob {
    MixJob {
        latency: true,
        ..of
    }
}

fn opportunistic(of: MixJob) -> MixJob {
    MixJob {
        class: Class::Opportunistic,
        ..of
    }
}

fn at_most(share_max: f64, of: MixJob) -> MixJob {
    MixJob {
        share_max: Some(share_max),
        ..of
    }
}

/// The program, and a second process that stalls for 50 ms in each of its steps.
fn with_a_stalled_process(of: MixJob) -> MixJob {
    let mut of = of;
    of.programs
        .push(Box::new(|_| stall_in_stream(50 * MS, MS, 10)));
    of
}

/// Each with its name.
pub fn all() -> Vec<(&'static str, Mix)> {
    let half = 0.5;
    let mut lingers = mix(vec![job(half, waits_each_step), job(half, hog)]);
    lingers.hardware.linger_ns = 2 * MS;
    let mut coarse = mix(vec![job(half, waits_each_step), job(half, hog)]);
    coarse.hardware.mark_ns = 375 * US;
    let mut no_preemption = mix(vec![kernels(half, 50 * MS), cnn(half)]);
    no_preemption.hardware.chunk_ns = None;
    let mut dear_turns = mix(vec![job(half, waits_each_step), job(half, hog)]);
    dear_turns.hardware.turn_ns = 400 * US;
    vec![
        (
            "service not declared + G1",
            mix(vec![requests(half), job(half, gpt_h100)]),
        ),
        (
            "long service not declared + SAT",
            mix(vec![long_requests(half), job(half, filler)]),
        ),
        (
            "service not declared + HOG",
            mix(vec![requests(half), job(half, hog)]),
        ),
        (
            "service not declared + HOG200us",
            mix(vec![
                requests(half),
                job(half, |_| stream(200 * US, 20 * US)),
            ]),
        ),
        (
            "latency service + HOG",
            mix(vec![latency(requests(half)), job(half, hog)]),
        ),
        (
            "latency service + 5ms",
            mix(vec![latency(requests(half)), kernels(half, 5 * MS)]),
        ),
        (
            "burst 40/20 + SYN 1/4:3/4",
            mix(vec![
                job(0.25, |seed| {
                    burst(40 * MS, 20 * MS, 200 * US, 20 * US, seed)
                }),
                job(0.75, waits_each_step),
            ]),
        ),
        (
            "burst 2/2 + SYN 1/4:3/4",
            mix(vec![
                job(0.25, |seed| burst(2 * MS, 2 * MS, 200 * US, 20 * US, seed)),
                job(0.75, waits_each_step),
            ]),
        ),
        (
            "phases .5/.5 s + G1 + CNN",
            mix(vec![
                job(half, |seed| {
                    phases(500 * MS, 500 * MS, (5 * MS, 20 * MS, 200), 5, seed)
                }),
                job(half, gpt_h100),
                cnn(half),
            ]),
        ),
        (
            "5ms kernels + SYN 1/4:3/4",
            mix(vec![kernels(0.25, 5 * MS), job(0.75, waits_each_step)]),
        ),
        (
            "5ms kernels + SYN .05:.95",
            mix(vec![kernels(0.05, 5 * MS), job(0.95, waits_each_step)]),
        ),
        (
            "50ms kernels + CNN 1/4:3/4",
            mix(vec![kernels(0.25, 50 * MS), cnn(0.75)]),
        ),
        (
            "500ms kernels + SYN 1/4:3/4",
            mix(vec![kernels(0.25, 500 * MS), job(0.75, waits_each_step)]),
        ),
        ("50ms kernels, no preemption + CNN", no_preemption),
        ("HOG + HOG 1/2", mix(vec![job(half, hog), job(half, hog)])),
        (
            "HOG + SAT 1/2",
            mix(vec![job(half, hog), job(half, filler)]),
        ),
        (
            "SYN + HOG .95:.05",
            mix(vec![job(0.95, waits_each_step), job(0.05, hog)]),
        ),
        (
            "sync each 100us + SAT",
            mix(vec![
                job(half, |seed| sync_each(100 * US, 20 * US, seed)),
                job(half, filler),
            ]),
        ),
        (
            "tiny kernels + G1",
            mix(vec![
                job(half, |seed| train(4 * MS, 5 * MS, 1000, 5, seed)),
                job(half, gpt_h100),
            ]),
        ),
        (
            "G1 with a stalled process + G1",
            mix(vec![
                with_a_stalled_process(job(half, gpt_h100)),
                job(half, gpt_h100),
            ]),
        ),
        (
            "SAT with a stalled process + SAT",
            mix(vec![
                with_a_stalled_process(job(half, filler)),
                job(half, filler),
            ]),
        ),
        (
            "stall 5ms + G1",
            mix(vec![
                job(half, |_| stall_in_stream(5 * MS, 2 * MS, 20)),
                job(half, gpt_h100),
            ]),
        ),
        (
            "stall 15ms + SAT",
            mix(vec![
                job(half, |_| stall_in_stream(15 * MS, 2 * MS, 20)),
                job(half, filler),
            ]),
        ),
        (
            "copies 5ms + G1",
            mix(vec![
                job(half, |seed| {
                    copy_then_train(5 * MS, 2 * MS, 6 * MS, 100, seed)
                }),
                job(half, gpt_h100),
            ]),
        ),
        (
            "small queue + CNN 1/4:3/4",
            mix(vec![
                job(0.25, |_| polls_own_queue(1200 * US, 200 * US, 10 * US)),
                cnn(0.75),
            ]),
        ),
        (
            "shares change, SAT + SAT",
            mix(vec![
                job(0.2, |seed| {
                    let changes = [(2_000 * MS, 0.8), (4_000 * MS, 0.2)].into();
                    with_shares(filler(seed), changes)
                }),
                job(0.2, filler),
            ]),
        ),
        (
            "G1 + opportunistic HOG",
            mix(vec![job(half, gpt_h100), opportunistic(job(half, hog))]),
        ),
        (
            "SYN + opportunistic SAT",
            mix(vec![
                job(half, waits_each_step),
                opportunistic(job(half, filler)),
            ]),
        ),
        (
            "SAT + opportunistic SAT",
            mix(vec![job(half, filler), opportunistic(job(half, filler))]),
        ),
        (
            "G1 + HOG with share_max 0.3",
            mix(vec![job(half, gpt_h100), at_most(0.3, job(half, hog))]),
        ),
        ("linger 2 ms SYN + HOG", lingers),
        ("marks of 375 us SYN + HOG", coarse),
        ("turns of 400 us SYN + HOG", dear_turns),
        ("3 GPT", mix((0..3).map(|_| job(half, gpt_h100)).collect())),
        (
            "CNN + G1 + SYN + HOG",
            mix(vec![
                cnn(half),
                job(half, gpt_h100),
                job(half, waits_each_step),
                job(half, hog),
            ]),
        ),
    ]
}
