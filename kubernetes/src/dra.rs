//! The DRA driver: a claim's parts of devices become jobs of the node's arbiter before its pod
//! starts, and cease to be when the kubelet says that it is over.

use std::collections::HashMap;
use std::sync::Arc;

use crate::api::{Api, ApiError, Patch, is_name};
use crate::claim::{Claim, ClaimError};
use crate::grpc::{self, Answering, Call, Service};
use crate::node::NodeError;
use crate::proto::dra as v1;
use crate::records::Record;
use crate::shares::{ShareError, Shares};

/// Most claims of one call: a pod has a handful.
const MOST_CLAIMS: usize = 256;
/// Longest uid: Kubernetes' have 36 characters.
const UID_CHARS: usize = 64;

/// The driver.
pub struct Driver {
    pub shares: Arc<Shares>,
    pub api: Api,
}

/// Why a claim is not prepared.
#[derive(Debug, thiserror::Error)]
enum PrepareError {
    #[error("invalid {1} `{0}`")]
    Name(String, &'static str),
    #[error("there is no claim {0}")]
    Gone(String),
    #[error(transparent)]
    Api(#[from] ApiError),
    #[error(transparent)]
    Claim(#[from] ClaimError),
    #[error(transparent)]
    Node(#[from] NodeError),
    #[error(transparent)]
    Share(#[from] ShareError),
}

impl Driver {
    fn prepare(&self, asked: &v1::Claim) -> Result<Vec<v1::Device>, PrepareError> {
        for (text, what) in [(&asked.namespace, "namespace"), (&asked.name, "claim name")] {
            if !is_name(text) {
                return Err(PrepareError::Name(text.chars().take(80).collect(), what));
            }
        }
        check_uid(&asked.uid)?;
        let path = path(&asked.namespace, &asked.name);
        let object = self.api.get(&path)?;
        let title = || format!("{}/{}", asked.namespace, asked.name);
        let object = object.ok_or_else(|| PrepareError::Gone(title()))?;
        let claim = Claim::read(object, &asked.uid)?;
        let held = self.hold(&claim);
        let reported = match &held {
            Ok(record) => self.report(&path, &claim, Ok(record)),
            Err(error) => self.report(&path, &claim, Err(&error.to_string())),
        };
        // The pod can run all the same: its status is for people.
        if let Err(error) = reported {
            crate::say!("the status of claim {}: {error}", claim.title());
        }
        Ok(held?
            .shares
            .iter()
            .map(|share| self.device(share))
            .collect())
    }

    fn hold(&self, claim: &Claim) -> Result<Record, PrepareError> {
        let wanted = claim.wanted(&self.shares.node.devices()?)?;
        Ok(self.shares.hold(wanted)?)
    }

    fn device(&self, share: &crate::records::Share) -> v1::Device {
        v1::Device {
            request_names: vec![share.request.clone()],
            pool_name: share.pool.clone(),
            device_name: share.pool_device.clone(),
            cdi_device_ids: self.shares.node.cdi_ids(share),
            share_id: Some(share.share_id.clone()).filter(|id| !id.is_empty()),
        }
    }

    fn report(
        &self,
        path: &str,
        claim: &Claim,
        ready: Result<&Record, &str>,
    ) -> Result<(), ApiError> {
        let now = jiff::Timestamp::now();
        let now = now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
        let status = claim.report(ready, &now);
        self.api
            .patch(&format!("{path}/status"), Patch::Apply, &status)?;
        Ok(())
    }

    fn unprepare(&self, asked: &v1::Claim) -> Result<(), PrepareError> {
        check_uid(&asked.uid)?;
        Ok(self.shares.release(&asked.uid)?)
    }
}

fn path(namespace: &str, name: &str) -> String {
    format!("/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaims/{name}")
}

/// A uid names files, so it is nothing but what Kubernetes' consist of.
fn check_uid(uid: &str) -> Result<(), PrepareError> {
    let plain = uid.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
    if plain && (1..=UID_CHARS).contains(&uid.len()) && !uid.starts_with('-') {
        return Ok(());
    }
    Err(PrepareError::Name(
        uid.chars().take(80).collect(),
        "claim uid",
    ))
}

impl Service for Driver {
    fn answer(self: Arc<Self>, path: String, call: Call) -> Answering {
        match path.as_str() {
            v1::PREPARE => grpc::unary(call, move |asked: v1::Claims| {
                let mut claims = HashMap::new();
                for claim in few(&asked)? {
                    let prepared = match self.prepare(claim) {
                        Ok(devices) => v1::Prepared {
                            devices,
                            error: String::new(),
                        },
                        Err(error) => v1::Prepared {
                            devices: Vec::new(),
                            error: error.to_string(),
                        },
                    };
                    claims.insert(claim.uid.clone(), prepared);
                }
                Ok(v1::PrepareResponse { claims })
            }),
            v1::UNPREPARE => grpc::unary(call, move |asked: v1::Claims| {
                let mut claims = HashMap::new();
                for claim in few(&asked)? {
                    let done = self.unprepare(claim);
                    let error = done.err().map(|error| error.to_string());
                    let error = error.unwrap_or_default();
                    claims.insert(claim.uid.clone(), v1::Unprepared { error });
                }
                Ok(v1::UnprepareResponse { claims })
            }),
            path => grpc::unknown(path),
        }
    }
}

fn few(asked: &v1::Claims) -> Result<&[v1::Claim], tonic::Status> {
    if asked.claims.len() > MOST_CLAIMS {
        let message = format!(
            "{} claims in one call: at most {MOST_CLAIMS} are taken",
            asked.claims.len()
        );
        return Err(tonic::Status::invalid_argument(message));
    }
    Ok(&asked.claims)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uid_that_would_leave_the_directory_is_refused() {
        assert!(check_uid("a1e16a19-b26e-4ebe-9a2b-8193eb3bee98").is_ok());
        for uid in ["", "../x", "a/b", "a.b", "-a", "a\0", &"x".repeat(65)] {
            assert!(check_uid(uid).is_err(), "{uid:?}");
        }
    }
}
