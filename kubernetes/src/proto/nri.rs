//! NRI, by which a container runtime asks its plugins what a container is to get (`v1alpha1`), and
//! ttrpc's own two messages.
//!
//! Sources: `pkg/api/api.proto` of github.com/containerd/nri (0.12), `request.proto` of
//! github.com/containerd/ttrpc. The runtime serves `Runtime`, a plugin `Plugin`.

use std::collections::HashMap;

pub const RUNTIME: &str = "nri.pkg.api.v1alpha1.Runtime";
pub const PLUGIN: &str = "nri.pkg.api.v1alpha1.Plugin";

/// Events, by the number of their bit in [`ConfigureResponse::events`].
pub const CREATE_CONTAINER: i32 = 4;
pub const POST_CREATE_CONTAINER: i32 = 5;
pub const UPDATE_CONTAINER: i32 = 8;
pub const STOP_CONTAINER: i32 = 10;
pub const REMOVE_CONTAINER: i32 = 11;

/// State of a container that has ended.
pub const STOPPED: i32 = 4;

/// ttrpc: a call.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Request {
    #[prost(string, tag = "1")]
    pub service: String,
    #[prost(string, tag = "2")]
    pub method: String,
    #[prost(bytes = "vec", tag = "3")]
    pub payload: Vec<u8>,
    #[prost(int64, tag = "4")]
    pub timeout_nano: i64,
}

/// ttrpc: what it is answered.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Response {
    #[prost(message, optional, tag = "1")]
    pub status: Option<Status>,
    #[prost(bytes = "vec", tag = "2")]
    pub payload: Vec<u8>,
}

/// `google.rpc.Status`; the codes are gRPC's.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Status {
    #[prost(int32, tag = "1")]
    pub code: i32,
    #[prost(string, tag = "2")]
    pub message: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Empty {}

#[derive(Clone, PartialEq, prost::Message)]
pub struct RegisterPluginRequest {
    #[prost(string, tag = "1")]
    pub plugin_name: String,
    /// Two digits: plugins are called in this order.
    #[prost(string, tag = "2")]
    pub plugin_idx: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct ConfigureRequest {
    #[prost(string, tag = "2")]
    pub runtime_name: String,
    #[prost(string, tag = "3")]
    pub runtime_version: String,
    /// In milliseconds; 0 where the runtime is too old to say.
    #[prost(int64, tag = "5")]
    pub request_timeout: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct ConfigureResponse {
    /// A bit for each event, that of the first one the lowest.
    #[prost(int32, tag = "2")]
    pub events: i32,
    /// In milliseconds; runtimes that are older than this field use their own.
    #[prost(int64, tag = "3")]
    pub request_timeout: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct SynchronizeRequest {
    #[prost(message, repeated, tag = "1")]
    pub pods: Vec<PodSandbox>,
    #[prost(message, repeated, tag = "2")]
    pub containers: Vec<Container>,
    /// Others follow in a call of their own.
    #[prost(bool, tag = "3")]
    pub more: bool,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct SynchronizeResponse {
    #[prost(bool, tag = "2")]
    pub more: bool,
}

/// `CreateContainer`, `StopContainer`, and others that are about one container.
#[derive(Clone, PartialEq, prost::Message)]
pub struct ContainerRequest {
    #[prost(message, optional, tag = "1")]
    pub pod: Option<PodSandbox>,
    #[prost(message, optional, tag = "2")]
    pub container: Option<Container>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct CreateContainerResponse {
    #[prost(message, optional, tag = "1")]
    pub adjust: Option<ContainerAdjustment>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct UpdateContainerRequest {
    #[prost(message, optional, tag = "1")]
    pub pod: Option<PodSandbox>,
    #[prost(message, optional, tag = "2")]
    pub container: Option<Container>,
    #[prost(message, optional, tag = "3")]
    pub linux_resources: Option<LinuxResources>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct StateChangeEvent {
    #[prost(int32, tag = "1")]
    pub event: i32,
    #[prost(message, optional, tag = "2")]
    pub pod: Option<PodSandbox>,
    #[prost(message, optional, tag = "3")]
    pub container: Option<Container>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct PodSandbox {
    #[prost(string, tag = "1")]
    pub id: String,
    #[prost(string, tag = "2")]
    pub name: String,
    #[prost(string, tag = "3")]
    pub uid: String,
    #[prost(string, tag = "4")]
    pub namespace: String,
    #[prost(map = "string, string", tag = "6")]
    pub annotations: HashMap<String, String>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Container {
    #[prost(string, tag = "1")]
    pub id: String,
    #[prost(string, tag = "2")]
    pub pod_sandbox_id: String,
    #[prost(string, tag = "3")]
    pub name: String,
    #[prost(int32, tag = "4")]
    pub state: i32,
    /// `NAME=value`
    #[prost(string, repeated, tag = "8")]
    pub env: Vec<String>,
    #[prost(message, optional, tag = "11")]
    pub linux: Option<LinuxContainer>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct LinuxContainer {
    #[prost(message, optional, tag = "3")]
    pub resources: Option<LinuxResources>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct LinuxResources {
    #[prost(message, optional, tag = "1")]
    pub memory: Option<LinuxMemory>,
    #[prost(message, optional, tag = "2")]
    pub cpu: Option<LinuxCpu>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct LinuxMemory {
    #[prost(message, optional, tag = "1")]
    pub limit: Option<Int64>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct LinuxCpu {
    #[prost(message, optional, tag = "1")]
    pub shares: Option<UInt64>,
    #[prost(message, optional, tag = "2")]
    pub quota: Option<Int64>,
    #[prost(message, optional, tag = "3")]
    pub period: Option<UInt64>,
}

/// `OptionalInt64`
#[derive(Clone, PartialEq, prost::Message)]
pub struct Int64 {
    #[prost(int64, tag = "1")]
    pub value: i64,
}

/// `OptionalUInt64`
#[derive(Clone, PartialEq, prost::Message)]
pub struct UInt64 {
    #[prost(uint64, tag = "1")]
    pub value: u64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct ContainerAdjustment {
    #[prost(message, repeated, tag = "3")]
    pub mounts: Vec<Mount>,
    #[prost(message, repeated, tag = "4")]
    pub env: Vec<KeyValue>,
    #[prost(message, optional, tag = "6")]
    pub linux: Option<LinuxContainerAdjustment>,
    #[prost(message, repeated, tag = "8")]
    pub cdi_devices: Vec<CdiDevice>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Mount {
    #[prost(string, tag = "1")]
    pub destination: String,
    #[prost(string, tag = "2")]
    pub r#type: String,
    #[prost(string, tag = "3")]
    pub source: String,
    #[prost(string, repeated, tag = "4")]
    pub options: Vec<String>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct KeyValue {
    #[prost(string, tag = "1")]
    pub key: String,
    #[prost(string, tag = "2")]
    pub value: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct LinuxContainerAdjustment {
    #[prost(message, repeated, tag = "1")]
    pub devices: Vec<LinuxDevice>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct LinuxDevice {
    #[prost(string, tag = "1")]
    pub path: String,
    #[prost(string, tag = "2")]
    pub r#type: String,
    #[prost(int64, tag = "3")]
    pub major: i64,
    #[prost(int64, tag = "4")]
    pub minor: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct CdiDevice {
    #[prost(string, tag = "1")]
    pub name: String,
}
