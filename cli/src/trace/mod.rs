//! `sublet trace`: what the devices did for a while, as a file that Perfetto opens.
//!
//! The arbiter keeps the last spans of each device in a ring; this asks for new ones a few times a
//! second and writes them as they come. What was overwritten before it was asked for is counted,
//! and said in the file and on stderr.

mod clock;
mod events;
mod file;

use std::collections::BTreeMap;
use std::fs::{File, Permissions};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use control::paths::{RuntimeDir, Surroundings};
use control::{
    ArbiterStatus, Client, DeviceStatus, Event, EventKind, SpanKind, TIMELINE_MOST, Timeline,
    TimelineJob, TimelineSpan,
};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use tempfile::NamedTempFile;

use crate::args::Trace;
use crate::connect::{self, Unreachable};
use crate::exit::Result;
use clock::Clock;
use events::{Said, Track, Tracks, micros, quoted};
use file::TraceFile;

/// Between two questions. TIMEOUT: a device has some 1500 spans a second at most, and its ring
/// holds ten seconds of them.
const POLL: Duration = Duration::from_millis(200);
/// TIMEOUT: an arbiter answers within milliseconds; Ctrl-C is heard after this at the latest.
const ANSWER: Duration = Duration::from_secs(2);
/// Lines of the journal in one answer.
const LINES: u32 = 50;

/// Traces, and says what came of it.
///
/// # Errors
/// No arbiter, no such job or device, or a file that cannot be written. Where the disk is full the
/// file has what fitted, and the error says so.
pub fn trace(args: &Trace) -> Result<String> {
    let signals = Signals::take()?;
    let dir = RuntimeDir::find(&Surroundings::of_this_process())?;
    let status = connect::ask(|| connect::within(&dir, ANSWER), Client::status)
        .map_err(|error| anyhow!(error).context("there is nothing to trace"))?;
    let devices = devices(&status, args)?;
    let job = args
        .job
        .as_deref()
        .map(|job| wanted(&status, job))
        .transpose()?;
    let temporary = create(&args.output)?;
    let file = temporary
        .as_file()
        .try_clone()
        .with_context(|| format!("cannot write {}", args.output.display()))?;
    let (mut recorder, began) = Recorder::begin(dir, &devices, job, file, &args.output)?;
    let ends = began + args.duration;
    loop {
        let left = ends.saturating_duration_since(Instant::now());
        let is_ended = signals.came_within(left.min(POLL));
        if let Err(error) = recorder.look() {
            return Err(cut_off(recorder, temporary, &args.output, &error).into());
        }
        if is_ended || Instant::now() >= ends {
            break;
        }
    }
    let took = began.elapsed();
    if let Err(error) = recorder.finish() {
        return Err(cut_off(recorder, temporary, &args.output, &error).into());
    }
    keep(temporary, &args.output)?;
    recorder.warn();
    Ok(format!(
        "{}: {} spans in {:.1} s; https://ui.perfetto.dev opens it\n",
        args.output.display(),
        recorder.spans,
        took.as_secs_f64()
    ))
}

fn devices<'a>(status: &'a ArbiterStatus, args: &Trace) -> anyhow::Result<Vec<&'a DeviceStatus>> {
    let wanted = |device: &&DeviceStatus| {
        let selector = args.device.as_ref();
        selector.is_none_or(|selector| device.answers_to(selector))
    };
    let devices: Vec<_> = status.devices.iter().filter(wanted).collect();
    match (&args.device, devices.is_empty()) {
        (Some(selector), true) => {
            let known = status.devices.len();
            bail!("no device answers to `{selector}`: {known} are known (see `sublet ps`)");
        }
        (None, true) => bail!("the arbiter knows no device yet: start a job first"),
        _ => Ok(devices),
    }
}

/// A job's number, by its name or its number.
fn wanted(status: &ArbiterStatus, job: &str) -> anyhow::Result<u64> {
    let jobs = || {
        status
            .jobs
            .iter()
            .filter(|one| one.state != control::JobState::Gone)
    };
    let by_name = jobs().find(|one| one.name == job);
    let by_number = || jobs().find(|one| job.parse() == Ok(one.id));
    let Some(found) = by_name.or_else(by_number) else {
        let names: Vec<&str> = jobs().map(|one| one.name.as_str()).collect();
        let running = if names.is_empty() {
            "no job is running".to_owned()
        } else {
            format!("running: {}", names.join(", "))
        };
        bail!("no job is named `{job}`, and none has that number ({running})");
    };
    Ok(found.id)
}

/// A file beside the one that is asked for, which takes its place in the end.
fn create(path: &Path) -> anyhow::Result<NamedTempFile> {
    let (dir, name) = match (path.parent(), path.file_name()) {
        (Some(dir), Some(name)) if !path.is_dir() => (dir, name),
        _ => bail!(
            "{} is no name of a file: write -o trace.json",
            path.display()
        ),
    };
    let dir = if dir.as_os_str().is_empty() {
        Path::new(".")
    } else {
        dir
    };
    let mut prefix = std::ffi::OsString::from(".");
    prefix.push(name);
    tempfile::Builder::new()
        .prefix(&prefix)
        .permissions(Permissions::from_mode(0o666))
        .tempfile_in(dir)
        .with_context(|| format!("cannot write {}", path.display()))
}

fn keep(temporary: NamedTempFile, path: &Path) -> anyhow::Result<()> {
    temporary
        .persist(path)
        .map(drop)
        .with_context(|| format!("cannot write {}", path.display()))
}

/// The file could not be written to its end: what fitted is kept.
fn cut_off(
    mut recorder: Recorder,
    temporary: NamedTempFile,
    path: &Path,
    error: &io::Error,
) -> anyhow::Error {
    let path_text = path.display();
    match recorder
        .rescue()
        .map_err(anyhow::Error::from)
        .and_then(|()| keep(temporary, path))
    {
        Ok(()) => anyhow!(
            "{path_text} ends early, what is in it is whole: {error} (free some space, or trace for a shorter time)"
        ),
        Err(_) => anyhow!("cannot write {path_text}: {error}"),
    }
}

/// SIGINT, SIGTERM and SIGHUP end a trace early.
struct Signals(SignalFd);

impl Signals {
    fn take() -> anyhow::Result<Self> {
        let mut signals = SigSet::empty();
        for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
            signals.add(signal);
        }
        signals.thread_block().context("cannot take signals")?;
        let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
        let signals = SignalFd::with_flags(&signals, flags).context("cannot take signals")?;
        Ok(Self(signals))
    }

    /// Waits so long for one.
    fn came_within(&self, limit: Duration) -> bool {
        let mut fds = [PollFd::new(self.0.as_fd(), PollFlags::POLLIN)];
        let ms = u16::try_from(limit.as_millis()).unwrap_or(u16::MAX);
        // One that is not blocked may have ended the wait; then there is another.
        poll(&mut fds, PollTimeout::from(ms)).is_ok_and(|ready| ready > 0)
    }
}

/// One device.
struct Device {
    index: u32,
    /// What its process is called.
    name: String,
    ring: u64,
    /// Up to where its spans are written.
    seq: u64,
    lost: u64,
    /// By job: device time before the trace began that its next slice or drain will have in it.
    before_ns: BTreeMap<u64, u64>,
    accounts: BTreeMap<u64, Account>,
    /// As last heard, with its time.
    jobs: Vec<TimelineJob>,
    heard_ns: u64,
}

/// Device time of a job on a device.
#[derive(Debug, Clone, Default)]
struct Account {
    name: String,
    /// What it had been charged when the trace began, and when it was last heard of.
    from_ns: u64,
    to_ns: u64,
    /// What is in the trace.
    in_spans_ns: u64,
}

struct Recorder {
    dir: RuntimeDir,
    clock: Clock,
    file: TraceFile<File>,
    path: PathBuf,
    devices: Vec<Device>,
    /// Only this job.
    job: Option<u64>,
    tracks: Tracks,
    /// When the trace began, as the arbiter counts.
    began_ns: u64,
    /// Up to where lines of the journal are written.
    journal_seq: u64,
    began_unix_ms: u64,
    /// Since when the arbiter does not answer, in the trace's time.
    gone_since_ns: Option<u64>,
    /// Another arbiter has come: accounts begin anew.
    is_other: bool,
    spans: u64,
}

impl Recorder {
    fn begin(
        dir: RuntimeDir,
        devices: &[&DeviceStatus],
        job: Option<u64>,
        file: File,
        path: &Path,
    ) -> anyhow::Result<(Self, Instant)> {
        let mut clock = Clock::of_this_host();
        let cannot = || format!("cannot write {}", path.display());
        let file = TraceFile::begin(file, clock.base_ns()).with_context(cannot)?;
        let journal_seq = last_line(&dir)?;
        let mut all = Vec::new();
        let mut began_ns = u64::MAX;
        for device in devices {
            let before_ns = clock::mono_ns();
            // Nothing is above that number: where its spans are is what is asked.
            let now = ask(&dir, device.index, u64::MAX)
                .map_err(|error| anyhow!(error).context("the arbiter has no timeline"))?;
            clock.compare(before_ns, now.now_ns, clock::mono_ns());
            began_ns = began_ns.min(now.now_ns);
            let pending = now.jobs.iter().map(|job| (job.id, job.pending_ns));
            let account = |job: &TimelineJob| Account {
                name: job.name.clone(),
                from_ns: job.device_ns,
                to_ns: job.device_ns,
                in_spans_ns: 0,
            };
            all.push(Device {
                index: device.index,
                name: format!("GPU {} {} {}", device.index, device.uuid, device.name),
                ring: now.ring,
                seq: now.last_seq,
                lost: 0,
                before_ns: pending.collect(),
                accounts: now.jobs.iter().map(|job| (job.id, account(job))).collect(),
                heard_ns: now.now_ns,
                jobs: now.jobs,
            });
        }
        let began = Instant::now();
        let unix_ms = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let recorder = Self {
            dir,
            clock,
            file,
            path: path.to_owned(),
            devices: all,
            job,
            tracks: Tracks::default(),
            began_ns,
            journal_seq,
            began_unix_ms: unix_ms.map_or(0, |ms| u64::try_from(ms.as_millis()).unwrap_or(0)),
            gone_since_ns: None,
            is_other: false,
            spans: 0,
        };
        Ok((recorder, began))
    }

    /// Writes what is new.
    fn look(&mut self) -> io::Result<()> {
        for at in 0..self.devices.len() {
            self.look_at(at)?;
        }
        if self.gone_since_ns.is_none() {
            self.look_at_journal()?;
        }
        self.file.flush()
    }

    fn look_at(&mut self, at: usize) -> io::Result<()> {
        let mut until = None;
        loop {
            let device = &self.devices[at];
            let answer = ask(&self.dir, device.index, device.seq);
            let Ok(timeline) = answer else {
                self.gone_since_ns.get_or_insert(self.clock.now());
                return Ok(());
            };
            self.note_presence()?;
            let until = *until.get_or_insert(timeline.last_seq);
            let is_last = timeline.spans.len() < TIMELINE_MOST as usize;
            self.take(at, timeline)?;
            if is_last || self.devices[at].seq >= until {
                return Ok(());
            }
        }
    }

    /// The arbiter answers; how long it did not is an event.
    fn note_presence(&mut self) -> io::Result<()> {
        let Some(since_ns) = self.gone_since_ns.take() else {
            return Ok(());
        };
        let now_ns = self.clock.now();
        self.write(events::ARBITER, ("arbiter", "arbiter"), |track| {
            events::span(track, "no arbiter", since_ns, now_ns, &[])
        })
    }

    /// Writes a part of a timeline.
    fn take(&mut self, at: usize, timeline: Timeline) -> io::Result<()> {
        let device = &mut self.devices[at];
        let mut lost = 0;
        if timeline.ring != device.ring {
            // Another arbiter, or another device in its place: what the old ring had is gone, and
            // nobody knows how much that was. The new one is asked from its beginning.
            (device.ring, device.seq) = (timeline.ring, 0);
            device.before_ns.clear();
            self.is_other = true;
            let index = device.index;
            let now_ns = self.clock.of_arbiter(timeline.now_ns);
            return self.on_device(at, |track| {
                let said = [("device", Said::Whole(index.into()))];
                events::moment(track, "another timeline begins", now_ns, &said)
            });
        }
        lost += timeline.first_seq.saturating_sub(device.seq + 1);
        if lost > 0 {
            device.lost += lost;
            device.seq = timeline.first_seq - 1;
            let now_ns = self.clock.of_arbiter(timeline.now_ns);
            self.on_device(at, |track| {
                let said = [("spans", Said::Whole(lost))];
                events::moment(track, "spans lost", now_ns, &said)
            })?;
        }
        let names: BTreeMap<u64, String> = timeline
            .jobs
            .iter()
            .map(|job| (job.id, job.name.clone()))
            .collect();
        for span in &timeline.spans {
            self.span(at, *span, &names, false)?;
        }
        let device = &mut self.devices[at];
        device.seq += timeline.spans.len() as u64;
        for job in &timeline.jobs {
            let account = device.accounts.entry(job.id).or_default();
            account.name.clone_from(&job.name);
            // One that has ended is there by its name only.
            account.to_ns = account.to_ns.max(job.device_ns);
        }
        (device.jobs, device.heard_ns) = (timeline.jobs, timeline.now_ns);
        Ok(())
    }

    fn span(
        &mut self,
        at: usize,
        span: TimelineSpan,
        names: &BTreeMap<u64, String>,
        open: bool,
    ) -> io::Result<()> {
        if span.kind == SpanKind::Mode {
            let at_ns = self.clock.of_arbiter(span.end_ns);
            let name = match span.count {
                0 => "mode exclusive",
                2 => "mode lend",
                _ => "mode concurrent",
            };
            return self.on_device(at, |track| events::moment(track, name, at_ns, &[]));
        }
        let device = &mut self.devices[at];
        let mut charged_ns = span.device_ns;
        if matches!(span.kind, SpanKind::Slice | SpanKind::Drain) {
            let before_ns = device.before_ns.remove(&span.job_id).unwrap_or(0);
            charged_ns = charged_ns.saturating_sub(before_ns);
            let account = device.accounts.entry(span.job_id).or_default();
            account.in_spans_ns += charged_ns;
            account.to_ns = account.to_ns.max(account.from_ns + account.in_spans_ns);
        }
        if self.job.is_some_and(|job| job != span.job_id) {
            return Ok(());
        }
        let began_before = span.start_ns < self.began_ns;
        let from_ns = self.clock.of_arbiter(span.start_ns.max(self.began_ns));
        let to_ns = self.clock.of_arbiter(span.end_ns.max(self.began_ns));
        let unnamed = format!("job {}", span.job_id);
        let job = names.get(&span.job_id).filter(|name| !name.is_empty());
        let job = job.unwrap_or(&unnamed);
        let mut said = vec![
            ("job", Said::Text(job)),
            ("job_id", Said::Whole(span.job_id)),
        ];
        let iterations = format!("{} iterations", span.count);
        let name = match (span.kind, span.count) {
            (SpanKind::Iterations, 1) => "iteration",
            (SpanKind::Iterations, _) => &iterations,
            (kind, _) => kind.as_str(),
        };
        match span.kind {
            SpanKind::Slice | SpanKind::Drain => {
                said.push(("device_us", Said::Micros(charged_ns)));
                if span.kind == SpanKind::Slice && !open {
                    said.push(("granted_us", Said::Whole(span.count)));
                }
            }
            SpanKind::Evict | SpanKind::Restore | SpanKind::Fit if !open => {
                said.push(("copied_bytes", Said::Whole(span.count)));
            }
            SpanKind::Iterations => said.push(("iterations", Said::Whole(span.count))),
            _ => {}
        }
        for (word, holds) in [("began_before", began_before), ("open", open)] {
            if holds {
                said.push((word, Said::Flag(true)));
            }
        }
        let track = self
            .tracks
            .of_job(self.devices[at].index, span.job_id, span.kind);
        let row = format!("{job}: {}", events::row_name(span.kind));
        let process = self.devices[at].name.clone();
        self.spans += 1;
        self.write(track, (&process, &row), |track| {
            events::span(track, name, from_ns, to_ns, &said)
        })
    }

    fn on_device(&mut self, at: usize, event: impl FnOnce(Track) -> String) -> io::Result<()> {
        let device = &self.devices[at];
        let (track, process) = (Track::device(device.index), device.name.clone());
        self.write(track, (&process, "device"), event)
    }

    /// Writes an event, after the names of its track.
    fn write(
        &mut self,
        track: Track,
        (process, thread): (&str, &str),
        event: impl FnOnce(Track) -> String,
    ) -> io::Result<()> {
        for name in self.tracks.name(track, process, thread) {
            self.file.event(&name)?;
        }
        self.file.event(&event(track))
    }

    fn look_at_journal(&mut self) -> io::Result<()> {
        loop {
            let Ok(lines) = lines(&self.dir, self.journal_seq) else {
                return Ok(());
            };
            let is_last = lines.len() < LINES as usize;
            for line in lines {
                self.journal_seq = line.seq;
                let wanted = self.job.is_none_or(|job| line.job_id == job);
                if wanted && line.unix_ms >= self.began_unix_ms {
                    self.line(&line)?;
                }
            }
            if is_last {
                return Ok(());
            }
        }
    }

    fn line(&mut self, line: &Event) -> io::Result<()> {
        let at_ns = self.clock.of_unix_ms(line.unix_ms);
        let kind = EventKind::of(&line.kind).map_or(line.kind.as_str(), |kind| kind.plain);
        let mut said = vec![("message", Said::Text(&line.message))];
        if !line.job.is_empty() {
            said.push(("job", Said::Text(&line.job)));
            said.push(("job_id", Said::Whole(line.job_id)));
        }
        let journal = events::ARBITER;
        self.write(journal, ("arbiter", "arbiter"), |track| {
            events::moment(track, kind, at_ns, &said)
        })
    }

    /// Writes what has not ended, and the end.
    fn finish(&mut self) -> io::Result<()> {
        for at in 0..self.devices.len() {
            let (jobs, now_ns) = (self.devices[at].jobs.clone(), self.devices[at].heard_ns);
            let names: BTreeMap<u64, String> =
                jobs.iter().map(|job| (job.id, job.name.clone())).collect();
            for job in &jobs {
                let mut pending_ns = job.pending_ns;
                for (kind, start_ns) in &job.open {
                    let has_time = matches!(kind, SpanKind::Slice | SpanKind::Drain);
                    let span = TimelineSpan {
                        kind: *kind,
                        job_id: job.id,
                        start_ns: *start_ns,
                        end_ns: now_ns,
                        device_ns: if has_time {
                            std::mem::take(&mut pending_ns)
                        } else {
                            0
                        },
                        count: 0,
                    };
                    self.span(at, span, &names, true)?;
                }
            }
        }
        if let Some(since_ns) = self.gone_since_ns {
            let now_ns = self.clock.now();
            self.write(events::ARBITER, ("arbiter", "arbiter"), |track| {
                events::span(track, "no arbiter", since_ns, now_ns, &[])
            })?;
        }
        let other = self.other(false);
        self.file.finish(&other)
    }

    fn rescue(&mut self) -> io::Result<()> {
        let other = self.other(true);
        self.file.rescue(&other)
    }

    /// What is said beside the events.
    fn other(&self, is_cut: bool) -> String {
        let mut accounts = Vec::new();
        for device in &self.devices {
            for (id, account) in &device.accounts {
                if self.job.is_some_and(|job| job != *id) {
                    continue;
                }
                let charged_ns = account.to_ns.saturating_sub(account.from_ns);
                accounts.push(format!(
                    "{{\"device\":{},\"job\":{},\"job_id\":{id},\"charged_us\":{},\"in_spans_us\":{}}}",
                    device.index,
                    quoted(&account.name),
                    micros(charged_ns),
                    micros(account.in_spans_ns)
                ));
            }
        }
        format!(
            "{{\"tool\":\"sublet {}\",\"clock\":\"Unix time, less baseTimeNanoseconds\",\"clock_drift_ns\":{},\"lost_spans\":{},\"cut_off\":{is_cut},\"accounts\":[{}]}}",
            env!("CARGO_PKG_VERSION"),
            self.clock.drift_ns(),
            self.lost(),
            accounts.join(",")
        )
    }

    fn lost(&self) -> u64 {
        self.devices.iter().map(|device| device.lost).sum()
    }

    /// What is missing is said where people look.
    fn warn(&self) {
        let path = self.path.display();
        let lost = self.lost();
        let mut warnings = Vec::new();
        if lost > 0 {
            warnings.push(format!(
                "{lost} spans are missing in {path}: the arbiter had overwritten them before they were asked for"
            ));
        }
        if self.is_other {
            warnings.push(format!(
                "another timeline began while {path} was written: what the one before had last is missing"
            ));
        }
        if self.gone_since_ns.is_some() {
            warnings.push(format!(
                "the arbiter did not answer in the end: {path} has what came before"
            ));
        }
        if self.spans == 0 {
            warnings.push(format!("{path} has no span: nothing used the devices"));
        }
        for warning in warnings {
            // Where stderr is gone there is nobody to tell.
            let _ = writeln!(io::stderr(), "sublet: warning: {warning}");
        }
    }
}

fn ask(
    dir: &RuntimeDir,
    device: u32,
    since_seq: u64,
) -> std::result::Result<Timeline, Unreachable> {
    connect::ask(
        || connect::within(dir, ANSWER),
        |client: &mut Client| client.timeline(device, since_seq),
    )
}

fn lines(dir: &RuntimeDir, since_seq: u64) -> std::result::Result<Vec<Event>, Unreachable> {
    connect::ask(
        || connect::within(dir, ANSWER),
        |client: &mut Client| client.events(since_seq, LINES),
    )
}

/// Number of the journal's last line, as far as the arbiter keeps them.
fn last_line(dir: &RuntimeDir) -> std::result::Result<u64, Unreachable> {
    let mut seq = 0;
    loop {
        let some = lines(dir, seq)?;
        match some.last() {
            Some(last) => seq = last.seq,
            None => return Ok(seq),
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;
    use serde_json::Value;

    use super::*;

    fn recorder(dir: &Path) -> Recorder {
        let file = File::create(dir.join("t.json")).unwrap();
        let clock = Clock::of_this_host();
        Recorder {
            dir: RuntimeDir::given(dir.join("run")).unwrap(),
            clock,
            file: TraceFile::begin(file, clock.base_ns()).unwrap(),
            path: "t.json".into(),
            devices: vec![Device {
                index: 0,
                name: "GPU 0".into(),
                ring: 7,
                seq: 10,
                lost: 0,
                before_ns: [(1, 300)].into(),
                accounts: BTreeMap::new(),
                jobs: Vec::new(),
                heard_ns: 0,
            }],
            job: None,
            tracks: Tracks::default(),
            began_ns: clock::mono_ns(),
            journal_seq: 0,
            began_unix_ms: 0,
            gone_since_ns: None,
            is_other: false,
            spans: 0,
        }
    }

    fn slice(start_ns: u64, end_ns: u64, device_ns: u64) -> TimelineSpan {
        TimelineSpan {
            kind: SpanKind::Slice,
            job_id: 1,
            start_ns,
            end_ns,
            device_ns,
            count: 5000,
        }
    }

    fn part(first_seq: u64, from_seq: u64, spans: Vec<TimelineSpan>, now_ns: u64) -> Timeline {
        Timeline {
            ring: 7,
            first_seq,
            from_seq,
            last_seq: from_seq + spans.len() as u64 - 1,
            spans,
            jobs: vec![TimelineJob {
                id: 1,
                name: "train".into(),
                device_ns: 10_000,
                pending_ns: 250,
                open: vec![
                    (SpanKind::Wait, now_ns - 10),
                    (SpanKind::Slice, now_ns - 20),
                ],
            }],
            now_ns,
            ..Timeline::default()
        }
    }

    fn written(dir: &Path) -> (Value, Vec<Value>) {
        let text = std::fs::read_to_string(dir.join("t.json")).unwrap();
        let trace: Value = serde_json::from_str(&text).unwrap();
        let events = trace["traceEvents"].as_array().unwrap().clone();
        (trace, events)
    }

    #[test]
    fn lost_spans_are_counted_where_they_are_missing_and_the_rest_is_written() {
        let dir = tempfile::tempdir().unwrap();
        let mut recorder = recorder(dir.path());
        let ns = recorder.began_ns;
        let spans = vec![
            slice(ns - 5000, ns + 1000, 800),
            slice(ns + 2000, ns + 3000, 900),
        ];
        recorder.take(0, part(1, 11, spans, ns + 3000)).unwrap();
        assert_eq!((recorder.devices[0].seq, recorder.lost()), (12, 0));
        // 13 to 19 were overwritten.
        let spans = vec![slice(ns + 9000, ns + 9500, 100)];
        recorder.take(0, part(20, 20, spans, ns + 9600)).unwrap();
        assert_eq!((recorder.devices[0].seq, recorder.lost()), (20, 7));
        // And all that there was, before there is anything new.
        recorder.take(0, part(31, 31, vec![], ns + 9700)).unwrap();
        assert_eq!((recorder.devices[0].seq, recorder.lost()), (30, 17));
        recorder.finish().unwrap();
        let (trace, events) = written(dir.path());
        assert_eq!(trace["otherData"]["lost_spans"], 17);
        let of = |name: &str| -> Vec<&Value> {
            events
                .iter()
                .filter(|event| event["name"] == name)
                .collect()
        };
        let lost: Vec<&Value> = of("spans lost")
            .iter()
            .map(|event| &event["args"]["spans"])
            .collect();
        assert_eq!(lost, [&Value::from(7), &Value::from(10)]);
        let slices = of("slice");
        assert_eq!(slices.len(), 4, "one of them is open");
        // What was charged before the trace is in no span of it.
        assert_eq!(slices[0]["args"]["device_us"], 0.5);
        assert_eq!(slices[0]["args"]["began_before"], true);
        assert_eq!(slices[0]["dur"], 1.0);
        assert_eq!(slices[3]["args"]["open"], true);
        assert_eq!(slices[3]["args"]["device_us"], 0.25);
        assert_eq!(
            trace["otherData"]["accounts"][0]["in_spans_us"],
            0.5 + 0.9 + 0.1 + 0.25
        );
    }

    #[test]
    fn another_timeline_is_asked_from_its_beginning() {
        let dir = tempfile::tempdir().unwrap();
        let mut recorder = recorder(dir.path());
        let ns = recorder.began_ns;
        let other = Timeline {
            ring: 8,
            ..part(1, 3, vec![slice(ns, ns + 1, 1)], ns)
        };
        recorder.take(0, other).unwrap();
        let device = &recorder.devices[0];
        assert_eq!((device.ring, device.seq, recorder.spans), (8, 0, 0));
        assert!(recorder.is_other);
    }

    #[test]
    fn a_mode_that_begins_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let mut recorder = recorder(dir.path());
        let at_ns = recorder.began_ns;
        let modes = [0, 1, 2].map(|count| TimelineSpan {
            kind: SpanKind::Mode,
            count,
            ..slice(at_ns, at_ns, 0)
        });
        let part = part(11, 11, modes.into(), at_ns + 20);
        recorder.take(0, part).unwrap();
        recorder.finish().unwrap();
        let (_, events) = written(dir.path());
        let names = events.iter().filter_map(|event| event["name"].as_str());
        let modes: Vec<&str> = names.filter(|name| name.starts_with("mode ")).collect();
        assert_eq!(modes, ["mode exclusive", "mode concurrent", "mode lend"]);
    }

    #[test]
    fn one_job_alone_has_its_own_spans_only() {
        let dir = tempfile::tempdir().unwrap();
        let mut recorder = recorder(dir.path());
        recorder.job = Some(2);
        let ns = recorder.began_ns;
        recorder
            .take(0, part(1, 11, vec![slice(ns, ns + 9, 9)], ns + 20))
            .unwrap();
        recorder.finish().unwrap();
        let (trace, events) = written(dir.path());
        assert!(events.is_empty(), "{events:?}");
        assert_eq!(
            trace["otherData"]["accounts"].as_array().map(Vec::len),
            Some(0)
        );
    }

    #[test]
    fn the_page_of_traces_has_every_flag() {
        let page = include_str!("../../../docs/how-to/trace.md");
        let command = crate::args::Cli::command();
        let trace = command.find_subcommand("trace").unwrap();
        for flag in trace.get_arguments() {
            let named = format!("--{}", flag.get_long().unwrap());
            assert!(page.contains(&named), "docs/how-to/trace.md: {named}");
        }
    }
}
