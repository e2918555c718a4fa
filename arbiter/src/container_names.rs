//! What containers are called. Their names are no business of the kernel's: engines keep them in
//! files, or in the arguments of the process that watches a container. A thread of its own looks
//! ([`Background`]); a container without a name goes by its id.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::background::Background;
use crate::descriptors;
use crate::peer;

/// Questions at a time, and containers that are remembered.
const MOST_ASKED: usize = 64;
const MOST_KNOWN: usize = 1024;
/// Bytes read of one file.
const MOST_BYTES: u64 = 4 << 20;
/// Ancestors of a container's process that may be the one that watches it.
const MAX_DEPTH: u32 = 3;
/// Where containerd's tasks are, by its namespaces.
const TASKS: &str = "run/containerd/io.containerd.runtime.v2.task";
const NAMESPACES: [&str; 3] = ["k8s.io", "default", "moby"];

/// A container that is asked about.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Question {
    /// 64 digits.
    pub id: String,
    /// Its topmost process.
    pub top: u32,
}

/// The names of containers, as far as they are known.
#[derive(Debug)]
pub struct ContainerNames {
    /// `None`: there are too few descriptors, and containers are called by their ids.
    lookups: Option<Background<Question, (String, String)>>,
    /// By id; `None`: asked for. Empty: it has none.
    known: BTreeMap<String, Option<String>>,
}

impl ContainerNames {
    /// Starts the thread, which looks below `root`.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(root: PathBuf) -> io::Result<Self> {
        let start = || {
            Background::start("containers", MOST_ASKED, move |question: Question| {
                let name = look_up(&root, &question).unwrap_or_default();
                (question.id, name)
            })
        };
        Ok(Self {
            lookups: (!descriptors::are_fewest()).then(start).transpose()?,
            known: BTreeMap::new(),
        })
    }

    /// Rings when something was found out.
    pub fn bell(&self) -> Option<BorrowedFd<'_>> {
        self.lookups.as_ref().map(Background::bell)
    }

    /// Whether the name need not be waited for; asks for it where it is not known.
    /// `top`: its topmost process.
    pub fn ask(&mut self, id: &str, top: impl FnOnce() -> u32) -> bool {
        let Some(lookups) = &self.lookups else {
            return true;
        };
        match self.known.get(id) {
            Some(known) => known.is_some(),
            None => {
                if self.known.len() >= MOST_KNOWN {
                    self.known.pop_first();
                }
                let question = Question {
                    id: id.to_owned(),
                    top: top(),
                };
                if lookups.ask(question) {
                    self.known.insert(id.to_owned(), None);
                }
                false
            }
        }
    }

    /// The name, as far as it is known; empty where it is not.
    pub fn of(&self, id: &str) -> &str {
        self.known
            .get(id)
            .and_then(Option::as_deref)
            .unwrap_or_default()
    }

    /// Takes answers.
    pub fn take(&mut self) {
        let answers: Vec<_> = self.lookups.iter().flat_map(Background::take).collect();
        self.note(answers);
    }

    fn note(&mut self, answers: Vec<(String, String)>) {
        for (id, name) in answers {
            // One that was forgotten meanwhile is asked for again.
            if let Some(known) = self.known.get_mut(&id) {
                *known = Some(name);
            }
        }
    }
}

/// By what an engine leaves: Podman and CRI-O in the arguments of conmon, Docker and containerd in
/// files that only root reads.
fn look_up(root: &Path, question: &Question) -> Option<String> {
    watched(root, question)
        .or_else(|| docker(root, &question.id))
        .or_else(|| containerd(root, &question.id))
        .filter(|name| !name.is_empty())
}

/// `conmon ... -c ID ... -n NAME`, the parent of the container's first process.
fn watched(root: &Path, question: &Question) -> Option<String> {
    let mut pid = question.top;
    for _ in 0..MAX_DEPTH {
        pid = peer::parent_of(pid).filter(|parent| *parent > 1)?;
        let text = read(&root.join(format!("proc/{pid}/cmdline")))?;
        let words: Vec<&str> = text.split('\0').collect();
        let after = |flags: [&str; 2]| {
            let at = words.iter().position(|word| flags.contains(word))?;
            words.get(at + 1).copied()
        };
        if words.first().is_some_and(|word| word.ends_with("conmon"))
            && after(["-c", "--cid"]) == Some(question.id.as_str())
        {
            return after(["-n", "--name"]).map(str::to_owned);
        }
    }
    None
}

fn docker(root: &Path, id: &str) -> Option<String> {
    let path = format!("var/lib/docker/containers/{id}/config.v2.json");
    let config: Value = serde_json::from_str(&read(&root.join(path))?).ok()?;
    let name = config["Name"].as_str()?.trim_start_matches('/');
    Some(name.to_owned())
}

/// Kubernetes names a pod and a container in it.
fn containerd(root: &Path, id: &str) -> Option<String> {
    NAMESPACES.iter().find_map(|namespace| {
        let path = root.join(format!("{TASKS}/{namespace}/{id}/config.json"));
        let config: Value = serde_json::from_str(&read(&path)?).ok()?;
        let said = |key: &str| config["annotations"][key].as_str();
        let of_pod = said("io.kubernetes.cri.sandbox-name")
            .zip(said("io.kubernetes.cri.container-name"))
            .map(|(pod, container)| format!("{pod}.{container}"));
        of_pod.or_else(|| said("nerdctl/name").map(str::to_owned))
    })
}

fn read(path: &Path) -> Option<String> {
    let mut bytes = Vec::new();
    File::open(path)
        .and_then(|file| file.take(MOST_BYTES).read_to_end(&mut bytes))
        .ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

    fn put(root: &Path, path: &str, text: &str) {
        let path = root.join(path);
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("folders");
        std::fs::write(path, text).expect("a file");
    }

    #[test]
    fn engines_leave_names_in_files() {
        let question = Question {
            id: ID.into(),
            top: u32::MAX,
        };
        let root = tempfile::tempdir().expect("a folder");
        assert_eq!(look_up(root.path(), &question), None);
        for broken in ["{", "[]", "{\"Name\": 3}"] {
            put(
                root.path(),
                &format!("var/lib/docker/containers/{ID}/config.v2.json"),
                broken,
            );
            assert_eq!(look_up(root.path(), &question), None);
        }
        let annotations = r#"{"annotations": {"io.kubernetes.cri.container-name": "main",
            "io.kubernetes.cri.sandbox-name": "train-0"}}"#;
        put(
            root.path(),
            &format!("{TASKS}/k8s.io/{ID}/config.json"),
            annotations,
        );
        assert_eq!(
            look_up(root.path(), &question).as_deref(),
            Some("train-0.main")
        );
        put(
            root.path(),
            &format!("var/lib/docker/containers/{ID}/config.v2.json"),
            r#"{"Name": "/hopper"}"#,
        );
        assert_eq!(look_up(root.path(), &question).as_deref(), Some("hopper"));
    }

    #[test]
    fn conmon_names_its_container_and_no_other() {
        let root = tempfile::tempdir().expect("a folder");
        let own = std::process::id();
        let parent = peer::parent_of(own).expect("a parent");
        if parent <= 1 {
            return eprintln!("skipped: nobody is above this process");
        }
        let line = |id: &str| format!("/usr/bin/conmon\0-c\0{id}\0-b\0/x\0-n\0turing\0");
        let question = Question {
            id: ID.into(),
            top: own,
        };
        put(
            root.path(),
            &format!("proc/{parent}/cmdline"),
            &line(&"9".repeat(64)),
        );
        assert_eq!(look_up(root.path(), &question), None);
        put(root.path(), &format!("proc/{parent}/cmdline"), &line(ID));
        assert_eq!(look_up(root.path(), &question).as_deref(), Some("turing"));
    }

    #[test]
    fn who_is_remembered_is_bounded_and_asked_for_once() {
        let mut names = ContainerNames::start("/nonexistent".into()).expect("a thread");
        let ask =
            |names: &mut ContainerNames, at: usize| names.ask(&format!("{at:064x}"), || u32::MAX);
        assert!(!ask(&mut names, 1) && !ask(&mut names, 1));
        let deadline = std::time::Instant::now() + testbed::PATIENCE;
        while !ask(&mut names, 1) {
            assert!(std::time::Instant::now() < deadline);
            names.take();
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        assert_eq!(names.of(&format!("{:064x}", 1)), "");
        for at in 0..5000 {
            ask(&mut names, at);
            names.take();
        }
        assert!(names.known.len() <= MOST_KNOWN);
    }

    #[test]
    fn what_was_forgotten_while_it_was_looked_up_stays_forgotten() {
        let mut names = ContainerNames::start("/nonexistent".into()).expect("a thread");
        let deadline = std::time::Instant::now() + testbed::PATIENCE;
        let mut answers = 0;
        for at in 0..10 {
            names.ask(&format!("{at:064x}"), || u32::MAX);
            names.known.clear();
        }
        while answers < 10 {
            assert!(std::time::Instant::now() < deadline);
            let lookups = names.lookups.as_ref().expect("a thread");
            let taken = lookups.take();
            answers += taken.len();
            names.note(taken);
            assert!(names.known.is_empty());
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }
}
