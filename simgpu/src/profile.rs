//! What device_state is simulated: a profile (key = value text) plus the environment's overrides.
//!
//! The result is plain text again, because the first process of a host writes it into the shared
//! state and all others read it from there: everybody sees the same device_state. This file knows
//! no device state.

use std::collections::BTreeMap;

use crate::costs::Costs;
use crate::settings::BadConfig;

/// Profiles that are built in, by name.
const BUILT_IN: &[(&str, &str)] = &[
    ("h200", include_str!("../profiles/h200.profile")),
    (
        "h200-measured",
        include_str!("../profiles/h200-measured.profile"),
    ),
    ("a100", include_str!("../profiles/a100.profile")),
    ("t4", include_str!("../profiles/t4.profile")),
];

/// Version of the driver where the profile says none.
const DRIVER_VERSION: &str = "595.99.02";

/// CUDA version that the driver claims unless a profile says otherwise: 13.2.
pub const CUDA_VERSION: i32 = 13020;

/// Most devices that one host can simulate.
pub const MAX_DEVICES: usize = 16;

/// A simulated device, and how many of it there are.
#[derive(Debug, Clone, PartialEq)]
pub struct Profile {
    /// Name that `cuDeviceGetName` answers; says that it is simulated.
    pub name: String,
    /// `turing`, `ampere`, `hopper`.
    pub architecture: String,
    /// Major compute capability.
    pub major: i32,
    /// Minor compute capability.
    pub minor: i32,
    /// Number of devices of this kind; 0: a machine without one.
    pub devices: usize,
    /// CUDA version of the driver, as it counts them (12040: 12.4).
    pub cuda_version: i32,
    /// Streaming multiprocessors.
    pub multiprocessors: i32,
    /// Core clock.
    pub clock_mhz: i32,
    /// Memory clock.
    pub memory_clock_mhz: i32,
    /// Width of the memory bus.
    pub memory_bus_bits: i32,
    /// Physical memory, in bytes.
    pub memory_bytes: u64,
    /// Part of it that no program can have, in bytes.
    pub driver_reserved_bytes: u64,
    /// What the first context of a process takes, in bytes.
    pub context_bytes: u64,
    /// L2 cache, in bytes.
    pub l2_bytes: i32,
    /// Shared memory of a multiprocessor, in bytes.
    pub shared_per_multiprocessor_bytes: i32,
    /// Largest shared memory of a block after opting in, in bytes.
    pub shared_per_block_optin_bytes: i32,
    /// Resident threads of a multiprocessor.
    pub threads_per_multiprocessor: i32,
    /// Resident blocks of a multiprocessor.
    pub blocks_per_multiprocessor: i32,
    /// Device memory bandwidth, in bytes per nanosecond (GB/s).
    pub memory_gbps: f64,
    /// Arithmetic, in floating-point operations per nanosecond (GFLOP/s).
    pub compute_gflops: f64,
    /// Copy engine rate from pinned memory to the device, GB/s.
    pub copy_pinned_gbps: f64,
    /// The same from the device to pinned memory.
    pub copy_out_pinned_gbps: f64,
    /// Copy engine rate from and to pageable memory, GB/s.
    pub copy_pageable_gbps: f64,
    /// What is left of either direction's rate while both are busy, 0 to 1.
    pub copy_duplex_factor: f64,
    /// Copies between two devices, GB/s.
    pub peer_gbps: f64,
    /// What a kernel costs at least, in ns.
    pub launch_ns: u64,
    /// What a kernel without a native host kernel costs, in ns.
    pub default_kernel_ns: u64,
    /// How long one process keeps the compute engine while another one waits, in ns.
    pub timeslice_ns: u64,
    /// What changing the process on the compute engine costs, in ns.
    pub switch_ns: u64,
    /// A change costs nothing that passes while the engine has nothing to do.
    pub idle_turn_free: bool,
    /// A process leaves the engine when its queue is empty by the engine's own time, if another one
    /// wants it. False: a moment after its thread has found nothing more to do.
    pub leaves_when_empty: bool,
    /// What a launch takes of the calling thread's time at least, in ns.
    pub launch_call_ns: u64,
    /// Power limit, in mW.
    pub power_limit_mw: u32,
    /// Version of the driver that the management library tells.
    pub driver_version: String,
    /// What calls cost that manage memory.
    pub costs: Costs,
    /// True where thread block clusters exist.
    pub cluster_launch: bool,
    /// Modelled durations are divided by this.
    pub speed: f64,
    /// All times are multiplied by this: device, link and calls, and what the arbiter and its
    /// clients measure and wait for.
    pub dilation: u32,
}

/// Most that times can be multiplied by.
pub const MAX_DILATION: u32 = 1000;

impl Profile {
    /// Reads the profile that the environment asks for, as text that [`Profile::parse`] takes.
    ///
    /// # Errors
    /// The variable, its value and the remedy.
    pub fn text_from_env(env: impl Fn(&str) -> Option<String>) -> Result<String, BadConfig> {
        let wanted = env("SUBLET_SIM_PROFILE").unwrap_or_else(|| "h200".to_owned());
        let mut text = match BUILT_IN
            .iter()
            .find(|(name, _)| name.eq_ignore_ascii_case(&wanted))
        {
            Some((_, text)) => (*text).to_owned(),
            None if wanted.contains('/') => std::fs::read_to_string(&wanted)
                .map_err(|error| BadConfig(format!("SUBLET_SIM_PROFILE={wanted}: {error}")))?,
            None => {
                return Err(BadConfig(format!(
                    "SUBLET_SIM_PROFILE={wanted}: no such profile; use h200, h200-measured, a100, t4 or a path with a slash in it"
                )));
            }
        };
        const OVERRIDES: &[(&str, &str)] = &[
            ("SUBLET_SIM_DEVICES", "devices"),
            ("SUBLET_SIM_CAPACITY", "memory"),
            ("SUBLET_SIM_CONTEXT", "context"),
            ("SUBLET_SIM_RESERVED", "driver_reserved"),
            ("SUBLET_SIM_SPEED", "speed"),
            ("SUBLET_SIM_DILATION", "dilation"),
            ("SUBLET_SIM_TIMESLICE_US", "timeslice_us"),
            ("SUBLET_SIM_SWITCH_US", "switch_us"),
            ("SUBLET_SIM_DEFAULT_KERNEL_NS", "default_kernel_ns"),
        ];
        for (variable, key) in OVERRIDES {
            if let Some(value) = env(variable) {
                // A capacity is what programs can have: nothing of it is the driver's unless that
                // is asked for too.
                if *key == "memory" && env("SUBLET_SIM_RESERVED").is_none() {
                    text.push_str("driver_reserved = 0B\n");
                }
                let mut one = text.clone();
                one.push_str(&format!("{key} = {value}\n"));
                Self::parse(&one)
                    .map_err(|error| BadConfig(format!("{variable}={value}: {error}")))?;
                text = one;
            }
        }
        // Any key of the profile, last: it wins over all of them.
        if let Some(value) = env("SUBLET_SIM_SET") {
            for pair in value
                .split(';')
                .map(str::trim)
                .filter(|pair| !pair.is_empty())
            {
                text.push_str(&format!("{pair}\n"));
                Self::parse(&text).map_err(|error| {
                    BadConfig(format!(
                        "SUBLET_SIM_SET={value}: {error}; expected KEY=VALUE[;KEY=VALUE...] with keys of a profile"
                    ))
                })?;
            }
        }
        Self::parse(&text)?;
        Ok(text)
    }

    /// Of the device that nobody has described: as much memory as the host could give, where that
    /// is less than the profile's. What was asked for by name is as large as it says.
    ///
    /// # Errors
    /// As [`Profile::text_from_env`].
    pub fn text_for_host(
        env: impl Fn(&str) -> Option<String>,
        most_bytes: u64,
    ) -> Result<String, BadConfig> {
        let mut text = Self::text_from_env(&env)?;
        let is_named = ["SUBLET_SIM_PROFILE", "SUBLET_SIM_CAPACITY"]
            .iter()
            .any(|name| env(name).is_some())
            || env("SUBLET_SIM_SET").is_some_and(|set| {
                let keys = set.split(';').filter_map(|pair| pair.split_once('='));
                keys.into_iter().any(|(key, _)| key.trim() == "memory")
            });
        let profile = Self::parse(&text)?;
        // Whole GiB are easier to read; less than one is no device.
        let fits = (most_bytes >> 30 << 30).max(1 << 30);
        if !is_named && profile.usable_bytes() > fits {
            let reserved = profile.driver_reserved_bytes;
            text.push_str(&format!("memory = {}B\n", fits + reserved));
        }
        Ok(text)
    }

    /// Parses profile text. A later line wins over an earlier one.
    ///
    /// # Errors
    /// Names the line or the key and what was expected.
    pub fn parse(text: &str) -> Result<Self, BadConfig> {
        let mut fields = Fields::read(text)?;
        let capability = fields.text("compute_capability")?;
        let (major, minor) = capability
            .split_once('.')
            .and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)))
            .ok_or_else(|| {
                BadConfig(format!(
                    "compute_capability = {capability}: expected MAJOR.MINOR"
                ))
            })?;
        let profile = Self {
            name: fields.text("name")?,
            architecture: fields.text("architecture")?,
            major,
            minor,
            devices: fields.number_or("devices", 1.0)? as usize,
            cuda_version: fields.number_or("cuda_version", f64::from(CUDA_VERSION))? as i32,
            multiprocessors: fields.number("multiprocessors")? as i32,
            clock_mhz: fields.number("clock_mhz")? as i32,
            memory_clock_mhz: fields.number("memory_clock_mhz")? as i32,
            memory_bus_bits: fields.number("memory_bus_bits")? as i32,
            memory_bytes: fields.bytes("memory")?,
            driver_reserved_bytes: fields.bytes("driver_reserved")?,
            context_bytes: fields.bytes("context")?,
            l2_bytes: fields.bytes("l2_cache")? as i32,
            shared_per_multiprocessor_bytes: fields.bytes("shared_per_multiprocessor")? as i32,
            shared_per_block_optin_bytes: fields.bytes("shared_per_block_optin")? as i32,
            threads_per_multiprocessor: fields.number("threads_per_multiprocessor")? as i32,
            blocks_per_multiprocessor: fields.number("blocks_per_multiprocessor")? as i32,
            memory_gbps: fields.number("memory_bandwidth_gbps")?,
            compute_gflops: fields.number("compute_gflops")?,
            copy_out_pinned_gbps: match fields.number_or("copy_out_pinned_gbps", 0.0)? {
                0.0 => fields.number_again("copy_pinned_gbps")?,
                rate => rate,
            },
            copy_pinned_gbps: fields.number("copy_pinned_gbps")?,
            copy_pageable_gbps: fields.number("copy_pageable_gbps")?,
            copy_duplex_factor: fields.number_or("copy_duplex_factor", 1.0)?,
            costs: Costs::read(|key| fields.number_or(key, 0.0))?,
            peer_gbps: fields.number("peer_gbps")?,
            launch_ns: fields.number("launch_ns")? as u64,
            default_kernel_ns: fields.number("default_kernel_ns")? as u64,
            timeslice_ns: (fields.number("timeslice_us")? * 1e3) as u64,
            switch_ns: (fields.number("switch_us")? * 1e3) as u64,
            idle_turn_free: fields.switch_or("idle_turn_free", true)?,
            leaves_when_empty: fields.switch_or("leaves_when_empty", false)?,
            launch_call_ns: (fields.number_or("launch_call_us", 0.0)? * 1e3) as u64,
            power_limit_mw: fields.number("power_limit_mw")? as u32,
            driver_version: fields.text_or("driver_version", DRIVER_VERSION)?,
            cluster_launch: fields.number("cluster_launch")? != 0.0,
            speed: fields.number_or("speed", 1.0)?,
            dilation: fields.dilation()?,
        };
        fields.nothing_left()?;
        let positive = [
            ("memory_bandwidth_gbps", profile.memory_gbps),
            ("compute_gflops", profile.compute_gflops),
            ("copy_pinned_gbps", profile.copy_pinned_gbps),
            ("copy_duplex_factor", profile.copy_duplex_factor),
            ("copy_pageable_gbps", profile.copy_pageable_gbps),
            ("peer_gbps", profile.peer_gbps),
            ("speed", profile.speed),
            ("timeslice_us", profile.timeslice_ns as f64),
            ("multiprocessors", f64::from(profile.multiprocessors)),
        ];
        if let Some((key, value)) = positive.into_iter().find(|(_, value)| *value <= 0.0) {
            return Err(BadConfig(format!("{key} = {value}: must be above zero")));
        }
        if profile.copy_duplex_factor > 1.0 {
            return Err(BadConfig(format!(
                "copy_duplex_factor = {}: must be at most 1, no direction gains from the other",
                profile.copy_duplex_factor
            )));
        }
        if profile.devices > MAX_DEVICES {
            return Err(BadConfig(format!(
                "devices = {}: must be at most {MAX_DEVICES}",
                profile.devices
            )));
        }
        if profile.driver_reserved_bytes >= profile.memory_bytes {
            return Err(BadConfig(format!(
                "memory = {} bytes: must be above driver_reserved = {} bytes",
                profile.memory_bytes, profile.driver_reserved_bytes
            )));
        }
        if !profile.name.contains("simulated") {
            return Err(BadConfig(format!(
                "name = {}: must contain the word \"simulated\"",
                profile.name
            )));
        }
        Ok(profile)
    }

    /// Bytes that programs can have on one device.
    pub fn usable_bytes(&self) -> u64 {
        self.memory_bytes - self.driver_reserved_bytes
    }

    /// Identity of a device: the same for every process of every host with this profile.
    pub fn uuid(&self, device: usize) -> [u8; 16] {
        let mut hash = 0xcbf2_9ce4_8422_2325_u64;
        for byte in self.name.bytes() {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
        let mut uuid = [0; 16];
        uuid[..8].copy_from_slice(&hash.to_be_bytes());
        uuid[8..14].copy_from_slice(b"simgpu");
        uuid[15] = device as u8;
        uuid
    }

    /// PCI bus number of a device; domain and device number are 0.
    pub fn pci_bus(&self, device: usize) -> u32 {
        0x18 + device as u32
    }
}

/// Reads `18GiB`, `512MiB`, `1G`, `0B`. 1024-based.
pub fn parse_bytes(text: &str) -> Option<u64> {
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.')?;
    let (number, unit) = text.split_at(digits);
    let shift = match unit.trim() {
        "B" => 0,
        "K" | "KiB" => 10,
        "M" | "MiB" => 20,
        "G" | "GiB" => 30,
        "T" | "TiB" => 40,
        _ => return None,
    };
    let value = number.parse::<f64>().ok()? * (1_u64 << shift) as f64;
    (value.is_finite() && value >= 0.0 && value < 2_f64.powi(62)).then_some(value as u64)
}

struct Fields(BTreeMap<String, String>);

impl Fields {
    fn read(text: &str) -> Result<Self, BadConfig> {
        let mut fields = BTreeMap::new();
        for (number, line) in text.lines().enumerate() {
            let line = line.split('#').next().unwrap_or_default().trim();
            if line.is_empty() {
                continue;
            }
            let (key, value) = line.split_once('=').ok_or_else(|| {
                BadConfig(format!(
                    "profile line {}: \"{line}\" is not KEY = VALUE",
                    number + 1
                ))
            })?;
            fields.insert(key.trim().to_owned(), value.trim().to_owned());
        }
        Ok(Self(fields))
    }

    fn text(&mut self, key: &str) -> Result<String, BadConfig> {
        self.0
            .remove(key)
            .ok_or_else(|| BadConfig(format!("the profile lacks the key \"{key}\"")))
    }

    fn text_or(&mut self, key: &str, default: &str) -> Result<String, BadConfig> {
        if self.0.contains_key(key) {
            self.text(key)
        } else {
            Ok(default.to_owned())
        }
    }

    fn number(&mut self, key: &str) -> Result<f64, BadConfig> {
        let text = self.text(key)?;
        match text.parse::<f64>() {
            Ok(value) if value.is_finite() && value >= 0.0 => Ok(value),
            _ => Err(BadConfig(format!(
                "{key} = {text}: expected a number that is not negative"
            ))),
        }
    }

    /// The number at a key that is still to be read.
    fn number_again(&self, key: &str) -> Result<f64, BadConfig> {
        Self(self.0.clone()).number(key)
    }

    fn number_or(&mut self, key: &str, default: f64) -> Result<f64, BadConfig> {
        if self.0.contains_key(key) {
            self.number(key)
        } else {
            Ok(default)
        }
    }

    fn switch_or(&mut self, key: &str, default: bool) -> Result<bool, BadConfig> {
        match self.number_or(key, f64::from(u8::from(default)))? {
            0.0 => Ok(false),
            1.0 => Ok(true),
            other => Err(BadConfig(format!("{key} = {other}: expected 0 or 1"))),
        }
    }

    fn dilation(&mut self) -> Result<u32, BadConfig> {
        let number = self.number_or("dilation", 1.0)?;
        if number.fract() != 0.0 || !(1.0..=f64::from(MAX_DILATION)).contains(&number) {
            return Err(BadConfig(format!(
                "dilation = {number}: expected a whole number from 1 to {MAX_DILATION}"
            )));
        }
        // CAST: a small whole number.
        Ok(number as u32)
    }

    fn bytes(&mut self, key: &str) -> Result<u64, BadConfig> {
        let text = self.text(key)?;
        parse_bytes(&text).ok_or_else(|| {
            BadConfig(format!(
                "{key} = {text}: expected a size with a unit, such as 16GiB or 512MiB"
            ))
        })
    }

    fn nothing_left(&self) -> Result<(), BadConfig> {
        match self.0.keys().next() {
            None => Ok(()),
            Some(key) => Err(BadConfig(format!(
                "the profile has the unknown key \"{key}\""
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(pairs: &[(&str, &str)]) -> Result<Profile, BadConfig> {
        let find = |name: &str| {
            pairs
                .iter()
                .find(|(key, _)| *key == name)
                .map(|(_, value)| (*value).to_owned())
        };
        Profile::parse(&Profile::text_from_env(find)?)
    }

    #[test]
    fn every_built_in_profile_parses_and_says_that_it_is_simulated() {
        for (name, _) in BUILT_IN {
            let profile = from(&[("SUBLET_SIM_PROFILE", name)]).unwrap();
            assert!(profile.name.contains("simulated"));
            assert!(profile.usable_bytes() > 0);
        }
    }

    #[test]
    fn the_environment_overrides_the_profile() {
        let profile = from(&[
            ("SUBLET_SIM_PROFILE", "t4"),
            ("SUBLET_SIM_CAPACITY", "2GiB"),
            ("SUBLET_SIM_DEVICES", "3"),
            ("SUBLET_SIM_CONTEXT", "0B"),
        ])
        .unwrap();
        assert_eq!(profile.usable_bytes(), 2 << 30);
        assert_eq!((profile.devices, profile.context_bytes), (3, 0));
    }

    #[test]
    fn any_key_can_be_set_and_a_wrong_one_is_named() {
        let profile = from(&[(
            "SUBLET_SIM_SET",
            "copy_out_pinned_gbps=40; vmm_create_us=7.5;copy_duplex_factor=0.8",
        )])
        .unwrap();
        assert_eq!(
            (profile.copy_pinned_gbps, profile.copy_out_pinned_gbps),
            (55.0, 40.0)
        );
        assert_eq!(
            (profile.costs.create_ns, profile.copy_duplex_factor),
            (7_500, 0.8)
        );
        for bad in [
            "vmm_create_us",
            "frobnicate=1",
            "copy_duplex_factor=1.5",
            "copy_duplex_factor=0",
            "vmm_map_us=-1",
        ] {
            let error = from(&[("SUBLET_SIM_SET", bad)]).unwrap_err();
            assert!(
                error.0.contains("SUBLET_SIM_SET") && error.0.contains(bad),
                "{error}"
            );
        }
    }

    #[test]
    fn a_profile_without_costs_has_none_and_copies_both_ways_alike() {
        let text: String = BUILT_IN[0]
            .1
            .lines()
            .filter(|line| !line.starts_with("vmm_") && !line.starts_with("pin_"))
            .map(|line| format!("{line}\n"))
            .collect();
        let profile = Profile::parse(&text).unwrap();
        assert_eq!(profile.costs, Costs::default());
        assert_eq!(profile.copy_out_pinned_gbps, profile.copy_pinned_gbps);
    }

    #[test]
    fn a_device_that_nobody_has_described_fits_the_host() {
        let usable = |pairs: &[(&str, &str)], most_gib: u64| {
            let find = |name: &str| {
                let found = pairs.iter().find(|(key, _)| *key == name);
                found.map(|(_, value)| (*value).to_owned())
            };
            let text = Profile::text_for_host(find, most_gib << 30).unwrap();
            Profile::parse(&text).unwrap().usable_bytes() >> 30
        };
        assert_eq!(usable(&[], 23), 23);
        assert_eq!(usable(&[("SUBLET_SIM_DEVICES", "2")], 23), 23);
        assert_eq!(usable(&[], 0), 1);
        assert_eq!(usable(&[], 2000), 139, "the profile's own");
        for named in [
            ("SUBLET_SIM_PROFILE", "h200"),
            ("SUBLET_SIM_CAPACITY", "139GiB"),
            (
                "SUBLET_SIM_SET",
                "switch_us=1; memory = 139GiB; driver_reserved = 0B",
            ),
        ] {
            assert_eq!(usable(&[named], 23), 139, "{named:?}");
        }
    }

    #[test]
    fn bad_values_are_named_with_the_variable() {
        for (variable, value) in [
            ("SUBLET_SIM_PROFILE", "b9000"),
            ("SUBLET_SIM_CAPACITY", "16"),
            ("SUBLET_SIM_DEVICES", "17"),
            ("SUBLET_SIM_SPEED", "-1"),
            ("SUBLET_SIM_CONTEXT", "much"),
        ] {
            let error = from(&[(variable, value)]).unwrap_err();
            assert!(
                error.0.contains(variable) && error.0.contains(value),
                "{error}"
            );
        }
    }

    #[test]
    fn the_measured_profile_is_had_by_name_alone() {
        let built_in = from(&[]).unwrap();
        let measured = from(&[("SUBLET_SIM_PROFILE", "h200-measured")]).unwrap();
        assert_eq!((built_in.switch_ns, measured.switch_ns), (20_000, 140_000));
        assert_eq!(measured.timeslice_ns, 2_000_000);
        assert_eq!(
            (built_in.launch_call_ns, measured.launch_call_ns),
            (0, 4_100)
        );
        assert!(built_in.idle_turn_free && !measured.idle_turn_free);
        assert!(!built_in.leaves_when_empty && measured.leaves_when_empty);
        let free = from(&[
            ("SUBLET_SIM_PROFILE", "h200-measured"),
            ("SUBLET_SIM_SET", "idle_turn_free=1"),
        ]);
        assert!(free.unwrap().idle_turn_free);
    }

    #[test]
    fn times_are_multiplied_by_a_whole_number() {
        let dilation = |text: &str| {
            let profile = from(&[("SUBLET_SIM_DILATION", text)]);
            profile.map(|profile| profile.dilation)
        };
        assert_eq!(from(&[]).unwrap().dilation, 1);
        assert_eq!(dilation("4"), Ok(4));
        for bad in ["0", "1.5", "1001", "-1", "much"] {
            let error = dilation(bad).unwrap_err().0;
            assert!(
                error.contains("SUBLET_SIM_DILATION") && error.contains(bad),
                "{error}"
            );
        }
    }

    #[test]
    fn devices_differ_in_identity() {
        let profile = from(&[]).unwrap();
        assert_ne!(profile.uuid(0), profile.uuid(1));
    }

    #[test]
    fn sizes_need_a_unit() {
        assert_eq!(parse_bytes("1.5GiB"), Some(3 << 29));
        assert_eq!(parse_bytes("16"), None);
        assert_eq!(parse_bytes("16 furlongs"), None);
    }
}
