//! One value of the quota file to its domain type. What is wrong is a sentence with the value and
//! the remedy; where it stands is added by the reader.

use std::fmt::Display;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use control::{DeviceSelector, MemLimit, Parameter, PolicyChoice, SliceMode};
use toml::Spanned;
use toml::de::DeValue;

use super::error::Source;
use super::keys::{PROCESSES, QUANTUM_MS, RATIO};
use super::pattern::Pattern;

/// A value with its place.
pub struct Value<'v, 't> {
    value: &'v Spanned<DeValue<'t>>,
    source: Source<'v>,
}

impl<'v, 't> Value<'v, 't> {
    pub fn new(value: &'v Spanned<DeValue<'t>>, source: Source<'v>) -> Self {
        Self { value, source }
    }

    fn quote(&self) -> String {
        self.source.quote(self.value.span())
    }

    fn text(&self, remedy: &str) -> Result<&str, String> {
        match self.value.get_ref() {
            DeValue::String(text) => Ok(text),
            _ => Err(format!("`{}` is no text: {remedy}", self.quote())),
        }
    }

    fn number(&self, remedy: &str) -> Result<f64, String> {
        let number = match self.value.get_ref() {
            DeValue::Float(number) => number.as_str().parse().ok(),
            DeValue::Integer(number) => i64::from_str_radix(number.as_str(), number.radix())
                .ok()
                // CAST: anything beyond 2^53 is out of every range here.
                .map(|number| number as f64),
            _ => None,
        };
        number.ok_or_else(|| format!("`{}` is no number: {remedy}", self.quote()))
    }

    fn parameter(&self) -> Result<Parameter, String> {
        match self.value.get_ref() {
            DeValue::Boolean(flag) => Ok(Parameter::Flag(*flag)),
            DeValue::String(word) => Ok(Parameter::Word(word.to_string())),
            _ => self
                .number("a parameter is a number, a word in quotes, true or false")
                .map(Parameter::Number),
        }
    }

    fn parsed<T: FromStr<Err: Display>>(&self, remedy: &str) -> Result<T, String> {
        let text = self.text(remedy)?;
        text.parse().map_err(|error: T::Err| error.to_string())
    }
}

pub fn size(value: &Value<'_, '_>) -> Result<MemLimit, String> {
    // A bare number gets the same hint as on the command line.
    if matches!(
        value.value.get_ref(),
        DeValue::Integer(_) | DeValue::Float(_)
    ) {
        let number = value.quote();
        return match number.parse::<MemLimit>() {
            Err(error) => Err(error.to_string()),
            Ok(_) => Err(format!("`{number}` is no text: write \"{number}\"")),
        };
    }
    value.parsed("write a size such as \"20GiB\" or \"50%\"")
}

pub fn share(value: &Value<'_, '_>) -> Result<f64, String> {
    let remedy = "write a number above 0 and at most 1, such as 0.5";
    let share = value.number(remedy)?;
    crate::settings::check_share(share).map_err(|error| error.to_string())
}

pub fn quantum_us(value: &Value<'_, '_>) -> Result<u64, String> {
    let (least, most) = QUANTUM_MS;
    let remedy = format!("write milliseconds from {least} to {most}, such as 5");
    let ms = value.number(&remedy)?;
    if !(least..=most).contains(&ms) {
        return Err(format!("`{}` is out of range: {remedy}", value.quote()));
    }
    // CAST: in range, so below 2^20.
    Ok((ms * 1000.0).round() as u64)
}

/// A policy that there is, with parameters that make sense to it.
pub fn policy(value: &Value<'_, '_>) -> Result<PolicyChoice, String> {
    let remedy = "write a policy's name in quotes, or { name = \"...\", parameter = number }";
    let choice = match value.value.get_ref() {
        DeValue::String(text) => text
            .parse::<PolicyChoice>()
            .map_err(|error| error.to_string())?,
        DeValue::Table(table) => {
            let mut choice = PolicyChoice::default();
            for (key, value_of) in table {
                let inner = Value::new(value_of, value.source);
                if key.get_ref() == "name" {
                    choice.name = inner.text(remedy)?.to_owned();
                } else {
                    choice
                        .parameters
                        .insert(key.get_ref().to_string(), inner.parameter()?);
                }
            }
            if choice.name.is_empty() {
                return Err(format!("`{}` names no policy: {remedy}", value.quote()));
            }
            choice
        }
        _ => return Err(format!("`{}` is no policy: {remedy}", value.quote())),
    };
    Ok(choice)
}

pub fn holders(value: &Value<'_, '_>) -> Result<u32, String> {
    let remedy = "write a whole number from 1 to 64";
    let number = value.number(remedy)?;
    if !(1.0..=64.0).contains(&number) || number.fract() != 0.0 {
        return Err(format!("`{}` is out of range: {remedy}", value.quote()));
    }
    // CAST: whole and in range.
    Ok(number as u32)
}

pub fn processes(value: &Value<'_, '_>) -> Result<u32, String> {
    let remedy = format!("write a whole number from 1 to {PROCESSES}");
    let number = value.number(&remedy)?;
    if !(1.0..=PROCESSES).contains(&number) || number.fract() != 0.0 {
        return Err(format!("`{}` is out of range: {remedy}", value.quote()));
    }
    // CAST: whole and in range.
    Ok(number as u32)
}

pub fn ratio(value: &Value<'_, '_>) -> Result<f64, String> {
    let (least, most) = RATIO;
    let remedy = format!("write a number from {least} to {most}, such as 10");
    let ratio = value.number(&remedy)?;
    if (least..=most).contains(&ratio) {
        Ok(ratio)
    } else {
        Err(format!("`{}` is out of range: {remedy}", value.quote()))
    }
}

pub fn flag(value: &Value<'_, '_>) -> Result<bool, String> {
    match value.value.get_ref() {
        DeValue::Boolean(flag) => Ok(*flag),
        _ => Err(format!("`{}` is neither true nor false", value.quote())),
    }
}

pub fn span(value: &Value<'_, '_>) -> Result<Duration, String> {
    let remedy = "write a duration such as \"90s\" or \"1.5h\"";
    let text = value.text(remedy)?;
    control::parse_span(text).map_err(|error| error.to_string())
}

pub fn word<T: FromStr<Err: Display>>(value: &Value<'_, '_>) -> Result<T, String> {
    value.parsed("write one of its words in quotes")
}

pub fn mode(value: &Value<'_, '_>) -> Result<SliceMode, String> {
    let remedy = "write \"exclusive\", \"concurrent\" or \"auto\"";
    let text = value.text(remedy)?;
    text.parse()
        .map_err(|_| format!("`{text}` is no mode: {remedy}"))
}

pub fn pattern(value: &Value<'_, '_>) -> Result<Pattern, String> {
    let text = value.text("write a name or a pattern in quotes, such as \"train*\"")?;
    if text.is_empty() {
        return Err("`\"\"` matches nothing: write a name, or \"*\" for all".into());
    }
    Ok(Pattern::new(text))
}

const DEVICE_REMEDY: &str = "write an index such as 0, or a UUID in quotes such as \"GPU-5a1c...\"";

fn one_device(value: &Value<'_, '_>) -> Result<DeviceSelector, String> {
    match value.value.get_ref() {
        DeValue::Integer(number) => u32::from_str_radix(number.as_str(), number.radix())
            .map(DeviceSelector::Index)
            .map_err(|_| format!("`{}` is no device: {DEVICE_REMEDY}", value.quote())),
        _ => value.parsed(DEVICE_REMEDY),
    }
}

pub fn devices(value: &Value<'_, '_>) -> Result<Vec<DeviceSelector>, String> {
    let DeValue::Array(list) = value.value.get_ref() else {
        return one_device(value).map(|device| vec![device]);
    };
    if list.is_empty() {
        return Err("`[]` names no device: leave the key out to let the arbiter choose".into());
    }
    let source = value.source;
    list.iter()
        .map(|value| one_device(&Value::new(value, source)))
        .collect()
}

/// `None` for every device.
pub fn device_match(value: &Value<'_, '_>) -> Result<Option<DeviceSelector>, String> {
    match value.value.get_ref() {
        DeValue::String(text) if text == "*" => Ok(None),
        _ => one_device(value)
            .map(Some)
            .map_err(|error| format!("{error}, or \"*\" for every device")),
    }
}
pub fn url(value: &Value<'_, '_>) -> Result<String, String> {
    let text = value.text("write the hook's address such as \"http://10.0.0.1:7070\"")?;
    // TIMEOUT: of requests, of which none is made here.
    cluster::live::http::client::Client::new(text, "", Duration::from_secs(1))
        .map(|_| text.to_owned())
        .map_err(|error| error.to_string())
}

pub fn file_path(value: &Value<'_, '_>) -> Result<PathBuf, String> {
    let path = PathBuf::from(value.text("write a path such as \"/etc/sublet/token\"")?);
    if path.is_absolute() {
        return Ok(path);
    }
    Err(format!(
        "`{}` is no absolute path: write one that begins with /",
        path.display()
    ))
}

pub fn variables(value: &Value<'_, '_>) -> Result<Vec<String>, String> {
    let names = value.text("write names such as \"LD_LIBRARY_PATH,NCCL_SOCKET_IFNAME\"")?;
    let name = |name: &str| {
        let name = name.trim();
        if name.is_empty() || name.contains(['=', '\0']) {
            return Err(format!(
                "`{}` is no name of a variable: write names with commas between",
                name.escape_debug()
            ));
        }
        Ok(name.to_owned())
    };
    names.split(',').map(name).collect()
}

pub fn node(value: &Value<'_, '_>) -> Result<String, String> {
    let name = value.text("write a name such as \"node-7\"")?;
    control::check_name(name)
        .map(|()| name.to_owned())
        .map_err(|error| error.to_string())
}

pub fn user(value: &Value<'_, '_>) -> Result<String, String> {
    let name = value.text("write a login name such as \"train\"")?;
    if name.trim().is_empty() || name.contains(['\0', '\n', '/']) {
        return Err(format!(
            "`{}` is no login name: write one, or a user's number",
            name.escape_debug()
        ));
    }
    Ok(name.to_owned())
}
