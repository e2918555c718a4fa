//! `v1` of the API between a kubelet and a DRA driver.
//!
//! Source: `k8s.io/kubelet/pkg/apis/dra/v1/api.proto` of Kubernetes 1.36; `share_id` came with
//! consumable capacity (1.34).

use std::collections::HashMap;

/// As a plugin's registration names it.
pub const VERSION: &str = "v1.DRAPlugin";
pub const PREPARE: &str = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources";
pub const UNPREPARE: &str = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodeUnprepareResources";

#[derive(Clone, PartialEq, Eq, Hash, prost::Message)]
pub struct Claim {
    #[prost(string, tag = "1")]
    pub namespace: String,
    #[prost(string, tag = "2")]
    pub uid: String,
    #[prost(string, tag = "3")]
    pub name: String,
}

/// Of either call.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Claims {
    #[prost(message, repeated, tag = "1")]
    pub claims: Vec<Claim>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct PrepareResponse {
    /// By the claim's uid.
    #[prost(map = "string, message", tag = "1")]
    pub claims: HashMap<String, Prepared>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Prepared {
    #[prost(message, repeated, tag = "1")]
    pub devices: Vec<Device>,
    /// Not empty: the claim could not be prepared.
    #[prost(string, tag = "2")]
    pub error: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Device {
    #[prost(string, repeated, tag = "1")]
    pub request_names: Vec<String>,
    #[prost(string, tag = "2")]
    pub pool_name: String,
    #[prost(string, tag = "3")]
    pub device_name: String,
    #[prost(string, repeated, tag = "4")]
    pub cdi_device_ids: Vec<String>,
    #[prost(string, optional, tag = "5")]
    pub share_id: Option<String>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct UnprepareResponse {
    /// By the claim's uid.
    #[prost(map = "string, message", tag = "1")]
    pub claims: HashMap<String, Unprepared>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Unprepared {
    /// Not empty: the claim is still prepared.
    #[prost(string, tag = "1")]
    pub error: String,
}
