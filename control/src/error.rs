//! What the arbiter answers when it says no.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A refusal: the reason for programs, the sentence for people, and what to do about it.
#[derive(
    Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, thiserror::Error, ToSchema,
)]
#[serde(default)]
#[error("{message}{}", if hint.is_empty() { String::new() } else { format!(" ({hint})") })]
pub struct ControlError {
    pub code: ErrorCode,
    /// What happened, with the value that was refused. One line.
    pub message: String,
    /// What to do about it; empty where there is nothing to say.
    pub hint: String,
}

impl ControlError {
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
            hint: String::new(),
        }
    }

    #[must_use]
    pub fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = hint.into();
        self
    }
}

/// Text of others as one line of `most` characters at most.
pub fn one_line(text: &str, most: usize) -> String {
    let shown = text.chars().take(most);
    shown
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect()
}

/// Why a request was refused. On the wire a plain string, so that an unknown reason from a newer
/// arbiter survives.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(from = "String", into = "String")]
pub enum ErrorCode {
    /// No job has that name.
    NoSuchJob,
    /// No device answers to that selector.
    NoSuchDevice,
    /// No job is in a group of that name.
    NoSuchGroup,
    /// Well-formed, but the arbiter will not do it: shares above 1, quota above the device, a
    /// ceiling.
    Refused,
    /// The request makes no sense: a share of 3, an empty command.
    Invalid,
    /// The major protocol versions differ.
    VersionMismatch,
    /// The peer may not do this to somebody else's job.
    Permission,
    /// The request kind is not known to this arbiter.
    Unsupported,
    /// The arbiter failed at it.
    #[default]
    Internal,
    /// A code of a newer arbiter.
    Other(String),
}

impl utoipa::PartialSchema for ErrorCode {
    fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::Schema> {
        let known = ErrorCode::KNOWN.map(String::from);
        let known = known.map(|word| format!("`{word}`")).join(", ");
        utoipa::openapi::ObjectBuilder::new()
            .schema_type(utoipa::openapi::Type::String)
            .description(Some(format!("Why: {known}, or a word of a newer arbiter.")))
            .examples(["no_such_job"])
            .into()
    }
}

impl utoipa::ToSchema for ErrorCode {}

impl ErrorCode {
    /// The word of an arbiter that is about to end, as [`Other`](Self::Other).
    pub const ENDING: &'static str = "ending";
    /// The word for a path at which there is no operation, as [`Other`](Self::Other).
    pub const NOT_FOUND: &'static str = "not_found";

    /// Those of this version.
    pub const KNOWN: [Self; 9] = [
        Self::NoSuchJob,
        Self::NoSuchDevice,
        Self::NoSuchGroup,
        Self::Refused,
        Self::Invalid,
        Self::VersionMismatch,
        Self::Permission,
        Self::Unsupported,
        Self::Internal,
    ];
}

impl From<String> for ErrorCode {
    fn from(code: String) -> Self {
        match code.as_str() {
            "no_such_job" => Self::NoSuchJob,
            "no_such_device" => Self::NoSuchDevice,
            "no_such_group" => Self::NoSuchGroup,
            "refused" => Self::Refused,
            "invalid" => Self::Invalid,
            "version_mismatch" => Self::VersionMismatch,
            "permission" => Self::Permission,
            "unsupported" => Self::Unsupported,
            "internal" => Self::Internal,
            _ => Self::Other(code),
        }
    }
}

impl From<ErrorCode> for String {
    fn from(code: ErrorCode) -> Self {
        match code {
            ErrorCode::NoSuchJob => "no_such_job".into(),
            ErrorCode::NoSuchDevice => "no_such_device".into(),
            ErrorCode::NoSuchGroup => "no_such_group".into(),
            ErrorCode::Refused => "refused".into(),
            ErrorCode::Invalid => "invalid".into(),
            ErrorCode::VersionMismatch => "version_mismatch".into(),
            ErrorCode::Permission => "permission".into(),
            ErrorCode::Unsupported => "unsupported".into(),
            ErrorCode::Internal => "internal".into(),
            ErrorCode::Other(code) => code,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_round_trip_and_unknown_ones_survive() {
        let other = ErrorCode::Other("on_fire".into());
        for code in ErrorCode::KNOWN.into_iter().chain([other]) {
            let wire = serde_json::to_string(&code).unwrap();
            assert_eq!(
                serde_json::from_str::<ErrorCode>(&wire).unwrap(),
                code,
                "{wire}"
            );
        }
    }

    #[test]
    fn text_of_others_is_one_line_and_not_longer_than_it_may_be() {
        assert_eq!(one_line("a\nb\x1b[2Jc", 6), "a b [2");
    }

    #[test]
    fn the_hint_follows_the_message() {
        let error = ControlError::new(ErrorCode::Refused, "shares would sum to 1.25")
            .with_hint("ask for 0.25 or less");
        assert_eq!(
            error.to_string(),
            "shares would sum to 1.25 (ask for 0.25 or less)"
        );
        assert_eq!(
            ControlError::new(ErrorCode::Internal, "oops").to_string(),
            "oops"
        );
    }
}
