//! The gang scheduler: carries what `policy::gangs` deals to the device schedulers, and reports to
//! it what they see.
//!
//! A turn can still end between two ranks' launches: the rank ahead then spins until the gang's
//! next turn, which is charged to it as overrun.

use policy::gangs::{Deal, Gang, SINGLES, link};
use policy::{Class, QuantumBounds, TenantId, TenantView};

use super::{DeviceScheduler, Turn};

/// A device that a job has not wanted for so long is not one that it uses.
const IN_USE_NS: u64 = 10_000_000_000;

/// Deals the turns of all groups.
#[derive(Debug, Default)]
pub struct GangScheduler {
    groups: Vec<Group>,
    turns: u64,
}

/// Devices that are linked by gangs.
#[derive(Debug)]
struct Group {
    /// As bits.
    schedulers: u32,
    dealer: policy::gangs::Group,
    /// Turns that are under way; the first is the one that was dealt, the others fit beside it.
    turns: Vec<(u32, Turn)>,
}

impl GangScheduler {
    /// Whether there is no gang.
    pub fn is_idle(&self) -> bool {
        self.groups.is_empty()
    }

    /// Devices of all groups, as bits.
    pub fn schedulers(&self) -> u32 {
        self.groups
            .iter()
            .fold(0, |schedulers, group| schedulers | group.schedulers)
    }

    /// Finds the gangs: jobs that asked for it and use several devices that run in slices.
    pub fn form(&mut self, schedulers: &mut [DeviceScheduler]) {
        let mut gangs: Vec<Gang> = Vec::new();
        for (at, scheduler) in schedulers.iter().enumerate().take(32) {
            for tenant in scheduler.gang_candidates() {
                match gangs.iter_mut().find(|(id, _)| *id == tenant) {
                    Some((_, devices)) => *devices |= 1 << at,
                    None => gangs.push((tenant, 1 << at)),
                }
            }
        }
        gangs.retain(|(_, devices)| devices.count_ones() > 1);
        gangs.sort_unstable();
        for (at, scheduler) in schedulers.iter_mut().enumerate().take(32) {
            let here = |id: TenantId| {
                gangs
                    .iter()
                    .any(|(gang, devices)| *gang == id && devices & (1 << at) != 0)
            };
            scheduler.mark_gangs(here);
        }
        let mut old = std::mem::take(&mut self.groups);
        for (mask, gangs) in link(&gangs) {
            let same = old.iter().position(|group| group.schedulers == mask);
            let group = match same {
                Some(at) => {
                    let mut group = old.swap_remove(at);
                    group.dealer.set_gangs(gangs);
                    group
                }
                None => Group {
                    schedulers: mask,
                    dealer: policy::gangs::Group::new(gangs),
                    turns: Vec::new(),
                },
            };
            self.groups.push(group);
        }
        for group in old {
            for (mask, turn) in group.turns {
                end_turn(schedulers, mask, turn);
            }
        }
    }

    /// Deals turns, after the device schedulers were stepped. Returns the devices that have to be
    /// stepped again, as bits, and when to come back.
    pub fn step(&mut self, now_ns: u64, schedulers: &mut [DeviceScheduler]) -> (u32, Option<u64>) {
        let (mut touched, mut again_ns) = (0, None::<u64>);
        for group in &mut self.groups {
            let (changed, again) = group.step(now_ns, schedulers, &mut self.turns);
            touched |= changed;
            again_ns = match (again_ns, again) {
                (Some(a), Some(b)) => Some(a.min(b)),
                (a, b) => a.or(b),
            };
        }
        (touched, again_ns)
    }
}

fn of(schedulers: &[DeviceScheduler], mask: u32) -> impl Iterator<Item = &DeviceScheduler> {
    let chosen = move |at: &usize| mask & (1 << at) != 0;
    schedulers
        .iter()
        .enumerate()
        .filter(move |(at, _)| chosen(at))
        .map(|(_, scheduler)| scheduler)
}

fn end_turn(schedulers: &mut [DeviceScheduler], mask: u32, turn: Turn) {
    for (at, scheduler) in schedulers.iter_mut().enumerate() {
        if mask & (1 << at) != 0 {
            scheduler.end_turn(turn);
        }
    }
}

impl Group {
    fn step(
        &mut self,
        now_ns: u64,
        schedulers: &mut [DeviceScheduler],
        numbers: &mut u64,
    ) -> (u32, Option<u64>) {
        self.charge(schedulers);
        let gangs = self.dealer.gangs().iter();
        let mut views: Vec<TenantView> = gangs
            .map(|(id, devices)| {
                let wants = of(schedulers, *devices)
                    .any(|scheduler| scheduler.gang_competes(*id, now_ns))
                    && of(schedulers, *devices).all(|scheduler| scheduler.may_run(*id));
                let terms = of(schedulers, *devices)
                    .find_map(|scheduler| scheduler.gang_terms(*id, now_ns));
                let (class, weight_ppm) = terms.unwrap_or_default();
                TenantView::new(*id, class, weight_ppm, wants)
            })
            .collect();
        let singles = of(schedulers, self.schedulers)
            .map(|scheduler| scheduler.singles(now_ns))
            .reduce(|a, b| {
                let class = if a.0 == Class::Guaranteed || b.0 == Class::Guaranteed {
                    Class::Guaranteed
                } else {
                    Class::Opportunistic
                };
                (class, a.1.max(b.1))
            });
        let (class, weight_ppm) = singles.unwrap_or_default();
        views.push(TenantView::new(SINGLES, class, weight_ppm, weight_ppm > 0));
        let quantum = of(schedulers, self.schedulers)
            .map(DeviceScheduler::quantum)
            .reduce(|a, b| QuantumBounds {
                min_us: a.min_us.max(b.min_us),
                max_us: a.max_us.max(b.max_us),
            })
            .unwrap_or(QuantumBounds {
                min_us: 2000,
                max_us: 5000,
            });
        let (deal, again_ns) = self.dealer.decide(now_ns, &views, quantum);
        let touched = match deal {
            Deal::Stay => 0,
            Deal::End => self.end_turns(schedulers),
            Deal::Begin {
                gangs,
                quantum_us,
                contended,
            } => {
                *numbers += 1;
                self.end_turns(schedulers);
                for (tenant, devices) in gangs {
                    let turn = Turn {
                        tenant,
                        number: *numbers,
                        quantum_us,
                        contended,
                    };
                    self.begin_turn(devices, turn, schedulers);
                }
                self.schedulers
            }
        };
        (touched, again_ns)
    }

    /// The gates of a gang open with the next step.
    fn begin_turn(&mut self, devices: u32, turn: Turn, schedulers: &mut [DeviceScheduler]) {
        for (at, scheduler) in schedulers.iter_mut().enumerate() {
            if devices & (1 << at) != 0 {
                scheduler.begin_turn(turn);
            }
        }
        self.turns.push((devices, turn));
    }

    fn end_turns(&mut self, schedulers: &mut [DeviceScheduler]) -> u32 {
        for (mask, turn) in self.turns.drain(..) {
            end_turn(schedulers, mask, turn);
        }
        self.schedulers
    }

    /// Tells what everybody has used where it used most.
    fn charge(&mut self, schedulers: &[DeviceScheduler]) {
        let gangs = self.dealer.gangs().iter();
        let mut used_ns: Vec<(TenantId, u64)> = gangs
            .map(|(id, devices)| {
                let used = of(schedulers, *devices).filter_map(|scheduler| scheduler.usage(*id));
                (*id, used.map(|usage| usage.device_ns).max().unwrap_or(0))
            })
            .collect();
        let singles = of(schedulers, self.schedulers).map(DeviceScheduler::singles_device_ns);
        used_ns.push((SINGLES, singles.max().unwrap_or(0)));
        self.dealer.charge(used_ns);
    }
}

/// What the gang scheduler asks of a device scheduler, and tells it.
impl DeviceScheduler {
    /// Tenants that are gangs if they use another device as well. A process can be granted every
    /// device that its driver shows it; it uses one that it has wanted lately.
    fn gang_candidates(&self) -> impl Iterator<Item = TenantId> {
        let sliced = self.mode.has_slices();
        let now_ns = self.time.charged_ns();
        let candidates = self.roster.iter().filter(move |entity| {
            sliced
                && entity.terms().gang
                && !entity.clients().is_empty()
                && (entity.waits() || entity.usage().was_at_work(now_ns, IN_USE_NS))
        });
        candidates.map(|entity| entity.tenant)
    }

    /// Whether a tenant has its turns here together with those on other devices.
    pub fn is_gang(&self, tenant: TenantId) -> bool {
        self.roster.find(tenant).is_some_and(|entity| entity.gang)
    }

    fn mark_gangs(&mut self, is_gang: impl Fn(TenantId) -> bool) {
        for entity in self.roster.iter_mut() {
            entity.gang = is_gang(entity.tenant);
        }
    }

    fn gang_competes(&self, tenant: TenantId, now_ns: u64) -> bool {
        self.roster
            .find(tenant)
            .is_some_and(|entity| entity.wants(now_ns) || entity.is_busy())
    }

    fn may_run(&self, tenant: TenantId) -> bool {
        self.roster
            .find(tenant)
            .is_none_or(super::RunEntity::may_run)
    }

    fn gang_terms(&self, tenant: TenantId, now_ns: u64) -> Option<(Class, u32)> {
        let view = self.roster.find(tenant)?.view(now_ns);
        Some((view.class, view.weight_ppm))
    }

    /// Class and sum of the weights of those that want the device and are no gang; the weight is 0
    /// where there is none.
    fn singles(&self, now_ns: u64) -> (Class, u32) {
        let mut singles = (Class::Opportunistic, 0u32);
        for entity in self.roster.iter().filter(|entity| !entity.gang) {
            if !entity.competes(now_ns) {
                continue;
            }
            let view = entity.view(now_ns);
            if view.class == Class::Guaranteed && singles.0 == Class::Opportunistic {
                singles = (Class::Guaranteed, 0);
            }
            if view.class == singles.0 {
                singles.1 = singles.1.saturating_add(view.weight_ppm);
            }
        }
        singles
    }

    fn singles_device_ns(&self) -> u64 {
        let singles = self.roster.iter().filter(|entity| !entity.gang);
        singles.map(|entity| entity.usage().device_ns).sum()
    }

    fn begin_turn(&mut self, turn: Turn) {
        self.precedence.begin_turn(turn);
    }

    /// The gates of a gang close with the next step.
    fn end_turn(&mut self, turn: Turn) {
        self.precedence.end_turn(turn);
    }
}
