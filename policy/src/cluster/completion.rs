//! What was not measured, from what was: a matrix with gaps, completed by one of low rank.
//!
//! Gavel (OSDI'20) runs a new job beside a few others only, and takes the rest of its row from the
//! low-rank matrix that agrees best with everything that was measured. Here an entry is taken to be
//!
//! ```text
//! mean + a[row] + b[column] + sum_k u[row][k] v[column][k]
//! ```
//!
//! and the numbers are found by alternating least squares with a ridge: with all columns fixed the
//! best row is a small linear system, and the other way round. Each step lowers the sum of squares
//! and penalties, so it converges; it starts from fixed numbers, so the same entries give the same
//! result on every machine.
//!
//! An estimate comes with a *confidence*. What the matrix predicts of entries that were left out
//! (five parts, one after the other) is compared with the mean as a prediction: the part of the
//! variance that it explains counts, less where the row or the column has few entries. A measured
//! entry is never replaced by an estimate.

use std::collections::BTreeMap;

use super::{GpuType, JobType, PairTable, Random};

/// Confidence in a measured entry; an estimate never has more than [`MOST_CONFIDENCE`].
pub const MEASURED: f64 = 1.0;
/// Most confidence in an estimate.
pub const MOST_CONFIDENCE: f64 = 0.8;
/// Entries that are looked at, at most: the work is proportional to them.
pub const MOST_ENTRIES: usize = 16_384;
/// Parts of the entries that are left out in turn.
const PARTS: usize = 5;
/// With fewer entries than this nothing is known of how good estimates are.
const FEWEST: usize = 2 * PARTS;
/// The same where only differences inside rows count: three rows with two entries.
const FEWEST_IN_ROWS: usize = 6;
/// Both halves of a step, so often.
const STEPS: usize = 30;

/// A measured entry of a matrix.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Entry {
    /// Which row.
    pub row: usize,
    /// Which column.
    pub column: usize,
    /// What was measured.
    pub value: f64,
}

/// How a matrix is completed.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Settings {
    /// Products in the sum; 0: rows and columns add up.
    pub rank: usize,
    /// Penalty on the squares of `u` and `v`.
    pub ridge: f64,
    /// Penalty on the squares of `a` and `b`.
    pub offset_ridge: f64,
    /// Only what differs inside a row counts: an estimate has to be better than the mean of its
    /// row, and its row needs no more than one entry.
    pub inside_rows: bool,
}

impl Settings {
    /// For speeds of pairs, which lie between 0 and 1. Chosen on Gavel's pairs on the P100, with
    /// 10 % to 40 % of them known; the other two types did not choose.
    pub const PAIRS: Self = Self {
        rank: 3,
        ridge: 0.2,
        offset_ridge: 0.5,
        inside_rows: false,
    };
    /// For logarithms of speeds by kind of job and type of GPU. How fast a kind is in itself says
    /// nothing about others, so offsets are hardly penalised; types are few.
    pub const SPEEDS: Self = Self {
        rank: 1,
        ridge: 0.5,
        offset_ridge: 1e-3,
        inside_rows: true,
    };
}

/// What is known of an entry.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Estimate {
    /// As measured, or as estimated: then within the range of what was measured, unless only
    /// differences inside rows count.
    pub value: f64,
    /// 0 to 1.
    pub confidence: f64,
    /// It was measured.
    pub measured: bool,
}

/// Row or column: its offset, then its factors.
type Side = BTreeMap<usize, Vec<f64>>;

/// A completed matrix.
#[derive(Clone, Debug)]
pub struct Completion {
    fit: Fit,
    known: BTreeMap<(usize, usize), f64>,
    in_row: BTreeMap<usize, usize>,
    in_column: BTreeMap<usize, usize>,
    /// Part of the variance of left-out entries that is explained.
    explained: f64,
    range: [f64; 2],
    inside_rows: bool,
}

/// The numbers of a low-rank matrix.
#[derive(Clone, Debug)]
struct Fit {
    mean: f64,
    rows: Side,
    columns: Side,
}

impl Fit {
    fn of(entries: &[Entry], settings: &Settings) -> Self {
        let mean = entries.iter().map(|entry| entry.value).sum::<f64>()
            / f64::max(entries.len() as f64, 1.0);
        let size = settings.rank + 1;
        let mut by_row: BTreeMap<usize, Vec<(usize, f64)>> = BTreeMap::new();
        let mut by_column: BTreeMap<usize, Vec<(usize, f64)>> = BTreeMap::new();
        for Entry { row, column, value } in entries {
            let value = value - mean;
            by_row.entry(*row).or_default().push((*column, value));
            by_column.entry(*column).or_default().push((*row, value));
        }
        // From zero nothing would move.
        let mut random = Random::new(1);
        let mut fit = Self {
            mean,
            rows: by_row.keys().map(|row| (*row, vec![0.0; size])).collect(),
            columns: by_column
                .keys()
                .map(|column| {
                    let factors = (1..size).map(|_| 0.3 * random.normal());
                    (*column, [0.0].into_iter().chain(factors).collect())
                })
                .collect(),
        };
        for _ in 0..STEPS {
            improve(&mut fit.rows, &fit.columns, &by_row, settings);
            improve(&mut fit.columns, &fit.rows, &by_column, settings);
        }
        fit
    }

    /// `None` where nothing of the row or of the column was measured.
    fn at(&self, row: usize, column: usize) -> Option<f64> {
        let (row, column) = (self.rows.get(&row)?, self.columns.get(&column)?);
        let products = row[1..].iter().zip(&column[1..]);
        let products: f64 = products.map(|(u, v)| u * v).sum();
        Some(self.mean + row[0] + column[0] + products)
    }

    /// What the steps lower.
    #[cfg(test)]
    fn objective(&self, entries: &[Entry], settings: &Settings) -> f64 {
        let misses = entries.iter().map(|entry| {
            let at = self.at(entry.row, entry.column).unwrap_or(self.mean);
            (at - entry.value).powi(2)
        });
        let sides = self.rows.values().chain(self.columns.values());
        let penalties = sides.map(|side| {
            let factors: f64 = side[1..].iter().map(|x| x * x).sum();
            settings.offset_ridge * side[0].powi(2) + settings.ridge * factors
        });
        misses.sum::<f64>() + penalties.sum::<f64>()
    }
}

/// The best of one side while the other is fixed.
fn improve(
    side: &mut Side,
    other: &Side,
    entries: &BTreeMap<usize, Vec<(usize, f64)>>,
    settings: &Settings,
) {
    let size = settings.rank + 1;
    for (at, entries) in entries {
        let mut matrix = vec![vec![0.0; size]; size];
        let mut right = vec![0.0; size];
        for (with, value) in entries {
            let Some(with) = other.get(with) else {
                continue;
            };
            // Its own offset counts once, whatever the other side is.
            let feature = |i: usize| if i == 0 { 1.0 } else { with[i] };
            let target = value - with[0];
            for (i, (row, right)) in matrix.iter_mut().zip(&mut right).enumerate() {
                *right += feature(i) * target;
                for (j, sum) in row.iter_mut().enumerate() {
                    *sum += feature(i) * feature(j);
                }
            }
        }
        for (i, row) in matrix.iter_mut().enumerate() {
            row[i] += if i == 0 {
                settings.offset_ridge
            } else {
                settings.ridge
            };
        }
        if let Some(found) = solve(matrix, right) {
            side.insert(*at, found);
        }
    }
}

/// The solution of a symmetric system that is positive definite; `None` for another one.
pub(super) fn solve(mut matrix: Vec<Vec<f64>>, mut right: Vec<f64>) -> Option<Vec<f64>> {
    let size = right.len();
    for i in 0..size {
        let pivot = matrix[i][i];
        if !(pivot.is_finite() && pivot > 1e-12) {
            return None;
        }
        let (above, below) = matrix.split_at_mut(i + 1);
        let (known, rest) = right.split_at_mut(i + 1);
        for (row, right) in below.iter_mut().zip(rest) {
            let factor = row[i] / pivot;
            for (x, y) in row.iter_mut().zip(&above[i]).skip(i) {
                *x -= factor * y;
            }
            *right -= factor * known[i];
        }
    }
    for i in (0..size).rev() {
        let behind: f64 = (i + 1..size).map(|k| matrix[i][k] * right[k]).sum();
        right[i] = (right[i] - behind) / matrix[i][i];
    }
    right.iter().all(|x| x.is_finite()).then_some(right)
}

impl Completion {
    /// From these entries. What is no number is left out, of two for one place the later counts,
    /// and of more than [`MOST_ENTRIES`] the last ones.
    #[must_use]
    pub fn of(entries: &[Entry], settings: &Settings) -> Self {
        let mut known = BTreeMap::new();
        let from = entries.len().saturating_sub(MOST_ENTRIES);
        for entry in &entries[from..] {
            if entry.value.is_finite() {
                known.insert((entry.row, entry.column), entry.value);
            }
        }
        let entries: Vec<Entry> = known
            .iter()
            .map(|((row, column), value)| Entry {
                row: *row,
                column: *column,
                value: *value,
            })
            .collect();
        let (mut in_row, mut in_column) = (BTreeMap::new(), BTreeMap::new());
        let mut range = [f64::INFINITY, f64::NEG_INFINITY];
        for entry in &entries {
            *in_row.entry(entry.row).or_default() += 1;
            *in_column.entry(entry.column).or_default() += 1;
            range = [range[0].min(entry.value), range[1].max(entry.value)];
        }
        Self {
            fit: Fit::of(&entries, settings),
            explained: explained(&entries, settings),
            known,
            in_row,
            in_column,
            range,
            inside_rows: settings.inside_rows,
        }
    }

    /// What is known of an entry. `None` where nothing of its row, or of its column, was measured.
    #[must_use]
    pub fn at(&self, row: usize, column: usize) -> Option<Estimate> {
        if let Some(value) = self.known.get(&(row, column)) {
            return Some(Estimate {
                value: *value,
                confidence: MEASURED,
                measured: true,
            });
        }
        let value = self.fit.at(row, column).filter(|value| value.is_finite())?;
        let (in_row, in_column) = (*self.in_row.get(&row)?, *self.in_column.get(&column)?);
        let few = if self.inside_rows {
            in_column
        } else {
            in_row.min(in_column)
        };
        // CAST: a count.
        let few = few as f64;
        let [least, most] = self.range;
        Some(Estimate {
            value: if self.inside_rows {
                value
            } else {
                value.clamp(least, most)
            },
            confidence: MOST_CONFIDENCE * self.explained * few / (few + 1.0),
            measured: false,
        })
    }

    /// Part of the variance of left-out entries that the matrix explains, 0 to 1.
    #[must_use]
    pub fn explained(&self) -> f64 {
        self.explained
    }
}

/// How much better left-out entries are predicted than by the mean of the others.
fn explained(entries: &[Entry], settings: &Settings) -> f64 {
    let fewest = if settings.inside_rows {
        FEWEST_IN_ROWS
    } else {
        FEWEST
    };
    if entries.len() < fewest {
        return 0.0;
    }
    let mut order: Vec<usize> = (0..entries.len()).collect();
    Random::new(2).shuffle(&mut order);
    let (mut missed, mut spread) = (0.0, 0.0);
    for part in 0..PARTS {
        let (out, rest): (Vec<_>, Vec<_>) = order
            .iter()
            .enumerate()
            .partition(|(at, _)| at % PARTS == part);
        let rest: Vec<Entry> = rest.into_iter().map(|(_, at)| entries[*at]).collect();
        let fit = Fit::of(&rest, settings);
        for (_, at) in out {
            let entry = entries[*at];
            let mean = if settings.inside_rows {
                let others = rest.iter().filter(|other| other.row == entry.row);
                let (sum, count) = others.fold((0.0, 0.0), |(sum, count), other| {
                    (sum + other.value, count + 1.0)
                });
                if count == 0.0 {
                    continue;
                }
                sum / count
            } else {
                fit.mean
            };
            let predicted = fit.at(entry.row, entry.column).unwrap_or(mean);
            missed += (predicted - entry.value).powi(2);
            spread += (mean - entry.value).powi(2);
        }
    }
    let part = 1.0 - missed / spread;
    // Where nothing differs, or nothing can be compared, nothing is explained.
    if part > 0.0 { part.min(1.0) } else { 0.0 }
}

/// A pair of kinds that was not measured, as far as it can be inferred.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct PairEstimate {
    /// On this type of GPU.
    pub kind: GpuType,
    /// GPUs of each.
    pub gpus: u32,
    /// The two kinds.
    pub kinds: [JobType; 2],
    /// Speed of each relative to solo.
    pub speeds: [f64; 2],
    /// That of the less sure one.
    pub confidence: f64,
}

/// Pairs of `kinds` (with their numbers of GPUs) on the first `types` types of GPU that are not in
/// the table, from those that are. A row is a kind of job, a column the kind beside it and the type
/// of GPU: what two kinds do to each other on one type says something about another. Pairs with a
/// confidence below `least` are left out.
#[must_use]
pub fn complete_pairs(
    table: &PairTable,
    kinds: &[(JobType, u32)],
    types: u16,
    least: f64,
    settings: &Settings,
) -> Vec<PairEstimate> {
    let mut by_gpus: BTreeMap<u32, Vec<(GpuType, JobType, JobType, f64)>> = BTreeMap::new();
    for (kind, gpus, a, b, [speed, _]) in table.iter() {
        // Each stands there in both directions.
        by_gpus.entry(gpus).or_default().push((kind, a, b, speed));
    }
    let mut estimates = Vec::new();
    for (gpus, mut measured) in by_gpus {
        measured.sort_by_key(|(kind, a, b, _)| (*kind, *a, *b));
        let mut columns: BTreeMap<(GpuType, JobType), usize> = BTreeMap::new();
        let entries: Vec<Entry> = measured
            .iter()
            .map(|(kind, a, b, speed)| {
                let next = columns.len();
                Entry {
                    row: a.0 as usize,
                    column: *columns.entry((*kind, *b)).or_insert(next),
                    value: *speed,
                }
            })
            .collect();
        let completion = Completion::of(&entries, settings);
        let mut all: Vec<JobType> = kinds
            .iter()
            .filter(|(_, own)| *own == gpus)
            .map(|(kind, _)| *kind)
            .collect();
        all.sort_unstable();
        all.dedup();
        for (at, a) in all.iter().enumerate() {
            for b in &all[at..] {
                for kind in (0..types).map(GpuType) {
                    let side = |own: &JobType, other: &JobType| {
                        let column = columns.get(&(kind, *other))?;
                        completion.at(own.0 as usize, *column)
                    };
                    let (Some(first), Some(second)) = (side(a, b), side(b, a)) else {
                        continue;
                    };
                    let confidence = first.confidence.min(second.confidence);
                    if first.measured || second.measured || confidence < least {
                        continue;
                    }
                    estimates.push(PairEstimate {
                        kind,
                        gpus,
                        kinds: [*a, *b],
                        speeds: [first.value, second.value],
                        confidence,
                    });
                }
            }
        }
    }
    estimates
}

impl PairTable {
    /// Adds what can be inferred of pairs that are not there, between `kinds` (with their numbers
    /// of GPUs) on the first `types` types, where that is at least so sure. What is there stays.
    /// Returns what was added.
    pub fn complete(
        &mut self,
        kinds: &[(JobType, u32)],
        types: u16,
        least: f64,
    ) -> Vec<PairEstimate> {
        self.complete_by(kinds, types, least, &Settings::PAIRS)
    }

    /// The same with other settings than [`Settings::PAIRS`].
    pub fn complete_by(
        &mut self,
        kinds: &[(JobType, u32)],
        types: u16,
        least: f64,
        settings: &Settings,
    ) -> Vec<PairEstimate> {
        let estimates = complete_pairs(self, kinds, types, least, settings);
        for one in &estimates {
            self.insert(one.kind, one.gpus, one.kinds.into(), one.speeds);
        }
        estimates
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(row: usize, column: usize, value: f64) -> Entry {
        Entry { row, column, value }
    }

    /// A matrix of rank 1 with offsets, and which of its entries are known.
    fn example(size: usize) -> (Vec<Entry>, Vec<Entry>) {
        let mut random = Random::new(5);
        let mut side = || (0..size).map(|_| random.unit()).collect::<Vec<f64>>();
        let (a, b, u, v) = (side(), side(), side(), side());
        let all = (0..size * size).map(|at| {
            let (row, column) = (at / size, at % size);
            let value = 0.5 * a[row] - 0.3 * b[column] + u[row] * v[column];
            entry(row, column, value)
        });
        all.partition(|entry| (entry.row * 7 + entry.column * 3) % 5 < 2)
    }

    fn rms(errors: impl Iterator<Item = f64>) -> f64 {
        let squares: Vec<f64> = errors.map(|error| error * error).collect();
        (squares.iter().sum::<f64>() / squares.len() as f64).sqrt()
    }

    #[test]
    fn a_matrix_of_low_rank_is_found_from_two_fifths_of_it() {
        let (known, hidden) = example(20);
        let loose = Settings {
            rank: 1,
            ridge: 1e-3,
            offset_ridge: 1e-3,
            inside_rows: false,
        };
        let found = Completion::of(&known, &loose);
        let mean = known.iter().map(|entry| entry.value).sum::<f64>() / known.len() as f64;
        let error = |by: &dyn Fn(&Entry) -> f64| rms(hidden.iter().map(|e| by(e) - e.value));
        let ours = error(&|e| found.at(e.row, e.column).unwrap().value);
        let by_mean = error(&|_| mean);
        assert!(ours < 0.05 * by_mean, "{ours} for {by_mean}");
        assert!(found.explained() > 0.8, "{}", found.explained());
        let some = found.at(hidden[0].row, hidden[0].column).unwrap();
        assert!(!some.measured && some.confidence > 0.5 && some.confidence <= MOST_CONFIDENCE);
    }

    #[test]
    fn what_was_measured_stays_as_it_is_and_what_is_unheard_of_stays_unknown() {
        let (known, _) = example(8);
        let found = Completion::of(&known, &Settings::PAIRS);
        for entry in &known {
            let at = found.at(entry.row, entry.column).unwrap();
            assert_eq!(
                (at.value, at.confidence, at.measured),
                (entry.value, 1.0, true)
            );
        }
        assert_eq!(found.at(99, 0), None);
        assert_eq!(found.at(0, 99), None);
        assert_eq!(Completion::of(&[], &Settings::PAIRS).at(0, 0), None);
    }

    #[test]
    fn each_step_lowers_the_sum_and_the_same_entries_give_the_same() {
        let (known, hidden) = example(12);
        let fit = Fit::of(&known, &Settings::PAIRS);
        let mut entries = (BTreeMap::new(), BTreeMap::new());
        for Entry { row, column, value } in &known {
            let value = value - fit.mean;
            let (by_row, by_column) = (&mut entries.0, &mut entries.1);
            Vec::push(by_row.entry(*row).or_default(), (*column, value));
            Vec::push(by_column.entry(*column).or_default(), (*row, value));
        }
        let mut moving = fit.clone();
        for side in moving.columns.values_mut() {
            side.iter_mut().for_each(|x| *x += 0.2);
        }
        let mut last = f64::INFINITY;
        for _ in 0..20 {
            improve(
                &mut moving.rows,
                &moving.columns,
                &entries.0,
                &Settings::PAIRS,
            );
            improve(
                &mut moving.columns,
                &moving.rows,
                &entries.1,
                &Settings::PAIRS,
            );
            let now = moving.objective(&known, &Settings::PAIRS);
            assert!(now <= last + 1e-9, "{now} after {last}");
            last = now;
        }
        let mut turned = known.clone();
        turned.reverse();
        let (a, b) = [known, turned]
            .map(|entries| Completion::of(&entries, &Settings::PAIRS))
            .into();
        for entry in hidden {
            let at = |one: &Completion| one.at(entry.row, entry.column).unwrap().value.to_bits();
            assert_eq!(at(&a), at(&b), "to the bit");
        }
    }

    #[test]
    fn numbers_that_are_none_change_nothing_and_an_estimate_stays_in_the_range() {
        let (known, hidden) = example(8);
        let mut with = vec![
            entry(0, 0, f64::NAN),
            entry(1, 1, f64::INFINITY),
            entry(2, 2, f64::NEG_INFINITY),
        ];
        with.extend(&known);
        let (clean, with) = (
            Completion::of(&known, &Settings::PAIRS),
            Completion::of(&with, &Settings::PAIRS),
        );
        for entry in &hidden {
            assert_eq!(
                clean.at(entry.row, entry.column),
                with.at(entry.row, entry.column)
            );
        }
        // One huge entry: estimates stay within what was seen, and all of them are numbers.
        let mut huge = known.clone();
        huge.push(entry(3, 3, 1e300));
        let found = Completion::of(&huge, &Settings::PAIRS);
        for entry in &hidden {
            let at = found.at(entry.row, entry.column);
            assert!(at.is_none_or(|at| at.value.is_finite() && at.confidence.is_finite()));
        }
    }

    #[test]
    fn noise_explains_nothing_and_few_entries_say_so() {
        let mut random = Random::new(9);
        let noise: Vec<Entry> = (0..60)
            .map(|at| entry(at / 10, at % 10, random.unit()))
            .collect();
        let found = Completion::of(&noise[..50], &Settings::PAIRS);
        let at = found.at(5, 1);
        assert!(found.explained() < 0.2, "{}", found.explained());
        assert!(at.is_none_or(|at| at.confidence < 0.2));
        let few = Completion::of(
            &[entry(0, 0, 0.5), entry(0, 1, 0.7), entry(1, 0, 0.6)],
            &Settings::PAIRS,
        );
        assert_eq!(few.at(1, 1).unwrap().confidence, 0.0);
    }

    #[test]
    fn pairs_are_completed_over_types_and_measured_ones_are_not_estimated() {
        // How hard a kind presses and how much it feels, on two types.
        let feels = |a: u32, b: u32, kind: u16| {
            let press = 0.1 + 0.08 * f64::from(b);
            1.0 - press * (0.3 + 0.1 * f64::from(a)) * if kind == 0 { 1.0 } else { 1.2 }
        };
        let mut table = PairTable::default();
        let mut missing = Vec::new();
        for kind in 0..2u16 {
            for a in 0..7u32 {
                for b in a..7 {
                    let speeds = [feels(a, b, kind), feels(b, a, kind)];
                    if (a + 2 * b + u32::from(kind)) % 4 == 0 {
                        missing.push((GpuType(kind), a, b, speeds));
                    } else {
                        table.insert(GpuType(kind), 1, (JobType(a), JobType(b)), speeds);
                    }
                }
            }
        }
        let kinds: Vec<(JobType, u32)> = (0..9).map(|kind| (JobType(kind), 1)).collect();
        let found = complete_pairs(&table, &kinds, 2, 0.1, &Settings::PAIRS);
        assert_eq!(found.len(), missing.len(), "kinds 7 and 8 are unheard of");
        for (kind, a, b, speeds) in missing {
            let one = found
                .iter()
                .find(|one| (one.kind, one.kinds) == (kind, [JobType(a), JobType(b)]))
                .unwrap();
            for (found, true_one) in one.speeds.iter().zip(speeds) {
                assert!((found - true_one).abs() < 0.1, "{one:?} for {speeds:?}");
            }
        }
    }
}
