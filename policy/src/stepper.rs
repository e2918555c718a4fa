//! Virtual time: drives a [`SlicePolicy`] with simulated tenants and counts what each of them got.
//!
//! The device runs one kernel of each tenant with work on it, all at the same speed: two at once
//! run at half speed each. A tenant that loses the device finishes the kernel it has begun; that
//! kernel overlaps with the next tenant, and both are charged for their half. This is what the
//! daemon measures on hardware, and why it charges the way it does.
//!
//! One round through a tenant's phases is one *iteration*; between two of them it stands at a
//! boundary. Beside what each tenant got, the stepper counts what it was *due*: its weight's part
//! of the passing time among the tenants of its class that want the device (the fluid ideal). Every
//! fairness figure is measured against it.

use std::collections::BTreeMap;

use crate::quantile::Quantile;
use crate::slice::{
    Class, Decision, Device, Holder, Iterations, Memory, QuantumBounds, SlicePolicy, TenantId,
    TenantView, View,
};

/// A part of a simulated tenant's life.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    /// Submits kernels of `kernel_us` each until `device_us` of work is done.
    Busy {
        /// Work in all, in microseconds of the whole device.
        device_us: u64,
        /// One kernel, in microseconds of the whole device; a kernel cannot be interrupted.
        kernel_us: u64,
    },
    /// Wants nothing for this long, in microseconds.
    Sleep {
        /// Microseconds.
        us: u64,
    },
}

/// A simulated tenant. Its phases repeat; without phases it wants nothing. Build it
/// with [`SimTenant::new`].
#[derive(Clone, Debug, Default)]
pub struct SimTenant {
    /// Its number.
    pub id: TenantId,
    /// Its class.
    pub class: Class,
    /// Its weight in millionths.
    pub weight_ppm: u32,
    /// What it does, again and again.
    pub phases: Vec<Phase>,
    /// After so many rounds it is done and goes; `None`: never.
    pub rounds: Option<u64>,
    /// See [`TenantView::min_share_ppm`].
    pub min_share_ppm: u32,
    /// See [`TenantView::max_share_ppm`].
    pub max_share_ppm: Option<u32>,
    /// See [`TenantView::paused`].
    pub paused: bool,
    /// Its memory.
    pub memory: Memory,
    /// By when it should be done, in microseconds after it came.
    pub deadline_us: Option<u64>,
    /// Each of its busy phases is to be done so soon, in microseconds.
    pub latency_target_us: Option<u64>,
    /// The policy knows how much work it has left (where `rounds` is known).
    pub tells_size: bool,
    /// The policy knows its iterations.
    pub tells_iterations: bool,
}

impl SimTenant {
    /// A guaranteed tenant of which the policy knows no more than these arguments.
    pub fn new(id: u64, weight_ppm: u32, phases: Vec<Phase>) -> Self {
        Self {
            id: TenantId(id),
            weight_ppm,
            phases,
            ..Self::default()
        }
    }

    /// Device time of one round, in nanoseconds.
    pub fn round_device_ns(&self) -> u64 {
        self.phases
            .iter()
            .map(|phase| match phase {
                Phase::Busy { device_us, .. } => device_us * 1000,
                Phase::Sleep { .. } => 0,
            })
            .sum()
    }

    /// Wall time of one round with the device to itself, in nanoseconds.
    pub fn round_solo_ns(&self) -> u64 {
        self.phases
            .iter()
            .map(|phase| match phase {
                Phase::Busy { device_us, .. } => device_us * 1000,
                Phase::Sleep { us } => us * 1000,
            })
            .sum()
    }
}

/// What a tenant got so far.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Got {
    /// Device time charged, in nanoseconds.
    pub device_ns: u64,
    /// Device time it was due by its weight, in nanoseconds.
    pub due_ns: f64,
    /// Time spent wanting and not holding, in nanoseconds.
    pub wait_ns: u64,
    /// Longest single wait, in nanoseconds.
    pub longest_wait_ns: u64,
    /// Slices granted to it; a slice begun anew does not count.
    pub grants: u64,
    /// Slices granted to it or begun anew.
    pub slices: u64,
    /// Device time charged while it did not hold the device, in nanoseconds.
    pub overrun_ns: u64,
    /// Rounds ended.
    pub rounds: u64,
    /// When it was done, in nanoseconds.
    pub finished_ns: Option<u64>,
}

#[derive(Debug)]
struct Life {
    tenant: SimTenant,
    joined_ns: u64,
    phase: usize,
    /// Of the phase, in nanoseconds.
    left_ns: u64,
    /// Of what it has on the device, in nanoseconds of the whole device; 0: nothing.
    kernel_left_ns: u64,
    round_began_ns: u64,
    round_done_ns: u64,
    last_round_ns: u64,
    waiting_since_ns: Option<u64>,
    /// Since when the kernel that it had begun when it lost the device runs on.
    drains_since_ns: Option<u64>,
    drains: Quantile,
    got: Got,
}

/// The simulation.
#[derive(Debug)]
pub struct Stepper<P> {
    policy: P,
    quantum: QuantumBounds,
    device: Device,
    now_ns: u64,
    idle_ns: u64,
    slices: u64,
    most_holders: usize,
    lives: Vec<Life>,
    /// Those that are done.
    done: BTreeMap<TenantId, Got>,
    holders: Vec<Holder>,
    again_ns: Option<u64>,
    next: Option<TenantId>,
    /// Scratch of `decide`.
    view: Vec<TenantView>,
}

impl<P: SlicePolicy> Stepper<P> {
    /// A device without tenants at time 0, with one holder at a time.
    pub fn new(policy: P, quantum: QuantumBounds) -> Self {
        Self::with_device(policy, quantum, Device::EXCLUSIVE)
    }

    /// A device without tenants at time 0.
    pub fn with_device(policy: P, quantum: QuantumBounds, device: Device) -> Self {
        Self {
            policy,
            quantum,
            device,
            now_ns: 0,
            idle_ns: 0,
            slices: 0,
            most_holders: 0,
            lives: Vec::new(),
            done: BTreeMap::new(),
            holders: Vec::new(),
            again_ns: None,
            next: None,
            view: Vec::new(),
        }
    }

    /// A tenant comes.
    pub fn join(&mut self, tenant: SimTenant) {
        let mut life = Life {
            tenant,
            joined_ns: self.now_ns,
            phase: 0,
            left_ns: 0,
            kernel_left_ns: 0,
            round_began_ns: self.now_ns,
            round_done_ns: 0,
            last_round_ns: 0,
            waiting_since_ns: None,
            drains_since_ns: None,
            drains: Quantile::default(),
            got: Got::default(),
        };
        life.enter(0);
        self.lives.push(life);
        self.decide();
    }

    /// A tenant goes, killed: what it had on the device is gone with it.
    pub fn remove(&mut self, id: TenantId) {
        self.lives.retain(|life| life.tenant.id != id);
        self.holders.retain(|holder| holder.id != id);
        self.decide();
    }

    /// Changes what a tenant is: its weight, class, bounds, whether it is paused.
    pub fn change(&mut self, id: TenantId, change: impl FnOnce(&mut SimTenant)) {
        if let Some(life) = self.lives.iter_mut().find(|life| life.tenant.id == id) {
            change(&mut life.tenant);
        }
        self.decide();
    }

    /// Gives a tenant another weight.
    pub fn set_weight(&mut self, id: TenantId, weight_ppm: u32) {
        self.change(id, |tenant| tenant.weight_ppm = weight_ppm);
    }

    /// Now, in nanoseconds.
    pub fn now_ns(&self) -> u64 {
        self.now_ns
    }

    /// Time in which somebody wanted the device and nothing ran on it, in nanoseconds.
    pub fn idle_ns(&self) -> u64 {
        self.idle_ns
    }

    /// Slices granted or begun anew.
    pub fn slices(&self) -> u64 {
        self.slices
    }

    /// The most that held the device at once.
    pub fn most_holders(&self) -> usize {
        self.most_holders
    }

    /// The policy, to ask it things.
    pub fn policy(&self) -> &P {
        &self.policy
    }

    /// What `id` got so far.
    pub fn got(&self, id: TenantId) -> Got {
        self.lives
            .iter()
            .find(|life| life.tenant.id == id)
            .map(|life| life.got)
            .or_else(|| self.done.get(&id).copied())
            .unwrap_or_default()
    }

    /// Wall time of the last round of `id`, in nanoseconds.
    pub fn last_round_ns(&self, id: TenantId) -> u64 {
        self.lives
            .iter()
            .find(|life| life.tenant.id == id)
            .map_or(0, |life| life.last_round_ns)
    }

    /// Whether `id` wants the device.
    pub fn wants(&self, id: TenantId) -> bool {
        self.lives
            .iter()
            .any(|life| life.tenant.id == id && life.is_here() && life.wants())
    }

    /// The first of those that hold the device.
    pub fn holder(&self) -> Option<TenantId> {
        self.holders.first().map(|holder| holder.id)
    }

    /// Those that hold the device.
    pub fn holders(&self) -> impl Iterator<Item = TenantId> {
        self.holders.iter().map(|holder| holder.id)
    }

    /// Who would hold it next, as the policy said last.
    pub fn next(&self) -> Option<TenantId> {
        self.next
    }

    /// All that came with an end are done.
    pub fn is_over(&self) -> bool {
        self.lives
            .iter()
            .all(|life| life.tenant.rounds.is_none() || !life.is_here())
    }

    /// Lets `us` microseconds pass.
    pub fn run_us(&mut self, us: u64) {
        let end_ns = self.now_ns + us * 1000;
        while self.now_ns < end_ns {
            self.step(end_ns);
        }
    }

    /// Lets time pass until everybody is done who ever will be, `us` microseconds at most.
    pub fn run_until_over_us(&mut self, us: u64) {
        let end_ns = self.now_ns + us * 1000;
        while self.now_ns < end_ns && !self.is_over() {
            self.step(end_ns);
        }
    }

    /// Lets time pass up to the next moment at which something changes, `us` microseconds at most.
    pub fn step_us(&mut self, us: u64) {
        self.step(self.now_ns + us * 1000);
    }

    fn step(&mut self, end_ns: u64) {
        let mut until_ns = end_ns;
        for life in self.lives.iter().filter(|life| life.sleeps()) {
            until_ns = until_ns.min(self.now_ns + life.left_ns);
        }
        if let Some(again_ns) = self.again_ns {
            until_ns = until_ns.min(again_ns.max(self.now_ns));
        }
        let Self { lives, holders, .. } = self;
        let submits = |life: &Life| {
            holders.iter().any(|holder| holder.id == life.tenant.id) && life.can_submit()
        };
        let runs = |life: &&Life| life.kernel_left_ns > 0 || submits(life);
        let running = lives.iter().filter(runs).count() as u64;
        for life in lives.iter().filter(|life| life.kernel_left_ns > 0) {
            until_ns = until_ns.min(self.now_ns + life.kernel_left_ns * running);
        }
        for life in lives.iter_mut() {
            if submits(life) {
                // Nothing is decided before then: a row of kernels is one.
                life.submit((until_ns - self.now_ns) / running);
                until_ns = until_ns.min(self.now_ns + life.kernel_left_ns * running);
            }
        }
        let dt = until_ns - self.now_ns;
        self.account(dt, running);
        for life in &mut self.lives {
            let holds = self.holders.iter().any(|h| h.id == life.tenant.id);
            if life.kernel_left_ns > 0 {
                // Rounded up, so that a kernel with a nanosecond left ends.
                let done = dt.div_ceil(running).min(life.kernel_left_ns);
                life.kernel_left_ns -= done;
                life.left_ns = life.left_ns.saturating_sub(done);
                life.round_done_ns += done;
                life.got.device_ns += done;
                if !holds {
                    life.got.overrun_ns += done;
                }
                self.policy.charge(life.tenant.id, done);
            } else if life.sleeps() {
                life.left_ns -= dt.min(life.left_ns);
            }
        }
        self.now_ns = until_ns;
        for life in self.lives.iter_mut().filter(|life| life.is_here()) {
            if life.kernel_left_ns == 0
                && let Some(since_ns) = life.drains_since_ns.take()
            {
                life.drains.note(until_ns - since_ns);
            }
            if life.left_ns == 0 && life.kernel_left_ns == 0 {
                life.enter_next(self.now_ns);
            }
        }
        if self.lives.iter().any(|life| !life.is_here()) {
            let gone = self.lives.iter().filter(|life| !life.is_here());
            self.done
                .extend(gone.map(|life| (life.tenant.id, life.got)));
            self.lives.retain(Life::is_here);
        }
        self.decide();
    }

    /// What the time that passes means for waiting, idleness and dues.
    fn account(&mut self, dt: u64, running: u64) {
        let wants = |life: &&Life| life.is_here() && life.wants() && !life.tenant.paused;
        if running == 0 && self.lives.iter().any(|life| wants(&life)) {
            self.idle_ns += dt;
        }
        let class = if (self.lives.iter().filter(wants))
            .any(|life| life.tenant.class == Class::Guaranteed)
        {
            Class::Guaranteed
        } else {
            Class::Opportunistic
        };
        let weights: f64 = (self.lives.iter().filter(wants))
            .filter(|life| life.tenant.class == class)
            .map(|life| f64::from(life.tenant.weight_ppm.max(1)))
            .sum();
        for life in &mut self.lives {
            if !wants(&&*life) {
                continue;
            }
            if life.tenant.class == class {
                let weight = f64::from(life.tenant.weight_ppm.max(1));
                life.got.due_ns += dt as f64 * weight / weights;
            }
            if !self.holders.iter().any(|h| h.id == life.tenant.id) {
                life.got.wait_ns += dt;
            }
        }
    }

    fn decide(&mut self) {
        let mut tenants = std::mem::take(&mut self.view);
        tenants.clear();
        tenants.extend(
            (self.lives.iter())
                .filter(|life| life.is_here())
                .map(Life::view),
        );
        self.holders
            .retain(|holder| tenants.iter().any(|tenant| tenant.id == holder.id));
        let decision = self.policy.decide(&View {
            now_ns: self.now_ns,
            tenants: &tenants,
            holders: &self.holders,
            quantum: self.quantum,
            device: self.device,
        });
        self.view = tenants;
        self.carry_out(&decision);
        self.again_ns = decision.again_ns;
        self.next = decision.next;
        for life in &mut self.lives {
            let holds = self.holders.iter().any(|h| h.id == life.tenant.id);
            let waits = life.is_here() && life.wants() && !life.tenant.paused && !holds;
            match (waits, life.waiting_since_ns) {
                (true, None) => life.waiting_since_ns = Some(self.now_ns),
                (_, Some(since_ns)) => {
                    life.got.longest_wait_ns = life.got.longest_wait_ns.max(self.now_ns - since_ns);
                    if !waits {
                        life.waiting_since_ns = None;
                    }
                }
                (false, None) => {}
            }
        }
    }

    /// Does what was decided, and holds the policy to what it promises of a decision.
    fn carry_out(&mut self, decision: &Decision) {
        for id in &decision.revoke {
            let before = self.holders.len();
            self.holders.retain(|holder| holder.id != *id);
            assert!(
                self.holders.len() < before,
                "{id:?} is revoked and holds nothing"
            );
            if let Some(life) = self.lives.iter_mut().find(|life| life.tenant.id == *id)
                && life.kernel_left_ns > 0
            {
                life.drains_since_ns = Some(self.now_ns);
            }
        }
        for slice in &decision.grant {
            let begun = Holder {
                id: slice.tenant,
                since_ns: self.now_ns,
                quantum_us: slice.quantum_us,
            };
            let life = (self.lives.iter_mut())
                .find(|life| life.tenant.id == slice.tenant && life.is_here())
                .unwrap_or_else(|| panic!("a grant to {:?}, who is not here", slice.tenant));
            assert!(!life.tenant.paused, "a grant to a paused tenant");
            life.got.slices += 1;
            self.slices += 1;
            match self.holders.iter_mut().find(|h| h.id == slice.tenant) {
                Some(holder) => *holder = begun,
                None => {
                    self.holders.push(begun);
                    life.got.grants += 1;
                }
            }
        }
        assert!(
            self.holders.len() <= self.device.holders.max(1),
            "{} holders of a device for {}",
            self.holders.len(),
            self.device.holders
        );
        if let Some(next) = decision.next {
            let holds = self.holders.iter().any(|holder| holder.id == next);
            assert!(!holds, "{next:?} is said to be next and holds the device");
        }
        self.most_holders = self.most_holders.max(self.holders.len());
    }
}

impl Life {
    fn enter(&mut self, phase: usize) {
        let count = self.tenant.phases.len().max(1);
        self.phase = phase % count;
        self.left_ns = match self.tenant.phases.get(self.phase) {
            Some(Phase::Busy { device_us, .. }) => device_us * 1000,
            Some(Phase::Sleep { us }) => us * 1000,
            None => u64::MAX,
        };
    }

    fn enter_next(&mut self, now_ns: u64) {
        if self.phase + 1 >= self.tenant.phases.len() {
            self.got.rounds += 1;
            self.last_round_ns = now_ns - self.round_began_ns;
            (self.round_began_ns, self.round_done_ns) = (now_ns, 0);
            if self
                .tenant
                .rounds
                .is_some_and(|rounds| self.got.rounds >= rounds)
            {
                self.got.finished_ns = Some(now_ns);
                return;
            }
        }
        self.enter(self.phase + 1);
    }

    fn is_here(&self) -> bool {
        self.got.finished_ns.is_none()
    }

    fn sleeps(&self) -> bool {
        self.is_here() && !matches!(self.tenant.phases.get(self.phase), Some(Phase::Busy { .. }))
    }

    fn wants(&self) -> bool {
        !self.sleeps() && (self.left_ns > 0 || self.kernel_left_ns > 0)
    }

    fn can_submit(&self) -> bool {
        self.is_here() && !self.sleeps() && self.kernel_left_ns == 0
    }

    /// The next kernel, or a row of them that fills `row_ns`.
    fn submit(&mut self, row_ns: u64) {
        if let Some(Phase::Busy { kernel_us, .. }) = self.tenant.phases.get(self.phase) {
            let kernel_ns = (kernel_us * 1000).max(1);
            let row_ns = row_ns.div_ceil(kernel_ns).max(1).saturating_mul(kernel_ns);
            self.kernel_left_ns = row_ns.clamp(1, self.left_ns.max(1));
        }
    }

    fn view(&self) -> TenantView {
        let tenant = &self.tenant;
        let round_ns = tenant.round_device_ns();
        let remaining_ns = tenant.rounds.map(|rounds| {
            (rounds.saturating_sub(self.got.rounds))
                .saturating_mul(round_ns)
                .saturating_sub(self.round_done_ns)
        });
        let iterations = Iterations {
            ended: self.got.rounds,
            last_ns: self.last_round_ns,
            solo_ns: Some(tenant.round_solo_ns()),
            device_ns: Some(round_ns),
            done_ns: self.round_done_ns,
            began_ns: Some(self.round_began_ns),
            at_boundary: self.kernel_left_ns == 0
                && (self.round_done_ns == 0 || self.round_done_ns >= round_ns),
            confidence_ppm: 1_000_000,
        };
        TenantView {
            min_share_ppm: tenant.min_share_ppm,
            max_share_ppm: tenant.max_share_ppm,
            paused: tenant.paused,
            arrived_ns: self.joined_ns,
            memory: tenant.memory,
            attained_ns: self.got.device_ns,
            remaining_ns: remaining_ns.filter(|_| tenant.tells_size),
            deadline_ns: tenant.deadline_us.map(|us| self.joined_ns + us * 1000),
            latency_target_ns: tenant.latency_target_us.map(|us| us * 1000),
            drain_ns: self.drains.p99_ns().unwrap_or(0),
            iterations: if tenant.tells_iterations {
                iterations
            } else {
                Iterations::default()
            },
            ..TenantView::new(tenant.id, tenant.class, tenant.weight_ppm, self.wants())
        }
    }
}
