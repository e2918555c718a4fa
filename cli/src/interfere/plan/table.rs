//! A table of a plan, from which values are taken with their places.

use std::ops::Range;

use control::setting::Kind;
use policy::names::nearest;
use serde_json::{Value, json};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::config::{ConfigError, Source, scalar};

/// Any text.
pub struct Text;

impl Kind for Text {
    type Value = String;
    const PLACEHOLDER: &'static str = "TEXT";
    const FORMS: &'static [control::setting::Form] = &[control::setting::Form::Text];
    const EXAMPLE: &'static str = "\"text\"";

    fn parse(text: &str) -> Result<String, String> {
        Ok(text.to_owned())
    }

    fn schema() -> Value {
        json!({ "type": "string" })
    }
}

/// The name of a job.
pub struct JobName;

impl Kind for JobName {
    type Value = String;
    const PLACEHOLDER: &'static str = "NAME";
    const FORMS: &'static [control::setting::Form] = &[control::setting::Form::Text];
    const EXAMPLE: &'static str = "\"train\"";

    fn parse(text: &str) -> Result<String, String> {
        control::check_name(text).map_err(|error| error.to_string())?;
        Ok(text.to_owned())
    }

    fn schema() -> Value {
        json!({ "type": "string" })
    }
}

/// A value, and where it stands in the file.
pub type Placed<T> = (T, Range<usize>);

/// A table of the file, from which keys are taken.
pub struct Table<'s, 't> {
    pub source: Source<'s>,
    heading: &'static str,
    pub span: Range<usize>,
    pub table: DeTable<'t>,
}

impl<'s, 't> Table<'s, 't> {
    pub fn empty(source: Source<'s>, heading: &'static str) -> Self {
        Self {
            source,
            heading,
            span: 0..0,
            table: DeTable::new(),
        }
    }

    /// Refuses keys that do not belong there, before any value is looked at.
    pub fn new(
        source: Source<'s>,
        heading: &'static str,
        table: Spanned<DeTable<'t>>,
        keys: &[&str],
    ) -> Result<Self, ConfigError> {
        let span = table.span();
        let table = table.into_inner();
        let unknown = table
            .keys()
            .filter(|key| !keys.contains(&key.get_ref().as_ref()))
            .min_by_key(|key| key.span().start);
        if let Some(key) = unknown {
            let remedy = match nearest(key.get_ref(), keys.iter().copied()) {
                Some(near) => format!("did you mean `{near}`?"),
                None => format!("it has {}", keys.join(", ")),
            };
            let message = format!("unknown key `{}` in {heading}: {remedy}", key.get_ref());
            return Err(source.wrong(key.span(), message));
        }
        Ok(Self {
            source,
            heading,
            span,
            table,
        })
    }

    pub fn of(
        source: Source<'s>,
        heading: &'static str,
        value: Spanned<DeValue<'t>>,
        keys: &[&str],
    ) -> Result<Self, ConfigError> {
        let span = value.span();
        match value.into_inner() {
            DeValue::Table(table) => Self::new(source, heading, Spanned::new(span, table), keys),
            _ => {
                let message = format!("{heading} is a table: write its keys below it");
                Err(source.wrong(span, message))
            }
        }
    }

    pub fn take(&mut self, key: &str) -> Option<Spanned<DeValue<'t>>> {
        self.table.remove(key)
    }

    /// The items of `[[key]]`.
    pub fn tables(&mut self, key: &str) -> Result<Vec<Spanned<DeValue<'t>>>, ConfigError> {
        let Some(value) = self.take(key) else {
            return Ok(Vec::new());
        };
        let span = value.span();
        match value.into_inner() {
            DeValue::Array(list) => Ok(list.into_iter().collect()),
            _ => {
                let message = format!("`{key}` is written as one table here: write [[{key}]]");
                Err(self.source.wrong(span, message))
            }
        }
    }

    /// A value of a kind that `control` knows, and where it stands.
    pub fn kind<K: Kind>(&mut self, key: &str) -> Result<Option<Placed<K::Value>>, ConfigError> {
        use control::setting::Form;
        let Some(value) = self.take(key) else {
            return Ok(None);
        };
        let at = value.span();
        let form = match value.get_ref() {
            DeValue::String(_) => Some(Form::Text),
            DeValue::Integer(_) | DeValue::Float(_) => Some(Form::Number),
            DeValue::Boolean(_) => Some(Form::Boolean),
            _ => None,
        };
        let fits = form.is_some_and(|form| K::FORMS.contains(&form));
        let read = match scalar(value.get_ref()).filter(|_| fits) {
            Some(text) => K::parse(&text),
            None => Err(format!(
                "`{}` is written as in {key} = {}",
                self.source.quote(at.clone()),
                K::EXAMPLE
            )),
        };
        match read {
            Ok(value) => Ok(Some((value, at))),
            Err(message) => Err(self.source.wrong(at, format!("{key}: {message}"))),
        }
    }

    pub fn need<K: Kind>(&mut self, key: &str) -> Result<Placed<K::Value>, ConfigError> {
        match self.kind::<K>(key)? {
            Some(value) => Ok(value),
            None => {
                let message = format!("{} needs {key} = {}", self.heading, K::EXAMPLE);
                Err(self.source.wrong(self.span.clone(), message))
            }
        }
    }

    /// A list of texts, each with its place.
    pub fn texts(&mut self, key: &str) -> Result<Option<Vec<Placed<String>>>, ConfigError> {
        let Some(value) = self.take(key) else {
            return Ok(None);
        };
        let span = value.span();
        let wrong = |at: Range<usize>| {
            let quote = self.source.quote(at.clone());
            let message = format!("{key}: `{quote}` is written as in {key} = [\"a\", \"b\"]");
            self.source.wrong(at, message)
        };
        let DeValue::Array(list) = value.get_ref() else {
            return Err(wrong(span));
        };
        let texts = list.iter().map(|item| match item.get_ref() {
            DeValue::String(text) => Ok((text.to_string(), item.span())),
            _ => Err(wrong(item.span())),
        });
        texts.collect::<Result<Vec<_>, _>>().map(Some)
    }
}
