//! What holds for a stretch of a thread's code, which the thread may leave without returning.
//!
//! A signal handler of the program's runs in the middle of anything, calls the driver, and may
//! leave by `longjmp`, an exception or the thread's end; then nothing of what was begun is ended by
//! its guard. So each such thing is noted with where the stack was when it began, and lasts only
//! while the stack is deeper than that: what calls us from no deeper comes after it, however it
//! ended. On an alternate stack, where that says nothing, all of it lasts.
//!
//! All that assumes a return, and what becomes of it where a thread does not:
//!
//! | what | after a jump |
//! |---|---|
//! | a call of ours into the driver, or of NVML | over at the next call from no deeper |
//! | `Want::waiting`, of who waits at a gate | given back at the next slow call from no deeper |
//! | `Want::blocking`, of a call that blocks | the same |
//! | `Want::space_bytes`, of a wait for memory | the same |
//! | threads that wait for a full window | the same |
//! | calls inside the quiesce gate | the same; until then memory stays |
//! | threads that end a context | the same ([`left`]); where the thread has ended, others see it |
//! | who withdrew our page for that | the same; until then nothing is marked |
//! | the row of a hook, and its answer | of no hook but that one; replaced by the next |
//! | a permit of `sublet_pipeline_begin` | good for one restore |
//! | who polls a gate, who looks for slots | runs out by the clock |
//! | a stream's slot that is held for a mark | that slot is lost, and others are used |
//! | a capture that begins or ends | submissions ask the driver about it |
//!
//! Two things are not mended. A handler that comes in the few dozen instructions in which its
//! thread holds a lock of ours ([`Lock`](super::lock::Lock), or a mutex) and needs the same one
//! waits for ever. And one that ends its thread in a wait (`pthread_exit`) ends the process: see
//! `docs/reference/host-process.md`, "Limits".

use std::cell::Cell;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU32, Ordering};

use channel::{ClientHalf, MAX_DEVICES, Want};

/// Where the stack is now.
#[inline(always)]
pub(crate) fn here() -> usize {
    let at: usize;
    // SAFETY: reads a register.
    unsafe {
        std::arch::asm!("mov {at}, rsp", at = out(reg) at, options(nomem, nostack, preserves_flags));
    }
    at
}

/// Whether what began where the stack was at `at` lasts, the stack being at `now`: its frames are
/// there.
#[inline(always)]
fn lasts(at: usize, now: usize) -> bool {
    at != 0 && (now < at || on_alternate_stack())
}

/// Whether a thread has left by a jump what began in one entry where the stack was at `at`, the
/// stack being at `now` in another one. That may be called from where the first one was, and its
/// frame may be the larger; what the driver calls of ours inside of the first has both frames below
/// it, and a signal handler the kernel's, of a kilobyte.
#[cold]
#[inline(never)]
pub(crate) fn left(at: usize, now: usize) -> bool {
    const LARGER: usize = 256;
    !lasts(at.saturating_sub(LARGER), now)
}

#[cold]
#[inline(never)]
fn on_alternate_stack() -> bool {
    let mut stack = std::mem::MaybeUninit::<libc::stack_t>::zeroed();
    // SAFETY: asks only, into a local.
    let asked = unsafe { libc::sigaltstack(std::ptr::null(), stack.as_mut_ptr()) };
    // SAFETY: zeroes, or what the kernel has written; both are valid.
    asked == 0 && unsafe { stack.assume_init() }.ss_flags & libc::SS_ONSTACK != 0
}

/// A stretch of code. All-zero: the thread is not in it.
#[repr(transparent)]
pub(crate) struct Stretch(Cell<usize>);

/// The thread is in the stretch, until dropped.
pub(crate) struct Inside<'a> {
    of: &'a Stretch,
    before: usize,
}

impl Stretch {
    #[inline(always)]
    pub(super) fn enter(&self) -> Inside<'_> {
        let before = match self.lasts() {
            true => self.0.get(),
            false => 0,
        };
        // The outermost one lasts longest.
        self.0.set(if before == 0 { here() } else { before });
        Inside { of: self, before }
    }

    /// Whether the thread is in it.
    #[inline(always)]
    pub(super) fn lasts(&self) -> bool {
        self.0.get() != 0 && self.lasts_at(here())
    }

    #[cold]
    #[inline(never)]
    fn lasts_at(&self, now: usize) -> bool {
        let lasts = lasts(self.0.get(), now);
        if !lasts {
            self.0.set(0);
        }
        lasts
    }
}

impl Inside<'_> {
    /// Whether it was in it before.
    pub(crate) fn again(&self) -> bool {
        self.before != 0
    }
}

impl Drop for Inside<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        self.of.0.set(self.before);
    }
}

/// Calls of a thread inside the quiesce gate. All-zero: none.
pub(crate) struct Passes {
    /// Where the stack was when the first of them began.
    at: Cell<usize>,
    count: Cell<u32>,
    /// How often some were given up that nobody ended.
    given_up: Cell<u32>,
}

impl Passes {
    /// How many there are, by what the thread knows, and those that nobody will end any more.
    #[inline(always)]
    pub(crate) fn look(&self) -> (u32, u32) {
        match self.count.get() {
            0 => (0, 0),
            count if lasts(self.at.get(), here()) => (count, 0),
            count => {
                self.count.set(0);
                self.given_up.set(self.given_up.get().wrapping_add(1));
                (0, count)
            }
        }
    }

    /// One more; what [`end`](Self::end) takes.
    #[inline(always)]
    pub(crate) fn begin(&self) -> u32 {
        let count = self.count.get();
        if count == 0 {
            self.at.set(here());
        }
        self.count.set(count + 1);
        self.given_up.get()
    }

    /// One has ended; false where it was given up.
    #[inline(always)]
    pub(crate) fn end(&self, begun: u32) -> bool {
        let counts = begun == self.given_up.get();
        if counts {
            self.count.set(self.count.get().saturating_sub(1));
        }
        counts
    }
}

/// What a thread is counted in.
#[derive(Clone, Copy)]
pub(crate) enum Of {
    /// Threads that wait at the gate.
    Waiting(&'static Want),
    /// The same of each of these devices, as bits.
    WaitingOn(&'static ClientHalf, u32),
    /// Threads in a call that blocks.
    Blocking(&'static Want),
    /// Bytes that threads wait for.
    Space(&'static Want, u64),
    /// A number of this process's own, or of its page.
    Number(&'static AtomicU32),
    /// Both: of threads that wait for space in the window.
    Numbers(&'static AtomicU32, &'static AtomicU32),
}

impl Of {
    fn begin(self) {
        match self {
            Self::Waiting(want) => want.begin_waiting(),
            Self::WaitingOn(client, devices) => on(client, devices, Want::begin_waiting),
            Self::Blocking(want) => want.begin_blocking(),
            // Counted by `Want::wait_for_space_within` before it is adopted.
            Self::Space(..) => {}
            Self::Number(count) => add(count),
            Self::Numbers(count, other) => [count, other].into_iter().for_each(add),
        }
    }

    fn end(self) {
        match self {
            Self::Waiting(want) => want.end_waiting(),
            Self::WaitingOn(client, devices) => on(client, devices, Want::end_waiting),
            Self::Blocking(want) => want.end_blocking(),
            Self::Space(want, bytes) => want.end_waiting_for_space(bytes),
            // Nobody's any more in a forked child, which has set it to 0.
            Self::Number(count) => subtract(count),
            Self::Numbers(count, other) => [count, other].into_iter().for_each(subtract),
        }
    }
}

fn add(count: &AtomicU32) {
    count.fetch_add(1, Ordering::Relaxed);
}

fn subtract(count: &AtomicU32) {
    let less = |count: u32| count.checked_sub(1);
    let _ = count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
}

fn on(client: &ClientHalf, devices: u32, change: impl Fn(&Want)) {
    let is_meant = |device: &usize| devices >> device & 1 != 0;
    let wants = (0..MAX_DEVICES).filter(is_meant);
    wants
        .filter_map(|device| client.want(device))
        .for_each(change);
}

/// One that is counted. All-zero: free.
struct Place {
    /// Where the stack was when it began; 0: free.
    at: Cell<usize>,
    /// Which time this is that the place is used.
    turn: Cell<u32>,
    /// Written before `at`.
    of: Cell<MaybeUninit<Of>>,
}

/// Waits within waits, by handlers; with more than so many the innermost ones are not given back
/// where they are left by a jump.
const PLACES: usize = 2;

/// All that a thread is counted in. All-zero: nothing.
pub(crate) struct Counts([Place; PLACES]);

/// The thread is counted, until dropped.
pub(crate) struct Counted {
    of: Of,
    place: Option<(usize, u32)>,
    /// Belongs to the thread.
    _here: PhantomData<*const ()>,
}

impl Counts {
    /// Ends what nobody else will.
    #[inline(always)]
    pub(crate) fn give_back(&self) {
        let now = here();
        if self.0.iter().any(|place| place.at.get() != 0) {
            self.give_back_at(now);
        }
    }

    #[cold]
    #[inline(never)]
    fn give_back_at(&self, now: usize) {
        for place in &self.0 {
            if place.at.get() != 0 && !lasts(place.at.get(), now) {
                // SAFETY: written before `at`, which is not 0.
                let of = unsafe { place.of.get().assume_init() };
                place.at.set(0);
                of.end();
            }
        }
    }

    /// Counts the thread from here on. `at`: [`here`] in the function that the guard ends in.
    pub(crate) fn begin(&self, of: Of, at: usize) -> Counted {
        of.begin();
        self.adopt(of, at)
    }

    /// The same where it has been counted already.
    pub(crate) fn adopt(&self, of: Of, at: usize) -> Counted {
        let free = self.0.iter().enumerate();
        let free = free.into_iter().find(|(_, place)| place.at.get() == 0);
        let place = free.map(|(index, place)| {
            let turn = place.turn.get().wrapping_add(1);
            place.turn.set(turn);
            place.of.set(MaybeUninit::new(of));
            place.at.set(at);
            (index, turn)
        });
        Counted {
            of,
            place,
            _here: PhantomData,
        }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let Some((at, turn)) = self.place else {
            self.of.end();
            return;
        };
        // Another turn, or none: it was given back already.
        if let Some(place) = super::thread::thread().counts.0.get(at)
            && place.turn.get() == turn
            && place.at.replace(0) != 0
        {
            self.of.end();
        }
    }
}

/// Calls `part` with a deeper stack.
#[cfg(test)]
#[inline(never)]
pub(crate) fn deeper<T>(part: impl FnOnce() -> T) -> T {
    let space = std::hint::black_box([0u8; 4096]);
    let result = part();
    std::hint::black_box(space);
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ground::thread::thread;

    #[test]
    fn a_thread_that_jumps_out_of_a_call_of_ours_is_governed_at_its_next_one() {
        let thread = thread();
        deeper(|| thread.own(|| deeper(|| assert!(thread.is_inside()))));
        assert!(!thread.is_inside(), "it has returned");
        // As by a jump: the guards are never dropped.
        deeper(|| std::mem::forget(thread.enter_nvml()));
        deeper(|| std::mem::forget(thread.enter()));
        assert!(!thread.is_inside());
        assert!(!thread.enter_nvml().again());
    }

    #[test]
    fn what_a_thread_is_counted_in_is_given_back_after_a_jump_and_once() {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let (thread, number) = (thread(), || NUMBER.load(Ordering::Relaxed));
        let one = || thread.counts.begin(Of::Number(&NUMBER), here());
        deeper(|| {
            let first = one();
            deeper(|| {
                thread.counts.give_back();
                assert_eq!(number(), 1, "it goes on");
                std::mem::forget(one());
            });
            assert_eq!(number(), 2);
            deeper(|| thread.counts.give_back());
            assert_eq!(number(), 1, "the inner one was left");
            drop(first);
        });
        assert_eq!(number(), 0);
        // More than there are places for.
        let all: Vec<_> = (0..PLACES + 2).map(|_| one()).collect();
        assert_eq!(number() as usize, PLACES + 2);
        drop(all);
        assert_eq!(number(), 0);
        // One that was given back does not end again.
        let left = deeper(one);
        thread.counts.give_back();
        assert_eq!(number(), 0);
        let other = one();
        drop(left);
        assert_eq!(number(), 1);
        drop(other);
        assert_eq!(number(), 0);
    }

    #[test]
    fn passes_that_nobody_ends_are_given_up_and_do_not_end_others() {
        let passes = &thread().passes;
        let first = deeper(|| {
            let first = passes.begin();
            deeper(|| assert_eq!(passes.look(), (1, 0)));
            passes.begin();
            first
        });
        assert_eq!(passes.look(), (0, 2));
        let next = passes.begin();
        assert!(!passes.end(first), "it was given up");
        assert!(passes.end(next));
        assert_eq!(passes.look(), (0, 0));
    }
}
