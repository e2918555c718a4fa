//! Which tenants a device has: their run entities, in the order in which they came.
//!
//! Invariants: a tenant has one run entity at most, from the arrival of its first client until the
//! tenant is gone; one whose clients have all gone keeps its account. Places (`usize`) hold until
//! the next [`remove`](Roster::remove), which no step of the scheduler calls.

use std::ops::{Index, IndexMut};

use policy::TenantId;

use super::entity::RunEntity;

/// The run entities of one device.
#[derive(Debug, Default)]
pub(super) struct Roster {
    entities: Vec<RunEntity>,
}

impl Roster {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.entities.len()
    }

    /// All of them.
    pub fn iter(&self) -> std::slice::Iter<'_, RunEntity> {
        self.entities.iter()
    }

    /// All of them, to be changed.
    pub fn iter_mut(&mut self) -> std::slice::IterMut<'_, RunEntity> {
        self.entities.iter_mut()
    }

    /// A tenant's place.
    pub fn position(&self, tenant: TenantId) -> Option<usize> {
        self.iter().position(|entity| entity.tenant == tenant)
    }

    /// A tenant's run entity.
    pub fn find(&self, tenant: TenantId) -> Option<&RunEntity> {
        self.iter().find(|entity| entity.tenant == tenant)
    }

    /// The same, to be changed.
    pub fn find_mut(&mut self, tenant: TenantId) -> Option<&mut RunEntity> {
        self.iter_mut().find(|entity| entity.tenant == tenant)
    }

    /// The place of a tenant, which is added where it is new.
    pub fn position_or_add(&mut self, tenant: TenantId, new: impl FnOnce() -> RunEntity) -> usize {
        self.position(tenant).unwrap_or_else(|| {
            self.entities.push(new());
            self.entities.len() - 1
        })
    }

    /// A tenant is gone.
    pub fn remove(&mut self, tenant: TenantId) -> Option<RunEntity> {
        let at = self.position(tenant)?;
        Some(self.entities.swap_remove(at))
    }

    /// For how long hand-overs to these tenants leave the device idle: the middle one of their
    /// figures, of two the smaller. `None`: none is known.
    pub fn hand_over_ns(&self, of: impl Fn(TenantId) -> bool) -> Option<u64> {
        let those = self.iter().filter(|entity| of(entity.tenant));
        let mut known: Vec<u64> = those.filter_map(RunEntity::hand_over_ns).collect();
        let middle = known.len().checked_sub(1)? / 2;
        Some(*known.select_nth_unstable(middle).1)
    }

    /// Whether nobody has a client here.
    pub fn is_deserted(&self) -> bool {
        self.iter().all(|entity| entity.clients().is_empty())
    }

    /// Whether nobody holds the device.
    pub fn is_free(&self) -> bool {
        !self.iter().any(RunEntity::holds)
    }

    /// Whether in-flight work of a tenant that has lost the device is still on it.
    pub fn is_draining(&self) -> bool {
        self.iter().any(RunEntity::drains)
    }

    /// Whether a tenant wants the device and does not have it.
    pub fn is_contended(&self, now_ns: u64) -> bool {
        self.iter()
            .any(|entity| !entity.holds() && entity.wants(now_ns) && entity.may_run())
    }

    /// When the first slice under way ends.
    pub fn first_due_ns(&self) -> Option<u64> {
        let holds = self.iter().filter_map(RunEntity::hold);
        holds.map(|hold| hold.due_ns()).min()
    }
}

impl Index<usize> for Roster {
    type Output = RunEntity;

    fn index(&self, at: usize) -> &RunEntity {
        &self.entities[at]
    }
}

impl IndexMut<usize> for Roster {
    fn index_mut(&mut self, at: usize) -> &mut RunEntity {
        &mut self.entities[at]
    }
}
