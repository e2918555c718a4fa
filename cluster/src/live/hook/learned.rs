//! Speeds of kinds of job on types of GPU, from what nodes measured: what counts where they
//! disagree, what cannot be, and what is inferred where nothing was measured.

use std::collections::{BTreeMap, BTreeSet};

use policy::cluster::completion::{Completion, Entry, MEASURED, Settings};
use policy::cluster::round_allocator::LEAST_CONFIDENCE;

use crate::live::records::{Solo, SpeedRecord};

/// More submissions per second than any host makes.
const MOST_LAUNCHES_PER_S: f64 = 1e8;
/// More iterations per second than any job makes.
const MOST_ITERATIONS_PER_S: f64 = 1e6;
/// How much faster a type can be than the middle one of a kind, at most.
const MOST_FASTER: f64 = 100.0;
/// A node's clock may run so much faster or slower than ours over a measurement.
const CLOCKS: f64 = 2.0;
/// Besides what a report may be late, in seconds.
const LATE_S: f64 = 5.0;

/// What is known of a kind on a type of GPU.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Seen {
    /// Per second, in the unit of the kind.
    pub per_s: f64,
    /// Relative to the fastest type of the cluster.
    pub relative: f64,
    pub confidence: f64,
    pub measured: bool,
    pub nodes: usize,
    pub unix_ms: u64,
}

/// A kind with its number of GPUs.
#[derive(Clone, PartialEq, Debug, Default)]
pub(super) struct Row {
    /// Its speed is counted in iterations.
    pub iterations: bool,
    pub by_type: BTreeMap<String, Seen>,
}

/// All that policies are shown.
#[derive(Clone, PartialEq, Debug, Default)]
pub(super) struct Learned {
    pub rows: BTreeMap<(String, u32), Row>,
}

impl Learned {
    /// Speed on a type relative to the fastest; 1 where nothing is known of the kind.
    pub(super) fn relative(&self, kind: &str, gpus: u32, gpu: &str) -> f64 {
        let row = self.rows.get(&(kind.to_owned(), gpus));
        row.and_then(|row| row.by_type.get(gpu))
            .map_or(1.0, |seen| seen.relative)
    }
}

/// The lower median.
fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let middle = values.len().checked_sub(1)? / 2;
    values.get(middle).copied()
}

/// Submissions and iterations per second of a kind on a type, of all nodes together.
pub(super) fn of_nodes(record: &SpeedRecord) -> Option<(f64, Option<f64>)> {
    let launches = record.witnesses.iter().map(|one| one.launches_per_s);
    let iterations = record.witnesses.iter().map(|one| one.iterations_per_s);
    let iterations: Option<Vec<f64>> = iterations.collect();
    Some((median(launches.collect())?, iterations.and_then(median)))
}

/// Why a speed cannot be.
pub(super) fn impossible(solo: &Solo) -> Option<String> {
    let launches = solo.launches_per_s;
    if !(launches > 0.0 && launches <= MOST_LAUNCHES_PER_S) {
        return Some(format!("{launches} submissions per second"));
    }
    let iterations = solo.iterations_per_s?;
    (!(iterations > 0.0 && iterations <= MOST_ITERATIONS_PER_S))
        .then(|| format!("{iterations} iterations per second"))
}

/// Two clocks agree about a stretch, as far as reports may be late.
pub(super) fn agree(theirs_s: f64, ours_s: f64) -> bool {
    let within = |a: f64, b: f64| a <= CLOCKS * b + LATE_S;
    within(theirs_s, ours_s) && within(ours_s, theirs_s)
}

/// Speeds of kinds (rows) on types of GPU, completed. `rows`: what was measured, and `types`: what
/// the cluster has.
pub(super) fn learned(
    rows: &BTreeMap<(String, u32), Vec<&SpeedRecord>>,
    types: &BTreeSet<String>,
) -> Learned {
    let mut measured: Vec<((String, u32), Row)> = Vec::new();
    for (key, records) in rows {
        let speeds: Vec<_> = records
            .iter()
            .filter_map(|record| Some((*record, of_nodes(record)?)))
            .collect();
        let iterations = !speeds.is_empty() && speeds.iter().all(|(_, (_, it))| it.is_some());
        let per_s = |(launches, its): (f64, Option<f64>)| {
            if iterations {
                its.unwrap_or(launches)
            } else {
                launches
            }
        };
        let middle = median(speeds.iter().map(|(_, speed)| per_s(*speed)).collect());
        let bounded = |per_s: f64| {
            let middle = middle.unwrap_or(per_s);
            per_s.clamp(middle / MOST_FASTER, middle * MOST_FASTER)
        };
        let by_type = speeds.into_iter().map(|(record, speed)| {
            let seen = Seen {
                per_s: bounded(per_s(speed)),
                relative: 1.0,
                confidence: MEASURED,
                measured: true,
                nodes: record.witnesses.len(),
                unix_ms: record
                    .witnesses
                    .iter()
                    .map(|w| w.unix_ms)
                    .max()
                    .unwrap_or(0),
            };
            (record.gpu.clone(), seen)
        });
        let by_type = by_type.collect();
        measured.push((
            key.clone(),
            Row {
                iterations,
                by_type,
            },
        ));
    }
    let all: BTreeSet<&String> = measured
        .iter()
        .flat_map(|(_, row)| row.by_type.keys())
        .collect();
    let column = |gpu: &String| all.iter().position(|known| *known == gpu);
    let entries: Vec<Entry> = measured
        .iter()
        .enumerate()
        .flat_map(|(at, (_, row))| row.by_type.iter().map(move |(gpu, seen)| (at, gpu, seen)))
        .filter_map(|(row, gpu, seen)| {
            Some(Entry {
                row,
                column: column(gpu)?,
                value: seen.per_s.ln(),
            })
        })
        .collect();
    let completion = Completion::of(&entries, &Settings::SPEEDS);
    let mut estimates: Vec<(usize, String, Seen)> = Vec::new();
    for (at, (_, row)) in measured.iter().enumerate() {
        let speeds = || row.by_type.values().map(|seen| seen.per_s);
        // CAST: as many as there are types.
        let count = row.by_type.len() as f64;
        if count == 0.0 {
            continue;
        }
        let mean = (speeds().map(f64::ln).sum::<f64>() / count).exp();
        for gpu in types.iter().filter(|gpu| !row.by_type.contains_key(*gpu)) {
            let inferred = column(gpu).and_then(|column| completion.at(at, column));
            let inferred = inferred.filter(|inferred| inferred.confidence >= LEAST_CONFIDENCE);
            let per_s = inferred.map_or(mean, |inferred| inferred.value.exp());
            estimates.push((
                at,
                gpu.clone(),
                Seen {
                    per_s: per_s.clamp(mean / MOST_FASTER, mean * MOST_FASTER),
                    relative: 1.0,
                    confidence: inferred.map_or(0.0, |inferred| inferred.confidence),
                    measured: false,
                    nodes: 0,
                    unix_ms: 0,
                },
            ));
        }
    }
    for (at, gpu, seen) in estimates {
        measured[at].1.by_type.insert(gpu, seen);
    }
    for (_, row) in &mut measured {
        let here = row.by_type.iter().filter(|(gpu, _)| types.contains(*gpu));
        let fastest = here.map(|(_, seen)| seen.per_s).fold(0.0, f64::max);
        for seen in row.by_type.values_mut() {
            if fastest > 0.0 {
                seen.relative = (seen.per_s / fastest).min(1.0);
            }
        }
    }
    Learned {
        rows: measured.into_iter().collect(),
    }
}

/// Speeds differ by more than a measurement does from the next.
pub(super) fn differs(new: &Learned, old: &Learned) -> bool {
    new.rows.len() != old.rows.len()
        || new.rows.iter().any(|(key, row)| {
            let Some(before) = old.rows.get(key) else {
                return true;
            };
            row.by_type.len() != before.by_type.len()
                || row.by_type.iter().any(|(gpu, seen)| {
                    before.by_type.get(gpu).is_none_or(|old| {
                        (seen.relative - old.relative).abs() > 0.05 * old.relative
                            || seen.measured != old.measured
                    })
                })
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::live::records::Witness;

    fn record(gpu: &str, per_s: &[f64]) -> SpeedRecord {
        let witness = |(at, per_s): (usize, &f64)| Witness {
            node: format!("n{at}"),
            launches_per_s: *per_s,
            ..Witness::default()
        };
        SpeedRecord {
            gpu: gpu.into(),
            gpus: 1,
            kind: "k".into(),
            witnesses: per_s.iter().enumerate().map(witness).collect(),
        }
    }

    fn relative(records: &[SpeedRecord], gpu: &str) -> f64 {
        let rows = [(("k".to_owned(), 1), records.iter().collect())].into();
        let types = ["a", "b", "c"].map(str::to_owned).into();
        learned(&rows, &types).relative("k", 1, gpu)
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let solo = |launches_per_s, iterations_per_s| Solo {
            launches_per_s,
            iterations_per_s,
            ..Solo::default()
        };
        for launches in [f64::NAN, f64::INFINITY, -1.0, 0.0, 1e9] {
            assert!(impossible(&solo(launches, None)).is_some(), "{launches}");
        }
        for iterations in [f64::NAN, f64::INFINITY, -1.0, 0.0, 1e7] {
            let why = impossible(&solo(100.0, Some(iterations)));
            assert!(why.is_some(), "{iterations}");
        }
        assert_eq!(impossible(&solo(100.0, Some(10.0))), None);
        assert!(agree(10.0, 10.0) && agree(10.0, 14.0) && agree(100.0, 60.0));
        assert!(!agree(100.0, 10.0) && !agree(10.0, 100.0) && !agree(f64::NAN, 1.0));
    }

    #[test]
    fn one_figure_that_is_far_off_leaves_the_order_of_the_others() {
        let honest = [record("a", &[300.0]), record("b", &[100.0])];
        assert!((relative(&honest, "b") - 1.0 / 3.0).abs() < 1e-9);
        for lie in [1e8, 1e-8] {
            let with = [&honest[..], &[record("c", &[lie])]].concat();
            let ratio = relative(&with, "b") / relative(&with, "a");
            assert!((ratio - 1.0 / 3.0).abs() < 1e-9, "{lie}: {ratio}");
            let least = ["a", "b", "c"].map(|gpu| relative(&with, gpu));
            assert!(least.iter().all(|speed| *speed > 1e-4), "{lie}: {least:?}");
        }
        // Of three nodes with one type, one is outvoted; of two the lower counts.
        for (all, counts) in [(&[9e7, 100.0, 110.0][..], 110.0), (&[9e7, 100.0], 100.0)] {
            let with = [record("a", &[300.0]), record("b", all)];
            assert!(
                (relative(&with, "b") - counts / 300.0).abs() < 1e-9,
                "{all:?}"
            );
        }
        // Where nothing is known of a type, it counts as the mean of the others.
        assert!((relative(&honest, "c") - 30_000f64.sqrt() / 300.0).abs() < 1e-9);
        assert_eq!(relative(&[], "a"), 1.0);
    }
}
