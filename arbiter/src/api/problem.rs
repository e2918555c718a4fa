//! Errors as answers: a status for programs that know HTTP, the arbiter's own words for the rest.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use control::{ControlError, ErrorCode, one_line};
use serde::Serialize;
use utoipa::ToSchema;

/// Of a message, and of a hint.
const LINE_CHARS: usize = 1000;

/// An error: `{"error": {"code": ..., "message": ..., "hint": ...}}`.
#[derive(Serialize, ToSchema, Debug)]
pub struct Problem {
    #[serde(skip)]
    status: StatusCode,
    error: ControlError,
}

impl Problem {
    /// The request cannot be read: no JSON, no such parameter.
    pub fn malformed(text: impl Into<String>) -> Self {
        Self::with(StatusCode::BAD_REQUEST, ErrorCode::Invalid, text)
    }

    /// It is JSON, and not what is taken here.
    pub fn invalid(text: impl Into<String>) -> Self {
        Self::with(StatusCode::UNPROCESSABLE_ENTITY, ErrorCode::Invalid, text)
    }

    /// It is not known who asks.
    pub fn unauthenticated(text: impl Into<String>) -> Self {
        let code = ErrorCode::Other("unauthenticated".into());
        Self::with(StatusCode::UNAUTHORIZED, code, text)
    }

    /// Nobody who asks over TCP can be known.
    pub fn no_tokens() -> Self {
        let text = "the arbiter's file of tokens cannot be used now";
        let error = ControlError::new(ErrorCode::Internal, text);
        Self::unavailable(error.with_hint("its log says why"))
    }

    /// There is nothing at that path.
    pub fn nothing(text: impl Into<String>) -> Self {
        let code = ErrorCode::Other(ErrorCode::NOT_FOUND.into());
        Self::with(StatusCode::NOT_FOUND, code, text)
    }

    /// There is, for another method.
    pub fn wrong_method(text: impl Into<String>) -> Self {
        Self::with(StatusCode::METHOD_NOT_ALLOWED, ErrorCode::Invalid, text)
    }

    /// The body is too long.
    pub fn too_large(text: impl Into<String>) -> Self {
        Self::with(StatusCode::PAYLOAD_TOO_LARGE, ErrorCode::Invalid, text)
    }

    /// This caller has too much of it already.
    pub fn too_many(text: impl Into<String>) -> Self {
        Self::with(StatusCode::TOO_MANY_REQUESTS, ErrorCode::Refused, text)
    }

    /// Nobody can be asked now.
    pub fn unavailable(error: ControlError) -> Self {
        let status = StatusCode::SERVICE_UNAVAILABLE;
        Self { status, error }
    }

    /// There was no answer in time.
    pub fn no_answer(error: ControlError) -> Self {
        let status = StatusCode::GATEWAY_TIMEOUT;
        Self { status, error }
    }

    /// A defect of ours.
    pub fn defect(text: impl Into<String>) -> Self {
        Self::with(StatusCode::INTERNAL_SERVER_ERROR, ErrorCode::Internal, text)
    }

    /// What to do about it.
    #[must_use]
    pub fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.error.hint = hint.into();
        self
    }

    fn with(status: StatusCode, code: ErrorCode, text: impl Into<String>) -> Self {
        Self {
            status,
            error: ControlError::new(code, text),
        }
    }

    /// What a client has sent may be in it, as long as a body and with line breaks.
    fn on_one_line(mut self) -> Self {
        for text in [&mut self.error.message, &mut self.error.hint] {
            *text = one_line(text, LINE_CHARS);
        }
        self
    }
}

impl From<ControlError> for Problem {
    fn from(error: ControlError) -> Self {
        let status = match error.code {
            ErrorCode::NoSuchJob | ErrorCode::NoSuchDevice | ErrorCode::NoSuchGroup => {
                StatusCode::NOT_FOUND
            }
            ErrorCode::Refused => StatusCode::CONFLICT,
            ErrorCode::Invalid => StatusCode::UNPROCESSABLE_ENTITY,
            ErrorCode::VersionMismatch => StatusCode::BAD_REQUEST,
            ErrorCode::Permission => StatusCode::FORBIDDEN,
            ErrorCode::Unsupported => StatusCode::NOT_IMPLEMENTED,
            ErrorCode::Internal | ErrorCode::Other(_) => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Self { status, error }
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let status = self.status;
        // PANIC: three texts.
        let body = serde_json::to_vec(&self.on_one_line()).expect("an error is always writable");
        let mut answer = as_json(status, body);
        if status == StatusCode::UNAUTHORIZED {
            let scheme = HeaderValue::from_static("Bearer realm=\"sublet\"");
            answer
                .headers_mut()
                .insert(header::WWW_AUTHENTICATE, scheme);
        }
        answer
    }
}

/// What was asked for.
pub fn answer<T: Serialize>(status: StatusCode, value: &T) -> Response {
    match serde_json::to_vec(value) {
        Ok(body) => as_json(status, body),
        Err(error) => {
            Problem::defect(format!("the answer cannot be written: {error}")).into_response()
        }
    }
}

fn as_json(status: StatusCode, body: Vec<u8>) -> Response {
    let json = HeaderValue::from_static("application/json");
    (status, [(header::CONTENT_TYPE, json)], body).into_response()
}
