//! Every policy by name, with its parameters.
//!
//! A policy is written `name` or `name:key=value,key=value`; several numbers for one key are joined by `+`
//! (`2d-las:at=3250+7200,promote=8`).

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use super::admission::{Leases, Tenants};
use super::divider::{Gavel, Goal, Trades};
use super::order::{
    Carbyne, Drf, Edf, Fifo, Gittins, Hug, Las, Sjf, Srsf, Srtf, Tickets, TwoDLas, WorstRho,
};
use super::packer::{Greedy, Opportunistic, ScoreTree, Trial, UtilSum};
use super::placer::{Anywhere, Buddy, Consolidate, Emptiest, WaitTime};
use super::sizer::{Afs, EdfElastic, Marginal, MaxMin, MinimumShare, Pollux, RigidSrtf, Sia};
use super::{Admission, Divider, Order, Packer, PairTable, Placer, Sizer, Tags};

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
    Divider,
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
            Self::Divider => "divider",
        }
    }
}

/// Why there is no such policy.
#[derive(Clone, PartialEq, Debug)]
pub enum Unknown {
    /// No policy of this slot has this name.
    Name {
        /// Which slot.
        slot: Slot,
        /// The name.
        name: String,
        /// Those there are.
        known: Vec<&'static str>,
    },
    /// The policy has no such parameter.
    Key {
        /// The policy.
        name: &'static str,
        /// The parameter.
        key: String,
        /// Those it has.
        known: Vec<&'static str>,
    },
    /// A value is no number, or out of bounds.
    Value {
        /// The parameter.
        key: String,
        /// Its value.
        value: String,
        /// What is expected.
        expected: String,
    },
    /// The policy needs what is not there.
    Needs {
        /// The policy.
        name: &'static str,
        /// What is missing.
        what: &'static str,
    },
}

impl fmt::Display for Unknown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name { slot, name, known } => {
                let (slot, known) = (slot.word(), known.join(", "));
                write!(f, "there is no {slot} `{name}`; known are {known}")
            }
            Self::Key { name, key, known } if known.is_empty() => {
                write!(f, "`{name}` has no parameters, so `{key}` is none of them")
            }
            Self::Key { name, key, known } => {
                let known = known.join(", ");
                write!(f, "`{name}` has no parameter `{key}`; it has {known}")
            }
            Self::Value {
                key,
                value,
                expected,
            } => write!(f, "`{key}={value}`: {expected}"),
            Self::Needs { name, what } => write!(f, "`{name}` needs {what}"),
        }
    }
}

impl std::error::Error for Unknown {}

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

const INF: f64 = f64::INFINITY;
const PROMOTE: Parameter = (
    "promote",
    &[0.0],
    0.0,
    INF,
    "back to the first queue after waiting this many times as long as it ran; 0: never",
);
const AT: Parameter = (
    "at",
    &[TwoDLas::DEFAULT_THRESHOLD_GPU_S],
    0.0,
    INF,
    "queue thresholds in GPU-seconds",
);

const ORDERS: &[Row<dyn Order>] = &[
    (
        "fifo",
        "by arrival, nobody goes past the first that does not fit",
        &[],
        |_, _| Ok(Box::new(Fifo { backfill: false })),
    ),
    (
        "fifo-backfill",
        "by arrival, whoever fits goes past",
        &[],
        |_, _| Ok(Box::new(Fifo { backfill: true })),
    ),
    (
        "sjf",
        "shortest duration first, nobody is stopped",
        &[],
        |_, _| Ok(Box::new(Sjf)),
    ),
    ("srtf", "shortest remaining time first", &[], |_, _| {
        Ok(Box::new(Srtf))
    }),
    ("srsf", "least remaining time x GPUs first", &[], |_, _| {
        Ok(Box::new(Srsf))
    }),
    ("las", "least attained GPU time first", &[], |_, _| {
        Ok(Box::new(Las))
    }),
    (
        "2d-las",
        "queues of attained GPU time, by arrival inside",
        &[AT, PROMOTE],
        |values, _| {
            let promote = values.some("promote");
            Ok(Box::new(TwoDLas::new(values.list("at"), promote)))
        },
    ),
    (
        "gittins",
        "queues of attained GPU time, by Gittins index inside",
        &[AT, PROMOTE],
        |values, context| {
            if context.past_gpu_s.is_empty() {
                return Err(Unknown::Needs {
                    name: "gittins",
                    what: "the GPU times of past jobs (--past FILE)",
                });
            }
            let queues = TwoDLas::new(values.list("at"), values.some("promote"));
            Ok(Box::new(Gittins::new(context.past_gpu_s.clone(), queues)))
        },
    ),
    (
        "worst-rho",
        "worst finish-time fairness first",
        &[(
            "filter",
            &[0.0],
            0.0,
            1.0,
            "part of the jobs that stands behind the others, by remaining time",
        )],
        |values, _| Ok(Box::new(WorstRho::new(values.one("filter")))),
    ),
    ("edf", "earliest deadline first", &[], |_, _| {
        Ok(Box::new(Edf))
    }),
    (
        "drf",
        "user with the smallest dominant share first",
        &[],
        |_, _| Ok(Box::<Drf>::default()),
    ),
    (
        "hug",
        "user with the smallest part of its guarantee and leftovers first",
        &[],
        |_, _| Ok(Box::<Hug>::default()),
    ),
    (
        "carbyne",
        "who is at its fair time first; who has time gives way to the shortest",
        &[],
        |_, _| Ok(Box::<Carbyne>::default()),
    ),
    (
        "tickets",
        "users by stride over GPU time, one ticket each",
        &[],
        |_, _| Ok(Box::<Tickets>::default()),
    ),
];

const PACKERS: &[Row<dyn Packer>] = &[
    (
        "trial",
        "try, measure, unpack what does not pay",
        &[
            (
                "margin",
                &[0.05],
                -1.0,
                1.0,
                "a pair must run at 1 + this of one job alone",
            ),
            (
                "floor",
                &[0.0],
                0.0,
                1.0,
                "least speed of each, relative to alone",
            ),
        ],
        |values, _| {
            Ok(Box::new(Trial::new(
                values.one("margin"),
                values.one("floor"),
            )))
        },
    ),
    (
        "greedy",
        "best sum by the table of measured pairs",
        &[(
            "least",
            &[1.0],
            0.0,
            2.0,
            "least sum of both speeds, relative to alone",
        )],
        |values, context| {
            let pairs = context.pairs.clone().ok_or(Unknown::Needs {
                name: "greedy",
                what: "a table of measured pairs, which this trace does not come with",
            })?;
            Ok(Box::new(Greedy::new(pairs, values.one("least"))))
        },
    ),
    (
        "util-sum",
        "both busy fractions add up to little enough",
        &[(
            "limit",
            &[1.0],
            0.0,
            2.0,
            "greatest sum of the busy fractions",
        )],
        |values, context| {
            Ok(Box::new(UtilSum {
                limit: values.one("limit"),
                gpu_bytes: context.gpu_bytes,
            }))
        },
    ),
    (
        "score-tree",
        "sharing scores from a tree learnt from pairs",
        &[],
        |_, context| Ok(Box::new(ScoreTree::new(context.gpu_bytes))),
    ),
    (
        "opportunistic",
        "an opportunistic guest beside a guaranteed host",
        &[
            (
                "busy",
                &[0.7],
                0.0,
                1.0,
                "a host must be less busy than this",
            ),
            (
                "floor",
                &[0.98],
                0.0,
                1.0,
                "what the host keeps of its speed alone",
            ),
        ],
        |values, context| {
            Ok(Box::new(Opportunistic {
                host_busy: values.one("busy"),
                host_floor: values.one("floor"),
                gpu_bytes: context.gpu_bytes,
            }))
        },
    ),
];

const PLACERS: &[Row<dyn Placer>] = &[
    ("anywhere", "the first free GPUs", &[], |_, _| {
        Ok(Box::new(Anywhere))
    }),
    (
        "consolidate",
        "on as few nodes as can be, or not at all",
        &[],
        |_, _| Ok(Box::new(Consolidate { relaxed: false })),
    ),
    (
        "consolidate-relaxed",
        "on as few nodes as are free",
        &[],
        |_, _| Ok(Box::new(Consolidate { relaxed: true })),
    ),
    ("emptiest", "on the emptiest nodes", &[], |_, _| {
        Ok(Box::new(Emptiest))
    }),
    ("buddy", "aligned blocks of a power of two", &[], |_, _| {
        Ok(Box::new(Buddy))
    }),
    (
        "wait-time",
        "where the job is done first, by the waits that nodes publish",
        &[],
        |_, _| Ok(Box::new(WaitTime)),
    ),
];

const SLOT_S: Parameter = ("slot", &[240.0], 1.0, INF, "length of a slot in seconds");

const ADMISSIONS: &[Row<dyn Admission>] = &[
    (
        "leases",
        "deadlines by leases booked backwards",
        &[
            ("lease", &[600.0], 1.0, INF, "length of a lease in seconds"),
            (
                "anew",
                &[0.0],
                0.0,
                1.0,
                "1: promises are made again at every lease; 0: they are kept",
            ),
        ],
        |values, _| {
            let anew = values.one("anew") > 0.0;
            Ok(Box::new(Leases::new(values.one("lease"), anew)))
        },
    ),
    (
        "cells",
        "users own equal virtual clusters; the others' free GPUs are lent",
        &[(
            "tenants",
            &[4.0],
            1.0,
            4096.0,
            "number of virtual clusters, one each for the first users",
        )],
        |values, _| Ok(Box::new(Tenants::new(values.one("tenants") as usize))),
    ),
    (
        "minimum-share",
        "only whose deadline can be kept",
        &[SLOT_S],
        |values, _| Ok(Box::new(MinimumShare::new(values.one("slot")))),
    ),
];

const SIZERS: &[Row<dyn Sizer>] = &[
    (
        "rigid-srtf",
        "as many as asked for, shortest remaining time first",
        &[],
        |_, _| Ok(Box::new(RigidSrtf)),
    ),
    (
        "max-min",
        "one GPU after the other to whoever has fewest",
        &[],
        |_, _| Ok(Box::new(MaxMin)),
    ),
    (
        "optimus",
        "each GPU to where it saves most time",
        &[(
            "single",
            &[0.0],
            0.0,
            1.0,
            "1: looks one GPU ahead only; 0: to the next number that is faster",
        )],
        |values, _| {
            let single = values.one("single") > 0.0;
            Ok(Box::new(Marginal { single }))
        },
    ),
    (
        "pollux",
        "the best mean goodput against a fair share, exactly",
        &[(
            "delay",
            &[Pollux::DELAY_S],
            0.0,
            INF,
            "what a restart is taken to cost, in seconds",
        )],
        |values, _| Ok(Box::new(Pollux::new(values.one("delay")))),
    ),
    (
        "afs",
        "each GPU to the short, unless the long gains more",
        &[],
        |_, _| Ok(Box::new(Afs)),
    ),
    (
        "sia",
        "the least sum of weighted powers of goodputs over GPU types",
        &[(
            "restart",
            &[Sia::RESTART_S],
            0.0,
            INF,
            "what a restart is taken to cost, in seconds",
        )],
        |values, _| Ok(Box::new(Sia::new(values.one("restart")))),
    ),
    (
        "edf-elastic",
        "earliest deadline first, all it can use",
        &[],
        |_, _| Ok(Box::new(EdfElastic)),
    ),
    (
        "minimum-share",
        "just enough for every deadline, the rest where it gains most",
        &[SLOT_S],
        |values, _| Ok(Box::new(MinimumShare::new(values.one("slot")))),
    ),
];

const PARTNERS: Parameter = (
    "partners",
    &[3.0],
    0.0,
    64.0,
    "with how many other types a type of job may share GPUs; 0: no sharing",
);

fn gavel(goal: Goal, values: &Values, context: &Context) -> Box<dyn Divider> {
    let partners = values.one("partners") as usize;
    let pairs = context.pairs.clone().filter(|_| partners > 0);
    Box::new(Gavel::new(goal, pairs, partners))
}

const DIVIDERS: &[Row<dyn Divider>] = &[
    (
        "gavel-max-min",
        "the least share of an even division as large as can be",
        &[PARTNERS],
        |values, context| Ok(gavel(Goal::MaxMin, values, context)),
    ),
    (
        "gavel-finish-time",
        "the worst finish-time fairness as low as can be",
        &[PARTNERS],
        |values, context| Ok(gavel(Goal::FinishTime, values, context)),
    ),
    (
        "gavel-makespan",
        "everything done as early as can be",
        &[PARTNERS],
        |values, context| Ok(gavel(Goal::Makespan, values, context)),
    ),
    (
        "trades",
        "users' equal parts of two GPU types, after they have traded",
        &[],
        |_, _| Ok(Box::<Trades>::default()),
    ),
];

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

/// Whether this names a divider rather than an order.
#[must_use]
pub fn is_divider(text: &str) -> bool {
    let name = text.split(':').next();
    DIVIDERS.iter().any(|row| Some(row.0) == name)
}

/// A divider by name.
///
/// # Errors
/// [`Unknown`].
pub fn divider(text: &str, context: &Context) -> Result<Box<dyn Divider>, Unknown> {
    build(Slot::Divider, DIVIDERS, text, context)
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
    all.extend(rows(Slot::Divider, DIVIDERS, &context, |policy| {
        policy.tags()
    }));
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
    fn mistakes_are_told_with_what_there_is() {
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
