//! `sublet frontend`: a service's frontend, and a look at it. What it does is
//! [`cluster::frontend`]'s; here are its words, its signals and its pages.

pub mod args;
mod figures;

use std::io::{self, Write as _};
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use cluster::frontend::fleet::Terms;
use cluster::frontend::{Listener, Options, Prepared, Reach, Status, Stop, ask_status};
use cluster::live::http::pages::{self, Page, Question};
use cluster::live::http::server;
use control::paths::{RuntimeDir, Surroundings};
use nix::sys::signal::{SigSet, Signal};
use policy::standbys::Sla;

use crate::connect;
use crate::exit::Result;
use crate::json;
use crate::table::{Align, Table};
use args::{FrontendRun, FrontendStatus};

/// TIMEOUT: an arbiter answers within milliseconds; requests go on without it.
const ARBITER: Duration = Duration::from_secs(2);
/// TIMEOUT: a frontend answers at once.
const STATUS: Duration = Duration::from_secs(5);
/// Lines for stderr that wait; where nobody reads it, later ones are lost.
const LINES: usize = 64;
/// Bodies that are held at a time: so many of the longest, and no less than this.
const BODIES: (usize, usize) = (8, 256 << 20);

/// Runs one until a signal ends it.
///
/// # Errors
/// An address that cannot be listened at, words that contradict each other, requests that were cut
/// off at the end.
pub fn run(args: &FrontendRun) -> Result<String> {
    // Before there is a second thread: each of them would have to hold the signals back.
    let ending: SigSet = [Signal::SIGTERM, Signal::SIGINT].into_iter().collect();
    ending.thread_block().context("cannot hold signals back")?;
    let prepared = Prepared::new(options(args)?).map_err(|why| anyhow!(why))?;
    let listener = Listener::bind(&args.listen).map_err(|error| {
        anyhow!(
            "cannot listen at {}: {error} (choose another --listen)",
            args.listen
        )
    })?;
    let (admin, admin_at) = server::listen(args.admin).map_err(|error| {
        anyhow!(
            "cannot listen at {}: {error} (choose another --admin)",
            args.admin
        )
    })?;
    let say = teller().context("cannot start a thread")?;
    let reporter = prepared.reporter();
    thread("status", move || {
        let _ = pages::serve(&admin, move |question| page(question, &reporter()));
    })?;
    end_by_signal(ending, prepared.stop())?;
    say(&format!(
        "frontend at {}; status and figures at http://{admin_at}",
        listener.address()
    ));
    let last = Arc::clone(&say);
    let cut = prepared
        .run(listener, reach(), move |line| say(line))
        .map_err(|error| anyhow!("the frontend at {} has failed: {error}", args.listen))?;
    drop(last);
    match cut {
        0 => Ok(String::new()),
        cut => Err(anyhow!(
            "{cut} requests were cut off: they took longer than --drain {}",
            control::short_span(args.drain)
        )
        .into()),
    }
}

fn options(args: &FrontendRun) -> Result<Options> {
    // CAST: at most 256.
    let all = args.instances.len() as u32;
    let most = args.most.unwrap_or(all);
    if args.least > most || most > all {
        return Err(anyhow!(
            "--least {} --most {most} of {all} instances: write a least number that is no more than the most, and that no more than there are",
            args.least
        )
        .into());
    }
    if args.sla.within > args.timeout {
        return Err(anyhow!(
            "--timeout {} is shorter than the {} of --sla: requests would end before they are late",
            control::short_span(args.timeout),
            control::short_span(args.sla.within)
        )
        .into());
    }
    let body_bytes = usize::try_from(args.max_body).unwrap_or(usize::MAX);
    Ok(Options {
        terms: Terms {
            sla: Sla {
                within_s: args.sla.within.as_secs_f64(),
                level: args.sla.level,
                burst: args.burst,
            },
            frontends: args.frontends,
            // CAST: at most an hour.
            history_s: args.history.as_secs() as u32,
            concurrency: args.concurrency,
            least: args.least,
            most,
            prune: args.prune,
        },
        instances: args.instances.clone(),
        timeout: args.timeout,
        drain: args.drain,
        connections: args.connections as usize,
        body_bytes,
        bodies_bytes: body_bytes.saturating_mul(BODIES.0).max(BODIES.1),
        retry: args.retry,
    })
}

/// Looked for each time: the host's arbiter may have come meanwhile.
fn reach() -> Reach {
    Box::new(|| {
        let dir = RuntimeDir::find(&Surroundings::of_this_process());
        let dir = dir.map_err(|error| error.to_string())?;
        connect::within(&dir, ARBITER).map_err(|error| error.to_string())
    })
}

fn thread(name: &str, work: impl FnOnce() + Send + 'static) -> Result<()> {
    let builder = std::thread::Builder::new().name(name.into());
    builder.spawn(work).context("cannot start a thread")?;
    Ok(())
}

fn end_by_signal(ending: SigSet, stop: Stop) -> Result<()> {
    thread("signals", move || {
        while ending.wait().is_ok() {
            stop.stop();
        }
    })
}

type Say = Arc<dyn Fn(&str) + Send + Sync>;

/// Lines on stderr, which hold up nobody.
fn teller() -> io::Result<Say> {
    let (lines, coming): (SyncSender<String>, _) = sync_channel(LINES);
    let write = move || {
        for line in coming {
            let _ = writeln!(io::stderr(), "sublet: {line}");
        }
    };
    std::thread::Builder::new()
        .name("lines".into())
        .spawn(write)?;
    Ok(Arc::new(move |line| {
        let _ = lines.try_send(line.replace('\n', "; "));
    }))
}

fn page(question: &Question, status: &Status) -> Page {
    let plain = |status, text: &str| Page {
        status,
        media: "text/plain; charset=utf-8",
        text: text.to_owned(),
    };
    if !matches!(question.method.as_str(), "GET" | "HEAD") {
        return plain(405, "only GET and HEAD are answered here\n");
    }
    match question.path.as_str() {
        "/status" => Page {
            status: 200,
            media: "application/json",
            text: serde_json::to_string(status).unwrap_or_default() + "\n",
        },
        "/metrics" => Page {
            status: 200,
            media: figures::MEDIA,
            text: figures::exposition(status),
        },
        "/" => plain(200, "sublet frontend: the pages are /status and /metrics\n"),
        _ => plain(
            404,
            "there is no such page: /status and /metrics are there\n",
        ),
    }
}

/// What to print of one.
///
/// # Errors
/// It is not reached, or is no frontend.
pub fn status(args: &FrontendStatus) -> Result<String> {
    let at = args.admin;
    let text = ask_status(at, "/status", STATUS).map_err(|error| {
        anyhow!("no frontend answers at {at}: {error} (its first line on stderr says where it is)")
    })?;
    let status: Status = serde_json::from_str(&text)
        .map_err(|error| anyhow!("who answers at {at} is no frontend: {error}"))?;
    Ok(match args.json {
        true => json::object(serde_json::to_value(&status)?),
        false => text_of(&status),
    })
}

fn ms(seconds: f64) -> String {
    format!("{:.1} ms", seconds * 1e3)
}

fn text_of(status: &Status) -> String {
    let service = status.service_s.map_or("not known yet".to_owned(), ms);
    let lately = &status.last_minute;
    let kept = match (lately.requests, lately.is_met) {
        (0, _) => "no request",
        (_, true) => "kept",
        (_, false) => "NOT kept",
    };
    let percentile = lately.percentile_s.map_or("-".to_owned(), ms);
    let counts = &status.counts;
    let mut text = format!(
        "load      {:.1} requests/s, {:.1} predicted, of {} frontend(s); service {service}\n\
         instances {} in use, {} ready, {} in all; a return takes {}\n\
         agreement p{} within {}: {kept} in the last minute ({} of {} in time, p{} {percentile})\n\
         requests  {} in all, {} answered, {} in time, {} pruned, {} failed, {} left; {} waiting\n",
        status.rate_per_s,
        status.predicted_per_s,
        status.frontends,
        status.in_use,
        status.ready,
        status.instances.len(),
        ms(status.return_s),
        percent(status.level),
        ms(status.within_s),
        lately.in_time,
        lately.requests,
        percent(status.level),
        counts.requests,
        counts.answered,
        counts.in_time,
        counts.pruned,
        counts.failed,
        counts.left,
        status.waiting,
    );
    if !status.arbiter {
        text +=
            "arbiter   does not answer: requests bring instances back, nothing does so before\n";
    }
    let columns = [
        ("INSTANCE", Align::Left),
        ("ROLE", Align::Left),
        ("MEMORY", Align::Left),
        ("BUSY", Align::Right),
        ("REQUESTS", Align::Right),
        ("FAILED", Align::Right),
        ("ADDRESS", Align::Left),
        ("WHY", Align::Left),
    ];
    let mut table = Table::new(&columns);
    for one in &status.instances {
        table.row(vec![
            one.name.clone(),
            one.role.clone(),
            one.memory.clone(),
            one.busy.to_string(),
            one.requests.to_string(),
            one.failures.to_string(),
            one.address.clone(),
            one.reason.clone(),
        ]);
    }
    text + "\n" + &table.render()
}

/// A part as a percentage, with no more digits than it needs.
fn percent(part: f64) -> String {
    let text = format!("{:.3}", part * 100.0);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use cluster::frontend::InstanceStatus;

    use super::*;

    fn args(words: &[&str]) -> FrontendRun {
        let all = [
            "sublet",
            "frontend",
            "run",
            "--listen",
            "127.0.0.1:0",
            "--sla",
            "p99=1s",
        ];
        let all = all.iter().chain(words).map(std::ffi::OsString::from);
        let cli = crate::args::parse(all).unwrap();
        let crate::args::Command::Frontend(frontend) = cli.command else {
            panic!("{cli:?}");
        };
        match frontend.command {
            args::FrontendCommand::Run(run) => *run,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn words_that_contradict_each_other_are_refused() {
        let two = ["--instance", "a=h:1", "--instance", "b=h:2"];
        let with = |more: &[&str]| options(&args(&[&two[..], more].concat()));
        let good = with(&["--most", "1"]).unwrap();
        assert_eq!((good.terms.least, good.terms.most), (0, 1));
        assert_eq!(with(&[]).unwrap().terms.most, 2);
        for (more, word) in [
            (&["--least", "3"][..], "--least 3"),
            (&["--most", "3"], "of 2 instances"),
            (&["--least", "2", "--most", "1"], "--least 2 --most 1"),
            (&["--timeout", "500ms"], "--timeout 500ms"),
        ] {
            let line = with(more).unwrap_err().line();
            assert!(line.contains(word), "{line}");
        }
    }

    #[test]
    fn the_status_says_what_is_kept_and_what_is_not() {
        let mut status = Status {
            within_s: 0.2,
            level: 0.99,
            in_use: 1,
            ready: 2,
            instances: vec![InstanceStatus {
                name: "a".into(),
                role: "in use".into(),
                memory: "resident".into(),
                address: "127.0.0.1:8001".into(),
                ..InstanceStatus::default()
            }],
            ..Status::default()
        };
        let text = text_of(&status);
        for word in [
            "p99 within 200.0 ms: no request",
            "does not answer",
            "127.0.0.1:8001",
        ] {
            assert!(text.contains(word), "{text}");
        }
        status.arbiter = true;
        status.service_s = Some(0.025);
        status.last_minute.requests = 10;
        status.last_minute.in_time = 9;
        let text = text_of(&status);
        for word in ["NOT kept", "9 of 10", "p99 -", "service 25.0 ms"] {
            assert!(text.contains(word), "{text}");
        }
        assert!(!text.contains("does not answer"));
        assert_eq!(percent(0.999), "99.9");
    }

    #[test]
    fn pages_are_read_and_nothing_else() {
        let status = Status::default();
        let ask = |method: &str, path: &str| {
            let question = Question {
                method: method.into(),
                path: path.into(),
                accept: String::new(),
                came: std::time::Instant::now(),
            };
            page(&question, &status)
        };
        let read: Status = serde_json::from_str(&ask("GET", "/status").text).unwrap();
        assert_eq!(read, status);
        assert!(ask("GET", "/metrics").text.ends_with("# EOF\n"));
        for (method, path, code) in [
            ("GET", "/", 200),
            ("POST", "/status", 405),
            ("GET", "/status/", 404),
        ] {
            assert_eq!(ask(method, path).status, code, "{method} {path}");
        }
    }
}
