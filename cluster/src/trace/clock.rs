//! Times of a trace: seconds, or calendar times with or without a zone, never a mixture.

/// More than any trace spans: 100 years, in seconds.
pub(super) const LONGEST_S: f64 = 3.2e9;

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
    let (date, rest) = text.split_once([' ', 'T']).ok_or(EXPECTED)?;
    let [year, month, day] = numbers(date, '-').ok_or(EXPECTED)?;
    // What follows the last digit of the time of day is the zone.
    let end = rest.find(['+', '-', 'Z']).unwrap_or(rest.len());
    let (time, zone) = rest.split_at(end);
    let [hour, minute, second] = numbers(time, ':')
        .ok_or("a time such as 2017-10-09 07:01:55, its zone as +08:00 or Z if any, is expected")?;
    let real = (1970..=2200).contains(&year)
        && (1..=days_of(year, month)).contains(&day)
        && hour < 24
        && minute < 60
        && second <= 60;
    if !real {
        return Err("a day between 1970 and 2200 and a time that there is are expected");
    }
    let local = days_since_1970(year, month, day) * 86_400 + hour * 3600 + minute * 60 + second;
    match zone {
        "" => Ok((local as f64, Kind::Local)),
        zone => Ok(((local - offset_s(zone)?) as f64, Kind::Zoned)),
    }
}

/// Three whole numbers with this between them.
fn numbers(text: &str, between: char) -> Option<[i64; 3]> {
    let mut parts = text.split(between).map(|part| {
        let digits = !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
        digits.then(|| part.parse::<i64>().ok()).flatten()
    });
    let three = [parts.next()??, parts.next()??, parts.next()??];
    parts.next().is_none().then_some(three)
}

/// How far a zone is before UTC, in seconds.
fn offset_s(zone: &str) -> Result<i64, &'static str> {
    const EXPECTED: &str = "a zone such as +08:00 or Z is expected after the time";
    if zone == "Z" {
        return Ok(0);
    }
    let (sign, rest) = zone.split_at(1);
    let digits = rest.replace(':', "");
    let number = match digits.len() {
        4 if digits.bytes().all(|byte| byte.is_ascii_digit()) => digits.parse::<i64>().ok(),
        _ => None,
    };
    let (hours, minutes) = number.map(|n| (n / 100, n % 100)).ok_or(EXPECTED)?;
    if hours > 14 || minutes >= 60 {
        return Err(EXPECTED);
    }
    let seconds = hours * 3600 + minutes * 60;
    Ok(if sign == "-" { -seconds } else { seconds })
}

fn days_of(year: i64, month: i64) -> i64 {
    match month {
        2 if year % 4 == 0 && (year % 100 != 0 || year % 400 == 0) => 29,
        2 => 28,
        4 | 6 | 9 | 11 => 30,
        1..=12 => 31,
        _ => 0,
    }
}

/// Days since 1970-01-01 of a Gregorian date (H. Hinnant, "chrono-compatible low-level date
/// algorithms").
fn days_since_1970(year: i64, month: i64, day: i64) -> i64 {
    let year = year - i64::from(month <= 2);
    let era = year.div_euclid(400);
    let of_era = year.rem_euclid(400);
    let of_year = (153 * (month + if month > 2 { -3 } else { 9 }) + 2) / 5 + day - 1;
    era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468
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
