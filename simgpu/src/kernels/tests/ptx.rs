//! The committed PTX against the host_kernels' parameter lists.

use std::collections::BTreeMap;

use super::*;

/// The entries of a PTX text with the sizes of their parameters in bytes.
fn entries(ptx: &str) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    for entry in ptx.split(".visible .entry ").skip(1) {
        let (name, rest) = entry
            .split_once('(')
            .expect("an entry has a parameter list");
        let (list, _) = rest.split_once(')').expect("a parameter list ends");
        let sizes = list
            .split(',')
            .filter(|parameter| !parameter.trim().is_empty())
            .map(|parameter| {
                let mut words = parameter.split_whitespace();
                assert_eq!(words.next(), Some(".param"), "{name}: {parameter}");
                match words.next() {
                    Some(".u64" | ".s64" | ".b64" | ".f64") => 8,
                    Some(".u32" | ".s32" | ".b32" | ".f32") => 4,
                    other => panic!("{name}: a parameter of type {other:?}"),
                }
            })
            .collect();
        assert!(
            found.insert(name.trim().to_owned(), sizes).is_none(),
            "{name} appears twice"
        );
    }
    found
}

#[test]
fn the_committed_ptx_has_the_host_kernels_entries_and_parameters() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
    let mut shipped = BTreeMap::new();
    for file in std::fs::read_dir(&folder).expect("the kernels' folder is there") {
        let path = file.expect("the folder can be listed").path();
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("ptx") => {}
            Some("cu") => {
                assert!(
                    path.with_extension("ptx").exists(),
                    "{} is not compiled: run scripts/kernels",
                    path.display()
                );
                continue;
            }
            _ => continue,
        }
        let ptx = std::fs::read_to_string(&path).expect("the PTX can be read");
        assert!(
            ptx.contains(".target sm_75"),
            "{}: the T4 could not run it",
            path.display()
        );
        shipped.append(&mut entries(&ptx));
    }
    let host_kernels: BTreeMap<String, Vec<u8>> = all()
        .iter()
        .map(|kernel| (kernel.name.to_owned(), kernel.param_sizes.to_vec()))
        .collect();
    assert_eq!(shipped, host_kernels);
}

/// FNV-1a in 64 bits, as in scripts/kernels.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xCBF2_9CE4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01B3)
    })
}

#[test]
fn the_committed_ptx_was_compiled_from_the_committed_sources() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
    let mut sources = 0;
    for file in std::fs::read_dir(&folder).expect("the kernels' folder is there") {
        let path = file.expect("the folder can be listed").path();
        if path.extension().is_none_or(|extension| extension != "cu") {
            continue;
        }
        sources += 1;
        let source = std::fs::read(&path).expect("the source can be read");
        let ptx = std::fs::read_to_string(path.with_extension("ptx")).expect("the PTX can be read");
        let line = format!("// source {:016x}\n", fnv1a(&source));
        assert!(
            ptx.contains(&line),
            "{} was edited after it was compiled: run scripts/kernels",
            path.display()
        );
    }
    assert!(sources >= 7, "{sources} sources");
}
