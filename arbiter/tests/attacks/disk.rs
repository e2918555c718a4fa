//! Disks that take nothing: nobody's turn, start or answer waits for them.

use std::io::Read;
use std::time::Duration;

use rustix::fs::{CWD, FileType, Mode};

use crate::bench::{Daemon, Worker, attach, named, until};

/// Makes every write of the state wait, as on a disk that does not answer: what opens a pipe to
/// write waits for a reader.
fn stop_the_disk(daemon: &Daemon) -> std::path::PathBuf {
    let beside = daemon.dir.state_file().with_extension("json.new");
    until("nothing is being written", || {
        let _ = std::fs::remove_file(&beside);
        rustix::fs::mknodat(CWD, &beside, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).ok()
    });
    beside
}

#[test]
fn a_disk_that_stands_still_keeps_nobody_from_starting_running_and_asking() {
    let daemon = Daemon::start();
    let mut operator = daemon.operator();
    let [old, new] = ["old", "new"].map(|name| named(name, 0.5));
    let old = operator.register(old).expect("registered");
    let old = Worker::start(attach(&old));
    until("it runs", || (old.launches() > 50).then_some(()));
    let pipe = stop_the_disk(&daemon);
    let new = operator.register(new).expect("registered");
    let new = Worker::start(attach(&new));
    for _ in 0..3 {
        let before = [old.launches(), new.launches()];
        until("both go on", || {
            let now = [old.launches(), new.launches()];
            (now[0] > before[0] + 100 && now[1] > before[1] + 100).then_some(())
        });
        assert_eq!(operator.list().expect("list").len(), 2);
    }
    let reported = until("it is reported", || {
        let events = operator.events(0, 0).expect("events");
        events.into_iter().find(|event| event.kind == "unsaved")
    });
    assert_eq!(reported.job, "new");
    // Once the disk takes it again the file has both.
    let reader = open_at_once(&pipe).expect("the disk is back");
    until("the state is in its place", || {
        let _ = operator.set("old", changed());
        let mut text = String::new();
        let _ = open_at_once(&daemon.dir.state_file())
            .and_then(|mut file| file.read_to_string(&mut text));
        text.contains("\"new\"").then_some(())
    });
    drop(reader);
    std::thread::sleep(Duration::from_millis(1));
}

/// Opens a file to read; a pipe, too, without waiting for a writer.
fn open_at_once(path: &std::path::Path) -> std::io::Result<std::fs::File> {
    let flags = rustix::fs::OFlags::NONBLOCK | rustix::fs::OFlags::CLOEXEC;
    let fd = rustix::fs::openat(CWD, path, flags, Mode::empty())?;
    Ok(fd.into())
}

fn changed() -> control::Change {
    control::Change {
        settings: control::JobSettings {
            share: Some(0.4),
            ..control::JobSettings::default()
        },
        ..control::Change::default()
    }
}
