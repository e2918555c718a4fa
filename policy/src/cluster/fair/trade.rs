//! Trading fast GPUs for slow ones.

/// A user: its tickets, and how much faster one fast GPU is for it than one slow GPU.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Trader {
    /// Its part of both types is proportional to these.
    pub tickets: f64,
    /// Above 0.
    pub speedup: f64,
}

/// GPUs of each type that a user has on average.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Holding {
    /// Fast ones.
    pub fast: f64,
    /// Slow ones.
    pub slow: f64,
}

impl Holding {
    /// In slow GPUs.
    #[must_use]
    pub fn worth(&self, trader: &Trader) -> f64 {
        self.fast * trader.speedup + self.slow
    }
}

/// Holdings by tickets, as they are before any trade.
#[must_use]
pub fn by_tickets(fast: f64, slow: f64, traders: &[Trader]) -> Vec<Holding> {
    let all: f64 = traders.iter().map(|trader| trader.tickets).sum();
    let part = |trader: &Trader| trader.tickets / all.max(f64::MIN_POSITIVE);
    let hold = |trader: &Trader| Holding {
        fast: fast * part(trader),
        slow: slow * part(trader),
    };
    traders.iter().map(hold).collect()
}

/// Gandiva-fair's trades (EuroSys'20) between two types. The user that gains least from fast GPUs
/// sells them to the user that gains most, for as many slow GPUs as the second-highest speed-up, so
/// that overstating gains nothing; if the seller is that second one, for the geometric mean of
/// both, so that both gain. They trade until one of them has nothing more to give. Afterwards no
/// user is worse off by its own measure.
#[must_use]
pub fn trade(fast: f64, slow: f64, traders: &[Trader]) -> Vec<Holding> {
    const LITTLE: f64 = 1e-9;
    let mut holdings = by_tickets(fast, slow, traders);
    let mut order: Vec<usize> = (0..traders.len()).collect();
    order.sort_by(|a, b| traders[*a].speedup.total_cmp(&traders[*b].speedup));
    let (mut low, mut high) = (0, order.len());
    while low + 1 < high {
        let (seller, buyer) = (order[low], order[high - 1]);
        let (least, most) = (traders[seller].speedup, traders[buyer].speedup);
        let second = traders[order[high - 2]].speedup;
        let price = if second > least {
            second
        } else {
            (least * most).sqrt()
        };
        if most <= least * (1.0 + LITTLE) {
            break;
        }
        let amount = holdings[seller].fast.min(holdings[buyer].slow / price);
        holdings[seller].fast -= amount;
        holdings[seller].slow += amount * price;
        holdings[buyer].fast += amount;
        holdings[buyer].slow -= amount * price;
        // A user without fast GPUs is out.
        if holdings[seller].fast <= LITTLE {
            low += 1;
        } else {
            high -= 1;
        }
    }
    holdings
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::Random;

    #[test]
    fn both_gain_as_in_the_paper() {
        // 1.2x and 4x, as many of each type: a rate between the two.
        let traders = [1.2, 4.0].map(|speedup| Trader {
            tickets: 1.0,
            speedup,
        });
        let (before, after) = (by_tickets(4.0, 8.0, &traders), trade(4.0, 8.0, &traders));
        for ((trader, before), after) in traders.iter().zip(&before).zip(&after) {
            assert!(
                after.worth(trader) > 1.2 * before.worth(trader),
                "{after:?}"
            );
        }
    }

    #[test]
    fn nobody_is_worse_off_and_nothing_is_lost() {
        let mut random = Random::new(47);
        for _ in 0..2000 {
            let traders: Vec<Trader> = (0..2 + random.below(8))
                .map(|_| Trader {
                    tickets: 0.1 + random.unit(),
                    speedup: 1.0 + 5.0 * random.unit(),
                })
                .collect();
            let (fast, slow) = (64.0 * random.unit(), 64.0 * random.unit());
            let before = by_tickets(fast, slow, &traders);
            let after = trade(fast, slow, &traders);
            let sums = after.iter().fold((0.0, 0.0), |sum, hold| {
                assert!(hold.fast > -1e-9 && hold.slow > -1e-9);
                (sum.0 + hold.fast, sum.1 + hold.slow)
            });
            assert!((sums.0 - fast).abs() < 1e-6 && (sums.1 - slow).abs() < 1e-6);
            for ((trader, before), after) in traders.iter().zip(&before).zip(&after) {
                assert!(after.worth(trader) >= before.worth(trader) * (1.0 - 1e-9));
            }
        }
    }
}
