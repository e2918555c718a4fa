//! What a device plugin takes to answer Allocate: the suite's kubelet asks the plugin that
//! registers with it for one unit after the other. `scripts/bench/engines` starts arbiter and
//! plugin.
//!
//! Prints one JSON object: `allocate_ms` by call.

use std::path::Path;
use std::time::Instant;

#[path = "../suite/kubernetes/kubelet.rs"]
#[expect(dead_code, reason = "a kubelet does more than this asks of it")]
mod kubelet;
#[path = "../suite/kubernetes/raw.rs"]
mod raw;

use kubelet::Kubelet;

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [dir, rounds] = words.as_slice() else {
        panic!("allocate DIR ROUNDS");
    };
    let rounds: usize = rounds.parse().expect("a number");
    let kubelet = Kubelet::start(Path::new(dir));
    let units = kubelet.watch("devices are healthy", |devices| {
        let healthy = |one: &kubernetes::proto::device_plugin::Device| {
            one.health == kubernetes::proto::device_plugin::HEALTHY
        };
        !devices.is_empty() && devices.iter().all(healthy)
    });
    assert!(units.len() >= rounds, "{} units for {rounds}", units.len());
    let times_ms: Vec<f64> = units
        .chunks(1)
        .take(rounds)
        .map(|unit| {
            let begun = Instant::now();
            let answer = kubelet.allocate(unit).expect("allocated");
            assert_eq!(answer.cdi_devices.len(), 1, "{answer:?}");
            begun.elapsed().as_secs_f64() * 1000.0
        })
        .collect();
    println!("{}", serde_json::json!({ "allocate_ms": times_ms }));
}
