//! Both typed ends, joined over a real socket.

#![cfg(not(loom))]

use std::os::fd::AsFd;
use std::time::Duration;

use channel::arbiter::{Bell, ClientPages, Connection, Listener, TenantMemory, answer_bell};
use channel::client::{AttachError, ClientEnd, Introduction, Liveness};
use channel::wire::{DeviceId, Hello, Outcome, TOKEN_BYTES};
use channel::{Account, Block, Event, Grant, MAX_DEVICES};

const PATIENCE: Duration = Duration::from_secs(10);

fn introduction() -> Introduction {
    Introduction {
        token: [9; TOKEN_BYTES],
        devices: vec![DeviceId {
            uuid: [1; 16],
            total_bytes: 1 << 30,
        }],
        command: "attach test".into(),
        asked: None,
    }
}

fn wait<T>(mut attempt: impl FnMut() -> Option<T>) -> T {
    let deadline = std::time::Instant::now() + PATIENCE;
    loop {
        if let Some(value) = attempt() {
            return value;
        }
        assert!(
            std::time::Instant::now() < deadline,
            "nothing came within {PATIENCE:?}"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn accept(
    listener: &Listener,
) -> (
    Connection,
    Hello,
    Option<(std::os::fd::OwnedFd, std::os::fd::OwnedFd)>,
) {
    let connection = wait(|| listener.try_accept().expect("accept"));
    let (hello, kept) = wait(|| connection.try_hello().ok());
    (connection, hello, kept)
}

fn attach(
    listener: &Listener,
    path: &std::path::Path,
) -> (ClientEnd, ClientPages, TenantMemory, std::os::fd::OwnedFd) {
    std::thread::scope(|scope| {
        let client =
            scope.spawn(|| ClientEnd::attach(path, &introduction(), PATIENCE).expect("attached"));
        let (connection, hello, kept) = accept(listener);
        assert_eq!(hello.token, [9; TOKEN_BYTES]);
        assert_eq!(hello.command, "attach test");
        assert!(kept.is_none());
        assert_eq!(
            connection.identity().expect("identity").pid,
            std::process::id()
        );
        let mut pages = ClientPages::create().expect("pages");
        let files = pages.take_files().expect("files");
        assert!(pages.take_files().is_none(), "they are sent once");
        let tenant = TenantMemory::create().expect("tenant");
        tenant.page.use_slots(1);
        let mut map = [None; MAX_DEVICES];
        map[0] = Some(0);
        let socket = connection.welcome(files, &tenant, map).expect("welcome");
        (client.join().expect("client"), pages, tenant, socket)
    })
}

#[test]
fn grants_requests_memory_and_records_cross_the_channel() {
    let dir = tempfile::tempdir().expect("dir");
    let path = dir.path().join("channel.sock");
    let listener = Listener::bind(&path).expect("bind");
    let (client, pages, tenant, socket) = attach(&listener, &path);

    let gate = client.arbiter.device(0).expect("device 0");
    let seen = gate.look().expect_err("closed at first");
    let want = client.client.want(0).expect("device 0");
    want.begin_waiting();
    (0..100).for_each(|_| client.ring());
    let answer = || answer_bell(socket.as_fd(), &mut None);
    assert_eq!(answer(), Bell::Rang(1), "the others say nothing new");
    assert_eq!(pages.client.waiting(0), 1);
    client.ring();
    assert_eq!(answer(), Bell::Rang(0), "nobody has looked yet");
    pages.arbiter.answer_bells();
    client.ring();
    assert_eq!(answer(), Bell::Rang(1));
    pages.arbiter.answer_bells();
    let grant = Grant {
        number: 4,
        quantum_us: 5000,
        deadline_mono_ns: 77,
        window: channel::Window::always(3000),
    };
    assert!(pages.arbiter.open(0, &grant) <= 1);
    gate.wait(seen, PATIENCE);
    gate.look().expect("open");
    want.end_waiting();
    assert_eq!((gate.window_us(), gate.deadline_mono_ns()), (3000, 77));
    pages.arbiter.close(0);
    gate.look().expect_err("closed again");

    pages.arbiter.set_limit(0, Some(100));
    let account = Account::new(client.tenant, client.arbiter.tenant_slot()).expect("slot");
    account.reserve(0, 60, gate.limit_bytes()).expect("fits");
    let over = account
        .reserve(0, 41, gate.limit_bytes())
        .expect_err("does not fit");
    assert_eq!(
        (over.limit_bytes, over.used_bytes, over.requested_bytes),
        (100, 60, 41)
    );
    account
        .reserve(0, 40, gate.limit_bytes())
        .expect("fits exactly");
    account.release(0, 1000);
    assert_eq!(
        tenant.page.used_bytes(0),
        0,
        "a release of too much never wraps"
    );
    assert_eq!(tenant.page.peak_bytes(0), 100);

    // What may be given back is no reason to refuse for good, and leaves no trace in the peak.
    let prepaid = account
        .prepay(0, 70, gate.limit_bytes(), false)
        .expect("fits");
    assert_eq!((prepaid.bytes(), tenant.page.used_bytes(0)), (70, 70));
    // A process is not said to hold what may yet be taken back, nor the mark of it.
    tenant
        .page
        .name_slot(client.arbiter.tenant_slot(), 4711, None);
    assert_eq!(tenant.page.process_bytes(4711, 0, 0), Some(0));
    let over = account
        .prepay(0, 31, gate.limit_bytes(), true)
        .expect_err("nobody decides in time");
    assert_eq!(over.used_bytes, 0, "nothing is settled");
    account.settle(0, prepaid, 20);
    assert_eq!(tenant.page.used_bytes(0), 20);
    assert_eq!(tenant.page.process_bytes(4711, 0, 0), Some(20));
    // In its PID namespace it has another number, and there alone.
    let inner = channel::InnerPid {
        pid: 2,
        namespace: 99,
    };
    tenant
        .page
        .name_slot(client.arbiter.tenant_slot(), 4711, Some(inner));
    for (pid, namespace, bytes) in [
        (2, 99, Some(20)),
        (4711, 99, Some(20)),
        (4711, 7, Some(20)),
        (2, 7, None),
        (2, 0, None),
    ] {
        let found = tenant.page.process_bytes(pid, namespace, 0);
        assert_eq!(found, bytes, "{pid} in {namespace}");
    }
    account.release(0, 20);

    // A shared block counts once, for the lowest slot that has it, until nobody has it.
    tenant.page.use_slots(5);
    let other = Account::new(client.tenant, 4).expect("slot");
    let block = Block {
        id: 11,
        device: 0,
        bytes: 60,
    };
    account.reserve(0, 60, gate.limit_bytes()).expect("fits");
    assert!(account.share_own(block));
    assert_eq!(other.find_shared(11), Some(block));
    assert_eq!(other.share(block, gate.limit_bytes()), Ok(true));
    assert_eq!(tenant.page.used_bytes(0), 60);
    let slot = client.arbiter.tenant_slot();
    assert!(slot < 4);
    let by_slot = || {
        (
            tenant.page.slot_bytes(slot, 0),
            tenant.page.slot_bytes(4, 0),
        )
    };
    assert_eq!(by_slot(), (60, 0));
    account.unshare(11);
    assert_eq!(by_slot(), (0, 60), "who keeps it pays");
    let over = account
        .share(Block { id: 12, ..block }, gate.limit_bytes())
        .expect_err("another block, and 120 of 100 bytes");
    assert_eq!((over.used_bytes, over.requested_bytes), (60, 60));
    tenant.page.clear_slot(4);
    assert_eq!(tenant.page.used_bytes(0), 0, "it dies with its last holder");

    let event = Event::OverLimit {
        limit_bytes: 100,
        used_bytes: 60,
        requested_bytes: 41,
        charged_bytes: 42,
    };
    let mut next = 0;
    client.client.write_record(0, event);
    let mut read = Vec::new();
    assert_eq!(
        pages
            .client
            .read_records(&mut next, |record| read.push(record)),
        0
    );
    assert_eq!(read.len(), 1);
    assert_eq!(read[0].expect("readable").event, event);
    for _ in 0..channel::JOURNAL_SLOTS + 6 {
        client.client.write_record(0, event);
    }
    assert_eq!(
        pages.client.read_records(&mut next, |_| {}),
        6,
        "overwritten records are counted"
    );

    let (_, stream) = client.client.claim_stream(0).expect("slot");
    assert_eq!(pages.client.in_flight(0).marks, 0);
    let mark = stream.issue();
    assert_eq!(pages.client.in_flight(0).marks, 1);
    assert_eq!(pages.client.in_flight(1).marks, 0);
    // SAFETY: the page is mapped for the life of the process; this stands in for the device's
    // write.
    unsafe { stream.done_address().write_volatile(mark) };
    assert_eq!(pages.client.in_flight(0).marks, 0);
    assert_eq!(client.arbiter_liveness(), Liveness::Lives);
}

#[test]
fn the_arbiters_half_cannot_be_mapped_for_writing_by_a_client() {
    let (pages, fd) =
        channel::Mapped::<channel::ArbiterHalf>::create(channel::Writers::OnlyUs).expect("page");
    pages.publish();
    assert!(channel::Mapped::<channel::ArbiterHalf>::open(fd.as_fd(), false).is_ok());
    assert!(channel::Mapped::<channel::ArbiterHalf>::open(fd.as_fd(), true).is_err());
    assert!(
        channel::Mapped::<channel::TenantPage>::open(fd.as_fd(), false).is_err(),
        "another kind of page"
    );
}

#[test]
fn an_unready_or_unsealed_page_is_refused() {
    let (_page, fd) =
        channel::Mapped::<channel::TenantPage>::create(channel::Writers::Holders).expect("page");
    let refused = channel::Mapped::<channel::TenantPage>::open(fd.as_fd(), true);
    assert!(
        matches!(refused, Err(channel::PageError::NotReady)),
        "{refused:?}"
    );
    let file = tempfile::tempfile().expect("file");
    file.set_len(1 << 20).expect("size");
    let refused = channel::Mapped::<channel::TenantPage>::open(file.as_fd(), true);
    assert!(refused.is_err(), "{refused:?}");
}

#[test]
fn a_second_arbiter_takes_over_the_pages_with_what_they_hold() {
    let dir = tempfile::tempdir().expect("dir");
    let path = dir.path().join("channel.sock");
    let listener = Listener::bind(&path).expect("bind");
    let (client, pages, tenant, socket) = attach(&listener, &path);
    let account = Account::new(client.tenant, client.arbiter.tenant_slot()).expect("slot");
    account
        .reserve(0, 4096, channel::NO_LIMIT)
        .expect("no limit");
    drop((pages, tenant, socket));

    let second = Listener::bind(&path).expect("bind again");
    let (again, tenant) = std::thread::scope(|scope| {
        let again = scope.spawn(|| {
            ClientEnd::reattach(
                &path,
                &introduction(),
                &client,
                Duration::from_secs(1),
                PATIENCE,
            )
            .expect("again")
        });
        let (connection, hello, kept) = accept(&second);
        assert_eq!(
            (hello.previous_slot, hello.gap_ns),
            (Some(0), 1_000_000_000)
        );
        let (client_fd, tenant_fd) = kept.expect("pages come along");
        let mut pages = ClientPages::adopt(client_fd).expect("client half");
        let files = pages.take_files().expect("files");
        let tenant = TenantMemory::adopt(tenant_fd).expect("tenant page");
        connection
            .welcome(files, &tenant, [None; MAX_DEVICES])
            .expect("welcome");
        (again.join().expect("client"), tenant)
    });
    assert_eq!(tenant.page.used_bytes(0), 4096);
    account.release(0, 4096);
    assert_eq!(tenant.page.used_bytes(0), 0);
    assert!(std::ptr::eq(again.tenant, client.tenant));
}

#[test]
fn refusals_reach_the_client_with_their_text() {
    let dir = tempfile::tempdir().expect("dir");
    let path = dir.path().join("channel.sock");
    let nobody = ClientEnd::attach(&path, &introduction(), PATIENCE);
    assert!(
        matches!(nobody, Err(AttachError::Unreachable(_))),
        "{nobody:?}"
    );
    let listener = Listener::bind(&path).expect("bind");
    std::thread::scope(|scope| {
        let client = scope.spawn(|| ClientEnd::attach(&path, &introduction(), PATIENCE));
        let (connection, ..) = accept(&listener);
        connection.refuse(Outcome::UnknownToken, "no such tenant");
        match client.join().expect("client") {
            Err(AttachError::Refused(Outcome::UnknownToken, text)) => {
                assert_eq!(text, "no such tenant")
            }
            other => panic!("{other:?}"),
        }
    });
}

#[test]
fn threads_of_one_process_that_fit_one_by_one_are_never_refused_for_each_other() {
    let tenant = TenantMemory::create().expect("tenant");
    tenant.page.use_slots(1);
    let account = Account::new(&tenant.page, 0).expect("slot");
    // Space for all four at once, and none to spare.
    const LIMIT: u64 = 400;
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..20_000 {
                    account.reserve(0, 100, LIMIT).expect("fits");
                    account.release(0, 100);
                }
            });
        }
    });
    assert_eq!(tenant.page.used_bytes(0), 0);
    assert!(tenant.page.peak_bytes(0) <= LIMIT);
}

#[test]
fn whose_pages_are_mapped_is_known_and_another_program_has_none() {
    let pages = ClientPages::create().expect("pages");
    assert_eq!(pages.are_mapped_by(std::process::id()), Some(true));
    let mut child = std::process::Command::new("sleep")
        .arg("1000")
        .spawn()
        .expect("sleep starts");
    let other = pages.are_mapped_by(child.id());
    child.kill().expect("kill");
    testbed::within::wait(&mut child, "the child", testbed::PATIENCE);
    assert_eq!(other, Some(false));
    assert_eq!(pages.are_mapped_by(child.id()), None, "it is gone");
}

testbed::starts_clean!();
