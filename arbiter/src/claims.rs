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

/// How long an answer is good for a registration; also how often others are looked for at most.
const FRESH_NS: u64 = 1_000_000_000;
/// TIMEOUT: how long one who has a name may take to say more than its process number; a running one
/// takes microseconds, one that is stopped says nothing.
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
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Standing {
    /// Another arbiter of the same user that has it; `None`: this one.
    pub taken: Option<Other>,
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
        let free = Standing {
            taken: None,
            shared: Vec::new(),
        };
        let known = self.known.entry(device.clone());
        known.or_insert((free, now_ns)).1 = now_ns;
    }

    /// Gives up what no job needs any more; what was asked for just now a job is about to need.
    pub fn keep_only(&mut self, needed: &BTreeSet<Claimed>) {
        let asked = &self.asked;
        let keeps = |device: &Claimed| needed.contains(device) || asked.contains(device);
        self.held.lock().retain(|device, _| keeps(device));
        self.known.retain(|device, _| keeps(device));
    }

    /// How things stand with a device, as far as that is known.
    pub fn of(&self, device: &Claimed) -> Option<&Standing> {
        self.known.get(device).map(|(standing, _)| standing)
    }
}

/// What the thread has.
struct Office {
    dir: PathBuf,
    uid: u32,
    held: Held,
}

impl Office {
    fn new(dir: &Path, uid: u32) -> Self {
        Self {
            dir: dir.to_owned(),
            uid,
            held: Held::default(),
        }
    }

    fn look(&mut self, device: &Claimed) -> Standing {
        let text = device.text();
        let since = Instant::now();
        let taken = loop {
            if self.held.lock().contains_key(device) {
                break None;
            }
            let name = format!("{PREFIX}/{}/{text}", self.uid);
            match Claim::make(&name, &self.dir, self.uid) {
                Ok(claim) => {
                    self.held.lock().insert(device.clone(), claim);
                    break None;
                }
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                    match ask(&name) {
                        // Another user's program has the name, which claims nothing for this one.
                        Some(other) if other.uid != self.uid => break None,
                        Some(other)
                            if other.dir.as_deref() != Some(&*self.dir)
                                && since.elapsed() >= GIVING_UP =>
                        {
                            break Some(other);
                        }
                        // It has ended meanwhile, or is about to: this one has its directory.
                        _ if since.elapsed() < ENDING => {
                            std::thread::sleep(Duration::from_millis(5));
                        }
                        other => break other,
                    }
                }
                // Without a claim it is as it was before there were any.
                Err(error) => {
                    tracing::debug!("the device {text} cannot be claimed: {error}");
                    break None;
                }
            }
        };
        Standing {
            taken,
            shared: self.shared(&text),
        }
    }

    /// Arbiters of other users that have the device.
    fn shared(&self, text: &str) -> Vec<Other> {
        let sockets = std::fs::read_to_string("/proc/net/unix").unwrap_or_default();
        let mut others: Vec<Other> = names_of_others(&sockets, text, self.uid)
            .iter()
            .filter_map(|name| ask(name))
            // Whose a name is, is what the kernel says and not what it is called.
            .filter(|other| other.uid != self.uid)
            .collect();
        others.sort_by_key(|other| (other.uid, other.pid));
        others.dedup();
        others
    }
}

/// Names in the kernel's list of sockets by which other users' arbiters claim a device.
fn names_of_others(sockets: &str, text: &str, uid: u32) -> BTreeSet<String> {
    /// A host has a few users at a time; who makes names without end makes nobody wait.
    const MOST_NAMES: usize = 16;
    let names = sockets.lines().filter_map(|line| {
        let name = line.rsplit_once(" @")?.1;
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
                let peer = rustix::net::sockopt::socket_peercred(&asks);
                if peer.is_ok_and(|peer| peer.uid.as_raw() == uid) {
                    let _ = asks.write_all(dir.as_os_str().as_bytes());
                }
            }
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => return,
            // For want of descriptors, most likely.
            Err(_) => std::thread::sleep(Duration::from_millis(50)),
        }
    }
}

/// Who has a name; `None`: nobody any more.
fn ask(name: &str) -> Option<Other> {
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).ok()?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket: OwnedFd =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).ok()?;
    match rustix::net::connect(&socket, &address) {
        Ok(()) => {}
        // It is there, and so many ask that it cannot be asked.
        Err(rustix::io::Errno::AGAIN) => {
            return Some(Other {
                pid: 0,
                uid: rustix::process::geteuid().as_raw(),
                dir: None,
                serves: false,
            });
        }
        Err(_) => return None,
    }
    let peer = rustix::net::sockopt::socket_peercred(&socket).ok()?;
    let (pid, uid) = (peer.pid.as_raw_nonzero().get(), peer.uid.as_raw());
    let mut stream = UnixStream::from(socket);
    let mut bytes = Vec::new();
    let said = stream
        .set_nonblocking(false)
        .and_then(|()| stream.set_read_timeout(Some(ANSWER)))
        .and_then(|()| Read::by_ref(&mut stream).take(4096).read_to_end(&mut bytes));
    let has_said = said.is_ok() && !bytes.is_empty();
    let dir = has_said.then(|| PathBuf::from(OsString::from_vec(bytes)));
    Some(Other {
        pid: u32::try_from(pid).unwrap_or(0),
        uid,
        serves: dir.as_ref().is_some_and(|dir| {
            let dir = RuntimeDir::given(dir.clone());
            dir.is_ok_and(|dir| dir.api_socket().exists())
        }),
        dir,
    })
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
        let free = Standing {
            taken: None,
            shared: Vec::new(),
        };
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
            move || Office::new(&dir, uid).look(&device).taken
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
        let names = names_of_others(&sockets, &text, 7);
        assert_eq!(names, [format!("{PREFIX}/8/{text}")].into());
        // The kernel says whose it is: a name that says otherwise is another user's all the same.
        let (uid, dir) = (rustix::process::geteuid().as_raw(), place.path());
        let name = format!("{PREFIX}/{}/{text}", uid + 1);
        let _claim = Claim::make(&name, dir, uid + 1).expect("free");
        let other = ask(&name).expect("it is there");
        assert_eq!((other.uid, other.dir), (uid, None));
        let mut ours = Office::new(dir, uid);
        assert_eq!(ours.shared(&text), [], "its own user's");
        ours.uid = uid + 2;
        let shared: Vec<u32> = ours.shared(&text).iter().map(|other| other.uid).collect();
        println!("now: {shared:?} has the device as well");
        assert_eq!(shared, [uid]);
    }
}
