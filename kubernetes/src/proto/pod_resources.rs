//! `v1` of the API that says which container has which device.
//!
//! Source: `k8s.io/kubelet/pkg/apis/podresources/v1/api.proto` of Kubernetes 1.36.

pub const LIST: &str = "/v1.PodResourcesLister/List";

#[derive(Clone, PartialEq, prost::Message)]
pub struct ListRequest {}

#[derive(Clone, PartialEq, prost::Message)]
pub struct ListResponse {
    #[prost(message, repeated, tag = "1")]
    pub pod_resources: Vec<PodResources>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct PodResources {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, tag = "2")]
    pub namespace: String,
    #[prost(message, repeated, tag = "3")]
    pub containers: Vec<ContainerResources>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct ContainerResources {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(message, repeated, tag = "2")]
    pub devices: Vec<ContainerDevices>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct ContainerDevices {
    #[prost(string, tag = "1")]
    pub resource_name: String,
    #[prost(string, repeated, tag = "2")]
    pub device_ids: Vec<String>,
}
