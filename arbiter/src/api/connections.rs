//! Connections of the API: who may hold how many, and who gives way.
//!
//! A process has 32 at most, a user 64, all together 192; over TCP an address has 32, all together
//! 64, in places of their own. One that goes beyond that loses the connection of its own that has
//! been silent for longest. Where all places are taken, the one that was silent longest gives way,
//! of the process or address that has most; where none is silent, newcomers wait in the kernel's
//! queue.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use parking_lot::Mutex;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Notify;
use tokio::task::{AbortHandle, yield_now};
use tokio::time::{Instant, sleep, timeout};

use super::Office;
use super::conversation::{Asker, Caller, converse};
use super::routes;
use crate::container::Origin;
use crate::descriptors::{self, Descriptors};
use crate::desk::Counter;
use crate::who::Peer;

/// On the Unix socket.
pub const LOCAL: Limits = Limits {
    all: 192,
    of_user: 64,
    of_process: 32,
};
/// Over TCP.
pub const REMOTE: Limits = Limits {
    all: 64,
    of_user: 32,
    of_process: 32,
};
/// Newcomers in a row: those who are there already come next.
const STEP: u64 = 16;
/// A connection that was silent for so long can give way to others. TIMEOUT: a client asks right
/// after it has connected.
const IDLE: Duration = Duration::from_millis(100);
/// TIMEOUT: connections that end give descriptors and places back within a moment.
const AGAIN: Duration = Duration::from_millis(20);

/// Where there are no descriptors to look at somebody with, they are waited for so long. TIMEOUT: a
/// connection that was just taken in can give way by then.
const SHORT: Duration = Duration::from_millis(200);

/// Of the descriptors that there may be, connections take a part of this size at most.
const PART: u64 = 4;
/// And so many at the least: one that is silent gives way to the next.
const FEWEST: usize = 4;

/// That nobody can be accepted is logged so often at most.
const LOGGED: Duration = Duration::from_secs(60);

/// How many there may be.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    all: usize,
    of_user: usize,
    of_process: usize,
}

impl Limits {
    /// How many there may be of all, where there are so many descriptors. Each takes one, and
    /// processes of jobs come first.
    fn all_with(self, descriptors: Option<u64>) -> usize {
        let part = descriptors.map_or(u64::MAX, |descriptors| descriptors / PART);
        let part = usize::try_from(part).unwrap_or(usize::MAX);
        self.all.min(part).max(FEWEST)
    }
}

/// Whose a connection is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Holder {
    /// A process of this host, and its user.
    Process { pid: u32, uid: u32 },
    /// All at that address.
    Address(IpAddr),
}

impl Holder {
    /// One who has connected over TCP. A network of IPv6 has as many addresses as it likes; it
    /// counts as one.
    pub fn at(address: IpAddr) -> Self {
        Self::Address(match address.to_canonical() {
            IpAddr::V6(address) => {
                let network = address.to_bits() & !u128::from(u64::MAX);
                IpAddr::V6(Ipv6Addr::from_bits(network))
            }
            address => address,
        })
    }

    /// All processes of a user of this host.
    pub fn of_user(uid: u32) -> Self {
        Self::Process { pid: 0, uid }
    }

    fn is_same_user(self, other: Self) -> bool {
        match (self, other) {
            (Self::Process { uid, .. }, Self::Process { uid: other, .. }) => uid == other,
            _ => self == other,
        }
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Process { pid, uid } => write!(to, "process {pid} of user {uid}"),
            Self::Address(IpAddr::V6(network)) => write!(to, "{network}/64"),
            Self::Address(address) => write!(to, "{address}"),
        }
    }
}

/// All connections.
#[derive(Debug)]
pub struct Connections {
    open: Mutex<BTreeMap<u64, Open>>,
    limits: Limits,
    counter: Counter,
    /// Rings when one has ended.
    ended: Notify,
    most: usize,
}

#[derive(Debug)]
struct Open {
    holder: Holder,
    /// Nothing of it is in the works since then; `None`: something is.
    silent: Option<Instant>,
    task: Option<AbortHandle>,
}

/// A connection's place; given back when it is dropped.
#[derive(Debug)]
pub struct Place {
    number: u64,
    all: Arc<Connections>,
}

impl Place {
    /// One that nobody counts, for tests.
    #[cfg(test)]
    pub fn uncounted(counter: Counter) -> Self {
        let all = Connections::new(LOCAL, counter);
        Self { number: 0, all }
    }

    /// Whether something of this connection is in the works.
    pub fn note_busy(&self, busy: bool) {
        if let Some(open) = self.all.open.lock().get_mut(&self.number) {
            open.silent = (!busy).then(Instant::now);
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.all.remove(self.number);
        self.all.ended.notify_waiters();
    }
}

impl Connections {
    /// None yet.
    pub fn new(limits: Limits, counter: Counter) -> Arc<Self> {
        Arc::new(Self {
            open: Mutex::default(),
            counter,
            ended: Notify::new(),
            most: limits.all_with(descriptors::limit()),
            limits,
        })
    }

    /// How many there may be.
    pub fn most(&self) -> usize {
        self.most
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.open.lock().len()
    }

    fn remove(&self, number: u64) -> bool {
        let mut open = self.open.lock();
        let gone = open.remove(&number);
        drop(open);
        if gone.is_some() {
            self.counter.note_open(false);
        }
        match gone.and_then(|gone| gone.task) {
            Some(task) => {
                task.abort();
                true
            }
            None => false,
        }
    }

    /// Makes space for one more of anybody; false where none has been silent for long enough.
    pub fn make_space(&self) -> bool {
        self.count() < self.most || self.make_way()
    }

    /// Ends the connection that was silent longest, of the process or address that has most; false
    /// where none has been silent for long enough.
    fn make_way(&self) -> bool {
        let now = Instant::now();
        let open = self.open.lock();
        let mut of_process: BTreeMap<Holder, usize> = BTreeMap::new();
        for one in open.values() {
            *of_process.entry(one.holder).or_default() += 1;
        }
        let silent = open.iter().filter_map(|(number, one)| {
            let since = one.silent?;
            let silent = now.saturating_duration_since(since);
            (silent >= IDLE).then_some((*number, of_process.get(&one.holder)?, silent))
        });
        let first = silent.max_by_key(|(_, count, silent)| (**count, *silent));
        let first = first.map(|(number, ..)| number);
        drop(open);
        first.is_some_and(|number| self.remove(number))
    }

    /// Keeps a process and a user below what they may have, at their own expense.
    fn make_space_within(&self, holder: Holder) {
        let limits = [(true, self.limits.of_process), (false, self.limits.of_user)];
        for (of_process, most) in limits {
            let open = self.open.lock();
            let own = open.iter().filter(|(_, one)| match of_process {
                true => one.holder == holder,
                false => one.holder.is_same_user(holder),
            });
            if own.clone().count() < most {
                continue;
            }
            // Silent ones first, then in the order in which they came.
            let last = own.min_by_key(|(number, one)| (one.silent.is_none(), one.silent, **number));
            let last = last.map(|(number, _)| *number);
            drop(open);
            if let Some(number) = last {
                self.remove(number);
            }
        }
    }

    /// Gives a newcomer a place, and has `serve` serve it there.
    pub fn take_in<F>(self: &Arc<Self>, number: u64, holder: Holder, serve: impl FnOnce(Place) -> F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        self.make_space_within(holder);
        let one = Open {
            holder,
            silent: Some(Instant::now()),
            task: None,
        };
        self.open.lock().insert(number, one);
        self.counter.note_open(true);
        let place = Place {
            number,
            all: Arc::clone(self),
        };
        // It first runs when this thread comes to it, after the next lines.
        let task = tokio::spawn(serve(place)).abort_handle();
        if let Some(one) = self.open.lock().get_mut(&number) {
            one.task = Some(task);
        }
    }

    /// Waits until one ends, for a moment at most.
    pub async fn wait_for_space(&self) {
        let _ = timeout(AGAIN, self.ended.notified()).await;
    }

    /// Waits until all have ended, so long at most.
    pub async fn finish(&self, patience: Duration) {
        let all_over = async {
            while self.count() > 0 {
                let ended = self.ended.notified();
                if self.count() > 0 {
                    // TIMEOUT: looked at again, should an end have come in between.
                    let _ = timeout(AGAIN, ended).await;
                }
            }
        };
        let _ = timeout(patience, all_over).await;
    }
}

/// Nobody was accepted. `logged`: when that was logged last.
async fn after(error: &io::Error, office: &Office, logged: &mut Option<Instant>) {
    if matches!(
        error.kind(),
        io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted
    ) {
        return;
    }
    if logged.is_none_or(|logged| logged.elapsed() >= LOGGED) {
        *logged = Some(Instant::now());
        tracing::error!("the API cannot accept connections for now: {error}");
    }
    // Out of descriptors or memory: those who wait go on waiting, unless one gives way.
    if Descriptors::are_lacking(error) && office.connections.make_way() {
        office.connections.wait_for_space().await;
    } else {
        sleep(AGAIN).await;
    }
}

/// A socket at which newcomers come.
pub trait Entrance {
    /// Somebody who has just connected.
    type Newcomer;

    /// The next one, and whose connection it is; `None`: it has gone again.
    ///
    /// # Errors
    /// The kernel gives none.
    async fn next(&mut self) -> io::Result<Option<(Holder, Self::Newcomer)>>;

    /// Serves a newcomer at its place, until its end.
    fn welcome(
        newcomer: Self::Newcomer,
        place: Place,
        office: Arc<Office>,
        routes: Router,
    ) -> impl Future<Output = ()> + Send + 'static;
}

/// The Unix socket.
pub struct Local {
    listener: UnixListener,
    /// Given up where there are no others, to find out who has come.
    kept: Descriptors,
    /// Those of them that are silent give way where that is not enough.
    open: Arc<Connections>,
}

impl Local {
    /// Of this socket.
    pub fn new(listener: UnixListener, kept: Descriptors, open: Arc<Connections>) -> Self {
        Self {
            listener,
            kept,
            open,
        }
    }

    /// Who has connected.
    async fn look_at(&self, stream: &UnixStream) -> io::Result<Peer> {
        let end = Instant::now() + SHORT;
        loop {
            let peer = Peer::of(stream, || self.kept.give_up())?;
            if peer.origin != Origin::NotLookedAt || Instant::now() >= end {
                return Ok(peer);
            }
            if self.open.make_way() {
                self.open.wait_for_space().await;
            } else {
                sleep(AGAIN).await;
            }
        }
    }
}

impl Entrance for Local {
    type Newcomer = (UnixStream, Peer);

    async fn next(&mut self) -> io::Result<Option<(Holder, Self::Newcomer)>> {
        let (stream, _) = match self.listener.accept().await {
            Err(error) if Descriptors::are_lacking(&error) && self.kept.give_up() => {
                self.listener.accept().await?
            }
            accepted => accepted?,
        };
        let peer = self.look_at(&stream).await;
        self.kept.keep();
        let Ok(peer) = peer else {
            return Ok(None);
        };
        let (pid, uid) = (peer.pid, peer.uid);
        Ok(Some((Holder::Process { pid, uid }, (stream, peer))))
    }

    async fn welcome(
        (stream, peer): Self::Newcomer,
        place: Place,
        office: Arc<Office>,
        routes: Router,
    ) {
        let caller = Caller::new(Asker::Process(peer), place, office);
        converse(caller, stream, routes).await;
    }
}

/// Takes newcomers in, for ever.
pub async fn take_in<E: Entrance>(entrance: &mut E, office: &Arc<Office>) {
    let routes = routes::router(Arc::clone(office));
    let (mut number, mut logged) = (0, None);
    loop {
        if !office.connections.make_space() {
            office.connections.wait_for_space().await;
            continue;
        }
        match entrance.next().await {
            Ok(Some((holder, newcomer))) => {
                number += 1;
                let welcome =
                    |place| E::welcome(newcomer, place, Arc::clone(office), routes.clone());
                office.connections.take_in(number, holder, welcome);
            }
            Ok(None) => {}
            Err(error) => after(&error, office, &mut logged).await,
        }
        if number % STEP == 0 {
            yield_now().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use crate::desk::Desk;

    fn at(network: u8, host: u8) -> Holder {
        Holder::at(Ipv4Addr::new(10, 0, network, host).into())
    }

    #[test]
    fn an_address_has_so_many_places_and_the_one_with_most_gives_way() {
        let (desk, counter) = Desk::new().expect("a desk");
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .expect("a runtime");
        runtime.block_on(async {
            let all = Connections::new(REMOTE, counter);
            // Each stays as long as it is let.
            let stay = |place: Place| async move {
                let _place = place;
                std::future::pending().await
            };
            let of = |holder| {
                let open = all.open.lock();
                let of: Vec<u64> = open
                    .iter()
                    .filter(|(_, one)| one.holder == holder)
                    .map(|(number, _)| *number)
                    .collect();
                of
            };
            for number in 1..=100 {
                all.take_in(number, at(0, 1), stay);
                sleep(Duration::from_millis(1)).await;
            }
            let own: Vec<u64> = (69..=100).collect();
            assert_eq!(of(at(0, 1)), own, "the last of them");
            for number in 101..=132 {
                all.take_in(number, at(0, number as u8), stay);
            }
            assert_eq!(all.count(), 64);
            sleep(IDLE).await;
            // Who has most of them gives way to anybody.
            assert!(all.make_space(), "one of them is silent");
            assert_eq!(of(at(0, 1)).len(), 31);
            all.take_in(200, at(1, 1), stay);
            assert_eq!((all.count(), of(at(1, 1)).len()), (64, 1));
            // Those that are busy do not.
            for one in all.open.lock().values_mut() {
                one.silent = None;
            }
            assert!(!all.make_space());
            assert!(!desk.is_empty());
            for number in 1..=200 {
                all.remove(number);
            }
            // Their tasks end, and count nothing twice.
            sleep(Duration::from_millis(1)).await;
            assert_eq!(all.count(), 0);
            assert!(desk.is_empty());
        });
    }

    #[test]
    fn few_descriptors_leave_few_connections_and_never_none() {
        for (descriptors, all) in [
            (None, 192),
            (Some(1 << 20), 192),
            (Some(256), 64),
            (Some(32), 8),
            (Some(8), 4),
            (Some(0), 4),
        ] {
            assert_eq!(LOCAL.all_with(descriptors), all, "{descriptors:?}");
        }
    }

    #[test]
    fn a_network_of_ipv6_is_one_address_and_a_mapped_one_is_what_it_maps() {
        let holder = |text: &str| Holder::at(text.parse().expect("an address"));
        assert_eq!(holder("2001:db8::1"), holder("2001:db8::ffff:1"));
        assert_ne!(holder("2001:db8::1"), holder("2001:db8:0:1::1"));
        assert_eq!(holder("::ffff:10.0.0.1"), holder("10.0.0.1"));
        assert_ne!(holder("10.0.0.1"), holder("10.0.0.2"));
    }
}
