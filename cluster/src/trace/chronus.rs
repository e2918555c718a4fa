//! Chronus' Philly traces with deadlines (SoCC'21). Their unit is a minute; deadlines are relative
//! to the arrival.

use policy::Class;
use policy::cluster::{Job, UserId};

use super::table::{Table, TraceError};
use super::{Options, Trace, kind};

pub(super) fn read(table: Table, options: &Options) -> Result<Trace, TraceError> {
    let mut trace = Trace::default();
    let [vc, gpus, submit, model, duration, expect, job_type] = [
        table.column("vc")?,
        table.column("num_gpus")?,
        table.column("submit_min")?,
        table.column("model")?,
        table.column("duration_min")?,
        table.column("expect_time_list")?,
        table.column("job_type")?,
    ];
    table.each(|row| {
        let user = row.text(vc)?;
        if options.part.as_deref().is_some_and(|part| part != user) {
            return Ok(());
        }
        // Some jobs of the trace use no GPU at all: they wait for nobody, and nobody for them.
        if row.number(gpus)? == 0.0 {
            trace.skipped += 1;
            return Ok(());
        }
        let kind = kind(&mut trace.kinds, row.text(model)?);
        let arrival_s = 60.0 * row.seconds(submit)?;
        let duration_s = 60.0 * row.seconds(duration)?;
        let mut job = Job::rigid(kind, row.gpus(gpus)?, arrival_s, duration_s);
        job.user = UserId(trace.users.number(user));
        match row.text(job_type)? {
            "strict" => job.deadline_s = Some(arrival_s + 60.0 * row.seconds(expect)?),
            "best" => job.profile.class = Class::Opportunistic,
            _ => return Err(row.wrong(job_type, "`strict` or `best` is expected")),
        }
        trace.jobs.push(job);
        Ok(())
    })?;
    Ok(trace)
}
