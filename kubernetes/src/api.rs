//! The cluster's API server: questions in JSON, with the account that a pod is given.
//!
//! Blocking, with a deadline for each question and a bound on each answer. Nothing is cached: who
//! asks decides how old an answer may be.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde_json::Value;
use ureq::Agent;
use ureq::tls::{Certificate, PemItem, RootCerts, TlsConfig, parse_pem};

/// Where a pod finds its account.
pub const ACCOUNT_DIR: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
/// TIMEOUT: a kubelet gives a plugin up after a minute and tries again; a question of ours is one
/// of several in that time.
const PATIENCE: Duration = Duration::from_secs(10);
/// Longest answer: pods of a large cluster, in pages.
const LONGEST: u64 = 32 << 20;
/// Most pages of a list, of 500 objects each.
const MOST_PAGES: usize = 1000;
/// Longest reason that is passed on.
const REASON_CHARS: usize = 300;

/// Why the API server did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    #[error("the API server at {server} does not answer: {error}")]
    Away { server: String, error: String },
    #[error("the API server knows no {path}")]
    NotFound { path: String },
    #[error("the API server answered {status} to {path}: {reason}")]
    Refused {
        path: String,
        status: u16,
        reason: String,
    },
    #[error("{}: {error} (the account of this pod; see --api-token-file, --api-ca)", .path.display())]
    Account { path: PathBuf, error: io::Error },
    #[error(
        "the API server at {0} would be shown the account's token in clear: give its https:// URL"
    )]
    InClear(String),
    #[error("the certificate in {} cannot be read: {error}", .path.display())]
    Certificate { path: PathBuf, error: String },
}

/// The API server.
#[derive(Debug, Clone)]
pub struct Api {
    agent: Agent,
    server: String,
    /// Read at each question: it is replaced every hour.
    token_file: Option<PathBuf>,
    /// When those who wait for an answer give up.
    end: Option<Instant>,
}

/// How a body changes what is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Patch {
    /// Fields of a map are replaced one by one (RFC 7386).
    Merge,
    /// The server keeps who has set which field.
    Apply,
}

impl Api {
    /// The server at a URL, known by the certificates in a file.
    ///
    /// # Errors
    /// The file cannot be read, or a token would travel in clear.
    pub fn new(
        server: &str,
        token_file: Option<PathBuf>,
        ca_file: Option<&Path>,
    ) -> Result<Self, ApiError> {
        if token_file.is_some() && !is_private(server) {
            return Err(ApiError::InClear(server.to_owned()));
        }
        let mut roots = Vec::new();
        if let Some(path) = ca_file {
            let pem = fs::read(path).map_err(|error| ApiError::Account {
                path: path.to_owned(),
                error,
            })?;
            let bad = |error: String| ApiError::Certificate {
                path: path.to_owned(),
                error,
            };
            for item in parse_pem(&pem) {
                if let PemItem::Certificate(certificate) =
                    item.map_err(|error| bad(error.to_string()))?
                {
                    roots.push(certificate);
                }
            }
            if roots.is_empty() {
                return Err(bad("there is none in it".into()));
            }
        }
        let roots: Vec<Certificate<'static>> = roots;
        let tls = TlsConfig::builder().root_certs(RootCerts::new_with_certs(&roots));
        let config = Agent::config_builder()
            .tls_config(tls.build())
            .http_status_as_error(false)
            .max_redirects(0)
            .timeout_global(Some(PATIENCE))
            .proxy(None)
            .build();
        Ok(Self {
            agent: config.new_agent(),
            server: server.trim_end_matches('/').to_owned(),
            token_file,
            end: None,
        })
    }

    /// The same server, for questions that are all answered by then, or have failed.
    #[must_use]
    pub fn until(&self, end: Instant) -> Self {
        Self {
            end: Some(end),
            ..self.clone()
        }
    }

    /// The server and the account of the pod that this runs in.
    ///
    /// # Errors
    /// This runs in none, or its account cannot be read.
    pub fn of_this_pod(var: impl Fn(&str) -> Option<String>) -> Result<Option<Self>, ApiError> {
        let (Some(host), Some(port)) = (
            var("KUBERNETES_SERVICE_HOST"),
            var("KUBERNETES_SERVICE_PORT"),
        ) else {
            return Ok(None);
        };
        let host = if host.contains(':') {
            format!("[{host}]")
        } else {
            host
        };
        let account = Path::new(ACCOUNT_DIR);
        let server = format!("https://{host}:{port}");
        Self::new(
            &server,
            Some(account.join("token")),
            Some(&account.join("ca.crt")),
        )
        .map(Some)
    }

    /// What is at a path; `None`: nothing.
    ///
    /// # Errors
    /// [`ApiError`]
    pub fn get(&self, path: &str) -> Result<Option<Value>, ApiError> {
        let request = self.agent.get(self.url(path));
        let sent = self.authorised(request)?.call();
        match self.answer(path, sent) {
            Err(ApiError::NotFound { .. }) => Ok(None),
            answer => answer.map(Some),
        }
    }

    /// What is at a path, read; `None`: nothing.
    ///
    /// # Errors
    /// [`ApiError`], also where it is something else.
    pub fn read<T: DeserializeOwned>(&self, path: &str) -> Result<Option<T>, ApiError> {
        let Some(value) = self.get(path)? else {
            return Ok(None);
        };
        let read = serde_json::from_value(value).map_err(|error| ApiError::Away {
            server: self.server.clone(),
            error: format!("{path} cannot be read: {error}"),
        });
        read.map(Some)
    }

    /// All that a path lists, in pages; `query` begins with `&`.
    ///
    /// # Errors
    /// [`ApiError`]
    pub fn list<T: DeserializeOwned>(&self, path: &str, query: &str) -> Result<Vec<T>, ApiError> {
        #[derive(serde::Deserialize)]
        #[serde(bound = "T: DeserializeOwned", default)]
        struct Page<T> {
            metadata: PageMetadata,
            items: Vec<T>,
        }
        #[derive(serde::Deserialize, Default)]
        #[serde(default)]
        struct PageMetadata {
            r#continue: String,
        }
        impl<T> Default for Page<T> {
            fn default() -> Self {
                Self {
                    metadata: PageMetadata::default(),
                    items: Vec::new(),
                }
            }
        }
        let mut all = Vec::new();
        let mut next = String::new();
        for _ in 0..MOST_PAGES {
            let from = match next.as_str() {
                "" => String::new(),
                token => format!("&continue={}", escaped(token)),
            };
            let request = self
                .agent
                .get(self.url(&format!("{path}?limit=500{query}{from}")));
            let sent = self.authorised(request)?.call();
            let page: Page<T> =
                serde_json::from_value(self.answer(path, sent)?).map_err(|error| {
                    ApiError::Away {
                        server: self.server.clone(),
                        error: format!("{path} is no list: {error}"),
                    }
                })?;
            all.extend(page.items);
            if page.metadata.r#continue.is_empty() {
                return Ok(all);
            }
            next = page.metadata.r#continue;
        }
        Err(ApiError::Away {
            server: self.server.clone(),
            error: format!("{path} does not end after {MOST_PAGES} pages"),
        })
    }

    /// Makes something below a path.
    ///
    /// # Errors
    /// [`ApiError`]
    pub fn post(&self, path: &str, body: &Value) -> Result<Value, ApiError> {
        let request = self.agent.post(self.url(path));
        let request = self.authorised(request)?;
        let sent = request
            .content_type("application/json")
            .send(body.to_string());
        self.answer(path, sent)
    }

    /// Replaces what is at a path.
    ///
    /// # Errors
    /// [`ApiError`]
    pub fn put(&self, path: &str, body: &Value) -> Result<Value, ApiError> {
        let request = self.agent.put(self.url(path));
        let request = self.authorised(request)?;
        let sent = request
            .content_type("application/json")
            .send(body.to_string());
        self.answer(path, sent)
    }

    /// Changes what is at a path.
    ///
    /// # Errors
    /// [`ApiError`]
    pub fn patch(&self, path: &str, how: Patch, body: &Value) -> Result<Value, ApiError> {
        let (media, query) = match how {
            Patch::Merge => ("application/merge-patch+json", ""),
            // JSON is YAML.
            Patch::Apply => (
                "application/apply-patch+yaml",
                "?fieldManager=sublet.dev&force=true",
            ),
        };
        let request = self.agent.patch(self.url(&format!("{path}{query}")));
        let sent = self
            .authorised(request)?
            .content_type(media)
            .send(body.to_string());
        self.answer(path, sent)
    }

    /// Removes what is at a path, if it is there.
    ///
    /// # Errors
    /// [`ApiError`]
    pub fn delete(&self, path: &str) -> Result<(), ApiError> {
        let request = self.agent.delete(self.url(path));
        let sent = self.authorised(request)?.call();
        match self.answer(path, sent) {
            Err(ApiError::NotFound { .. }) | Ok(_) => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn url(&self, path: &str) -> String {
        format!("{}{path}", self.server)
    }

    fn authorised<B>(
        &self,
        request: ureq::RequestBuilder<B>,
    ) -> Result<ureq::RequestBuilder<B>, ApiError> {
        let mut request = request.header("Accept", "application/json");
        if let Some(end) = self.end {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(ApiError::Away {
                    server: self.server.clone(),
                    error: "no time is left for another question".into(),
                });
            }
            let limit = left.min(PATIENCE);
            request = request.config().timeout_global(Some(limit)).build();
        }
        let Some(path) = &self.token_file else {
            return Ok(request);
        };
        let token = fs::read_to_string(path).map_err(|error| ApiError::Account {
            path: path.clone(),
            error,
        })?;
        Ok(request.header("Authorization", format!("Bearer {}", token.trim())))
    }

    fn answer(
        &self,
        path: &str,
        sent: Result<http::Response<ureq::Body>, ureq::Error>,
    ) -> Result<Value, ApiError> {
        let away = |error: ureq::Error| ApiError::Away {
            server: self.server.clone(),
            error: error.to_string(),
        };
        let mut response = sent.map_err(away)?;
        let status = response.status().as_u16();
        let body = response.body_mut().with_config().limit(LONGEST);
        let text = body.read_to_string().map_err(away)?;
        let path: String = path.chars().take(REASON_CHARS).collect();
        match status {
            200..300 if text.is_empty() => Ok(Value::Null),
            200..300 => serde_json::from_str(&text).map_err(|error| ApiError::Away {
                server: self.server.clone(),
                error: format!("no JSON came for {path}: {error}"),
            }),
            404 => Err(ApiError::NotFound { path }),
            _ => {
                let said = serde_json::from_str::<Value>(&text).ok();
                let said = said.and_then(|said| Some(said.get("message")?.as_str()?.to_owned()));
                Err(ApiError::Refused {
                    path,
                    status,
                    reason: said.unwrap_or(text).chars().take(REASON_CHARS).collect(),
                })
            }
        }
    }
}

/// Whether nobody on the way reads what is sent to a URL: it is encrypted, or stays on this host.
fn is_private(url: &str) -> bool {
    let Ok(url) = url.parse::<http::Uri>() else {
        return false;
    };
    let host = url.host().unwrap_or_default();
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let stays = host
        .parse::<std::net::IpAddr>()
        .is_ok_and(|address| address.is_loopback());
    url.scheme_str() == Some("https") || stays
}

/// A text as part of a query.
fn escaped(text: &str) -> String {
    let escaped = text.bytes().map(|byte| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' => {
            char::from(byte).to_string()
        }
        _ => format!("%{byte:02X}"),
    });
    escaped.collect()
}

/// Whether a text can be the name of something in a cluster, and part of a path.
pub fn is_name(text: &str) -> bool {
    let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '-' | '.');
    (1..=253).contains(&text.len())
        && text.chars().all(fits)
        && text.starts_with(|c: char| c.is_ascii_alphanumeric())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_would_leave_their_path_are_none() {
        for name in ["a", "b-gpu-xgb5l", "kube-system", "n1.example.com"] {
            assert!(is_name(name), "{name}");
        }
        for name in [
            "",
            ".",
            "..",
            "a/b",
            "a?x",
            "A",
            "a b",
            "%2e",
            &"x".repeat(300),
        ] {
            assert!(!is_name(name), "{name}");
        }
    }

    #[test]
    fn an_account_that_cannot_be_read_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let ca = dir.path().join("ca.crt");
        let error = Api::new("https://127.0.0.1:1", None, Some(&ca)).unwrap_err();
        assert!(error.to_string().contains("ca.crt"), "{error}");
        fs::write(&ca, "no certificate").unwrap();
        let error = Api::new("https://127.0.0.1:1", None, Some(&ca)).unwrap_err();
        assert!(error.to_string().contains("there is none in it"), "{error}");
        let api = Api::new("http://127.0.0.1:1", Some(dir.path().join("token")), None).unwrap();
        let error = api.get("/api").unwrap_err().to_string();
        assert!(error.contains("token"), "{error}");
        let api = Api::new("http://127.0.0.1:1", None, None).unwrap();
        assert!(matches!(api.get("/api"), Err(ApiError::Away { .. })));
    }

    #[test]
    fn a_token_does_not_travel_in_clear() {
        let token = || Some(PathBuf::from("token"));
        for url in ["http://10.0.0.1:6443", "http://localhost:1", "10.0.0.1", ""] {
            let error = Api::new(url, token(), None).unwrap_err();
            assert!(matches!(error, ApiError::InClear(_)), "{url}: {error}");
            assert!(Api::new(url, None, None).is_ok(), "{url}: without a token");
        }
        for url in [
            "https://10.0.0.1:6443",
            "http://127.0.0.1:1",
            "http://[::1]:1",
        ] {
            assert!(Api::new(url, token(), None).is_ok(), "{url}");
        }
    }

    /// A server with a certificate that `data/tls/ca.crt` signs, for 127.0.0.1 and good from
    /// 2020 until 2126; it answers one request and returns its head.
    fn tls_server() -> (String, std::thread::JoinHandle<String>) {
        use std::io::{Read as _, Write as _};

        use rustls::pki_types::pem::PemObject as _;
        use rustls::pki_types::{CertificateDer, PrivateKeyDer};

        let certificate = include_bytes!("../data/tls/server.crt");
        let key = include_bytes!("../data/tls/server.key");
        let provider = std::sync::Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(
                vec![CertificateDer::from_pem_slice(certificate).unwrap()],
                PrivateKeyDer::from_pem_slice(key).unwrap(),
            )
            .unwrap();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("https://{}", listener.local_addr().unwrap());
        let thread = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.set_read_timeout(Some(testbed::PATIENCE)).unwrap();
            let mut session = rustls::ServerConnection::new(config.into()).unwrap();
            let mut tls = rustls::Stream::new(&mut session, &mut stream);
            let mut head = vec![0; 4096];
            let Ok(length) = tls.read(&mut head) else {
                return String::new();
            };
            let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}";
            let _ = tls.write_all(answer);
            String::from_utf8_lossy(&head[..length]).into_owned()
        });
        (url, thread)
    }

    #[test]
    fn the_tests_certificates_are_good_where_the_clock_is_years_behind() {
        use rustls::pki_types::CertificateDer;
        use rustls::pki_types::pem::PemObject as _;
        for pem in [
            &include_bytes!("../data/tls/ca.crt")[..],
            include_bytes!("../data/tls/server.crt"),
        ] {
            let certificate = CertificateDer::from_pem_slice(pem).unwrap();
            // X.509's UTCTime, 13 characters.
            let from = b"\x17\x0d200101000000Z";
            assert!(certificate.windows(from.len()).any(|found| found == from));
        }
    }

    #[test]
    fn a_server_is_known_by_its_clusters_certificate_and_no_other() {
        let dir = tempfile::tempdir().unwrap();
        let (ca, token) = (dir.path().join("ca.crt"), dir.path().join("token"));
        fs::write(&ca, include_bytes!("../data/tls/ca.crt")).unwrap();
        fs::write(&token, "secret\n").unwrap();
        let (url, server) = tls_server();
        let api = Api::new(&url, Some(token.clone()), Some(&ca)).unwrap();
        assert!(api.get("/api").unwrap().is_some());
        let head = testbed::join(server).to_lowercase();
        assert!(head.contains("authorization: bearer secret\r\n"), "{head}");

        // Another cluster's certificates, or none: the token is not shown to that server.
        for roots in [None, Some(include_bytes!("../data/tls/server.crt"))] {
            let (url, server) = tls_server();
            let path = roots.map(|pem| {
                let path = dir.path().join("other.crt");
                fs::write(&path, pem).unwrap();
                path
            });
            let api = Api::new(&url, Some(token.clone()), path.as_deref()).unwrap();
            let error = api.get("/api").unwrap_err().to_string();
            assert!(error.contains("does not answer"), "{error}");
            assert_eq!(testbed::join(server), "");
        }
    }
}
