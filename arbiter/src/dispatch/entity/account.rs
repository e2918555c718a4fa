//! What a tenant used of the device, and the floor and the cap of its share.
//!
//! Invariant: both see the same time: what is charged to one is charged to the other, once.

use crate::dispatch::bounds::{Bounds, Slices};
use crate::usage::Usage;

/// A stretch of time that is accounted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stretch {
    /// Its end.
    pub now_ns: u64,
    /// Its length.
    pub dt_ns: u64,
    /// At least two tenants wanted the device.
    pub contended: bool,
    /// How long slices are.
    pub slices: Slices,
}

/// How a tenant stood in that time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Stood {
    /// Somebody waited at its gate.
    pub waits: bool,
    /// It was busy.
    pub busy: bool,
    /// Its gate was open.
    pub holds: bool,
}

/// The account of a tenant on a device.
#[derive(Debug)]
pub struct Account {
    usage: Usage,
    bounds: Bounds,
}

impl Account {
    /// It comes, with this floor and this cap.
    pub fn new(now_ns: u64, min_ppm: u32, max_ppm: Option<u32>) -> Self {
        let mut bounds = Bounds::default();
        bounds.set(min_ppm, max_ppm);
        Self {
            usage: Usage {
                since_ns: now_ns,
                ..Usage::default()
            },
            bounds,
        }
    }

    /// What it used.
    pub fn usage(&self) -> &Usage {
        &self.usage
    }

    /// The same, of one that is gone.
    pub fn into_usage(self) -> Usage {
        self.usage
    }

    /// What it had used before, of one that has come back.
    pub fn carry_over(&mut self, usage: Usage) {
        self.usage = usage;
    }

    /// Its floor and its cap.
    pub fn bounds(&self) -> &Bounds {
        &self.bounds
    }

    /// Another floor and another cap, or the same ones.
    pub fn set_bounds(&mut self, min_ppm: u32, max_ppm: Option<u32>) {
        self.bounds.set(min_ppm, max_ppm);
    }

    /// A slice was granted.
    pub fn count_grant(&mut self) {
        self.usage.grants += 1;
    }

    /// Time has passed, of which it used `got_ns`.
    pub fn charge(&mut self, stretch: Stretch, got_ns: u64, stood: Stood) {
        let Stretch { now_ns, dt_ns, .. } = stretch;
        let wants = stood.busy || stood.waits;
        self.bounds.pass(dt_ns, got_ns, wants, stretch.slices);
        if wants {
            self.usage.at_work_ns = now_ns;
        }
        if got_ns > 0 {
            self.usage.device_ns += got_ns;
            self.usage.recent.add(now_ns, got_ns);
            if !stood.holds {
                self.usage.overrun_ns += got_ns;
            }
        }
        if stood.waits && !stood.holds {
            self.usage.wait_ns += dt_ns;
        }
        if stretch.contended && wants {
            self.usage.contended_ns += dt_ns;
            self.usage.contended_device_ns += got_ns;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;
    const STRETCH: Stretch = Stretch {
        now_ns: 100 * MS,
        dt_ns: 10 * MS,
        contended: true,
        slices: Slices {
            min_ns: 2_000_000,
            max_ns: 5_000_000,
        },
    };

    #[test]
    fn what_is_used_is_taken_from_the_cap_and_is_overrun_without_a_slice() {
        let mut account = Account::new(7, 0, Some(500_000));
        let held = Stood {
            busy: true,
            holds: true,
            ..Stood::default()
        };
        account.charge(STRETCH, 4 * MS, held);
        assert!(!account.bounds().is_barred(), "half of the time is its");
        account.charge(
            STRETCH,
            6 * MS,
            Stood {
                holds: false,
                ..held
            },
        );
        assert!(account.bounds().is_barred());
        let usage = account.usage();
        assert_eq!((usage.since_ns, usage.at_work_ns), (7, 100 * MS));
        assert_eq!((usage.device_ns, usage.overrun_ns), (10 * MS, 6 * MS));
        assert_eq!(usage.share_contended(), Some(0.5));
        assert_eq!(account.into_usage().wait_ns, 0);
    }

    #[test]
    fn time_counts_for_those_that_want_the_device() {
        let mut account = Account::new(0, 500_000, None);
        account.charge(STRETCH, 0, Stood::default());
        assert!(!account.bounds().is_owed() && account.usage().contended_ns == 0);
        let waits = Stood {
            waits: true,
            ..Stood::default()
        };
        account.charge(STRETCH, 0, waits);
        assert!(account.bounds().is_owed());
        assert_eq!(
            (account.usage().wait_ns, account.usage().contended_ns),
            (10 * MS, 10 * MS)
        );
        let unopposed = Stretch {
            contended: false,
            ..STRETCH
        };
        account.charge(
            unopposed,
            0,
            Stood {
                holds: true,
                ..waits
            },
        );
        assert_eq!(
            (account.usage().wait_ns, account.usage().contended_ns),
            (10 * MS, 10 * MS)
        );
        account.set_bounds(0, None);
        assert!(!account.bounds().is_owed());
    }
}
