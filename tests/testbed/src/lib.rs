//! What every test program of the workspace starts from: nothing that its caller happened to leave
//! behind, and no wait without a limit.
//!
//! A test program says `testbed::starts_clean!();` once, at its root. From then on signals,
//! environment, `umask`, limits and descriptors are the same whether it was started from a
//! terminal, by `nohup`, or by a build server ([`clean`]), and a test of its own shows it.
//! [`within`] has the waits, [`terminal`] a terminal with a program on it, [`http`] HTTP over a
//! socket, `tls` TLS, and [`dead_socket`] what a killed process leaves behind.
//!
//! It knows nothing of sublet and imports none of its crates.

mod clean;
pub mod http;
mod socket;
pub mod terminal;
#[cfg(feature = "tls")]
pub mod tls;
pub mod within;

pub use clean::prove;
pub use socket::dead_socket;
pub use within::{CommandWithin, PATIENCE, join, joined, read_line, reap};

/// Makes a test program start clean, and adds the test that shows it.
#[macro_export]
macro_rules! starts_clean {
    () => {
        #[cfg(test)]
        mod inherited {
            #[test]
            fn nothing_of_the_caller_reaches_the_tests() {
                $crate::prove(module_path!());
            }
        }
    };
}
