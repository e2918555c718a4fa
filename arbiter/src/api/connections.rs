//! Connections of the API: who may hold how many, and who gives way.
//!
//! A process has 32 at most, a user 64, all together 192. One that goes beyond that loses the
//! connection of its own that has been silent for longest. Where all places are taken, the one that
//! was silent longest gives way, of the process that has most; where none is silent, newcomers wait
//! in the kernel's queue.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use parking_lot::Mutex;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Notify;
use tokio::task::{AbortHandle, yield_now};
use tokio::time::{Instant, sleep, timeout};

use super::Office;
use super::conversation::{Caller, converse};
use super::routes;
use crate::desk::Counter;
use crate::who::Peer;

const ALL: usize = 192;
const OF_USER: usize = 64;
const OF_PROCESS: usize = 32;
/// Newcomers in a row: those who are there already come next.
const STEP: usize = 16;
/// A connection that was silent for so long can give way to others. TIMEOUT: a client asks right
/// after it has connected.
const IDLE: Duration = Duration::from_millis(100);
/// TIMEOUT: connections that end give descriptors and places back within a moment.
const AGAIN: Duration = Duration::from_millis(20);

/// All connections.
#[derive(Debug)]
pub struct Connections {
    open: Mutex<BTreeMap<u64, Open>>,
    counter: Counter,
    /// Rings when one has ended.
    ended: Notify,
    most: usize,
}

#[derive(Debug)]
struct Open {
    peer: Peer,
    /// Nothing of it is in the works since then; `None`: something is.
    silent: Option<Instant>,
    task: Option<AbortHandle>,
}

/// A connection's place; given back when it is dropped.
#[derive(Debug)]
pub struct Place {
    number: u64,
    all: Arc<Connections>,
}

impl Place {
    /// One that nobody counts, for tests.
    #[cfg(test)]
    pub fn uncounted(counter: Counter) -> Self {
        let all = Connections::new(counter);
        Self { number: 0, all }
    }

    /// Whether something of this connection is in the works.
    pub fn note_busy(&self, busy: bool) {
        if let Some(open) = self.all.open.lock().get_mut(&self.number) {
            open.silent = (!busy).then(Instant::now);
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.all.remove(self.number);
        self.all.ended.notify_waiters();
    }
}

impl Connections {
    /// None yet.
    pub fn new(counter: Counter) -> Arc<Self> {
        // Each takes a descriptor, and processes of jobs come first.
        let descriptors = rustix::process::getrlimit(rustix::process::Resource::Nofile);
        let quarter = descriptors.current.unwrap_or(u64::MAX) / 4;
        Arc::new(Self {
            open: Mutex::default(),
            counter,
            ended: Notify::new(),
            most: ALL.min(usize::try_from(quarter).unwrap_or(ALL)),
        })
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.open.lock().len()
    }

    fn remove(&self, number: u64) -> bool {
        let mut open = self.open.lock();
        let gone = open.remove(&number);
        self.counter.note_open(open.len());
        drop(open);
        match gone.and_then(|gone| gone.task) {
            Some(task) => {
                task.abort();
                true
            }
            None => false,
        }
    }

    /// Makes space for one more of anybody; false where none has been silent for long enough.
    fn make_space(&self) -> bool {
        let now = Instant::now();
        let open = self.open.lock();
        if open.len() < self.most {
            return true;
        }
        let mut of_process: BTreeMap<u32, usize> = BTreeMap::new();
        for one in open.values() {
            *of_process.entry(one.peer.pid).or_default() += 1;
        }
        let silent = open.iter().filter_map(|(number, one)| {
            let since = one.silent?;
            let silent = now.saturating_duration_since(since);
            (silent >= IDLE).then_some((*number, of_process.get(&one.peer.pid)?, silent))
        });
        let first = silent.max_by_key(|(_, count, silent)| (**count, *silent));
        let first = first.map(|(number, ..)| number);
        drop(open);
        first.is_some_and(|number| self.remove(number))
    }

    /// Keeps a process and a user below what they may have, at their own expense.
    fn make_space_within(&self, peer: &Peer) {
        for (of_process, most) in [(true, OF_PROCESS), (false, OF_USER)] {
            let open = self.open.lock();
            let own = open.iter().filter(|(_, one)| {
                one.peer.uid == peer.uid && (!of_process || one.peer.pid == peer.pid)
            });
            if own.clone().count() < most {
                continue;
            }
            // Silent ones first, then in the order in which they came.
            let last = own.min_by_key(|(number, one)| (one.silent.is_none(), one.silent, **number));
            let last = last.map(|(number, _)| *number);
            drop(open);
            if let Some(number) = last {
                self.remove(number);
            }
        }
    }

    fn take_in(
        self: &Arc<Self>,
        number: u64,
        (stream, peer, routes): (UnixStream, Peer, Router),
        office: &Arc<Office>,
    ) {
        self.make_space_within(&peer);
        let mut open = self.open.lock();
        let one = Open {
            peer: peer.clone(),
            silent: Some(Instant::now()),
            task: None,
        };
        open.insert(number, one);
        self.counter.note_open(open.len());
        drop(open);
        let place = Place {
            number,
            all: Arc::clone(self),
        };
        let caller = Caller::new(peer, place, Arc::clone(office));
        // It first runs when this thread comes to it, after the next lines.
        let task = tokio::spawn(converse(caller, stream, routes)).abort_handle();
        if let Some(one) = self.open.lock().get_mut(&number) {
            one.task = Some(task);
        }
    }

    /// Waits until all have ended, so long at most.
    pub async fn finish(&self, patience: Duration) {
        let all_over = async {
            while self.count() > 0 {
                let ended = self.ended.notified();
                if self.count() > 0 {
                    // TIMEOUT: looked at again, should an end have come in between.
                    let _ = timeout(AGAIN, ended).await;
                }
            }
        };
        let _ = timeout(patience, all_over).await;
    }
}

/// Takes newcomers in, for ever.
pub async fn take_in(listener: &UnixListener, office: &Arc<Office>) {
    let routes = routes::router(Arc::clone(office));
    let mut number = 0;
    loop {
        if !office.connections.make_space() {
            let ended = office.connections.ended.notified();
            let _ = timeout(AGAIN, ended).await;
            continue;
        }
        match listener.accept().await {
            Ok((stream, _)) => {
                if let Ok(peer) = Peer::of(&stream, || false) {
                    number += 1;
                    let one = (stream, peer, routes.clone());
                    office.connections.take_in(number, one, office);
                }
            }
            Err(error) => match error.kind() {
                io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted => {}
                // Out of descriptors or memory: those who wait go on waiting.
                _ => sleep(AGAIN).await,
            },
        }
        if number % STEP as u64 == 0 {
            yield_now().await;
        }
    }
}
