//! Which runs a plan comes to, in which order, and how long they take.

use std::time::Duration;

use policy::cluster::Random;

use super::plan::{Combination, Mode, Plan};

/// One run: some jobs together, in a mode, for one of the repetitions.
#[derive(Debug, Clone, PartialEq)]
pub struct Run {
    /// Names the run in the store, for good.
    pub key: String,
    pub mode: Mode,
    pub combination: Combination,
    /// From 1.
    pub repetition: u32,
}

/// All runs. The order of each repetition is drawn by the seed and its number, so that more
/// repetitions change nothing of those before.
pub fn runs(plan: &Plan) -> Vec<Run> {
    let mut all = Vec::new();
    for repetition in 1..=plan.repeat {
        let mut round = Vec::new();
        for mode in &plan.modes {
            for combination in &plan.combinations {
                let mut combination = combination.clone();
                let key = format!("{mode} {} #{repetition}", plan.label(&combination));
                // Nobody is the first to start each time.
                if repetition % 2 == 0 {
                    combination.jobs.reverse();
                    if let Some(shares) = &mut combination.shares {
                        shares.reverse();
                    }
                }
                round.push(Run {
                    key,
                    mode: *mode,
                    combination,
                    repetition,
                });
            }
        }
        let mut random = Random::new(plan.seed ^ (u64::from(repetition) << 32));
        for last in (1..round.len()).rev() {
            round.swap(last, random.below(last + 1));
        }
        all.append(&mut round);
    }
    all
}

/// Warm-up and window of a run together.
pub fn time_of(plan: &Plan, run: &Run) -> Duration {
    let (warm_up, measured) = plan.times(&run.combination);
    warm_up + measured
}

/// `4 solo + 10 pairs x 3 x 60 s = 42 min`
pub fn summary(plan: &Plan) -> String {
    let of_size = |size: usize| {
        let all = plan.combinations.iter();
        all.filter(|one| one.jobs.len() == size).count()
    };
    let mut parts = vec![format!("{} solo", of_size(1))];
    match of_size(2) {
        0 => {}
        1 => parts.push("1 pair".into()),
        pairs => parts.push(format!("{pairs} pairs")),
    }
    let more = plan.combinations.len() - of_size(1) - of_size(2);
    if more > 0 {
        parts.push(format!("{more} of three or more"));
    }
    let mut text = parts.join(" + ");
    if plan.modes.len() > 1 {
        text += &format!(" x {} modes", plan.modes.len());
    }
    text += &format!(" x {}", plan.repeat);
    let runs = runs(plan);
    let mut times: Vec<Duration> = runs.iter().map(|run| time_of(plan, run)).collect();
    let total: Duration = times.iter().sum();
    times.sort_unstable();
    times.dedup();
    match times[..] {
        [one] => text += &format!(" x {}", short(one)),
        [first, .., last] => text += &format!(" x {} to {}", short(first), short(last)),
        [] => {}
    }
    format!("{text} = {}", long(total))
}

fn short(time: Duration) -> String {
    let seconds = time.as_secs_f64();
    match seconds.fract() == 0.0 {
        true => format!("{seconds:.0} s"),
        false => format!("{seconds} s"),
    }
}

/// `2 h 12 min`, `1 min 52 s`, `8 s`
pub fn long(time: Duration) -> String {
    // Rounded up: what is left of a second is not nothing.
    let seconds = time.as_secs() + u64::from(time.subsec_nanos() > 0);
    let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    match (hours, minutes, seconds) {
        (0, 0, s) => format!("{s} s"),
        (0, m, 0) => format!("{m} min"),
        (0, m, s) => format!("{m} min {s} s"),
        (h, 0, _) => format!("{h} h"),
        (h, m, _) => format!("{h} h {m} min"),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use super::super::plan;
    use super::*;

    fn plan_of(jobs: usize, experiment: &str) -> Plan {
        let mut text = format!("[experiment]\n{experiment}\n");
        for job in 0..jobs {
            text += &format!("[[job]]\nname = \"j{job}\"\ncommand = [\"x\"]\n");
        }
        plan::parse(&text, "p.toml", Path::new("/"), &|_| Err(String::new())).unwrap()
    }

    #[test]
    fn the_total_time_is_computed_before_anything_runs() {
        let eight = plan_of(8, "repeat = 3\nwarm_up = \"10s\"\nmeasured = \"50s\"");
        assert_eq!(summary(&eight), "8 solo + 36 pairs x 3 x 60 s = 2 h 12 min");
        let two = plan_of(
            2,
            "repeat = 1\npairs = \"distinct\"\nwarm_up = \"0s\"\nmeasured = \"1.5s\"\nmodes = [\"exclusive\", \"auto\"]",
        );
        assert_eq!(summary(&two), "2 solo + 1 pair x 2 modes x 1 x 1.5 s = 9 s");
        let one = plan_of(1, "repeat = 2\npairs = \"none\"");
        assert_eq!(summary(&one), "1 solo x 2 x 35 s = 1 min 10 s");
    }

    #[test]
    fn the_order_is_the_seeds_and_every_run_is_there_once() {
        let order = |experiment: &str| -> Vec<String> {
            runs(&plan_of(4, experiment))
                .into_iter()
                .map(|run| run.key)
                .collect()
        };
        let first = order("repeat = 2");
        assert_eq!(first, order("repeat = 2"));
        assert_ne!(first, order("repeat = 2\nseed = 2"));
        let keys: BTreeSet<&String> = first.iter().collect();
        assert_eq!((first.len(), keys.len()), (28, 28));
        // More repetitions go on where fewer ended.
        assert_eq!(first, order("repeat = 3")[..28]);
        let of = |from: usize| -> Vec<&str> {
            let part = first[from..from + 14].iter();
            part.map(|key| key.split(" #").next().unwrap()).collect()
        };
        assert_ne!(of(0), of(14), "each repetition has an order of its own");
    }

    #[test]
    fn every_second_repetition_starts_the_jobs_the_other_way_round() {
        let plan = plan_of(2, "repeat = 2");
        let runs = runs(&plan);
        let pair = |key: &str| {
            let run = runs.iter().find(|run| run.key == key).unwrap();
            run.combination.jobs.clone()
        };
        assert_eq!(pair("exclusive j0+j1 #1"), [0, 1]);
        assert_eq!(pair("exclusive j0+j1 #2"), [1, 0]);
    }

    #[test]
    fn spans_are_written_for_people() {
        for (seconds, text) in [
            (0.0, "0 s"),
            (0.2, "1 s"),
            (60.0, "1 min"),
            (61.0, "1 min 1 s"),
            (3600.0, "1 h"),
            (7920.0, "2 h 12 min"),
        ] {
            assert_eq!(long(Duration::from_secs_f64(seconds)), text);
        }
    }
}
