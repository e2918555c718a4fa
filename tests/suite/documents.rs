//! What is written down agrees with what is built.

use std::collections::{BTreeMap, BTreeSet};
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

/// How long a constant lasts, in nanoseconds; `None`: it cannot be read.
fn length_ns(name: &str, value: &str) -> Option<u64> {
    let number = |text: &str| -> Option<u64> {
        let factors = text.split('*');
        let factors = factors.map(|one| one.trim().replace('_', "").parse::<u64>().ok());
        factors.product()
    };
    let units = [
        ("Duration::from_secs(", 1_000_000_000),
        ("Duration::from_millis(", 1_000_000),
        ("Duration::from_micros(", 1000),
    ];
    for (unit, ns) in units {
        if let Some(rest) = value.strip_prefix(unit) {
            return Some(number(rest.strip_suffix(')')?)? * ns);
        }
    }
    let ns = if name.ends_with("_MS") { 1_000_000 } else { 1 };
    Some(number(value)? * ns)
}

/// Times of a source whose comment says TIMEOUT, by name, with their lengths; those of its tests
/// do not count.
fn deadlines_in(source: &str) -> Vec<(String, Option<u64>)> {
    let code = source.split("\nmod tests {").next().unwrap_or(source);
    let lines: Vec<&str> = code.lines().collect();
    let mut found = Vec::new();
    for (at, line) in lines.iter().enumerate() {
        let Some((before, _)) = line.split_once("const ") else {
            continue;
        };
        let before = before.trim();
        let above = lines[..at].iter().rev().map(|line| line.trim_start());
        let mut comment = above.take_while(|line| line.starts_with("//") || line.starts_with("#["));
        let declares = before.is_empty() || before.starts_with("pub");
        if !declares || !comment.any(|line| line.contains("TIMEOUT")) {
            continue;
        }
        let rest = lines[at..].join(" ");
        let words: Vec<&str> = rest
            .split(';')
            .next()
            .unwrap_or("")
            .split_whitespace()
            .collect();
        let declaration = words.join(" ");
        let parts = declaration.split_once("const ").and_then(|(_, declared)| {
            let (name, rest) = declared.split_once(": ")?;
            let (kind, value) = rest.split_once(" = ")?;
            Some((name, kind, value))
        });
        let Some((name, kind, value)) = parts else {
            continue;
        };
        if kind == "Duration" || name.ends_with("_NS") || name.ends_with("_MS") {
            found.push((name.to_owned(), length_ns(name, value)));
        }
    }
    found
}

/// Whether there is a test that is named like this: package, target, and path in that target.
fn is_test(root: &Path, named: &str) -> bool {
    let words: Vec<&str> = named.split_whitespace().collect();
    let [package, target, path @ ..] = &words[..] else {
        return false;
    };
    let folder = root.join(match (*package, *target) {
        (_, "lib") => format!("{package}/src"),
        ("tests", _) => "tests/suite".to_owned(),
        ("host-process", _) => "tests/host-process/suite".to_owned(),
        _ => format!("{package}/tests"),
    });
    // A path that is too long for its line goes on in the next one.
    let path = path.concat();
    let mut modules: Vec<&str> = path.split("::").collect();
    let Some(name) = modules.pop() else {
        return false;
    };
    let wanted = format!("fn {name}()");
    let mut files = Vec::new();
    // Tests lie in a file of their own, or in the module `tests` at the end of what they test.
    for _ in 0..2 {
        let file = if modules.is_empty() {
            (*target).to_owned()
        } else {
            modules.join("/")
        };
        files.push(folder.join(format!("{file}.rs")));
        files.push(folder.join(file).join("mod.rs"));
        if modules.last() == Some(&"tests") {
            modules.pop();
        }
    }
    let mut texts = files
        .iter()
        .filter_map(|file| std::fs::read_to_string(file).ok());
    texts.any(|text| text.contains(&wanted))
}

/// All deadlines of a second or more of the arbiter and of the preload library, in seconds.
fn deadlines_of_seconds(root: &Path) -> BTreeMap<String, f64> {
    let mut open = vec![root.join("arbiter/src"), root.join("interposer/src")];
    let mut deadlines = BTreeMap::new();
    while let Some(path) = open.pop() {
        if path.is_dir() {
            let entries = std::fs::read_dir(&path).expect("a folder").flatten();
            open.extend(entries.map(|entry| entry.path()));
        } else if path.extension().is_some_and(|it| it == "rs") {
            let file = path.strip_prefix(root).expect("a source of ours").display();
            let source = std::fs::read_to_string(&path).expect("a source");
            for (name, ns) in deadlines_in(&source) {
                let ns = ns.unwrap_or_else(|| panic!("{file}: {name}: how long is that?"));
                if ns >= 1_000_000_000 {
                    // CAST: far below 2^53.
                    deadlines.insert(format!("{file}: {name}"), ns as f64 / 1e9);
                }
            }
        }
    }
    deadlines
}

#[test]
fn every_deadline_of_seconds_is_listed_with_what_ends_it_earlier() {
    let root = Artefacts::get().root();
    let deadlines = deadlines_of_seconds(root);
    assert!(deadlines.len() > 40, "{deadlines:?}");
    let page = std::fs::read_to_string(root.join("docs/reference/deadlines.md"));
    let page = page.expect("docs/reference/deadlines.md");
    let mut wrong = Vec::new();
    let mut listed = BTreeSet::new();
    for row in page.split("\n- `").skip(1) {
        let row = row.split("\n\n").next().unwrap_or(row);
        let (name, rest) = row.split_once("`: ").unwrap_or((row, ""));
        let Some(seconds) = deadlines.get(name) else {
            wrong.push(format!(
                "{name}: no deadline of a second or more has this name"
            ));
            continue;
        };
        listed.insert(name);
        let said = rest.lines().next().unwrap_or_default();
        let length = format!("{seconds} s");
        if said != length && !said.starts_with(&format!("{length}, ")) {
            wrong.push(format!("{name}: it takes {length} and not {said}"));
        }
        for part in ["Bounds", "Ends earlier", "Test"] {
            if !rest.contains(&format!("\n  - {part}: ")) {
                wrong.push(format!("{name}: the row lacks `{part}`"));
            }
        }
        let tests = rest.split("\n  - Test: ").nth(1).unwrap_or_default();
        if !tests.contains('`') && tests.trim() != "no test" {
            wrong.push(format!("{name}: name a test, or write `no test`"));
        }
        for test in tests.split('`').skip(1).step_by(2) {
            if !is_test(root, test) {
                wrong.push(format!("{name}: there is no test `{test}`"));
            }
        }
    }
    let missing = deadlines
        .keys()
        .filter(|name| !listed.contains(name.as_str()));
    wrong.extend(missing.map(|name| format!("{name}: it is not listed")));
    println!(
        "now: {} deadlines of a second or more, {} of them without a test",
        deadlines.len(),
        page.matches("- Test: no test").count()
    );
    assert_eq!(
        wrong,
        Vec::<String>::new(),
        "say in docs/reference/deadlines.md what ends each wait earlier in the ordinary case"
    );
}

#[test]
fn deadlines_are_read_in_every_form() {
    let source = "\
/// Long. TIMEOUT: a week.
const WEEK_NS: u64 = 7 * 24 * 3600 * 1_000_000_000;
/// No limit.
const OTHER_NS: u64 = 5_000_000_000;
/// TIMEOUT: a moment,
/// and some.
#[allow(unused, reason = \"an example\")]
pub(crate) const SHORT: Duration = Duration::from_millis(20);
/// TIMEOUT: in two lines.
pub const EXPIRES_MS: u64 =
    120_000;
fn act() {
    // TIMEOUT: within a function.
    const INSIDE: Duration = Duration::from_secs(3);
}
/// TIMEOUT: not a time.
const MOST: u64 = 10;
/// TIMEOUT: another one's.
const SAME_NS: u64 = WEEK_NS;
#[cfg(test)]
mod tests {
    /// TIMEOUT: of a test.
    const PATIENCE: Duration = Duration::from_secs(60);
}
";
    let found = deadlines_in(source);
    let found: Vec<_> = found
        .iter()
        .map(|(name, ns)| (name.as_str(), *ns))
        .collect();
    assert_eq!(
        found,
        [
            ("WEEK_NS", Some(604_800_000_000_000)),
            ("SHORT", Some(20_000_000)),
            ("EXPIRES_MS", Some(120_000_000_000)),
            ("INSIDE", Some(3_000_000_000)),
            ("SAME_NS", None),
        ]
    );
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
