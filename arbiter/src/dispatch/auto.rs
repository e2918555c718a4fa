//! The mode `auto`: whether tenants run all at once or in slices, decided by what each of them gets
//! done.
//!
//! A tenant's *pace* is its submissions per second. Its *free pace* is its submissions over the
//! time in which its gate did not delay it, learnt while slices run: a tenant that waits 60 ms of
//! every 100 and submits 400 times in them has a free pace of 400 per 40 ms, 10 per ms. Its
//! *progress* is its pace over its free pace: 0.4 in slices, by definition what its gate left it.
//!
//! Running all at once is kept while it serves better:
//!
//! * every guaranteed tenant makes at least 95 % of the progress that it made in slices, and
//! * all of them together at least 5 % more than they made in slices.
//!
//! Two tenants that keep the device busy make 0.5 + 0.5 in slices and seldom more than that at
//! once: they end up in slices. Two that use it a third of the time each make nearly 1 + 1 at once.
//!
//! *Pauses.* A tenant that for a tenth of a second neither submits nor waits at its gate nor has
//! work on the device pauses by itself: it loads data, saves, evaluates. No mode has a part in
//! that, so its paces are those of the rest of the period. A tenant that pauses for most of a
//! period is not judged by it.
//!
//! *Hysteresis.* Slices run for a second before anything is tried, the first second of a trial is
//! not judged (what slices left behind passes, hosts come out of step), the rest is judged every
//! half second, and two bad judgements in a row end it. After a trial that ended badly slices stay
//! for 4 s, then 8, up to 5 minutes; a change of the set of tenants starts over. Nothing is tried
//! while the tenants' memory does not fit on the device.
//!
//! Submissions are the tenants' own claims. A tenant that claims progress it does not make only
//! hurts itself; one that hides its progress gets slices, which it is entitled to anyway.

use policy::{Class, TenantId};

/// Slices before the first trial, and between judgements. TIMEOUT: some hundred slices, so that a
/// pace means something.
const LEARN_NS: u64 = 1_000_000_000;
/// How long a trial runs before it is watched. TIMEOUT: some tens of steps of a training, so that
/// none of what is judged began in slices.
const SETTLE_NS: u64 = 1_000_000_000;
/// How long running at once is watched before it is judged.
const JUDGE_NS: u64 = 500_000_000;
/// A tenant that does nothing for so long pauses by itself. TIMEOUT: longer than any gap of a host
/// inside a step.
const PAUSE_NS: u64 = 100_000_000;
/// Of a period that a tenant has paused for more than three quarters of, it tells nothing.
const TELLING: u64 = 4;
/// Bad judgements in a row that end it.
const BAD: u32 = 2;
/// Slices after a trial that ended badly, at first and at most.
const BACK_OFF_NS: u64 = 4_000_000_000;
const BACK_OFF_MAX_NS: u64 = 300_000_000_000;
/// What a guaranteed tenant may lose, and what all of them must gain together.
const LOSS: f64 = 0.05;
const GAIN: f64 = 0.05;
/// A tenant with fewer submissions than this in a period tells nothing.
const FEW: u64 = 8;

/// What a device scheduler knows of a tenant, summed up since it came.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sample {
    /// Which one.
    pub tenant: TenantId,
    /// Its class.
    pub class: Class,
    /// Submissions.
    pub launches: u64,
    /// Time spent waiting at a closed gate, in nanoseconds.
    pub wait_ns: u64,
    /// It neither waits nor has anything on the device.
    pub at_rest: bool,
}

impl Sample {
    /// Submissions and time waited since an earlier one; `None`: they have gone back, and what was
    /// known since then means nothing.
    fn since(&self, start: &Self) -> Option<(u64, u64)> {
        let launches = self.launches.checked_sub(start.launches)?;
        Some((launches, self.wait_ns.checked_sub(start.wait_ns)?))
    }
}

/// What is decided.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Running {
    /// In slices.
    Slices,
    /// All at once.
    AtOnce,
}

/// See the module's documentation.
#[derive(Debug)]
pub struct Auto {
    running: Running,
    /// When the present period began.
    since_ns: u64,
    /// All at once has run for long enough to be judged.
    settled: bool,
    /// Slices stay at least until then.
    until_ns: u64,
    back_off_ns: u64,
    bad: u32,
    members: Vec<Member>,
    reason: String,
}

#[derive(Clone, Copy, Debug)]
struct Member {
    at_start: Sample,
    /// Submissions per second of time in which its gate was open to it; `None`: not known.
    free_pace: Option<f64>,
    /// Of its free pace, in slices.
    progress: f64,
    /// What it had submitted at the last look, and since when it has rested then.
    rests: (u64, Option<u64>),
    /// How long it has paused in this period.
    paused_ns: u64,
}

impl Member {
    fn new(sample: Sample) -> Self {
        Self {
            at_start: sample,
            free_pace: None,
            progress: 0.0,
            rests: (sample.launches, None),
            paused_ns: 0,
        }
    }

    /// Looks whether it pauses. A rest counts once it is a pause, with all of its length in this
    /// period.
    fn look(&mut self, from_ns: u64, now_ns: u64, sample: &Sample) {
        let (launches, since_ns) = self.rests;
        let rests = sample.at_rest && sample.launches == launches;
        let pause_ns = |since_ns: u64| {
            let all_ns = now_ns.saturating_sub(since_ns);
            let own_ns = now_ns.saturating_sub(since_ns.max(from_ns));
            if all_ns >= PAUSE_NS { own_ns } else { 0 }
        };
        if !rests {
            self.paused_ns += since_ns.map_or(0, pause_ns);
        }
        self.rests = (sample.launches, rests.then(|| since_ns.unwrap_or(now_ns)));
    }

    /// How long it was at it in a period that began at `from_ns`; `None`: too short to tell
    /// anything.
    fn at_it_ns(&self, from_ns: u64, now_ns: u64) -> Option<u64> {
        let period_ns = now_ns.saturating_sub(from_ns).max(1);
        let (_, since_ns) = self.rests;
        let rest_ns = since_ns
            .filter(|since_ns| now_ns.saturating_sub(*since_ns) >= PAUSE_NS)
            .map_or(0, |since_ns| now_ns.saturating_sub(since_ns.max(from_ns)));
        let at_it_ns = period_ns.saturating_sub(self.paused_ns + rest_ns);
        (at_it_ns >= period_ns / TELLING).then_some(at_it_ns)
    }
}

impl Auto {
    /// Slices, with nothing known.
    pub fn new(now_ns: u64) -> Self {
        Self {
            running: Running::Slices,
            since_ns: now_ns,
            settled: false,
            until_ns: now_ns + LEARN_NS,
            back_off_ns: BACK_OFF_NS,
            bad: 0,
            members: Vec::new(),
            reason: "exclusive: nothing is known yet".into(),
        }
    }

    /// How it runs.
    pub fn running(&self) -> Running {
        self.running
    }

    /// Why it runs so, for people.
    pub fn reason(&self) -> &str {
        &self.reason
    }

    /// When to look again.
    pub fn again_ns(&self) -> u64 {
        match self.running {
            Running::Slices => self.until_ns.max(self.since_ns + LEARN_NS),
            Running::AtOnce if self.settled => self.since_ns + JUDGE_NS,
            Running::AtOnce => self.since_ns + SETTLE_NS,
        }
    }

    /// Looks at who is at work; `fits`: their memory fits on the device.
    pub fn step(&mut self, now_ns: u64, at_work: &[Sample], fits: bool) -> Running {
        let same = self.members.len() == at_work.len()
            && self.members.iter().zip(at_work).all(|(member, sample)| {
                (member.at_start.tenant, member.at_start.class) == (sample.tenant, sample.class)
                    && sample.since(&member.at_start).is_some()
            });
        if !same {
            self.begin_anew(now_ns, at_work);
            return self.running;
        }
        for (member, sample) in self.members.iter_mut().zip(at_work) {
            member.look(self.since_ns, now_ns, sample);
        }
        if !fits && self.running == Running::AtOnce {
            self.return_to_slices(now_ns, "their memory does not fit at once".into());
        }
        if now_ns < self.again_ns() {
            return self.running;
        }
        match self.running {
            Running::Slices => self.learn(now_ns, at_work, fits),
            Running::AtOnce if self.settled => self.judge(now_ns, at_work),
            Running::AtOnce => self.settled = true,
        }
        for (member, sample) in self.members.iter_mut().zip(at_work) {
            member.at_start = *sample;
            member.paused_ns = 0;
        }
        self.since_ns = now_ns;
        self.running
    }

    fn begin_anew(&mut self, now_ns: u64, at_work: &[Sample]) {
        // A tenant that was known before keeps what was learnt.
        let members = at_work.iter().map(|sample| {
            let known = self
                .members
                .iter()
                .find(|member| member.at_start.tenant == sample.tenant);
            Member {
                free_pace: known.and_then(|member| member.free_pace),
                progress: known.map_or(0.0, |member| member.progress),
                ..Member::new(*sample)
            }
        });
        self.members = members.collect();
        self.running = Running::Slices;
        self.since_ns = now_ns;
        self.until_ns = now_ns + LEARN_NS;
        self.back_off_ns = BACK_OFF_NS;
        self.bad = 0;
        self.reason = if at_work.len() < 2 {
            "exclusive: fewer than two jobs are at work".into()
        } else {
            "exclusive: other jobs are at work than before".into()
        };
    }

    /// A period of slices is over.
    fn learn(&mut self, now_ns: u64, at_work: &[Sample], fits: bool) {
        for (member, sample) in self.members.iter_mut().zip(at_work) {
            let at_it_ns = member.at_it_ns(self.since_ns, now_ns);
            let since = sample.since(&member.at_start);
            let (Some((launches, waited_ns)), Some(period_ns)) = (since, at_it_ns) else {
                continue;
            };
            let free_ns = period_ns.saturating_sub(waited_ns);
            if launches < FEW || free_ns < period_ns / 100 {
                continue;
            }
            // CAST: far below 2^53.
            let pace = launches as f64 / free_ns as f64;
            member.free_pace = Some(
                member
                    .free_pace
                    .map_or(pace, |before| before + (pace - before) / 2.0),
            );
            member.progress = free_ns as f64 / period_ns as f64;
        }
        if self.members.len() < 2 {
            return;
        }
        if !fits {
            self.reason = "exclusive: their memory does not fit at once".into();
        } else if self.members.iter().any(|member| member.free_pace.is_none()) {
            self.reason = "exclusive: not enough is known of every job".into();
        } else {
            self.running = Running::AtOnce;
            (self.settled, self.bad) = (false, 0);
            self.reason = "concurrent: on trial".into();
        }
    }

    /// A period at once is over.
    fn judge(&mut self, now_ns: u64, at_work: &[Sample]) {
        let (mut sum, mut before, mut worst) = (0.0, 0.0, None);
        let mut judged = 0;
        for (member, sample) in self.members.iter().zip(at_work) {
            let at_it_ns = member.at_it_ns(self.since_ns, now_ns);
            let since = sample.since(&member.at_start);
            let (Some((launches, _)), Some(free_pace), Some(at_it_ns)) =
                (since, member.free_pace, at_it_ns)
            else {
                continue;
            };
            judged += 1;
            // CAST: far below 2^53.
            let progress = launches as f64 / at_it_ns as f64 / free_pace;
            sum += progress;
            before += member.progress;
            let kept = progress / member.progress.max(1e-9);
            if sample.class == Class::Guaranteed && worst.is_none_or(|worst| kept < worst) {
                worst = Some(kept);
            }
        }
        // With one tenant left there is nothing to compare.
        if judged < 2 {
            return;
        }
        let decided = format!(
            "{:.0} % of their free pace together, {:.0} % in slices",
            sum * 100.0,
            before * 100.0
        );
        let lost = worst.filter(|worst| *worst < 1.0 - LOSS);
        if lost.is_none() && sum >= before * (1.0 + GAIN) {
            self.bad = 0;
            self.back_off_ns = BACK_OFF_NS;
            self.reason = format!("concurrent: {decided}");
            return;
        }
        self.bad += 1;
        if self.bad >= BAD {
            let why = match lost {
                Some(worst) => format!(
                    "at once a guaranteed job made {:.0} % of its progress in slices",
                    worst * 100.0
                ),
                None => format!("at once made {decided}"),
            };
            self.return_to_slices(now_ns, why);
        }
    }

    fn return_to_slices(&mut self, now_ns: u64, why: String) {
        self.running = Running::Slices;
        self.since_ns = now_ns;
        self.until_ns = now_ns + self.back_off_ns;
        self.back_off_ns = (self.back_off_ns * 2).min(BACK_OFF_MAX_NS);
        self.bad = 0;
        self.reason = format!("exclusive: {why}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;
    const S: u64 = 1000 * MS;

    /// Two tenants whose progress is given by how they run.
    struct World {
        auto: Auto,
        now_ns: u64,
        samples: Vec<Sample>,
        /// Times it was changed.
        changes: u32,
        at_once_ns: u64,
    }

    impl World {
        fn new(classes: &[Class]) -> Self {
            let samples = classes.iter().enumerate().map(|(at, class)| Sample {
                tenant: TenantId(at as u64),
                class: *class,
                launches: 0,
                wait_ns: 0,
                at_rest: false,
            });
            Self {
                auto: Auto::new(0),
                now_ns: 0,
                samples: samples.collect(),
                changes: 0,
                at_once_ns: 0,
            }
        }

        /// `slices` and `at_once`: what each tenant makes of its free pace of 10 submissions per
        /// millisecond; 0: it pauses.
        fn run(&mut self, ns: u64, slices: &[f64], at_once: &[f64], fits: bool) {
            let end_ns = self.now_ns + ns;
            while self.now_ns < end_ns {
                let before = self.auto.running();
                let made = match before {
                    Running::Slices => slices,
                    Running::AtOnce => at_once,
                };
                for (sample, made) in self.samples.iter_mut().zip(made) {
                    sample.launches += (made * 100.0) as u64;
                    sample.at_rest = *made == 0.0;
                    if sample.at_rest {
                        continue;
                    }
                    if before == Running::Slices {
                        sample.wait_ns += ((1.0 - made) * 10.0 * MS as f64) as u64;
                    } else {
                        self.at_once_ns += 10 * MS / 2;
                    }
                }
                self.now_ns += 10 * MS;
                let now = self.auto.step(self.now_ns, &self.samples, fits);
                self.changes += u32::from(now != before);
            }
        }
    }

    const BOTH: [Class; 2] = [Class::Guaranteed; 2];

    #[test]
    fn jobs_that_idle_the_device_run_at_once_and_stay_so() {
        let mut world = World::new(&BOTH);
        world.run(60 * S, &[0.6, 0.6], &[0.95, 0.9], true);
        assert_eq!(world.auto.running(), Running::AtOnce);
        assert_eq!(world.changes, 1, "{}", world.auto.reason());
        assert!(
            world.auto.reason().contains("185 %"),
            "{}",
            world.auto.reason()
        );
    }

    #[test]
    fn busy_jobs_run_in_slices_but_for_ever_rarer_trials() {
        let mut world = World::new(&BOTH);
        world.run(120 * S, &[0.5, 0.5], &[0.49, 0.49], true);
        assert!(world.at_once_ns < 14 * S, "{}", world.at_once_ns);
        assert!((4..=14).contains(&world.changes), "{}", world.changes);
        assert!(
            world
                .auto
                .reason()
                .starts_with("exclusive: at once made 98 %")
        );
    }

    #[test]
    fn a_guaranteed_job_that_suffers_ends_it_however_much_is_gained() {
        let mut world = World::new(&[Class::Guaranteed, Class::Opportunistic]);
        world.run(10 * S, &[0.98, 0.3], &[0.8, 0.9], true);
        assert_eq!(world.auto.running(), Running::Slices);
        assert!(
            world.auto.reason().contains("82 %"),
            "{}",
            world.auto.reason()
        );
        let mut world = World::new(&[Class::Guaranteed, Class::Opportunistic]);
        world.run(10 * S, &[0.98, 0.9], &[0.98, 0.3], true);
        assert_eq!(world.auto.running(), Running::Slices, "nothing is gained");
    }

    #[test]
    fn one_bad_judgement_is_no_reason() {
        let mut world = World::new(&BOTH);
        world.run(5 * S, &[0.5, 0.5], &[0.9, 0.9], true);
        assert_eq!(world.auto.running(), Running::AtOnce);
        world.run(500 * MS, &[0.5, 0.5], &[0.3, 0.3], true);
        assert_eq!(world.auto.running(), Running::AtOnce);
        world.run(5 * S, &[0.5, 0.5], &[0.9, 0.9], true);
        assert_eq!(world.changes, 1);
    }

    #[test]
    fn the_first_second_of_a_trial_is_not_judged() {
        let mut world = World::new(&BOTH);
        world.run(1010 * MS, &[0.5, 0.5], &[0.2, 0.2], true);
        assert_eq!(world.auto.running(), Running::AtOnce);
        // What slices had left in flight, hosts in step: as slow as can be.
        world.run(990 * MS, &[0.5, 0.5], &[0.2, 0.2], true);
        world.run(60 * S, &[0.5, 0.5], &[0.95, 0.9], true);
        println!("now: {} changes, {}", world.changes, world.auto.reason());
        assert_eq!(world.auto.running(), Running::AtOnce);
        assert_eq!(world.changes, 1, "{}", world.auto.reason());
    }

    #[test]
    fn a_job_s_own_pause_speaks_against_no_mode() {
        let mut world = World::new(&BOTH);
        world.run(5 * S, &[0.6, 0.6], &[0.95, 0.9], true);
        assert_eq!(world.auto.running(), Running::AtOnce);
        for _ in 0..5 {
            // It saves for two seconds, and loads data for a third of one now and then.
            world.run(2 * S, &[0.6, 1.0], &[0.0, 1.0], true);
            world.run(S, &[0.6, 0.6], &[0.95, 0.9], true);
            world.run(330 * MS, &[0.6, 1.0], &[0.0, 1.0], true);
            world.run(670 * MS, &[0.6, 0.6], &[0.95, 0.9], true);
        }
        println!("now: {} changes, {}", world.changes, world.auto.reason());
        assert_eq!(world.changes, 1, "{}", world.auto.reason());
        assert!(world.auto.reason().starts_with("concurrent: "));
        // Paces learnt in slices leave pauses out as well.
        let mut world = World::new(&BOTH);
        for _ in 0..20 {
            world.run(400 * MS, &[0.6, 0.6], &[0.95, 0.9], true);
            world.run(400 * MS, &[0.0, 1.0], &[0.0, 1.0], true);
        }
        assert_eq!(world.auto.running(), Running::AtOnce);
        assert_eq!(world.changes, 1, "{}", world.auto.reason());
    }

    #[test]
    fn nothing_is_tried_where_memory_does_not_fit_and_a_trial_ends_at_once() {
        let mut world = World::new(&BOTH);
        world.run(10 * S, &[0.6, 0.6], &[0.9, 0.9], false);
        assert_eq!(world.changes, 0);
        assert!(world.auto.reason().contains("memory"));
        world.run(3 * S, &[0.6, 0.6], &[0.9, 0.9], true);
        assert_eq!(world.auto.running(), Running::AtOnce);
        world.run(10 * MS, &[0.6, 0.6], &[0.9, 0.9], false);
        assert_eq!(world.auto.running(), Running::Slices);
    }

    #[test]
    fn counts_that_go_back_start_over_and_are_no_progress() {
        let mut world = World::new(&BOTH);
        world.run(5 * S, &[0.6, 0.6], &[0.95, 0.9], true);
        assert_eq!(world.auto.running(), Running::AtOnce);
        world.samples[1].launches /= 2;
        world.run(10 * MS, &[0.6, 0.6], &[0.95, 0.9], true);
        assert_eq!(world.auto.running(), Running::Slices);
        world.run(60 * S, &[0.6, 0.6], &[0.95, 0.9], true);
        assert_eq!(world.auto.running(), Running::AtOnce);
        println!("now: {}", world.auto.reason());
        assert!(
            world.auto.reason().contains("185 %"),
            "{}",
            world.auto.reason()
        );
    }

    #[test]
    fn other_jobs_start_over() {
        let mut world = World::new(&BOTH);
        world.run(5 * S, &[0.6, 0.6], &[0.9, 0.9], true);
        world.samples.pop();
        world.run(10 * MS, &[1.0], &[1.0], true);
        assert_eq!(world.auto.running(), Running::Slices);
        world.run(10 * S, &[1.0], &[1.0], true);
        assert_eq!(world.auto.running(), Running::Slices, "alone");
    }
}
