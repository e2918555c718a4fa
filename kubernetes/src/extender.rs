//! The scheduler extender: filter, prioritize and bind, as kube-scheduler asks by HTTP.
//!
//! Source: `k8s.io/kube-scheduler/extender/v1/types.go` of Kubernetes 1.36. The fields are written
//! as Go has them, since the types say nothing else; a list of nodes comes as names
//! (`nodeCacheCapable: true`) or as objects, and goes back as it came.

use std::collections::BTreeMap;
use std::time::Instant;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::api::{Api, ApiError, Patch, is_name};
use crate::fit::{self, Candidate, Choice, Wish};
use crate::http_server::{Answer, problem};
use crate::objects::Object;
use crate::picture::{DEVICES_ANNOTATION, Picture};
use crate::{DECISION_ANNOTATION, DEVICE_ANNOTATION, RESOURCE};

/// Longest body: with `nodeCacheCapable` a pod and the names of five thousand nodes, of 253 bytes
/// at the most. Without it, whole nodes of some ten kilobytes, it is enough for some thousand.
pub const LONGEST_BODY: usize = 16 << 20;
/// The most that kube-scheduler takes for a score.
const BEST: i64 = 10;

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
struct Args {
    pod: Option<Object>,
    nodes: Option<Value>,
    node_names: Option<Vec<String>>,
}

#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "PascalCase")]
struct Filtered {
    nodes: Option<Value>,
    node_names: Option<Vec<String>>,
    failed_nodes: BTreeMap<String, String>,
    failed_and_unresolvable_nodes: BTreeMap<String, String>,
    error: String,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "PascalCase")]
struct Priority {
    host: String,
    score: i64,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
struct Binding {
    pod_name: String,
    pod_namespace: String,
    #[serde(rename = "PodUID")]
    pod_uid: String,
    node: String,
}

/// The extender.
pub struct Extender {
    api: Api,
    picture: Mutex<Picture>,
}

impl Extender {
    pub fn new(api: Api) -> Self {
        Self {
            api,
            picture: Mutex::default(),
        }
    }

    /// Answers one question.
    pub fn answer(&self, method: &str, path: &str, body: &[u8]) -> Answer {
        match (method, path) {
            ("GET", "/healthz") => ok(&json!("ok")),
            ("POST", "/filter") => read(body).map_or_else(|bad| bad, |args| ok(&self.filter(args))),
            ("POST", "/prioritize") => {
                read(body).map_or_else(|bad| bad, |args| ok(&self.prioritize(args)))
            }
            ("POST", "/bind") => read(body).map_or_else(
                |bad| bad,
                |binding| {
                    let error = self.bind(&binding).err().unwrap_or_default();
                    ok(&json!({"Error": error}))
                },
            ),
            ("GET" | "POST", _) => {
                problem(404, "here are /filter, /prioritize, /bind and /healthz")
            }
            _ => problem(405, "only GET and POST are answered here"),
        }
    }

    /// Looks at the cluster, if the last look is old.
    fn look(&self) -> Result<parking_lot::MutexGuard<'_, Picture>, ApiError> {
        let mut picture = self.picture.lock();
        picture.refresh(&self.api, Instant::now())?;
        Ok(picture)
    }

    fn filter(&self, args: Args) -> Filtered {
        let failed = |error: String| Filtered {
            error,
            ..Filtered::default()
        };
        let Some(pod) = &args.pod else {
            return failed("the question names no pod".into());
        };
        let names = names(&args);
        let wish = match pod.wish() {
            Ok(Some(wish)) => wish,
            Ok(None) => {
                return Filtered {
                    nodes: args.nodes,
                    node_names: args.node_names,
                    ..Filtered::default()
                };
            }
            // No node can mend that: the pod's owner can.
            Err(why) => {
                let why = names.into_iter().map(|name| (name, why.clone()));
                return Filtered {
                    failed_and_unresolvable_nodes: why.collect(),
                    ..kept(&args, &|_| false)
                };
            }
        };
        let picture = match self.look() {
            Ok(picture) => picture,
            Err(error) => return failed(error.to_string()),
        };
        let mut failed_nodes = BTreeMap::new();
        for name in names {
            if let Err(why) = Self::on_node(&picture, &wish, &name, &pod.metadata.uid) {
                failed_nodes.insert(name, why);
            }
        }
        Filtered {
            failed_nodes: failed_nodes.clone(),
            ..kept(&args, &|name| !failed_nodes.contains_key(name))
        }
    }

    /// The device of a node that a pod should have.
    fn on_node(
        picture: &Picture,
        wish: &Wish,
        node: &str,
        uid: &str,
    ) -> Result<(Candidate, Choice), String> {
        let candidates = picture.candidates(node, uid).ok_or_else(|| {
            format!("node {node} has no {DEVICES_ANNOTATION}: no device plugin runs there")
        })?;
        let choice = fit::choose(wish, &candidates);
        match choice.at.and_then(|at| candidates.get(at)) {
            Some(candidate) => Ok((candidate.clone(), choice)),
            None => {
                let why: Vec<String> = choice.unfit.into_iter().flatten().collect();
                Err(if why.is_empty() {
                    choice.reason
                } else {
                    why.join("; ")
                })
            }
        }
    }

    fn prioritize(&self, args: Args) -> Vec<Priority> {
        let names = names(&args);
        let wish = args.pod.as_ref().and_then(|pod| pod.wish().ok().flatten());
        let uid = args.pod.map(|pod| pod.metadata.uid).unwrap_or_default();
        let picture = self.look();
        let scores = names.into_iter().map(|host| {
            let score = match (&wish, &picture) {
                (Some(wish), Ok(picture)) => {
                    let on_node = Self::on_node(picture, wish, &host, &uid);
                    on_node.map_or(0, |(candidate, _)| score(wish, &candidate))
                }
                // Without a wish of ours, or without a picture, all are alike.
                _ => 0,
            };
            Priority { host, score }
        });
        scores.collect()
    }

    fn bind(&self, asked: &Binding) -> Result<(), String> {
        let Binding {
            pod_name,
            pod_namespace,
            pod_uid,
            node,
        } = asked;
        for (name, what) in [
            (pod_name, "pod"),
            (pod_namespace, "namespace"),
            (node, "node"),
        ] {
            if !is_name(name) {
                let short: String = name.chars().take(80).collect();
                return Err(format!("invalid {what} name `{short}`"));
            }
        }
        let path = format!("/api/v1/namespaces/{pod_namespace}/pods/{pod_name}");
        let object = self.api.get(&path).map_err(|error| error.to_string())?;
        let object = object.ok_or_else(|| format!("there is no pod {pod_namespace}/{pod_name}"))?;
        let pod: Object = serde_json::from_value(object)
            .map_err(|error| format!("the pod cannot be read: {error}"))?;
        if pod.metadata.uid != *pod_uid {
            return Err(format!(
                "pod {pod_namespace}/{pod_name} is {} now, and not {pod_uid}",
                pod.metadata.uid
            ));
        }
        // Who else has pods to bind binds them: a scheduler asks about ours only.
        let wish = pod.wish()?.ok_or_else(|| {
            format!("pod {pod_namespace}/{pod_name} asks for no {RESOURCE}: it is not bound here")
        })?;
        let (device, reason) = self.take(&wish, node, pod_uid)?;
        let annotations = json!({"metadata": {"uid": pod_uid, "annotations": {
            DEVICE_ANNOTATION: device,
            DECISION_ANNOTATION: reason,
        }}});
        if let Err(error) = self.api.patch(&path, Patch::Merge, &annotations) {
            self.picture.lock().forget(pod_uid);
            return Err(error.to_string());
        }
        let binding = json!({
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": pod_name, "namespace": pod_namespace, "uid": pod_uid},
            "target": {"apiVersion": "v1", "kind": "Node", "name": node},
        });
        self.api
            .post(&format!("{path}/binding"), &binding)
            .map(drop)
            .map_err(|error| {
                self.picture.lock().forget(pod_uid);
                error.to_string()
            })
    }

    /// Decides for a node, by what is there now: since it was filtered, another pod may have been
    /// given the space, or a device may have vanished.
    fn take(&self, wish: &Wish, node: &str, uid: &str) -> Result<(String, String), String> {
        let mut picture = self.look().map_err(|error| error.to_string())?;
        let (candidate, choice) = Self::on_node(&picture, wish, node, uid)?;
        picture.assume(uid, node, &candidate.uuid, wish.clone(), Instant::now());
        Ok((candidate.uuid, choice.reason))
    }
}

/// The tighter it fits, the better.
fn score(wish: &Wish, candidate: &Candidate) -> i64 {
    let left = candidate.free_gib.saturating_sub(wish.memory_gib);
    let part = left.saturating_mul(10) / candidate.total_gib.max(1);
    BEST - i64::try_from(part).unwrap_or(BEST).min(BEST)
}

fn names(args: &Args) -> Vec<String> {
    if let Some(names) = &args.node_names {
        return names.clone();
    }
    items(args.nodes.as_ref())
        .filter_map(name)
        .map(ToOwned::to_owned)
        .collect()
}

/// The nodes of a question that may stay, in the form that they came in.
fn kept(args: &Args, stays: &dyn Fn(&str) -> bool) -> Filtered {
    let node_names = args.node_names.as_ref().map(|names| {
        let names = names.iter().filter(|name| stays(name));
        names.cloned().collect()
    });
    let nodes = args.nodes.clone().map(|mut nodes| {
        let stay = items(args.nodes.as_ref()).filter(|node| name(node).is_some_and(stays));
        let stay: Vec<Value> = stay.cloned().collect();
        if let Some(list) = nodes.as_object_mut() {
            list.insert("items".into(), Value::from(stay));
        }
        nodes
    });
    Filtered {
        nodes,
        node_names,
        ..Filtered::default()
    }
}

fn items(nodes: Option<&Value>) -> impl Iterator<Item = &Value> {
    nodes
        .and_then(|list| list.get("items")?.as_array())
        .into_iter()
        .flatten()
}

fn name(node: &Value) -> Option<&str> {
    node.pointer("/metadata/name")?.as_str()
}

fn read<T: for<'de> Deserialize<'de>>(body: &[u8]) -> Result<T, Answer> {
    serde_json::from_slice(body).map_err(|error| {
        problem(
            400,
            &format!("the body is no question of a scheduler's: {error}"),
        )
    })
}

fn ok(answer: &impl Serialize) -> Answer {
    match serde_json::to_string(answer) {
        Ok(json) => Answer { status: 200, json },
        Err(error) => problem(500, &error.to_string()),
    }
}
