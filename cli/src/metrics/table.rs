//! Every metric, once: its name, its type, its unit, its labels, what it means, and where its
//! figure comes from. The exposition, the list in `docs/how-to/metrics.md` and the tests of the
//! dashboard are made from this.

use control::place::Place;
use control::{ArbiterStatus, DeviceStatus, JobDevice, JobState, JobStatus, PressureLevel};

use super::Scrape;

/// What a figure is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Counter,
    Gauge,
    /// Always 1; what is to be known is in the labels.
    Info,
}

/// What it is measured in: the end of its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    None,
    Seconds,
    Bytes,
    /// A part of a whole.
    Ratio,
}

impl Unit {
    pub fn word(self) -> Option<&'static str> {
        match self {
            Self::None => None,
            Self::Seconds => Some("seconds"),
            Self::Bytes => Some("bytes"),
            Self::Ratio => Some("ratio"),
        }
    }
}

/// A figure. Counts and bytes are exact.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Figure {
    Whole(u64),
    Real(f64),
}

impl From<u64> for Figure {
    fn from(value: u64) -> Self {
        Self::Whole(value)
    }
}

impl From<f64> for Figure {
    fn from(value: f64) -> Self {
        Self::Real(value)
    }
}

impl From<bool> for Figure {
    fn from(value: bool) -> Self {
        Self::Whole(value.into())
    }
}

/// Where the figures of a metric come from, which says what its labels are. `None`: there is none.
#[derive(Clone, Copy)]
pub enum Source {
    Exporter(fn(&Scrape) -> Option<Figure>),
    ExporterInfo,
    Arbiter(fn(&ArbiterStatus) -> Option<Figure>),
    ArbiterInfo,
    Device(fn(&DeviceStatus, &ArbiterStatus) -> Option<Figure>),
    DeviceInfo,
    DevicePressure,
    Job(fn(&JobStatus) -> Option<Figure>),
    JobInfo,
    JobState,
    JobDevice(fn(&JobDevice) -> Option<Figure>),
}

/// One metric.
pub struct Metric {
    /// Without `_total` and `_info`.
    pub name: &'static str,
    pub kind: Kind,
    pub unit: Unit,
    pub help: &'static str,
    pub source: Source,
}

/// Values of a metric's labels, in their order, and the figure.
pub type Row = (Vec<String>, Figure);

/// Joins with the metrics of NVIDIA's DCGM exporter.
const DEVICE: [&str; 2] = ["UUID", "gpu"];
/// Not `job`: Prometheus gives that name to its own jobs.
const JOB: [&str; 3] = ["job_name", "job_id", "user"];

const PRESSURES: [PressureLevel; 3] = [
    PressureLevel::Calm,
    PressureLevel::Pressed,
    PressureLevel::Thrashing,
];
const STATES: [JobState; 7] = [
    JobState::Starting,
    JobState::Running,
    JobState::Waiting,
    JobState::Idle,
    JobState::Paused,
    JobState::Dormant,
    JobState::Unknown,
];

impl Metric {
    /// As its samples are called.
    pub fn sample(&self) -> String {
        let end = match self.kind {
            Kind::Counter => "_total",
            Kind::Info => "_info",
            Kind::Gauge => "",
        };
        format!("{}{end}", self.name)
    }

    /// Names of its labels.
    pub fn labels(&self) -> Vec<&'static str> {
        match self.source {
            Source::Exporter(_) | Source::Arbiter(_) => Vec::new(),
            Source::ExporterInfo => vec!["version"],
            Source::ArbiterInfo => vec!["version", "embedded"],
            Source::Device(_) => DEVICE.to_vec(),
            Source::DeviceInfo => {
                let more = ["model", "mode", "running", "policy", "simulated"];
                [&DEVICE[..], &more].concat()
            }
            Source::DevicePressure => [&DEVICE[..], &["level"]].concat(),
            Source::Job(_) => JOB.to_vec(),
            Source::JobInfo => {
                let more = [
                    "uid",
                    "class",
                    "gang",
                    "evictable",
                    "simulated",
                    "container",
                    "pod",
                    "slurm_job",
                ];
                [&JOB[..], &more].concat()
            }
            Source::JobState => [&JOB[..], &["state"]].concat(),
            Source::JobDevice(_) => [&JOB[..], &DEVICE].concat(),
        }
    }

    /// Its series.
    pub fn rows(&self, scrape: &Scrape) -> Vec<Row> {
        let one = |figure: Option<Figure>| figure.map(|figure| (Vec::new(), figure));
        let Some(status) = &scrape.status else {
            return match self.source {
                Source::Exporter(of) => one(of(scrape)).into_iter().collect(),
                Source::ExporterInfo => vec![exporter_info()],
                _ => Vec::new(),
            };
        };
        let (devices, jobs) = (status.devices.iter(), status.jobs.iter());
        match self.source {
            Source::Exporter(of) => one(of(scrape)).into_iter().collect(),
            Source::ExporterInfo => vec![exporter_info()],
            Source::Arbiter(of) => one(of(status)).into_iter().collect(),
            Source::ArbiterInfo => vec![arbiter_info(status)],
            Source::Device(of) => devices
                .filter_map(|device| Some((of_device(device), of(device, status)?)))
                .collect(),
            Source::DeviceInfo => devices.map(device_info).collect(),
            Source::DevicePressure => devices
                .flat_map(|device| {
                    let level = device.pressure.level;
                    PRESSURES.map(|one| word(of_device(device), one.as_str(), one == level))
                })
                .collect(),
            Source::Job(of) => jobs
                .filter_map(|job| Some((of_job(job), of(job)?)))
                .collect(),
            Source::JobInfo => jobs
                .map(|job| job_info(job, scrape.places.get(&job.id)))
                .collect(),
            Source::JobState => jobs
                .flat_map(|job| STATES.map(|one| word(of_job(job), one.as_str(), one == job.state)))
                .collect(),
            Source::JobDevice(of) => jobs
                .flat_map(|job| job.devices.iter().map(move |device| (job, device)))
                .filter_map(|(job, device)| {
                    let own = [device.uuid.clone(), device.index.to_string()];
                    Some(([&of_job(job)[..], &own].concat(), of(device)?))
                })
                .collect(),
        }
    }
}

fn word(labels: Vec<String>, word: &str, holds: bool) -> Row {
    ([&labels[..], &[word.to_owned()]].concat(), holds.into())
}

fn of_device(device: &DeviceStatus) -> Vec<String> {
    vec![device.uuid.clone(), device.index.to_string()]
}

fn of_job(job: &JobStatus) -> Vec<String> {
    vec![job.name.clone(), job.id.to_string(), job.user.clone()]
}

fn exporter_info() -> Row {
    (vec![env!("CARGO_PKG_VERSION").into()], Figure::Whole(1))
}

fn arbiter_info(status: &ArbiterStatus) -> Row {
    let labels = vec![status.version.clone(), yes(status.embedded)];
    (labels, Figure::Whole(1))
}

fn device_info(device: &DeviceStatus) -> Row {
    let more = [
        device.name.clone(),
        device.mode.as_str().to_owned(),
        device.running.as_str().to_owned(),
        device.policy.clone(),
        yes(device.simulated),
    ];
    ([&of_device(device)[..], &more].concat(), Figure::Whole(1))
}

fn job_info(job: &JobStatus, place: Option<&Place>) -> Row {
    let mut place = place.cloned().unwrap_or_default();
    if let Some(container) = job
        .container
        .as_ref()
        .filter(|_| place.container.is_empty())
    {
        place.container.clone_from(&container.id);
        place.pod.clone_from(&container.pod);
    }
    let more = [
        job.uid.to_string(),
        job.class.as_str().to_owned(),
        yes(job.gang),
        yes(job.evictable),
        yes(job.simulated),
        place.container,
        place.pod,
        place.slurm_job,
    ];
    ([&of_job(job)[..], &more].concat(), Figure::Whole(1))
}

fn yes(holds: bool) -> String {
    if holds { "true" } else { "false" }.into()
}

/// Nanoseconds in seconds.
fn seconds(ns: u64) -> Option<Figure> {
    // CAST: to the microsecond for a hundred years.
    Some(Figure::Real(ns as f64 / 1e9))
}

fn unix_seconds(ms: u64) -> Option<Figure> {
    // CAST: far below 2^53.
    Some(Figure::Real(ms as f64 / 1e3))
}

fn count(number: usize) -> Option<Figure> {
    Some(Figure::Whole(number as u64))
}

fn some<T: Into<Figure>>(value: T) -> Option<Figure> {
    Some(value.into())
}

/// What all jobs have of a device.
fn sum_on(status: &ArbiterStatus, index: u32, of: fn(&JobDevice) -> u64) -> Option<Figure> {
    let devices = status.jobs.iter().flat_map(|job| &job.devices);
    let own = devices.filter(|device| device.index == index).map(of);
    Some(Figure::Whole(own.fold(0, u64::saturating_add)))
}

/// What of a job could be on the device and is not.
fn evicted_bytes(device: &JobDevice) -> u64 {
    device.residence.as_ref().map_or(0, |residence| {
        let all = residence.evictable_bytes;
        all.saturating_sub(residence.resident_bytes)
    })
}

const fn metric(
    name: &'static str,
    kind: Kind,
    unit: Unit,
    help: &'static str,
    source: Source,
) -> Metric {
    Metric {
        name,
        kind,
        unit,
        help,
        source,
    }
}

use Kind::{Counter, Gauge, Info};
use Unit::{Bytes, None as Plain, Ratio, Seconds};

/// All of them, those of the same labels together.
#[rustfmt::skip]
pub const METRICS: [Metric; 72] = [
    metric("sublet_up", Gauge, Plain, "1: the arbiter answered this scrape. 0: it did not, and only the figures of the exporter are here",
        Source::Exporter(|scrape| some(scrape.status.is_some()))),
    metric("sublet_scrape_duration_seconds", Gauge, Seconds, "Time that it took to ask the arbiter",
        Source::Exporter(|scrape| some(scrape.took.as_secs_f64()))),
    metric("sublet_exporter_scrapes", Counter, Plain, "Times that this exporter asked the arbiter",
        Source::Exporter(|scrape| some(scrape.scrapes))),
    metric("sublet_exporter_scrape_failures", Counter, Plain, "Times that the arbiter did not answer",
        Source::Exporter(|scrape| some(scrape.failures))),
    metric("sublet_exporter", Info, Plain, "Version of this exporter",
        Source::ExporterInfo),

    metric("sublet_arbiter", Info, Plain, "Version of the arbiter",
        Source::ArbiterInfo),
    metric("sublet_arbiter_start_time_seconds", Gauge, Seconds, "When the arbiter started, in seconds since 1970",
        Source::Arbiter(|arbiter| unix_seconds(arbiter.started_unix_ms))),
    metric("sublet_arbiter_uptime_seconds", Gauge, Seconds, "Time since the arbiter started",
        Source::Arbiter(|arbiter| unix_seconds(arbiter.uptime_ms))),
    metric("sublet_arbiter_jobs", Gauge, Plain, "Jobs that the arbiter has",
        Source::Arbiter(|arbiter| count(arbiter.jobs.len()))),
    metric("sublet_arbiter_loop_turns", Counter, Plain, "Turns of the arbiter's loop",
        Source::Arbiter(|arbiter| some(arbiter.loop_turns))),
    metric("sublet_arbiter_loop_lag_seconds", Counter, Seconds, "How much after their time turns of the arbiter's loop began, in all",
        Source::Arbiter(|arbiter| seconds(arbiter.loop_lag_ns))),
    metric("sublet_arbiter_journal_lost_lines", Counter, Plain, "Lines of the journal that could not be written",
        Source::Arbiter(|arbiter| some(arbiter.journal_lost))),
    metric("sublet_arbiter_host_memory_limit_bytes", Gauge, Bytes, "Host memory that evicted and overflowing memory of all jobs may take",
        Source::Arbiter(|arbiter| some(arbiter.host_memory_limit_bytes))),
    metric("sublet_arbiter_host_memory_used_bytes", Gauge, Bytes, "Host memory that it takes",
        Source::Arbiter(|arbiter| some(arbiter.host_memory_used_bytes))),

    metric("sublet_device", Info, Plain, "How a device is run: mode as configured, mode that runs now, slice policy",
        Source::DeviceInfo),
    metric("sublet_device_memory_size_bytes", Gauge, Bytes, "Memory of the device",
        Source::Device(|device, _| some(device.total_bytes))),
    metric("sublet_device_memory_reserved_bytes", Gauge, Bytes, "Memory kept from every quota by configuration",
        Source::Device(|device, _| some(device.reserved_bytes))),
    metric("sublet_device_memory_used_bytes", Gauge, Bytes, "Memory that jobs are charged",
        Source::Device(|device, status| sum_on(status, device.index, |one| one.mem_used_bytes))),
    metric("sublet_device_memory_unattributed_bytes", Gauge, Bytes, "Memory that the driver holds for jobs beyond their allocations",
        Source::Device(|device, status| sum_on(status, device.index, |one| one.unattributed_bytes))),
    metric("sublet_device_memory_evicted_bytes", Gauge, Bytes, "Memory of jobs that is in host memory instead",
        Source::Device(|device, status| sum_on(status, device.index, evicted_bytes))),
    metric("sublet_device_memory_unmanaged_bytes", Gauge, Bytes, "Memory of processes that belong to no job",
        Source::Device(|device, _| some(device.unmanaged.iter().map(|one| one.used_bytes).fold(0, u64::saturating_add)))),
    metric("sublet_device_unmanaged_processes", Gauge, Plain, "Processes that belong to no job",
        Source::Device(|device, _| count(device.unmanaged.len()))),
    metric("sublet_device_busy_seconds", Counter, Seconds, "Time in which the device was in use",
        Source::Device(|device, _| seconds(device.busy_ns))),
    metric("sublet_device_busy_ratio", Gauge, Ratio, "Part of the last second in which the device was in use",
        Source::Device(|device, _| some(device.busy_fraction))),
    metric("sublet_device_grants", Counter, Plain, "Slices granted",
        Source::Device(|device, _| some(device.grants))),
    metric("sublet_device_jobs", Gauge, Plain, "Jobs that may use the device",
        Source::Device(|device, _| count(device.jobs.len()))),
    metric("sublet_device_holders", Gauge, Plain, "Jobs that hold the device now",
        Source::Device(|device, _| count(device.holders.len()))),
    metric("sublet_device_share_promised_ratio", Gauge, Ratio, "Sum of the shares promised to guaranteed jobs",
        Source::Device(|device, _| some(device.share_promised))),
    metric("sublet_device_quantum_seconds", Gauge, Seconds, "Longest slice",
        Source::Device(|device, _| seconds(device.quantum_us.saturating_mul(1000)))),
    metric("sublet_device_hand_over_seconds", Gauge, Seconds, "How long a hand-over keeps the device idle, as learnt on the host",
        Source::Device(|device, _| (device.switch_cost_ns > 0).then(|| seconds(device.switch_cost_ns))?)),
    metric("sublet_device_switches", Counter, Plain, "Turns that began with a move of memory",
        Source::Device(|device, _| some(device.pressure.switches))),
    metric("sublet_device_switching_seconds", Counter, Seconds, "Time in which memory was moved between turns",
        Source::Device(|device, _| seconds(device.pressure.switching_ns))),
    metric("sublet_device_switching_ratio", Gauge, Ratio, "Part of the last minute in which memory was moved between turns",
        Source::Device(|device, _| some(device.pressure.switching_fraction))),
    metric("sublet_device_pressure", Gauge, Plain, "1 at the level that holds: calm, pressed (jobs stay longer) or thrashing (one job is parked)",
        Source::DevicePressure),

    metric("sublet_job", Info, Plain, "Who a job is: its class, and the container, pod and Slurm job in which its processes run, where they do",
        Source::JobInfo),
    metric("sublet_job_state", Gauge, Plain, "1 at the state that holds: starting, running, waiting, idle, paused, dormant or unknown",
        Source::JobState),
    metric("sublet_job_start_time_seconds", Gauge, Seconds, "When it started, in seconds since 1970",
        Source::Job(|job| unix_seconds(job.started_unix_ms))),
    metric("sublet_job_processes", Gauge, Plain, "Processes of it that use a device",
        Source::Job(|job| count(job.processes.len()))),
    metric("sublet_job_escaped_processes", Counter, Plain, "Processes of it that used a device outside its limits",
        Source::Job(|job| some(job.escaped_count))),
    metric("sublet_job_share_asked_ratio", Gauge, Ratio, "Share of the device's time that it asked for, where it did",
        Source::Job(|job| job.share_asked.map(Figure::Real))),
    metric("sublet_job_share_min_ratio", Gauge, Ratio, "Its floor, where it has one",
        Source::Job(|job| job.share_min.map(Figure::Real))),
    metric("sublet_job_share_max_ratio", Gauge, Ratio, "Its cap, where it has one",
        Source::Job(|job| job.share_max.map(Figure::Real))),
    metric("sublet_job_share_contended_ratio", Gauge, Ratio, "Part of the device's time that it got while another job wanted it too",
        Source::Job(|job| job.share_got_contended.map(Figure::Real))),
    metric("sublet_job_contended_seconds", Counter, Seconds, "How long that was the case",
        Source::Job(|job| seconds(job.contended_ns))),
    metric("sublet_job_overrun_seconds", Counter, Seconds, "Device time beyond what was granted",
        Source::Job(|job| seconds(job.overrun_ns))),
    metric("sublet_job_grants", Counter, Plain, "Slices granted to it",
        Source::Job(|job| some(job.grants))),
    metric("sublet_job_launches", Counter, Plain, "Submissions to the device",
        Source::Job(|job| some(job.launches))),
    metric("sublet_job_iterations", Counter, Plain, "Iterations, since their boundaries are known",
        Source::Job(|job| job.profile.as_ref().map(|profile| profile.iterations.into()))),
    metric("sublet_job_iteration_seconds", Gauge, Seconds, "Mean time of an iteration over the last half minute",
        Source::Job(|job| seconds(job.profile.as_ref()?.iteration_ns?))),
    metric("sublet_job_solo_iteration_seconds", Gauge, Seconds, "Time of an iteration without other jobs, where it is known",
        Source::Job(|job| seconds(job.profile.as_ref()?.solo_iteration_ns?))),
    metric("sublet_job_slowdown_ratio", Gauge, Ratio, "Time of an iteration now against the time without other jobs",
        Source::Job(|job| job.profile.as_ref()?.slowdown.map(Figure::Real))),
    metric("sublet_job_copied_bytes", Counter, Bytes, "Bytes copied between host and device by calls that say their direction",
        Source::Job(|job| job.profile.as_ref().map(|profile| profile.copied_bytes.into()))),
    metric("sublet_job_memory_refusals", Counter, Plain, "Allocations that were refused: out of memory",
        Source::Job(|job| some(job.oom_count))),
    metric("sublet_job_violations", Counter, Plain, "Times that it was found to harm other jobs",
        Source::Job(|job| some(job.misbehaved_count))),
    metric("sublet_job_demoted", Gauge, Plain, "1: it runs after all others for now",
        Source::Job(|job| some(job.demoted.is_some()))),

    metric("sublet_job_device_seconds", Counter, Seconds, "Device time that it was charged",
        Source::JobDevice(|device| seconds(device.device_time_ns))),
    metric("sublet_job_wait_seconds", Counter, Seconds, "Time in which it wanted the device and did not have it",
        Source::JobDevice(|device| seconds(device.wait_time_ns))),
    metric("sublet_job_share_ratio", Gauge, Ratio, "Part of the device's time that it got in the last second",
        Source::JobDevice(|device| some(device.share_got_recent))),
    metric("sublet_job_holding", Gauge, Plain, "1: it holds the device now",
        Source::JobDevice(|device| some(device.holding))),
    metric("sublet_job_memory_limit_bytes", Gauge, Bytes, "Its quota, where it has one",
        Source::JobDevice(|device| device.mem_limit_bytes.map(Figure::Whole))),
    metric("sublet_job_memory_used_bytes", Gauge, Bytes, "Memory that it is charged",
        Source::JobDevice(|device| some(device.mem_used_bytes))),
    metric("sublet_job_memory_peak_bytes", Gauge, Bytes, "Most memory that it was charged",
        Source::JobDevice(|device| some(device.mem_peak_bytes))),
    metric("sublet_job_memory_unattributed_bytes", Gauge, Bytes, "Memory that the driver holds for it beyond its allocations",
        Source::JobDevice(|device| some(device.unattributed_bytes))),
    metric("sublet_job_memory_evictable_bytes", Gauge, Bytes, "Memory of an evictable job that can be moved, wherever it is",
        Source::JobDevice(|device| device.residence.as_ref().map(|one| one.evictable_bytes.into()))),
    metric("sublet_job_memory_evicted_bytes", Gauge, Bytes, "Memory of an evictable job that is in host memory instead",
        Source::JobDevice(|device| device.residence.as_ref().map(|_| evicted_bytes(device).into()))),
    metric("sublet_job_memory_host_bytes", Gauge, Bytes, "Host memory held for an evictable job",
        Source::JobDevice(|device| device.residence.as_ref().map(|one| one.host_bytes.into()))),
    metric("sublet_job_evictions", Counter, Plain, "Times that its memory was moved to the host",
        Source::JobDevice(|device| device.residence.as_ref().map(|one| one.evictions.into()))),
    metric("sublet_job_restores", Counter, Plain, "Times that its memory was moved back",
        Source::JobDevice(|device| device.residence.as_ref().map(|one| one.restores.into()))),
    metric("sublet_job_moved_out_bytes", Counter, Bytes, "Bytes copied to the host by evictions",
        Source::JobDevice(|device| device.residence.as_ref().map(|one| one.moved_out_bytes.into()))),
    metric("sublet_job_moved_in_bytes", Counter, Bytes, "Bytes copied back",
        Source::JobDevice(|device| device.residence.as_ref().map(|one| one.moved_in_bytes.into()))),
    metric("sublet_job_moving_seconds", Counter, Seconds, "How long its moves took",
        Source::JobDevice(|device| seconds(device.residence.as_ref()?.moving_ns))),
    metric("sublet_job_parked", Gauge, Plain, "1: an evictable job waits until there is space for it without an eviction",
        Source::JobDevice(|device| device.residence.as_ref().map(|one| one.parked.into()))),
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn names_are_one_of_a_kind_and_end_with_their_unit() {
        let mut names = BTreeSet::new();
        for metric in METRICS {
            let name = metric.name;
            assert!(names.insert(metric.sample()), "{name} is there twice");
            let is_plain = |c: char| c.is_ascii_lowercase() || c == '_';
            assert!(name.starts_with("sublet_") && name.chars().all(is_plain));
            for unit in [Unit::Seconds, Unit::Bytes, Unit::Ratio] {
                let end = format!("_{}", unit.word().expect("a word"));
                assert_eq!(name.ends_with(&end), metric.unit == unit, "{name}");
            }
            // What other samples are made of, or are refused by `promtool check metrics`.
            for end in ["_total", "_info", "_count", "_sum", "_bucket", "_created"] {
                assert!(!name.ends_with(end), "{name}");
            }
            let is_info = matches!(
                metric.source,
                Source::ExporterInfo | Source::ArbiterInfo | Source::DeviceInfo | Source::JobInfo
            );
            assert_eq!(metric.kind == Kind::Info, is_info, "{name}");
            // One line, without what would have to be escaped.
            assert!(!metric.help.contains(['\n', '\\', '"']), "{name}");
        }
    }

    /// An item of a list, in lines of a page.
    fn wrapped(item: &str) -> String {
        let (mut text, mut columns) = (String::from("-"), 1);
        for word in item.split(' ') {
            if columns + 1 + word.chars().count() > 100 {
                text += "\n ";
                columns = 1;
            }
            text.push(' ');
            text += word;
            columns += 1 + word.chars().count();
        }
        text + "\n"
    }

    /// The list of `docs/how-to/metrics.md`.
    fn list() -> String {
        let title = |source: Source| match source {
            Source::Exporter(_) | Source::ExporterInfo => "Of the exporter, without labels:",
            Source::Arbiter(_) | Source::ArbiterInfo => "Of the arbiter, without labels:",
            Source::Device(_) | Source::DeviceInfo | Source::DevicePressure => {
                "Of each device, by `UUID` and `gpu`:"
            }
            Source::Job(_) | Source::JobInfo | Source::JobState => {
                "Of each job, by `job_name`, `job_id` and `user`:"
            }
            Source::JobDevice(_) => {
                "Of each job on each device, by `job_name`, `job_id`, `user`, `UUID` and `gpu`:"
            }
        };
        let (mut text, mut before) = (String::new(), "");
        for metric in METRICS {
            let title = title(metric.source);
            if title != before {
                text += &format!("\n{title}\n\n");
                before = title;
            }
            let kind = match metric.kind {
                Kind::Counter => "counter",
                Kind::Gauge => "gauge",
                Kind::Info => "info",
            };
            let common = match metric.source {
                Source::DeviceInfo | Source::DevicePressure => DEVICE.len(),
                Source::JobInfo | Source::JobState => JOB.len(),
                Source::ExporterInfo | Source::ArbiterInfo => 0,
                _ => usize::MAX,
            };
            let labels = metric.labels();
            let more: Vec<String> = labels
                .get(common..)
                .unwrap_or_default()
                .iter()
                .map(|label| format!(", `{label}`"))
                .collect();
            let item = format!(
                "`{}` ({kind}{}): {}",
                metric.sample(),
                more.concat(),
                metric.help
            );
            text += &wrapped(&item);
        }
        text + "\n"
    }

    #[test]
    fn the_page_of_metrics_has_all_of_them_and_every_flag() {
        let page = include_str!("../../../docs/how-to/metrics.md");
        let (_, rest) = page
            .split_once("a test compares. -->\n")
            .expect("the list begins");
        let (written, _) = rest.split_once("<!-- The end").expect("the list ends");
        assert!(
            written == list(),
            "docs/how-to/metrics.md is to have this list:\n{}",
            list()
        );
        let command = <crate::args::Cli as clap::CommandFactory>::command();
        let metrics = command.find_subcommand("metrics").expect("a command");
        for flag in metrics.get_arguments() {
            let named = format!("--{}", flag.get_long().expect("a long name"));
            assert!(page.contains(&named), "docs/how-to/metrics.md: {named}");
        }
    }

    #[test]
    fn each_row_has_a_value_for_each_label_and_no_two_are_the_same() {
        let residence = control::Residence::default();
        let device = |index| JobDevice {
            index,
            uuid: format!("GPU-{index}"),
            mem_limit_bytes: Some(1),
            residence: Some(residence.clone()),
            ..JobDevice::default()
        };
        let job = |id| JobStatus {
            id,
            // Two jobs of one name: one of them may have ended its life as another's dormant one.
            name: "train".into(),
            devices: vec![device(0), device(1)],
            profile: Some(Box::default()),
            ..JobStatus::default()
        };
        let scrape = Scrape {
            status: Some(ArbiterStatus {
                devices: [0, 1]
                    .map(|index| DeviceStatus {
                        index,
                        uuid: format!("GPU-{index}"),
                        ..DeviceStatus::default()
                    })
                    .into(),
                jobs: vec![job(1), job(2)],
                ..ArbiterStatus::default()
            }),
            ..Scrape::default()
        };
        for metric in METRICS {
            let rows = metric.rows(&scrape);
            let mut seen = BTreeSet::new();
            for (labels, _) in &rows {
                assert_eq!(labels.len(), metric.labels().len(), "{}", metric.name);
                assert!(seen.insert(labels.clone()), "{}: {labels:?}", metric.name);
            }
        }
    }
}
