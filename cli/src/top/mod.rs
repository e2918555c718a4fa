//! `sublet top`: devices and jobs as they change, on a terminal, as text or as JSON.
//!
//! What is shown is a function of what the arbiter said and of what somebody at the keys has
//! chosen; only `live` and `screen` know a terminal.

mod asker;
mod columns;
mod details;
mod layout;
mod live;
mod model;
mod order;
mod plain;
mod report;
#[cfg(test)]
mod sample;
mod screen;
mod signals;
#[cfg(test)]
mod snapshots;
mod state;
mod view;

use std::ffi::OsString;
use std::io::{self, IsTerminal as _, Write};
use std::thread;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use anyhow::anyhow;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;

use crate::args::Top;
use crate::exit::Result;
use asker::NoAnswer;
use model::Model;
use state::State;
use view::Theme;

/// Columns of a frame that is written to a file, where nobody says how many.
const COLUMNS: u16 = 120;

/// Shows what there is until somebody ends it, or prints it.
///
/// # Errors
/// No terminal, one that shows nothing but lines, or an output that takes nothing. That no arbiter
/// runs is no error: it may come.
pub fn top(args: &Top) -> Result<()> {
    if args.json || args.once {
        return match print(args) {
            // Who reads our lines has had enough (`| head`).
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::Other => Err(anyhow!("{error}").into()),
            Err(error) => Err(anyhow!("cannot write to stdout: {error}").into()),
            Ok(()) => Ok(()),
        };
    }
    let var = |name: &str| std::env::var_os(name);
    if let Some(why) = unfit(var, io::stdin().is_terminal() && io::stdout().is_terminal()) {
        return Err(anyhow!("{why}: use --once for one frame as text, or --json").into());
    }
    Ok(live::show(args.interval, args.readonly, theme(var, false))?)
}

/// Why the view cannot be shown here.
fn unfit(var: impl Fn(&str) -> Option<OsString>, is_terminal: bool) -> Option<String> {
    if !is_terminal {
        return Some("`sublet top` needs a terminal for input and output".into());
    }
    let term = var("TERM").unwrap_or_default();
    if term.is_empty() || term == "dumb" {
        let term = term.display();
        return Some(format!(
            "a terminal of the kind `{term}` (TERM) shows lines only"
        ));
    }
    None
}

fn theme(var: impl Fn(&str) -> Option<OsString>, plain: bool) -> Theme {
    let set = |name: &str| var(name).filter(|value| !value.is_empty());
    let locale = ["LC_ALL", "LC_CTYPE", "LANG"].into_iter().find_map(set);
    let locale = locale.map(|locale| locale.to_string_lossy().to_lowercase());
    Theme {
        colour: !plain && set("NO_COLOR").is_none(),
        unicode: locale.is_some_and(|locale| locale.contains("utf-8") || locale.contains("utf8")),
        plain,
    }
}

/// One look, and one more after each interval: shares are known from the second on.
fn print(args: &Top) -> io::Result<()> {
    let begun = Instant::now();
    let mut model = Model::default();
    look(&mut model, begun)?;
    let mut due = begun;
    loop {
        // Times that are over are left out.
        due = (due + args.interval).max(Instant::now());
        thread::sleep(due.saturating_duration_since(Instant::now()));
        look(&mut model, begun)?;
        let text = if args.json {
            crate::json::object(report::object(&model, unix_ms()))
        } else {
            frame(&model, elapsed_ms(begun))
        };
        let mut stdout = io::stdout().lock();
        stdout.write_all(text.as_bytes())?;
        stdout.flush()?;
        if args.once {
            return Ok(());
        }
    }
}

/// That an arbiter is not there, or does not answer, is part of what is printed. What no arbiter
/// can change is an error.
fn look(model: &mut Model, begun: Instant) -> io::Result<()> {
    match asker::status() {
        Ok(status) => model.learn(elapsed_ms(begun), status),
        Err(error @ NoAnswer::Place(_)) => return Err(io::Error::other(error.to_string())),
        Err(error) => model.lose(error.to_string()),
    }
    Ok(())
}

fn elapsed_ms(begun: Instant) -> u64 {
    u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX)
}

fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(0))
}

/// One frame as text: as wide as the terminal, or as `COLUMNS` says, and as long as it takes.
fn frame(model: &Model, now_ms: u64) -> String {
    if let (None, Some(why)) = (&model.arbiter, &model.lost) {
        return format!("{}\n", crate::printable::printable(why));
    }
    let size = io::stdout()
        .is_terminal()
        .then(terminal_size::terminal_size)
        .flatten();
    let var = |name: &str| std::env::var_os(name);
    let said = var("COLUMNS").and_then(|columns| columns.to_str()?.parse().ok());
    let width = size.map(|(width, _)| width.0).or(said).unwrap_or(COLUMNS);
    plain_frame(model, theme(var, true), width.clamp(20, 1000), now_ms)
}

fn plain_frame(model: &Model, theme: Theme, width: u16, now_ms: u64) -> String {
    let rows = 2 + model.devices.len() + model.jobs.len().max(1);
    let height = u16::try_from(rows)
        .unwrap_or(u16::MAX)
        .min(u16::MAX / width);
    let area = Rect::new(0, 0, width, height);
    let mut buffer = Buffer::empty(area);
    let state = State::new(true);
    view::draw(&mut buffer, area, (model, &state), theme, now_ms);
    plain::text(&buffer)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(vars: &'static [(&str, &str)]) -> impl Fn(&str) -> Option<OsString> {
        |name| {
            let var = vars.iter().find(|(key, _)| *key == name);
            var.map(|(_, value)| (*value).into())
        }
    }

    #[test]
    fn a_terminal_that_cannot_show_it_is_named() {
        assert_eq!(unfit(set(&[("TERM", "xterm")]), true), None);
        assert!(
            unfit(set(&[("TERM", "dumb")]), true)
                .unwrap()
                .contains("`dumb`")
        );
        assert!(unfit(set(&[]), true).unwrap().contains("TERM"));
        assert!(
            unfit(set(&[("TERM", "xterm")]), false)
                .unwrap()
                .contains("needs a terminal")
        );
    }

    #[test]
    fn colours_and_characters_are_what_the_user_can_see() {
        let utf8 = theme(set(&[("LANG", "de_DE.UTF-8")]), false);
        assert!(utf8.unicode && utf8.colour);
        assert!(!theme(set(&[]), false).unicode);
        assert!(!theme(set(&[("LC_ALL", "C"), ("LANG", "C.UTF-8")]), false).unicode);
        assert!(theme(set(&[("LC_ALL", ""), ("LC_CTYPE", "C.utf8")]), false).unicode);
        assert!(!theme(set(&[("NO_COLOR", "1")]), false).colour);
        assert!(theme(set(&[("NO_COLOR", "")]), false).colour);
        assert!(!theme(set(&[]), true).colour);
    }

    #[test]
    fn the_page_has_every_flag_and_every_key() {
        use clap::CommandFactory as _;
        let page = include_str!("../../../docs/how-to/top.md");
        let command = crate::args::Cli::command();
        let top = command.find_subcommand("top").unwrap();
        for flag in top.get_arguments() {
            let flag = format!("--{}", flag.get_long().unwrap());
            assert!(page.contains(&flag), "docs/how-to/top.md: {flag}");
        }
        for (keys, _) in state::KEYS {
            for key in keys.split(", ") {
                assert!(
                    page.contains(&format!("`{key}`")),
                    "docs/how-to/top.md: {key}"
                );
            }
        }
    }

    #[test]
    fn a_frame_has_every_job_and_no_keys() {
        let model = sample::model();
        let theme = theme(set(&[]), true);
        let text = plain_frame(&model, theme, 120, sample::NOW_MS);
        for job in &model.jobs {
            assert!(text.contains(&job.status.name[..4]), "{text}");
        }
        assert!(!text.contains("help") && text.is_ascii(), "{text}");
        assert_eq!(
            text.lines().count(),
            2 + model.devices.len() + model.jobs.len()
        );
        let many = u16::MAX / 20;
        let mut model = Model::default();
        model
            .jobs
            .resize_with(usize::from(many) * 2, Default::default);
        assert!(plain_frame(&model, theme, 20, 0).lines().count() <= usize::from(many));
    }
}
