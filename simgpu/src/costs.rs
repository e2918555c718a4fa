//! What calls of the driver cost that manage memory, in time of the calling thread.
//!
//! The driver carries such calls out one after another, whatever thread they come from: a call
//! takes its time on a timeline of the process, behind those before it; or of all processes, where
//! the driver's locks are the machine's. Costs go with the number of handles, not with their bytes;
//! locking pages goes with bytes. Where the figures of the profiles come from is said in
//! `docs/reference/simgpu.md`.

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
    /// `cuMemAlloc` and `cuMemFree`, in ns.
    pub alloc_ns: u64,
    /// A call that takes memory and gets none, in ns.
    pub failed_ns: u64,
    /// The first launch of a kernel, in ns.
    pub first_launch_ns: u64,
    /// Whether such calls of all processes go one behind the other.
    pub driver_lock: bool,
    /// Whether a value that a stream writes waits for its process's turn on the compute engine.
    pub marks_need_turn: bool,
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
        let (alloc_ns, failed_ns) = (ns("alloc_us")?, ns("failed_call_us")?);
        let first_launch_ns = ns("first_launch_us")?;
        let mut switch = |key: &str| match number(key)? {
            0.0 => Ok(false),
            1.0 => Ok(true),
            other => Err(BadConfig(format!("{key} = {other}: expected 0 or 1"))),
        };
        let synchronise = switch("vmm_synchronise")?;
        let driver_lock = switch("driver_lock")?;
        let marks_need_turn = switch("marks_need_turn")?;
        Ok(Self {
            create_ns,
            map_ns,
            access_ns,
            unmap_ns,
            release_ns,
            pin_gbps: number("pin_gbps")?,
            unpin_gbps: number("unpin_gbps")?,
            synchronise,
            alloc_ns,
            failed_ns,
            first_launch_ns,
            driver_lock,
            marks_need_turn,
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

/// A timeline of such calls: until when the driver is busy with them.
pub struct MemoryTimeline<'a>(pub &'a AtomicU64);

/// A call reserves so much at a time: a process that is killed in a long one leaves little behind,
/// and others' calls come in between.
const PART_NS: u64 = 20_000_000;

impl MemoryTimeline<'_> {
    /// Takes `ns` of the calling thread's time, from `began_ns` on, or behind calls that others
    /// are in. What the host has done for the call since then is a part of it.
    pub fn spend(&self, began_ns: u64, ns: u64) {
        let (mut from_ns, mut left) = (began_ns, ns);
        loop {
            let part = left.min(PART_NS);
            from_ns = self.reserve(from_ns, part);
            clock::work_until(from_ns);
            left -= part;
            if left == 0 {
                break;
            }
        }
    }

    /// When a call ends that takes `ns`.
    fn reserve(&self, began_ns: u64, ns: u64) -> u64 {
        let mut end = 0;
        let _ = self.0.fetch_update(AcqRel, Acquire, |busy| {
            end = busy.max(began_ns) + ns;
            // One that takes no time waits, and keeps nobody waiting.
            Some(if ns == 0 { busy } else { end })
        });
        end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_take_their_time_from_when_they_began_one_behind_the_other() {
        let word = AtomicU64::new(0);
        let memory_timeline = MemoryTimeline(&word);
        assert_eq!(memory_timeline.reserve(1000, 50), 1050);
        assert_eq!(memory_timeline.reserve(1020, 30), 1080);
        assert_eq!(memory_timeline.reserve(2000, 30), 2030);
        // Began before the last one, came behind it.
        assert_eq!(memory_timeline.reserve(1990, 30), 2060);
        // Takes no time: waits for those before it, and keeps nobody waiting.
        assert_eq!(memory_timeline.reserve(2010, 0), 2060);
        assert_eq!(memory_timeline.reserve(9000, 0), 9000);
        assert_eq!(word.load(Relaxed), 2060);
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
        for key in ["vmm_synchronise", "driver_lock", "marks_need_turn"] {
            let read = |value: f64| Costs::read(|of| Ok(if of == key { value } else { 0.0 }));
            assert_ne!(read(1.0).unwrap(), read(0.0).unwrap());
            assert_eq!(read(0.0).unwrap(), Costs::default());
            let error = read(0.5).unwrap_err().0;
            assert!(error.contains(&format!("{key} = 0.5")), "{error}");
        }
    }
}
