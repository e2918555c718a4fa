//! How long a demand would wait on a device: Apollo's wait-time matrix (OSDI'14), with shares of
//! time and memory for its cores and memory, as [`policy::cluster::wait`] computes it. This module
//! collects its input: the jobs on a device, as its arbiter reports them.
//!
//! Jobs are expected to end in the order of their remaining work: the work that the owner declared,
//! less what they have had, at the rate at which they get it; without a declaration, as long again
//! as they have run (the length that makes half of all such guesses too short). The wait for a job
//! with an unknown end, because it is paused, is infinite.

use control::{ArbiterStatus, Class, DeviceStatus, JobState, JobStatus};
use policy::cluster::wait::{self, Use};

use super::wire::WaitMatrix;

/// Columns.
const SHARES: [f64; 4] = [0.25, 0.5, 0.75, 1.0];
/// Rows, as parts of the device's memory.
const PARTS: [f64; 4] = [0.125, 0.25, 0.5, 0.9];

/// The matrices of all devices of an arbiter. `ours` tells the hook's own jobs by name.
#[must_use]
pub fn matrices(arbiter: &ArbiterStatus, ours: impl Fn(&str) -> bool) -> Vec<WaitMatrix> {
    arbiter
        .devices
        .iter()
        .map(|device| matrix(arbiter, device, &ours))
        .collect()
}

/// The matrix for a policy; `None` if a node has reported something impossible.
#[must_use]
pub fn as_reported(matrix: &WaitMatrix) -> Option<wait::WaitMatrix> {
    // On the wire rows are memory, there they are shares.
    let whole = matrix.wait_s.len() == matrix.rows_bytes.len()
        && matrix
            .wait_s
            .iter()
            .all(|row| row.len() == matrix.columns_share.len());
    if !whole {
        return None;
    }
    let by_share = (0..matrix.columns_share.len())
        .map(|column| matrix.wait_s.iter().map(|row| row[column]).collect())
        .collect();
    wait::WaitMatrix::reported(&matrix.columns_share, &matrix.rows_bytes, by_share)
}

fn matrix(
    arbiter: &ArbiterStatus,
    device: &DeviceStatus,
    ours: &impl Fn(&str) -> bool,
) -> WaitMatrix {
    let on_it = |job: &&JobStatus| job.state != JobState::Gone && device.jobs.contains(&job.name);
    let jobs: Vec<&JobStatus> = arbiter.jobs.iter().filter(on_it).collect();
    let now_unix_ms = arbiter.started_unix_ms + arbiter.uptime_ms;
    let usable_bytes = device.total_bytes.saturating_sub(device.reserved_bytes);
    let running: Vec<Use> = jobs
        .iter()
        .map(|job| {
            let part = job.devices.iter().find(|part| part.uuid == device.uuid);
            Use {
                share: if job.class == Class::Guaranteed {
                    job.share_asked.unwrap_or(job.share_got_recent)
                } else {
                    0.0
                },
                bytes: part.map_or(0, |part| {
                    part.mem_limit_bytes
                        .unwrap_or(part.mem_used_bytes + part.unattributed_bytes)
                }),
                left_s: left_s(job, now_unix_ms).unwrap_or(f64::INFINITY),
            }
        })
        .collect();
    // CAST: memory of a device is below 2^53.
    let rows_bytes = PARTS.map(|part| (device.total_bytes as f64 * part) as u64);
    let waits = wait::WaitMatrix::of(usable_bytes, &running, &[], &SHARES, &rows_bytes);
    let reported = |share: &Vec<f64>, row: usize| Some(share[row]).filter(|wait| wait.is_finite());
    let (share, bytes) = running.iter().fold((0.0, 0u64), |(share, bytes), of| {
        (share + of.share, bytes.saturating_add(of.bytes))
    });
    WaitMatrix {
        uuid: device.uuid.clone(),
        free_share: (1.0 - share).clamp(0.0, 1.0),
        free_bytes: usable_bytes.saturating_sub(bytes),
        // CAST: jobs of one device.
        strangers: jobs.iter().filter(|job| !ours(&job.name)).count() as u32,
        wait_s: (0..rows_bytes.len())
            .map(|row| {
                waits
                    .rows()
                    .iter()
                    .map(|share| reported(share, row))
                    .collect()
            })
            .collect(),
        rows_bytes: rows_bytes.to_vec(),
        columns_share: SHARES.to_vec(),
    }
}

/// Seconds that a job is expected to go on; `None`: not known.
fn left_s(job: &JobStatus, now_unix_ms: u64) -> Option<f64> {
    if job.paused {
        return None;
    }
    if let Some(work_ns) = job.work_ns {
        // CAST: nanoseconds of years are below 2^63; the rate is its recent one, a tenth at the
        // least.
        let left = work_ns.saturating_sub(job.device_time_ns) as f64 / 1e9;
        return Some(left / job.share_got_recent.clamp(0.1, 1.0));
    }
    // CAST: as above.
    Some(now_unix_ms.saturating_sub(job.started_unix_ms) as f64 / 1000.0)
}

#[cfg(test)]
mod tests {
    use control::JobDevice;

    use super::*;

    fn job(name: &str, share: f64, bytes: u64, age_s: u64) -> JobStatus {
        JobStatus {
            name: name.into(),
            share_asked: Some(share),
            started_unix_ms: 1_000_000 - age_s * 1000,
            devices: vec![JobDevice {
                uuid: "GPU-0".into(),
                mem_limit_bytes: Some(bytes),
                ..JobDevice::default()
            }],
            ..JobStatus::default()
        }
    }

    fn of(jobs: Vec<JobStatus>) -> WaitMatrix {
        let device = DeviceStatus {
            uuid: "GPU-0".into(),
            total_bytes: 1000,
            jobs: jobs.iter().map(|job| job.name.clone()).collect(),
            ..DeviceStatus::default()
        };
        let arbiter = ArbiterStatus {
            started_unix_ms: 1_000_000,
            devices: vec![device],
            jobs,
            ..ArbiterStatus::default()
        };
        matrices(&arbiter, |name| name.starts_with("ours")).remove(0)
    }

    #[test]
    fn an_empty_device_is_there_at_once() {
        let matrix = of(Vec::new());
        assert!(
            matrix
                .wait_s
                .iter()
                .flatten()
                .all(|wait| *wait == Some(0.0))
        );
        assert_eq!(
            (matrix.free_share, matrix.free_bytes, matrix.strangers),
            (1.0, 1000, 0)
        );
    }

    #[test]
    fn a_demand_waits_for_as_many_ends_as_it_needs() {
        let mut reported = job("ours", 0.5, 400, 10);
        reported.work_ns = Some(30_000_000_000);
        reported.device_time_ns = 20_000_000_000;
        reported.share_got_recent = 0.5;
        // 10 s of work left at half speed: 20 s. The other has run for 60 s: 60 s more.
        let matrix = of(vec![job("other", 0.25, 300, 60), reported]);
        assert_eq!(
            matrix.wait_s[0],
            [Some(0.0), Some(20.0), Some(20.0), Some(60.0)]
        );
        // 900 bytes need both.
        assert_eq!(matrix.wait_s[3], [Some(60.0); 4]);
        assert_eq!((matrix.free_bytes, matrix.strangers), (300, 1));
    }

    #[test]
    fn a_matrix_is_read_as_it_was_written_and_one_that_cannot_be_is_none() {
        let mut matrix = of(vec![job("other", 0.5, 600, 60)]);
        let read = as_reported(&matrix).unwrap();
        assert_eq!(read.wait_s(0.5, 250), 0.0);
        assert_eq!((read.wait_s(1.0, 1), read.wait_s(0.25, 500)), (60.0, 60.0));
        assert_eq!(read.wait_s(1.0, 950), f64::INFINITY, "beyond its rows");
        matrix.wait_s[3][0] = Some(f64::NAN);
        assert_eq!(as_reported(&matrix), None);
        matrix.wait_s[3] = vec![None];
        assert_eq!(as_reported(&matrix), None);
        matrix.wait_s.clear();
        assert_eq!(as_reported(&matrix), None);
        assert_eq!(as_reported(&WaitMatrix::default()), None);
    }

    #[test]
    fn the_end_of_a_paused_job_is_unknown() {
        let mut paused = job("ours", 0.5, 0, 10);
        paused.paused = true;
        assert_eq!(
            of(vec![paused]).wait_s[0],
            [Some(0.0), Some(0.0), None, None]
        );
        let mut free = job("free", 0.5, 0, 10);
        free.class = Class::Opportunistic;
        assert_eq!(
            of(vec![free]).wait_s[0],
            [Some(0.0); 4],
            "who has no promise is in nobody's way"
        );
    }
}
