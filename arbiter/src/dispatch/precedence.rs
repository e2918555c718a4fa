//! What comes before the slice policy: a gang's turn, and a slice for a tenant that is owed its
//! floor.
//!
//! Invariants: a turn ends by the gang scheduler's word, or with its tenant; a turn comes before a
//! floor; neither holds while everybody runs at once.

use policy::TenantId;

/// The turn of a gang.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Turn {
    /// Whose.
    pub tenant: TenantId,
    /// Number of the turn, which distinguishes it from the same tenant's next one.
    pub number: u64,
    /// How long, in microseconds.
    pub quantum_us: u32,
    /// Others wait for its end.
    pub contended: bool,
}

/// Who has the device whatever the policy says.
#[derive(Debug, Default)]
pub(super) struct Precedence {
    turn: Option<Turn>,
    /// The tenant that runs for the sake of its floor.
    floor: Option<TenantId>,
}

impl Precedence {
    /// The gang's turn.
    pub fn turn(&self) -> Option<Turn> {
        self.turn
    }

    /// A gang's turn begins.
    pub fn begin_turn(&mut self, turn: Turn) {
        self.turn = Some(turn);
    }

    /// A gang's turn is over; another one goes on.
    pub fn end_turn(&mut self, turn: Turn) {
        self.turn = self.turn.filter(|present| *present != turn);
    }

    /// The tenant that runs for the sake of its floor.
    pub fn floor(&self) -> Option<TenantId> {
        self.floor
    }

    /// A tenant begins to, or none does.
    pub fn set_floor(&mut self, tenant: Option<TenantId>) {
        self.floor = tenant;
    }

    /// A tenant is gone.
    pub fn retire(&mut self, tenant: TenantId) {
        self.turn = self.turn.filter(|turn| turn.tenant != tenant);
        self.floor = self.floor.filter(|id| *id != tenant);
    }

    /// Nobody comes before anybody.
    pub fn clear(&mut self) {
        *self = Self::default();
    }
}
