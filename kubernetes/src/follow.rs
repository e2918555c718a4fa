//! Shares follow their pods: undone when a pod is over, and changed as its annotation says.
//!
//! A kubelet never says that units come back; it lists who has which. That a pod is not listed
//! says little: a kubelet that has just started may list none, and one that was asked too early
//! does not list a container yet. So a share whose pod is known is undone when the API server, too,
//! says that the pod is over. Whose it is stands in its record, and outlives this process. A share
//! that was never listed (its pod was refused after its units were given) is undone after a time in
//! which the kubelet lists all pods of this node that have units.
//!
//! The kubelet's list has names and no uids. So whose a share is, is asked of the API server once,
//! as of then, and never changes: a pod that is made anew under the same name has no part in it.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::objects::Object;
use crate::pods::{Cluster, Owner, Owners, STATUS_ANNOTATION, has_units};
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
    /// yet. Says what could not be done, also that the kubelet has not answered: all shares stay
    /// as they are then.
    pub fn follow(
        &self,
        before: &[Record],
        owners: Result<Owners, String>,
        now: Instant,
    ) -> Vec<String> {
        let mut seen = self.seen.lock();
        let owners = match owners {
            Ok(owners) => owners,
            Err(why) => {
                seen.absent.clear();
                return seen.failed.iter().cloned().chain([why]).collect();
            }
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
        let mut listed: BTreeMap<&Pod, Vec<Part<'_>>> = BTreeMap::new();
        for record in before {
            if let Some(Owner { pod, container }) = owner(record, owners) {
                absent.remove(&record.made);
                let part = Part { container, record };
                listed.entry(pod).or_default().push(part);
                continue;
            }
            let since = *absent.entry(record.made).or_insert(now);
            let verdict = unlisted(record, now.duration_since(since), owners, before, said);
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
        for (pod, parts) in listed {
            if let Err(error) = self.listed(pod, parts, said) {
                failed.push(format!("{}: {error}", pod.title()));
            }
        }
        seen.failed.clone_from(&failed);
        failed
    }

    /// Notes whose the shares of a pod are, and has them follow its annotation.
    fn listed(&self, name: &Pod, parts: Vec<Part<'_>>, said: Said<'_>) -> Result<(), String> {
        let failed = |error: &dyn Display| error.to_string();
        let object = match said {
            Said::Pods(pods) => pods.iter().find(|pod| pod.pod().is_called_as(name)),
            _ => None,
        };
        let mut object = object.cloned();
        if parts.iter().any(|part| part.record.settled().is_none()) {
            // A server's memory may still have the one that was called so before.
            if let (Some(cluster), Said::Pods(_)) = (&self.cluster, said) {
                object = cluster.present(name).map_err(|error| failed(&error))?;
            }
            let pod = object.as_ref().map_or_else(|| name.clone(), Object::pod);
            for part in parts.iter().filter(|part| part.record.settled().is_none()) {
                self.shares
                    .belongs(&part.record.key, part.record.made, &pod)
                    .map_err(|error| failed(&error))?;
            }
        }
        let (Some(cluster), Some(object)) = (&self.cluster, object) else {
            return Ok(());
        };
        let pod = object.pod();
        let mut parts = parts;
        // What a pod of before was given is not this one's, though the kubelet still lists it.
        parts.retain(|part| part.record.settled().is_none_or(|of| *of == pod));
        parts.sort_by_key(|part| part.container);
        let (status, failure) = self.obey(&object, &parts);
        let mut what = BTreeMap::new();
        // The kubelet may have taken another device than the one that was chosen.
        if let [part] = &*parts
            && let [share] = &*part.record.shares
        {
            what.insert(DEVICE_ANNOTATION, share.device.as_str());
            // So that the extender and a hook that hears from the arbiter count it once.
            let job = share.job.as_ref();
            what.extend(job.map(|job| (JOB_ANNOTATION, job.name.as_str())));
        }
        what.extend(status.as_deref().map(|said| (STATUS_ANNOTATION, said)));
        what.retain(|name, value| object.annotation(name) != Some(*value));
        if !what.is_empty() {
            cluster
                .annotate(&pod, &what)
                .map_err(|error| failed(&error))?;
        }
        failure.map_or(Ok(()), Err)
    }

    /// Sets the share of a pod's containers as its annotation says, and what became of it: one text
    /// for the pod, if there is something to say, and what could not be done.
    fn obey(&self, object: &Object, parts: &[Part<'_>]) -> (Option<String>, Option<String>) {
        let before: Vec<f64> = parts.iter().map(Part::share).collect();
        let asked = match parts.len() {
            0 => return (None, None),
            1 => object.share_asked(),
            several => object.share_asked().and_then(|share| {
                let one = share.filter(|share| *share > 0.0);
                one.map_or(Ok(share), |_| {
                    Err(format!(
                        "{several} containers of the pod have GPU memory, and a share is for one"
                    ))
                })
            }),
        };
        let unsaid = asked == Ok(None) && before.iter().all(|share| *share == 0.0);
        if unsaid && object.annotation(STATUS_ANNOTATION).is_none() {
            return (None, None);
        }
        let (mut refused, mut kept) = (asked.as_ref().err().cloned(), Vec::new());
        for (part, before) in parts.iter().zip(before) {
            let Ok(share) = asked else {
                kept.push(in_force(before, "stays"));
                continue;
            };
            let to = share.unwrap_or(0.0);
            let record = part.record;
            match self.shares.set_share(&record.key, record.made, to) {
                Ok(()) => kept.push(in_force(to, "is")),
                Err(error) if error.is_refusal() => {
                    refused.get_or_insert_with(|| error.to_string());
                    kept.push(in_force(before, "stays"));
                }
                Err(error) => return (None, Some(error.to_string())),
            }
        }
        (Some(status(refused.as_deref(), parts, &kept)), None)
    }
}

/// A share, and the container that the kubelet lists for it.
#[derive(Debug)]
struct Part<'a> {
    container: &'a str,
    record: &'a Record,
}

impl Part<'_> {
    fn share(&self) -> f64 {
        self.record.shares.first().map_or(0.0, |share| share.share)
    }
}

fn in_force(share: f64, how: &str) -> String {
    if share == 0.0 {
        "no share is promised".into()
    } else {
        format!("a share of {share} {how} in force")
    }
}

/// The text for a pod: with the containers' names, where there are several.
fn status(refused: Option<&str>, parts: &[Part<'_>], kept: &[String]) -> String {
    let each: Vec<String> = match kept {
        [one] => vec![one.clone()],
        several => {
            let named = parts.iter().zip(several);
            named
                .map(|(part, kept)| format!("{}: {kept}", part.container))
                .collect()
        }
    };
    let each = each.join("; ");
    refused.map_or_else(|| each.clone(), |why| format!("refused: {why}; {each}"))
}

fn owner<'a>(record: &Record, owners: &'a Owners) -> Option<&'a Owner> {
    record.units.iter().find_map(|unit| owners.get(unit))
}

fn unlisted(
    record: &Record,
    absent: Duration,
    owners: &Owners,
    records: &[Record],
    said: Said<'_>,
) -> Verdict {
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
            let all = pods
                .iter()
                .all(|object| object.has_ended() || has_units(&object.pod(), owners, records));
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
        let judge = |pods: &[Object]| unlisted(&mine, GRACE * 100, &none, &[], Said::Pods(pods));
        for phase in ["Running", "Pending", "Unknown"] {
            assert_eq!(judge(&[object("p", "1", phase)]), Verdict::Keep, "{phase}");
        }
        let ask = Verdict::AskFor(pod("p", "1"));
        assert_eq!(judge(&[object("p", "1", "Failed")]), ask);
        assert_eq!(judge(&[object("p", "2", "Running")]), ask, "its successor");
        assert_eq!(judge(&[]), ask);
        assert_eq!(unlisted(&mine, now, &none, &[], Said::Pods(&[])), ask);
        let away = unlisted(&mine, GRACE * 100, &none, &[], Said::Nothing);
        assert_eq!(away, Verdict::Keep, "nobody says that it is over");
    }

    #[test]
    fn a_share_that_was_never_listed_goes_when_nobody_can_have_it() {
        let owner = Owner {
            pod: pod("other", ""),
            container: "c".into(),
        };
        let owners = Owners::from([("GPU-0::7".into(), owner)]);
        let records = [Record {
            units: vec!["GPU-0::7".into()],
            ..record(Some(pod("other", "1")))
        }];
        let judge = |absent, pods: &[Object]| {
            unlisted(&record(None), absent, &owners, &records, Said::Pods(pods))
        };
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
        let anew = [object("other", "2", "Pending")];
        assert_eq!(
            judge(GRACE * 100, &anew),
            Verdict::Keep,
            "only the one before is listed"
        );
        let away = unlisted(&record(None), GRACE * 100, &owners, &[], Said::Nothing);
        assert_eq!(away, Verdict::Keep);
    }

    #[test]
    fn without_an_api_server_the_kubelets_list_decides_after_a_time() {
        for of in [None, Some(pod("p", ""))] {
            let mine = record(of);
            let judge = |absent| unlisted(&mine, absent, &Owners::new(), &[], Said::Nobody);
            assert_eq!(judge(GRACE / 2), Verdict::Keep);
            assert_eq!(judge(GRACE), Verdict::Undo);
        }
    }
}
