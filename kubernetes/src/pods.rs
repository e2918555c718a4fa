//! Pods of this node: who has which units, and what their annotations ask for.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Value, json};

use crate::api::{Api, ApiError, Patch, is_name};
use crate::grpc::Client;
use crate::proto::pod_resources::{LIST, ListRequest, ListResponse};
use crate::{RESOURCE, SHARE_ANNOTATION};

/// What became of the share that a pod's annotation asks for; for people and scripts.
pub const STATUS_ANNOTATION: &str = "sublet.dev/status";
/// TIMEOUT: the kubelet answers from memory.
const PATIENCE: Duration = Duration::from_secs(10);

/// A pod.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Pod {
    pub namespace: String,
    pub name: String,
}

impl Pod {
    fn path(&self) -> Option<String> {
        (is_name(&self.namespace) && is_name(&self.name))
            .then(|| format!("/api/v1/namespaces/{}/pods/{}", self.namespace, self.name))
    }

    /// For people.
    pub fn title(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }
}

/// The kubelet's list of who has what.
#[derive(Debug, Clone)]
pub struct Kubelet {
    /// `pod-resources/kubelet.sock`
    pub socket: PathBuf,
}

impl Kubelet {
    /// The pod of each unit; `None`: the kubelet does not say.
    pub async fn owners(&self) -> Option<BTreeMap<String, Pod>> {
        let mut kubelet = Client::connect(&self.socket).await.ok()?;
        let list: ListResponse = kubelet.ask(LIST, ListRequest {}, PATIENCE).await.ok()?;
        let mut owners = BTreeMap::new();
        for pod in list.pod_resources {
            let owner = Pod {
                namespace: pod.namespace,
                name: pod.name,
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

/// The share that annotations ask for; `None`: they do not say.
///
/// # Errors
/// What is written there, and what to write instead.
pub fn share_asked(annotations: &Value) -> Result<Option<f64>, String> {
    let Some(text) = annotations.get(SHARE_ANNOTATION).and_then(Value::as_str) else {
        return Ok(None);
    };
    let short: String = text.chars().take(40).collect();
    let wrong = || {
        format!(
            "{SHARE_ANNOTATION} is `{short}`: write a part of the device above 0 and up to 1, such as 0.5, or a percentage"
        )
    };
    let (number, divisor) = match text.trim().strip_suffix('%') {
        Some(number) => (number, 100.0),
        None => (text.trim(), 1.0),
    };
    let plain = !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit() || b == b'.');
    match number.parse::<f64>() {
        Ok(share) if plain && share > 0.0 && share / divisor <= 1.0 => Ok(Some(share / divisor)),
        _ => Err(wrong()),
    }
}

/// A pod's annotations; an empty object where it has none, `None` where there is no such pod.
///
/// # Errors
/// [`ApiError`]
pub fn annotations(api: &Api, pod: &Pod) -> Result<Option<Value>, ApiError> {
    let Some(path) = pod.path() else {
        return Ok(None);
    };
    let Some(object) = api.get(&path)? else {
        return Ok(None);
    };
    let said = object.pointer("/metadata/annotations").cloned();
    Ok(Some(said.unwrap_or_else(|| json!({}))))
}

/// Writes annotations on a pod.
///
/// # Errors
/// [`ApiError`]
pub fn annotate(api: &Api, pod: &Pod, what: &[(&str, &str)]) -> Result<(), ApiError> {
    let Some(path) = pod.path() else {
        return Ok(());
    };
    let what: BTreeMap<&str, &str> = what.iter().copied().collect();
    let body = json!({"metadata": {"annotations": what}});
    api.patch(&path, Patch::Merge, &body).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_annotation_is_a_share_or_says_why_not() {
        let asked = |text: &str| share_asked(&json!({SHARE_ANNOTATION: text}));
        assert_eq!(asked("0.25"), Ok(Some(0.25)));
        assert_eq!(asked(" 40% "), Ok(Some(0.4)));
        assert_eq!(share_asked(&json!({})), Ok(None));
        assert_eq!(share_asked(&Value::Null), Ok(None));
        for text in ["", "0", "1.1", "101%", "-0.1", "NaN", "inf", "half", "1e-3"] {
            let error = asked(text).unwrap_err();
            assert!(error.contains("such as 0.5"), "{text}: {error}");
        }
        assert!(asked(&"9".repeat(5000)).unwrap_err().len() < 300);
    }
}
