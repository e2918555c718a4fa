//! Trains the network of sizer `dl2` on jobs of ElasticFlow's cluster03 and writes its weights: see
//! `scripts/sim/train-dl2`.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use cluster::dl2::{Progress, Recipe, World, train};

const USAGE: &str = "usage: train-dl2 --out FILE [--warm FILE] [--seed N] [--rounds N] [--traces N] \
                     [--lessons N] [--passes N] [--rate F] [--entropy F]";

/// What was asked for.
struct Asked {
    recipe: Recipe,
    out: PathBuf,
    warm: Option<PathBuf>,
}

fn asked(arguments: &[String]) -> Option<Asked> {
    let mut recipe = Recipe::new(1);
    let (mut out, mut warm) = (None, None);
    for two in arguments.chunks(2) {
        let [name, value] = two else { return None };
        match name.as_str() {
            "--out" => out = Some(PathBuf::from(value)),
            "--warm" => warm = Some(PathBuf::from(value)),
            "--seed" => recipe.seed = value.parse().ok()?,
            "--rounds" => recipe.rounds = value.parse().ok()?,
            "--traces" => recipe.traces = value.parse().ok()?,
            "--lessons" => recipe.lessons = value.parse().ok()?,
            "--passes" => recipe.passes = value.parse().ok()?,
            "--rate" => recipe.rate = value.parse().ok()?,
            "--entropy" => recipe.entropy = value.parse().ok()?,
            _ => return None,
        }
    }
    let out = out?;
    Some(Asked { recipe, out, warm })
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let Some(asked) = asked(&arguments) else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    let data = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("data");
    let world = match World::itp(&data) {
        Ok(world) => world,
        Err(error) => {
            eprintln!("train-dl2: {error}");
            return ExitCode::FAILURE;
        }
    };
    let begin = Instant::now();
    let trained = train(&world, &world.training(), &asked.recipe, |progress| {
        let at_s = begin.elapsed().as_secs_f64();
        match progress {
            Progress::Lesson { pass, loss } => {
                println!("{at_s:7.1} s  pass {pass} over the teacher's moves: loss {loss:.4}");
            }
            Progress::Trial {
                round,
                over_teacher,
            } => println!("{at_s:7.1} s  round {round}: {over_teacher:.4} of the teacher's time"),
        }
    });
    let trained = match trained {
        Ok(trained) => trained,
        Err(error) => {
            eprintln!("train-dl2: {error}");
            return ExitCode::FAILURE;
        }
    };
    let files = [
        (Some(&asked.out), trained.refined),
        (asked.warm.as_ref(), trained.warm),
    ];
    for (file, mut weights) in files {
        let Some(file) = file else { continue };
        weights.made_by = asked.recipe.command();
        if let Err(error) = std::fs::write(file, weights.write()) {
            eprintln!("train-dl2: cannot write {}: {error}", file.display());
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}
