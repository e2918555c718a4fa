//! What is known of a driver symbol is known from its row of the table: nothing in the preload
//! library tells symbols apart by lists.

use std::path::{Path, PathBuf};

use tests::Artefacts;

/// All sources below a folder.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut open = vec![folder.to_owned()];
    let mut files = Vec::new();
    while let Some(folder) = open.pop() {
        for entry in std::fs::read_dir(&folder).expect("a folder").flatten() {
            let path = entry.path();
            if path.is_dir() {
                open.push(path);
            } else if path.extension().is_some_and(|ending| ending == "rs") {
                files.push(path);
            }
        }
    }
    files
}

/// The code of a source without comments and without what is only there for tests.
fn code(text: &str) -> String {
    let text = text.split("#[cfg(test)]").next().unwrap_or_default();
    let lines = text
        .lines()
        .map(|line| line.split("//").next().unwrap_or_default());
    lines.collect::<Vec<_>>().join(" ")
}

/// Driver symbols that stand in patterns, and imports that would hide them.
fn symbols_of(text: &str) -> Vec<String> {
    let code = code(text);
    let mut found = Vec::new();
    if code.contains("use Symbol::") || code.contains("::Symbol::{") || code.contains("::Symbol::*")
    {
        found.push("an import of symbols".to_owned());
    }
    for (at, _) in code.match_indices("Symbol::cu") {
        let rest = &code[at + "Symbol::".len()..];
        let end = rest
            .find(|letter: char| !letter.is_alphanumeric() && letter != '_')
            .unwrap_or(rest.len());
        let (name, after) = rest.split_at(end);
        let (before, after) = (code[..at].trim_end(), after.trim_start());
        let alternative = |text: &str| text.starts_with('|') && !text.starts_with("||");
        let pattern = after.starts_with("=>")
            || after.starts_with("if ")
            || alternative(after)
            || (before.ends_with('|') && !before.ends_with("||"))
            || (before.ends_with(',')
                && after.starts_with(')')
                && code[..at].rfind("matches!(") > code[..at].rfind(';'));
        if pattern {
            found.push(name.to_owned());
        }
    }
    found
}

#[test]
fn lists_of_symbols_are_seen() {
    for (text, count) in [
        ("match symbol { Symbol::cuInit => 1, _ => 2 }", 1),
        (
            "match symbol { Symbol::cuInit | Symbol::cuMemMap => 1, _ => 2 }",
            2,
        ),
        ("matches!(symbol, Symbol::cuInit\n | Symbol::cuMemMap)", 2),
        ("matches!(symbol, Symbol::cuInit)", 1),
        ("match symbol { Symbol::cuInit if ready => 1, _ => 2 }", 1),
        ("use Symbol::*;", 1),
        ("real::exported(Symbol::cuCtxRecordEvent) || known", 0),
        ("// Symbol::cuInit | Symbol::cuMemMap", 0),
    ] {
        assert_eq!(symbols_of(text).len(), count, "{text}");
    }
}

#[test]
fn the_preload_library_tells_symbols_apart_by_the_table_alone() {
    let folder = Artefacts::get().root().join("interposer/src");
    let files = sources(&folder);
    assert!(
        files.len() > 50,
        "{} sources: the folder has moved",
        files.len()
    );
    let found: Vec<String> = files
        .iter()
        .filter_map(|path| {
            let text = std::fs::read_to_string(path).expect("a source");
            let found = symbols_of(&text);
            (!found.is_empty()).then(|| format!("{}: {found:?}", path.display()))
        })
        .collect();
    assert_eq!(
        found,
        Vec::<String>::new(),
        "these are decided by symbol: give the rows of shim-ffi/src/table.rs a trait instead"
    );
}
