//! The daemon's residency work, ten times a second: how much memory devices and host have for it,
//! what each client may hold, and the reports about it.

use control::{Pressure, PressureLevel, Residence, ResidenceState};
use host_memory::Memory;
use policy::coordinator::Cause;
use policy::residency::{Level, Standing};
use policy::{Class, TenantId};
use serde_json::Value;

use crate::dispatch::DeviceScheduler;
use crate::journal::About;
use crate::refusal::Refusal;
use crate::residency::{News, ResidencyStatus, State};
use crate::serve::Arbiter;
use crate::spec::Spec;
use crate::tenant::Tenant;

/// Where nothing is said: this part of the host's memory is for what is not on the devices.
const HOST_PART: f64 = 0.5;
/// NVML's figures are as old as this at most; a footprint that has changed since does not fit them.
const SETTLED_NS: u64 = 1_000_000_000;

impl Arbiter {
    /// Takes over what the configuration says, and what the host has.
    pub(crate) fn set_up_residency(&mut self) {
        let host = Memory::of_this_host();
        let total_bytes = host.map_or(0, |memory| memory.total_bytes);
        let limit = self.rulebook.options().residency.host_memory;
        let limit_bytes = limit.map_or_else(
            || control::MemLimit::Percent(HOST_PART * 100.0).resolve(total_bytes),
            |limit| limit.resolve(total_bytes),
        );
        self.ledger.set_host_memory(total_bytes, limit_bytes);
        self.capacity.set_host_limit(limit_bytes);
        self.capacity.note_host(host);
    }

    /// Looks at devices, clients and news.
    pub(crate) fn survey_residency(&mut self, now_ns: u64) {
        if self.ledger.iter().any(|tenant| tenant.spec.evictable()) {
            self.survey_devices(now_ns);
            if self
                .schedulers
                .iter()
                .any(|scheduler| scheduler.crowd().is_crowded)
            {
                self.capacity.note_host(Memory::of_this_host());
            }
            self.publish_budgets();
        }
        self.publish_waits();
        for at in 0..self.schedulers.len() {
            for news in self.schedulers[at].take_residency_news() {
                self.tell_residency(at, news);
            }
        }
    }

    /// Reads what jobs hold, and says it to those who go by it.
    pub(crate) fn read_accounts(&mut self) {
        self.ledger.read_accounts();
        // What stays takes space as well.
        for tenant in self.ledger.iter() {
            for (index, scheduler) in self.schedulers.iter_mut().enumerate() {
                let held = (tenant.used_bytes(index), tenant.settled_bytes(index));
                scheduler.note_memory(tenant.id, held, tenant.limits[index]);
            }
        }
    }

    fn survey_devices(&mut self, now_ns: u64) {
        let ratio = self.rulebook.options().residency.slice_over_switch;
        for (index, scheduler) in self.schedulers.iter_mut().enumerate() {
            let Some(device) = self.devices.get(index) else {
                continue;
            };
            let mut booked = 0u64;
            for tenant in self.ledger.iter() {
                let used = tenant.used_bytes(index);
                let away = scheduler
                    .residency_status(tenant.id)
                    .map_or(0, |residency_status| {
                        let evictable_bytes = residency_status.evictable_bytes;
                        evictable_bytes.saturating_sub(residency_status.resident_bytes)
                    });
                // A claim of more than there is hides nothing but itself.
                let on_device = used.saturating_sub(away).min(device.total_bytes);
                booked = booked.saturating_add(on_device);
            }
            let calm = !scheduler.has_moved(now_ns.saturating_sub(SETTLED_NS));
            if let Some(free) = device.free_bytes.filter(|_| calm) {
                let gone = device.total_bytes.saturating_sub(free);
                self.capacity.note_device(index, gone, booked);
            }
            let (total, reserved) = (device.total_bytes, self.ledger.reserved_bytes(index));
            let capacity = self.capacity.of_device(index, total, reserved);
            scheduler.set_up_residency(ratio, self.capacity.shared_books(), capacity);
            let ceiling = total.saturating_sub(reserved);
            scheduler.set_ceiling(ceiling, self.capacity.taken_ns(index));
        }
    }

    /// Writes to every client of an evictable job how much host memory it may hold: what the others
    /// leave. And whether to make it ready: where the jobs of a device do not fit together, and the
    /// host can hold what all of them have, so that nobody's eviction finds it taken.
    fn publish_budgets(&self) {
        let books = self.capacity.books();
        let evictable: u64 = self
            .schedulers
            .iter()
            .map(|scheduler| scheduler.crowd().evictable_bytes)
            .fold(0, u64::saturating_add);
        let ready = books.could_hold(evictable);
        for (id, client) in self.clients.iter() {
            let Some(tenant) = self.ledger.get(client.tenant) else {
                continue;
            };
            if !tenant.spec.evictable() {
                continue;
            }
            let own = self.ledger.host_limit_bytes(&tenant.spec);
            let budget = books.budget_bytes(id, tenant.id, own);
            let half = &client.pages.arbiter;
            // What shrinks goes to other host memory than what is evicted.
            let crowded = self.schedulers.iter().any(|scheduler| {
                scheduler.crowd().is_crowded
                    && scheduler
                        .residency_status(client.tenant)
                        .is_some_and(|residency_status| !residency_status.shrinks)
            });
            let mode = channel::ResidencyMode {
                prepare: ready && crowded,
                ..mode_of(tenant)
            };
            half.set_residency(mode, Some(budget));
        }
    }

    /// Writes to every client of a guaranteed job whose memory stays whether others shrink for it:
    /// then an allocation for which the device has no space waits.
    fn publish_waits(&self) {
        for (_, client) in self.clients.iter() {
            let Some(tenant) = self.ledger.get(client.tenant) else {
                continue;
            };
            if tenant.spec.evictable() {
                continue;
            }
            let half = &client.pages.arbiter;
            let mode = self.mode_of_fixed(tenant);
            if half.residency() != mode {
                half.set_residency(mode, None);
                // Who waits for what nobody will leave is to know.
                half.nudge();
            }
        }
    }

    /// Of a job whose memory stays.
    fn mode_of_fixed(&self, tenant: &Tenant) -> channel::ResidencyMode {
        let devices = tenant.spec.settings.devices();
        let gives = |(index, scheduler): (usize, &DeviceScheduler)| {
            scheduler.gives_space() && self.devices.entitled(index, devices, tenant.spec.simulated)
        };
        channel::ResidencyMode {
            waits: tenant.spec.class() == Class::Guaranteed
                && self.schedulers.iter().enumerate().any(gives),
            ..channel::ResidencyMode::default()
        }
    }

    /// Before a client is welcomed: whether its memory may leave the device has to be known at its
    /// first allocation.
    pub(crate) fn introduce_residency(
        &self,
        tenant: TenantId,
        pages: &channel::arbiter::ClientPages,
    ) {
        let Some(tenant) = self.ledger.get(tenant) else {
            return;
        };
        if !tenant.spec.evictable() {
            pages
                .arbiter
                .set_residency(self.mode_of_fixed(tenant), None);
            return;
        }
        let own = self.ledger.host_limit_bytes(&tenant.spec);
        let budget = self.capacity.books().budget_bytes(0, tenant.id, own);
        pages.arbiter.set_residency(mode_of(tenant), Some(budget));
        pages.arbiter.ask_before_pinning();
    }

    /// Whether host memory can take what a job has beyond its new limits.
    pub(crate) fn admit_overflow(&self, id: TenantId, spec: &Spec) -> Result<(), Refusal> {
        if spec.overflow() != control::Overflow::Host {
            return Ok(());
        }
        let Some(tenant) = self.ledger.get(id) else {
            return Ok(());
        };
        let own = self.ledger.host_limit_bytes(spec);
        let books = self.capacity.books();
        for (index, scheduler) in self.schedulers.iter().enumerate() {
            let Some(limit) = self.ledger.limit_bytes(spec, &self.devices, index) else {
                continue;
            };
            let Some(residency_status) = scheduler.residency_status(id) else {
                continue;
            };
            let on_device = residency_status
                .fixed_bytes
                .saturating_add(residency_status.resident_bytes);
            let needed = on_device.saturating_sub(limit);
            let available = books
                .left_bytes(id, own)
                .min(residency_status.resident_bytes);
            if needed > available {
                return Err(Refusal::Overflow {
                    used: on_device.max(tenant.used_bytes(index)),
                    limit,
                    needed,
                    available,
                });
            }
        }
        Ok(())
    }

    fn tell_residency(&mut self, device: usize, news: News) {
        let (id, kind, reported, mut fields) = match news {
            News::NotMoved { id, verb, why } => {
                let (kind, verb) = match verb {
                    channel::Verb::Evict => ("not_evicted", "evicted"),
                    channel::Verb::Restore => ("not_restored", "restored"),
                    channel::Verb::Fit => ("not_fitted", "fitted to its limit"),
                };
                let reported = format!("could not be {verb} on device {device}: {why}");
                (id, kind, reported, vec![("reason", Value::from(why))])
            }
            News::Fitted {
                id,
                from_bytes,
                to_bytes,
                cause,
            } => {
                let (kind, verb) = if to_bytes < from_bytes {
                    ("shrunk", "shrinks")
                } else {
                    ("grown", "grows")
                };
                let why = self.cause_text(cause);
                let [from, to] = [from_bytes, to_bytes].map(control::short_bytes);
                let reported = format!("{verb} on device {device} from {from} to {to}: {why}");
                let fields = vec![
                    ("from_bytes", Value::from(from_bytes)),
                    ("to_bytes", Value::from(to_bytes)),
                    ("reason", Value::from(why)),
                ];
                (id, kind, reported, fields)
            }
            News::Parked { id, parked: true } => {
                let reported =
                    format!("is parked: device {device} spends too much of its time moving memory");
                (id, "parked", reported, Vec::new())
            }
            News::Parked { id, parked: false } => {
                let reported = format!("takes turns on device {device} again");
                (id, "unparked", reported, Vec::new())
            }
        };
        fields.push(("device", Value::from(device)));
        let Some(tenant) = self.ledger.get_mut(id) else {
            return;
        };
        // A job that cannot be moved is tried again and again.
        if tenant.allowance.spend(self.clock.mono_ns()).is_some() {
            let name = tenant.spec.name.clone();
            let message = format!("job `{name}` {reported}");
            self.journal
                .write(kind, About::job(&name, id.0), message, &fields);
        }
    }

    /// For people.
    fn cause_text(&self, cause: Cause) -> String {
        match cause {
            Cause::Waits(id) => match self.ledger.get(id) {
                Some(tenant) => format!(
                    "guaranteed job `{}` waits for memory of the device",
                    tenant.spec.name
                ),
                None => "a guaranteed job waited for memory of the device".into(),
            },
            Cause::Low => "little memory of the device is free for guaranteed jobs".into(),
            Cause::Calm => "guaranteed jobs leave enough again".into(),
            Cause::Fair => "other opportunistic jobs have use for as much".into(),
        }
    }

    /// Where a job's memory on a device is, for reports.
    pub(crate) fn residence_on(&self, tenant: &Tenant, index: usize) -> Option<Residence> {
        if !tenant.spec.evictable() {
            return None;
        }
        let scheduler = self.schedulers.get(index)?;
        let Some(residency_status) = scheduler.residency_status(tenant.id) else {
            return Some(Residence {
                reason: "no process of it has attached".into(),
                ..Residence::default()
            });
        };
        let reason = match residency_status.standing {
            Standing::KeptAway if tenant.turn.is_away && !tenant.spec.evicted => {
                "another job of its group has the turn, or had it last".into()
            }
            _ => match residency_status.shrunk_to {
                Some((bytes, cause)) if !residency_status.figures.failed => format!(
                    "shrunk to {}: {}",
                    control::short_bytes(bytes),
                    self.cause_text(cause)
                ),
                _ => match (why(&residency_status), tenant.spec.settings.evict_after) {
                    (words, Some(after))
                        if words.is_empty() && residency_status.state == State::Evicted =>
                    {
                        format!(
                            "idle for {} (evict_after): it comes back when it is used",
                            control::short_span(after.0)
                        )
                    }
                    (words, _) => words,
                },
            },
        };
        let figures = &residency_status.figures;
        Some(Residence {
            state: wire_state(residency_status.state),
            evictable_bytes: residency_status.evictable_bytes,
            resident_bytes: residency_status.resident_bytes,
            // While it is away the charge says nothing about what has stayed.
            fixed_bytes: residency_status.fixed_bytes,
            staying: kinds_of(residency_status.staying),
            host_bytes: residency_status.host_bytes,
            moved_out_bytes: residency_status.moved_out_bytes,
            moved_in_bytes: residency_status.moved_in_bytes,
            evictions: figures.evictions,
            restores: figures.restores,
            moving_ns: figures.moving_ns,
            parked: residency_status.parked,
            reason,
        })
    }

    /// How much of a device's time goes into moving memory.
    pub(crate) fn pressure_on(&self, index: usize) -> Pressure {
        let Some(scheduler) = self.schedulers.get(index) else {
            return Pressure::default();
        };
        let arbitration = scheduler.arbitration();
        let pressure = arbitration.pressure();
        let (switches, switching_ns) = pressure.totals();
        Pressure {
            level: match pressure.level() {
                Level::Calm => PressureLevel::Calm,
                Level::Pressed => PressureLevel::Pressed,
                Level::Thrashing => PressureLevel::Thrashing,
            },
            switching_fraction: pressure.fraction(),
            switches,
            switching_ns,
            stretch: pressure.stretch(),
            out_bytes_per_s: arbitration.link.out.saturating_mul(1_000_000),
            in_bytes_per_s: arbitration.link.back.saturating_mul(1_000_000),
        }
    }

    /// Books that a new scheduler shares with the others.
    pub(crate) fn set_up_residency_of(&mut self, index: usize) {
        let ratio = self.rulebook.options().residency.slice_over_switch;
        let total = self.devices.get(index).map_or(0, |d| d.total_bytes);
        let reserved = self.ledger.reserved_bytes(index);
        let capacity = self.capacity.of_device(index, total, reserved);
        if let Some(scheduler) = self.schedulers.get_mut(index) {
            scheduler.set_up_residency(ratio, self.capacity.shared_books(), capacity);
        }
    }
}

fn mode_of(tenant: &Tenant) -> channel::ResidencyMode {
    channel::ResidencyMode {
        evictable: tenant.spec.evictable(),
        overflow: tenant.spec.overflow() == control::Overflow::Host,
        ..channel::ResidencyMode::default()
    }
}

/// All devices of a job together.
pub(crate) fn sum<'a>(residences: impl Iterator<Item = &'a Residence>) -> Option<Residence> {
    let rank = |state: ResidenceState| match state {
        ResidenceState::Failed => 5,
        ResidenceState::Evicting => 4,
        ResidenceState::Restoring => 3,
        ResidenceState::Evicted => 2,
        ResidenceState::Partly => 1,
        _ => 0,
    };
    residences.cloned().reduce(|mut all, one| {
        if rank(one.state) > rank(all.state) {
            all.state = one.state;
        }
        if all.reason.is_empty() {
            all.reason = one.reason;
        }
        all.parked |= one.parked;
        for kind in one.staying {
            if !all.staying.contains(&kind) {
                all.staying.push(kind);
            }
        }
        for (sum, more) in [
            (&mut all.evictable_bytes, one.evictable_bytes),
            (&mut all.resident_bytes, one.resident_bytes),
            (&mut all.fixed_bytes, one.fixed_bytes),
            (&mut all.host_bytes, one.host_bytes),
            (&mut all.moved_out_bytes, one.moved_out_bytes),
            (&mut all.moved_in_bytes, one.moved_in_bytes),
            (&mut all.evictions, one.evictions),
            (&mut all.restores, one.restores),
            (&mut all.moving_ns, one.moving_ns),
        ] {
            *sum = sum.saturating_add(more);
        }
        all
    })
}

fn wire_state(state: State) -> ResidenceState {
    match state {
        State::Resident => ResidenceState::Resident,
        State::Evicting => ResidenceState::Evicting,
        State::Evicted => ResidenceState::Evicted,
        State::Restoring => ResidenceState::Restoring,
        State::Partly => ResidenceState::Partly,
        State::Failed => ResidenceState::Failed,
    }
}

/// Names of kinds of memory.
fn kinds_of(bits: u8) -> Vec<String> {
    let names = channel::STAYING.iter().enumerate();
    names
        .filter(|(bit, _)| bits >> bit & 1 != 0)
        .map(|(_, name)| (*name).to_owned())
        .collect()
}

fn why(residency_status: &ResidencyStatus) -> String {
    let staying = kinds_of(residency_status.staying).join(", ");
    let figures = &residency_status.figures;
    match residency_status.standing {
        Standing::KeptAway => "evicted by hand: `sublet restore` brings it back".into(),
        Standing::Parked => {
            "parked: it comes back when there is space without evicting anybody".into()
        }
        Standing::TooLarge {
            needed_bytes,
            available_bytes,
        } => format!(
            "it needs {} and the device has {} once the others have left",
            control::short_bytes(needed_bytes),
            control::short_bytes(available_bytes)
        ),
        _ if figures.failed => figures.reason.clone(),
        Standing::Waits(_) => "waits for the end of another job's term".into(),
        _ if residency_status.evictable_bytes == 0 && staying.is_empty() => {
            "nothing that it holds can be evicted".into()
        }
        _ if residency_status.evictable_bytes == 0 => {
            format!("nothing that it holds can be evicted: {staying}")
        }
        _ if !staying.is_empty() => format!("stays: {staying}"),
        _ => String::new(),
    }
}
