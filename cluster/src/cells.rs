//! Tenants with reserved cells, down to a quarter of a GPU, in virtual time: does anybody wait
//! longer because others are there?
//!
//! A request asks for parts of GPUs: so many quarters up to a node, rounded up to a power of two,
//! or whole nodes and one part. A tenant's guaranteed requests are served in their order, as in a
//! cluster of its own; opportunistic ones run on what is free, are displaced, and go on later where
//! they were. A request that is larger than its tenant's reservation is opportunistic.
//!
//! Three ways to share are compared ([`Sharing`]): HiveD's cells (OSDI'20), a private cluster for
//! each tenant, and a quota, which counts units and does not say where they are.

use std::collections::{BTreeMap, VecDeque};

use policy::cluster::Class;
use policy::cluster::admission::cells::{Cell, Cells, TooMuch, UNITS_PER_GPU};

use crate::trace::Trace;

/// A request of a tenant.
#[derive(Clone, PartialEq, Debug)]
pub struct Ask {
    /// Whose, by number.
    pub tenant: usize,
    /// When it comes, in seconds.
    pub arrival_s: f64,
    /// How long it runs.
    pub duration_s: f64,
    /// Quarters of GPUs.
    pub quarters: usize,
    /// It takes what is free, and no more.
    pub opportunistic: bool,
}

/// Nodes, and the levels of the cells that each tenant reserves: 2^level quarters.
#[derive(Clone, Debug)]
pub struct Reservations {
    /// Number of nodes.
    pub nodes: usize,
    /// A node has 2^level quarters.
    pub node_level: usize,
    /// By tenant.
    pub reserved: Vec<Vec<usize>>,
}

/// How tenants share.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Sharing {
    /// Reserved cells, bound when they are used.
    Cells,
    /// Each tenant has its cells alone. Nobody is opportunistic on those of others.
    Private,
    /// A number of quarters for each tenant, anywhere.
    Quota,
}

/// What happened to a request.
#[derive(Clone, Copy, Default, PartialEq, Debug)]
pub struct Happened {
    /// Seconds from its arrival to its first start; `None`: it never started.
    pub waited_s: Option<f64>,
    /// It was guaranteed: not opportunistic, and within its tenant's reservation.
    pub guaranteed: bool,
    /// How often it was displaced.
    pub displaced: u32,
}

/// The requests of a trace: whole GPUs, and for jobs on one GPU the part of it that their busy
/// fraction is, in quarters. Users are tenants as far as there are `tenants`, the others count to
/// the last; where the trace names one user or none, jobs are dealt in turn.
#[must_use]
pub fn asks(trace: &Trace, tenants: usize) -> Vec<Ask> {
    let named = trace.users.all().len() > 1;
    let asks = trace.jobs.iter().enumerate().map(|(at, job)| Ask {
        tenant: match named {
            true => (job.user.0 as usize).min(tenants.max(1) - 1),
            false => at % tenants.max(1),
        },
        arrival_s: job.arrival_s,
        duration_s: job.duration_s(),
        quarters: match job.gpus {
            1 => ((job.profile.busy * UNITS_PER_GPU as f64 - 1e-9).ceil() as usize).max(1),
            gpus => gpus as usize * UNITS_PER_GPU,
        },
        opportunistic: job.profile.class == Class::Opportunistic,
    });
    asks.collect()
}

/// Levels of the cells that a request takes: whole nodes, and a part.
fn levels(quarters: usize, node_level: usize) -> Vec<usize> {
    let mut levels = vec![node_level; quarters >> node_level];
    let rest = quarters & ((1 << node_level) - 1);
    if rest > 0 {
        levels.push(rest.next_power_of_two().ilog2() as usize);
    }
    levels
}

/// A cluster with these cells and nothing else: what its nodes have beyond them is taken.
fn private(levels: &[usize], node_level: usize) -> Option<Cells> {
    let mut beyond: Vec<usize> = levels.iter().flat_map(|level| *level..node_level).collect();
    if levels.is_empty() {
        beyond.push(node_level);
    }
    beyond.sort_unstable_by(|a, b| b.cmp(a));
    let both = [levels.to_vec(), beyond.clone()];
    let mut cells = Cells::new(levels.len().max(1), node_level, &both).ok()?;
    for level in beyond {
        cells.request(1, level)?;
    }
    Some(cells)
}

struct Play<'a> {
    asks: &'a [Ask],
    node_level: usize,
    sharing: Sharing,
    /// One for all, or one for each tenant.
    pools: Vec<Cells>,
    /// Quarters that each tenant may still have, under a quota.
    quota: Vec<usize>,
    guaranteed: Vec<VecDeque<usize>>,
    opportunistic: VecDeque<usize>,
    /// What runs: its cells, or none where it borrows.
    running: BTreeMap<usize, Vec<Cell>>,
    left_s: Vec<f64>,
    since_s: Vec<f64>,
    happened: Vec<Happened>,
    now_s: f64,
}

/// Plays requests, which are ordered by arrival, until nothing runs and nothing more can start.
///
/// # Errors
/// [`TooMuch`]: the nodes do not hold the reservations.
pub fn play(
    asks: &[Ask],
    reservations: &Reservations,
    sharing: Sharing,
) -> Result<Vec<Happened>, TooMuch> {
    let Reservations {
        nodes,
        node_level,
        reserved,
    } = reservations;
    let shared = Cells::new(*nodes, *node_level, reserved)?;
    let pools = match sharing {
        Sharing::Cells => vec![shared],
        Sharing::Private => (reserved.iter().enumerate())
            .map(|(tenant, levels)| private(levels, *node_level).ok_or(TooMuch { tenant }))
            .collect::<Result<_, _>>()?,
        // One tenant has everything; what each may take of it is counted.
        Sharing::Quota => vec![Cells::new(
            *nodes,
            *node_level,
            &[vec![*node_level; *nodes]],
        )?],
    };
    let quarters = |levels: &Vec<usize>| levels.iter().map(|level| 1 << level).sum();
    let mut play = Play {
        asks,
        node_level: *node_level,
        sharing,
        pools,
        quota: reserved.iter().map(quarters).collect(),
        guaranteed: vec![VecDeque::new(); reserved.len()],
        opportunistic: VecDeque::new(),
        running: BTreeMap::new(),
        left_s: asks.iter().map(|ask| ask.duration_s.max(0.0)).collect(),
        since_s: vec![0.0; asks.len()],
        happened: vec![Happened::default(); asks.len()],
        now_s: 0.0,
    };
    // What could never be had in the reservation alone is opportunistic.
    for (at, ask) in asks.iter().enumerate() {
        let fits = reserved.get(ask.tenant).is_some_and(|own| {
            let own_cells = Cells::new(own.len().max(1), *node_level, std::slice::from_ref(own));
            let needs = levels(ask.quarters, *node_level);
            own_cells.is_ok_and(|mut cells| needs.iter().all(|n| cells.request(0, *n).is_some()))
        });
        play.happened[at].guaranteed = fits && !ask.opportunistic;
    }
    let mut next = 0;
    loop {
        let end_s = play.next_end_s();
        let arrival_s = asks.get(next).map_or(f64::INFINITY, |ask| ask.arrival_s);
        let at_s = end_s.min(arrival_s);
        if at_s.is_infinite() {
            return Ok(play.happened);
        }
        play.now_s = play.now_s.max(at_s);
        play.finish();
        while asks
            .get(next)
            .is_some_and(|ask| ask.arrival_s <= play.now_s)
        {
            match play.happened[next].guaranteed {
                true => play.guaranteed[asks[next].tenant].push_back(next),
                false => play.opportunistic.push_back(next),
            }
            next += 1;
        }
        play.start();
    }
}

impl Play<'_> {
    fn next_end_s(&self) -> f64 {
        let ends = self.running.keys();
        ends.map(|at| self.since_s[*at] + self.left_s[*at])
            .fold(f64::INFINITY, f64::min)
    }

    /// The pool of a tenant's cells, and its number there.
    fn pool(&self, tenant: usize) -> (usize, usize) {
        match self.sharing {
            Sharing::Cells => (0, tenant),
            Sharing::Private => (tenant, 0),
            Sharing::Quota => (0, 0),
        }
    }

    fn finish(&mut self) {
        let over = self
            .running
            .keys()
            .copied()
            .filter(|at| self.since_s[*at] + self.left_s[*at] <= self.now_s);
        for at in over.collect::<Vec<_>>() {
            self.stop(at);
        }
    }

    fn stop(&mut self, at: usize) {
        let tenant = self.asks[at].tenant;
        let (pool, _) = self.pool(tenant);
        let Some(cells) = self.running.remove(&at) else {
            return;
        };
        if self.happened[at].guaranteed {
            let quarters: usize = cells.iter().map(Cell::quarters).sum();
            self.quota[tenant] += quarters;
            cells
                .into_iter()
                .for_each(|cell| self.pools[pool].release(cell));
        } else {
            self.pools[pool].release_all(at as u64);
        }
    }

    fn began(&mut self, at: usize, cells: Vec<Cell>) {
        self.since_s[at] = self.now_s;
        self.running.insert(at, cells);
        let waited_s = self.now_s - self.asks[at].arrival_s;
        self.happened[at].waited_s.get_or_insert(waited_s);
    }

    fn start(&mut self) {
        for tenant in 0..self.guaranteed.len() {
            while let Some(at) = self.guaranteed[tenant].front().copied() {
                if !self.take(at) {
                    break;
                }
                self.guaranteed[tenant].pop_front();
            }
        }
        // Past those that do not fit; those that were displaced have come first.
        for at in std::mem::take(&mut self.opportunistic) {
            if !self.lend(at) {
                self.opportunistic.push_back(at);
            }
        }
    }

    /// A guaranteed request gets all of its cells, or none.
    fn take(&mut self, at: usize) -> bool {
        let tenant = self.asks[at].tenant;
        let (pool, owner) = self.pool(tenant);
        let needs = levels(self.asks[at].quarters, self.node_level);
        let quarters: usize = needs.iter().map(|level| 1 << level).sum();
        if self.sharing == Sharing::Quota && quarters > self.quota[tenant] {
            return false;
        }
        let (mut cells, mut displaced) = (Vec::new(), Vec::new());
        for level in needs {
            match self.pools[pool].request(owner, level) {
                Some((cell, who)) => {
                    cells.push(cell);
                    displaced.extend(who);
                }
                None => {
                    cells
                        .into_iter()
                        .for_each(|cell| self.pools[pool].release(cell));
                    self.displace(displaced);
                    return false;
                }
            }
        }
        self.displace(displaced);
        self.quota[tenant] = self.quota[tenant].saturating_sub(quarters);
        self.began(at, cells);
        true
    }

    fn displace(&mut self, who: Vec<u64>) {
        for at in who.into_iter().map(|at| at as usize) {
            // It may have borrowed several parts: all are given back.
            if self.running.contains_key(&at) {
                self.left_s[at] -= self.now_s - self.since_s[at];
                self.stop(at);
                self.happened[at].displaced += 1;
                self.opportunistic.push_front(at);
            }
        }
    }

    fn lend(&mut self, at: usize) -> bool {
        let (pool, _) = self.pool(self.asks[at].tenant);
        for level in levels(self.asks[at].quarters, self.node_level) {
            if self.pools[pool].borrow(level, at as u64).is_none() {
                self.pools[pool].release_all(at as u64);
                return false;
            }
        }
        self.began(at, Vec::new());
        true
    }
}

#[cfg(test)]
mod tests {
    use policy::cluster::Random;
    use policy::cluster::admission::cells::equal_reservations;

    use super::*;

    fn ask(tenant: usize, arrival_s: f64, duration_s: f64, quarters: usize) -> Ask {
        Ask {
            tenant,
            arrival_s,
            duration_s,
            quarters,
            opportunistic: false,
        }
    }

    fn waits(asks: &[Ask], reservations: &Reservations, sharing: Sharing) -> Vec<Option<f64>> {
        let happened = play(asks, reservations, sharing).unwrap();
        happened.iter().map(|one| one.waited_s).collect()
    }

    /// Nodes of one GPU, and two tenants, each with one cell of this level.
    fn two_tenants(nodes: usize, level: usize) -> Reservations {
        Reservations {
            nodes,
            node_level: 2,
            reserved: vec![vec![level], vec![level]],
        }
    }

    #[test]
    fn quarters_of_two_tenants_fill_a_gpu() {
        // One GPU; each tenant owns half of it.
        let half = two_tenants(1, 1);
        let asks = [
            ask(0, 0.0, 10.0, 1),
            ask(0, 0.0, 10.0, 1),
            ask(0, 0.0, 10.0, 1),
            ask(1, 1.0, 10.0, 2),
        ];
        let expected = [Some(0.0), Some(0.0), Some(10.0), Some(0.0)];
        for sharing in [Sharing::Cells, Sharing::Private, Sharing::Quota] {
            assert_eq!(waits(&asks, &half, sharing), expected, "{sharing:?}");
        }
    }

    #[test]
    fn who_borrows_goes_when_the_owner_comes_and_goes_on_where_it_was() {
        let half = two_tenants(1, 1);
        let borrower = Ask {
            opportunistic: true,
            ..ask(0, 0.0, 10.0, 4)
        };
        let asks = [borrower, ask(1, 4.0, 5.0, 1)];
        let happened = play(&asks, &half, Sharing::Cells).unwrap();
        assert_eq!(
            (happened[0].waited_s, happened[0].displaced),
            (Some(0.0), 1)
        );
        assert_eq!(happened[1].waited_s, Some(0.0));
        // In clusters of their own a whole GPU is nowhere.
        assert_eq!(waits(&asks, &half, Sharing::Private), [None, Some(0.0)]);
    }

    #[test]
    fn a_reserved_gpu_is_whole_whatever_others_left_on_theirs() {
        // Two nodes of one GPU. Each tenant is promised four quarters.
        let one_each = two_tenants(2, 2);
        let asks = [
            ask(0, 0.0, 1.0, 2),
            ask(0, 0.0, 100.0, 2),
            ask(1, 0.0, 1.0, 2),
            ask(0, 2.0, 100.0, 2),
            ask(1, 3.0, 5.0, 4),
        ];
        let last = |sharing| waits(&asks, &one_each, sharing)[4].unwrap();
        assert!(last(Sharing::Cells) == 0.0 && last(Sharing::Private) == 0.0);
    }

    #[test]
    fn no_guaranteed_request_waits_longer_than_in_a_cluster_of_its_own() {
        let mut random = Random::new(19);
        let mut later = 0;
        for _ in 0..300 {
            let (nodes, tenants) = (1 + random.below(4), 2 + random.below(3));
            let reservations = Reservations {
                nodes,
                node_level: 4,
                reserved: equal_reservations(nodes, 4, tenants),
            };
            let mut now_s = 0.0;
            let asks: Vec<Ask> = (0..60)
                .map(|_| {
                    now_s += random.exponential(1.0);
                    Ask {
                        opportunistic: random.below(4) == 0,
                        ..ask(
                            random.below(tenants),
                            now_s,
                            1.0 + random.exponential(8.0),
                            1 + random.below(20),
                        )
                    }
                })
                .collect();
            let cells = play(&asks, &reservations, Sharing::Cells).unwrap();
            let private = play(&asks, &reservations, Sharing::Private).unwrap();
            let quota = play(&asks, &reservations, Sharing::Quota).unwrap();
            for at in 0..asks.len() {
                if cells[at].guaranteed {
                    assert_eq!(cells[at].waited_s, private[at].waited_s, "{asks:?}: {at}");
                    assert_eq!(cells[at].displaced, 0);
                    later += usize::from(quota[at].waited_s > private[at].waited_s);
                }
            }
        }
        assert!(later > 0, "a quota alone lets some wait longer");
    }
}
