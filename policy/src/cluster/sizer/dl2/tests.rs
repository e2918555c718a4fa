use super::network::Network;
use super::*;
use crate::cluster::catalogue;
use crate::cluster::sizer::MaxMin;
use crate::cluster::{Class, Decision, GpuId, Job, JobType, Random, Speed};

/// A cluster in which some jobs came and some of them run.
fn state(seed: u64, jobs: u32) -> ClusterState {
    let mut random = Random::new(seed);
    let mut state = ClusterState::uniform(16, 8);
    for _ in 0..jobs {
        state.advance(state.now_s() + random.exponential(300.0));
        let work = 100.0 * random.exponential(10.0) + 1.0;
        let mut job = Job::rigid(JobType(0), 1, state.now_s(), work);
        let slower = 0.6 + 0.4 * random.unit();
        let curve = (1..=8).map(|gpus: i32| f64::from(gpus).powf(slower));
        job.speed = Speed::Curve(curve.collect());
        let id = state.arrive(job);
        if random.below(3) == 0 && state.free().total() > 0 {
            place(&mut state, id, 1);
        }
    }
    state
}

/// Starts a job on free GPUs.
fn place(state: &mut ClusterState, job: JobId, gpus: u32) {
    let free = (0..state.gpus())
        .map(GpuId)
        .filter(|gpu| state.free().contains(*gpu));
    let place = Decision::Place {
        job,
        gpus: free.take(gpus as usize).collect(),
        class: Class::Guaranteed,
        share: 1.0,
        mem_bytes: None,
    };
    state.apply(&[place]).expect("free GPUs");
    let rate = state.job(job).rate(gpus);
    state.set_rate(job, rate);
}

fn promises() -> Promises {
    Promises::default()
}

/// Weights that know everything there is.
fn open_weights(seed: u64) -> Weights {
    let mut weights = Weights::random(8, 1200.0, &mut Random::new(seed));
    weights.meet(1000, &[[-1e9; division::INPUTS], [1e9; division::INPUTS]]);
    weights
}

fn teacher_sizes(state: &ClusterState) -> Vec<(JobId, u32)> {
    MaxMin.resize(state, &promises())
}

#[test]
fn the_weights_that_come_along_are_whole() {
    let weights = Dl2::trained();
    assert!(weights.most_jobs >= 20);
    assert!(weights.made_by.contains("--seed"), "{}", weights.made_by);
}

#[test]
fn the_teacher_is_max_min_over_the_dominant_share() {
    for seed in 0..50 {
        let state = state(seed, 1 + seed as u32 % 30);
        let mut division = Division::new(&state, &promises());
        while let Some(at) = division.teacher() {
            division.give(at);
        }
        assert_eq!(division.sizes(), teacher_sizes(&state), "{seed}");
    }
}

#[test]
fn a_division_never_gives_more_than_there_is() {
    for seed in 0..20 {
        let state = state(seed, 25);
        let mut sizer = Dl2::new(Arc::new(open_weights(seed)));
        let sizes = sizer.resize(&state, &promises());
        assert!(!sizes.is_empty());
        assert!(sizes.iter().map(|(_, gpus)| gpus).sum::<u32>() <= 16);
        // At most that somebody gets something is the teacher's.
        assert!(sizer.moves().1 <= 1, "it was trusted");
        let again = Dl2::new(Arc::new(open_weights(seed))).resize(&state, &promises());
        assert_eq!(sizes, again, "the same for the same weights");
    }
}

#[test]
fn the_teacher_decides_about_what_the_network_was_not_trained_on() {
    let state = state(4, 12);
    let teacher = teacher_sizes(&state);
    let differs = open_weights(1);
    let mut sizer = Dl2::new(Arc::new(differs.clone()));
    assert_ne!(
        sizer.resize(&state, &promises()),
        teacher,
        "else it shows nothing"
    );
    let broken = |change: &dyn Fn(&mut Weights)| {
        let mut weights = differs.clone();
        change(&mut weights);
        let mut sizer = Dl2::new(Arc::new(weights));
        assert_eq!(sizer.resize(&state, &promises()), teacher);
        let (moves, fallbacks) = sizer.moves();
        assert!(moves > 0 && moves == fallbacks);
    };
    // More jobs than in training.
    broken(&|weights| weights.most_jobs = 11);
    // An input beyond its range.
    broken(&|weights| weights.range[2] = [50.0, 60.0]);
    // A score that is no number.
    broken(&|weights| weights.policy.params_mut().fill(f64::NAN));
    broken(&|weights| weights.policy.params_mut().fill(f64::MAX));
}

#[test]
fn a_network_that_would_give_nothing_to_anybody_is_not_obeyed() {
    let state = state(9, 3);
    let mut weights = open_weights(1);
    // The end scores 1, every other move 0: one unit of each layer is the end's own input.
    let width = weights.policy.width();
    let mut params = vec![0.0; Network::size(division::INPUTS, width)];
    params[0] = 1.0;
    params[(division::INPUTS + 1) * width] = 1.0;
    let answer = params.len() - width - 1;
    params[answer] = 1.0;
    weights.policy = Network::new(division::INPUTS, width, params).expect("its size");
    let mut sizer = Dl2::new(Arc::new(weights));
    let sizes = sizer.resize(&state, &promises());
    assert_eq!(
        sizes.len(),
        1,
        "the teacher's first move, then the end: {sizes:?}"
    );
    assert_eq!(sizer.moves(), (2, 1));
}

#[test]
fn jobs_without_an_end_are_left_to_the_teacher() {
    let mut state = state(4, 5);
    state.arrive(Job::rigid(JobType(0), 1, state.now_s(), f64::INFINITY));
    let mut sizer = Dl2::new(Arc::new(open_weights(1)));
    let sizes = sizer.resize(&state, &promises());
    assert!(sizes.iter().map(|(_, gpus)| gpus).sum::<u32>() <= 16);
    assert!(sizer.moves().1 > 0);
}

/// A day of jobs in steps of a slot, by this sizer.
fn play(sizer: &mut Dl2, steps: u32) -> Vec<Vec<(JobId, u32)>> {
    let mut random = Random::new(12);
    let mut state = ClusterState::uniform(16, 8);
    let mut all = Vec::new();
    for step in 0..steps {
        state.advance(f64::from(step) * 1200.0);
        for _ in 0..random.below(4) {
            let work = 1200.0 * random.exponential(6.0) + 1.0;
            let mut job = Job::rigid(JobType(0), 1, state.now_s(), work);
            job.speed = Speed::Curve((1..=8).map(|n: i32| f64::from(n).powf(0.8)).collect());
            state.arrive(job);
        }
        let over: Vec<JobId> = state
            .active()
            .filter(|job| job.left(state.now_s()) <= 0.0)
            .map(|job| job.id)
            .collect();
        over.into_iter().for_each(|id| state.finish(id));
        let sizes = sizer.resize(&state, &promises());
        let running: Vec<JobId> = state.running().iter().copied().collect();
        let stop = running.iter().map(|id| Decision::Suspend { job: *id });
        state
            .apply(&stop.collect::<Vec<_>>())
            .expect("running jobs");
        for (id, gpus) in &sizes {
            place(&mut state, *id, *gpus);
        }
        all.push(sizes);
    }
    all
}

#[test]
fn refinement_begins_as_the_teacher_and_then_learns_the_same_each_time() {
    let refining = || Dl2::new(Arc::new(open_weights(2))).refining(8);
    let mut sizer = refining();
    let sizes = play(&mut sizer, 120);
    let mut again = refining();
    assert_eq!(play(&mut again, 120), sizes);
    let refined = sizer.refined().expect("it refines");
    assert_eq!(Some(refined), again.refined());
    let mut frozen = Dl2::new(Arc::new(open_weights(2)));
    assert_eq!(frozen.refined(), None);
    assert_ne!(play(&mut frozen, 120), sizes);
}

#[test]
fn refinement_that_yields_less_than_the_teacher_goes_back_to_the_frozen_weights() {
    // Gives all to one job and nothing to the others: it prefers what costs most.
    let mut weights = open_weights(2);
    let width = weights.policy.width();
    let mut params = vec![0.0; Network::size(division::INPUTS, width)];
    params[0] = 1.0;
    params[(division::INPUTS + 1) * width] = 1.0;
    let answer = params.len() - width - 1;
    params[answer] = 30.0;
    weights.policy = Network::new(division::INPUTS, width, params).expect("its size");
    let weights = Arc::new(weights);
    let mut sizer = Dl2::new(Arc::clone(&weights)).refining(4);
    let sizes = play(&mut sizer, 200);
    let used = |sizes: &[(JobId, u32)]| sizes.iter().map(|(_, gpus)| gpus).sum::<u32>();
    // It ends each division after one GPU, and every other window is the teacher's.
    let idle = sizes.iter().filter(|sizes| used(sizes) == 1).count();
    let full = sizes.iter().filter(|sizes| used(sizes) == 16).count();
    assert!(idle > 40 && full > 40, "{idle} {full}");
    assert_eq!(sizer.refined(), Some(&*weights), "nothing of it is kept");
}

#[test]
fn a_file_of_weights_is_read_by_who_may_read_files() {
    let build = |text: &str, context: &Context| catalogue::sizer(text, context).err();
    let nobody = Context::complete();
    let error = build("dl2:weights=some.txt", &nobody)
        .expect("no reader")
        .to_string();
    assert!(error.contains("needs somebody who reads"), "{error}");
    let read = |file: &str| match file {
        "good" => Ok(open_weights(1).write()),
        "old" => Ok("sublet dl2 weights 0\n".to_owned()),
        _ => Err("there is no such file".to_owned()),
    };
    let reader = Context {
        files: Some(read),
        ..Context::complete()
    };
    assert_eq!(build("dl2:weights=good", &reader), None);
    assert_eq!(
        build("dl2:weights=good,refine=true,window=4", &reader),
        None
    );
    let error = build("dl2:weights=old", &reader).expect("another version");
    assert_eq!(error.param(), Some("weights"));
    assert!(error.to_string().contains("train it anew"), "{error}");
    let error = build("dl2:weights=none", &reader)
        .expect("no file")
        .to_string();
    assert!(
        error.contains("`none`") && error.contains("no such file"),
        "{error}"
    );
    let error = build("dl2:weights=", &reader).expect("no name").to_string();
    assert!(error.contains("must be some text"), "{error}");
}
