//! Asking jobs to change their size: the request of an operator or of the cluster's agent goes into
//! the pages of all of the job's processes, and the first of them that says that all is saved
//! answers for the job. The asker decides what follows from that.

use channel::Resize;
use channel::arbiter::ClientPages;
use control::ResizeStatus;
use policy::TenantId;

use crate::serve::Arbiter;
use crate::tenant::Tenant;

/// A request that nobody has followed up in this time is taken back: a job that is ready to be
/// stopped waits for that. TIMEOUT: above the time that the asker gives the job to end its
/// iteration (a minute at most) and to end (some seconds).
const EXPIRES_MS: u64 = 120_000;

impl Arbiter {
    /// Asks a job for another size, or takes that back. Asking for the same once more is asking
    /// once.
    pub(crate) fn ask_resize(&mut self, id: TenantId, asked: control::Resize) {
        let now_unix_ms = self.clock.unix_ms();
        let Some(tenant) = self.ledger.get_mut(id) else {
            return;
        };
        tenant.resize = match (asked, tenant.resize) {
            (control::Resize::Stay, _) => None,
            (control::Resize::To(gpus), Some((known, since))) if known.gpus == gpus => {
                Some((known, since))
            }
            (control::Resize::To(gpus), _) => {
                // Pages outlive an arbiter, and so does what a client has answered in them: a
                // number of the clock is a new one also to the next arbiter.
                let number = now_unix_ms.max(tenant.resized + 1);
                tenant.resized = number;
                Some((Resize { number, gpus }, now_unix_ms))
            }
        };
        let resize = tenant.resize.map(|(resize, _)| resize);
        for client in &tenant.clients {
            if let Some(client) = self.clients.get(*client) {
                client.pages.arbiter.ask_resize(resize);
            }
        }
    }

    /// Takes back what was asked for long ago.
    pub(crate) fn expire_resizes(&mut self) {
        let now_unix_ms = self.clock.unix_ms();
        let old = |tenant: &&Tenant| {
            let since = tenant.resize.map(|(_, since)| since);
            since.is_some_and(|since| now_unix_ms.saturating_sub(since) > EXPIRES_MS)
        };
        let old: Vec<TenantId> = self.ledger.iter().filter(old).map(|t| t.id).collect();
        for id in old {
            self.ask_resize(id, control::Resize::Stay);
        }
    }

    /// Before a client is welcomed: what its job was asked for before it came.
    pub(crate) fn introduce_resize(&self, tenant: TenantId, pages: &ClientPages) {
        let asked = self.ledger.get(tenant).and_then(|tenant| tenant.resize);
        pages.arbiter.ask_resize(asked.map(|(resize, _)| resize));
    }

    /// Whether any process of the job looks for requests.
    pub(crate) fn listens_for_resize(&self, tenant: &Tenant) -> bool {
        self.halves(tenant)
            .any(|pages| pages.client.listens_for_resize())
    }

    /// What the job was asked for, and whether it is ready for that.
    pub(crate) fn resize_status(&self, tenant: &Tenant) -> Option<ResizeStatus> {
        let (resize, since_unix_ms) = tenant.resize?;
        let ready = self
            .halves(tenant)
            .any(|pages| pages.client.resize_ready() == resize.number);
        Some(ResizeStatus {
            gpus: resize.gpus,
            since_unix_ms,
            ready,
        })
    }

    fn halves<'a>(&'a self, tenant: &'a Tenant) -> impl Iterator<Item = &'a ClientPages> {
        let clients = tenant.clients.iter();
        clients.filter_map(|id| Some(&*self.clients.get(*id)?.pages))
    }
}
