//! Which memory the program says belongs to which part of it, and in what order that makes chunks
//! come back.
//!
//! The program declares address ranges as numbered *groups*: layers, in the order of a pass. Every
//! chunk has a *rank*: 0 is memory of no group, which anything may touch and which is needed first;
//! memory of group `g` has rank `g + 1`. A chunk in which memory of several ranks lies has the
//! lowest of them: a thread that hears that a rank is in can rely on every byte of it. So one byte
//! of a live allocation that nobody has declared makes its chunk one of no group: what is not known
//! is needed at once.
//!
//! Only what is live and can be moved is taken down, and it is struck out when it is freed or
//! unmapped: an address that is given to something else later says nothing about that.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

use super::arena;
use super::chunk::{self, Place};

/// Groups that can be distinguished.
pub(super) const MOST_GROUPS: u32 = 1 << 20;

/// A declared range: start, end, group.
type Range = (u64, u64, u32);

static DECLARED: Mutex<Vec<Range>> = Mutex::new(Vec::new());
/// How often [`DECLARED`] has changed.
static CHANGES: AtomicU32 = AtomicU32::new(0);

fn declared<T>(act: impl FnOnce(&mut Vec<Range>) -> T) -> T {
    act(&mut DECLARED.lock().unwrap_or_else(PoisonError::into_inner))
}

/// How often what is declared has changed, as a number that differs.
pub(super) fn changes() -> u32 {
    // SYNC(groups): a thread that sees a change that it has not counted lets nobody begin.
    CHANGES.load(Ordering::SeqCst)
}

fn changed() {
    CHANGES.fetch_add(1, Ordering::SeqCst);
}

/// Takes down that the live memory from `start` to `end` belongs to `group`.
pub(super) fn declare(group: u32, start: u64, end: u64) {
    let live = live_in(start, end);
    if live.is_empty() {
        return;
    }
    declared(|all| all.extend(live.into_iter().map(|(from, to)| (from, to, group))));
    changed();
}

/// Forgets all groups.
pub(super) fn clear() {
    if declared(|all| !std::mem::take(all).is_empty()) {
        changed();
    }
}

/// The memory from `start` to `end` is nobody's any more.
pub(super) fn forget(start: u64, end: u64) {
    let struck = declared(|all| {
        let hit = all.iter().any(|range| range.0 < end && range.1 > start);
        if hit {
            *all = without(all, start, end);
        }
        hit
    });
    if struck {
        changed();
    }
}

/// Ranges without what lies from `start` to `end`.
fn without(all: &[Range], start: u64, end: u64) -> Vec<Range> {
    all.iter()
        .flat_map(|(from, to, group)| {
            [
                (*from, (*to).min(start), *group),
                ((*from).max(end), *to, *group),
            ]
        })
        .filter(|(from, to, _)| from < to)
        .collect()
}

/// What is live and can be moved from `start` to `end`.
fn live_in(start: u64, end: u64) -> Vec<(u64, u64)> {
    let places: Vec<(u64, u64, bool)> = chunk::with(|chunks| {
        let all = chunks.all.values().flat_map(|chunk| {
            chunk.mappings.iter().map(|mapping| {
                let to = mapping.address.saturating_add(chunk.bytes);
                (mapping.address.max(start), to.min(end), chunk.of_arena)
            })
        });
        all.filter(|(from, to, _)| from < to).collect()
    });
    places
        .into_iter()
        .flat_map(|(from, to, of_arena)| {
            if of_arena {
                arena::live(from, to)
            } else {
                vec![(from, to)]
            }
        })
        .collect()
}

/// The rank of memory from `start` to `end`, by ranges in the order of their starts.
fn rank_of(ranges: &[Range], start: u64, end: u64) -> u64 {
    let upto = ranges.partition_point(|(from, ..)| *from < end);
    let (mut covered, mut rank) = (start, u64::MAX);
    for (from, to, group) in ranges.iter().take(upto).filter(|(_, to, _)| *to > start) {
        if *from > covered {
            return 0;
        }
        covered = covered.max(*to);
        rank = rank.min(u64::from(*group) + 1);
    }
    if covered < end { 0 } else { rank }
}

/// The ranks of all chunks that are not where they can be used.
#[derive(Debug)]
pub(super) struct Ranks {
    of: BTreeMap<u64, u64>,
    /// Chunks that are missing, by rank.
    missing: BTreeMap<u64, u64>,
    /// What was declared then.
    pub(super) changes: u32,
}

impl Ranks {
    /// As things are; `None`: nothing is declared. With the quiesce gate closed, so that nothing is
    /// allocated or freed meanwhile.
    pub(super) fn now() -> Option<Self> {
        let changes = changes();
        let mut ranges = declared(|all| all.clone());
        if ranges.is_empty() {
            return None;
        }
        ranges.sort_unstable();
        let out: Vec<(u64, u64, u64, bool)> = chunk::with(|chunks| {
            let missing = chunks
                .all
                .iter()
                .filter(|(_, chunk)| !matches!(chunk.place, Place::Resident | Place::Host));
            missing
                .map(|(id, chunk)| {
                    // Mapped twice, it is used by a name that nobody has to have declared.
                    let once = chunk.mappings.len() == 1;
                    let bytes = if once { chunk.bytes } else { 0 };
                    (*id, chunk.address(), bytes, chunk.of_arena)
                })
                .collect()
        });
        let of: BTreeMap<u64, u64> = out
            .into_iter()
            .map(|(id, start, bytes, of_arena)| {
                let end = start.saturating_add(bytes);
                let live = match of_arena {
                    _ if bytes == 0 => vec![(0, 1)],
                    true => arena::live(start, end),
                    false => vec![(start, end)],
                };
                // In an empty chunk lies nothing that anybody could need.
                let ranks = live.iter().map(|(from, to)| rank_of(&ranges, *from, *to));
                (id, ranks.min().unwrap_or(u64::MAX))
            })
            .collect();
        let mut missing = BTreeMap::new();
        for rank in of.values() {
            *missing.entry(*rank).or_insert(0) += 1;
        }
        Some(Self {
            of,
            missing,
            changes,
        })
    }

    /// The rank of a chunk.
    pub(super) fn rank(&self, id: u64) -> u64 {
        self.of.get(&id).copied().unwrap_or(0)
    }

    /// A chunk is back.
    pub(super) fn arrived(&mut self, id: u64) {
        let Some(rank) = self.of.remove(&id) else {
            return;
        };
        if let Some(count) = self.missing.get_mut(&rank) {
            *count -= 1;
            if *count == 0 {
                self.missing.remove(&rank);
            }
        }
    }

    /// Everything below this rank is in.
    pub(super) fn level(&self) -> u64 {
        self.missing
            .first_key_value()
            .map_or(u64::MAX, |(rank, _)| *rank)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_has_the_rank_of_the_first_group_that_needs_it_and_none_where_a_byte_is_not_declared()
    {
        let ranges = [
            (0, 100, 3),
            (100, 200, 1),
            (150, 160, 0),
            (300, 400, 2),
            (300, 310, 5),
        ];
        for (start, end, rank) in [
            (0, 100, 4),
            (10, 20, 4),
            (50, 101, 2),
            (100, 200, 1),
            (100, 150, 2),
            (160, 200, 2),
            (155, 156, 1),
            (200, 201, 0),
            (199, 300, 0),
            (250, 350, 0),
            (300, 400, 3),
            (300, 401, 0),
            (390, 400, 3),
            (400, 500, 0),
        ] {
            assert_eq!(rank_of(&ranges, start, end), rank, "{start} {end}");
        }
    }

    #[test]
    fn what_is_freed_is_struck_out_to_the_byte() {
        let all = [(0, 100, 1), (50, 150, 2), (200, 300, 3)];
        assert_eq!(
            without(&all, 60, 210),
            [(0, 60, 1), (50, 60, 2), (210, 300, 3)]
        );
        assert_eq!(
            without(&all, 10, 20),
            [(0, 10, 1), (20, 100, 1), (50, 150, 2), (200, 300, 3)]
        );
        assert_eq!(without(&all, 0, 300), []);
        assert_eq!(without(&all, 300, 400), all);
    }

    #[test]
    fn a_level_rises_with_the_last_chunk_of_a_rank() {
        let of: BTreeMap<u64, u64> = [(10, 0), (11, 0), (12, 1), (13, 4)].into();
        let mut ranks = Ranks {
            missing: [(0, 2), (1, 1), (4, 1)].into(),
            of,
            changes: 0,
        };
        let mut levels = vec![ranks.level()];
        for id in [12, 10, 10, 99, 11, 13] {
            ranks.arrived(id);
            levels.push(ranks.level());
        }
        assert_eq!(levels, [0, 0, 0, 0, 0, 4, u64::MAX]);
    }
}
