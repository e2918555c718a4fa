//! An API server for tests: it keeps objects by path, and what it was asked.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use serde_json::{Value, json};

/// What was asked: method, path with query, body.
pub type Asked = (String, String, Value);

#[derive(Default)]
struct Inner {
    objects: Mutex<BTreeMap<String, Value>>,
    asked: Mutex<Vec<Asked>>,
    away: AtomicBool,
    /// Changes of what has this in its path are refused; empty: none is.
    refused: Mutex<String>,
    /// Questions whose path contains this wait; empty: none does.
    held: Mutex<String>,
    let_go: Condvar,
}

/// The server; it serves until the test's process ends.
#[derive(Clone)]
pub struct ApiServer {
    inner: Arc<Inner>,
    pub url: String,
}

impl ApiServer {
    pub fn start() -> Self {
        let inner = Arc::<Inner>::default();
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        let own = Arc::clone(&inner);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let inner = Arc::clone(&own);
                std::thread::spawn(move || inner.serve(&stream));
            }
        });
        Self { inner, url }
    }

    /// Puts an object at a path.
    pub fn put(&self, path: &str, object: Value) {
        self.inner
            .objects
            .lock()
            .unwrap()
            .insert(path.into(), object);
    }

    pub fn get(&self, path: &str) -> Option<Value> {
        self.inner.objects.lock().unwrap().get(path).cloned()
    }

    pub fn remove(&self, path: &str) {
        self.inner.objects.lock().unwrap().remove(path);
    }

    /// All that it was asked to change.
    pub fn changes(&self) -> Vec<Asked> {
        let asked = self.inner.asked.lock().unwrap();
        asked
            .iter()
            .filter(|(method, ..)| method != "GET")
            .cloned()
            .collect()
    }

    /// Objects that were made in a folder.
    pub fn made(&self, folder: &str) -> Vec<Value> {
        let changes = self.changes().into_iter();
        let made = changes.filter(|(method, path, _)| method == "POST" && path == folder);
        made.map(|(.., body)| body).collect()
    }

    /// How often it was asked for all pods of a node.
    pub fn looks(&self) -> usize {
        let asked = self.inner.asked.lock().unwrap();
        let looks = asked.iter().filter(|(method, path, _)| {
            method == "GET" && path.starts_with("/api/v1/pods?") && path.contains("nodeName%3Dn1")
        });
        looks.count()
    }

    /// From here on questions whose path contains this wait, until another part is named; with an
    /// empty one nobody waits. One whose asker hangs up meanwhile is not carried out.
    pub fn holds(&self, part: &str) {
        part.clone_into(&mut self.inner.held.lock().unwrap());
        self.inner.let_go.notify_all();
    }

    /// From here on changes of what has this in its path are refused.
    pub fn refuses(&self, part: &str) {
        part.clone_into(&mut self.inner.refused.lock().unwrap());
    }

    /// From here on it hangs up on everybody, or serves again.
    pub fn is_away(&self, away: bool) {
        self.inner.away.store(away, Ordering::SeqCst);
    }
}

impl Inner {
    fn serve(&self, stream: &TcpStream) {
        let _ = stream.set_read_timeout(Some(tests::PATIENCE));
        let mut reader = BufReader::new(stream);
        while let Some((method, path, body)) = read(&mut reader) {
            if self.away.load(Ordering::SeqCst) {
                return;
            }
            if !self.waits(&path, stream) {
                return;
            }
            let (status, answer) = self.answer(&method, &path, body);
            let text = answer.to_string();
            let said = format!(
                "HTTP/1.1 {status} x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{text}",
                text.len()
            );
            let mut writer: &TcpStream = stream;
            if writer.write_all(said.as_bytes()).is_err() {
                return;
            }
        }
    }

    /// Waits as long as such a question is held; false: its asker has hung up.
    fn waits(&self, path: &str, stream: &TcpStream) -> bool {
        let mut held = self.held.lock().unwrap();
        let mut has_waited = false;
        while !held.is_empty() && path.contains(held.as_str()) {
            if has_hung_up(stream) {
                return false;
            }
            has_waited = true;
            let looks = Duration::from_millis(20);
            held = self.let_go.wait_timeout(held, looks).unwrap().0;
        }
        !(has_waited && has_hung_up(stream))
    }

    fn answer(&self, method: &str, whole: &str, body: Value) -> (u16, Value) {
        self.asked
            .lock()
            .unwrap()
            .push((method.into(), whole.into(), body.clone()));
        let path = whole.split('?').next().unwrap_or_default();
        let mut objects = self.objects.lock().unwrap();
        let missing = (404, json!({"message": "not found"}));
        match method {
            "GET" => {
                if let Some(object) = objects.get(path) {
                    return (200, object.clone());
                }
                let below = |at: &&String| {
                    let name = at.rsplit_once('/');
                    let pods = path == "/api/v1/pods" && at.contains("/pods/");
                    pods || name.is_some_and(|(folder, _)| folder == path)
                };
                let items: Vec<Value> = objects
                    .iter()
                    .filter(|(at, _)| below(at))
                    .map(|(_, object)| object.clone())
                    .collect();
                if items.is_empty() && !whole.contains("limit=") {
                    return missing;
                }
                (200, json!({"metadata": {}, "items": items}))
            }
            "POST" => {
                if path.ends_with("/binding") {
                    let pod = path.trim_end_matches("/binding");
                    let Some(object) = objects.get_mut(pod) else {
                        return missing;
                    };
                    object["spec"]["nodeName"] = body["target"]["name"].clone();
                    return (201, json!({}));
                }
                let name = body["metadata"]["name"].as_str().unwrap_or("x");
                objects.insert(format!("{path}/{name}"), body.clone());
                (201, body)
            }
            "PUT" => {
                objects.insert(path.into(), body.clone());
                (200, body)
            }
            "PATCH" => {
                let refused = self.refused.lock().unwrap();
                if !refused.is_empty() && path.contains(&*refused) {
                    return (403, json!({"message": "pods like this stay as they are"}));
                }
                let path = path.trim_end_matches("/status");
                let Some(object) = objects.get_mut(path) else {
                    return missing;
                };
                let uid = &body["metadata"]["uid"];
                if !uid.is_null() && *uid != object["metadata"]["uid"] {
                    let said = json!({"message": "Precondition failed: UID in precondition"});
                    return (409, said);
                }
                merge(object, &body);
                (200, object.clone())
            }
            _ => (405, json!({"message": "not here"})),
        }
    }
}

fn has_hung_up(stream: &TcpStream) -> bool {
    stream.set_nonblocking(true).expect("a socket");
    let seen = stream.peek(&mut [0]);
    stream.set_nonblocking(false).expect("a socket");
    match seen {
        Ok(count) => count == 0,
        Err(error) => error.kind() != std::io::ErrorKind::WouldBlock,
    }
}

fn merge(into: &mut Value, from: &Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            for (name, value) in from {
                // RFC 7386: null removes.
                if value.is_null() {
                    into.remove(name);
                } else {
                    merge(into.entry(name).or_insert(Value::Null), value);
                }
            }
        }
        (into, from) => *into = from.clone(),
    }
}

fn read(reader: &mut BufReader<&TcpStream>) -> Option<(String, String, Value)> {
    let mut line = String::new();
    reader
        .read_line(&mut line)
        .ok()
        .filter(|length| *length > 0)?;
    let mut words = line.split_ascii_whitespace();
    let (method, path) = (words.next()?.to_owned(), words.next()?.to_owned());
    let mut length = 0;
    loop {
        let mut field = String::new();
        reader.read_line(&mut field).ok()?;
        let Some((name, value)) = field.trim().split_once(':') else {
            break;
        };
        if name.eq_ignore_ascii_case("content-length") {
            length = value.trim().parse().ok()?;
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    let body = serde_json::from_slice(&body).unwrap_or(Value::Null);
    Some((method, path, body))
}
