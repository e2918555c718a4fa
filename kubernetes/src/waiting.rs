//! Pods that were refused, and when a scheduler is to look at them again.
//!
//! A scheduler sets a pod that fits nowhere aside until something changes that it knows of: a pod
//! that goes, a node that comes. It does not know that a share has become smaller, that a node's
//! arbiter has let a job go, or that the extender is there again, and comes back to such a pod
//! after minutes. A change of the pod itself it does know of. So the extender, which finds that
//! there is space, writes that on the pod, and seldom where it did not help.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::fit::Wish;
use crate::records::Pod;

/// Pods that are looked at again; those beyond wait for their scheduler.
const MOST: usize = 64;
/// How long after its last refusal a pod is looked at again, at first and at most.
const PAUSES: [Duration; 2] = [Duration::from_secs(2), Duration::from_secs(60)];
/// TIMEOUT: a scheduler asks about each pod that waits every five minutes.
const FORGOTTEN: Duration = Duration::from_secs(600);

/// One of them.
#[derive(Debug, Clone, PartialEq)]
pub struct Waits {
    pub pod: Pod,
    pub wish: Wish,
    /// Where its scheduler would have it.
    pub nodes: Vec<String>,
    asked: Instant,
    due: Instant,
    /// How often its scheduler was notified.
    notified: u32,
}

/// All of them, by uid.
#[derive(Debug, Default)]
pub struct Waiting {
    pods: BTreeMap<String, Waits>,
}

impl Waiting {
    /// Notes that a pod was refused.
    pub fn refused(&mut self, pod: Pod, wish: &Wish, nodes: &[String], now: Instant) {
        self.pods
            .retain(|_, one| now.duration_since(one.asked) < FORGOTTEN);
        let notified = match self.pods.get(&pod.uid) {
            Some(before) => before.notified,
            None if self.pods.len() >= MOST => return,
            None => 0,
        };
        let waits = Waits {
            wish: wish.clone(),
            nodes: nodes.to_vec(),
            asked: now,
            due: now + pause(notified),
            notified,
            pod,
        };
        self.pods.insert(waits.pod.uid.clone(), waits);
    }

    /// Notes that nothing is to be done for a pod any more.
    pub fn forget(&mut self, uid: &str) {
        self.pods.remove(uid);
    }

    /// Those that are to be looked at now; they are not for a while then.
    pub fn due(&mut self, now: Instant) -> Vec<Waits> {
        let due = self.pods.values_mut().filter(|one| one.due <= now);
        let due = due.map(|one| {
            one.due = now + PAUSES[0];
            one.clone()
        });
        due.collect()
    }

    /// Notes that a pod's scheduler was notified to look again.
    pub fn notified(&mut self, uid: &str, now: Instant) {
        if let Some(one) = self.pods.get_mut(uid) {
            one.notified = one.notified.saturating_add(1);
            one.due = now + pause(one.notified);
        }
    }
}

fn pause(notified: u32) -> Duration {
    let [first, most] = PAUSES;
    first.saturating_mul(1 << notified.min(10)).min(most)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(uid: &str) -> Pod {
        Pod {
            uid: uid.into(),
            ..Pod::default()
        }
    }

    #[test]
    fn a_pod_is_looked_at_again_and_seldom_where_that_did_not_help() {
        let (mut waiting, begin) = (Waiting::default(), Instant::now());
        let wish = Wish::default();
        let mut now = begin;
        let mut pauses = Vec::new();
        for _ in 0..7 {
            waiting.refused(pod("1"), &wish, &["n".into()], now);
            assert_eq!(waiting.due(now), [], "just now");
            let refused = now;
            while waiting.due(now).is_empty() {
                now += Duration::from_secs(1);
            }
            pauses.push((now - refused).as_secs());
            waiting.notified("1", now);
        }
        assert_eq!(pauses, [2, 4, 8, 16, 32, 60, 60]);
        // Nobody asks about it: it is looked at again, and forgotten in the end.
        assert_eq!(waiting.due(now + PAUSES[1]).len(), 1);
        waiting.refused(pod("2"), &wish, &[], now + FORGOTTEN);
        assert_eq!(waiting.pods.keys().collect::<Vec<_>>(), ["2"]);
        waiting.forget("2");
        for at in 0..2 * MOST {
            waiting.refused(pod(&at.to_string()), &wish, &[], now);
        }
        assert_eq!(waiting.pods.len(), MOST);
    }
}
