//! What outlives the arbiter: the jobs, their tokens and who was attached, in `state.json`, replaced as a whole.
//!
//! Written by a thread of its own ([`StateFile`]): making the text, and a file system that takes its time, delay no hand-over. What is
//! handed over while an older state is being written replaces the one that waits, so the file is at most one write behind.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use control::{DeviceSettings, JobSpec};
use serde::{Deserialize, Serialize};

/// Format of the file.
const VERSION: u32 = 1;

/// The file.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct State {
    pub version: u32,
    /// Incarnations of the arbiter so far.
    pub epoch: u64,
    /// Number of the next job.
    pub next_id: u64,
    /// Its jobs.
    pub tenants: Vec<SavedTenant>,
    /// What iterations take without others, by the job's name.
    pub baselines: Vec<SavedBaseline>,
    /// Devices of which something was set by hand.
    pub devices: Vec<SavedDevice>,
}

/// What an iteration of a job of this name takes without others.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct SavedBaseline {
    pub name: String,
    pub iteration_ns: f64,
    /// Submissions per iteration; 0: whatever they are.
    pub launches: f64,
    /// An operator has set it.
    pub set: bool,
    pub unix_ms: u64,
}

/// What was set on a device by hand.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct SavedDevice {
    pub uuid: String,
    pub settings: DeviceSettings,
}

/// A job.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct SavedTenant {
    pub id: u64,
    pub token: String,
    pub uid: u32,
    pub job: JobSpec,
    /// Start time of `job.pid` in clock ticks since boot; 0: that process has ended.
    pub started_ticks: u64,
    pub started_unix_ms: u64,
    pub oom_count: u64,
    pub clients: Vec<SavedClient>,
}

/// An attached process.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct SavedClient {
    pub pid: u32,
    pub started_ticks: u64,
    pub slot: u32,
    pub journal_next: u64,
}

impl State {
    /// Reads the file. One that is missing is an empty one; one that is damaged or of another version is said to be so and
    /// then an empty one too: jobs go on without an arbiter, an arbiter that does not start helps nobody.
    pub fn load(path: &Path) -> (Self, Option<String>) {
        let bytes = match fs::read(path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return (Self::default(), None);
            }
            Err(error) => return (Self::default(), Some(error.to_string())),
        };
        match serde_json::from_slice::<Self>(&bytes) {
            Ok(state) if state.version == VERSION => (state, None),
            Ok(state) => {
                let reason = format!(
                    "it has version {}, this arbiter writes {VERSION}",
                    state.version
                );
                (Self::default(), Some(reason))
            }
            Err(error) => (Self::default(), Some(error.to_string())),
        }
    }

    /// Writes the file beside itself and moves it into place, so that a reader, or the next arbiter, sees all of it or the
    /// one before. Only this user can read it: it has tokens in it.
    pub fn save(&mut self, path: &Path) -> io::Result<()> {
        self.version = VERSION;
        let beside = path.with_extension("json.new");
        let mut file = fs::OpenOptions::new()
            .create(true)
            .truncate(true)
            .write(true)
            .mode(0o600)
            .open(&beside)?;
        file.write_all(&serde_json::to_vec(self)?)?;
        fs::rename(&beside, path)
    }
}

/// The file of the state, and the thread that writes it.
#[derive(Debug)]
pub struct StateFile {
    desk: Arc<Desk>,
    thread: Option<JoinHandle<()>>,
}

/// What the two sides share.
#[derive(Debug, Default)]
struct Desk {
    tray: Mutex<Tray>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Tray {
    /// To be written next.
    newest: Option<State>,
    /// One is being written.
    writing: bool,
    /// No more will come.
    over: bool,
}

impl Desk {
    /// A thread that panicked leaves a tray that is as good as any.
    fn tray(&self) -> MutexGuard<'_, Tray> {
        self.tray.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, tray: MutexGuard<'a, Tray>) -> MutexGuard<'a, Tray> {
        self.changed
            .wait(tray)
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes what comes until there will be no more.
    fn write_all(&self, path: &Path) {
        let mut tray = self.tray();
        loop {
            let Some(mut state) = tray.newest.take() else {
                if tray.over {
                    return;
                }
                tray = self.wait(tray);
                continue;
            };
            tray.writing = true;
            drop(tray);
            if let Err(error) = state.save(path) {
                tracing::error!(
                    "{} cannot be written, a restarted arbiter will not know its jobs: {error}",
                    path.display()
                );
            }
            tray = self.tray();
            tray.writing = false;
            self.changed.notify_all();
        }
    }
}

impl StateFile {
    /// Starts the thread.
    pub fn start(path: PathBuf) -> io::Result<Self> {
        let desk = Arc::new(Desk::default());
        let other = Arc::clone(&desk);
        let thread = std::thread::Builder::new()
            .name("state".into())
            .spawn(move || other.write_all(&path))?;
        Ok(Self {
            desk,
            thread: Some(thread),
        })
    }

    /// Has a state written, soon.
    pub fn save(&self, state: State) {
        self.desk.tray().newest = Some(state);
        self.desk.changed.notify_all();
    }

    /// Waits until everything is written: for as long as the file system takes, as a write of our own would.
    pub fn settle(&self) {
        let mut tray = self.desk.tray();
        while tray.newest.is_some() || tray.writing {
            tray = self.desk.wait(tray);
        }
    }
}

impl Drop for StateFile {
    /// Everything is written before whoever holds the directory's lock lets go of it.
    fn drop(&mut self) {
        self.desk.tray().over = true;
        self.desk.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_state_is_written_in_the_end_and_before_its_file_is_let_go() {
        let dir = tempfile::tempdir().expect("dir");
        let path = dir.path().join("state.json");
        let of = |next_id| State {
            next_id,
            ..State::default()
        };
        let file = StateFile::start(path.clone()).expect("a thread");
        file.save(of(1));
        file.settle();
        assert_eq!(State::load(&path).0.next_id, 1);
        (2..500).for_each(|next_id| file.save(of(next_id)));
        file.settle();
        assert_eq!(State::load(&path).0.next_id, 499);
        file.save(of(500));
        drop(file);
        assert_eq!(State::load(&path).0.next_id, 500);
    }

    #[test]
    fn a_directory_that_is_gone_ends_nothing() {
        let dir = tempfile::tempdir().expect("dir");
        let path = dir.path().join("gone").join("state.json");
        let file = StateFile::start(path.clone()).expect("a thread");
        file.save(State::default());
        file.settle();
        std::fs::create_dir(dir.path().join("gone")).expect("it is back");
        file.save(State::default());
        drop(file);
        assert_eq!(State::load(&path).1, None);
        assert!(path.exists());
    }

    #[test]
    fn it_comes_back_as_it_was_and_damage_is_told() {
        let dir = tempfile::tempdir().expect("dir");
        let path = dir.path().join("state.json");
        assert_eq!(State::load(&path), (State::default(), None));
        let mut state = State {
            epoch: 3,
            next_id: 9,
            tenants: vec![SavedTenant {
                token: "ab".into(),
                clients: vec![SavedClient::default()],
                ..SavedTenant::default()
            }],
            devices: vec![SavedDevice {
                uuid: "GPU-ff".into(),
                settings: DeviceSettings {
                    quantum_max_us: Some(9000),
                    ..DeviceSettings::default()
                },
            }],
            ..State::default()
        };
        state.save(&path).expect("saved");
        assert_eq!(State::load(&path), (state, None));
        fs::write(&path, b"{\"version\":1,\"epoch\":").expect("damage");
        let (empty, reason) = State::load(&path);
        assert_eq!(empty, State::default());
        assert!(reason.is_some());
        fs::write(&path, b"{\"version\":7}").expect("newer");
        let (_, reason) = State::load(&path);
        assert!(reason.is_some_and(|reason| reason.contains('7')));
    }
}
