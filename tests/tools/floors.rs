//! Prints the architecture page with the list of floors as it is. See `scripts/floors`.

use std::path::Path;

use tests::floors;

fn main() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("the workspace");
    let page = std::fs::read_to_string(root.join(floors::PAGE)).expect("the page");
    print!("{}", floors::written_into(&page, root));
}
