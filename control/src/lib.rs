//! The operator's side of the arbiter: what can be asked, what is answered, and where the socket
//! is.
//!
//! Requests travel as HTTP over a Unix socket; `docs/reference/api.md` describes them. The cluster
//! hook and its nodes use the same types. This crate knows nothing of shared memory, of CUDA, or of
//! how a decision is made; it keeps serde out of tenants, which never link it.
//!
//! Compatibility: a version of the API has a path of its own (`/v1`), to which operations, and
//! fields of answers, are only added. A reader ignores fields that it does not know, and missing
//! ones take their default. An arbiter refuses fields of a request that it does not know, so that
//! the client sends none that say nothing.

mod client;
mod config;
mod device;
pub mod environment;
mod error;
mod events;
mod groups;
mod http;
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
#[cfg(feature = "stand-in")]
#[doc(hidden)]
pub mod stand_in;
mod timeline;
mod values;

pub use client::{Client, ClientError};
pub use config::{ConfigReport, ConfigStatus, ConfigValue, ConfigWatch};
pub use device::DeviceSettings;
pub use error::{ControlError, ErrorCode, one_line};
pub use events::{EVENT_KINDS, EventKind};
pub use groups::{
    Acquire, Acquired, DEFAULT_GROUP, GiveUp, GroupMember, GroupState, GroupStatus, Turn, Yielded,
};
pub use job_settings::{Contradiction, JobSettings};
pub use layers::{Bounds, Capped, InForce, Layer, in_force, text_of};
pub use name::{BadName, NAME_MAX_BYTES, check_name, name_from_command};
pub use profile::{IterationSource, Profile, SoloSource};
pub use report::{
    ArbiterStatus, ContainerStatus, DeviceBytes, DeviceStatus, EscapedProcess, Event, JobDevice,
    JobState, JobStatus, LatencyStatus, ProcessStatus, Registered, Reloaded, UnmanagedProcess,
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

#[cfg(test)]
testbed::starts_clean!();
