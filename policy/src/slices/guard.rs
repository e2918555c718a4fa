//! AntMan's guard: opportunistic tenants get as much time as does not slow down the protected
//! tenant.
//!
//! Source: W. Xiao et al., "AntMan: Dynamic Scaling on GPU Clusters for Deep Learning", OSDI 2020,
//! and the authors' artifact. The rule is additive increase, multiplicative decrease (D. Chiu, R.
//! Jain, "Analysis of the increase and decrease algorithms for congestion avoidance in computer
//! networks", 1989): it settles where the harm begins, whatever causes the harm.
//!
//! Guaranteed tenants share the device by stride. Opportunistic tenants may use a part p of the
//! time: of the gaps in which no guaranteed tenant wants the device or, with `beside`, of all time,
//! as an additional holder next to a guaranteed one. The feedback is not the device's utilisation
//! but the guaranteed tenant's own progress: the wall time of its iterations against that of the
//! same iterations without opportunistic tenants.
//!
//! ```text
//! three iterations above baseline x 1.02:            p <- p / 2        (below 1 %: 0)
//! ten iterations in a row not above it:              p <- p + 2 %
//! one iteration above baseline x 1.20:               p <- 0
//! ```
//!
//! The three need not follow each other; ten calm iterations in a row reset the count. (If they had
//! to follow each other, a tenant with long kernels that hits every second iteration would never be
//! cut back.)
//!
//! So p falls from 100 % to 12.5 % in nine iterations and comes back by 0.2 % per iteration: 90 ms
//! and 43 s at 10 ms each. At p = 40 % of the gaps, after a slice of 5 ms the opportunistic tenants
//! pause for 7.5 ms of gap.
//!
//! p is for tenants that are at work: when no guaranteed tenant has wanted the device for a second
//! the others have all of it, and p begins anew when there is none any more. Otherwise the last
//! harm that was done to a tenant, or an iteration that it never ended, would keep them out for
//! ever.
//!
//! *Baseline.* The iterations in which no opportunistic tenant ran, as a running mean (a quarter of
//! each new one), for the present set of guaranteed tenants. Before there are any, it is the solo
//! time in the view, if the tenant is the only guaranteed one. While there is neither,
//! opportunistic tenants stay out for `learn_iterations` so that the baseline can be learnt. A
//! tenant with unknown iterations is protected by its class alone: opportunistic tenants run in its
//! gaps only, with `beside` too.
//!
//! *Memory* is for [`crate::coordinator`]; what is said of it here are its terms.

use std::collections::BTreeMap;

use super::SliceRegistration;
use super::salus::{SURE_PPM, knows_iterations};
use super::stride::Passes;
use crate::registry::{Kind, ParamSpec, Registration, Settings};
use crate::slice::SlicePolicy;
use crate::slice::{Class, CoordinatorTerms, TenantId, TenantView, View};
use crate::turns::Turns;
use crate::turns::{Order, Rank};

/// How it is chosen.
pub(super) static ANTMAN: SliceRegistration = Registration {
    name: "antman",
    summary: "stride, and opportunistic tenants only as far as iterations of guaranteed ones do not suffer",
    params: PARAMS,
    build,
};

const PARAMS: &[ParamSpec] = &[
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
    ParamSpec {
        name: "memory",
        summary: "evictable opportunistic jobs shrink on the device while guaranteed ones need memory",
        kind: Kind::Flag { default: true },
    },
    ParamSpec {
        name: "memory_keep_percent",
        summary: "part of the device that is kept free for guaranteed jobs, as far as their limits reach",
        kind: Kind::Number {
            min: 0.0,
            max: 50.0,
            default: 5.0,
        },
    },
    ParamSpec {
        name: "memory_band_percent",
        summary: "between the free part at which jobs shrink and the one at which they may grow",
        kind: Kind::Number {
            min: 0.0,
            max: 50.0,
            default: 5.0,
        },
    },
    ParamSpec {
        name: "memory_calm_ms",
        summary: "how long there is enough before jobs grow",
        kind: Kind::Number {
            min: 100.0,
            max: 3_600_000.0,
            default: 2000.0,
        },
    },
];

fn build(settings: &Settings<'_>) -> Box<dyn SlicePolicy> {
    Box::new(Turns::new(Guard {
        passes: Passes::default(),
        part: settings.number("start_percent") / 100.0,
        harm: 1.0 + settings.number("harm_percent") / 100.0,
        breach: 1.0 + settings.number("breach_percent") / 100.0,
        present: 0.0,
        beside: settings.flag("beside"),
        start: settings.number("start_percent") / 100.0,
        memory: settings.flag("memory").then(|| {
            let ppm = |name| (settings.number(name) * 10_000.0) as u32;
            CoordinatorTerms {
                keep_ppm: ppm("memory_keep_percent"),
                band_ppm: ppm("memory_band_percent"),
                calm_ns: (settings.number("memory_calm_ms") * 1e6) as u64,
            }
        }),
        learn_iterations: settings.number("learn_iterations") as u64,
        at_ns: None,
        quiet_since_ns: None,
        tokens_ns: 0.0,
        spent: false,
        watched: BTreeMap::new(),
        classes: BTreeMap::new(),
    }))
}

/// Iterations above the baseline that count as harm.
const HARM_ITERATIONS: u32 = 3;
/// Iterations in a row without harm before there is more.
const CALM_ITERATIONS: u32 = 10;
/// How much more, as a part.
const STEP: f64 = 0.02;
/// Below this part it is none.
const LEAST: f64 = 0.01;
/// TIMEOUT: a guaranteed tenant that has not wanted the device for so long is doing something else.
/// What it was slowed down by is over, and there is nothing to learn from it.
const QUIET_NS: u64 = 1_000_000_000;
/// How much of the difference a new iteration teaches.
const LEARNT_BY: f64 = 0.25;

/// See the module's documentation.
#[derive(Debug)]
struct Guard {
    pub(crate) passes: Passes,
    /// The part of the time that opportunistic tenants get.
    pub(crate) part: f64,
    /// An iteration this much longer than the baseline is harm, as a factor.
    pub(crate) harm: f64,
    /// One this much longer ends it, as a factor.
    pub(crate) breach: f64,
    /// The same while a baseline is learnt: none then.
    pub(crate) present: f64,
    pub(crate) beside: bool,
    /// What `part` is at first, and once nobody is there to be protected.
    start: f64,
    /// How memory is divided; `None`: it is not.
    pub(crate) memory: Option<CoordinatorTerms>,
    pub(crate) learn_iterations: u64,
    pub(crate) at_ns: Option<u64>,
    /// Since when no guaranteed tenant has wanted the device.
    pub(crate) quiet_since_ns: Option<u64>,
    /// Device time that opportunistic tenants may use now, in nanoseconds.
    pub(crate) tokens_ns: f64,
    /// They have used their tokens up and wait until there are some again.
    pub(crate) spent: bool,
    pub(crate) watched: BTreeMap<TenantId, Watched>,
    pub(crate) classes: BTreeMap<TenantId, Class>,
}

/// A guaranteed tenant.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Watched {
    ended: u64,
    baseline_ns: Option<f64>,
    learnt: u64,
    harmed: u32,
    calm: u32,
    /// Opportunistic device time since its iteration began, in nanoseconds.
    together_ns: u64,
}

impl Guard {
    fn step(&mut self, tenant: &TenantView, solo: bool) {
        let iterations = tenant.iterations;
        let watched = self.watched.entry(tenant.id).or_default();
        if iterations.confidence_ppm < SURE_PPM || iterations.ended <= watched.ended {
            watched.ended = iterations.ended.min(watched.ended.max(1));
            return;
        }
        let first = watched.ended == 0;
        watched.ended = iterations.ended;
        let together_ns = std::mem::take(&mut watched.together_ns);
        if first || iterations.last_ns == 0 {
            return;
        }
        let took_ns = iterations.last_ns as f64;
        if together_ns == 0 {
            watched.baseline_ns = Some(match watched.baseline_ns {
                Some(baseline_ns) => baseline_ns + LEARNT_BY * (took_ns - baseline_ns),
                None => took_ns,
            });
            watched.learnt += 1;
        }
        let reported_ns = iterations.solo_ns.filter(|_| solo).map(|ns| ns as f64);
        let Some(baseline_ns) = watched.baseline_ns.or(reported_ns) else {
            return;
        };
        if together_ns > 0 && took_ns > baseline_ns * self.breach {
            (watched.harmed, watched.calm) = (0, 0);
            self.part = 0.0;
        } else if together_ns > 0 && took_ns > baseline_ns * self.harm {
            watched.calm = 0;
            watched.harmed += 1;
            if watched.harmed >= HARM_ITERATIONS {
                watched.harmed = 0;
                self.part /= 2.0;
                if self.part < LEAST {
                    self.part = 0.0;
                }
            }
        } else {
            watched.calm += 1;
            if watched.calm >= CALM_ITERATIONS {
                (watched.harmed, watched.calm) = (0, 0);
                self.part = (self.part + STEP).min(1.0);
            }
        }
    }

    /// Somebody's baseline is not known and can be learnt.
    fn learns(&self, view: &View<'_>, solo: bool) -> bool {
        (view.tenants.iter())
            .filter(|tenant| tenant.class == Class::Guaranteed && !tenant.paused)
            .filter(|tenant| tenant.iterations.confidence_ppm >= SURE_PPM)
            .filter(|tenant| !(solo && tenant.iterations.solo_ns.is_some()))
            .any(|tenant| {
                let learnt = self
                    .watched
                    .get(&tenant.id)
                    .map_or(0, |watched| watched.learnt);
                learnt < self.learn_iterations
            })
    }

    /// Everybody who is protected can be watched.
    fn sees(view: &View<'_>) -> bool {
        (view.tenants.iter())
            .filter(|tenant| tenant.class == Class::Guaranteed && tenant.is_ready())
            .all(knows_iterations)
    }

    /// The guaranteed tenants have not wanted the device for so long that nobody is protected by
    /// leaving it to them.
    fn is_quiet(&self, view: &View<'_>) -> bool {
        self.quiet_since_ns
            .is_some_and(|since_ns| view.now_ns >= since_ns.saturating_add(QUIET_NS))
    }

    fn half_slice_ns(view: &View<'_>) -> f64 {
        f64::from(view.quantum.max_us) * 500.0
    }
}

impl Order for Guard {
    fn name(&self) -> &'static str {
        "antman"
    }

    fn charge(&mut self, id: TenantId, device_ns: u64) {
        self.passes.charge(id, device_ns);
        if self.classes.get(&id) == Some(&Class::Opportunistic) {
            self.tokens_ns -= device_ns as f64;
            for watched in self.watched.values_mut() {
                watched.together_ns += device_ns;
            }
        }
    }

    fn follow(&mut self, view: &View<'_>) {
        self.passes.follow(view);
        let dt_ns = view
            .now_ns
            .saturating_sub(self.at_ns.unwrap_or(view.now_ns));
        self.at_ns = Some(view.now_ns);
        let guaranteed =
            || (view.tenants.iter()).filter(|tenant| tenant.class == Class::Guaranteed);
        let known = self.watched.len();
        self.watched
            .retain(|id, _| guaranteed().any(|tenant| tenant.id == *id));
        let changed = self.watched.len() != known
            || guaranteed().any(|tenant| !self.watched.contains_key(&tenant.id));
        if changed {
            // With other tenants beside it the same iterations take another time.
            for watched in self.watched.values_mut() {
                (watched.baseline_ns, watched.learnt) = (None, 0);
            }
        }
        let solo = guaranteed().count() <= 1;
        for tenant in view.tenants {
            self.classes.insert(tenant.id, tenant.class);
            if tenant.class == Class::Guaranteed {
                self.step(tenant, solo);
            }
        }
        self.classes.retain(|id, _| view.tenant(*id).is_some());
        let gap = !guaranteed().any(TenantView::is_ready);
        if guaranteed().next().is_none() {
            self.part = self.start.max(self.part);
        }
        self.quiet_since_ns = if gap {
            self.quiet_since_ns.or(Some(view.now_ns))
        } else {
            None
        };
        let part = if guaranteed().next().is_none() || self.is_quiet(view) {
            1.0
        } else if self.learns(view, solo) {
            0.0
        } else {
            self.part
        };
        self.present = part;
        if part <= 0.0 {
            self.tokens_ns = self.tokens_ns.min(0.0);
        } else if part >= 1.0 {
            self.tokens_ns = 2.0 * Self::half_slice_ns(view);
        } else if gap || self.beside {
            self.tokens_ns += dt_ns as f64 * part;
        }
        self.tokens_ns = self.tokens_ns.min(2.0 * Self::half_slice_ns(view));
        self.spent = if self.spent {
            self.tokens_ns < Self::half_slice_ns(view)
        } else {
            self.tokens_ns <= 0.0
        };
    }

    fn resume(&mut self) {
        self.passes.resume();
    }

    fn rank(&self, tenant: &TenantView, view: &View<'_>, ahead_ns: u64) -> Option<Rank> {
        if tenant.class == Class::Opportunistic {
            let crowded = !self.beside || !Self::sees(view);
            let gap = !(view.tenants.iter())
                .any(|tenant| tenant.class == Class::Guaranteed && tenant.is_ready());
            if self.spent || (crowded && !gap) {
                return None;
            }
        }
        self.passes.rank(tenant, view, ahead_ns)
    }

    fn runs_beside(&self) -> bool {
        self.beside
    }

    fn again_ns(&self, view: &View<'_>) -> Option<u64> {
        let mut wanting = (view.tenants.iter())
            .filter(|tenant| tenant.class == Class::Opportunistic && tenant.is_ready());
        wanting.next()?;
        if self.present <= 0.0 {
            return self.quiet_since_ns.map(|ns| ns.saturating_add(QUIET_NS));
        }
        let in_ns = if self.spent {
            (Self::half_slice_ns(view) - self.tokens_ns) / self.present
        } else if self.present >= 1.0 {
            return None;
        } else {
            self.tokens_ns
        };
        Some(view.now_ns.saturating_add(in_ns.max(0.0) as u64 + 1))
    }

    fn debt_ns(&self, id: TenantId) -> Option<i64> {
        self.passes.debt_ns(id)
    }

    fn coordinates(&self) -> Option<CoordinatorTerms> {
        self.memory
    }
}
