//! `v1` of the API by which a kubelet asks a socket in `plugins_registry` what it is.
//!
//! Source: `k8s.io/kubelet/pkg/apis/pluginregistration/v1/api.proto` of Kubernetes 1.36.

pub const INFO: &str = "/pluginregistration.Registration/GetInfo";
pub const STATUS: &str = "/pluginregistration.Registration/NotifyRegistrationStatus";
/// `type` of a DRA driver.
pub const DRA_PLUGIN: &str = "DRAPlugin";

#[derive(Clone, PartialEq, prost::Message)]
pub struct InfoRequest {}

#[derive(Clone, PartialEq, prost::Message)]
pub struct PluginInfo {
    #[prost(string, tag = "1")]
    pub r#type: String,
    #[prost(string, tag = "2")]
    pub name: String,
    #[prost(string, tag = "3")]
    pub endpoint: String,
    #[prost(string, repeated, tag = "4")]
    pub supported_versions: Vec<String>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct RegistrationStatus {
    #[prost(bool, tag = "1")]
    pub plugin_registered: bool,
    #[prost(string, tag = "2")]
    pub error: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct RegistrationStatusResponse {}
