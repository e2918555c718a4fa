//! Columns of text: as wide as what is in them, and no wider together than the terminal.

use std::io::{self, IsTerminal as _};

use comfy_table::{CellAlignment, ContentArrangement, presets};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Align {
    Left,
    Right,
}

#[derive(Debug)]
pub struct Table(comfy_table::Table);

impl Table {
    pub fn new(columns: &[(&str, Align)]) -> Self {
        let mut table = comfy_table::Table::new();
        table
            .load_style(presets::NOTHING)
            .set_content_arrangement(ContentArrangement::Dynamic)
            .add_row(columns.iter().map(|(name, _)| *name));
        for (column, (_, align)) in table.column_iter_mut().zip(columns) {
            column.set_padding((0, 2));
            column.set_cell_alignment(match align {
                Align::Left => CellAlignment::Left,
                Align::Right => CellAlignment::Right,
            });
        }
        Self(table)
    }

    /// Missing cells are empty.
    pub fn row(&mut self, cells: Vec<String>) {
        self.0.add_row(cells);
    }

    /// Two spaces between columns, none at the end of a line. On a terminal, long cells are broken
    /// into lines where the table is too wide for it.
    pub fn render(self) -> String {
        let terminal = io::stdout().is_terminal();
        let size = terminal.then(terminal_size::terminal_size).flatten();
        self.within(size.map(|(width, _)| width.0))
    }

    fn within(mut self, columns: Option<u16>) -> String {
        if let Some(columns) = columns {
            // The last column's padding is cut off again.
            self.0.set_width(columns.saturating_add(2));
        }
        self.0
            .lines()
            .map(|line| format!("{}\n", line.trim_end()))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table {
        let mut table = Table::new(&[("NAME", Align::Left), ("MEM", Align::Right)]);
        table.row(vec!["a job with a long name".into(), "1GiB".into()]);
        table.row(vec!["b".into()]);
        table
    }

    #[test]
    fn columns_are_as_wide_as_what_is_in_them() {
        assert_eq!(
            table().within(None),
            "NAME                     MEM\na job with a long name  1GiB\nb\n"
        );
    }

    #[test]
    fn a_table_is_no_wider_than_the_terminal() {
        let text = table().within(Some(18));
        assert!(text.lines().count() > 3, "{text}");
        for line in text.lines() {
            assert!(line.len() <= 18, "{line}");
        }
        assert_eq!(table().within(Some(200)), table().within(None));
    }
}
