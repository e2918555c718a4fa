//! What a policy is for: the two axes of the survey of deep-learning schedulers (arXiv 2205.11913).

/// What a policy tries to make good.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Objective {
    /// Time from arrival to completion, on average.
    Completion,
    /// Time until the last job is done.
    Makespan,
    /// Work done per GPU.
    Utilisation,
    /// Nobody worse off than with a part of the cluster for himself.
    Fairness,
    /// Deadlines met.
    Deadline,
}

/// How a policy handles the resource.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Manner {
    /// A job has its GPUs for itself, as many as it asked for.
    Exclusive,
    /// Jobs share a GPU.
    Sharing,
    /// A job's number of GPUs changes.
    Elastic,
    /// GPU types differ, and it matters.
    Heterogeneous,
    /// Where the GPUs are matters.
    Topology,
}

/// The tags of a policy: no policy is without at least one of each.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tags {
    /// What it makes good.
    pub objectives: &'static [Objective],
    /// How it handles the resource.
    pub manners: &'static [Manner],
    /// The system it is from, with venue and year, or "textbook".
    pub source: &'static str,
}

impl Objective {
    /// In one word, for tables.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Completion => "completion",
            Self::Makespan => "makespan",
            Self::Utilisation => "utilisation",
            Self::Fairness => "fairness",
            Self::Deadline => "deadline",
        }
    }
}

impl Manner {
    /// In one word, for tables.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Exclusive => "exclusive",
            Self::Sharing => "sharing",
            Self::Elastic => "elastic",
            Self::Heterogeneous => "heterogeneous",
            Self::Topology => "topology",
        }
    }
}
