//! Where a client's memory is to be: arbiter --orders--> client, client --answers, footprint-->
//! arbiter.
//!
//! An order is a level, not a message: the arbiter writes what is to be true of a device's
//! evictable memory, numbers it and wakes the client's agent; a later order replaces an earlier
//! one. The agent works towards the last order that it sees and answers with that order's number.
//! Nobody waits without a deadline: an order carries one, and the arbiter judges an answer that
//! does not come.
//!
//! Both sides read the other's words as claims. A client of layout 1.1 neither asks for this
//! ([`RESIDENCY`]) nor answers.

use std::time::Duration;

use crate::layout::{ArbiterHalf, ClientHalf, DeviceGrant, NO_LIMIT, Want};
use crate::sync::{Acquire, Relaxed, Release};

/// Feature bit of the handshake: the client can carry out orders about where its memory is.
pub const RESIDENCY: u64 = 2;

const EVICTABLE: u32 = 1;
const OVERFLOW: u32 = 2;
const PREPARE: u32 = 4;
const WAITS: u32 = 8;

/// Kinds of memory that stay on a device whatever happens, for people; the first one is bit 0.
pub const STAYING: [&str; 7] = [
    "pools",
    "graph memory",
    "arrays",
    "managed memory",
    "plain allocations",
    "shared memory",
    "unmapped handles",
];

/// What a client may have done to its memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ResidencyMode {
    /// It may be moved out of the device and back.
    pub evictable: bool,
    /// An allocation beyond the limit may live in host memory instead of failing.
    pub overflow: bool,
    /// It will be moved out before long: host memory for that is to be made ready, within its
    /// budget.
    pub prepare: bool,
    /// Other jobs leave the device for it: an allocation that its limit allows and that the device
    /// has no space for waits.
    pub waits: bool,
}

/// What is to be done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Verb {
    /// Everything evictable leaves the device.
    Evict = 1,
    /// Everything comes back.
    Restore = 2,
    /// As much as `resident_target_bytes` says is on the device; the rest in host memory, usable
    /// where it is.
    Fit = 3,
}

/// One order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Order {
    /// Its number, 1 and up; of one client and device.
    pub number: u64,
    /// What is to be done.
    pub verb: Verb,
    /// For [`Verb::Fit`]: bytes that are to be on the device.
    pub resident_target_bytes: u64,
    /// `CLOCK_MONOTONIC` time by which it is carried out or given up, in nanoseconds.
    pub deadline_mono_ns: u64,
}

/// How far an order has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(u8)]
pub enum OrderState {
    /// No order has been seen.
    #[default]
    None = 0,
    /// Under way.
    Working = 1,
    /// Everything is on the device.
    Resident = 2,
    /// Nothing evictable is on the device.
    Evicted = 3,
    /// Some of it is, the rest is in host memory and usable there.
    Partly = 4,
    /// It was not carried out; everything is where it was before.
    Refused = 5,
    /// It could neither be carried out nor undone; the client's submissions fail from here on.
    Failed = 6,
    /// A restore is under way, and the client has said what it will touch before its end: it may
    /// run.
    Begun = 7,
}

/// Why an order was refused or has failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(u8)]
pub enum Reason {
    /// None is given.
    #[default]
    None = 0,
    /// A stream is being captured.
    Capturing = 1,
    /// The device had not finished the client's work in time.
    NotDrained = 2,
    /// The host budget is too small.
    HostBudget = 3,
    /// The host has no memory left.
    HostMemory = 4,
    /// The driver returned an error.
    Driver = 5,
    /// The device has no memory left.
    DeviceMemory = 6,
    /// Nothing that the client holds can be evicted.
    NothingEvictable = 7,
    /// A control group that the client is in leaves too little host memory.
    HostGroup = 8,
}

/// What a client says of its last order.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Answer {
    /// Number of the order.
    pub number: u64,
    /// How far it has come.
    pub state: OrderState,
    /// Why it was not carried out.
    pub reason: Reason,
}

/// What can be had on a device for an allocation that it has no space for now: the arbiter's answer
/// to a question, and to all before it. Numbers of questions begin with 1 and wrap.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SpaceAnswer {
    /// Number of the question; 0: none was answered yet.
    pub number: u32,
    /// Number of the last question that figures of the device answer which are newer than it.
    pub confirmed: u32,
    /// Number of the last question at which the device had all that the job's threads waited for.
    pub met: u32,
    /// What the job could come to have for what waits, if everybody left who may, in bytes.
    pub most_bytes: u64,
    /// The same if nothing were on the device but what jobs account for. Never less than that.
    pub ceiling_bytes: u64,
    /// So many bytes were too few for a context; 0: that is not known.
    pub context_bytes: u64,
}

/// Sizes in answers about space are in units of this.
const SPACE_UNIT: u64 = 2 << 20;

impl SpaceAnswer {
    /// Whether question `number` is answered.
    pub fn answers(&self, number: u32) -> bool {
        is_from(self.number, number)
    }

    /// The same, by figures of the device that are newer than the question.
    pub fn confirms(&self, number: u32) -> bool {
        is_from(self.confirmed, number)
    }

    /// Whether the device had all that the job's threads waited for when that question was
    /// answered, or a later one.
    pub fn is_met(&self, number: u32) -> bool {
        is_from(self.met, number)
    }
}

/// Whether `last` is question `number` or came after it.
fn is_from(last: u32, number: u32) -> bool {
    last != 0 && last.wrapping_sub(number) < u32::MAX / 2
}

/// Two halves of a word.
fn halves(word: u64) -> (u32, u32) {
    // CAST: the lower half, and the upper one.
    (word as u32, (word >> 32) as u32)
}

fn word(lower: u32, upper: u32) -> u64 {
    u64::from(upper) << 32 | u64::from(lower)
}

/// Whole units; what cannot be said is not known.
fn units(bytes: u64) -> u32 {
    u32::try_from(bytes / SPACE_UNIT).unwrap_or(u32::MAX)
}

fn bytes_of(units: u32) -> u64 {
    match units {
        u32::MAX => u64::MAX,
        units => u64::from(units) * SPACE_UNIT,
    }
}

/// Where a client's memory is, on one device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Footprint {
    /// Bytes that could be evicted, on the device or not.
    pub evictable_bytes: u64,
    /// Of these, bytes on the device.
    pub resident_bytes: u64,
    /// Host memory held for them in bytes.
    pub host_bytes: u64,
    /// Bytes copied to the host, ever.
    pub moved_out_bytes: u64,
    /// Bytes copied back, ever.
    pub moved_in_bytes: u64,
}

impl Verb {
    fn of(number: u8) -> Option<Self> {
        [Self::Evict, Self::Restore, Self::Fit]
            .into_iter()
            .find(|verb| *verb as u8 == number)
    }
}

impl OrderState {
    fn of(number: u8) -> Option<Self> {
        use OrderState::*;
        [
            None, Working, Resident, Evicted, Partly, Refused, Failed, Begun,
        ]
        .into_iter()
        .find(|state| *state as u8 == number)
    }
}

impl Reason {
    fn of(number: u8) -> Option<Self> {
        use Reason::*;
        [
            None,
            Capturing,
            NotDrained,
            HostBudget,
            HostMemory,
            Driver,
            DeviceMemory,
            NothingEvictable,
            HostGroup,
        ]
        .into_iter()
        .find(|reason| *reason as u8 == number)
    }
}

/// The arbiter's end.
impl ArbiterHalf {
    /// Says what may be done to the client's memory, and how much host memory that may take
    /// (`None`: any). Evictable is to be said before the page is published: what was allocated
    /// before stays where it is.
    pub fn set_residency(&self, mode: ResidencyMode, host_budget_bytes: Option<u64>) {
        // SYNC(residency): numbers on their own; the next allocation and the next order read them.
        self.host_budget_bytes
            .store(host_budget_bytes.unwrap_or(NO_LIMIT), Relaxed);
        let evictable = if mode.evictable { EVICTABLE } else { 0 };
        let overflow = if mode.overflow { OVERFLOW } else { 0 };
        let prepare = if mode.prepare { PREPARE } else { 0 };
        let waits = if mode.waits { WAITS } else { 0 };
        self.residency
            .store(evictable | overflow | prepare | waits, Relaxed);
    }

    /// Says how much of what is evictable may be on `device`, in bytes: what is allocated beyond
    /// that lies in host memory, as does what the device has no space for. [`NO_LIMIT`]: all.
    /// `None`: the client goes by its limit alone.
    pub fn set_resident_cap(&self, device: usize, bytes: Option<u64>) {
        if let Some(slot) = self.devices.get(device) {
            // SYNC(cap): a number on its own; the next allocation reads it.
            slot.resident_cap_plus_one
                .store(bytes.map_or(0, |bytes| bytes.saturating_add(1)), Relaxed);
        }
    }

    /// Gives an order about `device` and wakes the client's agent; false where there is no such
    /// device.
    pub fn give_order(&self, device: usize, order: &Order) -> bool {
        let Some(slot) = self.devices.get(device) else {
            return false;
        };
        // An agent that reads while this is written sees no order, and is woken when it is there.
        slot.order.store(0, Relaxed);
        // SYNC(order): a reader that sees one of the words below sees the 0 as well, and reads
        // again.
        crate::sync::fence(Release);
        slot.resident_target_bytes
            .store(order.resident_target_bytes, Relaxed);
        slot.order_deadline_mono_ns
            .store(order.deadline_mono_ns, Relaxed);
        // SYNC(order): pairs with the Acquire load in `DeviceGrant::order`.
        slot.order
            .store((order.number << 8) | u64::from(order.verb as u8), Release);
        let count = self.orders.load(Relaxed).wrapping_add(1);
        self.orders.store(count, Release);
        self.orders.wake_all();
        true
    }
}

/// Answers to questions about space.
impl ArbiterHalf {
    /// Says what can be had on `device`; true where that is another answer than before.
    pub fn answer_space(&self, device: usize, answer: &SpaceAnswer) -> bool {
        let Some(slot) = self.devices.get(device) else {
            return false;
        };
        let most = word(units(answer.most_bytes), units(answer.ceiling_bytes));
        let met = word(answer.met, units(answer.context_bytes));
        let answered = word(answer.number, answer.confirmed);
        let same = |one: &crate::sync::AtomicU64, now: u64| one.load(Relaxed) == now;
        if same(&slot.space_most, most)
            && same(&slot.space_met, met)
            && same(&slot.space_answered, answered)
        {
            return false;
        }
        slot.space_most.store(most, Relaxed);
        slot.space_met.store(met, Relaxed);
        // SYNC(space): pairs with the Acquire load in `DeviceGrant::space`.
        slot.space_answered.store(answered, Release);
        true
    }
}

/// Bits of a permit that say until when it holds, in microseconds.
const PERMIT_BITS: u32 = 48;
const PERMIT_US: u64 = (1 << PERMIT_BITS) - 1;

/// The arbiter's end: what is to be looked at again.
impl ArbiterHalf {
    /// Wakes the client's agent, and threads that wait for device memory: something that they may
    /// wait for has changed.
    pub fn nudge(&self) {
        let count = self.orders.load(Relaxed).wrapping_add(1);
        self.orders.store(count, Release);
        self.orders.wake_all();
    }

    /// From here on the client locks no host memory without a permit. Before the page is published.
    pub fn ask_before_pinning(&self) {
        self.pin_permit.store(1, Relaxed);
    }

    /// Grants the client's request of that number, and wakes its agent.
    pub fn permit_pinning(&self, number: u16, until_mono_ns: u64) {
        let until_us = (until_mono_ns / 1000) & PERMIT_US;
        // SYNC(permit): a number on its own; the wake-up follows.
        self.pin_permit
            .store(u64::from(number) << PERMIT_BITS | until_us.max(1), Relaxed);
        self.nudge();
    }
}

/// The client's view.
impl ArbiterHalf {
    /// Whether the client has to ask before it locks host memory.
    pub fn pinning_needs_permit(&self) -> bool {
        self.pin_permit.load(Relaxed) != 0
    }

    /// Until when the request of that number is granted, in nanoseconds of `CLOCK_MONOTONIC`;
    /// `None`: it is not.
    pub fn pinning_permitted_until(&self, number: u16) -> Option<u64> {
        let word = self.pin_permit.load(Relaxed);
        (number != 0 && word >> PERMIT_BITS == u64::from(number))
            .then_some((word & PERMIT_US).saturating_mul(1000))
    }

    /// What may be done to the client's memory.
    pub fn residency(&self) -> ResidencyMode {
        let bits = self.residency.load(Relaxed);
        ResidencyMode {
            evictable: bits & EVICTABLE != 0,
            overflow: bits & OVERFLOW != 0,
            prepare: bits & PREPARE != 0,
            waits: bits & WAITS != 0,
        }
    }

    /// Host memory that the client may hold for what is not on its devices, in bytes; [`NO_LIMIT`]:
    /// any.
    pub fn host_budget_bytes(&self) -> u64 {
        self.host_budget_bytes.load(Relaxed)
    }

    /// How many orders were given: what [`wait_for_orders`](Self::wait_for_orders) compares. To be
    /// read before the orders.
    pub fn orders(&self) -> u32 {
        // SYNC(order): pairs with the Release store in `give_order`.
        self.orders.load(Acquire)
    }

    /// Waits until more orders than `seen` were given, or `timeout` has passed, or for no reason.
    pub fn wait_for_orders(&self, seen: u32, timeout: Duration) {
        self.orders.wait(seen, timeout);
    }
}

impl DeviceGrant {
    /// How much of what is evictable may be on this device, in bytes; `None`: the client goes by
    /// its limit alone.
    pub fn resident_cap(&self) -> Option<u64> {
        match self.resident_cap_plus_one.load(Relaxed) {
            0 => None,
            NO_LIMIT => Some(NO_LIMIT),
            plus_one => Some(plus_one - 1),
        }
    }

    /// What the arbiter says of space on this device.
    pub fn space(&self) -> SpaceAnswer {
        // SYNC(space): pairs with the Release store in `ArbiterHalf::answer_space`: what is read
        // below is that answer, or a later one.
        let (number, confirmed) = halves(self.space_answered.load(Acquire));
        let (most, ceiling) = halves(self.space_most.load(Relaxed));
        let (met, context) = halves(self.space_met.load(Relaxed));
        SpaceAnswer {
            number,
            confirmed,
            met,
            most_bytes: bytes_of(most),
            ceiling_bytes: bytes_of(ceiling.max(most)),
            context_bytes: bytes_of(context),
        }
    }

    /// The last order about this device. `None`: there is none, it is not a valid one, or it is
    /// being written.
    pub fn order(&self) -> Option<Order> {
        // SYNC(order): pairs with the Release store in `give_order`.
        let word = self.order.load(Acquire);
        let order = Order {
            number: word >> 8,
            // CAST: the lower 8 bits.
            verb: Verb::of(word as u8)?,
            resident_target_bytes: self.resident_target_bytes.load(Relaxed),
            deadline_mono_ns: self.order_deadline_mono_ns.load(Relaxed),
        };
        // SYNC(order): pairs with the fence in `give_order`.
        crate::sync::fence(Acquire);
        (self.order.load(Relaxed) == word).then_some(order)
    }
}

/// The client's end; its agent only writes answers.
impl Want {
    /// Says how far an order has come. The footprint is written before.
    pub fn answer(&self, answer: Answer) {
        let word = (answer.number << 16)
            | (u64::from(answer.state as u8) << 8)
            | u64::from(answer.reason as u8);
        // SYNC(answer): pairs with the Acquire load in `ClientHalf::answer`.
        self.answer.store(word, Release);
    }

    /// Says where the memory is.
    pub fn set_footprint(&self, footprint: &Footprint) {
        let Footprint {
            evictable_bytes,
            resident_bytes,
            host_bytes,
            moved_out_bytes,
            moved_in_bytes,
        } = *footprint;
        // SYNC(footprint): numbers on their own, clamped where they are read.
        self.evictable_bytes.store(evictable_bytes, Relaxed);
        self.resident_bytes.store(resident_bytes, Relaxed);
        self.host_bytes.store(host_bytes, Relaxed);
        self.moved_out_bytes.store(moved_out_bytes, Relaxed);
        self.moved_in_bytes.store(moved_in_bytes, Relaxed);
    }

    /// A thread begins to wait for `bytes` of device memory. The doorbell is rung after this.
    pub fn begin_waiting_for_space(&self, bytes: u64) {
        self.space_bytes.fetch_add(bytes, Relaxed);
    }

    /// The same, if all threads together then wait for no more than `most_bytes`; false where they
    /// would.
    pub fn wait_for_space_within(&self, bytes: u64, most_bytes: u64) -> bool {
        let more = |all: u64| {
            let all = all.checked_add(bytes)?;
            (all <= most_bytes).then_some(all)
        };
        self.space_bytes
            .fetch_update(Relaxed, Relaxed, more)
            .is_ok()
    }

    /// The thread has stopped waiting for them.
    pub fn end_waiting_for_space(&self, bytes: u64) {
        self.space_bytes.fetch_sub(bytes, Relaxed);
    }
}

/// Questions about space.
impl ClientHalf {
    /// Asks what can be had on the client's devices; the number of the question. What the client
    /// waits for is said before, the doorbell is rung after this.
    pub fn ask_for_space(&self) -> u32 {
        // SYNC(asked): pairs with the Acquire load in `space_asked`: who hears the question sees
        // what was said before it.
        let before = self.space_asked.fetch_add(1, Release);
        match before.wrapping_add(1) {
            // Not a number of a question.
            0 => self.ask_for_space(),
            number => number,
        }
    }

    /// Number of the last question; 0: there was none.
    pub fn space_asked(&self) -> u32 {
        // SYNC(asked): pairs with the Release addition in `ask_for_space`.
        self.space_asked.load(Acquire)
    }
}

/// Locking host memory: one client of a host at a time does.
impl ClientHalf {
    /// Asks for a permit, by a number that was not used lately; 0 gives it back, or takes the
    /// request back. The doorbell is rung after this.
    pub fn want_to_pin(&self, number: u16) {
        self.pin_wanted.store(u64::from(number), Relaxed);
    }

    /// Number of the client's request; 0: there is none, or none that makes sense.
    pub fn wants_to_pin(&self) -> u16 {
        u16::try_from(self.pin_wanted.load(Relaxed)).unwrap_or(0)
    }
}

/// The arbiter's view: claims of a stranger.
impl ClientHalf {
    /// What the client says of its last order about `device`; `None` where that makes no sense.
    pub fn answer(&self, device: usize) -> Option<Answer> {
        // SYNC(answer): pairs with the Release store in `Want::answer`.
        let word = self.wants.get(device)?.answer.load(Acquire);
        Some(Answer {
            number: word >> 16,
            // CAST: bits 8 to 15, and the lower 8 bits.
            state: OrderState::of((word >> 8) as u8)?,
            reason: Reason::of(word as u8)?,
        })
    }

    /// Where the client says that its memory is. `resident_bytes` is never above `evictable_bytes`.
    pub fn footprint(&self, device: usize) -> Footprint {
        let Some(want) = self.wants.get(device) else {
            return Footprint::default();
        };
        let evictable_bytes = want.evictable_bytes.load(Relaxed);
        Footprint {
            evictable_bytes,
            resident_bytes: want.resident_bytes.load(Relaxed).min(evictable_bytes),
            host_bytes: want.host_bytes.load(Relaxed),
            moved_out_bytes: want.moved_out_bytes.load(Relaxed),
            moved_in_bytes: want.moved_in_bytes.load(Relaxed),
        }
    }

    /// What kinds of memory stay on the device whatever happens, by the client's word: bits by the
    /// order of [`STAYING`].
    pub fn staying(&self, device: usize) -> u8 {
        let word = self.staying.get(device / 8);
        // CAST: the lowest byte is meant.
        word.map_or(0, |word| (word.load(Relaxed) >> (device % 8 * 8)) as u8)
    }

    /// Says what stays; one thread of the client's does.
    pub fn set_staying(&self, kinds: &[u8; crate::MAX_DEVICES]) {
        for (word, kinds) in self.staying.iter().zip(kinds.chunks(8)) {
            let bytes = kinds.iter().rev();
            word.store(
                bytes.fold(0, |all, kinds| all << 8 | u64::from(*kinds)),
                Relaxed,
            );
        }
    }

    /// Device memory that threads of the client wait for, in bytes.
    pub fn space_bytes(&self, device: usize) -> u64 {
        self.wants
            .get(device)
            .map_or(0, |want| want.space_bytes.load(Relaxed))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::page::{Mapped, Writers};

    const ORDER: Order = Order {
        number: 3,
        verb: Verb::Fit,
        resident_target_bytes: 1 << 30,
        deadline_mono_ns: 12_345,
    };

    #[test]
    fn an_order_arrives_as_it_was_given_and_a_later_one_replaces_it() {
        let half = ArbiterHalf::default();
        let device = half.device(1).unwrap();
        assert_eq!(device.order(), None);
        let seen = half.orders();
        assert!(half.give_order(1, &ORDER));
        assert_ne!(half.orders(), seen);
        assert_eq!(device.order(), Some(ORDER));
        let later = Order {
            number: 4,
            verb: Verb::Evict,
            resident_target_bytes: 0,
            deadline_mono_ns: 1,
        };
        assert!(half.give_order(1, &later));
        assert_eq!(device.order(), Some(later));
        assert_eq!(half.device(0).unwrap().order(), None);
        assert!(!half.give_order(crate::MAX_DEVICES, &ORDER));
    }

    #[test]
    fn an_answer_about_space_is_one_to_all_questions_before_it() {
        let half = ArbiterHalf::default();
        let device = half.device(2).unwrap();
        assert!(!device.space().answers(1));
        let given = SpaceAnswer {
            number: 7,
            confirmed: 5,
            met: 6,
            most_bytes: 3 << 30,
            ceiling_bytes: 5 << 30,
            context_bytes: 0,
        };
        assert!(half.answer_space(2, &given));
        assert!(!half.answer_space(2, &given), "nothing new");
        assert!(!half.answer_space(crate::MAX_DEVICES, &given));
        let heard = device.space();
        assert_eq!(heard, given);
        assert!(heard.answers(7) && heard.answers(1) && !heard.answers(8));
        assert!(heard.confirms(5) && !heard.confirms(6));
        assert!(heard.is_met(6) && !heard.is_met(7));
        let unknown = SpaceAnswer {
            most_bytes: u64::MAX,
            ceiling_bytes: u64::MAX,
            number: 2,
            ..given
        };
        assert!(half.answer_space(2, &unknown));
        assert_eq!(device.space(), unknown);
        assert!(device.space().answers(u32::MAX), "numbers wrap");
    }

    #[test]
    fn a_client_never_waits_for_more_than_it_can_have_and_numbers_its_questions() {
        let (page, _) = Mapped::<ClientHalf>::create(Writers::Holders).unwrap();
        let want = page.want(0).unwrap();
        assert!(want.wait_for_space_within(6, 10));
        assert!(!want.wait_for_space_within(5, 10));
        assert!(!want.wait_for_space_within(u64::MAX, u64::MAX));
        assert!(want.wait_for_space_within(4, 10));
        assert_eq!(page.space_bytes(0), 10);
        assert_eq!(page.space_asked(), 0);
        assert_eq!((page.ask_for_space(), page.ask_for_space()), (1, 2));
        assert_eq!(page.space_asked(), 2);
        page.space_asked.store(u32::MAX, Relaxed);
        assert_eq!(page.ask_for_space(), 1, "none is 0");
    }

    #[test]
    fn an_order_that_makes_no_sense_is_none() {
        let half = ArbiterHalf::default();
        half.devices[0].order.store((7 << 8) | 200, Relaxed);
        assert_eq!(half.device(0).unwrap().order(), None);
    }

    #[test]
    fn orders_that_are_read_while_they_are_written_are_never_mixed() {
        let half = ArbiterHalf::default();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for number in 1..20_000 {
                    let order = Order {
                        number,
                        verb: Verb::Fit,
                        resident_target_bytes: number * 3,
                        deadline_mono_ns: number * 7,
                    };
                    half.give_order(0, &order);
                }
            });
            let device = half.device(0).unwrap();
            let mut last = 0;
            while last < 19_999 {
                if let Some(order) = device.order() {
                    assert_eq!(order.resident_target_bytes, order.number * 3);
                    assert_eq!(order.deadline_mono_ns, order.number * 7);
                    assert!(order.number >= last);
                    last = order.number;
                }
            }
        });
    }

    #[test]
    fn answers_and_footprints_arrive_and_nonsense_is_clamped() {
        let (page, _fd) = Mapped::<ClientHalf>::create(Writers::Holders).unwrap();
        let want = page.want(2).unwrap();
        assert_eq!(page.answer(2), Some(Answer::default()));
        let answer = Answer {
            number: 9,
            state: OrderState::Refused,
            reason: Reason::HostBudget,
        };
        want.answer(answer);
        assert_eq!(page.answer(2), Some(answer));
        want.answer.store((9 << 16) | (77 << 8), Relaxed);
        assert_eq!(page.answer(2), None);

        let footprint = Footprint {
            evictable_bytes: 100,
            resident_bytes: 60,
            host_bytes: 40,
            moved_out_bytes: 1000,
            moved_in_bytes: 960,
        };
        want.set_footprint(&footprint);
        assert_eq!(page.footprint(2), footprint);
        want.resident_bytes.store(u64::MAX, Relaxed);
        assert_eq!(page.footprint(2).resident_bytes, 100);
        want.begin_waiting_for_space(5);
        want.begin_waiting_for_space(6);
        want.end_waiting_for_space(5);
        assert_eq!(page.space_bytes(2), 6);
        assert_eq!(page.space_bytes(crate::MAX_DEVICES), 0);
    }

    #[test]
    fn a_permit_to_lock_host_memory_is_for_one_request() {
        let half = ArbiterHalf::default();
        assert!(
            !half.pinning_needs_permit(),
            "an arbiter that hands none out"
        );
        half.ask_before_pinning();
        assert!(half.pinning_needs_permit());
        assert_eq!(half.pinning_permitted_until(1), None);
        let seen = half.orders();
        half.permit_pinning(7, 5_000_000);
        assert_ne!(half.orders(), seen, "a waiting agent is woken");
        assert_eq!(half.pinning_permitted_until(7), Some(5_000_000));
        assert_eq!(half.pinning_permitted_until(8), None);
        assert_eq!(half.pinning_permitted_until(0), None);
        let (page, _fd) = Mapped::<ClientHalf>::create(Writers::Holders).unwrap();
        assert_eq!(page.wants_to_pin(), 0);
        page.want_to_pin(9);
        assert_eq!(page.wants_to_pin(), 9);
        page.pin_wanted.store(1 << 20, Relaxed);
        assert_eq!(page.wants_to_pin(), 0);
    }

    #[test]
    fn kinds_that_stay_are_reported_by_device() {
        let (page, _fd) = Mapped::<ClientHalf>::create(Writers::Holders).unwrap();
        let mut kinds = [0; crate::MAX_DEVICES];
        (kinds[0], kinds[7], kinds[8], kinds[15]) = (1, 0x7f, 2, 0x40);
        page.set_staying(&kinds);
        let found: Vec<u8> = (0..crate::MAX_DEVICES)
            .map(|device| page.staying(device))
            .collect();
        assert_eq!(found, kinds);
        assert_eq!(page.staying(crate::MAX_DEVICES), 0);
    }

    #[test]
    fn permissions_are_reported_with_their_budget() {
        let half = ArbiterHalf::default();
        assert_eq!(half.residency(), ResidencyMode::default());
        let mode = ResidencyMode {
            evictable: true,
            overflow: true,
            ..ResidencyMode::default()
        };
        half.set_residency(mode, Some(4096));
        assert_eq!(half.residency(), mode);
        let only = ResidencyMode {
            prepare: true,
            ..ResidencyMode::default()
        };
        half.set_residency(only, Some(4096));
        assert_eq!(half.residency(), only);
        assert_eq!(half.host_budget_bytes(), 4096);
        half.set_residency(mode, None);
        assert_eq!(half.host_budget_bytes(), NO_LIMIT);
        let waits = ResidencyMode {
            waits: true,
            ..ResidencyMode::default()
        };
        half.set_residency(waits, None);
        assert_eq!(half.residency(), waits);
    }

    #[test]
    fn a_cap_of_what_may_be_on_the_device_arrives() {
        let half = ArbiterHalf::default();
        let cap = |half: &ArbiterHalf| half.device(0).unwrap().resident_cap();
        assert_eq!(cap(&half), None);
        for bytes in [0, 5, NO_LIMIT - 2, NO_LIMIT] {
            half.set_resident_cap(0, Some(bytes));
            assert_eq!(cap(&half), Some(bytes));
        }
        half.set_resident_cap(0, None);
        assert_eq!(cap(&half), None);
        half.set_resident_cap(crate::MAX_DEVICES, Some(1));
    }
}
