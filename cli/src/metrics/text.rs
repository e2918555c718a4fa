//! The text of an exposition: OpenMetrics, or Prometheus's own older format for readers that do not
//! ask for that (node_exporter's textfile collector, `promtool`).

use std::fmt::{self, Write};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{self, Registry};

use super::Scrape;
use super::table::{Figure, Kind, METRICS, Metric, Row, Unit};

/// Characters of a label's value. Names of jobs have 64 at most; what others call their devices and
/// users is cut here.
const MOST_CHARS: usize = 200;

/// How an exposition is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    OpenMetrics,
    /// Prometheus's text format, version 0.0.4.
    Plain,
}

impl Format {
    /// By what a reader takes (`Accept`). Prometheus names OpenMetrics where it wants it.
    pub fn asked_for(accept: &str) -> Self {
        let mut kinds = accept.split(',').map(|kind| {
            let mut parts = kind.split(';').map(str::trim);
            let name = parts.next().unwrap_or_default().to_ascii_lowercase();
            let mut weight = parts.filter_map(|part| part.strip_prefix("q="));
            let wanted = weight.all(|weight| weight.parse() != Ok(0.0));
            (name, wanted)
        });
        if kinds.any(|(name, wanted)| wanted && name == "application/openmetrics-text") {
            Self::OpenMetrics
        } else {
            Self::Plain
        }
    }

    /// As `Content-Type` has it.
    pub fn media(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Plain => "text/plain; version=0.0.4; charset=utf-8",
        }
    }
}

/// All metrics of a scrape. One without series still says what it is.
pub fn exposition(scrape: &Scrape, format: Format) -> String {
    let rows = METRICS.iter().map(|metric| metric.rows(scrape)).collect();
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Found(rows)));
    let mut written = String::new();
    // A `String` takes everything.
    let _ = text::encode(&mut written, &registry);
    match format {
        Format::OpenMetrics => written,
        Format::Plain => plain(&written),
    }
}

/// What a scrape found, by the table's order.
#[derive(Debug)]
struct Found(Vec<Vec<Row>>);

impl Collector for Found {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        for (metric, rows) in METRICS.iter().zip(&self.0) {
            encode(metric, rows, &mut encoder)?;
        }
        Ok(())
    }
}

fn encode(
    metric: &Metric,
    rows: &[Row],
    encoder: &mut DescriptorEncoder<'_>,
) -> Result<(), fmt::Error> {
    let unit = match metric.unit {
        Unit::None => None,
        Unit::Seconds => Some(registry::Unit::Seconds),
        Unit::Bytes => Some(registry::Unit::Bytes),
        // The library's own is "ratios".
        Unit::Ratio => Some(registry::Unit::Other("ratio".into())),
    };
    let kind = match metric.kind {
        Kind::Counter => MetricType::Counter,
        Kind::Gauge => MetricType::Gauge,
        Kind::Info => MetricType::Info,
    };
    // The library puts the unit at the end of the name.
    let end = metric.unit.word().map(|word| format!("_{word}"));
    let name = end
        .as_deref()
        .and_then(|end| metric.name.strip_suffix(end))
        .unwrap_or(metric.name);
    let help = format!("{}.", metric.help);
    let mut family = encoder.encode_descriptor(name, &help, unit.as_ref(), kind)?;
    let names = metric.labels();
    for (values, figure) in rows {
        let values = values.iter().map(|value| escaped(value));
        let labels: Vec<(&str, String)> = names.iter().copied().zip(values).collect();
        if metric.kind == Kind::Info {
            family.encode_info(&labels)?;
            continue;
        }
        if labels.is_empty() {
            number(metric.kind, *figure, &mut family)?;
        } else {
            number(metric.kind, *figure, &mut family.encode_family(&labels)?)?;
        }
    }
    Ok(())
}

fn number(kind: Kind, figure: Figure, series: &mut MetricEncoder<'_>) -> Result<(), fmt::Error> {
    match (kind, figure) {
        (Kind::Counter, Figure::Whole(value)) => {
            series.encode_counter::<NoLabelSet, _, f64>(&value, None)
        }
        (Kind::Counter, Figure::Real(value)) => {
            series.encode_counter::<NoLabelSet, _, f64>(&value, None)
        }
        (_, Figure::Whole(value)) => series.encode_gauge(&value),
        (_, Figure::Real(value)) => series.encode_gauge(&value),
    }
}

/// A label's value between its quotes, which the library writes as it is.
fn escaped(value: &str) -> String {
    let mut text = String::with_capacity(value.len());
    for c in value.chars().take(MOST_CHARS) {
        match c {
            '\\' => text.push_str("\\\\"),
            '"' => text.push_str("\\\""),
            '\n' => text.push_str("\\n"),
            c => text.push(c),
        }
    }
    text
}

/// The older format: no units and no end mark, and a metric is called as its samples are.
fn plain(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    for line in text.lines() {
        let Some(comment) = line.strip_prefix("# ") else {
            let _ = writeln!(plain, "{line}");
            continue;
        };
        let mut words = comment.splitn(3, ' ');
        let (word, name) = (words.next(), words.next().unwrap_or_default());
        let rest = words.next().unwrap_or_default();
        let Some(metric) = METRICS.iter().find(|metric| metric.name == name) else {
            continue;
        };
        let name = metric.sample();
        let _ = match (word, metric.kind) {
            (Some("HELP"), _) => writeln!(plain, "# HELP {name} {rest}"),
            // It knows no other word for it.
            (Some("TYPE"), Kind::Info) => writeln!(plain, "# TYPE {name} gauge"),
            (Some("TYPE"), _) => writeln!(plain, "# TYPE {name} {rest}"),
            _ => Ok(()),
        };
    }
    plain
}

#[cfg(test)]
mod tests {
    use control::{ArbiterStatus, DeviceStatus, JobDevice, JobStatus};

    use super::*;

    fn scrape(name: &str) -> Scrape {
        Scrape {
            status: Some(ArbiterStatus {
                version: name.into(),
                devices: vec![DeviceStatus {
                    uuid: "GPU-1".into(),
                    name: name.into(),
                    busy_ns: 1_500_000_000,
                    ..DeviceStatus::default()
                }],
                jobs: vec![JobStatus {
                    name: name.into(),
                    id: 7,
                    user: name.into(),
                    launches: u64::MAX,
                    share_asked: Some(0.25),
                    devices: vec![JobDevice {
                        uuid: "GPU-1".into(),
                        device_time_ns: 250_000_000,
                        ..JobDevice::default()
                    }],
                    ..JobStatus::default()
                }],
                ..ArbiterStatus::default()
            }),
            ..Scrape::default()
        }
    }

    /// Name, labels and value.
    type Sample = (String, Vec<(String, String)>, f64);

    /// Each sample. Fails where a line is none.
    fn samples(text: &str) -> Vec<Sample> {
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        lines.map(sample).collect()
    }

    fn sample(line: &str) -> Sample {
        let end = line.find(['{', ' ']).expect("a name");
        let (name, mut rest) = line.split_at(end);
        let mut labels = Vec::new();
        if let Some(mut inner) = rest.strip_prefix('{') {
            loop {
                let (label, after) = inner.split_once("=\"").expect("a label");
                let mut value = String::new();
                let mut chars = after.char_indices();
                let at = loop {
                    match chars.next().expect("the value ends") {
                        (at, '"') => break at,
                        (_, '\\') => match chars.next().expect("an escape").1 {
                            'n' => value.push('\n'),
                            c @ ('\\' | '"') => value.push(c),
                            c => panic!("\\{c} in {line}"),
                        },
                        (_, c) => value.push(c),
                    }
                };
                labels.push((label.to_owned(), value));
                inner = &after[at + 1..];
                match inner.strip_prefix(',') {
                    Some(more) => inner = more,
                    None => break,
                }
            }
            rest = inner.strip_prefix('}').expect("the labels end");
        }
        let value = rest.trim_start().parse().expect("a number");
        (name.to_owned(), labels, value)
    }

    #[test]
    fn open_metrics_have_unit_type_and_end() {
        let text = exposition(&scrape("train"), Format::OpenMetrics);
        for line in [
            "# TYPE sublet_device_busy_seconds counter",
            "# UNIT sublet_device_busy_seconds seconds",
            "sublet_device_busy_seconds_total{UUID=\"GPU-1\",gpu=\"0\"} 1.5",
            "# TYPE sublet_job info",
            "# UNIT sublet_job_share_asked_ratio ratio",
            "sublet_job_share_asked_ratio{job_name=\"train\",job_id=\"7\",user=\"train\"} 0.25",
            "sublet_up 1",
        ] {
            assert!(text.lines().any(|one| one == line), "{line}: {text}");
        }
        assert!(text.ends_with("# EOF\n"));
        assert!(text.contains(&format!(
            "sublet_job_launches_total{{job_name=\"train\",job_id=\"7\",user=\"train\"}} {}\n",
            u64::MAX
        )));
    }

    #[test]
    fn the_older_format_names_metrics_as_their_samples() {
        let text = exposition(&scrape("train"), Format::Plain);
        assert!(!text.contains("# UNIT") && !text.contains("# EOF"));
        assert!(text.contains("# TYPE sublet_job_info gauge\n"));
        let mut known = std::collections::BTreeSet::new();
        for line in text.lines() {
            match line.strip_prefix("# TYPE ") {
                Some(rest) => known.insert(rest.split(' ').next().unwrap_or_default().to_owned()),
                None => false,
            };
            if !line.starts_with('#') {
                let name = sample(line).0;
                assert!(known.contains(&name), "{line}");
            }
        }
        assert_eq!(known.len(), METRICS.len());
        let open = samples(&exposition(&scrape("train"), Format::OpenMetrics));
        assert_eq!(samples(&text), open);
    }

    #[test]
    fn hostile_names_come_back_as_they_were() {
        let long = "x".repeat(1000);
        for name in [
            "a\"b",
            "a\\",
            "\\n",
            "a\nsublet_up 0\n# EOF\n",
            "a\",user=\"root",
            "naïve ☃ {a=\"b\"} 1",
            "\r\t\u{0}\u{7f}",
            "",
            &long,
        ] {
            for format in [Format::OpenMetrics, Format::Plain] {
                let text = exposition(&scrape(name), format);
                let expected: String = name.chars().take(MOST_CHARS).collect();
                let all = samples(&text);
                let up = all.iter().filter(|(name, ..)| name == "sublet_up");
                assert_eq!(up.map(|(.., value)| *value).collect::<Vec<_>>(), [1.0]);
                let user = |labels: &[(String, String)]| {
                    let user = labels.iter().find(|(label, _)| label == "user");
                    user.map(|(_, value)| value.clone())
                };
                let users: Vec<String> = all.iter().filter_map(|(_, l, _)| user(l)).collect();
                assert!(users.len() > 20 && users.iter().all(|user| *user == expected));
            }
        }
    }

    #[test]
    fn without_an_arbiter_only_the_exporter_has_figures() {
        let scrape = Scrape {
            scrapes: 3,
            failures: 2,
            ..Scrape::default()
        };
        let all = samples(&exposition(&scrape, Format::OpenMetrics));
        let names: Vec<&str> = all.iter().map(|(name, ..)| name.as_str()).collect();
        assert_eq!(
            names,
            [
                "sublet_up",
                "sublet_scrape_duration_seconds",
                "sublet_exporter_scrapes_total",
                "sublet_exporter_scrape_failures_total",
                "sublet_exporter_info",
            ]
        );
        assert_eq!((all[0].2, all[2].2, all[3].2), (0.0, 3.0, 2.0));
    }

    #[test]
    fn the_reader_says_which_format_it_takes() {
        let prometheus = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,\
                          text/plain;version=0.0.4;q=0.3,*/*;q=0.2";
        for (accept, format) in [
            (prometheus, Format::OpenMetrics),
            ("Application/OpenMetrics-Text", Format::OpenMetrics),
            (
                "text/plain, application/openmetrics-text",
                Format::OpenMetrics,
            ),
            ("application/openmetrics-text;q=0", Format::Plain),
            ("application/openmetrics-textual", Format::Plain),
            ("*/*", Format::Plain),
            ("", Format::Plain),
            (";;,,q=;", Format::Plain),
        ] {
            assert_eq!(Format::asked_for(accept), format, "{accept}");
        }
    }
}
