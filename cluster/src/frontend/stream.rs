//! Connections as bytes.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

/// TIMEOUT: a head, a body, a part of an answer: seconds on any link that is alive.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Bytes both ways.
pub trait Both: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Both for T {}

/// A stream whose reader has to read.
pub struct Hurried {
    stream: Box<dyn Both>,
    stalled: Option<Pin<Box<Sleep>>>,
}

impl Hurried {
    /// Nothing has stalled yet.
    pub fn new(stream: Box<dyn Both>) -> Self {
        Self {
            stream,
            stalled: None,
        }
    }

    /// What came of a write, or of the wait for it.
    fn hurry<T>(
        &mut self,
        context: &mut Context<'_>,
        done: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if done.is_ready() {
            self.stalled = None;
            return done;
        }
        let stalled = self
            .stalled
            .get_or_insert_with(|| Box::pin(sleep(PATIENCE)));
        match stalled.as_mut().poll(context) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
        }
    }
}

impl AsyncRead for Hurried {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, into)
    }
}

impl AsyncWrite for Hurried {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let done = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.hurry(context, done)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let done = Pin::new(&mut self.stream).poll_flush(context);
        self.hurry(context, done)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let done = Pin::new(&mut self.stream).poll_shutdown(context);
        self.hurry(context, done)
    }
}

/// A stream of a client that sends, and reads what was answered even where the other side reads no
/// more (RFC 9112, 9.5): what cannot be sent is forgotten, and what is read says what became of it.
pub struct Attentive {
    stream: Box<dyn Both>,
    is_unheard: bool,
}

impl Attentive {
    /// The other side listens.
    pub fn new(stream: Box<dyn Both>) -> Self {
        Self {
            stream,
            is_unheard: false,
        }
    }
}

impl AsyncRead for Attentive {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, into)
    }
}

impl AsyncWrite for Attentive {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        if self.is_unheard {
            return Poll::Ready(Ok(bytes.len()));
        }
        let done = Pin::new(&mut self.stream).poll_write(context, bytes);
        done.map(|done| match done {
            Err(error) if error.kind() != io::ErrorKind::Interrupted => {
                self.is_unheard = true;
                Ok(bytes.len())
            }
            done => done,
        })
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.is_unheard {
            true => Poll::Ready(Ok(())),
            false => Pin::new(&mut self.stream).poll_flush(context),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
