//! What is written down agrees with what is built.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use tests::coverage;
use tests::elf::Library;
use tests::{Artefacts, Outcome, Sandbox, hooks_doc, pages};

#[test]
fn the_page_of_hooks_is_the_tables() {
    let path = Artefacts::get().root().join("docs/reference/hooks.md");
    let text = std::fs::read_to_string(&path).expect("docs/reference/hooks.md");
    assert!(
        text == hooks_doc::page(),
        "docs/reference/hooks.md is not what the table says; run scripts/hooks-doc"
    );
}

#[test]
fn every_symbol_of_the_classification_is_accounted_for() {
    let artefacts = Artefacts::get();
    let coverage = coverage::count(
        &Library::read(&artefacts.preload()),
        &Library::read(&artefacts.simulated_driver()),
    );
    assert_eq!(coverage.unaccounted, Vec::<String>::new());
    assert_eq!(coverage.csv_symbols, shim_ffi::COUNT);
    assert_eq!(
        coverage.by_action.values().sum::<usize>(),
        coverage.table_symbols
    );
}

#[test]
fn every_link_between_pages_leads_somewhere() {
    let root = Artefacts::get().root();
    assert!(pages::all(root).len() > 20, "the pages have moved");
    assert_eq!(pages::broken(root), Vec::<String>::new());
}

/// Pages of the book: all below `docs`, but reports, which are kept as they were written.
fn book() -> BTreeSet<PathBuf> {
    pages::all(&Artefacts::get().root().join("docs"))
        .into_iter()
        .filter(|page| !is_report(page) && page != Path::new("SUMMARY.md"))
        .collect()
}

/// `results/DEVICE/DATE-COMMIT/...`
fn is_report(page: &Path) -> bool {
    page.starts_with("results") && page.components().count() > 2
}

#[test]
fn the_summary_of_the_book_has_every_page() {
    let docs = Artefacts::get().root().join("docs");
    let summary = std::fs::read_to_string(docs.join("SUMMARY.md")).expect("docs/SUMMARY.md");
    let linked: BTreeSet<PathBuf> = pages::links(&summary)
        .into_iter()
        .map(|link| pages::normal(Path::new(&link)))
        .collect();
    let missing: Vec<_> = book().difference(&linked).cloned().collect();
    assert_eq!(
        missing,
        Vec::<PathBuf>::new(),
        "add these pages to docs/SUMMARY.md"
    );
}

#[test]
fn every_page_begins_with_what_it_is_for() {
    let docs = Artefacts::get().root().join("docs");
    let wrong: Vec<_> = book()
        .into_iter()
        .filter(|page| {
            let text = std::fs::read_to_string(docs.join(page)).expect("a page");
            !pages::begins_with_purpose(&text)
        })
        .collect();
    assert_eq!(
        wrong,
        Vec::<PathBuf>::new(),
        "these pages need a title and, below it, a paragraph that says what they are for"
    );
}

/// The text of all sources that speak to users; a literal that goes on in the next line is one.
fn sources() -> String {
    let root = Artefacts::get().root();
    let mut open: Vec<PathBuf> = ["cli", "arbiter", "control", "interposer", "policy"]
        .map(|name| root.join(name).join("src"))
        .into();
    let mut text = String::new();
    while let Some(path) = open.pop() {
        if path.is_dir() {
            let entries = std::fs::read_dir(&path).expect("a folder").flatten();
            open.extend(entries.map(|entry| entry.path()));
        } else if path.extension().is_some_and(|it| it == "rs") {
            text += &std::fs::read_to_string(&path).expect("a source");
        }
    }
    let mut lines = text.split("\\\n");
    let mut whole = lines.next().unwrap_or_default().to_owned();
    for line in lines {
        whole += line.trim_start();
    }
    whole
}

#[test]
fn every_message_on_the_page_of_troubles_is_one_of_ours() {
    let page = Artefacts::get()
        .root()
        .join("docs/how-to/troubleshooting.md");
    let text = std::fs::read_to_string(page).expect("the page");
    let sources = sources();
    let messages: Vec<&str> = text
        .lines()
        .filter_map(|line| line.strip_prefix("### `")?.strip_suffix('`'))
        .collect();
    assert!(messages.len() > 15, "{messages:?}");
    for message in messages {
        for part in message.split('…').map(str::trim) {
            assert!(sources.contains(part), "no source says {part:?}");
        }
    }
}

/// Whether a test of the hook, of the engines or of the suite is named like this.
fn has_function(name: &str) -> bool {
    let root = Artefacts::get().root();
    let mut open: Vec<PathBuf> = [
        "certificates/src",
        "cluster/src",
        "kubernetes/src",
        "tests/suite",
    ]
    .map(|folder| root.join(folder))
    .into();
    let wanted = format!("fn {name}()");
    while let Some(path) = open.pop() {
        if path.is_dir() {
            let entries = std::fs::read_dir(&path).expect("a folder").flatten();
            open.extend(entries.map(|entry| entry.path()));
        } else if path.extension().is_some_and(|it| it == "rs")
            && std::fs::read_to_string(&path)
                .expect("a source")
                .contains(&wanted)
        {
            return true;
        }
    }
    false
}

/// Scripts that run real engines.
const OF_ENGINES: [&str; 3] = ["scripts/slurm", "scripts/containerd", "scripts/ray"];

#[test]
fn every_line_of_the_path_from_the_hook_to_a_job_has_a_test_that_is_there() {
    let root = Artefacts::get().root();
    let page = std::fs::read_to_string(root.join("docs/explanation/security.md"));
    let page = page.expect("the page");
    let section = page.split("## Hook, nodes and engines").nth(1);
    let section = section.and_then(|rest| rest.split("\n## ").next());
    let lines = section.expect("the section").lines();
    let rows: Vec<&str> = lines
        .filter_map(|line| line.strip_prefix("| ")?.strip_suffix(" |"))
        .skip(1)
        .collect();
    assert!(rows.len() > 30, "{rows:?}");
    let in_script = |script: &str, case: &str| {
        let text = std::fs::read_to_string(root.join(script)).expect("the script");
        text.contains(&format!("\ndef {case}("))
    };
    for row in rows {
        let (_, test) = row.split_once(" | ").expect("two columns");
        let mut names = test.split('`').skip(1).step_by(2);
        let is_there = match (names.next(), names.next()) {
            (Some(script), Some(case)) if OF_ENGINES.contains(&script) => in_script(script, case),
            (Some(name), None) => has_function(name),
            _ => false,
        };
        assert!(is_there, "no such test: {row}");
    }
}

/// Variables by which pip finds packages on this machine; a sandbox has none of its surroundings'.
const OF_PIP: [&str; 3] = ["PIP_", "SSL_CERT_", "HOME"];

/// A shell in the sandbox that has the programs on its `PATH`, and the tree's `examples` and
/// `python` below it as in a checkout.
fn tutorial_shell(sandbox: &Sandbox) -> Command {
    let artefacts = Artefacts::get();
    for folder in ["examples", "python"] {
        let link = sandbox.path(folder);
        std::os::unix::fs::symlink(artefacts.root().join(folder), link).expect("a link");
    }
    let programs = artefacts.program("sublet");
    let mut path = programs.parent().expect("a folder").as_os_str().to_owned();
    path.push(":");
    path.push(std::env::var_os("PATH").unwrap_or_default());
    let mut command = sandbox.command("bash");
    command.env("PATH", path);
    for (name, value) in std::env::vars_os() {
        let of_pip = |prefix: &&str| name.to_string_lossy().starts_with(*prefix);
        if OF_PIP.iter().any(of_pip) {
            command.env(name, value);
        }
    }
    command
}

/// Whether the packages that a page needs can be had here: its commands up to and with the one that
/// fetches them end well.
fn can_have(script: &str, fetches: &str) -> bool {
    let lines: Vec<&str> = script.lines().collect();
    let at = lines.iter().position(|line| line.contains(fetches));
    let at = at.unwrap_or_else(|| panic!("no command has {fetches:?}"));
    let sandbox = Sandbox::new();
    let outcome = Outcome::of(tutorial_shell(&sandbox).args(["-euc", &lines[..=at].join("\n")]));
    outcome.code == Some(0)
}

fn commands_of_a_page_run(page: &str) {
    let path = Artefacts::get().root().join("docs").join(page);
    let text = std::fs::read_to_string(path).expect("a page");
    let script = pages::commands(&text).concat();
    assert!(!script.is_empty(), "no commands");
    let shows = pages::remarks(&text, "shows");
    assert!(!shows.is_empty(), "the page does not remark what it shows");
    for fetches in pages::remarks(&text, "needs") {
        if !can_have(&script, &fetches) {
            eprintln!("skipped: {page}: `{fetches}` fails on this machine");
            return;
        }
    }
    let sandbox = Sandbox::new();
    let outcome = Outcome::of(tutorial_shell(&sandbox).args(["-euc", &script]));
    assert_eq!(outcome.code, Some(0), "{outcome:?}");
    for shown in shows {
        assert!(
            outcome.stdout.lines().any(|line| line.starts_with(&shown)),
            "no line begins with {shown:?} in {outcome:?}"
        );
    }
}

/// Each has a test of its own below, so that they run beside each other.
const TUTORIALS: [&str; 6] = [
    "tutorials/container.md",
    "tutorials/first-pair.md",
    "tutorials/first-result.md",
    "tutorials/hami-kai.md",
    "tutorials/interference.md",
    "tutorials/notebook.md",
];

/// These need more than a sandbox: a script of their own runs their commands.
const BY_SCRIPTS: [(&str, &str); 3] = [
    ("tutorials/kubernetes.md", "scripts/k8s"),
    ("tutorials/ray.md", "scripts/ray"),
    ("tutorials/slurm.md", "scripts/slurm"),
];

#[test]
fn every_tutorial_has_a_test() {
    let pages = pages::all(&Artefacts::get().root().join("docs/tutorials"));
    let pages: Vec<_> = pages
        .iter()
        .map(|page| format!("tutorials/{}", page.display()))
        .collect();
    let mut tested = TUTORIALS.to_vec();
    let root = Artefacts::get().root();
    let checked = std::fs::read_to_string(root.join("scripts/check")).expect("a script");
    for (page, script) in BY_SCRIPTS {
        let text = std::fs::read_to_string(root.join(script)).expect("a script");
        assert!(
            text.contains(&format!("docs/{page}")),
            "{script} runs no {page}"
        );
        assert!(checked.contains(script), "scripts/check runs no {script}");
        tested.push(page);
    }
    tested.sort_unstable();
    assert_eq!(pages, tested);
}

#[test]
fn the_commands_of_the_container_tutorial_run() {
    commands_of_a_page_run(TUTORIALS[0]);
}

#[test]
fn the_commands_of_the_first_pair_run() {
    commands_of_a_page_run(TUTORIALS[1]);
}

#[test]
fn the_commands_of_the_first_result_run() {
    commands_of_a_page_run(TUTORIALS[2]);
}

#[test]
fn the_commands_beside_hami_and_kai_run() {
    commands_of_a_page_run(TUTORIALS[3]);
}

#[test]
fn the_commands_of_the_interference_tutorial_run() {
    commands_of_a_page_run(TUTORIALS[4]);
}

#[test]
fn the_commands_of_the_notebook_tutorial_run() {
    commands_of_a_page_run(TUTORIALS[5]);
}

#[test]
fn the_commands_of_the_page_on_encryption_run() {
    commands_of_a_page_run("how-to/cluster-tls.md");
}

#[test]
fn the_commands_before_the_instances_of_a_service_run() {
    commands_of_a_page_run("how-to/serving.md");
}

#[test]
fn the_commands_for_jobs_that_take_turns_run() {
    commands_of_a_page_run("how-to/take-turns.md");
}

#[test]
fn the_commands_for_those_who_come_from_others_run() {
    commands_of_a_page_run("how-to/coming-from.md");
}
