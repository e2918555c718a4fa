//! Space on a device that the quota allows and the device does not have now: the one rule for every
//! call that takes device memory, whatever it makes of it.
//!
//! A call is tried first. Where the driver has no memory for it, what was reserved for it has been
//! given back, and nothing is held. What takes more than the whole device is refused. For the rest
//! the arbiter is asked what the job could come to have if everybody left who may:
//!
//! * *less than the call takes*: it is refused at once, with the reason in the journal, and nobody
//!   leaves for it;
//! * *enough*: the thread says what it waits for, others leave, and the call is tried again with
//!   each of them, for half a minute at most.
//!
//! All threads of a process together never say that they wait for more than can be had: who would
//! be too many says nothing until others have what they wait for, or were refused.

use std::cell::Cell;

use channel::{Event, SpaceAnswer};
use shim_ffi::CUresult;

use super::news::Wait;
use super::tuning;
use crate::attachment::client;
use crate::gate::quiesce;
use crate::ground::clock::now_ns;
use crate::ground::process;
use crate::ground::stretch::{Counted, Of, here};
use crate::ground::thread::thread;
use crate::metering::{GRANULE, Meter, granules};

/// Whether a call of this process that finds no memory on the device waits for some: its own can be
/// moved, or the arbiter has others shrink for it.
pub(crate) fn waits() -> bool {
    super::active()
        || client::current().is_some_and(|attached| attached.end.arbiter.residency().waits)
}

/// What the driver has had no memory for.
#[derive(Debug, Default)]
pub(crate) struct Short {
    is_short: Cell<bool>,
    /// Where the call takes something else than it says, in bytes.
    lacks: Cell<Option<u64>>,
}

impl Short {
    /// Takes note of what the driver says, and passes it on.
    #[inline]
    pub(crate) fn note(&self, result: CUresult) -> CUresult {
        if result == CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            self.is_short.set(true);
        }
        result
    }

    /// The device has no space for `bytes`.
    pub(super) fn lacks(&self, bytes: u64) -> CUresult {
        self.lacks.set(Some(bytes));
        self.note(CUresult::CUDA_ERROR_OUT_OF_MEMORY)
    }
}

/// How much a call takes of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Needs {
    /// So many bytes.
    Bytes(u64),
    /// What the driver alone knows, so many bytes at most.
    UpTo(u64),
}

/// Makes a call that takes `bytes` of the current device's memory, with its metering, by the one
/// rule.
#[inline]
pub(crate) fn with_space(bytes: u64, attempt: impl Fn(&Short) -> CUresult) -> CUresult {
    let short = Short::default();
    let result = attempt(&short);
    if !short.is_short.get() {
        return result;
    }
    match Meter::here() {
        Ok(meter) => insist(
            &meter,
            Needs::Bytes(granules(bytes)),
            &short,
            result,
            attempt,
        ),
        Err(_) => result,
    }
}

/// The same on a device that need not be the current one.
#[inline]
pub(crate) fn with_space_on(
    meter: &Meter,
    needs: Needs,
    attempt: impl Fn(&Short) -> CUresult,
) -> CUresult {
    let short = Short::default();
    let result = attempt(&short);
    if !short.is_short.get() {
        return result;
    }
    insist(meter, needs, &short, result, attempt)
}

#[cold]
#[inline(never)]
fn insist(
    meter: &Meter,
    needs: Needs,
    short: &Short,
    first: CUresult,
    attempt: impl Fn(&Short) -> CUresult,
) -> CUresult {
    if !waits() {
        return first;
    }
    let needs = short.lacks.get().map_or(needs, Needs::Bytes);
    if let Some(total_bytes) = is_beyond(meter, needs) {
        report(meter, needs, total_bytes, false);
        return first;
    }
    let mut space = SpaceWait::begin(meter, needs, here());
    let mut result = first;
    while result == CUresult::CUDA_ERROR_OUT_OF_MEMORY
        && short.is_short.replace(false)
        && space.wait()
    {
        result = attempt(short);
    }
    result
}

/// All that the device has, where that is less than a call takes: nobody needs to be asked.
fn is_beyond(meter: &Meter, needs: Needs) -> Option<u64> {
    let Needs::Bytes(bytes) = needs else {
        return None;
    };
    let total = |grant: &channel::DeviceGrant| grant.physical_total_bytes();
    let grant = meter.attached().end.arbiter.device(meter.device());
    // 0: the arbiter does not know.
    grant.map(total).filter(|total| (1..bytes).contains(total))
}

/// Says in the journal why a call is refused.
fn report(meter: &Meter, needs: Needs, most_bytes: u64, context: bool) {
    let (Needs::Bytes(wanted_bytes) | Needs::UpTo(wanted_bytes)) = needs;
    let event = Event::NoSpace {
        wanted_bytes,
        most_bytes,
        context: context || matches!(needs, Needs::UpTo(_)),
    };
    // CAST: an index of a page, below MAX_DEVICES.
    let device = meter.device() as u32;
    meter.attached().end.client.write_record(device, event);
}

// CAST: half a minute.
const SPACE_NS: u64 = tuning::SPACE.as_nanos() as u64;
/// TIMEOUT: a wait that begins again with each return of the job's memory ends after so many times
/// its length.
const MOST: u64 = 10;
/// TIMEOUT: an arbiter answers within milliseconds; one that has not by then is an old one, and
/// hears what is waited for all the same.
const ANSWER_NS: u64 = 1_000_000_000;
/// TIMEOUT: newer figures of a device are there in a third of a second, but not while memory moves.
const CONFIRM_NS: u64 = 2_500_000_000;
/// TIMEOUT: how long the driver may have no memory where the arbiter says that there is some: its
/// figures are right again by then.
const MET_NS: u64 = 3_000_000_000;
/// Answers in a row that are a refusal: what others hold for a moment, in calls that are under way,
/// is none.
const REFUSALS: u32 = 2;
/// Tries in a row with all space there, after which a context is known to take more.
const CONTEXT_TRIES: u32 = 2;

/// What an answer says about a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Verdict {
    /// It can be had: so many bytes are waited for.
    Wait(u64),
    /// It cannot.
    Refuse,
    /// That is not known yet.
    Unknown,
}

/// Judges a request by the answer to question `asked`.
fn judge(needs: Needs, heard: &SpaceAnswer, asked: u32) -> Verdict {
    if !heard.answers(asked) {
        return Verdict::Unknown;
    }
    let (fits, never, bytes) = match needs {
        Needs::Bytes(bytes) => (
            bytes <= heard.most_bytes,
            bytes > heard.ceiling_bytes,
            bytes,
        ),
        Needs::UpTo(most) => {
            let least = heard.context_bytes.saturating_add(1).max(GRANULE);
            (
                least <= heard.most_bytes,
                least > heard.ceiling_bytes,
                most.min(heard.most_bytes),
            )
        }
    };
    if fits {
        Verdict::Wait(bytes)
    } else if never || heard.confirms(asked) {
        Verdict::Refuse
    } else {
        Verdict::Unknown
    }
}

/// A thread that has found no space on a device, as the arbiter sees it. Holds nothing while it
/// waits: the arbiter may want this very job's memory out.
pub(crate) struct SpaceWait {
    meter: Meter,
    needs: Needs,
    /// What it says that it waits for; 0: nothing yet.
    claimed: u64,
    /// Says so until it is dropped.
    counted: Option<Counted>,
    /// Where the stack is in the function that this ends in.
    at: usize,
    /// Number of its last question.
    asked: u32,
    asked_ns: u64,
    /// Answers in a row that refuse.
    refusals: u32,
    /// Since when, and in how many tries, the arbiter has said that the space is there.
    met_ns: Option<u64>,
    met_tries: u32,
    until_ns: u64,
    /// Not even when it begins again.
    at_most_ns: u64,
    /// What the quiesce gate has been through when the wait began.
    quiesce: u32,
    news: Wait,
}

impl SpaceWait {
    /// `at`: [`here`] in the function that it ends in.
    pub(crate) fn begin(meter: &Meter, needs: Needs, at: usize) -> Self {
        let now = now_ns();
        thread().counts.give_back();
        let mut new = Self {
            meter: *meter,
            needs,
            claimed: 0,
            counted: None,
            at,
            asked: 0,
            asked_ns: now,
            refusals: 0,
            met_ns: None,
            met_tries: 0,
            until_ns: now + SPACE_NS,
            at_most_ns: now + MOST * SPACE_NS,
            quiesce: quiesce::changes(),
            news: Wait::begin(std::time::Duration::from_millis(20)),
        };
        new.ask(now);
        new
    }

    fn ask(&mut self, now: u64) {
        let end = &self.meter.attached().end;
        self.asked = end.client.ask_for_space();
        self.asked_ns = now;
        end.ring();
    }

    fn heard(&self) -> SpaceAnswer {
        let device = self
            .meter
            .attached()
            .end
            .arbiter
            .device(self.meter.device());
        device.map(|device| device.space()).unwrap_or_default()
    }

    /// Pauses before the next try; false where there is to be none.
    pub(crate) fn wait(&mut self) -> bool {
        let now = now_ns();
        // Its own memory was away meanwhile: the time that it spent before the quiesce gate was not
        // spent waiting for space.
        if self.quiesce != quiesce::changes() {
            self.quiesce = quiesce::changes();
            self.until_ns = (now + SPACE_NS).min(self.at_most_ns);
        }
        let same = client::current().is_some_and(|now| std::ptr::eq(now, self.meter.attached()));
        if !waits()
            || now > self.until_ns
            || process::exiting()
            || !same
            || self.meter.attached().is_lost()
        {
            return false;
        }
        let goes_on = if self.claimed > 0 {
            self.look_at_claim(now)
        } else {
            self.look_at_answer(now)
        };
        if !goes_on {
            return false;
        }
        let _ = self.news.for_news(|| Ok(process::exiting()));
        // Before the try that follows.
        if self.claimed > 0 && self.heard().is_met(self.asked) {
            self.met_tries += 1;
            self.met_ns.get_or_insert(now);
        } else {
            (self.met_ns, self.met_tries) = (None, 0);
        }
        true
    }

    /// It has said what it waits for, and has tried in vain since.
    fn look_at_claim(&mut self, now: u64) -> bool {
        let heard = self.heard();
        let there = match self.needs {
            Needs::UpTo(_) => self.met_tries >= CONTEXT_TRIES,
            Needs::Bytes(_) => self.met_ns.is_some_and(|since| now > since + MET_NS),
        };
        if there {
            report(&self.meter, self.needs, self.claimed, false);
            return false;
        }
        if heard.answers(self.asked) && self.claimed > heard.most_bytes {
            // Others have come to hold more that stays.
            self.withdraw();
            self.ask(now);
        }
        true
    }

    fn look_at_answer(&mut self, now: u64) -> bool {
        let heard = self.heard();
        match judge(self.needs, &heard, self.asked) {
            Verdict::Wait(bytes) => {
                self.refusals = 0;
                self.claim(now, bytes, heard.most_bytes);
            }
            Verdict::Refuse => {
                self.refusals += 1;
                if self.refusals >= REFUSALS {
                    report(&self.meter, self.needs, heard.most_bytes, false);
                    return false;
                }
                self.ask(now);
            }
            Verdict::Unknown => {
                let waited = now.saturating_sub(self.asked_ns);
                if heard.answers(self.asked) {
                    if waited > CONFIRM_NS {
                        report(&self.meter, self.needs, heard.most_bytes, false);
                        return false;
                    }
                } else if waited > ANSWER_NS {
                    let (Needs::Bytes(bytes) | Needs::UpTo(bytes)) = self.needs;
                    self.claim(now, bytes, u64::MAX);
                }
            }
        }
        true
    }

    /// Says what it waits for, unless all threads together would wait for too much.
    fn claim(&mut self, now: u64, bytes: u64, most_bytes: u64) {
        let end = &self.meter.attached().end;
        let Some(want) = end.client.want(self.meter.device()) else {
            return;
        };
        if want.wait_for_space_within(bytes, most_bytes) {
            self.claimed = bytes;
            self.counted = Some(thread().counts.adopt(Of::Space(want, bytes), self.at));
            // From here on answers are to this as well.
            self.ask(now);
        }
    }

    fn withdraw(&mut self) {
        self.claimed = 0;
        self.counted = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn answer(most: u64, ceiling: u64) -> SpaceAnswer {
        SpaceAnswer {
            number: 5,
            most_bytes: most,
            ceiling_bytes: ceiling,
            ..SpaceAnswer::default()
        }
    }

    #[test]
    fn what_cannot_be_had_is_refused_and_what_can_is_waited_for() {
        let two = Needs::Bytes(2 * GIB);
        assert_eq!(judge(two, &answer(3 * GIB, 3 * GIB), 6), Verdict::Unknown);
        assert_eq!(
            judge(two, &answer(2 * GIB, 3 * GIB), 5),
            Verdict::Wait(2 * GIB)
        );
        assert_eq!(judge(two, &answer(GIB, GIB), 5), Verdict::Refuse);
        // Strangers' memory is in the way, as far as is known.
        let mut doubtful = answer(GIB, 2 * GIB);
        assert_eq!(judge(two, &doubtful, 5), Verdict::Unknown);
        doubtful.confirmed = 5;
        assert_eq!(judge(two, &doubtful, 5), Verdict::Refuse);
    }

    #[test]
    fn a_context_takes_what_there_is_unless_that_is_known_to_be_too_little() {
        let some = Needs::UpTo(512 << 20);
        let mut heard = answer(100 << 20, GIB);
        assert_eq!(judge(some, &heard, 5), Verdict::Wait(100 << 20));
        heard.context_bytes = 100 << 20;
        assert_eq!(judge(some, &heard, 5), Verdict::Unknown);
        heard.confirmed = 5;
        assert_eq!(judge(some, &heard, 5), Verdict::Refuse);
        heard.most_bytes = GIB;
        assert_eq!(judge(some, &heard, 5), Verdict::Wait(512 << 20));
        assert_eq!(judge(some, &answer(0, 0), 5), Verdict::Refuse);
    }
}
