//! Finds where the iterations of a program begin, from the sequence of its submissions alone.
//!
//! A deep-learning job repeats one iteration thousands of times, and a scheduler that knows the
//! boundaries can distinguish persistent memory from scratch memory, and measure the job's speed
//! (P. Yu, M. Chowdhury, "Salus: Fine-Grained GPU Sharing Primitives for Deep Learning
//! Applications", MLSys 2020, gets them from inside the framework; so do AntMan and PipeSwitch).
//! Below the driver's interface the boundaries are inferred, so the answer comes with a confidence,
//! and it can be "not periodic".
//!
//! The input is a list of *signatures*: equal numbers for the same kernel with the same shape in
//! the same stream. The upper bits alone stand for the kernel.
//!
//! *Why not autocorrelation.* The fraction of positions i with s\[i\] = s\[i+p\] is 1 at the period
//! and at its multiples, but one inserted launch breaks a whole period of pairs. With a log line of
//! 3 launches after every 10 iterations of 100, the score of the true period is 900/1003 and that
//! of ten iterations is 1: the maximum is the wrong one.
//!
//! *What is done instead.* An *anchor* is a signature that occurs again. It cuts the sequence into
//! segments; the most frequent one is the *body*. A segment is explained if it is a row of bodies,
//! or a body with something inserted (its longest common prefix and suffix with the body together
//! are as long as the body). The *coverage* of the anchor is the explained part of all launches:
//!
//! ```text
//! a b b c   a b b c   a b b c   e e f   a b b c   anchor a, body "abbc": 16 of 19 explained
//!   b b       b b       b b ...                   anchor b, body "b": half explained
//! ```
//!
//! Every signature is tried; then groups of 4, 16 and 64 in a row, for programs without a signature
//! of their own in each iteration. Comparing segments takes constant time with hashes of prefixes
//! (R. M. Karp, M. O. Rabin, "Efficient randomized pattern-matching algorithms", 1987), prefixes
//! and suffixes a logarithm of it by bisection; the sum over all anchors is O(n log n) in time and
//! O(n) in memory, and n is [`HISTORY`] at most.
//!
//! *Which period.* Of the bodies that cover [`MIN_COVERAGE`] the shortest. A loop nested in the
//! iteration (the layers of a forward pass) covers only its part, so the stable outer period wins;
//! evaluation and logging every so many iterations leave the iteration above the bound, so that the
//! epoch does not win. If the inner loop is more than 95 % of the launches, both are the same loop
//! in different sizes, and the inner one is reported: sixteen accumulated gradients with a single
//! fused step look like sixteen iterations with a log line.
//!
//! *Shapes.* The last batch of an epoch is smaller, sentences have their own length: the search is
//! made with whole signatures and with the kernels alone, and the shorter period taken.
//!
//! *Warm-up.* The whole history is tried first, then its last half, then its last quarter. Not
//! less: in a long enough history something repeats for a while in any program.
//!
//! *Confidence* is coverage x r/(r+1) for r repetitions seen, x the mean of 1 and the part of the
//! history that was explained at all, x 0.95 for kernels alone: three repetitions of a perfect loop
//! are 0.75, twenty 0.95. It is a grade, not a probability: nobody knows the distribution that
//! programs come from.

use std::collections::HashMap;

/// Most submissions that are examined: three repetitions of an iteration of some 5,000 launches,
/// more than a step of a large language model makes from one thread.
pub const HISTORY: usize = 16_384;
/// Fewer launches than this say nothing.
pub const MIN_HISTORY: usize = 24;
/// Fraction of the launches that a period has to explain: above what evaluation and logging usually
/// add, below what an inner loop usually leaves out.
pub const MIN_COVERAGE: f64 = 0.95;
/// Repetitions that make a period: two are one coincidence.
pub const MIN_REPEATS: usize = 3;
/// Lengths of the groups that are tried as anchors.
const GRAMS: [usize; 4] = [1, 4, 16, 64];

/// What the history shows.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Sequence {
    /// Too few launches to say anything.
    TooShort,
    /// No period.
    Irregular {
        /// The part of the launches that the best period explains, between 0 and 1.
        coverage: f64,
    },
    /// Iterations.
    Periodic(Found),
}

/// An iteration, as it was found.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Found {
    /// Launches in an iteration.
    pub launches: usize,
    /// A signature by which iterations can be counted; `None`: none is in every iteration.
    pub anchor: Option<Anchor>,
    /// Whether the shapes repeat too, or only the kernels.
    pub shapes: bool,
    /// Part of the launches that is explained, between [`MIN_COVERAGE`] and 1.
    pub coverage: f64,
    /// Iterations seen.
    pub repeats: usize,
    /// Between 0 and 1; see the module's text.
    pub confidence: f64,
}

/// A signature by which iterations can be counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Anchor {
    /// Which.
    pub signature: u32,
    /// How often it comes in an iteration.
    pub times: u32,
}

/// Looks for iterations in `signatures`, oldest first; the upper `kind_bits` bits of each identify
/// the kernel.
pub fn find(signatures: &[u32], kind_bits: u32) -> Sequence {
    let skipped = signatures.len().saturating_sub(HISTORY);
    let history = &signatures[skipped..]; // PANIC: at most the length.
    if history.len() < MIN_HISTORY {
        return Sequence::TooShort;
    }
    let kinds = !(u32::MAX.checked_shr(kind_bits).unwrap_or(0));
    let mut best_coverage = 0f64;
    for part in [1, 2, 4] {
        let window = &history[history.len() - history.len() / part..]; // PANIC: at most the length.
        if window.len() < MIN_HISTORY {
            break;
        }
        let [whole, kernels] = [u32::MAX, kinds].map(|mask| {
            let masked: Vec<u32> = window.iter().map(|signature| signature & mask).collect();
            let text = Text::new(&masked);
            let grams = GRAMS.iter();
            let mut searches = grams.map(|gram| text.search(*gram, &mut best_coverage));
            searches.find_map(|found| found)
        });
        let shapes = match (&whole, &kernels) {
            (Some(whole), Some(kernels)) => whole.length <= kernels.length,
            (whole, _) => whole.is_some(),
        };
        let Some(body) = (if shapes { whole } else { kernels }) else {
            continue;
        };
        // CAST: at most `HISTORY`.
        let (explained, all) = (window.len() as f64, history.len() as f64);
        let repeats = body.repeats as f64; // CAST: likewise.
        let grade = if shapes { 1.0 } else { 0.95 };
        return Sequence::Periodic(Found {
            launches: body.length,
            anchor: anchor(window, &body),
            shapes,
            coverage: body.coverage,
            repeats: body.repeats,
            confidence: grade
                * body.coverage
                * (repeats / (repeats + 1.0))
                * (1.0 + explained / all)
                / 2.0,
        });
    }
    Sequence::Irregular {
        coverage: best_coverage,
    }
}

/// The signature of the body that comes outside of it least: extras repeat parts of an iteration.
fn anchor(window: &[u32], body: &Body) -> Option<Anchor> {
    let mut inside: HashMap<u32, usize> = HashMap::new();
    for signature in window.iter().skip(body.from).take(body.length) {
        *inside.entry(*signature).or_default() += 1;
    }
    let mut all: HashMap<u32, usize> = HashMap::new();
    for signature in window {
        if inside.contains_key(signature) {
            *all.entry(*signature).or_default() += 1;
        }
    }
    let candidates = inside.iter().map(|(signature, times)| {
        let expected = times * (body.repeats + 1);
        let count = all.get(signature).copied().unwrap_or(0);
        (*times, count.abs_diff(expected), *signature)
    });
    let off = |times: usize| (body.repeats * times / 10).max(times);
    candidates
        .filter(|(times, difference, _)| *difference <= off(*times))
        .min()
        .and_then(|(times, _, signature)| {
            Some(Anchor {
                signature,
                times: u32::try_from(times).ok()?,
            })
        })
}

/// A segment that comes again and again.
#[derive(Clone, Copy, Debug)]
struct Body {
    from: usize,
    length: usize,
    repeats: usize,
    coverage: f64,
}

/// A sequence in which parts can be compared in constant time.
struct Text {
    symbols: Vec<u64>,
    /// Hash of each prefix.
    prefix: Vec<u64>,
    power: Vec<u64>,
}

/// The Mersenne prime 2^61 - 1.
const PRIME: u64 = (1 << 61) - 1;
/// Any number below the prime that no program is written against.
const BASE: u64 = 0x0bb6_7ae8_584c_aa73;

fn times(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    // CAST: the lower 61 bits, and what is above them, which is less than 2^61.
    let sum = (product as u64 & PRIME) + (product >> 61) as u64;
    if sum >= PRIME { sum - PRIME } else { sum }
}

impl Text {
    fn new(symbols: &[u32]) -> Self {
        let symbols: Vec<u64> = symbols
            .iter()
            .map(|symbol| u64::from(*symbol) + 1)
            .collect();
        let (mut prefix, mut power) = (vec![0], vec![1]);
        let (mut hash, mut grown) = (0, 1);
        for symbol in &symbols {
            hash = (times(hash, BASE) + symbol) % PRIME;
            grown = times(grown, BASE);
            prefix.push(hash);
            power.push(grown);
        }
        Self {
            symbols,
            prefix,
            power,
        }
    }

    /// Hash of the `length` symbols from `from`.
    fn hash(&self, from: usize, length: usize) -> u64 {
        // PANIC: callers stay inside the text; `prefix` and `power` are one longer.
        let before = times(self.prefix[from], self.power[length]);
        let hash = self.prefix[from + length];
        if hash >= before {
            hash - before
        } else {
            hash + PRIME - before
        }
    }

    fn same(&self, a: usize, b: usize, length: usize) -> bool {
        self.hash(a, length) == self.hash(b, length)
    }

    /// Length of the longest common prefix of what begins at `a` and at `b`, at most `most`.
    fn common_prefix(&self, a: usize, b: usize, most: usize) -> usize {
        largest(most, |length| self.same(a, b, length))
    }

    /// Length of the longest common suffix of what ends at `a` and at `b`, at most `most`.
    fn common_suffix(&self, a: usize, b: usize, most: usize) -> usize {
        largest(most, |length| self.same(a - length, b - length, length))
    }

    /// The shortest body that explains enough, among those that begin with a group of `gram`
    /// symbols.
    fn search(&self, gram: usize, best_coverage: &mut f64) -> Option<Body> {
        let count = (self.symbols.len() + 1).checked_sub(gram)?;
        let mut groups: Vec<(u64, usize)> =
            (0..count).map(|at| (self.hash(at, gram), at)).collect();
        groups.sort_unstable();
        let mut best: Option<Body> = None;
        for group in groups.chunk_by(|one, other| one.0 == other.0) {
            let Some(body) = self.weigh(group) else {
                continue;
            };
            *best_coverage = best_coverage.max(body.coverage);
            let better = best
                .is_none_or(|best| (body.length, -body.coverage) < (best.length, -best.coverage));
            if body.coverage >= MIN_COVERAGE && body.repeats >= MIN_REPEATS && better {
                best = Some(body);
            }
        }
        best
    }

    /// The body of an anchor that is at these places, in order, and what it explains.
    fn weigh(&self, places: &[(u64, usize)]) -> Option<Body> {
        if places.len() <= MIN_REPEATS {
            return None;
        }
        let segments = || {
            places.windows(2).filter_map(|pair| match pair {
                [(_, from), (_, to)] => Some((*from, to - from)),
                _ => None,
            })
        };
        let mut bodies: Vec<(usize, u64, usize)> = segments()
            .map(|(from, length)| (length, self.hash(from, length), from))
            .collect();
        bodies.sort_unstable();
        let (length, from) = bodies
            .chunk_by(|one, other| (one.0, one.1) == (other.0, other.1))
            .max_by_key(|same| same.len() * same.first().map_or(0, |(length, ..)| *length))
            .and_then(|same| same.first())
            .map(|(length, _, from)| (*length, *from))?;
        let mut repeats: usize = segments()
            .map(|(at, size)| self.bodies_in(at, size, from, length))
            .sum();
        let mut explained = repeats * length;
        // What is before the first place and after the last one may be cut short.
        let (first, last) = (places.first()?.1, places.last()?.1);
        explained += self.common_suffix(first, from + length, first.min(length));
        let left = self.symbols.len() - last;
        let whole = usize::from(left >= length && self.same(last, from, length));
        repeats += whole;
        explained += match whole {
            1 => {
                let rest = (left - length).min(length);
                length + self.common_prefix(last + length, from, rest)
            }
            _ => self.common_prefix(last, from, left.min(length)),
        };
        Some(Body {
            from,
            length,
            repeats,
            // CAST: at most `HISTORY`.
            coverage: (explained as f64 / self.symbols.len() as f64).min(1.0),
        })
    }

    /// How many bodies a segment is made of, something inserted into the last one or not.
    fn bodies_in(&self, at: usize, size: usize, body: usize, length: usize) -> usize {
        let (mut at, mut size, mut count) = (at, size, 0);
        while size >= length && self.same(at, body, length) {
            (at, size, count) = (at + length, size - length, count + 1);
        }
        let inserted = size > length && {
            let before = self.common_prefix(at, body, length);
            before + self.common_suffix(at + size, body + length, length - before) == length
        };
        count + usize::from(inserted)
    }
}

/// The largest number up to `most` for which `holds`, which holds for all below it.
fn largest(most: usize, holds: impl Fn(usize) -> bool) -> usize {
    if holds(most) {
        return most;
    }
    // Holds below `low`, inclusive; does not at `high`.
    let (mut low, mut high) = (0, most);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if holds(middle) {
            low = middle;
        } else {
            high = middle;
        }
    }
    low
}

#[cfg(test)]
#[path = "iterations_tests.rs"]
mod tests;
