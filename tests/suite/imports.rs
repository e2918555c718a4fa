//! Who may import whom, and what may be linked at all: crates from `cargo metadata`, modules from
//! their sources.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

use serde_json::Value;
use testbed::CommandWithin;
use tests::Artefacts;
use tests::floors::{self, CRATES, Crate};
use tests::modules::{self, Modules};

/// The resolved graph of the workspace.
struct Graph {
    packages: BTreeMap<String, Value>,
    /// Package -> what it depends on, by kind (`normal`, `build`, `dev`).
    edges: BTreeMap<String, Vec<(String, String)>>,
    members: BTreeSet<String>,
}

impl Graph {
    fn read() -> Self {
        let output = Command::new(option_env!("CARGO").unwrap_or("cargo"))
            .args(["metadata", "--format-version", "1", "--locked"])
            .args(["--filter-platform", "x86_64-unknown-linux-gnu"])
            .current_dir(Artefacts::get().root())
            .output_within(testbed::PATIENCE);
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        let metadata: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let packages = list(&metadata["packages"])
            .into_iter()
            .map(|package| (text(&package["id"]), package))
            .collect();
        let edges = list(&metadata["resolve"]["nodes"])
            .iter()
            .map(|node| {
                let to = list(&node["deps"])
                    .iter()
                    .flat_map(|dep| {
                        let id = text(&dep["pkg"]);
                        list(&dep["dep_kinds"]).into_iter().map(move |kind| {
                            let kind = kind["kind"].as_str().unwrap_or("normal").to_owned();
                            (id.clone(), kind)
                        })
                    })
                    .collect();
                (text(&node["id"]), to)
            })
            .collect();
        let members = list(&metadata["workspace_members"])
            .iter()
            .map(text)
            .collect();
        Self {
            packages,
            edges,
            members,
        }
    }

    fn name(&self, id: &str) -> &str {
        self.packages[id]["name"].as_str().expect("a name")
    }

    fn member(&self, name: &str) -> &str {
        self.members
            .iter()
            .find(|id| self.name(id) == name)
            .unwrap_or_else(|| panic!("no member {name}"))
    }

    /// Everything that a build of `name` links or runs, by package name.
    fn tree(&self, name: &str) -> BTreeSet<&str> {
        let mut seen = BTreeSet::new();
        let mut open = vec![self.member(name)];
        while let Some(id) = open.pop() {
            for (to, kind) in &self.edges[id] {
                if kind != "dev" && seen.insert(to.as_str()) {
                    open.push(to);
                }
            }
        }
        seen.into_iter().map(|id| self.name(id)).collect()
    }

    /// The members in the tree of `name`.
    fn ours(&self, name: &str) -> BTreeSet<&str> {
        let members: BTreeSet<&str> = self.members.iter().map(|id| self.name(id)).collect();
        self.tree(name)
            .into_iter()
            .filter(|name| members.contains(name))
            .collect()
    }
}

#[test]
fn imports_point_one_way() {
    let graph = Graph::read();
    for (member, allowed) in [
        ("shim-ffi", &[][..]),
        ("host-memory", &[]),
        ("channel", &[]),
        ("policy", &[]),
        ("control", &[]),
        ("certificates", &[]),
        ("interposer", &["shim-ffi", "channel", "host-memory"]),
        (
            "arbiter",
            &[
                "certificates",
                "channel",
                "policy",
                "control",
                "shim-ffi",
                "host-memory",
            ],
        ),
        ("simgpu", &["shim-ffi", "host-memory"]),
        ("simgpu-libcuda", &["simgpu", "shim-ffi", "host-memory"]),
        (
            "simgpu-libnvidia-ml",
            &["simgpu", "shim-ffi", "host-memory"],
        ),
        ("cluster", &["certificates", "policy", "control"]),
        ("kubernetes", &["certificates", "control"]),
        ("slurm", &["control"]),
        ("slurm-22-05", &["slurm", "control"]),
        ("slurm-24-11", &["slurm", "control"]),
        ("slurm-26-05", &["slurm", "control"]),
        (
            "cli",
            &[
                "arbiter",
                "certificates",
                "channel",
                "cluster",
                "control",
                "host-memory",
                "kubernetes",
                "policy",
                "shim-ffi",
            ],
        ),
        ("examples", &["shim-ffi"]),
    ] {
        let stray: Vec<_> = graph
            .ours(member)
            .into_iter()
            .filter(|import| !allowed.contains(import))
            .collect();
        assert!(stray.is_empty(), "{member} must not import {stray:?}");
    }
}

#[test]
fn no_module_imports_one_of_a_higher_floor() {
    let root = Artefacts::get().root();
    let wrong: Vec<String> = CRATES
        .iter()
        .flat_map(|of| of.wrong(&of.modules(root)))
        .collect();
    assert_eq!(
        wrong,
        Vec::<String>::new(),
        "modules stand on floors (tests/src/floors.rs): give a new one its floor; what a lower one \
         needs of a higher one comes by an argument, an answer, or a function that is handed down"
    );
}

#[test]
fn every_crate_with_modules_has_floors() {
    let graph = Graph::read();
    for id in &graph.members {
        let name = graph.name(id);
        let manifest = graph.packages[id]["manifest_path"]
            .as_str()
            .expect("a path");
        let sources = Path::new(manifest).with_file_name("src");
        if sources.is_dir() && Modules::below(&sources).paths().count() > 1 {
            let of = CRATES.iter().find(|of| of.name == name);
            let of = of.unwrap_or_else(|| panic!("{name} has no floors in tests/src/floors.rs"));
            assert_eq!(Artefacts::get().root().join(of.folder).join("src"), sources);
        }
    }
}

#[test]
fn the_list_of_floors_is_the_sources() {
    let root = Artefacts::get().root();
    let page = std::fs::read_to_string(root.join(floors::PAGE)).expect("the page");
    assert!(
        page == floors::written_into(&page, root),
        "{} is not what the sources say; run scripts/floors",
        floors::PAGE
    );
}

/// The modules of a crate that has these sources, by path.
fn crate_of(sources: &[(&str, &str)]) -> Modules {
    let path = |path: &str| -> Vec<String> {
        let names = path.split("::").filter(|name| !name.is_empty());
        names.map(str::to_owned).collect()
    };
    Modules::of(
        sources
            .iter()
            .map(|(at, text)| (path(at), (*text).to_owned())),
    )
}

const THREE_FLOORS: Crate = Crate {
    name: "building",
    folder: "building",
    in_full: true,
    floors: &[("", &["low"]), ("", &["middle", "other"]), ("", &["high"])],
};

/// What is wrong in a building with this text in module `low::inner`.
fn wrong_with(text: &str) -> Vec<String> {
    THREE_FLOORS.wrong(&crate_of(&[
        (
            "",
            "mod low; mod middle; mod other; mod high; pub use high::act as known;",
        ),
        ("low", "mod inner;"),
        ("low::inner", text),
        ("middle", "pub use crate::low::inner; mod part;"),
        (
            "middle::part",
            "use crate::other::A; use super::B; use crate::low;",
        ),
        ("other", "use crate::middle::part; use crate::low::inner;"),
        (
            "high",
            "use crate::{low, middle::{self, part}}; fn act() { crate::other::go() }",
        ),
    ]))
}

#[test]
fn a_module_that_climbs_is_found() {
    for text in [
        "use crate::high;",
        "use crate::{low, high::act};",
        "use super::super::high::act as other_name;",
        "fn act() { crate::high::act() }",
        "fn act() { super::super::high::act() }",
        "macro_rules! act { () => { $crate::high::act() } }",
        "pub(crate) use crate::high::act;",
        "use crate::known;",
        "pub(in crate::low) use crate::high::act;",
        "mod inside { use crate::high::*; }",
        "mod inside { use super::super::super::high::act; }",
        "#[cfg(test)] mod tests { use crate::low; } use crate::high;",
        "#[cfg(not(test))] use crate::high;",
        "const TEXT: &str = \"// {\"; use crate::high; // {",
    ] {
        let wrong = wrong_with(text);
        assert_eq!(
            wrong,
            ["building: `low::inner` (floor 1) imports `high` (floor 3)"],
            "{text}"
        );
    }
}

#[test]
fn what_does_not_climb_is_left_alone() {
    for text in [
        "",
        "use super::Something; use crate::low; use std::high::act; use self::high::act;",
        "// use crate::high;\n/* crate::high::act() */ /// [`crate::high`]",
        "const TEXT: &str = \"use crate::high;\"; const OTHER: &str = r#\"\"crate::high::a\"#;",
        "#[cfg(test)] mod tests { use crate::high; fn act() { { crate::high::act() } } }",
        "#[cfg(test)]\n#[allow(unused)]\nuse crate::high;",
        "mod inside { use super::high; }",
        "pub(in crate::high) fn act() {}",
        "fn act() { Some::high::act() }",
    ] {
        assert_eq!(wrong_with(text), Vec::<String>::new(), "{text}");
    }
}

#[test]
fn a_module_without_a_floor_is_found() {
    let of = |root| THREE_FLOORS.wrong(&crate_of(&[("", root), ("low", ""), ("attic", "")]));
    assert_eq!(
        of("mod low; mod attic;"),
        [
            "`attic` of building stands on 0 floors",
            "building has no module `middle`",
            "building has no module `other`",
            "building has no module `high`",
        ]
    );
    // Files that nothing but tests declares.
    assert_eq!(of("mod low; #[cfg(test)] mod attic;").len(), 3);
}

#[test]
fn circles_are_found() {
    let edges = [
        ("a", "b"),
        ("b", "c"),
        ("c", "a"),
        ("c", "d"),
        ("d", "e"),
        ("f", "f"),
    ];
    let mut of = BTreeMap::<&str, BTreeSet<&str>>::new();
    for (from, to) in edges {
        of.entry(from).or_default().insert(to);
    }
    assert_eq!(modules::circles(&of), [BTreeSet::from(["a", "b", "c"])]);
    let building = crate_of(&[
        ("", "mod low; mod middle; mod other; mod high;"),
        ("low", "mod one; mod two; fn act() { one::act() }"),
        ("low::one", "use super::act; use crate::low::two;"),
        ("low::two", ""),
        ("middle", "use crate::other;"),
        ("other", "use crate::middle;"),
        ("high", ""),
    ]);
    assert_eq!(
        THREE_FLOORS.circles(&building),
        [vec!["middle", "other"], vec!["low", "low::one"]]
    );
}

#[test]
fn no_crate_is_for_everything() {
    let graph = Graph::read();
    for id in &graph.members {
        let name = graph.name(id);
        assert!(
            ![
                "common", "utils", "util", "types", "core", "shared", "helpers"
            ]
            .contains(&name),
            "{name} says nothing about where its code runs"
        );
        let package = &graph.packages[id];
        assert_eq!(
            package["publish"].as_array().map(Vec::len),
            Some(0),
            "{name} must say publish = false"
        );
        assert_eq!(package["license"], "Apache-2.0 OR MIT", "{name}");
    }
}

#[test]
fn tenants_carry_no_runtime_no_serialisation_and_no_logging() {
    let graph = Graph::read();
    let heavy = [
        "tokio",
        "async-std",
        "smol",
        "async-executor",
        "futures",
        "futures-util",
        "serde",
        "serde_json",
        "tracing",
        "tracing-core",
        "log",
    ];
    let tree = graph.tree("interposer");
    assert!(tree.contains("libc") && tree.contains("rustix"), "{tree:?}");
    for name in heavy {
        assert!(!tree.contains(name), "the preload library carries {name}");
    }
}

#[test]
fn policy_does_no_unsafe_and_no_input_or_output() {
    let sources = Artefacts::get().root().join("policy/src");
    let text = std::fs::read_to_string(sources.join("lib.rs")).expect("policy");
    assert!(text.contains("#![forbid(unsafe_code)]"));
    let mut open = vec![sources];
    let mut files = Vec::new();
    while let Some(folder) = open.pop() {
        for entry in std::fs::read_dir(&folder).expect("policy's sources") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                open.push(path);
            } else if path.extension().is_some_and(|ext| ext == "rs")
                // Tests may read recordings.
                && !path.ends_with("iterations_tests.rs")
            {
                files.push(path);
            }
        }
    }
    assert!(files.len() > 20, "{files:?}");
    for path in files {
        let text = std::fs::read_to_string(&path).expect("a source");
        for word in [
            "std::fs",
            "std::net",
            "std::io",
            "std::process",
            "Instant::now",
            "SystemTime::now",
        ] {
            assert!(!text.contains(word), "{}: {word}", path.display());
        }
    }
}

/// Lines, by number, with arithmetic that wraps and no reason for it in a comment above.
fn unexplained_wraps(source: &str) -> Vec<usize> {
    let code = source.split("#[cfg(test)]\nmod ").next().unwrap_or(source);
    let lines: Vec<&str> = code.lines().collect();
    let wraps = |line: &str| line.contains("wrapping_sub") || line.contains("wrapping_add");
    let numbers = (0..lines.len()).filter(|at| wraps(lines[*at]));
    let unexplained = numbers.filter(|at| {
        let above = &lines[at.saturating_sub(4)..*at];
        !above.iter().any(|line| line.contains("// WRAPPING: "))
    });
    unexplained.map(|at| at + 1).collect()
}

#[test]
fn arithmetic_that_wraps_has_a_reason() {
    let mut seen = 0;
    for folder in ["arbiter/src", "policy/src"] {
        let mut ahead = vec![Artefacts::get().root().join(folder)];
        while let Some(path) = ahead.pop() {
            if path.is_dir() {
                let inside = std::fs::read_dir(&path).expect("a folder");
                ahead.extend(inside.map(|entry| entry.expect("an entry").path()));
            } else if !path.to_string_lossy().contains("tests") {
                let source = std::fs::read_to_string(&path).expect("a source");
                seen += source.matches("// WRAPPING: ").count();
                let unexplained = unexplained_wraps(&source);
                assert!(
                    unexplained.is_empty(),
                    "{}: {unexplained:?}",
                    path.display()
                );
            }
        }
    }
    assert!(seen > 0, "there is some");
    println!("now: {seen} reasons for arithmetic that wraps");
}

#[test]
fn a_wrap_without_a_reason_is_found() {
    let source = "let a = b.wrapping_sub(c);\n// WRAPPING: a circle.\nlet d = e.wrapping_add(1);";
    assert_eq!(unexplained_wraps(source), [1]);
}

/// The fields of a structure in a source, as they are written; `None`: it is not there.
fn fields<'a>(source: &'a str, name: &str) -> Option<Vec<&'a str>> {
    let (_, after) = source.split_once(&format!("struct {name}"))?;
    let (body, end) = match after.as_bytes().first()? {
        b' ' => (after.strip_prefix(" {")?, "\n}"),
        b'(' => (after.strip_prefix('(')?, ");"),
        _ => return None,
    };
    let (body, _) = body.split_once(end)?;
    let lines = body.lines().map(str::trim);
    let fields = lines.filter(|line| !line.is_empty() && !line.starts_with("//"));
    Some(fields.map(|field| field.trim_end_matches(',')).collect())
}

#[test]
fn the_arbiter_owns_parts_that_show_no_field() {
    let sources = Artefacts::get().root().join("arbiter/src");
    let mut files: Vec<String> = Vec::new();
    for folder in ["", "api", "residency"].map(|folder| sources.join(folder)) {
        for entry in std::fs::read_dir(folder).expect("the arbiter's sources") {
            let path = entry.expect("an entry").path();
            if path.extension().is_some_and(|ext| ext == "rs") {
                files.push(std::fs::read_to_string(path).expect("a source"));
            }
        }
    }
    let serve = std::fs::read_to_string(sources.join("serve.rs")).expect("a source");
    let parts = fields(&serve, "Arbiter").expect("the arbiter");
    assert!(parts.len() > 15, "{parts:?}");
    for part in parts {
        let (_, of) = part.split_once(": ").expect("a name and a type");
        // What time it is and random numbers: no state.
        if of == "Clock" {
            continue;
        }
        let found = files
            .iter()
            .find_map(|file| Some((file, fields(file, of)?)));
        let Some((file, own)) = found else {
            panic!("`{part}` is no part: give it a module of its own, and a structure");
        };
        let shown: Vec<_> = own.iter().filter(|own| own.starts_with("pub")).collect();
        assert!(shown.is_empty(), "`{of}` shows {shown:?}");
        assert!(
            !file.contains("impl Arbiter"),
            "the module of `{of}` reaches into the arbiter, and the arbiter into it"
        );
    }
}

#[test]
fn a_field_that_is_shown_is_found() {
    let source = "/// One.\npub struct One {\n    /// Its.\n    pub all: u64,\n    own: u64,\n}\n\
                  struct Two(Vec<u8>);\n";
    assert_eq!(
        fields(source, "One"),
        Some(vec!["pub all: u64", "own: u64"])
    );
    assert_eq!(fields(source, "Two"), Some(vec!["Vec<u8>"]));
    assert_eq!(fields(source, "Tw"), None);
}

/// Licences under which something may be linked. `deny.toml` has the same list for cargo-deny.
const ALLOWED: [&str; 9] = [
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "ISC",
    "MIT",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];

/// Whether an SPDX expression leaves a choice of allowed licences only. The old slash means OR.
fn permitted(expression: &str) -> bool {
    let spaced = expression
        .replace('(', " ( ")
        .replace(')', " ) ")
        .replace('/', " OR ");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let mut at = 0;
    let answer = any_of(&words, &mut at);
    answer && at == words.len()
}

fn any_of(words: &[&str], at: &mut usize) -> bool {
    let mut answer = all_of(words, at);
    while words.get(*at) == Some(&"OR") {
        *at += 1;
        answer |= all_of(words, at);
    }
    answer
}

fn all_of(words: &[&str], at: &mut usize) -> bool {
    let mut answer = one(words, at);
    while words.get(*at) == Some(&"AND") {
        *at += 1;
        answer &= one(words, at);
    }
    answer
}

fn one(words: &[&str], at: &mut usize) -> bool {
    let Some(word) = words.get(*at) else {
        return false;
    };
    *at += 1;
    if *word == "(" {
        let answer = any_of(words, at);
        *at += 1;
        return answer;
    }
    if words.get(*at) == Some(&"WITH") {
        let exception = words.get(*at + 1).copied().unwrap_or_default();
        *at += 2;
        return ALLOWED.contains(&format!("{word} WITH {exception}").as_str());
    }
    ALLOWED.contains(word)
}

#[test]
fn licence_expressions_are_read_as_written() {
    for (expression, answer) in [
        ("MIT", true),
        ("GPL-3.0", false),
        ("MIT OR GPL-3.0", true),
        ("MIT AND GPL-3.0", false),
        ("(MIT OR GPL-3.0) AND Unicode-3.0", true),
        ("(MIT AND GPL-3.0) OR LGPL-2.1", false),
        ("MIT/Apache-2.0", true),
        ("Apache-2.0 WITH LLVM-exception OR Apache-2.0 OR MIT", true),
        ("Apache-2.0 WITH Other-exception", false),
        ("", false),
    ] {
        assert_eq!(permitted(expression), answer, "{expression}");
    }
}

#[test]
fn every_dependency_is_permissively_licensed() {
    let graph = Graph::read();
    for package in graph.packages.values() {
        let licence = package["license"].as_str().unwrap_or_default();
        assert!(
            permitted(licence),
            "{} {} is licensed {licence:?}",
            package["name"],
            package["version"]
        );
        if let Some(source) = package["source"].as_str() {
            assert!(
                source.starts_with("registry+"),
                "{} comes from {source}",
                package["name"]
            );
        }
    }
}

#[test]
fn cargo_deny_allows_the_same_licences() {
    let text =
        std::fs::read_to_string(Artefacts::get().root().join("deny.toml")).expect("deny.toml");
    for licence in ALLOWED {
        assert!(text.contains(&format!("\"{licence}\"")), "{licence}");
    }
}

/// Packages whose tests start no process and inherit nothing that matters to them.
const PURE: [&str; 2] = ["policy", "shim-ffi"];

/// Test programs of that kind in other packages.
const PURE_PROGRAMS: [&str; 2] = ["loom", "granules"];

#[test]
fn every_test_program_starts_clean() {
    let graph = Graph::read();
    let mut missing = Vec::new();
    for id in &graph.members {
        let package = &graph.packages[id];
        for target in package["targets"].as_array().into_iter().flatten() {
            let name = target["name"].as_str().expect("a name");
            let kind = target["kind"][0].as_str().expect("a kind");
            if kind != "test" || PURE.contains(&graph.name(id)) || PURE_PROGRAMS.contains(&name) {
                continue;
            }
            let path = target["src_path"].as_str().expect("a path");
            let text = std::fs::read_to_string(path).expect("the source");
            if !text.contains("\ntestbed::starts_clean!();") {
                missing.push(path.to_owned());
            }
        }
    }
    assert_eq!(
        missing,
        Vec::<String>::new(),
        "these inherit signals, limits and variables from their caller: add testbed::starts_clean!();"
    );
}

#[test]
fn no_test_waits_without_a_limit() {
    const ENDLESS: [&str; 3] = [".output()", ".wait_with_output()", ".recv()"];
    let root = Artefacts::get().root();
    let mut open: Vec<_> = [
        "arbiter/tests",
        "channel/tests",
        "cli/tests",
        "cluster/tests",
        "control/src",
        "examples/tests",
        "simgpu/tests",
        "tests/host-process/src",
        "tests/host-process/suite",
        "tests/transparency/tests",
        "tests/src",
        "tests/suite",
    ]
    .map(|folder| root.join(folder))
    .into();
    let (mut files, mut found) = (0, Vec::new());
    while let Some(folder) = open.pop() {
        for entry in std::fs::read_dir(&folder).expect("a folder").flatten() {
            let path = entry.path();
            if path.is_dir() {
                open.push(path);
                continue;
            }
            let source = path.extension().is_some_and(|ending| ending == "rs");
            // This list is in this file, and the models of loom have no clock.
            if !source || path.ends_with("suite/imports.rs") || path.ends_with("tests/loom.rs") {
                continue;
            }
            files += 1;
            let text = std::fs::read_to_string(&path).expect("a source");
            for (number, line) in (1..).zip(text.lines()) {
                if ENDLESS.iter().any(|wait| line.contains(wait)) {
                    found.push(format!("{}:{number}: {}", path.display(), line.trim()));
                }
            }
        }
    }
    assert!(files > 50, "{files} sources: the folders have moved");
    assert_eq!(
        found,
        Vec::<String>::new(),
        "these wait for ever where something hangs: use testbed's `output_within`, or `recv_timeout`"
    );
}
