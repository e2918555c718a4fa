//! Every command that takes `--json` prints one object on one line, with the number of its form.

use std::collections::BTreeSet;
use std::io::BufReader;
use std::process::{Child, Stdio};

use control::{Acquired, DeviceStatus, JobStatus, Moved, Reloaded, Reply, Request, Yielded};
use serde_json::Value;

use crate::fixture::{Fixture, Outcome};

/// The commands that take `--json`, with what each is given here besides.
const COMMANDS: [(&str, &str); 29] = [
    ("acquire", "train"),
    ("cluster jobs", ""),
    ("cluster log", ""),
    ("cluster status", ""),
    ("cluster submit", "--name train -- true"),
    ("config check", ""),
    ("config show", ""),
    ("device set", "0 --quantum 5ms"),
    ("doctor", ""),
    ("events", ""),
    ("evict", "train"),
    ("groups", ""),
    ("pause", "train"),
    ("ps", ""),
    ("reload", ""),
    ("replay", "job.slr --show"),
    ("restore", "train"),
    ("resume", "train"),
    ("set", "train --share 50%"),
    ("simulate", "--trace trace.csv --cluster 1xV100"),
    ("simulate cells", "--trace trace.csv --nodes 4"),
    ("simulate plan", "model.toml"),
    ("simulate policies", ""),
    ("simulate serve", "requests.csv --within 2"),
    ("simulate trace", "trace.csv"),
    (
        "simulate what-if",
        "--trace trace.csv --cluster 1xV100 --sla 1x:1,2x:0.5",
    ),
    ("switch", "train serve"),
    ("top", "--once --interval 100ms"),
    ("yield", "train"),
];

/// The commands below one, itself included, whose help names the flag.
fn take_json(fixture: &Fixture, path: &[String], found: &mut BTreeSet<String>) {
    let words: Vec<&str> = path.iter().map(String::as_str).chain(["--help"]).collect();
    let help = fixture.run(&words);
    assert_eq!(help.code, Some(0), "{help:?}");
    if help
        .stdout
        .lines()
        .any(|line| line.trim_start().starts_with("--json"))
    {
        found.insert(path.join(" "));
    }
    let lines = help.stdout.lines();
    let below = lines.skip_while(|line| *line != "Commands:").skip(1);
    let below = below.take_while(|line| !line.is_empty());
    // Deeper lines go on with what a command is for.
    for line in below.filter(|line| line.starts_with("  ") && !line.starts_with("   ")) {
        let name = line.split_whitespace().next().expect("a name");
        take_json(fixture, &[path, &[name.to_owned()]].concat(), found);
    }
}

/// A hook, ended with the test.
struct Hook(Child);

impl Drop for Hook {
    fn drop(&mut self) {
        testbed::reap(&mut self.0);
    }
}

/// A hook of the fixture's own, and where it listens.
fn hook(fixture: &Fixture) -> (Hook, String) {
    let words = "cluster serve --listen 127.0.0.1:0 --state hook";
    let mut process = fixture
        .sublet(words.split(' '))
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let mut stderr = BufReader::new(process.stderr.take().unwrap());
    let hook = Hook(process);
    testbed::read_line(&mut stderr, &mut line);
    let from = line.find("http://127.0.0.1:").expect("its address");
    let url = line[from..].split(',').next().expect("an address");
    (hook, url.to_owned())
}

#[test]
fn every_command_that_takes_json_prints_one_object_with_its_schema() {
    let fixture = Fixture::answering(|request| match request {
        Request::Status => Ok(Reply::Status(control::ArbiterStatus::default())),
        Request::Set { job, .. } => Ok(Reply::Changed(Box::new(JobStatus {
            name: job,
            ..JobStatus::default()
        }))),
        Request::SetDevice { .. } => Ok(Reply::Devices(vec![DeviceStatus::default()])),
        Request::Reload => Ok(Reply::Reloaded(Reloaded::default())),
        Request::Config { .. } => Ok(Reply::Config(Box::default())),
        Request::Move(_) => Ok(Reply::Moved(Moved::default())),
        Request::Acquire { .. } => Ok(Reply::Acquired(Acquired::default())),
        Request::Yield { .. } => Ok(Reply::Yielded(Yielded::default())),
        Request::Groups => Ok(Reply::Groups(Vec::new())),
        other => panic!("not expected here: {other:?}"),
    });
    let mut found = BTreeSet::new();
    take_json(&fixture, &[], &mut found);
    // These start jobs, or look at what stands before jobs; the suite of the whole has them.
    let known = COMMANDS.iter().map(|(path, _)| *path);
    let known = known.chain(["demo", "frontend status"]);
    let known: BTreeSet<String> = known.map(Into::into).collect();
    assert_eq!(found, known, "COMMANDS is to have each of them");

    fixture.write(
        "trace.csv",
        "job_id,num_gpu,submit_time,iterations,model_name,duration,interval\n\
         1,1,0,10,resnet50,100,1\n",
    );
    fixture.write("requests.csv", "arrival_s,service_s\n0,1\n1,1\n");
    let examples = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples");
    std::fs::copy(
        format!("{examples}/plans/vgg16.toml"),
        fixture.at("model.toml"),
    )
    .unwrap();
    let recordings = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/recordings");
    std::fs::copy(
        format!("{recordings}/infer_loop.slr"),
        fixture.at("job.slr"),
    )
    .unwrap();
    // Of `events` each event is one.
    fixture.write(
        "run/journal.jsonl",
        "{\"seq\":1,\"unix_ms\":1,\"kind\":\"start\",\"message\":\"arbiter 1 serves\"}\n",
    );
    let (_hook, url) = hook(&fixture);
    for (path, more) in COMMANDS {
        let mut command = fixture.sublet(path.split(' '));
        command.arg("--json").args(more.split_whitespace());
        command.env("SUBLET_CLUSTER", &url);
        command.env("SUBLET_CLUSTER_TOKEN_FILE", fixture.at("hook/token"));
        let outcome = Outcome::of(&mut command);
        assert_eq!(outcome.stdout.lines().count(), 1, "{path}: {outcome:?}");
        let value: Value = serde_json::from_str(&outcome.stdout).unwrap();
        assert!(value.is_object(), "{path}: {outcome:?}");
        assert_eq!(value["schema"], 1, "{path}: {outcome:?}");
    }
}
