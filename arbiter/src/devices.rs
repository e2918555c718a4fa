//! The devices of this host: what NVML says of them, and where there is no NVML, what clients say.

use std::collections::BTreeMap;
use std::path::PathBuf;

use channel::MAX_DEVICES;
use channel::wire::DeviceId;
use control::DeviceSelector;

use crate::convert;
use crate::nvml::{Found, Readings};

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
    /// What a turn from one process to another costs there, where the simulated driver says.
    pub turn_ns: Option<u64>,
    /// What its times are multiplied by, where the simulated driver says; else 1.
    pub dilation: u32,
    /// NVML has reported it: its figures are facts and not a client's claim.
    pub by_nvml: bool,
    /// Device memory by process, where NVML tells.
    pub process_bytes: BTreeMap<u32, u64>,
    /// NVML named it when it last looked; of a device that only clients name, false.
    pub present: bool,
    /// Behind which driver NVML found it; `None`: the host's own.
    pub driver: Option<PathBuf>,
    /// When it was asked for them last.
    pub readings: Readings,
}

/// The place of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    /// Its index in every client's pages.
    pub index: usize,
    /// Another device was there.
    pub anew: bool,
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

    /// Whether every place is taken.
    pub fn is_full(&self) -> bool {
        self.list.len() == MAX_DEVICES
    }

    /// Takes over what NVML found behind a driver; returns the places of devices that are new or
    /// changed. Where all are taken, a device whose bit is in `free` gives way.
    pub fn learn(
        &mut self,
        driver: Option<&PathBuf>,
        found: &[Found],
        free: &mut u32,
    ) -> Vec<Place> {
        let mut touched = Vec::new();
        for device in &mut self.list {
            if device.by_nvml && device.driver.as_ref() == driver {
                device.present = found.iter().any(|found| found.uuid == device.uuid);
            }
        }
        for found in found {
            let known = self
                .list
                .iter()
                .position(|device| device.uuid == found.uuid);
            let mut device = Device {
                uuid: found.uuid,
                name: found.name.clone(),
                total_bytes: found.total_bytes,
                free_bytes: Some(found.free_bytes),
                simulated: found.simulated,
                turn_ns: found.turn_ns,
                dilation: found.dilation,
                by_nvml: true,
                process_bytes: found.process_bytes.clone(),
                present: true,
                driver: driver.cloned(),
                readings: found.readings.unwrap_or_default(),
            };
            if let Some(known) = known.and_then(|index| self.list.get_mut(index)) {
                // They change all the time, and nobody but people cares.
                known.readings = found.readings.unwrap_or(known.readings);
                device.readings = known.readings;
            }
            match known {
                Some(index) if self.list[index] == device => {}
                Some(index) => {
                    self.list[index] = device;
                    touched.push(Place { index, anew: false });
                }
                None => touched.extend(self.place(device, free)),
            }
        }
        touched
    }

    /// Places of the devices that NVML found behind a driver.
    pub fn of_driver<'d>(
        &'d self,
        driver: Option<&'d PathBuf>,
    ) -> impl Iterator<Item = usize> + 'd {
        let places = self.list.iter().enumerate();
        places
            .filter(move |(_, device)| device.by_nvml && device.driver.as_ref() == driver)
            .map(|(index, _)| index)
    }

    fn place(&mut self, device: Device, free: &mut u32) -> Option<Place> {
        if !self.is_full() {
            self.list.push(device);
            let index = self.list.len() - 1;
            return Some(Place { index, anew: false });
        }
        let index = free.trailing_zeros() as usize;
        *self.list.get_mut(index)? = device;
        *free &= !(1 << index);
        Some(Place { index, anew: true })
    }

    /// The place of a device that a client names. An unknown device is added on the client's word;
    /// where all places are taken, a device whose bit is in `free` gives way. `None`: no place is
    /// free.
    pub fn meet(&mut self, id: &DeviceId, simulated: bool, free: &mut u32) -> Option<Place> {
        if let Some(index) = self.list.iter().position(|device| device.uuid == id.uuid) {
            return Some(Place { index, anew: false });
        }
        let device = Device {
            uuid: id.uuid,
            name: String::new(),
            total_bytes: id.total_bytes,
            free_bytes: None,
            simulated,
            turn_ns: None,
            dilation: crate::clock::dilation(),
            by_nvml: false,
            process_bytes: BTreeMap::new(),
            present: false,
            driver: None,
            readings: Readings::default(),
        };
        self.place(device, free)
    }

    /// Whether `selector` means the device at `index`. An index counts the devices of one driver:
    /// the simulated device 0 is not the real device 0.
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

    /// Whether a job with these selectors may use the device at `index`; no selectors means every
    /// device of its driver.
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
            name: "device".into(),
            total_bytes: 100,
            free_bytes: 60,
            process_bytes: BTreeMap::new(),
            simulated: false,
            turn_ns: None,
            dilation: 1,
            mig: None,
            readings: None,
        }
    }

    fn place(index: usize) -> Place {
        Place { index, anew: false }
    }

    fn at(index: usize) -> Option<Place> {
        Some(place(index))
    }

    #[test]
    fn readings_are_kept_until_the_next_and_touch_nothing() {
        let mut devices = Devices::default();
        let mut measured = found(1);
        measured.readings = Some(Readings {
            power_mw: Some(300_000),
            ..Readings::default()
        });
        devices.learn(None, &[measured.clone()], &mut 0);
        assert_eq!(devices.learn(None, &[found(1)], &mut 0), [], "not asked");
        let power_mw = |devices: &Devices| devices.get(0).and_then(|it| it.readings.power_mw);
        assert_eq!(power_mw(&devices), Some(300_000));
        measured.readings = Some(Readings::default());
        assert_eq!(devices.learn(None, &[measured], &mut 0), []);
        assert_eq!(power_mw(&devices), None, "asked, and not known any more");
    }

    #[test]
    fn facts_replace_claims_and_keep_the_index() {
        let mut devices = Devices::default();
        let claim = DeviceId {
            uuid: [2; 16],
            total_bytes: 7,
        };
        assert_eq!(devices.meet(&claim, false, &mut 0), at(0));
        assert_eq!(
            devices.learn(None, &[found(1), found(2)], &mut 0),
            [place(1), place(0)]
        );
        assert_eq!(devices.meet(&claim, false, &mut 0), at(0));
        assert_eq!(devices.get(0).map(|device| device.total_bytes), Some(100));
        assert_eq!(devices.learn(None, &[found(1), found(2)], &mut 0), []);
    }

    #[test]
    fn claims_end_at_the_last_place() {
        let mut devices = Devices::default();
        for first in 0..MAX_DEVICES as u8 {
            let id = DeviceId {
                uuid: [first + 1; 16],
                total_bytes: 1,
            };
            assert_eq!(devices.meet(&id, true, &mut 0), at(usize::from(first)));
        }
        let one_more = DeviceId {
            uuid: [99; 16],
            total_bytes: 1,
        };
        assert_eq!(devices.meet(&one_more, true, &mut 0), None);
        // One that nobody uses gives way, once.
        let mut free = 1 << 3;
        let anew = Some(Place {
            index: 3,
            anew: true,
        });
        assert_eq!(devices.meet(&one_more, true, &mut free), anew);
        assert_eq!(
            (free, devices.get(3).map(|device| device.uuid)),
            (0, Some([99; 16]))
        );
        assert_eq!(devices.learn(None, &[found(77)], &mut free), []);
        free = 1 << 5;
        let anew = Place {
            index: 5,
            anew: true,
        };
        assert_eq!(devices.learn(None, &[found(77)], &mut free), [anew]);
        assert!(devices.get(5).is_some_and(|device| device.present));
        devices.learn(None, &[], &mut 0);
        assert!(devices.get(5).is_some_and(|device| !device.present));
    }

    #[test]
    fn selectors_count_the_devices_of_their_own_driver() {
        let mut devices = Devices::default();
        devices.learn(None, &[found(1)], &mut 0);
        let both = [found(2), found(3)].map(|found| Found {
            simulated: true,
            ..found
        });
        devices.learn(None, &both, &mut 0);
        let second = DeviceSelector::Index(1);
        assert!(devices.answers(2, &second, true));
        assert!(!devices.answers(1, &second, true) && !devices.answers(2, &second, false));
        let uuid = DeviceSelector::Uuid("gpu-02020202-0202-0202-0202-020202020202".into());
        assert!(devices.answers(1, &uuid, true));
        assert!(devices.entitled(0, &[], false) && !devices.entitled(0, &[], true));
        assert!(!devices.entitled(9, &[], true));
    }
}
