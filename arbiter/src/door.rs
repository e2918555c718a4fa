//! Where processes of jobs come in: the socket that they connect to, and the connections that have
//! not been answered yet.
//!
//! Owns the listener, those connections with their deadlines, and what is kept ready for the next
//! one: descriptors, so that it can be given a reason where there are none left, and pages, so that
//! it need not wait for them. A user has some of the connections and not all of them, one that says
//! nothing is dismissed, and while the door is closed for want of descriptors nobody rings.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;

use channel::PageError;
use channel::arbiter::{ClientPages, Connection, HandshakeError, Identity, Listener, TenantMemory};
use channel::wire::Hello;

use crate::descriptors::Descriptors;
use crate::reactor::{Event, Interest, Poller};
use crate::spare::Spare;

/// TIMEOUT: a client sends its hello right after connecting; one second is a stopped or hostile
/// peer.
const HELLO_NS: u64 = 1_000_000_000;
/// How long a new process is held back at most, while an older one of its tenant may bring the
/// tenant's page, or its user's name is looked up. TIMEOUT: shorter than a client waits for its
/// welcome.
const HOLD_NS: u64 = 1_000_000_000;
/// Connections that have not been answered, in all and of one user.
const MAX_GREETINGS: usize = 128;
const MAX_GREETINGS_PER_USER: usize = 64;
/// For how long peers are left waiting in the kernel's queue. TIMEOUT: until the next housekeeping
/// tick.
const CLOSED_NS: u64 = 100_000_000;

/// Pages that an earlier arbiter made.
pub type Kept = Option<(OwnedFd, OwnedFd)>;

/// A connection that has not been answered yet.
#[derive(Debug)]
struct Greeting {
    connection: Connection,
    identity: Identity,
    /// What it said, once it has.
    hello: Option<(Hello, Kept)>,
    /// When patience ends.
    deadline_ns: u64,
}

/// A process that has said hello.
#[derive(Debug)]
pub struct Newcomer {
    /// Its socket.
    pub connection: Connection,
    /// Who it is.
    pub identity: Identity,
    /// What it said.
    pub hello: Hello,
    /// What it brings.
    pub kept: Kept,
    deadline_ns: u64,
}

impl Newcomer {
    /// Whether it can be held back any longer.
    pub fn may_wait(&self, now_ns: u64) -> bool {
        now_ns < self.deadline_ns
    }
}

/// What a connection has said.
#[derive(Debug)]
pub enum Heard {
    /// Nothing yet.
    Nothing,
    /// Hello: it is to be answered.
    Hello,
    /// Nothing that can be read: it is to be refused.
    Nonsense(Connection, Identity, HandshakeError),
}

/// See the module's documentation.
pub struct Door {
    /// `None`: nobody can connect.
    listener: Option<Listener>,
    greetings: BTreeMap<u64, Greeting>,
    descriptors: Descriptors,
    spare: Spare,
    /// Nobody is listened to until then.
    closed_until_ns: Option<u64>,
}

impl Door {
    /// Of this socket; `None`: nobody can connect. Newcomers may be taken in with what is `kept`.
    pub fn new(listener: Option<Listener>, kept: Descriptors) -> Self {
        Self {
            listener,
            greetings: BTreeMap::new(),
            descriptors: kept,
            spare: Spare::default(),
            closed_until_ns: None,
        }
    }

    /// Begins to listen.
    ///
    /// # Errors
    /// The set of descriptors does not take the listener.
    pub fn listen(&self, poller: &Poller) -> io::Result<()> {
        match &self.listener {
            Some(listener) => poller.add(listener, Event::ChannelAccept, Interest::Read),
            None => Ok(()),
        }
    }

    /// Listens there from here on: nobody can reach the socket that it had.
    ///
    /// # Errors
    /// As [`listen`](Self::listen).
    pub fn move_to(&mut self, listener: Listener, poller: &Poller) -> io::Result<()> {
        if let Some(before) = self.listener.replace(listener) {
            poller.remove(&before);
        }
        if self.is_closed() {
            return Ok(());
        }
        self.listen(poller)
    }

    /// Ceases to listen for a while: peers that wait go on waiting, instead of waking the loop
    /// without end.
    pub fn close(&mut self, now_ns: u64, poller: &Poller) {
        if let Some(listener) = &self.listener {
            poller.remove(listener);
        }
        self.closed_until_ns = Some(now_ns + CLOSED_NS);
    }

    /// Whether nobody is listened to.
    pub fn is_closed(&self) -> bool {
        self.closed_until_ns.is_some()
    }

    /// Whether it was closed for long enough, and is to [listen](Self::listen) again.
    pub fn opens_again(&mut self, now_ns: u64) -> bool {
        let is_over = |until_ns: &mut u64| *until_ns <= now_ns;
        self.closed_until_ns.take_if(is_over).is_some()
    }

    /// Whether it is open and nobody waits at it.
    pub fn is_quiet(&self) -> bool {
        self.greetings.is_empty() && !self.is_closed()
    }

    /// The next peer that has connected.
    ///
    /// # Errors
    /// It cannot be taken.
    pub fn accept(&self) -> io::Result<Option<Connection>> {
        match &self.listener {
            Some(listener) => listener.try_accept(),
            None => Ok(None),
        }
    }

    /// Whether no more connections of a user can be waited for.
    pub fn is_crowded(&self, uid: u32) -> bool {
        let greetings = self.greetings.values();
        let of_user = greetings.filter(|greeting| greeting.identity.uid == uid);
        of_user.count() >= MAX_GREETINGS_PER_USER || self.greetings.len() >= MAX_GREETINGS
    }

    /// Waits for the hello of a connection, which has this number from here on.
    ///
    /// # Errors
    /// The set of descriptors does not take it.
    pub fn greet(
        &mut self,
        id: u64,
        (connection, identity): (Connection, Identity),
        now_ns: u64,
        poller: &Poller,
    ) -> io::Result<()> {
        poller.add(&connection, Event::Greeting(id), Interest::Read)?;
        let greeting = Greeting {
            connection,
            identity,
            hello: None,
            deadline_ns: now_ns + HELLO_NS,
        };
        self.greetings.insert(id, greeting);
        Ok(())
    }

    /// Reads what a connection says.
    pub fn hear(&mut self, id: u64, now_ns: u64, poller: &Poller) -> Heard {
        let Some(greeting) = self.greetings.get_mut(&id) else {
            return Heard::Nothing;
        };
        if greeting.hello.is_some() {
            return Heard::Hello;
        }
        match greeting.connection.try_hello() {
            Ok(hello) => {
                greeting.hello = Some(hello);
                greeting.deadline_ns = now_ns + HOLD_NS;
                // Nothing more is read from it; its end shows when it is answered.
                poller.remove(&greeting.connection);
                Heard::Hello
            }
            Err(HandshakeError::Io(error)) if error.kind() == io::ErrorKind::WouldBlock => {
                Heard::Nothing
            }
            Err(error) => match self.greetings.remove(&id) {
                Some(of) => Heard::Nonsense(of.connection, of.identity, error),
                None => Heard::Nothing,
            },
        }
    }

    /// The numbers of those that wait.
    pub fn waiting(&self) -> Vec<u64> {
        self.greetings.keys().copied().collect()
    }

    /// Whether a process waits.
    pub fn has_process(&self, pid: u32) -> bool {
        let mut greetings = self.greetings.values();
        greetings.any(|greeting| greeting.identity.pid == pid)
    }

    /// Dismisses a connection that has said nothing in time; its process.
    pub fn dismiss_silent(&mut self, id: u64, now_ns: u64) -> Option<u32> {
        let greeting = self.greetings.get(&id)?;
        if greeting.hello.is_some() || now_ns < greeting.deadline_ns {
            return None;
        }
        let silent = self.greetings.remove(&id)?;
        Some(silent.identity.pid)
    }

    /// The one of a number, where it has said hello: it is answered, or [held](Self::hold) back.
    pub fn take(&mut self, id: u64) -> Option<Newcomer> {
        self.greetings.get(&id)?.hello.as_ref()?;
        let Greeting {
            connection,
            identity,
            hello,
            deadline_ns,
        } = self.greetings.remove(&id)?;
        let (hello, kept) = hello?;
        // The client's pages are files until they have been sent.
        if Descriptors::are_too_few_for_spares() {
            self.descriptors.give_up();
        }
        Some(Newcomer {
            connection,
            identity,
            hello,
            kept,
            deadline_ns,
        })
    }

    /// One that was [taken](Self::take) waits on.
    pub fn hold(&mut self, id: u64, newcomer: Newcomer) {
        self.descriptors.keep();
        let greeting = Greeting {
            connection: newcomer.connection,
            identity: newcomer.identity,
            hello: Some((newcomer.hello, newcomer.kept)),
            deadline_ns: newcomer.deadline_ns,
        };
        self.greetings.insert(id, greeting);
    }

    /// Whether there are enough descriptors for one more client.
    pub fn has_descriptors(&self) -> bool {
        self.descriptors.suffice()
    }

    /// Keeps some descriptors back, as far as there are any.
    pub fn keep_reserve(&self) {
        self.descriptors.keep();
    }

    /// Gives up what was kept back, so that a peer can be given a reason. False where there was
    /// nothing.
    pub fn give_up_reserve(&self) -> bool {
        self.descriptors.give_up()
    }

    /// Keeps descriptors back, and pages ready, for the next client.
    pub fn make_ready(&mut self) {
        self.descriptors.keep();
        if !Descriptors::are_too_few_for_spares() && self.descriptors.suffice() {
            self.spare.fill();
        }
    }

    /// Pages of a new client; with a page of signatures unless it does not ask for one.
    ///
    /// # Errors
    /// They cannot be made.
    pub fn client_pages(&mut self, signatures: bool) -> Result<ClientPages, PageError> {
        self.spare.client(signatures)
    }

    /// The page of a new tenant.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn tenant_page(&mut self) -> Result<TenantMemory, PageError> {
        self.spare.tenant()
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

    use super::*;

    struct Bench {
        door: Door,
        poller: Poller,
        dir: tempfile::TempDir,
        next: u64,
        /// The other ends.
        peers: Vec<OwnedFd>,
    }

    impl Bench {
        fn new() -> Self {
            let dir = tempfile::tempdir().expect("directory");
            let listener = Listener::bind(&dir.path().join("s")).expect("bound");
            Self {
                door: Door::new(Some(listener), Descriptors::default()),
                poller: Poller::new().expect("an epoll set"),
                dir,
                next: 0,
                peers: Vec::new(),
            }
        }

        /// Somebody connects; its number.
        fn connect(&mut self, now_ns: u64) -> u64 {
            let flags = SocketFlags::CLOEXEC;
            let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
            let peer = rustix::net::socket_with(family, kind, flags, None).expect("a socket");
            let address = SocketAddrUnix::new(self.dir.path().join("s")).expect("an address");
            rustix::net::connect(&peer, &address).expect("connected");
            self.peers.push(peer);
            let connection = self.door.accept().expect("accepted").expect("somebody");
            let identity = connection.identity().expect("known");
            self.next += 1;
            let of = (connection, identity);
            let greeted = self.door.greet(self.next, of, now_ns, &self.poller);
            greeted.expect("waited for");
            self.next
        }
    }

    #[test]
    fn one_that_says_nothing_is_dismissed_in_time_and_nonsense_at_once() {
        let mut bench = Bench::new();
        let silent = bench.connect(5);
        let (door, poller) = (&mut bench.door, &bench.poller);
        assert!(matches!(door.hear(silent, 6, poller), Heard::Nothing));
        assert!(door.take(silent).is_none() && door.has_process(std::process::id()));
        assert_eq!(door.dismiss_silent(silent, 4 + HELLO_NS), None);
        let pid = door.dismiss_silent(silent, 5 + HELLO_NS);
        assert_eq!(pid, Some(std::process::id()));
        assert!(door.is_quiet() && !door.has_process(std::process::id()));
        let other = bench.connect(7);
        let peer = bench.peers.last().expect("a peer");
        rustix::net::send(peer, b"hello?", rustix::net::SendFlags::empty()).expect("sent");
        let heard = bench.door.hear(other, 7, &bench.poller);
        assert!(matches!(heard, Heard::Nonsense(..)), "{heard:?}");
        assert!(bench.door.is_quiet());
    }

    #[test]
    fn a_user_has_some_of_the_places_and_not_all_of_them() {
        let mut bench = Bench::new();
        let own = rustix::process::geteuid().as_raw();
        for _ in 0..MAX_GREETINGS_PER_USER {
            assert!(!bench.door.is_crowded(own));
            bench.connect(1);
        }
        assert!(bench.door.is_crowded(own) && !bench.door.is_crowded(own + 1));
    }

    #[test]
    fn it_opens_again_when_its_time_is_up() {
        let mut bench = Bench::new();
        bench.door.listen(&bench.poller).expect("listens");
        assert!(!bench.door.opens_again(u64::MAX), "it is open");
        bench.door.close(3, &bench.poller);
        assert!(bench.door.is_closed() && !bench.door.opens_again(2 + CLOSED_NS));
        assert!(bench.door.opens_again(3 + CLOSED_NS) && !bench.door.is_closed());
        bench.door.listen(&bench.poller).expect("listens again");
    }
}
