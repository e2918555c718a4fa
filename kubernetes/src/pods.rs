//! Pods of this node: who has which units, by the kubelet, and what pods say, by the API server.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::json;

use crate::DEVICE_ANNOTATION;
use crate::RESOURCE;
use crate::api::{Api, ApiError, Patch, is_name};
use crate::grpc::Client;
use crate::objects::Object;
use crate::proto::pod_resources::{LIST, ListRequest, ListResponse};
use crate::records::{Pod, Record};

/// What became of the share that a pod's annotation asks for; for people and scripts.
pub const STATUS_ANNOTATION: &str = "sublet.dev/status";
/// TIMEOUT: the kubelet answers from memory.
const PATIENCE: Duration = Duration::from_secs(10);

/// A container that has units, as the kubelet lists it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Owner {
    /// Without its uid: the kubelet's list does not have it.
    pub pod: Pod,
    pub container: String,
}

/// Who has each unit.
pub type Owners = BTreeMap<String, Owner>;

/// Whether a pod has units already: the kubelet lists some for one that is called so, and they are
/// not known to be another's, such as its predecessor's.
pub fn has_units(pod: &Pod, owners: &Owners, records: &[Record]) -> bool {
    owners.iter().any(|(unit, owner)| {
        let record = records.iter().find(|record| record.units.contains(unit));
        let known = record.and_then(Record::settled);
        owner.pod.is_called_as(pod) && known.is_none_or(|known| known == pod)
    })
}

/// The kubelet's list of who has what.
#[derive(Debug, Clone)]
pub struct Kubelet {
    /// `pod-resources/kubelet.sock`
    pub socket: PathBuf,
}

impl Kubelet {
    /// The container of each unit.
    ///
    /// # Errors
    /// Why the kubelet does not say, for people: nothing is known of any unit then.
    pub async fn owners(&self) -> Result<Owners, String> {
        let failed = |error: &dyn Display| {
            format!(
                "the kubelet at {} does not say which pod has which units: {error}",
                self.socket.display()
            )
        };
        let connected = tokio::time::timeout(PATIENCE, Client::connect(&self.socket)).await;
        let mut kubelet = connected
            .map_err(|_| failed(&"it does not answer"))?
            .map_err(|error| failed(&error))?;
        let asked = kubelet.ask(LIST, ListRequest {}, PATIENCE).await;
        let list: ListResponse = asked.map_err(|status| failed(&status.message()))?;
        let mut owners = BTreeMap::new();
        for pod in list.pod_resources {
            let owner = Pod {
                namespace: pod.namespace,
                name: pod.name,
                uid: String::new(),
            };
            for container in pod.containers {
                let owner = Owner {
                    pod: owner.clone(),
                    container: container.name,
                };
                let devices = container.devices.into_iter();
                for devices in devices.filter(|one| one.resource_name == RESOURCE) {
                    let units = devices.device_ids.into_iter();
                    owners.extend(units.map(|unit| (unit, owner.clone())));
                }
            }
        }
        Ok(owners)
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
        let Some(object) = self.api.read::<Object>(&path)? else {
            return Ok(true);
        };
        let another = !pod.uid.is_empty() && object.metadata.uid != pod.uid;
        Ok(another || object.has_ended() || object.spec.node_name != self.node)
    }

    /// The pod that is called so and is on this node now; `None`: there is none.
    ///
    /// # Errors
    /// [`ApiError`]
    pub fn present(&self, pod: &Pod) -> Result<Option<Object>, ApiError> {
        let Some(path) = path(pod) else {
            return Ok(None);
        };
        let object = self.api.read::<Object>(&path)?;
        Ok(object.filter(|object| object.spec.node_name == self.node && object.memory_gib() > 0))
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
    pub fn chosen(
        &self,
        owners: &Owners,
        records: &[Record],
    ) -> Result<Vec<(String, u64)>, ApiError> {
        Ok(waiting(&self.pods()?, owners, records))
    }
}

/// Of pods whose units the kubelet has not given yet: those that have them are not asked about.
fn waiting(pods: &[Object], owners: &Owners, records: &[Record]) -> Vec<(String, u64)> {
    let waiting = pods
        .iter()
        .filter(|pod| pod.status.phase == "Pending" && !has_units(&pod.pod(), owners, records));
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
    fn a_kubelet_that_does_not_list_is_named_with_the_reason() {
        let dir = tempfile::tempdir().unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let ask = |name: &str| {
            let socket = dir.path().join(name);
            runtime.block_on(async { Kubelet { socket }.owners().await.unwrap_err() })
        };
        let missing = ask("none.sock");
        assert!(
            missing.contains("none.sock does not say which pod has which units: No such file"),
            "{missing}"
        );
        // Who hangs up, and so says nothing.
        let listener =
            std::os::unix::net::UnixListener::bind(dir.path().join("mute.sock")).unwrap();
        std::thread::spawn(move || listener.incoming().for_each(drop));
        let mute = ask("mute.sock");
        assert!(mute.contains("mute.sock does not say"), "{mute}");
    }

    #[test]
    fn a_choice_is_for_a_pod_that_has_no_units_yet() {
        let pod = |name: &str, phase: &str, device: &str| -> Object {
            serde_json::from_value(json!({
                "metadata": {
                    "name": name, "namespace": "d", "uid": "2",
                    "annotations": {DEVICE_ANNOTATION: device},
                },
                "spec": {"containers": [{"resources": {"limits": {RESOURCE: "3"}}}]},
                "status": {"phase": phase},
            }))
            .unwrap()
        };
        let called = |name: &str, uid: &str| Pod {
            namespace: "d".into(),
            name: name.into(),
            uid: uid.into(),
        };
        let owner = |name: &str| Owner {
            pod: called(name, ""),
            container: "c".into(),
        };
        let owners = Owners::from([
            ("A::0".into(), owner("has")),
            ("A::1".into(), owner("again")),
            ("A::2".into(), owner("unsettled")),
        ]);
        let record = |unit: &str, pod: Pod| Record {
            units: vec![unit.into()],
            pod: Some(pod),
            ..Record::default()
        };
        let records = [
            record("A::0", called("has", "2")),
            record("A::1", called("again", "1")),
            record("A::2", called("unsettled", "")),
        ];
        let pods = [
            pod("has", "Pending", "A"),
            pod("runs", "Running", "A"),
            pod("waits", "Pending", "B"),
            pod("again", "Pending", "C"),
            pod("unsettled", "Pending", "D"),
        ];
        let expected = [("B".to_owned(), 3), ("C".to_owned(), 3)];
        assert_eq!(
            waiting(&pods, &owners, &records),
            expected,
            "`again` is made anew"
        );
    }
}
