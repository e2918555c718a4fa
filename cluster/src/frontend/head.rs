//! Heads of requests and answers: what is passed on, what is about one connection alone, and what
//! would mean something else to the one who gets it.

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use hyper::http::request::Parts;
use hyper::http::uri::Authority;
use hyper::{Method, Request, Response, StatusCode, Uri, Version};

/// Fields that are about one connection (RFC 9110, 7.6.1). What says whom a message is for and how
/// long it is, is for everybody, whatever a `Connection` names.
pub fn forget_connection(fields: &mut HeaderMap) {
    let is_for_all = |name: &HeaderName| matches!(*name, header::HOST | header::CONTENT_LENGTH);
    let named: Vec<HeaderName> = fields
        .get_all(header::CONNECTION)
        .iter()
        .flat_map(|value| value.as_bytes().split(|byte| *byte == b','))
        .filter_map(|name| HeaderName::from_bytes(name.trim_ascii()).ok())
        .filter(|name| !is_for_all(name))
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

/// Whether a body was sent in some other coding than chunks, which nobody here undoes.
fn is_coded(fields: &HeaderMap) -> bool {
    let mut codings = fields.get_all(header::TRANSFER_ENCODING).iter();
    let is_chunked = |value: &HeaderValue| value.as_bytes().eq_ignore_ascii_case(b"chunked");
    codings.next().is_some_and(|first| !is_chunked(first)) || codings.next().is_some()
}

/// What is wrong with a request, before its body is read.
///
/// # Errors
/// A status, and why.
pub fn check(head: &Parts, pseudonym: &str) -> Result<(), (StatusCode, &'static str)> {
    let bad = |why| Err((StatusCode::BAD_REQUEST, why));
    if head.method == Method::CONNECT {
        let why = "this is no proxy for CONNECT";
        return Err((StatusCode::METHOD_NOT_ALLOWED, why));
    }
    let is_absolute = head.uri.scheme().is_some();
    if head.uri.authority().is_some() && !is_absolute {
        return bad("the target is no path: it begins with `/`");
    }
    let mut hosts = head.headers.get_all(header::HOST).iter();
    match (hosts.next(), hosts.next()) {
        (_, Some(_)) => return bad("two Host fields: one says whom the request is for"),
        (None, _) if head.version > Version::HTTP_10 => return bad("a Host field is missing"),
        (Some(host), None) if !host.is_empty() => {
            let read = Authority::try_from(host.as_bytes());
            if read.is_err() || host.as_bytes().contains(&b'@') {
                return bad("its Host field is no host");
            }
        }
        _ => {}
    }
    if is_coded(&head.headers) {
        let why = "a Transfer-Encoding other than `chunked` is not read here";
        return Err((StatusCode::NOT_IMPLEMENTED, why));
    }
    let passed = head.headers.get_all(header::VIA).iter();
    let is_here = |via: &HeaderValue| {
        let all = via.as_bytes().windows(pseudonym.len());
        !pseudonym.is_empty() && all.into_iter().any(|part| part == pseudonym.as_bytes())
    };
    if passed.into_iter().any(is_here) {
        let why = "the request has been here before: an --instance is this frontend, or one that \
                   has this one as an instance";
        return Err((StatusCode::LOOP_DETECTED, why));
    }
    Ok(())
}

/// Makes of an answer's head what a client gets.
///
/// # Errors
/// Why it cannot be passed on.
pub fn pass_on(response: &mut Response<Incoming>) -> Result<(), String> {
    let status = response.status();
    if status.is_informational() {
        return Err(format!("it answered {status}, which nobody asked for"));
    }
    let fields = response.headers_mut();
    if is_coded(fields) {
        return Err("its Transfer-Encoding is other than `chunked`".into());
    }
    // Chunks count where there are both (RFC 9112, 6.3); the others have no body to have a length.
    let has_no_length = matches!(status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED);
    if has_no_length || fields.contains_key(header::TRANSFER_ENCODING) {
        fields.remove(header::CONTENT_LENGTH);
    }
    forget_connection(fields);
    *response.version_mut() = Version::HTTP_11;
    Ok(())
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
    /// Of what a client has sent, by one of this pseudonym (RFC 9110, 7.6.3).
    pub fn new(head: Parts, body: Bytes, pseudonym: &str) -> Self {
        let mut fields = head.headers;
        forget_connection(&mut fields);
        // It is here whole, and its length is known.
        fields.remove(header::EXPECT);
        fields.remove(header::CONTENT_LENGTH);
        fields.insert(header::CONNECTION, HeaderValue::from_static("close"));
        // Whom the target names, it is for (RFC 9112, 3.2.2). HTTP/1.0 does without.
        let named = head.uri.authority().map(|named| {
            let named = named.as_str();
            named.rsplit_once('@').map_or(named, |(_, host)| host)
        });
        if let Some(named) = named.and_then(|named| HeaderValue::from_str(named).ok()) {
            fields.insert(header::HOST, named);
        }
        let nobody = HeaderValue::from_static("localhost");
        fields.entry(header::HOST).or_insert(nobody);
        let version = match head.version {
            Version::HTTP_10 => "1.0",
            _ => "1.1",
        };
        if let Ok(via) = HeaderValue::from_str(&format!("{version} {pseudonym}")) {
            fields.append(header::VIA, via);
        }
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
