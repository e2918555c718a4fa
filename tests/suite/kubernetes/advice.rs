//! The scheduler extender with a cluster hook: it asks a real one where a pod should go.

use std::net::TcpListener;

use serde_json::{Value, json};
use tests::wait_until;

use super::scheduler::Extender;
use crate::cluster::{Hook, Node};

const EVENTS: &str = "/api/v1/namespaces/default/events";

/// More than a busy machine needs.
const UNHURRIED: [&str; 6] = [
    "--timeout",
    "60s",
    "--hook-timeout",
    "20s",
    "--hook-connect-timeout",
    "10s",
];

/// An extender that asks this hook.
fn extender(hook: &Hook) -> Extender {
    let file = hook.token_file();
    let token = file.to_str().expect("UTF-8");
    let words = ["--cluster", &hook.url(), "--token-file", token];
    Extender::with(&[&words[..], &UNHURRIED].concat())
}

/// Nodes that report, and are in the API server with their first device.
fn nodes<const N: usize>(hook: &Hook, extender: &Extender, names: [&str; N]) -> [Node; N] {
    let nodes = names.map(|name| hook.node(name));
    wait_until("the nodes report their devices", || {
        nodes.iter().all(|node| hook.is_up(node)).then_some(())
    });
    for name in names {
        extender.node(name, &devices(hook, name));
    }
    nodes
}

/// What a device plugin writes of a node's devices.
fn devices(hook: &Hook, name: &str) -> String {
    let status = hook.json(&["status", "--json"]);
    let all = status["nodes"].as_array().cloned().unwrap_or_default();
    let node = all.iter().find(|node| node["name"] == name);
    let devices = node.and_then(|node| node["devices"].as_array());
    let devices = devices.into_iter().flatten();
    let devices: Vec<Value> = devices
        .map(|device| {
            let bytes = device["total_bytes"].as_u64().expect("bytes");
            json!({"uuid": device["uuid"], "gib": bytes >> 30})
        })
        .collect();
    assert!(!devices.is_empty(), "{status}");
    json!(devices).to_string()
}

/// The question about a pod, with these nodes.
fn question(extender: &Extender, name: &str, kind: &str, nodes: &[&str]) -> Value {
    let mut args = extender.pod(name, 1, Some("0.2"));
    let path = format!("/api/v1/namespaces/default/pods/{name}");
    let mut pod = extender.api.get(&path).expect("the pod");
    pod["metadata"]["annotations"]["sublet.dev/kind"] = json!(kind);
    extender.api.put(&path, pod.clone());
    args["Pod"] = pod;
    args["NodeNames"] = json!(nodes);
    args
}

fn annotation<'a>(pod: &'a Value, name: &str) -> Option<&'a str> {
    pod["metadata"]["annotations"][format!("sublet.dev/{name}")].as_str()
}

fn scores(extender: &Extender, args: &Value) -> Vec<(String, i64)> {
    let scores = extender.post("/prioritize", args);
    let scores = scores.as_array().expect("a list").iter();
    let one = |one: &Value| Some((one["Host"].as_str()?.to_owned(), one["Score"].as_i64()?));
    scores.filter_map(one).collect()
}

#[test]
fn pods_go_where_the_hook_wants_them_and_by_fit_while_it_is_away() {
    let mut hook = Hook::new();
    let extender = extender(&hook);
    let [_n1, mut n2] = nodes(&hook, &extender, ["n1", "n2"]);
    let both = ["n1", "n2"];

    // The tightest fit is beside the first one; the hook wants the second one alone.
    question(&extender, "first", "resnet", &both);
    extender.bind("first", "n1").expect("bound");
    let args = question(&extender, "second", "bert", &both);
    let filtered = extender.post("/filter", &args);
    assert_eq!(filtered["NodeNames"], json!(both), "{filtered}");
    let given = scores(&extender, &args);
    assert_eq!(given[1], ("n2".into(), 10), "{given:?}");
    assert!((1..=5).contains(&given[0].1), "{given:?}");
    let pod = extender.bind("second", "n2").expect("bound");
    assert_eq!(annotation(&pod, "expected-slowdown"), Some("1.00"));
    assert_eq!(annotation(&pod, "confidence"), Some("1.00"));
    let decision = annotation(&pod, "decision").expect("a decision");
    assert!(decision.ends_with("alone on the device"), "{decision}");

    // The scheduler may take another node: then the hook chooses there, and says what it costs.
    question(&extender, "third", "bert", &both);
    let pod = extender.bind("third", "n1").expect("bound");
    let slowdown: f64 = annotation(&pod, "expected-slowdown")
        .and_then(|text| text.parse().ok())
        .expect("a slowdown");
    assert!(slowdown > 1.0, "{pod}");
    let decision = annotation(&pod, "decision").expect("a decision");
    assert!(decision.contains("beside resnet"), "{decision}");
    // They are written after the answers.
    let event = |number: usize| {
        wait_until("the event is written", || {
            let events = extender.api.made(EVENTS);
            assert!(events.len() <= number, "{events:?}");
            events.get(number - 1).cloned()
        })
    };
    let last = event(3);
    assert_eq!(last["type"], "Normal");
    assert_eq!(last["involvedObject"]["uid"], "uid-of-third");
    let message = last["message"].as_str().expect("text");
    let said = format!("expected slowdown {slowdown:.2} (confidence ");
    assert!(
        message.contains(&said) && message.contains(decision),
        "{message}"
    );

    // Without the hook: by fit, and the pod says so. What an earlier decision left there goes.
    hook.kill();
    let mut args = question(&extender, "fourth", "bert", &both);
    args["Pod"]["metadata"]["annotations"]["sublet.dev/expected-slowdown"] = json!("9.00");
    let path = "/api/v1/namespaces/default/pods/fourth";
    extender.api.put(path, args["Pod"].clone());
    assert_eq!(extender.post("/filter", &args)["NodeNames"], json!(both));
    let given = scores(&extender, &args);
    assert!(given[0].1 > given[1].1, "n1 has less left: {given:?}");
    let pod = extender.bind("fourth", "n1").expect("bound");
    let decision = annotation(&pod, "decision").expect("a decision");
    let away = format!("by fit alone (the hook at {} is not reached: ", hook.url());
    assert!(decision.starts_with(&away), "{decision}");
    assert!(decision.contains("fits most tightly"), "{decision}");
    assert_eq!(annotation(&pod, "expected-slowdown"), None, "{pod}");
    let last = event(4);
    assert_eq!(
        (&last["type"], &last["reason"]),
        (&json!("Warning"), &json!("PlacedByFit"))
    );

    // It is back, and asked again.
    hook.start();
    wait_until("the nodes report again", || hook.is_up(&n2).then_some(()));
    wait_until("the hook is asked again", || {
        question(&extender, "again", "bert", &both);
        let pod = extender.bind("again", "n2").expect("bound");
        annotation(&pod, "expected-slowdown").map(|_| ())
    });

    // A node that Kubernetes still counts on, and that reports to the hook no more.
    n2.stop();
    let args = question(&extender, "fifth", "bert", &both);
    wait_until("the hook misses the node", || {
        let filtered = extender.post("/filter", &args);
        let why = filtered["FailedNodes"]["n2"].as_str()?;
        assert_eq!(why, "the hook says: its node is silent");
        assert_eq!(filtered["NodeNames"], json!(["n1"]));
        Some(())
    });
}

#[test]
fn a_pod_waits_where_the_hook_lets_it_wait_and_says_why() {
    let hook = Hook::with(&["--packer", "none"]);
    let extender = extender(&hook);
    let _nodes = nodes(&hook, &extender, ["n1", "n2", "n3"]);
    let free = extender.api.get("/api/v1/nodes/n3").expect("a node");
    extender.api.remove("/api/v1/nodes/n3");
    for name in ["n1", "n2"] {
        question(&extender, name, "bert", &[name]);
        extender
            .bind(name, name)
            .expect("bound: the device is free");
    }
    let args = question(&extender, "third", "bert", &["n1", "n2"]);
    let filtered = extender.post("/filter", &args);
    assert_eq!(filtered["NodeNames"], json!([]), "{filtered}");
    let why = filtered["FailedNodes"]["n1"].as_str().expect("a reason");
    assert!(why.starts_with("the hook lets it wait: "), "{why}");
    // A node that was refused for it at the last moment is not proposed again at once.
    extender.api.put("/api/v1/nodes/n3", free);
    let args = question(&extender, "third", "bert", &["n1", "n3"]);
    wait_until("it can go to the free node, and there only", || {
        let error = extender.bind("third", "n1").expect_err("it is taken");
        assert!(error.starts_with("the hook lets it wait: "), "{error}");
        let filtered = extender.post("/filter", &args);
        let why = filtered["FailedNodes"]["n1"].as_str().expect("a reason");
        assert!(why.starts_with("the hook lets it wait: "), "{why}");
        (filtered["NodeNames"] == json!(["n3"])).then_some(())
    });
    extender.bind("third", "n3").expect("bound");
}

#[test]
fn a_hook_that_is_none_or_never_answers_keeps_no_pod_from_its_place() {
    let hook = Hook::new();
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
    let silent = format!("http://{}", silent.local_addr().expect("an address"));
    let other = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(other.path(), "another-token-of-enough-length-0123456789").expect("written");
    let other = other.path().to_str().expect("UTF-8");
    let own = hook.token_file();
    let own = own.to_str().expect("UTF-8");
    for (url, token, why) in [
        (silent.as_str(), own, "does not prove within 150 ms"),
        (&hook.url(), other, "does not know the token"),
    ] {
        let mut words = vec!["--cluster", url, "--token-file", token];
        words.extend(UNHURRIED);
        if url == silent {
            // Of a hook that is silent nobody waits for an answer.
            let at = words.len() - 1;
            words[at] = "150ms";
        }
        let extender = Extender::with(&words);
        extender.node("n1", r#"[{"uuid":"GPU-a","gib":80}]"#);
        let args = question(&extender, "p", "bert", &["n1"]);
        assert_eq!(extender.post("/filter", &args)["NodeNames"], json!(["n1"]));
        let pod = extender.bind("p", "n1").expect("bound");
        let decision = annotation(&pod, "decision").expect("a decision");
        assert!(
            decision.starts_with("by fit alone (") && decision.contains(why),
            "{decision}"
        );
        assert_eq!(annotation(&pod, "gpu"), Some("GPU-a"));
    }
}
