//! Unix sockets as gRPC's C core names them: the path is the request's `:authority`, with `%2F` for
//! each slash. hyper takes that for malformed and resets the call, so the signs are replaced before
//! it reads them. A name of the same length leaves the compression of headers as it is.
//!
//! Looks at frames of headers alone, and knows of HPACK one thing: a literal whose name is written
//! out, or is the first of the static table. That core does not compress its text.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// What a client says first.
const PREFACE: usize = 24;
/// Of a frame: its length, its kind, flags and stream.
const FRAME: usize = 9;
const HEADERS: u8 = 1;
/// Longest frame of headers that is looked at; a longer one is refused anyway.
const LONGEST: usize = 32 << 10;
/// A literal named `:authority`: remembered by the reader, not, or never.
const NAMED: [u8; 3] = [0x41, 0x01, 0x11];
/// The same with its name written out.
const SPELT: [u8; 3] = [0x40, 0x00, 0x10];
/// With its length before it.
const NAME: &[u8] = b"\x0a:authority";
/// A length of seven bits; this one means that more follows.
const LONG: u8 = 0x7f;

/// Where a stream of frames is.
#[derive(Debug)]
struct Frames {
    preface: usize,
    head: Vec<u8>,
    left: usize,
    /// Of a frame of headers, what has come.
    held: Option<Vec<u8>>,
}

impl Frames {
    fn new() -> Self {
        Self {
            preface: PREFACE,
            head: Vec::with_capacity(FRAME),
            left: 0,
            held: None,
        }
    }

    /// Passes bytes on; those of a frame of headers when all of them have come.
    fn pass(&mut self, mut bytes: &[u8], out: &mut Vec<u8>) {
        while !bytes.is_empty() {
            if self.preface > 0 {
                let (now, rest) = bytes.split_at(self.preface.min(bytes.len()));
                self.preface -= now.len();
                out.extend_from_slice(now);
                bytes = rest;
            } else if self.head.len() < FRAME {
                let (now, rest) = bytes.split_at((FRAME - self.head.len()).min(bytes.len()));
                self.head.extend_from_slice(now);
                out.extend_from_slice(now);
                bytes = rest;
                if let [first, second, third, kind, ..] = self.head[..]
                    && self.head.len() == FRAME
                {
                    let length = [0, first, second, third].map(usize::from);
                    self.left = length.iter().fold(0, |sum, byte| sum << 8 | byte);
                    let is_held = kind == HEADERS && self.left <= LONGEST;
                    self.held = is_held.then(|| Vec::with_capacity(self.left));
                }
            } else {
                let (now, rest) = bytes.split_at(self.left.min(bytes.len()));
                self.left -= now.len();
                self.held
                    .as_mut()
                    .unwrap_or(&mut *out)
                    .extend_from_slice(now);
                bytes = rest;
            }
            if self.left == 0 && self.head.len() == FRAME {
                self.head.clear();
                if let Some(mut held) = self.held.take() {
                    make_plain(&mut held);
                    out.append(&mut held);
                }
            }
        }
    }
}

/// Replaces the signs in names of sockets.
fn make_plain(headers: &mut [u8]) {
    for at in 0..headers.len() {
        let after = match headers[at] {
            name if NAMED.contains(&name) => at + 1,
            name if SPELT.contains(&name) && headers[at + 1..].starts_with(NAME) => {
                at + 1 + NAME.len()
            }
            _ => continue,
        };
        let (begin, length) = match headers[after..] {
            [LONG, more, ..] if more < 0x80 => (after + 2, usize::from(LONG) + usize::from(more)),
            [length, ..] if length < LONG => (after + 1, usize::from(length)),
            _ => continue,
        };
        let Some(value) = headers.get_mut(begin..begin + length) else {
            continue;
        };
        if value.iter().all(u8::is_ascii_graphic) {
            for sign in value.iter_mut().filter(|byte| **byte == b'%') {
                *sign = b'-';
            }
        }
    }
}

/// A stream whose requests name sockets plainly.
#[derive(Debug)]
pub struct Plain<S> {
    stream: S,
    frames: Frames,
    ready: Vec<u8>,
    given: usize,
}

impl<S> Plain<S> {
    /// Of a connection that has just begun.
    pub fn new(stream: S) -> Self {
        Self {
            stream,
            frames: Frames::new(),
            ready: Vec::new(),
            given: 0,
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Plain<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        while this.given == this.ready.len() {
            this.ready.clear();
            this.given = 0;
            let mut space = [0; 4096];
            let mut read = ReadBuf::new(&mut space);
            ready!(Pin::new(&mut this.stream).poll_read(context, &mut read))?;
            if read.filled().is_empty() {
                // The end; half a frame is of no use to anybody.
                return Poll::Ready(Ok(()));
            }
            this.frames.pass(read.filled(), &mut this.ready);
        }
        let left = &this.ready[this.given..];
        let now = left.len().min(into.remaining());
        into.put_slice(&left[..now]);
        this.given += now;
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Plain<S> {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(context, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, payload: &[u8]) -> Vec<u8> {
        let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
        let mut frame = length[1..].to_vec();
        frame.extend([kind, 4, 0, 0, 0, 1]);
        frame.extend(payload);
        frame
    }

    fn literal(name: u8, value: &str) -> Vec<u8> {
        let mut literal = match u8::try_from(value.len()) {
            Ok(length) if length < LONG => vec![name, length],
            Ok(length) => vec![name, LONG, length - LONG],
            Err(_) => panic!("too long for this test"),
        };
        literal.extend(value.bytes());
        literal
    }

    /// As it was sent, and as it is read.
    fn conversation() -> (Vec<u8>, Vec<u8>) {
        let long = format!("%2F{}", "d%2F".repeat(35));
        let with = |from: &str, more: &str| {
            let mut all = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
            all.extend(frame(4, &[]));
            let mut headers = vec![0x83, 0x86];
            headers.extend(literal(0x41, from));
            // Another header may have such a sign.
            headers.extend(literal(0x44, "/a%2Fb"));
            all.extend(frame(HEADERS, &headers));
            // What looks the same in a message is a message.
            all.extend(frame(0, &literal(0x41, "%2F")));
            all.extend(frame(HEADERS, &literal(0x01, more)));
            // As gRPC's core writes it.
            let mut spelt = vec![0x40];
            spelt.extend(NAME);
            spelt.extend(&literal(0, more)[1..]);
            all.extend(frame(HEADERS, &spelt));
            all
        };
        let plain = |text: &str| text.replace('%', "-");
        (
            with("%2Frun%2Fa.sock", &long),
            with(&plain("%2Frun%2Fa.sock"), &plain(&long)),
        )
    }

    #[test]
    fn a_socket_is_named_plainly_however_its_bytes_come() {
        let (sent, read) = conversation();
        for step in 1..=sent.len() {
            let (mut frames, mut out) = (Frames::new(), Vec::new());
            for part in sent.chunks(step) {
                frames.pass(part, &mut out);
            }
            assert!(out == read, "in steps of {step}");
        }
    }

    #[test]
    fn nonsense_is_passed_on_as_it_is() {
        for name in NAMED {
            // Lengths that lead out of the frame, and text that is none.
            for payload in [
                vec![name],
                vec![name, 200],
                vec![name, 9, b'%'],
                vec![name, 2, b'%', 0],
            ] {
                let mut sent = vec![0; PREFACE];
                sent.extend(frame(HEADERS, &payload));
                let mut out = Vec::new();
                Frames::new().pass(&sent, &mut out);
                assert_eq!(out, sent);
            }
        }
    }
}
