//! What the work of a client weighs, and how its host gets on: client --weights, waits--> arbiter.
//!
//! Each mark of a stream comes with the sum of what was submitted to that stream up to it, in
//! nanoseconds of device time as the client knows them. So what the device has finished is the sum
//! at the last mark that it has passed, and what is in flight the difference to the last one
//! issued: two loads a stream, and nothing more on the launch path.
//!
//! The sums of a stream slot never fall, also where another stream gets the slot. They are there
//! before their mark is issued; [`WEIGHED_MARKS`] of them are remembered.

use crate::layout::{
    ClientHalf, HostSide, LAYOUT_MINOR, MAX_DEVICES, StreamWeights, WEIGHED_MARKS, Weights,
};
use crate::sync::{Acquire, AtomicU32, Relaxed, fence};

/// The first layout that has them.
const SINCE_MINOR: u32 = 5;
const _: () = assert!(LAYOUT_MINOR >= SINCE_MINOR);

/// What the marks of one stream say.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Weighed {
    /// Device of the stream.
    pub device: usize,
    /// Last mark that the device has passed, and the last one issued.
    pub done: u64,
    /// See [`Weighed::done`].
    pub issued: u64,
    /// Sum up to the mark that the device has passed, in nanoseconds; `None`: more marks are in
    /// flight than are remembered.
    pub passed_ns: Option<u64>,
    /// Sum up to the last mark issued.
    pub submitted_ns: u64,
}

/// Client side.
impl ClientHalf {
    /// The weights, where the page has them.
    pub fn weights(&self) -> Option<&Weights> {
        self.is_since(SINCE_MINOR).then_some(&self.weights)
    }

    /// How the host gets on with `device`, where the page has that.
    pub fn host_side(&self, device: usize) -> Option<&HostSide> {
        self.weights()?.host.get(device)
    }

    /// Says that every mark from here on is weighed.
    pub fn set_weighs(&self) {
        self.weighs.store(1, Relaxed);
    }

    /// Whether the page is of that layout, or a later one.
    #[cfg(not(loom))]
    fn is_since(&self, minor: u32) -> bool {
        // CAST: the lower half is the minor version.
        self.header.ready.load(Acquire) as u32 >= minor
    }

    #[cfg(loom)]
    fn is_since(&self, _: u32) -> bool {
        true
    }

    /// Says what the next mark of stream slot `slot` covers, in nanoseconds of device time. Before
    /// the mark is issued; again for the same mark where it was withdrawn.
    pub fn weigh_next(&self, slot: usize, ns: u64) {
        if let (Some(weights), Some(stream)) = (self.weights(), self.streams.get(slot))
            && let Some(of) = weights.streams.get(slot)
        {
            let issued = stream.issued();
            let upto_ns = of.at(issued).load(Relaxed).saturating_add(ns);
            // SYNC(mark): published by the Release store of the mark.
            of.at(issued.wrapping_add(1)).store(upto_ns, Relaxed);
        }
    }

    /// The last mark of stream slot `slot` covers so much more.
    pub fn weigh_more(&self, slot: usize, ns: u64) {
        if let (Some(weights), Some(stream)) = (self.weights(), self.streams.get(slot))
            && let Some(of) = weights.streams.get(slot)
        {
            let upto = of.at(stream.issued());
            upto.store(upto.load(Relaxed).saturating_add(ns), Relaxed);
        }
    }
}

impl StreamWeights {
    fn at(&self, mark: u64) -> &crate::sync::AtomicU64 {
        // PANIC: the modulus is the length. CAST: below it.
        &self.upto_ns[(mark % WEIGHED_MARKS as u64) as usize]
    }
}

impl HostSide {
    /// Threads that wait until less is in flight than the window holds.
    pub fn at_window(&self) -> &AtomicU32 {
        &self.at_window
    }

    /// Threads in a call that waits for the device.
    pub fn in_wait(&self) -> &AtomicU32 {
        &self.in_wait
    }

    /// Work has been submitted to a stream that had nothing left to do, and not because the gate
    /// had been closed.
    pub fn count_fresh(&self) {
        self.fresh.fetch_add(1, Relaxed);
    }
}

/// Arbiter side: a stranger's numbers.
impl ClientHalf {
    /// Whether the client weighs its marks.
    pub fn weighs(&self) -> bool {
        self.weights().is_some() && self.weighs.load(Relaxed) != 0
    }

    /// Threads that wait for `device` because of us: at the gate, or at a full window.
    pub fn held_up(&self, device: usize) -> u32 {
        let at_window = self
            .host_side(device)
            .map_or(0, |side| side.at_window.load(Relaxed));
        self.waiting(device).saturating_add(at_window)
    }

    /// Threads in a call that waits for `device`.
    pub fn in_wait(&self, device: usize) -> u32 {
        let in_wait = self
            .host_side(device)
            .map_or(0, |side| side.in_wait.load(Relaxed));
        self.blocking(device).saturating_add(in_wait)
    }

    /// How often work found its stream without any, ever.
    pub fn fresh(&self, device: usize) -> u64 {
        self.host_side(device)
            .map_or(0, |side| side.fresh.load(Relaxed))
    }

    /// What the marks of stream slot `slot` say; `None`: it has no stream.
    pub fn weighed(&self, slot: usize) -> Option<Weighed> {
        let stream = self.streams.get(slot)?;
        let of = self.weights()?.streams.get(slot)?;
        let device = (stream.device_plus_one.load(Relaxed) as usize).checked_sub(1)?;
        if device >= MAX_DEVICES {
            return None;
        }
        // SYNC(mark): Acquire, so that what a mark weighs is seen with it.
        let done = stream.done.load(Acquire);
        let issued = stream.issued.load(Acquire);
        let submitted_ns = of.at(issued).load(Relaxed);
        let passed_ns = of.at(done).load(Relaxed);
        // SYNC(weights): the sum was read before the number of marks. It is written again when as
        // many are in flight as there are sums; one may be written before the mark before it is
        // seen issued.
        fence(Acquire);
        let behind = stream.issued.load(Relaxed).wrapping_sub(done);
        let whole = behind < WEIGHED_MARKS as u64 - 2;
        Some(Weighed {
            device,
            done,
            issued,
            passed_ns: whole.then_some(passed_ns),
            submitted_ns,
        })
    }

    /// The largest weight of one of the marks of stream slot `slot` after `since` up to `done`, in
    /// nanoseconds, of those that are remembered.
    pub fn largest_ns(&self, slot: usize, since: u64, done: u64) -> u64 {
        let Some(of) = self.weights().and_then(|of| of.streams.get(slot)) else {
            return 0;
        };
        let marks = done.wrapping_sub(since).min(WEIGHED_MARKS as u64 / 2);
        let weight = |mark: u64| {
            let before = of.at(mark.wrapping_sub(1)).load(Relaxed);
            of.at(mark).load(Relaxed).saturating_sub(before)
        };
        let marks = (0..marks).map(|back| done.wrapping_sub(back));
        marks.map(weight).max().unwrap_or(0)
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use crate::arbiter::ClientPages;

    #[test]
    fn what_has_passed_is_the_sum_at_the_last_mark_that_has() {
        let pages = ClientPages::create().expect("pages");
        let client = &pages.client;
        assert!(!client.weighs());
        client.set_weighs();
        assert!(client.weighs());
        let (slot, stream) = client.claim_stream(3).expect("slot");
        for ns in [100, 7, 50] {
            client.weigh_next(slot, ns);
            stream.issue();
        }
        let said = client.weighed(slot).expect("a stream");
        assert_eq!((said.device, said.done, said.issued), (3, 0, 3));
        assert_eq!((said.passed_ns, said.submitted_ns), (Some(0), 157));
        stream.passed(2);
        let said = client.weighed(slot).expect("a stream");
        assert_eq!((said.passed_ns, said.submitted_ns), (Some(107), 157));
        assert_eq!(client.largest_ns(slot, 0, 2), 100);
        assert_eq!(client.largest_ns(slot, 1, 2), 7);
        assert_eq!(client.largest_ns(slot, 2, 2), 0);
        client.weigh_more(slot, 5);
        assert_eq!(client.weighed(slot).expect("a stream").submitted_ns, 162);
    }

    #[test]
    fn a_mark_that_was_withdrawn_weighs_nothing() {
        let pages = ClientPages::create().expect("pages");
        let client = &pages.client;
        let (slot, stream) = client.claim_stream(0).expect("slot");
        client.weigh_next(slot, 9);
        let mark = stream.issue();
        stream.withdraw(mark);
        assert_eq!(client.weighed(slot).expect("a stream").submitted_ns, 0);
        client.weigh_next(slot, 4);
        stream.issue();
        assert_eq!(client.weighed(slot).expect("a stream").submitted_ns, 4);
    }

    #[test]
    fn of_more_marks_than_are_remembered_nobody_says_what_has_passed() {
        let pages = ClientPages::create().expect("pages");
        let client = &pages.client;
        let (slot, stream) = client.claim_stream(0).expect("slot");
        for _ in 0..super::WEIGHED_MARKS {
            client.weigh_next(slot, 1);
            stream.issue();
        }
        let said = client.weighed(slot).expect("a stream");
        let all = super::WEIGHED_MARKS as u64;
        assert_eq!((said.passed_ns, said.submitted_ns), (None, all));
        stream.passed(3);
        let said = client.weighed(slot).expect("a stream");
        assert_eq!((said.passed_ns, said.submitted_ns), (Some(3), all));
    }

    /// A page as short as those of before, which says that it is of this version.
    #[test]
    fn a_page_that_lies_about_its_length_is_read_as_zeroes() {
        use rustix::fs::{MemfdFlags, SealFlags};
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("short", flags).expect("memory");
        let bytes = <crate::ClientHalf as crate::Page>::LEAST_BYTES;
        rustix::fs::ftruncate(&fd, bytes as u64).expect("sized");
        let ready = u64::from(crate::LAYOUT_MAJOR) << 32 | u64::from(crate::LAYOUT_MINOR);
        let header = [ready.to_le_bytes(), *b"subletCL"].concat();
        rustix::io::pwrite(&fd, &header, 0).expect("written");
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK).expect("sealed");
        let pages = ClientPages::adopt(fd).expect("taken");
        let client = &pages.client;
        let (last, _) = (0..crate::STREAM_SLOTS)
            .filter_map(|_| client.claim_stream(0))
            .next_back()
            .expect("slots");
        let said = client.weighed(last).expect("a stream");
        assert_eq!((said.passed_ns, said.submitted_ns), (Some(0), 0));
        assert_eq!((client.fresh(15), client.held_up(15)), (0, 0));
        client.weigh_next(last, 5);
    }

    #[test]
    fn who_waits_is_counted_by_device() {
        let pages = ClientPages::create().expect("pages");
        let client = &pages.client;
        client.want(1).expect("device").begin_waiting();
        client.want(1).expect("device").begin_blocking();
        let side = client.host_side(1).expect("a page of ours");
        side.at_window().fetch_add(1, super::Relaxed);
        side.in_wait().fetch_add(2, super::Relaxed);
        side.count_fresh();
        assert_eq!((client.held_up(1), client.in_wait(1)), (2, 3));
        assert_eq!((client.held_up(0), client.in_wait(0)), (0, 0));
        assert_eq!((client.fresh(1), client.fresh(0)), (1, 0));
    }
}
