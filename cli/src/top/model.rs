//! What the arbiter said, look by look: how things stand, and the last minute of each job and
//! device.

use std::collections::{HashMap, VecDeque};

use control::{ArbiterStatus, DeviceStatus, Event, JobStatus};

/// How much of the past is kept.
pub const MINUTE_MS: u64 = 60_000;
/// Samples of a minute at most.
const SAMPLES: usize = 1200;
/// As many events as the arbiter keeps.
const EVENTS: usize = 1000;

/// What a figure was between two looks.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Sample {
    from_ms: u64,
    to_ms: u64,
    value: f64,
}

/// The last minute of a figure.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct History(VecDeque<Sample>);

impl History {
    fn push(&mut self, from_ms: u64, to_ms: u64, value: f64) {
        self.0.push_back(Sample {
            from_ms,
            to_ms,
            value,
        });
        let since_ms = to_ms.saturating_sub(MINUTE_MS);
        while self.0.len() > SAMPLES || self.0.front().is_some_and(|first| first.to_ms < since_ms) {
            self.0.pop_front();
        }
    }

    /// The minute before `now_ms` in `bars` parts, the oldest first: the mean of each, weighted by
    /// time; `None`: nothing is known of it.
    pub fn bars(&self, now_ms: u64, bars: usize) -> Vec<Option<f64>> {
        // CAST: a minute, and the columns of a terminal.
        let width_ms = MINUTE_MS as f64 / bars.max(1) as f64;
        let start_ms = now_ms as f64 - MINUTE_MS as f64;
        let mean = |bar: usize| {
            let from = start_ms + bar as f64 * width_ms;
            let to = from + width_ms;
            let (mut sum, mut time) = (0.0, 0.0);
            for sample in &self.0 {
                let overlap = (sample.to_ms as f64).min(to) - (sample.from_ms as f64).max(from);
                if overlap > 0.0 {
                    sum += sample.value * overlap;
                    time += overlap;
                }
            }
            (time > 0.0).then(|| sum / time)
        };
        (0..bars).map(mean).collect()
    }
}

/// A job, and what came of it between looks.
#[derive(Debug, Clone, Default)]
pub struct Job {
    pub status: JobStatus,
    /// Part of its devices' time between the last two looks; `None`: it was not seen twice.
    pub share_got: Option<f64>,
    pub launches_per_s: Option<f64>,
    pub got: History,
    pub memory: History,
}

impl Job {
    /// What of its memory is not on its devices.
    pub fn evicted_bytes(&self) -> u64 {
        self.status.residence.as_ref().map_or(0, |residence| {
            residence
                .evictable_bytes
                .saturating_sub(residence.resident_bytes)
        })
    }

    pub fn iteration_ns(&self) -> Option<u64> {
        self.status.profile.as_ref()?.iteration_ns
    }

    pub fn slowdown(&self) -> Option<f64> {
        self.status.profile.as_ref()?.slowdown
    }
}

/// A device, and how busy it was.
#[derive(Debug, Clone, Default)]
pub struct Device {
    pub status: DeviceStatus,
    /// What is in use: as NVML says, or else what jobs have.
    pub used_bytes: u64,
    pub busy: History,
}

/// Everything that is shown.
#[derive(Debug, Default)]
pub struct Model {
    /// Without devices and jobs; `None`: none has answered yet.
    pub arbiter: Option<ArbiterStatus>,
    pub devices: Vec<Device>,
    pub jobs: Vec<Job>,
    /// The oldest first.
    pub events: VecDeque<Event>,
    /// Why the last look brought nothing; the rest is then as it was before.
    pub lost: Option<String>,
    /// Between the last two looks at the same arbiter.
    pub interval_ms: Option<u64>,
    /// When it answered last.
    pub looked_ms: u64,
}

impl Model {
    /// The arbiter has answered at `now_ms`, on a clock that only goes forward.
    pub fn learn(&mut self, now_ms: u64, mut status: ArbiterStatus) {
        let is_same = self.arbiter.as_ref().is_some_and(|before| {
            (before.pid, before.started_unix_ms) == (status.pid, status.started_unix_ms)
        });
        let elapsed_ms = now_ms.saturating_sub(self.looked_ms);
        // What happened while it did not answer is no figure of the last interval.
        let counts = is_same && self.lost.is_none() && elapsed_ms > 0;
        self.interval_ms = counts.then_some(elapsed_ms);
        if !is_same {
            self.events.clear();
        }
        let span = counts.then_some((self.looked_ms, now_ms));
        self.looked_ms = now_ms;
        self.lost = None;

        let jobs = std::mem::take(&mut status.jobs);
        let mut before: HashMap<u64, Job> = self
            .jobs
            .drain(..)
            .map(|job| (job.status.id, job))
            .collect();
        self.jobs = jobs
            .into_iter()
            .map(|status| job_of(before.remove(&status.id), status, span))
            .collect();

        let devices = std::mem::take(&mut status.devices);
        let mut before: HashMap<String, Device> = (self.devices.drain(..))
            .map(|device| (device.status.uuid.clone(), device))
            .collect();
        let jobs = &self.jobs;
        self.devices = devices
            .into_iter()
            .map(|status| device_of(before.remove(&status.uuid), status, jobs, span))
            .collect();
        self.arbiter = Some(status);
    }

    pub fn learn_events(&mut self, events: Vec<Event>) {
        self.events.extend(events);
        let excess = self.events.len().saturating_sub(EVENTS);
        self.events.drain(..excess);
    }

    /// It has not answered.
    pub fn lose(&mut self, why: String) {
        self.lost = Some(why);
        self.interval_ms = None;
        for job in &mut self.jobs {
            job.share_got = None;
            job.launches_per_s = None;
        }
    }
}

fn job_of(before: Option<Job>, status: JobStatus, span: Option<(u64, u64)>) -> Job {
    let known = before.is_some();
    let mut job = before.unwrap_or_default();
    let was = std::mem::replace(&mut job.status, status);
    let now = &job.status;
    job.share_got = None;
    job.launches_per_s = None;
    if let (true, Some((from_ms, to_ms))) = (known, span) {
        // CAST: below 2^53.
        let elapsed_ms = (to_ms - from_ms) as f64;
        // An account that was begun anew tells nothing of this interval.
        let device_ns = now.device_time_ns.checked_sub(was.device_time_ns);
        let devices = now.devices.len().max(1) as f64;
        job.share_got =
            device_ns.map(|ns| (ns as f64 / 1e6 / elapsed_ms / devices).clamp(0.0, 1.0));
        let launches = now.launches.checked_sub(was.launches);
        job.launches_per_s = launches.map(|launches| launches as f64 * 1000.0 / elapsed_ms);
        if let Some(share) = job.share_got {
            job.got.push(from_ms, to_ms, share);
        }
        job.memory.push(from_ms, to_ms, now.mem_used_bytes as f64);
    }
    job
}

fn device_of(
    before: Option<Device>,
    status: DeviceStatus,
    jobs: &[Job],
    span: Option<(u64, u64)>,
) -> Device {
    let mut busy = before.map(|device| device.busy).unwrap_or_default();
    if let Some((from_ms, to_ms)) = span {
        busy.push(from_ms, to_ms, status.busy_fraction);
    }
    let of_jobs = jobs
        .iter()
        .flat_map(|job| &job.status.devices)
        .filter(|device| device.uuid == status.uuid)
        .map(|device| {
            device
                .mem_used_bytes
                .saturating_add(device.unattributed_bytes)
        });
    let of_others = status.unmanaged.iter().map(|process| process.used_bytes);
    let known = of_jobs.chain(of_others).fold(0, u64::saturating_add);
    Device {
        used_bytes: status.used_bytes.unwrap_or(known),
        status,
        busy,
    }
}

#[cfg(test)]
mod tests {
    use control::{JobDevice, Residence};

    use super::*;

    fn status(device_time_ns: u64) -> ArbiterStatus {
        ArbiterStatus {
            pid: 7,
            jobs: vec![JobStatus {
                id: 1,
                device_time_ns,
                launches: device_time_ns / 1000,
                mem_used_bytes: 64,
                devices: vec![JobDevice {
                    mem_used_bytes: 64,
                    unattributed_bytes: 6,
                    ..JobDevice::default()
                }],
                ..JobStatus::default()
            }],
            devices: vec![DeviceStatus {
                busy_fraction: 0.5,
                ..DeviceStatus::default()
            }],
            ..ArbiterStatus::default()
        }
    }

    #[test]
    fn the_share_got_is_device_time_between_two_looks() {
        let mut model = Model::default();
        model.learn(1000, status(5_000_000_000));
        assert_eq!((model.jobs[0].share_got, model.interval_ms), (None, None));
        assert!(model.arbiter.as_ref().unwrap().jobs.is_empty());
        model.learn(3000, status(5_500_000_000));
        assert_eq!(model.jobs[0].share_got, Some(0.25));
        assert_eq!(model.jobs[0].launches_per_s, Some(250_000.0));
        assert_eq!(model.interval_ms, Some(2000));
        assert_eq!(model.devices[0].used_bytes, 70);
        // More than there was time is a matter of when each was looked at.
        model.learn(3100, status(9_500_000_000));
        assert_eq!(model.jobs[0].share_got, Some(1.0));
        // An account that was begun anew.
        model.learn(4100, status(1));
        assert_eq!(model.jobs[0].share_got, None);
        // Twice at the same time.
        model.learn(4100, status(2));
        assert_eq!((model.jobs[0].share_got, model.interval_ms), (None, None));
    }

    #[test]
    fn a_share_is_the_mean_of_several_devices() {
        let mut model = Model::default();
        for (at_ms, device_time_ns) in [(0, 0), (1000, 1_000_000_000)] {
            let mut status = status(device_time_ns);
            let device = status.jobs[0].devices[0].clone();
            status.jobs[0].devices.push(device);
            model.learn(at_ms, status);
        }
        assert_eq!(model.jobs[0].share_got, Some(0.5));
    }

    #[test]
    fn what_was_not_seen_is_not_counted() {
        let mut model = Model::default();
        model.learn(1000, status(0));
        model.learn(2000, status(100));
        model.lose("it has gone".into());
        assert_eq!((model.jobs.len(), model.jobs[0].share_got), (1, None));
        assert!(model.lost.is_some());
        model.learn(9000, status(200));
        assert_eq!((model.lost.as_deref(), model.interval_ms), (None, None));
        // Another arbiter.
        model.learn_events(vec![Event::default()]);
        let mut other = status(300);
        other.pid = 8;
        model.learn(10_000, other.clone());
        assert_eq!(model.jobs[0].share_got, None);
        assert!(model.events.is_empty());
        model.learn(11_000, other);
        assert_eq!(model.jobs[0].share_got, Some(0.0));
    }

    #[test]
    fn a_job_is_known_by_its_number() {
        let mut model = Model::default();
        model.learn(0, status(0));
        let mut next = status(1_000_000_000);
        next.jobs[0].id = 2;
        model.learn(1000, next);
        assert_eq!(model.jobs[0].share_got, None, "another of the same name");
        assert_eq!(model.jobs[0].memory, History::default());
    }

    #[test]
    fn the_last_minute_is_kept_and_shown_in_parts() {
        let mut history = History::default();
        assert_eq!(history.bars(5000, 2), [None, None]);
        assert_eq!(history.bars(5000, 0), []);
        for second in 0..200_u64 {
            let value = if second < 170 { 0.0 } else { 1.0 };
            history.push(second * 1000, (second + 1) * 1000, value);
        }
        assert!(history.0.len() <= 62, "{}", history.0.len());
        assert_eq!(history.bars(200_000, 2), [Some(0.0), Some(1.0)]);
        assert_eq!(history.bars(230_000, 2), [Some(1.0), None]);
        let thirds = history.bars(200_000, 4);
        assert_eq!(thirds, [Some(0.0), Some(0.0), Some(1.0), Some(1.0)]);
        // One sample that covers more than a part.
        let mut history = History::default();
        history.push(0, 60_000, 0.5);
        assert_eq!(history.bars(60_000, 3), [Some(0.5); 3]);
        for at in 0..5000 {
            history.push(60_000 + at, 60_001 + at, 1.0);
        }
        assert_eq!(history.0.len(), SAMPLES, "however often it is looked at");
    }

    #[test]
    fn what_is_evicted_is_what_is_not_on_the_device() {
        let mut job = Job::default();
        assert_eq!(job.evicted_bytes(), 0);
        job.status.residence = Some(Box::new(Residence {
            evictable_bytes: 10,
            resident_bytes: 4,
            ..Residence::default()
        }));
        assert_eq!(job.evicted_bytes(), 6);
    }
}
