//! The manifests: they are YAML, say what the programs do, and the chart says the same.

use std::collections::BTreeSet;
use std::fs;

use kubernetes::{RESOURCE, api, picture, proto};
use tests::{Artefacts, Outcome, Sandbox};
use yaml_rust2::{Yaml, YamlLoader};

const FILES: [&str; 5] = ["namespace", "access", "node", "extender", "device-classes"];

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

fn base() -> Vec<Yaml> {
    FILES
        .iter()
        .flat_map(|file| objects(&read(&format!("base/{file}.yaml"))))
        .collect()
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
    assert_eq!(all.len(), 4);
    all
}

#[test]
fn the_manifests_list_all_there_is() {
    let kustomization = objects(&read("base/kustomization.yaml"));
    let listed: Vec<&str> = list(&kustomization[0]["resources"])
        .iter()
        .map(text)
        .collect();
    let files = FILES.map(|file| format!("{file}.yaml"));
    assert_eq!(listed, files);
    let kinds: BTreeSet<String> = base()
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
    ] {
        assert!(kinds.contains(kind), "{kinds:?}");
    }
}

#[test]
fn every_container_is_unprivileged_and_starts_what_the_command_has() {
    let sandbox = Sandbox::new();
    for container in containers(&base()) {
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
    let classes = objects(&read("base/device-classes.yaml"));
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
                    all.insert(format!("{} {}", text(verb), text(resource)));
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
    ]);
    assert_eq!(rules("sublet-extender"), extender);
    assert!(api::ACCOUNT_DIR.ends_with("serviceaccount"));
}

#[test]
fn the_chart_says_the_same_as_the_manifests() {
    let values = objects(&read("chart/values.yaml"));
    let values = values[0].as_hash().expect("values");
    for file in FILES {
        let mut template = read(&format!("chart/templates/{file}.yaml"));
        for (name, value) in values {
            let value = match value {
                Yaml::Integer(number) => number.to_string(),
                other => text(other).to_owned(),
            };
            template = template.replace(&format!("{{{{ .Values.{} }}}}", text(name)), &value);
        }
        assert!(
            !template.contains("{{"),
            "{file}: a value without a default: {template}"
        );
        assert_eq!(
            objects(&template),
            objects(&read(&format!("base/{file}.yaml"))),
            "{file}"
        );
    }
    let chart = &objects(&read("chart/Chart.yaml"))[0];
    assert_eq!(text(&chart["version"]), env!("CARGO_PKG_VERSION"));
    assert_eq!(text(&values[&Yaml::from_str("image")]), "sublet:0.1.0");
}
