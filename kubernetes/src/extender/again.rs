//! Pods that were refused are looked at again, beside the scheduler's questions.

use std::io;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;

use super::{Extender, NOTES};
use crate::DECISION_ANNOTATION;
use crate::api::{ApiError, Patch, is_name};
use crate::fit::Wish;
use crate::objects::Object;
use crate::records::Pod;
use crate::waiting::Waits;

/// How often it is looked whether a pod that was refused has space now.
const TENDS: Duration = Duration::from_secs(1);
/// Nodes that are kept of a pod that waits: as many as Kubernetes has.
const MOST_NODES: usize = 5000;

impl Extender {
    /// Has pods that wait looked at again when there is space for them, by a thread that never
    /// ends.
    ///
    /// # Errors
    /// There is no thread to be had.
    pub fn tend(self: &Arc<Self>) -> io::Result<()> {
        let own = Arc::clone(self);
        let begin = |own: &Self| match own.unplaced() {
            Ok(refused) => (true, refused),
            Err(error) => (false, Some(error)),
        };
        // Those that asked while nobody was here to answer; where the API server is away, once it
        // is there.
        let (mut has_begun, mut wrong) = begin(&own);
        let tend = move || {
            let mut said = None;
            loop {
                if wrong.is_some() && wrong != said {
                    crate::say!("pods that wait: {}", wrong.as_deref().unwrap_or_default());
                }
                said = wrong;
                thread::sleep(TENDS);
                if has_begun {
                    wrong = own.look_again();
                } else {
                    (has_begun, wrong) = begin(&own);
                }
            }
        };
        thread::Builder::new().name("waiting".into()).spawn(tend)?;
        Ok(())
    }

    /// Tells the scheduler of all pods that wait for a place: it may have asked about them while
    /// nobody answered. Returns why one of them may not be changed; the others are all the same.
    fn unplaced(&self) -> Result<Option<String>, String> {
        let api = self.api.until(Instant::now() + self.limit);
        let waiting = "&fieldSelector=spec.nodeName%3D,status.phase%3DPending";
        let pods: Vec<Object> = api
            .list("/api/v1/pods", waiting)
            .map_err(|error| error.to_string())?;
        let ours = pods
            .iter()
            .filter(|pod| pod.spec.node_name.is_empty() && matches!(pod.wish(), Ok(Some(_))));
        let mut refused = None;
        for pod in ours.take(NOTES) {
            // Another one may have placed it since.
            match self.have_asked(&pod.pod(), "the extender has started") {
                Ok(()) => {}
                Err(error @ ApiError::Refused { .. }) => refused = Some(error.to_string()),
                Err(error) => return Err(error.to_string()),
            }
        }
        Ok(refused)
    }

    /// Looks for space for pods that were refused; says what is wrong.
    fn look_again(&self) -> Option<String> {
        let due = self.waiting.lock().due(Instant::now());
        let end = Instant::now() + self.limit;
        let mut refused = None;
        for waits in due {
            match self.space(&waits, end) {
                Ok(None) => {}
                Ok(Some(node)) => {
                    let notified = self.have_asked(&waits.pod, &format!("{node} has space"));
                    self.waiting.lock().notified(&waits.pod.uid, Instant::now());
                    match notified {
                        Ok(()) => {}
                        Err(error @ ApiError::Refused { .. }) => refused = Some(error.to_string()),
                        Err(error) => return Some(error.to_string()),
                    }
                }
                Err(error) => return Some(error),
            }
        }
        refused
    }

    /// A node that a pod which was refused could have now.
    fn space(&self, waits: &Waits, end: Instant) -> Result<Option<String>, String> {
        let (wish, uid) = (&waits.wish, &waits.pod.uid);
        let picture = self.look(end)?;
        let (_, candidates) = self.fitting(&picture, wish, &waits.nodes, uid);
        drop(picture);
        let first = candidates.first().map(|one| one.node.clone());
        Ok(match self.advice(wish, &candidates, end) {
            Some(Ok(placed)) => Some(placed.node).filter(|node| !node.is_empty()),
            // Without the hook it goes by fit.
            Some(Err(_)) | None => first,
        })
    }

    /// Notes that a pod waits. A question may be anybody's: what is no name is not asked about, and
    /// no more nodes are kept than there may be.
    pub(super) fn refuse(&self, pod: Pod, wish: &Wish, nodes: &[String]) {
        if !is_name(&pod.name) || !is_name(&pod.namespace) {
            return;
        }
        let nodes = nodes.iter().filter(|node| is_name(node));
        let nodes: Vec<String> = nodes.take(MOST_NODES).cloned().collect();
        let mut waiting = self.waiting.lock();
        waiting.refused(pod, wish, &nodes, Instant::now());
    }

    /// Changes a pod that waits, so that its scheduler asks about it again.
    fn have_asked(&self, pod: &Pod, why: &str) -> Result<(), ApiError> {
        let api = self.api.until(Instant::now() + self.limit);
        let path = format!("/api/v1/namespaces/{}/pods/{}", pod.namespace, pod.name);
        let now = api.get(&path)?;
        let text = |at: &str| now.as_ref()?.pointer(at)?.as_str();
        if text("/metadata/uid") != Some(&pod.uid)
            || text("/spec/nodeName").is_some_and(|at| !at.is_empty())
        {
            self.waiting.lock().forget(&pod.uid);
            return Ok(());
        }
        let at = jiff::Timestamp::now();
        let body = json!({"metadata": {
            "uid": pod.uid,
            // What is placed meanwhile is left as it is.
            "resourceVersion": text("/metadata/resourceVersion"),
            "annotations": {DECISION_ANNOTATION: format!("waits; {why}, and its scheduler is to ask again ({at:.0})")},
        }});
        match api.patch(&path, Patch::Merge, &body) {
            Ok(_) | Err(ApiError::NotFound { .. } | ApiError::Refused { status: 409, .. }) => {
                Ok(())
            }
            Err(error) => Err(error),
        }
    }
}
