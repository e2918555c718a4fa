//! The host daemon: admits jobs, meters their memory and decides which of them holds a device.
//!
//! One thread, one loop ([`serve`](Arbiter::serve)): `reactor` waits, `serve` turns events into
//! calls, `attach` lets clients in, `client_exit` lets them go, `lifecycle` sees jobs through,
//! `operator` answers requests, `device_control` those about devices and the quota file, `dispatch`
//! runs the fast loop of each device, `residency` moves the memory of jobs, `violations` deals with
//! jobs that harm the others, `latency` reports targets that are not met, `dormant` with those of
//! which only waiting processes are left, `escaped` with processes that got out of their job's
//! limits, `group_turns` with jobs that take turns by themselves, `behalf` with jobs that an engine
//! such as Slurm registers for its users. Their state is in parts with private fields, which the
//! first paragraph of each module describes: among them `door` and `clients`, `ledger`,
//! `outsiders`, `persistence`, `rulebook`, `schedulers`, `profile` and `slow_work`.
//!
//! Other threads ask NVML (`nvml`), search for iterations, find out which processes belong to which
//! job (`census`), write what goes to a disk (`writer`, `state`), look up login names (`names`) and
//! read the quota file again (`background`): the loop waits for none of them, and each rings a bell
//! (`bell`) when it has something to say. Clients and operators are strangers: what they send is
//! bounded, checked and copied out in `peer`, `channel::wire` and `api`. Who they are
//! and where they run (`who`, `container`) is the kernel's word, asked for when they come in.

mod admission;
mod allowances;
pub mod api;
mod attach;
mod background;
mod bearer;
mod behalf;
mod bell;
mod census;
mod claiming;
mod claims;
mod client_exit;
mod clients;
mod clock;
mod container;
mod container_names;
mod convert;
mod deaths;
mod descriptors;
mod desk;
mod device_control;
mod devices;
mod disclosure;
mod discovery;
mod dispatch;
mod door;
mod dormant;
mod ended;
mod escaped;
mod ground;
mod group_turns;
mod groups;
mod inheritance;
mod job_terms;
mod journal;
mod latency;
mod ledger;
mod lifecycle;
mod lifetime;
mod names;
pub mod nvml;
mod operator;
mod options;
mod outsiders;
mod parked;
mod peer;
mod persistence;
mod premises;
mod profile;
mod reactor;
mod refusal;
mod relocation;
mod renewal;
mod residency;
mod residency_moves;
mod residency_survey;
mod resize;
mod rulebook;
mod rules;
mod schedulers;
mod serve;
mod slow_work;
mod space;
mod space_questions;
mod spare;
mod spec;
mod state;
mod status;
mod supervisor;
mod suspicions;
mod tally;
mod tenant;
mod terms;
mod timeline;
mod timelines;
mod turns;
mod unsaved;
mod usage;
mod violations;
mod walk_in;
mod watch;
mod weights;
mod who;
mod writer;

pub use api::ApiListener;
pub use clock::dilate;
pub use convert::check_policy;
pub use inheritance::put_back as put_back_inherited;
pub use lifetime::Stopper;
pub use names::LookUp;
pub use options::{
    DeviceRule, JOB_PROCESSES, JobRules, Layers, Options, Reload, ResidencyRule, Rules, Sections,
    Subject, Watched,
};
pub use refusal::Ceiling;
pub use serve::{Arbiter, Error, hold_signals, run};
pub use supervisor::Handed;
pub use writer::{Lost, Sink, Writer};

#[cfg(test)]
mod tests_virtual_time;

#[cfg(test)]
testbed::starts_clean!();
