//! What the preload library has to know of others without importing them.

use std::collections::BTreeSet;
use std::fs;

use tests::Artefacts;

fn source(path: &str) -> String {
    let path = Artefacts::get().root().join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The value of a constant, as it is written.
fn constant<'a>(source: &'a str, name: &str) -> &'a str {
    let value = || {
        let (_, rest) = source.split_once(&format!("const {name}: "))?;
        let (_, value) = rest.split_once(" =")?;
        Some(value.split_once(";\n")?.0.trim())
    };
    value().unwrap_or_else(|| panic!("no constant {name}"))
}

/// The words of it.
fn words(value: &str) -> impl Iterator<Item = &str> {
    value.split('"').skip(1).step_by(2)
}

#[test]
fn the_library_sends_every_variable_that_the_arbiter_reads() {
    let source = source("interposer/src/attachment/asked.rs");
    let mut sent: BTreeSet<String> = BTreeSet::new();
    sent.extend(words(constant(&source, "OWN")).map(str::to_owned));
    sent.extend(words(constant(&source, "MPS")).map(str::to_owned));
    let devices: u32 = constant(&source, "HAMI_DEVICES").parse().expect("a number");
    for name in words(constant(&source, "HAMI")) {
        sent.insert(name.to_owned());
        sent.extend((0..devices).map(|at| format!("{name}_{at}")));
    }
    let read: BTreeSet<String> = control::environment::variables().into_iter().collect();
    assert_eq!(sent, read);
}

#[test]
fn the_library_looks_where_the_file_of_devices_puts_things() {
    let (library, command) = (
        source("interposer/src/attachment/asked.rs"),
        source("cli/src/cdi/mod.rs"),
    );
    let one = |source: &str, name: &str| {
        let value = constant(source, name);
        words(value).next().expect("a word").to_owned()
    };
    assert_eq!(
        one(&library, "LIBRARY"),
        format!("{}/libsublet.so", one(&command, "LIBRARIES"))
    );
    assert_eq!(
        one(&library, "SOCKET"),
        format!("{}/channel.sock", one(&command, "RUNTIME"))
    );
}
