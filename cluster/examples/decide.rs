//! What a question to a running hook costs (`POST /v1/decide`): registers simulated nodes at it,
//! has each report its devices and metered jobs, feeds measurements of all pairs of their kinds,
//! and asks about one job with all devices as candidates. No device is empty, so that the answer
//! has to come from a measured pair. Times are the client's, with messages and connection;
//! `scripts/bench/engines` starts the hook.
//!
//! Prints one JSON object: `decide_us` by question, and what was asked.

use std::time::{Duration, Instant};

use cluster::live::http::client::Client;
use cluster::live::placement::{Candidate, DecideRequest, Decided, JobProfile};
use cluster::live::wire::{
    Device, Fed, FedPair, Feed, HookStatus, Orders, Registration, Report, WaitMatrix, Welcome,
};
use control::{ArbiterStatus, Class, JobDevice, JobStatus, Profile};
use serde_json::json;

const GIB: u64 = 1 << 30;
/// TIMEOUT: of one request; the largest takes a fraction of a second.
const PATIENCE: Duration = Duration::from_secs(60);
/// Memory of a device.
const DEVICE_BYTES: u64 = 80 * GIB;
/// Type of all devices.
const TYPE: &str = "Simulated";
/// Kinds of job.
const KINDS: usize = 7;
/// Of each job on a device: quota, share, part of the time in which the device works for it, and
/// how sure that is.
const JOB_BYTES: u64 = 20 * GIB;
const SHARE: f64 = 0.25;
const BUSY: f64 = 0.3;
const CONFIDENCE: f64 = 0.9;

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
            arbiter: Some(arbiter(node, devices)),
            ..Report::default()
        };
        let _: Orders = hook.ask("POST", &format!("{path}/report"), Some(&report))?;
    }
    let status: HookStatus = hook.ask("GET", "/v1/status", None::<&()>)?;
    let up = status.nodes.iter().filter(|node| node.up).count();
    if up != nodes {
        return Err(format!("{up} of {nodes} nodes are up").into());
    }
    let pairs = pairs();
    let fed: Fed = hook.ask("POST", "/v1/pairs", Some(&Feed { pairs }))?;
    let candidates: Vec<Candidate> = (0..nodes)
        .flat_map(|node| (0..devices).map(move |at| candidate(node, at)))
        .collect();
    let mut times_us = Vec::with_capacity(rounds);
    let mut chosen = Decided::default();
    for round in 0..rounds {
        let asked = DecideRequest {
            job: JobProfile {
                id: format!("job-{round}"),
                kind: kind(round),
                mem_bytes: Some(10 * GIB),
                share: Some(SHARE),
                busy: Some(0.4),
                confidence: Some(CONFIDENCE),
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
        if chosen.beside.is_empty() || chosen.confidence < CONFIDENCE {
            return Err(format!("not by a measured pair: {}", chosen.reason).into());
        }
    }
    let bytes = serde_json::to_vec(&candidates)?.len();
    println!(
        "{}",
        json!({
            "decide_us": times_us, "nodes": nodes, "devices": nodes * devices,
            "residents": candidates.iter().map(|one| one.residents.len()).sum::<usize>(),
            "pairs": fed.pairs, "question_bytes": bytes, "reason": chosen.reason,
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
        name: TYPE.into(),
        total_bytes: DEVICE_BYTES,
        simulated: true,
    }
}

fn kind(number: usize) -> String {
    format!("kind-{}", number % KINDS)
}

/// Kinds of the jobs of a device, by number: of every second one, else two.
fn kinds_on(node: usize, at: usize) -> Vec<usize> {
    let jobs = 1 + at % 2;
    let kinds = (0..jobs).map(|number| (node + at + number) % KINDS);
    kinds.collect()
}

fn job_name(node: usize, at: usize, number: usize) -> String {
    format!("job.{node}.{at}.{number}")
}

fn waits(node: usize, at: usize) -> WaitMatrix {
    let jobs = kinds_on(node, at).len();
    WaitMatrix {
        uuid: uuid(node, at),
        // CAST: one or two.
        free_share: 1.0 - SHARE * jobs as f64,
        free_bytes: DEVICE_BYTES - JOB_BYTES * jobs as u64,
        ..WaitMatrix::default()
    }
}

/// What a node's arbiter says of the jobs of its devices.
fn arbiter(node: usize, devices: usize) -> ArbiterStatus {
    let job = |at: usize, number: usize| JobStatus {
        name: job_name(node, at, number),
        class: Class::Guaranteed,
        share_asked: Some(SHARE),
        devices: vec![JobDevice {
            uuid: uuid(node, at),
            mem_limit_bytes: Some(JOB_BYTES),
            ..JobDevice::default()
        }],
        profile: Some(Box::new(Profile {
            busy_fraction: BUSY,
            confidence: CONFIDENCE,
            ..Profile::default()
        })),
        ..JobStatus::default()
    };
    let on = |at: usize| {
        let numbers = 0..kinds_on(node, at).len();
        numbers.map(move |number| job(at, number))
    };
    ArbiterStatus {
        jobs: (0..devices).flat_map(on).collect(),
        ..ArbiterStatus::default()
    }
}

/// Measurements of every kind beside every device's jobs: most pay, and some do not.
fn pairs() -> Vec<FedPair> {
    let mut hosts: Vec<String> = (0..KINDS).map(kind).collect();
    for one in 0..KINDS {
        // As the hook calls the jobs of a device together.
        let mut both = [kind(one), kind(one + 1)];
        both.sort();
        hosts.push(both.join(" + "));
    }
    let of = |(at, host): (usize, &String)| {
        let pair = |number: usize| FedPair {
            gpu: TYPE.into(),
            gpus: 1,
            kinds: [host.clone(), kind(number)],
            rates: match (at + number) % 5 {
                0 => [0.4, 0.5],
                // CAST: below five.
                pays => [0.9, 0.6 + 0.05 * pays as f64],
            },
        };
        (0..KINDS).map(pair).collect::<Vec<_>>()
    };
    hosts.iter().enumerate().flat_map(of).collect()
}

/// A device with its jobs, which the engine knows by kind and the node by what it has metered.
fn candidate(node: usize, at: usize) -> Candidate {
    let kinds = kinds_on(node, at).into_iter().enumerate();
    let residents = kinds.map(|(number, of)| JobProfile {
        id: job_name(node, at, number),
        kind: kind(of),
        mem_bytes: Some(JOB_BYTES),
        share: Some(SHARE),
        busy: Some(BUSY),
        confidence: Some(CONFIDENCE),
        ..JobProfile::default()
    });
    Candidate {
        node: name(node),
        uuid: uuid(node, at),
        total_bytes: DEVICE_BYTES,
        residents: residents.collect(),
        ..Candidate::default()
    }
}
