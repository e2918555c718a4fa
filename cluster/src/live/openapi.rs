//! The API as an OpenAPI document, served at `/v1/openapi.json`: made from what the handlers
//! ([`routes`](super::routes)) and the messages ([`wire`](super::wire)) declare. Tests hold it to
//! the routes and to what is sent.

use std::sync::LazyLock;

use utoipa::openapi::security::{ApiKey, ApiKeyValue, SecurityScheme};
use utoipa::openapi::{ContentBuilder, Ref, ResponseBuilder};
use utoipa::{Modify, OpenApi, ToSchema};

// The macro looks for what each handler declares beside the handler's name.
use super::routes::*;

/// OpenAPI 3.1.
pub static DOCUMENT: LazyLock<String> = LazyLock::new(|| {
    // PANIC: the document is data of ours; a test makes it.
    Api::openapi().to_json().expect("JSON")
});

#[derive(OpenApi)]
#[openapi(
    info(
        title = "sublet cluster hook",
        version = "1",
        description = "Nodes report, jobs are submitted, decisions are carried out. Each connection begins with GET /v1/session; every request after it carries `Authorization: Sublet seq=N digest=SHA256 code=HMAC`, and every answer `Sublet-Code: HMAC`, as docs/how-to/cluster.md says. The token never travels."
    ),
    paths(
        session, document, health, status, decisions, decide, jobs, submit, job, cancel, register,
        report, forget, retry, kinds, feed, away
    ),
    components(schemas(Problem)),
    security(("token" = [])),
    modifiers(&Common)
)]
struct Api;

/// What is the same for every route.
struct Common;

impl Modify for Common {
    fn modify(&self, api: &mut utoipa::openapi::OpenApi) {
        let problem = ContentBuilder::new().schema(Some(Ref::from_schema_name("Problem")));
        let refused = ResponseBuilder::new()
            .description("Refused.")
            .content("application/json", problem.build())
            .build();
        for (path, item) in &mut api.paths.paths {
            let operations = [
                ("GET", &mut item.get),
                ("POST", &mut item.post),
                ("PUT", &mut item.put),
                ("DELETE", &mut item.delete),
            ];
            for (method, operation) in operations {
                let Some(operation) = operation else {
                    continue;
                };
                let responses = &mut operation.responses.responses;
                responses.insert("default".into(), refused.clone().into());
                let is = |route: &&Route| route.method == method && route.path == *path;
                if ROUTES.iter().find(is).is_some_and(|route| route.open) {
                    operation.security = Some(Vec::new());
                }
            }
        }
        let token =
            ApiKeyValue::with_description("Authorization", "Sublet seq=N digest=SHA256 code=HMAC");
        let scheme = SecurityScheme::ApiKey(ApiKey::Header(token));
        let components = api.components.get_or_insert_default();
        components.add_security_scheme("token", scheme);
    }
}

/// How firmly a share is promised.
#[derive(ToSchema)]
#[schema(rename_all = "snake_case")]
#[expect(dead_code, reason = "describes control::Class")]
pub(super) enum Class {
    Guaranteed,
    Opportunistic,
}

/// Why not.
#[derive(ToSchema)]
#[expect(dead_code, reason = "describes control::ControlError")]
struct ControlError {
    code: String,
    /// What happened, with the value that was refused. One line.
    message: String,
    /// What to do about it; empty where there is nothing to say.
    hint: String,
}

/// An error.
#[derive(ToSchema)]
#[expect(dead_code, reason = "describes what `problem` writes")]
struct Problem {
    error: ControlError,
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde::Serialize;
    use serde_json::Value;

    use super::DOCUMENT;
    use crate::live::placement::{Candidate, DecideRequest, Decided, JobProfile, Unfit};
    use crate::live::routes::ROUTES;
    use crate::live::wire::{
        Ack, Away, AwayJob, DecisionView, Device, Ended, Fed, FedPair, Feed, Health, HookId,
        HookStatus, JobPhase, JobView, KindView, NodeView, Order, Orders, OtherJob, PairView,
        Registration, Report, RunId, RunReport, Signal, SpeedView, StartRun, Submission, Terms,
        WaitMatrix, Welcome, What,
    };

    fn document() -> Value {
        serde_json::from_str(&DOCUMENT).expect("JSON")
    }

    #[test]
    fn every_route_is_described_and_no_other() {
        let document = document();
        let described: BTreeSet<(String, String)> = document["paths"]
            .as_object()
            .unwrap()
            .iter()
            .flat_map(|(path, methods)| {
                methods
                    .as_object()
                    .unwrap()
                    .keys()
                    .map(move |method| (method.to_uppercase(), path.clone()))
            })
            .collect();
        let served: BTreeSet<(String, String)> = ROUTES
            .iter()
            .map(|route| (route.method.to_owned(), route.path.clone()))
            .collect();
        assert_eq!(described, served);
        assert_eq!(served.len(), 17);
        for route in ROUTES.iter() {
            let operation = &document["paths"][&route.path][route.method.to_lowercase()];
            assert_eq!(
                operation["security"] == serde_json::json!([]),
                route.open,
                "{route:?}"
            );
            let refused = &operation["responses"]["default"]["content"]["application/json"];
            assert_eq!(refused["schema"]["$ref"], "#/components/schemas/Problem");
            let varies = route.path.matches('{').count();
            let parameters = operation["parameters"].as_array().into_iter().flatten();
            let in_path = parameters.filter(|one| one["in"] == "path" && one["required"] == true);
            assert_eq!(in_path.count(), varies, "{route:?}");
            let takes = matches!(route.method, "POST" | "PUT");
            assert_eq!(operation["requestBody"].is_object(), takes, "{route:?}");
        }
    }

    #[test]
    fn every_type_has_the_fields_that_are_described() {
        let document = document();
        let mut described: BTreeSet<String> = document["components"]["schemas"]
            .as_object()
            .unwrap()
            .keys()
            .cloned()
            .collect();
        let mut check = |name: &str, sample: Value| {
            let schema = &document["components"]["schemas"][name];
            let fields: BTreeSet<&String> = sample.as_object().unwrap().keys().collect();
            let properties: BTreeSet<&String> = schema["properties"]
                .as_object()
                .unwrap_or_else(|| panic!("{name}"))
                .keys()
                .collect();
            assert_eq!(fields, properties, "{name}");
            described.remove(name);
        };
        fn json<T: Serialize>(value: T) -> Value {
            serde_json::to_value(value).unwrap()
        }
        check("HookId", json(HookId::default()));
        check("Challenge", json(crate::live::auth::Challenge::default()));
        check("RunId", json(RunId::default()));
        check("Registration", json(Registration::default()));
        check("Device", json(Device::default()));
        check("Welcome", json(Welcome::default()));
        check("Report", json(Report::default()));
        check("Ack", json(Ack::default()));
        check("RunReport", json(RunReport::default()));
        check("Ended", json(Ended::default()));
        check("WaitMatrix", json(WaitMatrix::default()));
        check("OtherJob", json(OtherJob::default()));
        check("AwayJob", json(AwayJob::default()));
        check("Away", json(Away::default()));
        check("Orders", json(Orders::default()));
        check(
            "Order",
            json(Order {
                epoch: 1,
                seq: 1,
                run: RunId::default(),
                what: What::Stop {
                    grace_s: 1.0,
                    signal: None,
                },
            }),
        );
        check("Terms", json(Terms::default()));
        check("Signal", json(Signal::default()));
        check("StartRun", json(StartRun::default()));
        check("Submission", json(Submission::default()));
        check("JobView", json(JobView::default()));
        check("NodeView", json(NodeView::default()));
        check("DecisionView", json(DecisionView::default()));
        check("PairView", json(PairView::default()));
        check("SpeedView", json(SpeedView::default()));
        check("KindView", json(KindView::default()));
        check("Feed", json(Feed::default()));
        check("FedPair", json(FedPair::default()));
        check("Fed", json(Fed::default()));
        check("HookStatus", json(HookStatus::default()));
        check("Health", json(Health::default()));
        check("DecideRequest", json(DecideRequest::default()));
        check("JobProfile", json(JobProfile::default()));
        check("Candidate", json(Candidate::default()));
        check("Decided", json(Decided::default()));
        check("Unfit", json(Unfit::default()));
        check("Problem", serde_json::json!({"error": {}}));
        check("ControlError", json(control::ControlError::default()));
        let mut choice = |name: &str, samples: Vec<Value>| {
            let schema = &document["components"]["schemas"][name];
            assert_eq!(schema["enum"], Value::Array(samples), "{name}");
            described.remove(name);
        };
        use control::Class::{Guaranteed, Opportunistic};
        choice("Class", vec![json(Guaranteed), json(Opportunistic)]);
        use JobPhase::{Cancelled, Done, Failed, Paused, Running, Starting, Stopping, Waiting};
        let phases = [
            Waiting, Starting, Running, Paused, Stopping, Done, Failed, Cancelled,
        ];
        choice("JobPhase", phases.map(json).to_vec());
        let what = [
            What::Start(Box::default()),
            What::Set(Terms::default()),
            What::Stop {
                grace_s: 1.0,
                signal: None,
            },
        ];
        let kinds = document["components"]["schemas"]["What"]["oneOf"].as_array();
        let kinds = kinds.expect("its kinds");
        assert_eq!(kinds.len(), what.len());
        for (kind, sample) in kinds.iter().zip(what.map(json)) {
            let properties = &kind["properties"];
            assert_eq!(
                properties["kind"]["enum"],
                serde_json::json!([sample["kind"]])
            );
            assert!(properties["body"].is_object(), "{kind}");
        }
        described.remove("What");
        assert!(
            described.is_empty(),
            "described and not checked: {described:?}"
        );
    }

    #[test]
    fn every_reference_leads_somewhere() {
        fn walk(value: &Value, all: &Value) {
            match value {
                Value::Object(fields) => {
                    if let Some(Value::String(target)) = fields.get("$ref") {
                        let pointer = target
                            .strip_prefix('#')
                            .expect("a reference into the document");
                        assert!(all.pointer(pointer).is_some(), "{target}");
                    }
                    fields.values().for_each(|value| walk(value, all));
                }
                Value::Array(values) => values.iter().for_each(|value| walk(value, all)),
                _ => {}
            }
        }
        walk(&document(), &document());
    }
}
