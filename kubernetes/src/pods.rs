//! Pods of this node: who has which units, by the kubelet, and what pods say, by the API server.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::json;

use crate::DEVICE_ANNOTATION;
use crate::RESOURCE;
use crate::api::{Api, ApiError, Patch, is_name};
use crate::grpc::Client;
use crate::objects::Object;
use crate::proto::pod_resources::{LIST, ListRequest, ListResponse};
use crate::records::Pod;

/// What became of the share that a pod's annotation asks for; for people and scripts.
pub const STATUS_ANNOTATION: &str = "sublet.dev/status";
/// TIMEOUT: the kubelet answers from memory.
const PATIENCE: Duration = Duration::from_secs(10);

/// Who has each unit.
pub type Owners = BTreeMap<String, Pod>;

/// The kubelet's list of who has what.
#[derive(Debug, Clone)]
pub struct Kubelet {
    /// `pod-resources/kubelet.sock`
    pub socket: PathBuf,
}

impl Kubelet {
    /// The pod of each unit, without its uid; `None`: the kubelet does not say.
    pub async fn owners(&self) -> Option<Owners> {
        let mut kubelet = Client::connect(&self.socket).await.ok()?;
        let list: ListResponse = kubelet.ask(LIST, ListRequest {}, PATIENCE).await.ok()?;
        let mut owners = BTreeMap::new();
        for pod in list.pod_resources {
            let owner = Pod {
                namespace: pod.namespace,
                name: pod.name,
                uid: String::new(),
            };
            let devices = pod.containers.into_iter().flat_map(|one| one.devices);
            for devices in devices.filter(|one| one.resource_name == RESOURCE) {
                let units = devices.device_ids.into_iter();
                owners.extend(units.map(|unit| (unit, owner.clone())));
            }
        }
        Some(owners)
    }
}

/// This node as the API server knows it.
#[derive(Debug)]
pub struct Cluster {
    pub api: Api,
    /// Name of the node.
    pub node: String,
}

impl Cluster {
    /// Pods that were sent to this node and ask for units, as a server's memory has them: some
    /// seconds old at the most, and cheap to ask for.
    ///
    /// # Errors
    /// [`ApiError`]
    pub fn pods(&self) -> Result<Vec<Object>, ApiError> {
        let query = format!(
            "&resourceVersion=0&fieldSelector=spec.nodeName%3D{}",
            self.node
        );
        let pods: Vec<Object> = self.api.list("/api/v1/pods", &query)?;
        let ours = pods
            .into_iter()
            .filter(|pod| pod.spec.node_name == self.node && pod.memory_gib() > 0);
        Ok(ours.collect())
    }

    /// Whether a pod is no more, or has ended: as of now.
    ///
    /// # Errors
    /// [`ApiError`]
    pub fn is_over(&self, pod: &Pod) -> Result<bool, ApiError> {
        let Some(path) = path(pod) else {
            return Ok(true);
        };
        let Some(object) = self.api.get(&path)? else {
            return Ok(true);
        };
        let object: Object = serde_json::from_value(object).unwrap_or_default();
        let another = !pod.uid.is_empty() && object.metadata.uid != pod.uid;
        Ok(another || object.has_ended() || object.spec.node_name != self.node)
    }

    /// Writes annotations on a pod, if it is still that one.
    ///
    /// # Errors
    /// [`ApiError`]
    pub fn annotate(&self, pod: &Pod, what: &BTreeMap<&str, &str>) -> Result<(), ApiError> {
        let Some(path) = path(pod) else {
            return Ok(());
        };
        let mut metadata = json!({"annotations": what});
        if !pod.uid.is_empty() {
            metadata["uid"] = json!(pod.uid);
        }
        let body = json!({"metadata": metadata});
        self.api.patch(&path, Patch::Merge, &body).map(drop)
    }

    /// Devices that were chosen for pods that have no units yet, with their GiB.
    ///
    /// # Errors
    /// [`ApiError`]
    pub fn chosen(&self, owners: &Owners) -> Result<Vec<(String, u64)>, ApiError> {
        Ok(waiting(&self.pods()?, owners))
    }
}

/// Of pods whose units the kubelet has not given yet: those that have them are not asked about.
fn waiting(pods: &[Object], owners: &Owners) -> Vec<(String, u64)> {
    let waiting = pods.iter().filter(|pod| {
        pod.status.phase == "Pending" && !owners.values().any(|of| of.is_called_as(&pod.pod()))
    });
    let chosen = waiting.filter_map(|pod| {
        let device = pod.annotation(DEVICE_ANNOTATION)?;
        Some((device.to_owned(), pod.memory_gib()))
    });
    chosen.collect()
}

fn path(pod: &Pod) -> Option<String> {
    (is_name(&pod.namespace) && is_name(&pod.name))
        .then(|| format!("/api/v1/namespaces/{}/pods/{}", pod.namespace, pod.name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_is_for_a_pod_that_has_no_units_yet() {
        let pod = |name: &str, phase: &str, device: &str| -> Object {
            serde_json::from_value(json!({
                "metadata": {
                    "name": name, "namespace": "d",
                    "annotations": {DEVICE_ANNOTATION: device},
                },
                "spec": {"containers": [{"resources": {"limits": {RESOURCE: "3"}}}]},
                "status": {"phase": phase},
            }))
            .unwrap()
        };
        let has = Pod {
            namespace: "d".into(),
            name: "has".into(),
            uid: String::new(),
        };
        let owners = Owners::from([("A::0".into(), has)]);
        let pods = [
            pod("has", "Pending", "A"),
            pod("runs", "Running", "A"),
            pod("waits", "Pending", "B"),
        ];
        assert_eq!(waiting(&pods, &owners), [("B".to_owned(), 3)]);
    }
}
