//! Times as people write and read them: RFC 3339, or how long ago. Printed in UTC, so that lines
//! of several hosts compare as text.

use std::time::{SystemTime, UNIX_EPOCH};

use jiff::Timestamp;

/// Neither a time nor a duration.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is no time: write how long ago, such as 10m or 1.5h, or a time such as 2026-11-23T20:15:00Z or 2026-11-23T21:15:00+01:00"
)]
pub struct BadTime(pub String);

/// Milliseconds since 1970 of a time, or of how long before now it was.
///
/// # Errors
/// [`BadTime`]
pub fn parse_since(text: &str) -> Result<u64, BadTime> {
    since(text, now_unix_ms())
}

fn since(text: &str, now_unix_ms: u64) -> Result<u64, BadTime> {
    if let Ok(span) = control::parse_span(text) {
        let ms = u64::try_from(span.as_millis()).unwrap_or(u64::MAX);
        return Ok(now_unix_ms.saturating_sub(ms));
    }
    let bad = || BadTime(text.to_owned());
    // What follows in brackets is a name that says nothing more.
    if text.contains('[') {
        return Err(bad());
    }
    let time: Timestamp = text.trim().parse().map_err(|_| bad())?;
    // Before 1970 there were no events.
    Ok(u64::try_from(time.as_millisecond()).unwrap_or(0))
}

/// A time in RFC 3339, in UTC, to the millisecond; `None`: after the year 9999.
pub fn rfc3339(unix_ms: u64) -> Option<String> {
    let time = Timestamp::from_millisecond(i64::try_from(unix_ms).ok()?).ok()?;
    Some(format!("{time:.3}"))
}

fn now_unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| {
        u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: u64 = 1_795_466_100_123;

    #[test]
    fn times_are_rfc_3339_in_utc() {
        assert_eq!(rfc3339(0).as_deref(), Some("1970-01-01T00:00:00.000Z"));
        assert_eq!(rfc3339(NOW).as_deref(), Some("2026-11-23T20:35:00.123Z"));
        // A leap day, and the last millisecond of a year.
        assert_eq!(
            rfc3339(1_709_164_800_000).as_deref(),
            Some("2024-02-29T00:00:00.000Z")
        );
        assert_eq!(
            rfc3339(1_798_761_599_999).as_deref(),
            Some("2026-12-31T23:59:59.999Z")
        );
        assert_eq!(rfc3339(u64::MAX), None);
        assert_eq!(rfc3339(i64::MAX as u64), None);
    }

    #[test]
    fn since_is_how_long_ago_or_a_time_with_its_offset() {
        for (text, ms) in [
            ("10m", NOW - 600_000),
            ("1.5h", NOW - 5_400_000),
            ("250ms", NOW - 250),
            ("3000d", NOW - 3000 * 86_400_000),
            ("2026-11-23T20:35:00.123Z", NOW),
            ("2026-11-23T21:35:00.123+01:00", NOW),
            ("2026-11-23T15:05:00.123-05:30", NOW),
            ("2026-11-23t20:35:00.123z", NOW),
            ("1969-12-31T23:59:59Z", 0),
        ] {
            assert_eq!(since(text, NOW), Ok(ms), "{text}");
        }
        // What is printed is understood.
        assert_eq!(since(&rfc3339(NOW).unwrap(), 0), Ok(NOW));
        assert_eq!(since("10m", 5), Ok(0), "before 1970");
    }

    #[test]
    fn what_is_no_time_is_named_with_two_that_are() {
        for bad in [
            "",
            "10",
            "-10m",
            "yesterday",
            "2026-11-23",
            "2026-11-23T20:35:00",
            "2026-13-23T20:35:00Z",
            "2026-02-30T20:35:00Z",
            "20:35",
            "2026-11-23T20:35:00+00:00[UTC]",
        ] {
            let error = since(bad, NOW).unwrap_err();
            assert_eq!(error, BadTime(bad.into()), "{bad}");
            let text = error.to_string();
            assert!(
                text.contains("10m") && text.contains("2026-11-23T"),
                "{text}"
            );
        }
    }
}
