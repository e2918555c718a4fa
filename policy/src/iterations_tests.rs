use proptest::prelude::*;

use super::*;

const KIND_BITS: u32 = 20;

/// Signature of kernel `kernel` with shape `shape`.
fn launch(kernel: u32, shape: u32) -> u32 {
    (kernel << 12) | shape | 1
}

fn found(sequence: &[u32]) -> Found {
    match find(sequence, KIND_BITS) {
        Sequence::Periodic(found) => found,
        other => panic!("{other:?}"),
    }
}

fn irregular(sequence: &[u32]) {
    let verdict = find(sequence, KIND_BITS);
    assert!(matches!(verdict, Sequence::Irregular { .. }), "{verdict:?}");
}

/// Numbers without a pattern, the same in every run.
struct Noise(crate::cluster::Random);

impl Noise {
    fn new(seed: u64) -> Self {
        Self(crate::cluster::Random::new(seed))
    }

    fn below(&mut self, bound: u32) -> u32 {
        (self.0.next_u64() % u64::from(bound)) as u32
    }
}

#[test]
fn a_plain_loop_is_found_and_its_anchor_comes_once() {
    let body = [1, 2, 2, 3, 2, 4].map(|kernel| launch(kernel, 0));
    let found = found(&body.repeat(40));
    assert_eq!((found.launches, found.shapes), (6, true));
    assert!(found.repeats >= 39 && found.confidence > 0.95, "{found:?}");
    assert_eq!(found.anchor.map(|anchor| anchor.times), Some(1));
}

#[test]
fn the_same_launch_over_and_over_is_an_iteration_of_one() {
    let found = found(&[launch(9, 4); 100]);
    assert_eq!(found.launches, 1);
    assert_eq!(found.anchor.map(|anchor| anchor.times), Some(1));
}

#[test]
fn too_little_says_nothing() {
    assert_eq!(
        find(&[launch(1, 0); MIN_HISTORY - 1], KIND_BITS),
        Sequence::TooShort
    );
    assert_eq!(find(&[], KIND_BITS), Sequence::TooShort);
}

#[test]
fn evaluation_and_logging_do_not_hide_the_iteration() {
    let step: Vec<u32> = (1..=20).map(|kernel| launch(kernel, 0)).collect();
    let evaluation: Vec<u32> = (1..=6).map(|kernel| launch(kernel, 7)).collect();
    let log = [launch(50, 0), launch(51, 0)];
    let mut sequence = Vec::new();
    for iteration in 1..=300 {
        sequence.extend(&step);
        if iteration % 10 == 0 {
            sequence.extend(log);
        }
        if iteration % 25 == 0 {
            sequence.extend(&evaluation);
        }
    }
    let found = found(&sequence);
    assert_eq!(found.launches, 20);
    assert!(found.coverage > 0.97 && found.coverage < 1.0, "{found:?}");
}

#[test]
fn of_nested_loops_the_outer_one_is_the_iteration() {
    // Twelve layers forward, twelve backward, an optimiser.
    let forward: Vec<u32> = (1..=8).map(|kernel| launch(kernel, 0)).collect();
    let backward: Vec<u32> = (11..=26).map(|kernel| launch(kernel, 0)).collect();
    let mut step = forward.repeat(12);
    step.extend(backward.repeat(12));
    step.extend((31..=40).map(|kernel| launch(kernel, 0)));
    let found = found(&step.repeat(10));
    assert_eq!(found.launches, step.len());
    assert_eq!(found.anchor.map(|anchor| anchor.times), Some(1));
}

#[test]
fn a_loop_without_a_launch_of_its_own_is_found_by_groups() {
    let body = [1, 2, 1, 1, 2, 2].map(|kernel| launch(kernel, 0));
    let found = found(&body.repeat(30));
    assert_eq!(found.launches, 6);
    assert_eq!(found.anchor.map(|anchor| anchor.times), Some(3));
}

#[test]
fn a_smaller_last_batch_is_still_an_iteration() {
    let step = |shape: u32| (1..=15).map(move |kernel| launch(kernel, shape));
    let mut sequence = Vec::new();
    for iteration in 1..=200 {
        sequence.extend(step(if iteration % 12 == 0 { 4 } else { 8 }));
    }
    let found = found(&sequence);
    assert_eq!((found.launches, found.shapes), (15, false));
}

#[test]
fn warm_up_is_forgotten() {
    let mut noise = Noise::new(7);
    let mut sequence: Vec<u32> = (0..500).map(|_| launch(noise.below(40), 0)).collect();
    let step: Vec<u32> = (1..=30).map(|kernel| launch(kernel, 0)).collect();
    sequence.extend(step.repeat(18));
    let cold = found(&sequence);
    assert_eq!(cold.launches, 30);
    sequence.extend(step.repeat(500));
    let warm = found(&sequence);
    assert_eq!(warm.launches, 30);
    assert!(warm.confidence > cold.confidence);
}

#[test]
fn programs_without_iterations_are_reported_so() {
    let mut noise = Noise::new(3);
    let any: Vec<u32> = (0..6000).map(|_| launch(noise.below(12), 0)).collect();
    irregular(&any);
    // Requests of random length: a prompt, some tokens, a sample.
    let mut requests = Vec::new();
    while requests.len() < 9000 {
        requests.extend((1..=12).map(|kernel| launch(kernel, 0)));
        for _ in 0..2 + noise.below(60) {
            requests.extend((21..=29).map(|kernel| launch(kernel, 0)));
        }
        for _ in 0..noise.below(30) {
            requests.push(launch(40 + noise.below(3), 0));
        }
    }
    irregular(&requests);
    // Long runs of one kernel each.
    let mut runs = Vec::new();
    while runs.len() < HISTORY {
        let kernel = noise.below(6);
        runs.extend(std::iter::repeat_n(
            launch(kernel, 0),
            20 + noise.below(400) as usize,
        ));
    }
    irregular(&runs);
}

#[test]
fn a_long_history_is_cut_and_taken_in_time() {
    let body: Vec<u32> = (0..5000).map(|kernel| launch(kernel, 0)).collect();
    let found = found(&body.repeat(8));
    assert_eq!(found.launches, 5000);
    assert_eq!(found.repeats, 3);
}

/// A body that is no repetition of a shorter one.
fn primitive(body: &[u32]) -> bool {
    (1..body.len()).all(|shift| {
        let turned = body.iter().cycle().skip(shift);
        body.iter().zip(turned).any(|(one, other)| one != other)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn any_primitive_body_is_found_from_any_start(
        body in proptest::collection::vec(0u32..30, 2..80),
        turn in 0usize..80,
        repeats in 30usize..60,
    ) {
        let body: Vec<u32> = body.into_iter().map(|kernel| launch(kernel, 0)).collect();
        prop_assume!(primitive(&body));
        let sequence: Vec<u32> = body.iter().copied().cycle().skip(turn % body.len())
            .take(body.len() * repeats).collect();
        let found = found(&sequence);
        // A shorter one may explain 95 %: a body that is nearly a repetition of it.
        if found.launches != body.len() {
            prop_assert!(found.launches < body.len() && found.coverage < 1.0, "{found:?}");
        } else {
            prop_assert!(found.coverage > 0.97, "{found:?}");
        }
    }

    #[test]
    fn rare_extras_change_nothing(
        length in 12u32..120,
        every in 5usize..40,
        extras in 1u32..5,
        at in 0usize..120,
        repeats in 60usize..120,
    ) {
        let body: Vec<u32> = (1..=length).map(|kernel| launch(kernel, 0)).collect();
        prop_assume!(f64::from(extras) < 0.04 * every as f64 * f64::from(length));
        let mut sequence = Vec::new();
        for iteration in 1..=repeats {
            let start = sequence.len();
            sequence.extend(&body);
            if iteration % every == 0 {
                let at = start + at % body.len();
                sequence.splice(at..at, (0..extras).map(|extra| launch(500 + extra, 0)));
            }
        }
        prop_assert_eq!(found(&sequence).launches, body.len());
    }

    #[test]
    fn whatever_comes_the_grades_are_grades(
        sequence in proptest::collection::vec(prop_oneof![0u32..4, any::<u32>()], 0..3000),
        kind_bits in 0u32..40,
    ) {
        match find(&sequence, kind_bits) {
            Sequence::TooShort => prop_assert!(sequence.len() < MIN_HISTORY),
            Sequence::Irregular { coverage } => prop_assert!((0.0..=1.0).contains(&coverage)),
            Sequence::Periodic(found) => {
                prop_assert!((MIN_COVERAGE..=1.0).contains(&found.coverage));
                prop_assert!(found.confidence > 0.0 && found.confidence < 1.0);
                prop_assert!(found.launches * found.repeats <= sequence.len());
                prop_assert!(found.repeats >= MIN_REPEATS);
            }
        }
    }

    #[test]
    fn random_sequences_are_irregular(seed in any::<u64>(), kernels in 3u32..60, length in 400usize..4000) {
        let mut noise = Noise::new(seed);
        let sequence: Vec<u32> = (0..length).map(|_| launch(noise.below(kernels), 0)).collect();
        let verdict = find(&sequence, KIND_BITS);
        prop_assert!(matches!(verdict, Sequence::Irregular { .. }), "{:?}", verdict);
    }
}

/// Every recording of `tests/data/launches`, with the launches of an iteration of its program.
#[test]
fn recorded_programs_are_judged_as_they_are() {
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/launches");
    let mut judged = 0;
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "u32") {
            continue;
        }
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        let bytes = std::fs::read(&path).unwrap();
        let words = bytes.chunks_exact(4).map(|word| word.try_into().unwrap());
        let signatures: Vec<u32> = words.map(u32::from_le_bytes).collect();
        let expected = match name.as_str() {
            "train_mlp" => Some(15),
            "train_mlp_extra" => Some(16),
            "infer_loop" => Some(6),
            "irregular_random" | "irregular_requests" => None,
            other => panic!("{other} is not known: say here how long its iteration is"),
        };
        match (find(&signatures, KIND_BITS), expected) {
            (Sequence::Periodic(found), Some(launches)) => {
                assert_eq!(found.launches, launches, "{name}");
                assert!(found.confidence > 0.85, "{name}: {found:?}");
            }
            (Sequence::Irregular { .. }, None) => {}
            (verdict, _) => panic!("{name}: {verdict:?}"),
        }
        judged += 1;
    }
    assert_eq!(judged, 5);
}
