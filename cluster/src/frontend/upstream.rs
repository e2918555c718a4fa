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
use tokio::time::{Instant, timeout_at};

use super::Address;
use super::head;
use super::stream::{Attentive, Both};

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
    /// Nothing was sent, and that was not the instance: it takes no connection for the moment
    /// because it has enough of them, or this process has none left.
    Busy(String),
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
            if is_own(&stream) {
                return Err(std::io::ErrorKind::ConnectionRefused.into());
            }
            let _ = stream.set_nodelay(true);
            Box::new(stream)
        }
        Address::Unix(path) => Box::new(UnixStream::connect(path).await?),
    })
}

/// Whether a connection has met itself: where nobody listens at a port of the range from which the
/// kernel gives ports to those that connect, it gives that one now and then (RFC 9293, 3.5: both
/// sides open at once).
fn is_own(stream: &TcpStream) -> bool {
    matches!((stream.local_addr(), stream.peer_addr()), (Ok(own), Ok(peer)) if own == peer)
}

/// What a connection that failed says.
fn unreached(error: &std::io::Error) -> Fault {
    use rustix::io::Errno;
    let why = format!("it is not reached: {error}");
    match Errno::from_io_error(error) {
        // A Unix socket whose queue is full.
        Some(Errno::AGAIN)
        // Descriptors, ports and buffers of this side.
        | Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS | Errno::ADDRNOTAVAIL) => {
            Fault::Busy(why)
        }
        _ => Fault::Unsent(why),
    }
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
    let stream = match timeout_at(end.min(Instant::now() + CONNECT), connect(address)).await {
        Ok(Ok(stream)) => Attentive::new(stream),
        Ok(Err(error)) => return Err(unreached(&error)),
        Err(_) if Instant::now() >= end => return Err(Fault::TimedOut),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_this_side_lacks_is_not_the_instances_fault() {
        use rustix::io::Errno;
        for (errno, is_ours) in [
            (Errno::MFILE, true),
            (Errno::NFILE, true),
            (Errno::ADDRNOTAVAIL, true),
            (Errno::AGAIN, true),
            (Errno::CONNREFUSED, false),
            (Errno::NOENT, false),
            (Errno::ACCESS, false),
        ] {
            let fault = unreached(&errno.into());
            assert_eq!(matches!(fault, Fault::Busy(_)), is_ours, "{fault:?}");
        }
    }

    #[test]
    fn a_connection_that_has_met_itself_is_none() {
        let runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = { runtime }.enable_io().build().unwrap();
        runtime.block_on(async {
            let socket = tokio::net::TcpSocket::new_v4().unwrap();
            socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
            let own = socket.local_addr().unwrap();
            assert!(is_own(&socket.connect(own).await.unwrap()));
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            let other = TcpStream::connect(listener.local_addr().unwrap()).await;
            assert!(!is_own(&other.unwrap()));
        });
    }
}
