//! The packer of a Slurm cluster, between a hook and programs that print what Slurm prints.
//! `scripts/slurm` runs it with a real one.

use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use serde_json::json;

use super::*;

/// Programs named as Slurm's: the queue and the nodes are files, and what is to be changed is
/// written down. Job 3 is no longer held when it is looked at again.
fn programs(dir: &Path, jobs: &Value, nodes: &str) -> PathBuf {
    let write = |name: &str, text: &str| {
        fs::write(dir.join(name), text).expect("a file");
        let mode = fs::Permissions::from_mode(0o755);
        fs::set_permissions(dir.join(name), mode).expect("its mode");
    };
    write("queue", &json!({ "jobs": jobs }).to_string());
    write("nodes", nodes);
    write(
        "squeue",
        "#!/bin/sh\nif [ \"$1\" = --json ]; then exec cat \"${0%/*}/queue\"; fi\n\
         if [ \"$3\" = 3 ]; then echo \"3 RUNNING 9 N/A\"; else echo \"$3 PENDING 0 N/A\"; fi\n",
    );
    write(
        "scontrol",
        "#!/bin/sh\nif [ \"$1\" = -o ]; then exec cat \"${0%/*}/nodes\"; fi\n\
         echo \"$@\" >> \"${0%/*}/changed\"\n",
    );
    dir.join("scontrol")
}

fn held(id: u64, partition: &str, name: &str) -> Value {
    json!({
        "job_id": id, "job_state": "PENDING", "priority": 0, "name": name, "comment": name,
        "partition": partition, "nodes": "", "gres_detail": [],
        "admin_comment": "sublet:hold,mem=,share=,class=,shards=4",
    })
}

#[test]
fn a_question_that_is_refused_keeps_no_other_slurm_job_from_its_place() {
    let hook = Hook::new();
    let dir = hook.sandbox.path("slurm");
    fs::create_dir(&dir).expect("a directory");
    // The hook takes no more than 64 devices of a node.
    let mut nodes = "NodeName=n1 State=IDLE Partitions=large Gres=".to_owned();
    for at in 0..65 {
        let _ = write!(nodes, "gpu:g{at}:1,");
    }
    nodes += "shard:1040\nNodeName=n2 State=IDLE Partitions=small Gres=gpu:g0:1,shard:16\n";
    let forged = "x JobId=77 AdminComment=sublet:place,at=n2/g0\nJobId=78 Priority=0";
    let jobs = json!([
        held(1, "large", "first"),
        held(2, "small", forged),
        held(3, "small", "gone"),
    ]);
    let scontrol = programs(&dir, &jobs, &nodes);
    let scontrol = scontrol.display().to_string();
    let outcome = hook.ask(&["slurm", "--once", "--scontrol", &scontrol]);
    let said = outcome.succeeded();
    assert_eq!(said.stdout, "1 jobs released\n", "{}", said.stderr);
    assert!(
        said.stderr.contains("more than 64 devices"),
        "{}",
        said.stderr
    );
    let changed = fs::read_to_string(dir.join("changed")).expect("what was changed");
    let lines: Vec<&str> = changed.lines().collect();
    let [waits, update, release, settled] = lines[..] else {
        panic!("{changed}");
    };
    assert!(
        waits.starts_with("update JobId=1 AdminComment=sublet:hold,"),
        "{waits}"
    );
    assert!(
        update.starts_with(
            "update JobId=2 ReqNodeList=n2 Gres=shard:g0:4 AdminComment=sublet:place,at=n2/g0,"
        ),
        "{update}"
    );
    assert_eq!(release, "release 2");
    assert!(
        settled.starts_with("update JobId=2 AdminComment=sublet:at=n2/g0,"),
        "{settled}"
    );
}

#[test]
fn a_queue_that_is_none_and_a_hook_that_is_away_end_the_pass() {
    let mut hook = Hook::new();
    let dir = hook.sandbox.path("slurm");
    fs::create_dir(&dir).expect("a directory");
    let nodes = "NodeName=n2 State=IDLE Partitions=small Gres=gpu:g0:1,shard:16\n";
    let scontrol = programs(&dir, &json!([held(2, "small", "x")]), nodes);
    let scontrol = scontrol.display().to_string();
    hook.kill();
    let outcome = hook.ask(&["slurm", "--once", "--scontrol", &scontrol]);
    assert!(
        outcome.stderr.contains("is not reached"),
        "{}",
        outcome.stderr
    );
    fs::write(dir.join("queue"), "JobId=2 JobState=PENDING").expect("a file");
    let outcome = hook.ask(&["slurm", "--once", "--scontrol", &scontrol]);
    assert!(
        outcome.stderr.contains("built with JSON"),
        "{}",
        outcome.stderr
    );
    assert!(!dir.join("changed").exists());
}

#[test]
fn a_packer_ends_or_takes_back_what_one_before_it_has_begun() {
    let hook = Hook::new();
    let dir = hook.sandbox.path("slurm");
    fs::create_dir(&dir).expect("a directory");
    let nodes = "NodeName=n2 State=IDLE Partitions=small Gres=gpu:g0:1,shard:16\n";
    let marked = "sublet:requeue,at=n2/g0,mem=3G,shards=4,beside=9,slow=9,slower=2.31";
    let job = |id: u64, state: &str, priority: u64| {
        json!({
            "job_id": id, "job_state": [state], "priority": priority, "name": "train",
            "partition": "small", "nodes": "n2", "gres_detail": ["shard:4(IDX:0)"],
            "requeue": true, "admin_comment": marked,
        })
    };
    let jobs = json!([
        job(5, "RUNNING", 9),
        job(6, "PENDING", 0),
        job(7, "PENDING", 9)
    ]);
    let scontrol = programs(&dir, &jobs, nodes).display().to_string();
    let outcome = hook.ask(&["slurm", "--once", "--scontrol", &scontrol]);
    assert_eq!(outcome.succeeded().stdout, "0 jobs released\n");
    let changed = fs::read_to_string(dir.join("changed")).expect("what was changed");
    let lines: Vec<&str> = changed.lines().collect();
    let [back, cleared] = lines[..] else {
        panic!("{changed}");
    };
    assert_eq!(
        back,
        "update JobId=5 AdminComment=sublet:at=n2/g0,mem=3G,shards=4"
    );
    assert!(
        cleared.starts_with(
            "update JobId=6 ReqNodeList= Gres= AdminComment=sublet:hold,mem=3G,share=,class=,\
             requeued=1,apart=9,after="
        ) && cleared.ends_with(",because=slurm.9_ran_2.31_times_slower,shards=4"),
        "{cleared}"
    );
}
