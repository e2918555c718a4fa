//! What outlives the arbiter: the jobs, their tokens and who was attached, in `state.json`,
//! replaced as a whole.
//!
//! Written by a thread of its own ([`StateFile`], a [`Writer`]): making the text, and a file system
//! that takes its time, delay no hand-over. What is handed over while an older state is being
//! written replaces the one that waits, so the file is at most one write behind. States are
//! numbered; a caller that has to know that one is on disk asks for the number, and is woken by a
//! descriptor. Nobody on the loop waits.

use std::fs;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use control::place::Identity;
use control::{DeviceSettings, JobSpec};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::bell::Bell;
use crate::container::InContainer;
use crate::premises::Title;
use crate::writer::Writer;

/// Format of the file.
const VERSION: u32 = 2;

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
    pub oom_largest_bytes: u64,
    pub oom_limit_bytes: u64,
    pub clients: Vec<SavedClient>,
    /// When it registered, in clock ticks since boot.
    pub since_ticks: u64,
    /// Session that its launcher led; 0: none.
    pub session: u32,
    /// Other processes that belong to it, as they were last seen.
    pub members: Vec<SavedProcess>,
    /// Processes that have joined the registering one.
    pub joined: Vec<SavedProcess>,
    /// Since when nothing of it uses a device and its launcher is gone; 0: that is not so.
    pub dormant_unix_ms: u64,
    /// Login name of its user.
    pub user: String,
    /// Who else registered it.
    pub identity: Identity,
    /// The container that it is.
    pub container: Option<InContainer>,
    /// What the container is known by in which it was registered; empty: it was in none.
    pub registered_in: String,
    /// Root has given it something.
    pub unbound: bool,
    /// The group of jobs with which it takes turns; `None`: it is in none.
    pub turn: Option<SavedTurn>,
}

/// What a job has to do with the turn of its group.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct SavedTurn {
    pub group: String,
    /// It has the turn, or is about to.
    pub holds: bool,
    /// It had it last.
    pub was_last: bool,
    /// Its memory is to be away.
    pub is_away: bool,
}

/// A process.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct SavedProcess {
    pub pid: u32,
    pub started_ticks: u64,
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
    /// Reads the file. A missing one is an empty one; a damaged one, or one of another version, is
    /// reported and then an empty one too: jobs go on without an arbiter, an arbiter that does not
    /// start helps nobody.
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

    /// Writes the file beside itself and moves it into place once the disk has it, so that a
    /// reader, the next arbiter or the next boot sees all of it or the one before. Only this user
    /// can read it: it has tokens in it.
    pub fn save(&mut self, path: &Path) -> io::Result<()> {
        self.version = VERSION;
        let directory = path.parent().unwrap_or(Path::new("."));
        // Always the same name: one that a killed arbiter has left is written over.
        let beside = path.with_extension("json.new");
        let mut file = tempfile::Builder::new()
            .prefix(beside.file_name().unwrap_or_default())
            .rand_bytes(0)
            .make_in(directory, |beside| {
                fs::OpenOptions::new()
                    .create(true)
                    .truncate(true)
                    .write(true)
                    .mode(0o600)
                    .open(beside)
            })?;
        file.write_all(&serde_json::to_vec(self)?)?;
        file.as_file().sync_all()?;
        file.persist(path)?;
        fs::File::open(directory)?.sync_all()
    }
}

/// The file of the state, and the thread that writes it.
#[derive(Debug)]
pub struct StateFile {
    /// An entry of it wakes the thread for the state that is to be written next.
    writer: Writer,
    shared: Arc<Shared>,
    saved: u64,
    /// Rings once a state was written since that was asked last.
    bell: Bell,
}

/// What the two sides share.
#[derive(Debug, Default)]
struct Shared {
    /// To be written next.
    newest: Mutex<Option<(u64, State)>>,
    /// Number of the last one of which the file has seen the end, well or not.
    done: AtomicU64,
}

impl StateFile {
    /// Starts the thread, which writes as long as the directory is this arbiter's.
    pub fn start(path: PathBuf, title: Title) -> io::Result<Self> {
        let shared = Arc::<Shared>::default();
        let bell = Bell::new()?;
        let (other, ring) = (Arc::clone(&shared), bell.clone());
        let mut failed = None;
        let sink = move |_: &[u8]| {
            let Some((number, mut state)) = other.newest.lock().take() else {
                return Ok(());
            };
            let saved = title.check().and_then(|()| state.save(&path));
            let error = saved.err().map(|error| error.to_string());
            if let Some(error) = error.as_ref().filter(|_| error != failed) {
                tracing::error!(
                    "{} cannot be written, a restarted arbiter will not know its jobs: {error}",
                    path.display()
                );
            }
            failed = error;
            // SYNC(done): pairs with `StateFile::done`; what it publishes is the file.
            other.done.store(number, Ordering::Release);
            ring.ring();
            Ok(())
        };
        Ok(Self {
            writer: Writer::start("state", Box::new(sink))?,
            shared,
            saved: 0,
            bell,
        })
    }

    /// Has a state written, soon; its number. Never waits for a disk.
    pub fn save(&mut self, state: State) -> u64 {
        self.saved += 1;
        let waiting = self.shared.newest.lock().replace((self.saved, state));
        // The thread has been woken for one that waits, and takes this one instead.
        if waiting.is_none() {
            self.writer.push(Vec::new());
        }
        self.saved
    }

    /// Number of the last state that is in the file, or would be if it could be written.
    pub fn done(&self) -> u64 {
        // SYNC(done): pairs with the writing thread's store.
        self.shared.done.load(Ordering::Acquire)
    }

    /// Rings when a state was written.
    pub fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// Silences the bell. What it rang for is asked after this.
    pub fn answer_bell(&self) {
        self.bell.silence();
    }

    /// Waits until everything is written, `limit` at most; whether it is. Not for the loop. The
    /// same is done in the end, before the holder of the directory's lock releases it.
    pub fn settle(&self, limit: Duration) -> bool {
        self.writer.settle(limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::writer::IN_THE_END;

    const PATIENCE: Duration = Duration::from_secs(60);

    #[test]
    fn the_newest_state_is_written_before_its_file_is_released() {
        let dir = tempfile::tempdir().expect("dir");
        let path = dir.path().join("state.json");
        let of = |next_id| State {
            next_id,
            ..State::default()
        };
        let mut file =
            StateFile::start(path.clone(), Title::unquestioned(dir.path())).expect("a thread");
        assert_eq!(file.save(of(1)), 1);
        assert!(file.settle(PATIENCE));
        assert_eq!(file.done(), 1);
        assert_eq!(State::load(&path).0.next_id, 1);
        (2..500).for_each(|next_id| assert_eq!(file.save(of(next_id)), next_id));
        assert!(file.settle(PATIENCE));
        assert_eq!(file.done(), 499);
        assert_eq!(State::load(&path).0.next_id, 499);
        file.save(of(500));
        drop(file);
        assert_eq!(State::load(&path).0.next_id, 500);
    }

    #[test]
    fn a_directory_that_is_gone_ends_nothing() {
        let dir = tempfile::tempdir().expect("dir");
        let path = dir.path().join("gone").join("state.json");
        let mut file =
            StateFile::start(path.clone(), Title::unquestioned(dir.path())).expect("a thread");
        file.save(State::default());
        assert!(file.settle(PATIENCE));
        assert_eq!(file.done(), 1, "nobody waits for what cannot be written");
        std::fs::create_dir(dir.path().join("gone")).expect("it is back");
        file.save(State::default());
        drop(file);
        assert_eq!(State::load(&path).1, None);
        assert!(path.exists());
    }

    #[test]
    fn a_disk_that_stands_still_keeps_nobody_waiting() {
        // A pipe that nobody reads from takes no writer in: what opens it waits, as on a disk that
        // does not answer.
        let dir = tempfile::tempdir().expect("dir");
        let path = dir.path().join("state.json");
        let beside = path.with_extension("json.new");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &beside,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
            0,
        )
        .expect("a pipe");
        let mut file = StateFile::start(path, Title::unquestioned(dir.path())).expect("a thread");
        for number in 1..100 {
            assert_eq!(file.save(State::default()), number);
        }
        assert!(!file.settle(Duration::from_millis(20)));
        assert_eq!(file.done(), 0);
        file.answer_bell();
        // And its end does not wait for ever.
        let reader = std::thread::spawn(move || {
            std::thread::sleep(IN_THE_END * 2);
            let _ = fs::File::open(beside);
        });
        drop(file);
        reader.join().expect("the pipe is read in the end");
    }

    #[test]
    fn it_comes_back_as_it_was_and_damage_is_reported() {
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
                    quantum: Some(control::Span::from_micros(9000)),
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
