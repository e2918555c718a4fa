//! Durations as people write them: a number and a unit, such as `90s`, `20m`, `1.5h`.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// A duration of a setting. Travels as the text that people write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Span(pub Duration);

crate::text_schema! {
    Span, r"^\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*(ns|us|ms|s|m|h|d)\s*$", "90m", "A time: a number and a unit.";
}

impl Span {
    pub const fn from_micros(us: u64) -> Self {
        Self(Duration::from_micros(us))
    }

    /// In microseconds, rounded down.
    pub fn micros(self) -> u64 {
        u64::try_from(self.0.as_micros()).unwrap_or(u64::MAX)
    }

    /// In nanoseconds.
    pub fn nanos(self) -> u64 {
        u64::try_from(self.0.as_nanos()).unwrap_or(u64::MAX)
    }
}

/// Units in nanoseconds, largest first.
const EXACT: [(&str, u64); 7] = [
    ("d", 86_400_000_000_000),
    ("h", 3_600_000_000_000),
    ("m", 60_000_000_000),
    ("s", 1_000_000_000),
    ("ms", 1_000_000),
    ("us", 1000),
    ("ns", 1),
];

impl fmt::Display for Span {
    /// In the largest unit that holds it exactly; parses back to the same.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ns = self.nanos();
        let exact = EXACT
            .into_iter()
            .find(|(_, unit_ns)| ns.is_multiple_of(*unit_ns));
        let (unit, unit_ns) = exact.unwrap_or(("ns", 1));
        write!(f, "{}{unit}", ns / unit_ns)
    }
}

impl FromStr for Span {
    type Err = BadSpan;

    fn from_str(text: &str) -> Result<Self, BadSpan> {
        parse_span(text).map(Self)
    }
}

impl TryFrom<String> for Span {
    type Error = BadSpan;

    /// Whatever [`Display`](fmt::Display) writes, to the nanosecond and of any length, or what
    /// people write.
    fn try_from(text: String) -> Result<Self, BadSpan> {
        let exact = EXACT.into_iter().find_map(|(unit, unit_ns)| {
            let number: u64 = text.strip_suffix(unit)?.parse().ok()?;
            number.checked_mul(unit_ns)
        });
        match exact {
            Some(ns) => Ok(Self(Duration::from_nanos(ns))),
            None => text.parse(),
        }
    }
}

impl From<Span> for String {
    fn from(span: Span) -> Self {
        span.to_string()
    }
}

/// Not a duration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is no duration: write a number above 0 with a unit (ns, us, ms, s, m, h or d), such as 90s or 1.5h"
)]
pub struct BadSpan(pub String);

const UNITS: [(&str, f64); 7] = [
    ("d", 86_400e9),
    ("h", 3_600e9),
    ("m", 60e9),
    ("ms", 1e6),
    ("s", 1e9),
    ("us", 1e3),
    ("ns", 1.0),
];

/// A duration above zero.
///
/// # Errors
/// [`BadSpan`]: no number, no unit, zero, or more than ten years.
pub fn parse_span(text: &str) -> Result<Duration, BadSpan> {
    let bad = || BadSpan(text.to_owned());
    let trimmed = text.trim();
    let digits = trimmed
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .ok_or_else(bad)?;
    let (number, unit) = trimmed.split_at(digits);
    let unit = unit.trim_start();
    let (_, unit_ns) = UNITS
        .into_iter()
        .find(|(name, _)| *name == unit)
        .ok_or_else(bad)?;
    let ns = number.parse::<f64>().map_err(|_| bad())? * unit_ns;
    if !(1.0..=3650.0 * 86_400e9).contains(&ns) {
        return Err(bad());
    }
    // CAST: in range, so below 2^63.
    Ok(Duration::from_nanos(ns.round() as u64))
}

/// A duration in the largest unit that leaves no more than two decimals to be desired.
pub fn short_span(span: Duration) -> String {
    let ns = span.as_nanos() as f64;
    let (unit, value) = if ns >= 86_400e9 {
        ("d", ns / 86_400e9)
    } else if ns >= 3_600e9 {
        ("h", ns / 3_600e9)
    } else if ns >= 60e9 {
        ("m", ns / 60e9)
    } else if ns >= 1e9 {
        ("s", ns / 1e9)
    } else {
        ("ms", ns / 1e6)
    };
    let text = format!("{value:.2}");
    format!("{}{unit}", text.trim_end_matches('0').trim_end_matches('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_need_a_number_and_a_unit() {
        for (text, ms) in [
            ("90s", 90_000),
            ("1.5h", 5_400_000),
            ("20 m", 1_200_000),
            ("250ms", 250),
            (" 2d ", 172_800_000),
        ] {
            assert_eq!(parse_span(text), Ok(Duration::from_millis(ms)), "{text}");
        }
        for bad in [
            "", "5", "s", "-1s", "0s", "1.2.3s", "5 weeks", "99999d", "1e3s",
        ] {
            assert_eq!(parse_span(bad), Err(BadSpan(bad.into())), "{bad}");
        }
    }

    #[test]
    fn a_span_is_written_exactly() {
        for text in ["90s", "1h", "20m", "2d", "7500us", "250ms", "1234567891ns"] {
            let span: Span = text.parse().unwrap();
            assert_eq!(span.to_string(), text);
        }
        assert_eq!("1.5h".parse::<Span>().unwrap().to_string(), "90m");
        for ns in [0, 1, 1 << 60, u64::MAX] {
            let span = Span(Duration::from_nanos(ns));
            let wire = serde_json::to_string(&span).unwrap();
            assert_eq!(serde_json::from_str::<Span>(&wire).unwrap(), span, "{wire}");
        }
    }

    #[test]
    fn durations_are_printed_shortly() {
        for text in ["90s", "1.5h", "20m", "250ms", "2d"] {
            let span = parse_span(text).unwrap();
            assert_eq!(parse_span(&short_span(span)), Ok(span), "{text}");
        }
        assert_eq!(short_span(Duration::from_secs(90)), "1.5m");
    }
}
