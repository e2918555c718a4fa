//! Waiting until there may be something new in a directory, without looking again and again.
//!
//! The kernel reports what is written there (inotify). Where it cannot, and for what it does not
//! see, everything is looked at once a second.

use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};

/// TIMEOUT: a file system that reports nothing (NFS), or a directory that was made anew, is noticed
/// after this long.
const LOOK: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub struct Wake(Option<Inotify>);

impl Wake {
    pub fn new() -> Self {
        // Where a user has no more of them, a look a second has to do.
        Self(Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK).ok())
    }

    /// Watches a directory; one that is watched already stays so.
    pub fn watch(&self, dir: &Path) {
        let flags =
            AddWatchFlags::IN_MODIFY | AddWatchFlags::IN_CREATE | AddWatchFlags::IN_MOVED_TO;
        if let Some(inotify) = &self.0 {
            // One that is not there is looked for again.
            let _ = inotify.add_watch(dir, flags);
        }
    }

    /// Waits until a file whose name begins with `name` has changed, a second at most. False:
    /// nobody reads what is printed any more.
    pub fn wait(&self, name: &str) -> bool {
        let until = Instant::now() + LOOK;
        let stdout = io::stdout();
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return true;
            }
            let mut fds = vec![PollFd::new(stdout.as_fd(), PollFlags::empty())];
            if let Some(inotify) = &self.0 {
                fds.push(PollFd::new(inotify.as_fd(), PollFlags::POLLIN));
            }
            // Rounded up: less than a millisecond would be no wait.
            let ms = u16::try_from(left.as_millis() + 1).unwrap_or(u16::MAX);
            if poll(&mut fds, PollTimeout::from(ms)).is_err_and(|errno| errno != Errno::EINTR) {
                // It is not known, so it is waited for.
                std::thread::sleep(left);
                return true;
            }
            let gone = PollFlags::POLLERR | PollFlags::POLLHUP | PollFlags::POLLNVAL;
            if fds[0]
                .revents()
                .is_some_and(|events| events.intersects(gone))
            {
                return false;
            }
            if self.has_changed(name) {
                return true;
            }
        }
    }

    /// Takes all that the kernel has to report.
    fn has_changed(&self, name: &str) -> bool {
        let mut any = false;
        while let Some(Ok(events)) = self.0.as_ref().map(Inotify::read_events) {
            any |= events.iter().any(|event| match &event.name {
                Some(changed) => changed.as_encoded_bytes().starts_with(name.as_bytes()),
                // The directory itself, or more than the kernel keeps.
                None => true,
            });
        }
        any
    }
}
