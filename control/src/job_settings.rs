//! What a job may be given: the one table of its settings.

use serde::{Deserialize, Serialize};

use crate::kinds::{Count, Devices, Flag, FromNow, Name, Share, Size, Time, Word};
use crate::span::short_span;
use crate::values::{Class, Deadline, DeviceSelector, FailMode, OnRefusal, Overflow};

crate::settings! {
    /// The settings of a job. A flag of `sublet run` beats the environment, that beats the quota
    /// file; `sublet set` changes those that are `live`.
    #[derive(Serialize, Deserialize)]
    #[serde(default)]
    pub struct JobSettings {
        /// Memory limit on each device of the job: 1024-based with a unit ("8GiB", "512M"), or a
        /// part of the device ("50%").
        mem: Size, unset "no limit but the device", live, capped;
        /// Part of the device's time: a number above 0 and at most 1, or a percentage ("50%").
        share: Share, unset "the arbiter's choice", live, capped;
        /// Part of the device's time that the job gets at the least while it wants it, whatever its
        /// class.
        share_min: Share, unset "none", live, capped;
        /// Part of the device's time that the job gets at the most, also where no other job wants
        /// it.
        share_max: Share, unset "none", live, capped;
        /// guaranteed: gets its share whenever it wants it; opportunistic: runs in what guaranteed
        /// jobs leave.
        class: Word<Class>, unset "`guaranteed`", live, capped;
        /// The device or devices of the job, by index or UUID; several with commas between.
        device: Devices, unset "the arbiter's choice";
        /// true: the job gets all of its devices at once or none, so that no rank of a collective
        /// waits for another one's turn; false: each device by itself.
        gang: Flag, unset "`true` for a job on several devices", live;
        /// Time from now by which the job's work should be done ("90m"), for the policy `deadline`;
        /// needs `work`.
        deadline: FromNow, unset "none", live;
        /// Device time that the job's work takes in all ("40m"), for the policies that look at what
        /// is left.
        work: Time, unset "not known", live;
        /// Each burst of the job's work (a request, an inference) should be done so soon after its
        /// first launch ("10ms"), beside jobs without a target; for the policy `latency`.
        latency_target: Time, unset "none", live;
        /// What the job does while the arbiter is gone. open: goes on without slices; freeze:
        /// waits; closed: its device calls fail.
        on_arbiter_loss: Word<FailMode>, unset "`open`";
        /// What happens to a process of the job that cannot be governed. closed: every driver call
        /// of it fails; open: it runs without limits.
        on_refusal: Word<OnRefusal>, unset "`closed` with mem, share_max or --strict, else `open`";
        /// true: the job's memory may leave the device while others run, and comes back before its
        /// turn.
        evictable: Flag, unset "`false`";
        /// What happens to an allocation above the memory limit. fail: it fails; host: it lives in
        /// host memory; needs `evictable`.
        overflow: Word<Overflow>, unset "`fail`", live;
        /// Host memory that the job may take for what is not on its devices, or a part of the
        /// host's ("10%"); needs `evictable`.
        host_memory: Size, unset "no limit of its own", live, capped;
        /// The job's memory leaves its devices when nothing of the job has used them for so long
        /// ("30s"), also where no other job needs the space; it comes back when the job uses them
        /// again. Needs `evictable`.
        evict_after: Time, unset "never", live;
        /// Group of jobs that take turns by themselves: the job may not use its devices until it
        /// has acquired the group's turn.
        group: Name, unset "none";
        /// Submissions that make one iteration of the job.
        iteration_launches: Count<1, { u64::MAX }>, unset "found out from the launches";
    }
}

/// Settings that contradict each other: the key, and a sentence that goes on from its value.
pub type Contradiction = (&'static str, String);

impl JobSettings {
    /// Empty: the arbiter chooses.
    pub fn devices(&self) -> &[DeviceSelector] {
        self.device.as_deref().unwrap_or_default()
    }

    /// What happens to a process that cannot be governed: a limit that was asked for is in force,
    /// or the process does not start.
    pub fn on_refusal(&self, strict: bool) -> OnRefusal {
        let is_limited = self.mem.is_some() || self.share_max.is_some() || strict;
        self.on_refusal.unwrap_or(if is_limited {
            OnRefusal::Closed
        } else {
            OnRefusal::Open
        })
    }

    /// The deadline as a time, where [`anchor`](Self::anchor) has made it one.
    pub fn deadline_unix_ms(&self) -> Option<u64> {
        match self.deadline {
            Some(Deadline::AtUnixMs(at)) => Some(at),
            _ => None,
        }
    }

    /// Makes a time of a deadline that counts from `now`.
    pub fn anchor(&mut self, now_unix_ms: u64) {
        if let Some(Deadline::In(span)) = self.deadline {
            let ms = u64::try_from(span.0.as_millis()).unwrap_or(u64::MAX);
            self.deadline = Some(Deadline::AtUnixMs(now_unix_ms.saturating_add(ms)));
        }
    }

    /// # Errors
    /// [`Contradiction`]: bounds that the share does not fit, a deadline that cannot be held, host
    /// memory for a job that stays on its devices.
    pub fn check(&self) -> Result<(), Contradiction> {
        if let (Some(min), Some(share)) = (self.share_min, self.share)
            && min > share
        {
            let message = format!("more than the share of {share}: write {share} or less");
            return Err(("share_min", message));
        }
        for (name, least) in [("share", self.share), ("share_min", self.share_min)] {
            if let (Some(max), Some(least)) = (self.share_max, least)
                && max < least
            {
                let message = format!("less than the {name} of {least}: write {least} or more");
                return Err(("share_max", message));
            }
        }
        if self.evictable != Some(true) {
            let without = |what: &str| {
                format!("no use without `evictable`: only an evictable job's memory {what}")
            };
            if self.overflow == Some(Overflow::Host) {
                return Err(("overflow", without("can live in host memory")));
            }
            if self.host_memory.is_some() {
                return Err(("host_memory", without("leaves the device")));
            }
            if self.evict_after.is_some() {
                return Err(("evict_after", without("leaves the device")));
            }
        }
        match (self.deadline, self.work) {
            (Some(_), None) => {
                let message = "no use without `work`, the device time that the job takes: add it, or leave the deadline out";
                Err(("deadline", message.into()))
            }
            (Some(Deadline::In(deadline)), Some(work)) if work > deadline => {
                let message = format!(
                    "shorter than the work of {0}: write {0} or more",
                    short_span(work.0)
                );
                Err(("deadline", message))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::setting::Settings;
    use crate::size::MemLimit;
    use crate::span::Span;

    /// Every setting from its example.
    fn all() -> JobSettings {
        let mut all = JobSettings::default();
        for setting in JobSettings::TABLE {
            let text = setting.about.kind.example.replace(['"', '[', ']'], "");
            all = (setting.parse)(&text).expect("an example").or(&all);
        }
        all
    }

    #[test]
    fn every_setting_travels() {
        let wire = serde_json::to_string(&all()).expect("text");
        assert_eq!(
            serde_json::from_str::<JobSettings>(&wire).expect("settings"),
            all(),
            "{wire}"
        );
        for setting in JobSettings::TABLE {
            assert!((setting.is_set)(&all()), "{}", setting.about.key);
        }
        for word in ["\"8GiB\"", "\"40m\"", "\"opportunistic\""] {
            assert!(wire.contains(word), "{wire}");
        }
    }

    #[test]
    fn a_deadline_counts_from_when_it_is_asked_for() {
        let mut settings = JobSettings {
            deadline: Some(Deadline::In(Span::from_micros(90_000_000))),
            ..JobSettings::default()
        };
        assert_eq!(settings.deadline_unix_ms(), None);
        settings.anchor(1000);
        assert_eq!(settings.deadline_unix_ms(), Some(91_000));
        settings.anchor(5000);
        assert_eq!(settings.deadline_unix_ms(), Some(91_000), "a time stays");
    }

    #[test]
    fn a_limit_closes_what_cannot_be_governed() {
        let limited = JobSettings {
            mem: Some(MemLimit::Percent(50.0)),
            ..JobSettings::default()
        };
        assert_eq!(limited.on_refusal(false), OnRefusal::Closed);
        assert_eq!(JobSettings::default().on_refusal(false), OnRefusal::Open);
        assert_eq!(JobSettings::default().on_refusal(true), OnRefusal::Closed);
    }
}
