//! Settings, each declared once: [`settings!`](crate::settings) makes a struct of them and a table.
//!
//! From the table come the keys of the quota file and its JSON Schema, the flags and environment
//! variables of the command line, the order in which these are merged, and the tables of the
//! documentation. The struct travels to the arbiter, which keeps it as it is.
//!
//! A [`Kind`] says how a value is written. There is one parser for each, whatever the text comes
//! from.

use serde_json::Value as Json;
use utoipa::openapi::schema::SchemaType;
use utoipa::openapi::{ObjectBuilder, RefOr, Schema};

/// A kind of value: what people write for it, and what that means.
pub trait Kind {
    type Value;
    /// Placeholder in the help of a flag.
    const PLACEHOLDER: &'static str;
    /// How the quota file writes it.
    const FORMS: &'static [Form];
    /// A value as the quota file writes it.
    const EXAMPLE: &'static str;

    /// # Errors
    /// One sentence: the text, and what to write instead.
    fn parse(text: &str) -> Result<Self::Value, String>;

    /// What a JSON Schema says of it.
    fn schema() -> Json;

    /// The same of the value as it travels to the arbiter; anything, where it never does.
    fn travels() -> RefOr<Schema> {
        ObjectBuilder::new()
            .schema_type(SchemaType::AnyValue)
            .into()
    }
}

/// A form that a value has in the quota file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// `"text"`
    Text,
    /// `0.5`
    Number,
    /// `true`
    Boolean,
    /// `[0, "text"]`: its parser takes the items with commas between.
    List,
    /// `{ name = "text", key = 1 }`: its parser takes `text:key=1`.
    Table,
}

/// What is known of a [`Kind`] without its type.
#[derive(Debug, Clone, Copy)]
pub struct KindInfo {
    pub placeholder: &'static str,
    pub forms: &'static [Form],
    pub example: &'static str,
    pub schema: fn() -> Json,
    pub check: fn(&str) -> Result<(), String>,
}

impl KindInfo {
    pub const fn of<K: Kind>() -> Self {
        Self {
            placeholder: K::PLACEHOLDER,
            forms: K::FORMS,
            example: K::EXAMPLE,
            schema: K::schema,
            check: |text| K::parse(text).map(drop),
        }
    }

    pub fn takes(&self, form: Form) -> bool {
        self.forms.contains(&form)
    }
}

/// What a setting is, whatever struct it is part of.
#[derive(Debug, Clone, Copy)]
pub struct About {
    /// In the quota file. Flag and variable follow from it.
    pub key: &'static str,
    /// The documentation, line by line.
    lines: &'static [&'static str],
    /// What holds where it is not set.
    pub unset: &'static str,
    /// It may be changed while the job, or the arbiter, runs.
    pub live: bool,
    /// An administrator may say how much of it a job gets at the most.
    pub capped: bool,
    pub kind: KindInfo,
}

impl About {
    #[doc(hidden)]
    pub const fn new(
        key: &'static str,
        lines: &'static [&'static str],
        unset: &'static str,
        (live, capped): (bool, bool),
        kind: KindInfo,
    ) -> Self {
        Self {
            key,
            lines,
            unset,
            live,
            capped,
            kind,
        }
    }

    /// One paragraph for users.
    pub fn doc(&self) -> String {
        let lines: Vec<&str> = self.lines.iter().map(|line| line.trim()).collect();
        lines.join(" ")
    }

    /// `share_min` is `share-min` after the two dashes.
    pub fn flag(&self) -> String {
        self.key.replace('_', "-")
    }

    /// `share_min` is `SUBLET_SHARE_MIN` in the environment.
    pub fn variable(&self) -> String {
        format!("SUBLET_{}", self.key.to_ascii_uppercase())
    }
}

/// One row of the table behind a struct of settings.
#[derive(Debug)]
pub struct Setting<S> {
    pub about: About,
    /// The struct with only this setting set, from a text.
    pub parse: fn(&str) -> Result<S, String>,
    /// Whether it is set.
    pub is_set: fn(&S) -> bool,
    /// The struct with only this setting, if it is set.
    pub only: fn(&S) -> S,
}

/// A struct that [`settings!`](crate::settings) has made.
pub trait Settings: Clone + Default + PartialEq + Send + Sync + 'static {
    const TABLE: &'static [Setting<Self>];

    /// These, with `weaker`'s where these are not set.
    #[must_use]
    fn or(self, weaker: &Self) -> Self;

    fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Those of these settings that `wanted` is for.
    #[must_use]
    fn only(&self, wanted: impl Fn(&About) -> bool) -> Self {
        let wanted = Self::TABLE.iter().filter(|setting| wanted(&setting.about));
        wanted.fold(Self::default(), |taken, setting| {
            taken.or(&(setting.only)(self))
        })
    }

    /// What is set and cannot be changed at run time: the first of them.
    fn fixed(&self) -> Option<About> {
        let mut set = Self::TABLE
            .iter()
            .filter(|setting| (setting.is_set)(self) && !setting.about.live);
        set.next().map(|setting| setting.about)
    }
}

/// Declares a struct of settings with its [`Settings::TABLE`]. A row is its documentation for
/// users, its key, its [`Kind`](crate::setting::Kind), what holds where it is not set, `live` where
/// it may be changed at run time, and `capped` where an administrator may say how much a job gets.
#[macro_export]
macro_rules! settings {
    (
        $(#[$attribute:meta])*
        pub struct $name:ident {
            $(
                $(#[doc = $line:literal])+
                $key:ident: $kind:ty, unset $unset:literal $(, $mark:ident)*;
            )+
        }
    ) => {
        $(#[$attribute])*
        #[derive(Debug, Clone, PartialEq, Default)]
        pub struct $name {
            $(
                $(#[doc = $line])+
                pub $key: Option<<$kind as $crate::setting::Kind>::Value>,
            )+
        }

        impl $crate::setting::Settings for $name {
            const TABLE: &'static [$crate::setting::Setting<Self>] = &[$(
                $crate::setting::Setting {
                    about: $crate::setting::About::new(
                        stringify!($key),
                        &[$($line),+],
                        $unset,
                        (
                            $crate::settings!(@live $($mark)*),
                            $crate::settings!(@capped $($mark)*),
                        ),
                        $crate::setting::KindInfo::of::<$kind>(),
                    ),
                    parse: |text| {
                        let value = <$kind as $crate::setting::Kind>::parse(text)?;
                        #[allow(
                            clippy::needless_update,
                            reason = "a struct may have one setting only"
                        )]
                        Ok(Self { $key: Some(value), ..Self::default() })
                    },
                    is_set: |settings| settings.$key.is_some(),
                    #[allow(
                        clippy::needless_update,
                        reason = "a struct may have one setting only"
                    )]
                    only: |settings| Self { $key: settings.$key.clone(), ..Self::default() },
                }
            ),+];

            fn or(self, weaker: &Self) -> Self {
                Self { $($key: self.$key.or_else(|| weaker.$key.clone())),+ }
            }
        }

        /// As they travel.
        impl $crate::utoipa::PartialSchema for $name {
            fn schema() -> $crate::utoipa::openapi::RefOr<$crate::utoipa::openapi::Schema> {
                let about = |key: &str| {
                    let table = <Self as $crate::setting::Settings>::TABLE;
                    table.iter().map(|row| row.about).find(|about| about.key == key)
                };
                let mut all = $crate::utoipa::openapi::ObjectBuilder::new();
                $(
                    let schema = $crate::schema::described(
                        <$kind as $crate::setting::Kind>::travels(),
                        &about(stringify!($key)).map(|about| about.doc()).unwrap_or_default(),
                    );
                    all = all.property(stringify!($key), schema);
                )+
                all.into()
            }
        }

        impl $crate::utoipa::ToSchema for $name {}
    };
    (@live) => { false };
    (@live live $($rest:ident)*) => { true };
    (@live $other:ident $($rest:ident)*) => { $crate::settings!(@live $($rest)*) };
    (@capped) => { false };
    (@capped capped $($rest:ident)*) => { true };
    (@capped $other:ident $($rest:ident)*) => { $crate::settings!(@capped $($rest)*) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kinds::{Flag, Share};

    crate::settings! {
        /// Two of them.
        pub struct Two {
            /// How much
            /// of it.
            how_much: Share, unset "all of it", live, capped;
            /// Whether.
            whether: Flag, unset "`false`";
        }
    }

    #[test]
    fn a_row_is_a_key_a_flag_a_variable_and_a_parser() {
        let [how_much, whether] = Two::TABLE else {
            panic!("two rows");
        };
        let about = how_much.about;
        assert_eq!(
            (about.key, about.flag().as_str(), about.variable().as_str()),
            ("how_much", "how-much", "SUBLET_HOW_MUCH")
        );
        assert_eq!(about.doc(), "How much of it.");
        assert!(about.live && !whether.about.live);
        assert!(about.capped && !whether.about.capped);
        let parsed = (how_much.parse)("50%").expect("a share");
        assert!((how_much.is_set)(&parsed) && !(whether.is_set)(&parsed));
        assert!((whether.parse)("maybe").is_err_and(|error| error.contains("`maybe`")));
    }

    #[test]
    fn what_is_set_beats_what_is_weaker() {
        let strong = Two {
            how_much: Some(0.25),
            whether: None,
        };
        let weak = Two {
            how_much: Some(0.5),
            whether: Some(true),
        };
        assert_eq!(
            strong.clone().or(&weak),
            Two {
                how_much: Some(0.25),
                whether: Some(true),
            }
        );
        let live = weak.only(|about| about.live);
        assert_eq!((live.how_much, live.whether), (Some(0.5), None));
        assert!(Two::default().is_empty() && !strong.is_empty());
        assert!(strong.fixed().is_none());
        assert_eq!(weak.fixed().map(|about| about.key), Some("whether"));
    }
}
