//! Alibaba's trace of pods that share GPUs (openb, 2023): who asks for which part of how many GPUs.
//!
//! `gpu_milli` is what a pod asks of each of its GPUs, in thousandths: that is how busy it is taken
//! to keep them. `memory_mib` is memory of the host and says nothing about the device. Pods of
//! `qos` BE are opportunistic, all others guaranteed. Pods without a GPU are left out and counted.

use policy::cluster::{Class, Job};

use super::table::{Table, TraceError};
use super::{Options, Trace, kind};

/// A part of a GPU, in thousandths.
const WHOLE: f64 = 1000.0;

pub(super) fn read(table: Table, _: &Options) -> Result<Trace, TraceError> {
    const PART: &str = "thousandths of a GPU, 0 to 1000, are expected";
    const SPAN: &str = "a time that is not before creation_time is expected";
    let mut trace = Trace::default();
    let [gpus, milli, qos, from, to] = [
        table.column("num_gpu")?,
        table.column("gpu_milli")?,
        table.column("qos")?,
        table.column("creation_time")?,
        table.column("deletion_time")?,
    ];
    table.each(|row| {
        if row.number(gpus)? == 0.0 {
            trace.skipped += 1;
            return Ok(());
        }
        let (wanted, part) = (row.gpus(gpus)?, row.number(milli)?);
        if part > WHOLE {
            return Err(row.wrong(milli, PART));
        }
        let (from_s, to_s) = (row.seconds(from)?, row.seconds(to)?);
        if to_s < from_s {
            return Err(row.wrong(to, SPAN));
        }
        // A pod that asks for nothing of its GPU is not known to leave any of it.
        let busy = if part == 0.0 { 1.0 } else { part / WHOLE };
        let class = row.text(qos)?;
        let kind = kind(&mut trace.kinds, &format!("{wanted}x{part}"));
        let mut job = Job::rigid(kind, wanted, from_s, (to_s - from_s).max(1.0));
        job.profile.busy = busy;
        if class == "BE" {
            job.profile.class = Class::Opportunistic;
        }
        trace.jobs.push(job);
        Ok(())
    })?;
    Ok(trace)
}
