//! Lines in the journal and the log that are about people and not about a job: how many of them
//! strangers, users who start jobs, and the node's agent may still cause.
//!
//! Owns one [`Allowance`] for each of them. A user's is kept only while it is not full again.

use std::collections::BTreeMap;

use crate::journal::Allowance;

/// See the module's documentation. Each method spends one line: how many were left out before it,
/// or `None` where it is left out, too.
#[derive(Debug)]
pub struct Allowances {
    strangers: Allowance,
    refused_hooks: Allowance,
    /// By user.
    starts: BTreeMap<u32, Allowance>,
}

impl Allowances {
    /// Full ones.
    pub fn new(now_ns: u64) -> Self {
        Self {
            strangers: Allowance::new(now_ns),
            refused_hooks: Allowance::new(now_ns),
            starts: BTreeMap::new(),
        }
    }

    /// About somebody who is no client of any job.
    pub fn stranger(&mut self, now_ns: u64) -> Option<u64> {
        self.strangers.spend(now_ns)
    }

    /// About a cluster hook that this node refuses.
    pub fn refused_hook(&mut self, now_ns: u64) -> Option<u64> {
        self.refused_hooks.spend(now_ns)
    }

    /// About a job that a user starts.
    pub fn start(&mut self, uid: u32, now_ns: u64) -> Option<u64> {
        let of_user = self.starts.entry(uid);
        let of_user = of_user.or_insert_with(|| Allowance::of_many(now_ns));
        of_user.spend(now_ns)
    }

    /// Forgets users whose allowance is as good as a new one.
    pub fn forget_full(&mut self, now_ns: u64) {
        self.starts
            .retain(|_, allowance| !allowance.is_full(now_ns));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_do_not_spend_each_others_lines_and_are_forgotten() {
        let mut allowances = Allowances::new(0);
        let through = (0..10_000).filter(|_| allowances.start(1, 1).is_some());
        assert!((1..10_000).contains(&through.count()));
        assert_eq!(allowances.start(2, 1), Some(0));
        assert_eq!(allowances.stranger(1), Some(0));
        allowances.forget_full(2);
        assert_eq!(allowances.starts.len(), 2);
        allowances.forget_full(3_600_000_000_000);
        // The first one is kept until it was said how much was left out.
        assert_eq!(allowances.starts.keys().collect::<Vec<_>>(), [&1]);
    }
}
