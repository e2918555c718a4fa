//! What is wrong with a command line, in one sentence, made from what clap knows of the error.

use std::ffi::OsString;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{ArgMatches, Command, Error};

/// What was wrong, with the value, and what was probably meant.
pub fn sentence(error: &Error) -> String {
    let text = |kind| error.get(kind).map(ContextValue::to_string);
    let arg = text(ContextKind::InvalidArg).unwrap_or_default();
    let value = text(ContextKind::InvalidValue).unwrap_or_default();
    let mut line = match error.kind() {
        ErrorKind::InvalidValue if value.is_empty() => format!("'{arg}' needs a value"),
        ErrorKind::InvalidValue => format!("invalid value '{value}' for '{arg}'"),
        ErrorKind::ValueValidation => {
            let reason = std::error::Error::source(error).map(ToString::to_string);
            format!(
                "invalid value '{value}' for '{arg}': {}",
                reason.unwrap_or_else(|| "it is out of range".into())
            )
        }
        ErrorKind::UnknownArgument => format!("unexpected argument '{arg}'"),
        ErrorKind::InvalidSubcommand => format!(
            "unrecognized subcommand '{}'",
            text(ContextKind::InvalidSubcommand).unwrap_or_default()
        ),
        ErrorKind::NoEquals => {
            format!("'{arg}' takes its value after an equals sign: --flag=value")
        }
        ErrorKind::ArgumentConflict => {
            let prior = list(error, ContextKind::PriorArg);
            if prior == arg || prior.is_empty() {
                format!("'{arg}' is given more than once")
            } else {
                format!("'{arg}' cannot be used with {prior}")
            }
        }
        ErrorKind::MissingRequiredArgument => {
            format!("{} is missing", list(error, ContextKind::InvalidArg))
        }
        ErrorKind::MissingSubcommand => "a subcommand is missing".into(),
        ErrorKind::TooFewValues | ErrorKind::TooManyValues | ErrorKind::WrongNumberOfValues => {
            format!("wrong number of values for '{arg}'")
        }
        ErrorKind::InvalidUtf8 => "an argument is no UTF-8 text".into(),
        other => other.as_str().unwrap_or("the command line is wrong").into(),
    };
    for kind in [
        ContextKind::SuggestedSubcommand,
        ContextKind::SuggestedArg,
        ContextKind::SuggestedValue,
    ] {
        let meant = list(error, kind);
        if !meant.is_empty() {
            line += &format!("; did you mean {meant}?");
        }
    }
    let known = list(error, ContextKind::ValidValue);
    if !known.is_empty() {
        line += &format!(" (known: {known})");
    }
    line
}

/// Names in quotes, with commas between.
fn list(error: &Error, kind: ContextKind) -> String {
    let names = match error.get(kind) {
        Some(ContextValue::String(name)) => vec![name.clone()],
        Some(ContextValue::Strings(names)) => names.clone(),
        _ => Vec::new(),
    };
    let quoted: Vec<String> = names.iter().map(|name| format!("'{name}'")).collect();
    quoted.join(", ")
}

/// The help to read: of the subcommand that `args` name.
pub fn help_of(command: Command, args: &[OsString]) -> String {
    let name = command.get_name().to_owned();
    let mut words = vec![name];
    // What is wrong is not looked at here, so there are matches.
    if let Ok(matches) = command.ignore_errors(true).try_get_matches_from(args) {
        let mut at: &ArgMatches = &matches;
        while let Some((name, inner)) = at.subcommand() {
            words.push(name.to_owned());
            at = inner;
        }
    }
    format!("{} --help", words.join(" "))
}
