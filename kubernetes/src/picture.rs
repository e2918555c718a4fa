//! What a scheduler extender has to know of the cluster: which devices nodes have, and which pods
//! are on them.
//!
//! Nodes say what they have in an annotation that the device plugin writes; pods have the device
//! that was chosen for them in one of their own. So the state lies where Kubernetes' users look,
//! and an extender that is restarted knows as much as the one before.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::DEVICE_ANNOTATION;
use crate::api::{Api, ApiError};
use crate::fit::{Candidate, Wish};
use crate::objects::Object;

/// A node's devices, as its device plugin writes them: JSON, a list of [`NodeDevice`].
pub const DEVICES_ANNOTATION: &str = "sublet.dev/devices";
/// How old the picture may be: it is a list of all pods. What this process has decided since is
/// added to it.
const FRESH: Duration = Duration::from_secs(3);
/// TIMEOUT: a decision is in the list of pods as soon as the API server has it; one that is not by
/// then was never carried out.
const ASSUMED: Duration = Duration::from_secs(30);

/// A device in a node's annotation.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeDevice {
    pub uuid: String,
    pub gib: u64,
}

/// A pod that was given a device a moment ago.
#[derive(Debug, Clone)]
struct Assumed {
    since: Instant,
    /// When the API server has said that it is bound: a later list without it means that it is
    /// gone.
    bound: Option<Instant>,
    node: String,
    device: String,
    wish: Wish,
}

/// The picture.
#[derive(Debug, Default)]
pub struct Picture {
    taken: Option<Instant>,
    nodes: Vec<Object>,
    pods: Vec<Object>,
    /// By uid.
    assumed: BTreeMap<String, Assumed>,
}

impl Picture {
    /// Looks again, where it is not fresh.
    ///
    /// # Errors
    /// [`ApiError`]: what is known stays, and is too old to decide by.
    pub fn refresh(&mut self, api: &Api, now: Instant) -> Result<(), ApiError> {
        if self
            .taken
            .is_some_and(|taken| now.duration_since(taken) < FRESH)
        {
            return Ok(());
        }
        self.renew(api, now)
    }

    /// Looks again, unless that was done since `asked`: a pod that is refused by what has changed
    /// meanwhile may not be asked about for minutes.
    ///
    /// # Errors
    /// As [`Self::refresh`].
    pub fn refresh_since(&mut self, api: &Api, asked: Instant) -> Result<(), ApiError> {
        if self.taken.is_some_and(|taken| taken >= asked) {
            return Ok(());
        }
        self.renew(api, Instant::now())
    }

    /// `now`: when the questions begin.
    fn renew(&mut self, api: &Api, now: Instant) -> Result<(), ApiError> {
        let nodes = api.list("/api/v1/nodes", "")?;
        let running = "&fieldSelector=status.phase!%3DSucceeded,status.phase!%3DFailed";
        let pods = api.list("/api/v1/pods", running)?;
        self.set(nodes, pods, now);
        Ok(())
    }

    fn set(&mut self, nodes: Vec<Object>, pods: Vec<Object>, now: Instant) {
        self.nodes = nodes;
        self.pods = pods;
        self.pods.retain(|pod| pod.memory_gib() > 0);
        self.taken = Some(now);
        let pods = &self.pods;
        self.assumed.retain(|uid, one| {
            match pods.iter().find(|pod| pod.metadata.uid == *uid) {
                Some(pod) if !pod.spec.node_name.is_empty() => return false,
                // It was deleted or has ended since.
                None if one.bound.is_some_and(|bound| bound <= now) => return false,
                _ => {}
            }
            now.duration_since(one.since) < ASSUMED
        });
    }

    /// Notes that the API server has carried a decision out.
    pub fn bound(&mut self, uid: &str, now: Instant) {
        if let Some(one) = self.assumed.get_mut(uid) {
            one.bound = Some(now);
        }
    }

    /// Notes a decision until the list of pods has it.
    pub fn assume(&mut self, uid: &str, node: &str, device: &str, wish: Wish, now: Instant) {
        self.assumed.insert(
            uid.to_owned(),
            Assumed {
                since: now,
                bound: None,
                node: node.to_owned(),
                device: device.to_owned(),
                wish,
            },
        );
    }

    /// Takes that back.
    pub fn forget(&mut self, uid: &str) {
        self.assumed.remove(uid);
    }

    /// Devices of a node with what is left of them, without what the pod of this uid has; `None`:
    /// the node does not say that it has any.
    pub fn candidates(&self, node: &str, uid: &str) -> Option<Vec<Candidate>> {
        let object = self.nodes.iter().find(|one| one.metadata.name == node)?;
        let said = object.annotation(DEVICES_ANNOTATION)?;
        let devices: Vec<NodeDevice> = serde_json::from_str(said).ok()?;
        let mut all: Vec<Candidate> = devices
            .into_iter()
            .map(|device| Candidate {
                node: node.to_owned(),
                uuid: device.uuid,
                total_gib: device.gib,
                free_gib: device.gib,
                free_share: 1.0,
                residents: Vec::new(),
            })
            .collect();
        let here = self.pods.iter().filter(|pod| {
            pod.spec.node_name == node
                && pod.metadata.uid != uid
                && !self.assumed.contains_key(&pod.metadata.uid)
        });
        let listed = here.map(|pod| {
            // Its memory is taken, whatever its annotations say.
            let wish = pod.counts_as();
            (pod.annotation(DEVICE_ANNOTATION).unwrap_or_default(), wish)
        });
        let assumed = self.assumed.iter();
        let assumed = assumed
            .filter(|(of, one)| one.node == node && *of != uid)
            .map(|(_, one)| (one.device.as_str(), one.wish.clone()));
        let mut unplaced = Vec::new();
        for (device, wish) in listed.chain(assumed) {
            match all.iter_mut().find(|one| one.uuid == device) {
                Some(one) => take(one, wish),
                None => unplaced.push(wish),
            }
        }
        // A pod that somebody else has bound is on some device: the kubelet takes the tightest.
        unplaced.sort_by_key(|wish| std::cmp::Reverse(wish.memory_gib));
        for wish in unplaced {
            let fits = |one: &&mut Candidate| one.free_gib >= wish.memory_gib;
            if let Some(one) = all.iter_mut().filter(fits).min_by_key(|one| one.free_gib) {
                take(one, wish);
            }
        }
        Some(all)
    }
}

fn take(one: &mut Candidate, wish: Wish) {
    one.free_gib = one.free_gib.saturating_sub(wish.memory_gib);
    one.free_share -= wish.share.unwrap_or(0.0);
    one.residents.push(wish);
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::RESOURCE;

    fn object(value: serde_json::Value) -> Object {
        serde_json::from_value(value).unwrap()
    }

    fn pod(uid: &str, node: &str, gib: u64, annotations: serde_json::Value) -> Object {
        object(json!({
            "metadata": {"name": uid, "namespace": "d", "uid": uid, "annotations": annotations},
            "spec": {"nodeName": node, "containers": [
                {"resources": {"limits": {RESOURCE: gib.to_string()}}},
                {"name": "sidecar"},
            ]},
        }))
    }

    fn node() -> Object {
        let devices = r#"[{"uuid":"A","gib":80},{"uuid":"B","gib":40}]"#;
        object(json!({"metadata": {"name": "n", "annotations": {DEVICES_ANNOTATION: devices}}}))
    }

    #[test]
    fn what_is_left_is_what_nobody_was_given() {
        let now = Instant::now();
        let mut picture = Picture::default();
        let pods = vec![
            pod(
                "1",
                "n",
                30,
                json!({DEVICE_ANNOTATION: "A", "sublet.dev/share": "0.5"}),
            ),
            pod("2", "n", 30, json!({})),
            pod("3", "m", 30, json!({DEVICE_ANNOTATION: "A"})),
            pod("4", "", 30, json!({})),
            object(json!({"metadata": {"name": "plain"}, "spec": {"nodeName": "n"}})),
        ];
        picture.set(vec![node()], pods.clone(), now);
        let left = |picture: &Picture, uid: &str| {
            let all = picture.candidates("n", uid).unwrap();
            let left = all.iter().map(|one| (one.free_gib, one.free_share));
            left.collect::<Vec<_>>()
        };
        // The one without a device is counted where it fits most tightly.
        assert_eq!(left(&picture, "x"), [(50, 0.5), (10, 1.0)]);
        assert_eq!(
            left(&picture, "1"),
            [(80, 1.0), (10, 1.0)],
            "without itself"
        );
        let wish = Wish {
            memory_gib: 40,
            share: Some(0.25),
            ..Wish::default()
        };
        picture.assume("4", "n", "A", wish.clone(), now);
        assert_eq!(left(&picture, "x"), [(10, 0.25), (10, 1.0)]);
        picture.set(vec![node()], pods.clone(), now);
        assert_eq!(
            left(&picture, "x"),
            [(10, 0.25), (10, 1.0)],
            "not bound yet"
        );
        picture.set(vec![node()], pods.clone(), now + ASSUMED);
        assert_eq!(left(&picture, "x"), [(50, 0.5), (10, 1.0)]);
        // One that was bound, and is gone by the next list.
        picture.assume("5", "n", "A", wish.clone(), now);
        picture.set(vec![node()], pods.clone(), now);
        assert_eq!(left(&picture, "x"), [(10, 0.25), (10, 1.0)], "on its way");
        picture.bound("5", now + FRESH);
        picture.set(vec![node()], pods.clone(), now);
        assert_eq!(
            left(&picture, "x"),
            [(10, 0.25), (10, 1.0)],
            "an older list"
        );
        picture.set(vec![node()], pods, now + FRESH);
        assert_eq!(left(&picture, "x"), [(50, 0.5), (10, 1.0)], "it is gone");
        let lies = json!({DEVICE_ANNOTATION: "A", "sublet.dev/share": "lots"});
        picture.set(vec![node()], vec![pod("1", "n", 30, lies)], now);
        assert_eq!(
            left(&picture, "x"),
            [(50, 1.0), (40, 1.0)],
            "a bad annotation gives no memory back"
        );
        assert_eq!(picture.candidates("m", "x"), None);
    }

    #[test]
    fn a_pod_that_wants_nothing_of_ours_is_left_alone() {
        let plain = object(json!({"metadata": {"name": "p", "annotations": null}}));
        assert_eq!(plain.wish(), Ok(None));
        let bad = pod("1", "", 3, json!({"sublet.dev/share": "lots"}));
        assert!(bad.wish().unwrap_err().contains("`lots`"));
        let wish = pod("1", "", 3, json!(null)).wish().unwrap().unwrap();
        assert_eq!((wish.memory_gib, wish.share), (3, None));
    }
}
