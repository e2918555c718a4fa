//! What there is for the memory of jobs: on each device, and in host memory for what is not on one.
//!
//! Owns the host's books, which the schedulers of all devices share, and what each device lacks
//! that is in nobody's account: contexts, code, processes that are part of no job. That is known
//! only while no memory is on its way.

use std::cell::{Ref, RefCell};
use std::rc::Rc;

use channel::MAX_DEVICES;
use host_memory::Memory;

use super::books::HostBooks;

/// See the module's documentation.
#[derive(Debug, Default)]
pub struct Capacity {
    books: Rc<RefCell<HostBooks>>,
    overhead_bytes: [u64; MAX_DEVICES],
    /// When the figures were taken that each device was last seen by, and when those that say what
    /// nobody accounts for.
    seen_ns: [u64; MAX_DEVICES],
    taken_ns: [u64; MAX_DEVICES],
}

impl Capacity {
    /// The books, to be read.
    pub fn books(&self) -> Ref<'_, HostBooks> {
        self.books.borrow()
    }

    /// The books, for the scheduler of a device.
    pub fn shared_books(&self) -> &Rc<RefCell<HostBooks>> {
        &self.books
    }

    /// The limit of all jobs together from here on, in bytes.
    pub fn set_host_limit(&mut self, limit_bytes: u64) {
        self.books.borrow_mut().set_limit(limit_bytes);
    }

    /// What the host has free now and in all.
    pub fn note_host(&mut self, host: Option<Memory>) {
        self.books.borrow_mut().set_free(host);
    }

    /// A device lacks `gone_bytes` while no memory is on its way, and jobs account for
    /// `booked_bytes` of them.
    pub fn note_device(&mut self, index: usize, gone_bytes: u64, booked_bytes: u64) {
        self.overhead_bytes[index] = gone_bytes.saturating_sub(booked_bytes);
        self.taken_ns[index] = self.seen_ns[index];
    }

    /// What is known of a device was true at that time.
    pub fn note_seen(&mut self, index: usize, taken_ns: u64) {
        self.seen_ns[index] = taken_ns;
    }

    /// When the figures were taken that say what nobody accounts for on a device; 0: there are
    /// none.
    pub fn taken_ns(&self, index: usize) -> u64 {
        self.taken_ns[index]
    }

    /// Another device has this place.
    pub fn forget_device(&mut self, index: usize) {
        self.overhead_bytes[index] = 0;
        (self.seen_ns[index], self.taken_ns[index]) = (0, 0);
    }

    /// What a device has for jobs, where `reserved_bytes` are kept from them.
    pub fn of_device(&self, index: usize, total_bytes: u64, reserved_bytes: u64) -> u64 {
        let kept_bytes = self.overhead_bytes[index].max(reserved_bytes);
        total_bytes.saturating_sub(kept_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_device_lacks_is_kept_from_jobs_unless_more_is_anyway() {
        let mut capacity = Capacity::default();
        assert_eq!(capacity.of_device(1, 100, 10), 90);
        capacity.note_device(1, 60, 35);
        assert_eq!(capacity.of_device(1, 100, 10), 75);
        assert_eq!(capacity.of_device(1, 100, 30), 70);
        assert_eq!(capacity.of_device(0, 100, 0), 100, "another device");
        capacity.note_device(1, 60, 70);
        assert_eq!(
            capacity.of_device(1, 100, 0),
            100,
            "they claim more than that"
        );
        capacity.note_device(1, 60, 0);
        capacity.forget_device(1);
        assert_eq!(capacity.of_device(1, 100, 0), 100);
    }
}
