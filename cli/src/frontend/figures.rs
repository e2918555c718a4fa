//! A frontend's figures for Prometheus, in the format of OpenMetrics.

use std::fmt;

use cluster::frontend::Status;
use cluster::frontend::figures::BUCKETS;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _, NoLabelSet, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::{Registry, Unit};

/// As `Content-Type` has it.
pub const MEDIA: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// All of them.
pub fn exposition(status: &Status) -> String {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Figures(status.clone())));
    let mut written = String::new();
    // A `String` takes everything.
    let _ = text::encode(&mut written, &registry);
    written
}

#[derive(Debug)]
struct Figures(Status);

impl Collector for Figures {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let Self(status) = self;
        let seconds = Unit::Seconds;
        for (name, help, unit, value) in [
            (
                "agreed",
                "A response is in time within so long",
                Some(&seconds),
                status.within_s,
            ),
            (
                "agreed_part",
                "Part of the requests that has to be in time",
                None,
                status.level,
            ),
            (
                "rate",
                "Requests a second of all frontends, as this one sees it",
                None,
                status.rate_per_s,
            ),
            (
                "predicted_rate",
                "The same when an instance that is asked for now would be there",
                None,
                status.predicted_per_s,
            ),
            (
                "service",
                "Mean time of service; 0: not known yet",
                Some(&seconds),
                status.service_s.unwrap_or(0.0),
            ),
            (
                "return",
                "How long the memory of an instance takes to return",
                Some(&seconds),
                status.return_s,
            ),
            (
                "instances_in_use",
                "Instances that requests go to",
                None,
                f64::from(status.in_use),
            ),
            (
                "instances_ready",
                "Instances that are wanted ready, those in use included",
                None,
                f64::from(status.ready),
            ),
            // CAST: far below 2^53.
            (
                "waiting",
                "Requests that wait for an instance",
                None,
                status.waiting as f64,
            ),
            (
                "agreement_kept",
                "Whether the agreed part of the last minute's requests was in time",
                None,
                f64::from(u8::from(status.last_minute.is_met)),
            ),
            (
                "arbiter_up",
                "Whether the arbiter says where instances are",
                None,
                f64::from(u8::from(status.arbiter)),
            ),
        ] {
            let gauge = ConstGauge::new(value);
            let name = format!("sublet_frontend_{name}");
            let help = format!("{help}.");
            gauge.encode(encoder.encode_descriptor(&name, &help, unit, MetricType::Gauge)?)?;
        }
        let counts = &status.counts;
        for (name, help, value) in [
            ("requests", "Requests that were read whole", counts.requests),
            (
                "answered",
                "Requests that an instance answered",
                counts.answered,
            ),
            (
                "in_time",
                "Of these, those within the agreed time",
                counts.in_time,
            ),
            (
                "pruned",
                "Requests that were refused because they had waited too long",
                counts.pruned,
            ),
            (
                "failed",
                "Requests that no instance answered, or one with an error (5xx)",
                counts.failed,
            ),
            (
                "left",
                "Requests whose client had gone before the answer",
                counts.left,
            ),
            ("retries", "Tries at another instance", counts.retries),
        ] {
            let counter = ConstCounter::new(value);
            let name = format!("sublet_frontend_{name}");
            let help = format!("{help}.");
            counter.encode(encoder.encode_descriptor(
                &name,
                &help,
                None,
                MetricType::Counter,
            )?)?;
        }
        self.times(&mut encoder)?;
        self.instances(&mut encoder)
    }
}

impl Figures {
    fn times(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let Self(status) = self;
        let ends = BUCKETS.iter().map(|times| times * status.within_s);
        let ends = ends.chain([f64::MAX]);
        let buckets: Vec<(f64, u64)> = ends.zip(status.buckets.iter().copied()).collect();
        let mut times = encoder.encode_descriptor(
            "sublet_frontend_response",
            "From a request to the end of its answer.",
            Some(&Unit::Seconds),
            MetricType::Histogram,
        )?;
        let count = status.buckets.iter().sum();
        times.encode_histogram::<NoLabelSet>(status.sum_s, count, &buckets, None)
    }

    fn instances(&self, encoder: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let Self(status) = self;
        let mut states = encoder.encode_descriptor(
            "sublet_frontend_instance",
            "An instance, with what it is to this frontend and where its memory is.",
            None,
            MetricType::Info,
        )?;
        for one in &status.instances {
            let labels = [
                ("instance", one.name.as_str()),
                ("memory", one.memory.as_str()),
                ("role", one.role.as_str()),
            ];
            states.encode_info(&labels)?;
        }
        let mut requests = encoder.encode_descriptor(
            "sublet_frontend_instance_requests",
            "Requests that an instance was given by this frontend.",
            None,
            MetricType::Counter,
        )?;
        for one in &status.instances {
            let labels = [("instance", one.name.as_str())];
            let mut series = requests.encode_family(&labels)?;
            series.encode_counter::<NoLabelSet, _, u64>(&one.requests, None)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use cluster::frontend::InstanceStatus;

    use super::*;

    #[test]
    fn every_figure_is_there_and_buckets_add_up() {
        let status = Status {
            within_s: 0.2,
            level: 0.99,
            rate_per_s: 12.5,
            buckets: vec![1, 0, 0, 0, 2, 0, 0, 0, 0, 3],
            sum_s: 7.5,
            instances: vec![InstanceStatus {
                name: "a".into(),
                role: "in use".into(),
                memory: "resident".into(),
                requests: 9,
                ..InstanceStatus::default()
            }],
            ..Status::default()
        };
        let text = exposition(&status);
        for line in [
            "# TYPE sublet_frontend_rate gauge",
            "sublet_frontend_rate 12.5",
            "sublet_frontend_agreed_seconds 0.2",
            "sublet_frontend_requests_total 0",
            "sublet_frontend_response_seconds_count 6",
            "sublet_frontend_response_seconds_sum 7.5",
            "sublet_frontend_response_seconds_bucket{le=\"+Inf\"} 6",
            "sublet_frontend_response_seconds_bucket{le=\"0.2\"} 3",
            "sublet_frontend_instance_requests_total{instance=\"a\"} 9",
            "# EOF",
        ] {
            assert!(text.lines().any(|one| one == line), "{line}: {text}");
        }
        let info =
            "sublet_frontend_instance_info{instance=\"a\",memory=\"resident\",role=\"in use\"} 1";
        assert!(text.contains(info), "{text}");
    }
}
