//! Trains the network of sizer `dl2` in the simulator: first on the decisions of dominant resource
//! fairness, then as actor and critic on what its own decisions yield.
//!
//! Traces are drawn from a pool of real jobs with measured speeds: consecutive jobs with the gaps
//! between their arrivals, stretched so that the cluster has a load between two bounds. Some jobs
//! of a pool can be kept away from training.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;
use policy::cluster::admission::Promises;
use policy::cluster::sizer::dl2::division::{Division, Input};
use policy::cluster::sizer::dl2::learner::{Episode, Learner, Rates, Slot};
use policy::cluster::sizer::dl2::weights::{Weights, see};
use policy::cluster::{
    Choice, ClusterState, Job, JobId, Manner, Objective, Policies, Random, Scheduler, Sizer, Tags,
};

use crate::sim::{Config, SimError, Simulation};
use crate::spec::ClusterSpec;
use crate::trace::{self, Options, Trace, TraceError};

/// Where it is trained.
#[derive(Clone, Debug)]
pub struct World {
    /// Real jobs, by arrival, with speeds on several numbers of GPUs.
    pub pool: Vec<Job>,
    /// The cluster.
    pub spec: ClusterSpec,
    /// Seconds of a slot: decisions are made so far apart.
    pub slot_s: f64,
    /// Seconds that a job loses each time its GPUs change.
    pub restart_s: f64,
    /// Bounds of the load of a trace: GPU time of all jobs where each uses its GPUs best, against
    /// what there is until the last one comes.
    pub load: [f64; 2],
    /// Jobs of a trace.
    pub jobs: usize,
}

impl World {
    /// The cluster that `dl2` is trained and tested on: 4 servers of 8 GPUs, DL2's slot.
    #[must_use]
    pub fn new(pool: Vec<Job>, spec: ClusterSpec) -> Self {
        let most = spec.gpus();
        let fits = |job: &Job| job.rate(most) > 0.0;
        let asks = |mut job: Job| {
            job.gpus = job.gpus.min(most);
            job
        };
        Self {
            pool: pool.into_iter().filter(fits).map(asks).collect(),
            spec,
            slot_s: 1200.0,
            restart_s: 10.0,
            load: [1.0, 2.0],
            jobs: 100,
        }
    }

    /// Of ElasticFlow's cluster03, with the speeds that were measured for its models on A100: what
    /// the weights that come along were trained and tested on. `data` is the folder of data.
    ///
    /// # Errors
    /// [`TraceError`].
    ///
    /// # Panics
    /// Never: the cluster is a constant.
    pub fn itp(data: &Path) -> Result<Self, TraceError> {
        let spec: ClusterSpec = "4x8xA100".parse().expect("a cluster");
        let options = Options {
            gpu_types: spec.gpu_types.clone(),
            part: Some("cluster03".to_owned()),
            elastic: true,
            ..Options::default()
        };
        let file = data.join("elasticflow-itp/itp_jobs.csv");
        Ok(Self::new(trace::read(&file, None, &options)?.jobs, spec))
    }

    /// The jobs that it is trained on: all but the last [`HELD_OUT`].
    #[must_use]
    pub fn training(&self) -> Range<usize> {
        0..self.pool.len().saturating_sub(HELD_OUT)
    }

    /// The jobs that it never sees in training.
    #[must_use]
    pub fn held_out(&self) -> Range<usize> {
        self.training().end..self.pool.len()
    }

    /// How its traces are simulated.
    #[must_use]
    pub fn config(&self) -> Config {
        Config {
            round_s: Some(self.slot_s),
            restart_s: self.restart_s,
            seed: 1,
            ..Config::default()
        }
    }

    /// The jobs from this one on as a trace, at a load between the bounds.
    ///
    /// # Panics
    /// Where the pool has fewer jobs behind `first`.
    #[must_use]
    pub fn trace(&self, first: usize, random: &mut Random) -> Trace {
        let mut jobs = self.pool[first..first + self.jobs].to_vec();
        let [least, most] = self.load;
        let load = least + (most - least) * random.unit();
        let best_s = |job: &Job| {
            let of = (1..=self.spec.gpus()).filter(|gpus| job.rate(*gpus) > 0.0);
            let times = of.map(|gpus| job.work / job.rate(gpus) * f64::from(gpus));
            times.fold(f64::INFINITY, f64::min)
        };
        let work_s: f64 = jobs.iter().map(best_s).sum();
        let span_s = work_s / load / f64::from(self.spec.gpus());
        let begin_s = jobs[0].arrival_s;
        let real_s = jobs
            .last()
            .map_or(0.0, |job| job.arrival_s - begin_s)
            .max(1.0);
        for job in &mut jobs {
            job.arrival_s = (job.arrival_s - begin_s) * span_s / real_s;
            job.phase = policy::cluster::Phase::Waiting {
                since_s: job.arrival_s,
            };
        }
        Trace {
            jobs,
            ..Trace::default()
        }
    }

    /// A trace of jobs in this part of the pool.
    pub fn draw(&self, part: &Range<usize>, random: &mut Random) -> Trace {
        let most = (part.end - part.start).saturating_sub(self.jobs) + 1;
        self.trace(part.start + random.below(most), random)
    }

    /// Mean completion time under a sizer.
    ///
    /// # Errors
    /// [`SimError`].
    pub fn jct_s(&self, trace: &Trace, sizer: Box<dyn Sizer>) -> Result<f64, SimError> {
        let order = Choice::new("fifo", "anywhere").policies(&Default::default());
        let policies = Policies {
            sizer: Some(sizer),
            ..order.expect("policies that need nothing")
        };
        let scheduler = Scheduler::of(policies, 1);
        let simulation = Simulation::new(trace, self.spec.state(), scheduler, self.config())?;
        let outcome = simulation.run(|_| {})?;
        let times = outcome
            .fates
            .iter()
            .filter_map(|fate| Some(fate.end_s? - fate.arrival_s));
        Ok(times.sum::<f64>() / outcome.fates.len().max(1) as f64)
    }
}

/// Jobs at the end of the pool that are kept away from training.
pub const HELD_OUT: usize = 600;

/// How it is trained.
#[derive(Clone, PartialEq, Debug)]
pub struct Recipe {
    /// Seed of all chance.
    pub seed: u64,
    /// Units of a layer.
    pub width: usize,
    /// Traces on which the teacher is watched.
    pub lessons: usize,
    /// How often it looks at each of the teacher's moves.
    pub passes: usize,
    /// Rounds of reinforcement.
    pub rounds: usize,
    /// Traces of a round.
    pub traces: usize,
    /// Rounds after which the network is tried on other traces.
    pub trial: usize,
    /// Weight of the entropy.
    pub entropy: f64,
    /// Length of a step of the policy.
    pub rate: f64,
}

impl Recipe {
    /// The one by which the weights that come along were made.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self {
            seed,
            width: 32,
            lessons: 15,
            passes: 3,
            rounds: 120,
            traces: 6,
            trial: 5,
            entropy: 0.01,
            rate: 4e-4,
        }
    }

    /// The command that trains by it, for the file of weights.
    #[must_use]
    pub fn command(&self) -> String {
        format!(
            "scripts/sim/train-dl2 --seed {} --rounds {} --traces {} --lessons {} --passes {} \
             --rate {} --entropy {}",
            self.seed, self.rounds, self.traces, self.lessons, self.passes, self.rate, self.entropy
        )
    }
}

/// What it has come to.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Progress {
    /// A pass over the teacher's moves, and its mean loss.
    Lesson {
        /// From 1.
        pass: usize,
        /// Mean negative logarithm of the chance of the teacher's move.
        loss: f64,
    },
    /// A trial on traces that rounds do not use.
    Trial {
        /// Rounds so far.
        round: usize,
        /// Mean completion time against the teacher's.
        over_teacher: f64,
    },
}

/// A network after both parts of its training.
#[derive(Clone, Debug)]
pub struct Trained {
    /// After the first: it does as the teacher.
    pub warm: Weights,
    /// After the second.
    pub refined: Weights,
}

/// What is recorded of a run.
#[derive(Debug, Default)]
struct Log {
    /// The teacher's moves: what there was, and which it made.
    lessons: Vec<(Vec<Input>, usize)>,
    episode: Episode,
    open: Option<Slot>,
    most_jobs: usize,
}

/// Who makes the moves of a run that is recorded.
enum Player {
    Teacher,
    /// By chance, as its scores say.
    Explorer(Arc<Weights>, Random),
}

struct Recorded {
    player: Player,
    log: Arc<Mutex<Log>>,
    slot_s: f64,
}

impl Sizer for Recorded {
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
        let mut log = self.log.lock();
        let mut division = Division::new(state, promises);
        if let Some(mut slot) = log.open.take() {
            slot.close(state, Learner::DISCOUNT, self.slot_s);
            log.episode.slots.push(slot);
        }
        // What the last slot yields is not measured: the critic says what is still to come.
        let after = (0..division.jobs()).map(|at| division.job(at));
        log.episode.after = after.zip(division.prospects(self.slot_s)).collect();
        log.most_jobs = log.most_jobs.max(division.jobs());
        let mut slot = Slot::new(state, &division);
        loop {
            let moves = division.moves();
            if moves.is_empty() {
                break;
            }
            match &mut self.player {
                Player::Teacher => {
                    let Some(at) = division.teacher() else { break };
                    let chosen = moves.iter().position(|one| *one == at).unwrap_or(0);
                    log.lessons.push((see(&division, &moves), chosen));
                    division.give(at);
                }
                Player::Explorer(weights, random) => {
                    let prospects = division.prospects(self.slot_s);
                    let Some(pick) = weights.pick_any(&division, &moves, Some(random)) else {
                        break;
                    };
                    let to = moves.get(pick.chosen).copied();
                    // An end before anybody has a GPU is not obeyed, or nothing would ever run.
                    let to = to.or_else(|| division.teacher().filter(|_| division.is_empty()));
                    slot.push(pick, prospects);
                    let Some(at) = to else { break };
                    division.give(at);
                }
            }
        }
        log.open = Some(slot);
        division.sizes()
    }
}

fn record(world: &World, trace: &Trace, player: Player) -> Result<(Log, f64), SimError> {
    let log = Arc::new(Mutex::new(Log::default()));
    let recorded = Recorded {
        player,
        log: Arc::clone(&log),
        slot_s: world.slot_s,
    };
    let jct_s = world.jct_s(trace, Box::new(recorded))?;
    let log = std::mem::take(&mut *log.lock());
    Ok((log, jct_s))
}

/// The part of a teacher's moves on a trace that the network would make as well.
///
/// # Errors
/// [`SimError`].
pub fn agreement(world: &World, trace: &Trace, weights: &Weights) -> Result<[usize; 2], SimError> {
    let (log, _) = record(world, trace, Player::Teacher)?;
    let agrees = |(inputs, chosen): &&(Vec<Input>, usize)| {
        let scores = inputs.iter().map(|input| weights.policy.answer(input));
        let best = scores
            .enumerate()
            .reduce(|a, b| if b.1 > a.1 { b } else { a });
        best.is_some_and(|(at, _)| at == *chosen)
    };
    Ok([log.lessons.iter().filter(agrees).count(), log.lessons.len()])
}

/// Trains on this part of the pool.
///
/// # Errors
/// [`SimError`].
pub fn train(
    world: &World,
    part: &Range<usize>,
    recipe: &Recipe,
    mut progress: impl FnMut(Progress),
) -> Result<Trained, SimError> {
    let mut random = Random::new(recipe.seed);
    let mut weights = Weights::random(recipe.width, world.slot_s, &mut random);
    let rates = Rates {
        policy: Recipe::IMITATION,
        critic: 1e-3,
        entropy: recipe.entropy,
    };
    let mut learner = Learner::new(&weights, rates);

    let mut lessons = Vec::new();
    for _ in 0..recipe.lessons {
        let trace = world.draw(part, &mut random);
        let (log, _) = record(world, &trace, Player::Teacher)?;
        for (inputs, _) in &log.lessons {
            weights.meet(log.most_jobs, inputs);
        }
        lessons.extend(log.lessons);
    }
    for pass in 1..=recipe.passes {
        // Shorter steps towards the end.
        let left = (recipe.passes - pass + 1) as f64 / recipe.passes as f64;
        learner.set_rates(Rates {
            policy: Recipe::IMITATION * left * left,
            ..rates
        });
        random.shuffle(&mut lessons);
        let (mut loss, mut steps) = (0.0, 0.0);
        for some in lessons.chunks(64) {
            let some: Vec<_> = some.iter().map(|(inputs, at)| (&inputs[..], *at)).collect();
            (loss, steps) = (loss + learner.imitate(&mut weights, &some), steps + 1.0);
        }
        let loss = loss / f64::max(steps, 1.0);
        progress(Progress::Lesson { pass, loss });
    }
    let warm = weights.clone();
    soften(&mut weights, &lessons);
    drop(lessons);

    let trials: Vec<Trace> = (0..TRIALS).map(|_| world.draw(part, &mut random)).collect();
    let teacher = trials
        .iter()
        .map(|trace| record(world, trace, Player::Teacher));
    let teacher: Vec<f64> = teacher
        .map(|run| run.map(|(_, jct_s)| jct_s))
        .collect::<Result<_, _>>()?;
    let over = |weights: &Weights| -> Result<f64, SimError> {
        let weights = Arc::new(weights.clone());
        let mut sum = 0.0;
        for (trace, teacher_s) in trials.iter().zip(&teacher) {
            let sizer = policy::cluster::sizer::Dl2::new(Arc::clone(&weights));
            sum += world.jct_s(trace, Box::new(sizer))? / teacher_s / TRIALS as f64;
        }
        Ok(sum)
    };
    let mut best = (over(&weights)?, weights.clone());
    progress(Progress::Trial {
        round: 0,
        over_teacher: best.0,
    });
    let rates = Rates {
        policy: recipe.rate,
        ..rates
    };
    let mut learner = Learner::new(&weights, rates);
    for round in 1..=recipe.rounds {
        let episodes = explore(world, part, &mut weights, recipe.traces, &mut random)?;
        if round <= CRITIC_FIRST {
            learner.watch(&mut weights, &episodes);
        } else {
            learner.improve(&mut weights, &episodes, 2, &mut random);
        }
        if round % recipe.trial == 0 || round == recipe.rounds {
            let over_teacher = over(&weights)?;
            progress(Progress::Trial {
                round,
                over_teacher,
            });
            if over_teacher < best.0 {
                best = (over_teacher, weights.clone());
            }
        }
    }
    Ok(Trained {
        warm,
        refined: best.1,
    })
}

/// Traces on which a network is tried in training.
const TRIALS: usize = 10;

/// Rounds in which only the critic learns.
const CRITIC_FIRST: usize = 8;

impl Recipe {
    /// Mean chance of the teacher's move when exploration begins.
    const SOFT: f64 = 0.5;
    /// DL2's rate of supervised learning.
    const IMITATION: f64 = 5e-3;
}

/// Scales all scores down, which leaves the best moves the best, until a move by chance is the
/// teacher's about every other time: a network that is sure of every move explores nothing.
fn soften(weights: &mut Weights, lessons: &[(Vec<Input>, usize)]) {
    let some: Vec<_> = lessons.iter().take(2000).collect();
    let mean_chance = |weights: &Weights| -> f64 {
        let chance = |(inputs, chosen): &&(Vec<Input>, usize)| {
            let scores: Vec<f64> = inputs
                .iter()
                .map(|input| weights.policy.answer(input))
                .collect();
            let ratios = scores.iter().map(|score| (score - scores[*chosen]).exp());
            1.0 / ratios.sum::<f64>()
        };
        some.iter().map(chance).sum::<f64>() / some.len().max(1) as f64
    };
    for _ in 0..SOFTENINGS {
        if mean_chance(weights) <= Recipe::SOFT {
            return;
        }
        let answer = weights.policy.width() + 1;
        let params = weights.policy.params_mut();
        let first = params.len() - answer;
        params[first..].iter_mut().for_each(|param| *param *= 0.8);
    }
}

/// Steps of softening at most: each is a fifth.
const SOFTENINGS: usize = 60;

/// Runs by chance, on as many threads as there are processors; the same for each seed.
fn explore(
    world: &World,
    part: &Range<usize>,
    weights: &mut Weights,
    traces: usize,
    random: &mut Random,
) -> Result<Vec<Episode>, SimError> {
    let shared = Arc::new(weights.clone());
    let plans: Vec<(Trace, Random)> = (0..traces)
        .map(|_| (world.draw(part, random), Random::new(random.next_u64())))
        .collect();
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let run = |(trace, random): (Trace, Random)| {
        let player = Player::Explorer(Arc::clone(&shared), random);
        record(world, &trace, player).map(|(log, _)| log)
    };
    let mut logs = Vec::new();
    let mut plans = plans.into_iter().peekable();
    while plans.peek().is_some() {
        let some: Vec<_> = plans.by_ref().take(threads).collect();
        logs.extend(std::thread::scope(|scope| {
            let threads: Vec<_> = some
                .into_iter()
                .map(|plan| scope.spawn(|| run(plan)))
                .collect();
            let joined = threads.into_iter().map(|thread| thread.join());
            let logs = joined.map(|log| log.expect("no run panics"));
            logs.collect::<Vec<_>>()
        }));
    }
    let mut episodes = Vec::new();
    for log in logs {
        let log = log?;
        for one in log.episode.slots.iter().flat_map(Slot::moves) {
            weights.meet(log.most_jobs, &one.pick.inputs);
        }
        episodes.push(log.episode);
    }
    Ok(episodes)
}

#[cfg(test)]
mod tests {
    use policy::cluster::sizer::MaxMin;

    use super::*;

    fn small() -> World {
        let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("data");
        let world = World::itp(&data).expect("a trace of the repository");
        World { jobs: 12, ..world }
    }

    #[test]
    fn what_is_held_out_is_in_no_trace_of_training() {
        let world = World::itp(&Path::new(env!("CARGO_MANIFEST_DIR")).join("data"));
        let world = world.expect("a trace of the repository");
        let (training, held_out) = (world.training(), world.held_out());
        assert_eq!((training.end, held_out.len()), (held_out.start, HELD_OUT));
        let mut random = Random::new(3);
        for _ in 0..50 {
            let trace = world.draw(&training, &mut random);
            assert_eq!(trace.jobs.len(), world.jobs);
            assert!(trace.jobs.is_sorted_by_key(|job| job.arrival_s));
            let first = world.pool.windows(world.jobs).position(|some| {
                let mut pairs = some.iter().zip(&trace.jobs);
                pairs.all(|(real, drawn)| real.work == drawn.work)
            });
            assert!(first.expect("jobs of the pool") + world.jobs <= training.end);
        }
    }

    #[test]
    fn a_short_training_imitates_its_teacher_and_is_the_same_for_the_same_seed() {
        let world = small();
        let recipe = Recipe {
            width: 8,
            lessons: 10,
            passes: 8,
            rounds: CRITIC_FIRST + 2,
            traces: 2,
            ..Recipe::new(5)
        };
        let part = 0..200;
        let mut seen = Vec::new();
        let trained = train(&world, &part, &recipe, |progress| seen.push(progress));
        let trained = trained.expect("a run");
        let again = train(&world, &part, &recipe, |_| {}).expect("a run");
        assert_eq!(trained.warm, again.warm);
        assert_eq!(trained.refined, again.refined);
        let losses: Vec<f64> = seen
            .iter()
            .filter_map(|progress| match progress {
                Progress::Lesson { loss, .. } => Some(*loss),
                Progress::Trial { .. } => None,
            })
            .collect();
        assert!(losses.len() == recipe.passes && losses[recipe.passes - 1] < losses[0]);
        let trace = world.draw(&part, &mut Random::new(9));
        let [same, all] = agreement(&world, &trace, &trained.warm).expect("a run");
        assert!(same * 100 >= all * 80, "{same} of {all}");
        let jct_s = |sizer: Box<dyn Sizer>| world.jct_s(&trace, sizer).expect("a run");
        let teacher_s = jct_s(Box::new(MaxMin));
        let (log, recorded_s) = record(&world, &trace, Player::Teacher).expect("a run");
        assert_eq!(recorded_s, teacher_s, "max-min over GPUs is the teacher");
        assert!(!log.lessons.is_empty());
    }
}
