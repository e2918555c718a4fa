//! Flags made from a table of settings.

use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};
use control::setting::{Form, Setting, Settings};

/// The flags of `S`: of every setting, for the start of a job; or where `LIVE`, of those that may
/// be changed at run time.
#[derive(Debug, Clone)]
pub struct Flags<S, const LIVE: bool>(pub S);

impl<S: Settings, const LIVE: bool> Flags<S, LIVE> {
    fn table() -> impl Iterator<Item = &'static Setting<S>> {
        S::TABLE
            .iter()
            .filter(|setting| !LIVE || setting.about.live)
    }

    /// `--mem, --share, ...`
    pub fn names() -> String {
        let names: Vec<String> = Self::table()
            .map(|setting| format!("--{}", setting.about.flag()))
            .collect();
        names.join(", ")
    }
}

fn arg<S: Settings>(setting: &'static Setting<S>, live: bool) -> Arg {
    let about = &setting.about;
    let kind = &about.kind;
    let help = if live {
        about.doc()
    } else {
        format!(
            "{} [default: {}] [env: {}]",
            about.doc(),
            about.unset.replace('`', ""),
            about.variable()
        )
    };
    let arg = Arg::new(about.key)
        .long(about.flag())
        .value_name(kind.placeholder)
        .help(help)
        .value_parser(setting.parse)
        .action(ArgAction::Set);
    if kind.takes(Form::List) {
        arg.action(ArgAction::Append)
    } else if kind.takes(Form::Boolean) {
        // A word after it is the command's, not a value.
        arg.num_args(0..=1)
            .require_equals(true)
            .default_missing_value("true")
    } else {
        arg.allow_hyphen_values(true)
    }
}

impl<S: Settings, const LIVE: bool> Args for Flags<S, LIVE> {
    fn augment_args(command: Command) -> Command {
        command.args(Self::table().map(|setting| arg(setting, LIVE)))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl<S: Settings, const LIVE: bool> FromArgMatches for Flags<S, LIVE> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut settings = S::default();
        for setting in Self::table() {
            let Some(texts) = matches.get_raw(setting.about.key) else {
                continue;
            };
            // A flag that is repeated is a list; each item has been parsed by now.
            let texts: Vec<_> = texts.map(|text| text.to_string_lossy()).collect();
            let parsed = (setting.parse)(&texts.join(",")).map_err(|message| {
                clap::Error::raw(clap::error::ErrorKind::InvalidValue, message)
            })?;
            settings = parsed.or(&settings);
        }
        Ok(Self(settings))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        self.0 = Self::from_arg_matches(matches)?.0.or(&self.0);
        Ok(())
    }
}

/// The flags of `S` for the start of a job, with the words that say the same to another `sublet
/// run`.
#[derive(Debug, Clone)]
pub struct Written<S> {
    pub settings: S,
    /// `--mem=8GiB`, `--share=0.5`
    pub words: Vec<String>,
}

impl<S: Settings> Args for Written<S> {
    fn augment_args(command: Command) -> Command {
        Flags::<S, false>::augment_args(command)
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl<S: Settings> FromArgMatches for Written<S> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut words = Vec::new();
        for setting in Flags::<S, false>::table() {
            for text in matches.get_raw(setting.about.key).into_iter().flatten() {
                words.push(format!(
                    "--{}={}",
                    setting.about.flag(),
                    text.to_string_lossy()
                ));
            }
        }
        let Flags(settings) = Flags::<S, false>::from_arg_matches(matches)?;
        Ok(Self { settings, words })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use control::kinds::{Count, Devices, Flag, Share};
    use control::{DeviceSelector, JobSettings};

    use super::*;

    control::settings! {
        /// A new key is a row; nothing else is written for it.
        pub struct Sample {
            /// How much.
            how_much: Share, unset "all", live;
            /// Whether.
            whether: Flag, unset "false";
            /// Where.
            place: Devices, unset "anywhere";
            /// How many.
            count: Count<1, 9>, unset "one";
        }
    }

    #[derive(Debug)]
    struct Line<const LIVE: bool> {
        flags: Flags<Sample, LIVE>,
        rest: Vec<String>,
    }

    fn line<const LIVE: bool>(words: &str) -> Result<Line<LIVE>, clap::Error> {
        let command = Flags::<Sample, LIVE>::augment_args(Command::new("x"))
            .arg(Arg::new("rest").num_args(0..));
        let matches = command.try_get_matches_from(words.split(' '))?;
        Ok(Line {
            flags: Flags::from_arg_matches(&matches)?,
            rest: matches
                .get_many("rest")
                .map(|rest| rest.cloned().collect())
                .unwrap_or_default(),
        })
    }

    #[test]
    fn a_declared_setting_is_a_flag() {
        let Line { flags, rest } =
            line::<false>("x --how-much 25% --whether --place 0,2 --place GPU-ff --count 3 a")
                .unwrap();
        let device = DeviceSelector::Index;
        assert_eq!(
            flags.0,
            Sample {
                how_much: Some(0.25),
                whether: Some(true),
                place: Some(vec![
                    device(0),
                    device(2),
                    DeviceSelector::Uuid("GPU-ff".into())
                ]),
                count: Some(3),
            }
        );
        assert_eq!(rest, ["a"], "a flag takes no word of the command");
        let off = line::<false>("x --whether=false").unwrap();
        assert_eq!(off.flags.0.whether, Some(false));
        assert!(line::<false>("x").unwrap().flags.0.is_empty());
        let error = line::<false>("x --count 10").unwrap_err().to_string();
        assert!(
            error.contains("`10`") && error.contains("1 to 9"),
            "{error}"
        );
    }

    #[test]
    fn only_live_settings_are_flags_at_run_time() {
        assert_eq!(Flags::<Sample, true>::names(), "--how-much");
        assert_eq!(
            line::<true>("x --how-much -1").unwrap_err().kind(),
            clap::error::ErrorKind::ValueValidation
        );
        assert_eq!(
            line::<true>("x --count 3").unwrap_err().kind(),
            clap::error::ErrorKind::UnknownArgument
        );
        let live = Flags::<JobSettings, true>::names();
        assert!(
            live.contains("--mem") && !live.contains("--device"),
            "{live}"
        );
    }
}
