//! Prints the API's OpenAPI document, for `docs/reference/openapi.json`.

fn main() {
    print!("{}", *arbiter::api::openapi::DOCUMENT);
}
