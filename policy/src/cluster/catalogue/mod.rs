//! Every policy by name, with its parameters.
//!
//! A policy is written `name` or `name:key=value,key=value`; several numbers for one key are joined
//! by `+` (`2d-las:at=3250+7200,promote=8`).

use std::collections::BTreeMap;
use std::sync::Arc;

use super::{Admission, Order, Packer, PairTable, Placer, RoundAllocator, Sizer, Tags};

mod rows;
mod unknown;

use rows::{ADMISSIONS, INF, ORDERS, PACKERS, PLACERS, ROUND_ALLOCATORS, SIZERS};
pub use unknown::Unknown;

/// What some policies are built from beside their parameters.
#[derive(Clone, Debug, Default)]
pub struct Context {
    /// Measured pairs.
    pub pairs: Option<Arc<PairTable>>,
    /// GPU-seconds of past jobs.
    pub past_gpu_s: Vec<f64>,
    /// Memory of a device, in bytes.
    pub gpu_bytes: u64,
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

/// A parameter: its name, its default, its least and greatest value, what it is.
type Parameter = (&'static str, &'static [f64], f64, f64, &'static str);

/// One policy.
#[derive(Clone, Debug)]
pub struct Entry {
    /// What it answers.
    pub slot: Slot,
    /// Its name.
    pub name: &'static str,
    /// What it is, in a few words.
    pub about: &'static str,
    /// Its parameters.
    pub parameters: &'static [Parameter],
    /// What it is for.
    pub tags: Tags,
}

/// Values of the parameters of one policy.
struct Values(BTreeMap<&'static str, Vec<f64>>);

impl Values {
    fn one(&self, key: &str) -> f64 {
        self.0
            .get(key)
            .and_then(|list| list.first())
            .copied()
            .unwrap_or(0.0)
    }

    fn list(&self, key: &str) -> Vec<f64> {
        self.0.get(key).cloned().unwrap_or_default()
    }

    /// 0 stands for "off".
    fn some(&self, key: &str) -> Option<f64> {
        Some(self.one(key)).filter(|value| *value > 0.0)
    }
}

type Build<T> = fn(&Values, &Context) -> Result<Box<T>, Unknown>;
type Row<T> = (&'static str, &'static str, &'static [Parameter], Build<T>);

fn build<T: ?Sized>(
    slot: Slot,
    rows: &[Row<T>],
    text: &str,
    context: &Context,
) -> Result<Box<T>, Unknown> {
    let (name, settings) = text.split_once(':').unwrap_or((text, ""));
    let Some((name, _, parameters, make)) = rows.iter().find(|row| row.0 == name) else {
        return Err(Unknown::Name {
            slot,
            name: name.to_owned(),
            known: rows.iter().map(|row| row.0).collect(),
        });
    };
    let mut values: BTreeMap<&'static str, Vec<f64>> = parameters
        .iter()
        .map(|(key, default, ..)| (*key, default.to_vec()))
        .collect();
    for setting in settings.split(',').filter(|setting| !setting.is_empty()) {
        let (key, value) = setting.split_once('=').unwrap_or((setting, ""));
        let Some((key, default, least, most, _)) = parameters.iter().find(|row| row.0 == key)
        else {
            return Err(Unknown::Key {
                name,
                key: key.to_owned(),
                known: parameters.iter().map(|row| row.0).collect(),
            });
        };
        let wrong = |expected: String| Unknown::Value {
            key: (*key).to_owned(),
            value: value.to_owned(),
            expected,
        };
        let mut list = Vec::new();
        for number in value.split('+') {
            match number.parse::<f64>() {
                Ok(number) if (*least..=*most).contains(&number) && number.is_finite() => {
                    list.push(number);
                }
                _ if *most == INF => {
                    return Err(wrong(format!("a number of at least {least} is expected")));
                }
                _ => {
                    return Err(wrong(format!(
                        "a number from {least} to {most} is expected"
                    )));
                }
            }
        }
        if list.len() > 1 && *key != "at" {
            return Err(wrong(format!(
                "one number is expected, such as {}",
                default[0]
            )));
        }
        values.insert(key, list);
    }
    make(&Values(values), context)
}

/// An order by name.
///
/// # Errors
/// [`Unknown`].
pub fn order(text: &str, context: &Context) -> Result<Box<dyn Order>, Unknown> {
    build(Slot::Order, ORDERS, text, context)
}

/// A packer by name.
///
/// # Errors
/// [`Unknown`].
pub fn packer(text: &str, context: &Context) -> Result<Box<dyn Packer>, Unknown> {
    build(Slot::Packer, PACKERS, text, context)
}

/// A placer by name.
///
/// # Errors
/// [`Unknown`].
pub fn placer(text: &str, context: &Context) -> Result<Box<dyn Placer>, Unknown> {
    build(Slot::Placer, PLACERS, text, context)
}

/// An admission by name.
///
/// # Errors
/// [`Unknown`].
pub fn admission(text: &str, context: &Context) -> Result<Box<dyn Admission>, Unknown> {
    build(Slot::Admission, ADMISSIONS, text, context)
}

/// A sizer by name.
///
/// # Errors
/// [`Unknown`].
pub fn sizer(text: &str, context: &Context) -> Result<Box<dyn Sizer>, Unknown> {
    build(Slot::Sizer, SIZERS, text, context)
}

/// Whether this names a round allocator rather than an order.
#[must_use]
pub fn is_round_allocator(text: &str) -> bool {
    let name = text.split(':').next();
    ROUND_ALLOCATORS.iter().any(|row| Some(row.0) == name)
}

/// A round allocator by name.
///
/// # Errors
/// [`Unknown`].
pub fn round_allocator(text: &str, context: &Context) -> Result<Box<dyn RoundAllocator>, Unknown> {
    build(Slot::RoundAllocator, ROUND_ALLOCATORS, text, context)
}

/// All policies, with the tags that they state themselves.
///
/// # Panics
/// Where a policy cannot be built with its defaults: a test builds them all.
#[must_use]
pub fn entries() -> Vec<Entry> {
    let context = Context {
        pairs: Some(Arc::default()),
        past_gpu_s: vec![1.0],
        gpu_bytes: 16 << 30,
    };
    fn rows<T: ?Sized>(
        slot: Slot,
        rows: &'static [Row<T>],
        context: &Context,
        tags: fn(&T) -> Tags,
    ) -> impl Iterator<Item = Entry> {
        rows.iter().map(move |(name, about, parameters, _)| Entry {
            slot,
            name,
            about,
            parameters,
            tags: tags(&*build(slot, rows, name, context).expect("defaults are good")),
        })
    }
    let mut all = Vec::new();
    all.extend(rows(Slot::Order, ORDERS, &context, |policy| policy.tags()));
    all.extend(rows(Slot::Packer, PACKERS, &context, |policy| {
        policy.tags()
    }));
    all.extend(rows(Slot::Placer, PLACERS, &context, |policy| {
        policy.tags()
    }));
    all.extend(rows(Slot::Admission, ADMISSIONS, &context, |policy| {
        policy.tags()
    }));
    all.extend(rows(Slot::Sizer, SIZERS, &context, |policy| policy.tags()));
    all.extend(rows(
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
        assert!(wrong("las:at=3").contains("no parameters"));
        assert!(wrong("2d-las:att=3").contains("at, promote"));
        assert!(wrong("2d-las:at=x").contains("at least 0"));
        assert!(wrong("2d-las:at=nan").contains("at least 0"));
        assert!(wrong("worst-rho:filter=1.5").contains("from 0 to 1"));
        assert!(wrong("worst-rho:filter=0+1").contains("one number"));
        assert!(wrong("gittins").contains("past jobs"));
        assert!(packer("greedy", &context).is_err());
        assert!(order("2d-las:at=3250+7200,promote=8", &context).is_ok());
    }
}
