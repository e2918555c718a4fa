//! How devices are run, as the quota file says and as operators change it while jobs run.
//!
//! What is set by hand lies over the file's rules, outlives this process (`state.json`) and gives
//! way when the file is read again. Invalid settings are refused before anything has changed.

use std::io;
use std::os::fd::BorrowedFd;

use control::kinds::Quantum;
use control::{
    ControlError, DeviceSelector, DeviceSettings, DeviceStatus, ErrorCode, PolicyChoice, Reloaded,
    Reply, Settings, SliceMode,
};
use serde_json::Value;

use crate::background::Background;
use crate::control_server::Peer;
use crate::convert;
use crate::dispatch::Setup;
use crate::options::{Reload, Rules};
use crate::serve::Arbiter;
use crate::state::SavedDevice;

/// Bytes of a policy with its parameters, as people write it.
const MAX_POLICY_BYTES: usize = 1024;

/// Requests to read the quota file that wait at a time.
const MAX_RELOADS: usize = 64;

/// What was read, and the connection that waits for it.
type Read = (Result<Rules, String>, Option<u64>);

/// The thread that reads the quota file again.
pub(crate) struct RulesReader {
    reads: Background<Option<u64>, Read>,
}

impl RulesReader {
    pub fn start(read: Reload) -> io::Result<Self> {
        // Each request has a read of its own that begins after it.
        let reads =
            Background::start("rules", MAX_RELOADS, move |connection| (read(), connection))?;
        Ok(Self { reads })
    }

    pub fn bell(&self) -> BorrowedFd<'_> {
        self.reads.bell()
    }

    fn ask(&mut self, connection: Option<u64>) -> bool {
        self.reads.ask(connection)
    }

    fn take(&mut self) -> Vec<Read> {
        self.reads.take()
    }
}

impl Arbiter {
    /// The settings in force on a device: what was set by hand, then the first rule of the file
    /// that matches.
    pub(crate) fn settings_of(&self, index: usize) -> DeviceSettings {
        let rule = self.rule_of(index).map(|rule| rule.settings.clone());
        let rule = rule.unwrap_or_default();
        match self.by_hand_of(index) {
            Some(by_hand) => by_hand.clone().or(&rule),
            None => rule,
        }
    }

    /// What was set on a device by hand.
    pub(crate) fn by_hand_of(&self, index: usize) -> Option<&DeviceSettings> {
        self.by_hand.get(&self.devices.get(index)?.uuid)
    }

    /// Changes devices, all or none.
    pub(crate) fn change_devices(
        &mut self,
        device: Option<&DeviceSelector>,
        change: DeviceSettings,
        peer: Peer,
    ) -> Result<Reply, ControlError> {
        self.may_govern(peer)?;
        if change.is_empty() {
            return Err(ControlError::new(ErrorCode::Invalid, "nothing to change")
                .with_hint("give a mode, a policy, a quantum, early wake or misbehaviour"));
        }
        if let Some(fixed) = change.fixed() {
            let message = format!("`{}` cannot be changed while devices are in use", fixed.key);
            return Err(ControlError::new(ErrorCode::Invalid, message)
                .with_hint("write it into [[device]] of the quota file"));
        }
        let indices: Vec<usize> = (0..self.devices.iter().count())
            .filter(|index| {
                device.is_none_or(|device| {
                    [false, true]
                        .into_iter()
                        .any(|simulated| self.devices.answers(*index, device, simulated))
                })
            })
            .collect();
        if indices.is_empty() {
            let known: Vec<String> = self
                .devices
                .iter()
                .map(|(index, device)| format!("{index} ({})", convert::uuid_text(&device.uuid)))
                .collect();
            let message = match device {
                Some(device) => format!("no device answers to `{device}`"),
                None => "no device is known yet".into(),
            };
            let hint = if known.is_empty() {
                "devices are known once a job uses them".into()
            } else {
                format!("there are {}", known.join(", "))
            };
            return Err(ControlError::new(ErrorCode::NoSuchDevice, message).with_hint(hint));
        }
        for index in &indices {
            check(&change.clone().or(&self.settings_of(*index)))?;
        }
        for index in &indices {
            let Some(device) = self.devices.get(*index) else {
                continue;
            };
            let uuid = device.uuid;
            let before = self.by_hand.remove(&uuid).unwrap_or_default();
            self.by_hand.insert(uuid, change.clone().or(&before));
            self.run_as_set(*index);
        }
        self.persistence.mark_old();
        for index in &indices {
            let fields = described(*index, &change);
            let message = format!("device {index} is run anew");
            self.journal.write("device", "", message, &fields);
        }
        let statuses = self.device_statuses();
        let changed = indices.iter().filter_map(|index| statuses.get(*index));
        Ok(Reply::Devices(
            changed.cloned().collect::<Vec<DeviceStatus>>(),
        ))
    }

    /// Reads the quota file again, for an operator.
    /// It is answered when the file was read.
    pub(crate) fn reload_for(&mut self, connection: u64, peer: Peer) -> Result<(), ControlError> {
        self.may_govern(peer)?;
        self.ask_for_rules(Some(connection))
    }

    /// Has the quota file read again, by a thread of its own. `None`: nobody waits for it.
    pub(crate) fn ask_for_rules(&mut self, connection: Option<u64>) -> Result<(), ControlError> {
        let Some(rules) = &mut self.rules else {
            let message = "this arbiter was not started from a quota file";
            return Err(ControlError::new(ErrorCode::Unsupported, message));
        };
        if !rules.ask(connection) {
            let message =
                format!("{MAX_RELOADS} requests to read the quota file wait for its disk");
            return Err(ControlError::new(ErrorCode::Refused, message)
                .with_hint("try again when one of them has ended"));
        }
        Ok(())
    }

    /// The quota file was read.
    pub(crate) fn on_rules(&mut self) {
        let answers = self.rules.as_mut().map(RulesReader::take);
        for (rules, connection) in answers.unwrap_or_default() {
            let result = self.take_over(rules);
            match connection {
                Some(connection) => {
                    let reply = result.map(Reply::Reloaded);
                    self.control
                        .reply(connection, &reply, self.clock.mono_ns(), &self.poller);
                }
                None => {
                    if let Err(error) = result {
                        tracing::error!("{error}");
                    }
                }
            }
        }
    }

    /// Goes by what the quota file says now; where it is wrong, everything stays as it is.
    fn take_over(&mut self, rules: Result<Rules, String>) -> Result<Reloaded, ControlError> {
        let rules = rules.and_then(|rules| {
            for rule in &rules.devices {
                check(&rule.settings).map_err(|error| error.to_string())?;
            }
            Ok(rules)
        });
        let rules = match rules {
            Ok(rules) => rules,
            Err(reason) => {
                let message = format!("the quota file is not taken over: {reason}");
                self.journal.write("reload", "", message, &[]);
                let error = ControlError::new(ErrorCode::Invalid, reason);
                return Err(error.with_hint("what was in force before still is"));
            }
        };
        let reloaded = Reloaded {
            file: rules.file.clone(),
            device_rules: u32::try_from(rules.devices.len()).unwrap_or(u32::MAX),
            tenant_rules: u32::try_from(rules.tenant_rules).unwrap_or(u32::MAX),
        };
        self.options.devices = rules.devices;
        self.options.ceilings = rules.ceilings;
        self.options.tenant_rules = rules.tenant_rules;
        self.options.residency = rules.residency;
        self.options.job_processes = rules.job_processes;
        self.set_up_residency();
        self.by_hand.clear();
        for index in 0..self.schedulers.len() {
            self.reserve_memory(index);
            self.run_as_set(index);
        }
        self.publish_limits();
        self.persistence.mark_old();
        let file = match &reloaded.file {
            Some(file) => file.display().to_string(),
            None => "no file".into(),
        };
        let message = format!("the quota file was read again: {file}");
        self.journal.write("reload", "", message, &[]);
        Ok(reloaded)
    }

    /// Runs a device as its settings say from here on.
    pub(crate) fn run_as_set(&mut self, index: usize) {
        let settings = self.settings_of(index);
        let mut setup = self.setup_of(index);
        // The policy that is there goes on with its accounts, unless another one was chosen.
        let chosen = settings.policy.unwrap_or_else(default_policy);
        if !self.schedulers.choose(index, chosen) {
            setup.policy = None;
        }
        if let Some(scheduler) = self.schedulers.get_mut(index) {
            scheduler.run_as(self.clock.mono_ns(), setup);
            self.schedulers.mark(1 << index);
        }
    }

    /// How a device is run.
    pub(crate) fn setup_of(&self, index: usize) -> Setup {
        let total = self.devices.get(index).map_or(0, |d| d.total_bytes);
        let usable = total.saturating_sub(self.ledger.reserved[index]);
        let mut settings = self.settings_of(index);
        settings.policy.get_or_insert_with(default_policy);
        self.options.setup(&settings, usable)
    }

    /// What was set by hand, for the state file.
    pub(crate) fn saved_devices(&self) -> Vec<SavedDevice> {
        let saved = self.by_hand.iter().map(|(uuid, settings)| SavedDevice {
            uuid: convert::uuid_text(uuid),
            settings: settings.clone(),
        });
        saved.collect()
    }

    /// Only root and the arbiter's own user change what is everybody's.
    fn may_govern(&self, peer: Peer) -> Result<(), ControlError> {
        let ours = rustix::process::geteuid().as_raw();
        if peer.uid == 0 || peer.uid == ours {
            return Ok(());
        }
        let message = format!(
            "devices are run by user {ours}'s arbiter, you are {}",
            peer.uid
        );
        Err(ControlError::new(ErrorCode::Permission, message).with_hint("ask that user, or root"))
    }
}

/// The policy of a device of which nothing is said.
pub(crate) fn default_policy() -> PolicyChoice {
    PolicyChoice::named("stride")
}

/// Whether settings make sense together.
pub(crate) fn check(settings: &DeviceSettings) -> Result<(), ControlError> {
    let invalid = |message: String, hint: &str| {
        Err(ControlError::new(ErrorCode::Invalid, message).with_hint(hint))
    };
    if settings.mode == Some(SliceMode::Unknown) {
        return invalid(
            "the mode is not known to this arbiter".into(),
            "write exclusive, concurrent or auto",
        );
    }
    if let Some(policy) = &settings.policy {
        let bytes = policy.to_string().len();
        if bytes > MAX_POLICY_BYTES {
            return invalid(
                format!("a policy of {bytes} bytes is longer than {MAX_POLICY_BYTES}"),
                "write its name and the parameters that it has",
            );
        }
        convert::policy(policy)
            .map_err(|error| ControlError::new(ErrorCode::Invalid, error.to_string()))?;
    }
    if let Some(holders) = settings
        .holders
        .filter(|holders| !(1..=64).contains(holders))
    {
        return invalid(
            format!("{holders} holders at once make no sense"),
            "write a number from 1 to 64",
        );
    }
    for (name, quantum) in [
        ("longest", settings.quantum),
        ("shortest", settings.quantum_min),
    ] {
        if let Some(quantum) = quantum.filter(|quantum| !Quantum::holds(*quantum)) {
            return invalid(
                format!("a {name} slice of {quantum} is out of range"),
                "write 0.5ms to 1s",
            );
        }
    }
    if let (Some(min), Some(max)) = (settings.quantum_min, settings.quantum)
        && min > max
    {
        return invalid(
            format!("a shortest slice of {min} is longer than the longest of {max}"),
            "change both",
        );
    }
    Ok(())
}

fn described(index: usize, change: &DeviceSettings) -> Vec<(&'static str, Value)> {
    let mut fields = vec![("device", Value::from(index))];
    fields.extend(convert::settings_fields(change));
    fields
}

#[cfg(test)]
mod tests {
    use control::Span;

    use super::*;

    #[test]
    fn invalid_settings_are_reported_with_the_value() {
        let of = |min_us: Option<u64>, max_us: Option<u64>| DeviceSettings {
            quantum_min: min_us.map(Span::from_micros),
            quantum: max_us.map(Span::from_micros),
            ..DeviceSettings::default()
        };
        assert_eq!(check(&DeviceSettings::default()), Ok(()));
        assert_eq!(check(&of(Some(500), Some(1_000_000))), Ok(()));
        for (settings, words) in [
            (of(Some(499), None), ["499us", "0.5ms"]),
            (of(None, Some(1_000_001)), ["1000001us", "1s"]),
            (of(Some(6000), Some(5000)), ["6ms", "5ms"]),
            (
                DeviceSettings {
                    policy: Some(PolicyChoice::named("strid")),
                    ..DeviceSettings::default()
                },
                ["`strid`", "did you mean `stride`?"],
            ),
            (
                DeviceSettings {
                    holders: Some(0),
                    ..DeviceSettings::default()
                },
                ["0 holders", "1 to 64"],
            ),
            (
                DeviceSettings {
                    mode: Some(SliceMode::Unknown),
                    ..DeviceSettings::default()
                },
                ["mode", "concurrent"],
            ),
        ] {
            let error = check(&settings).expect_err("refused").to_string();
            for word in words {
                assert!(error.contains(word), "{error}");
            }
        }
    }
}
