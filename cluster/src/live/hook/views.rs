//! The hook's reports of jobs, nodes and decisions.

use std::collections::BTreeMap;

use control::ControlError;

use super::claims::Judge;
use super::jobs::no_job;
use super::starts::Door;
use super::{Hook, NodeEntry};
use crate::live::records::{JobRecord, PairRecord};
use crate::live::wire::{DecisionView, HookStatus, JobPhase, JobView, NodeView, PairView};

impl Hook {
    /// One job.
    ///
    /// # Errors
    /// There is none of this number.
    pub fn job(&self, id: u64) -> Result<JobView, ControlError> {
        self.jobs
            .get(&id)
            .map(|record| self.view(record))
            .ok_or_else(|| no_job(id))
    }

    /// All jobs, those that are over too.
    #[must_use]
    pub fn job_views(&self) -> Vec<JobView> {
        self.jobs.values().map(|record| self.view(record)).collect()
    }

    fn phase(&self, record: &JobRecord) -> JobPhase {
        if let Some(over) = &record.over {
            return over.phase;
        }
        match &record.run {
            None => JobPhase::Waiting,
            Some(run) if run.stopping => JobPhase::Stopping,
            Some(run) if run.suspended => JobPhase::Paused,
            Some(_) if self.watches.contains_key(&record.id) => JobPhase::Running,
            Some(_) => JobPhase::Starting,
        }
    }

    fn view(&self, record: &JobRecord) -> JobView {
        let asked = &record.submission;
        let at = self.live.get(&record.id).copied();
        let others = at.into_iter().flat_map(|at| self.state.others(at));
        let others: Vec<u64> = others.map(|at| self.numbers[at.0 as usize]).collect();
        let run = record.run.as_ref();
        JobView {
            id: record.id,
            name: asked.name.clone(),
            kind: asked.kind.clone(),
            phase: self.phase(record),
            reason: record.reason.clone(),
            gpus: asked.gpus,
            node: run.map_or_else(String::new, |run| run.node.clone()),
            devices: run.map_or_else(Vec::new, |run| run.devices.clone()),
            share: run.and_then(|run| run.sent.share).unwrap_or(0.0),
            beside: others.first().copied(),
            beside_all: others,
            share_asked: asked.share,
            rate: record.rate,
            attempts: record.attempts,
            saved: record.saved,
            submitted_unix_ms: record.submitted_unix_ms,
            started_unix_ms: record.started_unix_ms,
            ended_unix_ms: record.over.as_ref().map(|over| over.unix_ms),
            exit_code: record.over.as_ref().and_then(|over| over.exit_code),
        }
    }

    pub(super) fn node_view(&self, name: &str, entry: &NodeEntry) -> NodeView {
        let starts = &entry.record.starts;
        let door = starts.door(self.now_s);
        let on = |job: &&JobRecord| job.run.as_ref().is_some_and(|run| run.node == name);
        NodeView {
            name: name.to_owned(),
            up: entry.up,
            silent_s: entry.heard_s.map(|at| self.now_s - at),
            engine: entry.record.engine.clone(),
            devices: entry.record.devices.clone(),
            jobs: self.jobs.values().filter(on).map(|job| job.id).collect(),
            // CAST: a count.
            open_orders: self
                .orders
                .get(name)
                .map_or(0, |orders| orders.len() as u64),
            waits: entry.waits.clone(),
            others: if entry.up {
                entry.others.clone()
            } else {
                Vec::new()
            },
            away: if entry.up {
                entry.away.clone()
            } else {
                Vec::new()
            },
            refusal: self.refusals.get(name).cloned().unwrap_or_default(),
            // CAST: a few.
            failed_starts: starts.failed.len() as u64,
            shut: match starts.shut {
                true => starts.reason.clone(),
                false => String::new(),
            },
            tried_in_s: (door == Door::Shut && starts.trial.is_none())
                .then_some(starts.until_s - self.now_s),
            trial: starts.trial,
        }
    }

    /// Nodes that never registered here and say that they will not.
    fn refusing_strangers(&self) -> impl Iterator<Item = NodeView> {
        let unknown = self.refusals.iter();
        unknown
            .filter(|(name, _)| !self.nodes.contains_key(*name))
            .map(|(name, why)| NodeView {
                name: name.clone(),
                refusal: why.clone(),
                ..NodeView::default()
            })
    }

    fn pair_view(pair: &PairRecord, judge: &mut Judge) -> PairView {
        // One node alone refuses it for itself only.
        let refused = !pair.unconfirmed && judge.refuses(pair.gpus, pair.rates).is_some();
        let nodes = pair.claims.iter().filter(|claim| !claim.node.is_empty());
        let (nodes, outliers) = (nodes.count(), pair.outliers());
        let PairRecord {
            gpu,
            gpus,
            kinds,
            rates,
            unix_ms,
            ..
        } = pair.clone();
        PairView {
            gpu,
            gpus,
            kinds,
            rates,
            refused,
            estimated: false,
            confidence: 1.0,
            // CAST: a count.
            nodes: nodes as u64,
            outliers,
            unix_ms,
        }
    }

    /// The hook as it stands.
    #[must_use]
    pub fn status(&self) -> HookStatus {
        let mut judge = Judge::new(self.config.choice.packer.as_ref());
        let mut jobs: BTreeMap<String, u64> = BTreeMap::new();
        for record in self.jobs.values() {
            *jobs
                .entry(self.phase(record).as_str().to_owned())
                .or_default() += 1;
        }
        HookStatus {
            hook: self.id.clone(),
            version: self.config.version.clone(),
            policies: self.config.choice.to_string(),
            started_unix_ms: self.started_unix_ms,
            nodes: self
                .nodes
                .iter()
                .map(|(name, entry)| self.node_view(name, entry))
                .chain(self.refusing_strangers())
                .collect(),
            jobs,
            pairs: self
                .pairs
                .values()
                .map(|pair| Self::pair_view(pair, &mut judge))
                .chain(self.estimated_pairs())
                .collect(),
            speeds: self.speed_views(),
            // CAST: a count.
            past_jobs: self.services.len() as u64,
            packs: self.store.meta.packs,
            unpacks: self.store.meta.unpacks,
        }
    }

    /// Lines of the decision log above a number, oldest first.
    #[must_use]
    pub fn decisions(&self, above: u64) -> Vec<DecisionView> {
        self.log
            .iter()
            .filter(|line| line.seq > above)
            .cloned()
            .collect()
    }
}
