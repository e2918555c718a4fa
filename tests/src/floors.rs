//! On which floor each module of each crate stands.
//!
//! A module imports modules of its own floor and of floors below; none climbs. The list in the
//! architecture page is made from this (`scripts/floors`); it names what imports itself by way of
//! others, inside a floor.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::Path;

use crate::modules::{self, Modules};

/// What the root of a crate (`lib.rs`, `main.rs`) is called where its modules import it. Otherwise
/// it stands above all floors.
pub const ROOT: &str = "lib";

/// A crate, with its floors from the lowest up: what each is for, and the modules at the crate's
/// root that stand there.
pub struct Crate {
    pub name: &'static str,
    /// Where it lies in the repository.
    pub folder: &'static str,
    /// Whether the list says what is inside of each module.
    pub in_full: bool,
    pub floors: &'static [(&'static str, &'static [&'static str])],
}

/// The crates with more than one module.
pub const CRATES: [Crate; 19] = [
    Crate {
        name: "shim-ffi",
        folder: "shim-ffi",
        in_full: false,
        floors: &[
            (
                "the driver's types",
                &["lib", "enums", "handles", "status", "structs"],
            ),
            ("the ring of a recording", &["recording"]),
            ("the tables", &["entry", "nvml", "table"]),
            ("what is looked up in them", &["counts", "resolve"]),
        ],
    },
    Crate {
        name: "host-memory",
        folder: "host-memory",
        in_full: false,
        floors: &[("all of it", &["lib", "groups"])],
    },
    Crate {
        name: "channel",
        folder: "channel",
        in_full: false,
        floors: &[
            ("atomics, under loom too", &["sync"]),
            ("where each word lies", &["layout", "owner"]),
            (
                "words and what they mean",
                &[
                    "activity",
                    "bells",
                    "credit",
                    "grant",
                    "reservation",
                    "residency",
                    "resize",
                    "signature",
                    "page",
                    "weights",
                ],
            ),
            ("pages of several parts", &["accounts", "journal", "shared"]),
            ("messages", &["handshake", "kept", "wire"]),
            ("the two ends", &["arbiter", "client"]),
        ],
    },
    Crate {
        name: "policy",
        folder: "policy",
        in_full: false,
        floors: &[
            (
                "small sets, names, quantiles",
                &["few", "names", "quantile"],
            ),
            ("the registry", &["registry"]),
            ("what every policy is asked", &["slice"]),
            (
                "parts of a decision",
                &[
                    "coordinator",
                    "iterations",
                    "lend",
                    "quantum",
                    "residency",
                    "shares",
                    "stepper",
                    "turns",
                ],
            ),
            ("partitions of a device", &["partitions"]),
            ("slice policies", &["slices"]),
            (
                "gangs; the cluster; standbys",
                &["cluster", "gangs", "standbys"],
            ),
        ],
    },
    Crate {
        name: "control",
        folder: "control",
        in_full: false,
        floors: &[
            (
                "names, sizes, spans",
                &[
                    "lib", "error", "events", "groups", "http", "name", "paths", "place",
                    "profile", "schema", "size", "span", "timeline",
                ],
            ),
            ("values; what a setting is", &["setting", "values"]),
            (
                "kinds of values; memory and size of a job",
                &["kinds", "residency", "resize"],
            ),
            (
                "settings; what several of them come to",
                &["device", "environment", "job_settings", "layers"],
            ),
            ("what is answered", &["config", "report"]),
            ("what is asked", &["request"]),
            (
                "the client, and an arbiter of tests",
                &["client", "stand_in"],
            ),
        ],
    },
    Crate {
        name: "certificates",
        folder: "certificates",
        in_full: false,
        floors: &[
            (
                "files that count as they are now; names, errors, revoked ones",
                &["lib", "explain", "followed", "names", "revoked"],
            ),
            ("an authority; both ends", &["client", "make", "server"]),
        ],
    },
    Crate {
        name: "interposer",
        folder: "interposer",
        in_full: true,
        floors: &[
            ("clock, errno, lock, process, thread", &["ground"]),
            ("the real driver, the dynamic linker", &["driver"]),
            ("the arbiter as this process knows it", &["attachment"]),
            ("reports of NVML", &["nvml"]),
            (
                "when submissions may pass, what is in flight, the quiesce gate",
                &["gate"],
            ),
            ("a job's calls, for a recording", &["recording"]),
            ("what memory is charged", &["metering"]),
            ("memory that moves", &["residency"]),
            ("hooks of memory functions, by name", &["memory"]),
            ("attach, fork, exit, context ends", &["lifecycle"]),
            ("the exported functions", &["entry"]),
        ],
    },
    Crate {
        name: "arbiter",
        folder: "arbiter",
        in_full: false,
        floors: &[
            (
                "peers, descriptors, files",
                &[
                    "bearer",
                    "bell",
                    "container",
                    "descriptors",
                    "inheritance",
                    "peer",
                    "premises",
                    "spare",
                    "tally",
                    "weights",
                    "timeline",
                    "usage",
                    "watch",
                    "who",
                    "writer",
                ],
            ),
            (
                "clock, background work, state; what comes from the API",
                &["background", "clock", "desk", "state"],
            ),
            (
                "what wakes the loop, what is recorded",
                &["census", "container_names", "journal", "names", "reactor"],
            ),
            (
                "parts of the arbiter",
                &[
                    "allowances",
                    "claims",
                    "clients",
                    "door",
                    "ended",
                    "groups",
                    "lifetime",
                    "outsiders",
                    "parked",
                    "persistence",
                    "renewal",
                    "slow_work",
                    "space",
                    "supervisor",
                    "suspicions",
                    "turns",
                    "unsaved",
                ],
            ),
            ("the API", &["api"]),
            ("what was asked, what is refused", &["refusal", "spec"]),
            ("between the wire's types and ours", &["convert"]),
            (
                "devices, as NVML tells of them",
                &["devices", "discovery", "nvml"],
            ),
            ("where memory is", &["residency"]),
            ("the terms of a job on a device", &["terms"]),
            ("schedulers of devices", &["dispatch", "schedulers"]),
            ("jobs", &["tenant"]),
            (
                "what jobs are promised",
                &["admission", "job_terms", "ledger"],
            ),
            (
                "rules of the operator, profiles",
                &["options", "profile", "rulebook"],
            ),
            ("the arbiter as a whole", &["ground", "serve"]),
            (
                "what it does at each event",
                &[
                    "attach",
                    "behalf",
                    "claiming",
                    "client_exit",
                    "deaths",
                    "device_control",
                    "disclosure",
                    "dormant",
                    "escaped",
                    "group_turns",
                    "latency",
                    "lifecycle",
                    "operator",
                    "relocation",
                    "residency_moves",
                    "residency_survey",
                    "resize",
                    "rules",
                    "space_questions",
                    "status",
                    "timelines",
                    "violations",
                    "walk_in",
                ],
            ),
        ],
    },
    Crate {
        name: "simgpu",
        folder: "simgpu",
        in_full: false,
        floors: &[
            (
                "clock, lock, settings, images, host kernels",
                &["clock", "image", "kernels", "lock", "received", "settings"],
            ),
            (
                "a profile and its costs; what handles stand for",
                &[
                    "array",
                    "costs",
                    "function",
                    "profile",
                    "registry",
                    "uninitialised",
                    "unsupported",
                ],
            ),
            ("the device that processes share", &["device_state"]),
            (
                "its memory and attributes; who sees what",
                &["attributes", "faults", "memory", "observe", "visible"],
            ),
            ("work on it", &["exec"]),
            (
                "the driver",
                &[
                    "capture", "context", "driver", "event", "graph", "green", "module", "stream",
                ],
            ),
            ("what every entry point does", &["entry"]),
            ("the entry points; NVML", &["api", "nvml"]),
        ],
    },
    Crate {
        name: "simgpu-libnvidia-ml",
        folder: "simgpu/libnvidia-ml",
        in_full: false,
        floors: &[("the table", &["table"])],
    },
    Crate {
        name: "cluster",
        folder: "cluster",
        in_full: false,
        floors: &[
            (
                "training, pictures, descriptions",
                &["plot", "spec", "training"],
            ),
            ("traces", &["trace"]),
            (
                "the simulator; requests",
                &["cells", "fractions", "serving", "sim"],
            ),
            (
                "what is made of its runs; the live hook; a live frontend",
                &["dl2", "frontend", "live", "report", "reward", "sweep"],
            ),
        ],
    },
    Crate {
        name: "kubernetes",
        folder: "kubernetes",
        in_full: false,
        floors: &[
            (
                "names; messages; amounts",
                &[
                    "lib",
                    "authority",
                    "container",
                    "files",
                    "fit",
                    "http_server",
                    "proto",
                    "quantity",
                ],
            ),
            (
                "the wire; files; the API server; the hook",
                &[
                    "advice",
                    "api",
                    "cdi",
                    "event",
                    "grpc",
                    "records",
                    "registration",
                    "sockets",
                    "ttrpc",
                ],
            ),
            ("a process for each share", &["holder"]),
            ("the node's devices", &["node"]),
            (
                "what is asked for, and what is there",
                &[
                    "claim", "objects", "picture", "pods", "shares", "slices", "units", "waiting",
                ],
            ),
            (
                "what is served",
                &[
                    "device_plugin",
                    "dra",
                    "extender",
                    "follow",
                    "nri",
                    "timeslice",
                ],
            ),
            ("the processes", &["serve"]),
        ],
    },
    Crate {
        name: "slurm",
        folder: "slurm",
        in_full: false,
        floors: &[
            (
                "Slurm's process; what administrators and users set",
                &["host", "arguments", "options"],
            ),
            ("a step, its tasks' mounts", &["step", "enforce"]),
            ("the hooks", &["plugin"]),
        ],
    },
    Crate {
        name: "cli",
        folder: "cli",
        in_full: false,
        floors: &[
            (
                "settings, connections, output",
                &[
                    "config",
                    "connect",
                    "dilation",
                    "exit",
                    "file_limit",
                    "flags",
                    "json",
                    "mistake",
                    "printable",
                    "table",
                    "tls_flags",
                    "recording",
                    "unmanaged",
                    "when",
                    "whole_file",
                ],
            ),
            (
                "arguments, and commands whose arguments others share",
                &[
                    "args",
                    "as_begun",
                    "cdi",
                    "api_flags",
                    "cluster_command",
                    "frontend",
                    "kubernetes_command",
                    "ps",
                    "run",
                ],
            ),
            (
                "the other commands",
                &[
                    "arbiter_command",
                    "config_command",
                    "demo",
                    "doctor",
                    "events",
                    "groups",
                    "interfere",
                    "kernel",
                    "manual",
                    "metrics",
                    "moves",
                    "record",
                    "replay",
                    "set",
                    "simulate",
                    "top",
                    "trace",
                ],
            ),
        ],
    },
    Crate {
        name: "examples",
        folder: "examples",
        in_full: false,
        floors: &[
            (
                "sizes, numbers, what a program may ask",
                &["checkpoint", "pipeline", "resize", "rng", "size"],
            ),
            ("the driver, data", &["digits", "gpu"]),
            (
                "programs",
                &["app", "bounded_stream", "link", "mlp", "stripes"],
            ),
            ("training", &["train"]),
        ],
    },
    Crate {
        name: "tests",
        folder: "tests",
        in_full: false,
        floors: &[
            (
                "what was built, what was written",
                &[
                    "lib",
                    "artefacts",
                    "elf",
                    "hooks_doc",
                    "log",
                    "modules",
                    "outcome",
                    "pages",
                    "table",
                ],
            ),
            (
                "sandboxes and checks",
                &[
                    "attempts", "coverage", "fake", "floors", "programs", "sandbox",
                ],
            ),
            ("runs", &["manager", "program_run", "stub"]),
        ],
    },
    Crate {
        name: "testbed",
        folder: "tests/testbed",
        in_full: false,
        floors: &[
            ("limits of a wait", &["within"]),
            (
                "a clean start; a terminal; HTTP; a dead socket",
                &["clean", "http", "socket", "terminal"],
            ),
            ("HTTP over TLS", &["tls"]),
        ],
    },
    Crate {
        name: "transparency",
        folder: "tests/transparency",
        in_full: false,
        floors: &[
            ("calls, random numbers", &["api", "last_calls", "rng"]),
            (
                "what is recorded and counted",
                &["accounting", "probe", "transcript"],
            ),
            ("sequences of calls", &["sequence"]),
            ("comparisons", &["compare"]),
        ],
    },
    Crate {
        name: "host-process",
        folder: "tests/host-process",
        in_full: false,
        floors: &[
            ("what was built", &["artefacts"]),
            ("host programs", &["host"]),
        ],
    },
];

/// Modules by the name that floors give them: the first part of their path.
fn top(path: &[String]) -> String {
    path.first().map_or_else(|| ROOT.to_owned(), Clone::clone)
}

impl Crate {
    /// Its modules.
    #[must_use]
    pub fn modules(&self, repository: &Path) -> Modules {
        Modules::below(&repository.join(self.folder).join("src"))
    }

    fn floor(&self, module: &str) -> Option<usize> {
        (self.floors.iter()).position(|(_, modules)| modules.contains(&module))
    }

    /// What is wrong: a module without a floor or with two, one that is not there, one that climbs.
    #[must_use]
    pub fn wrong(&self, modules: &Modules) -> Vec<String> {
        let mut wrong = Vec::new();
        let there: BTreeSet<String> = modules.paths().map(|path| top(path)).collect();
        let listed: Vec<&str> = self
            .floors
            .iter()
            .flat_map(|(_, all)| all.iter().copied())
            .collect();
        for module in &there {
            let times = listed.iter().filter(|name| *name == module).count();
            if times > 1 || times == 0 && module != ROOT {
                wrong.push(format!(
                    "`{module}` of {} stands on {times} floors",
                    self.name
                ));
            }
        }
        for module in listed.iter().filter(|name| !there.contains(**name)) {
            wrong.push(format!("{} has no module `{module}`", self.name));
        }
        for (from, imports) in modules.imports() {
            for to in imports {
                let (Some(low), Some(high)) = (self.floor(&top(&from)), self.floor(&top(&to)))
                else {
                    continue;
                };
                if high > low {
                    wrong.push(format!(
                        "{}: `{}` (floor {}) imports `{}` (floor {})",
                        self.name,
                        shown(&from),
                        low + 1,
                        shown(&to),
                        high + 1
                    ));
                }
            }
        }
        wrong
    }

    /// Modules that import each other: those at the crate's root, and those inside of each.
    #[must_use]
    pub fn circles(&self, modules: &Modules) -> Vec<Vec<String>> {
        let mut across: BTreeMap<Vec<String>, BTreeSet<Vec<String>>> = BTreeMap::new();
        let mut within = across.clone();
        let cut = |path: &[String], length: usize| path[..path.len().min(length)].to_vec();
        for (from, imports) in modules.imports() {
            for to in imports {
                let (edges, length) = match top(&from) == top(&to) {
                    true => (&mut within, 2),
                    false => (&mut across, 1),
                };
                let (from, to) = (cut(&from, length), cut(&to, length));
                if from != to {
                    edges.entry(from).or_default().insert(to);
                }
            }
        }
        let of = [modules::circles(&across), modules::circles(&within)].concat();
        of.iter()
            .map(|circle| circle.iter().map(|path| shown(path)).collect())
            .collect()
    }
}

fn shown(path: &[String]) -> String {
    match path {
        [] => ROOT.to_owned(),
        path => path.join("::"),
    }
}

/// Where the list stands.
pub const PAGE: &str = "docs/explanation/architecture.md";
const BEGIN: &str = "<!-- Made by scripts/floors. -->\n";
const END: &str = "<!-- The end of what scripts/floors makes. -->\n";

/// The page with the list of floors in it.
///
/// # Panics
/// Where the page has no place for it.
#[must_use]
pub fn written_into(page: &str, repository: &Path) -> String {
    let (before, rest) = page.split_once(BEGIN).expect("a place for the floors");
    let (_, after) = rest.split_once(END).expect("an end of the floors");
    format!("{before}{BEGIN}\n{}\n{END}{after}", list(repository))
}

/// All floors, for the architecture page.
fn list(repository: &Path) -> String {
    let mut list = String::new();
    for of in &CRATES {
        let _ = writeln!(list, "- **{}**", of.name);
        let modules = of.modules(repository);
        for (number, (what, here)) in (1..).zip(of.floors) {
            let here: Vec<String> = here
                .iter()
                .map(|name| match of.in_full {
                    true => format!("`{name}`{}", parts(&modules, name)),
                    false => format!("`{name}`"),
                })
                .collect();
            let text = format!("{what}: {}", here.join(", "));
            item(&mut list, &format!("  {number}. "), &text);
        }
        for circle in of.circles(&modules) {
            let names: Vec<String> = circle.iter().map(|name| format!("`{name}`")).collect();
            let text = format!("a circle on one floor: {}", names.join(", "));
            item(&mut list, "  - ", &text);
        }
    }
    list
}

/// What a module consists of.
fn parts(modules: &Modules, name: &str) -> String {
    let inner = modules
        .paths()
        .filter(|path| path.len() == 2 && path[0] == name);
    let inner: Vec<String> = inner.map(|path| format!("`{}`", path[1])).collect();
    match inner.len() {
        0 => String::new(),
        _ => format!(" ({})", inner.join(", ")),
    }
}

/// An item of a list, in lines of 100 columns.
fn item(list: &mut String, mark: &str, text: &str) {
    const COLUMNS: usize = 100;
    let mut line = mark.to_owned();
    let mut is_new = true;
    for word in text.split(' ') {
        if !is_new && line.len() + 1 + word.len() > COLUMNS {
            let _ = writeln!(list, "{line}");
            line = " ".repeat(mark.len());
            is_new = true;
        }
        if !is_new {
            line.push(' ');
        }
        line.push_str(word);
        is_new = false;
    }
    let _ = writeln!(list, "{line}");
}
