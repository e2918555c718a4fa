//! The screen as a function of what is known, what is chosen, and its size.

use std::time::Duration;

use control::{PressureLevel, SliceMode, short_bytes, short_span};
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::Span;
use unicode_width::UnicodeWidthChar;

use super::columns::{self, Column, Placed};
use super::details;
use super::layout::{Content, Layout};
use super::model::{Device, Job, Model};
use super::state::{CHANGING, KEYS, Mode, State};
use crate::printable::printable;

/// What the terminal can show.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Theme {
    pub colour: bool,
    /// Characters beyond ASCII of its own: bars, dots.
    pub unicode: bool,
    /// A frame for a file: nothing is chosen, and there are no keys.
    pub plain: bool,
}

/// Columns of the bars of a device.
const BUSY_BARS: usize = 15;
/// From this width on the events of a job stand beside its settings.
const TWO_PANES_FROM: u16 = 120;
/// An answer that is older than this many intervals is called old.
const OLD_INTERVALS: u64 = 3;

const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
const BARS_ASCII: [char; 8] = ['_', '.', ':', '-', '=', '+', '*', '#'];

/// The whole screen.
pub fn draw(
    buffer: &mut Buffer,
    area: Rect,
    (model, state): (&Model, &State),
    theme: Theme,
    now_ms: u64,
) {
    let area = area.intersection(buffer.area);
    if area.is_empty() {
        return;
    }
    let jobs = state.visible(model);
    let layout = layout(area, model, state, theme, &jobs);
    let mut screen = Screen {
        buffer,
        model,
        state,
        theme,
        now_ms,
    };
    screen.title(layout.title);
    screen.devices(layout.devices);
    screen.header(layout.header, &layout.columns);
    screen.jobs(&layout, &jobs);
    if let Some(job) = state.chosen(&jobs).map(|at| jobs[at]) {
        screen.details(layout.details, job);
    }
    if !theme.plain {
        screen.footer(area, layout.footer, jobs.len());
    }
    if state.mode == Mode::Help {
        screen.help(area);
    }
}

/// What stands where on a screen of this size.
pub fn layout(area: Rect, model: &Model, state: &State, theme: Theme, jobs: &[&Job]) -> Layout {
    let content = Content {
        devices: model.devices.len(),
        jobs: jobs.len(),
        chosen: state.chosen(jobs).filter(|_| !theme.plain),
        details: state.details && !theme.plain,
        plain: theme.plain,
    };
    Layout::new(area, content)
}

struct Screen<'a> {
    buffer: &'a mut Buffer,
    model: &'a Model,
    state: &'a State,
    theme: Theme,
    now_ms: u64,
}

impl Screen<'_> {
    fn colour(&self, colour: Color) -> Style {
        if self.theme.colour {
            Style::new().fg(colour)
        } else {
            Style::new()
        }
    }

    /// Writes text from `x` on, cut off with a dot where it is wider; returns the columns it took.
    fn put(&mut self, x: u16, y: u16, width: u16, text: &str, style: Style) -> u16 {
        let area = self.buffer.area;
        if y < area.top() || y >= area.bottom() || x < area.left() || x >= area.right() {
            return 0;
        }
        let space = width.min(area.right() - x);
        if space == 0 {
            return 0;
        }
        if Span::raw(text).width() <= usize::from(space) {
            let (end, _) = self.buffer.set_stringn(x, y, text, space.into(), style);
            return end - x;
        }
        let (end, _) = self
            .buffer
            .set_stringn(x, y, text, usize::from(space - 1), style);
        let cut = if self.theme.unicode { "…" } else { "~" };
        let (end, _) = self.buffer.set_stringn(end, y, cut, 1, style);
        end - x
    }

    fn put_right(&mut self, x: u16, y: u16, width: u16, text: &str, style: Style) {
        // CAST: at most `width`.
        let free = usize::from(width).saturating_sub(Span::raw(text).width()) as u16;
        self.put(x + free, y, width - free, text, style);
    }

    /// Text on a line, with what does not fit left out in whole parts.
    fn parts(&mut self, line: Rect, parts: &[(String, Style)]) {
        let mut x = line.x;
        for (text, style) in parts {
            let gap = if x == line.x { 0 } else { 2 };
            let left = line.right().saturating_sub(x + gap);
            if usize::from(left) >= Span::raw(text.as_str()).width() || x == line.x {
                x += gap;
                x += self.put(x, line.y, left, text, *style);
            }
        }
    }

    fn bars(&self, values: &[Option<f64>], most: f64) -> String {
        let glyphs = if self.theme.unicode { BARS } else { BARS_ASCII };
        let glyph = |value: &Option<f64>| match value {
            None => ' ',
            Some(value) => {
                let part = if most > 0.0 { value / most } else { 0.0 };
                // CAST: between 0 and 7.
                let at = (part * 8.0).ceil().clamp(1.0, 8.0) as usize - 1;
                glyphs[at]
            }
        };
        values.iter().map(glyph).collect()
    }

    fn title(&mut self, line: Rect) {
        if line.is_empty() {
            return;
        }
        let model = self.model;
        let seconds = |ms: u64| short_span(Duration::from_secs(ms / 1000));
        let old_ms = self.now_ms.saturating_sub(model.looked_ms);
        let reversed = Style::new().add_modifier(Modifier::REVERSED);
        self.buffer.set_style(line, reversed);
        let name = (
            "sublet top".to_owned(),
            reversed.add_modifier(Modifier::BOLD),
        );
        let wrong = reversed.patch(self.colour(Color::Red));
        let parts = match (&model.arbiter, &model.lost) {
            (None, None) => vec![name, ("asking the arbiter".into(), reversed)],
            (arbiter, Some(why)) => {
                let why = printable(why);
                let text = match arbiter {
                    Some(_) => format!("figures of {} ago: {why}", seconds(old_ms)),
                    None => format!("waiting: {why}"),
                };
                // As much of it as there is space for.
                let used = self.put(line.x, line.y, line.width, &name.0, name.1) + 2;
                let left = line.width.saturating_sub(used);
                self.put(line.x + used, line.y, left, &text, wrong);
                return;
            }
            (Some(arbiter), None) => {
                let mut parts = vec![
                    name,
                    (jobs_of(model), reversed),
                    (format!("arbiter {}", arbiter.pid), reversed),
                    (format!("up {}", seconds(arbiter.uptime_ms)), reversed),
                ];
                let old_from = model.interval_ms.unwrap_or(1000).max(1000) * OLD_INTERVALS;
                if old_ms > old_from {
                    let text = format!("figures of {} ago", seconds(old_ms));
                    parts.insert(1, (text, wrong));
                }
                if arbiter.host_memory_used_bytes > 0 {
                    let text = format!(
                        "host memory {} of {}",
                        short_bytes(arbiter.host_memory_used_bytes),
                        short_bytes(arbiter.host_memory_limit_bytes)
                    );
                    parts.push((text, reversed));
                }
                parts.push((format!("version {}", printable(&arbiter.version)), reversed));
                parts
            }
        };
        self.parts(line, &parts);
    }

    fn devices(&mut self, part: Rect) {
        let devices = self.model.devices.iter();
        let shown = usize::from(part.height);
        for (y, device) in (part.y..part.bottom()).zip(devices) {
            let line = Rect {
                y,
                height: 1,
                ..part
            };
            self.device(line, device);
        }
        let more = self.model.devices.len().saturating_sub(shown);
        if more > 0 && shown > 0 {
            let text = format!(" +{more} more ");
            let style = Style::new().add_modifier(Modifier::REVERSED);
            self.put_right(part.x, part.bottom() - 1, part.width, &text, style);
        }
    }

    fn device(&mut self, line: Rect, device: &Device) {
        let status = &device.status;
        let plain = Style::new();
        let mut name = format!("GPU {} {}", status.index, printable(&status.name));
        if status.simulated && !status.name.contains("simulated") {
            name += " (simulated)";
        }
        let busy = status.busy_fraction + 0.0;
        let busy_bars = self.bars(&device.busy.bars(self.now_ms, BUSY_BARS), 1.0);
        let mut parts = vec![
            (name, self.colour(Color::Cyan).add_modifier(Modifier::BOLD)),
            (
                format!("busy {:3.0}% {busy_bars}", busy * 100.0),
                self.colour(Color::Green),
            ),
            (
                format!(
                    "{} of {}",
                    short_bytes(device.used_bytes),
                    short_bytes(status.total_bytes)
                ),
                plain,
            ),
            (printable(&status.policy), plain),
        ];
        if let Some(celsius) = status.temperature_celsius {
            parts.push((format!("{celsius} C"), plain));
        }
        if let Some(mw) = status.power_mw {
            // CAST: for people.
            parts.push((format!("{:.0} W", mw as f64 / 1000.0), plain));
        }
        if let Some(part) = status.sm_used_fraction {
            parts.push((format!("SM {:.0}%", part * 100.0), plain));
        }
        let unmanaged = status.unmanaged.len();
        if unmanaged > 0 {
            let text = format!("{unmanaged} not managed");
            parts.push((text, self.colour(Color::Red)));
        }
        let pressure = &status.pressure;
        if pressure.level != PressureLevel::Calm {
            let text = format!(
                "moving memory {:.0}% ({})",
                pressure.switching_fraction * 100.0,
                pressure.level.as_str()
            );
            parts.push((text, self.colour(Color::Yellow)));
        }
        let mode = match (status.mode, status.running) {
            (SliceMode::Auto, running) => format!("auto ({})", running.as_str()),
            (SliceMode::Lend, SliceMode::Exclusive) => "lend (slices)".to_owned(),
            (mode, _) => mode.as_str().to_owned(),
        };
        parts.push((mode, plain));
        if !status.holders.is_empty() {
            parts.push((
                format!("held by {}", printable(&status.holders.join(", "))),
                plain,
            ));
        }
        self.parts(line, &parts);
    }

    fn header(&mut self, line: Rect, placed: &[Placed]) {
        if line.is_empty() {
            return;
        }
        let bold = Style::new().add_modifier(Modifier::BOLD);
        let bold = bold.patch(self.colour(Color::Cyan));
        for one in placed {
            let mut title = one.column.title().to_owned();
            let mut style = bold;
            if one.column == self.state.sort && !self.theme.plain {
                style = style.add_modifier(Modifier::UNDERLINED);
                let mark = match (self.theme.unicode, self.state.reversed) {
                    (true, true) => '▼',
                    (true, false) => '▲',
                    (false, true) => 'v',
                    (false, false) => '^',
                };
                if title.len() < usize::from(one.width) {
                    title.push(mark);
                }
            }
            let x = line.x + one.x;
            if one.column.is_number() {
                self.put_right(x, line.y, one.width, &title, style);
            } else {
                self.put(x, line.y, one.width, &title, style);
            }
        }
    }

    fn jobs(&mut self, layout: &Layout, jobs: &[&Job]) {
        let part = layout.rows;
        if part.is_empty() {
            return;
        }
        if jobs.is_empty() {
            let text = match (&self.model.arbiter, self.model.jobs.len()) {
                (None, _) => String::new(),
                (Some(_), 0) => "no jobs".into(),
                (Some(_), _) => format!("no job matches `{}`", printable(&self.state.filter)),
            };
            self.put(part.x, part.y, part.width, &text, Style::new());
            return;
        }
        let chosen = self.state.chosen(jobs);
        let shown = jobs.iter().enumerate().skip(layout.first);
        for (y, (at, job)) in (part.y..part.bottom()).zip(shown) {
            let line = Rect {
                y,
                height: 1,
                ..part
            };
            self.job(line, job, &layout.columns);
            if chosen == Some(at) && !self.theme.plain {
                let reversed = Style::new().add_modifier(Modifier::REVERSED);
                self.buffer.set_style(line, reversed);
            }
        }
    }

    fn job(&mut self, line: Rect, job: &Job, placed: &[Placed]) {
        let dim = Style::new().add_modifier(Modifier::DIM);
        let is_old = self.model.lost.is_some() || job.status.state == control::JobState::Gone;
        for one in placed {
            let x = line.x + one.x;
            let mut style = self.style_of(one.column, job);
            if is_old {
                style = style.patch(dim);
            }
            let width = usize::from(one.width);
            let text = match one.column {
                Column::GotBars => self.bars(&job.got.bars(self.now_ms, width), 1.0),
                Column::MemoryBars => {
                    let bars = job.memory.bars(self.now_ms, width);
                    self.bars(&bars, self.memory_most(job, &bars))
                }
                column => column.text(job),
            };
            if one.column.is_number() {
                self.put_right(x, line.y, one.width, &text, style);
            } else {
                self.put(x, line.y, one.width, &text, style);
            }
        }
    }

    /// What a full bar of memory means: the limit, or the devices' memory.
    fn memory_most(&self, job: &Job, bars: &[Option<f64>]) -> f64 {
        let devices = job.status.devices.iter().filter_map(|own| {
            let mut all = self.model.devices.iter();
            all.find(|device| device.status.uuid == own.uuid)
        });
        let total: u64 = devices.fold(0, |sum, device| {
            sum.saturating_add(device.status.total_bytes)
        });
        match job.status.mem_limit_bytes {
            // CAST: for people.
            Some(limit) => limit as f64,
            None if total > 0 => total as f64,
            None => bars.iter().flatten().fold(0.0, |most, one| one.max(most)),
        }
    }

    fn style_of(&self, column: Column, job: &Job) -> Style {
        use control::JobState as S;
        let status = &job.status;
        match column {
            Column::Name if status.demoted.is_some() => self.colour(Color::Red),
            Column::State if status.evicted => self.colour(Color::Magenta),
            Column::State => match status.state {
                S::Running => self.colour(Color::Green),
                S::Waiting | S::Starting => self.colour(Color::Yellow),
                S::Paused => self.colour(Color::Magenta),
                S::Idle | S::Dormant | S::Gone | S::Unknown => Style::new(),
            },
            Column::GotBars => self.colour(Color::Green),
            Column::MemoryBars => self.colour(Color::Blue),
            Column::Oom if status.oom_count > 0 => self.colour(Color::Red),
            Column::Slowdown if job.slowdown().is_some_and(|slowdown| slowdown >= 2.0) => {
                self.colour(Color::Red)
            }
            _ => Style::new(),
        }
    }

    fn details(&mut self, part: Rect, job: &Job) {
        if part.is_empty() {
            return;
        }
        let rule = if self.theme.unicode { "─" } else { "-" };
        let line = rule.repeat(part.width.into());
        let dim = Style::new().add_modifier(Modifier::DIM);
        self.put(part.x, part.y, part.width, &line, dim);
        let title = format!(" {} (job {}) ", printable(&job.status.name), job.status.id);
        let bold = Style::new().add_modifier(Modifier::BOLD);
        let left = part.width.saturating_sub(2);
        self.put(part.x + 2.min(part.width), part.y, left, &title, bold);
        let below = Rect {
            y: part.y + 1,
            height: part.height - 1,
            ..part
        };
        let rows = usize::from(below.height);
        let (about, processes) = (details::settings(job), details::processes(job));
        if part.width >= TWO_PANES_FROM {
            let half = part.width / 2;
            let left = Rect {
                width: half,
                ..below
            };
            let right = Rect {
                x: below.x + half + 1,
                width: part.width - half - 1,
                ..below
            };
            let lines = details::within(rows, &[about, processes]);
            self.lines(left, &lines);
            let events = details::events(&self.model.events, job, rows.saturating_sub(1));
            self.lines(right, &events);
            return;
        }
        let events = details::events(&self.model.events, job, 3);
        self.lines(below, &details::within(rows, &[about, processes, events]));
    }

    fn lines(&mut self, part: Rect, lines: &[details::Line]) {
        for (y, line) in (part.y..part.bottom()).zip(lines) {
            let label = self.colour(Color::Cyan);
            let used = self.put(part.x, y, part.width, &line.label, label);
            let gap = details::LABEL.max(used + u16::from(used > 0));
            let x = part.x + gap;
            let left = part.width.saturating_sub(gap);
            self.put(x, y, left, &line.text, Style::new());
        }
    }

    fn footer(&mut self, area: Rect, line: Rect, shown: usize) {
        if line.is_empty() {
            return;
        }
        let state = self.state;
        let ask = Style::new().add_modifier(Modifier::BOLD | Modifier::REVERSED);
        let ask = ask.patch(self.colour(Color::Yellow));
        let cursor = if self.theme.unicode { '▏' } else { '_' };
        let (text, style) = match &state.mode {
            Mode::Filter => (format!("filter: {}{cursor}", printable(&state.filter)), ask),
            Mode::Value {
                job,
                id,
                setting,
                text,
                error,
            } => {
                let hint = match error {
                    Some(why) => printable(why),
                    None => format!("such as {}; Esc for none", setting.example()),
                };
                let name = setting.name();
                let job = printable(job);
                let text = printable(text);
                (
                    format!("{name} of {job} (job {id}) ({hint}): {text}{cursor}"),
                    ask,
                )
            }
            Mode::Confirm(order) => {
                let now = self.model.jobs.iter().find(|job| job.status.id == order.id);
                let question = match now {
                    Some(job) => order.question(&job.status),
                    None => format!("{} (job {}) has ended; go on?", order.job, order.id),
                };
                (format!("{} y/n", printable(&question)), ask)
            }
            Mode::Browse | Mode::Help => match &state.notice {
                Some(notice) if notice.is_error => {
                    let red = self.colour(Color::Red).add_modifier(Modifier::BOLD);
                    (printable(&notice.text), red)
                }
                Some(notice) => (printable(&notice.text), self.colour(Color::Green)),
                None => {
                    self.keys(line, shown);
                    return;
                }
            },
        };
        // All of it has to be read before a key is pressed, however small the screen.
        let lines = wrap(&text, area.width);
        let height = u16::try_from(lines.len())
            .unwrap_or(u16::MAX)
            .min(area.height);
        let part = Rect {
            y: area.bottom() - height,
            height,
            ..area
        };
        for (y, text) in (part.y..part.bottom()).zip(&lines) {
            self.put(part.x, y, part.width, &" ".repeat(part.width.into()), style);
            self.put(part.x, y, part.width, text, style);
        }
    }

    fn keys(&mut self, line: Rect, shown: usize) {
        let plain = Style::new();
        let mut parts = Vec::new();
        if !self.state.filter.is_empty() {
            let filter = printable(&self.state.filter);
            let text = format!("filter {filter}: {shown} of {}", self.model.jobs.len());
            parts.push((text, self.colour(Color::Yellow)));
        }
        let keys = ["q end", "? help", "/ filter"];
        parts.extend(keys.map(|key| (key.to_owned(), plain)));
        if self.state.readonly {
            parts.push(("nothing is changed (--readonly)".into(), plain));
        } else {
            let keys = [
                "p pause", "r resume", "s share", "m memory", "e evict", "b back",
            ];
            parts.extend(keys.map(|key| (key.to_owned(), plain)));
        }
        parts.push(("Enter details".into(), plain));
        self.parts(line, &parts);
    }

    fn help(&mut self, area: Rect) {
        let keys = match self.state.readonly {
            true => &KEYS[..KEYS.len() - CHANGING],
            false => &KEYS[..],
        };
        let mut lines: Vec<String> = keys
            .iter()
            .map(|(key, does)| format!(" {key:16}{does} "))
            .collect();
        lines.push(" A click chooses a job or sorts by a column; the wheel moves. ".into());
        let widest = lines.iter().map(|line| line.len() + 1).max().unwrap_or(0);
        // CAST: the texts are short.
        let width = area.width.min(widest as u16);
        let height = area.height.min(lines.len() as u16);
        let part = Rect {
            x: area.x + (area.width - width) / 2,
            y: area.y + (area.height - height) / 2,
            width,
            height,
        };
        let style = Style::new().add_modifier(Modifier::REVERSED);
        for (y, line) in (part.y..part.bottom()).zip(&lines) {
            let width = usize::from(width);
            self.put(part.x, y, part.width, &format!("{line:width$}"), style);
        }
    }
}

fn jobs_of(model: &Model) -> String {
    match model.jobs.len() {
        1 => "1 job".into(),
        jobs => format!("{jobs} jobs"),
    }
}

/// Lines no wider than `width`, broken at spaces where there are some.
pub fn wrap(text: &str, width: u16) -> Vec<String> {
    let width = usize::from(width.max(1));
    let width_of = |text: &str| Span::raw(text).width();
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let line = lines.last_mut().map_or(0, |line| width_of(line));
        if line > 0 && line + 1 + width_of(word) > width {
            lines.push(String::new());
        } else if line > 0 {
            lines.last_mut().into_iter().for_each(|line| line.push(' '));
        }
        for char in word.chars() {
            let line = lines.last().map_or(0, |line| width_of(line));
            if line > 0 && line + char.width().unwrap_or(0) > width {
                lines.push(String::new());
            }
            lines
                .last_mut()
                .into_iter()
                .for_each(|line| line.push(char));
        }
    }
    lines
}

/// Whether a click or a key meets a job: the columns on the screen, for sorting by keys.
pub fn columns_of(width: u16) -> Vec<Column> {
    columns::place(width).iter().map(|one| one.column).collect()
}
