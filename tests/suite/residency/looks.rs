//! What a program and its arbiter learn of memory that can move.

use tests::{ProgramRun, Sandbox, programs, wait_until};

use super::{Host, MIB, evictable, welcome};

#[test]
fn an_address_is_what_it_would_be_of_plain_memory() {
    let mut host = Host::start();
    let small = host.take("alloc 1000");
    let large = host.take(&format!("alloc {}", 100 * MIB + 5));
    for (id, bytes) in [(&small, 1000), (&large, 100 * MIB + 5)] {
        for offset in [0, 1, 512, bytes - 1] {
            host.says(&format!("range {id} {offset}"), &format!("0 0 {bytes}"));
        }
        let address = host.run.ask(&format!("address {id}"));
        for (attribute, value) in [
            (2, "2".to_owned()),
            (3, address.clone()),
            (8, "0".to_owned()),
            (9, "0".to_owned()),
            (10, "0".to_owned()),
            (11, address.clone()),
            (12, bytes.to_string()),
            (13, "1".to_owned()),
        ] {
            host.says(
                &format!("attribute {id} {attribute}"),
                &format!("0 {value}"),
            );
        }
        assert_ne!(
            host.run.ask(&format!("attribute {id} 1")),
            "0 0",
            "a context"
        );
        // The driver's own error: no other process can open what may be moved.
        assert_ne!(host.run.ask(&format!("ipc {id}")), "0");
        assert_ne!(host.run.ask(&format!("retain {id}")), "0");
    }
    let buffers = [&small, &large].map(|id| host.run.ask(&format!("attribute {id} 7")));
    assert_ne!(buffers[0], buffers[1]);
    host.evict();
    host.says(&format!("range {small} 3"), "0 0 1000");
    host.restore();
    host.says(&format!("free {small}"), "0");
    host.says(&format!("free {small}"), "1");
    let gone = host.run.ask(&format!("range {small} 0"));
    assert!(gone.starts_with("500 "), "{gone}");
    host.ended_well();
}

#[test]
fn kinds_of_memory_that_stay_are_reported() {
    const MANAGED: u8 = 8;
    const POOLS: u8 = 1;
    let sandbox = Sandbox::exclusive();
    let (listening, mut command) = evictable(&sandbox, &programs::program("memory"));
    let mut run = ProgramRun::start(&mut command);
    run.send("init");
    let arbiter = welcome(&listening, false, None);
    assert_eq!(run.answer(), "0");
    let staying = || arbiter.pages.client.staying(0);
    // What can be moved is none of them.
    assert_eq!(run.ask(&format!("alloc plain {}", 8 * MIB)), "0 0");
    assert_eq!(run.ask(&format!("alloc managed {}", 8 * MIB)), "0 1");
    wait_until("managed memory stays", || {
        (staying() == MANAGED).then_some(())
    });
    assert_eq!(run.ask(&format!("alloc async {}", 8 * MIB)), "0 2");
    assert_eq!(run.ask("free 1"), "0");
    wait_until("a pool's stays, and there is no managed memory", || {
        (staying() == POOLS).then_some(())
    });
}
