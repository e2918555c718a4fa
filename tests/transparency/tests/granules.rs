//! The preload library's table of live memory, tested apart from its exports, which would stand in
//! for the driver's here: its own tests are in the file.

#[allow(dead_code, reason = "the library uses all of it, its tests a part")]
#[path = "../../../interposer/src/metering/live.rs"]
mod live;
#[path = "../../../interposer/src/ground/lock.rs"]
mod lock;

/// What the lock needs of the library.
mod ground {
    pub(crate) use super::lock;

    pub(crate) mod clock {
        pub(crate) fn pause(nap: std::time::Duration) {
            std::thread::sleep(nap);
        }
    }
}

use std::cell::Cell;

thread_local! {
    static GIVEN_BACK: Cell<u64> = const { Cell::new(0) };
}

/// Stands in for the library's: notes what is given back.
fn give_back(_: &live::Live, bytes: u64) {
    GIVEN_BACK.set(GIVEN_BACK.get() + bytes);
}

fn plain(bytes: u64, context: usize) -> live::Live {
    live::Live {
        bytes,
        context,
        device: 0,
        kind: live::Kind::Device,
        overtaken: 0,
    }
}

#[test]
fn what_went_with_its_context_is_given_back_when_the_driver_gives_its_address_away_again() {
    let at = 0x7300_0000_0000;
    assert_eq!(
        live::insert(at, plain(3 * live::GRANULE, 1)),
        3 * live::GRANULE
    );
    // Its context is being destroyed by another thread, whose call has not come back; the driver
    // has the memory already.
    live::context_dies(1);
    assert_eq!(live::insert(at, plain(4096, 2)), live::GRANULE);
    assert_eq!(GIVEN_BACK.get(), 3 * live::GRANULE);
    let mut drained = 0;
    live::drain_context(1, |_, _| drained += 1);
    live::context_died(1);
    assert_eq!(drained, 0);
    assert_eq!(
        live::remove(at).map(|(_, freed)| freed),
        Some(live::GRANULE)
    );
}

#[test]
fn a_free_that_comes_back_late_does_not_take_the_next_owners_entry() {
    let at = 0x7310_0000_0000;
    assert_eq!(
        live::insert(at, plain(2 * live::GRANULE, 3)),
        2 * live::GRANULE
    );
    // Its free is on its way back; the driver has given the address away already.
    let before = GIVEN_BACK.get();
    assert_eq!(live::insert(at, plain(512, 3)), live::GRANULE);
    assert_eq!(GIVEN_BACK.get() - before, 2 * live::GRANULE);
    assert!(live::remove(at).is_none(), "the late one");
    assert_eq!(
        live::remove(at).map(|(_, freed)| freed),
        Some(live::GRANULE)
    );
    assert!(live::remove(at).is_none());
}
