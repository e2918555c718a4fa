//! Shares that pods have: made all or none, kept over restarts, undone without a rest.
//!
//! The order of the steps is the promise. A record says first what will be; jobs come then, each
//! with a process that ends unless it is asked to stay; then the file for the container's runtime;
//! then they are asked to stay, and the record is complete. What is found incomplete is undone. So
//! this process may be killed between any two steps: the next one leaves nothing behind. What this
//! one cannot undo, since a disk is full or broken, it tries again.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;

use crate::cdi::{Device, Folder};
use crate::holder::{self, HoldError, Holder};
use crate::node::{Node, NodeError};
use crate::records::{Pod, Record, RecordError, Records, Share};

/// All of them.
#[derive(Debug)]
pub struct Shares {
    pub node: Node,
    records: Records,
    folder: Folder,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// What stands, by key.
    known: BTreeMap<String, Record>,
    /// What could not be undone yet.
    leftover: Vec<Record>,
    /// The last number given to a record.
    made: u64,
}

impl State {
    /// A number that no record has had: by the clock, and above the one before.
    fn number(&mut self) -> u64 {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let now = now.map_or(0, |now| u64::try_from(now.as_nanos()).unwrap_or(0));
        self.made = now.max(self.made + 1);
        self.made
    }
}

/// Why a share is not there, or not gone.
#[derive(Debug, thiserror::Error)]
pub enum ShareError {
    #[error(transparent)]
    Hold(#[from] HoldError),
    #[error(transparent)]
    Node(#[from] NodeError),
    #[error(transparent)]
    Record(#[from] RecordError),
    #[error("the CDI directory: {0}")]
    Cdi(#[from] std::io::Error),
}

impl ShareError {
    /// The arbiter has looked at it and does not take it: asking again is of no use as it is.
    pub fn is_refusal(&self) -> bool {
        matches!(self, Self::Hold(HoldError::Refused(_)))
    }
}

/// In debug builds, ends this process by SIGKILL where a test asks for it.
fn step(name: &str) {
    if cfg!(debug_assertions)
        && std::env::var_os("SUBLET_FAULT_KUBERNETES").is_some_and(|at| at == name)
    {
        let _ = nix::sys::signal::raise(nix::sys::signal::Signal::SIGKILL);
    }
}

/// Steps at which `SUBLET_FAULT_KUBERNETES` ends a debug build.
pub const STEPS: [&str; 8] = [
    "recorded",
    "registered",
    "noted",
    "written",
    "kept",
    "complete",
    "unlisted",
    "ended",
];

impl Shares {
    /// Goes on where an earlier process ended: what it had not completed is undone.
    ///
    /// # Errors
    /// [`ShareError`]; what cannot be undone now is a reason not to begin.
    pub fn open(node: Node, records: Records, folder: Folder) -> Result<Self, ShareError> {
        let (all, damaged) = records.all()?;
        for error in damaged {
            crate::say!("{error}");
        }
        let shares = Self {
            node,
            records,
            folder,
            state: Mutex::default(),
        };
        let mut state = State::default();
        for record in all {
            state.made = state.made.max(record.made);
            if record.complete {
                state.known.insert(record.key.clone(), record);
            } else {
                shares.undo(&record)?;
            }
        }
        shares
            .folder
            .keep_only(|key| state.known.contains_key(key))?;
        *shares.state.lock() = state;
        Ok(shares)
    }

    /// Makes the shares of a key. A claim is prepared more than once: what it has is found. Units
    /// are given to a container once, so what has them is over, also where it had the same ones.
    ///
    /// # Errors
    /// [`ShareError`]; nothing is left of them then, or what is left is undone later.
    pub fn hold(&self, wanted: Record) -> Result<Record, ShareError> {
        let mut state = self.state.lock();
        if let Some(record) = state.known.get(&wanted.key)
            && wanted.units.is_empty()
            && same(record, &wanted)
            && self.stands(record)
        {
            return Ok(record.clone());
        }
        let units: BTreeSet<&String> = wanted.units.iter().collect();
        let goes = |record: &Record| {
            record.key == wanted.key || record.units.iter().any(|unit| units.contains(unit))
        };
        let standing = state.known.values().filter(|record| goes(record));
        let before: Vec<Record> = standing.cloned().collect();
        for record in before {
            self.undo(&record)?;
            state.known.remove(&record.key);
        }
        // Its file has the name that the new one will have.
        if let Some(at) = state.leftover.iter().position(goes) {
            self.undo(&state.leftover[at])?;
            state.leftover.remove(at);
        }
        let mut record = Record {
            made: state.number(),
            ..wanted
        };
        match self.make(&mut record) {
            Ok(()) => {
                state.known.insert(record.key.clone(), record.clone());
                Ok(record)
            }
            Err(error) => {
                if let Err(also) = self.undo(&record) {
                    crate::say!("{}: {also}; it is tried again", record.title);
                    state.leftover.push(record);
                }
                Err(error)
            }
        }
    }

    fn make(&self, record: &mut Record) -> Result<(), ShareError> {
        record.complete = false;
        self.records.write(record)?;
        step("recorded");
        let mut holders = Vec::new();
        for at in 0..record.shares.len() {
            let file = self.records.file(&record.key);
            // PANIC: below the length.
            let holder = self.node.hold(&record.title, &record.shares[at], &file)?;
            step("registered");
            record.shares[at].job = Some(holder.job.clone());
            self.records.write(record)?;
            step("noted");
            holders.push(holder);
        }
        self.write_cdi(record)?;
        step("written");
        for holder in holders {
            holder.stay().map_err(HoldError::Start)?;
        }
        step("kept");
        let complete = Record {
            complete: true,
            ..record.clone()
        };
        self.records.write(&complete)?;
        *record = complete;
        step("complete");
        Ok(())
    }

    fn write_cdi(&self, record: &Record) -> Result<(), ShareError> {
        let devices = record.shares.iter().filter_map(|share| {
            let job = share.job.as_ref()?;
            Some(Device {
                name: share.name.clone(),
                container_edits: self.node.edits(share, job),
            })
        });
        let devices: Vec<_> = devices.collect();
        Ok(self.folder.write(&record.key, &devices)?)
    }

    /// Whether all of it is as it was made.
    fn stands(&self, record: &Record) -> bool {
        let jobs = record.shares.iter().map(|share| share.job.as_ref());
        jobs.into_iter().all(|job| job.is_some_and(holder::lives)) && self.write_cdi(record).is_ok()
    }

    /// Undoes the shares of a key. There may be none.
    ///
    /// # Errors
    /// [`ShareError`]; it can be asked for again.
    pub fn release(&self, key: &str) -> Result<(), ShareError> {
        self.release_where(key, |_| true)
    }

    /// Undoes the shares of a key, if they are still those that had this number.
    ///
    /// # Errors
    /// As [`release`](Self::release).
    pub fn release_if(&self, key: &str, made: u64) -> Result<(), ShareError> {
        self.release_where(key, |record| record.made == made)
    }

    fn release_where(&self, key: &str, is: impl Fn(&Record) -> bool) -> Result<(), ShareError> {
        let mut state = self.state.lock();
        if let Some(record) = state.known.get(key).filter(|record| is(record)) {
            self.undo(record)?;
            state.known.remove(key);
        }
        Ok(())
    }

    /// In any state of it, and as often as it takes.
    fn undo(&self, record: &Record) -> Result<(), ShareError> {
        // A killed process goes on here.
        self.records.begin_undo(&record.key)?;
        self.folder.remove(&record.key)?;
        step("unlisted");
        for job in record.shares.iter().filter_map(|share| share.job.as_ref()) {
            holder::end(job.holder_pid, job.holder_ticks);
        }
        step("ended");
        self.records.remove(&record.key)?;
        Ok(())
    }

    /// Notes whose the shares of a key are, if they are still those that had this number, and if
    /// that is not settled.
    ///
    /// # Errors
    /// [`ShareError`]; it is as it was then.
    pub fn belongs(&self, key: &str, made: u64, pod: &Pod) -> Result<(), ShareError> {
        let mut state = self.state.lock();
        let Some(record) = state.known.get_mut(key) else {
            return Ok(());
        };
        let is_settled = record.settled().is_some();
        if record.made == made && !is_settled && record.pod.as_ref() != Some(pod) {
            let changed = Record {
                title: pod.title(),
                pod: Some(pod.clone()),
                ..record.clone()
            };
            self.records.write(&changed)?;
            *record = changed;
        }
        Ok(())
    }

    /// Changes the part of the time that the shares of a key have, if they are still those that had
    /// this number; 0: none is promised.
    ///
    /// # Errors
    /// [`ShareError`]; it is as it was then, as far as the arbiter can be asked.
    pub fn set_share(&self, key: &str, made: u64, share: f64) -> Result<(), ShareError> {
        self.resize(key, made, None, share)
    }

    /// Changes the quota as well, where there is another one.
    ///
    /// # Errors
    /// As [`set_share`](Self::set_share).
    pub fn resize(
        &self,
        key: &str,
        made: u64,
        memory_bytes: Option<u64>,
        share: f64,
    ) -> Result<(), ShareError> {
        let mut state = self.state.lock();
        let Some(record) = state.known.get_mut(key).filter(|r| r.made == made) else {
            return Ok(());
        };
        let mut changed = record.clone();
        for part in &mut changed.shares {
            let memory_bytes = memory_bytes.filter(|bytes| part.memory_bytes != *bytes);
            if memory_bytes.is_none() && part.share == share {
                continue;
            }
            if let Some(job) = &part.job {
                self.node.set(&job.name, memory_bytes, share)?;
            }
            part.share = share;
            part.memory_bytes = memory_bytes.unwrap_or(part.memory_bytes);
        }
        if changed == *record {
            return Ok(());
        }
        if let Err(error) = self.records.write(&changed) {
            for part in &record.shares {
                if let Some(job) = &part.job {
                    let _ = self
                        .node
                        .set(&job.name, Some(part.memory_bytes), part.share);
                }
            }
            return Err(error.into());
        }
        *record = changed;
        Ok(())
    }

    /// All that stands.
    pub fn all(&self) -> Vec<Record> {
        self.state.lock().known.values().cloned().collect()
    }

    /// Looks after what stands: jobs that are gone with a killed holder, or that a new arbiter does
    /// not know, are registered anew; a container that starts after that finds them. Says what
    /// could not be.
    ///
    /// # Errors
    /// The arbiter does not answer; nothing is changed then.
    pub fn tend(&self) -> Result<Vec<String>, ShareError> {
        holder::reap();
        let mut failed = Vec::new();
        {
            let mut state = self.state.lock();
            state.leftover.retain(|record| {
                let undone = self.undo(record);
                let undone = undone.inspect_err(|e| failed.push(format!("{}: {e}", record.title)));
                undone.is_err()
            });
        }
        let before = self.all();
        let status = self.node.status()?;
        failed.extend(self.renew_all(&before, &status));
        Ok(failed)
    }

    /// Registers anew what does not stand of the records that are as they were before the arbiter
    /// was asked: of a later job it had nothing to say. Says what could not be.
    fn renew_all(&self, before: &[Record], status: &control::ArbiterStatus) -> Vec<String> {
        let mut failed = Vec::new();
        let mut state = self.state.lock();
        let jobs = |record: &Record| {
            let of = record.shares.iter().map(|share| share.job.clone());
            (record.made, of.collect::<Vec<_>>())
        };
        let before: BTreeMap<_, _> = before.iter().map(jobs).collect();
        for record in state.known.values_mut() {
            let (made, now) = jobs(record);
            if before.get(&made) != Some(&now) {
                continue;
            }
            if let Err(error) = self.renew(record, status, &mut failed) {
                failed.push(format!("{}: {error}", record.title));
            }
        }
        failed
    }

    /// Registers anew what does not stand of a record. Where that cannot be noted, those that were
    /// started end, and the next look tries it again.
    fn renew(
        &self,
        record: &mut Record,
        status: &control::ArbiterStatus,
        failed: &mut Vec<String>,
    ) -> Result<(), ShareError> {
        let file = self.records.file(&record.key);
        let mut changed = record.clone();
        let mut renewed = Vec::new();
        for share in &mut changed.shares {
            let is_known = |id| status.jobs.iter().any(|job| job.id == id);
            // Processes that use the device, or may yet, keep the job that they are part of.
            let stands = |job: &crate::records::Job| {
                is_known(job.id) && (holder::lives(job) || lives_on(status, job.id))
            };
            if share.job.as_ref().is_some_and(stands) {
                continue;
            }
            if let Some(job) = share.job.take() {
                holder::end(job.holder_pid, job.holder_ticks);
            }
            match self.node.hold(&record.title, share, &file) {
                Ok(holder) => {
                    share.job = Some(holder.job.clone());
                    renewed.push(holder);
                }
                Err(error) => failed.push(format!("{}: {error}", share.name)),
            }
        }
        if renewed.is_empty() {
            return Ok(());
        }
        self.records.write(&changed)?;
        self.write_cdi(&changed)?;
        for holder in renewed {
            if let Err(error) = Holder::stay(holder) {
                failed.push(format!("{}: {error}", record.title));
            }
        }
        *record = changed;
        Ok(())
    }
}

/// Whether a job has processes of its own, now or asleep.
fn lives_on(status: &control::ArbiterStatus, id: u64) -> bool {
    status.jobs.iter().any(|job| {
        let asleep = job.dormant_processes.unwrap_or(0) > 0;
        job.id == id && (asleep || !job.processes.is_empty())
    })
}

/// Whether a record is what is wanted, but for the jobs.
fn same(record: &Record, wanted: &Record) -> bool {
    let without = |share: &Share| Share {
        job: None,
        ..share.clone()
    };
    let shares = |of: &Record| of.shares.iter().map(without).collect::<Vec<_>>();
    record.units == wanted.units && shares(record) == shares(wanted)
}

#[cfg(test)]
mod tests;
