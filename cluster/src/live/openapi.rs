//! The API as an OpenAPI document, served at `/v1/openapi.json`. Tests hold it to the routes and to
//! the types.

/// OpenAPI 3.1.
pub const DOCUMENT: &str = include_str!("openapi.json");

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde::Serialize;
    use serde_json::Value;

    use super::DOCUMENT;
    use crate::live::service::ROUTES;
    use crate::live::wire::{
        Ack, DecisionView, Device, Ended, HookId, HookStatus, JobView, NodeView, Order, Orders,
        PairView, Registration, Report, RunId, RunReport, Signal, StartRun, Submission, Terms,
        WaitMatrix, Welcome, What,
    };

    fn document() -> Value {
        serde_json::from_str(DOCUMENT).expect("JSON")
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
            .map(|route| (route.method.to_owned(), route.path.to_owned()))
            .collect();
        assert_eq!(described, served);
        for route in ROUTES {
            let operation = &document["paths"][route.path][route.method.to_lowercase()];
            assert_eq!(
                operation["security"] == serde_json::json!([]),
                route.open,
                "{route:?}"
            );
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
        check("HookStatus", json(HookStatus::default()));
        check("Problem", serde_json::json!({"error": {}}));
        check("ControlError", json(control::ControlError::default()));
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
