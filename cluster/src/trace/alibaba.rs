//! Alibaba's traces of GPUs of 2025 and 2026 (GitHub alibaba/clusterdata).
//!
//! *2025* (`cluster-trace-gpu-v2025`, NSDI'25): instances of inference services whose GPUs are in
//! servers of their own. All are guaranteed. Those of the role CN have no GPU and are left out. An
//! instance without `creation_time` was there when the trace began, one without `deletion_time`
//! when it ended: at the last time of the file.
//!
//! *Spot, 2026* (`cluster-trace-v2026-spot-gpu`, GFS, ASPLOS'26): jobs of `gpu_request` GPUs for
//! each of `worker_num` workers. `HP` is guaranteed, `Spot` opportunistic; `--part` is a GPU model.
//!
//! *By the hour, 2026* (`cluster-trace-gpu-v2026`): which pods were seen on which server in which
//! hour. The files are Parquet; exported as CSV, with the partitions `day` and `hour` as columns, a
//! pod comes with the first hour in which it is seen and runs for the hours of GPU time attributed
//! to it over the GPUs it asks for. `HP` and `Other` are guaranteed, `LP` is opportunistic;
//! `--part` is a GPU model.

use std::collections::HashMap;

use policy::cluster::{Class, UserId};

use super::recorded::Recorded;
use super::table::{Table, TraceError};
use super::{BACKWARDS, NO_GPU, Options, Trace, UNRECORDED, asking, kind};

const INSTANCES: &[&str] = &[
    "instance_sn",
    "role",
    "app_name",
    "cpu_request",
    "cpu_limit",
    "gpu_request",
    "gpu_limit",
    "rdma_request",
    "rdma_limit",
    "memory_request",
    "memory_limit",
    "disk_request",
    "disk_limit",
    "max_instance_per_node",
    "creation_time",
    "scheduled_time",
    "deletion_time",
];

pub(super) fn read_instances(table: Table, options: &Options) -> Result<Trace, TraceError> {
    struct Instance {
        app: String,
        gpus: f64,
        from_s: f64,
        scheduled_s: Option<f64>,
        to_s: Option<f64>,
    }
    let mut trace = Trace {
        unused: table.others(INSTANCES)?,
        ..Trace::default()
    };
    let [role, app, gpus, created, scheduled, deleted] = [
        table.column("role")?,
        table.column("app_name")?,
        table.column("gpu_request")?,
        table.column("creation_time")?,
        table.column("scheduled_time")?,
        table.column("deletion_time")?,
    ];
    let (mut instances, mut end_s) = (Vec::new(), 0.0_f64);
    table.each(|row| {
        if !matches!(row.text(role)?, "CN" | "HN") {
            return Err(row.wrong(role, "CN or HN is expected"));
        }
        let wanted = row.gpu_parts(gpus, 1.0)?;
        let [from_s, scheduled_s, to_s] = [
            row.known_seconds(created)?,
            row.known_seconds(scheduled)?,
            row.known_seconds(deleted)?,
        ];
        let seen = [from_s, scheduled_s, to_s].into_iter().flatten();
        end_s = seen.fold(end_s, f64::max);
        let app = row.text(app)?;
        if options.part.as_deref().is_some_and(|part| part != app) {
            return Ok(());
        }
        if wanted == 0.0 {
            trace.leave_out(NO_GPU);
            return Ok(());
        }
        instances.push(Instance {
            app: app.to_owned(),
            gpus: wanted,
            from_s: from_s.unwrap_or(0.0),
            scheduled_s,
            to_s,
        });
        Ok(())
    })?;
    for one in instances {
        // One that was not scheduled in the trace's time waits beyond it.
        let to_s = one.to_s.unwrap_or(end_s);
        let on_s = one.scheduled_s.unwrap_or(one.from_s);
        if on_s < one.from_s || to_s < on_s {
            trace.leave_out(BACKWARDS);
            continue;
        }
        let kind = kind(&mut trace.kinds, &one.app);
        let Ok(mut job) = asking(kind, one.gpus, 1.0, one.from_s, (to_s - on_s).max(1.0)) else {
            trace.leave_out(NO_GPU);
            continue;
        };
        job.user = UserId(trace.users.number(&one.app));
        trace.jobs.push(job);
        trace.recorded.push(Recorded {
            gpus: one.gpus,
            submit_s: one.from_s,
            runs: vec![[on_s, to_s]],
        });
    }
    Ok(trace)
}

const SPOT: &[&str] = &[
    "job_name",
    "organization",
    "gpu_model",
    "cpu_request",
    "gpu_request",
    "worker_num",
    "submit_time",
    "duration",
    "job_type",
];

pub(super) fn read_spot(table: Table, options: &Options) -> Result<Trace, TraceError> {
    let mut trace = Trace {
        unused: table.others(SPOT)?,
        ..Trace::default()
    };
    let [organisation, model, gpus, workers, submit, duration, class] = [
        table.column("organization")?,
        table.column("gpu_model")?,
        table.column("gpu_request")?,
        table.column("worker_num")?,
        table.column("submit_time")?,
        table.column("duration")?,
        table.column("job_type")?,
    ];
    table.each(|row| {
        let model = row.text(model)?;
        if options.part.as_deref().is_some_and(|part| part != model) {
            return Ok(());
        }
        let each = row.gpu_parts(gpus, 1.0)?;
        let workers_there = row.gpus(workers)?;
        let (arrival_s, duration_s) = (row.seconds(submit)?, row.seconds(duration)?);
        let class = match row.text(class)? {
            "HP" => Class::Guaranteed,
            "Spot" => Class::Opportunistic,
            _ => return Err(row.wrong(class, "HP or Spot is expected")),
        };
        if each == 0.0 {
            trace.leave_out(NO_GPU);
            return Ok(());
        }
        let kind = kind(&mut trace.kinds, model);
        let duration_s = duration_s.max(1.0);
        let job = asking(kind, each, f64::from(workers_there), arrival_s, duration_s);
        let mut job = job.map_err(|expected| row.wrong(workers, expected))?;
        job.profile.class = class;
        job.user = UserId(trace.users.number(row.text(organisation)?));
        trace.jobs.push(job);
        Ok(())
    })?;
    Ok(trace)
}

const HOURLY: &[&str] = &[
    "pod_id",
    "workload_id",
    "server_id",
    "cluster_id",
    "state_public",
    "gpu_spec_public",
    "server_gpu_count",
    "server_cpu_capacity_cores",
    "priority_class",
    "job_type_public",
    "model_type_public",
    "is_genai_request",
    "gpu_request",
    "gpu_mem_request",
    "cpu_request_cores",
    "used_gpu_hours",
    "avg_gpu_sm_util",
    "avg_gpu_mem_gib",
    "avg_cpu_request_util",
    "avg_memory_util",
    "ready_status",
    "schedule_delay_sec",
    "ready_delay_sec",
    "day",
    "hour",
];

/// Most days of a trace by the hour: 10 years.
const MOST_DAYS: f64 = 3660.0;

/// What was seen of a pod.
struct Pod {
    kind: String,
    gpus: f64,
    class: Class,
    first_hour: f64,
    used_gpu_hours: f64,
    delay_s: Option<f64>,
}

pub(super) fn read_hourly(table: Table, options: &Options) -> Result<Trace, TraceError> {
    let mut trace = Trace {
        unused: table.others(HOURLY)?,
        ..Trace::default()
    };
    let [pod, model, what, class, gpus, used, day, hour] = [
        table.column("pod_id")?,
        table.column("gpu_spec_public")?,
        table.column("job_type_public")?,
        table.column("priority_class")?,
        table.column("gpu_request")?,
        table.column("used_gpu_hours")?,
        table.column("day")?,
        table.column("hour")?,
    ];
    let delay = table.optional("schedule_delay_sec");
    let (mut order, mut pods) = (Vec::new(), HashMap::<String, Pod>::new());
    table.each(|row| {
        let model = row.text(model)?;
        if options.part.as_deref().is_some_and(|part| part != model) {
            return Ok(());
        }
        let wanted = row.gpu_parts(gpus, 1.0)?;
        let (days, hours) = (row.number(day)?, row.number(hour)?);
        if days.fract() != 0.0 || days > MOST_DAYS {
            return Err(row.wrong(day, "a day from 0 to 3660 is expected"));
        }
        if hours.fract() != 0.0 || hours >= 24.0 {
            return Err(row.wrong(hour, "an hour from 0 to 23 is expected"));
        }
        let class_there = match row.text(class)? {
            "HP" | "Other" => Class::Guaranteed,
            "LP" => Class::Opportunistic,
            _ => return Err(row.wrong(class, "HP, LP or Other is expected")),
        };
        let used_there = match row.is_empty(used) {
            true => 0.0,
            false => row.number(used)?,
        };
        // An hour of each GPU, and what clocks of servers are off by.
        if used_there > 2.0 * wanted.max(1.0) {
            return Err(row.wrong(
                used,
                "at most an hour of each GPU that is asked for is expected",
            ));
        }
        let delay_s = match delay {
            Some(delay) => row.known_seconds(delay)?,
            None => None,
        };
        if wanted == 0.0 {
            trace.leave_out(NO_GPU);
            return Ok(());
        }
        let name = row.text(pod)?;
        if name.is_empty() {
            return Err(row.wrong(pod, "the name of a pod is expected"));
        }
        let at = days * 24.0 + hours;
        if !pods.contains_key(name) {
            order.push(name.to_owned());
            let new = Pod {
                kind: row.text(what)?.to_owned(),
                gpus: wanted,
                class: class_there,
                first_hour: at,
                used_gpu_hours: 0.0,
                delay_s: None,
            };
            pods.insert(name.to_owned(), new);
        }
        if let Some(known) = pods.get_mut(name) {
            known.gpus = known.gpus.max(wanted);
            known.first_hour = known.first_hour.min(at);
            known.used_gpu_hours += used_there;
            known.delay_s = known.delay_s.or(delay_s);
        }
        Ok(())
    })?;
    for name in order {
        let Some(pod) = pods.remove(&name) else {
            continue;
        };
        let duration_s = 3600.0 * pod.used_gpu_hours / pod.gpus;
        if duration_s == 0.0 {
            trace.leave_out(UNRECORDED);
            continue;
        }
        let arrival_s = 3600.0 * pod.first_hour;
        let kind = kind(&mut trace.kinds, &pod.kind);
        let Ok(mut job) = asking(kind, pod.gpus, 1.0, arrival_s, duration_s.max(1.0)) else {
            trace.leave_out(NO_GPU);
            continue;
        };
        job.profile.class = pod.class;
        job.user = UserId(trace.users.number(&pod.kind));
        trace.jobs.push(job);
        if let Some(delay_s) = pod.delay_s {
            trace.recorded.push(Recorded {
                gpus: pod.gpus,
                submit_s: arrival_s - delay_s,
                runs: vec![[arrival_s, arrival_s + duration_s]],
            });
        }
    }
    trace.count_from_first_arrival();
    Ok(trace)
}

/// Why the table of executions of that trace says nothing about a queue.
pub(super) const NO_TIMES: &str = "asi_opensource_job_execution_summary has lengths and no times; \
                                   export asi_opensource_pod_hourly as CSV, with day and hour";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_gpus_are_parts_for_one_worker_and_busy_fractions_for_several() {
        let of = |each, workers| asking(policy::cluster::JobType(0), each, workers, 0.0, 1.0);
        let one = of(0.5, 1.0).unwrap();
        assert_eq!(
            (one.gpus, one.part.unwrap().share, one.profile.busy),
            (1, 0.5, 0.5)
        );
        let four = of(0.5, 4.0).unwrap();
        assert_eq!((four.gpus, four.part, four.profile.busy), (4, None, 0.5));
        let whole = of(8.0, 94.0).unwrap();
        assert_eq!((whole.gpus, whole.profile.busy), (752, 1.0));
        assert_eq!(of(1.5, 2.0).unwrap().gpus, 4);
        assert!(of(8.0, 65_000.0).is_err());
    }
}
