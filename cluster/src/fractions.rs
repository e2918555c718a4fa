//! Pods that ask for parts of GPUs, any number of them on one, and what placing them leaves over.
//!
//! A pod asks for thousandths of one GPU, or for whole GPUs of one server. What the pods of a GPU
//! ask for adds up, to a whole GPU at most, and so does their memory where it is known
//! ([`Pod::bytes`]). Pods come and stay: the question is how much of the cluster can be given away,
//! and what is left in parts that are too small for what comes next.
//!
//! A free part counts as fragmented for a pod that it cannot serve. Weighed by how often each pod
//! is asked for, this is the measure of FGD (ATC'23), which also places by it: where the parts
//! that become useless are least. FGD looks at CPUs and memory of the host, too; the trace has
//! neither here.

use std::collections::BTreeMap;

use policy::cluster::Random;

use crate::trace::Trace;

/// Thousandths of a GPU.
pub const WHOLE: u32 = 1000;

/// What a pod asks for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Pod {
    /// GPUs, all of one server.
    pub gpus: u32,
    /// Thousandths of each: below [`WHOLE`] for one GPU alone.
    pub milli: u32,
    /// Memory of each GPU; 0: it is not known.
    pub bytes: u64,
}

/// How a pod finds its place. Of equal places the first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// Where it fits first.
    First,
    /// Where least is left over: on the GPU, then on its server.
    Best,
    /// Where most is left over.
    Worst,
    /// Where the parts that become useless to other pods are least.
    Fragments,
}

/// A cluster of servers that are alike.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Servers {
    /// How many.
    pub servers: usize,
    /// GPUs of each.
    pub gpus: usize,
    /// Memory of each GPU.
    pub gpu_bytes: u64,
    /// Pods on a GPU at most.
    pub most: usize,
}

/// What has become of a cluster.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Filled {
    /// Pods that came.
    pub pods: usize,
    /// Pods that found no place.
    pub refused: usize,
    /// Part of the cluster that was asked for.
    pub asked: f64,
    /// Part that nobody has.
    pub free: f64,
    /// Part that nobody has and that is of no use to a pod, on average over what pods ask for.
    pub fragmented: f64,
    /// Pods on the fullest GPU.
    pub most: usize,
    /// GPUs with three pods or more, of those with any.
    pub crowded: f64,
}

/// The pods of a trace: whole GPUs, and for jobs on one GPU the part that their busy fraction is.
#[must_use]
pub fn pods(trace: &Trace) -> Vec<Pod> {
    let pods = trace.jobs.iter().map(|job| {
        let part = (job.profile.busy * f64::from(WHOLE)).round().max(1.0);
        Pod {
            gpus: job.gpus,
            // CAST: at most a thousand.
            milli: if job.gpus > 1 { WHOLE } else { part as u32 },
            bytes: job.profile.peak_bytes(),
        }
    });
    pods.collect()
}

/// One server.
#[derive(Clone, Debug)]
struct Server {
    free: Vec<u32>,
    bytes: Vec<u64>,
    pods: Vec<usize>,
    /// The best place of each pod that was looked at since the server last changed: how good it is
    /// (less is better), and its GPUs.
    best: BTreeMap<Pod, Option<(f64, Vec<usize>)>>,
}

impl Server {
    fn new(servers: &Servers) -> Self {
        Self {
            free: vec![WHOLE; servers.gpus],
            bytes: vec![servers.gpu_bytes; servers.gpus],
            pods: vec![0; servers.gpus],
            best: BTreeMap::new(),
        }
    }

    fn takes(&self, gpu: usize, pod: &Pod, most: usize) -> bool {
        self.free[gpu] >= pod.milli && self.bytes[gpu] >= pod.bytes && self.pods[gpu] < most
    }

    /// GPUs on which a pod of several could be, or each on which a part could.
    fn places(&self, pod: &Pod, most: usize) -> Vec<Vec<usize>> {
        let open = (0..self.free.len()).filter(|gpu| self.takes(*gpu, pod, most));
        if pod.gpus <= 1 {
            return open.map(|gpu| vec![gpu]).collect();
        }
        let open: Vec<usize> = open.take(pod.gpus as usize).collect();
        match open.len() == pod.gpus as usize {
            true => vec![open],
            false => Vec::new(),
        }
    }

    fn take(&mut self, gpus: &[usize], pod: &Pod) {
        self.best.clear();
        for gpu in gpus {
            self.free[*gpu] -= pod.milli;
            self.bytes[*gpu] -= pod.bytes;
            self.pods[*gpu] += 1;
        }
    }

    /// Free thousandths that a pod cannot use.
    fn useless(&self, pod: &Pod, most: usize) -> u32 {
        let open = |gpu: &usize| self.takes(*gpu, pod, most);
        let count = (0..self.free.len()).filter(open).count();
        if count < pod.gpus as usize {
            return self.free.iter().sum();
        }
        let closed = (0..self.free.len()).filter(|gpu| !open(gpu));
        closed.map(|gpu| self.free[gpu]).sum()
    }

    /// The same on average over what is asked for, each with how often it is.
    fn fragmented(&self, asked: &BTreeMap<Pod, f64>, most: usize) -> f64 {
        let each = asked.iter();
        each.map(|(pod, part)| part * f64::from(self.useless(pod, most)))
            .sum()
    }
}

/// How often each pod is asked for.
fn mix(pods: &[Pod]) -> BTreeMap<Pod, f64> {
    let mut mix = BTreeMap::new();
    for pod in pods {
        *mix.entry(*pod).or_default() += 1.0 / pods.len() as f64;
    }
    mix
}

/// Pods of a trace come by chance, again and again, until that part of the cluster has been asked
/// for. A pod that finds no place is gone.
#[must_use]
pub fn fill(pods: &[Pod], servers: &Servers, place: Place, load: f64, seed: u64) -> Filled {
    let mix = mix(pods);
    let mut all = vec![Server::new(servers); servers.servers];
    let capacity = (servers.servers * servers.gpus) as f64 * f64::from(WHOLE);
    let (mut asked, mut filled) = (0.0, Filled::default());
    let mut random = Random::new(seed);
    while !pods.is_empty() && asked < load * capacity {
        let pod = &pods[random.below(pods.len())];
        filled.pods += 1;
        asked += f64::from(pod.gpus * pod.milli);
        match find(&mut all, pod, place, &mix, servers.most) {
            Some((server, gpus)) => all[server].take(&gpus, pod),
            None => filled.refused += 1,
        }
    }
    let gpus = || all.iter().flat_map(|server| &server.pods);
    let free: u32 = all.iter().flat_map(|server| &server.free).sum();
    let useless: f64 = all
        .iter()
        .map(|server| server.fragmented(&mix, servers.most))
        .sum();
    let used = gpus().filter(|pods| **pods > 0).count();
    filled.asked = asked / capacity;
    filled.free = f64::from(free) / capacity;
    filled.fragmented = useless / capacity;
    filled.most = gpus().copied().max().unwrap_or(0);
    filled.crowded = gpus().filter(|pods| **pods > 2).count() as f64 / f64::max(used as f64, 1.0);
    filled
}

/// The best place of a pod on one server.
fn best_on(
    server: &Server,
    pod: &Pod,
    place: Place,
    mix: &BTreeMap<Pod, f64>,
    most: usize,
) -> Option<(f64, Vec<usize>)> {
    let before = match place {
        Place::Fragments => server.fragmented(mix, most),
        _ => 0.0,
    };
    let whole: u32 = server.free.iter().sum();
    let mut best: Option<(f64, Vec<usize>)> = None;
    for gpus in server.places(pod, most) {
        let left = f64::from(server.free[gpus[0]] - pod.milli);
        // A server has at most 64 GPUs.
        let least = left + f64::from(whole) / f64::from(WHOLE * 64);
        let key = match place {
            Place::First => 0.0,
            Place::Best => least,
            Place::Worst => -least,
            Place::Fragments => {
                let mut then = Server {
                    free: server.free.clone(),
                    bytes: server.bytes.clone(),
                    pods: server.pods.clone(),
                    best: BTreeMap::new(),
                };
                then.take(&gpus, pod);
                then.fragmented(mix, most) - before
            }
        };
        if best.as_ref().is_none_or(|(found, _)| key < *found) {
            best = Some((key, gpus));
        }
    }
    best
}

fn find(
    all: &mut [Server],
    pod: &Pod,
    place: Place,
    mix: &BTreeMap<Pod, f64>,
    most: usize,
) -> Option<(usize, Vec<usize>)> {
    let mut best: Option<(f64, usize)> = None;
    for (at, server) in all.iter_mut().enumerate() {
        if !server.best.contains_key(pod) {
            let found = best_on(server, pod, place, mix, most);
            server.best.insert(*pod, found);
        }
        let Some(Some((key, _))) = server.best.get(pod) else {
            continue;
        };
        if best.is_none_or(|(found, _)| *key < found) {
            best = Some((*key, at));
        }
        if place == Place::First {
            break;
        }
    }
    let (_, at) = best?;
    let (_, gpus) = all[at].best.get(pod)?.clone()?;
    Some((at, gpus))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(gpus: u32, milli: u32) -> Pod {
        Pod {
            gpus,
            milli,
            bytes: 0,
        }
    }

    fn servers(count: usize, gpus: usize, most: usize) -> Servers {
        Servers {
            servers: count,
            gpus,
            gpu_bytes: 16,
            most,
        }
    }

    #[test]
    fn parts_of_a_gpu_add_up_to_one_and_so_does_memory() {
        // Four quarters fill a GPU, and a fifth finds no place.
        let quarters = fill(&[pod(1, 250)], &servers(1, 1, 64), Place::First, 1.25, 1);
        assert_eq!((quarters.pods, quarters.refused, quarters.most), (5, 1, 4));
        assert_eq!((quarters.free, quarters.crowded), (0.0, 1.0));
        // Two at most, by rule or by memory: half of it lies there, of no use to anybody.
        let large = Pod {
            bytes: 8,
            ..pod(1, 250)
        };
        for (pod, most) in [(pod(1, 250), 2), (large, 64)] {
            let two = fill(&[pod], &servers(1, 1, most), Place::Best, 1.0, 1);
            assert_eq!((two.refused, two.most), (2, 2), "{pod:?}");
            assert_eq!((two.free, two.fragmented), (0.5, 0.5), "{pod:?}");
        }
    }

    #[test]
    fn a_gang_needs_whole_gpus_of_one_server() {
        let mut server = Server::new(&servers(1, 4, 64));
        server.take(&[1], &pod(1, 100));
        assert_eq!(server.places(&pod(2, WHOLE), 64), [vec![0, 2]]);
        assert!(server.places(&pod(4, WHOLE), 64).is_empty());
        // 900 thousandths of GPU 1 are of no use to two whole GPUs, and nothing is to four.
        assert_eq!(server.useless(&pod(2, WHOLE), 64), 900);
        assert_eq!(server.useless(&pod(4, WHOLE), 64), 3900);
        assert_eq!(server.useless(&pod(1, 900), 64), 0);
    }

    #[test]
    fn who_looks_at_what_becomes_useless_leaves_whole_gpus_whole() {
        // Half of the pods want a whole GPU. A part of 400 fits on GPU 0, which has 500 left, and
        // on GPU 1, which is whole.
        let mix = mix(&[pod(1, WHOLE), pod(1, 400)]);
        let mut server = Server::new(&servers(1, 2, 64));
        server.take(&[0], &pod(1, 500));
        let gpu = |place| {
            let mut all = [server.clone()];
            find(&mut all, &pod(1, 400), place, &mix, 64).unwrap().1
        };
        assert_eq!(gpu(Place::Fragments), [0]);
        assert_eq!(gpu(Place::Best), [0]);
        assert_eq!(gpu(Place::Worst), [1]);
    }

    #[test]
    fn nothing_is_given_twice_and_the_same_seed_gives_the_same() {
        let mixed = [pod(1, 300), pod(1, 700), pod(1, WHOLE), pod(2, WHOLE)];
        for place in [Place::First, Place::Best, Place::Worst, Place::Fragments] {
            let run = || fill(&mixed, &servers(6, 4, 64), place, 0.9, 7);
            let one = run();
            assert_eq!(one, run());
            assert!(one.free >= 1.0 - one.asked - 1e-9, "{place:?}: {one:?}");
            assert!(one.fragmented <= one.free + 1e-9, "{place:?}: {one:?}");
        }
        assert_eq!(fill(&[], &servers(1, 1, 2), Place::Best, 0.9, 1).pods, 0);
    }
}
