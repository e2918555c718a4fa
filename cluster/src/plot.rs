//! Pictures as SVG: how completion times are distributed, and how their means compare.

use plotters::prelude::*;

const COLOURS: [RGBColor; 8] = [
    RGBColor(0x1b, 0x6c, 0xa8),
    RGBColor(0xd1, 0x49, 0x5b),
    RGBColor(0x2e, 0x8b, 0x57),
    RGBColor(0xed, 0xae, 0x49),
    RGBColor(0x6a, 0x4c, 0x93),
    RGBColor(0x00, 0x79, 0x8c),
    RGBColor(0x8d, 0x6a, 0x4f),
    RGBColor(0x44, 0x44, 0x44),
];
/// Of the curves, and of the bars beside them.
const CURVES: (u32, u32) = (600, 400);
const BARS: u32 = 420;
const ROW: u32 = 20;

/// One run: its name and its completion times, sorted, in seconds.
#[derive(Clone, Debug)]
pub struct Series {
    /// Name.
    pub name: String,
    /// Sorted completion times in seconds.
    pub jct_s: Vec<f64>,
}

impl Series {
    fn mean_s(&self) -> f64 {
        self.jct_s.iter().sum::<f64>() / self.jct_s.len().max(1) as f64
    }

    /// The part of the jobs that completed within a time, by that time.
    fn curve(&self) -> impl Iterator<Item = (f64, f64)> {
        let n = self.jct_s.len();
        // 400 points are as many as the eye can tell apart.
        let points = (0..n).step_by(n.div_ceil(400).max(1));
        let points = points.chain(n.checked_sub(1));
        points.map(move |i| (self.jct_s[i].max(1.0), (i + 1) as f64 / n as f64))
    }
}

/// `1.5 h` and the like.
fn span(seconds: f64) -> String {
    match seconds {
        s if s < 120.0 => format!("{s:.0} s"),
        s if s < 7200.0 => format!("{:.0} min", s / 60.0),
        s if s < 172_800.0 => format!("{:.1} h", s / 3600.0),
        s => format!("{:.1} d", s / 86_400.0),
    }
}

/// On the left the part of the jobs that completed within a time (logarithmic), on the right the
/// means.
///
/// # Errors
/// Why nothing could be drawn.
pub fn svg(title: &str, series: &[Series]) -> Result<String, String> {
    // CAST: as many as there are policies to choose from.
    let rows = series.len() as u32;
    let size = (CURVES.0 + BARS, CURVES.1.max(ROW * (rows + 4)));
    let mut out = String::new();
    let root = SVGBackend::with_string(&mut out, size).into_drawing_area();
    draw(&root, title, series).map_err(|error| error.to_string())?;
    drop(root);
    Ok(out)
}

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

fn draw(root: &Area<'_>, title: &str, series: &[Series]) -> Result<(), Box<dyn std::error::Error>> {
    root.fill(&WHITE)?;
    let all = || series.iter().flat_map(|run| run.jct_s.iter().copied());
    let least = all().fold(f64::INFINITY, f64::min).max(1.0);
    let most = all().fold(1.0, f64::max).max(least * 10.0);
    let least = if least.is_finite() { least } else { 1.0 };
    let decades = 10f64.powf(least.log10().floor())..10f64.powf(most.log10().ceil());
    let (left, right) = root.split_horizontally(CURVES.0);
    let (left, _) = left.split_vertically(CURVES.1);
    let mut chart = ChartBuilder::on(&left)
        .caption(title, ("sans-serif", 18))
        .margin(10)
        .x_label_area_size(40)
        .y_label_area_size(50)
        .build_cartesian_2d(decades.log_scale(), 0.0..1.0)?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .y_labels(6)
        .label_style(("sans-serif", 15))
        .x_label_formatter(&|seconds| span(*seconds))
        .y_label_formatter(&|part| format!("{:.0} %", 100.0 * part))
        .x_desc("completion time")
        .draw()?;
    let longest = series.iter().map(Series::mean_s).fold(1e-9, f64::max);
    for (index, run) in series.iter().enumerate() {
        let colour = COLOURS[index % COLOURS.len()];
        chart.draw_series(LineSeries::new(run.curve(), colour.stroke_width(2)))?;
        // CAST: a picture of some hundred points.
        let (top, length) = (
            40 + (ROW as usize * index) as i32,
            (150.0 * run.mean_s() / longest).max(1.0) as i32,
        );
        let bar = [(10, top), (10 + length, top + 14)];
        right.draw(&Rectangle::new(bar, colour.mix(0.75).filled()))?;
        let text = format!("{}: mean {}", run.name, span(run.mean_s()));
        right.draw(&Text::new(text, (168, top), ("sans-serif", 15)))?;
    }
    root.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_picture_has_a_line_and_a_bar_for_each_run_and_no_stray_markup() {
        let run = |name: &str, jct_s: Vec<f64>| Series {
            name: name.to_owned(),
            jct_s,
        };
        let runs = [run("x&y", vec![1.0, 50.0, 9000.0]), run("none", vec![])];
        let text = svg("a < b", &runs).expect("a picture");
        // A curve of the one that has times, and a bar of each.
        assert_eq!(text.matches("#1B6CA8").count(), 2, "{text}");
        assert_eq!(text.matches("#D1495B").count(), 1, "{text}");
        assert_eq!(text.matches(": mean ").count(), 2, "{text}");
        assert!(text.contains("a &lt; b") && text.contains("x&amp;y"));
        assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
    }
}
