//! `sublet simulate plan`: where the layers of a model go on GPUs of several types.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::path::Path;

use anyhow::Context as _;
use policy::cluster::planner::{Group, MOST_GROUPS, NoPlan, Plan as Found, Pool, Sum};
use policy::names::nearest;
use serde::Deserialize;
use serde_json::{Value, json};
use toml::Spanned;

use crate::args::Plan;
use crate::config::{ConfigError, Source, read_text};
use crate::exit::Result;
use crate::json::object;
use crate::table::{Align, Table};

/// Most types of GPU.
const MOST_TYPES: usize = 16;

/// The file, as it is written.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Model {
    link: Link,
    gpu: Spanned<Vec<GpuType>>,
    group: Spanned<Vec<Layers>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Link {
    bytes_per_s: Spanned<f64>,
    latency_s: Spanned<f64>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct GpuType {
    #[serde(rename = "type")]
    name: Spanned<String>,
    count: Spanned<u32>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Layers {
    name: Spanned<String>,
    seconds: Spanned<BTreeMap<Spanned<String>, Spanned<f64>>>,
    parameter_bytes: Spanned<f64>,
    activation_bytes: Spanned<f64>,
}

/// A model and GPUs for it.
struct Input {
    types: Vec<String>,
    names: Vec<String>,
    pool: Pool,
    groups: Vec<Group>,
    /// Where both stand in the file.
    gpus_at: Range<usize>,
    groups_at: Range<usize>,
}

/// What is printed.
///
/// # Errors
/// A file that cannot be read or is wrong, with line and column; a plan that is not searched for.
pub fn plan(args: &Plan) -> Result<String> {
    let text = read(&args.model)?;
    let file = args.model.display().to_string();
    let source = Source {
        text: &text,
        file: &file,
    };
    let input = parse(source)?;
    let (pool, groups) = (&input.pool, &input.groups);
    let placed = |error: NoPlan| {
        let at = match error {
            NoPlan::NoGpu | NoPlan::Ways(_) => &input.gpus_at,
            _ => &input.groups_at,
        };
        source.wrong(at.clone(), error.to_string())
    };
    let plan = pool.plan(groups).map_err(placed)?;
    let mut others = vec![
        ("even parts on all GPUs".to_owned(), pool.evenly(groups)),
        (
            "parts by speed on all GPUs".to_owned(),
            pool.proportionally(groups),
        ),
    ];
    for (kind, count) in pool.gpus.iter().enumerate().filter(|(_, n)| **n > 0) {
        let single = pool.on_type(kind, groups).map_err(placed)?;
        others.push((format!("{count} {} only", input.types[kind]), single));
    }
    Ok(match args.json {
        true => as_json(&input, &plan, &others),
        false => as_text(&input, &plan, &others),
    })
}

/// The text of a file, which may be a pipe.
fn read(file: &Path) -> Result<String> {
    let what = || format!("the model {} cannot be read", file.display());
    let opened = File::open(file).with_context(what)?;
    Ok(read_text(opened).with_context(what)?)
}

fn parse(source: Source<'_>) -> std::result::Result<Input, ConfigError> {
    let model: Model = toml::from_str(source.text).map_err(|error| {
        let message = error.message().trim().replace('\n', ", ");
        source.wrong(error.span().unwrap_or(0..0), message)
    })?;
    let wrong = |at: Range<usize>, message: String| Err(source.wrong(at, message));
    let gpus = model.gpu.get_ref();
    if gpus.is_empty() || gpus.iter().all(|gpu| *gpu.count.get_ref() == 0) {
        return wrong(model.gpu.span(), NoPlan::NoGpu.to_string());
    }
    if gpus.len() > MOST_TYPES {
        let message = format!(
            "{} types of GPU are given; at most {MOST_TYPES} are planned for",
            gpus.len()
        );
        return wrong(model.gpu.span(), message);
    }
    let mut types: Vec<String> = Vec::new();
    for gpu in gpus {
        let name = gpu.name.get_ref();
        check_name(source, &gpu.name, "a type of GPU")?;
        if types.contains(name) {
            return wrong(
                gpu.name.span(),
                format!("type of GPU `{name}` is given twice: add the counts"),
            );
        }
        types.push(name.clone());
    }
    let groups = model.group.get_ref();
    if groups.is_empty() {
        return wrong(model.group.span(), NoPlan::NoGroup.to_string());
    }
    if groups.len() > MOST_GROUPS {
        return wrong(model.group.span(), NoPlan::Groups(groups.len()).to_string());
    }
    let mut names: Vec<String> = Vec::new();
    let mut found = Vec::new();
    for layers in groups {
        let name = layers.name.get_ref();
        check_name(source, &layers.name, "a group of layers")?;
        if names.contains(name) {
            return wrong(
                layers.name.span(),
                format!("group `{name}` is given twice: choose another name"),
            );
        }
        names.push(name.clone());
        found.push(Group {
            seconds: seconds(source, layers, &types)?,
            parameter_bytes: number(source, &layers.parameter_bytes, 0.0)?,
            activation_bytes: number(source, &layers.activation_bytes, 0.0)?,
        });
    }
    let pool = Pool {
        gpus: gpus.iter().map(|gpu| *gpu.count.get_ref()).collect(),
        bytes_per_s: number(source, &model.link.bytes_per_s, f64::MIN_POSITIVE)?,
        latency_s: number(source, &model.link.latency_s, 0.0)?,
    };
    Ok(Input {
        types,
        names,
        pool,
        groups: found,
        gpus_at: model.gpu.span(),
        groups_at: model.group.span(),
    })
}

/// A word for a table: neither empty nor with anything that moves a terminal's cursor.
fn check_name(
    source: Source<'_>,
    name: &Spanned<String>,
    what: &str,
) -> std::result::Result<(), ConfigError> {
    let text = name.get_ref();
    let fits = (1..=40).contains(&text.chars().count()) && !text.chars().any(char::is_control);
    if fits {
        return Ok(());
    }
    let message = format!("the name of {what} has 1 to 40 characters, none of them a control");
    Err(source.wrong(name.span(), message))
}

/// A group's time on each type, in the order of the types.
fn seconds(
    source: Source<'_>,
    layers: &Layers,
    types: &[String],
) -> std::result::Result<Vec<f64>, ConfigError> {
    let times = layers.seconds.get_ref();
    if let Some(other) = times.keys().find(|kind| !types.contains(kind.get_ref())) {
        let name = other.get_ref();
        let meant = match nearest(name, types.iter().map(String::as_str)) {
            Some(meant) => format!("did you mean `{meant}`?"),
            None => format!("the types are {}", types.join(", ")),
        };
        let message = format!("no GPU is of type `{name}`; {meant}");
        return Err(source.wrong(other.span(), message));
    }
    let time = |kind: &String| {
        let found = times.iter().find(|(name, _)| name.get_ref() == kind);
        let (_, time) = found.ok_or_else(|| {
            let group = layers.name.get_ref();
            let message =
                format!("group `{group}` has no time for a `{kind}`: measure it there too");
            source.wrong(layers.seconds.span(), message)
        })?;
        number(source, time, f64::MIN_POSITIVE)
    };
    types.iter().map(time).collect()
}

/// A number from `least` on: `f64::MIN_POSITIVE` for one above 0.
fn number(
    source: Source<'_>,
    value: &Spanned<f64>,
    least: f64,
) -> std::result::Result<f64, ConfigError> {
    let number = *value.get_ref();
    if number.is_finite() && number >= least {
        return Ok(number);
    }
    let range = if least > 0.0 {
        "above 0"
    } else {
        "of at least 0"
    };
    let message = format!("{number} is given; a number {range} is expected");
    Err(source.wrong(value.span(), message))
}

fn sum_word(sum: Sum) -> &'static str {
    match sum {
        Sum::Ring => "ring",
        Sum::Server => "server",
    }
}

fn as_json(input: &Input, plan: &Found, others: &[(String, Found)]) -> String {
    let (pool, groups) = (&input.pool, &input.groups);
    let places = plan.places.iter().zip(&input.names).zip(groups);
    let rows: Vec<Value> = places
        .map(|((place, name), group)| {
            let on: serde_json::Map<String, Value> = (input.types.iter().enumerate())
                .filter(|(kind, _)| place.gpus[*kind] > 0)
                .map(|(kind, name)| {
                    let on = json!({"gpus": place.gpus[kind], "part": place.parts[kind]});
                    (name.clone(), on)
                })
                .collect();
            json!({"group": name, "on": on, "sum": sum_word(place.sum),
                "seconds": pool.group_s(group, place)})
        })
        .collect();
    let others: Vec<Value> = (others.iter())
        .map(|(name, other)| {
            json!({"plan": name, "seconds": other.seconds, "gain": other.seconds / plan.seconds})
        })
        .collect();
    object(json!({"iteration_s": plan.seconds, "groups": rows, "others": others}))
}

fn as_text(input: &Input, plan: &Found, others: &[(String, Found)]) -> String {
    let ms = |seconds: f64| format!("{:.3}", 1e3 * seconds);
    let mut heads = vec![("GROUP", Align::Left)];
    heads.extend(input.types.iter().map(|kind| (kind.as_str(), Align::Right)));
    heads.extend([("GRADIENTS", Align::Left), ("ms", Align::Right)]);
    let mut table = Table::new(&heads);
    for ((place, name), group) in plan.places.iter().zip(&input.names).zip(&input.groups) {
        let mut row = vec![name.clone()];
        for (gpus, part) in place.gpus.iter().zip(&place.parts) {
            row.push(match gpus {
                0 => "-".to_owned(),
                gpus => format!("{gpus} x {:.1}%", 100.0 * part),
            });
        }
        let one = place.gpus.iter().sum::<u32>() == 1;
        let sum = if one { "-" } else { sum_word(place.sum) };
        row.extend([sum.to_owned(), ms(input.pool.group_s(group, place))]);
        table.row(row);
    }
    let mut compare = Table::new(&[
        ("PLAN", Align::Left),
        ("ms an iteration", Align::Right),
        ("gain", Align::Right),
    ]);
    compare.row(vec![
        "the one above".to_owned(),
        ms(plan.seconds),
        "-".to_owned(),
    ]);
    for (name, other) in others {
        let gain = format!("{:.2}x", other.seconds / plan.seconds);
        compare.row(vec![name.clone(), ms(other.seconds), gain]);
    }
    format!("{}\n{}", table.render(), compare.render())
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use super::*;
    use crate::args::{self, Command, SimulateCommand};

    const GOOD: &str = r#"[link]
bytes_per_s = 1.25e9
latency_s = 0.0001

[[gpu]]
type = "V100"
count = 2

[[gpu]]
type = "K80"
count = 1

[[group]]
name = "convolutions"
seconds = { V100 = 0.1, K80 = 0.4 }
parameter_bytes = 1_000_000
activation_bytes = 0

[[group]]
name = "classifier"
seconds = { V100 = 0.001, K80 = 0.004 }
parameter_bytes = 500_000_000
activation_bytes = 0
"#;

    fn planned(text: &[u8], more: &[&str]) -> Result<String> {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("model.toml");
        std::fs::write(&file, text).unwrap();
        let words = ["sublet", "simulate", "plan", file.to_str().unwrap()];
        let words = words.iter().chain(more).map(OsString::from);
        match args::parse(words).unwrap().command {
            Command::Simulate(args) => match args.command {
                Some(SimulateCommand::Plan(args)) => plan(&args),
                other => panic!("{other:?}"),
            },
            other => panic!("{other:?}"),
        }
    }

    fn wrong(text: &[u8]) -> String {
        planned(text, &[]).unwrap_err().line()
    }

    #[test]
    fn a_plan_comes_as_tables_and_json() {
        let json: Value =
            serde_json::from_str(&planned(GOOD.as_bytes(), &["--json"]).unwrap()).unwrap();
        // Speeds: 1/0.1 + 1/0.1 + 1/0.4 = 22.5 batches a second.
        let part = |kind: &str| json["groups"][0]["on"][kind]["part"].as_f64().unwrap();
        assert!((part("V100") - 10.0 / 22.5).abs() < 1e-9, "{json}");
        assert!((part("K80") - 2.5 / 22.5).abs() < 1e-9, "{json}");
        // 0.5 GB of gradients take longer to sum than all its work does on one GPU.
        assert_eq!(
            json["groups"][1]["on"],
            json!({"V100": {"gpus": 1, "part": 1.0}})
        );
        let others = json["others"].as_array().unwrap();
        assert_eq!(others.len(), 4, "even, by speed, and each of two types");
        for other in others {
            let gain = other["seconds"].as_f64().unwrap() / json["iteration_s"].as_f64().unwrap();
            assert!((other["gain"].as_f64().unwrap() - gain).abs() < 1e-9 && gain >= 1.0);
        }
        let text = planned(GOOD.as_bytes(), &[]).unwrap();
        for word in [
            "2 x 44.4%",
            "1 x 11.1%",
            "1 x 100.0%",
            "2 V100 only",
            "1 K80 only",
        ] {
            assert!(text.contains(word), "{word}: {text}");
        }
    }

    #[test]
    fn mistakes_are_reported_with_line_and_column() {
        for (from, to, words) in [
            ("[link]", "[lnk]", &[":1:2:", "lnk"][..]),
            ("count = 2", "count = -2", &[":7:9:", "-2"]),
            ("count = 2", "count = 2.5", &[":7:9:", "2.5"]),
            (
                "count = 2",
                "count = 99999999999",
                &[":7:9:", "99999999999"],
            ),
            ("count = 2", "", &[":5:1:", "count"]),
            (
                "latency_s = 0.0001",
                "latency_s = -1",
                &[":3:13:", "-1", "at least 0"],
            ),
            ("latency_s = 0.0001", "latency_s = nan", &[":3:13:", "NaN"]),
            ("1.25e9", "0", &[":2:15:", "above 0"]),
            ("1.25e9", "inf", &[":2:15:", "inf"]),
            ("1.25e9", "\"fast\"", &[":2:15:", "fast"]),
            (
                "type = \"K80\"",
                "type = \"V100\"",
                &[":10:8:", "given twice"],
            ),
            ("type = \"K80\"", "type = \"\"", &[":10:8:", "1 to 40"]),
            (
                "type = \"K80\"",
                "type = \"a\\u001bb\"",
                &[":10:8:", "control"],
            ),
            ("K80 = 0.4", "K8 = 0.4", &[":15:25:", "did you mean `K80`?"]),
            (", K80 = 0.4", "", &[":15:11:", "no time for a `K80`"]),
            ("K80 = 0.4", "K80 = 0", &[":15:31:", "above 0"]),
            ("K80 = 0.4", "K80 = 1e-310", &[":15:31:", "above 0"]),
            (
                "name = \"classifier\"",
                "name = \"convolutions\"",
                &[":20:8:", "given twice"],
            ),
            (
                "parameter_bytes = 1_000_000",
                "parameter_bytes = -1",
                &[":16:19:", "at least 0"],
            ),
            (
                "parameter_bytes = 1_000_000",
                "",
                &[":13:1:", "parameter_bytes"],
            ),
            (
                "activation_bytes = 0\n\n",
                "sise = 1\n\n",
                &[":17:1:", "sise"],
            ),
            ("[link]", "[[link]", &[":1:"]),
        ] {
            assert!(GOOD.contains(from), "{from}");
            let line = wrong(GOOD.replacen(from, to, 1).as_bytes());
            for word in words {
                assert!(line.contains(word), "{from:?} {to:?}: {line}");
            }
        }
        let none = GOOD
            .replace("count = 2", "count = 0")
            .replace("count = 1", "count = 0");
        assert!(wrong(none.as_bytes()).contains("count above 0"));
        let many = GOOD.replace("count = 2", "count = 4_000_000_000");
        let line = wrong(many.as_bytes());
        assert!(
            line.contains("at most 1000") && line.contains("model.toml:5:"),
            "{line}"
        );
        let long = GOOD
            .replace("V100 = 0.1,", "V100 = 1e308,")
            .replace("K80 = 0.4", "K80 = 1e308");
        let huge = long.replace("V100 = 0.001, K80 = 0.004", "V100 = 1e308, K80 = 1e308");
        let huge = huge.replace("bytes_per_s = 1.25e9", "bytes_per_s = 1e-300");
        let line = wrong(huge.as_bytes());
        assert!(line.contains("longer than can be counted"), "{line}");
        assert!(wrong(b"").contains("link"));
        assert!(wrong(b"\xff\xfe").contains("UTF-8"));
        assert!(wrong(&vec![b'#'; (1 << 20) + 1]).contains("longer than"));
    }

    #[test]
    fn the_example_is_planned() {
        let text = include_str!("../../../examples/plans/vgg16.toml");
        let json: Value =
            serde_json::from_str(&planned(text.as_bytes(), &["--json"]).unwrap()).unwrap();
        assert!(json["others"][0]["gain"].as_f64().unwrap() > 1.0);
    }
}
