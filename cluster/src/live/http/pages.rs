//! Pages that everybody who reaches the listener may read: no sessions, and no bodies. Bounds and
//! deadlines are the [`server`]'s: every connection stays pending, is answered once and closed.

use std::io;
use std::net::{IpAddr, TcpListener};
use std::sync::Arc;
use std::time::Instant;

use axum::Router;
use axum::extract::Request;
use axum::response::IntoResponse;
use hyper::header;
use tokio::task::spawn_blocking;

use super::server::{self, MediaType, Response, Site, problem};
use crate::live::auth::Secret;
use crate::live::wire::HookId;

/// A request for a page.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Question {
    /// `GET`, ...
    pub method: String,
    /// Without its query.
    pub path: String,
    /// What the reader takes, as it says; several fields by comma.
    pub accept: String,
    /// When it came.
    pub came: Instant,
}

/// A page.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Page {
    /// Status.
    pub status: u16,
    /// Its `Content-Type`.
    pub media: &'static str,
    /// Its text.
    pub text: String,
}

/// Nobody proves anything here.
struct Open;

impl Site for Open {
    fn proof(&self) -> Option<(&Secret, &HookId)> {
        None
    }

    fn is_open(&self, _method: &str, _path: &str) -> bool {
        true
    }

    fn body_limit(&self, _method: &str, _path: &str) -> usize {
        0
    }

    fn turned_away(&self, _from: IpAddr, _why: Option<&str>) {}
}

/// Serve until the process ends. `page` may wait: it runs on a thread of its own, eight at a time.
/// Returns only if the listener is broken.
///
/// # Errors
/// The listener's.
pub fn serve(
    listener: &TcpListener,
    page: impl Fn(&Question) -> Page + Send + Sync + 'static,
) -> io::Error {
    let page = Arc::new(page);
    let routes = Router::new().fallback(move |request: Request| {
        let question = question(&request);
        let page = Arc::clone(&page);
        async move {
            let Ok(made) = spawn_blocking(move || page(&question)).await else {
                let said = problem(500, "this page cannot be made; its log says why");
                return said.into_response();
            };
            let said = Response {
                status: made.status,
                body: made.text.into_bytes(),
            };
            let mut answer = said.into_response();
            answer.extensions_mut().insert(MediaType(made.media));
            answer
        }
    });
    server::serve(listener, Arc::new(Open), routes)
}

fn question(request: &Request) -> Question {
    let fields = request.headers().get_all(header::ACCEPT).iter();
    let accept: Vec<&str> = fields.filter_map(|value| value.to_str().ok()).collect();
    Question {
        method: request.method().as_str().to_owned(),
        path: request.uri().path().to_owned(),
        accept: accept.join(","),
        came: Instant::now(),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{SocketAddr, TcpStream};
    use std::time::Duration;

    use super::*;

    fn served(page: impl Fn(&Question) -> Page + Send + Sync + 'static) -> SocketAddr {
        let (listener, address) = server::listen("127.0.0.1:0".parse().unwrap()).unwrap();
        std::thread::spawn(move || serve(&listener, page));
        address
    }

    /// What is answered to these bytes, up to the end of the connection.
    fn ask(address: SocketAddr, bytes: &str) -> String {
        let mut stream = TcpStream::connect(address).unwrap();
        let limit = Some(Duration::from_secs(60));
        stream.set_read_timeout(limit).unwrap();
        stream.write_all(bytes.as_bytes()).unwrap();
        let mut text = String::new();
        let _ = stream.read_to_string(&mut text);
        text
    }

    fn echo(question: &Question) -> Page {
        Page {
            status: if question.path == "/" { 200 } else { 404 },
            media: "text/plain; charset=utf-8",
            text: format!("{} {} {}", question.method, question.path, question.accept),
        }
    }

    #[test]
    fn every_path_is_answered_once_with_its_own_media_type() {
        let address = served(echo);
        let text = ask(
            address,
            "GET /?a=b HTTP/1.1\r\nAccept: text/plain\r\nAccept: a/b;q=0.5\r\n\r\n",
        );
        assert!(text.starts_with("HTTP/1.1 200 "), "{text}");
        assert!(
            text.contains("Content-Type: text/plain; charset=utf-8\r\n"),
            "{text}"
        );
        assert!(text.contains("Connection: close\r\n"), "{text}");
        assert!(
            text.ends_with("\r\n\r\nGET / text/plain,a/b;q=0.5"),
            "{text}"
        );
        // Also where sessions begin elsewhere.
        for path in ["/v1/session", "/v1/session?nonce=0", "/other"] {
            let text = ask(address, &format!("GET {path} HTTP/1.1\r\n\r\n"));
            assert!(text.starts_with("HTTP/1.1 404 "), "{path}: {text}");
        }
    }

    #[test]
    fn head_is_answered_without_a_body_and_large_messages_are_refused() {
        let address = served(echo);
        let text = ask(address, "HEAD / HTTP/1.1\r\n\r\n");
        assert!(text.starts_with("HTTP/1.1 200 "), "{text}");
        assert!(text.ends_with("\r\n\r\n"), "{text}");
        let large = format!("GET / HTTP/1.1\r\nX: {}", "x".repeat(20 << 10));
        let text = ask(address, &large);
        assert!(
            text.is_empty() || text.starts_with("HTTP/1.1 431 "),
            "{text}"
        );
        let text = ask(
            address,
            "POST / HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n",
        );
        assert!(text.starts_with("HTTP/1.1 413 "), "{text}");
    }

    #[test]
    fn a_page_that_cannot_be_made_costs_nobody_else_theirs() {
        let address = served(|question| {
            assert_ne!(question.path, "/broken", "a test's panic");
            echo(question)
        });
        let text = ask(address, "GET /broken HTTP/1.1\r\n\r\n");
        assert!(text.starts_with("HTTP/1.1 500 "), "{text}");
        let text = ask(address, "GET / HTTP/1.1\r\n\r\n");
        assert!(text.starts_with("HTTP/1.1 200 "), "{text}");
    }
}
