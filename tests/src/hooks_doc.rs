//! `docs/reference/hooks.md`, written from the one table.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use shim_ffi::{Action, ENTRIES, Entry, Role, StreamAt, Variant};

/// All actions with their name in the classification and what they mean, in the order of the page.
pub const ACTIONS: [(Action, &str, &str); 8] = [
    (
        Action::MeterAlloc,
        "meter-alloc",
        "Reserves the size in the job's quota before the driver is asked; over the limit the program is told `CUDA_ERROR_OUT_OF_MEMORY`. What the driver refuses is given back. Pinned host memory is counted, not limited.",
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
    line(
        out,
        &format!(
            "# Hooks\n\n\
             What `libsublet.so` does with each of the {} symbols that the CUDA driver exports on Linux x86-64. {simulated} of them are\n\
             implemented by the simulated driver (column *sim*); the others answer `CUDA_ERROR_NOT_SUPPORTED` there and are counted.\n\n\
             Written by `scripts/hooks-doc` from the table in `shim-ffi/src/table.rs`; a test compares. A new hook is a change of\n\
             that table and, where its shape is `hook`, a function of the symbol's name in `interposer/src/memory/`.\n",
            ENTRIES.len()
        ),
    );
    line(out, "| action | symbols | what happens |\n|---|---|---|");
    for (action, name, meaning) in ACTIONS {
        line(
            out,
            &format!("| [{name}](#{name}) | {} | {meaning} |", of(action).count()),
        );
    }
    for (action, name, meaning) in ACTIONS {
        line(out, &format!("\n## {name}\n\n{meaning}\n"));
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
        "| symbol | asked for as | since CUDA | category | role | stream | sim |\n|---|---|---|---|---|---|---|",
    );
    for entry in of(action) {
        let name = match entry.variant {
            Variant::Legacy => entry.base_name.to_owned(),
            _ => format!("{}, per-thread streams", entry.base_name),
        };
        line(
            out,
            &format!(
                "| `{}` | {name} | {} | {} | {} | {} | {} |",
                entry.name(),
                version(entry.introduced),
                entry.category,
                role(entry.role),
                match entry.stream {
                    StreamAt::Implicit => "-".to_owned(),
                    StreamAt::Param(at) => format!("argument {}", at + 1),
                    StreamAt::InStruct => "in its structure".to_owned(),
                },
                if entry.simulated { "yes" } else { "" },
            ),
        );
    }
}

/// Hundreds of jumps: a paragraph per category will do.
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
        line(out, &format!("**{category}**: {}\n", names.join(", ")));
    }
}

fn version(introduced: u32) -> String {
    if introduced == 0 {
        return "not documented".to_owned();
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

fn line(out: &mut String, text: &str) {
    // Writing to memory does not fail.
    let _ = writeln!(out, "{text}");
}
