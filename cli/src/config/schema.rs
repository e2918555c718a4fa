//! The JSON Schema of the quota file, for editors, made from the key table.

use serde_json::{Map, Value, json};

use super::keys::{Kind, PROCESSES, QUANTUM_MS, RATIO, SECTIONS, Section};

/// The schema (draft 2020-12) as pretty JSON with a final newline.
pub fn text() -> String {
    let sections: Map<String, Value> = SECTIONS
        .into_iter()
        .map(|section| {
            let table = table(section);
            let value = if section.repeated {
                json!({ "description": section.doc, "type": "array", "items": table })
            } else {
                let mut table = table;
                table["description"] = section.doc.into();
                table
            };
            (section.name.to_owned(), value)
        })
        .collect();
    let schema = json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "sublet.toml",
        "description": "Quota file of sublet: what jobs get on shared GPUs.",
        "type": "object",
        "additionalProperties": false,
        "properties": sections,
    });
    format!("{schema:#}\n")
}

fn table(section: &Section) -> Value {
    let properties: Map<String, Value> = section
        .keys
        .iter()
        .map(|key| {
            let mut value = kind(key.kind);
            value["description"] = key.doc.into();
            (key.name.to_owned(), value)
        })
        .collect();
    let mut table = json!({
        "type": "object",
        "additionalProperties": false,
        "properties": properties,
    });
    match section.needs_one_of {
        [] => {}
        [only] => table["required"] = json!([only]),
        several => {
            table["anyOf"] = several
                .iter()
                .map(|name| json!({ "required": [name] }))
                .collect();
        }
    }
    table
}

fn kind(kind: Kind) -> Value {
    let index = json!({ "type": "integer", "minimum": 0, "maximum": u32::MAX });
    let uuid = json!({ "type": "string", "pattern": "^(GPU-|MIG-)[0-9A-Fa-f-]+$|^[0-9]+$" });
    match kind {
        Kind::Size => json!({
            "type": "string",
            "pattern": r"^\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*([KMGTkmgt]([Ii]?[Bb])?|[Bb]|%)\s*$",
            "examples": ["8GiB", "512M", "50%"],
        }),
        Kind::Share => json!({ "type": "number", "exclusiveMinimum": 0, "maximum": 1 }),
        Kind::Class => json!({ "enum": control::Class::ALL.map(control::Class::as_str) }),
        Kind::FailMode => json!({ "enum": control::FailMode::ALL.map(control::FailMode::as_str) }),
        Kind::OnRefusal => {
            json!({ "enum": control::OnRefusal::ALL.map(control::OnRefusal::as_str) })
        }
        Kind::Mode => json!({ "enum": ["exclusive", "concurrent", "auto"] }),
        Kind::Quantum => {
            json!({ "type": "number", "minimum": QUANTUM_MS.0, "maximum": QUANTUM_MS.1 })
        }
        Kind::Policy => {
            let name = json!({ "type": "string", "minLength": 1, "examples": ["stride"] });
            json!({ "anyOf": [
                name,
                {
                    "type": "object",
                    "properties": { "name": name },
                    "required": ["name"],
                    "additionalProperties": { "type": ["number", "string", "boolean"] },
                },
            ] })
        }
        Kind::Processes => json!({ "type": "integer", "minimum": 1, "maximum": PROCESSES }),
        Kind::Holders => json!({ "type": "integer", "minimum": 1, "maximum": 64 }),
        Kind::Misbehaviour => {
            json!({ "enum": control::Misbehaviour::ALL.map(control::Misbehaviour::as_str) })
        }
        Kind::Overflow => {
            json!({ "enum": control::Overflow::ALL.map(control::Overflow::as_str) })
        }
        Kind::Ratio => json!({ "type": "number", "minimum": RATIO.0, "maximum": RATIO.1 }),
        Kind::Url => {
            json!({ "type": "string", "pattern": "^http://.+", "examples": ["http://10.0.0.1:7070"] })
        }
        Kind::File => {
            json!({ "type": "string", "pattern": "^/", "examples": ["/etc/sublet/token"] })
        }
        Kind::Directory => {
            json!({ "type": "string", "pattern": "^/", "examples": ["/var/lib/sublet/jobs"] })
        }
        Kind::Variables => {
            json!({ "type": "string", "pattern": "^[^=]+$", "examples": ["LD_LIBRARY_PATH,NCCL_SOCKET_IFNAME"] })
        }
        Kind::Node => json!({ "type": "string", "minLength": 1, "examples": ["node-7"] }),
        Kind::User => json!({ "type": "string", "minLength": 1, "examples": ["train"] }),
        Kind::Flag => json!({ "type": "boolean" }),
        Kind::Span => json!({
            "type": "string",
            "pattern": r"^\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*(ms|s|m|h|d)\s*$",
            "examples": ["90s", "1.5h"],
        }),
        Kind::Devices => json!({ "anyOf": [
            index,
            uuid,
            { "type": "array", "minItems": 1, "items": { "anyOf": [index, uuid] } },
        ] }),
        Kind::DeviceMatch => json!({ "anyOf": [index, uuid, { "const": "*" }] }),
        Kind::Pattern => json!({ "type": "string", "minLength": 1, "examples": ["train*"] }),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_committed_schema_is_the_one_printed() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/sublet.schema.json");
        let committed = std::fs::read_to_string(path).unwrap();
        assert_eq!(
            committed,
            super::text(),
            "run `sublet schema > docs/sublet.schema.json`"
        );
    }
}
