//! How fast kinds of job are on types of GPU, and pairs of them: measured, or inferred from what
//! was.
//!
//! A speed is what a kind does by itself: iterations per second where all of its measurements have
//! them, else submissions per second. Each node counts for itself: of several nodes with one type
//! the lower median counts, so that a node that lies is outvoted where there are three, and cannot
//! raise a speed where there are two. What no GPU could do is refused; and no type counts as more
//! than a hundred times as fast as the middle one of a kind, so that one figure leaves the order of
//! the others as it is.
//!
//! Policies see speeds relative to the fastest type that the cluster has, which is what `work_s`
//! stands for. What was not measured is completed
//! ([`policy::cluster::completion`]); where too little is known for that, a type counts as fast as
//! the mean of those that were measured, and the kind is tried there
//! ([`LiveRounds`](crate::live::rounds::LiveRounds)).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use policy::cluster::catalogue::is_round_allocator;
use policy::cluster::round_allocator::LEAST_CONFIDENCE;
use policy::cluster::{GpuType, JobId, JobType, Learnt, PairTable};

use super::learned::{Learned, differs, impossible, learned};
use super::{Hook, MEASURED_KEPT};
use crate::live::records::{Metered, PairRecord, Solo, SpeedRecord, Witness, solo_key};
use crate::live::wire::{PairView, SpeedView};

/// Nodes of one type whose figures are kept for a kind.
const WITNESSES: usize = 8;
/// Figures that nothing has confirmed for so long are forgotten, in seconds: 180 days.
pub(super) const KEPT_S: f64 = 180.0 * 86_400.0;
/// A figure that is still right is dated anew after this: a day.
const CONFIRM_S: f64 = 86_400.0;
/// Kinds that are looked at together, those of jobs that are not over first.
const MOST_ROWS: usize = 256;
/// Pairs that are looked at together, the latest first.
const MOST_PAIRS: usize = 1024;
/// Kinds of which pairs are completed.
const MOST_PAIRED: usize = 48;
/// Types of GPU that are looked at together, those with most GPUs first.
const MOST_TYPES: usize = 16;
/// Estimates of pairs that are shown.
const MOST_SHOWN: usize = 1024;
/// A kind is tried on a type where its speed is less sure than this.
const SURE: f64 = 0.3;
/// What was learnt is looked at again no sooner, in seconds.
const LEARN_S: f64 = 5.0;
/// Seconds between two words about a node whose figures cannot be.
const WORD_S: f64 = 600.0;

/// Pairs that policies are shown, the kind with the lower number first: speeds and confidence.
pub(super) type ShownPairs = BTreeMap<(GpuType, u32, [JobType; 2]), ([f64; 2], f64)>;

/// What has changed since policies were last shown it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Unlearnt {
    /// Speeds, pairs, or the kinds that are asked about.
    pub speeds: bool,
    /// GPU times of past jobs.
    pub services: bool,
}

impl Hook {
    /// What a node measured of a kind by itself. `false`: it cannot be.
    pub(super) fn witness(&mut self, node: &str, key: (&str, u32, &str), solo: &Solo) -> bool {
        if let Some(why) = impossible(solo) {
            self.doubt(node, &why);
            return false;
        }
        let (gpu, gpus, kind) = key;
        let (now_s, unix_ms) = (self.now_s, self.unix_ms());
        let name = solo_key(gpu, gpus, kind);
        let record = self
            .speeds
            .entry(name.clone())
            .or_insert_with(|| SpeedRecord {
                gpu: gpu.to_owned(),
                gpus,
                kind: kind.to_owned(),
                witnesses: Vec::new(),
            });
        let same = |new: f64, old: f64| (0.9..1.1).contains(&(new / old));
        let same_or_none = |new: Option<f64>, old: Option<f64>| match (new, old) {
            (Some(new), Some(old)) => same(new, old),
            (new, old) => new.is_none() && old.is_none(),
        };
        let own = record.witnesses.iter().position(|one| one.node == node);
        if let Some(old) = own.map(|at| &record.witnesses[at])
            && same(solo.launches_per_s, old.launches_per_s)
            && same_or_none(solo.iterations_per_s, old.iterations_per_s)
            && now_s - old.at_s < CONFIRM_S
        {
            return true;
        }
        own.map(|at| record.witnesses.remove(at));
        record.witnesses.push(Witness {
            node: node.to_owned(),
            launches_per_s: solo.launches_per_s,
            iterations_per_s: solo.iterations_per_s,
            at_s: now_s,
            unix_ms,
        });
        if record.witnesses.len() > WITNESSES {
            record.witnesses.remove(0);
        }
        self.changes.speeds.push(record.clone());
        self.unlearnt.speeds = true;
        self.forget_speeds();
        true
    }

    /// A node says what cannot be: once in a while that is worth a line.
    pub(super) fn doubt(&mut self, node: &str, why: &str) {
        let text = format!("a speed that {node} reports cannot be and is left out: {why}");
        self.doubt_about(node, "speeds", text);
    }

    /// A word about a node, once in a while for each matter.
    pub(super) fn doubt_about(&mut self, node: &str, matter: &'static str, text: String) {
        let key = (node.to_owned(), matter);
        let last = self.doubted_s.get(&key).copied();
        if last.is_some_and(|last| self.now_s < last + WORD_S) {
            return;
        }
        self.doubted_s.insert(key, self.now_s);
        self.say("refused", 0, None, text);
    }

    /// Kinds that were measured longest ago make way, and old figures go.
    pub(super) fn forget_speeds(&mut self) {
        let last = |record: &SpeedRecord| {
            let all = record.witnesses.iter().map(|one| one.at_s);
            all.fold(f64::NEG_INFINITY, f64::max)
        };
        let from_s = self.now_s - KEPT_S;
        let old = |record: &SpeedRecord| last(record) < from_s;
        let mut gone: Vec<String> = self
            .speeds
            .iter()
            .filter(|(_, record)| old(record))
            .map(|(key, _)| key.clone())
            .collect();
        if gone.is_empty() && self.speeds.len() > MEASURED_KEPT {
            let oldest = self
                .speeds
                .iter()
                .min_by(|a, b| last(a.1).total_cmp(&last(b.1)));
            gone.extend(oldest.map(|(key, _)| key.clone()));
        }
        for key in gone {
            self.speeds.remove(&key);
            let of = |record: &SpeedRecord| solo_key(&record.gpu, record.gpus, &record.kind);
            self.changes.speeds.retain(|record| of(record) != key);
            self.changes.dropped_speeds.push(key);
        }
    }

    /// Kinds of jobs that are not over, with their numbers of GPUs; those that were submitted last
    /// first, each once.
    fn asked_kinds(&self) -> Vec<(String, u32)> {
        let mut seen = BTreeSet::new();
        let open = self.jobs.values().rev().filter(|job| job.over.is_none());
        open.map(|job| (job.submission.kind.clone(), job.submission.gpus.max(1)))
            .filter(|kind| seen.insert(kind.clone()))
            .collect()
    }

    /// Types of GPU that the cluster has.
    fn types_here(&self) -> BTreeSet<String> {
        let mut gpus: BTreeMap<&String, u32> = BTreeMap::new();
        for node in self.state.nodes() {
            if let Some(name) = self.gpu_types.0.get(usize::from(node.kind.0)) {
                *gpus.entry(name).or_default() += node.gpus;
            }
        }
        let mut types: Vec<(u32, &String)> = gpus.into_iter().map(|(name, n)| (n, name)).collect();
        types.sort_by(|a, b| b.0.cmp(&a.0).then(a.1.cmp(b.1)));
        let most = types.into_iter().take(MOST_TYPES);
        most.map(|(_, name)| name.clone()).collect()
    }

    /// Looks at what was measured and shows it to the policies, where enough has changed.
    pub(super) fn learn_anew(&mut self, at_once: bool) {
        let open = self.unlearnt.speeds || self.unlearnt.services;
        if !at_once && (!open || self.now_s < self.next_learn_s) {
            return;
        }
        self.next_learn_s = self.now_s + LEARN_S;
        let mut learnt = Learnt::default();
        if std::mem::take(&mut self.unlearnt.services) {
            learnt.past_gpu_s = Some(self.past_gpu_s());
        }
        if std::mem::take(&mut self.unlearnt.speeds) || at_once {
            let asked = self.asked_kinds();
            let new = self.look_at_speeds(&asked);
            let pairs = self.look_at_pairs(&asked);
            learnt.speeds = at_once || differs(&new, &self.learned) || pairs != self.shown_pairs;
            self.learned = new;
            learnt.pairs = (!pairs.is_empty()).then(|| Arc::new(table_of(&pairs)));
            self.shown_pairs = pairs;
            self.note_unsure(&asked);
            self.tell_sizes();
        }
        self.tell_speeds();
        if learnt.speeds || learnt.past_gpu_s.is_some() {
            self.scheduler.learn(&learnt);
            self.changed |= learnt.past_gpu_s.is_some();
        }
    }

    fn look_at_speeds(&self, asked: &[(String, u32)]) -> Learned {
        let mut by_row: BTreeMap<(String, u32), Vec<&SpeedRecord>> = BTreeMap::new();
        for record in self.speeds.values() {
            let key = (record.kind.clone(), record.gpus);
            by_row.entry(key).or_default().push(record);
        }
        let asked: BTreeSet<&(String, u32)> = asked.iter().collect();
        let mut order: Vec<(bool, u64, (String, u32))> = by_row
            .iter()
            .map(|(key, records)| {
                let seen = records.iter().flat_map(|record| &record.witnesses);
                let last = seen.map(|one| one.unix_ms).max().unwrap_or(0);
                (asked.contains(key), last, key.clone())
            })
            .collect();
        order.sort_by(|a, b| b.cmp(a));
        for (.., key) in order.into_iter().skip(MOST_ROWS) {
            by_row.remove(&key);
        }
        learned(&by_row, &self.types_here())
    }

    /// Pairs of the kinds that are asked about, measured ones first; then what can be inferred of
    /// the others. A pair that does not fit into the memory of a GPU has the speeds 0.
    fn look_at_pairs(&mut self, asked: &[(String, u32)]) -> ShownPairs {
        let mut latest: Vec<&PairRecord> = self.pairs.values().collect();
        latest.sort_by_key(|pair| std::cmp::Reverse(pair.unix_ms));
        latest.truncate(MOST_PAIRS);
        let latest: Vec<PairRecord> = latest.into_iter().cloned().collect();
        let bytes = self.shared.facts().gpu_bytes.clone();
        let peaks = self.peaks(asked);
        let fits = |kind: GpuType, gpus: u32, both: [&str; 2]| {
            let peak = |kind: &str| peaks.get(&(kind.to_owned(), gpus)).copied().unwrap_or(0);
            let there = bytes.get(&kind).copied().filter(|there| *there > 0);
            there.is_none_or(|there| peak(both[0]).saturating_add(peak(both[1])) <= there)
        };
        let mut table = PairTable::default();
        let mut known = ShownPairs::new();
        // The oldest first: of two orders of one pair the later counts.
        for pair in latest.iter().rev() {
            let Some(teaches) = self.shown(pair) else {
                continue;
            };
            // CAST: as many as there are types of GPU.
            let kind = GpuType(self.gpu_types.number(&pair.gpu) as u16);
            let [a, b] = [0, 1].map(|at| JobType(self.kinds.number(&pair.kinds[at])));
            if teaches {
                table.insert(kind, pair.gpus, (a, b), pair.rates);
            }
            let (key, rates) = if a <= b {
                ([a, b], pair.rates)
            } else {
                ([b, a], [pair.rates[1], pair.rates[0]])
            };
            let fits = fits(kind, pair.gpus, [&pair.kinds[0], &pair.kinds[1]]);
            let rates = if fits { rates } else { [0.0, 0.0] };
            known.insert((kind, pair.gpus, key), (rates, 1.0));
        }
        // Packers go by what was measured alone.
        let rounds = self.config.choice.order.as_deref();
        let most = if rounds.is_some_and(is_round_allocator) {
            MOST_PAIRED
        } else {
            0
        };
        let kinds: Vec<(JobType, u32)> = asked
            .iter()
            .take(most)
            .map(|(kind, gpus)| (JobType(self.kinds.number(kind)), *gpus))
            .collect();
        // CAST: as above.
        let types = self.gpu_types.0.len() as u16;
        let estimates = if kinds.is_empty() {
            Vec::new()
        } else {
            table.complete(&kinds, types, LEAST_CONFIDENCE)
        };
        for one in estimates {
            if known.len() >= MOST_PAIRS + MOST_SHOWN {
                break;
            }
            if known.contains_key(&(one.kind, one.gpus, one.kinds)) {
                continue;
            }
            let names = one.kinds.map(|kind| self.kinds.0[kind.0 as usize].clone());
            let fits = fits(one.kind, one.gpus, [&names[0], &names[1]]);
            let speeds = if fits { one.speeds } else { [0.0, 0.0] };
            known.insert((one.kind, one.gpus, one.kinds), (speeds, one.confidence));
        }
        known
    }

    /// What kinds hold at most, by what was metered of them and by the quotas of their jobs.
    fn peaks(&self, asked: &[(String, u32)]) -> BTreeMap<(String, u32), u64> {
        let mut peaks: BTreeMap<(String, u32), u64> = asked
            .iter()
            .map(|(kind, gpus)| {
                let metered = self.metered(kind, *gpus);
                let peak = |m: Metered| m.persistent_bytes.saturating_add(m.ephemeral_bytes);
                ((kind.clone(), *gpus), metered.map_or(0, peak))
            })
            .collect();
        for (id, at) in &self.live {
            let Some(record) = self.jobs.get(id) else {
                continue;
            };
            let key = (
                record.submission.kind.clone(),
                record.submission.gpus.max(1),
            );
            let peak = peaks.entry(key).or_default();
            *peak = self.state.job(*at).profile.peak_bytes().max(*peak);
        }
        peaks
    }

    /// Which kinds are to be tried where.
    fn note_unsure(&mut self, asked: &[(String, u32)]) {
        let types = self.types_here();
        let mut unsure = BTreeSet::new();
        for (kind, gpus) in asked.iter().take(MOST_ROWS) {
            let row = self.learned.rows.get(&(kind.clone(), *gpus));
            for gpu in &types {
                let seen = row.and_then(|row| row.by_type.get(gpu));
                if types.len() > 1 && seen.is_none_or(|seen| seen.confidence < SURE) {
                    let kind = JobType(self.kinds.number(kind));
                    // CAST: as many as there are types of GPU.
                    let gpu = GpuType(self.gpu_types.number(gpu) as u16);
                    unsure.insert((kind, *gpus, gpu));
                }
            }
        }
        self.shared.facts().unsure = unsure;
    }

    /// Shows the policies how fast each job is on each type; 0 where it cannot run: because it is
    /// bound to its GPUs, because its quota is too large, or because no node has enough of them.
    pub(super) fn tell_speeds(&mut self) {
        if self.gpu_types.0.len() < 2 {
            return;
        }
        let facts = self.shared.facts();
        let (pinned, bytes) = (facts.pinned.clone(), facts.gpu_bytes.clone());
        drop(facts);
        let mut largest: BTreeMap<GpuType, u32> = BTreeMap::new();
        for node in self.state.nodes() {
            let most = largest.entry(node.kind).or_default();
            *most = node.gpus.max(*most);
        }
        let mut other: Vec<(JobId, Arc<[f64]>)> = Vec::new();
        for (id, at) in &self.live {
            let Some(record) = self.jobs.get(id) else {
                continue;
            };
            let asked = &record.submission;
            let gpus = asked.gpus.max(1);
            let on = pinned.get(at).and_then(|own| own.first());
            let on = on.map(|gpu| self.state.type_of(*gpu));
            let row = self.learned.rows.get(&(asked.kind.clone(), gpus));
            // A program takes no more types than that.
            let names = self.gpu_types.0.iter().take(64).enumerate();
            let speeds: Vec<f64> = names
                .map(|(kind, name)| {
                    // CAST: as many as there are types of GPU.
                    let kind = GpuType(kind as u16);
                    let there = bytes.get(&kind).copied().unwrap_or(0);
                    let large = asked.mem_bytes.is_some_and(|own| there > 0 && own > there);
                    let few = largest.get(&kind).is_some_and(|most| *most < gpus);
                    if large || few || on.is_some_and(|on| on != kind) {
                        return 0.0;
                    }
                    let seen = row.and_then(|row| row.by_type.get(name));
                    seen.map_or(1.0, |seen| seen.relative)
                })
                .collect();
            // As fast everywhere is the same as nothing known.
            let plain = speeds.iter().all(|speed| *speed == 1.0);
            let speeds: Vec<f64> = if plain { Vec::new() } else { speeds };
            if *self.state.job(*at).by_type != speeds[..] {
                other.push((*at, speeds.into()));
            }
        }
        for (at, speeds) in other {
            self.state.job_mut(at).by_type = speeds;
            if self.state.job(at).run().is_some() {
                self.pace(at);
            }
        }
    }

    /// What is known of speeds by type.
    pub(super) fn speed_views(&self) -> Vec<SpeedView> {
        let rows = self.learned.rows.iter();
        rows.flat_map(|((kind, gpus), row)| {
            row.by_type.iter().map(move |(gpu, seen)| SpeedView {
                gpu: gpu.clone(),
                gpus: *gpus,
                kind: kind.clone(),
                per_s: seen.per_s,
                iterations: row.iterations,
                relative: seen.relative,
                measured: seen.measured,
                confidence: seen.confidence,
                // CAST: a count.
                nodes: seen.nodes as u64,
                unix_ms: seen.unix_ms,
            })
        })
        .collect()
    }

    /// Pairs that were not measured, as far as they can be inferred.
    pub(super) fn estimated_pairs(&self) -> Vec<PairView> {
        let inferred = self.shown_pairs.iter().filter(|(_, (_, sure))| *sure < 1.0);
        inferred
            .filter_map(|((kind, gpus, kinds), (rates, confidence))| {
                let name = |kind: JobType| self.kinds.0.get(kind.0 as usize).cloned();
                Some(PairView {
                    gpu: self.gpu_types.0.get(usize::from(kind.0))?.clone(),
                    gpus: *gpus,
                    kinds: [name(kinds[0])?, name(kinds[1])?],
                    rates: *rates,
                    refused: false,
                    estimated: true,
                    confidence: *confidence,
                    nodes: 0,
                    outliers: Vec::new(),
                    unix_ms: 0,
                })
            })
            .collect()
    }
}

/// A table of these pairs.
fn table_of(pairs: &ShownPairs) -> PairTable {
    let mut table = PairTable::default();
    for ((kind, gpus, [a, b]), (rates, _)) in pairs {
        table.insert(*kind, *gpus, (*a, *b), *rates);
    }
    table
}
