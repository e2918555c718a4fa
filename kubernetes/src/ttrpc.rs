//! ttrpc as NRI has it: two connections in one socket, each with calls of its own direction.
//!
//! Sources: `pkg/net/multiplex` of github.com/containerd/nri, `PROTOCOL.md` of
//! github.com/containerd/ttrpc. A frame is the number of a connection, a length, and bytes of that
//! connection; where frames end says nothing of where messages end. A message is a length, the
//! number of a call, a kind, flags, and protobuf.
//!
//! What comes is looked at before memory is taken for it, and no step of the reader waits.

use std::time::{Duration, Instant};

/// The connection on which the runtime calls the plugin.
pub const TO_PLUGIN: u32 = 1;
/// The one on which the plugin calls the runtime.
pub const TO_RUNTIME: u32 = 2;
/// Kinds of messages.
pub const REQUEST: u8 = 1;
pub const RESPONSE: u8 = 2;

/// Longest message, as both projects have it.
pub const LONGEST: usize = 4 << 20;
/// Bytes before a message.
const HEAD: usize = 10;
/// Bytes before a frame.
const FRAME: usize = 8;
/// TIMEOUT: a peer on this host writes a message at once. One that has begun and does not end is
/// none.
pub const UNFINISHED: Duration = Duration::from_secs(10);

/// A message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    /// [`TO_PLUGIN`] or [`TO_RUNTIME`]
    pub connection: u32,
    /// Number of the call.
    pub call: u32,
    /// [`REQUEST`] or [`RESPONSE`]
    pub kind: u8,
    pub payload: Vec<u8>,
}

/// What is no ttrpc.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    #[error("a frame for connection {0}, and there are {TO_PLUGIN} and {TO_RUNTIME}")]
    Connection(u32),
    #[error("a frame of {0} bytes: at most {max} are taken", max = LONGEST + HEAD)]
    Frame(usize),
    #[error("a message of {0} bytes: at most {LONGEST} are taken")]
    Message(usize),
    #[error("a message of kind {0} on connection {1}")]
    Kind(u8, u32),
    #[error("a message that does not end within {} s", UNFINISHED.as_secs())]
    Unfinished,
}

impl Message {
    /// As it travels, in frames that a reader takes.
    ///
    /// # Errors
    /// It is longer than any reader takes.
    pub fn encode(&self) -> Result<Vec<u8>, Malformed> {
        let length = self.payload.len();
        if length > LONGEST {
            return Err(Malformed::Message(length));
        }
        let mut bytes = Vec::with_capacity(FRAME + HEAD + length);
        bytes.extend(self.connection.to_be_bytes());
        // CAST: at most LONGEST and a head.
        bytes.extend(((HEAD + length) as u32).to_be_bytes());
        bytes.extend((length as u32).to_be_bytes());
        bytes.extend(self.call.to_be_bytes());
        bytes.extend([self.kind, 0]);
        bytes.extend(&self.payload);
        Ok(bytes)
    }
}

/// What came and is no whole message yet.
#[derive(Debug, Default)]
pub struct Incoming {
    /// Of a frame's head.
    head: Vec<u8>,
    /// Connection and bytes to come of a frame.
    frame: Option<(u32, usize)>,
    connections: [Vec<u8>; 2],
    /// Since when something is unfinished.
    since: Option<Instant>,
}

impl Incoming {
    /// Takes bytes, and returns the messages that they complete.
    ///
    /// # Errors
    /// [`Malformed`]: the connection is of no use any more.
    pub fn take(&mut self, mut bytes: &[u8], now: Instant) -> Result<Vec<Message>, Malformed> {
        let mut messages = Vec::new();
        while !bytes.is_empty() {
            let Some((connection, left)) = self.frame else {
                let (head, rest) = bytes.split_at(bytes.len().min(FRAME - self.head.len()));
                self.head.extend(head);
                bytes = rest;
                if let Ok([a, b, c, d, length @ ..]) = <[u8; FRAME]>::try_from(&*self.head) {
                    self.head.clear();
                    self.frame = begun([a, b, c, d], length)?;
                }
                continue;
            };
            let (part, rest) = bytes.split_at(bytes.len().min(left));
            bytes = rest;
            self.frame = Some((connection, left - part.len())).filter(|(_, left)| *left > 0);
            let buffer = &mut self.connections[usize::from(connection == TO_RUNTIME)];
            buffer.extend(part);
            while let Some(message) = message(connection, buffer)? {
                messages.push(message);
            }
        }
        let open = self.connections.iter().any(|buffer| !buffer.is_empty());
        let unfinished = open || self.frame.is_some() || !self.head.is_empty();
        // A message that came whole shows that the peer goes on.
        self.since = match self.since.filter(|_| messages.is_empty()) {
            Some(since) if unfinished => Some(since),
            _ => unfinished.then_some(now),
        };
        Ok(messages)
    }

    /// Until when what has begun must end; `None`: nothing has.
    pub fn deadline(&self) -> Option<Instant> {
        self.since.map(|since| since + UNFINISHED)
    }
}

/// A frame that begins; `None`: an empty one.
fn begun(connection: [u8; 4], length: [u8; 4]) -> Result<Option<(u32, usize)>, Malformed> {
    let connection = u32::from_be_bytes(connection);
    if ![TO_PLUGIN, TO_RUNTIME].contains(&connection) {
        return Err(Malformed::Connection(connection));
    }
    // CAST: 32 bits fit.
    let length = u32::from_be_bytes(length) as usize;
    if length > LONGEST + HEAD {
        return Err(Malformed::Frame(length));
    }
    Ok(Some((connection, length)).filter(|_| length > 0))
}

/// The first message of a connection's bytes, taken out of them; `None`: it is not whole.
fn message(connection: u32, buffer: &mut Vec<u8>) -> Result<Option<Message>, Malformed> {
    let Some((head, rest)) = buffer.split_first_chunk::<HEAD>() else {
        return Ok(None);
    };
    let [a, b, c, d, e, f, g, h, kind, _flags] = *head;
    let length = u32::from_be_bytes([a, b, c, d]) as usize;
    if length > LONGEST {
        return Err(Malformed::Message(length));
    }
    let expected = match connection {
        TO_PLUGIN => REQUEST,
        _ => RESPONSE,
    };
    if kind != expected {
        return Err(Malformed::Kind(kind, connection));
    }
    let Some(payload) = rest.get(..length) else {
        return Ok(None);
    };
    let message = Message {
        connection,
        call: u32::from_be_bytes([e, f, g, h]),
        kind,
        payload: payload.to_vec(),
    };
    buffer.drain(..HEAD + length);
    Ok(Some(message))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(call: u32, payload: &[u8]) -> Message {
        Message {
            connection: TO_PLUGIN,
            call,
            kind: REQUEST,
            payload: payload.to_vec(),
        }
    }

    fn take(incoming: &mut Incoming, bytes: &[u8]) -> Result<Vec<Message>, Malformed> {
        incoming.take(bytes, Instant::now())
    }

    #[test]
    fn messages_are_whole_wherever_frames_and_reads_end() {
        let sent = [
            request(1, b"one"),
            request(3, b""),
            Message {
                connection: TO_RUNTIME,
                kind: RESPONSE,
                ..request(1, &[7; 300])
            },
        ];
        let bytes: Vec<u8> = sent.iter().flat_map(|m| m.encode().unwrap()).collect();
        for step in [1, 7, 8, 9, 18, bytes.len()] {
            let mut incoming = Incoming::default();
            let mut came = Vec::new();
            for part in bytes.chunks(step) {
                came.extend(take(&mut incoming, part).unwrap());
            }
            assert_eq!(came, sent, "in steps of {step}");
            assert_eq!(incoming.deadline(), None);
        }
        // A message in frames of a byte each, one of another connection between them.
        let (one, other) = (sent[0].encode().unwrap(), sent[2].encode().unwrap());
        let mut incoming = Incoming::default();
        let mut came = Vec::new();
        for (at, byte) in one[FRAME..].iter().enumerate() {
            let frame = [&[0, 0, 0, 1, 0, 0, 0, 1][..], &[*byte]].concat();
            came.extend(take(&mut incoming, &frame).unwrap());
            if at == 4 {
                came.extend(take(&mut incoming, &other).unwrap());
            }
        }
        assert_eq!(came, [sent[2].clone(), sent[0].clone()]);
    }

    #[test]
    fn what_is_none_is_an_error_before_memory_is_taken_for_it() {
        let judge = |bytes: &[u8]| take(&mut Incoming::default(), bytes).unwrap_err();
        let frame = |connection: u32, length: u32| {
            [connection.to_be_bytes(), length.to_be_bytes()].concat()
        };
        assert_eq!(judge(&frame(0, 1)), Malformed::Connection(0));
        assert_eq!(
            judge(b"GET / HTTP/1.1\r\n"),
            Malformed::Connection(0x4745_5420)
        );
        let long = u32::MAX as usize;
        assert_eq!(judge(&frame(1, u32::MAX)), Malformed::Frame(long));
        let head = |length: u32, kind: u8| {
            let head = [&length.to_be_bytes()[..], &[0, 0, 0, 1, kind, 0]].concat();
            [frame(1, 10), head].concat()
        };
        assert_eq!(judge(&head(u32::MAX, REQUEST)), Malformed::Message(long));
        assert_eq!(judge(&head(1, RESPONSE)), Malformed::Kind(RESPONSE, 1));
        assert_eq!(judge(&head(1, 3)), Malformed::Kind(3, 1));
        let long = request(1, &vec![0; LONGEST + 1]).encode().unwrap_err();
        assert_eq!(long, Malformed::Message(LONGEST + 1));
    }

    #[test]
    fn what_has_begun_has_a_deadline_that_more_of_it_does_not_move() {
        let bytes = request(1, b"payload").encode().unwrap();
        let mut incoming = Incoming::default();
        let begun = Instant::now();
        let later = begun + Duration::from_secs(3);
        incoming.take(&bytes[..3], begun).unwrap();
        incoming.take(&bytes[3..20], later).unwrap();
        assert_eq!(incoming.deadline(), Some(begun + UNFINISHED));
        incoming.take(&bytes[20..], later).unwrap();
        assert_eq!(incoming.deadline(), None);
        // The end of one and the beginning of the next.
        incoming.take(&bytes[..9], begun).unwrap();
        incoming
            .take(&[&bytes[9..], &bytes[..9]].concat(), later)
            .unwrap();
        assert_eq!(incoming.deadline(), Some(later + UNFINISHED));
    }
}
