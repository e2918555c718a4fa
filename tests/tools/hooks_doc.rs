//! Prints `docs/reference/hooks.md`. See `scripts/hooks-doc`.

fn main() {
    print!("{}", tests::hooks_doc::page());
}
