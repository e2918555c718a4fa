//! One client's launches: copies out of its rings what is new, has it searched for a period by a
//! thread of its own (a search takes milliseconds, and the reactor has none to give away), and
//! remembers the answer.
//!
//! Collecting costs a copy of some kilobytes every few milliseconds, so it is done by turns: until
//! the answer is certain, then a rest, then again, because programs change.

use crossbeam_channel::{Receiver, Sender, unbounded};
use std::path::{Path, PathBuf};

use channel::arbiter::ClientPages;
use channel::{KIND_BITS, SIGNATURE_RINGS};
use policy::iterations::{self, Found, HISTORY, Sequence};

use crate::tally::growth;

/// First search after so many launches; each further one when there are half as many again.
const FIRST: usize = 64;
/// A search of a chunk with something missing before and after it: at least that many.
const CHUNK: usize = 512;
/// How long a certain answer is left alone.
const REST_NS: u64 = 5_000_000_000;
/// Certain enough to rest.
const CERTAIN: f64 = 0.9;

/// For those who want to look at what is searched: a directory into which each history is written,
/// the latest of each thread. Numbers of 32 bits, little endian, oldest first.
const RECORD: &str = "SUBLET_RECORD_LAUNCHES";

fn write_down(directory: &Path, ask: &Ask) {
    let file = directory.join(format!("{}-{}.u32", ask.client, ask.slot));
    let bytes: Vec<u8> = ask
        .history
        .iter()
        .flat_map(|signature| signature.to_le_bytes())
        .collect();
    if let Err(error) = std::fs::write(&file, bytes) {
        tracing::warn!("{} cannot be written: {error}", file.display());
    }
}

/// The thread that searches. Ends when dropped.
#[derive(Debug)]
pub struct Detector {
    asks: Sender<Ask>,
    answers: Receiver<Answer>,
}

#[derive(Debug)]
struct Ask {
    client: u64,
    slot: usize,
    history: Vec<u32>,
}

/// What a search has found.
#[derive(Debug)]
pub struct Answer {
    /// Of which client.
    pub client: u64,
    slot: usize,
    length: usize,
    sequence: Sequence,
}

impl Detector {
    /// Starts the thread.
    ///
    /// # Errors
    /// Where no thread can be started.
    pub fn start() -> std::io::Result<Self> {
        let (asks, asked) = unbounded::<Ask>();
        let (answer, answers) = unbounded();
        std::thread::Builder::new()
            .name("iterations".into())
            .spawn(move || {
                // On Linux this is the calling thread's: searches come after everything else.
                let _ = rustix::process::nice(10);
                let record = std::env::var_os(RECORD).map(PathBuf::from);
                for ask in asked {
                    if let Some(directory) = &record {
                        write_down(directory, &ask);
                    }
                    let reported = answer.send(Answer {
                        client: ask.client,
                        slot: ask.slot,
                        length: ask.history.len(),
                        sequence: iterations::find(&ask.history, KIND_BITS),
                    });
                    if reported.is_err() {
                        return;
                    }
                }
            })?;
        Ok(Self { asks, answers })
    }

    /// Answers that have come.
    pub fn answers(&self) -> impl Iterator<Item = Answer> + '_ {
        self.answers.try_iter()
    }
}

/// What is known of a client's launches.
#[derive(Debug)]
pub struct Learner {
    threads: [Thread; SIGNATURE_RINGS],
}

#[derive(Debug, Default)]
struct Thread {
    /// Next launch to copy.
    next: u64,
    history: Vec<u32>,
    /// Search when the history is that long.
    at: usize,
    /// Something is being searched for.
    asked: bool,
    /// Left alone until then.
    rest_until_ns: u64,
    /// The last certain answer.
    known: Option<Sequence>,
    /// Answers in a row that contradict it.
    doubts: u32,
}

/// How a client was found.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Seen {
    /// It has submitted something since the last look.
    pub moves: bool,
    /// Its launches are being collected.
    pub collects: bool,
    /// Launches of its busiest ring since the last look.
    pub launches: u64,
}

impl Learner {
    /// Begins with what is submitted from now on.
    pub fn new(pages: &ClientPages) -> Self {
        let mut slot = 0;
        Self {
            threads: [(); SIGNATURE_RINGS].map(|()| {
                slot += 1;
                Thread {
                    next: pages.client.launches_of(slot - 1),
                    at: FIRST,
                    ..Thread::default()
                }
            }),
        }
    }

    /// Copies what is new, and has it searched where it is enough.
    pub fn look(
        &mut self,
        client: u64,
        pages: &ClientPages,
        now_ns: u64,
        detector: &Detector,
    ) -> Seen {
        let mut seen = Seen::default();
        let Some(page) = pages.signatures() else {
            return seen;
        };
        for (slot, thread) in self.threads.iter_mut().enumerate() {
            let launches = pages.client.launches_of(slot);
            let Some(new) = growth(thread.next, launches) else {
                thread.collect_anew();
                thread.next = launches;
                continue;
            };
            let Some(ring) = page.ring(slot).filter(|_| new > 0) else {
                continue;
            };
            seen.moves = true;
            seen.launches = seen.launches.max(new);
            if now_ns < thread.rest_until_ns {
                thread.next = launches;
                continue;
            }
            if thread.rest_until_ns != 0 {
                thread.collect_anew();
                thread.next = launches;
                continue;
            }
            seen.collects = true;
            let before = thread.history.len();
            let first = ring.copy(thread.next, launches, &mut thread.history);
            let whole = first == thread.next;
            thread.next = launches;
            if !whole {
                // Nothing before the gap can be joined to what comes after it.
                thread.history.drain(..before);
            }
            if thread.history.len() > 2 * HISTORY {
                let old = thread.history.len() - HISTORY;
                thread.history.drain(..old);
            }
            let enough =
                thread.history.len() >= thread.at || (!whole && thread.history.len() >= CHUNK);
            if enough && !thread.asked {
                let from = thread.history.len().saturating_sub(HISTORY);
                // PANIC: at most the length.
                let history = thread.history[from..].to_vec();
                thread.asked = detector
                    .asks
                    .send(Ask {
                        client,
                        slot,
                        history,
                    })
                    .is_ok();
            }
        }
        seen
    }

    /// Takes an answer.
    pub fn learn(&mut self, answer: &Answer, now_ns: u64) {
        if let Some(thread) = self.threads.get_mut(answer.slot) {
            thread.learn(answer.length, answer.sequence, now_ns);
        }
    }

    /// The thread by which iterations are counted, and its iteration: of those that repeat
    /// themselves the one that submits most.
    pub fn lead(&self, pages: &ClientPages) -> Option<(usize, Found)> {
        let periodic = self.threads.iter().enumerate();
        periodic
            .filter_map(|(slot, thread)| match thread.known {
                Some(Sequence::Periodic(found)) => Some((slot, found)),
                _ => None,
            })
            .max_by_key(|(slot, _)| pages.client.launches_of(*slot))
    }

    /// Whether it is known that the client does not repeat itself.
    pub fn irregular(&self, pages: &ClientPages) -> bool {
        let busiest = self
            .threads
            .iter()
            .enumerate()
            .max_by_key(|(slot, _)| pages.client.launches_of(*slot));
        busiest.is_some_and(|(_, thread)| matches!(thread.known, Some(Sequence::Irregular { .. })))
    }

    /// What was found does not fit what happens: begin anew.
    pub fn doubt(&mut self, slot: usize) {
        if let Some(thread) = self.threads.get_mut(slot) {
            thread.known = None;
            thread.collect_anew();
        }
    }
}

impl Thread {
    fn collect_anew(&mut self) {
        self.rest_until_ns = 0;
        self.history.clear();
        self.at = match self.known {
            Some(Sequence::Periodic(found)) => (8 * found.launches).clamp(FIRST, HISTORY),
            _ => FIRST,
        };
    }

    fn learn(&mut self, length: usize, sequence: Sequence, now_ns: u64) {
        self.asked = false;
        // All that a gap-free look can hold is as final as a full history.
        let full = length >= HISTORY || self.at > length;
        let certain = match (&sequence, &self.known) {
            (Sequence::TooShort, _) => false,
            (Sequence::Periodic(found), known) => {
                let same = matches!(known, Some(Sequence::Periodic(old)) if old.launches == found.launches);
                self.doubts = if same { 0 } else { self.doubts };
                let long = length >= (8 * found.launches).max(16 * FIRST);
                // An inner loop comes before the outer one is seen: the longer history is right.
                self.known = Some(sequence);
                found.confidence >= CERTAIN && long
            }
            (Sequence::Irregular { .. }, Some(Sequence::Periodic(old))) => {
                let telling = full || length >= 16 * old.launches.max(FIRST);
                self.doubts += u32::from(telling);
                if self.doubts >= 2 {
                    self.known = Some(sequence);
                }
                false
            }
            (Sequence::Irregular { .. }, _) => {
                if length >= 4 * FIRST {
                    self.known = Some(sequence);
                }
                false
            }
        };
        if certain || full {
            self.rest_until_ns = now_ns + REST_NS;
            self.history = Vec::new();
        } else {
            self.at = (length + length / 2).clamp(FIRST, HISTORY);
        }
    }
}

#[cfg(test)]
mod tests {
    use channel::SIGNATURE_SLOTS;

    use super::*;

    fn found(launches: usize, confidence: f64) -> Sequence {
        Sequence::Periodic(Found {
            launches,
            anchor: None,
            shapes: true,
            coverage: 1.0,
            repeats: 20,
            confidence,
        })
    }

    const IRREGULAR: Sequence = Sequence::Irregular { coverage: 0.4 };

    fn thread() -> Thread {
        Thread {
            at: FIRST,
            ..Thread::default()
        }
    }

    #[test]
    fn a_certain_answer_is_followed_by_a_rest() {
        let mut thread = thread();
        thread.learn(64, found(16, 0.75), 1);
        assert_eq!((thread.at, thread.rest_until_ns), (96, 0));
        thread.learn(1200, found(16, 0.98), 1);
        assert_eq!(thread.rest_until_ns, 1 + REST_NS);
        thread.collect_anew();
        assert_eq!(thread.at, 128);
    }

    #[test]
    fn one_contradiction_is_no_change_and_two_are() {
        let mut thread = thread();
        thread.learn(2000, found(16, 0.98), 1);
        thread.learn(2000, IRREGULAR, 2);
        assert!(matches!(thread.known, Some(Sequence::Periodic(_))));
        thread.learn(3000, IRREGULAR, 3);
        assert_eq!(thread.known, Some(IRREGULAR));
    }

    #[test]
    fn a_full_history_without_a_period_is_an_answer() {
        let mut thread = thread();
        thread.learn(64, IRREGULAR, 1);
        assert_eq!(thread.known, None, "too early");
        thread.learn(HISTORY, IRREGULAR, 1);
        assert_eq!(thread.known, Some(IRREGULAR));
        assert!(thread.rest_until_ns > 0);
    }

    /// Waits for what was asked.
    fn settle(learner: &mut Learner, detector: &Detector) {
        while learner.threads.iter().any(|thread| thread.asked) {
            let deadline = std::time::Duration::from_secs(60);
            let answer = detector.answers.recv_timeout(deadline).expect("an answer");
            learner.learn(&answer, 1);
        }
    }

    #[test]
    fn launches_are_collected_and_searched() {
        let mut pages = ClientPages::create().expect("pages");
        pages.ask_for_signatures().expect("page");
        let detector = Detector::start().expect("thread");
        let mut learner = Learner::new(&pages);
        let line = pages.client.thread(0);
        for launch in 0..1500u64 {
            let ring = pages
                .signatures()
                .and_then(|page| page.ring(0))
                .expect("ring");
            ring.record(launch, 1 + (launch % 10) as u32 * 4096);
            line.count_launch();
            if launch % 100 == 99 {
                let seen = learner.look(5, &pages, 1, &detector);
                assert!(seen.moves);
                assert_eq!(seen.launches, 100);
            }
            if launch % 300 == 299 {
                settle(&mut learner, &detector);
            }
        }
        let (slot, found) = learner.lead(&pages).expect("periodic");
        assert_eq!((slot, found.launches), (0, 10));
        assert!(!learner.irregular(&pages));
        learner.doubt(0);
        assert!(learner.lead(&pages).is_none());
    }

    #[test]
    fn a_ring_that_was_overrun_is_searched_in_chunks() {
        let mut pages = ClientPages::create().expect("pages");
        pages.ask_for_signatures().expect("page");
        let detector = Detector::start().expect("thread");
        let mut learner = Learner::new(&pages);
        let line = pages.client.thread(2);
        for launch in 0..5 * SIGNATURE_SLOTS as u64 {
            let ring = pages
                .signatures()
                .and_then(|page| page.ring(2))
                .expect("ring");
            ring.record(launch, 1 + (launch % 7) as u32 * 4096);
            line.count_launch();
        }
        learner.look(1, &pages, 1, &detector);
        settle(&mut learner, &detector);
        assert_eq!(
            learner.lead(&pages).map(|(_, found)| found.launches),
            Some(7)
        );
    }
}
