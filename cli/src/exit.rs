//! How sublet ends when it does not become the command: a code, and one line on stderr.

/// sublet's own failure; nothing was started.
pub const FAILED: u8 = 125;
/// The command was found but cannot be executed.
pub const NOT_EXECUTABLE: u8 = 126;
/// The command was not found.
pub const NOT_FOUND: u8 = 127;

/// An error with its exit code; [`FAILED`] unless it says otherwise.
#[derive(Debug)]
pub struct Failure {
    pub code: u8,
    pub error: anyhow::Error,
}

impl Failure {
    pub fn with_code(code: u8, error: impl Into<anyhow::Error>) -> Self {
        Self {
            code,
            error: error.into(),
        }
    }

    /// The error and its causes on one line, whatever is in them.
    pub fn line(&self) -> String {
        let text = format!("sublet: {:#}", self.error);
        text.split('\n')
            .map(str::trim)
            .filter(|part| !part.is_empty())
            .collect::<Vec<_>>()
            .join("; ")
    }
}

impl<E: Into<anyhow::Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::with_code(FAILED, error)
    }
}

pub type Result<T> = std::result::Result<T, Failure>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_one_line() {
        let failure = Failure::from(anyhow::anyhow!("b\n\n c").context("a"));
        assert_eq!(
            (failure.code, failure.line().as_str()),
            (125, "sublet: a: b; c")
        );
    }
}
