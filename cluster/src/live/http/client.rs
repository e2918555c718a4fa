//! The client: one request after the other over one connection, every wait with a deadline.
//!
//! It asks nothing before the other side has proved that it knows the token, and accepts no answer
//! but the hook's to this request ([`auth`]). A session is a proof about one connection: so it is
//! hyper's connection that is used, and no client that keeps several and connects by itself.

use std::io;
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Bytes;
use certificates::{ClientFiles, Notice};
use control::ControlError;
use http_body_util::{BodyExt, Full, Limited};
use hyper::Request;
use hyper::client::conn::http1::{self, SendRequest};
use hyper::header::{AUTHORIZATION, CONTENT_LENGTH, CONTENT_TYPE, HOST};
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::runtime::{Builder, Runtime};
use tokio::task::{JoinHandle, yield_now};
use tokio::time::timeout_at;

use super::secure::{self, Stream};
use super::{CODE_FIELD, MAX_BODY_BYTES, MAX_FIELDS, MAX_HEAD_BYTES, SCHEME, stays};
use crate::live::auth::{self, Challenge, Session, Token};
use crate::live::wire::HookId;

/// Why there is no answer, or what the answer was.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The URL is none.
    #[error("`{0}` is no address of a hook: write https://HOST:PORT, or http://HOST:PORT")]
    Url(String),
    /// TLS, and nobody who vouches for the hook.
    #[error(
        "{0} is a hook with TLS: give the file with the certificate of its authority (--ca-file, --cluster-ca, `ca_file` in [cluster])"
    )]
    NoAuthority(String),
    /// Files for TLS, and no TLS.
    #[error(
        "{0} is plain, and certificates are given for it: write https://, or give no certificates"
    )]
    Plain(String),
    /// A file for TLS is wrong.
    #[error(transparent)]
    File(#[from] certificates::Wrong),
    /// Who answers shows no certificate that is believed.
    #[error("who answers at {url} is not shown to be the hook, so nothing was sent to it: {why}")]
    Unproven {
        /// Where.
        url: String,
        /// Why.
        why: String,
    },
    /// Nobody is there.
    #[error("the hook at {url} is not reached: {why}")]
    Unreachable {
        /// Where.
        url: String,
        /// Why.
        why: String,
    },
    /// Who answers does not know the token.
    #[error(
        "who answers at {url} does not know the token that is in our file, so nothing was sent to it: another token than the hook's, or somebody else at its address"
    )]
    Stranger {
        /// Where.
        url: String,
    },
    /// An answer that is not the hook's.
    #[error("an answer of {url} is not the hook's, and was not listened to: {why}")]
    Forged {
        /// Where.
        url: String,
        /// What it says.
        why: String,
    },
    /// It says no.
    #[error("{error}")]
    Refused {
        /// Status.
        status: u16,
        /// Its words.
        error: ControlError,
    },
    /// Its answer is malformed.
    #[error("the answer of {url} makes no sense: {why}")]
    Nonsense {
        /// Where.
        url: String,
        /// Why.
        why: String,
    },
}

impl ClientError {
    /// Whether somebody answered who is not obeyed.
    #[must_use]
    pub fn is_no_hook(&self) -> bool {
        matches!(
            self,
            Self::Stranger { .. } | Self::Forged { .. } | Self::Unproven { .. }
        )
    }

    /// The status of a refusal.
    #[must_use]
    pub fn status(&self) -> Option<u16> {
        match self {
            Self::Refused { status, .. } => Some(*status),
            _ => None,
        }
    }
}

/// A connection to a hook, made anew where it broke.
pub struct Client {
    url: String,
    host: String,
    token: Token,
    /// With TLS: whom it believes, and by which name.
    tls: Option<(Arc<certificates::Client>, ServerName<'static>)>,
    /// For a connection whose other side has proved that it knows the token.
    connecting: Duration,
    /// For the answer to a request.
    patience: Duration,
    connection: Option<Connection>,
}

/// A connection to one that knows the token.
struct Connection {
    line: Line,
    /// How often the files of TLS had changed when it began.
    by_files: u64,
    session: Session,
    hook: HookId,
}

/// A connection. It is driven by who asks, while it asks: there is no thread for it.
struct Line {
    requests: SendRequest<Full<Bytes>>,
    /// What drives it; with what TLS had to say when it ended.
    driver: JoinHandle<Option<String>>,
    runtime: Runtime,
}

/// Why there is no answer on a connection.
#[derive(Debug, thiserror::Error)]
enum LineError {
    /// The other side had closed it, and was not sent the request.
    #[error("the connection was closed")]
    Unsent,
    /// It was closed before the answer was whole.
    #[error("the connection was closed")]
    Closed,
    /// It took too long.
    #[error("nothing came in time")]
    TimedOut,
    /// It is no HTTP, or more than we take.
    #[error("{0}")]
    Bad(String),
    /// The socket failed.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl From<hyper::Error> for LineError {
    fn from(error: hyper::Error) -> Self {
        use std::error::Error;
        let cause = error.source().and_then(|cause| cause.downcast_ref());
        let is_cut = |cause: &io::Error| matches!(cause.kind(), io::ErrorKind::UnexpectedEof);
        if let Some(why) = certificates::explain(&error) {
            Self::Bad(why)
        } else if error.is_canceled() {
            Self::Unsent
        } else if error.is_incomplete_message() || error.is_closed() || cause.is_some_and(is_cut) {
            Self::Closed
        } else if error.is_parse() {
            Self::Bad(format!("this is no HTTP: {error}"))
        } else {
            let cause = error
                .source()
                .map_or_else(|| error.to_string(), ToString::to_string);
            Self::Bad(cause)
        }
    }
}

/// What was read.
struct Answer {
    status: u16,
    code: Option<String>,
    keep: bool,
    body: Bytes,
}

impl std::fmt::Debug for Client {
    // The token stays out of logs.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Client({})", self.url)
    }
}

#[derive(serde::Deserialize)]
struct Problem {
    error: ControlError,
}

impl Client {
    /// For `https://HOST:PORT`, with the files of TLS, or `http://HOST:PORT`, without. `patience`
    /// bounds each request, and each connection for itself. `tell` hears of changes of the files.
    ///
    /// # Errors
    /// [`ClientError::Url`], or the files do not fit the address or are wrong.
    pub fn open(
        url: &str,
        token: &str,
        files: Option<&ClientFiles>,
        patience: Duration,
        tell: impl Fn(Notice<'_>) + Send + Sync + 'static,
    ) -> Result<Self, ClientError> {
        let mut client = Self::new(url, token, patience)?;
        let has_tls = url.starts_with("https://");
        match files {
            None if has_tls => return Err(ClientError::NoAuthority(client.url)),
            Some(_) if !has_tls => return Err(ClientError::Plain(client.url)),
            None => {}
            Some(files) => {
                let wrong = || ClientError::Url(url.to_owned());
                let name = client.host.rsplit_once(':').map_or("", |(name, _)| name);
                let name = name.trim_start_matches('[').trim_end_matches(']');
                let name = ServerName::try_from(name.to_owned()).map_err(|_| wrong())?;
                let tls = certificates::Client::open(files, tell)?;
                client.tls = Some((Arc::new(tls), name));
            }
        }
        Ok(client)
    }

    /// For `http://HOST:PORT`. One for `https://` is as good as its address, and asks nothing: see
    /// [`Client::open`].
    ///
    /// # Errors
    /// [`ClientError::Url`].
    pub fn new(url: &str, token: &str, patience: Duration) -> Result<Self, ClientError> {
        let wrong = || ClientError::Url(url.to_owned());
        let host = url
            .strip_prefix("http://")
            .or_else(|| url.strip_prefix("https://"))
            .ok_or_else(wrong)?
            .trim_end_matches('/');
        let (name, port) = host.rsplit_once(':').ok_or_else(wrong)?;
        let plain = |c: char| c.is_ascii_graphic() && !matches!(c, '/' | '@' | '?' | '#');
        if name.is_empty()
            || !host.chars().all(plain)
            || !port.parse::<u16>().is_ok_and(|port| port > 0)
        {
            return Err(wrong());
        }
        Ok(Self {
            url: url.trim_end_matches('/').to_owned(),
            host: host.to_owned(),
            token: Token::new(token),
            tls: None,
            connecting: patience,
            patience,
            connection: None,
        })
    }

    /// Gives a connection this time until its other side has proved that it knows the token, in
    /// place of the time that a request has: a hook proves it whatever else it has to do, so one
    /// that does not is silent.
    #[must_use]
    pub fn connecting_within(mut self, limit: Duration) -> Self {
        self.connecting = limit;
        self
    }

    /// Where it asks.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    fn unreachable(&self, why: impl ToString) -> ClientError {
        ClientError::Unreachable {
            url: self.url.clone(),
            why: why.to_string(),
        }
    }

    fn reach(&self, end: Instant) -> Result<TcpStream, ClientError> {
        let addresses = self
            .host
            .to_socket_addrs()
            .map_err(|error| self.unreachable(error))?;
        let mut last = "the name has no address".to_owned();
        for address in addresses.take(4) {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            match TcpStream::connect_timeout(&address, left) {
                Ok(stream) => {
                    let _ = stream.set_nodelay(true);
                    return Ok(stream);
                }
                Err(error) => last = error.to_string(),
            }
        }
        Err(self.unreachable(last))
    }

    /// What is said over a socket: with TLS once the other side has shown a certificate that is
    /// believed.
    fn line(&self, stream: TcpStream, end: Instant) -> Result<Line, ClientError> {
        let tls = match &self.tls {
            Some((tls, name)) => {
                let config = tls.now().map_err(|why| self.unreachable(why))?;
                Some((config, name.clone()))
            }
            None if self.url.starts_with("https://") => {
                return Err(ClientError::NoAuthority(self.url.clone()));
            }
            None => None,
        };
        Line::new(stream, tls, end).map_err(|error| {
            if error.kind() == io::ErrorKind::TimedOut {
                return self.unreachable(format_args!(
                    "it does not end a handshake of TLS within {} ms",
                    self.connecting.as_millis()
                ));
            }
            if certificates::is_no_tls(&error) {
                return self.unreachable("it speaks no TLS: write http:// where it has none");
            }
            let Some(why) = certificates::explain(&error) else {
                return self.unreachable(error);
            };
            match certificates::is_refusal(&error) {
                true => self.unreachable(why),
                false => ClientError::Unproven {
                    url: self.url.clone(),
                    why,
                },
            }
        })
    }

    /// A connection whose other side has proved that it knows the token.
    fn connect(&self) -> Result<Connection, ClientError> {
        let nonce = auth::nonce().map_err(|error| self.unreachable(error))?;
        let end = Instant::now() + self.connecting;
        let stream = self.reach(end)?;
        let mut path = format!("/v1/session?nonce={nonce}");
        if let Some(node) = self.token.node() {
            path += &format!("&node={node}");
        }
        let by_files = self.changes();
        let mut line = self.line(stream, end)?;
        let answer = self
            .exchange(&mut line, "GET", &path, &[], None, end)
            .map_err(|error| match error {
                LineError::TimedOut => self.unreachable(format_args!(
                    "it does not prove within {} ms that it knows the token",
                    self.connecting.as_millis()
                )),
                // Whether our certificate is believed comes after the handshake.
                LineError::Unsent | LineError::Closed => match line.why(end) {
                    Some(why) => self.unreachable(why),
                    None => self.unreachable(LineError::Closed),
                },
                other => self.unreachable(other),
            })?;
        let stranger = || ClientError::Stranger {
            url: self.url.clone(),
        };
        if answer.status != 200 {
            // Too many connections, or no hook of this version: an unauthenticated answer.
            let why = serde_json::from_slice::<Problem>(&answer.body);
            let why = why.map_or_else(
                |_| format!("it answers with status {}", answer.status),
                |problem| problem.error.message,
            );
            return Err(self.unreachable(why));
        }
        let said: Challenge = serde_json::from_slice(&answer.body).map_err(|_| stranger())?;
        let secret = self.token.secret();
        let session = secret.accept(&nonce, &said).ok_or_else(stranger)?;
        Ok(Connection {
            line,
            by_files,
            session,
            hook: said.hook,
        })
    }

    /// How often the files have changed that say whom it believes, as they are now.
    fn changes(&self) -> u64 {
        self.tls.as_ref().map_or(0, |(tls, _)| {
            // What is wrong with them is said by who opened them.
            let _ = tls.now();
            tls.changes()
        })
    }

    /// The connection that is there. One that began by other files shows its certificate anew: it
    /// may be revoked.
    fn kept(&mut self) -> Option<Connection> {
        let kept = self.connection.take()?;
        (kept.by_files == self.changes()).then_some(kept)
    }

    /// Who answers: a hook that has proved that it knows the token.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn meet(&mut self) -> Result<HookId, ClientError> {
        let connection = match self.kept() {
            Some(connection) => connection,
            None => self.connect()?,
        };
        let hook = connection.hook.clone();
        self.connection = Some(connection);
        Ok(hook)
    }

    /// Asks and reads the answer. A kept connection that has died is made anew once: the request
    /// was not sent.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn ask<Q: Serialize, A: DeserializeOwned>(
        &mut self,
        method: &str,
        path: &str,
        body: Option<&Q>,
    ) -> Result<A, ClientError> {
        let url = self.url.clone();
        let nonsense = |why: String| ClientError::Nonsense {
            url: url.clone(),
            why,
        };
        let body = match body {
            None => Vec::new(),
            Some(body) => serde_json::to_vec(body)
                .map_err(|error| nonsense(format!("the request: {error}")))?,
        };
        let kept = self.kept();
        let mut connection = None;
        if let Some(mut kept) = kept {
            match self.say(&mut kept, method, path, &body) {
                Ok(answer) => connection = Some((kept, answer)),
                // Closed while idle; after any other error the request may have been carried out,
                // and the caller decides whether to repeat it.
                Err(LineError::Unsent) => {}
                Err(error) => return Err(self.unanswered(error)),
            }
        }
        let (connection, answer) = match connection {
            Some(both) => both,
            None => {
                let mut fresh = self.connect()?;
                let answer = self
                    .say(&mut fresh, method, path, &body)
                    .map_err(|error| self.unanswered(error))?;
                (fresh, answer)
            }
        };
        let (status, body) = (answer.status, answer.body);
        let code = answer.code.unwrap_or_default();
        if !connection.session.is_answer(status, &body, &code) {
            let why = serde_json::from_slice::<Problem>(&body);
            let why = why.map_or_else(
                |_| format!("status {status} without its code"),
                |problem| problem.error.message,
            );
            return Err(ClientError::Forged { url, why });
        }
        if answer.keep {
            self.connection = Some(connection);
        }
        if (200..300).contains(&status) {
            return serde_json::from_slice(&body).map_err(|error| nonsense(error.to_string()));
        }
        match serde_json::from_slice::<Problem>(&body) {
            Ok(Problem { error }) => Err(ClientError::Refused { status, error }),
            Err(_) => Err(nonsense(format!("status {status} without a reason"))),
        }
    }

    fn say(
        &self,
        connection: &mut Connection,
        method: &str,
        path: &str,
        body: &[u8],
    ) -> Result<Answer, LineError> {
        let signature = connection.session.sign(method, path, body);
        let field = format!("{SCHEME} {signature}");
        let end = Instant::now() + self.patience;
        self.exchange(&mut connection.line, method, path, body, Some(&field), end)
    }

    /// Why a request had no answer.
    fn unanswered(&self, error: LineError) -> ClientError {
        match error {
            LineError::TimedOut => self.unreachable(format_args!(
                "nothing came within {} ms",
                self.patience.as_millis()
            )),
            other => self.unreachable(other),
        }
    }

    fn exchange(
        &self,
        line: &mut Line,
        method: &str,
        path: &str,
        body: &[u8],
        authorization: Option<&str>,
        end: Instant,
    ) -> Result<Answer, LineError> {
        let mut request = Request::builder()
            .method(method)
            .uri(path)
            .header(HOST, &self.host)
            .header(CONTENT_TYPE, "application/json")
            .header(CONTENT_LENGTH, body.len());
        if let Some(authorization) = authorization {
            request = request.header(AUTHORIZATION, authorization);
        }
        let request = request
            .body(Full::from(body.to_vec()))
            .map_err(|error| LineError::Bad(error.to_string()))?;
        line.ask(request, end)
    }
}

impl Line {
    fn new(
        stream: TcpStream,
        tls: Option<(Arc<rustls::ClientConfig>, ServerName<'static>)>,
        end: Instant,
    ) -> io::Result<Self> {
        let runtime = Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()?;
        stream.set_nonblocking(true)?;
        let (requests, driver) = runtime.block_on(async {
            let stream = tokio::net::TcpStream::from_std(stream)?;
            let stream: Stream = match tls {
                None => Box::new(stream),
                Some((config, name)) => {
                    let shaken = secure::connect(stream, config, name);
                    let expired = |_| io::Error::from(io::ErrorKind::TimedOut);
                    timeout_at(end.into(), shaken).await.map_err(expired)??
                }
            };
            let (requests, connection) = http1::Builder::new()
                .title_case_headers(true)
                .max_headers(MAX_FIELDS)
                .max_buf_size(MAX_HEAD_BYTES)
                .handshake(TokioIo::new(stream))
                .await
                .map_err(io::Error::other)?;
            // Its errors are those of the requests; what TLS has to say is kept.
            let driver = tokio::spawn(async move {
                let error = connection.await.err()?;
                certificates::explain(&error)
            });
            Ok::<_, io::Error>((requests, driver))
        })?;
        Ok(Self {
            requests,
            driver,
            runtime,
        })
    }

    /// What TLS had to say to its end.
    fn why(&mut self, end: Instant) -> Option<String> {
        let Self {
            driver, runtime, ..
        } = self;
        let ended = runtime.block_on(async { timeout_at(end.into(), driver).await });
        ended.ok()?.ok()?
    }

    /// The answer may take until `end`, its body included.
    fn ask(&mut self, request: Request<Full<Bytes>>, end: Instant) -> Result<Answer, LineError> {
        let Self {
            requests, runtime, ..
        } = self;
        let expired = |_| LineError::TimedOut;
        runtime.block_on(async {
            // What has come meanwhile is seen first: a connection that was closed is sent nothing.
            yield_now().await;
            let answer = async {
                requests.ready().await.map_err(|_| LineError::Unsent)?;
                Ok::<_, LineError>(requests.send_request(request).await?)
            };
            let answer = timeout_at(end.into(), answer).await.map_err(expired)??;
            let (head, body) = answer.into_parts();
            let code = head.headers.get(CODE_FIELD);
            let code = code.and_then(|code| Some(code.to_str().ok()?.to_owned()));
            let body = Limited::new(body, MAX_BODY_BYTES).collect();
            let body = timeout_at(end.into(), body).await.map_err(expired)?;
            let body = body.map_err(|error| LineError::Bad(error.to_string()))?;
            Ok(Answer {
                status: head.status.as_u16(),
                code,
                keep: stays(head.version, &head.headers),
                body: body.to_bytes(),
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nonsense_is_no_address() {
        let good = |url| Client::new(url, "token", Duration::from_secs(1)).is_ok();
        assert!(
            good("http://127.0.0.1:7077") && good("http://[::1]:7077/") && good("http://head:80")
        );
        assert!(good("https://a:1"));
        for bad in [
            "127.0.0.1:7077",
            "https://a",
            "ftp://a:1",
            "http://a",
            "http://:1",
            "http://a:0",
            "http://a:1/x",
            "http://u@a:1",
            "http://a b:1",
        ] {
            assert!(!good(bad), "{bad}");
        }
    }
}
