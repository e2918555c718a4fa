//! The page of systems: it is what the list says, and every test and script it names is there.

use std::fs;
use std::path::{Path, PathBuf};

#[path = "../examples/systems_doc/systems.rs"]
mod systems;

use systems::{Check, SYSTEMS, System};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The file has a function of this name, and it is a test that is run.
fn is_test(file: &Path, name: &str) -> bool {
    let Ok(text) = fs::read_to_string(file) else {
        return false;
    };
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let head = format!("fn {name}(");
    let Some(at) = lines.iter().position(|line| line.starts_with(&head)) else {
        return false;
    };
    let above = lines[..at].iter().rev();
    let attributes: Vec<_> = above.take_while(|line| line.starts_with("#[")).collect();
    attributes.iter().any(|line| **line == "#[test]")
        && !attributes.iter().any(|line| line.starts_with("#[ignore"))
}

/// The script is there; what stands after `--only` is a word of a program's source.
fn is_script(line: &str) -> bool {
    let words: Vec<&str> = line.split(' ').collect();
    let Some(program) = words.first().filter(|word| root().join(word).is_file()) else {
        return false;
    };
    let only = words.iter().position(|word| *word == "--only");
    let Some(part) = only.map(|at| words.get(at + 1).copied().unwrap_or_default()) else {
        return true;
    };
    let name = program.rsplit('/').next().unwrap_or_default();
    let examples = root().join("cluster/examples");
    let quoted = format!("\"{part}\"");
    let has = |file: PathBuf| fs::read_to_string(file).is_ok_and(|text| text.contains(&quoted));
    has(examples.join(format!("{name}.rs"))) || has(examples.join(name).join(format!("{part}.rs")))
}

fn checks(system: &System) -> impl Iterator<Item = &Check> {
    let all = [system.mechanism, system.simulator, system.live];
    all.into_iter().flatten()
}

#[test]
fn the_page_of_systems_is_the_list() {
    let page = fs::read_to_string(root().join("docs/reference/systems.md")).unwrap_or_default();
    assert!(
        page == systems::page(),
        "docs/reference/systems.md is not what the list says; run scripts/systems-doc"
    );
}

#[test]
fn every_test_and_script_of_the_list_is_there() {
    let mut wrong = Vec::new();
    for system in SYSTEMS {
        for check in checks(system) {
            match check {
                Check::Test(file, name) if !is_test(&root().join(file), name) => {
                    wrong.push(format!("{}: no test {name} in {file}", system.name));
                }
                Check::Script(line) if !is_script(line) => {
                    wrong.push(format!("{}: no script {line}", system.name));
                }
                Check::Test(..) | Check::Script(_) => {}
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn every_system_says_what_is_not_done_and_none_stands_twice() {
    for (at, system) in SYSTEMS.iter().enumerate() {
        assert!(!system.missing.is_empty(), "{}", system.name);
        let cells = [system.name, system.fitted, system.missing];
        assert!(
            !cells.iter().any(|cell| cell.contains(['|', '\n'])),
            "{}",
            system.name
        );
        assert!(SYSTEMS[..at].iter().all(|other| other.name != system.name));
        // Nothing is checked only where all of it is said to be missing.
        let unchecked = checks(system).next().is_none();
        assert_eq!(unchecked, system.missing == "all of it", "{}", system.name);
    }
}

#[test]
fn what_is_not_there_is_found_out() {
    let here = root().join("policy/tests/systems.rs");
    assert!(is_test(&here, "what_is_not_there_is_found_out"));
    assert!(!is_test(&here, "is_test"), "a function that is no test");
    assert!(
        !is_test(&here, "what_is_not_there"),
        "the beginning of a name"
    );
    assert!(!is_test(&root().join("policy/tests/none.rs"), "none"));
    assert!(is_script("scripts/sim/systems --only mlfs"));
    assert!(!is_script("scripts/sim/systems --only none"));
    assert!(!is_script("scripts/sim/none"));
}
