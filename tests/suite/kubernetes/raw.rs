//! One call of gRPC, frame by frame: with an `:authority` that no library sends.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RESET: u8 = 3;
const SETTINGS: u8 = 4;
const END_STREAM: u8 = 1;

/// The message of the answer, or how the call ended without one.
pub fn call(socket: &Path, authority: &str, path: &str, message: &[u8]) -> Result<Vec<u8>, String> {
    let mut stream = UnixStream::connect(socket).map_err(|error| error.to_string())?;
    stream
        .set_read_timeout(Some(tests::PATIENCE))
        .expect("a limit");
    stream
        .write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        .expect("sent");
    frame(&mut stream, SETTINGS, 0, 0, &[]);
    // POST and http are entries 3 and 6 of the static table, names of fields 1, 4 and 31.
    let mut head = vec![0x83, 0x86];
    for (name, value) in [
        (&[0x01_u8][..], authority),
        (&[0x04], path),
        (&[0x0f, 0x10], "application/grpc"),
    ] {
        head.extend(name);
        head.push(u8::try_from(value.len()).expect("short"));
        head.extend(value.as_bytes());
    }
    head.extend(b"\x00\x02te\x08trailers");
    frame(&mut stream, HEADERS, 4, 1, &head);
    let mut body = vec![0];
    body.extend(u32::try_from(message.len()).expect("short").to_be_bytes());
    body.extend(message);
    frame(&mut stream, DATA, END_STREAM, 1, &body);
    let mut data = Vec::new();
    loop {
        let mut head = [0; 9];
        stream
            .read_exact(&mut head)
            .map_err(|error| error.to_string())?;
        let [a, b, c, kind, flags, ..] = head;
        let mut payload = vec![0; u32::from_be_bytes([0, a, b, c]) as usize];
        stream
            .read_exact(&mut payload)
            .map_err(|error| error.to_string())?;
        match kind {
            SETTINGS if flags & 1 == 0 => frame(&mut stream, SETTINGS, 1, 0, &[]),
            RESET => return Err(format!("reset with code {}", payload[3])),
            DATA => data.extend(payload),
            HEADERS if flags & END_STREAM != 0 => {
                return data
                    .get(5..)
                    .map(<[u8]>::to_vec)
                    .ok_or_else(|| "no message".into());
            }
            _ => {}
        }
    }
}

fn frame(stream: &mut UnixStream, kind: u8, flags: u8, id: u32, payload: &[u8]) {
    let [_, a, b, c] = u32::try_from(payload.len()).expect("short").to_be_bytes();
    let mut frame = vec![a, b, c, kind, flags];
    frame.extend(id.to_be_bytes());
    frame.extend(payload);
    stream.write_all(&frame).expect("sent");
}
