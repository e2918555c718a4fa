//! Memory that is given back while it is away: it need not come back for that.

use super::{Host, MIB};

/// A job with two blocks, one of them small, and a mapping of its own, whose memory is away.
fn away() -> (Host, [String; 3]) {
    let mut host = Host::start();
    let stays = host.take(&format!("alloc {}", 8 * MIB));
    host.says(&format!("fill {stays} 1"), "0");
    let large = host.take(&format!("alloc {}", 80 * MIB));
    let mapped = host.take(&format!("owned {}", 4 * MIB));
    host.says(&format!("release {mapped}"), "0");
    host.evict();
    assert_eq!(host.on_the_device(), 0);
    (host, [stays, large, mapped])
}

#[test]
fn what_is_away_is_given_back_without_coming_back() {
    let (mut host, [stays, large, mapped]) = away();
    let before = (
        host.arbiter.used_bytes(),
        host.arbiter.footprint().evictable_bytes,
    );
    for line in [format!("free {large}"), format!("unmap {mapped}")] {
        host.says(&line, "0");
    }
    assert_ne!(host.run.ask(&format!("free {large}")), "0", "twice");
    let after = (
        host.arbiter.used_bytes(),
        host.arbiter.footprint().evictable_bytes,
    );
    println!(
        "now: of {} bytes that are away {} are given back, {} have come back for it",
        before.1,
        before.0 - after.0,
        host.on_the_device()
    );
    assert_eq!(before.0 - after.0, 84 * MIB);
    assert_eq!(before.1 - after.1, 84 * MIB);
    assert_eq!(host.on_the_device(), 0);
    host.restore();
    assert_eq!(host.on_the_device(), after.1);
    host.says(&format!("check {stays} 1"), "0 0");
    host.ended_well();
}

#[test]
fn what_is_away_and_kept_by_its_handle_comes_back_before_it_is_unmapped() {
    let mut host = Host::start();
    let kept = host.take(&format!("owned {}", 4 * MIB));
    host.says(&format!("fill {kept} 5"), "0");
    host.evict();
    host.run.send(&format!("unmap {kept}"));
    host.restore();
    assert_eq!(host.run.answer(), "0");
    host.says(&format!("map {kept}"), "0");
    host.says(&format!("check {kept} 5"), "0 0");
    host.ended_well();
}

#[test]
fn a_context_ends_while_its_memory_is_away() {
    let mut host = Host::start();
    let stays = host.take(&format!("alloc {}", 2 * MIB));
    host.says(&format!("fill {stays} 1"), "0");
    host.says("push", "0");
    let goes = host.take(&format!("alloc {}", 80 * MIB));
    host.says(&format!("fill {goes} 2"), "0");
    let before = host.arbiter.used_bytes();
    host.evict();
    host.says("destroy", "0");
    let given_back = before - host.arbiter.used_bytes();
    println!(
        "now: a context that ends gives {given_back} bytes back that are away, {} come back for it",
        host.on_the_device()
    );
    assert_eq!((given_back, host.on_the_device()), (80 * MIB, 0));
    host.restore();
    host.says("init", "0");
    host.says(&format!("check {stays} 1"), "0 0");
    host.ended_well();
}
