//! A whole arbiter in virtual time: jobs register, their processes attach by an end in this
//! process, take turns, are killed, and go on under the next arbiter. No clock is read and no
//! socket is made.

use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;

use channel::arbiter::ClientPages;
use channel::wire::{DeviceId, Hello, PROTOCOL_MAJOR, PROTOCOL_MINOR};
use control::paths::RuntimeDir;
use control::{Change, DeviceSettings, JobSettings, JobSpec, Request, SliceMode};
use policy::TenantId;

use crate::attach::Verdict;
use crate::census::Process;
use crate::clock::tests::Virtual;
use crate::container::Origin;
use crate::convert;
use crate::ground::Ground;
use crate::operator::only_ours;
use crate::options::{DeviceRule, Options};
use crate::reactor::Event;
use crate::serve::Arbiter;
use crate::state::State;
use crate::turns::Ask;
use crate::who::Peer;

const MS: u64 = 1_000_000;
const US: u64 = 1_000;
const GIB: u64 = 1 << 30;

/// The end of a process of a job.
struct End {
    client: u64,
    slot: u32,
    pages: Rc<ClientPages>,
    /// What it brings to the next arbiter.
    brings: (OwnedFd, OwnedFd),
}

impl End {
    fn is_open(&self) -> bool {
        self.pages.arbiter.is_open(0)
    }

    /// Always has more to submit: waits where its gate is closed, launches where it is open.
    fn live(&self) {
        let want = self.pages.client.want(0).expect("device");
        if self.is_open() {
            if self.pages.client.waiting(0) > 0 {
                want.end_waiting();
            }
            self.pages.client.thread(0).count_launch();
            self.pages.client.thread(0).all_marked();
        } else if self.pages.client.waiting(0) == 0 {
            want.begin_waiting();
        }
    }
}

struct World {
    arbiter: Arbiter,
    time: Rc<Virtual>,
    now_ns: u64,
    due_ns: Option<u64>,
    place: tempfile::TempDir,
}

fn own_pid() -> u32 {
    std::process::id()
}

fn pidfd() -> OwnedFd {
    let flags = rustix::process::PidfdFlags::empty();
    rustix::process::pidfd_open(rustix::process::getpid(), flags).expect("this process")
}

fn hello(token: &str, previous_slot: Option<u32>) -> Hello {
    Hello {
        major: PROTOCOL_MAJOR,
        minor: PROTOCOL_MINOR,
        features: 0,
        token: convert::token_bytes(token).expect("a token"),
        previous_slot,
        gap_ns: 0,
        devices: vec![DeviceId {
            uuid: [7; 16],
            total_bytes: 16 * GIB,
        }],
        command: "train".into(),
        asked: String::new(),
    }
}

impl World {
    fn new() -> Self {
        let place = tempfile::tempdir().expect("directory");
        let time = Rc::new(Virtual::default());
        time.set(1_000 * MS);
        Self::on(place, time, 1_000 * MS, State::default())
    }

    fn on(place: tempfile::TempDir, time: Rc<Virtual>, now_ns: u64, state: State) -> Self {
        let dir = RuntimeDir::given(place.path().to_owned()).expect("absolute");
        let clock: crate::clock::Clock = Rc::<Virtual>::clone(&time);
        let ground = Ground::closed(&dir, &clock);
        let slices = DeviceSettings {
            mode: Some(SliceMode::Exclusive),
            ..DeviceSettings::default()
        };
        let options = Options {
            host_nvml: false,
            devices: vec![DeviceRule {
                device: None,
                settings: slices,
            }],
            ..Options::new(dir)
        };
        let arbiter = Arbiter::on(ground, options, state, clock).expect("started");
        Self {
            arbiter,
            time,
            now_ns,
            due_ns: None,
            place,
        }
    }

    /// Kills the arbiter and starts the next one, which finds what the first one would have saved.
    fn restart(self) -> Self {
        let state = self.arbiter.state();
        drop(self.arbiter);
        Self::on(self.place, self.time, self.now_ns, state)
    }

    fn register(&mut self, name: &str, share: f64) -> (TenantId, String) {
        self.register_as(name, share, false)
    }

    fn register_as(&mut self, name: &str, share: f64, any_user: bool) -> (TenantId, String) {
        let peer = Peer::here(own_pid(), rustix::process::getuid().as_raw());
        let spec = JobSpec {
            settings: JobSettings {
                share: Some(share),
                ..JobSettings::default()
            },
            name: name.into(),
            simulated: true,
            any_user,
            ..JobSpec::default()
        };
        match self.arbiter.register(spec, &peer) {
            Ok(job) => (TenantId(job.id), job.token),
            other => panic!("{other:?}"),
        }
    }

    /// This process says hello; `before`: its end at the arbiter before this one.
    fn attach(&mut self, token: &str, before: Option<End>) -> End {
        self.attach_process(own_pid(), token, before)
    }

    fn attach_process(&mut self, pid: u32, token: &str, before: Option<End>) -> End {
        let hello = hello(token, before.as_ref().map(|end| end.slot));
        let kept = before.map(|end| end.brings);
        let who = (pid, rustix::process::getuid().as_raw());
        let pidfd = || {
            let flags = rustix::process::PidfdFlags::empty();
            let pid = rustix::process::Pid::from_raw(pid as i32).expect("no zero");
            rustix::process::pidfd_open(pid, flags).expect("it lives")
        };
        // A disk that takes its time is not waited for.
        let process = pidfd();
        let whose = (who.0, who.1, process.as_fd());
        let verdict = self.arbiter.judge(&hello, &kept, whose, false, self.now_ns);
        let Verdict::In(terms) = verdict else {
            panic!("not let in");
        };
        let mut brings = None;
        let client = self
            .arbiter
            .let_in(pidfd(), who, hello, *terms, |files, memory, _| {
                brings = Some(files.to_bring(memory)?);
                Ok(None)
            });
        let client = client.expect("welcomed");
        let attached = self.arbiter.clients.get(client).expect("it is in");
        End {
            client,
            slot: attached.slot,
            pages: Rc::clone(&attached.pages),
            brings: brings.expect("welcomed"),
        }
    }

    /// Lets time pass. The arbiter is stepped when it asks for it, and when a process begins to
    /// wait (which would ring).
    fn run(&mut self, ns: u64, ends: &[&End]) {
        let until_ns = self.now_ns + ns;
        while self.now_ns < until_ns {
            self.now_ns += 50 * US;
            self.time.set(self.now_ns);
            let waiting = || -> u32 { ends.iter().map(|end| end.pages.client.waiting(0)).sum() };
            let before = waiting();
            ends.iter().for_each(|end| end.live());
            let rang = waiting() > before;
            if rang {
                self.arbiter.schedulers.mark(1);
            }
            if rang || self.due_ns.is_none_or(|due_ns| due_ns <= self.now_ns) {
                self.due_ns = self.arbiter.step();
            }
        }
    }

    fn device_ns(&self, job: TenantId) -> u64 {
        let used = self.arbiter.schedulers[0].usage(job);
        used.map_or(0, |usage| usage.device_ns)
    }

    fn kinds(&self) -> Vec<String> {
        let events = self.arbiter.journal.since(0, 0);
        events.into_iter().map(|event| event.kind).collect()
    }
}

/// Two jobs take turns, one is killed while it holds the device, the arbiter is killed, and the
/// other job goes on under the next one. What both got, and the tokens.
fn scenario() -> (Vec<u64>, Vec<String>) {
    let mut world = World::new();
    let (large, large_token) = world.register("large", 0.75);
    let (small, small_token) = world.register("small", 0.25);
    let a = world.attach(&large_token, None);
    assert!(a.is_open(), "nobody else is there");
    let b = world.attach(&small_token, None);
    assert!(!b.is_open());

    let mut got = Vec::new();
    world.run(500 * MS, &[&a, &b]);
    let before = [large, small].map(|job| world.device_ns(job));
    world.run(4_000 * MS, &[&a, &b]);
    for (at, job) in [large, small].into_iter().enumerate() {
        got.push(world.device_ns(job) - before[at]);
    }
    let share = got[0] as f64 / (got[0] + got[1]) as f64;
    assert!((share - 0.75).abs() < 0.02, "{got:?}");

    while !a.is_open() {
        world.run(50 * US, &[&a, &b]);
    }
    world.arbiter.on_event(Event::ClientEnded(a.client));
    assert!(b.is_open(), "the device of a killed holder is free at once");
    let before = world.device_ns(small);
    world.run(1_000 * MS, &[&b]);
    got.push(world.device_ns(small) - before);
    assert!(got[2] > 990 * MS, "{got:?}");
    assert!(world.kinds().contains(&"detached".to_owned()));

    let epoch = world.arbiter.persistence.epoch();
    let mut world = world.restart();
    assert_eq!(world.arbiter.persistence.epoch(), epoch + 1);
    let b = world.attach(&small_token, Some(b));
    assert!(b.is_open(), "its job is known, and nobody else is there");
    assert!(world.kinds().contains(&"reattached".to_owned()));
    let before = world.device_ns(small);
    world.run(1_000 * MS, &[&b]);
    got.push(world.device_ns(small) - before);
    assert!(got[3] > 970 * MS, "{got:?}");
    (got, vec![large_token, small_token])
}

#[test]
fn a_whole_arbiter_is_stepped_without_a_clock_or_a_socket_and_twice_the_same() {
    let first = scenario();
    // Time and random numbers come from the test: nothing is left to chance.
    assert_eq!(first, scenario());
}

#[test]
fn a_token_counts_for_its_user_unless_the_job_is_for_any() {
    let other = rustix::process::getuid().as_raw() + 1;
    let lets_in = |world: &mut World, token: &str| {
        let process = pidfd();
        let whose = (own_pid(), other, process.as_fd());
        let verdict = world
            .arbiter
            .judge(&hello(token, None), &None, whose, false, world.now_ns);
        matches!(verdict, Verdict::In(_))
    };
    let mut world = World::new();
    let (_, own) = world.register("own", 0.25);
    let (_, pod) = world.register_as("pod", 0.25, true);
    assert!(!lets_in(&mut world, &own));
    assert!(lets_in(&mut world, &pod));
    // The next arbiter knows which is which.
    world.attach(&own, None);
    world.attach(&pod, None);
    let mut world = world.restart();
    assert!(!lets_in(&mut world, &own));
    assert!(lets_in(&mut world, &pod));
}

/// A process of an engine, for as long as a test lets it live.
struct Stands(std::process::Child);

impl Stands {
    fn start() -> Self {
        let child = std::process::Command::new("sleep").arg("1000").spawn();
        Self(child.expect("sleep"))
    }

    fn end(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Stands {
    fn drop(&mut self) {
        self.end();
    }
}

fn register_for(
    world: &mut World,
    (pid, uid): (u32, u32),
    owner: Option<u32>,
) -> Result<control::Registered, control::ControlError> {
    let spec = JobSpec {
        name: "slurm.7".into(),
        simulated: true,
        on_behalf_of: owner,
        ..JobSpec::default()
    };
    world.arbiter.register(spec, &Peer::here(pid, uid))
}

#[test]
fn steps_of_an_engine_s_job_share_it_and_it_is_over_with_the_last() {
    let mut world = World::new();
    let (mut first, mut second) = (Stands::start(), Stands::start());
    let pids = [first.0.id(), second.0.id()];
    // Nobody keeps a job of Slurm's from its name.
    let taken = register_for(&mut world, (own_pid(), 1000), None).expect_err("reserved");
    assert!(taken.message.contains("`slurm.7` is for a job of Slurm's"));
    let refused = register_for(&mut world, (own_pid(), 1000), Some(1001)).expect_err("no root");
    assert!(
        refused
            .message
            .contains("user 1000 cannot register a job for user 1001")
    );

    let mut world = World::new();
    let one = register_for(&mut world, (pids[0], 0), Some(1000)).expect("the first step");
    let two = register_for(&mut world, (pids[1], 0), Some(1000)).expect("the second step");
    assert_eq!((&one.token, one.id), (&two.token, two.id));
    let other = register_for(&mut world, (own_pid(), 0), Some(1001)).expect_err("another user's");
    assert!(other.message.contains("slurm.7"), "{}", other.message);
    let id = TenantId(one.id);
    let ending = |world: &World| {
        let tenant = world.arbiter.ledger.get(id);
        tenant.is_none_or(|tenant| tenant.ending.is_some())
    };

    first.end();
    world.arbiter.on_event(Event::JobEnded(one.id));
    assert!(!ending(&world), "the second step goes on");
    // The next arbiter knows who stands for the job.
    let mut world = world.restart();
    assert!(!ending(&world));
    let third = register_for(&mut world, (own_pid(), 0), Some(1000)).expect("a third step");
    assert_eq!(third.token, one.token);
    second.end();
    world.arbiter.on_event(Event::JobEnded(one.id));
    assert!(!ending(&world), "the third step goes on");
}

#[test]
fn an_engine_s_job_whose_last_step_ended_without_an_arbiter_is_ended_by_the_next() {
    let mut world = World::new();
    let mut only = Stands::start();
    let job = register_for(&mut world, (only.0.id(), 0), Some(1000)).expect("its step");
    only.end();
    let world = world.restart();
    let tenant = world.arbiter.ledger.get(TenantId(job.id));
    assert!(tenant.is_none_or(|tenant| tenant.ending.is_some()));
}

#[test]
fn an_engine_s_job_goes_on_by_a_later_step_where_the_first_ended_without_an_arbiter() {
    let mut world = World::new();
    let (mut first, mut second) = (Stands::start(), Stands::start());
    let job = register_for(&mut world, (first.0.id(), 0), Some(1000)).expect("the first step");
    register_for(&mut world, (second.0.id(), 0), Some(1000)).expect("the second step");
    first.end();
    let mut world = world.restart();
    let kinds = world.kinds();
    assert!(kinds.contains(&"restored".into()), "{kinds:?}");
    let tenant = world
        .arbiter
        .ledger
        .get(TenantId(job.id))
        .expect("it lives");
    assert!(tenant.process.is_some() && tenant.dormant.is_none() && tenant.ending.is_none());
    // And with the last of them it ends, and the journal says why.
    second.end();
    world.arbiter.on_event(Event::JobEnded(job.id));
    let kinds = world.kinds();
    let ended = kinds.iter().filter(|kind| *kind == "engine_gone");
    assert_eq!(ended.count(), 1, "{kinds:?}");
}

#[test]
fn an_engine_s_job_has_as_many_steps_one_after_the_other_as_it_likes() {
    let mut world = World::new();
    let job = register_for(&mut world, (own_pid(), 0), Some(1000)).expect("the first step");
    let id = TenantId(job.id);
    let ended = Process {
        pid: u32::MAX,
        started_ticks: 1,
    };
    let tenant = world.arbiter.ledger.get_mut(id).expect("it lives");
    tenant.joined = vec![ended; 4096];
    let mut last = Stands::start();
    register_for(&mut world, (last.0.id(), 0), Some(1000)).expect("one more");
    let tenant = world.arbiter.ledger.get_mut(id).expect("it lives");
    assert_eq!(tenant.joined.len(), 1);
    // Housekeeping has one watched that could not be when it was its turn.
    tenant.process = None;
    world.arbiter.watch_again();
    let tenant = world.arbiter.ledger.get(id).expect("it lives");
    assert!(tenant.process.is_some() && tenant.joined.is_empty());
    assert_eq!(tenant.spec.pid, last.0.id());
    last.end();
}

#[test]
fn who_was_in_a_container_when_it_connected_registers_no_job_from_elsewhere() {
    let mut world = World::new();
    let spec = JobSpec {
        simulated: true,
        ..JobSpec::default()
    };
    let peer = Peer::here(own_pid(), 0).inside("/docker/0");
    let refused = world.arbiter.register(spec, &peer).expect_err("refused");
    assert_eq!(refused.code, control::ErrorCode::Permission);
    assert!(refused.message.contains("is not where it was"), "{refused}");
}

/// What somebody may do, asked by name and on the whole.
#[test]
fn a_containers_root_changes_jobs_of_its_container_and_governs_nothing() {
    let mut world = World::new();
    world.register("host", 0.25);
    let (inside, _) = world.register("inside", 0.25);
    let key = "/docker/0";
    let tenant = world.arbiter.ledger.get_mut(inside).expect("it lives");
    tenant.registered_in = key.into();
    let mut world = world.restart();
    let uid = rustix::process::getuid().as_raw();
    let root = Peer::here(own_pid(), uid).inside(key);
    let unseen = Peer {
        origin: Origin::Unknown,
        ..root.clone()
    };
    let arbiter = &mut world.arbiter;
    arbiter.tenant_of("inside", &root).expect("its own");
    for (job, peer) in [("host", &root), ("host", &unseen), ("inside", &unseen)] {
        let error = arbiter.tenant_of(job, peer).expect_err("refused");
        assert_eq!(error.code, control::ErrorCode::Permission, "{job} {peer:?}");
    }
    for peer in [&root, &unseen] {
        only_ours(peer).expect_err("refused");
        let change = control::DeviceSettings::default();
        let error = arbiter
            .change_devices(None, change, peer)
            .expect_err("refused");
        assert_eq!(error.code, control::ErrorCode::Permission);
        arbiter.reload_for(1, peer).expect_err("refused");
    }
    let reads = |arbiter: &Arbiter, peer: &Peer| -> Vec<String> {
        let events = arbiter.events_for(peer, 0, 0);
        let whole = events
            .into_iter()
            .filter(|one| !one.message.contains("of another user"));
        whole
            .map(|one| one.job)
            .filter(|job| !job.is_empty())
            .collect()
    };
    assert!(reads(arbiter, &Peer::here(1, uid)).contains(&"host".into()));
    let inside = reads(arbiter, &root);
    assert!(
        inside.contains(&"inside".into()) && !inside.contains(&"host".into()),
        "{inside:?}"
    );
    assert!(reads(arbiter, &unseen).is_empty());
}

/// What a job holds on the first device, by its page.
fn held(world: &mut World, job: TenantId) -> u64 {
    let tenant = world.arbiter.ledger.get_mut(job).expect("it lives");
    tenant.read_accounts();
    tenant.used_bytes(0)
}

fn takes(world: &World, job: TenantId, slot: u32) {
    let tenant = world.arbiter.ledger.get(job).expect("it lives");
    let page = &tenant.memory.as_ref().expect("a page").page;
    let account = channel::Account::new(page, slot).expect("a slot");
    account.reserve(0, GIB, u64::MAX).expect("no limit");
}

#[test]
fn what_a_process_had_is_free_for_who_waited_for_its_end_before_that_is_heard_of() {
    let mut world = World::new();
    let (job, token) = world.register("job", 0.25);
    let parent = world.attach(&token, None);
    let mut kept = Vec::new();

    // The next process says hello. The loop has not heard of the end.
    let mut child = Stands::start();
    let first = world.attach_process(child.0.id(), &token, None);
    takes(&world, job, first.slot);
    child.end();
    kept.push(held(&mut world, job));
    let mut next = Stands::start();
    let second = world.attach_process(next.0.id(), &token, None);
    kept.push(held(&mut world, job));
    assert_eq!(second.slot, first.slot, "the dead one's place is free");

    // The process that waited for it asks, before it refuses its program memory.
    takes(&world, job, second.slot);
    next.end();
    let asked = parent.pages.client.ask_for_credit();
    assert!(!parent.pages.arbiter.is_credited(asked));
    world.arbiter.answer_credits(world.now_ns);
    assert!(parent.pages.arbiter.is_credited(asked));
    kept.push(held(&mut world, job));
    println!("now: {kept:?} bytes held by a dead process, after the next hello, after a question");
    assert_eq!(kept, [GIB, 0, 0]);
    let detached = world
        .kinds()
        .iter()
        .filter(|kind| *kind == "detached")
        .count();
    assert_eq!(detached, 2);
}

#[test]
fn a_job_is_not_refused_for_the_promises_of_one_that_has_ended_unheard() {
    let mut world = World::new();
    let mut first = Stands::start();
    let uid = rustix::process::getuid().as_raw();
    let register = |world: &mut World, pid: u32, name: &str| {
        let spec = JobSpec {
            settings: JobSettings {
                share: Some(0.75),
                ..JobSettings::default()
            },
            name: name.into(),
            simulated: true,
            ..JobSpec::default()
        };
        world.arbiter.register(spec, &Peer::here(pid, uid))
    };
    register(&mut world, first.0.id(), "first").expect("the device is free");
    let beside = register(&mut world, own_pid(), "second").expect_err("it lives");
    first.end();
    let after = register(&mut world, own_pid(), "second");
    println!(
        "now: refused beside it: {}; after its end: {}",
        beside.message,
        after.is_ok()
    );
    after.expect("its share is free");
}

#[test]
fn a_process_has_a_place_where_those_that_took_them_all_have_ended_unheard() {
    let mut world = World::new();
    let (job, token) = world.register("job", 0.25);
    let most = world.arbiter.rulebook.options().job_processes;
    let tenant = world.arbiter.ledger.get_mut(job).expect("it lives");
    (1..most).for_each(|_| assert!(tenant.take_slot(most).is_some()));
    let mut last = Stands::start();
    let first = world.attach_process(last.0.id(), &token, None);
    last.end();
    let next = world.attach(&token, None);
    println!(
        "now: place {} of {most} again in place {}",
        first.slot, next.slot
    );
    assert_eq!((first.slot, next.slot), (most - 1, most - 1));
}

#[test]
fn an_answer_comes_when_the_gates_that_it_closes_are_closed() {
    let mut world = World::new();
    let (_, token) = world.register("job", 0.5);
    let end = world.attach(&token, None);
    world.run(100 * MS, &[&end]);
    assert!(end.is_open());
    // Who asks may act on the answer before the arbiter gets to anything else.
    world.arbiter.answer(Ask {
        number: 1,
        peer: Peer::here(own_pid(), rustix::process::getuid().as_raw()),
        request: Request::Set {
            job: "job".into(),
            change: Change {
                paused: Some(true),
                ..Change::default()
            },
        },
    });
    assert!(!end.is_open());
}
