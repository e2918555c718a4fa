//! Descriptors of this process, where there are few: some are kept back, so that a newcomer can be
//! given the reason when there are none left.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::process::{Resource, getrlimit};

/// Kept back: for a connection, what is known of its process, and the files that are opened for a
/// moment (state, journal, `/proc`).
const RESERVE: usize = 16;
/// The same where there are few: for a connection, its process, and one such file.
const SMALL_RESERVE: usize = 4;
/// What a client takes beside its connection, which is open already: its process and its job's
/// page. Its own pages are open for a moment only, while the reserve is given up.
const OF_CLIENT: usize = 2;
/// Where there are fewer, no pages are kept ready for the next client.
const FEW: u64 = 256;
/// Below this limit none is spent on what can be done without.
const FEWEST: u64 = 64;

/// What is kept back; a clone is the same. The loop and the API's thread take newcomers in with it.
/// Its lock is held for as long as a list is looked at.
#[derive(Clone, Debug, Default)]
pub struct Descriptors {
    reserve: Arc<Mutex<Vec<OwnedFd>>>,
}

impl Descriptors {
    /// Keeps some back, as far as there are any.
    pub fn keep(&self) {
        while self.count() < reserve(limit()) {
            match nothing() {
                Ok(fd) => self.reserve.lock().push(fd),
                Err(_) => return,
            }
        }
    }

    fn count(&self) -> usize {
        self.reserve.lock().len()
    }

    /// Gives up what was kept, so that a peer can be given a reason.
    pub fn give_up(&self) -> bool {
        let kept = std::mem::take(&mut *self.reserve.lock());
        !kept.is_empty()
    }

    /// Whether a client would leave the reserve alone.
    pub fn suffice(&self) -> bool {
        // Whatever the limit: the host has one as well, and who comes when the table is full is to
        // be given the reason.
        self.keep();
        self.count() >= reserve(limit())
            && (0..OF_CLIENT)
                .map(|_| nothing())
                .collect::<io::Result<Vec<OwnedFd>>>()
                .is_ok()
    }

    /// Whether there are so few that no pages are kept ready for the next client.
    pub fn are_too_few_for_spares() -> bool {
        below(FEW)
    }

    /// What a refused client is sent.
    pub fn lack() -> String {
        let limit = limit().map_or("no limit".into(), |limit| format!("a limit of {limit}"));
        format!(
            "the arbiter has no descriptors left for it ({limit}): start the arbiter with a higher `ulimit -n`, or wait until other processes have ended"
        )
    }

    /// The same where that is why something failed: between the look at what there is and its use
    /// others may have come.
    pub fn lack_behind(error: &(dyn std::error::Error + 'static)) -> Option<String> {
        let mut cause = Some(error);
        while let Some(error) = cause {
            if error.downcast_ref().is_some_and(Self::are_lacking) {
                return Some(Self::lack());
            }
            cause = error.source();
        }
        None
    }

    /// Whether an error means that there are none.
    pub fn are_lacking(error: &io::Error) -> bool {
        let lacking = [nix::libc::EMFILE, nix::libc::ENFILE];
        error
            .raw_os_error()
            .is_some_and(|errno| lacking.contains(&errno))
    }
}

/// Whether there are so few that one more of the arbiter's own is a job less.
pub fn are_fewest() -> bool {
    below(FEWEST)
}

fn below(number: u64) -> bool {
    limit().is_some_and(|most| most < number)
}

/// How many are kept back under a limit.
fn reserve(limit: Option<u64>) -> usize {
    match limit {
        Some(limit) if limit < FEW => SMALL_RESERVE,
        _ => RESERVE,
    }
}

/// How many there may be; `None`: as many as memory has space for.
pub fn limit() -> Option<u64> {
    getrlimit(Resource::Nofile).current
}

fn nothing() -> io::Result<OwnedFd> {
    let flags = rustix::event::EventfdFlags::CLOEXEC;
    Ok(rustix::event::eventfd(0, flags)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn some_are_kept_back_whatever_the_limit() {
        let most = getrlimit(Resource::Nofile);
        rustix::process::setrlimit(
            Resource::Nofile,
            rustix::process::Rlimit {
                current: most.maximum,
                maximum: most.maximum,
            },
        )
        .expect("as high as it may be");
        let descriptors = Descriptors::default();
        assert!(descriptors.suffice());
        let kept = descriptors.count();
        println!("now: {kept} kept back under a limit of {:?}", limit());
        assert_eq!(kept, reserve(limit()));
        assert!(descriptors.give_up(), "a newcomer can be given the reason");
        let kept = [Some(40), Some(1024), Some(1 << 17), Some(1 << 20), None].map(reserve);
        assert_eq!(kept, [4, 16, 16, 16, 16]);
    }

    #[test]
    fn what_was_kept_back_can_be_had_again() {
        let descriptors = Descriptors::default();
        assert!(!descriptors.give_up());
        descriptors.keep();
        assert_eq!(descriptors.count(), reserve(limit()));
        assert!(descriptors.give_up() && !descriptors.give_up());
        assert!(descriptors.suffice());
        let none = io::Error::from_raw_os_error(nix::libc::EMFILE);
        assert!(Descriptors::are_lacking(&none));
        assert!(Descriptors::lack().contains("ulimit -n"));
        let of_page = channel::PageError::Io("create", none);
        assert_eq!(
            Descriptors::lack_behind(&of_page),
            Some(Descriptors::lack())
        );
        assert_eq!(
            Descriptors::lack_behind(&channel::PageError::NotSealed),
            None
        );
    }
}
