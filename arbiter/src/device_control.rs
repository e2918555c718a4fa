//! How devices are run, as the quota file says and as operators change it while jobs run.
//!
//! Which settings are in force is for [`crate::rulebook`] to say; what follows for the devices is
//! done here. Invalid settings are refused before anything has changed.

use control::{
    ControlError, DeviceSelector, DeviceSettings, DeviceStatus, ErrorCode, Reloaded, Reply,
    Settings,
};
use serde_json::Value;

use crate::convert;
use crate::dispatch::Setup;
use crate::journal::About;
use crate::options::Rules;
use crate::rulebook::{Taken, Why, check};
use crate::serve::Arbiter;
use crate::who::Peer;

impl Arbiter {
    /// The settings in force on a device: what was set by hand, then the first rule of the file
    /// that matches.
    pub(crate) fn settings_of(&self, index: usize) -> DeviceSettings {
        self.rulebook.settings(&self.devices, index)
    }

    /// Changes devices, all or none.
    pub(crate) fn change_devices(
        &mut self,
        device: Option<&DeviceSelector>,
        change: DeviceSettings,
        peer: &Peer,
    ) -> Result<Reply, ControlError> {
        may_govern(peer)?;
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
            self.rulebook.set_by_hand(device.uuid, &change);
            self.run_as_set(*index);
        }
        self.persistence.mark_old();
        for index in &indices {
            let fields = described(*index, &change);
            let message = format!("device {index} is run anew");
            self.journal.write("device", About::NONE, message, &fields);
        }
        let statuses = self.device_statuses();
        let changed = indices.iter().filter_map(|index| statuses.get(*index));
        Ok(Reply::Devices(
            changed.cloned().collect::<Vec<DeviceStatus>>(),
        ))
    }

    /// Reads the quota file again, for an operator.
    /// It is answered when the file was read.
    pub(crate) fn reload_for(&mut self, number: u64, peer: &Peer) -> Result<(), ControlError> {
        may_govern(peer)?;
        self.rulebook.ask(Why::Asked(number))?;
        self.supervisor.reloads(self.clock.mono_ns());
        Ok(())
    }

    /// The quota files were read, or may have changed.
    pub(crate) fn on_rules(&mut self) {
        let read = self.rulebook.take();
        if let Err(error) = self.rulebook.look_again() {
            tracing::error!("{error}");
        }
        if read.iter().any(|(_, why)| *why != Why::Changed) {
            self.supervisor.reloaded();
        }
        for (rules, why) in read {
            let result = self.take_over(rules, why);
            if let Why::Asked(number) = why {
                let reply = result.map(|reloaded| Reply::Reloaded(reloaded.unwrap_or_default()));
                self.reply(number, reply);
            } else if let Err(error) = result {
                tracing::error!("{error}");
            }
        }
    }

    /// Goes by what the quota files say now; where they are wrong, everything stays as it is.
    /// `None`: they say what they said.
    fn take_over(
        &mut self,
        rules: Result<Rules, Vec<String>>,
        why: Why,
    ) -> Result<Option<Reloaded>, ControlError> {
        let now_unix_ms = self.clock.unix_ms();
        let mut reloaded = match self.rulebook.take_over(rules, why, now_unix_ms) {
            Ok(Taken::New(reloaded)) => reloaded,
            Ok(Taken::Same) => return Ok(None),
            Err(reasons) => {
                let fields = [("errors", Value::from(reasons.clone()))];
                let message = format!("the quota file is not taken over: {}", first_of(&reasons));
                self.journal.write("reload", About::NONE, message, &fields);
                let error = ControlError::new(ErrorCode::Invalid, first_of(&reasons));
                return Err(error.with_hint("what was in force before still is"));
            }
        };
        self.set_up_residency();
        for index in 0..self.schedulers.len() {
            self.reserve_memory(index);
            self.run_as_set(index);
        }
        let files: Vec<String> = reloaded
            .files
            .iter()
            .map(|file| file.display().to_string())
            .collect();
        let files = if files.is_empty() {
            "no file".into()
        } else {
            files.join(", ")
        };
        let message = format!("the quota file was read again: {files}");
        self.journal.write("reload", About::NONE, message, &[]);
        reloaded.jobs_changed = self.apply_rules(true);
        self.persistence.mark_old();
        Ok(Some(reloaded))
    }

    /// Runs a device as its settings say from here on.
    pub(crate) fn run_as_set(&mut self, index: usize) {
        let mut setup = self.setup_of(index);
        // The policy that is there goes on with its accounts, unless another one was chosen.
        let chosen = self.rulebook.policy(&self.devices, index);
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
        let usable = total.saturating_sub(self.ledger.reserved_bytes(index));
        self.rulebook.setup(&self.devices, index, usable)
    }
}

/// Only root and the arbiter's own user change what is everybody's.
fn may_govern(peer: &Peer) -> Result<(), ControlError> {
    peer.must_be_of_this_host()?;
    if peer.governs() {
        return Ok(());
    }
    let message = format!(
        "devices are run by user {}'s arbiter, you are {}",
        rustix::process::geteuid().as_raw(),
        peer.uid
    );
    Err(ControlError::new(ErrorCode::Permission, message).with_hint("ask that user, or root"))
}

/// The first of several, and how many more there are.
fn first_of(reasons: &[String]) -> String {
    let first = reasons.first().cloned().unwrap_or_default();
    match reasons.len() {
        0 | 1 => first,
        count => format!(
            "{first} (and {} more: `sublet config check` lists all)",
            count - 1
        ),
    }
}

fn described(index: usize, change: &DeviceSettings) -> Vec<(&'static str, Value)> {
    let mut fields = vec![("device", Value::from(index))];
    fields.extend(convert::settings_fields(change));
    fields
}
