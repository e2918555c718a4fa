//! The asking side: one request after the other over one connection, every wait with a deadline.

use std::net::{TcpStream, ToSocketAddrs};
use std::time::Duration;

use control::ControlError;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{First, HttpError, Timed};

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
    /// It says no.
    #[error("{error}")]
    Refused {
        /// Status.
        status: u16,
        /// Its words.
        error: ControlError,
    },
    /// It talks nonsense.
    #[error("the answer of {url} makes no sense: {why}")]
    Nonsense {
        /// Where.
        url: String,
        /// Why.
        why: String,
    },
}

impl ClientError {
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
    token: Option<String>,
    patience: Duration,
    stream: Option<Timed>,
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
    pub fn new(url: &str, token: Option<String>, patience: Duration) -> Result<Self, ClientError> {
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
            token,
            patience,
            stream: None,
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

    fn connect(&self) -> Result<Timed, ClientError> {
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

    /// Asks and reads the answer. A connection that was kept and is dead by now is made anew once: the request then was not read.
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
        let token = self.token.as_ref().map_or_else(String::new, |token| {
            format!("Authorization: Bearer {token}\r\n")
        });
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n{token}\r\n",
            self.host,
            body.len()
        );
        let bytes = [head.as_bytes(), &body].concat();
        let kept = self.stream.take();
        let message = match kept.map(|stream| self.talk(stream, &bytes)) {
            Some(Ok(answer)) => answer,
            // Closed while nothing was under way; anything else may have been carried out and is the caller's to repeat.
            Some(Err(HttpError::Closed)) | None => {
                let stream = self.connect()?;
                self.talk(stream, &bytes)
                    .map_err(|error| self.unreachable(error))?
            }
            Some(Err(error)) => return Err(self.unreachable(error)),
        };
        let (status, body) = message;
        if (200..300).contains(&status) {
            return serde_json::from_slice(&body).map_err(|error| nonsense(error.to_string()));
        }
        match serde_json::from_slice::<Problem>(&body) {
            Ok(Problem { error }) => Err(ClientError::Refused { status, error }),
            Err(_) => Err(nonsense(format!("status {status} without a reason"))),
        }
    }

    fn talk(&mut self, mut stream: Timed, bytes: &[u8]) -> Result<(u16, Vec<u8>), HttpError> {
        stream
            .write(bytes, self.patience)
            .map_err(|error| match error {
                HttpError::Io(error) if error.kind() == std::io::ErrorKind::BrokenPipe => {
                    HttpError::Closed
                }
                error => error,
            })?;
        let message = stream.read(false, self.patience, self.patience)?;
        let First::Response { status } = message.first else {
            return Err(HttpError::Bad(0, "no response".into()));
        };
        if message.keep {
            self.stream = Some(stream);
        }
        Ok((status, message.body))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_told_from_nonsense() {
        let good = |url| Client::new(url, None, Duration::from_secs(1)).is_ok();
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
