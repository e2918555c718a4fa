//! What stands at the gates of the model: nothing but a cap, or the rule.

use policy::TenantId;
use policy::lend::{Constants, Gate, JobGate, Lend, LendTerms, ProcessId, ProcessLook, Total};

use crate::device::{Event, Host, Sim, US};

/// From the opening of a gate to the launch that waited there.
const WAKE: u64 = 30 * US;
/// From a doorbell to the look that it causes.
const BELL: u64 = 40 * US;

pub enum Governor {
    /// Nothing, or only a cap on what is in flight.
    Open {
        cap: Option<u64>,
    },
    Rule(Box<Rule>),
}

/// Sees every look: the time, what was shown, what was decided.
pub type Witness = Box<dyn FnMut(&Sim, &Lend, &[ProcessLook], &[JobGate])>;

pub struct Rule {
    pub lend: Lend,
    pub constants: Constants,
    /// Looks come late with this probability, by at most this much.
    pub jitter: Option<(f64, u64)>,
    pub witness: Option<Witness>,
    gates: Vec<(u64, u64)>,
    rings: Vec<u64>,
    looks: Vec<ProcessLook>,
}

impl Rule {
    pub fn new(constants: Constants) -> Self {
        Self {
            lend: Lend::new(constants),
            constants,
            jitter: None,
            witness: None,
            gates: Vec::new(),
            rings: Vec::new(),
            looks: Vec::new(),
        }
    }
}

fn terms(sim: &Sim, job: usize) -> LendTerms {
    let of = &sim.jobs[job];
    LendTerms {
        share: of.share,
        class: of.class,
        share_max: of.share_max,
        latency: of.latency,
    }
}

impl Governor {
    pub fn rule() -> Self {
        Self::Rule(Box::new(Rule::new(Constants::MODEL)))
    }

    pub fn start(&mut self, sim: &mut Sim) {
        let Self::Rule(rule) = self else {
            return;
        };
        for job in 0..sim.jobs.len() {
            rule.lend.set_terms(TenantId(job as u64), terms(sim, job));
            rule.gates.push((0, rule.constants.cap_ns));
            rule.rings.push(0);
        }
        sim.at(rule.constants.look_ns, Event::Look);
    }

    pub fn share_changed(&mut self, sim: &Sim, job: usize) {
        if let Self::Rule(rule) = self {
            rule.lend.set_terms(TenantId(job as u64), terms(sim, job));
        }
    }

    pub fn may(&self, sim: &Sim, job: usize, weight: u64) -> bool {
        let pending = sim.pending(job);
        match self {
            Self::Open { cap: None } => true,
            Self::Open { cap: Some(cap) } => pending == 0 || pending + weight <= *cap,
            Self::Rule(rule) => {
                let (until, cap) = rule.gates[job];
                sim.now >= until && (pending == 0 || pending + weight <= cap)
            }
        }
    }

    /// A launch came to an empty queue.
    pub fn arrives(&mut self, sim: &mut Sim, job: usize) {
        if let Self::Rule(rule) = self
            && sim.jobs[job].latency
        {
            rule.rings[job] += 1;
            sim.at(sim.now + BELL, Event::Ring);
        }
    }

    /// A kernel ended, and its process waits at the gate.
    pub fn retry(&mut self, sim: &mut Sim, at: usize) {
        let job = sim.processes[at].job;
        match self {
            Self::Rule(rule) if sim.now < rule.gates[job].0 => {}
            _ => sim.retry_soon(at),
        }
    }

    pub fn expired(&mut self, sim: &mut Sim, job: usize) {
        if let Self::Rule(rule) = self
            && rule.gates[job].0 <= sim.now
        {
            poke(sim, job, US);
        }
    }

    pub fn look(&mut self, sim: &mut Sim, regular: bool) {
        let Self::Rule(rule) = self else {
            return;
        };
        if regular {
            let mut next = rule.constants.look_ns;
            if let Some((part, most)) = rule.jitter
                && sim.random.unit() < part
            {
                next += (sim.random.unit() * most as f64) as u64;
            }
            sim.at(sim.now + next, Event::Look);
        }
        rule.looks.clear();
        for (at, of) in sim.processes.iter().enumerate() {
            let error = sim.jobs[of.job].charge_error;
            let weight = |true_ns: u64| (true_ns as f64 * error) as u64;
            rule.looks.push(ProcessLook {
                tenant: TenantId(of.job as u64),
                process: ProcessId(at as u64),
                passed_ns: Total(weight(of.passed)),
                submitted_ns: Total(weight(of.issued)),
                fresh: Total(of.fresh),
                rings: Total(rule.rings[of.job]),
                at_gate: u32::from(of.host == Host::AtGate),
                in_wait: u32::from(of.waits_for_device()),
                largest_ns: weight(of.largest),
            });
        }
        let decisions = rule.lend.look(sim.now, &rule.looks);
        for job in 0..sim.jobs.len() {
            let decided = *decisions.of(TenantId(job as u64)).expect("a gate");
            let was = rule.gates[job].0;
            let delay = match decided.gate {
                Gate::Shut { until_ns, .. } => {
                    rule.gates[job] = (until_ns, decided.cap_ns);
                    sim.at(until_ns, Event::Expiry(job));
                    continue;
                }
                Gate::Open if was > sim.now => WAKE,
                Gate::Open => 0,
            };
            rule.gates[job] = (sim.now, decided.cap_ns);
            poke(sim, job, delay);
        }
        if let Some(mut witness) = rule.witness.take() {
            let gates: Vec<JobGate> = rule.lend.gates().to_vec();
            witness(sim, &rule.lend, &rule.looks, &gates);
            rule.witness = Some(witness);
        }
    }
}

fn poke(sim: &mut Sim, job: usize, delay: u64) {
    for at in sim.jobs[job].processes.clone() {
        sim.poke(at, delay);
    }
}
