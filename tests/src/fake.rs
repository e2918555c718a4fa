//! An arbiter that does what the test says, and only that: for looking at one client from the other
//! side of the channel.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use channel::arbiter::{ClientPages, Listener, TenantMemory};
use channel::{Event, Footprint, Grant, MAX_DEVICES, Order, OrderState, Reason, Verb};

use crate::wait_until;

/// The token that clients of a [`Listening`] present, as `SUBLET_TOKEN` has it.
pub const TOKEN: &str = "00112233445566778899aabbccddeeff";

/// A channel socket without clients.
#[derive(Debug)]
pub struct Listening {
    listener: Listener,
    path: PathBuf,
}

/// An attached client, seen from the arbiter's end. Its only device has index 0.
#[derive(Debug)]
pub struct Attached {
    /// The halves.
    pub pages: ClientPages,
    /// The tenant's page.
    pub tenant: TenantMemory,
    journal_seen: u64,
    orders: u64,
    _socket: OwnedFd,
}

impl Listening {
    /// Listens at `path`.
    ///
    /// # Panics
    /// When that is impossible.
    pub fn at(path: &Path) -> Self {
        Self {
            listener: Listener::bind(path).expect("a channel socket"),
            path: path.to_owned(),
        }
    }

    /// Where.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether somebody knocks. Takes the connection and drops it.
    pub fn has_caller(&self) -> bool {
        matches!(self.listener.try_accept(), Ok(Some(_)))
    }

    /// Welcomes the next client with every gate open.
    ///
    /// # Panics
    /// When none comes or the handshake fails.
    pub fn welcome(&self) -> Attached {
        self.welcome_with(|_| ())
    }

    /// The same, after `prepare` has written to the pages what is to be there from the beginning.
    ///
    /// # Panics
    /// When no client comes or the handshake fails.
    pub fn welcome_with(&self, prepare: impl FnOnce(&ClientPages)) -> Attached {
        let connection = wait_until("a client connects", || {
            self.listener.try_accept().expect("accept")
        });
        let (hello, _) = wait_until("a client greets", || connection.try_hello().ok());
        assert_eq!(
            &hello.token,
            TOKEN.as_bytes(),
            "the token of the environment"
        );
        assert_eq!(hello.devices.len(), 1, "{:?}", hello.devices);
        let mut pages = ClientPages::create().expect("pages");
        let files = pages.take_files().expect("files");
        let tenant = TenantMemory::create().expect("a tenant's page");
        tenant.page.use_slots(1);
        pages.arbiter.set_tenant_slot(0);
        prepare(&pages);
        let mut map = [None; MAX_DEVICES];
        map[0] = Some(0);
        let mut attached = Attached {
            _socket: connection.welcome(files, &tenant, map).expect("welcomed"),
            pages,
            tenant,
            journal_seen: 0,
            orders: 0,
        };
        attached.beat();
        attached.open();
        attached
    }
}

impl Attached {
    /// Opens the gate, without a bound on what is in flight.
    pub fn open(&mut self) {
        self.pages.arbiter.open(
            0,
            &Grant {
                number: 1,
                quantum_us: 5000,
                deadline_mono_ns: 0,
                window: channel::Window::always(0),
            },
        );
    }

    /// Closes the gate.
    pub fn close(&mut self) {
        self.pages.arbiter.close(0);
    }

    /// Says that the arbiter lives, for the next hour.
    pub fn beat(&mut self) {
        self.beat_in(Duration::from_secs(3600));
    }

    /// Says that it lives, for the last time.
    pub fn beat_once_more(&mut self) {
        self.beat_in(Duration::ZERO);
    }

    fn beat_in(&mut self, ahead: Duration) {
        let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC).expect("a clock");
        let now = Duration::from(now) + ahead;
        // CAST: centuries.
        self.pages.arbiter.beat(now.as_nanos() as u64);
    }

    /// Gives the client's agent an order, to be carried out within the test's patience; its number.
    pub fn order(&mut self, verb: Verb, resident_target_bytes: u64) -> u64 {
        self.order_within(verb, resident_target_bytes, crate::PATIENCE)
    }

    /// The same, with its own deadline.
    ///
    /// # Panics
    /// Without a clock.
    pub fn order_within(
        &mut self,
        verb: Verb,
        resident_target_bytes: u64,
        within: Duration,
    ) -> u64 {
        self.orders += 1;
        let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC).expect("a clock");
        let order = Order {
            number: self.orders,
            verb,
            resident_target_bytes,
            // CAST: centuries.
            deadline_mono_ns: (Duration::from(now) + within).as_nanos() as u64,
        };
        self.pages.arbiter.give_order(0, &order);
        self.orders
    }

    /// What the client's agent answers to the last order, when it has.
    ///
    /// # Panics
    /// When it does not.
    #[track_caller]
    pub fn answered(&self) -> (OrderState, Reason) {
        wait_until("the agent answers", || {
            let answer = self.pages.client.answer(0)?;
            let over = !matches!(
                answer.state,
                OrderState::None | OrderState::Working | OrderState::Begun
            );
            (answer.number == self.orders && over).then_some((answer.state, answer.reason))
        })
    }

    /// Where the client says that its memory is.
    pub fn footprint(&self) -> Footprint {
        self.pages.client.footprint(0)
    }

    /// Waits until a thread of the client waits at the closed gate.
    pub fn wait_for_a_waiter(&self) {
        wait_until("a thread waits at the gate", || {
            (self.pages.client.waiting(0) > 0).then_some(())
        });
    }

    /// What the client holds on the device, in bytes.
    pub fn used_bytes(&self) -> u64 {
        self.tenant.page.used_bytes(0)
    }

    /// New records of the client's journal.
    ///
    /// # Panics
    /// When a record cannot be read.
    pub fn records(&mut self) -> Vec<Event> {
        let mut events = Vec::new();
        let mut seen = self.journal_seen;
        self.pages.client.read_records(&mut seen, |record| {
            events.push(record.expect("a good record").event);
        });
        self.journal_seen = seen;
        events
    }
}
