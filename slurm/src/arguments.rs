//! The words behind the plugin's path in plugstack.conf.

use std::path::{Path, PathBuf};
use std::time::Duration;

use control::{parse_bytes, parse_span, paths};

/// Where a package puts the preload library.
const LIBRARY: &str = "/usr/lib/sublet/libsublet.so";
/// TIMEOUT: an arbiter answers in milliseconds, and waits a second for a slow disk. A step should
/// not be held up for longer.
const PATIENCE: Duration = Duration::from_secs(5);

/// What an administrator has set.
#[derive(Clone, PartialEq, Debug)]
pub struct Arguments {
    /// The preload library.
    pub library: PathBuf,
    /// The driver that jobs open.
    pub driver: Option<PathBuf>,
    /// Directory of the simulated driver, in place of a real one.
    pub sim: Option<PathBuf>,
    /// Directory of the node's arbiter; `%n` stands for the node.
    pub runtime_dir: String,
    /// File that each task sees as `/etc/ld.so.preload`.
    pub enforce: Option<PathBuf>,
    /// GPU memory that one shard stands for.
    pub shard_bytes: u64,
    /// How long a step waits for the arbiter.
    pub patience: Duration,
}

impl Default for Arguments {
    fn default() -> Self {
        Self {
            library: LIBRARY.into(),
            driver: None,
            sim: None,
            runtime_dir: paths::SYSTEM_DIR.into(),
            enforce: None,
            shard_bytes: 1 << 30,
            patience: PATIENCE,
        }
    }
}

/// What the words may be.
const WORDS: &str = "lib=, driver=, sim=, runtime_dir=, enforce=, shard=, patience=";

impl Arguments {
    /// # Errors
    /// The word that is wrong, and why.
    pub fn parse<'a>(words: impl IntoIterator<Item = &'a str>) -> Result<Self, String> {
        let mut arguments = Self::default();
        for word in words {
            let Some((key, value)) = word.split_once('=') else {
                return Err(format!("plugstack.conf: `{word}` is none of {WORDS}"));
            };
            let path = || match PathBuf::from(value) {
                path if path.is_absolute() => Ok(path),
                _ => Err(format!(
                    "plugstack.conf: {key} is `{value}`, no absolute path"
                )),
            };
            let wrong = |error: &dyn std::fmt::Display| format!("plugstack.conf: {key}: {error}");
            match key {
                "lib" => arguments.library = path()?,
                "driver" => arguments.driver = Some(path()?),
                "sim" => arguments.sim = Some(path()?),
                "runtime_dir" => arguments.runtime_dir = path()?.to_string_lossy().into_owned(),
                "enforce" => arguments.enforce = Some(path()?),
                "shard" => {
                    arguments.shard_bytes = parse_bytes(value).map_err(|error| wrong(&error))?;
                }
                "patience" => {
                    arguments.patience = parse_span(value).map_err(|error| wrong(&error))?;
                }
                _ => return Err(format!("plugstack.conf: `{key}` is none of {WORDS}")),
            }
        }
        Ok(arguments)
    }

    /// The arbiter's directory on this node.
    pub fn runtime_dir(&self, node: &str) -> PathBuf {
        self.runtime_dir.replace("%n", node).into()
    }

    /// The driver that the job's programs open.
    ///
    /// # Errors
    /// There is none.
    pub fn driver(&self) -> Result<PathBuf, String> {
        if let Some(sim) = &self.sim {
            return Ok(sim.join(paths::DRIVER_NAME));
        }
        if let Some(driver) = &self.driver {
            return Ok(driver.clone());
        }
        let usual = paths::DRIVER_DIRS.map(|dir| Path::new(dir).join(paths::DRIVER_NAME));
        let found = usual.into_iter().find(|path| path.exists());
        found.ok_or_else(|| {
            format!(
                "this node has no {} in {}: give driver=FILE in plugstack.conf",
                paths::DRIVER_NAME,
                paths::DRIVER_DIRS.join(", ")
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_read_and_the_others_named() {
        let words = [
            "lib=/a/libsublet.so",
            "runtime_dir=/run/x/%n",
            "shard=512M",
            "patience=2s",
        ];
        let arguments = Arguments::parse(words).unwrap();
        assert_eq!(arguments.runtime_dir("n1"), PathBuf::from("/run/x/n1"));
        assert_eq!(
            (arguments.shard_bytes, arguments.patience.as_secs()),
            (512 << 20, 2)
        );
        assert_eq!(Arguments::parse([]).unwrap(), Arguments::default());
        for (word, words) in [
            ("fast", "`fast`"),
            ("lbi=/a", "`lbi`"),
            ("lib=a", "no absolute path"),
            ("shard=1", "shard: `1`"),
            ("patience=soon", "patience"),
        ] {
            let error = Arguments::parse([word]).unwrap_err();
            assert!(error.contains(words), "{word}: {error}");
        }
    }

    #[test]
    fn a_simulated_driver_comes_first() {
        let arguments = Arguments::parse(["sim=/sim", "driver=/real"]).unwrap();
        assert_eq!(
            arguments.driver().unwrap(),
            PathBuf::from("/sim/libcuda.so.1")
        );
    }
}
