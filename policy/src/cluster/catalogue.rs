//! Every cluster policy by name, with its parameters.
//!
//! A policy is written `name` or `name:key=value,key=value`; several numbers for one key are joined
//! by `+` (`2d-las:at=3250+7200,promote=8`). Each is constructed and registered in its own file;
//! the module of its slot lists the registrations.

use std::sync::Arc;

use super::admission::ADMISSIONS;
use super::order::ORDERS;
use super::packer::PACKERS;
use super::placer::PLACERS;
use super::round_allocator::ROUND_ALLOCATORS;
use super::sizer::SIZERS;
use super::{Admission, Order, Packer, PairTable, Placer, Profile, RoundAllocator, Sizer, Tags};
use crate::registry::{ParamSpec, PolicyError, Registration, Settings, find};

/// A cluster policy that can be chosen.
pub type Entry<T> = Registration<fn(&Settings<'_>, &Context) -> Result<Box<T>, PolicyError>>;

/// The text of a file, or why there is none.
pub type ReadFile = fn(&str) -> Result<String, String>;

/// When policies learn how busy a job keeps a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Busy {
    /// Never.
    #[default]
    Unknown,
    /// While it runs, and from its arrival if one of its kind ran by itself before.
    OnceSeen,
    /// When it arrives.
    FromArrival,
}

/// What policies can count on beside their parameters: what a trace brings along, or what a live
/// hook measures. A policy that could not act refuses to be built.
#[derive(Clone, Debug, Default)]
pub struct Context {
    /// Measured pairs.
    pub pairs: Option<Arc<PairTable>>,
    /// Measured pairs with the profiles of both jobs.
    pub sharing: Vec<(Profile, Profile, [f64; 2])>,
    /// GPU-seconds of past jobs.
    pub past_gpu_s: Vec<f64>,
    /// Memory of a device, in bytes; 0: not known.
    pub gpu_bytes: u64,
    /// When the busy fraction of a job is known.
    pub busy: Busy,
    /// There are opportunistic jobs beside guaranteed ones.
    pub opportunistic: bool,
    /// It is known how jobs depend on cores and memory, and these are divided.
    pub sensitivity: bool,
    /// Jobs measured their speeds on several numbers of GPUs.
    pub speeds: bool,
    /// Speeds of jobs by GPU type are known, if there are several types.
    pub speeds_by_type: bool,
    /// Decisions are taken so many seconds apart, and at no other time.
    pub round_s: Option<f64>,
    /// Reads a file that a parameter names: policies themselves read none. `Err` says why not.
    pub files: Option<ReadFile>,
}

impl Context {
    /// One that lacks nothing.
    #[must_use]
    pub fn complete() -> Self {
        let profile = Profile::unknown(super::JobType(0), 1, crate::Class::Guaranteed);
        Self {
            pairs: Some(Arc::default()),
            sharing: vec![(profile, profile, [1.0, 1.0])],
            past_gpu_s: vec![1.0],
            gpu_bytes: 16 << 30,
            busy: Busy::FromArrival,
            opportunistic: true,
            sensitivity: true,
            speeds: true,
            speeds_by_type: true,
            round_s: None,
            files: None,
        }
    }
}

/// A question that policies answer.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Slot {
    /// Who is next.
    Order,
    /// Who shares a GPU.
    Packer,
    /// Which GPUs.
    Placer,
    /// Whose deadline is promised.
    Admission,
    /// How many GPUs.
    Sizer,
    /// Who runs where, in rounds.
    RoundAllocator,
}

impl Slot {
    /// As on the command line.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Order => "order",
            Self::Packer => "packer",
            Self::Placer => "placer",
            Self::Admission => "admission",
            Self::Sizer => "sizer",
            Self::RoundAllocator => "round-allocator",
        }
    }
}

/// What is documented of one policy.
#[derive(Clone, Debug)]
pub struct Description {
    /// What it answers.
    pub slot: Slot,
    /// Its name.
    pub name: &'static str,
    /// What it does, in one line.
    pub summary: &'static str,
    /// Its parameters.
    pub params: &'static [ParamSpec],
    /// What it is for.
    pub tags: Tags,
}

fn build<T: ?Sized + 'static>(
    slot: Slot,
    list: &'static [&'static Entry<T>],
    text: &str,
    context: &Context,
) -> Result<Box<T>, PolicyError> {
    let (name, params) = text.split_once(':').unwrap_or((text, ""));
    let entry = find(slot.word(), list, name)?;
    let params = entry.parse(params);
    (entry.build)(&entry.settings(&params)?, context)
}

/// An order by name.
///
/// # Errors
/// [`PolicyError`].
pub fn order(text: &str, context: &Context) -> Result<Box<dyn Order>, PolicyError> {
    build(Slot::Order, ORDERS, text, context)
}

/// A packer by name.
///
/// # Errors
/// [`PolicyError`].
pub fn packer(text: &str, context: &Context) -> Result<Box<dyn Packer>, PolicyError> {
    build(Slot::Packer, PACKERS, text, context)
}

/// A placer by name.
///
/// # Errors
/// [`PolicyError`].
pub fn placer(text: &str, context: &Context) -> Result<Box<dyn Placer>, PolicyError> {
    build(Slot::Placer, PLACERS, text, context)
}

/// An admission by name.
///
/// # Errors
/// [`PolicyError`].
pub fn admission(text: &str, context: &Context) -> Result<Box<dyn Admission>, PolicyError> {
    build(Slot::Admission, ADMISSIONS, text, context)
}

/// A sizer by name.
///
/// # Errors
/// [`PolicyError`].
pub fn sizer(text: &str, context: &Context) -> Result<Box<dyn Sizer>, PolicyError> {
    build(Slot::Sizer, SIZERS, text, context)
}

/// Whether this names a round allocator rather than an order.
#[must_use]
pub fn is_round_allocator(text: &str) -> bool {
    let name = text.split(':').next();
    ROUND_ALLOCATORS
        .iter()
        .any(|entry| Some(entry.name) == name)
}

/// A round allocator by name.
///
/// # Errors
/// [`PolicyError`].
pub fn round_allocator(
    text: &str,
    context: &Context,
) -> Result<Box<dyn RoundAllocator>, PolicyError> {
    build(Slot::RoundAllocator, ROUND_ALLOCATORS, text, context)
}

/// All policies, with the tags that they state themselves.
///
/// # Panics
/// Where a policy cannot be built with its defaults: a test builds them all.
#[must_use]
pub fn entries() -> Vec<Description> {
    let context = Context::complete();
    fn of<T: ?Sized + 'static>(
        slot: Slot,
        list: &'static [&'static Entry<T>],
        context: &Context,
        tags: fn(&T) -> Tags,
    ) -> impl Iterator<Item = Description> {
        list.iter().map(move |entry| Description {
            slot,
            name: entry.name,
            summary: entry.summary,
            params: entry.params,
            tags: tags(&*build(slot, list, entry.name, context).expect("defaults are good")),
        })
    }
    let mut all = Vec::new();
    all.extend(of(Slot::Order, ORDERS, &context, |policy| policy.tags()));
    all.extend(of(Slot::Packer, PACKERS, &context, |policy| policy.tags()));
    all.extend(of(Slot::Placer, PLACERS, &context, |policy| policy.tags()));
    all.extend(of(Slot::Admission, ADMISSIONS, &context, |policy| {
        policy.tags()
    }));
    all.extend(of(Slot::Sizer, SIZERS, &context, |policy| policy.tags()));
    all.extend(of(
        Slot::RoundAllocator,
        ROUND_ALLOCATORS,
        &context,
        |policy| policy.tags(),
    ));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_policy_has_tags_of_both_axes_and_a_name_of_its_own() {
        let entries = entries();
        assert!(entries.len() > 20);
        for entry in &entries {
            assert!(!entry.tags.objectives.is_empty(), "{}", entry.name);
            assert!(!entry.tags.manners.is_empty(), "{}", entry.name);
            let same = entries
                .iter()
                .filter(|other| (other.slot, other.name) == (entry.slot, entry.name));
            assert_eq!(same.count(), 1, "{}", entry.name);
        }
    }

    #[test]
    fn mistakes_are_refused_with_the_choices() {
        let context = Context::default();
        let wrong = |text| order(text, &context).err().unwrap().to_string();
        assert!(wrong("lass").contains("2d-las"));
        assert!(wrong("lass").contains("did you mean `las`"));
        assert!(wrong("las:at=3").contains("no parameters"));
        assert!(wrong("2d-las:att=3").contains("at, promote"));
        assert!(wrong("2d-las:at=x").contains("at least 0"));
        assert!(wrong("2d-las:at=nan").contains("at least 0"));
        assert!(wrong("2d-las:at=1,at=2").contains("given twice"));
        assert!(wrong("worst-rho:filter=1.5").contains("from 0 to 1"));
        assert!(wrong("worst-rho:filter=0+1").contains("one number"));
        assert!(wrong("gittins").contains("past jobs"));
        assert!(packer("greedy", &context).is_err());
        assert!(order("2d-las:at=3250+7200,promote=8", &context).is_ok());
    }
}
