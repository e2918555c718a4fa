//! The two networks, where they may be believed, and the file that keeps them.
//!
//! The file is text: a version, how it was made, what it was trained for, and the parameters, one
//! row for each input of a layer. The last line closes it with a check sum, so that a file that was
//! cut off or changed is refused.

use std::fmt::{self, Write as _};

use super::division::{CRITIC_INPUTS, Division, INPUTS, Input};
use super::network::{Network, Trail};
use crate::cluster::Random;

/// First line of a file of this version.
const VERSION: &str = "sublet dl2 weights 1";

/// What a trained sizer consists of.
#[derive(Clone, PartialEq, Debug)]
pub struct Weights {
    /// The command that made it, and its seed.
    pub made_by: String,
    /// Most jobs at once in training.
    pub most_jobs: usize,
    /// Seconds of a slot in training.
    pub slot_s: f64,
    /// Smallest and largest value of each input in training.
    pub range: [[f64; 2]; INPUTS],
    /// Scores a move.
    pub policy: Network,
    /// Says what is still to come.
    pub critic: Network,
}

/// Why a file is no weights.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum BadWeights {
    /// Another version, or another file altogether.
    Version {
        /// Its first line, as far as it says something.
        found: String,
    },
    /// It ends too early.
    Short {
        /// What should come.
        wanted: &'static str,
    },
    /// A line is not what should be there.
    Line {
        /// From 1.
        line: usize,
        /// What should be there.
        wanted: &'static str,
    },
    /// It was changed after it was written.
    Changed,
}

impl fmt::Display for BadWeights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Version { found } => write!(
                f,
                "its first line is `{found}`, and should be `{VERSION}`: train it anew"
            ),
            Self::Short { wanted } => write!(f, "it ends before its {wanted}: copy it again"),
            Self::Line { line, wanted } => write!(f, "line {line} should hold {wanted}"),
            Self::Changed => write!(
                f,
                "its check sum is another: it was changed after it was written"
            ),
        }
    }
}

impl std::error::Error for BadWeights {}

/// A move that the policy chose.
#[derive(Clone, PartialEq, Debug)]
pub struct Pick {
    /// What it saw of each move there was; the last is to stop.
    pub inputs: Vec<Input>,
    /// The place of the chosen one in `inputs`.
    pub chosen: usize,
    /// Logarithm of its chance.
    pub log_chance: f64,
}

impl Weights {
    /// Untrained ones.
    #[must_use]
    pub fn random(width: usize, slot_s: f64, random: &mut Random) -> Self {
        Self {
            made_by: "nobody: untrained".to_owned(),
            most_jobs: 0,
            slot_s,
            range: [[f64::INFINITY, f64::NEG_INFINITY]; INPUTS],
            policy: Network::random(INPUTS, width, random),
            critic: Network::random(CRITIC_INPUTS, width, random),
        }
    }

    /// Widens the range by what is met in training.
    pub fn meet(&mut self, jobs: usize, inputs: &[Input]) {
        self.most_jobs = self.most_jobs.max(jobs);
        for input in inputs {
            for ([least, most], value) in self.range.iter_mut().zip(input) {
                (*least, *most) = (least.min(*value), most.max(*value));
            }
        }
    }

    /// An input like those of training: none beyond the range by more than a tenth of it.
    fn knows(&self, input: &Input) -> bool {
        let mut each = self.range.iter().zip(input);
        each.all(|([least, most], value)| {
            let margin = 0.1 * (most - least) + 1e-9;
            *value >= least - margin && *value <= most + margin
        })
    }

    /// The move that the policy makes, by its best score or, with `random`, by chance. `None`: this
    /// is not like anything it was trained on, it has no score, or it would give nothing to
    /// anybody.
    #[must_use]
    pub fn pick(
        &self,
        division: &Division<'_>,
        moves: &[usize],
        random: Option<&mut Random>,
    ) -> Option<Pick> {
        if division.jobs() > self.most_jobs {
            return None;
        }
        let pick = self.pick_any(division, moves, random)?;
        let stops = pick.chosen == moves.len();
        let known = pick.inputs.iter().all(|input| self.knows(input));
        (known && !(stops && division.is_empty())).then_some(pick)
    }

    /// The same, whatever it was trained on: for training.
    #[must_use]
    pub fn pick_any(
        &self,
        division: &Division<'_>,
        moves: &[usize],
        random: Option<&mut Random>,
    ) -> Option<Pick> {
        let inputs = see(division, moves);
        let mut trail = Trail::default();
        let scores = inputs
            .iter()
            .map(|input| self.policy.trace(input, &mut trail));
        let chances = softmax(scores.collect())?;
        let chosen = match random {
            Some(random) => draw(&chances, random.unit()),
            None => best(&chances),
        };
        Some(Pick {
            log_chance: chances[chosen].max(f64::MIN_POSITIVE).ln(),
            chosen,
            inputs,
        })
    }

    /// As a file.
    #[must_use]
    pub fn write(&self) -> String {
        let mut text = format!(
            "{VERSION}\nmade by: {}\nmost jobs: {}\nslot: {}\nwidth: {}\n",
            self.made_by.replace('\n', " "),
            self.most_jobs,
            self.slot_s,
            self.policy.width()
        );
        for [least, most] in self.range {
            line(&mut text, &[least, most]);
        }
        for network in [&self.policy, &self.critic] {
            let (weights, answer) = network
                .params()
                .split_at(network.params().len() - network.width() - 1);
            for row in weights.chunks_exact(network.width()) {
                line(&mut text, row);
            }
            line(&mut text, answer);
        }
        let sum = check_sum(&text);
        let _ = writeln!(text, "end {sum:016x}");
        text
    }

    /// From a file.
    ///
    /// # Errors
    /// [`BadWeights`].
    pub fn read(text: &str) -> Result<Self, BadWeights> {
        let first = text.lines().next().unwrap_or_default();
        if first != VERSION {
            let found = first.chars().take(40).collect();
            return Err(BadWeights::Version { found });
        }
        let mut lines = Lines {
            lines: text.lines().enumerate(),
        };
        lines.next("version")?;
        let made_by = lines.word("made by", "`made by: `")?.to_owned();
        let most_jobs = lines.number("most jobs", "`most jobs: ` and a number")? as usize;
        let slot_s = lines.number("slot", "`slot: ` and seconds")?;
        let width = lines.number("width", "`width: ` and a number up to 1024")? as usize;
        if !(1..=1024).contains(&width) || slot_s <= 0.0 {
            let wanted = "a slot above 0 and a width from 1 to 1024";
            return Err(BadWeights::Line { line: 5, wanted });
        }
        let mut range = [[0.0; 2]; INPUTS];
        for one in &mut range {
            one.copy_from_slice(&lines.numbers(2, "two numbers, a range")?);
        }
        let mut network = |inputs| {
            let mut params = Vec::with_capacity(Network::size(inputs, width));
            for _ in 0..inputs + width + 2 {
                params.extend(lines.numbers(width, "as many finite numbers as the width says")?);
            }
            params.extend(lines.numbers(width + 1, "one finite number more than the width")?);
            let wanted = "parameters";
            Network::new(inputs, width, params).ok_or(BadWeights::Short { wanted })
        };
        let (policy, critic) = (network(INPUTS)?, network(CRITIC_INPUTS)?);
        let (at, end) = lines.next("last line, `end`")?;
        let wanted = "`end` and the check sum";
        let sum = end.strip_prefix("end ");
        let sum = sum.and_then(|sum| u64::from_str_radix(sum, 16).ok());
        let sum = sum.ok_or(BadWeights::Line { line: at, wanted })?;
        let body = text.rfind("end ").map_or("", |end| &text[..end]);
        if sum != check_sum(body) {
            return Err(BadWeights::Changed);
        }
        Ok(Self {
            made_by,
            most_jobs,
            slot_s,
            range,
            policy,
            critic,
        })
    }
}

/// What the network sees of each move, and last of stopping.
#[must_use]
pub fn see(division: &Division<'_>, moves: &[usize]) -> Vec<Input> {
    let all = moves.iter().map(|at| Some(*at)).chain([None]);
    all.map(|to| division.input(to)).collect()
}

/// Chances that are as the exponentials of the scores; `None` where a score is no number.
pub(super) fn softmax(mut scores: Vec<f64>) -> Option<Vec<f64>> {
    let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    for score in &mut scores {
        if !score.is_finite() {
            return None;
        }
        *score = (*score - most).exp();
    }
    let sum: f64 = scores.iter().sum();
    scores.iter_mut().for_each(|score| *score /= sum);
    Some(scores)
}

fn best(chances: &[f64]) -> usize {
    let all = chances.iter().enumerate();
    // The first of equals.
    let best = all.reduce(|best, next| if next.1 > best.1 { next } else { best });
    best.map_or(0, |(at, _)| at)
}

fn draw(chances: &[f64], mut at: f64) -> usize {
    for (place, chance) in chances.iter().enumerate() {
        at -= chance;
        if at < 0.0 {
            return place;
        }
    }
    best(chances)
}

/// Numbers of a row, rounded to what single precision holds.
fn line(text: &mut String, row: &[f64]) {
    for (at, number) in row.iter().enumerate() {
        let _ = write!(text, "{}{}", if at == 0 { "" } else { " " }, *number as f32);
    }
    text.push('\n');
}

/// FNV-1a.
fn check_sum(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |sum, byte| {
        (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

struct Lines<'a> {
    lines: std::iter::Enumerate<std::str::Lines<'a>>,
}

impl<'a> Lines<'a> {
    fn next(&mut self, wanted: &'static str) -> Result<(usize, &'a str), BadWeights> {
        let next = self.lines.next().ok_or(BadWeights::Short { wanted })?;
        Ok((next.0 + 1, next.1))
    }

    fn word(&mut self, name: &str, wanted: &'static str) -> Result<&'a str, BadWeights> {
        self.named(name, wanted, Some)
    }

    fn number(&mut self, name: &str, wanted: &'static str) -> Result<f64, BadWeights> {
        let finite = |word: &str| word.parse().ok().filter(|number: &f64| number.is_finite());
        self.named(name, wanted, finite)
    }

    /// What follows a name in the next line.
    fn named<T>(
        &mut self,
        name: &str,
        wanted: &'static str,
        read: impl FnOnce(&'a str) -> Option<T>,
    ) -> Result<T, BadWeights> {
        let (line, text) = self.next(wanted)?;
        let word = text.strip_prefix(name);
        let word = word.and_then(|word| word.strip_prefix(": "));
        word.and_then(read).ok_or(BadWeights::Line { line, wanted })
    }

    fn numbers(&mut self, count: usize, wanted: &'static str) -> Result<Vec<f64>, BadWeights> {
        let (line, text) = self.next("parameters")?;
        let numbers: Result<Vec<f64>, _> = text.split(' ').map(str::parse).collect();
        let finite = |numbers: &Vec<f64>| numbers.iter().all(|number| number.is_finite());
        let numbers = numbers.ok().filter(finite);
        let numbers = numbers.filter(|numbers| numbers.len() == count);
        numbers.ok_or(BadWeights::Line { line, wanted })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn some() -> Weights {
        let mut weights = Weights::random(4, 1200.0, &mut Random::new(5));
        weights.meet(7, &[[0.5; INPUTS], [-1.5; INPUTS]]);
        // As a file keeps them.
        for network in [&mut weights.policy, &mut weights.critic] {
            for param in network.params_mut() {
                *param = f64::from(*param as f32);
            }
        }
        weights
    }

    #[test]
    fn a_file_holds_what_was_written() {
        let weights = some();
        let text = weights.write();
        let read = Weights::read(&text).expect("what was written");
        assert_eq!(read.made_by, weights.made_by);
        assert_eq!((read.most_jobs, read.slot_s), (7, 1200.0));
        let near = |a: &[f64], b: &[f64]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-6);
        assert!(near(read.policy.params(), weights.policy.params()));
        assert!(near(read.critic.params(), weights.critic.params()));
        assert_eq!(read.range, weights.range);
        assert_eq!(read.write(), text, "the same to the byte");
    }

    #[test]
    fn files_that_are_not_whole_are_refused_with_the_reason() {
        let text = some().write();
        let wrong = |text: &str| Weights::read(text).expect_err("bad weights").to_string();
        assert!(wrong("").contains("should be `sublet dl2 weights 1`"));
        let other = text.replacen("weights 1", "weights 2", 1);
        assert!(wrong(&other).contains("train it anew"), "{}", wrong(&other));
        let header = text.replacen("most jobs: 7", "most jobs: many", 1);
        let header = wrong(&header);
        assert_eq!(header, "line 3 should hold `most jobs: ` and a number");
        // Cut off anywhere.
        for part in 1..40 {
            let cut = &text[..text.len() * part / 40];
            assert!(Weights::read(cut).is_err(), "{part}/40");
        }
        let lines: Vec<&str> = text.lines().collect();
        let cut = lines[..lines.len() - 1].join("\n");
        assert!(wrong(&cut).contains("it ends before its last line"));
        for bad in ["NaN", "inf", "x"] {
            let mut lines = lines.clone();
            let row = lines[30].split_once(' ').expect("numbers").1;
            let row = format!("{bad} {row}");
            lines[30] = &row;
            let bad = wrong(&lines.join("\n"));
            assert!(bad.contains("line 31 should hold"), "{bad}");
            assert!(bad.contains("finite"), "{bad}");
        }
        let mut lines = lines.clone();
        let row = lines[30].replacen(['1', '2'], "3", 1);
        lines[30] = &row;
        assert!(wrong(&lines.join("\n")).contains("changed after it was written"));
    }

    #[test]
    fn a_score_that_is_no_number_gives_no_chances() {
        assert_eq!(softmax(vec![0.0, f64::NAN]), None);
        assert_eq!(softmax(vec![0.0, f64::INFINITY]), None);
        assert_eq!(softmax(vec![1e4, 1e4]), Some(vec![0.5, 0.5]));
        assert_eq!(draw(&[0.25, 0.75], 0.2), 0);
        assert_eq!(draw(&[0.25, 0.75], 0.3), 1);
    }
}
