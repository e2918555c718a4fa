//! The devices of this host: what NVML says of them, and where there is no NVML, what clients say.

use std::collections::BTreeMap;

use channel::MAX_DEVICES;
use channel::wire::DeviceId;
use control::DeviceSelector;

use crate::convert;
use crate::nvml::Found;

/// One device. Its place in the list is its index in every client's pages.
#[derive(Clone, PartialEq, Debug)]
pub struct Device {
    /// As the driver tells it.
    pub uuid: [u8; 16],
    /// For people; empty where unknown.
    pub name: String,
    /// Physical memory in bytes.
    pub total_bytes: u64,
    /// Of that, free when last looked; `None`: never looked.
    pub free_bytes: Option<u64>,
    /// Behind the simulated driver.
    pub simulated: bool,
    /// NVML has told about it: its figures are facts and not a client's claim.
    pub by_nvml: bool,
    /// Device memory by process, where NVML tells.
    pub process_bytes: BTreeMap<u32, u64>,
}

/// All of them.
#[derive(Debug, Default)]
pub struct Devices {
    list: Vec<Device>,
}

impl Devices {
    /// In the order of their indices.
    pub fn iter(&self) -> impl Iterator<Item = (usize, &Device)> {
        self.list.iter().enumerate()
    }

    /// One of them.
    pub fn get(&self, index: usize) -> Option<&Device> {
        self.list.get(index)
    }

    /// Takes over what NVML found; returns the indices of devices that are new or changed.
    pub fn learn(&mut self, found: &[Found], simulated: bool) -> Vec<usize> {
        let mut touched = Vec::new();
        for found in found {
            let known = self
                .list
                .iter()
                .position(|device| device.uuid == found.uuid);
            let device = Device {
                uuid: found.uuid,
                name: found.name.clone(),
                total_bytes: found.total_bytes,
                free_bytes: Some(found.free_bytes),
                // Once told, for good: a look while no job is there to say what its driver is changes nothing.
                simulated: match known.map(|index| &self.list[index]) {
                    Some(device) if device.by_nvml => device.simulated,
                    // The library path of whoever started us may lead to the simulated NVML before any job has said
                    // what its driver is; the simulated devices' names say so.
                    _ => simulated || found.name.ends_with("(simulated)"),
                },
                by_nvml: true,
                process_bytes: found.process_bytes.clone(),
            };
            match known {
                Some(index) if self.list[index] == device => {}
                Some(index) => {
                    self.list[index] = device;
                    touched.push(index);
                }
                None if self.list.len() < MAX_DEVICES => {
                    touched.push(self.list.len());
                    self.list.push(device);
                }
                None => {}
            }
        }
        touched
    }

    /// The index of a device that a client names; one nobody has heard of is added on its word. `None`: no room.
    pub fn meet(&mut self, id: &DeviceId, simulated: bool) -> Option<usize> {
        if let Some(index) = self.list.iter().position(|device| device.uuid == id.uuid) {
            return Some(index);
        }
        if self.list.len() == MAX_DEVICES {
            return None;
        }
        self.list.push(Device {
            uuid: id.uuid,
            name: String::new(),
            total_bytes: id.total_bytes,
            free_bytes: None,
            simulated,
            by_nvml: false,
            process_bytes: BTreeMap::new(),
        });
        Some(self.list.len() - 1)
    }

    /// Whether `selector` means the device at `index`. An index counts the devices of one driver: the simulated device 0 is
    /// not the real device 0.
    pub fn answers(&self, index: usize, selector: &DeviceSelector, simulated: bool) -> bool {
        let Some(device) = self.list.get(index) else {
            return false;
        };
        if device.simulated != simulated {
            return false;
        }
        match selector {
            DeviceSelector::Uuid(uuid) => {
                convert::uuid_text(&device.uuid).eq_ignore_ascii_case(uuid)
            }
            DeviceSelector::Index(wanted) => {
                let before = &self.list[..index];
                let ordinal = before.iter().filter(|d| d.simulated == simulated).count();
                ordinal == *wanted as usize
            }
        }
    }

    /// Whether a job with these selectors may use the device at `index`; no selectors means every device of its driver.
    pub fn entitled(&self, index: usize, selectors: &[DeviceSelector], simulated: bool) -> bool {
        match self.list.get(index) {
            None => false,
            Some(device) if selectors.is_empty() => device.simulated == simulated,
            Some(_) => selectors
                .iter()
                .any(|selector| self.answers(index, selector, simulated)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(first: u8) -> Found {
        Found {
            uuid: [first; 16],
            name: "card".into(),
            total_bytes: 100,
            free_bytes: 60,
            process_bytes: BTreeMap::new(),
        }
    }

    #[test]
    fn a_device_stays_simulated_when_no_job_says_so() {
        let mut devices = Devices::default();
        devices.learn(&[found(1)], true);
        devices.learn(
            &[Found {
                free_bytes: 50,
                ..found(1)
            }],
            false,
        );
        assert!(devices.entitled(0, &[], true) && !devices.entitled(0, &[], false));
    }

    #[test]
    fn a_simulated_device_is_one_even_before_any_job_has_said_so() {
        let mut devices = Devices::default();
        devices.learn(
            &[Found {
                name: "NVIDIA H200 (simulated)".into(),
                ..found(1)
            }],
            false,
        );
        assert!(devices.entitled(0, &[], true) && !devices.entitled(0, &[], false));
    }

    #[test]
    fn facts_replace_claims_and_keep_the_index() {
        let mut devices = Devices::default();
        let claim = DeviceId {
            uuid: [2; 16],
            total_bytes: 7,
        };
        assert_eq!(devices.meet(&claim, false), Some(0));
        assert_eq!(devices.learn(&[found(1), found(2)], false), [1, 0]);
        assert_eq!(devices.meet(&claim, false), Some(0));
        assert_eq!(devices.get(0).map(|device| device.total_bytes), Some(100));
        assert_eq!(devices.learn(&[found(1), found(2)], false), [0usize; 0]);
    }

    #[test]
    fn claims_end_at_the_last_place() {
        let mut devices = Devices::default();
        for first in 0..MAX_DEVICES as u8 {
            let id = DeviceId {
                uuid: [first + 1; 16],
                total_bytes: 1,
            };
            assert_eq!(devices.meet(&id, true), Some(usize::from(first)));
        }
        let one_more = DeviceId {
            uuid: [99; 16],
            total_bytes: 1,
        };
        assert_eq!(devices.meet(&one_more, true), None);
    }

    #[test]
    fn selectors_count_the_devices_of_their_own_driver() {
        let mut devices = Devices::default();
        devices.learn(&[found(1)], false);
        devices.learn(&[found(2), found(3)], true);
        let second = DeviceSelector::Index(1);
        assert!(devices.answers(2, &second, true));
        assert!(!devices.answers(1, &second, true) && !devices.answers(2, &second, false));
        let uuid = DeviceSelector::Uuid("gpu-02020202-0202-0202-0202-020202020202".into());
        assert!(devices.answers(1, &uuid, true));
        assert!(devices.entitled(0, &[], false) && !devices.entitled(0, &[], true));
        assert!(!devices.entitled(9, &[], true));
    }
}
