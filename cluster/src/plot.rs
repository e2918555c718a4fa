//! Pictures as SVG: how completion times are distributed, and how their means compare.

use std::fmt::Write as _;

const COLOURS: [&str; 8] = [
    "#1b6ca8", "#d1495b", "#2e8b57", "#edae49", "#6a4c93", "#00798c", "#8d6a4f", "#444444",
];

/// One run: its name and its completion times, sorted, in seconds.
#[derive(Clone, Debug)]
pub struct Series {
    /// Name.
    pub name: String,
    /// Sorted completion times in seconds.
    pub jct_s: Vec<f64>,
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
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
#[must_use]
pub fn svg(title: &str, series: &[Series]) -> String {
    const WIDTH: f64 = 520.0;
    const HEIGHT: f64 = 300.0;
    let (left, top) = (60.0, 40.0);
    let all = || series.iter().flat_map(|run| run.jct_s.iter().copied());
    let least = all().fold(f64::INFINITY, f64::min).max(1.0);
    let most = all().fold(1.0, f64::max).max(least * 10.0);
    let (from, to) = (least.log10().floor(), most.log10().ceil());
    let x = |seconds: f64| left + WIDTH * (seconds.max(1.0).log10() - from) / (to - from);
    let y = |part: f64| top + HEIGHT * (1.0 - part);
    let bars = 20.0 * series.len() as f64 + 40.0;
    let (width, height) = (left + WIDTH + 440.0, (top + HEIGHT + 50.0).max(top + bars));
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{height:.0}\" font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n<text x=\"{left}\" y=\"20\" font-size=\"14\">{}</text>\n",
        escape(title)
    );
    for tick in 0..=4 {
        let part = f64::from(tick) / 4.0;
        let at = y(part);
        let _ = writeln!(
            out,
            "<line x1=\"{left}\" x2=\"{:.1}\" y1=\"{at:.1}\" y2=\"{at:.1}\" stroke=\"#ddd\"/><text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{:.0} %</text>",
            left + WIDTH,
            left - 6.0,
            at + 4.0,
            100.0 * part
        );
    }
    let mut decade = from;
    while decade <= to {
        let at = x(10f64.powf(decade));
        let _ = writeln!(
            out,
            "<line x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{top}\" y2=\"{:.1}\" stroke=\"#ddd\"/><text x=\"{at:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            top + HEIGHT,
            top + HEIGHT + 16.0,
            span(10f64.powf(decade))
        );
        decade += 1.0;
    }
    let _ = writeln!(
        out,
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">completion time</text>",
        left + WIDTH / 2.0,
        top + HEIGHT + 36.0
    );
    let mean = |run: &Series| run.jct_s.iter().sum::<f64>() / run.jct_s.len().max(1) as f64;
    let longest = series.iter().map(mean).fold(1e-9, f64::max);
    for (index, run) in series.iter().enumerate() {
        let colour = COLOURS[index % COLOURS.len()];
        let n = run.jct_s.len();
        // 400 points are as many as the eye can tell apart.
        let step = n.div_ceil(400).max(1);
        let points: Vec<String> = (0..n)
            .step_by(step)
            .chain(n.checked_sub(1))
            .map(|i| format!("{:.1},{:.1}", x(run.jct_s[i]), y((i + 1) as f64 / n as f64)))
            .collect();
        let _ = writeln!(
            out,
            "<polyline fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.5\" points=\"{}\"/>",
            points.join(" ")
        );
        let (at, begin) = (top + 20.0 * index as f64 + 14.0, left + WIDTH + 30.0);
        let _ = writeln!(
            out,
            "<rect x=\"{begin:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"14\" fill=\"{colour}\" opacity=\"0.75\"/><text x=\"{:.1}\" y=\"{at:.1}\">{}: mean {}</text>",
            at - 11.0,
            (150.0 * mean(run) / longest).max(1.0),
            begin + 158.0,
            escape(&run.name),
            span(mean(run))
        );
    }
    out.push_str("</svg>\n");
    out
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
        let text = svg(
            "a < b",
            &[run("x&y", vec![1.0, 50.0, 9000.0]), run("none", vec![])],
        );
        assert_eq!(text.matches("<polyline").count(), 2);
        assert_eq!(text.matches("opacity").count(), 2);
        assert!(text.contains("a &lt; b") && text.contains("x&amp;y"));
        assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
    }
}
