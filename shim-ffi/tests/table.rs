//! The table against the classification it was written from, and against the compiler.

use std::collections::BTreeMap;

use shim_ffi::*;

/// One row of `data/driver.csv`, by column name.
fn classification() -> BTreeMap<String, BTreeMap<String, String>> {
    let text = include_str!("../data/driver.csv");
    let mut lines = text.lines();
    let header: Vec<String> = fields(lines.next().expect("a header"));
    lines
        .map(|line| {
            let row: BTreeMap<String, String> = header.iter().cloned().zip(fields(line)).collect();
            (row["symbol"].clone(), row)
        })
        .collect()
}

/// Splits a line of the CSV at commas outside double quotes.
fn fields(line: &str) -> Vec<String> {
    let mut out = vec![String::new()];
    let mut quoted = false;
    for ch in line.chars() {
        match ch {
            '"' => quoted = !quoted,
            ',' if !quoted => out.push(String::new()),
            ch => out.last_mut().expect("never empty").push(ch),
        }
    }
    out
}

fn action(text: &str) -> Action {
    match text {
        "meter-alloc" => Action::MeterAlloc,
        "meter-free" => Action::MeterFree,
        "virtualise-report" => Action::VirtualiseReport,
        "gate-submission" => Action::GateSubmission,
        "observe-sync" => Action::ObserveSync,
        "observe-context" => Action::ObserveContext,
        "track-handle" => Action::TrackHandle,
        "pass-through" => Action::PassThrough,
        other => panic!("unknown action {other:?} in driver.csv"),
    }
}

#[test]
fn every_symbol_of_the_classification_is_in_the_table_with_its_action() {
    let rows = classification();
    assert_eq!(rows.len(), COUNT, "driver.csv and the table differ in size");
    let table: BTreeMap<&str, &Entry> = ENTRIES.iter().map(|entry| (entry.name(), entry)).collect();
    assert_eq!(
        table.len(),
        ENTRIES.len(),
        "a symbol stands in the table twice"
    );
    for (symbol, row) in &rows {
        let entry = table
            .get(symbol.as_str())
            .unwrap_or_else(|| panic!("{symbol} is not in the table"));
        assert_eq!(entry.action, action(&row["interposer_action"]), "{symbol}");
        assert_eq!(entry.base_name, row["base_name"], "{symbol}");
        assert_eq!(
            entry.introduced,
            row["introduced_code"].parse().unwrap_or(0),
            "{symbol}"
        );
        assert_eq!(entry.params, row["n_params"].parse().ok(), "{symbol}");
        assert_eq!(entry.category, row["category"], "{symbol}");
        let variant = match row["per_thread_stream_variant"].as_str() {
            "ptsz" => Variant::Ptsz,
            "ptds" => Variant::Ptds,
            _ => Variant::Legacy,
        };
        assert_eq!(entry.variant, variant, "{symbol}");
        let stream = match row["stream_param"].as_str() {
            "" => StreamAt::Implicit,
            "in-struct" => StreamAt::InStruct,
            position => StreamAt::Param(position.parse::<u8>().expect("a position") - 1),
        };
        assert_eq!(entry.stream, stream, "{symbol}");
    }
    for symbol in table.keys() {
        assert!(
            rows.contains_key(*symbol),
            "{symbol} is in the table but not in driver.csv"
        );
    }
}

macro_rules! signatures {
    ($($symbol:ident $base:literal $introduced:literal $variant:ident $action:ident $shape:ident $role:ident $space:ident
       $category:literal $params:tt $stream:tt $sim:ident $traits:tt $signature:tt;)*) => {
        /// Arity of each signature that the table spells out; compiling it resolves every type that
        /// is named there.
        const SIGNATURES: &[(&str, Option<usize>)] = &[$((stringify!($symbol), arity!($signature)),)*];
    };
}
macro_rules! arity {
    (_) => { None };
    (($($arg:ident: $ty:ty),*)) => {{
        type Function = unsafe extern "C" fn($($ty),*) -> CUresult;
        const _: () = assert!(size_of::<Function>() == size_of::<usize>());
        Some(<[&str]>::len(&[$(stringify!($arg)),*]))
    }};
}
shim_ffi::driver_table!(signatures);

#[test]
fn signatures_have_as_many_parameters_as_the_classification_says() {
    for ((symbol, arity), entry) in SIGNATURES.iter().zip(ENTRIES) {
        assert_eq!(*symbol, entry.name());
        if let Some(arity) = arity {
            assert_eq!(Some(*arity), entry.params.map(usize::from), "{symbol}");
        }
    }
}

#[test]
fn what_is_metered_gated_or_reported_has_a_signature() {
    for ((symbol, arity), entry) in SIGNATURES.iter().zip(ENTRIES) {
        let hooked = matches!(
            entry.action,
            Action::MeterAlloc
                | Action::MeterFree
                | Action::VirtualiseReport
                | Action::GateSubmission
        );
        assert!(
            !hooked || arity.is_some(),
            "{symbol} is hooked but has no signature"
        );
    }
}

#[test]
fn each_entry_has_a_shape_that_its_action_allows() {
    for entry in ENTRIES {
        let allowed: &[Shape] = match entry.action {
            Action::MeterAlloc | Action::MeterFree | Action::VirtualiseReport => &[Shape::Hook],
            Action::GateSubmission => &[Shape::Gated, Shape::GatedList],
            Action::ObserveSync => &[Shape::Sync, Shape::Query],
            Action::ObserveContext => &[Shape::Context, Shape::Init],
            // Some take memory, and some take a structure by value, which does not travel as a
            // word.
            Action::TrackHandle => &[Shape::Tracked, Shape::Quiesced, Shape::Hook, Shape::Jump],
            Action::PassThrough => &[Shape::Jump, Shape::Quiesced],
        };
        assert!(
            allowed.contains(&entry.shape),
            "{}: {:?}",
            entry.name(),
            entry.shape
        );
    }
}

/// Positions of arguments that the traits of a row name.
fn positions(traits: Traits) -> Vec<u8> {
    let mut all: Vec<u8> = [
        traits.unmovable,
        traits.physical,
        traits.context.created_on(),
    ]
    .into_iter()
    .flatten()
    .collect();
    all.extend(match traits.tracks {
        Tracks::Nothing => vec![],
        Tracks::StreamEnd | Tracks::PoolAttribute | Tracks::GraphExecEnd => vec![0],
        Tracks::PoolCreate | Tracks::GraphInstantiate | Tracks::GraphExecUpdate => vec![0, 1],
        Tracks::MemoryRetain => vec![0, 1],
        Tracks::GraphNode { parameters } => vec![parameters],
        Tracks::MemoryMap | Tracks::MemoryAccess => vec![0, 1, 2, 3],
        Tracks::MemoryExport | Tracks::PointerAttribute => vec![0, 1, 2],
        Tracks::PeerAccess { .. } => vec![0],
    });
    all.extend(match traits.shares {
        Shares::Nothing => vec![],
        Shares::Handle { at } | Shares::Address { at } => vec![at],
        Shares::Range { start, bytes } => vec![start, bytes],
    });
    all.extend(match traits.work {
        Work::Any | Work::HostWait => vec![],
        Work::Kernel {
            blocks: Blocks::Words,
        } => vec![0, 1, 2, 3],
        Work::Kernel {
            blocks: Blocks::Plane,
        } => vec![0, 1, 2],
        Work::Kernel {
            blocks: Blocks::Structure,
        } => vec![0, 1],
        Work::Function | Work::Graph => vec![0],
        Work::CopyAcross { bytes } | Work::CopyWithin { bytes } => vec![bytes],
    });
    all.extend(match traits.operands {
        Operands::Unknown => vec![],
        Operands::Kernel {
            function,
            parameters,
            extra,
        } => [Some(function), Some(parameters), extra]
            .into_iter()
            .flatten()
            .collect(),
        Operands::One { at, count, .. } => vec![at, count],
        Operands::Two { to, from, bytes } => vec![to, from, bytes],
        Operands::Rows { .. } => vec![0, 1, 3, 4],
        Operands::Plane | Operands::Volume | Operands::PeerVolume => vec![0],
        Operands::Batch => vec![0, 1, 2, 3],
    });
    all.extend(match traits.records {
        Records::Nothing | Records::ContextGone | Records::Copy { .. } | Records::Fill => vec![],
        Records::Launch => (0..8).collect(),
        Records::Takes { bytes, .. } => vec![0, bytes],
        Records::Function => vec![0, 1, 2],
        Records::TakesRows | Records::Maps => vec![0, 1, 2, 3],
        Records::LaunchOf
        | Records::GraphMade
        | Records::FunctionOf
        | Records::Locks
        | Records::EventMade
        | Records::EventAwaited => vec![0, 1],
        Records::StreamMade { priority } => {
            [Some(0), Some(1), priority].into_iter().flatten().collect()
        }
        Records::Waits {
            what: recording::Awaited::Context,
        } => vec![],
        Records::Graph
        | Records::GraphGone
        | Records::Gives
        | Records::StreamGone
        | Records::EventGone
        | Records::EventRecorded
        | Records::Waits { .. } => vec![0],
    });
    all
}

#[test]
fn traits_name_arguments_that_are_there() {
    let mut named = 0;
    for entry in ENTRIES {
        let positions = positions(entry.traits);
        named += usize::from(!positions.is_empty());
        let params = entry.params.unwrap_or(0);
        assert!(
            positions.iter().all(|at| *at < params),
            "{} has {params} parameters and names {positions:?}",
            entry.name()
        );
    }
    assert!(named > 100, "only {named} rows name arguments");
}

#[test]
fn traits_stand_where_an_entry_asks_for_them() {
    for entry in ENTRIES {
        let (name, traits) = (entry.name(), entry.traits);
        let tracks = traits.tracks != Tracks::Nothing
            || traits.capture != Capture::None
            || traits.unmovable.is_some()
            || traits.shares != Shares::Nothing
            || traits.quiesced;
        assert!(
            !tracks || entry.shape == Shape::Tracked,
            "{name}: {traits:?}"
        );
        let handles = [Shape::Tracked, Shape::Quiesced];
        assert!(
            traits.physical.is_none() || handles.contains(&entry.shape),
            "{name}"
        );
        assert!(
            traits.context == Context::Keeps || entry.shape == Shape::Context,
            "{name}"
        );
        assert!(
            traits.waits == Waits::Nothing || entry.shape == Shape::Sync,
            "{name}"
        );
        let submits =
            traits.work != Work::Any || traits.operands != Operands::Unknown || traits.allocates;
        assert!(
            !submits || entry.shape == Shape::Gated,
            "{name}: {traits:?}"
        );
        // During a capture nothing is moved.
        assert!(
            traits.capture != Capture::Begins || traits.quiesced,
            "{name}"
        );
    }
}

#[test]
fn an_entry_that_jumps_through_the_gate_of_moves_has_its_words_in_registers() {
    for entry in ENTRIES
        .iter()
        .filter(|entry| entry.shape == Shape::Quiesced)
    {
        assert!(
            entry.params.is_some_and(|params| params <= 6),
            "{}",
            entry.name()
        );
    }
}

/// Copies that are not looked into: of arrays, which have no addresses; by structures that are
/// passed on as they are. So are batches in three dimensions.
const NOT_LOOKED_INTO: [&str; 5] = [
    "cuMemcpyAtoA",
    "cuMemcpyAtoH",
    "cuMemcpyHtoA",
    "cuFabricCpyBatch",
    "cuMemBatchDecompress",
];

#[test]
fn every_copy_is_looked_into_but_for_those_that_cannot_name_what_moves() {
    for entry in ENTRIES {
        let copies = matches!(entry.category, "memcpy" | "memset");
        if entry.action != Action::GateSubmission || !copies {
            continue;
        }
        let name = entry.name();
        // Addresses of CUDA 2 have 32 bits: that memory does not move.
        let narrow = entry.introduced < 3020;
        let batch = name.contains("Batch") || name.contains("WithAttributes");
        let listed = narrow
            || NOT_LOOKED_INTO.iter().any(|not| name.starts_with(not))
            || (name.starts_with("cuMemcpy3D") && batch);
        assert_eq!(entry.traits.operands == Operands::Unknown, listed, "{name}");
    }
}

#[test]
fn requests_that_frameworks_were_seen_to_make_resolve_to_the_symbol_they_got() {
    let mut checked = 0;
    for line in include_str!("../data/framework-symbols.csv")
        .lines()
        .skip(1)
    {
        let row = fields(line);
        let (symbol, how) = (&row[0], &row[1]);
        for request in how
            .split(" | ")
            .filter_map(|how| how.strip_prefix("cuGetProcAddress_v2("))
        {
            let Some((request, _)) = request.split_once(')') else {
                continue;
            };
            let mut parts = request.split(';');
            let (Some(base), Some(version), Some(flags)) =
                (parts.next(), parts.next(), parts.next())
            else {
                continue;
            };
            let flags: u64 = flags.trim_start_matches("flags=").parse().expect("flags");
            let Some(expected) = Symbol::from_name(symbol.as_bytes()) else {
                continue;
            };
            // Several callers asked for several versions and got the same symbol: `v=2000/12000`.
            for version in version.trim_start_matches("v=").split('/') {
                let version: u32 = version.parse().expect("a version");
                let got = resolve::select(base.as_bytes(), version, flags, |_| true);
                assert_eq!(
                    got,
                    Some(expected),
                    "{base} at {version} with flags {flags}"
                );
            }
            checked += 1;
        }
    }
    assert!(checked > 300, "only {checked} requests were checked");
}

#[test]
fn nvml_reports_that_are_answered_by_us_are_those_of_the_classification() {
    /// Documented in docs/reference/memory.md: a history of the whole device, of which no part is
    /// anybody's.
    const LEFT_AS_IS: &str = "nvmlDeviceGetSamples";
    let text = include_str!("../data/nvml.csv");
    let mut lines = text.lines();
    let header = fields(lines.next().expect("a header"));
    let column = |name: &str| header.iter().position(|own| own == name).expect("a column");
    let (symbol, action) = (column("symbol"), column("interposer_action"));
    let mut marked: Vec<String> = lines
        .map(fields)
        .filter(|row| row[action] == "virtualise-report" && row[symbol] != LEFT_AS_IS)
        .map(|row| row[symbol].clone())
        .collect();
    marked.sort();
    let mut own: Vec<String> = nvml::FUNCTIONS
        .iter()
        .map(|(_, name)| (*name).to_owned())
        .collect();
    own.sort();
    assert_eq!(own, marked);
}
