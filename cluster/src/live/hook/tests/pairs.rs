//! Pairs that were measured elsewhere, and kinds.

use super::*;
use crate::live::wire::{FedPair, Feed};

fn pair(kinds: [&str; 2], rates: [f64; 2]) -> FedPair {
    FedPair {
        gpu: "T4".into(),
        gpus: 1,
        kinds: kinds.map(str::to_owned),
        rates,
    }
}

fn feed(world: &mut World, pairs: Vec<FedPair>) -> Result<crate::live::wire::Fed, ControlError> {
    let now = world.now();
    let fed = world.hook().feed(Feed { pairs }, now);
    world.hook().commit().unwrap();
    fed
}

#[test]
fn a_pair_that_was_fed_as_bad_is_never_tried_and_a_kill_keeps_that() {
    let mut world = World::new(&[1], Some("trial"));
    let fed = feed(
        &mut world,
        vec![
            pair(["job 0.3", "job 0.4"], [0.5, 0.5]),
            pair(["job 0.3", "job 0.2"], [1.7, 0.98]),
        ],
    );
    let fed = fed.unwrap();
    assert_eq!((fed.taken, fed.pairs), (2, 2));
    world.kill();
    let pairs = world.hook().status().pairs;
    assert_eq!(pairs.len(), 2, "{pairs:?}");
    let good = pairs.iter().find(|pair| !pair.refused).unwrap();
    assert_eq!(good.rates, [1.0, 0.98], "nobody is faster than solo");
    // By themselves they would have been put together for a trial, and kept.
    let a = world.submit("job 0.3 40 f", false);
    world.until("it runs", 60.0, |world| world.phase(a) == JobPhase::Running);
    let b = world.submit("job 0.4 10 f", false);
    for _ in 0..20 {
        world.tick();
    }
    assert_eq!(world.phase(b), JobPhase::Waiting);
    let c = world.submit("job 0.2 10 f", false);
    world.until("the good pair", 60.0, |world| {
        world.phase(c) == JobPhase::Running
    });
    world.until("all are over", 400.0, World::over);
}

#[test]
fn what_is_fed_later_counts_in_both_orders() {
    let mut world = World::new(&[1], Some("trial"));
    feed(&mut world, vec![pair(["a", "b"], [0.9, 0.8])]).unwrap();
    let fed = feed(&mut world, vec![pair(["b", "a"], [0.1, 0.2])]).unwrap();
    assert_eq!((fed.taken, fed.pairs), (1, 2));
    let pairs = world.hook().status().pairs;
    for pair in &pairs {
        let of = |kind: &str| pair.rates[usize::from(pair.kinds[1] == kind)];
        assert_eq!((of("a"), of("b")), (0.2, 0.1), "{pairs:?}");
        assert!(pair.refused);
    }
    let log = world.hook().decisions(0);
    assert_eq!(log.iter().filter(|line| line.kind == "fed").count(), 2);
}

#[test]
fn one_bad_pair_and_nothing_is_taken() {
    let mut world = World::new(&[1], None);
    let good = || pair(["a", "b"], [0.9, 0.8]);
    let with = |change: &dyn Fn(&mut FedPair)| {
        let mut bad = good();
        change(&mut bad);
        vec![good(), bad]
    };
    for (pairs, words) in [
        (Vec::new(), "0 pairs"),
        (vec![good(); 4097], "4097"),
        (with(&|pair| pair.gpu.clear()), "type of GPU"),
        (with(&|pair| pair.kinds[1] = "x\ny".into()), "x\\ny"),
        (with(&|pair| pair.kinds[0] = "k".repeat(513)), "kind"),
        (with(&|pair| pair.rates[0] = -0.1), "-0.1"),
        (with(&|pair| pair.rates[1] = f64::NAN), "NaN"),
        (with(&|pair| pair.gpus = 65), "65 GPUs"),
    ] {
        let error = feed(&mut world, pairs).unwrap_err();
        assert!(error.to_string().contains(words), "{words}: {error}");
        assert!(world.hook().status().pairs.is_empty());
    }
}

#[test]
fn the_table_takes_no_more_than_is_kept() {
    let mut world = World::new(&[1], Some("trial"));
    let many = (0..MEASURED_KEPT).map(|at| pair(["a", &format!("b{at}")], [0.9, 0.9]));
    feed(&mut world, many.collect()).unwrap();
    let error = feed(&mut world, vec![pair(["c", "d"], [0.9, 0.9])]).unwrap_err();
    assert!(error.to_string().contains("4097 pairs"), "{error}");
    // Of those that are there newer figures are taken.
    let fed = feed(&mut world, vec![pair(["a", "b0"], [0.5, 0.5])]).unwrap();
    assert_eq!(fed.pairs, 4096);
}

#[test]
fn types_of_gpu_that_nothing_is_kept_of_are_forgotten() {
    let mut world = World::new(&[1], Some("trial"));
    world.until("the node is heard", 10.0, |world| {
        world.hook().state.gpus() == 1
    });
    for at in 0..10 {
        world.hook().gpu_types.number(&format!("gone {at}"));
    }
    world.hook().rebuild();
    assert_eq!(world.hook().gpu_types.0, ["T4"]);
}

#[test]
fn a_kind_s_variables_are_named_and_their_values_kept() {
    let mut world = World::new(&[1], None);
    let now = world.now();
    let asked = Submission {
        command: vec!["train".into()],
        kind: "k".into(),
        env: [("API_KEY".to_owned(), "secret".to_owned())].into(),
        ..Submission::default()
    };
    world.hook().submit(asked, now).unwrap();
    let kinds = world.hook().kinds();
    assert_eq!(kinds[0].variables, ["API_KEY"]);
    let said = serde_json::to_string(&kinds).unwrap();
    assert!(!said.contains("secret"), "{said}");
}

#[test]
fn an_answer_about_kinds_has_a_bound() {
    let mut world = World::new(&[1], None);
    for at in 10..30 {
        let now = world.now();
        let asked = Submission {
            command: vec!["train".into(), "x".repeat(250 << 10)],
            kind: format!("k{at}"),
            ..Submission::default()
        };
        world.hook().submit(asked, now).unwrap();
    }
    let kinds = world.hook().kinds();
    let names: Vec<&str> = kinds.iter().map(|kind| &kind.kind[..]).collect();
    // The newest.
    assert_eq!((names[0], names.len()), ("k14", 16));
}

#[test]
fn a_kind_is_known_by_what_was_submitted_last() {
    let mut world = World::new(&[1], None);
    world.submit("job 0.3 5 f", false);
    world.submit("job 0.3 6 f", false);
    world.submit("job 0.4 7 f", false);
    let kinds = world.hook().kinds();
    let names: Vec<&str> = kinds.iter().map(|kind| &kind.kind[..]).collect();
    assert_eq!(names, ["job 0.3", "job 0.4"]);
    assert_eq!(kinds[0].command[2], "6");
    assert_eq!(kinds[0].gpus, 1);
}

/// A node that lies about pairs, and two that do not: the liar is heard first, and alone.
fn with_a_liar(lie: f64, jobs: [&str; 2]) -> World {
    let mut world = World::new(&[1, 1, 1], Some("trial"));
    world.nodes[0].lies_of_pairs = lie;
    for node in &mut world.nodes[1..] {
        node.silent = true;
    }
    for job in jobs {
        world.submit(job, false);
    }
    world.until("the liar has spoken", 60.0, |world| {
        world.kinds().contains(&"measured".to_owned())
    });
    world
}

/// What is known of a pair of two kinds, once all three nodes have measured it.
fn of_all_nodes(world: &mut World, kinds: [&str; 2]) -> Option<crate::live::wire::PairView> {
    let pairs = world.hook().status().pairs;
    let both = |own: &[String; 2]| kinds.iter().all(|kind| own.iter().any(|one| one == kind));
    pairs
        .into_iter()
        .find(|pair| pair.nodes == 3 && both(&pair.kinds))
}

#[test]
fn a_node_that_calls_a_good_pair_bad_keeps_it_from_itself_alone() {
    let mut world = with_a_liar(0.02, ["job 0.3 60", "job 0.4 60"]);
    let pair = world.hook().status().pairs[0].clone();
    assert!(pair.refused && pair.nodes == 1, "the only node: {pair:?}");
    world.nodes.iter_mut().for_each(|node| node.silent = false);
    // More than there are GPUs, so that pairs are made wherever they may be.
    for _ in 0..4 {
        world.submit("job 0.3 150", false);
        world.submit("job 0.4 150", false);
    }
    let kinds = ["job 0.3", "job 0.4"];
    world.until("the others have measured it", 400.0, |world| {
        of_all_nodes(world, kinds).is_some()
    });
    let pair = of_all_nodes(&mut world, kinds).unwrap();
    assert!(!pair.refused && pair.nodes == 3, "{pair:?}");
    assert!(pair.rates.iter().all(|rate| *rate > 0.9), "{pair:?}");
    assert_eq!(pair.outliers, ["n0"]);
    let log = world.hook().decisions(0);
    let said = log
        .iter()
        .filter(|line| line.text.contains("counts on n0 alone"));
    assert!(said.count() <= 1, "once in ten minutes");
    // What it said of itself holds there, also after a crash.
    let barred = |world: &mut World| world.hook().shared.facts().barred.len();
    assert!(barred(&mut world) > 0);
    world.kill();
    world.until("all nodes are back", 10.0, |world| {
        world.nodes.iter().all(|node| node.known)
    });
    assert!(barred(&mut world) > 0);
    let pair = of_all_nodes(&mut world, kinds).unwrap();
    assert!(!pair.refused);
    world.until("all are over", 2_000.0, World::over);
    // Each pair of kinds was split there once: three of them.
    let unpacks = world.hook().status().unpacks;
    assert!(unpacks <= 3, "no pair is made on n0 again: {unpacks}");
}

#[test]
fn a_node_that_calls_a_bad_pair_good_is_outvoted_where_two_others_measure_it() {
    let mut world = with_a_liar(50.0, ["job 1 60", "job 1.2 60"]);
    let pair = world.hook().status().pairs[0].clone();
    assert!(
        !pair.refused && pair.rates.iter().all(|rate| *rate > 0.9),
        "{pair:?}"
    );
    world.nodes.iter_mut().for_each(|node| node.silent = false);
    for _ in 0..4 {
        world.submit("job 1 120", false);
        world.submit("job 1.2 120", false);
    }
    let kinds = ["job 1", "job 1.2"];
    world.until("the others have measured it", 600.0, |world| {
        of_all_nodes(world, kinds).is_some()
    });
    let pair = of_all_nodes(&mut world, kinds).unwrap();
    assert!(
        pair.refused && pair.rates.iter().all(|rate| *rate < 0.7),
        "{pair:?}"
    );
    assert_eq!(pair.outliers, ["n0"]);
    world.until("all are over", 3_000.0, World::over);
}

#[test]
fn a_hundred_nodes_leave_eight_claims_of_a_pair_and_years_leave_none() {
    let mut world = World::new(&[1], Some("trial"));
    world.until("the node is heard", 10.0, |world| {
        world.hook().state.gpus() == 1
    });
    let claim = |world: &mut World, node: &str| {
        let measured = PairRecord {
            gpu: "T4".into(),
            gpus: 1,
            kinds: ["a".into(), "b".into()],
            rates: [0.9, 0.9],
            ..PairRecord::default()
        };
        let now = world.now();
        world.hook().advance(now);
        world.hook().claim(node, measured);
    };
    for at in 0..100 {
        claim(&mut world, &format!("n{at}"));
    }
    let record = world.hook().pairs.values().next().unwrap().clone();
    assert_eq!((world.hook().pairs.len(), record.claims.len()), (1, 8));
    world.s += 181.0 * 86_400.0;
    let now = world.now();
    world.hook().advance(now);
    world.hook().forget_pairs();
    assert!(world.hook().pairs.is_empty());
    world.hook().commit().unwrap();
    world.kill();
    assert!(world.hook().pairs.is_empty(), "and in the state");
}

/// Before, it counted as one that gets GPUs of its own, and other nodes stayed empty.
#[test]
fn a_joiner_that_cannot_move_waits_for_its_own_gpu_and_disturbs_nobody() {
    let mut world = World::new(&[1, 1], Some("trial"));
    world.nodes[1].silent = true;
    world.submit("job 1 100", false);
    let bound = world.submit("job 1 100", false);
    world.until("they are split", 60.0, |world| {
        world.hook().status().unpacks == 1
    });
    world.nodes[1].silent = false;
    for _ in 0..3 {
        world.submit("job 0.3 200", false);
    }
    world.until("the others run", 30.0, |world| {
        world
            .hook()
            .jobs
            .values()
            .filter(|job| job.run.is_some())
            .count()
            >= 4
    });
    let words = |world: &mut World| {
        let kinds = world.kinds();
        kinds
            .iter()
            .filter(|kind| *kind == "suspend" || *kind == "resume")
            .count()
    };
    let before = words(&mut world);
    for _ in 0..60 {
        world.tick();
    }
    assert!(
        words(&mut world) <= before + 2,
        "{:#?}",
        world.hook().decisions(0)
    );
    world.until("all are over", 2_000.0, World::over);
    assert_eq!(world.hook().job(bound).unwrap().attempts, 1);
}
