//! `sublet record`: the calls of a job, as a file.
//!
//! The command runs with the preload library and without an arbiter, unless this is itself part of
//! a job. Its processes write what they call into a ring; this takes it out and writes the file. A
//! job that is killed has written what it called until then.

pub mod numbers;
mod ring;
mod threads;

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, anyhow, bail};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal, kill};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::unistd::Pid;
use shim_ffi::recording::{Ring, VARIABLE, stopped};

use crate::args::RecordJob;
use crate::exit::{Failure, NOT_EXECUTABLE, NOT_FOUND, Result};
use crate::recording::{End, Provenance, Reason, Writer};
use crate::run::command::{self, CommandError};
use crate::run::driver::{self, Driver, Wish};
use crate::run::environment;
use crate::run::install::Install;
use crate::{as_begun, file_limit};
use numbers::Numbers;
use ring::OwnRing;

/// Between two looks at the ring while nothing comes. TIMEOUT: a ring holds 262,144 calls.
const LOOK: u16 = 5;
/// How old what is not in the file may be.
const FLUSH: Duration = Duration::from_millis(250);
/// TIMEOUT: how long a slot may be unfinished after the command has ended.
const UNFINISHED: Duration = Duration::from_millis(200);
/// Records between two looks at the command and at the clock.
const BATCH: usize = 10_000;

/// Runs the command; its exit code.
///
/// # Errors
/// The command was not started, or its recording could not be written.
pub fn record(args: &RecordJob) -> Result<u8> {
    let program =
        command::find(&args.command[0], std::env::var_os("PATH").as_deref()).map_err(|error| {
            let code = match &error {
                CommandError::NotFound(_) => NOT_FOUND,
                CommandError::NotExecutable { .. } => NOT_EXECUTABLE,
            };
            Failure::with_code(code, error)
        })?;
    let executable = std::env::current_exe().context("cannot tell where `sublet` itself lies")?;
    let install = Install::find(&executable, |name| std::env::var_os(name))?;
    let wish = match &args.driver {
        Some(path) => Wish::This(path),
        None if args.sim => Wish::Simulated,
        None => Wish::Any,
    };
    let library_path = std::env::var_os("LD_LIBRARY_PATH");
    let driver = driver::find(wish, &install, library_path.as_deref())?;
    if let Some(reason) = command::out_of_reach(&program) {
        bail_out(&format!("{reason}, so its calls cannot be recorded"))?;
    }
    file_limit::is_an_error();
    let own = OwnRing::new().context("cannot get memory for the recording")?;
    let file = create(&args.output)?;
    let signals = Signals::take()?;
    let provenance = Provenance {
        sublet: env!("CARGO_PKG_VERSION").to_owned(),
        command: name_of(&program),
        began: jiff::Timestamp::try_from(SystemTime::now())
            .map_or_else(|_| String::new(), |now| format!("{now:.0}")),
        simulated: driver.simulated.is_some(),
        derived: None,
    };
    let writer = Writer::begin(file, args.max_size, &provenance)
        .with_context(|| format!("cannot write {}", args.output.display()))?;
    let began_ns = now_ns();
    let child = start(args, &program, &driver, &install, &own)?;
    if driver
        .simulated
        .is_some_and(|why| why == driver::Simulated::NoDriver)
    {
        say("simulated GPU (this host has no libcuda.so.1)");
    }
    let mut drain = Drain {
        ring: own.ring(),
        numbers: Numbers::new(began_ns, args.no_names),
        writer,
        stopped: None,
        error: None,
        flushed: Instant::now(),
    };
    let status = drain.until_end(child, &signals)?;
    drain.finish(&args.output, status)
}

fn bail_out(message: &str) -> anyhow::Result<()> {
    bail!("{message}")
}

/// `CLOCK_MONOTONIC`, ns.
pub fn now_ns() -> u64 {
    let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC);
    now.map_or(0, |now| {
        // CAST: the monotonic clock is not negative.
        now.tv_sec() as u64 * 1_000_000_000 + now.tv_nsec() as u64
    })
}

/// The command's file name alone: paths are nobody's business.
fn name_of(program: &Path) -> String {
    let name = program.file_name().unwrap_or_default().to_string_lossy();
    name.chars().take(200).collect()
}

fn create(path: &Path) -> anyhow::Result<File> {
    let shown = path.display();
    if path.file_name().is_none() || path.is_dir() {
        bail!("{shown} is no name of a file: write -o job.slr");
    }
    // The writer goes back in its file where a write fails, and a pipe may stand still for ever.
    let kind = std::fs::metadata(path).map(|about| about.file_type());
    if kind.is_ok_and(|kind| kind.is_fifo() || kind.is_socket()) {
        bail!("{shown} is a pipe or a socket; a recording needs a regular file: write -o job.slr");
    }
    OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        // A pipe that took the file's place since then does not hold the command up.
        .custom_flags(nix::libc::O_NONBLOCK)
        .open(path)
        .with_context(|| format!("cannot write {shown}"))
}

fn start(
    args: &RecordJob,
    program: &Path,
    driver: &Driver,
    install: &Install,
    ring: &OwnRing,
) -> Result<Child> {
    let mut command = Command::new(program);
    as_begun::give_to(&mut command);
    command.arg0(&args.command[0]).args(&args.command[1..]);
    for (name, value) in environment::of_recorded(driver, install, |name| std::env::var_os(name)) {
        command.env(name, value);
    }
    command.env(VARIABLE.to_str().unwrap_or_default(), ring.path());
    command.spawn().map_err(|error| {
        let error = anyhow!(error).context(format!("`{}` cannot be executed", program.display()));
        Failure::with_code(NOT_EXECUTABLE, error)
    })
}

/// SIGTERM and SIGHUP are passed on to the command, SIGINT is not: a terminal sends it to both.
struct Signals(SignalFd);

impl Signals {
    fn take() -> anyhow::Result<Self> {
        let mut signals = SigSet::empty();
        for signal in [
            Signal::SIGINT,
            Signal::SIGTERM,
            Signal::SIGHUP,
            Signal::SIGCHLD,
        ] {
            signals.add(signal);
        }
        signals.thread_block().context("cannot take signals")?;
        let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
        let signals = SignalFd::with_flags(&signals, flags).context("cannot take signals")?;
        Ok(Self(signals))
    }

    /// Waits a moment, and passes on what came.
    fn pass_on(&self, child: &Child, wait: bool) {
        if wait {
            let mut fds = [PollFd::new(self.0.as_fd(), PollFlags::POLLIN)];
            let _ = poll(&mut fds, PollTimeout::from(LOOK));
        }
        while let Ok(Some(came)) = self.0.read_signal() {
            // CAST: numbers of signals are small.
            let signal = Signal::try_from(came.ssi_signo as i32);
            if let Ok(signal @ (Signal::SIGTERM | Signal::SIGHUP)) = signal {
                // CAST: process ids are positive.
                let _ = kill(Pid::from_raw(child.id() as i32), signal);
            }
        }
    }
}

fn say(message: &str) {
    // Where stderr is gone there is nobody to tell.
    let _ = writeln!(io::stderr(), "sublet: {message}");
}

struct Drain<'a> {
    ring: &'a Ring,
    numbers: Numbers,
    writer: Writer,
    /// Why nothing more is taken.
    stopped: Option<Reason>,
    error: Option<io::Error>,
    flushed: Instant,
}

impl Drain<'_> {
    fn until_end(&mut self, mut child: Child, signals: &Signals) -> anyhow::Result<ExitStatus> {
        loop {
            let taken = self.take_some();
            if self.flushed.elapsed() >= FLUSH {
                self.flush();
            }
            signals.pass_on(&child, taken < BATCH);
            if let Some(status) = child.try_wait().context("cannot wait for the command")? {
                return Ok(status);
            }
        }
    }

    /// Takes what is there, some of it; how much that was.
    fn take_some(&mut self) -> usize {
        for taken in 0..BATCH {
            let Some(raw) = self.ring.read() else {
                return taken;
            };
            if self.stopped.is_some() {
                continue;
            }
            if let Err(error) = self.numbers.take(&raw, &mut self.writer) {
                self.fail(error);
            }
            if self.writer.is_full() {
                self.stop(Reason::Size);
            }
        }
        BATCH
    }

    fn flush(&mut self) {
        self.flushed = Instant::now();
        if self.stopped.is_some() {
            return;
        }
        if let Err(error) = self.writer.flush() {
            self.fail(error);
        }
        if self.writer.is_full() {
            self.stop(Reason::Size);
        }
    }

    fn fail(&mut self, error: io::Error) {
        self.error.get_or_insert(error);
        self.stop(Reason::Unwritable);
    }

    fn stop(&mut self, reason: Reason) {
        self.stopped.get_or_insert(reason);
        self.ring.stop(stopped::BY_READER);
    }

    /// The command has ended: what its processes have written is taken, and the end is written.
    fn finish(mut self, path: &Path, status: ExitStatus) -> Result<u8> {
        let is_overrun = self.ring.stopped() == stopped::OVERRUN;
        self.ring.stop(stopped::BY_READER);
        let mut unfinished = Instant::now();
        let mut lost = 0;
        loop {
            if self.take_some() > 0 {
                unfinished = Instant::now();
            } else if unfinished.elapsed() < UNFINISHED && self.ring.is_behind() {
                std::thread::sleep(Duration::from_millis(1));
            } else if self.ring.skip() {
                lost += 1;
            } else {
                break;
            }
        }
        self.flush();
        if is_overrun {
            self.stopped.get_or_insert(Reason::Overrun);
        }
        let end = End {
            reason: self.stopped.unwrap_or(Reason::CommandEnded),
            lost: self.ring.lost() + lost,
            records: self.writer.count,
            exit: Some(exit_code(status)),
        };
        if let Err(error) = self.writer.end(&end) {
            self.error.get_or_insert(error);
        }
        let shown = path.display();
        let part = format!("{} records are in {shown}", end.records);
        if end.lost > 0 {
            say(&format!(
                "{} calls are not in {shown}: a replay of it does less than the job did",
                end.lost
            ));
        }
        match end.reason {
            _ if self.error.is_some() => {}
            Reason::Size => say(&format!(
                "the recording ends before the command did, since it is as large as it may be: {part} (see --max-size)"
            )),
            Reason::Overrun => say(&format!(
                "the recording ends before the command did, which called faster than the file could be written: {part}"
            )),
            _ if end.records == 0 => say(&format!(
                "{shown} has no calls: the command made none, or not where the library could see them (try `sublet doctor`)"
            )),
            _ => say(&format!(
                "{shown}: {} records, {} KiB; `sublet replay {shown}` replays them",
                end.records,
                self.writer.bytes().div_ceil(1024)
            )),
        }
        match self.error {
            Some(error) => Err(anyhow!(
                "{shown} ends early, what is in it is whole ({part}); the command ended with {}: {error} (free some space, or give a smaller --max-size)",
                exit_code(status)
            )
            .into()),
            // CAST: an exit code has eight bits.
            None => Ok(exit_code(status) as u8),
        }
    }
}

/// As shells count: the command's own, or 128 and the signal that ended it.
fn exit_code(status: ExitStatus) -> i32 {
    match (status.code(), status.signal()) {
        (Some(code), _) => code,
        (None, Some(signal)) => 128 + signal,
        (None, None) => 1,
    }
}
