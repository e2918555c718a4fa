//! Which devices a process sees: `CUDA_VISIBLE_DEVICES`, as the CUDA C++ programming guide
//! describes it.
//!
//! A list of indices and UUIDs (or beginnings of UUIDs, `GPU-…`), parted by commas. The program
//! counts devices in the order of the list. The first word that names no device ends it, and so
//! does one that names a device again. Unset: all; empty: none. NVML knows nothing of it.

use shim_ffi::nvml::UuidText;

/// Devices by ordinal, as indices of the host.
pub fn devices(list: Option<&str>, count: usize, uuid: impl Fn(usize) -> [u8; 16]) -> Vec<usize> {
    let Some(list) = list else {
        return (0..count).collect();
    };
    let mut seen = Vec::new();
    for word in list.split(',') {
        match named(word.trim(), count, &uuid) {
            Some(device) if !seen.contains(&device) => seen.push(device),
            _ => break,
        }
    }
    seen
}

fn named(word: &str, count: usize, uuid: impl Fn(usize) -> [u8; 16]) -> Option<usize> {
    if let Ok(index) = word.parse::<usize>() {
        return (index < count).then_some(index);
    }
    let word = word.to_ascii_lowercase();
    if !word.starts_with("gpu-") {
        return None;
    }
    let mut found = (0..count).filter(|device| {
        let text = UuidText(uuid(*device)).to_string().to_ascii_lowercase();
        text.starts_with(&word)
    });
    let first = found.next()?;
    // The beginning of two is the name of neither.
    found.next().is_none().then_some(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uuid(device: usize) -> [u8; 16] {
        let mut uuid = [0xab; 16];
        uuid[15] = device as u8;
        uuid
    }

    fn of(list: &str) -> Vec<usize> {
        devices(Some(list), 4, uuid)
    }

    #[test]
    fn indices_and_uuids_are_counted_in_the_order_of_the_list() {
        assert_eq!(devices(None, 3, uuid), [0, 1, 2]);
        assert_eq!(of(""), [] as [usize; 0]);
        assert_eq!(of("2,0"), [2, 0]);
        let text = UuidText(uuid(3)).to_string();
        assert_eq!(of(&format!("{text}, 1")), [3, 1]);
        assert_eq!(of(&text.to_uppercase()), [3]);
    }

    #[test]
    fn what_names_no_device_ends_the_list() {
        for (list, seen) in [
            ("1,9,0", &[1][..]),
            ("-1,0", &[]),
            ("0,x,1", &[0]),
            ("0,0,1", &[0]),
            ("GPU-abab", &[]),
            ("GPU-", &[]),
            ("NoDevFiles", &[]),
            ("3,", &[3]),
        ] {
            assert_eq!(of(list), seen, "{list}");
        }
        assert_eq!(
            devices(Some("GPU-ab"), 1, uuid),
            [0],
            "a beginning that is one's alone"
        );
    }
}
