//! The daemon as a whole: what it owns, its one loop, and the life cycle of tenants and clients.

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;

use channel::arbiter::Listener;
use channel::{Bypass, MAX_DEVICES};
use control::JobStatus;
use control::paths::Source;
use policy::TenantId;
use serde_json::Value;

use crate::clock::{mono_ns, unix_ms};
use crate::control_server::{Ask, ControlServer};
use crate::convert;
use crate::devices::Devices;
use crate::dispatch::Lane;
use crate::journal::{Allowance, Journal};
use crate::ledger::Ledger;
use crate::nvml::Watcher;
use crate::options::Options;
use crate::peer::{self, Client, Greeting};
use crate::reactor::{Event, Interest, Poller};
use crate::state::{SavedClient, SavedTenant, State};
use crate::tenant::{Missing, Tenant};

/// How often the slow things are seen to: deadlines of strangers, journals, the file of the state.
const HOUSE_NS: u64 = 100_000_000;
/// How long pages of an earlier arbiter may take to turn up. TIMEOUT: clients try again every second or so.
pub(crate) const ADOPT_NS: u64 = 10_000_000_000;
/// Jobs that have ended and are still shown, and for how long.
const GONE_KEPT: usize = 64;
const GONE_MS: u64 = 600_000;

/// Why an arbiter did not start, or ended.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Somebody else holds the lock.
    #[error("an arbiter{} already serves {}: use it, or stop it with `sublet arbiter --stop` or SIGTERM first", pid.map_or_else(String::new, |pid| format!(" (process {pid})")), dir.display())]
    AlreadyRunning {
        /// The directory.
        dir: PathBuf,
        /// Its process, as it wrote down.
        pid: Option<u32>,
    },
    /// A system call failed.
    #[error("cannot {what}")]
    Io {
        /// At what.
        what: String,
        /// Why.
        source: io::Error,
    },
}

impl Error {
    fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io {
            what: what.into(),
            source,
        }
    }
}

/// Serves until SIGTERM, SIGINT, a request to shut down, or the end of an idle time. Every gate is left open.
///
/// # Errors
/// [`Error`]; nothing was served where the start failed.
pub fn run(options: Options) -> Result<(), Error> {
    use nix::sys::signal::{SigSet, Signal};
    use nix::sys::signalfd::{SfdFlags, SignalFd};
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGTERM);
    signals.add(Signal::SIGINT);
    let blocked = |errno: nix::Error| Error::io("take signals")(errno.into());
    // Before any thread is started, so that all of them have the signals blocked.
    signals.thread_block().map_err(blocked)?;
    let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
    let signalled = SignalFd::with_flags(&signals, flags).map_err(blocked)?;
    let arbiter = Arbiter::start(options)?;
    arbiter
        .poller
        .add(&signalled, Event::Stop, Interest::Read)
        .map_err(Error::io("wait for signals"))?;
    arbiter.serve()
}

/// Asks an [`Arbiter`] to end, from any thread.
#[derive(Clone, Debug)]
pub struct Stopper(Arc<OwnedFd>);

impl Stopper {
    /// Asks.
    pub fn stop(&self) {
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }
}

/// The daemon.
pub struct Arbiter {
    pub(crate) options: Options,
    pub(crate) poller: Poller,
    pub(crate) listener: Listener,
    pub(crate) control: ControlServer,
    pub(crate) watcher: Watcher,
    pub(crate) ledger: Ledger,
    pub(crate) devices: Devices,
    pub(crate) lanes: Vec<Lane>,
    lane_next_ns: Vec<Option<u64>>,
    /// Lanes to be stepped whatever the time.
    pub(crate) dirty: u32,
    pub(crate) clients: BTreeMap<u64, Client>,
    pub(crate) greetings: BTreeMap<u64, Greeting>,
    /// Registrations that wait for word of their driver's devices.
    pub(crate) parked: Vec<(Ask, u64)>,
    /// Drivers whose devices have been asked for; true: the answer is there.
    pub(crate) drivers: BTreeMap<Option<PathBuf>, bool>,
    /// With the time of their end.
    pub(crate) gone: VecDeque<(u64, JobStatus)>,
    pub(crate) journal: Journal,
    pub(crate) epoch: u64,
    pub(crate) next_id: u64,
    pub(crate) started_unix_ms: u64,
    pub(crate) state_is_old: bool,
    /// Log lines that strangers may still cause.
    strangers: Allowance,
    /// Listeners left alone until then, for want of descriptors.
    deaf_until_ns: Option<u64>,
    house_ns: u64,
    idle_since_ns: Option<u64>,
    watching: bool,
    pub(crate) stopping: bool,
    stop: Arc<OwnedFd>,
    _lock: File,
}

impl Arbiter {
    /// Takes the directory, reloads the state and listens. Clients can connect from here on; they are served by
    /// [`serve`](Self::serve).
    ///
    /// # Errors
    /// [`Error`]
    pub fn start(options: Options) -> Result<Self, Error> {
        let dir = options.dir.clone();
        let lock = lock(&options)?;
        raise_descriptor_limit();
        let poller = Poller::new().map_err(Error::io("make an epoll set"))?;
        let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
        let stop = rustix::event::eventfd(0, flags)
            .map_err(|errno| Error::io("make an eventfd")(errno.into()))?;
        let journal_path = dir.journal_file();
        let journal = Journal::open(&journal_path)
            .map_err(Error::io(format!("write {}", journal_path.display())))?;
        let (state, damage) = State::load(&dir.state_file());

        let path = dir.channel_socket();
        let listen = |path: &std::path::Path| format!("listen at {}", path.display());
        let listener = Listener::bind(&path).map_err(Error::io(listen(&path)))?;
        let _ = std::fs::remove_file(dir.control_socket());
        let path = dir.control_socket();
        let control = UnixListener::bind(&path)
            .and_then(ControlServer::new)
            .map_err(Error::io(listen(&path)))?;
        // The host's arbiter serves every user, who are told apart by SO_PEERCRED; any other serves its own.
        let mode = if dir.source() == Source::System {
            0o666
        } else {
            0o600
        };
        for path in [dir.channel_socket(), dir.control_socket()] {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode))
                .map_err(Error::io(format!("set the mode of {}", path.display())))?;
        }
        let watcher = Watcher::start().map_err(Error::io("start a thread"))?;

        let now_ns = mono_ns();
        let mut arbiter = Self {
            options,
            poller,
            listener,
            control,
            watcher,
            ledger: Ledger::default(),
            devices: Devices::default(),
            lanes: Vec::new(),
            lane_next_ns: Vec::new(),
            dirty: 0,
            clients: BTreeMap::new(),
            greetings: BTreeMap::new(),
            parked: Vec::new(),
            drivers: BTreeMap::new(),
            gone: VecDeque::new(),
            journal,
            epoch: state.epoch + 1,
            next_id: state.next_id.max(1),
            started_unix_ms: unix_ms(),
            state_is_old: true,
            strangers: Allowance::new(now_ns),
            deaf_until_ns: None,
            house_ns: now_ns,
            idle_since_ns: Some(now_ns),
            watching: false,
            stopping: false,
            stop: Arc::new(stop),
            _lock: lock,
        };
        let added = arbiter
            .poller
            .add(&arbiter.stop, Event::Stop, Interest::Read)
            .and_then(|()| {
                let bell = arbiter.watcher.bell();
                arbiter.poller.add(bell, Event::Devices, Interest::Read)
            })
            .and_then(|()| arbiter.listen(true));
        added.map_err(Error::io("wait for connections"))?;
        arbiter.journal.write(
            "start",
            "",
            format!(
                "arbiter {} serves {}",
                std::process::id(),
                dir.path().display()
            ),
            &[
                ("pid", Value::from(std::process::id())),
                ("epoch", Value::from(arbiter.epoch)),
            ],
        );
        if let Some(damage) = damage {
            let file = dir.state_file();
            tracing::warn!(
                "{} is of no use, jobs that run are not known: {damage}",
                file.display()
            );
        }
        if arbiter.options.host_nvml {
            arbiter.drivers.insert(None, false);
            arbiter.watcher.discover(None);
        }
        arbiter.restore(state, now_ns);
        arbiter.save_state();
        Ok(arbiter)
    }

    /// Something to end it with.
    pub fn stopper(&self) -> Stopper {
        Stopper(Arc::clone(&self.stop))
    }

    /// Serves until told to end.
    ///
    /// # Errors
    /// [`Error`], where waiting itself fails.
    pub fn serve(mut self) -> Result<(), Error> {
        // Timers of this thread are as exact as the hardware allows: a slice ends when it ends.
        let _ = rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1));
        let mut events = Vec::new();
        let mut deadline_ns = Some(mono_ns());
        while !self.stopping {
            self.poller
                .wait(deadline_ns, &mut events)
                .map_err(Error::io("wait for events"))?;
            for event in &events {
                self.on_event(*event);
            }
            deadline_ns = self.step();
        }
        self.finish();
        Ok(())
    }

    fn on_event(&mut self, event: Event) {
        let now_ns = mono_ns();
        match event {
            Event::Stop => self.stopping = true,
            Event::Doorbell(id) => self.on_doorbell(id),
            Event::ClientEnded(id) => self.on_client_ended(id),
            Event::ClientHungUp(id) => {
                if let Some(client) = self.clients.get_mut(&id) {
                    client.hung_up = true;
                    if let Some(socket) = &client.socket {
                        self.poller.remove(socket);
                    }
                }
            }
            Event::JobEnded(id) => {
                if let Some(tenant) = self.ledger.get_mut(TenantId(id)) {
                    tenant.process = None;
                    tenant.started_ticks = 0;
                    self.state_is_old = true;
                }
                self.bury_if_dead(TenantId(id));
            }
            Event::ChannelAccept => {
                if let Err(error) = self.accept_clients(now_ns) {
                    self.turn_deaf(&error, now_ns);
                }
            }
            Event::ControlAccept => {
                if let Err(error) = self.control.accept(now_ns, &self.poller) {
                    self.turn_deaf(&error, now_ns);
                }
            }
            Event::Greeting(id) => self.on_greeting(id, now_ns),
            Event::Control(id) => {
                let ask = self.control.on_event(id, now_ns, &self.poller);
                self.answer(ask);
            }
            Event::Devices => self.on_devices(),
        }
    }

    /// Steps the lanes that are due and sees to the house. Returns when to wake up at the latest.
    fn step(&mut self) -> Option<u64> {
        let now_ns = mono_ns();
        self.step_dirty_lanes();
        for at in 0..self.lanes.len() {
            if self.lane_next_ns[at].is_some_and(|next_ns| next_ns <= now_ns) {
                self.lane_next_ns[at] = self.lanes[at].step(mono_ns());
            }
        }
        if now_ns >= self.house_ns {
            self.keep_house(now_ns);
            self.house_ns = now_ns + HOUSE_NS;
        }
        // What changed in the house may open gates.
        self.step_dirty_lanes();
        if self.state_is_old {
            self.save_state();
        }
        let lanes = self.lane_next_ns.iter().copied().flatten().min();
        let quiet = self.clients.is_empty()
            && self.greetings.is_empty()
            && self.parked.is_empty()
            && self.control.is_empty()
            && self.ledger.is_empty()
            && self.deaf_until_ns.is_none()
            && !self.watching;
        let house = if !quiet {
            Some(self.house_ns)
        } else {
            let idle_exit = self.options.idle_exit;
            let since_ns = self.idle_since_ns;
            idle_exit.zip(since_ns).map(|(after, since_ns)| {
                since_ns.saturating_add(u64::try_from(after.as_nanos()).unwrap_or(u64::MAX))
            })
        };
        lanes.into_iter().chain(house).min()
    }

    /// Steps the lanes in which something has changed.
    pub(crate) fn step_dirty_lanes(&mut self) {
        let dirty = std::mem::take(&mut self.dirty);
        for at in (0..self.lanes.len()).filter(|at| dirty & (1 << at) != 0) {
            self.lane_next_ns[at] = self.lanes[at].step(mono_ns());
        }
    }

    fn keep_house(&mut self, now_ns: u64) {
        self.control.expire(now_ns);
        self.expire_parked(now_ns);
        self.expire_greetings(now_ns);
        if self
            .deaf_until_ns
            .is_some_and(|until_ns| until_ns <= now_ns)
        {
            self.deaf_until_ns = None;
            if let Err(error) = self.listen(true) {
                self.turn_deaf(&error, now_ns);
            }
        }
        let ids: Vec<u64> = self.clients.keys().copied().collect();
        for id in ids {
            self.read_journal_of(id, now_ns);
            self.unmute(id);
            if let Some(client) = self.clients.get(&id) {
                client.pages.arbiter.beat(now_ns);
            }
        }
        self.look_for_missing(now_ns);
        let watching = !self.clients.is_empty();
        if watching != self.watching {
            self.watching = watching;
            self.watcher.watch(watching);
        }
        if !self.ledger.is_empty() || !self.parked.is_empty() || !self.control.is_empty() {
            self.idle_since_ns = Some(now_ns);
        } else if let (Some(after), Some(since_ns)) = (self.options.idle_exit, self.idle_since_ns)
            && u128::from(now_ns.saturating_sub(since_ns)) >= after.as_nanos()
        {
            tracing::info!("no job for {} s", after.as_secs());
            self.stopping = true;
        }
    }
}

/// Coming, going, and what stays.
impl Arbiter {
    /// Takes the jobs of an earlier arbiter back, as far as something of them lives.
    fn restore(&mut self, state: State, now_ns: u64) {
        for saved in state.tenants {
            let Some(token) = convert::token_bytes(&saved.token) else {
                continue;
            };
            let id = TenantId(saved.id);
            self.next_id = self.next_id.max(saved.id + 1);
            let name = saved.job.name.clone();
            let spec = convert::spec(saved.job, name);
            let user = convert::user_name(saved.uid);
            let mut tenant = Tenant::new(id, spec, token, (saved.uid, user), now_ns);
            tenant.started_unix_ms = saved.started_unix_ms;
            tenant.oom_count = saved.oom_count;
            let pid = tenant.spec.pid;
            if saved.started_ticks != 0 && peer::started_ticks(pid) == Some(saved.started_ticks) {
                self.watch_job(&mut tenant, saved.started_ticks);
            }
            for client in saved.clients {
                if peer::started_ticks(client.pid) == Some(client.started_ticks)
                    && tenant.take_this_slot(client.slot)
                {
                    tenant.missing.push(Missing {
                        pid: client.pid,
                        started_ticks: client.started_ticks,
                        slot: client.slot,
                        journal_next: client.journal_next,
                    });
                }
            }
            tenant.adopt_until_ns = now_ns + ADOPT_NS;
            if tenant.lives() {
                let fields = [("missing", Value::from(tenant.missing.len()))];
                let message = format!("job `{}` goes on under this arbiter", tenant.spec.name);
                self.journal
                    .write("restored", &tenant.spec.name, message, &fields);
                if !tenant.spec.driver.as_os_str().is_empty() {
                    self.ask_for_devices(Some(tenant.spec.driver.clone()));
                }
                self.ledger.insert(tenant);
            }
        }
        self.publish_limits();
    }

    /// Waits for the end of the process that registered a job.
    pub(crate) fn watch_job(&mut self, tenant: &mut Tenant, started_ticks: u64) {
        let pid = i32::try_from(tenant.spec.pid)
            .ok()
            .and_then(rustix::process::Pid::from_raw);
        let flags = rustix::process::PidfdFlags::empty();
        let process = pid.and_then(|pid| rustix::process::pidfd_open(pid, flags).ok());
        // Looked at after the descriptor was opened: if this is the same process, the descriptor is its.
        let same = peer::started_ticks(tenant.spec.pid) == Some(started_ticks);
        if let Some(process) = process.filter(|_| same)
            && self
                .poller
                .add(&process, Event::JobEnded(tenant.id.0), Interest::Read)
                .is_ok()
        {
            tenant.process = Some(process);
            tenant.started_ticks = started_ticks;
        }
    }

    /// Lets a job go of which nothing lives any more.
    pub(crate) fn bury_if_dead(&mut self, id: TenantId) {
        if self.ledger.get(id).is_none_or(Tenant::lives) {
            return;
        }
        let status = self.status_of(id);
        let now_ns = mono_ns();
        for lane in &mut self.lanes {
            lane.retire(now_ns, id);
        }
        let Some(tenant) = self.ledger.remove(id) else {
            return;
        };
        let fields = status.as_ref().map_or(Vec::new(), |status| {
            vec![
                ("device_time_ns", Value::from(status.device_time_ns)),
                ("mem_peak_bytes", Value::from(status.mem_peak_bytes)),
                ("launches", Value::from(status.launches)),
            ]
        });
        let message = format!("job `{}` has ended", tenant.spec.name);
        self.journal
            .write("ended", &tenant.spec.name, message, &fields);
        if let Some(mut status) = status {
            status.state = control::JobState::Gone;
            status.holding = false;
            status.mem_used_bytes = 0;
            status.unattributed_bytes = 0;
            for device in &mut status.devices {
                device.holding = false;
                device.mem_used_bytes = 0;
                device.unattributed_bytes = 0;
            }
            let now_ms = unix_ms();
            self.gone.push_back((now_ms, status));
            while self.gone.len() > GONE_KEPT
                || self
                    .gone
                    .front()
                    .is_some_and(|(at, _)| at + GONE_MS < now_ms)
            {
                self.gone.pop_front();
            }
        }
        self.publish_terms();
        self.state_is_old = true;
    }

    pub(crate) fn save_state(&mut self) {
        self.state_is_old = false;
        let tenants = self.ledger.iter().map(|tenant| SavedTenant {
            id: tenant.id.0,
            token: convert::token_text(&tenant.token),
            uid: tenant.uid,
            job: convert::job_spec(&tenant.spec),
            started_ticks: tenant.started_ticks,
            started_unix_ms: tenant.started_unix_ms,
            oom_count: tenant.oom_count,
            clients: self.saved_clients(tenant),
        });
        let mut state = State {
            epoch: self.epoch,
            next_id: self.next_id,
            tenants: tenants.collect(),
            ..State::default()
        };
        let path = self.options.dir.state_file();
        if let Err(error) = state.save(&path) {
            tracing::error!(
                "{} cannot be written, a restarted arbiter will not know its jobs: {error}",
                path.display()
            );
        }
    }

    fn saved_clients(&self, tenant: &Tenant) -> Vec<SavedClient> {
        let attached = tenant.clients.iter().filter_map(|id| self.clients.get(id));
        let attached = attached.map(|client| SavedClient {
            pid: client.pid,
            started_ticks: client.started_ticks,
            slot: client.slot,
            journal_next: client.journal_next,
        });
        let missing = tenant.missing.iter().map(|client| SavedClient {
            pid: client.pid,
            started_ticks: client.started_ticks,
            slot: client.slot,
            journal_next: client.journal_next,
        });
        attached.chain(missing).collect()
    }

    /// Leaves: gates open, sockets gone, state kept for a successor.
    fn finish(&mut self) {
        for lane in &mut self.lanes {
            lane.open_all();
        }
        let now_ns = mono_ns();
        let ids: Vec<u64> = self.clients.keys().copied().collect();
        for id in ids {
            self.read_journal_of(id, now_ns);
        }
        self.control.flush_all();
        let pid = Value::from(std::process::id());
        let message = format!("arbiter {} ends", std::process::id());
        self.journal.write("stop", "", message, &[("pid", pid)]);
        self.save_state();
        let dir = &self.options.dir;
        for path in [dir.channel_socket(), dir.control_socket()] {
            let _ = std::fs::remove_file(path);
        }
    }

    /// Begins or ceases to listen.
    fn listen(&self, on: bool) -> io::Result<()> {
        if on {
            self.poller
                .add(&self.listener, Event::ChannelAccept, Interest::Read)?;
            let listener = self.control.listener();
            self.poller
                .add(listener, Event::ControlAccept, Interest::Read)
        } else {
            self.poller.remove(&self.listener);
            self.poller.remove(self.control.listener());
            Ok(())
        }
    }

    /// Out of descriptors or memory: whoever waits goes on waiting, instead of waking us without end.
    fn turn_deaf(&mut self, error: &io::Error, now_ns: u64) {
        tracing::error!("cannot accept connections for now: {error}");
        let _ = self.listen(false);
        self.deaf_until_ns = Some(now_ns + HOUSE_NS);
    }

    /// Tells about a peer that is not (yet) a client; not as often as it likes.
    pub(crate) fn warn_of_stranger(&mut self, text: &str) {
        match self.strangers.spend(mono_ns()) {
            Some(0) => tracing::warn!("{text}"),
            Some(left_out) => tracing::warn!("{text} ({left_out} such lines left out before)"),
            None => {}
        }
    }

    /// The lane of a device, made where it is new.
    pub(crate) fn make_lanes(&mut self) {
        for index in self.lanes.len()..self.devices.iter().count() {
            let rule = self.rule_of(index);
            let (pace, mode) = (self.options.pace(rule), Options::mode(rule));
            let device = self.devices.get(index);
            let total = device.map_or(0, |device| device.total_bytes);
            let reserve = rule.and_then(|rule| rule.mem_reserve);
            self.ledger.reserved[index] = reserve.map_or(0, |reserve| reserve.resolve(total));
            if let Some(device) = device {
                tracing::info!(
                    "device {index}: {} {}, {}",
                    convert::uuid_text(&device.uuid),
                    device.name,
                    control::short_bytes(total)
                );
            }
            self.lanes.push(Lane::new(index, mode, pace, mono_ns()));
            self.lane_next_ns.push(None);
        }
    }

    fn rule_of(&self, index: usize) -> Option<&crate::options::DeviceRule> {
        let simulated = self.devices.get(index)?.simulated;
        self.options.devices.iter().find(|rule| {
            let selector = rule.device.as_ref();
            selector.is_none_or(|selector| self.devices.answers(index, selector, simulated))
        })
    }

    /// Shares have changed: tells the lanes.
    pub(crate) fn publish_terms(&mut self) {
        for (index, lane) in self.lanes.iter_mut().enumerate() {
            for (tenant, terms) in self.ledger.terms(&self.devices, index) {
                lane.set_terms(tenant, terms);
            }
        }
        self.dirty = u32::MAX;
    }

    /// Limits or devices have changed: tells the clients.
    pub(crate) fn publish_limits(&mut self) {
        for index in 0..MAX_DEVICES {
            let limits: Vec<(TenantId, Option<u64>)> = self
                .ledger
                .iter()
                .map(|t| (t.id, self.ledger.limit_bytes(&t.spec, &self.devices, index)))
                .collect();
            for (id, limit) in limits {
                if let Some(tenant) = self.ledger.get_mut(id) {
                    tenant.limits[index] = limit;
                }
            }
        }
        for client in self.clients.values() {
            self.publish_to(client);
        }
    }

    /// Limits and physical memory, to one client.
    pub(crate) fn publish_to(&self, client: &Client) {
        let Some(tenant) = self.ledger.get(client.tenant) else {
            return;
        };
        for (index, device) in self.devices.iter() {
            let half = &client.pages.arbiter;
            half.set_limit(index, tenant.limits[index]);
            // A client is never told more than its own driver knows of; what it claims changes nothing for the others.
            let total = match client.totals[index] {
                0 => device.total_bytes,
                claimed => device.total_bytes.min(claimed),
            };
            let free = device.free_bytes.map(|free| free.min(total));
            half.set_physical(index, total, free);
        }
    }

    /// Attaches a client's gates to the lanes of its devices.
    pub(crate) fn enter_lanes(&mut self, id: u64, now_ns: u64) {
        let Some(client) = self.clients.get(&id) else {
            return;
        };
        let (tenant, pages) = (client.tenant, Rc::clone(&client.pages));
        for index in client.device_indices() {
            let terms = self.ledger.terms(&self.devices, index);
            let terms = terms.iter().find(|(id, _)| *id == tenant);
            if let (Some((_, terms)), Some(lane)) = (terms, self.lanes.get_mut(index)) {
                lane.add(now_ns, tenant, *terms, id, Rc::clone(&pages));
                self.dirty |= 1 << index;
            }
        }
    }

    /// A client is gone: its memory is free, its gates are no more, and whoever waits goes on.
    pub(crate) fn drop_client(&mut self, id: u64, now_ns: u64) -> Option<(Client, u64)> {
        self.read_journal_of(id, now_ns);
        let client = self.clients.remove(&id)?;
        // The other process holds the same eventfd; closing ours would not take it out of the set.
        self.poller.remove(client.pages.doorbell());
        for index in client.device_indices() {
            if let Some(lane) = self.lanes.get_mut(index) {
                lane.remove(now_ns, id);
                self.dirty |= 1 << index;
            }
        }
        let mut held = 0;
        if let Some(tenant) = self.ledger.get_mut(client.tenant) {
            tenant.clients.retain(|other| *other != id);
            tenant.launches_gone = tenant
                .launches_gone
                .wrapping_add(client.pages.client.launches());
            held = tenant.clear_slot(client.slot);
        }
        self.state_is_old = true;
        Some((client, held))
    }

    /// Puts what a client tells into the journal.
    pub(crate) fn read_journal_of(&mut self, id: u64, now_ns: u64) {
        let Some(client) = self.clients.get_mut(&id) else {
            return;
        };
        let Some(tenant) = self.ledger.get_mut(client.tenant) else {
            return;
        };
        let (before, mut records) = (client.journal_next, Vec::new());
        let pages = Rc::clone(&client.pages);
        let missed = pages
            .client
            .read_records(&mut client.journal_next, |record| records.push(record));
        if client.journal_next == before {
            return;
        }
        self.state_is_old = true;
        let (job, pid) = (tenant.spec.name.clone(), client.pid);
        for record in records {
            if let Ok(channel::Record {
                event: channel::Event::OverLimit { .. },
                ..
            }) = record
            {
                tenant.oom_count += 1;
            }
            let Some(left_out) = tenant.allowance.spend(now_ns) else {
                continue;
            };
            let (kind, message, mut fields) = describe(&job, record);
            fields.push(("pid", Value::from(pid)));
            if left_out > 0 {
                fields.push(("left_out", Value::from(left_out)));
            }
            self.journal.write(kind, &job, message, &fields);
        }
        if missed > 0 && tenant.allowance.spend(now_ns).is_some() {
            let message = format!("{missed} events of process {pid} were overwritten unread");
            self.journal
                .write("missed", &job, message, &[("missed", Value::from(missed))]);
        }
    }
}

type Described = (&'static str, String, Vec<(&'static str, Value)>);

fn describe(job: &str, record: Result<channel::Record, channel::BadRecord>) -> Described {
    use channel::Event as Told;
    let record = match record {
        Ok(record) => record,
        Err(bad) => return ("bad_record", format!("job `{job}`: {bad}"), Vec::new()),
    };
    let mut fields = vec![("device", Value::from(record.device))];
    match record.event {
        Told::OverLimit {
            limit_bytes,
            used_bytes,
            requested_bytes,
        } => {
            fields.extend([
                ("limit_bytes", Value::from(limit_bytes)),
                ("used_bytes", Value::from(used_bytes)),
                ("requested_bytes", Value::from(requested_bytes)),
            ]);
            let [limit, used, requested] =
                [limit_bytes, used_bytes, requested_bytes].map(control::short_bytes);
            let message = format!(
                "job `{job}` is out of memory on device {}: {requested} requested with {used} of {limit} used",
                record.device
            );
            ("oom", message, fields)
        }
        Told::Bypassing { reason } => {
            let reason = match reason {
                Bypass::ArbiterLost => "the arbiter was lost",
                Bypass::GateStuck => "its gate stayed closed past every deadline",
                Bypass::NoMarks => "the driver gives no way to follow completion",
            };
            fields.push(("reason", Value::from(reason)));
            let message = format!("job `{job}` submits without grants: {reason}");
            ("bypass", message, fields)
        }
        Told::Reattached { gap_ns } => {
            fields.push(("gap_ns", Value::from(gap_ns)));
            let message = format!(
                "job `{job}` was without an arbiter for {} ms",
                gap_ns / 1_000_000
            );
            ("gap", message, fields)
        }
    }
}

/// Takes the lock of the directory, which the kernel gives back when this process ends, however it does.
fn lock(options: &Options) -> Result<File, Error> {
    let path = options.dir.lock_file();
    let what = format!("take {}", path.display());
    let mut file = std::fs::OpenOptions::new()
        .create(true)
        .truncate(false)
        .read(true)
        .write(true)
        .mode(0o600)
        .open(&path)
        .map_err(Error::io(what.clone()))?;
    let operation = rustix::fs::FlockOperation::NonBlockingLockExclusive;
    match rustix::fs::flock(&file, operation) {
        Ok(()) => {}
        Err(rustix::io::Errno::WOULDBLOCK) => {
            let pid = std::fs::read_to_string(&path).unwrap_or_default();
            return Err(Error::AlreadyRunning {
                dir: options.dir.path().to_owned(),
                pid: pid.trim().parse().ok(),
            });
        }
        Err(errno) => return Err(Error::io(what)(errno.into())),
    }
    file.set_len(0)
        .and_then(|()| writeln!(file, "{}", std::process::id()))
        .map_err(Error::io(what))?;
    Ok(file)
}

/// A client takes four descriptors; the usual soft limit of 1024 would end at some 200 of them.
fn raise_descriptor_limit() {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    let _ = setrlimit(Resource::Nofile, limit);
}
