//! Units of the device plugin: a GiB of one device each. A kubelet counts them, and knows nothing
//! of devices; that those of a container are of one device is ours to see to.

use sha2::{Digest as _, Sha256};

use crate::node::{Device, GIB};

/// Most units of one request: a device has some hundred GiB.
pub const MOST: usize = 8192;

/// What a container's units come to.
#[derive(Debug, PartialEq, Eq)]
pub struct Asked {
    /// UUID of the device.
    pub device: String,
    pub memory_bytes: u64,
    /// The units, sorted.
    pub units: Vec<String>,
}

/// Units that cannot be given.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnitError {
    #[error("a container asks for no unit, or for more than {MOST}")]
    Number,
    #[error("unit `{0}` is none of this node's (any more): the device that it was of is gone")]
    Unknown(String),
    #[error("unit `{0}` is asked for twice")]
    Twice(String),
    #[error(
        "no device has {0} GiB free: the kubelet offers parts of {1} devices, and a job's memory is on one; ask for less, or use the scheduler extender, which sends the pod elsewhere"
    )]
    SeveralDevices(usize, usize),
}

/// Names of the units of a device.
pub fn of(device: &Device) -> impl Iterator<Item = String> {
    let uuid = device.uuid.clone();
    (0..device.usable_bytes / GIB).map(move |at| format!("{uuid}::{at}"))
}

/// Looks a container's units up.
///
/// # Errors
/// [`UnitError`]
pub fn ask(units: &[String], devices: &[Device]) -> Result<Asked, UnitError> {
    if units.is_empty() || units.len() > MOST {
        return Err(UnitError::Number);
    }
    let mut of_devices = Vec::new();
    for unit in units {
        let known = devices.iter().find(|device| has(device, unit));
        let short = || unit.chars().take(80).collect();
        let uuid = &known.ok_or_else(|| UnitError::Unknown(short()))?.uuid;
        if !of_devices.contains(uuid) {
            of_devices.push(uuid.clone());
        }
    }
    let mut sorted = units.to_vec();
    sorted.sort();
    if let Some(pair) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(UnitError::Twice(pair[0].clone()));
    }
    match of_devices.as_slice() {
        [device] => Ok(Asked {
            device: device.clone(),
            // CAST: a few thousand.
            memory_bytes: units.len() as u64 * GIB,
            units: sorted,
        }),
        several => Err(UnitError::SeveralDevices(units.len(), several.len())),
    }
}

/// Whether a device has that unit.
fn has(device: &Device, unit: &str) -> bool {
    let number = unit.strip_prefix(device.uuid.as_str());
    let number = number.and_then(|rest| rest.strip_prefix("::"));
    let plain = number.filter(|n| n.len() < 6 && n.bytes().all(|b| b.is_ascii_digit()));
    let number = plain.and_then(|number| number.parse::<u64>().ok());
    number.is_some_and(|number| {
        number < device.usable_bytes / GIB && unit.ends_with(&format!("::{number}"))
    })
}

/// A name for these units that no others have.
pub fn key(asked: &Asked) -> String {
    let digest = Sha256::digest(asked.units.join("\n"));
    let hex: String = digest
        .iter()
        .take(8)
        .map(|byte| format!("{byte:02x}"))
        .collect();
    format!("units-{hex}")
}

/// The units to give: those that must be, and others of the same device; of several devices the one
/// with the fewest left over, so that large requests find space. Empty: no device has so many.
pub fn preferred(available: &[String], must: &[String], size: usize) -> Vec<String> {
    let device = |unit: &String| unit.rsplit_once("::").map(|(uuid, _)| uuid.to_owned());
    let mut devices: Vec<Option<String>> = available.iter().map(device).collect();
    devices.sort();
    devices.dedup();
    let candidates = devices.into_iter().filter_map(|of| {
        let units: Vec<&String> = available.iter().filter(|unit| device(unit) == of).collect();
        let has_all = must.iter().all(|unit| units.contains(&unit));
        (has_all && units.len() >= size && must.len() <= size).then_some(units)
    });
    let Some(units) = candidates.min_by_key(Vec::len) else {
        return Vec::new();
    };
    let rest = units.into_iter().filter(|unit| !must.contains(unit));
    must.iter().chain(rest).take(size).cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(index: u32, gib: u64) -> Device {
        Device {
            index,
            uuid: format!("GPU-{index}"),
            model: String::new(),
            usable_bytes: gib * GIB,
        }
    }

    fn units(of: &Device, count: usize) -> Vec<String> {
        super::of(of).take(count).collect()
    }

    #[test]
    fn units_of_one_device_are_its_memory() {
        let devices = [device(0, 8), device(1, 80)];
        let mut asked = units(&devices[1], 3);
        asked.reverse();
        let found = ask(&asked, &devices).unwrap();
        assert_eq!(
            (found.device.as_str(), found.memory_bytes),
            ("GPU-1", 3 * GIB)
        );
        assert_eq!(found, ask(&units(&devices[1], 3), &devices).unwrap());
        assert_eq!(key(&found), key(&ask(&asked, &devices).unwrap()));
        assert_ne!(key(&found), key(&ask(&asked[..2], &devices).unwrap()));
    }

    #[test]
    fn units_that_cannot_be_given_are_refused() {
        let devices = [device(0, 8), device(1, 80)];
        let both = [units(&devices[0], 1), units(&devices[1], 1)].concat();
        assert_eq!(ask(&both, &devices), Err(UnitError::SeveralDevices(2, 2)));
        let twice = [units(&devices[0], 1), units(&devices[0], 1)].concat();
        assert!(matches!(ask(&twice, &devices), Err(UnitError::Twice(_))));
        for unit in [
            "GPU-0::8",
            "GPU-0::08",
            "GPU-0::-1",
            "GPU-0::",
            "GPU-0",
            "GPU-2::0",
            "",
            "GPU-0::1x",
            "GPU-0::99999999999999999999",
        ] {
            let error = ask(&[unit.to_owned()], &devices).unwrap_err();
            assert!(matches!(error, UnitError::Unknown(_)), "{unit}: {error}");
        }
        assert_eq!(ask(&[], &devices), Err(UnitError::Number));
        let many = vec!["x".to_owned(); MOST + 1];
        assert_eq!(ask(&many, &devices), Err(UnitError::Number));
    }

    #[test]
    fn a_request_goes_where_it_fits_most_tightly() {
        let (small, large) = (device(0, 8), device(1, 80));
        let all = [units(&small, 8), units(&large, 80)].concat();
        assert!(
            preferred(&all, &[], 4)
                .iter()
                .all(|unit| unit.starts_with("GPU-0"))
        );
        assert!(
            preferred(&all, &[], 9)
                .iter()
                .all(|unit| unit.starts_with("GPU-1"))
        );
        let must = units(&large, 1);
        let chosen = preferred(&all, &must, 2);
        assert!(chosen.len() == 2 && chosen[0] == must[0] && chosen[1].starts_with("GPU-1"));
        assert!(preferred(&all, &[], 81).is_empty());
        assert!(preferred(&all, &units(&small, 1), 9).is_empty());
    }
}
