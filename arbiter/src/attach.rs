//! How clients come in: accepting, the greeting with its deadline, the pages. How they go:
//! [`crate::client_exit`].

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;

use channel::arbiter::{ClientPages, Connection, Identity, PageFiles, TenantMemory};
use channel::wire::{Hello, Outcome, PROTOCOL_MAJOR};
use channel::{Accounts, MAX_DEVICES};
use policy::TenantId;
use serde_json::Value;

use crate::clients::Client;
use crate::clock;
use crate::convert::{self, NotIn};
use crate::descriptors::Descriptors;
use crate::door::{Heard, Kept, Newcomer};
use crate::journal::About;
use crate::peer;
use crate::serve::Arbiter;
use crate::tenant::Missing;

/// The index of each of a client's devices in the arbiter's table; `None`: not its job's.
type DeviceMap = [Option<u8>; MAX_DEVICES];

/// What to do with a hello.
pub(crate) enum Verdict {
    In(Box<Terms>),
    Hold,
    Out(NotIn),
}

/// Under which a client is let in.
pub(crate) struct Terms {
    tenant: TenantId,
    pages: ClientPages,
    slot: u32,
    device_map: DeviceMap,
    journal_next: u64,
    came_back: bool,
}

impl Arbiter {
    pub(crate) fn accept_clients(&mut self, now_ns: u64) -> std::io::Result<()> {
        for _ in 0..16 {
            let Some(connection) = self.door.accept()? else {
                return Ok(());
            };
            if !self.door.has_descriptors() {
                let who = peer::credentials(&connection).unwrap_or_default();
                let not_in = NotIn::new(Outcome::Failed, Descriptors::lack());
                self.tell_refused(who, "", None, &not_in);
                connection.refuse(not_in.outcome, &not_in.text);
                continue;
            }
            let identity = match self.identify(&connection) {
                Ok(Some(identity)) => identity,
                // A peer that is gone already has no identity; nothing is owed to it.
                Ok(None) => continue,
                Err((who, not_in)) => {
                    self.tell_refused(who, "", None, &not_in);
                    connection.refuse(not_in.outcome, &not_in.text);
                    continue;
                }
            };
            if self.door.is_crowded(identity.uid) {
                let text = "too many connections are waiting to attach; try again";
                let not_in = NotIn::new(Outcome::Failed, text);
                self.tell_refused((identity.pid, identity.uid), "", None, &not_in);
                connection.refuse(not_in.outcome, &not_in.text);
                continue;
            }
            let id = self.persistence.new_id();
            let of = (connection, identity);
            self.door.greet(id, of, now_ns, &self.poller)?;
            // The hello usually follows at once: look before going back to sleep.
            self.on_greeting(id, now_ns);
        }
        Ok(())
    }

    /// Who is there; `None`: nobody any more.
    fn identify(&self, connection: &Connection) -> Result<Option<Identity>, ((u32, u32), NotIn)> {
        let Ok((pid, uid)) = peer::credentials(connection) else {
            return Ok(None);
        };
        let refused = |text: String| Err(((pid, uid), NotIn::new(Outcome::Failed, text)));
        if pid == 0 {
            return refused(
                "the arbiter runs in another PID namespace, which does not see this process's: start it outside of the container or beside the job".into(),
            );
        }
        match connection.identity() {
            Ok(mut identity) => match peer::process_of(connection, pid) {
                Ok(process) => Ok(process.map(|process| {
                    // That one went by the number, which may be another process's by now.
                    identity.process = process;
                    identity
                })),
                Err(_) => refused(Descriptors::lack()),
            },
            Err(error) if error.raw_os_error() == Some(nix::libc::ESRCH) => Ok(None),
            Err(error) => refused(
                Descriptors::lack_behind(&error)
                    .unwrap_or_else(|| format!("the arbiter cannot watch this process: {error}")),
            ),
        }
    }

    /// The socket of a connection can be read.
    pub(crate) fn on_greeting(&mut self, id: u64, now_ns: u64) {
        match self.door.hear(id, now_ns, &self.poller) {
            Heard::Nothing => {}
            Heard::Hello => self.answer_greeting(id, now_ns),
            Heard::Nonsense(connection, identity, error) => {
                let who = (identity.pid, identity.uid);
                let not_in = NotIn::new(Outcome::Malformed, convert::with_causes(&error));
                self.tell_refused(who, "", None, &not_in);
                connection.refuse(not_in.outcome, &not_in.text);
            }
        }
    }

    /// Looks again at those that have been held.
    pub(crate) fn answer_greetings(&mut self, now_ns: u64) {
        for id in self.door.waiting() {
            self.answer_greeting(id, now_ns);
        }
    }

    /// Looks again at all that wait, and dismisses those that have said nothing.
    pub(crate) fn expire_greetings(&mut self, now_ns: u64) {
        for id in self.door.waiting() {
            match self.door.dismiss_silent(id, now_ns) {
                Some(pid) => {
                    self.warn_of_stranger(&format!("process {pid} connected and said nothing"));
                }
                None => self.answer_greeting(id, now_ns),
            }
        }
    }

    /// Answers a connection that has said hello, or holds it back.
    fn answer_greeting(&mut self, id: u64, now_ns: u64) {
        let Some(newcomer) = self.door.take(id) else {
            return;
        };
        let may_hold = newcomer.may_wait(now_ns);
        let (hello, kept) = (&newcomer.hello, &newcomer.kept);
        let who = (newcomer.identity.pid, newcomer.identity.uid);
        let whose = (who.0, who.1, newcomer.identity.process.as_fd());
        match self.judge(hello, kept, whose, may_hold, now_ns) {
            Verdict::In(terms) => {
                let Newcomer {
                    connection,
                    identity,
                    hello,
                    ..
                } = newcomer;
                self.let_in(
                    identity.process,
                    who,
                    hello,
                    *terms,
                    |files, memory, map| connection.welcome(files, memory, map).map(Some),
                );
            }
            Verdict::Hold => self.door.hold(id, newcomer),
            Verdict::Out(not_in) => {
                let job = self.ledger.of_token(&hello.token).map(|tenant| tenant.id);
                self.tell_refused(who, &hello.command, job, &not_in);
                // After the journal has it: the reason is there for everybody who sees the refusal.
                newcomer.connection.refuse(not_in.outcome, &not_in.text);
                // It may have been woken for this one.
                if let Some(job) = job {
                    self.reap_if_dead(job);
                }
            }
        }
    }

    /// Says in the journal and the log why a process was not let in; not as often as it likes.
    pub(crate) fn tell_refused(
        &mut self,
        (pid, uid): (u32, u32),
        command: &str,
        job: Option<TenantId>,
        not_in: &NotIn,
    ) {
        let now_ns = self.clock.mono_ns();
        let (mut name, mut id) = (String::new(), 0);
        let left_out = match job.and_then(|id| self.ledger.get_mut(id)) {
            Some(tenant) => {
                name.clone_from(&tenant.spec.name);
                id = tenant.id.0;
                tenant.allowance.spend(now_ns)
            }
            None => self.allowances.stranger(now_ns),
        };
        let Some(left_out) = left_out else { return };
        let of_job = match name.as_str() {
            "" => String::new(),
            name => format!(" of job `{name}`"),
        };
        let text = &not_in.text;
        let message =
            format!("process {pid} ({command}) of user {uid}{of_job} is not let in: {text}");
        tracing::warn!("{message}");
        let mut fields = not_in.fields.clone();
        if !fields.iter().any(|(key, _)| *key == "pid") {
            fields.push(("pid", Value::from(pid)));
        }
        fields.push(("uid", Value::from(uid)));
        fields.push(("outcome", Value::from(not_in.word())));
        if left_out > 0 {
            fields.push(("left_out", Value::from(left_out)));
        }
        let about = About::job(&name, id);
        self.journal.write("refused", about, message, &fields);
    }

    /// What becomes of a process that has said hello, and what its job is promised with it. No
    /// socket is touched.
    pub(crate) fn judge(
        &mut self,
        hello: &Hello,
        kept: &Kept,
        (pid, uid, process): (u32, u32, BorrowedFd<'_>),
        may_hold: bool,
        now_ns: u64,
    ) -> Verdict {
        if hello.major != PROTOCOL_MAJOR {
            let text = format!(
                "this arbiter speaks channel protocol {PROTOCOL_MAJOR}, the library speaks {}: use both of one version",
                hello.major
            );
            return Verdict::Out(NotIn::new(Outcome::Version, text));
        }
        let asks = hello.features & channel::ASKS != 0;
        let of_container = match asks {
            true => match self.job_of_container(hello, (pid, uid, process), may_hold, now_ns) {
                Ok(id) => self.ledger.get(id),
                Err(verdict) => return verdict,
            },
            false => None,
        };
        let Some(tenant) = of_container.or_else(|| self.ledger.of_token(&hello.token)) else {
            let text = "no job has this token: start the program with `sublet run`";
            return Verdict::Out(NotIn::new(Outcome::UnknownToken, text));
        };
        // In a container the kernel says who belongs together, whatever its users.
        if !asks && uid != tenant.uid && uid != 0 && !tenant.spec.any_user {
            let text = format!(
                "the job belongs to user {}, this process to {uid}",
                tenant.uid
            );
            return Verdict::Out(NotIn::new(Outcome::Permission, text));
        }
        let id = tenant.id;
        if let Some(why) = &tenant.ending {
            let text = format!("the job is being ended, because {why}");
            return Verdict::Out(NotIn::new(Outcome::Failed, text));
        }
        // The program that started this one may have waited for the end of the one before it.
        self.reap_processes(id);
        let Some(tenant) = self.ledger.get(id) else {
            return Verdict::Out(NotIn::new(Outcome::UnknownToken, "the job has ended"));
        };
        // Its user's ceilings go by the name.
        let owner = tenant.uid;
        if tenant.dormant.is_some() && !self.names.ask(owner, now_ns) && may_hold {
            return Verdict::Hold;
        }
        if let Err(not_in) = self.wake(id) {
            return Verdict::Out(not_in);
        }
        let Some(tenant) = self.ledger.get(id) else {
            return Verdict::Out(NotIn::new(Outcome::UnknownToken, "the job has ended"));
        };
        // The tenant's page is with a process that has not come back yet; a new page must not take
        // its place.
        let expected = tenant.memory.is_none()
            && tenant.missing.iter().any(|missing| missing.pid != pid)
            && now_ns < tenant.adopt_until_ns;
        if kept.is_none() && expected && may_hold {
            return Verdict::Hold;
        }
        let again = self.ledger.admit_again(id, &self.devices);
        let again = match again {
            Err(_) if self.reap_all() => self.ledger.admit_again(id, &self.devices),
            again => again,
        };
        if let Err(refusal) = again {
            let error = convert::refusal(&refusal);
            let text = format!(
                "what the job was promised was not kept for it, for it has not used a device for a while after its registration: {error}"
            );
            return Verdict::Out(NotIn::new(Outcome::Full, text));
        }
        // A process that has become another program by exec has left its former self behind, with a
        // closed socket.
        let Some(tenant) = self.ledger.get(id) else {
            return Verdict::Out(NotIn::new(Outcome::UnknownToken, "the job has ended"));
        };
        let former: Vec<u64> = tenant.clients.clone();
        for client in former {
            if self.clients.is_former(client, pid, hello.previous_slot) {
                // Where it comes back with its pages, its memory stays on its account.
                if hello.previous_slot.is_some() {
                    self.set_aside(client, now_ns);
                } else {
                    self.drop_client(client, now_ns);
                }
            }
        }
        match self.terms_of(id, hello, kept, pid) {
            Ok(terms) => Verdict::In(Box::new(terms)),
            Err(not_in) => Verdict::Out(not_in),
        }
    }

    /// Turns an attached client into a missing one.
    fn set_aside(&mut self, id: u64, now_ns: u64) {
        self.read_journal_of(id, now_ns);
        let Some(client) = self.clients.remove(id, &self.poller) else {
            return;
        };
        for index in client.device_indices() {
            if let Some(scheduler) = self.schedulers.get_mut(index) {
                scheduler.remove(now_ns, id);
                self.schedulers.mark(1 << index);
            }
        }
        self.schedulers.form_gangs();
        if let Some(tenant) = self.ledger.get_mut(client.tenant) {
            tenant.clients.retain(|other| *other != id);
            tenant.missing.push(Missing {
                pid: client.pid,
                started_ticks: client.started_ticks,
                slot: client.slot,
                journal_next: client.journal_next(),
            });
        }
    }

    fn terms_of(
        &mut self,
        id: TenantId,
        hello: &Hello,
        kept: &Kept,
        pid: u32,
    ) -> Result<Terms, NotIn> {
        let failed = |error: channel::PageError| {
            let text = Descriptors::lack_behind(&error);
            let text = text.unwrap_or_else(|| convert::with_causes(&error));
            NotIn::new(Outcome::Failed, text)
        };
        let simulated = self.ledger.get(id).is_some_and(|t| t.spec.simulated);
        // Who only reads is shown the pages, and holds nothing of them.
        let reads = hello.features & channel::READER != 0 && hello.previous_slot.is_none();
        let most = self.rulebook.options().job_processes;
        let mut device_map = [None; MAX_DEVICES];
        let (mut free, mut met) = (self.free_devices(), 0u32);
        for (ordinal, device) in hello.devices.iter().enumerate().take(MAX_DEVICES) {
            let mut place = self.devices.meet(device, simulated, &mut free);
            if place.is_none() && self.reap_all() {
                free = self.free_devices() & !met;
                place = self.devices.meet(device, simulated, &mut free);
            }
            let Some(place) = place else {
                let text = format!(
                    "{} has no place in the arbiter's table of {MAX_DEVICES} devices: all of them are there, or used or named by a job or a rule",
                    convert::uuid_text(&device.uuid)
                );
                return Err(NotIn::new(Outcome::Full, text));
            };
            if place.anew {
                self.remake_scheduler(place.index);
            }
            let index = place.index;
            self.journal
                .name_device(index, convert::uuid_text(&device.uuid));
            // A device of this process is not one that gives way to its next one.
            met |= 1 << index;
            free &= !met;
            // An entitlement by index counts the devices of the driver, and that is how it is known
            // here.
            let entitled = self.ledger.get(id).is_some_and(|tenant| {
                self.devices
                    .entitled(index, tenant.spec.settings.devices(), simulated)
            });
            // CAST: below MAX_DEVICES.
            device_map[ordinal] = entitled.then_some(index as u8);
        }
        self.make_schedulers();
        self.publish_limits();
        let Some(tenant) = self.ledger.get_mut(id) else {
            return Err(NotIn::new(Outcome::UnknownToken, "the job has ended"));
        };
        // A limit that holds on no device is none: better no process than one without a limit.
        let nowhere = !hello.devices.is_empty() && device_map.iter().all(Option::is_none);
        if nowhere && tenant.spec.settings.mem.is_some() {
            let uuids: Vec<_> = hello.devices.iter().map(|device| device.uuid).collect();
            let (message, fields) =
                convert::nowhere(&tenant.spec.name, pid, &hello.command, &uuids);
            return Err(NotIn {
                fields,
                ..NotIn::new(Outcome::NoDevice, message)
            });
        }
        // A process may have been attached twice: once as a reader of NVML, and once when it began
        // to use the driver.
        let of_pid = |missing: &Missing| missing.pid == pid;
        let same = |missing: &Missing| of_pid(missing) && hello.previous_slot == Some(missing.slot);
        let missing = tenant.missing.iter().position(same);
        let missing = missing.or_else(|| tenant.missing.iter().position(of_pid));
        let missing = missing.filter(|_| !reads);
        let missing = missing.map(|at| tenant.missing.swap_remove(at));

        let (pages, slot, journal_next, came_back) = match (hello.previous_slot, kept) {
            (Some(slot), Some((client_fd, tenant_fd))) => {
                let own = missing.is_some_and(|missing| missing.slot == slot);
                if let Some(missing) = missing.filter(|_| !own) {
                    tenant.clear_slot(missing.slot);
                }
                if !own && !tenant.take_this_slot(slot) {
                    let text = format!("slot {slot} belongs to another process");
                    return Err(NotIn::new(Outcome::Malformed, text));
                }
                let result = (|| {
                    let tenant_fd = tenant_fd.try_clone().map_err(page_io)?;
                    match &tenant.memory {
                        Some(memory) if memory.is(tenant_fd.as_fd()) => {}
                        Some(_) => return Ok(None),
                        None => {
                            let memory = TenantMemory::adopt(tenant_fd)?;
                            tenant.accounts = Accounts::adopting(&memory.page);
                            tenant.memory = Some(memory);
                        }
                    }
                    ClientPages::adopt(client_fd.try_clone().map_err(page_io)?).map(Some)
                })();
                let pages = match result {
                    Ok(Some(pages)) => pages,
                    other => {
                        tenant.clear_slot(slot);
                        let text = "the page is not the one of this job's other processes";
                        return Err(match other {
                            Err(error) => failed(error),
                            _ => NotIn::new(Outcome::Malformed, text),
                        });
                    }
                };
                let next = missing.filter(|_| own).map(|missing| missing.journal_next);
                (pages, slot, next, true)
            }
            _ => {
                if let Some(missing) = missing {
                    tenant.clear_slot(missing.slot);
                }
                if tenant.memory.is_none() {
                    tenant.memory = Some(self.door.tenant_page().map_err(failed)?);
                }
                let asks = hello.features & channel::SIGNATURES != 0;
                let pages = self.door.client_pages(asks).map_err(failed)?;
                let slot = if reads {
                    channel::NO_SLOT
                } else {
                    let Some(slot) = tenant.take_slot(most) else {
                        let text = format!(
                            "job `{}` has {most} processes that use a device, the most that this arbiter allows (see job_processes in the quota file)",
                            tenant.spec.name
                        );
                        return Err(NotIn::new(Outcome::Full, text));
                    };
                    slot
                };
                (pages, slot, Some(0), false)
            }
        };
        if let Some(memory) = &mut tenant.memory
            && slot != channel::NO_SLOT
        {
            if let Err(error) = memory.make_slot(slot) {
                tenant.clear_slot(slot);
                return Err(failed(error));
            }
            if !came_back {
                memory.page.clear_slot(slot);
            }
            memory.page.name_slot(slot, pid, peer::inner(pid));
        }
        tenant.publish_slots();
        // Records of a ring whose reader is unknown were read by the arbiter before, as far as
        // anybody can tell.
        let mut pages = pages;
        if hello.features & channel::SIGNATURES != 0
            && pages.signatures().is_none()
            && let Err(error) = pages.ask_for_signatures()
        {
            tracing::warn!(
                "process {pid} of job `{}` will have no profile: {error}",
                tenant.spec.name
            );
        }
        let journal_next = journal_next.unwrap_or_else(|| {
            let mut next = 0;
            pages.client.read_records(&mut next, |_| {});
            next
        });
        Ok(Terms {
            tenant: id,
            pages,
            slot,
            device_map,
            journal_next,
            came_back,
        })
    }

    /// Lets a process in. `welcome` hands it its pages and returns the socket on which it rings,
    /// where it has one. The number of the client; `None`: it could not be welcomed.
    pub(crate) fn let_in(
        &mut self,
        process: OwnedFd,
        (pid, uid): (u32, u32),
        hello: Hello,
        terms: Terms,
        welcome: impl FnOnce(PageFiles, &TenantMemory, DeviceMap) -> std::io::Result<Option<OwnedFd>>,
    ) -> Option<u64> {
        let now_ns = self.clock.mono_ns();
        let id = self.persistence.new_id();
        let Terms {
            tenant: tenant_id,
            mut pages,
            slot,
            device_map,
            journal_next,
            came_back,
        } = terms;
        let files = pages.take_files();
        pages.arbiter.set_tenant_slot(slot);
        pages.arbiter.set_epoch(self.persistence.epoch());
        pages.arbiter.set_dilation(clock::dilation());
        pages.arbiter.beat(now_ns);
        let devices = device_map
            .iter()
            .flatten()
            .fold(0u32, |devices, index| devices | 1 << index);
        let mut totals = [0; MAX_DEVICES];
        for (device, index) in hello.devices.iter().zip(device_map) {
            if let Some(total) = index.and_then(|index| totals.get_mut(usize::from(index))) {
                *total = device.total_bytes;
            }
        }
        let other_devices: Vec<(u32, [u8; 16])> = (0..)
            .zip(hello.devices.iter().zip(device_map))
            .filter(|(_, (_, index))| index.is_none())
            .map(|(ordinal, (device, _))| (ordinal, device.uuid))
            .collect();
        // Where the job has some device, this is not reported before work goes to another one.
        let reads = slot == channel::NO_SLOT;
        let ungoverned: Vec<[u8; 16]> = match devices {
            _ if reads => Vec::new(),
            0 => other_devices.iter().map(|(_, uuid)| *uuid).collect(),
            _ => Vec::new(),
        };
        let pages = Rc::new(pages);
        let process = (pid, process);
        let mut client = Client::new(tenant_id, process, Rc::clone(&pages), journal_next);
        client.slot = slot;
        // A reader is never granted one.
        client.devices = if reads { 0 } else { devices };
        client.totals = totals;
        client.other_devices = other_devices;
        client.ungoverned.clone_from(&ungoverned);
        client.command = hello.command;
        client.attached_unix_ms = self.clock.unix_ms();
        if let Some(tenant) = self.ledger.get_mut(tenant_id)
            && !std::mem::replace(&mut tenant.has_attached, true)
        {
            let kept = std::mem::replace(&mut tenant.promises, true);
            if self.ledger.keep_promises(now_ns) || !kept {
                self.publish_terms();
            }
        }
        self.publish_to(&client);
        if !reads {
            self.introduce_residency(tenant_id, &pages);
            self.introduce_resize(tenant_id, &pages);
        }
        let command = client.command.clone();
        self.clients.insert(id, client);
        // Before the welcome, so that a client alone finds its gate open.
        self.enter_schedulers(id, now_ns);
        let memory = self.ledger.get(tenant_id).and_then(|t| t.memory.as_ref());
        let welcomed = match memory.zip(files) {
            Some((memory, files)) => welcome(files, memory, device_map),
            None => Err(std::io::Error::other("the job has ended")),
        };
        self.door.keep_reserve();
        let watched = welcomed.and_then(|socket| self.clients.watch(id, socket, &self.poller));
        if let Err(error) = watched {
            // Most likely it has waited long enough: this arbiter, or its host, stood still.
            let text = match error.kind() {
                std::io::ErrorKind::BrokenPipe | std::io::ErrorKind::ConnectionReset => {
                    "it hung up before it was answered".to_owned()
                }
                _ => Descriptors::lack_behind(&error).unwrap_or_else(|| error.to_string()),
            };
            let not_in = NotIn::new(Outcome::Failed, text);
            self.tell_refused((pid, uid), &command, Some(tenant_id), &not_in);
            self.drop_client(id, now_ns);
            self.reap_if_dead(tenant_id);
            return None;
        }
        let tenant = self.ledger.get_mut(tenant_id)?;
        tenant.clients.push(id);
        let (kind, verb) = if came_back {
            ("reattached", "is back")
        } else {
            ("attached", "has attached")
        };
        if tenant.allowance.spend(now_ns).is_some() {
            let message = format!(
                "process {pid} ({command}) of job `{}` {verb}",
                tenant.spec.name
            );
            let mut fields = vec![("pid", Value::from(pid)), ("slot", Value::from(slot))];
            if came_back {
                fields.push(("gap_ns", Value::from(hello.gap_ns)));
            }
            self.journal.write(kind, tenant.about(), message, &fields);
        }
        if !ungoverned.is_empty() && tenant.allowance.spend(now_ns).is_some() {
            let name = &tenant.spec.name;
            let (message, fields) = convert::ungoverned(name, pid, &command, &ungoverned);
            self.journal
                .write("ungoverned", tenant.about(), message, &fields);
        }
        self.persistence.mark_old();
        Some(id)
    }
}

fn page_io(error: std::io::Error) -> channel::PageError {
    channel::PageError::Io("keep", error)
}
