//! Which drivers' devices are known: who was asked, and whether the answer is there.
//!
//! Owns the thread that asks NVML ([`Watcher`]). A driver is asked about once, and so many of them
//! in all; figures of what was found are refreshed while somebody uses them, and only then.

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;

use crate::nvml::{News, Watcher};

/// Drivers that are asked about. A user can name any number of paths; some dozens are an
/// experiment, more are an attack.
const MAX_DRIVERS: usize = 64;

/// See the module's documentation.
#[derive(Debug)]
pub struct Discovery {
    watcher: Watcher,
    /// By driver (`None`: the host's own), whether the answer is there.
    answered: BTreeMap<Option<PathBuf>, bool>,
    refreshes: bool,
}

impl Discovery {
    /// Nothing was asked yet.
    pub fn new(watcher: Watcher) -> Self {
        Self {
            watcher,
            answered: BTreeMap::new(),
            refreshes: false,
        }
    }

    /// Readable when there is news.
    pub fn bell(&self) -> BorrowedFd<'_> {
        self.watcher.bell()
    }

    /// Asks for the devices of a driver (`None`: the host's own), once. True where the answer is
    /// there, or none is to be waited for.
    pub fn ask(&mut self, driver: Option<PathBuf>) -> bool {
        if let Some(answered) = self.answered.get(&driver) {
            return *answered;
        }
        if self.answered.len() >= MAX_DRIVERS {
            return true;
        }
        self.watcher.discover(driver.clone());
        self.answered.insert(driver, false);
        false
    }

    /// Whether the host's own devices were asked for and are not known yet.
    pub fn waits_for_host(&self) -> bool {
        self.answered.get(&None) == Some(&false)
    }

    /// This driver, and the host's own, were waited for long enough.
    pub fn give_up(&mut self, driver: Option<PathBuf>) {
        self.answered.insert(driver, true);
        self.answered.insert(None, true);
    }

    /// What was found since that was asked last.
    pub fn take(&mut self) -> Vec<News> {
        let all = self.watcher.take();
        for news in &all {
            self.answered.insert(news.driver.clone(), true);
        }
        all
    }

    /// Has figures refreshed from here on, or no longer.
    pub fn refresh(&mut self, on: bool) {
        if std::mem::replace(&mut self.refreshes, on) != on {
            self.watcher.watch(on);
        }
    }

    /// Whether figures are refreshed.
    pub fn refreshes(&self) -> bool {
        self.refreshes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_is_asked_about_once_and_the_number_of_them_is_bounded() {
        let mut discovery = Discovery::new(Watcher::start().expect("a thread"));
        let driver = |number: usize| Some(PathBuf::from(format!("/nowhere/{number}")));
        assert!(!discovery.ask(driver(0)) && !discovery.ask(driver(0)));
        assert_eq!(discovery.answered.len(), 1);
        assert!(!discovery.waits_for_host(), "nobody asked for it");
        let deadline = std::time::Instant::now() + testbed::PATIENCE;
        while discovery.take().is_empty() {
            assert!(std::time::Instant::now() < deadline);
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        assert!(discovery.ask(driver(0)), "the answer is there");
        assert!(!discovery.ask(driver(1)));
        discovery.give_up(driver(1));
        assert!(discovery.ask(driver(1)) && discovery.ask(None));
        // Nobody waits for what is not asked.
        discovery.answered = (0..MAX_DRIVERS).map(|at| (driver(at), true)).collect();
        assert!(discovery.ask(driver(MAX_DRIVERS)));
        assert_eq!(discovery.answered.len(), MAX_DRIVERS);
    }
}
