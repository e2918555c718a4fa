//! A sharing score from a small decision tree, learnt from measured pairs.
//!
//! Lucid (ASPLOS'23) gives each job a score, 0 (tiny), 1 (medium) or 2 (jumbo), by how much the
//! jobs that shared a GPU with it slowed down: mean speed of its pairs below 0.85 is 2, below 0.95
//! is 1, else 0. A tree of depth 3 over what is metered of a job alone predicts the score of jobs
//! that were never paired. Two jobs may share if their scores add up to at most 2 and they fit into
//! memory ("indolent" packing: in doubt, don't). The tree can be printed as rules, so a refusal can
//! be explained. With `jobs` above 2 the scores of all of them have to add up to no more.

use std::fmt::Write as _;

use super::crowd::{self, Crowds};
use super::measured::Measured;
use super::{PackScore, Packer, Past, Verdict, all_fit, fits};
use crate::PolicyError;
use crate::cluster::catalogue::Entry;
use crate::cluster::{GpuType, JOBS_ON_GPU, Manner, Objective, Profile, Reason, Tags};
use crate::registry::Registration;

/// How it is chosen.
pub(super) static SCORE_TREE: Entry<dyn Packer> = Registration {
    name: "score-tree",
    summary: "sharing scores from a tree learnt from pairs",
    params: &[crowd::JOBS],
    build: |settings, context| {
        if context.sharing.is_empty() || context.gpu_bytes == 0 {
            return Err(PolicyError::Needs {
                policy: "score-tree",
                what: "measured pairs of jobs with profiles to learn from: a trace that has both, or, live, those that `--packer trial` has measured on the same state",
            });
        }
        let mut tree = ScoreTree::new(context.gpu_bytes);
        tree.most_jobs = crowd::jobs(settings);
        tree.train(context.sharing.iter().map(|(a, b, speeds)| (a, b, *speeds)));
        Ok(Box::new(tree))
    },
};

/// How much a job harms who shares with it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Sharing {
    /// Hardly.
    Tiny = 0,
    /// Somewhat.
    Medium = 1,
    /// Much.
    Jumbo = 2,
}

impl Sharing {
    /// Lucid's rule on the mean speed of a job's pairs.
    #[must_use]
    pub fn of_mean_speed(speed: f64) -> Self {
        match speed {
            s if s >= 0.95 => Self::Tiny,
            s if s >= 0.85 => Self::Medium,
            _ => Self::Jumbo,
        }
    }
}

/// Most kinds of job that the tree is grown from.
const KINDS_KEPT: usize = 1024;

const FEATURES: [&str; 4] = ["busy", "mem_busy", "memory", "iteration_s"];

fn features(profile: &Profile, gpu_bytes: u64) -> [f64; 4] {
    [
        profile.busy,
        profile.mem_busy,
        profile.peak_bytes() as f64 / gpu_bytes as f64,
        profile.iteration_s,
    ]
}

#[derive(Clone, Debug)]
enum Tree {
    Leaf(Sharing),
    Split {
        feature: usize,
        at: f64,
        below: Box<Tree>,
        above: Box<Tree>,
    },
}

impl Tree {
    /// The split with the lowest Gini impurity, down to `depth` levels (CART).
    fn grow(samples: &mut [([f64; 4], Sharing)], depth: u32) -> Self {
        let counts = |samples: &[([f64; 4], Sharing)]| {
            let mut counts = [0.0; 3];
            for (_, label) in samples {
                counts[*label as usize] += 1.0;
            }
            counts
        };
        let impurity = |samples: &[([f64; 4], Sharing)]| {
            let n = samples.len().max(1) as f64;
            let squares: f64 = counts(samples).iter().map(|c| (c / n).powi(2)).sum();
            samples.len() as f64 * (1.0 - squares)
        };
        // In doubt the more careful one.
        let all = counts(samples);
        let majority = [Sharing::Jumbo, Sharing::Medium, Sharing::Tiny]
            .into_iter()
            .max_by(|a, b| {
                all[*a as usize]
                    .total_cmp(&all[*b as usize])
                    .then((*a).cmp(b))
            })
            .unwrap_or(Sharing::Jumbo);
        let whole = impurity(samples);
        if depth == 0 || whole == 0.0 {
            return Self::Leaf(majority);
        }
        let mut best: Option<(f64, usize, f64, usize)> = None;
        for feature in 0..FEATURES.len() {
            samples.sort_by(|a, b| a.0[feature].total_cmp(&b.0[feature]));
            for cut in 1..samples.len() {
                let (low, high) = (samples[cut - 1].0[feature], samples[cut].0[feature]);
                if low == high {
                    continue;
                }
                let sum = impurity(&samples[..cut]) + impurity(&samples[cut..]);
                if sum < whole - 1e-9 && best.is_none_or(|(least, ..)| sum < least) {
                    best = Some((sum, feature, f64::midpoint(low, high), cut));
                }
            }
        }
        let Some((_, feature, at, cut)) = best else {
            return Self::Leaf(majority);
        };
        samples.sort_by(|a, b| a.0[feature].total_cmp(&b.0[feature]));
        let (low, high) = samples.split_at_mut(cut);
        Self::Split {
            feature,
            at,
            below: Box::new(Self::grow(low, depth - 1)),
            above: Box::new(Self::grow(high, depth - 1)),
        }
    }

    fn ask(&self, features: &[f64; 4]) -> Sharing {
        match self {
            Self::Leaf(label) => *label,
            Self::Split {
                feature,
                at,
                below,
                above,
            } => {
                let side = if features[*feature] < *at {
                    below
                } else {
                    above
                };
                side.ask(features)
            }
        }
    }

    fn print(&self, indent: usize, into: &mut String) {
        let pad = "  ".repeat(indent);
        match self {
            Self::Leaf(label) => {
                let _ = writeln!(into, "{pad}{label:?}");
            }
            Self::Split {
                feature,
                at,
                below,
                above,
            } => {
                let name = FEATURES[*feature];
                let _ = writeln!(into, "{pad}{name} < {at:.3}:");
                below.print(indent + 1, into);
                let _ = writeln!(into, "{pad}else:");
                above.print(indent + 1, into);
            }
        }
    }
}

/// The packer on such a tree.
#[derive(Clone, Debug)]
pub struct ScoreTree {
    tree: Tree,
    gpu_bytes: u64,
    /// Mean speed of the pairs of each kind seen so far: profile, sum, count. The one that was seen
    /// last stands last.
    seen: Vec<(Profile, f64, f64)>,
    measured: Measured,
    crowds: Crowds,
    depth: u32,
    most_jobs: u32,
}

impl ScoreTree {
    /// Knows nothing yet: every job counts as jumbo, so nothing is packed until pairs have been
    /// measured elsewhere.
    #[must_use]
    pub fn new(gpu_bytes: u64) -> Self {
        Self {
            tree: Tree::Leaf(Sharing::Jumbo),
            gpu_bytes,
            seen: Vec::new(),
            measured: Measured::default(),
            crowds: Crowds::default(),
            depth: 3,
            most_jobs: JOBS_ON_GPU,
        }
    }

    /// Learn from measured pairs.
    pub fn train<'a>(
        &mut self,
        pairs: impl IntoIterator<Item = (&'a Profile, &'a Profile, [f64; 2])>,
    ) {
        for (a, b, speeds) in pairs {
            self.count(a, b, speeds);
        }
        self.regrow();
    }

    fn count(&mut self, a: &Profile, b: &Profile, [speed_a, speed_b]: [f64; 2]) {
        let mean = f64::midpoint(speed_a, speed_b);
        if !mean.is_finite() {
            return;
        }
        for profile in [a, b] {
            let known = self
                .seen
                .iter()
                .position(|(seen, ..)| seen.kind == profile.kind);
            let (sum, count) = match known {
                Some(at) => {
                    let (_, sum, count) = self.seen.remove(at);
                    (sum, count)
                }
                None => (0.0, 0.0),
            };
            self.seen.push((profile.sane(), sum + mean, count + 1.0));
            if self.seen.len() > KINDS_KEPT {
                self.seen.remove(0);
            }
        }
    }

    fn regrow(&mut self) {
        let mut samples: Vec<_> = self
            .seen
            .iter()
            .map(|(profile, sum, count)| {
                let label = Sharing::of_mean_speed(sum / count);
                (features(profile, self.gpu_bytes), label)
            })
            .collect();
        self.tree = Tree::grow(&mut samples, self.depth);
    }

    /// The score of a job.
    #[must_use]
    pub fn sharing(&self, profile: &Profile) -> Sharing {
        self.tree.ask(&features(&profile.sane(), self.gpu_bytes))
    }

    /// The tree as rules, one to a line.
    #[must_use]
    pub fn rules(&self) -> String {
        let mut text = String::new();
        self.tree.print(0, &mut text);
        text
    }
}

impl Packer for ScoreTree {
    fn name(&self) -> &'static str {
        "score-tree"
    }
    fn tags(&self) -> Tags {
        Tags {
            objectives: &[Objective::Utilisation],
            manners: &[Manner::Sharing],
            source: "Lucid, ASPLOS'23",
        }
    }
    fn score(&self, host: &Profile, joiner: &Profile, kind: GpuType) -> Option<PackScore> {
        let sum = self.sharing(host) as u32 + self.sharing(joiner) as u32;
        let small = host.gpus <= 8;
        let good = self.refused(host, joiner, kind).is_none();
        (sum <= 2 && small && good && fits(host, joiner, self.gpu_bytes))
            .then(|| PackScore(-f64::from(sum)))
    }
    fn observe(
        &mut self,
        host: &Profile,
        joiner: &Profile,
        kind: GpuType,
        measured: [f64; 2],
    ) -> Verdict {
        self.measured.note(host, joiner, kind, measured);
        self.count(host, joiner, measured);
        self.regrow();
        self.refused(host, joiner, kind).into()
    }
    /// The tree was grown from them where it was built: they count once, and no tree is grown for
    /// each of them.
    fn remember(&mut self, pairs: &[Past]) {
        for (kind, host, joiner, measured) in pairs {
            self.measured.note(host, joiner, *kind, *measured);
        }
    }
    fn refused(&self, host: &Profile, joiner: &Profile, kind: GpuType) -> Option<Reason> {
        self.measured.below(host, joiner, kind, 1.0)
    }
    fn most_jobs(&self) -> u32 {
        self.most_jobs
    }
    fn score_beside(
        &self,
        there: &[&Profile],
        joiner: &Profile,
        kind: GpuType,
    ) -> Option<PackScore> {
        let sharing = |profile: &&Profile| self.sharing(profile) as u32;
        let sum = there.iter().map(sharing).sum::<u32>() + sharing(&joiner);
        let bad = |other: &&Profile| self.refused(other, joiner, kind).is_some();
        let ok = sum <= 2
            && joiner.gpus <= 8
            && all_fit(there, joiner, self.gpu_bytes)
            && !there.iter().any(bad)
            && self
                .refused_several(&crowd::with(there, joiner), kind)
                .is_none();
        ok.then(|| PackScore(-f64::from(sum)))
    }
    fn judge_several(&self, all: &[&Profile], kind: GpuType, measured: &[f64]) -> Option<Reason> {
        let pairs = |a: &Profile, b: &Profile| self.measured.of(a, b, kind);
        let least = (1.0, &pairs as crowd::Pairs<'_>);
        self.crowds.below(all, kind, measured, least)
    }
    fn observe_several(&mut self, all: &[&Profile], kind: GpuType, measured: &[f64]) -> Verdict {
        let refused = self.judge_several(all, kind, measured);
        self.crowds.note(all, kind, measured, refused);
        refused.into()
    }
    fn refused_several(&self, all: &[&Profile], kind: GpuType) -> Option<Reason> {
        self.crowds.refused(all, kind)
    }
    fn keeps_pairs(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Class;
    use crate::cluster::{JobType, Random};

    /// Jobs that are busy `b` of the time; two together slow down by what they ask for beyond one
    /// device, within 3 %.
    fn world(seed: u64) -> Vec<Profile> {
        let mut random = Random::new(seed);
        (0..40)
            .map(|kind| {
                let mut profile = Profile::unknown(JobType(kind), 1, Class::Guaranteed);
                profile.busy = random.unit();
                profile.mem_busy = random.unit() * profile.busy;
                profile.iteration_s = random.unit();
                profile.persistent_bytes = 1 << 30;
                profile
            })
            .collect()
    }

    fn speeds(a: &Profile, b: &Profile, random: &mut Random) -> [f64; 2] {
        let speed = 1.0 / (a.busy + b.busy).max(1.0);
        [0, 1].map(|_| speed * (1.0 + 0.03 * random.normal()))
    }

    #[test]
    fn the_tree_and_what_it_accepts_are_those_found_by_hand() {
        let of = |kind: u32, busy: f64| {
            let mut profile = Profile::unknown(JobType(kind), 1, Class::Guaranteed);
            profile.busy = busy;
            profile.persistent_bytes = 6 << 30;
            profile
        };
        // Each kind beside itself: tiny, medium, and two jumbos.
        let known = [of(0, 0.1), of(1, 0.3), of(2, 0.6), of(3, 0.9)];
        let speeds = [[0.98, 0.96], [0.9, 0.9], [0.9, 0.7], [0.5, 0.5]];
        let mut packer = ScoreTree::new(16 << 30);
        packer.train((known.iter().zip(speeds)).map(|(kind, speeds)| (kind, kind, speeds)));
        // Impurity is 2.5; cut at 0.2 it is 4/3, at 0.45 1, at 0.75 2.
        let rules = [
            "busy < 0.450:",
            "  busy < 0.200:",
            "    Tiny",
            "  else:",
            "    Medium",
            "else:",
            "  Jumbo",
        ];
        assert_eq!(packer.rules().lines().collect::<Vec<_>>(), rules);
        // Kinds that it has not seen: scores add up to 2 at most.
        let [tiny, medium, jumbo] = [of(4, 0.15), of(5, 0.4), of(6, 0.7)];
        let accepts = |a: &Profile, b: &Profile| packer.score(a, b, GpuType(0)).is_some();
        assert!(accepts(&tiny, &jumbo) && accepts(&medium, &medium) && accepts(&tiny, &tiny));
        assert!(!accepts(&medium, &jumbo) && !accepts(&jumbo, &jumbo));
        // Nor on more than 8 GPUs, nor what does not fit into memory together.
        let wide = Profile { gpus: 9, ..tiny };
        assert!(!accepts(&wide, &wide));
        let large = Profile {
            persistent_bytes: 11 << 30,
            ..tiny
        };
        assert!(!accepts(&large, &tiny));
    }

    #[test]
    fn pairs_that_it_was_grown_from_count_once_and_bad_ones_are_refused() {
        let known = world(1);
        let mut random = Random::new(3);
        let pairs: Vec<Past> = known
            .iter()
            .map(|a| (GpuType(0), *a, known[0], speeds(a, &known[0], &mut random)))
            .collect();
        let mut packer = ScoreTree::new(16 << 30);
        packer.train(pairs.iter().map(|(_, a, b, speeds)| (a, b, *speeds)));
        let before = (packer.rules(), packer.seen.clone());
        packer.remember(&pairs);
        packer.remember(&[(GpuType(0), known[1], known[2], [0.1, 0.1])]);
        assert_eq!((packer.rules(), packer.seen.clone()), before);
        assert!(packer.refused(&known[2], &known[1], GpuType(0)).is_some());
    }

    #[test]
    fn pairs_it_accepts_are_good_ones_also_of_jobs_it_never_saw() {
        let (known, unseen) = (world(1), world(2));
        let mut random = Random::new(3);
        let mut packer = ScoreTree::new(16 << 30);
        assert!(packer.score(&known[0], &known[1], GpuType(0)).is_none());
        let mut pairs = Vec::new();
        for a in &known {
            for b in &known {
                pairs.push((a, b, speeds(a, b, &mut random)));
            }
        }
        packer.train(pairs);
        assert!(packer.rules().starts_with("busy <"), "{}", packer.rules());
        let (mut accepted, mut good) = (0, 0);
        for a in &unseen {
            for b in &unseen {
                if packer.score(a, b, GpuType(0)).is_some() {
                    accepted += 1;
                    let [x, y] = speeds(a, b, &mut random);
                    good += usize::from(x.min(y) >= 0.85);
                }
            }
        }
        assert!(accepted > 200, "{accepted}");
        assert!(
            good as f64 >= 0.88 * accepted as f64,
            "{good} of {accepted}"
        );
    }
}
