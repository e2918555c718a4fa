//! Files that are written beside the loop: lines go into a queue of bounded size, and a thread of
//! its own writes them.
//!
//! A disk that takes its time, or is full, costs lines and nobody's turn. Lines that the queue or
//! the disk did not take are counted, and the count can be reported.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};
use parking_lot::Mutex;

/// Lines that wait, and what they take together in bytes. A line alone may be longer.
const MOST_LINES: usize = 4096;
const MOST_BYTES: usize = 4 << 20;
/// TIMEOUT: what is still to be written in the end may take so long: a disk that is slow, and not
/// one that is gone.
pub(crate) const IN_THE_END: Duration = Duration::from_secs(2);

/// What writes a line.
pub type Sink = Box<dyn FnMut(&[u8]) -> io::Result<()> + Send>;

/// A queue of lines, and the thread that writes them.
#[derive(Debug)]
pub struct Writer {
    /// `None` in the end: no more will come.
    queue: Option<Sender<Entry>>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
enum Entry {
    Line(Vec<u8>),
    /// Who holds the other end waits until everything before this is written.
    Settled(Sender<()>),
}

#[derive(Debug, Default)]
struct Shared {
    /// Of the lines that wait.
    bytes: AtomicUsize,
    lost: Mutex<Lost>,
}

/// Lines that nobody will read.
#[derive(Debug, Default)]
pub struct Lost {
    /// How many.
    pub lines: u64,
    /// Why the last of them could not be written; `None`: the queue was full, for the disk is
    /// slower than they came.
    pub why: Option<io::Error>,
}

impl Shared {
    /// Writes what comes until there will be no more.
    fn write_all(&self, queue: &Receiver<Entry>, mut sink: Sink) {
        for entry in queue {
            match entry {
                Entry::Line(line) => {
                    // SYNC(bytes): a count and nothing else; no data is published by it.
                    self.bytes.fetch_sub(line.len(), Ordering::Relaxed);
                    if let Err(error) = sink(&line) {
                        let mut lost = self.lost.lock();
                        lost.lines += 1;
                        lost.why = Some(error);
                    }
                }
                Entry::Settled(tell) => drop(tell.send(())),
            }
        }
    }
}

impl Writer {
    /// Starts the thread.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(name: &str, sink: Sink) -> io::Result<Self> {
        let (queue, entries) = bounded(MOST_LINES);
        let shared = Arc::new(Shared::default());
        let other = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name(name.into())
            .spawn(move || other.write_all(&entries, sink))?;
        Ok(Self {
            queue: Some(queue),
            shared,
            thread: Some(thread),
        })
    }

    /// Has a line written, soon; false where the queue is full. Never waits for a disk.
    pub fn push(&self, line: Vec<u8>) -> bool {
        let bytes = line.len();
        let before = self.shared.bytes.fetch_add(bytes, Ordering::Relaxed);
        let fits = before == 0 || before.saturating_add(bytes) <= MOST_BYTES;
        let queue = self.queue.as_ref().filter(|_| fits);
        if queue.is_some_and(|queue| queue.try_send(Entry::Line(line)).is_ok()) {
            return true;
        }
        self.shared.bytes.fetch_sub(bytes, Ordering::Relaxed);
        self.shared.lost.lock().lines += 1;
        false
    }

    /// What was lost since this was asked last, once the report of it fits into the queue.
    pub fn take_lost(&self) -> Option<Lost> {
        let waiting = self.queue.as_ref().map_or(0, Sender::len);
        let fits =
            waiting < MOST_LINES / 2 && self.shared.bytes.load(Ordering::Relaxed) < MOST_BYTES / 2;
        let mut lost = self.shared.lost.lock();
        (lost.lines > 0 && fits).then(|| std::mem::take(&mut *lost))
    }

    /// Waits until everything is written, `limit` at most; whether it is. Not for the loop.
    pub fn settle(&self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        let (tell, settled) = bounded(1);
        self.queue.as_ref().is_some_and(|queue| {
            queue.send_deadline(Entry::Settled(tell), deadline).is_ok()
                && settled.recv_deadline(deadline).is_ok()
        })
    }
}

impl Drop for Writer {
    /// What is there is written, as far as that takes no longer than [`IN_THE_END`].
    fn drop(&mut self) {
        let written = self.settle(IN_THE_END);
        self.queue = None;
        // A thread that waits for a disk is left to it.
        if written && let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use crossbeam_channel::unbounded;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    /// A disk that writes a line when the test lets it.
    fn slow() -> (Writer, Sender<io::Result<()>>, Receiver<Vec<u8>>) {
        let (tell, reported) = unbounded::<io::Result<()>>();
        let (wrote, written) = unbounded();
        let sink = Box::new(move |line: &[u8]| {
            let result = reported.recv_timeout(PATIENCE).unwrap_or(Ok(()));
            let _ = wrote.send(line.to_vec());
            result
        });
        let writer = Writer::start("test", sink).expect("a thread");
        (writer, tell, written)
    }

    #[test]
    fn lines_are_written_in_order_and_in_the_end() {
        let (wrote, written) = unbounded();
        let sink = Box::new(move |line: &[u8]| {
            let _ = wrote.send(line.to_vec());
            Ok(())
        });
        let writer = Writer::start("test", sink).expect("a thread");
        for line in 0..200u8 {
            assert!(writer.push(vec![line]));
        }
        drop(writer);
        let all: Vec<Vec<u8>> = written.iter().collect();
        assert_eq!(all, (0..200).map(|line| vec![line]).collect::<Vec<_>>());
    }

    #[test]
    fn a_stalled_disk_costs_lines_and_no_time_and_the_loss_is_reported() {
        let (writer, tell, written) = slow();
        let through = (0..2 * MOST_LINES)
            .filter(|_| writer.push(vec![b'x']))
            .count();
        // One may be with the disk already.
        assert!(
            (MOST_LINES..=MOST_LINES + 1).contains(&through),
            "{through}"
        );
        assert!(!writer.settle(Duration::from_millis(1)));
        assert!(
            writer.take_lost().is_none(),
            "there is no space to report it"
        );
        for _ in 0..through {
            tell.send(Ok(())).expect("it listens");
            written.recv_timeout(PATIENCE).expect("written");
        }
        assert!(writer.settle(PATIENCE));
        let lost = writer.take_lost().expect("reported");
        assert_eq!(lost.lines, (2 * MOST_LINES - through) as u64);
        assert!(lost.why.is_none() && writer.take_lost().is_none());
    }

    #[test]
    fn what_waits_is_bounded_in_bytes_and_a_long_line_has_its_chance() {
        let (writer, tell, _written) = slow();
        let long = vec![b'x'; MOST_BYTES];
        let through = (0..4).filter(|_| writer.push(long.clone())).count();
        assert!((1..=2).contains(&through), "{through}");
        drop(tell);
        assert!(writer.settle(PATIENCE));
        assert!(writer.push(vec![b'x'; 2 * MOST_BYTES]));
    }

    #[test]
    fn what_cannot_be_written_is_counted_with_the_reason() {
        let (writer, tell, _written) = slow();
        for _ in 0..3 {
            assert!(writer.push(b"line".to_vec()));
        }
        for result in [Ok(()), Err(io::ErrorKind::StorageFull), Ok(())] {
            tell.send(result.map_err(Into::into)).expect("it listens");
        }
        assert!(writer.settle(PATIENCE));
        let lost = writer.take_lost().expect("reported");
        assert_eq!(lost.lines, 1);
        assert_eq!(
            lost.why.map(|why| why.kind()),
            Some(io::ErrorKind::StorageFull)
        );
    }
}
