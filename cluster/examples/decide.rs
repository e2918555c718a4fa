//! What a question to a running hook costs (`POST /v1/decide`): registers simulated nodes at it,
//! has each report, and asks about one job with all of their devices as candidates. Times are the
//! client's, with messages and connection; `scripts/bench/engines` starts the hook.
//!
//! Prints one JSON object: `decide_us` by question, and what was asked.

use std::time::{Duration, Instant};

use cluster::live::http::client::Client;
use cluster::live::placement::{Candidate, DecideRequest, Decided, JobProfile};
use cluster::live::wire::{Device, HookStatus, Orders, Registration, Report, WaitMatrix, Welcome};
use serde_json::json;

const GIB: u64 = 1 << 30;
/// TIMEOUT: of one request; the largest takes a fraction of a second.
const PATIENCE: Duration = Duration::from_secs(60);
/// Memory of a device.
const DEVICE_BYTES: u64 = 80 * GIB;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [url, token_file, nodes, devices, rounds] = words.as_slice() else {
        return Err("decide URL TOKEN_FILE NODES DEVICES ROUNDS".into());
    };
    let token = std::fs::read_to_string(token_file)?;
    let (nodes, devices): (usize, usize) = (nodes.parse()?, devices.parse()?);
    let rounds: usize = rounds.parse()?;
    let mut hook = Client::new(url, token.trim(), PATIENCE)?;
    for node in 0..nodes {
        let instance = format!("instance-{node}");
        let said = Registration {
            api: 1,
            instance: instance.clone(),
            engine: "local".into(),
            cpus: 64.0,
            mem_bytes: 512 * GIB,
            devices: (0..devices).map(|at| device(node, at)).collect(),
            ..Registration::default()
        };
        let path = format!("/v1/nodes/{}", name(node));
        let _: Welcome = hook.ask("PUT", &path, Some(&said))?;
        let report = Report {
            instance,
            waits: (0..devices).map(|at| waits(node, at)).collect(),
            ..Report::default()
        };
        let _: Orders = hook.ask("POST", &format!("{path}/report"), Some(&report))?;
    }
    let status: HookStatus = hook.ask("GET", "/v1/status", None::<&()>)?;
    let up = status.nodes.iter().filter(|node| node.up).count();
    if up != nodes {
        return Err(format!("{up} of {nodes} nodes are up").into());
    }
    let candidates: Vec<Candidate> = (0..nodes)
        .flat_map(|node| (0..devices).map(move |at| candidate(node, at)))
        .collect();
    let mut times_us = Vec::with_capacity(rounds);
    let mut chosen = Decided::default();
    for round in 0..rounds {
        let asked = DecideRequest {
            job: JobProfile {
                id: format!("job-{round}"),
                kind: format!("kind-{}", round % 7),
                mem_bytes: Some(10 * GIB),
                share: Some(0.25),
                busy: Some(0.4),
                confidence: Some(0.9),
                ..JobProfile::default()
            },
            candidates: candidates.clone(),
        };
        let begun = Instant::now();
        chosen = hook.ask("POST", "/v1/decide", Some(&asked))?;
        times_us.push(begun.elapsed().as_micros());
        if chosen.node.is_empty() {
            return Err(format!("no place: {}", chosen.reason).into());
        }
    }
    let bytes = serde_json::to_vec(&candidates)?.len();
    println!(
        "{}",
        json!({
            "decide_us": times_us, "nodes": nodes, "devices": nodes * devices,
            "question_bytes": bytes, "reason": chosen.reason,
        })
    );
    Ok(())
}

fn name(node: usize) -> String {
    format!("node-{node}")
}

fn uuid(node: usize, at: usize) -> String {
    format!("GPU-{node:08}-0000-0000-0000-{at:012}")
}

fn device(node: usize, at: usize) -> Device {
    Device {
        uuid: uuid(node, at),
        name: "Simulated".into(),
        total_bytes: DEVICE_BYTES,
        simulated: true,
    }
}

fn waits(node: usize, at: usize) -> WaitMatrix {
    WaitMatrix {
        uuid: uuid(node, at),
        free_share: 1.0,
        free_bytes: DEVICE_BYTES,
        ..WaitMatrix::default()
    }
}

/// Every second device has one job, every fourth two.
fn candidate(node: usize, at: usize) -> Candidate {
    let resident = |number: usize| JobProfile {
        id: format!("{node}-{at}-{number}"),
        kind: format!("kind-{}", (node + at + number) % 7),
        mem_bytes: Some(20 * GIB),
        share: Some(0.25),
        busy: Some(0.3),
        confidence: Some(0.9),
        ..JobProfile::default()
    };
    let jobs = match at % 4 {
        1 => 1,
        3 => 2,
        _ => 0,
    };
    Candidate {
        node: name(node),
        uuid: uuid(node, at),
        total_bytes: DEVICE_BYTES,
        residents: (0..jobs).map(resident).collect(),
        ..Candidate::default()
    }
}
