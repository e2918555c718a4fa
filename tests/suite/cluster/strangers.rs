//! Who is at the hook's address without its token: as a hook, and as a crowd.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::*;

/// Takes the address of a hook that is gone and gives everybody who asks the same answer; what it
/// has heard.
fn impostor(address: &str, answer: &str) -> (Arc<Mutex<String>>, impl FnOnce() + use<>) {
    let listener = wait_until("the address is free", || TcpListener::bind(address).ok());
    let heard = Arc::new(Mutex::new(String::new()));
    let text = format!(
        "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{answer}",
        answer.len()
    );
    let ends = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let (own, kept) = (Arc::clone(&ends), Arc::clone(&heard));
    listener.set_nonblocking(true).expect("a listener");
    let thread = std::thread::spawn(move || {
        while !own.load(std::sync::atomic::Ordering::Relaxed) {
            let Ok((mut stream, _)) = listener.accept() else {
                std::thread::sleep(Duration::from_millis(5));
                continue;
            };
            let _ = stream.set_nonblocking(false);
            let _ = stream.set_read_timeout(Some(Duration::from_millis(500)));
            let mut chunk = [0; 16 << 10];
            while let Ok(count @ 1..) = stream.read(&mut chunk) {
                let words = String::from_utf8_lossy(&chunk[..count]).into_owned();
                kept.lock().expect("no panic").push_str(&words);
                if stream.write_all(text.as_bytes()).is_err() {
                    break;
                }
            }
        }
    });
    let end = move || {
        ends.store(true, std::sync::atomic::Ordering::Relaxed);
        let _ = thread.join();
    };
    (heard, end)
}

#[test]
fn who_takes_the_hook_s_address_learns_nothing_is_not_obeyed_and_disables_no_node() {
    let mut hook = Hook::new();
    let node = hook.node("a");
    wait_until("the node reports", || hook.is_up(&node).then_some(()));
    let id = hook.json(&["status", "--json"])["hook"].clone();
    let token = std::fs::read_to_string(hook.token_file()).expect("the token");
    hook.kill();
    // What an agent took for a hook's answer: an order to make a file, under a number that later
    // ones never reach.
    let made = node.sandbox.path("made");
    let start = serde_json::json!({"name": "x", "command": ["touch", made], "simulated": true});
    let answer = serde_json::json!({
        "hook": {"cluster": id["cluster"], "epoch": id["epoch"].as_u64().map(|epoch| epoch + 1), "nonce": "x"},
        "nonce": "0".repeat(64),
        "proof": "0".repeat(64),
        "report_ms": 1000,
        "orders": [{"seq": 999_999, "run": {"job": 9, "attempt": 1}, "what": {"kind": "start", "body": start}}],
    });
    let (heard, end) = impostor(&format!("127.0.0.1:{}", hook.port), &answer.to_string());
    let asked = || heard.lock().expect("no panic").matches("HTTP/1.1").count();
    wait_until("the agent has asked it more than once", || {
        (asked() >= 2).then_some(())
    });
    let jobs = hook.ask(&["jobs"]);
    assert!(
        jobs.code == Some(125) && jobs.stderr.contains("does not know the token"),
        "{jobs:?}"
    );
    end();
    let heard = heard.lock().expect("no panic").clone();
    assert!(!heard.contains(token.trim()), "the token was handed over");
    assert!(
        !heard.contains("\"instance\""),
        "it learnt of the node: {heard}"
    );
    let line = wait_until("the arbiter's journal says who is refused", || {
        let mut lines = node.sandbox.events().into_iter();
        lines.find(|line| line.kind == "node_refused_hook")
    });
    let reason = line.fields["reason"].as_str().unwrap_or_default();
    assert!(reason.contains("does not know the token"), "{line:?}");
    hook.start();
    wait_until("the node reports again", || hook.is_up(&node).then_some(()));
    submit(
        &hook,
        "after",
        false,
        &["load", "--kernel-us", "1000", "--for-ms", "100"],
    );
    wait_until("it is done", || {
        hook.phases()
            .iter()
            .all(|phase| phase == "done")
            .then_some(())
    });
    assert!(!made.exists(), "an order of somebody else was carried out");
}

#[test]
fn a_crowd_of_idle_connections_and_unread_bodies_locks_nobody_out() {
    let hook = Hook::new();
    let node = hook.node("a");
    wait_until("the node reports", || hook.is_up(&node).then_some(()));
    let address = format!("127.0.0.1:{}", hook.port);
    let head = "POST /v1/jobs HTTP/1.1\r\nContent-Length: 8000000\r\n\r\n";
    let crowd: Vec<TcpStream> = (0..600)
        .filter_map(|at| {
            let mut stream = TcpStream::connect(&address).ok()?;
            match at % 3 {
                0 => {}
                1 => stream.write_all(&head.as_bytes()[..20]).ok()?,
                _ => {
                    stream.write_all(head.as_bytes()).ok()?;
                    let _ = stream.write_all(&[b'x'; 4096]);
                }
            }
            Some(stream)
        })
        .collect();
    assert!(crowd.len() > 256, "{}", crowd.len());
    submit(
        &hook,
        "among",
        false,
        &["load", "--kernel-us", "1000", "--for-ms", "100"],
    );
    wait_until("it is done", || {
        hook.phases()
            .iter()
            .all(|phase| phase == "done")
            .then_some(())
    });
    assert!(hook.is_up(&node));
    let pid = hook.process.as_ref().expect("it runs").id();
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task"))
        .expect("its threads")
        .count();
    println!(
        "now: {} strangers, {tasks} threads, a job is submitted and done",
        crowd.len()
    );
    assert!(tasks < 32, "strangers have threads: {tasks}");
}

#[test]
fn a_hook_with_few_descriptors_gives_them_to_those_who_know_the_token() {
    let mut hook = Hook::new();
    hook.kill();
    hook.descriptors = Some(32);
    hook.start();
    let address = format!("127.0.0.1:{}", hook.port);
    let crowd: Vec<TcpStream> = (0..60)
        .filter_map(|_| TcpStream::connect(&address).ok())
        .collect();
    assert!(crowd.len() > 32, "{}", crowd.len());
    for _ in 0..3 {
        hook.json(&["status", "--json"]);
    }
    let pid = hook.process.as_ref().expect("it runs").id();
    let open = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("its descriptors");
    println!(
        "now: {} strangers, {} descriptors of 32, status is answered",
        crowd.len(),
        open.count()
    );
}

/// A connection of a client's to the hook through somebody in between, who writes down what the
/// client says; then says it again.
#[test]
fn a_request_that_was_listened_to_is_carried_out_once() {
    let hook = Hook::new();
    let between = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}", between.local_addr().expect("an address"));
    let real = format!("127.0.0.1:{}", hook.port);
    let to = real.clone();
    let thread = std::thread::spawn(move || {
        let (client, _) = between.accept().expect("a client");
        let server = TcpStream::connect(&to).expect("the hook");
        server.set_nodelay(true).expect("a socket");
        let (mut answers, mut back) = (
            server.try_clone().expect("a socket"),
            client.try_clone().expect("a socket"),
        );
        let copier = std::thread::spawn(move || {
            let _ = std::io::copy(&mut answers, &mut back);
        });
        let (mut from, mut onward) = (client, server);
        let mut said: Vec<Vec<u8>> = Vec::new();
        let mut chunk = [0; 16 << 10];
        while let Ok(count @ 1..) = from.read(&mut chunk) {
            said.push(chunk[..count].to_vec());
            if onward.write_all(&chunk[..count]).is_err() {
                break;
            }
        }
        // On the connection that it was for, which still stands.
        if let Some(last) = said.last() {
            let _ = onward.write_all(last);
        }
        let _ = onward.shutdown(std::net::Shutdown::Write);
        testbed::join(copier);
        said.concat()
    });
    let mut submit = hook
        .sandbox
        .sublet(["cluster", "submit", "--cluster", &url]);
    submit.arg("--token-file").arg(hook.token_file());
    Outcome::of(submit.args(["--", "true"])).succeeded();
    let said = testbed::join(thread);
    assert!(
        String::from_utf8_lossy(&said).contains("POST /v1/jobs"),
        "the request was in what was listened to"
    );
    // On one of its own.
    let mut stream = TcpStream::connect(&real).expect("the hook");
    stream
        .set_read_timeout(Some(tests::PATIENCE))
        .expect("a socket");
    stream.write_all(&said).expect("sent");
    stream
        .shutdown(std::net::Shutdown::Write)
        .expect("a socket");
    let mut answers = Vec::new();
    let _ = stream.read_to_end(&mut answers);
    let answers = String::from_utf8_lossy(&answers);
    assert!(answers.contains(" 401 "), "{answers}");
    assert_eq!(hook.jobs().len(), 1, "it was carried out again");
}
