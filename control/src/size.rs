//! Memory sizes as people write them: 1024-based, always with a unit.
//!
//! `8GiB`, `8GB` and `8G` are the same 8 * 2^30 bytes, in either case of letters. A bare number is
//! refused, because nobody means 20 bytes.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A memory limit on one device. Travels as the text that people write.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum MemLimit {
    Bytes(u64),
    /// Of the device's total, `0 < percent <= 100`.
    Percent(f64),
}

crate::text_schema! {
    MemLimit, r"^\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*([KMGTkmgt]([Ii]?[Bb])?|[Bb]|%)\s*$", "8GiB",
    "Memory, 1024-based with a unit (`8GiB`), or a part of the device (`50%`).";
}

impl MemLimit {
    /// Whether it is a limit at all: more than nothing, and at most the whole device.
    pub fn is_valid(self) -> bool {
        match self {
            Self::Bytes(bytes) => bytes > 0,
            Self::Percent(percent) => percent > 0.0 && percent <= 100.0,
        }
    }

    /// The limit on a device of `total_bytes`, percentages rounded down.
    pub fn resolve(self, total_bytes: u64) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes,
            // CAST: the product is at most total_bytes for a percentage in range, and `as`
            // saturates otherwise.
            Self::Percent(percent) => (total_bytes as f64 * (percent / 100.0)) as u64,
        }
    }
}

impl fmt::Display for MemLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bytes(bytes) => f.write_str(&exact_bytes(*bytes)),
            Self::Percent(percent) => write!(f, "{percent}%"),
        }
    }
}

impl TryFrom<String> for MemLimit {
    type Error = SizeError;

    /// Whatever [`Display`](fmt::Display) writes. A limit that is out of range is refused where it
    /// is admitted, with its reason, and not as a line that cannot be read.
    fn try_from(text: String) -> Result<Self, SizeError> {
        if let Some(percent) = text.strip_suffix('%')
            && let Ok(percent) = percent.parse()
        {
            return Ok(Self::Percent(percent));
        }
        match text.parse() {
            Err(SizeError::Zero(_)) => Ok(Self::Bytes(0)),
            read => read,
        }
    }
}

impl From<MemLimit> for String {
    fn from(limit: MemLimit) -> Self {
        limit.to_string()
    }
}

impl FromStr for MemLimit {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        let text = text.trim();
        let Some(number) = text.strip_suffix('%') else {
            return parse_bytes(text).map(Self::Bytes);
        };
        let number = number.trim_end();
        let plain = !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit() || b == b'.');
        match number.parse::<f64>() {
            Ok(percent) if plain && percent > 0.0 && percent <= 100.0 => Ok(Self::Percent(percent)),
            Ok(_) if plain => Err(SizeError::PercentRange(text.to_owned())),
            _ => Err(SizeError::NotASize(text.to_owned())),
        }
    }
}

/// Why a text is no size.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    #[error("`{0}` has no unit: write {0}GiB or {0}MiB, or a part of the device such as 50%")]
    NoUnit(String),
    #[error(
        "`{unit}` in `{text}` is no unit of memory: write B, KiB, MiB, GiB or TiB, or a part of the device such as 50%"
    )]
    UnknownUnit { text: String, unit: String },
    #[error(
        "`{0}` is no size: write a number with a unit such as 20GiB, or a part of the device such as 50%"
    )]
    NotASize(String),
    #[error("`{0}` is zero bytes: write a size above zero, or omit it for no limit")]
    Zero(String),
    #[error("`{0}` is outside 0% to 100%: write a part of the device such as 50%")]
    PercentRange(String),
    #[error("`{0}` is more than a 64-bit number of bytes: write a smaller size")]
    TooLarge(String),
}

/// Units, largest first: the shift, and the letter.
const UNITS: [(u32, char); 4] = [(40, 'T'), (30, 'G'), (20, 'M'), (10, 'K')];

/// Bytes of a text such as `8GiB`, `1.5G` or `512M`; fractions of a byte are dropped.
///
/// # Errors
/// [`SizeError`], with the text in it, where it is no size, has no unit, or is zero.
pub fn parse_bytes(text: &str) -> Result<u64, SizeError> {
    let text = text.trim();
    let digits = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, unit) = (&text[..digits], text[digits..].trim_start());
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if (whole.is_empty() && fraction.is_empty()) || fraction.contains('.') {
        return Err(SizeError::NotASize(text.to_owned()));
    }
    if unit.is_empty() {
        return Err(SizeError::NoUnit(text.to_owned()));
    }
    let shift = shift_of(unit).ok_or_else(|| SizeError::UnknownUnit {
        text: text.to_owned(),
        unit: unit.to_owned(),
    })?;

    let too_large = || SizeError::TooLarge(text.to_owned());
    let whole: u64 = match whole {
        "" => 0,
        whole => whole.parse().map_err(|_| too_large())?,
    };
    // 18 digits of a fraction fit 64 bits, and the rest is below a byte in any unit here.
    let fraction = &fraction[..fraction.len().min(18)];
    let part: u128 = match fraction {
        "" => 0,
        // PANIC: at most 18 ASCII digits.
        fraction => fraction.parse().expect("18 digits fit"),
    };
    let bytes = (u128::from(whole) << shift) + (part << shift) / 10u128.pow(fraction.len() as u32);
    match u64::try_from(bytes) {
        Ok(0) => Err(SizeError::Zero(text.to_owned())),
        Ok(bytes) => Ok(bytes),
        Err(_) => Err(too_large()),
    }
}

fn shift_of(unit: &str) -> Option<u32> {
    let unit = unit.to_ascii_uppercase();
    if unit == "B" {
        return Some(0);
    }
    let (shift, letter) = UNITS
        .into_iter()
        .find(|(_, letter)| unit.starts_with(*letter))?;
    let rest = &unit[letter.len_utf8()..];
    matches!(rest, "" | "B" | "IB").then_some(shift)
}

/// The size in the largest unit that holds it exactly: `8GiB`, `1536MiB`, `1001B`. Parses back to
/// the same number.
pub fn exact_bytes(bytes: u64) -> String {
    for (shift, letter) in UNITS {
        if bytes != 0 && bytes.trailing_zeros() >= shift {
            return format!("{}{letter}iB", bytes >> shift);
        }
    }
    format!("{bytes}B")
}

/// The size to three figures or so, for tables: `7.25GiB`, `512MiB`, `0B`.
pub fn short_bytes(bytes: u64) -> String {
    for (shift, letter) in UNITS {
        if bytes >= 1 << shift {
            // CAST: a table has no use for the 53rd bit.
            let value = bytes as f64 / (1u64 << shift) as f64;
            let decimals = if bytes.trailing_zeros() >= shift || value >= 1000.0 {
                0
            } else if value >= 100.0 {
                1
            } else {
                2
            };
            return format!("{value:.decimals$}{letter}iB");
        }
    }
    format!("{bytes}B")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn units_are_1024_based_in_every_spelling() {
        for text in [
            "8GiB", "8GB", "8G", "8g", "8gib", " 8 GiB ", "8192M", "8.0GiB", "08G",
        ] {
            assert_eq!(parse_bytes(text), Ok(8 << 30), "{text}");
        }
        assert_eq!(parse_bytes("1B"), Ok(1));
        assert_eq!(parse_bytes("1K"), Ok(1 << 10));
        assert_eq!(parse_bytes("512M"), Ok(512 << 20));
        assert_eq!(parse_bytes("2TiB"), Ok(2 << 40));
        assert_eq!(parse_bytes("1.5GiB"), Ok(3 << 29));
        assert_eq!(parse_bytes(".5K"), Ok(512));
        assert_eq!(
            parse_bytes("0.0000000000000000000000001T"),
            Err(SizeError::Zero("0.0000000000000000000000001T".into()))
        );
    }

    #[test]
    fn a_bare_number_gets_the_hint() {
        let error = "20".parse::<MemLimit>().unwrap_err();
        assert_eq!(error, SizeError::NoUnit("20".into()));
        let error = error.to_string();
        assert!(error.contains("20GiB") && error.contains("50%"), "{error}");
    }

    #[test]
    fn what_is_no_size_says_why() {
        let unit = |text: &str, unit: &str| SizeError::UnknownUnit {
            text: text.into(),
            unit: unit.into(),
        };
        for (text, error) in [
            ("", SizeError::NotASize(String::new())),
            ("GiB", SizeError::NotASize("GiB".into())),
            (".", SizeError::NotASize(".".into())),
            ("1.2.3G", SizeError::NotASize("1.2.3G".into())),
            ("-1G", SizeError::NotASize("-1G".into())),
            ("8Gb/s", unit("8Gb/s", "Gb/s")),
            ("8Q", unit("8Q", "Q")),
            ("8i", unit("8i", "i")),
            ("8ß", unit("8ß", "ß")),
            ("0G", SizeError::Zero("0G".into())),
            ("16777216T", SizeError::TooLarge("16777216T".into())),
            (
                "99999999999999999999B",
                SizeError::TooLarge("99999999999999999999B".into()),
            ),
            ("0%", SizeError::PercentRange("0%".into())),
            ("101%", SizeError::PercentRange("101%".into())),
            ("%", SizeError::NotASize("%".into())),
            ("-5%", SizeError::NotASize("-5%".into())),
            ("nan%", SizeError::NotASize("nan%".into())),
            ("1e1%", SizeError::NotASize("1e1%".into())),
        ] {
            assert_eq!(text.parse::<MemLimit>(), Err(error), "{text}");
        }
    }

    #[test]
    fn percentages_resolve_downwards() {
        assert_eq!("50%".parse(), Ok(MemLimit::Percent(50.0)));
        assert_eq!("12.5 %".parse(), Ok(MemLimit::Percent(12.5)));
        assert_eq!(MemLimit::Percent(50.0).resolve(1001), 500);
        assert_eq!(MemLimit::Percent(100.0).resolve(141 << 30), 141 << 30);
        assert_eq!(MemLimit::Bytes(7).resolve(3), 7);
    }

    #[test]
    fn a_limit_out_of_range_travels_as_it_is() {
        for limit in [
            MemLimit::Bytes(0),
            MemLimit::Bytes(u64::MAX),
            MemLimit::Percent(-5.0),
            MemLimit::Percent(1e300),
            MemLimit::Percent(f64::INFINITY),
        ] {
            let wire = serde_json::to_string(&limit).unwrap();
            assert_eq!(serde_json::from_str::<MemLimit>(&wire).unwrap(), limit);
        }
        assert!(serde_json::from_str::<MemLimit>("\"much\"").is_err());
    }

    #[test]
    fn sizes_print_short() {
        for (bytes, text) in [
            (0, "0B"),
            (1023, "1023B"),
            (1024, "1KiB"),
            (1536, "1.50KiB"),
            (8 << 30, "8GiB"),
            (123 << 20 | 1 << 19, "123.5MiB"),
            (1023 << 20 | 1, "1023MiB"),
        ] {
            assert_eq!(short_bytes(bytes), text);
        }
    }

    proptest! {
        #[test]
        fn every_size_prints_to_a_text_that_parses_back(mantissa in 1u64.., shift in 0u32..64) {
            let bytes = (mantissa << shift).max(1);
            prop_assert_eq!(parse_bytes(&exact_bytes(bytes)), Ok(bytes));
            let limit = MemLimit::Bytes(bytes);
            prop_assert_eq!(limit.to_string().parse(), Ok(limit));
        }

        #[test]
        fn every_percentage_prints_to_a_text_that_parses_back(percent in 1e-6f64..=100.0) {
            let limit = MemLimit::Percent(percent);
            prop_assert_eq!(limit.to_string().parse(), Ok(limit));
            prop_assert!(limit.resolve(1 << 40) <= 1 << 40);
        }

        #[test]
        fn no_text_panics(text in "\\PC*") {
            let _ = text.parse::<MemLimit>();
        }

        #[test]
        fn a_short_size_is_within_a_hundredth(bytes in 1u64..1 << 50) {
            let near = parse_bytes(&short_bytes(bytes)).unwrap();
            prop_assert!(near.abs_diff(bytes) as f64 <= bytes as f64 * 0.01, "{} {}", bytes, near);
        }
    }
}
