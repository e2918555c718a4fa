//! What calls of the driver cost that manage memory, in time of the calling thread.
//!
//! The driver carries such calls out one after another, whatever thread they come from: a call
//! takes its time on a timeline of the process, behind those before it. Costs go with the number of
//! handles, not with their bytes; locking pages goes with bytes. Where the figures of the profiles
//! come from is said in `docs/reference/simgpu.md`.

use std::sync::atomic::{AtomicU64, Ordering::*};

use crate::clock;
use crate::settings::BadConfig;

/// The costs of a profile. All zero: calls take what the host takes for them.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Costs {
    /// `cuMemCreate`, per handle, in ns.
    pub create_ns: u64,
    /// `cuMemMap`, per handle, in ns.
    pub map_ns: u64,
    /// `cuMemSetAccess`, per mapping and location, in ns.
    pub access_ns: u64,
    /// `cuMemUnmap`, per mapping, in ns.
    pub unmap_ns: u64,
    /// `cuMemRelease`, in ns.
    pub release_ns: u64,
    /// Page-locking of host memory, in bytes per ns (GB/s); 0: at once.
    pub pin_gbps: f64,
    /// Giving locked pages back, in bytes per ns; 0: at once.
    pub unpin_gbps: f64,
    /// Whether unmapping and setting access wait for the work of all streams of the process.
    pub synchronise: bool,
}

impl Costs {
    /// Takes them from the fields of a profile.
    ///
    /// # Errors
    /// The key whose value is no number, or not one that it can have.
    pub fn read(mut number: impl FnMut(&str) -> Result<f64, BadConfig>) -> Result<Self, BadConfig> {
        // CAST: rounding a duration to nanoseconds is meant.
        let mut ns = |key: &str| Ok::<u64, BadConfig>((number(key)? * 1e3) as u64);
        let (create_ns, map_ns) = (ns("vmm_create_us")?, ns("vmm_map_us")?);
        let (access_ns, unmap_ns) = (ns("vmm_access_us")?, ns("vmm_unmap_us")?);
        let release_ns = ns("vmm_release_us")?;
        let synchronise = number("vmm_synchronise")?;
        if synchronise != 0.0 && synchronise != 1.0 {
            return Err(BadConfig(format!(
                "vmm_synchronise = {synchronise}: expected 0 or 1"
            )));
        }
        Ok(Self {
            create_ns,
            map_ns,
            access_ns,
            unmap_ns,
            release_ns,
            pin_gbps: number("pin_gbps")?,
            unpin_gbps: number("unpin_gbps")?,
            synchronise: synchronise == 1.0,
        })
    }

    /// What locking the pages of `bytes` costs, in ns.
    pub fn pin_ns(&self, bytes: u64) -> u64 {
        at_rate(bytes, self.pin_gbps)
    }

    /// What giving them back costs, in ns.
    pub fn unpin_ns(&self, bytes: u64) -> u64 {
        at_rate(bytes, self.unpin_gbps)
    }
}

fn at_rate(bytes: u64, gbps: f64) -> u64 {
    if gbps > 0.0 {
        // CAST: rounding is meant.
        (bytes as f64 / gbps) as u64
    } else {
        0
    }
}

/// The process's timeline of such calls.
#[derive(Debug, Default)]
pub struct MemoryTimeline {
    busy_until_ns: AtomicU64,
}

impl MemoryTimeline {
    /// Takes `ns` of the calling thread's time, from `began_ns` on, or behind calls that other
    /// threads are in. What the host has done for the call since then is a part of it.
    pub fn spend(&self, began_ns: u64, ns: u64) {
        if ns == 0 {
            return;
        }
        clock::work_until(self.reserve(began_ns, ns));
    }

    /// When a call ends that takes `ns`.
    fn reserve(&self, began_ns: u64, ns: u64) -> u64 {
        let mut end = 0;
        let _ = self.busy_until_ns.fetch_update(AcqRel, Acquire, |busy| {
            end = busy.max(began_ns) + ns;
            Some(end)
        });
        end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_take_their_time_from_when_they_began_one_behind_the_other() {
        let memory_timeline = MemoryTimeline::default();
        assert_eq!(memory_timeline.reserve(1000, 50), 1050);
        assert_eq!(memory_timeline.reserve(1020, 30), 1080);
        assert_eq!(memory_timeline.reserve(2000, 30), 2030);
        // Began before the last one, came behind it.
        assert_eq!(memory_timeline.reserve(1990, 30), 2060);
    }

    #[test]
    fn locking_goes_with_bytes_and_costs_nothing_without_a_rate() {
        let costs = Costs {
            pin_gbps: 4.0,
            ..Costs::default()
        };
        assert_eq!(
            (costs.pin_ns(4_000_000), costs.unpin_ns(4_000_000)),
            (1_000_000, 0)
        );
    }

    #[test]
    fn a_switch_is_on_or_off() {
        let read =
            |value: f64| Costs::read(|key| Ok(if key == "vmm_synchronise" { value } else { 0.0 }));
        assert!(read(1.0).unwrap().synchronise && !read(0.0).unwrap().synchronise);
        assert!(read(0.5).unwrap_err().0.contains("vmm_synchronise = 0.5"));
    }
}
