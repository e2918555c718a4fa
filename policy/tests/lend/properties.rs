//! Random mixes: what must hold whatever the jobs, their shares and the hardware are.

use proptest::prelude::*;

use crate::device::{Hardware, MS, US};
use crate::governor::Governor;
use crate::invariants::{charge_error, check, watch};
use crate::measure::{run, solo_runs};
use crate::programs::{burst, service, stall_in_stream, stream, sync_each, train};
use crate::scenarios::{Mix, MixJob};

/// A program by its numbers, so that a failure can be read.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Train {
        host: u64,
        device: u64,
        launches: u64,
        sync: u64,
    },
    Stream {
        len: u64,
        host: u64,
    },
    SyncEach {
        len: u64,
        host: u64,
    },
    Service {
        rate: u64,
        kernels: u64,
    },
    Burst {
        sleep: u64,
        work: u64,
    },
}

fn job(kind: Kind, share: u64) -> MixJob {
    MixJob::new(share as f64, move |seed| match kind {
        Kind::Train {
            host,
            device,
            launches,
            sync,
        } => train(host * MS, device * MS, launches, sync, seed),
        Kind::Stream { len, host } => stream(len * US, host * US),
        Kind::SyncEach { len, host } => sync_each(len * US, host * US, seed),
        Kind::Service { rate, kernels } => service(rate as f64, kernels, 100 * US, 25 * US, seed),
        Kind::Burst { sleep, work } => burst(sleep * MS, work * MS, 200 * US, 20 * US, seed),
    })
}

fn training() -> impl Strategy<Value = Kind> {
    (4..20_u64, 2..20_u64, 100..600_u64, 0..6_u64).prop_map(|(host, device, launches, sync)| {
        Kind::Train {
            host,
            device,
            launches,
            sync,
        }
    })
}

fn busy_training() -> impl Strategy<Value = Kind> {
    (4..12_u64, 10..20_u64, 100..600_u64, 3..6_u64).prop_map(|(host, device, launches, sync)| {
        Kind::Train {
            host,
            device,
            launches,
            sync,
        }
    })
}

fn kernels() -> impl Strategy<Value = Kind> {
    (100..1500_u64, 10..300_u64).prop_map(|(len, host)| Kind::Stream { len, host })
}

fn any_kind() -> impl Strategy<Value = Kind> {
    prop_oneof![
        training(),
        kernels(),
        (50..800_u64, 10..100_u64).prop_map(|(len, host)| Kind::SyncEach { len, host }),
        (5..40_u64, 10..80_u64).prop_map(|(rate, kernels)| Kind::Service { rate, kernels }),
        (1..40_u64, 1..30_u64).prop_map(|(sleep, work)| Kind::Burst { sleep, work }),
    ]
}

fn hardware() -> impl Strategy<Value = Hardware> {
    (100..300_u64, prop_oneof![Just(0), Just(375)]).prop_map(|(turn, mark)| Hardware {
        turn_ns: turn * US,
        mark_ns: mark * US,
        ..Hardware::default()
    })
}

fn mix_of(jobs: &[(Kind, u64)], hardware: Hardware) -> Mix {
    Mix {
        hardware,
        ..Mix::new(
            jobs.iter()
                .map(|(kind, share)| job(*kind, *share))
                .collect(),
        )
    }
}

/// Mixes a test plays. `PROPTEST_CASES` is for the long run.
fn cases(least: u32) -> ProptestConfig {
    let said = std::env::var("PROPTEST_CASES").ok();
    let said = said.and_then(|text| text.parse().ok());
    ProptestConfig::with_cases(said.unwrap_or(least))
}

proptest! {
    #![proptest_config(cases(32))]

    #[test]
    fn decisions_are_bounded_and_charges_add_up(
        jobs in prop::collection::vec((any_kind(), 1..10_u64), 2..6),
        hardware in hardware(),
        jittery in any::<bool>(),
    ) {
        let mut mix = mix_of(&jobs, hardware);
        mix.jitter = jittery.then_some((0.1, 5 * MS));
        let (sim, seen) = watch(&mix, 1);
        check(&format!("{jobs:?}"), &sim, &seen);
    }

    /// Of jobs that leave no gaps together. Where each launch finds an idle device, a turn is not
    /// seen, and harms nobody.
    #[test]
    fn charges_of_trainings_are_within_three_percent(
        jobs in prop::collection::vec((busy_training(), 1..10_u64), 2..5),
    ) {
        let (sim, seen) = watch(&mix_of(&jobs, Hardware::default()), 1);
        let error = charge_error(&sim, &seen);
        prop_assert!(error.abs() < 0.03, "{error}");
    }

    /// Kernels are below 2 ms. A turn for each kernel of a job that waits after each is more than
    /// any rule can give back; such jobs are in the test above.
    #[test]
    fn nobody_is_below_its_share(
        jobs in prop::collection::vec((prop_oneof![training(), kernels()], 1..5_u64), 2..5),
    ) {
        let mix = mix_of(&jobs, Hardware::default());
        let solo = solo_runs(&mix, 2);
        let of = run(&mix, &mut Governor::rule(), &solo, 2);
        let worst = of.margin.iter().copied().fold(f64::INFINITY, f64::min);
        prop_assert!(worst > -MARGIN_POINTS, "{worst} points: {of:?}");
    }

    #[test]
    fn a_stalled_process_holds_up_nobody(stall in 20..1000_u64, fills in any::<bool>()) {
        let neighbour = if fills {
            Kind::Stream { len: 500, host: 50 }
        } else {
            Kind::Train { host: 18, device: 11, launches: 600, sync: 5 }
        };
        let stalled = MixJob::new(1.0, move |_| stall_in_stream(stall * MS, 2 * MS, 20));
        let mix = Mix::new(vec![stalled, job(neighbour, 1)]);
        let solo = solo_runs(&mix, 2);
        let plain = run(&mix, &mut Governor::Open { cap: None }, &solo, 2);
        let of = run(&mix, &mut Governor::rule(), &solo, 2);
        prop_assert!(of.speed[1] > 0.85 * plain.speed[1], "{} of {}", of.speed[1], plain.speed[1]);
    }
}

/// What the worst second of a job may be below its share, in points.
const MARGIN_POINTS: f64 = 5.0;
