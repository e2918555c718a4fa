//! TOML text to [`Config`], by way of the table of sections; the first thing wrong is the error.

use std::borrow::Cow;
use std::ops::Range;

use control::setting::{About, Form};
use control::{DeviceSettings, JobSettings, Settings};
use policy::names::nearest;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::Config;
use super::error::{ConfigError, Source};
use super::sections::{SECTIONS, Section};

pub fn parse(text: &str, file: &str) -> Result<Config, ConfigError> {
    let source = Source { text, file };
    let document = DeTable::parse(text).map_err(|error| {
        let message = error.message().trim().replace('\n', ", ");
        source.wrong(error.span().unwrap_or(0..0), message)
    })?;

    let mut config = Config::default();
    // The parser keeps tables by key; the error to report is the first in the file.
    let mut sections: Vec<_> = document.into_inner().into_iter().collect();
    sections.sort_by_key(|(name, _)| name.span().start);
    for (name, value) in sections {
        let Some(section) = SECTIONS
            .iter()
            .find(|section| section.name == name.get_ref())
        else {
            return Err(unknown_section(source, &name));
        };
        for table in tables(source, section, &name.span(), value)? {
            let mut reader = Reader::new(source, section, table)?;
            (section.read)(&mut reader, &mut config)?;
            reader.finish();
        }
    }
    Ok(config)
}

pub fn job_settings(reader: &mut Reader<'_, '_>) -> Result<JobSettings, ConfigError> {
    let settings: JobSettings = reader.take()?;
    settings
        .check()
        .map_err(|(key, message)| reader.wrong(key, &message))?;
    Ok(settings)
}

pub fn device_settings(reader: &mut Reader<'_, '_>) -> Result<DeviceSettings, ConfigError> {
    let named = reader.policy_names();
    let settings: DeviceSettings = reader.take()?;
    if let Some(choice) = &settings.policy
        && let Err((parameter, message)) = arbiter::check_policy(choice)
    {
        // The parameter that is wrong, where it stands; else the policy.
        let at = named
            .iter()
            .find(|(name, _)| Some(name) == parameter.as_ref());
        return Err(match at {
            Some((_, at)) => reader
                .source
                .wrong(at.clone(), format!("policy: {message}")),
            None => reader.wrong_at("policy", &format!("policy: {message}")),
        });
    }
    if let (Some(min), Some(max)) = (settings.quantum_min, settings.quantum)
        && min > max
    {
        let message = "longer than quantum: write the same or less";
        return Err(reader.wrong("quantum_min", message));
    }
    Ok(settings)
}

/// What a value of the file is to the parser of its kind.
fn text_of<'v>(
    value: &'v Spanned<DeValue<'_>>,
    source: Source<'_>,
    about: &About,
) -> Result<Cow<'v, str>, String> {
    let kind = &about.kind;
    let quote = || source.quote(value.span());
    let form = match value.get_ref() {
        DeValue::String(_) => Form::Text,
        DeValue::Integer(_) | DeValue::Float(_) => Form::Number,
        DeValue::Boolean(_) => Form::Boolean,
        DeValue::Array(_) => Form::List,
        DeValue::Table(_) => Form::Table,
        DeValue::Datetime(_) => return Err(misfit(&quote(), about)),
    };
    if !kind.takes(form) {
        return Err(misfit(&quote(), about));
    }
    match value.get_ref() {
        DeValue::Array(list) => {
            let item = |item: &Spanned<DeValue<'_>>| {
                scalar(item.get_ref())
                    .map(Cow::into_owned)
                    .ok_or_else(|| misfit(&source.quote(item.span()), about))
            };
            let items: Vec<String> = list.iter().map(item).collect::<Result<_, _>>()?;
            Ok(items.join(",").into())
        }
        DeValue::Table(table) => {
            let name = table.get("name").map(Spanned::get_ref);
            let Some(DeValue::String(name)) = name else {
                return Err(format!(
                    "`{}` names no policy: write {{ name = \"...\", parameter = number }}",
                    quote()
                ));
            };
            let mut pairs = Vec::new();
            for (key, value) in table.iter().filter(|(key, _)| key.get_ref() != "name") {
                let Some(text) = scalar(value.get_ref()) else {
                    return Err(format!(
                        "`{}`: a parameter is a number, a word in quotes, true or false",
                        source.quote(value.span())
                    ));
                };
                pairs.push(format!("{}={text}", key.get_ref()));
            }
            let colon = if pairs.is_empty() { "" } else { ":" };
            Ok(format!("{name}{colon}{}", pairs.join(",")).into())
        }
        other => scalar(other).ok_or_else(|| misfit(&quote(), about)),
    }
}

/// Text, a number or a boolean as text.
pub fn scalar<'v>(value: &'v DeValue<'_>) -> Option<Cow<'v, str>> {
    match value {
        DeValue::String(text) => Some(Cow::Borrowed(text)),
        DeValue::Float(number) => Some(number.as_str().into()),
        DeValue::Integer(number) => i64::from_str_radix(number.as_str(), number.radix())
            .ok()
            .map(|number| number.to_string().into()),
        DeValue::Boolean(flag) => Some(if *flag { "true" } else { "false" }.into()),
        DeValue::Datetime(_) | DeValue::Array(_) | DeValue::Table(_) => None,
    }
}

/// Why a value of another form will not do: what its parser says of it, or how it is written.
fn misfit(quote: &str, about: &About) -> String {
    match (about.kind.check)(quote) {
        Err(message) => message,
        Ok(()) => format!(
            "`{quote}` is written as in {} = {}",
            about.key, about.kind.example
        ),
    }
}

fn unknown_section(source: Source<'_>, name: &Spanned<std::borrow::Cow<'_, str>>) -> ConfigError {
    let names = SECTIONS.iter().map(|section| section.name);
    let word = name.get_ref();
    let remedy = if let Some(near) = nearest(word, names.clone()) {
        format!("did you mean `{near}`?")
    } else if let Some(section) = SECTIONS.iter().find(|section| {
        (section.keys)()
            .iter()
            .any(|about| about.key == word.as_ref())
    }) {
        format!("it belongs into a section such as {}", section.heading())
    } else {
        format!("the file has {}", names.collect::<Vec<_>>().join(", "))
    };
    source.wrong(name.span(), format!("unknown section `{word}`: {remedy}"))
}

/// The tables of a section, one or many as it is declared.
fn tables<'t>(
    source: Source<'_>,
    section: &Section,
    name: &Range<usize>,
    value: Spanned<DeValue<'t>>,
) -> Result<Vec<Spanned<DeTable<'t>>>, ConfigError> {
    let span = value.span();
    let not_so = || {
        source.wrong(
            name.clone(),
            format!(
                "`{}` is written {} here: write {}",
                section.name,
                if section.repeated {
                    "as one table"
                } else {
                    "as a list or a value"
                },
                section.heading()
            ),
        )
    };
    match (value.into_inner(), section.repeated) {
        (DeValue::Table(table), false) => Ok(vec![Spanned::new(span, table)]),
        (DeValue::Array(array), true) => array
            .into_iter()
            .map(|item| {
                let span = item.span();
                match item.into_inner() {
                    DeValue::Table(table) => Ok(Spanned::new(span, table)),
                    _ => Err(not_so()),
                }
            })
            .collect(),
        _ => Err(not_so()),
    }
}

/// One section's table, from which keys are taken.
pub struct Reader<'s, 't> {
    source: Source<'s>,
    table: DeTable<'t>,
    /// Where the values stand that have been taken.
    taken: Vec<(&'static str, Range<usize>)>,
}

impl<'s, 't> Reader<'s, 't> {
    /// Refuses keys that the section does not have, before any value is looked at.
    fn new(
        source: Source<'s>,
        section: &'static Section,
        table: Spanned<DeTable<'t>>,
    ) -> Result<Self, ConfigError> {
        let span = table.span();
        let table = table.into_inner();
        let keys = (section.keys)();
        let names = || keys.iter().map(|about| about.key);
        let unknown = table
            .keys()
            .filter(|key| !names().any(|name| name == key.get_ref()))
            .min_by_key(|key| key.span().start);
        if let Some(key) = unknown {
            let remedy = match nearest(key.get_ref(), names()) {
                Some(near) => format!("did you mean `{near}`?"),
                None => format!("it has {}", names().collect::<Vec<_>>().join(", ")),
            };
            let message = format!(
                "unknown key `{}` in {}: {remedy}",
                key.get_ref(),
                section.heading()
            );
            return Err(source.wrong(key.span(), message));
        }
        let needed = section.needs_one_of;
        if !needed.is_empty() && !needed.iter().any(|name| table.contains_key(*name)) {
            let message = format!(
                "{} needs {}",
                section.heading(),
                needed.join(", ").replacen(", user", " or user", 1)
            );
            return Err(source.wrong(span, message));
        }
        Ok(Self {
            source,
            table,
            taken: Vec::new(),
        })
    }

    /// The settings of a table that stand here.
    pub fn take<S: Settings>(&mut self) -> Result<S, ConfigError> {
        let mut settings = S::default();
        for setting in S::TABLE {
            let about = &setting.about;
            let Some(value) = self.table.remove(about.key) else {
                continue;
            };
            self.taken.push((about.key, value.span()));
            let read = text_of(&value, self.source, about).and_then(|text| (setting.parse)(&text));
            let read = read.map_err(|message| {
                let message = format!("{}: {message}", about.key);
                self.source.wrong(value.span(), message)
            })?;
            settings = read.or(&settings);
        }
        Ok(settings)
    }

    /// Names of parameters in the policy's table, with their places.
    fn policy_names(&self) -> Vec<(String, Range<usize>)> {
        let policy = self.table.get("policy").map(Spanned::get_ref);
        let Some(DeValue::Table(table)) = policy else {
            return Vec::new();
        };
        let names = table
            .keys()
            .map(|key| (key.get_ref().to_string(), key.span()));
        names.collect()
    }

    /// Says what is wrong, at the place of a value that was taken.
    fn wrong_at(&self, name: &str, message: &str) -> ConfigError {
        let taken = self.taken.iter().find(|(taken, _)| *taken == name);
        let at = taken.map_or(0..0, |(_, span)| span.clone());
        self.source.wrong(at, message)
    }

    /// Says what is wrong with a value that was taken, in the light of others.
    fn wrong(&self, name: &str, message: &str) -> ConfigError {
        let taken = self.taken.iter().find(|(taken, _)| *taken == name);
        let at = taken.map_or(0..0, |(_, span)| span.clone());
        let quote = self.source.quote(at.clone());
        self.source
            .wrong(at, format!("{name}: `{quote}` is {message}"))
    }

    /// Every key that was declared must have been read by now.
    fn finish(self) {
        debug_assert!(
            self.table.is_empty(),
            "declared but unread: {:?}",
            self.table
        );
    }
}

#[cfg(test)]
mod tests {
    use control::{Misbehaviour, PolicyChoice, SliceMode, Span};

    use super::*;

    fn wrong(text: &str) -> String {
        match parse(text, "f.toml") {
            Ok(config) => panic!("taken: {config:?}"),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn everything_declared_is_read() {
        // An example of each, so that a key that was declared and not read trips the reader.
        let mut text = String::new();
        for section in &SECTIONS {
            text += &section.heading();
            text += "\n";
            for about in (section.keys)() {
                text += &format!("{} = {}\n", about.key, about.kind.example);
            }
        }
        let config = parse(&text, "f.toml").unwrap();
        fn all_set<S: Settings>(settings: &S) {
            for setting in S::TABLE {
                assert!((setting.is_set)(settings), "{}", setting.about.key);
            }
        }
        all_set(&config.defaults);
        all_set(&config.residency);
        all_set(&config.limits);
        all_set(&config.cluster);
        all_set(&config.devices[0].settings);
        all_set(&config.tenants[0].ceilings);
        all_set(&config.jobs[0].matches);
        assert_eq!(config.jobs[0].settings, config.defaults);
        let device = &config.devices[0].settings;
        assert_eq!(
            (
                device.mode,
                device.holders,
                device.quantum,
                device.misbehaviour
            ),
            (
                Some(SliceMode::Auto),
                Some(2),
                Some(Span::from_micros(5000)),
                Some(Misbehaviour::Report)
            )
        );
        assert_eq!(device.policy, Some(PolicyChoice::named("stride")));
    }

    #[test]
    fn a_table_of_a_policy_is_its_text() {
        let text =
            "[[device]]\ndevice = \"*\"\npolicy = { name = \"salus-fair\", patience_ms = 20 }\n";
        let config = parse(text, "f").unwrap();
        let policy = config.devices[0].settings.policy.as_ref().unwrap();
        assert_eq!(policy.to_string(), "salus-fair:patience_ms=20");
    }

    #[test]
    fn unknown_keys_and_sections_are_placed_and_corrected() {
        for (text, error) in [
            (
                "[defaults]\nmem = \"1G\"\n  shaer = 0.5\n",
                "f.toml:3:3: unknown key `shaer` in [defaults]: did you mean `share`?",
            ),
            (
                "[[job]]\nname = \"a\"\ncolour = 1\n",
                "f.toml:3:1: unknown key `colour` in [[job]]: it has name, command, user, mem, share, share_min, share_max, class, device, gang, deadline, work, on_arbiter_loss, on_refusal, evictable, overflow, host_memory, iteration_launches",
            ),
            (
                "[[jobs]]\nname = \"a\"\n",
                "f.toml:1:3: unknown section `jobs`: did you mean `job`?",
            ),
            (
                "share = 0.5\n",
                "f.toml:1:1: unknown section `share`: it belongs into a section such as [defaults]",
            ),
            (
                "[gizmo]\n",
                "f.toml:1:2: unknown section `gizmo`: the file has defaults, device, residency, limits, cluster, tenant, job",
            ),
            (
                "[job]\nname = \"a\"\n",
                "f.toml:1:2: `job` is written as one table here: write [[job]]",
            ),
            (
                "defaults = 3\n",
                "f.toml:1:1: `defaults` is written as a list or a value here: write [defaults]",
            ),
            (
                "[[job]]\nmem = \"1G\"\n",
                "f.toml:1:1: [[job]] needs name, command or user",
            ),
            (
                "[[tenant]]\nmem_max = \"1G\"\n",
                "f.toml:1:1: [[tenant]] needs user",
            ),
        ] {
            assert_eq!(wrong(text), error, "{text}");
        }
    }

    #[test]
    fn wrong_values_are_placed_and_reported_with_the_remedy() {
        for (line, place, words) in [
            ("mem = 20", "2:7", &["`20` has no unit", "20GiB", "50%"][..]),
            ("mem = 1_000", "2:7", &["`1_000`", "GiB"]),
            ("mem = \"20\"", "2:7", &["`20` has no unit"]),
            ("mem = \"20Gq\"", "2:7", &["`Gq`", "GiB"]),
            ("mem = true", "2:7", &["`true` is no size", "20GiB"]),
            ("share = 1.5", "2:9", &["`1.5`", "at most 1"]),
            ("share = 0", "2:9", &["`0`", "above 0"]),
            ("share = -0.5", "2:9", &["`-0.5`", "above 0"]),
            ("share = nan", "2:9", &["above 0"]),
            ("share = \"150%\"", "2:9", &["`150%` is no share", "0.5"]),
            ("class = \"best\"", "2:9", &["`best`", "opportunistic"]),
            ("class = 3", "2:9", &["`3` is not known", "opportunistic"]),
            ("on_arbiter_loss = \"die\"", "2:19", &["`die`", "freeze"]),
            ("on_refusal = \"freeze\"", "2:14", &["`freeze`", "closed"]),
            ("share_min = 2", "2:13", &["`2`", "at most 1"]),
            (
                "share = 0.5\nshare_min = 0.6",
                "3:13",
                &["`0.6`", "share of 0.5"],
            ),
            (
                "share = 0.5\nshare_max = 0.4",
                "3:13",
                &["`0.4`", "share of 0.5"],
            ),
            (
                "share_min = 0.5\nshare_max = 0.4",
                "3:13",
                &["`0.4`", "share_min of 0.5"],
            ),
            ("gang = 1", "2:8", &["`1`", "true"]),
            ("deadline = 5", "2:12", &["`5` is no duration", "90s"]),
            ("deadline = \"soon\"", "2:12", &["`soon`", "90s"]),
            ("deadline = \"1h\"", "2:12", &["`\"1h\"`", "work"]),
            (
                "work = \"2h\"\ndeadline = \"1h\"",
                "3:12",
                &["`\"1h\"`", "work of 2h"],
            ),
            ("overflow = \"disk\"", "2:12", &["`disk`", "host or fail"]),
            (
                "overflow = \"host\"",
                "2:12",
                &["`\"host\"`", "`evictable`"],
            ),
            (
                "evictable = false\nhost_memory = \"1GiB\"",
                "3:15",
                &["`\"1GiB\"`", "`evictable`"],
            ),
            (
                "evictable = true\nhost_memory = 3",
                "3:15",
                &["`3`", "unit"],
            ),
            ("device = \"gpu0\"", "2:10", &["`gpu0`", "UUID"]),
            ("device = -1", "2:10", &["`-1`", "index"]),
            ("device = [0, \"x\"]", "2:10", &["`x`", "UUID"]),
            ("device = []", "2:10", &["leave it out"]),
        ] {
            let error = wrong(&format!("[defaults]\n{line}\n"));
            assert!(
                error.starts_with(&format!("f.toml:{place}: ")),
                "{line}: {error}"
            );
            for word in words {
                assert!(error.contains(word), "{line}: {error}");
            }
        }
        for (line, words) in [
            ("quantum = 5", &["`5`", "0.5ms to 1s"][..]),
            ("quantum = \"5s\"", &["`5s`", "0.5ms to 1s"]),
            ("early_wake = \"no\"", &["neither true nor false"]),
            ("mode = \"shared\"", &["`shared`", "concurrent"]),
            (
                "quantum = \"5ms\"\nquantum_min = \"6ms\"",
                &["`\"6ms\"`", "quantum"],
            ),
            ("early_wake = \"yes\"", &["`\"yes\"`", "true"]),
            ("misbehaviour = \"shoot\"", &["`shoot`", "demote"]),
            ("policy = 3", &["`3`", "\"stride\""]),
            (
                "policy = \"strid\"",
                &["f.toml:3:10:", "`strid`", "did you mean `stride`?"],
            ),
            (
                "policy = { name = \"stride\", tickets = 3 }",
                &["f.toml:3:29:", "`tickets`", "it has no parameters"],
            ),
            ("policy = { tickets = 3 }", &["names no policy"]),
            ("holders = 0", &["`0`", "1 to 64"]),
            ("holders = 1.5", &["`1.5`", "1 to 64"]),
        ] {
            let error = wrong(&format!("[[device]]\ndevice = \"*\"\n{line}\n"));
            for word in words {
                assert!(
                    (error.starts_with("f.toml:3:") || error.starts_with("f.toml:4:"))
                        && error.contains(word),
                    "{error}"
                );
            }
        }
        for (line, place, words) in [
            ("slice_over_switch = 0.5", "2:21", ["`0.5`", "1 to 1000"]),
            ("slice_over_switch = \"ten\"", "2:21", ["`\"ten\"`", "10"]),
            ("host_memory = 64", "2:15", ["`64`", "unit"]),
        ] {
            let error = wrong(&format!("[residency]\n{line}\n"));
            assert!(error.starts_with(&format!("f.toml:{place}: ")), "{error}");
            for word in words {
                assert!(error.contains(word), "{line}: {error}");
            }
        }
        let error = wrong("[[job]]\nname = \"\"\n");
        assert!(error.starts_with("f.toml:2:8: name: "), "{error}");
    }

    #[test]
    fn what_is_no_toml_is_placed() {
        let error = wrong("[defaults]\nmem = \"1G\n");
        assert!(error.starts_with("f.toml:2:"), "{error}");
        assert!(!error.contains('\n'), "{error}");
        let error = wrong("[defaults]\nmem = \"1G\"\nmem = \"2G\"\n");
        assert!(error.starts_with("f.toml:3:1: "), "{error}");
    }

    #[test]
    fn a_star_means_every_device() {
        let config = parse("[[device]]\ndevice = \"*\"\nmode = \"concurrent\"\n", "f").unwrap();
        assert_eq!(config.devices[0].device, None);
        assert_eq!(config.devices[0].settings.mode, Some(SliceMode::Concurrent));
    }

    #[test]
    fn a_wrong_hook_is_reported_with_its_place() {
        for (text, place, words) in [
            (
                "[cluster]\nurl = \"10.0.0.1:7070\"\n",
                ":2:7:",
                "10.0.0.1:7070",
            ),
            ("[cluster]\nurl = \"https://a:1\"\n", ":2:7:", "https://a:1"),
            ("[cluster]\nurl = 7070\n", ":2:7:", "7070"),
            ("[cluster]\nnode = \"a\"\n", ":1:1:", "url"),
            (
                "[cluster]\nurl = \"http://a:1\"\nnode = \"a b\"\n",
                ":3:8:",
                "a b",
            ),
            (
                "[cluster]\nurl = \"http://a:1\"\ntoken_file = \"token\"\n",
                ":3:14:",
                "`token` is no absolute path",
            ),
            (
                "[cluster]\nurl = \"http://a:1\"\nuser = \" \"\n",
                ":3:8:",
                "no login name",
            ),
            ("[cluster]\nurl = \"http://a:1\"\nsim = 1\n", ":3:7:", "`1`"),
            (
                "[cluster]\nurl = \"http://a:1\"\ntokenfile = \"/a\"\n",
                ":3:1:",
                "did you mean `token_file`?",
            ),
            (
                "[[cluster]]\nurl = \"http://a:1\"\n",
                ":1:3:",
                "write [cluster]",
            ),
            (
                "[clutser]\nurl = \"http://a:1\"\n",
                ":1:2:",
                "did you mean `cluster`?",
            ),
        ] {
            let error = wrong(text);
            assert!(
                error.contains(&format!("f.toml{place}")) && error.contains(words),
                "{text}{error}"
            );
        }
    }
}
