//! The policies of a scheduler by name, and the one function that builds it.

use std::fmt;

use super::catalogue::{self, Context};
use super::{Admission, Order, Packer, Placer, RoundAllocator, Scheduler, Sizer};
use crate::registry::PolicyError;

/// The order where nothing else is named.
const DEFAULT_ORDER: &str = "fifo";

/// The policies of one scheduler, as written on a command line.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Choice {
    /// Who is next, or a round allocator, which answers for all. `None`: the sizer decides; without
    /// one, by arrival.
    pub order: Option<String>,
    /// Who shares a GPU.
    pub packer: Option<String>,
    /// Which GPUs.
    pub placer: String,
    /// Whose deadline is promised.
    pub admission: Option<String>,
    /// How many GPUs.
    pub sizer: Option<String>,
}

/// The policies of one scheduler, built.
pub struct Policies {
    /// Who is next.
    pub order: Box<dyn Order>,
    /// Which GPUs.
    pub placer: Box<dyn Placer>,
    /// Who shares a GPU.
    pub packer: Option<Box<dyn Packer>>,
    /// Whose deadline is promised.
    pub admission: Option<Box<dyn Admission>>,
    /// Who gets how many GPUs; the order then has no say.
    pub sizer: Option<Box<dyn Sizer>>,
    /// Who runs where; order, packer and sizer then have no say.
    pub round_allocator: Option<Box<dyn RoundAllocator>>,
}

impl Policies {
    /// Of an order and a placer alone.
    #[must_use]
    pub fn new(order: Box<dyn Order>, placer: Box<dyn Placer>) -> Self {
        Self {
            order,
            placer,
            packer: None,
            admission: None,
            sizer: None,
            round_allocator: None,
        }
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let first = self.sizer.as_ref().or(self.order.as_ref());
        f.write_str(first.map_or(DEFAULT_ORDER, String::as_str))?;
        for more in [&self.packer, &self.admission].into_iter().flatten() {
            write!(f, " + {more}")?;
        }
        if self.placer != "anywhere" {
            write!(f, " @ {}", self.placer)?;
        }
        Ok(())
    }
}

impl Choice {
    /// An order and a placer, by name.
    #[must_use]
    pub fn new(order: &str, placer: &str) -> Self {
        Self {
            order: Some(order.to_owned()),
            packer: None,
            placer: placer.to_owned(),
            admission: None,
            sizer: None,
        }
    }

    /// A scheduler of these policies.
    ///
    /// # Errors
    /// [`PolicyError`]: a policy or parameter is unknown, or a policy could not act, by itself or
    /// beside the others.
    pub fn scheduler(&self, context: &Context, seed: u64) -> Result<Scheduler, PolicyError> {
        Ok(Scheduler::of(self.policies(context)?, seed))
    }

    /// The policies, built and checked: a caller may wrap one before it makes a [`Scheduler::of`]
    /// them.
    ///
    /// # Errors
    /// As [`Self::scheduler`].
    pub fn policies(&self, context: &Context) -> Result<Policies, PolicyError> {
        let order = self.order.as_deref();
        let rounds = order.filter(|order| catalogue::is_round_allocator(order));
        // An order that is never asked, beside a sizer or a round allocator.
        let order = order.filter(|_| rounds.is_none()).unwrap_or(DEFAULT_ORDER);
        let some = |name: &Option<String>| name.clone();
        let policies = Policies {
            order: catalogue::order(order, context)?,
            placer: catalogue::placer(&self.placer, context)?,
            packer: some(&self.packer)
                .map(|packer| catalogue::packer(&packer, context))
                .transpose()?,
            admission: some(&self.admission)
                .map(|admission| catalogue::admission(&admission, context))
                .transpose()?,
            sizer: some(&self.sizer)
                .map(|sizer| catalogue::sizer(&sizer, context))
                .transpose()?,
            round_allocator: rounds
                .map(|rounds| catalogue::round_allocator(rounds, context))
                .transpose()?,
        };
        self.check(&policies)?;
        Ok(policies)
    }

    /// Refuses a combination in which one of the policies would never be asked.
    fn check(&self, policies: &Policies) -> Result<(), PolicyError> {
        let refuse = |policy: &Option<String>, why: String| {
            let policy = policy.clone().unwrap_or_default();
            Err(PolicyError::NoEffect { policy, why })
        };
        let name = |policy: &Option<String>| policy.clone().unwrap_or_default();
        if policies.round_allocator.is_some() {
            let why = format!(
                "round allocator `{}` decides for it; remove one of the two",
                name(&self.order)
            );
            if policies.packer.is_some() {
                return refuse(&self.packer, why);
            }
            if policies.sizer.is_some() {
                return refuse(&self.sizer, why);
            }
        } else if policies.sizer.is_some() {
            let why = format!(
                "sizer `{}` decides who runs on how many GPUs; remove one of the two",
                name(&self.sizer)
            );
            if policies.packer.is_some() {
                return refuse(&self.packer, why);
            }
            if self.order.is_some() {
                return refuse(&self.order, why);
            }
        }
        let Some(admission) = &policies.admission else {
            return Ok(());
        };
        if admission.places() {
            // It binds jobs to GPUs, which only the walk of a preemptive order honours.
            let without = if let Some(packer) = &self.packer {
                format!(
                    "packer `{packer}` moves jobs off the GPUs that it binds them to; remove one of the two"
                )
            } else if let Some(sizer) = &self.sizer {
                format!("sizer `{sizer}` chooses the GPUs of its jobs; remove one of the two")
            } else if policies.round_allocator.is_some() {
                let rounds = name(&self.order);
                format!(
                    "round allocator `{rounds}` chooses the GPUs of its jobs; remove one of the two"
                )
            } else if !policies.order.preemptive() {
                let order = policies.order.name();
                format!(
                    "order `{order}` never stops a job to make space for another; choose one that does, such as `srtf`"
                )
            } else {
                return Ok(());
            };
            return refuse(&self.admission, without);
        }
        let asks = policies.round_allocator.is_none() && policies.sizer.is_none();
        if asks && admission.evicts() && !policies.order.preemptive() {
            let order = policies.order.name();
            return refuse(
                &self.admission,
                format!(
                    "order `{order}` never stops a job to make space for another; choose one that does, such as `srtf`"
                ),
            );
        }
        if !asks && !admission.rejects() {
            let other = name(if policies.sizer.is_some() {
                &self.sizer
            } else {
                &self.order
            });
            return refuse(
                &self.admission,
                format!("`{other}` does not look at its promises; remove one of the two"),
            );
        }
        Ok(())
    }
}
