//! Decisions for other engines.

use super::*;
use crate::live::placement::{Candidate, DecideRequest, Decided, JobProfile};

const GIB: u64 = 1 << 30;

fn job(kind: &str, share: f64, gib: u64) -> JobProfile {
    JobProfile {
        id: format!("{kind}.1"),
        kind: kind.into(),
        share: Some(share),
        mem_bytes: Some(gib * GIB),
        ..JobProfile::default()
    }
}

fn device(node: &str, uuid: &str, residents: Vec<JobProfile>) -> Candidate {
    Candidate {
        node: node.into(),
        uuid: uuid.into(),
        name: "T4".into(),
        total_bytes: 16 * GIB,
        residents,
        ..Candidate::default()
    }
}

fn hook(packer: Option<&str>) -> (tempfile::TempDir, Hook) {
    let dir = tempfile::tempdir().unwrap();
    let mut config = Config::default();
    config.choice.packer = packer.map(str::to_owned);
    let hook = Hook::open(dir.path(), config, BEGIN_MS).unwrap();
    (dir, hook)
}

fn decide(hook: &Hook, job: JobProfile, candidates: Vec<Candidate>) -> Decided {
    hook.decide_for(&DecideRequest { job, candidates }).unwrap()
}

#[test]
fn an_empty_device_is_chosen_first_and_then_the_one_with_space() {
    let (_dir, hook) = hook(Some("trial"));
    let there = || JobProfile {
        busy: Some(0.4),
        confidence: Some(0.8),
        ..job("other", 0.5, 8)
    };
    let full = job("full", 0.9, 15);
    let asked = JobProfile {
        busy: Some(0.9),
        confidence: Some(1.0),
        ..job("new", 0.5, 6)
    };
    let both = decide(
        &hook,
        asked.clone(),
        vec![
            device("a", "GPU-0", vec![there()]),
            device("b", "GPU-1", Vec::new()),
        ],
    );
    assert_eq!((both.node.as_str(), both.device.as_str()), ("b", "GPU-1"));
    assert_eq!((both.expected_slowdown, both.confidence), (Some(1.0), 1.0));
    assert!(both.reason.contains("alone"), "{}", both.reason);
    let beside = decide(
        &hook,
        asked,
        vec![
            device("a", "GPU-0", vec![full]),
            device("b", "GPU-1", vec![there()]),
        ],
    );
    assert_eq!(
        (beside.node.as_str(), beside.device.as_str()),
        ("b", "GPU-1")
    );
    assert_eq!(
        (beside.share, &*beside.beside),
        (0.5, &["other.1".to_owned()][..])
    );
    // Both are busy for 1.3 of the device in all, and no more is promised than 0.5 of its time.
    assert!(
        (beside.expected_slowdown.unwrap() - 1.3).abs() < 1e-9,
        "{beside:?}"
    );
    assert!((beside.confidence - 0.4).abs() < 1e-9, "{beside:?}");
    assert_eq!(beside.unfit.len(), 1);
    assert!(
        beside.unfit[0].reason.contains("1GiB of 16GiB"),
        "{beside:?}"
    );
}

#[test]
fn a_measured_pair_decides_and_says_so() {
    let (_dir, mut hook) = hook(Some("trial"));
    let mut measured = |kinds: [&str; 2], rates| {
        let kinds = kinds.map(str::to_owned);
        let pair = PairRecord {
            gpu: "T4".into(),
            gpus: 1,
            kinds: kinds.clone(),
            rates,
            unix_ms: 1,
            ..PairRecord::default()
        };
        hook.pairs.insert(("T4".into(), 1, kinds), pair);
    };
    measured(["bad", "new"], [0.4, 0.4]);
    measured(["good", "new"], [0.9, 0.8]);
    let bad = || device("a", "GPU-0", vec![job("bad", 0.5, 4)]);
    let good = || device("b", "GPU-0", vec![job("good", 0.5, 4)]);
    let chosen = decide(&hook, job("new", 0.25, 4), vec![bad(), good()]);
    assert_eq!((chosen.node.as_str(), chosen.confidence), ("b", 0.9));
    assert_eq!(chosen.expected_slowdown, Some(1.25));
    let waits = decide(&hook, job("new", 0.25, 4), vec![bad()]);
    assert_eq!((waits.node.as_str(), waits.expected_slowdown), ("", None));
    assert!(
        waits.reason.contains("takes none of the pairs"),
        "{}",
        waits.reason
    );
    // The other way round: who came first does not matter to the packer.
    let turned = device("a", "GPU-0", vec![job("new", 0.5, 4)]);
    let turned = decide(&hook, job("bad", 0.25, 4), vec![turned]);
    assert_eq!(turned.node, "", "{turned:?}");
}

#[test]
fn beside_several_what_each_costs_adds_up_and_one_nodes_word_is_half_as_sure() {
    let (_dir, mut hook) = hook(Some("trial"));
    let mut measured = |kinds: [&str; 2], rates, unconfirmed| {
        let kinds = kinds.map(str::to_owned);
        let pair = PairRecord {
            gpu: "T4".into(),
            gpus: 1,
            kinds: kinds.clone(),
            rates,
            unconfirmed,
            unix_ms: 1,
            ..PairRecord::default()
        };
        hook.pairs.insert(("T4".into(), 1, kinds), pair);
    };
    measured(["a", "new"], [0.9, 0.8], false);
    measured(["new", "b"], [0.5, 0.9], false);
    measured(["c", "new"], [0.3, 0.3], true);
    let mut several = device("a", "GPU-0", vec![job("a", 0.2, 2), job("b", 0.2, 2)]);
    let found = decide(&hook, job("new", 0.2, 2), vec![several.clone()]);
    // 1 + (1/0.8 - 1) + (1/0.5 - 1).
    assert_eq!(found.node, "a", "{found:?}");
    let slowdown = found.expected_slowdown.unwrap();
    assert!(
        (slowdown - 2.25).abs() < 1e-9 && found.confidence == 0.5,
        "{found:?}"
    );
    // Of one of three nothing is known: by how busy they are.
    several.residents.push(job("d", 0.2, 2));
    let found = decide(&hook, job("new", 0.2, 2), vec![several]);
    assert!(found.reason.contains("how busy"), "{found:?}");
    let one = device("a", "GPU-0", vec![job("c", 0.2, 2)]);
    let found = decide(&hook, job("new", 0.2, 2), vec![one]);
    assert!((found.confidence - 0.45).abs() < 1e-9, "{found:?}");
}

#[test]
fn what_was_metered_of_kinds_counts_for_other_engines_too() {
    let (_dir, mut hook) = hook(Some("util-sum"));
    let metered = |busy| Solo {
        metered: Some(Metered {
            busy,
            ..Metered::default()
        }),
        ..Solo::default()
    };
    for (kind, busy) in [("new", 0.5), ("slow", 0.9)] {
        let key = solo_key("T4", 1, kind);
        hook.solos.insert(key, metered(busy));
    }
    hook.rebuild();
    let there = JobProfile {
        busy: Some(0.4),
        confidence: Some(0.8),
        ..job("other", 0.5, 8)
    };
    let ask = |new| {
        decide(
            &hook,
            job(new, 0.25, 4),
            vec![device("a", "GPU-0", vec![there.clone()])],
        )
    };
    let beside = ask("new");
    assert_eq!((beside.node.as_str(), beside.confidence), ("a", 0.25));
    assert_eq!(
        ask("slow").node,
        "",
        "both together want more than the device"
    );
    assert_eq!(ask("unknown").node, "");
    // Of a job that runs on a candidate, as its engine calls its kind.
    assert_eq!(ask("other").node, "a");
}

#[test]
fn pairs_of_metered_kinds_teach_a_packer_for_other_engines_too() {
    let (_dir, mut hook) = hook(Some("trial"));
    let with = Metered {
        busy: 0.2,
        ..Metered::default()
    };
    for kind in ["a", "b"] {
        let solo = Solo {
            metered: Some(with),
            ..Solo::default()
        };
        let key = solo_key("T4", 1, kind);
        hook.solos.insert(key, solo);
    }
    let pair = PairRecord {
        gpu: "T4".into(),
        gpus: 1,
        kinds: ["a".into(), "b".into()],
        rates: [0.99, 0.98],
        unix_ms: 1,
        ..PairRecord::default()
    };
    hook.pairs
        .insert(("T4".into(), 1, pair.kinds.clone()), pair);
    hook.config.choice.packer = Some("score-tree".into());
    hook.rebuild();
    let there = JobProfile {
        busy: Some(0.2),
        confidence: Some(0.8),
        ..job("a", 0.5, 4)
    };
    let beside = decide(
        &hook,
        job("b", 0.25, 4),
        vec![device("n", "GPU-0", vec![there])],
    );
    assert_eq!(
        (beside.node.as_str(), beside.confidence),
        ("n", 0.9),
        "{beside:?}"
    );
}

#[test]
fn a_report_about_devices_that_are_not_there_is_not_kept() {
    let job = |name: &str, devices: &[&str]| JobStatus {
        name: name.into(),
        devices: devices
            .iter()
            .map(|uuid| control::JobDevice {
                uuid: (*uuid).into(),
                mem_used_bytes: 7,
                ..control::JobDevice::default()
            })
            .collect(),
        ..JobStatus::default()
    };
    let arbiter = ArbiterStatus {
        jobs: vec![
            job("a", &["GPU-0", "GPU-7"]),
            job("no name\n", &["GPU-0"]),
            job("b", &["GPU-9"]),
        ],
        ..ArbiterStatus::default()
    };
    let node = NodeRecord {
        devices: vec![Device {
            uuid: "GPU-0".into(),
            ..Device::default()
        }],
        ..NodeRecord::default()
    };
    let all = crate::live::hook::place::residents(&node, &arbiter);
    assert_eq!(all.keys().collect::<Vec<_>>(), ["GPU-0"]);
    assert_eq!(all["GPU-0"].len(), 1);
}

#[test]
fn a_device_that_reports_a_negative_free_share_has_none() {
    let mut world = World::new(&[1], Some("trial"));
    world.until("the node is heard", 10.0, |world| {
        world.hook().state.gpus() == 1
    });
    for (free, taken) in [(-0.5, false), (f64::NAN, false), (0.5, true)] {
        let waits = WaitMatrix {
            uuid: "GPU-0".into(),
            free_bytes: 16 * GIB,
            free_share: free,
            ..WaitMatrix::default()
        };
        let hook = world.hook();
        hook.nodes.get_mut("n0").unwrap().waits = vec![waits];
        let candidate = Candidate {
            node: "n0".into(),
            uuid: "GPU-0".into(),
            ..Candidate::default()
        };
        let said = decide(hook, job("new", 0.1, 1), vec![candidate]);
        assert_eq!(!said.node.is_empty(), taken, "{free}: {said:?}");
    }
}

#[test]
fn without_a_packer_a_job_waits_for_an_empty_device() {
    let (_dir, hook) = hook(None);
    let carries = device("a", "GPU-0", vec![job("other", 0.5, 4)]);
    let waits = decide(&hook, job("new", 0.25, 4), vec![carries]);
    assert!(
        waits.devices.is_empty() && waits.reason.contains("no packer"),
        "{waits:?}"
    );
}

#[test]
fn several_jobs_of_a_device_count_together() {
    let (_dir, hook) = hook(Some("trial"));
    let jobs = || vec![job("x", 0.25, 4), job("y", 0.5, 4)];
    let three = decide(
        &hook,
        job("new", 0.25, 4),
        vec![device("a", "GPU-0", jobs())],
    );
    assert_eq!(three.beside, ["x.1", "y.1"]);
    // Nothing is known of how busy they are, and a quarter is promised.
    assert_eq!(
        (three.expected_slowdown, three.confidence),
        (Some(3.0), 0.0)
    );
    let more = decide(
        &hook,
        job("new", 0.3, 4),
        vec![device("a", "GPU-0", jobs())],
    );
    assert!(
        more.node.is_empty() && more.reason.contains("0.25 are free"),
        "{more:?}"
    );
    let opportunistic = JobProfile {
        class: Class::Opportunistic,
        ..job("new", 0.3, 4)
    };
    let some = decide(&hook, opportunistic, vec![device("a", "GPU-0", jobs())]);
    assert_eq!(some.node, "a", "no share is promised to it: {some:?}");
}

#[test]
fn several_devices_are_those_of_one_node() {
    let (_dir, hook) = hook(Some("trial"));
    let candidates = || {
        vec![
            device("a", "GPU-0", Vec::new()),
            device("b", "GPU-0", Vec::new()),
            device("b", "GPU-1", Vec::new()),
        ]
    };
    let two = |gpus| JobProfile {
        gpus,
        ..job("new", 1.0, 16)
    };
    let placed = decide(&hook, two(2), candidates());
    assert_eq!(
        (placed.node.as_str(), &*placed.devices),
        ("b", &["GPU-0".to_owned(), "GPU-1".into()][..])
    );
    let waits = decide(&hook, two(3), candidates());
    assert!(
        waits.node.is_empty() && waits.reason.contains("of one node"),
        "{waits:?}"
    );
}

#[test]
fn what_nodes_report_counts_and_what_they_do_not_have_is_out() {
    let mut world = World::new(&[1], Some("trial"));
    world.until("the node is heard", 10.0, |world| {
        world.hook().state.gpus() == 1
    });
    let said = |uuid: &str| Candidate {
        node: "n0".into(),
        uuid: uuid.into(),
        ..Candidate::default()
    };
    let stranger = Candidate {
        node: "elsewhere".into(),
        ..said("GPU-0")
    };
    // The test's nodes report no free memory.
    let placed = decide(
        world.hook(),
        JobProfile::default(),
        vec![said("GPU-7"), stranger, said("gpu-0")],
    );
    assert_eq!(
        (placed.node.as_str(), placed.device.as_str()),
        ("n0", "gpu-0")
    );
    let reasons: Vec<&str> = placed.unfit.iter().map(|one| &*one.reason).collect();
    assert!(reasons[0].contains("no such device") && reasons[1].contains("total_bytes"));
    let asks = decide(world.hook(), job("new", 0.1, 1), vec![said("GPU-0")]);
    assert!(
        asks.node.is_empty() && asks.reason.contains("0B of 16GiB"),
        "{asks:?}"
    );
    // Its arbiter has a job that the engine did not put there.
    let now = world.now();
    let arbiter = ArbiterStatus {
        jobs: vec![JobStatus {
            name: "by-hand".into(),
            devices: vec![control::JobDevice {
                uuid: "GPU-0".into(),
                mem_limit_bytes: Some(10 * GIB),
                ..control::JobDevice::default()
            }],
            ..JobStatus::default()
        }],
        ..ArbiterStatus::default()
    };
    let report = Report {
        instance: "n0-1".into(),
        arbiter: Some(arbiter),
        ..Report::default()
    };
    world.hook().report("n0", report, now).unwrap();
    let beside = decide(world.hook(), job("new", 0.1, 4), vec![said("GPU-0")]);
    assert_eq!(beside.beside, ["by-hand"]);
    let more = decide(world.hook(), job("new", 0.1, 7), vec![said("GPU-0")]);
    assert!(more.reason.contains("6GiB of 16GiB"), "{more:?}");
    world.nodes[0].silent = true;
    world.until("the node is silent", 60.0, |world| {
        let entry = world.hook().nodes.values().next();
        entry.is_some_and(|entry| !entry.up)
    });
    let silent = decide(world.hook(), job("new", 0.1, 4), vec![said("GPU-0")]);
    assert!(silent.reason.contains("silent"), "{silent:?}");
}

#[test]
fn a_job_that_is_called_like_a_kind_is_not_taken_for_one_of_that_kind() {
    let mut world = World::new(&[1, 1], Some("util-sum"));
    world.until("the nodes are heard", 10.0, |world| {
        world.hook().state.gpus() == 2
    });
    let there = JobProfile {
        busy: Some(0.4),
        confidence: Some(0.8),
        ..job("other", 0.5, 8)
    };
    let metered = |name: &str| JobStatus {
        name: name.into(),
        devices: vec![control::JobDevice {
            uuid: "GPU-0".into(),
            mem_limit_bytes: Some(GIB),
            ..control::JobDevice::default()
        }],
        profile: Some(Box::new(control::Profile {
            busy_fraction: 0.1,
            confidence: 0.9,
            ..control::Profile::default()
        })),
        ..JobStatus::default()
    };
    let report = |world: &mut World, node: usize| {
        let arbiter = ArbiterStatus {
            jobs: vec![metered("resnet")],
            ..ArbiterStatus::default()
        };
        let report = Report {
            instance: format!("n{node}-1"),
            arbiter: Some(arbiter),
            ..Report::default()
        };
        let now = world.now();
        world
            .hook()
            .report(&format!("n{node}"), report, now)
            .unwrap();
    };
    let elsewhere = device("elsewhere", "GPU-9", vec![there]);
    let own = Candidate {
        node: "n0".into(),
        uuid: "GPU-0".into(),
        ..Candidate::default()
    };
    let ask = |world: &mut World, id: &str, candidates: &[&Candidate]| {
        let asked = JobProfile {
            id: id.into(),
            ..job("resnet", 0.25, 4)
        };
        let candidates = candidates.iter().copied().cloned();
        decide(world.hook(), asked, candidates.collect())
    };
    report(&mut world, 0);
    let other = ask(&mut world, "slurm.9", &[&elsewhere, &own]);
    assert_eq!(other.node, "", "somebody's job that is called `resnet`");
    // The job itself, by its name on the node; not where two nodes have one of that name.
    let itself = ask(&mut world, "resnet", &[&elsewhere]);
    assert_eq!(itself.node, "elsewhere", "{itself:?}");
    report(&mut world, 1);
    let either = ask(&mut world, "resnet", &[&elsewhere]);
    assert_eq!(either.node, "", "which of the two is meant?");
}

#[test]
fn questions_that_cannot_be_meant_are_refused_with_their_value() {
    let (_dir, hook) = hook(Some("trial"));
    let wrong = |change: &dyn Fn(&mut DecideRequest)| {
        let mut asked = DecideRequest {
            job: job("new", 0.5, 4),
            candidates: vec![device("a", "GPU-0", vec![job("there", 0.5, 4)])],
        };
        change(&mut asked);
        hook.decide_for(&asked).unwrap_err().to_string()
    };
    assert!(wrong(&|asked| asked.candidates.clear()).contains("no candidates"));
    assert!(wrong(&|asked| asked.job.share = Some(1.5)).contains("1.5"));
    assert!(wrong(&|asked| asked.job.share = Some(f64::NAN)).contains("NaN"));
    assert!(wrong(&|asked| asked.job.gpus = 65).contains("65"));
    assert!(wrong(&|asked| asked.job.mem_bytes = Some(0)).contains("quota"));
    assert!(wrong(&|asked| asked.job.weight = Some(0.0)).contains("weight"));
    assert!(wrong(&|asked| asked.job.kind = "x".repeat(513)).contains("513"));
    assert!(wrong(&|asked| asked.candidates[0].node = "a b".into()).contains("`a b`"));
    assert!(wrong(&|asked| asked.candidates[0].uuid.clear()).contains("no UUID"));
    assert!(wrong(&|asked| asked.candidates[0].residents[0].busy = Some(-1.0)).contains("-1"));
    assert!(wrong(&|asked| asked.candidates[0].free_share = Some(2.0)).contains("free share"));
    let twice = wrong(&|asked| asked.candidates.push(device("a", "gpu-0", Vec::new())));
    assert!(twice.contains("twice"), "{twice}");
    let many = wrong(&|asked| {
        let on = |at| device("a", &format!("GPU-{at}"), Vec::new());
        asked.candidates = (0..65).map(on).collect();
    });
    assert!(many.contains("more than 64"), "{many}");
}

#[test]
fn a_policy_that_would_stop_a_running_job_for_it_makes_it_wait() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = Config::default();
    config.choice.order = Some("srtf".into());
    config.choice.packer = None;
    let hook = Hook::open(dir.path(), config, BEGIN_MS).unwrap();
    let short = JobProfile {
        work_s: Some(1.0),
        ..job("new", 0.5, 4)
    };
    let carries = device("a", "GPU-0", vec![job("other", 0.5, 4)]);
    let waits = decide(&hook, short, vec![carries]);
    assert!(waits.node.is_empty(), "{waits:?}");
}
