//! What is written down agrees with what is built.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

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
        .filter(|page| !page.starts_with("results/simgpu") && page != Path::new("SUMMARY.md"))
        .collect()
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

#[test]
fn the_commands_of_the_tutorials_run() {
    let artefacts = Artefacts::get();
    let tutorials = artefacts.root().join("docs/tutorials");
    let pages = pages::all(&tutorials);
    assert!(!pages.is_empty(), "the tutorials have moved");
    for page in pages {
        let text = std::fs::read_to_string(tutorials.join(&page)).expect("a tutorial");
        let script = pages::commands(&text).concat();
        assert!(!script.is_empty(), "{}: no commands", page.display());
        let sandbox = Sandbox::new();
        let programs = artefacts.program("sublet");
        let mut path = programs.parent().expect("a folder").as_os_str().to_owned();
        path.push(":");
        path.push(std::env::var_os("PATH").unwrap_or_default());
        let outcome = Outcome::of(
            sandbox
                .command("bash")
                .args(["-euc", &script])
                .env("PATH", path),
        );
        assert_eq!(outcome.code, Some(0), "{}: {outcome:?}", page.display());
        // What the page shows: both jobs run, and the third is refused.
        for shown in ["a ", "b ", "ended with code 2"] {
            assert!(
                outcome.stdout.lines().any(|line| line.starts_with(shown)),
                "{}: no {shown:?} in {outcome:?}",
                page.display()
            );
        }
    }
}
