//! The kinds of values that settings have.

use std::fmt::Display;
use std::marker::PhantomData;
use std::str::FromStr;

use serde_json::{Value as Json, json};
use utoipa::PartialSchema;
use utoipa::openapi::{RefOr, Schema};

use crate::name::check_name;
use crate::setting::{Form, Kind};
use crate::size::MemLimit;
use crate::span::{Span, parse_span, short_span};
use crate::values::{
    Class, Deadline, DeviceSelector, FailMode, Misbehaviour, OnRefusal, Overflow, PolicyChoice,
    SliceMode,
};

/// `"8GiB"` or `"50%"`
#[derive(Debug)]
pub struct Size;

impl Kind for Size {
    type Value = MemLimit;

    fn travels() -> RefOr<Schema> {
        <Self::Value as PartialSchema>::schema()
    }

    const PLACEHOLDER: &'static str = "SIZE|PCT";
    const FORMS: &'static [Form] = &[Form::Text];
    const EXAMPLE: &'static str = "\"8GiB\"";

    fn parse(text: &str) -> Result<MemLimit, String> {
        parsed(text)
    }

    fn schema() -> Json {
        json!({
            "type": "string",
            "pattern": r"^\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*([KMGTkmgt]([Ii]?[Bb])?|[Bb]|%)\s*$",
            "examples": ["8GiB", "512M", "50%"],
        })
    }
}

/// Part of a device's time: `0.5` or `"50%"`, above 0 and at most all of it.
#[derive(Debug)]
pub struct Share;

impl Kind for Share {
    type Value = f64;

    fn travels() -> RefOr<Schema> {
        <Self::Value as PartialSchema>::schema()
    }

    const PLACEHOLDER: &'static str = "F|PCT";
    const FORMS: &'static [Form] = &[Form::Number, Form::Text];
    const EXAMPLE: &'static str = "0.5";

    fn parse(text: &str) -> Result<f64, String> {
        let trimmed = text.trim();
        let share = match trimmed.strip_suffix('%') {
            None => trimmed.parse().ok(),
            Some(percent) => percent.trim_end().parse::<f64>().ok().map(|p| p / 100.0),
        };
        share
            .filter(|share| *share > 0.0 && *share <= 1.0)
            .ok_or_else(|| {
                format!("`{text}` is no share: write a number above 0 and at most 1, or a percentage, such as 0.5 or 50%")
            })
    }

    fn schema() -> Json {
        json!({ "anyOf": [
            { "type": "number", "exclusiveMinimum": 0, "maximum": 1 },
            { "type": "string", "pattern": r"^\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*%\s*$", "examples": ["50%"] },
        ] })
    }
}

/// A closed set of words.
pub trait Words: FromStr<Err: Display> + utoipa::ToSchema {
    /// The words with `|` between.
    const PLACEHOLDER: &'static str;
    /// One of them as the quota file writes it.
    const EXAMPLE: &'static str;
}

macro_rules! words {
    ($($type:ty: $words:literal, such as $example:literal;)+) => {
        $(impl Words for $type {
            const PLACEHOLDER: &'static str = $words;
            const EXAMPLE: &'static str = $example;
        })+
    };
}

words! {
    Class: "guaranteed|opportunistic", such as "\"opportunistic\"";
    FailMode: "open|freeze|closed", such as "\"freeze\"";
    OnRefusal: "open|closed", such as "\"closed\"";
    Overflow: "host|fail", such as "\"host\"";
    SliceMode: "exclusive|concurrent|auto|lend", such as "\"auto\"";
    Misbehaviour: "report|demote|kill", such as "\"report\"";
}

/// One word of a closed set.
#[derive(Debug)]
pub struct Word<T>(PhantomData<T>);

impl<T: Words> Kind for Word<T> {
    type Value = T;

    fn travels() -> RefOr<Schema> {
        <Self::Value as PartialSchema>::schema()
    }

    const PLACEHOLDER: &'static str = T::PLACEHOLDER;
    const FORMS: &'static [Form] = &[Form::Text];
    const EXAMPLE: &'static str = T::EXAMPLE;

    fn parse(text: &str) -> Result<T, String> {
        parsed(text)
    }

    fn schema() -> Json {
        json!({ "enum": T::PLACEHOLDER.split('|').collect::<Vec<_>>() })
    }
}

/// A name of one's own choice, as jobs have them.
#[derive(Debug)]
pub struct Name;

impl Kind for Name {
    type Value = String;

    fn travels() -> RefOr<Schema> {
        <Self::Value as PartialSchema>::schema()
    }

    const PLACEHOLDER: &'static str = "NAME";
    const FORMS: &'static [Form] = &[Form::Text];
    const EXAMPLE: &'static str = "\"rl\"";

    fn parse(text: &str) -> Result<String, String> {
        check_name(text).map_err(|error| error.to_string())?;
        Ok(text.to_owned())
    }

    fn schema() -> Json {
        json!({
            "type": "string",
            "pattern": r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$",
            "examples": ["rl"],
        })
    }
}

/// `true` or `false`; as a flag without a value, `true`.
#[derive(Debug)]
pub struct Flag;

impl Kind for Flag {
    type Value = bool;

    fn travels() -> RefOr<Schema> {
        <Self::Value as PartialSchema>::schema()
    }

    const PLACEHOLDER: &'static str = "true|false";
    const FORMS: &'static [Form] = &[Form::Boolean];
    const EXAMPLE: &'static str = "true";

    fn parse(text: &str) -> Result<bool, String> {
        text.parse()
            .map_err(|_| format!("`{text}` is neither true nor false: write one of them"))
    }

    fn schema() -> Json {
        json!({ "type": "boolean" })
    }
}

/// A duration: `"90s"`, `"1.5h"`
#[derive(Debug)]
pub struct Time;

impl Kind for Time {
    type Value = Span;

    fn travels() -> RefOr<Schema> {
        <Self::Value as PartialSchema>::schema()
    }

    const PLACEHOLDER: &'static str = "TIME";
    const FORMS: &'static [Form] = &[Form::Text];
    const EXAMPLE: &'static str = "\"40m\"";

    fn parse(text: &str) -> Result<Span, String> {
        parsed(text)
    }

    fn schema() -> Json {
        json!({
            "type": "string",
            "pattern": r"^\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*(ns|us|ms|s|m|h|d)\s*$",
            "examples": ["90s", "1.5h"],
        })
    }
}

/// A [`Deadline`], as the time from now.
#[derive(Debug)]
pub struct FromNow;

impl Kind for FromNow {
    type Value = Deadline;

    fn travels() -> RefOr<Schema> {
        <Self::Value as PartialSchema>::schema()
    }

    const PLACEHOLDER: &'static str = "TIME";
    const FORMS: &'static [Form] = &[Form::Text];
    const EXAMPLE: &'static str = "\"90m\"";

    fn parse(text: &str) -> Result<Deadline, String> {
        Time::parse(text).map(Deadline::In)
    }

    fn schema() -> Json {
        Time::schema()
    }
}

/// The length of a slice: a duration from [`Self::LEAST`] to [`Self::MOST`].
#[derive(Debug)]
pub struct Quantum;

impl Quantum {
    pub const LEAST: Span = Span::from_micros(500);
    pub const MOST: Span = Span::from_micros(1_000_000);

    pub fn holds(span: Span) -> bool {
        (Self::LEAST..=Self::MOST).contains(&span)
    }
}

impl Kind for Quantum {
    type Value = Span;

    fn travels() -> RefOr<Schema> {
        <Self::Value as PartialSchema>::schema()
    }

    const PLACEHOLDER: &'static str = "TIME";
    const FORMS: &'static [Form] = &[Form::Text];
    const EXAMPLE: &'static str = "\"5ms\"";

    fn parse(text: &str) -> Result<Span, String> {
        parse_span(text)
            .ok()
            .map(Span)
            .filter(|span| Self::holds(*span))
            .ok_or_else(|| {
                format!(
                    "`{text}` is no length of a slice: write a duration from {} to {}, such as 5ms",
                    short_span(Self::LEAST.0),
                    short_span(Self::MOST.0)
                )
            })
    }

    fn schema() -> Json {
        Time::schema()
    }
}

/// A whole number.
#[derive(Debug)]
pub struct Count<const LEAST: u64, const MOST: u64>;

impl<const LEAST: u64, const MOST: u64> Kind for Count<LEAST, MOST> {
    type Value = u64;

    fn travels() -> RefOr<Schema> {
        <Self::Value as PartialSchema>::schema()
    }

    const PLACEHOLDER: &'static str = "N";
    const FORMS: &'static [Form] = &[Form::Number];
    const EXAMPLE: &'static str = "2";

    fn parse(text: &str) -> Result<u64, String> {
        text.trim()
            .parse()
            .ok()
            .filter(|count| (LEAST..=MOST).contains(count))
            .ok_or_else(|| {
                if MOST == u64::MAX {
                    format!("`{text}` is out of range: write a whole number, {LEAST} or more")
                } else {
                    format!("`{text}` is out of range: write a whole number from {LEAST} to {MOST}")
                }
            })
    }

    fn schema() -> Json {
        let mut schema = json!({ "type": "integer", "minimum": LEAST });
        if MOST < u64::MAX {
            schema["maximum"] = MOST.into();
        }
        schema
    }
}

/// A number.
#[derive(Debug)]
pub struct Ratio<const LEAST: u32, const MOST: u32>;

impl<const LEAST: u32, const MOST: u32> Kind for Ratio<LEAST, MOST> {
    type Value = f64;

    fn travels() -> RefOr<Schema> {
        <Self::Value as PartialSchema>::schema()
    }

    const PLACEHOLDER: &'static str = "F";
    const FORMS: &'static [Form] = &[Form::Number];
    const EXAMPLE: &'static str = "12.5";

    fn parse(text: &str) -> Result<f64, String> {
        text.trim()
            .parse()
            .ok()
            .filter(|ratio| (f64::from(LEAST)..=f64::from(MOST)).contains(ratio))
            .ok_or_else(|| {
                format!(
                    "`{text}` is out of range: write a number from {LEAST} to {MOST}, such as 10"
                )
            })
    }

    fn schema() -> Json {
        json!({ "type": "number", "minimum": LEAST, "maximum": MOST })
    }
}

/// An index, a UUID, or several of those.
#[derive(Debug)]
pub struct Devices;

impl Kind for Devices {
    type Value = Vec<DeviceSelector>;

    fn travels() -> RefOr<Schema> {
        <Self::Value as PartialSchema>::schema()
    }

    const PLACEHOLDER: &'static str = "UUID|INDEX";
    const FORMS: &'static [Form] = &[Form::Number, Form::Text, Form::List];
    const EXAMPLE: &'static str = "[0, \"GPU-ff\"]";

    fn parse(text: &str) -> Result<Vec<DeviceSelector>, String> {
        if text.trim().is_empty() {
            return Err("no device is named: leave it out to let the arbiter choose".into());
        }
        text.split(',').map(|one| parsed(one.trim())).collect()
    }

    fn schema() -> Json {
        let [index, uuid] = device_schemas();
        json!({ "anyOf": [
            index,
            uuid,
            { "type": "array", "minItems": 1, "items": { "anyOf": [index, uuid] } },
        ] })
    }
}

/// One device: an index or a UUID; `None` is every device, written `"*"`.
#[derive(Debug)]
pub struct DeviceMatch;

impl Kind for DeviceMatch {
    type Value = Option<DeviceSelector>;

    fn travels() -> RefOr<Schema> {
        <Self::Value as PartialSchema>::schema()
    }

    const PLACEHOLDER: &'static str = "UUID|INDEX|*";
    const FORMS: &'static [Form] = &[Form::Number, Form::Text];
    const EXAMPLE: &'static str = "1";

    fn parse(text: &str) -> Result<Option<DeviceSelector>, String> {
        if text == "*" {
            return Ok(None);
        }
        parsed(text)
            .map(Some)
            .map_err(|error| format!("{error}, or \"*\" for every device"))
    }

    fn schema() -> Json {
        let [index, uuid] = device_schemas();
        json!({ "anyOf": [index, uuid, { "const": "*" }] })
    }
}

/// A policy's name, or a table of its name and its parameters. Which there are is not known here.
#[derive(Debug)]
pub struct Policy;

impl Kind for Policy {
    type Value = PolicyChoice;

    fn travels() -> RefOr<Schema> {
        <Self::Value as PartialSchema>::schema()
    }

    const PLACEHOLDER: &'static str = "POLICY";
    const FORMS: &'static [Form] = &[Form::Text, Form::Table];
    const EXAMPLE: &'static str = "\"stride\"";

    fn parse(text: &str) -> Result<PolicyChoice, String> {
        parsed(text)
    }

    fn schema() -> Json {
        let name = json!({ "type": "string", "minLength": 1, "examples": ["stride"] });
        json!({ "anyOf": [
            name,
            {
                "type": "object",
                "properties": { "name": name },
                "required": ["name"],
                "additionalProperties": { "type": ["number", "string", "boolean"] },
            },
        ] })
    }
}

fn parsed<T: FromStr<Err: Display>>(text: &str) -> Result<T, String> {
    text.parse().map_err(|error: T::Err| error.to_string())
}

fn device_schemas() -> [Json; 2] {
    [
        json!({ "type": "integer", "minimum": 0, "maximum": u32::MAX }),
        json!({ "type": "string", "pattern": "^(GPU-|MIG-)[0-9A-Fa-f-]+$|^[0-9]+$" }),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_parts_or_percentages_above_zero_and_at_most_one() {
        for (text, share) in [
            ("1", 1.0),
            ("0.001", 0.001),
            ("50%", 0.5),
            (" 12.5 % ", 0.125),
        ] {
            assert_eq!(Share::parse(text), Ok(share), "{text}");
        }
        for bad in [
            "0", "-0.1", "1.0001", "nan", "inf", "", "0%", "101%", "%", "nan%",
        ] {
            let error = Share::parse(bad).expect_err(bad);
            assert!(
                error.contains(&format!("`{bad}`")) && error.contains("50%"),
                "{error}"
            );
        }
    }

    #[test]
    fn counts_and_slices_end_where_they_end() {
        assert_eq!(Count::<1, 64>::parse("64"), Ok(64));
        for bad in ["0", "65", "1.5", "-1", "many", ""] {
            let error = Count::<1, 64>::parse(bad).expect_err(bad);
            assert!(error.contains("1 to 64"), "{error}");
        }
        assert_eq!(Count::<1, { u64::MAX }>::parse(" 12 "), Ok(12));
        for (text, us) in [
            ("5ms", 5000),
            ("0.5ms", 500),
            ("1s", 1_000_000),
            ("7500us", 7500),
        ] {
            assert_eq!(Quantum::parse(text), Ok(Span::from_micros(us)), "{text}");
        }
        for bad in ["5", "0.4ms", "1001ms", "soon", ""] {
            let error = Quantum::parse(bad).expect_err(bad);
            assert!(
                error.contains(&format!("`{bad}`")) && error.contains("0.5ms to 1s"),
                "{error}"
            );
        }
    }

    #[test]
    fn every_word_of_a_placeholder_is_known() {
        fn check<T: Words + PartialEq>(known: &[T]) {
            let words: Vec<&str> = T::PLACEHOLDER.split('|').collect();
            assert_eq!(words.len(), known.len());
            for word in words {
                let value = Word::<T>::parse(word).expect(word);
                assert!(known.contains(&value), "{word}");
            }
            assert!(Word::<T>::parse("colour").is_err_and(|error| error.contains("`colour`")));
        }
        check(Class::ALL);
        check(FailMode::ALL);
        check(OnRefusal::ALL);
        check(Overflow::ALL);
        check(Misbehaviour::ALL);
        check(SliceMode::ALL);
    }

    #[test]
    fn devices_are_a_list() {
        let expected = vec![
            DeviceSelector::Index(0),
            DeviceSelector::Uuid("GPU-ff".into()),
        ];
        assert_eq!(Devices::parse("0, GPU-ff"), Ok(expected));
        assert!(Devices::parse("0,x").is_err_and(|error| error.contains("`x`")));
        assert!(Devices::parse("").is_err_and(|error| error.contains("leave it out")));
        assert_eq!(DeviceMatch::parse("*"), Ok(None));
    }
}
