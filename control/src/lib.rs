//! The operator's side of the arbiter: what can be asked, what is answered, and where the socket
//! is.
//!
//! One request, one reply, each one line of JSON over a Unix stream socket. The same types travel
//! over HTTP for the cluster hook. This crate knows nothing of shared memory, of CUDA, or of how a
//! decision is made; it keeps serde out of tenants, which never link it.
//!
//! Compatibility: both ends send [`PROTOCOL_MAJOR`] and [`PROTOCOL_MINOR`]. A different major is an
//! error with both numbers in it. A minor only adds fields, codes or request kinds: unknown fields
//! are ignored, missing ones take their default, and a request kind that the server does not know
//! is answered with [`ErrorCode::Unsupported`].

mod client;
mod config;
mod device;
pub mod environment;
mod error;
mod events;
mod job_settings;
pub mod kinds;
mod layers;
mod name;
pub mod paths;
pub mod place;
mod profile;
mod report;
mod request;
mod residency;
mod resize;
#[doc(hidden)]
pub mod schema;
pub mod setting;
mod size;
mod span;
mod timeline;
mod values;
pub mod wire;

pub use client::{Client, ClientError};
pub use config::{ConfigReport, ConfigStatus, ConfigValue, ConfigWatch};
pub use device::DeviceSettings;
pub use error::{ControlError, ErrorCode, one_line};
pub use events::{EVENT_KINDS, EventKind};
pub use job_settings::{Contradiction, JobSettings};
pub use layers::{Bounds, Capped, InForce, Layer, in_force, text_of};
pub use name::{BadName, NAME_MAX_BYTES, check_name, name_from_command};
pub use profile::{IterationSource, Profile, SoloSource};
pub use report::{
    ArbiterStatus, ContainerStatus, DeviceBytes, DeviceStatus, EscapedProcess, Event, JobDevice,
    JobState, JobStatus, ProcessStatus, Registered, Reloaded, UnmanagedProcess,
};
pub use request::{Change, JobSpec, OwnFile, Reply, Request};
pub use residency::{
    JobMoved, MoveOutcome, Moved, Moves, Pressure, PressureLevel, Residence, ResidenceState,
};
pub use resize::{Resize, ResizeStatus};
pub use setting::{Setting, Settings};
pub use size::{MemLimit, SizeError, exact_bytes, parse_bytes, short_bytes};
pub use span::{BadSpan, Span, parse_span, short_span};
pub use timeline::{SpanKind, TIMELINE_MOST, Timeline, TimelineJob, TimelineSpan};
#[doc(hidden)]
pub use utoipa;
pub use values::{
    BadDevice, BadPolicyText, Class, Deadline, DeviceSelector, FailMode, Misbehaviour, OnRefusal,
    Overflow, Parameter, PolicyChoice, SliceMode, UnknownWord,
};

/// Raised when an old peer would misunderstand a new one.
pub const PROTOCOL_MAJOR: u32 = 2;
/// Raised when something was added that an old peer may ignore.
pub const PROTOCOL_MINOR: u32 = 4;

#[cfg(test)]
testbed::starts_clean!();
