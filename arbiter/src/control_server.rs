//! The operator's socket: lines in, lines out, each connection within bounds.
//!
//! Knows requests as far as their framing; what they mean is decided in `operator`. A connection has one request in
//! the works at a time, a deadline for each line and a limit on what may be outstanding; a peer that does not keep to
//! them loses its own connection and nothing else.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};

use control::wire::{decode_request, encode_reply};
use control::{ControlError, ErrorCode, Reply, Request};

use crate::reactor::{Event, Interest, Poller};

/// Connections at a time. The one that was silent longest gives way.
const MAX_CONNECTIONS: usize = 64;
/// Longest request in bytes. A command line can be long; a state of a thousand jobs is an answer and no request.
const MAX_REQUEST_BYTES: usize = 1 << 20;
/// Bytes read from one connection before the others have their turn.
const TURN_BYTES: usize = 64 << 10;
/// TIMEOUT: a line takes less than a millisecond to send; five seconds are a stopped or hostile peer.
const LINE_NS: u64 = 5_000_000_000;
/// TIMEOUT: `top` asks every second or so; a minute of silence is a forgotten connection.
const SILENCE_NS: u64 = 60_000_000_000;

/// Who asks, as the kernel says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Peer {
    /// Process id.
    pub pid: u32,
    /// User id.
    pub uid: u32,
}

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

/// The listening socket and its connections.
#[derive(Debug)]
pub struct ControlServer {
    listener: UnixListener,
    connections: BTreeMap<u64, Connection>,
    next: u64,
}

#[derive(Debug)]
struct Connection {
    stream: UnixStream,
    peer: Peer,
    input: Vec<u8>,
    output: Vec<u8>,
    /// A request is being worked on.
    asked: bool,
    /// The other side sends nothing more.
    ended: bool,
    /// Written to the end and then closed.
    closing: bool,
    deadline_ns: u64,
}

impl ControlServer {
    /// Serves a bound socket.
    pub fn new(listener: UnixListener) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        Ok(Self {
            listener,
            connections: BTreeMap::new(),
            next: 1,
        })
    }

    /// The listening socket, to poll.
    pub fn listener(&self) -> &UnixListener {
        &self.listener
    }

    /// Accepts who is there, a few at a time.
    ///
    /// # Errors
    /// Where no connection can be taken for want of resources: the listener would go on ringing.
    pub fn accept(&mut self, now_ns: u64, poller: &Poller) -> io::Result<()> {
        for _ in 0..16 {
            let stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => return Ok(()),
                    io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted => continue,
                    _ => return Err(error),
                },
            };
            let Ok(peer) = peer_of(&stream) else { continue };
            if stream.set_nonblocking(true).is_err() {
                continue;
            }
            if self.connections.len() >= MAX_CONNECTIONS {
                let oldest = self
                    .connections
                    .iter()
                    .min_by_key(|(_, connection)| connection.deadline_ns);
                if let Some(id) = oldest.map(|(id, _)| *id) {
                    self.connections.remove(&id);
                }
            }
            let id = self.next;
            self.next += 1;
            poller.add(&stream, Event::Control(id), Interest::Read)?;
            let connection = Connection {
                stream,
                peer,
                input: Vec::new(),
                output: Vec::new(),
                asked: false,
                ended: false,
                closing: false,
                deadline_ns: now_ns + LINE_NS,
            };
            self.connections.insert(id, connection);
        }
        Ok(())
    }

    /// Reads and writes what can be; a whole line is returned as a request.
    pub fn on_event(&mut self, id: u64, now_ns: u64, poller: &Poller) -> Option<Ask> {
        let connection = self.connections.get_mut(&id)?;
        if connection.read(now_ns).is_err() {
            self.connections.remove(&id);
            return None;
        }
        self.proceed(id, now_ns, poller)
    }

    /// The request of a connection may take until then.
    pub fn wait_until(&mut self, id: u64, deadline_ns: u64) {
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.deadline_ns = deadline_ns.saturating_add(LINE_NS);
        }
    }

    /// Answers the request of a connection. May return the next one, where the peer has sent it already.
    pub fn reply(
        &mut self,
        id: u64,
        result: &Result<Reply, ControlError>,
        now_ns: u64,
        poller: &Poller,
    ) -> Option<Ask> {
        let connection = self.connections.get_mut(&id)?;
        connection.asked = false;
        connection.output.extend_from_slice(&encode_reply(result));
        connection.deadline_ns = now_ns + LINE_NS;
        self.proceed(id, now_ns, poller)
    }

    fn proceed(&mut self, id: u64, now_ns: u64, poller: &Poller) -> Option<Ask> {
        let connection = self.connections.get_mut(&id)?;
        let mut ask = None;
        loop {
            if connection.flush().is_err() {
                self.connections.remove(&id);
                return None;
            }
            // The next line is looked at once the answer to the last one is written.
            if connection.asked || connection.closing || !connection.output.is_empty() {
                break;
            }
            match connection
                .take_line()
                .map(|line| line.and_then(|line| decode_request(&line)))
            {
                Some(Ok(request)) => {
                    connection.asked = true;
                    // The answer may take a moment; the peer is not the one who is late.
                    connection.deadline_ns = now_ns + SILENCE_NS;
                    ask = Some(Ask {
                        connection: id,
                        peer: connection.peer,
                        request,
                    });
                }
                Some(Err(error)) => {
                    connection.closing = connection.input.len() > MAX_REQUEST_BYTES;
                    connection
                        .output
                        .extend_from_slice(&encode_reply(&Err(error)));
                }
                None => break,
            }
        }
        let idle = connection.output.is_empty() && !connection.asked;
        if idle && connection.input.is_empty() {
            connection.deadline_ns = now_ns + SILENCE_NS;
        }
        let over = connection.closing || (connection.ended && !connection.asked);
        if connection.output.is_empty() && over {
            self.connections.remove(&id);
            return ask;
        }
        // A peer whose answer is not read, or not ready, is not listened to either.
        let interest = if !connection.output.is_empty() {
            Interest::ReadWrite
        } else if connection.asked {
            Interest::HangUp
        } else {
            Interest::Read
        };
        let watched = if connection.ended {
            // An end that is known already would ring for ever.
            poller.remove(&connection.stream);
            if connection.output.is_empty() {
                Ok(())
            } else {
                poller.add(&connection.stream, Event::Control(id), Interest::Write)
            }
        } else {
            poller.modify(&connection.stream, Event::Control(id), interest)
        };
        if watched.is_err() {
            self.connections.remove(&id);
        }
        ask
    }

    /// Closes connections whose time is up. Returns when the next one's is.
    pub fn expire(&mut self, now_ns: u64) -> Option<u64> {
        self.connections
            .retain(|_, connection| connection.deadline_ns > now_ns);
        self.connections
            .values()
            .map(|connection| connection.deadline_ns)
            .min()
    }

    /// Whether nobody is connected.
    pub fn is_empty(&self) -> bool {
        self.connections.is_empty()
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
        while turn < TURN_BYTES && !self.ended && self.input.len() <= MAX_REQUEST_BYTES {
            match self.stream.read(&mut chunk) {
                Ok(0) => self.ended = true,
                Ok(count) => {
                    if self.input.is_empty() {
                        self.deadline_ns = now_ns + LINE_NS;
                    }
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

    fn take_line(&mut self) -> Option<Result<Vec<u8>, ControlError>> {
        let Some(end) = self.input.iter().position(|byte| *byte == b'\n') else {
            let too_long = self.input.len() > MAX_REQUEST_BYTES;
            return too_long.then(|| {
                Err(ControlError::new(
                    ErrorCode::Invalid,
                    format!("the request is longer than {MAX_REQUEST_BYTES} bytes"),
                )
                .with_hint("shorten the command of the job"))
            });
        };
        let rest = self.input.split_off(end + 1);
        Some(Ok(std::mem::replace(&mut self.input, rest)))
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

fn peer_of(stream: &UnixStream) -> io::Result<Peer> {
    let peer = rustix::net::sockopt::socket_peercred(stream)?;
    Ok(Peer {
        // CAST: process ids are positive.
        pid: peer.pid.as_raw_nonzero().get() as u32,
        uid: peer.uid.as_raw(),
    })
}
