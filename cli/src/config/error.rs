//! What is wrong with a quota file, as one line that an editor can jump to.

use std::io;
use std::ops::Range;
use std::path::PathBuf;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    #[error("the quota file {} cannot be read: {error} (name another with --config or SUBLET_CONFIG)", .path.display())]
    Unreadable {
        path: PathBuf,
        kind: io::ErrorKind,
        error: String,
    },
    /// Who else could write it.
    #[error("the quota file {} is not taken: {reason}", .path.display())]
    Untrusted { path: PathBuf, reason: String },
    /// `file:line:column: what, with the value and the remedy`
    #[error("{file}:{line}:{column}: {message}")]
    Wrong {
        file: String,
        line: usize,
        column: usize,
        message: String,
    },
}

impl ConfigError {
    /// Line and column; 0 for the file as a whole.
    pub fn place(&self) -> (usize, usize) {
        match self {
            Self::Wrong { line, column, .. } => (*line, *column),
            Self::Unreadable { .. } | Self::Untrusted { .. } => (0, 0),
        }
    }
}

/// All that is wrong, in the order in which it stands; never empty.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}{}", .0.first().map(ToString::to_string).unwrap_or_default(), more(.0.len()))]
pub struct ConfigErrors(pub Vec<ConfigError>);

impl From<ConfigError> for ConfigErrors {
    fn from(error: ConfigError) -> Self {
        Self(vec![error])
    }
}

fn more(count: usize) -> String {
    match count {
        0 | 1 => String::new(),
        count => format!(" (and {} more: `sublet config check` lists all)", count - 1),
    }
}

/// A file's text and name, to say where in it something is.
#[derive(Debug, Clone, Copy)]
pub struct Source<'a> {
    pub text: &'a str,
    pub file: &'a str,
}

impl Source<'_> {
    /// Lines and columns count from 1; columns are characters.
    pub fn wrong(&self, at: Range<usize>, message: impl Into<String>) -> ConfigError {
        let (line, column) = self.place(&at);
        ConfigError::Wrong {
            file: self.file.to_owned(),
            line,
            column,
            message: message.into(),
        }
    }

    /// `file:line:column` of a place.
    pub fn place_text(&self, at: &Range<usize>) -> String {
        let (line, column) = self.place(at);
        format!("{}:{line}:{column}", self.file)
    }

    fn place(&self, at: &Range<usize>) -> (usize, usize) {
        let start = at.start.min(self.text.len());
        let before = &self.text.as_bytes()[..start];
        let line_start = before
            .iter()
            .rposition(|b| *b == b'\n')
            .map_or(0, |at| at + 1);
        let column = String::from_utf8_lossy(&before[line_start..]);
        (
            before.iter().filter(|b| **b == b'\n').count() + 1,
            column.chars().count() + 1,
        )
    }

    /// The text at a place, cut to a line and to what fits in a message.
    pub fn quote(&self, at: Range<usize>) -> String {
        let text = self.text.get(at).unwrap_or_default();
        let line = text.lines().next().unwrap_or_default();
        let short: String = line.chars().take(60).collect();
        if short.len() < text.len() {
            format!("{short}...")
        } else {
            short
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_counts_lines_and_characters_from_one() {
        let source = Source {
            text: "é = 1\nab = 2\n",
            file: "f",
        };
        assert_eq!(source.wrong(0..1, "m").to_string(), "f:1:1: m");
        assert_eq!(source.wrong(3..4, "m").to_string(), "f:1:3: m");
        assert_eq!(source.wrong(7..8, "m").to_string(), "f:2:1: m");
        assert_eq!(source.wrong(99..99, "m").to_string(), "f:3:1: m");
    }
}
