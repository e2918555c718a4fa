//! What a device does of this process's work, on all streams together, and what it takes.
//!
//! Streams share the device: the time in which one of them gets on is also the others', and a look
//! at one of them tells its own part only beside what all of them did meanwhile. Sums of weight, in
//! nanoseconds, that each thread adds to where it marks what it has submitted: a device begins what
//! a thread gives it in that order, and so a mark that has passed on one stream says how far it is
//! with the others.
//!
//! What the device did in a time can have taken no longer than that. A submission that had a mark
//! of its own says "at most" as well, but marks are rare where kernels are short, and looks are as
//! rare as marks: such a sample is never shorter than the time between two looks. So what was done
//! in an *epoch*, of some marks, is held against its length: by that factor a submission in it
//! weighs too much, or, where the device was seen busy all the time, and with nobody else's work,
//! too little.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use channel::MAX_DEVICES;

use crate::gate::cost::{self, SoloSample};

/// One more for each unit test that counts for itself.
const COUNTS: usize = MAX_DEVICES + if cfg!(test) { 256 } else { 0 };
/// Looks that saw something pass, in an epoch: each is late by as much as the time between two.
const LOOKS: u64 = 16;

/// The sums of a device; they wrap around.
pub(crate) struct Throughput {
    submitted_ns: AtomicU64,
    passed_ns: AtomicU64,
    /// What was submitted at the end of the last epoch. It weighed what was known then: the next
    /// one begins when it has passed.
    from_ns: AtomicU64,
    /// When the epoch began, at the latest and at the earliest; 0: not yet.
    begun_ns: AtomicU64,
    earliest_ns: AtomicU64,
    /// What had passed by then.
    before_ns: AtomicU64,
    looks: AtomicU64,
    /// Somebody saw all of his work over, or waits for the host: it took no longer than the epoch.
    idle: AtomicBool,
    /// A submission in the epoch that has a mark of its own, see [`SoloSample`], and what it
    /// weighed; 0: none yet.
    sample: AtomicU64,
    weight_ns: AtomicU64,
    /// Work of other jobs is on the device at the same time: how long ours takes by the clock says
    /// at most what it takes of the device.
    shared: AtomicBool,
}

static DEVICES: [Throughput; COUNTS] = [const {
    Throughput {
        submitted_ns: AtomicU64::new(0),
        passed_ns: AtomicU64::new(0),
        from_ns: AtomicU64::new(0),
        begun_ns: AtomicU64::new(0),
        earliest_ns: AtomicU64::new(0),
        before_ns: AtomicU64::new(0),
        looks: AtomicU64::new(0),
        idle: AtomicBool::new(false),
        sample: AtomicU64::new(0),
        weight_ns: AtomicU64::new(0),
        shared: AtomicBool::new(false),
    }
}; COUNTS];

/// Of device `index` of the pages.
pub(crate) fn of(index: usize) -> &'static Throughput {
    &DEVICES[index % COUNTS] // PANIC: the modulus is the length.
}

impl Throughput {
    /// Says whether other jobs' work is on the device at the same time.
    pub(crate) fn set_shared(&self, shared: bool) {
        if self.is_shared() != shared {
            self.shared.store(shared, Relaxed);
        }
    }

    /// Whether it is.
    pub(crate) fn is_shared(&self) -> bool {
        self.shared.load(Relaxed)
    }

    /// Weight of what threads had submitted when they marked something last.
    pub(crate) fn submitted_ns(&self) -> u64 {
        self.submitted_ns.load(Relaxed)
    }

    /// And by the youngest marks that they saw passed.
    pub(crate) fn passed_ns(&self) -> u64 {
        self.passed_ns.load(Relaxed)
    }

    pub(crate) fn submit(&self, weight_ns: u64) {
        self.submitted_ns.fetch_add(weight_ns, Relaxed);
    }

    /// A thread has looked, and so much more had passed, the last of it between then and now.
    /// `idle`: all that the thread has marked. `let_in_ns`: when the gate last let it in.
    ///
    /// Threads that look at once may lose an epoch, or end it twice: either does no harm.
    pub(crate) fn pass(
        &self,
        weight_ns: u64,
        idle: bool,
        let_in_ns: u64,
        (then_ns, now_ns): (u64, u64),
    ) {
        if weight_ns == 0 {
            if idle {
                self.note_idle();
            }
            return;
        }
        let passed_ns = self.passed_ns.fetch_add(weight_ns, Relaxed);
        let passed_ns = passed_ns.wrapping_add(weight_ns);
        let begun_ns = self.begun_ns.load(Relaxed);
        if begun_ns == 0 || let_in_ns > begun_ns {
            let left_ns = self.from_ns.load(Relaxed).wrapping_sub(passed_ns);
            if left_ns == 0 || left_ns > u64::MAX / 2 {
                self.begin(passed_ns, then_ns, now_ns);
            }
            return;
        }
        if idle {
            self.note_idle();
        }
        if self.looks.fetch_add(1, Relaxed) + 1 < LOOKS {
            return;
        }
        if let Some(sample) = SoloSample::from_word(self.sample.load(Relaxed)) {
            let done_ns = passed_ns.wrapping_sub(self.before_ns.load(Relaxed));
            let weight_ns = self.weight_ns.load(Relaxed);
            let part_of = |took_ns: u64| {
                let ns = u128::from(weight_ns) * u128::from(took_ns) / u128::from(done_ns.max(1));
                u64::try_from(ns).unwrap_or(u64::MAX)
            };
            let most_ns = part_of(now_ns.saturating_sub(self.earliest_ns.load(Relaxed)));
            let least_ns = match self.idle.load(Relaxed) || self.is_shared() {
                true => 0,
                false => part_of(then_ns.saturating_sub(begun_ns)),
            };
            let ns = weight_ns.max(least_ns).min(most_ns);
            // What it weighs by now may not be what it weighed in the epoch. What the device's
            // clock has measured stays.
            if ns != weight_ns && cost::of_class(sample.class).map(u64::from) == Some(weight_ns) {
                sample.learn(ns);
            }
            self.from_ns.store(self.submitted_ns(), Relaxed);
            self.begun_ns.store(0, Relaxed);
        }
    }

    fn begin(&self, passed_ns: u64, then_ns: u64, now_ns: u64) {
        self.earliest_ns.store(then_ns, Relaxed);
        self.before_ns.store(passed_ns, Relaxed);
        self.looks.store(0, Relaxed);
        self.idle.store(false, Relaxed);
        self.sample.store(0, Relaxed);
        self.begun_ns.store(now_ns, Relaxed);
    }

    /// The device may have had nothing to do.
    pub(crate) fn note_idle(&self) {
        if !self.idle.load(Relaxed) {
            self.idle.store(true, Relaxed);
        }
    }

    /// A submission has a mark of its own and weighs so much.
    pub(crate) fn sample(&self, sample: SoloSample, weight_ns: u64) {
        if !sample.guessed && self.sample.load(Relaxed) == 0 {
            self.weight_ns.store(weight_ns, Relaxed);
            self.sample.store(sample.word(), Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A device of a test's own, and a class that weighs so much.
    fn with_weight(device: usize, weight_ns: u64) -> (&'static Throughput, SoloSample) {
        let sample = SoloSample {
            signature: 0,
            class: 0x7b_0000 + 2 * device as u32,
            guessed: false,
        };
        cost::learn(0, sample.class, weight_ns);
        (of(COUNTS - 1 - device), sample)
    }

    /// Submissions that weigh what is known pass at such a rate, looked at now and then; what they
    /// weigh in the end.
    fn weight_after(
        together: &Throughput,
        sample: SoloSample,
        each_ns: u64,
        idle: bool,
        let_in_ns: impl Fn(u64) -> u64,
    ) -> u64 {
        let weight_ns = || u64::from(cost::of_class(sample.class).expect("known"));
        let (mut now_ns, mut then_ns) = (1_000_000_000, 1_000_000_000);
        for _ in 0..2000 {
            let ns = weight_ns();
            together.submit(10 * ns);
            together.sample(sample, ns);
            now_ns += 10 * each_ns;
            together.pass(10 * ns, idle, let_in_ns(now_ns), (then_ns, now_ns));
            then_ns = now_ns;
        }
        weight_ns()
    }

    #[test]
    fn what_was_done_in_a_time_took_no_longer() {
        let (together, sample) = with_weight(0, 680_000);
        let weight_ns = weight_after(together, sample, 3_500, true, |_| 0);
        assert!((3_500..=4_000).contains(&weight_ns), "{weight_ns}");
    }

    #[test]
    fn only_what_kept_the_device_busy_took_as_long() {
        let (together, sample) = with_weight(1, 2_000);
        assert_eq!(weight_after(together, sample, 50_000, true, |_| 0), 2_000);
        let (together, sample) = with_weight(4, 2_000);
        let weight_ns = weight_after(together, sample, 50_000, false, |_| 0);
        assert!((45_000..=50_000).contains(&weight_ns), "{weight_ns}");
    }

    #[test]
    fn what_others_had_of_the_device_makes_no_kernel_heavier() {
        let (together, sample) = with_weight(5, 2_000);
        together.set_shared(true);
        // Busy all the time, and with others' work for most of it.
        assert_eq!(weight_after(together, sample, 50_000, false, |_| 0), 2_000);
        let (together, sample) = with_weight(6, 680_000);
        together.set_shared(true);
        let weight_ns = weight_after(together, sample, 3_500, false, |_| 0);
        assert!((3_500..=4_000).contains(&weight_ns), "{weight_ns}");
    }

    #[test]
    fn what_the_devices_clock_has_measured_stays_however_much_passes() {
        for (device, shared) in [(7, true), (8, false)] {
            let (together, sample) = with_weight(device, 680_000);
            sample.measured(200_000);
            let measured_ns = cost::of_class(sample.class).map(u64::from);
            together.set_shared(shared);
            for each_ns in [3_500, 5_000_000] {
                let weight_ns = weight_after(together, sample, each_ns, false, |_| 0);
                assert_eq!(Some(weight_ns), measured_ns, "{each_ns} ns each");
            }
        }
    }

    #[test]
    fn time_at_the_gate_is_nobodys() {
        // Let in again before each look.
        let let_in_ns = |now_ns| now_ns - 1;
        for (device, each_ns) in [(2, 80_000), (3, 1_500)] {
            let (together, sample) = with_weight(device, 9_000);
            let weight_ns = weight_after(together, sample, each_ns, false, let_in_ns);
            assert_eq!(weight_ns, 9_000, "{each_ns} ns each");
        }
    }
}
