//! The manifests: they are YAML, say what the programs do, and the chart says the same.

use std::collections::BTreeSet;
use std::fs;

use kubernetes::{RESOURCE, api, picture, proto};
use tests::{Artefacts, Outcome, Sandbox};
use yaml_rust2::{Yaml, YamlLoader};

/// Files of the base, and what each way adds to it beside its container: its folder, its name in
/// the chart's values, and a file of its own.
const BASE: [&str; 3] = ["namespace", "access", "node"];
const WAYS: [(&str, &str, Option<&str>); 3] = [
    ("device-plugin", "devicePlugin", Some("extender")),
    ("dra", "dra", Some("device-classes")),
    ("nri", "nri", None),
];

fn read(path: &str) -> String {
    let path = Artefacts::get()
        .root()
        .join("packaging/kubernetes")
        .join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn objects(text: &str) -> Vec<Yaml> {
    YamlLoader::load_from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// What Kustomize makes of one way: the base, with the way's container and volumes in its
/// DaemonSet, and the way's own file.
fn built(way: &str, own: Option<&str>) -> Vec<Yaml> {
    let mut all: Vec<Yaml> = BASE
        .iter()
        .flat_map(|file| objects(&read(&format!("base/{file}.yaml"))))
        .collect();
    let patch = objects(&read(&format!("{way}/container.yaml"))).remove(0);
    let place = all
        .iter_mut()
        .find(|one| text(&one["kind"]) == "DaemonSet" && one["metadata"] == patch["metadata"]);
    let mut spec = place.expect("what is patched");
    for key in ["spec", "template", "spec"] {
        spec = entry(spec, key);
    }
    for key in ["containers", "volumes"] {
        let more = list(&patch["spec"]["template"]["spec"][key]).to_vec();
        match entry(spec, key) {
            Yaml::Array(list) => list.extend(more),
            other => panic!("{other:?}"),
        }
    }
    all.extend(own.map_or_else(Vec::new, |own| objects(&read(&format!("{way}/{own}.yaml")))));
    all
}

fn entry<'a>(of: &'a mut Yaml, key: &str) -> &'a mut Yaml {
    let Yaml::Hash(hash) = of else {
        panic!("{of:?}")
    };
    hash.get_mut(&Yaml::from_str(key)).expect(key)
}

/// All of all ways.
fn all() -> Vec<Yaml> {
    let ways = WAYS.iter().flat_map(|(way, _, own)| built(way, *own));
    ways.collect()
}

fn text(of: &Yaml) -> &str {
    of.as_str().unwrap_or_default()
}

fn list(of: &Yaml) -> &[Yaml] {
    of.as_vec().map(Vec::as_slice).unwrap_or_default()
}

/// Every container of every pod template.
fn containers(objects: &[Yaml]) -> Vec<Yaml> {
    let all = objects
        .iter()
        .flat_map(|object| list(&object["spec"]["template"]["spec"]["containers"]).to_vec());
    let all: Vec<_> = all.collect();
    assert_eq!(
        all.len(),
        7,
        "an arbiter for each way, and one of each other"
    );
    all
}

#[test]
fn the_manifests_list_all_there_is() {
    let resources = |folder: &str| -> Vec<String> {
        let kustomization = objects(&read(&format!("{folder}/kustomization.yaml")));
        let listed = list(&kustomization[0]["resources"]).iter().map(text);
        listed.map(ToOwned::to_owned).collect()
    };
    assert_eq!(resources("base"), BASE.map(|file| format!("{file}.yaml")));
    for (way, _, own) in WAYS {
        let own = own.map(|own| format!("{own}.yaml"));
        let expected: Vec<String> = ["../base".to_owned()].into_iter().chain(own).collect();
        assert_eq!(resources(way), expected);
        let kustomization = objects(&read(&format!("{way}/kustomization.yaml")));
        let patch = &kustomization[0]["patches"][0]["path"];
        assert_eq!(text(patch), "container.yaml");
    }
    assert_eq!(resources("device-plugin-tls"), ["../device-plugin"]);
    let kinds: BTreeSet<String> = all()
        .iter()
        .map(|one| text(&one["kind"]).to_owned())
        .collect();
    for kind in [
        "Namespace",
        "DaemonSet",
        "Deployment",
        "Service",
        "DeviceClass",
        "ClusterRole",
        "NetworkPolicy",
    ] {
        assert!(kinds.contains(kind), "{kinds:?}");
    }
}

#[test]
fn every_container_is_unprivileged_and_starts_what_the_command_has() {
    let sandbox = Sandbox::new();
    for container in containers(&all()) {
        let name = text(&container["name"]).to_owned();
        let security = &container["securityContext"];
        assert_eq!(security["privileged"].as_bool(), Some(false), "{name}");
        assert_eq!(
            security["allowPrivilegeEscalation"].as_bool(),
            Some(false),
            "{name}"
        );
        assert_eq!(
            security["readOnlyRootFilesystem"].as_bool(),
            Some(true),
            "{name}"
        );
        assert_eq!(text(&security["capabilities"]["drop"][0]), "ALL", "{name}");
        // To end processes of jobs, which may run as other users than root.
        let added = list(&security["capabilities"]["add"]).iter().map(text);
        let expected: &[&str] = if name == "arbiter" { &["KILL"] } else { &[] };
        assert_eq!(added.collect::<Vec<_>>(), expected, "{name}");
        // It would make the arbiter one of its own user, whom no other user reaches.
        let variables = list(&container["env"]);
        let has_dir = |one: &Yaml| text(&one["name"]) == "SUBLET_RUNTIME_DIR";
        assert!(!variables.iter().any(has_dir), "{name}");
        let args: Vec<&str> = list(&container["args"]).iter().map(text).collect();
        let (flags, words): (Vec<&str>, Vec<&str>) =
            args.iter().partition(|word| word.starts_with("--"));
        let mut help = sandbox.sublet(words.iter().chain(&["--help"]));
        let help = Outcome::of(&mut help).succeeded().stdout;
        for flag in flags {
            let flag = flag.split('=').next().unwrap_or_default();
            assert!(
                help.contains(flag),
                "{name}: `sublet {words:?}` has no {flag}"
            );
        }
    }
}

#[test]
fn names_agree_with_the_code() {
    let classes = objects(&read("dra/device-classes.yaml"));
    for class in &classes {
        let selector = text(&class["spec"]["selectors"][0]["cel"]["expression"]);
        assert!(
            selector.contains(&format!("'{}'", kubernetes::DRIVER)),
            "{selector}"
        );
    }
    assert_eq!(
        text(&classes[1]["spec"]["extendedResourceName"]),
        "sublet.dev/slot"
    );
    let guide = fs::read_to_string(Artefacts::get().root().join("docs/how-to/kubernetes.md"));
    let guide = guide.expect("the guide");
    for name in [
        RESOURCE,
        kubernetes::SHARE_ANNOTATION,
        kubernetes::DEVICE_ANNOTATION,
        kubernetes::DECISION_ANNOTATION,
        kubernetes::SLOWDOWN_ANNOTATION,
        kubernetes::CONFIDENCE_ANNOTATION,
        kubernetes::KIND_ANNOTATION,
        kubernetes::JOB_ANNOTATION,
        kubernetes::pods::STATUS_ANNOTATION,
        picture::DEVICES_ANNOTATION,
        kubernetes::cdi::KIND,
        "sublet.dev/slot",
        proto::dra::VERSION,
    ] {
        assert!(guide.contains(name), "the guide does not speak of {name}");
    }
}

#[test]
fn accounts_may_do_what_the_programs_do_and_no_more() {
    let objects = objects(&read("base/access.yaml"));
    let rules = |account: &str| -> BTreeSet<String> {
        let role = objects.iter().find(|object| {
            text(&object["kind"]) == "ClusterRole" && text(&object["metadata"]["name"]) == account
        });
        let role = role.expect("a role");
        let mut all = BTreeSet::new();
        for rule in list(&role["rules"]) {
            for resource in list(&rule["resources"]) {
                for verb in list(&rule["verbs"]) {
                    let what = format!("{} {}", text(verb), text(resource));
                    let names = list(&rule["resourceNames"]).iter();
                    let names: String = names.map(|name| format!(" {}", text(name))).collect();
                    all.insert(what + &names);
                }
            }
        }
        all
    };
    let wanted = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
    let node: BTreeSet<String> = wanted(&[
        "get pods",
        "list pods",
        "patch pods",
        "get nodes",
        "patch nodes",
        "get resourceclaims",
        "patch resourceclaims/status",
        // What 1.36 asks besides of a driver that writes its part of a status.
        "associated-node:patch resourceclaims/driver sublet.dev",
        "get resourceslices",
        "create resourceslices",
        "update resourceslices",
    ]);
    assert_eq!(rules("sublet-node"), node);
    let extender: BTreeSet<String> = wanted(&[
        "get pods",
        "list pods",
        "patch pods",
        "list nodes",
        "create pods/binding",
        "create events",
    ]);
    assert_eq!(rules("sublet-extender"), extender);
    assert!(api::ACCOUNT_DIR.ends_with("serviceaccount"));
}

/// The same, with the keys of each map in order.
fn in_order(of: &Yaml) -> Yaml {
    match of {
        Yaml::Hash(hash) => {
            let mut all: Vec<_> = hash.iter().collect();
            all.sort();
            let all = all.into_iter();
            Yaml::Hash(
                all.map(|(key, value)| (key.clone(), in_order(value)))
                    .collect(),
            )
        }
        Yaml::Array(list) => Yaml::Array(list.iter().map(in_order).collect()),
        other => other.clone(),
    }
}

/// What a patch of Kustomize makes of an object: maps field by field, `null` takes one away, lists
/// of things with names by their names, other lists as a whole.
fn patched(of: &Yaml, patch: &Yaml) -> Yaml {
    match (of, patch) {
        (Yaml::Hash(of), Yaml::Hash(patch)) => {
            let mut all = of.clone();
            for (key, value) in patch {
                let made = match all.get(key) {
                    _ if value.is_null() => None,
                    Some(there) => Some(patched(there, value)),
                    None => Some(value.clone()),
                };
                match made {
                    Some(made) => drop(all.insert(key.clone(), made)),
                    None => drop(all.remove(key)),
                }
            }
            Yaml::Hash(all)
        }
        (Yaml::Array(of), Yaml::Array(patch))
            if patch.iter().all(|one| !one["name"].is_badvalue()) =>
        {
            let mut all = of.clone();
            for one in patch {
                match all.iter_mut().find(|there| there["name"] == one["name"]) {
                    Some(there) => *there = patched(there, one),
                    None => all.push(one.clone()),
                }
            }
            Yaml::Array(all)
        }
        _ => patch.clone(),
    }
}

/// A template as Helm renders it, as far as ours go: values, and lines with `if`, `fail` and `end`.
fn rendered(template: &str, values: &Yaml, has_dra: bool) -> Result<String, String> {
    let value = |path: &str| {
        let keys = path.trim_start_matches(".Values.").split('.');
        keys.fold(values.clone(), |at, key| at[key].clone())
    };
    let holds = |condition: &str| match condition.strip_prefix("and ") {
        Some(all) => all.split(' ').all(|one| value(one).as_bool() == Some(true)),
        None if condition.starts_with("or ") => {
            let mut any = condition.split(' ').skip(1);
            any.any(|one| value(one).as_bool() == Some(true))
        }
        None if condition.starts_with("not .") => {
            value(&condition["not ".len()..]).as_bool() != Some(true)
        }
        None if condition == "not (.Capabilities.APIVersions.Has \"resource.k8s.io/v1\")" => {
            !has_dra
        }
        None => value(condition).as_bool() == Some(true),
    };
    let (mut out, mut open) = (String::new(), Vec::new());
    for line in template.lines() {
        let action = line
            .strip_prefix("{{- ")
            .and_then(|line| line.strip_suffix(" }}"));
        let is_in = open.iter().all(|holds| *holds);
        match action {
            Some("end") => {
                open.pop().expect("an end of something");
            }
            Some(action) => match action.split_once(' ') {
                Some(("if", condition)) => open.push(holds(condition)),
                Some(("fail", why)) if is_in => return Err(why.to_owned()),
                Some(("fail", _)) => {}
                _ => panic!("{line}"),
            },
            None if is_in => {
                let mut line = line.to_owned();
                while let Some((before, rest)) = line.split_once("{{ ") {
                    let (path, after) = rest.split_once(" }}").expect("an end");
                    let value = match value(path) {
                        Yaml::Integer(number) => number.to_string(),
                        other => text(&other).to_owned(),
                    };
                    assert!(!value.is_empty(), "{path} has no default");
                    line = format!("{before}{value}{after}");
                }
                out += &line;
                out.push('\n');
            }
            None => {}
        }
    }
    assert!(open.is_empty(), "an if without its end");
    Ok(out)
}

#[test]
fn the_chart_says_the_same_as_the_manifests() {
    let defaults = objects(&read("chart/values.yaml")).remove(0);
    let switched = |on: &[&str]| {
        let mut values = defaults.clone();
        for (_, value, _) in WAYS {
            *entry(entry(&mut values, value), "enabled") = Yaml::Boolean(on.contains(&value));
        }
        values
    };
    assert_eq!(defaults, switched(&["devicePlugin"]), "one by default");
    let files = ["namespace", "access", "node", "extender", "device-classes"];
    let chart = |values: &Yaml, has_dra| -> Result<Vec<Yaml>, String> {
        let mut all = Vec::new();
        for file in files {
            let template = read(&format!("chart/templates/{file}.yaml"));
            all.extend(objects(&rendered(&template, values, has_dra)?));
        }
        all.retain(|object| !object.is_null());
        Ok(all)
    };
    for (way, value, own) in WAYS {
        let made = chart(&switched(&[value]), value == "dra");
        assert_eq!(made, Ok(built(way, own)), "{way}");
    }
    // Over HTTPS.
    let mut values = switched(&["devicePlugin"]);
    *entry(entry(&mut values, "extenderTls"), "enabled") = Yaml::Boolean(true);
    let patch = objects(&read("device-plugin-tls/extender.yaml")).remove(0);
    let mut expected = built("device-plugin", Some("extender"));
    let place = expected
        .iter_mut()
        .find(|one| one["kind"] == patch["kind"] && one["metadata"] == patch["metadata"]);
    let place = place.expect("what is patched");
    *place = patched(place, &patch);
    let made = chart(&values, false).expect("over HTTPS");
    let in_order = |all: &[Yaml]| all.iter().map(in_order).collect::<Vec<_>>();
    assert_eq!(in_order(&made), in_order(&expected));
    let container = &patch["spec"]["template"]["spec"]["containers"][0];
    let args: Vec<&str> = list(&container["args"]).iter().map(text).collect();
    let help = Outcome::of(&mut Sandbox::new().sublet(["kubernetes", "extender", "--help"]));
    let help = help.succeeded().stdout;
    let mount = text(&container["volumeMounts"][0]["mountPath"]);
    for flag in args.iter().filter(|word| word.starts_with("--tls")) {
        let (flag, file) = flag.split_once('=').expect("a file");
        assert!(help.contains(flag) && file.starts_with(mount), "{flag}");
    }
    let mut values = switched(&["devicePlugin"]);
    *entry(entry(&mut values, "hook"), "enabled") = Yaml::Boolean(true);
    let made = chart(&values, false).expect("with a hook");
    let extender = made.iter().find(|one| text(&one["kind"]) == "Deployment");
    let pod = &extender.expect("the extender")["spec"]["template"]["spec"];
    let args = list(&pod["containers"][0]["args"]).iter().map(text);
    let args: Vec<&str> = args.collect();
    let url = text(&values["hook"]["url"]);
    assert!(
        args.contains(&format!("--cluster={url}").as_str()),
        "{args:?}"
    );
    let mount = text(&pod["containers"][0]["volumeMounts"][0]["mountPath"]);
    assert!(
        args.contains(&format!("--token-file={mount}/token").as_str()),
        "{args:?}"
    );
    let secret = text(&pod["volumes"][0]["secret"]["secretName"]);
    assert_eq!(secret, text(&values["hook"]["tokenSecret"]));
    // The node's arbiter reports to the same hook, under the name that the extender asks by.
    let node = made.iter().find(|one| text(&one["kind"]) == "DaemonSet");
    let pod = &node.expect("the node's")["spec"]["template"]["spec"];
    let arbiter = &pod["containers"][0];
    let args: Vec<&str> = list(&arbiter["args"]).iter().map(text).collect();
    assert!(
        args.contains(&format!("--cluster={url}").as_str()),
        "{args:?}"
    );
    assert!(args.contains(&"--cluster-node=$(NODE_NAME)"), "{args:?}");
    let name = &arbiter["env"][0];
    let field = text(&name["valueFrom"]["fieldRef"]["fieldPath"]);
    assert_eq!((text(&name["name"]), field), ("NODE_NAME", "spec.nodeName"));
    let mounts = list(&arbiter["volumeMounts"]);
    let mount = mounts.iter().find(|one| text(&one["name"]) == "token");
    let mount = text(&mount.expect("the token")["mountPath"]);
    assert!(
        args.contains(&format!("--cluster-token-file={mount}/token").as_str()),
        "{args:?}"
    );
    let volumes = list(&pod["volumes"]);
    let volume = volumes.iter().find(|one| text(&one["name"]) == "token");
    let secret = text(&volume.expect("the token")["secret"]["secretName"]);
    assert_eq!(secret, text(&values["hook"]["tokenSecret"]));
    let help = Outcome::of(&mut Sandbox::new().sublet(["arbiter", "--help"]));
    let help = help.succeeded().stdout;
    for flag in args.iter().filter(|word| word.starts_with("--")) {
        let flag = flag.split('=').next().unwrap_or_default();
        assert!(help.contains(flag), "`sublet arbiter` has no {flag}");
    }
    // A hook with TLS: whom to believe lies beside its token.
    *entry(entry(&mut values, "hook"), "tls") = Yaml::Boolean(true);
    let made = chart(&values, false).expect("with a hook with TLS");
    for (kind, flag) in [("Deployment", "--ca-file"), ("DaemonSet", "--cluster-ca")] {
        let one = made
            .iter()
            .find(|one| text(&one["kind"]) == kind)
            .expect(kind);
        let args = list(&one["spec"]["template"]["spec"]["containers"][0]["args"]);
        let expected = format!("{flag}={mount}/ca.crt");
        assert!(args.iter().any(|one| text(one) == expected), "{args:?}");
        let words: &[&str] = match kind {
            "Deployment" => &["kubernetes", "extender", "--help"],
            _ => &["arbiter", "--help"],
        };
        let help = Outcome::of(&mut Sandbox::new().sublet(words)).succeeded();
        assert!(help.stdout.contains(flag), "{flag}");
    }
    let error = chart(&switched(&["dra"]), false).expect_err("an old cluster");
    assert!(error.contains("from 1.34"), "{error}");
    for both in [
        ["devicePlugin", "dra"],
        ["devicePlugin", "nri"],
        ["dra", "nri"],
    ] {
        let error = chart(&switched(&both), true).expect_err("both");
        let names = both
            .iter()
            .all(|one| error.contains(&format!("{one}.enabled")));
        assert!(names && error.contains("neither knows"), "{error}");
    }
    let chart = &objects(&read("chart/Chart.yaml"))[0];
    assert_eq!(text(&chart["version"]), env!("CARGO_PKG_VERSION"));
    assert_eq!(text(&defaults["image"]), "sublet:0.1.0");
}
