//! The decision of a scheduler with a round allocator.

use std::collections::{BTreeMap, BTreeSet};

use super::held::Held;
use super::{ClusterState, Decision, FreeGpus, GpuId, JobId, Scheduler, start};
use crate::cluster::round_allocator::Turn;

impl Scheduler {
    /// Does what the round allocator says. A job that is bound to its GPUs has them before others;
    /// a job that is on GPUs of the type of its turn stays there, as far as no other job has them.
    pub(super) fn take_turns(
        &mut self,
        state: &ClusterState,
        held: &Held,
        batch: &mut Vec<Decision>,
    ) {
        let Some(round_allocator) = &mut self.round_allocator else {
            return;
        };
        let mut turns = round_allocator.turns(state);
        // Allocators know of no promises: who is refused in this batch still waits in the state.
        for turn in &mut turns {
            turn.jobs.retain(|id| !self.promises.refused(*id));
        }
        turns.retain(|turn| !turn.jobs.is_empty());
        let turns = self.possible(turns);
        let mut free = FreeGpus::all(state.nodes());
        let mut at: BTreeMap<usize, Vec<GpuId>> = BTreeMap::new();
        let take = |gpus: &[GpuId], kind, free: &mut FreeGpus| {
            let right = |gpu: &GpuId| state.type_of(*gpu) == kind && free.contains(*gpu);
            let all = !gpus.is_empty() && gpus.iter().all(right);
            if all {
                gpus.iter().for_each(|gpu| {
                    free.take(*gpu);
                });
            }
            all
        };
        for (index, turn) in turns.iter().enumerate() {
            let bound = turn.jobs.iter().find_map(|id| self.placer.bound(*id));
            if let Some(gpus) = bound.filter(|gpus| take(gpus, turn.kind, &mut free)) {
                at.insert(index, gpus);
            }
        }
        for (index, turn) in turns.iter().enumerate() {
            let open = !at.contains_key(&index)
                && turn.jobs.iter().all(|id| self.placer.bound(*id).is_none());
            let mut jobs = turn.jobs.iter().filter(|_| open);
            let stays = jobs.find_map(|id| {
                let gpus = &state.job(*id).run()?.gpus;
                take(gpus, turn.kind, &mut free).then(|| gpus.clone())
            });
            if let Some(gpus) = stays {
                at.insert(index, gpus);
            }
        }
        let mut running: BTreeSet<JobId> = BTreeSet::new();
        for (index, turn) in turns.iter().enumerate() {
            let Some(first) = turn.jobs.first() else {
                continue;
            };
            let gpus = at.remove(&index).or_else(|| {
                let job = state.job(*first);
                let mut some = free.only(|node| state.nodes()[node].kind == turn.kind);
                let gpus = held.place(&*self.placer, state, &mut some, (job, job.gpus))?;
                for gpu in &gpus {
                    free.take(*gpu);
                }
                Some(gpus)
            });
            let Some(gpus) = gpus else {
                self.waits.fragmented.extend(&turn.jobs);
                continue;
            };
            let mut turn = turn.clone();
            if !held.is_empty() {
                let (placer, waits) = (&*self.placer, &mut self.waits);
                let bound = |id: &JobId| placer.bound(*id);
                let mut here: Vec<JobId> = Vec::new();
                // Those that are bound there first: their memory is there.
                turn.jobs.sort_by_key(|id| bound(id).is_none());
                turn.jobs.retain(|id| {
                    let all = [&here[..], &[*id]].concat();
                    let own = bound(id).is_none_or(|own| own == gpus);
                    let stays = own && held.fit_on(state, &gpus, &all);
                    let into = if stays {
                        &mut here
                    } else {
                        &mut waits.fragmented
                    };
                    into.push(*id);
                    stays
                });
            }
            running.extend(&turn.jobs);
            give_gpus(state, &turn, &gpus, batch);
        }
        for id in state.running() {
            if !running.contains(id) {
                batch.push(Decision::Suspend { job: *id });
            }
        }
    }
}

impl Scheduler {
    /// Two jobs that are bound to different GPUs cannot share any: each has a turn of its own.
    fn possible(&self, turns: Vec<Turn>) -> Vec<Turn> {
        let apart = |turn: &Turn| {
            let mut bound = turn.jobs.iter().filter_map(|id| self.placer.bound(*id));
            let first = bound.next();
            bound.any(|other| Some(other) != first)
        };
        let split = |turn: Turn| {
            let single = |id: &JobId| Turn {
                jobs: vec![*id],
                kind: turn.kind,
            };
            if apart(&turn) {
                turn.jobs.iter().map(single).collect()
            } else {
                vec![turn]
            }
        };
        turns.into_iter().flat_map(split).collect()
    }
}

/// Put the one or two jobs of a turn onto these GPUs.
fn give_gpus(state: &ClusterState, turn: &Turn, gpus: &[GpuId], batch: &mut Vec<Decision>) {
    let share = 1.0 / turn.jobs.len() as f64;
    // Who is there already comes first, so that the other comes beside it.
    let here = |id: &JobId| {
        let run = state.job(*id).run();
        run.is_some_and(|run| run.gpus == gpus)
    };
    let (stay, come): (Vec<JobId>, Vec<JobId>) = turn.jobs.iter().partition(|id| here(id));
    for id in &stay {
        let Some(run) = state.job(*id).run() else {
            continue;
        };
        let now_solo = run.beside.is_some() && stay.len() == 1;
        if run.share != share || now_solo {
            batch.push(Decision::Reshare { job: *id, share });
        }
    }
    for id in come {
        let (job, gpus) = (state.job(id), gpus.to_vec());
        batch.push(match job.run() {
            None => start(job, gpus, share),
            Some(_) => Decision::Migrate {
                job: id,
                gpus,
                share,
            },
        });
    }
}
