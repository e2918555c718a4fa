//! `sublet metrics` beside real jobs: the figures are those of `sublet ps --json`, and every query
//! of the dashboard and of the alerts finds its metrics and labels.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Stdio};

use serde_json::Value;
use tests::{Artefacts, Outcome, PATIENCE, Running, Sandbox, wait_until};

/// The exporter, and where it is asked.
struct Exporter {
    process: Child,
    address: SocketAddr,
}

impl Exporter {
    fn start(sandbox: &Sandbox) -> Self {
        let mut command = sandbox.sublet(["metrics", "--listen", "127.0.0.1:0"]);
        let mut process = command.stderr(Stdio::piped()).spawn().expect("started");
        let mut line = String::new();
        let mut stderr = BufReader::new(process.stderr.take().expect("a pipe"));
        testbed::read_line(&mut stderr, &mut line);
        let address = line
            .split_once("http://")
            .and_then(|(_, rest)| rest.split_once('/'))
            .and_then(|(address, _)| address.parse().ok())
            .unwrap_or_else(|| panic!("no address in {line}"));
        Self { process, address }
    }

    /// Head and body of what is answered.
    fn ask(&self, path: &str, accept: &str) -> (String, String) {
        let mut stream = TcpStream::connect(self.address).expect("connected");
        stream.set_read_timeout(Some(PATIENCE)).expect("a limit");
        let request = format!("GET {path} HTTP/1.1\r\nHost: a\r\nAccept: {accept}\r\n\r\n");
        stream.write_all(request.as_bytes()).expect("asked");
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("answered");
        let (head, body) = text.split_once("\r\n\r\n").expect("a head");
        (head.to_owned(), body.to_owned())
    }

    fn scrape(&self) -> Exposition {
        let (head, body) = self.ask("/metrics", "application/openmetrics-text;version=1.0.0");
        assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
        assert!(head.contains("application/openmetrics-text"), "{head}");
        assert!(body.ends_with("# EOF\n"), "{body}");
        Exposition::read(&body)
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        testbed::reap(&mut self.process);
    }
}

type Labels = BTreeMap<String, String>;

/// Samples by name.
struct Exposition(BTreeMap<String, Vec<(Labels, f64)>>);

impl Exposition {
    /// None of the names here has anything that is escaped.
    fn read(text: &str) -> Self {
        let mut all = BTreeMap::<String, Vec<(Labels, f64)>>::new();
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let (series, value) = line.rsplit_once(' ').expect("a value");
            let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
            let labels = labels.strip_suffix('}').expect("the labels end");
            let labels = labels
                .split("\",")
                .filter(|one| !one.is_empty())
                .map(|one| {
                    let (name, value) = one.split_once("=\"").expect("a label");
                    (name.to_owned(), value.trim_end_matches('"').to_owned())
                });
            let value = value.parse().expect("a number");
            let samples = all.entry(name.to_owned()).or_default();
            samples.push((labels.collect(), value));
        }
        Self(all)
    }

    /// The one sample of this name with these labels; `None`: there is none.
    fn get(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        let is_it = |own: &Labels| {
            let has =
                |(label, value): &(&str, &str)| own.get(*label).is_some_and(|one| one == value);
            labels.iter().all(has)
        };
        let mut found = self.0.get(name)?.iter().filter(|(own, _)| is_it(own));
        let first = found.next()?;
        assert!(found.next().is_none(), "{name} {labels:?} is there twice");
        Some(first.1)
    }
}

fn ps(sandbox: &Sandbox) -> Value {
    Outcome::of(&mut sandbox.sublet(["ps", "--json"]))
        .succeeded()
        .json()
}

fn of_job(ps: &Value, name: &str, at: &str) -> f64 {
    let jobs = ps["jobs"].as_array().expect("jobs");
    let job = jobs.iter().find(|job| job["name"] == name);
    let value = job.and_then(|job| job.pointer(at));
    let value = value.and_then(Value::as_f64);
    value.unwrap_or_else(|| panic!("no {at} of {name} in {ps}"))
}

fn spin(sandbox: &Sandbox, name: &str, share: &str) -> Running {
    let flags = [
        "--name",
        name,
        "--share",
        share,
        "--mem",
        "1GiB",
        "--evictable",
        "--host-memory",
        "1GiB",
        "--iteration-launches",
        "10",
    ];
    let mut command = sandbox.job(&flags, Artefacts::get().program("spin"));
    // Longer than any test waits; the test ends it.
    command.args(["--kernel-us", "200", "--seconds", "600", "--mem", "64MiB"]);
    Running::start(&mut command)
}

/// Two jobs at work whose iterations are known, one of which has been away and back.
fn two_jobs(sandbox: &Sandbox) -> (Running, Running) {
    let jobs = (spin(sandbox, "a", "0.7"), spin(sandbox, "b", "0.3"));
    for name in ["a", "b"] {
        wait_until("its iterations are known", || {
            let profile = sandbox.job_status(name)?.profile?;
            profile.iteration_ns
        });
        let set = ["set", name, "--solo-iteration", "1ms"];
        Outcome::of(&mut sandbox.sublet(set)).succeeded();
    }
    Outcome::of(&mut sandbox.sublet(["evict", "b"])).succeeded();
    Outcome::of(&mut sandbox.sublet(["restore", "b"])).succeeded();
    wait_until("what is known where others are is known", || {
        let both = ["a", "b"].map(|name| sandbox.job_status(name));
        let known = |job: &Option<control::JobStatus>| {
            let job = job.as_ref()?;
            job.share_got_contended?;
            job.profile.as_ref()?.slowdown
        };
        both.iter().all(|job| known(job).is_some()).then_some(())
    });
    jobs
}

#[test]
fn a_scrape_has_the_figures_of_ps_and_a_job_that_ends_takes_its_series_along() {
    let sandbox = Sandbox::exclusive();
    let mut arbiter = sandbox.arbiter();
    let exporter = Exporter::start(&sandbox);
    let (_a, b) = two_jobs(&sandbox);

    let before = ps(&sandbox);
    let page = exporter.scrape();
    let after = ps(&sandbox);
    assert_eq!(page.get("sublet_up", &[]), Some(1.0));
    let uuid = before["devices"][0]["uuid"].as_str().expect("a UUID");
    let device = [("UUID", uuid), ("gpu", "0")];
    let size = before["devices"][0]["total_bytes"].as_f64();
    assert_eq!(page.get("sublet_device_memory_size_bytes", &device), size);
    for name in ["a", "b"] {
        let id = of_job(&before, name, "/id").to_string();
        let job = [("job_name", name), ("job_id", id.as_str())];
        let on_device = [&job[..], &device].concat();
        // What stays as it is.
        for (metric, at, labels) in [
            ("sublet_job_share_asked_ratio", "/share_asked", &job[..]),
            (
                "sublet_job_memory_limit_bytes",
                "/devices/0/mem_limit_bytes",
                &on_device,
            ),
            (
                "sublet_job_memory_used_bytes",
                "/devices/0/mem_used_bytes",
                &on_device,
            ),
            (
                "sublet_job_memory_peak_bytes",
                "/devices/0/mem_peak_bytes",
                &on_device,
            ),
            (
                "sublet_job_evictions_total",
                "/devices/0/residence/evictions",
                &on_device,
            ),
            ("sublet_job_memory_refusals_total", "/oom_count", &job),
        ] {
            assert_eq!(
                page.get(metric, labels),
                Some(of_job(&before, name, at)),
                "{name}: {metric}"
            );
        }
        // What counts up lies between what was shown before and after.
        for (metric, at, labels, unit) in [
            (
                "sublet_job_device_seconds_total",
                "/devices/0/device_time_ns",
                &on_device[..],
                1e9,
            ),
            (
                "sublet_job_wait_seconds_total",
                "/devices/0/wait_time_ns",
                &on_device,
                1e9,
            ),
            ("sublet_job_launches_total", "/launches", &job, 1.0),
            ("sublet_job_grants_total", "/grants", &job, 1.0),
            (
                "sublet_job_iterations_total",
                "/profile/iterations",
                &job,
                1.0,
            ),
        ] {
            let value = page
                .get(metric, labels)
                .unwrap_or_else(|| panic!("{metric}"));
            let (low, high) = (of_job(&before, name, at), of_job(&after, name, at));
            // Seconds are written with fewer digits than nanoseconds have.
            let near = 1e-6 + low.abs() / unit * 1e-12;
            assert!(
                low / unit - near <= value && value <= high / unit + near,
                "{name}: {metric} {value}, {low} before and {high} after"
            );
        }
        let states = page.0["sublet_job_state"].iter();
        let holds = states.filter(|(labels, value)| labels["job_id"] == id && *value == 1.0);
        assert_eq!(holds.count(), 1, "a job has one state");
    }

    // The same once, in the older format.
    let once = Outcome::of(&mut sandbox.sublet(["metrics", "--once"])).succeeded();
    assert!(
        once.stderr.is_empty() && !once.stdout.contains("# EOF"),
        "{once:?}"
    );
    assert!(
        once.stdout
            .contains("# TYPE sublet_job_launches_total counter\n"),
        "{once:?}"
    );
    let once = Exposition::read(&once.stdout);
    assert_eq!(
        once.0.keys().collect::<Vec<_>>(),
        page.0.keys().collect::<Vec<_>>()
    );

    drop(b);
    let page = wait_until("the job's series end", || {
        let page = exporter.scrape();
        page.get("sublet_job_info", &[("job_name", "b")])
            .is_none()
            .then_some(page)
    });
    for (name, samples) in &page.0 {
        for (labels, _) in samples {
            let of = labels.get("job_name").map(String::as_str);
            assert_ne!(of, Some("b"), "{name}");
        }
    }
    assert!(page.get("sublet_job_info", &[("job_name", "a")]).is_some());

    // An arbiter that is gone, and one that comes.
    arbiter.kill();
    arbiter.wait();
    let page = exporter.scrape();
    assert_eq!(page.get("sublet_up", &[]), Some(0.0));
    assert!(page.0.keys().all(|name| !name.starts_with("sublet_job")));
    assert!(page.get("sublet_exporter_scrape_failures_total", &[]) >= Some(1.0));
    let once = Outcome::of(&mut sandbox.sublet(["metrics", "--once"])).succeeded();
    assert!(once.stdout.contains("\nsublet_up 0\n"), "{once:?}");
    assert!(
        once.stderr.starts_with("sublet: sublet_up is 0: "),
        "{once:?}"
    );
    let _next = sandbox.arbiter();
    assert_eq!(exporter.scrape().get("sublet_up", &[]), Some(1.0));
}

#[test]
fn an_arbiter_that_stands_still_costs_a_scrape_its_figures_and_not_its_answer() {
    let sandbox = Sandbox::exclusive();
    let arbiter = sandbox.arbiter();
    let exporter = Exporter::start(&sandbox);
    assert_eq!(exporter.scrape().get("sublet_up", &[]), Some(1.0));
    arbiter.signal(nix::sys::signal::Signal::SIGSTOP);
    let page = exporter.scrape();
    assert_eq!(page.get("sublet_up", &[]), Some(0.0));
    arbiter.signal(nix::sys::signal::Signal::SIGCONT);
    wait_until("it answers again", || {
        (exporter.scrape().get("sublet_up", &[]) == Some(1.0)).then_some(())
    });
}

#[test]
fn a_port_that_is_taken_is_named() {
    let sandbox = Sandbox::exclusive();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("bound");
    let address = taken.local_addr().expect("an address").to_string();
    let outcome = Outcome::of(&mut sandbox.sublet(["metrics", "--listen", &address]));
    assert_eq!(outcome.code, Some(125), "{outcome:?}");
    assert!(
        outcome.stderr.contains(&address) && outcome.stderr.contains("--listen"),
        "{outcome:?}"
    );
}

/// Metrics and the labels that a PromQL expression names with each, and labels that it names
/// otherwise (`by`, `on`, ...). Fails at a word that is none of these and no function.
fn names_in(expression: &str) -> (Vec<(String, Vec<String>)>, Vec<String>) {
    const WORDS: [&str; 24] = [
        "sum",
        "max",
        "min",
        "avg",
        "count",
        "topk",
        "rate",
        "increase",
        "clamp_min",
        "time",
        "and",
        "or",
        "unless",
        "by",
        "without",
        "on",
        "ignoring",
        "group_left",
        "group_right",
        "bool",
        "offset",
        "absent",
        "changes",
        "max_over_time",
    ];
    let (mut metrics, mut others) = (Vec::new(), Vec::new());
    let is_word = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | ':' | '$');
    let mut rest = expression;
    let mut lists_labels = false;
    while let Some(c) = rest.chars().next() {
        if c == '"' {
            let end = rest[1..].find('"').expect("the text ends");
            rest = &rest[end + 2..];
            continue;
        }
        if !is_word(c) {
            if lists_labels && c == '(' {
                let end = rest.find(')').expect("the list ends");
                let list = rest[1..end].split(',').map(str::trim);
                others.extend(list.filter(|one| !one.is_empty()).map(str::to_owned));
                rest = &rest[end + 1..];
                lists_labels = false;
                continue;
            }
            rest = &rest[c.len_utf8()..];
            continue;
        }
        let end = rest.find(|c| !is_word(c)).unwrap_or(rest.len());
        let (word, after) = rest.split_at(end);
        rest = after;
        if word.starts_with("sublet_") {
            let mut labels = Vec::new();
            if let Some(inside) = rest.strip_prefix('{') {
                let end = inside.find('}').expect("the matchers end");
                for matcher in inside[..end].split(',').map(str::trim) {
                    let end = matcher.find(['=', '!']).expect("a matcher");
                    labels.push(matcher[..end].trim().to_owned());
                }
                rest = &inside[end + 1..];
            }
            metrics.push((word.to_owned(), labels));
            continue;
        }
        let is_number = word.starts_with(|c: char| c.is_ascii_digit() || c == '$');
        assert!(
            is_number || WORDS.contains(&word),
            "`{word}` is no metric of ours and no function that this test knows: {expression}"
        );
        lists_labels = matches!(
            word,
            "by" | "without" | "on" | "ignoring" | "group_left" | "group_right"
        );
    }
    (metrics, others)
}

#[test]
fn expressions_are_taken_apart() {
    // No text in our expressions has a comma or a brace.
    let (metrics, others) = names_in(
        "sum by (instance, job_id) (rate(sublet_a_total{user=~\"x.*\", gpu!=\"1\"}[5m])) > 0.5 and on (UUID) sublet_b",
    );
    let named = vec!["user".to_owned(), "gpu".to_owned()];
    assert_eq!(
        metrics,
        [
            ("sublet_a_total".to_owned(), named),
            ("sublet_b".to_owned(), vec![])
        ]
    );
    assert_eq!(others, ["instance", "job_id", "UUID"]);
    let wrong = std::panic::catch_unwind(|| names_in("summ(sublet_a)"));
    assert!(wrong.is_err());
}

/// Every query of the dashboard, and of the variables in it.
fn of_the_dashboard() -> Vec<String> {
    fn queries(value: &Value, found: &mut Vec<String>) {
        match value {
            Value::Object(fields) => {
                for (name, value) in fields {
                    match (name.as_str(), value) {
                        ("expr", Value::String(text)) => found.push(text.clone()),
                        ("definition", Value::String(text)) => {
                            // label_values(metric, label)
                            let inner = text.strip_prefix("label_values(");
                            let inner = inner.and_then(|text| text.strip_suffix(')'));
                            let (metric, label) = inner
                                .and_then(|text| text.rsplit_once(','))
                                .unwrap_or_else(|| panic!("{text}"));
                            found.push(format!("count by ({}) ({metric})", label.trim()));
                        }
                        _ => queries(value, found),
                    }
                }
            }
            Value::Array(all) => all.iter().for_each(|value| queries(value, found)),
            _ => {}
        }
    }
    let path = Artefacts::get()
        .root()
        .join("docs/assets/grafana/sublet.json");
    let text = std::fs::read_to_string(path).expect("the dashboard");
    let mut found = Vec::new();
    queries(&serde_json::from_str(&text).expect("JSON"), &mut found);
    assert!(found.len() > 15, "{found:?}");
    found
}

/// Every expression of the alerts: each is on one line.
fn of_the_alerts() -> Vec<String> {
    let path = Artefacts::get()
        .root()
        .join("docs/assets/grafana/alerts.yml");
    let text = std::fs::read_to_string(path).expect("the alerts");
    let lines = text.lines().map(str::trim);
    let found: Vec<String> = lines
        .filter_map(|line| line.strip_prefix("expr: "))
        .map(str::to_owned)
        .collect();
    let alerts = text.matches("- alert: ").count();
    assert!(alerts >= 5 && alerts == found.len(), "{alerts}: {found:?}");
    found
}

#[test]
fn every_query_of_the_dashboard_and_the_alerts_names_what_there_is() {
    let sandbox = Sandbox::exclusive();
    let _arbiter = sandbox.arbiter();
    let _jobs = two_jobs(&sandbox);
    let exporter = Exporter::start(&sandbox);
    let page = exporter.scrape();
    // Those that Prometheus adds.
    let added = BTreeSet::from(["instance", "job"]);
    let labels_of = |metric: &str| -> BTreeSet<&str> {
        let samples = page.0.get(metric);
        let first = samples.and_then(|samples| samples.first());
        let (labels, _) = first.unwrap_or_else(|| panic!("nothing is called {metric}"));
        labels.keys().map(String::as_str).collect()
    };
    let mut used = BTreeSet::new();
    for query in of_the_dashboard().into_iter().chain(of_the_alerts()) {
        let (metrics, others) = names_in(&query);
        assert!(!metrics.is_empty(), "{query}");
        let mut all = added.clone();
        for (metric, named) in &metrics {
            let labels = labels_of(metric);
            for label in named {
                let known = labels.contains(label.as_str()) || added.contains(label.as_str());
                assert!(known, "{metric} has no {label}: {query}");
            }
            all.extend(labels);
            used.insert(metric.clone());
        }
        for label in &others {
            assert!(all.contains(label.as_str()), "no {label} here: {query}");
        }
    }
    assert!(used.len() > 20, "{used:?}");
}
