//! How far a job is, looked at again and again, and the speed that this comes to.
//!
//! A counter is seen to change some time after it did, the same on average each time. So a speed is
//! what was counted between the first and the last change in the window, over the time between
//! these two, whatever lies before and behind them. A counter that begins anew (the arbiter finds
//! other iterations) is left out between the two looks.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

use regex_lite::Regex;

/// A busy host may keep a job from its work for so long, in seconds.
const STALL_S: f64 = 0.5;

/// The window is divided into so many parts, where it has enough changes.
const PARTS: usize = 10;

/// A job's counter at moments of the window: seconds, and what it counted.
#[derive(Debug, Clone, Default)]
pub struct Samples {
    pub seen: Vec<(f64, f64)>,
}

/// What samples come to.
#[derive(Debug, Clone, PartialEq)]
pub struct Speed {
    /// Units in a second.
    pub speed: f64,
    pub parts: Vec<f64>,
}

impl Samples {
    pub fn add(&mut self, seconds: f64, counted: f64) {
        self.seen.push((seconds, counted));
    }

    /// # Errors
    /// Why there is no speed, in words.
    pub fn speed(&self, unit: &str) -> Result<Speed, String> {
        let changes = self.changes();
        let (Some(first), Some(last)) = (changes.first(), changes.last()) else {
            return Err(format!("made no progress in the window (0 {unit})"));
        };
        if changes.len() < 3 {
            let made = self.seen.last().map_or(0.0, |last| last.1)
                - self.seen.first().map_or(0.0, |first| first.1);
            return Err(format!(
                "made too little progress to be timed ({made} {unit} in the window): measure for longer"
            ));
        }
        // One that stands still at an end of the window has no such speed.
        let ends = self.seen.first().zip(self.seen.last());
        let (begin, end) = ends.map_or((0.0, 0.0), |(begin, end)| (begin.0, end.0));
        let gaps = changes.windows(2).map(|two| two[1].0 - two[0].0);
        let longest = gaps.fold(0.0, f64::max).max((end - begin) / 15.0);
        let still = (first.0 - begin).max(end - last.0);
        if still > (3.0 * longest).max(STALL_S) {
            return Err(format!(
                "stood still for {still:.1} s of the window of {:.1} s (steps of its {unit} took {longest:.2} s at most)",
                end - begin
            ));
        }
        let (mut counted, mut seconds) = (0.0, 0.0);
        for two in changes.windows(2) {
            // PANIC: windows of two.
            let (from, to) = (two[0], two[1]);
            if to.1 > from.1 {
                counted += to.1 - from.1;
                seconds += to.0 - from.0;
            }
        }
        if seconds <= 0.0 {
            return Err(format!("its count of {unit} began anew at each look"));
        }
        // CAST: few.
        let count = PARTS.min((changes.len() - 1) / 2);
        let each = (last.0 - first.0) / count as f64;
        let parts = (0..count).map(|part| {
            let from = first.0 + each * part as f64;
            (value_at(&changes, from + each) - value_at(&changes, from)) / each
        });
        let is_whole = changes.windows(2).all(|two| two[1].1 > two[0].1);
        Ok(Speed {
            speed: counted / seconds,
            parts: match is_whole && count > 1 {
                true => parts.collect(),
                false => Vec::new(),
            },
        })
    }

    /// Where the counter was seen to have changed.
    fn changes(&self) -> Vec<(f64, f64)> {
        let pairs = self.seen.windows(2);
        pairs
            .filter(|two| two[0].1 != two[1].1)
            .map(|two| two[1])
            .collect()
    }
}

/// Between two changes it is thought to count evenly.
fn value_at(changes: &[(f64, f64)], seconds: f64) -> f64 {
    let after = changes.partition_point(|change| change.0 < seconds);
    match (after.checked_sub(1), changes.get(after)) {
        (Some(before), Some(to)) => {
            let from = changes[before];
            from.1 + (to.1 - from.1) * (seconds - from.0) / (to.0 - from.0)
        }
        (None, Some(to)) => to.1,
        (before, None) => before.map_or(0.0, |before| changes[before].1),
    }
}

/// Reads a file that a job writes, line by line as far as it has come, and keeps the last number
/// that was found.
#[derive(Debug)]
pub struct Lines {
    file: File,
    regex: Regex,
    /// A line that has no end yet.
    begun: Vec<u8>,
    /// That line is too long to be one that is looked for.
    is_long: bool,
    pub last: Option<f64>,
}

/// A longer line is passed over.
const LINE_MOST: usize = 1 << 16;
/// What is read at a look, at most.
const LOOK_MOST: u64 = 16 << 20;

impl Lines {
    /// # Errors
    /// A file that cannot be opened.
    ///
    /// # Panics
    /// Where the pattern is none; the plan has checked it.
    pub fn open(path: &Path, pattern: &str) -> io::Result<Self> {
        Ok(Self {
            file: File::open(path)?,
            regex: Regex::new(pattern).expect("a checked pattern"),
            begun: Vec::new(),
            is_long: false,
            last: None,
        })
    }

    /// Reads what is new.
    ///
    /// # Errors
    /// A disk that does not give it back.
    pub fn look(&mut self) -> io::Result<()> {
        let mut new = Vec::new();
        (&mut self.file).take(LOOK_MOST).read_to_end(&mut new)?;
        let mut lines = new.split(|b| *b == b'\n').peekable();
        while let Some(part) = lines.next() {
            let is_end = lines.peek().is_some();
            if self.begun.len() + part.len() > LINE_MOST {
                self.is_long = true;
                self.begun.clear();
            } else if !self.is_long {
                self.begun.extend_from_slice(part);
            }
            if is_end {
                if !std::mem::take(&mut self.is_long) {
                    self.line();
                }
                self.begun.clear();
            }
        }
        Ok(())
    }

    fn line(&mut self) {
        let text = String::from_utf8_lossy(&self.begun);
        let number = self.regex.captures(&text).and_then(|found| found.get(1));
        let number = number.and_then(|found| found.as_str().replace(',', "").parse::<f64>().ok());
        if let Some(number) = number.filter(|number| number.is_finite()) {
            self.last = Some(number);
        }
    }
}

/// The last lines of a file, for a person: 20 of them and 2000 characters at most.
pub fn last_lines(path: &Path) -> String {
    const BYTES: u64 = 8192;
    let read = || -> io::Result<Vec<u8>> {
        let mut file = File::open(path)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(BYTES)))?;
        let mut bytes = Vec::new();
        file.take(BYTES).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let bytes = read().unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    // Colours and the like are not for a report.
    let plain: String = text
        .chars()
        .filter(|c| *c == '\n' || *c == '\t' || !c.is_control())
        .collect();
    let lines: Vec<&str> = plain.lines().collect();
    let last = lines[lines.len().saturating_sub(20)..].join("\n");
    let skipped = last.chars().count().saturating_sub(2000);
    last.chars().skip(skipped).collect()
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn samples(seen: impl IntoIterator<Item = (f64, f64)>) -> Samples {
        Samples {
            seen: seen.into_iter().collect(),
        }
    }

    #[test]
    fn a_speed_is_what_was_counted_between_two_changes() {
        // 20 a second, looked at 10 times a second.
        let steady = samples((0..=50).map(|at| (f64::from(at) / 10.0, f64::from(2 * at))));
        let speed = steady.speed("steps").unwrap();
        assert!((speed.speed - 20.0).abs() < 1e-9, "{speed:?}");
        assert_eq!(speed.parts.len(), 10);
        for part in speed.parts {
            assert!((part - 20.0).abs() < 1e-9, "{part}");
        }
        // Once a second 1000 more, seen late by up to 0.1 s: the window's ends do not matter.
        let slow = (0..=50).map(|at| {
            let seconds = 0.04 + f64::from(at) / 10.0;
            (seconds, 1000.0 * (seconds + 0.37).floor())
        });
        let speed = samples(slow).speed("steps").unwrap();
        assert!((speed.speed / 1000.0 - 1.0).abs() < 0.03, "{speed:?}");
        assert_eq!(speed.parts.len(), 2, "{speed:?}");
    }

    #[test]
    fn a_count_that_begins_anew_is_left_out_there() {
        let seen = (0..20).map(|at| (f64::from(at), f64::from((at % 10) * 5)));
        let speed = samples(seen).speed("iterations").unwrap();
        assert!((speed.speed - 5.0).abs() < 1e-9, "{speed:?}");
        assert!(speed.parts.is_empty());
    }

    #[test]
    fn too_little_progress_is_no_speed() {
        let none = samples([(0.0, 7.0), (1.0, 7.0)])
            .speed("steps")
            .unwrap_err();
        assert!(
            none.contains("no progress") && none.contains("steps"),
            "{none}"
        );
        let little = samples([(0.0, 7.0), (1.0, 8.0), (2.0, 9.0)]).speed("steps");
        let little = little.unwrap_err();
        assert!(
            little.contains("2 steps") && little.contains("longer"),
            "{little}"
        );
        assert!(samples([]).speed("steps").is_err());
    }

    #[test]
    fn a_job_that_stands_still_at_an_end_has_no_speed() {
        let seen = |from: f64, to: f64| {
            let at = (0..=50).map(|at| f64::from(at) / 10.0);
            samples(at.map(|seconds| (seconds, (seconds.clamp(from, to) * 10.0).round())))
        };
        assert!(seen(0.0, 5.0).speed("steps").is_ok());
        assert!(
            seen(0.5, 4.5).speed("steps").is_ok(),
            "within what noise does"
        );
        for (from, to) in [(0.0, 3.0), (2.0, 5.0)] {
            let error = seen(from, to).speed("steps").unwrap_err();
            assert!(error.contains("stood still for 2"), "{error}");
        }
    }

    #[test]
    fn numbers_are_found_in_whole_lines_as_they_come() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out");
        let mut file = File::create(&path).unwrap();
        let mut lines = Lines::open(&path, "step ([0-9,.]+)").unwrap();
        let mut after = |text: &[u8]| {
            file.write_all(text).unwrap();
            lines.look().unwrap();
            lines.last
        };
        assert_eq!(after(b"epoch 1\nstep 1"), None, "no line yet");
        assert_eq!(after(b"2 done\nnothing\n"), Some(12.0));
        assert_eq!(after(b"step 1,200.5\n\xff\xfe\n"), Some(1200.5));
        assert_eq!(after(b"step ...\n"), Some(1200.5), "no number");
        let long = [&vec![b'x'; LINE_MOST][..], b" step 99\nstep 1300\n"].concat();
        assert_eq!(after(&long), Some(1300.0));
        let long = vec![b'x'; LINE_MOST + 1];
        assert_eq!(after(&long), Some(1300.0));
        assert_eq!(after(b" step 98\n"), Some(1300.0), "of a line too long");
        assert_eq!(after(b"step 1400\n"), Some(1400.0));
    }

    #[test]
    fn last_lines_are_few_and_plain() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("err");
        let text: String = (0..100)
            .map(|line| format!("\x1b[31mline {line}\n"))
            .collect();
        std::fs::write(&path, text).unwrap();
        let last = last_lines(&path);
        assert_eq!(last.lines().count(), 20);
        assert!(
            last.ends_with("line 99") && !last.contains('\x1b'),
            "{last}"
        );
        std::fs::write(&path, "x".repeat(9000)).unwrap();
        assert_eq!(last_lines(&path).len(), 2000);
        assert_eq!(last_lines(&dir.path().join("none")), "");
    }
}
