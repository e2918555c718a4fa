//! What is written down agrees with what is built.

use tests::coverage;
use tests::elf::Library;
use tests::{Artefacts, hooks_doc};

#[test]
fn the_page_of_hooks_is_the_tables() {
    let path = Artefacts::get().root().join("docs/hooks.md");
    let text = std::fs::read_to_string(&path).expect("docs/hooks.md");
    assert!(
        text == hooks_doc::page(),
        "docs/hooks.md is not what the table says; run scripts/hooks-doc"
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
