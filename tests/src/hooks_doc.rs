//! `docs/reference/hooks.md`, written from the one table.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use shim_ffi::{Action, ENTRIES, Entry, Role, StreamAt};

/// All actions with their name in the classification and what they mean, in the order of the page.
pub const ACTIONS: [(Action, &str, &str); 8] = [
    (
        Action::MeterAlloc,
        "meter-alloc",
        "Reserves the size in the job's quota before the driver is asked; over the limit the program gets `CUDA_ERROR_OUT_OF_MEMORY`. What the driver refuses is given back. Pinned host memory is counted, not limited.",
    ),
    (
        Action::MeterFree,
        "meter-free",
        "Gives back what was charged, when the driver has freed it. A free of something unknown is the driver's business alone.",
    ),
    (
        Action::VirtualiseReport,
        "virtualise-report",
        "Answers within the quota, never above the physical truth; `cuGetProcAddress` answers with the preload library's own functions.",
    ),
    (
        Action::GateSubmission,
        "gate-submission",
        "Waits for a grant if none is held, then calls the driver; completion is marked in the stream now and then. Captured work is not gated.",
    ),
    (
        Action::ObserveSync,
        "observe-sync",
        "Marks what is in flight, then calls the driver: a program that sleeps until its work is done is seen to be done.",
    ),
    (
        Action::ObserveContext,
        "observe-context",
        "Calls the driver, then looks the thread's device up again; memory that goes with a context is given back.",
    ),
    (
        Action::TrackHandle,
        "track-handle",
        "Calls the driver; notes pools, mappings, handle references and captures that accounting depends on.",
    ),
    (
        Action::PassThrough,
        "pass-through",
        "One jump to the driver.",
    ),
];

/// The page.
pub fn page() -> String {
    let mut out = String::new();
    text(&mut out);
    out
}

fn text(out: &mut String) {
    let simulated = ENTRIES.iter().filter(|entry| entry.simulated).count();
    line(out, "# Hooks\n");
    paragraph(
        out,
        &format!(
            "This page says what `libsublet.so` does with each of the {} symbols that the CUDA driver \
             exports on Linux x86-64. The simulated driver implements {simulated} of them (column \
             *sim*); the others answer `CUDA_ERROR_NOT_SUPPORTED` there and are counted.",
            ENTRIES.len()
        ),
    );
    paragraph(
        out,
        "`scripts/hooks-doc` writes it from the table in `shim-ffi/src/table.rs`, and a test compares \
         the two. A new hook is a change of that table and, where its shape is `hook`, a function of \
         the symbol's name in `interposer/src/memory/`.",
    );
    paragraph(
        out,
        "`_v2` and the like name later versions of a function, `_ptsz` and `_ptds` the variant for \
         per-thread streams; `cuGetProcAddress` is asked for the name without them. *stream* is the \
         argument that names the stream, or `structure` where a structure holds it.",
    );
    for (action, name, meaning) in ACTIONS {
        item(
            out,
            &format!(
                "[{name}](#{name}), {} symbols: {meaning}",
                of(action).count()
            ),
        );
    }
    for (action, name, meaning) in ACTIONS {
        line(out, &format!("\n## {name}\n"));
        paragraph(out, meaning);
        if action == Action::PassThrough {
            by_category(out);
        } else {
            table(out, action);
        }
    }
}

fn of(action: Action) -> impl Iterator<Item = &'static Entry> {
    ENTRIES.iter().filter(move |entry| entry.action == action)
}

fn table(out: &mut String, action: Action) {
    line(
        out,
        "| symbol | CUDA | category | role | stream | sim |\n|---|---|---|---|---|---|",
    );
    for entry in of(action) {
        line(
            out,
            &format!(
                "| `{}` | {} | {} | {} | {} | {} |",
                entry.name(),
                version(entry.introduced),
                entry.category,
                role(entry.role),
                match entry.stream {
                    StreamAt::Implicit => "-".to_owned(),
                    StreamAt::Param(at) => (at + 1).to_string(),
                    StreamAt::InStruct => "structure".to_owned(),
                },
                if entry.simulated { "yes" } else { "" },
            ),
        );
    }
}

/// Hundreds of jumps: an item per category will do.
fn by_category(out: &mut String) {
    let mut categories: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for entry in of(Action::PassThrough) {
        categories
            .entry(entry.category)
            .or_default()
            .insert(entry.name());
    }
    for (category, names) in categories {
        let names: Vec<_> = names.iter().map(|name| format!("`{name}`")).collect();
        item(out, &format!("**{category}**: {}", names.join(", ")));
    }
}

fn version(introduced: u32) -> String {
    if introduced == 0 {
        return "?".to_owned();
    }
    format!("{}.{}", introduced / 1000, introduced % 1000 / 10)
}

fn role(role: Role) -> &'static str {
    match role {
        Role::None => "-",
        Role::CountsMemoryPlus => "takes memory",
        Role::CountsMemoryMinus => "gives memory back",
        Role::SubmitsWork => "submits work",
        Role::MayBlock => "may block",
        Role::CreatesContext => "creates a context",
        Role::ReportsMemory => "reports memory",
    }
}

/// Lines of Markdown are this wide at most.
const COLUMNS: usize = 100;

fn paragraph(out: &mut String, text: &str) {
    wrapped(out, "", "", text);
    line(out, "");
}

fn item(out: &mut String, text: &str) {
    wrapped(out, "- ", "  ", text);
}

fn wrapped(out: &mut String, first: &str, rest: &str, text: &str) {
    let mut row = first.to_owned();
    let mut begun = false;
    for word in text.split_whitespace() {
        if begun && row.chars().count() + 1 + word.chars().count() > COLUMNS {
            line(out, &row);
            row = rest.to_owned();
            begun = false;
        }
        if begun {
            row.push(' ');
        }
        row.push_str(word);
        begun = true;
    }
    line(out, &row);
}

fn line(out: &mut String, text: &str) {
    // Writing to memory does not fail.
    let _ = writeln!(out, "{text}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_symbol_is_asked_for_without_its_version_and_variant() {
        for entry in ENTRIES {
            let name = entry.name();
            let name = name.strip_suffix("_ptsz").unwrap_or(name);
            let name = name.strip_suffix("_ptds").unwrap_or(name);
            let name = name
                .rsplit_once("_v")
                .filter(|(_, version)| version.chars().all(|digit| digit.is_ascii_digit()))
                .map_or(name, |(name, _)| name);
            assert_eq!(name, entry.base_name, "{}", entry.name());
        }
    }

    #[test]
    fn no_line_of_the_page_is_wider_than_the_others_may_be() {
        for line in page().lines() {
            assert!(line.chars().count() <= COLUMNS, "{line}");
        }
    }
}
