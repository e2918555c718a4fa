//! The preload library's table of live memory, tested apart from its exports, which would stand in for the driver's here: its
//! own tests are in the file.

#[allow(dead_code, reason = "the library uses all of it, its tests a part")]
#[path = "../../../interposer/src/memory/live.rs"]
mod live;

use std::cell::Cell;

thread_local! {
    static GIVEN_BACK: Cell<u64> = const { Cell::new(0) };
}

/// Stands in for the library's: notes what is given back.
fn give_back(key: u64, known: &live::Live) {
    let bytes = live::uncover(key, known);
    GIVEN_BACK.set(GIVEN_BACK.get() + bytes);
}

#[test]
fn what_an_address_held_before_is_given_back_when_the_driver_gives_it_away_again() {
    let plain = |bytes: u64, context: usize| live::Live {
        bytes,
        device: 0,
        kind: live::Kind::Device,
        context,
    };
    let at = 0x7300_0000_0000;
    assert_eq!(
        live::insert(at, plain(3 * live::GRANULE, 1)),
        3 * live::GRANULE
    );
    // Its context is being destroyed by another thread, whose call has not come back; the driver has the memory already.
    assert_eq!(live::insert(at, plain(4096, 2)), live::GRANULE);
    assert_eq!(GIVEN_BACK.get(), 3 * live::GRANULE);
    let mut drained = 0;
    live::drain_context(1, |_, _| drained += 1);
    assert_eq!(drained, 0);
    live::drain_context(2, |key, known| drained += live::uncover(key, known));
    assert_eq!(drained, live::GRANULE);
}
