//! Settings of this process: what a program has set, else its environment.

use std::collections::BTreeMap;
use std::fmt;

use crate::lock::Mutex;

/// A value of the configuration that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BadConfig(pub String);

impl fmt::Display for BadConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for BadConfig {}

/// A setting: what [`set`] said, else the process's environment.
pub fn env(name: &str) -> Option<String> {
    let set = SETTINGS.lock().get(name).cloned();
    set.or_else(|| std::env::var(name).ok())
}

static SETTINGS: Mutex<BTreeMap<String, String>> = Mutex::new(BTreeMap::new());

/// Sets a `SUBLET_SIM_*` setting for this process, for programs in Rust that link this crate.
/// Before `cuInit`.
pub fn set(name: &str, value: &str) {
    SETTINGS.lock().insert(name.to_owned(), value.to_owned());
}

/// Takes the time that loading the driver takes (`SUBLET_SIM_LOAD_US`).
pub fn load() {
    let us = env("SUBLET_SIM_LOAD_US").and_then(|text| text.parse().ok());
    if let Some(us) = us {
        std::thread::sleep(std::time::Duration::from_micros(us));
    }
}
