//! Files that are written beside the loop: lines go into a queue of bounded size, and a thread of
//! its own writes them.
//!
//! A disk that takes its time, or is full, costs lines and nobody's turn. Lines that the queue or
//! the disk did not take are counted, and the count can be reported.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Lines that wait, and what they take together in bytes. A line alone may be longer.
const MOST_LINES: usize = 4096;
const MOST_BYTES: usize = 4 << 20;
/// TIMEOUT: what is still to be written in the end may take so long: a disk that is slow, and not
/// one that is gone.
const IN_THE_END: Duration = Duration::from_secs(2);

/// What writes a line.
pub type Sink = Box<dyn FnMut(&[u8]) -> io::Result<()> + Send>;

/// A queue of lines, and the thread that writes them.
#[derive(Debug)]
pub struct Writer {
    desk: Arc<Desk>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Desk {
    tray: Mutex<Tray>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Tray {
    lines: VecDeque<Vec<u8>>,
    bytes: usize,
    /// One is being written.
    writing: bool,
    /// No more will come.
    over: bool,
    /// Lines that nobody will read, since that was asked last, and why the last of them.
    lost: u64,
    why: Option<io::Error>,
}

impl Desk {
    /// A thread that panicked leaves a tray that is as good as any.
    fn tray(&self) -> MutexGuard<'_, Tray> {
        self.tray.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes what comes until there will be no more.
    fn write_all(&self, mut sink: Sink) {
        let mut tray = self.tray();
        loop {
            let Some(line) = tray.lines.pop_front() else {
                if tray.over {
                    return;
                }
                tray = self
                    .changed
                    .wait(tray)
                    .unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            tray.bytes -= line.len();
            tray.writing = true;
            drop(tray);
            let written = sink(&line);
            tray = self.tray();
            tray.writing = false;
            if let Err(error) = written {
                tray.lost += 1;
                tray.why = Some(error);
            }
            self.changed.notify_all();
        }
    }

    /// Waits until everything is written, `limit` at most; whether it is.
    fn settle(&self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        let mut tray = self.tray();
        while !tray.lines.is_empty() || tray.writing {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let waited = self.changed.wait_timeout(tray, left);
            (tray, _) = waited.unwrap_or_else(PoisonError::into_inner);
        }
        true
    }
}

/// Lines that nobody will read.
#[derive(Debug)]
pub struct Lost {
    /// How many.
    pub lines: u64,
    /// Why they could not be written; `None`: the queue was full, for the disk is slower than they
    /// came.
    pub why: Option<io::Error>,
}

impl Writer {
    /// Starts the thread.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(name: &str, sink: Sink) -> io::Result<Self> {
        let desk = Arc::new(Desk::default());
        let other = Arc::clone(&desk);
        let thread = std::thread::Builder::new()
            .name(name.into())
            .spawn(move || other.write_all(sink))?;
        Ok(Self {
            desk,
            thread: Some(thread),
        })
    }

    /// Has a line written, soon; false where the queue is full. Never waits for a disk.
    pub fn push(&self, line: Vec<u8>) -> bool {
        let mut tray = self.desk.tray();
        let full = tray.lines.len() >= MOST_LINES
            || (tray.bytes.saturating_add(line.len()) > MOST_BYTES && !tray.lines.is_empty());
        if full {
            tray.lost += 1;
            return false;
        }
        tray.bytes += line.len();
        tray.lines.push_back(line);
        drop(tray);
        self.desk.changed.notify_all();
        true
    }

    /// What was lost since this was asked last, once the report of it fits into the queue.
    pub fn take_lost(&self) -> Option<Lost> {
        let mut tray = self.desk.tray();
        let fits = tray.lines.len() < MOST_LINES / 2 && tray.bytes < MOST_BYTES / 2;
        if tray.lost == 0 || !fits {
            return None;
        }
        Some(Lost {
            lines: std::mem::take(&mut tray.lost),
            why: tray.why.take(),
        })
    }

    /// Waits until everything is written, `limit` at most; whether it is. Not for the loop.
    pub fn settle(&self, limit: Duration) -> bool {
        self.desk.settle(limit)
    }
}

impl Drop for Writer {
    /// What is there is written, as far as that takes no longer than [`IN_THE_END`].
    fn drop(&mut self) {
        let written = self.desk.settle(IN_THE_END);
        self.desk.tray().over = true;
        self.desk.changed.notify_all();
        // A thread that waits for a disk is left to it.
        if written && let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    /// A disk that writes a line when the test lets it.
    fn slow() -> (
        Writer,
        mpsc::Sender<io::Result<()>>,
        mpsc::Receiver<Vec<u8>>,
    ) {
        let (tell, reported) = mpsc::channel::<io::Result<()>>();
        let (wrote, written) = mpsc::channel();
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
        let (wrote, written) = mpsc::channel();
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
