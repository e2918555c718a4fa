//! What somebody at the keys wants changed: the question before, and how it is done.

use std::time::Duration;

use control::{Change, JobSettings, JobStatus, Settings, exact_bytes};

use crate::args::MoveFlags;
use crate::{moves, set};

/// TIMEOUT: as long as `sublet evict` waits.
const MOVE: Duration = Duration::from_secs(120);

/// A change of one job.
#[derive(Debug, Clone, PartialEq)]
pub struct Order {
    /// Its name, by which the arbiter is asked.
    pub job: String,
    /// Which job that was when somebody chose it.
    pub id: u64,
    pub what: What,
}

#[derive(Debug, Clone, PartialEq)]
pub enum What {
    Pause,
    Resume,
    Evict,
    Restore,
    /// The setting, what was written for it, and what that means.
    Set(Setting, String, Box<JobSettings>),
}

/// A setting that is changed here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Setting {
    Share,
    Memory,
}

impl Setting {
    /// As the table of settings has it.
    fn key(self) -> &'static str {
        match self {
            Self::Share => "share",
            Self::Memory => "mem",
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Share => "share",
            Self::Memory => "memory limit",
        }
    }

    /// How a value is written.
    pub fn example(self) -> &'static str {
        match self {
            Self::Share => "0.25 or 25%",
            Self::Memory => "8GiB or 50%",
        }
    }

    /// What holds now.
    pub fn now(self, job: &JobStatus) -> String {
        match self {
            Self::Share => job
                .share_asked
                .map_or("the arbiter's choice".into(), |share| share.to_string()),
            Self::Memory => job.mem_limit_bytes.map_or("none".into(), exact_bytes),
        }
    }

    /// # Errors
    /// One sentence: the text, and what to write instead.
    pub fn parse(self, text: &str) -> Result<What, String> {
        let setting = JobSettings::TABLE
            .iter()
            .find(|setting| setting.about.key == self.key());
        let Some(setting) = setting else {
            return Err(format!("there is no setting `{}`", self.key()));
        };
        let settings = (setting.parse)(text)?;
        Ok(What::Set(self, text.trim().to_owned(), Box::new(settings)))
    }
}

impl Order {
    /// What is asked before it is done: which job, and which value.
    pub fn question(&self, now: &JobStatus) -> String {
        let job = format!("{} (job {})", self.job, self.id);
        match &self.what {
            What::Pause => format!("pause {job}: no device time until it is resumed?"),
            What::Resume => format!("resume {job}?"),
            What::Evict => format!("evict {job}: out of device memory and paused?"),
            What::Restore => format!("restore {job}: its memory back, and go on?"),
            What::Set(setting, text, _) => format!(
                "set {} of {job} to {text} (now {})?",
                setting.name(),
                setting.now(now)
            ),
        }
    }

    /// What is said while it is being done.
    pub fn progress(&self) -> String {
        let doing = match self.what {
            What::Pause => "pausing",
            What::Resume => "resuming",
            What::Evict => "evicting",
            What::Restore => "restoring",
            What::Set(..) => "setting",
        };
        format!("{doing} {} ...", self.job)
    }

    /// Has the arbiter do it, and returns what it says of the job then.
    ///
    /// # Errors
    /// Why not, in one line.
    pub fn carry_out(&self) -> Result<String, String> {
        let change = match &self.what {
            What::Pause | What::Resume => Change {
                paused: Some(self.what == What::Pause),
                ..Change::default()
            },
            What::Set(_, _, settings) => Change::from((**settings).clone()),
            What::Evict | What::Restore => return self.have_moved(),
        };
        set::ask(|arbiter| arbiter.set(&self.job, change.clone()))
            .map(|job| set::line_of(&job).trim().to_owned())
            .map_err(|error| format!("{error:#}"))
    }

    fn have_moved(&self) -> Result<String, String> {
        let job = std::slice::from_ref(&self.job);
        let how = MoveFlags {
            json: false,
            timeout: MOVE,
        };
        let moved = match self.what {
            What::Evict => moves::moved(job, &[], &how),
            _ => moves::moved(&[], job, &how),
        };
        moved
            .map(|(text, _)| text.trim().to_owned())
            .map_err(|failure| format!("{:#}", failure.error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(what: What) -> Order {
        Order {
            job: "train".into(),
            id: 7,
            what,
        }
    }

    #[test]
    fn a_question_names_the_job_and_the_value() {
        let now = JobStatus {
            share_asked: Some(0.5),
            ..JobStatus::default()
        };
        for what in [What::Pause, What::Resume, What::Evict, What::Restore] {
            let question = order(what).question(&now);
            assert!(question.contains("train (job 7)"), "{question}");
        }
        let share = order(Setting::Share.parse(" 25% ").unwrap());
        assert_eq!(
            share.question(&now),
            "set share of train (job 7) to 25% (now 0.5)?"
        );
        let memory = order(Setting::Memory.parse("8GiB").unwrap());
        assert_eq!(
            memory.question(&now),
            "set memory limit of train (job 7) to 8GiB (now none)?"
        );
    }

    #[test]
    fn values_are_those_of_sublet_set() {
        let What::Set(_, _, settings) = Setting::Share.parse("25%").unwrap() else {
            panic!("no setting");
        };
        assert_eq!(settings.share, Some(0.25));
        for (setting, text, word) in [
            (Setting::Share, "1.5", "at most 1"),
            (Setting::Share, "", "share"),
            (Setting::Memory, "20", "20GiB"),
            (Setting::Memory, "x\u{1b}", "no size"),
        ] {
            let error = setting.parse(text).unwrap_err();
            assert!(error.contains(word), "{text}: {error}");
        }
    }
}
