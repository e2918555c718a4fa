//! Requests in virtual time: by hand, against queueing theory, and what must hold in every run.

use policy::standbys::Service;

use super::*;

fn setup(instances: u32, within_s: f64) -> Setup {
    Setup {
        instances,
        frontends: 1,
        sla: Sla {
            within_s,
            level: 0.99,
            burst: 1.0,
        },
        return_s: 0.5,
        start_s: 30.0,
        keep_s: 10.0,
        standby_s: f64::INFINITY,
        warm: instances,
        history_s: 60,
        decide_s: 1.0,
        retry_s: 0.01,
        prune: false,
        seed: 1,
    }
}

fn request(arrival_s: f64, service_s: f64) -> Request {
    Request {
        arrival_s,
        service_s,
    }
}

/// Poisson arrivals at these rates, one after the other for `each_s`; exponential times of service
/// with mean 1 s.
fn poisson(rates: &[f64], each_s: f64, seed: u64) -> Vec<Request> {
    let mut random = Random::new(seed);
    let (mut now_s, mut requests) = (0.0, Vec::new());
    for (at, rate) in rates.iter().enumerate() {
        let until_s = each_s * (at + 1) as f64;
        loop {
            now_s += random.exponential(1.0 / rate);
            if now_s >= until_s {
                now_s = until_s;
                break;
            }
            requests.push(request(now_s, random.exponential(1.0)));
        }
    }
    requests
}

#[test]
fn one_instance_answers_in_turn() {
    let requests = [(0.0, 2.0), (1.0, 2.0), (70.0, 1.0)].map(|(at, takes)| request(at, takes));
    let served = serve(&requests, &setup(1, 2.5), &Scaling::Fixed(1)).unwrap();
    assert_eq!(served.responses_s.len(), 3);
    for (got, right) in served.responses_s.iter().zip([1.0, 2.0, 3.0]) {
        assert!((got - right).abs() < 1e-9, "{served:?}");
    }
    let counts: Vec<(u32, u32)> = (served.windows.iter())
        .map(|window| (window.requests, window.in_time))
        .collect();
    assert_eq!(counts, [(2, 1), (1, 1)]);
    assert!((served.met_pct() - 50.0).abs() < 1e-9);
    assert!(
        (served.resident_s - 71.0).abs() < 1e-9,
        "resident until the end"
    );
    assert_eq!(served.missed(), [0]);
}

#[test]
fn the_number_of_the_model_keeps_the_agreement_and_two_fewer_do_not() {
    // M/M/n: times of service with a deviation as large as their mean.
    let service = Service::new(1.0, 1.0);
    let requests = poisson(&[20.0], 20_000.0, 4);
    let setup = setup(100, 6.0);
    let n = policy::standbys::least_instances(20.0, &service, &setup.sla, 100);
    let part = |n: u32| {
        let served = serve(&requests, &setup, &Scaling::Fixed(n)).unwrap();
        served.in_time_pct() / 100.0
    };
    assert!(part(n) >= setup.sla.level, "{} with {n}", part(n));
    assert!(
        part(n - 2) < setup.sla.level,
        "{} with {}",
        part(n - 2),
        n - 2
    );
}

#[test]
fn instances_come_back_for_load_and_give_their_memory_back_without() {
    let requests = poisson(&[5.0, 20.0, 5.0, 0.01], 600.0, 2);
    let of = |scaling: &Scaling, setup: &Setup| serve(&requests, setup, scaling).unwrap();
    // One time of service in 8,000 is longer than this by itself.
    let many = setup(60, 9.0);
    let served = of(&Scaling::Predicted, &many);
    assert!(served.in_time_pct() >= 98.0, "{}", served.in_time_pct());
    assert!(served.returns > 20 && served.starts == 0, "{served:?}");
    let most = |from: usize, to: usize| {
        let windows = &served.windows[from..to];
        windows.iter().map(|window| window.resident).max().unwrap()
    };
    assert!(
        most(2, 9) < most(12, 19) && most(33, served.windows.len()) <= 2,
        "{served:?}"
    );
    // All the time of all instances is somewhere.
    let end_s = (served.resident_s + served.standby_s) / 60.0;
    let last_s = requests.last().map_or(0.0, |request| request.arrival_s);
    assert!(
        (last_s..last_s + 60.0).contains(&end_s),
        "{end_s} after {last_s}"
    );
    // Where none stands by, each has to start, and the load is later.
    let cold = Setup { warm: 0, ..many };
    let started = of(&Scaling::Predicted, &cold);
    assert!(started.starts > 20, "{}", started.starts);
    assert!(
        started.met_pct() < served.met_pct(),
        "{}",
        started.met_pct()
    );
    // One that ends starts again.
    let ends = Setup {
        standby_s: 0.0,
        ..setup(60, 9.0)
    };
    let ended = of(&Scaling::Predicted, &ends);
    assert!(ended.standby_s < served.standby_s && ended.starts > 0);
}

#[test]
fn longer_requests_are_noticed_as_soon_as_more_of_them() {
    // From 600 s on there are half as many, each three times as long.
    let mut requests = poisson(&[12.0, 6.0], 600.0, 5);
    for request in requests.iter_mut().filter(|one| one.arrival_s >= 600.0) {
        request.service_s *= 3.0;
    }
    let setup = Setup {
        frontends: 2,
        ..setup(80, 30.0)
    };
    let served = serve(&requests, &setup, &Scaling::Predicted).unwrap();
    let missed = served.missed();
    assert!(missed.iter().all(|at| (10..13).contains(at)), "{missed:?}");
}

#[test]
fn every_request_is_answered_or_dropped_and_an_instance_has_one_at_a_time() {
    let mut random = Random::new(8);
    for seed in 0..40 {
        let rates: Vec<f64> = (0..4).map(|_| 0.1 + 12.0 * random.unit()).collect();
        let requests = poisson(&rates, 100.0, seed);
        let setup = Setup {
            frontends: 1 + random.below(6) as u32,
            prune: seed % 2 == 0,
            seed,
            warm: random.below(9) as u32,
            keep_s: 20.0 * random.unit(),
            ..setup(1 + random.below(16) as u32, 3.0)
        };
        let served = serve(&requests, &setup, &Scaling::Predicted).unwrap();
        let answered = served.responses_s.len() as u64;
        assert_eq!(answered + served.dropped, requests.len() as u64);
        assert!(setup.prune || served.dropped == 0);
        let come: u32 = served.windows.iter().map(|window| window.requests).sum();
        assert_eq!(come as usize, requests.len());
        let work: f64 = requests.iter().map(|request| request.service_s).sum();
        assert!(setup.prune || served.resident_s >= work - 1e-6);
        assert!(
            served
                .windows
                .iter()
                .all(|window| window.resident <= setup.instances)
        );
        assert!(
            served
                .windows
                .iter()
                .all(|window| window.in_time <= window.requests)
        );
        assert_eq!(
            served,
            serve(&requests, &setup, &Scaling::Predicted).unwrap()
        );
    }
}

#[test]
fn who_knows_what_comes_meets_every_window_with_less() {
    let requests = poisson(&[4.0, 16.0, 4.0], 300.0, 6);
    let setup = setup(80, 9.0);
    let fixed = least_fixed(&requests, &setup, 100.0).unwrap().unwrap();
    let always = serve(&requests, &setup, &Scaling::Fixed(fixed)).unwrap();
    let fewer = serve(&requests, &setup, &Scaling::Fixed(fixed - 1)).unwrap();
    assert!(always.missed().is_empty() && !fewer.missed().is_empty());
    let (plan, known) = clairvoyant(&requests, &setup).unwrap();
    assert!(known.missed().is_empty(), "{plan:?}");
    assert!(
        known.resident_s < 0.8 * always.resident_s,
        "{plan:?} for {fixed}"
    );
    // A request that takes longer than is agreed is late with any number.
    let long = [request(0.0, 20.0)];
    assert_eq!(least_fixed(&long, &setup, 100.0).unwrap(), None);
    let (plan, known) = clairvoyant(&long, &setup).unwrap();
    assert_eq!(
        (plan, known.missed()),
        (vec![1], vec![0]),
        "so none is added for it"
    );
}

#[test]
fn a_burst_is_more_than_twice_the_window_before() {
    let mut requests = Vec::new();
    for (window, count) in [2, 4, 9, 1].into_iter().enumerate() {
        requests.extend((0..count).map(|_| request(60.0 * window as f64, 1.0)));
    }
    let served = serve(&requests, &setup(9, 1.0), &Scaling::Fixed(4)).unwrap();
    let bursts: Vec<bool> = (0..5).map(|at| served.is_burst(at)).collect();
    assert_eq!(bursts, [false, false, true, false, false]);
    assert_eq!(served.missed(), [2]);
    assert!((served.met_pct() - 75.0).abs() < 1e-9);
    assert!((served.met_without_bursts_pct() - 100.0).abs() < 1e-9);
}

#[test]
fn numbers_out_of_range_are_refused() {
    type Change = fn(&mut Setup);
    let wrong: [(Change, &str); 12] = [
        (|s| s.instances = 0, "the number of instances is 0"),
        (|s| s.instances = 10_001, "the number of instances is 10001"),
        (|s| s.frontends = 0, "the number of frontends is 0"),
        (|s| s.sla.level = 1.0, "the part in time is 1"),
        (|s| s.sla.level = f64::NAN, "the part in time is NaN"),
        (|s| s.sla.burst = 0.5, "the burst is 0.5"),
        (|s| s.sla.within_s = 0.0, "the time of response is 0"),
        (|s| s.return_s = -1.0, "the time of return is -1"),
        (|s| s.start_s = f64::INFINITY, "the time of a start is inf"),
        (|s| s.decide_s = 0.0, "the time between decisions is 0"),
        (|s| s.standby_s = f64::NAN, "the time of standing by is NaN"),
        (|s| s.history_s = 1, "the history is 1"),
    ];
    for (change, words) in wrong {
        let mut setup = setup(3, 5.0);
        change(&mut setup);
        let refused = serve(&[], &setup, &Scaling::Predicted).unwrap_err();
        assert!(refused.to_string().starts_with(words), "{refused}");
    }
    let nothing = serve(&[], &setup(3, 5.0), &Scaling::Predicted).unwrap();
    assert!((nothing.met_pct() - 100.0).abs() < 1e-9 && nothing.windows.len() <= 1);
}
