//! A network that was trained in the simulator says who gets the next GPU.
//!
//! * [`division`]: the moves that there are, and what the network sees of them.
//! * [`network`]: two hidden layers, their gradient, a step.
//! * [`weights`]: the networks and the file that keeps them.
//! * [`learner`]: imitation of a teacher, then actor and critic.
//! * [`refine`]: learning goes on while jobs run, and when it is given up.
//!
//! `cluster::dl2` trains it.

pub mod division;
pub mod learner;
pub mod network;
mod refine;
pub mod weights;

use std::sync::{Arc, OnceLock};

use division::Division;
use refine::{Decides, Refinement};
use weights::Weights;

use super::Sizer;
use crate::cluster::admission::Promises;
use crate::cluster::catalogue::{Context, Entry};
use crate::cluster::{ClusterState, JobId, Manner, Objective, Tags};
use crate::registry::{Kind, ParamSpec, PolicyError, Registration, Settings};

/// How it is chosen.
pub(super) static DL2: Entry<dyn Sizer> = Registration {
    name: "dl2",
    summary: "each GPU to the job that a trained network says",
    params: &[
        ParamSpec {
            name: "weights",
            summary: "file of the network's weights; nothing: the ones that come along",
            kind: Kind::Text { default: "" },
        },
        ParamSpec {
            name: "refine",
            summary: "the network goes on learning from the progress of the jobs",
            kind: Kind::Flag { default: false },
        },
        ParamSpec {
            name: "window",
            summary: "decisions after which a refined network is compared with its teacher",
            kind: Kind::Number {
                min: 1.0,
                max: 1e6,
                default: 32.0,
            },
        },
    ],
    build: |settings, context| {
        let weights = weights_of(settings, context)?;
        let mut sizer = Dl2::new(weights);
        if settings.flag("refine") {
            sizer = sizer.refining(settings.number("window") as usize);
        }
        Ok(Box::new(sizer))
    },
};

fn weights_of(settings: &Settings<'_>, context: &Context) -> Result<Arc<Weights>, PolicyError> {
    let file = settings.text("weights");
    if file.is_empty() {
        return Ok(Dl2::trained());
    }
    let read = context.files.ok_or(PolicyError::Needs {
        policy: "dl2",
        what: "somebody who reads the file of its weights: leave `weights` out",
    })?;
    let bad = |why: String| PolicyError::BadFile {
        policy: "dl2",
        param: "weights",
        file: file.to_owned(),
        why,
    };
    let text = read(file).map_err(bad)?;
    let weights = Weights::read(&text).map_err(|error| bad(error.to_string()))?;
    Ok(Arc::new(weights))
}

/// DL2 (TPDS 2021): all GPUs are handed out anew in each slot, one move after the other. A network
/// scores every move (the next level of one job) and the end of the division, by what is known of
/// the job and of the rest; the best score is made. It was trained on the decisions of dominant
/// resource fairness, then by reinforcement on the time that jobs take.
///
/// *What differs from the paper.* DL2's network sees 20 to 40 jobs side by side and has an output
/// for each; here the same two layers look at each job, so that nothing is learnt once for each
/// place. DL2 learns from a job's type how fast it is; here that is an input, as Optimus has it,
/// because jobs report it. There are no parameter servers. Its reward is the part of
/// a job's work that was done; here it is time, see [`learner::Slot::close`].
///
/// *Safe.* Its teacher makes the move where the network cannot be trusted: more jobs than in
/// training, an input beyond the range of training, a score that is no number, or an end before
/// anybody has a GPU.
#[derive(Debug)]
pub struct Dl2 {
    weights: Arc<Weights>,
    refinement: Option<Refinement>,
    moves: u64,
    fallbacks: u64,
}

impl Dl2 {
    /// With frozen weights.
    #[must_use]
    pub fn new(weights: Arc<Weights>) -> Self {
        Self {
            weights,
            refinement: None,
            moves: 0,
            fallbacks: 0,
        }
    }

    /// The weights that come along.
    ///
    /// # Panics
    /// Never: a test reads them.
    #[must_use]
    pub fn trained() -> Arc<Weights> {
        static TRAINED: OnceLock<Arc<Weights>> = OnceLock::new();
        let read = || Weights::read(include_str!("weights.txt"));
        let trained = TRAINED.get_or_init(|| Arc::new(read().expect("a test reads them")));
        Arc::clone(trained)
    }

    /// It goes on learning, and is compared with its teacher every so many decisions.
    #[must_use]
    pub fn refining(mut self, window: usize) -> Self {
        self.refinement = Some(Refinement::new(Arc::clone(&self.weights), window));
        self
    }

    /// Moves made, and those of them that the teacher made because the network could not be
    /// trusted.
    #[must_use]
    pub fn moves(&self) -> (u64, u64) {
        (self.moves, self.fallbacks)
    }

    /// What it learnt, where it learns.
    #[must_use]
    pub fn refined(&self) -> Option<&Weights> {
        self.refinement.as_ref().map(Refinement::weights)
    }
}

impl Sizer for Dl2 {
    fn name(&self) -> &'static str {
        "dl2"
    }
    fn tags(&self) -> Tags {
        Tags {
            objectives: &[Objective::Completion],
            manners: &[Manner::Elastic],
            source: "DL2, TPDS'21",
        }
    }
    fn resize(&mut self, state: &ClusterState, promises: &Promises) -> Vec<(JobId, u32)> {
        let mut division = Division::new(state, promises);
        let decides = match &mut self.refinement {
            Some(refinement) => refinement.begin(state, promises, &division),
            None => Decides::Network,
        };
        loop {
            let moves = division.moves();
            if moves.is_empty() {
                break;
            }
            self.moves += 1;
            let pick = match (&mut self.refinement, decides) {
                (_, Decides::Teacher) => {
                    division
                        .teacher()
                        .into_iter()
                        .for_each(|at| division.give(at));
                    continue;
                }
                (Some(refinement), Decides::Network) => refinement.pick(&division, &moves),
                (None, Decides::Network) => self.weights.pick(&division, &moves, None),
            };
            let Some(pick) = pick else {
                self.fallbacks += 1;
                division
                    .teacher()
                    .into_iter()
                    .for_each(|at| division.give(at));
                continue;
            };
            let to = moves.get(pick.chosen).copied();
            if let Some(refinement) = &mut self.refinement {
                refinement.note(&division, pick);
            }
            let Some(at) = to else { break };
            division.give(at);
        }
        division.sizes()
    }
}

#[cfg(test)]
mod tests;
