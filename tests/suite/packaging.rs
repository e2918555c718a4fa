//! What packages have in them, and the recipes that make them.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use tests::{Artefacts, Outcome, Sandbox};

/// Files below a folder, by their paths in it.
fn files(folder: &Path) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut open = vec![folder.to_owned()];
    while let Some(next) = open.pop() {
        for entry in fs::read_dir(&next).expect("a folder").flatten() {
            let path = entry.path();
            if path.is_dir() {
                open.push(path);
            } else {
                let below = path.strip_prefix(folder).expect("below it");
                found.insert(below.display().to_string());
            }
        }
    }
    found
}

/// The wheel and the Debian package take their files from the same layout.
#[test]
fn packages_have_the_libraries_a_page_for_each_command_and_three_completions() {
    let artefacts = Artefacts::get();
    let sandbox = Sandbox::new();
    let data = sandbox.path("layout/data");
    fs::create_dir(sandbox.path("layout")).expect("a folder");
    let built = artefacts.program("sublet");
    let built = built.parent().expect("a folder");
    let script = "import sys; sys.dont_write_bytecode = True; sys.path.insert(0, sys.argv[1])\n\
        from pathlib import Path\nimport sublet_build\n\
        sublet_build.lay_out(Path(sys.argv[2]), Path(sys.argv[2]), Path(sys.argv[3]))";
    let mut command = sandbox.command("python3");
    command.args(["-c", script]);
    command.arg(artefacts.root().join("python/build-backend"));
    command.arg(built).arg(&data);
    Outcome::of(&mut command).succeeded();
    let found = files(&data.join("data"));
    let has = |place: &str| assert!(found.contains(place), "no {place} in {found:#?}");
    for place in [
        "lib/sublet/libsublet.so",
        "lib/sublet/train_mlp",
        "lib/sublet/sim/libcuda.so",
        "lib/sublet/sim/libcuda.so.1",
        "lib/sublet/sim/libnvidia-ml.so.1",
        "lib/sublet/python/sublet/__init__.py",
        "lib/sublet/python/sublet/py.typed",
        "lib/sublet/python/step-hook/sitecustomize.py",
        "share/bash-completion/completions/sublet",
        "share/zsh/site-functions/_sublet",
        "share/fish/vendor_completions.d/sublet.fish",
        "share/man/man1/sublet.1",
    ] {
        has(place);
    }
    let help = Outcome::of(&mut sandbox.sublet(["--help"])).succeeded();
    let commands = help
        .stdout
        .lines()
        .skip_while(|line| !line.starts_with("Commands:"));
    let commands = commands.skip(1).take_while(|line| line.starts_with("  "));
    let mut count = 0;
    for line in commands {
        // A command's own line is indented by two, what goes on with it by more.
        let Some(name) = line
            .strip_prefix("  ")
            .filter(|rest| !rest.starts_with(' '))
        else {
            continue;
        };
        let name = name.split(' ').next().unwrap_or_default();
        if name != "help" {
            count += 1;
            has(&format!("share/man/man1/sublet-{name}.1"));
        }
    }
    assert!(count > 15, "{}", help.stdout);
}

/// As far as the recipe can be judged without a builder and a registry.
#[test]
fn the_image_s_recipe_is_one_that_builders_take_and_ends_without_rights() {
    let root = Artefacts::get().root();
    let path = root.join("packaging/container/Containerfile");
    let text = fs::read_to_string(path).expect("the recipe");
    let whole = text.replace("\\\n", " ");
    let mut words = Vec::new();
    for line in whole.lines().map(str::trim) {
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let (instruction, rest) = line.split_once(' ').expect("an instruction and its words");
        words.push((instruction, rest.trim()));
    }
    const KNOWN: [&str; 9] = [
        "FROM",
        "LABEL",
        "COPY",
        "RUN",
        "USER",
        "WORKDIR",
        "ENV",
        "ENTRYPOINT",
        "CMD",
    ];
    for (instruction, _) in &words {
        assert!(KNOWN.contains(instruction), "{instruction}");
    }
    let of = |wanted: &str| -> Vec<&str> {
        let all = words
            .iter()
            .filter(|(instruction, _)| *instruction == wanted);
        all.map(|(_, rest)| *rest).collect()
    };
    assert_eq!(words[0].0, "FROM");
    let from = of("FROM");
    assert_eq!(from.len(), 1);
    // The registry is named, since builders differ in their own; and no tag that moves on.
    let (image, tag) = from[0].rsplit_once(':').expect("a tag");
    assert!(
        image.matches('/').count() == 2 && tag != "latest",
        "{from:?}"
    );
    // What is copied is what scripts/package leaves behind.
    assert_eq!(of("COPY"), ["sublet_*_amd64.deb /tmp/"]);
    let runs = of("RUN");
    for run in &runs {
        for (at, _) in run.match_indices("apt-get install") {
            let end = run[at..].find("&&").map_or(run.len(), |end| at + end);
            assert!(run[at..end].contains("--yes"), "{run}");
            assert!(run[at..end].contains("--no-install-recommends"), "{run}");
            assert!(run[..at].contains("apt-get update"), "{run}");
            assert!(
                run[end..].contains("/var/lib/apt/lists"),
                "lists stay in the image: {run}"
            );
        }
        let sandbox = Sandbox::new();
        let checked = Outcome::of(sandbox.command("sh").args(["-n", "-c", run]));
        assert_eq!(checked.code, Some(0), "{checked:?}");
    }
    let last = words
        .iter()
        .rposition(|(instruction, _)| *instruction == "RUN");
    let user = words
        .iter()
        .rposition(|(instruction, _)| *instruction == "USER");
    assert!(user > last, "what runs in it is no root");
    assert!(!of("USER")[0].starts_with('0') && !of("USER")[0].contains("root"));
    for instruction in ["ENTRYPOINT", "CMD"] {
        let list: Vec<String> = serde_json::from_str(of(instruction)[0]).expect("words as JSON");
        assert_eq!(list.len(), 1, "{instruction}");
    }
}

#[test]
fn the_installer_refuses_what_it_does_not_know() {
    let root = Artefacts::get().root();
    let sandbox = Sandbox::new();
    for words in [&["--rot", "x"][..], &["somewhere"]] {
        let mut command = sandbox.command("bash");
        let outcome = Outcome::of(command.arg(root.join("scripts/install")).args(words));
        assert_eq!(outcome.code, Some(2), "{outcome:?}");
        assert!(
            outcome.stderr.starts_with("usage: scripts/install"),
            "{outcome:?}"
        );
    }
}

#[test]
fn the_installer_installs_where_its_caller_says() {
    let root = Artefacts::get().root();
    let sandbox = Sandbox::new();
    // Builds nothing, says where it would install, and ends there.
    let cargo = "#!/bin/sh\necho \"$@\" >>\"$LOG\"\n[ \"$1\" = build ]\n";
    for tool in ["cargo", "cc"] {
        let path = sandbox.path(tool);
        fs::write(&path, cargo).expect("a file");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("set");
    }
    let log = sandbox.path("log");
    let install = |words: &[&str], home: bool| {
        let mut command = sandbox.command("bash");
        let path = std::env::var("PATH").expect("a path");
        let path = format!("{}:{path}", sandbox.path("").display());
        command.env("PATH", path).env("LOG", &log);
        command.env("CARGO_TARGET_DIR", sandbox.path("target"));
        if !home {
            command.env_remove("HOME");
        }
        let _ = fs::remove_file(&log);
        let outcome = Outcome::of(command.arg(root.join("scripts/install")).args(words));
        assert_ne!(outcome.code, Some(0), "{outcome:?}");
        let said = fs::read_to_string(&log).unwrap_or_default();
        (outcome, said)
    };
    let at = |name: &str| format!("--root {} ", sandbox.path(name).display());
    for (words, home, place) in [
        (&["--root", "mine/../here"][..], true, at("here")),
        (&["--root=here"], false, at("here")),
        (&["--debug"], true, at("home/.local")),
    ] {
        let (outcome, said) = install(words, home);
        let line = said.lines().find(|line| line.starts_with("install "));
        let line = line.unwrap_or_else(|| panic!("{words:?}: {outcome:?}: {said}"));
        assert!(line.contains(&place), "{words:?}: {line}");
    }
    let (outcome, said) = install(&[], false);
    assert_eq!((outcome.code, said.as_str()), (Some(2), ""), "{outcome:?}");
    assert!(outcome.stderr.contains("--root DIR"), "{outcome:?}");
}
