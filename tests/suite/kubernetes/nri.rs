//! The NRI plugin, asked by a container runtime of the tests' own.

use std::io::Write as _;

use control::{JobState, JobStatus};
use kubernetes::proto::nri;
use prost::Message as _;
use tests::{ProgramRun, Running, Sandbox, programs, wait_until};

use super::GIB;
use super::runtime::{Peer, Runtime};
use crate::quota::{refused, take};

/// gRPC's codes.
const INVALID: &str = "3: ";
const UNIMPLEMENTED: &str = "12: ";
const UNAVAILABLE: &str = "14: ";

/// A node: an arbiter's sandbox, and a runtime's socket.
struct Node {
    sandbox: Sandbox,
}

impl Node {
    fn new() -> Self {
        let mut sandbox = Sandbox::new();
        sandbox.set("SUBLET_SIM_CAPACITY", "80GiB");
        Self { sandbox }
    }

    fn runtime(&self) -> Runtime {
        Runtime::start(&self.sandbox.path("nri.sock"))
    }

    fn plugin(&self) -> Running {
        let mut command = self.sandbox.sublet(["kubernetes", "nri", "--sim"]);
        command.arg("--socket").arg(self.sandbox.path("nri.sock"));
        command.arg("--state").arg(self.sandbox.path("nri"));
        Running::start(&mut command)
    }

    fn jobs(&self) -> Vec<JobStatus> {
        let jobs = self.sandbox.jobs().into_iter();
        jobs.filter(|job| job.state != JobState::Gone).collect()
    }

    fn job(&self) -> JobStatus {
        let jobs = self.jobs();
        assert_eq!(jobs.len(), 1, "{jobs:?}");
        jobs.into_iter().next().expect("one")
    }

    /// Waits until nothing is left of any container.
    fn is_clean(&self) {
        wait_until("nothing is left of any container", || {
            let files = ["nri", "nri/containers"].map(|name| {
                let entries = std::fs::read_dir(self.sandbox.path(name));
                let names = entries.into_iter().flatten().flatten();
                let names = names.map(|entry| entry.file_name().into_string().expect("text"));
                let kept = ["lock", "containers", "sublet.dev-share-nri-ld.so.preload"];
                names.filter(|name| !kept.contains(&&**name)).count()
            });
            (files == [0, 0] && self.jobs().is_empty()).then_some(())
        });
    }

    /// A program that takes memory on command, with what a container is given.
    fn container(&self, adjust: &nri::ContainerAdjustment) -> ProgramRun {
        let mut command = self.sandbox.command(programs::program("memory"));
        for variable in &adjust.env {
            command.env(&variable.key, &variable.value);
        }
        for mount in &adjust.mounts {
            let (path, to) = (&mount.source, &*mount.destination);
            assert!(std::fs::exists(path).expect("a look"), "{path} is mounted");
            match to {
                "/etc/ld.so.preload" => {
                    let library = std::fs::read_to_string(path).expect("the library's path");
                    command.env("LD_PRELOAD", library.trim());
                }
                "/opt/sublet/libsublet.so" => {}
                _ => assert_eq!(path, to),
            }
        }
        let mut run = ProgramRun::start(&mut command);
        assert_eq!(run.ask("init"), "0", "cuInit in a container");
        run
    }
}

fn pod(annotations: &[(&str, &str)]) -> nri::PodSandbox {
    let pairs = annotations.iter();
    nri::PodSandbox {
        id: "pod-1".into(),
        name: "train".into(),
        uid: "uid-1".into(),
        namespace: "default".into(),
        annotations: pairs
            .map(|(name, value)| (format!("sublet.dev/{name}"), (*value).to_owned()))
            .collect(),
    }
}

fn resources(processors: i64, gib: i64) -> nri::LinuxResources {
    nri::LinuxResources {
        memory: Some(nri::LinuxMemory {
            limit: Some(nri::Int64 { value: gib << 30 }),
        }),
        cpu: Some(nri::LinuxCpu {
            shares: Some(nri::UInt64 { value: 1024 }),
            quota: Some(nri::Int64 {
                value: processors * 100_000,
            }),
            period: Some(nri::UInt64 { value: 100_000 }),
        }),
    }
}

fn container(id: &str) -> nri::Container {
    nri::Container {
        id: id.into(),
        pod_sandbox_id: "pod-1".into(),
        name: "main".into(),
        state: 1,
        env: vec!["PATH=/bin".into()],
        linux: Some(nri::LinuxContainer {
            resources: Some(resources(2, 8)),
        }),
    }
}

/// As the runtime lists it once it was made so.
fn made(mut container: nri::Container, adjust: &nri::ContainerAdjustment) -> nri::Container {
    let given = adjust.env.iter();
    let given = given.map(|variable| format!("{}={}", variable.key, variable.value));
    container.env.extend(given);
    container.state = 3;
    container
}

fn ask(
    peer: &mut Peer,
    method: &str,
    pod: &nri::PodSandbox,
    container: &nri::Container,
) -> Result<Option<nri::ContainerAdjustment>, String> {
    let request = nri::ContainerRequest {
        pod: Some(pod.clone()),
        container: Some(container.clone()),
    };
    let answer: nri::CreateContainerResponse = peer.ask(method, &request)?;
    Ok(answer.adjust)
}

/// What a container is given that is made, and of which the runtime says so.
fn create(
    peer: &mut Peer,
    pod: &nri::PodSandbox,
    container: &nri::Container,
) -> nri::ContainerAdjustment {
    let given = ask(peer, "CreateContainer", pod, container).expect("given");
    let event = nri::StateChangeEvent {
        event: nri::POST_CREATE_CONTAINER,
        pod: Some(pod.clone()),
        container: Some(container.clone()),
    };
    let _: nri::Empty = peer.ask("StateChange", &event).expect("heard");
    given.expect("it asks for something")
}

fn resize(peer: &mut Peer, id: &str, to: nri::LinuxResources) -> Result<(), String> {
    let request = nri::UpdateContainerRequest {
        pod: Some(pod(&[])),
        container: Some(container(id)),
        linux_resources: Some(to),
    };
    peer.ask_raw("UpdateContainer", request.encode_to_vec())
        .map(drop)
}

#[test]
fn a_container_gets_quota_and_share_by_annotations_and_a_resize_changes_them() {
    let node = Node::new();
    let _arbiter = node.sandbox.arbiter();
    let runtime = node.runtime();
    let _plugin = node.plugin();
    let mut peer = runtime.accept();
    let registration = peer.register();
    assert_eq!(
        (&*registration.plugin_name, &*registration.plugin_idx),
        ("sublet", "10")
    );
    let asked = peer.configure(10_000);
    let bit = |event: i32| asked.events >> (event - 1) & 1;
    let events: Vec<i32> = (1..32).filter(|event| bit(*event) == 1).collect();
    assert_eq!(events, [4, 5, 8, 10, 11]);
    peer.synchronize(&[], &[]);

    let of = [
        ("gpu-mem", "4Gi"),
        ("share", "0.5"),
        ("resize", "cpu,memory"),
    ];
    let (pod, one) = (pod(&of), container("c1"));
    let given = create(&mut peer, &pod, &one);
    let mut inside = node.container(&given);
    let kept = take(&mut inside, "plain", 3 * GIB);
    refused(&mut inside, "plain", 2 * GIB);
    let job = node.job();
    assert_eq!(job.name, "train-main-c1");
    assert_eq!(
        (job.mem_limit_bytes, job.share_asked),
        (Some(4 * GIB), Some(0.5))
    );
    assert_eq!(job.processes.len(), 1);

    // Half of the processors and twice the memory.
    resize(&mut peer, "c1", resources(1, 16)).expect("resized");
    let now = node.job();
    assert_eq!(
        (now.id, now.mem_limit_bytes, now.share_asked),
        (job.id, Some(8 * GIB), Some(0.25))
    );
    take(&mut inside, "plain", 4 * GIB);
    // Above what a GPU has: refused, and as it was.
    let error = resize(&mut peer, "c1", resources(5, 8)).expect_err("above 1");
    assert!(
        error.contains("would be 1.25") && error.contains("0.25 stays"),
        "{error}"
    );
    let error = resize(&mut peer, "c1", resources(1, 400)).expect_err("above the GPU");
    assert!(error.contains("with this memory"), "{error}");
    // Nothing is said of what they follow.
    resize(&mut peer, "c1", nri::LinuxResources::default()).expect("nothing");
    let now = node.job();
    assert_eq!(
        (now.mem_limit_bytes, now.share_asked),
        (Some(8 * GIB), Some(0.25))
    );
    resize(&mut peer, "c1", resources(2, 8)).expect("as it was made");
    assert_eq!(node.job().share_asked, Some(0.5));
    drop(kept);

    // A second one: both shares are above 1 together.
    let second = container("c2");
    let mut large = pod.clone();
    large
        .annotations
        .insert("sublet.dev/share.main".into(), "60%".into());
    let error = ask(&mut peer, "CreateContainer", &large, &second).expect_err("above 1");
    assert!(error.contains("the node's arbiter refused"), "{error}");
    assert_eq!(node.job().id, job.id, "nothing is left of the second one");

    inside.kill();
    ask(&mut peer, "StopContainer", &pod, &one).expect("heard");
    ask(&mut peer, "StopContainer", &pod, &one).expect("heard again");
    node.is_clean();
}

#[test]
fn a_wrong_annotation_keeps_a_container_from_starting() {
    let node = Node::new();
    let arbiter = node.sandbox.arbiter();
    let runtime = node.runtime();
    let _plugin = node.plugin();
    let mut peer = runtime.plugin(&[], &[]);
    let main = container("c1");
    for (of, words) in [
        (&[("gpu-mem", "lots")][..], "sublet.dev/gpu-mem: `lots`"),
        (
            &[("gpu-mem", "1Gi"), ("share", "2")],
            "sublet.dev/share: `2`",
        ),
        (&[("gpu-mem", "1Gi"), ("gpu", "GPU-x")], "no GPU `GPU-x`"),
        (&[("gpu-mem", "800Gi")], "asks for 858993459200 bytes"),
        (&[("share.main", "0.5")], "without sublet.dev/gpu-mem"),
    ] {
        let error = ask(&mut peer, "CreateContainer", &pod(of), &main).expect_err("refused");
        assert!(
            error.starts_with(INVALID) && error.contains(words),
            "{of:?}: {error}"
        );
    }
    // Of the device plugin already.
    let mut twice = container("c1");
    twice.env.push("SUBLET_TOKEN=x".into());
    let asks = pod(&[("gpu-mem", "1Gi")]);
    let error = ask(&mut peer, "CreateContainer", &asks, &twice).expect_err("refused");
    assert!(error.contains("remove one of the two"), "{error}");
    let error = ask(&mut peer, "CreateContainer", &asks, &container("../x")).expect_err("refused");
    assert!(error.contains("invalid container id `../x`"), "{error}");
    // These ask for nothing.
    for of in [
        &[][..],
        &[("share", "0.5")],
        &[("gpu-mem.other", "1Gi")],
        &[("gpu-mem", "0")],
    ] {
        let given = ask(&mut peer, "CreateContainer", &pod(of), &main);
        assert_eq!(given, Ok(None), "{of:?}");
    }
    node.is_clean();
    // Without an arbiter nobody would enforce it.
    drop(arbiter);
    let error = ask(&mut peer, "CreateContainer", &asks, &main).expect_err("refused");
    assert!(error.starts_with(UNAVAILABLE), "{error}");
    node.is_clean();
}

#[test]
fn plugin_and_runtime_may_start_again_and_what_has_gone_is_undone() {
    let node = Node::new();
    let _arbiter = node.sandbox.arbiter();
    let runtime = node.runtime();
    let mut plugin = node.plugin();
    let mut peer = runtime.plugin(&[], &[]);
    let pod = pod(&[("gpu-mem", "1Gi"), ("share", "0.25"), ("resize", "cpu")]);
    let given = ["c1", "c2", "c3"].map(|id| create(&mut peer, &pod, &container(id)));
    let list = ["c1", "c2", "c3"].into_iter().zip(&given);
    let mut list: Vec<_> = list.map(|(id, given)| made(container(id), given)).collect();
    let mut before = node.jobs();
    assert_eq!(before.len(), 3);
    before.sort_by(|a, b| a.name.cmp(&b.name));
    let of = |jobs: &[JobStatus]| {
        let mut ids: Vec<u64> = jobs.iter().map(|job| job.id).collect();
        ids.sort_unstable();
        ids
    };

    // The runtime starts again, and lists them all; then one has ended, and one is gone.
    drop(peer);
    drop(runtime);
    let runtime = node.runtime();
    let mut peer = runtime.plugin(std::slice::from_ref(&pod), &list);
    assert_eq!(of(&node.jobs()), of(&before));
    list[1].state = nri::STOPPED;
    list.truncate(2);
    drop(peer);
    peer = runtime.plugin(std::slice::from_ref(&pod), &list);
    assert_eq!(of(&node.jobs()), [before[0].id]);

    // The plugin starts again; the container has what it had, and follows a resize.
    plugin.kill();
    let _ = plugin.wait();
    drop(peer);
    // One that was made meanwhile has no limits, which is said.
    list[1] = container("c4");
    let mut plugin = node.plugin();
    peer = runtime.plugin(std::slice::from_ref(&pod), &list);
    assert_eq!(of(&node.jobs()), [before[0].id]);
    resize(&mut peer, "c1", resources(1, 8)).expect("resized");
    assert_eq!(node.job().share_asked, Some(0.125));
    let mut inside = node.container(&given[0]);
    refused(&mut inside, "plain", 2 * GIB);
    inside.kill();

    // Made without what it was to be given: the answer came too late for the runtime.
    list[0].env.truncate(1);
    drop(peer);
    let _peer = runtime.plugin(std::slice::from_ref(&pod), &list);
    node.is_clean();
    plugin.kill();
    let said = plugin.take_stderr();
    let without = said.matches("was made while no plugin was asked").count();
    assert_eq!(without, 3, "c4 twice and c1: {said}");
}

#[test]
fn what_is_no_nri_ends_the_connection_and_nothing_else() {
    let node = Node::new();
    let _arbiter = node.sandbox.arbiter();
    let runtime = node.runtime();
    let mut plugin = node.plugin();
    let mut peer = runtime.plugin(&[], &[]);
    let pod = pod(&[("gpu-mem", "1Gi")]);
    let given = create(&mut peer, &pod, &container("c1"));
    let list = [made(container("c1"), &given)];
    let job = node.job();
    let frame =
        |connection: u32, length: u32| [connection.to_be_bytes(), length.to_be_bytes()].concat();
    let message = |length: u32, kind: u8| {
        let head = [&length.to_be_bytes()[..], &[0, 0, 0, 9, kind, 0]].concat();
        [frame(1, 10), head].concat()
    };
    let answer = [frame(2, 10), vec![0, 0, 0, 0, 0, 0, 0, 7, 2, 0]].concat();
    for bytes in [
        frame(3, 1),
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        frame(1, u32::MAX),
        message(u32::MAX, 1),
        message(1, 2),
        message(1, 3),
        answer,
    ] {
        peer.stream.write_all(&bytes).expect("sent");
        peer.is_left();
        peer = runtime.plugin(std::slice::from_ref(&pod), &list);
        assert_eq!(node.job().id, job.id, "after {bytes:?}");
    }
    // A registration that is refused, and a runtime that goes in the middle of a message.
    drop(peer);
    runtime.accept().refuse("no such index");
    let mut peer = runtime.plugin(std::slice::from_ref(&pod), &list);
    peer.stream.write_all(&frame(1, 100)).expect("sent");
    drop(peer);
    let mut peer = runtime.plugin(std::slice::from_ref(&pod), &list);
    // What is wrong in one call is that call's.
    let error = peer.ask_raw("Dance", Vec::new()).expect_err("unknown");
    assert!(error.starts_with(UNIMPLEMENTED), "{error}");
    for method in ["CreateContainer", "Synchronize", "StateChange"] {
        let error = peer
            .ask_raw(method, vec![0xff; 40])
            .expect_err("no message");
        assert!(error.starts_with(INVALID), "{method}: {error}");
    }
    let error = peer.call(&[0xff; 40]).expect_err("no call");
    assert!(error.contains("no call"), "{error}");
    let error = peer.ask_raw("CreateContainer", Vec::new());
    assert!(error.expect_err("no pod").contains("without a pod"));
    // Fields of a newer runtime are passed over.
    let request = nri::ContainerRequest {
        pod: Some(pod.clone()),
        container: Some(container("c2")),
    };
    let mut newer = request.encode_to_vec();
    newer.extend([0xfa, 0x3f, 3, 1, 2, 3]);
    peer.ask_raw("CreateContainer", newer).expect("given");
    assert_eq!(node.jobs().len(), 2);
    // A removal without a stop.
    for id in ["c1", "c2"] {
        ask(&mut peer, "RemoveContainer", &pod, &container(id)).expect("heard");
    }
    node.is_clean();
    plugin.kill();
    let said = plugin.take_stderr();
    assert!(
        said.contains("it does not take the plugin: no such index"),
        "{said}"
    );
}
