//! The JSON Schema of the quota file, for editors, made from the table of sections.

use control::setting::About;
use serde_json::{Map, Value, json};

use super::sections::{SECTIONS, Section};

/// The schema (draft 2020-12) as pretty JSON with a final newline.
pub fn text() -> String {
    let sections: Map<String, Value> = SECTIONS
        .iter()
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
        "title": "config.toml",
        "description": "Quota file of sublet: what jobs get on shared GPUs.",
        "type": "object",
        "additionalProperties": false,
        "properties": sections,
    });
    format!("{schema:#}\n")
}

fn properties(keys: &[About]) -> Map<String, Value> {
    let property = |about: &About| {
        let mut value = (about.kind.schema)();
        let doc = about.doc();
        value["description"] = format!("{doc} Default: {}.", about.unset).into();
        (about.key.to_owned(), value)
    };
    keys.iter().map(property).collect()
}

fn table(section: &Section) -> Value {
    let mut properties = properties(&(section.keys)());
    for part in section.parts {
        let table = json!({
            "description": part.doc,
            "type": "object",
            "additionalProperties": false,
            "properties": self::properties(&(part.keys)()),
        });
        properties.insert(part.name.to_owned(), table);
    }
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

#[cfg(test)]
mod tests {
    #[test]
    fn the_committed_schema_is_the_one_printed() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/sublet.schema.json");
        let committed = std::fs::read_to_string(path).unwrap();
        assert_eq!(
            committed,
            super::text(),
            "run `sublet config schema > docs/sublet.schema.json`"
        );
    }
}
