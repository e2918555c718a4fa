//! What is known of a stream's completion marks, and what is learnt from them as they pass.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use channel::StreamSlot;

use crate::gate::cost::SoloSample;
use crate::gate::throughput;

/// Marks remembered per slot. Those in flight never exceed it while a window is set.
pub(crate) const RING: usize = 32;

/// Marks in flight in a stream of which it is not known how fast its work gets on: what its kernels
/// took elsewhere, or with other parameters, need not be what they take here.
const FEW: usize = 2;
/// What is seen of several streams' work within so long says what it takes, even if nobody looked
/// in between.
const BESIDE_NS: u64 = 50_000_000;
/// Where other jobs' work is on the device at the same time a mark may pass so much later than by
/// its own work. TIMEOUT: one slice of the hardware's, 2 ms, for each of some twenty contexts; what
/// stands for longer does so for its own reasons.
const OTHERS_NS: u64 = 40_000_000;
/// Marks pass late by less than this for the host's reasons.
const OVERDUE_NS: u64 = 500_000;

/// The part of the device's time that marks of one stream have had.
#[derive(Clone, Copy)]
struct Share {
    /// Their weight.
    own_ns: u64,
    /// That of all work of the process that the device was seen to have done meanwhile; not less.
    all_ns: u64,
    /// Nothing else was under way, and they were looked for often enough to say how long they took.
    exact: bool,
    /// Other work was done, and not long ago: "at most" is better than a guess.
    beside: bool,
    /// So it may have been for other jobs.
    others: bool,
}

impl Share {
    /// Of so much time.
    fn of(&self, ns: u64) -> u64 {
        if self.exact || self.own_ns == self.all_ns {
            return ns;
        }
        let ns = u128::from(ns) * u128::from(self.own_ns) / u128::from(self.all_ns.max(1));
        u64::try_from(ns).unwrap_or(u64::MAX)
    }
}

/// What is known of a slot's marks. Touched by the slot's owning thread.
pub(crate) struct StreamRate {
    /// When each of the last marks was issued.
    issued_ns: [AtomicU64; RING],
    /// Weight of the submissions to the stream up to each of the last marks, in nanoseconds.
    upto: [AtomicU64; RING],
    /// Which of the last marks cover one submission, and which, see [`SoloSample`]; else 0.
    solo: [AtomicU64; RING],
    /// What its thread had submitted to all of its streams by each of the last marks.
    thread_upto: [AtomicU64; RING],
    /// Weight of the submissions to the stream up to the last mark.
    total: AtomicU64,
    /// Which device's sums these are part of; what they were when each of the last marks was
    /// issued, and when one was last seen passed.
    device: AtomicUsize,
    all_at_issue: [AtomicU64; RING],
    all_passed: AtomicU64,
    /// Last mark whose weight is a guess.
    guessed: AtomicU64,
    /// Marks, by [`bit_of`], that cover what may wait for the host.
    waits: AtomicU64,

    /// Last mark that was seen passed, and when.
    seen: AtomicU64,
    seen_ns: AtomicU64,
    /// When it was last looked for.
    looked_ns: AtomicU64,
    /// When a mark was last seen to have passed, or the first one behind it was issued, whichever
    /// is later: since then nothing has moved.
    moved_ns: AtomicU64,
    /// When the gate last let the thread in after a wait: what waits there is not the device's
    /// time.
    pub(crate) let_in_ns: AtomicU64,
    /// Device time of what weighs [`SCALE`] nanoseconds; 0: not learnt yet.
    pace: AtomicU64,
    /// What it was learnt from, the recent past weighing most: device time and weight. A mean of
    /// the two sums, and not of the samples' ratios, because programs mix kernels of microseconds
    /// with kernels of milliseconds.
    sum_ns: AtomicU64,
    sum_weight: AtomicU64,
}

/// Of the pace.
const SCALE: u64 = 1024;
/// Work is not taken for faster or slower than so many times its weight.
const MOST_PACE: u64 = 1024 * SCALE;
const LEAST_PACE: u64 = SCALE / 64;

/// A sum in which what came before weighs fifteen sixteenths.
fn decayed(sum: u64, new: u64) -> u64 {
    (sum - sum / 16).saturating_add(new)
}

impl StreamRate {
    pub(crate) const fn new() -> Self {
        Self {
            issued_ns: [const { AtomicU64::new(0) }; RING],
            upto: [const { AtomicU64::new(0) }; RING],
            solo: [const { AtomicU64::new(0) }; RING],
            thread_upto: [const { AtomicU64::new(0) }; RING],
            total: AtomicU64::new(0),
            device: AtomicUsize::new(0),
            all_at_issue: [const { AtomicU64::new(0) }; RING],
            all_passed: AtomicU64::new(0),
            guessed: AtomicU64::new(0),
            waits: AtomicU64::new(0),

            seen: AtomicU64::new(0),
            seen_ns: AtomicU64::new(0),
            looked_ns: AtomicU64::new(0),
            moved_ns: AtomicU64::new(0),
            let_in_ns: AtomicU64::new(0),
            pace: AtomicU64::new(0),
            sum_ns: AtomicU64::new(0),
            sum_weight: AtomicU64::new(0),
        }
    }

    /// A new owner knows nothing of what the last one learnt; its work begins now.
    pub(crate) fn reset(&self, slot: &StreamSlot, device: usize, now_ns: u64) {
        let done = slot.done();
        self.waits.store(0, Ordering::Relaxed);
        self.device.store(device, Ordering::Relaxed);
        let all_passed = self.together().passed_ns();
        self.all_passed.store(all_passed, Ordering::Relaxed);
        // PANIC: the modulus is the length.
        self.all_at_issue[done as usize % RING].store(all_passed, Ordering::Relaxed);
        self.seen_ns.store(now_ns, Ordering::Relaxed);
        self.looked_ns.store(now_ns, Ordering::Relaxed);
        self.moved_ns.store(now_ns, Ordering::Relaxed);
        // PANIC: the modulus is the length.
        self.issued_ns[done as usize % RING].store(now_ns, Ordering::Relaxed);
        self.total.store(0, Ordering::Relaxed);
        self.seen.store(done, Ordering::Relaxed);
        self.guessed.store(done, Ordering::Relaxed);

        // PANIC: the modulus is the length.
        self.upto[done as usize % RING].store(0, Ordering::Relaxed);
        // What another thread has submitted is of no concern here. PANIC: likewise.
        self.thread_upto[done as usize % RING].store(0, Ordering::Relaxed);
        self.pace.store(0, Ordering::Relaxed);
        self.sum_ns.store(0, Ordering::Relaxed);
        self.sum_weight.store(0, Ordering::Relaxed);
    }

    /// What the device does on all streams of the process.
    fn together(&self) -> &'static throughput::Throughput {
        throughput::of(self.device.load(Ordering::Relaxed))
    }

    /// Notes a mark that covers `weight_ns` more.
    /// Its thread has submitted `thread_ns` by now, to all of its streams.
    pub(crate) fn issued(
        &self,
        mark: u64,
        weight_ns: u64,
        solo: Option<SoloSample>,
        thread_ns: u64,
        now_ns: u64,
    ) {
        if mark.wrapping_sub(1) == self.seen.load(Ordering::Relaxed) {
            self.moved_ns.store(now_ns, Ordering::Relaxed);
        }
        self.waits
            .fetch_and(!bit_of(mark.wrapping_add(2)), Ordering::Relaxed);
        let total = self.total.load(Ordering::Relaxed).wrapping_add(weight_ns);
        self.total.store(total, Ordering::Relaxed);
        let together = self.together();
        let at = mark as usize % RING; // PANIC: the modulus is the length, in all five.
        self.thread_upto[at].store(thread_ns, Ordering::Relaxed);
        self.all_at_issue[at].store(together.passed_ns(), Ordering::Relaxed);
        self.upto[at].store(total, Ordering::Relaxed);
        self.solo[at].store(solo.map_or(0, SoloSample::word), Ordering::Relaxed);
        self.issued_ns[at].store(now_ns, Ordering::Relaxed);
        if solo.is_some_and(|solo| solo.guessed) {
            self.guessed.store(mark, Ordering::Relaxed);
        }
    }

    /// What mark `mark`, the next one, is going to cover may wait for the host.
    pub(crate) fn waits_at(&self, mark: u64) {
        self.waits.fetch_or(bit_of(mark), Ordering::Relaxed);
    }

    /// Whether what the stream stands at may wait for the host.
    pub(crate) fn may_wait(&self, slot: &StreamSlot) -> bool {
        let next = slot.done().wrapping_add(1);
        !slot.is_idle() && self.waits.load(Ordering::Relaxed) & bit_of(next) != 0
    }

    /// What the thread had submitted by the last mark that has passed, and when; `None` where that
    /// is not remembered.
    pub(crate) fn reached(&self, slot: &StreamSlot) -> Option<(u64, u64)> {
        let done = slot.done();
        let remembered = slot.issued().wrapping_sub(done) < RING as u64;
        let at = done as usize % RING;
        // PANIC: the modulus is the length, in both.
        let upto_ns = self.thread_upto[at].load(Ordering::Relaxed);
        remembered.then(|| (upto_ns, self.issued_ns[at].load(Ordering::Relaxed)))
    }

    /// When the last mark was issued.
    pub(crate) fn last_issued_ns(&self, slot: &StreamSlot) -> u64 {
        // PANIC: the modulus is the length.
        self.issued_ns[slot.issued() as usize % RING].load(Ordering::Relaxed)
    }

    /// Weight of the submissions up to `mark`, one of the last.
    fn upto(&self, mark: u64) -> u64 {
        self.upto[mark as usize % RING].load(Ordering::Relaxed) // PANIC: the modulus is the length.
    }

    fn solo(&self, mark: u64) -> Option<SoloSample> {
        // PANIC: the modulus is the length.
        SoloSample::from_word(self.solo[mark as usize % RING].load(Ordering::Relaxed))
    }

    /// Looks which marks have passed, and learns from them what submissions take. `just_now`: the
    /// program was asleep until they had passed.
    ///
    /// `reached_ns`: what of its thread's work has been counted as passed by now.
    pub(crate) fn observe(&self, slot: &StreamSlot, reached_ns: u64, now_ns: u64, just_now: bool) {
        let (done, seen) = (slot.done(), self.seen.load(Ordering::Relaxed));
        let looked_ns = self.looked_ns.swap(now_ns, Ordering::Relaxed);
        let passed = done.wrapping_sub(seen);
        if passed == 0 || passed > u64::MAX / 2 {
            return;
        }
        self.seen.store(done, Ordering::Relaxed);
        self.moved_ns.store(now_ns, Ordering::Relaxed);
        let seen_ns = self.seen_ns.swap(now_ns, Ordering::Relaxed);
        let together = self.together();
        // A mark may have passed since.
        // PANIC: the modulus is the length.
        let upto_ns = self.thread_upto[done as usize % RING].load(Ordering::Relaxed);
        let uncounted_ns = upto_ns.saturating_sub(reached_ns);
        let all_passed = together.passed_ns().wrapping_add(uncounted_ns);
        let all_before = self.all_passed.swap(all_passed, Ordering::Relaxed);
        if slot.issued().wrapping_sub(seen) >= RING as u64 {
            return; // older than what is remembered
        }
        if (1..=passed).any(|step| slot.is_host_wait(seen.wrapping_add(step))) {
            return; // part of that was not the device's time
        }
        let let_in_ns = self.let_in_ns.load(Ordering::Relaxed);
        // PANIC: the modulus is the length.
        let first_issued_ns =
            self.issued_ns[seen.wrapping_add(1) as usize % RING].load(Ordering::Relaxed);
        if let_in_ns > first_issued_ns {
            return; // it went on while the thread waited at the gate, and nobody looked
        }
        // The work of a mark begins after the mark before it was issued, at the earliest, and after
        // that had passed. Where the program pauses in between this is too early, and the estimate
        // too high: then marks come more often, and tell better. The other way round an estimate
        // that is too low would never be put right.
        let begun_ns = seen_ns
            // PANIC: the modulus is the length.
            .max(self.issued_ns[seen as usize % RING].load(Ordering::Relaxed))
            .max(let_in_ns);
        let took_ns = now_ns.saturating_sub(begun_ns).max(1);
        // What the device did of the process's since then, as far as that was seen; and what it may
        // have done.
        let own_ns = self.upto(done).wrapping_sub(self.upto(seen)).max(1);
        // PANIC: the modulus is the length.
        let at_issue = self.all_at_issue[seen as usize % RING].load(Ordering::Relaxed);
        let missed = at_issue.wrapping_sub(all_before);
        let all_begun = if missed < u64::MAX / 2 {
            at_issue
        } else {
            all_before
        };
        let all_ns = all_passed.wrapping_sub(all_begun).max(own_ns);
        let own_issued_ns = (self.total.load(Ordering::Relaxed)).wrapping_sub(self.upto(seen));
        let others_ns =
            (together.submitted_ns().wrapping_sub(all_begun)).saturating_sub(own_issued_ns);
        // Others may have had the device for part of it.
        let others = together.is_shared() && took_ns < OTHERS_NS;
        // A look that comes late says "at most" of what is shorter than the time between two.
        let exact = !others && (just_now || now_ns.saturating_sub(looked_ns) <= took_ns / 2);
        let share = Share {
            own_ns,
            all_ns,
            exact: exact && others_ns < took_ns / 2,
            beside: all_ns > own_ns && took_ns < BESIDE_NS,
            others,
        };
        // Where something is still in flight the device was busy all the time. Otherwise the marks
        // passed somewhere between the last look and this one; where the looks are far apart the
        // sample says only "at most".
        let busy = slot.issued() != done;
        let timely =
            just_now || busy || now_ns.saturating_sub(looked_ns) <= (took_ns / 2).max(200_000);
        let tight = timely && !others;
        // What was not over at the last look took at least until then; the others have the rest.
        let first_ns = match passed {
            1 => took_ns,
            _ => looked_ns.saturating_sub(begun_ns).min(took_ns),
        };
        self.learn(seen, done, (took_ns, first_ns), share, tight);
    }

    /// The marks after `seen` up to `done` have taken `took_ns`, the first of them at least
    /// `first_ns`, and that is their `share` of the device's time. Not `tight`: at most.
    fn learn(
        &self,
        seen: u64,
        done: u64,
        (all_took_ns, first_ns): (u64, u64),
        share: Share,
        tight: bool,
    ) {
        let (took_ns, first_ns) = (share.of(all_took_ns), share.of(first_ns));
        let passed = done.wrapping_sub(seen);
        let weight_of = |mark: u64| {
            self.upto(mark)
                .wrapping_sub(self.upto(mark.wrapping_sub(1)))
        };
        // Its part of what they took, which is "at most".
        let part_of = |mark: u64| {
            let own_ns = share.own_ns;
            let of_mark = weight_of(mark);
            Share {
                own_ns: of_mark,
                all_ns: own_ns,
                exact: false,
                ..share
            }
            .of(took_ns)
        };
        let marks = || (1..=passed).map(|step| seen.wrapping_add(step));
        let is_guess = |mark: &u64| self.solo(*mark).is_some_and(|solo| solo.guessed);
        let guesses = marks().filter(is_guess).count() as u64;
        let certain = share.exact && !self.together().is_shared();
        let teach = |solo: SoloSample, ns: u64| match certain {
            true => solo.learn_exactly(ns),
            false => solo.learn(ns),
        };
        if passed == 1
            && let Some(solo) = self.solo(done)
        {
            // Beside others a single one tells less than all of them together, see `throughput`.
            let beside = !share.exact && share.beside;
            let shorter = !beside && took_ns < self.expected_ns(weight_of(done));
            let at_most = beside || share.others;
            if (solo.guessed && (tight || at_most)) || (!solo.guessed && (share.exact || shorter)) {
                teach(solo, took_ns);
            }
            // A guess says nothing of the pace.
            if solo.guessed {
                return;
            }
        } else if guesses != 0 {
            if !share.exact && (share.beside || share.others) {
                for mark in marks().filter(is_guess) {
                    if let Some(solo) = self.solo(mark) {
                        solo.learn(part_of(mark));
                    }
                }
                return;
            }
            if !tight {
                return;
            }
            let first = seen.wrapping_add(1);
            let known_ns: u64 = marks()
                .filter(|mark| *mark != first && !is_guess(mark))
                .map(weight_of)
                .sum();
            let rest_ns = (took_ns - first_ns).saturating_sub(self.expected_ns(known_ns));
            let others = guesses - u64::from(is_guess(&first));
            for mark in marks().filter(is_guess) {
                let ns = match mark == first {
                    true => first_ns.max(took_ns / passed),
                    false => rest_ns / others.max(1),
                };
                if let Some(solo) = self.solo(mark) {
                    solo.learn(ns);
                }
            }
            return;
        } else if tight
            && (share.exact || !share.beside)
            && first_ns > took_ns / 2
            && let Some(solo) = self.solo(seen.wrapping_add(1))
        {
            teach(solo, first_ns);
        }
        // How fast the device is with others' work says nothing of the job's own. What was learnt
        // without it stays; where that is nothing, work takes what its kernels weigh.
        if self.together().is_shared() {
            if !self.is_known() {
                self.pace.store(SCALE, Ordering::Relaxed);
            }
            return;
        }
        // All streams' work in all of the time: a stream alone looks the slower, the more of them
        // there are.
        let weight_ns = share.all_ns;
        // A first pace may be "at most": work is taken for longer than it is then, for a time.
        let learnt = self.pace.load(Ordering::Relaxed) != 0;
        if tight || !learnt || all_took_ns < self.expected_ns(weight_ns) {
            let ns = decayed(self.sum_ns.load(Ordering::Relaxed), all_took_ns);
            let weight = decayed(self.sum_weight.load(Ordering::Relaxed), weight_ns);
            self.sum_ns.store(ns, Ordering::Relaxed);
            self.sum_weight.store(weight, Ordering::Relaxed);
            let pace = ns.saturating_mul(SCALE) / weight.max(1);
            self.pace
                .store(pace.clamp(LEAST_PACE, MOST_PACE), Ordering::Relaxed);
        }
    }

    /// Device time of the stream's work of such a weight.
    pub(crate) fn expected_ns(&self, weight_ns: u64) -> u64 {
        match self.pace.load(Ordering::Relaxed) {
            0 => weight_ns,
            pace => weight_ns.saturating_mul(pace) / SCALE,
        }
    }

    /// Weight of so much device time; not 0.
    pub(crate) fn weight_of(&self, ns: u64) -> u64 {
        match self.pace.load(Ordering::Relaxed) {
            0 => ns.max(1),
            pace => (ns.saturating_mul(SCALE) / pace).max(1),
        }
    }

    /// Weight that streams in use together may be given in so much device time: the mean of what
    /// each of them could alone.
    pub(crate) fn weight_together<'a>(of: impl Iterator<Item = &'a Self>, ns: u64) -> u64 {
        let add = |(sum, count): (u64, u64), rate: &Self| {
            (sum.saturating_add(rate.weight_of(ns)), count + 1)
        };
        let (sum, count) = of.fold((0, 0), add);
        sum / count.max(1)
    }

    /// Whether it is known how fast the stream's work gets on.
    pub(crate) fn is_known(&self) -> bool {
        self.pace.load(Ordering::Relaxed) != 0
    }

    /// Whether what is in flight fits `window_ns`.
    pub(crate) fn fits(&self, slot: &StreamSlot, window_ns: u64, now_ns: u64) -> bool {
        let behind = slot.issued().wrapping_sub(slot.done());
        if behind == 0 || behind > u64::MAX / 2 {
            return true;
        }
        let most = if self.is_known() { RING - 2 } else { FEW };
        if behind as usize >= most {
            return false;
        }
        let oldest = slot.done().wrapping_add(1);
        let queued_ns = self.queued_ns(slot);
        let runs_ns = now_ns.saturating_sub(self.begun_ns(oldest));
        // How long it may stand: by the clock, of which others may have had a part.
        let shared = self.together().is_shared();
        let stands_ns = if shared {
            window_ns.max(OTHERS_NS)
        } else {
            window_ns
        };
        if self.guesses(slot) {
            // What takes longer than the window makes the queue at least that long, whatever was
            // guessed.
            return runs_ns <= stands_ns && queued_ns <= window_ns;
        }
        // Of the work that runs now a part is over. The more of it is, the sooner the next may be
        // queued behind it, so that the device has no pause while the program notices its end. What
        // takes longer than it ever took may take any time.
        let oldest_ns = self.expected_ns(self.upto(oldest).wrapping_sub(self.upto(slot.done())));
        // And what takes twice as long as it should, with more of its kind behind it, keeps the
        // device busy while it is found out how long that is. Where others are on the device at the
        // same time it may just as well be their turn there.
        let slow = runs_ns > oldest_ns.saturating_mul(2).max(OVERDUE_NS);
        let overdue = behind > 1 && slow && !shared;
        runs_ns <= stands_ns.max(oldest_ns)
            && !overdue
            && queued_ns.saturating_sub(runs_ns.min(oldest_ns)) <= window_ns
    }

    /// For how long nothing of what is in flight has passed.
    pub(crate) fn stood_ns(&self, now_ns: u64) -> u64 {
        now_ns.saturating_sub(self.moved_ns())
    }

    /// When it was seen last that something has passed.
    pub(crate) fn moved_ns(&self) -> u64 {
        self.moved_ns.load(Ordering::Relaxed)
    }

    /// Device time of what is in flight. Anybody may ask; of another thread's slot the answer may
    /// be a moment old.
    pub(crate) fn queued_ns(&self, slot: &StreamSlot) -> u64 {
        let upto = self.upto(slot.done());
        self.expected_ns(self.total.load(Ordering::Relaxed).wrapping_sub(upto))
    }

    /// When the work of a mark began at the latest, the one before it having passed.
    fn begun_ns(&self, mark: u64) -> u64 {
        // PANIC: the modulus is the length.
        let issued_ns = self.issued_ns[mark as usize % RING].load(Ordering::Relaxed);
        issued_ns
            .max(self.seen_ns.load(Ordering::Relaxed))
            .max(self.let_in_ns.load(Ordering::Relaxed))
    }

    /// Whether something is in flight whose weight is a guess.
    pub(crate) fn guesses(&self, slot: &StreamSlot) -> bool {
        let behind = self
            .guessed
            .load(Ordering::Relaxed)
            .wrapping_sub(slot.done());
        behind != 0 && behind < u64::MAX / 2
    }
}

/// The bit of a mark: those in flight are fewer.
fn bit_of(mark: u64) -> u64 {
    1 << (mark % 64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gate::cost;
    use crate::gate::signature::Seen;

    const MS: u64 = 1_000_000;

    fn solo(key: u32, guessed: bool) -> Option<SoloSample> {
        Some(SoloSample {
            signature: key | 1,
            class: key & !1,
            guessed,
        })
    }

    fn seen(key: u32) -> Seen {
        Seen {
            signature: key | 1,
            copies: 0,
            class: key & !1,
        }
    }

    /// A device that no other test counts on.
    fn device() -> usize {
        static NEXT: AtomicUsize = AtomicUsize::new(channel::MAX_DEVICES);
        NEXT.fetch_add(1, Ordering::Relaxed)
    }

    fn begun() -> (StreamRate, StreamSlot) {
        begun_on(device())
    }

    fn begun_on(device: usize) -> (StreamRate, StreamSlot) {
        let (rate, slot) = (StreamRate::new(), StreamSlot::default());
        rate.reset(&slot, device, 10 * MS);
        (rate, slot)
    }

    /// A thread that launches a kernel of one class every `launch_ns` at best, on so many streams
    /// in turn, for a second; the device does one after another and is never more than `ahead_ns`
    /// behind. A stream is marked after every `per_mark` of its kernels, and looked at when it is;
    /// the ones after one mark in eight have marks of their own. What the kernels weigh then.
    fn weight_after_a_second(
        streams: usize,
        (kernel_ns, launch_ns, ahead_ns): (u64, u64, u64),
        per_mark: usize,
    ) -> u64 {
        static NEXT: AtomicUsize = AtomicUsize::new(0x4a_0010);
        let key = NEXT.fetch_add(2, Ordering::Relaxed) as u32;
        let device = device();
        let all: Vec<_> = (0..streams).map(|_| begun_on(device)).collect();
        let together = throughput::of(device);
        let mut outstanding = std::collections::VecDeque::new();
        let mut unmarked = vec![(0, 0); streams];
        let (mut now_ns, mut over_ns, mut kernels) = (10 * MS, 0_u64, 0);
        let (mut submitted_ns, mut counted_ns, mut reached_ns, mut marks) = (0, 0, 0, 0);
        let mut looked_ns = 0;
        while now_ns < 1010 * MS {
            let at = kernels % streams;
            kernels += 1;
            now_ns = (now_ns + launch_ns).max(over_ns.saturating_sub(ahead_ns));
            let (rate, slot) = &all[at];
            let weight = cost::of(seen(key));
            let ns = weight.map_or(MS / 2, u64::from);
            let apart = weight.is_none() || marks >= 8;
            let mut mark = |of: Option<SoloSample>,
                            weight: u64,
                            submitted_ns: u64,
                            over_ns: u64| {
                together.submit(submitted_ns - std::mem::replace(&mut counted_ns, submitted_ns));
                let (mut youngest_ns, mut then_ns) = (reached_ns, looked_ns);
                while let Some((at, mark, ns, upto_ns, issued_ns)) = outstanding.front().copied() {
                    if ns > now_ns {
                        break;
                    }
                    let (_, slot): &(StreamRate, StreamSlot) = &all[at];
                    slot.passed(mark);
                    youngest_ns = upto_ns;
                    then_ns = then_ns.max(issued_ns);
                    outstanding.pop_front();
                }
                let passed_ns = youngest_ns - std::mem::replace(&mut reached_ns, youngest_ns);
                together.pass(passed_ns, outstanding.is_empty(), 0, (then_ns, now_ns));
                looked_ns = now_ns;
                rate.observe(slot, 0, now_ns, false);
                if let Some(sample) = of {
                    together.sample(sample, weight);
                }
                let mark = slot.issue();
                rate.issued(mark, weight, of, submitted_ns, now_ns);
                outstanding.push_back((at, mark, over_ns, submitted_ns, now_ns));
            };
            if apart && unmarked[at].0 > 0 {
                mark(None, unmarked[at].1, submitted_ns, over_ns);
                unmarked[at] = (0, 0);
            }
            over_ns = over_ns.max(now_ns) + kernel_ns;
            submitted_ns += ns;
            if apart {
                mark(solo(key, weight.is_none()), ns, submitted_ns, over_ns);
                marks = 0;
                continue;
            }
            unmarked[at] = (unmarked[at].0 + 1, unmarked[at].1 + ns);
            if unmarked[at].0 == per_mark {
                mark(None, unmarked[at].1, submitted_ns, over_ns);
                unmarked[at] = (0, 0);
                marks += 1;
            }
        }
        u64::from(cost::of(seen(key)).expect("it is known by then"))
    }

    #[test]
    fn a_stream_stands_at_a_wait_from_the_mark_before_it_to_its_own() {
        let (rate, slot) = begun();
        let mark = |waits: bool| {
            if waits {
                rate.waits_at(slot.issued() + 1);
            }
            let mark = slot.issue();
            rate.issued(mark, MS, None, 0, 10 * MS);
            mark
        };
        for _ in 0..200 {
            let [work, waits, behind] = [false, true, false].map(mark);
            assert!(!rate.may_wait(&slot), "work is before it");
            slot.passed(work);
            assert!(rate.may_wait(&slot), "it stands there");
            slot.passed(waits);
            assert!(!rate.may_wait(&slot), "it is past it");
            slot.passed(behind);
            assert!(!rate.may_wait(&slot), "it is idle");
        }
    }

    #[test]
    fn weights_are_right_after_a_second_however_many_streams_there_are() {
        for streams in [1, 2, 8, 16, 64, 65, 128] {
            for (kernel_ns, launch_ns, per_mark) in [
                (1_000, 3_500, 4),
                (1_000, 3_500, 40),
                (3_000, 3_500, 10),
                (20_000, 3_500, 5),
                (200_000, 5_000, 2),
            ] {
                let program = (kernel_ns, launch_ns, MS);
                let weight = weight_after_a_second(streams, program, per_mark);
                println!("now: {kernel_ns} ns every {launch_ns} on {streams} weigh {weight}");
                // What a kernel takes is known no better than from how many there are in a time.
                let most = 2 * kernel_ns.max(launch_ns);
                assert!(
                    (kernel_ns / 2..=most).contains(&weight),
                    "{streams} streams, {per_mark} a mark: {kernel_ns} ns weigh {weight}"
                );
            }
        }
    }

    /// Issues a mark at that time, of that weight.
    fn issue(
        rate: &StreamRate,
        slot: &StreamSlot,
        at_ns: u64,
        weight_ns: u64,
        of: Option<SoloSample>,
    ) {
        rate.observe(slot, 0, at_ns, false);
        rate.issued(slot.issue(), weight_ns, of, 0, at_ns);
    }

    #[test]
    fn one_submission_tells_what_it_takes() {
        let (rate, slot) = begun();
        issue(&rate, &slot, 10 * MS, MS, solo(0x98_5150, true));
        assert!(rate.guesses(&slot));
        rate.observe(&slot, 0, 30 * MS, false);
        slot.settle();
        assert!(!rate.guesses(&slot));
        rate.observe(&slot, 0, 60 * MS, true);
        assert_eq!(cost::of(seen(0x98_5150)), Some(50 * MS as u32));
        // A guess says nothing of the pace.
        assert_eq!(rate.expected_ns(MS), MS);
    }

    #[test]
    fn what_is_known_to_take_long_fills_the_window_by_itself() {
        let (rate, slot) = begun();
        issue(&rate, &slot, 10 * MS, MS / 2, None);
        slot.settle();
        rate.observe(&slot, 0, 10 * MS + MS / 2, true);
        for step in 0..4 {
            issue(&rate, &slot, 11 * MS + step, MS / 2, None);
        }
        assert!(rate.fits(&slot, 2 * MS, 11 * MS + 10));
        issue(&rate, &slot, 11 * MS + 4, 50 * MS, solo(0x98_5250, false));
        assert!(!rate.fits(&slot, 2 * MS, 11 * MS + 10));
        slot.settle();
        assert!(rate.fits(&slot, 2 * MS, 11 * MS + 10));
    }

    #[test]
    fn the_pace_is_a_mean_over_the_recent_past() {
        let (rate, slot) = begun();
        let mut now_ns = 10 * MS;
        for _ in 0..200 {
            issue(&rate, &slot, now_ns, MS / 10, None);
            now_ns += MS / 5;
            slot.settle();
            rate.observe(&slot, 0, now_ns, true);
        }
        assert_eq!(rate.expected_ns(MS), 2 * MS);
        assert_eq!(rate.weight_of(2 * MS), MS);
    }

    #[test]
    fn little_is_in_flight_until_the_pace_is_known() {
        let (rate, slot) = begun();
        issue(&rate, &slot, 10 * MS, MS / 50, None);
        assert!(rate.fits(&slot, 2 * MS, 10 * MS + 1));
        issue(&rate, &slot, 10 * MS + 1, MS / 50, None);
        assert!(!rate.fits(&slot, 2 * MS, 10 * MS + 2), "nobody knows yet");
        rate.observe(&slot, 0, 10 * MS + MS / 100, false);
        slot.settle();
        rate.observe(&slot, 0, 10 * MS + MS / 25, true);
        assert!(rate.is_known());
        for step in 0..8 {
            issue(&rate, &slot, 11 * MS + step, MS / 50, None);
        }
        assert!(rate.fits(&slot, 2 * MS, 11 * MS + 10));
    }

    #[test]
    fn no_more_is_queued_behind_what_takes_much_longer_than_it_did() {
        let (rate, slot) = begun();
        for step in 0..8 {
            let at_ns = 10 * MS + step * MS / 4;
            issue(&rate, &slot, at_ns, MS / 4, None);
            rate.observe(&slot, 0, at_ns + MS / 4 - 1, false);
            slot.settle();
            rate.observe(&slot, 0, at_ns + MS / 4, true);
        }
        for step in 0..3 {
            issue(&rate, &slot, 20 * MS + step, MS / 4, None);
        }
        let fits = |at_ns: u64| rate.fits(&slot, 2 * MS, at_ns);
        assert!(fits(20 * MS + MS / 4) && fits(20 * MS + MS / 2));
        assert!(!fits(20 * MS + MS), "a quarter was expected");
    }

    #[test]
    fn a_turn_of_others_on_the_device_is_not_taken_for_work_that_takes_longer() {
        let device = device();
        let (rate, slot) = begun_on(device);
        throughput::of(device).set_shared(true);
        for step in 0..8 {
            let at_ns = 10 * MS + step * MS / 4;
            issue(&rate, &slot, at_ns, MS / 4, None);
            slot.settle();
            rate.observe(&slot, 0, at_ns + MS / 4, true);
        }
        for step in 0..3 {
            issue(&rate, &slot, 20 * MS + step, MS / 4, None);
        }
        let fits = |at_ns: u64| rate.fits(&slot, 2 * MS, at_ns);
        assert!(fits(20 * MS + MS) && fits(25 * MS), "0.75 ms of its own");
        assert!(!fits(90 * MS), "nobody has so many neighbours");
        throughput::of(device).set_shared(false);
        assert!(!fits(20 * MS + MS), "a quarter was expected");
    }

    #[test]
    fn in_flight_work_counts_by_what_it_takes_itself_and_not_by_what_others_took() {
        let device = device();
        let (rate, slot) = begun_on(device);
        // Alone it takes what it weighs.
        for step in 0..40 {
            let at_ns = 10 * MS + step * MS / 4;
            issue(&rate, &slot, at_ns, MS / 4, solo(0x40, false));
            rate.observe(&slot, 0, at_ns + MS / 4 - 1, false);
            slot.settle();
            rate.observe(&slot, 0, at_ns + MS / 4, true);
        }
        let before = (rate.expected_ns(MS), cost::of(seen(0x40)));
        assert_eq!(before, (MS, Some(MS as u32 / 4)));
        // Then others have nine tenths of the device.
        throughput::of(device).set_shared(true);
        let mut now_ns = 30 * MS;
        for _ in 0..200 {
            issue(&rate, &slot, now_ns, MS / 4, solo(0x40, false));
            rate.observe(&slot, 0, now_ns + MS, false);
            now_ns += 5 * MS / 2;
            slot.settle();
            rate.observe(&slot, 0, now_ns, true);
        }
        assert_eq!((rate.expected_ns(MS), cost::of(seen(0x40))), before);
        println!("now: 1 ms of work counts as {} ns", rate.expected_ns(MS));
    }

    #[test]
    fn what_was_measured_beside_others_changes_only_without_them() {
        let device = device();
        let (rate, slot) = begun_on(device);
        let key = 0x98_5850;
        (0..3).for_each(|_| cost::measured(0, key, MS / 4));
        let measured = cost::of(seen(key));
        let mut now_ns = 20 * MS;
        let mut passes = |took_ns: u64| {
            issue(&rate, &slot, now_ns, MS / 4, solo(key, false));
            rate.observe(&slot, 0, now_ns + took_ns - 1, false);
            now_ns += took_ns;
            slot.settle();
            rate.observe(&slot, 0, now_ns, true);
            cost::of(seen(key))
        };
        throughput::of(device).set_shared(true);
        // The last takes so long that it was its own work most likely.
        for took_ns in [MS / 40, MS / 10, 3 * MS, OTHERS_NS + 10 * MS] {
            assert_eq!(passes(took_ns), measured, "{took_ns} ns");
        }
        throughput::of(device).set_shared(false);
        for _ in 0..40 {
            passes(MS / 2);
        }
        let ns = passes(MS / 2).expect("known");
        assert!((490_000..=500_000).contains(&ns), "{ns}");
    }

    #[test]
    fn a_stream_that_was_never_alone_goes_by_what_its_kernels_weigh() {
        let device = device();
        let (rate, slot) = begun_on(device);
        throughput::of(device).set_shared(true);
        issue(&rate, &slot, 10 * MS, MS / 50, None);
        slot.settle();
        rate.observe(&slot, 0, 14 * MS, true);
        assert!(rate.is_known());
        assert_eq!(rate.expected_ns(MS), MS);
    }

    #[test]
    fn streams_that_share_the_device_need_no_more_marks_than_one() {
        const AIM: u64 = MS / 4;
        for streams in [1, 8, 64] {
            let device = device();
            let all: Vec<_> = (0..streams).map(|_| begun_on(device)).collect();
            let (mut now_ns, mut budget_ns) = (10 * MS, AIM / 16);
            for _ in 0..40 {
                let part_ns = budget_ns / streams;
                for (rate, slot) in &all {
                    rate.issued(slot.issue(), part_ns, None, 0, now_ns);
                }
                throughput::of(device).submit(part_ns * streams);
                // The device takes twice the weight, for one stream after another.
                now_ns += 2 * part_ns * streams;
                throughput::of(device).pass(part_ns * streams, true, 0, (now_ns, now_ns));
                for (rate, slot) in &all {
                    slot.settle();
                    rate.observe(slot, 0, now_ns, true);
                }
                budget_ns = StreamRate::weight_together(all.iter().map(|(rate, _)| rate), AIM);
            }
            let takes_ns = 2 * budget_ns;
            assert!(
                (AIM * 9 / 10..=AIM * 11 / 10).contains(&takes_ns),
                "{streams} streams: a batch for {AIM} ns takes {takes_ns}"
            );
            // None looks slow for the others' work.
            let alone_ns = 2 * all[0].0.weight_of(AIM);
            assert!(alone_ns <= AIM * 11 / 10, "{streams} streams: {alone_ns}");
        }
    }

    #[test]
    fn the_first_of_several_marks_has_what_passed_before_the_last_look() {
        let (rate, slot) = begun();
        issue(&rate, &slot, 10 * MS, MS, solo(0x98_5350, true));
        issue(&rate, &slot, 10 * MS + 1, MS, solo(0x98_5450, true));
        rate.observe(&slot, 0, 59 * MS, false);
        slot.settle();
        rate.observe(&slot, 0, 60 * MS, true);
        assert_eq!(cost::of(seen(0x98_5350)), Some(49 * MS as u32));
        assert_eq!(cost::of(seen(0x98_5450)), Some(MS as u32));
    }

    #[test]
    fn what_went_on_while_the_thread_waited_at_the_gate_tells_nothing() {
        let (rate, slot) = begun();
        issue(&rate, &slot, 10 * MS, MS, solo(0x98_5650, true));
        slot.settle();
        // Let in again, and something is in flight by the next look.
        rate.let_in_ns.store(60 * MS, Ordering::Relaxed);
        rate.issued(slot.issue(), MS, solo(0x98_5750, true), 0, 60 * MS + 1);
        rate.observe(&slot, 0, 60 * MS + 2, false);
        assert_eq!(cost::of(seen(0x98_5650)), None);
        slot.settle();
        rate.observe(&slot, 0, 90 * MS + 2, true);
        assert_eq!(cost::of(seen(0x98_5750)), Some(30 * MS as u32));
    }

    #[test]
    fn a_delayed_look_says_no_more_than_at_most() {
        let (rate, slot) = begun();
        issue(&rate, &slot, 10 * MS, MS, solo(0x98_5550, true));
        slot.settle();
        // The program was away for a second.
        rate.observe(&slot, 0, 1010 * MS, false);
        assert_eq!(cost::of(seen(0x98_5550)), None);
        cost::learn(0, 0x98_5550, 2000 * MS);
        issue(&rate, &slot, 1020 * MS, 1000 * MS, solo(0x98_5550, false));
        slot.settle();
        rate.observe(&slot, 0, 1520 * MS, false);
        assert!(cost::of(seen(0x98_5550)).is_some_and(|ns| u64::from(ns) < 1000 * MS));
    }

    #[test]
    fn the_next_is_queued_before_a_kernel_as_long_as_the_window_is_over() {
        let (rate, slot) = begun();
        // Learnt: three milliseconds each.
        for at in 0..8 {
            issue(&rate, &slot, (10 + 3 * at) * MS, 3 * MS, solo(0x30, false));
            rate.observe(&slot, 0, (13 + 3 * at) * MS - 1, false);
            slot.settle();
            rate.observe(&slot, 0, (13 + 3 * at) * MS, true);
        }
        issue(&rate, &slot, 34 * MS, 3 * MS, solo(0x30, false));
        let fits = |at_ns: u64| rate.fits(&slot, 2 * MS, at_ns);
        assert!(!fits(34 * MS) && !fits(34 * MS + MS / 2));
        assert!(
            fits(35 * MS + MS / 10),
            "less than two milliseconds are left"
        );
        // It takes longer than any did: nobody knows how long.
        assert!(!fits(38 * MS));
        issue(&rate, &slot, 35 * MS, 3 * MS, solo(0x30, false));
        assert!(!fits(36 * MS), "the one that waits has not begun");
    }
}
