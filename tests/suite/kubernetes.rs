//! Pods that share a simulated GPU: the plugins beside a kubelet of the tests' own, and what
//! containers are given by them.

mod advice;
mod api_server;
mod devices;
mod dra;
mod kubelet;
mod manifests;
mod nri;
mod raw;
mod runtime;
mod scheduler;

use std::fs;
use std::path::PathBuf;

use serde_json::Value;
use tests::{ProgramRun, Running, Sandbox, programs};

use api_server::ApiServer;

const GIB: u64 = 1 << 30;

/// A node: a sandbox with an arbiter, a directory for a kubelet, and an API server.
struct Node {
    sandbox: Sandbox,
    api: ApiServer,
}

impl Node {
    fn new() -> Self {
        let mut sandbox = Sandbox::new();
        sandbox.set("SUBLET_SIM_CAPACITY", "80GiB");
        let node = Self {
            api: ApiServer::start(),
            sandbox,
        };
        fs::create_dir_all(node.kubelet_dir()).expect("a directory");
        let n1 = serde_json::json!({"metadata": {"name": "n1", "uid": "node-uid"}});
        node.api.put("/api/v1/nodes/n1", n1);
        node
    }

    fn kubelet_dir(&self) -> PathBuf {
        self.sandbox.path("kubelet")
    }

    /// One of the plugins; `words` are added to its command line.
    fn plugin(&self, which: &str, words: &[&str]) -> Running {
        Running::start(&mut self.command(which, words))
    }

    fn command(&self, which: &str, words: &[&str]) -> std::process::Command {
        let mut command = self.sandbox.sublet(["kubernetes", which, "--sim"]);
        let path = |name: &str| self.sandbox.path(name);
        command.args(["--node", "n1", "--api-server", &self.api.url]);
        command.arg("--cdi-dir").arg(path("cdi"));
        command.arg("--state").arg(path(which));
        if which == "dra" {
            command.arg("--kubelet-dir").arg(self.kubelet_dir());
        } else {
            let dir = self.kubelet_dir();
            command.arg("--plugins-dir").arg(dir.join("device-plugins"));
            command
                .arg("--pod-resources")
                .arg(dir.join("pod-resources/kubelet.sock"));
        }
        command.args(words);
        command
    }

    /// What CDI has of that device, by its full name; `None`: no file names it.
    fn cdi(&self, id: &str) -> Option<Value> {
        let (kind, name) = id.split_once('=')?;
        self.cdi_files().into_iter().find_map(|file| {
            let text = fs::read_to_string(file).ok()?;
            let spec: Value = serde_json::from_str(&text).expect("a file is whole at any time");
            assert_eq!(spec["cdiVersion"], "0.5.0");
            let devices = spec["devices"].as_array()?.clone();
            let device = devices.into_iter().find(|device| device["name"] == name)?;
            (spec["kind"] == kind).then(|| device["containerEdits"].clone())
        })
    }

    fn cdi_files(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.sandbox.path("cdi"))
            .into_iter()
            .flatten()
            .flatten();
        let paths = entries.map(|entry| entry.path());
        // One file for all containers, as long as there is a plugin.
        let is_preload = |path: &PathBuf| path.to_string_lossy().ends_with("ld.so.preload");
        paths.filter(|path| !is_preload(path)).collect()
    }

    /// Puts a pod that was sent to this node and asks for units.
    fn pod(&self, name: &str, uid: &str, share: &str) {
        let limits = serde_json::json!({"sublet.dev/gpu-mem-gib": "3"});
        let pod = serde_json::json!({
            "metadata": {
                "name": name, "namespace": "default", "uid": uid,
                "annotations": {"sublet.dev/share": share},
            },
            "spec": {"nodeName": "n1", "containers": [{"resources": {"limits": limits}}]},
            "status": {"phase": "Running"},
        });
        self.api.put(&pod_path(name), pod);
    }

    /// Deletes it.
    fn delete_pod(&self, name: &str) {
        self.api.remove(&pod_path(name));
    }

    /// An annotation of a pod.
    fn annotation(&self, name: &str, of: &str) -> Option<String> {
        let pod = self.api.get(&pod_path(name))?;
        Some(pod["metadata"]["annotations"][of].as_str()?.to_owned())
    }

    /// Waits until the pod's status says so, and returns all of it.
    fn status(&self, name: &str, says: &str) -> String {
        tests::wait_until("the pod's status says what became of its share", || {
            self.annotation(name, "sublet.dev/status")
                .filter(|said| said.contains(says))
        })
    }

    /// A program that takes memory on command, with what CDI gives a container of that device.
    fn container(&self, id: &str) -> ProgramRun {
        let edits = self.cdi(id).unwrap_or_else(|| panic!("no CDI device {id}"));
        let mut command = self.sandbox.command(programs::program("memory"));
        for variable in edits["env"].as_array().expect("variables") {
            let variable = variable.as_str().expect("text");
            let (name, value) = variable.split_once('=').expect("NAME=value");
            command.env(name, value);
        }
        for mount in edits["mounts"].as_array().expect("mounts") {
            let path = mount["hostPath"].as_str().expect("a path");
            assert!(fs::exists(path).expect("a look"), "{path} is to be mounted");
            if mount["containerPath"] == "/etc/ld.so.preload" {
                let library = fs::read_to_string(path).expect("the library's path");
                command.env("LD_PRELOAD", library.trim());
                continue;
            }
            if mount["containerPath"] != "/opt/sublet/libsublet.so" {
                assert_eq!(mount["hostPath"], mount["containerPath"]);
            }
        }
        let mut run = ProgramRun::start(&mut command);
        assert_eq!(run.ask("init"), "0", "cuInit in the container of {id}");
        run
    }

    /// Nothing is left of any pod.
    fn is_clean(&self) -> bool {
        self.left().is_empty()
    }

    /// What is left of pods: jobs, CDI files, records.
    fn left(&self) -> Vec<String> {
        let jobs = self.sandbox.jobs().into_iter();
        let jobs = jobs.filter(|job| job.state != control::JobState::Gone);
        let mut left: Vec<String> = jobs.map(|job| format!("job {}", job.name)).collect();
        let mut paths = self.cdi_files();
        for state in ["dra", "device-plugin"] {
            let entries = fs::read_dir(self.sandbox.path(state)).into_iter().flatten();
            let entries = entries
                .flatten()
                .filter(|entry| entry.file_name() != "lock");
            paths.extend(entries.map(|entry| entry.path()));
        }
        left.extend(paths.iter().map(|path| path.display().to_string()));
        left
    }
}

fn pod_path(name: &str) -> String {
    format!("/api/v1/namespaces/default/pods/{name}")
}
