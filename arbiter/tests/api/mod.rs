//! The API over a real socket, with a real arbiter: every operation, bad input of every kind, slow
//! and greedy clients, followers of the journal.

mod bad_input;
mod clients;
mod followers;
mod tcp;

use control::{Acquire, Client, SliceMode};
use serde_json::{Value, json};
use testbed::http::{Answer, Http};

use crate::bench::{Daemon, attach, named};

fn connect(daemon: &Daemon) -> Http {
    Http::connect(&daemon.dir.api_socket()).expect("connected")
}

fn get(daemon: &Daemon, path: &str) -> Value {
    let answer = connect(daemon).ask("GET", path, None).expect("answered");
    assert_eq!(answer.status, 200, "{path}: {answer:?}");
    serde_json::from_str(&answer.body).expect("JSON")
}

/// Every operation of the document, as method and path.
fn operations() -> Vec<(String, String)> {
    let document: Value = serde_json::from_str(&arbiter::api::openapi::DOCUMENT).expect("JSON");
    let paths = document["paths"].as_object().expect("paths");
    let mut all = Vec::new();
    for (path, methods) in paths {
        for method in methods.as_object().expect("methods").keys() {
            all.push((method.to_uppercase(), path.clone()));
        }
    }
    all
}

/// A request that makes sense for each operation, once there is a job `a` on a device that has the
/// turn of its group ([`take_turn`]).
fn sensible(method: &str, path: &str) -> (String, Option<Value>) {
    let body = match (method, path) {
        ("POST", "/v1/jobs") => Some(json!({"name": "b", "simulated": true, "share": 0.25})),
        ("PATCH", "/v1/jobs/{job}") => Some(json!({"share": 0.5})),
        ("PATCH", _) => Some(json!({"quantum": "9ms"})),
        ("POST", "/v1/jobs/{job}/acquire") => Some(json!({"group": "turns", "timeout_ms": 60_000})),
        ("POST", "/v1/jobs/{job}/yield") => Some(json!({"group": "turns"})),
        ("POST", "/v1/moves") => Some(json!({"evict": ["a"]})),
        ("POST", "/v1/hook-refusals") => {
            Some(json!({"hook": "http://127.0.0.1:1", "reason": "another"}))
        }
        _ => None,
    };
    let path = path.replace("{job}", "a").replace("{device}", "0");
    (path.replace("{group}", "turns"), body)
}

/// Gives job `a` the turn of the group that requests are about.
fn take_turn(operator: &mut Client) {
    let acquire = Acquire {
        group: "turns".into(),
        timeout_ms: 60_000,
    };
    let acquired = operator.acquire("a", &acquire).expect("served");
    assert!(acquired.acquired, "{acquired:?}");
}

/// An error as every error is.
#[track_caller]
fn error_of(answer: &Answer) -> Value {
    let body: Value =
        serde_json::from_str(&answer.body).unwrap_or_else(|_| panic!("no JSON: {answer:?}"));
    let fields: Vec<&String> = body.as_object().expect("an object").keys().collect();
    assert_eq!(fields, ["error"], "{answer:?}");
    for field in ["code", "message", "hint"] {
        assert!(body["error"][field].is_string(), "{answer:?}");
    }
    let message = body["error"]["message"].as_str().expect("a text");
    assert!(!message.is_empty() && !message.contains('\n'), "{message}");
    assert!(message.chars().count() <= 1000, "{message}");
    body["error"].clone()
}

#[test]
fn every_operation_answers_as_the_document_says() {
    let daemon = Daemon::start();
    let mut operator = daemon.operator();
    let job = operator.register(named("a", 0.5)).expect("registered");
    let _client = attach(&job);
    take_turn(&mut operator);
    let document: Value = serde_json::from_str(&arbiter::api::openapi::DOCUMENT).expect("JSON");
    let mut http = connect(&daemon);
    let mut all = operations();
    // The end is the last.
    all.sort_by_key(|(_, path)| path == "/v1/shutdown");
    assert_eq!(all.len(), 22);
    for (method, path) in &all {
        if path == "/v1/events/stream" {
            // It has tests of its own, and no end.
            continue;
        }
        let (asked, body) = sensible(method, path);
        let body = body.map(|body| body.to_string());
        let answer = http.ask(method, &asked, body.as_deref());
        let answer = answer.unwrap_or_else(|error| panic!("{method} {path}: {error}"));
        assert_eq!(answer.field("content-type"), Some("application/json"));
        assert_eq!(answer.field("cache-control"), Some("no-store"));
        let operation = &document["paths"][path][method.to_lowercase()];
        if path == "/v1/moves" || path == "/v1/reload" {
            // It is not evictable; this arbiter was not started from files.
            let error = error_of(&answer);
            assert!(
                matches!(answer.status, 409 | 501),
                "{method} {path}: {error}"
            );
            continue;
        }
        let described = &operation["responses"][answer.status.to_string()];
        assert!(described.is_object(), "{method} {path}: {answer:?}");
        let value: Value = serde_json::from_str(&answer.body).expect("JSON");
        let schema = &described["content"]["application/json"]["schema"];
        fits(&value, schema, &document, &format!("{method} {path}"));
    }
    // It was answered, and then it ended.
    crate::bench::until("the sockets are gone", || {
        (!daemon.dir.api_socket().exists()).then_some(())
    });
}

/// Whether a value is what its schema says: types, and no field that the schema does not have.
#[track_caller]
fn fits(value: &Value, schema: &Value, document: &Value, at: &str) {
    if let Some(target) = schema["$ref"].as_str() {
        let pointer = target.strip_prefix('#').expect("into the document");
        return fits(
            value,
            document.pointer(pointer).expect("there"),
            document,
            at,
        );
    }
    for word in ["oneOf", "anyOf"] {
        if let Some(choices) = schema[word].as_array() {
            let fit = choices.iter().any(|one| could_be(value, one, document));
            assert!(fit, "{at}: {value} is none of {choices:?}");
            return;
        }
    }
    assert!(
        could_be(value, schema, document),
        "{at}: {value} is no {schema}"
    );
    if let (Some(fields), Some(properties)) = (value.as_object(), schema["properties"].as_object())
    {
        for (name, value) in fields {
            let schema = properties.get(name);
            let schema = schema.unwrap_or_else(|| panic!("{at}: `{name}` is not described"));
            fits(value, schema, document, &format!("{at}.{name}"));
        }
    }
    if let Some(items) = value.as_array()
        && schema["items"].is_object()
    {
        for (number, item) in items.iter().enumerate() {
            fits(item, &schema["items"], document, &format!("{at}[{number}]"));
        }
    }
}

fn could_be(value: &Value, schema: &Value, document: &Value) -> bool {
    if let Some(target) = schema["$ref"].as_str() {
        let pointer = target.strip_prefix('#').expect("into the document");
        return could_be(value, document.pointer(pointer).expect("there"), document);
    }
    if let Some(words) = schema["enum"].as_array() {
        return words.contains(value);
    }
    let is = |name: &Value| match name.as_str() {
        Some("null") => value.is_null(),
        Some("boolean") => value.is_boolean(),
        Some("integer") => value.is_u64() || value.is_i64(),
        Some("number") => value.is_number(),
        Some("string") => value.is_string(),
        Some("array") => value.is_array(),
        Some("object") => value.is_object(),
        _ => true,
    };
    match &schema["type"] {
        Value::Array(kinds) => kinds.iter().any(is),
        kind => is(kind),
    }
}

#[test]
fn what_the_client_hears_is_what_is_said_over_http() {
    let daemon = Daemon::start();
    let mut operator = daemon.operator();
    let registered = connect(&daemon)
        .ask(
            "POST",
            "/v1/jobs",
            Some(r#"{"name": "a", "simulated": true, "mem": "1GiB"}"#),
        )
        .expect("answered");
    assert_eq!(registered.status, 201, "{registered:?}");
    let registered: control::Registered =
        serde_json::from_str(&registered.body).expect("a registration");
    let _client = attach(&registered);
    let changed = connect(&daemon)
        .ask(
            "PATCH",
            "/v1/jobs/a",
            Some(r#"{"paused": true, "mem": "2GiB"}"#),
        )
        .expect("answered");
    assert_eq!(changed.status, 200, "{changed:?}");
    let [job] = &operator.list().expect("list")[..] else {
        panic!("one job");
    };
    assert!(job.paused);
    assert_eq!(job.mem_limit_bytes, Some(2 << 30));
    assert_eq!(job.name, get(&daemon, "/v1/jobs/a")["name"]);
    let uuid = operator.status().expect("status").devices[0].uuid.clone();
    let path = format!("/v1/devices/{uuid}");
    for mode in [SliceMode::Concurrent, SliceMode::Lend] {
        let body = format!(r#"{{"mode": "{mode}"}}"#);
        let changed = connect(&daemon).ask("PATCH", &path, Some(&body));
        assert_eq!(changed.expect("answered").status, 200);
        let device = &operator.status().expect("status").devices[0];
        assert_eq!((device.mode, device.running), (mode, mode));
        assert_eq!(device.running_reason, "");
        assert_eq!(get(&daemon, "/v1/devices")[0]["mode"], mode.as_str());
    }
    let kinds: Vec<String> = operator
        .events(0, 0)
        .expect("events")
        .into_iter()
        .map(|event| event.kind)
        .collect();
    let events = get(&daemon, "/v1/events");
    let over_http: Vec<&str> = events
        .as_array()
        .expect("a list")
        .iter()
        .filter_map(|event| event["kind"].as_str())
        .collect();
    assert_eq!(kinds, over_http);
    assert_eq!(get(&daemon, "/v1/events?since_seq=1&limit=1")[0]["seq"], 2);
}
