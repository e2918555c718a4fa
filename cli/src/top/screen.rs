//! The terminal while the view is on it, and how it is given back: at the end, at a panic, at a
//! signal.

use std::io::{self, Stdout, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use ratatui::Terminal;
use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::cursor::{Hide, Show};
use ratatui::crossterm::style::Print;
use ratatui::crossterm::terminal::{
    Clear, ClearType, EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode,
};
use ratatui::crossterm::{execute, queue};

/// Clicks and the wheel, and not every movement, with coordinates of any size.
const MOUSE_ON: &str = "\x1b[?1000h\x1b[?1006h";
const MOUSE_OFF: &str = "\x1b[?1006l\x1b[?1000l";

/// The view has the terminal.
static IS_UP: AtomicBool = AtomicBool::new(false);

pub struct Screen(Terminal<CrosstermBackend<Stdout>>);

impl Screen {
    /// Takes the terminal.
    ///
    /// # Errors
    /// The terminal's.
    pub fn enter() -> io::Result<Self> {
        give_back_at_a_panic();
        take()?;
        match Terminal::new(CrosstermBackend::new(io::stdout())) {
            Ok(terminal) => Ok(Self(terminal)),
            Err(error) => {
                give_back();
                Err(error)
            }
        }
    }

    /// # Errors
    /// The terminal's.
    pub fn draw(&mut self, draw: impl FnOnce(&mut ratatui::Frame<'_>)) -> io::Result<()> {
        self.0.draw(draw).map(|_| ())
    }

    /// Takes the terminal once more, after somebody else had it, and draws everything anew.
    ///
    /// # Errors
    /// The terminal's.
    pub fn enter_again(&mut self) -> io::Result<()> {
        // What the terminal was set to meanwhile is what it is given back with.
        let _ = disable_raw_mode();
        take()?;
        self.clear()
    }

    /// Draws everything anew the next time.
    ///
    /// # Errors
    /// The terminal's.
    pub fn clear(&mut self) -> io::Result<()> {
        // Not ratatui's own: it asks the terminal where the cursor is, and waits for the answer.
        execute!(io::stdout(), Clear(ClearType::All))?;
        self.0 = Terminal::new(CrosstermBackend::new(io::stdout()))?;
        Ok(())
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        give_back();
    }
}

fn take() -> io::Result<()> {
    enable_raw_mode()?;
    IS_UP.store(true, Ordering::Relaxed);
    let taken = show(&mut io::stdout());
    if taken.is_err() {
        give_back();
    }
    taken
}

/// What is written to take the screen.
fn show(out: &mut impl Write) -> io::Result<()> {
    execute!(out, EnterAlternateScreen, Print(MOUSE_ON), Hide)
}

/// What is written to give it back.
fn hide(out: &mut impl Write) -> io::Result<()> {
    queue!(out, Print(MOUSE_OFF), LeaveAlternateScreen, Show)?;
    out.flush()
}

/// Gives the terminal back as it was; once.
pub fn give_back() {
    if IS_UP.swap(false, Ordering::Relaxed) {
        // A terminal that has gone needs nothing.
        let _ = hide(&mut io::stdout());
        let _ = disable_raw_mode();
    }
}

/// What a panic has to say is said on the terminal as it was, whichever thread it is, and the
/// process ends.
fn give_back_at_a_panic() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        let say = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            let was_up = IS_UP.load(Ordering::Relaxed);
            give_back();
            say(panic);
            if was_up {
                std::process::exit(101);
            }
        }));
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_switched_on_is_switched_off() {
        let (mut on, mut off) = (Vec::new(), Vec::new());
        show(&mut on).unwrap();
        hide(&mut off).unwrap();
        let (on, off) = (
            String::from_utf8(on).unwrap(),
            String::from_utf8(off).unwrap(),
        );
        for (mode, was_on) in [
            ("?1049", true),
            ("?1000", true),
            ("?1006", true),
            ("?25", false),
        ] {
            let (set, unset) = (format!("\x1b[{mode}h"), format!("\x1b[{mode}l"));
            let (first, then) = if was_on {
                (&set, &unset)
            } else {
                (&unset, &set)
            };
            assert!(
                on.contains(first) && off.contains(then),
                "{mode}: {on:?} {off:?}"
            );
        }
    }

    #[test]
    fn a_terminal_that_was_not_taken_is_left_as_it_is() {
        give_back();
        assert!(!IS_UP.load(Ordering::Relaxed));
    }
}
