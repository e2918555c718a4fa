//! The scheduler extender: filter, prioritize and bind, as kube-scheduler asks by HTTP.
//!
//! Source: `k8s.io/kube-scheduler/extender/v1/types.go` of Kubernetes 1.36. The fields are written
//! as Go has them, since the types say nothing else; a list of nodes comes as names
//! (`nodeCacheCapable: true`) or as objects, and goes back as it came.
//!
//! What fits is decided here. Which of the devices that fit a pod should have is asked of the
//! cluster's hook, where there is one: of all nodes when pods are filtered, and of the node that
//! the scheduler has taken when a pod is bound. Without an answer the tightest fit is taken, with
//! the reason.
//!
//! Each question has an end by which it is answered. What was not done by then is not done later: a
//! scheduler that has given up sends the pod elsewhere.

mod again;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::slice::from_ref;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::advice::{Adviser, Placed, Question};
use crate::api::{Api, ApiError, Patch, is_name};
use crate::event::{Event, Events, Kind};
use crate::fit::{self, Candidate, Choice, Wish};
use crate::http_server::{Answer, problem};
use crate::objects::Object;
use crate::picture::{DEVICES_ANNOTATION, Picture};
use crate::waiting::Waiting;
use crate::{
    CONFIDENCE_ANNOTATION, DECISION_ANNOTATION, DEVICE_ANNOTATION, RESOURCE, SLOWDOWN_ANNOTATION,
};

/// Longest body: with `nodeCacheCapable` a pod and the names of five thousand nodes, of 253 bytes
/// at the most. Without it, whole nodes of some ten kilobytes, it is enough for some thousand.
pub const LONGEST_BODY: usize = 16 << 20;
/// The most that kube-scheduler takes for a score.
const BEST: i64 = 10;
/// TIMEOUT: a scheduler goes from filtering to binding within its own time limits.
const NOTED: Duration = Duration::from_secs(30);
/// Pods about which something is noted at a time.
const NOTES: usize = 4096;
/// Up to so many nodes that cannot take a pod each say what they have. A scheduler writes all
/// reasons into one line and counts those that are alike: of more nodes the lines would be too long
/// for an event, and nobody would read them.
const DETAILED: usize = 4;
/// How often a pod is decided anew because others were faster.
const TRIES: usize = 3;
/// Devices of a node, jobs of a device, and bytes of a UUID that a hook takes.
const MOST_DEVICES: usize = 64;
const MOST_RESIDENTS: usize = 256;
const UUID_BYTES: usize = 512;

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

/// What is remembered of a pod between the scheduler's questions about it.
#[derive(Debug)]
struct Note {
    since: Instant,
    /// Where the hook wants it; `None`: it was not asked, or does not say.
    node: Option<String>,
    /// Nodes that the hook has refused when the pod was to be bound there: the next filtering
    /// leaves them out, so that a pod does not go there again and again.
    refused: BTreeMap<String, String>,
}

/// What a pod is given.
#[derive(Debug)]
struct Given {
    device: String,
    reason: String,
    /// Expected slowdown and confidence of the hook.
    expected: Option<(f64, f64)>,
    /// A hook was to be asked, and did not answer.
    fell_back: bool,
}

/// The extender.
pub struct Extender {
    api: Api,
    adviser: Option<Adviser>,
    events: Events,
    limit: Duration,
    picture: Mutex<Picture>,
    /// By uid.
    notes: Mutex<BTreeMap<String, Note>>,
    waiting: Mutex<Waiting>,
}

impl Extender {
    /// Without an adviser pods go where they fit most tightly. `limit`: how long a question takes
    /// at most; half of it is the hook's.
    ///
    /// # Errors
    /// There is no thread to be had.
    pub fn new(api: Api, adviser: Option<Adviser>, limit: Duration) -> io::Result<Self> {
        Ok(Self {
            events: Events::start(api.clone())?,
            api,
            adviser,
            limit,
            picture: Mutex::default(),
            notes: Mutex::default(),
            waiting: Mutex::default(),
        })
    }

    /// Answers one question.
    pub fn answer(&self, method: &str, path: &str, body: &[u8]) -> Answer {
        let end = Instant::now() + self.limit;
        match (method, path) {
            ("GET", "/healthz") => ok(&json!("ok")),
            ("POST", "/filter") => {
                read(body).map_or_else(|bad| bad, |args| ok(&self.filter(args, end)))
            }
            ("POST", "/prioritize") => {
                read(body).map_or_else(|bad| bad, |args| ok(&self.prioritize(args, end)))
            }
            ("POST", "/bind") => read(body).map_or_else(
                |bad| bad,
                |binding| {
                    let error = self.bind(&binding, end).err().unwrap_or_default();
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
    fn look(&self, end: Instant) -> Result<parking_lot::MutexGuard<'_, Picture>, String> {
        self.look_by(end, |picture, api| picture.refresh(api, Instant::now()))
    }

    /// Looks at the cluster, if the last look is older than a question: before that is refused. A
    /// scheduler asks when a pod has gone, and not again before the next one goes.
    fn look_since(
        &self,
        asked: Instant,
        end: Instant,
    ) -> Result<parking_lot::MutexGuard<'_, Picture>, String> {
        self.look_by(end, |picture, api| picture.refresh_since(api, asked))
    }

    fn look_by(
        &self,
        end: Instant,
        refresh: impl FnOnce(&mut Picture, &Api) -> Result<(), ApiError>,
    ) -> Result<parking_lot::MutexGuard<'_, Picture>, String> {
        let picture = self.picture.try_lock_until(end);
        let mut picture = picture.ok_or("another question still lists the cluster's pods")?;
        let looked = refresh(&mut picture, &self.api.until(end));
        looked.map_err(|error| error.to_string())?;
        Ok(picture)
    }

    fn filter(&self, args: Args, end: Instant) -> Filtered {
        let asked = Instant::now();
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
            // No node can mend that: the pod's owner can. Schedulers before 1.21 read the first of
            // the two alone, and would give no reason; to later ones the second one counts.
            Err(why) => {
                let why = names.into_iter().map(|name| (name, why.clone()));
                let why: BTreeMap<_, _> = why.collect();
                return Filtered {
                    failed_nodes: why.clone(),
                    failed_and_unresolvable_nodes: why,
                    ..kept(&args, &|_| false)
                };
            }
        };
        let uid = &pod.metadata.uid;
        let refused = || self.refuse(pod.pod(), &wish, &names);
        let known = self
            .look(end)
            .map(|picture| self.fitting(&picture, &wish, &names, uid));
        let known = known.and_then(|known| {
            if !known.1.is_empty() || names.is_empty() {
                return Ok(known);
            }
            let picture = self.look_since(asked, end)?;
            Ok(self.fitting(&picture, &wish, &names, uid))
        });
        let (mut failed_nodes, candidates) = match known {
            Ok(known) => known,
            Err(error) => {
                refused();
                return failed(error);
            }
        };
        // The hook may take its time: others are answered meanwhile.
        failed_nodes.extend(self.advised_against(uid, &wish, &candidates, end));
        if names.iter().all(|name| failed_nodes.contains_key(name)) {
            refused();
        }
        let failed_nodes = readable(failed_nodes);
        Filtered {
            failed_nodes: failed_nodes.clone(),
            ..kept(&args, &|name| !failed_nodes.contains_key(name))
        }
    }

    /// Of these nodes the devices that a pod could have, and the nodes that have none.
    fn fitting(
        &self,
        picture: &Picture,
        wish: &Wish,
        names: &[String],
        uid: &str,
    ) -> (BTreeMap<String, Why>, Vec<Candidate>) {
        let refused = self.refused(uid);
        let (mut failed, mut candidates) = (BTreeMap::new(), Vec::new());
        for name in names {
            match Self::on_node(picture, wish, name, uid) {
                Err(why) => drop(failed.insert(name.clone(), why)),
                Ok((all, _)) => match refused.get(name) {
                    Some(why) => drop(failed.insert(name.clone(), Why::alike(why.clone()))),
                    None => candidates.extend(all),
                },
            }
        }
        (failed, candidates)
    }

    /// Nodes that the hook would not take, of those whose devices fit; where it wants the pod is
    /// noted.
    fn advised_against(
        &self,
        uid: &str,
        wish: &Wish,
        candidates: &[Candidate],
        end: Instant,
    ) -> BTreeMap<String, Why> {
        let mut against = BTreeMap::new();
        let Some(Ok(placed)) = self.advice(wish, candidates, end) else {
            self.note(uid, |note| note.node = None);
            return against;
        };
        if placed.node.is_empty() {
            let why = Why::alike(format!("the hook lets it wait: {}", placed.reason));
            against.extend(candidates.iter().map(|one| (one.node.clone(), why.clone())));
        } else {
            let out = |one: &Candidate| {
                let unfit = placed.unfit.iter();
                let mut unfit = unfit.filter(|(node, uuid, _)| {
                    *node == one.node && uuid.eq_ignore_ascii_case(&one.uuid)
                });
                unfit.next().map(|(.., why)| Why {
                    full: format!("the hook says: {why}"),
                    short: "the hook takes none of its GPUs".into(),
                })
            };
            let asked: BTreeSet<&str> = candidates.iter().map(|one| one.node.as_str()).collect();
            let mut stay: BTreeSet<&str> = BTreeSet::from([placed.node.as_str()]);
            for one in candidates {
                match out(one) {
                    Some(why) => drop(against.insert(one.node.clone(), why)),
                    None => drop(stay.insert(&one.node)),
                }
            }
            against
                .retain(|node, _| asked.contains(node.as_str()) && !stay.contains(node.as_str()));
        }
        self.note(uid, |note| {
            note.node = Some(placed.node).filter(|node| !node.is_empty());
        });
        against
    }

    /// What the hook says of a pod and devices that fit; `None`: there is no hook, or no device.
    fn advice(
        &self,
        wish: &Wish,
        fitting: &[Candidate],
        end: Instant,
    ) -> Option<Result<Placed, String>> {
        let adviser = self.adviser.as_ref().filter(|_| !fitting.is_empty())?;
        let question = Question {
            wish: wish.clone(),
            candidates: fitting.to_vec(),
        };
        // The rest is for what has to be written then.
        let left = end.saturating_duration_since(Instant::now()) / 2;
        let placed = adviser.ask(question, left);
        Some(placed.and_then(|placed| {
            let is_it = |one: &Candidate| {
                one.node == placed.node && one.uuid.eq_ignore_ascii_case(&placed.device)
            };
            if placed.node.is_empty() || fitting.iter().any(is_it) {
                return Ok(placed);
            }
            // What it was not asked about it cannot give.
            let Placed { node, device, .. } = &placed;
            let at: String = format!("{device} of {node}").chars().take(100).collect();
            Err(format!("the hook chose {at}, which it was not asked about"))
        }))
    }

    fn note(&self, uid: &str, change: impl FnOnce(&mut Note)) {
        if self.adviser.is_none() {
            return;
        }
        let mut notes = self.notes.lock();
        notes.retain(|_, note| note.since.elapsed() < NOTED);
        if notes.len() >= NOTES && !notes.contains_key(uid) {
            return;
        }
        let note = notes.entry(uid.to_owned()).or_insert_with(|| Note {
            since: Instant::now(),
            node: None,
            refused: BTreeMap::new(),
        });
        change(note);
    }

    fn refused(&self, uid: &str) -> BTreeMap<String, String> {
        let notes = self.notes.lock();
        let note = notes.get(uid).filter(|note| note.since.elapsed() < NOTED);
        note.map(|note| note.refused.clone()).unwrap_or_default()
    }

    /// The devices of a node that a pod could have, and the tightest of them.
    fn on_node(
        picture: &Picture,
        wish: &Wish,
        node: &str,
        uid: &str,
    ) -> Result<(Vec<Candidate>, Fitting), Why> {
        let candidates = picture.candidates(node, uid).ok_or_else(|| {
            let short = format!("no {DEVICES_ANNOTATION}: no device plugin runs there");
            Why {
                full: format!("node {node} has {short}"),
                short,
            }
        })?;
        let Choice { at, reason, unfit } = fit::choose(wish, &candidates);
        let Some(tightest) = at.and_then(|at| candidates.get(at)).cloned() else {
            let why: Vec<String> = unfit.into_iter().flatten().collect();
            return Err(Why {
                full: if why.is_empty() {
                    reason
                } else {
                    why.join("; ")
                },
                short: fit::lack(wish, &candidates),
            });
        };
        let fitting = candidates.into_iter().zip(unfit);
        let fitting = fitting.filter_map(|(one, why)| why.is_none().then_some(one));
        Ok((askable(fitting), Fitting { tightest, reason }))
    }

    fn prioritize(&self, args: Args, end: Instant) -> Vec<Priority> {
        let names = names(&args);
        let wish = args.pod.as_ref().and_then(|pod| pod.wish().ok().flatten());
        let uid = args.pod.map(|pod| pod.metadata.uid).unwrap_or_default();
        let wanted = wish
            .as_ref()
            .and_then(|wish| self.wanted(&uid, wish, &names, end));
        let picture = self.look(end);
        let scores = names.into_iter().map(|host| {
            let score = match (&wish, &picture) {
                (Some(_), Ok(_)) if wanted.as_ref() == Some(&host) => BEST,
                (Some(wish), Ok(picture)) => {
                    let on_node = Self::on_node(picture, wish, &host, &uid);
                    let score = on_node.map_or(0, |(_, fit)| score(wish, &fit.tightest));
                    // Behind the hook's choice by half of all that there is.
                    if wanted.is_some() { score / 2 } else { score }
                }
                // Without a wish of ours, or without a picture, all are alike.
                _ => 0,
            };
            Priority { host, score }
        });
        scores.collect()
    }

    /// Which of these nodes the hook wants for a pod: as it said when the pod was filtered, else it
    /// is asked now.
    fn wanted(&self, uid: &str, wish: &Wish, names: &[String], end: Instant) -> Option<String> {
        let noted = {
            let notes = self.notes.lock();
            let note = notes.get(uid).filter(|note| note.since.elapsed() < NOTED);
            note.map(|note| note.node.clone())
        };
        match noted {
            // It did not answer a moment ago, or nothing was asked.
            Some(None) => return None,
            Some(Some(node)) if names.contains(&node) => return Some(node),
            _ => {}
        }
        let candidates: Vec<Candidate> = {
            let picture = self.look(end).ok()?;
            let fitting = names.iter();
            let fitting = fitting.filter_map(|name| Self::on_node(&picture, wish, name, uid).ok());
            fitting.flat_map(|(all, _)| all).collect()
        };
        let placed = self.advice(wish, &candidates, end)?.ok()?;
        Some(placed.node).filter(|node| !node.is_empty())
    }

    fn bind(&self, asked: &Binding, end: Instant) -> Result<(), String> {
        self.bind_by(asked, end).map_err(|error| {
            if Instant::now() < end {
                return error;
            }
            format!("not bound within {} ms: {error}", self.limit.as_millis())
        })
    }

    fn bind_by(&self, asked: &Binding, end: Instant) -> Result<(), String> {
        let api = self.api.until(end);
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
        let pod: Option<Object> = api.read(&path).map_err(|error| error.to_string())?;
        let pod = pod.ok_or_else(|| format!("there is no pod {pod_namespace}/{pod_name}"))?;
        if pod.metadata.uid != *pod_uid {
            return Err(format!(
                "pod {pod_namespace}/{pod_name} is {} now, and not {pod_uid}",
                pod.metadata.uid
            ));
        }
        match pod.spec.node_name.as_str() {
            "" => {}
            // The answer to an earlier question was lost: what was decided then is in force.
            there if there == node => return Ok(()),
            there => {
                return Err(format!(
                    "pod {pod_namespace}/{pod_name} is bound to {there} already, and not to {node}"
                ));
            }
        }
        // Who else has pods to bind binds them: a scheduler asks about ours only.
        let wish = pod.wish()?.ok_or_else(|| {
            format!("pod {pod_namespace}/{pod_name} asks for no {RESOURCE}: it is not bound here")
        })?;
        let given = self.take(&wish, node, pod_uid, end);
        let given = given.inspect_err(|_| self.refuse(pod.pod(), &wish, from_ref(node)))?;
        let number = |number: f64| format!("{number:.2}");
        // What an earlier decision has left there is removed.
        let annotations = json!({"metadata": {"uid": pod_uid, "annotations": {
            DEVICE_ANNOTATION: given.device,
            DECISION_ANNOTATION: given.reason,
            SLOWDOWN_ANNOTATION: given.expected.map(|(slowdown, _)| number(slowdown)),
            CONFIDENCE_ANNOTATION: given.expected.map(|(_, confidence)| number(confidence)),
        }}});
        if let Err(error) = api.patch(&path, Patch::Merge, &annotations) {
            self.picture.lock().forget(pod_uid);
            return Err(error.to_string());
        }
        let binding = json!({
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": pod_name, "namespace": pod_namespace, "uid": pod_uid},
            "target": {"apiVersion": "v1", "kind": "Node", "name": node},
        });
        if let Err(error) = api.post(&format!("{path}/binding"), &binding) {
            // Without an answer it may be bound all the same: the next list of pods says so.
            if !matches!(error, ApiError::Away { .. }) {
                self.picture.lock().forget(pod_uid);
            }
            return Err(error.to_string());
        }
        self.picture.lock().bound(pod_uid, Instant::now());
        self.notes.lock().remove(pod_uid);
        self.waiting.lock().forget(pod_uid);
        self.tell(asked, &given);
        Ok(())
    }

    /// An event on the pod: `kubectl describe pod` shows it. The pod is bound with or without it.
    fn tell(&self, asked: &Binding, given: &Given) {
        let expected = given.expected.map(|(slowdown, confidence)| {
            format!(", expected slowdown {slowdown:.2} (confidence {confidence:.2})")
        });
        let (kind, reason) = if given.fell_back {
            (Kind::Warning, "PlacedByFit")
        } else {
            (Kind::Normal, "Placed")
        };
        self.events.queue(Event {
            pod: asked.pod_name.clone(),
            namespace: asked.pod_namespace.clone(),
            uid: asked.pod_uid.clone(),
            kind,
            reason,
            message: format!(
                "{} of {}{}: {}",
                given.device,
                asked.node,
                expected.unwrap_or_default(),
                given.reason
            ),
        });
    }

    /// Decides for a node, by what is there now: since it was filtered, another pod may have been
    /// given the space, or a device may have vanished.
    fn take(&self, wish: &Wish, node: &str, uid: &str, end: Instant) -> Result<Given, String> {
        let asked = Instant::now();
        for _ in 0..TRIES {
            let known = Self::on_node(&*self.look(end)?, wish, node, uid);
            let candidates = match known {
                Ok((candidates, _)) => candidates,
                Err(_) => {
                    let picture = self.look_since(asked, end)?;
                    let on_node = Self::on_node(&picture, wish, node, uid);
                    on_node.map_err(|why| why.full)?.0
                }
            };
            let advice = self.advice(wish, &candidates, end);
            if let Some(Ok(placed)) = &advice
                && placed.node.is_empty()
            {
                let why = format!("the hook lets it wait: {}", placed.reason);
                self.note(uid, |note| {
                    note.since = Instant::now();
                    note.refused.insert(node.to_owned(), why.clone());
                });
                return Err(why);
            }
            let mut picture = self.look(end)?;
            let on_node = Self::on_node(&picture, wish, node, uid);
            let (fitting, Fitting { tightest, reason }) = on_node.map_err(|why| why.full)?;
            let given = match advice {
                None => Given {
                    device: tightest.uuid,
                    reason,
                    expected: None,
                    fell_back: false,
                },
                Some(Err(why)) => Given {
                    device: tightest.uuid,
                    reason: format!("by fit alone ({why}): {reason}"),
                    expected: None,
                    fell_back: true,
                },
                Some(Ok(placed)) => {
                    let mut fitting = fitting.into_iter();
                    let there = fitting.find(|one| one.uuid.eq_ignore_ascii_case(&placed.device));
                    // Another pod was faster, while the hook was asked.
                    let Some(there) = there else { continue };
                    Given {
                        device: there.uuid,
                        reason: placed.reason,
                        expected: Some((placed.slowdown, placed.confidence)),
                        fell_back: false,
                    }
                }
            };
            picture.assume(uid, node, &given.device, wish.clone(), Instant::now());
            return Ok(given);
        }
        Err(format!(
            "other pods took what was chosen on {node}, {TRIES} times in turn"
        ))
    }
}

/// Why a node cannot take a pod.
#[derive(Debug, Clone)]
struct Why {
    full: String,
    /// The same for all nodes that lack the same.
    short: String,
}

impl Why {
    fn alike(text: String) -> Self {
        Self {
            full: text.clone(),
            short: text,
        }
    }
}

/// Reasons as a scheduler can show them in one line.
fn readable(failed: BTreeMap<String, Why>) -> BTreeMap<String, String> {
    let detailed = failed.len() <= DETAILED;
    let reasons = failed.into_iter();
    let reasons = reasons.map(|(name, why)| (name, if detailed { why.full } else { why.short }));
    reasons.collect()
}

/// The device that fits most tightly, and why.
#[derive(Debug)]
struct Fitting {
    tightest: Candidate,
    reason: String,
}

/// Devices of a node as a hook takes them: what a node says of itself may be anything, and is not
/// to spoil the question about the others.
fn askable(fitting: impl Iterator<Item = Candidate>) -> Vec<Candidate> {
    let mut seen = BTreeSet::new();
    let known = |one: &Candidate| (1..=UUID_BYTES).contains(&one.uuid.len());
    let mut all: Vec<Candidate> = fitting
        .filter(|one| known(one) && seen.insert(one.uuid.to_ascii_lowercase()))
        .take(MOST_DEVICES)
        .collect();
    for one in &mut all {
        one.residents.truncate(MOST_RESIDENTS);
    }
    all
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
