//! What is free on a node's GPUs, as JSON in the node's `Extra`: Slurm shows it, and from 24.11 on
//! chooses nodes by it (`SchedulerParameters=extra_constraints`, `srun --extra=gpumem_free>=40`).
//!
//! Slurm plans ahead less well where `Extra` often changes, so memory is in whole GiB and shares in
//! steps of 0.05, and a node is written to only where one of them is another one. What others have
//! put there is kept.

use control::Class;
use serde_json::{Map, Value, json};

use super::{Place, Places};
use crate::live::wire::NodeView;

const MEM: &str = "gpumem_free";
const SHARE: &str = "gpushare_free";
/// Steps of a share.
const STEPS: f64 = 20.0;

impl Places {
    /// The words for `scontrol update` by node, where its `Extra` is not what it should be.
    /// `shown`: from `scontrol -o show node`; `nodes`: what the hook knows.
    #[must_use]
    pub fn extra(&self, shown: &str, nodes: &[NodeView]) -> Vec<Vec<String>> {
        let lines = shown.lines().filter_map(|line| {
            let name = super::queue::fields(line).get("NodeName").copied()?;
            let known = nodes.iter().find(|node| node.name == name && node.up);
            let here = self.all.iter().filter(|place| place.gpu.node == name);
            let free: Vec<_> = here.map(|place| (place, self.free(place, known))).collect();
            let before = (!free.is_empty()).then(|| written(line)).flatten()?;
            let after = with(before.clone(), &free);
            let text = Value::Object(after.clone()).to_string();
            let words = [format!("NodeName={name}"), format!("Extra={text}")];
            (after != before).then(|| words.to_vec())
        });
        lines.collect()
    }

    /// Whole GiB, and steps of share.
    fn free(&self, place: &Place, node: Option<&NodeView>) -> (u64, f64) {
        let mut waits = node.into_iter().flat_map(|node| &node.waits);
        let reported = waits.find(|waits| waits.uuid == place.uuid);
        let shards = place.gpu.shards.saturating_sub(place.taken);
        let bytes = shards.saturating_mul(self.shard_bytes);
        // The node may know of jobs that Slurm does not.
        let bytes = reported.map_or(bytes, |waits| bytes.min(waits.free_bytes));
        let guaranteed = place
            .jobs
            .iter()
            .filter(|job| job.class == Class::Guaranteed);
        let promised: f64 = guaranteed.filter_map(|job| job.share).sum();
        let share = if place.taken >= u64::MAX / 2 {
            0.0
        } else {
            1.0 - promised
        };
        let share = reported.map_or(share, |waits| share.min(waits.free_share));
        // 0.1 is a little less than that in binary.
        let steps = (share * STEPS + 1e-6).floor().clamp(0.0, STEPS);
        (bytes >> 30, steps / STEPS)
    }
}

/// A node's `Extra`; `None` where it is no JSON object: it is somebody else's.
fn written(line: &str) -> Option<Map<String, Value>> {
    let text = line.split_once(" Extra=").map_or("", |(_, text)| text);
    if text.is_empty() || text.starts_with(' ') || text.starts_with("(null)") {
        return Some(Map::new());
    }
    let mut values = serde_json::Deserializer::from_str(text).into_iter();
    values.next()?.ok()
}

fn with(mut all: Map<String, Value>, free: &[(&Place, (u64, f64))]) -> Map<String, Value> {
    // Of GPUs that are gone, too.
    all.retain(|key, _| !(key.ends_with(MEM) || key.ends_with(SHARE)));
    let (mut most_bytes, mut most_share) = (0, 0.0f64);
    for (place, (gib, share)) in free {
        let kind = &place.gpu.kind;
        all.insert(format!("{kind}_{MEM}"), json!(gib));
        all.insert(format!("{kind}_{SHARE}"), json!(share));
        (most_bytes, most_share) = (most_bytes.max(*gib), most_share.max(*share));
    }
    all.insert(MEM.into(), json!(most_bytes));
    all.insert(SHARE.into(), json!(most_share));
    all
}
