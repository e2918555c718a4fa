//! How the networks learn: first from a teacher's moves, then from what their own moves yield.

use std::collections::BTreeMap;

use super::division::{Division, Input, Prospect};
use super::network::{Adam, Trail};
use super::weights::{Pick, Weights, softmax};
use crate::cluster::{ClusterState, JobId, Random};

/// A move that was made.
#[derive(Clone, PartialEq, Debug)]
pub struct Move {
    /// What was chosen among what.
    pub pick: Pick,
    /// What the critic saw of each job before it.
    pub prospects: Vec<Prospect>,
}

/// The moves of a slot, and what it yielded.
#[derive(Clone, Debug, Default)]
pub struct Slot {
    at_s: f64,
    /// Its jobs, in the order of the prospects, and which part of their work was done before.
    parts: Vec<(JobId, f64)>,
    /// What each job cost in it, below 0; empty until it is closed.
    rewards: Vec<f64>,
    /// What a reward after it counts for.
    discount: f64,
    moves: Vec<Move>,
}

fn part(state: &ClusterState, id: JobId) -> f64 {
    let job = state.job(id);
    if job.is_done() {
        return 1.0;
    }
    (job.done(state.now_s()) / job.work.max(f64::MIN_POSITIVE)).clamp(0.0, 1.0)
}

impl Slot {
    /// A slot that begins.
    #[must_use]
    pub fn new(state: &ClusterState, division: &Division<'_>) -> Self {
        let jobs = (0..division.jobs()).map(|at| division.job(at));
        Self {
            at_s: state.now_s(),
            parts: jobs.map(|id| (id, part(state, id))).collect(),
            ..Self::default()
        }
    }

    /// A move in it.
    pub fn push(&mut self, pick: Pick, prospects: Vec<Prospect>) {
        self.moves.push(Move { pick, prospects });
    }

    /// Its moves.
    #[must_use]
    pub fn moves(&self) -> &[Move] {
        &self.moves
    }

    /// Seconds since it began.
    #[must_use]
    pub fn lasted_s(&self, state: &ClusterState) -> f64 {
        (state.now_s() - self.at_s).max(0.0)
    }

    /// Which part of each job's work was done in it, summed over the jobs.
    #[must_use]
    pub fn yielded(&self, state: &ClusterState) -> f64 {
        let gain = |(id, before): &(JobId, f64)| (part(state, *id) - before).max(0.0);
        self.parts.iter().map(gain).sum()
    }

    /// The slot is over. A job costs the time for which it was there, in tens of slots of `slot_s`
    /// seconds; later costs count for `discount` after each slot.
    ///
    /// DL2's reward is the part of a job's work that was done. Its discounted sum gives up jobs of
    /// days for any shorter one, and the mean completion time does not: these costs add up to it.
    pub fn close(&mut self, state: &ClusterState, discount: f64, slot_s: f64) {
        let slots = self.lasted_s(state) / slot_s;
        let cost = |(id, before): &(JobId, f64)| match part(state, *id) {
            // It ended somewhere in between.
            after if after >= 1.0 && *before < 1.0 => -slots / 20.0,
            _ => -slots / 10.0,
        };
        self.rewards = self.parts.iter().map(cost).collect();
        self.discount = discount.powf(slots);
    }
}

/// How far a step goes, and what counts.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Rates {
    /// Length of a step of the policy.
    pub policy: f64,
    /// Length of a step of the critic.
    pub critic: f64,
    /// Weight of the entropy of the policy.
    pub entropy: f64,
}

/// Learns. Keeps the momentum of the steps, not the networks.
#[derive(Clone, Debug)]
pub struct Learner {
    rates: Rates,
    policy: Adam,
    critic: Adam,
}

impl Learner {
    /// A cost counts for this much less a slot later. (DL2: 0.99, with jobs of hours.)
    pub const DISCOUNT: f64 = 0.998;
    /// How far an advantage looks ahead within a slot, and from slot to slot: the rest is left to
    /// the critic (generalised advantages, Schulman et al. 2016).
    const AHEAD: [f64; 2] = [0.95, 0.9];
    /// A move whose chance has changed by more than this since it was made teaches no more in that
    /// direction (Schulman et al. 2017): what lets moves be used more than once.
    const CLIP: f64 = 0.2;
    /// Moves of one step.
    const BATCH: usize = 256;

    /// For these networks.
    #[must_use]
    pub fn new(weights: &Weights, rates: Rates) -> Self {
        Self {
            rates,
            policy: Adam::new(weights.policy.params().len(), rates.policy),
            critic: Adam::new(weights.critic.params().len(), rates.critic),
        }
    }

    /// From now on at these rates.
    pub fn set_rates(&mut self, rates: Rates) {
        self.rates = rates;
        self.policy.set_rate(rates.policy);
        self.critic.set_rate(rates.critic);
    }

    /// A step towards the moves of a teacher. Returns the mean loss, the negative logarithm of the
    /// chance that the policy gave to them.
    pub fn imitate(&mut self, weights: &mut Weights, moves: &[(&[Input], usize)]) -> f64 {
        let mut gradient = vec![0.0; weights.policy.params().len()];
        let (mut loss, scale) = (0.0, 1.0 / moves.len().max(1) as f64);
        let mut ascent = Ascent::default();
        for (inputs, chosen) in moves {
            let Some(chances) = ascent.chances(weights, inputs) else {
                continue;
            };
            loss -= scale * chances[*chosen].max(f64::MIN_POSITIVE).ln();
            let slopes: Vec<f64> = chances
                .iter()
                .enumerate()
                .map(|(at, chance)| scale * (chance - f64::from(u8::from(at == *chosen))))
                .collect();
            ascent.descend(weights, inputs, &slopes, &mut gradient);
        }
        self.policy.step(weights.policy.params_mut(), &gradient);
        loss
    }

    /// Steps of the critic alone towards what followed: before the policy listens to it.
    pub fn watch(&mut self, weights: &mut Weights, episodes: &[Episode]) {
        for episode in episodes {
            for some in judged(weights, episode).chunks(Self::BATCH) {
                self.criticise(weights, some);
            }
        }
    }

    /// `passes` passes over these moves: towards those that yielded more than the critic expected.
    pub fn improve(
        &mut self,
        weights: &mut Weights,
        episodes: &[Episode],
        passes: usize,
        random: &mut Random,
    ) {
        let judge = |episode| judged(weights, episode);
        let mut all: Vec<Judged<'_>> = episodes.iter().flat_map(judge).collect();
        let count = all.len().max(1) as f64;
        let mean = all.iter().map(|one| one.advantage).sum::<f64>() / count;
        let square = all
            .iter()
            .map(|one| (one.advantage - mean).powi(2))
            .sum::<f64>();
        let deviation = (square / count).sqrt().max(1e-9);
        for one in &mut all {
            one.advantage = (one.advantage - mean) / deviation;
        }
        for _ in 0..passes {
            random.shuffle(&mut all);
            for some in all.chunks(Self::BATCH) {
                self.reinforce(weights, some);
                self.criticise(weights, some);
            }
        }
    }

    fn reinforce(&mut self, weights: &mut Weights, moves: &[Judged<'_>]) {
        let mut gradient = vec![0.0; weights.policy.params().len()];
        let scale = 1.0 / moves.len() as f64;
        let mut ascent = Ascent::default();
        for Judged { one, advantage, .. } in moves {
            let pick = &one.pick;
            let Some(chances) = ascent.chances(weights, &pick.inputs) else {
                continue;
            };
            let slopes = slopes(&chances, pick, *advantage, self.rates.entropy);
            let slopes: Vec<f64> = slopes.map(|slope| scale * slope).collect();
            ascent.descend(weights, &pick.inputs, &slopes, &mut gradient);
        }
        self.policy.step(weights.policy.params_mut(), &gradient);
    }

    fn criticise(&mut self, weights: &mut Weights, moves: &[Judged<'_>]) {
        let mut gradient = vec![0.0; weights.critic.params().len()];
        let jobs: usize = moves.iter().map(|one| one.targets.len()).sum();
        let scale = 2.0 / jobs.max(1) as f64;
        let mut trail = Trail::default();
        for one in moves {
            for (prospect, target) in one.one.prospects.iter().zip(&one.targets) {
                let error = weights.critic.trace(prospect, &mut trail) - target;
                weights
                    .critic
                    .descend(prospect, &trail, scale * error, &mut gradient);
            }
        }
        self.critic.step(weights.critic.params_mut(), &gradient);
    }
}

/// Slots one after the other.
#[derive(Clone, Debug, Default)]
pub struct Episode {
    /// Closed slots.
    pub slots: Vec<Slot>,
    /// The jobs after the last slot, and what the critic sees of them; those that are missing are
    /// over.
    pub after: Vec<(JobId, Prospect)>,
}

/// A move with what came of it.
struct Judged<'a> {
    one: &'a Move,
    /// By how much it was better than the critic expected.
    advantage: f64,
    /// What the critic should have said of each job.
    targets: Vec<f64>,
}

/// What came of each move. The critic says of each job what it will still cost, later costs
/// discounted. A move is judged by the jobs that were there: what comes with a job that
/// arrives later is no merit of it, and would drown what is.
fn judged<'a>(weights: &Weights, episode: &'a Episode) -> Vec<Judged<'a>> {
    let says = |prospect: &Prospect| weights.critic.answer(prospect);
    // Of each job at the beginning of the next slot: what the critic says, and what came.
    let after = episode
        .after
        .iter()
        .map(|(id, prospect)| (*id, [says(prospect); 2]));
    let mut next: BTreeMap<JobId, [f64; 2]> = after.collect();
    let mut all = Vec::new();
    let [within, between] = Learner::AHEAD;
    for slot in episode.slots.iter().rev() {
        let jobs = slot.parts.iter().zip(&slot.rewards);
        let mut came: Vec<f64> = jobs
            .map(|((id, _), reward)| {
                let [said, came] = next.get(id).copied().unwrap_or_default();
                reward + slot.discount * (said + between * (came - said))
            })
            .collect();
        // What the critic says at the first move, and what came.
        let mut first = [came.clone(), came.clone()];
        for one in slot.moves.iter().rev() {
            let said: Vec<f64> = one.prospects.iter().map(says).collect();
            let more = came.iter().zip(&said).map(|(came, said)| came - said);
            all.push(Judged {
                one,
                advantage: more.sum(),
                targets: came.clone(),
            });
            first = [said.clone(), came.clone()];
            for (came, said) in came.iter_mut().zip(said) {
                *came = said + within * (*came - said);
            }
        }
        let [said, came] = first;
        let both = said.into_iter().zip(came);
        let of = |((id, _), (said, came)): (&(JobId, f64), (f64, f64))| (*id, [said, came]);
        next = slot.parts.iter().zip(both).map(of).collect();
    }
    all
}

/// Slopes of the loss of one move by the score of each: the clipped gain, and the entropy.
fn slopes(chances: &[f64], pick: &Pick, advantage: f64, entropy: f64) -> impl Iterator<Item = f64> {
    let log = |chance: f64| chance.max(f64::MIN_POSITIVE).ln();
    let ratio = (log(chances[pick.chosen]) - pick.log_chance).exp();
    let clipped = match advantage > 0.0 {
        true => ratio > 1.0 + Learner::CLIP,
        false => ratio < 1.0 - Learner::CLIP,
    };
    let push = if clipped { 0.0 } else { advantage * ratio };
    let spread: f64 = chances.iter().map(|chance| -chance * log(*chance)).sum();
    chances.iter().enumerate().map(move |(at, chance)| {
        let is_chosen = f64::from(u8::from(at == pick.chosen));
        push * (chance - is_chosen) + entropy * chance * (log(*chance) + spread)
    })
}

/// Scores of several moves, and the way back.
#[derive(Default)]
struct Ascent {
    trails: Vec<Trail>,
}

impl Ascent {
    fn chances(&mut self, weights: &Weights, inputs: &[Input]) -> Option<Vec<f64>> {
        let missing = inputs.len().saturating_sub(self.trails.len());
        self.trails.extend((0..missing).map(|_| Trail::default()));
        let each = inputs.iter().zip(&mut self.trails);
        softmax(
            each.map(|(input, trail)| weights.policy.trace(input, trail))
                .collect(),
        )
    }

    fn descend(&self, weights: &Weights, inputs: &[Input], slopes: &[f64], into: &mut [f64]) {
        for ((input, trail), slope) in inputs.iter().zip(&self.trails).zip(slopes) {
            weights.policy.descend(input, trail, *slope, into);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::division::CRITIC_INPUTS;
    use super::*;

    fn some_input(random: &mut Random) -> Input {
        std::array::from_fn(|_| random.normal())
    }

    const RATES: Rates = Rates {
        policy: 5e-3,
        critic: 1e-2,
        entropy: 0.01,
    };

    /// A closed slot of one job.
    fn slot(picks: Vec<Pick>, reward: f64, discount: f64) -> Slot {
        let made = picks.into_iter().map(|pick| Move {
            pick,
            prospects: vec![[0.0; CRITIC_INPUTS]],
        });
        Slot {
            at_s: 0.0,
            parts: vec![(JobId(0), 0.0)],
            rewards: vec![reward],
            discount,
            moves: made.collect(),
        }
    }

    #[test]
    fn the_slopes_are_those_of_finite_differences() {
        let mut random = Random::new(6);
        for advantage in [-1.5, 0.7] {
            let scores: Vec<f64> = (0..5).map(|_| random.normal()).collect();
            let chances = softmax(scores.clone()).expect("numbers");
            let pick = Pick {
                inputs: Vec::new(),
                chosen: 2,
                log_chance: chances[2].ln() + 0.05,
            };
            let loss = |scores: &[f64]| {
                let chances = softmax(scores.to_vec()).expect("numbers");
                let ratio = (chances[2].ln() - pick.log_chance).exp();
                let spread: f64 = chances.iter().map(|chance| -chance * chance.ln()).sum();
                -advantage * ratio - 0.1 * spread
            };
            for (at, slope) in slopes(&chances, &pick, advantage, 0.1).enumerate() {
                let moved = |by: f64| {
                    let mut scores = scores.clone();
                    scores[at] += by;
                    loss(&scores)
                };
                let measured = (moved(1e-6) - moved(-1e-6)) / 2e-6;
                assert!((slope - measured).abs() < 1e-6, "{slope} {measured}");
            }
            // A chance that has changed too far already is left as it is.
            let far = if advantage > 0.0 { -0.5 } else { 0.5 };
            let log_chance = chances[2].ln() + far;
            let pick = Pick { log_chance, ..pick };
            assert!(slopes(&chances, &pick, advantage, 0.0).all(|slope| slope == 0.0));
        }
    }

    #[test]
    fn a_teacher_is_imitated_and_what_yields_more_is_done_more() {
        let mut random = Random::new(7);
        let mut weights = Weights::random(16, 1200.0, &mut random);
        let mut learner = Learner::new(&weights, RATES);
        // The teacher takes the smallest of an input.
        let lessons: Vec<(Vec<Input>, usize)> = (0..400)
            .map(|_| {
                let inputs: Vec<Input> = (0..4).map(|_| some_input(&mut random)).collect();
                let by = |a: &&Input, b: &&Input| a[4].total_cmp(&b[4]);
                let least = inputs.iter().min_by(by).expect("four");
                let at = inputs.iter().position(|one| one == least).expect("it");
                (inputs, at)
            })
            .collect();
        let mut losses = Vec::new();
        for _ in 0..25 {
            for some in lessons.chunks(40) {
                let some: Vec<_> = some.iter().map(|(inputs, at)| (&inputs[..], *at)).collect();
                losses.push(learner.imitate(&mut weights, &some));
            }
        }
        let (first, last) = (losses[0], losses[losses.len() - 1]);
        assert!(first > 1.0 && last < 0.2, "{first} {last}");

        // Now the largest yields more.
        let largest = |weights: &Weights| -> f64 {
            let chance = |(inputs, _): &(Vec<Input>, usize)| {
                let chances = Ascent::default().chances(weights, inputs).expect("numbers");
                let by = |a: &(usize, &Input), b: &(usize, &Input)| a.1[4].total_cmp(&b.1[4]);
                let (at, _) = inputs.iter().enumerate().max_by(by).expect("four");
                chances[at]
            };
            lessons.iter().map(chance).sum::<f64>() / lessons.len() as f64
        };
        let before = largest(&weights);
        for _ in 0..60 {
            let slot = |(inputs, _): &(Vec<Input>, usize)| {
                let chances = Ascent::default()
                    .chances(&weights, inputs)
                    .expect("numbers");
                let chosen = random.below(4);
                let pick = Pick {
                    inputs: inputs.clone(),
                    chosen,
                    log_chance: chances[chosen].max(1e-3).ln(),
                };
                slot(vec![pick], inputs[chosen][4], 0.0)
            };
            let episode = Episode {
                slots: lessons.iter().map(slot).collect(),
                after: Vec::new(),
            };
            learner.improve(&mut weights, &[episode], 1, &mut random);
        }
        let after = largest(&weights);
        assert!(after > before + 0.3, "{before} {after}");
    }

    #[test]
    fn an_advantage_is_what_came_and_what_is_expected_against_what_was() {
        let mut weights = Weights::random(2, 1200.0, &mut Random::new(1));
        weights.critic.params_mut().fill(0.0);
        // The critic always says 3.
        if let Some(offset) = weights.critic.params_mut().last_mut() {
            *offset = 3.0;
        }
        let pick = || Pick {
            inputs: Vec::new(),
            chosen: 0,
            log_chance: 0.0,
        };
        let episode = Episode {
            slots: vec![
                slot(vec![pick(), pick()], 2.0, 0.5),
                slot(vec![pick()], 4.0, 0.5),
            ],
            after: vec![(JobId(0), [0.0; CRITIC_INPUTS])],
        };
        let judged = judged(&weights, &episode);
        // The last slot: 4 + 0.5 x 3. The one before: 2 + 0.5 x (3 + 0.9 x 2.5), less what was
        // expected; the first move believes the critic about a part of that.
        let last = 5.5 - 3.0;
        let second = 2.0 + 0.5 * (3.0 + 0.9 * last) - 3.0;
        let [within, _] = Learner::AHEAD;
        for (one, wanted) in judged.iter().zip([last, second, within * second]) {
            assert!((one.advantage - wanted).abs() < 1e-9, "{wanted}");
            assert!((one.targets[0] - wanted - 3.0).abs() < 1e-9, "{wanted}");
        }
        assert_eq!(judged.len(), 3);
    }
}
