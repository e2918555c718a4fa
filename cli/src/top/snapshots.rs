//! The view against files beside this one: text for people to read, and the same with colours,
//! from which `scripts/docs-assets` makes pictures.
//!
//! After a change that is meant, `SUBLET_TEST_RENEW=1 cargo test -p cli top::snapshots` writes them
//! anew; read the difference before it is committed.

use std::fs;
use std::path::Path;

use control::SliceMode;
use ratatui::buffer::Buffer;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::layout::Rect;

use super::columns::Column;
use super::model::Model;
use super::state::{Mode, State};
use super::view::{self, Theme};
use super::{plain, sample};

const THEME: Theme = Theme {
    colour: true,
    unicode: true,
    plain: false,
};

fn drawn(model: &Model, state: &State, theme: Theme, width: u16, height: u16) -> Buffer {
    let area = Rect::new(0, 0, width, height);
    let mut buffer = Buffer::empty(area);
    view::draw(&mut buffer, area, (model, state), theme, sample::NOW_MS);
    buffer
}

fn press(state: &mut State, model: &Model, keys: &str) {
    for key in keys.chars() {
        let code = match key {
            '\n' => KeyCode::Enter,
            key => KeyCode::Char(key),
        };
        state.on_key(KeyEvent::new(code, KeyModifiers::NONE), model, 5, &[]);
    }
}

/// The sample with `train` chosen.
fn state(model: &Model) -> State {
    let mut state = State::new(false);
    press(&mut state, model, "/train\n");
    state.choose(0, model);
    state.filter.clear();
    state
}

#[track_caller]
fn is_as_written(name: &str, buffer: &Buffer) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/top/snapshots");
    for (ending, now) in [
        ("txt", plain::text(buffer)),
        ("ansi", plain::coloured(buffer)),
    ] {
        let path = folder.join(format!("{name}.{ending}"));
        if std::env::var_os("SUBLET_TEST_RENEW").is_some() {
            fs::write(&path, &now).unwrap();
        }
        let written = fs::read_to_string(&path).unwrap_or_default();
        assert!(
            written == now,
            "{} is not what is drawn (SUBLET_TEST_RENEW=1 writes it anew):\n{now}",
            path.display()
        );
    }
}

#[test]
fn the_view_at_two_sizes() {
    let model = sample::model();
    let state = state(&model);
    is_as_written("80x24", &drawn(&model, &state, THEME, 80, 24));
    is_as_written("200x60", &drawn(&model, &state, THEME, 200, 60));
}

#[test]
fn a_question_before_a_change() {
    let model = sample::model();
    let mut state = state(&model);
    press(&mut state, &model, "m32GiB\n");
    is_as_written("question-80x24", &drawn(&model, &state, THEME, 80, 24));
}

#[test]
fn an_arbiter_that_has_gone() {
    let mut model = sample::model();
    model.lose("no arbiter runs at /run/sublet/api.sock: there is no socket".into());
    model.looked_ms -= 12_000;
    let state = state(&model);
    is_as_written("gone-80x24", &drawn(&model, &state, THEME, 80, 24));
}

#[test]
fn the_help_has_no_changing_keys_where_nothing_is_changed() {
    let model = sample::model();
    for (readonly, name) in [(false, "help-80x24"), (true, "help-readonly-80x24")] {
        let mut state = State::new(readonly);
        press(&mut state, &model, "?");
        assert_eq!(state.mode, Mode::Help);
        is_as_written(name, &drawn(&model, &state, THEME, 80, 24));
    }
}

#[test]
fn a_device_that_lends_says_whether_it_has_slices() {
    let mut model = sample::model();
    for (running, shown) in [
        (SliceMode::Lend, "  lend"),
        (SliceMode::Exclusive, "  lend (slices)"),
    ] {
        let device = &mut model.devices[1].status;
        (device.mode, device.running) = (SliceMode::Lend, running);
        let text = plain::text(&drawn(&model, &state(&model), THEME, 200, 60));
        let line = text.lines().find(|line| line.starts_with("GPU 1")).unwrap();
        assert!(line.trim_end().ends_with(shown), "{line}");
    }
}

/// Every size and every mode; what cannot be shown is left out.
#[test]
fn no_size_is_too_small() {
    let hostile = |mut model: Model| {
        for job in &mut model.jobs {
            job.status.name = "漢字\x1b[2J\u{202e}e\u{301}".repeat(9);
            job.status.user = "👩‍👩‍👧".repeat(5);
        }
        model
    };
    let mut lost = sample::model();
    lost.lose("x".repeat(500));
    let models = [
        Model::default(),
        sample::model(),
        hostile(sample::model()),
        lost,
    ];
    for (width, height) in [
        (0, 0),
        (1, 1),
        (2, 1),
        (1, 2),
        (3, 3),
        (20, 5),
        (5, 20),
        (20, 24),
        (40, 10),
        (79, 23),
        (120, 20),
        (500, 3),
        (300, 100),
    ] {
        for model in &models {
            for keys in ["", "?", "/tr", "p", "sx\n", "m1GiB\n", "\n", "jjjjj"] {
                for unicode in [false, true] {
                    let mut state = State::new(false);
                    press(&mut state, model, keys);
                    let theme = Theme { unicode, ..THEME };
                    let buffer = drawn(model, &state, theme, width, height);
                    assert_eq!(buffer.area, Rect::new(0, 0, width, height));
                    let text = plain::text(&buffer);
                    assert!(!text.contains(['\x1b', '\u{202e}']), "{text}");
                }
            }
        }
    }
}

#[test]
fn the_job_and_the_value_of_a_question_are_seen_on_a_small_screen() {
    let mut model = sample::model();
    model.jobs[0].status.name = "n".repeat(64);
    let mut state = State::new(false);
    state.sort = Column::Id;
    press(&mut state, &model, "jm32GiB\n");
    let text = plain::text(&drawn(&model, &state, THEME, 20, 8));
    let text: String = text.split_whitespace().collect();
    assert!(
        text.contains(&"n".repeat(64)) && text.contains("to32GiB"),
        "{text}"
    );
    assert!(text.ends_with("y/n"), "{text}");
}

#[test]
fn without_colours_no_cell_has_one() {
    let model = sample::model();
    let theme = Theme {
        colour: false,
        ..THEME
    };
    for keys in ["", "p", "?"] {
        let mut state = state(&model);
        press(&mut state, &model, keys);
        let buffer = drawn(&model, &state, theme, 200, 60);
        for cell in &buffer.content {
            use ratatui::style::Color::Reset;
            assert_eq!((cell.fg, cell.bg), (Reset, Reset), "{cell:?}");
        }
    }
}

#[test]
fn what_is_drawn_at_an_offset_stays_there() {
    let model = sample::model();
    let mut buffer = Buffer::empty(Rect::new(0, 0, 60, 30));
    let area = Rect::new(10, 5, 40, 22);
    let state = state(&model);
    view::draw(&mut buffer, area, (&model, &state), THEME, sample::NOW_MS);
    for (at, cell) in buffer.content.iter().enumerate() {
        let (x, y) = buffer.pos_of(at);
        assert!(
            area.contains((x, y).into()) || cell.symbol() == " ",
            "{x} {y}"
        );
    }
}
