//! HTTP over a socket, as far as tests ask: one connection, one request after the other, what came
//! back as it came.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;

use crate::within::PATIENCE;

/// A connection.
#[derive(Debug)]
pub struct Http<S: Read = UnixStream> {
    stream: BufReader<S>,
    token: Option<String>,
}

/// What was answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    pub status: u16,
    /// The lines of the head, the first one left out.
    pub head: Vec<String>,
    pub body: String,
}

impl Answer {
    /// The value of a field of the head.
    pub fn field(&self, name: &str) -> Option<&str> {
        self.head.iter().find_map(|line| {
            let (own, value) = line.split_once(':')?;
            own.eq_ignore_ascii_case(name).then(|| value.trim())
        })
    }
}

impl Http {
    /// # Errors
    /// Nobody listens, or not for us.
    pub fn connect(path: &Path) -> io::Result<Self> {
        let stream = UnixStream::connect(path)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(Self::over(stream))
    }

    /// The socket.
    pub fn socket(&self) -> &UnixStream {
        self.stream.get_ref()
    }
}

impl Http<TcpStream> {
    /// # Errors
    /// Nobody listens.
    pub fn connect_tcp(address: &str) -> io::Result<Self> {
        let stream = TcpStream::connect(address)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(Self::over(stream))
    }
}

impl<S: Read + Write> Http<S> {
    /// Over something that is connected.
    pub fn over(stream: S) -> Self {
        Self {
            stream: BufReader::new(stream),
            token: None,
        }
    }

    /// Shows a token with each request from here on.
    #[must_use]
    pub fn with_token(mut self, token: &str) -> Self {
        self.token = Some(token.into());
        self
    }

    /// Sends bytes as they are.
    ///
    /// # Errors
    /// The other side does not take them.
    pub fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.get_mut().write_all(bytes)
    }

    /// Asks and waits for the answer.
    ///
    /// # Errors
    /// The connection ends before, or what comes is no HTTP.
    pub fn ask(&mut self, method: &str, path: &str, body: Option<&str>) -> io::Result<Answer> {
        let mut request = format!("{method} {path} HTTP/1.1\r\nhost: localhost\r\n");
        if let Some(token) = &self.token {
            request += &format!("authorization: Bearer {token}\r\n");
        }
        if let Some(body) = body {
            request += "content-type: application/json\r\n";
            request += &format!("content-length: {}\r\n\r\n{body}", body.len());
        } else {
            request += "\r\n";
        }
        self.send(request.as_bytes())?;
        self.answer()
    }

    /// The head of the next answer; its body is empty.
    ///
    /// # Errors
    /// As [`ask`](Self::ask).
    pub fn head(&mut self) -> io::Result<Answer> {
        let first = self.line()?;
        let status = first.split(' ').nth(1).and_then(|word| word.parse().ok());
        let wrong = || io::Error::new(io::ErrorKind::InvalidData, format!("no HTTP: {first}"));
        let status = status.ok_or_else(wrong)?;
        let mut head = Vec::new();
        loop {
            let line = self.line()?;
            if line.is_empty() {
                let body = String::new();
                return Ok(Answer { status, head, body });
            }
            head.push(line);
        }
    }

    /// The next answer.
    ///
    /// # Errors
    /// As [`ask`](Self::ask).
    pub fn answer(&mut self) -> io::Result<Answer> {
        let mut answer = self.head()?;
        let mut body = Vec::new();
        if let Some(length) = answer.field("content-length") {
            let length = length.parse().map_err(io::Error::other)?;
            body.resize(length, 0);
            self.stream.read_exact(&mut body)?;
        } else if answer.field("transfer-encoding") == Some("chunked") {
            loop {
                let size = usize::from_str_radix(&self.line()?, 16).map_err(io::Error::other)?;
                let mut chunk = vec![0; size + 2];
                self.stream.read_exact(&mut chunk)?;
                if size == 0 {
                    break;
                }
                body.extend_from_slice(&chunk[..size]);
            }
        }
        answer.body = String::from_utf8(body).map_err(io::Error::other)?;
        Ok(answer)
    }

    /// The next line, without its end.
    ///
    /// # Errors
    /// The connection ends before it does.
    pub fn line(&mut self) -> io::Result<String> {
        let mut line = String::new();
        if self.stream.read_line(&mut line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(line.trim_end_matches(['\r', '\n']).to_owned())
    }
}
