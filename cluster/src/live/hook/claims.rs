//! What nodes say of pairs of kinds, and what counts of it.
//!
//! A pair's speeds are what a node's arbiter reports, and a node may lie. So each node has one
//! claim, its last one, and no node decides alone what becomes of a pair on the others:
//!
//! * *Two or more nodes* have measured it: each job's speed is the middle one (of two the higher,
//!   of an even number the lower middle one). Of three nodes, one that lies is outvoted, whichever
//!   way it lies; of two, one cannot keep a pair apart.
//! * *One node* has: what it says counts where it brings jobs together, because wherever they come
//!   together they are measured. Where it would keep them apart it counts on that node alone, and
//!   the pair is tried on another. Where no other node has such GPUs it decides about nobody else.
//! * On its own node a claim always counts: a pair that was bad there is not made there again.
//! * *Fed* pairs ([`Hook::feed`]) are the operator's word. They count until two nodes have measured
//!   the pair.
//!
//! A claim that is far from what counts is said in the log, with its node.

use std::collections::BTreeMap;

use policy::cluster::{GpuId, GpuType, JobType, NodeId, Packer, Profile, Reason, catalogue};

use super::past::Pairs;
use super::speeds::KEPT_S;
use super::{Hook, Names, NodeEntry};
use crate::live::adapt;
use crate::live::records::{PairClaim, PairRecord};

/// Nodes whose claims are kept of a pair; the oldest makes way.
pub(super) const CLAIMS: usize = 8;
/// A speed that differs by more from what counts is worth a word.
const FAR: f64 = 0.25;
/// How long the claim of a single node, below what one job does by itself, keeps a program of
/// rounds from a pair, in seconds. Such a program knows types of GPU and no nodes.
const ALONE_S: f64 = 3600.0;

/// The lower median of a job's speeds; of two the higher.
fn middle(mut speeds: Vec<f64>) -> f64 {
    speeds.sort_by(f64::total_cmp);
    let at = match speeds.len() {
        2 => 1,
        count => count.saturating_sub(1) / 2,
    };
    speeds.get(at).copied().unwrap_or(0.0)
}

impl PairRecord {
    /// Puts a node's claim in the place of its last one, drops old ones, and finds what counts.
    fn claim(&mut self, claim: PairClaim) {
        if self.claims.is_empty() && self.unix_ms > 0 {
            // It came from elsewhere, and counts until two nodes know better.
            self.claims.push(PairClaim {
                rates: self.rates,
                at_s: claim.at_s,
                unix_ms: self.unix_ms,
                ..PairClaim::default()
            });
        }
        self.claims
            .retain(|old| old.node != claim.node && claim.at_s - old.at_s <= KEPT_S);
        self.unix_ms = claim.unix_ms;
        self.claims.push(claim);
        let nodes = |record: &Self| record.claims.iter().filter(|c| !c.node.is_empty()).count();
        if nodes(self) >= 2 {
            self.claims.retain(|claim| !claim.node.is_empty());
        }
        if self.claims.len() > CLAIMS {
            self.claims.remove(0);
        }
        let fed = self.claims.iter().find(|claim| claim.node.is_empty());
        self.rates = match fed {
            Some(fed) => fed.rates,
            None => [0, 1].map(|who| middle(self.claims.iter().map(|c| c.rates[who]).collect())),
        };
    }

    /// The node that alone has measured it.
    fn only_node(&self) -> Option<&str> {
        match &self.claims[..] {
            [only] if !only.node.is_empty() => Some(&only.node),
            _ => None,
        }
    }

    /// What a node itself said of it.
    pub(super) fn on(&self, node: &str) -> Option<[f64; 2]> {
        let own = self.claims.iter().find(|claim| claim.node == node);
        own.map(|claim| claim.rates)
    }

    /// Nodes whose claims are far from what counts. Of two that differ nobody knows which is right.
    pub(super) fn outliers(&self) -> Vec<String> {
        if self.claims.len() < 3 {
            return Vec::new();
        }
        let far = |claim: &&PairClaim| (0..2).any(|who| self.is_far(claim.rates, who));
        let outliers = self.claims.iter().filter(far);
        outliers.map(|claim| claim.node.clone()).collect()
    }

    fn is_far(&self, rates: [f64; 2], who: usize) -> bool {
        (rates[who] - self.rates[who]).abs() > FAR
    }
}

/// Whether speeds would split a pair, by a packer that knows nothing else.
pub(super) struct Judge(Option<Box<dyn Packer>>);

impl Judge {
    pub(super) fn new(packer: Option<&String>) -> Self {
        let context = adapt::context_to_be();
        Self(packer.and_then(|name| catalogue::packer(name, &context).ok()))
    }

    /// Why these speeds split a pair; without a packer, nothing does.
    pub(super) fn refuses(&mut self, gpus: u32, rates: [f64; 2]) -> Option<Reason> {
        let packer = self.0.as_mut()?;
        let profile = |kind| Profile::unknown(JobType(kind), gpus, policy::Class::Guaranteed);
        let (host, joiner) = (profile(0), profile(1));
        packer.remember(&[(GpuType(0), host, joiner, rates)]);
        packer.refused(&host, &joiner, GpuType(0))
    }
}

/// Which orders of a pair (host first) a node's own figures refuse, and which they do not.
pub(super) fn bars(
    pair: &PairRecord,
    [a, b]: [f64; 2],
    judge: &mut Judge,
    number: impl Fn(&str) -> Option<u32>,
) -> Vec<([JobType; 2], Option<Reason>)> {
    let kind = |at: usize| number(&pair.kinds[at]).map(JobType);
    let (Some(first), Some(second)) = (kind(0), kind(1)) else {
        return Vec::new();
    };
    let mut both = vec![([first, second], judge.refuses(pair.gpus, [a, b]))];
    if first != second {
        both.push(([second, first], judge.refuses(pair.gpus, [b, a])));
    }
    both
}

/// Another node than this one has GPUs of a type.
fn elsewhere(nodes: &BTreeMap<String, NodeEntry>, node: &str, gpu: &str) -> bool {
    let has = |entry: &NodeEntry| entry.record.devices.first().is_some_and(|d| d.name == gpu);
    (nodes.iter()).any(|(name, entry)| name != node && has(entry))
}

/// Pairs that policies are shown as measured.
pub(super) fn counting(pairs: &Pairs) -> impl Iterator<Item = &PairRecord> {
    pairs.values().filter(|pair| !pair.unconfirmed)
}

impl Hook {
    /// What a node has measured of a pair: what counts now, and why it is split on that node.
    pub(super) fn claim(
        &mut self,
        node: &str,
        measured: PairRecord,
    ) -> ([f64; 2], bool, Option<Reason>) {
        let turned = |record: &PairRecord| {
            let mut kinds = record.kinds.clone();
            kinds.reverse();
            (record.gpu.clone(), record.gpus, kinds)
        };
        let own = (measured.gpu.clone(), measured.gpus, measured.kinds.clone());
        // Where both orders of the two were fed, both learn of it.
        let mut keys = vec![(own, false), (turned(&measured), true)];
        if measured.kinds[0] == measured.kinds[1] {
            keys.truncate(1);
        }
        if keys.iter().any(|(key, _)| self.pairs.contains_key(key)) {
            keys.retain(|(key, _)| self.pairs.contains_key(key));
        } else {
            keys.truncate(1);
        }
        let mut records = Vec::new();
        let mut judge = Judge::new(self.config.choice.packer.as_ref());
        let here = judge.refuses(measured.gpus, measured.rates);
        let (mut counts, mut unconfirmed) = (measured.rates, false);
        let (now_s, unix_ms) = (self.now_s, self.unix_ms());
        for (key, turned) in keys {
            let turn = |[a, b]: [f64; 2]| if turned { [b, a] } else { [a, b] };
            let mut record = self.pairs.get(&key).cloned().unwrap_or_else(|| PairRecord {
                unix_ms: 0,
                ..measured.clone()
            });
            record.claim(PairClaim {
                node: node.to_owned(),
                rates: turn(measured.rates),
                at_s: now_s,
                unix_ms,
            });
            record.unconfirmed = self.is_unconfirmed(&record, &mut judge);
            (counts, unconfirmed) = (turn(record.rates), record.unconfirmed);
            records.push((key, record));
        }
        for (key, record) in records {
            self.disagree(node, &record);
            self.changes.pairs.push(record.clone());
            self.pairs.insert(key, record);
        }
        self.bar(node, &measured, measured.rates, &mut judge);
        (counts, unconfirmed, here)
    }

    /// One node alone would keep a pair apart on others.
    fn is_unconfirmed(&self, record: &PairRecord, judge: &mut Judge) -> bool {
        record.only_node().is_some_and(|node| {
            let worse = record.rates.iter().sum::<f64>() < 1.0;
            elsewhere(&self.nodes, node, &record.gpu)
                && (worse || judge.refuses(record.gpus, record.rates).is_some())
        })
    }

    /// A claim that is far off is said, once in a while.
    fn disagree(&mut self, node: &str, record: &PairRecord) {
        if !record.outliers().iter().any(|one| one == node) {
            return;
        }
        let ([a, b], [own_a, own_b]) = (record.rates, record.on(node).unwrap_or(record.rates));
        let text = format!(
            "{node} reports {own_a:.2} and {own_b:.2} for `{}` and `{}` on {}, where {} nodes come \
             to {a:.2} and {b:.2}: its figure counts on {node} unconfirmed",
            record.kinds[0],
            record.kinds[1],
            record.gpu,
            record.claims.len(),
        );
        self.doubt_about(node, "pairs", text);
    }

    /// A pair is not made on a node again where its own figures are bad there, or it is.
    fn bar(&self, node: &str, pair: &PairRecord, rates: [f64; 2], judge: &mut Judge) {
        let Some(at) = self.node_number(node) else {
            return;
        };
        let bars = bars(pair, rates, judge, |kind| self.kinds.1.get(kind).copied());
        let mut facts = self.shared.facts();
        for (kinds, why) in bars {
            match why {
                Some(why) => facts.barred.insert((at, pair.gpus, kinds), why),
                None => facts.barred.remove(&(at, pair.gpus, kinds)),
            };
        }
    }

    fn node_number(&self, node: &str) -> Option<NodeId> {
        let gpu = self.places.iter().position(|(name, _)| name == node)?;
        // CAST: a place in the list of GPUs.
        Some(self.state.node_of(GpuId(gpu as u32)))
    }

    /// Nodes have come or gone: which claims stand alone now, and which pairs are made where.
    pub(super) fn weigh_claims(&mut self) {
        let mut judge = Judge::new(self.config.choice.packer.as_ref());
        let unconfirmed: Vec<bool> = self
            .pairs
            .values()
            .map(|pair| self.is_unconfirmed(pair, &mut judge))
            .collect();
        for (pair, unconfirmed) in self.pairs.values_mut().zip(unconfirmed) {
            pair.unconfirmed = unconfirmed;
        }
    }

    /// All bars anew, for the nodes and kinds of the present state.
    pub(super) fn bar_all(&mut self) {
        let mut judge = Judge::new(self.config.choice.packer.as_ref());
        for pair in self.pairs.values() {
            for claim in pair.claims.iter().filter(|claim| !claim.node.is_empty()) {
                self.bar(&claim.node, pair, claim.rates, &mut judge);
            }
        }
    }

    /// What a program of rounds takes a pair for, and whether other pairs are inferred from it.
    pub(super) fn shown(&self, pair: &PairRecord) -> Option<bool> {
        if !pair.unconfirmed {
            return Some(true);
        }
        let last_s = pair.claims.iter().map(|claim| claim.at_s);
        let last_s = last_s.fold(f64::NEG_INFINITY, f64::max);
        (self.now_s - last_s < ALONE_S).then_some(false)
    }

    /// Pairs that nothing has confirmed for long are forgotten.
    pub(super) fn forget_old_claims(&mut self) -> Vec<(String, u32, [String; 2])> {
        let now_s = self.now_s;
        let old = |pair: &PairRecord| {
            !pair.claims.is_empty() && pair.claims.iter().all(|c| now_s - c.at_s > KEPT_S)
        };
        let gone = self.pairs.iter().filter(|(_, pair)| old(pair));
        gone.map(|(key, _)| key.clone()).collect()
    }
}

/// Numbers of kinds, made where a pair is looked at first.
pub(super) fn number_kinds(kinds: &mut Names, pairs: &Pairs) {
    for pair in pairs.values() {
        pair.kinds.iter().for_each(|kind| {
            kinds.number(kind);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(node: &str, rates: [f64; 2], at_s: f64) -> PairClaim {
        PairClaim {
            node: node.into(),
            rates,
            at_s,
            unix_ms: 1 + at_s as u64,
        }
    }

    #[test]
    fn of_three_nodes_one_that_lies_is_outvoted_either_way_and_of_two_it_keeps_nothing_apart() {
        for lie in [[0.0, 0.0], [1.0, 1.0]] {
            let mut pair = PairRecord::default();
            pair.claim(claim("liar", lie, 0.0));
            assert_eq!((pair.rates, pair.only_node()), (lie, Some("liar")));
            pair.claim(claim("b", [0.6, 0.5], 1.0));
            let higher = [f64::max(lie[0], 0.6), f64::max(lie[1], 0.5)];
            assert_eq!((pair.rates, pair.only_node()), (higher, None));
            assert!(pair.outliers().is_empty(), "of two nobody knows");
            pair.claim(claim("c", [0.62, 0.52], 2.0));
            assert!((0.6..=0.62).contains(&pair.rates[0]), "{pair:?}");
            assert_eq!(pair.outliers(), ["liar"]);
            pair.claim(claim("d", [0.61, 0.51], 3.0));
            assert!((0.6..=0.62).contains(&pair.rates[0]), "{pair:?}");
            // However often it says so.
            for at in 4..50 {
                pair.claim(claim("liar", lie, f64::from(at)));
            }
            assert!((0.6..=0.62).contains(&pair.rates[0]), "{pair:?}");
            assert_eq!(pair.claims.len(), 4);
            assert_eq!(pair.on("liar"), Some(lie), "its own word about itself");
        }
    }

    #[test]
    fn claims_are_few_and_old_ones_go() {
        let mut pair = PairRecord::default();
        for at in 0..100u32 {
            pair.claim(claim(&format!("n{at}"), [0.5, 0.5], f64::from(at)));
            assert!(pair.claims.len() <= CLAIMS);
        }
        pair.claim(claim("new", [0.9, 0.9], 99.0 + KEPT_S + 1.0));
        assert_eq!((pair.claims.len(), pair.rates), (1, [0.9, 0.9]));
    }

    #[test]
    fn the_operators_word_counts_until_two_nodes_have_measured() {
        let mut pair = PairRecord {
            rates: [0.9, 0.8],
            unix_ms: 5,
            ..PairRecord::default()
        };
        pair.claim(claim("a", [0.1, 0.1], 10.0));
        assert_eq!((pair.rates, pair.only_node()), ([0.9, 0.8], None));
        pair.claim(claim("a", [0.2, 0.2], 11.0));
        assert_eq!(pair.rates, [0.9, 0.8]);
        pair.claim(claim("b", [0.3, 0.3], 12.0));
        assert_eq!((pair.rates, pair.claims.len()), ([0.3, 0.3], 2));
    }
}
