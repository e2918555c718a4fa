//! Hook, nodes and users with certificates of `sublet cluster certificates`.

use std::path::Path;

use super::*;

/// Makes certificates in a hook's own directory; what was printed.
fn certificates(sandbox: &Sandbox, lab: &Path, words: &[&str]) -> Outcome {
    let mut command = sandbox.sublet(["cluster", "certificates"]);
    Outcome::of(command.arg(lab).args(words))
}

/// A hook that demands certificates, with some for nodes `a` and `b`.
fn secured() -> Hook {
    let sandbox = Sandbox::new();
    let lab = sandbox.path("lab");
    let words = [
        "--hook",
        "127.0.0.1",
        "--operator",
        "--node",
        "a",
        "--node",
        "b",
    ];
    certificates(&sandbox, &lab, &words).succeeded();
    let mut hook = Hook {
        sandbox,
        process: None,
        port: "0".into(),
        words: Vec::new(),
        descriptors: None,
        lab: None,
    };
    serve_with(&mut hook, &lab);
    hook
}

/// Starts a hook with the certificates of this directory.
fn serve_with(hook: &mut Hook, lab: &Path) {
    let file = |name: &str| lab.join(name).display().to_string();
    hook.words = vec![
        "--tls-cert".into(),
        file("hook.crt"),
        "--tls-key".into(),
        file("hook.key"),
        "--tls-client-ca".into(),
        file("ca.crt"),
    ];
    hook.lab = Some(lab.to_owned());
    hook.start();
}

fn all_done(hook: &Hook) {
    wait_until("all are done", || {
        let phases = hook.phases();
        phases.iter().all(|phase| phase == "done").then_some(())
    });
}

#[test]
fn jobs_run_over_tls_and_new_certificates_end_none_of_them() {
    let mut hook = secured();
    let lab = hook.lab.clone().expect("certificates");
    let node = hook.node("a");
    wait_until("the node reports", || hook.is_up(&node).then_some(()));
    let load = ["load", "--kernel-us", "1000", "--for-ms", "4000"];
    submit(&hook, "before", false, &load);
    wait_until("it runs", || (hook.phases() == ["running"]).then_some(()));
    // All of them, while it runs; then a hook that starts anew with them.
    let words = [
        "--hook",
        "127.0.0.1",
        "--operator",
        "--node",
        "a",
        "--renew",
    ];
    certificates(&hook.sandbox, &lab, &words).succeeded();
    submit(&hook, "between", false, &load);
    hook.kill();
    hook.start();
    submit(&hook, "after", false, &load);
    all_done(&hook);
    let jobs = hook.jobs();
    assert_eq!(jobs.len(), 3);
    assert!(jobs.iter().all(|job| job["attempts"] == 1), "{jobs:?}");
    assert!(hook.is_up(&node));
}

#[test]
fn a_node_with_another_node_s_certificate_gets_no_orders() {
    let hook = secured();
    let lab = hook.lab.clone().expect("certificates");
    let a = hook.node("a");
    wait_until("the node reports", || hook.is_up(&a).then_some(()));
    // The right token, a certificate that is believed, and another node's name.
    for end in ["crt", "key"] {
        let file = |node| lab.join(format!("node-{node}.{end}"));
        std::fs::copy(file("a"), file("b")).expect("copied");
    }
    let sandbox = Sandbox::new();
    let token = hook.token_file().display().to_string();
    let file = |name: &str| lab.join(name).display().to_string();
    let mut arbiter = sandbox.sublet(["arbiter", "--cluster", &hook.url(), "--cluster-sim"]);
    arbiter.args(["--cluster-node", "b", "--cluster-token-file", &token]);
    arbiter.args(["--cluster-ca", &file("ca.crt")]);
    arbiter.args(["--cluster-cert", &file("node-b.crt")]);
    arbiter.args(["--cluster-key", &file("node-b.key")]);
    if nix::unistd::geteuid().is_root() {
        arbiter.args(["--cluster-user", "root"]);
    }
    let log = sandbox.path("arbiter.log");
    let to = std::fs::File::create(&log).expect("a file");
    let b = arbiter.stdout(Stdio::null()).stderr(to).spawn();
    let _b = Running::of(b.expect("an arbiter"));
    wait_until("its arbiter says why", || {
        let text = std::fs::read_to_string(&log).unwrap_or_default();
        text.contains("is for `a`, and speaks as node `b`")
            .then_some(())
    });
    let status = hook.json(&["status", "--json"]);
    let nodes = status["nodes"].as_array().expect("nodes");
    assert!(nodes.iter().all(|node| node["name"] != "b"), "{status}");
}

#[test]
fn a_hook_that_knows_the_token_and_has_no_certificate_is_not_obeyed() {
    let mut hook = secured();
    let lab = hook.lab.clone().expect("certificates");
    let node = hook.node("a");
    wait_until("the node reports", || hook.is_up(&node).then_some(()));
    hook.kill();
    // Somebody who has read token and state, with an authority of his own, at the hook's address.
    let foreign = hook.sandbox.path("foreign");
    let words = ["--hook", "127.0.0.1", "--operator"];
    certificates(&hook.sandbox, &foreign, &words).succeeded();
    serve_with(&mut hook, &foreign);
    submit(&hook, "forged", false, &["load", "--for-ms", "1"]);
    let line = wait_until("the arbiter's journal says who is refused", || {
        let mut lines = node.sandbox.events().into_iter();
        lines.find(|line| line.kind == "node_refused_hook")
    });
    let reason = line.fields["reason"].as_str().unwrap_or_default();
    assert!(reason.contains("is not shown to be the hook"), "{line:?}");
    assert!(reason.contains("none of the authorities"), "{line:?}");
    let status = hook.json(&["status", "--json"]);
    assert!(
        status["nodes"][0]["up"] != true && node.runs().is_empty(),
        "{status}"
    );
    // The right one is obeyed again.
    hook.kill();
    serve_with(&mut hook, &lab);
    all_done(&hook);
}

#[test]
fn users_and_nodes_need_the_files_of_a_hook_with_tls() {
    let mut hook = secured();
    let lab = hook.lab.take().expect("certificates");
    let url = format!("https://127.0.0.1:{}", hook.port);
    let token = hook.token_file().display().to_string();
    let file = |name: &str| lab.join(name).display().to_string();
    let jobs = |words: &[&str]| {
        let mut command = hook.sandbox.sublet(["cluster", "jobs"]);
        Outcome::of(command.args(["--token-file", &token]).args(words))
    };
    let (ca, crt, key) = (file("ca.crt"), file("operator.crt"), file("operator.key"));
    let plain = url.replace("https", "http");
    for (words, part) in [
        (&["--cluster", &url][..], "--ca-file"),
        (
            &["--cluster", &url, "--ca-file", &ca],
            "demands a certificate",
        ),
        (&["--cluster", &url, "--cert-file", &crt], "has no key"),
        (
            &["--cluster", &url, "--cert-file", &crt, "--key-file", &key],
            "nobody vouches for",
        ),
        (&["--cluster", &plain], "write https://"),
        (&["--cluster", &plain, "--ca-file", &ca], "is plain"),
    ] {
        let outcome = jobs(words);
        assert_eq!(outcome.code, Some(125), "{words:?}: {outcome:?}");
        assert!(outcome.stderr.contains(part), "{words:?}: {outcome:?}");
    }
    // By variables, too.
    let mut command = hook.sandbox.sublet(["cluster", "jobs"]);
    command.env("SUBLET_CLUSTER", &url);
    command.env("SUBLET_CLUSTER_TOKEN_FILE", &token);
    command.env("SUBLET_CLUSTER_CA_FILE", &ca);
    command.env("SUBLET_CLUSTER_CERT_FILE", &crt);
    command.env("SUBLET_CLUSTER_KEY_FILE", &key);
    Outcome::of(&mut command).succeeded();
    // A key that others can read, and files that do not fit, keep a hook from starting.
    std::fs::set_permissions(
        lab.join("hook.key"),
        std::os::unix::fs::PermissionsExt::from_mode(0o644),
    )
    .expect("set");
    let state = hook.sandbox.path("other");
    let mut serve = hook.sandbox.sublet(["cluster", "serve", "--listen"]);
    serve.args(["127.0.0.1:0", "--state"]).arg(state);
    serve.args(["--tls-cert", &file("hook.crt")]);
    let outcome = Outcome::of(serve.args(["--tls-key", &file("hook.key")]));
    assert!(
        outcome.code == Some(125) && outcome.stderr.contains("chmod 600"),
        "{outcome:?}"
    );
}

#[test]
fn certificates_that_are_there_are_kept_and_names_that_are_none_are_refused() {
    let sandbox = Sandbox::new();
    let lab = sandbox.path("lab");
    let made = certificates(&sandbox, &lab, &["--node", "a"]).succeeded();
    assert!(made.stdout.contains("node-a.crt"), "{made:?}");
    let before = std::fs::read(lab.join("node-a.crt")).expect("a certificate");
    for (words, part) in [
        (&["--node", "b", "--node", "a"][..], "--renew"),
        (&[], "--hook HOST, --node NODE or --operator"),
        (&["--node", "operator"], "call the node something else"),
        (&["--node", "../a"], "is no name of a node"),
        (&["--node", "c", "--node", "c"], "named twice"),
        (&["--hook", "a b"], "is no name for a certificate"),
        (&["--hook", "*.lab"], "is no name for a certificate"),
    ] {
        let outcome = certificates(&sandbox, &lab, words);
        assert_eq!(outcome.code, Some(125), "{words:?}: {outcome:?}");
        assert!(outcome.stderr.contains(part), "{words:?}: {outcome:?}");
    }
    assert!(!lab.join("node-b.crt").exists(), "all or none");
    assert_eq!(std::fs::read(lab.join("node-a.crt")).expect("kept"), before);
    certificates(&sandbox, &lab, &["--node", "a", "--renew"]).succeeded();
    assert_ne!(std::fs::read(lab.join("node-a.crt")).expect("new"), before);
}

#[test]
fn a_node_with_a_token_of_its_own_runs_jobs_and_may_do_nothing_else() {
    let mut hook = Hook::new();
    let mut command = hook.sandbox.sublet(["cluster", "node-token", "a"]);
    command.arg("--token-file").arg(hook.token_file());
    let made = Outcome::of(&mut command).succeeded();
    let sandbox = Sandbox::new();
    let token = sandbox.path("token");
    std::fs::write(&token, &made.stdout).expect("written");
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    std::fs::set_permissions(&token, mode).expect("set");
    let start = |name: &str| {
        let mut arbiter = sandbox.sublet(["arbiter", "--cluster", &hook.url(), "--cluster-sim"]);
        arbiter.args(["--cluster-node", name, "--cluster-token-file"]);
        arbiter.arg(&token);
        if nix::unistd::geteuid().is_root() {
            arbiter.args(["--cluster-user", "root"]);
        }
        arbiter
    };
    let other = Outcome::of(&mut start("b"));
    assert!(
        other.code == Some(125) && other.stderr.contains("the token is that of node `a`"),
        "{other:?}"
    );
    let arbiter = Some(Running::start(&mut start("a")));
    let node = Node {
        sandbox,
        arbiter,
        name: "a".into(),
    };
    wait_until("the node reports", || hook.is_up(&node).then_some(()));
    submit(&hook, "job", false, &["load", "--for-ms", "1"]);
    all_done(&hook);
    let mut jobs = hook.sandbox.sublet(["cluster", "jobs", "--cluster"]);
    jobs.arg(hook.url()).arg("--token-file").arg(&token);
    let refused = Outcome::of(&mut jobs);
    assert!(
        refused.code == Some(125) && refused.stderr.contains("and nothing else"),
        "{refused:?}"
    );
    // Nor does it make a hook.
    hook.kill();
    let state = hook.sandbox.path("other");
    let mut serve = hook.sandbox.sublet(["cluster", "serve", "--listen"]);
    serve.args(["127.0.0.1:0", "--state"]).arg(state);
    let serve = Outcome::of(serve.arg("--token-file").arg(&token));
    assert!(
        serve.code == Some(125) && serve.stderr.contains("that of a node"),
        "{serve:?}"
    );
}
