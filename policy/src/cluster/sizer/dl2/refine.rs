//! Learning while jobs run, and when it is given up.
//!
//! What a slot yields is measured: which part of each job's work was done in it. For the same slot
//! it is known what the teacher's division should have yielded by the speeds that jobs report. The
//! teacher decides in the first window, which shows how much of that there really is, restarts and
//! wrong speeds included. Later a window in which the network yields less than the teacher would
//! have is followed by one in which the teacher decides, and the network starts again from its
//! frozen weights.

use std::sync::Arc;

use super::division::Division;
use super::learner::{Episode, Learner, Rates, Slot};
use super::weights::{Pick, Weights};
use crate::cluster::admission::Promises;
use crate::cluster::{ClusterState, Random};

/// Who makes the moves of a decision.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Decides {
    Teacher,
    Network,
}

/// A slot under way.
#[derive(Debug)]
struct Open {
    slot: Slot,
    /// What the teacher's division yields in a second; jobs that end in between are not cut short.
    teacher_per_s: f64,
}

/// What is kept between decisions.
#[derive(Debug)]
pub(super) struct Refinement {
    frozen: Arc<Weights>,
    weights: Weights,
    learner: Learner,
    random: Random,
    open: Option<Open>,
    slots: Vec<Slot>,
    guard: Guard,
}

impl Refinement {
    /// DL2's rate online, and its entropy weighed down as the advantages are in units of their
    /// deviation.
    const RATES: Rates = Rates {
        policy: 1e-4,
        critic: 1e-3,
        entropy: 0.01,
    };
    /// Moves after which it learns.
    const BATCH: usize = 512;
    /// How often it looks at each.
    const PASSES: usize = 2;

    pub(super) fn new(frozen: Arc<Weights>, window: usize) -> Self {
        Self {
            weights: Weights::clone(&frozen),
            learner: Learner::new(&frozen, Self::RATES),
            frozen,
            random: Random::new(0x6f6e_6c69_6e65),
            open: None,
            slots: Vec::new(),
            guard: Guard::new(window),
        }
    }

    pub(super) fn weights(&self) -> &Weights {
        &self.weights
    }

    /// A decision begins: what came of the one before it?
    pub(super) fn begin(
        &mut self,
        state: &ClusterState,
        promises: &Promises,
        division: &Division<'_>,
    ) -> Decides {
        if let Some(Open {
            mut slot,
            teacher_per_s,
        }) = self.open.take()
        {
            let lasted_s = slot.lasted_s(state);
            if lasted_s <= 0.0 {
                // Asked again at the same time: nothing was measured.
                return self.open(state, promises, division);
            }
            let changed = self
                .guard
                .measure(slot.yielded(state), teacher_per_s * lasted_s);
            if changed == Some(Decides::Teacher) {
                self.weights = Weights::clone(&self.frozen);
                self.learner = Learner::new(&self.frozen, Self::RATES);
                self.slots.clear();
            }
            slot.close(state, Learner::DISCOUNT, self.frozen.slot_s);
            match self.guard.decides {
                Decides::Network => self.slots.push(slot),
                Decides::Teacher => self.slots.clear(),
            }
        }
        let moves = self.slots.iter().map(|slot| slot.moves().len());
        if moves.sum::<usize>() >= Self::BATCH {
            let slots = std::mem::take(&mut self.slots);
            let after = (0..division.jobs()).map(|at| division.job(at));
            let after = after.zip(division.prospects(self.frozen.slot_s)).collect();
            let episode = [Episode { slots, after }];
            let random = &mut self.random;
            self.learner
                .improve(&mut self.weights, &episode, Self::PASSES, random);
        }
        self.open(state, promises, division)
    }

    fn open(
        &mut self,
        state: &ClusterState,
        promises: &Promises,
        division: &Division<'_>,
    ) -> Decides {
        if division.jobs() > 0 {
            let mut teacher = Division::new(state, promises);
            while let Some(at) = teacher.teacher() {
                teacher.give(at);
            }
            self.open = Some(Open {
                slot: Slot::new(state, division),
                teacher_per_s: teacher.yields(1.0),
            });
        }
        self.guard.decides
    }

    pub(super) fn pick(&mut self, division: &Division<'_>, moves: &[usize]) -> Option<Pick> {
        self.weights.pick(division, moves, Some(&mut self.random))
    }

    /// A move is about to be made.
    pub(super) fn note(&mut self, division: &Division<'_>, pick: Pick) {
        if let Some(open) = &mut self.open {
            open.slot.push(pick, division.prospects(self.frozen.slot_s));
        }
    }
}

/// Compares what was yielded with what the teacher would have.
#[derive(Debug)]
pub(super) struct Guard {
    window: usize,
    decides: Decides,
    /// Which part of what its division should yield the teacher got when it last decided.
    comes_true: f64,
    slots: usize,
    yielded: f64,
    teacher: f64,
}

impl Guard {
    /// As much less than the teacher is chance.
    const MARGIN: f64 = 0.95;

    fn new(window: usize) -> Self {
        Self {
            window: window.max(1),
            decides: Decides::Teacher,
            comes_true: 1.0,
            slots: 0,
            yielded: 0.0,
            teacher: 0.0,
        }
    }

    /// A slot is over. Who decides from now on, where that changes.
    fn measure(&mut self, yielded: f64, teacher: f64) -> Option<Decides> {
        self.slots += 1;
        self.yielded += yielded;
        self.teacher += teacher;
        if self.slots < self.window {
            return None;
        }
        let (yielded, teacher) = (self.yielded, self.teacher);
        (self.slots, self.yielded, self.teacher) = (0, 0.0, 0.0);
        match self.decides {
            Decides::Teacher => {
                if teacher > 0.0 {
                    self.comes_true = (yielded / teacher).min(1.0);
                }
                self.decides = Decides::Network;
                Some(Decides::Network)
            }
            Decides::Network if yielded < Self::MARGIN * self.comes_true * teacher => {
                self.decides = Decides::Teacher;
                Some(Decides::Teacher)
            }
            Decides::Network => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_that_yields_less_than_its_teacher_has_to_pause() {
        let mut guard = Guard::new(2);
        assert_eq!(
            guard.decides,
            Decides::Teacher,
            "it shows first what it yields"
        );
        assert_eq!(guard.measure(0.8, 1.0), None);
        assert_eq!(guard.measure(0.8, 1.0), Some(Decides::Network));
        // The teacher got 0.8 of what it should: so much is enough.
        assert_eq!(guard.measure(0.7, 1.0), None);
        assert_eq!(guard.measure(0.9, 1.0), None);
        assert_eq!(guard.measure(0.7, 1.0), None);
        assert_eq!(guard.measure(0.7, 1.0), Some(Decides::Teacher));
        assert_eq!(guard.measure(0.0, 0.0), None);
        assert_eq!(guard.measure(0.0, 0.0), Some(Decides::Network));
        assert_eq!(guard.comes_true, 0.8, "nothing was shown");
    }
}
