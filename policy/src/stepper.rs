//! Virtual time: drives a [`SlicePolicy`] with simulated tenants and counts what each of them got.
//!
//! The device runs one kernel of each tenant that has work on it, all at the same speed: two at once run at half the speed
//! each. A tenant that loses the device finishes the kernel it has begun; that tail overlaps with the next tenant, and
//! both are charged for their half. This is what the daemon measures on hardware, and why it charges the way it does.

use crate::slice::{Class, Device, Holder, QuantumBounds, SlicePolicy, TenantId, TenantView, View};

/// A piece of a simulated tenant's life.
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

/// A simulated tenant. Its phases repeat from the first when the last is over; without phases it has gone.
#[derive(Clone, Debug)]
pub struct SimTenant {
    /// Its number.
    pub id: TenantId,
    /// Its class.
    pub class: Class,
    /// Its weight in millionths.
    pub weight_ppm: u32,
    /// What it does, again and again.
    pub phases: Vec<Phase>,
}

/// What a tenant got so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Got {
    /// Device time charged, in nanoseconds.
    pub device_ns: u64,
    /// Time spent wanting and not holding, in nanoseconds.
    pub wait_ns: u64,
    /// Longest single wait, in nanoseconds.
    pub longest_wait_ns: u64,
    /// Slices granted to it; a slice begun anew does not count.
    pub grants: u64,
    /// Device time charged while it did not hold the device, in nanoseconds.
    pub overrun_ns: u64,
}

#[derive(Debug)]
struct Life {
    tenant: SimTenant,
    phase: usize,
    /// Of the phase, in nanoseconds.
    left_ns: u64,
    /// Of the kernel on the device, in nanoseconds of the whole device; 0: none.
    kernel_left_ns: u64,
    waiting_since_ns: Option<u64>,
    got: Got,
}

/// The simulation.
#[derive(Debug)]
pub struct Stepper<P> {
    policy: P,
    quantum: QuantumBounds,
    now_ns: u64,
    idle_ns: u64,
    lives: Vec<Life>,
    holder: Option<Holder>,
    again_ns: Option<u64>,
}

impl<P: SlicePolicy> Stepper<P> {
    /// A device without tenants at time 0.
    pub fn new(policy: P, quantum: QuantumBounds) -> Self {
        Self {
            policy,
            quantum,
            now_ns: 0,
            idle_ns: 0,
            lives: Vec::new(),
            holder: None,
            again_ns: None,
        }
    }

    /// A tenant comes.
    pub fn join(&mut self, tenant: SimTenant) {
        let mut life = Life {
            tenant,
            phase: 0,
            left_ns: 0,
            kernel_left_ns: 0,
            waiting_since_ns: None,
            got: Got::default(),
        };
        life.enter(0);
        self.lives.push(life);
        self.decide();
    }

    /// A tenant goes, killed: what it had on the device is gone with it.
    pub fn leave(&mut self, id: TenantId) {
        self.lives.retain(|life| life.tenant.id != id);
        if self.holder.is_some_and(|holder| holder.id == id) {
            self.holder = None;
        }
        self.decide();
    }

    /// Gives a tenant another weight.
    pub fn set_weight(&mut self, id: TenantId, weight_ppm: u32) {
        for life in &mut self.lives {
            if life.tenant.id == id {
                life.tenant.weight_ppm = weight_ppm;
            }
        }
        self.decide();
    }

    /// Now, in nanoseconds.
    pub fn now_ns(&self) -> u64 {
        self.now_ns
    }

    /// Time in which somebody wanted the device and nothing ran on it, in nanoseconds.
    pub fn idle_ns(&self) -> u64 {
        self.idle_ns
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
            .map_or(Got::default(), |life| life.got)
    }

    /// Who holds the device.
    pub fn holder(&self) -> Option<TenantId> {
        self.holder.map(|holder| holder.id)
    }

    /// Lets `us` microseconds pass.
    pub fn run_us(&mut self, us: u64) {
        let end_ns = self.now_ns + us * 1000;
        while self.now_ns < end_ns {
            self.step(end_ns);
        }
    }

    /// To the next moment at which something changes.
    fn step(&mut self, end_ns: u64) {
        for at in 0..self.lives.len() {
            if self.holds(at) {
                self.lives[at].submit();
            }
        }
        let running = self
            .lives
            .iter()
            .filter(|life| life.kernel_left_ns > 0)
            .count() as u64;
        let mut until_ns = end_ns;
        for life in &self.lives {
            if life.kernel_left_ns > 0 {
                until_ns = until_ns.min(self.now_ns + life.kernel_left_ns * running);
            }
            if life.sleeps() {
                until_ns = until_ns.min(self.now_ns + life.left_ns);
            }
        }
        if let Some(again_ns) = self.again_ns {
            until_ns = until_ns.min(again_ns.max(self.now_ns));
        }
        let dt = until_ns - self.now_ns;
        if running == 0 && self.lives.iter().any(Life::wants) {
            self.idle_ns += dt;
        }
        let holder = self.holder.map(|holder| holder.id);
        for life in &mut self.lives {
            let holds = holder == Some(life.tenant.id);
            if life.kernel_left_ns > 0 {
                // Rounded up, so that a kernel with a nanosecond left ends.
                let done = dt.div_ceil(running).min(life.kernel_left_ns);
                life.kernel_left_ns -= done;
                life.left_ns = life.left_ns.saturating_sub(done);
                life.got.device_ns += done;
                if !holds {
                    life.got.overrun_ns += done;
                }
                self.policy.charge(life.tenant.id, done);
            } else if life.sleeps() {
                life.left_ns -= dt.min(life.left_ns);
            }
            if !holds && life.wants() {
                life.got.wait_ns += dt;
            }
        }
        self.now_ns = until_ns;
        for life in &mut self.lives {
            if life.left_ns == 0 && life.kernel_left_ns == 0 {
                life.enter(life.phase + 1);
            }
        }
        self.decide();
    }

    fn holds(&self, at: usize) -> bool {
        self.holder
            .is_some_and(|holder| holder.id == self.lives[at].tenant.id)
    }

    fn decide(&mut self) {
        let tenants: Vec<TenantView> = self
            .lives
            .iter()
            .map(|life| {
                let tenant = &life.tenant;
                TenantView::new(tenant.id, tenant.class, tenant.weight_ppm, life.wants())
            })
            .collect();
        let holders: Vec<Holder> = self.holder.into_iter().collect();
        let decision = self.policy.decide(&View {
            now_ns: self.now_ns,
            tenants: &tenants,
            holders: &holders,
            quantum: self.quantum,
            device: Device::EXCLUSIVE,
        });
        if let Some(slice) = decision.grant.first() {
            let is_new = self.holder.is_none_or(|holder| holder.id != slice.tenant);
            assert!(
                !is_new || decision.revoke.first().copied() == self.holder.map(|holder| holder.id),
                "a grant beside a holder that keeps the device"
            );
            self.holder = Some(Holder {
                id: slice.tenant,
                since_ns: self.now_ns,
                quantum_us: slice.quantum_us,
            });
            if is_new
                && let Some(life) = self.lives.iter_mut().find(|l| l.tenant.id == slice.tenant)
            {
                life.got.grants += 1;
            }
        } else if !decision.revoke.is_empty() {
            self.holder = None;
        }
        self.again_ns = decision.again_ns;
        let holder = self.holder();
        for life in &mut self.lives {
            let waits = life.wants() && holder != Some(life.tenant.id);
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

    fn sleeps(&self) -> bool {
        !matches!(self.tenant.phases.get(self.phase), Some(Phase::Busy { .. }))
    }

    fn wants(&self) -> bool {
        !self.sleeps() && (self.left_ns > 0 || self.kernel_left_ns > 0)
    }

    fn submit(&mut self) {
        if let Some(Phase::Busy { kernel_us, .. }) = self.tenant.phases.get(self.phase)
            && self.kernel_left_ns == 0
        {
            self.kernel_left_ns = (kernel_us * 1000).clamp(1, self.left_ns.max(1));
        }
    }
}
