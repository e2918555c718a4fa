//! Numbers of threads in a recording.
//!
//! A job may start any number of threads, a server one for each request. The file has 16 bits for a
//! thread's number, and a replay starts a thread for each. So a new thread takes over the number of
//! one that has not called for the longest time, once [`MOST`] are given out. A thread that calls
//! again after its number has passed on gets another one: no call is left out.

use std::collections::HashMap;

/// Numbers that are given out before one passes on to another thread.
const MOST: usize = 4096;

/// A thread of the job: the number of its process in the ring, and its own.
type Caller = (u16, u32);

#[derive(Debug, Clone, Copy)]
struct Number {
    of: Caller,
    /// When its last call ended, by the clock of the recording.
    ended_ns: u64,
}

/// What a call has in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Assigned {
    pub thread: u16,
    /// Time since the last call under this number ended.
    pub gap_ns: u64,
}

#[derive(Default)]
pub struct Threads {
    numbers: HashMap<Caller, usize>,
    known: Vec<Number>,
}

impl Threads {
    /// The number for a call that began at `at_ns`, took `took_ns`, and came `gap_ns` after the
    /// last one of its thread.
    pub fn assign(&mut self, of: Caller, at_ns: u64, gap_ns: u64, took_ns: u64) -> Assigned {
        let ended_ns = at_ns.saturating_add(took_ns);
        if let Some(at) = self.numbers.get(&of).copied() {
            let number = &mut self.known[at];
            number.ended_ns = number.ended_ns.max(ended_ns);
            return assigned(at, gap_ns);
        }
        let number = Number { of, ended_ns };
        if self.known.len() < MOST {
            self.known.push(number);
            self.numbers.insert(of, self.known.len() - 1);
            return assigned(self.known.len() - 1, gap_ns);
        }
        let at = self.idle();
        let before = std::mem::replace(&mut self.known[at], number);
        self.numbers.remove(&before.of);
        self.numbers.insert(of, at);
        assigned(at, at_ns.saturating_sub(before.ended_ns))
    }

    /// The number whose last call ended first.
    fn idle(&self) -> usize {
        let numbers = self.known.iter().enumerate();
        let idle = numbers.min_by_key(|(_, number)| number.ended_ns);
        idle.map_or(0, |(at, _)| at)
    }
}

fn assigned(at: usize, gap_ns: u64) -> Assigned {
    Assigned {
        // CAST: below `MOST`.
        thread: at as u16 + 1,
        gap_ns,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn any_number_of_threads_is_recorded_and_those_that_go_on_keep_their_numbers() {
        let mut threads = Threads::default();
        let mut seen = BTreeSet::new();
        let stays = threads.assign((1, 1), 0, 0, 5);
        for thread in 2..100_000_u32 {
            let at_ns = u64::from(thread) * 100;
            seen.insert(threads.assign((1, thread), at_ns, 0, 10).thread);
            if thread % 100 == 0 {
                assert_eq!(
                    threads.assign((1, 1), at_ns + 50, 40, 5).thread,
                    stays.thread
                );
            }
        }
        println!("now: 100000 threads have {} numbers", seen.len() + 1);
        assert_eq!(seen.len() + 1, MOST);
        assert!(!seen.contains(&stays.thread) && threads.known.len() == MOST);
        assert_eq!(threads.numbers.len(), MOST);
    }

    #[test]
    fn a_number_that_passes_on_keeps_the_time_since_its_last_call() {
        let mut threads = Threads::default();
        // CAST: small.
        for thread in 0..MOST as u32 {
            assert_eq!(threads.assign((1, thread), 1000, 7, 500).gap_ns, 7);
        }
        let taken = threads.assign((1, 90_000), 4000, 0, 1);
        assert_eq!(taken.gap_ns, 2500);
        // Its owner before is a new thread now.
        // CAST: as above.
        let owner = u32::from(taken.thread - 1);
        let again = threads.assign((1, owner), 5000, 3500, 1);
        assert_ne!(again.thread, taken.thread);
        assert_eq!(threads.assign((2, owner), 6000, 0, 1).gap_ns, 4500);
    }
}
