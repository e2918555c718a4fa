//! `sublet set`: a running job's quota, share or class.

use anyhow::anyhow;
use control::paths::{RuntimeDir, Surroundings};
use control::{Change, ClientError, JobStatus, exact_bytes};

use crate::args::Set;
use crate::connect::{self, Unreachable};
use crate::exit::Result;

/// What to print.
///
/// # Errors
/// Nothing to change, no arbiter, or the arbiter's refusal.
pub fn set(args: &Set) -> Result<String> {
    let change = Change {
        mem: args.mem,
        share: args.share,
        class: args.class,
        solo_iteration_us: args.solo_iteration_us,
    };
    if change.is_empty() {
        return Err(anyhow!(
            "nothing to change on `{}`: give --mem, --share, --class or --solo-iteration-us",
            args.name
        )
        .into());
    }
    let dir = RuntimeDir::find(&Surroundings::of_this_process())?;
    let job = connect::ask(
        || connect::existing(&dir),
        |arbiter| arbiter.set(&args.name, change),
    )
    .map_err(|error| match error {
        Unreachable::Client(ClientError::Refused(refusal)) => {
            anyhow!("the arbiter refused the change: {refusal}")
        }
        error => error.into(),
    })?;
    Ok(line_of(&job))
}

fn line_of(job: &JobStatus) -> String {
    format!(
        "{}: {}, share {}, memory limit {} ({} in use)\n",
        job.name,
        job.class,
        job.share_asked
            .map_or("not asked for".into(), |share| share.to_string()),
        job.mem_limit_bytes.map_or("none".into(), exact_bytes),
        exact_bytes(job.mem_used_bytes),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_tells_what_holds_now() {
        let mut job = JobStatus {
            name: "a".into(),
            share_asked: Some(0.5),
            mem_limit_bytes: Some(8 << 30),
            mem_used_bytes: 3 << 20,
            ..JobStatus::default()
        };
        assert_eq!(
            line_of(&job),
            "a: guaranteed, share 0.5, memory limit 8GiB (3MiB in use)\n"
        );
        job.share_asked = None;
        job.mem_limit_bytes = None;
        assert_eq!(
            line_of(&job),
            "a: guaranteed, share not asked for, memory limit none (3MiB in use)\n"
        );
    }
}
