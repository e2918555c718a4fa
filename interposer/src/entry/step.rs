//! What a program says about its iterations.

use crate::gate::signature;
use crate::{recording, residency};

/// The program says that an iteration has ended. Callable from any thread, at any time; costs a
/// clock reading and a few stores, and does nothing where no arbiter asks.
///
/// Returns 1 where the step was noted, else 0.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub extern "C" fn sublet_step() -> i32 {
    let noted = std::panic::catch_unwind(|| {
        recording::step();
        let noted = signature::note_step();
        if noted {
            residency::iteration_ended();
        }
        noted
    });
    i32::from(matches!(noted, Ok(true)))
}
