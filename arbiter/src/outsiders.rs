//! Processes that are not attached: how many of them live of each dormant job, and to which job
//! those belong that NVML names on a device.
//!
//! Owns the census, the time of its next count, and the suspects. One count and one question about
//! suspects are under way at a time. A suspect is reported once, and only when NVML has named it
//! after the census had looked and the census has then looked again with the same result: both look
//! at different times, and a process may become another program between them.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;

use policy::TenantId;

use crate::census::{Answer, Census, Found, Known, Living};

/// How often the processes of dormant jobs are counted. TIMEOUT: as long may a dead one be shown.
const COUNT_NS: u64 = 5_000_000_000;
/// Processes that are suspected at a time; NVML names no more of one device.
const MAX_SUSPECTS: usize = 512;
/// TIMEOUT: when a process that belongs to no job is asked about again: it may have become another
/// program.
const STRANGER_NS: u64 = 10_000_000_000;
/// TIMEOUT: a process that has the library attaches before it has a context; so long may an
/// arbiter's loop be behind with it.
const ATTACHES_NS: u64 = 1_000_000_000;

/// What the census has found out.
#[derive(Debug)]
pub enum News {
    /// What lives of the jobs that were to be counted.
    Counted {
        /// By job.
        living: BTreeMap<TenantId, Living>,
        /// Whether every process was looked at.
        whole: bool,
        /// When the count was asked for.
        asked_ns: u64,
    },
    /// A process of a job uses a device without being attached.
    Escaped(Escaped),
}

/// A process that uses a device outside the limits of its job.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Escaped {
    /// Its job.
    pub job: TenantId,
    /// What the census says.
    pub found: Found,
    /// The devices that NVML named, as bits.
    pub devices: u32,
    /// What it has of them.
    pub used_bytes: u64,
}

/// A process on a device that is not attached.
#[derive(Debug)]
struct Suspect {
    /// When NVML named it first.
    since_ns: u64,
    /// Devices, as bits.
    devices: u32,
    used_bytes: u64,
    /// What the census said, and when it had looked.
    found: Option<(Found, u64)>,
    /// NVML has named it since then.
    named_again: bool,
    /// It was reported.
    reported: bool,
}

/// See the module's documentation.
#[derive(Debug)]
pub struct Outsiders {
    census: Census,
    /// When processes were last to be counted, while there is no answer yet.
    asked_ns: Option<u64>,
    /// When they are to be counted next.
    due_ns: Option<u64>,
    suspects: BTreeMap<u32, Suspect>,
    /// It was asked whose they are.
    whose_asked: bool,
}

impl Outsiders {
    /// Nobody is known, and nothing is to be counted.
    pub fn new(census: Census) -> Self {
        Self {
            census,
            asked_ns: None,
            due_ns: None,
            suspects: BTreeMap::new(),
            whose_asked: false,
        }
    }

    /// Readable when there is news.
    pub fn bell(&self) -> BorrowedFd<'_> {
        self.census.bell()
    }

    /// Processes are to be counted at that time, or as soon as the count under way has ended.
    pub fn count_at(&mut self, due_ns: u64) {
        self.due_ns = Some(due_ns);
    }

    /// Processes are to be counted again in a while, unless they are already.
    pub fn count_again(&mut self, now_ns: u64) {
        if self.asked_ns.is_none() {
            self.due_ns.get_or_insert(now_ns + COUNT_NS);
        }
    }

    /// Has processes counted where that is due and no count is under way.
    pub fn count_if_due(&mut self, now_ns: u64, jobs: impl FnOnce() -> Vec<Known>) {
        if self.asked_ns.is_none() && self.due_ns.is_some_and(|due_ns| due_ns <= now_ns) {
            self.due_ns = None;
            self.asked_ns = Some(now_ns);
            self.census.count(jobs());
        }
    }

    /// NVML has looked at `taken_ns`, and has named these processes: each with the index of the
    /// device and what it has of it. Suspected are those that are not `attached`.
    pub fn see(
        &mut self,
        taken_ns: u64,
        named: impl Iterator<Item = (u32, usize, u64)>,
        attached: impl Fn(u32) -> bool,
    ) {
        let mut there: BTreeMap<u32, (u32, u64)> = BTreeMap::new();
        for (pid, index, bytes) in named {
            let known = there.contains_key(&pid) || there.len() < MAX_SUSPECTS;
            if known && pid != std::process::id() && !attached(pid) {
                let one = there.entry(pid).or_default();
                one.0 |= 1 << index;
                one.1 = one.1.saturating_add(bytes);
            }
        }
        self.suspects.retain(|pid, _| there.contains_key(pid));
        for (pid, (devices, used_bytes)) in there {
            let suspect = self.suspects.entry(pid).or_insert_with(|| Suspect {
                since_ns: taken_ns,
                devices: 0,
                used_bytes: 0,
                found: None,
                named_again: false,
                reported: false,
            });
            (suspect.devices, suspect.used_bytes) = (devices, used_bytes);
            if suspect
                .found
                .as_ref()
                .is_some_and(|(_, at_ns)| *at_ns < taken_ns)
            {
                suspect.named_again = true;
            }
        }
    }

    /// Asks whose the suspects are, as far as that is not known, or has to be known once more.
    pub fn ask_whose(&mut self, now_ns: u64, jobs: impl FnOnce() -> Vec<Known>) {
        if self.whose_asked {
            return;
        }
        let due = self
            .suspects
            .iter()
            .filter(|(_, suspect)| match &suspect.found {
                None => true,
                Some((Found { job: None, .. }, at_ns)) => {
                    now_ns.saturating_sub(*at_ns) > STRANGER_NS
                }
                Some(_) => suspect.named_again && !suspect.reported,
            });
        let pids: Vec<u32> = due.map(|(pid, _)| *pid).collect();
        if !pids.is_empty() {
            self.whose_asked = true;
            self.census.whose(jobs(), pids);
        }
    }

    /// What the census has found out since that was asked last.
    pub fn take(&mut self) -> Vec<News> {
        let mut news = Vec::new();
        for answer in self.census.take() {
            match answer {
                Answer::Counted { living, whole } => news.push(News::Counted {
                    living,
                    whole,
                    asked_ns: self.asked_ns.take().unwrap_or(0),
                }),
                Answer::Suspects(found, looked_ns) => {
                    let escaped = self.judge(found, looked_ns);
                    news.extend(escaped.into_iter().map(News::Escaped));
                }
            }
        }
        news
    }

    /// The census has looked at suspects, at `looked_ns`: those that are certain now.
    fn judge(&mut self, looked_at: Vec<Found>, looked_ns: u64) -> Vec<Escaped> {
        self.whose_asked = false;
        let mut certain = Vec::new();
        for found in looked_at {
            let Some(suspect) = self.suspects.get_mut(&found.process.pid) else {
                continue;
            };
            let before = suspect.found.as_ref().map(|(found, _)| found);
            let same = before.is_some_and(|before| {
                (before.process, before.job, before.library)
                    == (found.process, found.job, found.library)
            });
            let old = looked_ns.saturating_sub(suspect.since_ns) >= ATTACHES_NS;
            let sure = same
                && found.driver
                && suspect.named_again
                && (found.library == Some(false) || old);
            suspect.named_again = false;
            suspect.found = Some((found.clone(), looked_ns));
            if let Some(job) = found.job.filter(|_| sure && !suspect.reported) {
                suspect.reported = true;
                certain.push(Escaped {
                    job,
                    found,
                    devices: suspect.devices,
                    used_bytes: suspect.used_bytes,
                });
            }
        }
        certain
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::census::Process;

    const PID: u32 = u32::MAX;
    const SECOND: u64 = 1_000_000_000;

    fn outsiders() -> Outsiders {
        Outsiders::new(Census::start().expect("a thread"))
    }

    fn found(library: Option<bool>) -> Found {
        Found {
            process: Process {
                pid: PID,
                started_ticks: 7,
            },
            job: Some(TenantId(3)),
            library,
            driver: true,
            command: "train".into(),
        }
    }

    fn see(outsiders: &mut Outsiders, taken_ns: u64) {
        let named = [(PID, 0, 10), (PID, 2, 20)].into_iter();
        outsiders.see(taken_ns, named, |_| false);
    }

    #[test]
    fn a_suspect_is_reported_once_both_have_seen_it_twice() {
        let mut outsiders = outsiders();
        see(&mut outsiders, 1);
        assert_eq!(outsiders.judge(vec![found(Some(false))], 2), []);
        assert_eq!(
            outsiders.judge(vec![found(Some(false))], 3),
            [],
            "NVML has not looked again"
        );
        see(&mut outsiders, 4);
        let escaped = outsiders.judge(vec![found(Some(false))], 5);
        let [escaped] = &escaped[..] else {
            panic!("not one: {escaped:?}");
        };
        assert_eq!((escaped.job, escaped.devices), (TenantId(3), 0b101));
        assert_eq!(escaped.used_bytes, 30);
        see(&mut outsiders, 6);
        assert_eq!(outsiders.judge(vec![found(Some(false))], 7), [], "again");
    }

    #[test]
    fn one_that_has_the_library_is_given_time_to_attach() {
        let mut outsiders = outsiders();
        see(&mut outsiders, 1);
        for at_ns in [2, 4] {
            assert_eq!(outsiders.judge(vec![found(Some(true))], at_ns), []);
            see(&mut outsiders, at_ns + 1);
        }
        let later_ns = 1 + ATTACHES_NS;
        assert_eq!(outsiders.judge(vec![found(Some(true))], later_ns).len(), 1);
        // One that has attached is forgotten, and begins anew.
        let named = [(PID, 0, 10)].into_iter();
        outsiders.see(later_ns + 1, named, |pid| pid == PID);
        assert!(outsiders.suspects.is_empty());
    }

    #[test]
    fn one_count_is_under_way_at_a_time() {
        let mut outsiders = outsiders();
        let mut asked = 0;
        let mut look = |outsiders: &mut Outsiders, now_ns| {
            outsiders.count_if_due(now_ns, || {
                asked += 1;
                Vec::new()
            });
            asked
        };
        assert_eq!(look(&mut outsiders, SECOND), 0, "nothing is to be counted");
        outsiders.count_at(SECOND);
        assert_eq!(look(&mut outsiders, SECOND - 1), 0);
        assert_eq!(look(&mut outsiders, SECOND), 1);
        outsiders.count_at(SECOND);
        assert_eq!(look(&mut outsiders, 2 * SECOND), 1, "it is under way");
        let deadline = std::time::Instant::now() + testbed::PATIENCE;
        let mut news = Vec::new();
        while news.is_empty() {
            assert!(std::time::Instant::now() < deadline);
            std::thread::sleep(std::time::Duration::from_millis(1));
            news = outsiders.take();
        }
        let [News::Counted { asked_ns, .. }] = &news[..] else {
            panic!("no count: {news:?}");
        };
        assert_eq!(*asked_ns, SECOND);
        assert_eq!(look(&mut outsiders, 2 * SECOND), 2, "what was put off");
        outsiders.count_again(2 * SECOND);
        assert_eq!(outsiders.due_ns, None, "it is under way");
    }
}
