//! The protocol under the model checker: `scripts/loom`. What runs here is the shipped code, on
//! loom's atomics.

#![cfg(loom)]

use channel::{
    Account, ArbiterHalf, Block, ClientHalf, Event, Grant, Hold, LastBell, Owner, TenantPage,
};
use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, Ordering};
use loom::thread;

fn model(check: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    // Three forced switches find what this size of program can hide, and end in seconds.
    builder.preemption_bound = Some(3);
    builder.check(check);
}

fn grant(number: u64) -> Grant {
    Grant {
        number,
        quantum_us: 5000,
        deadline_mono_ns: 7,
        window: channel::Window::always(2000),
    }
}

/// A wait under loom never times out, so a wake-up that is lost is a deadlock.
fn enter(half: &ArbiterHalf) {
    let gate = half.device(0).expect("device");
    while let Err(seen) = gate.look() {
        gate.wait(seen, std::time::Duration::ZERO);
    }
}

#[test]
fn no_wakeup_is_lost_between_look_and_wait() {
    model(|| {
        let half = Arc::new(ArbiterHalf::default());
        let arbiter = Arc::clone(&half);
        let opener = thread::spawn(move || {
            arbiter.open(0, &grant(1));
        });
        enter(&half);
        // A client that saw the gate open sees what came with the grant.
        assert_eq!(half.device(0).expect("device").window_us(), 2000);
        opener.join().expect("opener");
    });
}

#[test]
fn a_gate_that_closes_and_opens_again_wakes_everybody_in_the_end() {
    model(|| {
        let half = Arc::new(ArbiterHalf::default());
        let (arbiter, waiter) = (Arc::clone(&half), Arc::clone(&half));
        let opener = thread::spawn(move || {
            arbiter.open(0, &grant(1));
            arbiter.close(0);
            arbiter.open(0, &grant(2));
        });
        let other = thread::spawn(move || enter(&waiter));
        enter(&half);
        opener.join().expect("opener");
        other.join().expect("other");
    });
}

#[test]
fn an_announcement_wakes_and_the_opening_after_it_is_not_missed() {
    // The waiter may be woken by the pre-wake, sleep on it again (it has polled for long enough) or
    // miss it altogether.
    model(|| {
        let half = Arc::new(ArbiterHalf::default());
        let arbiter = Arc::clone(&half);
        let opener = thread::spawn(move || {
            arbiter.pre_wake(0, Some(70));
            arbiter.open(0, &grant(1));
            // Too late to mean anything: an open gate stays open.
            arbiter.pre_wake(0, Some(80));
        });
        enter(&half);
        assert_eq!(half.device(0).expect("device").window_us(), 2000);
        opener.join().expect("opener");
        assert_eq!(
            half.device(0).expect("device").pass(100),
            Ok(()),
            "it stays open"
        );
    });
}

#[test]
fn a_pre_wake_that_is_taken_back_keeps_a_gate_that_opens() {
    model(|| {
        let half = Arc::new(ArbiterHalf::default());
        let arbiter = Arc::clone(&half);
        let opener = thread::spawn(move || {
            arbiter.pre_wake(0, None);
            arbiter.close(0);
            arbiter.open(0, &grant(1));
        });
        enter(&half);
        opener.join().expect("opener");
    });
}

/// As `enter`, for one whose clock stands at 100.
fn enter_by_clock(half: &ArbiterHalf) {
    let gate = half.device(0).expect("device");
    while let Err(seen) = gate.pass(100) {
        gate.wait(seen, std::time::Duration::ZERO);
    }
}

#[test]
fn a_gate_that_turns_over_by_itself_lets_pass_with_or_without_the_arbiter() {
    model(|| {
        let half = Arc::new(ArbiterHalf::default());
        let arbiter = Arc::clone(&half);
        let opener = thread::spawn(move || {
            // Its time has come already; the arbiter is late with the confirmation, or never comes.
            arbiter.pre_wake(0, Some(90));
        });
        enter_by_clock(&half);
        opener.join().expect("opener");
        half.open(0, &grant(1));
        assert_eq!(half.device(0).expect("device").pass(100), Ok(()));
    });
}

#[test]
fn one_that_found_its_time_over_is_let_in_when_that_is_taken_back_or_it_is_its_turn_again() {
    for how in 0..3 {
        model(move || {
            let half = Arc::new(ArbiterHalf::default());
            half.open(0, &grant(1));
            half.expire(0, 90);
            let arbiter = Arc::clone(&half);
            let opener = thread::spawn(move || {
                match how {
                    0 => arbiter.keep(0),
                    1 => {
                        arbiter.close(0);
                        arbiter.open(0, &grant(2));
                    }
                    // Its slice begins anew.
                    _ => {
                        arbiter.open(0, &grant(2));
                    }
                }
            });
            enter_by_clock(&half);
            opener.join().expect("opener");
        });
    }
}

#[test]
fn a_request_is_seen_by_the_arbiter_that_closed_before_it() {
    // The client looks, finds the gate closed, says that it waits and rings; the arbiter answers
    // the bell and reads. The bell is a system call, modelled as a lock that both take.
    model(|| {
        let half = Arc::new(ClientHalf::default());
        let bell = Arc::new(loom::sync::Mutex::new(false));
        let (client, rung) = (Arc::clone(&half), Arc::clone(&bell));
        let waiter = thread::spawn(move || {
            client.want(0).expect("device").begin_waiting();
            *rung.lock().expect("bell") = true;
        });
        if *bell.lock().expect("bell") {
            assert_eq!(half.waiting(0), 1, "rung and nobody there");
        }
        waiter.join().expect("waiter");
    });
}

#[test]
fn a_bell_that_is_not_sent_is_answered_by_the_look_that_is_still_to_come() {
    // Two threads of a client say that they wait and ring; the arbiter takes what was rung, counts
    // its answer and looks.
    model(|| {
        let (arbiter, client) = (
            Arc::new(ArbiterHalf::default()),
            Arc::new(ClientHalf::default()),
        );
        arbiter.answer_bells();
        let last = Arc::new(LastBell::default());
        let socket = Arc::new(loom::sync::Mutex::new(0));
        let ringers: Vec<_> = (0..2)
            .map(|_| {
                let (arbiter, client) = (Arc::clone(&arbiter), Arc::clone(&client));
                let (last, socket) = (Arc::clone(&last), Arc::clone(&socket));
                thread::spawn(move || {
                    client.want(0).expect("device").begin_waiting();
                    last.ring(&arbiter, || {
                        *socket.lock().expect("socket") += 1;
                        true
                    });
                })
            })
            .collect();
        let mut seen = 0;
        let mut answer = || {
            if std::mem::take(&mut *socket.lock().expect("socket")) > 0 {
                arbiter.answer_bells();
                seen = client.waiting(0);
            }
            seen
        };
        answer();
        for ringer in ringers {
            ringer.join().expect("ringer");
        }
        assert_eq!(answer(), 2, "one waits, and no bell is on its way");
    });
}

#[test]
fn one_whose_turn_is_over_need_not_ring() {
    model(|| {
        let (half, client) = (
            Arc::new(ArbiterHalf::default()),
            Arc::new(ClientHalf::default()),
        );
        half.open(0, &grant(1));
        half.expire(0, 90);
        let (gate, wants) = (Arc::clone(&half), Arc::clone(&client));
        let waiter = thread::spawn(move || {
            wants.want(0).expect("device").begin_waiting();
            // Rings where this is false.
            gate.device(0).expect("device").is_attended()
        });
        half.close(0);
        let seen = client.waiting(0);
        let silent = waiter.join().expect("waiter");
        assert!(seen == 1 || !silent, "it waits, and nobody knows");
    });
}

#[test]
fn two_processes_never_hold_more_than_the_limit_together() {
    model(|| {
        let page = Arc::new(TenantPage::default());
        page.use_slots(2);
        let theirs = Arc::clone(&page);
        let other = thread::spawn(move || {
            let account = Account::new(&theirs, 1).expect("slot");
            account.reserve(0, 6, 10).is_ok()
        });
        let account = Account::new(&page, 0).expect("slot");
        let ours = account.reserve(0, 6, 10).is_ok();
        let theirs = other.join().expect("other");
        assert!(!(ours && theirs), "12 of 10 bytes");
        let held = if ours || theirs { 6 } else { 0 };
        assert_eq!(page.used_bytes(0), held, "what was refused was taken back");
        assert!(page.peak_bytes(0) <= 10);
    });
}

#[test]
fn requests_that_fit_together_are_both_granted_or_retried() {
    model(|| {
        let page = Arc::new(TenantPage::default());
        page.use_slots(2);
        let theirs = Arc::clone(&page);
        let other = thread::spawn(move || {
            let account = Account::new(&theirs, 1).expect("slot");
            account.reserve(0, 4, 10).expect("4 and 6 of 10 fit");
        });
        let account = Account::new(&page, 0).expect("slot");
        account.reserve(0, 6, 10).expect("6 and 4 of 10 fit");
        other.join().expect("other");
        assert_eq!(page.used_bytes(0), 10);
    });
}

#[test]
fn a_request_that_fits_is_never_refused_for_another_that_gives_back() {
    model(|| {
        let page = Arc::new(TenantPage::default());
        page.use_slots(2);
        let theirs = Arc::clone(&page);
        let before = Account::new(&page, 1).expect("slot");
        before.reserve(0, 3, 10).expect("fits");
        let other = thread::spawn(move || {
            Account::new(&theirs, 1).expect("slot").release(0, 3);
        });
        let account = Account::new(&page, 0).expect("slot");
        account.reserve(0, 7, 10).expect("7 and 3 of 10 fit");
        other.join().expect("other");
        assert_eq!(page.used_bytes(0), 7);
    });
}

#[test]
fn nothing_of_a_dead_process_remains() {
    model(|| {
        let page = Arc::new(TenantPage::default());
        page.use_slots(2);
        Account::new(&page, 1)
            .expect("slot")
            .reserve(0, 8, 10)
            .expect("fits");
        let arbiter = Arc::clone(&page);
        let clearing = thread::spawn(move || arbiter.clear_slot(1));
        let account = Account::new(&page, 0).expect("slot");
        let early = account.reserve(0, 8, 10).is_ok();
        clearing.join().expect("arbiter");
        if !early {
            account
                .reserve(0, 8, 10)
                .expect("the dead one's memory is free");
        }
        assert_eq!(page.used_bytes(0), 8);
    });
}

#[test]
fn a_second_process_that_is_welcomed_is_counted_by_the_first() {
    model(|| {
        let page = Arc::new(TenantPage::default());
        page.use_slots(1);
        let second = Arc::clone(&page);
        let other = thread::spawn(move || {
            // The arbiter raises the count before it welcomes the process.
            second.use_slots(2);
            Account::new(&second, 1)
                .expect("slot")
                .reserve(0, 6, 10)
                .is_ok()
        });
        let account = Account::new(&page, 0).expect("slot");
        let ours = account.reserve(0, 6, 10).is_ok();
        let theirs = other.join().expect("other");
        assert!(!(ours && theirs), "12 of 10 bytes");
    });
}

#[test]
fn a_block_that_goes_from_its_owner_to_an_importer_is_never_missed() {
    model(|| {
        let page = Arc::new(TenantPage::default());
        page.use_slots(2);
        let block = Block {
            id: 7,
            device: 0,
            bytes: 6,
        };
        let owner = Account::new(&page, 1).expect("slot");
        owner.reserve(0, 6, 10).expect("fits");
        assert!(owner.share_own(block));
        let theirs = Arc::clone(&page);
        let other = thread::spawn(move || {
            // The importer has it before the owner gives it back.
            let importer = Account::new(&theirs, 0).expect("slot");
            assert_eq!(importer.share(block, 10), Ok(true));
            Account::new(&theirs, 1).expect("slot").unshare(7);
        });
        let account = Account::new(&page, 1).expect("slot");
        let over = account.reserve(0, 6, 10).expect_err("12 of 10 bytes");
        assert_eq!(over.limit_bytes, 10);
        other.join().expect("other");
        assert_eq!(page.used_bytes(0), 6);
    });
}

#[test]
fn what_is_prepaid_and_given_back_refuses_nobody_who_waits() {
    model(|| {
        let page = Arc::new(TenantPage::default());
        page.use_slots(2);
        let theirs = Arc::clone(&page);
        let other = thread::spawn(move || {
            let account = Account::new(&theirs, 1).expect("slot");
            if let Ok(prepaid) = account.prepay(0, 6, 10, true) {
                account.settle(0, prepaid, 2);
            }
        });
        let account = Account::new(&page, 0).expect("slot");
        let ours = account.reserve(0, 6, 10).is_ok();
        other.join().expect("other");
        let held = page.used_bytes(0);
        assert!(held <= 10 && page.peak_bytes(0) <= 10);
        // The first to come has it, and nothing undecided remains.
        assert!([2, 6, 8].contains(&held), "{held} of {ours}");
        account.reserve(0, 10 - held, 10).expect("the rest");
    });
}

#[test]
fn work_is_in_flight_until_its_mark_is_passed() {
    model(|| {
        let half = Arc::new(ClientHalf::default());
        let client = Arc::clone(&half);
        let worker = thread::spawn(move || {
            let (_, stream) = client.claim_stream(0).expect("slot");
            let mark = stream.issue();
            // In the device's place.
            stream.settle();
            assert_eq!(stream.done(), mark);
        });
        let seen = half.in_flight(0);
        assert!(seen.marks <= 1 && seen.streams <= 1, "{seen:?}");
        worker.join().expect("worker");
        assert_eq!(half.in_flight(0).marks, 0);
    });
}

#[test]
fn a_stream_slot_has_one_owner() {
    model(|| {
        let half = Arc::new(ClientHalf::default());
        let client = Arc::clone(&half);
        let other = thread::spawn(move || {
            let (at, stream) = client.claim_stream(0).expect("one for each");
            stream.issue();
            at
        });
        let (at, stream) = half.claim_stream(0).expect("one for each");
        stream.issue();
        assert_ne!(at, other.join().expect("other"));
        assert_eq!(half.in_flight(0).streams, 2);
    });
}

#[test]
fn the_last_stream_slot_has_one_owner_too() {
    model(|| {
        let half = Arc::new(ClientHalf::default());
        half.claim_stream(0).expect("the first of two");
        let client = Arc::clone(&half);
        let other = thread::spawn(move || client.claim_stream(0).map(|(at, _)| at));
        let ours = half.claim_stream(0).map(|(at, _)| at);
        let theirs = other.join().expect("other");
        assert!(
            ours.is_none() || theirs.is_none(),
            "{ours:?} and {theirs:?} of two"
        );
        assert!(ours.is_some() || theirs.is_some(), "one was left");
    });
}

#[test]
fn a_stream_slot_is_taken_over_only_while_nothing_is_outstanding() {
    model(|| {
        let half = Arc::new(ClientHalf::default());
        let owner = Arc::new(Owner::default());
        half.claim_stream(0).expect("a slot");
        drop(owner.take(owner.look(), 1).expect("nobody's"));
        let (client, owned) = (Arc::clone(&half), Arc::clone(&owner));
        let marking = thread::spawn(move || {
            if let Hold::Held(_holding) = owned.hold(1) {
                client.stream(0).expect("slot").issue();
            }
        });
        let look = owner.look();
        let word = half.stream(0).expect("slot");
        if word.is_idle()
            && let Some(_holding) = owner.take(look, 2)
        {
            assert!(word.is_idle(), "its owner marks");
        }
        marking.join().expect("marking");
    });
}

#[test]
fn nobody_marks_a_stream_once_it_was_taken_off_its_slot() {
    model(|| {
        let owner = Arc::new(Owner::default());
        drop(owner.take(owner.look(), 1).expect("nobody's"));
        let destroyed = Arc::new(AtomicBool::new(false));
        let (owned, gone) = (Arc::clone(&owner), Arc::clone(&destroyed));
        let marking = thread::spawn(move || {
            if let Hold::Held(_holding) = owned.hold(1) {
                assert!(
                    !gone.load(Ordering::Relaxed),
                    "a mark on its way to nowhere"
                );
            }
        });
        // A holder is waited for; here, a thread that comes too early leaves the stream as it is.
        if let Hold::Held(holding) = owner.hold_any() {
            holding.retire();
            destroyed.store(true, Ordering::Relaxed);
        }
        marking.join().expect("marking");
    });
}

#[test]
fn a_record_is_read_whole_or_not_at_all() {
    fn oom(value: u64) -> Event {
        Event::OverLimit {
            limit_bytes: value,
            used_bytes: value,
            requested_bytes: value,
            charged_bytes: value,
        }
    }
    model(|| {
        let half = Arc::new(ClientHalf::default());
        let client = Arc::clone(&half);
        let writer = thread::spawn(move || {
            // One more than the ring has space for.
            for value in 1..=3 {
                client.write_record(0, oom(value));
            }
        });
        let (mut next, mut read, mut missed) = (0, 0, 0);
        let mut take = |record: Result<channel::Record, channel::BadRecord>| {
            let record = record.expect("a kind that exists");
            let whole = (1..=3).any(|value| record.event == oom(value));
            assert!(whole, "{record:?}");
            read += 1;
        };
        missed += half.read_records(&mut next, &mut take);
        writer.join().expect("writer");
        missed += half.read_records(&mut next, &mut take);
        assert_eq!(read + missed, 3, "read {read}, missed {missed}");
    });
}
