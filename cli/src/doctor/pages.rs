//! The pages in which the library and the simulated driver have counted calls.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde_json::{Value, json};
use shim_ffi::counts::{Note, RECEIVED, Reading, SEEN};

/// What one process has counted, over all programs that it has executed.
#[derive(Debug, Default, Clone)]
pub struct Counted {
    /// Calls that the library let through, by symbol.
    pub seen: BTreeMap<String, u64>,
    /// Calls that the simulated driver received, by symbol; empty on a real one, which does not
    /// count.
    pub received: BTreeMap<String, u64>,
    notes: [u64; WAYS.len() + PASSES.len()],
}

/// The ways in which the library was reached, and how they are called in a report.
const WAYS: [(Note, &str); 6] = [
    (Note::LookUps, "look_ups"),
    (Note::Answers, "answers"),
    (Note::LeftAsIs, "left_alone"),
    (Note::Redirected, "redirected"),
    (Note::SecondDriver, "second_driver"),
    (Note::Injected, "injected"),
];

/// Why submissions and allocations went on as they were made, and how that is called in a report.
const PASSES: [(Note, &str); 6] = [
    (Note::PassedOwn, "own"),
    (Note::PassedCaptured, "captured"),
    (Note::PassedUngoverned, "ungoverned"),
    (Note::PassedOtherDevice, "other_device"),
    (Note::PassedWithoutArbiter, "without_arbiter"),
    (Note::PassedFailed, "hook_failed"),
];

impl Counted {
    /// Calls that the driver received and the library did not let through, and the first of them by
    /// name.
    pub fn escaped(&self) -> (u64, Option<&str>) {
        let past = self.received.iter().filter_map(|(name, count)| {
            let past = count.saturating_sub(self.seen.get(name).copied().unwrap_or(0));
            (past > 0).then_some((name.as_str(), past))
        });
        past.fold((0, None), |(sum, first), (name, count)| {
            (sum + count, first.or(Some(name)))
        })
    }

    fn note(&self, note: Note) -> u64 {
        // PANIC: as many words as the enumeration has members.
        self.notes[note as usize]
    }

    /// Adds what another process has counted.
    pub fn add(&mut self, other: &Self) {
        for (to, from) in [
            (&mut self.seen, &other.seen),
            (&mut self.received, &other.received),
        ] {
            for (name, count) in from {
                *to.entry(name.clone()).or_default() += count;
            }
        }
        for (to, from) in self.notes.iter_mut().zip(other.notes) {
            *to += from;
        }
    }

    /// The ways in which the library was reached.
    pub fn ways(&self) -> Value {
        self.named(&WAYS)
    }

    /// Submissions and allocations that went on as they were made, by reason. Of those that nobody
    /// governs one in many is counted.
    pub fn passes(&self) -> Value {
        self.named(&PASSES)
    }

    fn named(&self, notes: &[(Note, &str)]) -> Value {
        let notes = notes
            .iter()
            .map(|(note, name)| ((*name).to_owned(), json!(self.note(*note))));
        Value::Object(notes.collect())
    }

    /// Functions that were handed out and that this version of the library does not know.
    pub fn unknown_functions(&self) -> u64 {
        self.note(Note::LeftAsIs)
    }
}

/// Reads all pages in `directory`, by process.
pub fn read(directory: &Path) -> BTreeMap<u32, Counted> {
    let mut all: BTreeMap<u32, Counted> = BTreeMap::new();
    let files = fs::read_dir(directory).into_iter().flatten().flatten();
    for file in files {
        let name = file.file_name();
        let name = name.to_string_lossy();
        let (seen, received) = (name.ends_with(SEEN), name.ends_with(RECEIVED));
        if !seen && !received {
            continue;
        }
        let bytes = fs::read(file.path()).unwrap_or_default();
        let Some(reading) = Reading::of(&bytes) else {
            continue;
        };
        let counted = all.entry(reading.pid()).or_default();
        let calls = if seen {
            &mut counted.seen
        } else {
            &mut counted.received
        };
        for (symbol, count) in reading.calls().filter(|(_, count)| *count > 0) {
            *calls.entry(symbol.to_owned()).or_default() += count;
        }
        if seen {
            for (note, _) in WAYS.into_iter().chain(PASSES) {
                counted.notes[note as usize] += reading.note(note);
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_driver_received_beyond_what_was_seen_has_escaped() {
        let counts = |list: &[(&str, u64)]| {
            let counts = list
                .iter()
                .map(|(name, count)| ((*name).to_owned(), *count));
            counts.collect::<BTreeMap<_, _>>()
        };
        let mut counted = Counted {
            seen: counts(&[("cuInit", 1), ("cuLaunchKernel", 5)]),
            received: counts(&[("cuInit", 1), ("cuLaunchKernel", 7), ("cuMemAlloc_v2", 2)]),
            notes: [0; 12],
        };
        assert_eq!(counted.escaped(), (4, Some("cuLaunchKernel")));
        counted.received = counts(&[("cuInit", 1)]);
        assert_eq!(counted.escaped(), (0, None));
        let other = counted.clone();
        counted.add(&other);
        assert_eq!(counted.seen["cuLaunchKernel"], 10);
        assert!(read(Path::new("/nowhere")).is_empty());
    }
}
