//! What a program asks us about its size: whether another one is wanted, and that it is ready for
//! that.
//!
//! Nothing is pushed into the program and nothing waits here: it looks where its state is whole, at
//! the end of an iteration, and that costs two loads and a store that is made once. Outside of a
//! job, without an arbiter, and in a forked child nothing is ever asked for.

use channel::Resize;
use channel::client::Liveness;

use crate::attachment::client::{self, Attached};
use crate::ground::errno::Preserve;

/// What is asked for; `None`: nothing, or by an arbiter that is gone, which will not stop anybody.
fn requested() -> Option<(&'static Attached, Resize)> {
    let attached = client::current()?;
    attached.end.client.listen_for_resize();
    let resize = attached.end.arbiter.resize()?;
    let _errno = Preserve::new();
    (!attached.is_lost() && attached.end.arbiter_liveness() != Liveness::Gone)
        .then_some((attached, resize))
}

/// With how many GPUs the job is to go on, once it has been stopped and started again: 0 for none
/// for now. Below 0: nobody asks.
///
/// Callable from any thread, at any time.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub extern "C" fn sublet_resize_requested() -> i32 {
    let asked = std::panic::catch_unwind(|| requested().map(|(_, resize)| i32::from(resize.gpus)));
    asked.ok().flatten().unwrap_or(-1)
}

/// The program says that all is saved and that it may be stopped for what it was asked for. It then
/// waits, in whatever way it likes, to be stopped, and goes on where nobody asks any more
/// ([`sublet_resize_requested`] below 0).
///
/// Returns 1 where that was noted, 0 where nothing is asked for.
#[cfg_attr(not(test), unsafe(no_mangle))]
pub extern "C" fn sublet_resize_ready() -> i32 {
    let noted = std::panic::catch_unwind(|| {
        let (attached, resize) = requested()?;
        attached.end.client.ready_for_resize(resize.number);
        Some(())
    });
    i32::from(matches!(noted, Ok(Some(()))))
}
