//! Shares follow their pods: undone when a pod is over, and changed as its annotation says.
//!
//! A kubelet never says that units come back; it lists who has which. That a pod is not listed
//! says little: a kubelet that has just started may list none, and one that was asked too early
//! does not list a container yet. So a share whose pod is known is undone when the API server, too,
//! says that the pod is over. Whose it is stands in its record, and outlives this process. A share
//! that was never listed (its pod was refused after its units were given) is undone after a time in
//! which the kubelet lists all pods of this node that have units.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::objects::Object;
use crate::pods::{Cluster, Owners, STATUS_ANNOTATION};
use crate::records::{Pod, Record};
use crate::shares::Shares;
use crate::{DEVICE_ANNOTATION, JOB_ANNOTATION};

/// How often the API server is asked what pods say, where the kubelet's list is the same.
pub const ASKS: Duration = Duration::from_secs(5);
/// TIMEOUT: a kubelet lists a container milliseconds after it was given its units.
pub const GRACE: Duration = Duration::from_secs(120);

/// What is known from one look to the next.
#[derive(Debug, Default)]
struct Seen {
    asked: Option<Instant>,
    owners: Owners,
    /// Shares that were looked at, by their numbers.
    shares: Vec<u64>,
    /// Since when shares are not listed, by their numbers.
    absent: BTreeMap<u64, Instant>,
    failed: Vec<String>,
}

/// What follows.
#[derive(Debug)]
pub struct Follower {
    pub shares: Arc<Shares>,
    /// `None`: there is no API server to ask.
    pub cluster: Option<Cluster>,
    seen: Mutex<Seen>,
    /// Who had which units when the kubelet was asked last: beside the rest, which is held while
    /// others are asked.
    owners: Mutex<Owners>,
}

/// What is to be done with a share whose units the kubelet lists for nobody.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    Keep,
    /// Undone, if the API server says that this pod is over now.
    AskFor(Pod),
    Undo,
}

/// What an API server says of this node's pods.
#[derive(Debug, Clone, Copy)]
enum Said<'a> {
    Pods(&'a [Object]),
    /// It does not answer.
    Nothing,
    /// There is none to ask.
    Nobody,
}

impl Follower {
    pub fn new(shares: Arc<Shares>, cluster: Option<Cluster>) -> Self {
        Self {
            shares,
            cluster,
            seen: Mutex::default(),
            owners: Mutex::default(),
        }
    }

    /// Who had which units when the kubelet was asked last.
    pub fn owners(&self) -> Owners {
        self.owners.lock().clone()
    }

    /// Looks at the shares that stood before the kubelet was asked; a later one it may not list
    /// yet. `None`: it did not answer. Says what could not be done.
    pub fn follow(&self, before: &[Record], owners: Option<Owners>, now: Instant) -> Vec<String> {
        let mut seen = self.seen.lock();
        let Some(owners) = owners else {
            seen.absent.clear();
            return seen.failed.clone();
        };
        self.owners.lock().clone_from(&owners);
        let shares: Vec<u64> = before.iter().map(|record| record.made).collect();
        let changed = seen.owners != owners || seen.shares != shares;
        let asked = seen.asked;
        if !changed && asked.is_some_and(|asked| now.duration_since(asked) < ASKS) {
            return seen.failed.clone();
        }
        (seen.asked, seen.owners, seen.shares) = (Some(now), owners, shares);
        seen.absent
            .retain(|made, _| before.iter().any(|record| record.made == *made));
        let mut failed = Vec::new();
        let pods = match self.cluster.as_ref().filter(|_| !before.is_empty()) {
            Some(cluster) => cluster.pods().map(Some),
            None => Ok(None),
        };
        let said = match &pods {
            Ok(Some(pods)) => Said::Pods(pods),
            Ok(None) => Said::Nobody,
            Err(error) => {
                failed.push(error.to_string());
                Said::Nothing
            }
        };
        let Seen { owners, absent, .. } = &mut *seen;
        for record in before {
            if let Some(owner) = owner(record, owners) {
                absent.remove(&record.made);
                let shares = before.iter().filter(|other| {
                    let other = self::owner(other, owners);
                    other.is_some_and(|other| other.is_called_as(owner))
                });
                failed.extend(self.listed(record, owner, shares.count(), said).err());
                continue;
            }
            let since = *absent.entry(record.made).or_insert(now);
            let verdict = unlisted(record, now.duration_since(since), owners, said);
            let over = match (verdict, &self.cluster) {
                (Verdict::Undo, _) => Ok(true),
                (Verdict::AskFor(pod), Some(cluster)) => cluster.is_over(&pod),
                _ => Ok(false),
            };
            let done = match over {
                Ok(true) => self.shares.release_if(&record.key, record.made),
                Ok(false) => Ok(()),
                Err(error) => {
                    failed.push(format!("{}: {error}", record.title));
                    Ok(())
                }
            };
            if let Err(error) = done {
                failed.push(format!("{}: {error}", record.title));
            }
        }
        seen.failed.clone_from(&failed);
        failed
    }

    /// Notes whose a share is, and has it follow the pod's annotation. A pod has one share; of
    /// several none is promised time.
    fn listed(
        &self,
        record: &Record,
        owner: &Pod,
        shares: usize,
        said: Said<'_>,
    ) -> Result<(), String> {
        let failed = |error: &dyn std::fmt::Display| format!("{}: {error}", owner.title());
        let object = match said {
            Said::Pods(pods) => pods.iter().find(|pod| pod.pod().is_called_as(owner)),
            _ => None,
        };
        let known = record.pod.as_ref().filter(|pod| pod.is_called_as(owner));
        let pod = object.map(Object::pod).or_else(|| known.cloned());
        let pod = pod.unwrap_or_else(|| owner.clone());
        self.shares
            .belongs(&record.key, record.made, &pod)
            .map_err(|error| failed(&error))?;
        let (Some(cluster), Some(object), Some(share)) =
            (&self.cluster, object, record.shares.first())
        else {
            return Ok(());
        };
        let before = share.share;
        let kept = |why: &dyn std::fmt::Display| {
            Some(format!(
                "refused: {why}; a share of {before} stays in force"
            ))
        };
        let asked = match shares {
            1 => object.share_asked(),
            several => Err(format!(
                "{several} containers of the pod have GPU memory, and a share is for one"
            )),
        };
        let status = match asked {
            Ok(None) if before == 0.0 && object.annotation(STATUS_ANNOTATION).is_none() => None,
            Ok(share) => {
                let to = share.unwrap_or(0.0);
                match self.shares.set_share(&record.key, record.made, to) {
                    Ok(()) => Some(match share {
                        Some(share) => format!("a share of {share} is in force"),
                        None => "no share is promised".into(),
                    }),
                    Err(error) if error.is_refusal() => kept(&error),
                    Err(error) => return Err(failed(&error)),
                }
            }
            Err(why) => kept(&why),
        };
        let mut what = BTreeMap::new();
        // The kubelet may have taken another device than the one that was chosen.
        if shares == 1 {
            what.insert(DEVICE_ANNOTATION, share.device.as_str());
            // So that the extender and a hook that hears from the arbiter count it once.
            let job = share.job.as_ref();
            what.extend(job.map(|job| (JOB_ANNOTATION, job.name.as_str())));
        }
        what.extend(status.as_deref().map(|said| (STATUS_ANNOTATION, said)));
        what.retain(|name, value| object.annotation(name) != Some(*value));
        if what.is_empty() {
            return Ok(());
        }
        cluster
            .annotate(&pod, &what)
            .map_err(|error| failed(&error))
    }
}

fn owner<'a>(record: &Record, owners: &'a Owners) -> Option<&'a Pod> {
    record.units.iter().find_map(|unit| owners.get(unit))
}

fn unlisted(record: &Record, absent: Duration, owners: &Owners, said: Said<'_>) -> Verdict {
    match (&record.pod, said) {
        (Some(pod), Said::Pods(pods)) => {
            let lives = |object: &Object| object.pod() == *pod && !object.has_ended();
            if pods.iter().any(lives) {
                Verdict::Keep
            } else {
                Verdict::AskFor(pod.clone())
            }
        }
        _ if absent < GRACE => Verdict::Keep,
        // A pod that the kubelet does not list, and that lives, may be the one that has this.
        (None, Said::Pods(pods)) => {
            let is_listed = |pod: &Pod| owners.values().any(|owner| owner.is_called_as(pod));
            let all = pods
                .iter()
                .all(|object| object.has_ended() || is_listed(&object.pod()));
            if all { Verdict::Undo } else { Verdict::Keep }
        }
        (_, Said::Nothing) => Verdict::Keep,
        (_, Said::Nobody) => Verdict::Undo,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::RESOURCE;

    fn pod(name: &str, uid: &str) -> Pod {
        Pod {
            namespace: "d".into(),
            name: name.into(),
            uid: uid.into(),
        }
    }

    fn record(pod: Option<Pod>) -> Record {
        Record {
            units: vec!["GPU-0::0".into()],
            pod,
            ..Record::default()
        }
    }

    fn object(name: &str, uid: &str, phase: &str) -> Object {
        serde_json::from_value(json!({
            "metadata": {"name": name, "namespace": "d", "uid": uid},
            "spec": {"containers": [{"resources": {"limits": {RESOURCE: "1"}}}]},
            "status": {"phase": phase},
        }))
        .unwrap()
    }

    #[test]
    fn a_share_whose_pod_is_known_goes_with_the_pod_and_not_with_a_list() {
        let (none, now) = (Owners::new(), Duration::ZERO);
        let mine = record(Some(pod("p", "1")));
        let judge = |pods: &[Object]| unlisted(&mine, GRACE * 100, &none, Said::Pods(pods));
        for phase in ["Running", "Pending", "Unknown"] {
            assert_eq!(judge(&[object("p", "1", phase)]), Verdict::Keep, "{phase}");
        }
        let ask = Verdict::AskFor(pod("p", "1"));
        assert_eq!(judge(&[object("p", "1", "Failed")]), ask);
        assert_eq!(judge(&[object("p", "2", "Running")]), ask, "its successor");
        assert_eq!(judge(&[]), ask);
        assert_eq!(unlisted(&mine, now, &none, Said::Pods(&[])), ask);
        let away = unlisted(&mine, GRACE * 100, &none, Said::Nothing);
        assert_eq!(away, Verdict::Keep, "nobody says that it is over");
    }

    #[test]
    fn a_share_that_was_never_listed_goes_when_nobody_can_have_it() {
        let owners = Owners::from([("GPU-0::7".into(), pod("other", ""))]);
        let judge =
            |absent, pods: &[Object]| unlisted(&record(None), absent, &owners, Said::Pods(pods));
        assert_eq!(judge(GRACE / 2, &[]), Verdict::Keep, "it is listed soon");
        assert_eq!(judge(GRACE, &[]), Verdict::Undo);
        assert_eq!(
            judge(GRACE, &[object("other", "1", "Running")]),
            Verdict::Undo
        );
        let rejected = [object("p", "1", "Failed")];
        assert_eq!(judge(GRACE, &rejected), Verdict::Undo);
        let starting = [object("p", "1", "Pending")];
        assert_eq!(
            judge(GRACE * 100, &starting),
            Verdict::Keep,
            "a new kubelet"
        );
        let away = unlisted(&record(None), GRACE * 100, &owners, Said::Nothing);
        assert_eq!(away, Verdict::Keep);
    }

    #[test]
    fn without_an_api_server_the_kubelets_list_decides_after_a_time() {
        for of in [None, Some(pod("p", ""))] {
            let judge =
                |absent| unlisted(&record(of.clone()), absent, &Owners::new(), Said::Nobody);
            assert_eq!(judge(GRACE / 2), Verdict::Keep);
            assert_eq!(judge(GRACE), Verdict::Undo);
        }
    }
}
