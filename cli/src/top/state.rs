//! What somebody at the keys has chosen: sorting, filter, the job, and what is being asked. Keys
//! change it; nothing here reaches the arbiter or the terminal.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use super::columns::{self, Column};
use super::model::{Job, Model};
use super::order::{Order, Setting, What};

/// Longest text that is taken.
const TEXT_CHARS: usize = 64;

/// Every key, and what it does; those that change something last.
pub const KEYS: [(&str, &str); 11] = [
    ("Up, Down, k, j", "choose a job; PgUp, PgDn, Home, End"),
    ("Left, Right", "sort by the column before, or after"),
    ("i", "sort the other way round"),
    (
        "/",
        "show only jobs with this in name, user, state or command",
    ),
    ("Enter", "details of the chosen job, or none"),
    ("?", "this help"),
    ("q, Ctrl-C", "end; Ctrl-Z stops, Ctrl-L draws anew"),
    ("p, r", "pause the job, resume it"),
    ("s", "set its share"),
    ("m", "set its memory limit"),
    ("e, b", "evict it, bring it back"),
];
/// How many of them change something.
pub const CHANGING: usize = 4;

#[derive(Debug, Clone, PartialEq)]
pub enum Mode {
    Browse,
    /// The filter is being written.
    Filter,
    Help,
    /// A value is being written for a job.
    Value {
        job: String,
        id: u64,
        setting: Setting,
        text: String,
        /// Why the last one was not taken.
        error: Option<String>,
    },
    /// Yes or no.
    Confirm(Order),
}

/// What is to be done by those who can.
#[derive(Debug, Clone, PartialEq)]
pub enum Effect {
    None,
    Quit,
    Stop,
    Redraw,
    CarryOut(Order),
}

/// A line for somebody to read, until the next key.
#[derive(Debug, Clone, PartialEq)]
pub struct Notice {
    pub text: String,
    pub is_error: bool,
}

#[derive(Debug)]
pub struct State {
    pub sort: Column,
    pub reversed: bool,
    pub filter: String,
    pub details: bool,
    pub readonly: bool,
    pub mode: Mode,
    pub notice: Option<Notice>,
    /// The number of the chosen job, and where it stood: another takes its place when it is gone.
    chosen: Option<u64>,
    at: usize,
}

impl State {
    pub fn new(readonly: bool) -> Self {
        Self {
            sort: Column::Name,
            reversed: false,
            filter: String::new(),
            details: true,
            readonly,
            mode: Mode::Browse,
            notice: None,
            chosen: None,
            at: 0,
        }
    }

    /// The jobs to show, in order.
    pub fn visible<'a>(&self, model: &'a Model) -> Vec<&'a Job> {
        let wanted = self.filter.to_lowercase();
        let mut jobs: Vec<&Job> = model
            .jobs
            .iter()
            .filter(|job| is_wanted(job, &wanted))
            .collect();
        jobs.sort_by(|a, b| {
            let order = self.sort.compare(a, b);
            let order = if self.reversed {
                order.reverse()
            } else {
                order
            };
            order.then(a.status.id.cmp(&b.status.id))
        });
        jobs
    }

    /// Which of these is chosen; `None`: there are none.
    pub fn chosen(&self, jobs: &[&Job]) -> Option<usize> {
        let last = jobs.len().checked_sub(1)?;
        let found = jobs
            .iter()
            .position(|job| Some(job.status.id) == self.chosen);
        Some(found.unwrap_or(self.at.min(last)))
    }

    pub fn choose(&mut self, at: usize, model: &Model) {
        let jobs = self.visible(model);
        let Some(last) = jobs.len().checked_sub(1) else {
            return;
        };
        self.at = at.min(last);
        self.chosen = Some(jobs[self.at].status.id);
    }

    /// By so many rows, down where positive.
    pub fn move_by(&mut self, rows: isize, model: &Model) {
        let jobs = self.visible(model);
        let Some(now) = self.chosen(&jobs) else {
            return;
        };
        self.choose(now.saturating_add_signed(rows), model);
    }

    /// By this column, or where it was that one, the other way round.
    pub fn sort_by(&mut self, column: Column) {
        if self.sort == column {
            self.reversed = !self.reversed;
        } else {
            self.sort = column;
            // Of figures the largest are what is looked for.
            self.reversed = column.is_number() || column.is_bars();
        }
    }

    pub fn say(&mut self, text: String, is_error: bool) {
        self.notice = Some(Notice { text, is_error });
    }

    /// `page`: rows on the screen; `columns`: those on the screen.
    pub fn on_key(
        &mut self,
        key: KeyEvent,
        model: &Model,
        page: usize,
        columns: &[Column],
    ) -> Effect {
        if key.kind == KeyEventKind::Release {
            return Effect::None;
        }
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            return match key.code {
                KeyCode::Char('c') => Effect::Quit,
                KeyCode::Char('z') => Effect::Stop,
                KeyCode::Char('l') => Effect::Redraw,
                KeyCode::Char('u') => {
                    if let Some(text) = self.text() {
                        text.clear();
                    }
                    Effect::None
                }
                _ => Effect::None,
            };
        }
        self.notice = None;
        match &mut self.mode {
            Mode::Browse => self.on_browse(key.code, model, page, columns),
            Mode::Help => {
                self.mode = Mode::Browse;
                Effect::None
            }
            Mode::Filter => {
                match key.code {
                    KeyCode::Enter => self.mode = Mode::Browse,
                    KeyCode::Esc => {
                        self.filter.clear();
                        self.mode = Mode::Browse;
                    }
                    code => edit(&mut self.filter, code),
                }
                Effect::None
            }
            Mode::Value { .. } => {
                self.on_value(key.code);
                Effect::None
            }
            Mode::Confirm(_) => self.on_answer(key.code, model),
        }
    }

    /// The text that is being written.
    fn text(&mut self) -> Option<&mut String> {
        match &mut self.mode {
            Mode::Filter => Some(&mut self.filter),
            Mode::Value { text, .. } => Some(text),
            _ => None,
        }
    }

    fn on_browse(
        &mut self,
        code: KeyCode,
        model: &Model,
        page: usize,
        columns: &[Column],
    ) -> Effect {
        // CAST: rows of a terminal.
        let page = page.max(1) as isize;
        match code {
            KeyCode::Char('q') => return Effect::Quit,
            KeyCode::Up | KeyCode::Char('k') => self.move_by(-1, model),
            KeyCode::Down | KeyCode::Char('j') => self.move_by(1, model),
            KeyCode::PageUp => self.move_by(-page, model),
            KeyCode::PageDown => self.move_by(page, model),
            KeyCode::Home => self.choose(0, model),
            KeyCode::End => self.choose(usize::MAX, model),
            KeyCode::Left => self.sort_beside(columns, false),
            KeyCode::Right => self.sort_beside(columns, true),
            KeyCode::Char('i') => self.reversed = !self.reversed,
            KeyCode::Char('/') => self.mode = Mode::Filter,
            KeyCode::Esc => self.filter.clear(),
            KeyCode::Enter => self.details = !self.details,
            KeyCode::Char('?' | 'h') => self.mode = Mode::Help,
            KeyCode::Char(key) => self.on_change(key, model),
            _ => {}
        }
        Effect::None
    }

    fn sort_beside(&mut self, columns: &[Column], after: bool) {
        let Some(last) = columns.len().checked_sub(1) else {
            return;
        };
        let now = columns.iter().position(|column| *column == self.sort);
        let next = match (now, after) {
            (None, _) => 0,
            (Some(at), true) => (at + 1).min(last),
            (Some(at), false) => at.saturating_sub(1),
        };
        if columns[next] != self.sort {
            self.sort_by(columns[next]);
        }
    }

    /// The keys that change something.
    fn on_change(&mut self, key: char, model: &Model) {
        if !"prsmeb".contains(key) {
            return;
        }
        if self.readonly {
            self.say("nothing is changed with --readonly".into(), true);
            return;
        }
        let jobs = self.visible(model);
        let Some(at) = self.chosen(&jobs) else {
            self.say("there is no job to change".into(), true);
            return;
        };
        // What is asked for is asked of this one, whatever the order becomes meanwhile.
        let status = &jobs[at].status;
        let (job, id) = (status.name.clone(), status.id);
        (self.at, self.chosen) = (at, Some(id));
        let what = match key {
            'p' => What::Pause,
            'r' => What::Resume,
            'e' => What::Evict,
            'b' => What::Restore,
            key => {
                let setting = if key == 's' {
                    Setting::Share
                } else {
                    Setting::Memory
                };
                self.mode = Mode::Value {
                    job,
                    id,
                    setting,
                    text: String::new(),
                    error: None,
                };
                return;
            }
        };
        self.mode = Mode::Confirm(Order { job, id, what });
    }

    fn on_value(&mut self, code: KeyCode) {
        let Mode::Value {
            job,
            id,
            setting,
            text,
            error,
        } = &mut self.mode
        else {
            return;
        };
        match code {
            KeyCode::Esc => self.mode = Mode::Browse,
            KeyCode::Enter => match setting.parse(text) {
                Ok(what) => {
                    let (job, id) = (job.clone(), *id);
                    self.mode = Mode::Confirm(Order { job, id, what });
                }
                Err(why) => *error = Some(why),
            },
            code => {
                *error = None;
                edit(text, code);
            }
        }
    }

    fn on_answer(&mut self, code: KeyCode, model: &Model) -> Effect {
        let is_yes = match code {
            KeyCode::Char('y' | 'Y') => true,
            KeyCode::Char('n' | 'N' | 'q') | KeyCode::Esc => false,
            // Neither by accident.
            _ => return Effect::None,
        };
        let Mode::Confirm(order) = std::mem::replace(&mut self.mode, Mode::Browse) else {
            return Effect::None;
        };
        if !is_yes {
            self.say(format!("{} stays as it is", order.job), false);
            return Effect::None;
        }
        let is_there = model.jobs.iter().any(|job| {
            job.status.id == order.id
                && job.status.name == order.job
                && job.status.state != control::JobState::Gone
        });
        if !is_there {
            // Another job may have its name by now.
            let gone = format!(
                "{} (job {}) has ended: nothing is changed",
                order.job, order.id
            );
            self.say(gone, true);
            return Effect::None;
        }
        self.say(order.progress(), false);
        Effect::CarryOut(order)
    }
}

fn edit(text: &mut String, code: KeyCode) {
    match code {
        KeyCode::Backspace => {
            text.pop();
        }
        KeyCode::Char(char) if !char.is_control() && text.chars().count() < TEXT_CHARS => {
            text.push(char);
        }
        _ => {}
    }
}

fn is_wanted(job: &Job, wanted: &str) -> bool {
    let has = |text: &str| text.to_lowercase().contains(wanted);
    wanted.is_empty()
        || has(&job.status.name)
        || has(&columns::user_of(job))
        || has(columns::state_of(job))
        || has(&job.status.command.join(" "))
}

#[cfg(test)]
mod tests {
    use control::{ArbiterStatus, JobState, JobStatus};

    use super::*;

    fn model(names: &[&str]) -> Model {
        let mut model = Model::default();
        let jobs = (1..).zip(names).map(|(id, name)| JobStatus {
            id,
            name: (*name).into(),
            mem_used_bytes: 100 - id,
            user: if *name == "a" { "alice" } else { "bob" }.into(),
            command: vec!["python".into(), format!("{name}.py")],
            ..JobStatus::default()
        });
        model.learn(
            0,
            ArbiterStatus {
                jobs: jobs.collect(),
                ..ArbiterStatus::default()
            },
        );
        model
    }

    struct Keys {
        state: State,
        model: Model,
    }

    impl Keys {
        fn new(names: &[&str]) -> Self {
            Self {
                state: State::new(false),
                model: model(names),
            }
        }

        fn code(&mut self, code: KeyCode) -> Effect {
            let columns = [Column::Name, Column::Memory, Column::GotBars];
            let key = KeyEvent::new(code, KeyModifiers::NONE);
            self.state.on_key(key, &self.model, 2, &columns)
        }

        /// Each character is a key; `\n` is Enter.
        fn press(&mut self, keys: &str) -> Effect {
            let mut effect = Effect::None;
            for key in keys.chars() {
                effect = self.code(match key {
                    '\n' => KeyCode::Enter,
                    key => KeyCode::Char(key),
                });
            }
            effect
        }

        fn shown(&self) -> Vec<&str> {
            let jobs = self.state.visible(&self.model);
            jobs.iter().map(|job| job.status.name.as_str()).collect()
        }

        fn chosen(&self) -> Option<&str> {
            let jobs = self.state.visible(&self.model);
            Some(&jobs[self.state.chosen(&jobs)?].status.name)
        }

        fn notice(&self) -> &str {
            self.state.notice.as_ref().map_or("", |notice| &notice.text)
        }
    }

    #[test]
    fn a_job_is_chosen_by_keys_and_stays_chosen() {
        let mut keys = Keys::new(&["b", "a", "c", "d"]);
        assert_eq!(keys.shown(), ["a", "b", "c", "d"]);
        assert_eq!(keys.chosen(), Some("a"));
        keys.press("j");
        assert_eq!(keys.chosen(), Some("b"));
        keys.code(KeyCode::End);
        assert_eq!(keys.chosen(), Some("d"));
        keys.press("j");
        keys.code(KeyCode::PageUp);
        assert_eq!(keys.chosen(), Some("b"));
        keys.press("i");
        assert_eq!(keys.shown(), ["d", "c", "b", "a"]);
        assert_eq!(keys.chosen(), Some("b"), "wherever it stands");
        keys.code(KeyCode::Home);
        keys.press("k");
        assert_eq!(keys.chosen(), Some("d"));
        // It ends: another takes its place.
        keys.model = model(&["b", "a", "c"]);
        assert_eq!(keys.chosen(), Some("c"));
        keys.model = model(&[]);
        assert_eq!(keys.chosen(), None);
        for key in "jkpsmerb\n".chars() {
            assert_eq!(keys.press(&key.to_string()), Effect::None);
        }
        assert_eq!(keys.state.mode, Mode::Browse);
    }

    #[test]
    fn columns_sort_by_keys_and_by_clicks() {
        let mut keys = Keys::new(&["b", "a"]);
        keys.code(KeyCode::Left);
        assert_eq!(keys.state.sort, Column::Name, "there is none before it");
        keys.code(KeyCode::Right);
        assert_eq!(
            (keys.state.sort, keys.state.reversed),
            (Column::Memory, true)
        );
        assert_eq!(keys.shown(), ["b", "a"], "the largest first");
        keys.state.sort_by(Column::Memory);
        assert_eq!(keys.shown(), ["a", "b"], "once more: the other way round");
        keys.code(KeyCode::Left);
        assert_eq!(
            (keys.state.sort, keys.state.reversed),
            (Column::Name, false)
        );
        // One that is not on the screen any more.
        keys.state.sort = Column::Oom;
        keys.code(KeyCode::Right);
        assert_eq!(keys.state.sort, Column::Name);
    }

    #[test]
    fn a_filter_is_written_kept_and_cleared() {
        let mut keys = Keys::new(&["train", "a", "serve"]);
        keys.press("/tr");
        assert_eq!(keys.shown(), ["train"], "while it is written");
        assert_eq!(keys.press("q\n"), Effect::None, "a letter like others");
        assert_eq!((keys.shown().len(), keys.state.filter.as_str()), (0, "trq"));
        keys.press("/");
        keys.code(KeyCode::Backspace);
        assert_eq!(keys.shown(), ["train"]);
        keys.code(KeyCode::Esc);
        assert_eq!(keys.shown().len(), 3);
        for (filter, shown) in [("ALICE", "a"), ("serve.py", "serve"), ("rain", "train")] {
            keys.press(&format!("/{filter}\n"));
            assert_eq!(keys.shown(), [shown]);
            keys.code(KeyCode::Esc);
        }
        keys.press(&format!("/{}", "x".repeat(500)));
        assert_eq!(keys.state.filter.len(), TEXT_CHARS);
        let clear = KeyEvent::new(KeyCode::Char('u'), KeyModifiers::CONTROL);
        keys.state.on_key(clear, &keys.model, 1, &[]);
        assert_eq!(keys.state.filter, "");
    }

    #[test]
    fn every_change_is_confirmed_by_yes_and_by_nothing_else() {
        for (key, what) in [
            ("p", What::Pause),
            ("r", What::Resume),
            ("e", What::Evict),
            ("b", What::Restore),
        ] {
            let mut keys = Keys::new(&["a", "b"]);
            keys.press("j");
            assert_eq!(keys.press(key), Effect::None);
            let order = Order {
                job: "b".into(),
                id: 2,
                what,
            };
            assert_eq!(keys.state.mode, Mode::Confirm(order.clone()));
            assert_eq!(keys.press("\nxpj"), Effect::None);
            assert_eq!(keys.state.mode, Mode::Confirm(order.clone()));
            assert_eq!(keys.press("n"), Effect::None);
            assert_eq!(keys.notice(), "b stays as it is");
            keys.press(key);
            assert_eq!(keys.press("y"), Effect::CarryOut(order));
            assert_eq!(keys.state.mode, Mode::Browse);
        }
    }

    #[test]
    fn a_value_is_checked_before_it_is_confirmed() {
        let mut keys = Keys::new(&["a"]);
        keys.press("s2\n");
        let Mode::Value { error, text, .. } = &keys.state.mode else {
            panic!("{:?}", keys.state.mode);
        };
        assert!(error.as_ref().unwrap().contains("at most 1"), "{error:?}");
        assert_eq!(text, "2");
        keys.code(KeyCode::Backspace);
        keys.press("0.25\n");
        let Effect::CarryOut(order) = keys.press("y") else {
            panic!("{:?}", keys.state.mode);
        };
        let What::Set(Setting::Share, _, settings) = order.what else {
            panic!("{order:?}");
        };
        assert_eq!(settings.share, Some(0.25));
        keys.press("m8GiB\n");
        assert!(matches!(&keys.state.mode, Mode::Confirm(_)));
        keys.code(KeyCode::Esc);
        keys.press("m8");
        keys.code(KeyCode::Esc);
        assert_eq!(keys.state.mode, Mode::Browse);
    }

    #[test]
    fn a_job_that_has_ended_is_not_mistaken_for_the_next_of_its_name() {
        let mut keys = Keys::new(&["a"]);
        keys.press("p");
        keys.model.jobs[0].status.id = 9;
        assert_eq!(keys.press("y"), Effect::None);
        assert!(keys.notice().contains("has ended"), "{}", keys.notice());
        keys.press("p");
        keys.model.jobs[0].status.state = JobState::Gone;
        assert_eq!(keys.press("y"), Effect::None);
    }

    #[test]
    fn readonly_has_no_key_that_changes_something() {
        let mut keys = Keys::new(&["a"]);
        keys.state.readonly = true;
        for key in "prsmeb".chars() {
            assert_eq!(keys.press(&key.to_string()), Effect::None);
            assert_eq!(keys.state.mode, Mode::Browse);
            assert!(keys.notice().contains("--readonly"));
        }
        assert_eq!(keys.press("q"), Effect::Quit);
    }

    #[test]
    fn control_keys_work_everywhere() {
        for before in ["", "/", "s", "p", "?"] {
            for (key, effect) in [
                ('c', Effect::Quit),
                ('z', Effect::Stop),
                ('l', Effect::Redraw),
                ('x', Effect::None),
            ] {
                let mut keys = Keys::new(&["a"]);
                keys.press(before);
                let key = KeyEvent::new(KeyCode::Char(key), KeyModifiers::CONTROL);
                assert_eq!(keys.state.on_key(key, &keys.model, 1, &[]), effect);
            }
        }
    }

    #[test]
    fn any_key_ends_the_help() {
        let mut keys = Keys::new(&["a"]);
        keys.press("?");
        assert_eq!(keys.state.mode, Mode::Help);
        assert_eq!(keys.press("q"), Effect::None);
        assert_eq!(keys.state.mode, Mode::Browse);
        let mut release = KeyEvent::new(KeyCode::Char('q'), KeyModifiers::NONE);
        release.kind = KeyEventKind::Release;
        assert_eq!(
            keys.state.on_key(release, &keys.model, 1, &[]),
            Effect::None
        );
    }
}
