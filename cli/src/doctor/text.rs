//! The report for people.

use control::short_bytes;
use serde_json::Value;

use super::Finding;

pub(super) fn of(report: &Value, findings: &[Finding]) -> String {
    let mut text = String::new();
    let mut line = |name: &str, value: String| text += &format!("{name:12}{value}\n");
    let word = |value: &Value| value.as_str().unwrap_or("-").to_owned();
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let bytes = |value: &Value| value.as_u64().map_or("-".into(), short_bytes);
    line(
        "sublet",
        format!(
            "{}, library {}",
            word(&report["sublet"]["version"]),
            word(&report["sublet"]["library"])
        ),
    );
    let driver = &report["driver"];
    let kind = if driver["simulated"] == true {
        "simulated"
    } else {
        "real"
    };
    line(
        "driver",
        format!(
            "{} ({kind}, CUDA {})",
            word(&driver["path"]),
            word(&driver["cuda_version"])
        ),
    );
    for device in list(&report["devices"]) {
        let mig = if device["mig"] == true { ", MIG" } else { "" };
        line(
            "device",
            format!(
                "GPU {}: {}, {}, {} of {} free{mig}, {} processes",
                device["index"],
                word(&device["name"]),
                word(&device["uuid"]),
                bytes(&device["free_bytes"]),
                bytes(&device["total_bytes"]),
                list(&device["processes"]).len()
            ),
        );
    }
    match report["arbiter"].as_object() {
        Some(arbiter) => line(
            "arbiter",
            format!(
                "pid {}, version {}, at {}",
                arbiter["pid"],
                word(&arbiter["version"]),
                word(&arbiter["runtime_dir"])
            ),
        ),
        None => line("arbiter", "none runs; `sublet run` starts one".into()),
    }
    line(
        "quota file",
        report["quota_file"].as_str().unwrap_or("none").into(),
    );
    for quota in list(&report["quotas"]) {
        line(
            "quota",
            format!(
                "{}: {} of {} used, share {}, {}",
                word(&quota["job"]),
                bytes(&quota["mem_used_bytes"]),
                quota["mem_limit_bytes"]
                    .as_u64()
                    .map_or("the whole device".into(), short_bytes),
                quota["share"]
                    .as_f64()
                    .map_or("as it comes".into(), |share| share.to_string()),
                word(&quota["class"])
            ),
        );
    }
    for said in list(&report["asked"]) {
        let counts = if said["counts"] == true {
            ""
        } else {
            " (does not count)"
        };
        line(
            "asked",
            format!(
                "{} by {}={}{counts}",
                word(&said["setting"]),
                word(&said["variable"]),
                word(&said["value"])
            ),
        );
    }
    let mps = &report["mps"];
    if mps["daemon_pid"].is_number() || mps["listens"] == true {
        line(
            "MPS",
            format!(
                "daemon {}, at {}",
                mps["daemon_pid"],
                word(&mps["pipe_directory"])
            ),
        );
    } else {
        line("MPS", "no daemon".into());
    }
    line(
        "container",
        report["container"].as_str().unwrap_or("no").into(),
    );
    let command = &report["command"];
    if command.is_object() {
        let words: Vec<String> = list(&command["words"]).iter().map(word).collect();
        let ended = match (command["exit_code"].as_i64(), command["signal"].as_i64()) {
            (Some(code), _) => format!("exit code {code}"),
            (None, Some(signal)) => format!("ended by signal {signal}"),
            (None, None) => "ended".into(),
        };
        line("command", format!("{} ({ended})", words.join(" ")));
        let received = command["calls_received"]
            .as_u64()
            .map_or(String::new(), |calls| {
                format!(" of {calls} that the driver received")
            });
        line(
            "calls",
            format!(
                "{} seen{received}, of {} functions, by {} processes",
                command["calls_seen"], command["functions_seen"], command["processes"]
            ),
        );
        let ways = &command["ways_in"];
        line(
            "ways in",
            format!(
                "{} answers of cuGetProcAddress, {} look-ups in the driver, {} names redirected",
                ways["answers"], ways["look_ups"], ways["redirected"]
            ),
        );
        line(
            "complete",
            if command["complete"] == true {
                "yes: nothing went past the library".into()
            } else {
                format!("NO: {} escapes", list(&command["escapes"]).len())
            },
        );
    }
    for finding in findings {
        text += &format!("{}: {}\n", finding.level.as_str(), finding.text);
    }
    text
}
