//! HeteroG (CoNEXT'20): a plan over GPUs of three types against the same part of the batch on each.
//!
//! *Models.* Every kind of job that Gavel measured on one V100, P100 and K80, as one group with the
//! bytes of its parameters; and VGG-16 in four groups, whose operations and parameters are counted
//! from its layers (3 x 3 convolutions at 224 x 224, batch 32) and whose times are theirs at the
//! speed that Gavel measured for ResNet-50's operations. GPUs: two of each type, 10 Gbit/s each.

use std::path::Path;

use cluster::trace::{Options, read_isolated};
use policy::cluster::planner::{Group, Plan, Pool, Sum};
use policy::cluster::{GpuType, Random};

use super::Limit::{AtLeast, AtMost, Reported};
use super::{System, mean, row};

pub const SYSTEM: System = System {
    name: "heterog",
    rows: &[
        row("heterog_least_gain_over_even", "ratio", AtLeast(1.0), "-"),
        row(
            "heterog_mean_gain_over_even",
            "ratio",
            Reported,
            "up to 3.22x (222 % faster) over existing schemes",
        ),
        row("heterog_mean_gain_by_parts_alone", "ratio", Reported, "-"),
        row("heterog_vgg16_gain_over_even", "ratio", Reported, "-"),
        row("heterog_vgg16_above_brute_force_pct", "%", AtMost(5.0), "-"),
        row("heterog_vgg16_above_free_parts_pct", "%", AtMost(5.0), "-"),
        row(
            "heterog_vgg16_gain_over_best_single_type",
            "ratio",
            AtLeast(1.0),
            "-",
        ),
    ],
    quick: true,
    run: figures,
};

const TYPES: [&str; 3] = ["v100", "p100", "k80"];
const BATCH: f64 = 32.0;
/// Multiplications and additions of ResNet-50 for one image, forward.
const RESNET50: f64 = 4.1e9;

/// Parameters of the models that Gavel measured, in millions, as published with each.
fn parameters(job: &str) -> f64 {
    let known = [
        ("ResNet-18", 11.7),
        ("ResNet-50", 25.6),
        ("Transformer", 61.4),
        ("LM", 28.9),
        ("Recommendation", 9.0),
        ("A3C", 1.0),
        ("CycleGAN", 28.3),
    ];
    let of = known.iter().find(|(name, _)| job.starts_with(name));
    1e6 * of
        .map(|(_, millions)| *millions)
        .expect("a model that is known")
}

/// Four groups of VGG-16: operations and parameters for one image.
fn vgg16() -> [(f64, f64, f64); 4] {
    // Channels in and out, and the side of what comes out.
    let convolution = |(from, to, side): (f64, f64, f64)| {
        let weights = 9.0 * from * to;
        (weights * side * side, weights + to)
    };
    let sum = |layers: &[(f64, f64, f64)], out: f64| {
        let of = layers.iter().map(|layer| convolution(*layer));
        let (operations, weights) = of.fold((0.0, 0.0), |a, b| (a.0 + b.0, a.1 + b.1));
        (operations, weights, out)
    };
    let classifier = [(25_088.0, 4096.0), (4096.0, 4096.0), (4096.0, 1000.0)];
    let dense: f64 = classifier.iter().map(|(a, b)| a * b + b).sum();
    [
        sum(
            &[
                (3.0, 64.0, 224.0),
                (64.0, 64.0, 224.0),
                (64.0, 128.0, 112.0),
                (128.0, 128.0, 112.0),
            ],
            128.0 * 56.0 * 56.0,
        ),
        sum(
            &[
                (128.0, 256.0, 56.0),
                (256.0, 256.0, 56.0),
                (256.0, 256.0, 56.0),
            ],
            256.0 * 28.0 * 28.0,
        ),
        sum(
            &[
                (256.0, 512.0, 28.0),
                (512.0, 512.0, 28.0),
                (512.0, 512.0, 28.0),
                (512.0, 512.0, 14.0),
                (512.0, 512.0, 14.0),
                (512.0, 512.0, 14.0),
            ],
            512.0 * 7.0 * 7.0,
        ),
        (dense, dense, 1000.0),
    ]
}

/// Every assignment of one of these to each group, tried.
fn brute(pool: &Pool, groups: &[Group]) -> f64 {
    // A group by itself on every number of GPUs: what the plans of single groups in smaller pools
    // say.
    let mut some = Vec::new();
    for a in 0..=pool.gpus[0] {
        for b in 0..=pool.gpus[1] {
            for c in 0..=pool.gpus[2] {
                if a + b + c > 0 {
                    some.push(vec![a, b, c]);
                }
            }
        }
    }
    let place = |group: &Group, gpus: &Vec<u32>| {
        let smaller = Pool {
            gpus: gpus.clone(),
            ..pool.clone()
        };
        let mut plan = smaller.proportionally(std::slice::from_ref(group));
        plan.places.remove(0)
    };
    let places: Vec<Vec<_>> = (groups.iter())
        .map(|group| some.iter().map(|gpus| place(group, gpus)).collect())
        .collect();
    let mut least = f64::INFINITY;
    let count = some.len();
    for code in 0..count.pow(groups.len() as u32) {
        let mut rest = code;
        let chosen: Vec<_> = (places.iter())
            .map(|of| {
                let one = of[rest % count].clone();
                rest /= count;
                one
            })
            .collect();
        least = least.min(pool.seconds(groups, &chosen));
    }
    least
}

/// The least time that a seeded climb finds where every GPU type of every group may have any part
/// of the batch, from the plan on: plans that the planner does not look at.
fn climb(pool: &Pool, groups: &[Group], plan: &Plan) -> f64 {
    let mut random = Random::new(1);
    let mut places = plan.places.clone();
    let mut least = pool.seconds(groups, &places);
    for _ in 0..200_000 {
        let mut other = places.clone();
        let at = random.below(groups.len());
        let place = &mut other[at];
        let kind = random.below(place.gpus.len());
        if random.unit() < 0.2 {
            place.gpus[kind] = random.below(pool.gpus[kind] as usize + 1) as u32;
        }
        place.parts[kind] = (place.parts[kind] * (0.8 + 0.4 * random.unit())).max(1e-3);
        if random.unit() < 0.1 {
            place.sum = match place.sum {
                Sum::Ring => Sum::Server,
                Sum::Server => Sum::Ring,
            };
        }
        for kind in 0..place.gpus.len() {
            if place.gpus[kind] == 0 {
                place.parts[kind] = 0.0;
            } else if place.parts[kind] == 0.0 {
                place.parts[kind] = 0.1;
            }
        }
        let held = place.parts.iter().zip(&place.gpus);
        let all: f64 = held.map(|(part, n)| part * f64::from(*n)).sum();
        if all <= 0.0 {
            continue;
        }
        place.parts.iter_mut().for_each(|part| *part /= all);
        let seconds = pool.seconds(groups, &other);
        if seconds < least {
            (least, places) = (seconds, other);
        }
    }
    least
}

fn figures(data: &Path) -> Vec<f64> {
    let pool = Pool {
        gpus: vec![2, 2, 2],
        bytes_per_s: 1.25e9,
        latency_s: 50e-6,
    };
    let options = Options {
        gpu_types: TYPES.map(str::to_owned).to_vec(),
        ..Options::default()
    };
    let table = read_isolated(&data.join("gavel/isolated_throughput.csv"), &options);
    let table = table.expect("Gavel's table");
    let speed = |kind: u16, job: &str| {
        let speed = table
            .get(&(GpuType(kind), job.to_owned(), 1))
            .map(|speed| speed.steps_per_s);
        speed.filter(|speed| *speed > 0.0)
    };
    let mut jobs: Vec<&String> = table.keys().map(|(_, job, _)| job).collect();
    jobs.sort_unstable();
    jobs.dedup();
    let (mut gains, mut by_parts) = (Vec::new(), Vec::new());
    for job in jobs {
        let seconds: Option<Vec<f64>> = (0..3)
            .map(|kind| speed(kind, job).map(|speed| 1.0 / speed))
            .collect();
        let Some(seconds) = seconds else { continue };
        let group = [Group {
            seconds,
            parameter_bytes: 4.0 * parameters(job),
            activation_bytes: 0.0,
        }];
        let even = pool.evenly(&group).seconds;
        gains.push(even / pool.plan(&group).expect("a plan").seconds);
        by_parts.push(even / pool.proportionally(&group).seconds);
    }
    let resnet = "ResNet-50 (batch size 32)";
    let groups: Vec<Group> = vgg16()
        .iter()
        .map(|(operations, weights, out)| {
            let time = |kind| operations / RESNET50 / speed(kind, resnet).expect("measured");
            Group {
                seconds: (0..3).map(time).collect(),
                parameter_bytes: 4.0 * weights,
                activation_bytes: 4.0 * BATCH * out,
            }
        })
        .collect();
    let plan = pool.plan(&groups).expect("a plan");
    let single = (0..3).map(|kind| pool.on_type(kind, &groups).expect("a plan").seconds);
    vec![
        gains.iter().copied().fold(f64::INFINITY, f64::min),
        mean(gains),
        mean(by_parts),
        pool.evenly(&groups).seconds / plan.seconds,
        100.0 * (plan.seconds / brute(&pool, &groups) - 1.0),
        100.0 * (plan.seconds / climb(&pool, &groups, &plan) - 1.0),
        single.fold(f64::INFINITY, f64::min) / plan.seconds,
    ]
}
