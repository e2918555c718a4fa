//! Random sequences of driver calls, chosen by a seed alone: the same seed makes the same calls,
//! for any driver.
//!
//! Programs made here are free of races: two accesses to one buffer are always ordered (same
//! stream, an event, a synchronisation, or the legacy stream's own rule), so that contents are the
//! same in every run. Several threads take turns; which thread is next is a choice of the generator
//! as well.

mod array;
mod context;
mod copy;
mod graph;
mod hostile;
mod launch;
mod memory;
mod order;
mod pool;
mod query;
mod vmm;
mod world;

use std::sync::{Condvar, Mutex, PoisonError};

use shim_ffi::*;

use crate::api::Api;
use crate::rng::Rng;
use crate::transcript::Transcript;
pub use world::World;

/// What to run.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Chooses everything.
    pub seed: u64,
    /// Calls after which the sequence ends (a few more are made by the last step and the clean-up).
    pub calls: u64,
    /// Threads that take turns.
    pub threads: usize,
    /// Destroyed handles and handles that never were may be used. Only drivers that check their
    /// handles bear it.
    pub hostile: bool,
}

type Step = fn(&mut World);

/// Steps and how often they are taken.
const STEPS: &[(u32, Step)] = &[
    (14, memory::allocate),
    (12, memory::free),
    (8, memory::host),
    (8, memory::attributes),
    (4, memory::advise),
    (26, copy::linear),
    (10, copy::rectangle),
    (16, copy::set),
    (14, copy::read_back),
    (26, launch::kernel),
    (4, launch::module),
    (4, launch::library),
    (4, launch::host_function),
    (6, launch::word),
    (12, order::stream),
    (12, order::event),
    (8, order::synchronise),
    (3, context::change),
    (4, context::stack),
    (6, query::device),
    (6, query::context),
    (4, query::function),
    (8, pool::asynchronous),
    (3, pool::manage),
    (6, vmm::physical),
    (3, graph::captured),
    (3, graph::built),
    (3, array::array),
    (14, hostile::wrong),
];

/// Every step in turn, for a walk that leaves none out.
const WALK_ROUNDS: usize = 24;

struct Turn {
    world: World,
    whose: usize,
    over: bool,
}

/// Runs a plan to its end.
pub fn run(api: Api, log: Transcript, plan: Plan, walk: bool) -> Transcript {
    let turn = Mutex::new(Turn {
        world: World::new(api, log, plan),
        whose: 0,
        over: false,
    });
    let changed = Condvar::new();
    std::thread::scope(|scope| {
        for me in 1..plan.threads {
            let (turn, changed) = (&turn, &changed);
            scope.spawn(move || take_turns(turn, changed, me, plan, walk));
        }
        take_turns(&turn, &changed, 0, plan, walk);
    });
    let mut turn = turn.into_inner().unwrap_or_else(PoisonError::into_inner);
    turn.world.finish();
    turn.world.log
}

fn take_turns(turn: &Mutex<Turn>, changed: &Condvar, me: usize, plan: Plan, walk: bool) {
    let mut held = turn.lock().unwrap_or_else(PoisonError::into_inner);
    loop {
        while held.whose != me && !held.over {
            held = changed.wait(held).unwrap_or_else(PoisonError::into_inner);
        }
        if held.over {
            return;
        }
        let world = &mut held.world;
        world.begin_turn(me);
        if walk {
            for (_, step) in STEPS {
                for _ in 0..WALK_ROUNDS {
                    step(world);
                }
            }
        } else {
            for _ in 0..world.rng.between(8, 160) {
                choose(&mut world.rng)(world);
            }
        }
        world.end_turn();
        let next = world.rng.below(plan.threads);
        held.over = world.log.calls() >= plan.calls;
        held.whose = next;
        changed.notify_all();
    }
}

fn choose(rng: &mut Rng) -> Step {
    let total: u32 = STEPS.iter().map(|(weight, _)| weight).sum();
    let mut at = rng.below(total as usize) as u32;
    for (weight, step) in STEPS {
        if at < *weight {
            return *step;
        }
        at -= weight;
    }
    order::synchronise
}

/// Makes a driver call and notes it: `call!(world, cuMemFree_v2(address) [Name(address)] => [])`.
macro_rules! call {
    ($world:expr, $symbol:ident($($arg:expr),* $(,)?) [$($noted:expr),* $(,)?] => [$($out:expr),* $(,)?]) => {{
        // SAFETY: the arguments are valid for this call, or wrong in a way that the driver
        // documents an error for; memory that they point to outlives the call, and what the driver
        // keeps lives in the world.
        let result = unsafe { $world.api.$symbol($($arg),*) };
        $world.log.note(shim_ffi::Symbol::$symbol, &[$($noted),*], result, &[$($out),*]);
        result
    }};
}
pub(crate) use call;

/// The same for a pair of symbols that differ in the meaning of stream 0.
macro_rules! call_on {
    ($world:expr, $per_thread:expr, $legacy:ident | $ptsz:ident ($($arg:expr),* $(,)?) [$($noted:expr),* $(,)?]
     => [$($out:expr),* $(,)?]) => {
        if $per_thread {
            $crate::sequence::call!($world, $ptsz($($arg),*) [$($noted),*] => [$($out),*])
        } else {
            $crate::sequence::call!($world, $legacy($($arg),*) [$($noted),*] => [$($out),*])
        }
    };
}
pub(crate) use call_on;

/// The handle of a number.
pub(crate) fn stream(handle: u64) -> CUstream {
    CUstream(handle as *mut c_void)
}
