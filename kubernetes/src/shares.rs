//! Shares that pods have: made all or none, kept over restarts, undone without a rest.
//!
//! The order of the steps is the promise. A record says first what will be; jobs come then, each
//! with a process that ends unless it is asked to stay; then the file for the container's runtime;
//! then they are asked to stay, and the record is complete. What is found incomplete is undone. So
//! this process may be killed between any two steps: the next one leaves nothing behind.

use std::collections::{BTreeMap, BTreeSet};

use parking_lot::Mutex;

use crate::cdi::Folder;
use crate::holder::{self, HoldError, Holder};
use crate::node::{Node, NodeError};
use crate::records::{Record, RecordError, Records, Share};

/// All of them.
#[derive(Debug)]
pub struct Shares {
    pub node: Node,
    records: Records,
    folder: Folder,
    known: Mutex<BTreeMap<String, Record>>,
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
            known: Mutex::default(),
        };
        let mut known = BTreeMap::new();
        for record in all {
            if record.complete {
                known.insert(record.key.clone(), record);
            } else {
                shares.undo(&record)?;
            }
        }
        shares.folder.keep_only(|key| known.contains_key(key))?;
        *shares.known.lock() = known;
        Ok(shares)
    }

    /// Makes the shares of a key, or finds them as they were made before.
    ///
    /// # Errors
    /// [`ShareError`]; nothing is left of them then.
    pub fn hold(&self, wanted: Record) -> Result<Record, ShareError> {
        let mut known = self.known.lock();
        if let Some(record) = known.get(&wanted.key) {
            if same(record, &wanted) && self.stands(record) {
                return Ok(record.clone());
            }
            let record = record.clone();
            self.undo(&record)?;
            known.remove(&wanted.key);
        }
        // Units that a kubelet gives to another container are free, as it knows.
        let units: BTreeSet<&String> = wanted.units.iter().collect();
        let before: Vec<Record> = known
            .values()
            .filter(|record| record.units.iter().any(|unit| units.contains(unit)))
            .cloned()
            .collect();
        for record in before {
            self.undo(&record)?;
            known.remove(&record.key);
        }
        let mut record = wanted;
        match self.make(&mut record) {
            Ok(()) => {
                known.insert(record.key.clone(), record.clone());
                Ok(record)
            }
            Err(error) => {
                self.undo(&record)?;
                Err(error)
            }
        }
    }

    fn make(&self, record: &mut Record) -> Result<(), ShareError> {
        record.complete = false;
        self.node.link_channel()?;
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
        record.complete = true;
        self.records.write(record)?;
        step("complete");
        Ok(())
    }

    fn write_cdi(&self, record: &Record) -> Result<(), ShareError> {
        let devices = record.shares.iter().filter_map(|share| {
            let job = share.job.as_ref()?;
            Some((share.name.clone(), self.node.edits(share, job)))
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
        let mut known = self.known.lock();
        if let Some(record) = known.get(key).cloned() {
            self.undo(&record)?;
            known.remove(key);
        }
        Ok(())
    }

    fn undo(&self, record: &Record) -> Result<(), ShareError> {
        if record.complete {
            // A killed process goes on here.
            self.records.write(&Record {
                complete: false,
                ..record.clone()
            })?;
        }
        self.folder.remove(&record.key)?;
        step("unlisted");
        for job in record.shares.iter().filter_map(|share| share.job.as_ref()) {
            holder::end(job.holder_pid, job.holder_ticks);
        }
        step("ended");
        self.records.remove(&record.key)?;
        Ok(())
    }

    /// Changes the part of the time that the shares of a key have; 0: none is promised.
    ///
    /// # Errors
    /// [`ShareError`]; it is as it was then.
    pub fn set_share(&self, key: &str, share: f64) -> Result<(), ShareError> {
        let mut known = self.known.lock();
        let Some(record) = known.get_mut(key) else {
            return Ok(());
        };
        let mut changed = record.clone();
        for part in &mut changed.shares {
            if let Some(job) = part.job.as_ref().filter(|_| part.share != share) {
                self.node.set_share(&job.name, share)?;
            }
            part.share = share;
        }
        self.records.write(&changed)?;
        *record = changed;
        Ok(())
    }

    /// All that stands.
    pub fn all(&self) -> Vec<Record> {
        self.known.lock().values().cloned().collect()
    }

    /// Looks after what stands: jobs that are gone with a killed holder, or that a new arbiter does
    /// not know, are registered anew; a container that starts after that finds them. Says what
    /// could not be.
    ///
    /// # Errors
    /// The arbiter does not answer; nothing is changed then.
    pub fn tend(&self) -> Result<Vec<String>, ShareError> {
        holder::reap();
        let status = self.node.status()?;
        self.node.link_channel()?;
        let mut failed = Vec::new();
        let mut known = self.known.lock();
        for record in known.values_mut() {
            let file = self.records.file(&record.key);
            let mut renewed = Vec::new();
            for share in &mut record.shares {
                let is_known = |id| status.jobs.iter().any(|job| job.id == id);
                // Processes that use the device, or may yet, keep the job that they are part of.
                let stands = |job: &crate::records::Job| {
                    is_known(job.id) && (holder::lives(job) || lives_on(&status, job.id))
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
                continue;
            }
            self.records.write(record)?;
            self.write_cdi(record)?;
            for holder in renewed {
                if let Err(error) = Holder::stay(holder) {
                    failed.push(format!("{}: {error}", record.title));
                }
            }
        }
        Ok(failed)
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
