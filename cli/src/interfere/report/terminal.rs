//! The matrix as text: with a colour behind each figure where a terminal shows it, without
//! anywhere else.

use std::fmt::Write as _;

use super::super::matrix::{Cell, Matrix};
use super::super::plan::{Mode, Plan};
use super::colour::of_slowdown;

/// The matrix of each mode, what is no pair, and why cells are empty.
pub fn text(plan: &Plan, matrix: &Matrix, colours: bool) -> String {
    let mut text = String::new();
    for mode in &plan.modes {
        if !text.is_empty() {
            text.push('\n');
        }
        text += &of_mode(plan, matrix, *mode, colours);
    }
    text
}

fn of_mode(plan: &Plan, matrix: &Matrix, mode: Mode, colours: bool) -> String {
    let names: Vec<&str> = plan.jobs.iter().map(|job| job.name.as_str()).collect();
    let mut out = String::new();
    if matrix
        .cells
        .iter()
        .any(|cell| cell.mode == mode && cell.beside.len() == 1 && cell.share.is_none())
    {
        let _ = writeln!(
            out,
            "{mode}: slowdown of the job at the left beside the job above (95 % interval)"
        );
        let shown = |row: &str, column: &str| matrix.pair(mode, row, column).map(figures);
        let widest = |column: &&str| {
            let cells = names.iter().filter_map(|row| shown(row, column));
            let cells = cells.map(|cell| cell.len());
            cells.max().unwrap_or(1).max(column.len())
        };
        let widths: Vec<usize> = names.iter().map(widest).collect();
        let first = names.iter().map(|name| name.len()).max().unwrap_or(0);
        let mut line = " ".repeat(first);
        for (name, width) in names.iter().zip(&widths) {
            let _ = write!(line, "  {name:<width$}");
        }
        out += line.trim_end();
        out.push('\n');
        for row in &names {
            let mut line = format!("{row:<first$}");
            for (column, width) in names.iter().zip(&widths) {
                let cell = matrix.pair(mode, row, column);
                let text = format!("{:<width$}", shown(row, column).unwrap_or_default());
                let estimate = cell.and_then(|cell| cell.estimate).filter(|_| colours);
                line += "  ";
                match estimate {
                    Some(one) => {
                        let _ = write!(
                            line,
                            "{}{text}\x1b[0m",
                            of_slowdown(one.value).of_terminal()
                        );
                    }
                    None => line += &text,
                }
            }
            out += line.trim_end();
            out.push('\n');
        }
    }
    for cell in matrix.others(mode) {
        let share = cell
            .share
            .map_or(String::new(), |share| format!(" ({share})"));
        let _ = writeln!(
            out,
            "{mode}: {}{share} beside {}: {}",
            cell.job,
            cell.beside.join(" and "),
            figures(cell)
        );
    }
    let mut said: Vec<&str> = Vec::new();
    for cell in matrix.cells.iter().filter(|cell| cell.mode == mode) {
        let Some(reason) = cell.reason.as_deref() else {
            continue;
        };
        // One reason is often that of several cells.
        if !said.contains(&reason) {
            said.push(reason);
            let _ = writeln!(out, "{}: {reason}", cell.label);
        }
    }
    out
}

fn figures(cell: &Cell) -> String {
    match &cell.estimate {
        Some(one) => format!("{:.2} ({:.2} to {:.2})", one.value, one.low, one.high),
        None => "none".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::super::plan;
    use super::super::super::store::tests::record;
    use super::*;

    #[test]
    fn a_terminal_shows_colours_and_anything_else_figures_only() {
        let text_of = "[experiment]\nrepeat = 1\n[[job]]\nname = \"a\"\ncommand = [\"x\"]\n\
            [[job]]\nname = \"bb\"\ncommand = [\"x\"]\n\
            [[combination]]\njobs = [\"a\", \"a\", \"bb\"]\n";
        let plan = plan::parse(text_of, "p", Path::new("/"), &|_| Err(String::new())).unwrap();
        let records = [
            record("exclusive a #1", &[("a", 100.0)]),
            record("exclusive bb #1", &[("bb", 40.0)]),
            record("exclusive a+a #1", &[("a", 50.0), ("a", 50.0)]),
            record("exclusive a+bb #1", &[("a", 80.0), ("bb", 10.0)]),
            record(
                "exclusive a+a+bb #1",
                &[("a", 25.0), ("a", 25.0), ("bb", 40.0)],
            ),
        ];
        let matrix = Matrix::of(&plan, &records);
        let plain = text(&plan, &matrix, false);
        let expected = "\
exclusive: slowdown of the job at the left beside the job above (95 % interval)
    a                    bb
a   2.00 (2.00 to 2.00)  1.25 (1.25 to 1.25)
bb  4.00 (4.00 to 4.00)  none
exclusive: a beside a and bb: 4.00 (4.00 to 4.00)
exclusive: bb beside a and a: 1.00 (1.00 to 1.00)
bb+bb: 1 of 1 not measured yet
";
        assert_eq!(plain, expected);
        let coloured = text(&plan, &matrix, true);
        assert_eq!(coloured.matches("\x1b[0m").count(), 3, "{coloured:?}");
    }
}
