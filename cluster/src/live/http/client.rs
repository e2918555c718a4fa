//! The client: one request after the other over one connection, every wait with a deadline.
//!
//! It asks nothing before the other side has proved that it knows the token, and accepts no answer
//! but the hook's to this request ([`auth`]).

use std::net::{TcpStream, ToSocketAddrs};
use std::time::Duration;

use control::ControlError;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{First, HttpError, SCHEME, Timed};
use crate::live::auth::{self, Challenge, Secret, Session};
use crate::live::wire::HookId;

/// Why there is no answer, or what the answer was.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The URL is none.
    #[error("`{0}` is no address of a hook: write http://HOST:PORT")]
    Url(String),
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
        matches!(self, Self::Stranger { .. } | Self::Forged { .. })
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
    secret: Secret,
    patience: Duration,
    connection: Option<Connection>,
}

/// A connection to one that knows the token.
struct Connection {
    stream: Timed,
    session: Session,
    hook: HookId,
}

/// What was read.
struct Answer {
    status: u16,
    code: Option<String>,
    keep: bool,
    body: Vec<u8>,
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
    /// For `http://HOST:PORT`. `patience` bounds each request.
    ///
    /// # Errors
    /// [`ClientError::Url`].
    pub fn new(url: &str, token: &str, patience: Duration) -> Result<Self, ClientError> {
        let wrong = || ClientError::Url(url.to_owned());
        let host = url
            .strip_prefix("http://")
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
            secret: Secret::new(token),
            patience,
            connection: None,
        })
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

    fn reach(&self) -> Result<Timed, ClientError> {
        let addresses = self
            .host
            .to_socket_addrs()
            .map_err(|error| self.unreachable(error))?;
        let mut last = "the name has no address".to_owned();
        for address in addresses.take(4) {
            match TcpStream::connect_timeout(&address, self.patience) {
                Ok(stream) => {
                    let _ = stream.set_nodelay(true);
                    return Ok(Timed::new(stream));
                }
                Err(error) => last = error.to_string(),
            }
        }
        Err(self.unreachable(last))
    }

    /// A connection whose other side has proved that it knows the token.
    fn connect(&self) -> Result<Connection, ClientError> {
        let nonce = auth::nonce().map_err(|error| self.unreachable(error))?;
        let mut stream = self.reach()?;
        let path = format!("/v1/session?nonce={nonce}");
        let answer = self
            .exchange(&mut stream, &self.head("GET", &path, 0, ""))
            .map_err(|error| self.unreachable(error))?;
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
        let session = self.secret.accept(&nonce, &said).ok_or_else(stranger)?;
        Ok(Connection {
            stream,
            session,
            hook: said.hook,
        })
    }

    /// Who answers: a hook that has proved that it knows the token.
    ///
    /// # Errors
    /// [`ClientError`].
    pub fn meet(&mut self) -> Result<HookId, ClientError> {
        let connection = match self.connection.take() {
            Some(connection) => connection,
            None => self.connect()?,
        };
        let hook = connection.hook.clone();
        self.connection = Some(connection);
        Ok(hook)
    }

    fn head(&self, method: &str, path: &str, length: usize, more: &str) -> Vec<u8> {
        format!(
            "{method} {path} HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n{more}\r\n",
            self.host
        )
        .into_bytes()
    }

    /// Asks and reads the answer. A kept connection that has died is made anew once: the request
    /// was not read.
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
        let kept = self.connection.take();
        let mut connection = None;
        if let Some(mut kept) = kept {
            match self.say(&mut kept, method, path, &body) {
                Ok(answer) => connection = Some((kept, answer)),
                // Closed while idle; after any other error the request may have been carried out,
                // and the caller decides whether to repeat it.
                Err(HttpError::Closed) => {}
                Err(error) => return Err(self.unreachable(error)),
            }
        }
        let (connection, answer) = match connection {
            Some(both) => both,
            None => {
                let mut fresh = self.connect()?;
                let answer = self
                    .say(&mut fresh, method, path, &body)
                    .map_err(|error| self.unreachable(error))?;
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
    ) -> Result<Answer, HttpError> {
        let signature = connection.session.sign(method, path, body);
        let field = format!("Authorization: {SCHEME} {signature}\r\n");
        let head = self.head(method, path, body.len(), &field);
        self.exchange(&mut connection.stream, &[&head, body].concat())
    }

    fn exchange(&self, stream: &mut Timed, bytes: &[u8]) -> Result<Answer, HttpError> {
        stream
            .write(bytes, self.patience)
            .map_err(|error| match error {
                HttpError::Io(error) if error.kind() == std::io::ErrorKind::BrokenPipe => {
                    HttpError::Closed
                }
                error => error,
            })?;
        let head = stream.head(false, self.patience, self.patience)?;
        let First::Response { status } = head.first else {
            return Err(HttpError::Bad(0, "no response".into()));
        };
        Ok(Answer {
            status,
            code: head.code,
            keep: head.keep,
            body: stream.body(head.length, self.patience)?,
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
        for bad in [
            "127.0.0.1:7077",
            "https://a:1",
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
