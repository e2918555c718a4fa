//! What a job loses or gains by the cores and memory of its servers, if they are modelled (Synergy,
//! OSDI'22).
//!
//! Durations of jobs hold for the GPU-proportional part of a server. A job whose [`Sensitivity`] is
//! known runs at another speed with more or less than that; another job takes its proportional part
//! at unchanged speed. A gang over several servers is as fast as on the worst of them. On GPUs that
//! two jobs share each counts in full, so that both have less of the rest.

use super::fair::{Sensitivity, tune};
use super::{ClusterState, Job, JobId};

/// A job that has less than the least that was measured gets on somehow.
const CRAWL: f64 = 0.01;

/// How a server's cores and memory are divided between the jobs on its GPUs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HostDivision {
    /// In proportion to their GPUs.
    Proportional,
    /// By need, nobody slower than in proportion: [`tune`].
    Tune,
}

impl HostDivision {
    /// As on the command line.
    #[must_use]
    pub fn of(word: &str) -> Option<Self> {
        match word {
            "proportional" => Some(Self::Proportional),
            "tune" => Some(Self::Tune),
            _ => None,
        }
    }
}

/// Jobs on a node, each with its GPUs there.
fn residents(state: &ClusterState, node: usize) -> Vec<(JobId, u32)> {
    let mut on_it: Vec<(JobId, u32)> = Vec::new();
    let there = &state.nodes()[node];
    for gpu in there.first.0..there.first.0 + there.gpus {
        for id in state.residents(super::GpuId(gpu)) {
            match on_it.iter_mut().find(|(known, _)| *known == id) {
                Some((_, gpus)) => *gpus += 1,
                None => on_it.push((id, 1)),
            }
        }
    }
    on_it
}

/// Speeds of jobs with these numbers of GPUs of a node, relative to their speeds with proportional
/// parts.
fn divide(state: &ClusterState, node: usize, jobs: &[(&Job, u32)], how: HostDivision) -> Vec<f64> {
    let there = &state.nodes()[node];
    let held: u32 = jobs.iter().map(|(_, gpus)| gpus).sum();
    let gpus = there.gpus.max(held);
    // CAST: memory of a server is below 2^53.
    let bytes = there.mem_bytes as f64;
    let part = [there.cpus / f64::from(gpus), bytes / f64::from(gpus)];
    let mut plain = Sensitivity::default();
    plain.insert(part[0], part[1], 1.0);
    let needs: Vec<(u32, &Sensitivity)> = jobs
        .iter()
        .map(|(job, gpus)| (*gpus, job.host.as_deref().unwrap_or(&plain)))
        .collect();
    match how {
        HostDivision::Proportional => {
            let speed = |(_, job): &(u32, &Sensitivity)| job.speed(part[0], part[1]);
            needs.iter().map(speed).collect()
        }
        HostDivision::Tune => {
            let given = tune(gpus, there.cpus, bytes, &needs);
            given.into_iter().map(|given| given.speed).collect()
        }
    }
}

/// How fast a running job is, relative to its speed with its proportional part: that of the worst
/// of its nodes. 1 for a job that does not run.
#[must_use]
pub fn speed(state: &ClusterState, id: JobId, how: HostDivision) -> f64 {
    let Some(run) = state.job(id).run() else {
        return 1.0;
    };
    let mut nodes: Vec<usize> = run
        .gpus
        .iter()
        .map(|gpu| state.node_of(*gpu).0 as usize)
        .collect();
    nodes.dedup();
    let on = |node: usize| {
        let on_it = residents(state, node);
        let at = on_it.iter().position(|(other, _)| *other == id);
        let jobs: Vec<(&Job, u32)> = on_it
            .iter()
            .map(|(id, gpus)| (state.job(*id), *gpus))
            .collect();
        let speeds = divide(state, node, &jobs, how);
        at.and_then(|at| speeds.get(at).copied()).unwrap_or(1.0)
    };
    nodes
        .into_iter()
        .map(on)
        .fold(f64::INFINITY, f64::min)
        .max(CRAWL)
}

/// What a job would add to the work done on a node: GPUs x speed of all jobs there with it, less
/// that without it.
#[must_use]
pub fn gain(state: &ClusterState, node: usize, job: &Job, gpus: u32) -> f64 {
    let on_it = residents(state, node);
    let mut jobs: Vec<(&Job, u32)> = on_it
        .iter()
        .map(|(id, gpus)| (state.job(*id), *gpus))
        .collect();
    let work = |jobs: &[(&Job, u32)]| -> f64 {
        let speeds = divide(state, node, jobs, HostDivision::Tune);
        jobs.iter()
            .zip(speeds)
            .map(|((_, gpus), speed)| f64::from(*gpus) * speed)
            .sum()
    };
    let before = work(&jobs);
    jobs.push((job, gpus));
    work(&jobs) - before
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::cluster::{Decision, GpuId, JobType, Node};

    fn state() -> ClusterState {
        let node = || Node {
            first: GpuId(0),
            gpus: 2,
            kind: crate::cluster::GpuType(0),
            gpu_bytes: 16 << 30,
            cpus: 6.0,
            mem_bytes: 20,
        };
        ClusterState::new(vec![node(), node()])
    }

    /// As fast as it has cores, up to 6, with 3 for each GPU of a server.
    fn image() -> Arc<Sensitivity> {
        let mut image = Sensitivity::default();
        for cpus in 1..=6 {
            image.insert(f64::from(cpus), 5.0, f64::from(cpus) / 3.0);
        }
        Arc::new(image)
    }

    fn text() -> Arc<Sensitivity> {
        let mut text = Sensitivity::default();
        text.insert(1.0, 5.0, 1.0);
        Arc::new(text)
    }

    fn run(state: &mut ClusterState, host: Option<Arc<Sensitivity>>, gpus: &[u32]) -> JobId {
        let mut job = Job::rigid(JobType(0), gpus.len() as u32, 0.0, 10.0);
        job.host = host;
        let job = state.arrive(job);
        let place = Decision::Place {
            job,
            gpus: gpus.iter().copied().map(GpuId).collect(),
            class: crate::Class::Guaranteed,
            share: 1.0,
            mem_bytes: None,
        };
        state.apply(&[place]).unwrap();
        job
    }

    #[test]
    fn cores_that_nobody_needs_make_the_neighbour_faster() {
        let mut state = state();
        let first = run(&mut state, Some(image()), &[0]);
        let second = run(&mut state, Some(text()), &[1]);
        assert_eq!(speed(&state, first, HostDivision::Proportional), 1.0);
        assert!((speed(&state, first, HostDivision::Tune) - 5.0 / 3.0).abs() < 1e-9);
        assert_eq!(speed(&state, second, HostDivision::Tune), 1.0);
        // A gang over both nodes is as fast as on the worse one; who is not known takes its part.
        let mut state = self::state();
        let gang = run(&mut state, Some(image()), &[0, 2]);
        let unknown = run(&mut state, None, &[1]);
        assert_eq!(speed(&state, unknown, HostDivision::Tune), 1.0);
        assert_eq!(
            speed(&state, gang, HostDivision::Tune),
            1.0,
            "3 cores beside it"
        );
    }

    #[test]
    fn two_on_one_gpu_have_less_of_the_rest() {
        let mut state = state();
        let host = run(&mut state, Some(image()), &[0, 1]);
        assert_eq!(speed(&state, host, HostDivision::Proportional), 1.0);
        let joiner = run(&mut state, Some(image()), &[0, 1]);
        for id in [host, joiner] {
            assert!((speed(&state, id, HostDivision::Proportional) - 1.0 / 3.0).abs() < 1e-9);
        }
    }

    #[test]
    fn a_job_is_worth_most_where_its_neighbours_need_little() {
        let mut state = state();
        run(&mut state, Some(image()), &[0]);
        run(&mut state, Some(text()), &[2]);
        let mut job = Job::rigid(JobType(0), 1, 0.0, 10.0);
        job.host = Some(image());
        assert!(gain(&state, 1, &job, 1) > gain(&state, 0, &job, 1) + 0.5);
        assert_eq!(HostDivision::of("tune"), Some(HostDivision::Tune));
        assert_eq!(HostDivision::of("other"), None);
    }
}
