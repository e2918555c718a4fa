//! What a JSON Schema says of values that travel as texts, and of settings.

use utoipa::openapi::schema::SchemaType;
use utoipa::openapi::{AllOfBuilder, RefOr, Schema, Type};

/// A value of a setting: it may be left out, or be `null`, which is the same.
#[must_use]
pub fn described(schema: RefOr<Schema>, doc: &str) -> RefOr<Schema> {
    let doc = (!doc.is_empty()).then(|| doc.to_owned());
    match schema {
        RefOr::T(Schema::Object(mut object)) => {
            object.schema_type = or_null(object.schema_type);
            if let Some(words) = &mut object.enum_values {
                words.push(serde_json::Value::Null);
            }
            object.description = doc;
            RefOr::T(Schema::Object(object))
        }
        RefOr::T(Schema::Array(mut array)) => {
            array.schema_type = or_null(array.schema_type);
            array.description = doc;
            RefOr::T(Schema::Array(array))
        }
        RefOr::T(Schema::OneOf(mut one_of)) => {
            let null = utoipa::openapi::ObjectBuilder::new().schema_type(Type::Null);
            one_of.items.push(null.into());
            one_of.description = doc;
            RefOr::T(Schema::OneOf(one_of))
        }
        other => AllOfBuilder::new().item(other).description(doc).into(),
    }
}

fn or_null(kind: SchemaType) -> SchemaType {
    match kind {
        SchemaType::Type(kind) => SchemaType::Array(vec![kind, Type::Null]),
        other => other,
    }
}

/// Describes types that travel as the text that people write: pattern, example, and a sentence.
#[macro_export]
#[doc(hidden)]
macro_rules! text_schema {
    ($type:ident, $pattern:literal, $example:literal, $doc:literal;) => {
        impl utoipa::PartialSchema for $type {
            fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::Schema> {
                utoipa::openapi::ObjectBuilder::new()
                    .schema_type(utoipa::openapi::Type::String)
                    .pattern(Some($pattern))
                    .examples([$example])
                    .description(Some($doc))
                    .into()
            }
        }

        impl utoipa::ToSchema for $type {}
    };
}
