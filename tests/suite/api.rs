//! The API as users meet it: who may do what, by the kernel's word, and the commands of its page.
//!
//! Callers are processes of their own, with users of their own: this very program plays them
//! ([`role`]), one line of JSON for each request and one for each answer.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde_json::{Value, json};
use testbed::http::Http;
use tests::{Artefacts, Outcome, Running, Sandbox, wait_until};

/// Not one of sublet's names: a test program begins without those.
const ROLE: &str = "CALLER_OF_API_AT";
/// What a test program tells one that it starts in a role: its input is meant (`testbed::clean`).
const CLEAN: &str = "SUBLET_TEST_CLEANED_BY";
/// Users without a name, who are nobody on this host.
const OWNER: u32 = 61_001;
const OTHER: u32 = 61_002;
const ARBITER: u32 = 61_003;
/// What nobody but the owner and who governs the arbiter may read.
const SECRET: &str = "hunter2";

/// Plays a caller, when asked to.
#[test]
fn role() {
    let Some(socket) = std::env::var_os(ROLE).map(PathBuf::from) else {
        return;
    };
    for line in std::io::stdin().lines() {
        let asked: Value = serde_json::from_str(&line.expect("a line")).expect("JSON");
        let text = |name: &str| asked[name].as_str().map(str::to_owned);
        let (method, path) = (text("method").expect("it"), text("path").expect("it"));
        let mut http = Http::connect(&socket).expect("connected");
        let answer = if path.starts_with("/v1/events/stream") {
            follow(&mut http, &path)
        } else {
            http.ask(&method, &path, text("body").as_deref())
                .expect("answered")
        };
        let said = json!({"status": answer.status, "body": answer.body});
        // After the name of the test, on a line of its own.
        println!("\nanswer {said}");
    }
}

/// The head and the first lines, up to the one that was asked about.
fn follow(http: &mut Http, path: &str) -> testbed::http::Answer {
    let ask = format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n");
    http.send(ask.as_bytes()).expect("sent");
    let mut answer = http.head().expect("answered");
    if answer.status != 200 {
        return answer;
    }
    while let Ok(line) = http.line() {
        answer.body += &line;
        answer.body.push('\n');
        if line.contains("\"registered\"") {
            break;
        }
    }
    answer
}

/// A process with a user of its own.
struct Caller {
    child: Child,
    say: ChildStdin,
    hear: BufReader<ChildStdout>,
}

impl Caller {
    fn start(program: &Path, socket: &Path, uid: u32) -> Self {
        let mut command = Command::new(program);
        command
            .args(["--exact", "api::role", "--nocapture", "--test-threads=1"])
            .env_clear()
            .env(ROLE, socket)
            .env(CLEAN, std::process::id().to_string())
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .uid(uid)
            .gid(uid);
        let mut child = testbed::within::spawn(&mut command).expect("it starts");
        let say = child.stdin.take().expect("a pipe");
        let hear = BufReader::new(child.stdout.take().expect("a pipe"));
        Self { child, say, hear }
    }

    fn ask(&mut self, method: &str, path: &str, body: Option<&Value>) -> (u64, String) {
        let body = body.map(Value::to_string);
        let asked = json!({"method": method, "path": path, "body": body});
        writeln!(self.say, "{asked}").expect("it listens");
        loop {
            let mut line = String::new();
            let read = self.hear.read_line(&mut line).expect("it speaks");
            assert!(read > 0, "it has ended: {method} {path}");
            if let Some(said) = line.strip_prefix("answer ") {
                let said: Value = serde_json::from_str(said).expect("JSON");
                let status = said["status"].as_u64().expect("a number");
                return (status, said["body"].as_str().expect("a text").to_owned());
            }
        }
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        testbed::reap(&mut self.child);
    }
}

/// The files that it takes to serve other hosts.
const OF_TCP: [&str; 3] = ["server.crt", "server.key", "tokens.toml"];

/// Writes those files, and says with which flags an arbiter serves other hosts.
fn flags_for_others(sandbox: &Sandbox, tokens: &str) -> Vec<String> {
    let [certificate, key, of_tokens] = OF_TCP.map(|name| sandbox.path(name));
    testbed::tls::write_server(0, &certificate, &key);
    std::fs::write(&of_tokens, tokens).expect("written");
    let secret = PermissionsExt::from_mode(0o600);
    std::fs::set_permissions(&of_tokens, secret).expect("set");
    let path = |path: &PathBuf| path.display().to_string();
    let flags = [
        ("--api-listen", "127.0.0.1:0".to_owned()),
        ("--api-cert", path(&certificate)),
        ("--api-key", path(&key)),
        ("--api-tokens", path(&of_tokens)),
    ];
    flags.map(|(flag, value)| format!("{flag}={value}")).into()
}

/// An arbiter of a user of its own, to which everybody can connect, and a copy of this program that
/// everybody can start.
struct Host {
    sandbox: Sandbox,
    program: PathBuf,
    /// Of the arbiter.
    flags: Vec<String>,
    arbiter: Option<Running>,
}

impl Host {
    /// `None`: this test is not root's, or others cannot reach what was built.
    fn new() -> Option<Self> {
        if !nix::unistd::geteuid().is_root() {
            println!("now: skipped, it takes root");
            return None;
        }
        let mut tried = Command::new(Artefacts::get().program("sublet"));
        let tried = tried
            .arg("--version")
            .uid(OTHER)
            .gid(OTHER)
            .current_dir("/");
        if tried
            .stdout(Stdio::null())
            .status()
            .map_or(true, |status| !status.success())
        {
            println!("now: skipped, it takes a build that others can execute");
            return None;
        }
        let sandbox = Sandbox::new();
        let program = sandbox.path("caller");
        let sublet = sandbox.path("sublet");
        let us = std::env::current_exe().expect("us");
        std::fs::copy(us, &program).expect("copied");
        std::fs::copy(Artefacts::get().program("sublet"), &sublet).expect("copied");
        for path in ["", "run", "sim", "home"] {
            let path = sandbox.path(path);
            std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).expect("set");
            std::os::unix::fs::chown(&path, Some(ARBITER), Some(ARBITER)).expect("set");
        }
        let mut host = Self {
            sandbox,
            program,
            flags: Vec::new(),
            arbiter: None,
        };
        host.begin();
        Some(host)
    }

    /// Starts the arbiter again, for other hosts too.
    fn open_to_others(&mut self, tokens: &str) -> SocketAddr {
        self.flags = flags_for_others(&self.sandbox, tokens);
        for name in OF_TCP {
            let path = self.sandbox.path(name);
            std::os::unix::fs::chown(path, Some(ARBITER), Some(ARBITER)).expect("set");
        }
        let status = self.sandbox.control().expect("an arbiter").shutdown();
        status.expect("it ends");
        drop(self.arbiter.take().map(Running::wait));
        self.begin();
        let status = self.sandbox.control().expect("an arbiter").status();
        let address = status.expect("answered").api_address;
        address.parse().expect("an address")
    }

    fn socket(&self) -> PathBuf {
        self.sandbox.path("run/api.sock")
    }

    /// Starts the arbiter, once more where it was ended.
    fn begin(&mut self) {
        let mut command = self.sandbox.command(self.sandbox.path("sublet"));
        command
            .arg("arbiter")
            .args(&self.flags)
            .uid(ARBITER)
            .gid(ARBITER)
            .current_dir("/");
        self.arbiter = Some(Running::start(&mut command));
        wait_until("the arbiter answers", || {
            self.sandbox.control().ok()?.status().ok()
        });
        // It serves its own user alone where its directory was given.
        for name in ["channel.sock", "api.sock"] {
            let path = self.sandbox.path("run").join(name);
            std::fs::set_permissions(path, PermissionsExt::from_mode(0o666)).expect("set");
        }
    }

    fn caller(&self, uid: u32) -> Caller {
        Caller::start(&self.program, &self.socket(), uid)
    }
}

/// What a request of that operation about the owner's job is, and what is answered to its owner,
/// another user, root, and the arbiter's user.
fn expected(method: &str, path: &str) -> Option<(Option<Value>, [u64; 4])> {
    const ALL: [u64; 4] = [200; 4];
    const GOVERNS: [u64; 4] = [403, 403, 200, 200];
    const OWNS: [u64; 4] = [200, 403, 200, 200];
    Some(match (method, path) {
        // What everybody may know; of others' jobs as much as `what_others_may_know` says.
        ("GET", "/v1/openapi.json" | "/v1/status" | "/v1/jobs" | "/v1/jobs/{job}")
        | ("GET", "/v1/jobs/{job}/profile" | "/v1/devices" | "/v1/events")
        | ("GET", "/v1/events/stream" | "/v1/devices/{device}/timeline") => (None, ALL),
        // Each registers itself.
        ("POST", "/v1/jobs") => (Some(json!({"simulated": true})), [201; 4]),
        ("PATCH", "/v1/jobs/{job}") => (Some(json!({"paused": true})), OWNS),
        ("GET", "/v1/groups" | "/v1/groups/{group}") => (None, ALL),
        ("POST", "/v1/jobs/{job}/acquire") => (Some(json!({"timeout_ms": 60_000})), OWNS),
        // There is one turn to give up.
        ("POST", "/v1/jobs/{job}/yield") => (Some(json!({"group": "rl"})), [200, 403, 409, 409]),
        ("POST", "/v1/moves") => (Some(json!({"evict": ["owned"]})), OWNS),
        ("GET", "/v1/config") => (None, OWNS),
        ("PATCH", "/v1/devices" | "/v1/devices/{device}") => {
            (Some(json!({"quantum": "9ms"})), GOVERNS)
        }
        ("POST", "/v1/reload") => (None, GOVERNS),
        ("POST", "/v1/hook-refusals") => (
            Some(json!({"hook": "http://127.0.0.1:1", "reason": "another"})),
            GOVERNS,
        ),
        // The last of them, for it ends.
        ("POST", "/v1/shutdown") => (None, [403, 403, 202, 202]),
        _ => return None,
    })
}

/// Every operation of the document that the arbiter serves.
fn operations(caller: &mut Caller) -> Vec<(String, String)> {
    let (status, document) = caller.ask("GET", "/v1/openapi.json", None);
    assert_eq!(status, 200);
    let document: Value = serde_json::from_str(&document).expect("JSON");
    let mut all = Vec::new();
    for (path, methods) in document["paths"].as_object().expect("paths") {
        for method in methods.as_object().expect("methods").keys() {
            all.push((method.to_uppercase(), path.clone()));
        }
    }
    all.sort_by_key(|(_, path)| path == "/v1/shutdown");
    all
}

#[test]
fn every_operation_is_open_to_those_who_may_and_to_nobody_else() {
    let Some(mut host) = Host::new() else {
        return;
    };
    let names = ["the owner", "another user", "root", "the arbiter's user"];
    let mut callers = [OWNER, OTHER, 0, ARBITER].map(|uid| host.caller(uid));
    let job = json!({
        "name": "owned", "simulated": true, "evictable": true, "group": "rl",
        "command": ["train", SECRET],
    });
    let (status, registered) = callers[0].ask("POST", "/v1/jobs", Some(&job));
    assert_eq!(status, 201, "{registered}");
    let registered: Value = serde_json::from_str(&registered).expect("JSON");
    let token = registered["token"].as_str().expect("a token").to_owned();
    let pid = callers[0].child.id();
    // A device is known once a job uses it.
    let mut job = host.sandbox.job(
        &["--name", "worker", "--mem", "1GiB"],
        tests::programs::program("memory"),
    );
    let mut work = tests::ProgramRun::start(job.uid(ARBITER).gid(ARBITER).current_dir("/"));
    assert_eq!(work.ask("init"), "0");
    let all = operations(&mut callers[0]);
    let mut seen = BTreeMap::new();
    for (method, path) in &all {
        let row = expected(method, path);
        let (body, statuses) = row.unwrap_or_else(|| panic!("no row for {method} {path}"));
        let mut asked = path.replace("{job}", "owned").replace("{device}", "0");
        asked = asked.replace("{group}", "rl");
        match path.as_str() {
            "/v1/config" => asked += &format!("?pid={pid}"),
            "/v1/events/stream" => asked += "?since_seq=0",
            _ => {}
        }
        for (at, caller) in callers.iter_mut().enumerate() {
            if path == "/v1/shutdown" && at == 3 {
                // Root has ended it.
                drop(host.arbiter.take().map(Running::wait));
                host.begin();
            }
            let (status, said) = caller.ask(method, &asked, body.as_ref());
            let whose = names[at];
            assert_eq!(status, statuses[at], "{whose}: {method} {asked}: {said}");
            if status == 403 {
                let said: Value = serde_json::from_str(&said).expect("JSON");
                assert_eq!(said["error"]["code"], "permission", "{said}");
            }
            assert!(
                !said.contains(&token),
                "{whose}: {method} {asked} tells the token"
            );
            let tells = said.contains(SECRET) || names_process(&said, pid);
            if at == 1 {
                assert!(
                    !tells,
                    "another user: {method} {asked} tells too much: {said}"
                );
            }
            *seen.entry((method.clone(), path.clone())).or_insert(false) |= tells;
        }
    }
    assert_eq!(seen.len(), all.len());
    // The others learn it, so that was no accident.
    for path in [
        "/v1/status",
        "/v1/jobs",
        "/v1/jobs/{job}",
        "/v1/events",
        "/v1/events/stream",
    ] {
        assert!(
            seen[&("GET".to_owned(), path.to_owned())],
            "{path} tells nobody"
        );
    }
}

#[test]
fn over_tcp_a_users_token_reaches_that_users_jobs_and_no_others() {
    let Some(mut host) = Host::new() else {
        return;
    };
    let token = |who: &str| who.repeat(40);
    let section = |(name, role): (&str, String)| {
        format!(
            "[[token]]\nname = \"{name}\"\n{role}\ntoken = \"{}\"\n",
            token(name)
        )
    };
    let tokens = [
        ("o", format!("uid = {OWNER}")),
        ("x", format!("uid = {OTHER}")),
        ("r", "role = \"readonly\"".into()),
        ("g", "role = \"operator\"".into()),
    ];
    let address = host.open_to_others(&tokens.map(section).concat());
    let mut owner = host.caller(OWNER);
    let job = json!({
        "name": "owned", "simulated": true, "evictable": true, "group": "rl",
        "command": ["train", SECRET],
    });
    let (status, said) = owner.ask("POST", "/v1/jobs", Some(&job));
    assert_eq!(status, 201, "{said}");
    let pid = owner.child.id();
    // A device is known once a job uses it.
    let mut job = host.sandbox.job(
        &["--name", "worker", "--mem", "1GiB"],
        tests::programs::program("memory"),
    );
    let mut work = tests::ProgramRun::start(job.uid(ARBITER).gid(ARBITER).current_dir("/"));
    assert_eq!(work.ask("init"), "0");
    let mut all = operations(&mut owner);
    all.retain(|(_, path)| path != "/v1/shutdown");
    for (method, path) in &all {
        let row = expected(method, path);
        let (body, local) = row.unwrap_or_else(|| panic!("no row for {method} {path}"));
        let body = body.as_ref().map(Value::to_string);
        let mut asked = path.replace("{job}", "owned").replace("{device}", "0");
        asked = asked.replace("{group}", "rl");
        match path.as_str() {
            "/v1/config" => asked += &format!("?pid={pid}"),
            "/v1/events/stream" => asked += "?since_seq=0",
            _ => {}
        }
        // What the same user may on this host; root's rights nobody has.
        for (who, at) in [("o", 0), ("x", 1), ("r", 1), ("g", 3)] {
            let http = testbed::tls::connect(address).expect("connected");
            let mut http = http.with_token(&token(who));
            let answer = if path.ends_with("/stream") {
                let ask = format!(
                    "GET {asked} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {}\r\n\r\n",
                    token(who)
                );
                http.send(ask.as_bytes()).expect("sent");
                http.head().expect("answered")
            } else {
                http.ask(method, &asked, body.as_deref()).expect("answered")
            };
            let wanted = match (method.as_str(), path.as_str()) {
                ("POST", "/v1/jobs") => 403,
                _ => local[at],
            };
            assert_eq!(
                u64::from(answer.status),
                wanted,
                "{who}: {method} {asked}: {answer:?}"
            );
            let tells = answer.body.contains(SECRET) || names_process(&answer.body, pid);
            assert!(
                !tells || matches!(who, "o" | "g"),
                "{who}: {asked}: {answer:?}"
            );
            if path == "/v1/jobs" && method == "GET" {
                assert_eq!(tells, matches!(who, "o" | "g"), "{who}: {answer:?}");
            }
        }
    }
    // The configuration of one's own user, and of nobody else.
    for (who, asked, wanted) in [
        ("o", "/v1/config".to_owned(), 200),
        ("o", format!("/v1/config?user={OTHER}"), 403),
        ("g", format!("/v1/config?user={OTHER}"), 200),
        ("r", "/v1/config".to_owned(), 403),
    ] {
        let http = testbed::tls::connect(address).expect("connected");
        let answer = http.with_token(&token(who)).ask("GET", &asked, None);
        assert_eq!(answer.expect("answered").status, wanted, "{who}: {asked}");
    }
}

#[test]
fn a_change_that_is_refused_over_tcp_is_in_the_log_once_and_without_the_token() {
    let sandbox = Sandbox::new();
    let (reader, other) = ("r".repeat(40), "x".repeat(40));
    let tokens =
        format!("[[token]]\nname = \"dashboard\"\nrole = \"readonly\"\ntoken = \"{reader}\"\n");
    let flags = flags_for_others(&sandbox, &tokens);
    let arbiter = Running::start(sandbox.sublet(["arbiter"]).args(flags));
    let status = wait_until("the arbiter answers", || {
        sandbox.control().ok()?.status().ok()
    });
    let address: SocketAddr = status.api_address.parse().expect("an address");
    let ask = |token: &str, method: &str, path: &str, body: Option<&str>| {
        let http = testbed::tls::connect(address).expect("connected");
        let answer = http.with_token(token).ask(method, path, body);
        answer.expect("answered").status
    };
    // Reads are nobody's change.
    assert_eq!(ask(&other, "GET", "/v1/jobs", None), 401);
    assert_eq!(ask(&reader, "GET", "/v1/config", None), 403);
    let path = format!("/v1/jobs/{reader}");
    for _ in 0..5 {
        assert_eq!(ask(&reader, "PATCH", &path, Some("{\"share\": 0.5}")), 403);
        assert_eq!(ask(&other, "POST", "/v1/shutdown", None), 401);
    }
    sandbox
        .control()
        .expect("an arbiter")
        .shutdown()
        .expect("it ends");
    let log = arbiter.wait().stderr;
    let lines: Vec<&str> = log
        .lines()
        .filter(|line| line.contains("refused over TCP"))
        .collect();
    let [line] = lines[..] else {
        panic!("one line of one address: {log}");
    };
    for word in [
        "PATCH /v1/jobs/{job}",
        "`dashboard` (readonly)",
        "127.0.0.1",
    ] {
        assert!(line.contains(word), "{line}");
    }
    assert!(!log.contains(&reader) && !log.contains(&other), "{log}");
}

/// Whether an answer names a process.
fn names_process(said: &str, pid: u32) -> bool {
    said.contains(&format!("pid\":{pid},")) || said.contains(&format!("pid\":{pid}}}"))
}

#[test]
fn who_may_not_connect_to_an_arbiter_learns_nothing_from_it() {
    let Some(host) = Host::new() else {
        return;
    };
    let socket = host.socket();
    std::fs::set_permissions(&socket, PermissionsExt::from_mode(0o600)).expect("set");
    let mut tried = Command::new(&host.program);
    tried
        .args(["--exact", "api::role", "--nocapture", "--test-threads=1"])
        .env_clear()
        .env(ROLE, &socket)
        .env(CLEAN, std::process::id().to_string())
        .current_dir("/")
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .uid(OTHER)
        .gid(OTHER);
    let mut child = testbed::within::spawn(&mut tried).expect("it starts");
    let asked = json!({"method": "GET", "path": "/v1/jobs"});
    let mut say = child.stdin.take().expect("a pipe");
    writeln!(say, "{asked}").expect("it listens");
    drop(say);
    let status = testbed::within::wait(&mut child, "the caller", testbed::PATIENCE);
    assert!(!status.success(), "it was let in");
}

/// The commands of the page, in order: those of blocks marked `console`.
fn commands(page: &str) -> Vec<String> {
    let mut all: Vec<String> = Vec::new();
    let mut inside = false;
    for line in page.lines() {
        if line.starts_with("```") {
            inside = line == "```console";
        } else if inside && let Some(command) = line.strip_prefix("$ ") {
            all.push(command.to_owned());
        } else if inside
            && let Some(last) = all.last_mut()
            && last.ends_with('\\')
        {
            last.push('\n');
            last.push_str(line);
        }
    }
    all
}

#[test]
fn the_commands_of_the_page_do_what_it_says() {
    if !tests::programs::exists("curl") {
        println!("now: skipped, there is no curl");
        return;
    }
    let root = Artefacts::get().root();
    let page = std::fs::read_to_string(root.join("docs/reference/api.md")).expect("the page");
    let all = commands(&page);
    assert!(all.len() >= 6, "{all:?}");
    let sandbox = Sandbox::new();
    let _arbiter = sandbox.arbiter();
    let mut work = tests::ProgramRun::start(&mut sandbox.job(
        &["--name", "train", "--mem", "1GiB"],
        tests::programs::program("memory"),
    ));
    assert_eq!(work.ask("init"), "0");
    for command in &all {
        // As the page says, from the directory of the arbiter.
        let mut shell = sandbox.command("sh");
        shell
            .args(["-ec", command])
            .env("S", sandbox.path("run/api.sock"));
        let outcome = Outcome::of(&mut shell);
        assert_eq!(outcome.code, Some(0), "{command}: {outcome:?}");
        let fails = command.contains("nobody");
        assert_eq!(
            outcome.stdout.contains("\"error\""),
            fails,
            "{command}: {outcome:?}"
        );
        assert!(!outcome.stdout.is_empty(), "{command}");
    }
    let job = sandbox.job_status("train").expect("it is there");
    assert_eq!(
        job.mem_limit_bytes,
        Some(2 << 30),
        "the page has changed it"
    );
}
