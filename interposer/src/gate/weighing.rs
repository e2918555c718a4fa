//! What a submission takes by the device's own clock, where other jobs are on the device as well.
//!
//! There the host's clock says little of it: what lies between two looks is others' work as well as
//! ours. So now and then a submission that has a mark of its own lies between two *events* of ours.
//! Both are asked for where marks of its stream are looked at anyway, and nobody waits for them.
//!
//! Where the stream was never empty from the one event to the other, the time between them is the
//! submission's. Otherwise the device may have waited for the host in between, for no longer than
//! the calls took. Where that is little beside the whole it does not count; else the time is "at
//! most". Either way another context may have had the device for a slice: see the median in
//! [`crate::gate::cost`].
//!
//! There is a pair of events per slot, made when it is first needed, in the context of the slot,
//! and touched by the thread that holds it. Events of another context than the slot's are never
//! touched again: that context may be ending. A process that ends a green context is not measured
//! any more, for it is not known which slots are of that one. A pair whose events have not both
//! passed is not used again. If anything fails nothing is measured.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use channel::{Holding, STREAM_SLOTS};
use shim_ffi::*;

use crate::driver::real;
use crate::gate::cost::{self, SoloSample};
use crate::gate::failure::is_final;
use crate::gate::streams::LEGACY;
use crate::gate::{capture, slots};
use crate::ground::clock::now_ns;
use crate::ground::process;
use crate::ground::thread::{Thread, thread};

/// Refusals in a row after which no more is tried in this process.
const REFUSALS: u32 = 3;
/// One in so many submissions that have marks of their own is measured, where its class is known
/// well.
const MARKS_PER_MEASUREMENT: u32 = 8;
/// What part of the time between two events does not count.
const UNKNOWN_PART: u64 = 32;

static REFUSED: AtomicU32 = AtomicU32::new(0);
/// Nothing is measured any more.
static STOPPED: AtomicBool = AtomicBool::new(false);
/// The last measurement.
static NUMBER: AtomicU32 = AtomicU32::new(0);

/// What the driver is asked for. A trait, for tests.
trait Clock {
    fn create(&self) -> Result<usize, CUresult>;
    fn record(&self, event: usize, stream: usize) -> CUresult;
    fn query(&self, event: usize) -> CUresult;
    /// From the one event to the other, in nanoseconds.
    fn elapsed_ns(&self, before: usize, after: usize) -> Result<u64, CUresult>;
    /// By the host's clock.
    fn now_ns(&self) -> u64;
}

/// The pair of a slot.
struct Pair {
    /// Context that the events were made in.
    context: AtomicUsize,
    before: AtomicUsize,
    after: AtomicUsize,
    /// The measurement whose first event is recorded and whose second is not; 0: none.
    begun: AtomicU32,
    /// When that was, at the earliest.
    begun_ns: AtomicU64,
    /// Both are recorded, and the second has not been seen passed.
    pending: AtomicBool,
    /// For how long the device may have waited for the host in between.
    unknown_ns: AtomicU64,
    /// The submission between them, see [`SoloSample`].
    sample: AtomicU64,
    /// Submissions that might have been measured since the last one that was.
    since: AtomicU32,
}

static PAIRS: [Pair; STREAM_SLOTS] = [const { Pair::new() }; STREAM_SLOTS];

fn pair(index: usize) -> &'static Pair {
    &PAIRS[index % STREAM_SLOTS] // PANIC: the modulus is the length.
}

impl Pair {
    const fn new() -> Self {
        Self {
            context: AtomicUsize::new(0),
            before: AtomicUsize::new(0),
            after: AtomicUsize::new(0),
            begun: AtomicU32::new(0),
            begun_ns: AtomicU64::new(0),
            pending: AtomicBool::new(false),
            unknown_ns: AtomicU64::new(0),
            sample: AtomicU64::new(0),
            since: AtomicU32::new(0),
        }
    }

    fn is_pending(&self) -> bool {
        self.pending.load(Ordering::Relaxed)
    }

    /// Whether a submission is to be measured.
    fn is_wanted(&self, sample: SoloSample) -> bool {
        if self.is_pending() {
            return false;
        }
        let since = self.since.load(Ordering::Relaxed).saturating_add(1);
        self.since.store(since, Ordering::Relaxed);
        since >= MARKS_PER_MEASUREMENT || sample.guessed || cost::is_to_be_tried(sample.class)
    }

    /// Before the submission: the number of the measurement.
    fn begin(
        &self,
        clock: &impl Clock,
        (stream, context): (usize, usize),
        sample: SoloSample,
    ) -> Result<u32, CUresult> {
        self.since.store(0, Ordering::Relaxed);
        cost::tried(sample.class);
        if self.context.swap(context, Ordering::Relaxed) != context {
            for event in [&self.before, &self.after] {
                event.store(0, Ordering::Relaxed);
            }
        }
        for event in [&self.before, &self.after] {
            if event.load(Ordering::Relaxed) == 0 {
                event.store(clock.create()?, Ordering::Relaxed);
            }
        }
        self.begun.store(0, Ordering::Relaxed);
        self.begun_ns.store(clock.now_ns(), Ordering::Relaxed);
        match clock.record(self.before.load(Ordering::Relaxed), stream) {
            CUresult::CUDA_SUCCESS => {}
            status => return Err(status),
        }
        self.sample.store(sample.word(), Ordering::Relaxed);
        let number = match NUMBER.fetch_add(1, Ordering::Relaxed).wrapping_add(1) {
            0 => 1,
            number => number,
        };
        self.begun.store(number, Ordering::Relaxed);
        Ok(number)
    }

    /// After the submission.
    fn finish(&self, clock: &impl Clock, stream: usize) -> Result<(), CUresult> {
        match clock.record(self.after.load(Ordering::Relaxed), stream) {
            CUresult::CUDA_SUCCESS => {}
            status => return Err(status),
        }
        // What the first event waits for was there all the time.
        let unknown_ns = match clock.query(self.before.load(Ordering::Relaxed)) {
            CUresult::CUDA_ERROR_NOT_READY => 0,
            _ => (clock.now_ns()).saturating_sub(self.begun_ns.load(Ordering::Relaxed)),
        };
        self.unknown_ns.store(unknown_ns, Ordering::Relaxed);
        self.pending.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Learns what has been measured.
    fn look(&self, clock: &impl Clock) -> Result<(), CUresult> {
        let (before, after) = (
            self.before.load(Ordering::Relaxed),
            self.after.load(Ordering::Relaxed),
        );
        match clock.query(after) {
            CUresult::CUDA_SUCCESS => {}
            CUresult::CUDA_ERROR_NOT_READY => return Ok(()),
            status => {
                self.pending.store(false, Ordering::Relaxed);
                return Err(status);
            }
        }
        self.pending.store(false, Ordering::Relaxed);
        let took_ns = clock.elapsed_ns(before, after)?;
        let unknown_ns = self.unknown_ns.load(Ordering::Relaxed);
        if took_ns != 0
            && let Some(sample) = SoloSample::from_word(self.sample.load(Ordering::Relaxed))
        {
            match unknown_ns <= took_ns / UNKNOWN_PART {
                true => sample.measured(took_ns),
                false => sample.measured_at_most(took_ns),
            }
        }
        Ok(())
    }

    /// Its events are gone.
    fn forget(&self) {
        for word in [&self.context, &self.before, &self.after] {
            word.store(0, Ordering::Relaxed);
        }
        self.begun.store(0, Ordering::Relaxed);
        self.pending.store(false, Ordering::Relaxed);
    }
}

/// The driver.
struct Device;

fn event(handle: usize) -> CUevent {
    CUevent(std::ptr::without_provenance_mut(handle))
}

fn relaxed(calls: impl FnOnce() -> CUresult) -> CUresult {
    thread().own(|| match capture::any() {
        true => capture::relaxed(calls),
        false => calls(),
    })
}

impl Clock for Device {
    fn create(&self) -> Result<usize, CUresult> {
        let mut made = CUevent::NULL;
        // SAFETY: valid pointer to a local; no flags: an event that takes the time.
        match relaxed(|| unsafe { real::cuEventCreate(&raw mut made, 0) }) {
            CUresult::CUDA_SUCCESS => Ok(made.0.addr()),
            status => Err(status),
        }
    }

    fn record(&self, handle: usize, stream: usize) -> CUresult {
        let stream = CUstream(std::ptr::without_provenance_mut(stream));
        // SAFETY: an event of ours, and a stream that has not been destroyed, for its slot is held;
        // the caller has made sure that it is not being captured.
        relaxed(|| unsafe { real::cuEventRecord(event(handle), stream) })
    }

    fn query(&self, handle: usize) -> CUresult {
        // SAFETY: an event of ours that was recorded.
        relaxed(|| unsafe { real::cuEventQuery(event(handle)) })
    }

    fn elapsed_ns(&self, before: usize, after: usize) -> Result<u64, CUresult> {
        let mut ms = 0.0_f32;
        // SAFETY: valid pointer to a local; events of ours that were recorded.
        let asked = relaxed(|| unsafe {
            real::cuEventElapsedTime(&raw mut ms, event(before), event(after))
        });
        match asked {
            // CAST: a time that is not negative; rounded to nanoseconds.
            CUresult::CUDA_SUCCESS => Ok((f64::from(ms) * 1e6).max(0.0) as u64),
            status => Err(status),
        }
    }

    fn now_ns(&self) -> u64 {
        now_ns()
    }
}

/// Whether events may be recorded in a stream now: the driver has not refused them, exit has not
/// begun, and no call of ours would become part of a capture or end one.
fn is_possible(stream: usize) -> bool {
    is_asked() && !(capture::any() && (stream == LEGACY || capture::is_capturing(stream)))
}

/// Whether the driver is asked for anything.
fn is_asked() -> bool {
    REFUSED.load(Ordering::Relaxed) < REFUSALS
        && !STOPPED.load(Ordering::Relaxed)
        && !process::exiting()
}

/// What the driver has said. What has failed for good refuses everything.
fn note(answer: Result<(), CUresult>) {
    match answer {
        Ok(()) if REFUSED.load(Ordering::Relaxed) != 0 => REFUSED.store(0, Ordering::Relaxed),
        Err(status) if !is_final(status) => {
            REFUSED.fetch_add(1, Ordering::Relaxed);
        }
        _ => {}
    }
}

/// Whether a submission of a class that is known, to the stream of slot `index`, is to have a mark
/// of its own so that it can be measured.
pub(crate) fn is_to_be_tried(index: usize, class: u32) -> bool {
    is_asked() && !pair(index).is_pending() && cost::is_to_be_tried(class)
}

/// Right before a submission to the stream of the thread's slot `index` that is to have a mark of
/// its own: the number of its measurement; 0: there is none.
pub(crate) fn begin(thread: &Thread, index: usize, sample: SoloSample) -> u32 {
    let pair = pair(index);
    if !is_asked() || !pair.is_wanted(sample) {
        return 0;
    }
    let Some(_held) = slots::hold(index, thread.who.get()) else {
        return 0;
    };
    let (stream, context) = (slots::key(index), slots::context(index));
    // Events are made in the current context, and good for streams of that one alone.
    if thread.context.get() != context || !is_possible(stream) {
        return 0;
    }
    let begun = pair.begin(&Device, (stream, context), sample);
    note(begun.map(|_| ()));
    begun.unwrap_or(0)
}

/// Right after it.
pub(crate) fn finish(thread: &Thread, index: usize, number: u32) {
    let (pair, Some(_held)) = (pair(index), slots::hold(index, thread.who.get())) else {
        return;
    };
    // A signal handler may have begun another one since.
    if pair.begun.load(Ordering::Relaxed) != number {
        return;
    }
    pair.begun.store(0, Ordering::Relaxed);
    let stream = slots::key(index);
    if is_possible(stream) {
        note(pair.finish(&Device, stream));
    }
}

/// Looks what has been measured of the stream of a slot that is held.
pub(crate) fn look(index: usize, _held: &Holding<'_>) {
    let pair = pair(index);
    if pair.is_pending() && is_asked() {
        note(pair.look(&Device));
    }
}

/// Before a green context goes: nothing is measured from then on.
pub(crate) fn stop() {
    STOPPED.store(true, Ordering::Relaxed);
}

/// A slot has a new owner: what is measured in its stream has not begun.
pub(crate) fn begin_slot(index: usize) {
    let pair = pair(index);
    pair.begun.store(0, Ordering::Relaxed);
    pair.pending.store(false, Ordering::Relaxed);
}

/// In a forked child.
pub(crate) fn forget() {
    REFUSED.store(0, Ordering::Relaxed);
    STOPPED.store(false, Ordering::Relaxed);
    PAIRS.iter().for_each(Pair::forget);
}

/// A context has gone, and its events with it.
pub(crate) fn context_gone(context: usize) {
    let of_it = |pair: &&Pair| pair.context.load(Ordering::Relaxed) == context;
    PAIRS.iter().filter(of_it).for_each(Pair::forget);
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};

    use super::*;

    const NOT_READY: CUresult = CUresult::CUDA_ERROR_NOT_READY;
    const OK: CUresult = CUresult::CUDA_SUCCESS;
    const REFUSAL: CUresult = CUresult::CUDA_ERROR_NOT_SUPPORTED;

    /// A device whose answers a test sets.
    struct Fake {
        /// To every call, but for questions.
        answer: Cell<CUresult>,
        /// To questions, by the event.
        before: Cell<CUresult>,
        after: Cell<CUresult>,
        elapsed_ns: Cell<u64>,
        now_ns: Cell<u64>,
        live: RefCell<Vec<usize>>,
        recorded: RefCell<Vec<usize>>,
    }

    impl Fake {
        fn new() -> Self {
            Self {
                answer: Cell::new(OK),
                before: Cell::new(NOT_READY),
                after: Cell::new(NOT_READY),
                elapsed_ns: Cell::new(0),
                now_ns: Cell::new(1_000_000),
                live: RefCell::default(),
                recorded: RefCell::default(),
            }
        }

        fn answered<T>(&self, value: T) -> Result<T, CUresult> {
            match self.answer.get() {
                OK => Ok(value),
                status => Err(status),
            }
        }
    }

    impl Clock for Fake {
        fn create(&self) -> Result<usize, CUresult> {
            let event = self.live.borrow().iter().max().map_or(1, |last| last + 1);
            self.answered(event)?;
            self.live.borrow_mut().push(event);
            Ok(event)
        }

        fn record(&self, event: usize, _: usize) -> CUresult {
            assert!(self.live.borrow().contains(&event));
            self.recorded.borrow_mut().push(event);
            self.answer.get()
        }

        fn query(&self, event: usize) -> CUresult {
            match event % 2 {
                1 => self.before.get(),
                _ => self.after.get(),
            }
        }

        fn elapsed_ns(&self, before: usize, after: usize) -> Result<u64, CUresult> {
            assert_eq!(before + 1, after);
            self.answered(self.elapsed_ns.get())
        }

        fn now_ns(&self) -> u64 {
            self.now_ns.get()
        }
    }

    const WHERE: (usize, usize) = (0x100, 0xc0);

    /// A class of a test's own that is thought to take a millisecond.
    fn sample(kernel: u64) -> SoloSample {
        let class = crate::gate::signature::class_of_kernel(0xb_0000 + kernel, (1, 1, 1));
        cost::learn(0, class, 1_000_000);
        SoloSample {
            signature: 0,
            class,
            guessed: false,
        }
    }

    /// Measures what takes so long; the host takes 6 us for the calls around it.
    fn measure(pair: &Pair, device: &Fake, sample: SoloSample, took_ns: u64, queued: bool) {
        device.after.set(NOT_READY);
        device.before.set(NOT_READY);
        pair.begin(device, WHERE, sample).expect("begun");
        device.now_ns.set(device.now_ns.get() + 6_000);
        if !queued {
            device.before.set(OK);
        }
        pair.finish(device, WHERE.0).expect("recorded");
        assert!(pair.is_pending());
        device.elapsed_ns.set(took_ns);
        device.after.set(OK);
        pair.look(device).expect("measured");
        assert!(!pair.is_pending());
    }

    #[track_caller]
    fn assert_weighs(sample: SoloSample, expected_ns: u32) {
        let ns = cost::of_class(sample.class).expect("known");
        assert!(ns.abs_diff(expected_ns) <= expected_ns / 1000, "{ns}");
    }

    #[test]
    fn behind_other_work_the_time_between_the_events_is_the_submissions() {
        let (pair, device, sample) = (Pair::new(), Fake::new(), sample(0));
        for took_ns in [5_000, 2_005_000, 5_020] {
            measure(&pair, &device, sample, took_ns, true);
        }
        assert_weighs(sample, 5_000);
        measure(&pair, &device, sample, 5_040, true);
        assert_weighs(sample, 5_020);
        assert_eq!(device.recorded.borrow().as_slice(), [1, 2].repeat(4));
    }

    #[test]
    fn in_an_empty_stream_it_is_at_most_unless_the_hosts_part_is_small() {
        let (pair, device, sample) = (Pair::new(), Fake::new(), sample(1));
        measure(&pair, &device, sample, 1_200_000, false);
        assert_weighs(sample, 1_200_000);
        measure(&pair, &device, sample, 20_000, false);
        assert_weighs(sample, 20_000);
        measure(&pair, &device, sample, 30_000, false);
        assert_weighs(sample, 20_000);
        measure(&pair, &device, sample, 0, false);
        assert_weighs(sample, 20_000);
    }

    #[test]
    fn a_pair_that_has_not_passed_is_not_used_again() {
        let (pair, device, sample) = (Pair::new(), Fake::new(), sample(2));
        assert!(pair.is_wanted(sample), "three are wanted first");
        pair.begin(&device, WHERE, sample).expect("begun");
        assert!(pair.is_wanted(sample), "what was begun may be given up");
        pair.begin(&device, WHERE, sample).expect("begun");
        pair.finish(&device, WHERE.0).expect("recorded");
        for _ in 0..100 {
            assert!(!pair.is_wanted(sample));
            pair.look(&device).expect("not yet");
        }
        assert_weighs(sample, 1_000_000);
        device.after.set(OK);
        device.elapsed_ns.set(50_000);
        pair.look(&device).expect("measured");
        assert!(pair.is_wanted(sample));
        assert_weighs(sample, 50_000);
    }

    #[test]
    fn what_is_known_well_is_measured_in_its_turn() {
        let (pair, device, sample) = (Pair::new(), Fake::new(), sample(3));
        let mut measured = 0;
        for _ in 0..3 + 8 * 10 {
            if pair.is_wanted(sample) {
                measure(&pair, &device, sample, 50_000, true);
                measured += 1;
            }
        }
        assert_eq!(measured, 3 + 10);
        let guessed = true;
        assert!(pair.is_wanted(SoloSample { guessed, ..sample }));
    }

    #[test]
    fn each_context_has_events_of_its_own_and_those_of_another_are_left_alone() {
        let (pair, device, sample) = (Pair::new(), Fake::new(), sample(4));
        measure(&pair, &device, sample, 50_000, true);
        pair.begin(&device, (0x200, 0xc1), sample).expect("begun");
        assert_eq!(device.live.borrow().len(), 4);
        let begun = device.recorded.borrow().last().copied();
        assert_eq!(begun, Some(3), "the first of the new ones");
        pair.finish(&device, 0x200).expect("recorded");
        pair.forget();
        assert!(!pair.is_pending());
        let made = device.live.borrow().clone();
        pair.begin(&device, (0x200, 0xc1), sample).expect("begun");
        assert_eq!(device.live.borrow().len(), made.len() + 2);
    }

    /// One test: what was refused is the process's.
    #[test]
    fn a_few_refusals_end_the_trying_and_nothing_is_learnt_from_them() {
        let (pair, device, sample) = (Pair::new(), Fake::new(), sample(5));
        let begin = || {
            let begun = pair.begin(&device, WHERE, sample);
            note(begun.map(|_| ()));
            begun
        };
        device.answer.set(REFUSAL);
        assert_eq!(begin(), Err(REFUSAL));
        assert_eq!(begin(), Err(REFUSAL));
        device.answer.set(OK);
        assert!(begin().is_ok());
        device.answer.set(CUresult::CUDA_ERROR_LAUNCH_FAILED);
        for _ in 0..REFUSALS {
            assert!(begin().is_err());
        }
        assert!(is_asked(), "that was not about events");
        device.answer.set(REFUSAL);
        note(pair.finish(&device, WHERE.0));
        assert!(!pair.is_pending());
        device.answer.set(OK);
        pair.finish(&device, WHERE.0).expect("recorded");
        device.answer.set(REFUSAL);
        device.after.set(OK);
        note(pair.look(&device));
        assert!(!pair.is_pending());
        pair.pending.store(true, Ordering::Relaxed);
        device.after.set(REFUSAL);
        assert!(is_asked());
        note(pair.look(&device));
        assert!(!is_asked() && !is_possible(WHERE.0));
        assert_weighs(sample, 1_000_000);
        forget();
        assert!(is_asked(), "a forked child");
    }
}
