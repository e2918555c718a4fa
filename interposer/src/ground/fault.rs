//! Panics on purpose, for tests of builds with debug assertions: `SUBLET_FAULT_HOOKS=N` fails the
//! Nth part that each symbol's hook comes to, and `SUBLET_FAULT_HOOKS=i` the attachment in
//! `cuInit`.

use shim_ffi::Symbol;

#[cfg(not(debug_assertions))]
mod injected {
    pub(super) const fn nth() -> u32 {
        0
    }
}

#[cfg(debug_assertions)]
mod injected {
    use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

    const UNREAD: u32 = u32::MAX;
    static NTH: AtomicU32 = AtomicU32::new(UNREAD);

    /// What the variable says: a number, or [`super::ATTACHMENT`]; 0: nothing.
    pub(super) fn nth() -> u32 {
        let known = NTH.load(Relaxed);
        if known != UNREAD {
            return known;
        }
        let set = crate::ground::environment::variable(c"SUBLET_FAULT_HOOKS");
        let letter = set.and_then(|text| text.first()).copied().unwrap_or(b'0');
        let nth = u32::from(letter.wrapping_sub(b'0'));
        NTH.store(nth, Relaxed);
        nth
    }
}

const ATTACHMENT: u32 = (b'i' - b'0') as u32;

/// A part of a hook begins.
#[inline(always)]
pub(crate) fn point(symbol: Symbol) {
    use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

    static PARTS: [AtomicU32; shim_ffi::COUNT] = [const { AtomicU32::new(0) }; shim_ffi::COUNT];
    let nth = injected::nth();
    if nth == 0 {
        return;
    }
    // PANIC: the enumeration and the array have the same length.
    let part = PARTS[symbol as usize].fetch_add(1, Relaxed).wrapping_add(1);
    assert!(part != nth, "on purpose: SUBLET_FAULT_HOOKS");
}

/// An attachment begins.
pub(crate) fn attachment() {
    assert!(
        injected::nth() != ATTACHMENT,
        "on purpose: SUBLET_FAULT_HOOKS"
    );
}
