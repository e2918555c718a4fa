//! `sublet config`: what is wrong with quota files, what is in force, and what may stand in them.

use anyhow::anyhow;
use control::paths::{RuntimeDir, Surroundings};
use control::place::Identity;
use control::{
    Client, ClientError, ConfigReport, ConfigStatus, ConfigValue, ConfigWatch, JobSettings,
    Settings, in_force, text_of,
};
use serde_json::json;

use crate::args::{ConfigCheck, ConfigShow};
use crate::config::{Config, ConfigError, ConfigErrors, Places, Sources, Subject};
use crate::connect::{self, Unreachable};
use crate::exit::Result;
use crate::table::{Align, Table};

/// Exit code where something is wrong with a file.
const WRONG: u8 = 1;

/// What to print, and the exit code.
///
/// # Errors
/// None: what is wrong with files is what is printed.
pub fn check(args: &ConfigCheck) -> Result<(String, u8)> {
    let (mut files, mut errors) = (Vec::new(), Vec::new());
    let mut add = |read: std::result::Result<Config, ConfigErrors>| match read {
        Ok(config) => files.extend(config.paths),
        Err(wrong) => errors.extend(wrong.0),
    };
    if args.files.is_empty() {
        let mut sources = Sources::of_arbiter(None, args.config_dir.as_deref());
        // The user's own is looked for as `sublet run` does.
        (sources.named, sources.own) = (None, None);
        add(sources.load());
        add(Config::find(None, &Places::of_a_user()));
    }
    for file in &args.files {
        add(Config::load(file));
    }
    let code = if errors.is_empty() { 0 } else { WRONG };
    if args.json {
        let errors: Vec<_> = errors.iter().map(error_json).collect();
        let report = json!({ "ok": code == 0, "files": files, "errors": errors });
        return Ok((crate::json::object(report), code));
    }
    let mut text = String::new();
    for error in &errors {
        text += &format!("{error}\n");
    }
    if errors.is_empty() {
        for file in &files {
            text += &format!("{}: nothing is wrong\n", file.display());
        }
        if files.is_empty() {
            text += "there is no quota file; defaults are in force\n";
        }
    }
    Ok((text, code))
}

fn error_json(error: &ConfigError) -> serde_json::Value {
    let (line, column) = error.place();
    let whole = error.to_string();
    let (file, message) = match error {
        ConfigError::Wrong { file, message, .. } => (file.clone(), message.as_str()),
        ConfigError::Unreadable { path, .. } | ConfigError::Untrusted { path, .. } => {
            (path.display().to_string(), whole.as_str())
        }
    };
    let place = |at: usize| (at > 0).then_some(at);
    json!({ "file": file, "line": place(line), "column": place(column), "message": message })
}

/// What to print.
///
/// # Errors
/// The arbiter's refusal, or an arbiter that does not answer; without one, quota files that are
/// wrong.
pub fn show(args: &ConfigShow) -> Result<String> {
    let dir = RuntimeDir::find(&Surroundings::of_this_process())?;
    let asked = connect::ask(
        || connect::existing(&dir),
        |arbiter: &mut Client| arbiter.config(args.job_of, args.user.as_deref()),
    );
    let (report, runs) = match asked {
        Ok(report) => (report, true),
        Err(error) if error.is_absence() && args.job_of.is_none() => (to_be(args)?, false),
        Err(Unreachable::Client(ClientError::Refused(refusal))) => {
            return Err(anyhow!("the arbiter does not say: {refusal}").into());
        }
        Err(error) => return Err(error.into()),
    };
    if args.json {
        let mut value = serde_json::to_value(&report)?;
        value["arbiter_runs"] = runs.into();
        return Ok(crate::json::object(value));
    }
    Ok(text_of_report(&report, runs))
}

/// What an arbiter that starts now would go by.
fn to_be(args: &ConfigShow) -> Result<ConfigReport> {
    let config = Sources::of_arbiter(None, None).load()?;
    let own = crate::run::user_name();
    let user = args.user.clone().unwrap_or_else(|| own.clone());
    let identity = if user == own {
        Identity::of_process(std::process::id())
    } else {
        Identity::default()
    };
    let (set, caps) = config.layers_for(Subject {
        name: "",
        command_line: "",
        user: &user,
        identity: &identity,
    });
    let it = in_force(&JobSettings::default(), &set, &caps, &[], 0);
    let value = |key: &str, value: String, from: &str| ConfigValue {
        key: key.to_owned(),
        value,
        from: from.to_owned(),
    };
    let settings = it.bounds.from.iter();
    let settings =
        settings.filter_map(|(key, from)| Some(value(key, text_of(&it.settings, key)?, from)));
    let caps = caps.iter().flat_map(|layer| {
        let keys = JobSettings::TABLE.iter().map(|setting| setting.about.key);
        keys.filter_map(|key| Some(value(key, text_of(&layer.settings, key)?, &layer.from)))
    });
    let totals = config.user(&user).map_or_else(Vec::new, |rule| {
        let most = &rule.ceilings;
        let totals = [
            ("share_max", most.share_max.map(|most| most.to_string())),
            ("mem_max", most.mem_max.map(|most| most.to_string())),
            ("jobs_max", most.jobs_max.map(|most| most.to_string())),
        ];
        let totals = totals.into_iter();
        totals
            .filter_map(|(key, text)| Some(value(key, text?, &rule.from)))
            .collect()
    });
    Ok(ConfigReport {
        status: ConfigStatus {
            files: config.paths.clone(),
            ..ConfigStatus::default()
        },
        job: None,
        settings: settings.collect(),
        caps: caps.collect(),
        capped: it.bounds.capped,
        totals,
        user,
    })
}

fn text_of_report(report: &ConfigReport, runs: bool) -> String {
    let status = &report.status;
    let files = status.files.iter().map(|file| file.display().to_string());
    let mut text = String::new();
    for file in files {
        text += &format!("quota file: {file}\n");
    }
    if text.is_empty() {
        text += "quota file: none\n";
    }
    text += match (runs, status.watch) {
        (false, _) => "no arbiter runs: this is what one would go by that starts now\n",
        (true, ConfigWatch::Inotify) => "changes: noticed at once\n",
        (true, ConfigWatch::Polling) => "changes: looked for each second\n",
        (true, ConfigWatch::Off | ConfigWatch::Unknown) => "changes: by `sublet reload`\n",
    };
    text += &crate::ps::mistakes_of(status);
    text += &match &report.job {
        Some(job) => format!("\njob `{job}` of {}:\n", report.user),
        None => format!("\na job of {} that asks for nothing:\n", report.user),
    };
    for (title, values) in [
        ("SETTING", &report.settings),
        ("AT MOST", &report.caps),
        ("ALL JOBS", &report.totals),
    ] {
        if values.is_empty() {
            continue;
        }
        let mut table = Table::new(&[
            (title, Align::Left),
            ("VALUE", Align::Left),
            ("FROM", Align::Left),
        ]);
        for value in values {
            table.row(vec![
                value.key.clone(),
                value.value.clone(),
                value.from.clone(),
            ]);
        }
        text += &table.render();
    }
    if report.settings.is_empty() && report.caps.is_empty() && report.totals.is_empty() {
        text += "defaults\n";
    }
    for capped in &report.capped {
        text += &format!("{capped}\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use control::Capped;

    use super::*;

    #[test]
    fn a_report_says_what_is_in_force_and_where_it_stands() {
        let value = |key: &str, value: &str, from: &str| ConfigValue {
            key: key.into(),
            value: value.into(),
            from: from.into(),
        };
        let report = ConfigReport {
            status: ConfigStatus {
                files: vec!["/etc/sublet/config.toml".into()],
                errors: vec!["/etc/sublet/config.toml:3:1: unknown key".into()],
                watch: ConfigWatch::Polling,
                ..ConfigStatus::default()
            },
            job: Some("train".into()),
            user: "alice".into(),
            settings: vec![value("mem", "4GiB", "the job")],
            caps: vec![value("mem", "4GiB", "/etc/sublet/config.toml:1:1")],
            capped: vec![Capped {
                key: "mem".into(),
                asked: Some("8GiB".into()),
                given: "4GiB".into(),
                from: "/etc/sublet/config.toml:1:1".into(),
            }],
            totals: vec![value("jobs_max", "3", "/etc/sublet/config.toml:5:1")],
        };
        assert_eq!(
            text_of_report(&report, true),
            "\
quota file: /etc/sublet/config.toml
changes: looked for each second
quota file not in force: /etc/sublet/config.toml:3:1: unknown key

job `train` of alice:
SETTING  VALUE  FROM
mem      4GiB   the job
AT MOST  VALUE  FROM
mem      4GiB   /etc/sublet/config.toml:1:1
ALL JOBS  VALUE  FROM
jobs_max  3      /etc/sublet/config.toml:5:1
mem: 8GiB was asked for, and 4GiB is the most (/etc/sublet/config.toml:1:1)
"
        );
        let nothing = text_of_report(&ConfigReport::default(), false);
        assert!(nothing.contains("quota file: none") && nothing.ends_with("defaults\n"));
    }
}
