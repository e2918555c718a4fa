//! Pictures as SVG, readable in print and by a screen reader: every figure is also text.

use super::super::matrix::{Cell, Matrix};
use super::super::plan::{Mode, Plan};
use super::colour::{Colour, of_slowdown};
use super::step_times;

/// Of a cell of the heat map.
const CELL: (f64, f64) = (104.0, 46.0);
const FONT: &str = "font-family=\"sans-serif\"";

/// Text that may stand anywhere in XML.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out += "&amp;",
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            '"' => out += "&quot;",
            '\'' => out += "&#39;",
            // What XML does not have.
            c if c.is_control() && !matches!(c, '\n' | '\t') => out.push(' '),
            c => out.push(c),
        }
    }
    out
}

/// The beginning of a picture: its size, and what it shows, in words.
fn begin(id: &str, width: f64, height: f64, title: &str, about: &str) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{height:.0}\" \
         viewBox=\"0 0 {width:.0} {height:.0}\" role=\"img\" aria-labelledby=\"{id}-t {id}-d\">\n\
         <title id=\"{id}-t\">{}</title>\n<desc id=\"{id}-d\">{}</desc>\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n",
        escape(title),
        escape(about)
    )
}

struct Text<'a> {
    at: (f64, f64),
    size: u32,
    anchor: &'a str,
    fill: &'a str,
}

impl Text<'_> {
    fn of(&self, text: &str) -> String {
        format!(
            "<text x=\"{:.1}\" y=\"{:.1}\" font-size=\"{}\" {FONT} text-anchor=\"{}\" fill=\"{}\">{}</text>\n",
            self.at.0,
            self.at.1,
            self.size,
            self.anchor,
            self.fill,
            escape(text)
        )
    }
}

fn dark(at: (f64, f64), size: u32, anchor: &str, text: &str) -> String {
    let text_of = Text {
        at,
        size,
        anchor,
        fill: "#222222",
    };
    text_of.of(text)
}

/// Names may be long; a picture shows so much of them.
fn short(name: &str) -> String {
    const MOST: usize = 24;
    match name.chars().count() > MOST {
        true => format!("{}...", name.chars().take(MOST - 3).collect::<String>()),
        false => name.to_owned(),
    }
}

/// Slowdowns of all pairs: the job at the left, beside the job above.
pub fn heat_map(plan: &Plan, matrix: &Matrix, mode: Mode) -> String {
    let names: Vec<&str> = plan.jobs.iter().map(|job| job.name.as_str()).collect();
    let longest = names.iter().map(|name| short(name).chars().count()).max();
    // CAST: a few letters and jobs.
    let margin = 24.0 + 8.0 * longest.unwrap_or(0) as f64;
    let (left, top) = (margin, margin * 0.75 + 34.0);
    // The title and the legend need space, too.
    let width = (left + CELL.0 * names.len() as f64 + margin * 0.7 + 20.0)
        .max(left + 58.0 * 6.0 + 20.0)
        .max(480.0);
    let height = top + CELL.1 * names.len() as f64 + 70.0;
    let title = format!("Slowdown of each job beside each other, mode {mode}");
    let about = "Rows are jobs, columns are the job beside them. Each cell has the slowdown and, \
                 below it, its 95 % confidence interval.";
    let mut svg = begin(&format!("heat-{mode}"), width, height, &title, about);
    svg += &dark((12.0, 22.0), 15, "start", &title);
    for (column, name) in names.iter().enumerate() {
        let x = left + CELL.0 * (column as f64 + 0.5);
        svg += &format!(
            "<g transform=\"translate({x:.1} {:.1}) rotate(-35)\">{}</g>\n",
            top - 8.0,
            dark((0.0, 0.0), 13, "start", &short(name))
        );
    }
    for (row, name) in names.iter().enumerate() {
        let y = top + CELL.1 * row as f64;
        svg += &dark(
            (left - 8.0, y + CELL.1 / 2.0 + 4.0),
            13,
            "end",
            &short(name),
        );
        for (column, beside) in names.iter().enumerate() {
            let x = left + CELL.0 * column as f64;
            svg += &cell((x, y), matrix.pair(mode, name, beside));
        }
    }
    svg += &legend((left, top + CELL.1 * names.len() as f64 + 18.0));
    svg + "</svg>\n"
}

fn cell((x, y): (f64, f64), cell: Option<&Cell>) -> String {
    let middle = x + CELL.0 / 2.0;
    let estimate = cell.and_then(|cell| cell.estimate);
    let colour = estimate.map_or(Colour(245, 245, 245), |one| of_slowdown(one.value));
    let hint = match cell {
        None => "not in the plan".to_owned(),
        Some(cell) => match (&cell.estimate, &cell.reason) {
            (Some(one), _) => format!(
                "{} beside {}: {:.3}, 95 % interval {:.3} to {:.3}, {} of {} runs",
                cell.job,
                cell.beside.join(" and "),
                one.value,
                one.low,
                one.high,
                cell.done,
                cell.wanted
            ),
            (None, reason) => reason.clone().unwrap_or_default(),
        },
    };
    let mut svg = format!(
        "<g><title>{}</title><rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{}\" height=\"{}\" \
         fill=\"{}\" stroke=\"#ffffff\" stroke-width=\"2\"/>\n",
        escape(&hint),
        CELL.0,
        CELL.1,
        colour.hex()
    );
    let fill = colour.readable();
    let text = |dy: f64, size: u32| Text {
        at: (middle, y + dy),
        size,
        anchor: "middle",
        fill,
    };
    match estimate {
        Some(one) => {
            svg += &text(20.0, 15).of(&format!("{:.2}", one.value));
            svg += &text(37.0, 11).of(&format!("{:.2} to {:.2}", one.low, one.high));
        }
        None => svg += &text(27.0, 12).of("none"),
    }
    svg + "</g>\n"
}

fn legend((x, y): (f64, f64)) -> String {
    let mut svg = String::new();
    for (at, value) in [1.0, 1.25, 1.5, 2.0, 2.5, 3.0].into_iter().enumerate() {
        let left = x + 58.0 * at as f64; // CAST: below 6.
        let colour = of_slowdown(value);
        svg += &format!(
            "<rect x=\"{left:.1}\" y=\"{y:.1}\" width=\"58\" height=\"18\" fill=\"{}\"/>\n",
            colour.hex()
        );
        let text = Text {
            at: (left + 29.0, y + 13.0),
            size: 11,
            anchor: "middle",
            fill: colour.readable(),
        };
        svg += &text.of(&format!("{value}"));
    }
    svg += &dark((x, y + 34.0), 11, "start", "1: as fast as in its solo runs");
    svg
}

/// Slowdown against a sum over the jobs of a run; `None`: the sum is not known of any.
pub fn against(
    matrix: &Matrix,
    mode: Mode,
    (id, title, axis): (&str, &str, &str),
    sum: fn(&Cell) -> Option<f64>,
) -> Option<String> {
    let points: Vec<(&Cell, f64, f64)> = matrix
        .cells
        .iter()
        .filter(|cell| cell.mode == mode)
        .filter_map(|cell| Some((cell, sum(cell)?, cell.estimate?.value)))
        .collect();
    let most_x = points.iter().map(|point| point.1).fold(0.0, f64::max);
    if points.is_empty() || most_x <= 0.0 {
        return None;
    }
    let (right, most_y) = (
        nice(most_x * 1.05),
        nice(
            points
                .iter()
                .map(|point| point.2)
                .fold(1.2, f64::max)
                .max(1.0),
        ),
    );
    let (width, height) = (520.0, 340.0);
    let (left, top, bottom) = (56.0, 40.0, height - 48.0);
    let x_of = |x: f64| left + (width - left - 20.0) * x / right;
    let y_of = |y: f64| bottom - (bottom - top) * (y / most_y).min(1.0);
    let about = "Each point is a job in a run with others. The dashed line is where a job would be \
                 if time were divided and nothing lost.";
    let mut svg = begin(&format!("{id}-{mode}"), width, height, title, about);
    svg += &dark((12.0, 22.0), 15, "start", title);
    for step in 0..=4 {
        let part = f64::from(step) / 4.0;
        let (x, y) = (x_of(right * part), y_of(most_y * part));
        svg += &format!(
            "<path d=\"M{left} {y:.1}H{:.1}\" stroke=\"#dddddd\"/>\n",
            width - 20.0
        );
        svg += &dark((left - 6.0, y + 4.0), 11, "end", &figure(most_y * part));
        svg += &dark((x, bottom + 16.0), 11, "middle", &figure(right * part));
    }
    svg += &dark((width / 2.0, height - 10.0), 12, "middle", axis);
    if id == "busy" {
        let knee = 1.0f64.min(right);
        svg += &format!(
            "<path d=\"M{:.1} {:.1}L{:.1} {:.1}L{:.1} {:.1}\" fill=\"none\" stroke=\"#666666\" \
             stroke-dasharray=\"5 4\"/>\n",
            x_of(0.0),
            y_of(1.0),
            x_of(knee),
            y_of(1.0),
            x_of(right.min(most_y)),
            y_of(right.min(most_y).max(1.0)),
        );
    }
    for (cell, x, y) in points {
        svg += &format!(
            "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"5\" fill=\"#1b6ca8\" fill-opacity=\"0.7\" \
             stroke=\"#0c3a5b\"><title>{}</title></circle>\n",
            x_of(x),
            y_of(y),
            escape(&format!(
                "{} beside {}: {y:.2} at {}",
                cell.job,
                cell.beside.join(" and "),
                figure(x)
            ))
        );
    }
    Some(svg + "</svg>\n")
}

/// The next round number.
fn nice(value: f64) -> f64 {
    let scale = 10f64.powf(value.log10().floor());
    let steps = [1.0, 2.0, 2.5, 4.0, 5.0, 8.0, 10.0];
    let above = steps.into_iter().find(|step| step * scale >= value);
    above.unwrap_or(10.0) * scale
}

/// A number with as many digits as a person wants to see.
pub fn figure(value: f64) -> String {
    const SCALES: [(f64, &str); 4] = [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")];
    for (scale, letter) in SCALES {
        if value.abs() >= scale {
            let unit = if letter == "k" { 1e3 } else { scale };
            let text = format!("{:.2}", value / unit);
            let text = text.trim_end_matches('0').trim_end_matches('.');
            return format!("{text}{letter}");
        }
    }
    match value.abs() {
        v if v >= 100.0 => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        0.0 => "0".to_owned(),
        v if v >= 0.01 => format!("{value:.2}"),
        _ => format!("{value:.1e}"),
    }
}

/// How long a unit took in parts of the window: in solo runs and beside each combination.
pub fn steps(matrix: &Matrix, mode: Mode, job: &str) -> Option<String> {
    let rows = step_times(matrix, mode, job);
    let most = rows
        .iter()
        .flat_map(|row| row.1.iter().copied())
        .fold(0.0, f64::max);
    if rows.is_empty() || most <= 0.0 {
        return None;
    }
    let unit = matrix.solo(mode, job).map_or("", |solo| &solo.unit);
    let right = nice(most * 1.02);
    let longest = rows.iter().map(|row| short(&row.0).chars().count()).max();
    // CAST: a few letters and rows.
    let left = 24.0 + 7.5 * longest.unwrap_or(0) as f64;
    let width = left + 460.0;
    let height = 62.0 + 24.0 * rows.len() as f64 + 30.0;
    let title = format!("{job}: ms for one of its {unit}, in parts of the window, mode {mode}");
    let about = "Each row has least and most as a line, the middle half as a box and the middle as \
                 a bar.";
    let mut svg = begin(&format!("steps-{mode}-{job}"), width, height, &title, about);
    svg += &dark((12.0, 22.0), 14, "start", &title);
    let x_of = |ms: f64| left + 430.0 * ms / right;
    let bottom = height - 34.0;
    for step in 0..=4 {
        let ms = right * f64::from(step) / 4.0;
        let x = x_of(ms);
        svg += &format!("<path d=\"M{x:.1} 34V{bottom:.1}\" stroke=\"#dddddd\"/>\n");
        svg += &dark((x, bottom + 16.0), 11, "middle", &figure(ms));
    }
    for (number, (name, times)) in rows.iter().enumerate() {
        let y = 50.0 + 24.0 * number as f64;
        svg += &dark((left - 8.0, y + 4.0), 12, "end", &short(name));
        let at = |part: f64| x_of(quantile(times, part));
        let (least, low, middle, high, most) = (at(0.0), at(0.25), at(0.5), at(0.75), at(1.0));
        svg += &format!(
            "<g><title>{}</title><path d=\"M{least:.1} {y}H{most:.1}\" stroke=\"#0c3a5b\"/>\
             <rect x=\"{low:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"12\" fill=\"#9ecae1\" \
             stroke=\"#0c3a5b\"/><path d=\"M{middle:.1} {:.1}v12\" stroke=\"#0c3a5b\" \
             stroke-width=\"2\"/></g>\n",
            escape(&format!(
                "{name}: {} parts, middle {} ms, {} to {}",
                times.len(),
                figure(quantile(times, 0.5)),
                figure(quantile(times, 0.0)),
                figure(quantile(times, 1.0))
            )),
            y - 6.0,
            (high - low).max(1.0),
            y - 6.0,
        );
    }
    Some(svg + "</svg>\n")
}

/// Of sorted values; 0 of none.
pub fn quantile(sorted: &[f64], part: f64) -> f64 {
    // CAST: an index.
    let at = (part * sorted.len().saturating_sub(1) as f64).round() as usize;
    sorted.get(at).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_cannot_end_a_tag() {
        assert_eq!(escape("a<b>&\"'\u{1}"), "a&lt;b&gt;&amp;&quot;&#39; ");
    }

    #[test]
    fn axes_end_at_round_numbers_and_figures_are_short() {
        for (value, above) in [(1.2, 2.0), (2.2, 2.5), (0.031, 0.04), (97.0, 100.0)] {
            assert!((nice(value) - above).abs() < 1e-9, "{value}");
        }
        for (value, text) in [
            (0.0, "0"),
            (0.5, "0.50"),
            (12.34, "12.3"),
            (1234.0, "1234"),
            (12_500.0, "12.5k"),
            (3e9, "3G"),
            (0.0001, "1.0e-4"),
        ] {
            assert_eq!(figure(value), text);
        }
        assert_eq!(quantile(&[1.0, 2.0, 3.0], 0.5), 2.0);
        assert_eq!(quantile(&[], 0.5), 0.0);
    }
}
