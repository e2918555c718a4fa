//! Pairs that were measured elsewhere (`sublet interfere --feed`), and what is known of kinds.

use std::collections::BTreeMap;

use control::ControlError;

use super::{Hook, MEASURED_KEPT, invalid, refuse};
use crate::live::clock::Now;
use crate::live::records::PairRecord;
use crate::live::wire::{Fed, FedPair, Feed, KindView, MAX_LABEL_BYTES};

/// Pairs of one request at most.
const MAX_FED: usize = 4096;
/// What the kinds of one answer take at most, in bytes: those that were submitted last are in it.
const MAX_KINDS_BYTES: usize = 4 << 20;

impl Hook {
    /// Kinds of all jobs that are remembered, each as one of it was submitted last. Of variables
    /// only the names: their values may be secrets of whose job it was.
    #[must_use]
    pub fn kinds(&self) -> Vec<KindView> {
        let mut kinds = BTreeMap::new();
        let mut bytes = 0usize;
        for record in self.jobs.values().rev() {
            let asked = &record.submission;
            if kinds.contains_key(&asked.kind) {
                continue;
            }
            let view = KindView {
                kind: asked.kind.clone(),
                command: asked.command.clone(),
                variables: asked.env.keys().cloned().collect(),
                dir: asked.dir.clone(),
                gpus: asked.gpus,
                mem_bytes: asked.mem_bytes,
                submitted_unix_ms: record.submitted_unix_ms,
                ..KindView::default()
            };
            let words = view.command.iter().chain(&view.variables);
            let words: usize = words.map(String::len).sum();
            bytes += view.kind.len() + view.dir.len() + words;
            if bytes > MAX_KINDS_BYTES {
                break;
            }
            kinds.insert(view.kind.clone(), view);
        }
        kinds.into_values().collect()
    }

    /// Takes pairs into the table, which the packer learns at once. What two nodes of this hook
    /// measure of such a pair later counts in their place.
    ///
    /// # Errors
    /// One of them is none, or there are too many; nothing is taken then.
    pub fn feed(&mut self, fed: Feed, now: impl Into<Now>) -> Result<Fed, ControlError> {
        self.advance(now);
        if fed.pairs.is_empty() || fed.pairs.len() > MAX_FED {
            let message = format!("{} pairs were sent", fed.pairs.len());
            return Err(invalid(message, "send from 1 to 4096 at a time"));
        }
        let unix_ms = self.unix_ms();
        let records = fed.pairs.into_iter().map(|pair| checked(pair, unix_ms));
        let records: Vec<PairRecord> = records.collect::<Result<_, _>>()?;
        let taken = records.len();
        let key = |pair: &PairRecord| (pair.gpu.clone(), pair.gpus, pair.kinds.clone());
        let mut table = self.pairs.clone();
        let mut written = Vec::new();
        for record in records {
            // The table may have the two in either order, or in both.
            let mut turned = record.clone();
            turned.kinds.reverse();
            turned.rates.reverse();
            if record.kinds[0] != record.kinds[1] && table.contains_key(&key(&turned)) {
                written.push(turned);
            }
            table.insert(key(&record), record.clone());
            written.push(record);
        }
        if table.len() > MEASURED_KEPT {
            return Err(refuse(
                format!("the table would have {} pairs", table.len()),
                "it holds 4096: use fewer kinds of job",
            ));
        }
        for record in &written {
            table.insert(key(record), record.clone());
        }
        self.pairs = table;
        self.changes.pairs.extend(written);
        let text = format!("{taken} pairs were measured elsewhere and are known now");
        self.say("fed", 0, None, text);
        // The packer learns all of it anew.
        self.rebuild();
        Ok(Fed {
            // CAST: counts.
            taken: taken as u64,
            pairs: self.pairs.len() as u64,
        })
    }
}

fn checked(pair: FedPair, unix_ms: u64) -> Result<PairRecord, ControlError> {
    let FedPair {
        gpu,
        gpus,
        kinds,
        rates,
    } = pair;
    for (what, text) in [
        ("type of GPU", &gpu),
        ("kind", &kinds[0]),
        ("kind", &kinds[1]),
    ] {
        let fits = (1..=MAX_LABEL_BYTES).contains(&text.len());
        if !fits || text.contains(char::is_control) {
            return Err(invalid(
                format!("the {what} `{}` of a pair is no name", text.escape_debug()),
                "write 1 to 512 bytes that can be shown",
            ));
        }
    }
    if gpus > 64 {
        return Err(invalid(
            format!("the jobs of a pair have {gpus} GPUs each"),
            "a node has at most 64",
        ));
    }
    if let Some(rate) = rates
        .iter()
        .find(|rate| !(rate.is_finite() && **rate >= 0.0))
    {
        return Err(invalid(
            format!(
                "a job of the pair {} and {} runs at {rate}",
                kinds[0], kinds[1]
            ),
            "write its speed relative to being alone, 0 to 1",
        ));
    }
    Ok(PairRecord {
        gpu,
        gpus: gpus.max(1),
        kinds,
        rates: rates.map(|rate| rate.min(1.0)),
        unix_ms,
        ..PairRecord::default()
    })
}
