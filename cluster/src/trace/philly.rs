//! Plain traces: when, how long, how many GPUs. `submit` may be seconds or a calendar time
//! (`2017-10-09 07:01:55`); optional columns are `vc` or `user`, `model`, `deadline_s` (absolute),
//! what packers go by: `busy` (0 to 1), `mem_gib` of a device, `class` (guaranteed or
//! opportunistic), and `share`, the part of one GPU that a job asks for, with `mem_gib` of it.

use policy::cluster::{Class, Job, Part, UserId};

use super::table::{Column, Row, Table, TraceError};
use super::{Options, Trace, kind};

/// More memory than a device has, in GiB.
const MOST_GIB: f64 = 1024.0;

pub(super) fn read(table: Table, options: &Options) -> Result<Trace, TraceError> {
    let mut trace = Trace::default();
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
            row.number(arrival)?
        } else {
            calendar(row, arrival)?
        };
        let mut job = Job::rigid(kind, row.gpus(gpus)?, arrival_s, row.number(duration)?);
        job.user = UserId(trace.users.number(user));
        if let Some(deadline) = deadline.filter(|deadline| !row.is_empty(*deadline)) {
            job.deadline_s = Some(row.number(deadline)?);
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
    let first = trace.jobs.iter().map(|job| job.arrival_s);
    let first = if plain {
        0.0
    } else {
        first.fold(f64::MAX, f64::min)
    };
    for job in &mut trace.jobs {
        job.arrival_s -= first;
    }
    Ok(trace)
}

/// Seconds since 1970 of a calendar time without a zone.
fn calendar(row: &Row<'_>, column: Column) -> Result<f64, TraceError> {
    let text = row.text(column)?;
    if let Ok(seconds) = text.parse::<f64>()
        && seconds.is_finite()
        && seconds >= 0.0
    {
        return Ok(seconds);
    }
    let mut numbers = text.split(['-', ' ', ':', 'T']).map(str::parse::<i64>);
    let mut next = || match numbers.next() {
        Some(Ok(number)) if (0..10_000).contains(&number) => Ok(number),
        _ => Err(row.wrong(column, "a time such as 2017-10-09 07:01:55 is expected")),
    };
    let (year, month, day) = (next()?, next()?, next()?);
    let (hour, minute, second) = (next()?, next()?, next()?);
    // Days since 1970-01-01 of a Gregorian date (H. Hinnant, "chrono-compatible low-level date
    // algorithms").
    let year = year - i64::from(month <= 2);
    let era = year.div_euclid(400);
    let of_era = year.rem_euclid(400);
    let of_year = (153 * (month + if month > 2 { -3 } else { 9 }) + 2) / 5 + day - 1;
    let days = era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468;
    Ok((days * 86_400 + hour * 3600 + minute * 60 + second) as f64)
}
