//! Slices or all at once: which of the two a device runs in, and the change between them.
//!
//! Invariants: `auto` is asked in the mode [`Mode::Auto`] only, and starts over with each change of
//! the mode. `all_in` is true from the step that let everybody in to the first step in slices,
//! which takes the device from all of them.

use super::auto::{Auto, Running, Sample};
use super::pace::Mode;

/// How the device runs.
#[derive(Debug)]
pub(super) struct ModeSwitch {
    mode: Mode,
    auto: Auto,
    /// In the mode [`Mode::Lend`]: whether the device lends now.
    lends: bool,
    all_in: bool,
}

impl ModeSwitch {
    pub fn new(mode: Mode, now_ns: u64) -> Self {
        Self {
            mode,
            auto: Auto::new(now_ns),
            lends: true,
            all_in: false,
        }
    }

    /// Another mode, or the same one.
    pub fn set(&mut self, mode: Mode, now_ns: u64) {
        if self.mode != mode {
            self.mode = mode;
            self.auto = Auto::new(now_ns);
            self.lends = true;
        }
    }

    /// Whether that is the mode.
    pub fn is(&self, mode: Mode) -> bool {
        self.mode == mode
    }

    /// Whether everybody holds the device at once now.
    pub fn at_once(&self) -> bool {
        match self.mode {
            Mode::Exclusive => false,
            Mode::Concurrent => true,
            Mode::Lend => self.lends,
            Mode::Auto => self.auto.running() == Running::AtOnce,
        }
    }

    /// Whether there are, or may be, slices.
    pub fn has_slices(&self) -> bool {
        self.mode != Mode::Concurrent
    }

    /// Whether the choice is the arbiter's.
    pub fn is_auto(&self) -> bool {
        self.mode == Mode::Auto
    }

    /// Whether gates close only to who is ahead, where they can.
    pub fn is_lend(&self) -> bool {
        self.mode == Mode::Lend
    }

    /// Whether they can.
    pub fn set_lends(&mut self, lends: bool) {
        self.lends = lends;
    }

    /// Why it runs as it does, for people; empty where its operator has said so.
    pub fn reason(&self) -> &str {
        if self.is_auto() {
            self.auto.reason()
        } else {
            ""
        }
    }

    /// Chooses between slices and all at once, where that is left to us. Returns when to do it
    /// again, and whether the choice has changed.
    pub fn step(&mut self, now_ns: u64, at_work: &[Sample], fits: bool) -> (u64, bool) {
        let before = self.auto.running();
        let changed = self.auto.step(now_ns, at_work, fits) != before;
        (self.auto.again_ns(), changed)
    }

    /// Everybody was let in.
    pub fn note_all_in(&mut self) {
        self.all_in = true;
    }

    /// Whether everybody was let in before, asked once: all of them are to lose the device.
    pub fn take_all_in(&mut self) -> bool {
        std::mem::take(&mut self.all_in)
    }
}
