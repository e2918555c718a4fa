//! Which arbiter has a device: one of a user's, whatever its directory.
//!
//! The same user over ssh and from cron has two runtime directories, and would have two arbiters,
//! neither of which knows of the other's jobs. So an arbiter claims the devices of its jobs by
//! abstract sockets, which no cleaner removes and which end with their process, however it ends: a
//! name for each user, device and, where it is simulated, simulator. A device that none of its jobs
//! may use any more is anybody's. Who finds a name taken asks
//! there whose it is. Other users' arbiters have names of their own and are reported: which of two
//! users may have a device is for the host's arbiter to decide.
//!
//! Such names are of a network namespace: arbiters in containers with networks of their own do not
//! see each other. Containers are shown the host's arbiter instead.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use control::paths::RuntimeDir;
use parking_lot::Mutex;
use rustix::net::{AddressFamily, Shutdown, SocketAddrUnix, SocketFlags, SocketType};

use crate::background::Background;
use crate::descriptors;
use crate::peer;

/// How long an answer is good for a registration; also how often others are looked for at most.
const FRESH_NS: u64 = 1_000_000_000;
/// TIMEOUT: how long an arbiter of the same user may take to tell its directory. A running arbiter
/// takes microseconds; a stopped one never answers.
const ANSWER: Duration = Duration::from_millis(500);
/// TIMEOUT: how long the arbiter before this one in the same directory may take to end once it has
/// given up the directory's lock.
const ENDING: Duration = Duration::from_secs(1);
/// TIMEOUT: how long another arbiter may take to give up a device whose last job has just ended.
const GIVING_UP: Duration = Duration::from_millis(100);
/// Questions at a time.
const MOST: usize = 4;
const PREFIX: &str = "sublet-arbiter";

/// A device, and which one of several that are called the same.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Claimed {
    uuid: [u8; 16],
    /// Of a simulated one, where its simulator keeps its state; empty: the default place.
    simulator: Option<Vec<u8>>,
}

impl Claimed {
    /// The device of this identity, as this process sees it.
    pub fn new(uuid: [u8; 16], simulated: bool) -> Self {
        let state = || std::env::var_os("SUBLET_SIM_STATE").unwrap_or_default();
        Self {
            uuid,
            simulator: simulated.then(|| state().into_vec()),
        }
    }

    /// Its identity.
    pub fn uuid(&self) -> &[u8; 16] {
        &self.uuid
    }

    /// The end of its name, without the user.
    fn text(&self) -> String {
        let hex = |bytes: &[u8]| -> String { bytes.iter().map(|b| format!("{b:02x}")).collect() };
        // FNV-1a: the name has so much space, and a collision only between simulators.
        let digest = |text: &[u8]| {
            text.iter().fold(0xcbf2_9ce4_8422_2325_u64, |sum, byte| {
                (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
            })
        };
        match &self.simulator {
            Some(state) => format!("{}/{:016x}", hex(&self.uuid), digest(state)),
            None => format!("{}/host", hex(&self.uuid)),
        }
    }
}

/// Another arbiter.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Other {
    /// Its process; 0: it does not say.
    pub pid: u32,
    /// Whose it is.
    pub uid: u32,
    /// Its directory, where it says.
    pub dir: Option<PathBuf>,
    /// It can be reached there: a logout may have removed the directory for good.
    pub serves: bool,
}

/// How things stand with a device.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Standing {
    /// Another arbiter of the same user that has it; `None`: this one, as far as is known.
    pub taken: Option<Other>,
    /// Somebody has its name and does not say who: any user's program may do that. Then nobody
    /// has the device.
    pub unanswered: bool,
    /// Arbiters of other users that have it as well.
    pub shared: Vec<Other>,
}

/// Names that are held. Its lock is held for as long as one is added or taken away.
type Held = Arc<Mutex<BTreeMap<Claimed, Claim>>>;

/// See the module's documentation.
#[derive(Debug)]
pub struct Claims {
    looks: Option<Background<Claimed, (Claimed, Standing)>>,
    held: Held,
    asked: BTreeSet<Claimed>,
    /// With the time of the look.
    known: BTreeMap<Claimed, (Standing, u64)>,
    /// The claims have to be compared with what the jobs need.
    due: bool,
}

impl Claims {
    /// Nothing is claimed yet, and nothing ever is where a claim would cost a job its descriptors.
    /// `dir`: where this arbiter serves.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(dir: &Path) -> io::Result<Self> {
        if descriptors::are_fewest() {
            return Ok(Self::none());
        }
        let mut office = Office::new(dir, rustix::process::geteuid().as_raw());
        let held = Arc::clone(&office.held);
        let looks = Background::start("claims", MOST, move |device: Claimed| {
            let standing = office.look(&device);
            (device, standing)
        })?;
        Ok(Self {
            looks: Some(looks),
            held,
            ..Self::none()
        })
    }

    /// Nothing is ever claimed: nobody else can know of the devices.
    pub fn none() -> Self {
        Self {
            looks: None,
            held: Held::default(),
            asked: BTreeSet::new(),
            known: BTreeMap::new(),
            due: false,
        }
    }

    /// Rings when there are answers; `None`: there never are.
    pub fn bell(&self) -> Option<BorrowedFd<'_>> {
        self.looks.as_ref().map(Background::bell)
    }

    /// Takes the answers; what has changed among them.
    pub fn take(&mut self, now_ns: u64) -> Vec<(Claimed, Standing)> {
        let answers = self.looks.as_ref().map_or(Vec::new(), Background::take);
        let mut changed = Vec::new();
        for (device, standing) in answers {
            self.asked.remove(&device);
            self.due = true;
            let before = self
                .known
                .insert(device.clone(), (standing.clone(), now_ns));
            if before.is_none_or(|(before, _)| before != standing) {
                changed.push((device, standing));
            }
        }
        changed
    }

    /// Whether it is known how things stand with a device; has it claimed or looked at where not.
    /// What this arbiter has it keeps: only who else is there is looked at again.
    pub fn is_known(&mut self, device: &Claimed, now_ns: u64) -> bool {
        let known = self.known.get(device);
        let is_fresh = known.is_some_and(|(_, at)| now_ns.saturating_sub(*at) < FRESH_NS);
        let is_held = known.is_some_and(|(standing, _)| standing.taken.is_none());
        let Some(looks) = &self.looks else {
            return true;
        };
        if !is_fresh && !self.asked.contains(device) && looks.ask(device.clone()) {
            self.asked.insert(device.clone());
        }
        is_fresh || is_held
    }

    /// It was waited for long enough: the device is taken for free until there is an answer.
    pub fn give_up(&mut self, device: &Claimed, now_ns: u64) {
        let known = self.known.entry(device.clone());
        known.or_insert((Standing::default(), now_ns)).1 = now_ns;
    }

    /// A job came or went, or was refused: what is needed may be something else.
    pub fn note_change(&mut self) {
        self.due = true;
    }

    /// Whether to compare the claims with what the jobs need ([`settle`](Self::settle)): something
    /// has changed, or another arbiter may have given a device up.
    pub fn is_due(&self, now_ns: u64) -> bool {
        let stale = |(standing, at): &(Standing, u64)| {
            standing.taken.is_some() && now_ns.saturating_sub(*at) >= FRESH_NS
        };
        self.due || self.known.values().any(stale)
    }

    /// Gives up what nobody needs any more, and asks for what is needed and not held. What was
    /// asked for already somebody is about to need.
    pub fn settle(&mut self, needed: &BTreeSet<Claimed>, now_ns: u64) {
        self.due = false;
        let asked = &self.asked;
        let keeps = |device: &Claimed| needed.contains(device) || asked.contains(device);
        self.held.lock().retain(|device, _| keeps(device));
        self.known.retain(|device, _| keeps(device));
        for device in needed {
            let held = |(standing, _): &(Standing, u64)| standing.taken.is_none();
            if !self.known.get(device).is_some_and(held) {
                self.is_known(device, now_ns);
            }
        }
    }

    /// How things stand with a device, as far as that is known.
    pub fn of(&self, device: &Claimed) -> Option<&Standing> {
        self.known.get(device).map(|(standing, _)| standing)
    }
}

/// How long somebody who has a name is waited for.
#[derive(Clone, Copy, Debug)]
struct Patience {
    /// [`ENDING`]
    ending: Duration,
    /// [`GIVING_UP`]
    giving_up: Duration,
}

/// What the thread has.
struct Office {
    dir: PathBuf,
    uid: u32,
    held: Held,
    patience: Patience,
}

impl Office {
    fn new(dir: &Path, uid: u32) -> Self {
        Self {
            dir: dir.to_owned(),
            uid,
            held: Held::default(),
            patience: Patience {
                ending: ENDING,
                giving_up: GIVING_UP,
            },
        }
    }

    fn look(&mut self, device: &Claimed) -> Standing {
        let text = device.text();
        let mut standing = self.claim(device, &text);
        standing.shared = self.shared(&text);
        standing
    }

    /// Claims a device, if nobody else of this user has.
    fn claim(&self, device: &Claimed, text: &str) -> Standing {
        let name = format!("{PREFIX}/{}/{text}", self.uid);
        let free = Standing::default();
        let since = Instant::now();
        loop {
            if self.held.lock().contains_key(device) {
                return free;
            }
            match Claim::make(&name, &self.dir, self.uid) {
                Ok(claim) => {
                    self.held.lock().insert(device.clone(), claim);
                    return free;
                }
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
                // Without a claim it is as it was before there were any.
                Err(error) => {
                    tracing::debug!("the device {text} cannot be claimed: {error}");
                    return free;
                }
            }
            let waited = since.elapsed();
            match ask(&name, self.uid) {
                // Another user's program has the name, which claims nothing for this one.
                Answer::Of(other) if other.uid != self.uid => return free,
                Answer::Of(other)
                    if waited >= self.patience.ending
                        || other.dir.as_deref() != Some(&*self.dir)
                            && waited >= self.patience.giving_up =>
                {
                    return Standing {
                        taken: Some(other),
                        ..free
                    };
                }
                // Whose it is nobody says, and it is not guessed.
                Answer::None if waited >= self.patience.giving_up => {
                    return Standing {
                        unanswered: true,
                        ..free
                    };
                }
                Answer::Nobody if waited >= self.patience.ending => return free,
                // It has ended meanwhile, or is about to: this one has its directory.
                _ => std::thread::sleep(Duration::from_millis(5)),
            }
        }
    }

    /// Arbiters of other users that have the device.
    fn shared(&self, text: &str) -> Vec<Other> {
        let sockets = std::fs::read("/proc/net/unix").unwrap_or_default();
        let mut others = BTreeMap::new();
        for name in names_of_others(&sockets, text, self.uid) {
            // Whose a name is, is what the kernel says and not what it is called.
            if let Answer::Of(other) = ask(&name, self.uid)
                && other.uid != self.uid
                && others.len() < MOST_USERS
            {
                others.entry(other.uid).or_insert(other);
            }
        }
        others.into_values().collect()
    }
}

/// Other users that are named.
const MOST_USERS: usize = 16;
/// Names of theirs that are looked at, for some microseconds each: one user may make any number.
const MOST_NAMES: usize = 512;

/// Names in the kernel's list of sockets by which other users' arbiters claim a device. The list
/// has names of all programs, of any bytes.
fn names_of_others(sockets: &[u8], text: &str, uid: u32) -> BTreeSet<String> {
    let names = sockets.split(|byte| *byte == b'\n').filter_map(|line| {
        let at = line.windows(2).rposition(|two| two == b" @")?;
        let name = std::str::from_utf8(line.get(at + 2..)?).ok()?;
        let (user, device) = name
            .strip_prefix(PREFIX)?
            .strip_prefix('/')?
            .split_once('/')?;
        let user: u32 = user.parse().ok()?;
        (user != uid && device == text).then(|| name.to_owned())
    });
    names.take(MOST_NAMES).collect()
}

/// A name that is held, and the thread that says whose it is. Both end when dropped.
#[derive(Debug)]
struct Claim(Arc<UnixListener>);

impl Claim {
    fn make(name: &str, dir: &Path, uid: u32) -> io::Result<Self> {
        let address = SocketAddr::from_abstract_name(name)?;
        let listener = Arc::new(UnixListener::bind_addr(&address)?);
        let (answers, dir) = (Arc::clone(&listener), dir.to_owned());
        std::thread::Builder::new()
            .name("claim".into())
            .spawn(move || say(&answers, &dir, uid))?;
        Ok(Self(listener))
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let _ = rustix::net::shutdown(&*self.0, Shutdown::Both);
    }
}

/// Tells the same user's programs the directory, until the listener is shut down.
fn say(listener: &UnixListener, dir: &Path, uid: u32) {
    loop {
        match listener.accept() {
            // A path fits into what a new connection takes: nobody is waited for.
            Ok((mut asks, _)) => {
                if peer::credentials(&asks).is_ok_and(|(_, peer)| peer == uid) {
                    let _ = asks.write_all(dir.as_os_str().as_bytes());
                }
            }
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => return,
            // For want of descriptors, most likely.
            Err(_) => std::thread::sleep(Duration::from_millis(50)),
        }
    }
}

/// Who has a name.
enum Answer {
    /// Nobody any more.
    Nobody,
    /// Somebody who cannot be asked: so many do, or seem to.
    None,
    /// This one, as the kernel says.
    Of(Other),
}

/// Asks who has a name. Only to a program of user `uid` is listened: what others say is of no use,
/// and they could take their time for it.
fn ask(name: &str, uid: u32) -> Answer {
    let connected = || -> rustix::io::Result<OwnedFd> {
        let address = SocketAddrUnix::new_abstract_name(name.as_bytes())?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        rustix::net::connect(&socket, &address)?;
        Ok(socket)
    };
    let socket = match connected() {
        Ok(socket) => socket,
        Err(rustix::io::Errno::AGAIN) => return Answer::None,
        Err(_) => return Answer::Nobody,
    };
    let Ok((pid, peer)) = peer::credentials(&socket) else {
        return Answer::None;
    };
    let dir = if peer == uid {
        listen(UnixStream::from(socket))
    } else {
        None
    };
    Answer::Of(Other {
        pid,
        uid: peer,
        serves: dir.as_ref().is_some_and(|dir| {
            let dir = RuntimeDir::given(dir.clone());
            dir.is_ok_and(|dir| dir.api_socket().exists())
        }),
        dir,
    })
}

/// The directory that the other end tells, within [`ANSWER`] in all.
fn listen(mut stream: UnixStream) -> Option<PathBuf> {
    stream.set_nonblocking(false).ok()?;
    let until = Instant::now() + ANSWER;
    let mut bytes = Vec::new();
    loop {
        let left = until.checked_duration_since(Instant::now())?;
        stream
            .set_read_timeout(Some(left.max(Duration::from_millis(1))))
            .ok()?;
        let mut part = [0; 4096];
        let read = stream.read(&mut part).ok()?;
        if read == 0 {
            break;
        }
        bytes.extend_from_slice(part.get(..read)?);
        if bytes.len() > part.len() {
            return None;
        }
    }
    (!bytes.is_empty()).then(|| PathBuf::from(OsString::from_vec(bytes)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A device that no other test has: its simulator is this directory.
    fn device(place: &Path) -> Claimed {
        Claimed {
            uuid: [9; 16],
            simulator: Some(place.as_os_str().as_bytes().to_owned()),
        }
    }

    #[test]
    fn of_a_users_arbiters_one_has_a_device_and_the_others_hear_where_it_serves() {
        let place = tempfile::tempdir().expect("directory");
        let device = device(place.path());
        let uid = rustix::process::geteuid().as_raw();
        let dirs = [place.path().join("ssh"), place.path().join("cron")];
        let [mut first, mut second] = dirs.each_ref().map(|dir| Office::new(dir, uid));
        let free = Standing::default();
        assert_eq!(first.look(&device), free);
        assert_eq!(first.look(&device), free, "it has it already");
        let taken = second.look(&device).taken;
        let other = Other {
            pid: std::process::id(),
            uid,
            dir: Some(dirs[0].clone()),
            serves: false,
        };
        println!("now: the second one hears of {taken:?}");
        assert_eq!(taken, Some(other));
        // Another simulator's device is another one.
        let elsewhere = Claimed {
            simulator: Some(dirs[1].as_os_str().as_bytes().to_owned()),
            ..device.clone()
        };
        assert_eq!(second.look(&elsewhere), free);
        drop(first);
        // The thread that answers holds the socket for a moment longer.
        let deadline = Instant::now() + testbed::PATIENCE;
        while second.look(&device).taken.is_some() {
            assert!(Instant::now() < deadline, "its claim has ended with it");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_successor_waits_for_its_predecessor_to_end() {
        let place = tempfile::tempdir().expect("directory");
        let device = device(place.path());
        let uid = rustix::process::geteuid().as_raw();
        let mut before = Office::new(place.path(), uid);
        assert_eq!(before.look(&device).taken, None);
        let successor = std::thread::spawn({
            let (device, dir) = (device.clone(), place.path().to_owned());
            move || {
                let mut office = Office::new(&dir, uid);
                office.patience.ending = testbed::PATIENCE;
                office.look(&device).taken
            }
        });
        drop(before);
        assert_eq!(successor.join().expect("no panic"), None);
    }

    #[test]
    fn another_users_arbiter_is_found_by_the_list_of_sockets() {
        let place = tempfile::tempdir().expect("directory");
        let text = device(place.path()).text();
        let sockets = format!(
            "Num RefCount Protocol Flags Type St Inode Path\n\
             0: 00000002 00000000 00010000 0001 01 17 @{PREFIX}/7/{text}\n\
             0: 00000002 00000000 00010000 0001 01 18 @{PREFIX}/8/{text}\n\
             0: 00000003 00000000 00000000 0001 03 19 @{PREFIX}/8/{text}\n\
             0: 00000002 00000000 00010000 0001 01 20 @{PREFIX}/9/{text}0\n\
             0: 00000002 00000000 00010000 0001 01 21 /run/{PREFIX}/9/{text}\n\
             0: 00000002 00000000 00010000 0001 01 22\n"
        );
        let mut sockets = sockets.into_bytes();
        sockets.extend(b"0: 00000002 00000000 00010000 0001 01 23 @\xff\xfe\n");
        let names = names_of_others(&sockets, &text, 7);
        assert_eq!(names, [format!("{PREFIX}/8/{text}")].into());
        // The kernel says whose it is: a name that says otherwise is another user's all the same.
        let (uid, dir) = (rustix::process::geteuid().as_raw(), place.path());
        let name = format!("{PREFIX}/{}/{text}", uid + 1);
        let _claim = Claim::make(&name, dir, uid + 1).expect("free");
        let Answer::Of(other) = ask(&name, uid) else {
            panic!("it is there");
        };
        assert_eq!((other.uid, other.dir), (uid, None));
        let mut ours = Office::new(dir, uid);
        assert_eq!(ours.shared(&text), [], "its own user's");
        ours.uid = uid + 2;
        let shared: Vec<u32> = ours.shared(&text).iter().map(|other| other.uid).collect();
        println!("now: {shared:?} has the device as well");
        assert_eq!(shared, [uid]);
    }

    #[test]
    fn who_takes_a_name_and_answers_nobody_refuses_nobody_the_device() {
        let place = tempfile::tempdir().expect("directory");
        let device = device(place.path());
        let uid = rustix::process::geteuid().as_raw();
        let name = format!("{PREFIX}/{uid}/{}", device.text());
        let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).expect("short");
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = || {
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
                .expect("a socket")
        };
        let squatter = socket();
        rustix::net::bind(&squatter, &address).expect("free");
        rustix::net::listen(&squatter, 0).expect("listens");
        // Nobody accepts; more than these cannot connect.
        let mut waiting = Vec::new();
        loop {
            let one = socket();
            match rustix::net::connect(&one, &address) {
                Ok(()) => waiting.push(one),
                Err(rustix::io::Errno::AGAIN) => break,
                Err(errno) => panic!("{errno}"),
            }
        }
        let standing = Office::new(place.path(), uid).look(&device);
        println!("now: {standing:?} after {} that wait", waiting.len());
        assert_eq!(standing.taken, None);
        assert!(standing.unanswered);
    }

    #[test]
    fn one_that_says_a_byte_at_a_time_is_heard_for_no_longer_than_one_that_says_nothing() {
        let (ours, mut theirs) = UnixStream::pair().expect("a pair");
        let over = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let says = std::thread::spawn({
            let over = Arc::clone(&over);
            move || {
                let deadline = Instant::now() + testbed::PATIENCE;
                while !over.load(std::sync::atomic::Ordering::Relaxed) && Instant::now() < deadline
                {
                    if theirs.write_all(b"/").is_err() {
                        return false;
                    }
                    std::thread::sleep(ANSWER / 20);
                }
                !over.load(std::sync::atomic::Ordering::Relaxed)
            }
        });
        assert_eq!(listen(ours), None);
        over.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(
            !says.join().expect("no panic"),
            "it was listened to for good"
        );
    }
}
