//! The hook above two arbiters on one host, each with a simulated device of its own.

mod crowds;
mod processes;
mod rights;
mod slurm;
mod strangers;
mod tls;

use std::collections::BTreeSet;
use std::io::BufReader;
use std::path::PathBuf;
use std::process::{Child, Stdio};

use serde_json::Value;
use tests::{Artefacts, Outcome, Running, Sandbox, attempts, wait_until};

/// A hook, its state in a directory of its own.
pub struct Hook {
    sandbox: Sandbox,
    process: Option<Child>,
    port: String,
    words: Vec<String>,
    /// The limit of its descriptors, where it has one of its own.
    descriptors: Option<u32>,
    /// With TLS: the directory of its certificates and of those that it believes.
    lab: Option<PathBuf>,
}

impl Hook {
    pub fn new() -> Self {
        Self::with(&[])
    }

    /// With these words on its command line.
    pub fn with(words: &[&str]) -> Self {
        let mut hook = Self {
            sandbox: Sandbox::new(),
            process: None,
            port: "0".into(),
            words: words.iter().map(|word| (*word).to_owned()).collect(),
            descriptors: None,
            lab: None,
        };
        hook.start();
        hook
    }

    pub fn url(&self) -> String {
        let scheme = if self.lab.is_some() { "https" } else { "http" };
        format!("{scheme}://127.0.0.1:{}", self.port)
    }

    pub fn token_file(&self) -> PathBuf {
        self.sandbox.path("hook/token")
    }

    fn command(&self) -> std::process::Command {
        let state = self.sandbox.path("hook");
        let mut command = self.sandbox.sublet(["cluster", "serve", "--listen"]);
        command
            .arg(format!("127.0.0.1:{}", self.port))
            .arg("--state")
            .arg(state);
        command.args([
            "--round",
            "1s",
            "--trial-window",
            "3s",
            "--trial-solo",
            "1s",
            "--node-timeout",
            "5s",
            "--grace",
            "5s",
        ]);
        command.args(&self.words);
        command
    }

    pub fn start(&mut self) {
        let mut command = self.command();
        if let Some(limit) = self.descriptors {
            let mut limited = self.sandbox.command("sh");
            limited.args(["-c", &format!("ulimit -n {limit}; exec \"$@\""), "sh"]);
            limited.arg(command.get_program()).args(command.get_args());
            command = limited;
        }
        let mut process = command.stderr(Stdio::piped()).spawn().expect("the hook");
        let mut line = String::new();
        let mut stderr = BufReader::new(process.stderr.take().expect("its stderr"));
        testbed::read_line(&mut stderr, &mut line);
        let port = line
            .split("://127.0.0.1:")
            .nth(1)
            .and_then(|rest| rest.split(',').next());
        self.port = port
            .unwrap_or_else(|| panic!("no address in `{line}`"))
            .to_owned();
        self.process = Some(process);
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            testbed::reap(&mut process);
        }
    }

    pub fn ask(&self, words: &[&str]) -> Outcome {
        let mut command = self.sandbox.sublet(["cluster"]);
        command
            .args(&words[..1])
            .args(["--cluster", &self.url(), "--token-file"])
            .arg(self.token_file());
        if let Some(lab) = &self.lab {
            command.arg("--ca-file").arg(lab.join("ca.crt"));
            command.arg("--cert-file").arg(lab.join("operator.crt"));
            command.arg("--key-file").arg(lab.join("operator.key"));
        }
        Outcome::of(command.args(&words[1..]))
    }

    pub fn json(&self, words: &[&str]) -> Value {
        serde_json::from_str(&self.ask(words).succeeded().stdout).expect("JSON")
    }

    fn jobs(&self) -> Vec<Value> {
        self.json(&["jobs", "--json"])["jobs"]
            .as_array()
            .cloned()
            .unwrap_or_default()
    }

    fn phases(&self) -> Vec<String> {
        self.jobs()
            .iter()
            .map(|job| job["phase"].as_str().unwrap_or_default().to_owned())
            .collect()
    }

    /// An arbiter that reports to it.
    pub fn node(&self, name: &str) -> Node {
        self.node_of(name, 1)
    }

    /// One with so many simulated devices.
    fn node_of(&self, name: &str, devices: usize) -> Node {
        let mut sandbox = Sandbox::new();
        sandbox.set("SUBLET_SIM_DEVICES", devices.to_string());
        self.node_in(sandbox, name, "root", &[])
    }

    /// One in a place of its own, whose jobs run as `user` where it is root's; `around`: the
    /// command that starts it.
    fn node_in(&self, sandbox: Sandbox, name: &str, user: &str, around: &[&str]) -> Node {
        let mut sublet = sandbox.sublet([
            "arbiter",
            "--cluster",
            &self.url(),
            "--cluster-sim",
            "--cluster-node",
            name,
        ]);
        sublet.arg("--cluster-token-file").arg(self.token_file());
        if let Some(lab) = &self.lab {
            sublet.arg("--cluster-ca").arg(lab.join("ca.crt"));
            let own = |end| lab.join(format!("node-{name}.{end}"));
            sublet.arg("--cluster-cert").arg(own("crt"));
            sublet.arg("--cluster-key").arg(own("key"));
        }
        if nix::unistd::geteuid().is_root() {
            sublet.args(["--cluster-user", user]);
        }
        let mut command = match around {
            [] => sublet,
            [program, words @ ..] => {
                let mut all = sandbox.command(program);
                all.args(words).arg(sublet.get_program());
                all.args(sublet.get_args());
                all
            }
        };
        let arbiter = Some(Running::start(&mut command));
        Node {
            sandbox,
            arbiter,
            name: name.to_owned(),
        }
    }

    pub fn is_up(&self, node: &Node) -> bool {
        let status = self.json(&["status", "--json"]);
        let nodes = status["nodes"].as_array().cloned().unwrap_or_default();
        nodes
            .iter()
            .any(|one| one["name"] == node.name.as_str() && one["up"] == true)
    }
}

impl Drop for Hook {
    fn drop(&mut self) {
        self.kill();
    }
}

pub struct Node {
    sandbox: Sandbox,
    arbiter: Option<Running>,
    name: String,
}

impl Node {
    /// Ends its arbiter.
    pub fn stop(&mut self) {
        drop(self.arbiter.take());
    }

    /// Records of the attempts that were begun.
    fn runs(&self) -> BTreeSet<PathBuf> {
        attempts::begun(&self.sandbox.path("run"))
    }

    /// Where its attempts write.
    fn places(&self) -> Vec<PathBuf> {
        attempts::places(&self.sandbox.path("run"))
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        attempts::end_all(&self.sandbox.path("run"));
        drop(self.arbiter.take());
    }
}

fn submit(hook: &Hook, name: &str, restartable: bool, command: &[&str]) {
    let mut words = vec!["submit", "--name", name, "--kind", command[0]];
    if restartable {
        words.push("--restartable");
    }
    let program = Artefacts::get().program(command[0]);
    words.extend(["--", program.to_str().expect("UTF-8")]);
    words.extend(&command[1..]);
    hook.ask(&words).succeeded();
}

#[test]
fn a_hook_that_is_killed_loses_no_job_and_an_arbiter_that_is_killed_finds_its_own_again() {
    let mut hook = Hook::new();
    let (mut a, b) = (hook.node("a"), hook.node("b"));
    wait_until("both nodes report", || {
        (hook.is_up(&a) && hook.is_up(&b)).then_some(())
    });
    let serve = [
        "load",
        "--kernel-us",
        "2000",
        "--burst",
        "3",
        "--pause-us",
        "40000",
        "--for-ms",
        "9000",
    ];
    for at in 0..4 {
        submit(&hook, &format!("serve-{at}"), false, &serve);
    }
    wait_until("they run", || {
        (hook
            .phases()
            .iter()
            .filter(|phase| *phase == "running")
            .count()
            == 4)
            .then_some(())
    });
    for _ in 0..3 {
        hook.kill();
        hook.start();
    }
    // The arbiter too: its jobs have runners of their own.
    if let Some(mut arbiter) = a.arbiter.take() {
        arbiter.kill();
        drop(arbiter);
    }
    let before = a.runs();
    let mut again = a.sandbox.sublet([
        "arbiter",
        "--cluster",
        &hook.url(),
        "--cluster-sim",
        "--cluster-node",
        "a",
    ]);
    again.arg("--cluster-token-file").arg(hook.token_file());
    if nix::unistd::geteuid().is_root() {
        again.args(["--cluster-user", "root"]);
    }
    a.arbiter = Some(Running::start(&mut again));
    wait_until("all are done", || {
        hook.phases()
            .iter()
            .all(|phase| phase == "done")
            .then_some(())
    });
    let jobs = hook.jobs();
    assert_eq!(jobs.len(), 4);
    assert!(jobs.iter().all(|job| job["attempts"] == 1), "{jobs:?}");
    assert_eq!(a.runs(), before, "nothing was started anew");
    let names = |node: &Node| {
        node.runs()
            .iter()
            .filter_map(|attempt| attempt.file_name().map(|name| name.to_owned()))
            .collect::<Vec<_>>()
    };
    let attempts = [names(&a), names(&b)].concat();
    assert_eq!(
        attempts.iter().collect::<BTreeSet<_>>().len(),
        4,
        "{attempts:?}"
    );
    let status = hook.json(&["status", "--json"]);
    assert_eq!(status["hook"]["epoch"], 4);
    assert!(status["packs"].as_u64() >= Some(2), "{status}");
}

#[test]
fn a_second_hook_a_wrong_token_and_a_wrong_policy_are_refused() {
    let hook = Hook::new();
    let second = Outcome::of(&mut hook.command());
    assert_eq!(second.code, Some(125), "{second:?}");
    assert!(second.stderr.contains("another hook"), "{second:?}");

    let other = hook.sandbox.path("other");
    let fresh = |words: &[&str]| {
        let mut command = hook.sandbox.sublet(["cluster", "serve", "--state"]);
        Outcome::of(command.arg(&other).args(words))
    };
    let open = fresh(&["--listen", "0.0.0.0:0"]);
    assert!(
        open.code == Some(125) && open.stderr.contains("--token-file"),
        "{open:?}"
    );
    let token = hook.token_file();
    let token = token.to_str().expect("UTF-8");
    let plain = fresh(&["--listen", "0.0.0.0:0", "--token-file", token]);
    assert!(
        plain.code == Some(125)
            && plain.stderr.contains("--tls-cert")
            && plain.stderr.contains("--plain-text"),
        "{plain:?}"
    );
    let meant = fresh(&["--packer", "tria"]);
    assert!(
        meant.code == Some(125) && meant.stderr.contains("did you mean `trial`"),
        "{meant:?}"
    );
    assert!(!other.join("hook.redb").exists());

    let mut unknown = hook
        .sandbox
        .sublet(["cluster", "jobs", "--cluster", &hook.url()]);
    let unknown = Outcome::of(&mut unknown);
    assert!(
        unknown.code == Some(125) && unknown.stderr.contains("token"),
        "{unknown:?}"
    );
    let gone = hook.ask(&["cancel", "9"]);
    assert!(
        gone.code == Some(125) && gone.stderr.contains("job 9"),
        "{gone:?}"
    );
}

#[test]
fn a_job_that_has_to_make_way_saves_first_and_goes_on_from_there() {
    let hook = Hook::with(&["--order", "srtf", "--packer", "none"]);
    let node = hook.node("a");
    wait_until("the node reports", || hook.is_up(&node).then_some(()));
    let checkpoint = hook.sandbox.path("long.ckpt");
    let submit = |name: &str, work: &str, steps: &str, more: &[&str]| {
        let program = Artefacts::get().program("train_mlp");
        let mut words = vec![
            "submit",
            "--name",
            name,
            "--work",
            work,
            "--restartable",
            "--",
        ];
        words.push(program.to_str().expect("UTF-8"));
        words.extend([
            "--steps",
            steps,
            "--extra-us",
            "2000",
            "--progress-every",
            "0",
            "--json",
        ]);
        words.extend(more);
        hook.ask(&words).succeeded();
    };
    let resume = ["--resume", "--checkpoint-every", "1000000", "--checkpoint"];
    let mut more = resume.to_vec();
    more.push(checkpoint.to_str().expect("UTF-8"));
    submit("long", "1h", "2000", &more);
    wait_until("the long one trains", || {
        node.sandbox
            .jobs()
            .iter()
            .any(|job| job.listens_for_resize)
            .then_some(())
    });
    submit("short", "1s", "100", &[]);
    wait_until("both are done", || {
        hook.phases()
            .iter()
            .all(|phase| phase == "done")
            .then_some(())
    });
    let long = hook
        .jobs()
        .into_iter()
        .find(|job| job["name"] == "long")
        .expect("the long one");
    assert_eq!(
        (&long["attempts"], &long["saved"]),
        (&2.into(), &1.into()),
        "{long}"
    );
    let said = |attempt: u32| {
        let attempt = format!("{}.{attempt}", long["id"]);
        let places = node.places().into_iter();
        let found = places
            .filter(|place| place.ends_with(&attempt))
            .find_map(|place| std::fs::read_to_string(place.join("stdout")).ok());
        found.unwrap_or_else(|| panic!("no output of {attempt}"))
    };
    let step = |text: &str| {
        let digits = text.split("at step ").nth(1).unwrap_or_default();
        digits
            .chars()
            .take_while(char::is_ascii_digit)
            .collect::<String>()
    };
    let (first, second) = (said(1), said(2));
    assert!(
        first.contains("saved at step") && first.contains("with 0 GPUs"),
        "{first}"
    );
    assert_eq!(step(&first), step(&second), "{first}{second}");
    let lines = hook.json(&["log", "--json"]);
    let lines = lines["decisions"].as_array().cloned().unwrap_or_default();
    assert!(
        lines.iter().any(|line| line["kind"] == "saved"),
        "{lines:?}"
    );
}

#[test]
fn jobs_of_a_node_with_two_gpus_use_their_own_and_an_elastic_one_gives_one_up() {
    let hook = Hook::with(&["--sizer", "max-min"]);
    let node = hook.node_of("a", 2);
    wait_until("the node reports", || hook.is_up(&node).then_some(()));
    let load = [
        "load",
        "--kernel-us",
        "2000",
        "--burst",
        "3",
        "--pause-us",
        "20000",
        "--for-ms",
        "4000",
    ];
    submit(&hook, "left", false, &load);
    submit(&hook, "right", false, &load);
    let used = wait_until("both work", || {
        let jobs = node.sandbox.jobs();
        let mut used: Vec<(String, Vec<String>)> = jobs
            .iter()
            .filter(|job| job.device_time_ns > 0)
            .flat_map(|job| {
                let ungoverned = job
                    .processes
                    .iter()
                    .flat_map(|process| process.ungoverned.clone());
                let ungoverned: Vec<String> = ungoverned.collect();
                let worked = job
                    .devices
                    .iter()
                    .filter(|device| device.device_time_ns > 0);
                worked.map(move |device| (device.uuid.clone(), ungoverned.clone()))
            })
            .collect();
        used.sort();
        (used.len() == 2).then_some(used)
    });
    assert!(
        used[0].0 != used[1].0,
        "each has a device of its own: {used:?}"
    );
    assert!(
        used.iter().all(|(_, ungoverned)| ungoverned.is_empty()),
        "{used:?}"
    );
    wait_until("both are done", || {
        hook.phases()
            .iter()
            .all(|phase| phase == "done")
            .then_some(())
    });

    let elastic = |name: &str, steps: &str| {
        let checkpoint = hook.sandbox.path(&format!("{name}.ckpt"));
        let program = Artefacts::get().program("train_mlp");
        let mut words = vec![
            "submit",
            "--name",
            name,
            "--restartable",
            "--max-gpus",
            "2",
            "--work",
            "30s",
            "--",
        ];
        words.push(program.to_str().expect("UTF-8"));
        words.extend([
            "--steps",
            steps,
            "--extra-us",
            "2000",
            "--progress-every",
            "0",
            "--json",
        ]);
        words.extend(["--resume", "--checkpoint-every", "1000000", "--checkpoint"]);
        words.push(checkpoint.to_str().expect("UTF-8"));
        hook.ask(&words).succeeded();
    };
    let job = |name: &str| {
        let found = hook.jobs().into_iter().find(|job| job["name"] == name);
        found.unwrap_or_else(|| panic!("no job {name}"))
    };
    let gpus = |name: &str| job(name)["devices"].as_array().map_or(0, Vec::len);
    elastic("first", "2500");
    wait_until("it has both GPUs and looks for requests", || {
        let listens = node.sandbox.jobs().iter().any(|job| job.listens_for_resize);
        (listens && gpus("first") == 2).then_some(())
    });
    elastic("second", "1500");
    wait_until("they have one each", || {
        let running = ["first", "second"]
            .iter()
            .all(|name| job(name)["phase"] == "running");
        (running && gpus("first") == 1 && gpus("second") == 1).then_some(())
    });
    wait_until("both are done", || {
        hook.phases()
            .iter()
            .all(|phase| phase == "done")
            .then_some(())
    });
    let first = job("first");
    assert!(first["saved"].as_u64() >= Some(1), "{first}");
    assert_eq!(
        first["attempts"].as_u64(),
        first["saved"].as_u64().map(|saved| saved + 1),
        "{first}"
    );
}
