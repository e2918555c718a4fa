//! What an arbiter that a job has started inherits from that job, and puts back: it serves other
//! jobs, for longer than that one lives.
//!
//! One table ([`ROWS`]). Signals are the command's, which starts with none blocked. The control
//! group and the namespaces stay: only their owner may leave them.

use std::io;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// A thing that is inherited, and how it is put back.
struct Row {
    what: &'static str,
    reset: fn() -> io::Result<()>,
}

/// What is inherited. A limit is put at the highest that this user may have.
const ROWS: [Row; 11] = [
    Row {
        what: "the limit of processor time",
        reset: || raise(Resource::Cpu, None),
    },
    Row {
        what: "the limit of the size of files",
        reset: || raise(Resource::Fsize, None),
    },
    Row {
        what: "the limit of data",
        reset: || raise(Resource::Data, None),
    },
    Row {
        what: "the limit of the address space",
        reset: || raise(Resource::As, None),
    },
    Row {
        what: "the limit of locked memory",
        reset: || raise(Resource::Memlock, Some(u64::MAX)),
    },
    Row {
        what: "the limit of processes and threads",
        reset: || raise(Resource::Nproc, Some(u64::MAX)),
    },
    Row {
        what: "the limit of the stack",
        reset: || raise(Resource::Stack, Some(STACK)),
    },
    Row {
        what: "the nice value",
        reset: || Ok(rustix::process::setpriority_process(None, 0)?),
    },
    Row {
        what: "the processors that it may run on",
        reset: all_processors,
    },
    Row {
        what: "the preference of the kernel for ending it when memory is short",
        reset: || std::fs::write("/proc/self/oom_score_adj", "0"),
    },
    Row {
        what: "the mask of file modes",
        reset: || {
            use rustix::fs::Mode;
            rustix::process::umask(Mode::RWXG | Mode::RWXO);
            Ok(())
        },
    },
];

/// Of a stack, the usual limit.
const STACK: u64 = 8 << 20;

/// Puts back what the job had changed for itself. Says what could not be, for the log.
pub fn put_back() -> Vec<String> {
    let failed = ROWS.iter().filter_map(|row| {
        let error = (row.reset)().err()?;
        let what = row.what;
        Some(format!(
            "{what} is still that of the job that has started this arbiter: {error}"
        ))
    });
    failed.collect()
}

/// Raises a limit as far as its owner may. `most`: more is not wanted, and less is no failure;
/// `None`: anything but no limit is one.
fn raise(resource: Resource, most: Option<u64>) -> io::Result<()> {
    let Rlimit { current, maximum } = getrlimit(resource);
    let wanted = match (most, maximum) {
        (Some(most), Some(maximum)) => Some(most.min(maximum)),
        (Some(u64::MAX), None) | (None, None) => None,
        (Some(most), None) => Some(most),
        (None, Some(maximum)) => Some(maximum),
    };
    let is_less = current.is_some_and(|current| wanted.is_none_or(|wanted| current < wanted));
    if is_less {
        let limit = Rlimit {
            current: wanted,
            maximum,
        };
        setrlimit(resource, limit)?;
    }
    match wanted {
        Some(wanted) if most.is_none() => {
            Err(io::Error::other(format!("it may not be above {wanted}")))
        }
        _ => Ok(()),
    }
}

fn all_processors() -> io::Result<()> {
    use rustix::thread::{CpuSet, sched_setaffinity};
    let mut all = CpuSet::new();
    (0..CpuSet::MAX_CPU).for_each(|processor| all.set(processor));
    // The kernel leaves out those that its control group may not have.
    Ok(sched_setaffinity(None, &all)?)
}
