//! The node's devices as Kubernetes' scheduler sees them: a ResourceSlice with consumable capacity.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::api::{Api, ApiError};
use crate::claim::{MEMORY, SM};
use crate::node::Device;
use crate::quantity::Bytes;
use crate::{DRIVER, node::GIB};

/// How often a slice is compared with one that others may have changed.
const COMPARES: Duration = Duration::from_secs(60);
/// How soon a server that refused, or did not answer, is asked again.
const RETRIES: Duration = Duration::from_secs(5);
const SLICES: &str = "/apis/resource.k8s.io/v1/resourceslices";

/// What a slice of these devices says. Capacity is handed out in whole GiB and whole percents;
/// without a wish a claim has one GiB and no promise of time.
pub fn spec(node: &str, devices: &[Device], generation: u64) -> Value {
    let step = Bytes(GIB).to_string();
    let devices = devices.iter().map(|device| {
        json!({
            "name": device.pool_name(),
            "allowMultipleAllocations": true,
            "attributes": {
                "uuid": {"string": device.uuid},
                "model": {"string": short(&device.model)},
            },
            "capacity": {
                MEMORY: {
                    "value": Bytes(device.usable_bytes).to_string(),
                    "requestPolicy": {
                        "default": step,
                        "validRange": {"min": step, "step": step},
                    },
                },
                SM: {
                    "value": "100",
                    "requestPolicy": {
                        "default": "0",
                        "validRange": {"min": "0", "max": "100", "step": "1"},
                    },
                },
            },
        })
    });
    json!({
        "driver": DRIVER,
        "nodeName": node,
        "pool": {"name": node, "generation": generation, "resourceSliceCount": 1},
        "devices": devices.collect::<Vec<_>>(),
    })
}

/// Whether all that is wanted is there; a server adds fields with their defaults.
fn says(there: &Value, wanted: &Value) -> bool {
    match (there, wanted) {
        (Value::Object(there), Value::Object(wanted)) => wanted
            .iter()
            .all(|(name, value)| there.get(name).is_some_and(|there| says(there, value))),
        (Value::Array(there), Value::Array(wanted)) => {
            there.len() == wanted.len() && there.iter().zip(wanted).all(|(a, b)| says(a, b))
        }
        (there, wanted) => there == wanted,
    }
}

/// The value of an attribute has 64 bytes at the most.
fn short(text: &str) -> String {
    text.chars().filter(char::is_ascii).take(64).collect()
}

/// Name of a node's slice.
pub fn name(node: &str) -> String {
    format!("{node}-{DRIVER}")
}

/// What was published last.
#[derive(Debug, Default)]
pub struct Slice {
    last: Option<(Vec<Device>, Instant)>,
    failed: Option<String>,
}

impl Slice {
    /// Publishes a node's devices where they have changed, and looks now and then whether they
    /// still stand there. True where something was changed.
    ///
    /// # Errors
    /// What the API server said; it is tried again.
    pub fn publish(
        &mut self,
        api: &Api,
        node: &str,
        devices: &[Device],
        now: Instant,
    ) -> Result<bool, String> {
        if self.is_due(devices, now) {
            self.last = Some((devices.to_vec(), now));
            let published = publish(api, node, devices).map_err(|error| error.to_string());
            self.failed = published.as_ref().err().cloned();
            return published;
        }
        self.failed.clone().map_or(Ok(false), Err)
    }

    fn is_due(&self, devices: &[Device], now: Instant) -> bool {
        let Some((published, at)) = &self.last else {
            return true;
        };
        let wait = if self.failed.is_some() {
            RETRIES
        } else {
            COMPARES
        };
        published != devices || now.duration_since(*at) >= wait
    }
}

/// Makes the slice, changes it where it says something else, or leaves it. True where something was
/// changed.
fn publish(api: &Api, node: &str, devices: &[Device]) -> Result<bool, ApiError> {
    let path = format!("{SLICES}/{}", name(node));
    let Some(mut there) = api.get(&path)? else {
        let mut metadata = json!({"name": name(node)});
        // The slice goes with its node, also where this driver does not come back.
        let found = api.get(&format!("/api/v1/nodes/{node}"))?;
        if let Some(uid) = found
            .as_ref()
            .and_then(|node| node.pointer("/metadata/uid"))
        {
            metadata["ownerReferences"] = json!([{
                "apiVersion": "v1", "kind": "Node", "name": node, "uid": uid,
            }]);
        }
        let slice = json!({
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceSlice",
            "metadata": metadata,
            "spec": spec(node, devices, 1),
        });
        api.post(SLICES, &slice)?;
        return Ok(true);
    };
    let generation = there
        .pointer("/spec/pool/generation")
        .and_then(Value::as_u64);
    let generation = generation.unwrap_or(0);
    let wanted = spec(node, devices, generation);
    if there.get("spec").is_some_and(|there| says(there, &wanted)) {
        return Ok(false);
    }
    // With the version that was read: who has changed it since is not overruled unseen.
    there["spec"] = spec(node, devices, generation.saturating_add(1));
    api.put(&path, &there)?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slice_says_what_can_be_shared_and_in_which_steps() {
        let device = Device {
            index: 0,
            uuid: "GPU-0".into(),
            model: "x".repeat(99),
            usable_bytes: 80 * GIB,
        };
        let spec = spec("n1", &[device], 3);
        assert_eq!(spec["pool"]["generation"], 3);
        let device = &spec["devices"][0];
        assert_eq!(device["name"], "gpu-0");
        assert_eq!(device["allowMultipleAllocations"], true);
        let memory = &device["capacity"]["memory"];
        assert_eq!(memory["value"], "80Gi");
        assert_eq!(memory["requestPolicy"]["validRange"]["step"], "1Gi");
        assert_eq!(device["capacity"]["sm"]["requestPolicy"]["default"], "0");
        assert_eq!(
            device["attributes"]["model"]["string"]
                .as_str()
                .unwrap()
                .len(),
            64
        );
        let mut there = spec.clone();
        there["allNodes"] = json!(false);
        there["devices"][0]["bindsToNode"] = json!(false);
        assert!(says(&there, &spec), "a server's defaults are no difference");
        there["devices"][0]["capacity"]["memory"]["value"] = json!("40Gi");
        assert!(!says(&there, &spec));
        there["devices"] = json!([]);
        assert!(!says(&there, &spec));
    }

    #[test]
    fn a_slice_is_the_one_that_the_trial_of_claims_reads() {
        let device = Device {
            index: 0,
            uuid: "GPU-0".into(),
            model: "Simulated".into(),
            usable_bytes: 80 * GIB,
        };
        let wanted: Value = serde_json::from_str(include_str!("../data/slice.json")).unwrap();
        assert_eq!(spec("n1", &[device], 1), wanted);
    }

    #[test]
    fn a_server_is_asked_where_something_changed_and_now_and_then() {
        let device = Device {
            index: 0,
            uuid: "GPU-0".into(),
            model: String::new(),
            usable_bytes: GIB,
        };
        let now = Instant::now();
        let mut slice = Slice::default();
        assert!(slice.is_due(&[], now));
        slice.last = Some((vec![device.clone()], now));
        assert!(!slice.is_due(std::slice::from_ref(&device), now + RETRIES));
        assert!(slice.is_due(std::slice::from_ref(&device), now + COMPARES));
        assert!(slice.is_due(&[], now));
        slice.failed = Some("away".into());
        assert!(!slice.is_due(std::slice::from_ref(&device), now));
        assert!(slice.is_due(&[device], now + RETRIES));
    }
}
