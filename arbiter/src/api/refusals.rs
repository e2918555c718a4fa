//! Changes over TCP that were refused, in the log: who may not, and tries. A line of each address a
//! minute, so that strangers cannot fill the log, with how many more there were. A line has the
//! address, the operation and what the token may do; never the token, nor a word of the request.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::connections::Holder;
use crate::bearer::Role;
use crate::container::Origin;
use crate::who::Peer;

/// An address has a line so often at most.
const EACH: Duration = Duration::from_secs(60);
/// Addresses that are known at a time.
const MOST: usize = 256;

/// What was logged lately, by address.
#[derive(Debug, Default)]
pub struct Refusals {
    of: Mutex<BTreeMap<Holder, Logged>>,
}

#[derive(Debug)]
struct Logged {
    at: Instant,
    /// Refused since then, and not logged.
    more: u64,
}

impl Refusals {
    /// A change was refused: one of `holder`, who is `peer` as far as that is known.
    pub fn note(&self, holder: Holder, peer: &Peer, operation: &str) {
        let Some(more) = self.count(holder, Instant::now()) else {
            return;
        };
        let who = match &peer.origin {
            Origin::Remote(bearer) => {
                let role = match bearer.role {
                    Role::ReadOnly => "readonly".into(),
                    Role::Operator => "operator".into(),
                    Role::User(uid) => format!("uid {uid}"),
                };
                format!("by the token `{}` ({role})", bearer.name)
            }
            _ => "without a token that counts".into(),
        };
        let before = match more {
            0 => String::new(),
            more => format!("; {more} more from there since its last line here"),
        };
        tracing::warn!("refused over TCP: {operation}, {who}, from {holder}{before}");
    }

    /// One more. How many there were since the last line, without this one, where it is to be
    /// logged.
    fn count(&self, holder: Holder, now: Instant) -> Option<u64> {
        let mut of = self.of.lock();
        let is_due = |logged: &Logged| now.saturating_duration_since(logged.at) >= EACH;
        if let Some(logged) = of.get_mut(&holder) {
            if is_due(logged) {
                logged.at = now;
                return Some(std::mem::take(&mut logged.more));
            }
            logged.more += 1;
            return None;
        }
        if of.len() >= MOST {
            of.retain(|_, logged| !is_due(logged));
        }
        if of.len() >= MOST {
            return None;
        }
        of.insert(holder, Logged { at: now, more: 0 });
        Some(0)
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn at(number: u32) -> Holder {
        Holder::at(Ipv4Addr::from_bits(number).into())
    }

    #[test]
    fn an_address_has_a_line_a_minute_and_strangers_cannot_fill_the_log() {
        let begun = Instant::now();
        let refusals = Refusals::default();
        assert_eq!(refusals.count(at(1), begun), Some(0));
        for _ in 0..1000 {
            assert_eq!(refusals.count(at(1), begun + EACH / 2), None);
        }
        assert_eq!(refusals.count(at(2), begun + EACH / 2), Some(0));
        assert_eq!(refusals.count(at(1), begun + EACH), Some(1000));
        assert_eq!(refusals.count(at(1), begun + EACH), None);
        // Very many addresses have so many lines.
        let lines = |now| {
            let all = (1000..100_000).filter(|number| refusals.count(at(*number), now).is_some());
            all.count()
        };
        assert_eq!(lines(begun + EACH), MOST - 2);
        assert_eq!(refusals.of.lock().len(), MOST);
        assert_eq!(lines(begun + EACH * 3), MOST);
    }
}
