//! From a client to an instance and back.
//!
//! Strangers may be on both sides. A client has [`PATIENCE`] for a head, as long for a body, and as
//! long for each write of an answer; connections, bodies and what is buffered of answers are
//! bounded (`hall`, `body`). An instance has until the end of its request. What one of them does
//! costs no other anything but its place.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full};
use hyper::body::{Body as _, Bytes, Frame, Incoming};
use hyper::header::{self, HeaderValue};
use hyper::{Request, Response, StatusCode};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::body::{Held, Kept, Streamed, read};
use super::fleet::End;
use super::gate::{Asked, Place};
use super::hall::{Hall, UnderWay};
use super::head::{Asking, check};
use super::stream::PATIENCE;
use super::upstream::{self, Fault, Line};

/// Frames of an answer that wait for its client; hyper reads 64 KiB at a time at most.
const FRAMES: usize = 16;
/// Before the same request is put again to instances that say they are busy, at first and at most.
const BUSY: Duration = Duration::from_millis(10);
const BUSY_MOST: Duration = Duration::from_millis(40);
/// Before the same instance is spoken of again.
const SAY_AGAIN: Duration = Duration::from_secs(30);
/// Instances that break off before one request is given up.
const MOST_BROKEN: u32 = 3;

/// What a client gets.
pub type Answer = Response<UnsyncBoxBody<Bytes, io::Error>>;

/// What we say ourselves.
pub fn ours(status: StatusCode, why: &str) -> Answer {
    let text = format!("sublet frontend: {why}\n");
    let mut answer = Response::new(
        Full::from(text)
            .map_err(|never| match never {})
            .boxed_unsync(),
    );
    *answer.status_mut() = status;
    let plain = HeaderValue::from_static("text/plain; charset=utf-8");
    answer.headers_mut().insert(header::CONTENT_TYPE, plain);
    if status == StatusCode::SERVICE_UNAVAILABLE {
        let after = HeaderValue::from_static("1");
        answer.headers_mut().insert(header::RETRY_AFTER, after);
    }
    answer
}

/// The answer to a request of the connection of this number, an instance's or ours.
pub async fn answer(hall: &Arc<Hall>, number: u64, request: Request<Incoming>) -> Answer {
    hall.begun(number);
    let (head, body) = request.into_parts();
    // The rest of what is refused is not waited for.
    let close = |mut answer: Answer| {
        let close = HeaderValue::from_static("close");
        answer.headers_mut().insert(header::CONNECTION, close);
        answer
    };
    let pseudonym = &hall.shared.pseudonym;
    if let Err((status, why)) = check(&head, pseudonym) {
        return close(ours(status, why));
    }
    let mut held = Held::new(hall);
    let body = match read(body, &mut held).await {
        Ok(body) => body,
        Err(answer) => return close(answer),
    };
    let asking = Asking::new(head, body, pseudonym);
    let under_way = UnderWay::new(hall, number);
    let asked = Asked::new(&hall.shared);
    let answer = put(hall, &asking, asked).await;
    // The rest of it is under way until the client has it.
    answer.map(|body| Kept::new(body, under_way).boxed_unsync())
}

/// Puts a request to instances until one answers, or its time is up.
async fn put(hall: &Arc<Hall>, asking: &Asking, asked: Asked) -> Answer {
    let shared = &hall.shared;
    let options = &shared.options;
    let end = Instant::now() + options.timeout;
    let within = Duration::from_secs_f64(options.terms.sla.within_s.clamp(0.0, 1e6));
    let in_time = Instant::now() + within;
    let may_again = options.retry || asking.method.is_idempotent();
    let (mut not, mut broken, mut tries) = (None, 0, 0_u32);
    let mut pause = BUSY;
    let timed_out = |asked: Asked, what: &str| {
        asked.failed();
        let why = format!(
            "{what} within {} s (--timeout)",
            options.timeout.as_secs_f64()
        );
        ours(StatusCode::GATEWAY_TIMEOUT, &why)
    };
    loop {
        let waited = timeout_at(end, Place::wait(shared, asked.came_s, not)).await;
        let place = match waited {
            Ok(Some(place)) => place,
            Ok(None) => {
                asked.pruned();
                let why = "it has waited longer than an answer may take (--prune)";
                return ours(StatusCode::SERVICE_UNAVAILABLE, why);
            }
            Err(_) => return timed_out(asked, "no instance was free"),
        };
        if tries > 0 {
            shared.gate.lock().figures.counts.retries += 1;
        }
        tries = tries.saturating_add(1);
        let at = place.at;
        let since = Instant::now();
        let sent = upstream::send(&shared.addresses[at], asking.request(), end).await;
        let why = match sent {
            Ok((response, _)) if is_busy(&response) && Instant::now() < in_time => {
                // It has not done what it was asked for: another one may, as in the paper.
                place.end(End::Nothing);
                not = Some(at);
                rest(&mut pause).await;
                continue;
            }
            Ok((response, line)) => {
                return pass_on(hall, response, line, (place, since), asked, end);
            }
            Err(Fault::TimedOut) => {
                place.end(hall.blame(since));
                return timed_out(asked, "the instance did not answer");
            }
            Err(Fault::Busy(why)) => {
                hall.say(at, &why);
                place.end(End::Nothing);
                not = Some(at);
                rest(&mut pause).await;
                continue;
            }
            Err(Fault::Unsent(why)) => why,
            Err(Fault::Broken(why)) => {
                broken += 1;
                if !may_again || broken >= MOST_BROKEN {
                    hall.say(at, &why);
                    place.end(End::Failed);
                    asked.failed();
                    return ours(StatusCode::BAD_GATEWAY, &format!("the instance: {why}"));
                }
                why
            }
        };
        hall.say(at, &why);
        place.end(End::Failed);
        not = Some(at);
    }
}

/// Before the same request is put again, a little longer each time.
async fn rest(pause: &mut Duration) {
    sleep(*pause).await;
    *pause = (*pause * 2).min(BUSY_MOST);
}

/// What an answer says of its instance.
fn end_of(status: StatusCode) -> End {
    match status {
        // Of what it was asked, not of how it is.
        StatusCode::NOT_IMPLEMENTED | StatusCode::HTTP_VERSION_NOT_SUPPORTED => End::Refused,
        StatusCode::SERVICE_UNAVAILABLE => End::Nothing,
        status if status.is_client_error() => End::Refused,
        status if status.is_server_error() => End::Erred,
        _ => End::Answered,
    }
}

/// A server that has too much to do says so with 503 (RFC 9110, 15.6.4).
fn is_busy(response: &Response<Incoming>) -> bool {
    response.status() == StatusCode::SERVICE_UNAVAILABLE
}

impl Hall {
    /// What a request that has run out of time says of its instance: nothing, where it had spent
    /// most of it before.
    fn blame(&self, since: Instant) -> End {
        let options = &self.shared.options;
        let fair = options.timeout.as_secs_f64() / 2.0;
        match since.elapsed().as_secs_f64() >= fair.min(options.terms.sla.within_s) {
            true => End::Failed,
            false => End::Nothing,
        }
    }

    /// Tells what is the matter with an instance, and how often it was since the last time: as
    /// many requests as there are may meet the same.
    fn say(&self, at: usize, why: &str) {
        let mut said = self.said.lock();
        let more = match said.get_mut(&at) {
            Some((when, more)) if when.elapsed() < SAY_AGAIN => {
                *more += 1;
                return;
            }
            Some((_, more)) => *more,
            None => 0,
        };
        said.insert(at, (Instant::now(), 0));
        drop(said);
        let name = {
            let gate = self.shared.gate.lock();
            gate.fleet.instances()[at].name.clone()
        };
        let more = match more {
            0 => String::new(),
            more => format!(" (and {more} requests before)"),
        };
        (self.tell)(&format!("instance `{name}` failed a request: {why}{more}"));
    }
}

/// Passes an answer on, as it comes. The instance is free when it has said all of it, whether the
/// client has read that or not.
fn pass_on(
    hall: &Arc<Hall>,
    response: Response<Incoming>,
    line: Line,
    (place, since): (Place, Instant),
    asked: Asked,
    end: Instant,
) -> Answer {
    let (head, body) = response.into_parts();
    let (status, length) = (head.status, body.size_hint());
    let (frames, coming) = mpsc::channel(FRAMES);
    let hall = Arc::clone(hall);
    tokio::spawn(async move {
        let at = place.at;
        match timeout_at(end, pump(body, &frames)).await {
            Ok(Pumped::Whole(waited)) => match end_of(status) {
                how @ (End::Answered | End::Refused) => {
                    // What the client took to read is nobody's service.
                    let service_s = place.end(how);
                    asked.answered(service_s.map(|all_s| (all_s - waited.as_secs_f64()).max(1e-9)));
                }
                how => {
                    if how == End::Erred {
                        hall.say(at, &format!("it answered {status}"));
                    }
                    place.end(how);
                    asked.failed();
                }
            },
            // The client has gone.
            Ok(Pumped::Unread) => drop(place),
            Ok(Pumped::Broken(why)) => {
                hall.say(at, &format!("its answer broke off: {why}"));
                place.end(End::Failed);
                asked.failed();
                cut_off(&frames, "the instance broke off").await;
            }
            Err(_) => {
                let is_client_slow = frames.capacity() == 0;
                let how = match is_client_slow {
                    true => End::Nothing,
                    false => hall.blame(since),
                };
                place.end(how);
                if !is_client_slow {
                    asked.failed();
                }
                cut_off(&frames, "the answer took too long").await;
            }
        }
        drop(line);
    });
    let body = Streamed { coming, length };
    Response::from_parts(head, body.boxed_unsync())
}

/// The client sees that its answer is not whole.
async fn cut_off(frames: &mpsc::Sender<Result<Frame<Bytes>, io::Error>>, why: &'static str) {
    let broken = Err(io::Error::other(why));
    let _ = timeout(PATIENCE, frames.send(broken)).await;
}

enum Pumped {
    /// And so long it waited for the client.
    Whole(Duration),
    Unread,
    Broken(String),
}

async fn pump(
    mut body: Incoming,
    frames: &mpsc::Sender<Result<Frame<Bytes>, io::Error>>,
) -> Pumped {
    let mut waited = Duration::ZERO;
    loop {
        // An answer that is over is whole, even where the client has all of it and looks no more.
        let frame = tokio::select! {
            biased;
            frame = body.frame() => frame,
            () = frames.closed() => return Pumped::Unread,
        };
        let since = Instant::now();
        match frame {
            None => return Pumped::Whole(waited),
            Some(Err(error)) => return Pumped::Broken(error.to_string()),
            Some(Ok(frame)) => {
                if frames.send(Ok(frame)).await.is_err() {
                    return Pumped::Unread;
                }
            }
        }
        waited += since.elapsed();
    }
}
