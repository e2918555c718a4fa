//! Rounds by tickets, after trades between two types of GPU.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::{Left, RoundAllocator, Turn, fill};
use crate::PolicyError;
use crate::cluster::catalogue::Entry;
use crate::cluster::fair::{Holding, Trader, by_tickets, trade};
use crate::cluster::{ClusterState, GpuType, Job, Manner, Objective, PairTable, Tags, UserId};
use crate::registry::Registration;

/// How it is chosen.
pub(super) static TRADES: Entry<dyn RoundAllocator> = Registration {
    name: "trades",
    summary: "equal parts of two GPU types for each user, after trades",
    params: &[],
    build: |_, context| {
        if !context.speeds_by_type {
            return Err(PolicyError::Needs {
                policy: "trades",
                what: "speeds of jobs by GPU type, which nothing measures here",
            });
        }
        Ok(Box::<Trades>::default())
    },
};

/// Less than this of a GPU is none.
const LITTLE: f64 = 1e-9;
/// How much faster the faster of two types can be taken to be, either way.
const MOST_SPEEDUP: f64 = 100.0;

/// Gandiva-fair (EuroSys'20) on a cluster of two types of GPU: each user holds the same part of
/// both, then those who gain least from fast GPUs sell them to those who gain most ([`trade`]), so
/// that no user is worse off and buyer and seller are better off. Rounds carry that out by stride
/// on each type: the user that had least of its holding there is next, with its job that has had
/// the least service; a gang that does not fit is passed over and loses nothing. GPUs that no user
/// with a claim can use go to jobs by arrival, each on the type where it is fastest.
///
/// With one type, or more than two, users hold their parts of each and do not trade. Trades are
/// made again, and counting begins anew, when a user comes or goes.
#[derive(Clone, Debug, Default)]
pub struct Trades {
    users: BTreeSet<UserId>,
    /// GPUs of each type that a user holds on average.
    holdings: BTreeMap<(UserId, GpuType), f64>,
    /// GPUs times rounds that were given to it.
    given: BTreeMap<(UserId, GpuType), f64>,
    /// Speeds are others than when they traded.
    stale: bool,
}

impl Trades {
    fn divide(&mut self, jobs: &BTreeMap<UserId, Vec<&Job>>, gpus: &[f64]) {
        let kinds: Vec<GpuType> = (0u16..)
            .zip(gpus)
            .filter(|(_, there)| **there > 0.0)
            .map(|(kind, _)| GpuType(kind))
            .collect();
        let there = |kind: GpuType| gpus[usize::from(kind.0)];
        self.holdings.clear();
        self.given.clear();
        let [a, b] = kinds[..] else {
            let part = 1.0 / jobs.len().max(1) as f64;
            for (user, kind) in jobs
                .keys()
                .flat_map(|user| kinds.iter().map(move |kind| (*user, *kind)))
            {
                self.holdings.insert((user, kind), there(kind) * part);
            }
            return;
        };
        // GPU by GPU: what a job of eight says counts eight times.
        let speed = |own: &Vec<&Job>, kind: GpuType| -> f64 {
            let all: f64 = own.iter().map(|job| f64::from(job.gpus)).sum();
            let sum: f64 = own
                .iter()
                .map(|job| job.rate_on(job.gpus, kind) * f64::from(job.gpus))
                .sum();
            sum / all.max(1.0)
        };
        let total = |kind| jobs.values().map(|own| speed(own, kind)).sum::<f64>();
        let (fast, slow) = if total(a) >= total(b) { (a, b) } else { (b, a) };
        let traders: Vec<Trader> = jobs
            .values()
            .map(|own| {
                let speedup = speed(own, fast) / speed(own, slow).max(f64::MIN_POSITIVE);
                Trader {
                    tickets: 1.0,
                    speedup: speedup.clamp(1.0 / MOST_SPEEDUP, MOST_SPEEDUP),
                }
            })
            .collect();
        let held: Vec<Holding> = match traders.len() {
            1 => by_tickets(there(fast), there(slow), &traders),
            _ => trade(there(fast), there(slow), &traders),
        };
        for (user, held) in jobs.keys().zip(held) {
            self.holdings.insert((*user, fast), held.fast);
            self.holdings.insert((*user, slow), held.slow);
        }
    }

    /// How far each claim is ahead of the one that is furthest behind, in rounds.
    fn ahead(&self) -> BTreeMap<(UserId, GpuType), f64> {
        let rounds = |(claim, held): (&(UserId, GpuType), &f64)| {
            let given = self.given.get(claim).copied().unwrap_or(0.0);
            (*held > LITTLE).then_some((*claim, given / held))
        };
        let all: Vec<_> = self.holdings.iter().filter_map(rounds).collect();
        let least = all.iter().map(|(_, r)| *r).fold(f64::INFINITY, f64::min);
        all.into_iter()
            .map(|(claim, r)| (claim, r - least))
            .collect()
    }

    /// How far a user is with what it holds of a type.
    fn pass(&self, claim: &(UserId, GpuType)) -> f64 {
        let held = self.holdings.get(claim).copied().unwrap_or(0.0);
        (self.given.get(claim).copied().unwrap_or(0.0) + 0.5) / held
    }
}

impl RoundAllocator for Trades {
    fn name(&self) -> &'static str {
        "trades"
    }
    fn tags(&self) -> Tags {
        Tags {
            objectives: &[Objective::Fairness],
            manners: &[Manner::Heterogeneous],
            source: "Gandiva-fair, EuroSys'20",
        }
    }
    fn turns(&mut self, state: &ClusterState) -> Vec<Turn> {
        let now_s = state.now_s();
        let mut waiting: BTreeMap<UserId, Vec<&Job>> = BTreeMap::new();
        for job in state.active() {
            waiting.entry(job.user).or_default().push(job);
        }
        let mut left = Left::all(state);
        let users: BTreeSet<UserId> = waiting.keys().copied().collect();
        if users != self.users {
            let gpus: Vec<f64> = left.0.iter().map(|gpus| f64::from(*gpus)).collect();
            self.divide(&waiting, &gpus);
            self.users = users;
        } else if self.stale {
            // The same users: who had more than its part so far waits for the others.
            let ahead = self.ahead();
            let gpus: Vec<f64> = left.0.iter().map(|gpus| f64::from(*gpus)).collect();
            self.divide(&waiting, &gpus);
            for (claim, ahead) in ahead {
                let held = self.holdings.get(&claim).copied().unwrap_or(0.0);
                self.given.insert(claim, held * ahead);
            }
        }
        self.stale = false;
        for own in waiting.values_mut() {
            let service = |job: &Job| job.service_gpu_s(now_s);
            own.sort_by(|a, b| service(a).total_cmp(&service(b)).then(a.id.cmp(&b.id)));
        }
        let mut turns = Vec::new();
        let mut open: Vec<(UserId, GpuType)> = self
            .holdings
            .iter()
            .filter(|(_, held)| **held > LITTLE)
            .map(|(claim, _)| *claim)
            .collect();
        while let Some(at) =
            (0..open.len()).min_by(|a, b| self.pass(&open[*a]).total_cmp(&self.pass(&open[*b])))
        {
            let (user, kind) = open[at];
            let own = waiting.entry(user).or_default();
            let runs = |job: &&&Job| job.rate_on(job.gpus, kind) > 0.0;
            let found = own.iter().filter(runs).find(|job| left.has(kind, job.gpus));
            let Some((id, gpus)) = found.map(|job| (job.id, job.gpus)) else {
                open.swap_remove(at);
                continue;
            };
            left.take(kind, gpus);
            own.retain(|job| job.id != id);
            *self.given.entry((user, kind)).or_default() += f64::from(gpus);
            let jobs = vec![id];
            turns.push(Turn { jobs, kind });
        }
        fill(
            waiting.into_values().flatten().collect(),
            &mut left,
            &mut turns,
        );
        turns
    }
    fn learn(&mut self, _pairs: Option<&Arc<PairTable>>) {
        // The next round trades anew.
        self.stale = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::{GpuId, JobType, Node, Random};

    fn cluster(gpus: &[u32]) -> ClusterState {
        let node = |(kind, gpus): (u16, &u32)| Node {
            first: GpuId(0),
            gpus: *gpus,
            kind: GpuType(kind),
            gpu_bytes: 16 << 30,
            cpus: 8.0,
            mem_bytes: 64 << 30,
        };
        ClusterState::new((0..).zip(gpus).map(node).collect())
    }

    /// Work done per round by each user's jobs, and GPUs per round of each type.
    fn play(state: &ClusterState, users: usize, rounds: u32) -> Vec<(f64, [f64; 3])> {
        play_and(state, users, rounds, |_| ())
    }

    fn play_and(
        state: &ClusterState,
        users: usize,
        rounds: u32,
        before: impl Fn(&mut Trades),
    ) -> Vec<(f64, [f64; 3])> {
        let mut trades = Trades::default();
        let mut done = vec![(0.0, [0.0; 3]); users];
        for _ in 0..rounds {
            before(&mut trades);
            let mut used = [0; 3];
            let mut seen = BTreeSet::new();
            for turn in trades.turns(state) {
                let job = state.job(turn.jobs[0]);
                assert!(seen.insert(job.id), "one turn in a round");
                used[usize::from(turn.kind.0)] += job.gpus;
                let (work, gpus) = &mut done[job.user.0 as usize];
                *work += job.rate_on(job.gpus, turn.kind) / f64::from(rounds);
                gpus[usize::from(turn.kind.0)] += f64::from(job.gpus) / f64::from(rounds);
            }
            for node in state.nodes() {
                assert!(used[usize::from(node.kind.0)] <= node.gpus);
            }
        }
        done
    }

    fn come(state: &mut ClusterState, user: u32, jobs: u32, gpus: u32, speeds: &[f64]) {
        for _ in 0..jobs {
            let mut job = Job::rigid(JobType(user), gpus, 0.0, 1e9);
            job.user = UserId(user);
            job.by_type = Arc::from(speeds);
            state.arrive(job);
        }
    }

    #[test]
    fn buyer_and_seller_both_get_on_faster_than_with_equal_parts() {
        // The first type is 1.2 times as fast for one and 4 times for the other.
        let mut state = cluster(&[4, 8]);
        come(&mut state, 0, 12, 1, &[1.2, 1.0]);
        come(&mut state, 1, 12, 1, &[4.0, 1.0]);
        let done = play(&state, 2, 400);
        let equal = [2.0 * 1.2 + 4.0, 2.0 * 4.0 + 4.0];
        for ((work, gpus), equal) in done.iter().zip(equal) {
            assert!(*work > 1.15 * equal, "{work} for {equal}: {gpus:?}");
        }
        // For the mean of both speed-ups, all that the buyer has buys so much.
        let kept = 2.0 - 4.0 / (1.2f64 * 4.0).sqrt();
        assert!((done[0].1[0] - kept).abs() < 0.02, "{:?}", done[0]);
    }

    #[test]
    fn trading_anew_in_each_round_gives_the_same() {
        let mut state = cluster(&[4, 8]);
        come(&mut state, 0, 12, 1, &[1.2, 1.0]);
        come(&mut state, 1, 12, 1, &[4.0, 1.0]);
        let once = play(&state, 2, 400);
        let often = play_and(&state, 2, 400, |trades| trades.learn(None));
        for ((once, _), (often, gpus)) in once.iter().zip(&often) {
            assert!(
                (once - often).abs() < 0.02 * once,
                "{often} for {once}: {gpus:?}"
            );
        }
    }

    #[test]
    fn nobody_gets_on_slower_than_without_trades() {
        let mut random = Random::new(71);
        for _ in 0..20 {
            let users = 2 + random.below(3);
            let gpus = [2 + random.below(6) as u32, 2 + random.below(6) as u32];
            let mut state = cluster(&gpus);
            let mut equal = Vec::new();
            for user in 0..users {
                let fast = 1.0 + 4.0 * random.unit();
                come(&mut state, user as u32, gpus[0] + gpus[1], 1, &[fast, 1.0]);
                let part = |there: u32| f64::from(there) / users as f64;
                equal.push(part(gpus[0]) * fast + part(gpus[1]));
            }
            for ((work, gpus), equal) in play(&state, users, 300).iter().zip(equal) {
                assert!(*work > 0.98 * equal, "{work} for {equal}: {gpus:?}");
            }
        }
    }

    #[test]
    fn one_type_and_three_are_divided_evenly_and_nothing_that_can_be_used_is_left() {
        for gpus in [&[6][..], &[3, 3, 3]] {
            let mut state = cluster(gpus);
            come(&mut state, 0, 20, 1, &[1.0, 1.0, 1.0]);
            come(&mut state, 1, 20, 1, &[3.0, 1.0, 1.0]);
            let all: u32 = gpus.iter().sum();
            for (_, got) in play(&state, 2, 200) {
                let sum: f64 = got.iter().sum();
                assert!((sum - f64::from(all) / 2.0).abs() < 0.1, "{got:?}");
            }
        }
        // A user with few jobs frees the rest for others; a gang of a whole type is not starved.
        let mut state = cluster(&[4, 4]);
        come(&mut state, 0, 1, 4, &[2.0, 1.0]);
        come(&mut state, 1, 20, 1, &[2.0, 1.0]);
        let done = play(&state, 2, 200);
        assert!(
            (done[0].1.iter().sum::<f64>() - 4.0).abs() < 0.5,
            "{done:?}"
        );
        assert!(
            done.iter().flat_map(|(_, gpus)| gpus).sum::<f64>() > 7.9,
            "{done:?}"
        );
    }
}
