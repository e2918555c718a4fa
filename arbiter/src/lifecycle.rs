//! Coming, going, and what stays: jobs and clients from their first to their last, what is
//! published to them meanwhile, and what a successor of this process will find.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;

use channel::arbiter::TenantMemory;
use channel::{Accounts, Bypass, MAX_DEVICES};
use control::DeviceSelector;
use policy::TenantId;
use serde_json::Value;

use crate::census::Process;
use crate::clients::{Client, Records};
use crate::convert;
use crate::dispatch::DeviceScheduler;
use crate::journal::About;
use crate::peer;
use crate::reactor::{Event, Interest, Poller};
use crate::rulebook::is_this;
use crate::serve::{ADOPT_NS, Arbiter};
use crate::state::{SavedClient, SavedProcess, SavedTenant, SavedTurn, State};
use crate::tenant::{Missing, Tenant};

impl Arbiter {
    /// Takes the jobs of an earlier arbiter back, as far as something of them lives.
    /// `pages`: those of jobs, as far as a service manager has kept them.
    pub(crate) fn restore(&mut self, state: State, mut pages: BTreeMap<u64, OwnedFd>, now_ns: u64) {
        for saved in state.devices {
            self.rulebook.restore(saved);
        }
        for saved in state.tenants {
            let Some(token) = convert::token_bytes(&saved.token) else {
                continue;
            };
            let id = TenantId(saved.id);
            self.persistence.has_id(saved.id);
            let name = saved.job.name.clone();
            let spec = convert::spec(saved.job, name, self.clock.unix_ms());
            self.names.ask(saved.uid, now_ns);
            let mut user = self.names.of(saved.uid).to_owned();
            if user.is_empty() {
                user = saved.user;
            }
            let mut tenant = Tenant::new(id, spec, token, (saved.uid, user), &self.clock);
            tenant.identity = saved.identity;
            tenant.container = saved.container;
            tenant.registered_in = saved.registered_in;
            tenant.spec.unbound = saved.unbound;
            tenant.started_unix_ms = saved.started_unix_ms;
            // Whether it ever came is not known, and what it was promised stays so.
            tenant.has_attached = true;
            tenant.oom_count = saved.oom_count;
            tenant.oom_largest_bytes = saved.oom_largest_bytes;
            tenant.oom_limit_bytes = saved.oom_limit_bytes;
            let pid = tenant.spec.pid;
            if saved.started_ticks != 0 && peer::is_alive(pid, saved.started_ticks).unwrap_or(true)
            {
                // What lives of it is counted where this fails.
                let _ = self.watch_job(&mut tenant, saved.started_ticks);
            }
            tenant.since_ticks = saved.since_ticks;
            tenant.session = saved.session;
            let members = saved.members.iter().map(|member| Process {
                pid: member.pid,
                started_ticks: member.started_ticks,
            });
            tenant.members = members.collect();
            let joined = saved.joined.iter().map(|joined| Process {
                pid: joined.pid,
                started_ticks: joined.started_ticks,
            });
            tenant.joined = joined.collect();
            for client in saved.clients {
                if peer::is_alive(client.pid, client.started_ticks).unwrap_or(true)
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
            // With it, processes that do nothing at present are known before they come again.
            match pages.remove(&saved.id).map(TenantMemory::adopt) {
                Some(Ok(memory)) => {
                    self.supervisor.has_kept(saved.id, memory.number());
                    tenant.accounts = Accounts::adopting(&memory.page);
                    tenant.memory = Some(memory);
                }
                Some(Err(error)) => tracing::warn!(
                    "the page of job `{}` that was kept is of no use: {error}",
                    tenant.spec.name
                ),
                None => {}
            }
            self.journal.note_owner(tenant.id.0, tenant.uid);
            self.ledger.insert(tenant);
            self.resume_turn(id, saved.turn.as_ref());
            // Those that have joined stand for it as well.
            self.watch_next(id);
            self.end_without_engine(id);
            self.go_on_with(id, saved.dormant_unix_ms);
        }
        // Of jobs that nobody knows any more.
        for (id, page) in pages {
            if let Ok(memory) = TenantMemory::adopt(page) {
                self.supervisor.has_kept(id, memory.number());
            }
        }
        // The rules may be others than those that the jobs began with.
        self.apply_rules(false);
    }

    /// Goes on with a job of an earlier arbiter, or has what is left of it counted.
    /// `dormant_unix_ms`: since when it sleeps, 0 for one that did not.
    fn go_on_with(&mut self, id: TenantId, dormant_unix_ms: u64) {
        let Some(tenant) = self.ledger.get(id) else {
            return;
        };
        if tenant.lives() {
            let fields = [("missing", Value::from(tenant.missing.len()))];
            let message = format!("job `{}` goes on under this arbiter", tenant.spec.name);
            self.journal
                .write("restored", tenant.about(), message, &fields);
            if !tenant.spec.driver.as_os_str().is_empty() {
                self.discovery.ask(Some(tenant.spec.driver.clone()));
            }
            return;
        }
        // Processes of it may live that have not come for a device yet, or not again.
        self.fall_asleep(id);
        let dormant = self.ledger.get_mut(id).and_then(|t| t.dormant.as_mut());
        if let Some(dormant) = dormant.filter(|_| dormant_unix_ms != 0) {
            let slept_ms = self.clock.unix_ms().saturating_sub(dormant_unix_ms);
            dormant.since_unix_ms = dormant_unix_ms;
            dormant.since_ns = dormant.since_ns.saturating_sub(slept_ms * 1_000_000);
        }
    }

    /// The service manager is shown how things stand, and given the pages of jobs to keep for a
    /// successor: a process that does nothing does not bring its own.
    pub(crate) fn inform_supervisor(&mut self) {
        let (jobs, processes) = (self.ledger.iter().count(), self.clients.ids().len());
        let devices = self.devices.iter().count();
        self.supervisor
            .show(|| format!("jobs: {jobs}, attached processes: {processes}, devices: {devices}"));
        let pages = self.ledger.iter().filter_map(|tenant| {
            let memory = tenant.memory.as_ref()?;
            Some((tenant.id.0, memory.number(), memory.file()))
        });
        self.supervisor.keep(pages);
    }

    /// Waits for the end of the process that registered a job.
    ///
    /// # Errors
    /// It cannot be watched. That it has ended is no error.
    pub(crate) fn watch_job(&mut self, tenant: &mut Tenant, started_ticks: u64) -> io::Result<()> {
        watch(&self.poller, tenant, started_ticks)
    }

    /// The same of a job in the ledger, for another process than so far.
    ///
    /// # Errors
    /// As [`Self::watch_job`].
    pub(crate) fn watch_launcher(&mut self, id: TenantId, process: Process) -> io::Result<()> {
        let Some(tenant) = self.ledger.get_mut(id) else {
            return Ok(());
        };
        tenant.spec.pid = process.pid;
        watch(&self.poller, tenant, process.started_ticks)
    }

    /// Where nothing of a job is attached and its launcher is gone, it goes as soon as none of its
    /// processes lives.
    pub(crate) fn reap_if_dead(&mut self, id: TenantId) {
        if !self.ledger.get(id).is_none_or(Tenant::lives) {
            self.fall_asleep(id);
        }
    }

    /// Lets a job go; `why` where processes of it may live, empty where none does.
    pub(crate) fn reap(&mut self, id: TenantId, why: &str) {
        let status = self.status_of(id);
        let now_ns = self.clock.mono_ns();
        for scheduler in self.schedulers.iter_mut() {
            scheduler.retire(now_ns, id);
        }
        let Some(tenant) = self.ledger.remove(id) else {
            return;
        };
        // At once: another arbiter may wait for the device, and not for long.
        self.claims.note_change();
        self.settle_claims(now_ns);
        let fields = status.as_ref().map_or(Vec::new(), |status| {
            vec![
                ("device_time_ns", Value::from(status.device_time_ns)),
                ("mem_peak_bytes", Value::from(status.mem_peak_bytes)),
                ("launches", Value::from(status.launches)),
            ]
        });
        let message = match why {
            "" => format!("job `{}` has ended", tenant.spec.name),
            why => format!(
                "job `{}` is forgotten with {} living processes, which may use no device from here on: {why}",
                tenant.spec.name,
                tenant.members.len()
            ),
        };
        self.journal
            .write("ended", tenant.about(), message, &fields);
        self.leave_group(id, &tenant.spec.name);
        if let Some(mut status) = status {
            convert::at_rest(&mut status, control::JobState::Gone);
            status.dormant_processes = None;
            self.ended.add(self.clock.unix_ms(), status);
        }
        self.publish_terms();
        self.persistence.mark_old();
    }

    /// Has the state written where that is due. Returns when it is to be looked at again.
    pub(crate) fn save_soon(&mut self, now_ns: u64) -> Option<u64> {
        let is_waited_for = || self.ledger.iter().any(|tenant| tenant.saved_as == 0);
        let due_ns = self.persistence.due_ns(is_waited_for)?;
        if now_ns < due_ns {
            return Some(due_ns);
        }
        self.save_state();
        let took_ns = self.clock.mono_ns().saturating_sub(now_ns);
        self.persistence.rest(now_ns, took_ns);
        None
    }

    /// Has what a successor needs to know written, beside the loop.
    pub(crate) fn save_state(&mut self) {
        let number = self.persistence.save(self.state());
        for tenant in self.ledger.iter_mut().filter(|t| t.saved_as == 0) {
            tenant.saved_as = number;
        }
    }

    /// What a successor needs to know.
    pub(crate) fn state(&self) -> State {
        let tenants = self.ledger.iter().map(|tenant| SavedTenant {
            id: tenant.id.0,
            token: convert::token_text(&tenant.token),
            uid: tenant.uid,
            job: convert::job_spec(&tenant.spec),
            started_ticks: tenant.started_ticks,
            started_unix_ms: tenant.started_unix_ms,
            oom_count: tenant.oom_count,
            oom_largest_bytes: tenant.oom_largest_bytes,
            oom_limit_bytes: tenant.oom_limit_bytes,
            clients: self.saved_clients(tenant),
            since_ticks: tenant.since_ticks,
            session: tenant.session,
            members: saved_processes(&tenant.members),
            joined: saved_processes(&tenant.joined),
            dormant_unix_ms: tenant.dormant.as_ref().map_or(0, |one| one.since_unix_ms),
            user: tenant.user.clone(),
            identity: tenant.identity.clone(),
            container: tenant.container.clone(),
            registered_in: tenant.registered_in.clone(),
            unbound: tenant.spec.unbound,
            turn: self.saved_turn(tenant),
        });
        State {
            tenants: tenants.collect(),
            baselines: self.profiles.saved(),
            devices: self.rulebook.saved(),
            ..self.persistence.numbers()
        }
    }

    fn saved_turn(&self, tenant: &Tenant) -> Option<SavedTurn> {
        let ((_, name), group) = self.groups.of(tenant.id)?;
        Some(SavedTurn {
            group: name.clone(),
            holds: group.holder() == Some(tenant.id),
            was_last: group.last == Some(tenant.id),
            is_away: tenant.turn.is_away,
        })
    }

    fn saved_clients(&self, tenant: &Tenant) -> Vec<SavedClient> {
        let attached = tenant.clients.iter().filter_map(|id| self.clients.get(*id));
        let attached = attached.map(|client| SavedClient {
            pid: client.pid,
            started_ticks: client.started_ticks,
            slot: client.slot,
            journal_next: client.journal_next(),
        });
        let missing = tenant.missing.iter().map(|client| SavedClient {
            pid: client.pid,
            started_ticks: client.started_ticks,
            slot: client.slot,
            journal_next: client.journal_next,
        });
        attached.chain(missing).collect()
    }

    /// Leaves: gates open, sockets gone unless they are a service manager's, state kept for a
    /// successor.
    pub(crate) fn finish(&mut self) {
        self.supervisor.stops();
        self.inform_supervisor();
        self.schedulers.open_all();
        let now_ns = self.clock.mono_ns();
        for id in self.clients.ids() {
            self.read_journal_of(id, now_ns);
        }
        // Who waits hears so from a thread that is there until it is closed.
        self.turns.close();
        self.api.close();
        let pid = Value::from(std::process::id());
        let message = format!("arbiter {} ends", std::process::id());
        self.journal
            .write("stop", About::NONE, message, &[("pid", pid)]);
        self.save_state();
        // What a disk has not taken by then is lost, as on a full disk.
        self.journal.settle(crate::writer::IN_THE_END);
        self.persistence.settle(crate::writer::IN_THE_END);
        if let Some(renewed) = self.renewal.end() {
            self.renewal.move_to(renewed.premises);
        }
        // Those that another arbiter has bound meanwhile are not its own.
        for path in self.rulebook.options().dir.sockets() {
            if !self.supervisor.keeps_socket(&path) {
                self.renewal.premises().remove(&path);
            }
        }
    }

    /// Begins to listen.
    pub(crate) fn listen(&self) -> io::Result<()> {
        self.door.listen(&self.poller)
    }

    /// Out of descriptors or memory: peers that wait go on waiting, instead of waking us without
    /// end.
    pub(crate) fn stop_accepting(&mut self, error: &io::Error, now_ns: u64) {
        tracing::error!("cannot accept connections for now: {error}");
        self.door.close(now_ns, &self.poller);
    }

    /// Tells about a peer that is not (yet) a client; not as often as it likes.
    pub(crate) fn warn_of_stranger(&mut self, text: &str) {
        match self.allowances.stranger(self.clock.mono_ns()) {
            Some(0) => tracing::warn!("{text}"),
            Some(left_out) => tracing::warn!("{text} ({left_out} such lines left out before)"),
            None => {}
        }
    }

    /// The scheduler of a device, made where it is new.
    pub(crate) fn make_schedulers(&mut self) {
        for index in self.schedulers.len()..self.devices.iter().count() {
            self.reserve_memory(index);
            let setup = self.setup_of(index);
            let chosen = self.rulebook.policy(&self.devices, index);
            let device = self.devices.get(index);
            let total = device.map_or(0, |device| device.total_bytes);
            if let Some(device) = device {
                tracing::info!(
                    "device {index}: {} {}, {}",
                    convert::uuid_text(&device.uuid),
                    device.name,
                    control::short_bytes(total)
                );
            }
            let scheduler = DeviceScheduler::new(index, setup, self.clock.mono_ns());
            self.schedulers.push(scheduler, chosen);
            self.set_up_residency_of(index);
        }
    }

    /// Devices that may give their place to others, as bits; none while places are free. Those are
    /// not there by NVML's word, no process uses or ever used one of a job that still has some, and
    /// neither a job nor a rule names them.
    pub(crate) fn free_devices(&self) -> u32 {
        if !self.devices.is_full() {
            return 0;
        }
        let used_by_clients = self.clients.devices();
        let free = self.devices.iter().filter(|(index, device)| {
            let named = |selector: &DeviceSelector| is_this(selector, &device.uuid);
            let used = |tenant: &Tenant| {
                let scheduler = self.schedulers.get(*index);
                let has_some = !tenant.clients.is_empty() || !tenant.missing.is_empty();
                tenant.spec.settings.devices().iter().any(named)
                    || (has_some
                        && scheduler.is_some_and(|scheduler| scheduler.usage(tenant.id).is_some()))
                    || tenant.used_bytes(*index) > 0
            };
            !device.present
                && !self.rulebook.names(&device.uuid)
                && used_by_clients & (1 << index) == 0
                && !self.ledger.iter().any(used)
        });
        free.fold(0, |bits, (index, _)| bits | 1 << index)
    }

    /// Another device has the place of one that nobody uses any more.
    pub(crate) fn remake_scheduler(&mut self, index: usize) {
        let now_ns = self.clock.mono_ns();
        if index >= self.schedulers.len() {
            return;
        }
        self.reserve_memory(index);
        let setup = self.setup_of(index);
        let chosen = self.rulebook.policy(&self.devices, index);
        let scheduler = DeviceScheduler::new(index, setup, now_ns);
        self.schedulers.replace(index, scheduler, chosen);
        self.capacity.forget_device(index);
        self.set_up_residency_of(index);
        let uuid = self.devices.get(index).map(|device| device.uuid);
        if let Some(uuid) = uuid {
            let text = convert::uuid_text(&uuid);
            tracing::info!("device {index}: {text}, in the place of one that nobody uses");
        }
        self.schedulers.form_gangs();
        self.schedulers.mark(1 << index);
    }

    /// Keeps memory of a device from all quotas, as its rule says.
    pub(crate) fn reserve_memory(&mut self, index: usize) {
        let total = self
            .devices
            .get(index)
            .map_or(0, |device| device.total_bytes);
        let reserve = self
            .rulebook
            .rule(&self.devices, index)
            .and_then(|rule| rule.settings.mem_reserve);
        let reserved = reserve.map_or(0, |reserve| reserve.resolve(total));
        self.ledger.reserve(index, reserved);
    }

    /// Shares have changed: passes them to the device schedulers.
    pub(crate) fn publish_terms(&mut self) {
        for (index, scheduler) in self.schedulers.iter_mut().enumerate() {
            for (tenant, terms) in self.ledger.terms(&self.devices, index, &self.clock) {
                scheduler.set_terms(tenant, terms);
            }
        }
        self.schedulers.form_gangs();
        self.schedulers.mark(u32::MAX);
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
        for (_, client) in self.clients.iter() {
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
            // A client never sees more than its own driver knows of; what it claims changes nothing
            // for the others.
            let total = match client.totals[index] {
                0 => device.total_bytes,
                claimed => device.total_bytes.min(claimed),
            };
            let free = device.free_bytes.map(|free| free.min(total));
            half.set_physical(index, total, free);
        }
    }

    /// Attaches a client's gates to the schedulers of its devices.
    pub(crate) fn enter_schedulers(&mut self, id: u64, now_ns: u64) {
        let Some(client) = self.clients.get(id) else {
            return;
        };
        let (tenant, pages) = (client.tenant, Rc::clone(&client.pages));
        for index in client.device_indices() {
            let terms = self.ledger.terms(&self.devices, index, &self.clock);
            let terms = terms.iter().find(|(id, _)| *id == tenant);
            if let (Some((_, terms)), Some(scheduler)) = (terms, self.schedulers.get_mut(index)) {
                scheduler.add(now_ns, tenant, *terms, id, Rc::clone(&pages));
                // A job that was dormant goes on with its account.
                let before = self.ledger.get_mut(tenant).and_then(|tenant| {
                    let at = tenant.usages.iter().position(|(at, _)| *at == index)?;
                    Some(tenant.usages.swap_remove(at).1)
                });
                if let Some(usage) = before {
                    scheduler.carry_over(tenant, usage);
                }
                self.schedulers.mark(1 << index);
            }
        }
        self.schedulers.form_gangs();
    }

    /// A client is gone: its memory is free, its gates are no more, and tenants that wait go on.
    pub(crate) fn drop_client(&mut self, id: u64, now_ns: u64) -> Option<(Client, u64)> {
        self.read_journal_of(id, now_ns);
        let client = self.clients.remove(id, &self.poller)?;
        for index in client.device_indices() {
            if let Some(scheduler) = self.schedulers.get_mut(index) {
                scheduler.remove(now_ns, id);
                self.schedulers.mark(1 << index);
            }
        }
        self.schedulers.form_gangs();
        let mut held = 0;
        if let Some(tenant) = self.ledger.get_mut(client.tenant) {
            tenant.clients.retain(|other| *other != id);
            tenant.launches_gone = tenant.launches_gone.saturating_add(client.launches());
            held = tenant.clear_slot(client.slot);
        }
        self.persistence.mark_old();
        Some((client, held))
    }

    /// Puts what a client tells into the journal.
    pub(crate) fn read_journal_of(&mut self, id: u64, now_ns: u64) {
        let Some(client) = self.clients.get_mut(id) else {
            return;
        };
        let Some(tenant) = self.ledger.get_mut(client.tenant) else {
            return;
        };
        let Some(Records { records, missed }) = client.read_records() else {
            return;
        };
        self.persistence.mark_old();
        let (job, pid) = (tenant.spec.name.clone(), client.pid);
        let about = About::job(&job, tenant.id.0);
        let mut newly_ungoverned = Vec::new();
        let mut contexts = Vec::new();
        for record in records {
            if let Ok(channel::Record {
                device,
                event:
                    channel::Event::NoSpace {
                        most_bytes,
                        context: true,
                        ..
                    },
            }) = record
            {
                contexts.push((device, most_bytes));
            }
            if let Ok(channel::Record {
                event:
                    channel::Event::OverLimit {
                        limit_bytes,
                        requested_bytes,
                        ..
                    },
                ..
            }) = record
            {
                tenant.oom_count += 1;
                if requested_bytes >= tenant.oom_largest_bytes {
                    tenant.oom_largest_bytes = requested_bytes;
                    tenant.oom_limit_bytes = limit_bytes;
                }
            }
            if let Ok(channel::Record {
                device: ordinal,
                event:
                    channel::Event::Bypassing {
                        reason: Bypass::OtherDevice,
                    },
            }) = record
            {
                newly_ungoverned.extend(client.uses_other(ordinal));
                // Reported below, with the device's name.
                continue;
            }
            let Some(left_out) = tenant.allowance.spend(now_ns) else {
                continue;
            };
            let (kind, message, mut fields) = describe(&job, record);
            fields.push(("pid", Value::from(pid)));
            if left_out > 0 {
                fields.push(("left_out", Value::from(left_out)));
            }
            self.journal.write(kind, about, message, &fields);
        }
        if !newly_ungoverned.is_empty() && tenant.allowance.spend(now_ns).is_some() {
            let (message, fields) =
                convert::ungoverned(&job, pid, &client.command, &newly_ungoverned);
            self.journal.write("ungoverned", about, message, &fields);
        }
        let uid = tenant.uid;
        if missed > 0 && tenant.allowance.spend(now_ns).is_some() {
            let message = format!("{missed} events of process {pid} were overwritten unread");
            self.journal
                .write("missed", about, message, &[("missed", Value::from(missed))]);
        }
        for (device, bytes) in contexts {
            self.note_context(now_ns, uid, device, bytes);
        }
    }
}

fn watch(poller: &Poller, tenant: &mut Tenant, started_ticks: u64) -> io::Result<()> {
    let pid = i32::try_from(tenant.spec.pid)
        .ok()
        .and_then(rustix::process::Pid::from_raw);
    let flags = rustix::process::PidfdFlags::empty();
    let process = match pid.map(|pid| rustix::process::pidfd_open(pid, flags)) {
        Some(Ok(process)) => Some(process),
        None | Some(Err(rustix::io::Errno::SRCH | rustix::io::Errno::INVAL)) => None,
        Some(Err(errno)) => return Err(errno.into()),
    };
    // Looked at after the descriptor was opened: if this is the same process, the descriptor is
    // its.
    let same = peer::is_alive(tenant.spec.pid, started_ticks)?;
    if let Some(process) = process.filter(|_| same) {
        let event = Event::JobEnded(tenant.id.0);
        poller.add(&process, event, Interest::Read)?;
        tenant.process = Some(process);
        tenant.started_ticks = started_ticks;
    }
    Ok(())
}

fn saved_processes(processes: &[Process]) -> Vec<SavedProcess> {
    let saved = processes.iter().map(|process| SavedProcess {
        pid: process.pid,
        started_ticks: process.started_ticks,
    });
    saved.collect()
}

type Described = (&'static str, String, Vec<(&'static str, Value)>);

fn describe(job: &str, record: Result<channel::Record, channel::BadRecord>) -> Described {
    use channel::Event as Report;
    let record = match record {
        Ok(record) => record,
        Err(bad) => return ("bad_record", format!("job `{job}`: {bad}"), Vec::new()),
    };
    let mut fields = vec![("device", Value::from(record.device))];
    match record.event {
        Report::OverLimit {
            limit_bytes,
            used_bytes,
            requested_bytes,
            charged_bytes,
        } => {
            // An older client does not tell what the device would have lacked.
            let charged_bytes = charged_bytes.max(requested_bytes);
            fields.extend([
                ("limit_bytes", Value::from(limit_bytes)),
                ("used_bytes", Value::from(used_bytes)),
                ("requested_bytes", Value::from(requested_bytes)),
                ("charged_bytes", Value::from(charged_bytes)),
            ]);
            let [limit, used, requested, charged] =
                [limit_bytes, used_bytes, requested_bytes, charged_bytes].map(control::short_bytes);
            let on_device = if charged == requested {
                String::new()
            } else {
                format!(" ({charged} on the device)")
            };
            let message = format!(
                "job `{job}` is out of memory on device {}: {requested} requested{on_device} with {used} of {limit} used",
                record.device
            );
            ("oom", message, fields)
        }
        Report::Bypassing { reason } => {
            let reason = match reason {
                Bypass::ArbiterLost => "the arbiter was lost",
                Bypass::GateStuck => "its gate stayed closed past every deadline",
                Bypass::NoMarks => "the driver gives no way to follow completion",
                Bypass::OtherDevice => "to a device that the job may not use",
            };
            fields.push(("reason", Value::from(reason)));
            let message = format!("job `{job}` submits without grants: {reason}");
            ("bypass", message, fields)
        }
        Report::HookFailed { row } => {
            // A stranger's number: any there is, or NVML's.
            let call = shim_ffi::ENTRIES
                .get(row as usize)
                .map_or("a report of NVML", shim_ffi::Entry::name);
            fields.push(("reason", Value::from("a hook of the library failed")));
            fields.push(("call", Value::from(call)));
            let message = format!(
                "job `{job}` calls {call} past the library: the hook failed, which is a bug of sublet's (please report it)"
            );
            ("bypass", message, fields)
        }
        Report::Following { way, status } => {
            let why = match status {
                0 => "accepts completion marks and does not write them".to_owned(),
                _ => format!("refuses completion marks (status {status})"),
            };
            let how = match way {
                channel::Following::Writes => "by what the device writes",
                channel::Following::Events => "by events, which a thread of its own asks for",
                channel::Following::Queries => {
                    "by asking whether its streams are idle, which is coarse: what it is charged may be off while it keeps them busy"
                }
            };
            fields.push(("status", Value::from(status)));
            fields.push(("followed_by", Value::from(convert::followed_by(way))));
            let message = format!("the driver of job `{job}` {why}: its work is followed {how}");
            ("following", message, fields)
        }
        Report::Reattached { gap_ns } => {
            fields.push(("gap_ns", Value::from(gap_ns)));
            let message = format!(
                "job `{job}` was without an arbiter for {} ms",
                gap_ns / 1_000_000
            );
            ("gap", message, fields)
        }
        Report::NoHashes { status } => {
            fields.push(("status", Value::from(status)));
            let message = format!(
                "job `{job}` copies all of its memory when it leaves device {}: the driver did not load what recognises unchanged memory (error {status}); it is asked again at later evictions",
                record.device
            );
            ("no_hashes", message, fields)
        }
        Report::NoSpace {
            wanted_bytes,
            most_bytes,
            context,
        } => {
            fields.extend([
                ("wanted_bytes", Value::from(wanted_bytes)),
                ("most_bytes", Value::from(most_bytes)),
                ("context", Value::from(context)),
            ]);
            let [wanted, most] = [wanted_bytes, most_bytes].map(control::short_bytes);
            let what = if context {
                "a context".to_owned()
            } else {
                wanted
            };
            let message = format!(
                "job `{job}` is refused {what} on device {}: {most} is all that it could have there, with every job gone that may leave the device",
                record.device
            );
            ("no_space", message, fields)
        }
        Report::HostShort {
            needed_bytes,
            available_bytes,
            group_limit_bytes,
        } => {
            fields.extend([
                ("needed_bytes", Value::from(needed_bytes)),
                ("available_bytes", Value::from(available_bytes)),
            ]);
            let [needed, available, limit] =
                [needed_bytes, available_bytes, group_limit_bytes].map(control::short_bytes);
            let by = if group_limit_bytes == 0 {
                "the host has".to_owned()
            } else {
                fields.push(("group_limit_bytes", Value::from(group_limit_bytes)));
                format!("the memory limit of its container ({limit}) leaves")
            };
            let message = format!(
                "job `{job}` stays on device {}: leaving takes {needed} of host memory and {by} {available} (raise the limit, or give the job less of the device)",
                record.device
            );
            ("host_memory", message, fields)
        }
    }
}
