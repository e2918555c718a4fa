//! A screen as text.

use ratatui::buffer::Buffer;
use ratatui::text::Span;

/// The characters of each row, in their cells: a wide one takes those after it as well.
fn cells(buffer: &Buffer, y: u16) -> impl Iterator<Item = &ratatui::buffer::Cell> {
    let area = buffer.area;
    let mut covered = 0;
    (area.left()..area.right()).filter_map(move |x| {
        if covered > 0 {
            covered -= 1;
            return None;
        }
        let cell = buffer.cell((x, y))?;
        covered = Span::raw(cell.symbol()).width().saturating_sub(1);
        Some(cell)
    })
}

/// Without colours, and without spaces at the ends of lines.
pub fn text(buffer: &Buffer) -> String {
    let mut text = String::new();
    for y in buffer.area.top()..buffer.area.bottom() {
        let line: String = cells(buffer, y).map(|cell| cell.symbol()).collect();
        text += line.trim_end();
        text.push('\n');
    }
    text
}

/// With colours, as a terminal is given them: for pictures.
#[cfg(test)]
pub fn coloured(buffer: &Buffer) -> String {
    use ratatui::style::{Color, Modifier, Style};
    let code = |colour: Color| match colour {
        Color::Red => 31,
        Color::Green => 32,
        Color::Yellow => 33,
        Color::Blue => 34,
        Color::Magenta => 35,
        Color::Cyan => 36,
        _ => 39,
    };
    let mut text = String::new();
    for y in buffer.area.top()..buffer.area.bottom() {
        let mut last = Style::reset();
        for cell in cells(buffer, y) {
            let style = cell.style();
            if style != last {
                let mut codes = vec![0];
                for (modifier, code) in [
                    (Modifier::BOLD, 1),
                    (Modifier::DIM, 2),
                    (Modifier::UNDERLINED, 4),
                    (Modifier::REVERSED, 7),
                ] {
                    if cell.modifier.contains(modifier) {
                        codes.push(code);
                    }
                }
                if code(cell.fg) != 39 {
                    codes.push(code(cell.fg));
                }
                let codes: Vec<String> = codes.iter().map(ToString::to_string).collect();
                text += &format!("\x1b[{}m", codes.join(";"));
                last = style;
            }
            text += cell.symbol();
        }
        text += "\x1b[0m\n";
    }
    text
}

#[cfg(test)]
mod tests {
    use ratatui::layout::Rect;
    use ratatui::style::{Color, Style};

    use super::*;

    #[test]
    fn a_wide_character_takes_two_cells_and_stands_once() {
        let mut buffer = Buffer::empty(Rect::new(0, 0, 6, 2));
        buffer.set_string(0, 0, "漢a", Style::new().fg(Color::Red));
        assert_eq!(text(&buffer), "漢a\n\n");
        let coloured = coloured(&buffer);
        assert!(
            coloured.starts_with("\x1b[0;31m漢a\x1b[0m   "),
            "{coloured:?}"
        );
    }
}
