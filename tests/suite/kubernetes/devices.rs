//! The device plugin.

use kubernetes::proto::device_plugin as v1beta1;
use kubernetes::shares::STEPS;
use tests::wait_until;

use super::kubelet::Kubelet;
use super::{GIB, Node};
use crate::quota::{refused, take};

fn healthy(devices: &[v1beta1::Device]) -> bool {
    !devices.is_empty() && devices.iter().all(|one| one.health == v1beta1::HEALTHY)
}

/// The id of the only CDI device of an answer.
fn cdi_id(response: &v1beta1::ContainerAllocateResponse) -> String {
    assert_eq!(response.cdi_devices.len(), 1, "{response:?}");
    response.cdi_devices[0].name.clone()
}

#[test]
fn a_container_gets_the_memory_that_the_kubelet_counted() {
    let node = Node::new();
    let _arbiter = node.sandbox.arbiter();
    let kubelet = Kubelet::start(&node.kubelet_dir());
    let _plugin = node.plugin("device-plugin", &[]);
    let registration = kubelet.registration();
    assert_eq!(registration.resource_name, "sublet.dev/gpu-mem-gib");
    assert_eq!(registration.version, "v1beta1");
    let options: v1beta1::DevicePluginOptions = kubelet
        .plugin(v1beta1::OPTIONS, v1beta1::Empty {})
        .expect("options");
    assert_eq!(Some(options), registration.options);
    let units = kubelet.watch("devices are healthy", healthy);
    assert_eq!(units.len(), 80, "a unit is a GiB");

    let request = v1beta1::ContainerPreferredAllocationRequest {
        available_device_ids: units.clone(),
        must_include_device_ids: Vec::new(),
        allocation_size: 3,
    };
    let preferred: v1beta1::PreferredAllocationResponse = kubelet
        .plugin(
            v1beta1::PREFERRED,
            v1beta1::PreferredAllocationRequest {
                container_requests: vec![request],
            },
        )
        .expect("an answer");
    let chosen = &preferred.container_responses[0].device_ids;
    assert_eq!(chosen.len(), 3);

    let id = cdi_id(&kubelet.allocate(chosen).expect("allocated"));
    let mut inside = node.container(&id);
    take(&mut inside, "plain", 3 * GIB);
    refused(&mut inside, "plain", 2 << 20);
    let jobs = node.sandbox.jobs();
    let job = jobs
        .iter()
        .find(|job| job.processes.len() == 1)
        .expect("a job");
    assert_eq!(job.mem_limit_bytes, Some(3 * GIB));
    inside.kill();

    // The kubelet lists the pod, and then it does not any more.
    kubelet.has("p", chosen);
    node.pod("p", "1", "0.25");
    assert_eq!(node.status("p", "0.25"), "a share of 0.25 is in force");
    let job = node.sandbox.job_status(&job.name).expect("the job");
    assert_eq!(job.share_asked, Some(0.25));
    let device = node.annotation("p", "sublet.dev/gpu");
    assert_eq!(
        device.as_deref(),
        job.devices.first().map(|one| one.uuid.as_str())
    );
    node.pod("p", "1", "lots");
    let said = node.status("p", "`lots`");
    assert!(said.contains("0.25 stays in force"), "{said}");
    // A kubelet that has just started lists none: the pod lives all the same.
    kubelet.has_none();
    let looks = node.api.looks();
    wait_until("the plugin has seen that", || {
        (node.api.looks() >= looks + 2).then_some(())
    });
    let still = node.sandbox.job_status(&job.name).expect("it goes on");
    assert_eq!((still.id, still.share_asked), (job.id, Some(0.25)));
    node.delete_pod("p");
    wait_until("what the pod had is undone", || {
        node.is_clean().then_some(())
    });
}

#[test]
fn a_new_pod_on_the_same_units_has_a_job_of_its_own_and_keeps_it() {
    let node = Node::new();
    let _arbiter = node.sandbox.arbiter();
    let kubelet = Kubelet::start(&node.kubelet_dir());
    let _plugin = node.plugin("device-plugin", &[]);
    let units = kubelet.watch("devices are healthy", healthy);
    let token = |id: &str| node.cdi(id).map(|edits| edits["env"].to_string());
    let first = cdi_id(&kubelet.allocate(&units[..3]).expect("allocated"));
    let before = token(&first);
    kubelet.has("p", &units[..3]);
    node.pod("p", "1", "0.25");
    node.status("p", "a share of 0.25 is in force");

    // The kubelet gives the units to the next pod when the first one has ended.
    let second = cdi_id(&kubelet.allocate(&units[..3]).expect("allocated"));
    let after = token(&second);
    assert!(
        after.is_some() && after != before,
        "the earlier pod's token"
    );
    node.delete_pod("p");
    node.pod("q", "2", "0.5");
    kubelet.has("q", &units[..3]);
    node.status("q", "a share of 0.5 is in force");
    let looks = node.api.looks();
    wait_until("the plugin has looked again", || {
        (node.api.looks() >= looks + 2).then_some(())
    });
    assert_eq!(token(&second), after, "what it has is not undone");
    let jobs = node.sandbox.jobs().into_iter();
    let jobs = jobs.filter(|job| job.state != control::JobState::Gone);
    let shares: Vec<_> = jobs.map(|job| job.share_asked).collect();
    assert_eq!(shares, [Some(0.5)]);
    let mut inside = node.container(&second);
    take(&mut inside, "plain", 3 * GIB);
    inside.kill();
}

#[test]
fn a_pod_that_goes_while_the_plugin_is_down_leaves_nothing() {
    let node = Node::new();
    let _arbiter = node.sandbox.arbiter();
    let kubelet = Kubelet::start(&node.kubelet_dir());
    let mut plugin = node.plugin("device-plugin", &[]);
    let units = kubelet.watch("devices are healthy", healthy);
    kubelet.allocate(&units[..3]).expect("allocated");
    kubelet.has("p", &units[..3]);
    node.pod("p", "1", "0.25");
    node.status("p", "a share of 0.25 is in force");
    plugin.kill();
    let _ = plugin.wait();
    kubelet.has_none();
    // Its successor has the name, and nothing else of it.
    node.pod("p", "2", "0.25");
    let _plugin = node.plugin("device-plugin", &[]);
    wait_until("what the pod had is undone", || {
        node.is_clean().then_some(())
    });
}

#[test]
fn a_pod_made_anew_under_its_name_has_nothing_of_the_one_before() {
    let node = Node::new();
    let _arbiter = node.sandbox.arbiter();
    let kubelet = Kubelet::start(&node.kubelet_dir());
    let _plugin = node.plugin("device-plugin", &[]);
    let units = kubelet.watch("devices are healthy", healthy);
    let shares = || {
        let jobs = node.sandbox.jobs().into_iter();
        let jobs = jobs.filter(|job| job.state != control::JobState::Gone);
        jobs.map(|job| job.share_asked).collect::<Vec<_>>()
    };
    kubelet.allocate(&units[..3]).expect("allocated");
    kubelet.has("p", &units[..3]);
    node.pod("p", "1", "0.25");
    node.status("p", "a share of 0.25 is in force");

    // The kubelet ends the first one still, and lists its units by the name of both.
    let before = node.api.changes().len();
    node.pod("p", "2", "0.5");
    let looks = node.api.looks();
    wait_until("the plugin has looked", || {
        (node.api.looks() >= looks + 2).then_some(())
    });
    assert_eq!(node.annotation("p", "sublet.dev/gpu"), None);
    assert_eq!(node.annotation("p", "sublet.dev/status"), None);
    assert_eq!(node.api.changes().len(), before, "nothing is written on it");
    assert_eq!(shares(), [Some(0.25)], "and what the first one has stays");

    kubelet.allocate(&units[3..6]).expect("allocated");
    kubelet.has("p", &units[3..6]);
    node.status("p", "a share of 0.5 is in force");
    wait_until("what the first one had is undone", || {
        (shares() == [Some(0.5)]).then_some(())
    });
}

#[test]
fn a_kubelet_that_does_not_list_takes_nothing_from_anybody() {
    let node = Node::new();
    let mut arbiter = node.sandbox.arbiter();
    let kubelet = Kubelet::start(&node.kubelet_dir());
    let mut plugin = node.plugin("device-plugin", &[]);
    let units = kubelet.watch("devices are healthy", healthy);
    let id = cdi_id(&kubelet.allocate(&units[..3]).expect("allocated"));
    kubelet.has("p", &units[..3]);
    node.pod("p", "1", "0.25");
    node.status("p", "a share of 0.25 is in force");
    kubelet.stops_listing();
    node.delete_pod("p");
    // Each is seen in a look of its own.
    arbiter.kill();
    let _ = arbiter.wait();
    kubelet.watch("devices are not healthy", |devices| !healthy(devices));
    let _arbiter = node.sandbox.arbiter();
    kubelet.watch("devices are healthy again", healthy);
    assert!(node.cdi(&id).is_some(), "it may run still");
    drop(kubelet);
    let _kubelet = Kubelet::start(&node.kubelet_dir());
    wait_until("what the pod had is undone", || {
        node.is_clean().then_some(())
    });
    plugin.kill();
    let said = plugin.wait().stderr;
    let why = "does not say which pod has which units: No such file";
    assert_eq!(said.matches(why).count(), 1, "once: {said}");
}

#[test]
fn containers_of_one_pod_that_each_ask_are_promised_no_time() {
    let node = Node::new();
    let _arbiter = node.sandbox.arbiter();
    let kubelet = Kubelet::start(&node.kubelet_dir());
    let _plugin = node.plugin("device-plugin", &[]);
    let units = kubelet.watch("devices are healthy", healthy);
    kubelet.allocate(&units[..1]).expect("allocated");
    kubelet.allocate(&units[1..3]).expect("allocated");
    node.pod("p", "1", "0.25");
    kubelet.containers_have("p", &[("side", &units[1..3]), ("main", &units[..1])]);
    let said = node.status("p", "2 containers of the pod");
    assert!(said.starts_with("refused: "), "{said}");
    let each = "main: no share is promised; side: no share is promised";
    assert!(said.ends_with(&format!("; {each}")), "{said}");
    let changes = node.api.changes().len();
    let looks = node.api.looks();
    wait_until("the plugin has looked again", || {
        (node.api.looks() >= looks + 2).then_some(())
    });
    assert_eq!(node.api.changes().len(), changes, "one status for both");
    node.pod("p", "1", "0");
    assert_eq!(node.status("p", "main"), each, "no share is what they have");
    let promised = node.sandbox.jobs().into_iter();
    let promised: Vec<_> = promised.filter_map(|job| job.share_asked).collect();
    assert_eq!(promised, [0.0; 0]);
    assert_eq!(node.annotation("p", "sublet.dev/gpu"), None);
}

#[test]
fn what_cannot_be_given_is_refused_and_leaves_nothing() {
    let node = Node::new();
    let _arbiter = node.sandbox.arbiter();
    let kubelet = Kubelet::start(&node.kubelet_dir());
    let _plugin = node.plugin("device-plugin", &["--no-cdi"]);
    let units = kubelet.watch("devices are healthy", healthy);
    for (asked, reason) in [
        (vec!["GPU-0::0".to_owned()], "none of this node's"),
        (vec!["../../etc/passwd".into()], "none of this node's"),
        (vec![units[0].clone(), units[0].clone()], "asked for twice"),
        (Vec::new(), "no unit"),
        (vec!["x".repeat(100_000); 5], "none of this node's"),
        (vec![units[0].clone(); 9000], "more than 8192"),
    ] {
        let error = kubelet.allocate(&asked).expect_err("refused");
        assert!(error.contains(reason), "{reason}: {error}");
    }
    // Longer than any message may be.
    let error = kubelet
        .allocate(&vec!["x".repeat(1 << 20); 3])
        .expect_err("refused");
    assert!(!error.is_empty());
    assert_eq!(node.left(), Vec::<String>::new());
    let plain = kubelet
        .allocate(&units[..2])
        .expect("it serves all the same");
    assert!(plain.cdi_devices.is_empty() && plain.envs.contains_key("SUBLET_TOKEN"));
    assert!(plain.mounts.iter().any(|mount| mount.read_only));
    assert!(
        plain
            .mounts
            .iter()
            .all(|mount| !mount.host_path.contains("api.sock")),
        "who reaches the API's socket as root changes quotas: {:?}",
        plain.mounts
    );
}

#[test]
fn kubelet_and_plugin_may_start_again_at_any_time() {
    let node = Node::new();
    let _arbiter = node.sandbox.arbiter();
    // Before there is a kubelet.
    let mut plugin = node.plugin("device-plugin", &[]);
    let kubelet = Kubelet::start(&node.kubelet_dir());
    let units = kubelet.watch("devices are healthy", healthy);
    let id = cdi_id(&kubelet.allocate(&units[..4]).expect("allocated"));
    let token = || node.cdi(&id).map(|edits| edits["env"].to_string());
    let before = token();
    drop(kubelet);
    // It removes the plugin's socket, as every kubelet does.
    let kubelet = Kubelet::start(&node.kubelet_dir());
    assert_eq!(kubelet.watch("devices are healthy", healthy), units);
    assert_eq!(token(), before, "it is the same job");

    plugin.kill();
    let _ = plugin.wait();
    let mut inside = node.container(&id);
    take(&mut inside, "plain", 4 * GIB);
    refused(&mut inside, "plain", 2 << 20);
    let kubelet = {
        drop(kubelet);
        Kubelet::start(&node.kubelet_dir())
    };
    let second = node.plugin("device-plugin", &[]);
    kubelet.watch("devices are healthy", healthy);
    assert_eq!(token(), before, "the job has outlived the plugin");
    // Two at once would undo each other's work.
    let third = node.plugin("device-plugin", &[]).wait();
    assert_eq!(third.code, Some(125), "{third:?}");
    assert!(third.stderr.contains("another process serves"), "{third:?}");
    drop(second);
}

#[test]
fn a_plugin_killed_while_it_allocates_leaves_nothing_behind() {
    let node = Node::new();
    let _arbiter = node.sandbox.arbiter();
    for step in STEPS {
        let kubelet = Kubelet::start(&node.kubelet_dir());
        let mut command = node.command("device-plugin", &[]);
        command.env("SUBLET_FAULT_KUBERNETES", step);
        let plugin = tests::Running::start(&mut command);
        let units = kubelet.watch("devices are healthy", healthy);
        let first = kubelet.allocate(&units[..2]);
        if first.is_ok() {
            // A step of what is undone: these units are for another container now.
            kubelet.allocate(&units[1..4]).expect_err(step);
        }
        let ended = plugin.wait();
        assert_eq!(ended.code, None, "{step}: killed, {ended:?}");
        // The same units for another container, by the next plugin: whatever was there is gone.
        drop(kubelet);
        let kubelet = Kubelet::start(&node.kubelet_dir());
        let plugin = node.plugin("device-plugin", &[]);
        kubelet.watch("devices are healthy", healthy);
        let id = cdi_id(&kubelet.allocate(&units[..3]).expect(step));
        wait_until("one job is left, and one file", || {
            let living = node.sandbox.jobs().into_iter();
            let living = living.filter(|job| job.state != control::JobState::Gone);
            let limits: Vec<_> = living.map(|job| job.mem_limit_bytes).collect();
            (limits == [Some(3 * GIB)] && node.cdi_files().len() == 1).then_some(())
        });
        assert!(node.cdi(&id).is_some(), "{step}");
        // The pod is seen when its share is in force; then it is deleted.
        node.pod("p", step, "0.25");
        kubelet.has("p", &units[..3]);
        node.status("p", "a share of 0.25 is in force");
        kubelet.has_none();
        node.delete_pod("p");
        wait_until("all of it is gone", || node.is_clean().then_some(()));
        drop(plugin);
    }
}

#[test]
fn devices_are_as_healthy_as_their_arbiter() {
    let node = Node::new();
    let mut arbiter = node.sandbox.arbiter();
    let kubelet = Kubelet::start(&node.kubelet_dir());
    let _plugin = node.plugin("device-plugin", &[]);
    let units = kubelet.watch("devices are healthy", healthy);
    let published = || {
        let n1 = node.api.get("/api/v1/nodes/n1")?;
        Some(
            n1["metadata"]["annotations"]["sublet.dev/devices"]
                .as_str()?
                .to_owned(),
        )
    };
    wait_until("the node says what it has", || {
        published().filter(|said| said.contains(":80}"))
    });
    let id = cdi_id(&kubelet.allocate(&units[..1]).expect("allocated"));
    arbiter.kill();
    let _ = arbiter.wait();
    kubelet.watch("devices are not healthy", |devices| {
        devices.len() == 80 && devices.iter().all(|one| one.health == v1beta1::UNHEALTHY)
    });
    let error = kubelet
        .allocate(&units[1..2])
        .expect_err("a device that vanished");
    assert!(
        error.contains("the device that it was of is gone"),
        "{error}"
    );
    wait_until("so does the node", || {
        published().filter(|said| said == "[]")
    });
    let _arbiter = node.sandbox.arbiter();
    kubelet.watch("devices are healthy again", healthy);
    // The job is the same, and the next arbiter holds its quota.
    let mut inside = node.container(&id);
    take(&mut inside, "plain", GIB);
    refused(&mut inside, "plain", 2 << 20);
}
