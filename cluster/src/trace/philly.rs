//! Plain traces: when, how long, how many GPUs. `submit` may be seconds or a calendar time
//! (`2017-10-09 07:01:55`, with or without a zone); optional columns are `vc` or `user`, `model`,
//! `deadline_s` (absolute), what packers go by: `busy` (0 to 1), `mem_gib` of a device, `class`
//! (guaranteed or opportunistic), and `share`, the part of one GPU that a job asks for, with
//! `mem_gib` of it.

use policy::cluster::{Class, Job, Part, UserId};

use super::clock::Clock;
use super::table::{Table, TraceError};
use super::{Options, Trace, kind};

/// All columns of a plain trace.
const COLUMNS: &[&str] = &[
    "submit",
    "arrival_s",
    "duration_s",
    "num_gpus",
    "vc",
    "user",
    "model",
    "deadline_s",
    "busy",
    "mem_gib",
    "class",
    "share",
];

/// More memory than a device has, in GiB.
const MOST_GIB: f64 = 1024.0;

pub(super) fn read(table: Table, options: &Options) -> Result<Trace, TraceError> {
    let mut trace = Trace {
        unused: table.others(COLUMNS)?,
        ..Trace::default()
    };
    let mut clock = Clock::default();
    let plain = table.has("arrival_s");
    let arrival = table.column(if plain { "arrival_s" } else { "submit" })?;
    let (duration, gpus) = (table.column("duration_s")?, table.column("num_gpus")?);
    let user = table.optional("vc").or(table.optional("user"));
    let (model, deadline) = (table.optional("model"), table.optional("deadline_s"));
    let (busy, memory) = (table.optional("busy"), table.optional("mem_gib"));
    let (class, share) = (table.optional("class"), table.optional("share"));
    table.each(|row| {
        let user = user.map_or(Ok("all"), |user| row.text(user))?;
        if options.part.as_deref().is_some_and(|part| part != user) {
            return Ok(());
        }
        let name = model.map_or(Ok("job"), |model| row.text(model))?;
        let kind = kind(&mut trace.kinds, name);
        let arrival_s = if plain {
            row.seconds(arrival)?
        } else {
            row.time(arrival, &mut clock)?
        };
        let mut job = Job::rigid(kind, row.gpus(gpus)?, arrival_s, row.seconds(duration)?);
        job.user = UserId(trace.users.number(user));
        if let Some(deadline) = deadline.filter(|deadline| !row.is_empty(*deadline)) {
            job.deadline_s = Some(row.seconds(deadline)?);
        }
        if let Some(busy) = busy.filter(|busy| !row.is_empty(*busy)) {
            let fraction = row.number(busy)?;
            if fraction > 1.0 {
                return Err(row.wrong(busy, "a part of the time, 0 to 1, is expected"));
            }
            job.profile.busy = fraction;
        }
        if let Some(memory) = memory.filter(|memory| !row.is_empty(*memory)) {
            let gib = row.number(memory)?;
            if gib > MOST_GIB {
                return Err(row.wrong(
                    memory,
                    "memory of a device in GiB, at most 1024, is expected",
                ));
            }
            // CAST: at most a TiB.
            job.profile.persistent_bytes = (gib * f64::from(1 << 30)) as u64;
        }
        if let Some(class) = class.filter(|class| !row.is_empty(*class)) {
            job.profile.class = match row.text(class)? {
                "guaranteed" => Class::Guaranteed,
                "opportunistic" => Class::Opportunistic,
                _ => return Err(row.wrong(class, "guaranteed or opportunistic is expected")),
            };
        }
        if let Some(share) = share.filter(|share| !row.is_empty(*share)) {
            let part = row.number(share)?;
            if !(part > 0.0 && part < 1.0) {
                let expected = "a part of one GPU, above 0 and below 1, is expected";
                return Err(row.wrong(share, expected));
            }
            if job.gpus > 1 {
                return Err(row.wrong(share, "a job on one GPU asks for a part of it, no other"));
            }
            job.part = Some(Part {
                share: part,
                bytes: job.profile.persistent_bytes,
            });
        }
        trace.jobs.push(job);
        Ok(())
    })?;
    if !plain {
        trace.count_from_first_arrival();
    }
    Ok(trace)
}
