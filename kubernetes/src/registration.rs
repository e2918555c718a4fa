//! What a socket in `plugins_registry` answers a kubelet: which plugin it belongs to.
//!
//! A kubelet of 1.36 sends these two calls with the socket's escaped path for an `:authority`
//! (`%2Fvar%2Flib%2Fkubelet%2F...`), and crate h2 resets such a stream, as it may. So the frames
//! are read here, and the heads of calls are passed over. The two calls differ in their messages:
//! that of `GetInfo` is empty. (The other one is empty only where it reports a failure without a
//! reason; what it is answered then are fields that its reader skips.)
//!
//! Blocking, a thread for each connection, with a bound on all that comes and on every wait.

use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use prost::Message as _;

use crate::proto::plugin_registration::{PluginInfo, RegistrationStatus};
use crate::sockets::{is_passing, may_call};

/// What every connection of HTTP/2 begins with (RFC 9113, 3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Longest frame that may come, as long as nobody has agreed on more (RFC 9113, 4.2).
const LONGEST_FRAME: usize = 16 << 10;
/// Longest message: a status with its reason.
const LONGEST_MESSAGE: usize = 64 << 10;
/// Bytes of one connection in all.
const MOST_BYTES: usize = 4 << 20;
/// Calls of one connection at a time.
const MOST_CALLS: usize = 8;
/// Connections at a time.
const MOST_CONNECTIONS: usize = 8;
/// TIMEOUT: a kubelet asks at once, and tells how it went within seconds; what is silent for longer
/// may connect anew.
const SILENCE: Duration = Duration::from_secs(60);

/// Kinds of frames (RFC 9113, 6), as far as they are distinguished.
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RESET: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GO_AWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;
/// Flags.
const END_STREAM: u8 = 1;
const ACK: u8 = 1;
const END_HEADERS: u8 = 4;
const PADDED: u8 = 8;

/// Codes of gRPC.
const OK: &str = "0";
const UNIMPLEMENTED: &str = "12";
const INVALID: &str = "3";

/// What a kubelet has said of a plugin that it asked about.
pub type OnStatus = Arc<dyn Fn(RegistrationStatus) + Send + Sync>;

/// Answers until the listener is broken.
///
/// # Errors
/// The listener's.
pub fn serve(listener: &UnixListener, info: &PluginInfo, on_status: &OnStatus) -> io::Error {
    let open = Arc::new(AtomicUsize::new(0));
    loop {
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) if is_passing(&error) => {
                thread::sleep(Duration::from_millis(50));
                continue;
            }
            Err(error) => return error,
        };
        if open.fetch_add(1, Ordering::Relaxed) >= MOST_CONNECTIONS || !may_call(&stream) {
            open.fetch_sub(1, Ordering::Relaxed);
            continue;
        }
        let (open, info, on_status) = (Arc::clone(&open), info.clone(), Arc::clone(on_status));
        thread::spawn(move || {
            // A peer that breaks the protocol loses the connection, and can have another one.
            let _ = answer(stream, &info, &on_status);
            open.fetch_sub(1, Ordering::Relaxed);
        });
    }
}

fn answer(mut stream: UnixStream, info: &PluginInfo, on_status: &OnStatus) -> io::Result<()> {
    stream.set_read_timeout(Some(SILENCE))?;
    stream.set_write_timeout(Some(SILENCE))?;
    let mut preface = [0; PREFACE.len()];
    stream.read_exact(&mut preface)?;
    if preface != PREFACE {
        return Err(broken("the connection does not begin as HTTP/2 does"));
    }
    send(&mut stream, SETTINGS, 0, 0, &[])?;
    let mut calls: Vec<(u32, Vec<u8>)> = Vec::new();
    let mut taken = 0_usize;
    loop {
        let mut head = [0; 9];
        stream.read_exact(&mut head)?;
        let [a, b, c, kind, flags, stream_id @ ..] = head;
        let length = u32::from_be_bytes([0, a, b, c]) as usize;
        let id = u32::from_be_bytes(stream_id) & 0x7fff_ffff;
        taken += length;
        if length > LONGEST_FRAME || taken > MOST_BYTES {
            return Err(broken("it sends more than a registration has"));
        }
        let mut payload = vec![0; length];
        stream.read_exact(&mut payload)?;
        match kind {
            SETTINGS if flags & ACK == 0 => send(&mut stream, SETTINGS, ACK, 0, &[])?,
            PING if flags & ACK == 0 => send(&mut stream, PING, ACK, 0, &payload)?,
            GO_AWAY => return Ok(()),
            RESET => calls.retain(|(call, _)| *call != id),
            HEADERS if flags & END_STREAM != 0 => say(&mut stream, id, &[], INVALID)?,
            DATA => {
                let data = unpadded(&payload, flags)?;
                let at = match calls.iter().position(|(call, _)| *call == id) {
                    Some(at) => at,
                    None if calls.len() < MOST_CALLS => {
                        calls.push((id, Vec::new()));
                        calls.len() - 1
                    }
                    None => return Err(broken("it has more calls under way than there are")),
                };
                // PANIC: found or pushed above.
                let body = &mut calls[at].1;
                if body.len() + data.len() > LONGEST_MESSAGE {
                    return Err(broken("its message is longer than any of a registration"));
                }
                body.extend_from_slice(data);
                if flags & END_STREAM != 0 {
                    let (_, body) = calls.swap_remove(at);
                    let (message, code) = judge(&body, info, on_status);
                    say(&mut stream, id, &message, code)?;
                } else if length > 0 {
                    // CAST: at most LONGEST_FRAME.
                    send(
                        &mut stream,
                        WINDOW_UPDATE,
                        0,
                        id,
                        &(length as u32).to_be_bytes(),
                    )?;
                }
                if length > 0 {
                    send(
                        &mut stream,
                        WINDOW_UPDATE,
                        0,
                        0,
                        &(length as u32).to_be_bytes(),
                    )?;
                }
            }
            _ => {}
        }
    }
}

/// What a message is answered, and with which code.
fn judge(body: &[u8], info: &PluginInfo, on_status: &OnStatus) -> (Vec<u8>, &'static str) {
    let Some((head, message)) = body.split_first_chunk::<5>() else {
        return (Vec::new(), INVALID);
    };
    let [compressed, length @ ..] = *head;
    if compressed != 0 {
        return (Vec::new(), UNIMPLEMENTED);
    }
    if u32::from_be_bytes(length) as usize != message.len() {
        return (Vec::new(), INVALID);
    }
    if message.is_empty() {
        return (info.encode_to_vec(), OK);
    }
    match RegistrationStatus::decode(message) {
        Ok(status) => {
            on_status(status);
            (Vec::new(), OK)
        }
        Err(_) => (Vec::new(), INVALID),
    }
}

/// Answers one call: head, message, end.
fn say(stream: &mut UnixStream, id: u32, message: &[u8], code: &str) -> io::Result<()> {
    // `:status: 200` is entry 8 of HPACK's static table (RFC 7541, appendix A).
    let mut head = vec![0x88];
    head.extend(field("content-type", "application/grpc"));
    let mut data = vec![0];
    // CAST: a registration has some hundred bytes.
    data.extend((message.len() as u32).to_be_bytes());
    data.extend(message);
    send(stream, HEADERS, END_HEADERS, id, &head)?;
    if code == OK {
        send(stream, DATA, 0, id, &data)?;
    }
    send(
        stream,
        HEADERS,
        END_HEADERS | END_STREAM,
        id,
        &field("grpc-status", code),
    )
}

/// A field without index and without Huffman's code (RFC 7541, 6.2.2); both sides are short.
fn field(name: &str, value: &str) -> Vec<u8> {
    let mut bytes = vec![0];
    for text in [name, value] {
        // CAST: names and values of ours are below 127 bytes.
        bytes.push(text.len() as u8);
        bytes.extend(text.as_bytes());
    }
    bytes
}

fn send(stream: &mut UnixStream, kind: u8, flags: u8, id: u32, payload: &[u8]) -> io::Result<()> {
    // CAST: what is sent is short.
    let [_, a, b, c] = (payload.len() as u32).to_be_bytes();
    let mut frame = vec![a, b, c, kind, flags];
    frame.extend(id.to_be_bytes());
    frame.extend(payload);
    stream.write_all(&frame)
}

/// The data of a frame without its padding.
fn unpadded(payload: &[u8], flags: u8) -> io::Result<&[u8]> {
    if flags & PADDED == 0 {
        return Ok(payload);
    }
    let [padding, data @ ..] = payload else {
        return Err(broken("a padded frame is empty"));
    };
    let length = data.len().checked_sub(usize::from(*padding));
    let data = length.and_then(|length| data.get(..length));
    data.ok_or_else(|| broken("a frame has more padding than bytes"))
}

fn broken(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(20);

    struct Fixture {
        dir: tempfile::TempDir,
        said: Arc<Mutex<Vec<RegistrationStatus>>>,
    }

    fn info() -> PluginInfo {
        PluginInfo {
            r#type: "DRAPlugin".into(),
            name: "sublet.dev".into(),
            endpoint: "/k/dra.sock".into(),
            supported_versions: vec!["v1.DRAPlugin".into()],
        }
    }

    impl Fixture {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let said = Arc::<Mutex<Vec<RegistrationStatus>>>::default();
            let listener = UnixListener::bind(dir.path().join("s")).unwrap();
            let all = Arc::clone(&said);
            let on_status: OnStatus = Arc::new(move |status| all.lock().unwrap().push(status));
            thread::spawn(move || serve(&listener, &info(), &on_status));
            Self { dir, said }
        }

        fn connect(&self) -> UnixStream {
            let mut stream = UnixStream::connect(self.dir.path().join("s")).unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            stream.write_all(PREFACE).unwrap();
            send(&mut stream, SETTINGS, 0, 0, &[]).unwrap();
            stream
        }
    }

    fn framed(message: &[u8]) -> Vec<u8> {
        let length = u32::try_from(message.len()).unwrap().to_be_bytes();
        [&[0][..], &length, message].concat()
    }

    /// What a call is answered; the head is what no library would take.
    fn call(stream: &mut UnixStream, id: u32, message: &[u8]) -> Vec<u8> {
        send(stream, HEADERS, END_HEADERS, id, b"\xff\xff%2Fvar%2Flib").unwrap();
        send(stream, DATA, END_STREAM, id, &framed(message)).unwrap();
        let mut data = Vec::new();
        loop {
            let mut head = [0; 9];
            stream.read_exact(&mut head).unwrap();
            let mut payload = vec![0; usize::from(head[1]) << 8 | usize::from(head[2])];
            stream.read_exact(&mut payload).unwrap();
            match (head[3], head[4]) {
                (DATA, _) => data.extend(payload),
                (HEADERS, flags) if flags & END_STREAM != 0 => return data,
                _ => {}
            }
        }
    }

    #[test]
    fn both_calls_are_answered_whatever_their_heads_say() {
        let fixture = Fixture::new();
        let mut stream = fixture.connect();
        let answer = call(&mut stream, 1, &[]);
        assert_eq!(PluginInfo::decode(&answer[5..]).unwrap(), info());
        let status = RegistrationStatus {
            plugin_registered: true,
            error: String::new(),
        };
        assert_eq!(call(&mut stream, 3, &status.encode_to_vec()), framed(&[]));
        assert_eq!(*fixture.said.lock().unwrap(), [status]);
    }

    #[test]
    fn nonsense_ends_its_own_connection_and_no_other() {
        let fixture = Fixture::new();
        let huge = [0xff_u8, 0xff, 0xff, DATA, 0, 0, 0, 0, 1];
        let padded = [0, 0, 1, DATA, PADDED, 0, 0, 0, 1, 200];
        for nonsense in [&b"GET / HTTP/1.1\r\n\r\n           "[..], &huge, &padded] {
            let mut stream = UnixStream::connect(fixture.dir.path().join("s")).unwrap();
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            if nonsense[0] != b'G' {
                stream.write_all(PREFACE).unwrap();
            }
            stream.write_all(nonsense).unwrap();
            let mut rest = Vec::new();
            // Reset or closed: either way it is over.
            let _ = stream.read_to_end(&mut rest);
        }
        assert_eq!(judge(b"\x01\0\0\0\0", &info(), &nobody()).1, UNIMPLEMENTED);
        assert_eq!(judge(b"\0\0\0\0\x09x", &info(), &nobody()).1, INVALID);
        assert_eq!(judge(b"\0", &info(), &nobody()).1, INVALID);
        assert_eq!(judge(b"\0\0\0\0\x01\xff", &info(), &nobody()).1, INVALID);
        let answer = call(&mut fixture.connect(), 1, &[]);
        assert_eq!(PluginInfo::decode(&answer[5..]).unwrap(), info());
    }

    fn nobody() -> OnStatus {
        Arc::new(|status| panic!("{status:?}"))
    }

    #[test]
    fn a_message_without_an_end_is_bounded() {
        let fixture = Fixture::new();
        let mut stream = fixture.connect();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        send(&mut stream, HEADERS, END_HEADERS, 1, b"\x83").unwrap();
        let part = vec![0; LONGEST_FRAME];
        let sent = (0..1000).take_while(|_| send(&mut stream, DATA, 0, 1, &part).is_ok());
        assert!(sent.count() < 1000);
    }
}
