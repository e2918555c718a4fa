//! The handshake: two messages over a Unix SEQPACKET socket.
//!
//! client --Hello--> arbiter --Welcome + descriptors--> client. Afterwards the client rings on the
//! socket, by messages of no bytes, and either side may say goodbye by closing. Encoded by hand,
//! field by field, little endian: no padding travels.

use std::fmt;

use crate::layout::MAX_DEVICES;

/// Protocol major: both sides must agree.
pub const PROTOCOL_MAJOR: u32 = 2;
/// Protocol minor: the older side's is spoken.
pub const PROTOCOL_MINOR: u32 = 1;
/// First word of each message.
const MAGIC: u32 = u32::from_le_bytes(*b"slt1");

/// Feature of a [`Hello`]: the process only reads what the pages say, and needs no slot.
pub const READER: u64 = 4;
/// Feature of a [`Hello`]: the process has no token and asks for terms, as one of a container does
/// that nobody has registered.
pub const ASKS: u64 = 8;

/// Bytes of a tenant's token.
pub const TOKEN_BYTES: usize = 32;
/// Longest message text.
pub(crate) const TEXT_BYTES: usize = 192;
/// Longest text of what a process asks for.
pub const ASKED_BYTES: usize = 1280;
/// Longest message of the handshake in bytes.
pub const MESSAGE_BYTES: usize = 2048;

/// A device as the client's driver names it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DeviceId {
    /// `cuDeviceGetUuid`.
    pub uuid: [u8; 16],
    /// `cuDeviceTotalMem` in bytes, unvirtualised.
    pub total_bytes: u64,
}

/// client --Hello--> arbiter.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Hello {
    /// Protocol spoken.
    pub major: u32,
    /// Protocol spoken.
    pub minor: u32,
    /// Optional abilities, as bits.
    pub features: u64,
    /// Capability of the tenant that this process belongs to, as `sublet run` handed it out.
    pub token: [u8; TOKEN_BYTES],
    /// Slot held in the tenant's page, where this is a re-attachment (pages come along as
    /// descriptors).
    pub previous_slot: Option<u32>,
    /// Nanoseconds since the arbiter was lost, for a re-attachment.
    pub gap_ns: u64,
    /// Devices by ordinal of the client's driver.
    pub devices: Vec<DeviceId>,
    /// Name of the program, for people.
    pub command: String,
    /// What a process without a token asks for: a line `NAME=value` for each variable of its
    /// environment that says so. Empty without the feature [`ASKS`].
    pub asked: String,
}

/// arbiter --Welcome--> client, with the descriptors of the arbiter's half, the client's half and
/// the tenant's page, in this order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Welcome {
    /// Protocol spoken from here on.
    pub major: u32,
    /// Protocol spoken from here on.
    pub minor: u32,
    /// Optional abilities that both sides have.
    pub features: u64,
    /// Whether the client is in, or why not.
    pub outcome: Outcome,
    /// For each device of the [`Hello`], the device index of the pages; `None`: not governed.
    pub device_map: [Option<u8>; MAX_DEVICES],
    /// For people.
    pub text: String,
}

/// Answer to a [`Hello`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// Attached.
    Attached,
    /// No common protocol or layout.
    Version,
    /// No tenant has this token.
    UnknownToken,
    /// The tenant belongs to another user.
    Permission,
    /// The tenant has as many processes as it can have.
    Full,
    /// The message made no sense.
    Malformed,
    /// The arbiter failed.
    Failed,
    /// The tenant has a memory limit, and may use none of the client's devices: it would run
    /// without any.
    NoDevice,
}

/// A message that cannot be read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WireError {
    /// It ends early.
    Short,
    /// It does not start as ours do.
    Magic(u32),
    /// A field is out of range.
    Field(&'static str, u64),
}

impl fmt::Display for WireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Short => write!(f, "handshake message ends early"),
            Self::Magic(magic) => write!(f, "handshake message starts with {magic:#010x}"),
            Self::Field(field, value) => write!(f, "handshake field {field} cannot be {value}"),
        }
    }
}

impl std::error::Error for WireError {}

impl TryFrom<u32> for Outcome {
    type Error = WireError;
    fn try_from(value: u32) -> Result<Self, WireError> {
        Ok(match value {
            0 => Self::Attached,
            1 => Self::Version,
            2 => Self::UnknownToken,
            3 => Self::Permission,
            4 => Self::Full,
            5 => Self::Malformed,
            6 => Self::Failed,
            7 => Self::NoDevice,
            other => return Err(WireError::Field("outcome", u64::from(other))),
        })
    }
}

impl Hello {
    /// As bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Writer::new(self.major, self.minor, self.features);
        out.0.extend_from_slice(&self.token);
        out.u32(self.previous_slot.map_or(u32::MAX, |slot| slot));
        out.u64(self.gap_ns);
        out.u32(self.devices.len().min(MAX_DEVICES) as u32);
        for device in self.devices.iter().take(MAX_DEVICES) {
            out.0.extend_from_slice(&device.uuid);
            out.u64(device.total_bytes);
        }
        out.text(&self.command);
        if self.features & ASKS != 0 {
            out.text_of(&self.asked, ASKED_BYTES);
        }
        out.0
    }

    /// From bytes. Trailing bytes are a newer minor's and ignored.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let (mut from, major, minor, features) = Reader::new(bytes)?;
        let token = from.array()?;
        let previous_slot = Some(from.u32()?).filter(|slot| *slot != u32::MAX);
        let gap_ns = from.u64()?;
        let count = from.u32()? as usize;
        if count > MAX_DEVICES {
            return Err(WireError::Field("devices", count as u64));
        }
        let devices = (0..count)
            .map(|_| {
                Ok(DeviceId {
                    uuid: from.array()?,
                    total_bytes: from.u64()?,
                })
            })
            .collect::<Result<_, WireError>>()?;
        let command = from.text()?;
        let asked = if features & ASKS == 0 {
            String::new()
        } else {
            from.text_of(ASKED_BYTES)?
        };
        Ok(Self {
            major,
            minor,
            features,
            token,
            previous_slot,
            gap_ns,
            devices,
            command,
            asked,
        })
    }
}

impl Welcome {
    /// As bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Writer::new(self.major, self.minor, self.features);
        out.u32(self.outcome as u32);
        out.u32(MAX_DEVICES as u32);
        for index in self.device_map {
            out.0.push(index.unwrap_or(u8::MAX));
        }
        out.text(&self.text);
        out.0
    }

    /// From bytes. Trailing bytes are a newer minor's and ignored.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let (mut from, major, minor, features) = Reader::new(bytes)?;
        let outcome = from.u32()?.try_into()?;
        let count = from.u32()? as usize;
        if count != MAX_DEVICES {
            return Err(WireError::Field("device map", count as u64));
        }
        let map: [u8; MAX_DEVICES] = from.array()?;
        let device_map = map.map(|index| (usize::from(index) < MAX_DEVICES).then_some(index));
        let text = from.text()?;
        Ok(Self {
            major,
            minor,
            features,
            outcome,
            device_map,
            text,
        })
    }
}

struct Writer(Vec<u8>);

impl Writer {
    fn new(major: u32, minor: u32, features: u64) -> Self {
        let mut out = Self(Vec::with_capacity(512));
        out.u32(MAGIC);
        out.u32(major);
        out.u32(minor);
        out.u64(features);
        out
    }

    fn u32(&mut self, value: u32) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    fn u64(&mut self, value: u64) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    fn text(&mut self, text: &str) {
        self.text_of(text, TEXT_BYTES);
    }

    fn text_of(&mut self, text: &str, most: usize) {
        let mut end = text.len().min(most);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        self.u32(end as u32);
        self.0.extend_from_slice(&text.as_bytes()[..end]);
    }
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn new(bytes: &'a [u8]) -> Result<(Self, u32, u32, u64), WireError> {
        let mut from = Self(bytes);
        let magic = from.u32()?;
        if magic != MAGIC {
            return Err(WireError::Magic(magic));
        }
        let (major, minor, features) = (from.u32()?, from.u32()?, from.u64()?);
        Ok((from, major, minor, features))
    }

    fn take(&mut self, bytes: usize) -> Result<&'a [u8], WireError> {
        let (taken, rest) = self.0.split_at_checked(bytes).ok_or(WireError::Short)?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], WireError> {
        let (taken, rest) = self.0.split_first_chunk().ok_or(WireError::Short)?;
        self.0 = rest;
        Ok(*taken)
    }

    fn u32(&mut self) -> Result<u32, WireError> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, WireError> {
        self.array().map(u64::from_le_bytes)
    }

    fn text(&mut self) -> Result<String, WireError> {
        self.text_of(TEXT_BYTES)
    }

    fn text_of(&mut self, most: usize) -> Result<String, WireError> {
        let bytes = self.u32()? as usize;
        if bytes > most {
            return Err(WireError::Field("text length", bytes as u64));
        }
        Ok(String::from_utf8_lossy(self.take(bytes)?).into_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello() -> Hello {
        Hello {
            major: PROTOCOL_MAJOR,
            minor: PROTOCOL_MINOR,
            features: 5 | ASKS,
            token: [7; TOKEN_BYTES],
            previous_slot: Some(3),
            gap_ns: 9,
            devices: vec![
                DeviceId {
                    uuid: [1; 16],
                    total_bytes: 1 << 40
                };
                2
            ],
            command: "python train.py".into(),
            asked: "SUBLET_MEM=8GiB\nSUBLET_SHARE=0.5\n".into(),
        }
    }

    #[test]
    fn a_process_with_a_token_asks_for_nothing() {
        let hello = Hello {
            features: 5,
            ..hello()
        };
        let back = Hello::decode(&hello.encode()).expect("readable");
        assert_eq!(back.asked, "");
        assert!(
            hello.encode().len()
                < Hello {
                    features: 13,
                    ..hello
                }
                .encode()
                .len()
        );
    }

    #[test]
    fn the_longest_message_fits() {
        let long = Hello {
            devices: vec![DeviceId::default(); MAX_DEVICES],
            command: "x".repeat(TEXT_BYTES),
            asked: "x".repeat(ASKED_BYTES),
            ..hello()
        };
        assert!(long.encode().len() <= MESSAGE_BYTES);
    }

    #[test]
    fn messages_come_back_as_they_were() {
        assert_eq!(Hello::decode(&hello().encode()), Ok(hello()));
        let mut device_map = [None; MAX_DEVICES];
        device_map[1] = Some(0);
        let welcome = Welcome {
            major: 1,
            minor: 0,
            features: 0,
            outcome: Outcome::Full,
            device_map,
            text: "no slot is left".into(),
        };
        assert_eq!(Welcome::decode(&welcome.encode()), Ok(welcome));
    }

    #[test]
    fn every_truncation_is_an_error_and_never_a_panic() {
        let bytes = hello().encode();
        for end in 0..bytes.len() {
            assert!(
                Hello::decode(&bytes[..end]).is_err(),
                "{end} of {} bytes",
                bytes.len()
            );
        }
    }

    #[test]
    fn longer_messages_of_a_newer_minor_are_read() {
        let mut bytes = hello().encode();
        bytes.extend_from_slice(&[9; 40]);
        assert_eq!(Hello::decode(&bytes), Ok(hello()));
    }

    #[test]
    fn fields_out_of_range_are_named() {
        let mut bytes = hello().encode();
        let count_at = 20 + TOKEN_BYTES + 4 + 8;
        bytes[count_at..count_at + 4].copy_from_slice(&100u32.to_le_bytes());
        assert_eq!(Hello::decode(&bytes), Err(WireError::Field("devices", 100)));
        bytes[0] ^= 1;
        assert!(matches!(Hello::decode(&bytes), Err(WireError::Magic(_))));
    }

    #[test]
    fn long_text_is_cut_at_a_character() {
        let long = Hello {
            command: "ü".repeat(TEXT_BYTES),
            ..hello()
        };
        let back = Hello::decode(&long.encode()).expect("readable");
        assert_eq!(back.command.len(), TEXT_BYTES);
    }
}
