//! Quota files that change while real jobs run: their memory limits follow.

use std::path::PathBuf;
use std::time::Instant;

use tests::{Outcome, ProgramRun, Sandbox, wait_until};

use crate::quota::{memory, refused, take};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

/// A sandbox with a folder of quota files.
fn sandbox() -> (Sandbox, PathBuf) {
    let mut sandbox = Sandbox::new();
    let folder = sandbox.path("conf");
    std::fs::create_dir_all(folder.join("config.d")).expect("a folder");
    sandbox.set("SUBLET_CONFIG_DIR", &folder);
    (sandbox, folder)
}

/// As editors and package managers do it.
fn replace(folder: &std::path::Path, name: &str, text: &str) {
    let beside = folder.join(format!("{name}.new"));
    std::fs::write(&beside, text).expect("written");
    std::fs::rename(&beside, folder.join(name)).expect("in its place");
}

fn total(run: &mut ProgramRun) -> String {
    run.ask("total")
}

#[test]
fn a_changed_file_limits_the_memory_of_a_running_job() {
    let (sandbox, folder) = sandbox();
    replace(&folder, "config.toml", "[defaults]\nmem = \"1GiB\"\n");
    let mut run = ProgramRun::start(&mut sandbox.job(&["--name", "plain"], memory()));
    assert_eq!(run.ask("init"), "0");
    assert_eq!(total(&mut run), format!("0 {GIB}"));
    take(&mut run, "plain", 768 * MIB);
    refused(&mut run, "plain", 512 * MIB);

    let mut slowest_ms = 0;
    for mem in ["2GiB", "3GiB", "4GiB"] {
        let changed = Instant::now();
        replace(
            &folder,
            "config.toml",
            &format!("[defaults]\nmem = \"{mem}\"\n"),
        );
        let bytes = u64::from(mem.as_bytes()[0] - b'0') * GIB;
        wait_until("the job has the new limit", || {
            (total(&mut run) == format!("0 {bytes}")).then_some(())
        });
        slowest_ms = slowest_ms.max(changed.elapsed().as_millis());
    }
    println!("now: a changed quota file limits a running job after {slowest_ms} ms at most, of 3");
    take(&mut run, "plain", 1024 * MIB);

    // A cap below what is held takes nothing away, and gives nothing more.
    replace(
        &folder.join("config.d"),
        "10-cap.toml",
        "[[rule]]\ncap.mem = \"1GiB\"\n",
    );
    wait_until("the cap is in force", || {
        let job = sandbox.job_status("plain").expect("the job");
        (job.mem_limit_bytes == Some(GIB)).then_some(())
    });
    refused(&mut run, "plain", 1);
    let job = sandbox.job_status("plain").expect("the job");
    assert_eq!(job.mem_used_bytes, 1792 * MIB);
    assert_eq!(
        (job.capped[0].key.as_str(), job.capped[0].given.as_str()),
        ("mem", "1GiB")
    );
    let changes = sandbox.events().into_iter().filter(|event| {
        event.kind == "changed" && event.fields.get("by").is_some_and(|by| by == "config")
    });
    assert_eq!(changes.count(), 4);
    // The owner asks for more, and hears why there is none.
    let set = Outcome::of(&mut sandbox.sublet(["set", "plain", "--mem", "6GiB"]));
    assert_eq!(set.code, Some(0), "{set:?}");
    assert!(
        set.stdout
            .contains("6GiB was asked for, and 1GiB is the most"),
        "{set:?}"
    );
    std::fs::remove_file(folder.join("config.d/10-cap.toml")).expect("removed");
    wait_until("what was asked for is given", || {
        (total(&mut run) == format!("0 {}", 6 * GIB)).then_some(())
    });
    assert_eq!(run.finish().code, Some(0));
}

#[test]
fn users_with_less_than_their_jobs_have_keep_the_same_part_of_it() {
    let (sandbox, folder) = sandbox();
    let start = |name: &str, mem: &str| {
        let mut run =
            ProgramRun::start(&mut sandbox.job(&["--name", name, "--mem", mem], memory()));
        assert_eq!(run.ask("init"), "0");
        run
    };
    let (mut a, mut b) = (start("a", "4GiB"), start("b", "2GiB"));
    replace(
        &folder,
        "config.toml",
        "[[user]]\nuser = \"*\"\nmem_max = \"3GiB\"\n",
    );
    wait_until("both have half of it", || {
        (total(&mut a) == format!("0 {}", 2 * GIB) && total(&mut b) == format!("0 {GIB}"))
            .then_some(())
    });
    replace(
        &folder,
        "config.toml",
        "[[user]]\nuser = \"*\"\nmem_max = \"50%\"\n",
    );
    // Half of the device's 8 GiB.
    wait_until("both have two thirds", || {
        let four = 4 * GIB * 4 / 6;
        (total(&mut a) == format!("0 {four}")).then_some(())
    });
    replace(&folder, "config.toml", "");
    wait_until("both have all of it", || {
        (total(&mut a) == format!("0 {}", 4 * GIB) && total(&mut b) == format!("0 {}", 2 * GIB))
            .then_some(())
    });
    for run in [a, b] {
        assert_eq!(run.finish().code, Some(0));
    }
}
