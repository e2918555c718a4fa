//! Who shares a GPU with whom.

mod crowd;
mod greedy;
mod measured;
mod opportunistic;
mod tree;
mod trial;
mod util;

pub use greedy::Greedy;
pub use opportunistic::Opportunistic;
pub use tree::{ScoreTree, Sharing};
pub use trial::Trial;
pub use util::UtilSum;

use super::catalogue::Entry;
use super::{ClusterState, GpuId, GpuType, JOBS_ON_GPU, JobId, Profile, Reason, Tags};

/// Every packer: a new one has a line here and a file of its own.
pub(crate) static PACKERS: &[&Entry<dyn Packer>] = &[
    &trial::TRIAL,
    &greedy::GREEDY,
    &util::UTIL_SUM,
    &tree::SCORE_TREE,
    &opportunistic::OPPORTUNISTIC,
];

/// How good a pair would be. Higher is better; pairs of equal value are equally good, and one is
/// chosen at random.
#[derive(Clone, Copy, PartialEq, PartialOrd, Debug)]
pub struct PackScore(pub f64);

/// What becomes of a pair that was measured.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Verdict {
    /// It stays.
    Keep,
    /// The joiner is removed.
    Unpack(Reason),
}

impl From<Option<Reason>> for Verdict {
    fn from(refused: Option<Reason>) -> Self {
        refused.map_or(Self::Keep, Self::Unpack)
    }
}

/// A pair of kinds that was measured on a type of GPU, host first, each at its speed relative to
/// being alone.
pub type Past = (GpuType, Profile, Profile, [f64; 2]);

/// The slot "who shares a GPU with whom?". Only jobs with the same number of GPUs are ever asked
/// about, up to [`Packer::most_jobs`] to a GPU. Of several, the one that came first stands first.
pub trait Packer: Send {
    /// Its name on the command line.
    fn name(&self) -> &'static str;
    /// What it is for.
    fn tags(&self) -> Tags;
    /// Whether `joiner` may come beside `host`, and how good that would be.
    fn score(&self, host: &Profile, joiner: &Profile, kind: GpuType) -> Option<PackScore>;
    /// What host and joiner were measured at together, each relative to its speed alone.
    fn observe(
        &mut self,
        host: &Profile,
        joiner: &Profile,
        kind: GpuType,
        measured: [f64; 2],
    ) -> Verdict;
    /// Jobs on a GPU at most.
    fn most_jobs(&self) -> u32 {
        JOBS_ON_GPU
    }
    /// Whether `joiner` may come beside all of `there`, two or more, and how good that would be
    /// among the places that the joiner could have.
    fn score_beside(
        &self,
        _there: &[&Profile],
        _joiner: &Profile,
        _kind: GpuType,
    ) -> Option<PackScore> {
        None
    }
    /// Why the one that came last has to go, by what all of them, three or more, were measured at
    /// together.
    fn judge_several(
        &self,
        _all: &[&Profile],
        _kind: GpuType,
        _measured: &[f64],
    ) -> Option<Reason> {
        None
    }
    /// The same, and it is remembered for such jobs.
    fn observe_several(&mut self, all: &[&Profile], kind: GpuType, measured: &[f64]) -> Verdict {
        self.judge_several(all, kind, measured).into()
    }
    /// Why such jobs were refused after a measurement of all of them together, where they were.
    fn refused_several(&self, _all: &[&Profile], _kind: GpuType) -> Option<Reason> {
        None
    }
    /// Why the last of these jobs may not come beside the others on these GPUs, though it may
    /// elsewhere.
    fn refused_several_at(
        &self,
        _state: &ClusterState,
        _gpus: &[GpuId],
        _all: &[JobId],
    ) -> Option<Reason> {
        None
    }
    /// Takes note of what was measured before this packer was made: all pairs at once.
    fn remember(&mut self, pairs: &[Past]) {
        for (kind, host, joiner, measured) in pairs {
            self.observe(host, joiner, *kind, *measured);
        }
    }
    /// Why this pair was refused after a measurement, where it was.
    fn refused(&self, _host: &Profile, _joiner: &Profile, _kind: GpuType) -> Option<Reason> {
        None
    }
    /// Why this joiner may not come beside this host on these GPUs, though it may elsewhere.
    fn refused_at(
        &self,
        _state: &ClusterState,
        _gpus: &[GpuId],
        _host: JobId,
        _joiner: JobId,
    ) -> Option<Reason> {
        None
    }
    /// Whether a pair stays as long as neither job is stopped and it is not refused; otherwise
    /// pairs are chosen anew each time.
    fn keeps_pairs(&self) -> bool {
        false
    }
}

/// Both fit into the device's memory by what they were metered at.
fn fits(host: &Profile, joiner: &Profile, gpu_bytes: u64) -> bool {
    all_fit(&[host], joiner, gpu_bytes)
}

/// All of them do.
fn all_fit(there: &[&Profile], joiner: &Profile, gpu_bytes: u64) -> bool {
    let all = there.iter().copied().chain([joiner]);
    together_bytes(all)[0] <= gpu_bytes
}

/// What jobs need of a device's memory together, and what of theirs is in the server's memory then.
///
/// While everything fits nothing moves. Else all that can move leaves for the one that runs: what
/// stays has to fit beside the largest part that moves, and the other parts are away.
#[must_use]
pub fn together_bytes<'a>(all: impl Iterator<Item = &'a Profile>) -> [u64; 2] {
    let (mut fixed, mut movable, mut largest) = (0u64, 0u64, 0u64);
    for profile in all {
        let [stays, moves] = profile.fixed_and_movable_bytes();
        fixed = fixed.saturating_add(stays);
        movable = movable.saturating_add(moves);
        largest = largest.max(moves);
    }
    [fixed.saturating_add(largest), movable - largest]
}
