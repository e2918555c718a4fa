//! One request to one instance, over a connection of its own: an instance that has ended meanwhile
//! is noticed before it is sent anything, and none keeps a connection of a frontend that uses it no
//! more.

use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use tokio::net::{TcpStream, UnixStream};
use tokio::task::AbortHandle;
use tokio::time::{Instant, timeout, timeout_at};

use super::Address;
use super::head;
use super::stream::Both;

/// TIMEOUT: a host that is there takes a connection within a round trip; one whose packets are lost
/// sends the first one again after a second.
const CONNECT: Duration = Duration::from_secs(2);
/// Longest head of an answer, and what is read at a time.
const BUFFER_BYTES: usize = 64 << 10;

/// Why there is no answer.
#[derive(Debug, PartialEq, Eq)]
pub enum Fault {
    /// Nothing was sent.
    Unsent(String),
    /// It may have done what it was asked for.
    Broken(String),
    /// It took too long.
    TimedOut,
}

/// A connection; it ends when this is dropped.
pub struct Line(AbortHandle);

impl Drop for Line {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn connect(address: &Address) -> std::io::Result<Box<dyn Both>> {
    Ok(match address {
        Address::Tcp(text) => {
            let stream = TcpStream::connect(text.as_str()).await?;
            let _ = stream.set_nodelay(true);
            Box::new(stream)
        }
        Address::Unix(path) => Box::new(UnixStream::connect(path).await?),
    })
}

/// Sends a request; its answer's head comes until `end`, as a client gets it.
///
/// # Errors
/// [`Fault`].
pub async fn send(
    address: &Address,
    request: Request<Full<Bytes>>,
    end: Instant,
) -> Result<(Response<Incoming>, Line), Fault> {
    let stream = match timeout(CONNECT, connect(address)).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => return Err(Fault::Unsent(format!("it is not reached: {error}"))),
        Err(_) => {
            let why = format!("it takes no connection within {} s", CONNECT.as_secs());
            return Err(Fault::Unsent(why));
        }
    };
    let (mut requests, connection) = http1::Builder::new()
        .max_buf_size(BUFFER_BYTES)
        .handshake(TokioIo::new(stream))
        .await
        .map_err(|error| Fault::Unsent(error.to_string()))?;
    let line = Line(tokio::spawn(async move { drop(connection.await) }).abort_handle());
    match timeout_at(end, requests.send_request(request)).await {
        Ok(Ok(mut response)) => match head::pass_on(&mut response) {
            Ok(()) => Ok((response, line)),
            Err(why) => Err(Fault::Broken(why)),
        },
        Ok(Err(error)) if error.is_canceled() => Err(Fault::Unsent(error.to_string())),
        Ok(Err(error)) if error.is_parse() => {
            Err(Fault::Broken(format!("its answer is no HTTP: {error}")))
        }
        Ok(Err(error)) => {
            let broke = format!("it broke off before its answer: {error}");
            Err(Fault::Broken(broke))
        }
        Err(_) => Err(Fault::TimedOut),
    }
}
