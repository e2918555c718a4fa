//! Who is at the hook's address without its token: as a hook, and as a crowd.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
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
    let ends = Arc::new(AtomicBool::new(false));
    let (own, kept) = (Arc::clone(&ends), Arc::clone(&heard));
    listener.set_nonblocking(true).expect("a listener");
    let thread = std::thread::spawn(move || {
        while !own.load(Ordering::Relaxed) {
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
        ends.store(true, Ordering::Relaxed);
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

/// One HTTP message with its body, as it came.
fn message(from: &mut impl BufRead) -> Option<Vec<u8>> {
    let (mut all, mut length) = (Vec::new(), 0);
    loop {
        let begin = all.len();
        from.read_until(b'\n', &mut all)
            .ok()
            .filter(|count| *count > 0)?;
        let line = String::from_utf8_lossy(&all[begin..]).to_ascii_lowercase();
        if let Some(value) = line.strip_prefix("content-length:") {
            length = value.trim().parse().ok()?;
        }
        if line.trim().is_empty() {
            break;
        }
    }
    let begin = all.len();
    all.resize(begin + length, 0);
    from.read_exact(&mut all[begin..]).ok()?;
    Some(all)
}

/// What somebody between a node and its hook has written down, and whether he says it again.
#[derive(Default)]
struct Between {
    order: Mutex<Option<Vec<u8>>>,
    repeats: AtomicBool,
    repeated: AtomicUsize,
}

impl Between {
    /// Passes everything on, until an order to start is said again in place of every later answer:
    /// on the connection that it came on, and on later ones, whose sessions are genuine.
    fn relay(&self, node: TcpStream, hook: TcpStream) {
        let (Ok(questions), Ok(mut onward)) = (node.try_clone(), hook.try_clone()) else {
            return;
        };
        std::thread::spawn(move || {
            let _ = std::io::copy(&mut BufReader::new(questions), &mut onward);
            let _ = onward.shutdown(Shutdown::Write);
        });
        let (mut answers, mut back) = (BufReader::new(hook), node);
        while let Some(mut answer) = message(&mut answers) {
            let text = String::from_utf8_lossy(&answer);
            let mut order = self.order.lock().expect("no panic");
            if order.is_none() && text.contains(r#""kind":"start""#) {
                *order = Some(answer.clone());
            } else if self.repeats.load(Ordering::SeqCst) && !text.contains(r#""proof""#) {
                answer.clone_from(order.as_ref().expect("an order was said"));
                self.repeated.fetch_add(1, Ordering::SeqCst);
            }
            drop(order);
            if back.write_all(&answer).is_err() {
                break;
            }
        }
        let _ = back.shutdown(Shutdown::Both);
    }
}

#[test]
fn an_order_that_was_listened_to_starts_nothing_when_it_is_said_again() {
    let mut hook = Hook::new();
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    let between = Arc::new(Between::default());
    let (own, real) = (Arc::clone(&between), hook.port.clone());
    let to = format!("127.0.0.1:{real}");
    std::thread::spawn(move || {
        for node in listener.incoming().flatten() {
            let Ok(hook) = TcpStream::connect(&to) else {
                continue;
            };
            let own = Arc::clone(&own);
            std::thread::spawn(move || own.relay(node, hook));
        }
    });
    hook.port = address.port().to_string();
    let node = hook.node("a");
    hook.port = real;
    wait_until("the node reports", || hook.is_up(&node).then_some(()));
    let marks = node.sandbox.path("marks");
    let script = format!("echo once >> {}", marks.display());
    hook.ask(&["submit", "--", "sh", "-c", &script]).succeeded();
    wait_until("the job is done", || {
        (hook.phases() == ["done"]).then_some(())
    });
    assert!(between.order.lock().expect("no panic").is_some());

    between.repeats.store(true, Ordering::SeqCst);
    wait_until("the order is said again on several connections", || {
        (between.repeated.load(Ordering::SeqCst) >= 3).then_some(())
    });
    wait_until("the node's journal says that it is not obeyed", || {
        let mut lines = node.sandbox.events().into_iter();
        lines.find(|line| line.kind == "node_refused_hook")
    });
    between.repeats.store(false, Ordering::SeqCst);
    wait_until("the node listens to the hook again", || {
        hook.is_up(&node).then_some(())
    });
    hook.ask(&["submit", "--", "true"]).succeeded();
    wait_until("and does what it says", || {
        (hook.phases() == ["done", "done"]).then_some(())
    });
    let marks = std::fs::read_to_string(marks).expect("its mark");
    assert_eq!(marks, "once\n", "it was started again");
}
