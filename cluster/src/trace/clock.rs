//! Times of a trace: seconds, or calendar times with or without a zone, never a mixture.

use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::tz::TimeZone;

/// More than any trace spans: 100 years, in seconds.
pub(super) const LONGEST_S: f64 = 3.2e9;
/// The year 2200, in seconds since 1970.
const LATEST_S: f64 = 7_258_118_400.0;

/// How a file writes its times. The first time decides: between two ways to write them nothing
/// says how far apart they are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Seconds,
    Local,
    Zoned,
}

/// Reads the times of one file.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Clock(Option<Kind>);

impl Clock {
    /// Seconds since 1970, or as the file counts them.
    ///
    /// # Errors
    /// What is expected instead.
    pub fn read(&mut self, text: &str) -> Result<f64, &'static str> {
        let (seconds, kind) = parse(text.trim())?;
        match *self.0.get_or_insert(kind) {
            before if before == kind => Ok(seconds),
            Kind::Seconds => Err("seconds are expected, as in the lines before"),
            Kind::Local => Err("a time without a zone is expected, as in the lines before"),
            Kind::Zoned => Err("a time with a zone is expected, as in the lines before"),
        }
    }

    /// The same of a file that has no seconds.
    ///
    /// # Errors
    /// What is expected instead.
    pub fn calendar(&mut self, text: &str) -> Result<f64, &'static str> {
        match parse(text.trim())? {
            (_, Kind::Seconds) => Err(EXPECTED),
            _ => self.read(text),
        }
    }
}

/// A calendar time without a zone.
///
/// # Errors
/// What is expected instead.
pub(super) fn local(text: &str) -> Result<f64, &'static str> {
    match parse(text.trim())? {
        (seconds, Kind::Local) => Ok(seconds),
        _ => Err("a time without a zone, such as 2017-10-09 07:01:55, is expected"),
    }
}

const EXPECTED: &str = "a time such as 2017-10-09 07:01:55 is expected";

fn parse(text: &str) -> Result<(f64, Kind), &'static str> {
    if let Ok(seconds) = text.parse::<f64>() {
        let fits = seconds.is_finite() && (0.0..=LONGEST_S).contains(&seconds);
        return match fits {
            true => Ok((seconds, Kind::Seconds)),
            false => {
                Err("seconds from 0 to 3.2e9, or a time such as 2017-10-09 07:01:55, are expected")
            }
        };
    }
    // A date alone would be a time as well.
    if !text.contains(':') {
        return Err(EXPECTED);
    }
    let (timestamp, kind) = match text.parse::<Timestamp>() {
        Ok(timestamp) => (timestamp, Kind::Zoned),
        Err(_) => {
            let local = text.parse::<DateTime>().map_err(|_| {
                "a time that there is, such as 2017-10-09 07:01:55, its zone as +08:00 or Z if any, \
                 is expected"
            })?;
            let as_utc = TimeZone::UTC.to_timestamp(local).map_err(|_| EXPECTED)?;
            (as_utc, Kind::Local)
        }
    };
    let seconds = timestamp.as_duration().as_secs_f64();
    match (0.0..LATEST_S).contains(&seconds) {
        true => Ok((seconds, kind)),
        false => Err("a day between 1970 and 2200 is expected"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_zone_moves_a_time_and_a_mixture_is_refused() {
        let read = |text: &str| Clock::default().read(text);
        assert_eq!(read("1970-01-02 00:00:01"), Ok(86_401.0));
        assert_eq!(read("1970-01-02T08:00:00+08:00"), Ok(86_400.0));
        assert_eq!(read("1970-01-01 19:30:00-0430"), Ok(86_400.0));
        assert_eq!(read("2000-02-29 00:00:00Z"), Ok(951_782_400.0));
        assert_eq!(read("12.5"), Ok(12.5));
        let [zoned, local, seconds] = [
            "2023-03-01 00:18:22+08:00",
            "2023-03-01 00:18:22",
            "1677600000",
        ];
        for (first, then, word) in [
            (zoned, local, "with a zone"),
            (local, zoned, "without a zone"),
            (seconds, local, "seconds"),
            (local, seconds, "without a zone"),
        ] {
            let mut clock = Clock::default();
            clock.read(first).unwrap();
            assert!(
                clock.read(then).unwrap_err().contains(word),
                "{first} {then}"
            );
            assert!(clock.read(first).is_ok());
        }
        // Zones that differ say how far apart the times are.
        let mut clock = Clock::default();
        let [a, b] = ["2023-03-01 08:00:00+08:00", "2023-03-01 00:00:00Z"].map(|t| clock.read(t));
        assert_eq!(a, b);
    }

    #[test]
    fn times_that_there_are_not_are_refused() {
        for text in [
            "",
            " ",
            "None",
            "2017-13-01 00:00:00",
            "2017-02-29 00:00:00",
            "2017-01-00 00:00:00",
            "2017-01-01 24:00:00",
            "2017-01-01 00:60:00",
            "2017-01-01",
            "1969-12-31 23:59:59",
            "9999-01-01 00:00:00",
            "2017-01-01 00:00:00 PDT",
            "2017-01-01 00:00:00+99:00",
            "2017-01-01 00:00:00+8",
            "2017-01-01 +1:00:00",
            "-1",
            "1e300",
            "nan",
            "inf",
            "2017-01-01 00:00:00:00",
            "99999999999999999999-01-01 00:00:00",
        ] {
            assert!(Clock::default().read(text).is_err(), "{text:?}");
        }
        assert!(Clock::default().calendar("5").is_err());
    }
}
