//! What a tenant has on the device when its slices end: its drain, and whether that ever ends.
//!
//! Invariants: a tenant drains from the end of a slice to the moment at which nothing of it is on
//! the device, or to its next slice; it never drains while it holds the device. A slice that ends
//! with nothing on the device leaves nothing unfinished. What waits for the host is not on the
//! device: it drains from the moment at which that is over.

use policy::Quantile;

use super::clients::Clients;
use crate::dispatch::drain::Drain;
use crate::dispatch::unfinished::{Moved, Unfinished};
use crate::peer::Activity;

/// In-flight work that lasts so long is not the rest of a slice any more. TIMEOUT: kernels of tens
/// of milliseconds are common, of a second rare.
const ENDLESS_NS: u64 = 1_000_000_000;

/// The in-flight work of a tenant after its slices.
#[derive(Debug, Default)]
pub struct InFlight {
    /// When its gate was closed, where its in-flight work has not ended.
    since_ns: Option<u64>,
    /// How long its drains are, and when this one ends.
    drain: Drain,
    /// How long they were, of the recent ones.
    recent: Quantile,
    /// This one has ended, which the next look will find.
    ended: bool,
    /// What its slices have left on the device.
    unfinished: Unfinished,
    /// It was found to have endless work, beside which other work of it gets on. That other work
    /// need not wait for the end of the endless one.
    endless_in_part: bool,
    /// Its last slice has left streams that wait for the host.
    waits_for_host: bool,
}

impl InFlight {
    /// Whether it drains.
    pub fn drains(&self) -> bool {
        self.since_ns.is_some()
    }

    /// Whether streams that its slices have left wait for the host, as far as is known.
    pub fn waits_for_host(&self) -> bool {
        self.waits_for_host
    }

    /// Looks, without a slice and with nothing on the device, whether what waited for the host goes
    /// on: then that drains from now on.
    pub fn resume(&mut self, now_ns: u64, device: usize, clients: &Clients) {
        if !self.waits_for_host {
            return;
        }
        let seen = clients.sample(device);
        if seen.is_on_device() {
            self.end_slice(now_ns, device, clients, seen);
        } else {
            self.waits_for_host = seen.waits_for_host;
        }
    }

    /// Somebody of the tenant is let in beside its drain.
    pub fn help(&mut self) {
        self.drain.help();
    }

    /// Notes whether the drain under way has ended by now, without learning from it. `beside`:
    /// another tenant is on the device already; without one that makes no difference.
    pub fn peek(&mut self, device: usize, clients: &Clients, beside: bool) -> bool {
        self.ended = beside && self.drains() && !clients.sample(device).is_on_device();
        self.ended
    }

    /// Whether it had ended then.
    pub fn has_ended(&self) -> bool {
        self.ended
    }

    /// The drain under way, and since when.
    pub fn drain(&self) -> Option<(u64, &Drain)> {
        Some((self.since_ns?, &self.drain))
    }

    /// How long its drains are.
    pub fn mean_ns(&self) -> u64 {
        self.drain.mean_ns()
    }

    /// How long they are at the longest: a high quantile; 0: there was none.
    pub fn longest_ns(&self) -> u64 {
        self.recent.p99_ns().unwrap_or(0)
    }

    /// Whether more of its work would only come behind the endless work that it was found to have.
    pub fn is_in_the_way(&self) -> bool {
        self.drains() && !self.endless_in_part
    }

    /// The tenant was given so much of the device.
    pub fn pass(&mut self, got_ns: u64) {
        self.unfinished.pass(got_ns);
    }

    /// Looks at what is left of it. `holds`: the tenant has the device. Returns when its drain has
    /// ended, where that was found now.
    pub fn look(
        &mut self,
        now_ns: u64,
        device: usize,
        clients: &Clients,
        holds: bool,
        seen: Activity,
        moved: Moved,
    ) -> Option<u64> {
        self.unfinished.look(clients.all(), device, holds, moved);
        if holds {
            self.since_ns = None;
        } else if seen.is_on_device() {
            if self.drains() {
                self.drain.look(now_ns, seen.marks);
            }
        } else if let Some(since_ns) = self.since_ns.take() {
            self.waits_for_host = seen.waits_for_host;
            let ended_ns = self.drain.end(since_ns, now_ns);
            self.recent.note(ended_ns.saturating_sub(since_ns));
            return Some(ended_ns);
        }
        None
    }

    /// A slice begins after another tenant's.
    pub fn begin_slice(&mut self) {
        self.since_ns = None;
    }

    /// A slice begins after another one of the same tenant. What is there now counts as where the
    /// device passes on.
    pub fn go_on(&mut self, now_ns: u64, device: usize, clients: &Clients) {
        if clients.sample(device).is_on_device() {
            self.unfinished.note(now_ns, clients.all(), device);
        }
    }

    /// A slice has ended.
    pub fn end_slice(&mut self, now_ns: u64, device: usize, clients: &Clients, seen: Activity) {
        self.waits_for_host = seen.waits_for_host;
        if seen.is_on_device() {
            self.since_ns = Some(now_ns);
            self.drain.begin(now_ns, seen.marks);
            self.unfinished.note(now_ns, clients.all(), device);
        } else {
            self.since_ns = None;
            self.drain.none();
            self.unfinished.clear();
        }
    }

    /// Looks for work that does not end; since when it has been there.
    pub fn find_endless(&mut self) -> Option<u64> {
        let endless = self.unfinished.endless(ENDLESS_NS)?;
        self.endless_in_part = endless.in_part;
        Some(endless.since_ns)
    }

    /// All clients are gone, and their work with them.
    pub fn clear(&mut self) {
        (self.since_ns, self.waits_for_host) = (None, false);
        self.unfinished.clear();
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use channel::arbiter::ClientPages;

    use super::*;

    const MS: u64 = 1_000_000;

    fn client() -> (Clients, Rc<ClientPages>) {
        let pages = Rc::new(ClientPages::create().expect("pages"));
        let mut clients = Clients::new(channel::Window::always(0));
        clients.add(7, Rc::clone(&pages));
        (clients, pages)
    }

    #[test]
    fn it_drains_from_the_end_of_a_slice_until_nothing_is_left() {
        let (clients, pages) = client();
        let mut in_flight = InFlight::default();
        let still = Moved::default();
        in_flight.end_slice(MS, 0, &clients, clients.sample(0));
        assert!(!in_flight.drains(), "nothing was there");
        let stream = pages.client.claim_stream(0).expect("slot").1;
        stream.issue();
        in_flight.end_slice(2 * MS, 0, &clients, clients.sample(0));
        assert_eq!(
            in_flight.drain().map(|(since_ns, _)| since_ns),
            Some(2 * MS)
        );
        assert_eq!(
            in_flight.look(3 * MS, 0, &clients, false, clients.sample(0), still),
            None
        );
        assert!(in_flight.drains());
        stream.settle();
        let ended_ns = in_flight.look(4 * MS, 0, &clients, false, clients.sample(0), still);
        assert_eq!(ended_ns, Some(3 * MS + MS / 2), "between the two looks");
        assert!(in_flight.drain().is_none());
        assert_eq!(
            in_flight.look(5 * MS, 0, &clients, false, clients.sample(0), still),
            None
        );
    }

    #[test]
    fn a_tenant_that_holds_the_device_does_not_drain() {
        let (clients, pages) = client();
        let mut in_flight = InFlight::default();
        pages.client.claim_stream(0).expect("slot").1.issue();
        let seen = clients.sample(0);
        in_flight.end_slice(MS, 0, &clients, seen);
        in_flight.begin_slice();
        assert!(!in_flight.drains());
        in_flight.end_slice(2 * MS, 0, &clients, seen);
        let held = in_flight.look(3 * MS, 0, &clients, true, seen, Moved::default());
        assert!(
            held.is_none() && !in_flight.drains(),
            "that is no end of its work"
        );
    }

    #[test]
    fn endless_work_is_in_the_way_where_nothing_gets_on_beside_it() {
        let (clients, pages) = client();
        let (stuck, other) = (
            pages.client.claim_stream(0).expect("slot").1,
            pages.client.claim_stream(0).expect("slot").1,
        );
        stuck.issue();
        let mut in_flight = InFlight::default();
        in_flight.end_slice(MS, 0, &clients, clients.sample(0));
        assert_eq!(in_flight.find_endless(), None);
        in_flight.pass(ENDLESS_NS);
        let seen = clients.sample(0);
        in_flight.look(2 * MS, 0, &clients, false, seen, Moved::default());
        assert_eq!(in_flight.find_endless(), Some(MS));
        assert!(in_flight.is_in_the_way());
        other.issue();
        let passed = Moved {
            submitted: true,
            passed: true,
        };
        in_flight.look(3 * MS, 0, &clients, false, clients.sample(0), passed);
        assert_eq!(in_flight.find_endless(), Some(MS));
        assert!(in_flight.drains() && !in_flight.is_in_the_way());
        in_flight.clear();
        assert_eq!(in_flight.find_endless(), None);
        assert!(!in_flight.drains());
    }
}
