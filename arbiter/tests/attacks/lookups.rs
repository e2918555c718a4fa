//! A user database and a quota file that do not answer: slices and answers go on.

use std::sync::mpsc::{Receiver, Sender, channel};

use arbiter::{Options, Rules};

use crate::bench::{Daemon, PATIENCE, Worker, attach, directory, named, refusal, until};

/// Something that answers once it is let.
fn held() -> (Sender<()>, Receiver<()>) {
    channel()
}

fn with_names(rules: usize) -> (Sender<()>, Daemon, tempfile::TempDir) {
    let (proceed, may) = held();
    let (place, dir) = directory();
    let daemon = Daemon::start_as(dir, move |options: &mut Options| {
        options.sections.by_name = rules;
        options.user_name = Box::new(move |_| {
            let _ = may.recv_timeout(PATIENCE);
            Ok(Some("somebody".into()))
        });
    });
    (proceed, daemon, place)
}

#[test]
fn a_user_database_that_does_not_answer_holds_up_nobody() {
    let (proceed, daemon, _place) = with_names(0);
    let dir = daemon.dir.clone();
    let registers = std::thread::spawn(move || {
        let mut operator = crate::bench::operator(&dir).expect("it listens");
        operator.register(named("first", 0.5))
    });
    let mut operator = daemon.operator();
    let mut asked = 0;
    until("it is registered without the name", || {
        asked += 1;
        operator.status().expect("served meanwhile");
        registers.is_finished().then_some(())
    });
    println!("now: {asked} answers while a name is looked up");
    let job = registers.join().expect("no panic").expect("registered");
    let shown = |operator: &mut control::Client| operator.list().expect("served")[0].user.clone();
    assert_eq!(shown(&mut operator), "");
    let worker = Worker::start(attach(&job));
    until("it runs", || (worker.launches() > 100).then_some(()));
    // Nobody waits for the same name again.
    operator.register(named("second", 0.1)).expect("registered");
    proceed.send(()).expect("it listens");
    until("the name is known", || {
        (shown(&mut operator) == "somebody").then_some(())
    });
}

#[test]
fn a_user_whose_name_is_not_known_gets_past_no_ceiling_that_goes_by_names() {
    let (proceed, daemon, _place) = with_names(1);
    let mut operator = daemon.operator();
    let error = refusal(operator.register(named("early", 0.5)));
    assert!(error.message.contains("is called"), "{error:?}");
    proceed.send(()).expect("it listens");
    until("the name is known", || {
        operator.register(named("late", 0.5)).ok()
    });
}

#[test]
fn a_quota_file_on_a_disk_that_stands_still_holds_up_its_reader_alone() {
    let (proceed, may) = held();
    let (_place, dir) = directory();
    let daemon = Daemon::start_as(dir, move |options: &mut Options| {
        options.reload = Some(Box::new(move || {
            let _ = may.recv_timeout(PATIENCE);
            Ok(Rules::default())
        }));
    });
    let mut operator = daemon.operator();
    let job = operator.register(named("steady", 0.5)).expect("registered");
    let worker = Worker::start(attach(&job));
    let dir = daemon.dir.clone();
    let reads = std::thread::spawn(move || {
        let mut operator = crate::bench::operator(&dir).expect("it listens");
        operator.reload()
    });
    let before = worker.launches();
    until("slices and answers proceed on", || {
        operator.status().expect("served");
        (worker.launches() > before + 200).then_some(())
    });
    assert!(!reads.is_finished(), "nobody has read it yet");
    proceed.send(()).expect("it listens");
    reads.join().expect("no panic").expect("read again");
}
