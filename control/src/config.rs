//! What the arbiter says of its quota files: which ones are in force, and what they give a job.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::layers::Capped;

/// How changes of the quota files are noticed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ConfigWatch {
    /// They are not: the arbiter was not started from files.
    #[default]
    Off,
    /// The kernel tells.
    Inotify,
    /// They are looked at each second.
    Polling,
    /// A way of a newer arbiter.
    #[serde(other)]
    Unknown,
}

/// The quota files in force.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct ConfigStatus {
    /// In the order in which they are read.
    #[schema(value_type = Vec<String>)]
    pub files: Vec<PathBuf>,
    /// When they were taken over; 0: at the start.
    pub loaded_unix_ms: u64,
    /// What is wrong with the files as they are now; those from before are in force then.
    pub errors: Vec<String>,
    pub watch: ConfigWatch,
}

/// One setting with its value.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct ConfigValue {
    pub key: String,
    pub value: String,
    /// `file:line:column`, or words.
    pub from: String,
}

/// What a job gets, or what a job of a user would get.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct ConfigReport {
    pub status: ConfigStatus,
    /// `None`: no job was asked about.
    pub job: Option<String>,
    pub user: String,
    pub settings: Vec<ConfigValue>,
    /// The most that the job may have.
    pub caps: Vec<ConfigValue>,
    /// What was asked for and is less.
    pub capped: Vec<Capped>,
    /// The most that the user's jobs may have together.
    pub totals: Vec<ConfigValue>,
}
