//! How a device is run, as the quota file or an operator says it.

use serde::{Deserialize, Serialize};

use crate::kinds::{Count, Flag, Policy, Quantum, Size, Word};
use crate::values::{Misbehaviour, SliceMode};

crate::settings! {
    /// How a device is run. `sublet device set` beats the quota file, until it is read again.
    #[derive(Serialize, Deserialize)]
    #[serde(default)]
    pub struct DeviceSettings {
        /// exclusive: one job at a time, in slices; concurrent: all at once, only memory is
        /// limited; auto: all at once while that serves every guaranteed job as well as slices
        /// would, else slices; lend (experimental): all at once, but a job that is ahead of its
        /// share waits while the device holds up one that is behind, and slices where that cannot
        /// be done.
        mode: Word<SliceMode>, unset "`exclusive`", live;
        /// Who runs next: the name of a slice policy, with its parameters where they differ from
        /// their defaults.
        policy: Policy, unset "`stride`", live;
        /// How many jobs may hold the device at once in slices, where the policy makes use of it.
        holders: Count<1, 64>, unset "1", live;
        /// Longest slice ("5ms"), and the slice of two jobs while one of them is guaranteed.
        quantum: Quantum, unset "50 ms, and 5 ms for those two", live;
        /// Shortest slice ("2ms").
        quantum_min: Quantum, unset "2 ms", live;
        /// true: the next job is woken shortly before its turn and polls, so that a hand-over costs
        /// no scheduler's wake-up.
        early_wake: Flag, unset "`true`", live;
        /// What happens to a job that harms the others. report: it is reported; demote: it also
        /// runs after all others until it behaves; kill: its processes are ended.
        misbehaviour: Word<Misbehaviour>, unset "`demote`", live;
        /// Memory kept from every quota, for what is not a job's.
        mem_reserve: Size, unset "none";
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::setting::Settings;
    use crate::span::Span;

    #[test]
    fn what_is_not_said_is_taken_from_the_other() {
        let file = DeviceSettings {
            mode: Some(SliceMode::Auto),
            quantum: Some(Span::from_micros(5000)),
            ..DeviceSettings::default()
        };
        let live = DeviceSettings {
            quantum: Some(Span::from_micros(9000)),
            ..DeviceSettings::default()
        };
        assert!(!live.is_empty() && DeviceSettings::default().is_empty());
        let both = live.or(&file);
        assert_eq!(both.mode, Some(SliceMode::Auto));
        assert_eq!(both.quantum, Some(Span::from_micros(9000)));
    }
}
