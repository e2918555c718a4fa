//! The API as an OpenAPI 3.1 document, served at `/v1/openapi.json` and kept in
//! `docs/reference/openapi.json`: made from what the handlers ([`routes`](super::routes)) and the
//! types of [`control`] declare. Tests hold it to the routes and to what is sent.

use std::sync::LazyLock;

use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::openapi::{ContentBuilder, Ref, RefOr, ResponseBuilder, Schema};
use utoipa::{Modify, OpenApi};

use super::problem::Problem;
// The macro looks for what each handler declares beside the handler's name.
use super::routes::*;

/// OpenAPI 3.1, for people too.
pub static DOCUMENT: LazyLock<String> = LazyLock::new(|| {
    // PANIC: the document is data of ours; a test makes it.
    Api::openapi().to_pretty_json().expect("JSON") + "\n"
});

#[derive(OpenApi)]
#[openapi(
    info(
        title = "sublet arbiter",
        version = "1",
        license(name = "Apache-2.0 OR MIT"),
        description = "The arbiter of a host or of a user, over the Unix socket `api.sock` in its directory, where who asks is known by the kernel's word, and where it was started so over TCP with TLS, where a token says who asks. Each operation is checked against that. Times on the host are Unix milliseconds (`_unix_ms`), durations nanoseconds (`_ns`), sizes bytes (`_bytes`), shares fractions of one device's time between 0 and 1. Answers may have more fields in later versions; a request with a field that is not known is refused."
    ),
    servers(
        (url = "http://localhost", description = "Over api.sock; the name does not matter."),
        (
            url = "https://{host}:{port}",
            description = "Over TCP, with TLS 1.3 and a token.",
            variables(
                ("host" = (default = "localhost", description = "A name in the certificate.")),
                ("port" = (default = "7443", description = "As `--api-listen` says."))
            )
        )
    ),
    security((), ("bearer" = [])),
    paths(
        document, status, jobs, register, job, change, profile, devices, change_devices,
        change_device, timeline, move_jobs, acquire, give_up, groups, group, events, follow_events, config, reload, refuse_hook,
        shutdown
    ),
    components(schemas(Problem, control::Parameter)),
    modifiers(&Common)
)]
struct Api;

/// What is the same for every route.
struct Common;

impl Modify for Common {
    fn modify(&self, api: &mut utoipa::openapi::OpenApi) {
        let bearer = HttpBuilder::new()
            .scheme(HttpAuthScheme::Bearer)
            .description(Some(
                "Over TCP, with each request: a token of the arbiter's file of tokens. Over api.sock none is looked at.",
            ));
        if let Some(components) = &mut api.components {
            let scheme = SecurityScheme::Http(bearer.build());
            components.add_security_scheme("bearer", scheme);
        }
        let problem = ContentBuilder::new().schema(Some(Ref::from_schema_name("Problem")));
        let refused = ResponseBuilder::new()
            .description("Refused; nothing was done.")
            .content("application/json", problem.build())
            .build();
        for item in api.paths.paths.values_mut() {
            let operations = [&mut item.get, &mut item.post, &mut item.patch];
            for operation in operations.into_iter().flatten() {
                let responses = &mut operation.responses.responses;
                responses.insert("default".into(), refused.clone().into());
                operation.tags = None;
            }
        }
        // A type that is flattened into another one: a reference, and no choice of one.
        let schemas = api
            .components
            .iter_mut()
            .flat_map(|all| all.schemas.values_mut());
        for schema in schemas {
            let RefOr::T(Schema::AllOf(all_of)) = schema else {
                continue;
            };
            for part in &mut all_of.items {
                if let RefOr::T(Schema::OneOf(choice)) = part
                    && let [RefOr::Ref(single)] = &choice.items[..]
                {
                    *part = Ref::new(single.ref_location.clone()).into();
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use control::Request;
    use serde::Serialize;
    use serde_json::Value;

    use super::DOCUMENT;
    use crate::api::routes::ROUTES;

    fn document() -> Value {
        serde_json::from_str(&DOCUMENT).expect("JSON")
    }

    #[test]
    fn the_document_in_the_tree_is_the_one_that_is_served() {
        let path = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../docs/reference/openapi.json"
        );
        let kept = std::fs::read_to_string(path).unwrap_or_default();
        assert!(
            kept == *DOCUMENT,
            "write it again: cargo run -p arbiter --example openapi > docs/reference/openapi.json"
        );
        assert_eq!(document()["openapi"], "3.1.0");
    }

    #[test]
    fn every_route_is_described_and_no_other() {
        let document = document();
        let mut described = BTreeSet::new();
        for (path, methods) in document["paths"].as_object().expect("paths") {
            for (method, operation) in methods.as_object().expect("methods") {
                described.insert((method.to_uppercase(), path.clone()));
                let refused = &operation["responses"]["default"]["content"]["application/json"];
                assert_eq!(refused["schema"]["$ref"], "#/components/schemas/Problem");
                let in_path = operation["parameters"].as_array().into_iter().flatten();
                let in_path = in_path.filter(|one| one["in"] == "path" && one["required"] == true);
                assert_eq!(in_path.count(), path.matches('{').count(), "{path}");
                let text = operation["summary"]
                    .as_str()
                    .or(operation["description"].as_str());
                assert!(text.is_some_and(|text| !text.is_empty()), "{method} {path}");
            }
        }
        let served: BTreeSet<(String, String)> = ROUTES
            .iter()
            .map(|route| (route.method.to_owned(), route.path.clone()))
            .collect();
        assert_eq!(described, served);
        assert_eq!(served.len(), ROUTES.len(), "one is there twice");
    }

    /// Where each kind of request is made over HTTP. A new kind does not build without a row.
    fn operation_of(request: &Request) -> (&'static str, &'static str) {
        match request {
            Request::Status => ("GET", "/v1/status"),
            Request::Register(_) => ("POST", "/v1/jobs"),
            Request::List => ("GET", "/v1/jobs"),
            Request::Job { .. } => ("GET", "/v1/jobs/{job}"),
            Request::Devices => ("GET", "/v1/devices"),
            Request::Set { .. } => ("PATCH", "/v1/jobs/{job}"),
            Request::SetDevice { device: None, .. } => ("PATCH", "/v1/devices"),
            Request::SetDevice { .. } => ("PATCH", "/v1/devices/{device}"),
            Request::Move(_) => ("POST", "/v1/moves"),
            Request::Acquire { .. } => ("POST", "/v1/jobs/{job}/acquire"),
            Request::Yield { .. } => ("POST", "/v1/jobs/{job}/yield"),
            Request::Groups => ("GET", "/v1/groups"),
            Request::Reload => ("POST", "/v1/reload"),
            Request::Config { .. } => ("GET", "/v1/config"),
            Request::Shutdown => ("POST", "/v1/shutdown"),
            Request::Events { .. } => ("GET", "/v1/events"),
            Request::Timeline { .. } => ("GET", "/v1/devices/{device}/timeline"),
            Request::HookRefused { .. } => ("POST", "/v1/hook-refusals"),
        }
    }

    #[test]
    fn every_kind_of_request_can_be_made() {
        let one_device = Request::SetDevice {
            device: Some(control::DeviceSelector::Index(0)),
            settings: control::DeviceSettings::default(),
        };
        for request in Request::one_of_each().iter().chain([&one_device]) {
            let (method, path) = operation_of(request);
            let served =
                |route: &crate::api::routes::Route| route.method == method && route.path == path;
            assert!(ROUTES.iter().any(served), "{request:?}");
        }
    }

    /// The fields of a schema, whatever it is put together of.
    fn fields(document: &Value, schema: &Value) -> BTreeSet<String> {
        if let Some(target) = schema["$ref"].as_str() {
            let there = document.pointer(&target[1..]);
            return fields(document, there.unwrap_or_else(|| panic!("{target}")));
        }
        let parts = schema["allOf"].as_array().into_iter().flatten();
        let own = schema["properties"].as_object();
        let own = own.into_iter().flat_map(|own| own.keys().cloned());
        parts
            .flat_map(|part| fields(document, part))
            .chain(own)
            .collect()
    }

    #[test]
    fn every_type_has_the_fields_that_are_described() {
        fn check<T: Serialize + Default>(name: &str) {
            let document = document();
            let sample = serde_json::to_value(T::default()).expect("JSON");
            let sent: BTreeSet<String> = sample
                .as_object()
                .expect("an object")
                .keys()
                .cloned()
                .collect();
            let schema = &document["components"]["schemas"][name];
            assert_eq!(fields(&document, schema), sent, "{name}");
        }
        check::<control::ArbiterStatus>("ArbiterStatus");
        check::<control::JobStatus>("JobStatus");
        check::<control::JobDevice>("JobDevice");
        check::<control::ProcessStatus>("ProcessStatus");
        check::<control::EscapedProcess>("EscapedProcess");
        check::<control::DeviceStatus>("DeviceStatus");
        check::<control::UnmanagedProcess>("UnmanagedProcess");
        check::<control::Residence>("Residence");
        check::<control::Pressure>("Pressure");
        check::<control::Profile>("Profile");
        check::<control::ResizeStatus>("ResizeStatus");
        check::<control::ConfigReport>("ConfigReport");
        check::<control::ConfigStatus>("ConfigStatus");
        check::<control::ConfigValue>("ConfigValue");
        check::<control::Capped>("Capped");
        check::<control::Layer>("Layer");
        check::<control::Registered>("Registered");
        check::<control::DeviceBytes>("DeviceBytes");
        check::<control::LatencyStatus>("LatencyStatus");
        check::<control::Reloaded>("Reloaded");
        check::<control::Event>("Event");
        check::<control::Timeline>("Timeline");
        check::<control::Acquired>("Acquired");
        check::<control::Yielded>("Yielded");
        check::<control::GroupStatus>("GroupStatus");
        check::<control::GroupMember>("GroupMember");
        check::<control::TimelineJob>("TimelineJob");
        check::<control::TimelineSpan>("TimelineSpan");
        check::<control::Moves>("Moves");
        check::<control::Moved>("Moved");
        check::<control::JobMoved>("JobMoved");
        check::<control::JobSpec>("JobSpec");
        check::<control::OwnFile>("OwnFile");
        check::<control::JobSettings>("JobSettings");
        check::<control::Change>("Change");
        check::<control::DeviceSettings>("DeviceSettings");
        check::<control::ControlError>("ControlError");
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
