//! Invalid requests: one clear error each, and nothing applied in part.

use std::io::Write;

use serde_json::{Map, Value, json};
use testbed::http::{Answer, Http};

use super::{connect, error_of, get, operations, sensible};
use crate::bench::{Daemon, attach, named, until};

/// A daemon with a job at work, and what nothing that is refused may change.
struct Bench {
    daemon: Daemon,
    before: Value,
    _client: channel::client::ClientEnd,
}

impl Bench {
    fn new() -> Self {
        let daemon = Daemon::start();
        let job = daemon
            .operator()
            .register(named("a", 0.5))
            .expect("registered");
        let client = attach(&job);
        until("its device is known", || {
            (!daemon.operator().status().ok()?.devices.is_empty()).then_some(())
        });
        let before = state(&daemon);
        Self {
            daemon,
            before,
            _client: client,
        }
    }

    fn ask(&self, method: &str, path: &str, body: Option<&str>) -> Answer {
        let answer = connect(&self.daemon).ask(method, path, body);
        answer.unwrap_or_else(|error| panic!("{method} {path} {body:?}: {error}"))
    }

    /// Why it is not refused with this status and these words, or what has changed all the same.
    fn wrong(
        &self,
        (method, path): (&str, &str),
        body: Option<&str>,
        status: u16,
        words: &[&str],
    ) -> Option<String> {
        let answer = self.ask(method, path, body);
        let error = error_of(&answer).to_string();
        let fits = answer.status == status && words.iter().all(|word| error.contains(word));
        let same = state(&self.daemon) == self.before;
        let body: String = body.unwrap_or_default().chars().take(200).collect();
        (!fits || !same).then(|| {
            let status = answer.status;
            format!("{method} {path} {body}: {status} {error}, nothing has changed: {same}")
        })
    }
}

/// What operators can change.
fn state(daemon: &Daemon) -> Value {
    let status = get(daemon, "/v1/status");
    let only = |value: &Value, fields: &[&str]| -> Value {
        let taken = fields
            .iter()
            .map(|name| ((*name).to_owned(), value[*name].clone()));
        Value::Object(Map::from_iter(taken))
    };
    let jobs: Vec<Value> = status["jobs"]
        .as_array()
        .expect("jobs")
        .iter()
        .map(|job| {
            only(
                job,
                &[
                    "name",
                    "paused",
                    "share_asked",
                    "share_min",
                    "share_max",
                    "class",
                    "evicted",
                    "mem_limit_bytes",
                    "deadline_unix_ms",
                    "work_ns",
                    "gang",
                    "resize",
                    "overflow",
                ],
            )
        })
        .collect();
    let devices: Vec<Value> = status["devices"]
        .as_array()
        .expect("devices")
        .iter()
        .map(|device| {
            only(
                device,
                &[
                    "mode",
                    "policy",
                    "quantum_us",
                    "quantum_min_us",
                    "holders_max",
                    "early_wake",
                    "misbehaviour",
                    "set_by_hand",
                ],
            )
        })
        .collect();
    json!({"jobs": jobs, "devices": devices})
}

#[test]
fn what_makes_no_sense_is_one_error_and_nothing_is_applied() {
    let bench = Bench::new();
    let job = ("PATCH", "/v1/jobs/a");
    let all = ("PATCH", "/v1/devices");
    let one = ("PATCH", "/v1/devices/0");
    let new = ("POST", "/v1/jobs");
    let mut wrong = Vec::new();
    for (operation, body, status, words) in [
        // Ranges.
        (job, r#"{"share": 3}"#, 422, &["share", "3"][..]),
        (job, r#"{"share": -0.5}"#, 422, &["share"]),
        (job, r#"{"share": 0}"#, 422, &["share"]),
        (job, r#"{"share": 1e999}"#, 400, &["JSON"]),
        (job, r#"{"mem": "200%"}"#, 422, &["200%"]),
        (job, r#"{"mem": "0B"}"#, 422, &["zero"]),
        (job, r#"{"mem": "9TiB"}"#, 409, &["9TiB"]),
        (
            job,
            r#"{"solo_iteration_us": 18446744073709551616}"#,
            422,
            &["solo_iteration_us"],
        ),
        (job, r#"{"resize": {"to": 70000}}"#, 422, &["70000"]),
        (one, r#"{"holders": 0}"#, 422, &["holders"]),
        (one, r#"{"quantum": "0s"}"#, 422, &["0.5ms to 1s"]),
        // Types.
        (job, r#"{"share": "much"}"#, 422, &["`share`", "much"]),
        (job, r#"{"mem": 7}"#, 422, &["`mem`"]),
        (job, r#"{"paused": "yes"}"#, 422, &["`paused`"]),
        (job, r#"{"class": "best"}"#, 422, &["`class`", "best"]),
        (one, r#"{"mode": "shared"}"#, 422, &["mode", "exclusive"]),
        (
            one,
            r#"{"policy": {"name": "astrology"}}"#,
            422,
            &["astrology"],
        ),
        (
            ("POST", "/v1/moves"),
            r#"{"evict": "a"}"#,
            422,
            &["`evict`"],
        ),
        (
            ("POST", "/v1/moves"),
            r#"{"evict": ["a", 7]}"#,
            422,
            &["`evict`"],
        ),
        (new, r#"{"command": [1]}"#, 422, &["`command`"]),
        // A good field beside a bad one: nothing in part.
        (job, r#"{"paused": true, "share": 3}"#, 422, &["share"]),
        (
            job,
            r#"{"paused": true, "shar": 0.1}"#,
            422,
            &["`shar`", "`share` meant"],
        ),
        (
            job,
            r#"{"paused": true, "on_refusal": "open"}"#,
            422,
            &["on_refusal"],
        ),
        (
            one,
            r#"{"early_wake": false, "mode": "shared"}"#,
            422,
            &["mode"],
        ),
        (
            ("POST", "/v1/moves"),
            r#"{"evict": ["a", "nobody"]}"#,
            409,
            &["not evictable"],
        ),
        // Unknown fields.
        (job, r#"{"colour": "blue"}"#, 422, &["`colour`"]),
        (all, r#"{"colour": "blue"}"#, 422, &["`colour`"]),
        (new, r#"{"colour": "blue"}"#, 422, &["`colour`"]),
        (
            new,
            r#"{"own_file": {"given": {"colour": 1}}}"#,
            422,
            &["own_file.given.colour"],
        ),
        (
            ("POST", "/v1/moves"),
            r#"{"evicts": ["a"]}"#,
            422,
            &["`evict` meant"],
        ),
        (
            ("POST", "/v1/hook-refusals"),
            r#"{"hook": "x", "reason": "y", "z": 1}"#,
            422,
            &["`z`"],
        ),
        (
            ("POST", "/v1/hook-refusals"),
            r#"{"hook": "x"}"#,
            422,
            &["reason"],
        ),
        // Nothing to do.
        (job, "{}", 422, &["nothing to change"]),
        (one, "{}", 422, &["nothing to change"]),
        (("POST", "/v1/moves"), "{}", 422, &["no job"]),
        // Foreign, or nobody.
        (
            ("PATCH", "/v1/jobs/nobody"),
            r#"{"share": 0.5}"#,
            404,
            &["nobody", "running: a"],
        ),
        (
            ("PATCH", "/v1/jobs/%00%0a"),
            r#"{"share": 0.5}"#,
            404,
            &["no job"],
        ),
        (
            ("PATCH", "/v1/jobs/%ff"),
            r#"{"share": 0.5}"#,
            404,
            &["nothing at"],
        ),
        (
            ("PATCH", "/v1/devices/7"),
            r#"{"quantum": "9ms"}"#,
            404,
            &["no device", "7"],
        ),
        (
            ("PATCH", "/v1/devices/gpu"),
            r#"{"quantum": "9ms"}"#,
            404,
            &["gpu"],
        ),
        (new, r#"{"pid": 1}"#, 403, &["process 1"]),
        (new, r#"{"name": "../../etc"}"#, 422, &["../../etc"]),
        (new, r#"{"share": 0.75, "simulated": true}"#, 409, &["0.75"]),
        // No object.
        (job, "[]", 422, &["object"]),
        (job, "null", 422, &["object"]),
        (job, "\"share\"", 422, &["object"]),
        (job, "", 400, &["JSON"]),
        (job, "{\"share\": 0.5", 400, &["JSON"]),
        (job, "share=0.5", 400, &["JSON"]),
        (job, "{\"share\": 0.5} {}", 400, &["JSON"]),
        (job, r#"{"share": 0.5, "share": 0.25}"#, 422, &["duplicate"]),
        // A body where none is taken.
        (("POST", "/v1/reload"), "{}", 400, &["no body"]),
        (
            ("POST", "/v1/shutdown"),
            r#"{"force": true}"#,
            400,
            &["no body"],
        ),
    ] {
        wrong.extend(bench.wrong(operation, Some(body), status, words));
    }
    for (path, status, words) in [
        ("/v1/jobs/nobody", 404, &["nobody"][..]),
        ("/v1/jobs/nobody/profile", 404, &["nobody"]),
        ("/v1/devices/0/timeline?since=3", 400, &["since"]),
        (
            "/v1/devices/0/timeline?limit=-1",
            400,
            &["invalid parameter"],
        ),
        ("/v1/devices/9/timeline", 404, &["9"]),
        ("/v1/devices/x/timeline", 404, &["`x`"]),
        ("/v1/events?since_seq=x", 400, &["invalid parameter"]),
        ("/v1/events?limit=99999999999", 400, &["invalid parameter"]),
        ("/v1/events?colour=blue", 400, &["colour"]),
        ("/v1/events/stream?colour=blue", 400, &["colour"]),
        ("/v1/config?pid=x", 400, &["invalid parameter"]),
        ("/v1/config?pid=4294967295", 404, &["4294967295"]),
        ("/v1/status?verbose=1", 400, &["verbose"]),
        ("/v1/jobs?name=a", 400, &["name=a"]),
        ("/v2/jobs", 404, &["/v2/jobs", "openapi"]),
        ("/v1/jobs/", 404, &["openapi"]),
        ("/", 404, &["openapi"]),
        ("/v1/jobs/../status", 404, &["openapi"]),
    ] {
        wrong.extend(bench.wrong(("GET", path), None, status, words));
    }
    for method in ["PUT", "DELETE", "OPTIONS", "TRACE", "HACK"] {
        wrong.extend(bench.wrong((method, "/v1/jobs"), None, 405, &[method]));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let head = {
        let mut http = connect(&bench.daemon);
        http.send(b"HEAD /v1/status HTTP/1.1\r\nhost: x\r\n\r\n")
            .expect("sent");
        http.head().expect("answered")
    };
    assert_eq!(head.status, 405);
}

/// Values of every kind, for a field of any.
fn odd_values() -> Vec<Value> {
    vec![
        json!(null),
        json!(true),
        json!(-1),
        json!(0),
        json!(u64::MAX),
        json!(1e300),
        json!(""),
        json!("x"),
        json!("\u{0}\n\u{7f}"),
        json!("x".repeat(100_000)),
        json!([]),
        json!([[]]),
        json!({}),
        json!({"x": {"y": 1}}),
        json!(vec!["a"; 10_000]),
    ]
}

/// The fields that a body may have, by the document.
fn fields(document: &Value, schema: &Value) -> Vec<String> {
    if let Some(target) = schema["$ref"].as_str() {
        return fields(document, document.pointer(&target[1..]).expect("there"));
    }
    let parts = schema["allOf"].as_array().into_iter().flatten();
    let mut all: Vec<String> = parts.flat_map(|part| fields(document, part)).collect();
    let own = schema["properties"].as_object();
    all.extend(own.into_iter().flat_map(|own| own.keys().cloned()));
    all
}

#[test]
fn no_field_of_any_operation_takes_what_is_not_meant_for_it_by_halves() {
    let bench = Bench::new();
    let document: Value = serde_json::from_str(&arbiter::api::openapi::DOCUMENT).expect("JSON");
    let mut asked = 0;
    let mut refused = 0;
    for (method, path) in operations() {
        let operation = &document["paths"][&path][method.to_lowercase()];
        let schema = &operation["requestBody"]["content"]["application/json"]["schema"];
        let names = fields(&document, schema);
        if schema.is_null() {
            continue;
        }
        assert!(!names.is_empty(), "{method} {path}");
        let (target, good) = sensible(&method, &path);
        let mut http = connect(&bench.daemon);
        for name in &names {
            for odd in odd_values() {
                // Beside fields that are good by themselves.
                let mut body = good.clone().expect("a body");
                body[name] = odd;
                let before = state(&bench.daemon);
                let text = body.to_string();
                let shown: String = text.chars().take(200).collect();
                let answer = http.ask(&method, &target, Some(&text));
                let answer = answer.unwrap_or_else(|error| panic!("{shown}: {error}"));
                asked += 1;
                if answer.status >= 400 {
                    refused += 1;
                    error_of(&answer);
                    assert!(answer.status < 500, "{method} {path} {shown}: {answer:?}");
                    assert_eq!(state(&bench.daemon), before, "{method} {path} {shown}");
                }
            }
        }
    }
    assert!(asked > 500 && refused > asked / 2, "{refused} of {asked}");
    // It is as well as before.
    assert_eq!(get(&bench.daemon, "/v1/jobs")[0]["name"], "a");
}

/// xorshift64*
struct Dice(u64);

impl Dice {
    fn below(&mut self, most: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let number = self.0.wrapping_mul(0x2545_f491_4f6c_dd1d);
        // CAST: a remainder of a small number.
        (number % most as u64) as usize
    }
}

/// Requests as bytes, with some of them changed, cut out, doubled or put in.
fn mutated(dice: &mut Dice, request: &[u8]) -> Vec<u8> {
    let mut bytes = request.to_vec();
    for _ in 0..=dice.below(4) {
        let at = dice.below(bytes.len());
        match dice.below(5) {
            // CAST: a byte.
            0 => bytes[at] = dice.below(256) as u8,
            1 => bytes.truncate(at.max(1)),
            2 => {
                let end = (at + dice.below(20)).min(bytes.len());
                bytes.drain(at..end);
                if bytes.is_empty() {
                    bytes.push(b' ');
                }
            }
            3 => {
                let end = (at + dice.below(40)).min(bytes.len());
                let part = bytes[at..end].to_vec();
                bytes.splice(at..at, part);
            }
            _ => {
                let words: [&[u8]; 8] = [
                    b"\r\n\r\n",
                    b"\0",
                    b"content-length: 99999999\r\n",
                    b"{{{{",
                    b"e308",
                    b"\xff",
                    b"transfer-encoding: chunked\r\n",
                    b"\"share\":",
                ];
                let word = words[dice.below(words.len())];
                bytes.splice(at..at, word.iter().copied());
            }
        }
    }
    bytes
}

#[test]
fn bytes_that_were_changed_end_in_an_error_or_a_closed_connection() {
    let bench = Bench::new();
    let seed = 0x5eed_0017_a219_u64;
    let mut dice = Dice(seed);
    let mut requests = Vec::new();
    for (method, path) in operations() {
        if path == "/v1/shutdown" || path == "/v1/events/stream" {
            continue;
        }
        let (target, body) = sensible(&method, &path);
        let body = body.map_or_else(String::new, |body| body.to_string());
        let head = format!("{method} {target} HTTP/1.1\r\nhost: x\r\n");
        let length = format!("content-length: {}\r\n\r\n{body}", body.len());
        requests.push((head + &length).into_bytes());
    }
    let mut statuses = std::collections::BTreeMap::<u16, u32>::new();
    for round in 0..1500 {
        let request = &requests[dice.below(requests.len())];
        let bytes = mutated(&mut dice, request);
        let mut http = connect(&bench.daemon);
        let _ = http.send(&bytes);
        let _ = http.socket().shutdown(std::net::Shutdown::Write);
        if let Ok(answer) = http.answer() {
            *statuses.entry(answer.status).or_default() += 1;
            assert!(
                answer.status < 500 || answer.status == 501,
                "seed {seed:x}, round {round}: {answer:?}"
            );
            if answer.status >= 400 && !answer.body.is_empty() {
                error_of(&answer);
            }
        }
    }
    assert!(statuses.keys().any(|status| *status >= 400), "{statuses:?}");
    assert_eq!(get(&bench.daemon, "/v1/jobs")[0]["name"], "a");
    assert_eq!(bench.daemon.operator().list().expect("served")[0].name, "a");
}

#[test]
fn huge_bodies_are_refused_before_they_are_read_or_as_soon_as_they_are_too_long() {
    let bench = Bench::new();
    let huge = 1_usize << 40;
    let head = |more: &str| format!("PATCH /v1/jobs/a HTTP/1.1\r\nhost: x\r\n{more}\r\n");
    let mut http = connect(&bench.daemon);
    let promised = head(&format!("content-length: {huge}\r\n"));
    http.send(promised.as_bytes()).expect("sent");
    let answer = http.answer().expect("answered");
    assert_eq!(answer.status, 413, "{answer:?}");
    assert!(
        error_of(&answer)["message"]
            .as_str()
            .expect("text")
            .contains("1048576")
    );
    assert!(http.line().is_err(), "closed");

    let mut http = connect(&bench.daemon);
    http.send(head("transfer-encoding: chunked\r\n").as_bytes())
        .expect("sent");
    let chunk = format!("10000\r\n{}\r\n", " ".repeat(0x10000));
    // Until the other side has had enough: somewhat more than a megabyte.
    let taken = (0..4096)
        .take_while(|_| http.send(chunk.as_bytes()).is_ok())
        .count();
    assert!(taken < 4096, "{taken} chunks were taken");
    if let Ok(answer) = http.answer() {
        assert_eq!(answer.status, 413, "{answer:?}");
    }

    // A head that never ends.
    let mut http = connect(&bench.daemon);
    http.send(b"GET /v1/status HTTP/1.1\r\n").expect("sent");
    let field = format!("x: {}\r\n", "y".repeat(1000));
    let taken = (0..4096)
        .take_while(|_| http.send(field.as_bytes()).is_ok())
        .count();
    assert!(taken < 4096, "{taken} kilobytes of a head were taken");

    // A megabyte is taken, and refused for what it says.
    let words = vec!["word"; 100_000];
    let body = json!({"name": "big", "command": words, "pid": 1}).to_string();
    assert!(body.len() > 700_000);
    let answer = bench.ask("POST", "/v1/jobs", Some(&body));
    assert_eq!(answer.status, 403, "{answer:?}");
    assert_eq!(state(&bench.daemon), bench.before);
    let _ = std::io::stdout().flush();
}

#[test]
fn what_is_no_http_closes_its_connection() {
    let bench = Bench::new();
    for bytes in [
        &b"{\"v_major\":2,\"v_minor\":0,\"request\":{\"kind\":\"list\"}}\n"[..],
        &[0; 4096],
        b"\x16\x03\x01\x02\x00\x01",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ] {
        let mut http = connect(&bench.daemon);
        http.send(bytes).expect("sent");
        let _ = http.socket().shutdown(std::net::Shutdown::Write);
        match http.answer() {
            Ok(answer) => assert!((400..=505).contains(&answer.status), "{answer:?}"),
            Err(_) => continue,
        }
        assert!(Http::line(&mut http).is_err(), "closed");
    }
    assert_eq!(state(&bench.daemon), bench.before);
}
