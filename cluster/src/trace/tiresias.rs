//! Tiresias' trace format (NSDI'19).

use policy::cluster::Job;

use super::table::{Table, TraceError};
use super::{Options, Trace, kind};

pub(super) fn read(table: Table, _: &Options) -> Result<Trace, TraceError> {
    let mut trace = Trace::default();
    let [gpus, submit, model, duration] = [
        table.column("num_gpu")?,
        table.column("submit_time")?,
        table.column("model_name")?,
        table.column("duration")?,
    ];
    table.each(|row| {
        let kind = kind(&mut trace.kinds, row.text(model)?);
        let (arrival_s, duration_s) = (row.seconds(submit)?, row.seconds(duration)?);
        trace
            .jobs
            .push(Job::rigid(kind, row.gpus(gpus)?, arrival_s, duration_s));
        Ok(())
    })?;
    Ok(trace)
}
