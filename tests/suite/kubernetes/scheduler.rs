//! The scheduler extender, on what kube-scheduler sends (types of `extender/v1`).

use std::io::{BufRead as _, BufReader};

use serde_json::{Value, json};
use testbed::http::Http;
use tests::{Running, Sandbox};

use super::api_server::ApiServer;

/// A question of filter and prioritize, as kube-scheduler writes it: Go's names of the fields.
const ARGS: &str = include_str!("../../../kubernetes/data/extender-args.json");

pub struct Extender {
    pub api: ApiServer,
    process: Running,
    address: String,
    _sandbox: Sandbox,
}

impl Extender {
    fn start() -> Self {
        Self::with(&[])
    }

    /// With these words on its command line.
    pub fn with(words: &[&str]) -> Self {
        Self::beside(ApiServer::start(), words)
    }

    fn beside(api: ApiServer, words: &[&str]) -> Self {
        let sandbox = Sandbox::new();
        let mut command = sandbox.sublet(["kubernetes", "extender", "--listen", "127.0.0.1:0"]);
        command.args(["--api-server", &api.url]);
        command.args(words);
        command.stderr(std::process::Stdio::piped());
        let mut child = command.spawn().expect("an extender");
        let stderr = child.stderr.take().expect("a pipe");
        // What it finds of pods that wait may be said before.
        let mut lines = BufReader::new(stderr).lines().map_while(Result::ok);
        let line = lines.find(|line| line.contains("the extender is at "));
        let line = line.expect("a line with its address");
        let address = line.rsplit_once("://").expect("an address").1.to_owned();
        Self {
            api,
            process: Running::of(child),
            address,
            _sandbox: sandbox,
        }
    }

    /// Status and JSON of the answer to a question.
    fn ask(&self, method: &str, path: &str, body: &str) -> (u16, Value) {
        let mut http = Http::connect_tcp(&self.address).expect("it listens");
        let answer = http.ask(method, path, Some(body)).expect("an answer");
        let body = serde_json::from_str(&answer.body).unwrap_or(Value::Null);
        (answer.status, body)
    }

    pub fn post(&self, path: &str, body: &Value) -> Value {
        let (status, answer) = self.ask("POST", path, &body.to_string());
        assert_eq!(status, 200, "{answer}");
        answer
    }

    /// Puts a node with these devices.
    pub fn node(&self, name: &str, devices: &str) {
        let annotations = json!({"sublet.dev/devices": devices});
        let node = json!({"metadata": {"name": name, "annotations": annotations}});
        self.api.put(&format!("/api/v1/nodes/{name}"), node);
    }

    /// Puts a pod that waits, and returns what asks for a place for it.
    pub fn pod(&self, name: &str, gib: u32, share: Option<&str>) -> Value {
        let mut args: Value = serde_json::from_str(ARGS).expect("JSON");
        let pod = &mut args["Pod"];
        pod["metadata"]["name"] = json!(name);
        pod["metadata"]["uid"] = json!(format!("uid-of-{name}"));
        pod["metadata"]["annotations"] = match share {
            Some(share) => json!({"sublet.dev/share": share}),
            None => json!({}),
        };
        let limits = json!({"sublet.dev/gpu-mem-gib": gib.to_string()});
        pod["spec"]["containers"][0]["resources"]["limits"] = limits;
        self.api.put(&path(name), pod.clone());
        args
    }

    pub fn bind(&self, name: &str, node: &str) -> Result<Value, String> {
        let asked = json!({
            "PodName": name, "PodNamespace": "default",
            "PodUID": format!("uid-of-{name}"), "Node": node,
        });
        let answer = self.post("/bind", &asked);
        match answer["Error"].as_str().expect("text") {
            "" => Ok(self.api.get(&path(name)).expect("the pod")),
            error => Err(error.to_owned()),
        }
    }
}

fn path(name: &str) -> String {
    format!("/api/v1/namespaces/default/pods/{name}")
}

const TWO: &str = r#"[{"uuid":"GPU-a","gib":80},{"uuid":"GPU-b","gib":80}]"#;
const ONE: &str = r#"[{"uuid":"GPU-c","gib":40}]"#;

#[test]
fn pods_go_where_memory_and_time_are_left() {
    let extender = Extender::start();
    extender.node("n1", TWO);
    extender.node("n2", ONE);
    let args = extender.pod("first", 60, Some("0.5"));
    let filtered = extender.post("/filter", &args);
    assert_eq!(filtered["NodeNames"], json!(["n1"]));
    let why = filtered["FailedNodes"]["n2"].as_str().expect("a reason");
    assert!(
        why.contains("GPU-c has 40 GiB free of 40, and 60 are asked for"),
        "{why}"
    );
    let why = filtered["FailedNodes"]["n3"].as_str().expect("a reason");
    assert!(why.contains("node n3 has no sublet.dev/devices"), "{why}");
    assert_eq!(filtered["Error"], "");

    let args = extender.pod("second", 30, Some("0.6"));
    let scores = extender.post("/prioritize", &args);
    let score = |host: &str| {
        let all = scores.as_array().expect("a list");
        let one = all.iter().find(|one| one["Host"] == host).expect("a host");
        one["Score"].as_i64().expect("a number")
    };
    assert!(score("n2") > score("n1") && score("n3") == 0, "{scores}");
    assert!((0..=10).contains(&score("n2")), "{scores}");

    let pod = extender.bind("first", "n1").expect("bound");
    assert_eq!(pod["spec"]["nodeName"], "n1");
    assert_eq!(pod["metadata"]["annotations"]["sublet.dev/gpu"], "GPU-a");
    let reason = &pod["metadata"]["annotations"]["sublet.dev/decision"];
    assert!(
        reason
            .as_str()
            .expect("text")
            .contains("20 of 80 GiB stay free"),
        "{reason}"
    );
    // 20 GiB and half of the time are left of GPU-a, all of GPU-b.
    let pod = extender.bind("second", "n1").expect("bound");
    assert_eq!(pod["metadata"]["annotations"]["sublet.dev/gpu"], "GPU-b");
    extender.pod("third", 50, Some("0.1"));
    extender
        .bind("third", "n1")
        .expect("bound beside the second one");
    let args = extender.pod("fourth", 20, Some("0.6"));
    let filtered = extender.post("/filter", &args);
    assert_eq!(
        filtered["NodeNames"],
        json!(["n2"]),
        "no time is left on n1"
    );
    let error = extender.bind("fourth", "n1").expect_err("refused");
    assert!(
        error.contains("share of 0.5 free, and 0.6 is asked for"),
        "{error}"
    );
    // It was not bound, so nothing of it is counted.
    extender.bind("fourth", "n2").expect("bound");
    let bindings = extender.api.changes().into_iter();
    let bindings = bindings.filter(|(_, path, _)| path.ends_with("/binding"));
    assert_eq!(bindings.count(), 4);
}

#[test]
fn what_a_pod_leaves_is_there_for_the_next_question() {
    let extender = Extender::start();
    extender.node("n1", ONE);
    let mut asked = 0;
    let mut waits = |name: &str| {
        asked += 1;
        let args = extender.pod(&format!("{name}-{asked}"), 30, Some("0.6"));
        extender.post("/filter", &args)["NodeNames"] == json!([])
    };
    for at in 0..4 {
        let name = format!("pod-{at}");
        extender.pod(&name, 30, Some("0.6"));
        extender.bind(&name, "n1").expect("what the one before had");
        // Deleted at once, with and without a look between.
        assert!(at == 1 || waits("beside"), "no memory is left");
        extender.api.remove(&path(&name));
        assert!(at == 2 || !waits("after"), "the memory is free again");
    }
}

/// What the extender has written on a pod of its waiting.
fn is_notified(extender: &Extender, name: &str) -> Option<String> {
    let pod = extender.api.get(&path(name)).expect("the pod");
    let said = pod["metadata"]["annotations"]["sublet.dev/decision"].as_str()?;
    Some(said.to_owned()).filter(|said| said.starts_with("waits; "))
}

#[test]
fn a_scheduler_hears_that_there_is_space_for_a_pod_that_waits() {
    let extender = Extender::start();
    extender.node("n1", ONE);
    extender.pod("large", 30, Some("0.6"));
    extender.bind("large", "n1").expect("bound");
    let args = extender.pod("waits", 30, Some("0.6"));
    assert_eq!(extender.post("/filter", &args)["NodeNames"], json!([]));
    extender.pod("other", 41, None);
    // It fits nowhere, as long as it waits: nothing is written on it.
    let none = extender.pod("never", 99, None);
    assert_eq!(extender.post("/filter", &none)["NodeNames"], json!([]));
    // A question may be anybody's: names that would leave their path are asked about nowhere.
    for (at, name) in [("name", "../../nodes/n1"), ("namespace", "..")] {
        let mut forged = extender.pod("forged", 30, Some("0.6"));
        forged["Pod"]["metadata"][at] = json!(name);
        forged["Pod"]["metadata"]["uid"] = json!(format!("uid-of-{name}"));
        assert_eq!(extender.post("/filter", &forged)["NodeNames"], json!([]));
    }
    // A change that a scheduler learns nothing of.
    extender.node("n1", TWO);
    let said = tests::wait_until("its scheduler is to ask again", || {
        is_notified(&extender, "waits")
    });
    assert!(said.contains("n1 has space"), "{said}");
    assert_eq!(is_notified(&extender, "never"), None);
    let changes = extender.api.changes().into_iter();
    let astray = changes.filter(|(_, path, _)| path.contains("..") || path.contains("forged"));
    assert_eq!(astray.count(), 0);
    let pod = extender.bind("waits", "n1").expect("bound");
    let reason = &pod["metadata"]["annotations"]["sublet.dev/decision"];
    assert!(
        reason.as_str().expect("text").contains("stay free"),
        "{reason}"
    );
}

#[test]
fn pods_that_asked_while_nobody_answered_are_asked_about_again() {
    let first = Extender::start();
    first.node("n1", ONE);
    first.pod("bound", 10, None);
    first.bind("bound", "n1").expect("bound");
    first.pod("unplaced", 10, None);
    let mut plain = first.pod("plain", 1, None);
    plain["Pod"]["spec"]["containers"][0]["resources"] = json!({});
    first.api.put(&path("plain"), plain["Pod"].clone());
    let before = first.api.get(&path("bound"));
    // Another one, beside it, and at a time at which the server is away.
    first.api.is_away(true);
    let _second = Extender::beside(first.api.clone(), &[]);
    first.api.is_away(false);
    let said = tests::wait_until("its scheduler is to ask again", || {
        is_notified(&first, "unplaced")
    });
    assert!(said.contains("the extender has started"), "{said}");
    assert_eq!(is_notified(&first, "plain"), None);
    assert_eq!(first.api.get(&path("bound")), before);
}

#[test]
fn a_pod_that_may_not_be_changed_keeps_nobody_from_hearing_and_nobody_hears_twice() {
    let first = Extender::start();
    first.node("n1", ONE);
    for name in ["a", "locked", "z"] {
        first.pod(name, 10, None);
    }
    first.api.refuses("/pods/locked");
    let _second = Extender::beside(first.api.clone(), &[]);
    for name in ["a", "z"] {
        tests::wait_until("its scheduler is to ask again", || {
            is_notified(&first, name)
        });
    }
    assert_eq!(is_notified(&first, "locked"), None);
    // It would be notified again within a second.
    std::thread::sleep(std::time::Duration::from_millis(2500));
    let changes = first.api.changes().into_iter();
    let of_a = changes.filter(|(method, at, _)| method == "PATCH" && *at == path("a"));
    assert_eq!(of_a.count(), 1);
}

#[test]
fn reasons_of_many_nodes_are_few_lines() {
    let extender = Extender::start();
    let mut args = extender.pod("large", 60, Some("0.5"));
    let names: Vec<String> = (0..50).map(|at| format!("n{at}")).collect();
    for (at, name) in names.iter().enumerate() {
        // A device of a name of its own, as all GPUs have.
        extender.node(
            name,
            &format!(r#"[{{"uuid":"GPU-{at}","gib":{}}}]"#, at % 50),
        );
    }
    args["NodeNames"] = json!(names);
    args["NodeNames"]
        .as_array_mut()
        .expect("a list")
        .push(json!("bare"));
    let filtered = extender.post("/filter", &args);
    let failed = filtered["FailedNodes"].as_object().expect("reasons");
    assert_eq!(failed.len(), 51);
    let lines: std::collections::BTreeSet<&str> =
        failed.values().filter_map(Value::as_str).collect();
    assert_eq!(
        lines.into_iter().collect::<Vec<_>>(),
        [
            "no GPU with 60 GiB free",
            "no sublet.dev/devices: no device plugin runs there"
        ],
    );
}

#[test]
fn pods_without_a_wish_pass_and_those_with_nonsense_say_why() {
    let extender = Extender::start();
    extender.node("n1", TWO);
    let mut args = extender.pod("plain", 1, None);
    args["Pod"]["spec"]["containers"][0]["resources"] = json!({});
    let filtered = extender.post("/filter", &args);
    assert_eq!(
        filtered["NodeNames"], args["NodeNames"],
        "no GPU is asked for"
    );
    extender.api.put(&path("plain"), args["Pod"].clone());
    let error = extender.bind("plain", "n1").expect_err("not ours");
    assert!(
        error.contains("asks for no sublet.dev/gpu-mem-gib"),
        "{error}"
    );
    let bound = &extender.api.get(&path("plain")).expect("the pod")["spec"]["nodeName"];
    assert_eq!(bound, &Value::Null);
    let mut args = extender.pod("two", 1, None);
    let one = args["Pod"]["spec"]["containers"][0].clone();
    let containers = &mut args["Pod"]["spec"]["containers"];
    containers.as_array_mut().expect("a list").push(one);
    let filtered = extender.post("/filter", &args);
    let why = &filtered["FailedAndUnresolvableNodes"]["n1"];
    assert!(
        why.as_str().expect("a reason").contains("2 containers"),
        "{why}"
    );
    let args = extender.pod("unsaid", 1, None);
    assert_eq!(
        extender.post("/filter", &args)["NodeNames"],
        json!(["n1"]),
        "no annotation"
    );
    let args = extender.pod("wrong", 1, Some("a lot"));
    let filtered = extender.post("/filter", &args);
    assert_eq!(filtered["NodeNames"], json!([]));
    let why = filtered["FailedAndUnresolvableNodes"]["n1"]
        .as_str()
        .expect("a reason");
    assert!(why.contains("`a lot`"), "{why}");
    // Schedulers before 1.21 read nothing else.
    assert_eq!(filtered["FailedNodes"]["n1"], why);

    // Nodes as objects, where the scheduler does not cache them.
    let mut args = extender.pod("objects", 1, None);
    let items = json!([{"metadata": {"name": "n1"}}, {"metadata": {"name": "n2"}}]);
    args["Nodes"] = json!({"kind": "NodeList", "items": items});
    args["NodeNames"] = Value::Null;
    let filtered = extender.post("/filter", &args);
    assert_eq!(
        filtered["Nodes"]["items"],
        json!([{"metadata": {"name": "n1"}}])
    );
    assert_eq!(filtered["NodeNames"], Value::Null);
    assert_eq!(filtered["Nodes"]["kind"], "NodeList");
}

#[test]
fn a_pod_that_is_bound_already_keeps_its_node_and_its_gpu() {
    let extender = Extender::start();
    extender.node("n1", TWO);
    extender.node("n2", ONE);
    extender.pod("p", 10, Some("0.5"));
    let bound = extender.bind("p", "n1").expect("bound");
    let changes = extender.api.changes().len();
    let error = extender.bind("p", "n2").expect_err("it is on n1");
    assert!(
        error.contains("is bound to n1 already, and not to n2"),
        "{error}"
    );
    // A scheduler that has missed the answer asks again.
    assert_eq!(extender.bind("p", "n1"), Ok(bound));
    let later = extender.api.changes().into_iter().skip(changes);
    let written = later.filter(|(_, path, _)| path.contains("/pods/"));
    assert_eq!(written.count(), 0, "nothing of it is written anew");
}

#[test]
fn a_bind_ends_in_time_and_is_not_carried_out_later() {
    let extender = Extender::with(&["--timeout", "300ms"]);
    extender.node("n1", ONE);
    for (name, held) in [
        ("a", "/pods/a"),
        ("b", "/api/v1/nodes"),
        ("c", "/api/v1/pods?"),
        ("d", "/pods/d/binding"),
    ] {
        extender.pod(name, 1, None);
        extender.api.holds(held);
        tests::wait_until("what is held is asked for", || {
            let error = extender.bind(name, "n1").err();
            // The last look at the cluster may be fresh.
            let Some(error) = error else {
                extender.pod(name, 1, None);
                return None;
            };
            assert!(error.starts_with("not bound within 300 ms: "), "{error}");
            Some(())
        });
        let pod = extender.api.get(&path(name)).expect("the pod");
        assert_eq!(pod["spec"]["nodeName"], Value::Null, "{name}");
        extender.api.holds("");
    }
}

#[test]
fn an_event_that_takes_its_time_delays_no_bind() {
    let extender = Extender::with(&["--timeout", "60s"]);
    extender.node("n1", TWO);
    extender.api.holds("/events");
    for name in ["a", "b"] {
        extender.pod(name, 1, None);
        extender.bind(name, "n1").expect("bound");
    }
    // Both binds are answered, and the first event's question still stands.
    extender.api.holds("");
    tests::wait_until("the events are written", || {
        let events = extender.api.made("/api/v1/namespaces/default/events");
        let of = |at: usize| events.get(at)?["involvedObject"]["name"].as_str();
        (of(0) == Some("a") && of(1) == Some("b")).then_some(())
    });
}

#[test]
fn bad_questions_are_answered_and_the_next_one_too() {
    let mut extender = Extender::start();
    extender.node("n1", ONE);
    for (method, path, body, status) in [
        ("POST", "/filter", "{\"Pod\":", 400),
        ("POST", "/filter", "[1]", 400),
        ("POST", "/bind", "{\"PodName\":7}", 400),
        ("POST", "/nothing", "{}", 404),
        ("DELETE", "/filter", "{}", 405),
        ("GET", "/healthz", "", 200),
    ] {
        let (got, answer) = extender.ask(method, path, body);
        assert_eq!(got, status, "{method} {path}: {answer}");
    }
    let answer = extender.post("/filter", &json!({}));
    assert!(
        answer["Error"]
            .as_str()
            .expect("text")
            .contains("names no pod")
    );
    for (name, value) in [("PodNamespace", "../.."), ("Node", "n1?x"), ("PodName", "")] {
        let mut asked = json!({"PodName": "p", "PodNamespace": "d", "PodUID": "u", "Node": "n1"});
        asked[name] = json!(value);
        let error = extender.post("/bind", &asked)["Error"].to_string();
        assert!(error.contains("invalid "), "{error}");
    }
    let mut http = Http::connect_tcp(&extender.address).expect("it listens");
    http.send(b"POST /filter HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999999\r\n\r\n")
        .expect("sent");
    assert_eq!(http.head().expect("an answer").status, 413);

    // A decision for a device that vanished, a pod made anew, an API server that is away.
    let args = extender.pod("p", 10, None);
    extender.node("n1", "[]");
    tests::wait_until("the extender has seen it", || {
        let filtered = extender.post("/filter", &args);
        (filtered["NodeNames"] == json!([])).then_some(())
    });
    let error = extender.bind("p", "n1").expect_err("vanished");
    assert!(error.contains("no device has the memory"), "{error}");
    extender.node("n1", "not JSON");
    extender.api.is_away(true);
    let error = extender.bind("p", "n1").expect_err("away");
    assert!(error.contains("does not answer"), "{error}");
    extender.api.is_away(false);
    extender.node("n1", ONE);
    tests::wait_until("it decides again", || extender.bind("p", "n1").ok());
    let mut again = extender.pod("p", 10, None)["Pod"].clone();
    again["metadata"]["uid"] = json!("another");
    extender.api.put(&path("p"), again);
    let error = extender.bind("p", "n1").expect_err("made anew");
    assert!(error.contains("is another now"), "{error}");
    assert!(!extender.process.has_ended());
}

#[test]
fn over_https_the_scheduler_is_answered_and_a_renewed_certificate_needs_no_restart() {
    let place = Sandbox::new();
    let (certificate, key) = (place.path("tls.crt"), place.path("tls.key"));
    testbed::tls::write_server(0, &certificate, &key);
    let path = |path: &std::path::Path| path.to_str().expect("UTF-8").to_owned();
    let words = [
        "--tls-cert".to_owned(),
        path(&certificate),
        "--tls-key".to_owned(),
        path(&key),
    ];
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let extender = Extender::with(&words);
    extender.node("n1", TWO);
    let args = extender.pod("first", 60, Some("0.5"));
    let address = extender.address.parse().expect("an address");
    let mut http = testbed::tls::connect(address).expect("a handshake");
    let answer = http.ask("POST", "/filter", Some(&args.to_string()));
    let answer: Value = serde_json::from_str(&answer.expect("an answer").body).expect("JSON");
    assert_eq!(answer["NodeNames"], json!(["n1"]));
    // Go's client may be set up to speak no newer version.
    let old = testbed::tls::connect_with(address, &[&testbed::tls::TLS12], &[b"http/1.1"]);
    old.expect("TLS 1.2");
    let shown = || {
        let versions = [&testbed::tls::TLS13];
        let stream = testbed::tls::connect_with(address, &versions, &[]).expect("a handshake");
        stream.conn.peer_certificates().expect("a certificate")[0].to_vec()
    };
    assert_eq!(shown(), testbed::tls::certificate(0));
    testbed::tls::write_server(1, &certificate, &key);
    tests::wait_until("the new certificate is shown", || {
        (shown() == testbed::tls::certificate(1)).then_some(())
    });
    // The connection from before goes on.
    let answer = http.ask("GET", "/healthz", None).expect("an answer");
    assert_eq!(answer.status, 200);
}
