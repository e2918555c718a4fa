//! The operator's socket: lines in, lines out, each connection within bounds.
//!
//! Knows requests as far as their framing; what they mean is decided in `operator`. A connection
//! has one request in the works at a time, a deadline for each line and a limit on what may be
//! outstanding; a peer that does not keep to them loses its own connection and nothing else.
//!
//! Reading and answering are apart: what has come is read at once, a whole line waits for its
//! *turn*. The next turn is that of the user who has taken the least of our time lately, and of
//! that user's connections of the one that has; so a new connection with one question comes before
//! one with thousands. Turns take a quarter of the loop's time at most.
//!
//! Requests that came over HTTP have their turns among them ([`Desk`]).
//!
//! Owns the listener, the connections, what each user has taken lately, and when there are turns
//! again. While no more connections can be taken the listener is left alone: newcomers would ring
//! until then.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};

use control::wire::{decode_request, encode_reply};
use control::{ControlError, ErrorCode, Reply, Request};

use crate::descriptors::Descriptors;
use crate::desk::Desk;
use crate::reactor::{Event, Interest, Poller};
use crate::who::Peer;

/// Connections at a time, in all and of one process. The one that was silent longest gives way.
const MAX_CONNECTIONS: usize = 96;
const MAX_OF_PROCESS: usize = 32;
/// Longest request in bytes. A command line can be long; a state of a thousand jobs is an answer
/// and no request.
const MAX_REQUEST_BYTES: usize = 1 << 20;
/// Newcomers in a row. To find out who one is takes some 30 us; slices are looked at in between.
const NEWCOMERS: usize = 8;
/// What all connections together have sent and was not looked at yet. Beyond it the connection that
/// has sent most gives way.
const MAX_WAITING_BYTES: usize = 16 << 20;
/// Bytes read from one connection before the others have their turn.
const TURN_BYTES: usize = 64 << 10;
/// Lines that are no requests, before a connection is closed.
const MAX_BAD_LINES: u32 = 8;
/// TIMEOUT: a line takes less than a millisecond to send; five seconds are a stopped or hostile
/// peer.
const LINE_NS: u64 = 5_000_000_000;
/// TIMEOUT: `top` asks every second or so; a minute of silence is a forgotten connection.
const SILENCE_NS: u64 = 60_000_000_000;
/// TIMEOUT: a client asks right after it has connected; one that has been silent for so long can
/// give way to another.
const IDLE_NS: u64 = 100_000_000;
/// For how long operators are answered before slices are looked at again, and a request that takes
/// longer after it.
const SITTING_NS: u64 = 300_000;
/// What a user has taken of our time counts half after so long.
const HALF_LIFE_NS: u64 = 1_000_000_000;

/// A request to be answered by [`ControlServer::reply`].
#[derive(Debug)]
pub struct Ask {
    /// On which connection.
    pub connection: u64,
    /// Who asks.
    pub peer: Peer,
    /// What.
    pub request: Request,
}

/// What came of a turn.
#[derive(Debug)]
pub enum Turn {
    /// A request, to be answered by [`ControlServer::reply`].
    Ask(Box<Ask>),
    /// A line that was none.
    Refused,
}

/// A row of turns.
#[derive(Debug)]
pub struct Sitting {
    begun_ns: u64,
}

impl Sitting {
    /// Whether another turn may begin.
    pub fn goes_on(&self, now_ns: u64) -> bool {
        now_ns < self.begun_ns + SITTING_NS
    }
}

/// The listening socket and its connections.
#[derive(Debug)]
pub struct ControlServer {
    /// `None`: nobody can connect.
    listener: Option<UnixListener>,
    connections: BTreeMap<u64, Connection>,
    next: u64,
    /// Of our time, what each user has taken lately, and when that was added up.
    taken: BTreeMap<u32, (u64, u64)>,
    /// Newcomers wait until some of those that are there have gone.
    full: bool,
    /// There are no turns before that.
    rests_until_ns: u64,
    /// Where requests wait that came over HTTP.
    desk: Option<Desk>,
}

#[derive(Debug)]
struct Connection {
    stream: UnixStream,
    peer: Peer,
    input: Vec<u8>,
    /// Of the input, what was taken, and from where on nobody has looked for the end of a line.
    taken: usize,
    looked: usize,
    output: Vec<u8>,
    /// A request is being worked on.
    asked: bool,
    /// The other side sends nothing more.
    ended: bool,
    /// Written to the end and then closed.
    closing: bool,
    deadline_ns: u64,
    /// Something came, or was answered, then.
    heard_ns: u64,
    /// Of our time, what it has taken.
    served_ns: u64,
    bad_lines: u32,
    /// What is waited for.
    interest: Option<Interest>,
}

/// The next line of a connection, as far as it is there.
enum Line {
    No,
    Whole(usize),
    TooLong,
}

impl ControlServer {
    /// Serves a bound socket, and what is put on the desk.
    ///
    /// # Errors
    /// It cannot be made not to block.
    pub fn new(listener: UnixListener, desk: Option<Desk>) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        Ok(Self::with(Some(listener), desk))
    }

    /// Serves no socket: nobody can connect.
    #[cfg(test)]
    pub fn closed() -> Self {
        Self::with(None, None)
    }

    fn with(listener: Option<UnixListener>, desk: Option<Desk>) -> Self {
        Self {
            listener,
            connections: BTreeMap::new(),
            next: 1,
            taken: BTreeMap::new(),
            full: false,
            rests_until_ns: 0,
            desk,
        }
    }

    /// Begins to look at the desk.
    ///
    /// # Errors
    /// The set of descriptors does not take its bell.
    pub fn watch_desk(&self, poller: &Poller) -> io::Result<()> {
        match &self.desk {
            Some(desk) => poller.add(desk.bell(), Event::Desk, Interest::Read),
            None => Ok(()),
        }
    }

    /// Something was put on the desk.
    pub fn on_desk(&mut self, now_ns: u64) {
        if let Some(desk) = &mut self.desk {
            desk.receive(&mut self.next, now_ns);
        }
    }

    /// Begins to listen.
    ///
    /// # Errors
    /// The set of descriptors does not take the listener.
    pub fn listen(&self, poller: &Poller) -> io::Result<()> {
        match &self.listener {
            Some(listener) => poller.add(listener, Event::ControlAccept, Interest::Read),
            None => Ok(()),
        }
    }

    /// Ceases to listen.
    pub fn close(&self, poller: &Poller) {
        if let Some(listener) = &self.listener {
            poller.remove(listener);
        }
    }

    /// Whether it has ceased to listen for want of space, and is to try again.
    pub fn opens_again(&mut self) -> bool {
        std::mem::take(&mut self.full)
    }

    /// Accepts a few newcomers at a time. Where no more can be taken now (every connection is new
    /// or waits for an answer) it ceases to listen, and newcomers wait in the kernel's queue.
    /// `more` gives up descriptors that were kept back; false: there are none.
    ///
    /// # Errors
    /// Where no connection can be taken for want of resources: the listener would go on ringing.
    pub fn accept(
        &mut self,
        now_ns: u64,
        poller: &Poller,
        mut more: impl FnMut() -> bool,
    ) -> io::Result<()> {
        for _ in 0..NEWCOMERS {
            if self.connections.len() >= MAX_CONNECTIONS && !self.make_space(now_ns) {
                self.full = true;
                self.close(poller);
                return Ok(());
            }
            let Some(listener) = &self.listener else {
                return Ok(());
            };
            let stream = match listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => return Ok(()),
                    io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted => continue,
                    _ if Descriptors::are_lacking(&error) && more() => continue,
                    _ => return Err(error),
                },
            };
            let Ok(peer) = Peer::of(&stream, &mut more) else {
                continue;
            };
            if stream.set_nonblocking(true).is_err() {
                continue;
            }
            self.make_space_within(&peer);
            let id = self.next;
            self.next += 1;
            poller.add(&stream, Event::Control(id), Interest::Read)?;
            let connection = Connection {
                stream,
                peer,
                input: Vec::new(),
                taken: 0,
                looked: 0,
                output: Vec::new(),
                asked: false,
                ended: false,
                closing: false,
                deadline_ns: now_ns + LINE_NS,
                heard_ns: now_ns,
                served_ns: 0,
                bad_lines: 0,
                interest: Some(Interest::Read),
            };
            self.connections.insert(id, connection);
        }
        Ok(())
    }

    /// Closes the connection that was silent longest, of the process that has most; false where
    /// none has been silent for long enough.
    fn make_space(&mut self, now_ns: u64) -> bool {
        let mut of_process: BTreeMap<u32, usize> = BTreeMap::new();
        for connection in self.connections.values() {
            *of_process.entry(connection.peer.pid).or_default() += 1;
        }
        let idle = self.connections.iter_mut().filter_map(|(id, connection)| {
            let silent_ns = now_ns.saturating_sub(connection.heard_ns);
            let idle = silent_ns >= IDLE_NS && connection.is_silent();
            idle.then_some((*id, connection.peer.pid, silent_ns))
        });
        let first = idle.max_by_key(|(_, pid, silent_ns)| {
            (of_process.get(pid).copied().unwrap_or(0), *silent_ns)
        });
        first.is_some_and(|(id, ..)| self.connections.remove(&id).is_some())
    }

    /// Keeps a process below what one may have, at the expense of its own.
    fn make_space_within(&mut self, peer: &Peer) {
        let own = |connection: &Connection| connection.peer.pid == peer.pid;
        if self.connections.values().filter(|one| own(one)).count() < MAX_OF_PROCESS {
            return;
        }
        let mine = self.connections.iter_mut().filter(|(_, one)| own(one));
        let mine = mine.map(|(id, one)| (!one.is_silent(), one.heard_ns, *id));
        if let Some((.., id)) = mine.min() {
            self.connections.remove(&id);
        }
    }

    /// Reads and writes what can be. What has come is answered when it is its
    /// [turn](Self::next_turn).
    pub fn on_event(&mut self, id: u64, now_ns: u64, poller: &Poller) {
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        match connection.interest {
            Some(Interest::Read) => {
                if connection.read(now_ns).is_err() {
                    self.connections.remove(&id);
                    return;
                }
            }
            Some(_) => {}
            // Nothing is waited for, so it is the end of both directions: nobody is there to be
            // answered.
            None => {
                connection.ended = true;
                poller.remove(&connection.stream);
            }
        }
        self.proceed(id, now_ns, poller);
        self.keep_small();
    }

    fn keep_small(&mut self) {
        let waiting = |connection: &Connection| connection.input.len() - connection.taken;
        let all: usize = self.connections.values().map(waiting).sum();
        if all > MAX_WAITING_BYTES {
            let most = self.connections.iter().max_by_key(|(_, one)| waiting(one));
            if let Some(id) = most.map(|(id, _)| *id) {
                self.connections.remove(&id);
            }
        }
    }

    /// The request of a connection may take until then.
    pub fn wait_until(&mut self, id: u64, deadline_ns: u64) {
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.deadline_ns = deadline_ns.saturating_add(LINE_NS);
        }
    }

    /// Whether somebody waits for the answer to the request of a connection.
    pub fn awaits(&self, id: u64) -> bool {
        let here = self.connections.get(&id).is_some_and(|one| one.asked);
        here || self.desk.as_ref().is_some_and(|desk| desk.awaits(id))
    }

    /// Answers the request of a connection.
    pub fn reply(
        &mut self,
        id: u64,
        mut result: Result<Reply, ControlError>,
        now_ns: u64,
        poller: &Poller,
    ) {
        if let Some(desk) = &mut self.desk {
            match desk.answer(id, result) {
                Some(not_there) => result = not_there,
                None => return,
            }
        }
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        connection.asked = false;
        connection.output.extend_from_slice(&encode_reply(&result));
        connection.deadline_ns = now_ns + LINE_NS;
        connection.heard_ns = now_ns;
        self.proceed(id, now_ns, poller);
    }

    /// Whether somebody waits for a turn.
    fn has_turn(&mut self) -> bool {
        self.connections.values_mut().any(Connection::has_turn)
            || self.desk.as_mut().is_some_and(Desk::has_turn)
    }

    /// Whether there are turns at `now_ns`. If not, when to go on, where somebody waits for one.
    ///
    /// # Errors
    /// There are none yet.
    pub fn sits(&mut self, now_ns: u64) -> Result<Sitting, Option<u64>> {
        if now_ns < self.rests_until_ns {
            return Err(self.has_turn().then_some(self.rests_until_ns));
        }
        Ok(Sitting { begun_ns: now_ns })
    }

    /// A row of turns has ended at `now_ns`: slices are looked at for three times as long as it
    /// took. Returns when to go on: what was changed is carried out at once, and says itself when
    /// to look at it again.
    pub fn rise(&mut self, sitting: &Sitting, now_ns: u64) -> Option<u64> {
        let took_ns = now_ns.saturating_sub(sitting.begun_ns);
        self.rests_until_ns = now_ns + took_ns.saturating_mul(3);
        (took_ns > 0).then_some(now_ns)
    }

    /// The line of the connection that is next. `None`: no line waits.
    pub fn next_turn(&mut self, now_ns: u64, poller: &Poller) -> Option<Turn> {
        let taken = &self.taken;
        let of = |uid| {
            taken.get(&uid).map_or(0, |(ns, at_ns)| {
                let halves = now_ns.saturating_sub(*at_ns) / HALF_LIFE_NS;
                ns.checked_shr(u32::try_from(halves).unwrap_or(u32::MAX))
                    .unwrap_or(0)
            })
        };
        let waiting = self.connections.iter_mut();
        let waiting = waiting.filter_map(|(id, one)| one.has_turn().then_some((*id, &*one)));
        let ranked = waiting.map(|(id, one)| (id, (of(one.peer.uid), one.served_ns, one.heard_ns)));
        let next = ranked.min_by_key(|(_, rank)| *rank);
        if let Some(desk) = &mut self.desk
            && let Some((id, rank)) = desk.first(of)
            && next.is_none_or(|(_, of_lines)| rank <= of_lines)
            && let Some((peer, request)) = desk.take(id)
        {
            return Some(Turn::Ask(Box::new(Ask {
                connection: id,
                peer,
                request,
            })));
        }
        let id = next.map(|(id, _)| id)?;
        let connection = self.connections.get_mut(&id)?;
        connection.heard_ns = now_ns;
        let turn = match connection
            .take_line()
            .and_then(|line| decode_request(&line))
        {
            Ok(request) => {
                connection.asked = true;
                // The answer may take a moment; the peer is not the one who is late.
                connection.deadline_ns = now_ns + SILENCE_NS;
                Turn::Ask(Box::new(Ask {
                    connection: id,
                    peer: connection.peer.clone(),
                    request,
                }))
            }
            Err(error) => {
                connection.bad_lines += 1;
                connection.closing |= connection.bad_lines >= MAX_BAD_LINES;
                connection
                    .output
                    .extend_from_slice(&encode_reply(&Err(error)));
                connection.deadline_ns = now_ns + LINE_NS;
                Turn::Refused
            }
        };
        self.proceed(id, now_ns, poller);
        Some(turn)
    }

    /// A turn has taken so much of our time.
    pub fn spent(&mut self, id: u64, uid: u32, now_ns: u64, ns: u64) {
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.served_ns = connection.served_ns.saturating_add(ns);
        }
        if let Some(desk) = &mut self.desk {
            desk.spent(id, ns);
        }
        let (sum, at_ns) = self.taken.entry(uid).or_insert((0, now_ns));
        let halves = now_ns.saturating_sub(*at_ns) / HALF_LIFE_NS;
        if halves > 0 {
            *sum = sum
                .checked_shr(u32::try_from(halves).unwrap_or(u32::MAX))
                .unwrap_or(0);
            *at_ns = now_ns;
        }
        *sum = sum.saturating_add(ns);
    }

    /// Writes what can be written and waits for what is to come next.
    fn proceed(&mut self, id: u64, now_ns: u64, poller: &Poller) {
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        if connection.flush().is_err() {
            self.connections.remove(&id);
            return;
        }
        let has_turn = connection.has_turn();
        let idle = connection.output.is_empty() && !connection.asked && !has_turn;
        if idle && connection.input.len() == connection.taken {
            connection.deadline_ns = now_ns + SILENCE_NS;
        }
        let over = connection.closing || (connection.ended && !connection.asked && !has_turn);
        if connection.output.is_empty() && over {
            self.connections.remove(&id);
            return;
        }
        // A peer whose answer is not read, or not ready, is not listened to either.
        let interest = if !connection.output.is_empty() {
            Some(Interest::Write)
        } else if connection.asked || has_turn || connection.ended {
            None
        } else {
            Some(Interest::Read)
        };
        if interest == connection.interest {
            return;
        }
        let (stream, event) = (&connection.stream, Event::Control(id));
        let watched = match interest {
            // An end that is known already would ring for ever.
            None if connection.ended => {
                poller.remove(stream);
                Ok(())
            }
            None => poller.modify(stream, event, Interest::Nothing),
            Some(interest) => match poller.modify(stream, event, interest) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    poller.add(stream, event, interest)
                }
                other => other,
            },
        };
        connection.interest = interest;
        if watched.is_err() {
            self.connections.remove(&id);
        }
    }

    /// Closes connections whose time is up. Returns when the next one's is.
    pub fn expire(&mut self, now_ns: u64) -> Option<u64> {
        self.connections
            .retain(|_, connection| connection.deadline_ns > now_ns);
        let many_ns = 64 * HALF_LIFE_NS;
        self.taken
            .retain(|_, (_, at_ns)| now_ns.saturating_sub(*at_ns) < many_ns);
        self.connections
            .values()
            .map(|connection| connection.deadline_ns)
            .min()
    }

    /// Whether nobody is connected.
    pub fn is_empty(&self) -> bool {
        self.connections.is_empty() && self.desk.as_ref().is_none_or(Desk::is_empty)
    }

    /// Answers nothing any more that came over HTTP: who waits hears of it now.
    pub fn close_desk(&mut self) {
        if let Some(desk) = self.desk.take() {
            desk.close();
        }
    }

    /// Writes out what can be written at once; for the end.
    pub fn flush_all(&mut self) {
        for connection in self.connections.values_mut() {
            let _ = connection.flush();
        }
    }
}

impl Connection {
    fn read(&mut self, now_ns: u64) -> io::Result<()> {
        let mut turn = 0;
        let mut chunk = [0; 8192];
        while turn < TURN_BYTES && !self.ended && self.waiting_bytes() <= MAX_REQUEST_BYTES {
            match self.stream.read(&mut chunk) {
                Ok(0) => self.ended = true,
                Ok(count) => {
                    if self.waiting_bytes() == 0 {
                        self.deadline_ns = now_ns + LINE_NS;
                    }
                    self.heard_ns = now_ns;
                    // PANIC: a read returns at most the buffer's length.
                    self.input.extend_from_slice(&chunk[..count]);
                    turn += count;
                }
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => break,
                    io::ErrorKind::Interrupted => {}
                    _ => return Err(error),
                },
            }
        }
        Ok(())
    }

    fn waiting_bytes(&self) -> usize {
        self.input.len() - self.taken
    }

    /// Nothing of it waits for us.
    fn is_silent(&mut self) -> bool {
        !self.asked && self.output.is_empty() && !self.has_turn()
    }

    /// Whether its next line is there and the last one was answered.
    fn has_turn(&mut self) -> bool {
        !(self.asked || self.closing || !self.output.is_empty() || matches!(self.line(), Line::No))
    }

    /// Each byte is looked at once.
    fn line(&mut self) -> Line {
        // PANIC: both are at most the length.
        let found = self.input[self.looked..].iter().position(|b| *b == b'\n');
        match found {
            Some(at) => {
                self.looked += at;
                Line::Whole(self.looked)
            }
            None => {
                self.looked = self.input.len();
                if self.waiting_bytes() > MAX_REQUEST_BYTES {
                    Line::TooLong
                } else {
                    Line::No
                }
            }
        }
    }

    fn take_line(&mut self) -> Result<Vec<u8>, ControlError> {
        let Line::Whole(end) = self.line() else {
            self.closing = true;
            let message = format!("the request is longer than {MAX_REQUEST_BYTES} bytes");
            let error = ControlError::new(ErrorCode::Invalid, message);
            return Err(error.with_hint("shorten the command of the job"));
        };
        // PANIC: `taken` is at most `looked`, which is an index.
        let line = self.input[self.taken..=end].to_vec();
        (self.taken, self.looked) = (end + 1, end + 1);
        if self.taken == self.input.len() || self.taken >= TURN_BYTES {
            self.input.drain(..self.taken);
            (self.taken, self.looked) = (0, 0);
        }
        Ok(line)
    }

    fn flush(&mut self) -> io::Result<()> {
        while !self.output.is_empty() {
            match self.stream.write(&self.output) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => {
                    self.output.drain(..count);
                }
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => break,
                    io::ErrorKind::Interrupted => {}
                    _ => return Err(error),
                },
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATUS: &[u8] = b"{\"v_major\":2,\"v_minor\":0,\"request\":{\"kind\":\"list\"}}\n";

    struct Bench {
        server: ControlServer,
        poller: Poller,
        dir: tempfile::TempDir,
        now_ns: u64,
        events: Vec<Event>,
    }

    impl Bench {
        fn new() -> Self {
            let dir = tempfile::tempdir().expect("dir");
            let listener = UnixListener::bind(dir.path().join("s")).expect("bound");
            let server = ControlServer::new(listener, None).expect("served");
            let poller = Poller::new().expect("epoll");
            Self {
                server,
                poller,
                dir,
                now_ns: 1,
                events: Vec::new(),
            }
        }

        fn connect(&mut self) -> UnixStream {
            let stream = UnixStream::connect(self.dir.path().join("s")).expect("connected");
            self.accept();
            stream
        }

        fn accept(&mut self) -> bool {
            let accepted = self.server.accept(self.now_ns, &self.poller, || false);
            accepted.expect("accepted");
            !self.server.opens_again()
        }

        /// What has happened by now; how much that was.
        fn look(&mut self) -> usize {
            let mut events = std::mem::take(&mut self.events);
            self.poller.wait(Some(0), &mut events).expect("looked");
            for event in &events {
                if let Event::Control(id) = event {
                    self.server.on_event(*id, self.now_ns, &self.poller);
                }
            }
            let count = events.len();
            self.events = events;
            count
        }

        fn turn(&mut self) -> Option<Turn> {
            self.server.next_turn(self.now_ns, &self.poller)
        }

        fn answer(&mut self, ask: &Ask) {
            let reply = Ok(Reply::Jobs(Vec::new()));
            self.server
                .reply(ask.connection, reply, self.now_ns, &self.poller);
        }
    }

    #[test]
    fn a_flood_of_lines_has_a_few_turns_and_one_question_comes_before_it() {
        let mut bench = Bench::new();
        let mut flood = bench.connect();
        flood.write_all(&STATUS.repeat(500)).expect("sent");
        bench.look();
        // What is asked takes time, and that is remembered.
        for _ in 0..3 {
            let Some(Turn::Ask(ask)) = bench.turn() else {
                panic!("a request")
            };
            bench.answer(&ask);
            bench
                .server
                .spent(ask.connection, ask.peer.uid, bench.now_ns, 1000);
        }
        let mut honest = bench.connect();
        honest.write_all(STATUS).expect("sent");
        bench.look();
        let Some(Turn::Ask(ask)) = bench.turn() else {
            panic!("a request")
        };
        assert_eq!(ask.connection, 2, "it has asked nothing yet");
        // One at a time: it has another turn once this is answered.
        let Some(Turn::Ask(next)) = bench.turn() else {
            panic!("a request")
        };
        assert_eq!(next.connection, 1);
        assert!(bench.turn().is_none() && !bench.server.has_turn());
    }

    #[test]
    fn newlines_end_a_connection_after_a_few_and_each_is_a_turn() {
        let mut bench = Bench::new();
        let mut stream = bench.connect();
        stream.set_nonblocking(true).expect("set");
        let _ = stream.write(&vec![b'\n'; 1 << 20]);
        bench.look();
        for _ in 0..MAX_BAD_LINES {
            assert!(matches!(bench.turn(), Some(Turn::Refused)));
        }
        assert!(bench.turn().is_none());
        assert!(bench.server.is_empty(), "closed");
    }

    #[test]
    fn one_that_waits_for_its_turn_does_not_wake_anybody() {
        let mut bench = Bench::new();
        let mut stream = bench.connect();
        stream.set_nonblocking(true).expect("set");
        stream.write_all(&STATUS.repeat(2)).expect("sent");
        bench.look();
        let _ = stream.write(&vec![b'x'; 1 << 20]);
        stream
            .shutdown(std::net::Shutdown::Write)
            .expect("half closed");
        assert_eq!(bench.look(), 0, "it has a turn to come first");
        let Some(Turn::Ask(ask)) = bench.turn() else {
            panic!("a request")
        };
        assert_eq!(bench.look(), 0, "its request is in the works");
        drop(stream);
        // The end of both directions is noticed once.
        assert!(bench.look() <= 1);
        assert_eq!(bench.look(), 0);
        bench.answer(&ask);
        assert!(bench.look() <= 1);
        assert_eq!(bench.look(), 0);
    }

    #[test]
    fn silent_connections_give_way_and_those_who_have_just_come_do_not() {
        let mut bench = Bench::new();
        let mut open: Vec<UnixStream> = (0..MAX_OF_PROCESS + 5).map(|_| bench.connect()).collect();
        assert_eq!(bench.server.connections.len(), MAX_OF_PROCESS);
        // The last of them can ask.
        open.last_mut()
            .expect("one")
            .write_all(STATUS)
            .expect("sent");
        bench.look();
        assert!(matches!(bench.turn(), Some(Turn::Ask(_))));
        // As if of so many processes.
        let spread = |bench: &mut Bench| {
            for (pid, connection) in (1_000_000..).zip(bench.server.connections.values_mut()) {
                connection.peer.pid = pid;
            }
        };
        while bench.server.connections.len() < MAX_CONNECTIONS {
            spread(&mut bench);
            open.push(bench.connect());
        }
        spread(&mut bench);
        assert!(!bench.accept(), "all of them have just come");
        bench.now_ns += IDLE_NS;
        assert!(bench.accept());
        open.push(bench.connect());
        assert!(bench.server.connections.len() <= MAX_CONNECTIONS);
        let asked = bench.server.connections.values().filter(|one| one.asked);
        assert_eq!(asked.count(), 1, "who waits for an answer stays");
    }

    #[test]
    fn turns_take_a_quarter_of_the_time() {
        let mut bench = Bench::new();
        let sitting = bench.server.sits(1000).expect("turns");
        assert!(sitting.goes_on(999 + SITTING_NS) && !sitting.goes_on(1000 + SITTING_NS));
        assert_eq!(bench.server.rise(&sitting, 1000), None, "nobody had one");
        let sitting = bench.server.sits(1000).expect("turns");
        assert_eq!(bench.server.rise(&sitting, 1100), Some(1100));
        let early = bench.server.sits(1399).map(drop);
        assert_eq!(early, Err(None), "nobody waits");
        let mut stream = bench.connect();
        stream.write_all(STATUS).expect("sent");
        bench.look();
        let early = bench.server.sits(1399).map(drop);
        assert_eq!(early, Err(Some(1400)));
        assert!(bench.server.sits(1400).is_ok());
    }

    #[test]
    fn what_users_have_taken_is_forgotten() {
        let mut bench = Bench::new();
        bench.server.spent(1, 7, 0, 1 << 40);
        bench.server.spent(1, 7, 3 * HALF_LIFE_NS, 0);
        assert_eq!(bench.server.taken[&7].0, 1 << 37);
        bench.server.expire(100 * HALF_LIFE_NS);
        assert!(bench.server.taken.is_empty());
    }
}
