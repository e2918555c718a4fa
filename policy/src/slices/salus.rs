//! Salus: jobs in partitions of memory, switched between iterations.
//!
//! Source: P. Yu, M. Chowdhury, "Salus: Fine-Grained GPU Sharing Primitives for Deep Learning
//! Applications", MLSys 2020 (arXiv:1902.04610), and the authors' artifact. Published: mean
//! completion 3.19 times better by shortest remaining time than first come first served without
//! sharing.
//!
//! A tenant runs once its memory has a place in a partition ([`crate::PartitionTable`]: sum P + max
//! E <= size); tenants of one partition run one at a time. A tenant with unknown memory is not held
//! back. Four orders:
//!
//! * `salus-fair`: the smallest integral of device time over weight (or of bytes held while running
//!   x time, the authors' own) since the last arrival, which sets all integrals to zero; one tenant
//!   at once.
//! * `salus-pack`: the same, but one tenant of each partition at once.
//! * `salus-preempt`: the newest, which waits for the end of the present iteration, or not at all
//!   if iterations are not known; one tenant at once.
//! * `salus-srtf`: the shortest remaining device time over weight; if that is not known, as much
//!   again as it has had (so the least served first); one tenant at once.
//!
//! The device changes hands between two iterations, when the ephemeral memory is free: a holder
//! whose slice is over stays until its iteration ends, `patience_ms` at most and no longer than
//! five quarters of one, if its boundaries are seen as they happen. Where they are not (iterations
//! below a millisecond, a given number of launches) it has its slice and no more. Overrun is in
//! the integral. A tenant that comes back from a pause starts at the lowest integral of the running
//! tenants, less a slice: a pause earns nothing.
//!
//! Numbers: jobs of 11,266, 1,144 and 116 s (90th, 50th and 10th percentile of a cluster's jobs)
//! that come together, in this order: first come first served 11,266, 12,410, 12,526 s, mean 12,067
//! s; shortest remaining first 116, 1,260, 12,526 s, mean 4,634 s, 0.38 of it.

use std::collections::BTreeMap;

use super::SliceRegistration;
use crate::partitions::HOLD_BACK_BYTES;
use crate::partitions::PartitionTable;
use crate::registry::{Kind, ParamSpec, Registration, Settings};
use crate::slice::SlicePolicy;
use crate::slice::{TenantId, TenantView, View};
use crate::turns::Turns;
use crate::turns::{Order, PartitionId, Rank};

/// How it is chosen.
pub(super) static FAIR: SliceRegistration = Registration {
    name: "salus-fair",
    summary: "least device time (or memory x time) since the last arrival, switched between iterations",
    params: FAIR_PARAMS,
    build: |settings| build(settings, Variant::Fair),
};

/// How it is chosen.
pub(super) static PACK: SliceRegistration = Registration {
    name: "salus-pack",
    summary: "one of each memory partition at once",
    params: PACK_PARAMS,
    build: |settings| build(settings, Variant::Pack),
};

/// How it is chosen.
pub(super) static PREEMPT: SliceRegistration = Registration {
    name: "salus-preempt",
    summary: "the newest first, from the end of the running iteration on",
    params: ONE_PARAMS,
    build: |settings| build(settings, Variant::Preempt),
};

/// How it is chosen.
pub(super) static SRTF: SliceRegistration = Registration {
    name: "salus-srtf",
    summary: "the shortest remaining time first",
    params: ONE_PARAMS,
    build: |settings| build(settings, Variant::Srtf),
};

const FAIR_PARAMS: &[ParamSpec] = &[
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

const PACK_PARAMS: &[ParamSpec] = &[
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

const ONE_PARAMS: &[ParamSpec] = &[AT_ONCE_ONE, PATIENCE, HOLD_BACK];

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

fn build(settings: &Settings<'_>, variant: Variant) -> Box<dyn SlicePolicy> {
    let weighs = matches!(variant, Variant::Fair | Variant::Pack);
    Box::new(Turns::new(Salus {
        variant,
        measure: if weighs && settings.is("measure", "memory-time") {
            Measure::MemoryTime
        } else {
            Measure::DeviceTime
        },
        at_once: settings.number("at_once") as usize,
        patience_ns: (settings.number("patience_ms") * 1e6) as u64,
        partitions: PartitionTable::new((settings.number("hold_back_mib") as u64) << 20),
        meters: BTreeMap::new(),
    }))
}

/// Below this confidence a tenant's iterations count as unknown, in millionths.
pub(crate) const SURE_PPM: u32 = 500_000;

/// Which of the four.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Variant {
    Fair,
    Pack,
    Preempt,
    Srtf,
}

/// What an integral is over.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Measure {
    DeviceTime,
    MemoryTime,
}

/// See the module's documentation.
#[derive(Debug)]
struct Salus {
    variant: Variant,
    measure: Measure,
    /// How many partitions run at once.
    at_once: usize,
    patience_ns: u64,
    partitions: PartitionTable,
    meters: BTreeMap<TenantId, Meter>,
}

/// What a tenant has had.
#[derive(Clone, Copy, Debug, Default)]
struct Meter {
    /// Over its weight.
    integral: f64,
    weight: f64,
    bytes: f64,
    ready: bool,
}

impl Salus {
    fn cost(&self, meter: &Meter, device_ns: u64) -> f64 {
        let bytes = match self.measure {
            Measure::DeviceTime => 1.0,
            Measure::MemoryTime => meter.bytes,
        };
        device_ns as f64 * bytes / meter.weight
    }
}

pub(crate) fn knows_iterations(tenant: &TenantView) -> bool {
    tenant.iterations.device_ns.is_some() && tenant.iterations.confidence_ppm >= SURE_PPM
}

impl Order for Salus {
    fn name(&self) -> &'static str {
        match self.variant {
            Variant::Fair => "salus-fair",
            Variant::Pack => "salus-pack",
            Variant::Preempt => "salus-preempt",
            Variant::Srtf => "salus-srtf",
        }
    }

    fn charge(&mut self, id: TenantId, device_ns: u64) {
        let Some(meter) = self.meters.get(&id).copied() else {
            return;
        };
        let integral = meter.integral + self.cost(&meter, device_ns);
        self.meters.insert(id, Meter { integral, ..meter });
    }

    fn resume(&mut self) {
        for meter in self.meters.values_mut() {
            meter.integral = 0.0;
        }
    }

    fn follow(&mut self, view: &View<'_>) {
        self.partitions.set_device_bytes(view.device.memory_bytes);
        self.partitions.retain(|id| view.tenant(id).is_some());
        self.meters.retain(|id, _| view.tenant(*id).is_some());
        if (view.tenants.iter()).any(|tenant| !self.meters.contains_key(&tenant.id)) {
            for meter in self.meters.values_mut() {
                meter.integral = 0.0;
            }
        }
        let lowest = (self.meters.values())
            .filter(|meter| meter.ready)
            .map(|meter| meter.integral)
            .min_by(f64::total_cmp);
        for tenant in view.tenants {
            let before = self.meters.get(&tenant.id).copied();
            let mut meter = Meter {
                integral: before.map_or(0.0, |meter| meter.integral),
                weight: f64::from(tenant.weight_ppm.max(1)),
                bytes: tenant.memory.peak_bytes().max(1) as f64,
                ready: tenant.is_ready(),
            };
            if let (Some(before), Some(lowest)) = (before, lowest)
                && meter.ready
                && !before.ready
            {
                let slice = self.cost(&meter, u64::from(view.quantum.max_us) * 1000);
                meter.integral = meter.integral.max(lowest - slice);
            }
            self.meters.insert(tenant.id, meter);
        }
        // In the order in which they came, so that a small one does not pass a big one by for ever.
        let mut queue: Vec<&TenantView> = (view.tenants.iter())
            .filter(|tenant| tenant.memory.is_known())
            .collect();
        queue.sort_unstable_by_key(|tenant| {
            (
                self.partitions.partition(tenant.id).is_none(),
                tenant.arrived_ns,
                tenant.id,
            )
        });
        for tenant in queue {
            let waits = self.partitions.admit(tenant.id, tenant.memory).is_err();
            if waits {
                break;
            }
        }
    }

    fn rank(&self, tenant: &TenantView, _view: &View<'_>, ahead_ns: u64) -> Option<Rank> {
        if tenant.memory.is_known() && self.partitions.partition(tenant.id).is_none() {
            return None;
        }
        let meter = self.meters.get(&tenant.id)?;
        let arrived = i128::from(tenant.arrived_ns);
        Some(match self.variant {
            Variant::Fair | Variant::Pack => {
                let integral = meter.integral + self.cost(meter, ahead_ns);
                // In thousandths of a nanosecond over a weight of one: weights are up to a million.
                Rank::new(0, (integral * 1e9) as i128)
            }
            Variant::Preempt => Rank::new(0, -arrived),
            Variant::Srtf => {
                let left_ns = match tenant.remaining_ns {
                    Some(remaining_ns) => remaining_ns.saturating_sub(ahead_ns),
                    None => tenant.attained_ns.saturating_add(ahead_ns),
                };
                Rank {
                    tier: 0,
                    key: i128::from(left_ns) * 1_000_000 / i128::from(tenant.weight_ppm.max(1)),
                    tie: tenant.arrived_ns,
                }
            }
        })
    }

    fn goes_for(&self, holder: &TenantView, _better: &TenantView, _view: &View<'_>) -> bool {
        self.variant == Variant::Preempt
            && (holder.iterations.at_boundary || self.patience_ns(holder) == 0)
    }

    fn patience_ns(&self, holder: &TenantView) -> u64 {
        let iterations = holder.iterations;
        // What cannot be seen is not waited for, and nothing for longer than it takes.
        let seen = iterations.at_boundary || iterations.began_ns.is_some();
        if !knows_iterations(holder) || !seen {
            return 0;
        }
        let one_ns = iterations.solo_ns.max(iterations.device_ns).unwrap_or(0);
        self.patience_ns.min(one_ns.saturating_add(one_ns / 4))
    }

    fn places(&self, view: &View<'_>) -> usize {
        self.at_once.min(view.device.holders.max(1))
    }

    fn partition(&self, id: TenantId) -> Option<PartitionId> {
        self.partitions.partition(id)
    }
}

#[cfg(test)]
mod tests {
    use crate::slice::{
        Class, Device, Holder, Iterations, QuantumBounds, SlicePolicy, TenantId, TenantView, View,
    };

    const MS: u64 = 1_000_000;

    /// Two tenants that want the device all the time; the first one holds it since 0, for 5 ms.
    fn holds(policy: &mut dyn SlicePolicy, now_ns: u64, iterations: Iterations) -> bool {
        let mut tenants =
            [1, 2].map(|id| TenantView::new(TenantId(id), Class::Guaranteed, 500_000, true));
        tenants[0].iterations = iterations;
        let holder = Holder {
            id: TenantId(1),
            since_ns: 0,
            quantum_us: 5000,
        };
        let decision = policy.decide(&View {
            now_ns,
            tenants: &tenants,
            holders: &[holder],
            quantum: QuantumBounds {
                min_us: 2000,
                max_us: 5000,
            },
            device: Device::EXCLUSIVE,
        });
        !decision.revoke.contains(&TenantId(1))
    }

    #[test]
    fn a_holder_that_submits_ahead_goes_when_it_has_begun_another_iteration() {
        let iteration = |began_ms: Option<u64>, length_ms: u64| Iterations {
            device_ns: Some(length_ms * MS),
            began_ns: began_ms.map(|ms| ms * MS),
            confidence_ppm: 900_000,
            ..Iterations::default()
        };
        let fair = || {
            let mut policy = crate::slices::by_name("salus-fair", &[]).expect("known");
            // Both are there from the beginning, and the first has had more.
            holds(&mut *policy, 0, iteration(Some(0), 8));
            policy.charge(TenantId(1), MS);
            policy
        };
        assert!(
            holds(&mut *fair(), 4 * MS, iteration(Some(0), 8)),
            "its slice"
        );
        assert!(
            holds(&mut *fair(), 7 * MS, iteration(Some(0), 8)),
            "not over"
        );
        assert!(
            !holds(&mut *fair(), 7 * MS, iteration(Some(6), 8)),
            "another"
        );
        assert!(
            !holds(&mut *fair(), 16 * MS, iteration(Some(0), 8)),
            "long over"
        );
        assert!(
            !holds(&mut *fair(), 60 * MS, iteration(Some(0), 80)),
            "patience"
        );
        assert!(!holds(&mut *fair(), 6 * MS, iteration(None, 8)), "not seen");
    }
}
