//! How this arbiter was started, how devices are run, and what users may have.
//!
//! Owns the options, the rules of the quota file with the thread that reads it again, and what was
//! set on devices by hand. What is set by hand lies over the file's rules, outlives this process
//! (`state.json`) and gives way when the file is read again. Nothing invalid is ever in force:
//! rules are taken over all together or not at all.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::Path;

use control::kinds::Quantum;
use control::{
    ConfigStatus, ConfigWatch, ControlError, DeviceSelector, DeviceSettings, ErrorCode,
    PolicyChoice, Reloaded, Settings, SliceMode,
};

use crate::background::Background;
use crate::convert;
use crate::devices::Devices;
use crate::dispatch::Setup;
use crate::options::{DeviceRule, Layers, Options, Rules, Subject, turn_ns};
use crate::refusal::Ceiling;
use crate::state::SavedDevice;
use crate::watch::Watch;

/// Bytes of a policy with its parameters, as people write it.
const MAX_POLICY_BYTES: usize = 1024;

/// Requests to read the quota file that wait at a time.
const MAX_RELOADS: usize = 64;

/// Why the quota files are read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Why {
    /// An operator waits for it, with the request of this number.
    Asked(u64),
    /// SIGHUP.
    Signal,
    /// They may have changed.
    Changed,
}

/// What was read, and why.
type Read = (Result<Rules, Vec<String>>, Why);

/// What came of taking rules over.
#[derive(Clone, PartialEq, Debug)]
pub enum Taken {
    /// They are what is in force.
    Same,
    /// They are in force from here on.
    New(Reloaded),
}

/// See the module's documentation.
pub struct Rulebook {
    options: Options,
    /// What reads the quota file again; `None`: there is none.
    reader: Option<Background<Why, Read>>,
    /// What tells that the quota files may have changed; `None`: nothing does.
    watch: Option<Watch>,
    /// When they were taken over last; 0: at the start.
    loaded_unix_ms: u64,
    /// What is wrong with them as they are now.
    errors: Vec<String>,
    /// Settings of devices that were made by hand, by the devices' UUIDs.
    by_hand: BTreeMap<[u8; 16], DeviceSettings>,
}

impl Rulebook {
    /// What these options say.
    ///
    /// # Errors
    /// The thread that reads the quota file cannot be started.
    pub fn start(mut options: Options) -> io::Result<Self> {
        let reader = options.reload.take().map(|read| {
            // Each request has a read of its own that begins after it.
            Background::start("rules", MAX_RELOADS, move |why| (read(), why))
        });
        let reader = reader.transpose()?;
        let watched = options.watched.take().zip(reader.as_ref());
        let watch = watched.map(|(paths, reader)| Watch::start(paths, reader.ringer()));
        Ok(Self {
            watch: watch.transpose()?,
            reader,
            loaded_unix_ms: 0,
            errors: Vec::new(),
            options,
            by_hand: BTreeMap::new(),
        })
    }

    /// How it was started, with the rules that are in force.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// What a user may have.
    pub fn ceiling(&self, uid: u32, user: &str) -> Ceiling {
        (self.options.ceilings)(uid, user)
    }

    /// Readable when the quota file was read; `None`: there is none.
    pub fn bell(&self) -> Option<BorrowedFd<'_>> {
        self.reader.as_ref().map(Background::bell)
    }

    /// What the rules say to a job.
    pub fn layers(&self, subject: &Subject<'_>) -> Layers {
        (self.options.jobs)(subject)
    }

    /// Whether the rules in force come from this file, among others.
    pub fn reads(&self, file: &Path) -> bool {
        self.options.sections.files.iter().any(|own| own == file)
    }

    /// Has the quota files read where they may have changed. Asked after what was read was
    /// [taken](Self::take).
    ///
    /// # Errors
    /// Too many wait for it.
    pub fn look_again(&self) -> Result<(), ControlError> {
        if self.watch.as_ref().is_some_and(Watch::take) {
            return self.ask(Why::Changed);
        }
        Ok(())
    }

    /// What is in force, and what is wrong with what is not.
    pub fn status(&self) -> ConfigStatus {
        ConfigStatus {
            files: self.options.sections.files.clone(),
            loaded_unix_ms: self.loaded_unix_ms,
            errors: self.errors.clone(),
            watch: self.watch.as_ref().map_or(ConfigWatch::Off, Watch::how),
        }
    }

    /// Has the quota files read again.
    ///
    /// # Errors
    /// There is none, or too many wait for it.
    pub fn ask(&self, why: Why) -> Result<(), ControlError> {
        let Some(reader) = &self.reader else {
            let message = "this arbiter was not started from a quota file";
            return Err(ControlError::new(ErrorCode::Unsupported, message));
        };
        if !reader.ask(why) {
            let message =
                format!("{MAX_RELOADS} requests to read the quota file wait for its disk");
            return Err(ControlError::new(ErrorCode::Refused, message)
                .with_hint("try again when one of them has ended"));
        }
        Ok(())
    }

    /// What was read since that was asked last, to be [taken over](Self::take_over).
    pub fn take(&self) -> Vec<Read> {
        let reader = self.reader.as_ref();
        reader.map_or_else(Vec::new, Background::take)
    }

    /// Goes by what the quota files say now. What was set by hand gives way where they were to be
    /// read, or say something else of devices.
    ///
    /// # Errors
    /// They are wrong: everything stays as it is. Said once where nobody has asked.
    pub fn take_over(
        &mut self,
        rules: Result<Rules, Vec<String>>,
        why: Why,
        now_unix_ms: u64,
    ) -> Result<Taken, Vec<String>> {
        let checked = rules.and_then(|rules| {
            let wrong = rules
                .devices
                .iter()
                .filter_map(|rule| check(&rule.settings).err());
            let wrong: Vec<String> = wrong.map(|error| error.to_string()).collect();
            if wrong.is_empty() {
                Ok(rules)
            } else {
                Err(wrong)
            }
        });
        let rules = match checked {
            Ok(rules) => rules,
            Err(errors) => {
                let known = std::mem::replace(&mut self.errors, errors.clone()) == errors;
                if known && why == Why::Changed {
                    return Ok(Taken::Same);
                }
                return Err(errors);
            }
        };
        let mended = !std::mem::take(&mut self.errors).is_empty();
        let same = rules.sections == self.options.sections && !mended;
        if same && why == Why::Changed {
            return Ok(Taken::Same);
        }
        let count = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        let reloaded = Reloaded {
            files: rules.sections.files.clone(),
            device_rules: count(rules.devices.len()),
            user_rules: count(rules.sections.users),
            job_rules: count(rules.sections.jobs),
            jobs_changed: 0,
        };
        if why != Why::Changed || rules.devices != self.options.devices {
            self.by_hand.clear();
        }
        self.options.sections = rules.sections;
        self.options.devices = rules.devices;
        self.options.ceilings = rules.ceilings;
        self.options.jobs = rules.jobs;
        self.options.residency = rules.residency;
        self.options.job_processes = rules.job_processes;
        self.loaded_unix_ms = now_unix_ms;
        Ok(Taken::New(reloaded))
    }

    /// The rule of the quota file for a device.
    pub fn rule(&self, devices: &Devices, index: usize) -> Option<&DeviceRule> {
        let simulated = devices.get(index)?.simulated;
        self.options.devices.iter().find(|rule| {
            let selector = rule.device.as_ref();
            selector.is_none_or(|selector| devices.answers(index, selector, simulated))
        })
    }

    /// What was set on a device by hand.
    pub fn by_hand(&self, devices: &Devices, index: usize) -> Option<&DeviceSettings> {
        self.by_hand.get(&devices.get(index)?.uuid)
    }

    /// The settings in force on a device: what was set by hand, then the first rule of the file
    /// that matches.
    pub fn settings(&self, devices: &Devices, index: usize) -> DeviceSettings {
        let rule = self.rule(devices, index);
        let rule = rule.map(|rule| rule.settings.clone()).unwrap_or_default();
        match self.by_hand(devices, index) {
            Some(by_hand) => by_hand.clone().or(&rule),
            None => rule,
        }
    }

    /// The slice policy in force on a device.
    pub fn policy(&self, devices: &Devices, index: usize) -> PolicyChoice {
        let chosen = self.settings(devices, index).policy;
        chosen.unwrap_or_else(default_policy)
    }

    /// How a device is run of which quotas may promise so much memory.
    pub fn setup(&self, devices: &Devices, index: usize, usable_bytes: u64) -> Setup {
        let mut settings = self.settings(devices, index);
        settings.policy.get_or_insert_with(default_policy);
        let turn_ns = turn_ns(devices.get(index));
        self.options.setup(&settings, usable_bytes, turn_ns)
    }

    /// Sets something on a device by hand, over what was set before. It was [checked](check).
    pub fn set_by_hand(&mut self, uuid: [u8; 16], change: &DeviceSettings) {
        let before = self.by_hand.remove(&uuid).unwrap_or_default();
        self.by_hand.insert(uuid, change.clone().or(&before));
    }

    /// Takes back what an earlier arbiter has saved, as far as it is valid.
    pub fn restore(&mut self, saved: SavedDevice) {
        if let Some(uuid) = convert::uuid_bytes(&saved.uuid)
            && check(&saved.settings).is_ok()
        {
            self.by_hand.insert(uuid, saved.settings);
        }
    }

    /// What was set by hand, for the state file.
    pub fn saved(&self) -> Vec<SavedDevice> {
        let saved = self.by_hand.iter().map(|(uuid, settings)| SavedDevice {
            uuid: convert::uuid_text(uuid),
            settings: settings.clone(),
        });
        saved.collect()
    }

    /// Whether something is said of this very device, by hand or by a rule.
    pub fn names(&self, uuid: &[u8; 16]) -> bool {
        let mut rules = self.options.devices.iter().flat_map(|rule| &rule.device);
        self.by_hand.contains_key(uuid) || rules.any(|selector| is_this(selector, uuid))
    }
}

/// Whether `selector` names the device of this UUID, wherever it is.
pub fn is_this(selector: &DeviceSelector, uuid: &[u8; 16]) -> bool {
    match selector {
        DeviceSelector::Uuid(text) => convert::uuid_text(uuid).eq_ignore_ascii_case(text),
        DeviceSelector::Index(_) => false,
    }
}

/// The policy of a device of which nothing is said.
fn default_policy() -> PolicyChoice {
    PolicyChoice::named("stride")
}

/// Whether settings make sense together.
pub fn check(settings: &DeviceSettings) -> Result<(), ControlError> {
    let invalid = |message: String, hint: &str| {
        Err(ControlError::new(ErrorCode::Invalid, message).with_hint(hint))
    };
    if settings.mode == Some(SliceMode::Unknown) {
        return invalid(
            "the mode is not known to this arbiter".into(),
            "write exclusive, concurrent, auto or lend",
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

#[cfg(test)]
mod tests {
    use channel::wire::DeviceId;
    use control::Span;
    use control::paths::RuntimeDir;

    use super::*;
    use crate::dispatch::Mode;
    use crate::options::{ResidencyRule, Sections};

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
                ["mode", "concurrent, auto or lend"],
            ),
        ] {
            let error = check(&settings).expect_err("refused").to_string();
            for word in words {
                assert!(error.contains(word), "{error}");
            }
        }
    }

    #[test]
    fn a_device_lends_where_its_mode_says_so() {
        let mode = |mode| DeviceSettings {
            mode,
            ..DeviceSettings::default()
        };
        let lend = mode(Some(SliceMode::Lend));
        check(&lend).expect("taken");
        let dir = RuntimeDir::given("/nowhere".into()).expect("absolute");
        let mut rulebook = Rulebook::start(Options::new(dir)).expect("a thread");
        rulebook.set_by_hand(UUID, &lend);
        let settings = rulebook.settings(&devices(), 0);
        assert_eq!(settings.mode, Some(SliceMode::Lend));
        let run = |settings: &DeviceSettings| rulebook.options().setup(settings, 1 << 30, 0).mode;
        assert_eq!(run(&settings), Mode::Lend);
        assert_eq!(run(&mode(None)), Mode::Exclusive, "the default");
    }

    const UUID: [u8; 16] = [7; 16];

    fn devices() -> Devices {
        let mut devices = Devices::default();
        let id = DeviceId {
            uuid: UUID,
            total_bytes: 1 << 30,
        };
        devices.meet(&id, true, &mut 0);
        devices
    }

    fn holders(holders: u64) -> DeviceSettings {
        DeviceSettings {
            holders: Some(holders),
            ..DeviceSettings::default()
        }
    }

    fn rules(settings: DeviceSettings) -> Rules {
        Rules {
            sections: Sections {
                users: 3,
                ..Sections::default()
            },
            devices: vec![DeviceRule {
                device: Some(DeviceSelector::Uuid(convert::uuid_text(&UUID))),
                settings,
            }],
            residency: ResidencyRule::default(),
            ceilings: Box::new(|_, _| Ceiling::default()),
            jobs: Box::new(|_| Layers::default()),
            job_processes: 5,
        }
    }

    #[test]
    fn what_is_set_by_hand_lies_over_the_rules_until_they_are_read_again() {
        let devices = devices();
        let dir = RuntimeDir::given("/nowhere".into()).expect("absolute");
        let mut rulebook = Rulebook::start(Options::new(dir)).expect("a thread");
        assert!(rulebook.ask(Why::Signal).is_err(), "there is no file");
        assert!(!rulebook.names(&UUID));
        rulebook.set_by_hand(UUID, &holders(2));
        assert!(rulebook.names(&UUID));
        let invalid = || Ok(rules(holders(0)));
        let reason = rulebook.take_over(invalid(), Why::Changed, 5);
        let reason = reason.expect_err("invalid");
        assert!(reason[0].contains("0 holders"), "{reason:?}");
        assert_eq!(rulebook.status().errors, reason);
        assert_eq!(rulebook.settings(&devices, 0), holders(2), "as it was");
        let again = rulebook.take_over(invalid(), Why::Changed, 5);
        assert_eq!(again, Ok(Taken::Same), "it was said");
        assert!(rulebook.take_over(invalid(), Why::Signal, 5).is_err());
        let reloaded = rulebook.take_over(Ok(rules(holders(4))), Why::Changed, 6);
        let Ok(Taken::New(reloaded)) = reloaded else {
            panic!("{reloaded:?}");
        };
        assert_eq!((reloaded.device_rules, reloaded.user_rules), (1, 3));
        assert!(rulebook.status().errors.is_empty());
        assert_eq!(rulebook.status().loaded_unix_ms, 6);
        let same = rulebook.take_over(Ok(rules(holders(4))), Why::Changed, 7);
        assert_eq!(same, Ok(Taken::Same));
        assert!(rulebook.by_hand(&devices, 0).is_none() && rulebook.names(&UUID));
        assert_eq!(rulebook.settings(&devices, 0), holders(4));
        assert_eq!(rulebook.options().job_processes, 5);
        rulebook.set_by_hand(UUID, &holders(6));
        let saved = rulebook.saved();
        assert_eq!(rulebook.settings(&devices, 0), holders(6));
        let other = rulebook.take_over(Ok(rules(holders(4))), Why::Changed, 8);
        assert_eq!(other, Ok(Taken::Same));
        assert_eq!(rulebook.settings(&devices, 0), holders(6), "it stays");
        rulebook
            .take_over(Ok(rules(holders(4))), Why::Signal, 9)
            .expect("taken over");
        assert_eq!(rulebook.settings(&devices, 0), holders(4));
        saved.into_iter().for_each(|saved| rulebook.restore(saved));
        assert_eq!(rulebook.settings(&devices, 0), holders(6));
    }
}
