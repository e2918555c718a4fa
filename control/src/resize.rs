//! Asking a running job to change its size: Elan's signal, in the terms of operators and of the
//! cluster's agent.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::values::UnknownWord;

/// A request to a job. The job sees it at the end of an iteration, saves, and reports that it may
/// be stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Resize {
    /// To go on with so many GPUs; 0: with none for now.
    To(u16),
    /// To stay as it is: what was asked for is taken back.
    Stay,
}

impl fmt::Display for Resize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::To(gpus) => write!(f, "{gpus}"),
            Self::Stay => f.write_str("stay"),
        }
    }
}

impl FromStr for Resize {
    type Err = UnknownWord;

    fn from_str(word: &str) -> Result<Self, UnknownWord> {
        if word == "stay" {
            return Ok(Self::Stay);
        }
        word.parse().map(Self::To).map_err(|_| UnknownWord {
            word: word.to_owned(),
            choices: "a number of GPUs (0: the job is to make space), or stay",
        })
    }
}

/// How far a job is with what it was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct ResizeStatus {
    /// GPUs that it is to go on with; 0: none for now.
    pub gpus: u16,
    /// When it was asked.
    pub since_unix_ms: u64,
    /// It has saved what it needs and may be stopped.
    pub ready: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_for_is_written_as_it_is_read() {
        for resize in [Resize::To(0), Resize::To(8), Resize::Stay] {
            assert_eq!(resize.to_string().parse(), Ok(resize));
            let text = serde_json::to_string(&resize).unwrap();
            assert_eq!(serde_json::from_str::<Resize>(&text).unwrap(), resize);
        }
        for wrong in ["", "-1", "65536", "go", "2.5"] {
            let error = wrong.parse::<Resize>().unwrap_err().to_string();
            assert!(
                error.contains(&format!("`{wrong}`")) && error.contains("stay"),
                "{error}"
            );
        }
    }
}
