//! Shares of a node without an arbiter.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use control::paths::RuntimeDir;

use super::*;

/// Shares of a node without an arbiter: a script stands for holders, and registers every job.
fn shares(dir: &Path) -> Shares {
    let program = dir.join("holder");
    let script = r#"#!/bin/sh
read task
set -- $(cat /proc/$$/stat)
shift 21
here=${0%/*}
echo $$ > "$here/pid"
[ -e "$here/broken" ] && mv "$here/state" "$here/gone"
echo '{"Registered":{"name":"j","id":'$$',"token":"t","channel_socket":"/s","holder_pid":'$$',"holder_ticks":'$1'}}' >&0
read stay || exit
exec sleep 1000
"#;
    fs::write(&program, script).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let node = Node {
        dir: RuntimeDir::given(dir.join("run")).unwrap(),
        program,
        library: "/l/libsublet.so".into(),
        driver: "/l/libcuda.so.1".into(),
        simulated: None,
        device_nodes: Vec::new(),
        gpu_kind: None,
        preload: "/l/preload".into(),
    };
    let folder = Folder::open(&dir.join("cdi"), "plugin").unwrap();
    Shares::open(node, Records::open(&dir.join("state")).unwrap(), folder).unwrap()
}

fn wanted(key: &str, units: &[&str]) -> Record {
    Record {
        key: key.into(),
        title: key.into(),
        units: units.iter().map(|unit| (*unit).to_owned()).collect(),
        shares: vec![Share {
            name: key.into(),
            memory_bytes: 1,
            ..Share::default()
        }],
        ..Record::default()
    }
}

fn job(record: &Record) -> &crate::records::Job {
    record.shares[0].job.as_ref().unwrap()
}

fn files(dir: &Path) -> Vec<String> {
    let names = fs::read_dir(dir).unwrap();
    let names = names.map(|one| one.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = names.filter(|name| name != "lock").collect();
    names.sort();
    names
}

#[test]
fn the_same_units_are_another_containers_and_what_is_old_does_not_touch_it() {
    let dir = tempfile::tempdir().unwrap();
    let shares = shares(dir.path());
    let first = shares.hold(wanted("u", &["a::0"])).unwrap();
    let second = shares.hold(wanted("u", &["a::0"])).unwrap();
    assert!(!holder::lives(job(&first)), "the earlier container's job");
    assert!(holder::lives(job(&second)));
    // What was decided about the first one.
    shares.release_if("u", first.made).unwrap();
    let pod = Pod::default();
    shares.belongs("u", first.made, &pod).unwrap();
    assert_eq!(shares.all(), std::slice::from_ref(&second));
    shares.belongs("u", second.made, &pod).unwrap();
    assert_eq!(shares.all()[0].pod, Some(pod.clone()));
    drop(shares);
    let shares = self::shares(dir.path());
    assert_eq!(shares.all()[0].pod, Some(pod), "it outlives the process");
    let overlapping = shares.hold(wanted("w", &["a::0", "a::1"])).unwrap();
    assert!(overlapping.made > second.made);
    assert!(!holder::lives(job(&second)));
    shares.release("w").unwrap();
    assert_eq!(files(&dir.path().join("state")), [""; 0]);
    assert_eq!(files(&dir.path().join("cdi")), [""; 0]);
}

#[test]
fn a_claim_that_is_prepared_again_has_what_it_had() {
    let dir = tempfile::tempdir().unwrap();
    let shares = shares(dir.path());
    let first = shares.hold(wanted("uid", &[])).unwrap();
    assert_eq!(shares.hold(wanted("uid", &[])).unwrap(), first);
    shares.release("uid").unwrap();
    assert!(!holder::lives(job(&first)));
}

#[test]
fn what_cannot_be_undone_is_tried_again() {
    let dir = tempfile::tempdir().unwrap();
    let shares = shares(dir.path());
    // Nothing can be written or removed at this name.
    let in_the_way = dir.path().join("cdi/sublet.dev-share-plugin-u.json");
    fs::create_dir_all(in_the_way.join("x")).unwrap();
    shares.hold(wanted("u", &["a::0"])).unwrap_err();
    assert_eq!(files(&dir.path().join("state")), ["u.undo"]);
    shares.hold(wanted("u", &["a::0"])).unwrap_err();
    let again = shares.tend();
    assert!(again.is_err(), "there is no arbiter");
    assert_eq!(files(&dir.path().join("state")), ["u.undo"]);
    fs::remove_dir_all(&in_the_way).unwrap();
    let _ = shares.tend();
    assert_eq!(files(&dir.path().join("state")), [""; 0]);
    shares.hold(wanted("u", &["a::0"])).unwrap();
    shares.release("u").unwrap();
}

#[test]
fn a_job_that_cannot_be_noted_is_not_left_behind() {
    let dir = tempfile::tempdir().unwrap();
    let shares = shares(dir.path());
    // The disk breaks while the job is registered.
    fs::write(dir.path().join("broken"), "").unwrap();
    shares.hold(wanted("u", &["a::0"])).unwrap_err();
    let pid = fs::read_to_string(dir.path().join("pid")).unwrap();
    assert_eq!(holder::started_ticks(pid.trim().parse().unwrap()), None);
    assert!(shares.all().is_empty());
    assert_eq!(files(&dir.path().join("cdi")), [""; 0]);
}

#[test]
fn what_an_arbiter_said_before_there_was_a_job_does_not_end_it() {
    let dir = tempfile::tempdir().unwrap();
    let shares = shares(dir.path());
    // A container is given its units while the arbiter is asked.
    let (before, status) = (shares.all(), control::ArbiterStatus::default());
    let held = shares.hold(wanted("u", &["a::0"])).unwrap();
    assert_eq!(shares.renew_all(&before, &status), [""; 0]);
    assert_eq!(shares.all(), std::slice::from_ref(&held));
    // What it says of a job that it was asked about counts.
    assert_eq!(shares.renew_all(&shares.all(), &status), [""; 0]);
    assert_ne!(job(&shares.all()[0]), job(&held));
    assert!(!holder::lives(job(&held)));
    shares.release("u").unwrap();
}
