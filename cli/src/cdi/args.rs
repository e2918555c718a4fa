//! The command line of `sublet cdi`, devices included.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use control::{JobSettings, Settings};

#[derive(Debug, Args)]
pub struct Cdi {
    #[command(subcommand)]
    pub command: CdiCommand,
}

#[derive(Debug, Subcommand)]
pub enum CdiCommand {
    /// Write a specification of the Container Device Interface
    Generate(CdiGenerate),
}

/// `docker run --device sublet.dev/gpu=half` is a job with these limits. Without --device there are
/// all, half, quarter and eighth. Docker and Podman read /etc/cdi.
#[derive(Debug, Args)]
pub struct CdiGenerate {
    /// A device of the file, with what a container gets by it: keys of the quota file; may be
    /// repeated
    #[arg(long, value_name = "NAME:KEY=VALUE,..", value_parser = parse_slice)]
    pub device: Vec<Slice>,
    /// File to write, ending in .json or .yaml [default: print it]
    #[arg(long, value_name = "FILE", value_parser = parse_file)]
    pub output: Option<PathBuf>,
    /// Directory of the arbiter that serves the containers [default: /run/sublet for root, else as
    /// `sublet run` looks] [env: SUBLET_RUNTIME_DIR]
    #[arg(long, value_name = "DIR")]
    pub runtime_dir: Option<PathBuf>,
    /// Load the library by LD_PRELOAD, as a file that is only printed does, instead of the
    /// container's /etc/ld.so.preload: what `docker exec` and `podman exec` start is outside then
    #[arg(long)]
    pub ld_preload: bool,
    /// Give the simulated GPU
    #[arg(long)]
    pub sim: bool,
}

fn parse_file(text: &str) -> Result<PathBuf, String> {
    match text.ends_with(".json") || text.ends_with(".yaml") {
        true => Ok(text.into()),
        false => Err(format!(
            "`{text}` ends neither in .json nor in .yaml, and engines look at no other file: write /etc/cdi/sublet.json"
        )),
    }
}

/// A device of the specification: a name, and what a container that asks for it gets.
#[derive(Debug, Clone, PartialEq)]
pub struct Slice {
    pub name: String,
    pub settings: JobSettings,
    /// The variables that say so.
    pub env: Vec<String>,
}

/// `half`, `half:mem=20GiB,share=0.5`
///
/// # Errors
/// One sentence: the text, and what to write instead.
pub fn parse_slice(text: &str) -> Result<Slice, String> {
    let (name, rest) = text.split_once(':').unwrap_or((text, ""));
    let fits = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let edge = |c: char| c.is_ascii_alphanumeric();
    if !name.starts_with(edge) || !name.ends_with(edge) || !name.chars().all(fits) {
        return Err(format!(
            "`{name}` is no name of a device: write letters, digits, `-`, `_` and `.`, such as half"
        ));
    }
    let mut slice = Slice {
        name: name.to_owned(),
        settings: JobSettings::default(),
        env: Vec::new(),
    };
    for item in rest.split(',').filter(|item| !item.is_empty()) {
        let (key, value) = item
            .split_once('=')
            .ok_or_else(|| format!("`{item}` is no setting: write KEY=VALUE, such as mem=20GiB"))?;
        let key = key.trim();
        let setting = JobSettings::TABLE
            .iter()
            .find(|setting| setting.about.key == key)
            .ok_or_else(|| unknown(key))?;
        if (setting.is_set)(&slice.settings) {
            return Err(format!("`{key}` stands twice in `{text}`: write it once"));
        }
        slice.settings = (setting.parse)(value)?.or(&slice.settings);
        slice
            .env
            .push(format!("{}={}", setting.about.variable(), value.trim()));
    }
    let checked = slice.settings.check();
    checked.map_err(|(name, message)| format!("the {name} in `{text}` is {message}"))?;
    Ok(slice)
}

fn unknown(key: &str) -> String {
    let known = || JobSettings::TABLE.iter().map(|setting| setting.about.key);
    match policy::names::nearest(key, known()) {
        Some(near) => format!("`{key}` is no setting: did you mean `{near}`?"),
        None => {
            let keys: Vec<&str> = known().collect();
            format!("`{key}` is no setting: write one of {}", keys.join(", "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_a_name_and_settings() {
        let slice = parse_slice("half:mem=20GiB,share=0.5").expect("a device");
        assert_eq!(slice.name, "half");
        assert_eq!(slice.env, ["SUBLET_MEM=20GiB", "SUBLET_SHARE=0.5"]);
        assert!(parse_slice("all").expect("a device").settings.is_empty());
        for (bad, word) in [
            ("", "is no name"),
            ("a b", "is no name"),
            ("x=y", "is no name"),
            ("-half", "is no name"),
            ("half:mem", "is no setting"),
            ("half:memory=3GiB", "did you mean `mem`?"),
            ("half:colour=red", "write one of mem"),
            ("half:mem=20", "`20`"),
            ("half:share=2", "`2`"),
            ("half:mem=1GiB,mem=2GiB", "twice"),
            ("half:share=0.5,share_max=0.2", "share_max"),
        ] {
            let error = parse_slice(bad).expect_err(bad);
            assert!(error.contains(word), "{bad}: {error}");
        }
    }
}
