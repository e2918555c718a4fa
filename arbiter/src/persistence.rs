//! What outlives this process: the numbers that are never used twice, and when the state is
//! written.
//!
//! Owns the number of this incarnation, the next number of a job or a client, the file of the
//! state, and the time of its next write. A state that is old is written soon: at once where
//! somebody waits for it, else not too often, since putting it together takes longer the more jobs
//! there are. Nobody on the loop waits for the disk.

use std::os::fd::BorrowedFd;
use std::time::Duration;

use crate::state::{State, StateFile};

/// How often the state is saved at most where nobody waits for it.
const SAVE_NS: u64 = 50_000_000;
/// It takes a twentieth of the loop's time at most.
const REST: u64 = 20;

/// See the module's documentation.
#[derive(Debug)]
pub struct Persistence {
    file: StateFile,
    epoch: u64,
    next_id: u64,
    is_old: bool,
    /// It is not saved again before that, unless somebody waits for it.
    again_ns: u64,
}

impl Persistence {
    /// Of the incarnation after the one that has left `state`. Nothing is saved yet.
    pub fn after(state: &State, file: StateFile) -> Self {
        Self {
            file,
            epoch: state.epoch + 1,
            next_id: state.next_id.max(1),
            is_old: true,
            again_ns: 0,
        }
    }

    /// The number of this incarnation.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// A number that nothing else has, or will have.
    pub fn new_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    /// A job from before has this number: no other one gets it.
    pub fn has_id(&mut self, id: u64) {
        self.next_id = self.next_id.max(id + 1);
    }

    /// What is to be saved has changed.
    pub fn mark_old(&mut self) {
        self.is_old = true;
    }

    /// When a state is to be saved; `None`: the newest one is as good as written.
    pub fn due_ns(&self, is_waited_for: impl FnOnce() -> bool) -> Option<u64> {
        let wait_ns = || if is_waited_for() { 0 } else { self.again_ns };
        self.is_old.then(wait_ns)
    }

    /// A state with the numbers, for the rest to be filled in.
    pub fn numbers(&self) -> State {
        State {
            epoch: self.epoch,
            next_id: self.next_id,
            ..State::default()
        }
    }

    /// Has a state written, beside the loop; its number, for [`has`](Self::has).
    pub fn save(&mut self, state: State) -> u64 {
        self.is_old = false;
        self.file.save(state)
    }

    /// A state was saved at `now_ns`, and putting it together took so long.
    pub fn rest(&mut self, now_ns: u64, took_ns: u64) {
        self.again_ns = now_ns + SAVE_NS.max(took_ns.saturating_mul(REST));
    }

    /// Whether the state of that number is in the file, or would be if it could be written. 0
    /// stands for one that was not saved.
    pub fn has(&self, number: u64) -> bool {
        number != 0 && number <= self.file.done()
    }

    /// Readable when a state was written.
    pub fn bell(&self) -> BorrowedFd<'_> {
        self.file.bell()
    }

    /// Silences the bell. What it rang for is asked after this.
    pub fn answer_bell(&self) {
        self.file.answer_bell();
    }

    /// Waits until everything is written, `limit` at most. Not for the loop.
    pub fn settle(&self, limit: Duration) -> bool {
        self.file.settle(limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::writer::IN_THE_END;

    fn after(state: &State) -> (tempfile::TempDir, Persistence) {
        let dir = tempfile::tempdir().expect("directory");
        let file = StateFile::start(
            dir.path().join("state.json"),
            crate::premises::Title::unquestioned(dir.path()),
        )
        .expect("a thread");
        (dir, Persistence::after(state, file))
    }

    #[test]
    fn no_number_is_used_twice() {
        let (_dir, mut first) = after(&State::default());
        let ids = [first.new_id(), first.new_id()];
        let (_dir, mut second) = after(&first.numbers());
        assert!(second.epoch() > first.epoch());
        assert!(!ids.contains(&second.new_id()));
        second.has_id(90);
        assert!(second.new_id() > 90);
    }

    #[test]
    fn an_old_state_is_saved_soon_and_at_once_where_somebody_waits() {
        let (_dir, mut persistence) = after(&State::default());
        assert_eq!(persistence.due_ns(|| false), Some(0));
        let number = persistence.save(persistence.numbers());
        persistence.rest(1000, 1);
        assert_eq!(persistence.due_ns(|| true), None);
        persistence.mark_old();
        assert_eq!(persistence.due_ns(|| false), Some(1000 + SAVE_NS));
        assert_eq!(persistence.due_ns(|| true), Some(0));
        persistence.rest(1000, SAVE_NS);
        let slower_ns = 1000 + SAVE_NS * REST;
        assert_eq!(persistence.due_ns(|| false), Some(slower_ns));
        assert!(!persistence.has(0) && !persistence.has(number + 1));
        assert!(persistence.settle(IN_THE_END * 60) && persistence.has(number));
    }
}
