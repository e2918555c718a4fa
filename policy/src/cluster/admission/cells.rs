//! HiveD's cells (OSDI'20): a tenant reserves cells in a virtual private cluster and is never worse
//! off than with such a cluster of its own.
//!
//! A cell is a power of two of units; a unit is a quarter of a GPU, so below the GPU there are two
//! more levels: halves and quarters, a share and a memory quota of the arbiter. A tenant's virtual
//! cells are split and merged by buddies inside the tenant. A virtual cell is bound to a physical
//! one of its level when it is first used, always out of the smallest free physical cell, and
//! unbound when it is empty. Because every tenant binds at most what it reserved, and all
//! reservations together were once laid out on the cluster, a binding never fails. Opportunistic
//! jobs use unbound cells, and a binding evicts them.

use std::collections::{BTreeMap, BTreeSet};

/// Units of one GPU.
pub const UNITS_PER_GPU: usize = 4;

/// A buddy allocator over some roots of one size.
#[derive(Clone, Debug)]
struct Buddies {
    /// Level of the roots: 2^level units.
    top: usize,
    /// Free cells by level: offsets in units.
    free: Vec<BTreeSet<usize>>,
}

impl Buddies {
    fn new(top: usize, roots: usize) -> Self {
        let mut free = vec![BTreeSet::new(); top + 1];
        free[top].extend((0..roots).map(|root| root << top));
        Self { top, free }
    }

    /// Whether a cell of this level is free, and the level of the smallest that would be split for
    /// it.
    fn smallest(&self, level: usize) -> Option<usize> {
        (level..=self.top).find(|level| !self.free[*level].is_empty())
    }

    fn take(&mut self, level: usize) -> Option<usize> {
        let mut from = self.smallest(level)?;
        let offset = self.free[from].pop_first()?;
        while from > level {
            from -= 1;
            self.free[from].insert(offset + (1 << from));
        }
        Some(offset)
    }

    fn give(&mut self, mut level: usize, mut offset: usize) {
        while level < self.top && self.free[level].remove(&(offset ^ (1 << level))) {
            offset &= !(1 << level);
            level += 1;
        }
        self.free[level].insert(offset);
    }

    fn is_whole(&self) -> bool {
        self.free[..self.top].iter().all(BTreeSet::is_empty)
    }
}

#[derive(Clone, Debug)]
struct Virtual {
    level: usize,
    /// Where it is bound.
    at: Option<usize>,
    inside: Buddies,
}

/// A cell in use.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Cell {
    tenant: usize,
    cell: usize,
    level: usize,
    inside: usize,
    /// First physical unit; [`UNITS_PER_GPU`] to a GPU, node by node.
    pub first_unit: usize,
}

impl Cell {
    /// Its size in quarters of a GPU.
    #[must_use]
    pub fn quarters(&self) -> usize {
        1 << self.level
    }
}

/// Reservations that do not fit onto the cluster.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TooMuch {
    /// The tenant whose cell was the first without a place.
    pub tenant: usize,
}

/// Equal reservations of `nodes` nodes of 2^`node_level` units for so many tenants: each has an
/// equal number of units, as the fewest cells, the largest first. Such reservations always fit.
#[must_use]
pub fn equal_reservations(nodes: usize, node_level: usize, tenants: usize) -> Vec<Vec<usize>> {
    let each = (nodes << node_level) / tenants.max(1);
    let mut levels = vec![node_level; each >> node_level];
    let rest = each & ((1 << node_level) - 1);
    levels.extend((0..node_level).rev().filter(|level| rest >> level & 1 == 1));
    vec![levels; tenants.max(1)]
}

/// Physical cells, reservations, and who uses what.
#[derive(Clone, Debug)]
pub struct Cells {
    physical: Buddies,
    tenants: Vec<Vec<Virtual>>,
    /// Opportunistic users by first unit: level and number.
    borrowers: BTreeMap<usize, (usize, u64)>,
}

impl Cells {
    /// `nodes` nodes of 2^`node_level` units, and the levels of the cells that each tenant
    /// reserves.
    ///
    /// # Errors
    /// [`TooMuch`] if the cluster cannot hold all reservations.
    pub fn new(nodes: usize, node_level: usize, reserved: &[Vec<usize>]) -> Result<Self, TooMuch> {
        let physical = Buddies::new(node_level, nodes);
        let mut layout = physical.clone();
        let mut all: Vec<(usize, usize)> = reserved
            .iter()
            .enumerate()
            .flat_map(|(tenant, levels)| levels.iter().map(move |level| (*level, tenant)))
            .collect();
        // The largest first: then the rest fits wherever anything does.
        all.sort_by(|a, b| b.cmp(a));
        for (level, tenant) in all {
            if level > node_level || layout.take(level).is_none() {
                return Err(TooMuch { tenant });
            }
        }
        let cell = |level: &usize| Virtual {
            level: *level,
            at: None,
            inside: Buddies::new(*level, 1),
        };
        let tenants = reserved
            .iter()
            .map(|levels| levels.iter().map(cell).collect());
        Ok(Self {
            physical,
            tenants: tenants.collect(),
            borrowers: BTreeMap::new(),
        })
    }

    /// A cell of 2^`level` units inside a tenant's reservation, and the opportunistic users that it
    /// displaces. `None` only if the tenant's own private cluster would have no space either.
    pub fn request(&mut self, tenant: usize, level: usize) -> Option<(Cell, Vec<u64>)> {
        let cells = self.tenants.get(tenant)?;
        let space = cells.iter().enumerate().filter_map(|(index, cell)| {
            let smallest = cell.inside.smallest(level)?;
            Some((cell.at.is_none(), smallest, index))
        });
        let (_, _, index) = space.min()?;
        let mut evicted = Vec::new();
        let virtual_level = cells[index].level;
        let at = match cells[index].at {
            Some(at) => at,
            None => {
                let at = self.physical.take(virtual_level)?;
                let end = at + (1 << virtual_level);
                // A borrower may begin before the cell and reach into it.
                let hit: Vec<usize> = self
                    .borrowers
                    .range(..end)
                    .filter(|(first, (level, _))| *first + (1 << level) > at)
                    .map(|(first, _)| *first)
                    .collect();
                evicted.extend(
                    hit.iter()
                        .filter_map(|first| self.borrowers.remove(first))
                        .map(|g| g.1),
                );
                at
            }
        };
        let cell = self.tenants[tenant].get_mut(index)?;
        cell.at = Some(at);
        let inside = cell.inside.take(level)?;
        let taken = Cell {
            tenant,
            cell: index,
            level,
            inside,
            first_unit: at + inside,
        };
        Some((taken, evicted))
    }

    /// Give a cell back.
    pub fn release(&mut self, cell: Cell) {
        let own = &mut self.tenants[cell.tenant][cell.cell];
        own.inside.give(cell.level, cell.inside);
        if own.inside.is_whole()
            && let Some(at) = own.at.take()
        {
            let level = own.level;
            self.physical.give(level, at);
        }
    }

    /// Lends 2^`level` unbound units to an opportunistic user (named by a number of the caller)
    /// until a tenant wants them. Returns the first unit, or `None` if there is no space.
    pub fn borrow(&mut self, level: usize, user: u64) -> Option<usize> {
        let mut free = self.physical.clone();
        // Borrowers do not take cells away from the buddies, so that bindings never see them.
        let at = loop {
            let at = free.take(level)?;
            let end = at + (1 << level);
            let mut before = self.borrowers.range(..end);
            if !before.any(|(first, (level, _))| *first + (1 << level) > at) {
                break at;
            }
        };
        self.borrowers.insert(at, (level, user));
        Some(at)
    }

    /// An opportunistic user goes by itself.
    pub fn release_all(&mut self, user: u64) {
        self.borrowers.retain(|_, (_, borrower)| *borrower != user);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::Random;

    #[test]
    fn whatever_others_do_a_tenant_gets_what_its_private_cluster_would_give() {
        let mut random = Random::new(17);
        for _ in 0..10_000 {
            // Nodes of 8 GPUs: 32 units, level 5. Reservations are drawn until they do not fit any
            // more.
            let nodes = 1 + random.below(3);
            let mut reserved = vec![Vec::new(); 3];
            loop {
                let (tenant, level) = (random.below(3), random.below(6));
                reserved[tenant].push(level);
                if Cells::new(nodes, 5, &reserved).is_err() {
                    reserved[tenant].pop();
                    break;
                }
            }
            let mut shared = Cells::new(nodes, 5, &reserved).unwrap();
            // The private cluster of each tenant: its cells alone, nobody else.
            let mut private: Vec<Cells> = reserved
                .iter()
                .map(|levels| {
                    let own = std::slice::from_ref(levels);
                    Cells::new(levels.len().max(1), 5, own).unwrap()
                })
                .collect();
            let mut held: Vec<(usize, Cell, Cell)> = Vec::new();
            let mut used: BTreeSet<usize> = BTreeSet::new();
            for step in 0..30 {
                match random.below(4) {
                    0 if !held.is_empty() => {
                        let (tenant, cell, own) = held.swap_remove(random.below(held.len()));
                        for unit in cell.first_unit..cell.first_unit + (1 << cell.level) {
                            used.remove(&unit);
                        }
                        shared.release(cell);
                        private[tenant].release(own);
                    }
                    1 => {
                        shared.borrow(random.below(6), step);
                    }
                    _ => {
                        let (tenant, level) = (random.below(3), random.below(6));
                        let own = private[tenant].request(0, level);
                        let together = shared.request(tenant, level);
                        assert_eq!(own.is_some(), together.is_some(), "{reserved:?}");
                        if let (Some((own, _)), Some((cell, _))) = (own, together) {
                            for unit in cell.first_unit..cell.first_unit + (1 << level) {
                                assert!(used.insert(unit), "two tenants on one unit");
                            }
                            held.push((tenant, cell, own));
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn an_opportunistic_user_goes_when_the_owner_comes() {
        let mut cells = Cells::new(1, 5, &[vec![5]]).unwrap();
        assert!(cells.borrow(2, 7).is_some());
        let (cell, evicted) = cells.request(0, 0).unwrap();
        assert_eq!(evicted, [7]);
        assert!(cells.borrow(0, 8).is_none(), "the whole node is bound");
        cells.release(cell);
        assert!(cells.borrow(0, 8).is_some());
        assert_eq!(Cells::new(1, 5, &[vec![5], vec![0]]).unwrap_err().tenant, 1);
    }
}
