//! What an agent does with orders: one after the other, each until it is done or cannot be.

use std::time::{Duration, Instant};

use control::{
    Change, Client as ControlClient, ClientError as ControlFailure, ErrorCode, JobSettings,
    MemLimit, Resize,
};

use super::Agent;
use crate::live::wire::{Ack, Order, RunId, RunReport, Signal, Terms, What};

/// TIMEOUT: a job is known to its arbiter within a second of its start, on a busy host within some.
const ATTACH: Duration = Duration::from_secs(20);

impl Agent {
    /// Do what can be done of the open orders, in sequence. `true`: something was done.
    pub(super) fn obey(&mut self) -> bool {
        let mut any = false;
        while let Some(order) = self.open.first().cloned() {
            // Numbers count within the epoch of an authentic hook: a later epoch is obeyed,
            // whatever came in an earlier one.
            if (order.epoch, order.seq) <= self.memory.applied {
                self.open.remove(0);
                continue;
            }
            let since = match self.trying {
                Some((seq, since)) if seq == order.seq => since,
                _ => {
                    let now = Instant::now();
                    self.trying = Some((order.seq, now));
                    now
                }
            };
            let Some(error) = self.carry_out(&order, since.elapsed()) else {
                return true;
            };
            self.memory.applied = (order.epoch, order.seq);
            self.memory.acks.push(Ack {
                seq: order.seq,
                error,
            });
            // Not written down: it is done again after a crash, and is made to bear that.
            self.remember();
            self.open.remove(0);
            any = true;
        }
        any
    }

    /// What came of an order, empty for done; `None`: not yet.
    fn carry_out(&mut self, order: &Order, tried: Duration) -> Option<String> {
        match &order.what {
            What::Start(start) => Some(
                self.engine
                    .start(order.run, start)
                    .err()
                    .map_or_else(String::new, |error| error.0),
            ),
            What::Stop { grace_s, signal } => self.stop(order, *grace_s, *signal, tried),
            What::Set(terms) => self.set(order.run, *terms, tried),
        }
    }

    fn find(&mut self, run: RunId) -> Result<Option<RunReport>, String> {
        let all = self.engine.list().map_err(|error| error.to_string())?;
        Ok(all
            .into_iter()
            .find(|report| report.run == run && report.ended.is_none()))
    }

    /// The job is given the time to save, then asked to end, then killed.
    fn stop(
        &mut self,
        order: &Order,
        grace_s: f64,
        signal: Option<Signal>,
        tried: Duration,
    ) -> Option<String> {
        let report = match self.find(order.run) {
            Ok(None) => return Some(String::new()),
            Ok(Some(report)) => report,
            Err(error) => return Some(error),
        };
        let begun = report.pid != 0;
        let asked = self.asked.filter(|(seq, _)| *seq == order.seq);
        if let (Some(signal), true, None) = (signal, begun, asked)
            && tried.as_secs_f64() <= signal.patience_s
            && !self.may_stop(&report, signal)
        {
            return None;
        }
        let kill = match asked {
            Some((_, at)) if at.elapsed().as_secs_f64() <= grace_s => return None,
            Some(_) => true,
            // It has no process that could be asked, and might never have one.
            None => !begun && tried.as_secs_f64() > grace_s,
        };
        match self.engine.stop(order.run, kill) {
            Ok(()) => {
                // An attempt without a process yet has not received it.
                if begun && asked.is_none() {
                    self.asked = Some((order.seq, Instant::now()));
                }
                None
            }
            Err(error) => Some(error.0),
        }
    }

    /// Whether a job has saved, or never will, because it does not look for requests or nothing can
    /// ask it.
    fn may_stop(&mut self, report: &RunReport, signal: Signal) -> bool {
        let Ok(jobs) = self.with_arbiter(ControlClient::list) else {
            return true;
        };
        let Some(job) = jobs.iter().find(|job| job.name == report.name) else {
            return true;
        };
        if !job.listens_for_resize || job.paused {
            return true;
        }
        match &job.resize {
            Some(asked) if asked.gpus == signal.gpus => {
                if asked.ready {
                    self.saved.insert(report.run);
                }
                asked.ready
            }
            _ => {
                let change = Change {
                    resize: Some(Resize::To(signal.gpus)),
                    ..Change::default()
                };
                let name = &report.name;
                self.with_arbiter(|arbiter| arbiter.set(name, change.clone()))
                    .is_err()
            }
        }
    }

    fn set(&mut self, run: RunId, terms: Terms, tried: Duration) -> Option<String> {
        let name = match self.find(run) {
            // Over: there is nothing left to change, and its end is reported.
            Ok(None) => return Some(String::new()),
            Ok(Some(report)) => report.name,
            Err(error) => return Some(error),
        };
        let change = Change {
            settings: JobSettings {
                share: terms.share,
                class: terms.class,
                mem: terms.mem_bytes.map(MemLimit::Bytes),
                ..JobSettings::default()
            },
            paused: Some(terms.paused),
            ..Change::default()
        };
        match self.with_arbiter(|arbiter| arbiter.set(&name, change.clone())) {
            Ok(_) => Some(String::new()),
            // Started, and not at its registration yet.
            Err(ControlFailure::Refused(error))
                if error.code == ErrorCode::NoSuchJob && tried < ATTACH =>
            {
                None
            }
            Err(ControlFailure::Refused(error)) => Some(error.to_string()),
            Err(_) if tried < ATTACH => None,
            Err(error) => Some(error.to_string()),
        }
    }
}
