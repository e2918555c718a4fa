//! Jobs get devices that this arbiter has, and their users hear who else has them.

use std::collections::BTreeSet;

use control::paths::RUNTIME_DIR_VAR;
use control::{ControlError, DeviceSelector, ErrorCode, JobSpec, Request};

use crate::claims::{Claimed, Other};
use crate::clock;
use crate::convert;
use crate::serve::Arbiter;
use crate::spec::Spec;

/// Slows the simulated GPU down, and the arbiter with it.
const DILATION: &str = "SUBLET_SIM_DILATION";

impl Arbiter {
    /// Whether it is known who has the devices that a job may use; asks where not.
    pub(crate) fn knows_claims_of(&mut self, job: &JobSpec) -> bool {
        let now_ns = self.clock.mono_ns();
        let devices = self.claimed(job.settings.devices(), job.simulated);
        let mut known = true;
        for (_, device) in devices {
            known &= self.claims.is_known(&device, now_ns);
        }
        known
    }

    /// Nobody has said in time who has the devices of a job: it goes on as if they were free.
    pub(crate) fn give_up_claims(&mut self, job: &JobSpec) {
        let now_ns = self.clock.mono_ns();
        for (_, device) in self.claimed(job.settings.devices(), job.simulated) {
            self.claims.give_up(&device, now_ns);
        }
    }

    /// Claims what jobs and registrations that wait may use, and gives up what none of them may,
    /// where that may have changed.
    pub(crate) fn settle_claims(&mut self, now_ns: u64) {
        if !self.claims.is_due(now_ns) {
            return;
        }
        let jobs = self.ledger.iter();
        let jobs = jobs.map(|t| (t.spec.settings.devices(), t.spec.simulated));
        let waiting = self.parked.iter().filter_map(|ask| match &ask.request {
            Request::Register(job) => Some((job.settings.devices(), job.simulated)),
            _ => None,
        });
        let needed: BTreeSet<Claimed> = jobs
            .chain(waiting)
            .flat_map(|(devices, simulated)| self.claimed(devices, simulated))
            .map(|(_, device)| device)
            .collect();
        self.claims.settle(&needed, now_ns);
    }

    /// Devices were claimed, or others have them.
    pub(crate) fn on_claims(&mut self, now_ns: u64) {
        for (device, standing) in self.claims.take(now_ns) {
            let uuid = convert::uuid_text(device.uuid());
            if let Some(other) = &standing.taken {
                tracing::warn!("{}", taken(&uuid, other));
            }
            if standing.unanswered {
                tracing::warn!(
                    "a program that does not answer has the name by which arbiters of yours would find each other for {uuid}: another one may have the device unnoticed (`ss -xlp` as root shows whose program it is)"
                );
            }
            for other in &standing.shared {
                tracing::warn!("{}", shared(&uuid, other));
            }
        }
        self.unpark();
        self.settle_claims(now_ns);
    }

    /// A job whose device another arbiter of the same user has is refused here.
    ///
    /// # Errors
    /// That, with the way out.
    pub(crate) fn must_have_devices_of(&self, spec: &Spec) -> Result<(), ControlError> {
        self.must_be_as_slow(spec)?;
        for (uuid, device) in self.claimed(spec.settings.devices(), spec.simulated) {
            let standing = self.claims.of(&device);
            if let Some(other) = standing.and_then(|standing| standing.taken.as_ref()) {
                let hint = match &other.dir {
                    Some(dir) if other.serves => format!(
                        "use that one: set {RUNTIME_DIR_VAR}={dir}; or end it with `{RUNTIME_DIR_VAR}={dir} sublet arbiter --stop`",
                        dir = dir.display()
                    ),
                    _ if other.pid == 0 => {
                        "it runs in another PID namespace: end it there; jobs that run under it go on".into()
                    }
                    // Its directory was removed with what is above it, or it stands still.
                    _ => format!(
                        "it cannot be reached: end it with `kill {}`; jobs that run under it go on",
                        other.pid
                    ),
                };
                let error = ControlError::new(ErrorCode::Refused, taken(&uuid, other));
                return Err(error.with_hint(hint));
            }
        }
        Ok(())
    }

    /// Whether the devices of a job go by the same clock as this arbiter: a simulated one may be
    /// slower than the device it stands for, a real one cannot.
    ///
    /// # Errors
    /// They do not.
    fn must_be_as_slow(&self, spec: &Spec) -> Result<(), ControlError> {
        let ours = clock::dilation();
        let refused = |message: String, hint: &str| {
            Err(ControlError::new(ErrorCode::Refused, message).with_hint(hint))
        };
        if !spec.simulated && ours != 1 {
            let message = format!(
                "this arbiter runs with {DILATION}={ours}, which is for the simulated GPU alone, and the job is for a real one"
            );
            return refused(message, "use an arbiter of its own for the simulation");
        }
        let devices = self.devices.iter();
        let other = devices
            .filter(|(at, device)| {
                device.by_nvml
                    && self
                        .devices
                        .entitled(*at, spec.settings.devices(), spec.simulated)
            })
            .find(|(_, device)| device.dilation != ours);
        match other {
            Some((_, device)) => refused(
                format!(
                    "the times of {} are multiplied by {} ({DILATION}), those of this arbiter by {ours}",
                    device.name, device.dilation
                ),
                "start the arbiter and the processes that use the simulated GPU with the same value",
            ),
            None => Ok(()),
        }
    }

    /// What the user of a job is to hear of others who have its devices.
    pub(crate) fn notices_for(&self, spec: &Spec) -> Vec<String> {
        let devices = self.claimed(spec.settings.devices(), spec.simulated);
        let mut notices = Vec::new();
        for (uuid, device) in devices {
            let others = self.claims.of(&device).map(|standing| &standing.shared);
            notices.extend(
                others
                    .into_iter()
                    .flatten()
                    .map(|other| shared(&uuid, other)),
            );
        }
        notices
    }

    /// The devices that a job may use and that more than clients vouch for.
    fn claimed(&self, selectors: &[DeviceSelector], simulated: bool) -> Vec<(String, Claimed)> {
        let devices = self.devices.iter().filter(|(index, device)| {
            device.by_nvml && self.devices.entitled(*index, selectors, simulated)
        });
        devices
            .map(|(_, device)| {
                let claimed = Claimed::new(device.uuid, device.simulated);
                (convert::uuid_text(&device.uuid), claimed)
            })
            .collect()
    }
}

fn taken(uuid: &str, other: &Other) -> String {
    let dir = other.dir.as_ref();
    let place = dir.map_or_else(String::new, |dir| format!(", serves {}", dir.display()));
    format!(
        "another arbiter of user {} (process {}{place}) has {uuid}: neither would know of the other's jobs",
        other.uid, other.pid
    )
}

fn shared(uuid: &str, other: &Other) -> String {
    let way_out = if other.uid == 0 {
        format!("unset {RUNTIME_DIR_VAR} to use the host's arbiter")
    } else {
        "have root start one for all users (`systemctl enable --now sublet.socket`, or `sublet arbiter`)".into()
    };
    format!(
        "an arbiter of user {} (process {}) has {uuid} as well: neither knows of the other's jobs, so shares and quotas hold among your own only; {way_out}",
        other.uid, other.pid
    )
}
