//! Between a Kubernetes node and its arbiter.
//!
//! Kubernetes decides where; the arbiter enforces. What is here translates: calls of a kubelet or a
//! container runtime into registrations, devices of the arbiter into resources of the node, and a
//! pod's wishes into an answer for its scheduler. It knows no slices and no policy.
//!
//! Runs beside the kubelet, in processes of its own: nothing of it, no runtime of futures either,
//! is in the arbiter or in a job.

/// A line on stderr; where that is gone there is nobody to read it.
macro_rules! say {
    ($($what:tt)*) => {{
        use std::io::Write as _;
        let _ = writeln!(std::io::stderr(), "sublet: {}", format_args!($($what)*));
    }};
}
pub(crate) use say;

pub mod advice;
pub mod api;
pub mod authority;
pub mod cdi;
pub mod claim;
pub mod container;
pub mod device_plugin;
pub mod dra;
pub mod event;
pub mod extender;
pub mod files;
pub mod fit;
pub mod follow;
pub mod grpc;
pub mod holder;
pub mod http_server;
pub mod node;
pub mod nri;
pub mod objects;
pub mod picture;
pub mod pods;
pub mod proto;
pub mod quantity;
pub mod records;
pub mod registration;
pub mod serve;
pub mod shares;
pub mod slices;
pub mod sockets;
pub mod timeslice;
pub mod ttrpc;
pub mod units;
pub mod waiting;

/// Name of the driver, and domain of every name that is ours.
pub const DRIVER: &str = "sublet.dev";
/// What a pod asks the device plugin for: GiB of device memory on one GPU.
pub const RESOURCE: &str = "sublet.dev/gpu-mem-gib";
/// Part of the device's time, between 0 and 1.
pub const SHARE_ANNOTATION: &str = "sublet.dev/share";
/// Memory on the GPU that a container gets by the NRI plugin, such as 8Gi.
pub const MEMORY_ANNOTATION: &str = "sublet.dev/gpu-mem";
/// What a resize of the container changes as well: `cpu`, `memory`, or both.
pub const RESIZE_ANNOTATION: &str = "sublet.dev/resize";
/// The device that the extender chose, by UUID; pods without it take the kubelet's.
pub const DEVICE_ANNOTATION: &str = "sublet.dev/gpu";
/// Why it chose so; for people.
pub const DECISION_ANNOTATION: &str = "sublet.dev/decision";
/// What the cluster hook expects there: time of an iteration against one alone, from 1.
pub const SLOWDOWN_ANNOTATION: &str = "sublet.dev/expected-slowdown";
/// How sure it is of that, between 0 and 1.
pub const CONFIDENCE_ANNOTATION: &str = "sublet.dev/confidence";
/// What kind of job a pod is (model and batch size): the key for measurements of pairs.
pub const KIND_ANNOTATION: &str = "sublet.dev/kind";
/// What the node's arbiter calls the pod's job; the device plugin writes it.
pub const JOB_ANNOTATION: &str = "sublet.dev/job";

#[cfg(test)]
testbed::starts_clean!();
