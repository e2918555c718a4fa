//! The same as JSON: one object, units in the names.

use serde_json::{Value, json};

use super::columns;
use super::model::{Device, Job, Model};

/// What is known now. Names do not change; new ones may come.
pub fn object(model: &Model, unix_ms: u64) -> Value {
    // CAST: below 2^53.
    let seconds = |ms: u64| ms as f64 / 1000.0;
    let arbiter = match (&model.arbiter, &model.lost) {
        (Some(arbiter), None) => json!({
            "pid": arbiter.pid,
            "version": arbiter.version,
            "uptime_s": seconds(arbiter.uptime_ms),
            "host_memory_used_bytes": arbiter.host_memory_used_bytes,
            "host_memory_limit_bytes": arbiter.host_memory_limit_bytes,
        }),
        _ => Value::Null,
    };
    let is_there = !arbiter.is_null();
    let jobs = model.jobs.iter().filter(|_| is_there).map(job);
    let devices = model.devices.iter().filter(|_| is_there).map(device);
    json!({
        "unix_ms": unix_ms,
        "interval_s": model.interval_ms.map(seconds),
        "arbiter": arbiter,
        "no_answer": model.lost,
        "devices": devices.collect::<Vec<_>>(),
        "jobs": jobs.collect::<Vec<_>>(),
    })
}

fn device(device: &Device) -> Value {
    let status = &device.status;
    json!({
        "index": status.index,
        "uuid": status.uuid,
        "name": status.name,
        "simulated": status.simulated,
        "total_bytes": status.total_bytes,
        "used_bytes": device.used_bytes,
        "busy_fraction": status.busy_fraction,
        "policy": status.policy,
        "mode": status.mode,
        "running": status.running,
        "holders": status.holders,
        "unmanaged_count": status.unmanaged.len(),
        "power_w": status.power_mw.map(|mw| mw as f64 / 1000.0),
        "temperature_celsius": status.temperature_celsius,
        "sm_used_fraction": status.sm_used_fraction,
    })
}

fn job(job: &Job) -> Value {
    let status = &job.status;
    let devices: Vec<u32> = status.devices.iter().map(|device| device.index).collect();
    json!({
        "name": status.name,
        "id": status.id,
        "user": columns::user_of(job),
        "uid": status.uid,
        "class": status.class,
        "state": columns::state_of(job),
        "devices": devices,
        "share_asked": status.share_asked,
        "share_got": job.share_got,
        "mem_used_bytes": status.mem_used_bytes,
        "mem_limit_bytes": status.mem_limit_bytes,
        "mem_evicted_bytes": job.evicted_bytes(),
        "in_flight_marks": status.in_flight_marks,
        "launches_per_s": job.launches_per_s,
        "iteration_ns": job.iteration_ns(),
        "slowdown": job.slowdown(),
        "oom_count": status.oom_count,
        "process_count": status.processes.len(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::top::sample;

    #[test]
    fn what_is_not_known_is_null_and_an_absent_arbiter_leaves_lists_empty() {
        let empty = object(&Model::default(), 5);
        assert_eq!(empty["unix_ms"], 5);
        assert!(empty["arbiter"].is_null() && empty["interval_s"].is_null());
        assert_eq!(empty["jobs"], json!([]));

        let mut model = sample::model();
        let full = object(&model, 5);
        assert_eq!(full["interval_s"], 1.0);
        assert_eq!(full["jobs"][0]["name"], "train");
        assert_eq!(full["jobs"][0]["share_got"], 0.5);
        assert!(full["jobs"][1]["iteration_ns"].is_null());
        assert_eq!(full["devices"][0]["power_w"], 412.5);
        assert!(full["devices"][1]["power_w"].is_null());

        model.lose("gone".into());
        let lost = object(&model, 5);
        assert_eq!(lost["no_answer"], "gone");
        assert!(lost["arbiter"].is_null());
        assert_eq!((&lost["jobs"], &lost["devices"]), (&json!([]), &json!([])));
    }

    #[test]
    fn the_page_has_every_field() {
        let page = include_str!("../../../docs/how-to/top.md");
        let object = object(&sample::model(), 0);
        let parts = [
            &object,
            &object["arbiter"],
            &object["devices"][0],
            &object["jobs"][0],
        ];
        for part in parts {
            for name in part.as_object().unwrap().keys() {
                assert!(
                    page.contains(&format!("`{name}`")),
                    "docs/how-to/top.md: {name}"
                );
            }
        }
    }
}
