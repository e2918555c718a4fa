//! The policies, slot by slot: name, what it is, parameters, and how it is built.

use crate::cluster::admission::{Leases, Tenants};
use crate::cluster::order::{
    Carbyne, Drf, Edf, Fifo, Gittins, Hug, Las, Sjf, Srsf, Srtf, Tickets, TwoDLas, WorstRho,
};
use crate::cluster::packer::{Greedy, Opportunistic, ScoreTree, Trial, UtilSum};
use crate::cluster::placer::{Anywhere, Buddy, Consolidate, Emptiest, Synergy, WaitTime};
use crate::cluster::round_allocator::{Gavel, Goal, Trades};
use crate::cluster::sizer::{
    Afs, EdfElastic, Marginal, MaxMin, MinimumShare, Pollux, RigidSrtf, Sia,
};
use crate::cluster::{Admission, Order, Packer, Placer, RoundAllocator, Sizer};

use super::{Context, Parameter, Row, Unknown, Values};

pub(super) const INF: f64 = f64::INFINITY;
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

pub(super) const ORDERS: &[Row<dyn Order>] = &[
    (
        "fifo",
        "by arrival, nothing overtakes the first that does not fit",
        &[],
        |_, _| Ok(Box::new(Fifo { backfill: false })),
    ),
    (
        "fifo-backfill",
        "by arrival; a job that fits may overtake",
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
        "jobs at their fair time first; jobs with slack yield to the shortest",
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

pub(super) const PACKERS: &[Row<dyn Packer>] = &[
    (
        "trial",
        "try, measure, unpack what does not pay",
        &[
            (
                "margin",
                &[0.05],
                -1.0,
                1.0,
                "a pair must run at 1 + this of one job by itself",
            ),
            (
                "floor",
                &[0.0],
                0.0,
                1.0,
                "least speed of each, relative to running solo",
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
            "least sum of both speeds, relative to running solo",
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
        "an opportunistic job beside a guaranteed host",
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
                "what the host keeps of its solo speed",
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

pub(super) const PLACERS: &[Row<dyn Placer>] = &[
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
        "synergy",
        "where cores and memory divided by need do most work",
        &[],
        |_, _| Ok(Box::new(Synergy)),
    ),
    (
        "wait-time",
        "where the job is done first, by the waits that nodes publish",
        &[],
        |_, _| Ok(Box::new(WaitTime)),
    ),
];

const SLOT_S: Parameter = ("slot", &[240.0], 1.0, INF, "length of a slot in seconds");

pub(super) const ADMISSIONS: &[Row<dyn Admission>] = &[
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

pub(super) const SIZERS: &[Row<dyn Sizer>] = &[
    (
        "rigid-srtf",
        "as many as asked for, shortest remaining time first",
        &[],
        |_, _| Ok(Box::new(RigidSrtf)),
    ),
    (
        "max-min",
        "one GPU after the other to the job that has fewest",
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

fn gavel(goal: Goal, values: &Values, context: &Context) -> Box<dyn RoundAllocator> {
    let partners = values.one("partners") as usize;
    let pairs = context.pairs.clone().filter(|_| partners > 0);
    Box::new(Gavel::new(goal, pairs, partners))
}

pub(super) const ROUND_ALLOCATORS: &[Row<dyn RoundAllocator>] = &[
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
        "equal parts of two GPU types for each user, after trades",
        &[],
        |_, _| Ok(Box::<Trades>::default()),
    ),
];
