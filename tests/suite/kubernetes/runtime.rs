//! A container runtime for tests, as far as NRI sees one: its socket, and the calls that it makes.
//!
//! It has its own frames, so that what the plugin reads was not written by the plugin's own code.

use std::collections::VecDeque;
use std::io::{self, Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use kubernetes::proto::nri;
use kubernetes::sockets;
use prost::Message;
use tests::{PATIENCE, wait_until};

const TO_PLUGIN: u32 = 1;
const TO_RUNTIME: u32 = 2;
const REQUEST: u8 = 1;
const RESPONSE: u8 = 2;

/// The runtime: its socket is gone when this is.
pub struct Runtime {
    listener: UnixListener,
}

impl Runtime {
    pub fn start(socket: &Path) -> Self {
        let listener = sockets::listen(socket).expect("a socket");
        listener.set_nonblocking(true).expect("a socket");
        Self { listener }
    }

    /// The next plugin that connects.
    pub fn accept(&self) -> Peer {
        let stream = wait_until("the plugin connects", || match self.listener.accept() {
            Ok((stream, _)) => Some(stream),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => None,
            Err(error) => panic!("the socket: {error}"),
        });
        stream.set_nonblocking(false).expect("a socket");
        stream.set_read_timeout(Some(PATIENCE)).expect("a limit");
        stream.set_write_timeout(Some(PATIENCE)).expect("a limit");
        Peer {
            stream,
            call: 0,
            bytes: [VecDeque::new(), VecDeque::new()],
        }
    }

    /// A plugin that is registered, and knows of these containers.
    pub fn plugin(&self, pods: &[nri::PodSandbox], containers: &[nri::Container]) -> Peer {
        let mut peer = self.accept();
        peer.register();
        peer.configure(0);
        peer.synchronize(pods, containers);
        peer
    }
}

/// A connection of a plugin.
pub struct Peer {
    pub stream: UnixStream,
    call: u32,
    bytes: [VecDeque<u8>; 2],
}

impl Peer {
    /// Takes the registration.
    pub fn register(&mut self) -> nri::RegisterPluginRequest {
        let (call, kind, payload) = self.read(TO_RUNTIME).expect("a registration");
        assert_eq!((call % 2, kind), (1, REQUEST));
        let request = nri::Request::decode(&*payload).expect("a call");
        assert_eq!(request.service, nri::RUNTIME);
        assert_eq!(request.method, "RegisterPlugin");
        self.write(TO_RUNTIME, call, RESPONSE, &[]);
        nri::RegisterPluginRequest::decode(&*request.payload).expect("a registration")
    }

    /// Refuses it.
    pub fn refuse(&mut self, why: &str) {
        let (call, ..) = self.read(TO_RUNTIME).expect("a registration");
        let status = nri::Status {
            code: 2,
            message: why.into(),
        };
        let response = nri::Response {
            status: Some(status),
            payload: Vec::new(),
        };
        self.write(TO_RUNTIME, call, RESPONSE, &response.encode_to_vec());
    }

    /// Says who this is and how long it waits; 0: it does not say.
    pub fn configure(&mut self, request_timeout: i64) -> nri::ConfigureResponse {
        let request = nri::ConfigureRequest {
            runtime_name: "tests".into(),
            runtime_version: "1".into(),
            request_timeout,
        };
        self.ask("Configure", &request).expect("configured")
    }

    /// Says which containers there are, in two parts.
    pub fn synchronize(&mut self, pods: &[nri::PodSandbox], containers: &[nri::Container]) {
        let first = nri::SynchronizeRequest {
            pods: pods.to_vec(),
            containers: Vec::new(),
            more: true,
        };
        let said: nri::SynchronizeResponse = self.ask("Synchronize", &first).expect("an answer");
        assert!(said.more, "others follow");
        let rest = nri::SynchronizeRequest {
            pods: Vec::new(),
            containers: containers.to_vec(),
            more: false,
        };
        let said: nri::SynchronizeResponse = self.ask("Synchronize", &rest).expect("an answer");
        assert!(!said.more);
    }

    /// What a call is answered, or the message of the refusal.
    pub fn ask<A: Message + Default>(
        &mut self,
        method: &str,
        question: &impl Message,
    ) -> Result<A, String> {
        let payload = self.ask_raw(method, question.encode_to_vec())?;
        Ok(A::decode(&*payload).expect("an answer"))
    }

    pub fn ask_raw(&mut self, method: &str, payload: Vec<u8>) -> Result<Vec<u8>, String> {
        let request = nri::Request {
            service: nri::PLUGIN.into(),
            method: method.into(),
            payload,
            timeout_nano: 0,
        };
        self.call(&request.encode_to_vec())
    }

    /// What these bytes of a call are answered.
    pub fn call(&mut self, request: &[u8]) -> Result<Vec<u8>, String> {
        self.call += 2;
        let number = self.call - 1;
        self.write(TO_PLUGIN, number, REQUEST, request);
        let (call, kind, payload) = self.read(TO_PLUGIN).expect("an answer");
        assert_eq!((call, kind), (number, RESPONSE));
        let response = nri::Response::decode(&*payload).expect("a response");
        match response.status.filter(|status| status.code != 0) {
            Some(status) => Err(format!("{}: {}", status.code, status.message)),
            None => Ok(response.payload),
        }
    }

    /// Waits until the plugin has ended the connection.
    pub fn is_left(&mut self) {
        let mut rest = [0; 4096];
        loop {
            match self.stream.read(&mut rest) {
                Ok(0) => return,
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return,
                Err(error) => panic!("the plugin goes on: {error}"),
            }
        }
    }

    /// Writes a message in frames of a few bytes, as a runtime may.
    fn write(&mut self, connection: u32, call: u32, kind: u8, payload: &[u8]) {
        let length = |bytes: &[u8]| u32::try_from(bytes.len()).expect("short").to_be_bytes();
        let mut message = length(payload).to_vec();
        message.extend(call.to_be_bytes());
        message.extend([kind, 0]);
        message.extend(payload);
        let mut frames = Vec::new();
        let (head, body) = message.split_at(7);
        for part in std::iter::once(head).chain(body.chunks(1000)) {
            frames.extend(connection.to_be_bytes());
            frames.extend(length(part));
            frames.extend(part);
        }
        self.stream.write_all(&frames).expect("sent");
    }

    /// The next message of a connection: number of the call, kind, payload.
    fn read(&mut self, connection: u32) -> io::Result<(u32, u8, Vec<u8>)> {
        let word = |bytes: &[u8]| u32::from_be_bytes(bytes.try_into().expect("four bytes"));
        loop {
            let bytes = self.bytes[connection as usize - 1].make_contiguous();
            if let Some(head) = bytes.get(..10) {
                let (length, call, kind) = (word(&head[..4]) as usize, word(&head[4..8]), head[8]);
                if let Some(payload) = bytes.get(10..10 + length).map(<[u8]>::to_vec) {
                    self.bytes[connection as usize - 1].drain(..10 + length);
                    return Ok((call, kind, payload));
                }
            }
            let mut head = [0; 8];
            self.stream.read_exact(&mut head)?;
            let (of, length) = (word(&head[..4]), word(&head[4..]) as usize);
            let mut part = vec![0; length];
            self.stream.read_exact(&mut part)?;
            self.bytes[of as usize - 1].extend(part);
        }
    }
}
