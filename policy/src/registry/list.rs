//! The list of slice policies, what each takes, and how it is built.

use std::collections::BTreeMap;

use super::{Kind, ParamSpec, PolicySpec, Settings};
use crate::altruistic::Altruistic;
use crate::deadline::Deadline;
use crate::fifo::Fifo;
use crate::guard::Guard;
use crate::partitions::{HOLD_BACK_BYTES, PartitionTable};
use crate::salus::{self, Salus};
use crate::stride::Passes;
use crate::turns::Order;

const SALUS_FAIR: &[ParamSpec] = &[
    ParamSpec {
        name: "measure",
        summary: "what is shared fairly: device time, or device time x bytes held",
        kind: Kind::Choice {
            words: &["device-time", "memory-time"],
            default: "device-time",
        },
    },
    AT_ONCE_ONE,
    PATIENCE,
    HOLD_BACK,
];

const SALUS_PACK: &[ParamSpec] = &[
    ParamSpec {
        name: "measure",
        summary: "what decides between tenants of one partition: device time, or device time x bytes held",
        kind: Kind::Choice {
            words: &["device-time", "memory-time"],
            default: "device-time",
        },
    },
    ParamSpec {
        name: "at_once",
        summary: "partitions that run at once",
        kind: Kind::Number {
            min: 1.0,
            max: 64.0,
            default: 64.0,
        },
    },
    PATIENCE,
    HOLD_BACK,
];

const SALUS_ONE: &[ParamSpec] = &[AT_ONCE_ONE, PATIENCE, HOLD_BACK];

const AT_ONCE_ONE: ParamSpec = ParamSpec {
    name: "at_once",
    summary: "partitions that run at once",
    kind: Kind::Number {
        min: 1.0,
        max: 64.0,
        default: 1.0,
    },
};

const PATIENCE: ParamSpec = ParamSpec {
    name: "patience_ms",
    summary: "how long after its slice a tenant may stay until its iteration ends",
    kind: Kind::Number {
        min: 0.0,
        max: 1000.0,
        default: 50.0,
    },
};

const HOLD_BACK: ParamSpec = ParamSpec {
    name: "hold_back_mib",
    summary: "device memory that no partition gets",
    kind: Kind::Number {
        min: 0.0,
        max: 1_048_576.0,
        default: (HOLD_BACK_BYTES >> 20) as f64,
    },
};

const ANTMAN: &[ParamSpec] = &[
    ParamSpec {
        name: "harm_percent",
        summary: "iterations of a guaranteed tenant this much longer than its baseline are harm",
        kind: Kind::Number {
            min: 0.1,
            max: 100.0,
            default: 2.0,
        },
    },
    ParamSpec {
        name: "breach_percent",
        summary: "one this much longer stops the opportunistic tenants at once",
        kind: Kind::Number {
            min: 1.0,
            max: 1000.0,
            default: 20.0,
        },
    },
    ParamSpec {
        name: "start_percent",
        summary: "part of the time that opportunistic tenants get at first",
        kind: Kind::Number {
            min: 0.0,
            max: 100.0,
            default: 100.0,
        },
    },
    ParamSpec {
        name: "learn_iterations",
        summary: "iterations without opportunistic tenants to learn a baseline that the program does not report",
        kind: Kind::Number {
            min: 1.0,
            max: 1000.0,
            default: 10.0,
        },
    },
    ParamSpec {
        name: "beside",
        summary: "opportunistic tenants run beside a guaranteed one too, where the device takes several at once",
        kind: Kind::Flag { default: false },
    },
];

const DEADLINE: &[ParamSpec] = &[
    ParamSpec {
        name: "margin_percent",
        summary: "how much more than needed a deadline gets",
        kind: Kind::Number {
            min: 0.0,
            max: 100.0,
            default: 5.0,
        },
    },
    ParamSpec {
        name: "first_queue_ms",
        summary: "attained service up to which a tenant without a deadline is in the first queue",
        kind: Kind::Number {
            min: 1.0,
            max: 86_400_000.0,
            default: 500.0,
        },
    },
    ParamSpec {
        name: "queue_factor",
        summary: "how many times longer each queue is than the one before",
        kind: Kind::Number {
            min: 2.0,
            max: 1000.0,
            default: 4.0,
        },
    },
    ParamSpec {
        name: "promote",
        summary: "who waited so many times as long as it ran starts in the first queue again; 0: never",
        kind: Kind::Number {
            min: 0.0,
            max: 1000.0,
            default: 8.0,
        },
    },
    ParamSpec {
        name: "deadlines_first",
        summary: "tenants with a deadline run as fast as they can, before all others",
        kind: Kind::Flag { default: false },
    },
];

/// Every policy there is. The first is what a device has when nothing is said.
pub static POLICIES: &[PolicySpec] = &[
    PolicySpec {
        name: "stride",
        summary: "device time in proportion to weights, exact to about a slice",
        params: &[],
        build: |_| Box::new(Passes::default()),
    },
    PolicySpec {
        name: "fifo",
        summary: "the first that came, the others in its pauses",
        params: &[],
        build: |_| Box::new(Fifo),
    },
    PolicySpec {
        name: "salus-fair",
        summary: "least device time (or memory x time) since the last arrival, switched between iterations",
        params: SALUS_FAIR,
        build: |settings| salus(settings, salus::Kind::Fair),
    },
    PolicySpec {
        name: "salus-pack",
        summary: "one of each memory partition at once",
        params: SALUS_PACK,
        build: |settings| salus(settings, salus::Kind::Pack),
    },
    PolicySpec {
        name: "salus-preempt",
        summary: "the newest first, from the end of the running iteration on",
        params: SALUS_ONE,
        build: |settings| salus(settings, salus::Kind::Preempt),
    },
    PolicySpec {
        name: "salus-srtf",
        summary: "the shortest remaining time first",
        params: SALUS_ONE,
        build: |settings| salus(settings, salus::Kind::Srtf),
    },
    PolicySpec {
        name: "antman",
        summary: "stride, and opportunistic tenants only as far as iterations of guaranteed ones do not suffer",
        params: ANTMAN,
        build: guard,
    },
    PolicySpec {
        name: "deadline",
        summary: "just enough for deadlines, the rest by least attained service",
        params: DEADLINE,
        build: deadline,
    },
    PolicySpec {
        name: "altruistic",
        summary: "no burst ends later than under fair sharing; leftover time goes to the shortest",
        params: &[],
        build: |_| Box::new(Altruistic::default()),
    },
];

fn salus(settings: &Settings<'_>, kind: salus::Kind) -> Box<dyn Order> {
    let weighs = matches!(kind, salus::Kind::Fair | salus::Kind::Pack);
    Box::new(Salus {
        kind,
        measure: if weighs && settings.is("measure", "memory-time") {
            salus::Measure::MemoryTime
        } else {
            salus::Measure::DeviceTime
        },
        at_once: settings.number("at_once") as usize,
        patience_ns: (settings.number("patience_ms") * 1e6) as u64,
        partitions: PartitionTable::new((settings.number("hold_back_mib") as u64) << 20),
        meters: BTreeMap::new(),
    })
}

fn guard(settings: &Settings<'_>) -> Box<dyn Order> {
    Box::new(Guard {
        passes: Passes::default(),
        part: settings.number("start_percent") / 100.0,
        harm: 1.0 + settings.number("harm_percent") / 100.0,
        breach: 1.0 + settings.number("breach_percent") / 100.0,
        present: 0.0,
        beside: settings.flag("beside"),
        learn_iterations: settings.number("learn_iterations") as u64,
        at_ns: None,
        tokens_ns: 0.0,
        spent: false,
        watched: BTreeMap::new(),
        classes: BTreeMap::new(),
    })
}

fn deadline(settings: &Settings<'_>) -> Box<dyn Order> {
    Box::new(Deadline {
        margin: 1.0 + settings.number("margin_percent") / 100.0,
        first_queue_ns: (settings.number("first_queue_ms") * 1e6) as u64,
        queue_factor: settings.number("queue_factor") as u64,
        promote: settings.number("promote"),
        strict: settings.flag("deadlines_first"),
        at_ns: None,
        members: BTreeMap::new(),
        booked: Vec::new(),
    })
}
