//! `sublet metrics`: the arbiter's figures for Prometheus, as a page or once on stdout.
//!
//! A process of its own, so that no HTTP server lives in the arbiter: each scrape asks it as
//! `sublet ps` does. What a metric is called and where its figure comes from is in [`table`]; the
//! text is made in [`text`]. Nothing is kept between scrapes but two counts, so the series of a job
//! end with the job.

mod table;
mod text;

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::anyhow;
use cluster::live::http::pages::{self, Page, Question};
use cluster::live::http::server;
use control::paths::{RuntimeDir, Surroundings};
use control::place::Place;
use control::{ArbiterStatus, Client, JobState};

use crate::args::Metrics;
use crate::connect::{self, Unreachable};
use crate::exit::Result;
use text::Format;

/// TIMEOUT: an arbiter answers within milliseconds, and Prometheus gives a scrape up after ten
/// seconds.
const ANSWER: Duration = Duration::from_secs(2);
/// Processes of a job of which the control group is looked up until one says where the job runs.
const LOOKED_UP: usize = 4;

/// What one scrape found.
#[derive(Debug, Default)]
struct Scrape {
    /// `None`: the arbiter did not answer.
    status: Option<ArbiterStatus>,
    /// By number of the job: where its processes run.
    places: BTreeMap<u64, Place>,
    /// How long it took to ask.
    took: Duration,
    /// Of this process, this one included: scrapes, and those that the arbiter did not answer.
    scrapes: u64,
    failures: u64,
}

/// Prints one exposition, or serves them until it is ended.
///
/// # Errors
/// The arbiter's place is unfit, or the address cannot be listened at. An arbiter that is not there
/// or does not answer is no error: that is what `sublet_up` says.
pub fn metrics(args: &Metrics) -> Result<String> {
    // A place that is unfit is an error now, and not one of every scrape.
    let dir = RuntimeDir::find(&Surroundings::of_this_process())?;
    dir.verify(nix::unistd::geteuid().as_raw())?;
    let exporter = Exporter::default();
    if args.once {
        let (scrape, failed) = exporter.scrape();
        if let Some(why) = failed {
            let _ = writeln!(io::stderr(), "sublet: sublet_up is 0: {why}");
        }
        return Ok(text::exposition(&scrape, Format::Plain));
    }
    let address = args.listen;
    let (listener, address) = server::listen(address).map_err(|error| {
        anyhow!("cannot listen at {address}: {error} (choose another --listen)")
    })?;
    // One line when it can be asked, for people and for scripts that start it.
    let _ = writeln!(
        io::stderr(),
        "sublet: metrics are at http://{address}/metrics"
    );
    let exporter = Arc::new(exporter);
    let error = pages::serve(&listener, move |question| exporter.page(question));
    Err(anyhow!("cannot take connections at {address}: {error}").into())
}

/// Asks the arbiter, for one reader at a time.
#[derive(Debug, Default)]
struct Exporter {
    scrapes: AtomicU64,
    failures: AtomicU64,
    /// The last scrape, and when it began: readers that came before that share it.
    last: Mutex<Option<(Instant, Arc<Scrape>)>>,
}

impl Exporter {
    fn page(&self, question: &Question) -> Page {
        let plain = |status, text: String| Page {
            status,
            media: "text/plain; charset=utf-8",
            text,
        };
        if !matches!(question.method.as_str(), "GET" | "HEAD") {
            return plain(405, "only GET and HEAD are answered here\n".into());
        }
        match question.path.as_str() {
            "/metrics" => {
                let format = Format::asked_for(&question.accept);
                Page {
                    status: 200,
                    media: format.media(),
                    text: text::exposition(&self.shared(question.came), format),
                }
            }
            "/" => plain(200, "sublet metrics: the page is /metrics\n".into()),
            _ => plain(404, "there is no such page: /metrics is the one\n".into()),
        }
    }

    /// A scrape that began at `came` or later: however many readers wait, the arbiter is asked once
    /// for all of them.
    fn shared(&self, came: Instant) -> Arc<Scrape> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((began, scrape)) = last.as_ref()
            && *began >= came
        {
            return Arc::clone(scrape);
        }
        let began = Instant::now();
        let scrape = Arc::new(self.scrape().0);
        *last = Some((began, Arc::clone(&scrape)));
        scrape
    }

    /// Asks the arbiter; with what went wrong, where it did not answer.
    fn scrape(&self) -> (Scrape, Option<Unreachable>) {
        let began = Instant::now();
        let answer = ask();
        let took = began.elapsed();
        // SYNC(count): counts and nothing else; no data is published by them.
        let count = |of: &AtomicU64, more: bool| {
            of.fetch_add(u64::from(more), Ordering::Relaxed) + u64::from(more)
        };
        let scrapes = count(&self.scrapes, true);
        let failures = count(&self.failures, answer.is_err());
        let (status, failed) = match answer {
            Ok(mut status) => {
                // One that has ended is still shown by `sublet ps` for a while; its series end.
                status.jobs.retain(|job| job.state != JobState::Gone);
                (Some(status), None)
            }
            Err(error) => (None, Some(error)),
        };
        let scrape = Scrape {
            places: status.as_ref().map(places).unwrap_or_default(),
            status,
            took,
            scrapes,
            failures,
        };
        (scrape, failed)
    }
}

fn ask() -> std::result::Result<ArbiterStatus, Unreachable> {
    // Looked for each time: the host's arbiter may have come meanwhile.
    let dir = RuntimeDir::find(&Surroundings::of_this_process())?;
    connect::ask(|| connect::within(&dir, ANSWER), Client::status)
}

fn places(status: &ArbiterStatus) -> BTreeMap<u64, Place> {
    let of_job = |job: &control::JobStatus| {
        let processes = job.processes.iter().take(LOOKED_UP);
        let places = processes.filter_map(|process| Place::of_process(process.pid));
        let place = places.reduce(Place::or)?;
        Some((job.id, place))
    };
    status.jobs.iter().filter_map(of_job).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn question(method: &str, path: &str) -> Question {
        Question {
            method: method.into(),
            path: path.into(),
            accept: String::new(),
            came: Instant::now(),
        }
    }

    #[test]
    fn readers_that_wait_share_one_scrape() {
        let exporter = Exporter::default();
        let before = Instant::now();
        let first = exporter.shared(before);
        let second = exporter.shared(before);
        assert!(Arc::ptr_eq(&first, &second));
        let third = exporter.shared(Instant::now());
        assert!(!Arc::ptr_eq(&first, &third));
        assert_eq!((first.scrapes, third.scrapes), (1, 2));
    }

    #[test]
    fn other_pages_and_methods_say_what_there_is() {
        let exporter = Exporter::default();
        for (method, path, status) in [
            ("GET", "/metrics", 200),
            ("HEAD", "/metrics", 200),
            ("POST", "/metrics", 405),
            ("GET", "/", 200),
            ("GET", "/metrics/", 404),
            ("GET", "/../etc/passwd", 404),
        ] {
            let page = exporter.page(&question(method, path));
            assert_eq!(page.status, status, "{method} {path}");
            let helps = page.text.contains("metrics") || path == "/metrics";
            assert!(helps, "{page:?}");
        }
        assert_eq!(exporter.scrapes.load(Ordering::Relaxed), 2);
    }
}
