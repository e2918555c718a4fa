//! A job on a terminal: it is the terminal's process as it would be without us.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use host_process::{Artefacts, Host, Way};
use nix::libc;
use nix::pty::{Winsize, openpty};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use testbed::CommandWithin;

/// TIMEOUT: after which a program counts as hung.
const PATIENCE: Duration = Duration::from_secs(120);

/// A program on a terminal of its own, of which this is the other side.
struct Terminal {
    keys: File,
    screen: Receiver<Vec<u8>>,
    shown: String,
    pid: Pid,
}

fn window(rows: u16, columns: u16) -> Winsize {
    Winsize {
        ws_row: rows,
        ws_col: columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    }
}

impl Terminal {
    fn start(mut command: Command) -> Self {
        let pair = openpty(Some(&window(40, 100)), None).expect("a pseudoterminal");
        let slave = || pair.slave.try_clone().expect("a descriptor");
        command.stdin(slave()).stdout(slave()).stderr(slave());
        // SAFETY: between fork and exec only these two system calls are made; descriptor 0 is the
        // terminal by then.
        unsafe {
            command.pre_exec(|| {
                if libc::setsid() < 0 || libc::ioctl(0, libc::TIOCSCTTY, 0) < 0 {
                    return Err(std::io::Error::last_os_error());
                }
                Ok(())
            });
        }
        #[expect(clippy::zombie_processes, reason = "`end` waits for it")]
        let child = command.spawn().expect("it starts");
        drop(command);
        drop(pair.slave);
        let keys = File::from(pair.master);
        let mut from = keys.try_clone().expect("a descriptor");
        let (to, screen) = channel();
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            // The end shows as an error of the device.
            while let Ok(bytes @ 1..) = from.read(&mut buffer) {
                if to.send(buffer[..bytes].to_vec()).is_err() {
                    return;
                }
            }
        });
        Self {
            keys,
            screen,
            shown: String::new(),
            // CAST: process ids are positive and small.
            pid: Pid::from_raw(child.id() as i32),
        }
    }

    /// Reads until `text` is shown.
    fn until(&mut self, text: &str) {
        while !self.shown.contains(text) {
            match self.screen.recv_timeout(PATIENCE) {
                Ok(bytes) => self.shown += &String::from_utf8_lossy(&bytes),
                Err(error) => panic!("{text:?} is never shown ({error}): {:?}", self.shown),
            }
        }
    }

    fn press(&mut self, key: u8) {
        self.keys.write_all(&[key]).expect("the terminal takes it");
    }

    fn resize(&self, rows: u16, columns: u16) {
        use std::os::fd::AsRawFd;
        let size = window(rows, columns);
        // SAFETY: a terminal, and a size of ours.
        let done = unsafe { libc::ioctl(self.keys.as_raw_fd(), libc::TIOCSWINSZ, &raw const size) };
        assert_eq!(done, 0);
    }

    /// Its end or, with these flags, its next change; at most [`PATIENCE`].
    fn wait(&self, flags: WaitPidFlag) -> WaitStatus {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let status = waitpid(self.pid, Some(flags | WaitPidFlag::WNOHANG)).expect("our child");
            if status != WaitStatus::StillAlive {
                return status;
            }
            if Instant::now() >= deadline {
                let _ = kill(self.pid, Signal::SIGKILL);
                panic!("process {} does not end: {:?}", self.pid, self.shown);
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// All that it showed, and how it ended.
    fn end(mut self) -> (String, WaitStatus) {
        let status = self.wait(WaitPidFlag::empty());
        while let Ok(bytes) = self.screen.recv_timeout(PATIENCE) {
            self.shown += &String::from_utf8_lossy(&bytes);
        }
        // The word that the GPU is simulated is for people, and shows here.
        let lines = self.shown.lines();
        let own = lines.filter(|line| !line.starts_with("sublet: simulated GPU"));
        (own.collect::<Vec<_>>().join("\n"), status)
    }
}

const INTERRUPT: u8 = 3;

/// A session at the terminal, up to Ctrl-C.
fn session(command: Command) -> (String, WaitStatus) {
    let mut terminal = Terminal::start(command);
    terminal.until("ready\r\n");
    terminal.resize(50, 120);
    terminal.until("new size: 50 rows, 120 columns\r\n");
    // Ctrl-Z does nothing to a session's leader, whose group is no shell's job.
    kill(terminal.pid, Signal::SIGSTOP).expect("it is there");
    let stopped = terminal.wait(WaitPidFlag::WUNTRACED);
    assert_eq!(stopped, WaitStatus::Stopped(terminal.pid, Signal::SIGSTOP));
    kill(terminal.pid, Signal::SIGCONT).expect("it is there");
    // To the end of the line: the key throws away what is not read yet.
    terminal.until("continued, driver 0\r\n");
    terminal.press(INTERRUPT);
    terminal.until("interrupted, driver 0\r\n");
    kill(terminal.pid, Signal::SIGTERM).expect("it is there");
    let (shown, status) = terminal.end();
    let status = match status {
        WaitStatus::Exited(_, code) => WaitStatus::Exited(Pid::from_raw(0), code),
        other => other,
    };
    (shown, status)
}

fn host(args: &[&str]) -> Host {
    let program = Artefacts::get()
        .compile("on_terminal", "on_terminal.c", None, &[])
        .unwrap();
    Host::new(program, args)
}

#[test]
fn a_job_on_a_terminal_is_the_terminals_process() {
    let host = host(&[]);
    let bare = session(host.command(Way::Bare));
    assert_eq!(bare.1, WaitStatus::Exited(Pid::from_raw(0), 42), "{bare:?}");
    for line in [
        "terminals 1 1 1",
        "leader of its session 1, in the foreground 1",
        "controlling terminal 1",
        "size: 40 rows, 100 columns",
        "interrupted, driver 0",
    ] {
        assert!(bare.0.contains(line), "{line}: {bare:?}");
    }
    for way in [Way::Preloaded, Way::Job] {
        assert_eq!(session(host.command(way)), bare, "{way:?}");
    }
}

#[test]
fn ctrl_c_ends_a_job_as_it_would_the_program() {
    for way in [Way::Bare, Way::Job] {
        let host = host(&["default"]);
        let mut terminal = Terminal::start(host.command(way));
        terminal.until("ready\r\n");
        terminal.press(INTERRUPT);
        let pid = terminal.pid;
        let (shown, status) = terminal.end();
        let killed = WaitStatus::Signaled(pid, Signal::SIGINT, false);
        assert_eq!(status, killed, "{way:?}: {shown}");
        // Nothing of ours has kept it from ending, and the job is over.
        if way == Way::Job {
            let jobs = host.ps()["jobs"].clone();
            let running = jobs.as_array().into_iter().flatten();
            assert!(running.clone().all(|job| job["state"] == "gone"), "{jobs}");
        }
    }
}

/// `nohup scripts/test &` leaves Ctrl-C ignored in everything that it starts, and hung here for
/// ever.
#[test]
fn ctrl_c_ends_a_job_also_where_the_tests_were_started_by_nohup() {
    let mut again = Command::new("nohup");
    again
        .arg(std::env::current_exe().expect("this program has a path"))
        .args([
            "--exact",
            "terminal::ctrl_c_ends_a_job_as_it_would_the_program",
        ])
        // As from somewhere else: what marks our own children as clean is not handed on.
        .env_remove("SUBLET_TEST_CLEANED_BY");
    // SAFETY: between fork and exec only these system calls are made.
    unsafe {
        again.pre_exec(|| {
            for signal in [libc::SIGINT, libc::SIGQUIT, libc::SIGHUP, libc::SIGCHLD] {
                libc::signal(signal, libc::SIG_IGN);
            }
            Ok(())
        });
    }
    let output = again.output_within(2 * PATIENCE);
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && said.contains("1 passed"),
        "{said}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    println!(
        "now: a job on a terminal ends by Ctrl-C where SIGINT, SIGQUIT, SIGHUP and SIGCHLD were ignored by inheritance"
    );
}

#[test]
fn the_arbiter_keeps_nothing_of_its_first_job_open() {
    // A pipe under a number that the command does not know of, as a build tool's job server has it.
    let program = Artefacts::get().sublet();
    let script = format!(
        "{{ {} run --sim -- true 2>/dev/null 7>&8; }} 8>&1 | cat",
        program.display()
    );
    let host = Host::new("/bin/true", &["unused"]);
    let mut shell = Command::new("/bin/sh");
    shell
        .args(["-c", &script])
        .env("SUBLET_RUNTIME_DIR", host.at("run"))
        .env("SUBLET_SIM_STATE", host.at("sim"));
    let output = shell.output_within(testbed::PATIENCE);
    assert!(output.status.success(), "{output:?}");
    // `cat` has ended, so nobody holds the pipe; and yet the arbiter is there.
    assert_ne!(host.ps()["arbiter"], serde_json::Value::Null);
}
