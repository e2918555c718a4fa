//! The recipes of docs/explanation/architecture.md: a policy touches two files, its own and the
//! list of its kind. Held for every policy there is, by what the other files of the crate say of
//! it.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// A folder of policies: its `mod.rs` lists the registrations of the files beside it.
const FOLDERS: [&str; 7] = [
    "slices",
    "cluster/order",
    "cluster/packer",
    "cluster/placer",
    "cluster/admission",
    "cluster/sizer",
    "cluster/round_allocator",
];
/// The one policy with two sides, registered in the file of the sizer: the admission's list names
/// the sizer's folder.
const TWO_SIDED: &str = "MINIMUM_SHARE_ADMISSION";

fn sources(folder: &Path, into: &mut BTreeMap<PathBuf, String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, into);
        } else if path.extension().is_some_and(|end| end == "rs") {
            into.insert(path.clone(), fs::read_to_string(&path).unwrap());
        }
    }
}

/// Names of the registrations in a file.
fn registrations(text: &str) -> Vec<&str> {
    let lines = text.lines();
    let named = lines.filter_map(|line| {
        let rest = line.trim_start().strip_prefix("pub(")?;
        let (name, kind) = rest.split_once(") static ")?.1.split_once(": ")?;
        (kind.starts_with("SliceRegistration") || kind.starts_with("Entry<")).then_some(name)
    });
    named.collect()
}

#[test]
fn a_policy_touches_its_own_file_and_the_list_of_its_kind() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut all = BTreeMap::new();
    sources(&src, &mut all);
    let mut policies = 0;
    for folder in FOLDERS {
        let list = src.join(folder).join("mod.rs");
        for (path, text) in &all {
            // A module is a file, or the `mod.rs` of a folder.
            let is_folder = path.ends_with("mod.rs");
            let module = if is_folder {
                path.parent().unwrap()
            } else {
                path
            };
            let own = module.parent() == Some(&src.join(folder)) && *path != list;
            let names = if own { registrations(text) } else { Vec::new() };
            let module = module.file_stem().unwrap().to_str().unwrap();
            for name in names {
                policies += 1;
                let entry = format!("{module}::{name}");
                let says = |at: &PathBuf| {
                    let lines = all[at].lines().map(str::trim_start);
                    let code = lines.filter(|line| !line.starts_with("//"));
                    let part = |c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == ':');
                    let names = |line: &&str| line.split(part).any(|word| word == entry);
                    code.filter(names).count()
                };
                assert_eq!(
                    says(&list),
                    1,
                    "{entry} is listed once in {}",
                    list.display()
                );
                let others: Vec<_> = (all.keys())
                    .filter(|at| *at != path && **at != list && says(at) > 0)
                    .collect();
                assert!(others.is_empty(), "{entry} is named by {others:?} as well");
            }
        }
    }
    let two_sided = all.values().filter(|text| text.contains(TWO_SIDED)).count();
    assert_eq!(two_sided, 2, "the lists of sizers and of admissions");
    let known = policy::POLICIES.len() + policy::cluster::catalogue::entries().len();
    println!("now: {known} policies, each in its own file and one list");
    assert_eq!(policies, known, "every registration was found");
}
