//! Nodes on hosts of their own, as far as a network can tell: each in a network namespace, joined
//! to the hook's by a pair of virtual interfaces that can be cut.

use std::ffi::OsString;
use std::process::{Child, Command, Stdio};

use serde_json::Value;
use tests::{Artefacts, Outcome, Running, Sandbox, attempts, wait_until};

/// A process that keeps a network namespace alive.
struct Namespace(Child);

impl Namespace {
    /// One of its own user namespace, where the kernel lets us be root.
    fn first() -> Result<Self, String> {
        Self::held_by(Command::new("unshare").args(["--user", "--map-root-user", "--net"]))
    }

    /// Another one beside it.
    fn beside(&self) -> Result<Self, String> {
        Self::held_by(self.enter("unshare").arg("--net"))
    }

    fn held_by(command: &mut Command) -> Result<Self, String> {
        let holder = command
            .args(["sleep", "600"])
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        let mut namespace = Self(holder.map_err(|error| error.to_string())?);
        let own = std::fs::read_link("/proc/self/ns/net").map_err(|error| error.to_string())?;
        // It is there once the holder sleeps in it, or has ended because it may not.
        let there = wait_until("the namespace is there", || {
            if let Ok(Some(status)) = namespace.0.try_wait() {
                return Some(Err(format!("unshare ended with {status}")));
            }
            let pid = namespace.0.id();
            let word = std::fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
            let net = std::fs::read_link(format!("/proc/{pid}/ns/net")).ok()?;
            (word.trim() == "sleep" && net != own).then_some(Ok(()))
        });
        there.map(|()| namespace)
    }

    fn pid(&self) -> String {
        self.0.id().to_string()
    }

    /// A program inside, with our own environment.
    fn enter(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command
            .args([
                "--target",
                &self.pid(),
                "--user",
                "--net",
                "--preserve-credentials",
            ])
            .arg(program);
        command
    }

    /// The same program with the same environment, inside.
    fn inside(&self, command: &Command) -> Command {
        let mut all = self.enter("env");
        let vars = command.get_envs().filter_map(|(name, value)| {
            let mut word = OsString::from(name);
            word.push("=");
            word.push(value?);
            Some(word)
        });
        all.arg("-i").args(vars);
        all.arg(command.get_program()).args(command.get_args());
        if let Some(dir) = command.get_current_dir() {
            all.current_dir(dir);
        }
        all
    }

    fn ip(&self, words: &str) -> Result<(), String> {
        let done = Outcome::of(self.enter("ip").args(words.split(' ')));
        match done.code {
            Some(0) => Ok(()),
            _ => Err(format!("ip {words}: {}", done.stderr.trim())),
        }
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        testbed::reap(&mut self.0);
    }
}

/// A hub with two leaves: the leaves' addresses are 10.77.N.2, the hub's at each 10.77.N.1.
fn network() -> Result<(Namespace, [Namespace; 2]), String> {
    for tool in ["unshare", "nsenter", "ip"] {
        if !tests::programs::exists(tool) {
            return Err(format!("there is no {tool} here"));
        }
    }
    let hub = Namespace::first()?;
    hub.ip("link set lo up")?;
    let leaves = [hub.beside()?, hub.beside()?];
    for (at, leaf) in (1..).zip(&leaves) {
        let pid = leaf.pid();
        hub.ip(&format!(
            "link add v{at} type veth peer name eth0 netns {pid}"
        ))?;
        hub.ip(&format!("addr add 10.77.{at}.1/24 dev v{at}"))?;
        hub.ip(&format!("link set v{at} up"))?;
        leaf.ip("link set lo up")?;
        leaf.ip(&format!("addr add 10.77.{at}.2/24 dev eth0"))?;
        leaf.ip("link set eth0 up")?;
    }
    Ok((hub, leaves))
}

/// Ends the attempts that a test leaves behind.
struct Attempts<'a>(&'a Sandbox);

impl Drop for Attempts<'_> {
    fn drop(&mut self) {
        attempts::end_all(&self.0.path("run"));
    }
}

#[test]
fn a_node_that_is_cut_off_keeps_its_jobs_and_is_heard_again() {
    let (hub, leaves) = match network() {
        Ok(network) => network,
        Err(why) => return eprintln!("skipped: no network namespaces: {why}"),
    };
    let sandbox = Sandbox::new();
    let token = sandbox.path("token");
    std::fs::write(&token, "a-token-of-more-than-16-characters\n").expect("a file");
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    std::fs::set_permissions(&token, mode).expect("its mode");
    let mut serve = sandbox.sublet([
        "cluster",
        "serve",
        "--listen",
        "0.0.0.0:7070",
        "--round",
        "1s",
    ]);
    serve
        .args(["--node-timeout", "3s", "--packer", "none"])
        .args(["--plain-text", "--token-file"])
        .arg(&token);
    serve.arg("--state").arg(sandbox.path("hook"));
    let _hook = Running::start(&mut hub.inside(&serve));
    let ask = |words: &[&str]| {
        let mut command = sandbox.sublet(["cluster"]);
        command
            .arg(words[0])
            .args(["--cluster", "http://127.0.0.1:7070", "--token-file"]);
        command.arg(&token).args(&words[1..]);
        Outcome::of(&mut hub.inside(&command))
    };
    let json = |words: &[&str]| -> Option<Value> { serde_json::from_str(&ask(words).stdout).ok() };
    let up = |node: &str| {
        let status = json(&["status", "--json"])?;
        let nodes = status["nodes"].as_array()?.clone();
        let found = nodes.into_iter().find(|one| one["name"] == node)?;
        found["up"].as_bool()
    };
    let sandboxes = [Sandbox::new(), Sandbox::new()];
    let _attempts = sandboxes.each_ref().map(Attempts);
    let arbiters: Vec<Running> = (1..)
        .zip(leaves.iter().zip(&sandboxes))
        .map(|(at, (leaf, sandbox))| {
            let url = format!("http://10.77.{at}.1:7070");
            let name = format!("leaf-{at}");
            let mut arbiter =
                sandbox.sublet(["arbiter", "--cluster", &url, "--cluster-node", &name]);
            // Inside everybody is root, who has to say as whom jobs run.
            arbiter.args([
                "--cluster-sim",
                "--cluster-user",
                "root",
                "--cluster-token-file",
            ]);
            Running::start(&mut leaf.inside(arbiter.arg(&token)))
        })
        .collect();
    wait_until("both report", || {
        (up("leaf-1")? && up("leaf-2")?).then_some(())
    });
    let program = Artefacts::get().program("load");
    let submit = |name: &str, for_ms: &str| {
        let program = program.to_str().expect("UTF-8");
        let words = [
            "submit",
            "--name",
            name,
            "--",
            program,
            "--kernel-us",
            "2000",
            "--for-ms",
            for_ms,
        ];
        ask(&words).succeeded();
    };
    let job = |name: &str| {
        let jobs = json(&["jobs", "--json"])?;
        jobs["jobs"]
            .as_array()?
            .iter()
            .find(|job| job["name"] == name)
            .cloned()
    };
    submit("one", "6000");
    submit("two", "6000");
    wait_until("both work", || {
        let running = |name| job(name).is_some_and(|job| job["phase"] == "running");
        (running("one") && running("two")).then_some(())
    });
    let cut = job("two").expect("the second")["node"]
        .as_str()
        .unwrap_or_default()
        .to_owned();
    let at = cut.rsplit('-').next().unwrap_or_default().to_owned();
    hub.ip(&format!("link set v{at} down"))
        .expect("the cable is cut");
    wait_until("it counts as silent", || (!up(&cut)?).then_some(()));
    assert_eq!(
        job("two").expect("the second")["phase"],
        "running",
        "it keeps its job"
    );
    // What comes now is for the other one.
    submit("three", "500");
    wait_until("the others are done", || {
        let done = |name| job(name).is_some_and(|job| job["phase"] == "done");
        (done("one") && done("three")).then_some(())
    });
    assert!(!up(&cut).unwrap_or(true), "still cut off");
    hub.ip(&format!("link set v{at} up"))
        .expect("the cable is back");
    wait_until("it is heard again", || up(&cut)?.then_some(()));
    wait_until("its job is done", || {
        (job("two")?["phase"] == "done").then_some(())
    });
    for name in ["one", "two", "three"] {
        assert_eq!(job(name).expect("it is known")["attempts"], 1, "{name}");
    }
    drop(arbiters);
}
