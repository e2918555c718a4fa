use serde_json::{Value, json};

use super::*;
use crate::live::wire::{AwayJob, Device, OtherJob, WaitMatrix};

const NODES: &str = "\
NodeName=n1 Arch=x86_64 CoresPerSocket=8 State=MIXED Gres=gpu:g0:1(S:0),gpu:g1:1(S:0),shard:32 Partitions=main,long
NodeName=n2 Arch=x86_64 State=IDLE+CLOUD Gres=gpu:g0:1,gpu:g1:1,shard:g0:16,shard:g1:16 Partitions=main
NodeName=n3 State=DOWN* Gres=gpu:g0:1,shard:16 Partitions=main
NodeName=n4 State=IDLE+DRAIN Gres=gpu:g0:1,shard:16 Partitions=main
NodeName=n5 State=IDLE* Gres=gpu:g0:1,shard:16 Partitions=main
NodeName=n6 State=IDLE Gres=(null) Partitions=main
NodeName=n7 State=IDLE+MAINT+RESERVED Gres=gpu:g0:1,shard:16 Partitions=main
NodeName=n8 State=MIXED+POWERING_DOWN Gres=gpu:g0:1,shard:16 Partitions=main
NodeName=n9 State=DOWN Gres=gpu:g0:1,shard:16 Partitions=main Reason=State=IDLE [root]
NodeName=n10 State=MIXED+PLANNED Gres=gpu:2,gpu:g9:1,shard:g9:4 Partitions=other";

fn pending(id: u64, priority: u64, comment: &str) -> Value {
    json!({
        "job_id": id, "job_state": "PENDING", "priority": priority, "name": "held",
        "partition": "main", "admin_comment": comment, "gres_detail": [], "nodes": "",
    })
}

fn running(id: u64, nodes: &str, gres: &[&str]) -> Value {
    json!({
        "job_id": id, "job_state": "RUNNING", "priority": 9, "name": "train",
        "partition": "main", "nodes": nodes, "gres_detail": gres,
    })
}

fn with(mut job: Value, key: &str, value: Value) -> Value {
    job[key] = value;
    job
}

fn read(all: &[Value]) -> Vec<QueuedJob> {
    jobs(&json!({ "jobs": all, "errors": [] }).to_string()).expect("a queue")
}

fn held(id: u64) -> Value {
    pending(id, 0, "sublet:hold,mem=6G,share=0.25,class=,shards=6")
}

fn shown(jobs: &[QueuedJob]) -> Vec<(u64, Phase, u64)> {
    jobs.iter()
        .map(|job| (job.id, job.phase, job.shards))
        .collect()
}

fn asked(job: &QueuedJob, all: &[QueuedJob]) -> Vec<(String, String, usize)> {
    let places = Places::of(gpus(NODES), all, &[], SHARD_BYTES);
    let (request, behind) = places.question(job);
    assert_eq!(request.candidates.len(), behind.len());
    request
        .candidates
        .into_iter()
        .map(|one| (one.node, one.uuid, one.residents.len()))
        .collect()
}

fn on(node: &str, kind: &str, jobs: usize) -> (String, String, usize) {
    (node.into(), kind.into(), jobs)
}

#[test]
fn gpus_of_nodes_that_take_jobs() {
    let all = gpus(NODES);
    let shown: Vec<_> = all
        .iter()
        .map(|g| (g.node.as_str(), g.kind.as_str(), g.index, g.shards))
        .collect();
    assert_eq!(
        shown,
        [
            ("n1", "g0", 0, 16),
            ("n1", "g1", 1, 16),
            ("n2", "g0", 0, 16),
            ("n2", "g1", 1, 16),
            ("n10", "g9", 2, 4),
        ]
    );
    assert_eq!(all[0].partitions, ["main", "long"]);
}

#[test]
fn jobs_that_count_and_the_one_that_is_asked_about() {
    let all = read(&[
        running(3, "n1", &["shard:g0:8(IDX:0)"]),
        held(4),
        pending(5, 7, "sublet:at=n2/g1,shards=12"),
        pending(10, 0, "sublet:place,at=n9/g1,shards=1"),
        // Its user holds it, and it takes no place as long.
        pending(11, 0, "sublet:at=n9/g1,shards=6"),
        with(
            pending(12, 7, "sublet:at=n9/g1,shards=6"),
            "state_reason",
            json!("Dependency"),
        ),
        pending(6, 0, ""),
        running(7, "n1", &[]),
        running(8, "n[1-2]", &["shard:2(IDX:0)", "shard:g1:3(0/16,3/16)"]),
        with(
            running(9, "n1", &["shard:6(IDX:0)"]),
            "job_state",
            json!("COMPLETED"),
        ),
        running(13, "n2", &["gpu:g0:0(IDX:),gpu:g1:1(IDX:1)"]),
    ]);
    assert_eq!(
        shown(&all),
        [
            (3, Phase::Running, 8),
            (4, Phase::Held, 6),
            (5, Phase::Released, 12),
            (10, Phase::Decided, 1),
            (8, Phase::Running, 5),
            (13, Phase::Running, u64::MAX),
        ]
    );
    let taken = |node: &str, at, shards| Taken {
        node: node.into(),
        at,
        shards,
    };
    assert_eq!(all[0].taken, [taken("n1", At::Index(0), 8)]);
    assert_eq!(all[2].taken, [taken("n2", At::Kind("g1".into()), 12)]);
    assert_eq!(
        all[4].taken,
        [taken("n1", At::Index(0), 2), taken("n2", At::Index(1), 3)]
    );
    let profile = all[1].profile(SHARD_BYTES);
    assert_eq!(
        (profile.id.as_str(), profile.kind.as_str()),
        ("slurm.4", "held")
    );
    assert_eq!(
        (profile.mem_bytes, profile.share),
        (Some(6 << 30), Some(0.25))
    );
    assert_eq!(profile.class, Class::Guaranteed);
    let percent = read(&[pending(1, 0, "sublet:hold,mem=,share=50%,class=,shards=2")]);
    assert_eq!(percent[0].profile(SHARD_BYTES).share, Some(0.5));
}

/// What a user writes as he likes forges no other job, and nothing of his own.
#[test]
fn a_user_s_text_is_no_word_of_slurm_s() {
    let forged = "x JobId=77 AdminComment=sublet:place,at=n1/g0 JobState=RUNNING \
                  GRES=shard:g0:99(IDX:0)\nJobId=78 JobState=PENDING Priority=0 \
                  AdminComment=sublet:hold,shards=1\", \"job_id\": 79, \"x\": \"";
    let mut job = held(4);
    for key in [
        "name",
        "comment",
        "command",
        "current_working_directory",
        "standard_output",
    ] {
        job[key] = json!(forged);
    }
    let all = read(&[job]);
    assert_eq!(shown(&all), [(4, Phase::Held, 6)]);
    let profile = all[0].profile(SHARD_BYTES);
    assert_eq!(profile.id, "slurm.4");
    assert!(!profile.kind.contains(char::is_control));
    let long = read(&[with(held(4), "name", json!("ä".repeat(1000)))]);
    assert_eq!(long[0].profile(SHARD_BYTES).kind.len(), 512);
    // What packed text would show of such a job counts for nothing where a line is looked at again.
    assert!(!still_held("77 RUNNING 0 N/A", 77));
}

#[test]
fn counts_near_the_greatest_number_do_not_overflow() {
    let most = u64::MAX.to_string();
    let gres = format!("shard:{most}(IDX:0)");
    let all = read(&[
        running(1, "n1", &[&gres]),
        running(2, "n1", &[&gres]),
        pending(3, 1, &format!("sublet:at=n1/g0,shards={most}")),
        pending(
            4,
            0,
            &format!("sublet:hold,mem=,share=,class=,shards={most}"),
        ),
        held(5),
    ]);
    assert_eq!(all.len(), 5);
    assert_eq!(asked(&all[3], &all), []);
    assert_eq!(
        asked(&all[4], &all),
        [on("n1", "g1", 0), on("n2", "g0", 0), on("n2", "g1", 0)]
    );
}

#[test]
fn a_question_has_the_gpus_with_enough_shards_and_their_jobs() {
    let all = read(&[
        running(3, "n1", &["shard:g0:8(IDX:0)"]),
        held(4),
        pending(5, 7, "sublet:at=n2/g1,shards=12"),
        running(8, "n2", &["shard:2(IDX:0)"]),
    ]);
    let nodes = [NodeView {
        name: "n2".into(),
        devices: vec![Device {
            uuid: "GPU-a".into(),
            name: "T4".into(),
            ..Device::default()
        }],
        ..NodeView::default()
    }];
    let mut places = Places::of(gpus(NODES), &all, &nodes, SHARD_BYTES);
    let (request, behind) = places.question(&all[1]);
    let shown: Vec<_> = request
        .candidates
        .iter()
        .map(|one| (one.node.as_str(), one.uuid.as_str(), one.residents.len()))
        .collect();
    // The second GPU of n2 has 4 shards left.
    assert_eq!(
        shown,
        [("n1", "g0", 1), ("n1", "g1", 0), ("n2", "GPU-a", 1)]
    );
    let decided = Decided {
        node: "n2".into(),
        device: "GPU-a".into(),
        expected_slowdown: Some(1.25),
        confidence: 0.9,
        ..Decided::default()
    };
    let (gpu, mut job) = (behind[2].clone(), all[1].clone());
    let words = update(&job, &gpu, &decided);
    assert_eq!(
        words,
        [
            "JobId=4",
            "ReqNodeList=n2",
            "Gres=shard:g0:6",
            "AdminComment=sublet:place,at=n2/g0,device=GPU-a,slowdown=1.25,confidence=0.90,mem=6G,share=0.25,shards=6"
        ]
    );
    updated(&mut job, &gpu, &words);
    assert_eq!(job.phase, Phase::Decided);
    assert_eq!(
        settled(&job).expect("words")[1],
        "AdminComment=sublet:at=n2/g0,device=GPU-a,slowdown=1.25,confidence=0.90,mem=6G,share=0.25,shards=6"
    );
    assert_eq!(settled(&all[1]), None);
    // The next one is asked about with this one there.
    places.put(&job);
    let (request, _) = places.question(&all[1]);
    assert_eq!(request.candidates[2].residents.len(), 2);
    // What was written is read again, before and after the release.
    let after = settled(&job).unwrap()[1].clone();
    for (comment, priority, phase) in [(&words[3], 0, Phase::Decided), (&after, 5, Phase::Released)]
    {
        let comment = comment.strip_prefix("AdminComment=").unwrap();
        let again = read(&[pending(4, priority, comment)]);
        assert_eq!((again[0].phase, &again[0].taken), (phase, &job.taken));
    }
}

#[test]
fn a_job_is_asked_about_where_it_may_run() {
    let only = |key: &str, value: &str| {
        let all = read(&[with(held(4), key, json!(value))]);
        asked(&all[0], &all)
    };
    let n1 = [on("n1", "g0", 0), on("n1", "g1", 0)];
    assert_eq!(only("required_nodes", "n1"), n1);
    assert_eq!(only("excluded_nodes", "n[2-9]"), n1);
    assert_eq!(only("partition", "long"), n1);
    assert_eq!(only("partition", "long,main").len(), 4);
    assert_eq!(only("partition", "none"), []);
    for (key, value) in [
        ("features", json!("n1|n2")),
        ("array_job_id", json!(4)),
        (
            "array_job_id",
            json!({ "set": true, "infinite": false, "number": 4 }),
        ),
        ("resv_name", json!("mine")),
        ("excluded_nodes", json!("n[1-9]r[1-9]")),
    ] {
        let all = read(&[with(held(4), key, value)]);
        assert!(all[0].for_slurm.is_some(), "{key}");
    }
    assert_eq!(read(&[held(4)])[0].for_slurm, None);
}

#[test]
fn a_job_that_is_no_longer_held_without_shards_is_left_alone() {
    let line = |state: &str, priority: &str, gres: &str| {
        format!("{:<24}{state:<24}{priority:<24}{gres:<256}\n", 4)
    };
    assert!(still_held(&line("PENDING", "0", "N/A"), 4));
    assert!(still_held(&line("PENDING", "0", ""), 4));
    for (state, priority, gres) in [
        ("PENDING", "7", "N/A"),
        ("RUNNING", "0", "N/A"),
        ("PENDING", "0", "gres:shard:g0:6"),
        ("PENDING", "0", "gres/shard 4"),
    ] {
        assert!(
            !still_held(&line(state, priority, gres), 4),
            "{state} {priority} {gres}"
        );
    }
    assert!(!still_held(&line("PENDING", "0", "N/A"), 5));
    assert!(!still_held("", 4));
}

#[test]
fn a_newer_slurm_s_queue_is_read_as_well() {
    let mut job = held(4);
    job["job_state"] = json!(["PENDING"]);
    job["priority"] = json!({ "set": true, "infinite": false, "number": 0 });
    let mut other = running(3, "n1", &["shard:g0:8(8/16,0/16)"]);
    other["job_state"] = json!(["RUNNING"]);
    other["array_job_id"] = json!({ "set": true, "infinite": false, "number": 0 });
    other["name"] = Value::Null;
    assert_eq!(
        shown(&read(&[job, other])),
        [(4, Phase::Held, 6), (3, Phase::Running, 8)]
    );
}

#[test]
fn a_job_without_a_place_says_which_nodes_are_away() {
    let mut job = read(&[held(4)]).remove(0);
    let away = away(NODES);
    let named: Vec<&str> = away.iter().map(|one| one.node.as_str()).collect();
    assert_eq!(named, ["n3", "n4", "n5", "n7", "n8", "n9"]);
    let all = job.without_place(&away);
    assert_eq!(
        all,
        "no GPU has 6 free shards; n3 is DOWN*; n4 is IDLE+DRAIN; n5 is IDLE*; n7 is IDLE+MAINT+RESERVED"
    );
    job.excluded = vec!["n3".into(), "n4".into(), "n5".into(), "n7".into()];
    let some = job.without_place(&away);
    assert!(
        some.ends_with("shards; n8 is MIXED+POWERING_DOWN; n9 is DOWN"),
        "{some}"
    );
    job.partitions = vec!["long".into()];
    assert_eq!(job.without_place(&away), "no GPU has 6 free shards");
}

#[test]
fn why_a_job_waits_is_written_once() {
    let mut job = read(&[held(4)]).remove(0);
    let words = waits(&job, "no space, yet").unwrap();
    assert_eq!(
        words[1],
        "AdminComment=sublet:hold,mem=6G,share=0.25,class=,shards=6,waits=no_space__yet"
    );
    job.comment = words[1]
        .strip_prefix("AdminComment=sublet:")
        .unwrap()
        .to_owned();
    assert_eq!(waits(&job, "no space, yet"), None);
    assert!(waits(&job, "another").unwrap()[1].ends_with("shards=6,waits=another"));
}

#[test]
fn what_is_no_queue_and_no_node_is_left_out() {
    for text in ["", "slurm_load_jobs error", "[]", "{\"jobs\": 3}"] {
        assert!(jobs(text).is_err(), "{text}");
        assert_eq!(gpus(text), [], "{text}");
    }
    let none = read(&[
        json!({}),
        json!({ "job_id": "x", "job_state": 7, "priority": null }),
        pending(1, 0, "sublet:hold,shards=-1"),
        pending(2, 0, "sublet:hold,mem=,shards=0"),
        pending(3, 0, "hold,shards=1"),
        pending(4, 7, "sublet:at=n1,shards=1"),
        running(5, "n[1", &["shard:2(IDX:0)"]),
        running(6, "n1", &["shard:x(IDX:0)", ":::", "shard:1(IDX:"]),
    ]);
    assert_eq!(shown(&none), []);
    let huge =
        "NodeName=n State=IDLE Gres=gpu:g0:1,gpu:9999999999999999999,shard:99999999999999999999";
    assert_eq!(gpus(huge)[0].shards, 0);
}

const NOW_S: u64 = 1_000_000;

/// A job that the packer has placed, and that runs.
fn placed(id: u64, started_s: u64, comment: &str) -> Value {
    json!({
        "job_id": id, "job_state": ["RUNNING"], "priority": 9, "name": "train", "partition": "main",
        "nodes": "n1", "gres_detail": ["shard:g0:4(4/16,0/16)"], "requeue": true,
        "start_time": { "set": true, "infinite": false, "number": started_s },
        "admin_comment": comment,
    })
}

const AT: &str = "sublet:at=n1/g0,device=GPU-a,slowdown=1.00,confidence=0.00,mem=3G,shards=4";

fn limits() -> Limits {
    Limits {
        slowdown: 1.5,
        sustained: std::time::Duration::from_secs(30),
        within_s: 600,
        most: 2,
        suspends: false,
    }
}

fn measures(figures: &[(u64, f64, f64)]) -> Vec<NodeView> {
    let others = figures.iter().map(|(id, slowdown, confidence)| OtherJob {
        name: format!("slurm.{id}"),
        slowdown: *slowdown,
        confidence: *confidence,
    });
    vec![NodeView {
        name: "n1".into(),
        up: true,
        others: others.collect(),
        ..NodeView::default()
    }]
}

fn troubles(all: &[Value], nodes: &[NodeView]) -> Vec<(u64, u64, u64)> {
    let all = read(all);
    let places = Places::of(gpus(NODES), &all, nodes, SHARD_BYTES);
    let found = places.troubles(nodes, &limits(), NOW_S);
    found
        .iter()
        .map(|one| (one.slow, one.goes, one.beside))
        .collect()
}

#[test]
fn the_job_that_came_last_goes_where_another_is_too_slow() {
    let first = placed(5, NOW_S - 500, AT);
    let last = placed(3, NOW_S - 100, AT);
    let both = [first.clone(), last.clone()];
    let slow = measures(&[(5, 2.0, 0.9), (3, 1.2, 0.9)]);
    assert_eq!(troubles(&both, &slow), [(5, 3, 5)]);
    // It is itself the slow one, or the slower one.
    let itself = measures(&[(5, 1.6, 0.9), (3, 3.0, 0.9)]);
    assert_eq!(troubles(&both, &itself), [(3, 3, 5)]);
    let none: [(&str, Vec<NodeView>); 4] = [
        (
            "inside the limit",
            measures(&[(5, 1.5, 1.0), (3, 1.0, 1.0)]),
        ),
        ("hardly known", measures(&[(5, 9.0, 0.4)])),
        ("of other jobs", measures(&[(6, 9.0, 1.0)])),
        ("of a silent node", {
            let mut nodes = slow.clone();
            nodes[0].up = false;
            nodes
        }),
    ];
    for (what, nodes) in none {
        assert_eq!(troubles(&both, &nodes), [], "{what}");
    }
    assert_eq!(
        troubles(std::slice::from_ref(&last), &measures(&[(3, 9.0, 1.0)])),
        []
    );
    // Ones that may not be moved, and ones that have run for long or were moved often.
    for (what, other) in [
        (
            "its user lets it not",
            with(last.clone(), "requeue", json!(false)),
        ),
        ("of an array", with(last.clone(), "array_job_id", json!(3))),
        (
            "ends",
            with(last.clone(), "job_state", json!(["RUNNING", "COMPLETING"])),
        ),
        (
            "Slurm's own",
            with(last.clone(), "admin_comment", json!("")),
        ),
        ("long there", placed(3, NOW_S - 601, AT)),
        (
            "moved twice",
            placed(3, NOW_S - 100, &AT.replace("mem=", "requeued=2,mem=")),
        ),
    ] {
        let first = placed(5, NOW_S - 900, AT);
        assert_eq!(troubles(&[first, other], &slow), [], "{what}");
    }
    let elsewhere = with(last, "gres_detail", json!(["shard:g0:4(0/16,4/16)"]));
    assert_eq!(troubles(&[first, elsewhere], &slow), [], "on another GPU");
}

#[test]
fn a_slowdown_counts_once_it_has_lasted() {
    use std::time::{Duration, Instant};
    let jobs = read(&[placed(5, NOW_S - 500, AT), placed(3, NOW_S - 100, AT)]);
    let trouble = |beside| Trouble {
        slow: beside,
        slowdown: 2.0,
        goes: 3,
        beside,
    };
    let mut watch = Watch::default();
    let start = Instant::now();
    let at = |watch: &mut Watch, s: u64, troubles: &[Trouble]| {
        let now = start + Duration::from_secs(s);
        watch
            .step(troubles.to_vec(), &jobs, limits().sustained, now)
            .len()
    };
    for (s, troubles, lasting) in [
        (0, &[trouble(5)][..], 0),
        (29, &[trouble(5)], 0),
        (31, &[trouble(5)], 1),
        // A look without it, and it begins anew; another neighbour is another trouble.
        (32, &[], 0),
        (33, &[trouble(5)], 0),
        (70, &[trouble(6)], 0),
        (71, &[trouble(5)], 0),
        // Long apart in time, but seen twice only.
        (200, &[trouble(5)], 0),
        (201, &[trouble(5)], 1),
    ] {
        assert_eq!(at(&mut watch, s, troubles), lasting, "{s}");
    }
    watch.refuse(3);
    assert_eq!(at(&mut watch, 202, &[trouble(5)]), 0, "Slurm says no");
}

#[test]
fn a_requeued_job_waits_longer_each_time_and_comes_back_beside_none_of_before() {
    let trouble = Trouble {
        slow: 5,
        slowdown: 2.314,
        goes: 3,
        beside: 5,
    };
    let comment = |words: &[String]| words.last().unwrap().replacen("AdminComment=", "", 1);
    let mut job = read(&[placed(3, NOW_S - 100, AT)]).remove(0);
    assert!(!job.is_marked());
    let marked = comment(&mark(&job, &trouble));
    assert!(
        marked.starts_with("sublet:requeue,at=n1/g0,")
            && marked.ends_with(",beside=5,slow=5,slower=2.31"),
        "{marked}"
    );
    // The packer was ended before Slurm was asked: as before.
    let running = read(&[placed(3, NOW_S - 100, &marked)]).remove(0);
    assert!(running.is_marked());
    assert_eq!(comment(&unmark(&running)), AT);
    let ending = with(
        placed(3, 0, &marked),
        "job_state",
        json!(["RUNNING", "COMPLETING"]),
    );
    assert!(!read(&[ending])[0].is_marked());
    // Its user has released it meanwhile: it goes where it was.
    let released = read(&[pending(3, 9, &marked)]).remove(0);
    assert_eq!((released.phase, released.shards), (Phase::Released, 4));
    let mut pauses = Vec::new();
    let mut marked = marked;
    for neighbour in [5, 6, 7, 8, 9, 10, 11, 12, 13] {
        let back = read(&[pending(3, 0, &marked)]).remove(0);
        assert_eq!((back.phase, back.taken.len()), (Phase::Returning, 0));
        let words = clear(&back, NOW_S);
        assert_eq!(words[..3], ["JobId=3", "ReqNodeList=", "Gres="]);
        let held = comment(&words);
        job = read(&[pending(3, 0, &held)]).remove(0);
        assert_eq!((job.phase, job.shards), (Phase::Held, 4), "{held}");
        assert!(
            job.apart().contains(&neighbour) && job.apart().len() <= 8,
            "{held}"
        );
        let pause = (0..10_000).find(|s| !job.is_paused(NOW_S + s)).unwrap();
        pauses.push(pause);
        let profile = job.profile(SHARD_BYTES);
        assert_eq!(profile.mem_bytes, Some(3 << 30));
        // Placed again, it still has its history, and is marked with the next one.
        let gpu = gpus(NODES).remove(1);
        let words = update(&job, &gpu, &Decided::default());
        assert_eq!(words.last().unwrap(), "StartTime=now");
        let at = words[3]
            .replacen("AdminComment=", "", 1)
            .replace("place,", "");
        let again = read(&[placed(3, NOW_S, &at)]).remove(0);
        assert_eq!(again.requeued(), job.requeued());
        marked = comment(&mark(
            &again,
            &Trouble {
                beside: neighbour + 1,
                ..trouble.clone()
            },
        ));
    }
    assert_eq!(pauses, [60, 120, 240, 480, 960, 1920, 3600, 3600, 3600]);
    assert!(!job.is_paused(0), "no requeue has set such a time");
    // Not beside them, and the reason says so.
    let job = read(&[pending(
        3,
        0,
        "sublet:hold,mem=3G,share=,class=,requeued=1,apart=5+6,after=1,shards=4",
    )])
    .remove(0);
    let there = read(&[
        placed(5, NOW_S - 500, AT),
        placed(7, NOW_S - 500, &AT.replace("g0", "g1")),
    ]);
    assert_eq!(
        asked(&job, &there),
        [on("n1", "g1", 0), on("n2", "g0", 0), on("n2", "g1", 0)]
    );
    assert!(
        job.without_place(&[]).contains("away from the jobs"),
        "{}",
        job.without_place(&[])
    );
}

#[test]
fn what_is_free_is_written_into_extra_beside_what_others_have_there() {
    let jobs = read(&[
        running(3, "n1", &["shard:g0:8(IDX:0)"]),
        placed(4, NOW_S, &AT.replace("mem=", "share=0.9,mem=")),
        running(5, "n2", &["gpu:g1:1(IDX:1)"]),
    ]);
    let mut nodes = vec![NodeView {
        name: "n2".into(),
        up: true,
        devices: vec![Device {
            uuid: "GPU-a".into(),
            ..Device::default()
        }],
        waits: vec![WaitMatrix {
            uuid: "GPU-a".into(),
            free_share: 0.55,
            free_bytes: (9 << 30) + 5,
            ..WaitMatrix::default()
        }],
        ..NodeView::default()
    }];
    let shown = |extra: [&str; 3]| {
        let mut lines = NODES.lines().map(str::to_owned).collect::<Vec<_>>();
        for (line, extra) in lines.iter_mut().zip(extra) {
            line.push_str(extra);
        }
        lines.join("\n")
    };
    let extra = |shown: &str, nodes: &[NodeView]| {
        let places = Places::of(gpus(shown), &jobs, nodes, SHARD_BYTES);
        places.extra(shown, nodes)
    };
    let n1 = r#"{"g0_gpumem_free":4,"g0_gpushare_free":0.1,"g1_gpumem_free":16,"g1_gpushare_free":1.0,"gpumem_free":16,"gpushare_free":1.0}"#;
    let n2 = r#"{"g0_gpumem_free":9,"g0_gpushare_free":0.55,"g1_gpumem_free":0,"g1_gpushare_free":0.0,"gpumem_free":9,"gpushare_free":0.55}"#;
    let all = extra(NODES, &nodes);
    let words =
        |node: &str, extra: &str| vec![format!("NodeName={node}"), format!("Extra={extra}")];
    assert_eq!(all[..2], [words("n1", n1), words("n2", n2)]);
    assert_eq!(all.len(), 3, "n10 has one of a kind: {all:?}");
    // Once it is there, nothing is written, and what is somebody else's stays.
    let known = shown([
        &format!(" Extra={n1} Weight=1"),
        &format!(" Extra={n2}"),
        "",
    ]);
    assert_eq!(extra(&known, &nodes).len(), 1);
    let site = shown([
        r#" Extra={"rack":7,"g9_gpumem_free":3}"#,
        " Extra=in rack 7",
        "",
    ]);
    let found = extra(&site, &nodes);
    let with_rack = n1.replace(
        "\"gpushare_free\":1.0}",
        "\"gpushare_free\":1.0,\"rack\":7}",
    );
    assert_eq!(found[0], words("n1", &with_rack));
    assert_eq!(found.len(), 2, "free text is left alone: {found:?}");
    // What a silent node has reported counts for nothing.
    nodes[0].up = false;
    let silent = extra(NODES, &nodes);
    assert!(silent[1][1].contains("\"g0_gpumem_free\":16"), "{silent:?}");
}

const EVICTABLE: &str =
    "sublet:at=n1/g0,device=GPU-a,slowdown=1.00,confidence=0.00,mem=3G,evictable=1,shards=4";

#[test]
fn an_evictable_job_stands_while_the_other_one_runs_and_goes_on_after_it() {
    let comment = |words: &[String]| words.last().unwrap().replacen("AdminComment=", "", 1);
    // It has run for long, and its user lets it not be requeued: no work is lost.
    let last = with(placed(3, NOW_S - 2000, EVICTABLE), "requeue", json!(false));
    let first = placed(5, NOW_S - 5000, AT);
    let all = read(&[first.clone(), last]);
    let slow = measures(&[(5, 2.0, 0.9)]);
    let places = Places::of(gpus(NODES), &all, &slow, SHARD_BYTES);
    assert_eq!(places.troubles(&slow, &limits(), NOW_S), []);
    let suspends = Limits {
        suspends: true,
        ..limits()
    };
    let found = places.troubles(&slow, &suspends, NOW_S);
    assert_eq!((found[0].goes, found[0].beside), (3, 5));
    assert!(!all[1].is_away());
    let leaves = comment(&mark_away(&all[1], &found[0], NOW_S));
    assert!(leaves.starts_with("sublet:suspend,at=n1/g0,"), "{leaves}");
    let of = |comment: &str, state: &str, others: &[Value]| {
        let job = with(
            placed(3, NOW_S - 2000, comment),
            "job_state",
            json!([state]),
        );
        let mut all = others.to_vec();
        all.push(job);
        read(&all)
    };
    let after = |comment: &str, state: &str, others: &[Value], away: &[AwayJob], s: u64| {
        let all = of(comment, state, others);
        let job = all.last().unwrap();
        assert!(job.is_away() && !job.is_marked());
        assert!(!job.may_stand && !job.may_go, "it would be marked again");
        let mut nodes = measures(&[]);
        nodes[0].away = away.to_vec();
        next(job, &all, &nodes, NOW_S + s)
    };
    let away = |evicted, reason: &str| AwayJob {
        name: "slurm.3".into(),
        evicted,
        reason: reason.into(),
    };
    let both = std::slice::from_ref(&first);
    assert_eq!(after(&leaves, "RUNNING", both, &[], 5), Next::Wait);
    let other = AwayJob {
        name: "slurm.4".into(),
        ..away(true, "")
    };
    assert_eq!(after(&leaves, "RUNNING", both, &[other], 5), Next::Wait);
    assert_eq!(
        after(&leaves, "RUNNING", both, &[away(false, "")], 5),
        Next::Wait
    );
    assert_eq!(
        after(&leaves, "RUNNING", both, &[away(true, "")], 5),
        Next::Suspend
    );
    let refused = after(&leaves, "RUNNING", both, &[away(false, "it cannot")], 5);
    assert_eq!(refused, Next::GiveUp("it cannot".into()));
    let overdue = after(&leaves, "RUNNING", both, &[], 120);
    assert!(
        matches!(&overdue, Next::GiveUp(why) if why.contains("120 s")),
        "{overdue:?}"
    );
    // The packer was ended between the two.
    assert_eq!(after(&leaves, "SUSPENDED", both, &[], 500), Next::Note);
    let stands = comment(&stand(of(&leaves, "SUSPENDED", both).last().unwrap()));
    assert!(stands.starts_with("sublet:suspended,at=n1/g0,"), "{stands}");
    assert_eq!(after(&stands, "SUSPENDED", both, &[], 900), Next::Wait);
    assert_eq!(after(&stands, "SUSPENDED", &[], &[], 900), Next::Resume);
    let too = with(first.clone(), "job_state", json!(["SUSPENDED"]));
    assert_eq!(after(&stands, "SUSPENDED", &[too], &[], 900), Next::Resume);
    // Somebody has resumed it.
    assert_eq!(after(&stands, "RUNNING", both, &[], 900), Next::Back);
    let all = of(&stands, "SUSPENDED", both);
    assert_eq!(by_node(all.iter().filter(|job| job.is_away())), {
        [("n1".to_owned(), vec!["slurm.3".to_owned()])].into()
    });
    // Where it is requeued all the same, it stays evictable.
    let again = comment(&clear(&read(&[placed(3, NOW_S, EVICTABLE)])[0], NOW_S));
    assert!(again.contains(",class=,evictable=1,requeued=1,"), "{again}");
    // It slows nobody down while it stands, and keeps its shards.
    let places = Places::of(gpus(NODES), &all, &slow, SHARD_BYTES);
    assert_eq!(places.troubles(&slow, &suspends, NOW_S), []);
    for said in [&leaves, &stands] {
        let job = of(said, "RUNNING", both).pop().unwrap();
        assert_eq!(comment(&go_on(&job)), EVICTABLE);
    }
}
