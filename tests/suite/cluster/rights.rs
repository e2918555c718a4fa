//! A root arbiter that runs the hook's jobs as another user: what that user can do to root.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::Path;

use super::*;

/// `nobody`
const OTHER: u32 = 65534;

fn open_to_all(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).expect("its mode");
}

/// A node of root's whose jobs run as `nobody`; `None` where this test is not root's, or that user
/// cannot reach what was built.
fn node_of_another_user(hook: &Hook) -> Option<Node> {
    node_started_by(hook, &[])
}

/// One whose arbiter is started by this command.
fn node_started_by(hook: &Hook, around: &[&str]) -> Option<Node> {
    let sublet = Artefacts::get().program("sublet");
    let reached = nix::unistd::geteuid().is_root() && {
        let mut tried = std::process::Command::new("setpriv");
        let ids = ["--reuid", "65534", "--regid", "65534", "--clear-groups"];
        tried
            .args(ids)
            .arg(sublet)
            .arg("--version")
            .current_dir("/");
        tests::programs::exists("setpriv") && Outcome::of(&mut tried).code == Some(0)
    };
    if !reached {
        println!("now: skipped, it takes root and a build that others can execute");
        return None;
    }
    let mut sandbox = Sandbox::new();
    sandbox.set("ROOTS_SECRET", "hunter2");
    sandbox.set("LC_ALL", "C.UTF-8");
    open_to_all(&sandbox.path(""), 0o755);
    open_to_all(&sandbox.path("run"), 0o755);
    open_to_all(&sandbox.path("sim"), 0o777);
    let node = hook.node_in(sandbox, "a", &OTHER.to_string(), around);
    wait_until("the node reports", || hook.is_up(&node).then_some(()));
    // Root's arbiter serves root alone where its directory was given.
    for name in ["api.sock", "channel.sock"] {
        open_to_all(&node.sandbox.path("run").join(name), 0o666);
    }
    Some(node)
}

fn shell(hook: &Hook, more: &[&str], script: &str) {
    let mut words = vec!["submit"];
    words.extend(more);
    words.extend(["--", "sh", "-c", script]);
    hook.ask(&words).succeeded();
}

fn last(hook: &Hook) -> Value {
    hook.jobs().pop().expect("a job")
}

#[test]
fn a_job_s_user_reaches_nothing_of_root_s_through_the_job_s_directory() {
    let hook = Hook::new();
    let Some(node) = node_of_another_user(&hook) else {
        return;
    };
    let victim = node.sandbox.path("victim");
    std::fs::write(&victim, "root's own words").expect("a file");
    open_to_all(&victim, 0o600);
    let made = node.sandbox.path("made");
    // Every name that agent and runner write, as links to a file of root's and to one that is not
    // there.
    let script = format!(
        "id -u; env; for place in . ..; do for name in exit.json exit.new settled settled.new pid pid.new started job.json job.new asked \
         traces.json traces.new spec.json spec.new runner.log stdout stderr stdout.1 stderr.1; do \
         for target in {} {}; do rm -f $place/$name; ln -sf $target $place/$name; done; done; done 2>/dev/null; echo last words >&2; exit 3",
        victim.display(),
        made.display()
    );
    shell(&hook, &["--env", "OWN=1"], &script);
    wait_until("it has failed", || {
        (last(&hook)["phase"] == "failed").then_some(())
    });
    let reason = last(&hook)["reason"]
        .as_str()
        .unwrap_or_default()
        .to_owned();
    assert!(
        reason.contains("exit code 3") && reason.contains("last words"),
        "{reason}"
    );
    wait_until("it is settled", || {
        let runs = node.runs();
        runs.iter()
            .all(|run| run.join("settled").exists())
            .then_some(())
    });
    assert_eq!(
        std::fs::read_to_string(&victim).expect("it"),
        "root's own words"
    );
    let meta = std::fs::metadata(&victim).expect("it");
    assert_eq!((meta.mode() & 0o777, meta.uid()), (0o600, 0));
    assert!(!made.exists(), "a file was made for it");
    for run in node.runs() {
        let meta = std::fs::symlink_metadata(&run).expect("a record");
        assert_eq!(
            (meta.mode() & 0o777, meta.uid()),
            (0o700, 0),
            "{}",
            run.display()
        );
    }

    let place = node.places().pop().expect("where it wrote");
    let said = std::fs::read_to_string(place.join("stdout")).expect("its output");
    let owner = std::fs::symlink_metadata(place.join("stdout")).expect("it");
    assert_eq!(
        (owner.mode() & 0o777, owner.uid()),
        (0o600, OTHER),
        "it may read its output"
    );
    assert!(said.starts_with("65534\n"), "{said}");
    assert!(
        said.contains("\nOWN=1\n") && said.contains("\nLC_ALL=C.UTF-8\n"),
        "{said}"
    );
    assert!(!said.contains("hunter2"), "root's environment: {said}");
    let home = node.sandbox.path("home");
    assert!(
        !said.contains(&format!("HOME={}", home.display())),
        "root's home: {said}"
    );
}

#[test]
fn a_job_inherits_no_group_and_no_descriptor_of_root_s() {
    let hook = Hook::new();
    let secret = tempfile::NamedTempFile::new().expect("a file of root's");
    std::fs::write(secret.path(), "root's own words").expect("written");
    let path = secret.path().to_str().expect("UTF-8");
    // Who starts the arbiter has groups of its own, and has left a file of root's open.
    let script = "exec 9<\"$0\"; exec setpriv --groups 4,24 -- \"$@\"";
    let Some(node) = node_started_by(&hook, &["sh", "-c", script, path]) else {
        return;
    };
    let arbiter = node.arbiter.as_ref().expect("it runs").pid();
    let has = format!("/proc/{arbiter}/fd/9");
    assert_eq!(std::fs::read_link(&has).expect("it has it"), secret.path());
    shell(&hook, &[], "id -G; cat <&9; ls -l /proc/self/fd; echo end");
    let said = wait_until("it has said all", || {
        let place = node.places().pop()?;
        let said = std::fs::read_to_string(place.join("stdout")).ok()?;
        said.ends_with("end\n").then_some(said)
    });
    assert_eq!(
        said.lines().next(),
        Some("65534"),
        "groups of root's: {said}"
    );
    assert!(!said.contains("own words"), "a file of root's: {said}");
    let open = said.lines().filter_map(|line| line.split_once(" -> "));
    let number = |left: &str| left.rsplit(' ').next().map(ToOwned::to_owned);
    let open: Vec<_> = open
        .filter_map(|(left, to)| Some((number(left)?, to)))
        .collect();
    assert!(open.len() >= 4, "{said}");
    // `ls` itself has opened the directory that it lists.
    let others = open
        .iter()
        .filter(|(fd, to)| !["0", "1", "2"].contains(&fd.as_str()) && !to.ends_with("/fd"));
    let others: Vec<_> = others.collect();
    assert!(others.is_empty(), "it has inherited {others:?}");
}

#[test]
fn no_process_is_killed_and_no_end_is_believed_on_a_job_s_word() {
    let hook = Hook::new();
    let Some(node) = node_of_another_user(&hook) else {
        return;
    };
    let mut decoy = std::process::Command::new("sleep")
        .arg("600")
        .process_group(0)
        .spawn()
        .expect("a process of root's");
    let script = format!(
        "for place in . ..; do for name in pid job.json started; do rm -f $place/$name; echo {0} > $place/$name; done; \
         echo '{{\"code\":0}}' > $place/exit.json; done 2>/dev/null; echo ready; exec sleep 600",
        decoy.id()
    );
    shell(&hook, &[], &script);
    wait_until("it has written", || {
        let place = node
            .places()
            .into_iter()
            .find(|place| place.ends_with("1.1"))?;
        let said = std::fs::read_to_string(place.join("stdout")).ok()?;
        said.contains("ready").then_some(())
    });
    // Another one comes and goes: the node has reported since.
    shell(&hook, &[], "exit 0");
    wait_until("another one is done", || {
        (last(&hook)["phase"] == "done").then_some(())
    });
    assert_eq!(
        hook.jobs()[0]["phase"],
        "starting",
        "an end that the job has made up"
    );
    let record = node.runs().pop_first().expect("its record");
    let process = attempts::process(&record).expect("its process");
    hook.ask(&["cancel", "1"]).succeeded();
    wait_until("it is over", || {
        (hook.jobs()[0]["phase"] == "cancelled").then_some(())
    });
    assert!(
        !Path::new(&format!("/proc/{process}")).exists(),
        "the job itself was ended"
    );
    let ended = decoy.try_wait().expect("it");
    let _ = decoy.kill();
    let _ = decoy.wait();
    assert_eq!(ended, None, "a process of root's was killed");
}

#[test]
fn a_job_starts_in_no_directory_that_its_user_may_not_enter() {
    let hook = Hook::new();
    let Some(node) = node_of_another_user(&hook) else {
        return;
    };
    let own = node.sandbox.path("roots");
    std::fs::create_dir(&own).expect("a directory");
    open_to_all(&own, 0o700);
    let dir = own.display().to_string();
    shell(&hook, &["--dir", &dir], "ls; exec sleep 600");
    let reason = wait_until("it is refused", || {
        let job = last(&hook);
        assert_ne!(job["phase"], "running", "{job}");
        let reason = job["reason"].as_str()?.to_owned();
        reason.contains("could not start it").then_some(reason)
    });
    assert!(
        reason.contains(&dir) && reason.contains("ermission denied"),
        "{reason}"
    );
    hook.ask(&["cancel", "1"]).succeeded();
}
