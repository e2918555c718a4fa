//! The directory was made again: the loop moves to what is there now.

use serde_json::Value;

use crate::journal::About;
use crate::renewal::Renewed;
use crate::serve::Arbiter;

impl Arbiter {
    /// The directory was looked at.
    pub(crate) fn on_premises(&mut self, now_ns: u64) {
        let Some(amiss) = self.renewal.take(now_ns) else {
            return;
        };
        let what = amiss.what;
        let moved = amiss.renewed.and_then(|renewed| self.move_to(renewed));
        let message = match &moved {
            Ok(()) => format!("{what}: it was made again, and this arbiter serves it as before"),
            Err(why) => format!(
                "{what}, and cannot be made again: {why}. Jobs that run go on; their new processes and `sublet` do not reach this arbiter (process {})",
                std::process::id()
            ),
        };
        if self.renewal.is_new(&message) {
            tracing::warn!("{message}");
            let fields = [("renewed", Value::from(moved.is_ok()))];
            self.journal
                .write("directory", About::NONE, message, &fields);
        }
    }

    fn move_to(&mut self, renewed: Renewed) -> Result<(), String> {
        let Renewed {
            lock,
            listener,
            api,
            premises,
        } = renewed;
        self.api
            .serve_too(api)
            .and_then(|()| self.door.move_to(listener, &self.poller))
            .map_err(|error| error.to_string())?;
        if let Some(lock) = lock {
            self.lifetime.hold(lock);
        }
        self.renewal.move_to(premises);
        // The next arbiter looks for it there.
        self.persistence.mark_old();
        Ok(())
    }
}
