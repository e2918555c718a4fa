use std::fs;
use std::path::Path;

use cluster::live::wire::KindView;

use super::work::Kinds;
use super::*;

fn read(text: &str) -> Result<Plan, String> {
    read_below(text, Path::new("/"), &|_| Err("which hook?".into()))
}

fn read_below(text: &str, base: &Path, kinds: &Kinds<'_>) -> Result<Plan, String> {
    parse(text, "p.toml", base, kinds).map_err(|error| error.to_string())
}

fn words(job: &Job) -> &[String] {
    match &job.work {
        Work::Command(words) => words,
        Work::Recording(_) => panic!("a recording"),
    }
}

/// The folder of recordings that the repository has.
fn recordings() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/recordings")
}

const TWO: &str = "[[job]]\nname = \"a\"\ncommand = [\"x\", \"1\"]\n\
    [[job]]\nname = \"b\"\ncommand = \"x | y\"\n";

#[test]
fn a_plan_has_solo_runs_all_pairs_and_what_is_named() {
    let plan = read(TWO).unwrap();
    let labels = |plan: &Plan| -> Vec<String> {
        let all = plan.combinations.iter();
        all.map(|combination| plan.label(combination)).collect()
    };
    assert_eq!(labels(&plan), ["a", "b", "a+a", "a+b", "b+b"]);
    assert_eq!((plan.repeat, plan.seed), (3, 1));
    assert_eq!(plan.modes, [Mode::Exclusive]);
    assert_eq!(words(&plan.jobs[1]), ["/bin/sh", "-c", "x | y"]);
    assert_eq!(plan.jobs[0].progress, Progress::Iterations);

    let more = "[experiment]\npairs = \"distinct\"\nmodes = [\"concurrent\", \"auto\"]\n\
        warm_up = \"0s\"\nmeasured = \"2s\"\n\
        [[combination]]\njobs = [\"a\", \"b\", \"a\"]\n\
        [[combination]]\njobs = [\"a\", \"b\"]\nshares = [0.75, \"25%\"]\n";
    let plan = read(&format!("{more}{TWO}")).unwrap();
    assert_eq!(labels(&plan), ["a", "b", "a+b", "a+b+a", "a+b@0.75,0.25"]);
    assert_eq!(plan.modes, [Mode::Concurrent, Mode::Auto]);
    let times = (Duration::ZERO, Duration::from_secs(2));
    assert_eq!(plan.times(&plan.combinations[0]), times);
    let names = names_in_run(&plan, &plan.combinations[3]);
    assert_eq!(names, ["a", "b", "a-2"]);

    let lends = "[experiment]\nmodes = [\"lend\", \"exclusive\"]\n";
    let plan = read(&format!("{lends}{TWO}")).unwrap();
    assert_eq!(plan.modes, [Mode::Lend, Mode::Exclusive]);
    assert_eq!(plan.modes[0].of_device(), Some("lend"));

    // As plans said it before the modes had one word each.
    let former = "[experiment]\nmodes = [\"slices\", \"all-at-once\"]\n";
    let plan = read(&format!("{former}{TWO}")).unwrap();
    assert_eq!(plan.modes, [Mode::Exclusive, Mode::Concurrent]);
}

#[test]
fn a_run_takes_the_longest_of_its_jobs() {
    let text = "[experiment]\nwarm_up = \"1s\"\nmeasured = \"2s\"\n\
        [[job]]\nname = \"a\"\ncommand = [\"x\"]\nwarm_up = \"3s\"\n\
        [[job]]\nname = \"b\"\ncommand = [\"x\"]\nmeasured = \"5s\"\n";
    let plan = read(text).unwrap();
    let of = |at: usize| plan.times(&plan.combinations[at]);
    let s = Duration::from_secs;
    assert_eq!((of(0), of(1)), ((s(3), s(2)), (s(1), s(5))));
    assert_eq!(of(3), (s(3), s(5)), "{:?}", plan.combinations[3]);
}

#[test]
fn what_is_counted_may_be_a_number_in_a_line() {
    let text = "[experiment]\nmodes = [\"plain\"]\n[[job]]\nname = \"a\"\ncommand = [\"x\"]\n\
        progress = { lines = \"step ([0-9]+)\", unit = \"images\" }\nenv = { A = 1, B = \"c\" }\n";
    let job = &read(text).unwrap().jobs[0];
    assert_eq!(job.progress.unit(), "images");
    assert_eq!((&job.env["A"][..], &job.env["B"][..]), ("1", "c"));
}

#[test]
fn how_often_is_no_part_of_an_experiment_and_everything_else_is() {
    let first = read(TWO).unwrap();
    let again = read(&format!("[experiment]\nrepeat = 9\n{TWO}")).unwrap();
    assert_eq!(first.identity(), again.identity());
    for other in ["seed = 2", "pairs = \"none\"", "measured = \"3s\""] {
        let other = read(&format!("[experiment]\n{other}\n{TWO}")).unwrap();
        assert_ne!(first.identity(), other.identity());
    }
}

#[test]
fn mistakes_are_placed_and_corrected() {
    for (text, at, words) in [
        ("", "1:1", &["no [[job]]"][..]),
        ("[[jobs]]\n", "1:3", &["`jobs`", "did you mean `job`?"]),
        ("[experiment\n", "1:", &[]),
        (
            "[experiment]\nrepat = 1\n",
            "2:1",
            &["did you mean `repeat`?"],
        ),
        ("[experiment]\nrepeat = 0\n", "2:10", &["`0`", "1 to 1000"]),
        ("[experiment]\nrepeat = \"x\"\n", "2:10", &["repeat = 2"]),
        ("[experiment]\nseed = -1\n", "2:8", &["`-1`"]),
        (
            "[experiment]\nmodes = \"auto\"\n",
            "2:9",
            &["[\"a\", \"b\"]"],
        ),
        (
            "[experiment]\nmodes = [\"exclusiv\"]\n",
            "2:10",
            &["did you mean `exclusive`?"],
        ),
        (
            "[experiment]\nmodes = [\"auto\", \"auto\"]\n",
            "2:18",
            &["twice"],
        ),
        ("[experiment]\nmodes = [1]\n", "2:10", &["`1`"]),
        (
            "[experiment]\npairs = \"some\"\n",
            "2:9",
            &["`some`", "distinct"],
        ),
        (
            "[experiment]\nmeasured = \"1ms\"\n",
            "2:12",
            &["`1ms`", "500ms"],
        ),
        ("[experiment]\nmeasured = 5\n", "2:12", &["`5`"]),
        (
            "[experiment]\nwarm_up = \"soon\"\n",
            "2:11",
            &["`soon`", "90s"],
        ),
        (
            "[experiment]\nwarm_up = \"2d\"\n",
            "2:11",
            &["out of range"],
        ),
        ("[job]\nname = \"a\"\n", "1:", &["[[job]]"]),
        ("[[job]]\ncommand = [\"x\"]\n", "1:1", &["needs name"]),
        ("[[job]]\nname = \"a b\"\n", "2:8", &["`a b`", "letters"]),
        ("[[job]]\nname = \"a\"\n", "1:1", &["needs a command"]),
        (
            "[[job]]\nname = \"a\"\ncommand = []\n",
            "1:1",
            &["needs a command"],
        ),
        ("[[job]]\nname = \"a\"\ncommand = [3]\n", "3:12", &["`3`"]),
        (
            "[[job]]\nname = \"a\"\ncommand = \" \"\n",
            "3:11",
            &["empty"],
        ),
        (
            "[[job]]\nname = \"a\"\ncommand = [\"a\\u0000\"]\n",
            "3:12",
            &["zero byte"],
        ),
    ] {
        let error = read(text).unwrap_err();
        assert!(
            error.starts_with(&format!("p.toml:{at}")),
            "{text}: {error}"
        );
        assert!(!error.contains('\n'), "{error}");
        for word in words {
            assert!(error.contains(word), "{text}: {error}");
        }
    }
    for (line, at, words) in [
        ("share = 1.5", "4:9", &["`1.5`", "at most 1"][..]),
        ("share = 0.6", "4:9", &["a and a", "1.2", "distinct"]),
        ("mem = 20", "4:7", &["mem = \"8GiB\""]),
        ("mem = \"20\"", "4:7", &["no unit"]),
        (
            "cwd = \"nowhere-at-all\"",
            "4:7",
            &["/nowhere-at-all", "no directory"],
        ),
        ("env = 3", "4:7", &["NAME = "]),
        ("env = { \"A=\" = 1 }", "4:9", &["`A=`"]),
        ("env = { A = [1] }", "4:13", &["`A`"]),
        ("env = { SUBLET_MEM = \"1G\" }", "4:9", &["sublet's own"]),
        ("env = { SUBLET_SIM_SPEED = 2 }", "4:9", &["all jobs"]),
        ("progress = \"steps\"", "4:12", &["`steps`", "iterations"]),
        (
            "progress = { line = \"x\" }",
            "4:14",
            &["did you mean `lines`?"],
        ),
        ("progress = { unit = \"x\" }", "4:12", &["needs lines"]),
        (
            "progress = { lines = \"step ([0-9]+\" }",
            "4:22",
            &["no regular expression"],
        ),
        ("progress = { lines = \"step\" }", "4:22", &["0 groups"]),
        ("progress = { lines = \"(a)(b)\" }", "4:22", &["2 groups"]),
        ("colour = 1", "4:1", &["`colour`", "it has name"]),
        (
            "[[job]]\nname = \"a\"\ncommand = [\"y\"]",
            "5:8",
            &["taken"],
        ),
        (
            "[[combination]]\njobs = [\"a\"]",
            "4:1",
            &["2 to 8", "has 1"],
        ),
        (
            "[[combination]]\njobs = [\"a\", \"bb\"]",
            "5:14",
            &["`bb`", "the plan has a"],
        ),
        (
            "[[combination]]\njobs = [\"a\", \"a\"]",
            "4:1",
            &["already"],
        ),
        (
            "[[combination]]\njobs = [\"a\", \"a\"]\nshares = [0.5]",
            "6:10",
            &["2 jobs"],
        ),
        (
            "[[combination]]\njobs = [\"a\", \"a\"]\nshares = [1, 0.1]",
            "6:10",
            &["1.1"],
        ),
        (
            "[[combination]]\njobs = [\"a\", \"a\"]\nshares = [\"x\", 0.1]",
            "6:11",
            &["`x`"],
        ),
    ] {
        let text = format!("[[job]]\nname = \"a\"\ncommand = [\"x\"]\n{line}\n");
        let error = read(&text).unwrap_err();
        assert!(
            error.starts_with(&format!("p.toml:{at}")),
            "{line}: {error}"
        );
        assert!(!error.contains('\n'), "{error}");
        for word in words {
            assert!(error.contains(word), "{line}: {error}");
        }
    }
    let plain = format!("[experiment]\nmodes = [\"plain\"]\n{TWO}");
    let error = read(&plain).unwrap_err();
    assert!(
        error.contains("`a`") && error.contains("lines ="),
        "{error}"
    );
}

#[test]
fn a_recording_is_read_whole_and_says_how_it_is_counted() {
    let base = recordings();
    let none = |_: &str| Err(String::new());
    let job = |more: &str| format!("[[job]]\nname = \"a\"\nrecording = \"train_mlp.slr\"\n{more}");
    let plan = read_below(&job(""), &base, &none).unwrap();
    let Work::Recording(one) = &plan.jobs[0].work else {
        panic!("{plan:?}");
    };
    assert_eq!(one.path, base.join("train_mlp.slr"));
    assert_eq!(one.processes, 1);
    let counted = match one.has_steps {
        true => Progress::Iterations,
        false => Progress::Launches,
    };
    assert_eq!(plan.jobs[0].progress, counted);
    assert_eq!(plan.jobs[0].kind(), "a");
    // A replay counts by itself where no arbiter does.
    let plain = format!(
        "[experiment]\nmodes = [\"plain\"]\n{}",
        job("progress = \"launches\"\n")
    );
    assert!(read_below(&plain, &base, &none).is_ok());
    let device = plain.replace("launches", "device_time");
    let error = read_below(&device, &base, &none).unwrap_err();
    assert!(
        error.starts_with("p.toml:6:12: ") && error.contains("launches"),
        "{error}"
    );
    // What is in the file is part of what must not differ; where it lies is not.
    let dir = tempfile::tempdir().unwrap();
    let copy = dir.path().join("train_mlp.slr");
    fs::copy(base.join("train_mlp.slr"), &copy).unwrap();
    let there = read_below(&job(""), dir.path(), &none).unwrap();
    let of = |plan: &Plan| plan.identity()["jobs"]["a"]["recording"].clone();
    assert!(of(&plan).is_object() || of(&there).is_object());
    assert_eq!(of(&there), of(&read_below(&job(""), &base, &none).unwrap()));
    fs::copy(base.join("infer_loop.slr"), &copy).unwrap();
    let other = read_below(&job(""), dir.path(), &none).unwrap();
    assert_ne!(of(&there), of(&other));
}

#[test]
fn a_recording_that_is_missing_cut_or_of_another_version_is_named_with_its_place() {
    let dir = tempfile::tempdir().unwrap();
    let whole = fs::read(recordings().join("graph_loop.slr")).unwrap();
    let file = dir.path().join("job.slr");
    let text = "[[job]]\nname = \"a\"\nrecording = \"job.slr\"\n";
    let refused = |text: &str| {
        let error = read_below(text, dir.path(), &|_| Err(String::new())).unwrap_err();
        assert!(error.starts_with("p.toml:3:13: "), "{error}");
        assert!(!error.contains('\n'), "{error}");
        error
    };
    assert!(refused(text).contains("cannot read it"));
    fs::create_dir(&file).unwrap();
    assert!(refused(text).contains("cannot read it"));
    fs::remove_dir(&file).unwrap();
    let mut other = whole.clone();
    other[8] = 2;
    fs::write(&file, &other).unwrap();
    assert!(refused(text).contains("version 2"));
    // Cut anywhere, no half of a job is taken for the whole. The reader's own tests cut at every
    // byte.
    let kinds = |_: &str| Err(String::new());
    let within = (2000..whole.len() - 100).step_by(17);
    for cut in (0..2000)
        .chain(within)
        .chain(whole.len() - 100..whole.len())
    {
        fs::write(&file, &whole[..cut]).unwrap();
        let error = read_below(text, dir.path(), &kinds).unwrap_err();
        assert!(
            error.starts_with("p.toml:3:13: recording: `job.slr`: "),
            "{cut}: {error}"
        );
        assert!(!error.contains('\n'), "{cut}: {error}");
    }
    fs::write(&file, &whole).unwrap();
    assert!(read_below(text, dir.path(), &kinds).is_ok());
    for (from, to, words) in [
        (
            "recording",
            "command = [\"x\"]\nrecording",
            "has a command as well",
        ),
        (
            "job.slr\"",
            "job.slr\"\nprogress = { lines = \"([0-9]+)\" }",
            "writes no lines",
        ),
    ] {
        let error = read_below(&text.replace(from, to), dir.path(), &kinds).unwrap_err();
        assert!(
            error.starts_with("p.toml:4:") && error.contains(words),
            "{error}"
        );
    }
}

#[test]
fn a_kind_of_the_cluster_is_asked_for_and_its_command_is_the_jobs() {
    let known = |kind: &str| {
        Ok(KindView {
            kind: kind.into(),
            command: vec!["train".into(), "--x".into()],
            env: BTreeMap::from([
                ("A".to_owned(), "hook".to_owned()),
                ("B".to_owned(), "hook".to_owned()),
                ("SUBLET_MEM".to_owned(), "1".to_owned()),
            ]),
            gpus: match kind {
                "wide" => 4,
                _ => 1,
            },
            dir: match kind {
                "away" => "/nowhere-at-all".into(),
                _ => "/tmp".into(),
            },
            mem_bytes: Some(1 << 30),
            ..KindView::default()
        })
    };
    let of = |kind: &str, more: &str| {
        let text = format!("[[job]]\nname = \"a\"\nkind = \"{kind}\"\n{more}");
        read_below(&text, Path::new("/"), &known)
    };
    let plan = of("mlp b64", "env = { A = \"plan\" }\n").unwrap();
    let job = &plan.jobs[0];
    assert_eq!(words(job), ["train", "--x"]);
    let env: Vec<(&str, &str)> = job.env.iter().map(|(a, b)| (&a[..], &b[..])).collect();
    assert_eq!(env, [("A", "plan"), ("B", "hook")]);
    assert_eq!(job.cwd, Path::new("/tmp"));
    assert_eq!(job.mem, Some(MemLimit::Bytes(1 << 30)));
    assert_eq!(job.kind(), "mlp b64");
    // Beside a command it is a label for the hook, and the hook is not asked.
    let labelled =
        read(&TWO.replace("command = \"x | y\"", "command = \"x\"\nkind = \"k\"")).unwrap();
    assert_eq!(labelled.jobs[1].kind(), "k");
    assert_eq!(labelled.jobs[0].kind(), "x 1");
    for (kind, words) in [("wide", "takes 4 GPUs"), ("away", "/nowhere-at-all")] {
        let error = of(kind, "").unwrap_err();
        assert!(
            error.starts_with("p.toml:3:8: kind: ") && error.contains(words),
            "{error}"
        );
    }
    let error = read("[[job]]\nname = \"a\"\nkind = \"k\"\n").unwrap_err();
    assert_eq!(error, "p.toml:3:8: kind: `k`: which hook?");
    let error = of("", "").unwrap_err();
    assert!(error.contains("it is empty"), "{error}");
}

/// As the quota file's: whatever is written there, there is one line with its place, or a plan.
#[test]
fn a_thousand_mutated_plans_are_plans_or_one_line_with_its_place() {
    let base = recordings().join("../experiments");
    let text = fs::read_to_string(base.join("quick.toml")).unwrap();
    let text = format!(
        "{text}\n[[job]]\nname = \"replay\"\nrecording = \"../recordings/infer_loop.slr\"\n\
         [[combination]]\njobs = [\"train\", \"serve\", \"replay\"]\nshares = [0.5, 0.25, 0.25]\n"
    );
    let bytes = text.as_bytes();
    // A linear congruential generator, with the constants of Numerical Recipes.
    let mut state = 7_u32;
    let mut random = |below: usize| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        // CAST: 32 bits fit.
        (state >> 8) as usize % below
    };
    let (mut plans, mut errors) = (0, 0);
    for _ in 0..1000 {
        let mut mutated = bytes.to_vec();
        for _ in 0..=random(3) {
            let at = random(mutated.len().max(1));
            if mutated.is_empty() {
                break;
            }
            match random(5) {
                0 => mutated.truncate(at.max(1)),
                1 => mutated[at] = b"\"[]{}=.,-#\n\0\xff0"[random(14)],
                2 => {
                    mutated.remove(at);
                }
                3 => mutated.insert(at, b"\"[]{}=.,-#\n 9e"[random(14)]),
                _ => {
                    let (from, length) = (random(mutated.len()), random(60));
                    let part = mutated[from..(from + length).min(mutated.len())].to_vec();
                    mutated.splice(at..at, part);
                }
            }
        }
        let text = String::from_utf8_lossy(&mutated);
        match read_below(&text, &base, &|_| Err("which hook?".into())) {
            Ok(_) => plans += 1,
            Err(error) => {
                errors += 1;
                let place = error
                    .strip_prefix("p.toml:")
                    .unwrap_or_else(|| panic!("{error}"));
                let mut parts = place.splitn(3, ':');
                let mut number = || parts.next().and_then(|part| part.parse::<u32>().ok());
                assert!(number().is_some_and(|line| line > 0), "{error}");
                assert!(number().is_some_and(|column| column > 0), "{error}");
                assert!(!error.contains('\n'), "{error}");
            }
        }
    }
    assert!(plans > 20 && errors > 200, "{plans} plans, {errors} errors");
}
