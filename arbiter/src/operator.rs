//! What operators ask for: registering, listing, changing, ending.

use channel::wire::TOKEN_BYTES;
use control::place::Identity;
use control::{
    Change, ControlError, ErrorCode, JobSpec, Registered, Reply, Request, Settings, one_line,
};
use policy::TenantId;
use serde_json::Value;

use crate::behalf;
use crate::census;
use crate::clock::Clock;
use crate::container::{self, Origin};
use crate::convert;
use crate::descriptors::Descriptors;
use crate::journal::About;
use crate::peer;
use crate::rules::Whose;
use crate::serve::Arbiter;
use crate::spec;
use crate::tenant::Tenant;
use crate::turns::Ask;
use crate::unsaved;
use crate::who::{self, Peer};

/// Of the address of a refused hook, and of the reason, in the journal.
const REFUSED_HOOK_CHARS: usize = 400;
/// Of what is asked for over TCP, in the log.
const ASKED_CHARS: usize = 400;
/// Of the name of a Slurm account.
const ACCOUNT_CHARS: usize = 256;

impl Arbiter {
    /// Answers a request, or has it wait.
    pub(crate) fn answer(&mut self, ask: Ask) {
        let Ask {
            number,
            peer,
            request,
        } = ask;
        if let Err(error) = peer.may_ask(&request) {
            self.turns.reply(number, Err(error));
            return;
        }
        if let Origin::Remote(bearer) = &peer.origin
            && !who::is_reading(&request)
        {
            let asked = serde_json::to_string(&request).unwrap_or_default();
            let asked = one_line(&asked, ASKED_CHARS);
            tracing::info!("over TCP, by the token `{}`: {asked}", bearer.name);
        }
        if let Request::Status
        | Request::List
        | Request::Job { .. }
        | Request::Devices
        | Request::Set { .. }
        | Request::Move(_) = request
        {
            self.read_accounts();
        }
        let result = match request {
            Request::Status => Ok(Reply::Status(self.status_for(&peer))),
            Request::List => Ok(Reply::Jobs(self.jobs_for(&peer))),
            Request::Job { job } => self
                .job_for(&job, &peer)
                .map(|job| Reply::Job(Box::new(job))),
            Request::Devices => Ok(Reply::Devices(self.devices_for(&peer))),
            Request::Set { job, change } => self.change(&job, change, &peer),
            Request::SetDevice { device, settings } => {
                self.change_devices(device.as_ref(), settings, &peer)
            }
            Request::Reload => match self.reload_for(number, &peer) {
                Ok(()) => return,
                Err(error) => Err(error),
            },
            Request::Move(moves) => match self.begin_move(number, &moves, &peer) {
                Ok(()) => return,
                Err(error) => Err(error),
            },
            Request::Acquire { job, acquire } => {
                match self.acquire(number, &job, &acquire, &peer) {
                    Ok(()) => return,
                    Err(error) => Err(error),
                }
            }
            Request::Yield { job, give_up } => self.give_up(&job, &give_up, &peer),
            Request::Groups => Ok(Reply::Groups(self.groups_status())),
            Request::Config { pid, user } => {
                let now_ns = self.clock.mono_ns();
                if self.names.ask(peer.uid, now_ns) {
                    self.config_report(pid, user, &peer)
                } else {
                    // Rules go by names.
                    let ask = Ask {
                        number,
                        peer,
                        request: Request::Config { pid, user },
                    };
                    self.park(ask, now_ns);
                    return;
                }
            }
            Request::Shutdown => self.shut_down(&peer),
            Request::Events { since_seq, limit } => {
                Ok(Reply::Events(self.events_for(&peer, since_seq, limit)))
            }
            Request::Timeline {
                device,
                since_seq,
                limit,
            } => {
                let timeline = self.timeline(device, since_seq, limit);
                timeline.map(Reply::Timeline)
            }
            Request::HookRefused { hook, reason } => self.note_refused_hook(&hook, &reason, &peer),
            Request::Register(mut job) => {
                let now_ns = self.clock.mono_ns();
                job.cut_command();
                if self.is_ready_for(&job, &peer) {
                    let registered = self.register(job, &peer);
                    self.answer_registration(number, registered, now_ns);
                } else {
                    let ask = Ask {
                        number,
                        peer,
                        request: Request::Register(job),
                    };
                    self.park(ask, now_ns);
                }
                return;
            }
        };
        self.reply(number, result);
    }

    /// Answers a request. What it has changed holds by then: gates that it closes are closed.
    pub(crate) fn reply(&mut self, number: u64, result: Result<Reply, ControlError>) {
        self.step_dirty_schedulers();
        self.turns.reply(number, result);
    }

    /// Has a request wait, and forgets those whose connections have gone: there are no more of them
    /// than connections, which have one at a time.
    fn park(&mut self, ask: Ask, now_ns: u64) {
        let turns = &self.turns;
        self.parked.retain(|number| turns.awaits(number));
        self.claims.note_change();
        self.parked.park(ask, now_ns);
    }

    /// Whether what a registration takes is known: its driver's devices, and its user's name. Asks
    /// for what is not.
    fn is_ready_for(&mut self, job: &JobSpec, peer: &Peer) -> bool {
        let owner = behalf::owner(job, peer);
        let named = self.names.ask(owner, self.clock.mono_ns());
        self.knows_devices_of(job) && self.knows_claims_of(job) && named
    }

    /// Login names were looked up.
    pub(crate) fn on_names(&mut self, now_ns: u64) {
        for (uid, name) in self.names.take(now_ns) {
            let mut renamed = false;
            for tenant in self.ledger.iter_mut().filter(|tenant| tenant.uid == uid) {
                renamed |= tenant.user != name;
                tenant.user.clone_from(&name);
            }
            // Rules go by names, and those of jobs from before a start come late.
            if renamed {
                self.apply_rules(false);
            }
        }
        self.unpark();
        self.answer_greetings(now_ns);
    }

    /// Why a user's ceilings are not known, where there are some and its name is not: they go by
    /// names.
    pub(crate) fn lacks_name(&self, uid: u32) -> Option<String> {
        (self.rulebook.options().sections.by_name > 0 && !self.names.is_settled(uid)).then(|| {
            format!(
                "this host does not say what user {uid} is called, and the quota file has limits that go by names"
            )
        })
    }

    /// Whether the devices of the job's driver have been asked for and the answer is there; asks
    /// where not.
    fn knows_devices_of(&mut self, job: &JobSpec) -> bool {
        if !job.simulated && self.discovery.waits_for_host() {
            return false;
        }
        job.driver.as_os_str().is_empty() || self.discovery.ask(Some(job.driver.clone()))
    }

    /// The watcher has news.
    pub(crate) fn on_devices(&mut self) {
        let mut taken_ns = None;
        for news in self.discovery.take() {
            taken_ns = taken_ns.max(news.found.is_ok().then_some(news.taken_ns));
            match news.found {
                Ok(found) => {
                    let mut free = self.free_devices();
                    let driver = news.driver.as_ref();
                    let touched = self.devices.learn(driver, &found, &mut free);
                    for index in self.devices.of_driver(driver) {
                        self.capacity.note_seen(index, news.taken_ns);
                    }
                    for place in &touched {
                        if let Some(device) = self.devices.get(place.index) {
                            let uuid = convert::uuid_text(&device.uuid);
                            self.journal.name_device(place.index, uuid);
                        }
                    }
                    for place in touched.iter().filter(|place| place.anew) {
                        self.remake_scheduler(place.index);
                    }
                    if !touched.is_empty() {
                        self.make_schedulers();
                        self.claims.note_change();
                        // Parts of a device are so much from here on.
                        self.apply_rules(false);
                    }
                }
                Err(reason) => {
                    let driver = news
                        .driver
                        .as_ref()
                        .map(|driver| driver.display().to_string());
                    let driver = driver.unwrap_or_else(|| "this host".into());
                    tracing::debug!("no NVML for {driver}: {reason}");
                }
            }
        }
        self.unpark();
        if let Some(taken_ns) = taken_ns {
            self.look_for_escaped(taken_ns);
        }
    }

    /// Answers who waits for a name, and registrations whose driver has been looked at.
    pub(crate) fn unpark(&mut self) {
        for waiting in self.parked.take() {
            if !self.turns.awaits(waiting.ask.number) {
                continue;
            }
            let peer = waiting.ask.peer.clone();
            let is_ready = match &waiting.ask.request {
                Request::Register(job) => self.is_ready_for(job, &peer),
                _ => self.names.ask(peer.uid, self.clock.mono_ns()),
            };
            if is_ready {
                self.answer(waiting.ask);
            } else {
                self.parked.put_back(waiting);
            }
        }
    }

    /// Registrations that have waited long enough go on without NVML: devices are then learnt from
    /// the clients.
    pub(crate) fn expire_parked(&mut self, now_ns: u64) {
        for ask in self.parked.expire(now_ns) {
            if !self.turns.awaits(ask.number) {
                continue;
            }
            if let Request::Register(job) = &ask.request {
                let driver = (!job.driver.as_os_str().is_empty()).then(|| job.driver.clone());
                if !self.knows_devices_of(job) {
                    tracing::warn!(
                        "NVML has not answered in time; devices are learnt from clients"
                    );
                    self.discovery.give_up(driver);
                }
                self.give_up_claims(job);
            }
            let owner = match &ask.request {
                Request::Register(job) => behalf::owner(job, &ask.peer),
                _ => ask.peer.uid,
            };
            self.names.give_up(owner);
            self.answer(ask);
        }
    }

    pub(crate) fn register(
        &mut self,
        job: JobSpec,
        peer: &Peer,
    ) -> Result<Registered, ControlError> {
        let mut identity = Identity::of_process(peer.pid);
        identity.claimed_account = one_line(&job.slurm_account, ACCOUNT_CHARS);
        if peer.pid != 0 {
            is_still_where_it_was(peer, &identity)?;
        }
        self.register_as(job, peer, identity)
    }

    pub(crate) fn register_as(
        &mut self,
        mut job: JobSpec,
        peer: &Peer,
        identity: Identity,
    ) -> Result<Registered, ControlError> {
        if peer.pid == 0 {
            let message = format!(
                "the arbiter is process {} of another PID namespace, which does not see yours: it could not tell the job's processes apart",
                std::process::id()
            );
            return Err(ControlError::new(ErrorCode::Unsupported, message)
                .with_hint("start the arbiter outside of the container or beside the job, or set SUBLET_RUNTIME_DIR to a place of the job's own"));
        }
        if job.pid == 0 {
            job.pid = peer.pid;
        }
        if job.pid != peer.pid {
            let message = format!(
                "process {} cannot register a job for process {}",
                peer.pid, job.pid
            );
            let error = ControlError::new(ErrorCode::Permission, message);
            return Err(error.with_hint("a job registers itself, before it becomes its command"));
        }
        let uid = behalf::allowed(&job, peer)?;
        if let Some(joined) = self.join(&job, (peer.pid, uid)) {
            return joined;
        }
        let name = if job.name.is_empty() {
            let name = control::name_from_command(&job.command);
            self.ledger.free_name(&behalf::unreserved(name))
        } else {
            job.name.clone()
        };
        // Of a file that the arbiter has read itself it knows more than what it said just now.
        let file = job.own_file.take();
        match file {
            Some(file) if self.rulebook.reads(&file.path) => job.settings = file.given,
            file => job.own_file = file,
        }
        let start_unix_ms = self.clock.unix_ms();
        let mut spec = convert::spec(job, name, start_unix_ms);
        if let Some(message) = self.lacks_name(uid) {
            let error = ControlError::new(ErrorCode::Internal, message);
            return Err(error.with_hint("try again when the host's user database answers"));
        }
        let user = self.names.of(uid).to_owned();
        let ceiling = self.rulebook.ceiling(uid, &user);
        let whose = Whose {
            uid,
            user: &user,
            identity: &identity,
            user_caps: &[],
            start_unix_ms,
        };
        self.go_by_rules(&mut spec, whose, false);
        if let Some(group) = &spec.settings.group {
            control::check_name(group).map_err(|error| {
                ControlError::new(ErrorCode::Invalid, format!("`group`: {error}"))
            })?;
        }
        self.must_have_devices_of(&spec)?;
        self.admit(&spec, None, (uid, &user, &ceiling))
            .map_err(|refusal| convert::refusal(&refusal))?;
        let failed = |message: String| ControlError::new(ErrorCode::Internal, message);
        let token = new_token(&self.clock)
            .map_err(|error| failed(format!("no random numbers: {error}")))?;
        let id = TenantId(self.persistence.new_id());
        let now_ns = self.clock.mono_ns();
        let mut tenant = Tenant::new(id, spec, token, (uid, user), &self.clock);
        tenant.identity = identity;
        if let Origin::Container(key) = &peer.origin {
            tenant.registered_in = key.to_string();
        }
        peer::started_ticks(peer.pid)
            .and_then(|ticks| self.watch_job(&mut tenant, ticks.unwrap_or(0)))
            .map_err(|error| {
                if Descriptors::are_lacking(&error) {
                    failed(Descriptors::lack())
                } else {
                    failed(format!("process {} cannot be watched: {error}", peer.pid))
                }
            })?;
        tenant.session = census::led_session(peer.pid);
        if tenant.process.is_none() {
            let message = format!("process {} has ended before it was registered", peer.pid);
            return Err(ControlError::new(ErrorCode::Invalid, message));
        }
        let (name, command) = (tenant.spec.name.clone(), tenant.spec.command.join(" "));
        let mut fields = vec![
            ("pid", Value::from(peer.pid)),
            ("uid", Value::from(uid)),
            (
                "class",
                Value::from(spec::wire_class(tenant.spec.class()).as_str()),
            ),
        ];
        fields.extend(
            tenant
                .spec
                .settings
                .share
                .map(|share| ("share", Value::from(share))),
        );
        fields.extend(
            tenant
                .spec
                .settings
                .mem
                .map(|mem| ("mem", Value::from(mem.to_string()))),
        );
        let capped = tenant.spec.bounds.capped.clone();
        let notices = self.notices_for(&tenant.spec);
        let settings = tenant.spec.settings.clone();
        if !capped.is_empty() {
            let capped: Vec<String> = capped.iter().map(ToString::to_string).collect();
            fields.push(("capped", Value::from(capped)));
        }
        let message = format!("job `{name}` is registered: {command}");
        if let Some((other, whose)) = self.ledger.take_name(&name) {
            let message = format!(
                "the dormant job `{name}` is `{other}` from here on: another job has its name"
            );
            self.journal
                .write("renamed", About::job(&other, whose.0), message, &[]);
        }
        self.journal.note_owner(id.0, uid);
        self.ledger.insert(tenant);
        // One of a container comes without having waited for that.
        self.claims.note_change();
        self.enter_group(id);
        self.ledger.keep_promises(now_ns);
        if let Some(left_out) = self.allowances.start(uid, now_ns) {
            if left_out > 0 {
                fields.push(("left_out", Value::from(left_out)));
            }
            self.journal
                .write("registered", About::job(&name, id.0), message, &fields);
        }
        self.publish_limits();
        self.publish_terms();
        // On disk before it is answered: an arbiter that dies right after that is followed by one
        // that knows the job.
        self.persistence.mark_old();
        let mem_limit_bytes = self.limits_of(id);
        Ok(Registered {
            job: name,
            id: id.0,
            token: convert::token_text(&token),
            channel_socket: self.rulebook.options().dir.channel_socket(),
            mem_limit_bytes,
            share: self.share_of(id),
            settings: Some(settings),
            capped,
            notices,
        })
    }

    /// Answers a registration: at once where it was refused, else when a successor would know the
    /// job.
    pub(crate) fn answer_registration(
        &mut self,
        number: u64,
        registered: Result<Registered, ControlError>,
        now_ns: u64,
    ) {
        match registered {
            Ok(registered) => self.unsaved.add(number, registered, now_ns),
            Err(error) => {
                self.claims.note_change();
                self.settle_claims(now_ns);
                self.turns.reply(number, Err(error));
            }
        }
    }

    /// Answers those whose jobs are in the file, or have waited for too long for that.
    pub(crate) fn answer_saved(&mut self, now_ns: u64) {
        // One that is gone needs no successor.
        let (ledger, persistence) = (&self.ledger, &self.persistence);
        let is_saved = |job| {
            let tenant = ledger.get(job);
            tenant.is_none_or(|tenant| persistence.has(tenant.saved_as))
        };
        let waiting = self.unsaved.take(now_ns, is_saved);
        let overdue = waiting.iter().map(|one| one.job);
        let overdue: Vec<TenantId> = overdue.filter(|job| !is_saved(*job)).collect();
        for waiting in waiting {
            if overdue.contains(&waiting.job) {
                self.tell_unsaved(waiting.job, now_ns);
            }
            let reply = Ok(Reply::Registered(waiting.registered));
            self.turns.reply(waiting.number, reply);
        }
    }

    /// A job starts although no successor of ours would know of it.
    fn tell_unsaved(&mut self, job: TenantId, now_ns: u64) {
        let file = self.rulebook.options().dir.state_file();
        let Some(tenant) = self.ledger.get_mut(job) else {
            return;
        };
        if tenant.allowance.spend(now_ns).is_some() {
            let name = tenant.spec.name.clone();
            let message = format!(
                "job `{name}` starts before it is in {}: the disk has not taken it for {} ms, and an arbiter after this one may not know it",
                file.display(),
                unsaved::PATIENCE_NS / 1_000_000
            );
            self.journal
                .write("unsaved", About::job(&name, job.0), message, &[]);
        }
    }

    /// The job of a name, for somebody who may change it.
    pub(crate) fn tenant_of(&self, job: &str, peer: &Peer) -> Result<&Tenant, ControlError> {
        let Some(tenant) = self.ledger.named(job) else {
            let names: Vec<&str> = self.ledger.iter().map(|t| t.spec.name.as_str()).collect();
            let hint = if names.is_empty() {
                "no job is running".to_owned()
            } else {
                format!("running: {}", names.join(", "))
            };
            // The name is as long as a line may be.
            let shown: String = job.chars().take(control::NAME_MAX_BYTES).collect();
            let message = format!("no job is named `{shown}`");
            let error = ControlError::new(ErrorCode::NoSuchJob, message);
            return Err(error.with_hint(hint));
        };
        let ours = rustix::process::geteuid().as_raw();
        if peer.uid != tenant.uid && peer.uid != 0 && peer.uid != ours {
            let message = format!(
                "job `{job}` belongs to user {}, you are {}",
                tenant.uid, peer.uid
            );
            return Err(ControlError::new(ErrorCode::Permission, message)
                .with_hint("ask its owner, or root"));
        }
        // The users of a container have the numbers of others on the host, root's above all.
        if !tenant.is_in_reach_of(&peer.origin) {
            let (message, hint) = match peer.origin {
                Origin::Unknown => peer.not_seen(),
                _ => (
                    format!("job `{job}` is not of the container that you are in"),
                    "change it on the host",
                ),
            };
            return Err(ControlError::new(ErrorCode::Permission, message).with_hint(hint));
        }
        Ok(tenant)
    }

    fn change(&mut self, job: &str, change: Change, peer: &Peer) -> Result<Reply, ControlError> {
        let tenant = self.tenant_of(job, peer)?;
        if change.is_empty() {
            return Err(
                ControlError::new(ErrorCode::Invalid, "nothing to change").with_hint(
                    "give memory, host memory, overflow, a share or its bounds, a class, a deadline, pause or resume, another size, or the time of a solo iteration",
                ),
            );
        }
        if let Some(fixed) = change.settings.fixed() {
            let message = format!("`{}` of a running job cannot be changed", fixed.key);
            return Err(
                ControlError::new(ErrorCode::Invalid, message).with_hint(format!(
                    "give --{} to `sublet run` when the job is started",
                    fixed.flag()
                )),
            );
        }
        let (id, uid, user) = (tenant.id, tenant.uid, tenant.user.clone());
        let mut spec = tenant.spec.clone();
        let mut asked = change.settings;
        asked.anchor(self.clock.unix_ms());
        spec.own = asked.clone().or(&spec.own);
        spec.paused = change.paused.unwrap_or(spec.paused);
        // Root may go beyond what the configuration allows a user.
        let is_root = peer.is_root() && uid != 0;
        spec.unbound |= is_root && !asked.is_empty();
        let ceiling = if is_root {
            crate::Ceiling::default()
        } else {
            self.rulebook.ceiling(uid, &user)
        };
        if !asked.is_empty() {
            let tenant = self.tenant_of(job, peer)?;
            self.go_by_rules(&mut spec, Whose::of(tenant), true);
        }
        self.admit(&spec, Some(id), (uid, &user, &ceiling))
            .map_err(|refusal| convert::refusal(&refusal))?;
        self.admit_overflow(id, &spec)
            .map_err(|refusal| convert::refusal(&refusal))?;
        let mut fields = convert::settings_fields(&asked);
        fields.extend(change.paused.map(|paused| ("paused", paused.into())));
        if !spec.bounds.capped.is_empty() && !asked.is_empty() {
            let capped = spec.bounds.capped.iter().map(ToString::to_string);
            fields.push(("capped", Value::from(capped.collect::<Vec<_>>())));
        }
        let resize = change.resize.map(|resize| resize.to_string());
        fields.extend(resize.map(|resize| ("resize", resize.into())));
        if let Some(tenant) = self.ledger.get_mut(id) {
            tenant.spec = spec;
        }
        if let Some(resize) = change.resize {
            self.ask_resize(id, resize);
        }
        if let Some(us) = change.solo_iteration_us {
            fields.push(("solo_iteration_us", Value::from(us)));
            // CAST: far below 2^53.
            let iteration_ns = (us > 0).then_some(us as f64 * 1000.0);
            self.profiles
                .set_baseline(job, iteration_ns, self.clock.unix_ms());
        }
        self.publish_limits();
        self.publish_terms();
        self.persistence.mark_old();
        let message = format!("job `{job}` has new terms");
        self.journal
            .write("changed", About::job(job, id.0), message, &fields);
        self.status_of(id)
            .map(|job| Reply::Changed(Box::new(job)))
            .ok_or_else(|| ControlError::new(ErrorCode::NoSuchJob, "the job has ended"))
    }

    /// This node's agent tells which hook it does not listen to, and why.
    fn note_refused_hook(
        &mut self,
        hook: &str,
        reason: &str,
        peer: &Peer,
    ) -> Result<Reply, ControlError> {
        only_ours(peer)?;
        // A part of the reason may be the words of who answered.
        let [hook, reason] = [hook, reason].map(|text| one_line(text, REFUSED_HOOK_CHARS));
        if let Some(left_out) = self.allowances.refused_hook(self.clock.mono_ns()) {
            let message = format!("this node does not obey who answers at {hook}: {reason}");
            let mut fields = vec![("hook", Value::from(hook)), ("reason", reason.into())];
            if left_out > 0 {
                fields.push(("left_out", left_out.into()));
            }
            self.journal
                .write("node_refused_hook", About::NONE, message, &fields);
        }
        Ok(Reply::Noted)
    }

    fn shut_down(&mut self, peer: &Peer) -> Result<Reply, ControlError> {
        only_ours(peer)?;
        tracing::info!("process {} asks for an end", peer.pid);
        self.lifetime.end();
        Ok(Reply::ShuttingDown)
    }
}

/// Rules go by where a process is, and by its number, which may be another process's by now.
fn is_still_where_it_was(peer: &Peer, read: &Identity) -> Result<(), ControlError> {
    let lacking = |_| ControlError::new(ErrorCode::Internal, Descriptors::lack());
    let is_same = match &peer.origin {
        Origin::Container(key) => container::is_in(read, key),
        _ => true,
    };
    let (code, message) = match Origin::of(peer.pid).map_err(lacking)? {
        Origin::Unknown => (ErrorCode::Invalid, "has ended before it was registered"),
        origin if origin == peer.origin && is_same => return Ok(()),
        _ => (
            ErrorCode::Permission,
            "is not where it was when it connected",
        ),
    };
    let message = format!("process {} {message}", peer.pid);
    let error = ControlError::new(code, message);
    Err(error.with_hint("a job registers itself, before it becomes its command"))
}

/// Whether somebody may speak for the whole arbiter: its own user or root.
pub(crate) fn only_ours(peer: &Peer) -> Result<(), ControlError> {
    peer.must_be_of_this_host()?;
    if peer.governs() {
        return Ok(());
    }
    let ours = rustix::process::geteuid().as_raw();
    let message = format!("this arbiter belongs to user {ours}, you are {}", peer.uid);
    Err(ControlError::new(ErrorCode::Permission, message))
}

/// 128 random bits as hexadecimal digits.
fn new_token(clock: &Clock) -> std::io::Result<[u8; TOKEN_BYTES]> {
    let mut random = [0u8; TOKEN_BYTES / 2];
    clock.fill_random(&mut random)?;
    let mut token = [0; TOKEN_BYTES];
    for (digits, byte) in token.chunks_exact_mut(2).zip(random) {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        // PANIC: half a byte is below 16.
        digits[0] = DIGITS[usize::from(byte >> 4)];
        digits[1] = DIGITS[usize::from(byte & 15)];
    }
    Ok(token)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_hook_has_few_and_short_lines_in_the_journal() {
        let place = tempfile::tempdir().expect("directory");
        let dir = control::paths::RuntimeDir::given(place.path().join("run")).expect("absolute");
        let ours = rustix::process::geteuid().as_raw();
        dir.ensure(ours).expect("a directory of our own");
        let options = crate::Options {
            host_nvml: false,
            ..crate::Options::new(dir)
        };
        let mut arbiter = Arbiter::start(options).expect("started");
        let (pid, hook) = (std::process::id(), "http://127.0.0.1:7077");
        let own = Peer::here(pid, ours);
        let reason = format!("two hooks\n\x1b[2J{}", "x".repeat(1 << 20));
        for _ in 0..1000 {
            arbiter
                .note_refused_hook(hook, &reason, &own)
                .expect("noted");
        }
        let other = Peer::here(pid, ours + 1);
        let error = arbiter.note_refused_hook(hook, "no", &other);
        assert_eq!(
            error.map_err(|error| error.code),
            Err(ErrorCode::Permission)
        );
        let events = arbiter.journal.since(0, 0);
        let lines = events.iter().filter(|one| one.kind == "node_refused_hook");
        let lines: Vec<_> = lines.collect();
        assert!((1..100).contains(&lines.len()), "{}", lines.len());
        for line in lines {
            let message = &line.message;
            assert!(message.contains("two hooks  [2J"), "{message}");
            assert!(message.len() < 1000, "{}", message.len());
            assert_eq!(line.fields["hook"], Value::from(hook));
        }
    }

    #[test]
    fn tokens_are_hexadecimal_and_never_the_same() {
        let clock = crate::clock::host();
        let tokens = [new_token(&clock), new_token(&clock)].map(|token| token.expect("random"));
        assert_ne!(tokens[0], tokens[1]);
        assert!(tokens[0].iter().all(u8::is_ascii_hexdigit));
    }
}
