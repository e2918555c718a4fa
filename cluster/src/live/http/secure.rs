//! TLS below HTTP, at both ends. Who is believed is `certificates`' to say; how long a handshake
//! may take is for those who call this.

use std::io;
use std::sync::Arc;

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ServerConfig};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};

/// The first byte of a handshake of TLS; no method of HTTP begins with it.
const HANDSHAKE: u8 = 0x16;
/// Of what comes after the last word, so many reads.
const MOST_READS: u32 = 64;

/// A connection, with TLS or without.
pub trait Both: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Both for T {}

/// See [`Both`].
pub type Stream = Box<dyn Both>;

/// Whether a connection begins as TLS does. Waits for its first byte and leaves it there.
///
/// # Errors
/// There is none.
pub async fn speaks_tls(stream: &TcpStream) -> io::Result<bool> {
    let mut first = [0];
    match stream.peek(&mut first).await? {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        _ => Ok(first[0] == HANDSHAKE),
    }
}

/// The server's side of a handshake: the connection, and the names in the client's certificate
/// where one is demanded.
///
/// # Errors
/// Why there is none, and the socket: the reason is on its way to the client as an alert.
pub async fn accept(
    stream: TcpStream,
    tls: &certificates::Server,
) -> Result<(Stream, Option<Vec<String>>), (String, TcpStream)> {
    let config: Arc<ServerConfig> = match tls.held() {
        Ok(config) => config,
        Err(why) => return Err((why, stream)),
    };
    let shaken = TlsAcceptor::from(config).accept(stream).into_fallible();
    match shaken.await {
        Ok(stream) => {
            let shown = stream.get_ref().1.peer_certificates();
            let names = shown.map(|chain| {
                let first = chain.first();
                first.map_or_else(Vec::new, certificates::names)
            });
            Ok((Box::new(stream), names))
        }
        Err((error, stream)) => Err((failed(&error), stream)),
    }
}

/// Says the last word and closes. What the peer still sends is read: the kernel would take the
/// last word back.
pub async fn close(mut stream: TcpStream, last: &[u8]) {
    if stream.write_all(last).await.is_err() || stream.shutdown().await.is_err() {
        return;
    }
    let mut rest = [0; 1024];
    for _ in 0..MOST_READS {
        if !matches!(stream.read(&mut rest).await, Ok(1..)) {
            return;
        }
    }
}

/// The client's side of a handshake.
///
/// # Errors
/// There is no connection; the reason is one of TLS where [`certificates::explain`] knows one.
pub async fn connect(
    stream: TcpStream,
    config: Arc<ClientConfig>,
    name: ServerName<'static>,
) -> io::Result<Stream> {
    let stream = TlsConnector::from(config).connect(name, stream).await?;
    Ok(Box::new(stream))
}

/// Why a handshake has failed, in words.
pub fn failed(error: &io::Error) -> String {
    certificates::explain(error).unwrap_or_else(|| format!("no TLS was agreed on: {error}"))
}
