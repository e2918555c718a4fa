//! Jobs that trained language models in two clusters, Seren and Kalos (Acme, NSDI'24; GitHub
//! InternLM/AcmeTrace, `trace_seren.csv` and `trace_kalos.csv`): when each came, started and ended.
//!
//! Times carry their zone. `type` is the kind of job, `user` whose it is; a job takes as long as
//! from start to end. Jobs without a GPU, jobs that never started and jobs that ended before they
//! started are left out and counted.

use policy::cluster::{Job, UserId};

use super::clock::Clock;
use super::recorded::Recorded;
use super::table::{Table, TraceError};
use super::{BACKWARDS, NO_GPU, Options, Trace, UNRECORDED, kind};

/// The columns of both clusters.
const PUBLISHED: &[&str] = &[
    "job_id",
    "user",
    "node_num",
    "gpu_num",
    "cpu_num",
    "type",
    "state",
    "submit_time",
    "start_time",
    "end_time",
    "duration",
    "queue",
    "gpu_time",
    "mem_per_pod_GB",
    "shared_mem_per_pod",
    "fail_time",
    "stop_time",
];

pub(super) fn read(table: Table, options: &Options) -> Result<Trace, TraceError> {
    let mut trace = Trace {
        unused: table.others(PUBLISHED)?,
        ..Trace::default()
    };
    let [gpus, user, what, submit, start, end] = [
        table.column("gpu_num")?,
        table.column("user")?,
        table.column("type")?,
        table.column("submit_time")?,
        table.column("start_time")?,
        table.column("end_time")?,
    ];
    let mut clock = Clock::default();
    table.each(|row| {
        let name = row.text(user)?;
        if options.part.as_deref().is_some_and(|part| part != name) {
            return Ok(());
        }
        let wanted = row.gpu_parts(gpus, 1.0)?;
        if wanted == 0.0 {
            trace.leave_out(NO_GPU);
            return Ok(());
        }
        let submit_s = row.calendar(submit, &mut clock)?;
        if row.is_empty(start) || row.is_empty(end) {
            trace.leave_out(UNRECORDED);
            return Ok(());
        }
        let from_s = row.calendar(start, &mut clock)?;
        let to_s = row.calendar(end, &mut clock)?;
        if from_s < submit_s || to_s < from_s {
            trace.leave_out(BACKWARDS);
            return Ok(());
        }
        if wanted.fract() != 0.0 {
            return Err(row.wrong(gpus, "a whole number of GPUs is expected"));
        }
        let kind = kind(&mut trace.kinds, row.text(what)?);
        // CAST: a whole number of at most 65,536.
        let mut job = Job::rigid(kind, wanted as u32, submit_s, (to_s - from_s).max(1.0));
        job.user = UserId(trace.users.number(name));
        trace.jobs.push(job);
        trace.recorded.push(Recorded {
            gpus: wanted,
            submit_s,
            runs: vec![[from_s, to_s]],
        });
        Ok(())
    })?;
    trace.count_from_first_arrival();
    Ok(trace)
}
