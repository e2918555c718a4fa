//! Device attributes, computed from the profile. Ids are those of `CUdevice_attribute`.

use crate::profile::Profile;

/// The value of an attribute, if there is one of that id.
pub fn value(profile: &Profile, device: usize, id: u32) -> Option<i32> {
    let registers = 65_536;
    let shared_optin = profile.shared_per_block_optin_bytes;
    Some(match id {
        1..=3 => 1024,
        4 => 64,
        5 => i32::MAX,
        6 | 7 => 65_535,
        8 => 48 << 10,
        9 => 64 << 10,
        10 => 32,
        11 => i32::MAX,
        12 | 82 => registers,
        13 => profile.clock_mhz * 1000,
        14 => 512,
        15 => 1,
        16 => profile.multiprocessors,
        17 | 18 | 20 | 35 => 0,
        19 | 31 | 32 | 41 | 44 => 1,
        21 | 22 => 131_072,
        23 => 65_536,
        24 | 25 | 26 | 47 | 48 => 16_384,
        27 | 28 | 45 | 46 => 32_768,
        29 | 43 => 2048,
        30 => 512,
        33 => profile.pci_bus(device) as i32,
        34 | 50 => 0,
        36 => profile.memory_clock_mhz * 1000,
        37 => profile.memory_bus_bits,
        38 => profile.l2_bytes,
        39 => profile.threads_per_multiprocessor,
        // Two copy engines for the host, one between devices.
        40 => 3,
        42 | 52 | 53 | 55 | 61 | 63 | 64 | 66 | 67 | 73 | 74 | 77 => 32_768,
        49 => 32_768,
        51 => 32,
        54 | 68 => 2046,
        56 => 131_072,
        57 => 65_536,
        58..=60 => 16_384,
        62 | 65 => 2048,
        69 => 268_435_456,
        70 => 131_072,
        71 => 65_000,
        72 => 2_097_120,
        75 => profile.major,
        76 => profile.minor,
        78..=80 => 1,
        81 => profile.shared_per_multiprocessor_bytes,
        // Managed memory exists; on-demand paging of all host memory does not.
        83 => 1,
        84 | 86 | 88 | 89 | 100 | 101 => 0,
        85 => device as i32,
        87 => 2,
        90 | 91 => 1,
        92..=94 | 122 | 123 => 1,
        95 => 1,
        96 => 0,
        97 => shared_optin,
        98 | 104 | 105 => 0,
        99 => 1,
        102 | 103 => 1,
        106 => profile.blocks_per_multiprocessor,
        107 | 112 | 114 | 116 | 117 | 118 | 110 => 0,
        108 => profile.l2_bytes / 8 * 5,
        109 => 128 << 20,
        111 => 1024,
        113 | 115 => 1,
        // A pool can be handed on by descriptor.
        119 => 1,
        120 => i32::from(profile.cluster_launch),
        121 | 124 => 0,
        // Events can be shared between processes.
        125 => 1,
        126 => {
            if profile.major >= 9 {
                4
            } else {
                1
            }
        }
        127 => i32::from(profile.major >= 9),
        128 => 0,
        129 => 1,
        130 => 0,
        131 => -1,
        132 | 133 | 135..=138 => 0,
        134 => 0,
        139 | 140 => 0,
        141..=144 | 146..=149 | 151..=159 | 161 => 0,
        145 => 1,
        150 => shared_optin,
        160 => 0,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_attribute_of_the_api_has_a_value() {
        let profile = Profile::parse(&Profile::text_from_env(|_| None).unwrap()).unwrap();
        let max = shim_ffi::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX.0;
        let missing: Vec<_> = (1..max)
            .filter(|id| value(&profile, 0, *id).is_none())
            .collect();
        assert_eq!(missing, [0_u32; 0]);
        assert_eq!(value(&profile, 0, max), None);
    }
}
