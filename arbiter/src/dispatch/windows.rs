//! How much of a tenant's work may stay queued on the device: its in-flight bound.
//!
//! What is over before a slice ends harms nobody. So a program whose host runs ahead of the device
//! at times may queue as much as is left of its slice, up to the wide bound: the device has work
//! while the host is behind.
//!
//! Where several are in at once nobody's turn ends, so nobody waits for what is queued: the bound
//! is the wide one, and it counts what the tenant's own work takes, for the others' is on the
//! device meanwhile ([`Window::beside`]). A slice of the hardware's for another context would be
//! taken for a kernel that takes longer than it ever did.
//!
//! A policy may ask for a smaller bound, so that others need not wait long for what is queued.
//!
//! Invariants: no bound is above what the policy asks for; the bound of an opportunistic tenant
//! beside a guaranteed one is always the smallest, for its slice ends when that one comes; nobody
//! has the wide one at the end of a slice within [`CROWDED_NS`] of a moment of contention, nor has
//! a gang, whose kernels wait for each other on several devices.

use channel::Window;
use policy::Class;

use super::entity::RunEntity;
use super::pace::Pace;
use super::roster::Roster;

/// For how long after a moment of contention the small window stays.
const CROWDED_NS: u64 = 1_000_000_000;

/// The in-flight bounds of one device.
#[derive(Debug, Default)]
pub(super) struct Windows {
    crowded_until_ns: u64,
}

impl Windows {
    /// Several tenants want the device.
    pub fn note_contention(&mut self, now_ns: u64) {
        self.crowded_until_ns = now_ns + CROWDED_NS;
    }

    /// That of a tenant; `beside`: others are in at the same time; `most_us`: what the policy asks
    /// for.
    pub fn of(
        &self,
        now_ns: u64,
        (entity, beside): (&RunEntity, bool),
        roster: &Roster,
        pace: &Pace,
        most_us: Option<u32>,
    ) -> Window {
        let window = self.by_contention(now_ns, (entity, beside), roster, pace);
        let most_us = most_us.unwrap_or(u32::MAX).max(1);
        Window {
            us: window.us.min(most_us),
            most_us: window.most_us.min(most_us),
        }
    }

    fn by_contention(
        &self,
        now_ns: u64,
        (entity, beside): (&RunEntity, bool),
        roster: &Roster,
        pace: &Pace,
    ) -> Window {
        let guaranteed = |other: &RunEntity| {
            other.tenant != entity.tenant
                && !other.clients().is_empty()
                && other.class(now_ns) == Class::Guaranteed
                && !other.terms().paused
        };
        let after_all = entity.class(now_ns) == Class::Opportunistic;
        if after_all && roster.iter().any(guaranteed) {
            match beside {
                true => Window::beside(pace.gap_window_us),
                false => Window::always(pace.gap_window_us),
            }
        } else if beside {
            Window::beside(pace.lone_window_us)
        } else if now_ns >= self.crowded_until_ns {
            Window::always(pace.lone_window_us)
        } else if entity.gang {
            Window::always(pace.window_us)
        } else {
            Window {
                us: pace.window_us,
                most_us: pace.lone_window_us,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use policy::TenantId;

    use super::*;
    use crate::dispatch::Mode;
    use crate::dispatch::tests::setup;
    use crate::terms::Terms;

    #[test]
    fn the_wide_bound_comes_back_some_time_after_the_last_contention() {
        let pace = setup(Mode::Exclusive).pace;
        let (mut windows, roster) = (Windows::default(), Roster::default());
        let terms = Terms::plain(Class::Opportunistic, 500_000);
        let entity = RunEntity::new(0, TenantId(7), terms, &pace);
        let of = |windows: &Windows, ns| windows.of(ns, (&entity, false), &roster, &pace, None);
        let wide = Window::always(pace.lone_window_us);
        assert_eq!(of(&windows, 5), wide);
        windows.note_contention(5);
        windows.note_contention(9);
        let crowded = Window {
            us: pace.window_us,
            most_us: pace.lone_window_us,
        };
        assert_eq!(of(&windows, 9 + CROWDED_NS - 1), crowded);
        assert_eq!(of(&windows, 9 + CROWDED_NS), wide);
        // What the policy asks for bounds both.
        let asks = |ns, us| windows.of(ns, (&entity, false), &roster, &pace, Some(us));
        assert_eq!(asks(9 + CROWDED_NS, 700), Window::always(700));
        let narrow = Window {
            most_us: 5000,
            ..crowded
        };
        assert_eq!(asks(10, 5000), narrow);
        // 0 would stand for no bound at all.
        assert_eq!(asks(10, 0), Window::always(1));
        // In at the same time as others it has the wide one, contention or not.
        let beside = |us| windows.of(10, (&entity, true), &roster, &pace, us);
        assert_eq!(beside(None), Window::beside(pace.lone_window_us));
        assert_eq!(beside(Some(700)), Window::beside(700));
    }
}
