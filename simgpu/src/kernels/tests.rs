//! Every twin against a plain reference in double precision.

use super::*;

#[test]
fn names_are_unique_and_found() {
    for kernel in all() {
        assert_eq!(find(kernel.name).map(|found| found.name), Some(kernel.name));
        assert_eq!(
            all()
                .iter()
                .filter(|other| other.name == kernel.name)
                .count(),
            1
        );
        assert!(kernel.param_sizes.iter().all(|size| (1..=8).contains(size)));
    }
    assert!(find("sublet_no_such_kernel").is_none());
}
