//! Host memory for what is not on the devices: how much there is, who has it, who is promised it.
//!
//! Two limits: the job's own, and one for all jobs together. Nothing is moved before it is known
//! that all of it fits both, and that the host has it free; what is on its way is promised, so that
//! two moves do not count on the same bytes. Memory that a client keeps pinned for the next time
//! counts as used, too, and is asked back where others need it.

use std::collections::BTreeMap;

use host_memory::Memory;
use policy::TenantId;

use super::pins::Pins;

/// Of the host's free memory this much is left alone, beside a sixteenth of what there is.
const MARGIN_BYTES: u64 = 256 << 20;

/// One client on one device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Use {
    tenant: TenantId,
    held_bytes: u64,
    promised_bytes: u64,
}

impl Use {
    fn bytes(&self) -> u64 {
        self.held_bytes.max(self.promised_bytes)
    }
}

/// Which limit an eviction would break.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Short {
    /// The job's own.
    Job,
    /// That of all jobs together.
    All,
    /// What the host has free.
    Host,
}

/// Not enough, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shortage {
    /// Of what.
    pub short: Short,
    /// What the move takes.
    pub needed_bytes: u64,
    /// What there is for it.
    pub available_bytes: u64,
}

impl Shortage {
    /// For people.
    pub fn text(&self) -> String {
        let [needed, available] =
            [self.needed_bytes, self.available_bytes].map(control::short_bytes);
        match self.short {
            Short::Job => format!(
                "it takes {needed} of host memory and the job's own limit leaves {available} (raise it: --host-memory)"
            ),
            Short::All => format!(
                "it takes {needed} of host memory and {available} are left of what all jobs may have (raise host_memory in [residency])"
            ),
            Short::Host => {
                format!("it takes {needed} of host memory and the host has {available} to give")
            }
        }
    }
}

/// All of it.
#[derive(Debug, Default)]
pub struct HostBooks {
    /// Of all jobs together.
    limit_bytes: u64,
    /// What the host could still give; `None`: not known.
    free_bytes: Option<u64>,
    uses: BTreeMap<(u64, usize), Use>,
    /// Whose turn it is to lock some of it.
    pub pins: Pins,
}

impl HostBooks {
    /// The limit of all jobs together, in bytes.
    pub fn limit_bytes(&self) -> u64 {
        self.limit_bytes
    }

    /// From here on.
    pub fn set_limit(&mut self, limit_bytes: u64) {
        self.limit_bytes = limit_bytes;
    }

    /// What the host has free now and in all.
    pub fn set_free(&mut self, free: Option<Memory>) {
        self.free_bytes = free.map(|memory| {
            let margin = MARGIN_BYTES.max(memory.total_bytes / 16);
            memory.available_bytes.saturating_sub(margin)
        });
    }

    /// What a client holds on account of a device.
    pub fn hold(&mut self, client: u64, device: usize, tenant: TenantId, held_bytes: u64) {
        if held_bytes == 0 && !self.uses.contains_key(&(client, device)) {
            return;
        }
        let entry = self.uses.entry((client, device)).or_default();
        (entry.tenant, entry.held_bytes) = (tenant, held_bytes);
    }

    /// A client is ordered to move so much; 0: it has arrived.
    pub fn promise(&mut self, client: u64, device: usize, tenant: TenantId, bytes: u64) {
        let entry = self.uses.entry((client, device)).or_default();
        (entry.tenant, entry.promised_bytes) = (tenant, bytes);
    }

    /// A client is gone, with all that it had.
    pub fn forget(&mut self, client: u64) {
        self.pins.forget(client);
        self.uses.retain(|(id, _), _| *id != client);
    }

    /// What all jobs have and are promised.
    pub fn used_bytes(&self) -> u64 {
        self.sum(|_, _| true)
    }

    fn sum(&self, of: impl Fn(&(u64, usize), &Use) -> bool) -> u64 {
        self.uses
            .iter()
            .filter(|(key, entry)| of(key, entry))
            .map(|(_, entry)| entry.bytes())
            .fold(0, u64::saturating_add)
    }

    /// Whether the clients of a job on a device may hold `needs` bytes each, its own limit being
    /// `own`.
    ///
    /// # Errors
    /// [`Shortage`]
    pub fn check(
        &self,
        tenant: TenantId,
        device: usize,
        needs: &[(u64, u64)],
        own: Option<u64>,
    ) -> Result<(), Shortage> {
        let is_one = |client: u64| needs.iter().any(|(id, _)| *id == client);
        let moving = |key: &(u64, usize)| key.1 == device && is_one(key.0);
        let (mut needed, mut more) = (0u64, 0u64);
        for (client, bytes) in needs {
            let has = self.uses.get(&(*client, device)).copied();
            needed = needed.saturating_add(*bytes);
            more = more.saturating_add(bytes.saturating_sub(has.map_or(0, |has| has.held_bytes)));
        }
        let others = self.sum(|key, _| !moving(key));
        let of_job = self.sum(|key, entry| entry.tenant == tenant && !moving(key));
        let limits = [
            (
                Short::Job,
                needed,
                own.map(|own| own.saturating_sub(of_job)),
            ),
            (
                Short::All,
                needed,
                Some(self.limit_bytes.saturating_sub(others)),
            ),
            (Short::Host, more, self.free_beside(moving)),
        ];
        for (short, needed_bytes, available) in limits {
            if let Some(available_bytes) = available.filter(|bytes| needed_bytes > *bytes) {
                return Err(Shortage {
                    short,
                    needed_bytes,
                    available_bytes,
                });
            }
        }
        Ok(())
    }

    /// What the host has free and nobody is about to take but these; `None`: not known.
    fn free_beside(&self, these: impl Fn(&(u64, usize)) -> bool) -> Option<u64> {
        let others = self.uses.iter().filter(|(key, _)| !these(key));
        let coming = others.map(|(_, of)| of.promised_bytes.saturating_sub(of.held_bytes));
        let coming = coming.fold(0, u64::saturating_add);
        Some(self.free_bytes?.saturating_sub(coming))
    }

    /// Whether all jobs could have `bytes` in all, what they have now included: by the limit, and
    /// by what the host has free.
    pub fn could_hold(&self, bytes: u64) -> bool {
        let held = self
            .uses
            .values()
            .map(|entry| entry.held_bytes)
            .fold(0, u64::saturating_add);
        let more = bytes.saturating_sub(held);
        bytes <= self.limit_bytes && self.free_bytes.is_none_or(|free| more <= free)
    }

    /// What a job may take beyond what it has.
    pub fn left_bytes(&self, tenant: TenantId, own: Option<u64>) -> u64 {
        let all = self.limit_bytes.saturating_sub(self.used_bytes());
        let of_job = self.sum(|_, entry| entry.tenant == tenant);
        let own = own.map_or(u64::MAX, |own| own.saturating_sub(of_job));
        all.min(own).min(self.free_bytes.unwrap_or(u64::MAX))
    }

    /// What a client may hold on all of its devices: what the others leave of both limits.
    pub fn budget_bytes(&self, client: u64, tenant: TenantId, own: Option<u64>) -> u64 {
        let others = self.sum(|key, _| key.0 != client);
        let of_job = self.sum(|key, entry| entry.tenant == tenant && key.0 != client);
        let all = self.limit_bytes.saturating_sub(others);
        own.map_or(all, |own| own.saturating_sub(of_job).min(all))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;
    const A: TenantId = TenantId(1);
    const B: TenantId = TenantId(2);

    fn books(limit_bytes: u64) -> HostBooks {
        HostBooks {
            limit_bytes,
            ..HostBooks::default()
        }
    }

    #[test]
    fn both_limits_hold_and_what_is_promised_counts() {
        let mut books = books(10 * GIB);
        assert_eq!(books.check(A, 0, &[(1, 4 * GIB)], Some(4 * GIB)), Ok(()));
        let own = books.check(A, 0, &[(1, 3 * GIB), (2, 2 * GIB)], Some(4 * GIB));
        assert_eq!(
            own,
            Err(Shortage {
                short: Short::Job,
                needed_bytes: 5 * GIB,
                available_bytes: 4 * GIB,
            })
        );
        let text = own.expect_err("short").text();
        assert!(text.contains("5GiB") && text.contains("4GiB") && text.contains("--host-memory"));
        books.promise(1, 0, A, 7 * GIB);
        let all = books.check(B, 0, &[(3, 4 * GIB)], None).expect_err("short");
        assert_eq!((all.short, all.available_bytes), (Short::All, 3 * GIB));
        books.hold(1, 0, A, 2 * GIB);
        books.promise(1, 0, A, 0);
        assert_eq!(books.check(B, 0, &[(3, 8 * GIB)], None), Ok(()));
        assert_eq!(books.used_bytes(), 2 * GIB);
    }

    #[test]
    fn what_the_host_has_free_is_promised_once() {
        let mut books = books(u64::MAX);
        books.set_free(Some(Memory {
            total_bytes: 64 * GIB,
            available_bytes: 40 * GIB,
        }));
        let free = books.free_bytes.expect("known");
        let part = free / 3 * 2;
        assert_eq!(books.check(A, 0, &[(1, part)], None), Ok(()));
        books.promise(1, 0, A, part);
        // The same job on another device, and another job.
        for (job, client, device) in [(A, 1, 1), (B, 2, 0)] {
            let short = books.check(job, device, &[(client, part)], None);
            let short = short.expect_err("short");
            assert_eq!(
                (short.short, short.available_bytes),
                (Short::Host, free - part)
            );
        }
        assert_eq!(books.check(B, 0, &[(2, free - part)], None), Ok(()));
        // What has arrived is no longer free, and counted there.
        books.hold(1, 0, A, part);
        assert_eq!(books.check(B, 0, &[(2, free)], None), Ok(()));
    }

    #[test]
    fn what_a_client_has_already_is_not_needed_again() {
        let mut books = books(10 * GIB);
        books.set_free(Some(Memory {
            total_bytes: 16 * GIB,
            available_bytes: 3 * GIB,
        }));
        assert!(books.check(A, 0, &[(1, 3 * GIB)], None).is_err());
        books.hold(1, 0, A, 2 * GIB);
        assert_eq!(books.check(A, 0, &[(1, 3 * GIB)], None), Ok(()));
        books.hold(9, 0, B, 8 * GIB);
        let short = books.check(A, 0, &[(1, 3 * GIB)], None).expect_err("short");
        assert_eq!((short.short, short.available_bytes), (Short::All, 2 * GIB));
        books.forget(9);
        assert_eq!(books.check(A, 0, &[(1, 3 * GIB)], None), Ok(()));
    }

    #[test]
    fn budgets_of_all_clients_never_sum_above_the_limits() {
        let mut books = books(10 * GIB);
        books.hold(1, 0, A, 2 * GIB);
        books.hold(1, 1, A, GIB);
        books.hold(2, 0, A, GIB);
        books.promise(3, 0, B, 4 * GIB);
        assert_eq!(books.budget_bytes(1, A, None), 5 * GIB);
        assert_eq!(books.budget_bytes(1, A, Some(4 * GIB)), 3 * GIB);
        assert_eq!(books.budget_bytes(3, B, Some(100 * GIB)), 6 * GIB);
        assert_eq!(books.budget_bytes(4, B, Some(GIB)), 0);
    }
}
