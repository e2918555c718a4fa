//! What a scheduler has given a claim: read from the object, checked, and nothing more.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Value, json};

use crate::DRIVER;
use crate::node::Device;
use crate::quantity::Quantity;
use crate::records::{Record, Share};

/// Capacities of a device, as its slice names them.
pub const MEMORY: &str = "memory";
pub const SM: &str = "sm";
/// The condition that says whether a share is in force.
const READY: &str = "Ready";
/// Letters of a claim's name in the name of its job.
const NAME_CHARS: usize = 40;

/// A claim, as far as it is looked at.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(default)]
pub struct Claim {
    pub metadata: Metadata,
    pub status: Status,
}

#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(default)]
pub struct Metadata {
    pub name: String,
    pub namespace: String,
    pub uid: String,
}

#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(default)]
pub struct Status {
    pub allocation: Option<Allocation>,
    /// What drivers have said of what was given.
    pub devices: Vec<Reported>,
}

/// What a driver has said of a device.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Reported {
    pub driver: String,
    pub pool: String,
    pub device: String,
    #[serde(rename = "shareID")]
    pub share_id: Option<String>,
    pub conditions: Vec<Condition>,
}

#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Condition {
    pub r#type: String,
    pub status: String,
    pub last_transition_time: String,
}

#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(default)]
pub struct Allocation {
    pub devices: Devices,
}

#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(default)]
pub struct Devices {
    pub results: Vec<Given>,
}

/// A device, or a part of one, that a claim was given.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Given {
    pub request: String,
    pub driver: String,
    pub pool: String,
    pub device: String,
    #[serde(rename = "shareID")]
    pub share_id: Option<String>,
    pub consumed_capacity: BTreeMap<String, String>,
}

/// Why a claim cannot be prepared here.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum ClaimError {
    #[error("claim {0} is not allocated")]
    NotAllocated(String),
    #[error("claim {claim} is {found} now, and not {asked}: it was made anew")]
    AnotherOne {
        claim: String,
        asked: String,
        found: String,
    },
    #[error("nothing that claim {0} was given is of driver {DRIVER}")]
    NothingOfOurs(String),
    #[error(
        "claim {claim} was given device {device}, which this node does not have (any more): it has {known}"
    )]
    NoDevice {
        claim: String,
        device: String,
        known: String,
    },
    #[error(
        "claim {0} was given {1} parts of devices, and a job of this driver has one: ask for one in a claim, or use `sublet run` on the node for several"
    )]
    Several(String, usize),
    #[error("claim {claim}: {capacity} {message}")]
    Capacity {
        claim: String,
        capacity: &'static str,
        message: String,
    },
    #[error("the claim is no object of resource.k8s.io/v1: {0}")]
    Unreadable(String),
}

impl Claim {
    /// Reads an object, and holds it against the uid that was asked for.
    ///
    /// # Errors
    /// [`ClaimError`]
    pub fn read(object: Value, uid: &str) -> Result<Self, ClaimError> {
        let claim: Self = serde_json::from_value(object)
            .map_err(|error| ClaimError::Unreadable(error.to_string()))?;
        if claim.metadata.uid != uid {
            return Err(ClaimError::AnotherOne {
                claim: claim.title(),
                asked: uid.to_owned(),
                found: claim.metadata.uid,
            });
        }
        Ok(claim)
    }

    /// For people.
    pub fn title(&self) -> String {
        format!("{}/{}", self.metadata.namespace, self.metadata.name)
    }

    /// What is to be held for it, on these devices.
    ///
    /// # Errors
    /// [`ClaimError`]
    pub fn wanted(&self, devices: &[Device]) -> Result<Record, ClaimError> {
        let claim = || self.title();
        let allocation = self.status.allocation.as_ref();
        let results = &allocation
            .ok_or_else(|| ClaimError::NotAllocated(claim()))?
            .devices
            .results;
        let mut shares = Vec::new();
        for given in results.iter().filter(|given| given.driver == DRIVER) {
            let device = devices
                .iter()
                .find(|device| device.pool_name() == given.device);
            let Some(device) = device else {
                let known: Vec<_> = devices.iter().map(Device::pool_name).collect();
                return Err(ClaimError::NoDevice {
                    claim: claim(),
                    device: given.device.clone(),
                    known: if known.is_empty() {
                        "none".into()
                    } else {
                        known.join(", ")
                    },
                });
            };
            shares.push(self.share(given, device, shares.len())?);
        }
        if shares.is_empty() {
            return Err(ClaimError::NothingOfOurs(claim()));
        }
        // A container that had both would get two tokens in one variable, and keep the last.
        if shares.len() > 1 {
            return Err(ClaimError::Several(claim(), shares.len()));
        }
        Ok(Record {
            key: self.metadata.uid.clone(),
            title: claim(),
            shares,
            ..Record::default()
        })
    }

    fn share(&self, given: &Given, device: &Device, at: usize) -> Result<Share, ClaimError> {
        let wrong = |capacity: &'static str, message: String| ClaimError::Capacity {
            claim: self.title(),
            capacity,
            message,
        };
        let amount = |capacity: &'static str| {
            let text = given.consumed_capacity.get(capacity);
            text.map(|text| Quantity::parse(text).map_err(|e| wrong(capacity, e.to_string())))
                .transpose()
        };
        // Without an amount the device is the claim's alone.
        let memory_bytes = match amount(MEMORY)? {
            Some(memory) => memory.bytes().unwrap_or(u64::MAX),
            None => device.usable_bytes,
        };
        if memory_bytes == 0 {
            return Err(wrong(MEMORY, "is 0: ask for at least 1Gi".into()));
        }
        let percent = amount(SM)?.map_or(0.0, Quantity::number);
        if !(0.0..=100.0).contains(&percent) {
            return Err(wrong(SM, format!("is {percent}: it goes from 0 to 100")));
        }
        let id = given.share_id.clone().unwrap_or_default();
        let short: String = id
            .chars()
            .filter(char::is_ascii_alphanumeric)
            .take(8)
            .collect();
        let uid: String = self.metadata.uid.chars().take(8).collect();
        let name: String = self.metadata.name.chars().take(NAME_CHARS).collect();
        let suffix = if short.is_empty() {
            format!("{uid}-{at}")
        } else {
            short
        };
        Ok(Share {
            name: format!("{name}-{suffix}"),
            device: device.uuid.clone(),
            memory_bytes,
            share: percent / 100.0,
            request: given.request.clone(),
            pool: given.pool.clone(),
            pool_device: given.device.clone(),
            share_id: id,
            job: None,
        })
    }

    /// Since when the claim says the same of what was given, if it does.
    fn since(&self, given: &Given, status: &str) -> Option<&str> {
        let is_of = |it: &&Reported| {
            let same = it.driver == given.driver && it.pool == given.pool;
            same && it.device == given.device && it.share_id == given.share_id
        };
        let said = self.status.devices.iter().find(is_of)?;
        let mut conditions = said.conditions.iter();
        let ready = conditions.find(|it| it.r#type == READY && it.status == status)?;
        Some(ready.last_transition_time.as_str()).filter(|time| !time.is_empty())
    }

    /// What the claim's status says of each of our devices; applied to it, it is the driver's part.
    /// A kubelet asks again and again for what was refused: what is said already changes nothing.
    pub fn report(&self, ready: Result<&Record, &str>, now: &str) -> Value {
        let (status, reason, message) = match ready {
            Ok(_) => ("True", "Prepared", "quota and share are in force"),
            Err(why) => ("False", "Refused", why),
        };
        let results = self
            .status
            .allocation
            .iter()
            .flat_map(|a| &a.devices.results);
        let devices = results.filter(|given| given.driver == DRIVER).map(|given| {
            let mut device = json!({
                "driver": given.driver,
                "pool": given.pool,
                "device": given.device,
                "conditions": [{
                    "type": READY,
                    "status": status,
                    "reason": reason,
                    "message": message,
                    "lastTransitionTime": self.since(given, status).unwrap_or(now),
                }],
            });
            if let (Some(id), Some(device)) = (&given.share_id, device.as_object_mut()) {
                device.insert("shareID".into(), json!(id));
            }
            let share = ready.ok().and_then(|record| {
                let id = given.share_id.as_deref().unwrap_or_default();
                record
                    .shares
                    .iter()
                    .find(|share| share.pool_device == given.device && share.share_id == id)
            });
            if let (Some(share), Some(device)) = (share, device.as_object_mut()) {
                let data = json!({
                    "job": share.job.as_ref().map(|job| &job.name),
                    "uuid": share.device,
                    "memoryBytes": share.memory_bytes,
                    "share": share.share,
                });
                device.insert("data".into(), data);
            }
            device
        });
        json!({
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": {
                "name": self.metadata.name,
                "namespace": self.metadata.namespace,
                "uid": self.metadata.uid,
            },
            "status": {"devices": devices.collect::<Vec<_>>()},
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::GIB;

    /// What Kubernetes 1.36 wrote for two claims on one device and one that waits.
    const RECORDED: &str = include_str!("../data/claims.recorded.json");

    fn recorded(at: usize) -> Value {
        let list: Value = serde_json::from_str(RECORDED).unwrap();
        list["items"][at].clone()
    }

    fn devices() -> Vec<Device> {
        vec![Device {
            index: 0,
            uuid: "GPU-0".into(),
            model: "Simulated".into(),
            usable_bytes: 80 * GIB,
        }]
    }

    fn claim(at: usize) -> Claim {
        let uid = recorded(at)["metadata"]["uid"].as_str().unwrap().to_owned();
        Claim::read(recorded(at), &uid).unwrap()
    }

    #[test]
    fn what_the_scheduler_gave_is_held() {
        let record = claim(0).wanted(&devices()).unwrap();
        let share = &record.shares[0];
        assert_eq!((share.memory_bytes, share.share), (30 * GIB, 0.4));
        assert_eq!(share.share_id, "e59bb7b6-4b0b-4566-9c64-1054b8bcec7f");
        assert_eq!(share.name, "a-e59bb7b6");
        assert_eq!(record.key, "a1e16a19-b26e-4ebe-9a2b-8193eb3bee98");
        let record = claim(1).wanted(&devices()).unwrap();
        // 40500Mi, rounded up by the scheduler; no part of the time was asked for.
        assert_eq!(record.shares[0].memory_bytes, 40 * GIB);
        assert_eq!(record.shares[0].share, 0.0);
    }

    #[test]
    fn a_claim_that_cannot_be_is_refused_with_the_reason() {
        let text =
            |claim: &Claim, devices: &[Device]| claim.wanted(devices).unwrap_err().to_string();
        assert!(text(&claim(2), &devices()).contains("default/c is not allocated"));
        assert!(text(&claim(0), &[]).contains("device gpu-0, which this node does not have"));
        let with = |change: &dyn Fn(&mut Given)| {
            let mut claim = claim(0);
            change(&mut claim.status.allocation.as_mut().unwrap().devices.results[0]);
            text(&claim, &devices())
        };
        let capacity = |name: &'static str, value: &'static str| {
            with(&move |given: &mut Given| {
                given.consumed_capacity.insert(name.into(), value.into());
            })
        };
        assert!(capacity("memory", "-3Gi").contains("is no amount"));
        assert!(capacity("memory", "0").contains("is 0"));
        assert!(capacity("sm", "101").contains("goes from 0 to 100"));
        let mut both = claim(0);
        let results = &mut both.status.allocation.as_mut().unwrap().devices.results;
        results.push(results[0].clone());
        assert!(text(&both, &devices()).contains("was given 2 parts of devices"));
        let theirs = with(&|given: &mut Given| given.driver = "gpu.nvidia.com".into());
        assert!(theirs.contains("nothing that claim default/a was given"));
        let error = Claim::read(recorded(0), "another").unwrap_err();
        assert!(matches!(error, ClaimError::AnotherOne { .. }), "{error}");
        let error = Claim::read(json!({"metadata": 7}), "x").unwrap_err();
        assert!(matches!(error, ClaimError::Unreadable(_)), "{error}");
    }

    #[test]
    fn the_status_says_who_was_given_what_or_why_not() {
        let claim = claim(0);
        let record = claim.wanted(&devices()).unwrap();
        let report = claim.report(Ok(&record), "2026-11-24T00:00:00Z");
        let device = &report["status"]["devices"][0];
        assert_eq!(device["shareID"], "e59bb7b6-4b0b-4566-9c64-1054b8bcec7f");
        assert_eq!(device["conditions"][0]["status"], "True");
        assert_eq!(device["data"]["memoryBytes"], 30 * GIB);
        let mut claim = claim;
        claim.status.devices = serde_json::from_value(report["status"]["devices"].clone()).unwrap();
        let later = "2026-11-25T00:00:00Z";
        assert_eq!(claim.report(Ok(&record), later), report, "nothing new");
        let report = claim.report(Err("too much"), later);
        let condition = &report["status"]["devices"][0]["conditions"][0];
        assert_eq!(condition["status"], "False");
        assert_eq!(condition["message"], "too much");
        assert_eq!(condition["reason"], "Refused");
        assert_eq!(
            condition["lastTransitionTime"], later,
            "it was ready before"
        );
        claim.status.devices = serde_json::from_value(report["status"]["devices"].clone()).unwrap();
        claim.status.devices[0].share_id = Some("another".into());
        let latest = "2026-11-26T00:00:00Z";
        let report = claim.report(Err("too much"), latest);
        let condition = &report["status"]["devices"][0]["conditions"][0];
        assert_eq!(
            condition["lastTransitionTime"], latest,
            "that was another share"
        );
    }
}
