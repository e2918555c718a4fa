//! How many instances of a service have to be ready, after Swayam (Gujarati et al., Middleware
//! 2017): each frontend decides for itself, from the requests that it sees.
//!
//! *Load.* A frontend counts its own requests, multiplies by the number of frontends, and takes a
//! straight line through the counts of the last seconds to the time at which an instance that is
//! asked for now would be ready ([`Prediction`]).
//!
//! *Number.* Of `n` instances with Poisson arrivals at rate `r` and log-normal times of service
//! (mean `s`, variance `v`), a request waits with Erlang's probability C(n, rs), and then for an
//! exponential time of mean `s (1 + v / s^2) / (2 (n - rs))`, as the usual approximation of M/G/n
//! has it. Waiting and service together must stay within the agreed time for the agreed part of the
//! requests; [`least_instances`] is the smallest such `n`. For `r` = 9/s, `s` = 1 s, no variance,
//! and 99 % within 3 s it is 11.
//!
//! *Order.* Instances have a fixed order, and every frontend uses the first so many of them: what
//! nobody needs is at the end, hears nothing, and gives its memory back by itself. No frontend asks
//! another, and none decides for all.
//!
//! The paper's constants are not known to us; the defaults here are ours.

use std::collections::VecDeque;

/// Times of service from which a frontend goes by them; it remembers as many whatever their age.
const ENOUGH: usize = 20;
/// It remembers no more than this, whatever comes.
const MOST_MEASURED: usize = 1 << 15;

/// What was agreed about the times of response.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Sla {
    /// A response is in time within so many seconds of its request.
    pub within_s: f64,
    /// The part of the requests that has to be, in `0.0..1.0`.
    pub level: f64,
    /// Requests may come so many times as fast as predicted; at least 1.
    pub burst: f64,
}

/// Times of service: log-normal, in seconds.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Service {
    mean_s: f64,
    mu: f64,
    sigma: f64,
}

impl Service {
    /// With this mean (above 0) and standard deviation (at least 0), in seconds. Values out of
    /// range count as the nearest one that is in it.
    #[must_use]
    pub fn new(mean_s: f64, deviation_s: f64) -> Self {
        let mean_s = mean_s.max(1e-9);
        let spread = (1.0 + (deviation_s.max(0.0) / mean_s).powi(2)).ln();
        Self {
            mean_s,
            mu: mean_s.ln() - spread / 2.0,
            sigma: spread.sqrt(),
        }
    }

    /// With mean and deviation of what was measured; `None` without a measurement above 0 s.
    #[must_use]
    pub fn measured(times_s: impl IntoIterator<Item = f64>) -> Option<Self> {
        // Welford: no sum of squares that a large mean would drown.
        let (mut count, mut mean, mut squares) = (0.0, 0.0, 0.0);
        for time in times_s.into_iter().filter(|time| time.is_finite()) {
            count += 1.0;
            let before = time - mean;
            mean += before / count;
            squares += before * (time - mean);
        }
        (mean > 0.0).then(|| Self::new(mean, f64::sqrt(squares / count)))
    }

    /// Mean in seconds.
    #[must_use]
    pub fn mean_s(&self) -> f64 {
        self.mean_s
    }

    /// Variance over the square of the mean.
    fn spread(&self) -> f64 {
        (self.sigma * self.sigma).exp_m1()
    }

    /// Mean of `of(service)` over the times of at most `most_s`; others count nothing.
    fn mean_within(&self, most_s: f64, of: impl Fn(f64) -> f64) -> f64 {
        const STEPS: usize = 400;
        if self.sigma < 1e-6 {
            return if self.mean_s <= most_s {
                of(self.mean_s)
            } else {
                0.0
            };
        }
        // Simpson over the normal variable, up to the one at which the time is over.
        let (from, to) = (-8.0, ((most_s.ln() - self.mu) / self.sigma).min(8.0));
        if to <= from {
            return 0.0;
        }
        let step = (to - from) / STEPS as f64;
        let weighed = |at: usize| {
            let z = from + step * at as f64;
            let density = (-z * z / 2.0).exp() / std::f64::consts::TAU.sqrt();
            let weight = match at {
                0 | STEPS => 1.0,
                at if at % 2 == 1 => 4.0,
                _ => 2.0,
            };
            weight * density * of((self.mu + self.sigma * z).exp())
        };
        (0..=STEPS).map(weighed).sum::<f64>() * step / 3.0
    }

    /// The part of the requests that are served within `most_s` where none waits.
    #[must_use]
    pub fn part_within(&self, most_s: f64) -> f64 {
        self.mean_within(most_s, |_| 1.0)
    }
}

/// The part of the requests that are answered within `within_s` by `instances`, at `rate_per_s`.
/// 0 where the instances cannot keep up.
#[must_use]
pub fn part_in_time(rate_per_s: f64, service: &Service, instances: u32, within_s: f64) -> f64 {
    let busy = rate_per_s * service.mean_s;
    let spare = f64::from(instances) - busy;
    if spare <= 0.0 {
        return 0.0;
    }
    // Erlang's B by its recursion, and C from it.
    let mut lost = 1.0;
    for n in 1..=instances {
        lost = busy * lost / (f64::from(n) + busy * lost);
    }
    let waits = lost / (1.0 - (busy / f64::from(instances)) * (1.0 - lost));
    let falls = 2.0 * spare / (service.mean_s * (1.0 + service.spread()));
    service.mean_within(within_s, |time| {
        1.0 - waits * (-falls * (within_s - time)).exp()
    })
}

/// The smallest number of instances that answers the agreed part of the requests in time, at this
/// rate times the agreed burst; `most` where no smaller one does. 0 where nothing comes.
#[must_use]
pub fn least_instances(rate_per_s: f64, service: &Service, sla: &Sla, most: u32) -> u32 {
    if rate_per_s.is_nan() || rate_per_s <= 0.0 {
        return 0;
    }
    let rate = rate_per_s * sla.burst.max(1.0);
    let does = |n: u32| part_in_time(rate, service, n, sla.within_s) >= sla.level;
    // More instances never answer later: the first that does, by halving.
    let (mut few, mut many) = (0, most);
    while few < many {
        let middle = few + (many - few) / 2;
        if does(middle) {
            many = middle;
        } else {
            few = middle + 1;
        }
    }
    many
}

/// A frontend's view of the load: its own requests, second by second.
#[derive(Clone, Debug)]
pub struct Prediction {
    history_s: usize,
    /// Requests in each past second, the oldest first; the last is not over.
    counts: VecDeque<u32>,
    /// The second of the last count.
    second: u64,
}

impl Prediction {
    /// A line through so many seconds, at least 2.
    #[must_use]
    pub fn new(history_s: usize) -> Self {
        Self {
            history_s: history_s.max(2),
            counts: VecDeque::from([0]),
            second: 0,
        }
    }

    fn advance(&mut self, now_s: f64) {
        let second = now_s.max(0.0) as u64;
        let past = second.saturating_sub(self.second);
        let kept = past.min(self.history_s as u64 + 1);
        self.counts.extend((0..kept).map(|_| 0));
        self.second = self.second.max(second);
        while self.counts.len() > self.history_s + 1 {
            self.counts.pop_front();
        }
    }

    /// A request has come. Times do not go back: an earlier one counts for the last second.
    pub fn request(&mut self, now_s: f64) {
        self.advance(now_s);
        if let Some(count) = self.counts.back_mut() {
            *count += 1;
        }
    }

    /// Requests a second at `ahead_s` from now, of this frontend alone, by least squares through
    /// the seconds that are over. Before there are two: what there is of the current second.
    pub fn rate_per_s(&mut self, now_s: f64, ahead_s: f64) -> f64 {
        self.advance(now_s);
        let over = self.counts.len() - 1;
        if over < 2 {
            return f64::from(self.counts.iter().sum::<u32>());
        }
        let n = over as f64;
        let (mut sum, mut moment) = (0.0, 0.0);
        for (at, count) in self.counts.iter().take(over).enumerate() {
            sum += f64::from(*count);
            moment += f64::from(*count) * at as f64;
        }
        let middle = (n - 1.0) / 2.0;
        let slope = (moment - middle * sum) * 12.0 / (n * (n * n - 1.0));
        // A second's count stands for its middle: `n - 0.5` is the end of the last one.
        (sum / n + slope * (n - 0.5 + ahead_s.max(0.0) - middle)).max(0.0)
    }
}

/// What a frontend asks of the instances.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Wanted {
    /// Requests go to the first so many.
    pub in_use: u32,
    /// The first so many are kept, and woken where they gave their memory back.
    pub ready: u32,
}

/// One of several frontends of a service: what it has seen, and what follows from it.
#[derive(Clone, Debug)]
pub struct Frontend {
    prediction: Prediction,
    frontends: u32,
    history_s: usize,
    /// Its requests that wait or are served.
    unanswered: u32,
    /// Times of service of its own requests, and when each was answered, by that.
    measured: VecDeque<(f64, f64)>,
}

impl Frontend {
    /// One of so many, which get equal parts of the requests.
    #[must_use]
    pub fn new(frontends: u32, history_s: usize) -> Self {
        Self {
            prediction: Prediction::new(history_s),
            frontends: frontends.max(1),
            history_s,
            unanswered: 0,
            measured: VecDeque::new(),
        }
    }

    /// A request has come to it.
    pub fn request(&mut self, now_s: f64) {
        self.prediction.request(now_s);
        self.unanswered = self.unanswered.saturating_add(1);
    }

    /// One of its requests was answered after so long a service; `None`: how long it took says
    /// nothing, or it was not answered.
    pub fn ended(&mut self, now_s: f64, service_s: Option<f64>) {
        self.unanswered = self.unanswered.saturating_sub(1);
        if let Some(service_s) = service_s {
            self.measured.push_back((now_s, service_s));
            if self.measured.len() > MOST_MEASURED {
                self.measured.pop_front();
            }
        }
    }

    /// Its requests that wait or are served.
    #[must_use]
    pub fn unanswered(&self) -> u32 {
        self.unanswered
    }

    /// Requests a second at `ahead_s` from now, of all frontends together.
    pub fn rate_per_s(&mut self, now_s: f64, ahead_s: f64) -> f64 {
        self.prediction.rate_per_s(now_s, ahead_s) * f64::from(self.frontends)
    }

    /// Times of service of late, once there are enough of them.
    pub fn service(&mut self, now_s: f64) -> Option<Service> {
        let since_s = now_s - self.history_s as f64;
        while self.measured.len() > ENOUGH
            && (self.measured.front()).is_some_and(|(at_s, _)| *at_s < since_s)
        {
            self.measured.pop_front();
        }
        let enough = self.measured.len() >= ENOUGH;
        let service = Service::measured(self.measured.iter().map(|(_, time_s)| *time_s));
        service.filter(|_| enough)
    }

    /// As [`wants`](Self::wants), by the times of service that it has measured. Before there are
    /// enough of them: one for each request, here and, as it seems, at the other frontends.
    pub fn decide(
        &mut self,
        now_s: f64,
        sla: &Sla,
        (setup_s, waiting): (f64, usize),
        most: u32,
    ) -> Wanted {
        if let Some(service) = self.service(now_s) {
            return self.wants(now_s, &service, sla, (setup_s, waiting), most);
        }
        let each = self.unanswered.saturating_mul(self.frontends).min(most);
        Wanted {
            in_use: each,
            ready: each,
        }
    }

    /// How many of at most `most` instances it uses and wants ready, where one takes `setup_s` to
    /// become so. At least one where `waiting` requests wait at it.
    pub fn wants(
        &mut self,
        now_s: f64,
        service: &Service,
        sla: &Sla,
        (setup_s, waiting): (f64, usize),
        most: u32,
    ) -> Wanted {
        let mut at =
            |ahead_s: f64| least_instances(self.rate_per_s(now_s, ahead_s), service, sla, most);
        let least = u32::from(waiting > 0).min(most);
        let in_use = at(0.0).max(least);
        Wanted {
            in_use,
            ready: at(setup_s).max(in_use),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::Random;

    fn sla(within_s: f64) -> Sla {
        Sla {
            within_s,
            level: 0.99,
            burst: 1.0,
        }
    }

    #[test]
    fn a_log_normal_time_has_its_moments_and_quantiles() {
        let service = Service::new(2.0, 1.0);
        assert!((service.mean_within(1e9, |time| time) - 2.0).abs() < 1e-6);
        let square = service.mean_within(1e9, |time| time * time);
        assert!((square - 5.0).abs() < 1e-4, "{square}");
        assert!((service.part_within(service.mu.exp()) - 0.5).abs() < 1e-6);
        // 2.326 deviations are the 99th percentile of a normal variable.
        let high = (service.mu + 2.326_348 * service.sigma).exp();
        assert!((service.part_within(high) - 0.99).abs() < 1e-6);
        let measured = Service::measured([1.0, 3.0, f64::NAN]).unwrap();
        assert!((measured.mean_s() - 2.0).abs() < 1e-12);
        assert!((measured.spread() - 0.25).abs() < 1e-9);
        assert_eq!(Service::measured([]), None);
        assert_eq!(Service::measured([0.0]), None);
    }

    #[test]
    fn one_instance_with_exponential_times_waits_as_the_textbook_says() {
        // M/M/1 with load 1/2: C = 1/2, and the wait beyond falls with rate (1 - 1/2) / 1 s. A time
        // of mean 1 s and deviation 1 s has the same first two moments.
        let service = Service::new(1.0, 1.0);
        let part = part_in_time(0.5, &service, 1, 30.0);
        let by_hand = service.mean_within(30.0, |time| 1.0 - 0.5 * (-0.5 * (30.0 - time)).exp());
        assert!((part - by_hand).abs() < 1e-12);
        // Erlang's C of 2 servers at load 1: 1/3.
        let sure = Service::new(1.0, 0.0);
        let waits = 1.0 - part_in_time(1.0, &sure, 2, 1.0);
        assert!((waits - 1.0 / 3.0).abs() < 1e-9, "{waits}");
        assert!(part_in_time(2.0, &sure, 2, 100.0) < 1e-12, "cannot keep up");
    }

    #[test]
    fn the_number_is_the_least_that_keeps_the_agreement() {
        let mut random = Random::new(3);
        for _ in 0..300 {
            let service = Service::new(0.05 + random.unit(), random.unit());
            let agreed = Sla {
                within_s: service.mean_s() * (1.0 + 9.0 * random.unit()),
                level: 0.5 + 0.49 * random.unit(),
                burst: 1.0 + random.unit(),
            };
            let rate = 40.0 * random.unit();
            let n = least_instances(rate, &service, &agreed, 500);
            let part = |n| part_in_time(rate * agreed.burst, &service, n, agreed.within_s);
            if n < 500 {
                assert!(part(n) >= agreed.level, "{n} of {rate}");
            }
            assert!(n == 0 || part(n - 1) < agreed.level, "{n} of {rate}");
        }
        assert_eq!(
            least_instances(9.0, &Service::new(1.0, 0.0), &sla(3.0), 100),
            11
        );
        assert_eq!(
            least_instances(0.0, &Service::new(1.0, 1.0), &sla(5.0), 9),
            0
        );
        assert_eq!(
            least_instances(f64::NAN, &Service::new(1.0, 1.0), &sla(5.0), 9),
            0
        );
        // Nothing is enough where a request alone takes too long.
        assert_eq!(
            least_instances(1.0, &Service::new(9.0, 0.0), &sla(5.0), 9),
            9
        );
    }

    #[test]
    fn a_line_is_continued_and_forgets_what_is_long_over() {
        let mut seen = Prediction::new(10);
        for second in 0..20_u32 {
            for k in 0..2 * second {
                seen.request(f64::from(second) + f64::from(k) / 100.0);
            }
        }
        // 2 x its second each: the count of a second is the rate in its middle.
        assert!((seen.rate_per_s(20.0, 0.0) - 39.0).abs() < 1e-9);
        assert!((seen.rate_per_s(20.0, 5.0) - 49.0).abs() < 1e-9);
        assert!(seen.rate_per_s(31.0, 0.0).abs() < 1e-9, "ten empty seconds");
        assert!(seen.rate_per_s(1e15, 1e9).abs() < 1e-9);
        let mut falls = Prediction::new(10);
        (0..10).for_each(|_| falls.request(0.5));
        assert!(falls.rate_per_s(5.0, 60.0) == 0.0, "never below nothing");
    }

    #[test]
    fn frontends_agree_without_asking_each_other() {
        let (service, agreed) = (Service::new(0.2, 0.1), sla(1.0));
        let mut frontends = vec![Frontend::new(4, 60); 4];
        let mut random = Random::new(9);
        let mut now_s = 0.0;
        while now_s < 300.0 {
            now_s += random.exponential(1.0 / 100.0);
            let at = random.below(4);
            frontends[at].request(now_s);
        }
        let known = least_instances(100.0, &service, &agreed, 1000);
        for frontend in &mut frontends {
            let wanted = frontend.wants(300.0, &service, &agreed, (5.0, 0), 1000);
            let off = f64::from(wanted.in_use) / f64::from(known);
            assert!((0.8..1.25).contains(&off), "{wanted:?} for {known}");
            assert!(wanted.ready >= wanted.in_use);
        }
        let quiet = Frontend::new(4, 60).wants(9.0, &service, &agreed, (5.0, 0), 9);
        assert_eq!(
            quiet,
            Wanted {
                in_use: 0,
                ready: 0
            }
        );
        let waiting = Frontend::new(4, 60).wants(9.0, &service, &agreed, (5.0, 3), 9);
        assert_eq!(
            waiting,
            Wanted {
                in_use: 1,
                ready: 1
            }
        );
    }

    #[test]
    fn a_frontend_goes_by_its_own_times_of_service_once_it_has_some() {
        let agreed = sla(1.0);
        let mut frontend = Frontend::new(2, 60);
        (0..7).for_each(|_| frontend.request(0.5));
        let decided = |frontend: &mut Frontend, now_s| frontend.decide(now_s, &agreed, (0.1, 7), 9);
        // Seven here, and as many at the other one: more than there are instances.
        assert_eq!(decided(&mut frontend, 0.6).in_use, 9);
        (0..5).for_each(|_| frontend.ended(0.7, None));
        assert_eq!((frontend.unanswered(), frontend.service(0.7)), (2, None));
        assert_eq!(decided(&mut frontend, 0.7).in_use, 4);
        (0..9).for_each(|_| frontend.ended(0.8, None));
        assert_eq!(frontend.unanswered(), 0, "more ends than requests");
        let mut random = Random::new(4);
        let mut now_s = 1.0;
        while now_s < 100.0 {
            now_s += random.exponential(1.0 / 25.0);
            frontend.request(now_s);
            frontend.ended(now_s, Some(if now_s < 50.0 { 0.4 } else { 0.1 }));
        }
        let known = least_instances(50.0, &Service::new(0.1, 0.0), &agreed, 100);
        let short = frontend.decide(130.0, &agreed, (0.1, 0), 100);
        let service = frontend.service(115.0).expect("measured");
        assert!(
            (service.mean_s() - 0.1).abs() < 1e-9,
            "older ones are forgotten"
        );
        assert!(short.in_use <= known, "{short:?} where {known} do for more");
        // What is left when nothing has come for long is the last few.
        assert!(frontend.service(1e6).is_some());
        for _ in 0..2 * MOST_MEASURED {
            frontend.ended(200.0, Some(0.1));
        }
        assert_eq!(frontend.measured.len(), MOST_MEASURED);
    }
}
