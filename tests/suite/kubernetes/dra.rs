//! The DRA driver, on claims that Kubernetes 1.36 wrote.

use kubernetes::proto::dra as v1;
use kubernetes::shares::STEPS;
use serde_json::{Value, json};
use tests::{Running, wait_until};

use super::kubelet::Kubelet;
use super::{GIB, Node};
use crate::quota::{refused, take};

/// What a cluster of 1.36 had: two claims on one device, and one that waits.
const RECORDED: &str = include_str!("../../../kubernetes/data/claims.recorded.json");
/// How the kubelet of 1.36 names a socket in `plugins_registry`.
const AUTHORITY: &str = "%2Fvar%2Flib%2Fkubelet%2Fplugins_registry%2Fsublet.dev-reg.sock";

/// The only device of the node, as the driver that runs has published it.
fn device(node: &Node) -> Value {
    let slice = wait_until("the devices are published", || {
        node.api
            .get("/apis/resource.k8s.io/v1/resourceslices/n1-sublet.dev")
    });
    slice["spec"]["devices"][0]["name"].clone()
}

/// The recorded claims, for the device of this node.
fn recorded(node: &Node) -> Vec<Value> {
    let list: Value = serde_json::from_str(RECORDED).expect("JSON");
    let mut items = list["items"].as_array().expect("claims").clone();
    for item in &mut items {
        if let Some(given) = item.pointer_mut("/status/allocation/devices/results/0") {
            given["device"] = device(node);
        }
    }
    items
}

fn claims(node: &Node) -> Vec<v1::Claim> {
    let put = recorded(node).into_iter().map(|object| put(node, object));
    put.collect()
}

fn put(node: &Node, object: Value) -> v1::Claim {
    let text = |name: &str| object["metadata"][name].as_str().expect("text").to_owned();
    let claim = v1::Claim {
        namespace: text("namespace"),
        uid: text("uid"),
        name: text("name"),
    };
    node.api.put(&path(&claim), object);
    claim
}

fn path(claim: &v1::Claim) -> String {
    format!(
        "/apis/resource.k8s.io/v1/namespaces/{}/resourceclaims/{}",
        claim.namespace, claim.name
    )
}

/// A claim like the first of the recorded ones, with other amounts.
fn claim(node: &Node, name: &str, memory: &str, sm: &str) -> v1::Claim {
    let mut object = recorded(node)[0].clone();
    object["metadata"]["name"] = json!(name);
    object["metadata"]["uid"] = json!(format!("uid-of-{name}"));
    let given = &mut object["status"]["allocation"]["devices"]["results"][0];
    given["consumedCapacity"] = json!({"memory": memory, "sm": sm});
    given["shareID"] = json!(format!("{name}-1234567890"));
    put(node, object)
}

/// The condition that the claim's status has of its device.
fn condition(node: &Node, claim: &v1::Claim) -> Value {
    let object = node.api.get(&path(claim)).expect("the claim");
    object["status"]["devices"][0]["conditions"][0].clone()
}

/// The driver, once the kubelet has found it.
fn driver(node: &Node, kubelet: &Kubelet) -> Running {
    let driver = node.plugin("dra", &[]);
    let info = kubelet.find(AUTHORITY);
    assert_eq!(
        (info.r#type.as_str(), info.name.as_str()),
        ("DRAPlugin", "sublet.dev")
    );
    assert_eq!(info.supported_versions, ["v1.DRAPlugin"]);
    assert_eq!(info.endpoint, kubelet.dra().to_string_lossy());
    driver
}

#[test]
fn two_claims_share_a_device_inside_what_each_was_given() {
    let node = Node::new();
    let _arbiter = node.sandbox.arbiter();
    let kubelet = Kubelet::start(&node.kubelet_dir());
    let _driver = driver(&node, &kubelet);
    let claims = claims(&node);
    assert_eq!(
        kubelet.find("localhost").name,
        "sublet.dev",
        "by either authority"
    );
    let slice = wait_until("the devices are published", || {
        node.api
            .get("/apis/resource.k8s.io/v1/resourceslices/n1-sublet.dev")
    });
    assert_eq!(
        slice["spec"]["devices"][0]["capacity"]["memory"]["value"],
        "80Gi"
    );
    assert_eq!(slice["metadata"]["ownerReferences"][0]["uid"], "node-uid");

    let a = kubelet.prepare(&claims[0]).expect("30Gi and 40 percent");
    let b = kubelet.prepare(&claims[1]).expect("40Gi and no promise");
    assert_eq!(
        a[0].share_id.as_deref(),
        Some("e59bb7b6-4b0b-4566-9c64-1054b8bcec7f")
    );
    assert_eq!(
        b[0].share_id.as_deref(),
        Some("a25ce9c9-2eb5-4a67-b468-099919b46621")
    );
    assert_eq!(
        (a[0].pool_name.as_str(), json!(a[0].device_name)),
        ("fake1", device(&node))
    );
    assert_eq!(a[0].request_names, ["gpu"]);
    let error = kubelet.prepare(&claims[2]).expect_err("it waits");
    assert!(error.contains("default/c is not allocated"), "{error}");

    let mut inside_a = node.container(&a[0].cdi_device_ids[0]);
    let mut inside_b = node.container(&b[0].cdi_device_ids[0]);
    take(&mut inside_a, "plain", 30 * GIB);
    refused(&mut inside_a, "plain", 2 << 20);
    take(&mut inside_b, "plain", 40 * GIB);
    refused(&mut inside_b, "plain", 2 << 20);
    let jobs = node.sandbox.jobs();
    let job = |limit: u64| {
        let found = jobs
            .iter()
            .find(|job| job.mem_limit_bytes == Some(limit * GIB));
        found.unwrap_or_else(|| panic!("no job of {limit} GiB among {jobs:?}"))
    };
    assert_eq!(job(30).share_asked, Some(0.4));
    assert_eq!(job(40).class, control::Class::Opportunistic);
    let ready = condition(&node, &claims[0]);
    assert_eq!(
        (&ready["type"], &ready["status"]),
        (&json!("Ready"), &json!("True"))
    );

    // Again, as a kubelet asks that was not answered. The claim has been ready since.
    let mut object = node.api.get(&path(&claims[0])).expect("the claim");
    let since = json!("2026-01-01T00:00:00Z");
    object["status"]["devices"][0]["conditions"][0]["lastTransitionTime"] = since.clone();
    node.api.put(&path(&claims[0]), object);
    assert_eq!(kubelet.prepare(&claims[0]).as_ref(), Ok(&a));
    assert_eq!(condition(&node, &claims[0])["lastTransitionTime"], since);
    let again = node.sandbox.job_status(&job(30).name).expect("the job");
    assert_eq!(again.id, job(30).id);
    inside_a.kill();
    inside_b.kill();
    for claim in &claims {
        kubelet.unprepare(claim).expect("undone");
        kubelet.unprepare(claim).expect("and again");
    }
    wait_until("nothing is left", || node.is_clean().then_some(()));
}

#[test]
fn a_claim_above_the_node_is_refused_where_its_owner_looks() {
    let node = Node::new();
    let _arbiter = node.sandbox.arbiter();
    let kubelet = Kubelet::start(&node.kubelet_dir());
    let _driver = driver(&node, &kubelet);
    let huge = claim(&node, "huge", "90Gi", "10");
    let error = kubelet.prepare(&huge).expect_err("more than there is");
    assert!(
        error.contains("90GiB") && error.contains("80GiB"),
        "{error}"
    );
    let said = condition(&node, &huge);
    assert_eq!(
        (&said["status"], &said["reason"]),
        (&json!("False"), &json!("Refused"))
    );
    assert_eq!(said["message"], json!(error), "the same reason");

    kubelet
        .prepare(&claim(&node, "most", "8Gi", "80"))
        .expect("80 percent");
    let error = kubelet
        .prepare(&claim(&node, "more", "8Gi", "30"))
        .expect_err("110 percent");
    assert!(error.contains("above 1"), "{error}");
    for (name, memory, sm, reason) in [
        ("forged", "-1Gi", "1", "is no amount"),
        ("forged", "1Gi", "1000", "goes from 0 to 100"),
        ("forged", "99999Ei", "1", "the node's arbiter refused"),
        ("forged", "0", "1", "is 0"),
    ] {
        let error = kubelet
            .prepare(&claim(&node, name, memory, sm))
            .expect_err(name);
        assert!(error.contains(reason), "{reason}: {error}");
    }
    let forged = v1::Claim {
        namespace: "../../../api/v1".into(),
        ..huge.clone()
    };
    let error = kubelet.prepare(&forged).expect_err("a path");
    assert!(error.contains("invalid namespace"), "{error}");
    let forged = v1::Claim {
        uid: "../x".into(),
        ..huge.clone()
    };
    assert!(
        kubelet
            .unprepare(&forged)
            .expect_err("a path")
            .contains("invalid claim uid")
    );
    let another = v1::Claim {
        uid: "uid-of-another".into(),
        ..huge.clone()
    };
    assert!(
        kubelet
            .prepare(&another)
            .expect_err("made anew")
            .contains("was made anew")
    );
    node.api.remove(&path(&huge));
    assert!(
        kubelet
            .prepare(&huge)
            .expect_err("gone")
            .contains("there is no claim")
    );

    // Two parts for one job, and a device that this node does not have any more.
    let mut object = recorded(&node)[0].clone();
    let results = &mut object["status"]["allocation"]["devices"]["results"];
    let given = results[0].clone();
    results.as_array_mut().expect("a list").push(given);
    let both = put(&node, object);
    let error = kubelet.prepare(&both).expect_err("two devices");
    assert!(error.contains("was given 2 parts"), "{error}");
    let said = condition(&node, &both);
    assert_eq!(said["message"], json!(error), "the same reason");
    let mut object = recorded(&node)[0].clone();
    object["status"]["allocation"]["devices"]["results"][0]["device"] = json!("gpu-7");
    let vanished = put(&node, object);
    let error = kubelet.prepare(&vanished).expect_err("vanished");
    assert!(
        error.contains("gpu-7, which this node does not have"),
        "{error}"
    );

    let many = vec![huge; 300];
    let answer: Result<v1::PrepareResponse, String> =
        super::kubelet::ask(&kubelet.dra(), v1::PREPARE, v1::Claims { claims: many });
    assert!(answer.expect_err("too many").contains("at most 256"));
}

#[test]
fn a_driver_killed_between_any_two_steps_leaves_nothing_behind() {
    let node = Node::new();
    let _arbiter = node.sandbox.arbiter();
    let kubelet = Kubelet::start(&node.kubelet_dir());
    for step in STEPS {
        let mut command = node.command("dra", &[]);
        command.env("SUBLET_FAULT_KUBERNETES", step);
        let driver = Running::start(&mut command);
        kubelet.find(AUTHORITY);
        let claim = claim(&node, "a", "30Gi", "40");
        if kubelet.prepare(&claim).is_ok() {
            kubelet.unprepare(&claim).expect_err(step);
        }
        let ended = driver.wait();
        assert_eq!(ended.code, None, "{step}: killed, {ended:?}");
        let driver = node.plugin("dra", &[]);
        kubelet.find(AUTHORITY);
        // The pod was deleted meanwhile: the kubelet says so, as often as it has to.
        kubelet.unprepare(&claim).expect(step);
        wait_until("nothing is left", || node.is_clean().then_some(()));
        let devices = kubelet.prepare(&claim).expect("and it can be had again");
        assert!(node.cdi(&devices[0].cdi_device_ids[0]).is_some());
        kubelet.unprepare(&claim).expect(step);
        drop(driver);
    }
}

#[test]
fn a_claim_outlives_driver_kubelet_and_arbiter() {
    let node = Node::new();
    let mut arbiter = node.sandbox.arbiter();
    let kubelet = Kubelet::start(&node.kubelet_dir());
    let mut first = driver(&node, &kubelet);
    let claim = claim(&node, "a", "30Gi", "40");
    let devices = kubelet.prepare(&claim).expect("prepared");
    let id = &devices[0].cdi_device_ids[0];
    first.kill();
    let _ = first.wait();
    arbiter.kill();
    let _ = arbiter.wait();
    drop(kubelet);
    let _arbiter = node.sandbox.arbiter();
    let kubelet = Kubelet::start(&node.kubelet_dir());
    let _second = driver(&node, &kubelet);
    assert_eq!(kubelet.prepare(&claim).as_ref(), Ok(&devices));
    let mut inside = node.container(id);
    take(&mut inside, "plain", 30 * GIB);
    refused(&mut inside, "plain", 2 << 20);

    // Without an API server what is prepared can be undone, and nothing new is prepared.
    node.api.is_away(true);
    let new = claim_like(&claim, "b");
    let error = kubelet.prepare(&new).expect_err("away");
    assert!(error.contains("does not answer"), "{error}");
    inside.kill();
    kubelet.unprepare(&claim).expect("undone");
    wait_until("nothing is left", || node.is_clean().then_some(()));
    node.api.is_away(false);
    kubelet.prepare(&claim).expect("it is back");
}

fn claim_like(claim: &v1::Claim, name: &str) -> v1::Claim {
    v1::Claim {
        name: name.into(),
        uid: format!("uid-of-{name}"),
        ..claim.clone()
    }
}
