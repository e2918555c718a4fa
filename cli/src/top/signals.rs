//! Signals that end, stop or continue the program: they wait until the terminal has been given
//! back, or has been taken again.

use std::io;
use std::sync::mpsc::Sender;
use std::thread;
use std::time::Duration;

use nix::sys::signal::{self, SigSet, SigmaskHow, Signal};

use super::screen;

/// Those that end a program.
const ENDING: [Signal; 4] = [
    Signal::SIGTERM,
    Signal::SIGINT,
    Signal::SIGHUP,
    Signal::SIGQUIT,
];

/// TIMEOUT: how long the end may take where the terminal takes no more output (Ctrl-S), before the
/// program ends as it is.
const PATIENCE: Duration = Duration::from_secs(2);

fn ours() -> SigSet {
    let mut set: SigSet = ENDING.into_iter().collect();
    set.add(Signal::SIGTSTP);
    set.add(Signal::SIGCONT);
    set
}

/// Holds them back; to be called before there is a second thread.
///
/// # Errors
/// The system's.
pub fn hold_back() -> io::Result<()> {
    Ok(ours().thread_block()?)
}

/// Has a thread report each.
pub fn report<M: Send + 'static>(
    to: Sender<M>,
    message: impl Fn(Signal) -> M + Send + 'static,
) -> io::Result<()> {
    let wait = move || {
        while let Ok(signal) = ours().wait() {
            if to.send(message(signal)).is_err() {
                return;
            }
            if ENDING.contains(&signal) {
                thread::sleep(PATIENCE);
                end_by(signal);
            }
        }
    };
    thread::Builder::new().name("signals".into()).spawn(wait)?;
    Ok(())
}

/// Ends the process by a signal, as it would have ended without us.
pub fn end_by(signal: Signal) {
    screen::give_back();
    let _ = signal::raise(signal);
    let _ = let_in(signal);
}

/// Stops the process until somebody continues it. Does nothing where there is nobody who could.
pub fn stop() {
    let _ = signal::raise(Signal::SIGTSTP);
    // It is stopped here.
    let _ = let_in(Signal::SIGTSTP);
    let _ = hold_back();
}

/// Asks everybody that the terminal would ask to stop at Ctrl-Z.
pub fn ask_to_stop() {
    let _ = signal::kill(nix::unistd::Pid::from_raw(0), Signal::SIGTSTP);
}

fn let_in(signal: Signal) -> nix::Result<()> {
    let mut set = SigSet::empty();
    set.add(signal);
    signal::pthread_sigmask(SigmaskHow::SIG_UNBLOCK, Some(&set), None)
}
