//! The live hook: what the simulator does in virtual time, done to real jobs on real nodes.
//!
//! * [`wire`] and [`placement`]: the messages, JSON over HTTP; [`http`]: connections, their bounds
//!   and deadlines; [`auth`]: how both sides authenticate; [`openapi`]: the document.
//! * [`store`]: what survives `kill -9`; [`records`]: in which form.
//! * [`hook`]: the state machine around the same [`policy::cluster::Scheduler`]; [`adapt`]: what
//!   live nodes add to pure policies; [`rounds`]: round allocators in real time.
//! * [`routes`]: what can be asked; [`service`]: token, lock, ticks; [`clock`]: what time it is.
//! * [`slurm`]: Slurm's queue and nodes, for a packer that asks.
//! * [`agent`]: a node's side: reports, orders; [`engine`]: what starts jobs there; [`runner`]: the
//!   parent of one job; [`process`] and [`confine`]: its processes; [`waits`]: how long a demand
//!   would wait.

pub mod adapt;
pub mod agent;
pub mod auth;
pub mod clock;
pub mod confine;
pub mod engine;
pub mod facts;
pub mod hook;
pub mod http;
pub mod openapi;
pub mod placement;
pub mod process;
pub mod records;
pub mod rounds;
pub mod routes;
pub mod runner;
pub mod service;
pub mod slurm;
pub mod store;
pub mod waits;
pub mod wire;
