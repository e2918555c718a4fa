//! Whatever is wrong: one clear line with the value and the remedy, the right code, no job
//! registered, and the command not started.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixListener;

use control::{ControlError, ErrorCode, stand_in};

use crate::fixture::{Fixture, Outcome};

/// `sublet run` with these flags and a command that would leave a mark.
#[track_caller]
fn refused(fixture: &Fixture, flags: &[&str], vars: &[(&str, &str)], code: i32, words: &[&str]) {
    let mark = fixture.at("started");
    let mut args = vec!["run"];
    args.extend(flags);
    let mark_text = mark.to_str().unwrap();
    args.extend(["--", "touch", mark_text]);
    let outcome = Outcome::of(fixture.sublet(args).envs(vars.iter().copied()));
    outcome.is_error(code, words);
    assert!(!mark.exists(), "the command was started");
}

#[test]
fn flags() {
    for (flags, words) in [
        (&["--shaer", "0.5"][..], &["'--shaer'", "'--share'"][..]),
        (&["--mem", "20"], &["`20` has no unit", "20GiB", "50%"]),
        (&["--mem", "20Gx"], &["`Gx`", "`20Gx`", "GiB"]),
        (&["--mem", "0"], &["`0`"]),
        (&["--mem", "120%"], &["`120%`", "50%"]),
        (&["--share", "0"], &["`0`", "above 0"]),
        (&["--share", "1.01"], &["`1.01`", "at most 1"]),
        (&["--class", "best"], &["`best`", "guaranteed"]),
        (&["--device", "gpu0"], &["`gpu0`", "UUID"]),
        (&["--name", "a/b"], &["`a/b`", "letters"]),
        (
            &["--config", "/no/such.toml"],
            &["/no/such.toml", "--config"],
        ),
        (
            &["--driver", "/etc/passwd"],
            &["/etc/passwd", "no shared library"],
        ),
    ] {
        let fixture = Fixture::new();
        let mut all = vec!["--sim"];
        if flags[0] == "--driver" {
            all.clear();
        }
        all.extend(flags);
        refused(&fixture, &all, &[], 125, words);
        assert!(fixture.heard().is_empty(), "{:?}", fixture.heard());
    }
}

#[test]
fn variables() {
    for (name, value, words) in [
        ("SUBLET_MEM", "20", &["SUBLET_MEM", "`20` has no unit"][..]),
        ("SUBLET_SHARE", "2", &["SUBLET_SHARE", "`2`", "at most 1"]),
        ("SUBLET_CLASS", "best", &["SUBLET_CLASS", "`best`"]),
        ("SUBLET_NAME", "a b", &["SUBLET_NAME", "`a b`"]),
        ("SUBLET_DEVICE", "x", &["SUBLET_DEVICE", "`x`"]),
        (
            "SUBLET_CONFIG",
            "/no/such.toml",
            &["/no/such.toml", "SUBLET_CONFIG"],
        ),
        (
            "SUBLET_LIBRARY",
            "/no/such.so",
            &["/no/such.so", "SUBLET_LIBRARY"],
        ),
        (
            "SUBLET_SIM_DIR",
            "/no/such",
            &["/no/such/libcuda.so.1", "SUBLET_SIM_DIR"],
        ),
        (
            "SUBLET_RUNTIME_DIR",
            "here",
            &["SUBLET_RUNTIME_DIR", "`here`", "absolute"],
        ),
    ] {
        let fixture = Fixture::new();
        refused(&fixture, &["--sim"], &[(name, value)], 125, words);
        assert!(fixture.heard().is_empty(), "{:?}", fixture.heard());
    }
}

#[test]
fn quota_files() {
    for (text, words) in [
        (
            "[defaults]\nshaer = 0.5\n",
            &["sublet.toml:2:1:", "`shaer`", "did you mean `share`?"][..],
        ),
        (
            "[defaults]\nmem = 20\n",
            &["sublet.toml:2:7:", "`20` has no unit", "20GiB"],
        ),
        (
            "[defaults]\nshare = 1.5\n",
            &["sublet.toml:2:9:", "`1.5`", "at most 1"],
        ),
        (
            "[[rules]]\n",
            &["sublet.toml:1:3:", "`rules`", "did you mean `rule`?"],
        ),
        ("[defaults\n", &["sublet.toml:1:"]),
    ] {
        let fixture = Fixture::new();
        fixture.write("sublet.toml", text);
        refused(&fixture, &["--sim"], &[], 125, words);
        assert!(fixture.heard().is_empty(), "{:?}", fixture.heard());
    }
}

#[test]
fn commands() {
    let fixture = Fixture::new();
    fixture.write("text", "no program");
    let script = fixture.write("script", "#!/no/such/interpreter\n");
    fs::set_permissions(script, fs::Permissions::from_mode(0o755)).unwrap();
    for (command, code, words) in [
        (
            &["no-such-command"][..],
            127,
            &["`no-such-command`", "PATH"][..],
        ),
        (&["./no/such"], 127, &["`./no/such`"]),
        (&["./text"], 126, &["`./text`", "chmod +x"]),
        (&["./sim"], 126, &["`./sim`", "directory"]),
        (&["./script"], 126, &["`./script`", "/no/such/interpreter"]),
        (&[], 125, &["CMD", "sublet run --help"]),
    ] {
        let mut args = vec!["run", "--sim"];
        args.extend(command);
        fixture.run(&args).is_error(code, words);
    }
    assert!(fixture.heard().is_empty(), "{:?}", fixture.heard());
}

#[test]
fn what_the_arbiter_refuses() {
    for (message, hint) in [
        (
            "job `touch` asks for 200GiB on device 0, which has 141GiB",
            "ask for 141GiB or less",
        ),
        (
            "shares on device 0 would sum to 1.25",
            "ask for 0.25 or less",
        ),
    ] {
        let fixture = Fixture::answering(move |_| {
            Err(ControlError::new(ErrorCode::Refused, message).with_hint(hint))
        });
        refused(&fixture, &["--sim"], &[], 125, &["refused", message, hint]);
        assert_eq!(fixture.heard().len(), 1, "asked once");
    }
}

#[test]
fn another_version_of_the_api() {
    let newer = || {
        let error = serde_json::json!({"code": "not_found", "message": "there is nothing at /v1"});
        let said = stand_in::bytes(404, &serde_json::json!({ "error": error }));
        Fixture::speaking(move |_| said.clone())
    };
    let words = ["knows no `", "/v1/", "restart the arbiter"];
    refused(&newer(), &["--sim"], &[], 125, &words);
    newer().run(&["ps"]).is_error(125, &words);
    newer()
        .run(&["set", "a", "--share", "0.5"])
        .is_error(125, &words);
}

#[test]
fn an_arbiter_of_before_the_api_is_named_and_no_other_is_started() {
    let fixture = Fixture::without_arbiter();
    let _older = UnixListener::bind(fixture.at("run/control.sock")).unwrap();
    let words = ["older version", "restart the arbiter"];
    refused(&fixture, &["--sim"], &[], 125, &words);
    fixture.run(&["ps"]).is_error(125, &words);
    assert!(!fixture.at("run/arbiter.lock").exists(), "one was started");
}

#[test]
fn an_arbiter_that_ends_is_asked_again() {
    let error = serde_json::json!({"code": "ending", "message": "the arbiter is ending"});
    let said = stand_in::bytes(503, &serde_json::json!({ "error": error }));
    let fixture = Fixture::speaking(move |_| said.clone());
    fixture
        .run(&["ps"])
        .is_error(125, &["api.sock", "is ending"]);
    assert_eq!(fixture.heard().len(), 3);
}

#[test]
fn an_arbiter_that_hangs_up_or_answers_nonsense() {
    refused(
        &Fixture::speaking(|_| b"hello\n".to_vec()),
        &["--sim"],
        &[],
        125,
        &["no sense"],
    );
    let fixture = Fixture::speaking(|_| Vec::new());
    refused(
        &fixture,
        &["--sim"],
        &[],
        125,
        &["api.sock", "without an answer"],
    );
    assert_eq!(
        fixture.heard().len(),
        3,
        "tried again, in case it was just ending"
    );
}

#[test]
fn a_place_that_is_not_to_be_trusted() {
    let fixture = Fixture::new();
    fs::set_permissions(fixture.at("run"), fs::Permissions::from_mode(0o777)).unwrap();
    refused(&fixture, &["--sim"], &[], 125, &["0777", "chmod"]);
    fixture.run(&["ps"]).is_error(125, &["0777", "chmod"]);
    assert!(fixture.heard().is_empty(), "{:?}", fixture.heard());

    let fixture = Fixture::new();
    let file = fixture.write("file", "");
    let vars = [("SUBLET_RUNTIME_DIR", file.to_str().unwrap())];
    refused(&fixture, &["--sim"], &vars, 125, &["not a directory"]);
}

#[test]
fn a_dead_socket() {
    let fixture = Fixture::without_arbiter();
    testbed::dead_socket(&fixture.at("run/api.sock"));
    let words = ["api.sock", "sublet arbiter"];
    fixture
        .run(&["set", "a", "--share", "0.5"])
        .is_error(125, &words);
    assert!(
        fixture.at("run/api.sock").exists(),
        "nothing is cleaned up on the way"
    );

    let fixture = Fixture::without_arbiter();
    fixture
        .run(&["set", "a", "--share", "0.5"])
        .is_error(125, &["no arbiter runs", "api.sock", "`sublet run`"]);
}

#[test]
fn a_library_that_cannot_be_preloaded() {
    let fixture = Fixture::new();
    fs::create_dir(fixture.at("a b")).unwrap();
    symlink(fixture.at("libsublet.so"), fixture.at("a b/link.so")).unwrap();
    fs::copy(fixture.at("libsublet.so"), fixture.at("a b/copy.so")).unwrap();
    let spaced = fixture.at("a b/copy.so");
    let vars = [("SUBLET_LIBRARY", spaced.to_str().unwrap())];
    refused(
        &fixture,
        &["--sim"],
        &vars,
        125,
        &["a b/copy.so", "LD_PRELOAD"],
    );
    let text = fixture.write("text.so", "text");
    let vars = [("SUBLET_LIBRARY", text.to_str().unwrap())];
    refused(
        &fixture,
        &["--sim"],
        &vars,
        125,
        &["text.so", "no shared library"],
    );
    assert!(fixture.heard().is_empty(), "{:?}", fixture.heard());
}

#[test]
fn other_commands() {
    let fixture = Fixture::without_arbiter();
    for (args, words) in [
        (&["runn"][..], &["'runn'", "'run'"][..]),
        (&["ps", "--jsn"], &["'--jsn'", "'--json'"]),
        (&["ps", "extra"], &["'extra'"]),
        (&["set"], &["NAME"]),
        (&["set", "a"], &["nothing to change", "--mem"]),
        (&["set", "a", "--mem", "5"], &["`5` has no unit"]),
        (
            &["arbiter", "--idle-exit", "soon"],
            &["`soon`", "--idle-exit", "90s"],
        ),
        (
            &["arbiter", "--runtime-dir", "here"],
            &["`here`", "absolute"],
        ),
        (
            &["arbiter", "--config", "/no/such.toml"],
            &["/no/such.toml"],
        ),
    ] {
        fixture.run(args).is_error(125, words);
    }
}
