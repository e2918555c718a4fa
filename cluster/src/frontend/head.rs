//! Heads of requests and answers: what is passed on, and what is about one connection alone.

use http_body_util::Full;
use hyper::body::Bytes;
use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use hyper::http::request::Parts;
use hyper::{Method, Request, Uri};

/// Fields that are about one connection (RFC 9110, 7.6.1).
pub fn forget_connection(fields: &mut HeaderMap) {
    let named: Vec<HeaderName> = fields
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    for name in named {
        fields.remove(name);
    }
    for name in [
        header::CONNECTION,
        header::PROXY_AUTHENTICATE,
        header::PROXY_AUTHORIZATION,
        header::TE,
        header::TRAILER,
        header::TRANSFER_ENCODING,
        header::UPGRADE,
    ] {
        fields.remove(name);
    }
    for name in ["keep-alive", "proxy-connection"] {
        fields.remove(name);
    }
}

/// A request as an instance gets it.
pub struct Asking {
    /// As the client said it.
    pub method: Method,
    uri: Uri,
    fields: HeaderMap,
    body: Bytes,
}

impl Asking {
    /// Of what a client has sent.
    pub fn new(head: Parts, body: Bytes) -> Self {
        let mut fields = head.headers;
        forget_connection(&mut fields);
        // It is here whole, and its length is known.
        fields.remove(header::EXPECT);
        fields.remove(header::CONTENT_LENGTH);
        fields.insert(header::CONNECTION, HeaderValue::from_static("close"));
        // HTTP/1.0 does without.
        let nobody = HeaderValue::from_static("localhost");
        fields.entry(header::HOST).or_insert(nobody);
        let path = head.uri.path_and_query().cloned();
        Self {
            method: head.method,
            uri: path.map_or_else(|| Uri::from_static("/"), Uri::from),
            fields,
            body,
        }
    }

    /// Once more, for another instance.
    pub fn request(&self) -> Request<Full<Bytes>> {
        let mut request = Request::new(Full::from(self.body.clone()));
        *request.method_mut() = self.method.clone();
        *request.uri_mut() = self.uri.clone();
        *request.headers_mut() = self.fields.clone();
        if !self.body.is_empty() || matches!(self.method, Method::POST | Method::PUT) {
            let length = HeaderValue::from(self.body.len());
            request.headers_mut().insert(header::CONTENT_LENGTH, length);
        }
        request
    }
}
