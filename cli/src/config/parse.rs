//! TOML text to [`Config`], by way of the key table; the first thing wrong is the error.

use std::ops::Range;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::error::{ConfigError, Source};
use super::keys::{self, Key, Section};
use super::value::{
    Value, device_match, devices, file_path, flag, holders, mode, node, pattern, policy, processes,
    quantum_us, ratio, share, size, span, url, user, variables, word,
};
use super::{ClusterRule, Config, DeviceRule, JobRule, JobSettings, ResidencyRule, TenantRule};
use control::DeviceSettings;
use policy::names::nearest;

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
        let Some(section) = keys::SECTIONS
            .into_iter()
            .find(|section| section.name == name.get_ref())
        else {
            return Err(unknown_section(source, &name));
        };
        for table in tables(source, section, &name.span(), value)? {
            let mut reader = Reader::new(source, section, table)?;
            if std::ptr::eq(section, &raw const keys::DEFAULTS) {
                config.defaults = settings(&mut reader)?;
            } else if std::ptr::eq(section, &raw const keys::DEVICES) {
                config.devices.push(device(&mut reader)?);
            } else if std::ptr::eq(section, &raw const keys::RESIDENCY) {
                config.residency = ResidencyRule {
                    host_memory: reader.take("host_memory", size)?,
                    slice_over_switch: reader.take("slice_over_switch", ratio)?,
                };
            } else if std::ptr::eq(section, &raw const keys::LIMITS) {
                config.job_processes = reader.take("job_processes", processes)?;
            } else if std::ptr::eq(section, &raw const keys::CLUSTER) {
                config.cluster = ClusterRule {
                    url: reader.take("url", url)?,
                    token_file: reader.take("token_file", file_path)?,
                    node: reader.take("node", node)?,
                    user: reader.take("user", user)?,
                    dir: reader.take("dir", file_path)?,
                    env: reader.take("env", variables)?.unwrap_or_default(),
                    sim: reader.take("sim", flag)?,
                };
            } else if std::ptr::eq(section, &raw const keys::TENANTS) {
                config.tenants.push(tenant(&mut reader)?);
            } else {
                config.jobs.push(job(&mut reader)?);
            }
            reader.finish();
        }
    }
    Ok(config)
}

fn settings(reader: &mut Reader<'_, '_>) -> Result<JobSettings, ConfigError> {
    let settings = JobSettings {
        mem: reader.take("mem", size)?,
        share: reader.take("share", share)?,
        share_min: reader.take("share_min", share)?,
        share_max: reader.take("share_max", share)?,
        class: reader.take("class", word)?,
        devices: reader.take("device", devices)?,
        gang: reader.take("gang", flag)?,
        deadline: reader.take("deadline", span)?,
        work: reader.take("work", span)?,
        on_arbiter_loss: reader.take("on_arbiter_loss", word)?,
        on_refusal: reader.take("on_refusal", word)?,
        evictable: reader.take("evictable", flag)?,
        overflow: reader.take("overflow", word)?,
        host_memory: reader.take("host_memory", size)?,
    };
    settings
        .check()
        .map_err(|(key, message)| reader.wrong(key, &message))?;
    Ok(settings)
}

fn job(reader: &mut Reader<'_, '_>) -> Result<JobRule, ConfigError> {
    Ok(JobRule {
        name: reader.take("name", pattern)?,
        command: reader.take("command", pattern)?,
        user: reader.take("user", pattern)?,
        settings: settings(reader)?,
    })
}

fn device(reader: &mut Reader<'_, '_>) -> Result<DeviceRule, ConfigError> {
    let named = reader.policy_names();
    let rule = DeviceRule {
        device: reader.take("device", device_match)?.flatten(),
        settings: DeviceSettings {
            mode: reader.take("mode", mode)?,
            policy: reader.take("policy", policy)?,
            holders: reader.take("holders", holders)?,
            quantum_max_us: reader.take("quantum_ms", quantum_us)?,
            quantum_min_us: reader.take("quantum_min_ms", quantum_us)?,
            early_wake: reader.take("early_wake", flag)?,
            misbehaviour: reader.take("misbehaviour", word)?,
        },
        mem_reserve: reader.take("mem_reserve", size)?,
    };
    if let Some(choice) = &rule.settings.policy
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
    if let (Some(min_us), Some(max_us)) =
        (rule.settings.quantum_min_us, rule.settings.quantum_max_us)
        && min_us > max_us
    {
        let message = "longer than quantum_ms: write the same or less";
        return Err(reader.wrong("quantum_min_ms", message));
    }
    Ok(rule)
}

fn tenant(reader: &mut Reader<'_, '_>) -> Result<TenantRule, ConfigError> {
    Ok(TenantRule {
        // PANIC: the section needs it, and the reader has checked.
        user: reader.take("user", pattern)?.expect("a required key"),
        share_max: reader.take("share_max", share)?,
        mem_max: reader.take("mem_max", size)?,
    })
}

fn unknown_section(source: Source<'_>, name: &Spanned<std::borrow::Cow<'_, str>>) -> ConfigError {
    let names = keys::SECTIONS.map(|section| section.name);
    let word = name.get_ref();
    let remedy = if let Some(near) = nearest(word, names) {
        format!("did you mean `{near}`?")
    } else if let Some(section) = keys::SECTIONS
        .into_iter()
        .find(|section| section.keys.iter().any(|key| key.name == word.as_ref()))
    {
        format!("it belongs into a section such as {}", heading(section))
    } else {
        "the file has defaults, device, residency, limits, cluster, tenant and job".to_owned()
    };
    source.wrong(name.span(), format!("unknown section `{word}`: {remedy}"))
}

fn heading(section: &Section) -> String {
    if section.repeated {
        format!("[[{}]]", section.name)
    } else {
        format!("[{}]", section.name)
    }
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
                heading(section)
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
struct Reader<'s, 't> {
    source: Source<'s>,
    section: &'static Section,
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
        let names = || section.keys.iter().map(|key| key.name);
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
                heading(section)
            );
            return Err(source.wrong(key.span(), message));
        }
        let needed = section.needs_one_of;
        if !needed.is_empty() && !needed.iter().any(|name| table.contains_key(*name)) {
            let message = format!(
                "this {} says not what it is for: give it {}",
                heading(section),
                needed.join(", ").replacen(", user", " or user", 1)
            );
            return Err(source.wrong(span, message));
        }
        Ok(Self {
            source,
            section,
            table,
            taken: Vec::new(),
        })
    }

    fn take<T>(
        &mut self,
        name: &'static str,
        read: impl FnOnce(&Value<'_, '_>) -> Result<T, String>,
    ) -> Result<Option<T>, ConfigError> {
        let declared = |key: &Key| key.name == name;
        debug_assert!(self.section.keys.iter().any(declared), "undeclared {name}");
        let Some(value) = self.table.remove(name) else {
            return Ok(None);
        };
        self.taken.push((name, value.span()));
        read(&Value::new(&value, self.source))
            .map(Some)
            .map_err(|message| {
                self.source
                    .wrong(value.span(), format!("{name}: {message}"))
            })
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
    use std::time::Duration;

    use control::{
        Class, DeviceSelector, FailMode, MemLimit, Misbehaviour, OnRefusal, Overflow, PolicyChoice,
        SliceMode,
    };

    use super::super::keys::Kind;
    use super::super::pattern::Pattern;
    use super::*;

    fn wrong(text: &str) -> String {
        match parse(text, "f.toml") {
            Ok(config) => panic!("taken: {config:?}"),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn everything_declared_is_read() {
        // One value of each kind, so that a key that was declared and not read trips the reader.
        let mut text = String::new();
        for section in keys::SECTIONS {
            text += &heading(section);
            text += "\n";
            for key in section.keys {
                let value = match key.kind {
                    Kind::Size => "\"8GiB\"",
                    Kind::Share => "0.5",
                    Kind::Class => "\"opportunistic\"",
                    Kind::FailMode => "\"freeze\"",
                    Kind::OnRefusal => "\"closed\"",
                    Kind::Mode => "\"auto\"",
                    Kind::Quantum => "2.5",
                    Kind::Policy => "\"stride\"",
                    Kind::Holders => "2",
                    Kind::Processes => "70",
                    Kind::Misbehaviour => "\"report\"",
                    Kind::Flag => "true",
                    Kind::Overflow => "\"host\"",
                    Kind::Ratio => "12.5",
                    Kind::Span => "\"1.5h\"",
                    Kind::Devices => "[0, \"GPU-ff\"]",
                    Kind::DeviceMatch => "1",
                    Kind::Pattern => "\"a*\"",
                    Kind::Url => "\"http://hook:7070\"",
                    Kind::File => "\"/a/token\"",
                    Kind::Directory => "\"/a/jobs\"",
                    Kind::Variables => "\"A, B_2\"",
                    Kind::Node => "\"node-7\"",
                    Kind::User => "\"train\"",
                };
                text += &format!("{} = {value}\n", key.name);
            }
        }
        let settings = JobSettings {
            mem: Some(MemLimit::Bytes(8 << 30)),
            share: Some(0.5),
            share_min: Some(0.5),
            share_max: Some(0.5),
            class: Some(Class::Opportunistic),
            devices: Some(vec![
                DeviceSelector::Index(0),
                DeviceSelector::Uuid("GPU-ff".into()),
            ]),
            gang: Some(true),
            deadline: Some(Duration::from_secs(5400)),
            work: Some(Duration::from_secs(5400)),
            on_arbiter_loss: Some(FailMode::Freeze),
            on_refusal: Some(OnRefusal::Closed),
            evictable: Some(true),
            overflow: Some(Overflow::Host),
            host_memory: Some(MemLimit::Bytes(8 << 30)),
        };
        let all = || Some(Pattern::new("a*"));
        assert_eq!(
            parse(&text, "f.toml").unwrap(),
            Config {
                path: None,
                defaults: settings.clone(),
                devices: vec![DeviceRule {
                    device: Some(DeviceSelector::Index(1)),
                    settings: DeviceSettings {
                        mode: Some(SliceMode::Auto),
                        policy: Some(PolicyChoice::named("stride")),
                        holders: Some(2),
                        quantum_min_us: Some(2500),
                        quantum_max_us: Some(2500),
                        early_wake: Some(true),
                        misbehaviour: Some(Misbehaviour::Report),
                    },
                    mem_reserve: Some(MemLimit::Bytes(8 << 30)),
                }],
                job_processes: Some(70),
                cluster: ClusterRule {
                    url: Some("http://hook:7070".into()),
                    token_file: Some("/a/token".into()),
                    node: Some("node-7".into()),
                    user: Some("train".into()),
                    dir: Some("/a/jobs".into()),
                    env: vec!["A".into(), "B_2".into()],
                    sim: Some(true),
                },
                residency: ResidencyRule {
                    host_memory: Some(MemLimit::Bytes(8 << 30)),
                    slice_over_switch: Some(12.5),
                },
                tenants: vec![TenantRule {
                    user: Pattern::new("a*"),
                    share_max: Some(0.5),
                    mem_max: Some(MemLimit::Bytes(8 << 30)),
                }],
                jobs: vec![JobRule {
                    name: all(),
                    command: all(),
                    user: all(),
                    settings,
                }],
            }
        );
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
                "f.toml:3:1: unknown key `colour` in [[job]]: it has name, command, user, mem, share, share_min, share_max, class, device, gang, deadline, work, on_arbiter_loss, on_refusal, evictable, overflow, host_memory",
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
                "f.toml:1:2: unknown section `gizmo`: the file has defaults, device, residency, limits, cluster, tenant and job",
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
                "f.toml:1:1: this [[job]] says not what it is for: give it name, command or user",
            ),
            (
                "[[tenant]]\nmem_max = \"1G\"\n",
                "f.toml:1:1: this [[tenant]] says not what it is for: give it user",
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
            ("mem = true", "2:7", &["`true` is no text", "\"20GiB\""]),
            ("share = 1.5", "2:9", &["`1.5`", "at most 1"]),
            ("share = 0", "2:9", &["`0`", "above 0"]),
            ("share = -0.5", "2:9", &["`-0.5`", "above 0"]),
            ("share = nan", "2:9", &["above 0"]),
            ("share = \"50%\"", "2:9", &["`\"50%\"` is no number", "0.5"]),
            ("class = \"best\"", "2:9", &["`best`", "opportunistic"]),
            ("class = 3", "2:9", &["`3` is no text"]),
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
            ("deadline = 5", "2:12", &["`5` is no text", "90s"]),
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
            ("device = []", "2:10", &["leave the key out"]),
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
            ("quantum_ms = 0.1", &["`0.1`", "0.5 to 1000"][..]),
            ("quantum_ms = 5000", &["`5000`", "0.5 to 1000"]),
            ("early_wake = \"no\"", &["neither true nor false"]),
            ("mode = \"shared\"", &["`shared`", "concurrent"]),
            ("quantum_ms = 5\nquantum_min_ms = 6", &["`6`", "quantum_ms"]),
            ("early_wake = \"yes\"", &["`\"yes\"`", "true"]),
            ("misbehaviour = \"shoot\"", &["`shoot`", "demote"]),
            ("policy = 3", &["`3`", "name"]),
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
            ("[cluster]\nurl = 7070\n", ":2:7:", "`7070` is no text"),
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
