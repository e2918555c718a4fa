//! Conditional nodes: graphs that run, or run again, by a value that kernels set.
//!
//! Kernels that could set it compute nothing here, so a value stays what the graph's launch made
//! it: its default. A loop's body therefore runs once where a real one would run until a kernel
//! ends it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use shim_ffi::CUresult;

use super::{Graph, Result};
use crate::driver::Driver;
use crate::registry;

/// What decides.
pub struct Condition {
    /// Handle.
    pub id: u64,
    value: AtomicU32,
    default: u32,
    /// Whether each launch begins with the default.
    assigns_default: bool,
}

impl Condition {
    /// A new one.
    pub fn create(driver: &Driver, default: u32, assigns_default: bool) -> Arc<Self> {
        let condition = Arc::new(Self {
            id: registry::fresh(),
            value: AtomicU32::new(0),
            default,
            assigns_default,
        });
        driver.conditions.insert(condition.id, condition.clone());
        condition
    }

    fn at_launch(&self) -> u32 {
        if self.assigns_default {
            self.value.store(self.default, Relaxed);
        }
        self.value.load(Relaxed)
    }
}

/// How a value decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Choice {
    /// The first body where it is not 0, else the second, where there is one.
    If,
    /// The body as long as it is not 0.
    While,
    /// The body of that number.
    Switch,
}

/// A conditional node's own.
pub struct Conditional {
    /// What decides.
    pub condition: Arc<Condition>,
    /// How.
    pub choice: Choice,
    /// What runs.
    pub bodies: Vec<Arc<Graph>>,
    /// Their handles, as the program is shown them.
    pub shown: Box<[usize]>,
}

impl Conditional {
    /// With empty bodies.
    ///
    /// # Errors
    /// `INVALID_VALUE` for a number of bodies that such a node cannot have.
    pub fn create(
        driver: &Driver,
        condition: Arc<Condition>,
        choice: Choice,
        bodies: u32,
    ) -> Result<Arc<Self>> {
        let allowed = match choice {
            Choice::If => 1..=2,
            Choice::While => 1..=1,
            Choice::Switch => 1..=u32::from(u16::MAX),
        };
        if !allowed.contains(&bodies) {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        Ok(Self::with(
            condition,
            choice,
            (0..bodies).map(|_| Graph::create(driver)).collect(),
        ))
    }

    fn with(condition: Arc<Condition>, choice: Choice, bodies: Vec<Arc<Graph>>) -> Arc<Self> {
        let shown = bodies.iter().map(|body| body.id as usize).collect();
        Arc::new(Self {
            condition,
            choice,
            bodies,
            shown,
        })
    }

    /// The same with graphs of its own.
    pub fn duplicate(&self, driver: &Driver) -> Arc<Self> {
        let bodies = self.bodies.iter().map(|body| body.duplicate(driver));
        Self::with(self.condition.clone(), self.choice, bodies.collect())
    }

    /// Which body a launch runs.
    pub fn chosen(&self) -> Option<usize> {
        let value = self.condition.at_launch();
        let number = match self.choice {
            Choice::If => usize::from(value == 0),
            Choice::While if value == 0 => return None,
            Choice::While => 0,
            Choice::Switch => value as usize,
        };
        (number < self.bodies.len()).then_some(number)
    }
}
