//! What shells and `man` know of the command line, made from its declarations.

use std::fs;

use anyhow::Context;
use clap::CommandFactory as _;

use crate::args::{Cli, Completions, Man};
use crate::exit::Result;

/// The completion script.
pub fn completions(args: &Completions) -> String {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "sublet", &mut script);
    String::from_utf8_lossy(&script).into_owned()
}

/// Writes the pages, and says where they are.
///
/// # Errors
/// A directory that cannot be made or written.
pub fn man(args: &Man) -> Result<String> {
    let dir = &args.dir;
    fs::create_dir_all(dir)
        .and_then(|()| clap_mangen::generate_to(Cli::command(), dir))
        .with_context(|| format!("cannot write man pages to {}", dir.display()))?;
    Ok(format!("man pages are in {}\n", dir.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shell_has_a_script_with_the_flags() {
        for shell in [
            clap_complete::Shell::Bash,
            clap_complete::Shell::Zsh,
            clap_complete::Shell::Fish,
        ] {
            let script = completions(&Completions { shell });
            for word in [
                "share-min",
                "quantum",
                "completions",
                "follow",
                "once",
                "readonly",
            ] {
                assert!(script.contains(word), "{shell}: {word}");
            }
        }
    }

    #[test]
    fn every_command_has_a_page() {
        let dir = tempfile::tempdir().unwrap();
        let pages = dir.path().join("man1");
        man(&Man { dir: pages.clone() }).unwrap();
        for (page, word) in [
            ("sublet.1", "sublet"),
            ("sublet-run.1", "SUBLET_SHARE_MIN"),
            ("sublet-device-set.1", "quantum"),
            ("sublet-events.1", "follow"),
            ("sublet-top.1", "readonly"),
        ] {
            let text = fs::read_to_string(pages.join(page)).unwrap();
            assert!(text.contains(word), "{page}: {text}");
        }
        let file = dir.path().join("file");
        fs::write(&file, "").unwrap();
        let error = man(&Man { dir: file }).unwrap_err().line();
        assert!(error.contains("cannot write man pages"), "{error}");
    }
}
