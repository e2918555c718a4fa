//! `sublet config`, and quota files that change while jobs run.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Instant;

use serde_json::Value;

use crate::fixture::{Fixture, Outcome};
use crate::with_arbiter::{Host, wait_until};

/// Replaced as editors and package managers do it.
fn replace(fixture: &Fixture, name: &str, text: &str) {
    let beside = fixture.write(&format!("{name}.new"), text);
    fs::rename(beside, fixture.at(name)).unwrap();
}

fn share(host: &Host, name: &str) -> Option<f64> {
    host.shown(name)["share_asked"].as_f64()
}

fn is_share(host: &Host, name: &str, is: f64) -> bool {
    share(host, name).is_some_and(|share| (share - is).abs() < 1e-9)
}

fn config_of(host: &Host) -> Value {
    host.ps()["arbiter"]["config"].clone()
}

#[test]
fn a_changed_file_takes_effect_on_running_jobs_that_did_not_ask_otherwise() {
    let host = Host::new();
    replace(&host.0, "conf/config.toml", "[defaults]\nshare = 0.1\n");
    let (plain, asks) = (
        host.job("plain", &[]),
        host.job("asks", &["--share", "0.2"]),
    );
    assert!(is_share(&host, "plain", 0.1) && is_share(&host, "asks", 0.2));
    let started = Instant::now();
    replace(&host.0, "conf/config.toml", "[defaults]\nshare = 0.3\n");
    wait_until("the new default is in force", || {
        is_share(&host, "plain", 0.3)
    });
    println!(
        "now: a changed quota file is in force on a running job after {} ms, as `sublet ps` shows it",
        started.elapsed().as_millis()
    );
    assert!(is_share(&host, "asks", 0.2), "it said so itself");

    // A folder that comes later; a cap holds for all.
    fs::create_dir(host.0.at("conf/config.d")).unwrap();
    host.0.write(
        "conf/config.d/10-cap.toml",
        "[[rule]]\nmatch.name = \"*s\"\ncap.share = 0.15\n",
    );
    wait_until("the cap is in force", || is_share(&host, "asks", 0.15));
    assert!(is_share(&host, "plain", 0.3), "it is not for that one");
    let capped = host.shown("asks")["capped"][0].clone();
    assert_eq!(
        (&capped["key"], &capped["asked"], &capped["given"]),
        (&"share".into(), &"0.2".into(), &"0.15".into())
    );
    assert!(
        capped["from"]
            .as_str()
            .unwrap()
            .ends_with("10-cap.toml:1:1")
    );
    let ps = host.0.run(&["ps"]).stdout;
    assert!(
        ps.contains("asks: share: 0.2 was asked for, and 0.15 is the most"),
        "{ps}"
    );
    let set = host.0.run(&["set", "asks", "--share", "0.4"]);
    assert!(set.stdout.contains("0.15 is the most"), "{set:?}");
    let events = host.0.run(&["events", "--json", "--job", "asks"]).stdout;
    let lines = events
        .lines()
        .filter(|line| line.contains("\"by\":\"config\""))
        .count();
    assert_eq!(lines, 1, "{events}");

    fs::remove_dir_all(host.0.at("conf/config.d")).unwrap();
    wait_until("the cap is gone", || is_share(&host, "asks", 0.4));
    host.end("plain", plain);
    host.end("asks", asks);
}

#[test]
fn a_link_that_is_exchanged_is_a_change() {
    let host = Host::new();
    for (version, share) in [("v1", 0.1), ("v2", 0.2)] {
        fs::create_dir(host.0.at(version)).unwrap();
        host.0.write(
            &format!("{version}/config.toml"),
            &format!("[defaults]\nshare = {share}\n"),
        );
    }
    let link = |to: &str| {
        std::os::unix::fs::symlink(to, host.0.at("data.new")).unwrap();
        fs::rename(host.0.at("data.new"), host.0.at("data")).unwrap();
    };
    link("v1");
    std::os::unix::fs::symlink("../data/config.toml", host.0.at("conf/config.toml")).unwrap();
    let job = host.job("a", &[]);
    assert!(is_share(&host, "a", 0.1));
    link("v2");
    wait_until("what is behind the link is in force", || {
        is_share(&host, "a", 0.2)
    });
    host.end("a", job);
}

#[test]
fn a_file_that_is_wrong_changes_nothing_and_says_why() {
    let host = Host::new();
    replace(&host.0, "conf/config.toml", "[defaults]\nshare = 0.1\n");
    let job = host.job("a", &[]);
    replace(
        &host.0,
        "conf/config.toml",
        "[defaults]\nshare = 0.5\nmme = \"1GiB\"\n[[rule]]\ncap.mem = 3\n",
    );
    wait_until("the mistakes are shown", || {
        config_of(&host)["errors"].as_array().unwrap().len() == 2
    });
    let errors = config_of(&host)["errors"].to_string();
    for words in [
        "conf/config.toml:3:1: unknown key `mme` in [defaults]: did you mean `mem`?",
        "conf/config.toml:5:11: mem: `3` has no unit",
    ] {
        assert!(errors.contains(words), "{errors}");
    }
    assert!(is_share(&host, "a", 0.1), "the old one is in force");
    let shown = host.0.run(&["config", "show"]);
    assert!(
        shown.stdout.contains("quota file not in force: "),
        "{shown:?}"
    );
    let reload = host.0.run(&["reload"]);
    reload.is_error(125, &["config.toml:3:1", "and 1 more", "still is"]);
    let events = host.0.run(&["events"]).stdout;
    assert!(events.contains("is not taken over"), "{events}");

    // Whatever becomes of the file, the arbiter goes on, and takes the next good one.
    let good = "[defaults]\nshare = 0.1\n[[user]]\nuser = \"*\"\njobs_max = 9\n";
    let mut seed = 17u64;
    for _ in 0..20 {
        let mut bytes = good.as_bytes().to_vec();
        for _ in 0..3 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let at = usize::try_from(seed >> 33).unwrap() % bytes.len();
            bytes[at] = b"#\"=[]{}\n.0z\xff"[usize::try_from(seed >> 20).unwrap() % 12];
        }
        fs::write(host.0.at("conf/config.toml"), &bytes).unwrap();
        assert!(host.arbiter_lives());
    }
    replace(&host.0, "conf/config.toml", "[defaults]\nshare = 0.25\n");
    wait_until("the good one is in force", || is_share(&host, "a", 0.25));
    assert_eq!(config_of(&host)["errors"], Value::Array(Vec::new()));
    host.end("a", job);
}

#[test]
fn a_user_s_jobs_share_what_the_user_may_have() {
    let host = Host::new();
    let jobs = [
        host.job("a", &["--share", "0.4"]),
        host.job("b", &["--share", "0.2"]),
    ];
    let most = |text: &str| {
        let text = format!("[[user]]\nuser = \"*\"\n{text}\n");
        replace(&host.0, "conf/config.toml", &text);
    };
    most("share_max = 0.3\njobs_max = 2");
    wait_until("each has its part", || {
        is_share(&host, "a", 0.2) && is_share(&host, "b", 0.1)
    });
    let refused = host.0.run(&["run", "--sim", "true"]);
    refused.is_error(125, &["refused", "2"]);
    most("share_max = 0.9");
    wait_until("there is more", || {
        is_share(&host, "a", 0.4) && is_share(&host, "b", 0.2)
    });
    for (name, job) in ["a", "b"].into_iter().zip(jobs) {
        host.end(name, job);
    }
}

#[test]
fn what_is_capped_is_said_when_the_job_starts_and_holds_for_the_next_arbiter() {
    let host = Host::new();
    replace(
        &host.0,
        "conf/config.toml",
        "[[rule]]\ncap = { share = 0.25, class = \"opportunistic\" }\n",
    );
    let outcome = host.0.run(&["run", "--sim", "--share", "0.5", "true"]);
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
    for words in [
        "sublet: share: 0.5 was asked for, and 0.25 is the most (",
        "sublet: class: opportunistic is the most (",
    ] {
        assert!(outcome.stderr.contains(words), "{outcome:?}");
    }
    let job = host.job("a", &["--share", "0.5"]);
    // The user's own file adds caps, and its defaults stay below the host's.
    host.0.write(
        "sublet.toml",
        "[defaults]\nshare = 0.9\n[[rule]]\ncap.share_max = 0.2\n",
    );
    let own = host.job("own", &[]);
    assert!(is_share(&host, "own", 0.2), "{}", host.shown("own"));
    let pid = own.id().to_string();
    let shown = host.0.run(&["config", "show", "--job-of", &pid, "--json"]);
    let shown: Value = serde_json::from_str(&shown.stdout).unwrap();
    assert_eq!(
        (&shown["schema"], &shown["job"]),
        (&1.into(), &"own".into())
    );
    let from = |list: &str| -> Vec<String> {
        let values = shown[list].as_array().unwrap().iter();
        values
            .map(|value| format!("{} {} {}", value["key"], value["value"], value["from"]))
            .map(|text| text.replace('"', ""))
            .collect()
    };
    assert!(
        from("settings")
            .iter()
            .any(|text| text == "share 0.2 the job")
    );
    assert_eq!(from("caps").len(), 3, "{shown}");
    // The next arbiter does not know of it.
    fs::remove_file(host.0.at("sublet.toml")).unwrap();
    host.restart();
    for name in ["a", "own"] {
        let most = if name == "a" { 0.25 } else { 0.2 };
        assert!(is_share(&host, name, most), "{}", host.shown(name));
        assert_eq!(host.shown(name)["class"], "opportunistic");
    }
    replace(&host.0, "conf/config.toml", "");
    wait_until("the cap is gone", || is_share(&host, "a", 0.5));
    assert!(is_share(&host, "own", 0.2), "its own cap is not");
    host.end("a", job);
    host.end("own", own);
}

#[test]
fn check_lists_everything_that_is_wrong_and_needs_no_arbiter() {
    let fixture = Fixture::without_arbiter();
    let none = fixture.run(&["config", "check"]);
    assert_eq!((none.code, none.stderr.as_str()), (Some(0), ""));
    fixture.write("conf/config.toml", "[defaults]\nshaer = 1\nmem = 3\n");
    fs::create_dir(fixture.at("conf/config.d")).unwrap();
    fixture.write("conf/config.d/a.toml", "[gizmo]\n");
    fixture.write("conf/config.d/b.txt", "[gizmo]\n");
    fixture.write(
        "sublet.toml",
        "[[rule]]\nset.mem = \"1GiB\"\ncap.gang = true\n",
    );
    let wrong = fixture.run(&["config", "check"]);
    assert_eq!((wrong.code, wrong.stderr.as_str()), (Some(1), ""));
    let lines: Vec<&str> = wrong.stdout.lines().collect();
    let places = [
        "config.toml:2:1:",
        "config.toml:3:7:",
        "a.toml:1:2:",
        "sublet.toml:3:5:",
    ];
    assert_eq!(lines.len(), places.len(), "{lines:?}");
    for (line, place) in lines.iter().zip(places) {
        assert!(line.contains(place), "{line}");
    }
    let json = fixture.run(&["config", "check", "--json", "sublet.toml", "no-such.toml"]);
    let json: Value = serde_json::from_str(&json.stdout).unwrap();
    assert_eq!((&json["ok"], &json["schema"]), (&false.into(), &1.into()));
    let errors = json["errors"].as_array().unwrap();
    assert_eq!(
        (&errors[0]["line"], &errors[0]["column"]),
        (&3.into(), &5.into())
    );
    assert_eq!(errors[1]["line"], Value::Null, "{errors:?}");
    let good = fixture.write("good.toml", "[defaults]\nmem = \"1GiB\"\n");
    let good = fixture.run(&["config", "check", &good.display().to_string()]);
    assert!(good.stdout.contains("nothing is wrong"), "{good:?}");
    let command = ["config", "show", "--user", "nobody-of-that-name"];
    let shown = fixture.run(&command);
    shown.is_error(125, &["config.toml:2:1", "and 2 more"]);
}

#[test]
fn files_that_others_can_write_are_not_taken_by_root() {
    let fixture = Fixture::without_arbiter();
    let file = fixture.write("conf/config.toml", "[defaults]\nmem = \"1GiB\"\n");
    fs::set_permissions(&file, fs::Permissions::from_mode(0o666)).unwrap();
    if nix::unistd::geteuid().is_root() {
        let outcome = fixture.run(&["arbiter"]);
        outcome.is_error(
            125,
            &["conf/config.toml", "everybody can write it (mode 666)"],
        );
    }
}

#[test]
fn the_page_about_teams_shows_what_its_files_do() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/how-to/teams.md");
    let page = fs::read_to_string(page).unwrap();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/config");
    let folder = fs::canonicalize(folder).unwrap();
    let fixture = Fixture::without_arbiter();
    let mut transcripts = 0;
    for part in page.split("```console\n$ ").skip(1) {
        let (command, rest) = part.split_once('\n').unwrap();
        let output = rest.split_once("```").unwrap().0;
        let Some(args) = command.strip_prefix("sublet config ") else {
            continue;
        };
        let mut command = fixture.sublet(["config"].into_iter().chain(args.split(' ')));
        command.env("SUBLET_CONFIG_DIR", &folder);
        let outcome = Outcome::of(&mut command);
        let shown = outcome
            .stdout
            .replace(&folder.display().to_string(), "/etc/sublet");
        // Columns are as wide as the paths in them.
        let words = |text: &str| -> Vec<String> {
            let lines = text
                .lines()
                .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "));
            lines.filter(|line| !line.is_empty()).collect()
        };
        assert_eq!(words(&shown), words(output), "{args}: {outcome:?}");
        transcripts += 1;
    }
    assert!(transcripts >= 3, "{transcripts}");
    for file in fs::read_dir(folder.join("config.d")).unwrap() {
        let text = fs::read_to_string(file.unwrap().path()).unwrap();
        assert!(
            page.contains(text.trim()),
            "the page has the whole of it: {text}"
        );
    }
}
