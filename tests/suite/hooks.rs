//! Every hook, one by one, in front of a driver that writes down what reaches it.

use std::collections::BTreeSet;

use channel::Event;
use shim_ffi::*;
use tests::fake::{Attached, Listening, TOKEN};
use tests::log::{Log, WORDS};
use tests::table::{self, name, parameters, symbol, with_action};
use tests::{Artefacts, ProgramRun, Sandbox, programs, stub};

/// A status that no driver has: it must come back as it is.
const ODD_STATUS: u32 = 4242;
const OUT_OF_MEMORY: u32 = 2;

/// The host program, preloaded, in front of the recording driver.
struct Host {
    log: Log,
    run: ProgramRun,
    _sandbox: Sandbox,
}

/// What a call returned, and what was passed.
#[derive(Debug)]
struct Returned {
    status: u32,
    sent: [u64; WORDS],
}

impl Host {
    fn without_arbiter() -> Self {
        Self::start(Sandbox::new(), &[])
    }

    /// Attached to an arbiter of the test's, with the gate open.
    fn attached() -> (Self, Attached) {
        Self::attached_with(&[])
    }

    /// The same, with these variables as well.
    fn attached_with(vars: &[(&str, &str)]) -> (Self, Attached) {
        let sandbox = Sandbox::new();
        let listening = Listening::at(&sandbox.path("channel.sock"));
        let socket = listening.path().to_str().expect("a plain path").to_owned();
        let mut host = Self::start(
            sandbox,
            &[
                &[("SUBLET_SOCKET", socket.as_str()), ("SUBLET_TOKEN", TOKEN)],
                vars,
            ]
            .concat(),
        );
        host.log.begin(symbol("cuDriverGetVersion"), 0, true);
        host.send("call cuInit 0");
        let attached = listening.welcome();
        assert_eq!(host.returned().status, 0);
        (host, attached)
    }

    fn start(sandbox: Sandbox, vars: &[(&str, &str)]) -> Self {
        let log = Log::create(&sandbox.path("log"));
        let mut command = sandbox.command(programs::program("call_each"));
        command
            .env("LD_PRELOAD", Artefacts::get().preload())
            .env("SUBLET_DRIVER", stub::driver())
            .env("RECORDING_DRIVER_LOG", log.path())
            .envs(vars.iter().copied());
        Self {
            log,
            run: ProgramRun::start(&mut command),
            _sandbox: sandbox,
        }
    }

    fn send(&mut self, line: &str) {
        self.run.send(line);
    }

    #[track_caller]
    fn ask(&mut self, line: &str) -> String {
        self.run.ask(line)
    }

    #[track_caller]
    fn returned(&mut self) -> Returned {
        let line = self.run.answer();
        let mut words = line.split(' ');
        assert_eq!(words.next(), Some("returned"), "{line}");
        let status = words
            .next()
            .and_then(|word| word.parse().ok())
            .expect("a status");
        let sent: Vec<u64> = words
            .map(|word| u64::from_str_radix(word, 16).expect("a word"))
            .collect();
        Returned {
            status,
            sent: sent.try_into().expect("sixteen words"),
        }
    }

    #[track_caller]
    fn call(&mut self, line: &str) -> Returned {
        self.send(line);
        self.returned()
    }

    /// Ends the host program; it and everything in it must have been silent.
    #[track_caller]
    fn finish(self) {
        self.run.ended_well();
    }
}

/// How the arguments of `symbol` are made: a letter each, as the host program reads them.
fn kinds(symbol: Symbol) -> String {
    match parameters(symbol) {
        Some(parameters) if parameters.iter().all(|parameter| parameter.bytes <= 8) => parameters
            .iter()
            .map(|parameter| match parameter {
                parameter if parameter.pointer => 'p',
                parameter if parameter.bytes <= 4 => 'h',
                _ => 'w',
            })
            .collect(),
        // Unknown, or with a structure in it: as many words as are recorded, of which a plain jump
        // keeps all.
        _ => "w".repeat(WORDS),
    }
}

/// How many arguments must arrive: as many as the function has. A plain jump keeps everything.
fn arity(symbol: Symbol) -> usize {
    let entry = symbol.entry();
    match entry.params {
        Some(params) if entry.action != Action::PassThrough => usize::from(params).min(WORDS),
        _ => WORDS,
    }
}

/// Which argument did not arrive as it was sent, as wide as it is.
fn differing(symbol: Symbol, sent: &[u64; WORDS], got: &[u64; WORDS]) -> Option<usize> {
    let by_value = |parameter: &tests::table::Parameter| parameter.bytes > 8;
    let parameters = parameters(symbol).filter(|parameters| !parameters.iter().any(by_value));
    (0..arity(symbol)).find(|at| {
        let narrow = parameters
            .and_then(|parameters| parameters.get(*at))
            .is_some_and(|parameter| parameter.bytes <= 4);
        let mask = if narrow { 0xffff_ffff } else { u64::MAX };
        sent[*at] & mask != got[*at] & mask
    })
}

/// Calls `symbol` once and says what was wrong with how it reached the driver, if anything.
fn reaches(host: &mut Host, symbol: Symbol, status: u32, works: bool) -> Result<(), String> {
    host.log.begin(symbol, status, works);
    let returned = host.call(&format!("call {} {}", name(symbol), kinds(symbol)));
    let records = host.log.calls_of(symbol);
    let name = name(symbol);
    let [record] = records[..] else {
        return Err(format!(
            "{name}: reached the driver {} times",
            records.len()
        ));
    };
    if let Some(at) = differing(symbol, &returned.sent, &record.words) {
        return Err(format!(
            "{name}: argument {at} was {:#x} and arrived as {:#x}",
            returned.sent[at], record.words[at]
        ));
    }
    if returned.status != status {
        return Err(format!(
            "{name}: the driver answered {status}, the program got {}",
            returned.status
        ));
    }
    Ok(())
}

#[track_caller]
fn none_wrong(wrong: Vec<String>) {
    assert!(
        wrong.is_empty(),
        "{} wrong:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
}

#[test]
fn without_an_arbiter_every_call_reaches_the_driver_as_it_was_made() {
    let mut host = Host::without_arbiter();
    let mut wrong = Vec::new();
    for symbol in SYMBOLS {
        if let Err(why) = reaches(&mut host, symbol, ODD_STATUS, false) {
            wrong.push(why);
        }
        // Nothing of our own is asked of the driver of a program that nobody governs.
        let others = host.log.records().len() - host.log.calls_of(symbol).len();
        if others != 0 {
            wrong.push(format!("{}: {others} calls of our own", name(symbol)));
        }
    }
    none_wrong(wrong);
    host.finish();
}

#[test]
fn without_an_arbiter_every_success_is_the_programs_too() {
    let mut host = Host::without_arbiter();
    let wrong = SYMBOLS
        .iter()
        // The answer would be looked at: `resolver_answers_are_ours` has these two.
        .filter(|symbol| !name(**symbol).starts_with("cuGetProcAddress"))
        .filter_map(|symbol| reaches(&mut host, *symbol, 0, false).err())
        .collect();
    none_wrong(wrong);
    host.finish();
}

#[test]
fn with_an_arbiter_and_an_open_gate_every_submission_reaches_the_driver_as_it_was_made() {
    let (mut host, _attached) = Host::attached();
    let wrong = with_action(Action::GateSubmission)
        .filter_map(|symbol| reaches(&mut host, symbol, ODD_STATUS, true).err())
        .collect();
    none_wrong(wrong);
    host.finish();
}

#[test]
fn every_submission_waits_at_a_closed_gate() {
    let (mut host, mut attached) = Host::attached();
    for symbol in with_action(Action::GateSubmission) {
        attached.close();
        host.log.begin(symbol, ODD_STATUS, true);
        host.send(&format!("call {} {}", name(symbol), kinds(symbol)));
        attached.wait_for_a_waiter();
        assert_eq!(
            host.log.calls_of(symbol),
            [],
            "{} passed a closed gate",
            name(symbol)
        );
        attached.open();
        let returned = host.returned();
        assert_eq!(returned.status, ODD_STATUS, "{}", name(symbol));
        let calls = host.log.calls_of(symbol);
        assert_eq!(calls.len(), 1, "{}", name(symbol));
        assert_eq!(
            differing(symbol, &returned.sent, &calls[0].words),
            None,
            "{}",
            name(symbol)
        );
    }
    host.finish();
}

#[test]
fn nothing_else_waits_at_a_closed_gate() {
    let (mut host, mut attached) = Host::attached();
    attached.close();
    let gated: BTreeSet<_> = with_action(Action::GateSubmission).collect();
    // Would answer every one of these even if it waited for good: the call would not come back.
    let wrong = SYMBOLS
        .iter()
        .filter(|symbol| !gated.contains(symbol))
        .filter(|symbol| symbol.entry().action != Action::VirtualiseReport)
        .filter_map(|symbol| reaches(&mut host, *symbol, ODD_STATUS, true).err())
        .collect();
    none_wrong(wrong);
    assert_eq!(attached.pages.client.waiting(0), 0);
    host.finish();
}

/// Allocation functions whose memory is the host's: counted, not limited.
fn is_host_memory(symbol: Symbol) -> bool {
    symbol.entry().space == Space::Host
}

#[test]
fn every_allocation_over_quota_is_out_of_memory_and_never_reaches_the_driver() {
    let (mut host, mut attached) = Host::attached();
    attached.pages.arbiter.set_limit(0, Some(0));
    let mut checked = 0;
    for symbol in with_action(Action::MeterAlloc).filter(|symbol| !is_host_memory(*symbol)) {
        host.log.begin(symbol, 0, true);
        let returned = host.call(&format!("call {} {}", name(symbol), kinds(symbol)));
        assert_eq!(returned.status, OUT_OF_MEMORY, "{}", name(symbol));
        assert_eq!(host.log.calls_of(symbol), [], "{}", name(symbol));
        assert_eq!(attached.used_bytes(), 0, "{}", name(symbol));
        let records = attached.records();
        let [
            Event::OverLimit {
                limit_bytes: 0,
                used_bytes: 0,
                requested_bytes,
                charged_bytes,
            },
        ] = records[..]
        else {
            panic!("{}: the journal says {records:?}", name(symbol));
        };
        assert!(requested_bytes > 0, "{}", name(symbol));
        assert!(charged_bytes >= requested_bytes, "{}", name(symbol));
        checked += 1;
    }
    assert_eq!(checked, 15);
    for symbol in with_action(Action::MeterAlloc).filter(|symbol| is_host_memory(*symbol)) {
        reaches(&mut host, symbol, ODD_STATUS, true).expect("host memory has no quota");
    }
    host.finish();
}

#[test]
fn an_allocation_that_the_driver_refuses_costs_nothing() {
    let (mut host, mut attached) = Host::attached();
    attached.pages.arbiter.set_limit(0, None);
    for symbol in with_action(Action::MeterAlloc) {
        reaches(&mut host, symbol, ODD_STATUS, true).unwrap_or_else(|why| panic!("{why}"));
        assert_eq!(attached.used_bytes(), 0, "{}", name(symbol));
        assert_eq!(
            attached.tenant.page.slot_pinned_bytes(0),
            0,
            "{}",
            name(symbol)
        );
    }
    assert_eq!(attached.records(), []);
    host.finish();
}

/// What allocates, and what frees that. `pages` of the host program hold ones, so
/// every structure describes one element or one byte.
const PAIRS: [(&str, &str); 12] = [
    ("cuArray3DCreate", "cuArrayDestroy"),
    ("cuArray3DCreate_v2", "cuArrayDestroy"),
    ("cuArrayCreate", "cuArrayDestroy"),
    ("cuArrayCreate_v2", "cuArrayDestroy"),
    ("cuMemAlloc", "cuMemFree"),
    ("cuMemAllocManaged", "cuMemFree_v2"),
    ("cuMemAllocPitch", "cuMemFree"),
    ("cuMemAllocPitch_v2", "cuMemFree_v2"),
    ("cuMemAlloc_v2", "cuMemFree_v2"),
    ("cuMemCreate", "cuMemRelease"),
    ("cuMemAllocHost_v2", "cuMemFreeHost"),
    ("cuMipmappedArrayCreate", "cuMipmappedArrayDestroy"),
];

#[test]
fn what_is_freed_is_given_back() {
    let (mut host, attached) = Host::attached();
    let held =
        |attached: &Attached| attached.used_bytes() + attached.tenant.page.slot_pinned_bytes(0);
    for (allocates, frees) in PAIRS {
        let (allocate, free) = (symbol(allocates), symbol(frees));
        // The driver's answer: a handle of ones, as the page has it, in as many bytes as the ABI
        // gives it.
        host.log.begin(allocate, 0, true);
        let returned = host.call(&format!("call {allocates} {}", kinds(allocate)));
        assert_eq!(returned.status, 0, "{allocates}");
        let taken = held(&attached);
        assert!(taken > 0, "{allocates} was not charged");
        let handle = host.ask("peek 0");

        // A free that the driver refuses gives nothing back.
        for (status, left) in [(ODD_STATUS, taken), (0, 0)] {
            host.log.begin(free, status, true);
            host.ask(&format!("value {handle}"));
            let returned = host.call(&format!("call {frees} v{}", &kinds(free)[1..]));
            assert_eq!(returned.status, status, "{frees} after {allocates}");
            assert_eq!(
                held(&attached),
                left,
                "{frees} after {allocates}, status {status}"
            );
            assert_eq!(host.log.calls_of(free).len(), 1);
        }
        // A second free of the same is the driver's business alone.
        host.log.begin(free, 0, true);
        host.ask(&format!("value {handle}"));
        assert_eq!(
            host.call(&format!("call {frees} v{}", &kinds(free)[1..]))
                .status,
            0
        );
        assert_eq!(held(&attached), 0, "{frees} twice after {allocates}");
    }
    host.finish();
}

#[test]
fn reports_of_memory_tell_the_quota() {
    let (mut host, attached) = Host::attached();
    let (quota, physical) = (3u64 << 30, 16u64 << 30);
    attached.pages.arbiter.set_limit(0, Some(quota));
    attached
        .pages
        .arbiter
        .set_physical(0, physical, Some(physical));

    // The first call looks up which device the thread is on; from then on nobody asks the driver.
    for _ in 0..2 {
        host.log.begin(symbol("cuMemGetInfo_v2"), ODD_STATUS, true);
        assert_eq!(host.call("call cuMemGetInfo_v2 pp").status, 0);
    }
    assert_eq!(host.log.records(), [], "answered without the driver");
    let peek = |host: &mut Host, at: u32| {
        u64::from_str_radix(&host.ask(&format!("peek {at}")), 16).expect("a number")
    };
    assert_eq!((peek(&mut host, 0), peek(&mut host, 1)), (quota, quota));

    host.log.begin(symbol("cuMemAlloc_v2"), 0, true);
    assert_eq!(host.call("call cuMemAlloc_v2 ph").status, 0);
    let used = attached.used_bytes();
    assert!(used > 0);
    assert_eq!(host.call("call cuMemGetInfo_v2 pp").status, 0);
    assert_eq!(
        (peek(&mut host, 0), peek(&mut host, 1)),
        (quota - used, quota)
    );

    // What is physically free is never exceeded.
    attached.pages.arbiter.set_physical(0, physical, Some(1000));
    assert_eq!(host.call("call cuMemGetInfo_v2 pp").status, 0);
    assert_eq!((peek(&mut host, 0), peek(&mut host, 1)), (1000, quota));

    host.log.begin(symbol("cuDriverGetVersion"), 0, true);
    assert_eq!(host.call("call cuDeviceTotalMem_v2 p0").status, 0);
    assert_eq!(peek(&mut host, 0), quota);
    attached.pages.arbiter.set_limit(0, Some(2 * physical));
    assert_eq!(host.call("call cuDeviceTotalMem_v2 p0").status, 0);
    assert_eq!(
        peek(&mut host, 0),
        physical,
        "never above the physical truth"
    );
    host.finish();
}

#[test]
fn resolver_answers_are_ours() {
    let mut host = Host::without_arbiter();
    let requests = table::framework_requests();
    assert!(requests.len() > 300, "only {} requests", requests.len());
    host.log.begin(symbol("cuDriverGetVersion"), 0, true);
    let mut wrong = Vec::new();
    for request in &requests {
        for how in ["cuGetProcAddress", "cuGetProcAddress_v2"] {
            let answer = host.ask(&format!(
                "resolve {how} {} {} {} {}",
                request.base,
                request.version,
                request.flags,
                name(request.symbol)
            ));
            if answer != "ours" {
                wrong.push(format!("{how} {request:?}: {answer}"));
            }
        }
    }
    none_wrong(wrong);
    host.finish();
}

#[test]
fn the_resolver_covers_the_whole_table() {
    let mut host = Host::without_arbiter();
    host.log.begin(symbol("cuDriverGetVersion"), 0, true);
    let mut wrong = Vec::new();
    for symbol in SYMBOLS {
        let entry = symbol.entry();
        if entry.introduced == 0 {
            // Undocumented: several may share the name, and the rule does not say which is meant.
            continue;
        }
        let flags = if entry.variant == Variant::Legacy {
            0
        } else {
            2
        };
        // The driver may have another symbol of that name and version; then that one is the answer.
        let Some(expected) =
            resolve::select(entry.base_name.as_bytes(), entry.introduced, flags, |_| {
                true
            })
        else {
            continue;
        };
        let answer = host.ask(&format!(
            "resolve cuGetProcAddress_v2 {} {} {flags} {}",
            entry.base_name,
            entry.introduced,
            name(expected)
        ));
        if answer != "ours" {
            wrong.push(format!(
                "{} {}: {answer}",
                entry.base_name, entry.introduced
            ));
        }
    }
    none_wrong(wrong);
    assert_eq!(
        host.ask("resolve cuGetProcAddress_v2 cuNoSuchThing 12000 0 cuInit"),
        "status 500"
    );
    assert_eq!(
        host.ask("resolve cuGetProcAddress_v2 cuMemAlloc 1000 0 cuInit"),
        "status 500"
    );
    host.finish();
}

#[test]
fn every_way_of_looking_a_symbol_up_finds_ours() {
    let mut host = Host::without_arbiter();
    for symbol in SYMBOLS {
        let name = name(symbol);
        for how in ["soname", "path", "default", "next"] {
            assert_eq!(
                host.ask(&format!("lookup {how} {name}")),
                "ours",
                "{how} {name}"
            );
        }
    }
    for how in ["soname", "path", "default", "next", "versioned"] {
        assert_eq!(
            host.ask(&format!("lookup {how} cuNoSuchThing")),
            "null",
            "{how}"
        );
    }
    // Not of the table: the driver's own, untouched.
    assert_eq!(host.ask("lookup path recording_driver"), "theirs");
    assert_eq!(host.ask("lookup next malloc"), "other");
    host.finish();
}

#[test]
fn a_wrapper_in_front_of_us_does_not_go_round_in_circles() {
    let sandbox = Sandbox::new();
    let log = Log::create(&sandbox.path("log"));
    log.begin(symbol("cuInit"), 0, true);
    let wrapper = programs::library("wrapper");
    let preload = Artefacts::get().preload();
    for order in [[&wrapper, &preload], [&preload, &wrapper]] {
        log.begin(symbol("cuInit"), 0, true);
        let list = format!("{}:{}", order[0].display(), order[1].display());
        let outcome = tests::Outcome::of(
            sandbox
                .command(programs::program("init_once"))
                .env("LD_PRELOAD", list)
                .env("SUBLET_DRIVER", stub::driver())
                .env("RECORDING_DRIVER_LOG", log.path()),
        )
        .succeeded();
        assert_eq!(log.calls_of(symbol("cuInit")).len(), 1, "{order:?}");
        assert_eq!(outcome.quiet(), "0\n");
    }
}

fn waits_for_host(name: &str) -> bool {
    let waits = [
        "cuLaunchHostFunc",
        "cuStreamAddCallback",
        "cuStreamWaitValue",
    ];
    waits.iter().any(|one| name.starts_with(one))
}

/// What a hook's own part is, by the shape of its entry: the parts that a call always comes to when
/// the driver refuses it.
fn parts(symbol: Symbol) -> u8 {
    let entry = symbol.entry();
    let traits = entry.traits;
    match entry.shape {
        Shape::Jump | Shape::Quiesced | Shape::Init => 0,
        // Before and after.
        Shape::Hook => 2,
        Shape::Gated if traits.allocates => 4,
        // The work before a wait for the host has a mark of its own.
        Shape::Gated if waits_for_host(name(symbol)) => 4,
        Shape::Gated | Shape::GatedList => 3,
        Shape::Sync | Shape::Query => 2,
        // Whether a strict job may use its device is a part.
        Shape::Context => 4 + u8::from(traits.context.takes_away()),
        Shape::Tracked => {
            let capture = match traits.capture {
                Capture::None => 0,
                Capture::Begins => 3,
                // What was freed beside it may be looked after.
                Capture::Ends => 2,
            };
            let ends = match traits.tracks {
                // The stream's marks, and its pools' blocks.
                Tracks::StreamEnd => 2,
                Tracks::PoolAttribute => 1,
                _ => 0,
            };
            let handles =
                u8::from(traits.unmovable.is_some()) + u8::from(traits.physical.is_some());
            // Whether a strict job may use the device that the call names.
            let named = [
                "cuDeviceGetDefaultMemPool",
                "cuDeviceGetMemPool",
                "cuMemGetDefaultMemPool",
                "cuMemGetMemPool",
                "cuMemPoolCreate",
            ];
            let device = u8::from(named.contains(&name(symbol)));
            capture + ends + handles + device + u8::from(traits.quiesced)
        }
    }
}

#[test]
fn a_hook_that_fails_is_reported_once_and_leaves_its_thread_governed() {
    let library = std::fs::read(Artefacts::get().preload()).expect("the preload library");
    let variable = b"SUBLET_FAULT_HOOKS\0";
    assert!(
        library.windows(variable.len()).any(|at| at == variable),
        "faults are injected in builds with debug assertions: test such a build"
    );
    for part in 1..=4 {
        let (mut host, mut attached) =
            Host::attached_with(&[("SUBLET_FAULT_HOOKS", &part.to_string())]);
        let launch = symbol("cuLaunchKernel");
        // Its own part fails now, so that it can show below that the thread is governed. Two
        // streams: both calls are looked into.
        let mut other = kinds(launch);
        other.replace_range(8..9, "v");
        host.ask("value 7001");
        for kinds in [kinds(launch), other] {
            host.log.begin(launch, ODD_STATUS, true);
            host.call(&format!("call cuLaunchKernel {kinds}"));
        }
        let reported = [Event::HookFailed { row: launch as u32 }];
        assert_eq!(attached.records(), reported, "part {part}");
        let (mut wrong, mut failed) = (Vec::new(), 0);
        for of in SYMBOLS {
            if of == launch || of.entry().shape == Shape::Init {
                continue;
            }
            // The part fails at the first call, and is there again at the second.
            for (call, fails) in [("first", parts(of) >= part), ("second", false)] {
                if let Err(why) = reaches(&mut host, of, ODD_STATUS, true) {
                    wrong.push(format!("{call} call of {why}"));
                }
                let row = of as u32;
                let records = attached.records();
                let reported = records == [Event::HookFailed { row }];
                if reported != fails && !(call == "second" && reported) {
                    wrong.push(format!("{}, {call} call: {records:?}", name(of)));
                }
                failed += u32::from(reported);
            }
            if parts(of) < part {
                continue;
            }
            attached.close();
            host.log.begin(launch, ODD_STATUS, true);
            host.send(&format!("call cuLaunchKernel {}", kinds(launch)));
            attached.wait_for_a_waiter();
            assert_eq!(host.log.calls_of(launch), [], "after {}", name(of));
            attached.open();
            assert_eq!(host.returned().status, ODD_STATUS);
        }
        none_wrong(wrong);
        assert!(failed > 20, "{failed} hooks failed in part {part}");
        host.finish();
    }
}

#[test]
fn an_attachment_that_fails_is_refused_and_not_a_way_out_of_a_quota() {
    const SYSTEM_NOT_READY: u32 = 802;
    let sandbox = Sandbox::new();
    let listening = Listening::at(&sandbox.path("channel.sock"));
    let socket = listening.path().to_str().expect("a plain path").to_owned();
    let vars = [
        ("SUBLET_SOCKET", socket.as_str()),
        ("SUBLET_TOKEN", TOKEN),
        ("SUBLET_FAULT_HOOKS", "i"),
        ("SUBLET_ON_REFUSAL", "closed"),
    ];
    let mut host = Host::start(sandbox, &vars);
    host.log.begin(symbol("cuInit"), 0, true);
    assert_eq!(host.call("call cuInit 0").status, SYSTEM_NOT_READY);
    let launch = symbol("cuLaunchKernel");
    host.log.begin(launch, 0, true);
    let returned = host.call(&format!("call cuLaunchKernel {}", kinds(launch)));
    assert_eq!(returned.status, SYSTEM_NOT_READY);
    assert_eq!(host.log.calls_of(launch), []);
    host.finish();
}
