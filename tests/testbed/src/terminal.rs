//! A terminal with a program on it: what a person would see there, and what that person presses.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::within::{self, PATIENCE};

/// The person's end of a pseudo-terminal, and the program at the other one. Ended when dropped.
pub struct Terminal {
    child: Child,
    person: File,
    /// Kept open, so that its settings can be looked at after the program's end.
    program: File,
    seen: Arc<Mutex<vt100::Parser>>,
    before: libc::termios,
}

impl Terminal {
    /// Starts a program on a new terminal, in a process group of its own.
    ///
    /// # Panics
    /// Where there is no terminal, or the program cannot be started.
    #[must_use]
    pub fn start(command: &mut Command, rows: u16, columns: u16) -> Self {
        let (person, program) = open(rows, columns);
        let end = || program.try_clone().expect("a descriptor");
        command.stdin(end()).stdout(end()).stderr(end());
        let before = settings(&program);
        let child = command
            .process_group(0)
            .spawn()
            .unwrap_or_else(|error| panic!("{command:?}: {error}"));
        // The command has copies of the program's end.
        command
            .stdin(std::process::Stdio::null())
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null());
        let seen = Arc::new(Mutex::new(vt100::Parser::new(rows, columns, 0)));
        let (mut from, to) = (person.try_clone().expect("a descriptor"), seen.clone());
        // Ends with the terminal.
        thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(read @ 1..) = from.read(&mut bytes) {
                lock(&to).process(&bytes[..read]);
            }
        });
        Self {
            child,
            person,
            program,
            seen,
            before,
        }
    }

    /// The program's process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What is on the screen, line by line.
    #[must_use]
    pub fn text(&self) -> String {
        lock(&self.seen).screen().contents()
    }

    /// Waits until this is on the screen.
    ///
    /// # Panics
    /// Where it does not come.
    #[track_caller]
    pub fn shows(&self, text: &str) {
        self.wait(&format!("`{text}` is on the screen"), || {
            self.text().contains(text)
        });
    }

    /// # Panics
    /// Where it stays.
    #[track_caller]
    pub fn shows_no(&self, text: &str) {
        self.wait(&format!("`{text}` leaves the screen"), || {
            !self.text().contains(text)
        });
    }

    #[track_caller]
    fn wait(&self, what: &str, holds: impl Fn() -> bool) {
        let end = Instant::now() + PATIENCE;
        while !holds() {
            assert!(
                Instant::now() < end,
                "in vain: {what}; there is\n{}",
                self.text()
            );
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Presses keys, or sends what a terminal sends for a click.
    ///
    /// # Panics
    /// Where the terminal has gone.
    pub fn press(&mut self, keys: &str) {
        self.person.write_all(keys.as_bytes()).expect("a terminal");
    }

    /// Gives the terminal another size, of which the program is notified.
    ///
    /// # Panics
    /// Where the terminal has gone.
    pub fn resize(&self, rows: u16, columns: u16) {
        lock(&self.seen).screen_mut().set_size(rows, columns);
        let size = size(rows, columns);
        // SAFETY: the descriptor is a terminal's, and the structure outlives the call.
        let set = unsafe { libc::ioctl(self.person.as_raw_fd(), libc::TIOCSWINSZ, &size) };
        assert_eq!(set, 0, "the size of a terminal");
        self.signal(libc::SIGWINCH);
    }

    /// # Panics
    /// Where the program has ended.
    pub fn signal(&self, signal: libc::c_int) {
        // CAST: process ids are positive.
        let pid = self.child.id() as libc::pid_t;
        // SAFETY: it is our child, which has not been waited for.
        assert_eq!(unsafe { libc::kill(pid, signal) }, 0, "signal {signal}");
    }

    /// Waits until the program is stopped.
    ///
    /// # Panics
    /// Where it is not.
    #[track_caller]
    pub fn is_stopped(&self) {
        let stat = format!("/proc/{}/stat", self.child.id());
        self.wait("the program is stopped", || {
            let stat = std::fs::read_to_string(&stat).unwrap_or_default();
            stat.rsplit(") ")
                .next()
                .is_some_and(|rest| rest.starts_with('T'))
        });
    }

    /// Waits until the screen is the program's own: not the one with the lines from before.
    ///
    /// # Panics
    /// Where it is not.
    #[track_caller]
    pub fn is_taken(&self) {
        self.wait("the program has the screen", || {
            lock(&self.seen).screen().alternate_screen()
        });
    }

    /// Waits until everything is as it was before the program: the screen, the cursor, the mouse,
    /// and the settings of the terminal.
    ///
    /// # Panics
    /// Where it is not.
    #[track_caller]
    pub fn is_given_back(&self) {
        self.wait("the screen is given back", || {
            let seen = lock(&self.seen);
            let screen = seen.screen();
            !screen.alternate_screen()
                && !screen.hide_cursor()
                && screen.mouse_protocol_mode() == vt100::MouseProtocolMode::None
        });
        let flags = |it: &libc::termios| (it.c_iflag, it.c_oflag, it.c_cflag, it.c_lflag);
        let before = flags(&self.before);
        self.wait("the settings are given back", || {
            flags(&settings(&self.program)) == before
        });
    }

    /// Waits for the program's end.
    ///
    /// # Panics
    /// Where it does not end.
    #[track_caller]
    pub fn end(&mut self) -> ExitStatus {
        within::wait(&mut self.child, "the program on the terminal", PATIENCE)
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        within::reap(&mut self.child);
    }
}

fn lock(seen: &Mutex<vt100::Parser>) -> MutexGuard<'_, vt100::Parser> {
    seen.lock().unwrap_or_else(PoisonError::into_inner)
}

fn size(rows: u16, columns: u16) -> libc::winsize {
    libc::winsize {
        ws_row: rows,
        ws_col: columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    }
}

fn open(rows: u16, columns: u16) -> (File, File) {
    let (mut person, mut program) = (-1, -1);
    let size = size(rows, columns);
    // SAFETY: both descriptors and the size outlive the call; the name and the settings may be
    // null.
    let opened = unsafe {
        libc::openpty(
            &mut person,
            &mut program,
            std::ptr::null_mut(),
            std::ptr::null(),
            &size,
        )
    };
    assert_eq!(opened, 0, "a pseudo-terminal");
    for fd in [person, program] {
        // SAFETY: a descriptor of ours, and a flag. Other tests start programs meanwhile.
        unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) };
    }
    // SAFETY: both were just opened, and nobody else has them.
    unsafe { (File::from_raw_fd(person), File::from_raw_fd(program)) }
}

fn settings(terminal: &File) -> libc::termios {
    let mut settings = std::mem::MaybeUninit::zeroed();
    // SAFETY: the descriptor is a terminal's, and the structure outlives the call; it is plain
    // data, for which zeros are a value.
    unsafe {
        let got = libc::tcgetattr(terminal.as_raw_fd(), settings.as_mut_ptr());
        assert_eq!(got, 0, "the settings of a terminal");
        settings.assume_init()
    }
}
