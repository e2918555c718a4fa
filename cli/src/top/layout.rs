//! What stands where on a screen of any size, and what lies under a click.

use ratatui::layout::Rect;

use super::columns::{self, Column, Placed};

/// Rows below which there is no pane of details.
const DETAILS_FROM: u16 = 20;

/// The parts of the screen, from the top down. Those without space have no height.
#[derive(Debug, Clone, PartialEq)]
pub struct Layout {
    pub title: Rect,
    pub devices: Rect,
    pub header: Rect,
    pub rows: Rect,
    pub details: Rect,
    pub footer: Rect,
    pub columns: Vec<Placed>,
    /// The first job that is shown.
    pub first: usize,
}

/// What is to be laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Content {
    pub devices: usize,
    pub jobs: usize,
    pub chosen: Option<usize>,
    pub details: bool,
    /// Neither keys nor questions at the bottom.
    pub plain: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hit {
    /// The job at this place of all that are shown.
    Job(usize),
    Header(Column),
    Nothing,
}

impl Layout {
    pub fn new(area: Rect, content: Content) -> Self {
        let height = area.height;
        let footer = u16::from(height >= 2 && !content.plain);
        let title = u16::from(height >= 3);
        let mut left = height - footer - title;
        // Jobs are what is looked at: devices get a third at most, the table two rows at least.
        let devices = clamp(content.devices).min(match left {
            rows if content.plain => rows,
            0..4 => 0,
            rows => (rows / 3).max(1),
        });
        left -= devices;
        let details = if content.details && content.jobs > 0 && height >= DETAILS_FROM {
            // What the table does not need, and two fifths in any case.
            let unused = left.saturating_sub(clamp(content.jobs).saturating_add(1));
            unused.max(left * 2 / 5).clamp(6, 18).min(left)
        } else {
            0
        };
        left -= details;
        let header = u16::from(left >= 2);
        let rows = left - header;

        let mut y = area.y;
        let mut take = |height: u16| {
            let part = Rect { y, height, ..area };
            y += height;
            part
        };
        Self {
            title: take(title),
            devices: take(devices),
            header: take(header),
            rows: take(rows),
            details: take(details),
            footer: take(footer),
            columns: columns::place(area.width),
            first: first(content, usize::from(rows)),
        }
    }

    pub fn hit(&self, x: u16, y: u16, jobs: usize) -> Hit {
        let lies_in = |part: Rect| y >= part.y && y - part.y < part.height;
        if lies_in(self.header) {
            // The space after a column belongs to it.
            let under = self.columns.iter().rfind(|placed| placed.x <= x);
            return under.map_or(Hit::Nothing, |placed| Hit::Header(placed.column));
        }
        if lies_in(self.rows) {
            let at = self.first + usize::from(y - self.rows.y);
            if at < jobs {
                return Hit::Job(at);
            }
        }
        Hit::Nothing
    }
}

fn clamp(count: usize) -> u16 {
    u16::try_from(count).unwrap_or(u16::MAX)
}

/// So that the chosen one is on the screen, in the middle where there are others on both sides.
fn first(content: Content, rows: usize) -> usize {
    let most = content.jobs.saturating_sub(rows);
    let chosen = content.chosen.unwrap_or(0);
    chosen.saturating_sub(rows / 2).min(most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_fill_the_screen_whatever_its_size() {
        for width in [0, 1, 20, 80, 200] {
            for height in 0..70 {
                for (devices, jobs) in [(0, 0), (1, 3), (16, 500), (100_000, 100_000)] {
                    for plain in [false, true] {
                        let content = Content {
                            devices,
                            jobs,
                            chosen: jobs.checked_sub(1),
                            details: true,
                            plain,
                        };
                        let layout = Layout::new(Rect::new(0, 0, width, height), content);
                        let parts = [
                            layout.title,
                            layout.devices,
                            layout.header,
                            layout.rows,
                            layout.details,
                            layout.footer,
                        ];
                        let mut y = 0;
                        for part in parts {
                            assert_eq!(part.y, y, "{layout:?}");
                            y += part.height;
                        }
                        assert_eq!(y, height, "{layout:?}");
                        let last = jobs.saturating_sub(1);
                        let shown = usize::from(layout.rows.height);
                        assert!(last < layout.first + shown.max(1) || shown == 0);
                    }
                }
            }
        }
    }

    #[test]
    fn a_small_screen_shows_jobs_first() {
        let content = Content {
            devices: 1,
            jobs: 9,
            details: true,
            ..Content::default()
        };
        let at = |height| Layout::new(Rect::new(0, 0, 20, height), content);
        assert_eq!((at(5).header.height, at(5).rows.height), (1, 2));
        assert_eq!((at(1).rows.height, at(2).footer.height), (1, 1));
        let normal = at(24);
        assert_eq!((normal.devices.height, normal.details.height), (1, 11));
        assert_eq!(normal.rows.height, 9);
        let many = Content {
            jobs: 100,
            ..content
        };
        let full = Layout::new(Rect::new(0, 0, 80, 24), many);
        assert_eq!((full.rows.height, full.details.height), (12, 8));
    }

    #[test]
    fn a_click_finds_what_is_there() {
        let content = Content {
            devices: 2,
            jobs: 3,
            ..Content::default()
        };
        let layout = Layout::new(Rect::new(0, 0, 80, 24), content);
        let header = layout.header.y;
        assert_eq!(header, 3);
        assert_eq!(layout.hit(0, header, 3), Hit::Header(Column::Name));
        let state = layout.columns[1];
        assert_eq!(state.column, Column::State);
        assert_eq!(layout.hit(state.x, header, 3), Hit::Header(Column::State));
        assert_eq!(
            layout.hit(state.x - 1, header, 3),
            Hit::Header(Column::Name)
        );
        assert_eq!(layout.hit(500, header + 1, 3), Hit::Job(0));
        assert_eq!(layout.hit(0, header + 3, 3), Hit::Job(2));
        assert_eq!(layout.hit(0, header + 4, 3), Hit::Nothing);
        assert_eq!(layout.hit(0, 0, 3), Hit::Nothing);
        assert_eq!(layout.hit(0, 60_000, 3), Hit::Nothing);
    }
}
