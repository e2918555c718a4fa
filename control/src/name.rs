//! Names of jobs: what is allowed, and what a command is called when nobody says.

use crate::error::one_line;

/// Longer names would break tables and, with a suffix, file names.
pub const NAME_MAX_BYTES: usize = 64;

/// Why a name is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{}` is no name: write 1 to {NAME_MAX_BYTES} letters, digits, `.`, `_` or `-`, beginning with a letter or digit",
    one_line(.0, 80)
)]
pub struct BadName(pub String);

/// # Errors
/// [`BadName`] with the rule in it.
pub fn check_name(name: &str) -> Result<(), BadName> {
    let fits = name.len() <= NAME_MAX_BYTES
        && name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.chars().all(is_name_char);
    if fits {
        Ok(())
    } else {
        Err(BadName(name.to_owned()))
    }
}

fn is_name_char(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-')
}

/// A name for a job without one: the base name of the program, or of the script where the program
/// is an interpreter. `["/usr/bin/python3", "-u", "exp/train.py"]` is `train`. Always passes
/// [`check_name`].
pub fn name_from_command<S: AsRef<str>>(command: &[S]) -> String {
    let mut words = command.iter().map(AsRef::as_ref);
    let program = base_name(words.next().unwrap_or_default());
    let name = if is_interpreter(program) {
        // The first word that is a file; an option's argument (`-c CODE`, `-m MODULE`) counts only
        // if it looks like a module.
        let mut script = None;
        let mut words = words.peekable();
        while let Some(word) = words.next() {
            if word == "-m" {
                script = words.next();
                break;
            }
            if word == "-c" {
                break;
            }
            if !word.starts_with('-') {
                script = Some(stem(base_name(word)));
                break;
            }
        }
        script
            .filter(|script| !script.is_empty())
            .unwrap_or(program)
    } else {
        program
    };
    let name: String = name
        .chars()
        .map(|c| if is_name_char(c) { c } else { '_' })
        .skip_while(|c| !c.is_ascii_alphanumeric())
        .take(NAME_MAX_BYTES)
        .collect();
    if name.is_empty() { "job".into() } else { name }
}

fn base_name(path: &str) -> &str {
    path.trim_end_matches('/')
        .rsplit('/')
        .next()
        .unwrap_or(path)
}

fn stem(file: &str) -> &str {
    match file.rsplit_once('.') {
        Some((stem, _)) if !stem.is_empty() => stem,
        _ => file,
    }
}

fn is_interpreter(program: &str) -> bool {
    let family = program.trim_end_matches(|c: char| c.is_ascii_digit() || c == '.');
    matches!(
        family,
        "python"
            | "pypy"
            | "ipython"
            | "sh"
            | "bash"
            | "dash"
            | "zsh"
            | "perl"
            | "ruby"
            | "julia"
            | "node"
    )
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_command_names_its_job() {
        for (command, name) in [
            (&["/opt/bin/train_mlp", "--epochs", "3"][..], "train_mlp"),
            (&["python", "train.py"], "train"),
            (
                &["/usr/bin/python3.12", "-u", "exp/train.v2.py"],
                "train.v2",
            ),
            (
                &["python3", "-m", "torch.distributed.run", "x.py"],
                "torch.distributed.run",
            ),
            (&["python3", "-c", "import torch"], "python3"),
            (&["bash"], "bash"),
            (&["./my prog"], "my_prog"),
            (&["/"], "job"),
            (&[""], "job"),
            (&[], "job"),
        ] {
            assert_eq!(name_from_command(command), name, "{command:?}");
        }
    }

    #[test]
    fn names_are_plain() {
        for good in ["a", "train-2", "A.b_c", &"x".repeat(NAME_MAX_BYTES)] {
            assert_eq!(check_name(good), Ok(()));
        }
        for bad in [
            "",
            "-a",
            ".a",
            "a b",
            "a/b",
            "é",
            &"x".repeat(NAME_MAX_BYTES + 1),
        ] {
            assert_eq!(check_name(bad), Err(BadName(bad.into())));
        }
    }

    proptest! {
        #[test]
        fn every_command_gives_a_good_name(command in proptest::collection::vec("\\PC{0,80}", 0..4)) {
            prop_assert_eq!(check_name(&name_from_command(&command)), Ok(()));
        }
    }
}
