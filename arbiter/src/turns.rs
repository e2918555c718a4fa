//! Whose request the loop answers next, and when it answers none.
//!
//! Requests wait at the [`Desk`] for their *turn*. The next turn is that of the user who has taken
//! the least of our time lately, and of that user's connections of the one that has; so a new
//! connection with one question comes before one with thousands. Turns take a quarter of the loop's
//! time at most.
//!
//! Owns the desk, what each user has taken lately, and when there are turns again. What requests
//! mean is decided in `operator`.

use std::collections::BTreeMap;
use std::io;

use control::{ControlError, Reply, Request};

use crate::desk::Desk;
use crate::reactor::{Event, Interest, Poller};
use crate::who::Peer;

/// For how long operators are answered before slices are looked at again, and a request that takes
/// longer after it.
const SITTING_NS: u64 = 300_000;
/// What a user has taken of our time counts half after so long.
const HALF_LIFE_NS: u64 = 1_000_000_000;

/// A request to be answered by [`Turns::reply`].
#[derive(Debug)]
pub struct Ask {
    /// Its number. No other request has it.
    pub number: u64,
    /// Who asks.
    pub peer: Peer,
    /// What.
    pub request: Request,
}

/// A row of turns.
#[derive(Debug)]
pub struct Sitting {
    begun_ns: u64,
}

impl Sitting {
    /// Whether another turn may begin.
    pub fn goes_on(&self, now_ns: u64) -> bool {
        now_ns < self.begun_ns + SITTING_NS
    }
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub struct Turns {
    /// `None`: nobody can ask any more.
    desk: Option<Desk>,
    next: u64,
    /// Of our time, what each user has taken lately, and when that was added up.
    taken: BTreeMap<u32, (u64, u64)>,
    /// There are no turns before that.
    rests_until_ns: u64,
}

/// What is left of some time that was taken at `at_ns`.
fn faded(ns: u64, at_ns: u64, now_ns: u64) -> u64 {
    let halves = now_ns.saturating_sub(at_ns) / HALF_LIFE_NS;
    let halves = u32::try_from(halves).unwrap_or(u32::MAX);
    ns.checked_shr(halves).unwrap_or(0)
}

impl Turns {
    /// Deals the turns of what is put on the desk.
    pub fn new(desk: Desk) -> Self {
        Self {
            desk: Some(desk),
            ..Self::default()
        }
    }

    /// Begins to look at the desk.
    ///
    /// # Errors
    /// The set of descriptors does not take its bell.
    pub fn watch(&self, poller: &Poller) -> io::Result<()> {
        match &self.desk {
            Some(desk) => poller.add(desk.bell(), Event::Desk, Interest::Read),
            None => Ok(()),
        }
    }

    /// Something was put on the desk.
    pub fn on_desk(&mut self, now_ns: u64) {
        if let Some(desk) = &mut self.desk {
            desk.receive(&mut self.next, now_ns);
        }
    }

    /// Whether somebody waits for the answer to a request.
    pub fn awaits(&self, number: u64) -> bool {
        self.desk.as_ref().is_some_and(|desk| desk.awaits(number))
    }

    /// Answers a request.
    pub fn reply(&mut self, number: u64, result: Result<Reply, ControlError>) {
        if let Some(desk) = &mut self.desk {
            desk.answer(number, result);
        }
    }

    /// Whether there are turns at `now_ns`. If not, when to go on, where somebody waits for one.
    ///
    /// # Errors
    /// There are none yet.
    pub fn sits(&mut self, now_ns: u64) -> Result<Sitting, Option<u64>> {
        if now_ns < self.rests_until_ns {
            let waits = self.desk.as_mut().is_some_and(Desk::has_turn);
            return Err(waits.then_some(self.rests_until_ns));
        }
        Ok(Sitting { begun_ns: now_ns })
    }

    /// A row of turns has ended at `now_ns`: slices are looked at for three times as long as it
    /// took. Returns when to go on: what was changed is carried out at once, and says itself when
    /// to look at it again.
    pub fn rise(&mut self, sitting: &Sitting, now_ns: u64) -> Option<u64> {
        let took_ns = now_ns.saturating_sub(sitting.begun_ns);
        self.rests_until_ns = now_ns + took_ns.saturating_mul(3);
        (took_ns > 0).then_some(now_ns)
    }

    /// The request that is next. `None`: none waits.
    pub fn next(&mut self, now_ns: u64) -> Option<Ask> {
        let taken = &self.taken;
        let of = |uid| {
            let taken = taken.get(&uid);
            taken.map_or(0, |(ns, at_ns)| faded(*ns, *at_ns, now_ns))
        };
        let desk = self.desk.as_mut()?;
        let number = desk.first(of)?;
        let (peer, request) = desk.take(number)?;
        Some(Ask {
            number,
            peer,
            request,
        })
    }

    /// A turn has taken so much of our time.
    pub fn spent(&mut self, number: u64, uid: u32, now_ns: u64, ns: u64) {
        if let Some(desk) = &mut self.desk {
            desk.spent(number, ns);
        }
        let (sum, at_ns) = self.taken.entry(uid).or_insert((0, now_ns));
        let left = faded(*sum, *at_ns, now_ns);
        if now_ns.saturating_sub(*at_ns) >= HALF_LIFE_NS {
            *at_ns = now_ns;
        }
        *sum = left.saturating_add(ns);
    }

    /// Forgets what users have taken long ago.
    pub fn forget_old(&mut self, now_ns: u64) {
        let many_ns = 64 * HALF_LIFE_NS;
        self.taken
            .retain(|_, (_, at_ns)| now_ns.saturating_sub(*at_ns) < many_ns);
    }

    /// Whether nobody is connected.
    pub fn is_empty(&self) -> bool {
        self.desk.as_ref().is_none_or(Desk::is_empty)
    }

    /// Answers nothing any more: who waits hears of it now.
    pub fn close(&mut self) {
        if let Some(desk) = self.desk.take() {
            desk.close();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicU64;

    use tokio::sync::oneshot;

    use super::*;
    use crate::desk::{Answer, Counter, Put};

    /// Somebody's connection, which has one request at a time.
    struct Asker {
        peer: Peer,
        served_ns: Arc<AtomicU64>,
    }

    impl Asker {
        fn of_user(uid: u32) -> Self {
            Self {
                peer: Peer::here(1, uid),
                served_ns: Arc::default(),
            }
        }

        fn ask(&self, counter: &Counter) -> oneshot::Receiver<Answer> {
            let (answer, hears) = oneshot::channel();
            let put = Put {
                peer: self.peer.clone(),
                request: Request::List,
                answer,
                served_ns: Arc::clone(&self.served_ns),
            };
            counter.put(put).expect("taken");
            hears
        }
    }

    fn turns() -> (Turns, Counter) {
        let (desk, counter) = Desk::new().expect("a desk");
        (Turns::new(desk), counter)
    }

    #[test]
    fn one_question_comes_before_a_flood_of_the_same_user_and_of_another() {
        let (mut turns, counter) = turns();
        let (greedy, modest, other) = (Asker::of_user(1), Asker::of_user(1), Asker::of_user(2));
        // What is asked takes time, and that is remembered.
        for at in 0..3 {
            let _hears = greedy.ask(&counter);
            turns.on_desk(at);
            let ask = turns.next(at).expect("a request");
            turns.reply(ask.number, Ok(Reply::Noted));
            turns.spent(ask.number, ask.peer.uid, at, 1000);
        }
        let _all = [&greedy, &modest, &other].map(|asker| asker.ask(&counter));
        turns.on_desk(9);
        let served = |ask: Ask| ask.peer.uid;
        assert_eq!(turns.next(9).map(served), Some(2), "it has taken nothing");
        let ask = turns.next(9).expect("a request");
        turns.spent(ask.number, 1, 9, 7);
        let sum = modest.served_ns.load(std::sync::atomic::Ordering::Relaxed);
        assert_eq!(sum, 7, "its connection has asked nothing before");
        assert!(turns.next(9).is_some() && turns.next(9).is_none());
    }

    #[test]
    fn turns_take_a_quarter_of_the_time() {
        let (mut turns, counter) = turns();
        let sitting = turns.sits(1000).expect("turns");
        assert!(sitting.goes_on(999 + SITTING_NS) && !sitting.goes_on(1000 + SITTING_NS));
        assert_eq!(turns.rise(&sitting, 1000), None, "nobody had one");
        let sitting = turns.sits(1000).expect("turns");
        assert_eq!(turns.rise(&sitting, 1100), Some(1100));
        let early = turns.sits(1399).map(drop);
        assert_eq!(early, Err(None), "nobody waits");
        let _hears = Asker::of_user(1).ask(&counter);
        turns.on_desk(1100);
        let early = turns.sits(1399).map(drop);
        assert_eq!(early, Err(Some(1400)));
        assert!(turns.sits(1400).is_ok());
    }

    #[test]
    fn what_users_have_taken_is_forgotten() {
        let (mut turns, _counter) = turns();
        turns.spent(1, 7, 0, 1 << 40);
        turns.spent(1, 7, 3 * HALF_LIFE_NS, 0);
        assert_eq!(turns.taken[&7].0, 1 << 37);
        turns.forget_old(100 * HALF_LIFE_NS);
        assert!(turns.taken.is_empty());
    }
}
