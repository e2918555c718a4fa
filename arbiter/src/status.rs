//! What is reported about the arbiter, its devices and its jobs.

use control::{
    ArbiterStatus, ContainerStatus, DeviceBytes, DeviceStatus, JobDevice, JobState, JobStatus,
    ProcessStatus, SliceMode, UnmanagedProcess,
};
use policy::TenantId;

use crate::convert;
use crate::descriptors;
use crate::dispatch::DeviceScheduler;
use crate::nvml::Readings;
use crate::residency_survey;
use crate::serve::Arbiter;
use crate::spec;
use crate::tenant::Tenant;

/// The container that has registered a job, if one has.
fn container_of(tenant: &Tenant) -> Option<ContainerStatus> {
    let place = &tenant.identity.place;
    (!place.container.is_empty()).then(|| ContainerStatus {
        id: place.container.clone(),
        name: tenant
            .container
            .as_ref()
            .map_or_else(String::new, |one| one.name.clone()),
        runtime: place.runtime.clone(),
        pod: place.pod.clone(),
        is_job: tenant.container.is_some(),
    })
}

impl Arbiter {
    pub(crate) fn status(&self) -> ArbiterStatus {
        ArbiterStatus {
            version: self.rulebook.options().version.clone(),
            pid: std::process::id(),
            uid: rustix::process::geteuid().as_raw(),
            started_unix_ms: self.lifetime.started_unix_ms(),
            uptime_ms: self
                .clock
                .unix_ms()
                .saturating_sub(self.lifetime.started_unix_ms()),
            runtime_dir: self.rulebook.options().dir.path().to_owned(),
            api_socket: self.rulebook.options().dir.api_socket(),
            channel_socket: self.rulebook.options().dir.channel_socket(),
            api_address: self
                .api
                .address()
                .map_or_else(String::new, |at| at.to_string()),
            descriptor_limit: descriptors::limit(),
            embedded: self.rulebook.options().embedded,
            idle_exit_s: self
                .rulebook
                .options()
                .idle_exit
                .map(|after| after.as_secs()),
            host_memory_limit_bytes: self.capacity.books().limit_bytes(),
            host_memory_used_bytes: self.capacity.books().used_bytes(),
            loop_turns: self.lifetime.turns().0,
            loop_lag_ns: self.lifetime.turns().1,
            config: self.rulebook.status(),
            journal_lost: self.journal.lost(),
            devices: self.device_statuses(),
            jobs: self.jobs(),
        }
    }

    /// Living jobs, then those that have ended lately.
    pub(crate) fn jobs(&self) -> Vec<JobStatus> {
        let living = self.ledger.iter().filter_map(|t| self.status_of(t.id));
        living.chain(self.ended.iter().cloned()).collect()
    }

    /// The one of a name: the first one that [`Self::jobs`] lists.
    pub(crate) fn job(&self, name: &str) -> Option<JobStatus> {
        match self.ledger.named(name) {
            Some(tenant) => self.status_of(tenant.id),
            None => self.ended.iter().find(|job| job.name == name).cloned(),
        }
    }

    pub(crate) fn device_statuses(&self) -> Vec<DeviceStatus> {
        let now_ns = self.clock.mono_ns();
        let refreshes = self.discovery.refreshes();
        let statuses = self.devices.iter().map(|(index, device)| {
            let scheduler = self.schedulers.get(index);
            let there: Vec<&Tenant> = self
                .ledger
                .awake()
                .filter(|t| {
                    self.devices
                        .entitled(index, t.spec.settings.devices(), t.spec.simulated)
                })
                .collect();
            let guaranteed = there
                .iter()
                .filter(|tenant| tenant.spec.class() == policy::Class::Guaranteed);
            let holders: Vec<String> = scheduler
                .into_iter()
                .flat_map(|scheduler| scheduler.holding())
                .filter_map(|id| Some(self.ledger.get(id)?.spec.name.clone()))
                .collect();
            let (at_once, reason) = scheduler.map_or((false, ""), |scheduler| scheduler.running());
            let settings = self.settings_of(index);
            // What was measured before the last job went is not what is.
            let readings = if refreshes {
                device.readings
            } else {
                Readings::default()
            };
            DeviceStatus {
                index: u32::try_from(index).unwrap_or(u32::MAX),
                uuid: convert::uuid_text(&device.uuid),
                name: device.name.clone(),
                total_bytes: device.total_bytes,
                used_bytes: device
                    .free_bytes
                    .filter(|_| refreshes)
                    .map(|free| device.total_bytes.saturating_sub(free)),
                reserved_bytes: self.ledger.reserved_bytes(index),
                simulated: device.simulated,
                mode: settings.mode.unwrap_or_default(),
                running: match (at_once, settings.mode) {
                    (false, _) => SliceMode::Exclusive,
                    (true, Some(SliceMode::Lend)) => SliceMode::Lend,
                    (true, _) => SliceMode::Concurrent,
                },
                running_reason: reason.to_owned(),
                policy: settings
                    .policy
                    .as_ref()
                    .map_or_else(|| "stride".into(), ToString::to_string),
                quantum_us: scheduler.map_or(0, |scheduler| u64::from(scheduler.lengths().max_us)),
                quantum_min_us: scheduler
                    .map_or(0, |scheduler| u64::from(scheduler.lengths().min_us)),
                slice_us: scheduler.map_or(0, |scheduler| u64::from(scheduler.slice().0)),
                switch_cost_ns: scheduler.map_or(0, |scheduler| scheduler.slice().1),
                early_wake: settings.early_wake.unwrap_or(false),
                misbehaviour: settings.misbehaviour.unwrap_or_default(),
                set_by_hand: self.rulebook.by_hand(&self.devices, index).is_some(),
                // CAST: at most 64.
                holders_max: settings.holders.unwrap_or(1) as u32,
                holder: holders.first().cloned(),
                holders,
                jobs: there.iter().map(|t| t.spec.name.clone()).collect(),
                share_promised: guaranteed
                    .filter_map(|tenant| tenant.spec.settings.share)
                    .sum(),
                busy_fraction: scheduler.map_or(0.0, |scheduler| scheduler.busy_part(now_ns)),
                busy_ns: scheduler.map_or(0, DeviceScheduler::busy_ns),
                grants: scheduler.map_or(0, DeviceScheduler::grants),
                unmanaged: self.unmanaged(device),
                pressure: self.pressure_on(index),
                power_mw: readings.power_mw.map(u64::from),
                temperature_celsius: readings.temperature_celsius,
                sm_used_fraction: readings
                    .sm_used_percent
                    .map(|percent| f64::from(percent) / 100.0),
            }
        });
        statuses.collect()
    }

    /// Processes that are on the device by NVML's word and have not attached. Empty while no job is
    /// there, for then nobody looks; processes that have ended since the last look are left out.
    fn unmanaged(&self, device: &crate::devices::Device) -> Vec<UnmanagedProcess> {
        if !self.discovery.refreshes() {
            return Vec::new();
        }
        device
            .process_bytes
            .iter()
            .filter(|(pid, _)| !self.clients.has_process(**pid))
            .filter_map(|(pid, used_bytes)| {
                let words = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
                let words: Vec<_> = words
                    .split(|byte| *byte == 0)
                    .filter(|word| !word.is_empty())
                    .map(String::from_utf8_lossy)
                    .collect();
                Some(UnmanagedProcess {
                    pid: *pid,
                    used_bytes: *used_bytes,
                    command: words.join(" "),
                })
            })
            .collect()
    }

    /// A job as it stands.
    pub(crate) fn status_of(&self, id: TenantId) -> Option<JobStatus> {
        let tenant = self.ledger.get(id)?;
        if let Some(status) = tenant.dormant.as_ref().and_then(|one| one.status.as_ref()) {
            let mut status = (**status).clone();
            // Another job may have taken its name.
            status.name.clone_from(&tenant.spec.name);
            status.escaped.clone_from(&tenant.escaped);
            status.escaped_count = tenant.escaped_count;
            return Some(status);
        }
        let now_ns = self.clock.mono_ns();
        let devices: Vec<JobDevice> = (0..self.schedulers.len())
            .filter(|index| {
                let scheduler = &self.schedulers[*index];
                scheduler.usage(id).is_some() || tenant.used_bytes(*index) > 0
            })
            .map(|index| self.job_device(tenant, index, now_ns))
            .collect();
        let usages: Vec<&crate::usage::Usage> = self
            .schedulers
            .iter()
            .filter_map(|scheduler| scheduler.usage(id))
            .collect();
        let (mut busy, mut waits) = (false, false);
        for scheduler in self.schedulers.iter() {
            let standing = scheduler.standing(id);
            busy |= standing.0;
            waits |= standing.1;
        }
        let processes = self.processes(tenant);
        let sum = |of: fn(&JobDevice) -> u64| devices.iter().map(of).fold(0, u64::saturating_add);
        let mean = |of: fn(&JobDevice) -> f64| {
            devices.iter().map(of).sum::<f64>() / devices.len().max(1) as f64
        };
        let mut all = crate::usage::Usage::default();
        for usage in &usages {
            all.contended_ns += usage.contended_ns;
            all.contended_device_ns += usage.contended_device_ns;
        }
        let limits: Vec<u64> = self
            .devices
            .iter()
            .filter(|(at, _)| {
                self.devices
                    .entitled(*at, tenant.spec.settings.devices(), tenant.spec.simulated)
            })
            .filter_map(|(at, _)| tenant.limits[at])
            .collect();
        let record: Vec<_> = self
            .schedulers
            .iter()
            .map(|scheduler| scheduler.record(id, now_ns))
            .collect();
        let demoted = record.iter().find_map(|(demoted, _)| *demoted);
        let turn = self.turn_of(id);
        Some(JobStatus {
            name: tenant.spec.name.clone(),
            id: id.0,
            uid: tenant.uid,
            user: tenant.user.clone(),
            command: tenant.spec.command.clone(),
            class: spec::wire_class(tenant.spec.class()),
            state: match (tenant.clients.is_empty(), busy, waits) {
                // Whether it is dormant or gone is known in a moment, once its processes are
                // counted.
                _ if tenant.dormant.is_some() => JobState::Gone,
                _ if tenant.spec.paused || tenant.spec.evicted => JobState::Paused,
                (true, ..) if devices.is_empty() => JobState::Starting,
                (_, true, _) => JobState::Running,
                (_, _, true) => JobState::Waiting,
                _ => JobState::Idle,
            },
            share_asked: tenant.spec.settings.share,
            share_min: tenant.spec.settings.share_min,
            share_max: tenant.spec.settings.share_max,
            gang: self
                .schedulers
                .iter()
                .any(|scheduler| scheduler.is_gang(id)),
            paused: tenant.spec.paused,
            demoted: demoted.map(|violation| violation.text()),
            misbehaved_count: record.iter().map(|(_, count)| count).sum(),
            deadline_unix_ms: tenant.spec.settings.deadline_unix_ms(),
            work_ns: tenant.spec.settings.work.map(control::Span::nanos),
            latency: self.latency_of(tenant).map(Box::new),
            share_got_recent: mean(|device| device.share_got_recent),
            share_got_total: mean(|device| device.share_got_total),
            share_got_contended: all.share_contended(),
            contended_ns: all.contended_ns,
            mem_limit_bytes: (!limits.is_empty()).then(|| limits.iter().sum()),
            mem_used_bytes: sum(|device| device.mem_used_bytes),
            mem_peak_bytes: sum(|device| device.mem_peak_bytes),
            unattributed_bytes: sum(|device| device.unattributed_bytes),
            holding: devices.iter().any(|device| device.holding),
            in_flight_marks: Some(self.in_flight_marks(tenant)),
            device_time_ns: sum(|device| device.device_time_ns),
            wait_time_ns: sum(|device| device.wait_time_ns),
            overrun_ns: usages.iter().map(|usage| usage.overrun_ns).sum(),
            launches: processes.iter().fold(tenant.launches_gone, |sum, process| {
                sum.saturating_add(process.launches)
            }),
            grants: usages.iter().map(|usage| usage.grants).sum(),
            oom_count: tenant.oom_count,
            oom_largest_bytes: tenant.oom_largest_bytes,
            oom_limit_bytes: tenant.oom_limit_bytes,
            started_unix_ms: tenant.started_unix_ms,
            simulated: tenant.spec.simulated,
            on_arbiter_loss: tenant.spec.settings.on_arbiter_loss.unwrap_or_default(),
            evictable: tenant.spec.evictable(),
            overflow: tenant.spec.overflow(),
            evict_after_ns: tenant.spec.settings.evict_after.map(control::Span::nanos),
            host_memory_limit_bytes: self.ledger.host_limit_bytes(&tenant.spec),
            evicted: tenant.spec.evicted,
            residence: residency_survey::sum(devices.iter().filter_map(|d| d.residence.as_ref()))
                .map(Box::new),
            devices,
            processes,
            profile: Some(Box::new(self.profiles.of(id, &tenant.spec.name))),
            escaped: tenant.escaped.clone(),
            escaped_count: tenant.escaped_count,
            dormant_processes: None,
            listens_for_resize: self.listens_for_resize(tenant),
            resize: self.resize_status(tenant),
            container: container_of(tenant),
            capped: tenant.spec.bounds.capped.clone(),
            turn: turn.as_ref().map(|(_, turn)| *turn),
            group: turn.map(|(group, _)| group),
        })
    }

    /// Of all its processes and devices.
    fn in_flight_marks(&self, tenant: &Tenant) -> u64 {
        let clients = tenant.clients.iter().filter_map(|id| self.clients.get(*id));
        clients
            .flat_map(|client| {
                (0..self.schedulers.len()).map(|device| client.pages.client.in_flight(device).marks)
            })
            .fold(0, u64::saturating_add)
    }

    fn job_device(&self, tenant: &Tenant, index: usize, now_ns: u64) -> JobDevice {
        let device = self.devices.get(index);
        let scheduler = &self.schedulers[index];
        let usage = scheduler.usage(tenant.id).cloned().unwrap_or_default();
        let used = tenant.used_bytes(index);
        // What NVML counts for the job's processes and nobody asked for: contexts, code,
        // workspaces.
        let physical: u64 = tenant
            .clients
            .iter()
            .filter_map(|id| self.clients.get(*id))
            .filter_map(|client| device?.process_bytes.get(&client.pid))
            .sum();
        JobDevice {
            index: u32::try_from(index).unwrap_or(u32::MAX),
            uuid: device.map_or_else(String::new, |device| convert::uuid_text(&device.uuid)),
            share_got_recent: usage.recent.part(now_ns),
            share_got_total: usage.share_total(now_ns),
            mem_limit_bytes: tenant.limits[index],
            mem_used_bytes: used,
            mem_peak_bytes: tenant.peak_bytes(index),
            unattributed_bytes: physical.saturating_sub(used),
            holding: scheduler.holding().any(|id| id == tenant.id),
            device_time_ns: usage.device_ns,
            wait_time_ns: usage.wait_ns,
            residence: self.residence_on(tenant, index),
        }
    }

    fn processes(&self, tenant: &Tenant) -> Vec<ProcessStatus> {
        let clients = tenant.clients.iter().filter_map(|id| self.clients.get(*id));
        let mut all: Vec<ProcessStatus> = clients
            .map(|client| ProcessStatus {
                pid: client.pid,
                command: client.command.clone(),
                attached_unix_ms: client.attached_unix_ms,
                launches: client.launches(),
                mem_used_bytes: (0..self.schedulers.len())
                    .map(|index| tenant.accounts.slot_bytes(client.slot, index))
                    .fold(0, u64::saturating_add),
                ungoverned: client.ungoverned.iter().map(convert::uuid_text).collect(),
                followed_by: convert::followed_by(client.pages.client.following()),
            })
            .collect();
        // A process that read NVML before it used the driver has attached twice; it is one process.
        let mut seen = std::collections::BTreeMap::new();
        let mut at = 0;
        while at < all.len() {
            match seen.get(&all[at].pid) {
                None => {
                    seen.insert(all[at].pid, at);
                    at += 1;
                }
                Some(first) => {
                    let again = all.remove(at);
                    let first: &mut ProcessStatus = &mut all[*first];
                    first.launches = first.launches.saturating_add(again.launches);
                    first.mem_used_bytes =
                        first.mem_used_bytes.saturating_add(again.mem_used_bytes);
                    first.ungoverned.extend(again.ungoverned);
                    first.followed_by = first.followed_by.take().or(again.followed_by);
                }
            }
        }
        all
    }

    /// The limits of a job on its devices, as far as they are known.
    pub(crate) fn limits_of(&self, id: TenantId) -> Vec<DeviceBytes> {
        let Some(tenant) = self.ledger.get(id) else {
            return Vec::new();
        };
        let own = self.devices.iter().filter(|(index, _)| {
            self.devices.entitled(
                *index,
                tenant.spec.settings.devices(),
                tenant.spec.simulated,
            )
        });
        own.filter_map(|(index, _)| {
            Some(DeviceBytes {
                device: u32::try_from(index).ok()?,
                bytes: tenant.limits[index]?,
            })
        })
        .collect()
    }

    /// The share of a job: what it asked for, or the part of the rest that falls to it now; 0 where
    /// none is promised.
    pub(crate) fn share_of(&self, id: TenantId) -> f64 {
        let Some(tenant) = self.ledger.get(id) else {
            return 0.0;
        };
        if tenant.spec.class() == policy::Class::Opportunistic {
            return 0.0;
        }
        tenant.spec.settings.share.unwrap_or_else(|| {
            let shares = self.devices.iter().filter_map(|(index, _)| {
                let terms = self.ledger.terms(&self.devices, index, &self.clock);
                let own = terms.iter().find(|(tenant, _)| *tenant == id)?;
                Some(f64::from(own.1.weight_ppm) / 1e6)
            });
            shares.reduce(f64::min).unwrap_or(0.0)
        })
    }
}
