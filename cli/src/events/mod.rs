//! `sublet events`: what the arbiter's journal says happened, for people or as JSON.
//!
//! The journal is a file, so this works without an arbiter. Where the file is another user's, the
//! arbiter is asked for the lines that it keeps in memory.

mod reader;
mod show;
mod wake;

use std::collections::VecDeque;
use std::io::{self, BufWriter, StdoutLock, Write};
use std::os::unix::fs::MetadataExt;

use anyhow::{Context, anyhow};
use control::paths::{RuntimeDir, Source, Surroundings};
use control::{Client, DeviceSelector, Event};
use serde_json::Value;

use crate::args::Events;
use crate::connect;
use crate::exit::Result;
use reader::{Found, Reader};
use wake::Wake;

/// Events that `--follow` begins with.
const BEFORE: usize = 10;
/// Of the arbiter's lines, so many are asked for at once: an answer has a bounded length.
const ASKED: u32 = 50;
/// Both files' names begin so.
const NAME: &str = "journal.jsonl";

/// Prints what there is, and with `--follow` what comes.
///
/// # Errors
/// The place is unfit, the journal cannot be read, or stdout takes nothing. That there is no
/// journal is no error, as it is none that no arbiter runs.
pub fn events(args: &Events) -> Result<()> {
    let mut printer = Printer::new(args);
    match print(args, &mut printer).and_then(|()| printer.flush()) {
        Err(error) if is_reader_gone(&error) => Ok(()),
        done => Ok(done?),
    }
}

/// Who reads our lines has had enough (`| head`), which is no failure.
fn is_reader_gone(error: &anyhow::Error) -> bool {
    let gone = |error: &io::Error| error.kind() == io::ErrorKind::BrokenPipe;
    matches!(error.downcast_ref(), Some(Unwritten(error)) if gone(error))
}

#[derive(Debug, thiserror::Error)]
#[error("cannot write to stdout: {0}")]
struct Unwritten(io::Error);

fn print(args: &Events, printer: &mut Printer) -> anyhow::Result<()> {
    let wake = Wake::new();
    let Some((dir, mut reader)) = find(args, &wake)? else {
        return Ok(());
    };
    // Watched before anything is read: what comes meanwhile wakes us.
    wake.watch(dir.path());
    let lines = args
        .lines
        .or((args.follow && args.since.is_none()).then_some(BEFORE));
    let begun = match lines {
        Some(lines) => to_the_last(lines, &mut reader, &printer.filter),
        None => Ok(()),
    };
    let path = reader.path().display().to_string();
    match begun.and_then(|()| printer.drain(&mut reader)) {
        Ok(drained) => drained?,
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            return ask(args, printer, &dir, lines, &wake);
        }
        Err(error) => return Err(error).with_context(|| format!("cannot read {path}")),
    }
    printer.say_what_was_left_out(&path);
    if !args.follow {
        printer.say_nothing_came(&path);
        return Ok(());
    }
    loop {
        printer.flush()?;
        if !wake.wait(NAME) {
            return Ok(());
        }
        wake.watch(dir.path());
        let drained = printer.drain(&mut reader);
        drained.with_context(|| format!("cannot read {path}"))??;
        printer.say_what_was_left_out(&path);
    }
}

/// Where the journal is; `None`: nowhere, or who reads our lines has gone while there was none. By
/// the rule of all commands; and where that place has none, and nobody has named it, where the
/// host's arbiter left its own.
fn find(args: &Events, wake: &Wake) -> anyhow::Result<Option<(RuntimeDir, Reader)>> {
    let around = Surroundings::of_this_process();
    let mut is_said = false;
    loop {
        let first = RuntimeDir::find(&around)?;
        let mut places = vec![first];
        if around.given.is_none() && places[0].source() != Source::System {
            places.push(RuntimeDir::of_the_host(&around));
        }
        for (number, place) in places.iter().enumerate() {
            let reader = Reader::new(place);
            let is_there = reader.is_there();
            if number == 0 || is_there {
                place.verify(around.uid)?;
            }
            if is_there {
                return Ok(Some((place.clone(), reader)));
            }
        }
        if !std::mem::replace(&mut is_said, true) {
            let looked: Vec<String> = places
                .iter()
                .map(|place| place.journal_file().display().to_string())
                .collect();
            let then = if args.follow {
                ": waiting for one"
            } else {
                ": no arbiter has run there"
            };
            say(&format!("no journal at {}{then}", looked.join(" or ")));
        }
        if !args.follow {
            return Ok(None);
        }
        for place in &places {
            wake.watch(place.path());
        }
        if !wake.wait(NAME) {
            return Ok(None);
        }
    }
}

/// Reads all there is, and goes back to where the last `lines` events begin that are asked for. Of
/// each only its place is kept.
fn to_the_last(lines: usize, reader: &mut Reader, filter: &Filter) -> io::Result<()> {
    let mut last = VecDeque::new();
    loop {
        match reader.advance()? {
            Found::End => break,
            Found::Broken => {}
            Found::Line => {
                let wanted = show::parse(reader.line()).is_some_and(|event| filter.wants(&event));
                if wanted && lines > 0 {
                    if last.len() == lines {
                        last.pop_front();
                    }
                    last.extend(reader.position());
                }
            }
        }
    }
    if let Some(first) = last.pop_front() {
        reader.rewind(first);
    }
    Ok(())
}

/// Has the arbiter tell what it keeps, where its file is not ours to read.
fn ask(
    args: &Events,
    printer: &mut Printer,
    dir: &RuntimeDir,
    lines: Option<usize>,
    wake: &Wake,
) -> anyhow::Result<()> {
    let mut seq = 0;
    let mut first = true;
    loop {
        let mut all = Vec::new();
        loop {
            let answer = connect::ask(
                || connect::existing(dir),
                |client: &mut Client| client.events(seq, ASKED),
            );
            let some = match answer {
                Ok(some) => some,
                // Between two arbiters.
                Err(error) if error.is_absence() && !first => break,
                Err(error) => return Err(anyhow!(error).context(denied(dir))),
            };
            let Some(last) = some.last() else {
                break;
            };
            seq = last.seq;
            all.extend(some.into_iter().filter(|event| printer.filter.wants(event)));
        }
        if first {
            say(&format!(
                "{}, which keeps the last 1000 events",
                denied(dir)
            ));
        }
        let skipped = match lines.filter(|_| first) {
            Some(lines) => all.len().saturating_sub(lines),
            None => 0,
        };
        for event in &all[skipped..] {
            printer.print(event)?;
        }
        first = false;
        if !args.follow {
            printer.say_nothing_came("what the arbiter keeps");
            return Ok(());
        }
        printer.flush()?;
        // Its writing is seen although it cannot be read; and once a second in any case.
        if !wake.wait(NAME) {
            return Ok(());
        }
    }
}

/// Whose the journal is, and who was asked instead.
fn denied(dir: &RuntimeDir) -> String {
    let path = dir.journal_file();
    let whose = match path.metadata() {
        Ok(meta) => format!("it is user {}'s", meta.uid()),
        Err(_) => "its directory is closed to you".into(),
    };
    format!(
        "cannot read {}, because {whose} (that user and root can), so the arbiter is asked",
        path.display()
    )
}

/// Which events are asked for; all, where nothing is said.
#[derive(Debug, Default)]
struct Filter {
    job: Option<String>,
    device: Option<DeviceSelector>,
    since_unix_ms: Option<u64>,
}

impl Filter {
    fn wants(&self, event: &Event) -> bool {
        self.since_unix_ms
            .is_none_or(|since| event.unix_ms >= since)
            && self.job.as_ref().is_none_or(|job| is_of(event, job))
            && self
                .device
                .as_ref()
                .is_none_or(|device| is_on(event, device))
    }
}

/// By the job's name, or by its number.
fn is_of(event: &Event, job: &str) -> bool {
    event.job == job || event.job_id != 0 && job.parse() == Ok(event.job_id)
}

/// One device is in `device` and `uuid`, several are in `devices`, by index or UUID, and `uuids`.
fn is_on(event: &Event, device: &DeviceSelector) -> bool {
    let is_it = |value: &Value| match (device, value) {
        (DeviceSelector::Index(index), Value::Number(number)) => {
            number.as_u64() == Some(u64::from(*index))
        }
        (DeviceSelector::Uuid(uuid), Value::String(text)) => uuid.eq_ignore_ascii_case(text),
        _ => false,
    };
    ["device", "uuid", "devices", "uuids"]
        .iter()
        .filter_map(|name| event.fields.get(*name))
        .any(|value| match value {
            Value::Array(all) => all.iter().any(is_it),
            one => is_it(one),
        })
}

struct Printer {
    filter: Filter,
    json: bool,
    out: BufWriter<StdoutLock<'static>>,
    printed: u64,
    /// Lines that are no events, and those of them that were reported.
    left_out: u64,
    reported: u64,
}

impl Printer {
    fn new(args: &Events) -> Self {
        Self {
            filter: Filter {
                job: args.job.clone(),
                device: args.device.clone(),
                since_unix_ms: args.since,
            },
            json: args.json,
            out: BufWriter::new(io::stdout().lock()),
            printed: 0,
            left_out: 0,
            reported: 0,
        }
    }

    fn print(&mut self, event: &Event) -> anyhow::Result<()> {
        let line = if self.json {
            show::json(event)
        } else {
            show::text(event)
        };
        self.printed += 1;
        self.out.write_all(line.as_bytes()).map_err(Unwritten)?;
        Ok(())
    }

    fn flush(&mut self) -> anyhow::Result<()> {
        Ok(self.out.flush().map_err(Unwritten)?)
    }

    /// Prints all there is: the outer error is the journal's, the inner one stdout's.
    fn drain(&mut self, reader: &mut Reader) -> io::Result<anyhow::Result<()>> {
        loop {
            match reader.advance()? {
                Found::End => return Ok(Ok(())),
                Found::Broken => self.left_out += 1,
                // The arbiter ends a line that its predecessor has left without an end.
                Found::Line => match show::parse(reader.line()) {
                    Some(event) if self.filter.wants(&event) => {
                        if let Err(error) = self.print(&event) {
                            return Ok(Err(error));
                        }
                    }
                    Some(_) => {}
                    None => self.left_out += u64::from(!reader.line().is_empty()),
                },
            }
        }
    }

    fn say_what_was_left_out(&mut self, path: &str) {
        let new = self.left_out - self.reported;
        if new > 0 {
            self.reported = self.left_out;
            let lines = match new {
                1 => "a line that is no event was".into(),
                new => format!("{new} lines that are no events were"),
            };
            say(&format!("warning: {lines} left out of {path}"));
        }
    }

    /// Silence could also be a name with a mistake in it.
    fn say_nothing_came(&self, place: &str) {
        if self.printed > 0 {
            return;
        }
        let Filter {
            job,
            device,
            since_unix_ms,
        } = &self.filter;
        let mut of = String::new();
        if let Some(job) = job {
            of += &format!(" of job `{job}`");
        }
        if let Some(device) = device {
            of += &format!(" on device {device}");
        }
        if let Some(since) = since_unix_ms.and_then(crate::when::rfc3339) {
            of += &format!(" since {since}");
        }
        say(&format!("no event{of} in {place}"));
    }
}

/// A line for people; where stderr is gone there is nobody to tell.
fn say(text: &str) {
    let _ = writeln!(io::stderr(), "sublet: {text}");
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;
    use serde_json::json;

    use super::*;

    fn event(fields: Value) -> Event {
        Event {
            seq: 1,
            unix_ms: 1000,
            kind: "oom".into(),
            job: "12".into(),
            job_id: 7,
            fields: fields.as_object().cloned().unwrap(),
            ..Event::default()
        }
    }

    #[test]
    fn the_page_of_events_has_every_flag_and_every_kind() {
        let page = include_str!("../../../docs/reference/events.md");
        let words: Vec<&str> = page.split_whitespace().collect();
        let page = words.join(" ");
        for kind in control::EVENT_KINDS {
            let entry = format!("`{}` ({})", kind.word, kind.plain);
            assert!(page.contains(&entry), "docs/reference/events.md: {entry}");
        }
        let command = crate::args::Cli::command();
        let events = command.find_subcommand("events").unwrap();
        for flag in events.get_arguments() {
            let named = match (flag.get_long(), flag.get_short()) {
                (Some(long), _) => format!("--{long}"),
                (None, short) => format!("-{}", short.unwrap()),
            };
            assert!(page.contains(&named), "docs/reference/events.md: {named}");
        }
    }

    #[test]
    fn a_job_is_meant_by_its_name_or_its_number() {
        let mut event = event(json!({}));
        for (job, meant) in [
            ("12", true),
            ("7", true),
            ("07", true),
            ("1", false),
            ("0", false),
        ] {
            assert_eq!(is_of(&event, job), meant, "{job}");
        }
        (event.job, event.job_id) = (String::new(), 0);
        assert!(!is_of(&event, "0"), "what is about no job has no number");
    }

    #[test]
    fn a_device_is_meant_by_its_index_or_its_uuid_alone_or_in_a_list() {
        let zero = DeviceSelector::Index(0);
        let uuid = DeviceSelector::Uuid("GPU-0A".into());
        for (fields, by_index, by_uuid) in [
            (json!({}), false, false),
            (json!({"device": 0}), true, false),
            (json!({"device": 1, "uuid": "GPU-1f"}), false, false),
            (json!({"device": 0, "uuid": "GPU-0a"}), true, true),
            (
                json!({"devices": [1, 0], "uuids": ["GPU-1f", "GPU-0a"]}),
                true,
                true,
            ),
            (json!({"devices": ["GPU-0a"]}), false, true),
            (json!({"device": "0", "uuid": "0"}), false, false),
            (json!({"pid": 0, "count": 0}), false, false),
        ] {
            let event = event(fields.clone());
            assert_eq!(is_on(&event, &zero), by_index, "{fields}");
            assert_eq!(is_on(&event, &uuid), by_uuid, "{fields}");
        }
    }

    #[test]
    fn what_is_asked_for_together_has_to_hold_together() {
        let event = event(json!({"device": 0}));
        let filter = |job: &str, device, since| Filter {
            job: Some(job.into()),
            device: Some(DeviceSelector::Index(device)),
            since_unix_ms: Some(since),
        };
        assert!(Filter::default().wants(&event));
        assert!(filter("12", 0, 1000).wants(&event));
        assert!(!filter("13", 0, 1000).wants(&event));
        assert!(!filter("12", 1, 1000).wants(&event));
        assert!(!filter("12", 0, 1001).wants(&event));
    }
}
