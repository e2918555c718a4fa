//! How the programs start and end: arguments, one line per error, exit codes.
//!
//! Exit codes: 0 done, 1 failed, 2 out of device memory, 64 wrong arguments.

use std::process::ExitCode;

use clap::Parser;

use crate::gpu::GpuError;

/// Parses the arguments and runs the program `name`.
pub fn main<Args: Parser>(name: &str, run: impl FnOnce(Args) -> anyhow::Result<()>) -> ExitCode {
    let args = match Args::try_parse() {
        Ok(args) => args,
        Err(error) => {
            // Help and version are no errors and go to stdout. A closed output is nobody's loss.
            let _ = error.print();
            return if error.use_stderr() {
                ExitCode::from(64)
            } else {
                ExitCode::SUCCESS
            };
        }
    };
    match run(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{name}: {error:#}");
            match error.downcast_ref::<GpuError>() {
                Some(
                    GpuError::OutOfMemory { .. }
                    | GpuError::Driver {
                        out_of_memory: true,
                        ..
                    },
                ) => ExitCode::from(2),
                _ => ExitCode::FAILURE,
            }
        }
    }
}

/// `samples` in ascending order at `part` (0 to 1), the nearest rank; 0 when there are none.
#[must_use]
pub fn percentile(sorted: &[f64], part: f64) -> f64 {
    // CAST: a rank in a list in memory.
    let rank = (part * sorted.len() as f64).ceil() as usize;
    sorted
        .get(rank.max(1) - 1)
        .or(sorted.last())
        .copied()
        .unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_nearest_ranks() {
        let samples: Vec<f64> = (1..=100).map(f64::from).collect();
        assert_eq!(
            [0.0, 0.5, 0.99, 1.0].map(|part| percentile(&samples, part)),
            [1.0, 50.0, 99.0, 100.0]
        );
        assert_eq!(percentile(&[7.0], 0.5), 7.0);
        assert_eq!(percentile(&[], 0.5), 0.0);
    }
}
