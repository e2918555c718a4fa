//! One request or reply as one line of JSON, and the version check. Pure: both ends bring their own
//! bytes.
//!
//! ```text
//! -> {"v_major":2,"v_minor":0,"request":{"kind":"set","body":{"job":"a","change":{"share":0.5}}}}
//! <- {"v_major":2,"v_minor":0,"reply":{"kind":"changed","body":{...}}}
//! <- {"v_major":2,"v_minor":0,"error":{"code":"no_such_job","message":"...","hint":"..."}}
//! ```

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::{ControlError, ErrorCode};
use crate::request::{Reply, Request};
use crate::{PROTOCOL_MAJOR, PROTOCOL_MINOR};

/// No line is longer, its newline included. A status of a thousand jobs stays below a megabyte.
pub const MAX_LINE_BYTES: usize = 4 << 20;

#[derive(Debug, Serialize, Deserialize)]
struct RequestLine<R> {
    v_major: u32,
    #[serde(default)]
    v_minor: u32,
    request: R,
}

#[derive(Debug, Serialize, Deserialize)]
struct ReplyLine<R> {
    v_major: u32,
    #[serde(default)]
    v_minor: u32,
    #[serde(default = "Option::default", skip_serializing_if = "Option::is_none")]
    reply: Option<R>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    error: Option<ControlError>,
}

/// Why a line is no reply, or a request no line.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    #[error("the arbiter speaks protocol {theirs}, this command speaks {PROTOCOL_MAJOR}")]
    Version { theirs: u32 },
    #[error("the arbiter's answer makes no sense: {0}")]
    Malformed(String),
    #[error("the request cannot be written: {0}")]
    Unsendable(String),
}

/// The request as a line, newline included.
///
/// # Errors
/// Where a path in it is no UTF-8.
pub fn encode_request(request: &Request) -> Result<Vec<u8>, WireError> {
    line(&RequestLine {
        v_major: PROTOCOL_MAJOR,
        v_minor: PROTOCOL_MINOR,
        request,
    })
    .map_err(|error| WireError::Unsendable(error.to_string()))
}

/// The request in a line, with or without its newline.
///
/// # Errors
/// What to send back: another major version, a kind we do not know, or no request at all.
pub fn decode_request(line: &[u8]) -> Result<Request, ControlError> {
    let malformed = |error: serde_json::Error| {
        ControlError::new(
            ErrorCode::Invalid,
            format!("the request makes no sense: {error}"),
        )
    };
    // The version is looked at before anything that it may have changed.
    let RequestLine {
        v_major, request, ..
    }: RequestLine<Value> = parse(line).map_err(malformed)?;
    if v_major != PROTOCOL_MAJOR {
        return Err(ControlError::new(
            ErrorCode::VersionMismatch,
            format!("the arbiter speaks protocol {PROTOCOL_MAJOR}, this command speaks {v_major}"),
        )
        .with_hint("use the `sublet` that started the arbiter, or restart the arbiter"));
    }
    let kind = request
        .get("kind")
        .and_then(Value::as_str)
        .map(str::to_owned);
    Request::deserialize(request).map_err(|error| match kind {
        Some(kind) if error.to_string().starts_with("unknown variant") && !KINDS.contains(&kind.as_str()) => {
            ControlError::new(
                ErrorCode::Unsupported,
                format!("this arbiter knows no request `{kind}`"),
            )
            .with_hint(format!(
                "it speaks protocol {PROTOCOL_MAJOR}.{PROTOCOL_MINOR}; restart it from the newer `sublet`"
            ))
        }
        _ => malformed(error),
    })
}

const KINDS: [&str; 12] = [
    "status",
    "register",
    "list",
    "set",
    "set_device",
    "move",
    "reload",
    "config",
    "shutdown",
    "events",
    "timeline",
    "hook_refused",
];

/// The answer as a line, newline included. An answer that cannot be encoded becomes an
/// [`ErrorCode::Internal`].
pub fn encode_reply(result: &Result<Reply, ControlError>) -> Vec<u8> {
    let reply_line = |reply, error| {
        line(&ReplyLine::<&Reply> {
            v_major: PROTOCOL_MAJOR,
            v_minor: PROTOCOL_MINOR,
            reply,
            error,
        })
    };
    reply_line(result.as_ref().ok(), result.as_ref().err().cloned())
        .or_else(|error| {
            let error = format!("the answer cannot be written: {error}");
            reply_line(None, Some(ControlError::new(ErrorCode::Internal, error)))
        })
        // PANIC: strings and numbers only.
        .expect("an error is always writable")
}

/// The answer in a line: what was asked for, or the arbiter's refusal.
///
/// # Errors
/// [`WireError`] where the line is of another major version or no answer.
pub fn decode_reply(line: &[u8]) -> Result<Result<Reply, ControlError>, WireError> {
    let malformed = |error: serde_json::Error| WireError::Malformed(error.to_string());
    let ReplyLine {
        v_major,
        reply,
        error,
        ..
    }: ReplyLine<Value> = parse(line).map_err(malformed)?;
    if v_major != PROTOCOL_MAJOR {
        return Err(WireError::Version { theirs: v_major });
    }
    match (error, reply) {
        (Some(error), _) => Ok(Err(error)),
        (None, Some(reply)) => Ok(Ok(Reply::deserialize(reply).map_err(malformed)?)),
        (None, None) => Err(WireError::Malformed(
            "neither `reply` nor `error` in it".into(),
        )),
    }
}

fn parse<T: DeserializeOwned>(line: &[u8]) -> serde_json::Result<T> {
    serde_json::from_slice(line)
}

fn line<T: Serialize>(value: &T) -> serde_json::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    Ok(line)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::JobSpec;

    #[test]
    fn requests_and_replies_travel_as_one_line() {
        let request = Request::Register(JobSpec {
            command: vec!["a\nb".into()],
            ..JobSpec::default()
        });
        let line = encode_request(&request).unwrap();
        assert_eq!(line.iter().position(|b| *b == b'\n'), Some(line.len() - 1));
        assert_eq!(decode_request(&line), Ok(request));

        let refusal = Err(ControlError::new(ErrorCode::Refused, "no").with_hint("ask for less"));
        for result in [Ok(Reply::ShuttingDown), Ok(Reply::Jobs(vec![])), refusal] {
            let line = encode_reply(&result);
            assert_eq!(line.iter().position(|b| *b == b'\n'), Some(line.len() - 1));
            assert_eq!(decode_reply(&line).unwrap(), result);
        }
    }

    #[test]
    fn another_major_is_refused_before_the_body_is_read() {
        let error = decode_request(br#"{"v_major":3,"request":"whatever it became"}"#).unwrap_err();
        assert_eq!(error.code, ErrorCode::VersionMismatch);
        assert!(error.message.contains('3'), "{error}");
        let error = decode_reply(br#"{"v_major":9,"reply":[1]}"#).unwrap_err();
        assert!(matches!(error, WireError::Version { theirs: 9 }), "{error}");
    }

    #[test]
    fn an_unknown_request_is_unsupported_and_a_broken_one_invalid() {
        let error =
            decode_request(br#"{"v_major":2,"v_minor":7,"request":{"kind":"migrate","body":{}}}"#)
                .unwrap_err();
        assert_eq!(error.code, ErrorCode::Unsupported);
        assert!(error.message.contains("`migrate`"), "{error}");
        for bad in [
            &b""[..],
            b"{}",
            b"\xff",
            br#"{"v_major":2,"request":{"kind":"set","body":{}}}"#,
            br#"{"v_major":2,"request":{"kind":"register","body":{"class":"besteffort"}}}"#,
            br#"{"v_major":2,"request":{"kind":3}}"#,
        ] {
            let error = decode_request(bad).unwrap_err();
            assert_eq!(
                error.code,
                ErrorCode::Invalid,
                "{}",
                String::from_utf8_lossy(bad)
            );
        }
    }

    #[test]
    fn every_kind_is_listed() {
        let kinds = Request::one_of_each().map(|request| {
            serde_json::to_value(request).unwrap()["kind"]
                .as_str()
                .unwrap()
                .to_owned()
        });
        assert_eq!(kinds.each_ref().map(String::as_str), KINDS);
    }

    #[test]
    fn a_path_that_is_no_utf8_is_an_error_not_a_panic() {
        use std::os::unix::ffi::OsStringExt;
        let request = Request::Register(JobSpec {
            driver: std::ffi::OsString::from_vec(vec![b'/', 0xff]).into(),
            ..JobSpec::default()
        });
        assert!(encode_request(&request).is_err());
    }
}
