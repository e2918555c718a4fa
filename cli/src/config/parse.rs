//! TOML text to [`Config`], by way of the table of sections. Everything that is wrong is found in
//! one go, and nothing of a file counts where anything in it is.

use std::borrow::Cow;
use std::cell::RefCell;
use std::ops::Range;

use control::setting::{About, Form};
use control::{DeviceSettings, JobSettings, Settings};
use policy::names::nearest;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::Config;
use super::error::{ConfigError, ConfigErrors, Source};
use super::sections::{SECTIONS, Section};

/// Mistakes of a file that are reported; one that is no quota file at all has no end of them.
const MOST_ERRORS: usize = 50;

pub fn parse(text: &str, file: &str) -> Result<Config, ConfigErrors> {
    let source = Source { text, file };
    let errors = Errors::default();
    let (document, broken) = DeTable::parse_recoverable(text);
    for error in broken {
        let message = error.message().trim().replace('\n', ", ");
        errors.push(source.wrong(error.span().unwrap_or(0..0), message));
    }
    // What is left of a broken text would be reported for what is missing from it.
    errors.end()?;

    let mut config = Config::default();
    // The parser keeps tables by key; errors are reported in the order of the file.
    let mut sections: Vec<_> = document.into_inner().into_iter().collect();
    sections.sort_by_key(|(name, _)| name.span().start);
    for (name, value) in sections {
        let Some(section) = SECTIONS
            .iter()
            .find(|section| section.name == name.get_ref())
        else {
            errors.push(unknown_section(source, &name));
            continue;
        };
        let tables = match tables(source, section, &name.span(), value) {
            Ok(tables) => tables,
            Err(error) => {
                errors.push(error);
                continue;
            }
        };
        for table in tables {
            let reader = Reader::of_section(source, section, table, &errors);
            if let Some(mut reader) = reader {
                (section.read)(&mut reader, &mut config);
                reader.finish();
            }
        }
    }
    errors.end()?;
    Ok(config)
}

/// What was found to be wrong.
#[derive(Debug, Default)]
pub struct Errors(RefCell<Vec<ConfigError>>);

impl Errors {
    fn push(&self, error: ConfigError) {
        let mut errors = self.0.borrow_mut();
        if errors.len() < MOST_ERRORS {
            errors.push(error);
        }
    }

    /// # Errors
    /// Where there are any.
    fn end(&self) -> Result<(), ConfigErrors> {
        let mut errors = self.0.take();
        if errors.is_empty() {
            return Ok(());
        }
        errors.sort_by_key(ConfigError::place);
        Err(ConfigErrors(errors))
    }
}

pub fn job_settings(reader: &mut Reader<'_, '_>) -> JobSettings {
    let settings: JobSettings = reader.take();
    if let Err((key, message)) = settings.check() {
        reader.wrong(key, &message);
    }
    settings
}

pub fn device_settings(reader: &mut Reader<'_, '_>) -> DeviceSettings {
    let named = reader.policy_names();
    let settings: DeviceSettings = reader.take();
    if let Some(choice) = &settings.policy
        && let Err((parameter, message)) = arbiter::check_policy(choice)
    {
        // The parameter that is wrong, where it stands; else the policy.
        let at = named
            .iter()
            .find(|(name, _)| Some(name) == parameter.as_ref());
        match at {
            Some((_, at)) => reader.push(at.clone(), format!("policy: {message}")),
            None => reader.wrong_at("policy", &format!("policy: {message}")),
        }
    }
    if let (Some(min), Some(max)) = (settings.quantum_min, settings.quantum)
        && min > max
    {
        let message = "longer than quantum: write the same or less";
        reader.wrong("quantum_min", message);
    }
    settings
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

/// One table, from which keys are taken.
pub struct Reader<'s, 't> {
    source: Source<'s>,
    errors: &'s Errors,
    table: DeTable<'t>,
    span: Range<usize>,
    /// Where the values stand that have been taken.
    taken: Vec<(&'static str, Range<usize>)>,
}

impl<'s, 't> Reader<'s, 't> {
    /// Takes out keys that the section does not have; `None`: it lacks one that it needs.
    fn of_section(
        source: Source<'s>,
        section: &'static Section,
        table: Spanned<DeTable<'t>>,
        errors: &'s Errors,
    ) -> Option<Self> {
        let keys = (section.keys)();
        let keys = keys.iter().map(|about| about.key);
        let names: Vec<&str> = keys
            .chain(section.parts.iter().map(|part| part.name))
            .collect();
        let reader = Self::new(source, &section.heading(), &names, table, errors);
        let needed = section.needs_one_of;
        if needed.is_empty() || needed.iter().any(|name| reader.table.contains_key(*name)) {
            return Some(reader);
        }
        let message = format!("{} needs {}", section.heading(), needed.join(" or "));
        reader.push(reader.span.clone(), message);
        None
    }

    /// Takes out keys that are not among `names`.
    fn new(
        source: Source<'s>,
        heading: &str,
        names: &[&str],
        table: Spanned<DeTable<'t>>,
        errors: &'s Errors,
    ) -> Self {
        let span = table.span();
        let mut table = table.into_inner();
        let mut unknown = Vec::new();
        for key in table.keys() {
            let word = key.get_ref().as_ref();
            if names.contains(&word) {
                continue;
            }
            let remedy = match nearest(word, names.iter().copied()) {
                Some(near) => format!("did you mean `{near}`?"),
                None => format!("it has {}", names.join(", ")),
            };
            let message = format!("unknown key `{word}` in {heading}: {remedy}");
            errors.push(source.wrong(key.span(), message));
            unknown.push(word.to_owned());
        }
        for key in unknown {
            table.remove(key.as_str());
        }
        Self {
            source,
            errors,
            table,
            span,
            taken: Vec::new(),
        }
    }

    /// `file:line:column` of the table.
    pub fn place(&self) -> String {
        self.source.place_text(&self.span)
    }

    /// What is read from a table in this one; `None`: it is not there, or is no table.
    pub fn part<T>(
        &mut self,
        name: &'static str,
        read: impl FnOnce(&mut Reader<'_, '_>) -> T,
    ) -> Option<T> {
        let part = SECTIONS.iter().flat_map(|section| section.parts);
        let part = part.into_iter().find(|part| part.name == name)?;
        let value = self.table.remove(name)?;
        let span = value.span();
        let DeValue::Table(table) = value.into_inner() else {
            let quote = self.source.quote(span.clone());
            let message = format!("{name}: `{quote}` is no table: write {name} = {{ ... }}");
            self.push(span, message);
            return None;
        };
        let keys = (part.keys)();
        let names: Vec<&str> = keys.iter().map(|about| about.key).collect();
        let table = Spanned::new(span, table);
        let heading = format!("`{name}`");
        let mut reader = Reader::new(self.source, &heading, &names, table, self.errors);
        let read = read(&mut reader);
        reader.finish();
        Some(read)
    }

    /// The settings of a table that stand here.
    pub fn take<S: Settings>(&mut self) -> S {
        let mut settings = S::default();
        for setting in S::TABLE {
            let about = &setting.about;
            let Some(value) = self.table.remove(about.key) else {
                continue;
            };
            self.taken.push((about.key, value.span()));
            let read = text_of(&value, self.source, about).and_then(|text| (setting.parse)(&text));
            match read {
                Ok(read) => settings = read.or(&settings),
                Err(message) => self.push(value.span(), format!("{}: {message}", about.key)),
            }
        }
        settings
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

    fn push(&self, at: Range<usize>, message: String) {
        self.errors.push(self.source.wrong(at, message));
    }

    /// Says what is wrong, at the place of a value that was taken.
    fn wrong_at(&self, name: &str, message: &str) {
        let taken = self.taken.iter().find(|(taken, _)| *taken == name);
        let at = taken.map_or(self.span.clone(), |(_, span)| span.clone());
        self.push(at, message.to_owned());
    }

    /// Says what is wrong with a value that was taken, in the light of others.
    fn wrong(&self, name: &str, message: &str) {
        let taken = self.taken.iter().find(|(taken, _)| *taken == name);
        let at = taken.map_or(self.span.clone(), |(_, span)| span.clone());
        let quote = self.source.quote(at.clone());
        self.push(at, format!("{name}: `{quote}` is {message}"));
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
            for part in section.parts {
                for about in (part.keys)() {
                    text += &format!("{}.{} = {}\n", part.name, about.key, about.kind.example);
                }
            }
        }
        let config = parse(&text, "f.toml").unwrap();
        fn all_set<S: Settings>(settings: &S) {
            for setting in S::TABLE {
                assert!((setting.is_set)(settings), "{}", setting.about.key);
            }
        }
        all_set(&config.defaults[0].set);
        all_set(&config.residency);
        all_set(&config.limits);
        all_set(&config.cluster);
        all_set(&config.api);
        all_set(&config.devices[0].settings);
        all_set(&config.users[0].ceilings);
        all_set(&config.rules[0].matches);
        assert_eq!(config.rules[0].set, config.defaults[0].set);
        let caps = &config.rules[0].cap;
        assert_eq!(*caps, config.rules[0].set.only(|about| about.capped));
        assert!(caps.mem.is_some() && caps.class.is_some());
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
                "[[rule]]\nset.mem = \"1G\"\ncolour = 1\n",
                "f.toml:3:1: unknown key `colour` in [[rule]]: it has match, set, cap",
            ),
            (
                "[[rule]]\ncap.gang = true\n",
                "f.toml:2:5: unknown key `gang` in `cap`: it has mem, share, share_min, share_max, class, host_memory",
            ),
            (
                "[[rule]]\nmatch = { uesr = \"a\" }\ncap.mem = \"1G\"\n",
                "f.toml:2:11: unknown key `uesr` in `match`: did you mean `user`?",
            ),
            (
                "[[rule]]\nset = 3\n",
                "f.toml:2:7: set: `3` is no table: write set = { ... }",
            ),
            (
                "[[rules]]\nset.mem = \"1G\"\n",
                "f.toml:1:3: unknown section `rules`: did you mean `rule`?",
            ),
            (
                "share = 0.5\n",
                "f.toml:1:1: unknown section `share`: it belongs into a section such as [defaults]",
            ),
            (
                "[gizmo]\n",
                "f.toml:1:2: unknown section `gizmo`: the file has defaults, device, residency, limits, cluster, api, user, rule",
            ),
            (
                "[rule]\nset.mem = \"1G\"\n",
                "f.toml:1:2: `rule` is written as one table here: write [[rule]]",
            ),
            (
                "defaults = 3\n",
                "f.toml:1:1: `defaults` is written as a list or a value here: write [defaults]",
            ),
            (
                "[[rule]]\nmatch.user = \"a\"\n",
                "f.toml:1:1: [[rule]] needs set or cap",
            ),
            (
                "[[user]]\nmem_max = \"1G\"\n",
                "f.toml:1:1: [[user]] needs user",
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
            ("mode = \"shared\"", &["`shared`", "concurrent", "lend"]),
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
        for (line, place, words) in [
            ("match.name = \"\"", "2:14: name: ", "matches nothing"),
            (
                "match.user = [\"a\", \"\"]",
                "2:14: user: ",
                "matches nothing",
            ),
            ("match.user = []", "2:14: user: ", "matches nothing"),
            (
                "match.group = \"no-such\"",
                "2:15: group: ",
                "no group `no-such`",
            ),
            ("set = { mem = 3 }", "2:15: mem: ", "`3` has no unit"),
            ("set.deadline = \"1h\"", "2:16: deadline: ", "`work`"),
        ] {
            let error = wrong(&format!("[[rule]]\n{line}\n[rule.cap]\nmem = \"1G\"\n"));
            assert!(error.starts_with(&format!("f.toml:{place}")), "{error}");
            assert!(error.contains(words), "{error}");
        }
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
    fn everything_that_is_wrong_is_reported_in_one_go() {
        let text = "[defaults]\nmem = 20\nshaer = 0.5\n[[user]]\nshare_max = 2\n[gizmo]\n\
                    [[rule]]\nset = { mem = \"1G\", share = 3 }\n[[rule]]\ncap = { mem = true }\n";
        let Err(ConfigErrors(errors)) = parse(text, "f.toml") else {
            panic!("taken");
        };
        let places: Vec<String> = errors
            .iter()
            .map(|error| error.to_string().split(": ").next().unwrap().to_owned())
            .collect();
        assert_eq!(
            places,
            [
                "f.toml:2:7",
                "f.toml:3:1",
                "f.toml:4:1",
                "f.toml:6:2",
                "f.toml:8:29",
                "f.toml:10:15"
            ]
        );
        let all = ConfigErrors(errors).to_string();
        assert!(all.contains("and 5 more") && !all.contains('\n'), "{all}");
        let many = "a = 1\n".repeat(1000).replace("a ", "[a]\nb ");
        let Err(ConfigErrors(errors)) = parse(&many, "f.toml") else {
            panic!("taken");
        };
        assert!(errors.len() <= MOST_ERRORS, "{}", errors.len());
    }

    #[test]
    fn a_star_means_every_device() {
        let config = parse("[[device]]\ndevice = \"*\"\nmode = \"concurrent\"\n", "f").unwrap();
        assert_eq!(config.devices[0].device, None);
        assert_eq!(config.devices[0].settings.mode, Some(SliceMode::Concurrent));
    }

    #[test]
    fn a_device_may_lend() {
        let config = parse("[[device]]\ndevice = 0\nmode = \"lend\"\n", "f").unwrap();
        assert_eq!(config.devices[0].settings.mode, Some(SliceMode::Lend));
        let error = wrong("[[device]]\ndevice = 0\nmode = \"lends\"\n");
        assert!(
            error.contains("`lends`") && error.contains("lend"),
            "{error}"
        );
    }

    #[test]
    fn a_wrong_hook_is_reported_with_its_place() {
        for (text, place, words) in [
            (
                "[cluster]\nurl = \"10.0.0.1:7070\"\n",
                ":2:7:",
                "10.0.0.1:7070",
            ),
            ("[cluster]\nurl = \"ftp://a:1\"\n", ":2:7:", "ftp://a:1"),
            ("[cluster]\nurl = 7070\n", ":2:7:", "7070"),
            ("[api]\nlisten = \"localhost\"\n", ":2:10:", "10.0.0.7:7443"),
            ("[api]\nlisten = 7443\n", ":2:10:", "7443"),
            ("[api]\ncert_file = \"/a\"\n", ":1:1:", "listen"),
            (
                "[api]\nlisten = \"[::]:1\"\nkey_file = \"key\"\n",
                ":3:12:",
                "absolute",
            ),
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
