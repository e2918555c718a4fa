//! `sublet arbiter`: where it lives and by which rules, handed to the arbiter crate.

use anyhow::bail;
use control::paths::{RuntimeDir, Surroundings};

use crate::args::Arbiter;
use crate::config::{Config, Places};
use crate::connect;
use crate::exit::Result;

pub fn run(args: Arbiter) -> Result<()> {
    let around = Surroundings::of_this_process();
    let dir = match args.runtime_dir {
        Some(path) => RuntimeDir::given(path)?,
        None if args.embedded || args.stop => RuntimeDir::find(&around)?,
        None => RuntimeDir::find_for_daemon(&around)?,
    };
    if args.stop {
        connect::existing(&dir)?.shutdown()?;
        return Ok(());
    }
    dir.ensure(around.uid)?;
    let config = Config::find(args.config.as_deref(), &Places::of_the_host())?;
    serve(&dir, &config).map_err(Into::into)
}

fn serve(dir: &RuntimeDir, _config: &Config) -> anyhow::Result<()> {
    bail!(
        "this build has no arbiter to run in {}",
        dir.path().display()
    )
}
