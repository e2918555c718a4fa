//! A tenant as its scheduler sees it.

use std::rc::Rc;

use channel::arbiter::ClientPages;
use policy::{Class, TenantId};

/// A tenant as its scheduler sees it.
#[derive(Clone, Copy, Debug)]
pub struct JobView<'a> {
    pub id: TenantId,
    pub class: Class,
    pub weight_ppm: u32,
    pub arrived_ns: u64,
    /// It would run if it were in, as far as its terms let it.
    pub wants: bool,
    /// It is at work on the device, or was a moment ago.
    pub active: bool,
    /// Its gate is closed and nothing of it runs.
    pub drained: bool,
    pub terms: ResidencyTerms,
    pub clients: &'a [(u64, Rc<ClientPages>)],
}

/// What a job's terms say about its memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ResidencyTerms {
    /// It may leave the device.
    pub evictable: bool,
    /// What is beyond its limit may live in host memory.
    pub overflow: bool,
    /// Its operator keeps it away.
    pub kept_away: bool,
    /// It leaves after so long without work, whether anybody needs the space or not.
    pub evict_after_ns: Option<u64>,
    /// Its own limit of host memory in bytes.
    pub host_bytes: Option<u64>,
    /// Its limit on this device in bytes.
    pub limit_bytes: Option<u64>,
    /// What it is charged on this device in bytes.
    pub used_bytes: u64,
}

impl ResidencyTerms {
    /// As the client reads it, while nothing is to be made ready.
    pub fn mode(&self) -> channel::ResidencyMode {
        channel::ResidencyMode {
            evictable: self.evictable,
            overflow: self.overflow,
            ..channel::ResidencyMode::default()
        }
    }
}
