//! The daemon as a whole: what it owns, its one loop, and the life cycle of tenants and clients.

use std::io;

use nix::sys::signal::{SigSet, Signal};
use policy::TenantId;
use serde_json::Value;

use crate::allowances::Allowances;
use crate::api::Api;
use crate::claims::Claims;
use crate::clients::Clients;
use crate::clock::{self, Clock};
use crate::container::Origin;
use crate::container_names::ContainerNames;
use crate::descriptors::{self, Descriptors};
use crate::devices::Devices;
use crate::discovery::Discovery;
use crate::door::Door;
use crate::ended::Ended;
pub use crate::ground::Error;
use crate::ground::Ground;
use crate::groups::Groups;
use crate::journal::{About, Journal};
use crate::ledger::Ledger;
use crate::lifetime::{FAILURES, Lifetime, Stopper};
use crate::names::Names;
use crate::options::Options;
use crate::outsiders::Outsiders;
use crate::parked::Parked;
use crate::persistence::Persistence;
use crate::profile::{Parts, Profiles};
use crate::reactor::{Event, Interest, Poller, be_prompt};
use crate::renewal::Renewal;
use crate::residency::{Capacity, MoveQueue};
use crate::rulebook::{Rulebook, Why};
use crate::schedulers::Schedulers;
use crate::slow_work::{HOUSEKEEPING_NS, SlowWork};
use crate::space::Space;
use crate::state::State;
use crate::supervisor::Supervisor;
use crate::suspicions::Suspicions;
use crate::turns::Turns;
use crate::unsaved::Unsaved;
use crate::writer;

/// For how long the core is left to threads that were just woken. TIMEOUT: twice what a thread
/// needs from being woken to its first submission; everything that comes meanwhile is looked at so
/// much later.
const ASIDE_NS: u64 = 50_000;
/// A turn of the loop that comes so late is reported.
const STALL_NS: u64 = 1_000_000_000;
/// How long pages of an earlier arbiter may take to turn up. TIMEOUT: clients try again every
/// second or so.
pub(crate) const ADOPT_NS: u64 = 10_000_000_000;

/// Requests for turns that may wait at a time: each keeps a connection of the API, of which there
/// are four times as many, and fewer where there are few descriptors.
const MOST_WAITING: u64 = 48;

fn most_waiting() -> usize {
    let most = descriptors::limit().map_or(MOST_WAITING, |limit| (limit / 16).min(MOST_WAITING));
    usize::try_from(most).unwrap_or(2)
}

/// What ends an arbiter, and what has it read its quota file again.
fn signal_sets() -> (SigSet, SigSet) {
    let set = |signals: &[Signal]| signals.iter().copied().collect::<SigSet>();
    (
        set(&[Signal::SIGTERM, Signal::SIGINT]),
        set(&[Signal::SIGHUP]),
    )
}

/// Keeps the signals that [`run`] waits for from every thread that is started from here on. A
/// single thread without this is given them, and the process ends at once: no gate is opened and
/// nothing is saved.
///
/// # Errors
/// The kernel refuses.
pub fn hold_signals() -> Result<(), Error> {
    let (signals, hangup) = signal_sets();
    signals
        .thread_block()
        .and_then(|()| hangup.thread_block())
        .map_err(|errno| Error::io("take signals")(errno.into()))
}

/// Serves until SIGTERM, SIGINT, a request to shut down, or the end of an idle time. Every gate is
/// left open. SIGHUP has the quota file read again. A process that has started threads before has
/// called [`hold_signals`] before that.
///
/// # Errors
/// [`Error`]; nothing was served where the start failed.
pub fn run(options: Options) -> Result<(), Error> {
    use nix::sys::signalfd::{SfdFlags, SignalFd};
    hold_signals()?;
    let blocked = |errno: nix::Error| Error::io("take signals")(errno.into());
    let (signals, hangup) = signal_sets();
    let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
    let signalled = SignalFd::with_flags(&signals, flags).map_err(blocked)?;
    let mut arbiter = Arbiter::start(options)?;
    arbiter
        .poller
        .add(&signalled, Event::Stop, Interest::Read)
        .map_err(Error::io("wait for signals"))?;
    let hangups = SignalFd::with_flags(&hangup, flags).map_err(blocked)?;
    arbiter
        .poller
        .add(&hangups, Event::Reload, Interest::Read)
        .map_err(Error::io("wait for signals"))?;
    arbiter.lifetime.hear_hangups(hangups);
    // Connections are accepted, and what was known is known again.
    arbiter.supervisor.ready();
    arbiter.serve()
}

/// The daemon.
pub struct Arbiter {
    pub(crate) clock: Clock,
    pub(crate) rulebook: Rulebook,
    pub(crate) poller: Poller,
    pub(crate) door: Door,
    pub(crate) turns: Turns,
    pub(crate) discovery: Discovery,
    pub(crate) claims: Claims,
    pub(crate) outsiders: Outsiders,
    pub(crate) ledger: Ledger,
    pub(crate) devices: Devices,
    pub(crate) schedulers: Schedulers,
    pub(crate) clients: Clients,
    pub(crate) parked: Parked,
    pub(crate) unsaved: Unsaved,
    pub(crate) ended: Ended,
    pub(crate) journal: Journal,
    pub(crate) profiles: Profiles,
    pub(crate) capacity: Capacity,
    pub(crate) space: Space,
    pub(crate) moves: MoveQueue,
    pub(crate) groups: Groups,
    pub(crate) persistence: Persistence,
    pub(crate) names: Names,
    pub(crate) container_names: ContainerNames,
    pub(crate) suspicions: Suspicions,
    pub(crate) allowances: Allowances,
    pub(crate) slow_work: SlowWork,
    pub(crate) supervisor: Supervisor,
    pub(crate) renewal: Renewal,
    pub(crate) api: Api,
    /// The last of all: it has the lock of the directory.
    pub(crate) lifetime: Lifetime,
}

impl Arbiter {
    /// Takes the directory, reloads the state and listens. Clients can connect from here on; they
    /// are served by [`serve`](Self::serve).
    ///
    /// # Errors
    /// [`Error`]
    pub fn start(mut options: Options) -> Result<Self, Error> {
        // What this process is in is read once, and now there are descriptors for that.
        let _ = Origin::of(std::process::id());
        let clock = clock::host();
        let handed = std::mem::take(&mut options.handed);
        let ground = Ground::take(&options, handed, &clock)?;
        let (state, damage) = State::load(&options.dir.state_file());
        let mut arbiter = Self::on(ground, options, state, clock)?;
        if let Some(damage) = damage {
            let file = arbiter.rulebook.options().dir.state_file();
            tracing::warn!(
                "{} is of no use, jobs that run are not known: {damage}",
                file.display()
            );
        }
        // The number of this incarnation is used up before anybody is served.
        arbiter.save_state();
        arbiter.persistence.settle(writer::IN_THE_END);
        Ok(arbiter)
    }

    /// An arbiter that stands on `ground` and goes on from `state`.
    pub(crate) fn on(
        ground: Ground,
        mut options: Options,
        mut state: State,
        clock: Clock,
    ) -> Result<Self, Error> {
        let look_up = std::mem::replace(&mut options.user_name, Box::new(|_| Ok(None)));
        let names = Names::start(look_up).map_err(Error::io("start a thread"))?;
        let container_names =
            ContainerNames::start("/".into()).map_err(Error::io("start a thread"))?;
        let rulebook = Rulebook::start(options).map_err(Error::io("start a thread"))?;
        let profiles = Profiles::new(std::mem::take(&mut state.baselines))
            .map_err(Error::io("start a thread"))?;
        let now_ns = clock.mono_ns();
        let Ground {
            lock,
            poller,
            listener,
            turns,
            watcher,
            claims,
            census,
            journal,
            state_file,
            renewal,
            stop,
            supervisor,
            pages,
            api,
            descriptors,
        } = ground;
        let mut arbiter = Self {
            lifetime: Lifetime::begin(clock.unix_ms(), now_ns, stop, lock),
            clock,
            rulebook,
            poller,
            door: Door::new(listener, descriptors),
            turns,
            discovery: Discovery::new(watcher),
            claims,
            outsiders: Outsiders::new(census),
            ledger: Ledger::default(),
            devices: Devices::default(),
            schedulers: Schedulers::default(),
            clients: Clients::default(),
            parked: Parked::default(),
            unsaved: Unsaved::default(),
            ended: Ended::default(),
            journal,
            profiles,
            capacity: Capacity::default(),
            space: Space::default(),
            moves: MoveQueue::default(),
            groups: Groups::new(most_waiting()),
            persistence: Persistence::after(&state, state_file),
            names,
            container_names,
            suspicions: Suspicions::default(),
            allowances: Allowances::new(now_ns),
            slow_work: SlowWork::new(now_ns),
            supervisor,
            renewal,
            api,
        };
        let added = arbiter
            .poller
            .add(arbiter.lifetime.bell(), Event::Stop, Interest::Read)
            .and_then(|()| {
                let bell = arbiter.discovery.bell();
                arbiter.poller.add(bell, Event::Devices, Interest::Read)
            })
            .and_then(|()| {
                let bell = arbiter.persistence.bell();
                arbiter.poller.add(bell, Event::Saved, Interest::Read)
            })
            .and_then(|()| {
                let bell = arbiter.names.bell();
                arbiter.poller.add(bell, Event::Names, Interest::Read)
            })
            .and_then(|()| match arbiter.container_names.bell() {
                Some(bell) => arbiter
                    .poller
                    .add(bell, Event::ContainerNames, Interest::Read),
                None => Ok(()),
            })
            .and_then(|()| match arbiter.rulebook.bell() {
                Some(bell) => arbiter.poller.add(bell, Event::Rules, Interest::Read),
                None => Ok(()),
            })
            .and_then(|()| {
                let bell = arbiter.outsiders.bell();
                arbiter.poller.add(bell, Event::Census, Interest::Read)
            })
            .and_then(|()| match arbiter.renewal.bell() {
                Some(bell) => arbiter.poller.add(bell, Event::Premises, Interest::Read),
                None => Ok(()),
            })
            .and_then(|()| match arbiter.claims.bell() {
                Some(bell) => arbiter.poller.add(bell, Event::Claims, Interest::Read),
                None => Ok(()),
            })
            .and_then(|()| arbiter.turns.watch(&arbiter.poller))
            .and_then(|()| arbiter.listen());
        added.map_err(Error::io("wait for connections"))?;
        arbiter.journal.write(
            "start",
            About::NONE,
            format!(
                "arbiter {} serves {}",
                std::process::id(),
                arbiter.rulebook.options().dir.path().display()
            ),
            &[
                ("pid", Value::from(std::process::id())),
                ("epoch", Value::from(arbiter.persistence.epoch())),
            ],
        );
        if arbiter.rulebook.options().host_nvml {
            arbiter.discovery.ask(None);
        }
        arbiter.set_up_residency();
        arbiter.door.keep_reserve();
        arbiter.restore(state, pages, now_ns);
        Ok(arbiter)
    }

    /// Something to end it with.
    pub fn stopper(&self) -> Stopper {
        self.lifetime.stopper()
    }

    /// Serves until it is asked to end.
    ///
    /// # Errors
    /// [`Error`], where waiting itself fails.
    pub fn serve(mut self) -> Result<(), Error> {
        be_prompt();
        let mut events = Vec::new();
        let mut deadline_ns = Some(self.clock.mono_ns());
        while !self.lifetime.is_over() {
            self.poller
                .wait(deadline_ns, &mut events)
                .map_err(Error::io("wait for events"))?;
            let woken_ns = self.clock.mono_ns();
            let stall_ns = woken_ns.saturating_sub(deadline_ns.unwrap_or(woken_ns));
            self.lifetime.note_turn(stall_ns);
            let mut failed = false;
            for event in &events {
                failed |= self.contained(|arbiter| arbiter.on_event(*event)).is_none();
            }
            let step_ns = self.contained(Self::step);
            let turn_ns = self.contained(Self::serve_operators);
            failed |= step_ns.is_none() || turn_ns.is_none();
            let sign_ns = self.supervisor.look(self.clock.mono_ns());
            let due_ns = step_ns.flatten().into_iter().chain(turn_ns.flatten());
            deadline_ns = due_ns.chain(sign_ns).min();
            self.report_stall(stall_ns.max(self.clock.mono_ns().saturating_sub(woken_ns)));
            if failed {
                self.on_failure()?;
                // What could not say when to look again is looked at soon, and not without end.
                let soon_ns = self.clock.mono_ns() + HOUSEKEEPING_NS;
                deadline_ns = Some(deadline_ns.map_or(soon_ns, |ns| ns.min(soon_ns)));
            }
            self.step_aside(deadline_ns);
        }
        self.finish();
        Ok(())
    }

    /// The loop was held up for so long, by whatever it was.
    fn report_stall(&mut self, stall_ns: u64) {
        if stall_ns < STALL_NS {
            return;
        }
        let seconds = stall_ns as f64 / 1e9;
        let message = format!(
            "the arbiter did not run for {seconds:.1} s (it was stopped, or the host gave it no processor): what jobs did meanwhile is \
             charged to nobody beyond the first tenth of a second"
        );
        tracing::warn!("{message}");
        let fields = [("stalled_ms", Value::from(stall_ns / 1_000_000))];
        self.journal.write("stalled", About::NONE, message, &fields);
    }

    /// Runs one step of the loop. A check that fails in it (a defect of ours) ends that step and
    /// nothing else: `None` then.
    fn contained<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> Option<T> {
        // What the step has left half done is ours only: numbers and lists that the next look
        // corrects or trips over again.
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work(self))).ok()
    }

    /// A step has failed; the panic's own message is in the log.
    ///
    /// # Errors
    /// That happens all the time: a successor does better.
    fn on_failure(&mut self) -> Result<(), Error> {
        let count = self.lifetime.note_failure(self.clock.mono_ns());
        let message = format!(
            "a check inside the arbiter has failed ({count} of {FAILURES} in a minute); it goes on. Please report the lines of its log before this one"
        );
        tracing::error!("{message}");
        let fields = [("count", Value::from(count))];
        self.journal.write("failure", About::NONE, message, &fields);
        if count < FAILURES {
            return Ok(());
        }
        self.schedulers.open_all();
        Err(Error::Io {
            what: "go on: checks inside the arbiter fail again and again".into(),
            source: io::Error::other("see its log"),
        })
    }

    /// Leaves the core to threads that were just woken, for [`ASIDE_NS`] or until `deadline_ns`,
    /// and prepares for the next time.
    ///
    /// Where no core is free such a thread waits for ours, and what there is to do at once (the
    /// doorbell of the tenant whose gate was closed, a timer to be set) kept it waiting for 35 of
    /// 45 us, by a trace of the scheduler. To sleep is better than to yield: a thread that yields
    /// is not given a core again before the scheduler's next tick, one that sleeps is when its
    /// timer fires.
    fn step_aside(&mut self, deadline_ns: Option<u64>) {
        if self.schedulers.take_woke() {
            let now_ns = self.clock.mono_ns();
            let until_ns = now_ns + ASIDE_NS;
            let until_ns = deadline_ns.map_or(until_ns, |ns| ns.min(until_ns));
            if until_ns > now_ns {
                self.poller.rest(now_ns, until_ns);
            }
        }
        if let Some(turn_ns) = self.schedulers.wakes_at() {
            // Without one, resting takes a little longer to begin.
            let _ = self.poller.set_alarm(turn_ns + ASIDE_NS / 2);
        }
    }

    pub(crate) fn on_event(&mut self, event: Event) {
        let now_ns = self.clock.mono_ns();
        match event {
            Event::Stop => self.lifetime.end(),
            Event::Doorbell(id) => self.on_doorbell(id),
            Event::ClientEnded(id) => self.on_client_ended(id),
            Event::JobEnded(id) => {
                self.on_launcher_ended(TenantId(id));
            }
            Event::ChannelAccept => {
                let mut accepted = self.accept_clients(now_ns);
                if accepted.as_ref().is_err_and(Descriptors::are_lacking)
                    && self.door.give_up_reserve()
                {
                    accepted = self.accept_clients(now_ns);
                }
                if let Err(error) = accepted {
                    self.stop_accepting(&error, now_ns);
                }
            }
            Event::Greeting(id) => self.on_greeting(id, now_ns),
            Event::Devices => self.on_devices(),
            Event::Saved => {
                self.persistence.answer_bell();
                self.answer_saved(now_ns);
            }
            Event::Census => self.on_census(now_ns),
            Event::Premises => self.on_premises(now_ns),
            Event::Claims => self.on_claims(now_ns),
            Event::Desk => self.turns.on_desk(now_ns),
            Event::Names => self.on_names(now_ns),
            Event::ContainerNames => self.on_container_names(now_ns),
            Event::Rules => self.on_rules(),
            Event::Reload => {
                self.lifetime.take_hangups();
                match self.rulebook.ask(Why::Signal) {
                    Ok(()) => self.supervisor.reloads(now_ns),
                    Err(error) => tracing::error!("{error}"),
                }
            }
        }
    }

    /// Steps the device schedulers that are due and does the housekeeping. Returns when to wake up
    /// at the latest.
    pub(crate) fn step(&mut self) -> Option<u64> {
        let now_ns = self.clock.mono_ns();
        self.schedulers.mark_due(now_ns);
        self.step_dirty_schedulers();
        let now_ns = self.clock.mono_ns();
        let until_ns = self.schedulers.hands_over_until(now_ns).unwrap_or(0);
        let (housekeeping, profiles) = self.slow_work.look(now_ns, until_ns);
        if housekeeping {
            self.do_housekeeping(now_ns);
            self.slow_work.note_housekeeping(now_ns);
        }
        if profiles {
            let again_ns = self.look_at_profiles(now_ns);
            self.slow_work.note_profiles(again_ns);
        }
        // Housekeeping may have changed what opens gates.
        let questions_ns = self.answer_questions(self.clock.mono_ns());
        self.step_dirty_schedulers();
        let move_requests_ns = self.step_moves(self.clock.mono_ns());
        let groups_ns = self.step_groups(self.clock.mono_ns());
        // A turn that begins or ends opens and closes gates.
        self.step_dirty_schedulers();
        let save_ns = self.save_soon(self.clock.mono_ns());
        let quiet = self.clients.is_empty()
            && self.door.is_quiet()
            && self.parked.is_empty()
            && self.turns.is_empty()
            && self.ledger.is_empty()
            && !self.supervisor.keeps_pages()
            && !self.discovery.refreshes();
        let housekeeping_ns = if quiet {
            let idle_exit = self.rulebook.options().idle_exit;
            idle_exit.map(|after| self.lifetime.ends_idle_at(after))
        } else {
            self.slow_work.housekeeping_ns()
        };
        self.schedulers
            .due_ns()
            .into_iter()
            .chain(housekeeping_ns)
            .chain(self.slow_work.profiles_ns())
            .chain(questions_ns)
            .chain(move_requests_ns)
            .chain(groups_ns)
            .chain(save_ns)
            .min()
    }

    /// Steps the device schedulers in which something has changed or that are due, then deals the
    /// turns of gangs.
    pub(crate) fn step_dirty_schedulers(&mut self) {
        self.schedulers.step(&self.clock);
    }

    /// Answers operators for a moment: slices are looked at in between. Returns when to go on,
    /// where one waits.
    fn serve_operators(&mut self) -> Option<u64> {
        let mut now_ns = self.clock.mono_ns();
        let sitting = match self.turns.sits(now_ns) {
            Ok(sitting) => sitting,
            Err(again_ns) => return again_ns,
        };
        while sitting.goes_on(now_ns) && !self.lifetime.is_over() {
            let Some(ask) = self.turns.next(now_ns) else {
                break;
            };
            let (number, uid) = (ask.number, ask.peer.uid);
            self.answer(ask);
            let before_ns = std::mem::replace(&mut now_ns, self.clock.mono_ns());
            let took_ns = now_ns.saturating_sub(before_ns);
            self.turns.spent(number, uid, now_ns, took_ns);
        }
        self.turns.rise(&sitting, now_ns)
    }

    /// Looks at the profiles that are due. Returns when to do it again; `None`: nobody is there.
    fn look_at_profiles(&mut self, now_ns: u64) -> Option<u64> {
        let parts = Parts {
            ledger: &self.ledger,
            clients: &self.clients,
            schedulers: &self.schedulers,
        };
        let look = self.profiles.look(now_ns, parts, &self.clock);
        if look.looked {
            self.inform_schedulers();
        }
        if look.learnt {
            self.persistence.mark_old();
        }
        look.next_ns
    }

    /// Passes to the schedulers what is known of their tenants' memory and iterations.
    fn inform_schedulers(&mut self) {
        for (at, scheduler) in self.schedulers.iter_mut().enumerate() {
            for tenant in self.ledger.iter() {
                let (iterations, memory) = self.profiles.view(tenant.id, &tenant.spec.name);
                let peak_bytes = tenant.peak_bytes(at);
                // The profile's figures are of all devices together: of this one where all is here.
                let memory = if memory.is_known() && memory.peak_bytes() <= peak_bytes {
                    memory
                } else {
                    policy::Memory {
                        persistent_bytes: 0,
                        ephemeral_bytes: peak_bytes,
                    }
                };
                let boundaries = self.profiles.boundaries(tenant.id);
                scheduler.inform(tenant.id, memory, iterations, boundaries);
            }
        }
    }

    fn do_housekeeping(&mut self, now_ns: u64) {
        self.journal.tell_lost();
        self.allowances.forget_full(now_ns);
        if self.ledger.keep_promises(now_ns) {
            self.publish_terms();
        }
        self.turns.forget_old(now_ns);
        self.expire_parked(now_ns);
        self.answer_saved(now_ns);
        self.expire_greetings(now_ns);
        self.expire_resizes();
        if self.door.opens_again(now_ns)
            && let Err(error) = self.listen()
        {
            self.stop_accepting(&error, now_ns);
        }
        for id in self.clients.ids() {
            self.read_journal_of(id, now_ns);
            self.begin_period(id);
            if let Some(client) = self.clients.get(id) {
                client.pages.arbiter.beat(now_ns);
            }
        }
        self.answer_credits(now_ns);
        self.look_for_missing(now_ns);
        self.watch_again();
        self.read_accounts();
        self.look_after_dormant(now_ns);
        self.schedulers.form_gangs();
        self.look_for_offenders(now_ns);
        self.look_at_targets(now_ns);
        self.look_for_turnless();
        self.door.make_ready();
        self.survey_residency(now_ns);
        self.inform_supervisor();
        self.renewal.look(now_ns);
        self.settle_claims(now_ns);
        // A job that has not touched its device yet may still wonder who else is there.
        let watched = !self.clients.is_empty() || !self.ledger.is_empty();
        self.discovery.refresh(watched);
        if !self.ledger.is_empty() || !self.parked.is_empty() || !self.turns.is_empty() {
            self.lifetime.note_busy(now_ns);
        } else if let Some(after) = self.rulebook.options().idle_exit
            && now_ns >= self.lifetime.ends_idle_at(after)
        {
            tracing::info!("no job for {} s", after.as_secs());
            self.lifetime.end();
        }
    }
}

#[cfg(test)]
mod tests {
    use control::paths::RuntimeDir;

    use super::*;

    fn arbiter(place: &tempfile::TempDir) -> Arbiter {
        let dir = RuntimeDir::given(place.path().join("run")).expect("absolute");
        let uid = rustix::process::geteuid().as_raw();
        dir.ensure(uid).expect("a directory of our own");
        let options = Options {
            host_nvml: false,
            ..Options::new(dir)
        };
        Arbiter::start(options).expect("started")
    }

    #[test]
    fn a_second_in_which_the_arbiter_did_not_run_is_in_the_journal() {
        let place = tempfile::tempdir().expect("directory");
        let mut arbiter = arbiter(&place);
        arbiter.report_stall(STALL_NS - 1);
        arbiter.report_stall(20 * STALL_NS);
        let events = arbiter.journal.since(0, 0);
        let stalls: Vec<_> = events.iter().filter(|one| one.kind == "stalled").collect();
        let [stall] = stalls[..] else {
            panic!("not one: {stalls:?}");
        };
        assert_eq!(stall.fields["stalled_ms"], Value::from(20_000));
        assert!(stall.message.contains("20.0 s"), "{}", stall.message);
    }

    #[test]
    fn who_waits_over_http_hears_that_the_arbiter_ends() {
        use std::io::{Read as _, Write as _};
        let place = tempfile::tempdir().expect("directory");
        let mut arbiter = arbiter(&place);
        let path = arbiter.rulebook.options().dir.api_socket();
        let ask = |path: &std::path::Path| {
            let mut stream = std::os::unix::net::UnixStream::connect(path).expect("connected");
            let request = b"GET /v1/jobs HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
            stream.write_all(request).expect("sent");
            std::thread::spawn(move || {
                let mut answer = String::new();
                stream.read_to_string(&mut answer).expect("answered");
                answer
            })
        };
        let asked = [ask(&path), ask(&path)];
        // Both have their turns, and neither is answered.
        let deadline = std::time::Instant::now() + testbed::PATIENCE;
        let mut taken = 0;
        while taken < 2 {
            assert!(std::time::Instant::now() < deadline);
            arbiter.turns.on_desk(0);
            let turn = arbiter.turns.next(0);
            taken += usize::from(turn.is_some());
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        arbiter.finish();
        for asked in asked {
            let answer = testbed::join(asked);
            assert!(answer.starts_with("HTTP/1.1 503 "), "{answer}");
            assert!(answer.contains("the arbiter is ending"), "{answer}");
        }
    }

    #[test]
    fn a_failed_check_ends_one_step_of_the_loop_and_many_of_them_the_arbiter() {
        let place = tempfile::tempdir().expect("directory");
        let mut arbiter = arbiter(&place);
        for _ in 1..FAILURES {
            let sum = arbiter.contained(|arbiter| {
                let claimed = arbiter.persistence.epoch() | u64::MAX;
                claimed.checked_add(1).expect("a sum of what was claimed")
            });
            assert_eq!(sum, None);
            arbiter.on_failure().expect("it goes on");
            assert!(
                arbiter
                    .contained(|arbiter| arbiter.step().is_none() || arbiter.persistence.epoch() > 0)
                    .expect("served")
            );
        }
        let reported = arbiter.journal.since(0, 0);
        assert!(reported.iter().any(|event| event.kind == "failure"));
        let error = arbiter.on_failure().expect_err("too many");
        assert!(error.to_string().contains("again and again"), "{error}");
    }
}
