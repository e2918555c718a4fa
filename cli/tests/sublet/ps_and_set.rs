//! `sublet ps`, `sublet set`, `sublet config schema` and `--version`.

use control::{
    ArbiterStatus, Change, Class, ControlError, ErrorCode, JobSettings, JobStatus, MemLimit, Reply,
    Request,
};

use crate::fixture::Fixture;

fn with_jobs() -> Fixture {
    Fixture::answering(|request| match request {
        Request::Status => Ok(Reply::Status(ArbiterStatus {
            pid: 7,
            jobs: vec![JobStatus {
                name: "train".into(),
                mem_used_bytes: 3 << 29,
                ..JobStatus::default()
            }],
            ..ArbiterStatus::default()
        })),
        Request::Set { job, .. } if job != "train" => {
            let error =
                ControlError::new(ErrorCode::NoSuchJob, format!("no job is called `{job}`"));
            Err(error.with_hint("`sublet ps` lists them"))
        }
        Request::Set { job, change } => Ok(Reply::Changed(Box::new(JobStatus {
            name: job,
            share_asked: change.settings.share,
            class: change.settings.class.unwrap_or_default(),
            mem_limit_bytes: change.settings.mem.map(|mem| mem.resolve(100 << 30)),
            ..JobStatus::default()
        }))),
        other => panic!("not expected here: {other:?}"),
    })
}

#[test]
fn ps_prints_a_table_or_json() {
    let fixture = with_jobs();
    let outcome = fixture.run(&["ps"]);
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""));
    let lines: Vec<&str> = outcome.stdout.lines().collect();
    assert!(
        lines[0].starts_with("NAME") && lines[1].contains("1.50GiB"),
        "{lines:?}"
    );

    let outcome = fixture.run(&["ps", "--json"]);
    let value: serde_json::Value = serde_json::from_str(&outcome.stdout).unwrap();
    assert_eq!(outcome.stdout.lines().count(), 1);
    assert_eq!(value["arbiter"]["pid"], 7);
    assert_eq!(value["jobs"][0]["name"], "train");
    assert_eq!(value["jobs"][0]["mem_used_bytes"], 3u64 << 29);
}

#[test]
fn ps_without_an_arbiter_is_an_empty_list() {
    let none = Fixture::without_arbiter();
    let dead = Fixture::without_arbiter();
    testbed::dead_socket(&dead.at("run/api.sock"));
    for fixture in [none, dead] {
        let outcome = fixture.run(&["ps"]);
        assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""));
        assert!(
            outcome.stdout.starts_with("no arbiter runs at "),
            "{outcome:?}"
        );
        let outcome = fixture.run(&["ps", "--json"]);
        assert_eq!(outcome.code, Some(0));
        assert_eq!(
            outcome.stdout,
            "{\"arbiter\":null,\"devices\":[],\"jobs\":[],\"schema\":1}\n"
        );
    }
}

#[test]
fn set_says_what_holds_now() {
    let fixture = with_jobs();
    let outcome = fixture.run(&[
        "set",
        "train",
        "--share",
        "25%",
        "--mem",
        "50%",
        "--class",
        "opportunistic",
    ]);
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
    assert_eq!(
        outcome.stdout,
        "train: opportunistic, share 0.25, memory limit 50GiB (0B in use)\n"
    );
    let change = Change::from(JobSettings {
        mem: Some(MemLimit::Percent(50.0)),
        share: Some(0.25),
        class: Some(Class::Opportunistic),
        ..JobSettings::default()
    });
    let asked = &fixture.heard()[0].request;
    assert_eq!(
        asked,
        &Request::Set {
            job: "train".into(),
            change
        }
    );

    let outcome = fixture.run(&["set", "train", "--evictable"]);
    outcome.is_error(125, &["'--evictable'", "`sublet set --help`"]);
    let outcome = fixture.run(&["set", "train", "--share", "0.25", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&outcome.stdout).unwrap();
    assert_eq!(json["schema"], 1);
    assert_eq!(json["jobs"][0]["share_asked"], 0.25);
    let outcome = fixture.run(&["set", "trian", "--share", "0.25"]);
    outcome.is_error(125, &["`trian`", "sublet ps"]);
}

#[test]
fn jobs_are_paused_and_resumed_by_verbs() {
    let fixture = with_jobs();
    for (verb, paused) in [("pause", true), ("resume", false)] {
        let outcome = fixture.run(&[verb, "train"]);
        assert_eq!(outcome.code, Some(0), "{outcome:?}");
        let Request::Set { job, change } = &fixture.heard().last().unwrap().request.clone() else {
            panic!("{:?}", fixture.heard());
        };
        assert_eq!((job.as_str(), change.paused), ("train", Some(paused)));
        assert_eq!(change.settings, JobSettings::default());
    }
    let outcome = fixture.run(&["pause", "train", "trian"]);
    outcome.is_error(125, &["`trian`", "sublet ps"]);
}

#[test]
fn the_schema_and_the_version_are_printed() {
    let fixture = Fixture::without_arbiter();
    let schema: serde_json::Value =
        serde_json::from_str(&fixture.run(&["config", "schema"]).stdout).unwrap();
    assert_eq!(
        schema["properties"]["rule"]["items"]["properties"]["cap"]["properties"]["share"]["anyOf"]
            [0]["maximum"],
        1
    );
    let outcome = fixture.run(&["--version"]);
    assert_eq!(
        outcome.stdout,
        format!("sublet {}\n", env!("CARGO_PKG_VERSION"))
    );
    assert_eq!(outcome.code, Some(0));
}

#[test]
fn an_arbiter_is_asked_to_stop() {
    let fixture = Fixture::answering(|request| match request {
        Request::Shutdown => Ok(Reply::ShuttingDown),
        other => panic!("not expected here: {other:?}"),
    });
    let outcome = fixture.run(&["arbiter", "--stop"]);
    assert_eq!((outcome.code, outcome.stderr.as_str()), (Some(0), ""));
    assert_eq!(fixture.heard()[0].request, Request::Shutdown);
}

#[test]
fn a_device_is_changed_and_shown_as_it_stands() {
    let fixture = Fixture::answering(|request| match request {
        Request::SetDevice { .. } => Ok(Reply::Devices(vec![control::DeviceStatus {
            index: 1,
            mode: control::SliceMode::Auto,
            policy: "stride".into(),
            quantum_us: 7500,
            quantum_min_us: 500,
            ..control::DeviceStatus::default()
        }])),
        Request::Reload => Err(control::ControlError::new(
            control::ErrorCode::Invalid,
            "sublet.toml:3:1: unknown key `x`",
        )),
        other => panic!("not expected here: {other:?}"),
    });
    let args = "device set 1 --mode auto --quantum 7.5ms --quantum-min 0.5ms --policy stride";
    let outcome = fixture.run(&args.split(' ').collect::<Vec<_>>());
    assert_eq!(
        (outcome.code, outcome.stdout.as_str()),
        (
            Some(0),
            "GPU 1: auto, policy stride, slices of 0.5 to 7.5 ms, early wake off, misbehaviour: demote\n"
        ),
        "{outcome:?}"
    );
    let settings = control::DeviceSettings {
        mode: Some(control::SliceMode::Auto),
        policy: Some(control::PolicyChoice::named("stride")),
        quantum_min: Some(control::Span::from_micros(500)),
        quantum: Some(control::Span::from_micros(7500)),
        ..control::DeviceSettings::default()
    };
    assert_eq!(
        fixture.heard()[0].request,
        Request::SetDevice {
            device: Some(control::DeviceSelector::Index(1)),
            settings
        }
    );
    let outcome = fixture.run(&["device", "set", "all"]);
    outcome.is_error(125, &["nothing to change", "--mode"]);
    let outcome = fixture.run(&["reload"]);
    outcome.is_error(125, &["refused", "sublet.toml:3:1"]);
}
