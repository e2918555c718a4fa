//! Which processes of this host belong to which job, read from `/proc` by a thread of its own:
//! reading it takes a system call or three per process, and the reactor has none to give away.
//!
//! A process belongs to a job where its environment carries the job's token, where the process is
//! known to belong to it, or where its parent or the leader of its session does. A process that is
//! older than the job's registration never does. A process that has shed its environment, its
//! parents and its session belongs to no job.
//!
//! The cost is bounded: so many processes and so many bytes of each, and a pause of [`REST`] times
//! the time that a full count took before the next one.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use channel::wire::TOKEN_BYTES;
use crossbeam_channel::{Receiver, Sender, at, never, select, unbounded};
use policy::TenantId;

use crate::bell::Bell;
use crate::clock::mono_ns;

/// Processes looked at in one count.
const MAX_PROCESSES: usize = 1 << 17;
/// Bytes read of one environment; the kernel's own limit is a quarter of the stack's, 2 MiB on most
/// hosts.
const MAX_ENVIRONMENT: usize = 2 << 20;
/// Bytes read of one list of mappings.
const MAX_MAPS: u64 = 16 << 20;
/// Ancestors followed.
const MAX_DEPTH: u32 = 64;
/// Members of a job that an answer names.
pub const MAX_MEMBERS: usize = 64;
/// A count takes a twentieth of one core at most.
const REST: u32 = 20;
/// TIMEOUT: jobs that end together are counted together.
const LEAST_REST: Duration = Duration::from_millis(50);
/// What makes a process one of a job.
const TOKEN: &[u8] = b"SUBLET_TOKEN=";
/// What is mapped where the preload library is.
const LIBRARY: &[u8] = b"libsublet";
/// What is mapped where a device is used. In a container NVML may name processes by the host's
/// numbers, which are those of others here.
const DRIVER: [&[u8]; 2] = [b"libcuda", b"/dev/nvidia"];

/// A process, for good: ids are used again, start times are not.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Process {
    /// Its id.
    pub pid: u32,
    /// Its start in clock ticks since boot.
    pub started_ticks: u64,
}

/// What a job is known by.
#[derive(Clone, Debug)]
pub struct Known {
    /// Which.
    pub id: TenantId,
    /// What its environment carries.
    pub token: [u8; TOKEN_BYTES],
    /// When it registered, in clock ticks since boot.
    pub since_ticks: u64,
    /// Processes that belong to it.
    pub members: Vec<Process>,
    /// Session that its launcher led; 0: none.
    pub session: u32,
    /// Whether its processes are to be counted.
    pub wanted: bool,
}

/// Living processes of one job.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Living {
    /// How many.
    pub count: u32,
    /// The first of them.
    pub members: Vec<Process>,
}

/// One process that was asked about.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Found {
    /// Which.
    pub process: Process,
    /// Its job.
    pub job: Option<TenantId>,
    /// The preload library is mapped in it; `None`: its mappings cannot be read.
    pub library: Option<bool>,
    /// So is a driver, as far as can be seen.
    pub driver: bool,
    /// Its command line.
    pub command: String,
}

/// An answer.
#[derive(Debug)]
pub enum Answer {
    /// Of every job that was asked about, what lives of it; `whole`: every process was looked at.
    Counted {
        /// By job.
        living: BTreeMap<TenantId, Living>,
        /// Whether nothing was left out.
        whole: bool,
    },
    /// Processes that were asked about and live, and when they were looked at, on the monotonic
    /// clock.
    Suspects(Vec<Found>, u64),
}

#[derive(Debug)]
enum Ask {
    Count(Vec<Known>),
    Whose(Vec<Known>, Vec<u32>),
}

/// The thread that counts, as the reactor sees it. Ends when dropped.
#[derive(Debug)]
pub struct Census {
    asks: Sender<Ask>,
    answers: Receiver<Answer>,
    bell: Bell,
}

impl Census {
    /// Starts the thread.
    pub fn start() -> std::io::Result<Self> {
        let bell = Bell::new()?;
        let (asks, asked) = unbounded();
        let (tell, answers) = unbounded();
        let ring = bell.clone();
        std::thread::Builder::new()
            .name("census".into())
            .spawn(move || serve(&asked, &tell, &ring))?;
        Ok(Self {
            asks,
            answers,
            bell,
        })
    }

    /// Counts the living processes of these jobs.
    pub fn count(&self, jobs: Vec<Known>) {
        let _ = self.asks.send(Ask::Count(jobs));
    }

    /// Asks to which of these jobs these processes belong.
    pub fn whose(&self, jobs: Vec<Known>, pids: Vec<u32>) {
        let _ = self.asks.send(Ask::Whose(jobs, pids));
    }

    /// Readable when there is an answer.
    pub fn bell(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }

    /// What has arrived.
    pub fn take(&self) -> Vec<Answer> {
        self.bell.silence();
        self.answers.try_iter().collect()
    }
}

fn serve(asked: &Receiver<Ask>, tell: &Sender<Answer>, ring: &Bell) {
    // Nothing waits for it that could not wait longer; the jobs have the host.
    let own = rustix::thread::gettid();
    let _ = rustix::process::setpriority_process(Some(own), 10);
    let mut counting: Option<Vec<Known>> = None;
    let mut not_before = Instant::now();
    loop {
        let due = match counting {
            Some(_) => at(not_before),
            None => never(),
        };
        let answer = select! {
            recv(asked) -> ask => match ask {
                Ok(Ask::Whose(jobs, pids)) => {
                    let reported = Look::new(Path::new("/proc"), &jobs).whose(&pids);
                    Answer::Suspects(reported, mono_ns())
                }
                Ok(Ask::Count(jobs)) => {
                    counting = Some(jobs);
                    continue;
                }
                Err(_) => return,
            },
            recv(due) -> _ => {
                let Some(jobs) = counting.take() else {
                    continue;
                };
                let began = Instant::now();
                let answer = count(Path::new("/proc"), &jobs);
                not_before = Instant::now() + (began.elapsed() * REST).max(LEAST_REST);
                answer
            }
        };
        if tell.send(answer).is_err() {
            return;
        }
        ring.ring();
    }
}

/// Counts, and counts again where nothing of a job was found: a process that is forked while the
/// list is read, and whose parent ends before its own place in it is reached, is in neither place.
fn count(proc: &Path, jobs: &[Known]) -> Answer {
    let (mut living, mut whole) = Look::new(proc, jobs).all();
    let mut wanted = jobs.iter().filter(|job| job.wanted);
    if wanted.any(|job| !living.contains_key(&job.id)) {
        let (again, whole_again) = Look::new(proc, jobs).all();
        whole &= whole_again;
        living.extend(again);
    }
    for job in jobs.iter().filter(|job| job.wanted) {
        living.entry(job.id).or_default();
    }
    Answer::Counted { living, whole }
}

/// One look at `/proc`.
struct Look<'a> {
    proc: PathBuf,
    jobs: &'a [Known],
    /// Place in `jobs`.
    by_token: HashMap<[u8; TOKEN_BYTES], usize>,
    members: HashMap<Process, usize>,
    sessions: HashMap<u32, usize>,
    /// What was found out about a process.
    known: HashMap<u32, Option<(Process, Option<usize>)>>,
    environment: Vec<u8>,
}

/// What is used of `/proc/PID/stat`, see proc_pid_stat(5).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Stat {
    parent: u32,
    session: u32,
    started_ticks: u64,
}

impl<'a> Look<'a> {
    fn new(proc: &Path, jobs: &'a [Known]) -> Self {
        let places = || jobs.iter().enumerate();
        Self {
            proc: proc.to_owned(),
            jobs,
            by_token: places().map(|(at, job)| (job.token, at)).collect(),
            members: places()
                .flat_map(|(at, job)| job.members.iter().map(move |member| (*member, at)))
                .collect(),
            sessions: places()
                .filter(|(_, job)| job.session != 0)
                .map(|(at, job)| (job.session, at))
                .collect(),
            known: HashMap::new(),
            environment: Vec::new(),
        }
    }

    /// Every process; false where some were left out.
    fn all(mut self) -> (BTreeMap<TenantId, Living>, bool) {
        let mut living: BTreeMap<TenantId, Living> = BTreeMap::new();
        let Ok(entries) = std::fs::read_dir(&self.proc) else {
            return (living, false);
        };
        let pids = entries
            .flatten()
            .filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        let mut whole = true;
        for (at, pid) in pids.enumerate() {
            if at == MAX_PROCESSES {
                whole = false;
                break;
            }
            if let Some((process, Some(job))) = self.find(pid, MAX_DEPTH) {
                let living = living.entry(self.jobs[job].id).or_default();
                living.count += 1;
                if living.members.len() < MAX_MEMBERS {
                    living.members.push(process);
                }
            }
        }
        (living, whole)
    }

    /// These processes, as far as they live.
    fn whose(mut self, pids: &[u32]) -> Vec<Found> {
        let found = pids.iter().filter_map(|pid| {
            let (process, job) = self.find(*pid, MAX_DEPTH)?;
            let maps = job.and_then(|_| self.maps_of(*pid));
            Some(Found {
                process,
                job: job.map(|at| self.jobs[at].id),
                library: maps.as_ref().map(|maps| has(maps, LIBRARY)),
                driver: maps
                    .as_ref()
                    .is_none_or(|maps| DRIVER.iter().any(|name| has(maps, name))),
                command: job.map_or_else(String::new, |_| self.command_of(*pid)),
            })
        });
        found.collect()
    }

    /// The process and its job; `None`: it has ended.
    fn find(&mut self, pid: u32, depth: u32) -> Option<(Process, Option<usize>)> {
        if let Some(known) = self.known.get(&pid) {
            return *known;
        }
        let found = self.stat_of(pid).map(|stat| {
            let process = Process {
                pid,
                started_ticks: stat.started_ticks,
            };
            // Until it is found out, so that nothing goes round in circles.
            self.known.insert(pid, Some((process, None)));
            (process, self.judge(process, stat, depth))
        });
        self.known.insert(pid, found);
        found
    }

    fn judge(&mut self, process: Process, stat: Stat, depth: u32) -> Option<usize> {
        // An arbiter that was started inside a job is not the job's.
        if process.pid <= 1 || process.pid == std::process::id() || depth == 0 {
            return None;
        }
        if let Some(at) = self.members.get(&process) {
            return Some(*at);
        }
        let young = |look: &Self, at: &usize| process.started_ticks >= look.jobs[*at].since_ticks;
        if let Some(at) = self.by_environment(process.pid)
            && young(self, &at)
        {
            return Some(at);
        }
        for kin in [stat.parent, stat.session] {
            if kin != process.pid
                && let Some((_, Some(at))) = self.find(kin, depth - 1)
                && young(self, &at)
            {
                return Some(at);
            }
        }
        // A session outlives its leader, and nobody gets the leader's id before it is over.
        if stat.session != process.pid && self.find(stat.session, depth - 1).is_none() {
            return self
                .sessions
                .get(&stat.session)
                .copied()
                .filter(|at| young(self, at));
        }
        None
    }

    fn by_environment(&mut self, pid: u32) -> Option<usize> {
        self.environment.clear();
        let file = File::open(self.proc.join(format!("{pid}/environ"))).ok()?;
        let mut file = file.take(MAX_ENVIRONMENT as u64);
        // One that cannot be read is somebody else's; kernel threads have none.
        file.read_to_end(&mut self.environment).ok()?;
        let token = token_in(&self.environment)?;
        self.by_token.get(&token).copied()
    }

    fn stat_of(&self, pid: u32) -> Option<Stat> {
        let mut buffer = [0; 1024];
        let mut file = File::open(self.proc.join(format!("{pid}/stat"))).ok()?;
        let length = file.read(&mut buffer).ok()?;
        stat(buffer.get(..length)?)
    }

    fn maps_of(&self, pid: u32) -> Option<Vec<u8>> {
        let mut maps = Vec::new();
        let file = File::open(self.proc.join(format!("{pid}/maps"))).ok()?;
        file.take(MAX_MAPS).read_to_end(&mut maps).ok()?;
        (!maps.is_empty()).then_some(maps)
    }

    fn command_of(&self, pid: u32) -> String {
        let mut words = [0; 512];
        let read = File::open(self.proc.join(format!("{pid}/cmdline")))
            .and_then(|mut file| file.read(&mut words));
        let text = String::from_utf8_lossy(words.get(..read.unwrap_or(0)).unwrap_or(&[]));
        let words: Vec<&str> = text.split('\0').filter(|word| !word.is_empty()).collect();
        words.join(" ")
    }
}

fn has(text: &[u8], word: &[u8]) -> bool {
    text.windows(word.len()).any(|part| part == word)
}

/// The token in an environment.
fn token_in(environment: &[u8]) -> Option<[u8; TOKEN_BYTES]> {
    environment
        .split(|byte| *byte == 0)
        .find_map(|var| var.strip_prefix(TOKEN))
        .and_then(|token| token.try_into().ok())
}

/// `None`: no such line, or a process that has ended and was not waited for.
fn stat(line: &[u8]) -> Option<Stat> {
    // The second field is the name in parentheses and may contain anything; count from the last
    // one.
    let rest = &line[line.iter().rposition(|byte| *byte == b')')? + 1..];
    let mut fields = std::str::from_utf8(rest).ok()?.split_ascii_whitespace();
    if matches!(fields.next()?, "Z" | "X") {
        return None;
    }
    let parent = fields.next()?.parse().ok()?;
    let session = fields.nth(1)?.parse().ok()?;
    let started_ticks = fields.nth(15)?.parse().ok()?;
    Some(Stat {
        parent,
        session,
        started_ticks,
    })
}

/// The process's own id where it leads a session, else 0.
pub fn led_session(pid: u32) -> u32 {
    let line = std::fs::read(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat(&line).map_or(0, |stat| if stat.session == pid { pid } else { 0 })
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use super::*;
    use crate::peer;

    /// A process of a test, ended when dropped.
    struct Started(Child);

    impl Started {
        fn sleep(command: &mut Command) -> Self {
            Self(command.spawn().expect("sleep starts"))
        }

        fn process(&self) -> Process {
            let pid = self.0.id();
            let started_ticks = peer::started_ticks(pid).expect("a line");
            let started_ticks = started_ticks.expect("it lives");
            Process { pid, started_ticks }
        }
    }

    impl Drop for Started {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    /// A process that ends with its test, however that ends.
    struct Killed(u32);

    impl Drop for Killed {
        fn drop(&mut self) {
            let pid = i32::try_from(self.0).ok();
            if let Some(pid) = pid.and_then(rustix::process::Pid::from_raw) {
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
        }
    }

    fn job(id: u64, token: &[u8; TOKEN_BYTES]) -> Known {
        Known {
            id: TenantId(id),
            token: *token,
            since_ticks: 0,
            members: Vec::new(),
            session: 0,
            wanted: true,
        }
    }

    fn sleep() -> Command {
        let mut command = Command::new("sleep");
        command.arg("1000").env_clear();
        command
    }

    /// A process has its new environment once it has executed its program.
    fn counted(jobs: &[Known], id: u64, count: u32) -> Living {
        let began = Instant::now();
        loop {
            let Answer::Counted { living, whole } = super::count(Path::new("/proc"), jobs) else {
                panic!("a count");
            };
            assert!(whole);
            let living = living[&TenantId(id)].clone();
            if living.count == count {
                return living;
            }
            assert!(began.elapsed() < Duration::from_secs(60), "{living:?}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn a_process_belongs_to_the_job_whose_token_it_carries() {
        let tokens = [*b"a2a2a2a2a2a2a2a2a2a2a2a2a2a2a2a2", [b'b'; TOKEN_BYTES]];
        let jobs = [job(1, &tokens[0]), job(2, &tokens[1])];
        let text = std::str::from_utf8(&tokens[0]).expect("ASCII");
        let carrier = Started::sleep(sleep().env("SUBLET_TOKEN", text).env("ZZ", "1"));
        let living = counted(&jobs, 1, 1);
        assert_eq!(living.members, [carrier.process()]);
        counted(&jobs, 2, 0);
        let mut latecomer = jobs.clone();
        latecomer[0].since_ticks = carrier.process().started_ticks + 1;
        counted(&latecomer, 1, 0);
        drop(carrier);
        counted(&jobs, 1, 0);
    }

    #[test]
    fn a_child_with_a_clean_environment_is_its_parents() {
        // The shell waits for its child, so that it does not become it.
        let mut shell = Command::new("sh");
        shell.args(["-c", "env -i sleep 1000 & wait"]).env_clear();
        shell.env("PATH", std::env::var_os("PATH").unwrap_or_default());
        let shell = Started::sleep(&mut shell);
        let began = Instant::now();
        let mut known = job(7, &[b'7'; TOKEN_BYTES]);
        known.members.push(shell.process());
        let living = counted(std::slice::from_ref(&known), 7, 2);
        let child = living.members.iter().find(|one| **one != shell.process());
        let child = *child.expect("the child");
        let _child = Killed(child.pid);
        let jobs = [known];
        // It was the shell's copy, then `env`, before it became what it is looked for as.
        let found = loop {
            let found =
                Look::new(Path::new("/proc"), &jobs).whose(&[child.pid, std::process::id()]);
            if found[0].command.contains("sleep 1000") && !found[0].command.contains("env") {
                break found;
            }
            assert!(began.elapsed() < Duration::from_secs(60), "{found:?}");
            std::thread::sleep(Duration::from_millis(10));
        };
        assert_eq!(found[0].job, Some(TenantId(7)));
        assert_eq!((found[0].library, found[0].driver), (Some(false), false));
        assert_eq!(found[1].job, None);
    }

    #[test]
    fn a_line_of_stat_is_read_whatever_the_name_of_the_program() {
        let line = b"12 (a) S 9 (b)) S 7 12 5 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 777 1 2";
        let read = stat(line).expect("a line");
        assert_eq!((read.parent, read.session, read.started_ticks), (7, 5, 777));
        assert_eq!(stat(b"12 (a) Z 7 12 5"), None);
        assert_eq!(stat(b""), None);
    }
}
