//! Pods and nodes, as far as they are looked at, and what a pod asks for.

use std::collections::BTreeMap;

use control::kinds;
use control::setting::Kind as _;
use serde::Deserialize;

use crate::fit::Wish;
use crate::quantity::Quantity;
use crate::records::Pod;
use crate::{JOB_ANNOTATION, KIND_ANNOTATION, RESOURCE, SHARE_ANNOTATION};

/// Longest text that is read as a share.
const SHARE_CHARS: usize = 40;
/// Longest kind, in bytes: what a hook takes.
const KIND_BYTES: usize = 512;

/// An object.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(default)]
pub struct Object {
    pub metadata: Metadata,
    pub spec: PodSpec,
    pub status: PodStatus,
}

#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(default)]
pub struct Metadata {
    pub name: String,
    pub namespace: String,
    pub uid: String,
    pub annotations: Option<BTreeMap<String, String>>,
    #[serde(rename = "ownerReferences")]
    pub owner_references: Option<Vec<OwnerReference>>,
}

/// What has made an object.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(default)]
pub struct OwnerReference {
    pub name: String,
    pub controller: Option<bool>,
}

#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct PodSpec {
    pub node_name: String,
    pub containers: Vec<Container>,
    pub init_containers: Vec<Container>,
}

#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Container {
    pub resources: Resources,
    /// `Always` of an init container: it stays beside the others.
    pub restart_policy: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(default)]
pub struct Resources {
    pub limits: BTreeMap<String, serde_json::Value>,
}

#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(default)]
pub struct PodStatus {
    pub phase: String,
}

impl Container {
    /// Its units, of a GiB each. What is no amount no API server has taken: it counts as more than
    /// there is.
    fn units(&self) -> u64 {
        let Some(limit) = self.resources.limits.get(RESOURCE) else {
            return 0;
        };
        let text = match limit {
            serde_json::Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        let amount = Quantity::parse(&text).ok();
        amount.and_then(Quantity::bytes).unwrap_or(u64::MAX)
    }

    fn stays(&self) -> bool {
        self.restart_policy.as_deref() == Some("Always")
    }
}

impl Object {
    pub fn annotation(&self, name: &str) -> Option<&str> {
        let all = self.metadata.annotations.as_ref()?;
        all.get(name).map(String::as_str)
    }

    /// Who it is.
    pub fn pod(&self) -> Pod {
        Pod {
            namespace: self.metadata.namespace.clone(),
            name: self.metadata.name.clone(),
            uid: self.metadata.uid.clone(),
        }
    }

    /// Whether its containers have ended, and none will start.
    pub fn has_ended(&self) -> bool {
        matches!(self.status.phase.as_str(), "Succeeded" | "Failed")
    }

    /// Units of the containers that run beside each other, and of those that run before them.
    fn units(&self) -> (Vec<u64>, Vec<u64>) {
        let (beside, before): (Vec<_>, Vec<_>) =
            self.spec.init_containers.iter().partition(|c| c.stays());
        let asking = |all: Vec<&Container>| -> Vec<u64> {
            let units = all.into_iter().map(Container::units);
            units.filter(|units| *units > 0).collect()
        };
        let beside = beside.into_iter().chain(&self.spec.containers).collect();
        (asking(beside), asking(before))
    }

    /// GiB of device memory that a pod has from its start to its end, whatever else it says: init
    /// containers hand on what they had.
    pub fn memory_gib(&self) -> u64 {
        let (beside, before) = self.units();
        let together = beside.into_iter().fold(0, u64::saturating_add);
        before.into_iter().fold(together, u64::max)
    }

    /// The share that a pod's annotation asks for, 0: none; `None`: it does not say.
    ///
    /// # Errors
    /// What is written there, and what to write instead.
    pub fn share_asked(&self) -> Result<Option<f64>, String> {
        let Some(text) = self.annotation(SHARE_ANNOTATION) else {
            return Ok(None);
        };
        let short: String = text.chars().take(SHARE_CHARS).collect();
        let number = short.trim();
        let number = number.strip_suffix('%').unwrap_or(number);
        if short == text && number.parse() == Ok(0.0) {
            return Ok(Some(0.0));
        }
        match kinds::Share::parse(&short) {
            Ok(share) if short == text => Ok(Some(share)),
            Ok(_) => Err(format!(
                "{SHARE_ANNOTATION}: `{short}...` is longer than any share: write 0.5 or 50%"
            )),
            Err(error) => Err(format!("{SHARE_ANNOTATION}: {error}")),
        }
    }

    /// What a pod wants of a device; `None`: nothing of ours.
    ///
    /// # Errors
    /// What it asks for that cannot be.
    pub fn wish(&self) -> Result<Option<Wish>, String> {
        let memory_gib = self.memory_gib();
        if memory_gib == 0 {
            return Ok(None);
        }
        let (beside, before) = self.units();
        if beside.len() > 1 {
            return Err(format!(
                "{} containers of the pod ask for {RESOURCE}: one can, since a share and a device are chosen for a pod; use a pod for each, or claims",
                beside.len()
            ));
        }
        if before.iter().any(|units| *units != memory_gib) || beside.iter().any(|u| *u < memory_gib)
        {
            return Err(format!(
                "an init container asks for another number of {RESOURCE} than the container after it, which is given the same units: write the same number"
            ));
        }
        Ok(Some(Wish {
            share: self.share_asked()?.filter(|share| *share > 0.0),
            ..self.counts_as()
        }))
    }

    /// What a pod takes of a device. A share that cannot be read counts as none.
    pub fn counts_as(&self) -> Wish {
        Wish {
            name: self.pod().title(),
            kind: self.kind(),
            job: self.job().map(ToOwned::to_owned),
            memory_gib: self.memory_gib(),
            share: self
                .share_asked()
                .unwrap_or_default()
                .filter(|share| *share > 0.0),
        }
    }

    /// What the device plugin calls its job. A pod's owner can write that too: it is no more than
    /// a name.
    fn job(&self) -> Option<&str> {
        let said = self.annotation(JOB_ANNOTATION);
        said.filter(|job| (1..=KIND_BYTES).contains(&job.len()))
    }

    /// What kind of job it is: as its annotation says, else what made it, else itself.
    fn kind(&self) -> String {
        let said = self.annotation(KIND_ANNOTATION).map(str::trim);
        let said = said.filter(|kind| (1..=KIND_BYTES).contains(&kind.len()));
        if let Some(kind) = said {
            return kind.to_owned();
        }
        let Metadata {
            namespace,
            name,
            owner_references,
            ..
        } = &self.metadata;
        let mut owners = owner_references.iter().flatten();
        let owner = owners.find(|owner| owner.controller == Some(true));
        format!("{namespace}/{}", owner.map_or(name, |owner| &owner.name))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(spec: Value) -> Object {
        serde_json::from_value(json!({"metadata": {"name": "p", "namespace": "d"}, "spec": spec}))
            .unwrap()
    }

    fn asks(gib: u64) -> Value {
        json!({"resources": {"limits": {RESOURCE: gib.to_string()}}})
    }

    #[test]
    fn an_annotation_is_a_share_or_says_why_not() {
        let asked = |text: &str| {
            let annotations = json!({SHARE_ANNOTATION: text});
            let object = json!({"metadata": {"annotations": annotations}});
            serde_json::from_value::<Object>(object)
                .unwrap()
                .share_asked()
        };
        assert_eq!(asked("0.25"), Ok(Some(0.25)));
        assert_eq!(asked(" 40% "), Ok(Some(0.4)));
        assert_eq!(Object::default().share_asked(), Ok(None));
        for none in ["0", "0.0", " 0% "] {
            assert_eq!(asked(none), Ok(Some(0.0)), "{none}");
        }
        for text in ["", "%", "1.1", "101%", "-0.1", "NaN", "inf", "half"] {
            let error = asked(text).unwrap_err();
            assert!(error.contains("such as 0.5"), "{text}: {error}");
        }
        assert!(asked(&"9".repeat(5000)).unwrap_err().len() < 300);
        let long = format!("0.5{}", " ".repeat(5000));
        assert!(asked(&long).unwrap_err().len() < 300);
    }

    #[test]
    fn a_kind_is_what_is_said_else_what_made_the_pod() {
        let kind = |metadata: Value| {
            let object = json!({"metadata": metadata});
            serde_json::from_value::<Object>(object).unwrap().kind()
        };
        let by = |controller: bool| json!([{"name": "s", "controller": controller}]);
        let said = json!({KIND_ANNOTATION: " resnet50-b64 ", JOB_ANNOTATION: "units-7"});
        for (metadata, expected) in [
            (json!({"name": "p", "namespace": "d"}), "d/p"),
            (
                json!({"name": "p", "namespace": "d", "ownerReferences": by(true)}),
                "d/s",
            ),
            (
                json!({"name": "p", "namespace": "d", "ownerReferences": by(false)}),
                "d/p",
            ),
            (
                json!({"name": "p", "annotations": said, "ownerReferences": by(true)}),
                "resnet50-b64",
            ),
            (
                json!({"name": "p", "annotations": {KIND_ANNOTATION: " "}}),
                "/p",
            ),
            (
                json!({"name": "p", "annotations": {KIND_ANNOTATION: "x".repeat(513)}}),
                "/p",
            ),
        ] {
            assert_eq!(kind(metadata), expected);
        }
    }

    #[test]
    fn init_containers_hand_their_memory_on_and_sidecars_do_not() {
        let mut sidecar = asks(2);
        sidecar["restartPolicy"] = json!("Always");
        let pod = |init: &[Value], apps: &[Value]| {
            pod(json!({"initContainers": init, "containers": apps}))
        };
        assert_eq!(pod(&[asks(4)], &[asks(3), json!({})]).memory_gib(), 4);
        assert_eq!(pod(&[asks(3)], &[asks(3), asks(1)]).memory_gib(), 4);
        assert_eq!(pod(&[sidecar.clone()], &[asks(3)]).memory_gib(), 5);
        let gib = |pod: &Object| pod.wish().map(|wish| wish.map(|wish| wish.memory_gib));
        assert_eq!(gib(&pod(&[asks(3), asks(3)], &[asks(3)])), Ok(Some(3)));
        assert_eq!(gib(&pod(&[asks(3)], &[json!({})])), Ok(Some(3)));
        assert_eq!(gib(&pod(&[sidecar.clone()], &[json!({})])), Ok(Some(2)));
        for init in [2, 4] {
            let error = pod(&[asks(init)], &[asks(3)]).wish().unwrap_err();
            assert!(error.contains("write the same number"), "{error}");
        }
    }

    #[test]
    fn two_containers_that_ask_are_refused_and_their_memory_counts() {
        let two = pod(json!({"containers": [asks(3), asks(5)]}));
        let error = two.wish().unwrap_err();
        assert!(error.contains("2 containers of the pod ask"), "{error}");
        assert_eq!(two.memory_gib(), 8);
        let odd = pod(json!({"containers": [{"resources": {"limits": {RESOURCE: "-3"}}}]}));
        assert_eq!(odd.memory_gib(), u64::MAX);
    }
}
