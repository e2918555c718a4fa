//! Prints `docs/reference/systems.md`. See `scripts/systems-doc`.

#[allow(dead_code, reason = "the test of the page uses other parts")]
mod systems;

fn main() {
    print!("{}", systems::page());
}
