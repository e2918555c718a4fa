//! What a job asks for, from four places: flag, then environment, then job section, then
//! `[defaults]`.

use std::ffi::OsString;
use std::fmt::Display;
use std::str::FromStr;
use std::time::{Duration, SystemTime};

use control::{Class, DeviceSelector, FailMode, MemLimit, OnRefusal, Overflow};

use crate::config::JobSettings;

/// A share outside its range.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no share: write a number above 0 and at most 1, such as 0.5")]
pub struct BadShare(String);

/// # Errors
/// [`BadShare`] outside `0 < share <= 1`.
pub fn check_share(share: f64) -> Result<f64, BadShare> {
    if share > 0.0 && share <= 1.0 {
        Ok(share)
    } else {
        Err(BadShare(share.to_string()))
    }
}

/// # Errors
/// [`BadShare`] for what is no number or out of range.
pub fn parse_share(text: &str) -> Result<f64, BadShare> {
    let bad = || BadShare(text.to_owned());
    let share = text.trim().parse().map_err(|_| bad())?;
    check_share(share).map_err(|_| bad())
}

/// Neither true nor false.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is neither `true` nor `false`")]
pub struct BadFlag(pub String);

/// # Errors
/// [`BadFlag`]
pub fn parse_flag(text: &str) -> Result<bool, BadFlag> {
    text.parse().map_err(|_| BadFlag(text.to_owned()))
}

/// The time that is `span` from now, in Unix milliseconds.
pub fn unix_ms_in(span: Duration) -> u64 {
    let now = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default();
    u64::try_from((now + span).as_millis()).unwrap_or(u64::MAX)
}

/// In nanoseconds.
pub fn nanos(span: Duration) -> u64 {
    u64::try_from(span.as_nanos()).unwrap_or(u64::MAX)
}

/// A variable with a value that makes no sense.
#[derive(Debug, thiserror::Error)]
#[error("the environment variable {name}: {message}")]
pub struct BadVariable {
    name: &'static str,
    message: String,
}

/// The settings in the environment, and the job's name.
///
/// # Errors
/// [`BadVariable`] with the name, the value and the remedy. An empty variable counts as unset.
pub fn from_environment(
    var: impl Fn(&str) -> Option<OsString>,
) -> Result<(JobSettings, Option<String>), BadVariable> {
    let text = |name: &'static str| -> Result<Option<String>, BadVariable> {
        let value = var(name).filter(|value| !value.is_empty());
        value
            .map(OsString::into_string)
            .transpose()
            .map_err(|value| BadVariable {
                name,
                message: format!(
                    "`{}` is no UTF-8 text: set it anew or unset it",
                    value.display()
                ),
            })
    };
    fn parsed<T, E: Display>(
        name: &'static str,
        text: Option<String>,
        parse: impl Fn(&str) -> Result<T, E>,
    ) -> Result<Option<T>, BadVariable> {
        text.map(|text| parse(&text))
            .transpose()
            .map_err(|error| BadVariable {
                name,
                message: error.to_string(),
            })
    }
    let settings = JobSettings {
        mem: parsed("SUBLET_MEM", text("SUBLET_MEM")?, MemLimit::from_str)?,
        share: parsed("SUBLET_SHARE", text("SUBLET_SHARE")?, parse_share)?,
        share_min: parsed("SUBLET_SHARE_MIN", text("SUBLET_SHARE_MIN")?, parse_share)?,
        share_max: parsed("SUBLET_SHARE_MAX", text("SUBLET_SHARE_MAX")?, parse_share)?,
        class: parsed("SUBLET_CLASS", text("SUBLET_CLASS")?, Class::from_str)?,
        devices: parsed("SUBLET_DEVICE", text("SUBLET_DEVICE")?, |list| {
            list.split(',')
                .map(|one| one.trim().parse::<DeviceSelector>())
                .collect()
        })?,
        gang: parsed("SUBLET_GANG", text("SUBLET_GANG")?, parse_flag)?,
        deadline: parsed(
            "SUBLET_DEADLINE",
            text("SUBLET_DEADLINE")?,
            control::parse_span,
        )?,
        work: parsed("SUBLET_WORK", text("SUBLET_WORK")?, control::parse_span)?,
        evictable: parsed("SUBLET_EVICTABLE", text("SUBLET_EVICTABLE")?, parse_flag)?,
        overflow: parsed(
            "SUBLET_OVERFLOW",
            text("SUBLET_OVERFLOW")?,
            Overflow::from_str,
        )?,
        host_memory: parsed(
            "SUBLET_HOST_MEMORY",
            text("SUBLET_HOST_MEMORY")?,
            MemLimit::from_str,
        )?,
        on_arbiter_loss: parsed(
            "SUBLET_ON_ARBITER_LOSS",
            text("SUBLET_ON_ARBITER_LOSS")?,
            FailMode::from_str,
        )?,
        on_refusal: parsed(
            "SUBLET_ON_REFUSAL",
            text("SUBLET_ON_REFUSAL")?,
            OnRefusal::from_str,
        )?,
    };
    let name = parsed("SUBLET_NAME", text("SUBLET_NAME")?, |name| {
        control::check_name(name).map(|()| name.to_owned())
    })?;
    Ok((settings, name))
}

/// `SUBLET_LAUNCHES_PER_ITERATION`, if it is set and not empty.
///
/// # Errors
/// [`BadVariable`] for what is no count above 0.
pub fn launches_per_iteration(
    var: impl Fn(&str) -> Option<OsString>,
) -> Result<Option<u64>, BadVariable> {
    const NAME: &str = "SUBLET_LAUNCHES_PER_ITERATION";
    let Some(value) = var(NAME).filter(|value| !value.is_empty()) else {
        return Ok(None);
    };
    let launches = value.to_str().and_then(|text| text.trim().parse().ok());
    match launches {
        Some(launches) if launches > 0 => Ok(Some(launches)),
        _ => Err(BadVariable {
            name: NAME,
            message: format!(
                "`{}` is no number of launches: write a whole number above 0, or unset it",
                value.display()
            ),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_of_launches_is_a_count() {
        let read = |value: &str| launches_per_iteration(|_| Some(value.into()));
        assert_eq!(launches_per_iteration(|_| None).unwrap(), None);
        assert_eq!(read("").unwrap(), None);
        assert_eq!(read(" 12 ").unwrap(), Some(12));
        for wrong in ["0", "-3", "many", "1.5"] {
            let message = read(wrong).unwrap_err().to_string();
            assert!(
                message.contains(wrong) && message.contains("above 0"),
                "{message}"
            );
        }
    }

    fn read(vars: &[(&str, &str)]) -> Result<(JobSettings, Option<String>), BadVariable> {
        from_environment(|name| {
            let var = vars.iter().find(|(key, _)| *key == name);
            var.map(|(_, value)| OsString::from(value))
        })
    }

    #[test]
    fn every_variable_is_read() {
        let (settings, name) = read(&[
            ("SUBLET_MEM", "50%"),
            ("SUBLET_SHARE", "0.25"),
            ("SUBLET_SHARE_MIN", "0.125"),
            ("SUBLET_SHARE_MAX", "0.5"),
            ("SUBLET_GANG", "false"),
            ("SUBLET_DEADLINE", "90s"),
            ("SUBLET_WORK", "1m"),
            ("SUBLET_CLASS", "opportunistic"),
            ("SUBLET_DEVICE", "0, GPU-ff"),
            ("SUBLET_ON_ARBITER_LOSS", "closed"),
            ("SUBLET_ON_REFUSAL", "open"),
            ("SUBLET_EVICTABLE", "true"),
            ("SUBLET_OVERFLOW", "host"),
            ("SUBLET_HOST_MEMORY", "2GiB"),
            ("SUBLET_NAME", "train"),
        ])
        .unwrap();
        assert_eq!(
            settings,
            JobSettings {
                mem: Some(MemLimit::Percent(50.0)),
                share: Some(0.25),
                share_min: Some(0.125),
                share_max: Some(0.5),
                gang: Some(false),
                deadline: Some(Duration::from_secs(90)),
                work: Some(Duration::from_secs(60)),
                class: Some(Class::Opportunistic),
                devices: Some(vec![
                    DeviceSelector::Index(0),
                    DeviceSelector::Uuid("GPU-ff".into())
                ]),
                on_arbiter_loss: Some(FailMode::Closed),
                on_refusal: Some(OnRefusal::Open),
                evictable: Some(true),
                overflow: Some(Overflow::Host),
                host_memory: Some(MemLimit::Bytes(2 << 30)),
            }
        );
        assert_eq!(name.as_deref(), Some("train"));
        assert_eq!(
            read(&[("SUBLET_MEM", "")]).unwrap().0,
            JobSettings::default()
        );
    }

    #[test]
    fn a_bad_variable_is_named_with_its_value() {
        for (name, value) in [
            ("SUBLET_MEM", "20"),
            ("SUBLET_SHARE", "1.01"),
            ("SUBLET_SHARE", "half"),
            ("SUBLET_SHARE_MAX", "2"),
            ("SUBLET_GANG", "maybe"),
            ("SUBLET_DEADLINE", "soon"),
            ("SUBLET_CLASS", "best"),
            ("SUBLET_DEVICE", "0,x"),
            ("SUBLET_ON_ARBITER_LOSS", "die"),
            ("SUBLET_ON_REFUSAL", "freeze"),
            ("SUBLET_NAME", "a b"),
            ("SUBLET_EVICTABLE", "yes"),
            ("SUBLET_OVERFLOW", "disk"),
            ("SUBLET_HOST_MEMORY", "3"),
        ] {
            let error = read(&[(name, value)]).unwrap_err().to_string();
            let shown = value.rsplit(',').next().unwrap();
            assert!(error.contains(name) && error.contains(shown), "{error}");
        }
    }

    #[test]
    fn shares_end_at_one_and_begin_above_zero() {
        assert_eq!(parse_share("1"), Ok(1.0));
        assert_eq!(parse_share("0.001"), Ok(0.001));
        for bad in ["0", "-0.1", "1.0001", "nan", "inf", "", "50%"] {
            assert_eq!(parse_share(bad), Err(BadShare(bad.into())));
        }
    }
}
