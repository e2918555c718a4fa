//! The readable log: one line per event on stderr, which `sublet run` points to `arbiter.log`.

use tracing_subscriber::EnvFilter;

/// Names the levels, as in `SUBLET_LOG=debug` or `SUBLET_LOG=arbiter=trace`; information and above where it is not set.
const FILTER_VAR: &str = "SUBLET_LOG";

/// Sends what the arbiter logs to stderr. For the process that is an arbiter; a second call does nothing.
pub fn log_to_stderr() {
    let filter = EnvFilter::try_from_env(FILTER_VAR).unwrap_or_else(|_| EnvFilter::new("info"));
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .with_target(false)
        .try_init();
}
