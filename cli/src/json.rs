//! JSON for programs: one object on one line, with the number of its form.

use serde_json::Value;

/// Raised when a field changes its meaning or goes away.
const SCHEMA: u32 = 1;

/// `value`, which is an object, with `"schema"` in it, as a line.
pub fn object(mut value: Value) -> String {
    value["schema"] = SCHEMA.into();
    format!("{value}\n")
}
